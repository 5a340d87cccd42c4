"""ZeRO 2 and 3: bytes of buckets that are whole (unsharded) on a rank while each of its components runs backward.

Gradients are there from the first backward that adds to them until they are sent, parameters from the start of their
all_gather to the last computation that needs them. The progress of communication during a computation is uncertain. It
lies between what the computation has waited for and what it has made ready. The result is the least and the most over all
these cases.
"""

from __future__ import annotations

from parsim.costs.memory.rank_memory import WholeBytes
from parsim.graph.passes.unsharded import gradient_windows, parameter_windows, uses_of
from parsim.graph.plan_index import PlanIndex
from parsim.work import Phase


def unsharded_bytes(layout: PlanIndex, rank: int) -> dict[str, WholeBytes]:
    """Bytes of whole buckets by component of the rank; empty below ZeRO 2.

    Args:
        layout: the plan and its model. rank: global number.

    Returns:
        Least and most bytes while the component runs backward. Leaves out the output of a reduce_scatter next to its input.
    """
    if layout.plan.zero_stage < 2:
        return {}
    uses = uses_of(layout, layout.plan.stage_of_rank(rank))
    windows = [
        window for window in (*gradient_windows(layout, uses), *parameter_windows(layout, uses)) if rank in window.bucket.group
    ]
    windows.sort(key=lambda window: window.place)  # as their collectives are issued
    found: dict[str, WholeBytes] = {}
    filling: dict[int, int] = {}  # gradients that are being added to: bucket and bytes
    begins: dict[int, list[int]] = {}
    for place, window in enumerate(windows):
        if not window.parameters:
            begins.setdefault(window.first, []).append(place)
    alive: list[int] = []  # places of collectives that are issued and whose buckets may be whole
    issued = done = 0
    for number, use in enumerate(uses):
        while issued < len(windows) and windows[issued].place[0] <= 2 * number:
            filling.pop(issued, None)
            alive.append(issued)
            issued += 1
        for place in alive:
            window = windows[place]
            if (window.first if window.parameters else window.freed + 1) <= number:
                done = max(done, place + 1)
        alive = [place for place in alive if (windows[place].last >= number if windows[place].parameters else place >= done)]
        for place in begins.get(number, ()):
            filling[place] = windows[place].bucket.padded_bytes
        if use.phase is not Phase.FORWARD:
            alike = [(windows[place].bucket.padded_bytes, windows[place].parameters, place) for place in alive]
            least, most = [], []  # the next collective to end has not begun, or it has
            for under_way in range(done, issued + 1):
                least.append(sum(size for size, comes, place in alike if (place < under_way if comes else place >= under_way)))
                most.append(sum(size for size, comes, place in alike if (place <= under_way if comes else place >= under_way)))
            before, own = found.get(use.component, WholeBytes(0.0, 0.0)), sum(filling.values())
            found[use.component] = WholeBytes(
                max(before.least, float(min(least) + own)), max(before.most, float(max(most) + own))
            )
    return found
