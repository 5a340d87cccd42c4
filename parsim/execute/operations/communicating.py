"""Collectives and transfers of a rank: gradient buckets, conversions on the tp axis, and values between stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parsim.execute.convert import all_gather_flat, reduce_scatter_flat, run_hop
from parsim.execute.operations.values import StepValues
from parsim.execute.records.task_time import Operation
from parsim.execute.relaxed.mixing import GroupsByStream
from parsim.execute.relaxed.stale import StaleStage
from parsim.execute.rooms.buckets import BucketOfMicrobatch, Room
from parsim.execute.state.store import Instance, batch_piece
from parsim.graph.passes.clipping import sums_norm
from parsim.graph.passes.gradients import DP_STREAM
from parsim.graph.task import Task
from parsim.work import NORM, ClipGradients, Collective, SendRecv


class Communicating:
    """The communications of one rank, and the room for them in a step.

    Args:
        values: of the step. stale: where stages are decoupled, what waits on this one between steps.
        awaited: by number the sends to other stages that a computation waits for before it gives up what they send.
    """

    def __init__(
        self, values: StepValues, groups: GroupsByStream, stale: StaleStage | None, awaited: frozenset[int] = frozenset()
    ) -> None:
        self._values, self._groups, self._stale, self._awaited = values, groups, stale, awaited
        self._stage, self._streams, self._store = values.stage, values.streams, values.store
        self._norm: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """A new step begins."""
        self._sent: dict[BucketOfMicrobatch, tuple[Tensor, Tensor]] = {}
        self._receiving: dict[int, tuple[Tensor, Any]] = {}
        self._leaving: dict[int, Tensor | None] = {}  # None: given up, though it may still be being sent

    def ended(self) -> None:
        """All communication of the step has ended."""
        self._leaving.clear()

    def operation(self, task: Task) -> Operation:
        """What a task that communicates, or clips gradients, runs."""
        match task.work:
            case ClipGradients(part=part):
                return self._begin_norm if part == NORM else self._scale_gradients
            case Collective() if sums_norm(task):
                return lambda: self._sum_norm(task)
            case Collective() | SendRecv() if task.origin.hop is not None:
                return lambda: self._hop(task)
            case Collective():
                return self._synchronise(task)
            case SendRecv():
                return lambda: self._transfer(task)
        raise AssertionError(f"{task.work} communicates nothing")

    # --- gradient buckets ---------------------------------------------------------------------------------------------

    def begin_parameters(self, buckets: Sequence[int]) -> None:
        """Room for all parameters of the buckets (ZeRO 3)."""
        for bucket in buckets:
            self._values.watch.resized(self._stage.begin_parameters(bucket))

    def around(self, room: Room, operation: Operation) -> Operation:
        """The operation, and the room for buckets that are whole for a while around it (ZeRO 2 and 3)."""

        def run() -> None:
            for key in room.forgotten:
                del self._sent[key]
            operation()
            for bucket in room.ending_parameters:
                self._stage.end_parameters(bucket)
                self._values.watch.resized(self._stage.flat_parameters(bucket))
            for bucket, microbatch in room.ending_gradients:
                chunk = self._stage.gradient_chunk(bucket)
                own = torch.empty(chunk.shape, dtype=chunk.dtype, device=chunk.device)
                self._sent[bucket, microbatch] = self._stage.end_gradients(bucket), own
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
            flat, own = self._sent[number, microbatch]
            lent(flat)
            lent(own)
            reduce_scatter_flat(own, flat, group)
            stage.add_gradients(number, own)

        def reduce_scatter() -> None:
            flat, chunk = stage.flat_gradient(number), stage.gradient_chunk(number)
            lent(flat)
            own = torch.empty_like(chunk)  # the chunk is part of what is sent
            reduce_scatter_flat(own, flat, group)
            chunk.copy_(own)

        def all_gather() -> None:
            flat, chunk = stage.flat_parameters(number), stage.parameter_chunk(number)
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
        """This rank's share of the squared norm of all gradients."""
        self._norm = self._stage.squared_norm()

    def _sum_norm(self, task: Task) -> None:
        assert isinstance(task.work, Collective)
        assert self._norm is not None
        self._streams.lent(self._norm)
        dist.all_reduce(self._norm, group=self._groups[DP_STREAM, tuple(sorted(task.work.group))])

    def _scale_gradients(self) -> None:
        assert self._norm is not None
        self._stage.clip_gradients(self._norm)

    # --- conversions on the tp axis -----------------------------------------------------------------------------------

    def _hop(self, task: Task) -> None:
        """One step of a conversion on the tp axis."""
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
        if self._stale is not None:
            self._stale.arrives(task, buffer)
        else:
            self._store.put(moved, origin.microbatch, buffer, computed=True)
