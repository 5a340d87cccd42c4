"""Collectives that were measured on this very machine: piecewise alpha-beta fits, and which fit prices a group.

A profile may hold points without a fit: typed in by hand, for example. They are fitted here when they are first needed, so
every point is used or refused. Two kinds of points have been used already: those that a fit covers, and those to which the
link model itself was fitted.

On a machine with links a fit holds for the groups that it was measured on, and for those that the links join alike. It beats
the link model there. Groups that run at the same time stretch its bytes as they stretch those of the link model.
Leaves out groups across nodes: a profile holds points of one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np

from parsim.costs.communication.algorithms import link_model_of
from parsim.costs.communication.closed_forms import regimes_s
from parsim.costs.communication.contention import group_pace, inside_pace, rings_of, transfer_pace
from parsim.errors import CostError, ProfileError, require
from parsim.hardware.cluster import Cluster, NodeShape
from parsim.hardware.profile import CollectiveFit, CollectivePoint, Communication, Regime
from parsim.numeric import Floats
from parsim.work import COLLECTIVE_KINDS

MAX_REGIMES = 4
MIN_SIZES_PER_REGIME = 2
HUBER = 1.345
ROUNDS = 12
MIN_SIGMA = 0.01
Z_90 = 1.64
"""A 90% interval reaches so many standard deviations to each side."""


def fit_regimes(points: Sequence[CollectivePoint], *, source: str | None = None, closest: bool = False) -> list[CollectiveFit]:
    """One fit per (operation, group size): seconds = latency + seconds_per_byte * size in 1 to `MAX_REGIMES` size ranges.

    Within a range, latency and slope are >= 0 and minimise the Huber loss of the relative error. The ends of the ranges are
    searched exhaustively (each range holds >= 2 sizes); how many ranges are used is what predicts left-out points best, or
    (`closest`) comes closest to the points themselves. Points of another machine (`measured_on`) are ignored. `source`: key of
    the fit's source; None takes the points' own.

    Raises:
        ProfileError: fewer than two sizes of an operation and group size.
    """
    groups: dict[tuple[str, int], list[CollectivePoint]] = {}
    for point in points:
        if not point.measured_on:
            groups.setdefault((point.operation, len(point.group)), []).append(point)
    return [
        _fit_group(operation, size, sorted(group, key=lambda point: point.size_bytes), source, closest)
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

    `sizes`: of the timings, in bytes; equal ones count as their median. `error`: log(measured / predicted) of each.
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
    source: str | None,
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
    for count in range(1, MAX_REGIMES + 1):
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
        algorithm="measured",
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


# --- which fit prices a group -----------------------------------------------------------------------------------------


def unfitted_points(communication: Communication) -> list[CollectivePoint]:
    """Points of this machine that neither a fit nor the link model was made from."""
    model = communication.link_model
    used = () if model is None else model.point_sources
    return [
        point
        for point in communication.points
        if not point.measured_on and point.source not in used and not any(_covers(fit, point) for fit in communication.fits)
    ]


def _covers(fit: CollectiveFit, point: CollectivePoint) -> bool:
    if fit.operation != point.operation or fit.group_size != len(point.group):
        return False
    return not fit.groups or sorted(point.group) in [sorted(group) for group in fit.groups]


def fits_of_points(
    points: list[CollectivePoint], *, by_group: bool, source: str | None = None, closest: bool = False
) -> list[CollectiveFit]:
    """One fit per operation and group size, or (`by_group`) per operation and group, since links join groups differently.

    Its spread holds the points (`sigma_that_holds`); other arguments and errors as of `fit_regimes`.
    """
    groups: dict[tuple[int, ...], list[CollectivePoint]] = {}
    for point in points:
        groups.setdefault(tuple(sorted(point.group)) if by_group else (len(point.group),), []).append(point)
    return [
        fit.model_copy(
            update={
                "groups": [list(group)] if by_group else [],
                "relative_sigma": max(fit.relative_sigma, _spread([one for one in own if one.operation == fit.operation], fit)),
            }
        )
        for group, own in sorted(groups.items())
        for fit in fit_regimes(own, source=source, closest=closest)
    ]


def _spread(points: list[CollectivePoint], fit: CollectiveFit) -> float:
    own = [point for point in points if not point.measured_on]
    error = np.log([point.seconds / regimes_s(fit.regimes, point.size_bytes) for point in own])
    return rounded(sigma_that_holds(np.array([float(point.size_bytes) for point in own]), error))


@lru_cache(maxsize=64)
def fits_of(cluster: Cluster) -> tuple[CollectiveFit, ...]:
    """The fits of a cluster's profile, and those of points that it holds without one. Raises CostError where these are too
    few for a fit."""
    profile = cluster.profile
    points = unfitted_points(profile.communication)
    if not points:
        return tuple(profile.communication.fits)
    try:
        made = fits_of_points(points, by_group=profile.communication.link_model is not None)
    except ProfileError as error:
        raise CostError(
            f"profile {profile.name}, communication.points: {error}; or drop the points, which price nothing"
        ) from error
    return (*profile.communication.fits, *made)


def measured_fit(
    cluster: Cluster, operation: str, group: tuple[int, ...], concurrent: tuple[tuple[int, ...], ...]
) -> tuple[CollectiveFit, float] | None:
    """The fit of a group (ascending) inside one node that was measured itself or is joined alike, and how many times as long
    its bytes take beside the concurrent groups; None if there is none."""
    ((node, members),) = cluster.spread(group)
    link_kind = link_model_of(cluster).link_kind
    fit = _fit_for(cluster, operation, cluster.nodes.shapes[node], members, link_kind)
    if fit is None:
        return None
    if not concurrent:
        return fit, 1.0
    if COLLECTIVE_KINDS[operation].pairwise:
        alone = group_pace(cluster, link_kind, group, "pairs").inside_s_per_byte
        beside = group_pace(cluster, link_kind, group, "pairs", concurrent).inside_s_per_byte
    else:
        alone = inside_pace(cluster, link_kind, group)[1]
        beside = inside_pace(cluster, link_kind, group, concurrent)[1]
    return fit, beside / alone if alone else 1.0


def measured_transfer(
    cluster: Cluster, pair: tuple[int, int], concurrent: tuple[tuple[int, ...], ...]
) -> tuple[CollectiveFit, float] | None:
    """The fit of a transfer between two devices of one node, as `measured_fit` gives it; None for one between nodes."""
    (node, _), (other, _) = (cluster.places[rank] for rank in pair)
    if node != other:
        return None
    link_kind = link_model_of(cluster).link_kind
    members = tuple(sorted(cluster.places[rank][1] for rank in pair))
    fit = _fit_for(cluster, "send_recv", cluster.nodes.shapes[node], members, link_kind)
    if fit is None:
        return None
    alone = transfer_pace(cluster, link_kind, pair)[0]
    beside = transfer_pace(cluster, link_kind, pair, concurrent)[0] if concurrent else alone
    return fit, beside / alone if alone else 1.0


def _fit_for(
    cluster: Cluster, operation: str, shape: NodeShape, members: tuple[int, ...], link_kind: str
) -> CollectiveFit | None:
    """The fit of this very group, else of one that the links join alike, else one that holds wherever the ranks sit."""
    fits = [fit for fit in fits_of(cluster) if fit.operation == operation and fit.group_size == len(members)]
    if not fits:
        return None
    for fit in fits:
        if any(tuple(sorted(group)) == members for group in fit.groups):
            return fit
    joined = rings_of(shape, link_kind, members)
    for fit in fits:
        if not fit.groups:
            return fit
        for group in fit.groups:
            if max(group) < len(shape.devices):
                rings = rings_of(shape, link_kind, tuple(sorted(group)))
                if (rings.count, rings.kinds, rings.seconds_per_byte) == (joined.count, joined.kinds, joined.seconds_per_byte):
                    return fit
    return None
