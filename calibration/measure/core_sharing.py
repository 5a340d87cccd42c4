"""By how much computation takes longer where ranks share cores, beyond taking turns at them.

Ranks that take turns find less of their own data in the caches, the more ranks there are. On a 2-core virtual machine
training steps of four ranks took 0 to 8% more processor seconds each than those of two ranks with a core each
(2026-11-22).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from calibration.measure.collectives import Bench
from calibration.measure.components import Case
from calibration.rounds.turns import in_turn

PAIRS = 4
"""Of a step of a rank on every core and one of all ranks, in turn."""


def measure_core_sharing(case: Case, bench: Bench) -> list[dict[str, Any]]:
    """How many times as many processor seconds this rank's computation took with all ranks as with one on every core; called by
    every rank. Nothing on the ranks beyond the cores, or where each has one.

    One entry: model, samples, ratio.
    """
    if bench.world_size <= bench.cores:
        return []
    pairs = in_turn(
        PAIRS, partial(_computing_s, case, bench, bench.cores), partial(_computing_s, case, bench, bench.world_size)
    )
    if bench.rank >= bench.cores:
        return []
    return [{"model": case.number, "samples": case.samples, "ratio": core_sharing_factor(pairs)}]


def _computing_s(case: Case, bench: Bench, active: int) -> float:
    """Processor seconds of the computations of one step, of the first `active` ranks at once; the others wait, and say 0."""
    dist.barrier(group=bench.everyone)
    computed_s = 0.0
    if bench.rank < active:
        case.step()
        computed_s = sum(case.streams.computed_s)
    dist.barrier(group=bench.everyone)
    return computed_s


def core_sharing_factor(pairs: Sequence[tuple[float, float]]) -> float:
    """The geometric mean of the ratios of (uncrowded, crowded) seconds."""
    return statistics.geometric_mean(many / few for few, many in pairs)
