"""What is counted while a forward is recorded: operators, and the tensors that autograd saves for the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from parsim.model.tracing.operators import OperatorMode
from parsim.model.tracing.recorder import Recorder, storage_key


class _Marks(NamedTuple):
    operators: int
    saves: int
    casts: int


class Watch:
    """Operators and saved tensors of a forward, by the number of the recorded call they happen in.

    Attributes:
        saves: (number of the call, storage, bytes), in order.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        tensors = recorder.recording.tensors
        self.state = {storage_key(tensors[number]) for number in recorder.recording.state}
        frozen = any(
            key.kind == "parameter" and not tensors[number].requires_grad for number, key in recorder.recording.state.items()
        )
        self.mode = OperatorMode(lambda: recorder.current, self.state, lambda: recorder.has_gradients, frozen=frozen)
        self.saves: list[tuple[int, int, int]] = []
        self._alive: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Inside, statistics are taken."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept), self.mode:
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        self._alive.setdefault(key, tensor)
        self.saves.append((self.recorder.current, key, tensor.untyped_storage().nbytes()))
        return tensor

    def saved(self) -> list[tuple[int, int, int]]:
        """Every storage but those of parameters and buffers, where it is saved first."""
        first: dict[int, tuple[int, int, int]] = {}
        for save in self.saves:
            first.setdefault(save[1], save)
        return [save for key, save in first.items() if key not in self.state]

    def setting(self) -> bool:
        """Whether operators are counted as with frozen parameters."""
        return self.mode.frozen

    def mark(self) -> _Marks:
        """The position now."""
        return _Marks(len(self.mode.operators), len(self.saves), len(self.mode.casts))

    def forget(self, start: _Marks) -> None:
        """Drop what was noted since a position."""
        del self.mode.operators[start.operators :]
        del self.saves[start.saves :]

    def storages(self, start: _Marks | None, stop: _Marks) -> list[int]:
        """The memory that was noted between two positions."""
        start = start or _Marks(0, 0, 0)
        keys = [key for _, key, _ in self.saves[start.saves : stop.saves]]
        return [*keys, *list(self.mode.casts)[start.casts : stop.casts]]

    def form(self, start: _Marks, stop: _Marks, first_op: int, storage: Callable[[int], Hashable]) -> Hashable:
        """What was noted between two positions, comparable."""
        return (
            tuple(raw.moved(raw.op - first_op) for raw in self.mode.operators[start.operators : stop.operators]),
            tuple((op - first_op, storage(key), size) for op, key, size in self.saves[start.saves : stop.saves]),
            tuple(map(storage, list(self.mode.casts)[start.casts : stop.casts])),
        )

    def copy(self, start: _Marks, stop: _Marks, shift: int, storage: Mapping[int, int]) -> None:
        """Note the same again, for calls `shift` further on and other memory."""
        own = self.mode
        own.operators += [raw.moved(raw.op + shift) for raw in own.operators[start.operators : stop.operators]]
        self.saves += [(op + shift, storage[key], size) for op, key, size in self.saves[start.saves : stop.saves]]
        for key in list(own.casts)[start.casts : stop.casts]:
            own.casts.setdefault(storage[key], own.casts[key])
