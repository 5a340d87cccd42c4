"""Folding: ranks that are interchangeable under plan and cluster are simulated once.

Why it is exact. Call two tasks alike if they take equally long, wait for tasks that are alike, and hold resources that
queue tasks alike. The schedule is the only solution of "start = latest end before". The solution of the program with one
task per kind, copied to all of a kind, solves that equation too, so it is the schedule. The same holds with overlap
slowdowns, as alike ranks are busy alike. It rests on equal durations. With noise of
tasks or ranks, ranks that wait for one another wait for the slowest (`parsim.engines.slowest`, `side_by_side`).

Two kinds of ranks are folded:

    replicas   in which whatever stays inside costs the same, links shared with the neighbours included. What crosses
               replicas is one task for all of them.
    tp shards  where every component runs on all tp ranks alike (none placed on one of them), if all collectives of a kind that
               the shards do side by side cost the same.

Leaves out: pp stages (they differ by what they hold), replicas whose nodes are permuted, and shards of which only some
are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

from parsim.costs.costs import Costs
from parsim.graph.hops import hop_groups, hop_pairs
from parsim.graph.passes.convert import POINT_TO_POINT_HOPS, hop_collective, hop_message, transfer_bytes
from parsim.graph.passes.gradients import bucket_work
from parsim.graph.passes.inside import CONTEXT_STREAM, inner_steps
from parsim.graph.plan_index import PlanIndex
from parsim.hardware.device_kinds import device_name
from parsim.plans.mesh import Mesh
from parsim.plans.redistribution import LOCAL_HOPS, Hop, conversion
from parsim.work import Collective, Phase, SendRecv, Work


@dataclass(frozen=True, kw_only=True)
class Folding:
    """Attributes:
    replica_of: per replica the one that stands for it (the first of its kind).
    shards: the tp ranks that are simulated: all, or the first for all.
    is_exact: False where copies that communicate inside components (cp, ep) do not pay alike: these kinds of replicas are no
        program, and serve `parsim.predict.nearly_alike` alone.
    """

    mesh: Mesh
    replica_of: tuple[int, ...]
    shards: tuple[int, ...]
    is_exact: bool = True

    @property
    def is_folded(self) -> bool:
        return len(self.replicas) < self.mesh.copies or len(self.shards) < self.mesh.tp

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """Those that are simulated, ascending."""
        return tuple(sorted(set(self.replica_of)))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Those that are simulated, ascending."""
        return tuple(
            self.mesh.rank(stage=stage, replica=replica, shard=shard)
            for stage in range(self.mesh.pp)
            for replica in self.replicas
            for shard in self.shards
        )

    @property
    def has_whole_teams(self) -> bool:
        """Whether copies that communicate inside components are simulated as one, or there are none."""
        team = self.mesh.team
        return all(len(set(self.replica_of[first : first + team])) == 1 for first in range(0, self.mesh.copies, team))

    def stands_for(self, rank: int) -> int:
        """The simulated rank that stands for `rank`."""
        mesh = self.mesh
        shard, replica, stage = rank % mesh.tp, rank // mesh.tp % mesh.copies, rank // (mesh.tp * mesh.copies)
        return mesh.rank(stage=stage, replica=self.replica_of[replica], shard=shard if len(self.shards) == mesh.tp else 0)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """For how many ranks each of `ranks` stands, itself included."""
        copies = {replica: self.replica_of.count(replica) for replica in self.replicas}
        shards = self.mesh.tp // len(self.shards)
        return tuple(copies[rank // self.mesh.tp % self.mesh.copies] * shards for rank in self.ranks)


def unfolded(mesh: Mesh) -> Folding:
    """Every rank stands for itself.

    Args:
        mesh: of the plan.
    """
    return Folding(mesh=mesh, replica_of=tuple(range(mesh.copies)), shards=tuple(range(mesh.tp)))


def merged(folding: Folding, costs: Costs) -> Folding | None:
    """One replica for all, where replicas differ in nothing but what their communication costs; None: they do, or are one.

    What is simulated so with the highest of their prices takes at least as long as the program, with the lowest at most.

    Args:
        folding: found by `folding_of`. costs: prices of the cluster.
    """
    if len(folding.replicas) == 1 and folding.is_exact:
        return None
    mesh, kinds = folding.mesh, _Kinds(costs)
    alone = {
        tuple((kinds.device(rank), kinds.path(rank)) for rank in _ranks_of_replica(mesh, replica))
        for replica in folding.replicas
    }
    return Folding(mesh=mesh, replica_of=(0,) * mesh.copies, shards=folding.shards) if len(alone) == 1 else None


WorkSeconds = Callable[[Sequence[Work]], list[float]]
"""What communications cost."""

InsideSeconds = Callable[[int], list[list[float]]]
"""Of a replica, per kind of communication inside it what that of each tp shard costs."""


def folding_of(layout: PlanIndex, costs: Costs, seconds: WorkSeconds | None = None) -> Folding:
    """Find the ranks that represent others under these prices.

    Args:
        layout: the plan and its model. costs: prices of the cluster.
        seconds: medians of communications, to share a cache of prices (None: asks `costs`).

    Raises:
        CostError: as `Costs.estimate`.
    """
    price = seconds or (lambda works: [costs.estimate(work, 0).median_s for work in works])
    mesh = layout.plan.mesh
    if costs.differ_by_rank:  # learnt per rank and link
        return unfolded(mesh)
    kinds = _Kinds(costs)
    exchanges = _exchanges(layout)

    @cache
    def inside(replica: int) -> list[list[float]]:
        return [price(works) for works in _works_inside(layout, exchanges, replica)]

    replica_of = _replicas_of(layout, kinds, inside)
    whole = Folding(mesh=mesh, replica_of=replica_of, shards=tuple(range(mesh.tp)))
    if mesh.team > 1 and not (whole.has_whole_teams and _pay_alike(map(price, _bucket_works(layout)))):
        return replace(whole, is_exact=False)
    if mesh.tp == 1 or not _shards_do_alike(layout):
        return whole
    alike = _pay_alike(map(price, _bucket_works(layout))) and all(
        _shards_sit_alike(layout, kinds, replica) and _pay_alike(inside(replica)) for replica in whole.replicas
    )
    return Folding(mesh=mesh, replica_of=replica_of, shards=(0,)) if alike else whole


def _replicas_of(layout: PlanIndex, kinds: _Kinds, inside: InsideSeconds) -> tuple[int, ...]:
    """Per replica the first in which everything costs the same: by where its ranks sit, else by asking for every price.

    Where groups that run at once slow one another, what a replica pays depends on its neighbours: then every price is asked.
    """
    mesh = layout.plan.mesh
    by_place: dict[Hashable, int] = {}
    placed = [
        by_place.setdefault(replica if kinds.share_links else kinds.of_replica(mesh, replica), replica)
        for replica in range(mesh.copies)
    ]
    by_price: dict[Hashable, int] = {}
    priced: dict[int, int] = {}
    for replica in by_place.values() if len(by_place) > 1 else ():
        ranks = _ranks_of_replica(mesh, replica)
        alone = tuple((kinds.device(rank), kinds.path(rank)) for rank in ranks)
        together = tuple(tuple(map(_rounded, seconds)) for seconds in inside(replica))
        priced[replica] = by_price.setdefault((alone, together), replica)
    return tuple(priced.get(replica, replica) for replica in placed)


def _rounded(seconds: float) -> float:
    """To what sums in another order leave alike."""
    return float(f"{seconds:.12g}")


def _ranks_of_replica(mesh: Mesh, replica: int) -> list[int]:
    return [mesh.rank(stage=stage, replica=replica, shard=shard) for stage in range(mesh.pp) for shard in range(mesh.tp)]


class _Kinds:
    """Where ranks sit, up to the names of nodes and switches."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        cluster = costs.cluster
        self._linked = cluster.profile.communication.link_model is not None
        self.share_links = costs.shares_links
        self._paths: dict[Hashable, Hashable] = {}
        self._device = [costs.device_kind(rank) for rank in range(cluster.size)]
        if self._linked:
            shapes: dict[int, int] = {}
            self._shape = [shapes.setdefault(id(shape), len(shapes)) for shape in cluster.nodes.shapes]
            leaves: dict[Hashable, int] = {}
            self._leaf_kind = {name: leaves.setdefault(leaf, len(leaves)) for name, leaf in cluster.nodes.leaves.items()}

    def of_replica(self, mesh: Mesh, replica: int) -> Hashable:
        """Per rank its kind of device, and by number of first appearance its node and its leaf switch, with what these are.

        Replicas of which this is equal cost the same in whatever they do alone.
        """
        ranks = _ranks_of_replica(mesh, replica)
        devices = tuple(self._device[rank] for rank in ranks)
        if not self._linked:  # priced by the size of the group alone; loading by the device's own path
            return devices, tuple(self.path(rank) for rank in ranks)
        cluster = self._costs.cluster
        nodes, leaves = cluster.nodes, dict[str, int]()
        seen: dict[int, int] = {}
        places = []
        for rank in ranks:
            node, number = cluster.places[rank]
            leaf = nodes.leaf[node]
            places.append(
                (
                    seen.setdefault(node, len(seen)),
                    number,
                    self._shape[node],
                    leaves.setdefault(leaf, len(leaves)),
                    self._leaf_kind.get(leaf),
                )
            )
        return devices, tuple(places)

    def device(self, rank: int) -> str:
        return self._device[rank]

    def path(self, rank: int) -> Hashable:
        """What a batch passes on its way to the rank's device."""
        cluster = self._costs.cluster
        key = (id(cluster.nodes.shapes[cluster.places[rank][0]]), cluster.places[rank][1]) if self._linked else rank
        if key not in self._paths:
            self._paths[key] = self._path(rank)
        return self._paths[key]

    def _path(self, rank: int) -> Hashable:
        cluster = self._costs.cluster
        device = cluster.devices[rank]
        if self._linked:
            node, number = cluster.places[rank]
            name, topology = cluster.nodes.shapes[node].devices[number], cluster.nodes.shapes[node].topology
        else:
            name, topology = device_name(device.index, device.type.kind), cluster.topology
        socket = topology.socket_of(name)
        path = () if socket is None else topology.path(socket, name)
        return tuple((link.lanes, link.bandwidth_bytes_per_s, link.latency_s) for link in path)


def _shards_do_alike(layout: PlanIndex) -> bool:
    """No component is placed on one tp rank alone, and no value travels to or from one."""
    return all(placement.kind != "place" for placement in layout.placement.values())


def _shards_sit_alike(layout: PlanIndex, kinds: _Kinds, replica: int) -> bool:
    """Alone, every shard of a stage computes and loads as the first does."""
    mesh = layout.plan.mesh
    for stage in range(mesh.pp):
        ranks = [mesh.rank(stage=stage, replica=replica, shard=shard) for shard in range(mesh.tp)]
        if len({(kinds.device(rank), kinds.path(rank)) for rank in ranks}) > 1:
            return False
    return True


def _pay_alike(side_by_side: Iterable[Sequence[float]]) -> bool:
    """Whether works that are done side by side cost the same, up to rounding."""
    return all(max(seconds) - min(seconds) <= 1e-12 * max(seconds) for seconds in side_by_side)


class _Exchange(NamedTuple):
    """A kind of communication of a replica: a hop at place `source`, or (hop None) a transfer from it to `target`.

    `inside`: the axis and the operation of an exchange inside components.
    """

    source: int
    target: int
    hop: Hop | None
    size_bytes: int
    inside: tuple[str, str] | None = None


def _exchanges(layout: PlanIndex) -> tuple[_Exchange, ...]:
    """Every kind once. Of a hop the bytes are those of the value in a microbatch, of other kinds those that are sent."""
    tp, samples = layout.plan.mesh.tp, layout.plan.microbatch_samples
    found: dict[_Exchange, None] = {}
    for value in layout.model.values:
        home = layout.stage_of_value[value.name]
        if home is None:
            continue
        size_bytes, made = value.size_bytes(samples), layout.source[value.name]
        for reading in layout.readings[value.name]:
            ways = [(home, reading.stage, made.value, reading.ends.value, reading.ends.value)]
            if value.differentiable:
                ways.append((reading.stage, home, reading.ends.gradient, made.gradient, reading.ends.gradient))
            for source, target, begin, end, moved in ways:
                if source != target:
                    found[_Exchange(source, target, None, transfer_bytes(size_bytes, moved, tp))] = None
                for hop in conversion(begin, end, tp):
                    if hop.operation not in LOCAL_HOPS:
                        found[_Exchange(home, home, hop, size_bytes)] = None
    exchange = layout.plan.context_exchange
    for component in layout.model.components:
        inside, home = layout.inside(component.name), layout.stage_of[component.name]
        if inside is None:
            continue
        steps = (*inner_steps(inside, Phase.FORWARD, exchange), *inner_steps(inside, Phase.BACKWARD, exchange))
        for step in (step for step in steps if step.operation):
            whole = inside.context_bytes * step.share if step.what == CONTEXT_STREAM else inside.expert_bytes
            size_bytes = round(whole * layout.local_samples(component.name))
            found[_Exchange(home, home, None, size_bytes, (step.what, step.operation))] = None
    return tuple(found)


def _works_inside(layout: PlanIndex, exchanges: Sequence[_Exchange], replica: int) -> Iterator[Sequence[Work]]:
    """Per kind of communication inside a replica the works that its tp shards do side by side."""
    tp = layout.plan.mesh.tp
    for source, target, hop, size_bytes, inside in exchanges:
        if inside is not None:
            axis, operation = inside
            first = [layout.inner_group(layout.rank(source, replica, shard), axis) for shard in range(tp)]
            yield [Collective(operation=operation, group=group, size_bytes=size_bytes) for group in first]
        elif hop is None:
            ends = [(layout.rank(source, replica, s), layout.rank(target, replica, s)) for s in range(tp)]
            yield [SendRecv(source=first, destination=last, size_bytes=size_bytes) for first, last in ends]
        elif hop.operation in POINT_TO_POINT_HOPS:
            pairs = [tuple(layout.rank(source, replica, shard) for shard in pair) for pair in hop_pairs(hop, tp)]
            yield [hop_message(hop, first, last, size_bytes, tp) for first, last in pairs]
        else:
            groups = [tuple(layout.rank(source, replica, shard) for shard in group) for group in hop_groups(hop, tp)]
            yield [hop_collective(hop, group, size_bytes, tp) for group in groups]


def _bucket_works(layout: PlanIndex) -> Iterator[Sequence[Work]]:
    """Per parameters in a gradient bucket, the sums of all shards that hold pieces (or whole ones, each for itself)."""
    asked: set[Hashable] = set()
    for family in layout.buckets.families:
        places = [place for place, (_, group) in enumerate(family.groups) if len(group) > 1]
        kinds = (id(family.groups), family.elements, family.size_bytes)  # one tuple of groups for all that are held alike
        if len(places) > 1 and kinds not in asked:
            asked.add(kinds)
            yield [bucket_work(layout, layout.buckets.of(family, place)) for place in places]
