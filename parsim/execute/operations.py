"""What each task of a rank runs: loading, forwards and backwards of components, and its communications.

What does not change from step to step is looked up once per task, when its operation is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parsim.execute.mixing import GroupsByStream, StaleStage
from parsim.execute.stage import StageReplica
from parsim.execute.streams import BatchSource, Operation, Streams
from parsim.model.autograd.cut import (
    BackwardHalf,
    Saved,
    backward_component,
    backward_inputs,
    backward_weights,
    forward_component,
)
from parsim.model.autograd.recompute import Like, RecomputeInputs, forward_again, forward_to_recompute, recompute
from parsim.model.component import LOSS
from parsim.model.shard.apply import padded_piece
from parsim.plans.layouts import LOCAL_HOPS, PIECES, Hop, ValueLayout, conversion
from parsim.program.lifetimes import BucketOfMicrobatch, Room
from parsim.program.passes.gradients import DP_STREAM, sums_norm
from parsim.program.placed import PlanIndex, Reading
from parsim.program.taskgraph import Task
from parsim.work import NORM, ClipGradients, Collective, Compute, LoadBatch, Phase, SendRecv

# The values and gradients one rank holds during a step, by layout, each for as long as someone will still read it.
#
# A layout is there because a component made it, a communication brought it, or it can be cut from another one that is there
# (the hops that send nothing). Which of these it is, and how often each is read, is counted once from the rank's tasks. This is
# finer than `parsim.program.lifetimes`, whose clock are components: what only a communication still reads goes with that.


class ValueKey(NamedTuple):
    """A value of the model, or the gradient of it that the components of one reading make."""

    value: str
    reading: Reading | None = None


class Instance(NamedTuple):
    item: ValueKey
    layout: ValueLayout


Place = tuple[Instance, int]
"""(instance, microbatch)."""


def batch_piece(tensor: Tensor, pieces: int, number: int) -> Tensor:
    size = tensor.shape[0] // pieces
    return tensor.narrow(0, number * size, size)


class Store:
    """Whoever takes a tensor reads it on its own stream. What the store itself makes of others (a piece, a gathered whole) is
    made on the stream of the first who takes it; whoever takes it later waits for that (`Streams` orders both).

    What the computation has put here is its memory, or a view of something that it has taken: then the allocator knows of the
    computation. So a communication can borrow it (`lends`).
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
        """One read. None for a gradient that nobody has made here. lends: to a communication, behind which the computation
        comes before it gives the memory up."""
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
        assert task.origin.hop is not None
        return Instance(self.item(task), task.origin.hop.source)

    def after(self, task: Task) -> Instance:
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


# The communicating hops of a conversion, applied to tensors by plain torch.distributed collectives.
#
# Nothing is changed in place: a tensor that comes in may be another's output or gradient as well. Point-to-point hops are sends
# and receives of whole tensors or pieces of the batch and need nothing from here.


_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_flat(flat: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `flat` with the equal parts `own` of all ranks, in rank order."""
    _all_gather(flat, own, group=group)


def reduce_scatter_flat(own: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `own` with this rank's part of the sum of all ranks' `flat`."""
    _reduce_scatter(own, flat, group=group)


def run_hop(hop: Hop, tensor: Tensor, *, ranks: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """One collective hop on one rank: from what it holds in `hop.source` (for a broadcast on the other ranks, room for the
    result) to what it holds in `hop.target`. ranks: of `group`, ascending, which is the order of their pieces."""
    count = len(ranks)
    match hop.operation:
        case "all_gather_batch":
            parts = _gathered(tensor.contiguous(), count, group)
            return parts.view(count * parts.shape[1], *parts.shape[2:])
        case "all_gather_dim":
            parts = _gathered(tensor.contiguous(), count, group)
            return _unpadded(torch.cat(parts.unbind(), dim=hop.source.dim), hop.source)
        case "all_reduce" | "all_reduce_maximum":
            total = tensor.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, op=dist.ReduceOp.SUM if hop.operation == "all_reduce" else dist.ReduceOp.MAX, group=group)
            return total
        case "reduce_scatter_batch":
            return _reduced(tensor.contiguous(), (tensor.shape[0] // count, *tensor.shape[1:]), group)
        case "reduce_scatter_dim":
            pieces = _pieces(tensor, hop.target)
            return _reduced(pieces, pieces.shape[1:], group)
        case "all_to_all" if hop.source.form == "shard":
            sent = tensor.contiguous().view(count, tensor.shape[0] // count, *tensor.shape[1:])
            return _unpadded(torch.cat(_exchanged(sent, group).unbind(), dim=hop.source.dim), hop.source)
        case "all_to_all":
            received = _exchanged(_pieces(tensor, hop.target), group)
            return received.view(count * received.shape[1], *received.shape[2:])
        case "broadcast":
            whole = tensor.contiguous()
            dist.broadcast(whole, ranks[hop.source.rank], group=group)
            return whole
    raise ValueError(f"hop {hop} is not a collective")


def _gathered(piece: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    parts = piece.new_empty((count, *piece.shape))
    all_gather_flat(parts.view(-1), piece.view(-1), group)
    return parts


def _pieces(tensor: Tensor, layout: ValueLayout) -> Tensor:
    """The pieces of all ranks in a layout "shard", one after the other."""
    return torch.stack([padded_piece(tensor, layout.dim, number, layout.ways) for number in range(layout.ways)])


def _unpadded(tensor: Tensor, layout: ValueLayout) -> Tensor:
    return tensor.narrow(layout.dim, 0, layout.size).contiguous() if layout.size else tensor


def _reduced(pieces: Tensor, shape: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """This rank's piece, of `shape`, of the sum: `pieces` holds those of all ranks one after the other."""
    piece = pieces.new_empty(shape)
    reduce_scatter_flat(piece.view(-1), pieces.view(-1), group)
    return piece


def _exchanged(pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Piece i goes to rank i of the group; the result has what came from each."""
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return received


class StepValues:
    """What all operations of a rank share while a step runs: the values, and the room for those of other ranks. watch: receives
    the events of a step, for tools that count memory."""

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
    component, microbatch = task.origin.component, task.origin.microbatch
    assert component is not None
    assert microbatch is not None
    return component, microbatch


GATHERED = 3
"""The ZeRO stage from which parameters come and go."""

_Key = tuple[str, int]
"""(component, microbatch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instances:
    """A component: what it reads, each once, and where each of its inputs is among them; what it makes; per output the
    gradients that its backward adds up; the gradients of its inputs, and which are complete behind its backward, each with
    whether another stage wants it."""

    reads: tuple[Instance, ...]
    places: tuple[int, ...]
    outputs: tuple[Instance, ...]
    arriving: tuple[tuple[Instance, ...], ...]
    growing: tuple[ValueKey, ...]
    completed: tuple[tuple[Instance, bool], ...]


class Computing:
    """The computations of one rank, and what lies between them in a step. stale: where stages are decoupled, what waits on this
    one between steps. losses: of the step, as far as they count on this rank. batch: of the step, until it is loaded."""

    def __init__(self, values: StepValues, stale: StaleStage | None) -> None:
        self._values, self._stage, self._stale = values, values.stage, stale
        stage, layout = values.stage, values.stage.layout
        self._reading: dict[tuple[str, str], Reading] = {
            (name, value): reading
            for value, readings in layout.readings.items()
            for reading in readings
            for name in reading.components
        }
        self._of = {name: self._instances(name) for name in stage.runnables}
        self._batch_layout = ValueLayout("full", layout.batch_ways(stage.rank))
        self.batch: BatchSource | None = None
        self.reset()

    def _instances(self, name: str) -> _Instances:
        stage, layout = self._stage, self._stage.layout
        runnable = stage.runnables[name]
        inputs = [Instance(ValueKey(value), layout.reads_in(name, value).value) for value in runnable.input_names]
        reads = tuple(dict.fromkeys(inputs))
        return _Instances(
            reads=reads,
            places=tuple(reads.index(instance) for instance in inputs),
            outputs=tuple(Instance(ValueKey(value), layout.source[value].value) for value in runnable.output_names),
            arriving=tuple(tuple(self._values.store.gradients(value)) for value in runnable.output_names),
            growing=tuple(ValueKey(value, self._reading[name, value]) for value in runnable.input_names),
            completed=tuple(
                (Instance(ValueKey(value, reading), reading.ends.gradient), layout.stage_of_value[value] != stage.number)
                for value, reading in layout.completed_readings(stage.number, name)
            ),
        )

    def reset(self) -> None:
        self._records: dict[_Key, Saved] = {}
        self._kept: dict[_Key, RecomputeInputs] = {}
        self._made, self._keeping = self._records, self._kept
        if self._stale is not None:
            self._made = {} if self._stale.forward is None else self._stale.forward.records
            self._records = {} if self._stale.due is None else self._stale.due.records
            self._keeping = {} if self._stale.forward is None else self._stale.forward.kept
            self._kept = {} if self._stale.due is None else self._stale.due.kept
        self._remade: dict[tuple[str, int], Tensor] = {}
        self._halves: dict[_Key, BackwardHalf] = {}
        self._growing: dict[tuple[ValueKey, int], Tensor] = {}
        self.losses: list[Tensor] = []

    def operation(self, task: Task) -> Operation:
        match task.work:
            case Compute(phase=Phase.FORWARD):
                return self._forward(task)
            case Compute(phase=Phase.RECOMPUTE):
                return self._recompute(task)
            case Compute(phase=Phase.BACKWARD_WEIGHT):
                return self._backward_weights(task)
            case Compute():
                return self._backward(task)
            case LoadBatch():
                return self._load
        raise AssertionError(f"{task.work} computes nothing")

    # --- loading ------------------------------------------------------------------------------------------------------

    def read(self, batch: BatchSource) -> list[Mapping[str, Tensor]]:
        return [batch(microbatch) for microbatch in range(self._stage.layout.plan.microbatches)]

    def _load(self) -> None:
        batch, self.batch = self.batch, None
        assert batch is not None
        for microbatch in range(self._stage.layout.plan.microbatches):
            self.keep(microbatch, batch(microbatch))

    def keep(self, microbatch: int, values: Mapping[str, Tensor]) -> None:
        for value, tensor in values.items():
            self._values.watch.loaded(tensor)
            self._values.store.put(Instance(ValueKey(value), self._batch_layout), microbatch, tensor)

    # --- forwards -----------------------------------------------------------------------------------------------------

    def _forward(self, task: Task) -> Operation:
        name, microbatch = key = component_of(task)
        instances, stage, stale, layout = self._of[name], self._stage, self._stale, self._stage.layout
        take, put = self._values.take, self._values.store.put
        whole, counts = stage.runnables[name], name == LOSS and stage.loss_counts
        recomputes, differentiable = layout.recomputes(name), name in layout.differentiable
        remade = [layout.is_remade(value, name) for value in whole.input_names]
        draws, on_host = stage.randomness.draws(name), stage.randomness.draws_on_host(name)
        again = partial(forward_to_recompute, by_operator=layout.recomputes_by_operator(name), draws=draws, on_host=on_host)
        # a value that is a view of a parameter outlives the component, and gathered parameters do not
        gathered = _storages(whole.parameters()) if layout.plan.zero_stage >= GATHERED else frozenset[int]()

        def run() -> None:
            runnable = whole if stale is None or stale.forward is None else stale.forward.runnables[name]
            read = [take(instance, microbatch) for instance in instances.reads]
            inputs = [read[place] for place in instances.places]
            with stage.randomness.around(name), stage.computing():
                if draws:
                    stage.randomness.begin(name, microbatch)
                if recomputes:
                    outputs, kept = again(runnable, inputs, stage.device)
                    if any(remade):  # of an input that the segment makes again, what it is like
                        pairs = zip(kept.inputs, remade, strict=True)
                        like = (Like.of(value) if made and isinstance(value, Tensor) else value for value, made in pairs)
                        kept = replace(kept, inputs=tuple(like))
                    self._keeping[key] = kept
                else:
                    outputs, record = forward_component(runnable, inputs)
                    if differentiable:
                        self._made[key] = record
            if counts:
                self.losses.append(outputs[0])
            for instance, tensor in zip(instances.outputs, outputs, strict=True):
                put(instance, microbatch, tensor.clone() if gathered & _storages([tensor]) else tensor, computed=True)

        return run

    def _recompute(self, task: Task) -> Operation:
        name, microbatch = key = component_of(task)
        stage, layout = self._stage, self._stage.layout
        runnable, segment = stage.runnables[name], layout.segment_of(name)
        read_again = [any(reader in segment for reader in layout.consumers[value]) for value in runnable.output_names]

        def run() -> None:
            kept = self._kept.pop(key)
            with stage.randomness.around(name), stage.computing():
                if not segment:
                    self._records[key] = recompute(runnable, kept)
                    return
                named = zip(runnable.input_names, kept.inputs, strict=True)
                inputs = [value if isinstance(value, Tensor) else self._remade[what, microbatch] for what, value in named]
                outputs, self._records[key] = forward_again(runnable, kept, inputs)
            for what, output, read in zip(runnable.output_names, outputs, read_again, strict=True):
                if read:
                    self._remade[what, microbatch] = output

        return run

    # --- backwards ----------------------------------------------------------------------------------------------------

    def _backward(self, task: Task) -> Operation:
        """Gradients of a value from readers that make it alike add up inside the backwards, see `backward_component`."""
        assert isinstance(task.work, Compute)
        name, microbatch = key = component_of(task)
        instances, stage, stale = self._of[name], self._stage, self._stale
        put, unsharded = self._values.store.put, stage.unsharded_of(name)
        halved, completes = task.work.phase is Phase.BACKWARD_INPUT, task.work.phase is stage.layout.weight_phase(name)
        begins = completes and bool(unsharded)

        def run() -> None:
            record = self._records.pop(key)
            if name == LOSS:
                outputs: list[Tensor | None] = [stage.loss_gradient]
            else:
                outputs = [self._sum(arriving, microbatch) for arriving in instances.arriving]
            so_far = [self._growing.pop((item, microbatch), None) for item in instances.growing]
            if begins:
                for bucket in unsharded:
                    stage.divided[bucket].begin_gradients()
            if halved:
                runnable = stage.runnables[name] if stale is None or stale.due is None else stale.due.runnables[name]
                gradients, self._halves[key] = backward_inputs(record, runnable.parameters(), outputs, so_far)
            else:
                gradients = backward_component(record, outputs, so_far)
            for item, gradient in zip(instances.growing, gradients, strict=True):
                if gradient is not None:
                    self._growing[item, microbatch] = gradient
            for instance, leaves in instances.completed:
                total = self._growing.pop((instance.item, microbatch), None)
                if total is not None:  # a piece of a larger gradient would keep all of that until it is sent
                    put(instance, microbatch, total.contiguous() if leaves else total, computed=True)

        return run

    def _backward_weights(self, task: Task) -> Operation:
        name, _ = key = component_of(task)
        stage, unsharded = self._stage, self._stage.unsharded_of(name)

        def run() -> None:
            for bucket in unsharded:
                stage.divided[bucket].begin_gradients()
            backward_weights(self._halves.pop(key))

        return run

    def _sum(self, instances: tuple[Instance, ...], microbatch: int) -> Tensor | None:
        """Gradient of a value from all its readers, later ones first, as autograd would add them."""
        total: Tensor | None = None
        for instance in instances:
            tensor = self._values.store.take(instance, microbatch)
            if tensor is not None:
                total = tensor if total is None else total + tensor
        return total


def _storages(tensors: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)


class Communicating:
    """The communications of one rank, and the room for them in a step. awaited: by number the sends to other stages that a
    computation waits for before it gives up what they send."""

    def __init__(
        self, values: StepValues, groups: GroupsByStream, stale: StaleStage | None, awaited: frozenset[int] = frozenset()
    ) -> None:
        self._values, self._groups, self._stale, self._awaited = values, groups, stale, awaited
        self._stage, self._streams, self._store = values.stage, values.streams, values.store
        self._norm: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        self._sent: dict[BucketOfMicrobatch, tuple[Tensor, Tensor]] = {}
        self._receiving: dict[int, tuple[Tensor, Any]] = {}
        self._leaving: dict[int, Tensor | None] = {}  # None: given up, though it may still be being sent

    def ended(self) -> None:
        self._leaving.clear()

    def operation(self, task: Task) -> Operation:
        match task.work:
            case ClipGradients(part=part):
                return self._begin_norm if part == NORM else self._scale_gradients
            case Collective() if sums_norm(task):
                return partial(self._sum_norm, task.work)
            case Collective() | SendRecv() if task.origin.hop is not None:
                return partial(self._hop, task)
            case Collective():
                return self._synchronise(task)
            case SendRecv():
                return partial(self._transfer, task)
        raise AssertionError(f"{task.work} communicates nothing")

    # --- gradient buckets ---------------------------------------------------------------------------------------------

    def begin_parameters(self, buckets: Sequence[int]) -> None:
        """Room for all parameters of the buckets (ZeRO 3)."""
        for bucket in buckets:
            self._values.watch.resized(self._stage.divided[bucket].begin_parameters())

    def around(self, room: Room, operation: Operation) -> Operation:
        """The operation, and the room for buckets that are whole for a while around it (ZeRO 2 and 3)."""

        def run() -> None:
            for key in room.forgotten:
                del self._sent[key]
            operation()
            for bucket in room.ending_parameters:
                divided = self._stage.divided[bucket]
                divided.end_parameters()
                self._values.watch.resized(divided.parameters)
            for bucket, microbatch in room.ending_gradients:
                divided = self._stage.divided[bucket]
                summed = divided.summed  # another stream may still add to it, so only its shape is asked for
                received = torch.empty(summed.shape, dtype=summed.dtype, device=summed.device)
                self._sent[bucket, microbatch] = divided.end_gradients(), received
            self.begin_parameters(room.beginning_parameters)

        return run

    def _synchronise(self, task: Task) -> Operation:
        """A gradient bucket: summed whole, or with ZeRO summed in parts, which sharding groups sum with one another; and its
        parameters put together again."""
        assert isinstance(task.work, Collective)
        assert task.origin.bucket is not None, "a collective without a hop belongs to a gradient bucket"
        microbatch, stage = task.origin.microbatch, self._stage
        number = stage.own_bucket(task.origin.bucket)
        group = self._groups[task.resources[0].stream, tuple(sorted(task.work.group))]
        lent = self._streams.lent

        def all_reduce() -> None:
            flat = stage.summed_gradient(number)
            lent(flat)
            dist.all_reduce(flat, group=group)

        def scatter_of_microbatch() -> None:
            assert microbatch is not None
            flat, room = self._sent[number, microbatch]
            lent(flat)
            lent(room)
            reduce_scatter_flat(room, flat, group)
            stage.divided[number].gradients.add_(room)

        def reduce_scatter() -> None:
            flat, chunk = stage.buckets[number], stage.divided[number].summed
            lent(flat)
            room = torch.empty_like(chunk)  # the chunk is part of what is sent
            reduce_scatter_flat(room, flat, group)
            chunk.copy_(room)

        def all_gather() -> None:
            flat, chunk = stage.divided[number].parameters, stage.divided[number].chunk.data
            lent(flat)
            all_gather_flat(flat, chunk.clone() if microbatch is None else chunk, group)

        match task.work.operation:
            case "all_reduce":
                return all_reduce
            case "reduce_scatter":
                return reduce_scatter if microbatch is None else scatter_of_microbatch
            case "all_gather":
                return all_gather
        raise AssertionError(f"no gradient bucket is synchronised by {task.work.operation}")

    def _begin_norm(self) -> None:
        self._norm = self._stage.squared_norm()

    def _sum_norm(self, work: Collective) -> None:
        assert self._norm is not None
        self._streams.lent(self._norm)
        dist.all_reduce(self._norm, group=self._groups[DP_STREAM, tuple(sorted(work.group))])

    def _scale_gradients(self) -> None:
        assert self._norm is not None
        self._stage.clip_gradients(self._norm)

    # --- conversions on the tp axis -----------------------------------------------------------------------------------

    def _hop(self, task: Task) -> None:
        origin, store = task.origin, self._store
        assert origin.hop is not None
        assert origin.microbatch is not None
        before, after = store.before(task), store.after(task)
        if isinstance(task.work, SendRecv):
            self._message(task, before, after)
            return
        assert isinstance(task.work, Collective)
        held = store.shard in origin.hop.source.holders(store.tp)
        tensor = self._values.take(before, origin.microbatch, lends=True) if held else self._values.room(before)
        group = self._groups["tp", tuple(sorted(task.work.group))]
        made = run_hop(origin.hop, tensor, ranks=task.work.group, group=group)
        self._values.watch.received(made)
        store.put(after, origin.microbatch, made)

    def _message(self, task: Task, before: Instance, after: Instance) -> None:
        """A point-to-point hop: a piece to or from the rank that has the whole, or the whole from one rank to another."""
        work, origin, store = task.work, task.origin, self._store
        assert isinstance(work, SendRecv)
        assert origin.hop is not None
        assert origin.microbatch is not None
        group = self._groups["tp", tuple(sorted((work.source, work.destination)))]
        plan = self._stage.layout.plan
        scattered = origin.hop.operation == "scatter"
        if self._stage.rank == work.source:
            tensor = self._values.take(before, origin.microbatch, lends=True)
            if scattered:
                tensor = batch_piece(tensor, store.tp, plan.shard_of_rank(work.destination))
            tensor = tensor.contiguous()
            dist.send(self._streams.unowned(tensor), work.destination, group=group)
            return
        gathered = origin.hop.operation == "gather"
        buffer = self._values.room(before if gathered else after)
        dist.recv(self._streams.unowned(buffer), work.source, group=group)
        if gathered:
            store.put_piece(after, origin.microbatch, plan.shard_of_rank(work.source), buffer)
        else:
            store.put(after, origin.microbatch, buffer)

    # --- values between stages ----------------------------------------------------------------------------------------

    def between(self, forgotten: Sequence[int], arriving: Sequence[Task], operation: Operation) -> Operation:
        """The operation, and around it what is given up of messages to other stages, and room for those of others."""

        def run() -> None:
            for index in forgotten:
                self._leaving[index] = None
            operation()
            self.make_room(arriving)

        return run

    def make_room(self, receives: Sequence[Task]) -> None:
        """Room for messages of other stages. Their stream begins when what is in this memory until now has been read."""
        if receives:
            self._values.watch.receiving()
            buffers = [self._values.room(self._store.moved(task)) for task in receives]
            fence = self._streams.fence()
            self._receiving.update((task.index, (buffer, fence)) for task, buffer in zip(receives, buffers, strict=True))

    def _transfer(self, task: Task) -> None:
        """A value to a later stage, or a gradient to an earlier one."""
        work, origin = task.work, task.origin
        assert isinstance(work, SendRecv)
        assert origin.microbatch is not None
        moved = self._store.moved(task)
        ranks = (min(work.source, work.destination), max(work.source, work.destination))
        group = self._groups[f"pp>{work.destination}", ranks]
        if self._stage.rank == work.source:
            tensor = self._values.take(moved, origin.microbatch, lends=task.index in self._awaited).contiguous()
            self._leaving.setdefault(task.index, tensor)
            self._values.watch.received(tensor)
            dist.send(self._streams.unowned(tensor), work.destination, group=group)
            return
        buffer, fence = self._receiving.pop(task.index)
        self._streams.after(fence)
        self._streams.lent(buffer)
        dist.recv(self._streams.unowned(buffer), work.source, group=group)
        if self._stale is None or not self._stale.arrives(task, buffer):
            self._store.put(moved, origin.microbatch, buffer, computed=True)
