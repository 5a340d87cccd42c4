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
from itertools import pairwise, takewhile

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from parsim.errors import TraceError
from parsim.model.component import LOSS
from parsim.model.model import GRANULARITIES
from parsim.model.runnable import CallProgram, Op, Ref, Runnable, TensorKind, renumber
from parsim.model.trace.checks import qualified
from parsim.model.trace.recorder import RecordedOp, Recording, storage_key, template_of

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
    A piece is named after the innermost module around its weight matrices (layers.0.attention), or the first of them where that
    would be the whole block (layers.0.fc1). It has parameters, and embeddings stay together."""
    adds = _residual_adds(recording, block)
    ends: list[int] = []
    start = block.start
    for end in sorted({*adds, *_inner_sums(recording, block, adds)}):
        before, after = recording.ops[start:end], recording.ops[end : block.end]
        both = any(_parameters(recording, op) for op in before) and any(_parameters(recording, op) for op in after)
        if both and all(op.function is not functional.embedding for op in after):
            ends.append(end)
            start = end
    if not ends:
        return [block]
    edges = [block.start, *ends, block.end]
    return [CallInterval(_name(recording, block, start, end), start, end) for start, end in pairwise(edges)]


def _residual_adds(recording: Recording, block: CallInterval) -> list[int]:
    """Numbers of the calls after each residual add."""
    made: set[int] = set()
    stream: set[int] = set()
    ends: list[int] = []
    for number in range(block.start, block.end):
        op = recording.ops[number]
        read = [value for value in op.reads if value not in recording.state and value not in recording.constants]
        stream.update(value for value in read if value not in made)
        adds = op.function in _ADDS and len(read) == 2 and all(type(value) is Ref for value in op.arguments[:2])
        if adds and not stream.isdisjoint(read) and not _are_scores(recording, block, number):
            ends.append(_before_norm(recording, ends[-1] if ends else block.start, number) or number + 1)
            streams = True
        elif op.function is functional.embedding:
            streams = True
        else:
            streams = bool(read) and stream.issuperset(read) and not _matrices(recording, op)
        outputs = [value for _, value in op.outputs]
        made.update(outputs)
        (stream.update if streams else stream.difference_update)(outputs)
    return ends


def _inner_sums(recording: Recording, block: CallInterval, adds: Sequence[int]) -> list[int]:
    """Numbers of the calls after products of a branch's features whose narrower result is split, while the features go on."""
    inside: set[int] = set()
    ends: list[int] = []
    ops = recording.ops
    for number in range(block.start, block.end):
        op = ops[number]
        outputs = [value for _, value in op.outputs]
        has_matrix = bool(_matrices(recording, op))
        if op.function is functional.linear and has_matrix and op.reads[0] in inside:
            features, made = op.reads[0], outputs[0]
            narrower = recording.tensors[made].shape[-1] < recording.tensors[features].shape[-1]
            later = ops[number + 1 : block.end]
            split = any(other.function in _SPLITS and len(other.outputs) > 1 and made in other.reads for other in later)
            if narrower and split and any(features in other.reads for other in later):
                ends.append(number + 1)
        if number + 1 in adds:
            inside.difference_update(outputs)
        elif has_matrix or not inside.isdisjoint(op.reads):
            inside.update(outputs)
    return ends


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


def _before_norm(recording: Recording, start: int, number: int) -> int | None:
    """Where the branch that ends in this sum leaves its last matrix, if it is normalised after that; else None."""
    last = max((place for place in range(start, number) if _matrices(recording, recording.ops[place])), default=None)
    if last is None:
        return None
    end = last + 1
    derived = {value for _, value in recording.ops[last].outputs}
    normalised = False
    for op in recording.ops[end:number]:
        if not derived.isdisjoint(op.reads):
            derived.update(value for _, value in op.outputs)
            normalised |= op.function in _NORMS
    if not normalised:
        return None
    while recording.ops[end].function in _MOVES and not derived.isdisjoint(recording.ops[end].reads):
        end += 1
    return end


def _parameters(recording: Recording, op: RecordedOp) -> list[int]:
    return [number for number in op.reads if number in recording.state and recording.state[number].kind == "parameter"]


def _matrices(recording: Recording, op: RecordedOp) -> list[int]:
    return [number for number in _parameters(recording, op) if recording.tensors[number].dim() >= 2]


def _name(recording: Recording, block: CallInterval, start: int, end: int) -> str:
    ops = recording.ops[start:end]
    numbers = [number for op in ops for number in _matrices(recording, op)]
    numbers = numbers or [number for op in ops for number in _parameters(recording, op)]
    owners = [recording.state[number].name.rpartition(".")[0].split(".") for number in numbers]
    shared = [steps[0] for steps in takewhile(lambda steps: len(set(steps)) == 1, zip(*owners, strict=False))]
    path, _, again = block.name.partition("#")
    below = ".".join(shared).startswith(f"{path}.")
    name = re.sub(r"\s", "_", ".".join(shared if below else owners[0]))
    return f"{name}#{again}" if again else name


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def cut(recording: Recording, module: nn.Module, granularity: str, whole: frozenset[str] = frozenset()) -> list[CallInterval]:
    """The components of a recording, in execution order, with what crosses their boundaries.
    `whole`: modules inside which nothing is cut; their calls are one recorded call each. Raises TraceError for an unknown
    granularity or a forward without a torch call."""
    if granularity not in GRANULARITIES:
        raise TraceError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    if not recording.ops:
        raise TraceError(f"{type(module).__name__} makes no torch call in its forward; there is nothing to cut")
    intervals = _intervals(recording, module, _labels(recording, module, granularity, whole))
    if granularity == "sublayer":
        intervals = [piece for block in intervals for piece in sublayers(recording, block)]
    intervals = _merge_in_place(recording, intervals)
    _unique_names(intervals)
    boundaries(recording, intervals)
    return intervals


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module.named_children() if name != "parametrizations"]


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() >= 2 for parameter in module.parameters())


def _block_modules(root: nn.Module, whole: frozenset[str]) -> set[str]:
    """Qualified names of the modules at which a block-level component starts; none inside those that run as a whole."""
    blocks: set[str] = set()

    def has_blocks(name: str, module: nn.Module) -> bool:
        """Whether it holds, outside whole modules, a container of at least two modules that have children themselves."""
        for path, inner in module.named_modules(prefix=name):
            parents = [child for _, child in _children(inner) if _children(child)] if isinstance(inner, _CONTAINERS) else []
            if len(parents) >= 2 and not any(path == other or path.startswith(f"{other}.") for other in whole):
                return True
        return False

    def descend(name: str, module: nn.Module) -> None:
        for key, child in _children(module):
            path = qualified(name, key)
            below = _children(child)
            if not below:
                if _has_matrix(child):
                    blocks.add(path)
            elif path in whole:
                blocks.add(path)
            elif has_blocks(path, child):
                descend(path, child)
            elif isinstance(child, _CONTAINERS) and not isinstance(module, _CONTAINERS):
                blocks.update(f"{path}.{inner}" for inner, leaf in below if _has_matrix(leaf))
            elif next(child.parameters(), None) is not None:
                blocks.add(path)

    descend("", root)
    while len(blocks) == 1 and not blocks & whole and _children(root.get_submodule(next(iter(blocks)))):
        name = blocks.pop()
        descend(name, root.get_submodule(name))
        if not blocks:
            return {name}
    return blocks or (set() if _children(root) else {""})


def _labels(recording: Recording, module: nn.Module, granularity: str, whole: frozenset[str]) -> list[int | None]:
    """Per recorded op the call of a module that is its component, if one is.
    By layer: the innermost call, if it owns parameters and called no other module or runs as a whole. Else: the call of the
    outermost block around the op."""
    calls = recording.calls
    if granularity == "layer":
        parents = {call.parent for call in calls} - {number for number, call in enumerate(calls) if call.module in whole}
        layers = {
            number
            for number, call in enumerate(calls)
            if number not in parents and next(module.get_submodule(call.module).parameters(), None) is not None
        }
        return [op.call if op.call in layers else None for op in recording.ops]
    blocks = _block_modules(module, whole)
    outermost: list[int | None] = []  # per call; a call comes after the one that it happened in
    for number, call in enumerate(calls):
        around = None if call.parent is None else outermost[call.parent]
        outermost.append(number if around is None and call.module in blocks else around)
    return [None if op.call is None else outermost[op.call] for op in recording.ops]


def _intervals(recording: Recording, module: nn.Module, labels: list[int | None]) -> list[CallInterval]:
    intervals: list[CallInterval] = []
    current: int | None = None
    last = len(recording.ops) if recording.loss_start is None else recording.loss_start
    for number, label in enumerate(labels[:last]):
        if label is None or label == current:
            continue
        call = recording.calls[label]
        if current is not None and all(
            isinstance(module.get_submodule(path), nn.Embedding) for path in (recording.calls[current].module, call.module)
        ):  # token, position and type embeddings side by side make one component
            continue
        name = re.sub(r"\s", "_", call.module) or type(module).__name__
        name = name if call.number == 1 else f"{name}#{call.number}"
        if intervals:
            intervals[-1].end = number
        intervals.append(CallInterval(name, number if intervals else 0, last))
        current = label
    if not intervals:
        intervals.append(CallInterval(type(module).__name__, 0, last))
    if recording.loss_start is not None:
        parts = recording.loss_parts or [(LOSS, last)]
        edges = [last, *(start for _, start in parts[1:]), len(recording.ops)]
        intervals += [CallInterval(name, start, end) for (name, _), (start, end) in zip(parts, pairwise(edges), strict=True)]
    return intervals


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
        name = f"{LOSS}_" if interval.name == LOSS and place < len(intervals) - 1 else interval.name
        number = 2
        while name in seen:
            name = f"{interval.name}#{number}"
            number += 1
        seen.add(name)
        interval.name = name


def boundaries(recording: Recording, intervals: list[CallInterval]) -> None:
    """Fill in which values enter and leave each interval.
    Outputs are in the order in which others read them, not in that of their making: a forward may iterate over a set."""
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
    place_of: dict[int, int] = {}  # the first interval that makes a value
    for place, interval in enumerate(intervals):
        for op in recording.ops[interval.start : interval.end]:
            for _, number in op.outputs:
                place_of.setdefault(number, place)
    return tuple(
        _program(
            recording,
            interval,
            names,
            [(name, number) for name, number in recording.buffer_writes.items() if place_of.get(number) == place],
        )
        for place, interval in enumerate(intervals)
    )


def _program(recording: Recording, interval: CallInterval, names: dict[int, str], writes: list[tuple[str, int]]) -> CallProgram:
    recorded = _measured(recording, recording.ops[interval.start : interval.end])
    slot: dict[int, int] = {}
    last_use: dict[int, int] = {}
    for number in (*interval.inputs, *(number for op in recorded for number in op.reads)):
        slot.setdefault(number, len(slot))
    for place, op in enumerate(recorded):
        outputs = [number for _, number in op.outputs]
        for number in outputs:
            slot.setdefault(number, len(slot))
        last_use.update(dict.fromkeys((*op.reads, *outputs), place))
    lasting = {*interval.outputs, *(number for _, number in writes)}
    drops: dict[int, list[int]] = {}
    for number, place in last_use.items():
        if number not in lasting:
            drops.setdefault(place, []).append(slot[number])
    differentiable = recording.differentiable

    def boundary(numbers: Sequence[int]) -> tuple[tuple[str, int, bool], ...]:
        return tuple((names[number], slot[number], differentiable.get(number, False)) for number in numbers)

    return CallProgram(
        name=interval.name,
        ops=tuple(
            Op(
                function=op.function,
                arguments=tuple(renumber(item, slot) for item in op.arguments),
                keywords=tuple((name, renumber(item, slot)) for name, item in op.keywords),
                outputs=tuple((path, slot[number]) for path, number in op.outputs),
                context=op.context,
                drop=tuple(drops.get(place, ())),
            )
            for place, op in enumerate(recorded)
        ),
        slots=len(slot),
        inputs=boundary(interval.inputs),
        outputs=boundary(interval.outputs),
        state=tuple((recording.state[number], slot[number]) for number in slot if number in recording.state),
        constants=tuple(
            (values[number], slot[number])
            for values in (recording.constants, recording.assumed)
            for number in slot
            if number in values
        ),
        buffer_writes=tuple((name, slot[number]) for name, number in writes),
        tensors=tuple(
            TensorKind(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)
            for tensor in (recording.tensors[number] for number in slot)
        ),
    )


def _measured(recording: Recording, ops: list[RecordedOp]) -> list[RecordedOp]:
    """The calls with what is assumed about the data in the place of what they would find out."""
    measured = []
    for op in ops:
        if op.outputs and not op.mutated and all(number in recording.assumed for _, number in op.outputs):
            continue
        if op.measured is not None:
            function, arguments, keywords = op.measured
            refs = {id(recording.tensors[number]): Ref(number) for number in op.reads}

            def stand_in(tensor: Tensor, refs: dict[int, Ref] = refs) -> Ref | Tensor:
                return refs.get(id(tensor), tensor)  # real masks and indices stay

            op = replace(
                op,
                function=function,
                arguments=tuple(template_of(item, stand_in) for item in arguments),
                keywords=tuple((name, template_of(item, stand_in)) for name, item in keywords),
            )
        measured.append(op)
    return measured
