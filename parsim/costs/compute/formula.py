"""Prices by formulas fitted to published kernels, or by a roofline without a fit.

    t = (sum over kinds of operators of  launches * seconds of one launch) / efficiency

The seconds of a launch are those of a formula of `FORMULAS` where its kind has a fit. Elsewhere they are a roofline:
max(flop / (50% of the peak), bytes / (75% of the bandwidth)). The efficiency is the throughput of whole models over that of
their operators, 1 if the profile has none. The host queues one launch after the other, `host.launch_s` each
(`Estimate.issue_s`): a component costs the larger of the two.

**saturation**: a matrix product of `problems` independent (rows x depth) by (depth x columns), and a convolution seen as one
(its filter `taps` repeat it), take

    t = floor_s + (c^4 + m^4)^(1/4)
    c = 2 taps (depth + half_depth) (problems (rows + half_rows) (columns + half_columns) + wave_outputs)
          / (peak_flop_per_s * efficiency_<family>)   [* strided_factor]
    m = size_bytes / (memory_bandwidth_bytes_per_s * bandwidth_fraction)

so that a size of `half_x` halves the efficiency, a product with fewer outputs than `wave_outputs` does not fill the device,
and t grows with every size within a family. Families: "dense" (matmul, 1x1 filters), "3x3" (3x3 at stride 1, where Winograd
kernels exceed the peak's count of multiplications), "other". Memory-bound launches have c = 0. A convolution's forward has rows
= images x output pixels, columns = output channels and depth = input channels. Its backward_input exchanges the channels. Its
backward_weight has the channels as rows and columns, and the pixels as depth.

**tiles**: the same product is cut into output tiles of a x b, and each tile's depth into s pieces (split-K). With S
multiprocessors and the rate R = utilisation * peak_flop_per_s,

    tiles = problems * ceil(rows / a) * ceil(columns / b) * s     x = tiles / S
    waves = max(1, x + quantisation * (ceil(x) - x))           a last wave that is not full takes a part of a full one
    tile  = 2 (depth / s + depth_overhead) * (a b + operand_overhead (a + b)) * S / R
    c     = waves * tile                                       arithmetic
    m     = bytes / (bandwidth_fraction * memory bandwidth)    every operand and the result once
    r     = split_cost * s * 8 bytes * outputs / bandwidth     partial sums of split-K; 0 for s = 1
    t     = floor_s + min over (a, b, s) of  (c^p + m^p)^(1/p) + r

`depth_overhead` is what a tile costs beside its depth (prologue, epilogue), in units of depth; `operand_overhead` what its
edges cost, so that small tiles are slower per output. The library is taken to choose the best tile. `utilisation` is that of a
GPU which computes without a pause, at the clock that its power limit leaves. A short run after a pause is faster: the fit knows
that (`burst_gain`), the price does not use it.

**fused_attention**: blocks of queries on multiprocessors, each over the keys that it sees. Forward, over `problems` heads of q
queries and k keys with `depth` channels (and `value_depth` of the values):

    blocks = problems * ceil(q / 128)         x = blocks / S      waves = x + quantisation * (ceil(x) - x)
    score  = passes * (2 (depth + value_depth) + softmax_flop)    of one query and one key
    block  = 128 * (keys + key_overhead) * score * S / R          keys: k; half of k and half a block where causal
    c      = max(waves * block, the longest block)                the longest one sees every key
    t      = floor_s + (c^p + m^p)^(1/p)                          m: queries, keys, values and outputs once

`softmax_flop` is the cost of the exponential of one score, in units of the arithmetic that runs meanwhile. It explains why
heads of 64 channels reach less of the peak than those of 128. The backward makes five products where the forward makes two,
so its `passes` is 2.5, with coefficients of its own. A causal mask skips the scores it hides, in both.

**The lower bound** by arithmetic and memory, below which no price from operators is:  t >= max(flop / peak, bytes / bandwidth).
A convolution whose filters have several taps needs fewer multiplications than its flop count says. A Winograd kernel makes 4 x
4 outputs of a 3 x 3 filter with 36 multiplications instead of 144, so a quarter of the flop is its bound. A strided one is a
sum of convolutions without stride, one per phase, and has the same bound. Arithmetic of operators other than products
(transforms, decompositions) cannot use matrix units: its peak is that of fp32. Times on a calibrated machine may be faster than
its memory bandwidth, because arrays are in a cache; only bytes beyond `CACHED_BYTES` per operator count there.

Leaves out: launch gaps between the kernels of one component, cache reuse across operators, clock changes under load, operands
whose rows are not aligned, the library's wrong choices, and windows, dropout and grouped heads of fused attention. The roofline
also leaves out the launches themselves, so small kernels are predicted too fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from parsim.costs.compute.launches import (
    AS_TRACED,
    BIAS_SUM,
    COPY,
    ComputeRequest,
    Halves,
    Launch,
    Lowering,
    cuda_lowering,
    cuda_operators,
    element_bytes,
    launches_of,
    operator_launches,
    operator_times,
    unfused_attention,
    unfused_attention_backward,
)
from parsim.costs.estimate import Detail, Estimate, Source, Term, TermOrigin, Terms, folded_s, summed
from parsim.errors import CostError
from parsim.hardware.devices import DEVICE_KINDS, DeviceType
from parsim.hardware.profile import Profile
from parsim.hardware.records import OperatorFit
from parsim.model.component import BY_EXPERT, Operator
from parsim.model.formats import number_format, operator_precision
from parsim.work import Phase

Array = NDArray[np.float64]

FAMILIES = ("dense", "3x3", "other")
SHARPNESS = 4.0

TILES: Array = np.array(
    [(256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64)], dtype=np.float64
)
SPLITS: Array = np.array([1, 2, 4, 8, 16], dtype=np.float64)
PARTIAL_SUM_BYTES = 8.0
"""Of an output and a piece of depth: four bytes written and read."""
TILE_COEFFICIENTS = (
    "utilisation",
    "operand_overhead",
    "depth_overhead",
    "quantisation",
    "floor_s",
    "bandwidth_fraction",
    "split_cost",
    "sharpness",
)

BLOCK = 128.0
BACKWARD_PASSES = 2.5
"""Products of the backward (scores again, and four gradients) over those of the forward."""
ATTENTION_COEFFICIENTS = ("utilisation", "softmax_flop", "key_overhead", "quantisation", "floor_s", "bandwidth_fraction")

WINOGRAD_REDUCTION = 4.0
CACHED_BYTES = 64e6
"""At least the last cache of the devices that are calibrated here: 32 to 50 MB."""

FIT_EXTRAPOLATION_SIGMA_PER_DOUBLING = 0.02
ROOFLINE_COMPUTE_EFFICIENCY = 0.5
ROOFLINE_BANDWIDTH_EFFICIENCY = 0.75
ROOFLINE_SIGMA = 0.4
"""Assumed for operator kinds without a fit."""

IMPLICIT_SIGMA = 0.1
"""Assumed beside the fit of products where it prices convolutions: measured ones in fp32 lie 0.94 (A100 PCIe) and 1.33 (T4) of
it off in the middle (gpu_ops conv.csv, NeuSight, 218 and 208 shapes)."""

HALF_EXPERT_LAUNCHES, LOW_EXPERT_LAUNCHES = 2.0, 8.0
"""Launches of the host for each expert of a rank and product, in 16 bits and in 8 or 4: Transformer Engine's GroupedLinear goes
from expert to expert (casts, splits, products). Without CUDA graphs and with 16 experts on a rank of B200 and B300, a layer of
Qwen3 takes 9.2, 11.4, 16.3, 16.3 and 17.0 ms of a microbatch, of one sample or of two (Megatron Bridge 25.11 to 26.04). 8 make
11 ms; 2 are assumed."""

DEFAULT_DRIFT_SIGMA = 0.05
"""Assumed relative spread of a machine from run to run where the profile states none."""
EXTRAPOLATED_SHARE = 0.1
"""An estimate from operators counts as extrapolated when more than this share of it lies outside the fitted sizes."""

LAUNCHES = "{:.0f} launches of {:.3g} flop and {:.3g} B in all, at {:.3g} flop/s and {:.3g} B/s"
"""What a kind of operator does and how fast, as the detail of its term."""
SHARE_OF_PEAK = LAUNCHES + ": {:.0%} of peak"
"""The same of arithmetic on a device whose peak is known."""


# --- the formulas -----------------------------------------------------------------------------------------------------


def saturation_s(launch: Launch, coefficients: Mapping[str, float]) -> float:
    """Seconds of one launch by the formula "saturation" of this module, its coefficients in SI units.

    Raises CostError for a missing coefficient.
    """
    try:
        bandwidth = coefficients["memory_bandwidth_bytes_per_s"] * coefficients["bandwidth_fraction"]
        memory = launch.size_bytes / bandwidth
        if launch.flop == 0 or fit_key(launch)[0] == "memory_bound":
            return coefficients["floor_s"] + memory
        problems, rows, columns, depth, taps = product_of(launch)
        outputs = (
            problems * (rows + coefficients["half_rows"]) * (columns + coefficients["half_columns"])
            + coefficients["wave_outputs"]
        )
        rate = coefficients["peak_flop_per_s"] * coefficients[f"efficiency_{family_of(launch)}"]
        compute = 2.0 * taps * (depth + coefficients["half_depth"]) * outputs / rate
        if launch.strided:
            compute *= coefficients["strided_factor"]
    except KeyError as error:
        raise CostError(
            f"the fit for {launch.kind} {launch.phase} has no coefficient {error}; refit the profile's operator points"
        ) from error
    larger = max(compute, memory)
    ratio: float = min(compute, memory) / larger
    return coefficients["floor_s"] + larger * float((1.0 + ratio**SHARPNESS) ** (1.0 / SHARPNESS))


def product_of(launch: Launch) -> tuple[float, float, float, float, float]:
    """Problems, rows, columns, depth and taps of a product, and of a convolution or attention seen as one.

    The fits list the operands of a linear layer's weight gradient in the order of its forward: depth x columns.
    """
    sizes = dict(launch.sizes)
    if launch.kind == "attention":
        return sizes["problems"], sizes["queries"], sizes["keys"], sizes["depth"], 1.0
    if launch.kind == "matmul":
        rows, columns = sizes["rows"], sizes["columns"]
        if launch.phase == "backward_weight":
            rows, columns = columns, rows
        return sizes["problems"], rows, columns, sizes["depth"], 1.0
    pixels, inputs, outputs = sizes["images"] * sizes["pixels_out"], sizes["inputs"], sizes["outputs"]
    rows, columns, depth = {
        "forward": (pixels, outputs, inputs),
        "backward_input": (pixels, inputs, outputs),
        "backward_weight": (outputs, inputs, pixels),
    }[launch.phase]
    return sizes["groups"], rows, columns, depth, sizes["taps"]


def family_of(launch: Launch) -> str:
    """One of FAMILIES."""
    taps = dict(launch.sizes).get("taps", 1)
    return "dense" if taps == 1 else "3x3" if taps == 9 and not launch.strided else "other"


def tile_seconds(
    rows: Array,
    columns: Array,
    depth: Array,
    problems: Array,
    size_bytes: Array,
    coefficients: Mapping[str, float],
) -> Array:
    """Seconds of products by the formula "tiles" of this module, for several shapes at once: float64 [shapes].

    Args:
        rows, columns, depth, problems: sizes and the number of independent products; float64 [shapes].
        size_bytes: operands and result, float64 [shapes].
        coefficients: `TILE_COEFFICIENTS`, and `multiprocessors`, `peak_flop_per_s`, `memory_bandwidth_bytes_per_s`.
    """
    compute, memory, partial_sums = tile_parts(rows, columns, depth, problems, size_bytes, coefficients)
    seconds = _joined(compute, memory, coefficients["sharpness"]) + partial_sums
    best: Array = coefficients["floor_s"] + seconds.min(axis=0)
    return best


def _joined(compute: Array, memory: Array, p: float) -> Array:
    """(c^p + m^p)^(1/p), without leaving the range of floats."""
    larger = np.maximum(compute, memory)
    joined: Array = larger * (1.0 + (np.minimum(compute, memory) / larger) ** p) ** (1.0 / p)
    return joined


def tile_parts(
    rows: Array, columns: Array, depth: Array, problems: Array, size_bytes: Array, coefficients: Mapping[str, float]
) -> tuple[Array, Array, Array]:
    """c (of the best tile), m and r of the formula, each float64 [splits, shapes] or broadcast to it.

    m and r do not depend on the tile, so the tile with the least c is the best for every split. Arguments as for
    `tile_seconds`.
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
    """Seconds of attention by the formula "fused_attention" of this module, for several shapes at once: float64 [shapes].

    Args:
        queries, keys, depth, value_depth: per head, float64 [shapes]. problems: heads of all samples.
        causal: 1 where a query sees no later key, else 0. size_bytes: arrays read and written.
        coefficients: `ATTENTION_COEFFICIENTS`, and `multiprocessors`, `peak_flop_per_s`, `memory_bandwidth_bytes_per_s`.
        backward: five products instead of two.
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
    seconds: Array = coefficients["floor_s"] + _joined(compute, memory, SHARPNESS)
    return seconds


def _tiles_s(launch: Launch, coefficients: Mapping[str, float]) -> float:
    """A convolution is its implicit product: the taps of its filter lengthen the depth, or the columns of a weight gradient."""
    problems, rows, columns, depth, taps = product_of(launch)
    if launch.phase == "backward_weight":
        columns *= taps
    else:
        depth *= taps
    m, n, k, b, size_bytes = np.array([rows, columns, depth, problems, launch.size_bytes])[:, None]
    return float(tile_seconds(m, n, k, b, size_bytes, coefficients)[0])


def _attention_s(launch: Launch, coefficients: Mapping[str, float]) -> float:
    numbers = [*product_of(launch)[:4], launch.function == "causal", launch.size_bytes]
    problems, queries, keys, depth, causal, size_bytes = np.array(numbers, dtype=np.float64)[:, None]
    backward = launch.phase == "backward"
    seconds = attention_seconds(queries, keys, depth, depth, problems, causal, size_bytes, coefficients, backward=backward)
    return float(seconds[0])


FORMULAS: Mapping[str, Callable[[Launch, Mapping[str, float]], float]] = {
    "saturation": saturation_s,
    "tiles": _tiles_s,
    "fused_attention": _attention_s,
}
"""By the form of a fit (`OperatorFit.form`): the seconds of one launch from its coefficients."""


def fit_key(launch: Launch) -> tuple[str, str]:
    """Kind and phase of the fit that prices a launch: a gather is memory-bound, and products in any direction are alike."""
    if launch.kind in ("matmul", "memory_bound", "embedding"):
        return "matmul" if launch.kind == "matmul" else "memory_bound", "forward"
    return launch.kind, launch.phase


# --- the lower bound --------------------------------------------------------------------------------------------------


def peak_of(launch: Launch, device: DeviceType, precision: str) -> float | None:
    """flop/s that the launch could reach at most; None where the device has no peak of this precision."""
    peaks = device.peak_flop_per_s
    if fit_key(launch)[0] == "memory_bound" and "fp32" in peaks:
        return min(peaks["fp32"], peaks.get(precision, peaks["fp32"]))
    return peaks.get(precision)


def arithmetic_s(launch: Launch, device: DeviceType, precision: str) -> float:
    """Least seconds of one launch for its multiplications."""
    peak = peak_of(launch, device, precision)
    if peak is None or not launch.flop:
        return 0.0
    reduced = launch.kind == "convolution" and dict(launch.sizes)["taps"] > 1
    return launch.flop / (peak * (WINOGRAD_REDUCTION if reduced else 1.0))


def kernel_roofline_s(launch: Launch, device: DeviceType, precision: str) -> float:
    """Least seconds of one launch."""
    return max(arithmetic_s(launch, device, precision), launch.size_bytes / device.memory_bandwidth_bytes_per_s)


def component_roofline_s(request: ComputeRequest, device: DeviceType, precision: str) -> float:
    """Least seconds of a component on a device with caches: of all its arithmetic, or of what no cache holds.

    Half a backward moves half of its bytes. Of causal attention half of the queries count: a fused kernel leaves out the scores
    that the mask hides.
    """
    operators = request.component.operators
    if device.kind == "cuda":
        operators = cuda_operators(operators)

    def without_mask(operator: Operator) -> Operator:
        if operator.kind != "attention" or operator.function != "causal":
            return operator
        shape = tuple((name, max(1, size // 2) if name == "q" else size) for name, size in operator.shape)
        return replace(operator, shape=shape)

    masked = replace(request, component=replace(request.component, operators=tuple(map(without_mask, operators))))
    launches = component_kernels(masked, precision, device.kind)
    arithmetic = sum(launch.count * arithmetic_s(launch, device, precision) for launch in launches)
    scale = element_bytes(precision) / 4

    def bytes_beyond(operator: Operator) -> float:
        moved = operator.activation_bytes * operator_times(operator, request.samples) + operator.parameter_bytes
        return operator.count * max(0.0, scale * moved - CACHED_BYTES)

    beyond = sum(map(bytes_beyond, operators))
    share = 1.0 if request.phase in (Phase.FORWARD, Phase.BACKWARD) else 0.5
    return max(arithmetic, share * beyond / device.memory_bandwidth_bytes_per_s)


# --- the price of a component -----------------------------------------------------------------------------------------


class OperatorModel(Protocol):
    """Prices components from their operators, on one type of device in one precision.

    Two implementations: `KernelModel` (formulas fitted to published kernels, or a roofline) and
    `parsim.costs.compute.surfaces.LaunchModel` (surfaces measured on the machine, and what components add to them).
    """

    def seconds(self, request: ComputeRequest) -> float:
        """Seconds for comparing parts of one component; a common factor may be left out. Raises CostError without a price."""

    def estimate(self, request: ComputeRequest) -> Estimate:
        """The price, its terms, and its uncertain parameters. Raises CostError where an operator has no price."""


class KernelPrice(NamedTuple):
    """Attributes: seconds: of all occurrences. sigma: relative. outside: of the fitted range."""

    seconds: float
    sigma: float
    source: Source
    outside: bool


class PricedLaunch(NamedTuple):
    """Attributes: kind, phase: `fit_key` of the launch. least_s: of all occurrences, by arithmetic and memory, where asked."""

    launch: Launch
    kind: str
    phase: str
    price: KernelPrice
    least_s: float


@dataclass(frozen=True)
class KernelModel:
    """An `OperatorModel` by the formulas of this module."""

    profile: Profile
    device: DeviceType
    precision: str

    def seconds(self, request: ComputeRequest) -> float:
        """Seconds without the efficiency of whole models; a roofline also serves profiles without published peaks."""
        return sum(priced.price.seconds for priced in self._launches(request))

    def estimate(self, request: ComputeRequest) -> Estimate:
        """One term per kind of operator and source, then the efficiency. Raises CostError for an operator without a price."""
        if not self.has_published_peaks and not self._fits:
            raise CostError(self._unknown(request, "any kind of operator"))
        drift = drift_of(self.profile)
        sums: dict[tuple[str, Source], list[float]] = {}  # seconds, launches, flop, bytes
        spreads: dict[str, float] = {}
        total = outside_s = 0.0
        launches = self._launches(request)
        for launch, kind, phase, (seconds, sigma, source, outside), _ in launches:
            if not self.has_published_peaks and self._fit_of(launch) is None:
                raise CostError(self._unknown(request, f"{kind} {phase}"))
            numbers = sums.setdefault((kind, source), [0.0, 0.0, 0.0, 0.0])
            total += seconds
            numbers[0] += seconds
            numbers[1] += launch.count
            numbers[2] += launch.count * launch.flop
            numbers[3] += launch.count * launch.size_bytes
            spreads[kind] = spreads.get(kind, 0.0) + sigma * seconds
            outside_s += seconds if outside else 0.0
        terms = _by_kind(sums, total, self.device.peak_flop_per_s.get(self.precision))
        if not total:
            return Estimate.of(terms, source="fitted", parameters=(drift,), detail="launches no kernel")
        by_source: dict[Source, float] = {}
        for (_, source), (seconds, *_) in sums.items():
            by_source[source] = by_source.get(source, 0.0) + seconds
        efficiency, spread = self.efficiency
        shares = ", ".join(f"{by_source[name] / total:.0%} {name}" for name in sorted(by_source))
        if self._may_undercut:
            least_s = sum(priced.least_s for priced in launches)
            efficiency = (*efficiency, Term("roofline", "at least", least_s, "published"))
        host_s = 0.0 if self.profile.host is None else self.profile.host.launch_s
        return Estimate.of(
            (*terms, *efficiency),
            source=max(sorted(by_source), key=lambda name: by_source[name]),
            parameters=(drift, *spread, *((f"operator:{kind}", spreads[kind] / total) for kind in sorted(spreads))),
            detail=f"sum of operators: {shares}",
            extrapolated=outside_s > EXTRAPOLATED_SHARE * total,
            issue_s=host_s * (sum(count for _, count, _, _ in sums.values()) + self._launches_by_expert(request)),
        )

    def _launches_by_expert(self, request: ComputeRequest) -> float:
        """Launches beside one for each grouped product: the host goes from expert to expert."""
        half = operator_precision(self.precision, "matmul") == operator_precision(self.precision, "matmul", low=False)
        each = HALF_EXPERT_LAUNCHES if half else LOW_EXPERT_LAUNCHES
        products = 1 if request.phase in (Phase.FORWARD, Phase.RECOMPUTE) else 2
        experts = (dict(op.shape).get("problems", 1) for op in request.component.operators if op.function == BY_EXPERT)
        return float(products * each * sum(experts))

    def price(self, launch: Launch) -> KernelPrice:
        """By the fit of its kind and phase, else by the roofline."""
        fit, precision = self._fit_of(launch), self._precision_of(launch)
        memory_bound = fit_key(launch)[0] == "memory_bound"
        peak = peak_of(launch, self.device, precision)
        arithmetic = 0.0 if peak is None or not launch.flop else launch.flop / (peak * ROOFLINE_COMPUTE_EFFICIENCY)
        if fit is None:
            memory = launch.size_bytes / (self.device.memory_bandwidth_bytes_per_s * ROOFLINE_BANDWIDTH_EFFICIENCY)
            return KernelPrice(launch.count * max(arithmetic, memory), ROOFLINE_SIGMA, "published", False)
        try:
            seconds = FORMULAS[fit.form](launch, fit.coefficients)
        except KeyError as error:
            raise CostError(
                f"the {fit.form} fit for {fit.kind} {fit.phase} has no coefficient {error}; fit it again"
            ) from error
        if memory_bound and launch.flop > 0 and arithmetic > seconds:
            return KernelPrice(launch.count * arithmetic, ROOFLINE_SIGMA, "published", False)
        sigma = fit.relative_sigma
        if launch.kind == "convolution" and fit.kind != "convolution":
            seconds += self._layout_s(launch, precision)
            sigma += IMPLICIT_SIGMA
        doublings = 0.0
        if launch.flop > 0 and fit.max_flop > 0 and not memory_bound:
            doublings = max(0.0, math.log2(launch.flop / fit.max_flop), math.log2(max(fit.min_flop, 1.0) / launch.flop))
        sigma += FIT_EXTRAPOLATION_SIGMA_PER_DOUBLING * doublings
        least = kernel_roofline_s(launch, self.device, precision)
        if not launch.aligned and "fp32" in self.device.peak_flop_per_s:
            least = max(least, launch.flop / (self.device.peak_flop_per_s["fp32"] * ROOFLINE_COMPUTE_EFFICIENCY))
        return KernelPrice(launch.count * max(seconds, least), sigma, "fitted", doublings > 0)

    def _layout_s(self, launch: Launch, precision: str) -> float:
        """Seconds to bring a convolution's arrays into the order that matrix units read, and its result back.

        Each is read and written once more: cuDNN's kernels nchwToNhwc and nhwcToNchw. 0 for arrays in that order, and where no
        matrix unit computes (the peak is that of fp32).
        """
        peaks = self.device.peak_flop_per_s
        if launch.channels_last or peaks.get(precision, 0.0) <= peaks.get("fp32", 0.0):
            return 0.0
        moved = Launch(kind="memory_bound", function=COPY, phase="forward", sizes=(), size_bytes=2.0 * launch.size_bytes)
        return self.price(moved).seconds

    @cached_property
    def efficiency(self) -> tuple[tuple[Term, ...], tuple[tuple[str, float], ...]]:
        """The term by which the profile divides seconds from operators, and its spread as a cost parameter; none, none."""
        for fit in self.profile.compute.efficiencies:
            if (fit.precision, fit.device_type) == (self.precision, self.device.name):
                term = Term("efficiency", "over", fit.factor, "fitted", f"of {fit.points} whole models in {self.precision}")
                return (term,), ((f"efficiency:{self.precision}", fit.spread),)
        return (), ()

    @cached_property
    def has_published_peaks(self) -> bool:
        """Whether a datasheet or paper states the peak of this precision."""
        return self.precision in self.device.peak_flop_per_s and has_published_peaks(self.profile, self.device)

    def _precision_of(self, launch: Launch) -> str:
        return operator_precision(self.precision, launch.kind, low=launch.low)

    def _fit_of(self, launch: Launch) -> OperatorFit | None:
        """That of its kind and phase; a convolution over channels last, or without one, takes that of products by tiles."""
        precision = self._precision_of(launch)
        fit = self._fits.get((*fit_key(launch), precision))
        if launch.kind == "convolution" and (fit is None or launch.channels_last):
            product = self._fits.get(("matmul", "forward", precision))
            return product if product is not None and product.form == "tiles" else fit
        return fit

    @cached_property
    def _fits(self) -> dict[tuple[str, str, str], OperatorFit]:
        """By kind, phase and precision; of several the first."""
        precisions = {self.precision, number_format(self.precision).beside}
        fits: dict[tuple[str, str, str], OperatorFit] = {}
        for fit in self.profile.compute.operator_fits:
            if fit.precision in precisions and fit.device_type == self.device.name:
                fits.setdefault((fit.kind, fit.phase, fit.precision), fit)
        return fits

    def _launches(self, request: ComputeRequest) -> list[PricedLaunch]:
        """Those of `component_kernels`. Operators that are the same are lowered and priced once."""
        operators, lowering = _lowered(request.component.operators, self.device.kind, self._fuses_attention)
        known = self._priced.setdefault((request.phase, request.samples, lowering), {})
        launches: list[PricedLaunch] = []
        for number, operator in enumerate(operators):
            key = operator, request.input_gradient or number > 0
            if key not in known:
                made = operator_launches(
                    operator, request.phase, request.samples, self.precision, lowering, input_gradient=key[1]
                )
                known[key] = tuple([self._priced_launch(launch) for launch in made if launch.function != BIAS_SUM])
            launches += known[key]
        return launches

    def _priced_launch(self, launch: Launch) -> PricedLaunch:
        least_s = kernel_roofline_s(launch, self.device, self._precision_of(launch)) if self._may_undercut else 0.0
        return PricedLaunch(launch, *fit_key(launch), self.price(launch), launch.count * least_s)

    @cached_property
    def _may_undercut(self) -> bool:
        """Whether whole models were faster than their kernels: then the roofline bounds their price."""
        terms, _ = self.efficiency
        return bool(terms) and terms[0].value > 1

    @cached_property
    def _priced(self) -> dict[tuple[Phase, int, Lowering], dict[tuple[Operator, bool], tuple[PricedLaunch, ...]]]:
        """By operator, and by whether something asks for the gradient of its input."""
        return {}

    @cached_property
    def _fuses_attention(self) -> bool:
        precision = operator_precision(self.precision, "attention")
        return all(("attention", phase, precision) in self._fits for phase in ("forward", "backward"))

    def _unknown(self, request: ComputeRequest, kind: str) -> str:
        precisions = ", ".join(sorted(self.device.peak_flop_per_s)) or "none"
        return (
            f"no cost is known for component {request.component.name!r} ({request.phase}, {request.samples} samples) on "
            f"{self.device.name} in {self.precision}: it was not measured there, and there is no fit for {kind} (precisions of "
            f"the device: {precisions}); calibrate this model at these samples and precision (`parsim calibrate`)"
        )


def _by_kind(sums: Mapping[tuple[str, Source], Sequence[float]], total_s: float, peak: float | None) -> Terms:
    """One term per kind and source from its seconds, launches, flop and bytes; the largest first.

    `total_s` adds up the launches in the order of the program. The smallest kind is what the others leave of it (an exact
    difference, as they are at least half of it): adding by kind would round differently.
    """

    def detail(kind: str, seconds: float, count: float, flop: float, moved: float) -> Detail:
        numbers = (count, flop, moved, flop / seconds, moved / seconds)
        return (LAUNCHES, *numbers) if kind == "memory_bound" or peak is None else (SHARE_OF_PEAK, *numbers, numbers[3] / peak)

    parts: list[tuple[str, float, TermOrigin, Detail]] = [
        (kind, numbers[0], source, detail(kind, *numbers))
        for (kind, source), numbers in sorted(sums.items(), key=lambda entry: -entry[1][0])
        if numbers[0]
    ]
    if not parts:
        return ()
    others = summed(parts[:-1])
    kind, _, origin, what = parts[-1]
    return (*others, Term(kind, "plus" if others else "start", total_s - folded_s(others), origin, what))


def has_published_peaks(profile: Profile, device: DeviceType) -> bool:
    """Whether the device's peaks come from a datasheet or paper. A calibrated machine answers with its measurements only."""
    part = profile.device_types.get(device.name)
    peaks = () if part is None else part.peak_flop_per_s.values()
    return any(profile.sources[peak.source].kind in ("datasheet", "paper") for peak in peaks)


def drift_of(profile: Profile) -> tuple[str, float]:
    """Name and relative sigma of the cost parameter that all computation of a machine shares (assumed without a measured
    noise)."""
    return "drift", DEFAULT_DRIFT_SIGMA if profile.noise is None else profile.noise.drift_sigma


def component_kernels(
    request: ComputeRequest, precision: str, device_kind: str = "cpu", *, fused_attention: bool = False
) -> tuple[Launch, ...]:
    """All launches of a component's forward or backward (or half of it) on a kind of device that formulas price.

    Args:
        device_kind: a key of `DEVICE_KINDS`.
        fused_attention: attention that was traced as one operator is one launch; else its products and passes over the scores.
    """
    operators, lowering = _lowered(request.component.operators, device_kind, fused_attention)
    launches = launches_of(
        operators, request.phase, request.samples, precision, lowering, input_gradient=request.input_gradient
    )
    return tuple(launch for launch in launches if launch.function != BIAS_SUM)


@lru_cache(maxsize=4096)
def _lowered(operators: tuple[Operator, ...], device_kind: str, fused_attention: bool) -> tuple[tuple[Operator, ...], Lowering]:
    """The operators that a kind of device launches, and how."""
    lowering = AS_TRACED
    if DEVICE_KINDS[device_kind].cuda_launches:
        operators = cuda_operators(operators)
        lowering = cuda_lowering(operators)
    return operators, lowering if fused_attention else _unfused(lowering)


@cache
def _unfused(fused: Lowering) -> Lowering:
    """A lowering whose attention that was traced as one operator is its products and passes over the scores."""

    def forward(operator: Operator, samples: int, precision: str) -> tuple[Launch, ...]:
        lower = unfused_attention if operator.kind == "attention" else fused.forward
        return lower(operator, samples, precision)

    def backward(operator: Operator, samples: int, precision: str, *, input_gradient: bool = True) -> Halves:
        lower = unfused_attention_backward if operator.kind == "attention" else fused.backward
        return lower(operator, samples, precision, input_gradient=input_gradient)

    return Lowering(forward, backward)
