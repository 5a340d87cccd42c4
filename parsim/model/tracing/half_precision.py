"""Saved activations of components under autocast to half precision, recorded on fake tensors.

Autocast keeps the weights in fp32 and casts them where an operator runs in half precision; the casts that its backward needs
stay until then. Which operators do so is PyTorch's list for the CPU: matmul, convolution and attention in half precision, and
what follows in the type it is given. Leaves out: CUDA's own list, which takes normalisations, softmax and losses in fp32, so
that what these save there is up to twice as large.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from parsim.model.component import Component, HalfComponent, HalfSharding, HalfValue, Selective, Sharding, Value
from parsim.model.model import Model
from parsim.model.tracing.cut import value_names
from parsim.model.tracing.measure import Counted, TracedForward, nbytes, split
from parsim.model.tracing.recorder import storage_key

HALF = torch.bfloat16
"""As large as float16, and the type the CPU's autocast casts to."""


def with_half_precision(model: Model, small: TracedForward, large: TracedForward) -> Model:
    """The model with what two forwards under autocast, at different batches, say of its components and values.

    Raises TraceError if a size is not linear in the batch.
    """
    peaks = Counted(small, large)
    return replace(
        model,
        components=tuple(_component(entry, small, large, place, peaks) for place, entry in enumerate(model.components)),
        values=_values(model.values, small, large),
    )


def _component(component: Component, small: TracedForward, large: TracedForward, place: int, peaks: Counted) -> Component:
    name = small.intervals[place].name
    batches = (small.batch, large.batch)
    rounded = bool(small.recording.decisions) or any(component.pair_bytes)
    rate, fixed = split(small.saved_bytes(place), large.saved_bytes(place), batches, f"what {name} saves", rounded=rounded)
    forward, backward, split_backward = peaks.of_component(component, place)
    half = HalfComponent(
        saved_activation_bytes=rate,
        saved_fixed_bytes=fixed,
        cast_bytes=small.saved_bytes(place, casts=True),
        forward_peaks=forward,
        backward_peaks=backward,
        selective=_selective(component, small, place, peaks),
        split_backward=split_backward,
    )
    shardings = tuple(_sharding(entry, component, half, place, peaks) for entry in component.shardings)
    return replace(component, half=half, shardings=shardings)


def _selective(component: Component, small: TracedForward, place: int, peaks: Counted) -> Selective | None:
    """As under autocast, if it keeps less without; the casts of weights that it makes again are `cast_bytes` already."""
    if component.selective is None:
        return None
    found = peaks.selective(component, place, None, {})
    if found is None:
        return None
    rate, fixed = found.again
    casts = small.saved_bytes(place, casts=True)
    return replace(found, again=(rate, fixed - casts), operators=component.selective.operators)


def _sharding(sharding: Sharding, component: Component, half: HalfComponent, place: int, peaks: Counted) -> Sharding:
    forward, backward = peaks.of_shards(component, place, sharding)
    selective = sharding.selective and peaks.shard_selective(component, place, sharding)
    found = HalfSharding(
        forward_peaks=forward,
        backward_peaks=backward,
        selective=selective,
        divided=peaks.half_divided(component, half, place, sharding),
    )
    return replace(sharding, half=found)


def _values(values: tuple[Value, ...], small: TracedForward, large: TracedForward) -> tuple[Value, ...]:
    numbers, others = (
        {name: number for number, name in value_names(run.recording, run.intervals).items()} for run in (small, large)
    )
    found = []
    for value in values:
        one = small.recording.tensors[numbers[value.name]]
        other = large.recording.tensors[others[value.name]]
        rate, fixed = split(nbytes(one), nbytes(other), (small.batch, large.batch), f"value {value.name}")
        key = storage_key(one)
        half = HalfValue(bytes_per_sample=rate, fixed_bytes=fixed, saved=small.counts(key), savers=small.savers.get(key, ()))
        found.append(replace(value, half=half))
    return tuple(found)
