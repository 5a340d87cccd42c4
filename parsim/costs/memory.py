"""Peak memory of one rank, each line apart, from the Model alone (no torch, no Plan).

What is counted, and when: the peak of a synchronous training step, which is the end of the last forward in flight, the
worst moment of the backward that follows, or the optimizer step. Gradients are views into flat buckets, so they are counted
once. The executor holds the boundary inputs and outputs of a component until its backward has run.

Leaves out: allocator effects beyond the stated fragmentation share, and what autocast keeps in fp32 although the rest of
the network is in half precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parsim.errors import CostError, near_matches
from parsim.hardware.device import DeviceType
from parsim.model.component import Component, Parameter, Value
from parsim.units import MIB, format_bytes

OPTIMIZER_STATE_BYTES_PER_ELEMENT: Mapping[str, int] = {"sgd": 0, "sgd_momentum": 4, "adam": 8, "adamw": 8}
"""fp32 state: one momentum array, or Adam's two moments."""

OPTIMIZER_TEMPORARY_BYTES_PER_ELEMENT: Mapping[str, int] = {"sgd": 0, "sgd_momentum": 0, "adam": 4, "adamw": 4}
"""Foreach Adam keeps the root of the second moment of all parameters at once; activations are free by then."""

AMP_ACTIVATION_FRACTION = 0.5
"""Saved activations under autocast against fp32: two bytes instead of four."""

AMP_WEIGHT_BYTES_PER_ELEMENT = 2
"""Autocast saves a half-precision copy of each weight for the backward."""

CUDA_FRAGMENTATION = 0.02
"""Assumed share of the dynamic memory lost between the caching allocator's blocks."""

CUDA_LIBRARY_WORKSPACE_BYTES = 256 * MIB
"""Assumed for cuDNN and cuBLAS scratch, a convolution algorithm's usual upper limit."""

NCCL_COMMUNICATOR_BYTES = 256 * MIB
"""Assumed per communicator: about a dozen channels, each with send and receive buffers of 4 MiB (the default
NCCL_BUFFSIZE) for one protocol and as much again for the low-latency ones and scratch, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Attributes: lines: (name, bytes), every line once. limit_bytes: what the device has."""

    rank: int
    lines: tuple[tuple[str, int], ...]
    limit_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.lines)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.limit_bytes

    @property
    def worst(self) -> tuple[str, int]:
        """The largest line."""
        return max(self.lines, key=lambda line: line[1])

    @property
    def excess_bytes(self) -> int:
        """By how much it does not fit; 0 where it fits."""
        return max(0, self.total_bytes - self.limit_bytes)

    def line(self, name: str) -> int:
        return dict(self.lines)[name]

    def describe(self) -> str:
        """`rank 3 needs 34.1 GiB of 32 GiB (2.1 GiB too much); its largest line is activations, 30 GiB`."""
        name, size = self.worst
        over = "" if self.fits else f" ({format_bytes(self.excess_bytes)} too much)"
        return (
            f"rank {self.rank} needs {format_bytes(self.total_bytes)} of {format_bytes(self.limit_bytes)}{over}; "
            f"its largest line is {name}, {format_bytes(size)}"
        )


def rank_memory(
    *,
    rank: int,
    components: Sequence[Component],
    values: Mapping[str, Value],
    microbatch_samples: int,
    in_flight: int,
    optimizer: str,
    precision: str,
    device: DeviceType,
    backend: str = "nccl",
    communicators: int = 0,
    largest_message_bytes: int = 0,
    loaded_microbatches: int | None = None,
) -> RankMemory:
    """Peak memory of the rank that holds `components`.

    Args:
        components: those of the rank's stage, in execution order.
        values: all Values of the model by name (`Model.value`).
        microbatch_samples: samples of one microbatch on this rank.
        in_flight: microbatches whose forward has run and whose backward has not, at the worst moment (gpipe: M; 1f1b:
            min(M, S - s); one stage: 1).
        communicators: process groups with collectives or transfers this rank takes part in; 0 for one rank alone.
        largest_message_bytes: the largest bucket or transfer; gloo keeps a scratch copy of it.
        loaded_microbatches: how many microbatches of model inputs are on the device at once (None: those in flight).

    Returns:
        Lines, bytes: parameters, casts (half-precision copies under autocast), gradients, optimizer_state, buffers,
        activations, boundary_values, inputs, communication, context, workspace.
        A value that crosses to another rank is counted under boundary_values on both, even where a component of this rank
        saves it too: an upper bound, as the Model says only that some component saves it.

    Raises:
        CostError: unknown optimizer, samples or in_flight < 1.
    """
    if optimizer not in OPTIMIZER_STATE_BYTES_PER_ELEMENT:
        raise CostError(f"unknown optimizer {optimizer!r}{near_matches(optimizer, OPTIMIZER_STATE_BYTES_PER_ELEMENT)}")
    if microbatch_samples < 1 or in_flight < 1:
        raise CostError(f"memory needs microbatch_samples >= 1 and in_flight >= 1, got {microbatch_samples} and {in_flight}")
    amp = precision.startswith("amp")
    scale = AMP_ACTIVATION_FRACTION if amp else 1.0
    parameters = held_parameters(components)
    elements = sum(parameter.elements for parameter in parameters)
    parameter_bytes = sum(parameter.size_bytes for parameter in parameters)
    saved = [scale * (c.saved_activation_bytes * microbatch_samples + c.saved_fixed_bytes) for c in components]
    activations = in_flight * sum(saved)
    boundary = scale * in_flight * _boundary_bytes(components, values, microbatch_samples)
    loaded = in_flight if loaded_microbatches is None else loaded_microbatches
    backward = _backward_transient_bytes(components, values, microbatch_samples, saved, scale)
    update = OPTIMIZER_TEMPORARY_BYTES_PER_ELEMENT[optimizer] * elements - activations - boundary
    lines = {
        "parameters": parameter_bytes,
        "casts": AMP_WEIGHT_BYTES_PER_ELEMENT * elements if amp else 0,
        "gradients": parameter_bytes,
        "optimizer_state": OPTIMIZER_STATE_BYTES_PER_ELEMENT[optimizer] * elements,
        "buffers": sum(component.buffer_bytes for component in components),
        "activations": activations,
        "boundary_values": boundary,
        "inputs": _input_bytes(components, values, microbatch_samples, in_flight, loaded),
        "communication": _communication_bytes(backend, communicators, largest_message_bytes),
        "context": device.context_bytes,
        "workspace": max(backward, update) + _library_bytes(device, activations + boundary),
    }
    return RankMemory(
        rank=rank, lines=tuple((name, round(size)) for name, size in lines.items()), limit_bytes=device.memory_bytes
    )


def held_parameters(components: Sequence[Component]) -> tuple[Parameter, ...]:
    """Every parameter of the components once: one tied within the rank has one copy."""
    return tuple({p.name: p for component in components for p in component.parameters}.values())


def _boundary_bytes(components: Sequence[Component], values: Mapping[str, Value], samples: int) -> int:
    """Values between components that no saved activation accounts for, of one microbatch."""
    here = {component.name for component in components}
    made = {name for component in components for name in component.outputs}
    read = {name for component in components for name in component.inputs}
    total = 0
    for name in sorted(made | read):
        value = values[name]
        if value.producer is None:
            continue
        crosses = value.producer not in here or name not in read
        if crosses or not value.saved:
            total += value.size_bytes(samples)
    return total


def _input_bytes(
    components: Sequence[Component], values: Mapping[str, Value], samples: int, in_flight: int, loaded: int
) -> int:
    """Inputs of the model on the device; those among the saved activations are counted there while in flight."""
    names = sorted({name for component in components for name in component.inputs if values[name].producer is None})
    return sum(
        values[name].size_bytes(samples) * (max(0, loaded - in_flight) if values[name].saved else loaded) for name in names
    )


def _backward_transient_bytes(
    components: Sequence[Component], values: Mapping[str, Value], samples: int, saved: Sequence[float], scale: float
) -> float:
    """By how much the worst moment of the last microbatch's backward exceeds the end of its forward.

    While component i runs backward, what the later ones saved is free, and the gradients of the input and output of its
    largest operator and of its boundary outputs are alive.
    """
    before = 0.0
    peak = 0.0
    for component, own in zip(components, saved, strict=True):
        before += own
        inner = max((operator.activation_bytes for operator in component.operators), default=0) * samples
        outer = sum(values[name].size_bytes(samples) for name in component.outputs if values[name].differentiable)
        peak = max(peak, before + scale * max(inner, outer))
    return max(0.0, peak - before)


def _communication_bytes(backend: str, communicators: int, largest_message_bytes: int) -> int:
    if communicators <= 0:
        return 0
    return NCCL_COMMUNICATOR_BYTES * communicators if backend == "nccl" else largest_message_bytes


def _library_bytes(device: DeviceType, dynamic_bytes: float) -> float:
    """Stated assumptions for CUDA; on a CPU the context that calibration measured covers it."""
    return CUDA_LIBRARY_WORKSPACE_BYTES + CUDA_FRAGMENTATION * dynamic_bytes if device.kind == "cuda" else 0.0
