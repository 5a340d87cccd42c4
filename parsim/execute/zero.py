"""ZeRO 1: the parameters of a bucket in one flat array, of which each rank of the group updates its part.

Gradients lie in a second flat array of the same order. Both are padded with zeros to equal parts. Every optimizer here works
element by element, so that updating a part of the flat array is updating that part of the parameters.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 1 (P_os).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from parsim.execute.fragments import Fragment, fragment_of
from parsim.graph.holding import Bucket, HeldParameter


class DividedBucket:
    """A bucket whose optimizer state is spread over its group; this rank is `place` in it.

    Attributes: parameters, gradients: the flat padded arrays. chunk: this rank's part as a parameter, its `.grad` a view.
    """

    def __init__(self, bucket: Bucket, held: Mapping[str, Tensor], place: int) -> None:
        first = held[bucket.parameters[0].name]
        size = bucket.chunk_elements
        self._bucket = bucket
        self.parameters = torch.zeros(size * len(bucket.group), dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.parameters)
        self._place = place
        for entry, offset in self._offsets():
            parameter = held[entry.name]
            view = self.parameters[offset : offset + parameter.numel()].view_as(parameter)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = self.gradients[offset : offset + parameter.numel()].view_as(parameter)
        self.chunk = nn.Parameter(self.parameters[place * size : (place + 1) * size])
        self.chunk.grad = self.gradients[place * size : (place + 1) * size]

    def _offsets(self) -> Iterator[tuple[HeldParameter, int]]:
        offset = 0
        for entry in self._bucket.parameters:
            yield entry, offset
            offset += entry.elements

    def parts(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Fragment, slice]]:
        """The parameters this rank's chunk reaches into: name, what of it, and where in the chunk that lies."""
        size = self._bucket.chunk_elements
        first, last = self._place * size, (self._place + 1) * size
        for entry, offset in self._offsets():
            start, stop = max(first, offset), min(last, offset + entry.elements)
            if start < stop:
                fragment = fragment_of(entry)._replace(start=start - offset, stop=stop - offset, shape=shapes[entry.name])
                yield entry.name, fragment, slice(start - first, stop - first)
