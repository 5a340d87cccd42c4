"""The values of tensors of a recording, where they can be known although the recording runs on fake tensors.

A value is known if it was made of constants alone (masks, positions). Two more leaves can be taken:

    routing   which experts a router chooses: the indices of a topk, argmax or sort of activations are taken as balanced, so
              that every expert gets as many tokens as any other. The answer says so.
    example   inputs and weights are those of an example batch (`control_flow="example"`), and so every value is known.

A value is computed when somebody asks for it, by running the recorded calls that led to it for real. Random numbers are never
known, except in an example. But no number of `torch.rand` is below 0, nor as large as 1, and a comparison may need no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from parsim.model.runnable import Nested, Ref

if TYPE_CHECKING:
    from parsim.model.tracing.recorder import RecordedOp, Recording

RANDOM = ("rand", "normal", "bernoulli", "multinomial", "dropout", "uniform", "exponential", "cauchy", "geometric", "rrelu")
UNSET = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_ROUTERS = {"topk": -1, "sort": -1, "argsort": -1, "max": None, "argmax": None}
"""Functions that choose along a dim, with the dim where none is given (None: all of the tensor, which is not a choice)."""


_CERTAIN = {"lt": (0.0, 1.0), "ge": (0.0, 1.0), "le": (-math.ulp(0.0), 1.0), "gt": (-math.ulp(0.0), 1.0)}
"""Comparisons of a number of [0, 1) with a bound: at most the first, or at least the second, and the answer is always one."""


class UnknownValueError(Exception):
    """A value depends on the data of inputs, on weights or on random numbers."""


@dataclass(frozen=True, slots=True)
class Routing:
    """A choice taken as balanced: `chosen` of `experts` for each of `positions` tokens, by the call `op`."""

    op: int
    experts: int
    chosen: int
    positions: int

    def divisor(self, samples: int) -> int:
        """The batches at which every expert gets equally many tokens are multiples of this."""
        tokens = self.positions // samples if self.positions % samples == 0 else 0
        if tokens * self.chosen >= self.experts:
            return 1
        return self.experts // math.gcd(self.experts, max(1, tokens * self.chosen))


class KnownValues:
    """Values of one recording, computed on demand.

    Attributes:
        samples: the batch of the recording. routings: the choices taken as balanced so far.
    """

    def __init__(self, recording: Recording, *, skew: bool = False) -> None:
        """`skew`: take choices that are not balanced, to find out what depends on them."""
        self._recording = recording
        self._skew = skew
        self._example: Mapping[int, Tensor] | None = None
        self.samples = 1
        self.routings: dict[int, Routing] = {}
        self._values: dict[int, Tensor] = {}
        self._done: set[int] = set()
        self._storages: dict[int, int] = {}
        self._producer: dict[int, int] = {}
        self._changed: dict[int, list[int]] = {}
        self._indexed = 0

    def follow(self, example: Mapping[int, Tensor]) -> None:
        """From now on inputs, parameters and buffers have the values of an example, by value number."""
        self._example = example
        self._recording.is_example = True

    def value_of(self, number: int) -> tuple[Tensor, bool]:
        """The value now of a tensor of the recording, and whether it rests on more than constants.

        Raises UnknownValueError.
        """
        self._index()
        needed = self._needed(number)
        assumed = self._example is not None or any(place in self.routings for place in needed)
        last = max(self._done, default=-1)
        fresh = sorted(needed - self._done)
        if fresh and fresh[0] < last:  # something later has run: a storage may have changed since
            self._values, self._done, fresh = {}, set(), sorted(needed)
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for place in fresh:
                self._run(place)
            return (self._leaf(number) if number not in self._values else self._values[number]), assumed

    def _index(self) -> None:
        from parsim.model.tracing.recorder import storage_key

        ops = self._recording.ops
        for place in range(self._indexed, len(ops)):
            for _, number in ops[place].outputs:
                if number not in ops[place].reads:  # else it is changed in place
                    self._producer.setdefault(number, place)
            for number in ops[place].mutated:
                self._changed.setdefault(storage_key(self._recording.tensors[number]), []).append(place)
        self._indexed = len(ops)

    def _needed(self, number: int) -> set[int]:
        """Numbers of the calls that led to a value."""
        from parsim.model.tracing.recorder import storage_key

        found: set[int] = set()
        drawn: set[int] = set()  # numbers of which only comparisons are needed that always have one answer
        seen = {number}
        waiting = [number]
        while waiting:
            entry = waiting.pop()
            places = [self._producer[entry]] if entry in self._producer else []
            if not places:
                self._check_leaf(entry)
            places += self._changed.get(storage_key(self._recording.tensors[entry]), ())
            for place in places:
                if place in self.routings and self._recording.tensors[entry].is_floating_point():
                    raise UnknownValueError("it depends on the scores of a choice")
                if place in found and place not in drawn:
                    continue
                found.add(place)
                op = self._recording.ops[place]
                if self._is_choice(place, op, entry):
                    continue
                if self._example is None and _is_random(op):
                    raise UnknownValueError(f"{_name(op)} draws random numbers")
                if (draw := self._draw_of(op)) is not None:
                    found.add(draw)
                    drawn.add(draw)
                    continue
                fresh = [read for read in op.reads if read not in seen]
                seen.update(fresh)
                waiting += fresh
        return found

    def _draw_of(self, op: RecordedOp) -> int | None:
        """The call of `torch.rand` whose numbers a comparison is about that always has one answer; None for another call."""
        comparison = _name(op).strip("_")
        if self._example is not None or comparison not in _CERTAIN or len(op.arguments) != 2:
            return None
        numbers, bound = op.arguments
        least, most = _CERTAIN[comparison]
        if type(numbers) is not Ref or not isinstance(bound, int | float) or least < bound < most:
            return None
        from parsim.model.tracing.recorder import storage_key

        place = self._producer.get(numbers.slot)
        storage = storage_key(self._recording.tensors[numbers.slot])
        is_draw = place is not None and _name(self._recording.ops[place]) == "rand" and storage not in self._changed
        return place if is_draw else None

    def _check_leaf(self, number: int) -> None:
        if number in self._recording.constants or (self._example is not None and number in self._example):
            return
        key = self._recording.state.get(number)
        raise UnknownValueError(f"it depends on {key.name}" if key is not None else "it depends on an input")

    def _leaf(self, number: int) -> Tensor:
        known = self._recording.constants.get(number)
        if known is None:
            assert self._example is not None
            known = self._example[number]
        self._values[number] = known.detach().clone()
        return self._values[number]

    def _is_choice(self, place: int, op: RecordedOp, wanted: int) -> bool:
        """Whether the call chooses among experts, and its indices are what is wanted."""
        if self._example is not None:
            return False
        if place in self.routings:
            return True
        routing = self._routing(place, op, wanted)
        if routing is None:
            return False
        self.routings[place] = routing
        return True

    def _routing(self, place: int, op: RecordedOp, wanted: int) -> Routing | None:
        name = _name(op)
        if name not in _ROUTERS or not op.arguments or type(op.arguments[0]) is not Ref:
            return None
        scores, indices = self._recording.tensors[op.arguments[0].slot], self._recording.tensors[wanted]
        if not scores.is_floating_point() or indices.is_floating_point() or scores.dim() < 1:
            return None
        keywords = dict(op.keywords)
        positional = op.arguments[1 + (name == "topk") :]
        dim = keywords.get("dim", positional[0] if positional else _ROUTERS[name])
        if not isinstance(dim, int) or isinstance(dim, bool):
            return None
        experts = scores.shape[dim]
        positions = scores.numel() // max(1, experts)
        if positions < 2 or experts < 2:
            return None
        return Routing(place, experts, max(1, indices.numel() // positions), positions)

    def _run(self, place: int) -> None:
        op = self._recording.ops[place]
        if place in self.routings:
            self._choose(op, self.routings[place])
        else:
            result = op.function(*[self._fill(item) for item in op.arguments], **{k: self._fill(v) for k, v in op.keywords})
            for path, number in op.outputs:
                value = result
                for step in path:
                    value = value[step]
                self._values[number] = value
        self._done.add(place)

    def _choose(self, op: RecordedOp, routing: Routing) -> None:
        """Put balanced indices where the call puts its own; what else it makes stays unknown."""
        scores = self._recording.tensors[op.arguments[0].slot]
        for _, number in op.outputs:
            indices = self._recording.tensors[number]
            if not indices.is_floating_point():
                dim = _chosen_dim(op, scores)
                found = balanced_choice(routing, self.samples, skew=self._skew)
                shape = [size for place, size in enumerate(scores.shape) if place != dim]
                found = found.reshape(*shape, routing.chosen).movedim(-1, dim)
                self._values[number] = found.reshape(indices.shape).to(indices.dtype)

    def _fill(self, template: Any) -> Any:
        if type(template) is Ref:
            return self._values[template.slot] if template.slot in self._values else self._leaf(template.slot)
        if type(template) is Nested:
            return template.rebuild([self._fill(item) for item in template.items])
        return template


def balanced_choice(routing: Routing, samples: int, *, skew: bool = False) -> Tensor:
    """Which experts every token goes to: [positions, chosen], each expert as often as any other.

    Where a sample has a token for every expert the pattern repeats with the samples, so that all numbers are linear in the
    batch. Else it runs on from one sample to the next.

    Args:
        routing: how many tokens and experts. samples: of the batch. skew: the first half of the tokens takes the first experts.
    """
    token = torch.arange(routing.positions)
    if routing.positions % samples == 0 and routing.divisor(samples) == 1:
        token = token % (routing.positions // samples)
    step = routing.chosen if routing.chosen < routing.experts else 1
    first = token * step
    if skew:
        first = torch.where(torch.arange(routing.positions) < routing.positions // 2, 0, first)
    return (first[:, None] + torch.arange(routing.chosen)) % routing.experts


def _chosen_dim(op: RecordedOp, scores: Tensor) -> int:
    name = _name(op)
    positional = op.arguments[1 + (name == "topk") :]
    dim = dict(op.keywords).get("dim", positional[0] if positional else _ROUTERS[name])
    assert isinstance(dim, int), "a routing was found with its dim"
    return dim % scores.dim()


def _name(op: RecordedOp) -> str:
    return str(getattr(op.function, "__name__", ""))


def _is_random(op: RecordedOp) -> bool:
    name = _name(op)
    return name in UNSET or any(word in name for word in RANDOM)
