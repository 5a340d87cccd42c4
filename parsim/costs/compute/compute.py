"""Seconds of a computation on one device: measured where it was measured, else from fitted operators, else a roofline.

Three sources, never mixed silently:
    measured   the profile holds this component (by fingerprint), phase, device type and precision; between two measured
               sample counts the time is interpolated linearly. A shard has its own fingerprint. If only the whole or a
               larger shard was measured, that time is multiplied by the ratio of the operators' times.
    fitted     the sum over the component's operators of fitted times, by one of two operator models: surfaces measured on this
               machine (`parsim.costs.compute.surfaces.LaunchModel`), or the formula fitted to published kernels, over the
               efficiency of whole models (`parsim.costs.compute.formula.KernelModel`).
    published  an operator kind without a fit, on a device whose peaks come from a datasheet or paper: a roofline at a stated
               efficiency and a large uncertainty.

The time of a shard, derived from a larger one, holds what does not divide (launches, uncut operators) if the operator model has
it. Without fits, the roofline has no launches, so shards of small components come out too fast.

Leaves out: the state of caches between components, and clock changes within a run.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from parsim.costs.compute.formula import KernelModel, OperatorModel, drift_of, has_published_peaks
from parsim.costs.compute.launches import HALVES, ComputeRequest, Launch
from parsim.costs.compute.surfaces import LaunchModel, surface_models
from parsim.costs.estimate import Estimate, Source, Term, Terms, folded_s, summed
from parsim.errors import CostError
from parsim.hardware.cluster import Cluster
from parsim.hardware.devices import Device, DeviceType
from parsim.hardware.profile import Profile
from parsim.hardware.records import ComponentPoint, OptimizerPoint
from parsim.model.component import FULL_BYTES, Component, Operator, narrow
from parsim.model.formats import DEFAULT_NUMERICS, Numerics, number_format
from parsim.model.optimizers import OPTIMIZERS
from parsim.units import format_seconds
from parsim.work import BY_OPERATOR_PART, NORM, SCALE, ClipGradients, Compute, Mix, OptimizerStep, Phase

SHARD_SIGMA_PER_DOUBLING = 0.25
"""Of a shard's time taken from that of one twice as large. By the roofline, against 232 measured halves of components of six
small models at 4 and 16 samples (busy 2-core virtual machine, 2026-11-21). The standard deviation was 27%, the median 18% too
fast; where the whole takes more than 1 ms, 23% and 12%."""

HALF_SIGMA = 0.2
"""Assumed relative spread of half a backward taken from the whole one by operators: halves have not been measured alone."""

REPEATED_SIGMA = 0.2
"""Assumed relative spread of the share of a forward that the operators have which run again: not measured alone."""

IMBALANCE_SIGMA = 0.1
"""Assumed relative spread of the busiest rank's visits to its experts, beyond those of tokens that choose at random."""

MASTER_ACCESSES = 3
"""Of 4 bytes per element: two casts between fp32 and half precision, 6 bytes each."""
EMA_ACCESSES = 3
CLIP_ACCESSES = {NORM: 1, SCALE: 2}
CLIP_SIGMA = 0.3
"""Assumed: nothing measures clipping, or the arithmetic of mixing, by itself."""


MeasuredWork = tuple[str, str, str, str]
"""What a ComponentPoint was measured on: fingerprint, phase, device type and precision."""

MOST_KNOWN = 2**15
"""Estimates that are kept of one machine."""


@lru_cache(maxsize=64)
def compute_costs(cluster: Cluster, numerics: Numerics, ranks_active: int | None) -> ComputeCosts:
    """The prices of computation on a cluster: one object, so that what one question has asked is known for the next."""
    return ComputeCosts(cluster.profile, numerics, ranks_active)


@dataclass(frozen=True)
class ComputeCosts:
    """Prices computation by a profile.

    ranks_active: how many ranks of the machine compute at once; measurements taken under that load are preferred, else those
    under the heaviest load (None: the heaviest).
    """

    profile: Profile
    numerics: Numerics = DEFAULT_NUMERICS
    ranks_active: int | None = None
    _known: dict[tuple[object, ...], Estimate] = field(default_factory=dict, init=False, repr=False, compare=False)
    _models: dict[str, OperatorModel] = field(default_factory=dict, init=False, repr=False, compare=False)

    def loads_alike(self, one: int | None, other: int | None) -> bool:
        """Whether two loads (ranks that compute at once) have the same prices: they are equal, or one load was measured."""
        compute = self.profile.compute
        loads = {point.ranks_active for point in compute.components} | {point.ranks_active for point in compute.optimizers}
        return one == other or len(loads) <= 1

    def estimate(self, work: Compute, component: Component, device: Device, *, input_gradient: bool = True) -> Estimate:
        """Seconds of `component`, or of one of `work.ways` shards of it, forward or backward over `work.samples` samples.

        Args:
            component: the whole one, also where `work` asks for a shard of it.
            input_gradient: as in `ComputeRequest`; a measurement contains that already.

        Raises:
            CostError: nothing measured, fitted or published covers it. ModelError: the component has no such shard.
        """
        if work.samples < 1 or work.phase is Phase.OPTIMIZER:
            raise CostError(
                f"a component computes forward or backward over >= 1 sample, got {work.component!r} {work.phase} over "
                f"{work.samples}; an optimizer step is priced by ComputeCosts.optimizer"
            )
        key = (component, work.phase, work.samples, work.rule, work.ways, device.type.name, input_gradient)
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._estimate(work, component, device, input_gradient)
        return self._known[key]

    def _estimate(self, work: Compute, component: Component, device: Device, input_gradient: bool) -> Estimate:
        model = self.operator_model(device.type)
        part = ComputeRequest(
            component=narrow(component, work.rule, work.ways),
            phase=work.phase,
            samples=work.samples,
            input_gradient=input_gradient,
        )
        if work.phase in HALVES:
            both = self.estimate(replace(work, phase=Phase.BACKWARD), component, device, input_gradient=input_gradient)
            return _half(both, part, model) if both.source == "measured" else model.estimate(part)
        for ways in (ways for ways in range(work.ways if self._points else 0, 0, -1) if work.ways % ways == 0):
            base = replace(part, component=narrow(component, work.rule, ways))
            key = base.component.fingerprint, work.phase.value, device.type.name, self.numerics.precision
            if key in self._points:
                measured = measured_component(base, self._points[key], self.ranks_active, drift_of(self.profile))
                return measured if ways == work.ways else _shard(measured, base, part, model, ways, work.ways)
        return model.estimate(part)

    def part(self, work: Compute, component: Component, device: Device, whole: Estimate) -> Estimate:
        """Seconds of a part of a component, between whose parts its ranks communicate (`Compute.part`): its operators'
        share.

        Args:
            component: as a rank has it, not cut by `work.rule`. whole: the estimate of all of its parts.

        Experts carry the assumed spread of their imbalance, operators that run again an assumed spread of their share. Raises
        CostError: nothing known prices the operators.
        """
        model, shard = self.operator_model(device.type), narrow(component, work.rule, work.ways)
        parts = _again_and_kept(shard) if work.part == BY_OPERATOR_PART else operators_by_part(shard)
        seconds = {
            name: model.seconds(
                ComputeRequest(component=replace(shard, operators=operators), phase=work.phase, samples=work.samples)
            )
            if operators
            else 0.0
            for name, operators in parts.items()
        }
        total = sum(seconds.values())
        share = (seconds[work.part] / total if total else float(work.part == "rest")) / work.parts
        spread: tuple[tuple[str, float], ...] = ()
        if work.part == "experts":
            spread = (("experts:imbalance", IMBALANCE_SIGMA if seconds[work.part] else 0.0),)
        elif work.part == BY_OPERATOR_PART:
            spread = (("recomputed_operators", REPEATED_SIGMA if share < 1 else 0.0),)
        term = Term("part", "times", share, "fitted", f"{work.part}, one of {work.parts}")
        detail = f"{share:.0%} of {whole.detail}"
        return _with_term(whole, term, *spread, detail=detail, issue_s=share * whole.issue_s)

    def in_pieces(self, work: Compute, component: Component, device: Device, pieces: int) -> float:
        """How many times as long a shard takes whose products run in pieces of their rows.

        Products that are cut by columns do in the forward, and those cut by rows in the forward and towards their inputs.
        """
        sharding, shard = component.sharding(work.rule), narrow(component, work.rule, work.ways)
        phase = Phase.BACKWARD_INPUT if work.phase is Phase.BACKWARD else work.phase
        cuts = {cut.number: cut.dim for cut in sharding.operators}
        dims = ("k",) if phase in HALVES else ("k", "n")
        model = self.operator_model(device.type)

        def seconds(operators: Sequence[Operator], phase: Phase) -> float:
            request = ComputeRequest(component=replace(shard, operators=tuple(operators)), phase=phase, samples=work.samples)
            return model.seconds(request)

        products = [
            operator
            for number, operator in enumerate(shard.operators)
            if operator.kind == "matmul" and operator.batch == "rows" and cuts.get(number) in dims
        ]
        if phase is Phase.BACKWARD_WEIGHT or not products:
            return 1.0
        counted = shard.operators if not work.part else operators_by_part(shard)[work.part]
        products = [operator for operator in products if operator in counted]
        more_s = seconds([_in_rows(operator, pieces) for operator in products], phase) - seconds(products, phase)
        return 1.0 + max(0.0, more_s) / (seconds(counted, work.phase) or 1.0)

    def optimizer(self, work: OptimizerStep, device: Device, *, calls: int = 1) -> Estimate:
        """Seconds of one optimizer step and of zeroing the gradients, and of averaging the weights where the numerics do.

        Averaging takes the share of the step that its accesses have: nothing measures it by itself. `calls` of the optimizer's
        operations (2: for parameters with weight decay, and without) count where steps were measured.

        Measured: seconds per step, element and tensor through the points of this optimizer and device type. Else, on a device
        with published or fitted numbers: the bytes of the foreach operations over the memory bandwidth. With a scaled loss, one
        more read and write of the gradients unscales them. Weights in half precision move half the bytes; with master weights
        the update is that of fp32, beside two casts: gradients to fp32, copies to half precision.

        Raises ConfigError: unknown optimizer. CostError: nothing known for this device.
        """
        step = self._step(work, device, calls)
        if not self.numerics.ema or not work.elements:
            return step
        optimizer = work.optimizer or self.numerics.optimizer
        accesses = self._step_accesses(optimizer, device)
        detail = f"{accesses} and {EMA_ACCESSES} accesses for the averages of the weights, where {optimizer} has {accesses}"
        sigma = CLIP_SIGMA * EMA_ACCESSES / (accesses + EMA_ACCESSES)
        return _multiple_of(step, (accesses + EMA_ACCESSES) / accesses, detail, ("operator:ema", sigma))

    def _step(self, work: OptimizerStep, device: Device, calls: int = 1) -> Estimate:
        optimizer = work.optimizer or self.numerics.optimizer
        _ = OPTIMIZERS[optimizer]  # raises for an unknown one
        drift = drift_of(self.profile)
        if work.elements == 0:
            return Estimate(median_s=0.0, source="measured", detail="no parameters")
        points = self._optimizer_points(optimizer, device)
        if points:
            self._check_updates(optimizer, device)
            return measured_optimizer(work, optimizer, points, self.ranks_active, drift, calls=calls)
        if not has_published_peaks(self.profile, device.type):
            raise CostError(
                f"no cost is known for a step of {optimizer} over {work.elements} elements on {device.type.name}: "
                f"calibrate with that optimizer (`parsim calibrate`)"
            )
        accesses = self._step_accesses(optimizer, device)
        width = FULL_BYTES if self.numerics.master_weights else min(FULL_BYTES, self.numerics.format.weight_bytes)
        size_bytes = width * accesses * work.elements
        launch = Launch(kind="memory_bound", function=optimizer, phase="forward", sizes=(), size_bytes=size_bytes)
        seconds, sigma, source, outside = KernelModel(self.profile, device.type, "fp32").price(launch)
        efficiency, spread = KernelModel(self.profile, device.type, self.numerics.precision).efficiency
        detail = f"{accesses} accesses of {width} bytes per element, foreach"
        return Estimate.of(
            (Term("memory_bound", "start", seconds, source, detail), *efficiency),
            source=source,
            parameters=(drift, *spread, ("operator:memory_bound", sigma)),
            detail=detail,
            extrapolated=outside,
        )

    def _optimizer_points(self, optimizer: str, device: Device) -> list[OptimizerPoint]:
        measured = self.profile.compute.optimizers
        return [point for point in measured if (point.optimizer, point.device_type) == (optimizer, device.type.name)]

    def _check_updates(self, optimizer: str, device: Device) -> None:
        """Raises CostError where updates of weights of another width were measured, or of master weights that are not kept."""
        measured = self._updated_bytes.get(device.type.name, FULL_BYTES)
        weight_bytes = self.numerics.format.weight_bytes
        beginning = f"the profile measured {optimizer} on {device.type.name} with"
        if measured != weight_bytes and min(measured, weight_bytes) < FULL_BYTES:
            way = f'"bf16", or calibrate in {self.numerics.precision}'
            if measured >= FULL_BYTES:
                way = '"amp_bf16", or use a profile with published peaks'
            raise CostError(
                f"{beginning} weights of {measured} bytes, and precision {self.numerics.precision!r} has {weight_bytes}; "
                f"set precision = {way}"
            )
        if measured < FULL_BYTES and not self.numerics.master_weights:
            raise CostError(
                f"{beginning} master weights; set training.master_weights = true, or use a profile with published peaks"
            )

    @cached_property
    def _updated_bytes(self) -> dict[str, int]:
        """By device type, of a weight whose updates were measured: all work of a calibration is in its precision."""
        widths: dict[str, set[int]] = {}
        for point in self.profile.compute.components:
            widths.setdefault(point.device_type, set()).add(number_format(point.precision).weight_bytes)
        return {name: min(known) if len(known) == 1 else FULL_BYTES for name, known in widths.items()}

    def _step_accesses(self, optimizer: str, device: Device) -> int:
        """Accesses of an element in an optimizer step; a measured step does not scale the loss."""
        kind = self.numerics.format
        casts = MASTER_ACCESSES if self.numerics.master_weights and kind.weight_bytes < FULL_BYTES else 0
        unscaling = 2 if kind.scales_loss and not self._optimizer_points(optimizer, device) else 0
        return OPTIMIZERS[optimizer].accesses_per_element + unscaling + casts

    def arithmetic(self, work: ClipGradients | Mix, device: Device) -> Estimate:
        """Seconds of clipping, or of mixing: their share of an optimizer step over the same arrays.
        Errors as of `optimizer`.

        All are plain passes over the parameters, tensor by tensor. Nothing measures the arithmetic by itself. Clipping reads
        every element once for the norm, and twice accesses it for the scaling.
        """
        optimizer = self.numerics.optimizer
        step = self._step(OptimizerStep(elements=work.elements, tensors=work.tensors), device)
        if not work.elements:
            return step
        every = self._step_accesses(optimizer, device)
        if isinstance(work, ClipGradients):
            accesses, name = CLIP_ACCESSES[work.part], "operator:clip"
            detail = f"{accesses} of {every} accesses of a step of {optimizer}"
        else:
            accesses, name = work.accesses or work.copies + 1, "operator:mix"
            detail = f"{accesses} accesses, where a step of {optimizer} has {every}"
        return _multiple_of(step, accesses / every, detail, (name, CLIP_SIGMA))

    def operator_model(self, device: DeviceType) -> OperatorModel:
        """The model that prices components never measured on this type of device: surfaces if the profile has them."""
        if device.name not in self._models:
            surfaces = surface_models(self.profile).get((device.name, self.numerics.precision))
            self._models[device.name] = (
                KernelModel(self.profile, device, self.numerics.precision)
                if surfaces is None
                else LaunchModel(self.profile, device, self.numerics.precision, surfaces)
            )
        return self._models[device.name]

    @cached_property
    def _points(self) -> dict[MeasuredWork, list[ComponentPoint]]:
        points: dict[MeasuredWork, list[ComponentPoint]] = {}
        for point in self.profile.compute.components:
            points.setdefault((point.fingerprint, point.phase, point.device_type, point.precision), []).append(point)
        return points


def _in_rows(operator: Operator, pieces: int) -> Operator:
    """A product as so many of a part of its rows."""
    shape = tuple((name, max(1, size // pieces) if name == "m" else size) for name, size in operator.shape)
    bytes_of_piece = operator.activation_bytes // pieces
    return replace(
        operator,
        shape=shape,
        forward_flop=operator.forward_flop / pieces,
        activation_bytes=bytes_of_piece,
        count=operator.count * pieces,
    )


def operators_by_part(component: Component) -> dict[str, tuple[Operator, ...]]:
    """By `Compute.part`: attention, experts, and the rest."""
    experts = frozenset() if component.inside is None else frozenset(component.inside.experts)
    parts: dict[str, list[Operator]] = {"rest": [], "attention": [], "experts": []}
    for number, operator in enumerate(component.operators):
        name = "experts" if number in experts else "attention" if operator.kind == "attention" else "rest"
        parts[name].append(operator)
    return {name: tuple(operators) for name, operators in parts.items()}


def _again_and_kept(component: Component) -> dict[str, tuple[Operator, ...]]:
    """The operators that run again, and the others. Raises CostError for a component that is not recomputed by operator."""
    if component.selective is None:
        raise CostError(f"{component.name} is not recomputed by operator; name it in recompute without selective:")
    again = dict(component.selective.operators)
    counted = [(operator, again.get(number, 0)) for number, operator in enumerate(component.operators)]
    return {
        BY_OPERATOR_PART: tuple(replace(operator, count=min(some, operator.count)) for operator, some in counted if some),
        "kept": tuple(replace(operator, count=operator.count - some) for operator, some in counted if some < operator.count),
    }


def _half(whole: Estimate, part: ComputeRequest, model: OperatorModel) -> Estimate:
    """The half of a measured backward, by the ratio that the operators give; the two halves add up to the whole."""
    seconds = [model.seconds(replace(part, phase=phase)) for phase in HALVES]
    total = sum(seconds)
    share = seconds[HALVES.index(part.phase)] / total if total else float(part.phase is Phase.BACKWARD_INPUT)
    return _share_of(whole, share, "the backward", ("backward_halves", HALF_SIGMA), share * whole.issue_s)


def _shard(
    measured: Estimate, base: ComputeRequest, part: ComputeRequest, model: OperatorModel, base_ways: int, ways: int
) -> Estimate:
    """A shard from a larger one that was measured, by the ratio that the operators give. It launches as many kernels."""
    whole_s = model.seconds(base)
    share = model.seconds(part) / whole_s if whole_s else 1.0
    what = "the whole" if base_ways == 1 else f"one of {base_ways} shards"
    sigma = SHARD_SIGMA_PER_DOUBLING * math.log2(ways // base_ways)
    return _share_of(measured, share, what, ("shard_scaling", sigma), measured.issue_s)


def _share_of(measured: Estimate, share: float, what: str, spread: tuple[str, float], issue_s: float) -> Estimate:
    term = Term("share by operators", "times", share, "fitted", f"of {what}")
    detail = f"{share:.0%} of {what}, {measured.detail}"
    return _with_term(measured, term, spread, detail=detail, extrapolated=True, issue_s=issue_s)


def _multiple_of(whole: Estimate, share: float, detail: str, spread: tuple[str, float]) -> Estimate:
    """A multiple of an optimizer step, by its accesses."""
    source: Source = "fitted" if whole.source == "measured" else whole.source
    term = Term("share", "times", share, "fitted", detail)
    return _with_term(whole, term, spread, source=source, detail=f"{detail}: {whole.detail}", issue_s=whole.issue_s * share)


def _with_term(whole: Estimate, term: Term, *spread: tuple[str, float], **changes: Any) -> Estimate:
    """An estimate with one more term, and uncertain parameters of its own."""
    return replace(whole.then(term), parameters=(*whole.parameters, *spread), **changes)


# --- components and optimizer steps that were measured ----------------------------------------------------------------


MIN_MEASURED_SIGMA = 0.02
INTERPOLATION_SIGMA = 0.03
EXTRAPOLATION_SIGMA_PER_DOUBLING = 0.10


class Interpolated(NamedTuple):
    """Attributes: terms: of the seconds. how: they were got, for people. doublings: outside the measured range (0 inside)."""

    terms: Terms
    how: str
    doublings: float

    @property
    def seconds(self) -> float:
        return folded_s(self.terms)


def interpolation_terms(samples: Sequence[int], seconds: Sequence[float], wanted: int) -> Interpolated:
    """Time at `wanted` samples >= 1 from a measured curve, whose counts are ascending and distinct.

    Between two measured counts the time is linear. Above the last count it is proportional to the samples. Below the first
    count it follows the line through the first two, kept between proportional and constant. With a single count it is
    proportional both ways. Leaves out steps where a library changes its algorithm.
    """
    first, last = samples[0], samples[-1]
    place = bisect_left(samples, wanted)
    if place < len(samples) and samples[place] == wanted:
        return Interpolated((_at(wanted, seconds[place]),), f"at {wanted} samples", 0.0)
    if wanted > last:
        how = f"extrapolated in proportion from {last} samples"
        return Interpolated(_in_proportion(last, seconds[-1], wanted), how, math.log2(wanted / last))
    if wanted < first:
        doublings = math.log2(first / wanted)
        proportional = _in_proportion(first, seconds[0], wanted)
        if len(samples) == 1:
            return Interpolated(proportional, f"extrapolated in proportion from {first} samples", doublings)
        how = f"extrapolated on the line below {first} samples"
        slope = (seconds[1] - seconds[0]) / (samples[1] - first)
        line = _on_line(first, seconds[0], slope, wanted, samples[1])
        if folded_s(line) < folded_s(proportional):
            line = proportional
        return Interpolated(line if folded_s(line) <= seconds[0] else (_at(first, seconds[0]),), how, doublings)
    below, above = samples[place - 1], samples[place]
    slope = (seconds[place] - seconds[place - 1]) / (above - below)
    how = f"interpolated between {below} and {above} samples"
    return Interpolated(_on_line(below, seconds[place - 1], slope, wanted, above), how, 0.0)


def _at(samples: int, seconds: float) -> Term:
    return Term(f"measured at {samples} samples", "start", seconds, "measured")


def _in_proportion(samples: int, seconds: float, wanted: int) -> Terms:
    return (
        _at(samples, seconds),
        Term("samples asked for", "times", float(wanted), "measured", "in proportion to the samples"),
        Term("samples measured", "over", float(samples), "measured", "in proportion to the samples"),
    )


def _on_line(samples: int, seconds: float, slope: float, wanted: int, other: int) -> Terms:
    what = f"{wanted - samples} samples of {slope:.4g} s, on the line to {other} samples"
    return (_at(samples, seconds), Term("further samples", "plus", slope * (wanted - samples), "measured", what))


def measured_component(
    request: ComputeRequest, points: Sequence[ComponentPoint], ranks_active: int | None, drift: tuple[str, float]
) -> Estimate:
    """Price a component from its measured points in this phase.

    Args:
        ranks_active: ranks of the machine that compute at once; points under that load are preferred, else those under the
            heaviest load. drift: name and relative sigma of the cost parameter shared by all computation.

    Leaves out that a library may change its algorithm between two measured sample counts.
    """
    chosen = _in_range_under_load(points, request.samples, ranks_active)
    curve: dict[int, list[ComponentPoint]] = {}
    for point in chosen:
        curve.setdefault(point.samples, []).append(point)
    samples = sorted(curve)
    seconds = [median(point.seconds for point in curve[count]) for count in samples]
    spread = median(point.spread for point in chosen)
    repeats = sum(point.repeats for point in chosen) / len(samples)
    terms, how, doublings = interpolation_terms(samples, seconds, request.samples)
    issues = [_issue_s(curve[count]) for count in samples]
    measured_issues = [issue_s for issue_s in issues if issue_s is not None]
    # the number of kernels does not follow the samples: outside the measured counts it stays
    issue_s = float(np.interp(request.samples, samples, measured_issues)) if len(measured_issues) == len(samples) else 0.0
    sigma = math.hypot(spread / math.sqrt(max(1.0, repeats)), MIN_MEASURED_SIGMA)
    if request.samples not in curve:
        sigma = math.hypot(sigma, INTERPOLATION_SIGMA + EXTRAPOLATION_SIGMA_PER_DOUBLING * doublings)
    return Estimate.of(
        terms,
        source="measured",
        parameters=(drift, (f"compute:{request.component.fingerprint}", sigma)),
        repeat_sigma=spread,
        detail=f"measured with {chosen[0].ranks_active} ranks active, {how}",
        extrapolated=doublings > 0,
        issue_s=issue_s,
    )


def measured_optimizer(
    work: OptimizerStep,
    optimizer: str,
    points: Sequence[OptimizerPoint],
    ranks_active: int | None,
    drift: tuple[str, float],
    *,
    calls: int = 1,
) -> Estimate:
    """Price an optimizer step: seconds per step, element and tensor through the measured points of this optimizer.

    `calls`: of the optimizer's operations, one for each kind of parameter; each takes what a step takes whatever it updates.
    Others as of `measured_component`. Leaves out effects that are not affine in elements and tensors, such as caches.
    """
    load = _loads(points, ranks_active)[0]
    points = [point for point in points if point.ranks_active == load]
    exact = [point for point in points if (point.elements, point.tensors) == (work.elements, work.tensors)]
    spread = median(point.spread for point in points)
    elements = [point.elements for point in points]
    outside = max(0.0, math.log2(work.elements / max(elements)), math.log2(min(elements) / work.elements))
    sigma = math.hypot(MIN_MEASURED_SIGMA, 0.0 if exact else INTERPOLATION_SIGMA + EXTRAPOLATION_SIGMA_PER_DOUBLING * outside)
    if exact:
        how = f"measured at {work.elements} elements in {work.tensors} tensors"
        issue_s = _issue_s(exact)
        terms: Terms = (Term("measured step", "start", median(point.seconds for point in exact), "measured", how),)
        if calls > 1:
            queued = _queueing_line(points)
            again_s = (calls - 1) * _line(points)[0]
            issue_s = None if issue_s is None else issue_s + (0.0 if queued is None else (calls - 1) * queued[0])
            terms = (*terms, Term("calls", "plus", again_s, "measured", f"{calls} calls of its operations, {calls - 1} more"))
    else:
        per_step, per_element, per_tensor = _line(points)
        queued = _queueing_line(points)
        issue_s = None if queued is None else calls * queued[0] + queued[1] * work.elements + queued[2] * work.tensors
        called = f", {calls} calls" if calls > 1 else ""
        terms = summed(
            (
                ("step", calls * per_step, "measured", f"through {len(points)} measured steps{called}"),
                ("elements", per_element * work.elements, "measured", f"{work.elements} x {format_seconds(per_element)}"),
                ("tensors", per_tensor * work.tensors, "measured", f"{work.tensors} x {format_seconds(per_tensor)}"),
            )
        )
        how = (
            f"{format_seconds(per_step)} + {format_seconds(per_element)} per element + {format_seconds(per_tensor)} per tensor "
            f"through {len(points)} measured steps{called}"
        )
    return Estimate.of(
        terms,
        source="measured",
        parameters=(drift, (f"compute:optimizer:{optimizer}", sigma)),
        repeat_sigma=spread,
        detail=how,
        extrapolated=outside > 0,
        issue_s=issue_s or 0.0,
    )


def _issue_s(points: Sequence[ComponentPoint] | Sequence[OptimizerPoint]) -> float | None:
    """The median of what the host takes to queue the work; None where it was not measured apart."""
    issues = [point.issue_s for point in points if point.issue_s is not None]
    return median(issues) if issues else None


def _line(points: Sequence[OptimizerPoint]) -> tuple[float, float, float]:
    """Seconds of every step whatever it updates, per element and per tensor, through the measured steps."""
    return _affine(tuple((point.elements, point.tensors, point.seconds) for point in points))


def _queueing_line(points: Sequence[OptimizerPoint]) -> tuple[float, float, float] | None:
    """Seconds of the host to queue a step, as `_line` has those of the step; None where nobody measured them apart."""
    issues = tuple((point.elements, point.tensors, point.issue_s) for point in points if point.issue_s)
    return _affine(issues) if issues else None


def _loads(points: Iterable[ComponentPoint | OptimizerPoint], ranks_active: int | None) -> list[int]:
    """Numbers of active ranks in order of preference: the one asked for, then the heaviest first."""
    loads = sorted({point.ranks_active for point in points}, reverse=True)
    if ranks_active in loads:
        loads.remove(ranks_active)
        loads.insert(0, ranks_active)
    return loads


def _in_range_under_load(points: Sequence[ComponentPoint], samples: int, ranks_active: int | None) -> list[ComponentPoint]:
    """The points of the most preferred load whose sample counts enclose `samples`; if none does, of the most preferred."""
    groups = [[point for point in points if point.ranks_active == load] for load in _loads(points, ranks_active)]
    for group in groups:
        counts = [point.samples for point in group]
        if min(counts) <= samples <= max(counts):
            return group
    return groups[0]


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
            solution = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)[0]
            miss = float(np.sum((columns @ solution - 1) ** 2))
            if solution.min() >= 0 and miss < least:
                best, least = np.zeros(3), miss
                best[list(chosen)] = solution
    per_step, per_element, per_tensor = best.tolist()
    return per_step, per_element, per_tensor
