"""By how much computation takes longer after its rank has waited for communication.

Its data has left the caches by then, and an idle core has to wake up. On a 2-core virtual machine every component took
0.04 to 0.25 ms longer after an exchange (2026-11-21, six models, 4 KiB to 1 MiB). Larger messages cost more. Tensor
parallelism and pipelines wait before most of their components.

On a CPU seconds of the processor count: ranks that share a core take turns at it, and how long one waits for it says nothing of
its work. Handing the communication over is part of them, which the thread that computes does; the wait is the communication's.
On a GPU the events of each computation count, which the host has queued before the device begins with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from calibration.measure.collectives import COLLECTIVES, Bench
from calibration.measure.components import Case
from calibration.rounds.turns import in_turn
from parsim.execute.streams import Operation
from parsim.program.task import COMPUTE
from parsim.units import KIB

SIZE_BYTES = 256 * KIB
PAIRS = 4
"""Of a step with pauses and one without, in turn."""


def measure_resume(case: Case, bench: Bench) -> list[dict[str, Any]]:
    """What this rank's computations took longer after an exchange with all others, median of a few pairs of steps; called by
    every rank.

    One entry: model, samples, seconds (per computation; where noise hides it, less than 0).
    """
    call = COLLECTIVES["all_reduce"](bench, SIZE_BYTES, bench.everyone)
    pairs = in_turn(PAIRS, partial(_computing, case, bench, None), partial(_computing, case, bench, call))
    longer_s = statistics.median(resumed_s(plain, paused) for plain, paused in pairs)
    return [{"model": case.number, "samples": case.samples, "seconds": longer_s}]


def _computing(case: Case, bench: Bench, before: Operation | None) -> list[float]:
    """Seconds of every computation of one step."""
    dist.barrier(group=bench.everyone)
    case.streams.before = before
    try:
        tasks = case.step(held=case.on_gpu).tasks
    finally:
        case.streams.before = None
    if bench.device.type == "cuda":
        ordered = sorted((entry for entry in tasks if entry.stream == COMPUTE), key=lambda entry: entry.ready_s)
        return [entry.end_s - entry.ready_s for entry in ordered]
    return case.streams.computed_s


def resumed_s(plain: Sequence[float], paused: Sequence[float]) -> float:
    """Seconds per computation by which a step with pauses took longer than one without; the first one never waits."""
    return (sum(paused[1:]) - sum(plain[1:])) / max(1, len(paused) - 1)
