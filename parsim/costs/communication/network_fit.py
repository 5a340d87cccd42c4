"""A network's numbers from collectives that were measured between nodes.

The share of the cards' rate that rings and trees reach, what LL and LL128 reach of it, and the hops over the network are moved
by one factor each, as far as the closed forms come closer to the measurements (coordinate descent on the logarithms, whose
steps shrink). What no measurement speaks of keeps its number. Leaves out: the cards and the fabric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.costs.communication.measured import MIN_SIGMA, Z_90, rounded
from parsim.costs.estimate import Estimate
from parsim.errors import CostError, ProfileError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.parts import Network, NetworkPoint
from parsim.hardware.profile import Profile, Sourced
from parsim.work import COLLECTIVE_KINDS, Collective, SendRecv

FACTORS = ("ring", "tree", "LL", "LL128", "hop")
STEPS = (0.4, 0.15, 0.05, 0.015)
"""Of the logarithm of a factor: half again as much at first, one percent at last."""
MOST_ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """The timings of one collective at one size, and the cluster that prices it with a network of its own."""

    work: Collective | SendRecv
    cluster: Cluster
    seconds: float

    def estimate(self, cluster: Cluster) -> Estimate:
        if isinstance(self.work, Collective):
            return estimate_collective(self.work, cluster)
        return estimate_send_recv(self.work, cluster)


def _estimates(network: Network, measured: Sequence[_Measured]) -> list[tuple[Estimate, float]]:
    """The price of each on a network of the same cards and switches, and log(predicted / measured)."""
    clusters: dict[int, Cluster] = {}
    found = []
    for one in measured:
        if id(one.cluster) not in clusters:
            made = replace(one.cluster, name=f"{network.name} {one.cluster.name}", network=network)
            vars(made).update(places=one.cluster.places, _spreads=one.cluster._spreads)  # they follow from links alone
            clusters[id(one.cluster)] = made
        estimate = one.estimate(clusters[id(one.cluster)])
        found.append((estimate, math.log(estimate.median_s / one.seconds)))
    return found


def fitted_network(network: Network, points: Sequence[NetworkPoint], machines: Mapping[str, Profile], source: str) -> Network:
    """The network with the numbers that come closest to measured collectives, and with the spread that holds these.

    Args:
        points: of collectives between nodes. machines: the profile of a node, by the points' `machine`.
        source: key of the numbers' source, which the network lists.

    Raises CostError: the network does not price one of the collectives. ProfileError: a machine lacks a device.
    """
    measured = _measured(network, points, machines)
    factors = dict.fromkeys(FACTORS, 0.0)
    least = _distance(network, measured)
    for step in STEPS:
        for _ in range(MOST_ROUNDS):
            before = least
            for name in FACTORS:
                for sign in (1.0, -1.0):
                    tried = factors | {name: factors[name] + sign * step}
                    if (distance := _distance(_scaled(network, tried, source), measured)) < least:
                        least, factors = distance, tried
                        break
            if least > before * (1 - 1e-3):
                break
    fitted = _scaled(network, factors, source)
    sigma = max(_sigma_that_holds(fitted, measured), MIN_SIGMA)
    return fitted.model_copy(update={"points": list(points), "measured_sigma": Sourced(value=rounded(sigma), source=source)})


def log_errors(network: Network, points: Sequence[NetworkPoint], machines: Mapping[str, Profile]) -> list[float]:
    """log(predicted / measured) at every measured size. Raises as `fitted_network`."""
    return [error for _, error in _estimates(network, _measured(network, points, machines))]


def nearest_network(networks: Sequence[Network], points: Sequence[NetworkPoint], machines: Mapping[str, Profile]) -> Network:
    """The network whose closed forms come closest as they are. Raises CostError: none of them prices the collectives."""
    near: list[tuple[float, Network]] = []
    for network in networks:
        try:
            near.append((_distance(network, _measured(network, points, machines)), network))
        except (CostError, ProfileError):
            continue  # such as a machine that has no place for its cards
    if not near:
        raise CostError("no network prices what was measured; take a machine with a link model")
    return min(near, key=lambda pair: pair[0])[1]


def _distance(network: Network, measured: Sequence[_Measured]) -> float:
    """Mean and median of |log(predicted / measured)| together."""
    errors = [abs(error) for _, error in _estimates(network, measured)]
    return fmean(errors) + median(errors)


def _measured(network: Network, points: Sequence[NetworkPoint], machines: Mapping[str, Profile]) -> list[_Measured]:
    clusters: dict[tuple[str, int], Cluster] = {}
    seconds: dict[tuple[str, str, tuple[tuple[int, ...], ...], int], list[float]] = {}
    for point in points:
        key = point.operation, point.machine, tuple(map(tuple, point.hosts)), point.size_bytes
        seconds.setdefault(key, []).append(point.seconds)
    found: list[_Measured] = []
    for (operation, machine, hosts, size), times in seconds.items():
        profile = machines[machine]
        place = (machine, len(hosts))
        if place not in clusters:
            clusters[place] = cluster_from_profile(profile, nodes=len(hosts), network=network)
        per_node = len(profile.devices)
        ranks = tuple(node * per_node + device for node, devices in enumerate(hosts) for device in devices)
        work = (
            Collective(operation=operation, group=ranks, size_bytes=size)
            if operation in COLLECTIVE_KINDS
            else SendRecv(source=ranks[0], destination=ranks[-1], size_bytes=size)
        )
        found.append(_Measured(work=work, cluster=clusters[place], seconds=median(times)))
    return found


def _scaled(network: Network, factors: Mapping[str, float], source: str) -> Network:
    """Protocols whose efficiency and hop have these factors, given as logarithms. The name makes caches tell networks apart."""
    protocols = [
        entry.model_copy(
            update={
                "hop_s": rounded(entry.hop_s * math.exp(factors["hop"])),
                "efficiency": rounded(entry.efficiency * math.exp(factors[entry.algorithm] + factors.get(entry.protocol, 0.0))),
                "source": source,
            }
        )
        for entry in network.protocols
    ]
    name = " ".join([network.name, *(f"{value:.4f}" for value in factors.values())])
    return network.model_copy(update={"name": name, "protocols": protocols})


def _sigma_that_holds(network: Network, measured: Sequence[_Measured]) -> float:
    """The spread of the network with which 90% intervals hold every measured size, beside the other spreads of its price."""
    none = Sourced(value=0.0, source="")
    bare = network.model_copy(update={"name": f"{network.name} bare", "relative_sigma": none, "measured_sigma": none})
    most = 0.0
    for estimate, error in _estimates(bare, measured):
        most = max(most, (error / Z_90) ** 2 - sum(sigma**2 for _, sigma in estimate.parameters))
    return math.sqrt(most)
