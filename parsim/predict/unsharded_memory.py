"""ZeRO 2 and 3: bytes of buckets that are whole (unsharded) on a rank while each of its components runs backward.

The executor makes and gives up their room between computations (`parsim.execute.rooms.buckets`), so they do not depend on how
fast the communication is. Gradients are there from the first backward that adds to them until the computation that waits for
their reduce_scatter. While they are being sent, there is room for this rank's part of the sum too. Parameters are there from
the computation beside which they are gathered to the last one that needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from parsim.graph.passes.unsharded import gradient_windows, parameter_windows, uses_of
from parsim.graph.plan_index import PlanIndex
from parsim.plans.pipeline import PIPELINE_ORDERS, Action, few_rounds, pipeline_actions
from parsim.work import Phase

REPEATS = 4
"""Actions of one kind in a row, or in turn with another one, after which buckets come and go as before."""


def unsharded_bytes(layout: PlanIndex, rank: int) -> dict[str, float]:
    """Bytes of whole buckets by component of the rank; empty below ZeRO 2.

    Args:
        layout: the plan and its model. rank: global number.

    Returns:
        The most bytes, over the microbatches, while the component runs backward. Leaves out temporary copies of the
        communication library.
    """
    if layout.plan.zero_stage < 2:
        return {}
    plan = layout.plan
    order, place = plan.pipeline_order, plan.stage_of_rank(rank)
    few = few_rounds(order, plan.mesh.pp, plan.microbatches)
    actions = pipeline_actions(order, place, plan.mesh.pp, few, plan.chunks)
    if plan.chunks == 1 and not PIPELINE_ORDERS[order].halves:
        actions = few_repeats(actions)
    uses = uses_of(layout, place, actions)  # buckets come and go by what runs right before and after
    found: dict[str, int] = {}
    sizes = {bucket.number: bucket.padded_bytes for bucket in layout.rank_buckets(rank)}
    changes = [0] * (len(uses) + 1)  # of the bytes that are whole, from one use to the next
    for window in (*gradient_windows(layout, uses, in_order=False), *parameter_windows(layout, uses, in_order=False)):
        size = sizes.get(window.bucket.number)
        if size is None:  # of another shard
            continue
        begins, ends = (window.ahead, window.last) if window.parameters else (window.first, window.freed)
        if begins > ends:
            continue
        changes[begins] += size
        changes[ends + 1] -= size
        if not window.parameters and (sent := max(begins, window.last + 1)) <= ends:
            part = size // len(window.bucket.group)
            changes[sent] += part
            changes[ends + 1] -= part
    whole = accumulate(changes)
    for (phase, name, _), size in zip(uses, whole, strict=False):
        if phase is not Phase.FORWARD and size > found.get(name, -1):
            found[name] = size
    return {name: float(size) for name, size in found.items() if layout.runs_on(rank, name)}


def few_repeats(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The actions of a place without all but four repeats of one phase in a row, or of two in turn.

    Args:
        actions: of one stage, in order.
    """
    phases = [action.phase for action in actions]
    kept: list[Action] = []
    number = 0
    while number < len(phases):
        best, skipped = 1, 0
        for period in (1, 2):
            unit = phases[number : number + period]
            repeats = 1
            while phases[number + repeats * period : number + (repeats + 1) * period] == unit:
                repeats += 1
            if repeats > REPEATS:
                best, skipped = REPEATS * period, (repeats - REPEATS) * period
                break
        kept += actions[number : number + best]
        number += best + skipped
    return tuple(kept)
