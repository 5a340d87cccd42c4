"""Folded equals unfolded, and what is not interchangeable is not folded."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtri_exp
from scipy.stats import kstest

from parsim.costs.costs import Costs
from parsim.costs.estimate import STEPS_AVERAGED, repeat_sigmas
from parsim.costs.observed import RunCorrections
from parsim.engines import noise as side_by_side
from parsim.engines.noise import SlowestRanks, slowest_ranks
from parsim.engines.static import compile_graph, simulate, step_times_s
from parsim.errors import DeadlockError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.parts import load_network
from parsim.hardware.profile import Noise
from parsim.plans import pipeline
from parsim.plans.layouts import parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import Actions
from parsim.plans.plan import Plan, Stage
from parsim.predict import evaluate as prediction
from parsim.predict.evaluate import DRAWS_AT_ONCE, Evaluation, evaluate, with_interval
from parsim.predict.folding import folding_of
from parsim.predict.problem import PlanningProblem
from parsim.program.columns import Folding, unfolded
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import COMPUTE, Origin, Resource, Task, TaskGraph
from parsim.program.templates import lower_columns
from parsim.search import prices
from parsim.search.estimate import sent_s, transfer_s
from parsim.search.prices import fewer_copies
from parsim.work import Collective, Compute, Phase, SendRecv, is_communication
from tests.models import chain_model
from tests.plans import MODEL, NAMES, grouped_plans, plans

CLUSTERS = {
    "dgx1": ("dgx1-v100-32gb", 1, None),
    "two dgx1": ("dgx1-v100-32gb", 2, "infiniband-100g"),
    "four p3": ("p3-16xlarge", 4, "ethernet-25g"),
    "dgx2": ("dgx2-v100", 1, None),
    "two dgx2": ("dgx2-v100", 2, "infiniband-100g"),
    "eight summit": ("summit-v100", 8, "infiniband-100g"),
    "eight summit, three to a switch": ("summit-v100", 8, "infiniband-100g"),
}


@cache
def cluster(name: str) -> Cluster:
    profile, nodes, network = CLUSTERS[name]
    joining = None if network is None else load_network(network)
    if joining is not None and "three to a switch" in name:
        fabric = joining.fabric
        narrow = fabric.oversubscription.model_copy(update={"value": 4.0})
        fabric = fabric.model_copy(update={"nodes_per_leaf": 3, "oversubscription": narrow})
        joining = joining.model_copy(update={"fabric": fabric})
    return cluster_from_profile(load_profile(profile), nodes=nodes, network=joining)


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


def assert_same_answer(folded: Evaluation, whole: Evaluation, *, rel: float = 1e-9) -> None:
    """Step, interval, fractions, memory and the breakdown of every rank."""
    one, other = whole.result, folded.result
    for name in ("median", "p05", "p95"):
        assert getattr(other.step_s, name) == pytest.approx(getattr(one.step_s, name), rel=rel)
    for name in (
        "communication_fraction",
        "communication_busy_fraction",
        "exposed_communication_s",
        "bubble_fraction",
        "lower_bound_s",
    ):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=rel, abs=1e-12), name
    assert other.cost_sources == pytest.approx(one.cost_sources, rel=rel)
    assert other.peak_memory_bytes == one.peak_memory_bytes
    assert len(whole.breakdown) == len(folded.breakdown) == whole.result.plan.world_size
    for mine, theirs in zip(folded.breakdown, whole.breakdown, strict=True):
        assert mine.rank == theirs.rank
        for name in ("compute_s", "load_s", "exposed_communication_s", "bubble_s", "idle_s", "host_s", "communication_busy_s"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=rel, abs=1e-9 * one.step_s.median), name


@settings(max_examples=110, deadline=None)
@given(questions())
def test_folded_equals_unfolded(question: tuple[PlanningProblem, Plan]) -> None:
    problem, plan = question
    problem = replace(problem)  # nothing remembered
    whole, folded = (evaluate(problem, plan, samples=4, fold=fold) for fold in (False, True))
    FOLDED.append(folded.folding.is_folded)
    assert_same_answer(folded, whole)
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
    monkeypatch.setattr("parsim.predict.folding.NEARLY", nearly)
    plan = replace(uniform_plan(Mesh(pp=4, dp=16, tp=4), CUT, batch=1024), microbatches=4)
    machine = cluster_from_profile(load_profile("dgx1-v100-32gb"), nodes=32, network="infiniband-100g")
    problem = PlanningProblem(model=MODEL, cluster=machine, global_batch=plan.global_batch)
    found, every = (evaluate(problem, plan, samples=0, fold=fold) for fold in (None, False))
    kinds = folding(plan, machine).replicas
    step_s = every.result.step_s.median
    assert len(kinds) > 1
    assert step_s * (1 - 1e-9) <= found.result.step_s.median <= step_s * (1 + nearly)
    assert len(found.folding.replicas) == (1 if nearly > 0.1 else len(kinds))


# Noise of single tasks where ranks are folded: a rank that stands for many waits for the slowest of them.

BATCH = ("batch",) * 5
QUIET = PlanningProblem(model=MODEL, cluster=cluster_from_profile(load_profile("dgx2-v100")), global_batch=512)


def folded_program(mesh: Mesh, computes: int) -> tuple[TaskGraph, Folding]:
    """Rank 0 of a mesh of equal ranks: so many computations, then one collective over all ranks."""
    compute = Resource(0, COMPUTE)
    tasks = [
        Task(
            index=number,
            work=Compute(component=f"c{number}", phase=Phase.FORWARD, samples=1),
            resources=(compute,),
            dependencies=(),
            origin=Origin(stage=0),
        )
        for number in range(computes)
    ]
    joins = Collective(operation="all_reduce", group=tuple(range(mesh.size)), size_bytes=1)
    last = Task(
        index=computes,
        work=joins,
        resources=(Resource(0, "dp"),),
        dependencies=(computes - 1,),
        origin=Origin(stage=0),
    )
    return TaskGraph(tasks=(*tasks, last), world_size=mesh.size), Folding(mesh=mesh, replica_of=(0,) * mesh.dp, shards=(0,))


def slowest(mesh: Mesh, medians_s: NDArray[np.float64], sigma: float) -> tuple[SlowestRanks, TaskGraph]:
    """Of a folded program with these computations, and no noise of its collective."""
    graph, folding = folded_program(mesh, len(medians_s) - 1)
    compiled = compile_graph(graph)
    sigmas = np.where(compiled.columns.communicates, 0.0, sigma)
    return slowest_ranks(compiled, folding, simulate(compiled, medians_s), medians_s, sigmas), graph


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(dp=64), Mesh(tp=8), Mesh(dp=3, tp=2)])
def test_a_collective_after_equal_computations_waits_for_their_exact_maximum(mesh: Mesh) -> None:
    """P(max <= d) = N(log(d / median) / sigma)^m: in distribution, and draw by draw u^(1/m)."""
    ranks, exact = slowest(mesh, np.array([2.0, 1.0]), 0.3)[0], min(mesh.dp, mesh.tp) == 1
    draws = np.random.default_rng(0).standard_normal((20_000, 2))
    z = draws[:, 0].copy()
    exponents = ranks.exponents(draws)
    assert np.all(exponents[:, 1] == 0.0), "the collective itself is not noisy"
    if exact:
        assert exponents[:, 0] == pytest.approx(0.3 * ndtri_exp(log_ndtr(z) / mesh.size), abs=1e-5)
    # where shards lie within replicas the maximum of their maxima is taken to be normal in between
    found = kstest(exponents[:, 0] / 0.3, lambda x: np.exp(mesh.size * log_ndtr(x)))
    assert found.statistic < (0.012 if exact else 0.03)


def test_the_makespan_has_the_closed_form_of_the_maximum_of_two() -> None:
    """E max of two N(0, s) is s / sqrt(pi); with small noise a log-normal is its exponent."""
    medians = np.array([1.0, 0.5])
    ranks, graph = slowest(Mesh(dp=2), medians, 0.01)
    exponents = ranks.exponents(np.random.default_rng(1).standard_normal((40_000, 2)))
    late = step_times_s(graph, medians * np.exp(exponents)) - 1.5
    assert late.mean() == pytest.approx(0.01 / np.sqrt(np.pi), rel=0.02)
    assert late.var() == pytest.approx(0.01**2 * (1 - 1 / np.pi), rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 16, 512])
def test_the_maximum_is_of_the_sum_and_not_of_each_computation(ranks: int) -> None:
    """Nine computations before the collective: three standard deviations of one, not nine."""
    medians = np.array([1.0] * 9 + [0.1])
    found, _ = slowest(Mesh(dp=ranks), medians, 0.01)
    rng = np.random.default_rng(2)
    folded = (medians * np.exp(found.exponents(rng.standard_normal((4000, 10))))).sum(axis=1) - medians.sum()
    every = (np.exp(0.01 * rng.standard_normal((1000, 9, ranks))) - 1).sum(axis=1).max(axis=1)
    error = np.hypot(folded.std() / np.sqrt(4000), every.std() / np.sqrt(1000))
    assert folded.mean() == pytest.approx(every.mean(), abs=4 * error + 0.01 * every.mean())
    assert folded.std() == pytest.approx(every.std(), rel=0.1)


def test_a_rank_that_stands_for_itself_keeps_its_own_draws() -> None:
    graph, _ = folded_program(Mesh(dp=2), 4)
    compiled = compile_graph(graph)
    alone = Folding(mesh=Mesh(dp=2), replica_of=(0, 1), shards=(0,))
    medians = np.array([1.0, 2.0, 3.0, 4.0, 0.5])
    ranks = slowest_ranks(compiled, alone, simulate(compiled, medians), medians, np.full(5, 0.1))
    draws = np.random.default_rng(3).standard_normal((50, 5))
    assert ranks.exponents(draws.copy()) == pytest.approx(0.1 * draws, abs=1e-12)


def spread_plan(mesh: Mesh, placements: tuple[str, ...]) -> Plan:
    """The five components over the stages, 512 samples in two microbatches."""
    cuts = [round(len(NAMES) * stage / mesh.pp) for stage in range(mesh.pp + 1)]
    parsed = tuple(map(parse_placement, placements)) if mesh.tp > 1 else ()
    stages = tuple(
        Stage(components=NAMES[first:last], ranks=mesh.stage_ranks(number), placements=parsed[first:last])
        for number, (first, last) in enumerate(itertools.pairwise(cuts))
    )
    return Plan(strategy="custom", mesh=mesh, stages=stages, global_batch=512, microbatches=2)


def with_spread(found: Evaluation, sigma: float, *, communication: float = 0.0) -> Evaluation:
    """The evaluation with noise of single tasks alone."""
    works = (unit.work for unit in found.compiled.columns.units)
    estimates = tuple(
        replace(estimate, parameters=(), repeat_sigma=communication if is_communication(work) else sigma)
        for estimate, work in zip(found.estimates, works, strict=True)
    )
    return replace(found, estimates=estimates)


DRAWS = 1000

SMALL_WORLDS = {
    "replicas": (Mesh(dp=8), BATCH),
    "shards": (Mesh(tp=4), CUT),
    "shards within replicas": (Mesh(dp=4, tp=4), CUT),
    "pipelines": (Mesh(pp=2, dp=8), BATCH),
    "all three": (Mesh(pp=2, dp=2, tp=4), CUT),
}


@pytest.mark.parametrize("communication", [0.0, 0.1])
@pytest.mark.parametrize("world", SMALL_WORLDS)
def test_folded_steps_are_distributed_as_unfolded_ones(
    monkeypatch: pytest.MonkeyPatch, world: str, communication: float
) -> None:
    """Many steps in a row, so that the first and the last count little; a spread of 10% shows what 1% would."""
    monkeypatch.setattr(prediction, "REPEATED_STEPS", 20)
    mesh, placements = SMALL_WORLDS[world]
    plan = spread_plan(mesh, placements)
    lateness = {}
    for fold in (False, True):
        found = evaluate(QUIET, plan, samples=0, fold=fold)
        assert found.folding.is_folded == fold
        noisy = with_spread(found, 0.1, communication=communication)
        lateness[fold] = prediction.sampled_steps_s(noisy, DRAWS) / found.steady_s - 1
    every, folded = lateness[False], lateness[True]
    error = np.hypot(every.std(), folded.std()) / np.sqrt(DRAWS)
    assert every.mean() > 20 * error, "the slowest rank makes steps longer"
    assert folded.mean() == pytest.approx(every.mean(), abs=4 * error + 0.05 * every.mean())
    assert folded.std() == pytest.approx(every.std(), rel=0.1)
    for share in (0.05, 0.5, 0.95):
        assert np.quantile(folded, share) == pytest.approx(np.quantile(every, share), abs=0.1 * every.mean() + 8 * error)


def test_512_ranks_with_spread_stay_folded_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the draws is that of DRAWS_AT_ONCE numbers a few times over, however many samples are drawn."""
    monkeypatch.setattr(prediction, "DRAWS_AT_ONCE", 2**14)
    assert DRAWS_AT_ONCE > 2**14
    plan = replace(spread_plan(Mesh(pp=4, dp=32, tp=4), CUT), global_batch=4096, microbatches=8)
    machine = cluster_from_profile(load_profile("dgx1-v100-32gb"), nodes=64, network="infiniband-100g")
    problem = PlanningProblem(model=MODEL, cluster=machine, global_batch=4096)
    found = with_spread(evaluate(problem, plan, samples=0), 0.1, communication=0.1)
    assert found.folding.is_folded
    tracemalloc.start()
    judged = with_interval(problem, found, samples=400, reason="")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert judged.compiled is found.compiled, "nothing was lowered again"
    assert len(judged.folding.ranks) < 512
    assert judged.result.step_s.p95 > judged.result.step_s.median
    assert 400 * found.compiled.size * 8 > 16 * 2**14 * 8, "all draws at once would be more"
    assert peak < 16 * 2**14 * 8 + 50_000_000


def with_rank_noise(problem: PlanningProblem, sigma: float) -> PlanningProblem:
    """The same question on a machine whose ranks are noisy, each by itself in every step."""
    profile = problem.cluster.profile
    noise = Noise(drift_sigma=0.1, rank_sigma=sigma, source=next(iter(profile.sources)))
    return replace(problem, cluster=replace(problem.cluster, profile=profile.model_copy(update={"noise": noise})))


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("world", ["replicas", "shards", "shards within replicas", "pipelines"])
def test_steps_with_noisy_ranks_are_the_unfolded_ones_draw_by_draw(world: str, zero_stage: int) -> None:
    mesh, placements = SMALL_WORLDS[world]
    plan = replace(spread_plan(mesh, placements), zero_stage=zero_stage)
    problem = with_rank_noise(QUIET, 0.1)
    every, folded = (evaluate(problem, plan, samples=0, fold=fold) for fold in (False, True))
    assert folded.folding.is_folded
    assert folded.result.step_s.median == pytest.approx(every.result.step_s.median, rel=1e-9)
    assert folded.result.step_s.median > 1.01 * evaluate(QUIET, plan, samples=0, fold=True).result.step_s.median


def test_shards_that_meet_between_stages_too_give_an_upper_bound() -> None:
    """Pipelines of shards: the first rank of a stage need not be the slowest of every stage, the folded one is."""
    plan = spread_plan(*SMALL_WORLDS["all three"])
    every, folded = (evaluate(with_rank_noise(QUIET, 0.1), plan, samples=0, fold=fold).result.step_s.median for fold in (0, 1))
    assert every <= folded * (1 + 1e-9) <= 1.05 * every


def test_a_large_program_with_noisy_ranks_takes_fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = spread_plan(Mesh(dp=8), BATCH)
    all_draws = evaluate(with_rank_noise(QUIET, 0.1), plan, samples=0, fold=True).result.step_s.median
    monkeypatch.setattr(side_by_side, "TASK_TIMES", 1)
    few = evaluate(with_rank_noise(QUIET, 0.1), plan, samples=0, fold=True).result.step_s.median
    assert few != all_draws
    assert few == pytest.approx(all_draws, rel=0.1)


def test_repeat_noise_shrinks_with_the_steps_averaged() -> None:
    plan = spread_plan(Mesh(dp=8), BATCH)
    found = with_spread(evaluate(QUIET, plan, samples=0, fold=True), 0.2)
    unit = found.compiled.columns.unit
    assert np.max(repeat_sigmas(found.estimates, unit)) == pytest.approx(0.2 / STEPS_AVERAGED**0.5)


# What stands for thousands of copies: the first of them in an estimate, and one of those that sit alike in a folding.

MESHES = (Mesh(dp=2048), Mesh(pp=2, dp=1024), Mesh(pp=2, dp=512, tp=2), Mesh(dp=1024, tp=2, dp_shard=4))


def nodes_of(count: int) -> Cluster:
    return cluster_from_profile(load_profile("8xh100-sxm"), nodes=count, network="infiniband-400g")


def problem_on(cluster: Cluster) -> PlanningProblem:
    return PlanningProblem(model=chain_model(elements=30_000_000), cluster=cluster, global_batch=4096)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("stage", [0, 1])
def test_sums_of_many_copies_are_estimated_by_the_first(mesh: Mesh, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 15% of the price of all (a protocol may change beyond them); the same for a transfer between stages."""
    whole, few = (problem_on(nodes_of(256)) for _ in range(2))
    exact, exact_transfer_s = sent_s(whole, mesh, 10**9, stage), transfer_s(whole, mesh, 1)
    monkeypatch.setattr(prices, "MOST_COPIES", 256)
    assert fewer_copies(mesh).copies == 256
    assert sent_s(few, mesh, 10**9, stage) == pytest.approx(exact, rel=0.15)
    assert transfer_s(few, mesh, 1) == pytest.approx(exact_transfer_s, rel=1e-9)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_fewer_copies_at_once_slow_no_group_more(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_on(nodes_of(256))
    monkeypatch.setattr(prices, "MOST_COPIES", 256)
    work = [(Collective(operation="all_reduce", group=tuple(range(mesh.tp * 2)), size_bytes=10**8), 0)]
    few, whole = (problem.price(work, mesh, beside)[0].median_s for beside in (fewer_copies(mesh), None))
    assert few <= whole * (1 + 1e-12)
