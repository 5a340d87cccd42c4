"""The closed form that screens plans: exact where nothing overlaps, in the simulator's order elsewhere, errors that teach."""

from __future__ import annotations

import pytest

from benchmarks.screen import Outline, plan_of, screened_s
from parsim.errors import PlanError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import profile_from_parts
from parsim.model.catalogue.sublayers import COMPILED, SamplePart, Shape
from parsim.model.catalogue.transformer import transformer
from parsim.model.formats import Numerics
from parsim.plans.mesh import Mesh
from parsim.predict.evaluate import simulated_step
from parsim.predict.problem import PlanningProblem

SHAPE = Shape(name="small", layers=14, hidden=2048, heads=16, vocab=32000)


@pytest.fixture(scope="module")
def problem() -> PlanningProblem:
    model = transformer(SHAPE, COMPILED, SamplePart(tokens=2048, context=2048), "sublayer")
    cluster = cluster_from_profile(profile_from_parts("h100-sxm", 8), nodes=2, network="infiniband-400g")
    numerics = Numerics(precision="bf16", optimizer="adamw_fused")
    return PlanningProblem(model=model, cluster=cluster, global_batch=64, numerics=numerics)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_one_replica_without_a_pipeline_is_as_simulated(problem: PlanningProblem, tp: int, recompute: bool) -> None:
    outline = Outline(mesh=Mesh(tp=tp), microbatches=16, recompute=recompute)
    simulated = simulated_step(problem, plan_of(problem, outline), fold=True).step_s
    assert screened_s(problem, [outline])[0] == pytest.approx(simulated, rel=0.02)


@pytest.mark.slow
def test_plans_come_in_the_order_of_the_simulator(problem: PlanningProblem) -> None:
    outlines = [
        Outline(mesh=mesh, microbatches=count, zero_stage=stage, recompute=again)
        for mesh in (Mesh(dp=16), Mesh(dp=2, tp=8), Mesh(pp=2, dp=8), Mesh(pp=4, dp=2, tp=2), Mesh(pp=16))
        for count in (4, 64 // mesh.dp)
        for stage in ((1, 3) if mesh.pp == 1 else (0,))
        for again in (False, True)
    ]
    closed = screened_s(problem, outlines)
    simulated = [simulated_step(problem, plan_of(problem, outline), fold=True).step_s for outline in outlines]
    places = [sorted(range(len(outlines)), key=values.__getitem__) for values in (closed, simulated)]
    ranks = [{number: place for place, number in enumerate(order)} for order in places]
    n = len(outlines)
    apart = sum((ranks[0][number] - ranks[1][number]) ** 2 for number in range(n))
    assert 1 - 6 * apart / (n * (n * n - 1)) > 0.95


@pytest.mark.parametrize(
    ("outline", "rule"),
    [
        (Outline(mesh=Mesh(dp=3), microbatches=1), "does not divide"),
        (Outline(mesh=Mesh(dp=2), microbatches=5), "use a multiple of 10"),
        (Outline(mesh=Mesh(pp=16), microbatches=16, order="interleaved", chunks=4), "use fewer stages"),
        (Outline(mesh=Mesh(pp=2), microbatches=16, chunks=2), "does not take 2 chunks"),
    ],
)
def test_an_outline_that_cannot_be_says_why(problem: PlanningProblem, outline: Outline, rule: str) -> None:
    for refused in (lambda: screened_s(problem, [outline]), lambda: plan_of(problem, outline)):
        with pytest.raises(PlanError, match=rule):
            refused()
