"""The time of a component beyond the sum of its launches: learned from whole components, applied to those never measured.

    t = component_s + launch_s * launches + sum over kinds of  factor_kind * seconds of its launches
        + seconds_per_parameter_byte * bytes of its parameters + seconds_per_activation_byte * bytes its operators move

component_s and launch_s are the work of the interpreter and of autograd. The factors correct a call that was measured
alone for the state of the machine inside a training step. The bytes are parameters and activations that no cache holds
any more. None is negative, so t stays monotone. Half a backward takes half of component_s and its own launches;
parameters belong to the weights' half.

Leaves out: which model the component stands in, though a model with little memory keeps more of it in the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from parsim.costs.compute.cuda_launches import cuda_operators
from parsim.costs.compute.gpu_launches import gpu_launches
from parsim.costs.compute.kernel_model import HALVES, component_kernels
from parsim.costs.compute.launches import Launch, component_launches
from parsim.costs.compute.operator_model import EXTRAPOLATED_SHARE, ComputeRequest, drift_of
from parsim.costs.compute.operators import operator_times
from parsim.costs.compute.roofline import component_roofline_s, without_mask
from parsim.costs.compute.surfaces import Price, SurfaceModel
from parsim.costs.estimate import Detail, Estimate, Term, TermOrigin, Terms, folded_s, summed
from parsim.errors import CostError
from parsim.hardware.compute_records import Composition
from parsim.hardware.device import DeviceType
from parsim.hardware.profile import Profile
from parsim.model.component import Component
from parsim.units import format_seconds
from parsim.work import Phase

ACCUMULATE = "accumulate"
KINDS = ("matmul", "convolution", "attention", "embedding", "memory_bound", ACCUMULATE)
"""What has a factor of its own: the kinds of operators, and the accumulation of gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a component's forward or backward consists of.

    Attributes:
        components: 1, or 1/2 for half a backward. seconds: by kind, of its launches alone.
        sigma, widening: of the surfaces and of lying beyond their reach, by kind, weighted by seconds.
        outside_s: seconds of launches beyond the surfaces' reach. counts: of launches, by kind.
    """

    components: float
    launches: int
    parameter_bytes: float
    activation_bytes: float
    seconds: dict[str, float]
    sigma: dict[str, float]
    widening: dict[str, float]
    outside_s: float
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def component_parts(
    component: Component,
    phase: Phase,
    samples: int,
    model: SurfaceModel,
    *,
    input_gradient: bool = True,
    launched: Callable[..., tuple[Launch, ...]] = component_launches,
) -> Parts:
    """Split a component's forward or backward into launches, bytes and seconds.

    Args:
        component: whole or a shard. phase: forward, backward or half a backward.
        samples: of one microbatch.
        model: surfaces that price the launches.
        input_gradient: False if the component's inputs want no gradient.
        launched: makes the launches (`launches_on`).

    Raises:
        CostError: no surface covers a launch; the message names the first.
    """
    launches = launched(component, phase, samples, input_gradient=input_gradient)
    priced = [(launch, _price(launch, model)) for launch in launches]
    by_kind: dict[str, list[Price]] = {}
    for launch, price in priced:
        by_kind.setdefault(ACCUMULATE if launch.function == ACCUMULATE else launch.kind, []).append(price)
    counts: dict[str, int] = {}
    for launch in launches:
        counts[launch.kind] = counts.get(launch.kind, 0) + launch.count
    seconds = {kind: sum(price.seconds for price in prices) for kind, prices in by_kind.items()}
    halved = phase in (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
    return Parts(
        components=0.5 if halved else 1.0,
        launches=sum(launch.count for launch in launches),
        parameter_bytes=0.0 if phase is Phase.BACKWARD_INPUT else float(component.parameter_bytes),
        activation_bytes=(0.5 if halved else 1.0) * moved_bytes(component, samples),
        seconds=seconds,
        sigma={kind: sum(p.sigma * p.seconds for p in prices) / seconds[kind] for kind, prices in by_kind.items()},
        widening={kind: sum(p.widening * p.seconds for p in prices) / seconds[kind] for kind, prices in by_kind.items()},
        outside_s=sum(price.seconds for _, price in priced if price.widening > 0),
        counts=counts,
    )


def launches_on(device_kind: str, precision: str) -> Callable[..., tuple[Launch, ...]]:
    """What makes the launches of a component on a kind of device.

    Args:
        device_kind: a key of `DEVICE_KINDS`. precision: such as "amp_bf16".
    """
    return partial(gpu_launches, precision=precision) if device_kind == "cuda" else component_launches


def moved_bytes(component: Component, samples: int) -> float:
    """Bytes of activations that a component's operators read and write in one forward.

    Args:
        component: whole or a shard. samples: of one microbatch.
    """
    return float(
        sum(operator.count * operator.activation_bytes * operator_times(operator, samples) for operator in component.operators)
    )


def composed_s(parts: Parts, composition: Composition | None) -> float:
    """Seconds of the component; without a composition, of its launches alone.

    Args:
        parts: of `component_parts`. composition: fitted coefficients of the phase, or None.

    Returns:
        Seconds. Leaves out which model the component stands in.
    """
    return folded_s(composed_terms(parts, composition))


def composed_terms(parts: Parts, composition: Composition | None) -> Terms:
    """One term per kind of launch, then the time a component adds to its launches.

    Args:
        parts: of `component_parts`. composition: fitted coefficients of the phase, or None.
    """
    if composition is None:
        return summed((kind, seconds, "fitted", "launches alone") for kind, seconds in parts.seconds.items())
    factors = composition.factors
    added_s = (
        composition.component_s * parts.components
        + composition.launch_s * parts.launches
        + composition.seconds_per_parameter_byte * parts.parameter_bytes
        + composition.seconds_per_activation_byte * parts.activation_bytes
    )
    kinds: list[tuple[str, float, TermOrigin, Detail]] = [
        (kind, factors.get(kind, 1.0) * seconds, "fitted", f"{factors.get(kind, 1.0):.3g} x {format_seconds(seconds)} alone")
        for kind, seconds in parts.seconds.items()
    ]
    what = f"the component, {parts.launches} launches, {parts.parameter_bytes:.3g} B of parameters"
    return summed((*kinds, ("composition", added_s, "fitted", f"{what}, {parts.activation_bytes:.3g} B of activations")))


def composed_issue_s(parts: Parts, composition: Composition | None) -> float:
    """Seconds of the host to queue the component's launches on a GPU; 0 if they were not measured apart.

    Args:
        parts: of `component_parts`. composition: fitted coefficients of the phase, or None.
    """
    if composition is None:
        return 0.0
    per_component, per_launch = composition.issue_component_s or 0.0, composition.issue_launch_s or 0.0
    of_kinds = sum(seconds * parts.counts.get(kind, 0) for kind, seconds in composition.issue_kinds_s.items())
    return per_component * parts.components + per_launch * parts.launches + of_kinds


def composition_of(compositions: Sequence[Composition], phase: Phase, device_type: str, precision: str) -> Composition | None:
    """The composition of a phase, or None. Halves of a backward use the backward's.

    Args:
        compositions: of a profile. phase, device_type, precision: the wanted entry.
    """
    wanted = (Phase.FORWARD if phase is Phase.FORWARD else Phase.BACKWARD, device_type, precision)
    for entry in compositions:
        if (entry.phase, entry.device_type, entry.precision) == wanted:
            return entry
    return None


@dataclass(frozen=True)
class LaunchModel:
    """Prices by surfaces measured on the machine, and by what its whole components were seen to add to their launches.

    Implements `parsim.costs.compute.operator_model.OperatorModel`.
    """

    profile: Profile
    device: DeviceType
    precision: str
    surfaces: SurfaceModel

    def seconds(self, request: ComputeRequest) -> float:
        """Seconds of the launches and of the component's addition, at least the roofline."""
        return folded_s(self._bounded(request, composed_terms(self._parts(request), self._composition(request.phase))))

    def estimate(self, request: ComputeRequest) -> Estimate:
        """The terms of `composed_terms`, with the uncertain parameters of the price.

        With a composition: its spread over whole steps, which all components share, and over single components, each its own;
        the surfaces' own spread is in both. Without one: the surfaces' spread by kind. Lying beyond a surface's reach widens
        its kind. Raises CostError as `component_parts`.
        """
        parts, composition = self._parts(request), self._composition(request.phase)
        terms, total = self._bounded(request, composed_terms(parts, composition)), parts.total_s
        seconds = folded_s(terms)
        shares = {kind: value / total for kind, value in parts.seconds.items()} if total else {}
        own = parts.widening if composition is not None else {kind: parts.sigma[kind] + parts.widening[kind] for kind in shares}
        widened = ((f"operator:{kind}", own[kind] * shares[kind]) for kind in sorted(shares) if own[kind] > 0)
        parameters = [drift_of(self.profile), *widened]
        detail = f"sum of {parts.launches} measured kinds of launches"
        if composition is not None:
            fingerprint = request.component.fingerprint
            parameters += [("composition", composition.step_sigma), (f"compute:{fingerprint}", composition.component_sigma)]
            if seconds:
                detail = f"{parts.launches} launches, {total / seconds:.0%} of the time, and what a component adds"
        return Estimate.of(
            terms,
            source="fitted",
            parameters=tuple(parameters),
            detail=detail,
            extrapolated=parts.outside_s > EXTRAPOLATED_SHARE * total,
            issue_s=composed_issue_s(parts, composition),
        )

    def _bounded(self, request: ComputeRequest, terms: Terms) -> Terms:
        """With a last term that lifts the sum to what arithmetic and memory allow at least."""
        operators = request.component.operators
        if self.device.kind == "cuda":
            operators = cuda_operators(operators)
        masked = replace(request, component=replace(request.component, operators=tuple(map(without_mask, operators))))
        kernels = component_kernels(masked, self.precision, self.device.kind)
        share = 0.5 if request.phase in HALVES else 1.0
        least_s = component_roofline_s(kernels, operators, request.samples, self.device, self.precision, share=share)
        if least_s <= folded_s(terms):
            return terms
        what = "flop at the peak, bytes at the bandwidth"
        return (*terms, Term("roofline", "at least" if terms else "start", least_s, "published", what))

    def _parts(self, request: ComputeRequest) -> Parts:
        return component_parts(
            request.component,
            request.phase,
            request.samples,
            self.surfaces,
            input_gradient=request.input_gradient,
            launched=launches_on(self.device.kind, self.precision),
        )

    def _composition(self, phase: Phase) -> Composition | None:
        return composition_of(self.profile.compute.compositions, phase, self.device.name, self.precision)


def _price(launch: Launch, model: SurfaceModel) -> Price:
    price = model.price(launch)
    if price is None:
        raise CostError(
            f"there is no fit for {launch.kind} {launch.function} {launch.phase}: calibrate again, so that it is measured"
        )
    return price
