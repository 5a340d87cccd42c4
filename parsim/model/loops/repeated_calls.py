"""A loop of Python in a recorded program: the same group of calls again and again, as a scan over tokens makes them.

Two calls, one group apart, correspond if they are the same call but for which tensors they read. Every tensor that they read is
the same one, or made by calls that correspond in this group or the one before. The number of a row may differ (`x[:, k]`):
where a view begins in its memory changes neither sizes nor what autograd keeps.

A program can be shortened to a few of its groups. The tensors that a `stack` or `cat` behind the loop takes from the others are
replaced by that of the last group which is left.

Not shortened: loops whose groups each read another tensor from outside (rows of an `unbind`, what another loop has made). Nor
those that read further back than the group before, or make what is used in any other way. With fewer groups others would get no
gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parsim.model.runnable import PLAIN, CallProgram, Nested, Op, Ref, renumber
from parsim.model.tracing.repeats.canonical import canonical, canonical_function

KEPT = (3, 5, 4)
"""Groups that shortened programs have: the first two say what the whole counts, the third has to agree."""

FEWEST = 16
"""Groups of a loop that is worth shortening: counting three shortened programs takes twelve."""

LENGTHS_TRIED = 8
_JOINS = (torch.stack, torch.cat, torch.concat)
_BY_NUMBER = (Tensor.__getitem__, torch.select, Tensor.select, torch.narrow, Tensor.narrow)
"""Calls that make a view, which begins where a number says."""


@dataclass(frozen=True, slots=True)
class Loop:
    """`times` groups of `length` calls, from the call `start` on."""

    start: int
    length: int
    times: int

    @property
    def end(self) -> int:
        """The first call behind it."""
        return self.start + self.length * self.times

    def group_of(self, call: int) -> int | None:
        """The group that a call belongs to."""
        return (call - self.start) // self.length if self.start <= call < self.end else None


@dataclass(frozen=True, slots=True)
class Shortened:
    """The same program with KEPT groups of its loop, which has `times`."""

    programs: tuple[CallProgram, ...]
    times: int


def shortened(program: CallProgram) -> Shortened | None:
    """The program with fewer groups of its longest loop; None if it has no loop that may be shortened."""
    if len(program.ops) < 2 * FEWEST:
        return None
    reading = _Reading(program)
    loop = reading.longest_loop()
    if loop is None or len(program.tensors) != program.slots:
        return None
    try:
        return Shortened(tuple(_with_groups(program, reading, loop, kept) for kept in KEPT), loop.times)
    except _Needed:
        return None


class _Reading:
    """Which call makes what, and what every call is apart from the tensors it reads."""

    def __init__(self, program: CallProgram) -> None:
        self.ops = program.ops
        self.maker: dict[int, tuple[int, int]] = {}
        """The call that makes what is in a slot, and the place among its outputs."""
        for number, op in enumerate(program.ops):
            for place, (_, slot) in enumerate(op.outputs):
                self.maker.setdefault(slot, (number, place))
        given = {slot for _, slot, _ in program.inputs} | {slot for _, slot in program.state}
        for slot in (*given, *(slot for _, slot in program.constants)):
            self.maker.pop(slot, None)
        numbers: dict[Hashable, int] = {}
        self._kinds = [numbers.setdefault(_kind(op, program), len(numbers)) for op in program.ops]
        self._read = [(*_slots_of(op), *self._written_by(number, op)) for number, op in enumerate(program.ops)]

    def _written_by(self, number: int, op: Op) -> Iterator[int]:
        """What a call returns although it was there before: it has changed it in place."""
        for place, (_, slot) in enumerate(op.outputs):
            if self.maker.get(slot) != (number, place):
                yield slot

    def longest_loop(self) -> Loop | None:
        """The one with the most calls; of equally long ones that with the shortest groups."""
        found = [loop for length in self._lengths() for loop in self._loops(length) if loop.times >= FEWEST]
        return max(found, key=lambda loop: (loop.length * loop.times, -loop.length), default=None)

    def _lengths(self) -> list[int]:
        """How far a call is from the next of its kind: most often so, of the kinds that are seldom."""
        last: dict[int, int] = {}
        distances: Counter[int] = Counter()
        for number, kind in enumerate(self._kinds):
            if kind in last:
                distances[number - last[kind]] += 1
            last[kind] = number
        return [length for length, _ in distances.most_common(LENGTHS_TRIED)]

    def _loops(self, length: int) -> Iterator[Loop]:
        """Runs of calls each of which corresponds to the call one group later, in the way of the call one group before."""
        pairs = len(self.ops) - length
        ways = [self._correspond(number, length) for number in range(pairs)]
        start = 0
        for number in range(pairs + 1):
            if number < pairs and ways[number] is not None:
                if number - length < start or ways[number] == ways[number - length]:
                    continue
                yield Loop(start, length, (number + length - start) // length)
                start = number - length + 1
                continue
            if number > start:
                yield Loop(start, length, (number + length - start) // length)
            start = number + 1

    def _correspond(self, number: int, length: int) -> tuple[bool, ...] | None:
        """Per tensor of a call whether the call one group later has the same; None if the calls do not correspond."""
        op, later = self.ops[number], self.ops[number + length]
        read, read_later = self._read[number], self._read[number + length]
        if self._kinds[number] != self._kinds[number + length] or len(read) != len(read_later):
            return None
        ways: list[bool] = []
        for one, other in zip(read, read_later, strict=True):
            if one != other and (self._later(one, length) != other or self.maker[one][0] <= number - 2 * length):
                return None
            ways.append(one == other)
        gone = {slot if (moved := self._later(slot, length)) is None else moved for slot in op.drop}
        return tuple(ways) if gone == set(later.drop) else None

    def _later(self, slot: int, length: int) -> int | None:
        """What the call one group later makes in the place of what is in a slot."""
        if slot not in self.maker:
            return None
        call, place = self.maker[slot]
        if call + length >= len(self.ops) or place >= len(self.ops[call + length].outputs):
            return None
        return self.ops[call + length].outputs[place][1]


def _kind(op: Op, program: CallProgram) -> Hashable:
    """All of a call but its tensors. Their kinds are those of the calls that made them."""

    def unnamed(slot: int) -> Hashable:
        return program.tensors[slot] if slot < len(program.tensors) else None

    arguments = op.arguments
    if op.function in _BY_NUMBER:
        arguments = (arguments[0], *map(_without_numbers, arguments[1:]))
    return (
        canonical_function(op.function),
        canonical(arguments, unnamed),
        canonical(op.keywords, unnamed),
        tuple((canonical(path), unnamed(slot)) for path, slot in op.outputs),
        op.context,
        len(op.drop),
    )


def _without_numbers(index: Any) -> Any:
    """An index with marks in the place of whole numbers; the kind of the view has its sizes."""
    if type(index) is int:
        return "a number"
    if type(index) in (Ref, Nested):
        return index
    if isinstance(index, tuple | list):
        return type(index)(map(_without_numbers, index))
    if isinstance(index, slice):
        return "slice", *map(_without_numbers, (index.start, index.stop, index.step))
    return index


def _slots_of(op: Op) -> Iterator[int]:
    """The slots that a call reads, in order."""
    for item in (*op.arguments, *(value for _, value in op.keywords)):
        yield from _refs(item)


def _refs(item: Any) -> Iterator[int]:
    if type(item) is Ref:
        yield item.slot
    elif type(item) is Nested:
        for inner in item.items:
            yield from _refs(inner)


class _Cut:
    """A program without the groups of a loop from `first` to `last`."""

    def __init__(self, reading: _Reading, loop: Loop, kept: int) -> None:
        self._reading = reading
        self._ops = reading.ops
        self.loop = loop
        self.first, self.last = kept - 1, loop.times - 2

    def removed(self, slot: int) -> int | None:
        """The group that makes what is in a slot, if that is left out."""
        made = self._reading.maker.get(slot)
        group = None if made is None else self.loop.group_of(made[0])
        return group if group is not None and self.first <= group <= self.last else None

    def earlier(self, slot: int, groups: int) -> int:
        """What the group so many before makes in the place of what is in a slot."""
        call, place = self._reading.maker[slot]
        return self._ops[call - groups * self.loop.length].outputs[place][1]

    def last_group(self) -> list[Op]:
        """Its calls, reading what the last group that is left makes. Raises _Needed where they read further back."""
        found = []
        for op in self._ops[self.loop.end - self.loop.length : self.loop.end]:
            renamed: dict[int, int] = {}
            for slot in (*_slots_of(op), *op.drop, *(slot for _, slot in op.outputs)):
                group = self.removed(slot)
                if group is not None and group != self.last:
                    raise _Needed
                renamed[slot] = slot if group is None else self.earlier(slot, self.last + 1 - self.first)
            found.append(
                replace(
                    op,
                    arguments=tuple(renumber(item, renamed) for item in op.arguments),
                    keywords=tuple((name, renumber(item, renamed)) for name, item in op.keywords),
                    outputs=tuple((path, renamed[slot]) for path, slot in op.outputs),
                    drop=tuple(renamed[slot] for slot in op.drop),
                )
            )
        return found

    def behind(self, op: Op, free: int) -> tuple[list[Op], list[int]]:
        """A call behind the loop, after calls that make what stands for what it reads of the groups left out.

        Args:
            free: the first slot that is not used.

        Returns:
            The calls, and the slots that are like those from `free` on.

        Raises:
            _Needed: it is no `stack` or `cat` of what every group makes.
        """
        drop = tuple(slot for slot in op.drop if self.removed(slot) is None)
        read = {slot: group for slot in _slots_of(op) if (group := self.removed(slot)) is not None}
        if not read:
            return [op if drop == op.drop else replace(op, drop=drop)], []
        joined = op.arguments[0] if op.arguments else None
        if op.function not in _JOINS or type(joined) is not Nested:
            raise _Needed
        places = {slot: self.earlier(slot, group + 1 - self.first) for slot, group in read.items()}
        models = list(dict.fromkeys(places.values()))
        items = [item.slot for item in joined.items if type(item) is Ref]
        if not set(models) <= set(items) or len(items) != len(set(items)) or not set(read) <= set(items):
            raise _Needed
        if len(read) != len(models) * (self.last + 1 - self.first):
            raise _Needed
        stand_in = {model: free + number for number, model in enumerate(models)}
        renamed = {slot: stand_in[model] for slot, model in places.items()}
        renamed = {slot: renamed.get(slot, slot) for slot in _slots_of(op)}
        made = [Op(Tensor.detach, (Ref(model),), (), (((), slot),), PLAIN, ()) for model, slot in stand_in.items()]
        arguments = tuple(renumber(item, renamed) for item in op.arguments)
        return [*made, replace(op, arguments=arguments, drop=(*drop, *stand_in.values()))], models


class _Needed(Exception):
    """Something else needs what the groups left out make."""


def _with_groups(program: CallProgram, reading: _Reading, loop: Loop, kept: int) -> CallProgram:
    """The program with the first groups of its loop and the last one. Raises _Needed if something needs the others."""
    cut = _Cut(reading, loop, kept)
    leaving = (*(slot for _, slot, _ in program.outputs), *(slot for _, slot in program.buffer_writes))
    if any(cut.removed(slot) is not None for slot in leaving):
        raise _Needed
    ops = [*program.ops[: loop.start + (kept - 1) * loop.length], *cut.last_group()]
    tensors = list(program.tensors)
    for op in program.ops[loop.end :]:
        calls, models = cut.behind(op, len(tensors))
        ops += calls
        tensors += [program.tensors[slot]._replace(differentiable=False) for slot in models]
    return replace(program, ops=tuple(ops), slots=len(tensors), tensors=tuple(tensors))
