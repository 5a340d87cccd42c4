"""Efficiency surfaces: the time of one launch as a sum of costs that grow with its sizes.

    t = sum over the terms of  seconds_term * term(sizes),   seconds_term >= 0

The term "launch" is 1: its seconds are the floor. The others are products of sizes (arithmetic, arrays read and written,
rows, problems) and what such a product exceeds a cache by. Every term grows with every size (of a normalisation: with its
rows and their width). No coefficient is negative, so t is monotone in every size. Far outside the data the terms of
arithmetic and arrays dominate, as they do in a real kernel.

How far a question lies from the data is the distance to the nearest measured shape: the largest ratio of any size, in
doublings. Up to the surface's reach (the distance at which its own held-out points lie) nothing widens; beyond it sigma grows
per doubling.

A GPU has terms of its own (`GPU_TERMS`), which no CPU is fitted to: its matrix units load and store rows that begin at
multiples of 16 bytes, and a product of other rows, as over a vocabulary of 50257 tokens, runs by another kernel. By these alone
a size can grow and the time fall, from one row that is not aligned to the next that is.

Leaves out: steps of tile sizes and changes of algorithm (they are in sigma), and what happens between launches
(`parsim.costs.compute.surfaces`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parsim.costs.compute.formula import EXTRAPOLATED_SHARE, component_roofline_s, drift_of
from parsim.costs.compute.launches import ACCUMULATE, ComputeRequest, Launch, component_launches, operator_times
from parsim.costs.estimate import Detail, Estimate, Term, TermOrigin, Terms, folded_s, summed
from parsim.errors import CostError
from parsim.hardware.devices import DeviceType
from parsim.hardware.profile import Profile
from parsim.hardware.records import Composition, OperatorPoint, OperatorSurface
from parsim.model.component import Component
from parsim.units import format_seconds
from parsim.work import Phase

LAUNCH = "launch"
SMALL_CACHE, LARGE_CACHE = 1e5, 1e6
"""Elements from which an array is slower to reach: a core's own cache and the shared one hold about so many."""

CHANNEL_BLOCK = 8
"""Libraries lay channels out in blocks; an image of one or three channels is padded to one."""

SurfaceKey = tuple[str, str, str]
"""Kind, function and phase of a launch."""


def _product(s: Mapping[str, float]) -> dict[str, float]:
    p, r, c, d = s["problems"], s["rows"], s["columns"], s["depth"]
    return {
        "arithmetic": p * r * c * d,
        "output": p * r * c,
        "left": p * r * d,
        "right": p * c * d,
        "output_beyond": _beyond(p * r * c, SMALL_CACHE),
        "left_beyond": _beyond(p * r * d, SMALL_CACHE),
        "right_beyond": _beyond(p * c * d, SMALL_CACHE),
        "right_far": _beyond(p * c * d, LARGE_CACHE),
        "rows": p * r,
        "columns": p * c,
        "depth": p * d,
        "problems": p,
    }


def _convolution(s: Mapping[str, float]) -> dict[str, float]:
    names = ("images", "inputs", "outputs", "groups", "taps", "pixels_in", "pixels_out")
    n, i, o, g, taps, before, after = (s[name] for name in names)
    weights = g * i * o * taps
    padded_in, padded_out = CHANNEL_BLOCK * np.ceil(i / CHANNEL_BLOCK), CHANNEL_BLOCK * np.ceil(o / CHANNEL_BLOCK)
    return {
        "arithmetic_padded": n * after * g * padded_in * padded_out * taps,
        "input_padded": n * g * padded_in * before,
        "output_padded": n * g * padded_out * after,
        "arithmetic": n * after * weights,
        "arithmetic_in": n * before * weights,
        "arithmetic_rows": n * np.sqrt(after) * weights,
        "image_weights": n * weights,
        "unfolded": n * after * g * i * taps,
        "input": n * g * i * before,
        "output": n * g * o * after,
        "weights": weights,
        "input_beyond": _beyond(n * g * i * before, SMALL_CACHE),
        "output_beyond": _beyond(n * g * o * after, SMALL_CACHE),
        "weights_beyond": _beyond(weights, SMALL_CACHE),
        "pixels": n * before,
        "images": n,
    }


def _attention(s: Mapping[str, float]) -> dict[str, float]:
    p, q, k, d = s["problems"], s["queries"], s["keys"], s["depth"]
    return {
        "arithmetic": p * q * k * d,
        "scores": p * q * k,
        "arrays": p * (q + k) * d,
        "rows": p * q,
        "problems": p,
    }


def _embedding(s: Mapping[str, float]) -> dict[str, float]:
    elements = s["rows"] * s["width"]
    return {"elements": elements, "rows": s["rows"], "beyond": _beyond(elements, SMALL_CACHE)}


def _memory_bound(s: Mapping[str, float]) -> dict[str, float]:
    elements, width = s["elements"], s["width"]
    return {
        "elements": elements,
        "rows": elements / width,
        "width": width,
        "beyond": _beyond(elements, SMALL_CACHE / 3),
        "far": _beyond(elements, LARGE_CACHE / 4),
    }


TERMS: Mapping[str, Callable[[Mapping[str, float]], dict[str, float]]] = {
    "matmul": _product,
    "convolution": _convolution,
    "attention": _attention,
    "embedding": _embedding,
    "memory_bound": _memory_bound,
}
"""By kind of operator: what a launch of these sizes has of each term."""


ALIGNED_ELEMENTS = 8
"""Of a row of a half-precision operand: 16 bytes. Rows of fp32 need half as many, which widths of networks hardly tell
apart."""


def _unaligned_product(s: Mapping[str, float], phase: str) -> dict[str, float]:
    """Arithmetic over rows that are not aligned. Of the gradient of weights the rows of the result are the operand's
    columns."""
    lengths = (s["rows"] if phase == "backward_weight" else s["depth"], s["columns"])
    arithmetic = s["problems"] * s["rows"] * s["columns"] * s["depth"]
    return {
        "unaligned": arithmetic * any(length % ALIGNED_ELEMENTS for length in lengths),
        "odd": arithmetic * any(length % 2 for length in lengths),
    }


GPU_TERMS: Mapping[str, Callable[[Mapping[str, float], str], dict[str, float]]] = {"matmul": _unaligned_product}
"""By kind of operator: the terms of a launch of these sizes in a phase that GPUs have besides."""


def terms_of(kind: str, sizes: Mapping[str, float], *, gpu_phase: str = "") -> dict[str, float]:
    """Every term of a launch of a kind in `TERMS`, the floor among them; on a GPU, in a phase, with those of GPUs alone."""
    terms = {LAUNCH: 1.0, **TERMS[kind](sizes)}
    return terms | GPU_TERMS[kind](sizes, gpu_phase) if gpu_phase and kind in GPU_TERMS else terms


def surface_seconds(surface: OperatorSurface, sizes: Mapping[str, float]) -> float:
    """Seconds of one launch. Leaves out steps of tile sizes and changes of algorithm."""
    terms = terms_of(surface.kind, sizes)
    if not surface.seconds_per_term.keys() <= terms.keys():
        terms = terms_of(surface.kind, sizes, gpu_phase=surface.phase)
    return sum(seconds * terms[name] for name, seconds in surface.seconds_per_term.items())


def log_sizes(sizes: Mapping[str, float]) -> NDArray[np.float64]:
    """The position of a launch among sizes: float64 [sizes], in doublings."""
    return np.log2(np.maximum(np.array(list(sizes.values()), dtype=np.float64), 1.0))


def distances(wanted: NDArray[np.float64], known: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance from each wanted launch, float64 [n, sizes] in doublings, to the nearest known one, float64 [m, sizes], by
    the size that differs most: float64 [n] doublings."""
    nearest: NDArray[np.float64] = np.abs(wanted[:, None, :] - known[None, :, :]).max(axis=2).min(axis=1)
    return nearest


class Price(NamedTuple):
    """Seconds of a launch (all its occurrences), the surface's relative sigma, and the sigma added beyond its reach."""

    seconds: float
    sigma: float
    widening: float


@dataclass(frozen=True)
class SurfaceModel:
    """The surfaces of one device type and precision, and where their points lie."""

    surfaces: tuple[OperatorSurface, ...]
    points: tuple[OperatorPoint, ...]

    def price(self, launch: Launch) -> Price:
        """Raises CostError where no surface covers that kind, function and phase."""
        key = (launch.kind, launch.function, launch.phase)
        surface = self._by_key.get(key)
        if surface is None:
            raise CostError(f"there is no fit for {' '.join(key)}: calibrate again, so that it is measured")
        sizes, beyond = dict(launch.sizes), 0.0
        if key in self._shapes:
            distance = float(distances(log_sizes(sizes)[None, :], self._shapes[key])[0])
            beyond = max(0.0, distance - surface.reach_doublings)
        return Price(
            seconds=launch.count * surface_seconds(surface, sizes),
            sigma=surface.relative_sigma,
            widening=surface.sigma_per_doubling * beyond,
        )

    @cached_property
    def _by_key(self) -> dict[SurfaceKey, OperatorSurface]:
        return {(surface.kind, surface.function, surface.phase): surface for surface in self.surfaces}

    @cached_property
    def _shapes(self) -> dict[SurfaceKey, NDArray[np.float64]]:
        by_key: dict[SurfaceKey, list[NDArray[np.float64]]] = {}
        for point in self.points:
            by_key.setdefault((point.kind, point.function, point.phase), []).append(log_sizes(point.shape))
        return {key: np.array(shapes) for key, shapes in by_key.items()}


def surface_models(profile: Profile) -> dict[tuple[str, str], SurfaceModel]:
    """The surfaces of a profile, by device type and precision."""
    surfaces: dict[tuple[str, str], list[OperatorSurface]] = {}
    points: dict[tuple[str, str], list[OperatorPoint]] = {}
    for surface in profile.compute.operator_surfaces:
        surfaces.setdefault((surface.device_type, surface.precision), []).append(surface)
    for point in profile.compute.operator_points:
        points.setdefault((point.device_type, point.precision), []).append(point)
    return {key: SurfaceModel(tuple(surfaces[key]), tuple(points.get(key, ()))) for key in sorted(surfaces)}


def stacked_terms(
    kind: str, shapes: Sequence[Mapping[str, float]], *, gpu_phase: str = ""
) -> tuple[list[str], NDArray[np.float64]]:
    """Names of the terms, and their values for several launches: float64 [shapes, terms]; arguments as of `terms_of`."""
    rows = [terms_of(kind, shape, gpu_phase=gpu_phase) for shape in shapes]
    return list(rows[0]), np.array([list(row.values()) for row in rows], dtype=np.float64)


def _beyond(elements: float, cache: float) -> float:
    return max(0.0, elements - cache)


# The time of a component beyond the sum of its launches: learned from whole components, applied to those never measured.
#
#     t = component_s + launch_s * launches + sum over kinds of  factor_kind * seconds of its launches
#         + seconds_per_parameter_byte * bytes of its parameters + seconds_per_activation_byte * bytes its operators move
#
# component_s and launch_s are the work of the interpreter and of autograd. The factors correct a call that was measured alone
# for the state of the machine inside a training step. The bytes are parameters and activations that no cache holds any more.
# None is negative, so t stays monotone. Half a backward takes half of component_s and its own launches; parameters belong to
# the weights' half.
#
# Leaves out: which model the component stands in, though a model with little memory keeps more of it in the caches.


KINDS = ("matmul", "convolution", "attention", "embedding", "memory_bound", ACCUMULATE)
"""What has a factor of its own: the kinds of operators, and the accumulation of gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a component's forward or backward consists of.

    Attributes:
        components: 1, or 1/2 for half a backward. seconds: by kind, of its launches alone.
        sigma, widening: of the surfaces and of lying beyond their reach, by kind, weighted by seconds. outside_s: seconds of
            launches beyond it. counts: of launches, by kind.
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
    gpu_precision: str = "",
) -> Parts:
    """Split a component's forward or backward (or half of it) into launches, bytes and seconds.

    `model`: surfaces that price the launches. `gpu_precision`: of launches on a GPU; "": they are a CPU's. Raises CostError: no
    surface covers a launch; the message names the first.
    """
    launches = component_launches(
        component, phase, samples, gpu_precision or "fp32", on_gpu=bool(gpu_precision), input_gradient=input_gradient
    )
    priced = [(launch, model.price(launch)) for launch in launches]
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


def moved_bytes(component: Component, samples: int) -> float:
    """Bytes of activations that a component's operators read and write in one forward."""
    return float(
        sum(operator.count * operator.activation_bytes * operator_times(operator, samples) for operator in component.operators)
    )


def composed_terms(parts: Parts, composition: Composition | None) -> Terms:
    """One term per kind of launch, then the time a component adds to its launches by the fit of its phase (None: nothing)."""
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
    """Seconds of the host to queue the component's launches on a GPU; 0 if they were not measured apart."""
    if composition is None:
        return 0.0
    per_component, per_launch = composition.issue_component_s or 0.0, composition.issue_launch_s or 0.0
    of_kinds = sum(seconds * parts.counts.get(kind, 0) for kind, seconds in composition.issue_kinds_s.items())
    return per_component * parts.components + per_launch * parts.launches + of_kinds


def composition_of(compositions: Sequence[Composition], phase: Phase, device_type: str, precision: str) -> Composition | None:
    """The composition of a phase, or None. Halves of a backward use the backward's."""
    key = (Phase.FORWARD if phase is Phase.FORWARD else Phase.BACKWARD, device_type, precision)
    return next((fit for fit in compositions if (fit.phase, fit.device_type, fit.precision) == key), None)


@dataclass(frozen=True)
class LaunchModel:
    """Prices by surfaces measured on the machine, and by what its whole components were seen to add to their launches.

    An `parsim.costs.compute.formula.OperatorModel`.
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
        sigma = parts.widening
        if composition is None:
            sigma = {kind: parts.sigma[kind] + parts.widening[kind] for kind in shares}
        widened = ((f"operator:{kind}", sigma[kind] * shares[kind]) for kind in sorted(shares) if sigma[kind] > 0)
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
        least_s = component_roofline_s(request, self.device, self.precision)
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
            gpu_precision=self.precision if self.device.kind == "cuda" else "",
        )

    def _composition(self, phase: Phase) -> Composition | None:
        return composition_of(self.profile.compute.compositions, phase, self.device.name, self.precision)
