"""Seconds of one kernel by the formula fitted to a device's kernels, or by a roofline where nothing was fitted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from parsim.costs.compute.operators import Kernel, kernel_seconds
from parsim.costs.estimate import Source
from parsim.hardware.compute_records import OperatorFit
from parsim.hardware.device import Device
from parsim.hardware.profile import Profile

FIT_EXTRAPOLATION_SIGMA_PER_DOUBLING = 0.02
ROOFLINE_COMPUTE_EFFICIENCY = 0.5
ROOFLINE_BANDWIDTH_EFFICIENCY = 0.75
ROOFLINE_SIGMA = 0.4
"""Assumed for operator kinds without a fit."""


def price_kernel(kernel: Kernel, fit: OperatorFit | None, device: Device, precision: str) -> tuple[float, float, Source, bool]:
    """Seconds of all occurrences of the kernel, relative sigma, source, outside the fitted range."""
    if fit is not None:
        seconds = kernel_seconds(kernel, fit.coefficients)
        doublings = 0.0
        if kernel.flop > 0 and fit.max_flop > 0:
            doublings = max(0.0, math.log2(kernel.flop / fit.max_flop), math.log2(max(fit.min_flop, 1.0) / kernel.flop))
        sigma = fit.relative_sigma + FIT_EXTRAPOLATION_SIGMA_PER_DOUBLING * doublings
        return kernel.count * seconds, sigma, "fitted", doublings > 0
    compute = 0.0
    peak = device.type.peak_flop_per_s.get(precision)
    if kernel.flop > 0 and peak is not None:
        compute = kernel.flop / (peak * ROOFLINE_COMPUTE_EFFICIENCY)
    memory = kernel.size_bytes / (device.type.memory_bandwidth_bytes_per_s * ROOFLINE_BANDWIDTH_EFFICIENCY)
    return kernel.count * max(compute, memory), ROOFLINE_SIGMA, "published", False


def efficiency_of(profile: Profile, device: Device, precision: str) -> tuple[float, tuple[tuple[str, float], ...]]:
    """Share of the operators' throughput that whole models reach, and its spread as a cost parameter; 1 where unknown."""
    for entry in profile.compute.efficiencies:
        if (entry.precision, entry.device_type) == (precision, device.type.name):
            return entry.factor, ((f"efficiency:{precision}", entry.spread),)
    return 1.0, ()


def fit_for(fits: Sequence[OperatorFit], kind: str, phase: str, precision: str, device_type: str) -> OperatorFit | None:
    for fit in fits:
        if (fit.kind, fit.phase, fit.precision, fit.device_type) == (kind, phase, precision, device_type):
            return fit
    return None


def has_published_peaks(device: Device, profile: Profile) -> bool:
    """Whether the peaks come from a datasheet or paper: a machine that was calibrated answers with its measurements only."""
    entry = profile.device_types.get(device.type.name)
    if entry is None:
        return False
    return any(profile.sources[peak.source].kind in ("datasheet", "paper") for peak in entry.peak_flop_per_s.values())
