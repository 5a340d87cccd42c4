"""Noise of single tasks in a folded program: a rank that represents many waits for the slowest of them.

A folded program runs one rank for each kind of rank. If every task of every rank is a little slower or faster by itself, a
collective waits for the slowest of the ranks that it joins. That maximum is kept as an order statistic:

    max of m independent standard normals = g_m(Z), Z standard normal, g_m(z) = N^-1(N(z)^(1/m))        (exact in distribution)

The noise of a rank adds up from task to task until a collective joins the ranks it represents. So the maximum must be taken of
the sum, not of each task. The sum B of the simulated rank's own draws has variance V along the path of tasks that wait for one
another. The slowest of m such ranks is late by sqrt(V) g_m(B / sqrt(V)). A task gets the growth of that while it runs:

    late(task) = sqrt(V') g_m(B' / sqrt(V')) - sqrt(V) g_m(B / sqrt(V)),     V' = V + v(task),  B' = B + draw(task)

For one task before a collective this is the exact maximum of log-normal durations. For m = 1 it is the task's own draw.
There are two levels: the tp shards of a replica, which its own collectives join, and the replicas, which gradient
collectives join. The delay of the slowest shards, with its mean and variance, adds to the noise of their replica. Work of
a rank after the last collective of a step counts towards the first one of the next step.

Leaves out: the path is that of the medians, so tasks that become critical only by noise are missed. Sums are assumed
normal. The first and the last step count as steady ones. Side by side collectives over replicas, one per shard, are taken
to wait for the slowest shard too, and those of a sharding group (`Mesh.dp_shard`) for the slowest replica of all groups.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parsim.costs.estimate import rank_noise
from parsim.engines.static import CompiledGraph
from parsim.numeric import Floats, Ints
from parsim.program.columns import Folding
from parsim.timeline import Timeline
from parsim.work import Collective

REACH, POINTS = 9.0, 4609
"""Standard deviations to both sides of zero, and points, of the table of g_m."""

BY_NOBODY_ELSE, BY_SHARDS, BY_REPLICAS = 0, 1, 2
"""Whose noise a task's is: of the one task that all ranks share, of every shard for itself, of every replica for itself."""


class SlowestRanks(NamedTuple):
    """Which tasks of a folded program have noise, on which paths it adds up, and which collectives wait for the slowest.

    Attributes:
        seconds, spread: float64 [n], of each task: its median, and the standard deviation of its own noise in seconds.
        latest: int64 [n], the task it waits for longest. wrap: int64 [n], the last task of its rank, which the first tasks of
            a later step follow. states: variances along the paths (`kernels.noise_paths`). level: whose noise it is.
        joins_shards, joins_replicas: bool [n], collectives that wait for the slowest of them.
        tables: g_m, row 0 of the shards, the others of replicas; table_of: int64 [n], the row of each task's replica.
        mean, variance: of g_m(Z) of the shards.
    """

    order: Ints
    seconds: Floats
    spread: Floats
    latest: Ints
    wrap: Ints
    states: Floats
    level: Ints
    joins_shards: NDArray[np.bool_]
    joins_replicas: NDArray[np.bool_]
    tables: Floats
    table_of: Ints
    mean: float
    variance: float

    def exponents(self, draws: Floats) -> Floats:
        """log(duration / median) from independent standard normal draws, both float64 [rows, n]; `draws` is used up."""
        from parsim.engines import kernels

        late = kernels.slowest_delays(self, -REACH, 2 * REACH / (POINTS - 1), draws)
        exponents: Floats = np.divide(late, self.seconds, out=np.zeros_like(late), where=self.seconds > 0)
        return exponents


def slowest_ranks(
    compiled: CompiledGraph, folding: Folding, timeline: Timeline, medians_s: Floats, sigma: Floats
) -> SlowestRanks:
    """The slowest of the ranks that a folded program's ranks stand for. `medians_s`, `sigma`: float64 [n], per task:
    seconds, and the relative spread of its noise."""
    from parsim.engines import kernels

    columns, mesh = compiled.columns, folding.mesh
    shards, replicas = joined_by_unit(compiled, folding)
    folded_shards = len(folding.shards) < mesh.tp
    side_by_side = max((int(count) for count in shards), default=1) if folded_shards else 1
    ways = (side_by_side if side_by_side > 1 else mesh.tp) if folded_shards else 1
    joins_shards = (shards > 1)[columns.unit] & folded_shards
    joins_replicas = (replicas > 1)[columns.unit] & (len(folding.replicas) < mesh.copies)
    level = np.full(columns.size, BY_SHARDS, dtype=np.int64)
    level[joins_shards] = BY_REPLICAS
    level[joins_replicas & (joins_shards | (ways == 1))] = BY_NOBODY_ELSE
    copies = np.bincount(np.array(folding.replica_of), minlength=mesh.copies)[columns.first_rank // mesh.tp % mesh.copies]
    sizes = np.unique(copies)
    end = np.zeros(columns.size)
    end[timeline.task] = timeline.end_s
    tasks, ranks = columns.use_tasks, columns.resource_rank[columns.uses.values]
    last_of_rank = np.full(columns.world_size, -1, dtype=np.int64)  # the task that ends last
    by_end = np.argsort(end[tasks], kind="stable")
    last_of_rank[ranks[by_end]] = tasks[by_end]  # of several assignments to one rank the last one stays
    wrap = last_of_rank[columns.first_rank]
    mean, variance = _moments(ways)
    spread = medians_s * sigma
    latest, states = kernels.noise_paths(
        compiled.arrays.order,
        compiled.arrays.before,
        end,
        wrap,
        spread,
        level,
        joins_shards,
        joins_replicas,
        mean,
        variance,
    )
    return SlowestRanks(
        order=compiled.arrays.order,
        seconds=medians_s,
        spread=spread,
        latest=latest,
        wrap=wrap,
        states=states,
        level=level,
        joins_shards=joins_shards,
        joins_replicas=joins_replicas,
        tables=np.array([_table(ways), *(_table(int(size)) for size in sizes)]),
        table_of=1 + np.searchsorted(sizes, copies),
        mean=mean,
        variance=variance,
    )


def joined_by_unit(compiled: CompiledGraph, folding: Folding) -> tuple[Ints, Ints]:
    """How many shards of one replica the collective of each unit joins, and how many replicas; 1 for other work."""
    mesh, units = folding.mesh, compiled.columns.units
    shards, replicas = np.ones(len(units), dtype=np.int64), np.ones(len(units), dtype=np.int64)
    for number, unit in enumerate(units):
        if isinstance(unit.work, Collective):
            group = np.array(unit.work.group)
            replicas[number] = len(np.unique(group // mesh.tp % mesh.copies))
            shards[number] = len(np.unique(group % mesh.tp))
    return shards, replicas


@lru_cache(maxsize=256)
def _table(ranks: int) -> Floats:
    """g_m on the points from -REACH to REACH."""
    z = np.linspace(-REACH, REACH, POINTS)
    return z if ranks == 1 else np.array([_slowest(value, ranks) for value in z.tolist()])


def _slowest(z: float, ranks: int) -> float:
    """g_m(z), by the smaller of the two tails."""
    normal, beyond = NormalDist(), math.erfc(abs(z) / math.sqrt(2)) / 2
    log_share = (math.log(beyond) if z < 0 else math.log1p(-beyond)) / ranks
    return normal.inv_cdf(math.exp(log_share)) if log_share < -math.log(2) else -normal.inv_cdf(-math.expm1(log_share))


def _moments(ranks: int) -> tuple[float, float]:
    """Mean and variance of the maximum of m independent standard normals."""
    if ranks == 1:
        return 0.0, 1.0
    z = np.linspace(-REACH, REACH, POINTS)
    weight = np.exp(-z * z / 2)
    weight /= weight.sum()
    mean = float(weight @ _table(ranks))
    return mean, float(weight @ (_table(ranks) - mean) ** 2)


# Noise of whole ranks in a folded program: the copies of a rank run side by side, each at its own pace.
#
# In one draw every rank has one factor, which multiplies its computation and loading. The program stays folded. Each of its
# tasks has a row of times per replica that its rank stands for. A collective over replicas begins when the last row is ready.
#
# Why it equals the unfolded run, draw by draw. Rows meet in collectives over all replicas alone, and there all wait for the
# latest. The tp shards of a replica do the same work and meet in its collectives. What a shard does between two of them ends
# later the larger its factor is, so the last to be ready is always the one with the largest factor. That one is simulated.
# Without pipeline stages the same holds for replicas, so one row with the largest factor of all is enough.
#
# Leaves out: overlap slowdown. Shards that meet in smaller groups than the tp axis, or only in transfers between stages, run as
# their slowest does: an upper bound. So do replicas that meet in sharding groups (`Mesh.dp_shard`): their collectives begin
# when the last of all replicas is ready.


TASK_TIMES = 2**28
"""Times of tasks that are worked out at most, unless that leaves fewer than `FEWEST_DRAWS` draws: seconds of one core."""

FEWEST_DRAWS = 8


def noisy_steps_s(
    compiled: CompiledGraph,
    folding: Folding,
    medians_s: Floats,
    *,
    sigma: float,
    draws: int,
    seed: int,
    steps: int,
    together: Ints,
) -> Floats:
    """The mean of several steps in a row of a folded program under noise of single ranks: float64 [at most draws] seconds,
    fewer where the program is large (`TASK_TIMES`). Leaves out overlap slowdown.

    Args:
        medians_s: float64 [n], seconds of tasks. sigma: relative noise of a rank; 0: none.
        together: int64 [resources], as in `static.step_times_s`.
    """
    from parsim.engines import kernels

    copies = _copies(folding)
    rows = copies.shape[1]
    draws = max(min(draws, FEWEST_DRAWS), min(draws, TASK_TIMES // max(1, compiled.size * rows * steps)))
    by_rank = rank_noise(np.arange(folding.mesh.size), sigma, draws, seed)
    factors = np.ascontiguousarray(by_rank[:, copies].max(axis=3))
    columns = compiled.columns
    number = np.full(folding.mesh.size, -1, dtype=np.int64)
    number[list(folding.ranks)] = np.arange(len(folding.ranks))
    of_rank = np.where(columns.communicates, -1, number[columns.first_rank])
    joins = (joined_by_unit(compiled, folding)[1] > 1)[columns.unit]
    total: Floats = kernels.last_ends_side_by_side(compiled.arrays, medians_s, of_rank, factors, joins, steps, together)
    return total / steps


def _copies(folding: Folding) -> Ints:
    """int64 [simulated ranks, rows, k]: the ranks for which each row of a simulated rank stands. It runs as their slowest
    does. A simulated rank with fewer copies than others repeats one of them, which changes no maximum."""
    mesh = folding.mesh
    members = {replica: [r for r, first in enumerate(folding.replica_of) if first == replica] for replica in folding.replicas}
    most = max(map(len, members.values()))
    table = []
    for rank in folding.ranks:
        stage, replica, own = rank // (mesh.tp * mesh.copies), rank // mesh.tp % mesh.copies, rank % mesh.tp
        shards = range(mesh.tp) if len(folding.shards) < mesh.tp else (own,)
        padded = members[replica] + members[replica][-1:] * (most - len(members[replica]))
        rows = [[mesh.rank(stage=stage, replica=other, shard=shard) for shard in shards] for other in padded]
        table.append([[rank for row in rows for rank in row]] if mesh.pp == 1 else rows)
    return np.array(table, dtype=np.int64)
