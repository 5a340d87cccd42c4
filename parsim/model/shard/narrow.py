"""One shard of a component, as a component: the form in which costs, memory and calibration use tensor shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from parsim.errors import ModelError
from parsim.model.component import MOST_PADDED, Component, DividedSize, Operator, OperatorShard, Sharding, Size
from parsim.units import divisors


@lru_cache(maxsize=65536)
def narrow(component: Component, rule: str, ways: int) -> Component:
    """The component that one of `ways` shards under `rule` runs; the component itself for rule "" or one way.

    Its operators, parameters and saved bytes are those of one shard, so its fingerprint tells it from the whole. Buffers are
    counted whole. Values keep the sizes they have outside. The memory is that of the component's precision: take that first
    (`parsim.model.formats.component_in`). Raises ModelError: no such rule, or `ways` does not divide its limit.
    """
    if not rule or ways == 1:
        return component
    sharding = component.sharding(rule)
    check_ways(component.name, sharding, ways, component.shardings)
    cut_parameters = {part.name for part in sharding.parameters}
    cuts = {part.number: part for part in sharding.operators}
    share = sharding.share(ways)

    def left(whole: int, divided: int) -> int:
        return whole - divided + share.of(divided)

    def peaks(sizes: tuple[DividedSize, ...]) -> tuple[Size, ...]:
        return tuple(size.at(share) for size in sizes)

    def operator_of_shard(operator: Operator, cut: OperatorShard) -> Operator:
        return replace(
            operator,
            shape=tuple((dim, share.of(size) if dim == cut.dim else size) for dim, size in operator.shape),
            forward_flop=operator.forward_flop * share.own / share.whole,
            activation_bytes=left(operator.activation_bytes, cut.activation_bytes),
            parameter_bytes=share.of(operator.parameter_bytes),
        )

    selective, inside = None, component.inside
    if component.selective is not None and sharding.selective is not None:
        selective = replace(
            component.selective,
            kept=sharding.selective.kept.at(share),
            again=sharding.selective.again.at(share),
            first_peaks=peaks(sharding.selective.first_peaks),
            second_peaks=peaks(sharding.selective.second_peaks),
        )
    if inside is not None:
        inside = replace(inside, context_bytes=share.of(inside.context_bytes), expert_bytes=share.of(inside.expert_bytes))
    return replace(
        component,
        parameters=tuple(
            replace(parameter, elements=share.of(parameter.elements)) if parameter.name in cut_parameters else parameter
            for parameter in component.parameters
        ),
        operators=tuple(
            operator_of_shard(operator, cuts[number]) if number in cuts else operator
            for number, operator in enumerate(component.operators)
        ),
        saved_activation_bytes=left(component.saved_activation_bytes, sharding.saved_activation_bytes),
        saved_fixed_bytes=left(component.saved_fixed_bytes, sharding.saved_fixed_bytes),
        cast_bytes=left(component.cast_bytes, sharding.cast_bytes),
        shardings=(),
        forward_peaks=peaks(sharding.forward_peaks),
        backward_peaks=peaks(sharding.backward_peaks),
        half=None,
        split_backward=None,  # not counted for shards
        selective=selective,
        inside=inside,
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
    """Whether a component, which has a name, can be cut into that many shards. `others`: its shardings, for the message.

    Raises:
        ModelError: what is cut, the nearest ways that divide it, and the rules that allow these ways.
    """
    if sharding.allows(ways):
        return
    cut = ", ".join(dict.fromkeys(_CUT.get(name, name) for name in sharding.rule.split("+")))
    possible = ways_of(sharding)
    nearest = [*[number for number in possible if number < ways][-1:], *[number for number in possible if number > ways][:1]]
    rules = [other.rule for other in others if other.allows(ways)]
    padded = f"or be at most {MOST_PADDED} and leave no shard empty " if sharding.size else ""
    instead = f"; rule {' or '.join(rules)} allows {ways}" if rules else ""
    raise ModelError(
        f"component {component} cannot be cut into {ways} shards by rule {sharding.rule}: {ways} must divide {sharding.limit} "
        f"{padded}(what its {cut} have in common); nearest: {' or '.join(map(str, nearest)) or 'none but 1'}{instead}"
    )


def ways_of(sharding: Sharding) -> list[int]:
    """All ways but one that it allows, ascending."""
    possible = {*divisors(sharding.limit), *range(2, min(sharding.size, MOST_PADDED) + 1)}
    return sorted(ways for ways in possible if ways > 1 and sharding.allows(ways))
