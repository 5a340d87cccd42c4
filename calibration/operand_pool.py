"""Operands for repeated calls, taken in turns from one stretch of memory, so that no call finds those of the one before cached.

Every operand begins at a multiple of 256 bytes, as torch's CUDA allocator gives them, whatever its size. Tensor cores and wide
loads want 16 bytes, and a slower kernel is chosen for less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parsim.errors import ExecutionError
from parsim.units import MIB

ALIGNMENT_BYTES = 256
CACHE_MULTIPLE = 4
"""Memory of the operands over the last cache: what comes round again has left it."""
MAX_SETS = 1024

ASSUMED_L2_BYTES = 64 * MIB
"""Cache of a GPU whose driver does not tell; an H100 has 50 MiB."""
CPU_CACHE_BYTES = 32 * MIB
"""Assumed of a CPU's last cache, which torch does not tell."""


def last_cache_bytes(device: torch.device) -> int:
    """Bytes of the last cache in front of the device's memory."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or ASSUMED_L2_BYTES


class OperandPool:
    """One stretch of device memory, from which aligned operands are taken one after the other, and again from its beginning.

    Attributes: size_bytes: of the stretch. taken_bytes: of all operands taken so far.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        memory = torch.empty(size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        # CUDA's allocator aligns to 512 bytes; a fake tensor on a GPU has no address to ask for
        first = 0 if device.type == "cuda" else -memory.data_ptr() % ALIGNMENT_BYTES
        self._memory = memory[first : first + size_bytes]
        self._next = 0
        self.taken_bytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Not touched since the pool was last here, with what it held then.

        Raises: ExecutionError for an operand larger than the pool.
        """
        size = math.prod(shape) * dtype.itemsize
        if size > self.size_bytes:
            raise ExecutionError(f"an operand of {size} bytes does not fit into a pool of {self.size_bytes} bytes")
        if self._next + size > self.size_bytes:
            self._next = 0
        found = self._memory[self._next : self._next + size].view(dtype).view(*shape)
        self._next += _aligned(size)
        self.taken_bytes += size
        return found

    def whole(self, dtype: torch.dtype) -> Tensor:
        """All of the pool, to fill it."""
        return self._memory[: self.size_bytes // dtype.itemsize * dtype.itemsize].view(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandSets:
    """A pool that holds whole sets of operands, each for one call, to be taken set by set.

    Attributes: sets: how many it holds. beyond_cache: whether they are `CACHE_MULTIPLE` times the cache.
    """

    pool: OperandPool
    sets: int
    set_bytes: int
    beyond_cache: bool


def operand_sets(sizes_bytes: Sequence[int], *, cache_bytes: int, limit_bytes: int, device: torch.device) -> OperandSets:
    """Room for `CACHE_MULTIPLE` times the cache, as far as the limits allow; sizes: of the operands of one call, in the order
    in which they will be taken. Raises ExecutionError if not even two sets fit."""
    set_bytes = sum(_aligned(size) for size in sizes_bytes)
    sets = set_count(set_bytes, cache_bytes, limit_bytes)
    return OperandSets(
        pool=OperandPool(sets * set_bytes, device),
        sets=sets,
        set_bytes=set_bytes,
        beyond_cache=sets * set_bytes >= CACHE_MULTIPLE * cache_bytes,
    )


def set_count(set_bytes: int, cache_bytes: int, limit_bytes: int) -> int:
    """How many sets of operands rotate: their memory is `CACHE_MULTIPLE` times the cache, and two sets at least. limit_bytes:
    of all sets. Raises ExecutionError if not even two sets fit."""
    wanted = max(2, math.ceil(CACHE_MULTIPLE * cache_bytes / set_bytes))
    allowed = limit_bytes // set_bytes
    if allowed < 2:
        raise ExecutionError(f"two sets of operands of {set_bytes} bytes do not fit into {limit_bytes} bytes")
    return min(wanted, allowed, MAX_SETS)


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
