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

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from parsim.costs.communication.collectives import alike_collectives, alike_transfers
from parsim.costs.costs import Costs
from parsim.costs.estimate import Estimate, medians_s
from parsim.engines.program import mean_step_s
from parsim.engines.static import CompiledGraph, compile_graph
from parsim.hardware.cluster import Cluster
from parsim.numeric import Bools, Ints
from parsim.plans.layouts import LOCAL_HOPS, POINT_TO_POINT_HOPS, Hop, conversion, hop_groups, hop_pairs
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.plans.stages import concurrent_groups, concurrent_transfers
from parsim.predict.problem import PlanningProblem
from parsim.predict.rounds import beside_products, mixing_period
from parsim.program.buckets import BucketFamily
from parsim.program.columns import Folding, unfolded
from parsim.program.passes.convert import hop_collective, hop_message, transfer_bytes
from parsim.program.passes.gradients import bucket_work, replica_sum_work
from parsim.program.passes.inside import CONTEXT_STREAM, inner_steps
from parsim.program.placed import PlanIndex
from parsim.program.templates import lower_columns, moved_work
from parsim.work import Collective, Phase, SendRecv, Work, is_communication, ranks_of_work

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
        self._layout, self._exchanges, self._cluster, self._price = layout, exchanges, costs.cluster, price
        self._of_replica: dict[int, list[list[float]]] = {}
        self._kind_of: dict[tuple[str, tuple[int, ...]], int] = {}
        self._kinds: dict[Hashable, int] = {}
        self._seconds: dict[tuple[Exchange, int], float] = {}

    def __call__(self, replica: int) -> list[list[float]]:
        """By kind of communication, then by tp shard."""
        if replica not in self._of_replica:
            self._of_replica[replica] = [self._side_by_side(exchange, replica) for exchange in self._exchanges]
        return self._of_replica[replica]

    def _side_by_side(self, exchange: Exchange, replica: int) -> list[float]:
        works = _side_by_side(self._layout, exchange, replica)
        keys = [(exchange, self._kind(work)) for work in works]
        new = {key: work for key, work in zip(keys, works, strict=True) if key not in self._seconds}
        if new:
            self._seconds.update(zip(new, self._price(tuple(new.values())), strict=True))
        return [self._seconds[key] for key in keys]

    def _kind(self, work: Collective | SendRecv) -> int:
        """A number, equal for works that pay the same for the same bytes; where nothing says so, that of the ranks."""
        operation = "send_recv" if isinstance(work, SendRecv) else work.operation
        group = (work.source, work.destination) if isinstance(work, SendRecv) else work.group
        if (operation, group) not in self._kind_of:
            mesh, kind = self._layout.plan.mesh, None
            if isinstance(work, SendRecv):
                pair = work.source, work.destination
                kind = alike_transfers(self._cluster, pair, concurrent_transfers(mesh, pair))
            else:
                kind = alike_collectives(self._cluster, operation, group, concurrent_groups(mesh, group))
            self._kind_of[operation, group] = self._kinds.setdefault(group if kind is None else kind, len(self._kinds))
        return self._kind_of[operation, group]


def _side_by_side(layout: PlanIndex, exchange: Exchange, replica: int) -> list[Collective | SendRecv]:
    """A communication as each of the tp shards does it."""
    tp, size_bytes, hop = layout.plan.mesh.tp, exchange.size_bytes, exchange.hop
    ranks = [layout.rank(exchange.source, replica, shard) for shard in range(tp)]
    if exchange.inside is not None:
        axis, operation = exchange.inside
        groups = [layout.inner_group(rank, axis) for rank in ranks]
        return [Collective(operation=operation, group=group, size_bytes=size_bytes, visits=exchange.visits) for group in groups]
    if hop is None:
        ends = [layout.rank(exchange.target, replica, shard) for shard in range(tp)]
        return [SendRecv(source=rank, destination=end, size_bytes=size_bytes) for rank, end in zip(ranks, ends, strict=True)]
    if hop.operation in POINT_TO_POINT_HOPS:
        return [hop_message(hop, ranks[first], ranks[last], size_bytes, tp) for first, last in hop_pairs(hop, tp)]
    groups = [tuple([ranks[shard] for shard in group]) for group in hop_groups(hop, tp)]
    return [hop_collective(hop, group, size_bytes, tp) for group in groups]


# Where ranks sit, up to the names of nodes and switches: which of them do alone what others do.


def ranks_of_replica(mesh: Mesh, replica: int) -> list[int]:
    """Its ranks, stage by stage."""
    return [mesh.rank(stage=stage, replica=replica, shard=shard) for stage in range(mesh.pp) for shard in range(mesh.tp)]


class Sites(NamedTuple):
    """Where the ranks of a cluster sit, int64 [ranks] each, up to the names of nodes and switches.

    kind: equal for the same place of equal nodes, each with its ranks in a row, under leaf switches that are as full; -1: not
    in a row. node: its node. first, last: ranks of the node, or of its leaf switch if there are several.
    """

    kind: Ints
    node: Ints
    first: Ints
    last: Ints


@lru_cache(maxsize=16)
def _sites(cluster: Cluster) -> Sites:
    nodes = cluster.nodes
    node, place = cluster.place_table
    node_first, node_last, in_node = _runs(node)
    shapes, leaves, kinds = dict[int, int](), dict[str, int](), dict[Hashable, int]()
    leaf_of = np.array([leaves.setdefault(leaf, len(leaves)) for leaf in nodes.leaf], dtype=np.int64)
    first, last, in_leaf = _runs(leaf_of[node]) if len(nodes.leaves) > 1 else (node_first, node_last, in_node)
    shape_of = [shapes.setdefault(id(shape), len(shapes)) for shape in nodes.shapes]
    values = [kinds.setdefault(nodes.leaves.get(leaf), len(kinds)) for leaf in nodes.leaf]
    at = np.array([shape_of, values], dtype=np.int64)[:, node]
    rows = np.stack([place, *at, np.arange(len(node)) - node_first, node_last - node_first, last - first], axis=1)
    kind = np.array(_numbered(rows), dtype=np.int64)
    return Sites(np.where(in_node & in_leaf, kind, -1), node, first, last)


def _runs(group: Ints) -> tuple[Ints, Ints, Bools]:
    """Of each number in a row of equal ones where that begins and ends, and whether it is the only one."""
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    lengths = np.diff(begins, append=len(group))
    first = np.repeat(begins, lengths)
    return first, first + np.repeat(lengths, lengths) - 1, np.bincount(group[begins])[group] == 1


def _numbered(rows: Ints) -> list[int]:
    """The number of the first row that is equal to each."""
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(row.tobytes(), number) for number, row in enumerate(np.ascontiguousarray(rows))]


class RankKinds:
    """Where ranks sit, and what they pay alone."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        cluster = costs.cluster
        self._linked = cluster.profile.communication.link_model is not None
        self._paths: dict[Hashable, Hashable] = {}
        self._device = [costs.device_kind(rank) for rank in range(cluster.size)]

    def first_of(self, mesh: Mesh, copies: int) -> list[int]:
        """Per so many neighbouring copies of a stage (a team, or a sharding group) the number of the first of which all ranks
        sit alike: they pay the same for whatever they do.

        Ranks sit alike on devices of a kind at the same place of a node, with as many ranks on the node and under its leaf
        switch, all of one stage: these do the same at the same time. Neighbours that are under several switches stay apart.
        """
        kinds: dict[Hashable, int] = {}
        if self._linked:
            ranks, sites = np.arange(mesh.size), Sites(*(each[: mesh.size] for each in _sites(self._costs.cluster)))
            begin, width = ranks - ranks % (mesh.copies * mesh.tp), copies * mesh.tp
            inside = (sites.first >= begin) & (sites.last < begin + mesh.copies * mesh.tp) & (sites.kind >= 0)
            follows = ranks % width > 0  # a neighbour
            leaves = follows & (sites.first == ranks) & (len(self._costs.cluster.nodes.leaves) > 1)
            crosses = follows & (np.diff(sites.node, prepend=-1) != 0)
            device = np.array([kinds.setdefault(kind, len(kinds)) for kind in self._device[: mesh.size]], dtype=np.int64)
            sits = (sites.kind * len(kinds) + device) * 2 + crosses
            sits = np.where(inside & ~leaves, sits, -1 - ranks)
        else:  # priced by the size of the group alone; loading by the device's own path
            ranks_of = range(mesh.size)
            sits = np.array([kinds.setdefault((self._device[rank], self.path(rank)), len(kinds)) for rank in ranks_of])
        return _numbered(sits.reshape(mesh.pp, -1, copies * mesh.tp).swapaxes(0, 1).reshape(mesh.copies // copies, -1))

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
# crosses leaves takes a microsecond longer. Without them such replicas are nearly alike (`parsim.predict.folding`).
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


def merged(folding: Folding, kinds: RankKinds) -> Folding | None:
    """One replica for all, where replicas differ in nothing but what their communication costs; None: they do, or are one.

    What is simulated so with the highest of their prices takes at least as long as the program, with the lowest at most.
    """
    if len(folding.replicas) == 1 and folding.is_exact:
        return None
    mesh = folding.mesh
    alone = {
        tuple((kinds.device(rank), kinds.path(rank)) for rank in ranks_of_replica(mesh, replica))
        for replica in folding.replicas
    }
    return Folding(mesh=mesh, replica_of=(0,) * mesh.copies, shards=folding.shards) if len(alone) == 1 else None


def folding_of(layout: PlanIndex, costs: Costs, seconds: WorkSeconds | None = None) -> Folding:
    """Find the ranks that represent others under these prices. `seconds`: medians of communications, to share a cache of
    prices (None: asks `costs`). Raises CostError as `Costs.estimate`."""
    price = seconds or (lambda works: [costs.estimate(work, 0).median_s for work in works])
    mesh = layout.plan.mesh
    if costs.differ_by_rank:  # learnt per rank and link
        return unfolded(mesh)
    kinds = RankKinds(costs)
    inside = InsideSeconds(layout, exchanges_of(layout), costs, price)
    replica_of = _replicas_of(layout, kinds, inside)
    if layout.plan.synchronisation.kind == "gossip":
        return _shifted(layout, costs, replica_of)
    asks = mesh.groups > 1 or mesh.team > 1 or (mesh.tp > 1 and layout.shards_alike)
    buckets_alike = asks and _buckets_pay_alike(layout, costs, kinds, price)
    if mesh.groups > 1:
        replica_of = _by_sharding_groups(layout, price, replica_of) if buckets_alike else tuple(range(mesh.copies))
    folding = Folding(mesh=mesh, replica_of=replica_of, shards=tuple(range(mesh.tp)))
    if mesh.team > 1 and not (folding.has_whole_teams and buckets_alike):
        return replace(folding, is_exact=False)
    if mesh.tp == 1 or not layout.shards_alike:
        return folding
    alike = (
        buckets_alike
        and (mesh.groups == 1 or _pay_alike(map(price, _replica_sums(layout, by_place=True))))
        and all(_shards_sit_alike(layout, kinds, replica) and _pay_alike(inside(replica)) for replica in folding.replicas)
    )
    return Folding(mesh=mesh, replica_of=replica_of, shards=(0,)) if alike else folding


def _replicas_of(layout: PlanIndex, kinds: RankKinds, inside: InsideSeconds) -> tuple[int, ...]:
    """Per replica the first in which everything costs the same: by where its ranks sit, else by asking for every price."""
    mesh = layout.plan.mesh
    teams = kinds.first_of(mesh, mesh.team)
    placed = [teams[replica // mesh.team] * mesh.team + replica % mesh.team for replica in range(mesh.copies)]
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
    plan, mesh = layout.plan, layout.plan.mesh
    exact, nearly = (repeats_after(plan, costs.cluster, replica_of, leaves=leaves) for leaves in (True, False))
    step = nearly if exact == mesh.copies else exact
    kinds = tuple(replica % step for replica in range(mesh.copies))
    return replace(unfolded(mesh), replica_of=kinds, is_exact=step == exact)


def _by_sharding_groups(layout: PlanIndex, price: WorkSeconds, replica_of: tuple[int, ...]) -> tuple[int, ...]:
    """Where replicas meet in sharding groups that pay the same, and not all in one collective, the first group stands for all,
    place by place, if they consist of replicas of the same kinds; else every replica stands for itself. Places of equal kinds
    are one where the sums over all groups cost the same too."""
    mesh = layout.plan.mesh
    place = [replica % mesh.group_copies for replica in range(mesh.copies)]
    alike = all(kind == replica_of[first] for kind, first in zip(replica_of, place, strict=True))
    if not alike:
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
    mesh = layout.plan.mesh
    for stage in range(mesh.pp):
        ranks = [mesh.rank(stage=stage, replica=replica, shard=shard) for shard in range(mesh.tp)]
        if len({(kinds.device(rank), kinds.path(rank)) for rank in ranks}) > 1:
            return False
    return True


def _pay_alike(side_by_side: Iterable[Sequence[float]]) -> bool:
    """Up to rounding."""
    return all(max(seconds) - min(seconds) <= 1e-12 * max(seconds) for seconds in side_by_side)


def _buckets_pay_alike(layout: PlanIndex, costs: Costs, kinds: RankKinds, price: WorkSeconds) -> bool:
    """Whether the shards of a bucket pay the same for their sums. They are priced where their places leave that open: of
    sharding groups that sit alike, those of the first."""
    mesh, cluster = layout.plan.mesh, costs.cluster
    answers: dict[tuple[str, int], bool] = {}
    unlike = sorted(set(kinds.first_of(mesh, mesh.group_copies)))

    def places(family: BucketFamily) -> list[int]:
        begins = range(0, len(family.groups), family.replicas)
        return [place for begin in begins for group in unlike if len(family.groups[place := begin + group][1]) > 1]

    def is_open(operation: str, family: BucketFamily) -> bool:
        """Whether places leave it open; the answer is one for all bytes that the same groups sum."""
        key = operation, id(family.groups)
        if key not in answers:
            ranks = [family.groups[place][1] for place in places(family)]
            paths = {alike_collectives(cluster, operation, group, concurrent_groups(mesh, group)) for group in ranks}
            answers[key] = len(paths) > 1 or None in paths
        return answers[key]

    return _pay_alike(map(price, _bucket_works(layout, places, is_open)))


def _bucket_works(
    layout: PlanIndex, places: Callable[[BucketFamily], list[int]], is_open: Callable[[str, BucketFamily], bool]
) -> Iterator[Sequence[Collective]]:
    """Per parameters in a gradient bucket, the sums of all shards that hold pieces (or whole ones, each for itself), of
    operations that may cost these groups of ranks different times."""
    seen: set[Hashable] = set()
    for family in layout.buckets.families:
        kinds = (id(family.groups), family.elements, family.size_bytes)  # one tuple of groups for all that are held alike
        if kinds in seen:
            continue
        seen.add(kinds)
        buckets = [layout.buckets.of(family, place) for place in places(family)]
        if len(buckets) > 1 and is_open(bucket_work(layout, buckets[0]).operation, family):
            yield [bucket_work(layout, bucket) for bucket in buckets]


# --- replicas that are nearly alike -----------------------------------------------------------------------------------
#
# Of many replicas some have all their stages under one leaf switch and some have not. Their transfers cost a little more or
# less, so folding keeps one of each kind. If tasks are issued in order and do not slow one another, no task that takes longer
# makes a step shorter. So the program of one replica is no shorter than the step when every communication has the highest price
# that any replica pays for it, and no longer when every one has the lowest. Where the two differ by at most `NEARLY`, the first
# is the answer: it is too long by at most that.
#
# Replicas that gossip may sit alike but for leaf switches. Those of one node are then simulated, between the same bounds: every
# message has the highest price, or the lowest, of those that it stands for. Leaves out: machines on which computation and
# communication slow one another.


NEARLY = 1e-4
"""Replicas are simulated as one if their prices leave the step open by no more than this share of it."""

OneReplica = tuple[Folding, CompiledGraph, tuple[Estimate, ...]]

MOST_TASKS = 2**17
"""Of all programs that a Model keeps: 30 MB, as a task takes about 220 bytes. The last one is kept however large it is, until
another is lowered: the fastest of a few large plans is simulated, and then evaluated."""


class Programs:
    """The programs of a Model's plans that were asked for last. A program holds no price, so a question about a faster link, or
    about what a run has shown of the machine, finds it here.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, CompiledGraph] = OrderedDict()

    def of(self, layout: PlanIndex, folding: Folding, *, resuming: bool) -> CompiledGraph:
        """One step of the layout's plan under a folding; `resuming`: see `Columns.resuming`. Errors as `compile_graph`."""
        key = layout.plan, folding, resuming
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if self._tasks > MOST_TASKS:  # of one large program
            self.forget()
        columns = lower_columns(layout.plan, layout.model, layout, folding)
        compiled = compile_graph(columns.resuming() if resuming else columns)
        if not layout.plan.offloads:  # what it copies depends on the precision too
            self._kept[key] = compiled
            while self._tasks > MOST_TASKS and len(self._kept) > 1:
                self._kept.popitem(last=False)
        return compiled

    @property
    def _tasks(self) -> int:
        return sum(each.size for each in self._kept.values())

    def forget(self) -> None:
        self._kept.clear()

    def __reduce__(self) -> tuple[type[Programs], tuple[()]]:
        """Not sent to other processes."""
        return Programs, ()


def program_of(problem: PlanningProblem, layout: PlanIndex, folding: Folding) -> CompiledGraph:
    resuming = bool(problem.costs(layout.plan.world_size).post_wait_s)
    return layout.model.remembered(Programs).of(layout, folding, resuming=resuming)


def nearly_alike(problem: PlanningProblem, layout: PlanIndex, folding: Folding, steps: int) -> OneReplica | None:
    """The program of one replica with the highest prices of all, if that bounds the mean of `steps` to within `NEARLY`, with
    its folding and the price of each unit. None: replicas are one already, or differ by more."""
    mesh, costs = layout.plan.mesh, problem.costs(layout.plan.world_size)
    overlap = costs.overlap([], [])
    slowing = problem.cluster.profile.overlap is not None or overlap.communications_share
    kinds_of_ranks = RankKinds(costs)
    one = None if slowing else merged(folding, kinds_of_ranks)
    if one is None:
        return None
    unlike = {size: frozenset(kinds_of_ranks.first_of(mesh, size)) for size in {mesh.team, mesh.group_copies, mesh.copies}}
    compiled = program_of(problem, layout, one)
    columns = compiled.columns
    kinds = columns.units.kinds
    prices = problem.price(kinds, mesh)
    bounds: dict[Work, tuple[Estimate, Estimate]] = {}
    for unit in kinds:
        if unit.work in bounds or not is_communication(unit.work):
            continue
        if likes := _likes(mesh, unit.work, folding.replicas, unlike):
            paid = problem.price([(work, 0) for work in likes], mesh)
            bounds[unit.work] = (min(paid, key=attrgetter("median_s")), max(paid, key=attrgetter("median_s")))

    def bounded(end: int) -> tuple[Estimate, ...]:
        paid = [bounds[unit.work][end] if unit.work in bounds else price for unit, price in zip(kinds, prices, strict=True)]
        return tuple(beside_products(problem.model, costs, layout.plan, columns.units, columns.units.each(paid)))

    low, high = bounded(0), bounded(1)
    rows = np.array([medians_s(low), medians_s(high)])
    shortest_s, longest_s = mean_step_s(compiled, rows, overlap, steps=steps, unit=columns.unit)
    return (one, compiled, high) if longest_s <= shortest_s * (1 + NEARLY) else None


def _likes(mesh: Mesh, work: Work, replicas: Sequence[int], unlike: Mapping[int, frozenset[int]]) -> list[Work]:
    """A communication of the first replica as all of them do it; none where it is one for all.

    unlike: per size of blocks of copies (of a team, or a sharding group) the first of those that sit alike.
    """
    copies = {rank // mesh.tp % mesh.copies for rank in ranks_of_work(work)}
    if len(copies) == 1:
        return [moved_work(work, replica * mesh.tp) for replica in replicas]
    if (mesh.team == 1 and mesh.groups == 1) or not isinstance(work, Collective):
        return []
    shard = min(work.group) % mesh.tp
    size = next(size for size in sorted(unlike) if len({copy // size for copy in copies}) == 1)
    return [
        replace(work, group=group)
        for group in concurrent_groups(mesh, work.group)
        if group[0] % mesh.tp == shard and group[0] // mesh.tp % mesh.copies // size in unlike[size]
    ]


def nearly_shifted(problem: PlanningProblem, layout: PlanIndex, folding: Folding) -> Folding:
    """The folding of a plan that gossips, if it bounds the mean step to within `NEARLY`; else every rank by itself."""
    if folding.is_exact:
        return folding
    slowing = problem.costs(layout.plan.world_size).overlap([], []).communications_share
    if slowing:
        return unfolded(layout.plan.mesh)
    shortest_s, longest_s = (
        float(period.steps_s(period.medians_s)[0])
        for period in (mixing_period(problem, layout, folding, lowest=lowest) for lowest in (True, False))
    )
    return folding if longest_s <= shortest_s * (1 + NEARLY) else unfolded(layout.plan.mesh)
