"""When the stages of a pipeline make room for what others send, and how long they hold what they send: by the order alone.

Between two places on the pp axis and in one direction, messages follow one another. Those that one action makes for another
one are a group. A rank has room for the next group of every such stream and for no more:

    receive   room for the first group is there from the beginning of the step, that for another one right before the action
              that reads the group before it
    send      a group is held until the action has ended that makes the next one, which waits for the first to be sent; a
              value at most until the first backward of its microbatch, or the second forward before that, which waits too
              (where an order would not end so, nothing waits: `ends`)

So the memory of a rank does not depend on how fast its neighbours are. The executor (`parsim.execute.rooms.transfers`) and the
prediction (`parsim.plans.held`) both follow this rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from parsim.plans.pipeline import MOST_CHECKED, PIPELINE_ORDERS, Action, pipeline_actions, rank_of_stage
from parsim.work import Phase


class StageLink(NamedTuple):
    """Two stages of which the first sends something to the second for every microbatch.

    Attributes:
        source, target: numbers of stages; a gradient goes from a later to an earlier one.
        late: a gradient that only the half for weights of its reader takes.
    """

    source: int
    target: int
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Attributes: order: a key of `PIPELINE_ORDERS`. ranks, microbatches, chunks: as for `pipeline_actions`.
    links: between stages on different ranks, ascending.
    """

    order: str
    ranks: int
    microbatches: int
    chunks: int = 1
    links: tuple[StageLink, ...] = ()


class MessageGroup(NamedTuple):
    """What one action of a rank sends for one action of another rank.

    Attributes:
        links: of which it is. made: number of the action that makes it, on its rank. read: of the one that reads it, on that
            rank. room: the first action there during which there is room for it.
        held: the last action of the sender during which it is held; None: to the end of the step.
    """

    links: tuple[StageLink, ...]
    made: int
    read: int
    room: int
    held: int | None


def beside_actions(pipeline: Pipeline, rank: int) -> tuple[list[list[StageLink]], list[list[StageLink]]]:
    """By action of a rank, in order: for which links there is room that the action does not read; and what of others is held.

    Args:
        pipeline: with its links. rank: of the pipeline.
    """
    count = len(_actions(pipeline)[rank])
    arriving: list[list[StageLink]] = [[] for _ in range(count)]
    leaving: list[list[StageLink]] = [[] for _ in range(count)]
    for other in range(pipeline.ranks):
        if other == rank:
            continue
        for group in groups(pipeline, other, rank):
            for number in range(group.room, group.read):
                arriving[number].extend(group.links)
        for group in groups(pipeline, rank, other):
            last = count - 1 if group.held is None else group.held
            for number in range(group.made + 1, last + 1):
                leaving[number].extend(group.links)
    return arriving, leaving


@lru_cache(maxsize=1024)
def groups(pipeline: Pipeline, source: int, target: int) -> tuple[MessageGroup, ...]:
    """What one rank sends another one in a step, in order.

    Args:
        pipeline: with its links. source, target: ranks of the pipeline.
    """
    place = rank_of_stage(pipeline.order, pipeline.ranks, pipeline.chunks)
    links = [link for link in pipeline.links if (place[link.source], place[link.target]) == (source, target)]
    if not links:
        return ()
    actions = _actions(pipeline)
    at = [{action: number for number, action in enumerate(own)} for own in actions]
    found = list(_sent(links, actions[source], at[target], _backward(pipeline)))
    soonest = [entry.read for entry in found]  # the first action that reads this group or a later one
    for number in range(len(soonest) - 2, -1, -1):
        soonest[number] = min(soonest[number], soonest[number + 1])
    complete = []
    for number, entry in enumerate(found):
        room = 0 if number == 0 else min(found[number - 1].read, soonest[number])
        held = found[number + 1].made if number + 1 < len(found) else None
        microbatch = actions[source][entry.made].microbatch
        if all(link.source < link.target for link in entry.links):
            back = at[source][Action(entry.links[0].source, _backward(pipeline), microbatch)] - 1
            held = back if held is None else min(held, back)
        complete.append(entry._replace(room=room, held=held))
    return tuple(complete)


@lru_cache(maxsize=256)
def ends(pipeline: Pipeline, *, sends_wait: bool = True) -> bool:
    """Whether the order ends if a rank has room for one group ahead.

    It always does where sends do not wait: a receive waits for actions before the one that reads it. Where they wait, nearly
    all shipped orders do. Steps of more than `MOST_CHECKED` actions of shipped orders without chunks are not walked through.

    Args:
        pipeline: with its links. sends_wait: an action that follows one which makes a group waits until the group before is
            sent.
    """
    actions = _actions(pipeline)
    if pipeline.chunks == 1 and sum(map(len, actions)) > MOST_CHECKED:
        return True
    pairs = [(a, b) for a in range(pipeline.ranks) for b in range(pipeline.ranks) if a != b and groups(pipeline, a, b)]
    sent = dict.fromkeys(pairs, 0)
    reached = [0] * pipeline.ranks

    def can_run(rank: int, action: int) -> bool:
        for (source, target), count in sent.items():
            unsent = groups(pipeline, source, target)[count:]
            if target == rank and any(group.read == action for group in unsent):
                return False
            if sends_wait and source == rank and len(unsent) > 1 and unsent[1].made < action:
                return False
        return True

    moved = True
    while moved:
        moved = False
        for (source, target), count in sent.items():
            unsent = groups(pipeline, source, target)[count:]
            if unsent and unsent[0].made < reached[source] and unsent[0].room <= reached[target]:
                sent[source, target] += 1
                moved = True
        for rank, own in enumerate(actions):
            if reached[rank] < len(own) and can_run(rank, reached[rank]):
                reached[rank] += 1
                moved = True
    return all(count == len(own) for count, own in zip(reached, actions, strict=True))


def _sent(
    links: Sequence[StageLink], actions: Sequence[Action], read_at: dict[Action, int], backward: Phase
) -> Iterator[MessageGroup]:
    for number, action in enumerate(actions):
        forward = action.phase is Phase.FORWARD
        if not forward and action.phase is not backward:
            continue
        own = [link for link in links if link.source == action.stage and (link.source < link.target) == forward]
        for target in dict.fromkeys(link.target for link in own):
            of_target = tuple(link for link in own if link.target == target)
            phase = Phase.FORWARD if forward else backward
            if not forward and all(link.late for link in of_target):
                phase = Phase.BACKWARD_WEIGHT
            read = read_at[Action(target, phase, action.microbatch)]
            yield MessageGroup(links=of_target, made=number, read=read, room=0, held=None)


def _actions(pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
    return tuple(
        pipeline_actions(pipeline.order, rank, pipeline.ranks, pipeline.microbatches, pipeline.chunks)
        for rank in range(pipeline.ranks)
    )


def _backward(pipeline: Pipeline) -> Phase:
    """The phase that hands on gradients."""
    return Phase.BACKWARD_INPUT if PIPELINE_ORDERS[pipeline.order].halves else Phase.BACKWARD
