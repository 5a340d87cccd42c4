"""Fit the composition (`parsim.costs.compute.surfaces`) to measured components, one model left out at a time for its
spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.fit.operators import NORMAL_MAD
from calibration.fit.surfaces import fit_terms
from parsim.costs.communication.measured import rounded
from parsim.costs.compute.surfaces import KINDS, Parts, SurfaceModel, component_parts
from parsim.errors import CostError
from parsim.hardware.records import ComponentPoint, Composition
from parsim.model.model import Model
from parsim.numeric import Floats
from parsim.work import Phase

MIN_COMPONENTS = 4
FACTOR_PRIOR = 0.1
BYTES_PRIOR = 0.03
SLOW_BYTES_S = 1e-10
"""Relative weights (of all points together) that hold a factor near 1 and the seconds per byte near 0, in units of a memory of
10 GB/s, on a GPU of its own. So a kind or an amount that the calibrated models hardly have is not extrapolated from noise."""

ISSUE_PRIOR, USUAL_LAUNCH_S = 0.01, 1e-5
"""Relative weight of the host's seconds per launch of one kind, in units of what a launch usually takes."""

UNKNOWN_SIGMA = 0.25
"""Assumed spread of a composition fitted to a single model, which cannot be left out."""

FitPhase = Literal["forward", "backward"]
PHASES: tuple[FitPhase, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredComponent:
    """A measured component, forward or backward, and what it consists of."""

    model: str
    fingerprint: str
    phase: str
    samples: int
    seconds: float
    parts: Parts
    issue_s: float | None = None


def measured_parts(
    points: Sequence[ComponentPoint], models: Sequence[Model], surfaces: SurfaceModel, *, gpu_precision: str = ""
) -> list[MeasuredComponent]:
    """The points of whole components under the heaviest load, taken apart. Raises CostError: as `component_parts`, of a CPU.

    gpu_precision: "" on a CPU. On a GPU it decides what is launched, and a component is left out if it has a launch that no
    surface prices (`consistent_operators`).
    """
    by_name = {model.name: model for model in models}
    heaviest = max((point.ranks_active for point in points), default=1)
    found = []
    for point in points:
        model = by_name.get(point.model)
        if model is None or point.ranks_active != heaviest or point.component not in model.component_index:
            continue
        component = model.component(point.component)
        if component.fingerprint != point.fingerprint:
            continue
        try:
            parts = component_parts(
                component,
                Phase(point.phase),
                point.samples,
                surfaces,
                input_gradient=model.has_input_gradient(component),
                gpu_precision=gpu_precision,
            )
        except CostError:
            if gpu_precision:
                continue
            raise
        found.append(
            MeasuredComponent(
                model=point.model,
                fingerprint=point.fingerprint,
                phase=point.phase,
                samples=point.samples,
                seconds=point.seconds,
                parts=parts,
                issue_s=point.issue_s,
            )
        )
    return found


def fit_compositions(
    measured: Sequence[MeasuredComponent], device_type: str, precision: str, source: str, *, byte_s: float = SLOW_BYTES_S
) -> list[Composition]:
    """Forward and backward; none with fewer than 4 measured components. byte_s: of the memory, in whose units bytes are
    held."""
    if len({entry.fingerprint for entry in measured}) < MIN_COMPONENTS:
        return []
    fitted = {phase: _fit(measured, phase, byte_s) for phase in PHASES}
    component_sigma, step_sigma = _held_out(measured, byte_s)
    models = len({entry.model for entry in measured})
    return [
        Composition(
            phase=phase,
            precision=precision,
            device_type=device_type,
            **_named(fitted[phase]),
            issue_component_s=None if issues is None else issues.component_s,
            issue_launch_s=None if issues is None else issues.launch_s,
            issue_kinds_s={} if issues is None else issues.kinds_s,
            component_sigma=rounded(component_sigma[phase]),
            step_sigma=rounded(step_sigma),
            models=models,
            points=sum(entry.phase == phase for entry in measured),
            source=source,
        )
        for phase in PHASES
        for issues in (_issuing(measured, phase),)
    ]


def without_model(measured: Sequence[MeasuredComponent], model: str) -> list[MeasuredComponent]:
    """The points left if a model was never measured: none of its own components, and none that do the same work."""
    own = {entry.fingerprint for entry in measured if entry.model == model}
    return [entry for entry in measured if entry.model != model and entry.fingerprint not in own]


def _fit(measured: Sequence[MeasuredComponent], phase: str, byte_s: float) -> Floats:
    """[component, launch, parameter byte, activation byte, a factor per kind]."""
    chosen = [entry for entry in measured if entry.phase == phase]
    terms = np.array([_terms(entry.parts) for entry in chosen])
    size = terms.shape[1]
    prior = np.zeros((size - 2, size + 1))
    strength = np.sqrt(len(chosen))
    for row, column in enumerate(range(2, size)):
        factor = column >= 4
        prior[row, column] = strength * (FACTOR_PRIOR if factor else BYTES_PRIOR / byte_s)
        prior[row, -1] = strength * FACTOR_PRIOR if factor else 0.0
    return fit_terms(terms, np.array([entry.seconds for entry in chosen]), prior)


def _terms(parts: Parts) -> list[float]:
    bytes_moved = [parts.parameter_bytes, parts.activation_bytes]
    return [parts.components, float(parts.launches), *bytes_moved, *(parts.seconds.get(kind, 0.0) for kind in KINDS)]


def _named(coefficients: NDArray[np.float64]) -> dict[str, Any]:
    component, launch, parameter, activation, *factors = (rounded(value) for value in coefficients.tolist())
    return {
        "component_s": component,
        "launch_s": launch,
        "seconds_per_parameter_byte": parameter,
        "seconds_per_activation_byte": activation,
        "factors": dict(zip(KINDS, factors, strict=True)),
    }


class _Issuing(NamedTuple):
    """What the host takes per component, per launch, and per launch of a kind beyond that."""

    component_s: float
    launch_s: float
    kinds_s: dict[str, float]


def _issuing(measured: Sequence[MeasuredComponent], phase: str) -> _Issuing | None:
    """What the host takes to queue components on a GPU; None where it was not measured apart.

    A convolution and its plan, or an attention, take the host longer than a copy. Held near 0, so that a kind which always
    comes with another is told from it only where that matters.
    """
    known = [(entry.parts, entry.issue_s) for entry in measured if entry.phase == phase and entry.issue_s]
    if not known:
        return None
    kinds = sorted({kind for parts, _ in known for kind in parts.counts})
    terms = np.array(
        [[parts.components, float(parts.launches), *(float(parts.counts.get(kind, 0)) for kind in kinds)] for parts, _ in known]
    )
    prior = np.zeros((len(kinds), 3 + len(kinds)))
    for row in range(len(kinds)):
        prior[row, 2 + row] = np.sqrt(len(known)) * ISSUE_PRIOR / USUAL_LAUNCH_S
    component, launch, *more = fit_terms(terms, np.array([issue_s for _, issue_s in known]), prior).tolist()
    beyond = {kind: rounded(value) for kind, value in zip(kinds, more, strict=True) if value > 0}
    return _Issuing(rounded(component), rounded(launch), beyond)


def _held_out(measured: Sequence[MeasuredComponent], byte_s: float) -> tuple[dict[str, float], float]:
    """By phase the spread of single components, and that of the computation of whole steps, each model by a fit to the others.

    Of steps it is the root mean square (there are few, and a bias of a model is an error); of components a robust spread.
    """
    logs: dict[str, list[float]] = {phase: [] for phase in PHASES}
    steps: list[float] = []
    for model in sorted({entry.model for entry in measured}):
        others = without_model(measured, model)
        if len({entry.fingerprint for entry in others}) < MIN_COMPONENTS:
            continue
        fitted = {phase: _fit(others, phase, byte_s) for phase in PHASES}
        totals: dict[int, tuple[float, float]] = {}
        for entry in measured:
            if entry.model == model:
                predicted = float(np.dot(_terms(entry.parts), fitted[entry.phase]))  # type: ignore[index]
                logs[entry.phase].append(float(np.log(predicted / entry.seconds)))
                before = totals.get(entry.samples, (0.0, 0.0))
                totals[entry.samples] = (before[0] + predicted, before[1] + entry.seconds)
        steps += [float(np.log(predicted / seconds)) for predicted, seconds in totals.values()]
    if not steps:
        return dict.fromkeys(PHASES, UNKNOWN_SIGMA), UNKNOWN_SIGMA
    spreads = {phase: NORMAL_MAD * float(np.median(np.abs(values))) for phase, values in logs.items()}
    return spreads, float(np.sqrt(np.mean(np.square(steps))))
