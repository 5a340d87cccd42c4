"""The estimate that orders the outlines of a search: as simulated where nothing overlaps, in the search's order elsewhere."""

from __future__ import annotations

import pytest
from scipy.stats import spearmanr

from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import profile_from_parts
from parsim.model.catalogue.sublayers import COMPILED, SamplePart, Shape
from parsim.model.catalogue.transformer import transformer
from parsim.model.formats import Numerics
from parsim.plans.mesh import Mesh
from parsim.predict.evaluate import simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.search.by_hand import custom_plan
from parsim.search.space import Allowance, Node
from parsim.search.tree import Incumbents, Members, judged_best_first

SHAPE = Shape(name="small", layers=14, hidden=2048, heads=16, vocab=32000)


@pytest.fixture(scope="module")
def problem() -> PlanningProblem:
    model = transformer(SHAPE, COMPILED, SamplePart(tokens=2048, context=2048), "sublayer")
    cluster = cluster_from_profile(profile_from_parts("h100-sxm", 8), nodes=2, network="infiniband-400g")
    numerics = Numerics(precision="bf16", optimizer="adamw_fused")
    return PlanningProblem(model=model, cluster=cluster, global_batch=64, numerics=numerics)


def best_s(problem: PlanningProblem, outline: Node) -> float:
    """The step of the fastest plan of an outline that fits; infinite where none does."""
    best = Incumbents()
    judged_best_first(
        [outline],
        excess_bytes=lambda plan: max((size for _, size in problem.unsafe_bytes(plan)), default=0),
        judge=lambda plan: simulated_step(problem, plan, fold=True).step_s,
        incumbents=best,
        late=[],
        spare=Allowance(problem=problem, memories=len(problem.with_memory)),
    )
    return best.best_s


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_one_replica_without_a_pipeline_is_as_estimated(problem: PlanningProblem, tp: int) -> None:
    outline = Members(problem, "mp").of_mesh(Mesh(tp=tp))[4]  # of 16 microbatches
    assert outline.promise_s == pytest.approx(best_s(problem, outline), rel=0.02)


@pytest.mark.parametrize("doublings", [0, 2, 4])
def test_one_stage_that_is_longer_than_the_others_sets_the_pace_of_a_pipeline(problem: PlanningProblem, doublings: int) -> None:
    """The head takes longer than a sixteenth of the model: the others fill and drain with what they take, and not with that."""
    outline = Members(problem, "mp").of_mesh(Mesh(pp=16))[doublings]
    assert outline.promise_s == pytest.approx(best_s(problem, outline), rel=0.03)


@pytest.mark.slow
def test_outlines_are_estimated_in_the_order_of_their_best_plans(problem: PlanningProblem) -> None:
    members = Members(problem, "hp")
    meshes = (Mesh(dp=16), Mesh(dp=2, tp=8), Mesh(pp=2, dp=8), Mesh(pp=4, dp=2, tp=2), Mesh(pp=16))
    outlines = [node for mesh in meshes for node in members.of_mesh(mesh) if not node.late and node.promise_s < float("inf")]
    some = outlines[::3]
    found = [best_s(problem, outline) for outline in some]
    assert spearmanr([outline.promise_s for outline in some], found).statistic >= 0.97


def test_a_search_goes_on_for_longer_until_a_plan_fits(problem: PlanningProblem) -> None:
    """Though the memory of some plans is known."""
    problem.unlike_memory(custom_plan(problem, Mesh(tp=8), microbatches=8))
    assert problem.with_memory
    spare = Allowance(problem=problem, left=-1.0)
    assert not spare.lasts(known=True)
    assert Allowance(problem=problem, left=-1.0).lasts(known=False)
