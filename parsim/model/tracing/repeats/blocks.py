"""Record equal blocks of a network once: the record of one is copied for the next, whose forward is not run.

A block is copied if its forward has to make the same calls. That holds if all that the forward can depend on is equal. It
depends on class, attributes, and kinds of parameters and buffers (`signature`). It also depends on kinds of its inputs and how
these share memory, autocast, and whether gradients are on. Attributes that differ between blocks, such as the number of a
layer, are withheld while a block runs. They may differ if nobody has asked for them. A record is copied only after two blocks
in a row made the same one. Where all blocks of a kind did so at one batch, the first record at another batch or precision is
copied (`trusted`). Blocks that ask for values are always run, and a forward that depends on data is recorded again without
copies.

Left out: a forward that reads global variables which change between two blocks.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten

from parsim.model.trace.recorder import Recorder, storage_key
from parsim.model.tracing.repeats.block_record import (
    BlockRecord,
    NotComparable,
    Position,
    Watcher,
    copy_record,
    may_copy,
    read_record,
)
from parsim.model.tracing.repeats.canonical import PLAIN_TYPES, canonical
from parsim.model.tracing.repeats.signature import Plain, Signature, has_hooks, signature

PATIENCE = 4
"""Records of one kind of block that may differ from the one before, until no more are compared."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_GETATTR = nn.Module.__getattr__


@dataclass(slots=True)
class _Kind:
    """Blocks whose records may be equal.

    Attributes:
        plain: attributes of the last block that ran. unread: those withheld from it that nobody asked for.
        record: of the last block that ran. confirmed: it equals the record before.
    """

    plain: Mapping[Plain, Hashable]
    unread: frozenset[Plain] = frozenset()
    record: BlockRecord | None = None
    confirmed: bool = False
    failures: int = 0

    def fits(self, plain: Mapping[Plain, Hashable]) -> bool:
        """Whether plain attributes differ at most where nobody looked."""
        return all(value == self.plain[place] or place in self.unread for place, value in plain.items())


class Repeats:
    """The blocks of one forward while it is recorded. `copied`: how many calls of blocks were not run."""

    def __init__(self, recorder: Recorder, watcher: Watcher | None, trusted: frozenset[Hashable] = frozenset()) -> None:
        """
        Args:
            trusted: `Recording.confirmed` of another recording of the module.
        """
        self._trusted = trusted
        self._outcomes: dict[Hashable, set[bool]] = {}
        self._recorder = recorder
        self._watcher = watcher
        self._kinds: dict[Hashable, list[_Kind]] = {}
        self._withheld: dict[int, dict[str, Any]] = {}
        self._asked: set[tuple[int, str]] = set()
        self._differing: dict[Hashable, frozenset[Plain]] = {}
        self._reads: set[int] = set()
        self._scanned = 0
        self.copied = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Inside, blocks are copied where they may be. Enter it before hooks are registered and state is faked."""
        blocks = self._blocks()
        try:
            if blocks:
                nn.Module.__getattr__ = self._getattr()  # type: ignore[method-assign]
            for path, block in blocks.items():
                block.__dict__["forward"] = self._forward(path, block, block.forward)
            yield
            alike = frozenset(skeleton for skeleton, outcomes in self._outcomes.items() if outcomes == {True})
            self._recorder.recording.confirmed = self._trusted | alike
        finally:
            nn.Module.__getattr__ = _GETATTR  # type: ignore[method-assign]
            for block in blocks.values():
                block.__dict__.pop("forward", None)

    def _blocks(self) -> dict[str, nn.Module]:
        """Children of containers that have children themselves and no hooks."""
        found = {
            f"{path}.{name}" if path else name: child
            for path, module in self._recorder.module.named_modules()
            if isinstance(module, _CONTAINERS)
            for name, child in module.named_children()
            if any(True for _ in child.children()) and not has_hooks(child)
        }
        values: dict[Hashable, dict[Plain, set[Hashable]]] = {}
        for block in found.values():
            own = signature(block, {})
            places = values.setdefault(own.skeleton, {})
            for place, value in own.plain.items():
                places.setdefault(place, set()).add(value)
        self._differing = {
            skeleton: frozenset(place for place, given in places.items() if len(given) > 1)
            for skeleton, places in values.items()
        }
        return found

    def _getattr(self) -> Callable[[nn.Module, str], Any]:
        def withheld_or_own(module: nn.Module, name: str) -> Any:
            held = self._withheld.get(id(module))
            if held is not None and name in held:
                self._asked.add((id(module), name))
                return held[name]
            return _GETATTR(module, name)

        return withheld_or_own

    def _forward(self, path: str, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder, watcher = self._recorder, self._watcher
            if recorder.suspended:
                return forward(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                own = signature(block, self._withheld)
                state = self._state(block)
                given = None if state is None else self._given(args, kwargs, state)
                if state is None or given is None:
                    kind = None
                else:
                    form, inputs = given
                    kind = self._kind((own.skeleton, form), own)
                    confirmed = kind.confirmed or own.skeleton in self._trusted
                    if kind.record and confirmed and may_copy(kind.record, recorder.recording, state, inputs):
                        self.copied += 1
                        self._ask_for(block, own, kind.unread)
                        return copy_record(kind.record, recorder, watcher, path=path, state=state, inputs=inputs)
            if kind is None or state is None or kind.failures > PATIENCE:
                return forward(*args, **kwargs)
            start = Position.now(recorder, watcher)
            output, unread = self._run(block, own, lambda: forward(*args, **kwargs))
            record = None
            with torch._C.DisableTorchFunction(), contextlib.suppress(NotComparable):
                if unread is not None:
                    record = read_record(recorder, watcher, path=path, start=start, state=state, inputs=inputs, output=output)
            self._learn(kind, own, record, unread or frozenset())
            return output

        return call

    def _ask_for(self, block: nn.Module, own: Signature, unread: frozenset[Plain]) -> None:
        """A copied block would have asked for attributes that a block around it withholds."""
        if any(self._withheld.values()):
            parts = dict(block.named_modules())
            self._asked.update((id(parts[path]), name) for path, name in own.plain.keys() - unread)

    def _learn(self, kind: _Kind, own: Signature, record: BlockRecord | None, unread: frozenset[Plain]) -> None:
        before = kind.record
        kind.confirmed = before is not None and record is not None and (before.form, kind.unread) == (record.form, unread)
        if before is not None or record is None:
            kind.failures += not kind.confirmed
            self._outcomes.setdefault(own.skeleton, set()).add(kind.confirmed)
        kind.plain, kind.unread, kind.record = own.plain, unread, record

    def _kind(self, key: Hashable, own: Signature) -> _Kind:
        kinds = self._kinds.setdefault(key, [])
        for kind in kinds:
            if kind.fits(own.plain):
                return kind
        kinds.append(_Kind(plain=own.plain))
        return kinds[-1]

    def _state(self, block: nn.Module) -> tuple[int, ...] | None:
        """Value numbers of its parameters and buffers; None if one is unknown."""
        found = [self._recorder._number.get(id(tensor)) for tensor in _tensors(block)]
        return None if None in found else tuple(dict.fromkeys(number for number in found if number is not None))

    def _given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: tuple[int, ...]
    ) -> tuple[Hashable, tuple[int, ...]] | None:
        """Kinds and value numbers of a call's inputs; None if they may hold what is not seen."""
        leaves, spec = tree_flatten((args, kwargs))
        known = {number: place for place, number in enumerate(state)}
        memory: dict[int, int] = {}
        for number in state:
            memory.setdefault(storage_key(self._recorder.recording.tensors[number]), len(memory))
        numbers: list[int] = []
        kinds: list[Hashable] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                given = self._recorder._number.get(id(leaf))
                if given is None:
                    return None
                numbers.append(given)
                has_values = not isinstance(leaf, FakeTensor) or leaf.constant is not None
                same = known.setdefault(given, len(known)), memory.setdefault(storage_key(leaf), len(memory))
                kinds.append((_kind_of(leaf), same, given if has_values else None))
            elif type(leaf) in PLAIN_TYPES:
                kinds.append(canonical(leaf))
            else:
                return None
        used = tuple(number in self._used() for number in state)  # autocast casts a weight once
        setting = None if self._watcher is None else self._watcher.setting()
        return (str(spec), tuple(kinds), used, torch.is_grad_enabled(), self._recorder._context(), setting), tuple(numbers)

    def _used(self) -> set[int]:
        """Value numbers that calls have read by now."""
        ops = self._recorder.recording.ops
        for op in ops[self._scanned :]:
            self._reads.update(op.reads)
        self._scanned = len(ops)
        return self._reads

    def _run(self, block: nn.Module, own: Signature, forward: Callable[[], Any]) -> tuple[Any, frozenset[Plain] | None]:
        """What the block returns, and the withheld attributes that nobody asked for; None if the block has changed itself."""
        dice = random.getstate()
        held = [id(tensor) for tensor in _tensors(block)]
        with self._withholding(block, self._differing.get(own.skeleton, frozenset())) as (taken, asked):
            output = forward()
        with torch._C.DisableTorchFunction():
            after = signature(block, self._withheld)
        unchanged = (after.skeleton, after.plain) == (own.skeleton, own.plain)
        if unchanged and held == [id(tensor) for tensor in _tensors(block)] and random.getstate() == dice:
            return output, frozenset(taken - asked)
        return output, None

    @contextlib.contextmanager
    def _withholding(self, block: nn.Module, places: frozenset[Plain]) -> Iterator[tuple[set[Plain], set[Plain]]]:
        """Take attributes away, so reading one ends in `__getattr__`. Yields those taken, and those asked for in the end."""
        parts = dict(block.named_modules())
        values: dict[Plain, Any] = {}
        asked: set[Plain] = set()
        for path, name in places - {(path, "training") for path in parts}:
            part = parts[path]
            if name in part.__dict__ and not hasattr(type(part), name) and _reads_as_usual(type(part)):
                values[path, name] = part.__dict__.pop(name)
                self._withheld.setdefault(id(part), {})[name] = values[path, name]
        try:
            yield set(values), asked
        finally:
            for (path, name), value in values.items():
                part = parts[path]
                part.__dict__.setdefault(name, value)
                del self._withheld[id(part)][name]
                if (id(part), name) in self._asked:
                    self._asked.discard((id(part), name))
                    asked.add((path, name))


def _reads_as_usual(kind: type) -> bool:
    own: Any = kind
    return own.__getattr__ is nn.Module.__getattr__ and own.__getattribute__ is object.__getattribute__


def _tensors(block: nn.Module) -> Iterator[Tensor]:
    """Its parameters and buffers, in one order."""
    for part in block.modules():
        for held in (part._parameters, part._buffers):
            yield from (tensor for tensor in held.values() if tensor is not None)


def _kind_of(tensor: Tensor) -> Hashable:
    memory = tensor.untyped_storage().nbytes()
    layout = (type(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, memory)
    return *layout, tensor.requires_grad, tensor.is_leaf
