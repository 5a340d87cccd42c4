"""The scheduler's problem for one model on one mesh: a placement for every component, as figures in arrays.

    min  sum of forward and backward of all microbatches, conversions between neighbours and optimizer steps included
         + what of the gradient synchronisation the last microbatch's backward does not hide
    s.t. memory of every tp rank; components that share a parameter hold it alike; pins and forbids of the problem

A value with several readers is converted for the first reader from its maker's layout. For each later reader it is
converted from the layout of the reader before. So readers that agree share one conversion, as in the program.

Leaves out: overlap of conversions with computation, and pipelines (each stage is placed alone).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsim.model.component import Component, Value
from parsim.numeric import Floats
from parsim.plans.layouts import Placement, ValueAndGradientLayout, input_ends, output_ends
from parsim.plans.plan import holding
from parsim.predict.problem import PlanningProblem
from parsim.records import once
from parsim.search.prices import Prices
from parsim.units import format_bytes
from parsim.work import Phase


@dataclass(frozen=True, kw_only=True)
class PlacementProblem:
    """The problem in figures. Seconds of one step; bytes per tp rank.

    Attributes:
        options: per component the placements it may have.
        forward_s: [component][option] everything that the gradient synchronisation cannot hide behind: all forwards, the
            backwards of all microbatches but the last, the optimizer's step.
        backward_s: [component][option] the last microbatch's backward. synchronisation_s: [component][option].
        conversion_s: (maker or earlier reader, reader) -> forward and backward seconds, [option of one][option of other];
            the backward of all microbatches but the last is counted with the forward.
        memory_bytes: [component][option, tp rank]. limit_bytes: [tp rank], what components may take.
        allowed: (component, component) -> which pairs of options go together, for components that share parameters.
    """

    components: tuple[str, ...]
    options: tuple[tuple[Placement, ...], ...]
    forward_s: tuple[Floats, ...]
    backward_s: tuple[Floats, ...]
    synchronisation_s: tuple[Floats, ...]
    conversion_s: Mapping[tuple[int, int], tuple[Floats, Floats]]
    memory_bytes: tuple[Floats, ...]
    limit_bytes: Floats
    allowed: Mapping[tuple[int, int], NDArray[np.bool_]]

    def in_units(self, unit_s: float) -> PlacementProblem:
        """The problem with every time in units of `unit_s` seconds."""
        return replace(
            self,
            forward_s=tuple(own / unit_s for own in self.forward_s),
            backward_s=tuple(own / unit_s for own in self.backward_s),
            synchronisation_s=tuple(own / unit_s for own in self.synchronisation_s),
            conversion_s={pair: (ahead / unit_s, back / unit_s) for pair, (ahead, back) in self.conversion_s.items()},
        )

    def restricted(self, keep: Sequence[Sequence[int]]) -> PlacementProblem:
        """The problem with some of every component's options: `keep` lists their numbers."""

        def kept(rows: tuple[Floats, ...]) -> tuple[Floats, ...]:
            return tuple(row[list(numbers)] for row, numbers in zip(rows, keep, strict=True))

        return replace(
            self,
            options=tuple(tuple(own[k] for k in numbers) for own, numbers in zip(self.options, keep, strict=True)),
            forward_s=kept(self.forward_s),
            backward_s=kept(self.backward_s),
            synchronisation_s=kept(self.synchronisation_s),
            conversion_s={
                (one, two): (forward[np.ix_(keep[one], keep[two])], backward[np.ix_(keep[one], keep[two])])
                for (one, two), (forward, backward) in self.conversion_s.items()
            },
            memory_bytes=kept(self.memory_bytes),
            allowed={(one, two): pairs[np.ix_(keep[one], keep[two])] for (one, two), pairs in self.allowed.items()},
        )


def placement_problem_of(
    prices: Prices, options: Sequence[Sequence[Placement]], *, microbatches: int, limit_bytes: Sequence[float]
) -> PlacementProblem:
    """Price every option and every pair of options, and collect the figures of the problem.

    Args:
        prices: of the model on its mesh. options: per component, in the model's order; none may be empty.
        limit_bytes: per tp rank.
    """
    return converted(unconverted(prices, options, microbatches=microbatches, limit_bytes=limit_bytes), prices, microbatches)


def unconverted(
    prices: Prices, options: Sequence[Sequence[Placement]], *, microbatches: int, limit_bytes: Sequence[float]
) -> PlacementProblem:
    """The problem without its conversions, which are most of what there is to price."""
    known: dict[object, tuple[Floats, Floats, Floats, Floats]] = {}
    rows = []
    for component, choices in zip(prices.problem.model.components, options, strict=True):
        key = (prices.same_work(component), _weights_key(component), component.name in prices.differentiable, tuple(choices))
        if key not in known:
            known[key] = _figures(prices, component, choices)
        rows.append(known[key])
    return PlacementProblem(
        components=tuple(component.name for component in prices.problem.model.components),
        options=tuple(tuple(choices) for choices in options),
        forward_s=tuple(microbatches * ahead + (microbatches - 1) * back + rest[0] for ahead, back, rest, _ in rows),
        backward_s=tuple(back for _, back, _, _ in rows),
        synchronisation_s=tuple(rest[1] for _, _, rest, _ in rows),
        conversion_s={},
        memory_bytes=tuple(own for _, _, _, own in rows),
        limit_bytes=np.array(limit_bytes, dtype=np.float64),
        allowed=_ties(prices, options),
    )


def converted(placing: PlacementProblem, prices: Prices, microbatches: int) -> PlacementProblem:
    """The problem with the conversions between its options.

    Args:
        placing: from `unconverted`, perhaps restricted. prices, microbatches: as that one took them.
    """
    place, options = prices.problem.model.component_index, placing.options
    conversions: dict[tuple[int, int], tuple[Floats, Floats]] = {}
    matrices: dict[object, tuple[Floats, Floats]] = {}
    for value, maker, reader in _neighbours(prices):
        pair = (place[maker.name], place[reader.name])
        ahead, back = _conversion_s(prices, value, maker, reader, options[pair[0]], options[pair[1]], matrices)
        total = (microbatches * ahead + (microbatches - 1) * back, back)
        before = conversions.get(pair)
        conversions[pair] = total if before is None else (before[0] + total[0], before[1] + total[1])
    return replace(placing, conversion_s=conversions)


def _figures(prices: Prices, component: Component, choices: Sequence[Placement]) -> tuple[Floats, Floats, Floats, Floats]:
    """By option the forward, the backward, [update, summing of gradients], and bytes per tp rank."""
    backwards = component.name in prices.differentiable
    ahead = np.array([prices.compute_s(component, choice, Phase.FORWARD) for choice in choices])
    back = np.array([prices.compute_s(component, choice, Phase.BACKWARD) if backwards else 0.0 for choice in choices])
    update = [prices.update_s(component, choice) for choice in choices]
    summed = [prices.synchronisation_s(component, choice) for choice in choices]
    memory = np.zeros((len(choices), prices.mesh.tp))
    for row, choice in enumerate(choices):
        ranks = [choice.shard] if choice.kind == "place" else list(range(prices.mesh.tp))
        memory[row, ranks] = prices.memory_bytes(component, choice, ranks[0])
    return ahead, back, np.array([update, summed]), memory


def _weights_key(component: Component) -> tuple[object, ...]:
    """Equal for components whose parameters are alike and divided alike, whatever their names."""
    number = {parameter.name: place for place, parameter in enumerate(component.parameters)}
    sizes = tuple((each.elements, each.element_bytes, each.trainable) for each in component.parameters)
    divided = tuple(
        (each.rule, each.limit, each.size, tuple(sorted(number[part.name] for part in each.parameters if part.name in number)))
        for each in component.shardings
    )
    saved = component.saved_activation_bytes, component.saved_fixed_bytes, component.buffer_bytes
    return sizes, divided, saved, component.update_groups


def _neighbours(prices: Prices) -> Iterator[tuple[Value, Component, Component]]:
    """Per value its maker and first reader, then each reader and the next."""
    model = prices.problem.model
    readers: dict[str, list[Component]] = {}
    for component in model.components:
        for name in dict.fromkeys(component.inputs):
            readers.setdefault(name, []).append(component)
    for name, reading in readers.items():
        value = model.value[name]
        if value.producer is None:
            continue
        before = model.component(value.producer)
        for reader in reading:
            yield value, before, reader
            before = reader


def _conversion_s(
    prices: Prices,
    value: Value,
    before: Component,
    reader: Component,
    before_options: Sequence[Placement],
    reader_options: Sequence[Placement],
    known: dict[object, tuple[Floats, Floats]],
) -> tuple[Floats, Floats]:
    """Forward and backward, [option of the one before][option of the reader]; `known` by sizes and layouts."""
    tp = prices.mesh.tp
    makes = value.producer == before.name

    def held(choice: Placement) -> ValueAndGradientLayout:
        if makes:
            return output_ends(before, choice, tp, before.outputs.index(value.name))
        return input_ends(before, choice, tp, before.inputs.index(value.name))

    sources = [held(choice) for choice in before_options]
    targets = [input_ends(reader, choice, tp, reader.inputs.index(value.name)) for choice in reader_options]
    backwards = value.differentiable and reader.name in prices.differentiable
    key = (value.bytes_per_sample, value.fixed_bytes, backwards, makes, tuple(sources), tuple(targets))
    if key in known:
        return known[key]
    ahead = np.zeros((len(sources), len(targets)))
    back = np.zeros_like(ahead)
    for row, source in enumerate(sources):
        for column, target in enumerate(targets):
            if source.value != target.value:
                ahead[row, column] = prices.conversion_s(value, source.value, target.value)
            if not backwards:
                continue
            wanted = source.gradient
            if not makes and wanted != target.gradient and wanted.form == "partial":
                wanted = source.value
            if wanted != target.gradient:
                back[row, column] = prices.conversion_s(value, target.gradient, wanted)
    known[key] = ahead, back
    return known[key]


def _ties(prices: Prices, options: Sequence[Sequence[Placement]]) -> dict[tuple[int, int], NDArray[np.bool_]]:
    """For components that share a parameter: the pairs of options under which both hold it alike."""
    first: dict[str, int] = {}
    allowed: dict[tuple[int, int], NDArray[np.bool_]] = {}
    components = prices.problem.model.components
    for number, component in enumerate(components):
        for parameter in component.parameters:
            other = first.setdefault(parameter.name, number)
            if other == number:
                continue
            pairs = np.array(
                [
                    [
                        holding(components[other], one, parameter.name) == holding(component, two, parameter.name)
                        for two in options[number]
                    ]
                    for one in options[other]
                ]
            )
            allowed[other, number] = allowed.get((other, number), np.ones_like(pairs)) & pairs
    return allowed


# The step time of a choice of placements, and the Solution that every solver returns.
#
#     step = sum of forward and backward, conversions included, + what of the gradient synchronisation outlasts the backward
#
# The synchronisation runs on a separate stream, in reverse component order, each component's when its backward has ended.


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Attributes:
    choice: per component the number of its option; empty where nothing is feasible.
    seconds: its step. lower_bound_s: no choice has a shorter step.
    status: "optimal" (proven), "feasible" (the bound says how far from optimal it may be), "infeasible" (proven), or
        "inaccurate" (the solver does not vouch for its answer).
    reason: of an infeasible problem: which constraint, and by how much.
    """

    choice: tuple[int, ...]
    seconds: float
    lower_bound_s: float
    status: str
    reason: str = ""

    @property
    def gap(self) -> float:
        """(seconds - bound) / seconds."""
        return max(0.0, 1 - self.lower_bound_s / self.seconds) if self.choice and self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values; infinity becomes None."""
        seconds = self.seconds if np.isfinite(self.seconds) else None
        bound = self.lower_bound_s if np.isfinite(self.lower_bound_s) else None
        return {"status": self.status, "seconds": seconds, "lower_bound_s": bound, "gap": self.gap, "reason": self.reason}


def no_choice(status: str, reason: str, lower_bound_s: float = 0.0) -> Solution:
    """Without a choice: what is infeasible has an infinite bound."""
    bound_s = np.inf if status == "infeasible" else lower_bound_s
    return Solution(choice=(), seconds=np.inf, lower_bound_s=bound_s, status=status, reason=reason)


def step_s(placing: PlacementProblem, choice: Sequence[int]) -> float:
    """Seconds of the step of one choice, whether it fits or not; infinite for a pair that is not allowed.

    Returns:
        Seconds. Leaves out overlap of conversions with computation.
    """
    total = late = 0.0
    back = [float(placing.backward_s[number][option]) for number, option in enumerate(choice)]
    for (one, two), (forward, backward) in placing.conversion_s.items():
        total += float(forward[choice[one], choice[two]])
        back[one] += float(backward[choice[one], choice[two]])
    for (one, two), allowed in placing.allowed.items():
        if not allowed[choice[one], choice[two]]:
            return float("inf")
    for number in range(len(choice) - 1, -1, -1):
        option = choice[number]
        total += float(placing.forward_s[number][option]) + back[number]
        late = float(placing.synchronisation_s[number][option]) + max(0.0, late - back[number])
    return total + late


def memory_of(placing: PlacementProblem, choice: Sequence[int]) -> Floats:
    """float64 [tp]: bytes per tp rank of one choice."""
    rows = (sizes[option] for sizes, option in zip(placing.memory_bytes, choice, strict=True))
    return sum(rows, np.zeros_like(placing.limit_bytes))


def fits(placing: PlacementProblem, choice: Sequence[int]) -> bool:
    """Whether every tp rank can hold a choice, and components that share parameters agree."""
    agree = all(bool(allowed[choice[one], choice[two]]) for (one, two), allowed in placing.allowed.items())
    return agree and bool(np.all(memory_of(placing, choice) <= placing.limit_bytes * (1 + 1e-12)))


def why_infeasible(placing: PlacementProblem) -> str:
    """The reason why no choice fits: the device too small for the smallest options and the bytes it needs, or contradicting
    pins.
    """
    for (one, two), allowed in placing.allowed.items():
        if not allowed.any():
            return (
                f"{placing.components[one]} and {placing.components[two]} share a parameter, and no pair of their placements "
                "holds it alike; unpin one of them"
            )
    least = sum((own.min(axis=0) for own in placing.memory_bytes), np.zeros_like(placing.limit_bytes))
    short = least - placing.limit_bytes
    worst = int(short.argmax())
    if short[worst] > 0:
        return (
            f"memory of tp rank {worst}: even the smallest placement of every component takes {format_bytes(least[worst])} of "
            f"{format_bytes(max(0.0, placing.limit_bytes[worst]))}; it needs {format_bytes(short[worst])} more at the least"
        )
    return "memory: every rank could hold the smallest placements, but no choice is small enough on all of them at once"


# Every joint choice of placements of a model of few components, each with a lower bound of its step.
#
# What the placement problem leaves out decides here: ranks that update their parts at the same time, components placed on
# several ranks that work on several microbatches at once.


MOST_CHOICES = 2**12
"""Joint choices of one mesh. Beyond, only those are judged that the placement problem finds best."""


def count_choices(options: Sequence[Sequence[Placement]]) -> int:
    """Joint choices of these options per component; 0 where they are too many to be listed."""
    total = math.prod(map(len, options))
    return total if total <= MOST_CHOICES else 0


def choices_by_bound(
    prices: Prices, options: Sequence[Sequence[Placement]], places: Sequence[int], microbatches: int
) -> tuple[Floats, NDArray[np.int64]]:
    """Every joint choice, bounds ascending.

    A rank computes all microbatches of its components. It begins once one microbatch has gone forward through the components
    before its own, and a microbatch still goes back through them after its last backward.

    Args:
        prices: of one microbatch on the mesh. options: per component, all of `count_choices`.
        places: per component its place on the pp axis.

    Returns:
        Seconds that no step goes below, and [choice, component] the numbers of the options. Leaves out all communication.
    """
    index = np.indices([len(own) for own in options]).reshape(len(options), -1)
    mesh, chain = prices.mesh, is_chain(prices.problem)
    busy = np.zeros((index.shape[1], mesh.size))
    first = np.full_like(busy, np.inf)
    before = np.zeros(index.shape[1])
    for number, component in enumerate(prices.problem.model.components):
        seconds = np.zeros((len(options[number]), mesh.size))
        phases = prices.phases(component)
        for row, placement in enumerate(options[number]):
            for rank in mesh.stage_ranks(places[number]):
                if placement.runs_on(rank % mesh.tp):
                    seconds[row, rank] = sum(prices.compute_on_s(component, placement, phase, rank) for phase in phases)
        own = seconds[index[number]]
        busy += own
        first = np.where((own > 0) & np.isinf(first), before[:, None], first)
        if chain:
            least = np.where(own > 0, own, np.inf).min(axis=1)
            before = before + np.where(np.isinf(least), 0.0, least)
    ends = microbatches * busy + np.where(np.isinf(first), 0.0, first)
    bounds = ends.max(axis=1)
    order = np.argsort(bounds, kind="stable")
    return bounds[order], index.T[order]


@once
def is_chain(problem: PlanningProblem) -> bool:
    """Whether every component waits for the one before it, forward and backward. Else stages may run beside one another."""
    model, backwards = problem.model, problem.model.differentiable_components
    for one, two in pairwise(model.components):
        shared = [model.value[name] for name in two.inputs if name in one.outputs]
        returns = any(value.differentiable for value in shared) and two.name in backwards
        if not shared or (one.name in backwards and not returns):
            return False
    return True
