"""Fit the surfaces of `parsim.costs.compute.surfaces` to single operators measured on this machine.

Least squares of the relative error with no negative coefficient (scipy's nnls), made robust by weights that fall with the size
of a point's own error. A fit depends on the points alone and on nothing random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp, nnls
from scipy.sparse import coo_array

from calibration.fit.operators import FOLDS, MIN_POINTS, NORMAL_MAD
from calibration.fit.reject_outliers import launch_text
from parsim.costs.communication.measured import rounded
from parsim.costs.compute.surfaces import distances, log_sizes, stacked_terms
from parsim.errors import ProfileError
from parsim.hardware.records import OperatorPoint, OperatorSurface
from parsim.numeric import Floats
from parsim.units import format_seconds

BoolArray = NDArray[np.bool_]
PASSES = 6
ROBUST_SIGMAS = 1.5
EDGE_SHARE = 0.25
MIN_SIGMA_PER_DOUBLING = 0.05
"""Assumed least growth of sigma per doubling beyond the data."""

LESS_TIME = 0.2
"""A launch that takes less than this part of the time of another of which no term is larger contradicts it."""
MAX_LEFT_OUT = 0.25
"""Share of the launches of one surface; where more contradict others, no one can tell which of them are right."""


def fit_surfaces(points: Sequence[OperatorPoint], source: str, *, on_gpu: bool = False) -> list[OperatorSurface]:
    """One surface per kind, function, phase, device type and precision, of points that `consistent_operators` let pass. A GPU
    has terms of its own. Raises ProfileError: fewer than 8 points of one, or seconds that are not positive numbers."""
    for point in points:
        if not (np.isfinite(point.seconds) and point.seconds > 0):
            raise ProfileError(f"{_name(point)} took {point.seconds} s; a time is a positive number: calibrate again")
    return [_surface([points[number] for number in group], source, on_gpu) for _, group in sorted(_groups(points).items())]


def consistent_operators(points: Sequence[OperatorPoint], *, on_gpu: bool = False) -> tuple[list[OperatorPoint], list[str]]:
    """Without launches that contradict others of their surface, and one warning for each of them.

    As few launches go as possible, of equally few the slowest: what disturbs a measurement makes it longer.

    Args:
        on_gpu: a library of a GPU may refuse shapes, and take far longer for one shape than for the next larger one. So no
            share is too large there, and a surface without enough launches for a fit is left out whole, with a warning.

    Raises:
        ProfileError: on a CPU more than a quarter would go, or fewer than a fit needs be left.
    """
    warnings: dict[int, str] = {}
    for group in _groups(points).values():
        first = points[group[0]]
        gpu_phase = str(first.phase) if on_gpu else ""
        _, terms = stacked_terms(first.kind, [_sizes(points[number]) for number in group], gpu_phase=gpu_phase)
        seconds = np.array([points[number].seconds for number in group])
        no_less: BoolArray = np.logical_and.reduce(terms[:, None, :] >= terms[None, :, :], axis=2)
        against = no_less & (seconds[:, None] < LESS_TIME * seconds[None, :])
        kept = most_consistent(against, seconds)
        said = len(warnings)
        for place in np.flatnonzero(~kept).tolist():
            other = int(np.flatnonzero(kept & (against[place] | against[:, place]))[0])
            less = "less" if no_less[other, place] else "more"
            warnings[group[place]] = (
                f"left out {_name(points[group[place]])}: {format_seconds(seconds[place])}, contradicted by the "
                f"{format_seconds(seconds[other])} of one of no {less} work"
            )
        odd = len(warnings) - said
        if on_gpu:
            if len(group) - odd < MIN_POINTS:
                what, left = f"{first.kind} {first.function} {first.phase}", len(group) - odd
                few = f"left out {what}: {left} launches, a fit needs {MIN_POINTS}"
                warnings.update(dict.fromkeys(group, few))
            continue
        if odd > MAX_LEFT_OUT * len(group) or len(group) - odd < MIN_POINTS <= len(group):
            raise ProfileError(
                f"{odd} of {len(group)} launches of {first.kind} {first.function} {first.phase} contradict others "
                f"({list(warnings.values())[-1]}); at most a quarter may, and a fit needs {MIN_POINTS}; something else ran "
                "meanwhile: calibrate again"
            )
    return [point for number, point in enumerate(points) if number not in warnings], list(dict.fromkeys(warnings.values()))


def most_consistent(against: BoolArray, seconds: Floats) -> BoolArray:
    """bool [n]: the largest set of launches without a contradiction, of several the fastest.

    Contradiction is an order (no less work in a fifth of the time, and so on), hence the set is a largest antichain. It is a
    linear program over a network, whose vertices are whole numbers. A launch is kept where its potential falls from 1 to 0, and
    behind a launch potentials are no higher than what it left.

    Args:
        against: bool [n, n], [a, b]: a, of no less work, took less than `LESS_TIME` of b's time. seconds: [n].
    """
    number = len(seconds)
    after, before = np.nonzero(against)
    if not len(after):
        return np.ones(number, dtype=bool)
    faster = np.empty(number)
    faster[np.argsort(-seconds, kind="stable")] = np.arange(number)
    weights = 1 + faster / (number * (number + 1))
    rows = np.arange(len(after) + number)
    own = np.arange(number)
    # variables: [potential on entering, potential on leaving]
    higher = np.concatenate([after, number + own])
    lower = np.concatenate([number + before, own])
    ones = np.ones(len(rows))
    limits = coo_array((np.concatenate([ones, -ones]), (np.tile(rows, 2), np.concatenate([higher, lower]))))
    solved = milp(np.concatenate([-weights, weights]), bounds=Bounds(0, 1), constraints=LinearConstraint(limits, ub=0))
    potentials = np.asarray(solved.x)
    kept: BoolArray = potentials[:number] - potentials[number:] > 0.5
    return kept


def _groups(points: Sequence[OperatorPoint]) -> dict[tuple[str, ...], list[int]]:
    """Numbers of the points of each surface."""
    found: dict[tuple[str, ...], list[int]] = {}
    for number, point in enumerate(points):
        key = (point.kind, point.function, point.phase, point.precision, point.device_type)
        found.setdefault(key, []).append(number)
    return found


def cross_validated(terms: Floats, seconds: Floats) -> Floats:
    """float64 [n]: log of predicted over measured seconds, each point predicted by a fit that had not seen it."""
    folds = np.arange(len(seconds)) % FOLDS
    held_out = np.zeros(len(seconds))
    for fold in range(min(FOLDS, len(seconds))):
        kept = folds != fold
        held_out[~kept] = log_errors(terms[~kept], fit_terms(terms[kept], seconds[kept]), seconds[~kept])
    return held_out


def log_errors(terms: Floats, coefficients: Floats, seconds: Floats) -> Floats:
    """log(predicted / measured); a prediction of nothing counts as a thousandth of the measured."""
    errors: Floats = np.log(np.maximum(terms @ coefficients / seconds, 1e-3))
    return errors


def fit_terms(terms: Floats, seconds: Floats, prior: Floats | None = None) -> Floats:
    """Non-negative coefficients of terms [points, terms]: robust least squares of the relative error. prior: rows [k, terms +
    1], each saying that terms @ coefficients is its last entry, in units of one point's relative error."""
    relative = terms / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    relative = relative / scale
    extra = np.zeros((0, terms.shape[1])) if prior is None else prior[:, :-1] / scale
    wanted = np.zeros(0) if prior is None else prior[:, -1]
    weights = np.ones(len(seconds))
    for _ in range(PASSES):
        coefficients, _ = nnls(np.vstack([relative * weights[:, None], extra]), np.concatenate([weights, wanted]))
        ratio = np.maximum(relative @ coefficients, 0.05)
        errors = np.abs(np.log(ratio))
        usual = NORMAL_MAD * float(np.median(errors)) + 1e-3
        # dividing by the ratio makes too slow and too fast by the same factor weigh the same
        weights = 1.0 / np.sqrt(np.maximum(1.0, errors / (ROBUST_SIGMAS * usual)) * ratio)
    found: Floats = coefficients / scale
    return found


def _surface(points: Sequence[OperatorPoint], source: str, on_gpu: bool) -> OperatorSurface:
    first = points[0]
    if len(points) < MIN_POINTS:
        raise ProfileError(f"{len(points)} points for {_name(first)}; a fit needs at least {MIN_POINTS}: calibrate again")
    gpu_phase = str(first.phase) if on_gpu else ""
    names, terms = stacked_terms(first.kind, [_sizes(point) for point in points], gpu_phase=gpu_phase)
    seconds = np.array([point.seconds for point in points])
    held_out = cross_validated(terms, seconds)
    sigma = NORMAL_MAD * float(np.median(np.abs(held_out)))
    shapes = np.array([log_sizes(point.shape) for point in points])
    folds = np.arange(len(points)) % FOLDS
    gaps = np.concatenate(
        [distances(shapes[folds == fold], shapes[folds != fold]) for fold in range(FOLDS) if (folds == fold).any()]
    )
    reach = float(np.quantile(gaps, 0.9))
    coefficients = fit_terms(terms, seconds)
    kept = {name: rounded(value) for name, value in zip(names, coefficients.tolist(), strict=True) if value > 0}
    return OperatorSurface(
        kind=first.kind,
        function=first.function,
        phase=first.phase,
        precision=first.precision,
        device_type=first.device_type,
        seconds_per_term=kept,
        relative_sigma=rounded(sigma),
        reach_doublings=rounded(reach),
        sigma_per_doubling=rounded(_growth(terms, seconds, shapes, sigma)),
        points=len(points),
        source=source,
    )


def _growth(terms: Floats, seconds: Floats, shapes: Floats, sigma: float) -> float:
    """How much more the longest quarter of the points is missed by a fit to the others, per doubling between them."""
    edge = seconds > np.quantile(seconds, 1 - EDGE_SHARE)
    errors = log_errors(terms[edge], fit_terms(terms[~edge], seconds[~edge]), seconds[edge])
    away = float(np.median(distances(shapes[edge], shapes[~edge])))
    more = NORMAL_MAD * float(np.median(np.abs(errors))) - sigma
    return max(MIN_SIGMA_PER_DOUBLING, more / max(1.0, away))


def _sizes(point: OperatorPoint) -> Mapping[str, float]:
    return {name: float(size) for name, size in point.shape.items()}


def _name(point: OperatorPoint) -> str:
    return launch_text(point.kind, point.function, point.phase, point.shape)
