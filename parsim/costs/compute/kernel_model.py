"""Prices by the formula fitted to published kernels, or by a roofline without a fit.

    t = (sum over kinds of operators of  launches * seconds of one launch) / efficiency

The seconds of a launch are `parsim.costs.compute.operators.kernel_seconds` where its kind has a fit. Elsewhere they are a
roofline: max(flop / (50% of the peak), bytes / (75% of the bandwidth)). The efficiency is the throughput of
whole models over that of their operators, 1 if the profile has none. No launch is below
`parsim.costs.compute.roofline.kernel_roofline_s`.

The host queues one launch after the other, `host.launch_s` each (`Estimate.issue_s`): a component costs the larger of the two.

Leaves out: launch gaps between the kernels of one component, cache reuse across operators, clock changes under load. The
roofline also leaves out the launches themselves, so small kernels are predicted too fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from parsim.costs.compute.cuda_launches import cuda_backward_halves, cuda_forward, cuda_operators, has_full_stream
from parsim.costs.compute.fitted_kernels import fitted_kernel_seconds
from parsim.costs.compute.operator_model import EXTRAPOLATED_SHARE, ComputeRequest, drift_of
from parsim.costs.compute.operators import Kernel, forward_kernels, fused_attention_kernel, halved_backward_kernels
from parsim.costs.compute.roofline import kernel_roofline_s, peak_of
from parsim.costs.estimate import Detail, Estimate, Source, Term, TermOrigin, Terms, folded_s, summed
from parsim.errors import CostError
from parsim.hardware.compute_records import OperatorFit
from parsim.hardware.device import DeviceType
from parsim.hardware.device_kinds import DEVICE_KINDS
from parsim.hardware.profile import Profile
from parsim.model.component import GRADIENT_SUM, Operator
from parsim.model.number_formats import number_format, operator_precision
from parsim.work import Phase

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
    """Implements `parsim.costs.compute.operator_model.OperatorModel`."""

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
