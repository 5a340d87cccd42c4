"""The values and gradients one rank holds during a step, by layout, each for as long as someone will still read it.

A layout is there because a component made it, a communication brought it, or it can be cut from another one that is there
(the hops that send nothing). Which of these it is, and how often each is read, is counted once from the rank's tasks. This is
finer than `parsim.program.lifetimes`, whose clock are components: what only a communication still reads goes with that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parsim.execute.streams import Streams
from parsim.model.shard.apply import padded_piece
from parsim.plans.layouts import LOCAL_HOPS, PIECES, Hop, ValueLayout, conversion
from parsim.program.placed import PlanIndex, Reading
from parsim.program.task import Task
from parsim.work import Collective, Compute, Phase, SendRecv


class ValueKey(NamedTuple):
    """A value of the model, or the gradient of it that the components of one reading make."""

    value: str
    reading: Reading | None = None


class Instance(NamedTuple):
    """An item in one layout."""

    item: ValueKey
    layout: ValueLayout


Place = tuple[Instance, int]
"""(instance, microbatch)."""


def batch_piece(tensor: Tensor, pieces: int, number: int) -> Tensor:
    """Piece `number` of `pieces` along dim 0, a view."""
    size = tensor.shape[0] // pieces
    return tensor.narrow(0, number * size, size)


class Store:
    """Whoever takes a tensor reads it on its own stream. What the store itself makes of others (a piece, a gathered whole) is
    made on the stream of the first who takes it; whoever takes it later waits for that (`Streams` orders both).

    What the computation has put here is its memory, or a view of something that it has taken: then the allocator knows of the
    computation. So a communication can borrow it (`lends`).

    Attributes: shard, tp: the rank's place on the tp axis and its length.
    """

    def __init__(self, layout: PlanIndex, rank: int, tasks: Iterable[Task], ordering: Streams) -> None:
        self._ordering = ordering
        self._layout = layout
        self._stage = layout.plan.stage_of_rank(rank)
        self._rank = rank
        self.shard = layout.plan.shard_of_rank(rank)
        self.tp = layout.plan.mesh.tp
        self._last_hop: dict[Instance, Hop | None] = {}
        self._reads: dict[Instance, int] = {}
        for task in tasks:
            if task.origin.microbatch == 0:
                for instance in self._read_by(task):
                    self._count(instance)
        self._lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Forget everything: a new step begins."""
        self._there: dict[Place, Tensor] = {}
        self._left: dict[Place, int] = {}
        self._pieces: dict[Place, dict[int, Tensor]] = {}
        self._fences: dict[Place, Any] = {}
        self._computed: set[Place] = set()

    def put(self, instance: Instance, microbatch: int, tensor: Tensor, *, computed: bool = False) -> None:
        """Keep a tensor if anyone here will read it. computed: the computation has allocated it."""
        with self._lock:
            if self._reads.get(instance):
                place = (instance, microbatch)
                self._there[place] = tensor
                self._left[place] = self._reads[instance]
                if computed:
                    self._computed.add(place)

    def put_piece(self, instance: Instance, microbatch: int, shard: int, tensor: Tensor) -> None:
        """Keep what another tp rank has sent of a value that is gathered here."""
        with self._lock:
            self._pieces.setdefault((instance, microbatch), {})[shard] = tensor

    def take(self, instance: Instance, microbatch: int, *, lends: bool = False) -> Tensor | None:
        """One read. None for a gradient that nobody has made here.

        lends: to a communication, behind which the computation comes before it gives the memory up.
        """
        place = (instance, microbatch)
        with self._lock:
            if place not in self._there:
                hop = self._hop_to(instance)
                if hop is None:
                    return None
                made = self._make(hop, instance, microbatch, lends=lends)
                if made is None:
                    return None
                self._there[place] = made
                self._left[place] = self._reads[instance]
                if self._left[place] > 1:
                    self._fences[place] = self._ordering.fence()
            elif place in self._fences:
                self._ordering.after(self._fences[place])
            tensor, tell = self._there[place], self._ordering.lent if lends and place in self._computed else self._ordering.used
            self._left[place] -= 1
            if not self._left[place]:
                del self._there[place], self._left[place]
                self._fences.pop(place, None)
                self._computed.discard(place)
        tell(tensor)
        return tensor

    def _make(self, hop: Hop, instance: Instance, microbatch: int, *, lends: bool) -> Tensor | None:
        """The result of a hop on this rank that needs no task."""
        source = self.take(Instance(instance.item, hop.source), microbatch, lends=lends)
        if source is None:
            return None
        match hop.operation:
            case "split_batch":
                group = self.shard % hop.source.ways // hop.target.ways  # of the smaller groups inside the larger one
                return batch_piece(source, hop.source.ways // hop.target.ways, group)
            case "split_dim":
                return padded_piece(source, hop.target.dim, self.shard % hop.target.ways, hop.target.ways)
            case "scatter":
                return batch_piece(source, self.tp, self.shard)
            case "gather":
                pieces = {**self._pieces.pop((instance, microbatch)), self.shard: source}
                for received in pieces.values():
                    self._ordering.used(received)
                return torch.cat([pieces[shard] for shard in range(self.tp)])
        return source

    # --- counted once -------------------------------------------------------------------------------------------------

    def _read_by(self, task: Task) -> Sequence[Instance]:
        """What the task takes from the store of this rank."""
        origin, layout = task.origin, self._layout
        match task.work:
            case Compute(phase=Phase.FORWARD, component=name):
                inputs = dict.fromkeys(layout.model.component(name).inputs)
                return [Instance(ValueKey(value), layout.reads_in(name, value).value) for value in inputs]
            case Compute(phase=Phase.BACKWARD | Phase.BACKWARD_INPUT, component=name):
                return [instance for value in layout.model.component(name).outputs for instance in self.gradients(value)]
            case SendRecv(source=source) if origin.hop is None:
                assert origin.value is not None
                return [self.moved(task)] if source == self._rank else []
            case SendRecv(source=source):
                return [self.before(task)] if source == self._rank else []
            case Collective() if origin.hop is not None:
                return [self.before(task)] if self.shard in origin.hop.source.holders(self.tp) else []
        return []

    def gradients(self, value: str) -> list[Instance]:
        """The gradients of a value that its maker adds up, later readings first, as autograd would."""
        summed_in = self._layout.source[value].gradient
        readings = reversed(self._layout.readings[value])
        return [Instance(ValueKey(value, reading), summed_in) for reading in readings if self._has_backward(reading)]

    def item(self, task: Task) -> ValueKey:
        """What a communication moves."""
        origin = task.origin
        assert origin.value is not None
        if not origin.gradient:
            return ValueKey(origin.value)
        made = origin.layout or PIECES
        for reading in self._layout.readings[origin.value]:
            if reading.stage == origin.stage and reading.ends.gradient == made and self._has_backward(reading):
                return ValueKey(origin.value, reading)
        raise AssertionError(f"no reading of {origin.value} in stage {origin.stage} makes its gradient in layout {made}")

    def _has_backward(self, reading: Reading) -> bool:
        return any(name in self._layout.differentiable for name in reading.components)

    def before(self, task: Task) -> Instance:
        """What a hop's task starts from."""
        assert task.origin.hop is not None
        return Instance(self.item(task), task.origin.hop.source)

    def after(self, task: Task) -> Instance:
        """What a hop's task leaves."""
        assert task.origin.hop is not None
        return Instance(self.item(task), task.origin.hop.target)

    def moved(self, task: Task) -> Instance:
        """What a transfer between stages takes and leaves."""
        return Instance(self.item(task), task.origin.layout or PIECES)

    def _count(self, instance: Instance) -> None:
        self._reads[instance] = self._reads.get(instance, 0) + 1
        hop = self._hop_to(instance)
        if self._reads[instance] == 1 and hop is not None:
            self._count(Instance(instance.item, hop.source))

    def _hop_to(self, instance: Instance) -> Hop | None:
        """The hop by which this rank comes to have the instance without a task; None if something puts it here."""
        if instance not in self._last_hop:
            hops = conversion(self._begin(instance), instance.layout, self.tp)
            hop = hops[-1] if hops else None
            if hop is not None and hop.operation not in LOCAL_HOPS:
                undivided = {"gather": hop.target, "scatter": hop.source}.get(hop.operation)
                hop = hop if undivided is not None and undivided.rank == self.shard else None
            self._last_hop[instance] = hop
        return self._last_hop[instance]

    def _begin(self, instance: Instance) -> ValueLayout:
        """The layout in which the item first is on this rank."""
        value, reading = instance.item
        if reading is not None:
            return reading.ends.gradient
        home = self._layout.stage_of_value[value]
        if home is None:
            return ValueLayout("full", self._layout.batch_ways(self._rank))
        return self._layout.source[value].value if home == self._stage else instance.layout


class StepWatch:
    """Receives the events of a step of `RankProgram`, to count memory. This one takes no notice."""

    def begins(self, task: Task) -> None:
        """A computation or the loading of the batch begins in this thread."""

    def ends(self, task: Task) -> None:
        """It has ended."""

    def loading(self) -> None:
        """The next step's batch begins to be loaded, beside this step."""

    def loaded(self, tensor: Tensor) -> None:
        """A value of the batch is there."""

    def receiving(self) -> None:
        """Room for what other ranks send begins to be made, in this thread."""

    def received(self, tensor: Tensor) -> None:
        """A buffer for what another rank sends is there, what a conversion has made, or a copy that is sent."""

    def resized(self, tensor: Tensor) -> None:
        """The parameters of a bucket are whole here, or no longer (ZeRO 3)."""
