"""Prices by the formula fitted to published kernels, or by a roofline without a fit.

    t = (sum over kinds of operators of  launches * seconds of one launch) / efficiency

The seconds of a launch are `parsim.costs.compute.launches.kernel_seconds` where its kind has a fit. Elsewhere they are a
roofline: max(flop / (50% of the peak), bytes / (75% of the bandwidth)). The efficiency is the throughput of
whole models over that of their operators, 1 if the profile has none. No launch is below
`parsim.costs.compute.formula.kernel_roofline_s`.

The host queues one launch after the other, `host.launch_s` each (`Estimate.issue_s`): a component costs the larger of the two.

Leaves out: launch gaps between the kernels of one component, cache reuse across operators, clock changes under load. The
roofline also leaves out the launches themselves, so small kernels are predicted too fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parsim.costs.compute.gpu import cuda_backward_halves, cuda_forward, cuda_operators, has_full_stream
from parsim.costs.compute.launches import (
    EXTRAPOLATED_SHARE,
    ComputeRequest,
    Kernel,
    drift_of,
    element_bytes,
    forward_kernels,
    fused_attention_kernel,
    halved_backward_kernels,
    kernel_seconds,
    operator_times,
)
from parsim.costs.estimate import Detail, Estimate, Source, Term, TermOrigin, Terms, folded_s, summed
from parsim.errors import CostError
from parsim.hardware.devices import DEVICE_KINDS, DeviceType
from parsim.hardware.profile import Profile
from parsim.hardware.records import OperatorFit
from parsim.model.component import GRADIENT_SUM, Operator
from parsim.model.formats import number_format, operator_precision
from parsim.work import Phase

# The time of a matrix product from how a GPU runs it: output tiles on multiprocessors, wave after wave.
#
# A product of `problems` independent (m x k) by (k x n) is cut into output tiles of a x b, and each tile's depth into s
# pieces
# (split-K). With S multiprocessors and the rate R = utilisation * peak_flop_per_s,
#
#     tiles = problems * ceil(m / a) * ceil(n / b) * s           x = tiles / S
#     waves = max(1, x + quantisation * (ceil(x) - x))           a last wave that is not full takes a part of a full one
#     tile  = 2 (k / s + depth_overhead) * (a b + operand_overhead (a + b)) * S / R
#     c     = waves * tile                                       arithmetic
#     m     = bytes / (bandwidth_fraction * memory bandwidth)    every operand and the result once
#     r     = split_cost * s * 8 bytes * outputs / bandwidth     partial sums of split-K; 0 for s = 1
#     t     = floor_s + min over (a, b, s) of  (c^p + m^p)^(1/p) + r
#
# `depth_overhead` is what a tile costs beside its depth (prologue, epilogue), in units of depth; `operand_overhead` what its
# edges cost, so that small tiles are slower per output. The library is taken to choose the best tile. Each term grows with
# each
# size, so t does; a last wave that is not full shows as steps.
#
# `utilisation` is that of a GPU which computes without a pause, at the clock that its power limit leaves. A short run after a
# pause is faster: the fit knows that (`burst_gain`), the price does not use it.
#
# Leaves out: the cache (operands are counted once), operands whose rows are not aligned, and the library's wrong choices.


Array = NDArray[np.float64]

TILES: Array = np.array(
    [(256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64)], dtype=np.float64
)
SPLITS: Array = np.array([1, 2, 4, 8, 16], dtype=np.float64)
PARTIAL_SUM_BYTES = 8.0
"""Of an output and a piece of depth: four bytes written and read."""

COEFFICIENTS = (
    "utilisation",
    "operand_overhead",
    "depth_overhead",
    "quantisation",
    "floor_s",
    "bandwidth_fraction",
    "split_cost",
    "sharpness",
)


def tile_seconds(
    rows: Array,
    columns: Array,
    depth: Array,
    problems: Array,
    size_bytes: Array,
    coefficients: Mapping[str, float],
) -> Array:
    """Seconds of products by the formula of this module, for several shapes at once.

    Args:
        rows, columns, depth, problems: m, n, k and the number of independent products; float64 [shapes].
        size_bytes: operands and result, float64 [shapes].
        coefficients: `COEFFICIENTS`, and `multiprocessors`, `peak_flop_per_s`, `memory_bandwidth_bytes_per_s`.

    Returns:
        Seconds, float64 [shapes]. Leaves out the cache and unaligned operands.
    """
    compute, memory, partial_sums = tile_parts(rows, columns, depth, problems, size_bytes, coefficients)
    p = coefficients["sharpness"]
    larger = np.maximum(compute, memory)
    seconds = larger * (1.0 + (np.minimum(compute, memory) / larger) ** p) ** (1.0 / p) + partial_sums
    best: Array = coefficients["floor_s"] + seconds.min(axis=0)
    return best


def tile_parts(
    rows: Array, columns: Array, depth: Array, problems: Array, size_bytes: Array, coefficients: Mapping[str, float]
) -> tuple[Array, Array, Array]:
    """c (of the best tile), m and r of the formula, each float64 [splits, shapes] or broadcast to it.

    m and r do not depend on the tile, so the tile with the least c is the best for every split.

    Args:
        rows, columns, depth, problems, size_bytes, coefficients: as for `tile_seconds`.
    """
    a, b, s = TILES[:, 0, None, None], TILES[:, 1, None, None], SPLITS[None, :, None]
    tiles = problems * np.ceil(rows / a) * np.ceil(columns / b) * s
    bandwidth = coefficients["memory_bandwidth_bytes_per_s"]
    x = tiles / coefficients["multiprocessors"]
    waves = np.maximum(1.0, x + coefficients["quantisation"] * (np.ceil(x) - x))
    rate = coefficients["peak_flop_per_s"] * coefficients["utilisation"] / coefficients["multiprocessors"]
    tile = 2.0 * (depth / s + coefficients["depth_overhead"]) * (a * b + coefficients["operand_overhead"] * (a + b)) / rate
    memory = size_bytes / (bandwidth * coefficients["bandwidth_fraction"])
    outputs = problems * rows * columns
    pieces = SPLITS[:, None]
    partial_sums = np.where(pieces > 1, coefficients["split_cost"] * pieces * PARTIAL_SUM_BYTES * outputs / bandwidth, 0.0)
    return (waves * tile).min(axis=0), memory, partial_sums


# Lower bound on the seconds by arithmetic and memory: no price from operators is below it.
#
#     t >= max(flop / peak, bytes / bandwidth)
#
# A convolution whose filters have several taps needs fewer multiplications than its flop count says. A Winograd kernel makes
# 4 x
# 4 outputs of a 3 x 3 filter with 36 multiplications instead of 144, so a quarter of the flop is its bound. A strided one is
# a
# sum of convolutions without stride, one per phase, and has the same bound. Arithmetic of operators other than products
# (transforms, decompositions) cannot use matrix units: its peak is that of fp32.
#
# Times on a calibrated machine may be faster than its memory bandwidth, because arrays are in a cache; only bytes beyond
# `CACHED_BYTES` per operator count there.


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


# The time of fused attention: blocks of queries on multiprocessors, each over the keys that it sees.
#
# Forward, over `problems` heads of q queries and k keys with `depth` channels (and `value_depth` of the values), on S
# multiprocessors at the rate R = utilisation * peak_flop_per_s:
#
#     blocks = problems * ceil(q / 128)         x = blocks / S      waves = x + quantisation * (ceil(x) - x)
#     score  = passes * (2 (depth + value_depth) + softmax_flop)    of one query and one key
#     block  = 128 * (keys + key_overhead) * score * S / R          keys: k; half of k and half a block where causal
#     c      = max(waves * block, the longest block)                the longest one sees every key
#     t      = floor_s + (c^p + m^p)^(1/p)                          m: queries, keys, values and outputs once
#
# `softmax_flop` is the cost of the exponential of one score, in units of the arithmetic that runs meanwhile. It explains why
# heads of 64 channels reach less of the peak than those of 128. The backward makes five products where the forward makes two,
# so its `passes` is 2.5, with coefficients of its own. A causal mask skips the scores it hides, in both.
#
# Leaves out: windows and other masks, dropout, and how grouped heads share keys in the cache.


BLOCK = 128.0
BACKWARD_PASSES = 2.5
"""Products of the backward (scores again, and four gradients) over those of the forward."""
SHARPNESS = 4.0
ATTENTION_COEFFICIENTS = ("utilisation", "softmax_flop", "key_overhead", "quantisation", "floor_s", "bandwidth_fraction")


def attention_seconds(
    queries: Array,
    keys: Array,
    depth: Array,
    value_depth: Array,
    problems: Array,
    causal: Array,
    size_bytes: Array,
    coefficients: Mapping[str, float],
    *,
    backward: bool = False,
) -> Array:
    """Seconds of fused attention by the formula of this module, for several shapes at once.

    Args:
        queries, keys, depth, value_depth: per head, float64 [shapes]. problems: heads of all samples.
        causal: 1 where a query sees no later key, else 0.
        size_bytes: arrays read and written.
        coefficients: `COEFFICIENTS`, and `multiprocessors`, `peak_flop_per_s`, `memory_bandwidth_bytes_per_s`.
        backward: five products instead of two.

    Returns:
        Seconds, float64 [shapes]. Leaves out windows and dropout.
    """
    units = coefficients["multiprocessors"]
    passes = BACKWARD_PASSES if backward else 1.0
    score = passes * (2.0 * (depth + value_depth) + coefficients["softmax_flop"])
    rate = coefficients["peak_flop_per_s"] * coefficients["utilisation"] / units
    seen = np.where(causal > 0, 0.5 * (keys + np.minimum(BLOCK, keys)), keys)
    blocks = problems * np.ceil(queries / BLOCK) / units
    waves = blocks + coefficients["quantisation"] * (np.ceil(blocks) - blocks)
    per_key = BLOCK * score / rate
    block = per_key * (seen + coefficients["key_overhead"])
    longest = per_key * (keys + coefficients["key_overhead"])
    compute = np.maximum(waves * block, longest)
    memory = size_bytes / (coefficients["memory_bandwidth_bytes_per_s"] * coefficients["bandwidth_fraction"])
    larger = np.maximum(compute, memory)
    seconds: Array = coefficients["floor_s"] + larger * (1.0 + (np.minimum(compute, memory) / larger) ** SHARPNESS) ** (
        1.0 / SHARPNESS
    )
    return seconds


# Seconds of one launch by its fit, whatever form the fit has.


def fitted_kernel_seconds(kernel: Kernel, fit: OperatorFit) -> float:
    """Seconds of one launch.

    Args:
        kernel: sizes, flop and bytes. fit: of its kind and phase.

    Raises:
        CostError: a coefficient is missing.
    """
    try:
        match fit.form:
            case "tiles":
                return _product(kernel, fit.coefficients)
            case "fused_attention":
                return _attention(kernel, fit.coefficients)
            case "saturation":
                return kernel_seconds(kernel, fit.coefficients)
    except KeyError as error:
        raise CostError(f"the {fit.form} fit for {fit.kind} {fit.phase} has no coefficient {error}; fit it again") from error


def _product(kernel: Kernel, coefficients: Mapping[str, float]) -> float:
    rows, columns, depth, problems, size_bytes = (
        np.array([value], dtype=np.float64)
        for value in (kernel.rows, kernel.columns, kernel.depth, kernel.problems, kernel.size_bytes)
    )
    return float(tile_seconds(rows, columns, depth, problems, size_bytes, coefficients)[0])


def _attention(kernel: Kernel, coefficients: Mapping[str, float]) -> float:
    queries, keys, depth, problems, causal, size_bytes = (
        np.array([value], dtype=np.float64)
        for value in (kernel.rows, kernel.columns, kernel.depth, kernel.problems, kernel.causal, kernel.size_bytes)
    )
    backward = kernel.phase == "backward"
    seconds = attention_seconds(queries, keys, depth, depth, problems, causal, size_bytes, coefficients, backward=backward)
    return float(seconds[0])


FIT_EXTRAPOLATION_SIGMA_PER_DOUBLING = 0.02
ROOFLINE_COMPUTE_EFFICIENCY = 0.5
ROOFLINE_BANDWIDTH_EFFICIENCY = 0.75
ROOFLINE_SIGMA = 0.4
"""Assumed for operator kinds without a fit."""

LAUNCHES = "{:.0f} launches of {:.3g} flop and {:.3g} B in all, at {:.3g} flop/s and {:.3g} B/s"
"""What a kind of operator does and how fast, as the detail of its term."""
SHARE_OF_PEAK = LAUNCHES + ": {:.0%} of peak"
"""The same of arithmetic on a device whose peak is known."""

HALVES = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


class KernelPrice(NamedTuple):
    """Attributes: seconds: of all occurrences. sigma: relative. outside: of the fitted range."""

    seconds: float
    sigma: float
    source: Source
    outside: bool


@dataclass(frozen=True)
class KernelModel:
    """Implements `parsim.costs.compute.launches.OperatorModel`."""

    profile: Profile
    device: DeviceType
    precision: str

    def seconds(self, request: ComputeRequest) -> float:
        """Seconds without the efficiency of whole models; a roofline also serves profiles without published peaks."""
        return sum(self.price(kernel).seconds for kernel in self._kernels(request))

    def estimate(self, request: ComputeRequest) -> Estimate:
        """One term per kind of operator and source, then the efficiency. Raises CostError for an operator without a price."""
        if not self.has_published_peaks and not self._fits:
            raise CostError(self._unknown(request, "any kind of operator"))
        drift = drift_of(self.profile)
        sums: dict[tuple[str, Source], list[float]] = {}  # seconds, launches, flop, bytes
        spreads: dict[str, float] = {}
        total = outside_s = 0.0
        for kernel in self._kernels(request):
            if not self.has_published_peaks and self._fit_of(kernel) is None:
                raise CostError(self._unknown(request, f"{kernel.kind} {kernel.phase}"))
            seconds, sigma, source, outside = self.price(kernel)
            own = sums.setdefault((kernel.kind, source), [0.0, 0.0, 0.0, 0.0])
            total += seconds
            own[0] += seconds
            own[1] += kernel.count
            own[2] += kernel.count * kernel.flop
            own[3] += kernel.count * kernel.size_bytes
            spreads[kernel.kind] = spreads.get(kernel.kind, 0.0) + sigma * seconds
            outside_s += seconds if outside else 0.0
        terms = _by_kind(sums, total, self.device.peak_flop_per_s.get(self.precision))
        if not total:
            return Estimate.of(terms, source="fitted", parameters=(drift,), detail="launches no kernel")
        by_source: dict[Source, float] = {}
        for (_, source), (seconds, *_) in sums.items():
            by_source[source] = by_source.get(source, 0.0) + seconds
        efficiency, spread = self.efficiency
        shares = ", ".join(f"{by_source[name] / total:.0%} {name}" for name in sorted(by_source))
        if efficiency and efficiency[0].value > 1:  # whole models were faster than their kernels
            least_s = sum(
                entry.count * kernel_roofline_s(entry, self.device, self._precision_of(entry))
                for entry in self._kernels(request)
            )
            efficiency = (*efficiency, Term("roofline", "at least", least_s, "published"))
        return Estimate.of(
            (*terms, *efficiency),
            source=max(sorted(by_source), key=lambda name: by_source[name]),
            parameters=(drift, *spread, *((f"operator:{kind}", spreads[kind] / total) for kind in sorted(spreads))),
            detail=f"sum of operators: {shares}",
            extrapolated=outside_s > EXTRAPOLATED_SHARE * total,
            issue_s=self.launch_s * sum(launches for _, launches, _, _ in sums.values()),
        )

    @cached_property
    def launch_s(self) -> float:
        """Of the host per launch; 0 where the profile does not know it."""
        return 0.0 if self.profile.host is None else self.profile.host.launch_s

    def price(self, kernel: Kernel) -> KernelPrice:
        """By the fit of its kind and phase, else by the roofline. Equal launches are priced once."""
        if kernel not in self._priced:
            self._priced[kernel] = self._price(kernel)
        return self._priced[kernel]

    @cached_property
    def _priced(self) -> dict[Kernel, KernelPrice]:
        return {}

    def _price(self, kernel: Kernel) -> KernelPrice:
        fit, precision = self._fit_of(kernel), self._precision_of(kernel)
        if fit is not None:
            doublings = 0.0
            if kernel.flop > 0 and fit.max_flop > 0 and kernel.kind != "memory_bound":
                doublings = max(0.0, math.log2(kernel.flop / fit.max_flop), math.log2(max(fit.min_flop, 1.0) / kernel.flop))
            sigma = fit.relative_sigma + FIT_EXTRAPOLATION_SIGMA_PER_DOUBLING * doublings
            seconds = fitted_kernel_seconds(kernel, fit)
            if kernel.kind == "memory_bound" and kernel.flop > 0:
                bound = self._arithmetic_s(kernel)
                if bound > seconds:
                    return KernelPrice(kernel.count * bound, ROOFLINE_SIGMA, "published", False)
            least = kernel_roofline_s(kernel, self.device, precision)
            if not kernel.aligned and "fp32" in self.device.peak_flop_per_s:
                least = max(least, kernel.flop / (self.device.peak_flop_per_s["fp32"] * ROOFLINE_COMPUTE_EFFICIENCY))
            return KernelPrice(kernel.count * max(seconds, least), sigma, "fitted", doublings > 0)
        memory = kernel.size_bytes / (self.device.memory_bandwidth_bytes_per_s * ROOFLINE_BANDWIDTH_EFFICIENCY)
        return KernelPrice(kernel.count * max(self._arithmetic_s(kernel), memory), ROOFLINE_SIGMA, "published", False)

    def _arithmetic_s(self, kernel: Kernel) -> float:
        """Of one launch at the stated efficiency; 0 where nobody published a peak of the precision."""
        peak = peak_of(kernel, self.device, self._precision_of(kernel))
        return 0.0 if peak is None or not kernel.flop else kernel.flop / (peak * ROOFLINE_COMPUTE_EFFICIENCY)

    @cached_property
    def efficiency(self) -> tuple[tuple[Term, ...], tuple[tuple[str, float], ...]]:
        """The term by which the profile divides seconds from operators, and its spread as a cost parameter; none, none."""
        for entry in self.profile.compute.efficiencies:
            if (entry.precision, entry.device_type) == (self.precision, self.device.name):
                term = Term("efficiency", "over", entry.factor, "fitted", f"of {entry.points} whole models in {self.precision}")
                return (term,), ((f"efficiency:{self.precision}", entry.spread),)
        return (), ()

    @cached_property
    def has_published_peaks(self) -> bool:
        """Whether a datasheet or paper states the peak of this precision."""
        return self.precision in self.device.peak_flop_per_s and has_published_peaks(self.profile, self.device)

    def _precision_of(self, kernel: Kernel) -> str:
        return operator_precision(self.precision, kernel.kind, low=kernel.low)

    def _fit_of(self, kernel: Kernel) -> OperatorFit | None:
        return self._fits.get((kernel.kind, kernel.phase, self._precision_of(kernel)))

    @cached_property
    def _fits(self) -> dict[tuple[str, str, str], OperatorFit]:
        """By kind, phase and precision; of several the first."""
        wanted = {self.precision, number_format(self.precision).beside}
        found: dict[tuple[str, str, str], OperatorFit] = {}
        for fit in self.profile.compute.operator_fits:
            if fit.precision in wanted and fit.device_type == self.device.name:
                found.setdefault((fit.kind, fit.phase, fit.precision), fit)
        return found

    def _kernels(self, request: ComputeRequest) -> tuple[Kernel, ...]:
        attention = operator_precision(self.precision, "attention")
        fused = all(("attention", phase, attention) in self._fits for phase in ("forward", "backward"))
        return component_kernels(request, self.precision, self.device.kind, fused_attention=fused)

    def _unknown(self, request: ComputeRequest, kind: str) -> str:
        known = ", ".join(sorted(self.device.peak_flop_per_s)) or "none"
        return (
            f"no cost is known for component {request.component.name!r} ({request.phase}, {request.samples} samples) on "
            f"{self.device.name} in {self.precision}: it was not measured there, and there is no fit for {kind} (precisions of "
            f"the device: {known}); calibrate this model at these samples and precision (`parsim calibrate`)"
        )


def _by_kind(sums: Mapping[tuple[str, Source], Sequence[float]], total_s: float, peak: float | None) -> Terms:
    """One term per kind and source from its seconds, launches, flop and bytes; the largest first.

    `total_s` adds up the kernels in the order of the program. The smallest kind is what the others leave of it (an exact
    difference, as they are at least half of it): adding by kind would round differently.
    """
    parts: list[tuple[str, float, TermOrigin, Detail]] = [
        (kind, seconds, source, _what(kind, (count, flop, moved, flop / seconds, moved / seconds), peak))
        for (kind, source), (seconds, count, flop, moved) in sorted(sums.items(), key=lambda entry: -entry[1][0])
        if seconds
    ]
    if not parts:
        return ()
    others = summed(parts[:-1])
    kind, _, origin, what = parts[-1]
    return (*others, Term(kind, "plus" if others else "start", total_s - folded_s(others), origin, what))


def _what(kind: str, numbers: tuple[float, ...], peak: float | None) -> Detail:
    if kind == "memory_bound" or peak is None:
        return (LAUNCHES, *numbers)
    return (SHARE_OF_PEAK, *numbers, numbers[3] / peak)


def has_published_peaks(profile: Profile, device: DeviceType) -> bool:
    """Whether the device's peaks come from a datasheet or paper. A calibrated machine answers with its measurements only.

    Args:
        profile: with its sources. device: a type of the profile.
    """
    entry = profile.device_types.get(device.name)
    if entry is None:
        return False
    return any(profile.sources[peak.source].kind in ("datasheet", "paper") for peak in entry.peak_flop_per_s.values())


def component_kernels(
    request: ComputeRequest, precision: str, device_kind: str = "cpu", *, fused_attention: bool = False
) -> tuple[Kernel, ...]:
    """All launches of a component's forward or backward (or half of it) on a kind of device, operator by operator.

    Args:
        request: component, phase and samples. precision: such as "fp32". device_kind: a key of `DEVICE_KINDS`.
        fused_attention: attention that was traced as one operator is one launch; else its products and passes over the scores.
    """
    component, phase, samples = request.component, request.phase, request.samples
    if DEVICE_KINDS[device_kind].cuda_launches:
        operators = cuda_operators(component.operators)
        full = has_full_stream(operators)
        forward: Callable[..., tuple[Kernel, ...]] = partial(cuda_forward, full_stream=full)
        backward: Callable[..., tuple[tuple[Kernel, ...], ...]] = partial(cuda_backward_halves, full_stream=full)
    else:
        operators, forward, backward = component.operators, forward_kernels, halved_backward_kernels
    if fused_attention:
        forward, backward = _with_fused_attention(forward, backward)

    def own(operator: Operator) -> str:
        return operator_precision(precision, operator.kind, low=operator.low)

    if phase is Phase.FORWARD:
        return tuple(
            kernel
            for operator in operators
            if operator.function != GRADIENT_SUM
            for kernel in forward(operator, samples, own(operator))
        )
    wanted = (HALVES.index(phase),) if phase in HALVES else range(len(HALVES))
    return tuple(
        kernel
        for number, operator in enumerate(operators)
        for halves in (backward(operator, samples, own(operator), input_gradient=request.input_gradient or number > 0),)
        for half in wanted
        for kernel in halves[half]
    )


def _with_fused_attention(
    forward: Callable[..., tuple[Kernel, ...]], backward: Callable[..., tuple[tuple[Kernel, ...], ...]]
) -> tuple[Callable[..., tuple[Kernel, ...]], Callable[..., tuple[tuple[Kernel, ...], ...]]]:
    """The same functions, with one launch for an attention; its backward belongs to the inputs' half."""

    def fused_forward(operator: Operator, samples: int, precision: str) -> tuple[Kernel, ...]:
        if operator.kind != "attention":
            return forward(operator, samples, precision)
        return (fused_attention_kernel(operator, samples, precision, backward=False),)

    def fused_backward(
        operator: Operator, samples: int, precision: str, *, input_gradient: bool = True
    ) -> tuple[tuple[Kernel, ...], ...]:
        if operator.kind != "attention":
            return backward(operator, samples, precision, input_gradient=input_gradient)
        return (fused_attention_kernel(operator, samples, precision, backward=True),), ()

    return fused_forward, fused_backward
