"""Lower bound on the seconds by arithmetic and memory: no price from operators is below it.

    t >= max(flop / peak, bytes / bandwidth)

A convolution whose filters have several taps needs fewer multiplications than its flop count says. A Winograd kernel makes 4 x
4 outputs of a 3 x 3 filter with 36 multiplications instead of 144, so a quarter of the flop is its bound. A strided one is a
sum of convolutions without stride, one per phase, and has the same bound. Arithmetic of operators other than products
(transforms, decompositions) cannot use matrix units: its peak is that of fp32.

Times on a calibrated machine may be faster than its memory bandwidth, because arrays are in a cache; only bytes beyond
`CACHED_BYTES` per operator count there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from parsim.costs.compute.operators import Kernel, element_bytes, operator_times
from parsim.hardware.device import DeviceType
from parsim.model.component import Operator

WINOGRAD_REDUCTION = 4.0
CACHED_BYTES = 64e6
"""At least the last cache of the devices that are calibrated here: 32 to 50 MB."""


def peak_of(kernel: Kernel, device: DeviceType, precision: str) -> float | None:
    """flop/s that the kernel could reach at most; None where the device has no peak of this precision."""
    peaks = device.peak_flop_per_s
    if kernel.kind == "memory_bound" and "fp32" in peaks:
        return min(peaks["fp32"], peaks.get(precision, peaks["fp32"]))
    return peaks.get(precision)


def arithmetic_s(kernel: Kernel, device: DeviceType, precision: str) -> float:
    """Least seconds of one launch for its multiplications."""
    peak = peak_of(kernel, device, precision)
    if peak is None or not kernel.flop:
        return 0.0
    reduced = kernel.kind == "convolution" and kernel.taps > 1
    return kernel.flop / (peak * (WINOGRAD_REDUCTION if reduced else 1.0))


def kernel_roofline_s(kernel: Kernel, device: DeviceType, precision: str) -> float:
    """Least seconds of one launch."""
    return max(arithmetic_s(kernel, device, precision), kernel.size_bytes / device.memory_bandwidth_bytes_per_s)


def without_mask(operator: Operator) -> Operator:
    """Of causal attention half of the queries: a fused kernel leaves out the scores that the mask hides."""
    if operator.kind != "attention" or operator.function != "causal":
        return operator
    shape = tuple((name, max(1, size // 2) if name == "q" else size) for name, size in operator.shape)
    return replace(operator, shape=shape)


def component_roofline_s(
    kernels: Iterable[Kernel],
    operators: Iterable[Operator],
    samples: int,
    device: DeviceType,
    precision: str,
    *,
    share: float = 1.0,
) -> float:
    """Least seconds of a component on a device with caches: of all its arithmetic, or of what no cache holds.

    Args:
        kernels: what it launches. share: of its operators' bytes that are moved (half a backward: 0.5).
    """
    arithmetic = sum(kernel.count * arithmetic_s(kernel, device, precision) for kernel in kernels)
    scale = element_bytes(precision) / 4
    beyond = sum(
        operator.count
        * max(
            0.0,
            scale * (operator.activation_bytes * operator_times(operator, samples) + operator.parameter_bytes) - CACHED_BYTES,
        )
        for operator in operators
    )
    return max(arithmetic, share * beyond / device.memory_bandwidth_bytes_per_s)
