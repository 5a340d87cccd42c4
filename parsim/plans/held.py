"""What a rank of a pipeline holds while it runs each of its actions: microbatches of every chunk, and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from parsim.costs.memory.chunks import HeldMoment
from parsim.plans.few_actions import few_actions
from parsim.plans.pipeline import pipeline_actions, stages_by_rank
from parsim.plans.stage_transfers import Pipeline, StageLink, beside_actions
from parsim.work import Phase


@lru_cache(maxsize=1024)
def held_moments(
    pipeline: Pipeline, rank: int, *, apart: bool = False, own: tuple[StageLink, ...] = ()
) -> tuple[HeldMoment, ...]:
    """Every moment but those at which the same runs and no more is held than at another one, batches not yet read apart.

    Args:
        pipeline: with the links between its stages. rank: of the pipeline.
        apart: other microbatches are something else that runs, for what is held of buckets depends on the microbatch.
        own: links between stages of this rank. What one makes waits for the other, if other actions run in between.

    Returns:
        Messages by link, in the order of `links_of` and of `own`.
    """
    order, ranks, microbatches, chunks = pipeline.order, pipeline.ranks, pipeline.microbatches, pipeline.chunks
    stages = stages_by_rank(order, ranks, chunks)[rank]
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
    inward, outward = links_of(pipeline, rank)
    messages = zip(*beside_actions(pipeline, rank), strict=True)
    alive, waiting, unread = [0] * chunks, [0] * chunks, [microbatches] * chunks
    between = [0] * len(own)
    seen: dict[tuple[int, Phase, int], dict[tuple[int, ...], HeldMoment]] = {}
    actions = pipeline_actions(order, rank, ranks, microbatches, chunks)
    numbers = few_actions(order, rank, ranks, microbatches, chunks).microbatches if apart else (0,) * len(actions)
    for action, number, (arriving, leaving) in zip(actions, numbers, messages, strict=True):
        chunk, phase = chunk_of[action.stage], action.phase
        alive[chunk] += phase is Phase.FORWARD
        unread[chunk] -= phase is Phase.FORWARD
        for place, link in enumerate(own):
            between[place] -= link.target == action.stage and _moves(phase, link)
        there, sent = _counts(arriving, inward), _counts(leaving, outward)
        moment = HeldMoment(chunk, phase, tuple(alive), tuple(waiting), there, sent, tuple(unread), number, tuple(between))
        seen.setdefault((chunk, phase, number), {}).setdefault((*alive, *waiting, *there, *sent, *between), moment)
        waiting[chunk] += (phase is Phase.BACKWARD_INPUT) - (phase is Phase.BACKWARD_WEIGHT)
        alive[chunk] -= phase in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT)
        for place, link in enumerate(own):
            between[place] += link.source == action.stage and _moves(phase, link)
    return tuple(moment for held in seen.values() for moment in _most(held))


def _moves(phase: Phase, link: StageLink) -> bool:
    """Whether an action of that phase makes or reads what the link has: a value goes to a later stage, a gradient back."""
    return phase is Phase.FORWARD if link.source < link.target else phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT)


def _most(held: Mapping[tuple[int, ...], HeldMoment]) -> list[HeldMoment]:
    """Those at which something is held that no other moment holds beside all else, in their order."""
    most: list[tuple[int, ...]] = []
    for counts in sorted(held, key=sum, reverse=True):
        if not any(all(a >= b for a, b in zip(other, counts, strict=True)) for other in most):
            most.append(counts)
    return [moment for counts, moment in held.items() if counts in most]


def links_of(pipeline: Pipeline, rank: int) -> tuple[tuple[StageLink, ...], tuple[StageLink, ...]]:
    """The links that end on a rank, and those that begin there, ascending.

    Args:
        pipeline: with its links. rank: of the pipeline.
    """
    stages = stages_by_rank(pipeline.order, pipeline.ranks, pipeline.chunks)[rank]
    inward = tuple(link for link in pipeline.links if link.target in stages)
    return inward, tuple(link for link in pipeline.links if link.source in stages)


def _counts(found: Sequence[StageLink], links: Sequence[StageLink]) -> tuple[int, ...]:
    return tuple(map(found.count, links))
