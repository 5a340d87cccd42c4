"""How much computation and communication of one rank slow each other down while both run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from calibration.measure_collectives import COLLECTIVES, Bench, merged_seconds
from calibration.measure_components import Case
from calibration.request import CalibrationRequest
from calibration.turns import WARM_UP, Entries, Section
from parsim.execute.streams import TaskTime, make_streams
from parsim.units import KIB, MIB

SIZES_BYTES = (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
QUICK_SIZES_BYTES = (MIB, 4 * MIB)
OTHERS_BYTES = (256 * KIB, 8 * MIB)
"""Sizes at which operations other than all_reduce run beside computation; not in a quick calibration."""

ALONE_STEPS, MIN_TOGETHER_STEPS, MAX_TOGETHER_STEPS, ALONE_CALLS = 3, 3, 12, 6
MIN_CALLS, MAX_CALLS = 4, 2000


def overlap_section(cases: Sequence[Case], bench: Bench, request: CalibrationRequest) -> Section | None:
    """Steps of one model after the other, at its middle batch, beside every size; None with one rank.

    Entries of `overlap`, rank 0's alone: see `measure_overlap`.
    """
    if bench.world_size == 1:
        return None
    chosen = []
    for number in range(len(request.measured_models)):
        own = sorted((case for case in cases if case.number == number), key=lambda case: case.samples)
        chosen.append(own[len(own) // 2])
    beside = beside_steps(bench, quick=request.quick)

    def measure(number: int) -> Entries:
        if number == WARM_UP:
            return {}
        case = chosen[number % len(chosen)]
        results = [measure_overlap(case, bench, operation, size_bytes) for operation, size_bytes in beside]
        return {"overlap": [result for result in results if result is not None]}

    return Section(
        name="overlap",
        budget_s=request.budgets_s["overlap"],
        min_rounds=len(chosen),
        max_rounds=request.max_rounds,
        measure=measure,
    )


def beside_steps(bench: Bench, *, quick: bool) -> tuple[tuple[str, int], ...]:
    """(operation, size) of what runs beside steps, as far as the arrays of the bench reach."""
    pairs = [("all_reduce", size) for size in (QUICK_SIZES_BYTES if quick else SIZES_BYTES)]
    if not quick:
        pairs += [(operation, size) for operation in COLLECTIVES if operation != "all_reduce" for size in OTHERS_BYTES]
    room = bench.scratch.numel() * bench.dtype.itemsize // 2
    return tuple((operation, size) for operation, size in pairs if size <= room)


def measure_overlap(case: Case, bench: Bench, operation: str, size_bytes: int) -> dict[str, Any] | None:
    """Factors of one model's steps beside one operation of one size, on rank 0 (None elsewhere); called by every rank.

    Steps and calls are timed alone, then together; of the latter only tasks count that lie wholly within the other's time.
    """
    everyone = tuple(range(bench.world_size))
    group = bench.dp[everyone]
    assert group is not None, "every rank is a member of the group of all"
    call = COLLECTIVES[operation](bench, size_bytes, group)
    steps_alone = _run(case, bench, group, steps=ALONE_STEPS, calls=0, call=call)
    calls_alone = _run(case, bench, group, steps=0, calls=ALONE_CALLS, call=call)
    step_s = statistics.median(step.wall_s for step in steps_alone["steps"])
    call_s = statistics.median(entry.end_s - entry.ready_s for entry in calls_alone["calls"])
    steps, calls = _agreed(*side_by_side(step_s, call_s), bench)
    together = _run(case, bench, group, steps=steps, calls=calls, call=call)
    mine = {"steps_alone": steps_alone, "calls_alone": calls_alone, "together": together}
    gathered: list[Any] = [None] * bench.world_size
    dist.gather_object(mine, gathered if bench.rank == 0 else None)
    if bench.rank != 0:
        return None
    computing = [
        computation_factor([step.tasks for step in entry["steps_alone"]["steps"]], entry["together"]) for entry in gathered
    ]
    communicating = seconds_beside([entry["together"] for entry in gathered])
    return {
        "model": case.number,
        "samples": case.samples,
        "operation": operation,
        "group_size": bench.world_size,
        "size_bytes": size_bytes,
        "computation": computing,
        "communication_s": communicating,
    }


def side_by_side(step_s: float, call_s: float) -> tuple[int, int]:
    """How many steps and calls run together so that each takes about as long as the other, and neither is too few."""
    steps = min(MAX_TOGETHER_STEPS, max(MIN_TOGETHER_STEPS, math.ceil(MIN_CALLS * call_s / step_s)))
    return steps, min(MAX_CALLS, max(MIN_CALLS, int(steps * step_s / call_s)))


def _agreed(steps: int, calls: int, bench: Bench) -> tuple[int, int]:
    counts = torch.tensor([steps, calls], device=bench.device)
    dist.broadcast(counts, src=0)
    return int(counts[0]), int(counts[1])


def _run(case: Case, bench: Bench, group: dist.ProcessGroup, *, steps: int, calls: int, call: Any) -> dict[str, Any]:
    """Issue the calls on a communication stream, and run the steps meanwhile; the first step and call warm up."""
    streams = make_streams(bench.device)
    try:
        dist.barrier(group=group)
        for number in range(calls):
            streams.submit(number, "dp", [], call)
        done = [case.step() for _ in range(steps)]
        ended = sorted(streams.finish())
    finally:
        streams.close()
    return {"steps": done, "calls": ended, "now_s": time.perf_counter()}


def computation_factor(alone: Sequence[Sequence[TaskTime]], together: dict[str, Any]) -> float | None:
    """Time of the tasks that ran wholly beside communication, over the time the same tasks take alone (means)."""
    if not together["calls"]:
        return None
    begin_s = together["calls"][0].ready_s
    end_s = together["calls"][-1].end_s
    usual: dict[int, list[float]] = {}
    for times in alone[1:]:
        for entry in times:
            usual.setdefault(entry.task, []).append(entry.end_s - entry.ready_s)
    beside = [entry for step in together["steps"] for entry in step.tasks if entry.ready_s >= begin_s and entry.end_s <= end_s]
    expected = sum(statistics.mean(usual[entry.task]) for entry in beside)
    return sum(entry.end_s - entry.ready_s for entry in beside) / expected if expected > 0 else None


def seconds_beside(together: Sequence[dict[str, Any]]) -> list[float]:
    """Of the calls that ran wholly beside computation on every rank."""
    begin_s = max(min(entry.ready_s for step in rank["steps"] for entry in step.tasks) for rank in together)
    end_s = min(max(entry.end_s for step in rank["steps"] for entry in step.tasks) for rank in together)
    calls = [list(rank["calls"]) for rank in together]
    merged = merged_seconds([[times] for times in calls], len(calls[0]))[0]
    return [
        seconds
        for number, seconds in enumerate(merged)
        if all(times[number].ready_s >= begin_s and times[number].end_s <= end_s for times in calls)
    ]
