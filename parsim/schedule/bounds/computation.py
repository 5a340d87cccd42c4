"""The computation of a plan in closed form: what no place on the pp axis can do faster, conversions and transfers included.

Part of the lower bound of a step: `parsim.schedule.bounds.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from parsim.graph.hops import hop_groups, hop_pairs
from parsim.graph.passes.convert import POINT_TO_POINT_HOPS, hop_collective, hop_message
from parsim.graph.plan_index import PlanIndex
from parsim.model.component import Value
from parsim.plans.pipeline import few_rounds, pipeline_actions
from parsim.plans.plan import DEFAULT_BUCKET_BYTES, Plan
from parsim.plans.redistribution import LOCAL_HOPS, ValueLayout, conversion
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.bounds.order import is_small, lags, last_block_s
from parsim.schedule.options import Prices
from parsim.work import BY_OPERATOR_PART, Phase, SendRecv, Work

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


@dataclass
class KnownBounds:
    """Of one problem: the computation of plans that differ in buckets and ZeRO stage only, and prices by mesh and samples."""

    work: dict[Plan, tuple[PlaceWork, ...]] = field(default_factory=dict)
    prices: dict[tuple[object, int], Prices] = field(default_factory=dict)
    orders: dict[Plan, float] = field(default_factory=dict)


def computation_of(problem: PlanningProblem, plan: Plan) -> tuple[PlaceWork, ...]:
    """The computation of every place of the plan.

    Args:
        problem: model, cluster and batch. plan: of this model.
    """
    known = problem.remembered(KnownBounds).work
    program = plan.without_zero()
    if program not in known:
        known[program] = _Computation(problem, problem.layout(plan)).places()
    return known[program]


def order_s(problem: PlanningProblem, plan: Plan, *, anew: bool = True) -> float:
    """The end of the last block of place 0 of a pipeline, by the order of its blocks; 0 where that is not known.

    Args:
        problem: model, cluster and batch. plan: of this model. anew: whether to work it out.
    """
    known = problem.remembered(KnownBounds).orders
    program = plan.without_zero()
    if program not in known and anew:
        known[program] = _Computation(problem, problem.layout(plan)).order_s()
    return known.get(program, 0.0)


def prices_of(problem: PlanningProblem, plan: Plan) -> Prices:
    """Prices on the plan's mesh, for its microbatch.

    Args:
        problem: model, cluster and batch. plan: of this model.
    """
    known = problem.remembered(KnownBounds).prices
    key = plan.mesh, plan.microbatch_samples
    if key not in known:
        known[key] = Prices(problem=problem, mesh=plan.mesh, samples=plan.microbatch_samples, bucket_bytes=DEFAULT_BUCKET_BYTES)
    return known[key]


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
        found = []
        for place in range(self.plan.mesh.pp):
            chunks = self.plan.place_stages(place)
            ranks = self._unlike_ranks(place)
            busiest = max(
                ((self._blocks(chunks, rank), rank) for rank in ranks), key=lambda entry: sum(map(sum, entry[0][0].values()))
            )[0]
            seconds, within = busiest
            late = [after[chunk] for chunk in chunks]
            reached = [value for value in late if value is not None]
            busy_s = self.plan.microbatches * sum(map(sum, seconds.values()))
            back_s = self.plan.microbatches * sum(backward for _, backward in seconds.values())
            back_s -= max(map(self._ahead_s, chunks))
            found.append(
                PlaceWork(
                    busy_s=busy_s,
                    done_s=max(
                        min(before[chunk] for chunk in chunks) + busy_s, min(turned[chunk] for chunk in chunks) + back_s
                    ),
                    after_s=min(reached) if len(reached) == len(late) else None,
                    remaining_s=self._remaining_s(place, seconds, within),
                )
            )
        return tuple(found)

    def _unlike_ranks(self, place: int) -> Sequence[int]:
        """One rank of each kind of device; where components are placed on single ranks, every shard of the first replica."""
        if self._placed_alone:
            return [self.layout.rank(place, 0, shard) for shard in range(self.plan.mesh.tp)]
        costs = self.problem.costs(self.plan.world_size)
        return costs.unlike_ranks(self.plan.mesh.stage_range(place))

    def _ahead_s(self, chunk: int) -> float:
        """What a backward of a stage may do before the gradient has come: the second forward of its first component, or of the
        segment that this one belongs to."""
        backwards = (name for name in reversed(self.plan.stages[chunk].components) if name in self.layout.differentiable)
        first = next(backwards, None)
        if first is None or not self.layout.recomputes(first):
            return 0.0
        again = self.layout.segment_of(first) or (first,)
        ranks = self._unlike_ranks(self.plan.stage_places[chunk])
        of = {name: (self.problem.model.component(name), self.layout.placement[name]) for name in again}
        return max(sum(self.prices.compute_on_s(*own, Phase.RECOMPUTE, rank) for own in of.values()) for rank in ranks)

    def _compute_s(self, name: str, phase: Phase, rank: int) -> float:
        component = self.problem.model.component(name)
        return self.prices.compute_on_s(component, self.layout.placement[name], phase, rank, self._part(name, phase))

    def _part(self, name: str, phase: Phase) -> str:
        return BY_OPERATOR_PART if phase is Phase.RECOMPUTE and self.layout.recomputes_by_operator(name) else ""

    def _least_s(self, name: str, phase: Phase) -> float:
        """On the fastest kind of device of its stage."""
        component, placement = self.problem.model.component(name), self.layout.placement[name]
        ranks = self._unlike_ranks(self.layout.stage_of[name])
        if self._placed_alone:
            ranks = [rank for rank in ranks if self.layout.runs_on(rank, name)]
        return min(self.prices.compute_on_s(component, placement, phase, rank, self._part(name, phase)) for rank in ranks)

    def _backward_s(self, name: str, rank: int) -> float:
        halves = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT) if self.layout.is_halved(name) else (Phase.BACKWARD,)
        return sum(self._compute_s(name, phase, rank) for phase in halves)

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
            for value in self._made_in(chunk, name) if self.converts else ():
                producer = value.producer
                assert producer is not None
                made, read = self.layout.source[value.name].value, self.layout.reads_in(name, value.name).value
                clock = max(clock, ends[producer] + self._conversion_s(value, chunk, made, read))
            clock += self._compute_s(name, Phase.FORWARD, rank)
            ends[name] = clock
        return ends

    def _made_in(self, chunk: int, name: str) -> list[Value]:
        """The inputs of a component that its own chunk makes."""
        model = self.problem.model
        values = (model.value[value] for value in dict.fromkeys(model.component(name).inputs))
        return [value for value in values if value.producer is not None and self.layout.chunk_of[value.producer] == chunk]

    def _backward_ends(self, chunk: int, names: Sequence[str], rank: int) -> tuple[dict[str, float], float]:
        clock = 0.0
        ends: dict[str, float] = {}
        for name in reversed(names):
            if name not in self.layout.differentiable:
                continue
            ready = 0.0
            for output in self.problem.model.component(name).outputs if self.converts else ():
                ready = max(ready, self._gradient_ready_s(chunk, output, ends))
            if self.layout.recomputes(name):
                clock += self._compute_s(name, Phase.RECOMPUTE, rank)
            clock = max(clock, ready) + self._backward_s(name, rank)
            ends[name] = clock
        return ends, clock

    def _gradient_ready_s(self, chunk: int, output: str, ends: Mapping[str, float]) -> float:
        """When the gradients of a value that come from this chunk have the layout in which its maker wants them."""
        value, ready = self.problem.model.value[output], 0.0
        if not value.differentiable:
            return ready
        wanted = self.layout.source[output].gradient
        for reading in self.layout.readings[output]:
            first = next((name for name in reading.components if name in self.layout.differentiable), None)
            if first is not None and self.layout.chunk_of[first] == chunk and first in ends:
                ready = max(ready, ends[first] + self._conversion_s(value, chunk, reading.ends.gradient, wanted))
        return ready

    def _conversion_s(self, value: Value, chunk: int, source: ValueLayout, target: ValueLayout) -> float:
        if source == target:
            return 0.0
        place = self.plan.stage_places[chunk]
        key = (value.bytes_per_sample, value.fixed_bytes, place, source, target)
        if key not in self._converted:
            self._converted[key] = self._hops_s(value, self.layout.rank(place, 0), source, target)
        return self._converted[key]

    @cached_property
    def _converted(self) -> dict[tuple[object, ...], float]:
        return {}

    def _hops_s(self, value: Value, base: int, source: ValueLayout, target: ValueLayout) -> float:
        total, tp = 0.0, self.plan.mesh.tp
        size_bytes = value.size_bytes(self.plan.microbatch_samples)
        for hop in conversion(source, target, tp):
            if hop.operation in LOCAL_HOPS:
                continue
            if hop.operation in POINT_TO_POINT_HOPS:
                works: list[Work] = [hop_message(hop, base + a, base + b, size_bytes, tp) for a, b in hop_pairs(hop, tp)]
            else:
                groups = [tuple(base + rank for rank in group) for group in hop_groups(hop, tp)]
                works = [hop_collective(hop, group, size_bytes, tp) for group in groups]
            total += min(self._work_s(work, base) for work in works)
        return total

    def _work_s(self, work: Work, rank: int) -> float:
        return self.problem.price([(work, rank)], self.plan.mesh)[0].median_s

    def _transfer_s(self, value: Value, home: int, stage: int, moved: ValueLayout) -> float:
        """From place to place, in the replica whose links are slowest."""
        size_bytes = round(value.size_bytes(self.plan.microbatch_samples) * moved.local_share(self.plan.mesh.tp))
        ends = self.layout.rank(home, self._replica), self.layout.rank(stage, self._replica)
        return self._work_s(SendRecv(source=ends[0], destination=ends[1], size_bytes=size_bytes), ends[0])

    @cached_property
    def _replica(self) -> int:
        """Of the first few. Any replica gives a bound, since all of them take part in every step."""

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
                for output in self.problem.model.component(name).outputs:
                    value = self.problem.model.value[output]
                    for reading in self.layout.readings[output] if value.differentiable else ():
                        first = next((each for each in reading.components if each in ends), None)
                        if first is not None:
                            ready = max(ready, ends[first] + self._going_s(value, reading.stage, reading.ends.gradient))
                if not number:
                    begins[chunk] = ready
                own = 0.0 if self._halved else self._least_s(name, Phase.BACKWARD)
                clocks[chunk] = ends[name] = ready + own
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
        found: list[float | None] = [0.0 if place == 0 else None for place in self.plan.stage_places]
        if self.plan.mesh.pp == 1 or self._placed_alone:
            return found
        if self._halved:
            return found  # the last task of a place may be the half that nobody waits for
        rest: dict[str, float] = {}
        for chunk, stage in enumerate(self.plan.stages):
            names = [name for name in stage.components if name in self.layout.differentiable]
            total = 0.0
            for name in names:
                total += self._least_s(name, Phase.BACKWARD)
                rest[name] = total
            if names and (going := self._returning_s(chunk, names[0], rest, found)) is not None:
                found[chunk] = max(going, found[chunk] or 0.0)
        return found

    def _returning_s(self, chunk: int, first: str, rest: Mapping[str, float], found: Sequence[float | None]) -> float | None:
        """From the backward of a stage's first component by way of its inputs to place 0, the longest way."""
        model, longest = self.problem.model, None
        for input_name in model.component(first).inputs:
            value = model.value[input_name]
            if value.producer is None or not value.differentiable or value.producer not in rest:
                continue
            home = self.layout.chunk_of[value.producer]
            onwards = found[home]
            mine = next(entry for entry in self.layout.readings[input_name] if first in entry.components)
            leading = next((name for name in mine.components if name in self.layout.differentiable), None)
            if home == chunk or onwards is None or leading != first:
                continue
            places = self.plan.stage_places[chunk], self.plan.stage_places[home]
            moving = 0.0 if places[0] == places[1] else self._transfer_s(value, *places, mine.ends.gradient)
            longest = max(longest or 0.0, moving + rest[value.producer] + onwards)
        return longest

    def order_s(self) -> float:
        """As `parsim.schedule.bounds.order` bounds it."""
        if self.plan.mesh.pp == 1 or self._placed_alone or self._halved or not is_small(self.plan):
            return 0.0
        stages = [stage.components for stage in self.plan.stages]
        turned = [[name for name in reversed(names) if name in self.layout.differentiable] for names in stages]
        forward_s, made = self._least_ends(stages, self._forward_ends)
        backward_s, made_back = self._least_ends(stages, lambda *block: self._backward_ends(*block)[0])
        ahead = lags(stages, made, self._inputs_from_others)
        back = lags(turned, made_back, self._gradients_from_others)
        early_s = [self._ahead_s(chunk) for chunk in range(len(stages))]
        return last_block_s(self.plan, forward_s, backward_s, ahead, back, early_s)

    def _least_ends(
        self, stages: Sequence[Sequence[str]], ends_of: Callable[[int, Sequence[str], int], Mapping[str, float]]
    ) -> tuple[list[float], dict[str, float]]:
        """Per stage the seconds of its block; by component its end after the block begins, on the fastest rank."""
        seconds, ends = [], dict[str, float]()
        for chunk, names in enumerate(stages):
            found = [ends_of(chunk, names, rank) for rank in self._unlike_ranks(self.plan.stage_places[chunk])]
            ends |= {name: min(each[name] for each in found) for name in found[0]}
            seconds.append(min(max(each.values(), default=0.0) for each in found))
        return seconds, ends

    def _inputs_from_others(self, name: str) -> list[tuple[int, str, float]]:
        """What a component reads from other stages of the plan: the stage, the maker, the seconds on the way."""
        values = [self.problem.model.value[value] for value in dict.fromkeys(self.problem.model.component(name).inputs)]
        chunk_of = self.layout.chunk_of
        return [
            (chunk_of[value.producer], value.producer, self._coming_s(value, name))
            for value in values
            if value.producer is not None and chunk_of[value.producer] != chunk_of[name]
        ]

    def _gradients_from_others(self, name: str) -> list[tuple[int, str, float]]:
        """The same for its backward: the last of each stage to add to the gradients of what it makes."""
        found = []
        for output in self.problem.model.component(name).outputs:
            value = self.problem.model.value[output]
            for reading in self.layout.readings[output] if value.differentiable else ():
                last = next((each for each in reading.components if each in self.layout.differentiable), None)
                if last is not None and self.layout.chunk_of[last] != self.layout.chunk_of[name]:
                    going = self._going_s(value, reading.stage, reading.ends.gradient)
                    found.append((self.layout.chunk_of[last], last, going))
        return found

    def _remaining_s(
        self, place: int, seconds: Mapping[int, tuple[float, float]], within: Mapping[str, float]
    ) -> dict[str, float]:
        """By component, what the place computes after its last backward."""
        plan = self.plan
        later = 0.0
        behind: dict[int, float] = {}
        count = few_rounds(plan.pipeline_order, plan.mesh.pp, plan.microbatches)
        actions = pipeline_actions(plan.pipeline_order, place, plan.mesh.pp, count, plan.chunks)
        for action in reversed(actions):
            forward, backward = seconds[action.stage]
            if action.phase is not Phase.FORWARD:
                behind.setdefault(action.stage, later)
                if len(behind) == len(seconds):
                    break
            later += forward if action.phase is Phase.FORWARD else backward
        return {name: behind[self.layout.chunk_of[name]] + own for name, own in within.items()}
