"""The blocks of one step in the order of a pipeline: a lower bound that knows where they wait for one another.

A block is the forward or the backward of one microbatch on one stage. It begins when the block before it on its place has
ended, and when what its first component reads has come from other stages. The step at place 0 ends with its last block.

Between two stages one message follows the other, each as long as its transfer takes. The microbatches of one phase pass from a
stage to another in their order, and share a stream.

Leaves out what later components of a block wait for, messages of other stages on the same stream, and work of the step before
at the other places. All of them make a step longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from parsim.plans.pipeline import pipeline_actions
from parsim.plans.plan import Plan
from parsim.work import Phase

MOST_BLOCKS = 4096
"""Of a step. Longer ones are bounded without their order."""

Lags = Mapping[int, Sequence[tuple[int, float, float]]]
"""By stage, the stages from which its block gets what it begins with, how long after their beginning that is made, and how long
it is on the way."""


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
    sending = _sending(ahead, len(places)), _sending(back, len(places))
    awaited = [[len(lags.get(stage, ())) for stage in range(len(places))] for lags in (ahead, back)]
    arrived: dict[tuple[bool, int, int], tuple[int, float]] = {}  # of a block: how many messages have come, and the last
    passed: dict[tuple[bool, int, int], float] = {}
    free, following = [0.0] * ranks, [0] * ranks
    moved = True
    while moved:
        moved = False
        for place, own in enumerate(actions):
            for action in own[following[place] :]:
                forwards, stage = action.phase is Phase.FORWARD, action.stage
                come, ready = arrived.get((forwards, stage, action.microbatch), (0, 0.0))
                if come < awaited[not forwards][stage]:
                    break
                ready = max(ready if forwards else ready - early_s[stage], free[place])
                free[place] = ready + (forward_s if forwards else backward_s)[stage]
                for target, made_s, way_s in sending[not forwards][stage]:
                    there = max(ready + made_s, passed.get((forwards, stage, target), 0.0) if way_s else 0.0) + way_s
                    passed[forwards, stage, target] = there
                    key = forwards, target, action.microbatch
                    come, last = arrived.get(key, (0, 0.0))
                    arrived[key] = come + 1, max(last, there)
                following[place] += 1
                moved = True
    return free[0]


def _sending(waits: Lags, stages: int) -> list[list[tuple[int, float, float]]]:
    """By stage the stages that wait for it, with when it has made what they wait for, and how long that is on the way."""
    found: list[list[tuple[int, float, float]]] = [[] for _ in range(stages)]
    for target, own in waits.items():
        for source, made_s, way_s in own:
            found[source].append((target, made_s, way_s))
    return found


def lags(
    stages: Sequence[Sequence[str]],
    ends: Mapping[str, float],
    arriving: Callable[[str], Sequence[tuple[int, str, float]]],
) -> Lags:
    """How long after the beginning of other blocks each block gets what its first component waits for.

    Args:
        stages: by stage its components, in the order in which the block runs them. ends: of each, after the beginning of its
            block, at least. arriving: by component what it waits for from other stages: (stage, component, seconds on the way).
    """
    found = {}
    for number, names in enumerate(stages):
        if names:
            of_stage: dict[int, tuple[float, float]] = {}
            for stage, maker, way_s in arriving(names[0]):
                made_s = ends[maker]
                before = of_stage.get(stage)
                if before is None or made_s + way_s > sum(before):
                    of_stage[stage] = made_s, way_s
            found[number] = [(stage, made_s, way_s) for stage, (made_s, way_s) in of_stage.items()]
    return found
