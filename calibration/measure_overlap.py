"""How much computation and communication of one rank slow each other down while both run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from calibration.measure_collectives import Bench, merged_seconds
from calibration.measure_components import Case
from parsim.execute.streams import TaskTime, make_streams

ALONE_STEPS, TOGETHER_STEPS, ALONE_CALLS = 4, 3, 8
MAX_CALLS = 2000


def measure_overlap(case: Case, bench: Bench, size_bytes: int) -> dict[str, Any] | None:
    """Factors of one model's steps beside all_reduces of one size, on rank 0 (None elsewhere); called by every rank.

    Steps and calls are timed alone, then together; of the latter only tasks count that lie wholly within the other's time.
    """
    everyone = tuple(range(bench.world_size))
    group = bench.dp[everyone]
    assert group is not None, "every rank is a member of the group of all"
    array = torch.zeros(bench.elements(size_bytes), dtype=bench.dtype, device=bench.device)
    call = partial(_all_reduce, array, group)
    steps_alone = _run(case, bench, group, steps=ALONE_STEPS, calls=0, call=call)
    calls_alone = _run(case, bench, group, steps=0, calls=ALONE_CALLS, call=call)
    step_s = statistics.median(step.wall_s for step in steps_alone["steps"])
    call_s = statistics.median(entry.end_s - entry.ready_s for entry in calls_alone["calls"])
    calls = _agreed(min(MAX_CALLS, max(4, int(TOGETHER_STEPS * step_s / call_s))), bench)
    together = _run(case, bench, group, steps=TOGETHER_STEPS, calls=calls, call=call)
    mine = {"steps_alone": steps_alone, "calls_alone": calls_alone, "together": together}
    gathered: list[Any] = [None] * bench.world_size
    dist.gather_object(mine, gathered if bench.rank == 0 else None)
    if bench.rank != 0:
        return None
    computing = [
        computation_factor([step.tasks for step in entry["steps_alone"]["steps"]], entry["together"]) for entry in gathered
    ]
    communicating = communication_factor(
        [entry["calls_alone"]["calls"] for entry in gathered], [entry["together"] for entry in gathered]
    )
    return {"model": case.number, "samples": case.samples, "size_bytes": size_bytes, "computation": computing} | {
        "communication": communicating
    }


def _all_reduce(array: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(array, group=group)


def _agreed(count: int, bench: Bench) -> int:
    tensor = torch.tensor([count], device=bench.device)
    dist.broadcast(tensor, src=0)
    return int(tensor.item())


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
    """Time of the tasks that ran wholly beside communication, over the time the same tasks take alone (medians)."""
    if not together["calls"]:
        return None
    begin_s = together["calls"][0].ready_s
    end_s = together["calls"][-1].end_s
    usual: dict[int, list[float]] = {}
    for times in alone[1:]:
        for entry in times:
            usual.setdefault(entry.task, []).append(entry.end_s - entry.ready_s)
    beside = [entry for step in together["steps"] for entry in step.tasks if entry.ready_s >= begin_s and entry.end_s <= end_s]
    expected = sum(statistics.median(usual[entry.task]) for entry in beside)
    return sum(entry.end_s - entry.ready_s for entry in beside) / expected if expected > 0 else None


def communication_factor(alone: Sequence[Sequence[TaskTime]], together: Sequence[dict[str, Any]]) -> float | None:
    """Median time of the calls that ran wholly beside computation on every rank, over the median alone."""
    begin_s = max(min(entry.ready_s for step in rank["steps"] for entry in step.tasks) for rank in together)
    end_s = min(max(entry.end_s for step in rank["steps"] for entry in step.tasks) for rank in together)
    usual = merged_seconds([[list(times)] for times in alone], len(alone[0]))[0][1:]
    calls = [list(rank["calls"]) for rank in together]
    merged = merged_seconds([[times] for times in calls], len(calls[0]))[0]
    beside = [
        seconds
        for number, seconds in enumerate(merged)
        if all(times[number].ready_s >= begin_s and times[number].end_s <= end_s for times in calls)
    ]
    return statistics.median(beside) / statistics.median(usual) if beside else None
