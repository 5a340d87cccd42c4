"""Block tensors: arrays in blocks over processes, with one API for one process and for a process group.

from parsim.data import blocks

x = blocks.from_array(images, grid=(64,), processes=blocks.on_process_group())
x = (x - x.mean(0)) / 16
x, y = blocks.shuffle(x, y, seed=0)
x.rechunk((4,)).collect()
"""

from __future__ import annotations

from parsim.data.blocks.creating import from_array, from_blocks, full, random
from parsim.data.blocks.dtensors import from_dtensor, to_dtensor
from parsim.data.blocks.elementwise import apply, elementwise
from parsim.data.blocks.grid import BlockGrid, contiguous_owners, round_robin_owners, shared_owners
from parsim.data.blocks.indexing import concatenate
from parsim.data.blocks.processes import Processes, in_one_process, on_process_group
from parsim.data.blocks.rechunking import collect, collect_on, rechunk
from parsim.data.blocks.shuffling import shuffle, take
from parsim.data.blocks.tensor import BlockTensor

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
