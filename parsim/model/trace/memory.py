"""Memory of components and of their shards: live bytes counted on fake tensors, operator by operator.

Every size is linear in the batch, so two batches tell it; kept are the moments that can be the fullest for some batch.

Forward: what it has made by then. Backward: what is alive beyond what the forward had saved. The backward runs as in the
executor: the outputs' gradients are held until it ends, the inputs' are handed over, those of parameters are added to what is
there. The first half of a backward that puts off the gradients of parameters is counted behind a forward of its own: what
arrives at operators with parameters waits, with all that the forward saved below them.

Recomputation by operator: the two forwards are those of the executor (`parsim.model.autograd.recompute`), so the same outputs
are kept. A component stays as it is (None) where that keeps no less, or where it cannot be counted. That is with sizes that are
not linear in the batch, a loop over the samples, or a write into what it is given.

Shards: every size in a shard is a whole one or a piece of one. So it is affine in the share of a shard (1 / ways, or a little
more with padding) as it is in the batch, and two numbers of ways tell it.

Of a loss that compares all samples of a batch: fixed + rate * samples + pairs * samples ** 2, from three batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from parsim.errors import TraceError
from parsim.model.autograd.cut import InputEdge, Saved, StorageRef, backward_component, backward_inputs, enter, tensors_among
from parsim.model.autograd.recompute import FirstForward, KeptCalls, Repeat, first_forward, second_forward
from parsim.model.component import (
    Component,
    DividedSize,
    ParameterShard,
    Selective,
    Sharding,
    Share,
    Size,
    SplitBackward,
    Value,
)
from parsim.model.runnable import CallProgram, TensorKind, run_op
from parsim.model.shard.apply import content_of, shard_program
from parsim.model.shard.content import SHARD, Content
from parsim.model.shard.narrow import ways_of
from parsim.model.trace.fakes import CallWatch, NextCall, with_workspace
from parsim.model.trace.operators import OperatorMode, RawOperator

# Peak bytes of live tensors of this process, by watching every operator; an allocator calls these allocated.


_ONE_TENSOR = (Tensor, FakeTensor)


class LiveBytes(CallWatch):
    """While active, counts every storage an operator of this thread makes, from its birth to its death.

    `track` adds tensors made elsewhere (weights, buckets, receive buffers). `moments`: bytes alive right after each
    storage that was made. Every storage belongs to a line: that of `track`, or the current `line` when it was allocated.
    If its line is in `moving`, it changes to the `line` in which an operator first makes a view of it. Leaves out an
    operator's own scratch memory and what the C library keeps.
    """

    def __init__(self, moving: Collection[str] = ()) -> None:
        super().__init__()
        self._live: dict[int, tuple[int, str, StorageRef | None]] = {}
        self._ignored: set[int] = set()
        self._moving = moving
        self.line = ""
        self.current_bytes = 0
        self.peak_bytes = 0
        self.moments: list[int] = []

    def ignore(self, tensor: Tensor) -> None:
        """Never count this tensor's storage, nor views of it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._watch(storage, 0, "")
            self._ignored.add(storage._cdata)

    def track(self, tensor: Tensor, line: str = "") -> None:
        """Count the tensor's storage; of one that is known, what it has grown or shrunk by since."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._live:
            self._watch(storage, size, line)
        elif key in self._ignored or self._live[key][0] == size:
            return
        else:
            before, _, ref = self._live[key]
            self.current_bytes += size - before
            self._live[key] = size, line, ref
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        self.moments.append(self.current_bytes)

    def by_line(self) -> dict[str, int]:
        """Bytes alive now."""
        found: dict[str, int] = {}
        for size, line, _ in list(self._live.values()):
            found[line] = found.get(line, 0) + size
        return found

    def _watch(self, storage: torch.UntypedStorage, size: int, line: str) -> None:
        ref = StorageRef(storage, self._release)
        self._live[ref.key] = size, line, ref
        self.current_bytes += size

    def _release(self, ref: StorageRef) -> None:
        self.current_bytes -= self._live.pop(ref.key, (0, "", None))[0]
        self._ignored.discard(ref.key)

    def _seen(self, tensor: Tensor) -> None:
        """An operator has made it, or a view of it."""
        if self._moving:
            key = tensor.untyped_storage()._cdata
            size, line, ref = self._live.get(key, (0, "", None))
            if line in self._moving:
                self._live[key] = size, self.line, ref
        self.track(tensor, self.line)

    def around(self, call: NextCall, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the call, whose storages count from now on."""
        result = with_workspace(func, args, call(func, types, args, kwargs))
        if type(result) in _ONE_TENSOR:
            self._seen(result)
            return result
        for leaf in tensors_among((result,)):
            self._seen(leaf)
        return result


Peaks = tuple[Size, ...]
"""Moments."""
ShardPeaks = tuple[DividedSize, ...]

# --- sizes at two batches ---------------------------------------------------------------------------------------------


def lines(less: Sequence[int], more: Sequence[int], small: int, large: int) -> Peaks:
    """The envelope of moments' bytes at two batches; empty where they are not the same moments.

    Args:
        less, more: bytes at the batches `small` and `large`.
    """
    return upper_envelope(set(_sizes(less, more, (small, large)))) if len(less) == len(more) else ()


def _sizes(less: Sequence[int], more: Sequence[int], batches: tuple[int, int]) -> list[Size]:
    """(bytes per sample, fixed bytes) of moments at two batches."""
    small, large = batches
    rates = [(top - low) // (large - small) for low, top in zip(less, more, strict=True)]
    return [(rate, low - rate * small) for rate, low in zip(rates, less, strict=True)]


def upper_envelope(moments: set[Size]) -> Peaks:
    """Those (rate, fixed) that are the largest `rate * samples + fixed` for some number of samples >= 1."""
    best: list[Size] = []
    for rate, fixed in sorted(moments):
        while best and best[-1][1] <= fixed:
            best.pop()
        while len(best) > 1 and not _needed(best[-2], best[-1], (rate, fixed)):
            best.pop()
        best.append((rate, fixed))
    while len(best) > 1 and sum(best[0]) <= sum(best[1]):
        best.pop(0)
    return tuple(best)


def _needed(low: Size, middle: Size, high: Size) -> bool:
    """Whether the middle line rises above both others somewhere; slopes ascend, intercepts descend."""
    return (middle[1] - low[1]) * (high[0] - low[0]) > (high[1] - low[1]) * (middle[0] - low[0])


# --- forward and backward ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One component as recorded at so many samples.

    Attributes:
        autocast: the half-precision type it ran under, or None.
        counted_inputs: the inputs (by position) that are among its saved activations, so that its backward lets go of them.
        change: what to make of its program before it is counted.
    """

    program: CallProgram
    fakes: FakeTensorMode
    samples: int
    autocast: torch.dtype | None = None
    counted_inputs: tuple[int, ...] = ()
    change: Callable[[CallProgram], CallProgram] | None = None

    @property
    def counted_program(self) -> CallProgram:
        """What is counted: the program, or what `change` makes of it."""
        return self.program if self.change is None else self.change(self.program)


@contextlib.contextmanager
def autocast_as(half: torch.dtype | None) -> Any:
    """The CPU's autocast to `half`; nothing for None."""
    with torch.autocast("cpu", dtype=half) if half is not None else contextlib.nullcontext():
        yield


def like(kind: TensorKind) -> Tensor:
    """A new tensor of that shape and memory order. It is not a view: autocast keeps the cast of no weight that is one."""
    order: Sequence[int] = sorted(range(len(kind.shape)), key=lambda dim: -kind.stride[dim])
    tensor = torch.empty([kind.shape[dim] for dim in order], dtype=kind.dtype)
    return tensor.permute([list(order).index(dim) for dim in range(len(kind.shape))]).detach()


class CountedPeaks(NamedTuple):
    """Moments of one component. `views`: (input, output) by position, where the first's gradient is a part of the second's.

    `split`: its backward in halves; None: it has none.
    """

    forward: Peaks
    backward: Peaks
    views: tuple[tuple[int, int], ...]
    split: SplitBackward | None


def component_peaks(small: Recorded, large: Recorded) -> CountedPeaks:
    """Forward and backward of one component as recorded at two batches.

    Empty where the two recordings differ in more than the batch; of the backward, too, where there is none.
    """
    less, more = counted_moments(small), counted_moments(large)
    batches = small.samples, large.samples
    return CountedPeaks(
        forward=lines(less.forward, more.forward, *batches),
        backward=lines(less.backward, more.backward, *batches),
        views=less.views if less.views == more.views else (),
        split=_split_lines(less.split, more.split, batches),
    )


def _split_lines(less: SplitMoments | None, more: SplitMoments | None, batches: tuple[int, int]) -> SplitBackward | None:
    """None where the two batches differ in more than their sizes."""
    if less is None or more is None or len(less.inputs) != len(more.inputs):
        return None
    (waiting,) = lines([less.waiting], [more.waiting], *batches)
    return SplitBackward(peaks=lines(less.inputs, more.inputs, *batches), waiting=waiting)


class SplitMoments(NamedTuple):
    """The first half of a backward: bytes beyond the saved ones after every storage that it makes, and those that it leaves for
    the second half, without the gradients of inputs."""

    inputs: list[int]
    waiting: int


class Moments(NamedTuple):
    """After every storage that is made: bytes that the forward has made, and bytes beyond the saved ones in the backward.

    `views`: as in CountedPeaks. `split`: None where the backward has no halves.
    """

    forward: list[int]
    backward: list[int]
    views: tuple[tuple[int, int], ...] = ()
    split: SplitMoments | None = None


def counted_moments(recorded: Recorded) -> Moments:
    """Bytes at every moment of a component's forward and backward."""
    program = recorded.counted_program
    with recorded.fakes, torch.enable_grad():
        given = _given_to(program)
        with LiveBytes() as live:
            forward, record, made = _forward_of(recorded, program, given, live)
            if not any(record.edges):
                return Moments(forward, [])
            saved = live.current_bytes
            live.moments = []
            gradients = made()
            found = backward_component(record, gradients)
            backward = [moment - saved for moment in live.moments]
        halves = recorded.change is None and given.parameters and any(record.entries)
        split = _split_moments(recorded, program) if halves else None
        return Moments(forward, backward, _parts(found, gradients), split)


def _split_moments(recorded: Recorded, program: CallProgram) -> SplitMoments | None:
    """The half for inputs, behind a forward of its own: what is neither saved for the other half nor waits is let go.

    None where the graph allows no halves.
    """
    given = _given_to(program)
    with LiveBytes() as live:
        _, record, made = _forward_of(recorded, program, given, live)
        saved = live.current_bytes
        live.moments = []
        gradients = made()
        try:
            found, half = backward_inputs(record, given.parameters, gradients, [None] * len(record.entries))
        except RuntimeError:  # such as a part that is recomputed by torch's own means
            return None
        inputs = [moment - saved for moment in live.moments]
        del record, found, gradients
        waiting = live.current_bytes - saved
        del half
    return SplitMoments(inputs, waiting)


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """What a forward starts from: inputs, and where their gradients arrive; trained parameters; and a value per slot."""

    inputs: list[Tensor]
    entries: list[InputEdge | None]
    parameters: list[Tensor]
    environment: list[Any]


def _drop_gradient(parameter: Tensor) -> None:
    """Drop a gradient as if it had been added in place to what is there. (Of fake tensors torch adds out of place.)"""
    parameter.grad = None


def _given_to(program: CallProgram) -> _Given:
    given = _Given([], [], [], [None] * program.slots)
    for _, slot, differentiable in program.inputs:
        given.inputs.append(like(program.tensors[slot]))
        given.environment[slot], entry = enter(given.inputs[-1]) if differentiable else (given.inputs[-1], None)
        given.entries.append(entry)
    for key, slot in program.state:
        value = like(program.tensors[slot])
        if key.kind == "parameter" and program.tensors[slot].differentiable:
            value.requires_grad_().register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
            given.parameters.append(value)
        given.environment[slot] = value
    for constant, slot in program.constants:
        given.environment[slot] = constant
    return given


def _forward_of(
    recorded: Recorded, program: CallProgram, given: _Given, live: LiveBytes
) -> tuple[list[int], Saved, Callable[[], list[Tensor | None]]]:
    """A forward that lets go of what it was given: its moments, what its backward needs, how gradients of outputs are made."""
    environment = given.environment
    for place in recorded.counted_inputs:
        live.track(given.inputs[place])
    inputs = live.current_bytes
    live.moments = []
    for tensor in environment:
        if tensor is not None:
            live.ignore(tensor)
    with autocast_as(recorded.autocast):
        for op in program.ops:
            run_op(op, environment)
    del tensor
    given.inputs.clear()  # the executor holds inputs until the forward ends
    outputs = [environment[slot] for _, slot, _ in program.outputs]
    environment.clear()
    edges = tuple(
        torch.autograd.graph.get_gradient_edge(value) if isinstance(value, Tensor) and value.requires_grad else None
        for value in outputs
    )
    kinds = [None if edge is None else (value.shape, value.dtype) for edge, value in zip(edges, outputs, strict=True)]
    del outputs

    def made() -> list[Tensor | None]:
        return [None if kind is None else torch.ones(kind[0], dtype=kind[1]) for kind in kinds]

    return [moment - inputs for moment in live.moments], Saved(tuple(given.entries), edges), made


def _parts(found: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> tuple[tuple[int, int], ...]:
    """The (found, given) by position of which the first is a smaller part of the second's memory."""
    return tuple(
        (place, number)
        for place, part in enumerate(found)
        for number, whole in enumerate(given)
        if part is not None
        and whole is not None
        and part.untyped_storage()._cdata == whole.untyped_storage()._cdata
        and part.numel() < whole.numel()
    )


# --- recomputation by operator ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Bytes of one component at one batch.

    Attributes:
        inputs, outputs: per one whether its storage stays. kept, again: as in Selective. first, second: every moment.
        functions, repeated: of every kernel of the first forward its name, and whether it runs again.
    """

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    kept: int
    again: int
    first: list[int]
    second: list[int]
    functions: tuple[str, ...]
    repeated: tuple[bool, ...]


class _Program:
    """The calls of a component on tensors without values, as `forward_component` runs them."""

    def __init__(self, program: CallProgram) -> None:
        self.input_differentiable = tuple(differentiable for _, _, differentiable in program.inputs)
        self._program = program
        self._state = {slot: like(program.tensors[slot]) for _, slot in program.state}
        for key, slot in program.state:
            if key.kind == "parameter" and program.tensors[slot].differentiable:
                self._state[slot].requires_grad_()
        self.given = (*self._state.values(), *(constant for constant, _ in program.constants))
        self.buffers = tuple(self._state[slot] for key, slot in program.state if key.kind == "buffer")

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        program = self._program
        environment: list[Any] = [None] * program.slots
        for (_, slot, _), value in zip(program.inputs, inputs, strict=True):
            environment[slot] = value
        for slot, value in (*self._state.items(), *((slot, constant) for constant, slot in program.constants)):
            environment[slot] = value
        for op in program.ops:
            run_op(op, environment)
        return tuple(environment[slot] for _, slot, _ in program.outputs)


def _counts(recorded: Recorded, *, kernels: bool = False) -> _Counts:
    """Both forwards of a component, with its kernels if they are asked for. Raises TraceError where it cannot run twice."""
    program = recorded.counted_program
    with recorded.fakes, torch.enable_grad():
        forward = _Program(program)
        inputs = [like(program.tensors[slot]) for _, slot, _ in program.inputs]
        with LiveBytes() as live:
            for tensor in (*inputs, *forward.given):
                live.ignore(tensor)
            with autocast_as(recorded.autocast):  # each forward by itself: autocast keeps its casts until it ends
                calls, made = _first(forward, inputs, kernels=kernels)
            first, start = live.moments, live.current_bytes
            live.moments = []
            repeated = tuple(calls.calls[raw.op].repeat is Repeat.RUN for raw in made)
            read, stays, kept = calls.inputs, calls.outputs, calls.kept_bytes
            with autocast_as(recorded.autocast):
                saved = second_forward(forward, inputs, calls)
            del calls
            again = live.current_bytes - start
            second = [moment - start for moment in live.moments]
            del saved
    return _Counts(
        inputs=read,
        outputs=stays,
        kept=kept,
        again=again,
        first=first,
        second=second,
        functions=tuple(raw.function for raw in made),
        repeated=repeated,
    )


def _first(forward: _Program, inputs: Sequence[Tensor], *, kernels: bool) -> tuple[KeptCalls, list[RawOperator]]:
    """The first forward and its kernels, each with the number of its call. Nothing of the outputs stays but what is kept."""
    watch = FirstForward((*inputs, *forward.given))
    if not kernels:
        return first_forward(forward, inputs, watch, forward.buffers)[1], []
    calls = watch.calls
    with OperatorMode(lambda: len(calls), set()) as mode:
        return first_forward(forward, inputs, watch, forward.buffers)[1], mode.operators


def selective_of(
    small: Recorded, large: Recorded, functions: Sequence[str], numbers: Sequence[int] | None
) -> Selective[Size] | None:
    """A component as recorded at two batches.

    Args:
        functions: of the kernels that were recorded at the small batch. numbers: of each the operator that stands for it, or
            -1; None: operators are not asked for.

    Returns:
        None where it cannot be counted.
    """
    try:
        one, other = _counts(small, kernels=numbers is not None), _counts(large)
    except TraceError:
        return None
    batches = small.samples, large.samples
    if (one.inputs, one.outputs) != (other.inputs, other.outputs) or (
        numbers is not None and one.functions != tuple(functions)
    ):
        return None
    kept, again = _line(one.kept, other.kept, batches), _line(one.again, other.again, batches)
    first, second = lines(one.first, other.first, *batches), lines(one.second, other.second, *batches)
    counts: dict[int, int] = {}
    for number, runs in zip(numbers or (), one.repeated, strict=numbers is not None):
        if runs:
            counts[number] = counts.get(number, 0) + 1
    if kept is None or again is None or -1 in counts or not (first and second):
        return None
    named = zip(
        (*(name for name, _, _ in small.program.inputs), *(name for name, _, _ in small.program.outputs)),
        (*one.inputs, *one.outputs),
        strict=True,
    )
    return Selective(
        values=tuple(dict.fromkeys(name for name, stays in named if stays)),
        kept=kept,
        again=again,
        first_peaks=first,
        second_peaks=second,
        operators=tuple(sorted(counts.items())),
    )


def _line(small: int, large: int, batches: tuple[int, int]) -> Size | None:
    """(per sample, fixed) of a size at two batches; None if it is not linear."""
    rate, rest = divmod(large - small, batches[1] - batches[0])
    return None if rest else (rate, small - rate * batches[0])


def gains(selective: Selective[Size] | None, component: Component, values: Mapping[str, Value]) -> bool:
    """Whether a component keeps less per sample by operator than it saves otherwise.

    Args:
        selective: of the component. component: as counted. values: of its model.
    """
    if selective is None or not selective.operators:
        return False
    now, before = selective.kept[0], component.saved_activation_bytes
    for name in dict.fromkeys((*component.inputs, *component.outputs)):
        now += values[name].bytes_per_sample * (name in selective.values)
        before += values[name].bytes_per_sample * (component.name in (values[name].savers or ())[1:])
    return now < before


# --- shards -----------------------------------------------------------------------------------------------------------


def shard_peaks(small: Recorded, large: Recorded, sharding: Sharding) -> tuple[ShardPeaks, ShardPeaks]:
    """Forward and backward of the shards of one component as recorded at two batches.

    Empty where the two batches differ in more than their sizes; of the backward, too, where there is none.
    """

    def moments(recorded: Recorded) -> dict[str, list[int]]:
        counted = counted_moments(recorded)
        return {"forward": counted.forward, "backward": counted.backward}

    sizes, shares = _shard_sizes(small, large, sharding, moments), _shares(sharding)
    return ((), ()) if sizes is None else (fullest(sizes["forward"], shares), fullest(sizes["backward"], shares))


def shard_selective(small: Recorded, large: Recorded, sharding: Sharding) -> Selective[DividedSize] | None:
    """How the shards of a component are recomputed by operator; None where they cannot be counted.

    Args:
        small, large: the whole component. sharding: the rule.
    """

    def counts(recorded: Recorded) -> dict[str, list[int]]:
        count = _counts(recorded)
        return {"kept": [count.kept], "again": [count.again], "first": count.first, "second": count.second}

    try:
        sizes, shares = _shard_sizes(small, large, sharding, counts), _shares(sharding)
    except TraceError:
        return None
    if sizes is None:
        return None
    return Selective(
        kept=max(sizes["kept"]),
        again=max(sizes["again"]),
        first_peaks=fullest(sizes["first"], shares),
        second_peaks=fullest(sizes["second"], shares),
    )


def _shares(sharding: Sharding) -> list[Share]:
    return [sharding.share(ways) for ways in ways_of(sharding)]


def _shard_sizes(
    small: Recorded, large: Recorded, sharding: Sharding, count: Callable[[Recorded], Mapping[str, list[int]]]
) -> dict[str, set[DividedSize]] | None:
    """Sizes of a shard for every number of ways and samples, by what was counted.

    The first shard and those after it differ, which stand in with zeros for what the first contributes: both are counted.

    Args:
        count: moments of a program, by name.

    Returns:
        None where the two batches differ in more than their sizes.
    """
    widths = ways_of(sharding)[:2]
    found: dict[str, set[DividedSize]] = {}
    for shard in (0,) if shards_are_alike(small.program, sharding, widths[0]) else (0, 1):
        counted = {
            (ways, run.samples): count(replace(run, change=partial(local_program, sharding=sharding, shard=shard, ways=ways)))
            for ways in widths
            for run in (small, large)
        }
        for name in counted[widths[0], small.samples]:
            pairs = [(counted[ways, small.samples][name], counted[ways, large.samples][name]) for ways in widths]
            if any(len(less) != len(more) for less, more in pairs):
                return None
            sizes = [_sizes(less, more, (small.samples, large.samples)) for less, more in pairs]
            found.setdefault(name, set()).update(_affine(sizes, [sharding.share(ways) for ways in widths]))
    return found


def shards_are_alike(program: CallProgram, sharding: Sharding, ways: int) -> bool:
    """Whether the first shard makes the calls of the others, on other pieces: nobody stands in with zeros.

    Args:
        program: of the whole component. sharding: the rule. ways: how many shards.
    """
    first, second = (shard_program(program, sharding, shard, ways) for shard in (0, 1))
    return len(first.ops) == len(second.ops) and all(
        type(one.function) is type(other.function) for one, other in zip(first.ops, second.ops, strict=True)
    )


def local_program(program: CallProgram, sharding: Sharding, shard: int, ways: int) -> CallProgram:
    """The calls of one shard, with the tensors that it is given in their local shapes.

    Args:
        program: of the whole component. sharding: the rule. shard, ways: which of how many.
    """
    parts = (*sharding.parameters, *sharding.buffers)
    inputs = tuple(map(content_of, sharding.inputs))
    return with_local_tensors(shard_program(program, sharding, shard, ways), inputs, parts, sharding.share(ways))


def with_local_tensors(
    program: CallProgram, inputs: Sequence[Content], parts: Iterable[ParameterShard], share: Share
) -> CallProgram:
    """The calls of one shard, with the shapes that its inputs, parameters and buffers have there.

    Args:
        program: of the shard, with whole shapes. inputs: content per input. parts: what is cut of the state. share: of it.
    """
    cuts = {part.name: Content(SHARD, part.dim, part.blocks, part.runs) for part in parts}
    given = [(slot, content) for (_, slot, _), content in zip(program.inputs, inputs, strict=True)]
    tensors = list(program.tensors)
    for slot, content in (*given, *((slot, cuts[key.name]) for key, slot in program.state if key.name in cuts)):
        if content.form == SHARD:
            sizes = enumerate(tensors[slot].shape)
            shape = tuple(share.of(size) if dim == content.dim else size for dim, size in sizes)
            tensors[slot] = tensors[slot]._replace(shape=shape)
    return replace(program, tensors=tuple(tensors))


def _affine(lines: list[list[Size]], shares: list[Share]) -> Iterator[DividedSize]:
    """Per moment the bytes that are whole and those that are divided, from those at two numbers of ways.

    Where the last of a dim's entries is alone, copies fall away and the moments differ: then the fullest ones are paired.
    """
    if len(shares) == 1:  # a prime limit: no other ways exist
        yield from (DividedSize(rate, fixed, 0, 0) for rate, fixed in lines[0])
        return
    first = shares[0]
    if len(lines[0]) != len(lines[1]):
        lines = [sorted(upper_envelope(set(entry))) for entry in lines]
        longest = max(map(len, lines))
        lines = [entry + entry[-1:] * (longest - len(entry)) for entry in lines]
    for (rate, fixed), (other_rate, other_fixed) in zip(*lines, strict=True):
        divided_rate, divided_fixed = (_divided(rate, other_rate, *shares), _divided(fixed, other_fixed, *shares))
        yield DividedSize(rate - first.of(divided_rate), fixed - first.of(divided_fixed), divided_rate, divided_fixed)


def _divided(size: int, other: int, first: Share, second: Share) -> int:
    """The part that is divided of what has these sizes in shards with these shares."""
    return (size - other) * first.whole * second.whole // (first.own * second.whole - second.own * first.whole)


def fullest(peaks: Iterable[DividedSize], shares: list[Share]) -> ShardPeaks:
    """Those that are the fullest for some batch and some ways.

    Args:
        peaks: of a shard. shares: those that occur.
    """
    ordered, found = sorted(peaks), set[DividedSize]()
    for share in shares:
        lines: dict[Size, DividedSize] = {}
        for peak in ordered:
            line = peak.at(share)
            if line not in lines or peak in found:
                lines[line] = peak
        found.update(lines[line] for line in upper_envelope(set(lines)))
    return tuple(sorted(found))


# --- pairs of samples -------------------------------------------------------------------------------------------------


class SquareSize(NamedTuple):
    """Coefficients of one size."""

    fixed: int
    rate: int
    pairs: int


def compares_samples(less: Sequence[int], more: Sequence[int], batches: tuple[int, int]) -> bool:
    """Whether one of the sizes at two batches grows with the square of the batch.

    Args:
        less, more: bytes of the same storages at the smaller and the larger batch.
    """
    small, large = batches
    return len(less) == len(more) and any(
        one and one * large * large == other * small * small for one, other in zip(less, more, strict=True)
    )


def square_size(sizes: Sequence[int], batches: Sequence[int], what: str) -> SquareSize:
    """The one parabola through three sizes.

    Args:
        sizes: at the batches, which are equally far apart. what: has them, for messages.

    Raises:
        TraceError: the sizes are not of this form.
    """
    first, step = batches[0], batches[1] - batches[0]
    pairs, rest = divmod(sizes[2] - 2 * sizes[1] + sizes[0], 2 * step * step)
    slope, more = divmod(sizes[1] - sizes[0], step)
    rate = slope - pairs * (batches[0] + batches[1])
    if rest or more:
        raise TraceError(
            f"{what} takes {', '.join(map(str, sizes))} bytes at batches {', '.join(map(str, batches))}: neither linear in the "
            "batch nor with pairs of samples; keep samples independent of one another in the forward"
        )
    return SquareSize(sizes[0] - rate * first - pairs * first * first, rate, pairs)


def square_peaks(runs: Sequence[Recorded], name: str) -> tuple[Peaks, Peaks, tuple[int, int]]:
    """Forward and backward moments of a component as recorded at three batches, and the most that pairs add to either.

    Empty where the recordings differ in more than the batch.
    """
    counted = [(each.forward, each.backward) for each in map(counted_moments, runs)]
    batches = [run.samples for run in runs]
    peaks: list[Peaks] = []
    most: list[int] = []
    for lists in zip(*counted, strict=True):
        alike = len({len(entry) for entry in lists}) == 1
        sizes = [square_size(at, batches, f"a moment of {name}") for at in zip(*lists, strict=True)] if alike else []
        peaks.append(upper_envelope({(size.rate, size.fixed) for size in sizes}))
        most.append(max((0, *(size.pairs for size in sizes))))
    return peaks[0], peaks[1], (most[0], most[1])
