"""When each value, message and bucket lies on a rank of a plan: one truth, which prediction, search and executor read.

A rank runs the actions of its pipeline order one after another, and in each action the components of a stage. A `Lifetime` says
during which of them something is there. Its clock is the coarsest one that tells it apart:

    step        parameters, gradients and optimizer state, or this rank's parts of them under ZeRO: always there
    actions     per microbatch and chunk what is kept for its backward, and the batch until it is read (`held_moments`);
                messages from and to other stages (`message_groups`)
    uses        the computations of some actions: buckets that are whole for a while under ZeRO 2 and 3, in windows
                (`parsim.program.passes.unsharded`)
    components  within one action: values that wait for a reader, and gradients that wait for their maker (`RankValues`)

What a component keeps for its backward (`KeptActivations`) begins with its forward and ends with its backward. What it makes
and frees while it runs was counted when the Model was traced.

    prediction  `parsim.predict.memory` adds up bytes over lifetimes, and takes the fullest moment
    search      asks the prediction, of few actions and of one component of each kind
    executor    makes and gives up room for buckets and messages by `bucket_rooms` and `message_rooms`, between computations.
                So the memory of a rank does not depend on how fast its communication is

Leaves out: conversions of earlier values while a later component computes; values that share one storage (each counts by itself
where a recomputed component reads it); temporary copies of the communication library.

Rejected: gradients given up when their reduce_scatter has ended. The peak was lower by a bucket where the communication was
faster than the next backward, and a run could not rely on that. Rejected too: a receive posted as soon as the one before has
ended. Where a stage fell behind, the messages of all microbatches piled up there: 24% more than predicted in one run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from parsim.model.component import ALONE, Component, Value, narrow, share_of
from parsim.model.formats import component_in, value_in
from parsim.model.model import Model
from parsim.plans.layouts import LOCAL_HOPS, PIECES, POINT_TO_POINT_HOPS, Hop, ValueLayout, conversion, hop_pairs
from parsim.plans.pipeline import (
    MOST_CHECKED,
    PIPELINE_ORDERS,
    Action,
    few_rounds,
    in_few_rounds,
    pipeline_actions,
    rank_of_stage,
    stages_by_rank,
)
from parsim.program.buckets import Bucket, by_family
from parsim.program.passes.unsharded import Use, gradient_windows, parameter_windows, uses_of
from parsim.program.placed import PlanIndex, Reading
from parsim.program.taskgraph import COMPUTE, RankTasks, Task
from parsim.records import once
from parsim.work import ClipGradients, Compute, OptimizerStep, Phase, SendRecv

T = TypeVar("T")


class Lifetime(NamedTuple):
    """Bytes of something on one rank while numbers `born` to `freed` of a clock run, both included; never if freed < born."""

    value: Any
    born: int
    freed: int
    size_bytes: float = 1.0


def alive_bytes(lifetimes: Iterable[Lifetime], count: int) -> list[float]:
    """Bytes that are alive while each of the numbers below `count` runs: a prefix sum of births and deaths."""
    changes = [0.0] * (count + 1)
    for _, born, freed, size_bytes in lifetimes:
        if born <= freed:
            changes[born] += size_bytes
            changes[freed + 1] -= size_bytes
    return list(accumulate(changes[:count]))


# --- values in a layout -----------------------------------------------------------------------------------------------

VIEWS = ("split_batch", "keep")
"""Hops whose result lies in the storage of what they start from."""


def local_bytes(layout: PlanIndex, value: Value, how: ValueLayout) -> float:
    """Bytes of one microbatch of a value on a rank that holds any of it in a layout."""
    return value.bytes_per_sample * layout.microbatch_samples * layout.local_share(how) + value.fixed_bytes


def is_view(hop: Hop, shard: int) -> bool:
    """Whether what a tp rank has after the hop lies in what it had before. That holds for pieces of the batch, and for the
    whole of which a rank has sent pieces or copies to the others."""
    return hop.operation in VIEWS or (hop.operation in ("scatter", "broadcast") and shard == hop.source.rank)


def storage_of(hops: Sequence[Hop], made: ValueLayout, shard: int) -> ValueLayout:
    """The layout whose memory the result of the hops lies in on a tp rank, where they start from layout `made`."""
    return next((hop.target for hop in reversed(hops) if not is_view(hop, shard)), made)


# --- what is kept for a backward --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """The changes of memory by the second forward of a recomputed component, bytes of one microbatch.

    saved_bytes: saved for the backward. released_bytes: of its inputs, released at that moment. first_bytes, fullest_bytes:
    where only some operators run again, the fullest moment of the first forward, and that of the second beyond all that is
    kept.
    """

    saved_bytes: int
    released_bytes: int = 0
    first_bytes: int = 0
    fullest_bytes: int | None = None


def fullest_bytes(peaks: Iterable[tuple[int, int]], samples: int) -> int:
    """The largest of some peaks, each (bytes per sample, fixed bytes); 0 without any."""
    return max((rate * samples + fixed for rate, fixed in peaks), default=0)


@dataclass(frozen=True)
class KeptActivations:
    """The activations that ranks keep for the backward under a plan; precision and recomputation change them.

    A recomputed component keeps its inputs as it reads them, and copies of its buffers. Its saved activations live only from
    its second forward to the end of its backward. So its inputs have one keeper more, and its saved values one fewer. By
    operator it keeps outputs of operators besides, and of its inputs and outputs those that `Selective.values` names.
    """

    layout: PlanIndex
    precision: str
    value_kinds: dict[Hashable, int] = field(default_factory=dict, compare=False)
    """Numbers of kinds of values and components, as they are met."""
    counted: dict[Hashable, Any] = field(default_factory=dict, compare=False)
    """What `RankValues` has counted of each kind of values and components."""
    _components: dict[str, Component] = field(default_factory=dict, compare=False)

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """All values, with the components that keep them under this plan."""
        if not self._recomputes:
            return self._before
        return {value.name: self._value(value) for value in self._before.values()}

    @cached_property
    def _before(self) -> Mapping[str, Value]:
        """All values, with the components that would keep them if nothing were recomputed."""
        return {value.name: value_in(value, self.precision) for value in self.layout.model.values}

    @cached_property
    def _recomputes(self) -> bool:
        return bool(self.layout.plan.recomputed or self.layout.plan.recomputed_by_operator)

    def _value(self, value: Value) -> Value:
        layout, name = self.layout, value.name
        readers = {
            reader
            for reader in layout.consumers[name]
            if self._keeps_again(name, reader) and not layout.is_remade(name, reader)
        }
        maker = value.producer
        if maker is not None and layout.recomputes_by_operator(maker) and self._keeps_again(name, maker):
            readers.add(maker)
        savers = value.savers or ()
        if not readers and not any(layout.recomputes(saver) for saver in savers):
            return value
        keepers = readers | {saver for saver in savers if not layout.recomputes(saver)}
        return replace(value, savers=tuple(sorted(keepers, key=layout.model.component_index.__getitem__)), saved=bool(keepers))

    def _keeps_again(self, value: str, name: str) -> bool:
        """Whether a recomputed component keeps an input, or by operator also an output."""
        if not self.layout.recomputes_by_operator(name):
            return self.layout.recomputes(name)
        selective = self.layout.model.component(name).selective
        assert selective is not None
        return value in selective.values

    def component(self, name: str) -> Component:
        """The part of the component on a rank that runs it, with its saved activations under this plan."""
        if name not in self._components:
            self._components[name] = self._component(name)
        return self._components[name]

    def _component(self, name: str) -> Component:
        component, layout = self._alone(name), self.layout
        if not self._recomputes:
            return component
        rate, fixed = component.saved_activation_bytes, component.saved_fixed_bytes
        if layout.recomputes(name):
            rate, fixed = 0, component.buffer_bytes
        if layout.recomputes_by_operator(name) and component.selective is not None:
            rate, fixed = component.selective.kept[0], component.selective.kept[1] + component.buffer_bytes
        for value in self._values_at(name):
            before, now = (_counts(name, values[value]) for values in (self._before, self.values))
            counted = now - (before and not layout.recomputes(name))
            value_rate, value_fixed = self._size_at(name, value)
            rate, fixed = rate + counted * value_rate, fixed + counted * value_fixed
            elsewhere = before and not now and not layout.is_remade(value, name)
            if elsewhere and value in component.inputs and self.values[value].savers:  # kept for an earlier component too
                peaks = tuple((peak + value_rate, rest + value_fixed) for peak, rest in component.backward_peaks)
                component = replace(component, backward_peaks=peaks)
        return replace(component, saved_activation_bytes=max(0, rate), saved_fixed_bytes=max(0, fixed))

    def saved_bytes(self, name: str) -> int:
        """What a component is counted to save of one microbatch."""
        component = self.component(name)
        return component.saved_activation_bytes * self.layout.local_samples(name) + component.saved_fixed_bytes

    def counted_values(self, name: str) -> list[tuple[str, int]]:
        """The values among what a component saves, and their bytes of one microbatch as it has them."""
        counted = [value for value in self._values_at(name) if _counts(name, self.values[value])]
        samples, sizes = self.layout.local_samples(name), [self._size_at(name, value) for value in counted]
        return [(value, rate * samples + fixed) for value, (rate, fixed) in zip(counted, sizes, strict=True)]

    def again(self, name: str) -> Again:
        """The changes of memory by the second forward of a recomputed component. An input that its backward does not need is
        let go before that, if nobody else keeps it. Of a segment, what earlier components have saved again is there too."""
        segment = self.layout.segment_of(name)
        if not segment:
            return self._again(name)
        parts = [self._again(member) for member in segment[: segment.index(name) + 1]]
        return Again(saved_bytes=sum(part.saved_bytes for part in parts), released_bytes=parts[-1].released_bytes)

    def _again(self, name: str) -> Again:
        """The changes by this component alone. By operator the counted bytes contain all but the inputs that are released."""
        component, samples = self._alone(name), self.layout.local_samples(name)
        selective = component.selective if self.layout.recomputes_by_operator(name) else None
        saved, released = component.saved_activation_bytes * samples + component.saved_fixed_bytes, 0
        for value in dict.fromkeys(component.inputs) if selective is None else selective.values:
            rate, fixed = self._size_at(name, value)
            before, now = self._before[value], self.values[value]
            if selective is None and self.layout.is_remade(value, name):
                continue
            if _counts(name, before):
                saved -= rate * samples + fixed
            if name not in (before.savers or ()) and _counts(name, now) and now.producer not in (None, name):
                released += rate * samples + fixed
        if selective is None:
            return Again(saved_bytes=max(0, saved), released_bytes=released)
        return Again(
            saved_bytes=selective.again[0] * samples + selective.again[1],
            released_bytes=released,
            first_bytes=fullest_bytes(selective.first_peaks, samples),
            fullest_bytes=fullest_bytes(selective.second_peaks, samples),
        )

    def _alone(self, name: str) -> Component:
        placement, samples = self.layout.placement[name], self.layout.local_samples(name)
        return component_alone(self.layout.model, name, self.precision, placement.rule, placement.ways, samples)

    def _values_at(self, name: str) -> tuple[str, ...]:
        component = self.layout.model.component(name)
        return tuple(dict.fromkeys((*component.inputs, *component.outputs)))

    def _size_at(self, name: str, value_name: str) -> tuple[int, int]:
        """Bytes per sample that the component sees, and fixed, of a value as it reads or makes it."""
        value, layout = self._before[value_name], self.layout
        made = layout.model.value[value_name].producer == name
        ends = layout.source[value_name] if made else layout.reads_in(name, value_name)
        share = share_of(ends.value.size, ends.value.ways) if ends.value.form == "shard" else ALONE
        rate = value.bytes_per_sample
        if value.producer is not None and layout.stage_of[value.producer] == layout.stage_of[name]:
            hops = conversion(layout.source[value_name].value, ends.value, layout.plan.mesh.tp)
            if made or all(hop.operation in VIEWS for hop in hops):  # else a copy, which has no larger storage
                rate = value.storage_bytes_per_sample or rate
        return share.of(rate), value.fixed_bytes

    # --- values and components that are alike ---------------------------------------------------------------------

    @cached_property
    def kinds(self) -> Mapping[str, int]:
        """By component a number, equal for those of one kind whose values are as large: they do the same work, placed alike,
        beside neighbours that do (`parsim.program.placed`). Empty where components are placed on single tp ranks."""
        if not self.layout.shards_alike:
            return {}
        sizes: dict[Hashable, int] = {}
        size = {
            name: sizes.setdefault((value.bytes_per_sample, value.fixed_bytes, value.differentiable, value.saved), len(sizes))
            for name, value in self.values.items()
        }
        kinds: dict[Hashable, int] = {}
        numbers = {}
        for component, kind in zip(self.layout.model.components, self.layout.kinds.of, strict=True):
            views = tuple(
                [(component.inputs.index(part), component.outputs.index(of)) for part, of in component.gradient_views]
            )
            key = kind, tuple([size[value] for value in (*component.inputs, *component.outputs)]), views
            numbers[component.name] = kinds.setdefault(key, len(kinds))
        return numbers

    def memory_kind(self, name: str) -> int | None:
        """Equal for components of one kind that hold as much, and as much again where they run again; None: unlike others."""
        if not self.kinds:
            return None
        changed: Hashable = None
        if self._recomputes:
            component, again = self.component(name), self.again(name) if self.layout.recomputes(name) else None
            changed = component.saved_activation_bytes, component.saved_fixed_bytes, component.backward_peaks, again
        key = "component", self.kinds[name], held_alike(self.layout.model, self._alone(name)), changed
        return self.value_kinds.setdefault(key, len(self.value_kinds))


@once
def component_alone(model: Model, name: str, precision: str, rule: str, ways: int, samples: int) -> Component:
    """What a rank has of a component that computes so many samples of it, or a shard of it."""
    return narrow(component_in(model.component(name), precision), rule, ways).at_samples(samples)


@once
def held_alike(model: Model, component: Component) -> int:
    """A number, equal for what `component_alone` gives where it holds as much at every moment."""
    peaks = component.forward_peaks, component.backward_peaks, component.split_backward
    sizes = component.saved_activation_bytes, component.saved_fixed_bytes, component.cast_bytes, component.buffer_bytes
    numbers = model.answers("held alike")
    return cast(int, numbers.setdefault((peaks, sizes), len(numbers)))


def _counts(name: str, value: Value) -> bool:
    """Whether the value is among what this component saves: it is the first that keeps it."""
    return (value.savers or ())[:1] == (name,)


# --- values, gradients and messages of a rank, by component -----------------------------------------------------------


class GradientSizes(NamedTuple):
    """Bytes of one microbatch at a component: gradients of its outputs as it wants them, and at most while they are converted
    to that; and those of its inputs, as it makes them."""

    wanted: float
    converted: float
    handed: float


class RankValues:
    """What lies on one rank between its components, in every layout in which it lies there: bytes of one microbatch.

    What is counted of a value or a component holds for others of its kind. A value waits as long after its maker as that of
    another component of this kind, if as much is kept of it as far away. That holds where its maker, its readers and those that
    keep it are of one chunk: what comes before and after does not matter then.

    names: the rank's components in execution order. place: their numbers, the clock of lifetimes.
    """

    def __init__(self, kept: KeptActivations, rank: int) -> None:
        self.kept, self.layout, self.values, self.rank = kept, kept.layout, kept.values, rank
        plan = kept.layout.plan
        self.stage, self.shard, self.tp = plan.stage_of_rank(rank), plan.shard_of_rank(rank), plan.mesh.tp
        self.names = self.layout.rank_components(rank)
        self.place = {name: number for number, name in enumerate(self.names)}
        self._numbers = [self.layout.model.component_index[name] for name in self.names]  # ascending
        self._kind_of: dict[str, int | None] = {}

    @cached_property
    def batch_layout(self) -> ValueLayout:
        return ValueLayout("full", self.layout.batch_ways(self.rank))

    def _bytes_here(self, value: Value, how: ValueLayout) -> float:
        """0 where the rank holds nothing in that layout."""
        return 0.0 if how.form == "placed" and how.rank != self.shard else local_bytes(self.layout, value, how)

    @cached_property
    def _values_here(self) -> list[Value]:
        here = map(self.layout.model.component, self.names)
        return [self.values[name] for name in dict.fromkeys(n for part in here for n in (*part.inputs, *part.outputs))]

    # --- values that wait for readers -----------------------------------------------------------------------------

    def waiting_values(self) -> list[Lifetime]:
        """Values while the rank runs forward, before a component there keeps them.

        Every layout of a value is a storage of its own, from when the value is made to the last component that reads it there,
        or to the first that keeps it. A piece of a dim is cut when it is read, so until then all that it is cut from waits.
        Leaves out values of which the Model does not say who keeps them.
        """
        lifetimes = []
        for value in self._values_here:
            if value.savers is None:
                continue
            if value.producer is None:
                last = max(self.place[name] for name in self.layout.consumers[value.name] if name in self.place)
                freed = next((self.place[saver] for saver in value.savers if saver in self.place), last)
                lifetimes.append(Lifetime(value.name, 0, freed, self._bytes_here(value, self.batch_layout)))
            else:
                begins = self._up_to(value.producer)
                lifetimes += self._shifted("values", value, partial(self._lifetimes_of, value, begins))
        return lifetimes

    def _lifetimes_of(self, value: Value, begins: int) -> list[Lifetime]:
        """`begins`: components of the rank up to the maker of the value."""
        assert value.producer is not None
        assert value.savers is not None
        place, shard = self.place, self.shard
        made, here = self.layout.source[value.name].value, value.producer in place
        if not here and self.layout.stage_of_value[value.name] == self.stage:
            # who only receives makes room as soon as its communication before has ended, long before the other one sends
            begins = min(begins, max(self._communicated_before(value, gradient=False), default=0))
        last: dict[ValueLayout, int] = {}
        kept: dict[ValueLayout, int] = {}
        # its maker keeps it as it was made; and so does who reads another value in the same storage, maybe before this one
        beside = [place[name] for name in value.savers if name in place and name not in self.layout.consumers[value.name]]
        if beside:
            readings = self.layout.readings[value.name]
            there = [reading.ends.value for reading in readings if any(name in place for name in reading.components)]
            kept = dict.fromkeys([made] if here else there, min(beside))
        cut: list[Lifetime] = []
        for reading in self.layout.readings[value.name]:
            for name in reading.components:
                if name not in place:
                    continue
                hops = conversion(made, reading.ends.value, self.tp) if here else ()
                storage = storage_of(hops, made, shard) if here else reading.ends.value
                sent = hops
                while sent and sent[-1].operation in LOCAL_HOPS:
                    sent = sent[:-1]
                source = storage_of(sent, made, shard) if here else storage
                if source != storage and not is_view(hops[-1], shard):
                    last[source] = max(last.get(source, 0), place[name] - 1)
                    cut.append(Lifetime(value.name, place[name], place[name], self._bytes_here(value, storage)))
                elif name in value.savers:
                    kept[storage] = min(kept.get(storage, place[name]), place[name])
                else:
                    last[storage] = max(last.get(storage, 0), place[name])
        ends = {storage: kept.get(storage, last.get(storage, -1)) for storage in dict.fromkeys((*last, *kept))}
        waits = [Lifetime(value.name, begins, end, self._bytes_here(value, storage)) for storage, end in ends.items()]
        return [wait for wait in (*waits, *cut) if wait.born <= wait.freed and wait.size_bytes]

    def _up_to(self, component: str) -> int:
        """How many components of the rank run up to this one, itself included."""
        return bisect_right(self._numbers, self.layout.model.component_index[component])

    def _communicated_before(self, value: Value, *, gradient: bool) -> list[int]:
        """For each value that the rank communicates on the tp axis before this one (before its gradient: each gradient of later
        values): how many components of the rank run up to its maker."""
        order, model = self.layout.model.component_index, self.layout.model
        assert value.producer is not None
        before = []
        for other in map(model.value.__getitem__, self.layout.values_at[self.stage]):
            if other.producer is not None and (other.differentiable or not gradient):
                earlier, later = (value, other) if gradient else (other, value)
                assert earlier.producer is not None
                assert later.producer is not None
                is_before = order[earlier.producer] < order[later.producer]
                if is_before and self._communicates(other.name, gradient=gradient):
                    before.append(self._up_to(other.producer))
        return before

    def _communicates(self, value: str, *, gradient: bool) -> bool:
        """Whether the rank takes part in converting a value of its stage, or its gradient, on the tp axis."""
        if self.layout.stage_of_value[value] != self.stage:
            return False
        source = self.layout.source[value]
        for reading in self.layout.readings[value]:
            ends = (reading.ends.gradient, source.gradient) if gradient else (source.value, reading.ends.value)
            for hop in conversion(*ends, self.tp):
                if hop.operation in POINT_TO_POINT_HOPS:
                    if any(self.shard in pair for pair in hop_pairs(hop, self.tp)):
                        return True
                elif hop.operation not in LOCAL_HOPS:
                    return True
        return False

    # --- gradients that wait for makers ---------------------------------------------------------------------------

    def waiting_gradients(self) -> list[Lifetime]:
        """Gradients while other components than their reader and their maker run backward: the clock runs backward, from the
        last reader to the maker, so `born` is the lower number.

        One that is a part of a larger gradient keeps all of that, until another reader adds to it. Left out is what another
        stage sends for the half for weights alone: its message is counted until then (`StageLink.late`).
        """
        lifetimes = []
        for value in self._values_here:
            if value.differentiable and value.producer is not None:
                lifetimes += self._shifted("gradients", value, partial(self._gradient_lifetimes_of, value))
        return lifetimes

    def _gradient_lifetimes_of(self, value: Value) -> list[Lifetime]:
        assert value.producer is not None
        layout, place, order = self.layout, self.place, self.layout.model.component_index
        home = layout.stage_of_value[value.name]
        late = PIPELINE_ORDERS[layout.plan.pipeline_order].halves and not layout.wants_input_gradient(value.producer)
        first_reader = min((place[name] for name in layout.consumers[value.name] if name in place), default=0)
        ends = place.get(value.producer, first_reader) + 1
        lifetimes: list[Lifetime] = []
        for reading in layout.readings[value.name]:
            readers = [name for name in reading.components if name in layout.differentiable]
            local = sorted(place[name] for name in readers if name in place)
            if not readers or not (local or value.producer in place):
                continue
            if late and not local and reading.stage != home:
                continue
            begins = local[-1] if local else bisect_left(self._numbers, min(map(order.__getitem__, readers)))
            if not local and reading.stage == home:
                before = self._communicated_before(value, gradient=True)
                begins = max(begins, min(before, default=len(self.names)))
            storage = reading.ends.gradient  # what sends nothing is made when it is read
            for hop in conversion(storage, layout.source[value.name].gradient, self.tp):
                storage = storage if hop.operation in LOCAL_HOPS else hop.target
            size, larger = local_bytes(layout, value, storage), 0.0
            if local and not layout.is_halved(self.names[local[-1]]):  # else what waits between the halves keeps it
                views = layout.model.component(self.names[local[-1]]).gradient_views
                output = dict(views).get(value.name)
                if output is not None:
                    larger = local_bytes(layout, self.values[output], layout.source[output].gradient)
            again = local[-2] if len(local) > 1 else ends
            stays = reading.stage == home and reading.ends.gradient == layout.source[value.name].gradient
            if larger > size and (stays or len(local) > 1):  # what is sent is copied, and what is converted made anew
                lifetimes.append(Lifetime(value.name, max(again, ends), begins - 1, larger))
                begins = max(again, ends)
            lifetimes.append(Lifetime(value.name, ends, begins - 1, size))
        return lifetimes

    def gradients_of(self, name: str) -> GradientSizes:
        if not self.kept.kinds:
            return self._gradients_of(name)
        return self.once(("gradients of", self.kept.kinds[name]), partial(self._gradients_of, name))

    def _gradients_of(self, name: str) -> GradientSizes:
        layout, component = self.layout, self.layout.model.component(name)
        wanted = converted = handed = 0.0
        for output in component.outputs:
            value, how = self.values[output], layout.source[output].gradient
            if value.differentiable:
                steps = [
                    self._step_bytes(value, hop)
                    for reading in layout.readings[output]
                    for hop in conversion(reading.ends.gradient, how, self.tp)
                ]
                wanted += local_bytes(layout, value, how)
                converted += max(local_bytes(layout, value, how), *steps, 0.0)
        for value in map(self.values.__getitem__, dict.fromkeys(component.inputs)):
            if value.differentiable and value.producer is not None:
                handed += local_bytes(layout, value, layout.reads_in(name, value.name).gradient)
        return GradientSizes(wanted, max(wanted, converted), handed)

    def _step_bytes(self, value: Value, hop: Hop) -> float:
        """What the rank holds of a value at the fullest moment of a hop. Who gathers has the pieces of all before it joins
        them."""
        before, after = self._bytes_here(value, hop.source), self._bytes_here(value, hop.target)
        if is_view(hop, self.shard):
            return max(before, after)
        return 2 * after if hop.operation == "gather" and after else before + after

    def converted_for_others(self, waiting: Sequence[float]) -> dict[str, float]:
        """Bytes of gradients that the rank helps to convert for a maker on another tp rank, and of what waits beside them
        (`waiting`, by component): right before the backward of the component which runs next."""
        layout, most = self.layout, dict[str, float]()
        if layout.shards_alike:  # every maker is on the rank too, or on another stage
            return most
        for number, name in enumerate(self.names):
            for value in map(self.values.__getitem__, dict.fromkeys(layout.model.component(name).inputs)):
                elsewhere = value.producer is not None and value.producer not in self.place
                here = layout.stage_of_value[value.name] == self.stage
                if value.differentiable and elsewhere and here and name in layout.differentiable:
                    ends = layout.reads_in(name, value.name).gradient, layout.source[value.name].gradient
                    size = max((self._step_bytes(value, hop) for hop in conversion(*ends, self.tp)), default=0.0)
                    beside = self.names[max(0, number - 1)]
                    most[beside] = max(most.get(beside, 0.0), size + waiting[number])
        return most

    # --- values that are kept beside the saved activations, and the batch -----------------------------------------

    def held_bytes(self) -> dict[str, float]:
        """Copies of values that are kept for a backward and that no saved activation stands for, by the component with which
        such a copy begins. The copy of the first component that saves a value is among its saved activations."""
        held: dict[str, float] = {}
        for value in map(self.values.__getitem__, self.layout.values_at[self.stage]):
            if value.producer is None:
                continue
            kind = self._kind(value)
            size = self._copies(value) if kind is None else self.once(("held", kind), partial(self._copies, value))
            if size:
                savers = [name for name in value.savers or () if name in self.place]
                if len(savers) > 1 and savers[:1] == list(value.savers or ())[:1]:
                    keeper = savers[1]  # the first one's copy is among its saved activations
                else:
                    users = (*savers, value.producer, *self.layout.consumers[value.name])
                    keeper = next(name for name in users if name in self.place)
                held[keeper] = held.get(keeper, 0.0) + size
        return held

    def _copies(self, value: Value) -> float:
        if value.savers is None:
            return self._copies_at_most(value)
        assert value.producer is not None
        made = self.layout.source[value.name].value
        layouts = {name: reading.ends.value for reading in self.layout.readings[value.name] for name in reading.components}
        layouts[value.producer] = made
        keepers = [name for name in value.savers if name in self.place]
        kept: dict[ValueLayout, float] = {}
        for name in keepers:
            storage = layouts.get(name, made)  # one that does not read it keeps another value in the same storage
            if value.producer in self.place:
                storage = storage_of(conversion(made, storage, self.tp), made, self.shard)
            kept[storage] = local_bytes(self.layout, value, storage)
        is_counted = keepers and keepers[0] == value.savers[0]
        return sum(kept.values()) - (local_bytes(self.layout, value, layouts.get(keepers[0], made)) if is_counted else 0.0)

    def _copies_at_most(self, value: Value) -> float:
        """Where the Model does not say who keeps the value: as if every reader did."""
        assert value.producer is not None
        readings = self.layout.readings[value.name]
        here = (reading for reading in readings if any(name in self.place for name in reading.components))
        read = list(dict.fromkeys(reading.ends.value for reading in here))
        if value.producer not in self.place:
            return sum(local_bytes(self.layout, value, how) for how in read)
        made = self.layout.source[value.name].value
        elsewhere = all(reading.stage != self.stage for reading in readings)
        total = 0.0 if value.saved and not elsewhere else local_bytes(self.layout, value, made)
        if made.form == "partial":  # no operator that keeps its output can make summands
            total, read = 0.0, read[1:] if value.saved else read
        for how in read:
            storage = storage_of(conversion(made, how, self.tp), made, self.shard)
            total += local_bytes(self.layout, value, storage)
            if storage == made:
                total -= local_bytes(self.layout, value, how)
        return total

    def loaded_bytes(self) -> dict[str, tuple[float, float]]:
        """The batch as loaded, by the first component here that reads a value of it; and that part of it which is counted among
        the saved activations while the microbatch is in flight, or let go once it is read."""
        loaded_of: dict[str, tuple[float, float]] = {}
        for name, layouts in self.layout.batch_layouts(self.rank).items():
            value = self.values[name]
            loaded, saved = local_bytes(self.layout, value, self.batch_layout), 0.0
            counted = value.saved if value.savers is None else any(first in self.place for first in value.savers[:1])
            if value.savers == ():
                saved = loaded
            elif counted and all(how.form != "shard" for how in layouts):  # pieces of a dim are copies
                saved = min(local_bytes(self.layout, value, how) for how in layouts)
            reader = next(user for user in self.layout.consumers[name] if user in self.place)
            before = loaded_of.get(reader, (0.0, 0.0))
            loaded_of[reader] = before[0] + loaded, before[1] + saved
        return loaded_of

    # --- messages -------------------------------------------------------------------------------------------------

    @cached_property
    def _messages(self) -> list[Message]:
        return list(messages(self.layout, self.layout.values_at[self.stage], self.shard))

    def message_bytes(self) -> dict[StageLink, float]:
        """Bytes of one microbatch on every link that begins or ends on the rank. A value that is sent as it is kept for a
        backward here takes no memory of its own."""
        places, sizes = self.layout.plan.stage_places, dict[StageLink, float]()
        for message in self._messages:
            if self.stage in (places[message.link.source], places[message.link.target]):
                sizes[message.link] = sizes.get(message.link, 0.0) + self._message_bytes(message)
        return sizes

    def _message_bytes(self, message: Message) -> float:
        link, name, reading = message
        value, how = self.values[name], reading.ends.value
        if link.source > link.target:
            return local_bytes(self.layout, value, reading.ends.gradient)
        if self.layout.plan.stage_places[link.source] == self.stage:
            is_kept = value.savers is None or any(saver in self.place for saver in value.savers)
            hops = conversion(self.layout.source[name].value, how, self.tp)
            if is_kept and all(hop.operation in VIEWS for hop in hops):  # it lies here as it is sent until its backward
                return 0.0
        return local_bytes(self.layout, value, how)

    def made_before(self) -> dict[str, tuple[float, float]]:
        """By component the bytes that its action has made for other stages before it, in a forward and in a backward. What a
        component here still reads is left out: it waits for that one."""
        layout, place = self.layout, self.place
        forward, backward = dict.fromkeys(self.names, 0.0), dict.fromkeys(self.names, 0.0)
        for message in self._messages:
            source = message.link.source
            if layout.plan.stage_places[source] != self.stage:
                continue
            if source < message.link.target:
                users = (layout.model.value[message.value].producer, *layout.consumers[message.value])
                last = max((place[name] for name in users if name in place), default=len(self.names))
                later, made = self.names[last + 1 :], forward
            else:
                first = min((place[name] for name in message.reading.components if name in place), default=0)
                later, made = self.names[:first], backward
            size = self._message_bytes(message)
            for name in later:
                if layout.chunk_of[name] == source:
                    made[name] += size
        return {name: (forward[name], backward[name]) for name in self.names}

    def between_chunks(self) -> dict[StageLink, float]:
        """Bytes of one microbatch that one chunk of the rank makes and another one there reads, by link, ascending. Values wait
        until a component keeps them, or for their last reader; a gradient from the first backward that adds to it."""
        layout, chunk_of, sizes = self.layout, self.layout.chunk_of, dict[StageLink, float]()
        if layout.plan.chunks == 1:
            return sizes
        for maker_name in self.names:
            for name in layout.model.component(maker_name).outputs:
                value, source, maker = self.values[name], layout.source[name], chunk_of[maker_name]
                readers = {reader: chunk_of[reader] for reader in layout.consumers[name] if layout.runs_on(self.rank, reader)}
                later = [chunk for chunk in readers.values() if chunk != maker]
                savers = [chunk_of[saver] for saver in value.savers or () if layout.runs_on(self.rank, saver)]
                back = [chunk for reader, chunk in readers.items() if chunk != maker and reader in layout.differentiable]
                links = []
                if later and value.savers is not None and maker not in savers:
                    links.append((StageLink(maker, min(savers, default=max(later))), source.value))
                if back and value.differentiable:
                    links.append((StageLink(max(back), maker), source.gradient))
                for link, how in links:
                    sizes[link] = sizes.get(link, 0.0) + self._bytes_here(value, how)
        return dict(sorted(sizes.items()))

    # --- counted once for all that are alike ----------------------------------------------------------------------

    def _shifted(self, what: str, value: Value, count: Callable[[], list[Lifetime]]) -> list[Lifetime]:
        """Lifetimes of a value: counted, or those of its like beside other components."""
        kind = self._kind(value)
        if kind is None or value.producer is None:
            return count()
        begin = self.place[value.producer]
        first, lifetimes = self.once((what, kind), lambda: (begin, count()))
        move = begin - first
        return [Lifetime(value.name, life.born + move, life.freed + move, life.size_bytes) for life in lifetimes]

    def once(self, key: tuple[str, int], count: Callable[[], T]) -> T:
        counted: dict[Hashable, T] = self.kept.counted
        if key not in counted:
            counted[key] = count()
        return counted[key]

    def _kind(self, value: Value) -> int | None:
        """Equal for values that are alike; None: nothing says of which others this one is."""
        if value.name not in self._kind_of:
            self._kind_of[value.name] = self._new_kind(value)
        return self._kind_of[value.name]

    def _new_kind(self, value: Value) -> int | None:
        maker, kinds, chunk_of = value.producer, self.kept.kinds, self.layout.chunk_of
        if maker is None or maker not in self.place or not kinds:
            return None
        readers, begin = self.layout.consumers[value.name], self.place[maker]
        users = (*readers, *(value.savers or ()))
        if any(chunk_of[user] != chunk_of[maker] for user in users):
            return None
        distances = tuple([self.place[user] - begin for user in users])
        output = self.layout.model.component(maker).outputs.index(value.name)
        key = kinds[maker], output, value.savers is None, distances, tuple([kinds[reader] for reader in readers])
        return self.kept.value_kinds.setdefault(key, len(self.kept.value_kinds))


# --- messages between stages, by action -------------------------------------------------------------------------------


class StageLink(NamedTuple):
    """Two stages of which the first sends something to the second for every microbatch; a gradient goes from a later to an
    earlier one. late: a gradient that only the half for weights of its reader takes."""

    source: int
    target: int
    late: bool = False


class Message(NamedTuple):
    """A value or a gradient that one tp rank of a stage sends the same tp rank of another one, for every microbatch."""

    link: StageLink
    value: str
    reading: Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Attributes: order: a key of `PIPELINE_ORDERS`. ranks, microbatches, chunks: as for `pipeline_actions`.
    links: between stages on different ranks, ascending.
    """

    order: str
    ranks: int
    microbatches: int
    chunks: int = 1
    links: tuple[StageLink, ...] = ()

    def actions(self, rank: int) -> Sequence[Action]:
        """The actions of one rank, in order: the clock of its messages."""
        return pipeline_actions(self.order, rank, self.ranks, self.microbatches, self.chunks)

    @property
    def backward(self) -> Phase:
        return PIPELINE_ORDERS[self.order].phases[1]

    def links_of(self, rank: int) -> tuple[tuple[StageLink, ...], tuple[StageLink, ...]]:
        """The links that end on a rank, and those that begin there, ascending."""
        stages = stages_by_rank(self.order, self.ranks, self.chunks)[rank]
        inward = tuple(link for link in self.links if link.target in stages)
        return inward, tuple(link for link in self.links if link.source in stages)


def messages(layout: PlanIndex, names: Iterable[str], shard: int) -> Iterator[Message]:
    """The messages of the values `names` at one place on the tp axis."""
    tp, halves = layout.plan.mesh.tp, PIPELINE_ORDERS[layout.plan.pipeline_order].halves
    for name in names:
        value, home = layout.model.value[name], layout.stage_of_value[name]
        if home is None or value.producer is None:
            continue
        maker = layout.chunk_of[value.producer]
        for reading in layout.readings[name]:
            if reading.stage == home:
                continue
            if shard in reading.ends.value.holders(tp):
                yield Message(StageLink(maker, layout.chunk_of[reading.components[0]]), name, reading)
            backward = [reader for reader in reading.components if reader in layout.differentiable]
            if value.differentiable and backward and shard in reading.ends.gradient.holders(tp):
                late = halves and not layout.wants_input_gradient(value.producer)
                yield Message(StageLink(layout.chunk_of[backward[0]], maker, late), name, reading)


def pipeline_of(layout: PlanIndex, shard: int, place: int | None = None) -> Pipeline:
    """The pipeline of a plan with the links of the tp rank `shard`; only those that begin or end at a place on the pp axis,
    where that is given."""
    plan = layout.plan
    names = [value.name for value in layout.model.values] if place is None else layout.values_at[place]
    links = {message.link for message in messages(layout, names, shard)}
    if place is not None:
        places = plan.stage_places
        links = {link for link in links if place in (places[link.source], places[link.target])}
    return Pipeline(
        order=plan.pipeline_order,
        ranks=plan.mesh.pp,
        microbatches=plan.microbatches,
        chunks=plan.chunks,
        links=tuple(sorted(links)),
    )


def receive_rooms(reads: Sequence[int | None]) -> list[int]:
    """From which number on there is room for each group of messages of one stream, from when each is read (None: nothing on the
    rank does so; it, and those before it, have room from the beginning).

    Between two places on the pp axis and in one direction, messages follow one another. Those that one action makes for another
    one are a group. There is room for the first group from the beginning of the step, and for another one from right before the
    number that reads the group before it: so for one group ahead, and for no more.
    """
    soonest = list(accumulate((read or 0 for read in reversed(reads)), min))[::-1]  # the first read of this or a later group
    before = [0, *(soonest[number] if read is None else read for number, read in enumerate(reads[:-1], start=1))]
    return [min(read, first) for read, first in zip(before, soonest, strict=True)]


def send_ends(made: Sequence[int | None], backwards: Sequence[int], end: int) -> list[tuple[int, bool]]:
    """Right before which number each group of messages of one stream is given up by its sender; and whether that is because the
    next group has been made, which waits for this one to be sent.

    A value is given up before the first backward of its microbatch (`backwards`) at the latest, or the second forward before
    that, which waits too (where an order would not end so, nothing waits: `ends`).

    made: by group, the last number of its clock that makes it; None: nothing on the rank does. end: of the step.
    """
    given_up = []
    for number, (current, backward) in enumerate(zip(made, backwards, strict=True)):
        following = made[number + 1] if number + 1 < len(made) else None
        if current is None or following is None or following < current:
            given_up.append((min(end, backward), False))
        else:
            given_up.append((min(following + 1, backward), following < backward))
    return given_up


class MessageGroup(NamedTuple):
    """What one action of a rank sends for one action of another rank, in numbers of actions.

    made: the action that makes it, on its rank; `gone`: the one there before which it is given up. read: the action that reads
    it, on that rank. room: the first action there during which there is room for it.
    """

    links: tuple[StageLink, ...]
    made: int
    read: int
    room: int = 0
    gone: int = 0


@lru_cache(maxsize=1024)
def message_groups(pipeline: Pipeline, source: int, target: int) -> tuple[MessageGroup, ...]:
    """What one rank of a pipeline sends another one in a step, in order."""
    place = rank_of_stage(pipeline.order, pipeline.ranks, pipeline.chunks)
    links = [link for link in pipeline.links if (place[link.source], place[link.target]) == (source, target)]
    if not links:
        return ()
    actions = pipeline.actions(source)
    made_at, read_at = ({action: number for number, action in enumerate(pipeline.actions(rank))} for rank in (source, target))
    groups, backwards = list[MessageGroup](), list[int]()
    for number, (stage, phase, microbatch) in enumerate(actions):
        forward = phase is Phase.FORWARD
        if not forward and phase is not pipeline.backward:
            continue
        sent = [link for link in links if link.source == stage and (link.source < link.target) == forward]
        for reader in dict.fromkeys(link.target for link in sent):
            together = tuple(link for link in sent if link.target == reader)
            read_in = Phase.BACKWARD_WEIGHT if not forward and all(link.late for link in together) else phase
            groups.append(MessageGroup(together, number, read_at[Action(reader, read_in, microbatch)]))
            backwards.append(made_at[Action(stage, pipeline.backward, microbatch)] if forward else len(actions))
    rooms = receive_rooms([group.read for group in groups])
    given_up = send_ends([group.made for group in groups], backwards, len(actions))
    return tuple(group._replace(room=room, gone=end) for group, room, (end, _) in zip(groups, rooms, given_up, strict=True))


@lru_cache(maxsize=256)
def ends(pipeline: Pipeline, *, sends_wait: bool = True) -> bool:
    """Whether the order ends if a rank has room for one group ahead; sends_wait: and an action that follows one which makes a
    group waits until the group before is sent.

    It always does where sends do not wait: a receive waits for actions before the one that reads it. Where they wait, nearly
    all shipped orders do. Steps of more than `MOST_CHECKED` actions of shipped orders without chunks are not walked through.
    """
    lengths = [len(pipeline.actions(rank)) for rank in range(pipeline.ranks)]
    if pipeline.chunks == 1 and sum(lengths) > MOST_CHECKED:
        return True
    pairs = [(a, b) for a in range(pipeline.ranks) for b in range(pipeline.ranks) if a != b and message_groups(pipeline, a, b)]
    sent = dict.fromkeys(pairs, 0)
    reached = [0] * pipeline.ranks

    def can_run(rank: int, action: int) -> bool:
        for (source, target), count in sent.items():
            unsent = message_groups(pipeline, source, target)[count:]
            if target == rank and any(group.read == action for group in unsent):
                return False
            if sends_wait and source == rank and len(unsent) > 1 and unsent[1].made < action:
                return False
        return True

    moved = True
    while moved:
        moved = False
        for (source, target), count in sent.items():
            unsent = message_groups(pipeline, source, target)[count:]
            if unsent and unsent[0].made < reached[source] and unsent[0].room <= reached[target]:
                sent[source, target] += 1
                moved = True
        for rank, length in enumerate(lengths):
            if reached[rank] < length and can_run(rank, reached[rank]):
                reached[rank] += 1
                moved = True
    return reached == lengths


# --- what a pipeline holds, by action ---------------------------------------------------------------------------------

REPEATS = 4
"""Actions of one kind in a row, or in turn with another one, of which the inner two are like all further ones."""


class FewActions(NamedTuple):
    """A few actions of a place of a long pipeline that stand for all: the beginning, two of what repeats, and the end.
    microbatches: by action of the whole order, that of the one which stands for it: the same phase of the same stage, with the
    like before and after it."""

    actions: tuple[Action, ...]
    microbatches: tuple[int, ...]


@lru_cache(maxsize=1024)
def few_actions(order: str, place: int, ranks: int, microbatches: int, chunks: int) -> FewActions:
    """Fewer actions of a place of a pipeline, in which buckets come and go as in all of them."""
    every = pipeline_actions(order, place, ranks, microbatches, chunks)
    actions = pipeline_actions(order, place, ranks, few_rounds(order, ranks, microbatches), chunks)
    numbers = [in_few_rounds(order, ranks, microbatches, action.microbatch) for action in every]
    if chunks > 1 or PIPELINE_ORDERS[order].halves:
        return FewActions(tuple(actions), tuple(numbers))
    standing = _stand_for(actions)
    by_action = {
        (action.phase, action.microbatch): actions[other].microbatch for action, other in zip(actions, standing, strict=True)
    }
    return FewActions(
        tuple(actions[number] for number in sorted(set(standing))),
        tuple(by_action[action.phase, number] for action, number in zip(every, numbers, strict=True)),
    )


def _stand_for(actions: Sequence[Action]) -> list[int]:
    """By action the number of the one that stands for it, where the inner ones of many repeats stand for one another."""
    phases = [action.phase for action in actions]
    standing: list[int] = []
    while (first := len(standing)) < len(phases):
        for period in (1, 2):  # one action repeats, or two in turn
            unit, repeats = phases[first : first + period], 1
            while phases[first + repeats * period : first + (repeats + 1) * period] == unit:
                repeats += 1
            if repeats > REPEATS:
                break
        else:
            repeats, period = 1, 1
        for repeat in range(repeats):
            inner = REPEATS // 2 <= repeat < repeats - REPEATS // 2
            other = first + (REPEATS // 2 if inner else repeat) * period
            standing += range(other, other + period)
    return standing


Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMoments:
    """What a rank of a pipeline holds while each of its actions runs; one row for actions that differ by nothing but the
    batches not yet read, the first of them.

    Attributes:
        kinds: by row the chunk and the phase that run, and the microbatch of the action that stands for it (`few_actions`).
        alive: int64 [rows, chunks], microbatches whose forward has begun and whose backward has not ended, with the action's.
        waiting: int64 [rows, chunks], those whose backward has run for inputs and not yet for weights; the action's own counts
            if it is the half for weights.
        unread, read: int64 [rows, chunks], those whose batch is not yet read; and read, of which saved activations are parts.
        arriving: int64 [rows, links], messages for which there is room that the action does not read.
        leaving: int64 [rows, links], messages held that an earlier action has made.
        between: int64 [rows, links], what one chunk of the rank has made for another one that no action has read.
    """

    kinds: tuple[tuple[int, Phase, int], ...]
    alive: Counts
    waiting: Counts
    unread: Counts
    read: Counts
    arriving: Counts
    leaving: Counts
    between: Counts


@lru_cache(maxsize=1024)
def held_moments(pipeline: Pipeline, rank: int, *, apart: bool = False, inner: tuple[StageLink, ...] = ()) -> HeldMoments:
    """Every moment of a rank at which something else runs or something else is held: prefix sums over lifetimes by action.
    Messages are by link, in the order of `Pipeline.links_of` and of `inner`.

    apart: other microbatches are something else that runs, for what is held of buckets depends on the microbatch. inner: links
    between stages of this rank. What one makes waits for the other, if other actions run in between.
    """
    actions, chunks = pipeline.actions(rank), pipeline.chunks
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages_by_rank(pipeline.order, pipeline.ranks, chunks)[rank])}
    inward, outward = pipeline.links_of(rank)
    parts: dict[str, Sequence[Hashable]] = {
        **dict.fromkeys(("alive", "waiting", "unread"), range(chunks)),
        "arriving": inward,
        "leaving": outward,
        "between": inner,
    }
    columns = {key: number for number, key in enumerate((part, key) for part, keys in parts.items() for key in keys)}
    changes = np.zeros((len(actions) + 1, len(columns)), dtype=np.int64)
    for key, born, freed, _ in _action_lifetimes(pipeline, rank, chunk_of, inner):
        if born <= freed:
            changes[born, columns[key]] += 1
            changes[freed + 1, columns[key]] -= 1
    counts = changes.cumsum(axis=0)[:-1]
    numbers: Sequence[int] = [0] * len(actions)
    if apart:
        numbers = few_actions(pipeline.order, rank, pipeline.ranks, pipeline.microbatches, chunks).microbatches
    kinds = [(chunk_of[action.stage], action.phase, number) for action, number in zip(actions, numbers, strict=True)]
    compared = counts.copy()
    compared[:, 2 * chunks : 3 * chunks] = 0  # batches not yet read
    first: dict[Hashable, int] = {}
    for row, kind in enumerate(kinds):
        first.setdefault((kind, compared[row].tobytes()), row)
    rows = counts[list(first.values())]
    bounds = np.cumsum([0, *map(len, parts.values())])
    alive, waiting, unread, arriving, leaving, between = (rows[:, a:b] for a, b in pairwise(bounds))
    return HeldMoments(
        kinds=tuple(kinds[row] for row in first.values()),
        alive=alive,
        waiting=waiting,
        unread=unread,
        read=alive,
        arriving=arriving,
        leaving=leaving,
        between=between,
    )


def _action_lifetimes(
    pipeline: Pipeline, rank: int, chunk_of: Mapping[int, int], inner: Sequence[StageLink]
) -> Iterator[Lifetime]:
    """By action of the rank: microbatches of each chunk, and messages of each link."""
    actions = pipeline.actions(rank)
    at = {action: number for number, action in enumerate(actions)}
    for number, (stage, phase, microbatch) in enumerate(actions):
        last = at[Action(stage, PIPELINE_ORDERS[pipeline.order].phases[-1], microbatch)]
        if phase is Phase.FORWARD:
            yield Lifetime(("alive", chunk_of[stage]), number, last)
            yield Lifetime(("unread", chunk_of[stage]), 0, number - 1)
        elif phase is Phase.BACKWARD_INPUT:
            yield Lifetime(("waiting", chunk_of[stage]), number + 1, last)
        if phase in (Phase.FORWARD, pipeline.backward):
            for link in inner:
                if link.source == stage and (link.source < link.target) == (phase is Phase.FORWARD):
                    yield Lifetime(("between", link), number + 1, at[Action(link.target, phase, microbatch)] - 1)
    place = rank_of_stage(pipeline.order, pipeline.ranks, pipeline.chunks)
    inward, outward = pipeline.links_of(rank)
    for other in {place[link.source] for link in inward} - {rank}:
        for group in message_groups(pipeline, other, rank):
            for link in group.links:
                yield Lifetime(("arriving", link), group.room, group.read - 1)
    for other in {place[link.target] for link in outward} - {rank}:
        for group in message_groups(pipeline, rank, other):
            for link in group.links:
                yield Lifetime(("leaving", link), group.made + 1, group.gone - 1)


def decoupled_moments(held: int, inward: Sequence[StageLink], outward: Sequence[StageLink]) -> HeldMoments:
    """The moments of a stage that is not synchronised with the others: in a step one forward of a new batch, then one backward
    of an older one. There is room for the gradient of a step from its beginning. held: batches that it has run forward and not
    backward, at the fullest moment."""

    def rows(first: Sequence[int], second: Sequence[int]) -> Counts:
        return np.array([first, second], dtype=np.int64).reshape(2, len(first))

    posted = [int(link.source > link.target) for link in inward]
    return HeldMoments(
        kinds=((0, Phase.FORWARD, 0), (0, Phase.BACKWARD, 0)),
        alive=rows([held], [held]),
        waiting=rows([0], [0]),
        unread=rows([0], [0]),
        read=rows([1], [1]),
        arriving=rows(posted, [0] * len(posted)),
        leaving=rows([0] * len(outward), [0] * len(outward)),
        between=rows([], []),
    )


# --- buckets that are whole for a while (ZeRO 2 and 3), by use --------------------------------------------------------


def bucket_bytes(layout: PlanIndex, uses: Sequence[Use], buckets: Collection[Bucket]) -> list[float]:
    """Bytes of the buckets that are whole on their ranks while each use runs: a prefix sum over their windows.

    Gradients are there from the first backward that adds to them until the computation that waits for their reduce_scatter, or
    for a later one of the same group. While they are being sent, there is room for this rank's part of the sum too. Parameters
    are there from the computation beside which they are gathered to the last one that needs them.
    """
    sizes, changes = {bucket.number: bucket.padded_bytes for bucket in buckets}, [0.0] * (len(uses) + 1)
    families = by_family(buckets)
    for bucket, _, _, first, last, freed in gradient_windows(layout, uses, families):
        size, part = sizes[bucket.number], sizes[bucket.number] // len(bucket.group)
        changes[first] += size
        changes[last + 1] += part
        changes[freed + 1] -= size + part
    for bucket, _, ahead, _, last, _ in parameter_windows(layout, uses, families):
        changes[ahead] += sizes[bucket.number]
        changes[last + 1] -= sizes[bucket.number]
    return list(accumulate(changes[:-1]))


# --- what the executor does between two computations ------------------------------------------------------------------

BucketOfMicrobatch = tuple[int, int]


@dataclass(kw_only=True)
class Room:
    """What happens to buckets around one computation, in this order: gradients given up before it, parameters given up after
    it, gradients complete after it, parameters for which there is room from then on."""

    forgotten: list[BucketOfMicrobatch] = field(default_factory=list)
    ending_parameters: list[int] = field(default_factory=list)
    ending_gradients: list[BucketOfMicrobatch] = field(default_factory=list)
    beginning_parameters: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class BucketRooms:
    """Attributes: around: by number of a task. first_parameters: gathered before anything was computed in the step."""

    around: dict[int, Room] = field(default_factory=dict)
    first_parameters: list[int] = field(default_factory=list)

    def at(self, task: int) -> Room:
        return self.around.setdefault(task, Room())


def bucket_rooms(tasks: RankTasks, layout: PlanIndex, rank: int) -> BucketRooms:
    """When a rank gives up buckets that are whole for a while, and makes room for parameters, as `bucket_bytes` counts them.
    The first backward that adds to gradients makes the room for them."""
    rooms = BucketRooms()
    if layout.plan.zero_stage < 2:
        return rooms
    computed: dict[Use, int] = {}
    updates: list[int] = []  # clipping and updates: all that was sent has come by then
    for task, stream, _ in tasks:
        if stream != COMPUTE:
            continue
        if isinstance(task.work, Compute) and task.origin.microbatch is not None:
            computed[Use(task.work.phase, task.work.component, task.origin.microbatch)] = task.index
        elif isinstance(task.work, OptimizerStep | ClipGradients):
            updates.append(task.index)
    uses = uses_of(layout, layout.plan.stage_of_rank(rank))
    here = [number for number, use in enumerate(uses) if use in computed]
    tasks_here = [computed[uses[number]] for number in here]
    buckets = by_family(layout.gathered_buckets(rank))
    for bucket, _, ahead, _, last, _ in parameter_windows(layout, uses, buckets):
        begins, ends = bisect_left(here, ahead), bisect_right(here, last)
        beginning = rooms.at(tasks_here[begins - 1]).beginning_parameters if begins else rooms.first_parameters
        beginning.append(bucket.number)
        rooms.at(tasks_here[ends - 1]).ending_parameters.append(bucket.number)
    for bucket, _, _, first, last, freed in gradient_windows(layout, uses, buckets):
        key = bucket.number, uses[first].microbatch
        rooms.at(tasks_here[bisect_right(here, last) - 1]).ending_gradients.append(key)
        ends = bisect_right(here, freed)
        for index in tasks_here[ends : ends + 1] or updates[:1]:
            rooms.at(index).forgotten.append(key)
    return rooms


@dataclass(kw_only=True)
class MessageRooms:
    """Attributes:
    first: receives for which there is room from the beginning of the step.
    behind: by computation, those for which there is room from its end.
    awaited: by receive or computation, what else it waits for.
    forgotten: by computation, sends whose tensors are given up right before it.
    """

    first: list[Task] = field(default_factory=list)
    behind: dict[int, list[Task]] = field(default_factory=dict)
    awaited: dict[int, list[int]] = field(default_factory=dict)
    forgotten: dict[int, list[int]] = field(default_factory=dict)


def message_rooms(tasks: RankTasks, layout: PlanIndex, rank: int) -> MessageRooms:
    """When a rank makes room for what other stages send, and gives up what it sends (`receive_rooms`, `send_ends`)."""
    streams: dict[str, list[Task]] = {}
    for task, stream, _ in tasks:
        if isinstance(task.work, SendRecv) and task.origin.hop is None and task.origin.value is not None:  # else of a round
            streams.setdefault(stream, []).append(task)
    rooms = MessageRooms()
    if not streams:
        return rooms
    computations = _Computations(tasks, layout)
    waits = ends(pipeline_of(layout, layout.plan.shard_of_rank(rank)))
    for stream_tasks in streams.values():
        groups = computations.grouped(stream_tasks)
        work = stream_tasks[0].work
        assert isinstance(work, SendRecv)
        if work.destination == rank:
            reads = [
                computations.first.get((target, microbatch, source < target)) for (source, target, microbatch), _ in groups
            ]
            for (_, receives), room in zip(groups, receive_rooms(reads), strict=True):
                if room == 0:
                    rooms.first.extend(receives)
                    continue
                index = computations.tasks[room - 1].index
                rooms.behind.setdefault(index, []).extend(receives)
                for task in receives:
                    rooms.awaited.setdefault(task.index, []).append(index)
            continue
        made = [computations.last.get((source, microbatch, source < target)) for (source, target, microbatch), _ in groups]
        never = len(computations.tasks)
        backwards = [
            computations.first.get((source, microbatch, False), never) if source < target else never
            for (source, target, microbatch), _ in groups
        ]
        for (_, sends), (number, by_next) in zip(groups, send_ends(made, backwards, computations.update), strict=True):
            if number == never:
                continue
            task, indices = computations.tasks[number], [send.index for send in sends]
            rooms.forgotten.setdefault(task.index, []).extend(indices)
            again = isinstance(task.work, Compute) and task.work.phase is Phase.RECOMPUTE  # a backward has to wait in any case
            if waits and (by_next or again):
                rooms.awaited.setdefault(task.index, []).extend(indices)
    return rooms


class _Computations:
    """The computations of a rank in order, and of the actions of a stage of the plan, microbatch and direction (forward: True)
    the number of the first, and of the last that makes something for others. update: number of the first update."""

    def __init__(self, tasks: RankTasks, layout: PlanIndex) -> None:
        self._layout = layout
        self.tasks = [task for task, stream, _ in tasks if stream == COMPUTE]
        self.first: dict[tuple[int, int, bool], int] = {}
        self.last: dict[tuple[int, int, bool], int] = {}
        for number, task in enumerate(self.tasks):
            if not isinstance(task.work, Compute) or task.origin.microbatch is None:
                continue
            name, forward = task.work.component, task.work.phase is Phase.FORWARD
            key = (layout.chunk_of[name], task.origin.microbatch, forward)
            self.first.setdefault(key, number)
            if forward or (task.work.phase is not Phase.BACKWARD_WEIGHT and layout.wants_input_gradient(name)):
                self.last[key] = number
        updates = (number for number, task in enumerate(self.tasks) if isinstance(task.work, OptimizerStep))
        self.update = next(updates, len(self.tasks))

    def grouped(self, stream: Iterable[Task]) -> list[tuple[tuple[int, int, int], list[Task]]]:
        """The messages of one stream in issue order, those together that one action makes and one action reads; each group with
        the two stages and the microbatch."""
        groups: list[tuple[tuple[int, int, int], list[Task]]] = []
        for task in stream:
            assert task.origin.microbatch is not None
            link = self._link(task)
            key = (link.source, link.target, task.origin.microbatch)
            if not groups or groups[-1][0] != key:
                groups.append((key, []))
            groups[-1][1].append(task)
        return groups

    def _link(self, task: Task) -> StageLink:
        work, origin, plan = task.work, task.origin, self._layout.plan
        assert isinstance(work, SendRecv)
        assert origin.value is not None
        ends_here = (plan.stage_of_rank(work.source), plan.stage_of_rank(work.destination))
        for link, _, reading in messages(self._layout, [origin.value], plan.shard_of_rank(work.source)):
            how = reading.ends.gradient if origin.gradient else reading.ends.value
            places = (plan.stage_places[link.source], plan.stage_places[link.target])
            if (link.source > link.target) == origin.gradient and places == ends_here and how == (origin.layout or PIECES):
                return link
        raise AssertionError(f"no stage sends {origin.value} from rank {work.source} to rank {work.destination}")
