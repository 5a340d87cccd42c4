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
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
    ways_of,
)
from parsim.model.runnable import CallProgram, TensorKind, environment_of, run_op
from parsim.model.shard.apply import content_of, shard_program
from parsim.model.shard.content import SHARD, Content
from parsim.model.trace.fakes import CallWatch, with_workspace
from parsim.model.trace.operators import OperatorMode, RawOperator
from parsim.private import FakeTensor, FakeTensorMode

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
        sizes: dict[str, int] = {}
        for size, line, _ in list(self._live.values()):
            sizes[line] = sizes.get(line, 0) + size
        return sizes

    def _watch(self, storage: torch.UntypedStorage, size: int, line: str) -> None:
        ref = StorageRef(storage, self._release)
        self._live[ref.key] = size, line, ref
        self.current_bytes += size

    def _release(self, ref: StorageRef) -> None:
        self.current_bytes -= self._live.pop(ref.key, (0, "", None))[0]
        self._ignored.discard(ref.key)

    def around(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the call, whose storages count from now on."""
        result = with_workspace(func, args, func(*args, **kwargs))
        for tensor in (result,) if type(result) in _ONE_TENSOR else tensors_among((result,)):
            if self._moving:
                key = tensor.untyped_storage()._cdata
                size, line, ref = self._live.get(key, (0, "", None))
                if line in self._moving:
                    self._live[key] = size, self.line, ref
            self.track(tensor, self.line)
        return result


Peaks = tuple[Size, ...]
"""Moments."""
ShardPeaks = tuple[DividedSize, ...]

# --- sizes at two batches ---------------------------------------------------------------------------------------------


def lines(less: Sequence[int], more: Sequence[int], small: int, large: int) -> Peaks:
    """The envelope of moments' bytes at two batches; empty where they are not the same moments.
    `less`, `more`: bytes at the batches `small` and `large`."""
    return upper_envelope(set(_sizes(less, more, (small, large)))) if len(less) == len(more) else ()


def _sizes(less: Sequence[int], more: Sequence[int], batches: tuple[int, int]) -> list[Size]:
    """(bytes per sample, fixed bytes) of moments at two batches."""
    small, large = batches
    rates = [(top - low) // (large - small) for low, top in zip(less, more, strict=True)]
    return [(rate, low - rate * small) for rate, low in zip(rates, less, strict=True)]


def upper_envelope(moments: set[Size]) -> Peaks:
    """The (rate, fixed) that are the largest `rate * samples + fixed` for some number of samples >= 1."""
    best: list[Size] = []
    for rate, fixed in sorted(moments):
        while best and best[-1][1] <= fixed:
            best.pop()
        while len(best) > 1:  # slopes ascend, intercepts descend: does the last line rise above both others somewhere?
            (low_rate, low_fixed), (last_rate, last_fixed) = best[-2:]
            if (last_fixed - low_fixed) * (rate - low_rate) > (fixed - low_fixed) * (last_rate - low_rate):
                break
            best.pop()
        best.append((rate, fixed))
    while len(best) > 1 and sum(best[0]) <= sum(best[1]):
        best.pop(0)
    return tuple(best)


# --- forward and backward ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One component as recorded at so many samples, under autocast to a half-precision type or without (None).

    Attributes:
        operators: `op` counted from the component's first call.
        counted_inputs: the inputs (by position) that are among its saved activations, so that its backward lets go of them.
        is_shard: the program is that of a shard, whose backward is not counted in halves.
    """

    program: CallProgram
    fakes: FakeTensorMode
    samples: int
    autocast: torch.dtype | None = None
    operators: tuple[RawOperator, ...] = ()
    counted_inputs: tuple[int, ...] = ()
    is_shard: bool = False


def autocast_as(half: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """The CPU's autocast to `half`; nothing for None."""
    return contextlib.nullcontext() if half is None else torch.autocast("cpu", dtype=half)


def like(kind: TensorKind) -> Tensor:
    """A new tensor of that shape and memory order. It is not a view: autocast keeps the cast of no weight that is one."""
    order = sorted(range(len(kind.shape)), key=lambda dim: -kind.stride[dim])
    tensor = torch.empty([kind.shape[dim] for dim in order], dtype=kind.dtype)
    return tensor.permute([order.index(dim) for dim in range(len(order))]).detach()


class CountedPeaks(NamedTuple):
    """Moments of one component. `views`: (input, output) by position, where the first's gradient is a part of the second's.
    `split`: its backward in halves; None: it has none."""

    forward: Peaks
    backward: Peaks
    views: tuple[tuple[int, int], ...]
    split: SplitBackward | None


def component_peaks(small: Recorded, large: Recorded) -> CountedPeaks:
    """Forward and backward of one component as recorded at two batches.
    Empty where the two recordings differ in more than the batch; of the backward, too, where there is none."""
    less, more = counted_moments(small), counted_moments(large)
    batches = small.samples, large.samples
    split = None
    if less.inputs_first is not None and more.inputs_first is not None and len(less.inputs_first) == len(more.inputs_first):
        (waiting,) = lines([less.waiting], [more.waiting], *batches)
        split = SplitBackward(peaks=lines(less.inputs_first, more.inputs_first, *batches), waiting=waiting)
    return CountedPeaks(
        forward=lines(less.forward, more.forward, *batches),
        backward=lines(less.backward, more.backward, *batches),
        views=less.views if less.views == more.views else (),
        split=split,
    )


class Moments(NamedTuple):
    """After every storage that is made: bytes that the forward has made, and bytes beyond the saved ones in the backward.
    `views`: as in CountedPeaks. `inputs_first`: such bytes in the first half of a backward; None: it has no halves. `waiting`:
    bytes that this half leaves for the second one, without the gradients of inputs."""

    forward: list[int]
    backward: list[int]
    views: tuple[tuple[int, int], ...] = ()
    inputs_first: list[int] | None = None
    waiting: int = 0


def counted_moments(recorded: Recorded) -> Moments:
    """Bytes at every moment of a component's forward and backward."""
    with recorded.fakes, torch.enable_grad():
        given = _given_to(recorded.program)
        with LiveBytes() as live:
            forward, saved, gradients_of_outputs = _forward_of(recorded, given, live)
            if not any(saved.edges):
                return Moments(forward, [])
            start, live.moments = live.current_bytes, []
            gradients = gradients_of_outputs()
            arrived = backward_component(saved, gradients)
            backward = [moment - start for moment in live.moments]
        counted = Moments(forward, backward, _parts(arrived, gradients))
        if recorded.is_shard or not given.parameters or not any(saved.entries):
            return counted
        halves = _split_moments(recorded)
        return counted if halves is None else counted._replace(inputs_first=halves[0], waiting=halves[1])


def _split_moments(recorded: Recorded) -> tuple[list[int], int] | None:
    """The half for inputs, behind a forward of its own: what is neither saved for the other half nor waits is let go.
    None where the graph allows no halves. Else as `Moments.inputs_first` and `Moments.waiting`."""
    given = _given_to(recorded.program)
    with LiveBytes() as live:
        _, saved, gradients_of_outputs = _forward_of(recorded, given, live)
        start, live.moments = live.current_bytes, []
        gradients = gradients_of_outputs()
        try:
            arrived, half = backward_inputs(saved, given.parameters, gradients, [None] * len(saved.entries))
        except RuntimeError:  # such as a part that is recomputed by torch's own means
            return None
        moments = [moment - start for moment in live.moments]
        del saved, arrived, gradients
        waiting = live.current_bytes - start
        del half
    return moments, waiting


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
    inputs = [like(program.tensors[slot]) for _, slot, _ in program.inputs]
    state = state_of(program)
    parameters = [value for value in state.values() if value.requires_grad]
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
    entered = [enter(value) if flows else (value, None) for value, (_, _, flows) in zip(inputs, program.inputs, strict=True)]
    environment = environment_of(program, (value for value, _ in entered), state.items())
    return _Given(inputs, [edge for _, edge in entered], parameters, environment)


def state_of(program: CallProgram) -> dict[int, Tensor]:
    """Parameters and buffers without values, by slot."""
    return {
        slot: like(program.tensors[slot]).requires_grad_(key.kind == "parameter" and program.tensors[slot].differentiable)
        for key, slot in program.state
    }


def _forward_of(
    recorded: Recorded, given: _Given, live: LiveBytes
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
        for op in recorded.program.ops:
            run_op(op, environment)
    del tensor
    given.inputs.clear()  # the executor holds inputs until the forward ends
    outputs = [environment[slot] for _, slot, _ in recorded.program.outputs]
    environment.clear()
    edges = tuple(
        torch.autograd.graph.get_gradient_edge(value) if isinstance(value, Tensor) and value.requires_grad else None
        for value in outputs
    )
    kinds = [None if edge is None else (value.shape, value.dtype) for edge, value in zip(edges, outputs, strict=True)]
    del outputs

    def gradients_of_outputs() -> list[Tensor | None]:
        return [None if kind is None else torch.ones(kind[0], dtype=kind[1]) for kind in kinds]

    return [moment - inputs for moment in live.moments], Saved(tuple(given.entries), edges), gradients_of_outputs


def _parts(smaller: Sequence[Tensor | None], larger: Sequence[Tensor | None]) -> tuple[tuple[int, int], ...]:
    """The pairs of tensors, by position, of which the first is a smaller part of the second's memory."""
    return tuple(
        (place, number)
        for place, part in enumerate(smaller)
        for number, other in enumerate(larger)
        if part is not None
        and other is not None
        and part.untyped_storage()._cdata == other.untyped_storage()._cdata
        and part.numel() < other.numel()
    )


# --- recomputation by operator ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Bytes of one component at one batch.
    `inputs`, `outputs`: per one whether its storage stays. `kept`, `again`: as in Selective. `first`, `second`: every moment.
    `functions`, `repeated`: of every kernel of the first forward its name, and whether it runs again."""

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
        self._state = state_of(program)
        self.given = (*self._state.values(), *(constant for constant, _ in program.constants))
        self.buffers = tuple(self._state[slot] for key, slot in program.state if key.kind == "buffer")

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        program = self._program
        environment = environment_of(program, inputs, self._state.items())
        for op in program.ops:
            run_op(op, environment)
        return tuple(environment[slot] for _, slot, _ in program.outputs)


def _counts(recorded: Recorded, *, kernels: bool = False) -> _Counts:
    """Both forwards of a component, with its kernels if they are asked for. Raises TraceError where it cannot run twice."""
    program = recorded.program
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
            inputs_stay, outputs_stay, kept_bytes = calls.inputs, calls.outputs, calls.kept_bytes
            with autocast_as(recorded.autocast):
                saved = second_forward(forward, inputs, calls)
            del calls
            again = live.current_bytes - start
            second = [moment - start for moment in live.moments]
            del saved
    return _Counts(
        inputs=inputs_stay,
        outputs=outputs_stay,
        kept=kept_bytes,
        again=again,
        first=first,
        second=second,
        functions=tuple(raw.function for raw in made),
        repeated=repeated,
    )


def _first(forward: _Program, inputs: Sequence[Tensor], *, kernels: bool) -> tuple[KeptCalls, list[RawOperator]]:
    """The first forward and its kernels, each with the number of its call. Nothing of the outputs stays but what is kept."""
    watch = FirstForward((*inputs, *forward.given))
    calls = watch.calls
    mode = OperatorMode(lambda: len(calls), set())
    with mode if kernels else contextlib.nullcontext():
        return first_forward(forward, inputs, watch, forward.buffers)[1], mode.operators


def selective_of(
    small: Recorded, large: Recorded, functions: Sequence[str], numbers: Sequence[int] | None
) -> Selective[Size] | None:
    """A component as recorded at two batches.
    `functions`: of the kernels that were recorded at the small batch. `numbers`: of each the operator that stands for it, or
    -1; None: operators are not asked for. Returns None where it cannot be counted."""
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
    `selective`: of the component. `component`: as counted. `values`: of its model."""
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
    Empty where the two batches differ in more than their sizes; of the backward, too, where there is none."""

    def moments(recorded: Recorded) -> dict[str, list[int]]:
        counted = counted_moments(recorded)
        return {"forward": counted.forward, "backward": counted.backward}

    sizes = _shard_sizes(small, large, sharding, moments)
    return ((), ()) if sizes is None else (fullest(sizes["forward"], sharding), fullest(sizes["backward"], sharding))


def shard_selective(small: Recorded, large: Recorded, sharding: Sharding) -> Selective[DividedSize] | None:
    """How the shards of a component are recomputed by operator; None where they cannot be counted.
    `small`, `large`: the whole component."""

    def counts(recorded: Recorded) -> dict[str, list[int]]:
        count = _counts(recorded)
        return {"kept": [count.kept], "again": [count.again], "first": count.first, "second": count.second}

    try:
        sizes = _shard_sizes(small, large, sharding, counts)
    except TraceError:
        return None
    if sizes is None:
        return None
    return Selective(
        kept=max(sizes["kept"]),
        again=max(sizes["again"]),
        first_peaks=fullest(sizes["first"], sharding),
        second_peaks=fullest(sizes["second"], sharding),
    )


def _shard_sizes(
    small: Recorded, large: Recorded, sharding: Sharding, count: Callable[[Recorded], Mapping[str, list[int]]]
) -> dict[str, set[DividedSize]] | None:
    """Sizes of a shard for every number of ways and samples, by what was counted.
    `count`: moments of a program, by name. Returns None where the two batches differ in more than their sizes."""
    widths = ways_of(sharding)[:2]
    counted_shards = [0]
    first, second = (shard_program(small.program, sharding, shard, widths[0]).ops for shard in (0, 1))
    if len(first) != len(second) or any(
        type(one.function) is not type(other.function) for one, other in zip(first, second, strict=True)
    ):  # shards after the first stand in with zeros for what it contributes
        counted_shards.append(1)
    sizes: dict[str, set[DividedSize]] = {}
    for shard in counted_shards:
        counted = {
            (ways, run.samples): count(replace(run, program=local_program(run.program, sharding, shard, ways), is_shard=True))
            for ways in widths
            for run in (small, large)
        }
        for name in counted[widths[0], small.samples]:
            pairs = [(counted[ways, small.samples][name], counted[ways, large.samples][name]) for ways in widths]
            if any(len(less) != len(more) for less, more in pairs):
                return None
            per_ways = [_sizes(less, more, (small.samples, large.samples)) for less, more in pairs]
            sizes.setdefault(name, set()).update(_affine(per_ways, [sharding.share(ways) for ways in widths]))
    return sizes


def local_program(program: CallProgram, sharding: Sharding, shard: int, ways: int) -> CallProgram:
    """The calls of one shard of a whole component, with the tensors that it is given in their local shapes."""
    parts = (*sharding.parameters, *sharding.buffers)
    inputs = tuple(map(content_of, sharding.inputs))
    return with_local_tensors(shard_program(program, sharding, shard, ways), inputs, parts, sharding.share(ways))


def with_local_tensors(
    program: CallProgram, inputs: Sequence[Content], parts: Iterable[ParameterShard], share: Share
) -> CallProgram:
    """The calls of one shard, with the shapes that its inputs, parameters and buffers have there.

    `program`: of the shard, with whole shapes. `inputs`: content per input. `parts`: what is cut of the state. `share`: of it.
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
    Where the last of a dim's entries is alone, copies fall away and the moments differ: then the fullest ones are paired."""
    if len(shares) == 1:  # a prime limit: no other ways exist
        yield from (DividedSize(rate, fixed, 0, 0) for rate, fixed in lines[0])
        return
    first, second = shares
    if len(lines[0]) != len(lines[1]):
        lines = [sorted(upper_envelope(set(sizes))) for sizes in lines]
        longest = max(map(len, lines))
        lines = [sizes + sizes[-1:] * (longest - len(sizes)) for sizes in lines]

    def divided(size: int, other: int) -> int:
        """The part that is divided of what has these sizes in shards with these shares."""
        return (size - other) * first.whole * second.whole // (first.own * second.whole - second.own * first.whole)

    for (rate, fixed), (other_rate, other_fixed) in zip(*lines, strict=True):
        divided_rate, divided_fixed = divided(rate, other_rate), divided(fixed, other_fixed)
        yield DividedSize(rate - first.of(divided_rate), fixed - first.of(divided_fixed), divided_rate, divided_fixed)


def fullest(peaks: Iterable[DividedSize], sharding: Sharding) -> ShardPeaks:
    """The moments of a shard that are the fullest for some batch and some ways of the sharding."""
    ordered, best = sorted(peaks), set[DividedSize]()
    for ways in ways_of(sharding):
        lines: dict[Size, DividedSize] = {}
        for peak in ordered:
            line = peak.at(sharding.share(ways))
            if line not in lines or peak in best:
                lines[line] = peak
        best.update(lines[line] for line in upper_envelope(set(lines)))
    return tuple(sorted(best))


# --- pairs of samples -------------------------------------------------------------------------------------------------


class SquareSize(NamedTuple):
    """Coefficients of one size."""

    fixed: int
    rate: int
    pairs: int


def compares_samples(less: Sequence[int], more: Sequence[int], batches: tuple[int, int]) -> bool:
    """Whether one of the sizes of storages at two batches grows with the square of the batch."""
    small, large = batches
    return len(less) == len(more) and any(
        one and one * large * large == other * small * small for one, other in zip(less, more, strict=True)
    )


def square_size(sizes: Sequence[int], batches: Sequence[int], what: str) -> SquareSize:
    """The one parabola through three sizes.
    `sizes`: at the batches, which are equally far apart. `what`: has them, for messages. Raises TraceError: the sizes are not
    of this form."""
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
    Empty where the recordings differ in more than the batch."""
    counted = list(map(counted_moments, runs))
    batches = [run.samples for run in runs]

    def peaks(moments: list[list[int]]) -> tuple[Peaks, int]:
        if len(set(map(len, moments))) > 1:
            return (), 0
        sizes = [square_size(at, batches, f"a moment of {name}") for at in zip(*moments, strict=True)]
        return upper_envelope({(size.rate, size.fixed) for size in sizes}), max((0, *(size.pairs for size in sizes)))

    forward, forward_pairs = peaks([each.forward for each in counted])
    backward, backward_pairs = peaks([each.backward for each in counted])
    return forward, backward, (forward_pairs, backward_pairs)
