"""When a rank makes room for what other stages send, and gives up what it sends, as `parsim.plans.stage_transfers` says.

All of it happens between two computations, at places that the program alone decides. So the memory of a rank does not depend on
how fast its neighbours are, and equals the prediction.

Rejected: a receive posted as soon as the one before has ended. Where a stage fell behind, the values or gradients of all
microbatches of a step piled up there: 24% more than predicted in one run of a small pipeline on a busy machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from parsim.execute.relaxed.scripts import RankTasks
from parsim.graph.plan_index import PlanIndex
from parsim.graph.stage_links import pipeline_of
from parsim.graph.task import COMPUTE, Task
from parsim.plans.stage_transfers import ends
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
    """Messages that one action makes and one action reads; `place`: of its first reader, or of its last maker, in order."""

    tasks: list[Task]
    place: int


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
            _add_receives(rooms, order.grouped(sent, order.first_reader, min), order)
        else:
            _add_sends(rooms, order.grouped(sent, order.last_maker, max), order, waits=waits)
    return rooms


def _add_receives(rooms: TransferRooms, groups: Sequence[_Group], order: _Order) -> None:
    soonest = [group.place for group in groups]  # the first that reads this group or a later one
    for number in range(len(groups) - 2, -1, -1):
        soonest[number] = min(soonest[number], soonest[number + 1])
    for number, group in enumerate(groups):
        at = 0 if number == 0 else min(groups[number - 1].place, soonest[number])
        if at == 0:
            rooms.first.extend(group.tasks)
            continue
        before = order.computations[at - 1].index
        rooms.behind.setdefault(before, []).extend(group.tasks)
        for task in group.tasks:
            rooms.awaited.setdefault(task.index, []).append(before)


def _add_sends(rooms: TransferRooms, groups: Sequence[_Group], order: _Order, *, waits: bool) -> None:
    for group, following in pairwise(groups):
        at = min(following.place + 1, order.backward_of(group.tasks[0]))
        if at == len(order.computations):
            continue
        index = order.computations[at].index
        rooms.forgotten.setdefault(index, []).extend(task.index for task in group.tasks)
        if waits and at == following.place + 1:
            rooms.awaited.setdefault(index, []).extend(task.index for task in group.tasks)
    for group in groups[-1:]:
        at = min(order.backward_of(group.tasks[0]), order.update)
        if at < len(order.computations):
            index = order.computations[at].index
            rooms.forgotten.setdefault(index, []).extend(task.index for task in group.tasks)


class _Order:
    """The computations of a rank in order, and which of them read and make its messages."""

    def __init__(self, tasks: RankTasks, layout: PlanIndex) -> None:
        self._layout = layout
        self.computations = [task for task, stream, _ in tasks if stream == COMPUTE]
        self._place = {task.index: number for number, task in enumerate(self.computations)}
        self._before = {task.index: before for task, _, before in tasks}
        self._behind: dict[int, list[int]] = {}
        for index, before in self._before.items():
            for earlier in before:
                self._behind.setdefault(earlier, []).append(index)
        self._backwards: dict[tuple[int, int] | None, int] = {}
        for number, task in enumerate(self.computations):
            if isinstance(task.work, Compute) and task.work.phase is not Phase.FORWARD:
                self._backwards.setdefault(self._action(task), number)
        updates = (number for number, task in enumerate(self.computations) if isinstance(task.work, OptimizerStep))
        self.update = next(updates, len(self.computations))

    def first_reader(self, task: Task) -> int:
        """The place of the first computation that needs the message; where it is recomputed right before, of that."""
        place = min(self._reached(task.index, self._behind), default=len(self.computations))
        if 0 < place < len(self.computations):
            own, earlier = self.computations[place], self.computations[place - 1]
            again = isinstance(earlier.work, Compute) and earlier.work.phase is Phase.RECOMPUTE
            if again and (earlier.origin.component, earlier.origin.microbatch) == (own.origin.component, own.origin.microbatch):
                return place - 1
        return place

    def last_maker(self, task: Task) -> int:
        """The place of the last computation of the action that makes the message."""
        place = max(self._reached(task.index, self._before), default=-1)
        while 0 <= place < len(self.computations) - 1 and self._goes_on(self.computations[place + 1], self.computations[place]):
            place += 1
        return place

    def _goes_on(self, task: Task, before: Task) -> bool:
        """Whether a computation belongs to the action of the one before it, which makes a message."""
        if not isinstance(task.work, Compute) or not isinstance(before.work, Compute):
            return False
        if self._action(task) != self._action(before):
            return False
        forward = task.work.phase is Phase.FORWARD
        if forward or before.work.phase is Phase.FORWARD:
            return forward and before.work.phase is Phase.FORWARD
        return task.work.phase is not Phase.BACKWARD_WEIGHT and self._layout.wants_input_gradient(task.work.component)

    def backward_of(self, task: Task) -> int:
        """The place of the first backward of the microbatch of a value that is sent, in its maker's stage."""
        last = len(self.computations)
        if task.origin.gradient:
            return last
        place = self.last_maker(task)
        return last if place < 0 else self._backwards.get(self._action(self.computations[place]), last)

    def grouped(self, stream: Sequence[Task], place: Callable[[Task], int], of: Callable[[Sequence[int]], int]) -> list[_Group]:
        """The messages of one stream, those together that one action here reads or makes.

        Args:
            stream: in issue order. place: of the computation that a message belongs to. of: the place of a group.
        """
        found: list[tuple[object, list[Task], list[int]]] = []
        for task in stream:
            number = place(task)
            own = self._action(self.computations[number]) if 0 <= number < len(self.computations) else None
            key = (own, task.origin.microbatch, task.origin.gradient)
            if not found or found[-1][0] != key:
                found.append((key, [], []))
            found[-1][1].append(task)
            found[-1][2].append(number)
        return [_Group(tasks=own, place=of(places)) for _, own, places in found]

    def _action(self, task: Task) -> tuple[int, int] | None:
        """The stage of the plan and the microbatch of a computation."""
        name, microbatch = task.origin.component, task.origin.microbatch
        return None if name is None or microbatch is None else (self._layout.chunk_of[name], microbatch)

    def _reached(self, index: int, edges: Mapping[int, Iterable[int]]) -> set[int]:
        """Places of the computations that are reached by communication alone."""
        found: set[int] = set()
        seen, stack = {index}, [index]
        while stack:
            for other in edges.get(stack.pop(), ()):
                if other in self._place:
                    found.add(self._place[other])
                elif other not in seen:
                    seen.add(other)
                    stack.append(other)
        return found
