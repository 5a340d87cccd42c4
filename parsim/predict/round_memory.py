"""What relaxed synchronisation keeps on a rank beside a synchronous step: lines of memory of their own.

outer_state        of average with an outer optimizer: the weights of the last round, and its momentum
neighbour_buffers  of gossip: what arrives from the neighbours of a round, as far as it exceeds what the step has let go by then
receive_buffers    of stale: also what arrives in a step for the next one
stashed_weights    of stale: a copy of a stage's weights for every batch that it holds, unless it runs backward in the same step
"""

from __future__ import annotations

from dataclasses import replace

from parsim.costs.memory.records import RankMemory
from parsim.graph.passes.rounds import neighbours_of, outer_arrays
from parsim.graph.plan_index import PlanIndex
from parsim.predict.kept_activations import KeptActivations
from parsim.predict.rank_traffic import next_step_bytes

LET_GO = ("activations", "casts", "boundary_values", "unsharded", "workspace")
"""Lines of the step whose memory is free when a round begins."""


def batches_held(layout: PlanIndex, stage: int) -> int:
    """Batches that a stale stage has run forward and not backward, at the fullest moment.

    Args:
        layout: of a plan with synchronisation stale. stage: its place on the pp axis.
    """
    return 1 + layout.plan.synchronisation.delay_of(stage, layout.plan.mesh.pp)


def with_relaxed_lines(memory: RankMemory, kept: KeptActivations, rank: int) -> RankMemory:
    """The memory of a rank with the lines of its plan's synchronisation; unchanged for synchronous training.

    Args:
        memory: of the step. kept: values under the plan. rank: global number.
    """
    layout = kept.layout
    plan, rule = layout.plan, layout.plan.synchronisation
    if not rule.is_relaxed:
        return memory
    trained = sum(bucket.size_bytes for bucket in layout.rank_buckets(rank))
    if rule.kind == "stale":
        held = batches_held(layout, plan.stage_of_rank(rank))
        line = ("stashed_weights", held * trained if held > 1 else 0)
        arriving = round(next_step_bytes(kept, rank))
        held_lines = [(name, size + arriving if name == "receive_buffers" else size) for name, size in memory.lines]
        return replace(memory, lines=(*held_lines, line))
    lines = [("outer_state", outer_arrays(layout) * trained)] if rule.outer is not None else []
    if rule.kind == "gossip":
        replica = plan.replica_of_rank(rank)
        arriving = max(len(neighbours_of(layout, number)[replica]) for number in rule.cycle(plan.mesh.dp)) * trained
        free = sum(memory.line(name) for name in LET_GO)
        lines.append(("neighbour_buffers", max(0, arriving - free)))
    return replace(memory, lines=(*memory.lines, *lines))
