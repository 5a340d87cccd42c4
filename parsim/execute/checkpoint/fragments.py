"""Parts of tensors under the name of the whole: how ranks say which pieces they hold, and how the whole is made again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from parsim.errors import ExecutionError
from parsim.model.component import ParameterShard
from parsim.model.model import Model
from parsim.model.optimizers import COUNTERS
from parsim.model.runnable import CallProgram
from parsim.model.shard.apply import assemble
from parsim.program.buckets import HeldParameter


class Fragment(NamedTuple):
    """Elements `start` to `stop` (flat; stop -1: all) of shard `shard` of `ways`, which has `shape` (empty: as it comes).
    Shards are cut along `dim` in `blocks` runs (or `runs` of these sizes), as `parsim.model.shard.apply` does. `size`: of a
    dim whose pieces are padded; else 0."""

    dim: int = 0
    blocks: int = 1
    shard: int = 0
    ways: int = 1
    start: int = 0
    stop: int = -1
    shape: tuple[int, ...] = ()
    runs: tuple[int, ...] = ()
    size: int = 0

    @property
    def part(self) -> ParameterShard:
        return ParameterShard(name="", dim=self.dim, blocks=self.blocks, runs=self.runs, size=self.size)


def fragment_from(entries: Sequence[Any]) -> Fragment:
    values: Any = (tuple(entry) if isinstance(entry, list | tuple) else entry for entry in entries)
    return Fragment(*values)


WHOLE = Fragment()


def fragment_of(held: HeldParameter) -> Fragment:
    if held.part is None:
        return WHOLE
    return piece_of(held.part, held.shard, held.ways)


def piece_of(part: ParameterShard, shard: int, ways: int) -> Fragment:
    """Shard `shard` of `ways` of what is cut so."""
    return Fragment(dim=part.dim, blocks=part.blocks, shard=shard, ways=ways, runs=part.runs, size=part.size)


def is_per_element(value: object, key: str) -> TypeGuard[Tensor]:
    """Whether this entry of an optimizer's state has an element for each one of its parameter: all but COUNTERS. The number of
    dims does not tell: the momentum of a 0-dim parameter has none either."""
    return isinstance(value, Tensor) and key not in COUNTERS


def join(name: str, parts: Mapping[Fragment, Tensor]) -> Tensor:
    """The whole tensor of a name from its fragments. Raises ExecutionError: a fragment is missing."""
    shards: dict[int, dict[Fragment, Tensor]] = {}
    for fragment, tensor in parts.items():
        shards.setdefault(fragment.shard, {})[fragment] = tensor
    first = next(iter(parts))
    absent = [shard for shard in range(first.ways) if shard not in shards]
    if absent:
        raise ExecutionError(f"{name!r}: shard {absent[0]} of {first.ways} is missing")
    pieces = [_joined_range(name, shards[shard]) for shard in range(first.ways)]
    if first.ways == 1:
        return pieces[0]
    return assemble(pieces, first.part)


def _joined_range(name: str, parts: Mapping[Fragment, Tensor]) -> Tensor:
    ordered = sorted(parts.items(), key=lambda entry: entry[0].start)
    first, tensor = ordered[0]
    if first.stop < 0:
        return tensor
    reached = 0
    for fragment, _ in ordered:
        if fragment.start != reached:
            raise ExecutionError(f"{name!r}: elements {reached} to {fragment.start} are missing")
        reached = fragment.stop
    flat = torch.cat([entry.reshape(-1) for _, entry in ordered])
    size = math.prod(first.shape)
    if size != flat.numel():
        raise ExecutionError(f"{name!r}: {flat.numel()} of {size} elements are there")
    return flat.reshape(first.shape)


def join_state(name: str, parts: Mapping[Fragment, Mapping[str, Any]]) -> dict[str, Any]:
    """The optimizer state of a whole parameter: arrays joined, scalars (step counters) from any fragment."""
    first = next(iter(parts.values()))
    return {
        key: join(name, {fragment: state[key] for fragment, state in parts.items()}) if is_per_element(value, key) else value
        for key, value in first.items()
    }


def check_names(model: Model, recorded: Mapping[str, CallProgram]) -> None:
    """Raise ExecutionError where this rank's `recorded` programs have other names of values than the model that was planned, as
    where a forward iterates over a set. Ranks address what they exchange by these names."""
    for component in model.components:
        program = recorded[component.name]
        for kind, planned, here in (
            ("reads", component.inputs, [name for name, _, _ in program.inputs]),
            ("makes", component.outputs, [name for name, _, _ in program.outputs]),
        ):
            if list(dict.fromkeys(planned)) != list(dict.fromkeys(here)):
                raise ExecutionError(
                    f"{component.name} {kind} {', '.join(planned)} in the model that was planned, but {', '.join(here)} on "
                    "this rank: its forward runs in another order here, as one that iterates over a set does. Sort what it "
                    "iterates over, or plan and run with PYTHONHASHSEED=0 (parsim sets it for the ranks that it starts)"
                )
