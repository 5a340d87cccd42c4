"""One shard of a runnable component: the same calls on pieces, summands and full tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from parsim.errors import ModelError
from parsim.model.component import FULL, PARTIAL, ParameterShard, Sharding, check_ways
from parsim.model.runnable import PLAIN, CallProgram, Nested, Op, Ref, Runnable
from parsim.model.shard.content import SHARD, WHOLE, Content, Refused, ShardNumber, cut_along, operands_of
from parsim.model.shard.propagate import Propagation, propagate

# Pieces of parameters and buffers as a ParameterShard cuts them, and the whole again.


def piece(tensor: Tensor, part: ParameterShard, shard: int, ways: int) -> Tensor:
    """Shard `shard` of `ways`: from each of the runs of dim `part.dim` its piece; a copy.
    Raises ModelError if the dim does not divide."""
    if part.size:
        return padded_piece(tensor, part.dim, shard, ways)
    entries = tensor.shape[part.dim]
    if part.runs:
        if sum(part.runs) != entries or any(size % ways for size in part.runs):
            raise ModelError(
                f"{part.name}: dim {part.dim} has {entries} entries in runs of {part.runs}, not all of which divide by {ways}"
            )
        runs = torch.split(tensor, list(part.runs), part.dim)
        return torch.cat([run.chunk(ways, part.dim)[shard] for run in runs], part.dim)
    size, rest = divmod(entries, part.blocks * ways)
    if rest:
        raise ModelError(f"{part.name}: dim {part.dim} has {entries} entries, which do not divide into {part.blocks} x {ways}")
    blocks = _split(tensor, part.dim, (part.blocks, ways, size))
    return blocks.select(part.dim + 1, shard).flatten(part.dim, part.dim + 1).clone()


def padded_piece(tensor: Tensor, dim: int, shard: int, ways: int) -> Tensor:
    """Piece `shard` of `ways` equal ones along `dim`; zeros where the tensor ends before the last piece does. A copy."""
    size = tensor.shape[dim]
    most = -(-size // ways)
    start = min(shard * most, size)
    stop = min(start + most, size)
    entries = tensor.narrow(dim, start, stop - start)
    if stop - start == most:
        return entries.clone(memory_format=torch.contiguous_format)
    padding = entries.new_zeros((*entries.shape[:dim], most - (stop - start), *entries.shape[dim + 1 :]))
    return torch.cat([entries, padding], dim)


def assemble(pieces: Sequence[Tensor], part: ParameterShard) -> Tensor:
    """The whole from the pieces of all shards in order: inverse of `piece`."""
    if part.runs:
        local = [torch.split(entry, [size // len(pieces) for size in part.runs], part.dim) for entry in pieces]
        return torch.cat([torch.cat(run, part.dim) for run in zip(*local, strict=True)], part.dim)
    if part.size:
        return torch.cat(list(pieces), part.dim).narrow(part.dim, 0, part.size)
    runs = [_split(entry, part.dim, (part.blocks, entry.shape[part.dim] // part.blocks)) for entry in pieces]
    return torch.stack(runs, dim=part.dim + 1).flatten(part.dim, part.dim + 2)


def _split(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])


# The calls of one shard.


def shard_runnable(runnable: Runnable, sharding: Sharding, shard: int, ways: int) -> Runnable:
    """Shard `shard` of `ways` of a component; it runs (and goes through `autograd_cut`) like any Runnable.

    It reads the parameters and buffers of the same live module under the same names, where those that `sharding` divides must
    have been replaced by their pieces (`piece`). Inputs come as `sharding.inputs` says, outputs leave as `sharding.outputs`
    says. Gradients: of a full input and of an undivided parameter a summand; of a piece its own. `runnable`: recorded with
    whole shapes, at the number of samples the shard sees. Raises ModelError if `ways` does not divide the sharding's limit, or
    the component has no such sharding.
    """
    return Runnable(shard_program(runnable.program, sharding, shard, ways), runnable.module)


def shard_program(program: CallProgram, sharding: Sharding, shard: int, ways: int) -> CallProgram:
    """The calls of shard `shard` of `ways`; arguments and errors as for `shard_runnable`."""
    check_ways(program.name, sharding, ways)
    if not 0 <= shard < ways:
        raise ModelError(f"{program.name} has shards 0 to {ways - 1} of {ways}, got {shard}")
    parts = (*sharding.parameters, *sharding.buffers)
    wanted = {part.name: replace(part, size=0) for part in parts}
    mismatch = f"{program.name} as recorded does not have the sharding {sharding.rule}"
    try:
        propagation = _propagated(program, sharding.inputs, parts, ways)
    except Refused as error:
        raise ModelError(f"{mismatch}: {error}; trace the model again") from error
    if propagation.outputs != sharding.outputs or dict(propagation.parts) != wanted:
        raise ModelError(
            f"{mismatch}: it divides {sorted(propagation.parts)} to make {propagation.outputs}, the sharding {sorted(wanted)} "
            f"to make {sharding.outputs}; trace the model again"
        )
    return localise(program, propagation, shard, ways)[0]


@lru_cache(maxsize=32)
def _propagated(program: CallProgram, inputs: tuple[str, ...], parts: tuple[ParameterShard, ...], ways: int) -> Propagation:
    """What the calls of every shard work on. Counting asks for each of a few programs, batches and ways several times."""
    decided: dict[str, ParameterShard | None] = {key.name: None for key, _ in program.state}
    decided.update({part.name: part for part in parts})
    return propagate(program, tuple(map(content_of, inputs)), decided, ways)


def content_of(text: str) -> Content:
    """From the text of `Sharding.inputs`: "full" or "shard:d"."""
    return WHOLE if text == FULL else cut_along(int(text.removeprefix(f"{SHARD}:")))


def localise(
    program: CallProgram, propagation: Propagation, shard: int, ways: int
) -> tuple[CallProgram, tuple[int | None, ...]]:
    """The calls of one shard, and per call the number of the recorded one it stands for (None: it converts an operand)."""
    ops: list[Op] = []
    origins: list[int | None] = []
    slots = program.slots
    state = {slot for _, slot in program.state}
    for number, (op, outcome) in enumerate(zip(program.ops, propagation.outcomes, strict=True)):
        swap: dict[int, int] = {}
        for slot in operands_of(op):
            converter: Any = None
            as_what = outcome.converted.get(slot, WHOLE)
            if as_what.form == PARTIAL and shard:
                converter = nothing_like
            elif as_what.form == SHARD and slot not in state:
                part = ParameterShard(name="operand", dim=as_what.dim, blocks=as_what.blocks, runs=as_what.runs)
                converter = partial(piece, part=part, shard=shard, ways=ways)
            if converter is not None:
                outputs = (((), slots),)
                ops.append(replace(op, function=converter, arguments=(Ref(slot),), keywords=(), outputs=outputs, drop=()))
                origins.append(None)
                swap[slot] = slots
                slots += 1
        if swap or outcome.function or outcome.arguments is not None:
            keywords = op.keywords if outcome.arguments is None else ()
            op = replace(
                op,
                function=outcome.function or op.function,
                arguments=tuple(_local(item, swap, shard) for item in outcome.arguments or op.arguments),
                keywords=tuple((name, _local(item, swap, shard)) for name, item in keywords),
                drop=(*op.drop, *swap.values()),
            )
        ops.append(op)
        origins.append(number)
    moved: dict[int, int] = {}
    for (_, slot, flows), made in zip(program.outputs, propagation.outputs, strict=True):
        if not (shard and flows and made == FULL):
            continue
        ops.append(Op(without_gradient, (Ref(slot),), (), (((), slots),), PLAIN, (slot,)))
        origins.append(None)
        moved[slot] = slots
        slots += 1
    ends = tuple((name, moved.get(slot, slot), flows) for name, slot, flows in program.outputs)
    return replace(program, ops=tuple(ops), slots=slots, outputs=ends), tuple(origins)


def _local(template: Any, swap: Mapping[int, int], shard: int) -> Any:
    if type(template) is Ref:
        return Ref(swap.get(template.slot, template.slot))
    if type(template) is Nested:
        return Nested(template.rebuild, tuple(_local(item, swap, shard) for item in template.items))
    return shard if type(template) is ShardNumber else template


def _no_gradient(ctx: Any, *gradients: Any) -> Any:
    """The backward of what another shard takes care of: one zero seen as many, not absent."""
    return gradients[0].new_zeros(()).expand_as(gradients[0])


class _Nothing(torch.autograd.Function):
    """Zeros in place of a tensor that another shard contributes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return torch.zeros_like(value)

    backward = staticmethod(_no_gradient)


def nothing_like(value: Tensor) -> Tensor:
    """Zeros of the same shape, through which a gradient of zeros flows back."""
    result: Tensor = _Nothing.apply(value)  # type: ignore[no-untyped-call]
    return result


class _WithoutGradient(torch.autograd.Function):
    """A tensor of whose gradient another shard takes care."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    backward = staticmethod(_no_gradient)


def without_gradient(value: Tensor) -> Tensor:
    """A value that every shard makes whole, with a gradient of zeros: shard 0 takes the whole one."""
    result: Tensor = _WithoutGradient.apply(value)  # type: ignore[no-untyped-call]
    return result
