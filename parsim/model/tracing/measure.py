"""Work and memory of each component of a module per sample, counted on fake tensors at two batches.

Saved activations are the tensors that autograd keeps for the backward, found by saved-tensor hooks on the real autograd
nodes. Each storage counts once, in the first component that saves it. Parameters and buffers are not activations. Leaves
out what an allocator rounds up, and workspaces of kernels.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from parsim.errors import TraceError
from parsim.model.component import LOSS, PARTIAL, Component, Parameter, Sharding, Value
from parsim.model.memory.peaks import Peaks, Recorded, autocast_as, component_peaks
from parsim.model.model import Model
from parsim.model.runnable import CallProgram
from parsim.model.shard.divisions import WholeComponent, divide
from parsim.model.shard.peaks import ShardPeaks, shard_peaks
from parsim.model.tracing.cut import cut, final_values, programs, value_names
from parsim.model.tracing.operators import OperatorMode, RawOperator
from parsim.model.tracing.recorder import Recorder, Recording, storage_key
from parsim.model.tracing.recording import run_recorded
from parsim.model.tracing.sublayers import CallInterval
from parsim.model.tracing.whole_calls import assumptions, call_module, collapse, whole_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedForward:
    """One fake forward at `batch` samples, cut; lists run along `intervals`.

    Attributes:
        programs: per interval. saved: (number of the recorded call it is first saved in, storage, bytes).
        atomic: modules that run as a whole, each call of which is one in `collapsed`, cut into `collapsed_intervals`.
        saves: (number of a recorded call, storage that it saves), all of them. casts: storages that hold parameters in
            another precision. autocast: the half-precision type it ran under, or None.
    """

    batch: int
    recording: Recording
    intervals: list[CallInterval]
    atomic: frozenset[str]
    collapsed: Recording
    collapsed_intervals: list[CallInterval]
    programs: tuple[CallProgram, ...]
    operators: list[RawOperator]
    saved: list[tuple[int, int, int]]
    saves: set[tuple[int, int]]
    fakes: FakeTensorMode
    casts: frozenset[int]
    autocast: torch.dtype | None

    @property
    def even_batches(self) -> int:
        """Experts get equally many tokens at multiples of this batch."""
        return math.lcm(*(routing.divisor(self.batch) for routing in self.recording.routings.values()))

    def saved_bytes(self, interval: CallInterval, *, casts: bool = False) -> int:
        """Of activations, or of the casts of parameters."""
        return sum(size for op, key, size in self.saved if interval.start <= op < interval.end and (key in self.casts) == casts)

    def recorded(self, place: int) -> Recorded:
        """One component."""
        counted = tuple(number for number, own in enumerate(self.whole(place).counted_inputs) if own)
        return Recorded(self.programs[place], self.fakes, self.batch, self.autocast, counted)

    def savers(self, storage: int) -> tuple[str, ...]:
        """The components that save a storage, in the order in which they run."""
        calls = [op for op, key in self.saves if key == storage]
        return tuple(interval.name for interval in self.intervals if any(interval.start <= op < interval.end for op in calls))

    def whole(self, place: int) -> WholeComponent:
        """One component, its calls counted from its first."""
        interval = self.intervals[place]
        saved = {key for op, key, _ in self.saved if interval.start <= op < interval.end}
        tensors = self.recording.tensors
        return WholeComponent(
            program=self.programs[place],
            fakes=self.fakes,
            operators=[
                replace(raw, op=raw.op - interval.start) for raw in self.operators if interval.start <= raw.op < interval.end
            ],
            counted_inputs=tuple(storage_key(tensors[number]) in saved for number in interval.inputs),
        )


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

    `example`, `answers`: as for `run_recorded`.
    """
    whole: frozenset[str] = frozenset()
    watchers: list[_Watch] = []

    def watch(recorder: Recorder) -> contextlib.AbstractContextManager[None]:
        watchers.append(_Watch(recorder))
        return watchers[0].open()

    with autocast_as(autocast):
        recording = run_recorded(module, args, kwargs, loss=loss, watch=watch, example=example, answers=answers)
        if recording.decisions:
            other = run_recorded(module, args, kwargs, loss=loss, skew=True, example=example)
            whole = whole_modules(recording, other, module)
    first = recording.tensors[recording.inputs[0][1]]
    collapsed = collapse(recording, whole, module)
    cuts = cut(collapsed.recording, module, granularity, whole)
    intervals = [replace(entry, start=collapsed.starts[entry.start], end=collapsed.starts[entry.end]) for entry in cuts]
    return TracedForward(
        batch=first.shape[0],
        recording=recording,
        intervals=intervals,
        atomic=whole,
        collapsed=collapsed.recording,
        collapsed_intervals=cuts,
        programs=programs(recording, intervals),
        operators=watchers[0].mode.operators,
        saved=watchers[0].saved,
        saves=watchers[0].saves,
        fakes=watchers[0].recorder.fakes,
        casts=frozenset(watchers[0].mode.casts),
        autocast=autocast,
    )


class _Watch:
    """Operators and saved tensors of a forward, by the number of the recorded call they happen in."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        tensors = recorder.recording.tensors
        state = {storage_key(tensors[number]) for number in recorder.recording.state}
        frozen = any(
            key.kind == "parameter" and not tensors[number].requires_grad for number, key in recorder.recording.state.items()
        )
        self.mode = OperatorMode(lambda: recorder.current, state, lambda: recorder.has_gradients, frozen=frozen)
        self.saved: list[tuple[int, int, int]] = []
        self.saves: set[tuple[int, int]] = set()
        self._seen = set(state)
        self._alive: list[Tensor] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept), self.mode:
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        self.saves.add((self.recorder.current, key))
        if key not in self._seen:
            self._seen.add(key)
            self._alive.append(tensor)
            self.saved.append((self.recorder.current, key, tensor.untyped_storage().nbytes()))
        return tensor


def combine(small: TracedForward, large: TracedForward, *, name: str, granularity: str, source: str) -> Model:
    """Numbers per sample, and what does not grow, from two measurements at different batches.

    Raises TraceError if a size is not linear in the batch.
    """
    if [entry.name for entry in small.intervals] != [entry.name for entry in large.intervals]:
        raise TraceError(
            f"{name} has other components at batch {large.batch} than at {small.batch}; trace it at one batch only"
        )
    values = _values(small, large)
    counted_buffers: set[int] = set()
    peaks = Counted(small, large)
    components = tuple(_component(small, large, place, values, counted_buffers, peaks) for place in range(len(small.intervals)))
    names = value_names(small.recording, small.intervals)
    used = {value for component in components for value in component.inputs}
    return Model(
        name=name,
        granularity=granularity,
        components=components,
        values=tuple(values.values()),
        inputs=tuple(input_name for input_name, _ in small.recording.inputs if input_name in used),
        outputs=tuple(names[number] for number in final_values(small.recording) if number in names),
        source=source,
        assumptions=assumptions(small.recording),
    )


def _can_leave(sharding: Sharding, outputs: Sequence[Value]) -> bool:
    """Whether every output can go on as shards make it: one without samples along dim 0 is never converted."""
    return all(value.batch_first or makes != PARTIAL for value, makes in zip(outputs, sharding.outputs, strict=True))


class Counted:
    """The fullest moments of components and their shards, counted once for all that are alike."""

    def __init__(self, small: TracedForward, large: TracedForward) -> None:
        self._small, self._large = small, large
        self._components: dict[str, tuple[Peaks, Peaks]] = {}
        self._shards: dict[tuple[str, str], tuple[ShardPeaks, ShardPeaks]] = {}

    def of_component(self, component: Component, place: int) -> tuple[Peaks, Peaks]:
        """Forward and backward of the component at that place."""
        key = component.fingerprint
        if key not in self._components:
            self._components[key] = component_peaks(self._small.recorded(place), self._large.recorded(place))
        return self._components[key]

    def of_shards(self, component: Component, place: int, sharding: Sharding) -> tuple[ShardPeaks, ShardPeaks]:
        """The same of its shards under one rule."""
        key = component.fingerprint, sharding.rule
        if key not in self._shards:
            self._shards[key] = shard_peaks(self._small.recorded(place), self._large.recorded(place), sharding)
        return self._shards[key]


def split(small: int, large: int, batches: tuple[int, int], what: str, *, rounded: bool = False) -> tuple[int, int]:
    """(per sample, fixed) of a size at two batches. `rounded`: sizes that rest on assumptions need not be linear exactly."""
    if rounded:
        rate = max(0, round((large - small) / (batches[1] - batches[0])))
        return rate, max(0, small - rate * batches[0])
    rate, rest = divmod(large - small, batches[1] - batches[0])
    fixed = small - rate * batches[0]
    if rest or rate < 0 or fixed < 0:
        raise TraceError(
            f"{what} takes {small} bytes at batch {batches[0]} and {large} at {batches[1]}: not linear in the batch, so "
            f"there is no number per sample; keep samples independent of one another in the forward"
        )
    return rate, fixed


def _values(small: TracedForward, large: TracedForward) -> dict[str, Value]:
    names = value_names(small.recording, small.intervals)
    others = {name: number for number, name in value_names(large.recording, large.intervals).items()}
    producer = {number: interval.name for interval in small.intervals for number in interval.outputs}
    saved = {key for _, key, _ in small.saved}
    found: dict[str, Value] = {}
    for number, name in names.items():
        one, other = small.recording.tensors[number], large.recording.tensors[others[name]]
        batches = (small.batch, large.batch)
        rate, fixed = split(nbytes(one), nbytes(other), batches, f"value {name}")
        storage, _ = split(one.untyped_storage().nbytes(), other.untyped_storage().nbytes(), batches, f"what {name} lies in")
        found[name] = Value(
            name=name,
            producer=producer.get(number),
            bytes_per_sample=rate,
            fixed_bytes=fixed,
            differentiable=small.recording.differentiable.get(number, False),
            batch_first=_is_batch_first(one, other, batches),
            storage_bytes_per_sample=storage if storage > rate else 0,
            saved=storage_key(one) in saved,
            savers=small.savers(storage_key(one)),
        )
    return found


def _is_batch_first(small: Tensor, large: Tensor, batches: tuple[int, int]) -> bool:
    """Dim 0 is the batch and no other dim grows with it."""
    return small.dim() > 0 and (small.shape[0], large.shape[0]) == batches and small.shape[1:] == large.shape[1:]


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _component(
    small: TracedForward,
    large: TracedForward,
    place: int,
    values: dict[str, Value],
    counted_buffers: set[int],
    peaks: Counted,
) -> Component:
    one, other = small.intervals[place], large.intervals[place]
    batches = (small.batch, large.batch)
    recording = small.recording
    names = value_names(recording, small.intervals)
    cut_one = small.collapsed_intervals[place]
    calls = small.collapsed.ops[cut_one.start : cut_one.end]
    read = dict.fromkeys(number for op in calls for number in op.reads)
    state = [number for number in read if number in recording.state]
    buffers = [number for number in state if recording.state[number].kind == "buffer" and number not in counted_buffers]
    counted_buffers.update(buffers)
    rounded = bool(small.recording.decisions)
    rate, fixed = split(small.saved_bytes(one), large.saved_bytes(other), batches, f"what {one.name} saves", rounded=rounded)
    operators, shardings = divide(
        small.whole(place),
        large.whole(place),
        large.batch - small.batch,
        lambda less, more, what: split(less, more, batches, what, rounded=rounded),
        (rate, fixed),
        [values[names[number]].batch_first for number in one.inputs],
    )
    shardings = tuple(
        sharding for sharding in shardings if _can_leave(sharding, [values[names[number]] for number in one.outputs])
    )
    if one.name == LOSS or any(op.function is call_module for op in calls):
        shardings = ()
    component = Component(
        name=one.name,
        inputs=tuple(names[number] for number in one.inputs),
        outputs=tuple(names[number] for number in one.outputs),
        parameters=tuple(
            Parameter(
                name=recording.state[number].name,
                elements=recording.tensors[number].numel(),
                element_bytes=recording.tensors[number].element_size(),
                trainable=recording.tensors[number].requires_grad,
            )
            for number in state
            if recording.state[number].kind == "parameter"
        ),
        buffer_bytes=sum(nbytes(recording.tensors[number]) for number in buffers),
        saved_activation_bytes=rate,
        saved_fixed_bytes=fixed,
        operators=operators,
        shardings=shardings,
    )
    forward, backward = peaks.of_component(component, place)
    counted = (peaks.of_shards(component, place, sharding) for sharding in shardings)
    return replace(
        component,
        forward_peaks=forward,
        backward_peaks=backward,
        shardings=tuple(
            replace(sharding, forward_peaks=first, backward_peaks=second)
            for sharding, (first, second) in zip(shardings, counted, strict=True)
        ),
    )
