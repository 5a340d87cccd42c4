"""What makes a plan quick to evaluate gives what the straightforward way does, and loses neither bytes nor time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parsim.costs.adjustments import AS_IT_IS, HardwareScale
from parsim.costs.communication.collectives import alike_collectives, alike_transfers
from parsim.costs.compute.compute import ComputeCosts, compute_costs
from parsim.costs.costs import Costs
from parsim.engines.static import CompiledGraph
from parsim.errors import PlanError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile, profile_from_parts
from parsim.model.formats import DEFAULT_NUMERICS, Numerics
from parsim.model.model import Model
from parsim.plans.layouts import POINT_TO_POINT_HOPS, hop_groups, hop_pairs
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS, Action, few_rounds, pipeline_actions
from parsim.plans.plan import Plan, Stage
from parsim.plans.stages import concurrent_groups, concurrent_transfers, concurrent_with, even_parts, stages_of
from parsim.predict import memory as memory_module
from parsim.predict.breakdown import union
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.predict.folding import Exchange, InsideSeconds, Programs, exchanges_of
from parsim.predict.memory import RankMemory, communication_bytes, unlike_memory
from parsim.predict.problem import PlanningProblem
from parsim.program.columns import unfolded
from parsim.program.lifetimes import FewActions, KeptActivations, RankValues, few_actions
from parsim.program.lower import lower
from parsim.program.passes.convert import hop_collective, hop_message
from parsim.program.passes.unsharded import uses_of
from parsim.program.placed import MOST, Divisions, PlanIndex
from parsim.program.taskgraph import Resource
from parsim.program.templates import lower_columns
from parsim.search.stages import balanced_plan
from parsim.work import Collective, Compute, Phase, SendRecv, Work
from tests.models import chain_model, deep_model
from tests.plans import MODEL, plan_memory, plans
from tests.theory.test_lowering_by_kinds import MODELS, deep_plans, planned, tasks_of

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


# What plans of one Model share is what each of them finds on a Model of its own.

MACHINE = cluster_from_profile(load_profile("dgx1-v100-32gb"), nodes=8, network="infiniband-100g")
CHANGES = ("zero_stage", "bucket_bytes", "recompute", "segments", "microbatches", "pipeline_order", "clip_gradients")


def memory(layout: PlanIndex) -> tuple[RankMemory, ...]:
    return plan_memory(layout, MACHINE, Numerics(optimizer="adam"))


def found_with(plan: Plan, model: Model) -> tuple[object, ...]:
    layout = PlanIndex(plan, model)
    return tasks_of(lower_columns(plan, model, layout)), memory(layout), layout.kinds.of, list(layout.frozen.items())


def changed(draw: st.DataObject, plan: Plan, other: Plan) -> Iterator[Plan]:
    """The plan with some keys of another one, where that is a plan."""
    for keys in draw.draw(st.lists(st.sets(st.sampled_from(CHANGES)), min_size=1, max_size=3)):
        try:
            yield replace(plan, **{key: getattr(other, key) for key in sorted(keys)})
        except PlanError:
            continue


@pytest.mark.slow
@settings(max_examples=30)
@given(st.data())
def test_a_plan_finds_the_same_after_others_of_its_model(draw: st.DataObject) -> None:
    shared = replace(MODELS[draw.draw(st.sampled_from(sorted(MODELS)))])
    plan, other = draw.draw(deep_plans(shared)), draw.draw(deep_plans(shared))
    judged = 0
    for each in (plan, *changed(draw, plan, other)):
        try:
            alone = found_with(each, replace(shared))
        except PlanError:
            continue
        assert found_with(each, shared) == alone
        judged += 1
    assume(judged)


@settings(max_examples=20)
@given(st.data())
def test_alike_ranks_hold_what_the_first_of_them_does(draw: st.DataObject) -> None:
    layout = planned(draw)
    first = unlike_memory(layout, MACHINE, Numerics(optimizer="adam"))
    every = memory(layout)
    assert [entry.rank for entry in every] == list(range(layout.plan.world_size))
    assert {replace(entry, rank=0) for entry in every} == {replace(entry, rank=0) for entry in first}
    assert all(every[entry.rank] == entry for entry in first)


@settings(max_examples=15, deadline=None)
@given(
    draw=st.data(),
    mesh=st.sampled_from([Mesh(dp=4), Mesh(pp=2, dp=2), Mesh(dp=2, tp=2), Mesh(pp=2, dp=2, tp=2), Mesh(dp=16)]),
    factor=st.sampled_from([0.5, 3.0]),
    nodes=st.sampled_from([2, 4]),
)
def test_a_program_found_on_the_model_gives_what_a_new_one_does(
    draw: st.DataObject, mesh: Mesh, factor: float, nodes: int
) -> None:
    """A question with other prices finds the program of the first one."""
    model = deep_model(6)
    parts = even_parts([component.name for component in model.components], mesh.pp)
    plan = Plan(
        strategy="custom",
        mesh=mesh,
        stages=stages_of(mesh, parts),
        global_batch=64,
        microbatches=draw.draw(st.sampled_from([1, 2])),
        zero_stage=draw.draw(st.sampled_from([0, 1, 2])),
    )

    def evaluated(of: Model, scale: HardwareScale, fold: bool) -> Evaluation:
        machine = cluster_from_profile(load_profile("dgx1-v100-32gb"), nodes=nodes, network="infiniband-100g")
        posed = PlanningProblem(model=of, cluster=machine, global_batch=64, scale=scale)
        return evaluate(posed, plan, samples=20, fold=fold)

    for fold in (False, True):
        first = evaluated(model, AS_IT_IS, fold)
        faster = HardwareScale(communication=factor)
        known, anew = evaluated(model, faster, fold), evaluated(replace(model), faster, fold)
        assert (known.compiled is first.compiled) == (known.folding == first.folding)
        assert known.result == anew.result
        assert known.breakdown == anew.breakdown
        assert np.array_equal(known.timeline.end_s, anew.timeline.end_s)


def test_a_model_keeps_programs_of_so_many_tasks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    model, programs = deep_model(4), Programs()
    names = tuple(component.name for component in model.components)

    def program(batch: int) -> CompiledGraph:
        mesh = Mesh()
        plan = Plan(strategy="custom", mesh=mesh, stages=stages_of(mesh, [names]), global_batch=batch)
        return programs.of(PlanIndex(plan, model), unfolded(mesh), resuming=False)

    first = program(1)
    assert program(1) is first
    monkeypatch.setattr("parsim.predict.folding.MOST_TASKS", 2 * first.size)
    program(2)
    assert program(1) is first  # and so it was asked for last
    program(3)
    assert program(1) is first
    program(2)
    program(3)
    assert program(1) is not first
    monkeypatch.setattr("parsim.predict.folding.MOST_TASKS", 1)
    large = program(4)
    assert program(4) is large  # the search simulates it, and then it is evaluated
    program(1)
    assert program(4) is not large


def test_a_model_keeps_the_divisions_that_were_asked_for_last() -> None:
    known, model = Divisions(), deep_model(MOST + 2)
    names = tuple(component.name for component in model.components)
    mesh = Mesh(pp=2)

    def cut(first: int) -> Plan:
        parts = names[:first], names[first:]
        stages = tuple(Stage(components=part, ranks=mesh.stage_ranks(place)) for place, part in enumerate(parts))
        return Plan(strategy="custom", mesh=mesh, stages=stages, global_batch=2)

    known.of(cut(1))["division"]["seen"] = True
    for first in range(2, MOST + 1):
        known.of(cut(first))
    assert "seen" in known.of(cut(1))["division"]  # and so it was asked for last
    known.of(cut(MOST + 1))
    assert "seen" in known.of(replace(cut(1), microbatches=2, global_batch=4, zero_stage=0))["division"]
    for first in range(2, MOST + 2):
        known.of(cut(first))
    assert "seen" not in known.of(cut(1))["division"]


# What is worked out from four rounds of microbatches equals what all rounds give.

ORDERS = (("1f1b", 1), ("interleaved", 2), ("interleaved", 3))


@settings(max_examples=40, deadline=None)
@given(
    order=st.sampled_from(ORDERS),
    pp=st.integers(1, 4),
    rounds=st.integers(1, 9),
    zero_stage=st.sampled_from((2, 3)),
    data=st.data(),
)
def test_buckets_are_whole_as_long_with_few_actions(
    order: tuple[str, int], pp: int, rounds: int, zero_stage: int, data: st.DataObject
) -> None:
    order = ("1f1b", 1) if pp == 1 else order
    elements = data.draw(st.sampled_from((1_000, 3_000_000)))
    problem = PlanningProblem(
        model=chain_model((1e9,) * 13, elements=elements),
        cluster=cluster_from_profile(load_profile("dgx1-v100-32gb"), 2 * pp),
        global_batch=2 * pp * rounds,
        zero_stage=zero_stage,
    )
    plan = balanced_plan(
        problem, "custom", Mesh(pp=pp, dp=2), microbatches=pp * rounds, pipeline_order=order[0], chunks=order[1]
    )
    size = data.draw(st.sampled_from((1_000_000, 25_000_000, 10**9)))
    layout = PlanIndex(replace(plan, zero_stage=zero_stage, bucket_bytes=size), problem.model)
    short = [memory_module.whole_bytes(layout, rank) for rank in range(plan.world_size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_module, "few_actions", every_action)
        whole = [memory_module.whole_bytes(layout, rank) for rank in range(plan.world_size)]
    for rank, (few, every) in enumerate(zip(short, whole, strict=True)):
        pipeline = order[0], plan.stage_of_rank(rank), pp, plan.microbatches, order[1]
        uses = [(uses_of(layout, pipeline[1], [action]), number) for action, number in zip(*standing(pipeline), strict=True)]
        held = {
            (use.phase, use.component, use.microbatch): few[use.phase, use.component, number]
            for made, number in uses
            for use in made
        }
        assert held == every


def every_action(order: str, place: int, ranks: int, microbatches: int, chunks: int) -> FewActions:
    actions = tuple(pipeline_actions(order, place, ranks, microbatches, chunks))
    return FewActions(actions, tuple(action.microbatch for action in actions))


def standing(pipeline: tuple[str, int, int, int, int]) -> tuple[tuple[Action, ...], tuple[int, ...]]:
    """All actions of a place, and by action the microbatch that stands for its own."""
    return every_action(*pipeline).actions, few_actions(*pipeline).microbatches


@pytest.mark.parametrize(("order", "chunks"), ORDERS)
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("rounds", [5, 6, 9, 12])
def test_the_end_of_a_step_is_that_of_four_rounds(order: str, chunks: int, ranks: int, rounds: int) -> None:
    microbatches = ranks * rounds
    for rank in range(ranks):
        try:
            whole = pipeline_actions(order, rank, ranks, microbatches, chunks)
        except PlanError:
            continue
        few = few_rounds(order, ranks, microbatches)
        assert _end(whole, chunks) == _end(pipeline_actions(order, rank, ranks, few, chunks), chunks)


def _end(actions, chunks):  # type: ignore[no-untyped-def]
    """From behind, until a backward of every stage of the rank has been met."""
    found, met = [], set()
    for action in reversed(actions):
        found.append((action.stage, action.phase))
        if action.phase is not Phase.FORWARD:
            met.add(action.stage)
        if len(met) == chunks:
            break
    return found


# What no lowering and no engine may lose: bytes, time, and the one thing a resource does at a time.


@settings(max_examples=100, deadline=None)
@given(plans())
def test_every_byte_sent_is_received(plan: Plan) -> None:
    """A message stands in the queues of both its ends, a collective in one queue of every member; and what arrives of a value
    (or goes back of its gradient) is what its readers in that stage hold of it."""
    layout, graph = PlanIndex(plan, MODEL), lower(plan, MODEL)
    arrived: Counter[tuple[str, bool, int, int, int]] = Counter()
    for task in graph.tasks:
        match task.work:
            case SendRecv() as work:
                assert [resource.rank for resource in task.resources] == [work.source, work.destination]
                if task.origin.hop is None:
                    ends = (Resource(work.source, f"pp>{work.destination}"), Resource(work.destination, f"pp<{work.source}"))
                    assert task.resources == ends
                    origin = task.origin
                    assert origin.value is not None
                    assert origin.replica is not None
                    assert origin.microbatch is not None
                    stage = plan.stage_of_rank(work.source if origin.gradient else work.destination)
                    arrived[origin.value, origin.gradient, stage, origin.replica, origin.microbatch] += work.size_bytes
            case Collective() as work:
                assert [resource.rank for resource in task.resources] == list(work.group)
                assert len({resource.stream for resource in task.resources}) == 1
    wanted: Counter[tuple[str, bool, int]] = Counter()
    tp = plan.mesh.tp
    for value in MODEL.values:
        home, size = layout.stage_of_value[value.name], value.size_bytes(plan.microbatch_samples)
        layouts = defaultdict(set)
        for reading in layout.readings[value.name]:
            if home is not None and reading.stage != home:
                layouts[reading.stage].add(reading.ends.value)
                if value.differentiable and any(name in layout.differentiable for name in reading.components):
                    how = reading.ends.gradient
                    wanted[value.name, True, reading.stage] += len(how.holders(tp)) * round(size * how.local_share(tp))
        for stage, seen in layouts.items():
            wanted[value.name, False, stage] += sum(len(how.holders(tp)) * round(size * how.local_share(tp)) for how in seen)
    for replica in range(plan.mesh.dp):
        for microbatch in range(plan.microbatches):
            got = {
                (name, back, stage): size
                for (name, back, stage, r, m), size in arrived.items()
                if (r, m) == (replica, microbatch)
            }
            assert got == dict(wanted)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_every_backward_is_done_once_whole_or_in_halves_after_what_it_recomputes(plan: Plan) -> None:
    layout = PlanIndex(plan, MODEL)
    done: dict[tuple[str, int, int], Counter[Phase]] = defaultdict(Counter)
    for task in lower(plan, MODEL).tasks:
        if isinstance(task.work, Compute):
            assert task.origin.microbatch is not None
            done[task.work.component, task.resources[0].rank, task.origin.microbatch][task.work.phase] += 1
    for (name, _, _), phases in done.items():
        halves = PIPELINE_ORDERS[plan.pipeline_order].halves and bool(MODEL.component(name).parameters) and name != "a"
        backward = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT) if halves else (Phase.BACKWARD,)
        again = (Phase.RECOMPUTE,) if name in plan.recomputed else ()
        assert phases == Counter((Phase.FORWARD, *again, *backward)), (name, layout.is_halved(name))


@given(size=st.integers(2, 24), data=st.data())
def test_groups_at_once_are_the_first_shifts_that_fit_beside_the_group(size: int, data: st.DataObject) -> None:
    """Where they make a partition, it is one value for all its groups, so that ten thousand groups are laid out once."""
    members = tuple(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=2, max_size=6))))
    groups = concurrent_groups(Mesh(dp=size), members)
    fitting: list[tuple[int, ...]] = []
    taken = set(members)
    for start in range(size - members[-1] + members[0]):
        shift = tuple(start + member - members[0] for member in members)
        if shift == members or taken.isdisjoint(shift):
            fitting.append(shift)
            taken.update(shift)
    assert groups == tuple(fitting)
    if len(fitting) * len(members) == size:
        assert all(concurrent_groups(Mesh(dp=size), group) is groups for group in groups)
