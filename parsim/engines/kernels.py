"""The compiled loops of the static engine. Importing this module loads numba (about a second); static.py does so when
it first simulates.

`g` is a GraphArrays; `floor[r]` is the second from which resource r is free; `slowdown` is a Slowdown, `on_core` the resources
of each core. No fast-math: sums and maxima are those of
IEEE doubles, so that the engines can be equal bitwise.
"""

from __future__ import annotations

import numpy as np
from numba import njit

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


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def set_next(tree, resource, second):  # type: ignore[no-untyped-def]
    """Note when the next event of a resource is due. `tree` is a tournament: the root, tree[1], is the earliest of all."""
    node = len(tree) // 2 + resource
    tree[node] = second
    while node > 1:
        node //= 2
        earliest = min(tree[2 * node], tree[2 * node + 1])
        if tree[node] == earliest:
            return
        tree[node] = earliest


@njit(cache=True, nogil=True)
def earliest_resource(tree):  # type: ignore[no-untyped-def]
    """A resource whose event is due at tree[1]."""
    node, leaves = 1, len(tree) // 2
    while node < leaves:
        node = 2 * node if tree[2 * node] == tree[node] else 2 * node + 1
    return node - leaves


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def run_with_overlap(g, slowdown, on_core, durations, floor, start, end):  # type: ignore[no-untyped-def]
    """Fill start and end, following every task's rate from instant to instant.

    Per instant: everything that ends and starts in it, until nothing more does; then the tasks whose slowness changed
    get what is left of them priced at the new rate. The event of a resource is the end of the task it holds as the first
    of that task's resources, or the second from which it is free.
    """
    n, cores, resources = len(g.kind), len(on_core.offsets) - 1, len(g.last)
    waiting = g.before.offsets[1:] - g.before.offsets[:-1]
    left, since, slowness = np.zeros(n), np.zeros(n), np.ones(n)
    holder, first = np.full(resources, -1, dtype=np.int64), np.full(resources, -1, dtype=np.int64)
    active = np.zeros((3, cores), dtype=np.int64)
    changed, changed_count, is_changed = np.empty(cores, dtype=np.int64), 0, np.zeros(cores, dtype=np.bool_)
    ready, ready_count = np.empty(n, dtype=np.int64), 0
    leaves = 1
    while leaves < resources:
        leaves *= 2
    tree = np.full(2 * leaves, np.inf)
    for task in range(n):
        for k in range(g.heads.offsets[task], g.heads.offsets[task + 1]):
            if floor[g.heads.values[k]] > 0.0:
                waiting[task] += 1
                first[g.heads.values[k]] = task
                set_next(tree, g.heads.values[k], floor[g.heads.values[k]])
        if waiting[task] == 0:
            ready[ready_count] = task
            ready_count += 1
    now = 0.0
    while True:
        while ready_count > 0 or tree[1] <= now:
            if ready_count > 0:  # a task starts
                ready_count -= 1
                task, step = ready[ready_count], 1
                start[task], since[task], left[task] = now, now, durations[task]
                end[task] = now + durations[task]
                set_next(tree, g.resources.values[g.resources.offsets[task]], end[task])
            else:
                resource = earliest_resource(tree)
                set_next(tree, resource, np.inf)
                task, step = holder[resource], -1
                if task == -1:  # the resource is free from now on
                    waiting[first[resource]] -= 1
                    if waiting[first[resource]] == 0:
                        ready[ready_count] = first[resource]
                        ready_count += 1
                    continue
                for k in range(g.after.offsets[task], g.after.offsets[task + 1]):  # a task ends
                    later = g.after.values[k]
                    waiting[later] -= 1
                    if waiting[later] == 0:
                        ready[ready_count] = later
                        ready_count += 1
            for k in range(g.resources.offsets[task], g.resources.offsets[task + 1]):
                holder[g.resources.values[k]] = task if step == 1 else -1
            for k in range(g.ranks.offsets[task], g.ranks.offsets[task + 1]):
                core = slowdown.core[g.ranks.values[k]]
                active[g.kind[task], core] += step
                if not is_changed[core]:
                    is_changed[core] = True
                    changed[changed_count] = core
                    changed_count += 1
        for c in range(changed_count):
            core = changed[c]
            is_changed[core] = False
            for k in range(on_core.offsets[core], on_core.offsets[core + 1]):
                task = holder[on_core.values[k]]
                if task == -1 or g.kind[task] == _OTHER:
                    continue
                wanted = slowness_of(g, slowdown, active, task)
                if wanted == slowness[task]:
                    continue
                left[task] = max(0.0, left[task] - (now - since[task]) / slowness[task])
                since[task], slowness[task] = now, wanted
                end[task] = now + left[task] * wanted
                set_next(tree, g.resources.values[g.resources.offsets[task]], end[task])
        changed_count = 0
        if tree[1] == np.inf:
            return
        now = tree[1]


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
    for sample in range(samples):
        floor[:] = 0.0
        for task in range(len(row)):
            row[task] = durations[sample, unit[task]]
        seconds = row if len(unit) else durations[sample]
        for _ in range(steps):
            if plain:
                run_plain(g, seconds, floor, start, end)
            else:
                run_with_overlap(g, slowdown, on_core, seconds, floor, start, end)
            ended[:] = 0.0
            for resource in range(len(g.last)):
                if g.last[resource] >= 0:
                    ended[together[resource]] = max(ended[together[resource]], end[g.last[resource]])
            for resource in range(len(g.last)):
                floor[resource] = ended[together[resource]]
                total[sample] = max(total[sample], floor[resource])
    return total
