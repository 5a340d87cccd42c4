"""Every joint choice of placements of a model of few components, each with a lower bound of its step.

What the placement problem leaves out decides here: ranks that update their parts at the same time, components placed on
several ranks that work on several microbatches at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from parsim.arrays import Floats
from parsim.plans.placement import Placement
from parsim.schedule.options import Prices
from parsim.schedule.space import is_chain
from parsim.work import Phase

MOST_CHOICES = 2**12
"""Joint choices of one mesh. Beyond, only those are judged that the placement problem finds best."""


def count_choices(options: Sequence[Sequence[Placement]]) -> int:
    """Joint choices; 0 where they are too many to be listed.

    Args:
        options: per component the placements that it may have.
    """
    total = 1
    for own in options:
        total *= len(own)
        if total > MOST_CHOICES:
            return 0
    return total


def choices_by_bound(
    prices: Prices, options: Sequence[Sequence[Placement]], places: Sequence[int], microbatches: int
) -> tuple[Floats, NDArray[np.int64]]:
    """Every joint choice, bounds ascending.

    A rank computes all microbatches of its components. It begins once one microbatch has gone forward through the components
    before its own, and a microbatch still goes back through them after its last backward.

    Args:
        prices: of one microbatch on the mesh. options: per component, all of `count_choices`.
        places: per component its place on the pp axis. microbatches: per replica.

    Returns:
        Seconds that no step goes below, and [choice, component] the numbers of the options. Leaves out all communication.
    """
    index = np.indices([len(own) for own in options]).reshape(len(options), -1)
    mesh, chain = prices.mesh, is_chain(prices.problem)
    busy = np.zeros((index.shape[1], mesh.size))
    first = np.full_like(busy, np.inf)
    before = np.zeros(index.shape[1])
    for number, component in enumerate(prices.problem.model.components):
        seconds = np.zeros((len(options[number]), mesh.size))
        phases = (Phase.FORWARD, Phase.BACKWARD) if component.name in prices.differentiable else (Phase.FORWARD,)
        for row, placement in enumerate(options[number]):
            for rank in mesh.stage_ranks(places[number]):
                if placement.runs_on(rank % mesh.tp):
                    seconds[row, rank] = sum(prices.compute_on_s(component, placement, phase, rank) for phase in phases)
        own = seconds[index[number]]
        busy += own
        first = np.where((own > 0) & np.isinf(first), before[:, None], first)
        if chain:
            least = np.where(own > 0, own, np.inf).min(axis=1)
            before = before + np.where(np.isinf(least), 0.0, least)
    ends = microbatches * busy + np.where(np.isinf(first), 0.0, first)
    bounds = ends.max(axis=1)
    order = np.argsort(bounds, kind="stable")
    return bounds[order], index.T[order]
