"""What all operations of a rank share while a step runs: the values, the room for those of other ranks, and the watch."""

from __future__ import annotations

import torch
from torch import Tensor

from parsim.execute.records.memory_lines import StepWatch
from parsim.execute.stage import StageReplica
from parsim.execute.state.store import Instance, Store
from parsim.execute.streams import Streams
from parsim.graph.task import Task


class StepValues:
    """Attributes: watch: receives the events of a step, for tools that count memory."""

    def __init__(self, stage: StageReplica, store: Store, streams: Streams) -> None:
        self.stage, self.store, self.streams = stage, store, streams
        self.watch = StepWatch()

    def take(self, instance: Instance, microbatch: int, *, lends: bool = False) -> Tensor:
        """From the store; a gradient that no backward here has added to is zero. `lends` as for `Store.take`."""
        tensor = self.store.take(instance, microbatch, lends=lends)
        if tensor is None:
            assert instance.item.reading is not None, f"{instance.item.value} was not made before it is read"
            return self.room(instance).zero_()
        return tensor

    def room(self, instance: Instance) -> Tensor:
        """A buffer for what another rank sends. The allocator gives it memory that no stream of `Streams.used` still reads."""
        shape, dtype = self.stage.local_shape(instance.item.value, instance.layout)
        buffer = torch.empty(shape, dtype=dtype, device=self.stage.device)
        self.watch.received(buffer)
        return buffer


def component_of(task: Task) -> tuple[str, int]:
    """The component and the microbatch of a computation."""
    component, microbatch = task.origin.component, task.origin.microbatch
    assert component is not None
    assert microbatch is not None
    return component, microbatch
