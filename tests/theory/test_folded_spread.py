"""Noise of single tasks where ranks are folded: a rank that stands for many waits for the slowest of them."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtri_exp
from scipy.stats import kstest

from parsim.costs.draws import repeat_sigmas
from parsim.engines import noise as side_by_side
from parsim.engines.noise import SlowestRanks, slowest_ranks
from parsim.engines.static import compile_graph, makespans_s, simulate
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Noise
from parsim.plans.layouts import parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict import evaluate as prediction
from parsim.predict.evaluate import DRAWS_AT_ONCE, Evaluation, evaluate, with_interval
from parsim.predict.problem import PlanningProblem
from parsim.program.columns import Folding
from parsim.program.taskgraph import COMPUTE, Origin, Resource, Task, TaskGraph
from parsim.work import Collective, Compute, Phase, is_communication
from tests.plans import MODEL, NAMES

CUT = ("shard:column/4", "shard:row/4", "shard:column/4", "shard:row/4", "batch")
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
    late = makespans_s(graph, medians * np.exp(exponents)) - 1.5
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


def uniform_plan(mesh: Mesh, placements: tuple[str, ...]) -> Plan:
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
    plan = uniform_plan(mesh, placements)
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
    plan = replace(uniform_plan(Mesh(pp=4, dp=32, tp=4), CUT), global_batch=4096, microbatches=8)
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
    plan = replace(uniform_plan(mesh, placements), zero_stage=zero_stage)
    problem = with_rank_noise(QUIET, 0.1)
    every, folded = (evaluate(problem, plan, samples=0, fold=fold) for fold in (False, True))
    assert folded.folding.is_folded
    assert folded.result.step_s.median == pytest.approx(every.result.step_s.median, rel=1e-9)
    assert folded.result.step_s.median > 1.01 * evaluate(QUIET, plan, samples=0, fold=True).result.step_s.median


def test_shards_that_meet_between_stages_too_give_an_upper_bound() -> None:
    """Pipelines of shards: the first rank of a stage need not be the slowest of every stage, the folded one is."""
    plan = uniform_plan(*SMALL_WORLDS["all three"])
    every, folded = (evaluate(with_rank_noise(QUIET, 0.1), plan, samples=0, fold=fold).result.step_s.median for fold in (0, 1))
    assert every <= folded * (1 + 1e-9) <= 1.05 * every


def test_a_large_program_with_noisy_ranks_takes_fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = uniform_plan(Mesh(dp=8), BATCH)
    all_draws = evaluate(with_rank_noise(QUIET, 0.1), plan, samples=0, fold=True).result.step_s.median
    monkeypatch.setattr(side_by_side, "TASK_TIMES", 1)
    few = evaluate(with_rank_noise(QUIET, 0.1), plan, samples=0, fold=True).result.step_s.median
    assert few != all_draws
    assert few == pytest.approx(all_draws, rel=0.1)


def test_repeat_noise_shrinks_with_the_steps_averaged() -> None:
    plan = uniform_plan(Mesh(dp=8), BATCH)
    found = with_spread(evaluate(QUIET, plan, samples=0, fold=True), 0.2)
    unit = found.compiled.columns.unit
    assert np.max(repeat_sigmas(found.estimates, unit, steps_averaged=25)) == pytest.approx(0.2 / 5)
