"""What a search says while it runs, and what it answers after Ctrl-C."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from scipy.stats import spearmanr

from parsim.app.functions import plan
from parsim.app.load import problem_of
from parsim.app.question import question_of
from parsim.errors import ScheduleError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile, profile_from_parts
from parsim.model.catalogue.sublayers import COMPILED, SamplePart, Shape
from parsim.model.catalogue.transformer import transformer
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.constraints import PlanConstraints
from parsim.plans.layouts import BATCH, parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.plans.synchronisation import parse_synchronisation
from parsim.predict.evaluate import Evaluation, simulated_step, with_interval
from parsim.predict.problem import PlanningProblem
from parsim.search import relaxed as relaxed_module
from parsim.search import search as module
from parsim.search.by_hand import custom_plan
from parsim.search.families import FAMILIES
from parsim.search.relaxed import relaxed_search
from parsim.search.search import search
from parsim.search.space import Allowance, Node
from parsim.search.tree import Incumbents, Members, judged_best_first
from tests.machines import machine
from tests.models import chain_model


def problem() -> PlanningProblem:
    return problem_of(question_of("vit_small", cluster="dgx1-v100-32gb", global_batch=64, overrides=["cluster.devices=2"]))


def test_a_search_says_what_is_searched_what_is_left_and_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**6, 3))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    lines: list[str] = []
    found = search(problem(), ("adaptive",), say=lines.append)
    assert any("parts left, nothing fits so far" in line for line in lines)
    assert any("parts left, best so far " in line for line in lines)
    assert not found.cut_short


def test_after_ctrl_c_the_best_plan_so_far_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(problem(), ("adaptive",))
    early = module._Opening.early
    opened = 0

    def interrupted(self: Any, *arguments: Any) -> Any:
        nonlocal opened
        if self.judged:
            raise KeyboardInterrupt
        opened += 1
        return early(self, *arguments)

    monkeypatch.setattr(module._Opening, "early", interrupted)
    found = search(problem(), ("adaptive",))
    assert found.cut_short
    assert found.chosen is not None
    assert whole.chosen is not None
    assert found.chosen.result.step_s.median >= whole.chosen.result.step_s.median
    assert found.to_dict()["cut_short"] is True


def test_a_search_that_opens_all_it_has_to_says_so_and_can_be_ended_within_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = iter(range(0, 10**6, 3)), list[str]()
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))

    def ended(line: str) -> None:
        lines.append(line)
        if line.startswith("hp") and "best so far" in line and len(lines) > 40:
            raise KeyboardInterrupt

    few = PlanningProblem(model=chain_model((4e9, 2e9, 6e9, 2e9)), cluster=machine(4), global_batch=16)
    found = search(few, ("hp",), say=ended)
    assert found.cut_short
    assert found.chosen is not None
    assert lines[-1].startswith("hp: ")


def test_ctrl_c_before_any_plan_was_simulated_stops_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Any, *arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Opening, "early", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(problem(), ("adaptive",))


# The intervals of what a search shows: every program is drawn once, and large ones less often.


@pytest.fixture
def drawn_problem() -> PlanningProblem:
    """Little of it is free, so that a search takes no time."""
    return PlanningProblem(
        model=chain_model(),
        cluster=cluster_from_profile(load_profile("dgx1-v100-32gb"), 2),
        global_batch=64,
        zero_stage=0,
        recompute="none",
        constraints=PlanConstraints(microbatches=1, bucket_bytes=2**25, tp=1),
    )


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of draws that were asked for."""
    asked: list[int] = []

    def counted(drawn_problem: PlanningProblem, evaluation: Evaluation, *, samples: int, reason: str) -> Evaluation:
        asked.append(samples)
        return with_interval(drawn_problem, evaluation, samples=samples, reason=reason)

    monkeypatch.setattr(module, "with_interval", counted)
    return asked


def test_a_program_of_several_names_is_drawn_once(drawn_problem: PlanningProblem, draws: list[int]) -> None:
    found = search(drawn_problem, ("adaptive",), samples=50)
    first, *others = found.candidates
    twins = [entry for entry in others if entry.result.plan.program == first.result.plan.program]
    assert twins
    assert len(draws) == len(found.candidates) - len(twins)
    for twin in twins:
        assert twin.result.step_s == first.result.step_s
        assert twin.result.interval_correction == first.result.interval_correction
        assert twin.result.reason.startswith("the same plan as")
    assert first.result.step_s.p05 < first.result.step_s.median < first.result.step_s.p95


def test_large_programs_are_drawn_less_often(
    drawn_problem: PlanningProblem, draws: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_DRAWN", 1)
    search(drawn_problem, ("adaptive",), samples=200)
    assert draws[0] == module.FEWEST_DRAWS
    assert set(draws[1:]) == {module.OF_A_LOSER}


def test_no_interval_is_drawn_where_none_is_asked_for(drawn_problem: PlanningProblem) -> None:
    result = search(drawn_problem, ("adaptive",), samples=0).candidates[0].result
    assert result.interval_correction is None


# The estimate that orders the outlines of a search: as simulated where nothing overlaps, in the search's order elsewhere.

SHAPE = Shape(name="small", layers=14, hidden=2048, heads=16, vocab=32000)


@pytest.fixture(scope="module")
def screened_problem() -> PlanningProblem:
    model = transformer(SHAPE, COMPILED, SamplePart(tokens=2048, context=2048), "sublayer")
    cluster = cluster_from_profile(profile_from_parts("h100-sxm", 8), nodes=2, network="infiniband-400g")
    numerics = Numerics(precision="bf16", optimizer="adamw_fused")
    return PlanningProblem(model=model, cluster=cluster, global_batch=64, numerics=numerics)


def best_s(screened_problem: PlanningProblem, outline: Node) -> float:
    """The step of the fastest plan of an outline that fits; infinite where none does."""
    best = Incumbents()
    judged_best_first(
        [outline],
        excess_bytes=lambda plan: max((size for _, size in screened_problem.unsafe_bytes(plan)), default=0),
        judge=lambda plan: simulated_step(screened_problem, plan, fold=True).step_s,
        incumbents=best,
        late=[],
        spare=Allowance(problem=screened_problem, memories=len(screened_problem.with_memory)),
    )
    return best.best_s


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_one_replica_without_a_pipeline_is_as_estimated(screened_problem: PlanningProblem, tp: int) -> None:
    outline = Members(screened_problem, "mp").of_mesh(Mesh(tp=tp))[4]  # of 16 microbatches
    assert outline.promise_s == pytest.approx(best_s(screened_problem, outline), rel=0.02)


@pytest.mark.parametrize("doublings", [0, 2, 4])
def test_one_stage_that_is_longer_than_the_others_sets_the_pace_of_a_pipeline(
    screened_problem: PlanningProblem, doublings: int
) -> None:
    """The head takes longer than a sixteenth of the model: the others fill and drain with what they take, and not with that."""
    outline = Members(screened_problem, "mp").of_mesh(Mesh(pp=16))[doublings]
    assert outline.promise_s == pytest.approx(best_s(screened_problem, outline), rel=0.03)


@pytest.mark.slow
def test_outlines_are_estimated_in_the_order_of_their_best_plans(screened_problem: PlanningProblem) -> None:
    members = Members(screened_problem, "hp")
    meshes = (Mesh(dp=16), Mesh(dp=2, tp=8), Mesh(pp=2, dp=8), Mesh(pp=4, dp=2, tp=2), Mesh(pp=16))
    outlines = [node for mesh in meshes for node in members.of_mesh(mesh) if not node.late and node.promise_s < float("inf")]
    some = outlines[::3]
    found = [best_s(screened_problem, outline) for outline in some]
    assert spearmanr([outline.promise_s for outline in some], found).statistic >= 0.97


def test_a_search_goes_on_for_longer_until_a_plan_fits(screened_problem: PlanningProblem) -> None:
    """Though the memory of some plans is known."""
    screened_problem.unlike_memory(custom_plan(screened_problem, Mesh(tp=8), microbatches=8))
    assert screened_problem.with_memory
    spare = Allowance(problem=screened_problem, left=-1.0)
    assert not spare.lasts(known=True)
    assert Allowance(problem=screened_problem, left=-1.0).lasts(known=False)


# Relaxed plans on many ranks: microbatches are ranked by the plans whose replicas average.


def relaxed_problem(rule: str) -> PlanningProblem:
    asked = PlanningProblem(
        model=load_model(ModelSpec(name="mlp", args=(("width", 64),))),
        cluster=cluster_from_profile(load_profile("dgx1-v100-32gb"), 8),
        global_batch=256,
        numerics=Numerics(precision="fp32", optimizer="sgd_momentum"),
    )
    return replace(asked, constraints=replace(asked.constraints, synchronisation=parse_synchronisation(rule)))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["gossip/1 ring", "gossip/4 ada(start=7, rate=1.0, rounds=2, epochs=3)", "merge/2"])
def test_one_simulated_plan_is_the_best_of_all(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every = relaxed_search(relaxed_problem(rule), ("dp",), samples=0)
    monkeypatch.setattr(relaxed_module, "SCREENED_RANKS", 4)
    screened = relaxed_search(relaxed_problem(rule), ("dp",), samples=0)
    assert every.chosen is not None
    assert screened.chosen is not None
    assert screened.chosen.result.plan == every.chosen.result.plan
    assert screened.chosen.result.step_s.median == every.chosen.result.step_s.median
    assert every.tally.simulated > 3
    assert (screened.tally.simulated, screened.tally.untried) == (1, every.tally.simulated - 1)


@pytest.mark.slow
def test_averaging_and_a_list_of_plans_are_simulated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaxed_module, "SCREENED_RANKS", 4)
    assert relaxed_search(relaxed_problem("average/4"), ("dp",), samples=0).tally.untried == 0
    assert relaxed_search(relaxed_problem("gossip/1 ring"), ("dp",), samples=0, top=3).tally.untried == 0


def test_pins_that_no_relaxed_plan_keeps_are_not_left_out() -> None:
    """All its components are cut by the batch, and a search with other pins would be answered by a plan without them."""
    asked = relaxed_problem("average/4")
    head = asked.model.components[-2].name
    kept = relaxed_search(replace(asked, pins=((head, BATCH),)), ("adaptive",), samples=0)
    assert kept.chosen is not None
    for barred in (
        replace(asked, pins=((head, parse_placement("replicate")),)),
        replace(asked, forbids=((head, "batch"),)),
    ):
        with pytest.raises(ScheduleError, match=f"bar placement batch for {head}.*drop them"):
            relaxed_search(barred, ("adaptive",), samples=0)


@pytest.mark.slow
def test_hybrid_replicas_need_a_mesh_that_makes_them() -> None:
    asked = relaxed_problem("average/4")
    with pytest.raises(ScheduleError, match=r"several ranks: set plan\.mesh with pp or tp above 1"):
        relaxed_search(asked, ("hp",), samples=0)
    two = replace(asked, constraints=replace(asked.constraints, pp=2))
    found = relaxed_search(two, ("hp",), samples=0).chosen
    assert found is not None
    assert (found.result.plan.mesh.pp, found.result.plan.mesh.dp) == (2, 4)


# Everything pinned to batch-sharding: the best plan is found, and microbatches that do not divide are left out.

MODEL = {"model.args": {"depth": 3, "width": 64}, "plan.pin": {"*": "batch"}, "plan.zero_stage": 0, "plan.bucket_bytes": 10**9}


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "devices"), [(1, 2), (6, 4), (64, 2), (64, 4), (1024, 8)])
def test_the_best_plan_of_batch_sharded_components_is_found(batch: int, devices: int) -> None:
    answer = plan("mlp", cluster="dgx1-v100-32gb", global_batch=batch, devices=devices, settings=MODEL)
    problem = answer.prediction.problem
    chosen = answer.chosen.plan
    assert {str(placement) for stage in chosen.stages for _, placement in stage.placed()} == {"batch"}
    every: list[Plan] = []
    for name in ("single", "dp", "mp", "hp"):
        with contextlib.suppress(ScheduleError):  # hp needs four devices
            every += FAMILIES[name](problem)
    assert every
    seconds = {found: simulated_step(problem, found).step_s for found in every}
    for found in every:
        assert {str(placement) for stage in found.stages for _, placement in stage.placed()} == {"batch"}, found
        assert problem.global_batch // (found.mesh.dp * found.microbatches) % found.mesh.tp == 0, found
    assert simulated_step(problem, chosen).step_s == pytest.approx(min(seconds.values()), rel=1e-9)
