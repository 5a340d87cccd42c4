"""What workers train on: block tensors whose rows are dealt to their owners, and batches of a worker's own rows.

The rows of a worker's shard become blocks on its rank (`shuffling.take`). One process that plays all workers holds all shards.
On a process group each process holds its worker's shard alone. Batches are the same, bit for bit, in both cases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parsim.algorithms.shards import Shards
from parsim.arrays import Ints
from parsim.data.blocks.creating import from_array
from parsim.data.blocks.grid import BlockGrid, balanced_sizes
from parsim.data.blocks.processes import Processes, in_one_process
from parsim.data.blocks.shuffling import take
from parsim.data.blocks.tensor import BlockTensor
from parsim.errors import AlgorithmError
from parsim.virtual.problems import LearningProblem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerBatch:
    """Samples of m workers: inputs and targets [m, batch, ...]. real: bool [m, batch], false where there is no sample."""

    inputs: Tensor
    targets: Tensor
    real: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Feed:
    """The rows of the workers whose blocks this process holds, one worker after the other.

    Attributes:
        begins: where each of these workers' rows begin. sizes: the samples of every worker.
    """

    inputs: Tensor
    targets: Tensor
    begins: Mapping[int, int]
    sizes: tuple[int, ...]

    def rows(self, worker: int) -> Ints:
        """The numbers of a worker's samples: 0, 1, ..., counted within its shard."""
        return np.arange(self.sizes[worker], dtype=np.int64)

    def batch(self, workers: Sequence[int], rows: NDArray[np.int64]) -> WorkerBatch:
        """Rows int64 [m, batch] of these m workers' own shards, padded with -1.

        Raises:
            AlgorithmError: a worker whose blocks another process holds.
        """
        missing = [worker for worker in workers if worker not in self.begins]
        if missing:
            raise AlgorithmError(
                f"the samples of workers {missing} are on other processes; here are those of {list(self.begins)}"
            )
        wanted = torch.from_numpy(rows)
        begins = torch.tensor([self.begins[worker] for worker in workers])[:, None]
        index = wanted.clamp(min=0) + begins
        return WorkerBatch(inputs=self.inputs[index], targets=self.targets[index], real=wanted >= 0)


def feed_workers(inputs: BlockTensor, targets: BlockTensor, shards: Shards, *, blocks_per_worker: int = 1) -> Feed:
    """Send every worker the rows of its shard; worker j is rank j of the block tensors' processes.

    Args:
        inputs, targets: [n, ...], rows in the same order. shards: row numbers per worker.
        blocks_per_worker: pieces of each shard (as many as it has rows, if they are fewer); changes no batch.

    Raises:
        AlgorithmError: other processes than workers, or fewer than one block per worker.
        DataError: a row that is not there, more than there is memory for.
    """
    if len(shards) != inputs.processes.ranks or blocks_per_worker < 1:
        raise AlgorithmError(
            f"each worker is one rank with at least one block: got {len(shards)} workers, {inputs.processes.ranks} ranks and "
            f"{blocks_per_worker} blocks per worker"
        )
    pieces = [balanced_sizes(len(shard), max(1, min(blocks_per_worker, len(shard)))) for shard in shards]
    sizes = [size for worker in pieces for size in worker]
    owners = [worker for worker, sizes_of in enumerate(pieces) for _ in sizes_of]
    order = np.concatenate(shards)
    rows = [_own_rows(take(tensor, order, sizes=sizes, owners=_by_row(tensor, owners))) for tensor in (inputs, targets)]
    lengths = tuple(len(shard) for shard in shards)
    own = [worker for worker in range(len(shards)) if inputs.processes.holds(worker)]
    begins = dict(zip(own, [0, *itertools.accumulate(lengths[worker] for worker in own)], strict=False))
    return Feed(inputs=rows[0], targets=rows[1], begins=begins, sizes=lengths)


def feed_problem(problem: LearningProblem, shards: Shards, *, processes: Processes | None = None) -> Feed:
    """The training samples of a problem for workers that one process plays, or for a process group of as many ranks."""
    where = processes or in_one_process(len(shards))

    def cut(array: Tensor) -> BlockTensor:
        grid = BlockGrid.balanced(array.shape, (min(where.ranks, len(array)),))
        return from_array(array, grid=grid, processes=where)

    return feed_workers(cut(problem.inputs), cut(problem.targets), shards)


def _by_row(tensor: BlockTensor, owners: Sequence[int]) -> list[int]:
    """The owner of each row of blocks, for all blocks of the row."""
    return [owner for owner in owners for _ in range(math.prod(tensor.grid.counts[1:]))]


def _own_rows(tensor: BlockTensor) -> Tensor:
    """The rows of the blocks that this process holds, in their order. Blocks that lie side by side are joined."""
    across = math.prod(tensor.grid.counts[1:])
    grid = BlockGrid(sizes=(tensor.grid.sizes[0], *((size,) for size in tensor.shape[1:])))
    rows = tensor.rechunk(grid, owners=tensor.owners[::across])
    return torch.cat([rows.blocks[number] for number in sorted(rows.blocks)])
