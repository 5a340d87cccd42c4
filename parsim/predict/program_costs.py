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
    """Medians by `costs`, rank r on `costs.cluster.devices[r]`.

    The transfers of a part are taken to run at the same time: those of one size share links and cards
    (`parsim.costs.communication.exchange`). Exact for a round of gossip; too slow for parts whose transfers follow one another.

    Leaves out: that ranks that wait give their links to others, and the slowing of computation by communication.

    Raises (when called): CostError as the estimates do.
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
