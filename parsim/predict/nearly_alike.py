"""Replicas that differ in a microsecond of latency here and there, simulated as one between proven bounds.

Of many replicas some have all their stages under one leaf switch and some have not. Their transfers cost a little more or less,
so folding keeps one of each kind. If tasks are issued in order and do not slow one another, no task that takes longer makes a
step shorter. So the program of one replica is no shorter than the step when every communication has the highest price that any
replica pays for it. It is no longer than the step when every one has the lowest. Where the two differ by at most `NEARLY`,
the first is the answer: it is too long by at most that.

Replicas that gossip may sit alike but for leaf switches. Those of one node are then simulated, between the same bounds: every
message has the highest price, or the lowest, of those that it stands for.

Leaves out: machines on which computation and communication slow one another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from parsim.costs.draws import medians_s
from parsim.costs.estimate import Estimate
from parsim.engines.program import mean_step_s
from parsim.engines.static import CompiledGraph, compile_graph
from parsim.plans.mesh import Mesh
from parsim.plans.stages import concurrent_groups
from parsim.predict.folding import merged
from parsim.predict.problem import PlanningProblem
from parsim.predict.rounds import beside_products, mixing_period
from parsim.program.columns import Folding, unfolded
from parsim.program.placed import PlanIndex
from parsim.program.templates import lower_columns, moved_work
from parsim.work import Collective, Work, is_communication, ranks_of_work

NEARLY = 1e-4
"""Replicas are simulated as one if their prices leave the step open by no more than this share of it."""

OneReplica = tuple[Folding, CompiledGraph, tuple[Estimate, ...]]

MOST_TASKS = 2**17
"""Of all programs that a Model keeps: 30 MB, as a task takes about 220 bytes."""


class Programs:
    """The programs of a Model's plans that were asked for last. A program holds no price, so a question about a faster link, or
    about what a run has shown of the machine, finds it here.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, CompiledGraph] = OrderedDict()

    def of(self, layout: PlanIndex, folding: Folding, *, resuming: bool) -> CompiledGraph:
        """One step of the layout's plan under a folding; `resuming`: see `Columns.resuming`. Errors as `compile_graph`."""
        key = layout.plan, folding, resuming
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        columns = lower_columns(layout.plan, layout.model, layout, folding)
        compiled = compile_graph(columns.resuming() if resuming else columns)
        if not layout.plan.offloads:  # what it copies depends on the precision too
            self._kept[key] = compiled
            while sum(each.size for each in self._kept.values()) > MOST_TASKS:
                self._kept.popitem(last=False)
        return compiled

    def forget(self) -> None:
        """Begin anew."""
        self._kept.clear()

    def __reduce__(self) -> tuple[type[Programs], tuple[()]]:
        """Not sent to other processes."""
        return Programs, ()


def program_of(problem: PlanningProblem, layout: PlanIndex, folding: Folding) -> CompiledGraph:
    """The program of one step under this folding."""
    resuming = bool(problem.costs(layout.plan.world_size).post_wait_s)
    return layout.model.remembered(Programs).of(layout, folding, resuming=resuming)


def nearly_alike(problem: PlanningProblem, layout: PlanIndex, folding: Folding, steps: int) -> OneReplica | None:
    """The program of one replica with the highest prices of all, if that bounds the mean of `steps` to within `NEARLY`.

    Returns:
        Folding, program and the price of each of its units; None: replicas are one already, or differ by more.
    """
    mesh, costs = layout.plan.mesh, problem.costs(layout.plan.world_size)
    overlap = costs.overlap([], [])
    slowing = problem.cluster.profile.overlap is not None or overlap.communications_share
    one = None if slowing else merged(folding, costs)
    if one is None:
        return None
    compiled = program_of(problem, layout, one)
    columns = compiled.columns
    kinds = columns.units.kinds
    prices = problem.price(kinds, mesh)
    bounds: dict[Work, tuple[Estimate, Estimate]] = {}
    for unit in kinds:
        if unit.work in bounds or not is_communication(unit.work):
            continue
        if likes := _likes(mesh, unit.work, folding.replicas):
            paid = problem.price([(work, 0) for work in likes], mesh)
            bounds[unit.work] = (min(paid, key=attrgetter("median_s")), max(paid, key=attrgetter("median_s")))

    def bounded(end: int) -> tuple[Estimate, ...]:
        paid = [bounds[unit.work][end] if unit.work in bounds else price for unit, price in zip(kinds, prices, strict=True)]
        return tuple(beside_products(problem.model, layout.plan, columns.units, columns.units.each(paid)))

    low, high = bounded(0), bounded(1)
    rows = np.array([medians_s(low), medians_s(high)])
    shortest_s, longest_s = mean_step_s(compiled, rows, overlap, steps=steps, unit=columns.unit)
    return (one, compiled, high) if longest_s <= shortest_s * (1 + NEARLY) else None


def _likes(mesh: Mesh, work: Work, replicas: Sequence[int]) -> list[Work]:
    """A communication of the first replica as all of them do it; none where it is one for all."""
    if len({rank // mesh.tp % mesh.copies for rank in ranks_of_work(work)}) == 1:
        return [moved_work(work, replica * mesh.tp) for replica in replicas]
    if (mesh.team == 1 and mesh.groups == 1) or not isinstance(work, Collective):
        return []
    shard = min(work.group) % mesh.tp
    return [replace(work, group=group) for group in concurrent_groups(mesh, work.group) if group[0] % mesh.tp == shard]


def nearly_shifted(problem: PlanningProblem, layout: PlanIndex, folding: Folding) -> Folding:
    """The folding of a plan that gossips, if it bounds the mean step to within `NEARLY`; else every rank by itself."""
    if folding.is_exact:
        return folding
    slowing = problem.costs(layout.plan.world_size).overlap([], []).communications_share
    if slowing:
        return unfolded(layout.plan.mesh)
    shortest_s, longest_s = (
        float(period.steps_s(period.medians_s)[0])
        for period in (mixing_period(problem, layout, folding=folding, lowest=lowest) for lowest in (True, False))
    )
    return folding if longest_s <= shortest_s * (1 + NEARLY) else unfolded(layout.plan.mesh)
