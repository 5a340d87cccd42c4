"""How fast every running task goes, moment by moment: overlap, stragglers, and links that change or are shared.

A task is so many seconds of work at pace 1. Computation and loading go at the pace of the slowest rank they run on;
communication first spends its latency, then moves its bytes at the pace that its lanes leave it. On top, whatever overlaps on
a rank slows as the overlap factors say. Paces change once per instant, after everything that starts or ends in it; a task
whose pace changes gets a new timer for what is left of it, so one whose pace never changes ends exactly when the static
engine says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from parsim.graph.task import COMPUTE
from parsim.graph.taskgraph import TaskGraph
from parsim.simulate.conditions import Conditions
from parsim.simulate.flows import Flow, Lane
from parsim.simulate.maxmin import max_min_rates
from parsim.work import is_communication


class Timers(Protocol):
    """What a simulation offers: a SimPy environment, and one timer per running task."""

    environment: Any

    def set_timer(self, task: int, delay_s: float) -> None:
        """The task ends `delay_s` from now."""

    def stop_timer(self, task: int) -> None:
        """The task stands still until a timer is set."""


@dataclass(slots=True)
class _Running:
    """Attributes: left_s: of work, at `since_s`. own: the pace its ranks allow. changes: of pace so far; timed: after how many
    of them the end of its latency was last foretold."""

    left_s: float
    since_s: float
    own: float = 1.0
    pace: float = 1.0
    moving: bool = False
    changes: int = 0
    timed: int = -1


class Paces:
    """The paces of one simulation; told by it what starts and ends."""

    def __init__(self, timers: Timers, graph: TaskGraph, factors: tuple[float, float], conditions: Conditions) -> None:
        self._timers = timers
        self._environment = timers.environment
        self._factors = factors
        self._conditions = conditions
        self._communicates = [is_communication(task.work) for task in graph.tasks]
        self._overlapping = [
            task.ranks
            if is_communication(task.work)
            else tuple(resource.rank for resource in task.resources if resource.stream == COMPUTE)
            for task in graph.tasks
        ]
        self._ranks = [task.ranks for task in graph.tasks]
        self._active: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in range(graph.world_size)]
        self._running: dict[int, _Running] = {}
        self._moving: dict[int, Flow] = {}
        self._waiting = False
        for time in conditions.change_times_s:
            self._environment.timeout(time).callbacks.append(lambda _: self._note_change())

    def started(self, task: int, duration_s: float) -> None:
        self._running[task] = _Running(left_s=duration_s, since_s=self._environment.now)
        for rank in self._overlapping[task]:
            self._active[rank][self._communicates[task]].add(task)
        self._note_change()

    def ended(self, task: int) -> None:
        del self._running[task]
        self._moving.pop(task, None)
        for rank in self._overlapping[task]:
            self._active[rank][self._communicates[task]].discard(task)
        self._note_change()

    @property
    def standing(self) -> dict[int, tuple[Lane, ...]]:
        """The tasks at pace 0, each with the lanes that have no room."""
        now = self._now_s
        return {
            task: tuple(lane for lane in flow.loads if self._conditions.room(lane, now) == 0)
            for task, flow in self._moving.items()
            if self._running[task].pace == 0
        }

    @property
    def _now_s(self) -> float:
        return float(self._environment.now) + self._conditions.start_s

    def _note_change(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._at_end_of_instant()

    def _at_end_of_instant(self) -> None:
        """Wait behind all other events of this instant, then apply the new paces."""
        self._environment.timeout(0).callbacks.append(
            lambda _: self._apply() if self._environment.peek() > self._environment.now else self._at_end_of_instant()
        )

    def _apply(self) -> None:
        self._waiting = False
        for task, entry in self._running.items():
            entry.own = self._own_pace(task)
        for task, entry in list(self._running.items()):
            if not entry.moving:
                self._go(task, entry, entry.own)
                self._time_latency(task, entry)
        for task, pace in self._lane_paces().items():
            self._go(task, self._running[task], pace)

    def _own_pace(self, task: int) -> float:
        """What its ranks allow: overlap on all of them, and the slowest straggler of a computation."""
        communicates = self._communicates[task]
        slow = any(self._active[rank][not communicates] for rank in self._overlapping[task])
        factor = self._factors[communicates] if slow else 1.0
        if not communicates and self._conditions.stragglers:
            factor *= max(self._conditions.slowness(rank, self._now_s) for rank in self._ranks[task])
        return 1.0 / factor

    def _go(self, task: int, entry: _Running, pace: float) -> None:
        """From now on at `pace`."""
        if pace == entry.pace:
            return
        now = self._environment.now
        entry.left_s = max(0.0, entry.left_s - (now - entry.since_s) * entry.pace)
        entry.since_s, entry.pace, entry.changes = now, pace, entry.changes + 1
        if pace > 0:
            self._timers.set_timer(task, entry.left_s / pace)
        else:
            self._timers.stop_timer(task)

    def _time_latency(self, task: int, entry: _Running) -> None:
        """Communication that still spends its latency begins to move bytes when that has passed."""
        flow = self._conditions.flows.get(task)
        if flow is None or entry.timed == entry.changes or flow.transfer_s == 0:
            return
        entry.timed = changes = entry.changes
        spent = (self._environment.now - entry.since_s) * entry.pace
        latency_s = max(0.0, entry.left_s - spent - flow.transfer_s) / entry.pace

        def move(_: object) -> None:
            if self._running.get(task) is entry and entry.changes == changes:
                entry.moving = True
                self._moving[task] = flow
                self._note_change()

        self._environment.timeout(latency_s).callbacks.append(move)

    def _lane_paces(self) -> dict[int, float]:
        """The pace of every task that moves bytes."""
        if not self._moving:
            return {}
        conditions, now = self._conditions, self._now_s
        lanes: dict[Lane, int] = {}
        users: dict[Lane, int] = {}
        for flow in self._moving.values():
            for lane in flow.loads:
                lanes.setdefault(lane, len(lanes))
                users[lane] = users.get(lane, 0) + 1
        room = {lane: conditions.room(lane, now) for lane in lanes}
        alone: dict[int, float] = {}
        for task, flow in self._moving.items():
            if all(room[lane] == 1.0 for lane in flow.loads):
                alone[task] = self._running[task].own
            else:
                most = min(flow.room[lane] * room[lane] / share for lane, share in flow.loads.items())
                alone[task] = self._running[task].own * (most / flow.full_pace)
        if not conditions.share_links or max(users.values()) == 1:
            return alone
        loads = np.zeros((len(lanes), len(self._moving)))
        capacity = np.zeros(len(lanes))
        for column, flow in enumerate(self._moving.values()):
            for lane, share in flow.loads.items():
                loads[lanes[lane], column] = share
                capacity[lanes[lane]] = flow.room[lane] * room[lane]
        full = np.array([flow.full_pace for flow in self._moving.values()])
        limit = np.array([alone[task] for task in self._moving]) * full
        rates = max_min_rates(loads, capacity, limit)
        paces = np.where(rates == limit, [alone[task] for task in self._moving], rates / full)
        return dict(zip(self._moving, paces.tolist(), strict=True))
