"""Values that wait for their readers, and gradients that wait for their makers, while another component of the rank runs.

A value that no backward needs lives until its last reader has run; one that a later component saves first, until that one
counts it. A value may have several readers, or be read long after it was made. Its gradient lies there from the backward of
its last reader to that of its maker. A gradient from another rank lies there from the beginning of the backward: it comes
from what was run last.

Leaves out: that gradients of two values may be one storage, as those of a residual sum's operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parsim.model.component import Component, Value


class Wait(NamedTuple):
    """Bytes that are there while the components of a rank from number `first` to number `last` run; none if that is less."""

    first: int
    last: int
    size_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """By component, bytes of one microbatch.

    Attributes:
        values: alive while it runs forward, which neither it makes nor the components before it save.
        gradients: alive while it runs backward, which are neither those of its outputs nor made by it.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, float] = field(default_factory=dict)


NOTHING_WAITS = Waiting()


def waiting_bytes(
    components: Sequence[Component],
    values: Mapping[str, Value],
    size_bytes: Callable[[Value], float],
    gradients: Mapping[str, Sequence[Wait]] | None = None,
    waits: Mapping[str, Sequence[Wait]] | None = None,
) -> Waiting:
    """What waits on a rank while each of its components runs.

    Args:
        components: of the rank, in execution order. values: of the model by name, as kept under the plan.
        size_bytes: of one microbatch of a value on this rank.
        gradients: by value those that wait here for its maker. None: one of all readers here, as large as the value.
        waits: by value where it waits here, for those that lie here in several layouts.
    """
    place = {component.name: number for number, component in enumerate(components)}
    readers: dict[str, list[int]] = {}
    for number, component in enumerate(components):
        for name in dict.fromkeys(component.inputs):
            readers.setdefault(name, []).append(number)
    forward, backward = [0.0] * len(components), [0.0] * len(components)
    for name, reads in readers.items():
        value = values[name]
        made = -1 if value.producer is None else place.get(value.producer, -1)
        if waits is None or name not in waits:
            _add(forward, Wait(made + 1, _counted_at(value, place, reads[-1]), size_bytes(value)))
        if gradients is None and value.differentiable and value.producer is not None:
            _add(backward, Wait((made if made >= 0 else reads[0]) + 1, reads[-1] - 1, size_bytes(value)))
    for into, known in ((forward, waits), (backward, gradients)):
        for own in (known or {}).values():
            for wait in own:
                _add(into, wait)
    names = [component.name for component in components]
    return Waiting(values=dict(zip(names, forward, strict=True)), gradients=dict(zip(names, backward, strict=True)))


def _add(sizes: list[float], wait: Wait) -> None:
    for number in range(wait.first, wait.last + 1):
        sizes[number] += wait.size_bytes


def _counted_at(value: Value, place: Mapping[str, int], last_read: int) -> int:
    """The last component in whose forward the value is in nothing that a component keeps yet; -1: nobody knows."""
    if value.savers is None:
        return -1
    return next((place[saver] for saver in value.savers if saver in place), last_read)
