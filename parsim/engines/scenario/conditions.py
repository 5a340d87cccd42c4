"""A scenario for one program on one cluster: checked against both, and in the terms the dynamic engine asks in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from parsim.arrays import Floats
from parsim.engines.scenario.flows import Flow, Lane, flow_of
from parsim.engines.scenario.scenario import Jitter, LinkChange, Scenario, Straggler
from parsim.errors import ScenarioError, near_matches
from parsim.graph.columns import Columns
from parsim.hardware.cluster import Cluster
from parsim.work import Collective, SendRecv


@dataclass(frozen=True, kw_only=True, eq=False)
class Conditions:
    """Conditions of the machine that the dynamic engine takes in addition to durations.

    Attributes:
        start_s: the scenario's time at which the simulation begins.
        flows: of every piece of communication that moves bytes over links; empty where no link matters.
        share_links: flows that use a lane at once share it max-min fairly.
    """

    start_s: float = 0.0
    stragglers: tuple[Straggler, ...] = ()
    links: tuple[LinkChange, ...] = ()
    flows: Mapping[Collective | SendRecv, Flow] = field(default_factory=dict)
    share_links: bool = False

    def slowness(self, rank: int, at_s: float) -> float:
        """How many times as long a rank's computation takes at a time of the scenario."""
        factor = 1.0
        for entry in self.stragglers:
            if entry.rank == rank and entry.holds(at_s):
                factor *= entry.factor
        return factor

    def room(self, lane: Lane, at_s: float) -> float:
        """The share of its bandwidth that a lane has at a time of the scenario."""
        factor = 1.0
        for entry in self.links:
            if entry.holds(at_s) and (entry.between is None or lane.joins(*entry.between)):
                factor *= entry.bandwidth_factor
        return factor

    @property
    def change_times_s(self) -> tuple[float, ...]:
        """When anything changes, counted from `start_s`, ascending, > 0."""
        spells = (*self.stragglers, *self.links)
        times = {time - self.start_s for entry in spells for time in (entry.from_s, entry.until_s) if time is not None}
        return tuple(sorted(time for time in times if time > 0))


def conditions_for(
    scenario: Scenario, columns: Columns, cluster: Cluster, *, start_s: float | None = None
) -> Conditions | None:
    """The scenario as this program meets it, from `start_s` on (None: the scenario's own); None where it changes nothing.

    Jitter is not a condition: see `jittered_s`.

    Raises ScenarioError for ranks or links that are not there, and for links where the profile prices communication without;
    CostError where a price has no links.
    """
    check_places(scenario, columns.world_size, cluster)
    if not (scenario.stragglers or scenario.links or scenario.share_links):
        return None
    return Conditions(
        start_s=scenario.start_s if start_s is None else start_s,
        stragglers=scenario.stragglers,
        links=scenario.links,
        flows=_flows(columns, cluster) if scenario.links or scenario.share_links else {},
        share_links=scenario.share_links,
    )


def straggling(columns: Columns, conditions: Conditions) -> Floats:
    """float64 [n]: how many times as long every task takes on the stragglers of the conditions' start: the slowest of its ranks
    for computation and loading, 1 for communication."""
    slowness = np.array([conditions.slowness(rank, conditions.start_s) for rank in range(columns.world_size)])
    slowest = np.maximum.reduceat(slowness[columns.resource_rank[columns.uses.values]], columns.uses.offsets[:-1])
    factors: Floats = np.where(columns.communicates, 1.0, slowest)
    return factors


def check_places(scenario: Scenario, world_size: int, cluster: Cluster) -> None:
    """Raises ScenarioError unless every rank, node and link that the scenario names is there."""
    for number, entry in enumerate(scenario.stragglers):
        _check_rank(f"stragglers.{number}", entry.rank, world_size)
    nodes = sorted({device.node for device in cluster.devices[:world_size]})
    for number, failure in enumerate(scenario.failures.at):
        if failure.rank is not None:
            _check_rank(f"failures.at.{number}", failure.rank, world_size)
        if failure.node is not None and failure.node not in nodes:
            raise ScenarioError(
                f"failures.at.{number}: no node {failure.node} to fail: the plan's ranks sit on node"
                f"{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes[:16]))}"
            )
    topology = cluster.topology
    for number, change in enumerate(scenario.links):
        if change.between is None:
            continue
        a, b = change.between
        for end in (a, b):
            if end not in topology.ends:
                raise ScenarioError(f"links.{number}: {cluster.name} has no link end {end!r}{near_matches(end, topology.ends)}")
        if not topology.between(a, b):
            joined = sorted({link.other(a) for link in topology.at(a)})
            raise ScenarioError(
                f"links.{number}: no link connects {a} and {b} on {cluster.name}; {a} is connected to {', '.join(joined[:16])}"
            )


def _check_rank(key: str, rank: int, world_size: int) -> None:
    if rank >= world_size:
        raise ScenarioError(f"{key}: no rank {rank}: the plan has ranks 0 to {world_size - 1}; name one of them")


def _flows(columns: Columns, cluster: Cluster) -> dict[Collective | SendRecv, Flow]:
    if cluster.profile.communication.link_model is None:
        raise ScenarioError(
            f"profile {cluster.profile.name} prices communication per group of ranks and knows no links, so none can change or "
            "be shared. Drop links and share_links, or take a profile with a link model"
        )
    works = dict.fromkeys(unit.work for unit in columns.units if isinstance(unit.work, Collective | SendRecv))
    found = {work: flow_of(work, cluster) for work in works}
    return {work: flow for work, flow in found.items() if flow is not None}


def jittered_s(durations_s: Floats, columns: Columns, jitter: Jitter, rng: np.random.Generator, draws: int) -> Floats:
    """float64 [draws, n]: `durations_s` (float64 [n]) times an independent factor of mean 1 per draw and task."""
    sigma = np.where(columns.communicates, jitter.communication_sigma, jitter.compute_sigma)
    shape = (draws, columns.size)
    if not sigma.any():
        return np.repeat(durations_s[None, :], draws, axis=0)
    if jitter.distribution == "lognormal":
        spread = np.sqrt(np.log1p(sigma**2))
        factors = np.exp(spread * rng.standard_normal(shape) - spread**2 / 2)
    elif jitter.distribution == "uniform":
        factors = 1 + 3**0.5 * sigma * rng.uniform(-1, 1, shape)
    else:
        variance = np.where(sigma > 0, sigma**2, 1.0)
        factors = np.where(sigma > 0, rng.gamma(1 / variance, variance, shape), 1.0)
    seconds: Floats = durations_s * factors
    return seconds
