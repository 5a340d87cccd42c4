"""Components and values as they are under a precision: in fp32 as recorded, under autocast as recorded there.

For memory alone: work is priced by the precision of the measurement or the fit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from parsim.errors import CostError
from parsim.model.component import Component, HalfComponent, HalfSharding, HalfValue, Sharding, ShardPeak, Value
from parsim.model.model import Model
from parsim.model.number_formats import number_format

HALF_BYTES_PER_ELEMENT = 2


@lru_cache(maxsize=65536)
def component_in(component: Component, precision: str) -> Component:
    """What it keeps under `precision`; its work is untouched. What a sharding divides of it shrinks in proportion.

    Of a Model that was not recorded under autocast, half of everything is assumed, and a cast of every weight.
    """
    if not is_half(precision):
        return component
    half = component.half or _assumed_component(component)
    return replace(
        component,
        saved_activation_bytes=half.saved_activation_bytes,
        saved_fixed_bytes=half.saved_fixed_bytes,
        forward_peaks=half.forward_peaks,
        backward_peaks=half.backward_peaks,
        shardings=tuple(_sharding(entry, component, half) for entry in component.shardings),
        half=half,
    )


def value_in(value: Value, precision: str) -> Value:
    """Its size and its keepers under `precision`."""
    if not is_half(precision):
        return value
    half = value.half or _assumed_value(value)
    return replace(
        value,
        bytes_per_sample=half.bytes_per_sample,
        storage_bytes_per_sample=value.storage_bytes_per_sample * half.bytes_per_sample // max(1, value.bytes_per_sample),
        fixed_bytes=half.fixed_bytes,
        saved=half.saved,
        savers=half.savers,
        half=half,
    )


def cast_bytes(component: Component, precision: str) -> int:
    """Half-precision copies of the weights that a component (or a shard of it) keeps for its backward; 0 in fp32."""
    if not is_half(precision):
        return 0
    if component.half is None:
        return _assumed_component(component).cast_bytes
    return component.half.cast_bytes


def is_half(precision: str) -> bool:
    """Whether it means autocast to a half-precision type. (A Model for bf16 is recorded in bf16.)"""
    return bool(number_format(precision).autocast)


def check_recorded(model: Model, precision: str) -> None:
    """Raise CostError unless the Model's parameters are as wide as the precision stores them."""
    wanted = number_format(precision).weight_bytes
    for parameter in model.parameters if wanted == HALF_BYTES_PER_ELEMENT else ():
        if parameter.element_bytes != wanted:
            raise CostError(
                f"precision {precision!r} stores weights in {wanted} bytes, and {model.name} was recorded with "
                f"{parameter.element_bytes} bytes each ({parameter.name}); name the module, not a saved Model, or set "
                'precision = "amp_bf16"'
            )


def _sharding(sharding: Sharding, whole: Component, half: HalfComponent) -> Sharding:
    def scaled(part: int, of: int, now: int) -> int:
        return part * now // of if of else 0

    seen = sharding.half or _assumed_sharding(sharding)
    return replace(
        sharding,
        saved_activation_bytes=scaled(
            sharding.saved_activation_bytes, whole.saved_activation_bytes, half.saved_activation_bytes
        ),
        saved_fixed_bytes=scaled(sharding.saved_fixed_bytes, whole.saved_fixed_bytes, half.saved_fixed_bytes),
        forward_peaks=seen.forward_peaks,
        backward_peaks=seen.backward_peaks,
        half=seen,
    )


def _assumed_sharding(sharding: Sharding) -> HalfSharding:
    def halved(peaks: tuple[ShardPeak, ...]) -> tuple[ShardPeak, ...]:
        return tuple(
            peak._replace(
                bytes_per_sample=peak.bytes_per_sample // 2, divided_bytes_per_sample=peak.divided_bytes_per_sample // 2
            )
            for peak in peaks
        )

    return HalfSharding(forward_peaks=halved(sharding.forward_peaks), backward_peaks=halved(sharding.backward_peaks))


def _assumed_component(component: Component) -> HalfComponent:
    def halved(peaks: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((rate // 2, fixed) for rate, fixed in peaks)

    return HalfComponent(
        saved_activation_bytes=component.saved_activation_bytes // 2,
        saved_fixed_bytes=component.saved_fixed_bytes // 2,
        cast_bytes=HALF_BYTES_PER_ELEMENT * sum(parameter.elements for parameter in component.parameters),
        forward_peaks=halved(component.forward_peaks),
        backward_peaks=halved(component.backward_peaks),
    )


def _assumed_value(value: Value) -> HalfValue:
    scale = 2 if value.differentiable else 1
    return HalfValue(
        bytes_per_sample=value.bytes_per_sample // scale,
        fixed_bytes=value.fixed_bytes // scale,
        saved=value.saved,
        savers=value.savers,
    )
