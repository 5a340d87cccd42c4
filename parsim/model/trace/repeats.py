"""Equal layers are traced once: of a long list of layers a few stay, and the Model gets the others as copies.

One forward of the whole module says which layers repeat: those that make the same calls, on tensors of the same kinds, with
weights of their own. Of their run two periods stay at its beginning, and what follows the last whole period at its end:

    layers 0 1 | 2 3 | [4 .. 9] | 10 11      the second period (2 3) stands for those left out

The first period may differ (it is the first to save what all layers read), and so may the end (a last norm joins it).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple, TypeVar

from torch import nn

from parsim.model.component import Component, Operator, OperatorShard, Value
from parsim.model.model import Model
from parsim.model.trace.count import program_key
from parsim.model.trace.cut import CallInterval, boundaries, programs
from parsim.model.trace.recorder import Recording

PartOfModel = TypeVar("PartOfModel", Component, Value)


class Stack(NamedTuple):
    """A list of layers that repeat.
    `path`: of the list. `start`: the first layer of the period that stands for others. `left_out`: layers behind that period
    that need no trace, whole periods of them. `reach`: layers between the one that makes a value and one that reads it, at
    most; what is made further away is made before the layers."""

    path: str
    start: int
    period: int
    left_out: int
    reach: int

    @property
    def end(self) -> int:
        """One past the layers that stand for others."""
        return self.start + self.period


FEWEST = 4
"""Layers of a list that is looked at."""


def stacks_of(recording: Recording, module: nn.Module) -> tuple[Stack, ...]:
    """The lists of layers that repeat in a forward without a loss.
    None in one that depends on data, hands something on to the next, or is not that of training."""
    handed_on = recording.kept_tensors or recording.buffer_writes or recording.changed_attributes
    if recording.decisions or recording.is_example or handed_on or not all(part.training for part in module.modules()):
        return ()
    stacks: list[Stack] = []
    for path, part in module.named_modules():
        is_list = isinstance(part, nn.ModuleList | nn.Sequential) and list(part._modules) == list(map(str, range(len(part))))
        inside = any(path.startswith(f"{stack.path}.") for stack in stacks)
        if path and is_list and not inside and len(part._modules) >= FEWEST:
            stack = _stack(recording, path, len(part._modules))
            stacks += [stack] if stack is not None else []
    return tuple(stacks)


def _stack(recording: Recording, path: str, count: int) -> Stack | None:
    starts = _starts(recording, path, count)
    if starts is None:
        return None
    edges = [0, *starts, len(recording.ops)]
    intervals = [CallInterval(str(place - 1), start, end) for place, (start, end) in enumerate(pairwise(edges))]
    boundaries(recording, intervals)
    layers = programs(recording, intervals)[1:]
    prints, reaches = [], []
    for number, program in enumerate(layers):
        makers = [name.partition(":")[::2] for name, _, _ in program.inputs]
        # what the first layer makes may be for all of them (relative positions)
        near = [maker.isdigit() and (maker != "0" or number == 1) for maker, _ in makers]
        origins = [
            (int(maker) - number if is_near else maker, place) for (maker, place), is_near in zip(makers, near, strict=True)
        ]
        reaches.append(max((-origin for origin, _ in origins if isinstance(origin, int)), default=0))
        prefix = f"{path}.{number}."
        state = tuple(
            key.name.removeprefix(prefix) if key.name.startswith(prefix) else f"/{key.name}" for key, _ in program.state
        )
        prints.append((program_key(program), tuple(origins), state))
    return _longest(path, prints, reaches)


def _starts(recording: Recording, path: str, count: int) -> list[int] | None:
    """The first op of every layer; None unless each is called once, in order, with ops of its own."""
    layer_of: list[int | None] = []
    starts: dict[int, int] = {}
    number_of = {f"{path}.{number}": number for number in range(count)}
    for call in recording.calls:
        around = None if call.parent is None else layer_of[call.parent]
        if call.number > 1 and call.module in number_of:
            return None
        layer_of.append(number_of.get(call.module, around))
    for place, op in enumerate(recording.ops):
        if op.call is not None and (layer := layer_of[op.call]) is not None:
            starts.setdefault(layer, place)
    return list(starts.values()) if list(starts) == list(range(count)) else None


def _longest(path: str, prints: Sequence[object], reaches: Sequence[int]) -> Stack | None:
    """The repetition that leaves out most layers; the last layer, which what is behind the list joins, is in none."""
    best: Stack | None = None
    count = len(prints) - 1
    for period in range(1, count // 3 + 1):
        first = 1
        for number in range(1, count - period + 1):
            if number + period < count and prints[number] == prints[number + period]:
                continue
            last, start = number + period, first + period
            reach = max(reaches[start:])
            left_out = (last - start - period - max(1, reach)) // period * period
            if reach <= period and left_out > (0 if best is None else best.left_out):
                best = Stack(path, start, period, left_out, reach)
            first = number + 1
    return best


@contextlib.contextmanager
def shortened(module: nn.Module, stacks: Sequence[Stack]) -> Iterator[None]:
    """Inside, the layers that need no trace are not in their lists; the others keep their names."""
    lists = [module.get_submodule(stack.path)._modules for stack in stacks]
    before = [dict(layers) for layers in lists]
    try:
        for stack, layers in zip(stacks, lists, strict=True):
            for number in range(stack.end, stack.end + stack.left_out):
                del layers[str(number)]
        yield
    finally:
        for layers, old in zip(lists, before, strict=True):
            layers.clear()
            layers.update(old)


def lengthened(model: Model, stacks: Sequence[Stack]) -> Model:
    """The Model of the whole module from that of the shortened one."""
    for stack in stacks:
        model = _with_copies(model, stack)
    return model


def _with_copies(model: Model, stack: Stack) -> Model:
    pattern = re.compile(rf"{re.escape(stack.path)}\.(\d+)(?=[.:#]|$)")

    def place(name: str) -> int | None:
        """The layer of a name, counted without those left out; None: it is of no layer."""
        named = pattern.match(name)
        number = None if named is None else int(named[1])
        return number if number is None or number < stack.end else number - stack.left_out

    def shifts(number: int | None) -> Sequence[int]:
        """By how many layers the copies of what lies in a layer are moved."""
        if number is None or number < stack.start:
            return (0,)
        return range(0, stack.left_out + 1, stack.period) if number < stack.end else (stack.left_out,)

    def names(name: str, owner: int | None, by: int) -> list[str]:
        """What a name in a layer is in a copy of it: the same moved, or all copies of what is beyond its reach."""
        number = place(name)
        if number is None:
            return [name]
        near = owner is not None and abs(number - owner) <= stack.reach
        return [pattern.sub(f"{stack.path}.{number + each}", name, count=1) for each in ((by,) if near else shifts(number))]

    def copies(items: Iterable[PartOfModel]) -> Iterator[tuple[PartOfModel, int | None, int]]:
        """Items in their new order: each with its layer, and by how many layers it is moved."""
        for numbers, run in groupby(((item, place(item.name)) for item in items), lambda pair: shifts(pair[1])):
            pairs = list(run)
            yield from ((item, owner, by) for by in numbers for item, owner in pairs)

    def renamed(item: PartOfModel, owner: int | None, by: int) -> PartOfModel:
        new: PartOfModel = _renamed(item, lambda name: names(name, owner, by)[-1])
        return new

    components = tuple(renamed(*copy) for copy in copies(model.components))
    order = {component.name: number for number, component in enumerate(components)}

    def in_order(savers: tuple[str, ...] | None, owner: int | None, by: int) -> tuple[str, ...] | None:
        return savers and tuple(sorted((one for name in savers for one in names(name, owner, by)), key=order.__getitem__))

    values = []
    for value, owner, by in copies(model.values):
        half = value.half and replace(value.half, savers=in_order(value.half.savers, owner, by))
        new = renamed(replace(value, savers=None, half=None), owner, by)
        values.append(replace(new, savers=in_order(value.savers, owner, by), half=half))
    outputs = tuple(names(name, None, 0)[-1] for name in model.outputs)
    return replace(model, components=components, values=tuple(values), outputs=outputs)


def _renamed(item: Any, name: Callable[[str], str]) -> Any:
    """A record with new names: every text in it but those of its operators."""
    if isinstance(item, str):
        return name(item)
    if isinstance(item, tuple):
        entries = [_renamed(entry, name) for entry in item]
        return type(item)(*entries) if hasattr(item, "_fields") else tuple(entries)
    if not is_dataclass(item) or isinstance(item, type | Operator | OperatorShard):
        return item
    changed = {each.name: value for each in fields(item) if (value := getattr(item, each.name))}
    renewed = {key: new for key, value in changed.items() if (new := _renamed(value, name)) is not value}
    return replace(item, **renewed)
