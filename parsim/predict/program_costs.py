"""Programs priced by Costs: seconds for every task of a part."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from parsim.costs.communication.exchange import exchange_seconds
from parsim.costs.costs import Costs
from parsim.costs.pricing import price
from parsim.engines.program import DurationsOf, Part
from parsim.work import SendRecv


def priced(costs: Costs) -> DurationsOf:
    """Make a function that prices every task of a part: medians by `costs`, rank r on `costs.cluster.devices[r]`.

    It assumes that the transfers of a part run at the same time: those of one size share links and cards
    (`parsim.costs.communication.exchange`). This is exact for a round of gossip, and too slow for parts whose transfers
    follow one another.

    Args:
        costs: of one model on one cluster.

    Returns:
        A function (part, step) -> float64 [tasks] seconds; it raises CostError as the estimates do. Leaves out that waiting
        ranks give their links to others, and the slowdown of computation by communication.
    """

    def seconds(part: Part, t: int) -> NDArray[np.float64]:
        tasks = part.graph.tasks
        sends: dict[int, dict[tuple[int, int], list[int]]] = {}
        local: list[int] = []
        for task in tasks:
            if isinstance(task.work, SendRecv):
                pair = (task.work.source, task.work.destination)
                sends.setdefault(task.work.size_bytes, {}).setdefault(pair, []).append(task.index)
            else:
                local.append(task.index)
        found = np.zeros(len(tasks))
        estimates = price([(tasks[index].work, tasks[index].ranks[0]) for index in local], costs)
        found[local] = [estimate.median_s for estimate in estimates]
        for size_bytes, pairs in sends.items():
            for place, value in zip(pairs.values(), exchange_seconds(list(pairs), size_bytes, costs.cluster), strict=True):
                found[place] = value
        return found

    return seconds
