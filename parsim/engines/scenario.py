"""scenario.toml: the conditions while a plan runs. Checked here, read-only inside.

    seed = 0
    start_s = 0.0               # when, in the scenario's time, the simulated step begins (a whole run begins at 0)
    share_links = true          # transfers that use a link at the same time share it

    [jitter]                    # every task's seconds are multiplied by a draw of mean 1
    distribution = "lognormal"  # lognormal | gamma | uniform
    compute_sigma = 0.05        # its relative standard deviation
    communication_sigma = 0.1

    [[stragglers]]              # computation and loading of a rank take `factor` times as long
    rank = 3
    factor = 1.5
    from_s = 0.0                # until_s left out: to the end
    until_s = 3600.0

    [[links]]                   # a link (left out: every link) has this share of its bandwidth
    between = ["gpu0", "gpu3"]
    bandwidth_factor = 0.5

    [asynchronous]              # data-parallel workers do not wait for one another
    merge_s = 0.01              # each holds the global model this long, first come first served

and, for whole runs (`parsim.engines.whole_run`), the tables [run], [checkpoints], [failures] and [device].
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from parsim.costs.communication.algorithms import choices, link_model_of
from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.costs.communication.contention import (
    FABRIC,
    LinkStep,
    NodeShare,
    Way,
    own_leaf_shares,
    part_loads,
    transfer_loads,
    uplink_rate,
)
from parsim.errors import ScenarioError, near_matches
from parsim.files import parse_toml, read_text
from parsim.hardware.cluster import Cluster
from parsim.hardware.records import Count, NonNegative, Positive
from parsim.numeric import Floats
from parsim.program.columns import Columns
from parsim.work import COLLECTIVE_KINDS, Collective, SendRecv

SPINE = "spine0"
_SECANT = 1 / 1024
"""Relative step over which the bandwidth part of a cost is measured."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One direction of a link, by the endpoints' names in the topology."""

    source: str
    target: str
    kind: str

    def joins(self, a: str, b: str) -> bool:
        return {self.source, self.target} == {a, b}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Attributes:
    loads: per lane, the share of the flow's rate that passes, the largest 1. room: per lane its bytes per second.
    transfer_s: seconds alone in which bytes move.
    """

    loads: Mapping[Lane, float]
    room: Mapping[Lane, float]
    transfer_s: float

    @property
    def full_pace(self) -> float:
        """Bytes per second on its busiest lane when it is alone."""
        return min(self.room[lane] / share for lane, share in self.loads.items())


@lru_cache(maxsize=4096)
def flow_of(work: Collective | SendRecv, cluster: Cluster) -> Flow | None:
    """The flow of a piece of communication; None where it moves nothing over any link. Raises CostError for a profile that
    prices communication without links (fits per group, as for gloo), or as its price does."""
    loads = _collective_loads(work, cluster) if isinstance(work, Collective) else _transfer_loads(work, cluster)
    loads = {lane: load for lane, load in loads.items() if load[0] > 0}
    if not loads:
        return None
    largest = max(share for share, _ in loads.values())
    return Flow(
        loads={lane: share / largest for lane, (share, _) in loads.items()},
        room={lane: room for lane, (_, room) in loads.items()},
        transfer_s=_transfer_s(work, cluster),
    )


def _transfer_s(work: Collective | SendRecv, cluster: Cluster) -> float:
    """S * dT/dS at the work's own size: the part of its seconds that grows with its bytes."""
    more = work.size_bytes + max(1, int(work.size_bytes * _SECANT))
    alone = _seconds(work, work.size_bytes, cluster)
    slope = (_seconds(work, more, cluster) - alone) / (more - work.size_bytes)
    return min(max(0.0, slope * work.size_bytes), alone)


def _seconds(work: Collective | SendRecv, size_bytes: int, cluster: Cluster) -> float:
    if isinstance(work, Collective):
        return estimate_collective(replace(work, size_bytes=size_bytes), cluster).median_s
    transfer = SendRecv(source=work.source, destination=work.destination, size_bytes=size_bytes)
    return estimate_send_recv(transfer, cluster).median_s


Loads = dict[Lane, tuple[float, float]]
"""Per lane the share of the bytes that passes, and the lane's bytes per second."""


def _collective_loads(work: Collective, cluster: Cluster) -> Loads:
    if len(work.group) < 2:
        return {}
    group = tuple(sorted(work.group))
    kind = link_model_of(cluster).link_kind
    spread = cluster.spread(group)
    ways: tuple[Way, ...] = ("inside",)
    if COLLECTIVE_KINDS[work.operation].pairwise:
        ways = ("pairs",)
    elif len(spread) > 1:
        best = choices(work.operation, group, work.size_bytes, cluster)[0]
        ways = ("rails", "inside") if best.algorithm == "hierarchical" else ("through",)
    by_lane: Loads = {}
    for way in ways:
        for node, members in spread:
            for loads in part_loads(cluster.nodes.shapes[node], kind, NodeShare(members, way, len(group))):
                for step, share in loads.items():
                    _add(by_lane, _lane(cluster, node, step), share, step[2].capacity_bytes_per_s)
        for leaf, share in own_leaf_shares(cluster, group, way).items():
            for lane in (Lane(leaf, SPINE, FABRIC), Lane(SPINE, leaf, FABRIC)):
                _add(by_lane, lane, share, uplink_rate(cluster, leaf))
    return by_lane


def _transfer_loads(work: SendRecv, cluster: Cluster) -> Loads:
    by_lane: Loads = {}
    loads = transfer_loads(cluster, link_model_of(cluster).link_kind, (work.source, work.destination))
    for (place, step), (share, room) in loads.items():
        if isinstance(place, int) and isinstance(step, tuple):
            _add(by_lane, _lane(cluster, place, step), share, room)
        else:
            leaf = str(place)
            _add(by_lane, Lane(leaf, SPINE, FABRIC) if step == "up" else Lane(SPINE, leaf, FABRIC), share, room)
    return by_lane


def _add(loads: Loads, lane: Lane, share: float, room: float) -> None:
    loads[lane] = (loads[lane][0] + share if lane in loads else share, room)


def _lane(cluster: Cluster, node: int, step: LinkStep) -> Lane:
    """A link of a node, by local names, as the whole topology calls it."""
    names = _names(cluster)[node]
    source, target = (cluster.nodes.leaf[node] if end == FABRIC else names.get(end, end) for end in step[:2])
    return Lane(source, target, step[2].kind)


@lru_cache(maxsize=16)
def _names(cluster: Cluster) -> tuple[Mapping[str, str], ...]:
    """Per node, local names to those of the topology."""
    nodes = cluster.nodes
    names: list[dict[str, str]] = [{} for _ in nodes.shapes]
    for device, (node, place) in nodes.place.items():
        names[node][nodes.shapes[node].devices[place]] = device
    ends = set(cluster.topology.ends)
    for node, shape in enumerate(nodes.shapes):
        for end in (*shape.topology.ends, *(port.nic for port in shape.ports)):
            if (full := f"node{node}/{end}") in ends:
                names[node].setdefault(end, full)
    return tuple(names)


# Links shared max-min fairly: the rates of flows that each load several links, by filling all of them like water.
#
# A flow has one rate; link l carries `loads[l, f]` times the rate of flow f, at most its capacity, and no flow goes faster than
# its own limit. The rates are max-min fair: none can be raised without lowering one that is not higher already. All rates rise
# together; where a link is full, the flows on it stop, and the others go on. A collective is one flow whose loads couple its
# links: the slowest paces all of them.
#
# Leaves out: round-trip times and bursts, through which real transports come close to fair shares only over longer spans.
#
# This is the known progressive filling; that it holds for any loads >= 0 is what the tests show against a linear programme.


_TIE = 1e-12
"""Links that fill up within this of one another, relatively, count as filling up at once."""


def max_min_rates(loads: ArrayLike, capacity: ArrayLike, limit: ArrayLike) -> Floats:
    """The max-min fair rates: float64 [F]. A flow on a link of capacity 0 has rate 0.

    Args:
        loads: float64 [L, F], >= 0: what one unit of a flow's rate puts on a link. 0 where it does not pass.
        capacity: float64 [L], >= 0, in the unit of loads times rates. limit: float64 [F], >= 0; inf for none.

    Raises:
        ScenarioError: shapes that do not fit, negative or NaN entries, infinite loads, or a flow that nothing limits.
    """
    load, room, most = (np.asarray(numbers, dtype=np.float64) for numbers in (loads, capacity, limit))
    _check(load, room, most)
    flows = len(most)
    rates = np.zeros(flows)
    rising = np.ones(flows, dtype=np.bool_)
    level = 0.0
    while rising.any():
        pressure = load[:, rising].sum(axis=1)
        used = load[:, ~rising] @ rates[~rising]
        with np.errstate(divide="ignore", invalid="ignore"):
            full_at = np.where(pressure > 0, np.maximum(room - used, 0.0) / pressure, np.inf)
        # Rounding must not let the water fall.
        level = max(level, min(float(full_at.min(initial=np.inf)), float(most[rising].min())))
        full = full_at <= level * (1 + _TIE)
        stops = rising & ((load[full] > 0).any(axis=0) | (most <= level))
        rates[stops] = level
        rising &= ~stops
    return rates


def _check(loads: Floats, capacity: Floats, limit: Floats) -> None:
    if loads.shape != (*capacity.shape, *limit.shape) or loads.ndim != 2:
        raise ScenarioError(
            f"loads must have shape [links, flows], got {list(loads.shape)} for {capacity.size} links and {limit.size} flows"
        )
    for name, numbers in (("loads", loads), ("capacity", capacity), ("limit", limit)):
        if not bool(np.all(numbers >= 0)):
            raise ScenarioError(f"{name} must be >= 0, got {float(numbers[~(numbers >= 0)][0])}")
    if not bool(np.isfinite(loads).all()):
        raise ScenarioError("loads must be finite; a flow that a link cannot carry has that link's capacity 0")
    unbounded = np.isinf(limit) & ~(loads[np.isfinite(capacity)] > 0).any(axis=0)
    if unbounded.any():
        raise ScenarioError(f"nothing limits flow {int(unbounded.argmax())}; give it a limit or a link of finite capacity")


# --- links and flows --------------------------------------------------------------------------------------------------
#
# Which links of a cluster a piece of communication uses, and how much of its time it needs them. A collective or a transfer is
# one flow. Its bytes pass several links in fixed proportions (rings load every hop equally), so one rate describes it, and its
# slowest link sets that rate. Of the seconds it takes alone, `transfer_s` move bytes, at the pace at which its busiest link is
# full; the rest is latency, which no other flow lengthens.
#
# Leaves out: the phases of a hierarchical collective, whose links are taken to be used together. As the prices do, it also
# leaves out trees inside a node, which load the links of its rings.


Rank = Annotated[int, Field(ge=0, strict=True)]


class ScenarioTable(BaseModel):
    """Base of all tables: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Spell(ScenarioTable):
    """From `from_s` up to `until_s` of the scenario's time (None: to the end)."""

    from_s: NonNegative = 0.0
    until_s: Positive | None = None

    @model_validator(mode="after")
    def _runs_forward(self) -> Spell:
        if self.until_s is not None and self.until_s <= self.from_s:
            raise ValueError(f"until_s ({self.until_s:g}) must lie after from_s ({self.from_s:g})")
        return self

    def holds(self, at_s: float) -> bool:
        return self.from_s <= at_s and (self.until_s is None or at_s < self.until_s)


class Straggler(Spell):
    """Computation and loading of `rank` take `factor` times as long (below 1: it is faster)."""

    rank: Rank
    factor: Positive


class LinkChange(Spell):
    """A link, in both directions, has `bandwidth_factor` of its bandwidth; 0: it is down. None: every link.

    Spells that overlap multiply. Latencies stay.
    """

    between: tuple[str, str] | None = None
    bandwidth_factor: NonNegative


class Jitter(ScenarioTable):
    """Independent factors of mean 1 on every task, by their relative standard deviation."""

    distribution: Literal["lognormal", "gamma", "uniform"] = "lognormal"
    compute_sigma: NonNegative = 0.0
    communication_sigma: NonNegative = 0.0

    @model_validator(mode="after")
    def _stays_positive(self) -> Jitter:
        widest = max(self.compute_sigma, self.communication_sigma)
        if self.distribution == "uniform" and widest > 3**-0.5:
            raise ValueError(
                f"a uniform factor of mean 1 and sigma {widest:g} would fall below 0; sigma <= 0.577, or distribution = 'gamma'"
            )
        return self


class Asynchronous(ScenarioTable):
    """Workers go on alone; the global model is held by one merge at a time."""

    merge_s: NonNegative


class FailureAt(ScenarioTable):
    """A failure at a stated time, of one rank or one node."""

    at_s: NonNegative
    rank: Rank | None = None
    node: Rank | None = None

    @model_validator(mode="after")
    def _of_something(self) -> FailureAt:
        if (self.rank is None) == (self.node is None):
            raise ValueError("a failure is of one rank or of one node; give one of the two keys")
        return self


class Failures(ScenarioTable):
    """When ranks and nodes fail, each by itself; every failure stops the run until `restart_s` later.

    Attributes:
        rank_mtbf_s, node_mtbf_s: mean seconds between failures of one rank (beside its node's) and of one node.
        distribution: of the times between; shape: of "weibull" (below 1: what has just been repaired fails soonest).
        at: failures at stated times, beside the drawn ones.
        restart_s: from the failure to the first step, reading the checkpoint included. A failure within it begins it anew.
    """

    rank_mtbf_s: Positive | None = None
    node_mtbf_s: Positive | None = None
    distribution: Literal["exponential", "weibull"] = "exponential"
    shape: Positive = 0.7
    at: tuple[FailureAt, ...] = ()
    restart_s: NonNegative = 0.0


class Checkpoints(ScenarioTable):
    """A checkpoint after every `interval_s` of training, rounded to steps; training stands still while it is written.

    Attributes:
        write_s: seconds of one; or write_bytes_per_s: then it is the weights and optimizer state over this.
    """

    interval_s: Positive
    write_s: NonNegative | None = None
    write_bytes_per_s: Positive | None = None

    @model_validator(mode="after")
    def _takes_time(self) -> Checkpoints:
        if (self.write_s is None) == (self.write_bytes_per_s is None):
            raise ValueError("a checkpoint takes write_s, or its bytes over write_bytes_per_s; give one of the two keys")
        return self


class Run(ScenarioTable):
    """The run around the steps.

    Attributes:
        epochs, samples_per_epoch: together the steps (without epochs: as the run file says). start_s: before the first.
        epoch_start_s: at the beginning of an epoch (shuffling, first batches). loading_samples_per_s: the most that storage
            and host deliver: no step is faster than its batch takes.
        evaluate_every_epochs, evaluation_samples: forward passes over so many samples.
        warm_up_steps, warm_up_factor: steps that take longer after the start and after every restart.
        draws: independent runs that make the intervals.
    """

    epochs: Count | None = None
    samples_per_epoch: Count
    start_s: NonNegative = 0.0
    epoch_start_s: NonNegative = 0.0
    loading_samples_per_s: Positive | None = None
    evaluate_every_epochs: Count | None = None
    evaluation_samples: Annotated[int, Field(ge=0, strict=True)] = 0
    warm_up_steps: Annotated[int, Field(ge=0, strict=True)] = 0
    warm_up_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    draws: Annotated[int, Field(ge=1, le=100_000, strict=True)] = 200


class DeviceCosts(ScenarioTable):
    """What a device costs, and draws: `busy_w` while it computes, `idle_w` otherwise."""

    price_per_hour: NonNegative = 0.0
    currency: str = "USD"
    busy_w: NonNegative = 0.0
    idle_w: NonNegative = 0.0

    @model_validator(mode="after")
    def _works_for_its_power(self) -> DeviceCosts:
        if self.busy_w < self.idle_w:
            raise ValueError(f"busy_w ({self.busy_w:g}) must not be below idle_w ({self.idle_w:g})")
        return self


class Scenario(ScenarioTable):
    """The whole file. An empty one changes nothing."""

    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    start_s: NonNegative = 0.0
    share_links: bool = False
    jitter: Jitter = Jitter()
    stragglers: tuple[Straggler, ...] = ()
    links: tuple[LinkChange, ...] = ()
    asynchronous: Asynchronous | None = None
    run: Run | None = None
    checkpoints: Checkpoints | None = None
    failures: Failures = Failures()
    device: DeviceCosts = DeviceCosts()

    @property
    def change_times_s(self) -> tuple[float, ...]:
        """When a spell begins or ends, ascending, without 0."""
        spells: tuple[Spell, ...] = (*self.stragglers, *self.links)
        times = {time for spell in spells for time in (spell.from_s, spell.until_s) if time}
        return tuple(sorted(times))

    def at(self, at_s: float) -> Scenario:
        """The scenario as it is at a time, for ever."""
        stragglers = tuple(spell.model_copy(update=_FOR_EVER) for spell in self.stragglers if spell.holds(at_s))
        links = tuple(spell.model_copy(update=_FOR_EVER) for spell in self.links if spell.holds(at_s))
        return self.model_copy(update={"stragglers": stragglers, "links": links, "start_s": 0.0})


_FOR_EVER = {"from_s": 0.0, "until_s": None}


def load_scenario(path: Path) -> Scenario:
    """Read and check a scenario. Raises ScenarioError: no such file, not TOML, or wrong keys with value, rule and fix."""
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise ScenarioError(f"no scenario file {path}; write one, an empty file changes nothing") from error
    except (OSError, ValueError) as error:
        raise ScenarioError(f"cannot read scenario {path}: {error}; it must be a text file in UTF-8") from error
    return parse_scenario(text, where=str(path))


def parse_scenario(text: str, *, where: str = "scenario.toml") -> Scenario:
    """Check the text of a scenario. Raises ScenarioError."""
    try:
        return Scenario.model_validate(parse_toml(text))
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{where} is not TOML: {error}; fix that line") from error
    except ValidationError as error:
        problems = [_explain(problem) for problem in error.errors(include_url=False)]
        raise ScenarioError(f"{where}: " + "\n  ".join(problems)) from error


_TABLES: dict[str, type[ScenarioTable]] = {
    "jitter": Jitter,
    "stragglers": Straggler,
    "links": LinkChange,
    "asynchronous": Asynchronous,
    "run": Run,
    "checkpoints": Checkpoints,
    "failures": Failures,
    "at": FailureAt,
    "device": DeviceCosts,
}


def _explain(problem: ErrorDetails) -> str:
    """One wrong key: its path, its value, the rule, and near matches of a name."""
    path = ".".join(map(str, problem["loc"])) or "the file"
    parents = [part for part in problem["loc"][:-1] if isinstance(part, str)]
    table = _TABLES[parents[-1]] if parents and parents[-1] in _TABLES else Scenario
    if problem["type"] == "extra_forbidden":
        return f"unknown key {path} (= {problem['input']!r}){near_matches(str(problem['loc'][-1]), table.model_fields)}"
    if problem["type"] == "missing":
        return f"{path} is missing; add it"
    if problem["type"] == "value_error":
        return f"{path}: {problem['msg'].removeprefix('Value error, ')}"
    if problem["type"] == "literal_error":
        names = str(problem["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        return f"{path} = {problem['input']!r} is unknown{near_matches(str(problem['input']), names)}"
    rule = problem["msg"].replace("Input should be", "must be")
    return f"{path} = {problem['input']!r}: {rule}"


# A scenario for one program on one cluster: checked against both, and in the terms the dynamic engine asks in.


@dataclass(frozen=True, kw_only=True, eq=False)
class Conditions:
    """What the dynamic engine takes in addition to durations; flows: of every piece of communication that moves bytes over
    links, empty where no link matters. Those that use a lane at once share it max-min fairly if the scenario says so."""

    scenario: Scenario
    flows: Mapping[Collective | SendRecv, Flow] = field(default_factory=dict)

    def slowness(self, rank: int, at_s: float) -> float:
        """How many times as long a rank's computation takes at a time of the scenario."""
        return math.prod(
            (each.factor for each in self.scenario.stragglers if each.rank == rank and each.holds(at_s)), start=1.0
        )

    def room(self, lane: Lane, at_s: float) -> float:
        """The share of its bandwidth that a lane has at a time of the scenario."""
        changes = (change for change in self.scenario.links if change.between is None or lane.joins(*change.between))
        return math.prod((change.bandwidth_factor for change in changes if change.holds(at_s)), start=1.0)

    @property
    def change_times_s(self) -> tuple[float, ...]:
        """When anything changes, counted from the scenario's start, ascending, > 0."""
        start_s = self.scenario.start_s
        return tuple(time - start_s for time in self.scenario.change_times_s if time > start_s)


def conditions_for(scenario: Scenario, columns: Columns, cluster: Cluster) -> Conditions | None:
    """The scenario as this program meets it; None where it changes nothing. Jitter is not a condition: see `jittered_s`.

    Raises ScenarioError for ranks or links that are not there, and for links where the profile prices communication without;
    CostError where a price has no links.
    """
    check_places(scenario, columns.world_size, cluster)
    if not (scenario.stragglers or scenario.links or scenario.share_links):
        return None
    return Conditions(scenario=scenario, flows=_flows(columns, cluster) if scenario.links or scenario.share_links else {})


def straggling(columns: Columns, conditions: Conditions) -> Floats:
    """float64 [n]: how many times as long every task takes on the stragglers of the conditions' start: the slowest of its ranks
    for computation and loading, 1 for communication."""
    slowness = np.array([conditions.slowness(rank, conditions.scenario.start_s) for rank in range(columns.world_size)])
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
    return {work: flow for work in works if (flow := flow_of(work, cluster)) is not None}


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
