"""Steps of recomputation on every place of the pp axis, in the order of the bytes that a second of recomputing frees.

A step recomputes a component by operator, or whole, or goes from the one to the other, or recomputes a run of components as a
whole (`Plan.segments`). What a place does not fit is the excess of its worst rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from parsim.plans.plan import Plan
from parsim.plans.recompute import BY_OPERATOR, FULL, NONE, SELECTIVE, Recompute
from parsim.predict.host.offloaded import BUFFERS
from parsim.predict.kept_activations import KeptActivations
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.computation import prices_of
from parsim.work import BY_OPERATOR_PART, Phase

Segments = tuple[tuple[str, ...], ...]

FREED = ("activations", "casts", "boundary_values", "inputs", BUFFERS, "allocator")
"""Lines of memory of which recomputation may free something."""

SOME, WHOLE = 1, 2
"""How a component is recomputed: by operator, or all of it."""


@dataclass(frozen=True, slots=True)
class Relief:
    """A component and how it is recomputed from then on, SOME or WHOLE; or several components, which are one segment."""

    names: tuple[str, ...]
    level: int


def backwards_of(problem: PlanningProblem, plan: Plan) -> list[str]:
    """The components of a plan that have a backward, in execution order.

    Args:
        problem: model, cluster and batch. plan: of this model.
    """
    backwards = problem.layout(plan).differentiable
    return [name for name in plan.components if name in backwards]


def recompute_of(levels: Iterable[tuple[str, int]]) -> Recompute:
    """Of a plan.

    Args:
        levels: components with SOME, WHOLE or 0, which is neither.
    """
    return tuple(name if level == WHOLE else BY_OPERATOR + name for name, level in levels if level) or NONE


def recomputing(plan: Plan, by_place: Sequence[Sequence[Relief]], counts: Sequence[int]) -> Plan:
    """The plan with the first steps of every place; a later step of a component replaces an earlier one.

    Args:
        plan: without recomputation. by_place: steps. counts: how many are taken.
    """
    taken = [step for steps, count in zip(by_place, counts, strict=True) for step in steps[:count]]
    levels = {step.names[0]: step.level for step in taken if len(step.names) == 1}
    return replace(
        plan, recompute=recompute_of(levels.items()), segments=tuple(step.names for step in taken if len(step.names) > 1)
    )


def place_excess_bytes(problem: PlanningProblem, plan: Plan) -> list[float]:
    """Per place on the pp axis by how much its worst rank does not fit.

    Args:
        problem: model, cluster and batch. plan: of this model.
    """
    worst = [0.0] * plan.mesh.pp
    for entry in problem.unlike_memory(plan):
        if not entry.fits:
            place = plan.stage_of_rank(entry.rank)
            worst[place] = max(worst[place], float(entry.excess_bytes), 1.0)
    return worst


def may_fit_recomputing(problem: PlanningProblem, plan: Plan) -> bool:
    """Whether a plan may fit if it recomputes what it likes; false only where none of these plans does.

    Recomputation frees at most what is kept for backwards. Weights, communicators and the workspace of the fullest moment stay.

    Args:
        problem: model, cluster and batch. plan: of this model, without recomputation.
    """
    return all(
        sum(size for name, size in entry.lines if name not in FREED) <= entry.limit_bytes
        for entry in problem.unlike_memory(plan)
    )


def most_worthwhile_first(problem: PlanningProblem, plan: Plan, segments: Segments = ()) -> list[list[Relief]]:
    """Per place the steps of components that have a backward, by bytes that each frees per second that it adds.

    Args:
        problem: model, cluster and batch. plan: of this model, without recomputation.
        segments: runs within stages whose components are recomputed together or not at all.
    """
    whole = KeptActivations(problem.layout(replace(plan, recompute=FULL)), problem.precision)
    some = KeptActivations(problem.layout(replace(plan, recompute=SELECTIVE)), problem.precision)
    prices = prices_of(problem, plan)
    together = {name: segment for segment in segments for name in segment}
    sums: dict[tuple[str, ...], tuple[float, float]] = {}
    worth: list[tuple[float, int, Relief]] = []
    for component in problem.model.components:
        name, placement = component.name, whole.layout.placement[component.name]
        if not whole.layout.recomputes(name):
            continue
        freed, seconds = float(whole.again(name).saved_bytes), prices.compute_s(component, placement, Phase.FORWARD)
        if name in together:
            bytes_so_far, seconds_so_far = sums.get(together[name], (0.0, 0.0))
            sums[together[name]] = bytes_so_far + freed, seconds_so_far + seconds
            continue
        steps = [(Relief((name,), WHOLE), freed, seconds)]
        if some.layout.recomputes_by_operator(name):
            part = prices.compute_s(component, placement, Phase.RECOMPUTE, part=BY_OPERATOR_PART)
            less = float(some.again(name).saved_bytes)
            if part < seconds and less * seconds > freed * part:  # dearer per second than all of it: no step of its own
                steps = [
                    (Relief((name,), SOME), less, part),
                    (Relief((name,), WHOLE), freed - less, seconds - part),
                ]
        stage = whole.layout.stage_of[name]
        worth += [(size / max(more, 1e-12), stage, step) for step, size, more in steps]
    worth += [
        (size / max(more, 1e-12), whole.layout.stage_of[run[0]], Relief(run, WHOLE)) for run, (size, more) in sums.items()
    ]
    found: list[list[Relief]] = [[] for _ in range(plan.mesh.pp)]
    for _, stage, step in sorted(worth, key=lambda entry: (-entry[0], entry[2].level)):
        found[stage].append(step)
    return found
