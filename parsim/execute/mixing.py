"""What a rank keeps from step to step where training is relaxed: its part of mixing rounds, and of decoupled stages.

In a round its weights go out, the weighted sum comes back, and an outer optimizer may move it on. Or a global model comes,
takes some of the rank's weights, and goes on.

The rounds' tasks are those of `parsim.program.passes.rounds`. A bucket's weights are packed into the flat array of its
gradients, which nobody needs between the optimizer's step and the next backward. So sending needs no room of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parsim.errors import ExecutionError
from parsim.execute.processes.group import Stream
from parsim.execute.processes.heartbeat import pulse
from parsim.execute.stage import StageReplica
from parsim.execute.streams import BatchSource
from parsim.model.autograd.cut import Saved
from parsim.model.autograd.recompute import RecomputeInputs
from parsim.model.runnable import Runnable
from parsim.plans.mixing import LoopState
from parsim.plans.plan import Plan
from parsim.program.buckets import Bucket
from parsim.program.passes.rounds import MESSAGE_STREAM, is_late, mixing_peers
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import TURN, Task, TaskGraph
from parsim.work import Collective, Compute, LoadBatch, Mix, Phase, SendRecv

GroupsByStream = Mapping[Stream, dist.ProcessGroup]

MEAN = "mean"
"""Stream of the group in which replicas take the mean of their weights for a checkpoint, and under gloo send messages."""


def mean_groups(layout: PlanIndex) -> list[Stream]:
    """The groups that a checkpoint of replicas with different weights needs; none for other plans."""
    if not layout.plan.synchronisation.mixes:
        return []
    peers = (members for bucket in layout.buckets for members in mixing_peers(layout, bucket))
    return list(dict.fromkeys((MEAN, tuple(sorted(members))) for members in peers))


def is_message(stream: Stream) -> bool:
    """Whether a stream carries the messages of one link of gossip, or of merging in turn. Under gloo all links share one group,
    where tags tell messages apart. A group per link would have a thread per link: on a machine of two cores, four ranks with
    twelve links each way sometimes stood still for minutes."""
    return stream[0].startswith((f"{MESSAGE_STREAM}>", f"{TURN}>"))


class MixingRounds:
    """What a rank keeps from round to round, and how it does the tasks of one.

    received: called with every buffer for what arrives. used: `Streams.used`: computation reads what a communication's stream
    has allocated.

    Attributes:
        previous, velocity: by bucket, what the outer optimizer keeps; empty without one. Of merge `previous` is the global
            model that was here last, which the last replica hands to the first on the way to the next round. Of push-sum it is
            the model behind the last round; and of gossip that combines first, the weights that the step began with.
        starts, means: by bucket, of an average that combines first the weights that the step began with, and what is summed of
            them. Of a buffered merge `starts` is the model that a replica began with.
        taken, place: of a closed loop, by bucket what mixing took from n D since the lattice was chosen and in how many rounds,
            float64 [2]; and under 0 the place of that lattice, int64 [1].
        masses: of push-sum, by bucket those of all replicas behind the last round, float64 [replicas].
    """

    def __init__(
        self,
        stage: StageReplica,
        groups: GroupsByStream,
        received: Callable[[Tensor], None],
        used: Callable[[Tensor], None],
    ) -> None:
        plan = stage.layout.plan
        self._stage, self._groups, self._received, self._used = stage, groups, received, used
        self._rule, self._replicas = plan.synchronisation, plan.mesh.dp
        self._replica = plan.replica_of_rank(stage.rank)
        self._arrived: dict[tuple[int, int], Tensor] = {}
        self.previous: dict[int, Tensor] = {}
        self.velocity: dict[int, Tensor] = {}
        self.masses: dict[int, Tensor] = {}
        self.starts: dict[int, Tensor] = {}
        self.means: dict[int, Tensor] = {}
        self.taken: dict[int, Tensor] = {}
        self.place: dict[int, Tensor] = {}
        self._gathered: dict[int, list[Tensor]] = {}
        self._handed: dict[tuple[int, bool], dist.Work] = {}
        self._begin()

    def _begin(self) -> None:
        """What is kept from round to round, as before the first."""
        rule, outer = self._rule, self._rule.outer
        beside = rule.combines_first and rule.kind == "average"
        if beside:
            self.starts = {bucket.number: self._packed(bucket) for bucket in self._buckets()}
            self.means = {number: flat.clone() for number, flat in self.starts.items()}
        keeps = outer is not None or bool(rule.message_format) or rule.kind == "merge" or rule.push_sum
        if keeps or (rule.combines_first and not beside):
            self.previous = {bucket.number: self._packed(bucket) for bucket in self._buckets()}
        if rule.merge == "buffered":
            self.starts = dict(self.previous)
            self.previous = {number: torch.cat([flat, torch.zeros_like(flat)]) for number, flat in self.previous.items()}
        if rule.push_sum:
            ones = torch.ones(self._replicas, dtype=torch.float64)
            self.masses = {bucket.number: ones.clone() for bucket in self._buckets()}
        if rule.is_closed_loop:
            flats = self._stage.buckets
            self.taken = {
                bucket.number: torch.zeros(2, dtype=torch.float64, device=flats[bucket.number].device)
                for bucket in self._buckets()
            }
            self.place = {0: torch.zeros(1, dtype=torch.int64)}
        if outer is not None and outer.momentum:
            self.velocity = {number: torch.zeros_like(flat) for number, flat in self.previous.items()}

    def _buckets(self) -> tuple[Bucket, ...]:
        return self._stage.layout.rank_buckets(self._stage.rank)

    def _packed(self, bucket: Bucket) -> Tensor:
        with torch.no_grad():
            return torch.cat([self._stage.parameters[held.name].detach().flatten() for held in bucket.parameters])

    def resident_tensors(self) -> list[Tensor]:
        return [*self.previous.values(), *self.velocity.values(), *self.starts.values(), *self.means.values()]

    def round_of(self, step: int) -> int:
        """The round that step `step` belongs to; of a closed loop the place of its lattice, which all ranks choose alike."""
        number, inside = divmod(step, self._rule.round_steps)
        if not self.place:
            return number
        begins = self._rule.mixing.chooses(number) and not inside
        if begins and (rounds := int(next(iter(self.taken.values()))[1])):
            taken = torch.stack([held[0] for held in self.taken.values()]).sum()
            peers = mixing_peers(self._stage.layout, self._buckets()[0])[0]
            with pulse().waiting():
                dist.all_reduce(taken, group=self._groups[MEAN, tuple(sorted(peers))])
            loop = LoopState(int(self.place[0]), float(taken) / self._replicas, rounds)
            self.place[0].fill_(self._rule.mixing.chosen(loop, self._replicas).place)
            for held in self.taken.values():
                held.zero_()
        return int(self.place[0])

    def operations(self, graph: TaskGraph, number: int, *, local: bool = False) -> dict[int, Callable[[], None]]:
        """By task of this rank that belongs to round `number`, what to do. graph: of the step that the round follows, or of a
        step before it (local), which packs where a plan combines first."""
        operations: dict[int, Callable[[], None]] = {}
        packed: set[int] = set()
        merges = self._rule.kind == "merge"
        for task in graph.tasks:
            if self._stage.rank not in task.ranks or task.origin.bucket is None:
                continue
            bucket = task.origin.bucket
            match task.work:
                case Mix() if merges:
                    operations[task.index] = self._merging(bucket, number)
                case SendRecv():
                    operations[task.index] = self._handing_on(task) if merges else self._message(task)
                case Mix():
                    operations[task.index] = (
                        self._mixing(bucket, number) if bucket in packed else self._packing(bucket, number, local)
                    )
                    packed.add(bucket)
                case Collective() if bucket in packed:
                    operations[task.index] = self._average(bucket, task.work)
        return operations

    def _packing(self, bucket: int, number: int, local: bool) -> Callable[[], None]:
        share = 1.0 if self._rule.kind == "gossip" else float(self._rule.shares(number, self._replicas)[self._replica])
        rounds = bool(self._rule.message_format)
        fragments = self._rule.fragments
        is_sent = not local and bucket % fragments == number % fragments

        def run() -> None:
            with torch.no_grad():
                if self._rule.combines_first:  # gradients need their arrays
                    parameters, begun = self._parameters(bucket), (self.starts or self.previous)[bucket]
                    for parameter, part in zip(parameters, _parts(begun, parameters), strict=True):
                        part.copy_(parameter)
                    if bucket in self.means and is_sent:
                        torch.mul(begun, 1.0 if rounds else share, out=self.means[bucket])
                        if rounds:
                            self._round_change(bucket)
                    return
                for parameter in self._parameters(bucket):
                    assert parameter.grad is not None
                    torch.mul(parameter, 1.0 if rounds else share, out=parameter.grad)
                if rounds:
                    self._round_change(bucket)
                if bucket in self.masses:  # the steps since the last round are added to x, and not to x / w
                    self._stage.buckets[bucket].add_(self.previous[bucket], alpha=self._mass(bucket) - 1.0)

        return run

    def _round_change(self, bucket: int) -> None:
        """Round the change of what is packed, and make room for those of all replicas."""
        change = self._packed_in(bucket).sub_(self.previous[bucket])
        message = rounded(change, self._sizes(bucket), self._rule.message_format)
        self._gathered[bucket] = [torch.empty_like(message) for _ in range(self._replicas)]
        for buffer in self._gathered[bucket]:
            self._received(buffer)
        self._gathered[bucket][self._replica].copy_(message)

    def _sizes(self, bucket: int) -> list[int]:
        return [parameter.numel() for parameter in self._parameters(bucket)]

    def _packed_in(self, bucket: int) -> Tensor:
        """The array that an average is made in."""
        return self.means.get(bucket, self._stage.buckets[bucket])

    def _mass(self, bucket: int) -> float:
        return float(self.masses[bucket][self._replica])

    def _parameters(self, bucket: int) -> list[Tensor]:
        return [self._stage.parameters[held.name] for held in self._stage.layout.buckets[bucket].parameters]

    def _average(self, bucket: int, work: Collective) -> Callable[[], None]:
        flat, group = self._packed_in(bucket), self._groups["dp", tuple(sorted(work.group))]

        def run() -> None:
            if (gathered := self._gathered.get(bucket)) is None:
                dist.all_reduce(flat, group=group)
            else:
                dist.all_gather(gathered, gathered[self._replica].clone(), group=group)

        return run

    def _link(self, task: Task) -> tuple[dist.ProcessGroup, int]:
        work, bucket = task.work, task.origin.bucket
        assert isinstance(work, SendRecv)
        assert bucket is not None
        ends = (min(work.source, work.destination), max(work.source, work.destination))
        group = self._groups.get((task.resources[0].stream, ends))
        if group is not None:
            return group, 0
        layout = self._stage.layout
        peers = next(peers for peers in mixing_peers(layout, layout.buckets[bucket]) if ends[0] in peers)
        return self._groups[MEAN, tuple(sorted(peers))], bucket

    def _message(self, task: Task) -> Callable[[], None]:
        work, bucket = task.work, task.origin.bucket
        assert isinstance(work, SendRecv)
        assert bucket is not None
        flat = self.previous[bucket] if self._rule.combines_first else self._stage.buckets[bucket]
        group, tag = self._link(task)
        if self._stage.rank == work.source:
            return lambda: dist.send(flat, work.destination, group=group, tag=tag)

        def receive() -> None:
            buffer = torch.empty_like(flat)
            self._received(buffer)
            dist.recv(buffer, work.source, group=group, tag=tag)
            self._arrived[bucket, self._stage.layout.plan.replica_of_rank(work.source)] = buffer

        return receive

    def _handing_on(self, task: Task) -> Callable[[], None]:
        """The global model goes to the next replica, which may still train. The sender and the first replica do not wait. One
        array is enough at each end: a replica is handed the model again only after all others have had it, so what it sent has
        arrived."""
        work, bucket = task.work, task.origin.bucket
        assert isinstance(work, SendRecv)
        assert bucket is not None
        group, tag = self._link(task)
        sends, to = self._stage.rank == work.source, work.destination
        to_first = self._stage.layout.plan.replica_of_rank(to) == 0

        def run() -> None:
            model = self.previous[bucket]
            if sends or to_first:
                begin, peer = (dist.isend, to) if sends else (dist.irecv, work.source)
                handed = begin(model, peer, group=group, tag=tag)
                assert handed is not None
                self._handed[bucket, sends] = handed
            else:
                dist.recv(model, work.source, group=group, tag=tag)

        return run

    def _merging(self, bucket: int, number: int) -> Callable[[], None]:
        weight = self._rule.turn_weight(number, self._replica, self._replicas)
        buffers = self._rule.merge == "buffered"

        def run() -> None:
            self._settle(bucket)
            with torch.no_grad():
                parameters = self._parameters(bucket)
                if buffers:
                    self._buffer_change(bucket, weight)
                    for parameter, part in zip(parameters, _parts(self.starts[bucket], parameters), strict=True):
                        parameter.copy_(part)
                    return
                for parameter, part in zip(parameters, _parts(self.previous[bucket], parameters), strict=True):
                    part.lerp_(parameter, weight)
                    parameter.copy_(part)

        return run

    def _buffer_change(self, bucket: int, weight: float) -> None:
        """Add the change since the replica's last turn to what is buffered, and that to the global model once it is full."""
        start = self.starts[bucket]
        both = self.previous[bucket]
        model, buffered = both[: len(start)], both[len(start) :]
        parameters = self._parameters(bucket)
        for parameter, part in zip(parameters, _parts(buffered, parameters), strict=True):
            part.add_(parameter)
        buffered.sub_(start)
        if weight:
            model.add_(buffered, alpha=weight)
            buffered.zero_()
        start.copy_(model)

    def _settle(self, bucket: int) -> None:
        """Wait for what was handed on and has come from the round before."""
        for sends in (True, False):
            if (handed := self._handed.pop((bucket, sends), None)) is not None:
                handed.wait()

    def settle(self) -> None:
        for bucket in {bucket for bucket, _ in self._handed}:
            self._settle(bucket)

    def _mixing(self, bucket: int, number: int) -> Callable[[], None]:
        flat, outer = self._packed_in(bucket), self._rule.outer
        matrix = torch.tensor(self._rule.matrix(number, self._replicas))
        row = matrix[self._replica].tolist()

        def run() -> None:
            with torch.no_grad():
                if self._rule.kind == "gossip":
                    if (taken := self.taken.get(bucket)) is not None:
                        taken[0] += squared_norm(self.previous[bucket] if self._rule.combines_first else flat)
                        taken[1] += 1
                    if self._rule.combines_first:
                        torch.mul(self.previous[bucket], row[self._replica], out=flat)
                    else:
                        flat.mul_(row[self._replica])
                    for other in [other for held, other in sorted(self._arrived) if held == bucket]:
                        arrived = self._arrived.pop((bucket, other))
                        self._used(arrived)
                        flat.add_(arrived, alpha=row[other])
                    if taken is not None:
                        taken[0] -= squared_norm(flat)
                    self._finish(bucket, flat, matrix)
                elif bucket in self._gathered:
                    flat.copy_(self.previous[bucket])
                    for message, weight in zip(self._gathered.pop(bucket), row, strict=True):
                        self._used(message)
                        flat.add_(restored(message, self._sizes(bucket), self._rule.message_format, flat.dtype), alpha=weight)
                    if outer is None:
                        self.previous[bucket].copy_(flat)
                if outer is not None:
                    moved, velocity = outer.step(self.previous[bucket], flat, self.velocity.get(bucket))
                    if bucket in self.velocity:
                        self.velocity[bucket].copy_(velocity)
                    self.previous[bucket].copy_(moved)
                    flat.copy_(moved)
                if bucket in self.means:
                    flat.sub_(self.starts[bucket])  # the parameters have the step since
                    parameters = self._parameters(bucket)
                    for parameter, part in zip(parameters, _parts(flat, parameters), strict=True):
                        parameter.add_(part)
                    return
                for parameter in self._parameters(bucket):
                    assert parameter.grad is not None
                    parameter.copy_(parameter.grad)
                flat.zero_()

        return run

    def _finish(self, bucket: int, mixed: Tensor, matrix: Tensor) -> None:
        """What push-sum, and a step beside the exchange, make of the weighted sum; elsewhere it is the model."""
        if bucket in self.masses:
            self.masses[bucket] = matrix @ self.masses[bucket]
            mixed.div_(self._mass(bucket))
            self.previous[bucket].copy_(mixed)
        if self._rule.combines_first:  # the change of the step since
            parameters = self._parameters(bucket)
            for parameter, before in zip(parameters, _parts(self.previous[bucket], parameters), strict=True):
                assert parameter.grad is not None
                parameter.grad.add_(parameter).sub_(before)

    def mean_weights(self) -> dict[str, Tensor]:
        """The mean of the replicas' weights, by name: the model that training stands for. Every rank calls it."""
        weights: dict[str, Tensor] = {}
        for bucket in self._buckets():
            peers = next(group for group in mixing_peers(self._stage.layout, bucket) if self._stage.rank in group)
            flat = self._packed(bucket)
            if bucket.number in self.masses:
                flat.add_(self.previous[bucket.number], alpha=self._mass(bucket.number) - 1.0)
            flat.mul_(1.0 / self._replicas)
            with pulse().waiting():
                dist.all_reduce(flat, group=self._groups[MEAN, tuple(sorted(peers))])
            parts = _parts(flat, [self._stage.parameters[held.name] for held in bucket.parameters])
            weights |= {held.name: part for held, part in zip(bucket.parameters, parts, strict=True)}
        return weights

    @property
    def marker(self) -> str:
        return own_marker(self._stage.layout.plan)

    @property
    def held(self) -> str:
        """How this rank's parameters lie in buckets: other stages or `bucket_bytes` make it another plan."""
        return "; ".join(f"{bucket.parameters[0].name} {bucket.elements}" for bucket in self._buckets())

    def _kept(self) -> tuple[tuple[str, dict[int, Tensor]], ...]:
        kept = {"previous": self.previous, "velocity": self.velocity, "masses": self.masses, "starts": self.starts}
        return tuple({**kept, "taken": self.taken, "place": self.place}.items())

    def own_state(self) -> dict[str, Any]:
        """What only this rank can go on with: its weights, its optimizer's state, and what the outer optimizer keeps."""
        self.settle()
        state: dict[str, Any] = {PLAN: self.marker, HELD: self.held}
        for name, parameter in self._stage.parameters.items():
            state[f"weights/{name}"] = parameter.detach()
            for key, value in self._stage.held_state(name)[1].items():
                state[f"optimizer/{name}/{key}"] = value
        for kind, arrays in self._kept():
            state |= {f"outer/{kind}/{number}": flat for number, flat in arrays.items()}
        return state

    def load_own(self, state: Mapping[str, Any]) -> None:
        """Go on where this very rank stopped; from another plan's checkpoint with what that holds, and a new outer optimizer.
        Raises ExecutionError where a part of the own state is missing."""
        if state.get(PLAN) != self.marker or state.get(HELD, self.held) != self.held:
            self._begin()
            return
        try:
            for name in self._stage.parameters:
                prefix = f"optimizer/{name}/"
                state_of = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
                self._stage.load_parameter(name, state[f"weights/{name}"], state_of)
            self._stage.finish_loading()
            for kind, arrays in self._kept():
                for number, flat in arrays.items():
                    flat.copy_(state[f"outer/{kind}/{number}"])
        except KeyError as error:
            raise lacking(error, self._stage.rank) from error


def squared_norm(values: Tensor) -> Tensor:
    """|x|^2 of all elements, float64. A doubly stochastic W takes sum_i (|x_i|^2 - |(W x)_i|^2) / n from D, since it keeps the
    mean: so a closed loop needs no mean of the replicas."""
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()


def rounded(change: Tensor, sizes: Sequence[int], message_format: str) -> Tensor:
    """A change [elements] of tensors of these sizes as it is sent, uint8 [bytes]; of int8 their scales, fp32, come last."""
    if message_format == "bf16":
        return change.to(torch.bfloat16).view(torch.uint8)
    parts = torch.split(change, list(sizes))
    scales = torch.stack([part.abs().max() for part in parts]).div_(127.0).float()
    steps = [part / scale.clamp(min=TINY).to(part.dtype) for part, scale in zip(parts, scales, strict=True)]
    whole = torch.cat(steps).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([whole.view(torch.uint8), scales.view(torch.uint8)])


def restored(message: Tensor, sizes: Sequence[int], message_format: str, dtype: torch.dtype) -> Tensor:
    """Inverse of `rounded`, up to half a step: for bf16 2^-8 of each element, for int8 1/254 of a tensor's largest."""
    if message_format == "bf16":
        return message.view(torch.bfloat16).to(dtype)
    elements = sum(sizes)
    scales = message[elements:].clone().view(torch.float32)  # a part of an array may lie where no float can
    parts = torch.split(message[:elements].view(torch.int8).to(dtype), list(sizes))
    return torch.cat([part * scale.to(dtype) for part, scale in zip(parts, scales, strict=True)])


TINY = torch.finfo(torch.float32).tiny
"""In place of the scale of a tensor that has not changed."""


def own_marker(plan: Plan) -> str:
    """What must have written a rank's own state for the rank to go on with it."""
    stages = f" {[stage.components for stage in plan.stages]}" if plan.synchronisation.is_stale else ""
    return f"{plan.mesh} {plan.synchronisation}{stages}"


PLAN = "plan"
"""Key in a rank's own state of what must have written it: the `marker` of MixingRounds or StaleStage."""

HELD = "held"
"""Likewise: how the parameters lay in buckets (`MixingRounds.held`). Checkpoints from before it have none."""


def lacking(error: KeyError, rank: int) -> ExecutionError:
    return ExecutionError(f"the checkpoint lacks {error} of rank {rank}; resume from an older one")


def _parts(flat: Tensor, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Cut an array that holds one parameter behind the other: the part of each, in its shape."""
    offset = 0
    for parameter in parameters:
        yield flat[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()


# A decoupled stage between steps: the batches it has run forward and not yet backward, and what has arrived for the next step.
#
# Which batches a stage runs forward and backward in a step, `parsim.program.passes.rounds` says. Both use the weights of the
# beginning of the step. A batch that waits keeps (`Synchronisation.backward`)
#
# stash   the weights of its forward: the stage runs it on a copy of its module, whose gradients are the stage's own. So the
#         gradient is that of one model whose stages are of different steps
# fresh   its activations alone: it runs on a module whose weights are the stage's memory under other names, and autograd does
#         not notice that they change. An operator that saves something made of a weight has that of the forward
# replay  the stage's inputs and random states: its forward runs again before its backward, on the weights of then
#
# At the beginning and after a checkpoint of another plan the stages fill one by one: what has nothing to work on does not run,
# the optimizer included. They do so, too, after one of "fresh", whose activations no weights can make again. At the end what
# waits is not trained on. Running statistics are the stage's own, taken when a batch runs forward.


def runs(task: Task, plan: Plan, rank: int, since: int) -> bool:
    """Whether a task of `rank` has anything to work on, `since` steps after the stages of a stale plan began to fill."""
    work = task.work
    stage = plan.stage_of_rank(work.source if isinstance(work, SendRecv) else rank)
    rule, stages = plan.synchronisation, plan.mesh.pp
    forward = isinstance(work, LoadBatch) or (isinstance(work, Compute) and work.phase is Phase.FORWARD)
    if forward or (isinstance(work, SendRecv) and task.origin.bucket is None and not task.origin.gradient):
        return since >= rule.forward_lag(stage, stages)
    return since >= rule.backward_lag(stage, stages)


@dataclass(slots=True, kw_only=True, eq=False)
class WaitingBatch:
    """A batch between its forward and its backward on this stage.

    runnables: by component, on the weights of the forward. inputs: what came for it from other stages, by task. records, kept:
    by component and microbatch, for the backward, and for the second forward, where it is replayed. draw: of the random numbers
    of its forward.
    """

    runnables: Mapping[str, Runnable]
    inputs: dict[int, Tensor]
    records: dict[tuple[str, int], Saved] = field(default_factory=dict)
    kept: dict[tuple[str, int], RecomputeInputs] = field(default_factory=dict)
    draw: int = 0


class StaleStage:
    """What a rank of a decoupled plan keeps from step to step.

    filling: steps until every stage runs a forward and a backward in every step. began: the step in which the first stage ran
    its first forward. forward, due: the batches that the step at hand runs forward and backward; None where there is none yet.
    arrived: what the step before has received, by task.
    """

    def __init__(self, stage: StageReplica) -> None:
        self._stage, self._plan = stage, stage.layout.plan
        rule, stages, number = self._plan.synchronisation, self._plan.mesh.pp, self._plan.stage_of_rank(stage.rank)
        self.filling = rule.steps_to_fill(stages)
        self.delay = rule.delay_of(number, stages)
        self.beta = rule.beta
        self._forward_lag, self._backward_lag = rule.forward_lag(number, stages), rule.backward_lag(number, stages)
        self._stashes, self._replays = rule.stashes and self.delay > 0, rule.replays and self.delay > 0
        fresh = self.delay > 0 and not self._stashes and not self._replays
        self._modules = [_copied(stage, shares=fresh) for _ in range(1 if fresh else self.delay + 1 if self._stashes else 0)]
        self._runnables: list[Mapping[str, Runnable]] = [
            {name: Runnable(entry.program, module) for name, entry in stage.runnables.items()} for module in self._modules
        ] or [stage.runnables]
        self.restart(0)

    def restart(self, step: int) -> None:
        """Forget what waits: the stages fill anew from `step` on."""
        self.began = step
        self._waiting: dict[int, WaitingBatch] = {}
        self._arriving: dict[int, Tensor] = {}
        self._gradients: set[int] = set()
        self.arrived: dict[int, Tensor] = {}
        self.forward: WaitingBatch | None = None
        self.due: WaitingBatch | None = None

    def copies(self) -> list[Tensor]:
        """The weights of batches that wait: alive between steps."""
        return [parameter for module in self._modules if self._stashes for parameter in self._trained(module).values()]

    def _trained(self, module: nn.Module) -> dict[str, Tensor]:
        """The weights of a copy that differ from the stage's, by name."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        return {name: parameters[name] for name in self._stage.parameters if parameters[name].requires_grad}

    def since(self, step: int) -> int:
        """Steps since the stages began to fill, as far as they differ from one another."""
        return min(step - self.began, self.filling)

    def batch_of(self, step: int) -> int:
        """The batch that this stage runs forward in `step`; before `began` it runs none."""
        return step - self._forward_lag

    def begin_step(self, step: int) -> None:
        """Take what has arrived, and the weights of now for the batch that runs forward. step: of the training, from 0."""
        self.arrived, self._arriving = self._arriving, {}
        self.forward = self.due = None
        if self.batch_of(step) >= self.began:
            self.forward = self._enter(self.batch_of(step), self.arrived)
        if self.since(step) >= self._backward_lag:
            self.due = self._waiting.pop(self.batch_of(step) - self.delay)

    def _enter(self, batch: int, arrived: Mapping[int, Tensor]) -> WaitingBatch:
        place = batch % len(self._runnables)
        if self._stashes:
            self._copy_weights(self._modules[place], self._stage.parameters)
        inputs = {task: tensor for task, tensor in arrived.items() if self.delay and task not in self._gradients}
        self._waiting[batch] = WaitingBatch(runnables=self._runnables[place], inputs=inputs)
        return self._waiting[batch]

    def _copy_weights(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._trained(module).items():
                parameter.copy_(weights[name])

    def arrives(self, task: Task, tensor: Tensor) -> bool:
        """Take what another stage has sent. Returns whether it is for the next step, and not for this one."""
        if task.origin.gradient:
            self._gradients.add(task.index)
            if self.beta != 1.0:
                tensor.mul_(self.beta)
        assert isinstance(task.work, SendRecv)
        if is_late(self._stage.layout, task.work):
            self._arriving[task.index] = tensor
            return True
        if self.forward is not None and self.delay and not task.origin.gradient:
            self.forward.inputs[task.index] = tensor
        return False

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def _is_resumable(self) -> bool:
        return self._plan.synchronisation.backward != "fresh"

    @property
    def marker(self) -> str:
        return own_marker(self._plan)

    def own_state(self) -> dict[str, Any]:
        """The batches that wait here, each with its weights, inputs and random numbers, and what has just arrived."""
        state: dict[str, Any] = {PLAN: self.marker, "began": torch.tensor(self.began)}
        state |= {f"arrived/{task}": tensor for task, tensor in self._arriving.items()}
        for batch, waiting in self._waiting.items() if self._is_resumable else ():
            state[f"waiting/{batch}/draw"] = torch.tensor(waiting.draw)
            state |= {f"waiting/{batch}/inputs/{task}": tensor for task, tensor in waiting.inputs.items()}
            weights = self._trained(self._modules[batch % len(self._modules)]) if self._stashes else {}
            state |= {f"waiting/{batch}/weights/{name}": weight.detach() for name, weight in weights.items()}
        return state

    def load_own(
        self,
        state: Mapping[str, Any],
        step: int,
        run_forward: Callable[[BatchSource, int], None],
        source: Callable[[int], BatchSource],
    ) -> None:
        """Run the batches that waited forward again, as they were; a checkpoint of another plan begins with none.

        state: of `own_state`, on any device. step: in which the training goes on. source: of a batch, by number. run_forward:
        of a batch, with the number that its random draws follow from. Raises ExecutionError: a part of the state is missing.
        """
        self.restart(step)
        if state.get(PLAN) != self.marker or not self._is_resumable:
            return
        parts = [key.split("/", 3) for key in state]

        def here(part: list[str]) -> Tensor:
            tensor: Tensor = state["/".join(part)].to(self._stage.device)
            return tensor

        try:
            buffers = {name: tensor.clone() for name, tensor in self._stage.buffers().items()}
            for batch in sorted({int(part[1]) for part in parts if part[0] == "waiting"}):
                prefix = f"waiting/{batch}/"
                inputs = {int(part[3]): here(part) for part in parts if part[:3] == ["waiting", str(batch), "inputs"]}
                self.arrived, self.forward = inputs, self._enter(batch, inputs)
                if self._stashes:
                    module = self._modules[batch % len(self._modules)]
                    self._copy_weights(module, {name: state[f"{prefix}weights/{name}"] for name in self._trained(module)})
                run_forward(source(batch), int(state[f"{prefix}draw"]))
            for name, tensor in self._stage.buffers().items():
                tensor.data.copy_(buffers[name])  # as training forwards write them: what waits may have saved them
            self._arriving = {int(part[1]): here(part) for part in parts if part[0] == "arrived"}
            self.began = int(state["began"])
        except KeyError as error:
            raise lacking(error, self._stage.rank) from error


def _copied(stage: StageReplica, *, shares: bool) -> nn.Module:
    """A copy of the stage's module, with weights of its own or in the stage's memory (shares). The rest is the stage's."""
    shared = [*stage.module.buffers(), *(entry for entry in stage.module.parameters() if not entry.requires_grad)]
    module = copy.deepcopy(stage.module, {id(tensor): tensor for tensor in shared})
    for name, parameter in module.named_parameters(remove_duplicate=False):
        held = stage.parameters.get(name)
        if held is not None and parameter.requires_grad:
            if shares:
                parameter.data = held.data
            parameter.grad = held.grad
    for path, part in stage.module.named_modules():
        module.get_submodule(path)._buffers = part._buffers  # also where a forward assigns one anew
    return module
