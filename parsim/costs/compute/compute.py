"""Seconds of a computation on one device: measured where it was measured, else from fitted operators, else a roofline.

Three sources, never mixed silently:
    measured   the profile holds this component (by fingerprint), phase, device type and precision; between two measured
               sample counts the time is interpolated linearly. A shard has a fingerprint of its own; where it was not
               measured, but the whole or a larger shard of it was, its time is that times the ratio the operators give.
    fitted     the sum over the component's operators of the fitted kernel times: by surfaces measured on this machine and what
               whole components were seen to add (`parsim.costs.compute.surfaces`, `.composition`); else by the formula
               fitted to
               published kernels (`parsim.costs.compute.operators`), over the efficiency that whole models were found to have
               on such a device, where the profile holds one.
    published  an operator kind without a fit, on a device whose peaks come from a datasheet or paper: a roofline at a stated
               efficiency and a large uncertainty.

A shard's time from that of a larger one keeps what does not divide (launches, uncut operators) as far as the operator model
knows it: without fits, the roofline has no launches, so shards of small components come out too fast.

Leaves out: launch gaps between the kernels of one component, cache reuse across operators, clock changes under load.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from statistics import median
from typing import NamedTuple

import numpy as np

from parsim.costs.compute.composition import component_parts, composed_estimate, composed_s, composition_of
from parsim.costs.compute.cuda_launches import cuda_backward_halves, cuda_forward, cuda_operators, has_full_stream
from parsim.costs.compute.interpolation import interpolate_s
from parsim.costs.compute.kernel_price import efficiency_of, fit_for, has_published_peaks, price_kernel
from parsim.costs.compute.operators import Kernel, forward_kernels, halved_backward_kernels
from parsim.costs.compute.surfaces import SurfaceModel, surface_models
from parsim.costs.estimate import Estimate, Source
from parsim.errors import CostError, near_matches
from parsim.hardware.compute_records import ComponentPoint, OptimizerPoint
from parsim.hardware.device import Device
from parsim.hardware.profile import Profile
from parsim.model.component import Component
from parsim.model.number_formats import number_format
from parsim.model.shard.narrow import narrow
from parsim.units import format_seconds
from parsim.work import Compute, OptimizerStep, Phase

DEFAULT_DRIFT_SIGMA = 0.05
"""Assumed relative spread of a machine from run to run where the profile states none."""

MIN_MEASURED_SIGMA = 0.02
INTERPOLATION_SIGMA = 0.03
EXTRAPOLATION_SIGMA_PER_DOUBLING = 0.10

SHARD_SIGMA_PER_DOUBLING = 0.25
"""Of a shard's time taken from that of one twice as large. By the roofline, against 232 measured halves of components of six
small models at 4 and 16 samples on a busy 2-core virtual machine (2026-11-21): standard deviation 27%, median 18% too fast;
where the whole takes more than 1 ms, 23% and 12%."""

HALVES = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
HALF_SIGMA = 0.2
"""Assumed relative spread of half a backward taken from the whole one by operators: halves have not been measured alone."""

EXTRAPOLATED_SHARE = 0.1
"""An estimate from operators counts as extrapolated when more than this share of it lies outside the fitted sizes."""


FOREACH_ACCESSES_PER_ELEMENT: Mapping[str, int] = {"sgd": 4, "sgd_momentum": 9, "adam": 19, "adamw": 21}
"""4-byte reads and writes of torch's foreach optimizers, operation by operation, the zeroing of the gradient (1) included.
SGD p += g: 3. Momentum m *= mu: 2, m += g: 3, p += m: 3. Adam lerp of m: 3, v *= b: 2, v += g g: 3, sqrt, / and + eps: 6,
p += m / sqrt(v): 4. AdamW p *= 1 - wd: 2 more."""


Surfaces = Mapping[tuple[str, str], SurfaceModel]
"""By device type and precision."""


class MeasuredWork(NamedTuple):
    """What a ComponentPoint was measured on."""

    fingerprint: str
    phase: str
    device_type: str
    precision: str


def points_by_work(profile: Profile) -> dict[MeasuredWork, list[ComponentPoint]]:
    """The profile's measured components, ready to be looked up."""
    found: dict[MeasuredWork, list[ComponentPoint]] = {}
    for point in profile.compute.components:
        key = MeasuredWork(point.fingerprint, point.phase, point.device_type, point.precision)
        found.setdefault(key, []).append(point)
    return found


def estimate_compute(
    work: Compute,
    component: Component,
    device: Device,
    profile: Profile,
    precision: str,
    ranks_active: int | None = None,
    *,
    input_gradient: bool = True,
    points: Mapping[MeasuredWork, list[ComponentPoint]] | None = None,
    surfaces: Surfaces | None = None,
) -> Estimate:
    """Seconds of `component`, or of one of `work.ways` shards of it, forward or backward over `work.samples` samples.

    Args:
        component: the whole one, also where `work` asks for a shard of it.
        ranks_active: how many ranks of the machine compute at once; measurements taken under that load are preferred, else
            those under the heaviest load.
        input_gradient: False for a component whose inputs want no gradient (the model's first one), so that the backward of
            its first operator computes the gradient of the weight alone. A measurement contains that already.
        points, surfaces: `points_by_work(profile)` and `surface_models(profile)` for whoever asks often; None: made here.

    Raises:
        CostError: nothing measured, fitted or published covers it. ModelError: the component has no such shard.
    """
    if work.samples < 1 or work.phase is Phase.OPTIMIZER:
        raise CostError(
            f"a component computes forward or backward over >= 1 sample, got {work.component!r} {work.phase} over "
            f"{work.samples}; an optimizer step is priced by estimate_optimizer"
        )
    part = narrow(component, work.rule, work.ways)
    points = points_by_work(profile) if points is None else points
    surfaces = surface_models(profile) if surfaces is None else surfaces
    if work.phase in HALVES:
        whole = replace(work, phase=Phase.BACKWARD)
        known = estimate_compute(
            whole,
            component,
            device,
            profile,
            precision,
            ranks_active,
            input_gradient=input_gradient,
            points=points,
            surfaces=surfaces,
        )
        return (
            _half(known, work, part, device, profile, precision, input_gradient, surfaces)
            if known.source == "measured"
            else (_from_operators(work, part, device, profile, precision, input_gradient, surfaces))
        )
    for ways in (ways for ways in range(work.ways, 0, -1) if work.ways % ways == 0):
        base = narrow(component, work.rule, ways)
        found = points.get(MeasuredWork(base.fingerprint, work.phase.value, device.type.name, precision))
        if found:
            measured = _measured(work, base, found, profile, ranks_active)
            if ways == work.ways:
                return measured
            share = _share(work, part, base, device, profile, precision, input_gradient, surfaces)
            return _scaled(measured, share, work.ways // ways, "the whole" if ways == 1 else f"one of {ways} shards")
    return _from_operators(work, part, device, profile, precision, input_gradient, surfaces)


MASTER_ACCESSES = 3
"""Of 4 bytes per element: two casts between fp32 and half precision, 6 bytes each."""


def estimate_optimizer(
    work: OptimizerStep,
    optimizer: str,
    device: Device,
    profile: Profile,
    precision: str,
    ranks_active: int | None = None,
    *,
    master_weights: bool = True,
) -> Estimate:
    """Seconds of one optimizer step and of zeroing the gradients.

    Measured: seconds per step, element and tensor through the points of this optimizer and device type. Else, on a device with
    published or fitted numbers: the bytes of the foreach operations over the memory bandwidth. Under autocast one more read and
    write of the gradients unscales them. Weights in half precision move half the bytes; with master weights the update is that
    of fp32, beside two casts: gradients to fp32, copies to half precision.

    Raises:
        CostError: unknown optimizer, or nothing known for this device.
    """
    if optimizer not in FOREACH_ACCESSES_PER_ELEMENT:
        raise CostError(f"unknown optimizer {optimizer!r}{near_matches(optimizer, FOREACH_ACCESSES_PER_ELEMENT)}")
    drift = ("drift", _drift_sigma(profile))
    if work.elements == 0:
        return Estimate(median_s=0.0, source="measured", detail="no parameters")
    points = [
        point for point in profile.compute.optimizers if point.optimizer == optimizer and point.device_type == device.type.name
    ]
    if points and number_format(precision).weight_bytes < 4:
        raise CostError(
            f"the profile measured {optimizer} on {device.type.name} with weights of 4 bytes, and precision {precision!r} has "
            f'{number_format(precision).weight_bytes}; set precision = "amp_bf16", or use a profile with published peaks'
        )
    if points:
        return _measured_optimizer(work, optimizer, _under_load(points, ranks_active), drift)
    if not has_published_peaks(device, profile):
        raise CostError(
            f"no cost is known for a step of {optimizer} over {work.elements} elements on {device.type.name}: "
            f"calibrate with that optimizer (`parsim calibrate`)"
        )
    kind = number_format(precision)
    accesses = FOREACH_ACCESSES_PER_ELEMENT[optimizer] + (2 if kind.autocast else 0)
    width = 4
    if kind.weight_bytes < width:
        accesses, width = (accesses + MASTER_ACCESSES, width) if master_weights else (accesses, kind.weight_bytes)
    fit = fit_for(profile.compute.operator_fits, "memory_bound", "forward", "fp32", device.type.name)
    size_bytes = width * accesses * work.elements
    kernel = Kernel(kind="memory_bound", phase="forward", count=1, flop=0.0, size_bytes=size_bytes)
    seconds, sigma, source, outside = price_kernel(kernel, fit, device, "fp32")
    factor, spread = efficiency_of(profile, device, precision)
    return Estimate(
        median_s=seconds / factor,
        source=source,
        parameters=(drift, *spread, ("operator:memory_bound", sigma)),
        detail=f"{accesses} accesses of 4 bytes per element, foreach",
        extrapolated=outside,
    )


# --- measured ---------------------------------------------------------------------------------------------------------


def _measured(
    work: Compute, component: Component, points: Sequence[ComponentPoint], profile: Profile, ranks_active: int | None
) -> Estimate:
    chosen = _in_range_under_load(points, work.samples, ranks_active)
    curve: dict[int, list[ComponentPoint]] = {}
    for point in chosen:
        curve.setdefault(point.samples, []).append(point)
    samples = sorted(curve)
    seconds = [median(point.seconds for point in curve[count]) for count in samples]
    spread = median(point.spread for point in chosen)
    repeats = sum(point.repeats for point in chosen) / len(samples)
    value, how, doublings = interpolate_s(samples, seconds, work.samples)
    issues = [_issue_s(curve[count]) for count in samples]
    known = [issue_s for issue_s in issues if issue_s is not None]
    # the number of kernels does not follow the samples: outside the measured counts it stays
    issue_s = float(np.interp(work.samples, samples, known)) if len(known) == len(samples) else 0.0
    own = math.hypot(spread / math.sqrt(max(1.0, repeats)), MIN_MEASURED_SIGMA)
    if work.samples not in curve:
        own = math.hypot(own, INTERPOLATION_SIGMA + EXTRAPOLATION_SIGMA_PER_DOUBLING * doublings)
    return Estimate(
        median_s=value,
        source="measured",
        parameters=(("drift", _drift_sigma(profile)), (f"compute:{component.fingerprint}", own)),
        repeat_sigma=spread,
        detail=f"measured with {chosen[0].ranks_active} ranks active, {how}",
        extrapolated=doublings > 0,
        issue_s=issue_s,
    )


def _issue_s(points: Sequence[ComponentPoint] | Sequence[OptimizerPoint]) -> float | None:
    """What the host takes to queue it, median; None where it was not measured apart."""
    known = [point.issue_s for point in points if point.issue_s is not None]
    return median(known) if known else None


def _half(
    whole: Estimate,
    work: Compute,
    part: Component,
    device: Device,
    profile: Profile,
    precision: str,
    input_gradient: bool,
    surfaces: Surfaces,
) -> Estimate:
    """The half of a measured backward, by the ratio that the operators give; the two halves add up to the whole."""
    seconds = [
        _operators_s(replace(work, phase=phase), part, device, profile, precision, input_gradient, surfaces) for phase in HALVES
    ]
    total = sum(seconds)
    share = seconds[HALVES.index(work.phase)] / total if total else float(work.phase is Phase.BACKWARD_INPUT)
    return Estimate(
        median_s=share * whole.median_s,
        source="measured",
        parameters=(*whole.parameters, ("backward_halves", HALF_SIGMA)),
        repeat_sigma=whole.repeat_sigma,
        detail=f"{share:.0%} of the backward, {whole.detail}",
        extrapolated=True,
        issue_s=share * whole.issue_s,
    )


def _scaled(measured: Estimate, share: float, times: int, base: str) -> Estimate:
    """The estimate of a shard from that of one `times` as large."""
    return Estimate(
        median_s=share * measured.median_s,
        source="measured",
        parameters=(*measured.parameters, ("shard_scaling", SHARD_SIGMA_PER_DOUBLING * math.log2(times))),
        repeat_sigma=measured.repeat_sigma,
        detail=f"{share:.0%} of {base}, {measured.detail}",
        extrapolated=True,
        issue_s=measured.issue_s,  # a shard launches as many kernels
    )


def _loads(points: Iterable[ComponentPoint | OptimizerPoint], ranks_active: int | None) -> list[int]:
    """Numbers of active ranks in order of preference: the one asked for, then the heaviest first."""
    loads = sorted({point.ranks_active for point in points}, reverse=True)
    if ranks_active in loads:
        loads.remove(ranks_active)
        loads.insert(0, ranks_active)
    return loads


def _under_load(points: Sequence[OptimizerPoint], ranks_active: int | None) -> list[OptimizerPoint]:
    load = _loads(points, ranks_active)[0]
    return [point for point in points if point.ranks_active == load]


def _in_range_under_load(points: Sequence[ComponentPoint], samples: int, ranks_active: int | None) -> list[ComponentPoint]:
    """The points of the most preferred load whose sample counts enclose `samples`; if none does, of the most preferred."""
    groups = [[point for point in points if point.ranks_active == load] for load in _loads(points, ranks_active)]
    for group in groups:
        counts = [point.samples for point in group]
        if min(counts) <= samples <= max(counts):
            return group
    return groups[0]


def _measured_optimizer(
    work: OptimizerStep, optimizer: str, points: Sequence[OptimizerPoint], drift: tuple[str, float]
) -> Estimate:
    exact = [point for point in points if (point.elements, point.tensors) == (work.elements, work.tensors)]
    spread = median(point.spread for point in points)
    elements = [point.elements for point in points]
    outside = max(0.0, math.log2(work.elements / max(elements)), math.log2(min(elements) / work.elements))
    sigma = math.hypot(MIN_MEASURED_SIGMA, 0.0 if exact else INTERPOLATION_SIGMA + EXTRAPOLATION_SIGMA_PER_DOUBLING * outside)
    if exact:
        seconds = median(point.seconds for point in exact)
        issue_s = _issue_s(exact)
        how = f"measured at {work.elements} elements in {work.tensors} tensors"
    else:
        per_step, per_element, per_tensor = _affine(tuple((point.elements, point.tensors, point.seconds) for point in points))
        seconds = per_step + per_element * work.elements + per_tensor * work.tensors
        issue_s = _queueing_s(points, work)
        how = (
            f"{format_seconds(per_step)} + {format_seconds(per_element)} per element + {format_seconds(per_tensor)} per tensor "
            f"through {len(points)} measured steps"
        )
    return Estimate(
        median_s=seconds,
        source="measured",
        parameters=(drift, (f"compute:optimizer:{optimizer}", sigma)),
        repeat_sigma=spread,
        detail=how,
        extrapolated=outside > 0,
        issue_s=issue_s or 0.0,
    )


def _queueing_s(points: Sequence[OptimizerPoint], work: OptimizerStep) -> float | None:
    """By the line through the measured steps; None where nobody measured it apart."""
    known = tuple((point.elements, point.tensors, point.issue_s) for point in points if point.issue_s)
    if not known:
        return None
    per_step, per_element, per_tensor = _affine(known)
    return per_step + per_element * work.elements + per_tensor * work.tensors


@lru_cache(maxsize=64)
def _affine(points: tuple[tuple[int, int, float], ...]) -> tuple[float, float, float]:
    """Non-negative seconds per step, per element and per tensor through (elements, tensors, seconds), least squares of the
    relative error. A search asks for the same points again and again.

    Of the terms, whichever of them together miss least while none is negative; those that the points cannot tell apart are not
    taken together. A constant is not looked for in fewer than four different steps.
    """
    parts = np.array([[1, elements, tensors] for elements, tensors, _ in points], dtype=np.float64)
    relative = parts / np.array([seconds for *_, seconds in points])[:, None]
    terms = (0, 1, 2) if len(np.unique(parts, axis=0)) > relative.shape[1] else (1, 2)
    best, least = np.zeros(3), math.inf
    for count in range(len(terms), 0, -1):
        for chosen in itertools.combinations(terms, count):
            columns = relative[:, chosen]
            if np.linalg.matrix_rank(columns) < count:
                continue
            found = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)[0]
            miss = float(np.sum((columns @ found - 1) ** 2))
            if found.min() >= 0 and miss < least:
                best, least = np.zeros(3), miss
                best[list(chosen)] = found
    per_step, per_element, per_tensor = best.tolist()
    return per_step, per_element, per_tensor


# --- fitted and published ---------------------------------------------------------------------------------------------


def _from_operators(
    work: Compute,
    component: Component,
    device: Device,
    profile: Profile,
    precision: str,
    input_gradient: bool,
    surfaces: Surfaces,
) -> Estimate:
    drift = ("drift", _drift_sigma(profile))
    known = surfaces.get((device.type.name, precision))
    if known is not None:
        parts = component_parts(component, work.phase, work.samples, known, input_gradient=input_gradient)
        composition = composition_of(profile.compute.compositions, work.phase, device.type.name, precision)
        return composed_estimate(parts, composition, component.fingerprint, drift, EXTRAPOLATED_SHARE)
    fits = profile.compute.operator_fits
    published = precision in device.type.peak_flop_per_s and has_published_peaks(device, profile)
    if not published and not any((fit.precision, fit.device_type) == (precision, device.type.name) for fit in fits):
        raise CostError(_unknown(work, device, precision, "any kind of operator"))
    total = outside_s = 0.0
    by_kind: dict[str, float] = {}
    by_source: dict[Source, float] = {}
    for kernel in component_kernels(
        component,
        work.phase,
        work.samples,
        precision,
        input_gradient=input_gradient,
        device_kind=device.type.kind,
    ):
        fit = fit_for(fits, kernel.kind, kernel.phase, precision, device.type.name)
        if fit is None and not published:
            raise CostError(_unknown(work, device, precision, f"{kernel.kind} {kernel.phase}"))
        seconds, sigma, source, outside = price_kernel(kernel, fit, device, precision)
        total += seconds
        outside_s += seconds if outside else 0.0
        by_kind[kernel.kind] = by_kind.get(kernel.kind, 0.0) + sigma * seconds
        by_source[source] = by_source.get(source, 0.0) + seconds
    if not total:
        return Estimate(median_s=0.0, source="fitted", parameters=(drift,), detail="launches no kernel")
    factor, spread = efficiency_of(profile, device, precision)
    shares = ", ".join(f"{by_source[name] / total:.0%} {name}" for name in sorted(by_source))
    return Estimate(
        median_s=total / factor,
        source=max(sorted(by_source), key=lambda name: by_source[name]),
        parameters=(drift, *spread, *((f"operator:{kind}", by_kind[kind] / total) for kind in sorted(by_kind))),
        detail=f"sum of operators: {shares}",
        extrapolated=outside_s > EXTRAPOLATED_SHARE * total,
    )


def _share(
    work: Compute,
    part: Component,
    base: Component,
    device: Device,
    profile: Profile,
    precision: str,
    input_gradient: bool,
    surfaces: Surfaces,
) -> float:
    """Seconds of `part` over seconds of the larger `base`, by fitted operators; by a roofline where an operator has no fit."""

    whole_s = _operators_s(work, base, device, profile, precision, input_gradient, surfaces)
    return _operators_s(work, part, device, profile, precision, input_gradient, surfaces) / whole_s if whole_s else 1.0


def _operators_s(
    work: Compute,
    component: Component,
    device: Device,
    profile: Profile,
    precision: str,
    input_gradient: bool,
    surfaces: Surfaces,
) -> float:
    """Seconds by fitted operators; by a roofline where an operator has no fit."""
    known = surfaces.get((device.type.name, precision))
    if known is not None:
        parts = component_parts(component, work.phase, work.samples, known, input_gradient=input_gradient)
        return composed_s(parts, composition_of(profile.compute.compositions, work.phase, device.type.name, precision))
    kernels = component_kernels(
        component, work.phase, work.samples, precision, input_gradient=input_gradient, device_kind=device.type.kind
    )
    fits = profile.compute.operator_fits
    return sum(
        price_kernel(kernel, fit_for(fits, kernel.kind, kernel.phase, precision, device.type.name), device, precision)[0]
        for kernel in kernels
    )


def component_kernels(
    component: Component,
    phase: Phase,
    samples: int,
    precision: str,
    *,
    input_gradient: bool = True,
    device_kind: str = "cpu",
) -> tuple[Kernel, ...]:
    """All launches of a component's forward or backward (or half of it) on a "cpu" or "cuda" device, operator by operator."""
    if device_kind == "cuda":
        operators = cuda_operators(component.operators)
        full = has_full_stream(operators)
        forward: Callable[..., tuple[Kernel, ...]] = partial(cuda_forward, full_stream=full)
        backward: Callable[..., tuple[tuple[Kernel, ...], ...]] = partial(cuda_backward_halves, full_stream=full)
    else:
        operators, forward, backward = component.operators, forward_kernels, halved_backward_kernels
    if phase is Phase.FORWARD:
        return tuple(kernel for operator in operators for kernel in forward(operator, samples, precision))
    wanted = (HALVES.index(phase),) if phase in HALVES else range(len(HALVES))
    return tuple(
        kernel
        for number, operator in enumerate(operators)
        for halves in (backward(operator, samples, precision, input_gradient=input_gradient or number > 0),)
        for half in wanted
        for kernel in halves[half]
    )


def _unknown(work: Compute, device: Device, precision: str, kind: str) -> str:
    known = ", ".join(sorted(device.type.peak_flop_per_s)) or "none"
    return (
        f"no cost is known for component {work.component!r} ({work.phase}, {work.samples} samples) on {device.type.name} in "
        f"{precision}: it was not measured there, and there is no fit for {kind} (precisions of the device: {known}); "
        f"calibrate this model at these samples and precision (`parsim calibrate`)"
    )


def _drift_sigma(profile: Profile) -> float:
    return DEFAULT_DRIFT_SIGMA if profile.noise is None else profile.noise.drift_sigma
