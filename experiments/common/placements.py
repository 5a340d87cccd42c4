"""Every placement that a component can have."""

from __future__ import annotations

from parsim.model.model import Model
from parsim.plans.layouts import BATCH, REPLICATE, Placement


def choices(model: Model, name: str, tp: int, *, placed: bool = True) -> list[Placement]:
    """Every placement a component can have; `placed`: on one tp rank alone, too."""
    found = [BATCH]
    if tp > 1:
        found.append(REPLICATE)
        if placed:
            found += [Placement("place", shard=shard) for shard in range(tp)]
    for sharding in model.component(name).shardings:
        found += [
            Placement("shard", rule=sharding.rule, ways=ways)
            for ways in range(2, tp + 1)
            if tp % ways == 0 and sharding.limit % ways == 0
        ]
    return found
