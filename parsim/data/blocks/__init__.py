"""Block tensors: arrays in blocks over processes, with one API for one process and for a process group.

from parsim.data import blocks

x = blocks.from_array(images, grid=(64,), processes=blocks.on_process_group())
x = (x - x.mean(0)) / 16
x, y = blocks.shuffle(x, y, seed=0)
x.rechunk((4,)).collect()
"""

from __future__ import annotations

from parsim.data.blocks.exchange import (
    BlockGrid,
    Processes,
    contiguous_owners,
    in_one_process,
    on_process_group,
    round_robin_owners,
    shared_owners,
)
from parsim.data.blocks.tensor import (
    BlockTensor,
    apply,
    collect,
    collect_on,
    concatenate,
    elementwise,
    from_array,
    from_blocks,
    from_dtensor,
    full,
    random,
    rechunk,
    shuffle,
    take,
    to_dtensor,
)

__all__ = [
    "BlockGrid",
    "BlockTensor",
    "Processes",
    "apply",
    "collect",
    "collect_on",
    "concatenate",
    "contiguous_owners",
    "elementwise",
    "from_array",
    "from_blocks",
    "from_dtensor",
    "full",
    "in_one_process",
    "on_process_group",
    "random",
    "rechunk",
    "round_robin_owners",
    "shared_owners",
    "shuffle",
    "take",
    "to_dtensor",
]
