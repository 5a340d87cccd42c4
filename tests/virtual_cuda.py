"""A stand-in for a GPU: streams and events in virtual time, and torch's CUDA sanitizer told of every launch, wait and record.

The host queues, which takes its time; each stream runs in order what it was given. Time passes by `launch` (seconds on the
current stream), by `host_takes` and by waiting; what torch computes meanwhile takes none. Under
`watch_tensors` every torch call is a launch on the current stream that reads and writes its tensors: those of the CPU stand
for those of the GPU. The sanitizer (torch.cuda._sanitizer) then says which accesses nothing orders. Beside it, a tensor that
dies is checked as the caching allocator would: each stream that touched it has been waited for by the stream it was allocated
on, or the allocator was told of it (`used`).
"""

from __future__ import annotations

import contextlib
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import EventHandler, SynchronizationError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parsim.execute.cuda.driver import alias_of


@dataclass(eq=False)
class VirtualStream:
    number: int
    urgent: bool
    free_s: float = 0.0


@dataclass(eq=False)
class VirtualEvent:
    number: int
    at_s: float


class Hazard(Exception):
    """Memory given back while a stream that the allocator knows nothing of may still use it."""


@dataclass
class VirtualDriver:
    """See `parsim.execute.cuda.driver.Driver`.

    Attributes:
        clock_s: of the host. launch_s, record_s: what the host takes for each kernel and each event. log: what was asked, in
            order. holds_s: of the holds. largest_queue: most kernels between two waits for the device.
        skipped_waits: the numbers of waits that are left out, counted from 0: planted faults. careless: the numbers of streams
            that never wait.
        forgotten_uses: `used` does nothing: another planted fault.
        deferred: how often `used`, or NCCL by itself, named a stream for memory of the first one. An allocator gives that back
            late: only once the device has come past the stream, and the host may be far ahead of that.
    """

    clock_s: float = 0.0
    launch_s: float = 0.0
    record_s: float = 0.0
    skipped_waits: frozenset[int] = frozenset()
    careless: frozenset[int] = frozenset()
    forgotten_uses: bool = False
    log: list[tuple[Any, ...]] = field(default_factory=list)
    errors: list[SynchronizationError | Hazard] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.holds_s: list[float] = []
        self.queued = self.largest_queue = 0
        self.main = VirtualStream(0, urgent=False)
        self.streams = [self.main]
        self._current = [self.main]
        self._events = self.waits = self.deferred = 0
        self.handler = EventHandler()
        self._uses: dict[int, dict[int, int]] = {}
        self._told: dict[int, set[int]] = {}
        self._home: dict[int, int] = {}
        self._known: dict[int, Any] = {}
        self._owner: dict[int, Tensor] = {}

    # --- the driver ---------------------------------------------------------------------------------------------------

    def current(self) -> VirtualStream:
        return self._current[-1]

    def stream(self, *, urgent: bool) -> VirtualStream:
        made = VirtualStream(len(self.streams), urgent)
        self.streams.append(made)
        self.handler._handle_stream_creation(made.number)
        return made

    @contextlib.contextmanager
    def on(self, stream: VirtualStream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def record(self, stream: VirtualStream) -> VirtualEvent:
        self.clock_s += self.record_s
        event = VirtualEvent(self._events, max(stream.free_s, self.clock_s))
        self._events += 1
        self.handler._handle_event_creation(event.number)
        self.handler._handle_event_record(event.number, stream.number)
        self.log.append(("record", stream.number, event.number))
        return event

    def wait(self, stream: VirtualStream, event: VirtualEvent) -> None:
        self.waits += 1
        self.log.append(("wait", stream.number, event.number))
        if self.waits - 1 not in self.skipped_waits and stream.number not in self.careless:
            stream.free_s = max(stream.free_s, event.at_s)
            self.handler._handle_event_wait(event.number, stream.number)

    def finish(self, event: VirtualEvent) -> None:
        self.clock_s = max(self.clock_s, event.at_s)
        self.log.append(("finish", event.number))
        self.handler._handle_event_synchronization(event.number)

    def elapsed_s(self, start: VirtualEvent, end: VirtualEvent) -> float:
        if not (self.passed(start) and self.passed(end)):
            raise AssertionError("an event was read before the device had come past it")
        return end.at_s - start.at_s

    queues = True

    def hold(self, seconds: float) -> None:
        self.holds_s.append(seconds)
        self.launch(seconds, "hold")

    def mark(self) -> VirtualEvent:
        return self.record(self.current())

    def passed(self, event: VirtualEvent) -> bool:
        return event.at_s <= self.clock_s

    def synchronize(self) -> None:
        self.clock_s = max(self.clock_s, self.free_s)
        self.queued = 0
        self.log.append(("synchronize",))
        self.handler._handle_device_synchronization()

    def host_s(self) -> float:
        return self.clock_s

    def used(self, tensor: Tensor, stream: VirtualStream) -> None:
        key = tensor.untyped_storage()._cdata
        if self._home.get(key) == self.main.number != stream.number:
            self.deferred += 1
        if not self.forgotten_uses:
            self._told.setdefault(key, set()).add(stream.number)

    def unowned(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        alias = alias_of(tensor)
        storage = alias.untyped_storage()
        self._owner[storage._cdata] = tensor
        weakref.finalize(storage, self._owner.pop, storage._cdata)
        return alias

    def transferred(self, tensor: Tensor) -> None:
        """NCCL sends or receives the tensor. It calls `record_stream` for it, which counts unless the tensor is `unowned`."""
        key = tensor.untyped_storage()._cdata
        if key not in self._owner and self._home.get(key) == self.main.number:
            self.deferred += 1

    # --- time ---------------------------------------------------------------------------------------------------------

    def launch(self, seconds: float, name: str = "kernel") -> None:
        """A kernel on the current stream, which starts it when it is free and told."""
        self.clock_s += self.launch_s
        stream = self.current()
        stream.free_s = max(stream.free_s, self.clock_s) + seconds
        self.queued += 1
        self.largest_queue = max(self.largest_queue, self.queued)
        self.log.append(("launch", stream.number, name))

    def kernel(self, seconds: float, name: str = "kernel") -> Callable[[], None]:
        """A call that launches it."""
        return lambda: self.launch(seconds, name)

    @property
    def free_s(self) -> float:
        """When all streams will have run what they were given so far."""
        return max(stream.free_s for stream in self.streams)

    @property
    def asked(self) -> list[str]:
        """The log by name: what was launched, and "record", "wait", "finish" and "synchronize"."""
        return [entry[2] if entry[0] == "launch" else entry[0] for entry in self.log]

    def host_takes(self, seconds: float) -> None:
        self.clock_s += seconds

    # --- tensors ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch_tensors(self) -> Iterator[None]:
        with _without_stacks(), _Launches(self):
            yield

    def touches(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        """A kernel of the current stream reads and writes tensors."""
        stream = self.current().number
        keys = {True: {self._key(tensor) for tensor in written}, False: {self._key(tensor) for tensor in read}}
        keys[False] -= keys[True]
        aliases = {key: [""] for key in keys[True] | keys[False]}
        self.errors += self.handler._handle_kernel_launch(stream, keys[False], keys[True], set(), name, aliases)
        for key in aliases:
            self._uses.setdefault(key, {})[stream] = self.handler.seq_num

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata in self._owner:
            return self._key(self._owner[storage._cdata])
        key = storage._cdata
        if key not in self._known:
            self._known[key] = weakref.finalize(storage, self._freed, key)
            self._home[key] = self.current().number
        return key

    def _freed(self, key: int) -> None:
        self._known.pop(key)
        home, told = self._home.pop(key), self._told.pop(key, set())
        for stream, number in self._uses.pop(key, {}).items():
            if stream not in told | {home} and not self.handler.syncs.is_ordered_after(home, number, stream):
                self.errors.append(Hazard(f"memory of stream {home} given back before stream {stream} is done with it"))
        if key in self.handler.tensors_accessed.accesses:
            self.handler._handle_memory_deallocation(key)


class _Stackless:
    """In place of the module `traceback`: the sanitizer's walk of the stack at every launch takes most of its time."""

    class StackSummary:
        @staticmethod
        def extract(*_: Any, **__: Any) -> traceback.StackSummary:
            return traceback.StackSummary.from_list([])

    @staticmethod
    def walk_stack(_: Any) -> list[Any]:
        return []


@contextlib.contextmanager
def _without_stacks() -> Iterator[None]:
    found = _sanitizer.traceback
    _sanitizer.traceback = _Stackless
    try:
        yield
    finally:
        _sanitizer.traceback = found


class _Launches(TorchDispatchMode):
    """Every torch call that is not a view: what it reads and writes."""

    def __init__(self, driver: VirtualDriver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._driver = driver

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        name = str(schema.name)
        if name.startswith("c10d::"):
            read, written = _communicated(name.removeprefix("c10d::"), args)
            if name in ("c10d::send", "c10d::recv_"):
                for tensor in read + written:
                    self._driver.transferred(tensor)
        else:
            named = [*zip(schema.arguments, args, strict=False)]
            by_name = {argument.name: argument for argument in schema.arguments}
            named += [(by_name[key], value) for key, value in kwargs.items()]
            if any(argument.alias_info is not None and not argument.alias_info.is_write for argument, _ in named):
                return result  # a view
            read, written = [], []
            for argument, value in named:
                is_write = argument.alias_info is not None and argument.alias_info.is_write
                (written if is_write else read).extend(_tensors(value))
            written += _tensors(result)
        if read or written:
            self._driver.touches(name, read, written)
        return result


def _communicated(name: str, args: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What a collective or a transfer reads and writes."""
    if name == "send":
        return _tensors(args[0]), []
    if name == "broadcast_" and dist.ProcessGroup.unbox(args[1]).rank() == args[2]:
        return _tensors(args[0]), []
    if name in ("allreduce_", "broadcast_", "recv_"):
        return [], _tensors(args[0])
    if name in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"):
        return _tensors(args[1]), _tensors(args[0])
    if name == "barrier":
        return [], []
    raise AssertionError(f"c10d::{name}: say what it reads and writes")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
