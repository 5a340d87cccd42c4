"""What makes a plan quick to evaluate gives, bit for bit, what the straightforward way does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parsim.costs.communication.collectives import alike_collectives, alike_transfers
from parsim.costs.compute.compute import ComputeCosts, compute_costs
from parsim.costs.costs import Costs
from parsim.errors import PlanError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile, profile_from_parts
from parsim.model.formats import DEFAULT_NUMERICS
from parsim.plans.layouts import POINT_TO_POINT_HOPS, hop_groups, hop_pairs
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.plans.stages import concurrent_groups, concurrent_transfers, concurrent_with
from parsim.predict.breakdown import union
from parsim.predict.folding import Exchange, InsideSeconds, exchanges_of
from parsim.predict.memory import communication_bytes
from parsim.program.lifetimes import KeptActivations, RankValues
from parsim.program.passes.convert import hop_collective, hop_message
from parsim.program.placed import PlanIndex
from parsim.work import Collective, Compute, Phase, SendRecv, Work
from tests.plans import MODEL, plans

MACHINES = {
    "cube mesh": ("dgx1-v100-32gb", 4, "infiniband-100g"),
    "one card": ("p3-16xlarge", 8, "ethernet-25g"),
    "switch": ("dgx2-v100", 2, "infiniband-100g"),
}


@cache
def machine(name: str) -> Cluster:
    if name == "leaves":
        return cluster_from_profile(profile_from_parts("h100-sxm", 8), nodes=16, network="infiniband-400g")
    profile, nodes, network = MACHINES[name]
    return cluster_from_profile(load_profile(profile), nodes=nodes, network=network)


def index_of(plan: Plan) -> PlanIndex:
    try:
        return PlanIndex(plan, MODEL)
    except PlanError:
        assume(False)
        raise


@settings(deadline=None, max_examples=60)
@given(plans(replicas=(1, 2, 4)))
def test_each_gradient_is_in_one_bucket_of_every_rank_that_holds_it(plan: Plan) -> None:
    layout = index_of(plan)
    every = list(layout.buckets)
    assert [bucket.number for bucket in every] == list(range(len(layout.buckets)))
    assert all(layout.buckets[bucket.number] is bucket for bucket in every)
    for rank in range(plan.world_size):
        own = [bucket for bucket in every if rank in bucket.group]
        assert list(layout.rank_buckets(rank)) == own
        assert sorted((held.name, held.elements) for bucket in own for held in bucket.first) == sorted(
            (held.name, held.elements) for held in layout.rank_parameters(rank) if held.trainable
        )
        assert [(sum(held.elements for held in bucket.first), bucket.size_bytes) for bucket in own] == [
            (bucket.elements, sum(held.size_bytes for held in bucket.first)) for bucket in own
        ]


@settings(deadline=None, max_examples=40)
@given(plans(replicas=(1, 2, 4, 8)), st.sampled_from(sorted(MACHINES)))
def test_communication_inside_replicas_costs_what_each_piece_of_it_does(plan: Plan, name: str) -> None:
    layout, cluster = index_of(plan), machine(name)
    assume(plan.world_size <= cluster.size)
    costs = Costs(model=MODEL, cluster=cluster, ranks=plan.world_size)

    def price(works: Sequence[Work]) -> list[float]:
        return [costs.estimate(work, 0, concurrent_with(plan.mesh, work)).median_s for work in works]

    exchanges = exchanges_of(layout)
    inside = InsideSeconds(layout, exchanges, costs, price)
    for replica in range(plan.mesh.copies):
        assert inside(replica) == [price(side_by_side(layout, exchange, replica)) for exchange in exchanges]


def side_by_side(layout: PlanIndex, exchange: Exchange, replica: int) -> list[Work]:
    """What the tp shards of a replica do, one by one."""
    tp, hop, size_bytes = layout.plan.mesh.tp, exchange.hop, exchange.size_bytes
    if hop is None:
        ends = [[layout.rank(place, replica, shard) for place in (exchange.source, exchange.target)] for shard in range(tp)]
        return [SendRecv(source=first, destination=last, size_bytes=size_bytes) for first, last in ends]
    if hop.operation in POINT_TO_POINT_HOPS:
        pairs = [[layout.rank(exchange.source, replica, shard) for shard in pair] for pair in hop_pairs(hop, tp)]
        return [hop_message(hop, first, last, size_bytes, tp) for first, last in pairs]
    groups = [tuple(layout.rank(exchange.source, replica, shard) for shard in group) for group in hop_groups(hop, tp)]
    return [hop_collective(hop, group, size_bytes, tp) for group in groups]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([*sorted(MACHINES), "leaves"]),
    st.sampled_from([(2, 4, 4), (4, 2, 4), (2, 8, 2), (1, 16, 2), (8, 2, 2), (4, 4, 8)]),
    st.data(),
)
def test_paths_that_are_alike_pay_the_same(name: str, axes: tuple[int, int, int], data: st.DataObject) -> None:
    cluster, mesh = machine(name), Mesh(pp=axes[0], dp=axes[1], tp=axes[2])
    assume(mesh.size <= cluster.size)
    costs, size_bytes = Costs(model=MODEL, cluster=cluster, ranks=mesh.size), data.draw(st.integers(1, 2**28))
    stage, over = data.draw(st.integers(0, mesh.pp - 1)), data.draw(st.sampled_from(["tp", "dp", "pp"]))
    paid: dict[object, set[float]] = {}
    for replica in range(mesh.dp):
        for shard in range(mesh.tp):
            rank = mesh.rank(stage=stage, replica=replica, shard=shard)
            work: Collective | SendRecv
            if over == "pp":
                pair = (rank, mesh.rank(stage=(stage + 1) % mesh.pp, replica=replica, shard=shard))
                assume(pair[0] != pair[1])
                work = SendRecv(source=pair[0], destination=pair[1], size_bytes=size_bytes)
                kind = alike_transfers(cluster, pair, concurrent_transfers(mesh, pair))
            else:
                places = (
                    [(replica, other) for other in range(mesh.tp)] if over == "tp" else [(r, shard) for r in range(mesh.dp)]
                )
                group = tuple(mesh.rank(stage=stage, replica=r, shard=s) for r, s in places)
                work = Collective(operation="all_reduce", group=group, size_bytes=size_bytes)
                kind = alike_collectives(cluster, "all_reduce", group, concurrent_groups(mesh, group))
            seconds = costs.estimate(work, rank, concurrent_with(mesh, work)).median_s
            paid.setdefault(kind if kind is not None else (rank, "alone"), set()).add(seconds)
    assert all(len(seconds) == 1 for seconds in paid.values())


@settings(deadline=None, max_examples=60)
@given(plans(), st.data())
def test_messages_that_are_alike_count_once(plan: Plan, data: st.DataObject) -> None:
    """The largest message of a rank is that of its values one by one."""
    layout = index_of(plan)
    rank = data.draw(st.integers(0, plan.world_size - 1))
    whole = communication_bytes(RankValues(KeptActivations(layout, "fp32"), rank), "gloo")
    values, largest = layout.values_at[plan.stage_of_rank(rank)], 0
    for name in values:
        alone = PlanIndex(plan, MODEL)
        alone.__dict__["values_at"] = {**layout.values_at, plan.stage_of_rank(rank): (name,)}
        largest = max(largest, communication_bytes(RankValues(KeptActivations(alone, "fp32"), rank), "gloo"))
    assert not values or whole == largest


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=12))
def test_spans_that_are_nearly_sorted_merge_as_sorted_ones(spans: list[tuple[int, int]]) -> None:
    start = np.array([first for first, _ in spans], dtype=float)
    end = np.array([first + length for first, length in spans], dtype=float)
    found, order = union(start, end), np.lexsort((end, start))
    again = union(start[order], end[order])
    assert [column.tolist() for column in found[:2]] == [column.tolist() for column in again[:2]]
    assert found[2].tolist() == order[again[2]].tolist()


def test_a_price_that_is_known_is_the_one_that_would_be_worked_out() -> None:
    cluster = machine("cube mesh")
    component, device = MODEL.components[1], cluster.devices[0]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for samples in (1, 4, 64):
            work = Compute(component=component.name, phase=phase, samples=samples)
            known = compute_costs(cluster, DEFAULT_NUMERICS, None)
            assert known.estimate(work, component, device) is known.estimate(work, component, device)
            assert known.estimate(work, component, device) == ComputeCosts(cluster.profile).estimate(work, component, device)


@given(st.integers(1, 12), st.data())
def test_shifts_of_a_group_are_those_that_overlap_nothing(size: int, data: st.DataObject) -> None:
    members = tuple(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))))
    group = tuple(Mesh(dp=size).rank(stage=0, replica=replica) for replica in members)
    found, taken = [], set(members)
    for start in range(size):
        shift = tuple(start + member - members[0] for member in members)
        if shift == members or (shift[-1] < size and taken.isdisjoint(shift)):
            found.append(shift)
            taken.update(shift)
    assert concurrent_groups(Mesh(dp=size), group) == tuple(found)
