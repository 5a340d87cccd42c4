"""Random numbers in shards: what all shards hold alike is masked alike, and the pieces of a cut tensor independently.

The generators of all shards of a component must begin its forward in one state, which depends on the samples and on nothing
else (`parsim.execute.randomness` sees to it). A call on full tensors or summands then draws the same numbers in every shard. A
call on pieces draws from a stream of its shard, and leaves the generator in a state that is again the same for all.
So the shards equal one process that draws the mask of a cut tensor piece by piece from the same streams.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def drawn_by_shard(function: Callable[..., Any], shard: int, value: Tensor, *arguments: Any, **keywords: Any) -> Any:
    """`function(value, ...)` with the random numbers of that shard."""
    if isinstance(value, FakeTensor) or value.is_meta:
        return function(value, *arguments, **keywords)
    generator = generator_of(value.device)
    state = generator.get_state().numpy().tobytes()
    generator.manual_seed(_seed(state, str(shard)))
    try:
        return function(value, *arguments, **keywords)
    finally:
        generator.manual_seed(_seed(state, "all"))


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that calls on this device draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def _seed(state: bytes, stream: str) -> int:
    return int.from_bytes(hashlib.blake2b(state + stream.encode(), digest_size=7).digest(), "big")
