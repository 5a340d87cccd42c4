"""Prices of computation that was measured: components between and beyond their measured samples, and optimizer steps."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import median
from typing import NamedTuple

import numpy as np

from parsim.costs.compute.launches import ComputeRequest
from parsim.costs.estimate import Estimate, Term, Terms, folded_s, summed
from parsim.hardware.records import ComponentPoint, OptimizerPoint
from parsim.units import format_seconds
from parsim.work import OptimizerStep

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
            heaviest load.
        drift: name and relative sigma of the cost parameter shared by all computation.

    Returns:
        An Estimate. Leaves out that a library may change its algorithm between two measured sample counts.
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

    Args:
        calls: of the optimizer's operations, one for each kind of parameter; each takes what a step takes whatever it updates.
        ranks_active, drift: as for `measured_component`.

    Returns:
        An Estimate. Leaves out effects that are not affine in elements and tensors, such as caches.
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
