"""The `Sharding`s of a component with the arrays each divides, measured by running one shard and the whole on fake
tensors.

A shard's operators and saved bytes are compared with the whole's, call by call. Left out: the small kernels that a shard
has and the whole has not (taking its piece of a full operand, masking tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from parsim.model.component import DividedSize, Footprint, Operator, OperatorShard, ParameterShard, Sharding, Share, Size
from parsim.model.runnable import CallProgram, environment_of, run_op
from parsim.model.shard.apply import localise
from parsim.model.shard.content import Refused, Undecided
from parsim.model.shard.propagate import Variant, propagate, variants, vocabulary_size
from parsim.model.trace.memory import autocast_as, like, local_program, state_of, with_local_tensors
from parsim.model.trace.operators import OperatorMode, RawOperator, SavedTensors, grow
from parsim.model.trace.recorder import storage_key
from parsim.private import FakeTensorMode
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
    """What a shard divides of one operator."""

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
    ways_to_divide = [
        divided
        for variant in variants(small.program, cuttable)
        if (divided := _divided(small, large, step, split, saved, variant, grown)) is not None
    ]
    counts: dict[tuple[Operator, tuple[OperatorDivision | None, ...]], int] = {}
    number_of: dict[int, int] = {}
    places: dict[Hashable, int] = {}
    for (key, operator), (raw, _) in zip(grown, raws, strict=True):
        mark = tuple(divided.cuts.get(key) for divided in ways_to_divide)
        counts[operator, mark] = counts.get((operator, mark), 0) + 1
        number_of[id(raw)] = places.setdefault((operator, mark), len(places))
    return Division(
        operators=tuple(replace(operator, count=count * operator.count) for (operator, _), count in counts.items()),
        shardings=tuple(
            _sharding(
                small.program,
                divided,
                vocabulary_size(small.program, divided.variant.result, logits),
                tuple(
                    OperatorShard(number=number, dim=cut.dim, activation_bytes=cut.activation_bytes)
                    for number, (_, mark) in enumerate(counts)
                    if (cut := mark[place]) is not None
                ),
            )
            for place, divided in enumerate(ways_to_divide)
        ),
        numbers=tuple(number_of.get(id(raw), -1) for raw in small.operators),
    )


def _sharding(program: CallProgram, divided: _Divided, size: int, operators: tuple[OperatorShard, ...]) -> Sharding:
    """`size`: of a vocabulary that may be cut into pieces that do not divide it; else 0."""
    result = divided.variant.result

    def parts(kind: str) -> tuple[ParameterShard, ...]:
        names = dict.fromkeys(key.name for key, _ in program.state if key.kind == kind)
        return tuple(replace(result.parts[name], size=size) for name in names if name in result.parts)

    return Sharding(
        rule=result.rule,
        limit=result.limit,
        inputs=tuple(content.text for content in divided.variant.inputs),
        outputs=result.outputs,
        parameters=parts("parameter"),
        buffers=parts("buffer"),
        operators=operators,
        saved_activation_bytes=divided.saved_activation_bytes,
        saved_fixed_bytes=divided.saved_fixed_bytes,
        size=size,
    )


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
    ways = divisors(variant.result.limit)[1]
    try:
        one, other = (propagate(whole.program, variant.inputs, variant.decided, ways) for whole in (small, large))
    except (Refused, Undecided):
        return None
    if (one.outputs, one.parts, one.limit) != (other.outputs, other.parts, other.limit):
        return None
    runs = []
    for whole, result in ((small, one), (large, other)):
        program, origins = localise(whole.program, result, 0, ways)
        program = with_local_tensors(program, variant.inputs, result.parts.values(), Share(1, ways))
        runs.append(_run_shard(whole, program, origins))
    local = dict(_numbered(grow(runs[0].operators, runs[1].operators, step)))
    cuts = {key: cut for key, operator in grown if key in local and (cut := _cut(operator, local[key], ways)) is not None}
    rates = split(runs[0].saved_bytes, runs[1].saved_bytes, f"what a shard of {small.program.name} saves")
    rate, fixed = (_whole_of(everything, part, ways) for everything, part in zip(saved, rates, strict=True))
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


def _run_shard(
    whole: WholeComponent, program: CallProgram, origins: Sequence[int | None], autocast: torch.dtype | None = None
) -> _ShardRun:
    """Shard 0 on fake tensors laid out in memory as the whole's.

    Args:
        program: of the shard, with local shapes. origins: per call the number of the recorded one it stands for.
    """
    position = 0
    with whole.fakes, autocast_as(autocast), torch.enable_grad():
        kinds = [program.tensors[slot] for _, slot, _ in program.inputs]
        inputs = [like(kind).requires_grad_(kind.differentiable) for kind in kinds]
        state = state_of(program)
        environment = environment_of(program, inputs, state.items())
        uncounted = [value for value, counted in zip(inputs, whole.counted_inputs, strict=True) if not counted]
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
    small: WholeComponent, large: WholeComponent, sharding: Sharding, half: Footprint[Size], autocast: torch.dtype, split: Split
) -> Footprint[DividedSize]:
    """What shards divide of the bytes that a component saves under autocast.

    Autocast halves what products read, and leaves the residual stream as it is. So the part that is divided is not that
    without autocast, halved.

    Args:
        small, large: recorded under `autocast` at two batches. half: what the whole saves. split: as for `divide`.
    """
    ways = divisors(sharding.limit)[1]
    programs = [local_program(whole.program, sharding, 0, ways) for whole in (small, large)]
    less, more = (
        _run_shard(whole, program, range(len(program.ops)), autocast)
        for whole, program in zip((small, large), programs, strict=True)
    )
    rate, fixed = split(less.saved_bytes, more.saved_bytes, f"what a shard of {small.program.name} saves under autocast")
    return Footprint(
        saved_activation_bytes=_whole_of(half.saved_activation_bytes, rate, ways),
        saved_fixed_bytes=_whole_of(half.saved_fixed_bytes, fixed, ways),
        cast_bytes=_whole_of(half.cast_bytes, less.cast_bytes, ways),
    )
