"""One microbatch through a whole model on one stage, conversions included: what all cuts into stages have in common.

A component takes what it adds to the end of the forward, and of the backward: its own computation, and what it waits for of
the conversions before it. A stage that begins with a later component takes the sum of its own components, less at most the
dearest conversion of a value that crosses its cut. (By induction: every component of the stage ends at most so much later in
the whole model, counted from the end of what comes before the stage.)

Leaves out: components placed on single ranks, and backwards in halves, whose conversions count nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from parsim.arrays import Floats
from parsim.graph.hops import hop_groups, hop_pairs
from parsim.graph.passes.convert import POINT_TO_POINT_HOPS, hop_collective, hop_message
from parsim.graph.plan_index import PlanIndex
from parsim.model.component import Component, Value
from parsim.plans.mesh import Mesh
from parsim.plans.placement import BATCH, Placement
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, Plan, Stage
from parsim.plans.redistribution import LOCAL_HOPS, ValueLayout, conversion
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.options import Prices
from parsim.work import Phase, Work

Waits = list[list[tuple[int, int]]]
"""By component what it waits for: the number of another component, and that of the conversion in between."""


@dataclass(frozen=True, slots=True)
class ChainSeconds:
    """Seconds of one microbatch on one stage.

    Attributes:
        forward_s, backward_s: float64 [n], what every component adds. computing_s, longest_s: computation alone, of all
            components and of the longest one.
        crossing_s: float64 [n], by first component of a later stage, what a cut there may save.
    """

    forward_s: Floats
    backward_s: Floats
    computing_s: float
    longest_s: float
    crossing_s: Floats

    @property
    def seconds(self) -> Floats:
        """Of both, by component."""
        return self.forward_s + self.backward_s

    def least_s(self, stages: int) -> float:
        """What so many stages take together at least, whatever the cut.

        Args:
            stages: at least 1.
        """
        saved = np.sort(self.crossing_s)[len(self.crossing_s) - (stages - 1) :].sum() if stages > 1 else 0.0
        return float(self.seconds.sum() - saved)


@dataclass(frozen=True)
class PlacedChain:
    """A model under one placement of every component: what waits for what.

    Attributes:
        kinds: distinct components with their placement. kind_of: by component its number among them.
        conversions: distinct ones, of a value from one layout to another.
        ahead: of the forwards, the maker. back: of the backwards, the first reader.
    """

    kinds: tuple[tuple[Component, Placement], ...]
    kind_of: tuple[int, ...]
    conversions: tuple[tuple[Value, ValueLayout, ValueLayout], ...]
    ahead: Waits
    back: Waits


@dataclass
class _Known:
    """Of one problem, by ways and placements."""

    placed: dict[tuple[Mesh, tuple[Placement, ...]], PlacedChain] = field(default_factory=dict)
    seconds: dict[tuple[Mesh, int, tuple[Placement, ...]], ChainSeconds] = field(default_factory=dict)


def placed_chain(problem: PlanningProblem, mesh: Mesh, count: int, placements: Mapping[str, Placement]) -> PlacedChain:
    """What waits for what where a stage holds all components.

    Args:
        problem: model, cluster and batch. mesh: of the plans. count: microbatches per replica.
        placements: by component; what is left out is batch-sharded.

    Raises:
        PlanError: a value cannot be cut as its way from layout to layout asks.
    """
    placed = _placed(problem, placements)
    key = replace(mesh, pp=1, dp=mesh.ep), placed
    known = problem.remembered(_Known).placed
    if key not in known:
        known[key] = _made(problem, problem.layout(_whole_plan(problem, mesh, count, placed)), placed)
    return known[key]


def chain_seconds(problem: PlanningProblem, mesh: Mesh, count: int, placements: Mapping[str, Placement]) -> ChainSeconds:
    """The least seconds of one microbatch, on the fastest device and the fastest links of any place.

    Args:
        problem, mesh, count, placements: as `placed_chain` takes them.

    Raises:
        PlanError: as `placed_chain`. CostError: a component without a price.
    """
    placed = _placed(problem, placements)
    key = mesh, count, placed
    known = problem.remembered(_Known).seconds
    if key not in known:
        known[key] = _seconds(problem, mesh, count, placed_chain(problem, mesh, count, placements))
    return known[key]


def _placed(problem: PlanningProblem, placements: Mapping[str, Placement]) -> tuple[Placement, ...]:
    return tuple(placements.get(component.name, BATCH) for component in problem.model.components)


def _whole_plan(problem: PlanningProblem, mesh: Mesh, count: int, placed: tuple[Placement, ...]) -> Plan:
    """All components on one stage."""
    one = replace(mesh.undivided(), pp=1)
    names = tuple(component.name for component in problem.model.components)
    return Plan(
        strategy="custom",
        mesh=one,
        stages=(Stage(components=names, ranks=one.stage_ranks(0), placements=placed if mesh.tp > 1 else ()),),
        global_batch=problem.global_batch,
        microbatches=count,
        clip_gradients=problem.clip_gradients,
    )


def _made(problem: PlanningProblem, layout: PlanIndex, placed: tuple[Placement, ...]) -> PlacedChain:
    model, order = problem.model, problem.model.component_index
    alone = any(placement.kind == "place" for placement in placed)
    kinds: dict[tuple[str, Placement], int] = {}
    shown: list[tuple[Component, Placement]] = []
    kind_of = []
    for component, placement in zip(model.components, placed, strict=True):
        reads = any(model.value[name].producer is not None for name in component.inputs)
        key = (f"{component.fingerprint} {reads} {component.name in layout.differentiable}", placement)
        if key not in kinds:
            kinds[key] = len(shown)
            shown.append((component, placement))
        kind_of.append(kinds[key])
    numbers: dict[tuple[int, int, ValueLayout, ValueLayout], int] = {}
    conversions: list[tuple[Value, ValueLayout, ValueLayout]] = []

    def converted(value: Value, source: ValueLayout, target: ValueLayout) -> int:
        key = value.bytes_per_sample, value.fixed_bytes, source, target
        if key not in numbers:
            numbers[key] = len(conversions)
            conversions.append((value, source, target))
        return numbers[key]

    ahead: Waits = [[] for _ in model.components]
    back: Waits = [[] for _ in model.components]
    for value in model.values:
        if value.producer is None or alone:
            continue
        made, maker = layout.source[value.name], order[value.producer]
        for reading in layout.readings[value.name]:
            if reading.ends.value != made.value:
                way = converted(value, made.value, reading.ends.value)
                for name in reading.components:
                    ahead[order[name]].append((maker, way))
            first = next((name for name in reading.components if name in layout.differentiable), None)
            if value.differentiable and first is not None and reading.ends.gradient != made.gradient:
                back[maker].append((order[first], converted(value, reading.ends.gradient, made.gradient)))
    return PlacedChain(tuple(shown), tuple(kind_of), tuple(conversions), ahead, back)


def _seconds(problem: PlanningProblem, mesh: Mesh, count: int, chain: PlacedChain) -> ChainSeconds:
    samples = problem.global_batch // (mesh.dp * count)
    prices = Prices(problem=problem, mesh=mesh, samples=samples, bucket_bytes=DEFAULT_BUCKET_BYTES)
    forward, backward = [], []
    for component, placement in chain.kinds:
        share = 1 / mesh.tp if placement.kind == "place" else 1.0
        forward.append(share * prices.compute_s(component, placement, Phase.FORWARD, fastest=True))
        has_backward = component.name in prices.differentiable
        backward.append(share * prices.compute_s(component, placement, Phase.BACKWARD, fastest=True) if has_backward else 0.0)
    moving = [_least_conversion_s(problem, mesh, samples, *each) for each in chain.conversions]
    n = len(chain.kind_of)
    order = range(n)
    forward_s = _added(order, [forward[kind] for kind in chain.kind_of], chain.ahead, moving)
    backward_s = _added(order[::-1], [backward[kind] for kind in chain.kind_of], chain.back, moving)
    crossing = _crossing(chain.ahead, moving, n) + _crossing(chain.back, moving, n)
    own_s = [one + two for one, two in zip(forward, backward, strict=True)]
    computing_s = sum(own_s[kind] for kind in chain.kind_of)
    return ChainSeconds(forward_s, backward_s, computing_s, max(own_s, default=0.0), crossing)


def _added(order: Sequence[int], own_s: Sequence[float], waits: Waits, moving_s: Sequence[float]) -> Floats:
    """What every component adds to the end, in the order in which they run."""
    clock, ends, added = 0.0, [0.0] * len(own_s), np.zeros(len(own_s))
    for number in order:
        begun = clock
        for other, way in waits[number]:
            clock = max(clock, ends[other] + moving_s[way])
        clock += own_s[number]
        ends[number], added[number] = clock, clock - begun
    return added


def _crossing(waits: Waits, moving_s: Sequence[float], n: int) -> Floats:
    """By cut before a component, the dearest conversion between both sides of it."""
    found = np.zeros(n)
    pairs = np.array([(number, other, way) for number, own in enumerate(waits) for other, way in own], dtype=np.int64)
    if not len(pairs):
        return found
    first, last = pairs[:, :2].min(axis=1) + 1, pairs[:, :2].max(axis=1) + 1
    seconds = np.array(moving_s)[pairs[:, 2]]
    alone = last - first == 1  # between neighbours
    np.maximum.at(found, first[alone], seconds[alone])
    for begin, end, moving in zip(first[~alone], last[~alone], seconds[~alone], strict=True):
        found[begin:end] = np.maximum(found[begin:end], moving)
    return found


def _least_conversion_s(
    problem: PlanningProblem, mesh: Mesh, samples: int, value: Value, source: ValueLayout, target: ValueLayout
) -> float:
    """In the first replica, at the place where it takes least."""
    size_bytes, tp = value.size_bytes(samples), mesh.tp
    hops = [hop for hop in conversion(source, target, tp) if hop.operation not in LOCAL_HOPS]
    found = []
    for base in _unlike_bases(problem, mesh) if hops else ():
        total = 0.0
        for hop in hops:
            if hop.operation in POINT_TO_POINT_HOPS:
                works: list[Work] = [hop_message(hop, base + a, base + b, size_bytes, tp) for a, b in hop_pairs(hop, tp)]
            else:
                groups = [tuple(base + rank for rank in group) for group in hop_groups(hop, tp)]
                works = [hop_collective(hop, group, size_bytes, tp) for group in groups]
            total += min(problem.price([(work, base)], mesh)[0].median_s for work in works)
        found.append(total)
    return min(found, default=0.0)


def _unlike_bases(problem: PlanningProblem, mesh: Mesh) -> list[int]:
    """The first ranks of all places in the first replica; of those that lie alike within their nodes one."""
    cluster, width = problem.cluster, mesh.copies * mesh.tp
    found: dict[object, int] = {}
    for place in range(mesh.pp):
        base = place * width
        ranks = range(base, base + mesh.tp)
        within = len({cluster.places[rank][0] for rank in ranks}) == 1
        kinds = tuple((cluster.places[rank][1], cluster.devices[rank].type.name) for rank in ranks)
        found.setdefault(kinds if within else base, base)
    return list(found.values())
