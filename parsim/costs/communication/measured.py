"""Collectives that were measured on this very machine: which fit prices a group, on machines with a link model too.

A profile may hold points without a fit: typed in by hand, for example. They are fitted here when they are first needed, so
every point is used or refused. Two kinds of points have been used already: those that a fit covers, and those to which the
link model itself was fitted.

On a machine with links a fit holds for the groups that it was measured on, and for those that the links join alike. It beats
the link model there. Groups that run at the same time stretch its bytes as they stretch those of the link model.
Leaves out groups across nodes: a profile holds points of one machine.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from parsim.costs.communication.closed_forms import regimes_s
from parsim.costs.communication.contention import group_pace, inside_pace, rings_of, transfer_pace
from parsim.costs.communication.intranode import link_model_of
from parsim.costs.communication.regime_fits import fit_regimes, rounded, sigma_that_holds
from parsim.errors import CostError, ProfileError
from parsim.hardware.cluster import Cluster, NodeShape
from parsim.hardware.profile import CollectiveFit, CollectivePoint, Communication
from parsim.work import COLLECTIVE_KINDS

FITTED_BY_LINKS = "all_reduce"
"""The operation to which link models were fitted, in files that do not list the sources of these points."""


def unfitted_points(communication: Communication) -> list[CollectivePoint]:
    """Points of this machine that neither a fit nor the link model was made from."""
    model = communication.link_model

    def in_link_model(point: CollectivePoint) -> bool:
        if model is None:
            return False
        if model.point_sources is not None:
            return point.source in model.point_sources
        return point.operation == FITTED_BY_LINKS and sorted(point.group) in [sorted(group) for group in model.measured_groups]

    return [
        point
        for point in communication.points
        if not point.measured_on and not in_link_model(point) and not any(_covers(fit, point) for fit in communication.fits)
    ]


def _covers(fit: CollectiveFit, point: CollectivePoint) -> bool:
    if fit.operation != point.operation or fit.group_size != len(point.group):
        return False
    return not fit.groups or sorted(point.group) in [sorted(group) for group in fit.groups]


def fits_of_points(
    points: list[CollectivePoint], *, by_group: bool, source: str | None = None, closest: bool = False
) -> list[CollectiveFit]:
    """One fit per operation and group size, or (`by_group`) per operation and group, since links join groups differently.

    Its spread holds the points (`sigma_that_holds`).

    Args:
        source: key of the fits' source; None takes the points' own. closest: as of `fit_regimes`.

    Raises:
        ProfileError: fewer than two sizes of an operation and group.
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
    """The fits of a cluster's profile, and those of points that it holds without one.

    Raises CostError where such points are too few for a fit, with what is missing.
    """
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
    """The fit of a group inside one node that was measured itself or is joined alike, and how many times as long its bytes take
    beside the concurrent groups; None if there is none.

    For a machine with a link model; `group` is ascending. Raises CostError as `fits_of`.
    """
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
