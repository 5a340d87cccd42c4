"""How many microbatches of every chunk a rank of a pipeline holds while it runs each of its actions."""

from __future__ import annotations

from functools import lru_cache

from parsim.costs.memory.chunks import HeldMoment
from parsim.plans.pipeline import pipeline_actions, stages_by_rank
from parsim.work import Phase


@lru_cache(maxsize=1024)
def held_moments(order: str, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> tuple[HeldMoment, ...]:
    """Every moment but those at which the same runs and no more is held than at another one.

    Args:
        order, rank, ranks, microbatches, chunks: as for `pipeline_actions`.
    """
    alive, waiting = [0] * chunks, [0] * chunks
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages_by_rank(order, ranks, chunks)[rank])}
    seen: dict[tuple[int, Phase], dict[tuple[int, ...], HeldMoment]] = {}
    for action in pipeline_actions(order, rank, ranks, microbatches, chunks):
        chunk, phase = chunk_of[action.stage], action.phase
        alive[chunk] += phase is Phase.FORWARD
        moment = HeldMoment(chunk, phase, tuple(alive), tuple(waiting))
        seen.setdefault((chunk, phase), {})[(*alive, *waiting)] = moment
        waiting[chunk] += (phase is Phase.BACKWARD_INPUT) - (phase is Phase.BACKWARD_WEIGHT)
        alive[chunk] -= phase in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT)
    return tuple(moment for held in seen.values() for counts, moment in held.items() if not _exceeded(counts, held))


def _exceeded(counts: tuple[int, ...], others: dict[tuple[int, ...], HeldMoment]) -> bool:
    return any(other != counts and all(a >= b for a, b in zip(other, counts, strict=True)) for other in others)
