"""Links shared max-min fairly: the rates of flows that each load several links, by filling all of them like water.

A flow has one rate; link l carries `loads[l, f]` times the rate of flow f, at most its capacity, and no flow goes faster than
its own limit. The rates are max-min fair: none can be raised without lowering one that is not higher already. All rates rise
together; where a link is full, the flows on it stop, and the others go on. A collective is one flow whose loads couple its
links: the slowest paces all of them.

Leaves out: round-trip times and bursts, through which real transports come close to fair shares only over longer spans.

This is the known progressive filling; that it holds for any loads >= 0 is what the tests show against a linear programme.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from parsim.arrays import Floats
from parsim.errors import ScenarioError

_TIE = 1e-12
"""Links that fill up within this of one another, relatively, count as filling up at once."""


def max_min_rates(loads: ArrayLike, capacity: ArrayLike, limit: ArrayLike) -> Floats:
    """The max-min fair rates.

    Args:
        loads: float64 [L, F], >= 0: what one unit of a flow's rate puts on a link. 0 where it does not pass.
        capacity: float64 [L], >= 0, in the unit of loads times rates. limit: float64 [F], >= 0; inf for none.

    Returns:
        float64 [F]. A flow on a link of capacity 0 has rate 0.

    Raises:
        ScenarioError: shapes that do not fit, negative or NaN entries, infinite loads, or a flow that nothing limits.
    """
    load, room, most = (np.asarray(entry, dtype=np.float64) for entry in (loads, capacity, limit))
    _check(load, room, most)
    flows = len(most)
    rates = np.zeros(flows)
    rising = np.ones(flows, dtype=np.bool_)
    level = 0.0
    while rising.any():
        pressure = load[:, rising].sum(axis=1)
        taken = load[:, ~rising] @ rates[~rising]
        with np.errstate(divide="ignore", invalid="ignore"):
            full_at = np.where(pressure > 0, np.maximum(room - taken, 0.0) / pressure, np.inf)
        # Rounding must not let the water fall.
        level = max(level, min(float(full_at.min(initial=np.inf)), float(most[rising].min())))
        full = full_at <= level * (1 + _TIE)
        stops = rising & ((load[full] > 0).any(axis=0) | (most <= level))
        rates[stops] = level
        rising &= ~stops
    return rates


def _check(loads: Floats, capacity: Floats, limit: Floats) -> None:
    if loads.shape != (*capacity.shape, *limit.shape) or loads.ndim != 2:
        raise ScenarioError(
            f"loads must have shape [links, flows], got {list(loads.shape)} for {capacity.size} links and {limit.size} flows"
        )
    for name, entry in (("loads", loads), ("capacity", capacity), ("limit", limit)):
        if not bool(np.all(entry >= 0)):
            raise ScenarioError(f"{name} must be >= 0, got {float(entry[~(entry >= 0)][0])}")
    if not bool(np.isfinite(loads).all()):
        raise ScenarioError("loads must be finite; a flow that a link cannot carry has that link's capacity 0")
    unbounded = np.isinf(limit) & ~(loads[np.isfinite(capacity)] > 0).any(axis=0)
    if unbounded.any():
        raise ScenarioError(f"nothing limits flow {int(unbounded.argmax())}; give it a limit or a link of finite capacity")
