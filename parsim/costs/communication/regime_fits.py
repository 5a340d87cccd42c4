"""Piecewise alpha-beta fits of measured collectives, one per operation and group size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np

from parsim.costs.communication.closed_forms import regimes_s
from parsim.errors import ProfileError, require
from parsim.hardware.profile import CollectiveFit, CollectivePoint, Regime
from parsim.numeric import Floats

MAX_REGIMES = 4
MIN_SIZES_PER_REGIME = 2
HUBER = 1.345
ROUNDS = 12
MIN_SIGMA = 0.01
Z_90 = 1.64
"""A 90% interval reaches so many standard deviations to each side."""


def fit_regimes(
    points: Sequence[CollectivePoint],
    *,
    algorithm: str = "measured",
    source: str | None = None,
    max_regimes: int = MAX_REGIMES,
    closest: bool = False,
) -> list[CollectiveFit]:
    """One fit per (operation, group size): seconds = latency + seconds_per_byte * size in 1 to `max_regimes` size ranges.

    Within a range, latency and slope are >= 0 and minimise the Huber loss of the relative error. The ends of the ranges are
    searched exhaustively (each range holds >= 2 sizes); how many ranges are used is what predicts left-out points best.
    Points of another machine (`measured_on`) are ignored.

    Args:
        source: key of the fit's source; None takes the points' own.
        closest: as many ranges as come closest to the points themselves.

    Raises:
        ProfileError: fewer than two sizes of an operation and group size.
    """
    groups: dict[tuple[str, int], list[CollectivePoint]] = {}
    for point in points:
        if not point.measured_on:
            groups.setdefault((point.operation, len(point.group)), []).append(point)
    return [
        _fit_group(operation, size, sorted(group, key=lambda point: point.size_bytes), algorithm, source, max_regimes, closest)
        for (operation, size), group in sorted(groups.items())
    ]


def fit_linear(columns: Floats, seconds: Floats) -> Floats:
    """Coefficients >= 0 of `columns @ x = seconds` [n] under the Huber loss of the relative error (reweighted NNLS).

    A minute pull towards zero decides what the points leave open, so that the result is unique.
    """
    require("scipy", "fitting measured collectives")
    from scipy.optimize import nnls  # 0.3 s: imported where it is used

    relative = columns / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    scaled = relative / scale
    ridge = 1e-7 * np.eye(columns.shape[1])
    weights = np.ones(len(seconds))
    solution = np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        matrix = np.vstack([scaled * weights[:, None], ridge])
        target = np.concatenate([weights, np.zeros(columns.shape[1])])
        solution, _ = nnls(matrix, target)
        residual = np.abs(scaled @ solution - 1.0)
        limit = HUBER * max(1.4826 * float(np.median(residual)), 1e-6)
        before, weights = weights, np.sqrt(np.minimum(1.0, limit / np.maximum(residual, 1e-12)))
        if np.array_equal(weights, before):
            break  # every further round would repeat this one
    return np.asarray(solution / scale, dtype=np.float64)


def sigma_that_holds(sizes: Floats, error: Floats) -> float:
    """The relative spread whose 90% interval holds what was measured at every size, and nine of ten single timings.

    Args:
        sizes: of the timings, in bytes; equal ones count as their median. error: log(measured / predicted) of each.
    """
    by_size = [abs(float(np.median(error[sizes == size]))) for size in np.unique(sizes)]
    return max(*by_size, float(np.quantile(np.abs(error), 0.9))) / Z_90


def rounded(value: float) -> float:
    """Six significant digits: more would only record the arithmetic of one machine, as the last of them may already."""
    return float(f"{value:.6g}")


def _fit_group(
    operation: str,
    group_size: int,
    points: Sequence[CollectivePoint],
    algorithm: str,
    source: str | None,
    max_regimes: int,
    closest: bool,
) -> CollectiveFit:
    sizes = np.array([point.size_bytes for point in points], dtype=np.float64)
    seconds = np.array([point.seconds for point in points], dtype=np.float64)
    distinct = np.unique(sizes)
    if len(distinct) < 2:
        raise ProfileError(
            f"{operation} over {group_size} ranks was measured at {len(distinct)} size(s); a fit needs at least 2: "
            "measure more sizes"
        )
    best: tuple[float, list[Regime]] | None = None
    for count in range(1, max_regimes + 1):
        ends = _best_ends(sizes, seconds, distinct, count)
        if ends is None:
            break
        regimes = _regimes(sizes, seconds, ends)
        score = _error(regimes, sizes, seconds) if closest else _left_out_error(sizes, seconds, ends)
        if best is None or score < 0.98 * best[0]:
            best = (score, regimes)
    assert best is not None  # one regime is always possible
    error = np.array([regimes_s(best[1], size) for size in sizes]) / seconds - 1.0
    spreads = [point.spread for point in points if point.spread is not None]
    return CollectiveFit(
        operation=operation,
        group_size=group_size,
        algorithm=algorithm,
        regimes=best[1],
        relative_sigma=rounded(max(MIN_SIGMA, 1.4826 * float(np.median(np.abs(error))))),
        repeat_sigma=rounded(float(np.median(spreads))) if spreads else 0.0,
        min_size_bytes=int(distinct[0]),
        max_size_bytes=int(distinct[-1]),
        source=source or points[0].source,
    )


def _best_ends(sizes: Floats, seconds: Floats, distinct: Floats, count: int) -> tuple[float, ...] | None:
    """The ends of the first count - 1 ranges that fit best, by exhaustive search; None if there are too few sizes."""
    places = range(MIN_SIZES_PER_REGIME, len(distinct) - MIN_SIZES_PER_REGIME + 1)
    lines: dict[tuple[int, int], Floats] = {}
    best: tuple[float, tuple[float, ...]] | None = None
    for cuts in combinations(places, count - 1):
        bounds = (0, *cuts, len(distinct))
        if any(high - low < MIN_SIZES_PER_REGIME for low, high in pairwise(bounds)):
            continue
        predicted = np.zeros(len(sizes))
        floor = 0.0
        for low, high in pairwise(bounds):
            inside = (sizes >= distinct[low]) & (sizes <= distinct[high - 1])
            if (low, high) not in lines:
                lines[low, high] = _line(sizes[inside], seconds[inside])
            latency, slope = lines[low, high]
            predicted[inside] = np.maximum(floor, latency + slope * sizes[inside])
            floor = max(floor, latency + slope * distinct[high - 1])
        error = np.abs(predicted / seconds - 1.0)
        loss = float(np.minimum(error**2, 0.2 * error).sum())
        if best is None or loss < best[0] * (1 - 1e-9):
            best = (loss, tuple(float(distinct[cut - 1]) for cut in cuts))
    return None if best is None else best[1]


def _left_out_error(sizes: Floats, seconds: Floats, ends: tuple[float, ...]) -> float:
    """Mean absolute relative error at sizes that took no part in the fit; the outermost sizes always take part."""
    distinct = np.unique(sizes)
    errors: list[float] = []
    for size in distinct[1:-1]:
        keep = sizes != size
        regimes = _regimes(sizes[keep], seconds[keep], ends)
        errors.extend(abs(regimes_s(regimes, size) / second - 1.0) for second in seconds[~keep])
    if not errors:
        return _error(_regimes(sizes, seconds, ends), sizes, seconds)
    return float(np.mean(errors)) + 1e-9


def _error(regimes: Sequence[Regime], sizes: Floats, seconds: Floats) -> float:
    """Mean absolute relative error at the timings themselves."""
    errors = [abs(regimes_s(regimes, size) / second - 1.0) for size, second in zip(sizes, seconds, strict=True)]
    return float(np.mean(errors)) + 1e-9


def _regimes(sizes: Floats, seconds: Floats, ends: tuple[float, ...]) -> list[Regime]:
    regimes: list[Regime] = []
    low = -np.inf
    for end in (*ends, np.inf):
        inside = (sizes > low) & (sizes <= end)
        low = end
        if not inside.any():
            continue
        latency, slope = _line(sizes[inside], seconds[inside])
        regimes.append(
            Regime(
                max_size_bytes=None if end == np.inf else int(end),
                latency_s=rounded(float(latency)),
                seconds_per_byte=rounded(float(slope)),
            )
        )
    return regimes


def _line(sizes: Floats, seconds: Floats) -> Floats:
    return fit_linear(np.column_stack([np.ones(len(sizes)), sizes]), seconds)
