"""One shard of a component, as a component: the form in which costs, memory and calibration use tensor shards."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from parsim.errors import ModelError
from parsim.model.component import Component, Operator, OperatorShard, Parameter, Sharding


@lru_cache(maxsize=65536)
def narrow(component: Component, rule: str, ways: int) -> Component:
    """The component that one of `ways` shards under `rule` runs; the component itself for rule "" or one way.

    Its operators, parameters and saved bytes are those of one shard, so its fingerprint tells it from the whole. Buffers are
    counted whole. Values keep the sizes they have outside.

    Raises:
        ModelError: no such rule, or `ways` does not divide its limit.
    """
    if not rule or ways == 1:
        return component
    sharding = component.sharding(rule)
    check_ways(component.name, sharding, ways)
    divided = {part.name for part in sharding.parameters}
    cut = {part.number: part for part in sharding.operators}
    saved = component.saved_activation_bytes - sharding.saved_activation_bytes
    fixed = component.saved_fixed_bytes - sharding.saved_fixed_bytes
    shard = replace(
        component,
        parameters=tuple(_part(p, ways) if p.name in divided else p for p in component.parameters),
        operators=tuple(
            _divided(operator, ways, cut[number]) if number in cut else operator
            for number, operator in enumerate(component.operators)
        ),
        saved_activation_bytes=saved + sharding.saved_activation_bytes // ways,
        saved_fixed_bytes=fixed + sharding.saved_fixed_bytes // ways,
        shardings=(),
    )
    half = component.half
    if half is not None:
        elements = sum(parameter.elements for parameter in component.parameters)
        own = sum(parameter.elements for parameter in shard.parameters)
        half = replace(half, cast_bytes=half.cast_bytes * own // elements if elements else 0)
    return replace(
        shard,
        forward_peaks=tuple(peak.at(ways) for peak in sharding.forward_peaks),
        backward_peaks=tuple(peak.at(ways) for peak in sharding.backward_peaks),
        half=half,
    )


def check_ways(component: str, sharding: Sharding, ways: int) -> None:
    """Raise ModelError unless the component can be cut into that many shards."""
    if ways < 1 or sharding.limit % ways:
        raise ModelError(
            f"component {component} cannot be cut into {ways} shards by rule {sharding.rule}: "
            f"{ways} must divide {sharding.limit}"
        )


def _part(parameter: Parameter, ways: int) -> Parameter:
    return replace(parameter, elements=parameter.elements // ways)


def _divided(operator: Operator, ways: int, how: OperatorShard) -> Operator:
    shape = dict(operator.shape)
    shape[how.dim] //= ways
    return replace(
        operator,
        shape=tuple(shape.items()),
        forward_flop=operator.forward_flop / ways,
        activation_bytes=operator.activation_bytes - how.activation_bytes + how.activation_bytes // ways,
        parameter_bytes=operator.parameter_bytes // ways,
    )
