"""ZeRO 2 and 3: bytes of buckets that are whole (unsharded) on a rank while each of its components runs.

The executor makes and gives up their room between computations (`parsim.execute.rooms.buckets`), so they do not depend on how
fast the communication is. Gradients are there from the first backward that adds to them until the computation that waits for
their reduce_scatter. While they are being sent, there is room for this rank's part of the sum too. Parameters are there from
the computation beside which they are gathered to the last one that needs them.
"""

from __future__ import annotations

from itertools import accumulate

from parsim.graph.passes.unsharded import gradient_windows, parameter_windows, uses_of
from parsim.graph.plan_index import PlanIndex
from parsim.plans.few_actions import few_actions
from parsim.work import Phase


def unsharded_bytes(layout: PlanIndex, rank: int) -> dict[tuple[Phase, str, int], float]:
    """Bytes of whole buckets by phase, component of the rank and microbatch; empty below ZeRO 2.

    Args:
        layout: the plan and its model. rank: global number.

    Returns:
        Of a few actions (`parsim.plans.few_actions`), by which `HeldMoment.microbatch` counts too. A forward that is computed
        again is a phase of its own: gradients that are still being sent then may be gone in the backward. Leaves out temporary
        copies of the communication library.
    """
    if layout.plan.zero_stage < 2:
        return {}
    plan = layout.plan
    place, pipeline = plan.stage_of_rank(rank), (plan.mesh.pp, plan.microbatches, plan.chunks)
    # buckets come and go by what runs right before and after
    uses = uses_of(layout, place, few_actions(plan.pipeline_order, place, *pipeline).actions)
    found: dict[tuple[Phase, str, int], float] = {}
    sizes = {bucket.number: bucket.padded_bytes for bucket in layout.rank_buckets(rank)}
    changes = [0] * (len(uses) + 1)  # of the bytes that are whole, from one use to the next
    gradients, parameters = (windows(layout, uses, sizes, in_order=False) for windows in (gradient_windows, parameter_windows))
    for window in (*gradients, *parameters):
        size = sizes[window.bucket.number]
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
    for use, size in zip(uses, whole, strict=False):
        if layout.runs_on(rank, use.component):
            found[use.phase, use.component, use.microbatch] = float(size)
    return found
