"""Peak memory of one rank, line by line, from the Model alone (no torch, no Plan).

The model counts the peak of a synchronous training step. It is one of three moments: the end of the last forward in
flight, the worst moment of the backward that follows, or the optimizer step. Gradients are views into flat buckets, so
they are counted once. A value between components lives as long as autograd keeps it for a backward. If the Model does not
name who keeps it, a value that crosses to another rank, or is among no saved activations, counts as kept: an upper bound.

A recomputed component holds its inputs while a microbatch is in flight. The activations of its second forward live only
until the end of its backward.

The line `allocator`, an interval, holds the memory of the allocator and of libraries. A rank fits if it does with every line
at its median, or at the probability that is asked for (`verdict`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

from parsim.costs.memory.chunks import Chunks, ComponentMoments, HeldMoment, Moment, fullest
from parsim.costs.memory.records import ALONE, Again, Boundary, RankMemory, RankStep, Traffic, Weights
from parsim.costs.memory.waiting import Wait, waiting_bytes
from parsim.errors import CostError
from parsim.hardware.device import DeviceType
from parsim.model.component import Component, Parameter, Value
from parsim.model.number_formats import number_format
from parsim.model.optimizers import OPTIMIZERS, update_steps
from parsim.model.precision import cast_bytes
from parsim.units import MIB
from parsim.work import Phase

FULL_BYTES = 4


def optimizer_bytes(optimizer: str, precision: str, *, master_weights: bool, ema: bool = False) -> tuple[int, int]:
    """Bytes per parameter of the optimizer: those that stay, and those an update takes for a while.

    With weights in half precision the state is as wide as the weights, or as wide as fp32 with master weights. Master weights
    add a copy of the weights that stays and one of the gradients during the update.

    Args:
        optimizer: a key of `OPTIMIZERS`. precision: such as "bf16". master_weights: keep fp32 copies of half-precision
            weights. ema: keep a moving average of what the optimizer updates.

    Raises:
        ConfigError: an unknown optimizer.
    """
    row = OPTIMIZERS[optimizer]
    state = row.state_bytes_per_element + (FULL_BYTES if ema else 0)
    temporary = row.temporary_bytes_per_element
    width = number_format(precision).weight_bytes
    if width >= FULL_BYTES:
        return state, temporary
    if master_weights:
        return state + FULL_BYTES, temporary + FULL_BYTES
    return state * width // FULL_BYTES, temporary * width // FULL_BYTES


NCCL_COMMUNICATOR_BYTES = 256 * MIB
"""Assumed per communicator: about a dozen channels, each with send and receive buffers of 4 MiB (the default
NCCL_BUFFSIZE) for one protocol. The low-latency protocols and scratch are taken to need as much again; rounded up."""


def rank_memory(
    rank: int,
    step: RankStep,
    device: DeviceType,
    *,
    optimizer: str,
    precision: str,
    master_weights: bool = True,
    ema: bool = False,
    traffic: Traffic = ALONE,
) -> RankMemory:
    """Peak memory of a rank on a device.

    Args:
        rank: global number. step: what it runs and keeps. device: its limit and allocator.
        optimizer: a key of `OPTIMIZERS`. traffic: communicators and buffers of the rank.
        precision: decides which copies of the weights are kept.
        master_weights: with weights stored in half precision, the optimizer updates copies in fp32.
        ema: moving averages of the weights are kept, in the line optimizer_state.

    Returns:
        Lines, bytes: parameters, casts (half-precision copies under autocast), gradients, unsharded (buckets while whole),
        optimizer_state, buffers, activations, boundary_values, receive_buffers, inputs, communication, context, workspace,
        allocator. A value is counted with the component that is the first to save it, and under boundary_values elsewhere.

    Raises:
        ConfigError: unknown optimizer. CostError: samples or in_flight < 1, or samples by component without their boundary.
    """
    components = step.components
    samples = _samples_of(components, step.microbatch_samples)
    if min(samples.values(), default=1) < 1 or step.in_flight < 1:
        raise CostError(f"memory needs microbatch_samples >= 1 and in_flight >= 1, got {dict(samples)} and {step.in_flight}")
    boundary = step.boundary or _uniform_boundary(components, step.values, step.microbatch_samples, step.gradients)
    weights = step.weights or all_weights(components)
    saved = [c.saved_activation_bytes * samples[c.name] + c.saved_fixed_bytes for c in components]
    copies = {c.name: cast_bytes(c, precision) for c in components}
    again = {name: replace(entry, saved_bytes=entry.saved_bytes + copies[name]) for name, entry in step.recomputed.items()}
    ends = [
        own + (0 if c.name in step.recomputed else copies[c.name]) + boundary.held_of.get(c.name, 0.0)
        for c, own in zip(components, saved, strict=True)
    ]
    parts = _moments(step, samples, ends, boundary, again, weights)
    alive, waiting = dict.fromkeys(samples, step.in_flight), 0.0
    arriving, leaving = traffic.posted_bytes, 0.0
    loaded = step.in_flight if step.loaded_microbatches is None else step.loaded_microbatches
    inputs = loaded * boundary.loaded_bytes - min(step.in_flight, loaded) * boundary.loaded_saved_bytes
    if step.pipeline is None:
        peak = _fullest(parts, traffic.posted_bytes)
    else:
        of_moment = partial(_loaded_bytes, boundary, step.pipeline)
        base, waiting, peak = fullest(parts, step.pipeline, number_format(precision).element_bytes, of_moment)
        inputs = of_moment(base)
        alive = {name: base.alive[step.pipeline.chunk_of[name]] for name in samples}
        arriving, leaving = step.pipeline.arriving(base), step.pipeline.leaving(base)
    most = max(alive.values(), default=1)
    activations = sum(alive[c.name] * own for c, own in zip(components, saved, strict=True)) + waiting
    casts = sum(alive[name] * size for name, size in copies.items() if name not in step.recomputed)
    held = most * boundary.held_bytes
    if step.pipeline is not None:
        held = sum(alive[name] * size for name, size in boundary.held_of.items()) + leaving
    beside_update = activations + casts + held + inputs + arriving  # all of it is gone by then
    state, temporary = 0, 0
    for update in weights.updates:  # one after the other
        row = optimizer_bytes(update.optimizer or optimizer, precision, master_weights=master_weights, ema=ema)
        state, temporary = state + row[0] * update.elements, max(temporary, row[1] * update.elements)
    updating = temporary - beside_update
    unsharded = min(peak.whole_bytes, peak.size_bytes) if peak.size_bytes >= updating else 0.0
    workspace = max(peak.size_bytes, updating) - unsharded
    beside = device.allocator.bytes_beside(activations + casts + held + unsharded + workspace)
    lines = {
        "parameters": weights.parameter_bytes,
        "casts": casts,
        "gradients": weights.gradient_bytes,
        "unsharded": unsharded,
        "optimizer_state": state,
        "buffers": sum(component.buffer_bytes for component in components),
        "activations": activations,
        "boundary_values": held,
        "receive_buffers": arriving,
        "inputs": inputs,
        "communication": _communication_bytes(traffic),
        "context": device.context_bytes,
        "workspace": workspace,
        "allocator": beside.median,
    }
    return _rounded(rank, device, lines, {"allocator": (beside.p05, beside.p95)})


def _loaded_bytes(boundary: Boundary, chunks: Chunks, moment: HeldMoment) -> float:
    """Of microbatches not yet read, and of those in flight what is not a saved activation."""
    total = 0.0
    for name, (loaded, saved) in boundary.loaded_of.items():
        chunk = chunks.chunk_of[name]
        total += moment.unread[chunk] * loaded + moment.alive[chunk] * (loaded - saved)
    return total


def _rounded(
    rank: int, device: DeviceType, lines: Mapping[str, float], spreads: Mapping[str, tuple[float, float]]
) -> RankMemory:
    """Whole bytes; a line whose p05 is its p95 has no spread."""
    return RankMemory(
        rank=rank,
        lines=tuple((name, round(size)) for name, size in lines.items()),
        limit_bytes=device.memory_bytes,
        spreads=tuple((name, round(low), round(high)) for name, (low, high) in spreads.items() if low < high),
    )


def all_weights(components: Sequence[Component]) -> Weights:
    """All parameters of the components; gradients of those that train, all updated here.

    Args:
        components: of one rank.
    """
    parameters = held_parameters(components)
    trained = [parameter for parameter in parameters if parameter.trainable]
    return Weights(
        parameter_bytes=sum(parameter.size_bytes for parameter in parameters),
        gradient_bytes=sum(parameter.size_bytes for parameter in trained),
        updates=update_steps(trained),
    )


def _samples_of(components: Sequence[Component], samples: int | Mapping[str, int]) -> Mapping[str, int]:
    if isinstance(samples, int):
        return dict.fromkeys((component.name for component in components), samples)
    missing = [component.name for component in components if component.name not in samples]
    if missing:
        raise CostError(f"memory needs the samples of every component; {missing[0]!r} has none")
    return samples


def held_parameters(components: Sequence[Component]) -> tuple[Parameter, ...]:
    """Every parameter of the components once: a parameter tied within the rank has one copy.

    Args:
        components: of one rank.
    """
    return tuple({p.name: p for component in components for p in component.parameters}.values())


def _uniform_boundary(
    components: Sequence[Component],
    values: Mapping[str, Value],
    samples: int | Mapping[str, int],
    gradients: Mapping[str, Sequence[Wait]] | None,
) -> Boundary:
    """Values between components that no saved activation accounts for, inputs of the model, and gradients."""
    if not isinstance(samples, int):
        raise CostError("components that see different samples convert values between them; give their boundary too")
    here = {component.name for component in components}
    made = {name for component in components for name in component.outputs}
    read = {name for component in components for name in component.inputs}
    loaded: dict[str, tuple[float, float]] = {}
    held: dict[str, float] = {}
    for name in sorted(made | read):
        value = values[name]
        size = value.size_bytes(samples)
        if value.producer is None:
            reader = next(c.name for c in components if name in c.inputs)
            more = size if value.savers == () or _counted(value, here) else 0
            before = loaded.get(reader, (0.0, 0.0))
            loaded[reader] = before[0] + size, before[1] + more
        elif value.savers == ():
            continue  # let go once it is read, or sent
        elif value.savers:
            keeper = next((saver for saver in value.savers if saver in here), None)
            if keeper is not None and not _counted(value, here):
                held[keeper] = held.get(keeper, 0.0) + size
        elif value.producer not in here or name not in read or not value.saved:
            user = value.producer if value.producer in here else next(c.name for c in components if name in c.inputs)
            held[user] = held.get(user, 0.0) + size
    return Boundary(
        held_bytes=sum(held.values()),
        held_of=held,
        loaded_bytes=sum(size for size, _ in loaded.values()),
        loaded_saved_bytes=sum(size for _, size in loaded.values()),
        loaded_of=loaded,
        gradient_bytes={
            component.name: sum(values[name].size_bytes(samples) for name in component.outputs if values[name].differentiable)
            for component in components
        },
        waiting=waiting_bytes(components, values, lambda value: value.size_bytes(samples), gradients),
        handed_bytes={
            component.name: sum(
                values[name].size_bytes(samples)
                for name in dict.fromkeys(component.inputs)
                if values[name].differentiable and values[name].producer is not None
            )
            for component in components
        },
    )


def _counted(value: Value, here: Collection[str]) -> bool:
    """Whether the value is among the saved activations of the components `here`: the first that saves it counts it."""
    return value.saved if value.savers is None else bool(value.savers) and value.savers[0] in here


def _moments(
    step: RankStep,
    samples: Mapping[str, int],
    saved: Sequence[float],
    boundary: Boundary,
    again: Mapping[str, Again],
    weights: Weights,
) -> list[ComponentMoments]:
    """What is there while each component runs. A recomputed one runs forward before its backward, beside the gradients of
    what it puts out, which have been converted by then.
    """
    found = []
    whole: dict[str, dict[tuple[Phase, int], float]] = {}
    for (phase, name, microbatch), size in weights.unsharded.items():
        key = phase, microbatch if step.pipeline else 0  # without a pipeline one microbatch is held at a time
        whole.setdefault(name, {})[key] = max(size, whole.get(name, {}).get(key, 0.0))
    made_before = {} if step.pipeline is None else step.pipeline.made_before
    for component, own in zip(step.components, saved, strict=True):
        name, number = component.name, samples[component.name]
        made, made_back = made_before.get(name, (0.0, 0.0))
        forward = 0.0
        if name not in again:
            forward = boundary.waiting.values.get(name, 0.0) + _fullest_bytes(component.forward_peaks, number)
        elif again[name].first_bytes:
            forward = boundary.waiting.values.get(name, 0.0) + again[name].first_bytes
        gradients = boundary.gradient_bytes[name]
        runs_backward = gradients or not component.forward_peaks
        alive = max(_alive_bytes(component, number), gradients) if runs_backward else 0.0
        wanted, second = boundary.wanted_bytes.get(name, gradients), 0.0
        beside = boundary.waiting.gradients.get(name, 0.0) + made_back
        split = component.split_backward
        first_half = None if split is None else max(_fullest_bytes(split.peaks, number), gradients) + beside
        if name in again:
            entry = again[name]
            first = entry.fullest_bytes
            if first is None:
                first = _fullest_bytes(component.forward_peaks, number)
            alive += entry.saved_bytes - entry.released_bytes
            if first_half is not None:
                first_half += entry.saved_bytes - entry.released_bytes
            second = first + wanted + beside
        found.append(
            ComponentMoments(
                component=component,
                samples=number,
                kept=own,
                again=again[name].saved_bytes if name in again else 0.0,
                forward=forward + made,
                second=second,
                alive=max(alive + beside, boundary.converted_bytes.get(name, 0.0)),
                gradients=wanted,
                handed=boundary.handed_bytes.get(name, 0.0) + beside,
                whole=whole.get(name, {}),
                first_half=first_half,
                waits=0.0 if split is None else _fullest_bytes([split.waiting], number),
            )
        )
    return found


def _fullest(parts: Sequence[ComponentMoments], posted: float) -> Moment:
    """By how much the worst moment of the last microbatch's forward, or of its backward, exceeds the end of that forward.

    While a component runs backward, what the later ones saved is free.
    """
    before = 0.0
    moments = [Moment(0.0, 0.0)]
    for part in parts:
        moments.append(part.moment(before + part.forward, 0, Phase.FORWARD))
        before += part.kept
        moments.append(part.backward(before - posted, 0))
    peak = max(moments, key=itemgetter(0))
    return Moment(max(0.0, peak.size_bytes - before), peak.whole_bytes)


def _fullest_bytes(peaks: Sequence[tuple[int, int]], samples: int) -> int:
    return max((rate * samples + fixed for rate, fixed in peaks), default=0)


def _alive_bytes(component: Component, samples: int) -> float:
    """Bytes beyond the saved activations at the fullest moment of the component's backward. They were counted when it was
    traced. Otherwise they are the gradients of the input, the output and the parameters of its largest operator, before
    these are added to their bucket.
    """
    if component.backward_peaks:
        return _fullest_bytes(component.backward_peaks, samples)
    return _fullest_bytes([(op.activation_bytes, op.parameter_bytes) for op in component.operators], samples)


def _communication_bytes(traffic: Traffic) -> int:
    if traffic.communicators <= 0:
        return 0
    return NCCL_COMMUNICATOR_BYTES * traffic.communicators if traffic.backend == "nccl" else traffic.largest_message_bytes
