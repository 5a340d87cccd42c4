"""Noise of whole ranks in a folded program: the copies of a rank run side by side, each at its own pace.

In one draw every rank has one factor, which multiplies its computation and loading. The program stays folded. Each of its
tasks has a row of times per replica that its rank stands for. A collective over replicas begins when the last row is ready.

Why it equals the unfolded run, draw by draw. Rows meet in collectives over all replicas alone, and there all wait for the
latest. The tp shards of a replica do the same work and meet in its collectives. What a shard does between two of them ends
later the larger its factor is, so the last to be ready is always the one with the largest factor. That one is simulated.
Without pipeline stages the same holds for replicas, so one row with the largest factor of all is enough.

Leaves out: overlap slowdown. Shards that meet in smaller groups than the
tp axis, or only in transfers between stages, run as their slowest does: an upper bound. So do replicas that meet in sharding
groups (`Mesh.dp_shard`): their collectives begin when the last of all replicas is ready.
"""

from __future__ import annotations

import numpy as np

from parsim.arrays import Floats, Ints
from parsim.costs.uncertainty.draws import rank_noise
from parsim.engines.compile import CompiledGraph
from parsim.engines.slowest import joined_by_unit
from parsim.graph.fold import Folding

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
    """The mean of several steps in a row under noise of single ranks, for every draw.

    Args:
        compiled, folding: of the folded program. medians_s: float64 [n], seconds of its tasks.
        sigma: relative noise of a rank; 0: none. draws, seed: as `rank_noise` takes them. steps: in a row.
        together: int64 [resources], as in `static.step_times_s`.

    Returns:
        float64 [at most draws] seconds: fewer where the program is large (`TASK_TIMES`). Leaves out overlap slowdown.
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
    """int64 [simulated ranks, rows, k]: the ranks for which each row of a simulated rank stands. It runs as their slowest does.

    A simulated rank with fewer copies than others repeats one of them, which changes no maximum.
    """
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
