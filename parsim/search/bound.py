"""Lower bounds of a step in closed form: what no simulation of a plan goes below, from what is known of it.

    chain      one microbatch through a whole model on one stage: what all cuts into stages have in common
    places     computation, conversions and transfers of one cut, at every place on the pp axis, and the order of its blocks
    step       with sums of gradients, gathered parameters and the optimizer: one plan
    devices    the computation of the batch, divided evenly over so many devices

Bounds that add up what comes before a stage hold for chains alone; stages of two towers run beside one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import add
from typing import NamedTuple, TypeVar, cast

import numpy as np

from parsim.costs.estimate import rank_noise
from parsim.engines.noise import FEWEST_DRAWS
from parsim.model.component import Component, Value, ways_of
from parsim.numeric import Floats
from parsim.plans.layouts import BATCH, LOCAL_HOPS, Placement, ValueLayout, conversion
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import few_rounds, pipeline_actions
from parsim.plans.plan import Plan, Stage
from parsim.predict.evaluate import NOISY_STEPS, SEED
from parsim.predict.problem import PlanningProblem
from parsim.predict.rounds import least_exposed
from parsim.program.buckets import BucketsByFamily, by_family
from parsim.program.passes.compute import computations
from parsim.program.passes.convert import is_scattered
from parsim.program.passes.gradients import bucket_work, gathering_work, replica_sum_work, updates_of
from parsim.program.placed import PlanIndex, Reading
from parsim.records import once
from parsim.search.prices import Prices, device_kinds, fewer_copies, hop_works
from parsim.units import divisors
from parsim.work import BY_OPERATOR_PART, HostUpdate, Phase, SendRecv, Work

# One microbatch through a whole model on one stage, conversions included: what all cuts into stages have in common.
#
# A component takes what it adds to the end of the forward, and of the backward: its own computation, and what it waits for of
# the conversions before it.
#
# Leaves out: components placed on single ranks, and backwards in halves, whose conversions count nothing.


Waits = list[list[tuple[int, int]]]
"""By component what it waits for: the number of another component, and that of the conversion in between."""


class ChainSeconds(NamedTuple):
    """Seconds of one microbatch on one stage: its forward, its backward, and the computation of the longest component."""

    forward_s: float
    backward_s: float
    longest_s: float


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


def placed_chain(problem: PlanningProblem, mesh: Mesh, count: int, placements: Mapping[str, Placement]) -> PlacedChain:
    """What waits for what where a stage holds all components; those that `placements` leaves out are batch-sharded.

    Raises:
        PlanError: a value cannot be cut as its way from layout to layout asks.
    """
    placed = tuple(placements.get(component.name, BATCH) for component in problem.model.components)
    known, key = problem.answers(placed_chain), (replace(mesh.undivided(), pp=1, dp=mesh.ep), placed)
    if key not in known:
        one = replace(mesh.undivided(), pp=1)
        names = tuple(component.name for component in problem.model.components)
        plan = Plan(
            strategy="custom",
            mesh=one,
            stages=(Stage(components=names, ranks=one.stage_ranks(0), placements=placed if mesh.tp > 1 else ()),),
            global_batch=problem.global_batch,
            microbatches=count,
            clip_gradients=problem.clip_gradients,
        )
        known[key] = _chain_of(problem, problem.layout(plan), placed)
    return cast(PlacedChain, known[key])


def chain_seconds(problem: PlanningProblem, mesh: Mesh, count: int, placements: Mapping[str, Placement]) -> ChainSeconds:
    """The least seconds of one microbatch, on the fastest device and the fastest links of any place.

    Raises:
        PlanError: as `placed_chain`. CostError: a component without a price.
    """
    return _chain_seconds(problem, mesh, count, tuple(sorted(placements.items())))


def _chain_of(problem: PlanningProblem, layout: PlanIndex, placed: tuple[Placement, ...]) -> PlacedChain:
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


@once
def _chain_seconds(
    problem: PlanningProblem, mesh: Mesh, count: int, placements: tuple[tuple[str, Placement], ...]
) -> ChainSeconds:
    chain = placed_chain(problem, mesh, count, dict(placements))
    samples = problem.global_batch // (mesh.dp * count)
    prices = Prices(problem, mesh, samples)
    forward, backward = [], []
    for component, placement in chain.kinds:
        share = 1 / mesh.tp if placement.kind == "place" else 1.0
        forward.append(share * prices.compute_s(component, placement, Phase.FORWARD, fastest=True))
        has_backward = component.name in prices.differentiable
        backward.append(share * prices.compute_s(component, placement, Phase.BACKWARD, fastest=True) if has_backward else 0.0)
    moving = []
    for value, source, target in chain.conversions:
        remote = any(hop.operation not in LOCAL_HOPS for hop in conversion(source, target, mesh.tp))
        bases = _unlike_bases(problem, mesh) if remote else ()
        moving.append(min((_hops_s(problem, mesh, samples, base, value, source, target) for base in bases), default=0.0))
    order = range(len(chain.kind_of))
    forward_s = _end_s(order, [forward[kind] for kind in chain.kind_of], chain.ahead, moving)
    backward_s = _end_s(order[::-1], [backward[kind] for kind in chain.kind_of], chain.back, moving)
    return ChainSeconds(forward_s, backward_s, max(map(add, forward, backward), default=0.0))


def _end_s(order: Sequence[int], own_s: Sequence[float], waits: Waits, moving_s: Sequence[float]) -> float:
    """When the last component ends, in the order in which they run."""
    clock, ends = 0.0, [0.0] * len(own_s)
    for number in order:
        for other, way in waits[number]:
            clock = max(clock, ends[other] + moving_s[way])
        clock += own_s[number]
        ends[number] = clock
    return clock


def _hops_s(
    problem: PlanningProblem,
    mesh: Mesh,
    samples: int,
    base: int,
    value: Value,
    source: ValueLayout,
    target: ValueLayout,
) -> float:
    """A conversion on the tp ranks from `base` on: of every hop the message or group that takes least."""
    total, size_bytes = 0.0, value.size_bytes(samples)
    some = fewer_copies(mesh)
    beside = some if base + mesh.tp <= some.copies * some.tp else mesh
    for hop in conversion(source, target, mesh.tp):
        works = hop_works(hop, base, size_bytes, mesh.tp)
        total += min((_exposed_s(problem, work, base, mesh, beside) for work in works), default=0.0)
    return total


def _exposed_s(problem: PlanningProblem, work: Work, rank: int, mesh: Mesh, beside: Mesh | None = None) -> float:
    """Seconds of what products cannot hide of a work, at least."""
    return least_exposed(work, mesh.tp, dict(problem.switches)) * problem.price([(work, rank)], mesh, beside)[0].median_s


def _unlike_bases(problem: PlanningProblem, mesh: Mesh) -> list[int]:
    """The first ranks of all places in the first replica; of those that lie alike within their nodes one."""
    cluster, width = problem.cluster, mesh.copies * mesh.tp
    bases: dict[object, int] = {}
    for base in range(0, mesh.pp * width, width):
        ranks = range(base, base + mesh.tp)
        within = len({cluster.places[rank][0] for rank in ranks}) == 1
        kinds = tuple((cluster.places[rank][1], cluster.devices[rank].type.name) for rank in ranks)
        bases.setdefault(kinds if within else base, base)
    return list(bases.values())


# The blocks of one step in the order of a pipeline: a lower bound that knows where they wait for one another.
#
# A block is the forward or the backward of one microbatch on one stage. It begins when the block before it on its place has
# ended, and when what its first component reads has come from other stages. The step at place 0 ends with its last block.
#
# Between two stages one message follows the other, each as long as its transfer takes. The microbatches of one phase pass
# from a stage to another in their order, and share a stream.
#
# Leaves out what later components of a block wait for, messages of other stages on the same stream, and work of the step
# before at the other places. All of them make a step longer.


MOST_BLOCKS = 4096
"""Of a step. Longer ones are bounded without their order."""

Lags = Mapping[int, Sequence[tuple[int, float, float]]]
"""By stage, the stages from which its block gets what it begins with, how long after their beginning that is made, and how long
it is on the way."""


def _last_block_s(
    plan: Plan, forward_s: Sequence[float], backward_s: Sequence[float], ahead: Lags, back: Lags, early_s: Sequence[float]
) -> float:
    """When the last block of place 0 ends, after the beginning of the step there.

    Args:
        plan: a pipeline whose order has no halves. forward_s, backward_s: by stage, of one block.
        ahead: of the forwards. back: of the backwards; none for a stage where the loss lies.
        early_s: by stage, what a backward does at its beginning without the gradient: it runs a forward again.

    Returns:
        0 where a stage of another place waits for nothing: it may begin its step before place 0 does.
    """
    places, ranks = plan.stage_places, plan.mesh.pp
    if any(place and not ahead.get(stage) for stage, place in enumerate(places)):
        return 0.0
    actions = [pipeline_actions(plan.pipeline_order, place, ranks, plan.microbatches, plan.chunks) for place in range(ranks)]
    sending: list[list[list[tuple[int, float, float]]]] = [[[] for _ in places] for _ in (ahead, back)]
    for lags, to_send in zip((ahead, back), sending, strict=True):
        for target, waits in lags.items():
            for source, made_s, way_s in waits:
                to_send[source].append((target, made_s, way_s))
    awaited = [[len(lags.get(stage, ())) for stage in range(len(places))] for lags in (ahead, back)]
    arrived: dict[tuple[bool, int, int], tuple[int, float]] = {}  # of a block: how many messages have come, and the last
    passed: dict[tuple[bool, int, int], float] = {}
    free, following = [0.0] * ranks, [0] * ranks
    moved = True
    while moved:
        moved = False
        for place, own in enumerate(actions):
            for action in own[following[place] :]:
                forwards, stage = action.phase is Phase.FORWARD, action.stage
                come, ready = arrived.get((forwards, stage, action.microbatch), (0, 0.0))
                if come < awaited[not forwards][stage]:
                    break
                ready = max(ready if forwards else ready - early_s[stage], free[place])
                free[place] = ready + (forward_s if forwards else backward_s)[stage]
                for target, made_s, way_s in sending[not forwards][stage]:
                    there = max(ready + made_s, passed.get((forwards, stage, target), 0.0) if way_s else 0.0) + way_s
                    passed[forwards, stage, target] = there
                    key = forwards, target, action.microbatch
                    come, last = arrived.get(key, (0, 0.0))
                    arrived[key] = come + 1, max(last, there)
                following[place] += 1
                moved = True
    return free[0]


def _lags(
    stages: Sequence[Sequence[str]], ends: Mapping[str, float], arriving: Callable[[str], Sequence[tuple[int, str, float]]]
) -> Lags:
    """How long after the beginning of other blocks each block gets what its first component waits for.

    Args:
        stages: by stage its components, in the order in which the block runs them. ends: of each, after the beginning of its
            block, at least. arriving: by component what it waits for from other stages: (stage, component, seconds on the way).
    """
    lags = {}
    for number, names in enumerate(stages):
        latest: dict[int, tuple[float, float]] = {}
        for stage, maker, way_s in arriving(names[0]) if names else ():
            made_s = ends[maker]
            if stage not in latest or made_s + way_s > sum(latest[stage]):
                latest[stage] = made_s, way_s
        if names:
            lags[number] = [(stage, made_s, way_s) for stage, (made_s, way_s) in latest.items()]
    return lags


SOME_BYTES, SOME_REPLICAS = 2**20, 8
"""The transfers by which the links of replicas are compared, and how many replicas are."""


@dataclass(frozen=True, slots=True)
class PlaceWork:
    """The computation of one step at a place on the pp axis, in seconds.

    Attributes:
        busy_s: of all microbatches on its slowest rank.
        done_s: until its last block can have ended, after the beginning of the step at place 0.
        after_s: from its last block to the end of the last block of place 0; None if no gradient goes there.
        remaining_s: by component, what its place computes after the last backward of the component.
    """

    busy_s: float
    done_s: float
    after_s: float | None
    remaining_s: Mapping[str, float]


def computation_of(problem: PlanningProblem, plan: Plan) -> tuple[PlaceWork, ...]:
    """The computation of every place of the plan, which bucket sizes and ZeRO stages do not change."""
    return _places_of(problem, plan.without_zero())


@once
def _places_of(problem: PlanningProblem, program: Plan) -> tuple[PlaceWork, ...]:
    return _Computation(problem, problem.layout(program)).places()


def order_s(problem: PlanningProblem, plan: Plan, *, anew: bool = True) -> float:
    """The end of the last block of place 0 of a pipeline, by the order of its blocks; 0 where that is not known.

    Args:
        anew: whether to work it out.
    """
    known, program = problem.answers(order_s), plan.without_zero()
    if program not in known and anew:
        known[program] = _Computation(problem, problem.layout(plan)).order_s()
    return float(known.get(program, 0.0))


def prices_of(problem: PlanningProblem, plan: Plan) -> Prices:
    """Prices on the plan's mesh, for its microbatch."""
    return _prices_on(problem, plan.mesh, plan.microbatch_samples)


@once
def _prices_on(problem: PlanningProblem, mesh: Mesh, samples: int) -> Prices:
    return Prices(problem, mesh, samples)


@dataclass(frozen=True)
class _Computation:
    problem: PlanningProblem
    layout: PlanIndex

    @property
    def plan(self) -> Plan:
        return self.layout.plan

    @cached_property
    def prices(self) -> Prices:
        return prices_of(self.problem, self.plan)

    @cached_property
    def converts(self) -> bool:
        """Whether conversions are counted: not where components are placed on single ranks, which run beside one another, nor
        where they run beside the second halves of backwards."""
        return self.plan.is_mixed and not self._placed_alone and not self._halved

    @cached_property
    def _placed_alone(self) -> bool:
        return any(placement.kind == "place" for stage in self.plan.stages for placement in stage.placements)

    @cached_property
    def _halved(self) -> bool:
        return any(self.layout.is_halved(name) for name in self.plan.components)

    def places(self) -> tuple[PlaceWork, ...]:
        (before, turned), after = self._begins_s(), self._after_s()
        works = []
        for place in range(self.plan.mesh.pp):
            chunks = self.plan.place_stages(place)
            blocks = (self._blocks(chunks, rank) for rank in self._unlike_ranks(place))
            seconds, within = max(blocks, key=lambda block: sum(map(sum, block[0].values())))
            reached = [later for chunk in chunks if (later := after[chunk]) is not None]
            busy_s = self.plan.microbatches * sum(map(sum, seconds.values()))
            back_s = self.plan.microbatches * sum(backward for _, backward in seconds.values())
            back_s -= max(map(self._ahead_s, chunks))
            works.append(
                PlaceWork(
                    busy_s=busy_s,
                    done_s=max(
                        min(before[chunk] for chunk in chunks) + busy_s, min(turned[chunk] for chunk in chunks) + back_s
                    ),
                    after_s=min(reached) if len(reached) == len(chunks) else None,
                    remaining_s=self._remaining_s(place, seconds, within),
                )
            )
        return tuple(works)

    def _unlike_ranks(self, place: int) -> Sequence[int]:
        """One rank of each kind of device; where components are placed on single ranks, every shard of the first replica."""
        if self._placed_alone:
            return [self.layout.rank(place, 0, shard) for shard in range(self.plan.mesh.tp)]
        costs = self.problem.costs(self.plan.world_size)
        return costs.unlike_ranks(self.plan.mesh.stage_range(place))

    def _ahead_s(self, chunk: int) -> float:
        """What a backward of a stage may do before the gradient has come: the second forward of its first component, or of the
        segment that this one belongs to."""
        first = next(
            (name for name in reversed(self.plan.stages[chunk].components) if name in self.layout.differentiable), None
        )
        if first is None or not self.layout.recomputes(first):
            return 0.0
        again = dict.fromkeys(self.layout.segment_of(first) or (first,))
        pieces = [(self.problem.model.component(name), self.layout.placement[name], Phase.RECOMPUTE) for name in again]
        ranks = self._unlike_ranks(self.plan.stage_places[chunk])
        return max(sum(self.prices.compute_on_s(*piece, rank) for piece in pieces) for rank in ranks)

    def _compute_s(self, name: str, phase: Phase, rank: int) -> float:
        """One computation of a component on a rank, of one microbatch."""
        part = BY_OPERATOR_PART if phase is Phase.RECOMPUTE and self.layout.recomputes_by_operator(name) else ""
        component, placement = self.problem.model.component(name), self.layout.placement[name]
        return self.prices.compute_on_s(component, placement, phase, rank, part)

    def _least_s(self, name: str, phase: Phase) -> float:
        """On the fastest kind of device of its stage."""
        ranks = self._unlike_ranks(self.layout.stage_of[name])
        if self._placed_alone:
            ranks = [rank for rank in ranks if self.layout.runs_on(rank, name)]
        return min(self._compute_s(name, phase, rank) for rank in ranks)

    def _blocks(self, chunks: Sequence[int], rank: int) -> tuple[dict[int, tuple[float, float]], dict[str, float]]:
        """By chunk the forward and backward of one microbatch on a rank; by component what of the backward follows its own."""
        seconds: dict[int, tuple[float, float]] = {}
        within: dict[str, float] = {}
        for chunk in chunks:
            names = [name for name in self.plan.stages[chunk].components if self.layout.runs_on(rank, name)]
            forward = max(self._forward_ends(chunk, names, rank).values(), default=0.0)
            ends, clock = self._backward_ends(chunk, names, rank)
            seconds[chunk] = (forward, clock)
            within.update({name: clock - end for name, end in ends.items()})
        return seconds, within

    def _forward_ends(self, chunk: int, names: Sequence[str], rank: int) -> dict[str, float]:
        clock = 0.0
        ends: dict[str, float] = {}
        for name in names:
            for value in self._values_read(name) if self.converts else ():
                if value.producer is not None and self.layout.chunk_of[value.producer] == chunk:
                    made, read = self.layout.source[value.name].value, self.layout.reads_in(name, value.name).value
                    clock = max(clock, ends[value.producer] + self._conversion_s(value, chunk, made, read))
            clock += self._compute_s(name, Phase.FORWARD, rank)
            ends[name] = clock
        return ends

    def _values_read(self, name: str) -> list[Value]:
        model = self.problem.model
        return [model.value[value] for value in dict.fromkeys(model.component(name).inputs)]

    def _backward_ends(self, chunk: int, names: Sequence[str], rank: int) -> tuple[dict[str, float], float]:
        clock = 0.0
        ends: dict[str, float] = {}
        for name in reversed(names):
            if name not in self.layout.differentiable:
                continue
            ready = self._gradients_ready_s(chunk, name, ends) if self.converts else 0.0
            if self.layout.recomputes(name):
                clock += self._compute_s(name, Phase.RECOMPUTE, rank)
            halved = self.layout.is_halved(name)
            phases = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT) if halved else (Phase.BACKWARD,)
            clock = max(clock, ready) + sum(self._compute_s(name, phase, rank) for phase in phases)
            ends[name] = clock
        return ends, clock

    def _gradients_ready_s(self, chunk: int, name: str, ends: Mapping[str, float]) -> float:
        """When the gradients of what a component makes that come from this chunk have the layout in which it wants them."""
        ready = 0.0
        for output, value, reading, first in self._gradient_readings(name):
            if self.layout.chunk_of[first] == chunk and first in ends:
                wanted = self.layout.source[output].gradient
                ready = max(ready, ends[first] + self._conversion_s(value, chunk, reading.ends.gradient, wanted))
        return ready

    def _gradient_readings(self, name: str) -> Iterator[tuple[str, Value, Reading, str]]:
        """Per value that a component makes and that gets a gradient its readings, with the last of each to add to it."""
        for output in self.problem.model.component(name).outputs:
            value = self.problem.model.value[output]
            for reading in self.layout.readings[output] if value.differentiable else ():
                last = next((each for each in reading.components if each in self.layout.differentiable), None)
                if last is not None:
                    yield output, value, reading, last

    def _conversion_s(self, value: Value, chunk: int, source: ValueLayout, target: ValueLayout) -> float:
        if source == target:
            return 0.0
        place = self.plan.stage_places[chunk]
        key = (value.bytes_per_sample, value.fixed_bytes, place, source, target)
        if key not in self._converted:
            samples, base = self.plan.microbatch_samples, self.layout.rank(place, 0)
            self._converted[key] = _hops_s(self.problem, self.plan.mesh, samples, base, value, source, target)
        return self._converted[key]

    @cached_property
    def _converted(self) -> dict[tuple[object, ...], float]:
        return {}

    def _work_s(self, work: Work, rank: int) -> float:
        return _exposed_s(self.problem, work, rank, self.plan.mesh)

    def _transfer_s(self, value: Value, home: int, stage: int, moved: ValueLayout) -> float:
        """From place to place, in the replica whose links are slowest."""
        size_bytes = round(value.size_bytes(self.plan.microbatch_samples) * moved.local_share(self.plan.mesh.tp))
        if is_scattered(self.layout, moved):
            size_bytes = -(-size_bytes // moved.ways)
        ends = self.layout.rank(home, self._replica), self.layout.rank(stage, self._replica)
        return self._work_s(SendRecv(source=ends[0], destination=ends[1], size_bytes=size_bytes), ends[0])

    @cached_property
    def _replica(self) -> int:
        """The one of the first few whose links are slowest: any replica gives a bound, since all take part in every step."""

        def passing_s(replica: int) -> float:
            ranks = [self.layout.rank(place, replica) for place in range(self.plan.mesh.pp)]
            works = (SendRecv(source=one, destination=two, size_bytes=SOME_BYTES) for one, two in pairwise(ranks))
            return sum(self._work_s(work, work.source) for work in works)

        return max(range(min(self.plan.mesh.copies, SOME_REPLICAS)), key=passing_s)

    def _begins_s(self) -> tuple[list[float], list[float]]:
        """Per stage of the plan when its first forward and its first backward can begin, after the beginning of the step at
        place 0: as one microbatch alone would find every place free."""
        count = len(self.plan.stages)
        if self.plan.mesh.pp == 1 or self._placed_alone:
            return [0.0] * count, [0.0] * count
        clocks, begins = [0.0] * count, [0.0] * count
        ends: dict[str, float] = {}
        for chunk, stage in enumerate(self.plan.stages):
            for number, name in enumerate(stage.components):
                ready = clocks[chunk]
                for input_name in self.problem.model.component(name).inputs:
                    value = self.problem.model.value[input_name]
                    if value.producer is not None:
                        ready = max(ready, ends[value.producer] + self._coming_s(value, name))
                if not number:
                    begins[chunk] = ready
                clocks[chunk] = ends[name] = ready + self._least_s(name, Phase.FORWARD)
        return begins, self._turns_s(clocks)

    def _turns_s(self, forwards: Sequence[float]) -> list[float]:
        """Per stage when its first backward can begin, given when the forward of one microbatch ends there."""
        clocks, begins = list(forwards), list(forwards)
        ends: dict[str, float] = {}
        for chunk in range(len(self.plan.stages) - 1, -1, -1):
            names = [name for name in reversed(self.plan.stages[chunk].components) if name in self.layout.differentiable]
            for number, name in enumerate(names):
                ready = clocks[chunk]
                for _, value, reading, first in self._gradient_readings(name):
                    if first in ends:
                        ready = max(ready, ends[first] + self._going_s(value, reading.stage, reading.ends.gradient))
                if not number:
                    begins[chunk] = ready
                clocks[chunk] = ends[name] = ready + (0.0 if self._halved else self._least_s(name, Phase.BACKWARD))
        return begins

    def _going_s(self, value: Value, stage: int, moved: ValueLayout) -> float:
        assert value.producer is not None
        home = self.layout.stage_of[value.producer]
        return 0.0 if home == stage else self._transfer_s(value, stage, home, moved)

    def _coming_s(self, value: Value, name: str) -> float:
        assert value.producer is not None
        home, stage = self.layout.stage_of[value.producer], self.layout.stage_of[name]
        return 0.0 if home == stage else self._transfer_s(value, home, stage, self.layout.reads_in(name, value.name).value)

    def _after_s(self) -> list[float | None]:
        """Per stage of the plan from the end of its last block to the end of a block at place 0 that waits for it."""
        after: list[float | None] = [0.0 if place == 0 else None for place in self.plan.stage_places]
        if self.plan.mesh.pp == 1 or self._placed_alone or self._halved:
            return after  # the last task of a place may be the half that nobody waits for
        rest: dict[str, float] = {}
        for chunk, stage in enumerate(self.plan.stages):
            names = [name for name in stage.components if name in self.layout.differentiable]
            total = 0.0
            for name in names:
                total += self._least_s(name, Phase.BACKWARD)
                rest[name] = total
            if names and (going := self._returning_s(chunk, names[0], rest, after)) is not None:
                after[chunk] = max(going, after[chunk] or 0.0)
        return after

    def _returning_s(self, chunk: int, first: str, rest: Mapping[str, float], after: Sequence[float | None]) -> float | None:
        """From the backward of a stage's first component by way of its inputs to place 0, the longest way."""
        longest = None
        for value in self._values_read(first):
            if value.producer is None or not value.differentiable or value.producer not in rest:
                continue
            home = self.layout.chunk_of[value.producer]
            onwards = after[home]
            reading = next(entry for entry in self.layout.readings[value.name] if first in entry.components)
            leading = next((name for name in reading.components if name in self.layout.differentiable), None)
            if home == chunk or onwards is None or leading != first:
                continue
            moving = self._going_s(value, self.plan.stage_places[chunk], reading.ends.gradient)
            longest = max(longest or 0.0, moving + rest[value.producer] + onwards)
        return longest

    def order_s(self) -> float:
        """The end of the last block of place 0; 0 where conversions beside the blocks, or too many blocks, hide the order."""
        small = 2 * len(self.plan.stages) * self.plan.microbatches <= MOST_BLOCKS
        if self.plan.mesh.pp == 1 or self._placed_alone or self._halved or not small:
            return 0.0
        stages = [stage.components for stage in self.plan.stages]
        turned = [[name for name in reversed(names) if name in self.layout.differentiable] for names in stages]
        forward_s, made = self._least_ends(stages, self._forward_ends)
        backward_s, made_back = self._least_ends(stages, lambda *block: self._backward_ends(*block)[0])
        ahead = _lags(stages, made, self._inputs_from_others)
        back = _lags(turned, made_back, self._gradients_from_others)
        early_s = [self._ahead_s(chunk) for chunk in range(len(stages))]
        return _last_block_s(self.plan, forward_s, backward_s, ahead, back, early_s)

    def _least_ends(
        self, stages: Sequence[Sequence[str]], ends_of: Callable[[int, Sequence[str], int], Mapping[str, float]]
    ) -> tuple[list[float], dict[str, float]]:
        """Per stage the seconds of its block; by component its end after the block begins, on the fastest rank."""
        seconds, ends = [], dict[str, float]()
        for chunk, names in enumerate(stages):
            by_rank = [ends_of(chunk, names, rank) for rank in self._unlike_ranks(self.plan.stage_places[chunk])]
            ends |= {name: min(each[name] for each in by_rank) for name in by_rank[0]}
            seconds.append(min(max(each.values(), default=0.0) for each in by_rank))
        return seconds, ends

    def _inputs_from_others(self, name: str) -> list[tuple[int, str, float]]:
        """What a component reads from other stages of the plan: the stage, the maker, the seconds on the way."""
        chunk_of = self.layout.chunk_of
        return [
            (chunk_of[value.producer], value.producer, self._coming_s(value, name))
            for value in self._values_read(name)
            if value.producer is not None and chunk_of[value.producer] != chunk_of[name]
        ]

    def _gradients_from_others(self, name: str) -> list[tuple[int, str, float]]:
        """What a backward waits for from other stages: the last of each to add to the gradients of what the component makes."""
        chunk_of = self.layout.chunk_of
        return [
            (chunk_of[last], last, self._going_s(value, reading.stage, reading.ends.gradient))
            for _, value, reading, last in self._gradient_readings(name)
            if chunk_of[last] != chunk_of[name]
        ]

    def _remaining_s(
        self, place: int, seconds: Mapping[int, tuple[float, float]], within: Mapping[str, float]
    ) -> dict[str, float]:
        """By component, what the place computes after its last backward."""
        plan, later = self.plan, 0.0
        behind: dict[int, float] = {}
        count = few_rounds(plan.pipeline_order, plan.mesh.pp, plan.microbatches)
        for action in reversed(pipeline_actions(plan.pipeline_order, place, plan.mesh.pp, count, plan.chunks)):
            forward, backward = seconds[action.stage]
            if action.phase is not Phase.FORWARD:
                behind.setdefault(action.stage, later)
                if len(behind) == len(seconds):
                    break
            later += forward if action.phase is Phase.FORWARD else backward
        return {name: behind[self.layout.chunk_of[name]] + after for name, after in within.items()}

    # ZeRO 3: what a place on the pp axis waits for at least, because parameters are gathered at most one lot ahead.
    #
    # A lot is what runs on the same gathered parameters. Those of a lot are gathered from the end of the lot before the
    # previous one on (`parsim.program.passes.unsharded`). A backward without prefetch gathers them from the end of the previous
    # one on. So lots that compute little leave the gathers of the next ones uncovered.
    #
    # Leaves out: the first two lots of a block, which may be gathered before it begins; conversions; sums of gradients, which
    # share the stream.

    def gathered_s(self, place: int, rank: int) -> tuple[float, float]:
        """Seconds of all gathers of one microbatch on the first rank of a place, and of computation that waits for them.

        Returns:
            Without the gathers of what is whole from the block before. The second is 0 where backwards run in halves.
        """
        total = waiting = 0.0
        buckets = by_family(self.layout.gathered_buckets(rank))
        for chunk in self.plan.place_stages(place):
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                block = [entry for entry in computations(self.layout, chunk, phase) if self.layout.runs_on(rank, entry[1])]
                ends: list[float] = []
                ahead = phase is Phase.FORWARD or self.plan.backward_prefetch
                for number, (gathering, between, computing) in enumerate(self._lots(rank, block, buckets)):
                    total += gathering
                    ready = (ends[-1] if ends else 0.0) + between
                    if number >= 2:
                        ready = max(ready, (ends[-2] if ahead else ends[-1]) + gathering)
                    ends.append(ready + computing)
                waiting += ends[-1] if ends and not self._halved else 0.0
        return total, waiting

    def _lots(self, rank: int, block: Sequence[tuple[Phase, str]], every: BucketsByFamily) -> list[tuple[float, float, float]]:
        """By lot of a block the seconds of the gathers that it begins with (none of the first), of computation before it that
        needs no parameters, and of its own. `every`: the buckets of the rank."""
        lots: list[tuple[float, float, float]] = []
        needed: dict[int, None] | None = None
        between = 0.0
        for phase, name in block:
            buckets = {bucket.number: bucket for bucket in self.layout.unsharded_buckets(name, every)}
            computing = self._compute_s(name, phase, rank)
            if not buckets:
                between += computing
                continue
            if needed is None or needed.keys() != buckets.keys():
                entering = [bucket for number, bucket in buckets.items() if needed is not None and number not in needed]
                gathering = sum(self._work_s(gathering_work(bucket), rank) for bucket in entering)
                lots.append((gathering, between, computing))
            else:
                gathering, before, others = lots[-1]
                lots[-1] = (gathering, before, others + between + computing)
            needed, between = dict.fromkeys(buckets), 0.0
        return lots


# Lower bounds of a plan's step: what the simulation of the plan cannot go below, without lowering or simulating it.
#
# Every rank issues its computation in order, and begins a step when its own tasks of the step before have ended. So with
# F and B the computation of one microbatch on a place of the pp axis (a block), conversions between its components included:
#
#     own       M * (F + B), then every bucket whose gradients are complete k seconds before the end, then the optimizer
#     round     place 0 begins the step; place p cannot begin before the first microbatch has come to it (E), and after the
#               last backward of p a gradient still goes back to place 0 (D): E + M * (F + B) + D, then the last buckets of
#               place 0; nor can its backwards begin before one microbatch has come to the loss and back (L): L + M * B + D
#     order     the last block of place 0 by the order of all blocks, then its last buckets
#     sending   all collectives on the stream of the gradients, which takes one at a time (sums over sharding groups are not
#               on it); with ZeRO 3 also what waits for parameters that are gathered late
#
# The bound is the largest of these over the places. All prices are those of the simulation.
#
# Leaves out: loading, overlap factors, cores that ranks share, waiting between blocks. All of them make a step longer.


ROUNDING = 1 - 1e-9
"""Sums in another order differ by rounding: a bound is lowered by that much."""


def step_bound_s(problem: PlanningProblem, plan: Plan) -> float:
    """Seconds that no simulation of the plan goes below.

    Raises:
        PlanError: the plan does not match the model. CostError: a component without a price.
    """
    layout, places = problem.layout(plan), computation_of(problem, plan)
    ends = [_place_ends_s(problem, layout, place, work) for place, work in enumerate(places)]
    last_round_s = max(0.0, order_s(problem, plan, anew=False), *_rounds_s(places))
    return whole_step_s(problem, plan, max(*(end for end, _ in ends), last_round_s + ends[0][1]))


def _rounds_s(places: Sequence[PlaceWork]) -> list[float]:
    """When the last block of place 0 can have ended, by what each place waits for and makes it wait for."""
    return [work.done_s + work.after_s for work in places if work.after_s is not None]


def whole_step_s(problem: PlanningProblem, plan: Plan, bound_s: float) -> float:
    """A bound of a step's tasks as one of a simulated step: with the least noise, and what lies between steps."""
    ranks = plan.world_size
    return (bound_s * least_noise(problem, ranks) + problem.costs(ranks).between_steps_s) * ROUNDING


Seconds = TypeVar("Seconds", float, Floats)


def lowered_s(problem: PlanningProblem, mesh: Mesh, bound_s: Seconds) -> Seconds:
    """A bound of a step's tasks, or an array of them, with the least noise."""
    return bound_s * least_noise(problem, mesh.size) * ROUNDING


def computation_bound_s(problem: PlanningProblem, plan: Plan) -> float:
    """A bound for all ZeRO stages and bucket sizes at once: computation, conversions and transfers alone."""
    places = computation_of(problem, plan)
    return whole_step_s(problem, plan, max(*(work.busy_s for work in places), *_rounds_s(places), 0.0))


def order_bound_s(problem: PlanningProblem, plan: Plan) -> float:
    """A bound for all ZeRO stages and bucket sizes by the order of the pipeline's blocks: sharper, and slower to find.

    Later bounds of plans that differ in ZeRO stage and bucket size alone include it.
    """
    return whole_step_s(problem, plan, order_s(problem, plan))


@once
def least_noise(problem: PlanningProblem, ranks: int) -> float:
    """The mean of the least noisy core over the draws with which a step is simulated, however many, at most 1."""
    noise = problem.cluster.profile.noise
    if noise is None or not noise.rank_sigma or ranks == 1:
        return 1.0
    cores = np.arange(1 + max(problem.cluster.core_of_rank(ranks), default=0))
    least = 1.0
    for drawn in (np.arange(max(len(cores), ranks)), cores):
        draws = rank_noise(drawn, noise.rank_sigma, NOISY_STEPS, SEED)
        means = np.cumsum(draws, axis=0) / np.arange(1, len(draws) + 1)[:, None]
        least = min(least, float(means[FEWEST_DRAWS - 1 :].min()))
    return least


def _place_ends_s(problem: PlanningProblem, layout: PlanIndex, place: int, work: PlaceWork) -> tuple[float, float]:
    """When the first rank of a place, and its gradients' stream, is done with its own step; and what follows its last backward:
    the sums of the buckets that it completes, the optimizer, gathered parameters."""
    mesh, rank = layout.plan.mesh, layout.rank(place, 0)

    def seconds(of: Work) -> float:
        return _exposed_s(problem, of, rank, mesh)

    sending, gathering, done, buckets = 0.0, 0.0, work.busy_s, []
    for bucket in layout.rank_buckets(rank):
        across = replica_sum_work(layout, bucket, rank)
        several = len(bucket.group) > 1
        if not several and across is None:
            continue
        summed = seconds(bucket_work(layout, bucket)) if several else 0.0
        stage = layout.zero_stage_of(bucket)
        sending += summed * (layout.plan.microbatches if stage >= 2 else 1)
        if several and stage in (1, 2) and not layout.plan.gathers_ahead:
            gathering += seconds(gathering_work(bucket))
        later = [work.remaining_s[name] for name in layout.completes(bucket.family, place) if name in work.remaining_s]
        remaining = min(later, default=work.busy_s)  # of tied parameters at any of their places
        buckets.append((remaining, summed, 0.0 if across is None else seconds(across)))
    if layout.plan.zero_stage >= 3:
        gathered, waiting = _Computation(problem, layout).gathered_s(place, rank)
        sending += layout.plan.microbatches * gathered
        done = max(done, layout.plan.microbatches * waiting)
    sums, following = _Sums(), 0.0
    for remaining, summed, across_s in sorted(buckets):
        sums.add(summed, across_s)
        done = max(done, work.busy_s - remaining + sums.end_s)
        if remaining <= 0.0:
            following = sums.end_s
    steps: list[Work] = list(updates_of(layout, rank))
    if layout.plan.optimizer_offload:
        steps = [HostUpdate(elements=step.elements, optimizer=step.optimizer) for step in updates_of(layout, rank)]
    update_s = sum(map(seconds, steps))
    # a host's update goes bucket by bucket, and buckets are gathered beside later ones
    after_s = max(update_s, gathering) if layout.plan.optimizer_offload else update_s + gathering
    return max(done + after_s, sending + gathering), following + after_s


@dataclass
class _Sums:
    """What passes at least until the sums of buckets that are complete at one moment or later have ended.

    Sums of a sharding group run one after the other. Sums over all groups do too, each behind the first sum of its bucket.
    """

    summed_s: float = 0.0
    across_s: float = 0.0
    least_summed_s: float = float("inf")
    least_across_s: float = float("inf")

    def add(self, summed_s: float, across_s: float) -> None:
        self.summed_s += summed_s
        self.across_s += across_s
        self.least_summed_s = min(self.least_summed_s, summed_s)
        self.least_across_s = min(self.least_across_s, across_s)

    @property
    def end_s(self) -> float:
        return max(self.summed_s + self.least_across_s, self.least_summed_s + self.across_s)


# A lower bound of the step on so many devices, whatever the mesh: all computation of the batch, divided evenly.
#
# A component computes its samples in portions: m samples at a time on a device, or on w devices that hold a shard each. Every
# portion divides the batch. So the least device-seconds per sample, over all portions and shardings, bound every plan.


def device_bound_s(problem: PlanningProblem, devices: int) -> float:
    """Seconds that no step on the first devices of the cluster goes below."""
    known, key = problem.answers(device_bound_s), (problem.cost_group(devices), tuple(sorted(device_kinds(problem, devices))))
    if key not in known:
        known[key] = _batch_s(problem, devices)
    return float(known[key]) / devices * least_noise(problem, devices) * ROUNDING


def prices_are_alike(problem: PlanningProblem) -> bool:
    """Whether prices do not depend on how many ranks compute: then fewer devices never have a lower bound."""
    noise = problem.cluster.profile.noise
    return problem.cost_group(1) == problem.cost_group(problem.cluster.size) and (noise is None or not noise.rank_sigma)


def _batch_s(problem: PlanningProblem, devices: int) -> float:
    """The least device-seconds of one batch."""
    known: dict[object, float] = {}
    prices, ranks, total = Prices(problem, Mesh(dp=devices), 1), device_kinds(problem, devices).values(), 0.0
    for component in problem.model.components:
        cut = ((each.rule, ways) for each in component.shardings for ways in ways_of(each) if ways <= devices)
        placements = (BATCH, *(Placement("shard", rule=rule, ways=ways) for rule, ways in cut))
        phases = prices.phases(component)
        key = prices.same_work(component), phases, placements
        if key not in known:
            known[key] = min(
                placement.ways * sum(prices.local_s(component, placement, phase, rank, samples) for phase in phases) / samples
                for samples in divisors(problem.global_batch)
                for placement in placements
                for rank in ranks
            )
        total += known[key]
    return total * problem.global_batch
