"""Folding: ranks that are interchangeable under plan and cluster are simulated once.

Why it is exact. Call two tasks alike if they take equally long, wait for tasks that are alike, and hold resources that
queue tasks alike. The schedule is the only solution of "start = latest end before". The solution of the program with one
task per kind, copied to all of a kind, solves that equation too, so it is the schedule. The same holds with overlap
slowdowns, as alike ranks are busy alike. It rests on equal durations. With noise of
tasks or ranks, ranks that wait for one another wait for the slowest (`parsim.engines.noise`).

Two kinds of ranks are folded:

    replicas   in which whatever stays inside costs the same, links shared with the neighbours included. What crosses
               replicas is one task for all of them, or one for each sharding group if all groups are alike.
               Replicas that gossip are one kind where a shift of all of them changes nothing (`repeats_after`).
    tp shards  where every component runs on all tp ranks alike (none placed on one of them), if all collectives of a kind that
               the shards do side by side cost the same.

Leaves out: pp stages (they differ by what they hold), replicas whose nodes are permuted, and shards of which only some
are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from parsim.costs.communication.collectives import alike_collectives, alike_transfers
from parsim.costs.costs import Costs
from parsim.hardware.cluster import Cluster
from parsim.numeric import Ints
from parsim.plans.layouts import HOPS, LOCAL_HOPS, POINT_TO_POINT_HOPS, Hop, conversion, hop_groups, hop_pairs
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.plans.stages import concurrent_groups, concurrent_transfers
from parsim.program.columns import Folding, unfolded
from parsim.program.passes.convert import hop_collective, hop_message, transfer_bytes
from parsim.program.passes.gradients import bucket_work, replica_sum_work
from parsim.program.passes.inside import CONTEXT_STREAM, inner_steps
from parsim.program.placed import PlanIndex
from parsim.work import Collective, Phase, SendRecv, Work

# What replicas pay for the communication inside them: every kind of it, and its price for the tp shards side by side.


class Exchange(NamedTuple):
    """A kind of communication of a replica: a hop at place `source`, or (hop None) a transfer from it to `target`.

    `inside`: the axis and the operation of an exchange inside components. `visits`: as in `Collective`.
    """

    source: int
    target: int
    hop: Hop | None
    size_bytes: int
    inside: tuple[str, str] | None = None
    visits: int = 0


def exchanges_of(layout: PlanIndex) -> tuple[Exchange, ...]:
    """Every kind once. Of a hop the bytes are those of the value in a microbatch, of other kinds those that are sent."""
    tp, samples = layout.plan.mesh.tp, layout.plan.microbatch_samples
    exchanges: dict[Exchange, None] = {}
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
                    exchanges[Exchange(source, target, None, transfer_bytes(size_bytes, moved, tp))] = None
                for hop in conversion(begin, end, tp):
                    if hop.operation not in LOCAL_HOPS:
                        exchanges[Exchange(home, home, hop, size_bytes)] = None
    exchange = layout.plan.context_exchange
    for component in layout.model.components:
        inside, home = layout.inside(component.name), layout.stage_of[component.name]
        if inside is None:
            continue
        steps = (*inner_steps(inside, Phase.FORWARD, exchange), *inner_steps(inside, Phase.BACKWARD, exchange))
        for step in (step for step in steps if step.operation):
            full_bytes = inside.context_bytes * step.share if step.what == CONTEXT_STREAM else inside.expert_bytes
            size_bytes = round(full_bytes * layout.local_samples(component.name))
            exchanges[Exchange(home, home, None, size_bytes, (step.what, step.operation), step.visits_of(inside))] = None
    return tuple(exchanges)


WorkSeconds = Callable[[Sequence[Work]], list[float]]
"""What communications cost."""


class InsideSeconds:
    """Per kind of communication inside a replica the seconds of those that its tp shards do side by side.

    Groups of ranks whose links are as fast and as busy pay the same for the same bytes, so only one of them is priced.
    """

    def __init__(self, layout: PlanIndex, exchanges: Sequence[Exchange], costs: Costs, price: WorkSeconds) -> None:
        self._layout = layout
        self._exchanges = exchanges
        self._costs = costs
        self._price = price
        self._of_replica: dict[int, list[list[float]]] = {}
        self._paths: dict[tuple[object, ...], list[_Path]] = {}
        self._kinds: dict[Hashable, int] = {}
        self._seconds: dict[tuple[int, int], float] = {}

    def __call__(self, replica: int) -> list[list[float]]:
        """By kind of communication, then by tp shard."""
        if replica not in self._of_replica:
            numbers = range(len(self._exchanges))
            self._of_replica[replica] = [self._side_by_side(number, replica) for number in numbers]
        return self._of_replica[replica]

    def _side_by_side(self, number: int, replica: int) -> list[float]:
        exchange = self._exchanges[number]
        route = (replica, exchange.source, exchange.target, exchange.hop, exchange.inside)
        if route not in self._paths:
            groups = _groups_of(self._layout, exchange, replica)
            self._paths[route] = [_Path(group, self._kind(exchange, group)) for group in groups]
        paths = self._paths[route]
        new = {path.kind: path for path in paths if (number, path.kind) not in self._seconds}
        if new:
            works = [_work(self._layout, exchange, path.group) for path in new.values()]
            self._seconds.update(zip([(number, kind) for kind in new], self._price(works), strict=True))
        return [self._seconds[number, path.kind] for path in paths]

    def _kind(self, exchange: Exchange, group: tuple[int, ...]) -> int:
        """A number, equal for groups that pay the same for the same bytes; where nothing says so, the group's own."""
        mesh = self._layout.plan.mesh
        if exchange.inside is None and (exchange.hop is None or exchange.hop.operation in POINT_TO_POINT_HOPS):
            kind = alike_transfers(self._costs.cluster, (group[0], group[1]), concurrent_transfers(mesh, (group[0], group[1])))
        else:
            kind = alike_collectives(self._costs.cluster, self._operation(exchange), group, concurrent_groups(mesh, group))
        return self._kinds.setdefault(group if kind is None else kind, len(self._kinds))

    def _operation(self, exchange: Exchange) -> str:
        """The collective of an exchange."""
        if exchange.inside is not None:
            return exchange.inside[1]
        assert exchange.hop is not None
        return HOPS[exchange.hop.operation].collective


class _Path(NamedTuple):
    """The ranks of a communication, and a number that is equal for those that pay the same."""

    group: tuple[int, ...]
    kind: int


def _groups_of(layout: PlanIndex, exchange: Exchange, replica: int) -> list[tuple[int, ...]]:
    """The ranks of a communication, as each of the tp shards that do it side by side has them."""
    tp = layout.plan.mesh.tp
    source, target, hop = exchange.source, exchange.target, exchange.hop
    if exchange.inside is not None:
        axis, _ = exchange.inside
        return [layout.inner_group(layout.rank(source, replica, shard), axis) for shard in range(tp)]
    if hop is None:
        return [(layout.rank(source, replica, s), layout.rank(target, replica, s)) for s in range(tp)]
    groups = hop_pairs(hop, tp) if hop.operation in POINT_TO_POINT_HOPS else hop_groups(hop, tp)
    return [tuple(layout.rank(source, replica, shard) for shard in group) for group in groups]


def _work(layout: PlanIndex, exchange: Exchange, group: tuple[int, ...]) -> Collective | SendRecv:
    """What a group of ranks does."""
    tp, size_bytes, hop = layout.plan.mesh.tp, exchange.size_bytes, exchange.hop
    if exchange.inside is not None:
        return Collective(operation=exchange.inside[1], group=group, size_bytes=size_bytes, visits=exchange.visits)
    if hop is None:
        return SendRecv(source=group[0], destination=group[1], size_bytes=size_bytes)
    if hop.operation in POINT_TO_POINT_HOPS:
        return hop_message(hop, group[0], group[1], size_bytes, tp)
    return hop_collective(hop, group, size_bytes, tp)


# Where ranks sit, up to the names of nodes and switches: which of them do alone what others do.


def ranks_of_replica(mesh: Mesh, replica: int) -> list[int]:
    """Its ranks, stage by stage. Args: mesh: of the plan. replica: a copy."""
    return [mesh.rank(stage=stage, replica=replica, shard=shard) for stage in range(mesh.pp) for shard in range(mesh.tp)]


class RankKinds:
    """Where ranks sit, up to the names of nodes and switches."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        cluster = costs.cluster
        self._linked = cluster.profile.communication.link_model is not None
        self._paths: dict[Hashable, Hashable] = {}
        self._device = [costs.device_kind(rank) for rank in range(cluster.size)]

    def first_of(self, mesh: Mesh) -> list[int]:
        """Per replica the first whose ranks, and those of its team, sit alike: they pay the same for whatever they do.

        Ranks sit alike on devices of a kind at the same place of a node, with as many ranks before and after them on the node,
        or under its leaf switch where there are several. For these do the same at the same time, if all are of one stage.
        """
        ranks = np.arange(mesh.size)
        if self._linked:
            sits, before, after = self._sits[:, : mesh.size]
            first = ranks - ranks % (mesh.copies * mesh.tp)
            inside = (ranks - before >= first) & (ranks + after < first + mesh.copies * mesh.tp)
            sits = np.where(inside, sits, -1 - ranks)
        else:  # priced by the size of the group alone; loading by the device's own path
            kinds: dict[Hashable, int] = {}
            sits = np.array([kinds.setdefault((self._device[rank], self.path(rank)), len(kinds)) for rank in ranks.tolist()])
        teams = sits.reshape(mesh.pp, -1, mesh.team * mesh.tp).swapaxes(0, 1).reshape(mesh.copies // mesh.team, -1)
        _, numbers, kind = np.unique(teams, axis=0, return_index=True, return_inverse=True)
        firsts = numbers[kind.reshape(-1)] * mesh.team
        return [int(firsts[replica // mesh.team]) + replica % mesh.team for replica in range(mesh.copies)]

    @cached_property
    def _sits(self) -> Ints:
        """int64 [3, ranks]: a number for the device, its place and its leaf switch; ranks before and after it there."""
        cluster = self._costs.cluster
        nodes, places = cluster.nodes, cluster.places
        groups = [node if len(nodes.leaves) < 2 else nodes.leaf[node] for node, _ in places]
        first, last, count = dict[Hashable, int](), dict[Hashable, int](), Counter(groups)
        for rank, group in enumerate(groups):
            first.setdefault(group, rank)
            last[group] = rank
        shapes: dict[int, int] = {}
        kinds: dict[Hashable, int] = {}
        sits = []
        for rank, ((node, number), group) in enumerate(zip(places, groups, strict=True)):
            leaf = nodes.leaves.get(nodes.leaf[node])
            shape = shapes.setdefault(id(nodes.shapes[node]), len(shapes))
            kind = kinds.setdefault((self._device[rank], number, shape, leaf), len(kinds))
            in_a_row = last[group] - first[group] + 1 == count[group]
            sits.append((kind if in_a_row else -1 - rank, rank - first[group], last[group] - rank))
        return np.array(sits, dtype=np.int64).T

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
        _, path = self._costs.cluster.host_path(self._costs.cluster.devices[rank])
        return tuple((link.lanes, link.bandwidth_bytes_per_s, link.latency_s) for link in path)


# Replicas that gossip: one stands for those that are some multiple of replicas further on.
#
# Move all replicas of a plan on by m. If every round then has the same links, and the machine is the same up to the names of
# nodes and switches, the program is the same too. So replicas that are m apart have equal timelines, and m of them are
# simulated.
# On a machine of equal nodes m is at least the ranks of a node. Rings, lattices (Ada's too) and exponential graphs allow it.
#
# Leaf switches of a fat tree seldom allow it: 168 nodes fill nine leaves of 18 and a third of a tenth, and a message that
# crosses leaves takes a microsecond longer. Without them such replicas are nearly alike (`parsim.predict.nearly_alike`).
#
# Leaves out: replicas of several ranks, and symmetries other than moving on, such as the mirror image of a mesh.


def repeats_after(plan: Plan, cluster: Cluster, replica_of: tuple[int, ...], *, leaves: bool = True) -> int:
    """The smallest m for which moving all replicas of a gossip on by m changes nothing; the number of copies if there is none.

    Args:
        replica_of: per replica the first that costs the same by itself (`parsim.program.columns`).
        leaves: False takes all leaf switches for one.
    """
    replicas, rule = plan.mesh.dp, plan.synchronisation
    if plan.world_size > replicas:
        return plan.mesh.copies
    kinds = np.array(replica_of)
    for step in range(1, replicas // 2 + 1):
        if replicas % step or not (kinds == np.roll(kinds, -step)).all() or not _same_machine(cluster, replicas, step, leaves):
            continue
        links = [rule.matrix(number, replicas) != 0 for number in rule.cycle(replicas)]
        if all((each == np.roll(each, (step, step), axis=(0, 1))).all() for each in links):
            return step  # replicas moved on take weights of the same others, moved on as far
    return replicas


def _same_machine(cluster: Cluster, ranks: int, step: int, leaves: bool) -> bool:
    """Whether a rank moved on sits at the same place of a node, and nodes and leaves become nodes and leaves alike.

    A machine without a link model prices a message by its size alone.
    """
    if cluster.profile.communication.link_model is None:
        return True
    places, nodes = cluster.places, cluster.nodes
    node_of: dict[int, int] = {}
    leaf_of: dict[str, str] = {}
    for rank in range(ranks):
        (node, number), (other, moved) = places[rank], places[(rank + step) % ranks]
        if number != moved or nodes.shapes[node] is not nodes.shapes[other] or node_of.setdefault(node, other) != other:
            return False
        leaf, next_leaf = nodes.leaf[node], nodes.leaf[other]
        if not leaves:
            continue
        if nodes.leaves.get(leaf) != nodes.leaves.get(next_leaf) or leaf_of.setdefault(leaf, next_leaf) != next_leaf:
            return False
    return len(set(node_of.values())) == len(node_of) and len(set(leaf_of.values())) == len(leaf_of)


def merged(folding: Folding, costs: Costs) -> Folding | None:
    """One replica for all, where replicas differ in nothing but what their communication costs; None: they do, or are one.

    What is simulated so with the highest of their prices takes at least as long as the program, with the lowest at most.
    """
    if len(folding.replicas) == 1 and folding.is_exact:
        return None
    mesh, kinds = folding.mesh, RankKinds(costs)
    alone = {
        tuple((kinds.device(rank), kinds.path(rank)) for rank in ranks_of_replica(mesh, replica))
        for replica in folding.replicas
    }
    return Folding(mesh=mesh, replica_of=(0,) * mesh.copies, shards=folding.shards) if len(alone) == 1 else None


def folding_of(layout: PlanIndex, costs: Costs, seconds: WorkSeconds | None = None) -> Folding:
    """Find the ranks that represent others under these prices. Raises CostError as `Costs.estimate`.

    `seconds`: medians of communications, to share a cache of prices (None: asks `costs`).
    """
    price = seconds or (lambda works: [costs.estimate(work, 0).median_s for work in works])
    mesh = layout.plan.mesh
    if costs.differ_by_rank:  # learnt per rank and link
        return unfolded(mesh)
    kinds = RankKinds(costs)
    inside = InsideSeconds(layout, exchanges_of(layout), costs, price)
    replica_of = _replicas_of(layout, kinds, inside)
    if layout.plan.synchronisation.kind == "gossip":
        return _shifted(layout, costs, replica_of)
    if mesh.groups > 1:
        replica_of = _by_sharding_groups(layout, costs, price, replica_of)
    folding = Folding(mesh=mesh, replica_of=replica_of, shards=tuple(range(mesh.tp)))
    if mesh.team > 1 and not (folding.has_whole_teams and _buckets_pay_alike(layout, costs, price)):
        return replace(folding, is_exact=False)
    if mesh.tp == 1 or not layout.shards_alike:
        return folding
    alike = (
        _buckets_pay_alike(layout, costs, price)
        and (mesh.groups == 1 or _pay_alike(map(price, _replica_sums(layout, by_place=True))))
        and all(_shards_sit_alike(layout, kinds, replica) and _pay_alike(inside(replica)) for replica in folding.replicas)
    )
    return Folding(mesh=mesh, replica_of=replica_of, shards=(0,)) if alike else folding


def _replicas_of(layout: PlanIndex, kinds: RankKinds, inside: InsideSeconds) -> tuple[int, ...]:
    """Per replica the first in which everything costs the same: by where its ranks sit, else by asking for every price."""
    mesh = layout.plan.mesh
    placed = kinds.first_of(mesh)
    by_price: dict[Hashable, int] = {}
    priced: dict[int, int] = {}
    unlike = sorted(set(placed))
    for replica in unlike if len(unlike) > 1 else ():
        ranks = ranks_of_replica(mesh, replica)
        alone = tuple((kinds.device(rank), kinds.path(rank)) for rank in ranks)
        together = tuple(tuple(map(_rounded, seconds)) for seconds in inside(replica))
        priced[replica] = by_price.setdefault((alone, together), replica)
    return tuple(priced.get(replica, replica) for replica in placed)


def _shifted(layout: PlanIndex, costs: Costs, replica_of: tuple[int, ...]) -> Folding:
    """The folding of replicas that gossip; not exact if they are alike but for the leaf switches."""
    plan, mesh = layout.plan, layout.plan.mesh
    exact, nearly = (repeats_after(plan, costs.cluster, replica_of, leaves=leaves) for leaves in (True, False))
    step = nearly if exact == mesh.copies else exact
    kinds = tuple(replica % step for replica in range(mesh.copies))
    return replace(unfolded(mesh), replica_of=kinds, is_exact=step == exact)


def _by_sharding_groups(layout: PlanIndex, costs: Costs, price: WorkSeconds, replica_of: tuple[int, ...]) -> tuple[int, ...]:
    """Per replica its representative, where replicas meet in sharding groups and not all in one collective.

    The first group stands for all, place by place, if they consist of replicas of the same kinds and pay the same; else every
    replica stands for itself. Places of equal kinds are one where the sums over all groups cost the same too.
    """
    mesh = layout.plan.mesh
    place = [replica % mesh.group_copies for replica in range(mesh.copies)]
    alike = all(kind == replica_of[first] for kind, first in zip(replica_of, place, strict=True))
    if not alike or not _buckets_pay_alike(layout, costs, price):
        return tuple(range(mesh.copies))
    return replica_of if _pay_alike(map(price, _replica_sums(layout))) else tuple(place)


def _replica_sums(layout: PlanIndex, *, by_place: bool = False) -> Iterator[Sequence[Collective]]:
    """Per parameters in a gradient bucket the sums over all sharding groups. `by_place`: those of each place in a group apart,
    which are of all its shards.
    """
    plan, copies = layout.plan, layout.plan.mesh.group_copies
    seen: set[Hashable] = set()
    for family in layout.buckets.families:
        kinds = (id(family.groups), family.elements, family.size_bytes)
        if kinds not in seen:
            seen.add(kinds)
            sums: dict[int, list[Collective]] = {}
            for first in range(0, len(family.groups), family.replicas):
                bucket = layout.buckets.of(family, first)
                for rank in bucket.group:
                    if (work := replica_sum_work(layout, bucket, rank)) is not None:
                        sums.setdefault(plan.replica_of_rank(rank) % copies if by_place else 0, []).append(work)
            yield from sums.values()


def _rounded(seconds: float) -> float:
    """To what sums in another order leave alike."""
    return float(f"{seconds:.12g}")


def _shards_sit_alike(layout: PlanIndex, kinds: RankKinds, replica: int) -> bool:
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


def _buckets_pay_alike(layout: PlanIndex, costs: Costs, price: WorkSeconds) -> bool:
    """Whether the shards of a bucket pay the same for their sums. They are priced where their places leave that open."""
    mesh, cluster = layout.plan.mesh, costs.cluster
    answers: dict[tuple[str, int], bool] = {}

    def is_open(operation: str, groups: Sequence[tuple[int, tuple[int, ...]]]) -> bool:
        """Whether places leave it open; the answer is one for all bytes that the same groups sum."""
        key = operation, id(groups)
        if key not in answers:
            ranks = [group for _, group in groups if len(group) > 1]
            paths = {alike_collectives(cluster, operation, group, concurrent_groups(mesh, group)) for group in ranks}
            answers[key] = len(paths) > 1 or None in paths
        return answers[key]

    return _pay_alike(map(price, _bucket_works(layout, is_open)))


def _bucket_works(
    layout: PlanIndex, is_open: Callable[[str, Sequence[tuple[int, tuple[int, ...]]]], bool]
) -> Iterator[Sequence[Collective]]:
    """Per parameters in a gradient bucket, the sums of all shards that hold pieces (or whole ones, each for itself).

    Args:
        is_open: whether an operation may cost these groups of ranks different times; else its sums are left out.
    """
    seen: set[Hashable] = set()
    for family in layout.buckets.families:
        kinds = (id(family.groups), family.elements, family.size_bytes)  # one tuple of groups for all that are held alike
        places = [] if kinds in seen else [place for place, (_, group) in enumerate(family.groups) if len(group) > 1]
        seen.add(kinds)
        if len(places) > 1:
            first = layout.buckets.of(family, places[0])
            if is_open(bucket_work(layout, first).operation, family.groups):
                yield [bucket_work(layout, layout.buckets.of(family, place)) for place in places]
