"""Work and memory of each component of a module per sample, counted on fake tensors at two batches.

Saved activations are the tensors that autograd keeps for the backward, found by saved-tensor hooks on the real autograd
nodes. Each storage counts once, in the first component that saves it. Parameters and buffers are not activations. Leaves
out what an allocator rounds up, and workspaces of kernels.

Autocast to half precision keeps the weights in fp32 and casts them where an operator runs in half precision; the casts that its
backward needs stay until then. Which operators do so is PyTorch's list for the CPU: matmul, convolution and attention in half
precision, and what follows in the type it is given. Leaves out: CUDA's own list, which takes normalisations, softmax and losses
in fp32, so that what these save there is up to twice as large.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from parsim.errors import TraceError, first_few
from parsim.model.component import (
    LOSS,
    MAXIMUM,
    PARTIAL,
    Component,
    DividedSize,
    Footprint,
    Operator,
    OperatorShard,
    Parameter,
    ParameterShard,
    Selective,
    Sharding,
    Share,
    Size,
    Value,
    ValueFootprint,
)
from parsim.model.model import SUBLAYER, Model
from parsim.model.runnable import CallProgram, Nested, Ref, environment_of, run_op
from parsim.model.shard.apply import localise
from parsim.model.shard.content import Refused, Undecided
from parsim.model.shard.propagate import Variant, propagate, variants, vocabulary_size
from parsim.model.total_loss import MAXIMUM as MAXIMUM_OF_LOGITS
from parsim.model.trace.checks import backward_message
from parsim.model.trace.cut import CallInterval, cut, final_values, programs, value_names
from parsim.model.trace.data_dependent import assumptions, call_module, collapse, whole_modules
from parsim.model.trace.memory import (
    CountedPeaks,
    Recorded,
    autocast_as,
    compares_samples,
    component_peaks,
    gains,
    like,
    local_program,
    selective_of,
    shard_peaks,
    shard_selective,
    square_peaks,
    square_size,
    state_of,
    with_local_tensors,
)
from parsim.model.trace.operators import OperatorMode, RawOperator, SavedTensors, Watch, grow
from parsim.model.trace.record import run_recorded
from parsim.model.trace.recorder import Recording, storage_key
from parsim.private import FakeTensorMode
from parsim.units import divisors

# The `Sharding`s of a component with the arrays each divides, measured by running one shard and the whole on fake tensors.
#
# A shard's operators and saved bytes are compared with the whole's, call by call. Left out: the small kernels that a shard has
# and the whole has not (taking its piece of a full operand, masking tokens).


Split = Callable[[int, int, str], tuple[int, int]]


class Division(NamedTuple):
    """A component by its operators.
    `operators`: per sample. `shardings`: of the component. `numbers`: per one of `Recorded.operators` the number of its
    operator; -1: it is part of a sum over a loop."""

    operators: tuple[Operator, ...]
    shardings: tuple[Sharding, ...]
    numbers: tuple[int, ...]


def divide(
    small: Recorded,
    large: Recorded,
    split: Split,
    saved: tuple[int, int],
    cuttable: Sequence[bool],
    logits: Collection[str] = (),
) -> Division:
    """Operators per sample and shardings of a component recorded at two batches.
    `split`: (bytes at the small batch, at the large one, what) -> (per sample, fixed). `saved`: what the whole saves, so.
    `cuttable`: per input whether dim 0 is the batch in both. `logits`: the values that the parts of a cross-entropy read."""
    raws = grow(small.operators, large.operators, large.samples - small.samples)
    grown = _numbered(raws)
    found = [_divided(small, large, split, saved, variant, grown, logits) for variant in variants(small.program, cuttable)]
    divisions = [division for division in found if division is not None]
    counts: dict[tuple[Operator, tuple[OperatorCut | None, ...]], int] = {}
    number_of: dict[int, int] = {}
    places: dict[Hashable, int] = {}
    for (key, operator), (raw, _) in zip(grown, raws, strict=True):
        mark = tuple(cuts.get(key) for _, cuts in divisions)
        counts[operator, mark] = counts.get((operator, mark), 0) + 1
        number_of[id(raw)] = places.setdefault((operator, mark), len(places))
    shardings = []
    for place, (sharding, _) in enumerate(divisions):
        cuts = [(number, mark[place]) for number, (_, mark) in enumerate(counts)]
        shards = (OperatorShard(number=number, dim=cut[0], activation_bytes=cut[1]) for number, cut in cuts if cut is not None)
        shardings.append(replace(sharding, operators=tuple(shards)))
    return Division(
        operators=tuple(replace(operator, count=count * operator.count) for (operator, _), count in counts.items()),
        shardings=tuple(shardings),
        numbers=tuple(number_of.get(id(raw), -1) for raw in small.operators),
    )


def _divided(
    small: Recorded,
    large: Recorded,
    split: Split,
    saved: tuple[int, int],
    variant: Variant,
    grown: list[tuple[Hashable, Operator]],
    logits: Collection[str],
) -> tuple[Sharding, dict[Hashable, OperatorCut]] | None:
    """The sharding without its operators, and what it divides of these; None if the larger batch does not allow the same."""
    ways, program = divisors(variant.result.limit)[1], small.program
    try:
        one, other = (propagate(whole.program, variant.inputs, variant.decided, ways) for whole in (small, large))
    except (Refused, Undecided):
        return None
    if (one.outputs, one.parts, one.limit) != (other.outputs, other.parts, other.limit):
        return None
    runs = []
    for whole, result in ((small, one), (large, other)):
        local_calls, origins = localise(whole.program, result, 0, ways)
        local_calls = with_local_tensors(local_calls, variant.inputs, result.parts.values(), Share(1, ways))
        runs.append(_run_shard(whole, local_calls, origins))
    local = dict(_numbered(grow(runs[0].operators, runs[1].operators, large.samples - small.samples)))
    cuts = {key: cut for key, operator in grown if key in local and (cut := _cut(operator, local[key], ways)) is not None}
    rates = split(runs[0].saved_bytes, runs[1].saved_bytes, f"what a shard of {program.name} saves")
    rate, fixed = (_whole_of(everything, part, ways) for everything, part in zip(saved, rates, strict=True))
    size = vocabulary_size(program, variant.result, logits)

    def parts(kind: str) -> tuple[ParameterShard, ...]:
        names = dict.fromkeys(key.name for key, _ in program.state if key.kind == kind)
        return tuple(replace(variant.result.parts[name], size=size) for name in names if name in variant.result.parts)

    sharding = Sharding(
        rule=variant.result.rule,
        limit=variant.result.limit,
        inputs=tuple(content.text for content in variant.inputs),
        outputs=variant.result.outputs,
        parameters=parts("parameter"),
        buffers=parts("buffer"),
        saved_activation_bytes=rate,
        saved_fixed_bytes=fixed,
        size=size,
    )
    return sharding, cuts


def _whole_of(everything: int, local: int, ways: int) -> int:
    """The part that is divided, from what one of `ways` shards has left of everything."""
    return min(everything, max(0, everything - local) * ways // (ways - 1))


OperatorCut = tuple[str, int]
"""The dim that shards divide of an operator, and the bytes of activations."""


def _cut(whole: Operator, local: Operator, ways: int) -> OperatorCut | None:
    sizes, local_sizes = dict(whole.shape), dict(local.shape)
    dims = [name for name in sizes if local_sizes.get(name) != sizes[name]]
    if len(dims) != 1 or local_sizes.get(dims[0], 0) * ways != sizes[dims[0]]:
        return None
    return dims[0], _whole_of(whole.activation_bytes, local.activation_bytes, ways)


def _numbered(grown: Sequence[tuple[RawOperator | None, Operator]]) -> list[tuple[Hashable, Operator]]:
    """By (call, function, which of them): the same for the whole and for a shard."""
    seen: dict[Hashable, int] = {}
    numbered: list[tuple[Hashable, Operator]] = []
    for place, (raw, operator) in enumerate(grown):
        call: Hashable = ("sum of a loop", place) if raw is None else (raw.op, raw.function)
        seen[call] = seen.get(call, 0) + 1
        numbered.append(((call, seen[call]), operator))
    return numbered


class _ShardRun(NamedTuple):
    """Operators of the calls that were recorded, and bytes of activations and of casts of parameters that are saved."""

    operators: list[RawOperator]
    saved_bytes: int
    cast_bytes: int


def _run_shard(whole: Recorded, program: CallProgram, origins: Sequence[int | None]) -> _ShardRun:
    """Shard 0 on fake tensors laid out in memory as the whole's.
    `program`: of the shard, with local shapes. `origins`: per call the number of the recorded one it stands for."""
    position = 0
    with whole.fakes, autocast_as(whole.autocast), torch.enable_grad():
        kinds = [program.tensors[slot] for _, slot, _ in program.inputs]
        inputs = [like(kind).requires_grad_(kind.differentiable) for kind in kinds]
        state = state_of(program)
        environment = environment_of(program, inputs, state.items())
        uncounted = [value for place, value in enumerate(inputs) if place not in whole.counted_inputs]
        saved = SavedTensors(lambda: position)
        mode = OperatorMode(lambda: position, set(map(storage_key, state.values())))
        with saved.open(), mode:
            for op, origin in zip(program.ops, origins, strict=True):
                position = -1 if origin is None else origin
                run_op(op, environment)
        sizes = {key: size for _, key, size in saved.first_saves(set(map(storage_key, (*state.values(), *uncounted))))}
    casts = sum(size for key, size in sizes.items() if key in mode.casts)
    return _ShardRun([raw for raw in mode.operators if raw.op >= 0], sum(sizes.values()) - casts, casts)


def half_divided(
    small: Recorded, large: Recorded, sharding: Sharding, half: Footprint[Size], split: Split
) -> Footprint[DividedSize]:
    """What shards divide of the bytes that a component saves under autocast.
    Autocast halves what products read, and leaves the residual stream as it is. So the part that is divided is not that without
    autocast, halved. `small`, `large`: recorded under autocast at two batches. `half`: what the whole saves. `split`: as for
    `divide`."""
    ways = divisors(sharding.limit)[1]
    programs = [local_program(whole.program, sharding, 0, ways) for whole in (small, large)]
    less, more = (
        _run_shard(whole, program, range(len(program.ops))) for whole, program in zip((small, large), programs, strict=True)
    )
    rate, fixed = split(less.saved_bytes, more.saved_bytes, f"what a shard of {small.program.name} saves under autocast")
    return Footprint(
        saved_activation_bytes=_whole_of(half.saved_activation_bytes, rate, ways),
        saved_fixed_bytes=_whole_of(half.saved_fixed_bytes, fixed, ways),
        cast_bytes=_whole_of(half.cast_bytes, less.cast_bytes, ways),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedForward:
    """One fake forward at `batch` samples, cut; lists run along `intervals`.

    Attributes:
        programs: per interval. operators_in: per interval, their calls counted from its first.
        collapsed: the recording with one call for each module that runs as a whole, cut into `collapsed_intervals`.
        saved_in: per interval (storage, bytes) of what is first saved in it. savers: by storage the components that save it,
            in the order in which they run. state: storages of parameters and buffers. casts: storages that hold parameters in
            another precision. autocast: the half-precision type it ran under, or None.
    """

    batch: int
    recording: Recording
    intervals: list[CallInterval]
    collapsed: Recording
    collapsed_intervals: list[CallInterval]
    programs: tuple[CallProgram, ...]
    operators_in: list[list[RawOperator]]
    saved_in: list[list[tuple[int, int]]]
    savers: Mapping[int, tuple[str, ...]]
    state: frozenset[int]
    fakes: FakeTensorMode
    casts: frozenset[int]
    autocast: torch.dtype | None

    @property
    def even_batches(self) -> int:
        """Experts get equally many tokens at multiples of this batch."""
        return math.lcm(*(routing.divisor(self.batch) for routing in self.recording.routings.values()))

    def saved_bytes(self, place: int, *, casts: bool = False) -> int:
        """Saved bytes of activations, or of the casts of parameters, in one component."""
        return sum(size for key, size in self.saved_in[place] if (key in self.casts) == casts)

    @property
    def loss_place(self) -> int | None:
        """Place of the component that takes the loss."""
        return len(self.intervals) - 1 if self.intervals and self.intervals[-1].name == LOSS else None

    def paged_arrays(self, place: int) -> list[int]:
        """Bytes of what its kernels keep on pages of their own."""
        return [size for raw in self.operators_in[place] for size in raw.paged_arrays]

    def recorded(self, place: int) -> Recorded:
        """One component, its calls counted from its first."""
        saved, tensors = {key for key, _ in self.saved_in[place]}, self.recording.tensors
        inputs = enumerate(self.intervals[place].inputs)
        return Recorded(
            program=self.programs[place],
            fakes=self.fakes,
            samples=self.batch,
            autocast=self.autocast,
            operators=tuple(self.operators_in[place]),
            counted_inputs=tuple(number for number, value in inputs if storage_key(tensors[value]) in saved),
        )


def recorded_in_parts(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, granularity: str, example: bool, **settings: Any
) -> tuple[Recording, frozenset[str]]:
    """One forward, and the modules in it that depend on the data and so are called as a whole.
    `settings`: further ones, as for `run_recorded`."""
    parts = granularity == SUBLAYER
    recording = run_recorded(module, args, kwargs, loss_in_parts=parts, example=example, **settings)
    if not recording.decisions:
        return recording, frozenset()
    loss = settings["loss"]
    other = run_recorded(module, args, kwargs, loss=loss, loss_in_parts=parts, skew=True, example=example)
    return recording, whole_modules(recording, other, module)


def measure(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    granularity: str,
    loss: str | None,
    autocast: torch.dtype | None = None,
    example: bool = False,
    answers: Sequence[bool] | None = None,
) -> TracedForward:
    """One fake forward of `module` in the mode it is in, under the CPU's autocast to a half-precision type if one is given.
    `example`, `answers`: as for `run_recorded`."""
    watch = Watch()
    with autocast_as(autocast):
        recording, whole = recorded_in_parts(
            module, args, kwargs, granularity=granularity, loss=loss, example=example, answers=answers, watch=watch
        )
    collapsed, starts = collapse(recording, whole, module)
    cuts = cut(collapsed, module, granularity, whole)
    intervals = [replace(part, start=starts[part.start], end=starts[part.end]) for part in cuts]
    operators = _per_interval(intervals, watch.mode.operators, lambda raw: raw.op)
    first_saves = _per_interval(intervals, watch.saved.first_saves(watch.state), itemgetter(0))
    savers: dict[int, dict[str, None]] = {}
    for interval, saves in zip(intervals, _per_interval(intervals, watch.saved.saves, itemgetter(0)), strict=True):
        for _, key, _ in saves:
            savers.setdefault(key, {})[interval.name] = None
    return TracedForward(
        batch=recording.tensors[recording.inputs[0][1]].shape[0],
        recording=recording,
        intervals=intervals,
        collapsed=collapsed,
        collapsed_intervals=cuts,
        programs=programs(recording, intervals),
        operators_in=[
            [raw._replace(op=raw.op - interval.start) for raw in part]
            for interval, part in zip(intervals, operators, strict=True)
        ],
        saved_in=[[(key, size) for _, key, size in saves] for saves in first_saves],
        savers={key: tuple(names) for key, names in savers.items()},
        state=frozenset(watch.state),
        fakes=watch.fakes,
        casts=frozenset(watch.mode.casts),
        autocast=autocast,
    )


Item = TypeVar("Item")
Result = TypeVar("Result")


def _per_interval(intervals: Sequence[CallInterval], items: Iterable[Item], call_of: Callable[[Item], int]) -> list[list[Item]]:
    """What happened in a call, by the interval in which the call lies."""
    starts = [interval.start for interval in intervals]
    parts: list[list[Item]] = [[] for _ in intervals]
    for item in items:
        place = bisect_right(starts, call_of(item)) - 1
        if place >= 0 and call_of(item) < intervals[place].end:
            parts[place].append(item)
    return parts


def has_pairs(small: TracedForward, large: TracedForward) -> bool:
    """Whether the loss compares every sample with every other."""
    if small.loss_place is None or large.loss_place is None:
        return False
    less, more = (
        [size for _, size in run.saved_in[place]] for run, place in ((small, small.loss_place), (large, large.loss_place))
    )
    return compares_samples(less, more, (small.batch, large.batch))


def combine(
    small: TracedForward,
    large: TracedForward,
    *,
    name: str,
    granularity: str,
    source: str,
    largest: TracedForward | None = None,
    untrained: frozenset[str] = frozenset(),
    memory: bool = True,
    sharded: bool = True,
) -> Model:
    """Numbers per sample, and what does not grow, from two measurements at different batches.
    `largest`: at a third batch, where the loss compares samples. `untrained`: parameters that get no gradient. `memory`: with
    the fullest moments, else operators and saved bytes alone. `sharded`: with how operators can be divided.
    Raises TraceError if a size is not linear in the batch."""
    if [interval.name for interval in small.intervals] != [interval.name for interval in large.intervals]:
        raise TraceError(
            f"{name} calls its parts otherwise for {large.batch} samples than for {small.batch} (a loop over the samples?), so "
            "nothing can be counted per sample; compute on the whole batch at once"
        )
    count = _Counts(small, large, memory=memory, sharded=sharded)
    values = count.values()
    buffers: set[int] = set()
    components = tuple(
        count.component(place, values, buffers, largest if place == small.loss_place else None, untrained)
        for place in range(len(small.intervals))
    )
    used = {value for component in components for value in component.inputs}
    names = value_names(small.recording, small.intervals)
    return Model(
        name=name,
        granularity=granularity,
        components=components,
        values=tuple(values.values()),
        inputs=tuple(input_name for input_name, _ in small.recording.inputs if input_name in used),
        outputs=tuple(names[number] for number in final_values(small.recording) if number in names),
        source=source,
        assumptions=(*assumptions(small.recording), *([] if largest is None else [_left_out(small, large, largest)])),
    )


def _left_out(small: TracedForward, large: TracedForward, largest: TracedForward) -> str:
    """What a loss over pairs of samples costs beyond the numbers per sample."""
    place = small.loss_place
    assert place is not None
    flop = [sum(raw.flop * raw.count for raw in run.operators_in[place]) for run in (small, large, largest)]
    pairs = square_size(flop, [small.batch, large.batch, largest.batch], "the loss").pairs
    return (
        "contrastive: no sum over samples. Replicas and microbatches change the loss, because each compares its own samples. "
        f"Memory counts every pair; time counts {small.batch + large.batch} pairs per sample, and each has {pairs} flop"
    )


HALF = torch.bfloat16
"""As large as float16, and the type the CPU's autocast casts to."""


def with_half_precision(model: Model, small: TracedForward, large: TracedForward) -> Model:
    """The model with what two forwards under autocast, at different batches, say of its components and values.
    Raises TraceError if a size is not linear in the batch."""
    count = _Counts(small, large)
    return replace(
        model,
        components=tuple(count.with_half(component, place) for place, component in enumerate(model.components)),
        values=tuple(replace(value, half=count.footprint(value.name)) for value in model.values),
    )


class _Counts:
    """Components and values in numbers per sample, from forwards at two batches. What is alike is counted once.
    `small`, `large`: both with autocast or both without."""

    def __init__(self, small: TracedForward, large: TracedForward, *, memory: bool = True, sharded: bool = True) -> None:
        self._small, self._large, self._memory, self._sharded = small, large, memory, sharded
        self._batches = small.batch, large.batch
        self._names = value_names(small.recording, small.intervals)
        self._numbers = {name: number for number, name in self._names.items()}
        self._others = {name: number for number, name in value_names(large.recording, large.intervals).items()}
        self._logits = {name for part in small.programs if part.name == MAXIMUM_OF_LOGITS for name, _, _ in part.inputs}
        self._counted: dict[Hashable, Any] = {}

    def _once(self, key: Hashable, count: Callable[[], Result]) -> Result:
        if key not in self._counted:
            self._counted[key] = count()
        result: Result = self._counted[key]
        return result

    def _recorded(self, place: int) -> tuple[Recorded, Recorded]:
        return self._small.recorded(place), self._large.recorded(place)

    def _split(self, small: int, large: int, what: str, *, rounded: bool | None = None) -> tuple[int, int]:
        """(per sample, fixed) of a size at two batches.
        `rounded`: it need not be linear exactly; None: if it may rest on assumptions about the data."""
        rate, rest = divmod(large - small, self._batches[1] - self._batches[0])
        if rounded is None:
            rounded = bool(self._small.recording.decisions)
        if rounded:
            rate = max(0, round((large - small) / (self._batches[1] - self._batches[0])))
            return rate, max(0, small - rate * self._batches[0])
        fixed = small - rate * self._batches[0]
        if rest or rate < 0 or fixed < 0:
            raise TraceError(
                f"{what} takes {small} bytes at batch {self._batches[0]} and {large} at {self._batches[1]}: not linear in the "
                "batch, so there is no number per sample. Keep samples independent of one another in the forward"
            )
        return rate, fixed

    # --- values

    def _tensors(self, name: str) -> tuple[Tensor, Tensor]:
        return (
            self._small.recording.tensors[self._numbers[name]],
            self._large.recording.tensors[self._others[name]],
        )

    def footprint(self, name: str) -> ValueFootprint:
        """Bytes of a value, and who saves it."""
        small, large = self._tensors(name)
        rate, fixed = self._split(_size_bytes(small), _size_bytes(large), f"value {name}", rounded=False)
        key = storage_key(small)
        savers = self._small.savers.get(key, ())
        is_saved = bool(savers) and key not in self._small.state
        return ValueFootprint(bytes_per_sample=rate, fixed_bytes=fixed, saved=is_saved, savers=savers)

    def values(self) -> dict[str, Value]:
        """All values that cross boundaries of components, by name."""
        producer = {number: interval.name for interval in self._small.intervals for number in interval.outputs}
        values: dict[str, Value] = {}
        for number, name in self._names.items():
            size, (small, large) = self.footprint(name), self._tensors(name)
            one, other = (tensor.untyped_storage().nbytes() for tensor in (small, large))
            storage, _ = self._split(one, other, f"what {name} lies in", rounded=False)
            is_batch = small.dim() > 0 and (small.shape[0], large.shape[0]) == self._batches
            values[name] = Value(
                name=name,
                producer=producer.get(number),
                bytes_per_sample=size.bytes_per_sample,
                fixed_bytes=size.fixed_bytes,
                differentiable=self._small.recording.differentiable.get(number, False),
                batch_first=is_batch and small.shape[1:] == large.shape[1:],
                storage_bytes_per_sample=storage if storage > size.bytes_per_sample else 0,
                saved=size.saved,
                savers=size.savers,
            )
        return values

    # --- components

    def component(
        self,
        place: int,
        values: dict[str, Value],
        buffers: set[int],
        largest: TracedForward | None,
        untrained: frozenset[str],
    ) -> Component:
        """The numbers of one component.
        `buffers`: counted with earlier components; this one's are added. `largest`: a third forward, if it compares samples.
        `untrained`: parameters that get no gradient."""
        small, large, interval = self._small, self._large, self._small.intervals[place]
        collapsed, tensors = small.collapsed_intervals[place], small.recording.tensors
        calls = small.collapsed.ops[collapsed.start : collapsed.end]
        read = dict.fromkeys(number for op in calls for number in op.reads)
        state = {number: small.recording.state[number] for number in read if number in small.recording.state}
        new_buffers = [number for number, key in state.items() if key.kind == "buffer" and number not in buffers]
        buffers.update(new_buffers)
        inputs, outputs = (tuple(self._names[number] for number in numbers) for numbers in (interval.inputs, interval.outputs))
        what, pairs = f"what {interval.name} saves", (0, 0, 0)
        if largest is None:
            rate, fixed = self._split(small.saved_bytes(place), large.saved_bytes(place), what)
            division = self._division(place, (rate, fixed), tuple(values[name].batch_first for name in inputs))
        else:
            runs = (small, large, largest)
            fixed, rate, saved = square_size([run.saved_bytes(place) for run in runs], [run.batch for run in runs], what)
            grown = grow(small.operators_in[place], large.operators_in[place], large.batch - small.batch)
            division = Division(tuple(operator for _, operator in grown), (), ())
        # an output without samples along dim 0 is never converted, so it cannot leave as a part
        shardings = tuple(
            sharding
            for sharding in division.shardings
            if all(
                values[name].batch_first or made not in (PARTIAL, MAXIMUM)
                for name, made in zip(outputs, sharding.outputs, strict=True)
            )
        )
        if not self._sharded or interval.name == LOSS or any(op.function is call_module for op in calls):
            shardings = ()
        component = Component(
            name=interval.name,
            inputs=inputs,
            outputs=outputs,
            parameters=tuple(
                _parameter(key.name, tensors[number], untrained) for number, key in state.items() if key.kind == "parameter"
            ),
            buffer_bytes=sum(_size_bytes(tensors[number]) for number in new_buffers),
            saved_activation_bytes=rate,
            saved_fixed_bytes=fixed,
            operators=division.operators,
            shardings=shardings,
            paged_bytes=tuple(
                self._split(less, more, f"an array that {interval.name} saves", rounded=False)[0]
                for less, more in zip(small.paged_arrays(place), large.paged_arrays(place), strict=True)
            ),
        )
        if largest is None:
            peaks = self._peaks(component, place) if self._memory else CountedPeaks((), (), (), None)
            forward, backward, numbered, split_backward = peaks
            views = tuple((inputs[number], outputs[other]) for number, other in numbered)
            selective = self._selective(component, place, division.numbers, values)
        else:
            forward, backward, most = square_peaks([run.recorded(place) for run in runs], interval.name)
            pairs, selective, views, split_backward = (saved, *most), None, (), None
        return replace(
            component,
            forward_peaks=forward,
            backward_peaks=backward,
            pair_bytes=pairs,
            selective=selective,
            gradient_views=views,
            split_backward=split_backward,
            shardings=tuple(
                replace(sharding, **self._of_shards(component, place, sharding, recomputed=selective is not None))
                if self._memory
                else sharding
                for sharding in shardings
            ),
        )

    def with_half(self, component: Component, place: int) -> Component:
        """The component with what it and its shards take under the autocast that both forwards ran under."""
        small, large = self._small, self._large
        rounded = bool(small.recording.decisions) or any(component.pair_bytes)
        what = f"what {small.intervals[place].name} saves"
        rate, fixed = self._split(small.saved_bytes(place), large.saved_bytes(place), what, rounded=rounded)
        casts = small.saved_bytes(place, casts=True)
        forward, backward, _, split_backward = self._peaks(component, place)
        selective = None if component.selective is None else self._selective(component, place, None, {})
        if selective is not None and component.selective is not None:  # `cast_bytes` has the casts of weights made again
            again = selective.again[0], selective.again[1] - casts
            selective = replace(selective, again=again, operators=component.selective.operators)
        half = Footprint(
            saved_activation_bytes=rate,
            saved_fixed_bytes=fixed,
            cast_bytes=casts,
            forward_peaks=forward,
            backward_peaks=backward,
            selective=selective,
            split_backward=split_backward,
        )
        shardings = []
        for sharding in component.shardings:
            divided = self._once(
                ("divided", component.fingerprint, rate, fixed, casts, sharding.rule),
                partial(half_divided, *self._recorded(place), sharding, half, self._split),
            )
            counted = self._of_shards(component, place, sharding, recomputed=sharding.selective is not None)
            shardings.append(replace(sharding, half=replace(divided, **counted)))
        return replace(component, half=half, shardings=tuple(shardings))

    def _division(self, place: int, saved: tuple[int, int], cuttable: tuple[bool, ...]) -> Division:
        """The component at that place by its operators.
        `saved`: bytes that it saves, per sample and fixed. `cuttable`: per input whether dim 0 is the batch."""
        small, large = self._recorded(place)
        logits = self._logits & {name for name, _, _ in (*small.program.inputs, *small.program.outputs)}
        key = (
            saved,
            cuttable,
            tuple(number for number, (name, _, _) in enumerate(small.program.outputs) if name in logits),
            *((program_key(whole.program), whole.operators, whole.counted_inputs) for whole in (small, large)),
        )
        state = tuple(key.name for key, _ in small.program.state)
        first_state, division = self._once(key, lambda: (state, divide(small, large, self._split, saved, cuttable, logits)))
        renamed = dict(zip(first_state, state, strict=True))

        def mine(parts: tuple[ParameterShard, ...]) -> tuple[ParameterShard, ...]:
            return tuple(replace(part, name=renamed[part.name]) for part in parts)

        return division._replace(
            shardings=tuple(
                replace(sharding, parameters=mine(sharding.parameters), buffers=mine(sharding.buffers))
                for sharding in division.shardings
            )
        )

    def _peaks(self, component: Component, place: int) -> CountedPeaks:
        """Forward and backward of the component at that place, and its backward in halves."""
        try:
            return self._once(component.fingerprint, lambda: component_peaks(*self._recorded(place)))
        except RuntimeError as error:
            half = self._small.autocast is not None
            raise TraceError(backward_message(self._small.intervals[place].name, error, half=half)) from error

    def _of_shards(self, component: Component, place: int, sharding: Sharding, *, recomputed: bool) -> dict[str, Any]:
        """Fullest moments of the component's shards under one rule, and how they are recomputed by operator if they are."""
        key = component.fingerprint, sharding.rule
        forward, backward = self._once(("shards", *key), lambda: shard_peaks(*self._recorded(place), sharding))
        selective = None
        if recomputed:
            selective = self._once(("selective shards", *key), lambda: shard_selective(*self._recorded(place), sharding))
        return {"forward_peaks": forward, "backward_peaks": backward, "selective": selective}

    def _selective(
        self, component: Component, place: int, numbers: Sequence[int] | None, values: Mapping[str, Value]
    ) -> Selective[Size] | None:
        """How the component at that place is recomputed by operator; None where that keeps no less.
        `component`: as counted so far. `numbers`: of its calls, as in Division; None: it gains, and its operators are known."""
        names = (*component.inputs, *component.outputs)

        def count() -> tuple[Selective[Size] | None, tuple[str, ...]]:
            functions = [raw.function for raw in self._small.operators_in[place]]
            counted = selective_of(*self._recorded(place), functions, numbers)
            return counted if numbers is None or gains(counted, component, values) else None, names

        first, first_names = self._once(("selective", component.fingerprint), count)
        if first is None:
            return None
        renamed = dict(zip(first_names, names, strict=True))
        return replace(first, values=tuple(renamed[name] for name in first.values))


def _parameter(name: str, tensor: Tensor, untrained: frozenset[str]) -> Parameter:
    """A complex one counts as the pairs of real numbers that an optimizer updates."""
    parts = 2 if tensor.is_complex() else 1
    return Parameter(
        name=name,
        elements=parts * tensor.numel(),
        element_bytes=tensor.element_size() // parts,
        trainable=tensor.requires_grad and name not in untrained,
    )


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# --- programs that make the same calls --------------------------------------------------------------------------------

_PLAIN_TYPES = (int, float, str, bool, complex, bytes, type(None), type(Ellipsis))
_TORCH_TYPES = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def _canonical(value: Any) -> Hashable:
    """A recorded argument (a constant, Ref or Nested) in a form that can be compared and hashed.
    Values of two types differ, although Python calls 1, 1.0 and True equal. Objects of unknown types equal only themselves."""
    kind = type(value)
    if kind is Nested:
        return "nested", _canonical_function(value.rebuild), *map(_canonical, value.items)
    if kind is float:
        return "float", value.hex()
    if kind in _PLAIN_TYPES or kind in _TORCH_TYPES or kind is Ref:
        return kind, value
    if isinstance(value, tuple | list):
        return kind, *map(_canonical, value)
    if isinstance(value, dict):
        return kind, *((_canonical(key), _canonical(item)) for key, item in value.items())
    if isinstance(value, slice):
        return "slice", *map(_canonical, (value.start, value.stop, value.step))
    return "object", id(value)


def _canonical_function(function: Any) -> Hashable:
    """Equal for one function, and for two closures of the same code over equal values."""
    if isinstance(function, FunctionType) and function.__closure__:
        return function.__code__, *(_canonical(cell.cell_contents) for cell in function.__closure__)
    try:
        hash(function)
    except TypeError:
        return "object", id(function)
    return type(function), function


def calls_key(program: CallProgram) -> Hashable:
    """Equal for programs with the same calls between the same slots, on tensors of the same kinds."""
    calls = tuple(
        (
            _canonical_function(op.function),
            _canonical(op.arguments),
            _canonical(op.keywords),
            _canonical(op.outputs),
            op.context,
            op.drop,
        )
        for op in program.ops
    )
    return calls, program.tensors


def program_key(program: CallProgram) -> Hashable:
    """Equal for programs that make the same calls on tensors of the same kinds, whatever their values are named."""
    names = {key.name: place for place, (key, _) in enumerate(program.state)}
    return (
        calls_key(program),
        program.slots,
        tuple(value[1:] for value in program.inputs),
        tuple(value[1:] for value in program.outputs),
        tuple((key.kind, slot) for key, slot in program.state),
        tuple((id(constant), slot) for constant, slot in program.constants),
        tuple((names.get(name), slot) for name, slot in program.buffer_writes),
    )


# Parameters that a loss is not reached from: a pooler beside the head that is trained, the head of another task.
#
# Autograd gives them no gradient, so torch's optimizers leave them as they are, weight decay included. They are planned as
# frozen ones are: without gradient, optimizer state or communication.


def untrained(recording: Recording) -> tuple[str, ...]:
    """Names of the trainable parameters that autograd finds no way to from the loss.
    `recording`: with its loss. Where the forward depends on data, another batch may reach what this one does not: none."""
    if recording.decisions or recording.loss_value is None:
        return ()
    waiting, seen, reached = [recording.tensors[recording.loss_value].grad_fn], set[object](), set[int]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # where a backward leaves a gradient
            reached.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    parameters = ((key.name, recording.tensors[number]) for number, key in recording.state.items() if key.kind == "parameter")
    return tuple(name for name, tensor in parameters if tensor.requires_grad and id(tensor) not in reached)


def untrained_note(names: Sequence[str]) -> str:
    """What the answer says of parameters that get no gradient."""
    return f"no gradient of the loss reaches {first_few(names)}: not trained, as if frozen"
