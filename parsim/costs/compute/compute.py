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

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from parsim.costs.compute.formula import KernelModel, OperatorModel, drift_of, has_published_peaks
from parsim.costs.compute.launches import HALVES, ComputeRequest, Launch
from parsim.costs.compute.measured import measured_component, measured_optimizer
from parsim.costs.compute.surfaces import LaunchModel, surface_models
from parsim.costs.estimate import Estimate, Source, Term
from parsim.errors import CostError
from parsim.hardware.cluster import Cluster
from parsim.hardware.devices import Device, DeviceType
from parsim.hardware.profile import Profile
from parsim.hardware.records import ComponentPoint, OptimizerPoint
from parsim.model.component import FULL_BYTES, Component, Operator, narrow
from parsim.model.formats import DEFAULT_NUMERICS, Numerics, number_format
from parsim.model.optimizers import OPTIMIZERS
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

    Attributes:
        numerics: whose precision is a key of DeviceType.peak_flop_per_s.
        ranks_active: how many ranks of the machine compute at once; measurements taken under that load are preferred, else
            those under the heaviest load (None: the heaviest).
    """

    profile: Profile
    numerics: Numerics = DEFAULT_NUMERICS
    ranks_active: int | None = None

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

    @cached_property
    def _known(self) -> dict[tuple[object, ...], Estimate]:
        return {}

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
        """Seconds of a part of a component, between whose parts its ranks communicate (`Compute.part`): its operators' share.

        Args:
            component: as a rank has it, not cut by `work.rule`. whole: the estimate of all of its parts.

        Returns:
            The share of the whole that the part's operators have by the operator model. Experts carry the assumed spread of
            their imbalance, operators that run again an assumed spread of their share.

        Raises:
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

    def optimizer(self, work: OptimizerStep, device: Device, *, calls: int = 1) -> Estimate:
        """Seconds of one optimizer step and of zeroing the gradients, and of averaging the weights where the numerics do.

        Averaging takes the share of the step that its accesses have. Nothing measures it by itself. `calls` of the optimizer's
        operations (2: for parameters with weight decay, and without) count where steps were measured.

        Measured: seconds per step, element and tensor through the points of this optimizer and device type. Else, on a device
        with published or fitted numbers: the bytes of the foreach operations over the memory bandwidth. With a scaled
        loss, one more read and write of the gradients unscales them. Weights in half precision move half the bytes;
        with master weights the update is that of fp32, beside two casts: gradients to fp32, copies to half precision.

        Raises:
            ConfigError: unknown optimizer. CostError: nothing known for this device.
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
        """Seconds of one optimizer step without averages of the weights."""
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
        """Seconds of clipping, or of mixing whose accesses are known: their share of an optimizer step over the same arrays.

        All are plain passes over the parameters, tensor by tensor. Nothing measures the arithmetic by itself. Clipping reads
        every element once for the norm, and twice accesses it for the scaling.

        Raises:
            ConfigError, CostError: as `optimizer`.
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
            accesses, name = work.accesses, "operator:mix"
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
    def _models(self) -> dict[str, OperatorModel]:
        return {}

    @cached_property
    def _points(self) -> dict[MeasuredWork, list[ComponentPoint]]:
        points: dict[MeasuredWork, list[ComponentPoint]] = {}
        for point in self.profile.compute.components:
            points.setdefault((point.fingerprint, point.phase, point.device_type, point.precision), []).append(point)
        return points


def operators_by_part(component: Component) -> dict[str, tuple[Operator, ...]]:
    """The operators of a component by `Compute.part`: attention, experts, and the rest."""
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
