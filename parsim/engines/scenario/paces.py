"""How slowly every running task goes, moment by moment: overlap, stragglers, and links that change or are shared.

A task is so many seconds of work; with slowness f it takes f times as long. Computation and loading are as slow as the
slowest rank they run on; communication first spends its latency, then moves its bytes as fast as its lanes let it. On
top, whatever overlaps on a core slows as the overlap factors say, and computations on one core share it evenly. Slowness
changes once per instant, after everything that starts or ends in it. A task whose slowness changes gets a new timer for
its remaining work. A task whose slowness stays 1 matches the static engine bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from parsim.engines.boundary import Slowdown
from parsim.engines.instants import Instants
from parsim.engines.scenario.conditions import Conditions
from parsim.engines.scenario.flows import Flow, Lane
from parsim.engines.scenario.maxmin import max_min_rates
from parsim.graph.task import COMPUTE, Task
from parsim.work import Collective, SendRecv, is_communication

StepTask = tuple[int, int]
"""A step, and a task of it."""


class Timers(Protocol):
    """What a simulation offers: its instants, and one timer per running task."""

    instants: Instants

    def set_timer(self, key: StepTask, delay_s: float) -> None:
        """The task ends `delay_s` from now."""

    def stop_timer(self, key: StepTask) -> None:
        """The task stands still until a timer is set."""


@dataclass(slots=True, kw_only=True)
class _Running:
    """Attributes:
    left_s: of work, at `since_s`. own: the slowness its ranks impose. slowness: as it goes, with its lanes.
    cores: on which it slows, or is slowed by, others (one that several of its ranks share comes several times).
    changes: of slowness so far; timed: after how many of them the end of its latency was last foretold.
    """

    left_s: float
    since_s: float
    communicates: bool
    ranks: tuple[int, ...]
    cores: tuple[int, ...]
    flow: Flow | None
    own: float = 1.0
    slowness: float = 1.0
    moving: bool = False
    changes: int = 0
    timed: int = -1


class Paces:
    """The slowness of all tasks of one simulation, which reports the tasks that start and end."""

    def __init__(self, timers: Timers, slowdown: Slowdown, conditions: Conditions) -> None:
        self._timers = timers
        self._environment = timers.instants.environment
        self._slowdown = slowdown
        self._core: list[int] = slowdown.core.tolist()
        self._conditions = conditions
        self._active: list[tuple[dict[StepTask, int], dict[StepTask, int]]] = [({}, {}) for _ in self._core]
        self._running: dict[StepTask, _Running] = {}
        self._moving: dict[StepTask, Flow] = {}
        self._doubtful: dict[StepTask, None] = {}
        self._waiting = False
        for time in conditions.change_times_s:
            self._environment.timeout(time).callbacks.append(lambda _: self._doubt(self._running))

    def started(self, key: StepTask, task: Task, duration_s: float) -> None:
        communicates = is_communication(task.work)
        computes = tuple(dict.fromkeys(resource.rank for resource in task.resources if resource.stream == COMPUTE))
        entry = _Running(
            left_s=duration_s,
            since_s=self._environment.now,
            communicates=communicates,
            ranks=task.ranks,
            cores=tuple(self._core[rank] for rank in (task.ranks if communicates else computes)),
            flow=self._conditions.flows.get(task.work) if isinstance(task.work, Collective | SendRecv) else None,
        )
        self._running[key] = entry
        self._doubt((key,))
        for core in entry.cores:
            here = self._active[core][communicates]
            here[key] = here.get(key, 0) + 1
            self._doubt_core(core)

    def ended(self, key: StepTask) -> None:
        entry = self._running.pop(key)
        self._doubtful.pop(key, None)
        for core in entry.cores:
            self._active[core][entry.communicates].pop(key, None)
            self._doubt_core(core)
        if self._moving.pop(key, None) is not None:
            self._doubt(())

    @property
    def standing(self) -> dict[StepTask, tuple[Lane, ...]]:
        """The tasks that stand still, each with its lanes that have no bandwidth."""
        return {
            key: tuple(lane for lane in flow.loads if self._conditions.room(lane, self._now_s) == 0)
            for key, flow in self._moving.items()
            if self._running[key].slowness == math.inf
        }

    @property
    def _now_s(self) -> float:
        """In the scenario's time."""
        return float(self._environment.now) + self._conditions.start_s

    def _doubt_core(self, core: int) -> None:
        for side in self._active[core]:
            self._doubt(side)

    def _doubt(self, keys: dict[StepTask, _Running] | dict[StepTask, int] | tuple[StepTask, ...]) -> None:
        """The slowness of these tasks, and of whatever moves bytes, may change in this instant."""
        self._doubtful.update(dict.fromkeys(keys))
        if not self._waiting:
            self._waiting = True
            self._timers.instants.set_paces(self._apply)

    def _apply(self) -> None:
        self._waiting = False
        for key in self._doubtful:
            entry = self._running[key]
            entry.own = self._own_slowness(key, entry)
            if not entry.moving:
                self._go(key, entry, entry.own)
                self._time_latency(key, entry)
        self._doubtful.clear()
        for key, slowness in self._lane_slowness().items():
            self._go(key, self._running[key], slowness)

    def _own_slowness(self, key: StepTask, entry: _Running) -> float:
        """What its ranks impose: what else runs on any of its cores, and the slowest straggler of a computation."""
        slowdown, factor = self._slowdown, 1.0
        for core in entry.cores:
            overlaps = bool(self._active[core][not entry.communicates])
            if not entry.communicates:
                computing = sum(self._active[core][False].values())
                factor = max(factor, computing * (slowdown.compute if overlaps else 1.0))
            else:
                beside = slowdown.communication if overlaps else 1.0
                if slowdown.divided:
                    on_core = self._active[core][True]
                    beside *= sum(on_core.values()) / on_core[key]
                factor = max(factor, beside)
        if not entry.communicates and self._conditions.stragglers:
            factor *= max(self._conditions.slowness(rank, self._now_s) for rank in entry.ranks)
        return factor

    def _go(self, key: StepTask, entry: _Running, slowness: float) -> None:
        """From now on with this slowness."""
        if slowness == entry.slowness:
            return
        now = self._environment.now
        entry.left_s = max(0.0, entry.left_s - (now - entry.since_s) / entry.slowness)
        entry.since_s, entry.slowness, entry.changes = now, slowness, entry.changes + 1
        if slowness < math.inf:
            self._timers.set_timer(key, entry.left_s * slowness)
        else:
            self._timers.stop_timer(key)

    def _time_latency(self, key: StepTask, entry: _Running) -> None:
        """Communication that still spends its latency begins to move bytes when that has passed."""
        flow = entry.flow
        if flow is None or entry.timed == entry.changes or flow.transfer_s == 0:
            return
        entry.timed = changes = entry.changes
        spent_s = (self._environment.now - entry.since_s) / entry.slowness
        latency_s = max(0.0, entry.left_s - spent_s - flow.transfer_s) * entry.slowness

        def move(_: object) -> None:
            if self._running.get(key) is entry and entry.changes == changes:
                entry.moving = True
                self._moving[key] = flow
                self._doubt((key,))

        self._environment.timeout(latency_s).callbacks.append(move)

    def _lane_slowness(self) -> dict[StepTask, float]:
        """Of every task that moves bytes."""
        if not self._moving:
            return {}
        conditions, now_s = self._conditions, self._now_s
        users: dict[Lane, int] = {}
        for flow in self._moving.values():
            for lane in flow.loads:
                users[lane] = users.get(lane, 0) + 1
        room = {lane: conditions.room(lane, now_s) for lane in users}
        alone: dict[StepTask, float] = {}
        for key, flow in self._moving.items():
            most = min(flow.room[lane] * room[lane] / share for lane, share in flow.loads.items())
            alone[key] = self._running[key].own * (flow.full_pace / most) if most > 0 else math.inf
        if not conditions.share_links or max(users.values()) == 1:
            return alone
        lanes = {lane: number for number, lane in enumerate(users)}
        loads, capacity = np.zeros((len(lanes), len(self._moving))), np.zeros(len(lanes))
        for column, flow in enumerate(self._moving.values()):
            for lane, share in flow.loads.items():
                loads[lanes[lane], column] = share
                capacity[lanes[lane]] = flow.room[lane] * room[lane]
        full = np.array([flow.full_pace for flow in self._moving.values()])
        limit = full / np.array([alone[key] for key in self._moving])
        rates = max_min_rates(loads, capacity, limit)
        return {
            key: alone[key] if rate == most else (pace / rate if rate > 0 else math.inf)
            for key, pace, rate, most in zip(self._moving, full.tolist(), rates.tolist(), limit.tolist(), strict=True)
        }
