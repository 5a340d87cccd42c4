"""Operands for repeated calls, which together fill several times the last cache: no call finds the one before it there.

Every operand begins at a multiple of 256 bytes, as torch's CUDA allocator gives them, whatever its size: tensor cores and wide
loads want 16 bytes, and a slower kernel is chosen for less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parsim.errors import ExecutionError

ALIGNMENT_BYTES = 256
CACHE_MULTIPLE = 4
MAX_SETS = 1024


def set_count(set_bytes: int, cache_bytes: int, limit_bytes: int) -> int:
    """How many sets of operands rotate: their memory is `CACHE_MULTIPLE` times the cache, and two sets at least.

    Args:
        set_bytes: of all operands of one call. limit_bytes: that all sets may take together.

    Raises: ExecutionError if not even two sets fit.
    """
    wanted = max(2, math.ceil(CACHE_MULTIPLE * cache_bytes / set_bytes))
    allowed = limit_bytes // set_bytes
    if allowed < 2:
        raise ExecutionError(f"two sets of operands of {set_bytes} bytes do not fit into {limit_bytes} bytes")
    return min(wanted, allowed, MAX_SETS)


class OperandPool:
    """One stretch of device memory, from which operands are taken one after the other, each aligned.

    Attributes: sets: how many sets of `sizes_bytes` it holds. beyond_cache: whether they are `CACHE_MULTIPLE` times the cache.
    """

    def __init__(self, sizes_bytes: Sequence[int], *, cache_bytes: int, limit_bytes: int, device: torch.device) -> None:
        """Args: sizes_bytes: of the operands of one call."""
        rounded = [_aligned(size) for size in sizes_bytes]
        self.set_bytes = sum(rounded)
        self.sets = set_count(self.set_bytes, cache_bytes, limit_bytes)
        self.beyond_cache = self.sets * self.set_bytes >= CACHE_MULTIPLE * cache_bytes
        self._memory = torch.empty(self.sets * self.set_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        self._first = -self._memory.data_ptr() % ALIGNMENT_BYTES
        self._offsets = [sum(rounded[:place]) for place in range(len(rounded))]

    def operand(self, number: int, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Operand `place` of set `number`, not initialised."""
        begin = self._first + number * self.set_bytes + self._offsets[place]
        size = math.prod(shape) * dtype.itemsize
        return self._memory[begin : begin + size].view(dtype).view(*shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def fill_random(tensor: Tensor, generator: torch.Generator) -> None:
    """Standard normal numbers, in place: zeros would draw less power and run faster than real data."""
    if tensor.dtype.itemsize >= 2 and tensor.dtype.is_floating_point:
        tensor.normal_(generator=generator)
        return
    flat = tensor.view(-1)
    rows = 2**22
    for begin in range(0, flat.numel(), rows):
        part = flat[begin : begin + rows]
        values = torch.empty(part.numel(), dtype=torch.float32, device=tensor.device).normal_(generator=generator)
        part.copy_(values.to(tensor.dtype))
