"""The cheapest recomputation that makes a plan fit: memory bought with forwards run twice.

Of every place on the pp axis steps are taken in the order of what a second of recomputing each frees, the best first. As few
are taken as make its ranks fit. A step recomputes a component by operator, or whole, or goes from the one to the other.

Leaves out: other sets of components than the first of that order, some of which may be cheaper. Of a model of few components
all sets are tried (`every_set`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from parsim.plans.plan import Plan
from parsim.plans.recompute import BY_OPERATOR, FULL, NONE, SELECTIVE, Recompute
from parsim.predict.kept_activations import KeptActivations
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.computation import prices_of
from parsim.schedule.parts.least_kept import least_kept
from parsim.schedule.parts.usual import is_large
from parsim.schedule.stages import is_long
from parsim.work import BY_OPERATOR_PART, Phase

FEW_COMPONENTS = 6
"""Of a model with at most so many backwards every set is tried."""

MOST_HALVINGS, FEW_HALVINGS = 64, 4
"""How often the number of recomputed components is narrowed down at most, and for long models."""

MOST_SETS = 2**FEW_COMPONENTS
"""Beyond so many, components are recomputed whole alone in the sets that are tried."""


def recomputed_to_fit(problem: PlanningProblem, plan: Plan) -> Plan | None:
    """The plan with as few of each place's components recomputed as make it fit, the most worthwhile first.

    Args:
        problem: model, cluster and batch. plan: of this model.

    Returns:
        None if it fits with none of the sets that are likely to hold least. Raises CostError where a forward has no price.
    """
    fitting = (each for each in _holding_least(problem, plan) if not any(place_excess_bytes(problem, each)))
    everything = next(fitting, None)
    if everything is None:
        return None
    by_place = _most_worthwhile_first(problem, plan)
    too_few, enough = [-1] * len(by_place), [len(steps) for steps in by_place]
    left = FEW_HALVINGS if is_long(problem.model) else MOST_HALVINGS
    while left and any(most - few > 1 for few, most in zip(too_few, enough, strict=True)):
        left -= 1
        tried = [(few + most) // 2 if most - few > 1 else most for few, most in zip(too_few, enough, strict=True)]
        for place, over in enumerate(place_excess_bytes(problem, _recomputing(plan, by_place, tried))):
            if over and tried[place] < enough[place]:
                too_few[place] = tried[place]
            elif not over:
                enough[place] = tried[place]
    least = _recomputing(plan, by_place, enough)
    return everything if any(place_excess_bytes(problem, least)) else least


def _holding_least(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """The plan with the sets of which one holds least: all components, all by operator, and all but those at either end.

    A recomputed component keeps its inputs. The first one may so keep another copy of the batch, and the last ones logits that
    nobody would keep.
    """
    if is_large(problem):
        yield replace(plan, recompute=least_kept(problem).recompute)
        if is_long(problem.model):
            return
    yield replace(plan, recompute=FULL)
    if any(component.selective is not None for component in problem.model.components):
        yield replace(plan, recompute=SELECTIVE)
    if not is_large(problem):
        names = _backwards(problem, plan)
        for some in (names[1:], names[:-2], names[1:-2]):
            if some:
                yield replace(plan, recompute=tuple(some))


def every_set(problem: PlanningProblem, plan: Plan) -> list[Plan]:
    """The plan with every set of recomputed components, the smallest sets first. By operator, too, where these are few.

    Args:
        problem: model, cluster and batch. plan: of this model, without recomputation.

    Returns:
        None for larger models.
    """
    if not are_few(problem, plan):
        return []
    backwards = _backwards(problem, plan)
    some = problem.layout(replace(plan, recompute=SELECTIVE))
    ways = [(0, 1, 2) if some.recomputes_by_operator(name) else (0, 2) for name in backwards]
    if prod(map(len, ways)) > MOST_SETS:
        ways = [(0, 2)] * len(backwards)
    levels = sorted(product(*ways), key=sum)
    return [replace(plan, recompute=_entries(zip(backwards, each, strict=True))) for each in levels]


def recomputes_more(one: Plan, other: Plan) -> bool:
    """Whether a plan recomputes all that another one does.

    Args:
        one, other: plans of `every_set`, which differ in nothing else.
    """
    whole, some = set(one.recomputed), set(one.recomputed_by_operator)
    return set(other.recomputed) <= whole and set(other.recomputed_by_operator) <= whole | some


def are_few(problem: PlanningProblem, plan: Plan) -> bool:
    """Whether every set of recomputed components is tried.

    Args:
        problem: model, cluster and batch. plan: of this model.
    """
    return len(_backwards(problem, plan)) <= FEW_COMPONENTS


def _backwards(problem: PlanningProblem, plan: Plan) -> list[str]:
    backwards = problem.layout(plan).differentiable
    return [name for name in plan.components if name in backwards]


def _entries(levels: Iterable[tuple[str, int]]) -> Recompute:
    """Of a plan: 1 is by operator, 2 whole."""
    return tuple(name if level == 2 else BY_OPERATOR + name for name, level in levels if level) or NONE


_Step = tuple[str, int]
"""A component, and how it is recomputed from then on: 1 by operator, 2 whole."""


def _recomputing(plan: Plan, by_place: Sequence[Sequence[_Step]], counts: Sequence[int]) -> Plan:
    """With the first steps of every place; a later step of a component replaces an earlier one."""
    levels = dict(step for steps, count in zip(by_place, counts, strict=True) for step in steps[:count])
    return replace(plan, recompute=_entries(levels.items()))


def place_excess_bytes(problem: PlanningProblem, plan: Plan) -> list[float]:
    """Per place on the pp axis by how much its worst rank does not fit.

    Args:
        problem: model, cluster and batch. plan: of this model.
    """
    worst = [0.0] * plan.mesh.pp
    for entry in problem.memory(plan):
        if not entry.fits:
            place = plan.stage_of_rank(entry.rank)
            worst[place] = max(worst[place], float(entry.excess_bytes), 1.0)
    return worst


def _most_worthwhile_first(problem: PlanningProblem, plan: Plan) -> list[list[_Step]]:
    """Per place the steps of components that have a backward, by bytes that each frees per second that it adds."""
    whole = KeptActivations(problem.layout(replace(plan, recompute=FULL)), problem.precision)
    some = KeptActivations(problem.layout(replace(plan, recompute=SELECTIVE)), problem.precision)
    prices = prices_of(problem, plan)
    worth: list[tuple[float, int, _Step]] = []
    for component in problem.model.components:
        name, placement = component.name, whole.layout.placement[component.name]
        if not whole.layout.recomputes(name):
            continue
        freed, seconds = whole.again(name).saved_bytes, prices.compute_s(component, placement, Phase.FORWARD)
        steps = [(name, 2, freed, seconds)]
        if some.layout.recomputes_by_operator(name):
            part = prices.compute_s(component, placement, Phase.RECOMPUTE, part=BY_OPERATOR_PART)
            less = some.again(name).saved_bytes
            if part < seconds and less * seconds > freed * part:  # dearer per second than all of it: no step of its own
                steps = [(name, 1, less, part), (name, 2, freed - less, seconds - part)]
        stage = whole.layout.stage_of[name]
        worth += [(size / max(more, 1e-12), stage, (name, level)) for name, level, size, more in steps]
    found: list[list[_Step]] = [[] for _ in range(plan.mesh.pp)]
    for _, stage, step in sorted(worth, key=lambda entry: (-entry[0], entry[2][1])):
        found[stage].append(step)
    return found
