"""A mixing round behind the step: replicas exchange their weights, bucket by bucket, and each takes a weighted sum.

average  pack, one all_reduce of the weighted weights per bucket, mix (with the outer optimizer where there is one). With
         fragments a round has every so many-th bucket; with a message format the all_reduce is an all_gather of changes
gossip   pack, one message per link of W_t and bucket, mix over what arrived once the own weights have been sent
merge    a global model per bucket goes from replica to replica: mix the own weights into it, go on from it, hand it on

Where a plan combines first, packing comes before the forward of every step, and the exchange goes on beside the computation of
the step that its round follows.

Packing copies a bucket's parameters into its flat array, which the gradients no longer need. A message waits for both ends,
so what arrives needs room only while a round goes on. The global model of merge has room of its own: the last replica hands
it to the first, which needs it in the next round, and meanwhile all train on. Every rank of a replica mixes with the ranks of
the same place in the other replicas.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from parsim.errors import PlanError
from parsim.plans.synchronisation import Synchronisation
from parsim.program.buckets import Bucket
from parsim.program.passes.gradients import DP_STREAM, summed_groups
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import COMPUTE, TURN, Draft, Origin, Resource, Task, TaskGraph, TaskKey
from parsim.work import Collective, Compute, Mix, Phase, SendRecv

MESSAGE_STREAM = "dp"
"""Messages of gossip go over one stream per link: dp>3 to rank 3, dp<1 from rank 1."""


PACK_ACCESSES, TAKE_ACCESSES, NEIGHBOUR_ACCESSES, TURN_ACCESSES = 2, 3, 3, 5
BUFFERED_ACCESSES = 14
"""4-byte reads and writes per element in `parsim.execute.mixing`, operation by operation. Packing is a product. Taking
the result is a copy into the parameters, and zeroing the flat array. A neighbour's weights are added; a turn is a lerp, a copy.
Of buffered changes a turn adds one, the buffer to the model, and empties it: four passes and three copies.
"""
ROUNDING_ACCESSES, RESTORING_ACCESSES = 6, 5
"""Of changes in a message format: the change, its largest and its rounding; per replica to restore one, and to add it."""
PUSH_ACCESSES, PUSHED_ACCESSES = 4, 4
"""Of push-sum: a multiple of the kept model is added to what is packed; what arrived is divided by its mass, and kept."""
OUTER_ACCESSES, MOMENTUM_ACCESSES, NESTEROV_ACCESSES = 12, 7, 5
"""Of an outer optimizer: the change, its step and two copies; of momentum: v m + g and a copy; of Nesterov: g + v m."""


def _mix(bucket: Bucket, copies: int, accesses: int) -> Mix:
    return Mix(elements=bucket.elements, copies=copies, accesses=accesses, tensors=len(bucket.parameters))


def _outer_accesses(layout: PlanIndex) -> int:
    outer = layout.plan.synchronisation.outer
    if outer is None:
        return 0
    return OUTER_ACCESSES + (MOMENTUM_ACCESSES if outer.momentum else 0) + (NESTEROV_ACCESSES if outer.nesterov else 0)


def mixing_peers(layout: PlanIndex, bucket: Bucket) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that mix a bucket: one rank of every replica each, in the order of the replicas."""
    return tuple(zip(*summed_groups(layout, bucket.group).values(), strict=True))


def outer_arrays(layout: PlanIndex) -> int:
    """Arrays as large as the parameters that are kept from round to round: of an outer optimizer the weights of the last round
    and its momentum, of merge the global model, of push-sum the model of the last round; and of who combines first the weights
    that the step began with, which are sent beside it."""
    rule = layout.plan.synchronisation
    if rule.kind == "merge":
        return handed_arrays(rule) + (rule.merge == "buffered")  # and the model that its change is taken from
    if rule.push_sum or (rule.combines_first and rule.kind == "gossip"):
        return 1
    outer = rule.outer
    if outer is None and rule.message_format:
        return 3 if rule.combines_first else 1
    beside = 2 if rule.combines_first else 0  # what the step began with, and the mean of that
    return beside + (0 if outer is None else 2 if outer.momentum else 1)


def handed_arrays(rule: Synchronisation) -> int:
    """Arrays as large as the parameters that go from replica to replica: the global model, and what is buffered beside it."""
    return 2 if rule.merge == "buffered" else 1


def neighbours_of(layout: PlanIndex, number: int) -> list[tuple[int, ...]]:
    """Per replica the others whose weights it takes in round `number`; none for average."""
    rule, replicas = layout.plan.synchronisation, layout.plan.mesh.dp
    if rule.kind != "gossip":
        return [()] * replicas
    links = (rule.matrix(number, replicas) != 0) & ~np.eye(replicas, dtype=bool)
    return [tuple(np.flatnonzero(row).tolist()) for row in links]


@lru_cache(maxsize=16)
def most_neighbours(rule: Synchronisation, replicas: int) -> tuple[int, ...]:
    """Per replica the most others whose weights it takes in one round of gossip."""
    most = np.zeros(replicas, dtype=np.int64)
    for number in rule.cycle(replicas):
        links = rule.matrix(number, replicas) != 0
        most = np.maximum(most, links.sum(1) - links.diagonal())
    return tuple(most.tolist())


def _buckets_of(layout: PlanIndex, number: int) -> tuple[Bucket, ...]:
    fragments = layout.plan.synchronisation.fragments
    if fragments > len(layout.buckets):
        raise PlanError(
            f"synchronisation.fragments = {fragments}, and each needs one of the plan's {len(layout.buckets)} buckets; set "
            f"fragments to {len(layout.buckets)} at most, or a smaller plan.bucket_bytes"
        )
    return tuple(bucket for bucket in layout.buckets if bucket.number % fragments == number % fragments)


def fragments_of(layout: PlanIndex) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters of each fragment, in the order of their rounds."""
    rounds = range(layout.plan.synchronisation.fragments)
    return tuple(tuple(held.name for bucket in _buckets_of(layout, number) for held in bucket.parameters) for number in rounds)


def add_packing(draft: Draft, layout: PlanIndex, number: int | None = None) -> None:
    """Copy the weights of a round's buckets for those who take them; of all (None), where the plan combines first."""
    rule = layout.plan.synchronisation
    copies = 2 if rule.combines_first and rule.kind == "average" else 1
    for bucket in layout.buckets if number is None else _buckets_of(layout, number):
        for rank in draft.kept(bucket.group):
            more = (PUSH_ACCESSES if rule.push_sum else 0) + (ROUNDING_ACCESSES if rule.message_format else 0)
            work = _mix(bucket, copies, copies * PACK_ACCESSES + more)
            updated: list[TaskKey] = [] if rule.combines_first else [(Phase.OPTIMIZER, rank)]
            draft.add(("pack", bucket.number, rank), work, [Resource(rank, COMPUTE)], updated, _origin(bucket))


def add_round(draft: Draft, layout: PlanIndex, number: int) -> None:
    """The tasks of round `number` behind the optimizer's step; none where the plan does not mix."""
    rule = layout.plan.synchronisation
    if not rule.mixes:
        return
    if rule.kind == "merge":
        _add_turns(draft, layout)
        return
    neighbours = neighbours_of(layout, number)
    takers: list[list[int]] = [[] for _ in neighbours]
    for replica, taken in enumerate(neighbours):
        for other in taken:
            takers[other].append(replica)
    if not rule.combines_first:
        add_packing(draft, layout, number)
    buckets = _buckets_of(layout, number)
    for bucket in buckets:
        for peers in mixing_peers(layout, bucket):
            if rule.kind == "average":
                _add_average(draft, bucket, peers, rule)
            else:
                _add_messages(draft, bucket, peers, neighbours)
    for bucket in buckets:
        for peers in mixing_peers(layout, bucket):
            kept = len(draft.kept(peers))
            for replica, rank in enumerate(peers):
                if not draft.keeps(rank):
                    continue
                arrays = 1 + len(neighbours[replica]) + outer_arrays(layout)
                accesses = TAKE_ACCESSES + _outer_accesses(layout)
                accesses += RESTORING_ACCESSES * len(peers) if rule.message_format else 0
                after: list[TaskKey] = [("average", bucket.number, peers[0])]
                after += [(Phase.OPTIMIZER, rank)] if rule.combines_first else []
                if rule.kind == "gossip":
                    links = [(other, replica) for other in neighbours[replica]]
                    links += [(replica, other) for other in takers[replica]]
                    after = [_message(bucket, peers, kept, *link) for link in links]
                    after = after or [("pack", bucket.number, rank)]
                    after += [(Phase.OPTIMIZER, rank)] if rule.combines_first else []
                    accesses += PUSHED_ACCESSES if rule.push_sum else 0
                    accesses += PACK_ACCESSES + NEIGHBOUR_ACCESSES * len(neighbours[replica])
                work = _mix(bucket, arrays, accesses)
                draft.add(("mix", bucket.number, rank), work, [Resource(rank, COMPUTE)], after, _origin(bucket))


def _origin(bucket: Bucket, replica: int | None = None) -> Origin:
    return Origin(stage=bucket.stages[0], bucket=bucket.number, replica=replica)


def message_bytes(rule: Synchronisation, bucket: Bucket) -> int:
    """Bytes of one replica's change of a bucket, in the rule's message format."""
    return rule.message_bytes(bucket.elements, len(bucket.parameters))


def _add_average(draft: Draft, bucket: Bucket, peers: tuple[int, ...], rule: Synchronisation) -> None:
    after: list[TaskKey] = [("pack", bucket.number, rank) for rank in draft.kept(peers)]
    if rule.message_format:
        work = Collective(operation="all_gather", group=peers, size_bytes=len(peers) * message_bytes(rule, bucket))
    else:
        work = Collective(operation="all_reduce", group=peers, size_bytes=bucket.size_bytes)
    streams = [Resource(rank, DP_STREAM) for rank in peers]
    draft.add(("average", bucket.number, peers[0]), work, streams, after, _origin(bucket))


def _message(bucket: Bucket, peers: tuple[int, ...], kept: int, source: int, to: int) -> TaskKey:
    """The key of the message that stands for one from replica `source` to `to`: the same one to a kept replica. The first
    `kept` replicas are simulated, and those that are a multiple of `kept` apart are alike (`parsim.program.columns`). Unfolded
    all are kept, and a message stands for itself."""
    receiver = to % kept
    return ("message", bucket.number, peers[(source - to + receiver) % len(peers)], peers[receiver])


def _add_messages(draft: Draft, bucket: Bucket, peers: tuple[int, ...], neighbours: list[tuple[int, ...]]) -> None:
    """A message between kept and represented replicas is that of its receiver. It holds the stream of its sender's like."""
    kept = len(draft.kept(peers))
    for replica, taken in enumerate(neighbours[:kept]):
        for other in taken:
            to, source = peers[replica], peers[other]
            sender = other % kept
            seen = peers[(replica - other + sender) % len(peers)]  # the receiver, from the sender's like
            work = SendRecv(source=source, destination=to, size_bytes=bucket.size_bytes)
            ends = [Resource(peers[sender], f"{MESSAGE_STREAM}>{seen}"), Resource(to, f"{MESSAGE_STREAM}<{source}")]
            after: list[TaskKey] = [("pack", bucket.number, rank) for rank in (peers[sender], to)]
            draft.add(_message(bucket, peers, kept, other, replica), work, ends, after, _origin(bucket, replica))


def _add_turns(draft: Draft, layout: PlanIndex) -> None:
    """Replicas merge in turn. A Mix holds the stream on which its rank is handed the model: it waits for the round before."""
    lines = [(bucket, peers) for bucket in layout.buckets for peers in mixing_peers(layout, bucket)]
    arrays = handed_arrays(layout.plan.synchronisation)
    for bucket, peers in lines:
        for replica, rank in enumerate(peers):
            if replica:
                _hand_on(draft, bucket, peers[replica - 1], rank, [("mix", bucket.number, peers[replica - 1])], arrays)
            after: list[TaskKey] = [(Phase.OPTIMIZER, rank)]
            if replica:
                after.append(("message", bucket.number, peers[replica - 1], rank))
            handed = Resource(rank, f"{TURN}<{peers[replica - 1]}")
            work = _mix(bucket, 2, TURN_ACCESSES) if arrays == 1 else _mix(bucket, 4, BUFFERED_ACCESSES)
            draft.add(("mix", bucket.number, rank), work, [Resource(rank, COMPUTE), handed], after, _origin(bucket))
    for bucket, peers in lines:
        first, last = peers[0], peers[-1]
        after = [("mix", bucket.number, last), ("mix", bucket.number, first), ("message", bucket.number, first, peers[1])]
        _hand_on(draft, bucket, last, first, after, arrays)


def _hand_on(draft: Draft, bucket: Bucket, source: int, to: int, after: list[TaskKey], arrays: int) -> None:
    work = SendRecv(source=source, destination=to, size_bytes=arrays * bucket.size_bytes)
    ends = [Resource(source, f"{TURN}>{to}"), Resource(to, f"{TURN}<{source}")]
    draft.add(("message", bucket.number, source, to), work, ends, after, _origin(bucket))


def without_idle(graph: TaskGraph, layout: PlanIndex, number: int, steps: int) -> TaskGraph:
    """The graph without the first `steps` tasks (those before the round's) of replicas that were not drawn for a round: they
    wait."""
    plan = layout.plan
    drawn = plan.synchronisation.takes_part(number, plan.mesh.dp)
    if all(drawn):
        return graph
    kept: dict[int, int] = {}
    tasks: list[Task] = []
    for task in graph.tasks:
        if task.index < steps and not drawn[plan.replica_of_rank(task.resources[0].rank)]:
            continue
        before = tuple(kept[other] for other in task.dependencies if other in kept)
        kept[task.index] = len(tasks)
        tasks.append(replace(task, index=len(tasks), dependencies=before))
    return TaskGraph(tasks=tuple(tasks), world_size=graph.world_size)


# Decoupled stages: in one step a stage works on batches that arrived in steps before, and waits for less of the others in it.
#
# The step is that of a pipeline of one microbatch without some of its waiting: what a transfer brings that is late in step t
# is read in step t + 1. Between steps a rank waits for its own transfers (`parsim.engines.program`), and for no others.
#
# Stage s runs batch b forward in step b + f(s), and backward in step b + f(s) + d(s), with d its delay. Fully decoupled, f(s)
# = s and d(s) = 2 (K - 1 - s): all is late. Where forwards are locked, f(s) = 0 and d(s) = K - 1 - s: gradients are late.
#
# Source: the schedules "fdg" and "ddg" of `experiments/relaxed/decoupled.py`.


def lateness(layout: PlanIndex, source: int, target: int) -> int:
    """In how many steps after the one that sends it stage `target` reads what stage `source` sends: a value, or a gradient."""
    rule, stages = layout.plan.synchronisation, layout.plan.mesh.pp
    lag = rule.forward_lag if source < target else rule.backward_lag
    return lag(target, stages) - lag(source, stages)


def is_late(layout: PlanIndex, work: SendRecv) -> bool:
    """Whether what a transfer between decoupled stages brings is read in the step after."""
    stage_of = layout.plan.stage_of_rank
    return lateness(layout, stage_of(work.source), stage_of(work.destination)) > 0


def without_arrivals(graph: TaskGraph, layout: PlanIndex) -> TaskGraph:
    """The graph of a pipeline step of one microbatch in which no computation waits for a transfer that is late. Raises
    PlanError: a value crosses several boundaries of stages that are each a step late (its parts would come from different
    batches), or stages share a parameter."""
    stage_of = layout.stage_of
    for value, readers in layout.consumers.items():
        maker = layout.model.value[value].producer
        if maker is None:
            continue
        ends = ((name, stage_of[maker], stage_of[name]) for name in readers)
        far = [name for name, own, other in ends if max(lateness(layout, own, other), lateness(layout, other, own)) > 1]
        if far:
            stages = f"from stage {stage_of[maker]} to stage {stage_of[far[0]]} ({far[0]})"
            raise PlanError(
                f"synchronisation stale: {value} goes {stages}, past a stage that works on another batch; use a model "
                "that is a chain, or fewer stages"
            )
    for bucket in layout.buckets:
        if len({layout.plan.stage_of_rank(rank) for rank in bucket.group}) > 1:
            raise PlanError(
                f"synchronisation stale: stages share {bucket.parameters[0].name}, whose gradients would come from different "
                "batches; untie it, or put what uses it on one stage"
            )
    late = {task.index for task in graph.tasks if isinstance(task.work, SendRecv) and is_late(layout, task.work)}
    tasks = tuple(
        replace(task, dependencies=tuple(other for other in task.dependencies if other not in late))
        if isinstance(task.work, Compute)
        else task
        for task in graph.tasks
    )
    return replace(graph, tasks=tasks)
