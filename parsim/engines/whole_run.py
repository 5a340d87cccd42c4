"""A whole training run with its failures: time, price and energy to the end, for many draws.

Nothing is simulated task by task here. The engines give the seconds of a step under each state of the machine. The run
jumps from one event (a failure, a change of state) to the next, and looks up the steps, checkpoints and evaluations
between them in running sums. So days take milliseconds, and a draw costs as much as it has failures.

A failure loses the work since the last complete checkpoint, and the run stops for `restart_s`. A failure during that time
starts it again. Warm-up steps add their extra seconds to the start and to every restart. Prices count all devices for all the
time. Energy counts a device as busy for the seconds that it computes, again after a failure where steps are repeated, and idle
for the rest.

Leaves out: checkpoints written beside the training, spare nodes and smaller meshes after a failure, asynchronous
workers who would go on when one fails, and silent errors.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsim.engines.scenario import Checkpoints, DeviceCosts, Failures, Run
from parsim.errors import ScenarioError
from parsim.numeric import Floats, Ints
from parsim.units import format_seconds

# The course of a whole run, block by block: so many steps of training, a checkpoint, an evaluation, the start of an epoch.


TRAINING, CHECKPOINT, EVALUATION, EPOCH_START = 0, 1, 2, 3
KINDS = ("training", "checkpoint", "evaluation", "epoch_start")

MOST_BLOCKS = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """A run without failures, in the order things are done.

    Attributes:
        kind: int64 [B], numbers of KINDS. steps: int64 [B], of training blocks. seconds: float64 [B], of all other blocks.
        resume: int64 [B], the block that a run goes on with after failing in a block: behind the last checkpoint written.
    """

    kind: Ints
    steps: Ints
    seconds: Floats
    resume: Ints

    @property
    def total_steps(self) -> int:
        return int(self.steps.sum())


def course_of(
    run: Run, *, steps_per_epoch: int, interval_steps: int | None, checkpoint_s: float = 0.0, evaluation_s: float = 0.0
) -> Course:
    """The blocks of `run` (one epoch where it names no number).

    `interval_steps`: between checkpoints, counted through epochs; None for none. With them, the run ends with one. Raises
    ScenarioError if a step count is below 1 or the blocks are too many.
    """
    if steps_per_epoch < 1 or (interval_steps is not None and interval_steps < 1):
        raise ScenarioError(f"an epoch and a checkpoint interval hold >= 1 step, got {steps_per_epoch} and {interval_steps}")
    epochs = run.epochs or 1
    total = epochs * steps_per_epoch
    marks = np.arange(interval_steps, total, interval_steps) if interval_steps else np.zeros(0, dtype=np.int64)
    if len(marks) + 3 * epochs > MOST_BLOCKS:
        raise ScenarioError(
            f"{len(marks)} checkpoints in {epochs} epochs are too many to simulate; take a longer checkpoints.interval_s"
        )
    written = set(marks.tolist())
    blocks: list[tuple[int, int, float]] = []
    done = 0
    for epoch in range(1, epochs + 1):
        if run.epoch_start_s:
            blocks.append((EPOCH_START, 0, run.epoch_start_s))
        end = epoch * steps_per_epoch
        low, high = np.searchsorted(marks, (done, end), side="right")
        for stop in [*marks[low:high].tolist(), *([] if end in written else [end])]:
            blocks.append((TRAINING, stop - done, 0.0))
            done = stop
            if stop in written:
                blocks.append((CHECKPOINT, 0, checkpoint_s))
        if run.evaluate_every_epochs and epoch % run.evaluate_every_epochs == 0 and evaluation_s:
            blocks.append((EVALUATION, 0, evaluation_s))
    if interval_steps:
        blocks.append((CHECKPOINT, 0, checkpoint_s))
    kind = np.array([block[0] for block in blocks], dtype=np.int64)
    behind = np.where(kind == CHECKPOINT, np.arange(1, len(blocks) + 1), 0)
    resume = np.zeros(len(blocks), dtype=np.int64)
    resume[1:] = np.maximum.accumulate(behind)[:-1]
    return Course(
        kind=kind,
        steps=np.array([block[1] for block in blocks], dtype=np.int64),
        seconds=np.array([block[2] for block in blocks]),
        resume=resume,
    )


def interval_steps_of(checkpoints: Checkpoints, step_s: float) -> int:
    """The interval in whole steps, at least one."""
    return max(1, round(checkpoints.interval_s / step_s))


# When the parts of a machine fail.


def failure_times_s(failures: Failures, ranks: int, nodes: int, rng: np.random.Generator) -> Iterator[float]:
    """The times of all failures, ascending; it ends where none is to come.

    Exponential times of many parts are one Poisson process of the summed rate. With "weibull" every rank and node is renewed
    when it fails and ages by itself, all new at 0, whether the run is up or down.
    """
    stated = iter(sorted(failure.at_s for failure in failures.at))
    return heapq.merge(stated, _drawn_s(failures, ranks, nodes, rng))


def _drawn_s(failures: Failures, ranks: int, nodes: int, rng: np.random.Generator) -> Iterator[float]:
    means = [(failures.rank_mtbf_s, ranks), (failures.node_mtbf_s, nodes)]
    if failures.distribution == "exponential":
        rate = sum(count / mean for mean, count in means if mean is not None)
        now = 0.0
        while rate:
            for gap in rng.exponential(1 / rate, 64).tolist():
                now += gap
                yield now
        return
    stretch = 1 / math.gamma(1 + 1 / failures.shape)
    due = [
        (mean * stretch * float(draw), mean * stretch)
        for mean, count in means
        if mean is not None
        for draw in rng.weibull(failures.shape, count)
    ]
    heapq.heapify(due)
    while due:
        at_s, scale = due[0]
        yield at_s
        heapq.heapreplace(due, (at_s + scale * float(rng.weibull(failures.shape)), scale))


MOST_FAILURES = 200_000
"""Of one run. No machine that fails so often gets on; drawing them takes seconds."""
HOPELESS = 1000.0
"""A run that takes this many times as long as without failures does not get on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """What the engines know of the steps.

    Attributes:
        step_s: float64 [draws, states], seconds of a step in each state of the machine (inf: none ends).
        change_s: when each next state begins, ascending, one less than the states.
        computing_s: seconds per step in which a device computes, the mean over devices. ranks, nodes: that may fail.
        warm_up_s: extra seconds after the start and every restart. start_s: before the first step.
    """

    step_s: Floats
    ranks: int
    nodes: int = 1
    change_s: tuple[float, ...] = ()
    computing_s: float = 0.0
    warm_up_s: float = 0.0
    start_s: float = 0.0

    def __post_init__(self) -> None:
        if self.step_s.ndim != 2 or self.step_s.shape[1] != len(self.change_s) + 1 or not len(self.step_s):
            raise ScenarioError(
                f"step_s must have shape [draws, {len(self.change_s) + 1}], one column per state, got {list(self.step_s.shape)}"
            )
        if not (bool(np.all(self.step_s > 0)) and np.isfinite(self.step_s[:, -1]).all()):
            raise ScenarioError("seconds of a step must be above 0, and finite at last: else the run never ends")


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeRun:
    """Draws of a run; all float64 [draws].

    Attributes:
        total_s: to the end of the last block. spent_s: of it in each kind of block (KINDS), repeated work included.
        lost_s: of that, what failures undid. down_s: starting, restarting, warming up. busy_s: a device computing.
        failures: int64.
    """

    total_s: Floats
    spent_s: dict[int, Floats]
    lost_s: Floats
    down_s: Floats
    busy_s: Floats
    failures: NDArray[np.int64]
    devices: int

    @cached_property
    def useful_fraction(self) -> Floats:
        """Training that stood, over all seconds."""
        beside_s = self.spent_s[CHECKPOINT] + self.spent_s[EVALUATION] + self.spent_s[EPOCH_START]
        return np.asarray((self.total_s - self.down_s - self.lost_s - beside_s) / self.total_s)

    def price(self, costs: DeviceCosts) -> Floats:
        """In the costs' currency: all devices, all the time."""
        return np.asarray(self.total_s / 3600 * self.devices * costs.price_per_hour)

    def energy_j(self, costs: DeviceCosts) -> Floats:
        """Of all devices. Leaves out hosts, switches and cooling."""
        return np.asarray(self.devices * (costs.idle_w * self.total_s + (costs.busy_w - costs.idle_w) * self.busy_s))


def simulate_run(course: Course, training: Training, failures: Failures, *, seed: int) -> WholeRun:
    """Simulate one run per row of `training.step_s`. The same arguments give the same bytes.

    A draw's failures depend on the seed and its number alone, so that runs under different courses meet the same ones. Raises
    ScenarioError for a run that does not get on.
    """
    tables, last_row = None, b""
    outcomes = []
    for number, row in enumerate(training.step_s):
        if tables is None or row.tobytes() != last_row:
            tables, last_row = _Tables(course, training, row), row.tobytes()
        outcomes.append(_Draw(tables, training, failures).run(np.random.default_rng([seed, number])))
    columns = np.array([(*one.accounts, one.now_s, one.lost_s, one.down_s) for one in outcomes])
    return WholeRun(
        total_s=columns[:, 5],
        spent_s={kind: columns[:, kind] for kind in (TRAINING, CHECKPOINT, EVALUATION, EPOCH_START)},
        lost_s=columns[:, 6],
        down_s=columns[:, 7],
        busy_s=columns[:, BUSY],
        failures=np.array([one.failures for one in outcomes], dtype=np.int64),
        devices=training.ranks,
    )


BUSY = 4
"""The account, behind those of the four kinds of block, of seconds in which a device computes."""


class _Tables:
    """Running sums over a course, for one row of step seconds.

    Attributes:
        standing: per state, no step ends in it. seconds: per state float64 [B] of every block (0 for a step that never ends).
        until: per state float64 [B + 1], their running sum. accounts: per state float64 [B + 1, 5], that of each account.
    """

    def __init__(self, course: Course, training: Training, row: Floats) -> None:
        self.course = course
        self.ends = len(course.kind)
        self.standing = np.isinf(row).tolist()
        self.seconds: list[Floats] = [course.steps * (0.0 if np.isinf(step) else float(step)) + course.seconds for step in row]
        self.until = [_running(seconds) for seconds in self.seconds]
        fastest_s = float(row.min())
        self.quiet_s = float((course.steps * fastest_s + course.seconds).sum())
        share = min(1.0, training.computing_s / fastest_s)
        busy = course.steps * training.computing_s + np.where(course.kind == EVALUATION, course.seconds * share, 0.0)
        self.accounts = [
            np.stack([*(_running(np.where(course.kind == kind, seconds, 0.0)) for kind in range(4)), _running(busy)], axis=1)
            for seconds in self.seconds
        ]

    def account(self, state: int, block: int, part: float) -> Floats:
        """float64 [5]: what every account holds at a place of the course."""
        table = self.accounts[state]
        held: Floats = table[block] + part * (table[block + 1] - table[block]) if part else table[block]
        return held


def _running(values: NDArray[Any]) -> Floats:
    """float64 [n + 1]: the sum of all before."""
    sums = np.zeros(len(values) + 1)
    np.cumsum(values, out=sums[1:])
    return sums


class _Draw:
    def __init__(self, tables: _Tables, training: Training, failures: Failures) -> None:
        self.now_s = self.lost_s = self.down_s = 0.0
        self.accounts = np.zeros(5)
        self.failures = 0
        self._tables = tables
        self._course = tables.course
        self._training = training
        self._plan = failures
        self._block, self._part, self._state = 0, 0.0, 0
        self._since_resume_s = 0.0

    def run(self, rng: np.random.Generator) -> _Draw:
        training, ends = self._training, self._tables.ends
        failing = failure_times_s(self._plan, training.ranks, training.nodes, rng)
        patience_s = HOPELESS * (self._tables.quiet_s + training.start_s + self._plan.restart_s) + max(
            training.change_s, default=0.0
        )
        due_s = self._stand(training.start_s, failing, next(failing, np.inf))
        while self._block < ends:
            change_s = training.change_s[self._state] if self._state < len(training.change_s) else np.inf
            if change_s <= self.now_s:
                self._state += 1
                continue
            self._go_on(min(due_s, change_s))
            if self._block < ends and due_s <= self.now_s:
                due_s = self._fail(failing)
            if self.now_s > patience_s or self.failures > MOST_FAILURES:
                raise ScenarioError(
                    f"the run makes no progress: after {format_seconds(self.now_s)} and {self.failures} failures block "
                    f"{self._block + 1} of {ends} is not done, where without failures all take "
                    f"{format_seconds(self._tables.quiet_s)}; write checkpoints more often or faster"
                )
        return self

    def _go_on(self, until_s: float) -> None:
        """From where the run stands to a time, or to the end of the course if that comes first."""
        if self._tables.standing[self._state]:
            self._wait(until_s)
            return
        until = self._tables.until[self._state]
        begun = float(until[self._block] + self._part * self._tables.seconds[self._state][self._block])
        old = self._block, self._part
        left_s = float(until[-1]) - begun
        if self.now_s + left_s <= until_s:
            reached = float(until[-1])
            self.now_s += left_s
            self._block, self._part = self._tables.ends, 0.0
        else:
            reached = begun + (until_s - self.now_s)
            self.now_s = until_s
            block = min(int(np.searchsorted(until, reached, side="right")) - 1, self._tables.ends - 1)
            length = float(self._tables.seconds[self._state][block])
            self._block, self._part = block, min(1.0, (reached - float(until[block])) / length) if length else 0.0
        self._book(old, begun, reached)

    def _wait(self, until_s: float) -> None:
        """Training stands still; a checkpoint or an evaluation that was begun goes on to its end."""
        if self._course.kind[self._block] == TRAINING:
            self.down_s += until_s - self.now_s
            self.now_s = until_s
            return
        until, length = self._tables.until[self._state], float(self._course.seconds[self._block])
        old, begun = (self._block, self._part), float(until[self._block]) + self._part * length
        left_s = (1.0 - self._part) * length
        if self.now_s + left_s <= until_s:
            self._block, self._part, done_s = self._block + 1, 0.0, left_s
        else:
            done_s = until_s - self.now_s
            self._part += done_s / length
        self.now_s += done_s
        self._book(old, begun, begun + done_s)

    def _book(self, old: tuple[int, float], begun: float, reached: float) -> None:
        """Add what was done between two places of the course to the accounts."""
        tables, state = self._tables, self._state
        self.accounts += tables.account(state, self._block, self._part) - tables.account(state, *old)
        resume = int(self._course.resume[min(self._block, tables.ends - 1)])
        if resume > old[0]:
            self._since_resume_s = reached - float(self._tables.until[self._state][resume])
        else:
            self._since_resume_s += reached - begun

    def _fail(self, failing: Iterator[float]) -> float:
        """Back to the last checkpoint, and up again; returns when the next failure is due."""
        self.failures += 1
        self.lost_s += self._since_resume_s
        self._since_resume_s = 0.0
        self._block, self._part = int(self._course.resume[self._block]), 0.0
        return self._stand(self._plan.restart_s, failing, next(failing, np.inf))

    def _stand(self, seconds: float, failing: Iterator[float], due_s: float) -> float:
        """Stand still so long before the first step; a failure in that time begins it anew. Returns when the next is due."""
        begun_s = self.now_s
        ready_s = begun_s + seconds + self._training.warm_up_s
        while due_s <= ready_s and due_s < np.inf:
            self.failures += 1
            ready_s = due_s + seconds + self._training.warm_up_s
            due_s = next(failing, np.inf)
            if ready_s > begun_s + HOPELESS * (self._tables.quiet_s + seconds) or self.failures > MOST_FAILURES:
                raise ScenarioError(
                    f"the run never restarts: failures come faster than the {seconds:g} s pass that it takes; "
                    "shorten restart_s, or check the mtbf"
                )
        self.down_s += ready_s - begun_s
        self.now_s = ready_s
        return due_s


# --- how often to write a checkpoint ----------------------------------------------------------------------------------
#
# Young and Daly assume one machine that fails with exponential gaps of mean M (over all its parts). A checkpoint takes
# `write_s` and stops the training, and a run has many intervals. Then the expected time of a run is M e^(R/M) (e^((t + d)/M) -
# 1) per interval t of training (R restart, d write), exactly. With few intervals, parts that fail soonest after a repair, or
# failures at known times the best interval differs, and simulation finds it.


def machine_mtbf_s(failures: Failures, ranks: int, nodes: int) -> float:
    """M: mean seconds between failures of the whole machine; inf where none is drawn."""
    means = ((failures.rank_mtbf_s, ranks), (failures.node_mtbf_s, nodes))
    rate = sum(count / mean for mean, count in means if mean is not None)
    return 1 / rate if rate else math.inf


def young_interval_s(write_s: float, mtbf_s: float) -> float:
    """sqrt(2 d M): the first-order optimum, for d much less than M."""
    _check(write_s, mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s)


def daly_interval_s(write_s: float, mtbf_s: float) -> float:
    """sqrt(2 d M) (1 + 1/3 sqrt(d / 2M) + 1/9 (d / 2M)) - d for d < 2M, else M: the higher-order optimum."""
    _check(write_s, mtbf_s)
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = write_s / (2 * mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write_s


def expected_run_s(work_s: float, interval_s: float, write_s: float, restart_s: float, mtbf_s: float) -> float:
    """The expected seconds of `work_s` of training in equal intervals, each closed by a checkpoint, with exponential
    failures. Exact, failures while writing and restarting included. `work_s` must be a multiple of `interval_s` for it to be a
    run."""
    _check(write_s, mtbf_s)
    per_interval = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + write_s) / mtbf_s)
    return work_s / interval_s * per_interval


def _check(write_s: float, mtbf_s: float) -> None:
    if not (write_s >= 0 and mtbf_s > 0):
        raise ScenarioError(f"a checkpoint takes write_s >= 0 and failures come mtbf_s > 0 apart, got {write_s} and {mtbf_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalTimes:
    """Attributes:
    interval_s: whole steps of the median draw. mean_s: float64 [intervals] of the runs' seconds.
    error_s: float64 [intervals], the standard error of each mean's difference to that of the best: draws share their failures.
    """

    interval_s: Floats
    mean_s: Floats
    error_s: Floats

    @property
    def best(self) -> int:
        return int(self.mean_s.argmin())

    @property
    def best_interval_s(self) -> float:
        """Where a parabola through the best and its neighbours, over the logarithm of the interval, is lowest. Just the best
        where nothing is random: with failures at known times the mean jumps, and no curve fits it."""
        place = self.best
        if place in (0, len(self.mean_s) - 1) or not self.error_s.any():
            return float(self.interval_s[place])
        x, y = np.log(self.interval_s[place - 1 : place + 2]), self.mean_s[place - 1 : place + 2]
        curve = np.polyfit(x - x[1], y - y[1], 2)
        if curve[0] <= 0:
            return float(self.interval_s[place])
        return float(np.exp(x[1] + np.clip(-curve[1] / (2 * curve[0]), x[0] - x[1], x[2] - x[1])))


def interval_times(
    intervals_s: Sequence[float],
    *,
    run: Run,
    training: Training,
    failures: Failures,
    steps_per_epoch: int,
    write_s: float,
    seed: int,
) -> IntervalTimes:
    """Simulate the run under every interval, with the same failures for all. Raises as `simulate_run`."""
    if not intervals_s:
        raise ScenarioError("a choice of checkpoint interval needs at least one candidate")
    step_s = float(np.median(training.step_s.min(axis=1)))
    counts = sorted({max(1, round(interval / step_s)) for interval in intervals_s})
    totals = np.array(
        [
            simulate_run(
                course_of(run, steps_per_epoch=steps_per_epoch, interval_steps=count, checkpoint_s=write_s),
                training,
                failures,
                seed=seed,
            ).total_s
            for count in counts
        ]
    )
    mean_s = totals.mean(axis=1)
    beyond = totals - totals[mean_s.argmin()]
    return IntervalTimes(
        interval_s=np.array(counts) * step_s,
        mean_s=mean_s,
        error_s=np.asarray(beyond.std(axis=1) / np.sqrt(totals.shape[1])),
    )


def one_draw_many_times(training: Training, draws: int) -> Training:
    """Equal steps in each of `draws` runs: only failures differ."""
    return replace(training, step_s=np.repeat(training.step_s[:1], draws, axis=0))
