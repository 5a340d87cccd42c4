"""The record of one call of a block in a recorded forward: its comparable form, and a copy of it for an equal block."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten

from parsim.model.runnable import Ref, renumber
from parsim.model.trace.recorder import Call, CallEnds, Copied, RecordedOp, Recorder, Recording, storage_key
from parsim.model.tracing.repeats.canonical import PLAIN_TYPES, canonical, canonical_function

_stand_in_keys = count(-2, -1)


class Watcher(Protocol):
    """Statistics of a forward that belong to its calls, and are copied with them."""

    def open(self) -> AbstractContextManager[None]:
        """Inside, statistics are taken."""

    def setting(self) -> Hashable:
        """What decides now how a call is counted, besides the call."""

    def mark(self) -> Any:
        """The position now."""

    def forget(self, start: Any) -> None:
        """Drop what was noted since a position."""

    def storages(self, start: Any, stop: Any) -> list[int]:
        """The memory that was noted between two positions."""

    def form(self, start: Any, stop: Any, first_op: int, storage: Callable[[int], Hashable]) -> Hashable:
        """What was noted between two positions, comparable: calls count from `first_op`, memory has other names."""

    def copy(self, start: Any, stop: Any, shift: int, storage: Mapping[int, int]) -> None:
        """Note the same again, for calls `shift` further on and other memory."""


class Position(NamedTuple):
    """A moment of a recording: how many calls, tensors, calls of modules and questions about values it had."""

    ops: int
    numbers: int
    calls: int
    looks: int
    watched: Any

    @classmethod
    def now(cls, recorder: Recorder, watcher: Watcher | None) -> Position:
        """That of this moment."""
        recording = recorder.recording
        watched = None if watcher is None else watcher.mark()
        return cls(len(recording.ops), len(recording.tensors), len(recording.calls), recorder.looks, watched)


class NotComparable(Exception):
    """A call of a block whose record cannot be copied."""


@dataclass(frozen=True, slots=True)
class _StandInStorage:
    """The memory of a StandIn, with the names that torch's storages have."""

    _cdata: int
    size_bytes: int

    def nbytes(self) -> int:
        return self.size_bytes


class StandIn:
    """In a recording, what a tensor inside a copied block would be: sizes and type of the copied one, memory of its own."""

    __slots__ = ("_like", "_storage")

    def __init__(self, like: Any, storage: Any) -> None:
        self._like = like
        self._storage = storage

    def untyped_storage(self) -> Any:
        """As of a tensor."""
        return self._storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._like, name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockRecord:
    """One call of a block that ran.

    Attributes:
        path: of the module. inputs, state: value numbers it was given, and of its parameters and buffers.
        made: value numbers it made, in order. outputs: per leaf of `spec` a Ref to a value number, or a constant.
        memory: storages of `made`. new_outputs: those of `made` that it returned.
        new_memory: storages that did not exist before, with their bytes.
        foreign: value numbers it read that are none of these.
        form: all of it in comparable form.
    """

    path: str
    start: Position
    stop: Position
    inputs: tuple[int, ...]
    state: tuple[int, ...]
    made: tuple[int, ...]
    memory: tuple[Any, ...]
    outputs: tuple[Any, ...]
    new_outputs: frozenset[int]
    new_memory: Mapping[int, int]
    foreign: frozenset[int]
    spec: TreeSpec
    form: Hashable


def read_record(
    recorder: Recorder,
    watcher: Watcher | None,
    *,
    path: str,
    start: Position,
    state: tuple[int, ...],
    inputs: tuple[int, ...],
    output: Any,
) -> BlockRecord:
    """The record of a block that has just returned `output`.

    Raises:
        NotComparable: it changes what it does not own, returns a view of such, something that may hide tensors or a tensor
            with values; it asked for values that depend on data or were computed on demand.
    """
    recording = recorder.recording
    stop = Position.now(recorder, watcher)
    leaves, spec = tree_flatten(output)
    if any(not isinstance(leaf, Tensor) and type(leaf) not in PLAIN_TYPES for leaf in leaves):
        raise NotComparable
    outputs = tuple(Ref(recorder.number_of(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    made = tuple(number for number in range(start.numbers, stop.numbers) if number not in recording.constants)
    ops = recording.ops[start.ops : stop.ops]
    if stop.looks > start.looks or any(number in recording.assumed for number in made):
        raise NotComparable
    known = {*state, *inputs, *made}
    foreign = frozenset(number for op in ops for number in op.reads if number not in known)
    if any(number not in state and number not in made for op in ops for number in op.mutated):
        raise NotComparable
    memory = _new_memory(recording, watcher, start, stop, made)
    new_outputs = frozenset(leaf.slot for leaf in outputs if type(leaf) is Ref and leaf.slot in set(made))
    if any(not isinstance(recording.tensors[number], FakeTensor) for number in new_outputs):
        raise NotComparable
    out_memory = [storage_key(recording.tensors[number]) for number in new_outputs]
    if len(set(out_memory)) < len(out_memory) or any(key not in memory for key in out_memory):
        raise NotComparable
    names = _Names(recording, state, inputs, made, memory)
    form = (
        tuple(_op_form(op, start, names) for op in ops),
        tuple(
            (within(call.module, path), None if call.parent is None else call.parent - start.calls)
            for call in recording.calls[start.calls : stop.calls]
        ),
        tuple((names.kind(number), recording.differentiable.get(number)) for number in made),
        canonical(outputs, names.value),
        str(spec),
        None if watcher is None else watcher.form(start.watched, stop.watched, start.ops, names.storage),
    )
    return BlockRecord(
        path=path,
        start=start,
        stop=stop,
        inputs=inputs,
        state=state,
        made=made,
        memory=tuple(recording.tensors[number].untyped_storage() for number in made),
        outputs=outputs,
        new_outputs=new_outputs,
        new_memory=memory,
        foreign=foreign,
        spec=spec,
        form=form,
    )


def _new_memory(
    recording: Recording, watcher: Watcher | None, start: Position, stop: Position, made: Sequence[int]
) -> dict[int, int]:
    tensors = recording.tensors
    before = {storage_key(tensor) for tensor in tensors[: start.numbers]}
    before.update(storage_key(tensor) for tensor in recording.constants.values())
    found = {storage_key(tensors[number]): int(tensors[number].untyped_storage().nbytes()) for number in made}
    if watcher is not None:
        before.update(watcher.storages(None, start.watched))
        for key in watcher.storages(start.watched, stop.watched):
            found.setdefault(key, 0)
    return {key: size for key, size in found.items() if key not in before}


def _op_form(op: RecordedOp, start: Position, names: _Names) -> Hashable:
    return (
        canonical_function(op.function),
        canonical(op.arguments, names.value),
        canonical(op.keywords, names.value),
        tuple((canonical(path), names.value(number)) for path, number in op.outputs),
        op.context,
        None if op.call is None else op.call - start.calls,
        tuple(map(names.value, op.reads)),
        tuple(map(names.value, op.mutated)),
    )


def within(module: str, path: str) -> str | None:
    """The rest of a module's name below the block `path`; None if it lies elsewhere."""
    return module[len(path) :] if module == path or module.startswith(f"{path}.") else None


class _Names:
    """Names of values and memory that are equal for the corresponding ones of an equal block."""

    def __init__(
        self, recording: Recording, state: Sequence[int], inputs: Sequence[int], made: Sequence[int], memory: Iterable[int]
    ) -> None:
        self._tensors = recording.tensors
        self._values: dict[int, Hashable] = {}
        self._memory: dict[int, Hashable] = {}
        for kind, numbers in (("state", state), ("input", inputs), ("made", made)):
            for place, number in enumerate(numbers):
                self._values.setdefault(number, (kind, place))
                if kind != "made":
                    self._memory.setdefault(storage_key(self._tensors[number]), (kind, place))
        for place, key in enumerate(memory):
            self._memory.setdefault(key, ("new", place))

    def value(self, number: int) -> Hashable:
        """Of a value number; one from outside stands for itself."""
        return self._values.get(number, number)

    def storage(self, key: int) -> Hashable:
        """Of memory."""
        return self._memory.get(key, key)

    def kind(self, number: int) -> Hashable:
        """All that a copy takes over of a tensor."""
        tensor = self._tensors[number]
        own = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, tensor.requires_grad)
        storage = tensor.untyped_storage()
        return *own, storage.nbytes(), self.storage(storage._cdata)


class _Renamed(dict[int, int]):
    """What is not listed keeps its name."""

    def __missing__(self, key: int) -> int:
        return key


class CopiedOp(RecordedOp):
    """A call of a copied block: what another call did, on other values.

    Its arguments and keywords are made when somebody asks for them. Most programs take those of the other call.
    """

    __slots__ = ("_number", "_source")

    def __init__(self, source: RecordedOp, number: Mapping[int, int], call: int | None) -> None:
        """
        Args:
            source: the other call. number: its value numbers with those of this one. call: of a module, in which this one is.
        """
        self._source = source
        self._number = number
        self.function = source.function
        self.outputs = tuple([(path, number[made]) for path, made in source.outputs])
        self.context = source.context
        self.call = call
        self.reads = tuple([number[read] for read in source.reads])
        self.mutated = tuple([number[changed] for changed in source.mutated]) if source.mutated else ()
        self.measured = None

    def __getattr__(self, name: str) -> Any:
        if name == "arguments":
            self.arguments = tuple([renumber(item, self._number) for item in self._source.arguments])
            return self.arguments
        if name == "keywords":
            self.keywords = tuple([(key, renumber(item, self._number)) for key, item in self._source.keywords])
            return self.keywords
        raise AttributeError(f"a call has no {name}")


def may_copy(record: BlockRecord, recording: Recording, state: Sequence[int], inputs: Sequence[int]) -> bool:
    """Whether what the record takes from outside is none of what another block is given or owns."""
    tensors = recording.tensors
    given = {*state, *inputs}
    memory = {storage_key(tensors[number]) for number in given}
    return not any(number in given or storage_key(tensors[number]) in memory for number in record.foreign)


def copy_record(
    record: BlockRecord, recorder: Recorder, watcher: Watcher | None, *, path: str, state: Sequence[int], inputs: Sequence[int]
) -> Any:
    """Append the calls of a record as if the block at `path` had made them; returns what it would have returned.

    The calls of modules inside it have no arguments and results: nothing that depends on data is copied.
    """
    recording = recorder.recording
    tensors: list[Any] = recording.tensors
    here = Position.now(recorder, watcher)
    number, storage = _Renamed(), _Renamed()
    memory: dict[int, Any] = {}
    for old, new in zip((*record.state, *record.inputs), (*state, *inputs), strict=True):
        number.setdefault(old, new)
        storage.setdefault(storage_key(tensors[old]), storage_key(tensors[new]))
        memory.setdefault(storage_key(tensors[old]), tensors[new].untyped_storage())
    fakes = {old: _fake_like(tensors[old], recorder, watcher) for old in sorted(record.new_outputs)}
    for old, fake in fakes.items():
        storage[storage_key(tensors[old])] = storage_key(fake)
        memory[storage_key(tensors[old])] = fake.untyped_storage()
    for key, size_bytes in record.new_memory.items():
        if key not in storage:
            storage[key] = next(_stand_in_keys)
            memory[key] = _StandInStorage(storage[key], size_bytes)
    for old, own in zip(record.made, record.memory, strict=True):
        number[old] = len(tensors)
        if old in fakes:
            recorder.add(fakes[old])
        else:
            tensors.append(StandIn(tensors[old], memory.get(own._cdata, own)))
    for old in (*record.made, *record.state):
        if old in recording.differentiable:
            recording.differentiable[number[old]] = recording.differentiable[old]
    _copy_calls(record, recorder, path, here, number)
    recording.copies.append(Copied(here.ops, len(recording.ops), record.start.ops, number))
    if watcher is not None:
        watcher.copy(record.start.watched, record.stop.watched, here.ops - record.start.ops, storage)
    return record.spec.unflatten([tensors[number[leaf.slot]] if type(leaf) is Ref else leaf for leaf in record.outputs])


def _copy_calls(record: BlockRecord, recorder: Recorder, path: str, here: Position, number: Mapping[int, int]) -> None:
    recording = recorder.recording
    shift = here.calls - record.start.calls
    for place in range(record.start.calls, record.stop.calls):
        call = recording.calls[place]
        inner = within(call.module, record.path)
        name = call.module if inner is None else path + inner
        times = recorder._calls_of[name] = recorder._calls_of.get(name, 0) + 1
        recording.calls.append(Call(name, times, None if call.parent is None else call.parent + shift))
        recording.ends.append(CallEnds((), {}, recording.ends[place].context))
    recording.ops += [
        CopiedOp(op, number, None if op.call is None else op.call + shift)
        for op in recording.ops[record.start.ops : record.stop.ops]
    ]


def _fake_like(like: Any, recorder: Recorder, watcher: Watcher | None) -> Tensor:
    """A new tensor of the same layout, not a leaf where a gradient flows."""
    watched = None if watcher is None else watcher.mark()
    suspended, recorder.suspended = recorder.suspended, True
    try:
        base = torch.empty(like.untyped_storage().nbytes() // like.element_size(), dtype=like.dtype, device=like.device)
        if like.requires_grad:
            base = base.requires_grad_().clone()
        return base.as_strided(like.shape, like.stride(), like.storage_offset())
    finally:
        recorder.suspended = suspended
        if watcher is not None:
            watcher.forget(watched)
