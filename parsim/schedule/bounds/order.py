"""The blocks of one step in the order of a pipeline: a lower bound that knows where they wait for one another.

A block is the forward or the backward of one microbatch on one stage. It begins when the block before it on its place has
ended, and when what its first component reads has come from other stages. The step at place 0 ends with its last block.

Leaves out conversions, what later components of a block wait for, contention of transfers, and work of the step before at the
other places. All of them make a step longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from parsim.plans.pipeline import pipeline_actions
from parsim.plans.plan import Plan
from parsim.schedule.partition import INFINITE
from parsim.work import Phase

MOST_BLOCKS = 4096
"""Of a step. Longer ones are bounded without their order."""

Lags = Mapping[int, Sequence[tuple[int, float]]]
"""By stage, the stages from which its block gets what it begins with, and how long after their beginning that is there."""


def is_small(plan: Plan) -> bool:
    """Whether the blocks of a plan are few enough."""
    return 2 * len(plan.stages) * plan.microbatches <= MOST_BLOCKS


def last_block_s(
    plan: Plan,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    ahead: Lags,
    back: Lags,
    early_s: Sequence[float],
) -> float:
    """When the last block of place 0 ends, after the beginning of the step there.

    Args:
        plan: a pipeline whose order has no halves. forward_s, backward_s: by stage, of one block.
        ahead: of the forwards. back: of the backwards; none for a stage where the loss lies.
        early_s: by stage, what a backward does at its beginning without the gradient: it runs a forward again.

    Returns:
        0 where a stage of another place waits for nothing: it may begin its step before place 0 does.
    """
    places, count = plan.stage_places, plan.microbatches
    if any(place and not ahead.get(stage) for stage, place in enumerate(places)):
        return 0.0
    order, ranks = plan.pipeline_order, plan.mesh.pp
    actions = [pipeline_actions(order, place, ranks, count, plan.chunks) for place in range(ranks)]
    begun: dict[tuple[bool, int, int], float] = {}
    free, following = [0.0] * plan.mesh.pp, [0] * plan.mesh.pp
    moved = True
    while moved:
        moved = False
        for place, own in enumerate(actions):
            for action in own[following[place] :]:
                forwards = action.phase is Phase.FORWARD
                waits = (ahead if forwards else back).get(action.stage, ())
                before = [begun.get((forwards, stage, action.microbatch), INFINITE) + lag_s for stage, lag_s in waits]
                ready = max(before, default=0.0)
                if ready == INFINITE:
                    break
                ready = max(ready if forwards else ready - early_s[action.stage], free[place])
                begun[forwards, action.stage, action.microbatch] = ready
                free[place] = ready + (forward_s if forwards else backward_s)[action.stage]
                following[place] += 1
                moved = True
    return free[0]


def lags(
    stages: Sequence[Sequence[str]],
    seconds: Callable[[str], float],
    arriving: Callable[[str], Sequence[tuple[int, str, float]]],
) -> Lags:
    """How long after the beginning of other blocks each block gets what its first component waits for.

    Args:
        stages: by stage its components, in the order in which the block runs them. seconds: of a component, at least.
        arriving: by component what it waits for from other stages: (stage, component, seconds on the way).
    """
    ends: dict[str, float] = {}
    for names in stages:
        clock = 0.0
        for name in names:
            clock += seconds(name)
            ends[name] = clock
    return {
        number: [(stage, ends[maker] + way_s) for stage, maker, way_s in arriving(names[0])]
        for number, names in enumerate(stages)
        if names
    }
