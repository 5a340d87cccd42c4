"""One shard of a component, as a component: the form in which costs, memory and calibration use tensor shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from parsim.errors import ModelError
from parsim.model.component import MOST_PADDED, Component, Operator, OperatorShard, Sharding, Share
from parsim.units import divisors


@lru_cache(maxsize=65536)
def narrow(component: Component, rule: str, ways: int) -> Component:
    """The component that one of `ways` shards under `rule` runs; the component itself for rule "" or one way.

    Its operators, parameters and saved bytes are those of one shard, so its fingerprint tells it from the whole. Buffers are
    counted whole. Values keep the sizes they have outside. The memory is that of the component's precision: take that first
    (`parsim.model.formats.component_in`).

    Raises:
        ModelError: no such rule, or `ways` does not divide its limit.
    """
    if not rule or ways == 1:
        return component
    sharding = component.sharding(rule)
    check_ways(component.name, sharding, ways, component.shardings)
    divided = {part.name for part in sharding.parameters}
    cut = {part.number: part for part in sharding.operators}
    share = sharding.share(ways)
    selective = None
    if component.selective is not None and sharding.selective is not None:
        selective = replace(
            component.selective,
            kept=sharding.selective.kept.at(share),
            again=sharding.selective.again.at(share),
            first_peaks=tuple(size.at(share) for size in sharding.selective.first_peaks),
            second_peaks=tuple(size.at(share) for size in sharding.selective.second_peaks),
        )

    def left(whole: int, part: int) -> int:
        return whole - part + share.of(part)

    return replace(
        component,
        parameters=tuple(replace(p, elements=share.of(p.elements)) if p.name in divided else p for p in component.parameters),
        operators=tuple(
            _divided(operator, share, cut[number]) if number in cut else operator
            for number, operator in enumerate(component.operators)
        ),
        saved_activation_bytes=left(component.saved_activation_bytes, sharding.saved_activation_bytes),
        saved_fixed_bytes=left(component.saved_fixed_bytes, sharding.saved_fixed_bytes),
        cast_bytes=left(component.cast_bytes, sharding.cast_bytes),
        shardings=(),
        forward_peaks=tuple(size.at(share) for size in sharding.forward_peaks),
        backward_peaks=tuple(size.at(share) for size in sharding.backward_peaks),
        half=None,
        split_backward=None,  # not counted for shards
        selective=selective,
        inside=None
        if component.inside is None
        else replace(
            component.inside,
            context_bytes=share.of(component.inside.context_bytes),
            expert_bytes=share.of(component.inside.expert_bytes),
        ),
    )


_CUT = {
    "heads": "heads of queries, keys and values",
    "queries": "heads of queries",
    "column": "output features",
    "row": "input features",
    "vocabulary": "rows of the table",
    "channels_out": "output channels",
    "channels_in": "input channels",
    "follow": "features or channels",
}
"""What each part of a rule's name cuts."""


def check_ways(component: str, sharding: Sharding, ways: int, others: Iterable[Sharding] = ()) -> None:
    """Whether the component can be cut into that many shards.

    Args:
        component: its name. others: its shardings, of which the message names one that allows so many shards.

    Raises:
        ModelError: what is cut, the nearest ways that divide it, and the rules that allow these ways.
    """
    limit = sharding.limit
    if sharding.allows(ways):
        return
    cut = ", ".join(dict.fromkeys(_CUT.get(name, name) for name in sharding.rule.split("+")))
    possible = ways_of(sharding)
    below = max((number for number in possible if number < ways), default=None)
    above = min((number for number in possible if number > ways), default=None)
    nearest = " or ".join(str(number) for number in (below, above) if number is not None) or "none but 1"
    rules = [other.rule for other in others if other.allows(ways)]
    padded = f"or be at most {MOST_PADDED} and leave no shard empty " if sharding.size else ""
    instead = f"; rule {' or '.join(rules)} allows {ways}" if rules else ""
    raise ModelError(
        f"component {component} cannot be cut into {ways} shards by rule {sharding.rule}: {ways} must divide {limit} "
        f"{padded}(what its {cut} have in common); nearest: {nearest}{instead}"
    )


def ways_of(sharding: Sharding) -> list[int]:
    """All ways but one that it allows, ascending."""
    possible = {*divisors(sharding.limit), *range(2, min(sharding.size, MOST_PADDED) + 1)}
    return sorted(ways for ways in possible if ways > 1 and sharding.allows(ways))


def _divided(operator: Operator, share: Share, how: OperatorShard) -> Operator:
    shape = dict(operator.shape)
    shape[how.dim] = share.of(shape[how.dim])
    return replace(
        operator,
        shape=tuple(shape.items()),
        forward_flop=operator.forward_flop * share.own / share.whole,
        activation_bytes=operator.activation_bytes - how.activation_bytes + share.of(how.activation_bytes),
        parameter_bytes=share.of(operator.parameter_bytes),
    )
