"""ZeRO: the parameters of a bucket in one flat array, of which each rank of the group updates its part.

Gradients lie in a second flat array of the same order. Both are padded with zeros to equal parts. Every optimizer here works
element by element, so that updating a part of the flat array is updating that part of the parameters.

    stage 1    both arrays are always whole.
    stage 2    the gradients are whole from `begin_gradients` to `end_gradients` of a microbatch; this rank's part of their sum
               (`gradients`) stays.
    stage 3    the parameters are whole from `begin_parameters` to `end_parameters`; this rank's part of them stays. In
               between the flat array has no memory, while its views, and the tensors that autograd saved of them, stay
               valid.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stages 1 to 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parsim.execute.checkpoint.checkpoint import check_shape
from parsim.execute.checkpoint.fragments import Fragment, fragment_of, is_per_element
from parsim.program.buckets import Bucket, HeldParameter


class ChunkRun(NamedTuple):
    """Neighbours in a rank's part of a bucket that are updated alike: with weight decay, or `exempt` from it.

    `tensor` is a parameter of the optimizer: the elements `start` to `stop` of the chunk.
    """

    tensor: nn.Parameter
    exempt: bool
    start: int
    stop: int


class DividedBucket:
    """A bucket whose optimizer state, or frozen parameters, are spread over its group; this rank is `place` in it.

    Attributes:
        parameters: the flat padded array. chunk: this rank's part as a parameter; its `.grad` is its part of the gradients.
        stage: of ZeRO, for this bucket. group: of its parameters.
        gradients: what stays of the gradients between microbatches: the flat padded array, from stage 2 on this rank's part;
            nothing of frozen parameters.
        parts: the parameters the chunk reaches into, by name: what of each, and where in the chunk that lies.
        runs: what the optimizer steps: the chunk, or pieces of it where some of its parameters are `exempt` from weight decay.
    """

    def __init__(
        self,
        bucket: Bucket,
        held: Mapping[str, Tensor],
        place: int,
        *,
        stage: int,
        device: torch.device,
        exempt: frozenset[str] = frozenset(),
    ) -> None:
        """`held`: the parameters, on any device. They become views of the flat array on `device`."""
        first = held[bucket.parameters[0].name]
        size = bucket.chunk_elements
        self.bucket = bucket
        self.stage = stage
        self.group = bucket.first[0].group
        self._held = {entry.name: held[entry.name] for entry in bucket.parameters}
        self.parameters = torch.zeros(size * len(bucket.group), dtype=first.dtype, device=device)
        self.parts: dict[str, tuple[Fragment, slice]] = {}
        start, stop = place * size, (place + 1) * size
        for entry, offset in self._offsets():
            parameter = held[entry.name]
            view = self.parameters[offset : offset + parameter.numel()].view_as(parameter)
            view.copy_(parameter.data)
            parameter.data = view
            begin, end = max(start, offset), min(stop, offset + entry.elements)
            if begin < end:
                spread = fragment_of(entry)._replace(start=begin - offset, stop=end - offset, shape=tuple(parameter.shape))
                self.parts[entry.name] = spread, slice(begin - start, end - start)
        own = self.parameters[start:stop].clone() if stage >= 3 else self.parameters[start:stop]
        self.chunk = nn.Parameter(own, requires_grad=bucket.trainable)
        if not bucket.trainable:
            self.gradients = self.chunk.new_empty(0)
        elif stage >= 2:
            self.gradients = torch.zeros_like(self.chunk.data)
            self.chunk.grad = self.gradients
        else:
            self.gradients = torch.zeros_like(self.parameters)
            self._show(self.gradients)
            self.chunk.grad = self.gradients[start:stop]
        self.runs = self._cut(exempt) if bucket.trainable else ()
        self._whole: Tensor | None = None
        self._elements = len(self.parameters)
        if stage >= 3:
            self.end_parameters()

    def _offsets(self) -> Iterator[tuple[HeldParameter, int]]:
        offset = 0
        for entry in self.bucket.parameters:
            yield entry, offset
            offset += entry.elements

    def _cut(self, exempt: frozenset[str]) -> tuple[ChunkRun, ...]:
        """The chunk in as few pieces as weight decay needs; padding belongs to the last."""
        kinds = [(place.start, name in exempt) for name, (_, place) in self.parts.items()]
        begins = [entry for number, entry in enumerate(kinds) if not number or entry[1] != kinds[number - 1][1]]
        if len(begins) < 2:
            return (ChunkRun(self.chunk, bool(begins) and begins[0][1], 0, self.chunk.numel()),)
        ends = [start for start, _ in begins[1:]] + [self.chunk.numel()]
        runs = []
        for (start, without), stop in zip(begins, ends, strict=True):
            tensor = nn.Parameter(self.chunk.data[start:stop])
            assert self.chunk.grad is not None
            tensor.grad = self.chunk.grad[start:stop]
            runs.append(ChunkRun(tensor, without, start, stop))
        return tuple(runs)

    @property
    def summed(self) -> Tensor:
        """This rank's part of the gradients."""
        gradients = self.chunk.grad
        assert gradients is not None
        return gradients

    def run_of(self, name: str) -> int:
        """The number of the run in which this rank's part of a parameter lies."""
        first = self.parts[name][1].start
        return next(number for number, run in enumerate(self.runs) if run.start <= first < run.stop)

    def _in_run(self, name: str) -> tuple[ChunkRun, slice]:
        run, place = self.runs[self.run_of(name)], self.parts[name][1]
        return run, slice(place.start - run.start, place.stop - run.start)

    def _show(self, gradients: Tensor) -> None:
        """Make views of a flat array the gradients of the parameters."""
        for entry, offset in self._offsets():
            parameter = self._held[entry.name]
            parameter.grad = gradients[offset : offset + parameter.numel()].view_as(parameter)

    def begin_gradients(self) -> None:
        """Room for the gradients of a microbatch, unless there is some."""
        if self._whole is None:
            self._whole = torch.zeros(self._elements, dtype=self.chunk.dtype, device=self.chunk.device)
            self._show(self._whole)

    def end_gradients(self) -> Tensor:
        """The flat gradients of a microbatch, which are forgotten here."""
        whole, self._whole = self._whole, None
        assert whole is not None, "a backward has begun these gradients"
        for parameter in self._held.values():
            parameter.grad = None
        return whole

    def begin_parameters(self) -> Tensor:
        """Room for all parameters: the flat array, for the parts of all ranks."""
        self.parameters.untyped_storage().resize_(self._elements * self.chunk.element_size())
        return self.parameters

    def end_parameters(self) -> None:
        """Let go of all but this rank's part."""
        self.parameters.untyped_storage().resize_(0)

    def load_weight(self, name: str, weight: Tensor) -> None:
        """Take this rank's part of one whole parameter, or of its piece, if it is cut (stage 3). Raises as `check_shape`."""
        check_shape(name, weight, self._held[name])
        if name in self.parts:
            fragment, place = self.parts[name]
            self.chunk.data[place] = weight.reshape(-1)[fragment.start : fragment.stop].to(self.chunk.data)

    def state_of(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """What the state of a parameter's run says of it: views into its arrays, and its step counter."""
        place = self._in_run(name)[1]
        return {key: value[place] if is_per_element(value, key) else value for key, value in state.items()}

    def add_state(self, run_state: MutableMapping[str, Any], name: str, state: Mapping[str, Any]) -> None:
        """Put this rank's part of the state of one whole parameter (of its piece, if it is cut) into that of its run."""
        fragment = self.parts[name][0]
        run, place = self._in_run(name)
        for key, value in state.items():
            if is_per_element(value, key):
                flat = run_state.setdefault(key, torch.zeros_like(run.tensor.data, dtype=value.dtype))
                flat[place] = value.reshape(-1)[fragment.start : fragment.stop].to(flat)
            else:
                run_state.setdefault(key, value)
