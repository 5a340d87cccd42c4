"""Live bytes while a component runs: counted on fake tensors, operator by operator.

Forward: what it has made by then. Backward: what is alive beyond what the forward had saved. The backward runs as in the
executor: the outputs' gradients are held until it ends, the inputs' are handed over, those of parameters are added to what is
there. Every moment's bytes are linear in the batch; kept are the moments that can be the largest for some batch.

The first half of a backward that puts off the gradients of parameters is counted behind a forward of its own: what arrives at
operators with parameters waits, with all that the forward saved below them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from parsim.errors import ModelError
from parsim.model.autograd.cut import InputEdge, Saved, backward_component, enter
from parsim.model.autograd.halves import backward_inputs
from parsim.model.component import SplitBackward
from parsim.model.loops.counts import moments_with, size_with
from parsim.model.loops.repeated_calls import Shortened
from parsim.model.memory.live_memory import LiveBytes
from parsim.model.runnable import CallProgram, TensorKind, run_op

Peaks = tuple[tuple[int, int], ...]
"""(bytes per sample, fixed bytes) of moments."""
CountedValue = TypeVar("CountedValue")


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One component as recorded at so many samples.

    Attributes:
        autocast: the half-precision type it ran under, or None.
        counted_inputs: the inputs (by position) that are among its saved activations, so that its backward lets go of them.
        shorter: its program with fewer groups of a loop. change: what to make of a program before it is counted.
    """

    program: CallProgram
    fakes: FakeTensorMode
    samples: int
    autocast: torch.dtype | None = None
    counted_inputs: tuple[int, ...] = ()
    shorter: Shortened | None = None
    change: Callable[[CallProgram], CallProgram] | None = None

    def counted(
        self, count: Callable[[CallProgram], CountedValue], together: Callable[[list[CountedValue], int], CountedValue | None]
    ) -> CountedValue:
        """What `count` says of the program: from shortened ones if that can be shown to be the same.

        Shards of a program make its calls, so they are counted with two numbers of groups, and the program itself with three.

        Args:
            together: from the counts of `shorter.programs` that of the whole; None: they do not tell.
        """
        change = self.change or (lambda program: program)
        if self.shorter is not None:
            with contextlib.suppress(ModelError):  # a sharding that only the whole loop has
                programs = self.shorter.programs[: 3 if self.change is None else 2]
                found = together([count(change(program)) for program in programs], self.shorter.times)
                if found is not None:
                    return found
        return count(change(self.program))


class CountedPeaks(NamedTuple):
    """Of one component. `views`: (input, output) by position, where the first's gradient is a part of the second's.

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


def lines(less: Sequence[int], more: Sequence[int], small: int, large: int) -> Peaks:
    """The envelope of moments' bytes at two batches; empty where they are not the same moments.

    Args:
        less, more: bytes at the batches `small` and `large`.
    """
    if len(less) != len(more):
        return ()
    rates = [(top - low) // (large - small) for low, top in zip(less, more, strict=True)]
    return upper_envelope({(rate, low - rate * small) for rate, low in zip(rates, less, strict=True)})


@contextlib.contextmanager
def autocast_as(half: torch.dtype | None) -> Any:
    """The CPU's autocast to `half`; nothing for None."""
    with torch.autocast("cpu", dtype=half) if half is not None else contextlib.nullcontext():
        yield


def upper_envelope(moments: set[tuple[int, int]]) -> Peaks:
    """Those (rate, fixed) that are the largest `rate * samples + fixed` for some number of samples >= 1."""
    best: list[tuple[int, int]] = []
    for rate, fixed in sorted(moments):
        while best and best[-1][1] <= fixed:
            best.pop()
        while len(best) > 1 and not _needed(best[-2], best[-1], (rate, fixed)):
            best.pop()
        best.append((rate, fixed))
    while len(best) > 1 and sum(best[0]) <= sum(best[1]):
        best.pop(0)
    return tuple(best)


def _needed(low: tuple[int, int], middle: tuple[int, int], high: tuple[int, int]) -> bool:
    """Whether the middle line rises above both others somewhere; slopes ascend, intercepts descend."""
    return (middle[1] - low[1]) * (high[0] - low[0]) > (high[1] - low[1]) * (middle[0] - low[0])


def _drop_gradient(parameter: Tensor) -> None:
    """As if it had been added in place to what is there. (Of fake tensors torch adds out of place.)"""
    parameter.grad = None


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
    """Of the whole program."""
    return recorded.counted(partial(_moments_of, recorded), _together)


def _together(counts: list[Moments], times: int) -> Moments | None:
    forward = moments_with([count.forward for count in counts], times)
    backward = moments_with([count.backward for count in counts], times)
    views = {count.views for count in counts}
    if forward is None or backward is None or len(views) > 1:
        return None
    splits = [count.split for count in counts if count.split is not None]
    if not splits:
        return Moments(forward, backward, views.pop())
    split = _split_together(splits, times) if len(splits) == len(counts) else None
    return None if split is None else Moments(forward, backward, views.pop(), split)


def _split_together(counts: Sequence[SplitMoments], times: int) -> SplitMoments | None:
    inputs = moments_with([count.inputs for count in counts], times)
    waiting = size_with([count.waiting for count in counts], times)
    return None if inputs is None or waiting is None else SplitMoments(inputs, waiting)


def _moments_of(recorded: Recorded, program: CallProgram) -> Moments:
    """Of one program in the place of the recorded one."""
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


def like(kind: TensorKind) -> Tensor:
    """A new tensor of that shape and memory order. It is not a view: autocast keeps the cast of no weight that is one."""
    order: Sequence[int] = sorted(range(len(kind.shape)), key=lambda dim: -kind.stride[dim])
    tensor = torch.empty([kind.shape[dim] for dim in order], dtype=kind.dtype)
    return tensor.permute([list(order).index(dim) for dim in range(len(kind.shape))]).detach()
