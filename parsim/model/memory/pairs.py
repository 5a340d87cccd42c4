"""Sizes of what compares every sample of a batch with every other, from three batches.

Such a size is fixed + rate * samples + pairs * samples ** 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parsim.errors import TraceError
from parsim.model.memory.peaks import Peaks, Recorded, counted_moments, upper_envelope


class SquareSize(NamedTuple):
    """Of one size."""

    fixed: int
    rate: int
    pairs: int


def compares_samples(less: Sequence[int], more: Sequence[int], batches: tuple[int, int]) -> bool:
    """Whether one of the sizes at two batches grows with the square of the batch.

    Args:
        less, more: bytes of the same storages at the smaller and the larger batch.
    """
    small, large = batches
    return len(less) == len(more) and any(
        one and one * large * large == other * small * small for one, other in zip(less, more, strict=True)
    )


def square_size(sizes: Sequence[int], batches: Sequence[int], what: str) -> SquareSize:
    """The one parabola through three sizes.

    Args:
        sizes: at the batches, which are equally far apart. what: has them, for messages.

    Raises:
        TraceError: the sizes are not of this form.
    """
    first, step = batches[0], batches[1] - batches[0]
    pairs, rest = divmod(sizes[2] - 2 * sizes[1] + sizes[0], 2 * step * step)
    slope, more = divmod(sizes[1] - sizes[0], step)
    rate = slope - pairs * (batches[0] + batches[1])
    if rest or more:
        raise TraceError(
            f"{what} takes {', '.join(map(str, sizes))} bytes at batches {', '.join(map(str, batches))}: neither linear in the "
            "batch nor with pairs of samples; keep samples independent of one another in the forward"
        )
    return SquareSize(sizes[0] - rate * first - pairs * first * first, rate, pairs)


def square_peaks(runs: Sequence[Recorded], name: str) -> tuple[Peaks, Peaks, tuple[int, int]]:
    """Forward and backward moments of a component as recorded at three batches, and the most that pairs add to either.

    Empty where the recordings differ in more than the batch.
    """
    counted = [(each.forward, each.backward) for each in map(counted_moments, runs)]
    batches = [run.samples for run in runs]
    peaks: list[Peaks] = []
    most: list[int] = []
    for lists in zip(*counted, strict=True):
        alike = len({len(entry) for entry in lists}) == 1
        sizes = [square_size(at, batches, f"a moment of {name}") for at in zip(*lists, strict=True)] if alike else []
        peaks.append(upper_envelope({(size.rate, size.fixed) for size in sizes}))
        most.append(max((0, *(size.pairs for size in sizes))))
    return peaks[0], peaks[1], (most[0], most[1])
