"""What a component keeps, and what runs again, if it is recomputed by operator: counted on fake tensors at two batches.

The two forwards are those of the executor (`parsim.model.autograd.recompute`), so the same outputs are kept. A component stays
as it is (None) where that keeps no less, or where it cannot be counted. That is with sizes that are not linear in the batch, a
loop over the samples, or a write into what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parsim.errors import TraceError
from parsim.model.autograd.kept_calls import FirstForward, KeptCalls, Repeat
from parsim.model.autograd.recompute import first_forward, second_forward
from parsim.model.component import Component, Selective, Sharding, ShardPeak, ShardSelective, Value
from parsim.model.loops.counts import items_with, moments_with, size_with
from parsim.model.memory.live_memory import LiveBytes
from parsim.model.memory.peaks import Recorded, autocast_as, like, lines
from parsim.model.runnable import CallProgram, run_op
from parsim.model.shard.narrow import ways_of
from parsim.model.shard.peaks import affine, fullest, local_program, shards_are_alike
from parsim.model.tracing.operators import OperatorMode, RawOperator

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Of one component at one batch, bytes.

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
    return recorded.counted(partial(_counts_of, recorded, kernels), _together)


def _together(counts: list[_Counts], times: int) -> _Counts | None:
    """From the counts of shortened programs those of the whole."""
    sizes = [size_with([getattr(count, name) for count in counts], times) for name in ("kept", "again")]
    first, second = (moments_with([getattr(count, name) for count in counts], times) for name in ("first", "second"))
    kernels = items_with([list(zip(count.functions, count.repeated, strict=True)) for count in counts], times)
    stays = {(count.inputs, count.outputs) for count in counts}
    kept, again = sizes
    if kept is None or again is None or first is None or second is None or kernels is None or len(stays) > 1:
        return None
    functions, repeated = tuple(zip(*kernels, strict=True)) or ((), ())
    inputs, outputs = stays.pop()
    return _Counts(
        inputs=inputs,
        outputs=outputs,
        kept=kept,
        again=again,
        first=first,
        second=second,
        functions=functions,
        repeated=repeated,
    )


def _counts_of(recorded: Recorded, kernels: bool, program: CallProgram) -> _Counts:
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


def selective_of(small: Recorded, large: Recorded, functions: Sequence[str], numbers: Sequence[int] | None) -> Selective | None:
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


def _line(small: int, large: int, batches: Pair) -> Pair | None:
    """(per sample, fixed) of a size at two batches; None if it is not linear."""
    rate, rest = divmod(large - small, batches[1] - batches[0])
    return None if rest else (rate, small - rate * batches[0])


def shard_selective(small: Recorded, large: Recorded, sharding: Sharding) -> ShardSelective | None:
    """The same of the shards of a component, for every number of ways; None where they cannot be counted.

    Args:
        small, large: the whole component. sharding: the rule.
    """
    widths = ways_of(sharding)
    shares = [sharding.share(ways) for ways in widths]
    batches = small.samples, large.samples
    found: dict[str, set[ShardPeak]] = {"kept": set(), "again": set(), "first": set(), "second": set()}
    for shard in (0,) if shards_are_alike(small.program, sharding, widths[0]) else (0, 1):
        try:
            counted = {
                (ways, run.samples): _counts(
                    replace(run, change=partial(local_program, sharding=sharding, shard=shard, ways=ways))
                )
                for ways in widths[:2]
                for run in (small, large)
            }
        except TraceError:
            return None
        for ways in widths[:2]:
            one, other = counted[ways, batches[0]], counted[ways, batches[1]]
            if (len(one.first), len(one.second)) != (len(other.first), len(other.second)):
                return None
        for name, moments in found.items():
            at = {
                key: [count.kept] if name == "kept" else [count.again] if name == "again" else getattr(count, name)
                for key, count in counted.items()
            }
            moments.update(affine(at, widths[:2], shares[:2], batches))
    return ShardSelective(
        kept=max(found["kept"]),
        again=max(found["again"]),
        first_peaks=fullest(found["first"], shares),
        second_peaks=fullest(found["second"], shares),
    )


def gains(selective: Selective | None, component: Component, values: Mapping[str, Value]) -> bool:
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
