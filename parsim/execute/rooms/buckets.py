"""When a rank makes and gives up the room of buckets that are whole for a while only (ZeRO 2 and 3).

All of it happens between two computations, at places that the program alone decides. So the memory of a rank does not depend on
how fast its communication is, and equals the prediction (`parsim.predict.unsharded_memory`):

    gradients    whole from the first backward that adds to them. The array, and room for this rank's part of the sum, stay
                 until the computation that waits for their reduce_scatter, or for a later one of the same group.
    parameters   from the end of the computation for which their all_gather waits, to the end of the last that uses them.
                 Those are given up first where gradients are complete after the same computation.

Rejected: gradients given up when their reduce_scatter has ended. The peak was lower by a bucket where the communication was
faster than the next backward, and a run could not rely on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from parsim.graph.task import COMPUTE, Task
from parsim.work import ClipGradients, Collective, OptimizerStep

BucketOfMicrobatch = tuple[int, int]


@dataclass(kw_only=True)
class Room:
    """Around one computation, in this order.

    Attributes:
        forgotten: gradients given up before it. ending_parameters: given up after it.
        ending_gradients: complete after it. beginning_parameters: for which there is room from then on.
    """

    forgotten: list[BucketOfMicrobatch] = field(default_factory=list)
    ending_parameters: list[int] = field(default_factory=list)
    ending_gradients: list[BucketOfMicrobatch] = field(default_factory=list)
    beginning_parameters: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Rooms:
    """Attributes: around: by number of a task. first_parameters: gathered before anything was computed in the step."""

    around: dict[int, Room]
    first_parameters: list[int]


def rooms_of(tasks: Sequence[tuple[Task, str, tuple[int, ...]]]) -> Rooms:
    """What the tasks of a rank say of its buckets.

    Args:
        tasks: in issue order, each with its stream and the tasks of this rank that it waits for.
    """
    place = {task.index: number for number, (task, stream, _) in enumerate(tasks) if stream == COMPUTE}
    gathered: dict[int, int] = {}
    sent: dict[int, BucketOfMicrobatch] = {}
    groups: dict[int, tuple[int, ...]] = {}
    rooms = Rooms(around={}, first_parameters=[])

    def around(task: int) -> Room:
        return rooms.around.setdefault(task, Room())

    for task, _, before in tasks:
        bucket, microbatch = task.origin.bucket, task.origin.microbatch
        if bucket is None or microbatch is None:
            continue
        assert isinstance(task.work, Collective)
        if task.work.operation == "all_gather":
            gathered[task.index] = bucket
            after = max((index for index in before if index in place), key=place.__getitem__, default=None)
            (rooms.first_parameters if after is None else around(after).beginning_parameters).append(bucket)
        else:
            sent[task.index] = (bucket, microbatch)
            groups[task.index] = task.work.group
            for index in before:
                around(index).ending_gradients.append((bucket, microbatch))
    last: dict[int, int] = {}
    waiting = dict(sent)  # in issue order
    for task, stream, before in tasks:
        if stream != COMPUTE:
            continue
        last.update((index, task.index) for index in before if index in gathered)
        ended = [index for index in before if index in sent]
        for index in list(waiting):
            known = any(groups[index] == groups[other] and index <= other for other in ended)
            if known or isinstance(task.work, OptimizerStep | ClipGradients):
                around(task.index).forgotten.append(waiting.pop(index))
    for index, task_index in last.items():
        around(task_index).ending_parameters.append(gathered[index])
    return rooms
