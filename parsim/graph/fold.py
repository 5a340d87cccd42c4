"""Folding: ranks that are interchangeable under plan and cluster are simulated once.

Why it is exact. Call two tasks alike if they take equally long, wait for tasks that are alike, and hold resources that
queue tasks alike. The schedule is the only solution of "start = latest end before". The solution of the program with one
task per kind, copied to all of a kind, solves that equation too, so it is the schedule. The same holds with overlap
slowdowns, as alike ranks are busy alike. It rests on equal durations. With noise of
tasks or ranks, ranks that wait for one another wait for the slowest (`parsim.engines.slowest`, `side_by_side`).

Two kinds of ranks are folded:

    replicas   in which whatever stays inside costs the same, links shared with the neighbours included. What crosses
               replicas is one task for all of them, or one for each sharding group if all groups are alike.
               Replicas that gossip are one kind where a shift of all of them changes nothing (`folding.shifts`).
    tp shards  where every component runs on all tp ranks alike (none placed on one of them), if all collectives of a kind that
               the shards do side by side cost the same.

Leaves out: pp stages (they differ by what they hold), replicas whose nodes are permuted, and shards of which only some
are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from parsim.costs.communication.equivalent_groups import alike_collectives
from parsim.costs.costs import Costs
from parsim.graph.folding.inside import InsideSeconds, WorkSeconds, exchanges_of
from parsim.graph.folding.rank_kinds import RankKinds, ranks_of_replica
from parsim.graph.folding.shifts import repeats_after
from parsim.graph.passes.gradients import bucket_work
from parsim.graph.passes.replica_sums import replica_sum_work
from parsim.graph.plan_index import PlanIndex
from parsim.plans.concurrent import concurrent_groups
from parsim.plans.mesh import Mesh
from parsim.work import Collective


@dataclass(frozen=True, kw_only=True)
class Folding:
    """Attributes:
    replica_of: per replica the one that stands for it (the first of its kind).
    shards: the tp ranks that are simulated: all, or the first for all.
    is_exact: False where copies that communicate inside components (cp, ep) do not pay alike: these kinds of replicas are no
        program, and serve `parsim.predict.nearly_alike` alone. So do replicas that gossip where leaf switches differ.
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
    mesh, kinds = folding.mesh, RankKinds(costs)
    alone = {
        tuple((kinds.device(rank), kinds.path(rank)) for rank in ranks_of_replica(mesh, replica))
        for replica in folding.replicas
    }
    return Folding(mesh=mesh, replica_of=(0,) * mesh.copies, shards=folding.shards) if len(alone) == 1 else None


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
    kinds = RankKinds(costs)
    inside = InsideSeconds(layout, exchanges_of(layout), costs, price)
    replica_of = _replicas_of(layout, kinds, inside)
    if layout.plan.synchronisation.kind == "gossip":
        return _shifted(layout, costs, replica_of)
    if mesh.groups > 1:
        replica_of = _by_sharding_groups(layout, costs, price, replica_of)
    whole = Folding(mesh=mesh, replica_of=replica_of, shards=tuple(range(mesh.tp)))
    if mesh.team > 1 and not (whole.has_whole_teams and _buckets_pay_alike(layout, costs, price)):
        return replace(whole, is_exact=False)
    if mesh.tp == 1 or not layout.shards_alike:
        return whole
    alike = (
        _buckets_pay_alike(layout, costs, price)
        and (mesh.groups == 1 or _pay_alike(map(price, _replica_sums(layout, by_place=True))))
        and all(_shards_sit_alike(layout, kinds, replica) and _pay_alike(inside(replica)) for replica in whole.replicas)
    )
    return Folding(mesh=mesh, replica_of=replica_of, shards=(0,)) if alike else whole


def _replicas_of(layout: PlanIndex, kinds: RankKinds, inside: InsideSeconds) -> tuple[int, ...]:
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
        ranks = ranks_of_replica(mesh, replica)
        alone = tuple((kinds.device(rank), kinds.path(rank)) for rank in ranks)
        together = tuple(tuple(map(_rounded, seconds)) for seconds in inside(replica))
        priced[replica] = by_price.setdefault((alone, together), replica)
    return tuple(priced.get(replica, replica) for replica in placed)


def _shifted(layout: PlanIndex, costs: Costs, replica_of: tuple[int, ...]) -> Folding:
    """Of replicas that gossip; not exact if they are alike but for the leaf switches."""
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
    alike = all(own == replica_of[first] for own, first in zip(replica_of, place, strict=True))
    if not alike or not _buckets_pay_alike(layout, costs, price):
        return tuple(range(mesh.copies))
    return replica_of if _pay_alike(map(price, _replica_sums(layout))) else tuple(place)


def _replica_sums(layout: PlanIndex, *, by_place: bool = False) -> Iterator[Sequence[Collective]]:
    """Per parameters in a gradient bucket the sums over all sharding groups. `by_place`: those of each place in a group apart,
    which are of all its shards.
    """
    plan, copies = layout.plan, layout.plan.mesh.group_copies
    asked: set[Hashable] = set()
    for family in layout.buckets.families:
        kinds = (id(family.groups), family.elements, family.size_bytes)
        if kinds not in asked:
            asked.add(kinds)
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
    known: dict[tuple[str, int], bool] = {}

    def is_open(operation: str, groups: Sequence[tuple[int, tuple[int, ...]]]) -> bool:
        """Whether places leave it open; the answer is one for all bytes that the same groups sum."""
        key = operation, id(groups)
        if key not in known:
            ranks = [group for _, group in groups if len(group) > 1]
            paths = {alike_collectives(cluster, operation, group, concurrent_groups(mesh, group)) for group in ranks}
            known[key] = len(paths) > 1 or None in paths
        return known[key]

    return _pay_alike(map(price, _bucket_works(layout, is_open)))


def _bucket_works(
    layout: PlanIndex, is_open: Callable[[str, Sequence[tuple[int, tuple[int, ...]]]], bool]
) -> Iterator[Sequence[Collective]]:
    """Per parameters in a gradient bucket, the sums of all shards that hold pieces (or whole ones, each for itself).

    Args:
        is_open: whether an operation may cost these groups of ranks different times; else its sums are left out.
    """
    asked: set[Hashable] = set()
    for family in layout.buckets.families:
        kinds = (id(family.groups), family.elements, family.size_bytes)  # one tuple of groups for all that are held alike
        places = [] if kinds in asked else [place for place, (_, group) in enumerate(family.groups) if len(group) > 1]
        asked.add(kinds)
        if len(places) > 1:
            first = layout.buckets.of(family, places[0])
            if is_open(bucket_work(layout, first).operation, family.groups):
                yield [bucket_work(layout, layout.buckets.of(family, place)) for place in places]
