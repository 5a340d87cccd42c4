"""The loops that take longest, as lists and by numpy over all draws at once: what `kernels` runs where numba is not installed.

Arguments and results are those of the functions of the same names in `kernels`, bit for bit.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import numpy as np

from parsim.numeric import Bools, Floats, Ints
from parsim.program.columns import RaggedTable

MANY_TASKS = 100_000
"""Of one graph: Python's loops then take about half a second for each of the plans that a search simulates."""


def run_plain(g: Any, durations: Floats, floor: Floats, start: Floats, end: Floats) -> None:
    if len(g.order) > MANY_TASKS:
        warnings.warn(
            f"simulating {len(g.order):,} tasks without numba is slow: pip install 'parsim[fast]'",
            stacklevel=2,
        )
    before, heads, seconds, floors = _lists(g.before), _lists(g.heads), durations.tolist(), floor.tolist()
    starts, ends = start.tolist(), end.tolist()
    for task in g.order.tolist():
        begin = 0.0
        for earlier in before[task]:
            if ends[earlier] > begin:
                begin = ends[earlier]
        for resource in heads[task]:
            if floors[resource] > begin:
                begin = floors[resource]
        starts[task], ends[task] = begin, begin + seconds[task]
    start[:], end[:] = starts, ends


def last_ends_of_rows(g: Any, durations: Floats, unit: Ints, steps: int, together: Ints) -> Floats:
    seconds = np.ascontiguousarray(durations.T)
    column = unit.tolist() if len(unit) else range(len(g.order))
    return _follow(g, steps, together, len(durations), lambda task, begin: begin + seconds[column[task]])


def last_ends_side_by_side(
    g: Any, durations: Floats, of_rank: Ints, factors: Floats, joins: Bools, steps: int, together: Ints
) -> Floats:
    draws, _, rows = factors.shape
    of_each = np.ascontiguousarray(factors.transpose(1, 0, 2).reshape(factors.shape[1], draws * rows))

    def end_of(task: int, begin: Floats) -> Floats:
        if joins[task]:
            begin = np.repeat(begin.reshape(draws, rows).max(axis=1), rows)
        end: Floats = begin + durations[task] * (of_each[of_rank[task]] if of_rank[task] >= 0 else 1.0)
        return end

    ends: Floats = _follow(g, steps, together, draws * rows, end_of).reshape(draws, rows).max(axis=1)
    return ends


def _follow(g: Any, steps: int, together: Ints, width: int, end_of: Any) -> Floats:
    """float64 [width]: the end of the last task; `end_of` takes a task and float64 [width], when it begins."""
    order, before, heads = g.order.tolist(), _lists(g.before), _lists(g.heads)
    last, groups = g.last.tolist(), together.tolist()
    used = [resource for resource in range(len(last)) if last[resource] >= 0]
    end = np.zeros((len(order), width))
    floor = np.zeros((len(last), width))
    total = np.zeros(width)
    for _ in range(steps):
        for task in order:
            begin = np.zeros(width)
            for earlier in before[task]:
                np.maximum(begin, end[earlier], out=begin)
            for resource in heads[task]:
                np.maximum(begin, floor[resource], out=begin)
            end[task] = end_of(task, begin)
        ended = np.zeros((max(groups, default=-1) + 1, width))
        for resource in used:
            np.maximum(ended[groups[resource]], end[last[resource]], out=ended[groups[resource]])
        floor = ended[groups] if groups else floor
        total = np.maximum(total, floor.max(axis=0, initial=0.0))
    return total


def _lists(table: RaggedTable) -> list[list[int]]:
    offsets, values = table.offsets.tolist(), table.values.tolist()
    return [values[first:last] for first, last in pairwise(offsets)]


def slowest_delays(
    order: Ints,
    latest: Ints,
    states: Floats,
    wrap: Ints,
    spread: Floats,
    level: Ints,
    joins_shards: Bools,
    joins_replicas: Bools,
    mean1: float,
    var1: float,
    tables: Floats,
    table_of: Ints,
    low: float,
    step_z: float,
    draws: Floats,
) -> Floats:
    rows, n = draws.shape
    own, first = np.zeros((n, 3, rows)), np.zeros((n, 3, rows))
    random, late = np.ascontiguousarray(draws.T), np.zeros((n, rows))
    for step in range(2):
        for task in order.tolist():
            before, state, sums = int(latest[task]), states[step], own
            if before == -1:
                before, state, sums = (int(wrap[task]) if step == 1 else -1), states[0], first
            alone, shared, reached = sums[before] if before >= 0 else np.zeros((3, rows))
            variance = state[0, before] if before >= 0 else 0.0
            if joins_shards[task]:
                if variance > 0.0:
                    shared = shared + np.sqrt(variance) * _tabulated(tables[0], alone / np.sqrt(variance), low, step_z)
                alone = np.zeros(rows)
            if joins_replicas[task]:
                alone, shared, reached = np.zeros((3, rows))
            noise: Floats | float = spread[task] * random[task] if spread[task] > 0.0 else 0.0
            ends = reached
            if spread[task] > 0.0 and level[task] > 0:
                if level[task] == 1:
                    alone = alone + noise
                else:
                    shared = shared + noise
                noise = 0.0
                now = states[step]
                root = np.sqrt(now[0, task])
                slowest = root * _tabulated(tables[0], alone / root, low, step_z) if root > 0.0 else 0.0
                mean = now[2, task] + root * mean1
                deviation = np.sqrt(now[1, task] + now[0, task] * var1)
                standing = (shared + slowest - mean) / deviation
                ends = mean + deviation * _tabulated(tables[table_of[task]], standing, low, step_z)
            own[task] = alone, shared, ends
            if step == 1:
                late[task] = ends - reached + noise
        if step == 0:
            first[:] = own
    draws[:] = late.T
    return draws


def _tabulated(table: Floats, x: Floats, low: float, step: float) -> Floats:
    """`kernels.slowest_of` of every x."""
    place = (x - low) / step
    cell = np.clip(np.floor(place).astype(np.int64), 0, len(table) - 2)
    found: Floats = table[cell] + (place - cell) * (table[cell + 1] - table[cell])
    return found
