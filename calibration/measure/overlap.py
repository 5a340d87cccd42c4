"""How computation and communication of one rank slow each other down; how sharing cores and waiting slow computation."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from calibration.measure.collectives import COLLECTIVES, Bench, merged_seconds
from calibration.measure.components import Case
from calibration.rounds.request import CalibrationRequest
from calibration.rounds.turns import WARM_UP, CalibrationSection, Entries, in_turn, paced_together
from parsim.execute.cuda.driver import driver_of
from parsim.execute.processes.exchange import gather_values
from parsim.execute.processes.speed_probe import SpeedProbe
from parsim.execute.rank_run import make_streams
from parsim.execute.streams import Operation, TaskTime
from parsim.program.taskgraph import COMPUTE
from parsim.units import KIB, MIB
from parsim.work import COLLECTIVES as OPERATIONS

SIZES_BYTES = (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
QUICK_SIZES_BYTES = (MIB, 4 * MIB)
OTHERS_BYTES = (256 * KIB, 8 * MIB)
"""Sizes at which operations other than all_reduce run beside computation; not in a quick calibration."""

PAIRS = 3
"""Pairs of steps alone and steps beside calls, in turn: the machine's speed is another one a second later."""

PAUSE_S = 0.002
"""Between two calls beside steps (not on CUDA, where the host would wait): as buckets come, when their gradients are there. The
threads that communicate have gone to sleep by then, and what they touch has left the caches."""

QUEUED_CALLS = 128
"""Beside steps of a GPU at most. They are queued before the steps begin, and a queue holds about a thousand launches and
events."""

QUEUEING_S = 2e-4
"""More than a host needs to queue one of them. A collective between GPUs of one machine may take less."""

ALONE_STEPS, ALONE_CALLS = 2, 3
MIN_CALLS, MAX_CALLS, MAX_STEPS = 3, 2000, 12
MOST_HELD = 0.98
"""The largest share of a call's time during which computation may be counted as standing still."""


def overlap_section(
    cases: Sequence[Case], bench: Bench, request: CalibrationRequest, probe: SpeedProbe | None
) -> CalibrationSection | None:
    """Steps of one model after the other, at its middle batch, beside every size; None with one rank.

    Entries of `overlap`, rank 0's alone: see `measure_overlap`; of `resume`: see `measure_resume`; and of `crowding`: see
    `measure_core_sharing`.
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
        blocks = [partial(measure_overlap, case, bench, operation, size_bytes) for operation, size_bytes in beside]
        (resumed,) = paced_together([partial(measure_resume, case, bench)], probe)
        crowded = measure_core_sharing(case, bench)
        return {"overlap": paced_together(blocks, probe), "resume": [resumed], "crowding": crowded}

    return CalibrationSection(
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
        others = [operation for operation in OPERATIONS if operation in COLLECTIVES and operation != "all_reduce"]
        pairs += [(operation, size) for operation in others for size in OTHERS_BYTES]
    room = bench.scratch.numel() * bench.dtype.itemsize // 2
    return tuple((operation, size) for operation, size in pairs if size <= room)


def measure_overlap(case: Case, bench: Bench, operation: str, size_bytes: int) -> list[dict[str, Any]]:
    """Factors of one model's steps beside one operation of one size, on rank 0 (none elsewhere); called by every rank.

    Pairs of steps alone and as many beside calls, one after the other; of the calls only those count that lie wholly within
    the steps of all ranks.
    """
    call = COLLECTIVES[operation](bench, size_bytes, bench.everyone)
    pause_s = 0.0 if bench.device.type == "cuda" else PAUSE_S
    warm = _run(case, bench, steps=ALONE_STEPS, calls=0, call=call, pause_s=0.0)
    calls_alone = _run(case, bench, steps=0, calls=ALONE_CALLS, call=call, pause_s=0.0)
    call_s = pause_s + statistics.median(entry.end_s - entry.ready_s for entry in calls_alone.calls)
    most = QUEUED_CALLS if bench.device.type == "cuda" else MAX_CALLS
    steps, calls = _agreed(*side_by_side(warm.wall_s, call_s, most), bench)
    beside_calls = partial(_run, case, bench, steps=steps, call=call, pause_s=pause_s)
    pairs = in_turn(PAIRS, partial(beside_calls, calls=0), partial(beside_calls, calls=calls))
    gathered = [[(_ran(alone), _ran(together)) for alone, together in rank] for rank in gather_values(pairs)]
    if bench.rank != 0:
        return []
    beside = [[together for _, together in rank] for rank in gathered]
    entry = {
        "model": case.number,
        "samples": case.samples,
        "operation": operation,
        "group_size": bench.world_size,
        "size_bytes": size_bytes,
        "computation": [computation_factor(rank, beside) for rank in gathered],
        "communication_s": [seconds for ran in zip(*beside, strict=True) for seconds in seconds_beside(ran)],
    }
    return [entry]


def side_by_side(step_s: float, call_s: float, most: int = MAX_CALLS) -> tuple[int, int]:
    """How many steps and calls run together so that each takes about as long as the other, and neither is too few.

    Args: most: calls.
    """
    steps = min(MAX_STEPS, max(1, math.ceil(MIN_CALLS * call_s / step_s)))
    return steps, min(most, max(MIN_CALLS, int(steps * step_s / call_s)))


def _agreed(steps: int, calls: int, bench: Bench) -> tuple[int, int]:
    counts = torch.tensor([steps, calls], device=bench.device)
    dist.broadcast(counts, src=0)
    return int(counts[0]), int(counts[1])


class Ran(NamedTuple):
    """What one rank did: the tasks of its steps, and the calls meanwhile. wall_s: of the last step; 0 where there is none."""

    steps: list[list[TaskTime]]
    calls: list[TaskTime]
    wall_s: float = 0.0

    @property
    def window_s(self) -> tuple[float, float]:
        """From the first task of the steps to the end of the last."""
        entries = [entry for step in self.steps for entry in step]
        return min(entry.ready_s for entry in entries), max(entry.end_s for entry in entries)


def _ran(given: Sequence[Any]) -> Ran:
    """From the plain lists in which another rank's arrives."""
    steps, calls, wall_s = given
    return Ran([_times(tasks) for tasks in steps], _times(calls), wall_s)


def _times(entries: Sequence[Sequence[Any]]) -> list[TaskTime]:
    return [TaskTime(*entry) for entry in entries]


def _run(case: Case, bench: Bench, *, steps: int, calls: int, call: Operation, pause_s: float) -> Ran:
    """Issue the calls on a communication stream, each after a pause, and run the steps meanwhile.

    On a GPU a short call ends before the host has queued the next one, so all would have ended before the first step began.
    Calls beside steps therefore wait, as the steps do, for a kernel that holds the computation while they are queued.
    """
    streams, driver = make_streams(bench.device), driver_of(bench.device)
    held = driver is not None and steps > 0 and calls > 0
    try:
        dist.barrier(group=bench.everyone)
        if driver is not None and held:
            streams.compute(0, COMPUTE, [], partial(driver.hold, calls * QUEUEING_S))
        for number in range(calls):
            if pause_s:
                streams.submit(2 * number, "dp", [], lambda: time.sleep(pause_s))
            streams.submit(2 * number + 1, "dp", [0] if held and number == 0 else [], call)
        done = [case.step() for _ in range(steps)]
        ended = sorted(entry for entry in streams.finish() if entry.task % 2)
    finally:
        streams.close()
    return Ran([step.tasks for step in done], ended, done[-1].wall_s if done else 0.0)


def computation_factor(pairs: Sequence[tuple[Ran, Ran]], beside: Sequence[Sequence[Ran]]) -> float | None:
    """How much longer computation takes while it and a call both run: 1 / (1 - share). The share is the time that the steps of
    one rank lost beside calls, over the time that calls took within them.

    pairs: (steps alone, steps beside calls) of the rank. beside: [rank][pair], what all ranks did beside calls: a call begins
    when its last rank is ready, before that the early ones only wait.
    """
    lost_s = called_s = 0.0
    for number, (alone, together) in enumerate(pairs):
        begin_s, end_s = together.window_s
        lost_s += (end_s - begin_s) - (alone.window_s[1] - alone.window_s[0])
        for each in zip(*(rank[number].calls for rank in beside), strict=True):
            start_s, stop_s = max(entry.ready_s for entry in each), max(entry.end_s for entry in each)
            called_s += max(0.0, min(stop_s, end_s) - max(start_s, begin_s))
    return 1.0 / (1.0 - min(MOST_HELD, lost_s / called_s)) if called_s > 0 else None


def seconds_beside(together: Sequence[Ran]) -> list[float]:
    """Seconds of the calls that ran wholly beside computation on every rank. Args: together: [rank], of one pair."""
    begin_s = max(rank.window_s[0] for rank in together)
    end_s = min(rank.window_s[1] for rank in together)
    calls = [rank.calls for rank in together]
    merged = merged_seconds([[times] for times in calls], len(calls[0]))[0]
    return [
        seconds
        for number, seconds in enumerate(merged)
        if all(times[number].ready_s >= begin_s and times[number].end_s <= end_s for times in calls)
    ]


SHARING_PAIRS = 4
"""Pairs of a step of a rank on every core and one of all ranks, in turn. Ranks that take turns find less of their own data in
the caches, the more ranks there are. On a 2-core virtual machine training steps of four ranks took 0 to 8% more processor
seconds each than those of two ranks with a core each (2026-11-22)."""


def measure_core_sharing(case: Case, bench: Bench) -> list[dict[str, Any]]:
    """How many times as many processor seconds this rank's computation took with all ranks as with one on every core; called by
    every rank. Nothing on the ranks beyond the cores, or where each has one.

    One entry: model, samples, ratio.
    """
    if bench.world_size <= bench.cores:
        return []
    pairs = in_turn(
        SHARING_PAIRS, partial(_computing_s, case, bench, bench.cores), partial(_computing_s, case, bench, bench.world_size)
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


RESUME_BYTES = 256 * KIB
RESUME_PAIRS = 4
"""Pairs of a step with pauses and one without, in turn. After a wait for communication a rank's data has left the caches, and
an idle core has to wake up. On a 2-core virtual machine every component took 0.04 to 0.25 ms longer after an exchange
(2026-11-21, six models, 4 KiB to 1 MiB). Larger messages cost more. Tensor parallelism and pipelines wait before most of
their components."""


def measure_resume(case: Case, bench: Bench) -> list[dict[str, Any]]:
    """What this rank's computations took longer after an exchange with all others, median of a few pairs of steps; called by
    every rank.

    On a CPU, processor seconds count: ranks that share a core take turns at it, and how long one waits for it says nothing
    of its work. Handing the communication over is part of them, which the thread that computes does; the wait is the
    communication's. On a GPU the events of each computation count, which the host has queued before the device begins with it.

    One entry: model, samples, seconds (per computation; where noise hides it, less than 0).
    """
    call = COLLECTIVES["all_reduce"](bench, RESUME_BYTES, bench.everyone)
    pairs = in_turn(RESUME_PAIRS, partial(_computing, case, bench, None), partial(_computing, case, bench, call))
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
