"""Steps of recomputation on every place of the pp axis, in the order of the bytes that a second of recomputing frees.

A step recomputes a component by operator, or whole, or goes from the one to the other, or recomputes a run of components as a
whole (`Plan.segments`). What a place does not fit is the excess of its worst rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod

from parsim.plans.plan import FULL, SELECTIVE, Plan
from parsim.predict.memory import BUFFERS
from parsim.predict.problem import PlanningProblem
from parsim.program.lifetimes import KeptActivations
from parsim.search.bound import prices_of
from parsim.search.memory_floor import SOME, WHOLE, kept_together, least_kept, recompute_of
from parsim.search.space import is_large, is_small
from parsim.search.stages import Segments, is_long, place_excess_bytes, place_over_bytes, within_stages
from parsim.work import BY_OPERATOR_PART, Phase

FREED = ("activations", "casts", "boundary_values", "inputs", BUFFERS, "allocator")
"""Lines of memory of which recomputation may free something."""


@dataclass(frozen=True, slots=True)
class Relief:
    """A component and how it is recomputed from then on, SOME or WHOLE; or several components, which are one segment.

    Attributes: freed_bytes: of one microbatch, beside the step before it.
    """

    names: tuple[str, ...]
    level: int
    freed_bytes: float = 0.0


def backwards_of(problem: PlanningProblem, plan: Plan) -> list[str]:
    """The components of a plan that have a backward, in execution order."""
    backwards = problem.layout(plan).differentiable
    return [name for name in plan.components if name in backwards]


def recomputing(plan: Plan, by_place: Sequence[Sequence[Relief]], counts: Sequence[int]) -> Plan:
    """A plan without recomputation with the first `counts` steps of every place; a later step of a component replaces an
    earlier one."""
    taken = [step for steps, count in zip(by_place, counts, strict=True) for step in steps[:count]]
    levels = {step.names[0]: step.level for step in taken if len(step.names) == 1}
    segments = tuple(step.names for step in taken if len(step.names) > 1)
    return replace(plan, recompute=recompute_of(levels.items()), segments=segments)


def may_fit_recomputing(problem: PlanningProblem, plan: Plan) -> bool:
    """Whether a plan may fit if it recomputes what it likes; false only where none of these plans does.

    Recomputation frees at most what is kept for backwards. Weights, communicators and the workspace of the fullest moment stay.
    """
    return all(
        sum(size for name, size in memory.lines if name not in FREED) <= memory.limit_bytes
        for memory in problem.unlike_memory(plan)
    )


def most_worthwhile_first(problem: PlanningProblem, plan: Plan, segments: Segments = ()) -> list[list[Relief]]:
    """Per place the steps of components that have a backward, by bytes that each frees per second that it adds.

    Args:
        segments: runs within stages whose components are recomputed together or not at all.
    """
    whole = KeptActivations(problem.layout(replace(plan, recompute=FULL)), problem.numerics.precision)
    some = KeptActivations(problem.layout(replace(plan, recompute=SELECTIVE)), problem.numerics.precision)
    prices = prices_of(problem, plan)
    together = {name: segment for segment in segments for name in segment}
    sums: dict[tuple[str, ...], tuple[float, float]] = {}
    worth: list[tuple[Relief, float, float]] = []
    for component in problem.model.components:
        name, placement = component.name, whole.layout.placement[component.name]
        if not whole.layout.recomputes(name):
            continue
        freed, seconds = float(whole.again(name).saved_bytes), prices.compute_s(component, placement, Phase.FORWARD)
        if name in together:
            bytes_so_far, seconds_so_far = sums.get(together[name], (0.0, 0.0))
            sums[together[name]] = bytes_so_far + freed, seconds_so_far + seconds
            continue
        if some.layout.recomputes_by_operator(name):
            part = prices.compute_s(component, placement, Phase.RECOMPUTE, part=BY_OPERATOR_PART)
            less = float(some.again(name).saved_bytes)
            if part < seconds and less * seconds > freed * part:  # dearer per second than all of it: no step of its own
                worth.append((Relief((name,), SOME, less), less, part))
                freed, seconds = freed - less, seconds - part
        worth.append((Relief((name,), WHOLE, freed), freed, seconds))
    worth += [(Relief(run, WHOLE, freed), freed, seconds) for run, (freed, seconds) in sums.items()]
    by_place: list[list[Relief]] = [[] for _ in range(plan.mesh.pp)]
    for step, _, _ in sorted(worth, key=lambda entry: (-entry[1] / max(entry[2], 1e-12), entry[0].level)):
        by_place[whole.layout.stage_of[step.names[0]]].append(step)
    return by_place


# The cheapest recomputation that makes a plan fit: memory bought with forwards run twice.
#
# At every place on the pp axis, steps are taken in the order of what a second of recomputing each frees, the best first. As
# few are taken as make its ranks fit.
#
# Leaves out: other sets of components than the first of that order, some of which may be cheaper. Of a model of few
# components all sets are tried (`every_set`).


MOST_TRIALS, FEW_TRIALS = 64, 4
"""How often the number of recomputed components is narrowed down at most, and for long models."""


def recomputed_to_fit(problem: PlanningProblem, plan: Plan) -> Plan | None:
    """The plan with as few of each place's components recomputed as make it fit, the most worthwhile first.

    Returns:
        None if it fits with none of the sets that are likely to hold least.

    Raises:
        CostError: a forward has no price.
    """
    everything = next((each for each in _holding_least(problem, plan) if _fits(problem, each)), None)
    if everything is None:
        return None
    return _fewest_steps(problem, plan, most_worthwhile_first(problem, plan), everything)


def segmented_to_fit(problem: PlanningProblem, plan: Plan) -> Plan | None:
    """The plan with layers recomputed as segments: as few as make it fit, and as short ones; None if it does not fit so.

    Raises:
        CostError: a forward has no price.
    """
    for way in kept_together(problem):
        segments = within_stages(plan, way.segments)
        everything = replace(plan, recompute=way.recompute, segments=segments)
        if segments and _fits(problem, everything):
            return _fewest_steps(problem, plan, most_worthwhile_first(problem, plan, segments), everything)
    return None


def _fits(problem: PlanningProblem, plan: Plan) -> bool:
    return not any(place_excess_bytes(problem, plan))


def _fewest_steps(problem: PlanningProblem, plan: Plan, by_place: Sequence[Sequence[Relief]], everything: Plan) -> Plan:
    """The plan with as few of the first steps of every place as make it fit, or else a plan that is known to fit.

    What a place holds falls almost in line with the bytes that its steps free, so the next number to try is where the line
    through the two closest known ones crosses the limit.
    """
    searches = [_Fewest([step.freed_bytes for step in steps]) for steps in by_place]
    for _ in range(FEW_TRIALS if is_long(problem.model) else MOST_TRIALS):
        tried = [each.next() for each in searches]
        over = place_over_bytes(problem, recomputing(plan, by_place, tried))
        for each, number, bytes_over in zip(searches, tried, over, strict=True):
            each.learn(number, bytes_over)
        if all(each.is_known for each in searches):
            break
    least = recomputing(plan, by_place, [each.enough for each in searches])
    return least if _fits(problem, least) else everything


class _Fewest:
    """The least number of steps of a place with which it fits: `too_few` does not, `enough` does as far as is known."""

    def __init__(self, freed_bytes: Sequence[float]) -> None:
        self._up_to = [0.0, *accumulate(freed_bytes)]
        self.too_few, self.enough = -1, len(freed_bytes)
        self._over: dict[int, float] = {}
        self._halves = False

    @property
    def is_known(self) -> bool:
        """Whether one step less does not do: it was tried, or the line through the two closest says so."""
        if self.enough - self.too_few <= 1:
            return True
        few = max(0, self.too_few)
        if few not in self._over or self.enough not in self._over:
            return False
        sloped = (self._over[few] - self._over[self.enough]) / max(self._up_to[self.enough] - self._up_to[few], 1e-9)
        return self._over[self.enough] + sloped * (self._up_to[self.enough] - self._up_to[self.enough - 1]) > 0

    def next(self) -> int:
        """A number between the two, if there is one."""
        if self.is_known:
            return self.enough
        few, most = max(0, self.too_few), self.enough
        if few not in self._over:
            return few
        if most not in self._over or self._halves:  # where the line misleads, halving is as sure
            at = (few + most) // 2 if most in self._over else bisect_left(self._up_to, self._up_to[few] + self._over[few])
        else:
            part = self._over[few] / max(self._over[few] - self._over[most], 1e-9)
            at = bisect_left(self._up_to, self._up_to[few] + part * (self._up_to[most] - self._up_to[few]))
        return min(max(at, self.too_few + 1), self.enough - 1)

    def learn(self, number: int, over_bytes: float) -> None:
        """What a place needs beyond its memory with so many steps."""
        if self.too_few < number <= self.enough:
            width = self.enough - self.too_few
            self._over[number] = over_bytes
            if over_bytes <= 0:
                self.enough = number
            elif number < self.enough:
                self.too_few = number
            self._halves = not self._halves and 2 * (self.enough - self.too_few) > width


def _holding_least(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """The plan with the sets of which one holds least: all components, all by operator, and all but those at either end.

    A recomputed component keeps its inputs. The first one may so keep another copy of the batch, and the last ones logits that
    nobody would keep.
    """
    if not is_small(problem):
        yield replace(plan, recompute=least_kept(problem).recompute)
        if is_long(problem.model):
            return
    yield replace(plan, recompute=FULL)
    if any(component.selective is not None for component in problem.model.components):
        yield replace(plan, recompute=SELECTIVE)
    if not is_large(problem):
        names = backwards_of(problem, plan)
        for some in (names[1:], names[:-2], names[1:-2]):
            if some:
                yield replace(plan, recompute=tuple(some))


# Every set of recomputed components of a model of few components, the smallest sets first.


FEW_COMPONENTS = 6
"""Of a model with at most so many backwards every set is tried."""

MOST_SETS = 2**FEW_COMPONENTS
"""Beyond so many, components are recomputed whole alone in the sets that are tried."""


def every_set(problem: PlanningProblem, plan: Plan) -> list[Plan]:
    """The plan with every set of recomputed components, the smallest sets first; none where there are too many components.
    By operator, too, where these sets are few."""
    if not are_few(problem, plan):
        return []
    backwards, ways = backwards_of(problem, plan), _ways(problem, plan)
    if prod(map(len, ways)) > MOST_SETS:
        ways = [(0, WHOLE)] * len(backwards)
    levels = sorted(product(*ways), key=sum)
    return [replace(plan, recompute=recompute_of(zip(backwards, each, strict=True))) for each in levels]


def tries_all_of(problem: PlanningProblem, plan: Plan) -> bool:
    """Whether `every_set` holds every set, those by operator too."""
    return are_few(problem, plan) and prod(map(len, _ways(problem, plan))) <= MOST_SETS


def _ways(problem: PlanningProblem, plan: Plan) -> list[tuple[int, ...]]:
    """By component that has a backward how it may be recomputed."""
    some = problem.layout(replace(plan, recompute=SELECTIVE))
    every = backwards_of(problem, plan)
    return [(0, SOME, WHOLE) if some.recomputes_by_operator(name) else (0, WHOLE) for name in every]


def recomputes_more(one: Plan, other: Plan) -> bool:
    """Whether a plan recomputes all that another one does.

    Args:
        one, other: plans of `every_set`, which differ in nothing else.
    """
    whole, some = set(one.recomputed), set(one.recomputed_by_operator)
    return set(other.recomputed) <= whole and set(other.recomputed_by_operator) <= whole | some


def are_few(problem: PlanningProblem, plan: Plan) -> bool:
    """Whether every set of recomputed components is tried."""
    return len(backwards_of(problem, plan)) <= FEW_COMPONENTS
