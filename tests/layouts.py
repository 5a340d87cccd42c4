"""What every tp rank holds of an array in a layout, straight from the definition; the oracle of the tests of hops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsim.plans.layouts import Hop, ValueLayout, conversion

Array = NDArray[Any]


def layouts(tp: int, *, readable: bool) -> list[ValueLayout]:
    """Every layout over `tp` ranks (shards along dims 1 and 2); with `readable` only those a conversion can end in."""
    divisors = [ways for ways in range(1, tp + 1) if tp % ways == 0]
    found = [ValueLayout("full", ways) for ways in divisors]
    found += [ValueLayout("shard", ways, dim=dim) for ways in divisors if ways > 1 for dim in (1, 2)]
    found += [ValueLayout("placed", tp, rank=rank) for rank in range(tp)]
    made = [ValueLayout(form, ways) for form in ("partial", "maximum") for ways in divisors if ways > 1]
    return found if readable else found + made


def whole_array(tp: int, seed: int = 0) -> Array:
    """Small integers in doubles, so that sums are exact in any order; every dim can be cut into `tp`."""
    return np.random.default_rng(seed).integers(-99, 99, (2 * tp, tp, 3 * tp)).astype(np.float64)


def held(whole: Array, layout: ValueLayout, tp: int) -> list[Array | None]:
    """Per tp rank what it holds. The summands of a partial are drawn: all but the last, which makes up the sum.

    Of maxima every entry is the largest on one rank, and less on the others.
    """
    if layout.form == "placed":
        return [whole if rank == layout.rank else None for rank in range(tp)]
    pieces = np.split(whole, tp // layout.ways)
    found: list[Array | None] = []
    for number, piece in enumerate(pieces):
        match layout.form:
            case "full":
                found += [piece] * layout.ways
            case "shard":
                found += np.split(piece, layout.ways, axis=layout.dim)
            case "maximum":
                found += [np.where(_owner(piece, layout.ways) == way, piece, piece - 1 - way) for way in range(layout.ways)]
            case _:
                summands = [whole_array(tp, 7 * number + way + 1)[: len(piece)] for way in range(layout.ways - 1)]
                found += [*summands, piece - sum(summands)]
    return found


def _owner(piece: Array, ways: int) -> Array:
    """Which of `ways` ranks has the largest of each entry."""
    return np.arange(piece.size).reshape(piece.shape) % ways


def every_hop(tp: int) -> dict[Hop, None]:
    """Each hop that some conversion over `tp` ranks takes."""
    return {
        hop: None
        for source in layouts(tp, readable=False)
        for target in layouts(tp, readable=True)
        for hop in conversion(source, target, tp)
    }
