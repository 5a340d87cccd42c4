"""What a rank keeps beside a synchronous step, for relaxed synchronisation and for validation: lines of memory of their own.

outer_state        of average with an outer optimizer: the weights of the last round, and its momentum; of merge: the global
                   model
neighbour_buffers  of gossip: what arrives from the neighbours of a round, as far as it exceeds what the step has let go by then
receive_buffers    of stale: also what arrives in a step for the next one
stashed_weights    of stale: a copy of a stage's weights for every batch that it holds, unless it runs backward in the same step
evaluation         of [training.evaluation]: whole weights and the batch that is scored, as far as that exceeds what is let go
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from parsim.costs.memory.records import RankMemory
from parsim.costs.memory.waiting import waiting_bytes
from parsim.graph.passes.rounds import most_neighbours, outer_arrays
from parsim.graph.plan_index import PlanIndex
from parsim.model.component import Value
from parsim.predict.kept_activations import KeptActivations
from parsim.predict.rank_traffic import next_step_bytes

LET_GO = ("activations", "casts", "boundary_values", "unsharded", "workspace")
"""Lines of the step whose memory is free when a round begins."""
BETWEEN_STEPS = (*LET_GO, "inputs", "receive_buffers")
"""Those whose memory is free between two steps."""
MOST_SCORED = 64
"""Samples of a batch that is scored, at most (`parsim.execute.training.evaluation`)."""
Scored = Literal["", "weights", "averages"]
"""What is validated during the training; "": nothing."""


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
    lines = [("outer_state", outer_arrays(layout) * trained)] if outer_arrays(layout) else []
    if rule.kind == "gossip":
        replica = plan.replica_of_rank(rank)
        arriving = most_neighbours(rule, plan.mesh.dp)[replica] * trained
        free = sum(memory.line(name) for name in LET_GO)
        lines.append(("neighbour_buffers", max(0, arriving - free)))
    return replace(memory, lines=(*memory.lines, *lines))


def with_evaluation_line(memory: RankMemory, kept: KeptActivations, scored: Scored) -> RankMemory:
    """The memory of a rank with the line `evaluation`; unchanged where nothing is validated.

    A rank builds the module, which then takes the gathered weights in place of its own. Replicas whose weights are whole in
    any case gather none, unless averages are scored, or the mean of replicas that mix in rounds.

    Args:
        memory: of the step. kept: values under the plan. scored: what is validated.

    Returns:
        The line is 0 where the step needs more. Leaves out what the library keeps while it gathers.
    """
    if not scored:
        return memory
    plan, model = kept.layout.plan, kept.layout.model
    whole = model.parameter_bytes
    buffers = sum(component.buffer_bytes for component in model.components)
    is_whole = (
        plan.mesh.dp == plan.world_size and plan.zero_stage < 3 and scored == "weights" and not plan.synchronisation.mixes
    )
    gathered = (0 if is_whole else whole) + buffers
    scoring = _scored_bytes(kept, min(MOST_SCORED, max(1, plan.microbatch_samples)))
    needed = gathered + buffers + max(whole, scoring)
    free = sum(memory.line(name) for name in BETWEEN_STEPS)
    return replace(memory, lines=(*memory.lines, ("evaluation", max(0, needed - free))))


def _scored_bytes(kept: KeptActivations, samples: int) -> int:
    """Of one forward of the whole model, of which nothing is kept: at most what its components have made, and what waits."""
    model = kept.layout.model
    values: Mapping[str, Value] = {value.name: replace(value, savers=()) for value in model.values}
    waits = waiting_bytes(model.components, values, lambda value: value.size_bytes(samples)).values
    batch = sum(value.size_bytes(samples) for value in values.values() if value.producer is None)
    return batch + max(
        round(waits[component.name])
        - sum(values[name].size_bytes(samples) for name in component.inputs if values[name].producer is None)
        + max((rate * samples + fixed for rate, fixed in component.forward_peaks), default=0)
        for component in model.components
    )
