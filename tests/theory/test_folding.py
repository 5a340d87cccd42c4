"""Folded equals unfolded, and what is not interchangeable is not folded."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.costs.costs import Costs
from parsim.costs.observed import RunCorrections
from parsim.errors import DeadlockError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.plans import pipeline
from parsim.plans.layouts import parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import Actions
from parsim.plans.plan import Plan, Stage
from parsim.predict import nearly_alike
from parsim.predict.evaluate import evaluate
from parsim.predict.folding import folding_of
from parsim.predict.problem import PlanningProblem
from parsim.program.columns import Folding, unfolded
from parsim.program.placed import PlanIndex
from parsim.program.templates import lower_columns
from parsim.work import Collective, SendRecv
from tests.plans import MODEL, NAMES, grouped_plans, plans

CLUSTERS = {
    "dgx1": ("dgx1-v100-32gb", 1, None),
    "two dgx1": ("dgx1-v100-32gb", 2, "infiniband-100g"),
    "four p3": ("p3-16xlarge", 4, "ethernet-25g"),
    "dgx2": ("dgx2-v100", 1, None),
    "two dgx2": ("dgx2-v100", 2, "infiniband-100g"),
    "eight summit": ("summit-v100", 8, "infiniband-100g"),
}


@cache
def cluster(name: str) -> Cluster:
    profile, nodes, network = CLUSTERS[name]
    return cluster_from_profile(load_profile(profile), nodes=nodes, network=network)


def with_slow(machine: Cluster, ranks: frozenset[int]) -> Cluster:
    """The devices of these ranks are of another type: the fits of the first, with twice the floor and half the rate."""
    profile = machine.profile
    name, entry = next(iter(profile.device_types.items()))
    slower = [
        fit.model_copy(
            update={
                "device_type": "slow",
                "coefficients": {
                    key: 2 * value if key == "floor_s" else value / 2 if key.endswith("_per_s") else value
                    for key, value in fit.coefficients.items()
                },
            }
        )
        for fit in profile.compute.operator_fits
        if fit.device_type == name
    ]
    compute = profile.compute.model_copy(update={"operator_fits": (*profile.compute.operator_fits, *slower)})
    types = {**profile.device_types, "slow": entry}
    devices = tuple(
        replace(device, type=replace(device.type, name="slow")) if rank in ranks else device
        for rank, device in enumerate(machine.devices)
    )
    return replace(machine, devices=devices, profile=profile.model_copy(update={"device_types": types, "compute": compute}))


@st.composite
def questions(draw: st.DrawFn) -> tuple[PlanningProblem, Plan]:
    """A plan on machines where ranks may be alike or not: cube mesh, switch, nodes with one or more cards, mixed devices."""
    placed = draw(st.booleans())
    plan = draw(st.one_of(plans(replicas=(1, 2, 4, 8), placed=placed), grouped_plans(placed=placed)))
    fitting = [name for name in CLUSTERS if cluster(name).size >= plan.world_size]
    if not fitting:
        plan = replace(plan, mesh=Mesh(tp=plan.mesh.tp), stages=_one_stage(plan), microbatches=1, pipeline_order="1f1b")
        fitting = list(CLUSTERS)
    machine = cluster(draw(st.sampled_from(fitting)))
    devices = draw(st.permutations(range(plan.world_size))) if draw(st.booleans()) else range(plan.world_size)
    machine = replace(machine, devices=tuple(machine.devices[number] for number in devices))
    if draw(st.booleans()):
        machine = with_slow(machine, draw(st.frozensets(st.integers(0, machine.size - 1), max_size=2)))
    return PlanningProblem(model=MODEL, cluster=machine, global_batch=plan.global_batch), plan


def _one_stage(plan: Plan) -> tuple[Stage, ...]:
    placements = tuple(placement for stage in plan.stages for _, placement in stage.placed())
    return (Stage(components=NAMES, ranks=Mesh(tp=plan.mesh.tp).stage_ranks(0), placements=placements),)


FOLDED: list[bool] = []


@settings(max_examples=200, deadline=None)
@given(questions())
def test_folded_equals_unfolded(question: tuple[PlanningProblem, Plan]) -> None:
    problem, plan = question
    problem = replace(problem)  # nothing remembered
    whole, folded = (evaluate(problem, plan, samples=4, fold=fold) for fold in (False, True))
    FOLDED.append(folded.folding.is_folded)
    one, other = whole.result, folded.result
    for name in ("median", "p05", "p95"):
        assert getattr(other.step_s, name) == pytest.approx(getattr(one.step_s, name), rel=1e-9)
    for name in (
        "communication_fraction",
        "communication_busy_fraction",
        "exposed_communication_s",
        "bubble_fraction",
        "lower_bound_s",
    ):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-9, abs=1e-12)
    assert other.cost_sources == pytest.approx(one.cost_sources, rel=1e-9)
    assert other.peak_memory_bytes == one.peak_memory_bytes
    assert len(whole.breakdown) == len(folded.breakdown) == plan.world_size
    for mine, theirs in zip(folded.breakdown, whole.breakdown, strict=True):
        assert mine.rank == theirs.rank
        for name in ("compute_s", "load_s", "exposed_communication_s", "bubble_s", "idle_s", "host_s", "communication_busy_s"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=1e-9, abs=1e-9 * one.step_s.median)
    assert folded.compiled.size <= whole.compiled.size


def test_the_property_saw_both_kinds() -> None:
    """After the property test: enough of its plans were folded, and enough were not."""
    if len(FOLDED) < 100:
        pytest.skip("the property test has not run in this process")
    assert sum(FOLDED) > 20
    assert sum(not entry for entry in FOLDED) > 10


def uniform_plan(mesh: Mesh, placements: tuple[str, ...] = ("batch",) * 5, batch: int = 64) -> Plan:
    cuts = [round(len(NAMES) * stage / mesh.pp) for stage in range(mesh.pp + 1)]
    parsed = tuple(parse_placement(text) for text in placements)
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=tuple(
            Stage(
                components=NAMES[first:last],
                ranks=mesh.stage_ranks(number),
                placements=parsed[first:last] if mesh.tp > 1 else (),
            )
            for number, (first, last) in enumerate(itertools.pairwise(cuts))
        ),
        global_batch=batch,
        microbatches=2,
    )


def folding(plan: Plan, machine: Cluster, **options: object) -> Folding:
    return folding_of(PlanIndex(plan, MODEL), Costs(model=MODEL, cluster=machine, **options))  # type: ignore[arg-type]


CUT = ("shard:column/4", "shard:row/4", "shard:column/4", "shard:row/4", "batch")


def test_replicas_and_shards_behind_one_switch_are_one_rank_per_stage() -> None:
    found = folding(uniform_plan(Mesh(pp=2, dp=2, tp=4), CUT), cluster("dgx2"))
    assert (found.replicas, found.shards, found.ranks, found.weights) == ((0,), (0,), (0, 8), (8, 8))
    assert [found.stands_for(rank) for rank in range(16)] == [0] * 8 + [8] * 8


def test_a_slow_device_stands_for_itself_and_its_shards_for_nobody() -> None:
    plan = uniform_plan(Mesh(pp=1, dp=4, tp=4), CUT)
    found = folding(plan, with_slow(cluster("dgx2"), frozenset([5])))
    assert found.replica_of == (0, 1, 0, 0)
    assert found.shards == (0, 1, 2, 3)
    data_parallel = folding(uniform_plan(Mesh(dp=8)), with_slow(cluster("dgx1"), frozenset([3])))
    assert data_parallel.replica_of == (0, 0, 0, 3, 0, 0, 0, 0), "what they do alone costs the same, wherever they sit"


def test_pipelines_on_a_cube_mesh_fold_only_where_their_links_are_equal() -> None:
    """Devices 0-3 and 1-2 of a DGX-1 have two NVLinks between them, 1-7 none: what crosses stages there takes longer."""
    machine = cluster("dgx1")
    plan = uniform_plan(Mesh(pp=2, dp=2))
    for ranks, replicas in (((0, 1, 3, 7), (0, 1)), ((0, 1, 3, 2), (0, 0))):
        chosen = replace(machine, devices=tuple(machine.devices[number] for number in ranks))
        costs = Costs(model=MODEL, cluster=chosen)
        pairs = [costs.estimate(SendRecv(source=r, destination=r + 2, size_bytes=1 << 24), 0).median_s for r in (0, 1)]
        assert (pairs[0] == pairs[1]) == (replicas == (0, 0)), "the machine is as this test thinks it is"
        assert folding(plan, chosen).replica_of == replicas


def test_shards_whose_sums_over_sharding_groups_differ_are_not_folded() -> None:
    """On a cube mesh with two devices exchanged ranks 0 and 4 sum by another link than 1 and 5, shards of the same replicas."""
    mesh = Mesh(dp=4, tp=2, dp_shard=2)
    plan = Plan(
        strategy="custom",
        mesh=mesh,
        stages=(Stage(components=NAMES, ranks=mesh.stage_ranks(0)),),
        global_batch=128,
        zero_stage=1,
        bucket_bytes=1,
    )
    machine = cluster("dgx1")
    exchanged = replace(machine, devices=tuple(machine.devices[number] for number in (0, 1, 2, 3, 4, 6, 5, 7)))
    problem = PlanningProblem(model=MODEL, cluster=exchanged, global_batch=128)
    whole, folded = (evaluate(problem, plan, samples=0, fold=fold) for fold in (False, True))
    assert folded.folding.shards == (0, 1)
    assert folded.folding.replica_of == (0, 1, 0, 1)
    assert folded.result.step_s.median == pytest.approx(whole.result.step_s.median, rel=1e-9)
    assert folding(plan, machine).shards == (0,), "as they are numbered, both have one link"


def test_a_component_on_one_rank_keeps_the_shards_apart() -> None:
    plan = uniform_plan(Mesh(dp=4, tp=4), ("batch", "place:1", "batch", "batch", "batch"))
    found = folding(plan, cluster("dgx2"))
    assert found.shards == (0, 1, 2, 3)


def test_what_a_run_has_taught_about_ranks_forbids_folding() -> None:
    plan = uniform_plan(Mesh(dp=4, tp=4), CUT)
    assert folding(plan, cluster("dgx2")).is_folded
    learnt = RunCorrections(ranks=((3, 1.5),))
    assert not folding(plan, cluster("dgx2"), corrections=learnt).is_folded


def _backwards(rank: int, ranks: int, microbatches: int, chunks: int) -> Actions:
    good = pipeline.gpipe(rank, ranks, microbatches, chunks)
    return (*good[microbatches:], *good[:microbatches]) if rank == 0 else good


BACKWARDS = pipeline.PipelineOrder(actions=_backwards)


def test_a_deadlocking_order_is_refused_before_anything_is_lowered() -> None:
    """An order from outside that runs the backwards first: the plan's layout shows the grid."""
    plan = replace(uniform_plan(Mesh(pp=2)), pipeline_order=f"{__name__}:BACKWARDS")
    with pytest.raises(DeadlockError, match=r"(?s)by rank\n0 +\*0B0.*waits for 0F0, 1B0\n1 +\*1F0 .*waits for 0F0"):
        PlanIndex(plan, MODEL)


def test_only_the_ranks_that_stand_for_others_are_lowered() -> None:
    plan = uniform_plan(Mesh(pp=2, dp=2, tp=4), CUT)
    layout = PlanIndex(plan, MODEL)
    whole = lower_columns(plan, MODEL, layout, unfolded(plan.mesh))
    part = lower_columns(plan, MODEL, layout, folding(plan, cluster("dgx2")))
    assert {resource.rank for resource in part.resources} == {0, 8}
    assert part.size < whole.size / 4
    assert part.graph.world_size == 16
    assert len(part.graph.tasks) == part.size
    sizes = {len(unit.work.group) for unit in part.units if isinstance(unit.work, Collective)}
    assert sizes == {2, 4, 8}, "collectives keep their whole groups"
    assert np.all(part.dependencies.values < part.size)


@pytest.mark.parametrize("nearly", [1e-4, 0.5])
def test_replicas_that_differ_by_latencies_alone_are_one_between_bounds(monkeypatch: pytest.MonkeyPatch, nearly: float) -> None:
    """Pipelines whose stages lie under one leaf switch or not: the step of one is no shorter, and no more than that longer."""
    monkeypatch.setattr(nearly_alike, "NEARLY", nearly)
    plan = replace(uniform_plan(Mesh(pp=4, dp=16, tp=4), CUT, batch=1024), microbatches=4)
    machine = cluster_from_profile(load_profile("dgx1-v100-32gb"), nodes=32, network="infiniband-100g")
    problem = PlanningProblem(model=MODEL, cluster=machine, global_batch=plan.global_batch)
    found, every = (evaluate(problem, plan, samples=0, fold=fold) for fold in (None, False))
    kinds = folding(plan, machine).replicas
    step_s = every.result.step_s.median
    assert len(kinds) > 1
    assert step_s * (1 - 1e-9) <= found.result.step_s.median <= step_s * (1 + nearly)
    assert len(found.folding.replicas) == (1 if nearly > 0.1 else len(kinds))
