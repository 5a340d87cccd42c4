"""ZeRO 1: the parameters of a bucket in one flat array, of which each rank of the group updates its part.

Gradients lie in a second flat array of the same order. Both are padded with zeros to equal parts. Every optimizer here works
element by element, so that updating a part of the flat array is updating that part of the parameters.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 1 (P_os).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from parsim.execute.fragments import Fragment, fragment_of, is_per_element
from parsim.graph.holding import Bucket, HeldParameter


class DividedBucket:
    """A bucket whose optimizer state is spread over its group; this rank is `place` in it.

    Attributes:
        parameters, gradients: the flat padded arrays. chunk: this rank's part as a parameter, its `.grad` a view.
        parts: the parameters the chunk reaches into, by name: what of each, and where in the chunk that lies.
    """

    def __init__(self, bucket: Bucket, held: Mapping[str, Tensor], place: int) -> None:
        first = held[bucket.parameters[0].name]
        size = bucket.chunk_elements
        self._bucket = bucket
        self.parameters = torch.zeros(size * len(bucket.group), dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.parameters)
        self.parts: dict[str, tuple[Fragment, slice]] = {}
        start, stop = place * size, (place + 1) * size
        for entry, offset in self._offsets():
            parameter = held[entry.name]
            view = self.parameters[offset : offset + parameter.numel()].view_as(parameter)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = self.gradients[offset : offset + parameter.numel()].view_as(parameter)
            first_own, last_own = max(start, offset), min(stop, offset + entry.elements)
            if first_own < last_own:
                own = fragment_of(entry)._replace(
                    start=first_own - offset, stop=last_own - offset, shape=tuple(parameter.shape)
                )
                self.parts[entry.name] = own, slice(first_own - start, last_own - start)
        self.chunk = nn.Parameter(self.parameters[start:stop])
        self.chunk.grad = self.gradients[start:stop]

    def _offsets(self) -> Iterator[tuple[HeldParameter, int]]:
        offset = 0
        for entry in self._bucket.parameters:
            yield entry, offset
            offset += entry.elements

    def state_of(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """What the state of the chunk says of one parameter: views into its arrays, and its step counter."""
        place = self.parts[name][1]
        return {key: value[place] if is_per_element(value, key) else value for key, value in state.items()}

    def add_state(self, chunk_state: MutableMapping[str, Any], name: str, state: Mapping[str, Any]) -> None:
        """Put this rank's part of the state of one whole parameter (of its piece, if it is cut) into that of the chunk."""
        if name not in self.parts:
            return
        fragment, place = self.parts[name]
        for key, value in state.items():
            if is_per_element(value, key):
                flat = chunk_state.setdefault(key, torch.zeros_like(self.chunk.data))
                flat[place] = value.reshape(-1)[fragment.start : fragment.stop].to(flat)
            else:
                chunk_state.setdefault(key, value)
