"""When a rank makes room for what other stages send, and gives up what it sends, as `parsim.program.lifetimes` says.

All of it happens between two computations, at places that the program alone decides. So the memory of a rank does not depend on
how fast its neighbours are, and equals the prediction.

Rejected: a receive posted as soon as the one before has ended. Where a stage fell behind, the values or gradients of all
microbatches of a step piled up there: 24% more than predicted in one run of a small pipeline on a busy machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from parsim.plans.layouts import PIECES
from parsim.program.lifetimes import StageLink, ends, messages, pipeline_of
from parsim.program.placed import PlanIndex
from parsim.program.task import COMPUTE, Task
from parsim.program.taskgraph import RankTasks
from parsim.work import Compute, OptimizerStep, Phase, SendRecv


@dataclass(kw_only=True)
class TransferRooms:
    """Attributes:
    first: receives for which there is room from the beginning of the step.
    behind: by computation, those for which there is room from its end.
    awaited: by receive or computation, what else it waits for.
    forgotten: by computation, sends whose tensors are given up right before it.
    """

    first: list[Task] = field(default_factory=list)
    behind: dict[int, list[Task]] = field(default_factory=dict)
    awaited: dict[int, list[int]] = field(default_factory=dict)
    forgotten: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Messages that one action makes and one action reads. `place`: of the first computation here of the action that reads
    them, or of the last one of the action that makes them; None: this rank computes nothing in it."""

    tasks: list[Task]
    place: int | None


def transfer_rooms(tasks: RankTasks, layout: PlanIndex, rank: int) -> TransferRooms:
    """What the tasks of a rank say of its messages to and from other stages.

    Args:
        tasks: in issue order, each with its stream and the tasks of this rank that it waits for.
        layout: of the plan. rank: global number.
    """
    streams: dict[str, list[Task]] = {}
    for task, stream, _ in tasks:
        if isinstance(task.work, SendRecv) and task.origin.hop is None and task.origin.value is not None:  # else of a round
            streams.setdefault(stream, []).append(task)
    rooms = TransferRooms()
    if not streams:
        return rooms
    order = _Order(tasks, layout)
    waits = ends(pipeline_of(layout, layout.plan.shard_of_rank(rank)))
    for sent in streams.values():
        assert isinstance(sent[0].work, SendRecv)
        if sent[0].work.destination == rank:
            _add_receives(rooms, order.grouped(sent, sends=False), order)
        else:
            _add_sends(rooms, order.grouped(sent, sends=True), order, waits=waits)
    return rooms


def _add_receives(rooms: TransferRooms, groups: Sequence[_Group], order: _Order) -> None:
    """A group that no computation here stands for has room from the beginning, and so have those before it."""
    soonest = [0 if group.place is None else group.place for group in groups]  # the first that reads this one or a later one
    for number in range(len(groups) - 2, -1, -1):
        soonest[number] = min(soonest[number], soonest[number + 1])
    for number, group in enumerate(groups):
        before = groups[number - 1].place if number else 0
        at = min(soonest[number] if before is None else before, soonest[number])
        if at == 0:
            rooms.first.extend(group.tasks)
            continue
        index = order.computations[at - 1].index
        rooms.behind.setdefault(index, []).extend(group.tasks)
        for task in group.tasks:
            rooms.awaited.setdefault(task.index, []).append(index)


def _add_sends(rooms: TransferRooms, groups: Sequence[_Group], order: _Order, *, waits: bool) -> None:
    """A group that no computation here stands for is held to the end of the step, and nothing waits for it.

    A forward that runs again waits until the value of its microbatch is sent, as the backward behind it does.
    """
    for number, group in enumerate(groups):
        following = groups[number + 1].place if number + 1 < len(groups) else None
        made = group.place is not None and following is not None and following >= group.place
        after = order.update if following is None or not made else following + 1
        at = min(after, order.backward_of(group.tasks[0]))
        if at >= len(order.computations):
            continue
        index = order.computations[at].index
        rooms.forgotten.setdefault(index, []).extend(task.index for task in group.tasks)
        computed = order.computations[at].work
        again = isinstance(computed, Compute) and computed.phase is Phase.RECOMPUTE  # a backward has to wait in any case
        if waits and ((made and at == after) or again):
            rooms.awaited.setdefault(index, []).extend(task.index for task in group.tasks)


_ActionKey = tuple[int, int, bool]
"""The stage of the plan, the microbatch, and whether it is the forward."""


class _Order:
    """The computations of a rank in order, and which of them belong to the actions that read and make its messages."""

    def __init__(self, tasks: RankTasks, layout: PlanIndex) -> None:
        self._layout = layout
        self.computations = [task for task, stream, _ in tasks if stream == COMPUTE]
        self._first: dict[_ActionKey, int] = {}
        self._last: dict[_ActionKey, int] = {}
        for place, task in enumerate(self.computations):
            if not isinstance(task.work, Compute) or task.origin.microbatch is None:
                continue
            name, forward = task.work.component, task.work.phase is Phase.FORWARD
            key = (layout.chunk_of[name], task.origin.microbatch, forward)
            self._first.setdefault(key, place)
            if forward or (task.work.phase is not Phase.BACKWARD_WEIGHT and layout.wants_input_gradient(name)):
                self._last[key] = place
        updates = (place for place, task in enumerate(self.computations) if isinstance(task.work, OptimizerStep))
        self.update = next(updates, len(self.computations))

    def backward_of(self, task: Task) -> int:
        """The place of the first backward of the microbatch of a value that is sent, in its maker's stage."""
        last = len(self.computations)
        link, microbatch = self._link(task)
        return last if task.origin.gradient else self._first.get((link.source, microbatch, False), last)

    def grouped(self, stream: Sequence[Task], *, sends: bool) -> list[_Group]:
        """The messages of one stream, those together that one action makes and one action reads.

        Args:
            stream: in issue order. sends: this rank sends them.
        """
        found: list[tuple[tuple[int, int, int], list[Task]]] = []
        for task in stream:
            link, microbatch = self._link(task)
            key = (link.source, link.target, microbatch)
            if not found or found[-1][0] != key:
                found.append((key, []))
            found[-1][1].append(task)
        groups = []
        for (source, target, microbatch), own in found:
            forward = source < target
            place = self._last.get((source, microbatch, forward)) if sends else self._first.get((target, microbatch, forward))
            groups.append(_Group(tasks=own, place=place))
        return groups

    def _link(self, task: Task) -> tuple[StageLink, int]:
        """The two stages of a message, and its microbatch."""
        work, origin, plan = task.work, task.origin, self._layout.plan
        assert isinstance(work, SendRecv)
        assert origin.value is not None
        assert origin.microbatch is not None
        ends_here = (plan.stage_of_rank(work.source), plan.stage_of_rank(work.destination))
        for link, _, reading in messages(self._layout, [origin.value], plan.shard_of_rank(work.source)):
            how = reading.ends.gradient if origin.gradient else reading.ends.value
            places = (plan.stage_places[link.source], plan.stage_places[link.target])
            if (link.source > link.target) == origin.gradient and places == ends_here and how == (origin.layout or PIECES):
                return link, origin.microbatch
        raise AssertionError(f"no stage sends {origin.value} from rank {work.source} to rank {work.destination}")
