"""Peak bytes of live tensors of this process, by watching every operator; an allocator calls these allocated."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from parsim.model.autograd.call_watch import CallWatch, NextCall
from parsim.model.autograd.storages import StorageRef, tensors_among
from parsim.model.memory.kernel_workspaces import with_workspace

_ONE_TENSOR = (Tensor, FakeTensor)


class LiveBytes(CallWatch):
    """While active, counts every storage an operator of this thread makes, from its birth to its death.

    `track` adds tensors made elsewhere (weights, buckets, receive buffers). `moments`: bytes alive right after each
    storage that was made. Every storage belongs to a line: that of `track`, or the current `line` when it was allocated.
    If its line is in `moving`, it changes to the `line` in which an operator first makes a view of it. Leaves out an
    operator's own scratch memory and what the C library keeps.
    """

    def __init__(self, moving: Collection[str] = ()) -> None:
        super().__init__()
        self._live: dict[int, tuple[int, str, StorageRef | None]] = {}
        self._ignored: set[int] = set()
        self._moving = moving
        self.line = ""
        self.current_bytes = 0
        self.peak_bytes = 0
        self.moments: list[int] = []

    def ignore(self, tensor: Tensor) -> None:
        """Never count this tensor's storage, nor views of it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._watch(storage, 0, "")
            self._ignored.add(storage._cdata)

    def track(self, tensor: Tensor, line: str = "") -> None:
        """Count the tensor's storage; of one that is known, what it has grown or shrunk by since."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._live:
            self._watch(storage, size, line)
        elif key in self._ignored or self._live[key][0] == size:
            return
        else:
            before, _, ref = self._live[key]
            self.current_bytes += size - before
            self._live[key] = size, line, ref
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        self.moments.append(self.current_bytes)

    def by_line(self) -> dict[str, int]:
        """Bytes alive now."""
        found: dict[str, int] = {}
        for size, line, _ in list(self._live.values()):
            found[line] = found.get(line, 0) + size
        return found

    def _watch(self, storage: torch.UntypedStorage, size: int, line: str) -> None:
        ref = StorageRef(storage, self._release)
        self._live[ref.key] = size, line, ref
        self.current_bytes += size

    def _release(self, ref: StorageRef) -> None:
        self.current_bytes -= self._live.pop(ref.key, (0, "", None))[0]
        self._ignored.discard(ref.key)

    def _seen(self, tensor: Tensor) -> None:
        """An operator has made it, or a view of it."""
        if self._moving:
            key = tensor.untyped_storage()._cdata
            size, line, ref = self._live.get(key, (0, "", None))
            if line in self._moving:
                self._live[key] = size, self.line, ref
        self.track(tensor, self.line)

    def around(self, call: NextCall, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the call, whose storages count from now on."""
        result = with_workspace(func, args, call(func, types, args, kwargs))
        if type(result) in _ONE_TENSOR:
            self._seen(result)
            return result
        for leaf in tensors_among((result,)):
            self._seen(leaf)
        return result
