"""Factors on the speed of hardware, for questions of the kind "what if the links were twice as fast"."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parsim.errors import CostError


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareScale:
    """How many times as fast everything of a kind is, whatever the plan; 1 changes nothing.

    Attributes:
        computation: components, optimizer steps and mixing. communication: collectives and transfers, latency included.

    Leaves out: that algorithms would be chosen anew for other links. A price keeps its algorithm.

    Raises:
        CostError: a factor that is not a finite number above 0.
    """

    computation: float = 1.0
    communication: float = 1.0

    def __post_init__(self) -> None:
        for name, factor in (("computation", self.computation), ("communication", self.communication)):
            if not (math.isfinite(factor) and factor > 0):
                raise CostError(f"the scale of {name} is {factor}; give a finite factor above 0")


AS_IT_IS = HardwareScale()
