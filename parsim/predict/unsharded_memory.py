"""ZeRO 2 and 3: bytes of buckets that are whole (unsharded) on a rank while each of its components runs.

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
from parsim.plans.pipeline import PIPELINE_ORDERS, few_rounds, pipeline_actions
from parsim.work import Phase

AT_AN_END = 3
"""Repeats of actions in a row, at either end of which buckets may come and go otherwise than in between."""


def unsharded_bytes(layout: PlanIndex, rank: int) -> dict[tuple[Phase, str, int], float]:
    """Bytes of whole buckets by phase, component of the rank and microbatch; empty below ZeRO 2.

    Args:
        layout: the plan and its model. rank: global number.

    Returns:
        Of a few rounds of microbatches, by which `HeldMoment.microbatch` counts too. A forward that is computed again is a
        phase of its own: gradients that are still being sent then may be gone in the backward. Leaves out temporary copies of
        the communication library.
    """
    if layout.plan.zero_stage < 2:
        return {}
    plan = layout.plan
    order, place = plan.pipeline_order, plan.stage_of_rank(rank)
    actions = pipeline_actions(
        order, place, plan.mesh.pp, few_rounds(order, plan.mesh.pp, plan.microbatches), plan.chunks
    )  # buckets come and go by what runs right before and after, and every round is like the one before
    alone = plan.chunks == 1 and not PIPELINE_ORDERS[order].halves
    stands = few_repeats([action.phase for action in actions]) if alone else tuple(range(len(actions)))
    uses = uses_of(layout, place, [action for number, action in enumerate(actions) if stands[number] == number])
    found: dict[tuple[Phase, str, int], float] = {}
    known: dict[tuple[bool, int], list[tuple[Phase, str, float]]] = {}
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
    for (phase, name, microbatch), size in zip(uses, whole, strict=False):
        if layout.runs_on(rank, name):
            found[phase, name, microbatch] = float(size)
            known.setdefault((phase is Phase.FORWARD, microbatch), []).append((phase, name, float(size)))
    for number, other in enumerate(stands):
        action, like = actions[number], actions[other]
        for phase, name, bytes_whole in (
            known.get((like.phase is Phase.FORWARD, like.microbatch), ()) if other != number else ()
        ):
            found[phase, name, action.microbatch] = bytes_whole
    return found


def few_repeats(phases: Sequence[Phase]) -> tuple[int, ...]:
    """Per action of a place the number of the one that stands for it: itself, but within long repeats of one phase in a row,
    or of two in turn, which keep three repeats at either end.

    Args:
        phases: of the actions of one stage, in order.
    """
    stands = list(range(len(phases)))
    number = 0
    while number < len(phases):
        for period in (1, 2):
            unit, repeats = phases[number : number + period], 1
            while phases[number + repeats * period : number + (repeats + 1) * period] == unit:
                repeats += 1
            if repeats > 2 * AT_AN_END:
                first, last = number + AT_AN_END * period, number + (repeats - AT_AN_END) * period
                stands[first:last] = [first - period + place % period for place in range(last - first)]
                number += (repeats - 1) * period
                break
        number += 1
    return tuple(stands)
