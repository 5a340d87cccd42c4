"""The `Sharding`s of a component with the arrays each divides, measured by running one shard and the whole on fake
tensors.

A shard's operators and saved bytes are compared with the whole's, call by call. Left out: the small kernels that a shard
has and the whole has not (taking its piece of a full operand, masking tokens).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from parsim.model.component import HalfComponent, HalfDivided, Operator, OperatorShard, ParameterShard, Sharding
from parsim.model.runnable import CallProgram, TensorKind, run_op
from parsim.model.shard.apply import localise
from parsim.model.shard.content import SHARD, Content, Refused, Undecided
from parsim.model.shard.propagate import Propagation, Variant, propagate, variants, vocabulary_size
from parsim.model.trace.fakes import CallWatch, NextCall, with_workspace
from parsim.model.trace.memory import autocast_as, like, local_program
from parsim.model.trace.operators import OperatorMode, RawOperator, grow
from parsim.model.trace.recorder import storage_key
from parsim.units import divisors

Split = Callable[[int, int, str], tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeComponent:
    """One component as measured whole at one batch.

    Attributes:
        operators: `op` counted from the component's first call.
        counted_inputs: per input whether its storage is among the component's saved activations.
    """

    program: CallProgram
    fakes: FakeTensorMode
    operators: list[RawOperator]
    counted_inputs: tuple[bool, ...]


class OperatorDivision(NamedTuple):
    """Of one operator what a shard divides."""

    dim: str
    activation_bytes: int


class Division(NamedTuple):
    """A component by its operators.

    Attributes:
        operators: per sample. shardings: of the component.
        numbers: per call of `WholeComponent.operators` the number of its operator; -1: it is part of a sum over a loop.
    """

    operators: tuple[Operator, ...]
    shardings: tuple[Sharding, ...]
    numbers: tuple[int, ...]


class _Divided(NamedTuple):
    variant: Variant
    cuts: dict[Hashable, OperatorDivision]
    saved_activation_bytes: int
    saved_fixed_bytes: int


def divide(
    small: WholeComponent,
    large: WholeComponent,
    step: int,
    split: Split,
    saved: tuple[int, int],
    cuttable: Sequence[bool],
    logits: Collection[str] = (),
) -> Division:
    """Operators per sample and shardings of a component measured at two batches that differ by `step` samples.

    Args:
        split: (bytes at the small batch, at the large one, what) -> (per sample, fixed). saved: what the whole saves, so.
        cuttable: per input whether dim 0 is the batch in both. logits: the values that the parts of a cross-entropy read.
    """
    raws = grow(small.operators, large.operators, step)
    grown = _numbered(raws)
    found = [
        divided
        for variant in variants(small.program, cuttable)
        if (divided := _divided(small, large, step, split, saved, variant, grown)) is not None
    ]
    counts: dict[tuple[Operator, tuple[OperatorDivision | None, ...]], int] = {}
    number_of: dict[int, int] = {}
    places: dict[Hashable, int] = {}
    for (key, operator), (raw, _) in zip(grown, raws, strict=True):
        mark = tuple(divided.cuts.get(key) for divided in found)
        counts[operator, mark] = counts.get((operator, mark), 0) + 1
        number_of[id(raw)] = places.setdefault((operator, mark), len(places))
    operators = tuple(replace(operator, count=count * operator.count) for (operator, _), count in counts.items())
    shardings = tuple(
        _sharding(
            small.program,
            divided,
            vocabulary_size(small.program, divided.variant.found, logits),
            tuple(
                OperatorShard(number=number, dim=cut.dim, activation_bytes=cut.activation_bytes)
                for number, (_, mark) in enumerate(counts)
                if (cut := mark[place]) is not None
            ),
        )
        for place, divided in enumerate(found)
    )
    return Division(operators, shardings, tuple(number_of.get(id(raw), -1) for raw in small.operators))


def _sharding(program: CallProgram, divided: _Divided, size: int, operators: tuple[OperatorShard, ...]) -> Sharding:
    """`size`: of a vocabulary that may be cut into pieces that do not divide it; else 0."""
    found = divided.variant.found

    def parts(kind: str) -> tuple[ParameterShard, ...]:
        names = dict.fromkeys(key.name for key, _ in program.state if key.kind == kind)
        return tuple(replace(found.parts[name], size=size) for name in names if name in found.parts)

    return Sharding(
        rule=found.rule,
        limit=found.limit,
        inputs=tuple(_text(content) for content in divided.variant.inputs),
        outputs=found.outputs,
        parameters=parts("parameter"),
        buffers=parts("buffer"),
        operators=operators,
        saved_activation_bytes=divided.saved_activation_bytes,
        saved_fixed_bytes=divided.saved_fixed_bytes,
        size=size,
    )


def _text(content: Content) -> str:
    return f"{SHARD}:{content.dim}" if content.form == SHARD else content.form


def _divided(
    small: WholeComponent,
    large: WholeComponent,
    step: int,
    split: Split,
    saved: tuple[int, int],
    variant: Variant,
    grown: list[tuple[Hashable, Operator]],
) -> _Divided | None:
    """None if the larger batch does not allow the same."""
    ways = divisors(variant.found.limit)[1]
    try:
        one, other = (propagate(whole.program, variant.inputs, variant.decided, ways) for whole in (small, large))
    except (Refused, Undecided):
        return None
    if (one.outputs, one.parts, one.limit) != (other.outputs, other.parts, other.limit):
        return None
    runs = [_run_shard(whole, variant.inputs, found, ways) for whole, found in ((small, one), (large, other))]
    local = dict(_numbered(grow(runs[0].operators, runs[1].operators, step)))
    cuts = {key: cut for key, operator in grown if key in local and (cut := _cut(operator, local[key], ways)) is not None}
    rates = split(runs[0].saved_bytes, runs[1].saved_bytes, f"what a shard of {small.program.name} saves")
    rate, fixed = (_whole_of(all_, part, ways) for all_, part in zip(saved, rates, strict=True))
    return _Divided(variant, cuts, rate, fixed)


def _whole_of(everything: int, local: int, ways: int) -> int:
    """The part that is divided, from what one of `ways` shards has left of everything."""
    return min(everything, max(0, everything - local) * ways // (ways - 1))


def _cut(whole: Operator, local: Operator, ways: int) -> OperatorDivision | None:
    sizes, local_sizes = dict(whole.shape), dict(local.shape)
    dims = [name for name in sizes if local_sizes.get(name) != sizes[name]]
    if len(dims) != 1 or local_sizes.get(dims[0], 0) * ways != sizes[dims[0]]:
        return None
    return OperatorDivision(dims[0], _whole_of(whole.activation_bytes, local.activation_bytes, ways))


def _numbered(grown: Sequence[tuple[RawOperator | None, Operator]]) -> list[tuple[Hashable, Operator]]:
    """By (call, function, which of them): the same for the whole and for a shard."""
    seen: dict[Hashable, int] = {}
    found: list[tuple[Hashable, Operator]] = []
    for place, (raw, operator) in enumerate(grown):
        call: Hashable = ("sum of a loop", place) if raw is None else (raw.op, raw.function)
        seen[call] = seen.get(call, 0) + 1
        found.append(((call, seen[call]), operator))
    return found


class _ShardRun(NamedTuple):
    operators: list[RawOperator]
    saved_bytes: int


def _run_shard(whole: WholeComponent, inputs: Sequence[Content], found: Propagation, ways: int) -> _ShardRun:
    """Shard 0 on fake tensors laid out in memory as the whole's."""
    program, origins = localise(whole.program, found, 0, ways)
    environment: list[Any] = [None] * program.slots
    uncounted: list[Tensor] = []
    with whole.fakes:
        for (_, slot, _), content, counted in zip(program.inputs, inputs, whole.counted_inputs, strict=True):
            environment[slot] = _like(program.tensors[slot], content, ways)
            if not counted:
                uncounted.append(environment[slot])
        state = []
        for key, slot in program.state:
            part = found.parts.get(key.name)
            content = Content("full") if part is None else Content(SHARD, part.dim, part.blocks, part.runs)
            environment[slot] = _like(program.tensors[slot], content, ways)
            state.append(environment[slot])
        for constant, slot in program.constants:
            environment[slot] = constant
        watch = _SavedBytes([*state, *uncounted])
        position = 0
        mode = OperatorMode(lambda: position, {storage_key(tensor) for tensor in state})
        with watch.open(), mode:
            for op, origin in zip(program.ops, origins, strict=True):
                position = -1 if origin is None else origin
                run_op(op, environment)
    return _ShardRun([raw for raw in mode.operators if raw.op >= 0], watch.size_bytes)


def half_divided(
    small: WholeComponent, large: WholeComponent, sharding: Sharding, half: HalfComponent, autocast: torch.dtype, split: Split
) -> HalfDivided:
    """What shards divide of the bytes that a component saves under autocast.

    Autocast halves what products read, and leaves the residual stream as it is. So the part that is divided is not that
    without autocast, halved.

    Args:
        small, large: recorded under `autocast` at two batches. half: what the whole saves. split: as for `divide`.
    """
    ways = divisors(sharding.limit)[1]
    (saved, casts), (more, _) = (_saved_by_shard(whole, sharding, ways, autocast) for whole in (small, large))
    rate, fixed = split(saved, more, f"what a shard of {small.program.name} saves under autocast")
    return HalfDivided(
        activation_bytes=_whole_of(half.saved_activation_bytes, rate, ways),
        fixed_bytes=_whole_of(half.saved_fixed_bytes, fixed, ways),
        cast_bytes=_whole_of(half.cast_bytes, casts, ways),
    )


def _saved_by_shard(whole: WholeComponent, sharding: Sharding, ways: int, autocast: torch.dtype) -> tuple[int, int]:
    """Bytes of activations and of casts of parameters that shard 0 saves."""
    program = local_program(whole.program, sharding, 0, ways)
    environment: list[Any] = [None] * program.slots
    with whole.fakes, autocast_as(autocast):
        slots = [slot for _, slot, _ in program.inputs]
        state = [slot for _, slot in program.state]
        for slot in (*slots, *state):
            environment[slot] = like(program.tensors[slot]).requires_grad_(program.tensors[slot].differentiable)
        uncounted = [environment[slot] for slot, counted in zip(slots, whole.counted_inputs, strict=True) if not counted]
        own = [environment[slot] for slot in state]
        for constant, slot in program.constants:
            environment[slot] = constant
        watch = _SavedBytes([*own, *uncounted])
        with watch.open(), _Casts(own) as cast:
            for op in program.ops:
                run_op(op, environment)
    casts = sum(size for key, size in watch.sizes.items() if key in cast.made)
    return watch.size_bytes - casts, casts


def _like(kind: TensorKind, content: Content, ways: int) -> Tensor:
    """A new tensor of the local shape, its dims in memory in the order of the recorded one's."""
    shape = [size // ways if content.form == SHARD and dim == content.dim else size for dim, size in enumerate(kind.shape)]
    order = sorted(range(len(shape)), key=lambda dim: -kind.stride[dim])
    tensor = torch.empty([shape[dim] for dim in order], dtype=kind.dtype)
    tensor = tensor.permute([order.index(dim) for dim in range(len(shape))])
    return tensor.requires_grad_(kind.differentiable)


class _Casts(CallWatch):
    """Notes casts of parameters and buffers. `made`: they themselves, by storage."""

    def __init__(self, state: Sequence[Tensor]) -> None:
        super().__init__()
        self._state = {storage_key(tensor) for tensor in state}
        self.made: dict[int, Tensor] = {}

    def around(self, call: NextCall, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the call."""
        result = with_workspace(func, args, call(func, types, args, kwargs))
        if func is torch.ops.aten._to_copy.default and storage_key(args[0]) in self._state:
            self.made[storage_key(result)] = result
        return result


class _SavedBytes:
    """Counts what autograd keeps, each storage once; those of `known` tensors not at all. `sizes`: by storage."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        self.sizes: dict[int, int] = {}
        self._seen = {storage_key(tensor) for tensor in known}
        self._alive: list[Tensor] = list(known)

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes.values())

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self._alive.append(tensor)
            self.sizes[key] = tensor.untyped_storage().nbytes()
        return tensor
