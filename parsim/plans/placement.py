"""How a component lies on the tp axis of its stage. (On the dp axis every component is batch-sharded.)

    batch            the replica's microbatch is cut over all tp ranks, each holds the whole component (data parallel)
    shard:RULE/W     tensor-sharded over W neighbouring ranks by one of its rules; the tp // W groups split the microbatch
    replicate        every tp rank does all of it
    place:J          tp rank J alone has it (model parallel by placement)

So `dp=1 tp=8` with `batch` everywhere is data parallelism over 8 ranks, `shard:.../8` is model parallelism, and
`shard:.../4` is hybrid: 2 x 4.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from parsim.errors import PlanError

KINDS = ("batch", "shard", "replicate", "place")


class Placement(NamedTuple):
    """`rule` and `ways` belong to kind "shard", `shard` (a tp rank) to kind "place". Prints as above."""

    kind: str
    rule: str = ""
    ways: int = 1
    shard: int = 0

    def __str__(self) -> str:
        match self.kind:
            case "shard":
                return f"shard:{self.rule}/{self.ways}"
            case "place":
                return f"place:{self.shard}"
        return self.kind

    def batch_ways(self, tp: int) -> int:
        """How many neighbouring tp ranks work on the same samples."""
        return {"batch": 1, "shard": self.ways}.get(self.kind, tp)

    def runs_on(self, shard: int) -> bool:
        """Whether tp rank `shard` has the component."""
        return self.kind != "place" or shard == self.shard


BATCH = Placement("batch")
REPLICATE = Placement("replicate")


def parse_placement(text: str) -> Placement:
    """Inverse of `str(placement)`.

    Args:
        text: such as "batch" or "shard:column/4".

    Raises:
        PlanError: the text is not a placement.
    """
    match = re.fullmatch(r"(batch|replicate)|shard:([^/:]+)/(\d+)|place:(\d+)", text)
    if match is None:
        raise PlanError(f"cannot read placement {text!r}; write batch, replicate, shard:RULE/WAYS or place:RANK")
    if match[1]:
        return Placement(match[1])
    if match[2]:
        return Placement("shard", rule=match[2], ways=int(match[3]))
    return Placement("place", shard=int(match[4]))
