"""Was the prediction right? Join a predicted and a measured Timeline of one TaskGraph, task by task.

Everywhere in this module and in what it prints, relative_error = (predicted - measured) / measured: positive means that
the prediction was too slow.

A task on several ranks (a collective, a transfer) has one span per rank. Its duration, predicted and measured alike, runs
from the common start (the latest start of its spans: before that the early ranks only wait) to the latest end.

Leaves out waiting: two timelines whose tasks agree can differ in the gaps between them, which only the step shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parsim.costs.observed import task_durations_s
from parsim.errors import ParsimError
from parsim.predict.result import Interval
from parsim.program.taskgraph import Origin, TaskGraph
from parsim.timeline import Timeline
from parsim.work import kind_of

LARGEST_ERRORS = 10
MINIMUM_ROUNDS = 4


class AAFloor(NamedTuple):
    """Relative differences between halves of the same measurement: no prediction can be judged more finely."""

    median: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """Attributes:
    predicted_s, measured_s: the predicted median, and the mean over the measured steps.
    predicted_interval, within_interval: None if the prediction came without an interval.
    measured_interval: median and percentiles of the single steps (of one step: that step three times).
    steps: how many were measured.
    """

    predicted_s: float
    measured_s: float
    relative_error: float | None
    within_interval: bool | None
    predicted_interval: Interval | None
    measured_interval: Interval
    steps: int


def _row(comparison: TaskComparison | KindComparison | PaceComparison) -> dict[str, Any]:
    """Its fields; in JSON seconds have no unit in their names."""
    names = {"predicted_s": "predicted", "measured_s": "measured"}
    return {names.get(name, name): value for name, value in asdict(comparison).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskComparison:
    """One task; `ranks` are those it runs on, `measured_s` the median over the measured steps."""

    task: int
    kind: str
    origin: Origin
    ranks: tuple[int, ...]
    predicted_s: float
    measured_s: float
    relative_error: float | None

    def to_dict(self) -> dict[str, Any]:
        origin = {name: value for name, value in asdict(self.origin).items() if value is not None}
        return _row(self) | {"origin": origin, "ranks": list(self.ranks)}


@dataclass(frozen=True, slots=True, kw_only=True)
class KindComparison:
    """All tasks of one kind; each task counts once, on however many ranks it runs. Seconds are sums.

    Attributes:
        median_absolute_relative_error: over the single tasks whose measured time is not 0.
        within_interval: None if no interval of the sum was given.
    """

    kind: str
    count: int
    predicted_s: float
    measured_s: float
    relative_error: float | None
    median_absolute_relative_error: float | None
    within_interval: bool | None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in _row(self).items() if key != "kind"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceComparison:
    """The step as it is predicted at the pace of the cores beside the run (`parsim.predict.evaluate`).

    slowness: how many times as long the probe took as while the profile was measured.
    """

    slowness: float
    predicted_s: float
    relative_error: float | None

    def to_dict(self) -> dict[str, Any]:
        return _row(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryComparison:
    rank: int
    predicted_bytes: int
    measured_bytes: int
    relative_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `compare` found; `to_dict` is the JSON of `parsim validate`.

    Attributes:
        interval_correction: how the predicted interval of the step was corrected (those of kinds never are).
        at_pace: None where nobody looked how fast the cores were.
        skew_s: between the first and the last rank's begin of a step, on average; None: the plan holds its ranks together.
    """

    step: StepComparison
    kinds: tuple[KindComparison, ...]
    tasks: tuple[TaskComparison, ...]
    memory: tuple[MemoryComparison, ...]
    aa_floor: AAFloor | None
    interval_correction: Mapping[str, Any] | None = None
    at_pace: PaceComparison | None = None
    skew_s: float | None = None

    @property
    def largest_errors(self) -> tuple[TaskComparison, ...]:
        """The tasks whose predicted and measured seconds differ most."""
        return tuple(sorted(self.tasks, key=lambda row: -abs(row.predicted_s - row.measured_s))[:LARGEST_ERRORS])

    def to_dict(self, *, tasks: bool = False) -> dict[str, Any]:
        """Seconds, relative errors and intervals of the step, and the same per kind. Of tasks those with the largest errors;
        `tasks=True` adds every one."""
        document: dict[str, Any] = {
            "predicted": self.step.predicted_s,
            "measured": self.step.measured_s,
            "relative_error": self.step.relative_error,
            "within_interval": self.step.within_interval,
            "predicted_step_s": None if self.step.predicted_interval is None else self.step.predicted_interval.to_dict(),
            "measured_step_s": {
                "mean": self.step.measured_s,
                **self.step.measured_interval.to_dict(),
                "steps": self.step.steps,
            },
            "aa_floor": None if self.aa_floor is None else self.aa_floor._asdict(),
            "kinds": {row.kind: row.to_dict() for row in self.kinds},
            "memory": [asdict(row) for row in self.memory],
            "largest_errors": [row.to_dict() for row in self.largest_errors],
        }
        if self.interval_correction is not None:
            document["interval_correction"] = dict(self.interval_correction)
        if self.at_pace is not None:
            document["at_pace"] = self.at_pace.to_dict()
        if self.skew_s is not None:
            document["skew_s"] = self.skew_s
        if tasks:
            document["tasks"] = [row.to_dict() for row in self.tasks]
        return document


def relative_error(predicted: float, measured: float) -> float | None:
    """(predicted - measured) / measured; 0 if both are 0; None, undefined, if only the measured value is."""
    if measured == 0:
        return 0.0 if predicted == 0 else None
    return (predicted - measured) / measured


def compare(
    graph: TaskGraph,
    predicted: Timeline,
    measured: Timeline | Sequence[Timeline],
    *,
    predicted_step: Interval | float | None = None,
    measured_step: Sequence[float] | float | None = None,
    predicted_memory_bytes: Sequence[int] = (),
    measured_memory_bytes: Sequence[int] = (),
    kind_intervals: Mapping[str, Interval] | None = None,
    rounds: Sequence[Sequence[float]] | None = None,
) -> Comparison:
    """Join two timelines of `graph` by task.

    Args:
        measured: one step or many; of many, a task's duration is the median over the steps.
        predicted_step: seconds, or their interval; left out: the makespan of `predicted`.
        measured_step: seconds of every measured step (their mean is compared, as the predicted interval is one for the
            mean step); left out: the makespans of `measured`.
        predicted_memory_bytes, measured_memory_bytes: peak per rank; compared if both are given.
        kind_intervals: what `kind_intervals_s` returns, for `within_interval` per kind.
        rounds: step seconds by interleaved round, for the A/A floor; left out: every measured step is a round.

    Raises:
        GraphError: if a timeline lacks a task of the graph or names one the graph has not.
        ParsimError: if no step was measured, or the memory lists have different lengths.
    """
    steps = [measured] if isinstance(measured, Timeline) else list(measured)
    if not steps:
        raise ParsimError("a comparison needs at least one measured step, got none; run the plan for some steps first")
    predicted_s = task_durations_s(len(graph.tasks), predicted, complete=True)
    durations = [task_durations_s(len(graph.tasks), timeline, complete=True) for timeline in steps]
    measured_s = np.median(np.stack(durations), axis=0)
    if measured_step is None:
        measured_step = [timeline.makespan_s for timeline in steps]
    times = np.atleast_1d(np.asarray(measured_step, dtype=np.float64)).tolist()
    tasks = tuple(
        TaskComparison(
            task=task.index,
            kind=kind_of(task.work),
            origin=task.origin,
            ranks=task.ranks,
            predicted_s=float(predicted_s[task.index]),
            measured_s=float(measured_s[task.index]),
            relative_error=relative_error(float(predicted_s[task.index]), float(measured_s[task.index])),
        )
        for task in graph.tasks
    )
    by_round = [[value] for value in times] if rounds is None else rounds
    return Comparison(
        step=_compare_step(predicted.makespan_s if predicted_step is None else predicted_step, times),
        kinds=_compare_kinds(tasks, kind_intervals or {}),
        tasks=tasks,
        memory=_compare_memory(predicted_memory_bytes, measured_memory_bytes),
        aa_floor=aa_floor(by_round) if len(by_round) >= MINIMUM_ROUNDS else None,
    )


def kind_intervals_s(graph: TaskGraph, durations_s: NDArray[np.float64]) -> dict[str, Interval]:
    """Interval of the summed seconds per kind, from sampled durations float64 [samples, tasks].

    Leaves out what overlap adds to a task's duration in the timeline.
    """
    kinds = np.array([kind_of(task.work) for task in graph.tasks])
    intervals = {}
    for kind in dict.fromkeys(kinds.tolist()):
        p05, median, p95 = np.quantile(durations_s[:, kinds == kind].sum(axis=1), (0.05, 0.5, 0.95))
        intervals[kind] = Interval(median=float(median), p05=float(p05), p95=float(p95))
    return intervals


def aa_floor(rounds: Sequence[Sequence[float]] | Sequence[float], *, splits: int = 1000) -> AAFloor:
    """Noise floor of a measurement compared with itself.

    The rounds are split at random into two disjoint halves of floor(n / 2) rounds, `splits` times. The difference of one split
    is |mean A - mean B| / ((mean A + mean B) / 2) over all step times of the halves. Returns median and 95th percentile of
    these differences. Rounds, not steps, are split: the steps of one round share its disturbances. Leaves out drift slower than
    the whole measurement, which `drift` hints at.

    `rounds`: step seconds of every interleaved round, or one time per round. Raises ParsimError with fewer than 4 rounds.
    """
    sums, counts = _round_sums(rounds)
    half = len(sums) // 2
    order = np.random.default_rng(0).permuted(np.tile(np.arange(len(sums)), (splits, 1)), axis=1)
    first, second = order[:, :half], order[:, half : 2 * half]
    mean_first = sums[first].sum(axis=1) / counts[first].sum(axis=1)
    mean_second = sums[second].sum(axis=1) / counts[second].sum(axis=1)
    difference = np.abs(mean_first - mean_second) / ((mean_first + mean_second) / 2)
    median, p95 = np.quantile(difference, (0.5, 0.95))
    return AAFloor(float(median), float(p95))


def drift(rounds: Sequence[Sequence[float]] | Sequence[float]) -> float:
    """Signed (mean of the second half of the rounds - mean of the first) / mean of the first, in the order measured."""
    sums, counts = _round_sums(rounds)
    half = len(sums) // 2
    first = float(sums[:half].sum() / counts[:half].sum())
    second = float(sums[-half:].sum() / counts[-half:].sum())
    return (second - first) / first


def _round_sums(rounds: Sequence[Sequence[float]] | Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and number of step times per round, float64 [rounds] each; checked."""
    lists = [np.atleast_1d(np.asarray(times, dtype=np.float64)) for times in rounds]
    if len(lists) < MINIMUM_ROUNDS:
        raise ParsimError(f"an A/A floor needs >= {MINIMUM_ROUNDS} rounds, got {len(lists)}; measure more rounds")
    if any(not len(times) or float(times.min()) <= 0 for times in lists):
        raise ParsimError("an A/A floor needs one or more step times > 0 in every round; leave out the empty rounds")
    return np.array([times.sum() for times in lists]), np.array([float(len(times)) for times in lists])


def _compare_step(predicted: Interval | float, times: Sequence[float]) -> StepComparison:
    if not times:
        raise ParsimError("measured_step lists no step; give the seconds of at least one")
    interval = predicted if isinstance(predicted, Interval) else None
    predicted_s = predicted.median if isinstance(predicted, Interval) else float(predicted)
    p05, median, p95 = (float(value) for value in np.quantile(times, (0.05, 0.5, 0.95)))
    mean = float(np.mean(times))
    return StepComparison(
        predicted_s=predicted_s,
        measured_s=mean,
        relative_error=relative_error(predicted_s, mean),
        within_interval=_within(interval, mean),
        predicted_interval=interval,
        measured_interval=Interval(median=median, p05=p05, p95=p95),
        steps=len(times),
    )


def _within(interval: Interval | None, value: float) -> bool | None:
    return None if interval is None else interval.p05 <= value <= interval.p95


def _compare_kinds(tasks: Sequence[TaskComparison], intervals: Mapping[str, Interval]) -> tuple[KindComparison, ...]:
    rows = []
    for kind in dict.fromkeys(task.kind for task in tasks):
        of_kind = [task for task in tasks if task.kind == kind]
        predicted_s = sum(task.predicted_s for task in of_kind)
        measured_s = sum(task.measured_s for task in of_kind)
        errors = [abs(task.relative_error) for task in of_kind if task.relative_error is not None]
        rows.append(
            KindComparison(
                kind=kind,
                count=len(of_kind),
                predicted_s=predicted_s,
                measured_s=measured_s,
                relative_error=relative_error(predicted_s, measured_s),
                median_absolute_relative_error=float(np.median(errors)) if errors else None,
                within_interval=_within(intervals.get(kind), measured_s),
            )
        )
    return tuple(rows)


def _compare_memory(predicted: Sequence[int], measured: Sequence[int]) -> tuple[MemoryComparison, ...]:
    if not len(predicted) or not len(measured):
        return ()
    if len(predicted) != len(measured):
        raise ParsimError(
            f"peak memory was predicted for {len(predicted)} ranks and measured on {len(measured)}; give one number per rank"
        )
    return tuple(
        MemoryComparison(
            rank=rank,
            predicted_bytes=int(expected),
            measured_bytes=int(seen),
            relative_error=relative_error(expected, seen),
        )
        for rank, (expected, seen) in enumerate(zip(predicted, measured, strict=True))
    )
