"""Cut a recording into components: contiguous intervals of its calls, so that running them in order is a topological order.

Granularity "layer": a component starts at each leaf module that owns parameters; what follows without parameters (activation,
pooling, residual add) joins it. Granularity "block": a component is a repeated block, or a leaf with a weight matrix outside
the blocks. A block is a child of a ModuleList or Sequential of modules that have children themselves. Granularity "sublayer":
blocks, cut after their residual adds (`parsim.model.trace.cut`). Calls that belong to neither (class token, flatten,
concatenation) join the component before them, or the first one. An in-place operation on what an earlier component made merges
the two: no boundary value is ever changed.

Values are numbered in the order in which later components read them: gemma3 makes its positions in the order of a set,
which follows Python's hash seed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from parsim.errors import TraceError
from parsim.model.component import LOSS
from parsim.model.model import GRANULARITIES
from parsim.model.runnable import CallProgram, Nested, Op, Ref, Runnable, TensorKind, renumber
from parsim.model.trace.recorder import Call, RecordedOp, Recording, storage_key

# Cut a block after its residual adds, so that a transformer block becomes its attention and its MLP.
#
# The *residual stream* is what enters the block, what embeddings make, the sums onto it, and all that is made of it without a
# weight matrix (norms, views). A residual add joins two activations, one of them in the stream, and is not a sum of attention
# scores and their bias. Calls after the last one stay with it if they use no parameters (the activation that ends a residual
# block of a convolutional network). Where a branch is normalised before its sum, the cut is before that norm. What a shard
# makes up to there is a summand, of which no norm can be taken. A branch is also cut after a product that makes narrow
# parameters of its own features (time step, B and C of a selective scan). Shards make summands of these, and go on with their
# features.


_ADDS = (Tensor.add, Tensor.add_, torch.add, Tensor.__add__, Tensor.__iadd__)
_SCORES = (functional.softmax, torch.softmax, Tensor.softmax, functional.scaled_dot_product_attention)
_PRODUCTS = (
    functional.linear,
    torch.addmm,
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    torch.baddbmm,
)
_SPLITS = (torch.split, Tensor.split, torch.chunk, Tensor.chunk)
_NORMS = (functional.layer_norm, functional.rms_norm, torch.mean, Tensor.mean, torch.var, Tensor.var)
_MOVES = (
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, Tensor.contiguous, Tensor.transpose, torch.transpose),
    *(Tensor.squeeze, Tensor.permute, Tensor.to, functional.dropout),
)


@dataclass(slots=True)
class CallInterval:
    """Calls `start` <= number < `end` form the component `name`; `inputs` and `outputs` are value numbers."""

    name: str
    start: int
    end: int
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


def sublayers(recording: Recording, block: CallInterval) -> list[CallInterval]:
    """The pieces of a block; the block itself if it has one.

    A piece is named after the innermost module around its weight matrices (layers.0.attention), or the first of them where
    that would be the whole block (layers.0.fc1).
    """
    adds = _residual_adds(recording, block)
    ends = [*_kept(recording, block, sorted({*adds, *_inner_sums(recording, block, adds)})), block.end]
    if len(ends) == 1:
        return [block]
    starts = [block.start, *ends[:-1]]
    return [CallInterval(_name(recording, block, start, end), start, end) for start, end in zip(starts, ends, strict=True)]


def _residual_adds(recording: Recording, block: CallInterval) -> list[int]:
    """Numbers of the calls after each residual add."""
    made: set[int] = set()
    stream: set[int] = set()
    found: list[int] = []
    for number in range(block.start, block.end):
        op = recording.ops[number]
        read = [entry for entry in op.reads if entry not in recording.state and entry not in recording.constants]
        stream.update(entry for entry in read if entry not in made)
        if _is_residual(op, read, stream) and not _are_scores(recording, block, number):
            found.append(_before_norm(recording, block, found[-1] if found else block.start, number) or number + 1)
            streams = True
        elif op.function is functional.embedding:
            streams = True
        else:
            streams = bool(read) and all(entry in stream for entry in read) and not _matrices(recording, op)
        outputs = [entry for _, entry in op.outputs]
        made.update(outputs)
        (stream.update if streams else stream.difference_update)(outputs)
    return found


def _inner_sums(recording: Recording, block: CallInterval, adds: Sequence[int]) -> list[int]:
    """Numbers of the calls after products of a branch's features whose narrower result is split, while the features go on."""
    inside: set[int] = set()
    found: list[int] = []
    ops = recording.ops
    for number in range(block.start, block.end):
        op = ops[number]
        outputs = [entry for _, entry in op.outputs]
        has_matrix = bool(_matrices(recording, op))
        if op.function is functional.linear and has_matrix and op.reads[0] in inside:
            given, (made, *_) = op.reads[0], outputs
            narrower = recording.tensors[made].shape[-1] < recording.tensors[given].shape[-1]
            later = ops[number + 1 : block.end]
            split = any(other.function in _SPLITS and len(other.outputs) > 1 and made in other.reads for other in later)
            if narrower and split and any(given in other.reads for other in later):
                found.append(number + 1)
        if number + 1 in adds:
            inside.difference_update(outputs)
        elif has_matrix or not inside.isdisjoint(op.reads):
            inside.update(outputs)
    return found


def _is_residual(op: RecordedOp, read: Sequence[int], stream: set[int]) -> bool:
    """A sum of two activations, one of them in the stream."""
    if op.function not in _ADDS or len(read) != 2 or any(type(value) is not Ref for value in op.arguments[:2]):
        return False
    return any(entry in stream for entry in read)


def _are_scores(recording: Recording, block: CallInterval, number: int) -> bool:
    """Whether the sum reaches a softmax or an attention without a product in between."""
    derived = {entry for _, entry in recording.ops[number].outputs}
    for op in recording.ops[number + 1 : block.end]:
        if derived.isdisjoint(op.reads):
            continue
        if op.function in _SCORES:
            return True
        if op.function not in _PRODUCTS and not _matrices(recording, op):
            derived.update(entry for _, entry in op.outputs)
    return False


def _before_norm(recording: Recording, block: CallInterval, start: int, number: int) -> int | None:
    """Where the branch that ends in this sum leaves its last matrix, if it is normalised after that; else None."""
    matrices = [place for place in range(start, number) if _matrices(recording, recording.ops[place])]
    if not matrices:
        return None
    end = matrices[-1] + 1
    derived = {entry for _, entry in recording.ops[matrices[-1]].outputs}
    normalised = False
    for op in recording.ops[end:number]:
        if not derived.isdisjoint(op.reads):
            derived.update(entry for _, entry in op.outputs)
            normalised |= op.function in _NORMS
    if not normalised:
        return None
    while recording.ops[end].function in _MOVES and not derived.isdisjoint(recording.ops[end].reads):
        end += 1
    return end


def _kept(recording: Recording, block: CallInterval, ends: Sequence[int]) -> list[int]:
    """Those with parameters on both sides; embeddings stay together."""
    kept: list[int] = []
    start = block.start
    for end in ends:
        before, after = recording.ops[start:end], recording.ops[end : block.end]
        if any(op.function is functional.embedding for op in after):
            continue
        if any(_parameters(recording, op) for op in before) and any(_parameters(recording, op) for op in after):
            kept.append(end)
            start = end
    return kept


def _parameters(recording: Recording, op: RecordedOp) -> list[int]:
    return [number for number in op.reads if number in recording.state and recording.state[number].kind == "parameter"]


def _matrices(recording: Recording, op: RecordedOp) -> list[int]:
    return [number for number in _parameters(recording, op) if recording.tensors[number].dim() >= 2]


def _name(recording: Recording, block: CallInterval, start: int, end: int) -> str:
    ops = recording.ops[start:end]
    numbers = [number for op in ops for number in _matrices(recording, op)]
    numbers = numbers or [number for op in ops for number in _parameters(recording, op)]
    owners = [recording.state[number].name.rpartition(".")[0].split(".") for number in numbers]
    shared = _beginning(owners)
    path, _, again = block.name.partition("#")
    below = ".".join(shared).startswith(f"{path}.")
    name = re.sub(r"\s", "_", ".".join(shared if below else owners[0]))
    return f"{name}#{again}" if again else name


def _beginning(paths: Sequence[Sequence[str]]) -> list[str]:
    """What all of them begin with."""
    return [steps[0] for steps in takewhile(lambda steps: len(set(steps)) == 1, zip(*paths, strict=False))]


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def cut(recording: Recording, module: nn.Module, granularity: str, whole: frozenset[str] = frozenset()) -> list[CallInterval]:
    """The components of a recording, in execution order, with what crosses their boundaries.

    Args:
        whole: modules inside which nothing is cut; their calls are one recorded call each.

    Raises TraceError for an unknown granularity or a forward without a torch call.
    """
    if granularity not in GRANULARITIES:
        raise TraceError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    if not recording.ops:
        raise TraceError(f"{type(module).__name__} makes no torch call in its forward; there is nothing to cut")
    labels = (_layer_labels if granularity == "layer" else _block_labels)(recording, module, whole)
    intervals = _intervals(recording, module, labels)
    if granularity == "sublayer":
        intervals = [piece for block in intervals for piece in sublayers(recording, block)]
    intervals = _merge_in_place(recording, intervals)
    _unique_names(intervals)
    _boundaries(recording, intervals)
    return intervals


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module.named_children() if name != "parametrizations"]


def _is_container(module: nn.Module) -> bool:
    """A Sequential, ModuleList or ModuleDict of at least two modules that have children themselves."""
    return isinstance(module, _CONTAINERS) and sum(bool(_children(child)) for _, child in _children(module)) >= 2


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() >= 2 for parameter in module.parameters())


def block_modules(root: nn.Module, whole: frozenset[str] = frozenset()) -> set[str]:
    """Qualified names of the modules at which a block-level component starts; none inside those that run as a whole."""
    found: set[str] = set()

    def contains_blocks(name: str, module: nn.Module) -> bool:
        return any(
            _is_container(inner)
            for key, inner in module.named_modules(prefix=name)
            if not any(key == entry or key.startswith(f"{entry}.") for entry in whole)
        )

    def descend(name: str, module: nn.Module) -> None:
        for key, child in _children(module):
            path = f"{name}.{key}" if name else key
            below = _children(child)
            if not below:
                if _has_matrix(child):
                    found.add(path)
            elif path in whole:
                found.add(path)
            elif contains_blocks(path, child):
                descend(path, child)
            elif isinstance(child, _CONTAINERS) and not isinstance(module, _CONTAINERS):
                found.update(f"{path}.{inner}" for inner, leaf in below if _has_matrix(leaf))
            elif _has_matrix(child) or any(True for _ in child.parameters()):
                found.add(path)

    name, module = "", root
    descend(name, module)
    while len(found) == 1 and not found & whole and _children(root.get_submodule(next(iter(found)))):
        name = found.pop()
        descend(name, root.get_submodule(name))
        if not found:
            found.add(name)
            break
    if not found and not _children(root):
        found.add("")
    return found


def _block_labels(recording: Recording, module: nn.Module, whole: frozenset[str]) -> list[int | None]:
    """Per recorded op the call of the outermost block around it."""
    blocks = block_modules(module, whole)

    def outermost(call: int | None) -> int | None:
        label = None
        while call is not None:
            if recording.calls[call].module in blocks:
                label = call
            call = recording.calls[call].parent
        return label

    return [outermost(op.call) for op in recording.ops]


def _layer_labels(recording: Recording, module: nn.Module, whole: frozenset[str]) -> list[int | None]:
    """Per recorded op the innermost call that owns parameters and called no other module, or runs as a whole."""
    parents = {call.parent for call in recording.calls}
    parents -= {number for number, call in enumerate(recording.calls) if call.module in whole}
    own = [
        number not in parents and next(module.get_submodule(call.module).parameters(), None) is not None
        for number, call in enumerate(recording.calls)
    ]
    return [op.call if op.call is not None and own[op.call] else None for op in recording.ops]


def _label_name(call: Call, module: nn.Module) -> str:
    name = re.sub(r"\s", "_", call.module) or type(module).__name__
    return name if call.number == 1 else f"{name}#{call.number}"


def _intervals(recording: Recording, module: nn.Module, labels: list[int | None]) -> list[CallInterval]:
    intervals: list[CallInterval] = []
    current: int | None = None
    last = len(recording.ops) if recording.loss_start is None else recording.loss_start
    for number in range(last):
        label = labels[number]
        if label is None or label == current:
            continue
        if current is not None and _both_embeddings(recording, module, current, label):
            continue
        call = recording.calls[label]
        intervals.append(CallInterval(_label_name(call, module), number if intervals else 0, last))
        if len(intervals) > 1:
            intervals[-2].end = number
        current = label
    if not intervals:
        intervals.append(CallInterval(type(module).__name__, 0, last))
    if recording.loss_start is not None:
        parts = recording.loss_parts or [(LOSS, last)]
        starts = [last, *(start for _, start in parts[1:]), len(recording.ops)]
        intervals += [CallInterval(name, start, end) for (name, _), start, end in zip(parts, starts, starts[1:], strict=False)]
    return intervals


def _both_embeddings(recording: Recording, module: nn.Module, one: int, other: int) -> bool:
    """Token, position and type embeddings side by side make one component."""
    return all(isinstance(module.get_submodule(recording.calls[call].module), nn.Embedding) for call in (one, other))


def _merge_in_place(recording: Recording, intervals: list[CallInterval]) -> list[CallInterval]:
    """Join the intervals from the one that made a storage to the one that changes it in place."""
    made: dict[int, int] = {}
    kept_state = {storage_key(recording.tensors[number]) for number in recording.state}
    joined = list(range(len(intervals)))
    for place, interval in enumerate(intervals):
        for op in recording.ops[interval.start : interval.end]:
            for number in op.mutated:
                key = storage_key(recording.tensors[number])
                if key in made and key not in kept_state:
                    first = made[key]
                    for between in range(first + 1, place + 1):
                        joined[between] = min(joined[between], joined[first])
            for _, number in op.outputs:
                made.setdefault(storage_key(recording.tensors[number]), place)
    merged: list[CallInterval] = []
    for place, interval in enumerate(intervals):
        if merged and joined[place] != place:
            merged[-1].end = interval.end
        else:
            merged.append(interval)
    return merged


def _unique_names(intervals: list[CallInterval]) -> None:
    """`loss` is kept for the loss; a repeated name gets a number."""
    seen: set[str] = set()
    for place, interval in enumerate(intervals):
        last = place == len(intervals) - 1
        name = interval.name
        if name == LOSS and not last:
            name = f"{LOSS}_"
        number = 2
        while name in seen:
            name = f"{interval.name}#{number}"
            number += 1
        seen.add(name)
        interval.name = name


def _boundaries(recording: Recording, intervals: list[CallInterval]) -> None:
    """Fill in which values enter and leave each interval.

    Outputs are in the order in which others read them, not in that of their making: a forward may iterate over a set.
    """
    producer: dict[int, int] = {}
    wanted: dict[int, dict[int, None]] = {}
    for place, interval in enumerate(intervals):
        inputs: dict[int, None] = {}
        for op in recording.ops[interval.start : interval.end]:
            for number in op.reads:
                if number in recording.state or number in recording.constants:
                    continue
                if producer.get(number) != place:
                    inputs[number] = None
                    if number in producer:
                        wanted.setdefault(producer[number], {})[number] = None
            for _, number in op.outputs:
                if number not in producer and number not in inputs:
                    producer[number] = place
        interval.inputs = list(inputs)
    for number in final_values(recording):
        if number in producer:
            wanted.setdefault(producer[number], {})[number] = None
    for place, interval in enumerate(intervals):
        interval.outputs = list(wanted.get(place, ()))


def final_values(recording: Recording) -> list[int]:
    """Value numbers that leave the model: the loss if there is one, otherwise every tensor of the output."""
    if recording.loss_value is not None:
        return [recording.loss_value]
    return list(dict.fromkeys(leaf.slot for leaf in recording.output_leaves if hasattr(leaf, "slot")))


def value_names(recording: Recording, intervals: list[CallInterval]) -> dict[int, str]:
    """`input:0`, `target`, and `component:0` for what each component makes, in order."""
    names = {number: name for name, number in recording.inputs}
    for interval in intervals:
        for place, number in enumerate(interval.outputs):
            names[number] = f"{interval.name}:{place}"
    return names


def runnables(recording: Recording, intervals: list[CallInterval], module: nn.Module) -> tuple[Runnable, ...]:
    """One Runnable per interval, bound to `module`."""
    return tuple(Runnable(program, module) for program in programs(recording, intervals))


def programs(recording: Recording, intervals: list[CallInterval]) -> tuple[CallProgram, ...]:
    """One Program per interval. What was assumed about the data is constant in it."""
    names = value_names(recording, intervals)
    writers = _buffer_writers(recording, intervals)
    return tuple(_program(recording, interval, names, writers.get(place, [])) for place, interval in enumerate(intervals))


def _buffer_writers(recording: Recording, intervals: list[CallInterval]) -> dict[int, list[tuple[str, int]]]:
    writers: dict[int, list[tuple[str, int]]] = {}
    for name, number in recording.buffer_writes.items():
        for place, interval in enumerate(intervals):
            if any(number == made for op in recording.ops[interval.start : interval.end] for _, made in op.outputs):
                writers.setdefault(place, []).append((name, number))
                break
    return writers


def _program(recording: Recording, interval: CallInterval, names: dict[int, str], writes: list[tuple[str, int]]) -> CallProgram:
    recorded = _measured(recording, recording.ops[interval.start : interval.end])
    slot: dict[int, int] = {}
    for number in (
        *interval.inputs,
        *(number for op in recorded for number in op.reads),
        *(number for op in recorded for _, number in op.outputs),
    ):
        slot.setdefault(number, len(slot))
    kept = {*interval.outputs, *(number for _, number in writes)}
    last_use: dict[int, int] = {}
    for place, op in enumerate(recorded):
        for number in (*op.reads, *(number for _, number in op.outputs)):
            last_use[number] = place
    drops: dict[int, list[int]] = {}
    for number, place in last_use.items():
        if number not in kept:
            drops.setdefault(place, []).append(slot[number])
    ops = tuple(
        Op(
            function=op.function,
            arguments=tuple(renumber(item, slot) for item in op.arguments),
            keywords=tuple((name, renumber(item, slot)) for name, item in op.keywords),
            outputs=tuple((path, slot[number]) for path, number in op.outputs),
            context=op.context,
            drop=tuple(drops.get(place, ())),
        )
        for place, op in enumerate(recorded)
    )
    differentiable = recording.differentiable
    return CallProgram(
        name=interval.name,
        ops=ops,
        slots=len(slot),
        inputs=tuple((names[number], slot[number], differentiable.get(number, False)) for number in interval.inputs),
        outputs=tuple((names[number], slot[number], differentiable.get(number, False)) for number in interval.outputs),
        state=tuple((recording.state[number], slot[number]) for number in slot if number in recording.state),
        constants=tuple(
            (known[number], slot[number])
            for known in (recording.constants, recording.assumed)
            for number in slot
            if number in known
        ),
        buffer_writes=tuple((name, slot[number]) for name, number in writes),
        tensors=tuple(_kind(recording.tensors[number]) for number in slot),
    )


def _measured(recording: Recording, ops: list[RecordedOp]) -> list[RecordedOp]:
    """The calls with what is assumed about the data in the place of what they would find out."""
    if not recording.assumed and all(op.measured is None for op in ops):
        return ops
    found = []
    for op in ops:
        if op.outputs and not op.mutated and all(number in recording.assumed for _, number in op.outputs):
            continue
        if op.measured is not None:
            function, arguments, keywords = op.measured
            numbers = {id(recording.tensors[number]): number for number in op.reads}
            op = replace(
                op,
                function=function,
                arguments=tuple(_with_refs(item, numbers) for item in arguments),
                keywords=tuple((name, _with_refs(item, numbers)) for name, item in keywords),
            )
        found.append(op)
    return found


def _with_refs(value: Any, numbers: dict[int, int]) -> Any:
    """The fakes of a recording as Refs; real masks and indices stay."""
    if isinstance(value, Tensor):
        return Ref(numbers[id(value)]) if id(value) in numbers else value
    if isinstance(value, tuple | list) and any(isinstance(item, Tensor) for item in value):
        return Nested(tuple if isinstance(value, tuple) else list, tuple(_with_refs(item, numbers) for item in value))
    return value


def _kind(tensor: Tensor) -> TensorKind:
    return TensorKind(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)
