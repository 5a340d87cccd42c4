"""The loops of the static engine, compiled by numba. Importing this module loads it (about a second); `static` does so when it
first simulates. Without numba they run as Python, and those that take longest on lists or by numpy over all draws at once.
Both give the same numbers, bit for bit.

`g` is a GraphArrays; `floor[r]` is the second from which resource r is free; `slowdown` is a Slowdown, `on_core` the resources
of each core. No fast-math: sums and maxima are those of IEEE doubles, so that the engines can be equal bitwise.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from parsim.jit import njit
from parsim.numeric import Bools, Floats, Ints
from parsim.program.columns import RaggedTable

MANY_TASKS = 100_000
"""Of one graph: Python's loops then take about half a second for each of the plans that a search simulates."""


def run_plain_on_lists(g: Any, durations: Floats, floor: Floats, start: Floats, end: Floats) -> None:
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


def last_ends_of_rows_by_numpy(g: Any, durations: Floats, unit: Ints, steps: int, together: Ints) -> Floats:
    seconds = np.ascontiguousarray(durations.T)
    column = unit.tolist() if len(unit) else range(len(g.order))
    return _follow(g, steps, together, len(durations), lambda task, begin: begin + seconds[column[task]])


def last_ends_side_by_side_by_numpy(
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


# --- compiled loops ---------------------------------------------------------------------------------------------------


_OTHER, _COMPUTING, _COMMUNICATING = 0, 1, 2


@njit(cache=True, nogil=True)
def topological_order(waiting, after):  # type: ignore[no-untyped-def]
    """Kahn's order, first in first out; shorter than the graph if there is a cycle. `waiting` is used up."""
    n = len(waiting)
    order = np.empty(n, dtype=np.int64)
    filled = 0
    for task in range(n):
        if waiting[task] == 0:
            order[filled] = task
            filled += 1
    done = 0
    while done < filled:
        task = order[done]
        done += 1
        for k in range(after.offsets[task], after.offsets[task + 1]):
            later = after.values[k]
            waiting[later] -= 1
            if waiting[later] == 0:
                order[filled] = later
                filled += 1
    return order[:filled]


@njit(cache=True, nogil=True)
def longest_path(order, before, durations, end):  # type: ignore[no-untyped-def]
    """Fill `end`: the longest sum of durations over `before` up to and with each task. Returns its maximum."""
    longest = 0.0
    for position in range(len(order)):
        task = order[position]
        begin = 0.0
        for k in range(before.offsets[task], before.offsets[task + 1]):
            begin = max(begin, end[before.values[k]])
        end[task] = begin + durations[task]
        longest = max(longest, end[task])
    return longest


@njit(cache=True, nogil=True, plain=run_plain_on_lists)
def run_plain(g, durations, floor, start, end):  # type: ignore[no-untyped-def]
    """Fill start and end: start = max of the ends before, and of the floors of the resources a task is first on."""
    for position in range(len(g.order)):
        task = g.order[position]
        begin = 0.0
        for k in range(g.before.offsets[task], g.before.offsets[task + 1]):
            begin = max(begin, end[g.before.values[k]])
        for k in range(g.heads.offsets[task], g.heads.offsets[task + 1]):
            begin = max(begin, floor[g.heads.values[k]])
        start[task] = begin
        end[task] = begin + durations[task]


# Numba counts a reference to an array whenever a variable takes it, with an atomic instruction each: two thirds of the time of
# the loop over instants. The functions from here to `follow_rates` make no array (`_nrt`), so there is nothing to count.


@njit(inline="always")
def set_next(tree, resource, second):  # type: ignore[no-untyped-def]
    """Note when the next event of a resource is due. `tree` is a tournament: the root, tree[1], is the earliest of all."""
    node = len(tree) // 2 + resource
    tree[node] = second
    while node > 1:
        second = min(second, tree[node ^ 1])
        node //= 2
        tree[node] = second


@njit(inline="always")
def earliest_resource(tree):  # type: ignore[no-untyped-def]
    """A resource whose event is due at tree[1]."""
    node, leaves, earliest = 1, len(tree) // 2, tree[1]
    while node < leaves:
        node = 2 * node + (tree[2 * node] != earliest)
    return node - leaves


@njit(inline="always")
def slowness_of(g, slowdown, active, task):  # type: ignore[no-untyped-def]
    """How many times as long a task takes as alone: the most that any of its cores asks for.

    Args: active: int64 [3, cores], how many tasks of each kind run on each core.
    """
    computes = g.kind[task] == _COMPUTING
    slowness = 1.0
    for k in range(g.ranks.offsets[task], g.ranks.offsets[task + 1]):
        core = slowdown.core[g.ranks.values[k]]
        overlaps = active[3 - g.kind[task], core] > 0
        factor = 1.0
        if computes:
            factor = active[_COMPUTING, core] * (slowdown.compute if overlaps else 1.0)
        else:
            if overlaps:
                factor = slowdown.communication
            if slowdown.divided:
                own = 0
                for other in range(g.ranks.offsets[task], g.ranks.offsets[task + 1]):
                    own += slowdown.core[g.ranks.values[other]] == core
                factor *= active[_COMMUNICATING, core] / own
        slowness = max(slowness, factor)
    return slowness


class Running(NamedTuple):
    """What `follow_rates` keeps while it runs.

    Attributes:
        waiting: per task, for how many others it waits. ready, started: numbers of tasks, as far as they are filled.
        holder: per resource the task that holds it, or -1. first: the task that waits until the resource is free.
        left, since, slowness: of the task that a resource holds as the first of its resources: seconds alone that were left of
            it at the second `since`, and how many times as long it takes from then on.
        active, before: int64 [3, cores], how many tasks of each kind run on each core, now and in the last instant.
        changed, is_changed: cores on which a task began or ended. tree: of `set_next`.
    """

    waiting: Ints
    ready: Ints
    started: Ints
    holder: Ints
    first: Ints
    left: Floats
    since: Floats
    slowness: Floats
    active: Ints
    before: Ints
    changed: Ints
    is_changed: Bools
    tree: Floats


@njit(cache=True, nogil=True)
def nothing_running(g, cores):  # type: ignore[no-untyped-def]
    """Room for `follow_rates`."""
    n, resources, leaves = len(g.kind), len(g.last), 1
    while leaves < resources:
        leaves *= 2
    return Running(
        np.empty(n, dtype=np.int64),
        np.empty(n, dtype=np.int64),
        np.empty(n, dtype=np.int64),
        np.full(resources, -1, dtype=np.int64),
        np.full(resources, -1, dtype=np.int64),
        np.zeros(resources),
        np.zeros(resources),
        np.ones(resources),
        np.zeros((3, cores), dtype=np.int64),
        np.zeros((3, cores), dtype=np.int64),
        np.empty(cores, dtype=np.int64),
        np.zeros(cores, dtype=np.bool_),
        np.full(2 * leaves, np.inf),
    )


@njit(cache=True, nogil=True)
def run_with_overlap(g, slowdown, on_core, durations, floor, start, end):  # type: ignore[no-untyped-def]
    """Fill start and end of one step, in which tasks slow one another."""
    follow_rates(g, slowdown, on_core, nothing_running(g, len(on_core.offsets) - 1), durations, floor, start, end)


@njit(cache=True, nogil=True, _nrt=False)
def follow_rates(g, slowdown, on_core, run, durations, floor, start, end):  # type: ignore[no-untyped-def]
    """Fill start and end, following every task's rate from instant to instant. In the end `run` is as it was.

    Per instant: everything that ends and starts in it, until nothing more does. Then the tasks that started are priced, and on
    cores where more or fewer tasks run than before, what is left of those whose slowness changed. A core whose tasks only
    follow one another changes nobody's rate. The event of a resource is the end of the task it holds as the first of that
    task's resources, or the second from which it is free.
    """
    ready_count = started_count = changed_count = 0
    for task in range(len(g.kind)):
        run.waiting[task] = g.before.offsets[task + 1] - g.before.offsets[task]
        for k in range(g.heads.offsets[task], g.heads.offsets[task + 1]):
            if floor[g.heads.values[k]] > 0.0:
                run.waiting[task] += 1
                run.first[g.heads.values[k]] = task
                set_next(run.tree, g.heads.values[k], floor[g.heads.values[k]])
        if run.waiting[task] == 0:
            run.ready[ready_count] = task
            ready_count += 1
    now, vacant = 0.0, -1  # the resource of the last event, whose next one is not noted yet
    while True:
        while ready_count > 0 or run.tree[1] <= now:
            if ready_count > 0:  # a task starts
                ready_count -= 1
                task, step = run.ready[ready_count], 1
            elif vacant >= 0:
                set_next(run.tree, vacant, np.inf)
                vacant = -1
                continue
            else:
                vacant = earliest_resource(run.tree)
                task, step = run.holder[vacant], -1
                if task == -1:  # the resource is free from now on
                    run.waiting[run.first[vacant]] -= 1
                    if run.waiting[run.first[vacant]] == 0:
                        run.ready[ready_count] = run.first[vacant]
                        ready_count += 1
                    continue
                for k in range(g.after.offsets[task], g.after.offsets[task + 1]):  # a task ends
                    later = g.after.values[k]
                    run.waiting[later] -= 1
                    if run.waiting[later] == 0:
                        run.ready[ready_count] = later
                        ready_count += 1
            for k in range(g.resources.offsets[task], g.resources.offsets[task + 1]):
                run.holder[g.resources.values[k]] = task if step == 1 else -1
            for k in range(g.ranks.offsets[task], g.ranks.offsets[task + 1]):
                core = slowdown.core[g.ranks.values[k]]
                if not run.is_changed[core]:
                    run.is_changed[core] = True
                    run.changed[changed_count] = core
                    changed_count += 1
                run.active[g.kind[task], core] += step
            if step == 1:
                resource = g.resources.values[g.resources.offsets[task]]
                vacant = -1 if vacant == resource else vacant
                start[task] = run.since[resource] = now
                run.left[resource], run.slowness[resource] = durations[task], 1.0
                if now + durations[task] > now:
                    run.slowness[resource] = slowness_of(g, slowdown, run.active, task)
                    run.started[started_count] = task
                    started_count += 1
                end[task] = now + durations[task] * run.slowness[resource]
                set_next(run.tree, resource, end[task])
        for place in range(started_count):
            task = run.started[place]
            resource = g.resources.values[g.resources.offsets[task]]
            wanted = slowness_of(g, slowdown, run.active, task)
            if wanted != run.slowness[resource]:
                run.slowness[resource] = wanted
                end[task] = now + durations[task] * wanted
                set_next(run.tree, resource, end[task])
        started_count = 0
        for place in range(changed_count):
            core = run.changed[place]
            run.is_changed[core] = False
            if run.active[1, core] == run.before[1, core] and run.active[2, core] == run.before[2, core]:
                continue
            run.before[1, core], run.before[2, core] = run.active[1, core], run.active[2, core]
            for k in range(on_core.offsets[core], on_core.offsets[core + 1]):
                task = run.holder[on_core.values[k]]
                if task == -1 or g.kind[task] == _OTHER:
                    continue
                wanted = slowness_of(g, slowdown, run.active, task)
                resource = g.resources.values[g.resources.offsets[task]]
                if wanted == run.slowness[resource]:
                    continue
                run.left[resource] = max(0.0, run.left[resource] - (now - run.since[resource]) / run.slowness[resource])
                run.since[resource], run.slowness[resource] = now, wanted
                end[task] = now + run.left[resource] * wanted
                set_next(run.tree, resource, end[task])
        changed_count = 0
        if run.tree[1] == np.inf:
            return
        now = run.tree[1]


@njit(cache=True, nogil=True)
def last_ends(g, slowdown, on_core, plain, durations, unit, steps, together):  # type: ignore[no-untyped-def]
    """float64 [S]: the end of the last of `steps` repeats, each resource going on where it and those `together` with it ended.

    `durations`: [S, n], or [S, units] if `unit` is not empty. plain: nothing slows anything. together: int64 [resources].
    """
    samples, n = len(durations), len(g.kind)
    row = np.empty(n if len(unit) else 0)
    start, end, floor = np.zeros(n), np.zeros(n), np.zeros(len(g.last))
    total = np.zeros(samples)
    ended = np.zeros(together.max() + 1 if len(together) else 0)
    run = nothing_running(g, len(on_core.offsets) - 1)
    for sample in range(samples):
        floor[:] = 0.0
        for task in range(len(row)):
            row[task] = durations[sample, unit[task]]
        seconds = row if len(unit) else durations[sample]
        for _ in range(steps):
            if plain:
                run_plain(g, seconds, floor, start, end)
            else:
                follow_rates(g, slowdown, on_core, run, seconds, floor, start, end)
            ended[:] = 0.0
            for resource in range(len(g.last)):
                if g.last[resource] >= 0:
                    ended[together[resource]] = max(ended[together[resource]], end[g.last[resource]])
            for resource in range(len(g.last)):
                floor[resource] = ended[together[resource]]
                total[sample] = max(total[sample], floor[resource])
    return total


LANES = 4
"""Rows of durations that one pass over a graph takes side by side: its arrays are most of what a pass reads."""


@njit(cache=True, nogil=True, plain=last_ends_of_rows_by_numpy)
def last_ends_of_rows(g, durations, unit, steps, together):  # type: ignore[no-untyped-def]
    """float64 [S]: as `last_ends` where nothing slows anything, of several rows at a time."""
    samples, n = len(durations), len(g.kind)
    by_unit = len(unit) > 0
    columns = durations.shape[1]
    seconds, end, begin = np.zeros((columns, LANES)), np.zeros((n, LANES)), np.zeros(LANES)
    floor, ended = np.zeros((len(g.last), LANES)), np.zeros((together.max() + 1 if len(together) else 0, LANES))
    total = np.zeros(samples)
    for first in range(0, samples, LANES):
        rows = min(LANES, samples - first)
        for row in range(rows):
            for column in range(columns):
                seconds[column, row] = durations[first + row, column]
        floor[:] = 0.0
        for _ in range(steps):
            for position in range(len(g.order)):
                task = g.order[position]
                begin[:] = 0.0
                for k in range(g.before.offsets[task], g.before.offsets[task + 1]):
                    earlier = g.before.values[k]
                    for row in range(LANES):
                        begin[row] = max(begin[row], end[earlier, row])
                for k in range(g.heads.offsets[task], g.heads.offsets[task + 1]):
                    resource = g.heads.values[k]
                    for row in range(LANES):
                        begin[row] = max(begin[row], floor[resource, row])
                column = unit[task] if by_unit else task
                for row in range(LANES):
                    end[task, row] = begin[row] + seconds[column, row]
            ended[:] = 0.0
            for resource in range(len(g.last)):
                if g.last[resource] >= 0:
                    for row in range(LANES):
                        ended[together[resource], row] = max(ended[together[resource], row], end[g.last[resource], row])
            for resource in range(len(g.last)):
                for row in range(LANES):
                    floor[resource, row] = ended[together[resource], row]
                for row in range(rows):
                    total[first + row] = max(total[first + row], floor[resource, row])
    return total


@njit(cache=True, nogil=True, plain=last_ends_side_by_side_by_numpy)
def last_ends_side_by_side(g, durations, of_rank, factors, joins, steps, together):  # type: ignore[no-untyped-def]
    """float64 [draws]: as `last_ends` without slowdown, of a program whose tasks have a time in each of several rows.

    factors: float64 [draws, ranks, rows]; of_rank: int64 [n], whose factor a task has (-1: none). joins: bool [n], tasks that
    begin in all rows at once.
    """
    draws, _, rows = factors.shape
    end, begin = np.zeros((len(g.order), rows)), np.zeros(rows)
    floor, ended = np.zeros((len(g.last), rows)), np.zeros((together.max() + 1, rows))
    total = np.zeros(draws)
    for draw in range(draws):
        floor[:] = 0.0
        for _ in range(steps):
            for position in range(len(g.order)):
                task = g.order[position]
                begin[:] = 0.0
                for k in range(g.before.offsets[task], g.before.offsets[task + 1]):
                    for row in range(rows):
                        begin[row] = max(begin[row], end[g.before.values[k], row])
                for k in range(g.heads.offsets[task], g.heads.offsets[task + 1]):
                    for row in range(rows):
                        begin[row] = max(begin[row], floor[g.heads.values[k], row])
                if joins[task]:
                    begin[:] = begin.max()
                rank = of_rank[task]
                for row in range(rows):
                    factor = factors[draw, rank, row] if rank >= 0 else 1.0
                    end[task, row] = begin[row] + durations[task] * factor
            ended[:] = 0.0
            for resource in range(len(g.last)):
                if g.last[resource] >= 0:
                    for row in range(rows):
                        ended[together[resource], row] = max(ended[together[resource], row], end[g.last[resource], row])
            for resource in range(len(g.last)):
                floor[resource] = ended[together[resource]]
                total[draw] = max(total[draw], floor[resource].max())
    return total


@njit(cache=True, nogil=True)
def noise_paths(order, before, end, wrap, spread, level, joins_shards, joins_replicas, mean1, var1):  # type: ignore[no-untyped-def]
    """The task each task waits for longest, and the variance that noise has added up on the way (see `parsim.engines.noise`).

    Returns: int64 [n], -1 for none; and float64 [2, 3, n]. Axis 0 is the first step and a later one. Axis 1 is shards alone,
    replicas, and the mean by which replicas are late.
    """
    n = len(order)
    latest = np.full(n, -1, dtype=np.int64)
    states = np.zeros((2, 3, n))
    for step in range(2):
        state = states[step]
        for position in range(n):
            task = order[position]
            best = -1
            for k in range(before.offsets[task], before.offsets[task + 1]):
                other = before.values[k]
                alike = best >= 0 and abs(end[other] - end[best]) <= 1e-12 * end[best]  # then that with more noise counts
                noisier = alike and state[:2, other].sum() > state[:2, best].sum()
                if best == -1 or noisier or (not alike and end[other] > end[best]):
                    best = other
            latest[task] = best
            alone, shared, late = 0.0, 0.0, 0.0
            if best >= 0:
                alone, shared, late = state[0, best], state[1, best], state[2, best]
            elif step == 1 and wrap[task] >= 0:
                alone, shared, late = states[0, 0, wrap[task]], states[0, 1, wrap[task]], states[0, 2, wrap[task]]
            if joins_shards[task]:
                late += np.sqrt(alone) * mean1
                shared += alone * var1
                alone = 0.0
            if joins_replicas[task]:
                alone, shared, late = 0.0, 0.0, 0.0
            if level[task] == 1:
                alone += spread[task] ** 2
            elif level[task] == 2:
                shared += spread[task] ** 2
            state[0, task], state[1, task], state[2, task] = alone, shared, late
    return latest, states


@njit(cache=True, nogil=True)
def slowest_of(table, x, low, step):  # type: ignore[no-untyped-def]
    """A tabulated function at x, linear between its points and beyond them."""
    place = (x - low) / step
    cell = min(max(int(np.floor(place)), 0), len(table) - 2)
    return table[cell] + (place - cell) * (table[cell + 1] - table[cell])


@njit(cache=True, nogil=True)
def slowest_delays(ranks, low, step_z, draws):  # type: ignore[no-untyped-def]
    """Turn `draws`, standard normal [rows, n], into the seconds by which each task of the slowest is late, in place.

    ranks: `noise.SlowestRanks`; its tables begin at `low`, in steps of `step_z`.
    """
    n = len(ranks.order)
    own = np.zeros((3, n))
    first = np.zeros((3, n))
    for row in range(len(draws)):
        for step in range(2):
            for position in range(n):
                task = ranks.order[position]
                before, state, sums = ranks.latest[task], ranks.states[step], own
                if before == -1:
                    before, state, sums = (ranks.wrap[task] if step == 1 else -1), ranks.states[0], first
                alone, shared, reached, variance = 0.0, 0.0, 0.0, 0.0
                if before >= 0:
                    alone, shared, reached, variance = sums[0, before], sums[1, before], sums[2, before], state[0, before]
                if ranks.joins_shards[task]:
                    if variance > 0.0:
                        shared += np.sqrt(variance) * slowest_of(ranks.tables[0], alone / np.sqrt(variance), low, step_z)
                    alone = 0.0
                if ranks.joins_replicas[task]:
                    alone, shared, reached = 0.0, 0.0, 0.0
                noise = ranks.spread[task] * draws[row, task] if ranks.spread[task] > 0.0 else 0.0
                ends = reached
                if ranks.spread[task] > 0.0 and ranks.level[task] > 0:
                    if ranks.level[task] == 1:
                        alone += noise
                    else:
                        shared += noise
                    noise = 0.0
                    now = ranks.states[step]
                    root = np.sqrt(now[0, task])
                    slowest = root * slowest_of(ranks.tables[0], alone / root, low, step_z) if root > 0.0 else 0.0
                    mean = now[2, task] + root * ranks.mean
                    deviation = np.sqrt(now[1, task] + now[0, task] * ranks.variance)
                    standing = (shared + slowest - mean) / deviation
                    ends = mean + deviation * slowest_of(ranks.tables[ranks.table_of[task]], standing, low, step_z)
                own[0, task], own[1, task], own[2, task] = alone, shared, ends
                if step == 1:
                    draws[row, task] = ends - reached + noise
            if step == 0:
                first[:] = own
    return draws


@njit(cache=True, nogil=True)
def split_gaps(  # type: ignore[no-untyped-def]
    next_task,
    gap_start,
    gap_end,
    pipelined,
    own_task,
    own_end_s,
    ended,
    before,
    task_end_s,
    loads,
    transfers,
    comm_start,
    comm_end,
):
    """Seconds in the gaps of one compute stream: exposed communication, waits for loads, for peers and for else, and the rest.

    next_task: of every gap but the last, which ends the step. own_task, own_end_s: the rows of the rank. ended: float64 [n],
    minus infinity before and after. comm_start, comm_end: disjoint and ascending, as the gaps are.

    Returns float64 [6]: those five, and when the wait for loads of the first gap ends.
    """
    for row in range(len(own_task)):
        ended[own_task[row]] = max(ended[own_task[row]], own_end_s[row])
    found = np.zeros(6)
    cuts, covered = np.empty(5), np.empty(5)
    begun, total = 0, 0.0
    for gap in range(len(gap_start)):
        cuts[0] = gap_start[gap]
        cuts[1], cuts[2], cuts[3], cuts[4] = 0.0, 0.0, 0.0, gap_end[gap]
        if gap < len(next_task):
            for k in range(before.offsets[next_task[gap]], before.offsets[next_task[gap] + 1]):
                need = before.values[k]
                remote = ended[need] == -np.inf
                end = task_end_s[need] if remote else ended[need]
                place = 1 if loads[need] else (2 if transfers[need] or remote else 3)
                cuts[place] = max(cuts[place], end)
        else:
            cuts[2 if pipelined else 3] = gap_end[gap]
        for place in range(1, 4):
            cuts[place] = max(cuts[place - 1], min(max(cuts[place], gap_start[gap]), gap_end[gap]))
        cuts[4] = max(cuts[3], cuts[4])
        if gap == 0:
            found[5] = cuts[1]
        for place in range(5):
            while begun < len(comm_start) and comm_start[begun] <= cuts[place]:
                if begun:
                    total += comm_end[begun - 1] - comm_start[begun - 1]
                begun += 1
            covered[place] = 0.0
            if begun:
                covered[place] = total + (min(cuts[place], comm_end[begun - 1]) - comm_start[begun - 1])
        for place in range(4):
            exposed = covered[place + 1] - covered[place]
            found[0] += exposed
            found[place + 1] += max(cuts[place + 1] - cuts[place] - exposed, 0.0)
    for row in range(len(own_task)):
        ended[own_task[row]] = -np.inf
    return found
