"""What any scheduler must keep: families are what they say, the best is chosen, and losers know why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest

import parsim as ps
from experiments.search.asking import SHAPES, TINY, Shape
from experiments.search.counting import Counts, assert_holds, counted
from experiments.search.problems import ProblemDraw
from experiments.search.properties import PROPERTIES
from parsim.app.answer import Answer
from parsim.app.ask import ask as answer
from parsim.app.config import parse_config
from parsim.errors import ConfigError, ParsimError, PlanError, ScheduleError
from parsim.model.catalogue.zoo import load_preset
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import BATCH, REPLICATE, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, check_plan
from parsim.plans.stages import stages_of, without_idle_ranks
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search import space
from parsim.search.by_hand import custom_plan
from parsim.search.families import FAMILIES
from parsim.search.recompute import recomputed_to_fit
from parsim.search.search import _rows, complexity, most_frequent, search, simplest_tie
from parsim.search.tree import TIE, JudgedPlan, is_tie
from parsim.work import Compute, Phase
from tests.machines import machine
from tests.models import chain_model

CHAIN = chain_model((4e9, 2e9, 6e9, 2e9, 2e9, 4e9), elements=2_000_000)


def problem(devices: int = 4, *, batch: int = 64, **changes: int) -> PlanningProblem:
    """Of the chain on the first devices of the DGX-1, whose types are changed."""
    return PlanningProblem(model=CHAIN, cluster=machine(devices, **changes), global_batch=batch)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_member_of_a_family_is_valid_and_in_it(family: str) -> None:
    question = problem(4)
    plans = list(FAMILIES[family](question))
    assert plans
    for plan in plans:
        check_plan(plan, CHAIN)
        mesh = plan.mesh
        assert plan.global_batch == 64
        assert {
            "single": mesh.size == 1,
            "dp": mesh.pp == mesh.tp == 1 and 1 < mesh.dp <= 4,
            "mp": mesh.dp == 1 and 1 < mesh.pp <= 4,
            "hp": mesh.pp > 1 and mesh.dp > 1 and mesh.size <= 4,
        }[family]
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_no_plan_takes_devices_that_it_has_no_use_for(devices: int) -> None:
    small = chain_model((4e6, 2e6, 6e6), elements=2_000)
    found = search(PlanningProblem(model=small, cluster=machine(devices), global_batch=4), ("adaptive",), samples=0)
    assert found.chosen is not None
    assert found.chosen.result.plan.mesh == Mesh()
    by_name = {entry.result.strategy: entry.result for entry in found.candidates}
    assert by_name["adaptive"].plan.mesh == Mesh()
    assert by_name["adaptive"].step_s.median == by_name["single"].step_s.median


def test_copies_that_divide_nothing_are_left_out_of_a_plan() -> None:
    mesh, parts = Mesh(pp=2, tp=3), [[component.name for component in CHAIN.components[:3]], ["c3", "c4", "c5", "loss"]]
    kinds = (REPLICATE, Placement("place", shard=1))

    def plan(mesh: Mesh, placement: Placement | None, zero_stage: int = 0) -> Plan:
        stages = stages_of(mesh, parts, placement and (lambda name: placement))
        return Plan(strategy="custom", mesh=mesh, stages=stages, global_batch=6, zero_stage=zero_stage)

    for kind in kinds:
        assert without_idle_ranks(plan(mesh, kind)) == plan(Mesh(pp=2), None)
    for kept in (plan(mesh, REPLICATE, zero_stage=3), plan(mesh, BATCH), plan(Mesh(pp=2), None)):
        assert without_idle_ranks(kept) == kept


def test_candidates_are_ranked_bounded_and_told_why_they_lost() -> None:
    found = search(problem(4), samples=50)
    medians = [entry.result.step_s.median for entry in found.candidates]
    assert medians == sorted(medians)
    assert found.chosen is not None
    assert found.recommended is not None
    least = found.chosen.result.step_s.median
    assert 0 < found.lower_bound_s <= least <= medians[0] <= found.recommended.result.step_s.median
    assert 0 <= found.gap < 1
    assert found.gap == pytest.approx((least - found.lower_bound_s) / least)
    assert found.chosen.result.reason == "fastest plan that fits"
    for loser in [each for each in found.candidates if each.result.plan.program != found.chosen.result.plan.program]:
        assert loser.result.reason.startswith("slower by")
        assert loser.result.lower_bound_s <= loser.result.step_s.median
    for entry in found.candidates:
        assert entry.result.step_s.p05 <= entry.result.step_s.median <= entry.result.step_s.p95


def test_every_row_is_the_simplest_plan_that_ties_with_the_fastest_of_its_family() -> None:
    """The row of a family that lost, too: it is what the family is recommended with where it is asked for alone."""
    question = problem(4)
    dp, hp = (custom_plan(question, mesh) for mesh in (Mesh(dp=4), Mesh(pp=2, dp=2)))
    steps = {
        replace(plan, strategy=name, zero_stage=stage): base * (1 if stage else 1 + TIE / 2)
        for name, plan, base in (("dp", dp, 1.0), ("hp", hp, 2.0))
        for stage in (0, 1)
    }
    judged = [JudgedPlan(plan=plan, step_s=step_s) for plan, step_s in steps.items()]
    rows = _rows(question, judged, lambda _: float("inf"), mixes=True, top=None)
    assert {entry.plan.strategy: (entry.plan.zero_stage, entry.step_s) for entry in rows.shown} == {
        "adaptive": (1, 1.0),
        "dp": (0, 1 + TIE / 2),
        "hp": (0, 2 + TIE),
    }
    assert (rows.fastest.plan.zero_stage, rows.simplest.plan.zero_stage) == (1, 0)
    assert rows.riskier is None


def test_where_replicas_do_not_fit_a_pipeline_is_chosen_and_the_reason_names_rank_and_line() -> None:
    """Weights that fill a device twice over: only cutting the model helps."""
    heavy = chain_model((4e9,) * 8, elements=120_000_000)
    question = PlanningProblem(model=heavy, cluster=machine(4, memory_bytes=8 * 2**30), global_batch=64, zero_stage=0)
    found = search(question, samples=0)
    assert found.chosen is not None
    assert found.chosen.result.plan.mesh.pp > 1
    losers = {entry.result.strategy: entry.result for entry in found.candidates if not entry.result.fits}
    assert set(losers) >= {"single", "dp"}
    assert "rank 0" in losers["dp"].reason
    assert any(line in losers["dp"].reason for line in ("parameters", "gradients", "optimizer_state"))
    assert losers["dp"].to_dict()["fits"] is False


def test_nothing_fits_is_a_result_and_not_an_error() -> None:
    found = search(problem(4, memory_bytes=2**20), samples=0)
    assert found.chosen is None
    assert found.status == "infeasible"
    assert found.gap == 1.0
    assert all(entry.result.reason.startswith("does not fit") for entry in found.candidates)


def test_one_device_leaves_single_alone() -> None:
    found = search(problem(1), samples=0)
    assert [entry.result.strategy for entry in found.candidates] == ["single"]
    assert set(dict(found.skipped)) == {"dp", "mp", "hp"}


def test_bad_questions() -> None:
    with pytest.raises(ScheduleError, match=r"did you mean .*dp"):
        search(problem(2), ("pd",), samples=0)
    with pytest.raises(ScheduleError, match="not divisible"):
        search(problem(4, batch=1), ("dp",), samples=0)
    plan = next(iter(FAMILIES["dp"](problem(4))))
    with pytest.raises(PlanError, match="4 ranks"):
        evaluate(problem(2), plan)


def test_stages_follow_the_costs_not_the_count() -> None:
    """Component c2 costs as much as three others: it shares its stage with fewer."""
    plans = list(FAMILIES["mp"](problem(2)))
    sizes = {tuple(len(stage.components) for stage in plan.stages) for plan in plans if plan.chunks == 1}
    assert all(first < last for first, last in sizes)
    orders = {(plan.pipeline_order, plan.chunks) for plan in plans}
    chunked = {("interleaved", chunks) for chunks in (1, 2, 3)}
    assert orders == {("1f1b", 1), ("gpipe", 1)} | chunked, "every order that calibration knows the costs of"


def test_resnet50_on_eight_v100s_scales_as_published() -> None:
    """SEEDS S1.4.10 asks for the 8-GPU fp32 throughput within 10% of 2766 images/s (NVIDIA, DGX-1, PyTorch)."""
    model = load_model(ModelSpec(name="resnet50"))
    question = PlanningProblem(model=model, cluster=machine(8), global_batch=1024)
    found = search(question, ("dp",), samples=0)
    assert found.chosen is not None
    assert found.chosen.result.throughput_samples_per_s.median == pytest.approx(2766, rel=0.10)


# --- recomputation ----------------------------------------------------------------------------------------------------


def hungry() -> PlanningProblem:
    """One device; what its components save is most of the memory."""
    model = replace(
        CHAIN,
        components=tuple(replace(each, saved_activation_bytes=2**20 * (each.name != "loss")) for each in CHAIN.components),
    )
    return PlanningProblem(model=model, cluster=machine(1), global_batch=64, recompute="auto")


def with_memory(asked: PlanningProblem, memory_bytes: int) -> PlanningProblem:
    return replace(asked, cluster=machine(1, memory_bytes=memory_bytes))


def one_microbatch(asked: PlanningProblem) -> Plan:
    return next(iter(FAMILIES["single"](asked)))


def test_recomputing_buys_memory_with_forwards() -> None:
    """A full recomputation adds every forward with a backward to the step, no more, and keeps the inputs alone."""
    asked = hungry()
    plain = one_microbatch(asked)
    full = replace(plain, recompute="full")
    one, other = (evaluate(asked, plan, samples=0) for plan in (plain, full))
    forwards = [task.index for task in one.graph.tasks if isinstance(task.work, Compute) and task.work.phase is Phase.FORWARD]
    chosen = np.isin(one.timeline.task, forwards)
    again = float((one.timeline.end_s - one.timeline.start_s)[chosen].sum())
    assert again > 0
    assert other.result.step_s.median == pytest.approx(one.result.step_s.median + again, rel=1e-9)
    assert other.breakdown[0].compute_s == pytest.approx(one.breakdown[0].compute_s + again, rel=1e-9)
    assert other.memory[0].line("activations") < 0.1 * one.memory[0].line("activations")
    assert other.memory[0].total_bytes < one.memory[0].total_bytes


def test_where_memory_is_short_as_little_as_possible_is_recomputed() -> None:
    asked = hungry()
    plain = one_microbatch(asked)
    full = replace(plain, recompute="full")
    most, least = (asked.memory(plan)[0].needed_bytes for plan in (plain, full))
    assert recomputed_to_fit(with_memory(asked, least - 1), plain) is None
    before = len(plain.components) + 1
    for limit in np.linspace(least, most - 1, 6).astype(int).tolist():
        tight = with_memory(asked, limit)
        found = recomputed_to_fit(tight, plain)
        assert found is not None
        assert all(entry.fits for entry in tight.memory(found))
        assert 0 < len(found.recomputed) <= before, "more room, no more recomputation"
        before = len(found.recomputed)


def test_a_search_recomputes_only_where_nothing_else_fits_and_says_so() -> None:
    asked = hungry()
    plain = one_microbatch(asked)
    roomy = search(asked, ("single",), samples=0).chosen
    assert roomy is not None
    assert roomy.result.plan.recompute == "none"
    most_split = replace(plain, microbatches=64)
    limit = asked.memory(most_split)[0].needed_bytes - 1
    tight = with_memory(asked, limit)
    chosen = search(tight, ("single",), samples=0).chosen
    assert chosen is not None
    assert chosen.result.plan.recomputed
    assert "recomputes" in chosen.result.reason
    assert search(replace(tight, recompute="none"), ("single",), samples=0).chosen is None
    hopeless = search(with_memory(asked, 2**20), ("single",), samples=0)
    assert hopeless.chosen is None
    assert "even with all recomputed" in hopeless.candidates[0].result.reason


def test_of_many_reasons_the_most_frequent_one_is_told() -> None:
    assert most_frequent({"one": 2}) == "one"
    assert most_frequent({"one": 2, "two": 5}, " in --json") == "two; 1 more reason in --json"
    assert most_frequent({"one": 2, "two": 5, "three": 1}) == "two; 2 more reasons"


def test_a_plan_that_fits_with_all_but_one_component_recomputed_is_found() -> None:
    """The first component of VGG-16 keeps another copy of the batch if it is recomputed, which is more than it saves."""
    model = load_preset("vgg16", "block")

    def asked(memory_bytes: int) -> PlanningProblem:
        one = machine(1, memory_bytes=memory_bytes)
        numerics = Numerics(precision="amp_fp16", optimizer="adam")
        return PlanningProblem(model=model, cluster=one, global_batch=64, numerics=numerics)

    ample = asked(2**40)
    plan = custom_plan(ample, Mesh())
    everything = max(entry.needed_bytes for entry in ample.memory(replace(plan, recompute="full")))
    rest = tuple(component.name for component in model.components[1:])
    less = max(entry.needed_bytes for entry in ample.memory(replace(plan, recompute=rest)))
    assert less < everything
    tight = asked(round((less + everything) / 2))
    found = recomputed_to_fit(tight, plan)
    assert found is not None
    assert all(entry.fits for entry in tight.memory(found))


@pytest.mark.slow
def test_families_that_lost_and_are_faster_alone_are_named() -> None:
    question = PlanningProblem(model=load_preset("resnet50", "block"), cluster=machine(), global_batch=1024)
    found = search(question, strategies=("adaptive",), samples=0)
    alone = search(question, strategies=("hp",), samples=0)
    shown = next(entry for entry in found.candidates if entry.result.strategy == "hp")
    assert alone.candidates[0].result.step_s.median < shown.result.step_s.median
    assert "hp" in found.unrefined
    assert "dp" not in found.unrefined
    assert alone.unrefined == ()


def test_a_tie_is_a_share_of_the_step() -> None:
    """3.5%, of milliseconds as of hours."""
    for step_s in (1e-6, 1e-2, 1.0, 1e4):
        assert is_tie(1.034 * step_s, step_s)
        assert is_tie(0.5 * step_s, step_s)
        assert not is_tie(1.036 * step_s, step_s)


def test_stages_of_zero_are_as_simple_as_the_software_of_the_layout_has_them() -> None:
    """Replicas are sharded as FSDP does; a pipeline's keep their weights, as with Megatron's distributed optimizer."""
    question = problem(4)
    for mesh, order in ((Mesh(dp=4), [0, 3, 2, 1]), (Mesh(pp=2, dp=2), [0, 1, 2, 3])):
        plans = [replace(custom_plan(question, mesh), zero_stage=stage) for stage in range(4)]
        assert [plan.zero_stage for plan in sorted(plans, key=partial(complexity, question))] == order
        told = [JudgedPlan(plan=plans[2], step_s=1.0)]
        found = simplest_tie(question, told, lambda plan: 1.0 if plan.zero_stage else float("inf"))
        assert found.plan.zero_stage == order[1]


def test_of_plans_as_simple_the_fastest_counts_where_nobody_simulated_it() -> None:
    """The fastest with PyTorch's buckets, before a slower plan that had them all along."""
    question = problem(4)
    usual = replace(custom_plan(question, Mesh(dp=4)), zero_stage=0)
    fastest, slower = replace(usual, bucket_bytes=2**16), replace(usual, microbatches=2)
    judged = [JudgedPlan(plan=fastest, step_s=1.0), JudgedPlan(plan=slower, step_s=1.03)]
    assert simplest_tie(question, judged, lambda _: 1.01).plan == usual
    assert simplest_tie(question, judged, lambda _: 1.034).plan == slower


def test_an_ep_axis_makes_replicas_less_simple_and_not_a_pipeline() -> None:
    question = problem(8)
    for mesh, is_less in ((Mesh(dp=8), True), (Mesh(pp=2, dp=4), False)):
        alone = custom_plan(question, mesh)
        divided = replace(alone, mesh=replace(mesh, ep=4))
        assert (complexity(question, divided) > complexity(question, alone)) == is_less


def test_a_simpler_plan_that_does_not_fit_ties_with_nothing() -> None:
    question = problem(4)
    dp, hp = (custom_plan(question, mesh) for mesh in (Mesh(dp=4), Mesh(pp=2, dp=2)))
    for fits, safe in ((False, False), (True, False)):
        judged = [JudgedPlan(plan=hp, step_s=1.0), JudgedPlan(plan=dp, step_s=1.0, fits=fits, safe=safe)]
        assert simplest_tie(question, judged, lambda _: float("inf")).plan == hp
    assert simplest_tie(question, [replace(entry, fits=True, safe=True) for entry in judged], lambda _: float("inf")).plan == dp


# Every key of [plan] that is given constrains the search, what is left out is free: by the run file and the answer.

RUN = """
[model]
name = "{model}"
[cluster]
profile = "dgx1-v100-32gb"
devices = {devices}
[training]
global_batch = {batch}
[plan]
{plan}
"""


def ask(plan: str = "", *, model: str = "vit_small", devices: int = 4, batch: int = 32) -> Answer:
    return answer(parse_config(RUN.format(model=model, devices=devices, batch=batch, plan=plan)))


def plans(asked: Answer) -> list[Plan]:
    return [entry.plan for entry in asked.candidates]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("mesh = { pp = 2 }", lambda plan: plan.mesh.pp == 2),
        pytest.param("mesh = { dp = 2 }", lambda plan: plan.mesh.dp == 2, marks=pytest.mark.slow),
        ("mesh = { tp = 2, dp = 2 }", lambda plan: (plan.mesh.tp, plan.mesh.dp) == (2, 2)),
        ("microbatches = 4", lambda plan: plan.microbatches == 4),
        pytest.param("bucket_bytes = 1000000", lambda plan: plan.bucket_bytes == 1_000_000, marks=pytest.mark.slow),
        ("zero_stage = 1", lambda plan: plan.zero_stage == 1),
        pytest.param('recompute = "full"', lambda plan: plan.recompute == "full", marks=pytest.mark.slow),
        pytest.param(
            'recompute = ["layers.*"]',
            lambda plan: plan.recomputed and all(name[:7] == "layers." for name in plan.recomputed),
            marks=pytest.mark.slow,
        ),
        ('mesh = { pp = 4 }\npipeline_order = "gpipe"', lambda plan: plan.pipeline_order == "gpipe"),
        ('mesh = { pp = 2 }\npipeline_order = "interleaved"\nchunks = 2', lambda plan: plan.chunks == 2),
        pytest.param("mesh = { pp = 2 }\nchunks = 2", lambda plan: plan.chunks == 2, marks=pytest.mark.slow),
    ],
)
def test_a_key_that_is_given_holds_for_every_candidate(given, kept) -> None:  # type: ignore[no-untyped-def]
    asked = ask(given)
    assert asked.fits
    assert plans(asked)
    assert all(kept(plan) for plan in plans(asked)), [plan.summary() for plan in plans(asked)]


@pytest.mark.slow
def test_a_constraint_never_makes_the_answer_faster() -> None:
    free = ask().prediction.evaluation.result.step_s.median
    for given in ("zero_stage = 0", "microbatches = 2", "mesh = { pp = 2 }", 'recompute = "full"'):
        assert ask(given).prediction.evaluation.result.step_s.median >= free * (1 - 1e-12)


def test_tp_alone_is_megatrons_sharding_of_a_transformer() -> None:
    asked = ask("mesh = { tp = 2 }", model="gpt_small", devices=2)
    plan = asked.chosen.plan
    assert str(plan.mesh) == "pp=1 dp=1 tp=2"
    placed = {name: placement for stage in plan.stages for name, placement in stage.placed()}
    cuttable = {component.name for component in asked.problem.model.components if component.shardings}
    assert {placed[name].kind for name in cuttable} == {"shard"}
    blocks = {name: placement for name, placement in placed.items() if name.startswith("h.") and name in cuttable}
    assert len(blocks) >= 3
    assert all(placement == Placement("shard", rule="column+row", ways=2) for placement in blocks.values()), placed


def test_tp_that_nothing_divides_by_is_an_error_that_names_what_divides() -> None:
    """With tp given no placements are mixed: the error blames nothing that adaptive does not have."""
    text = r"tp = 7 does not divide the layers of gpt_small: h.0 is cut by column\+row \(512\); the nearest that does: tp = 4"
    with pytest.raises(ScheduleError, match=text) as error:
        ask("mesh = { tp = 7 }", devices=7, model="gpt_small", batch=28)
    assert "large problem" not in str(error.value)
    assert "adaptive:" not in str(error.value)


def test_axes_that_do_not_divide_the_devices() -> None:
    with pytest.raises(ConfigError, match=r"mesh pp \(3\) must divide the devices \(4\)"):
        ask("mesh = { pp = 3 }")


def test_a_family_without_the_mesh_says_so() -> None:
    with pytest.raises(ScheduleError, match=r"plan.mesh asks for tp = 2, which no mesh of dp has"):
        ask('strategy = "dp"\nmesh = { tp = 2 }')
    assert "plan.mesh asks for tp = 2" in dict(ask("mesh = { tp = 2 }").search.skipped)["dp"]  # type: ignore[union-attr]


def test_zero_is_free_by_default_and_given_where_it_is_given() -> None:
    """With adam the optimizer's step over all parameters is worth dividing."""
    free, none = (
        answer(parse_config(RUN.format(model="vit_small", devices=4, batch=32, plan=given), ["training.optimizer=adam"]))
        for given in ('strategy = "dp"', 'strategy = "dp"\nzero_stage = 0')
    )
    assert free.search is not None
    assert free.search.chosen is not None
    fastest = free.search.chosen.result
    assert none.chosen.plan.zero_stage == 0
    assert fastest.plan.zero_stage > 0
    assert fastest.step_s.median < none.prediction.evaluation.result.step_s.median
    assert free.chosen.plan.zero_stage == 0, "a tie with the fastest, and simpler"


def test_a_batch_that_does_not_divide_over_all_devices_uses_fewer() -> None:
    assert ask('strategy = "dp"', batch=6).chosen.plan.mesh.dp == 3


@pytest.mark.slow
def test_the_answer_counts_what_became_of_the_plans() -> None:
    asked = ask()
    counts = asked.to_dict()["considered"]
    kinds = ("simulated", "slower_by_a_lower_bound", "do_not_fit", "not_tried")
    assert counts["plans"] == sum(counts[kind] for kind in kinds) + sum(counts["infeasible"].values()) > 100
    assert f"Of {counts['plans']:,} plans: {counts['simulated']:,} simulated" in asked.verdict()


def test_a_plan_by_hand_keeps_its_defaults() -> None:
    plan = ask('strategy = "custom"\nmesh = { dp = 4 }').chosen.plan
    assert (plan.zero_stage, plan.recompute, plan.microbatches) == (0, "none", 1)


@pytest.mark.parametrize("text", ['strategy = "plan.json"\nmicrobatches = 2', 'placements = { "*" = "batch" }'])
def test_keys_that_no_search_can_keep_are_refused(text: str) -> None:
    with pytest.raises(ParsimError):
        ask(text)


# Properties of the search that a user calls, over random models, clusters and batches. The properties and the draws are
# those of `experiments/search`, which keeps how many problems each compared. Here each runs on few problems at every
# change, and on some more in the slow set.

QUICK, MANY = 2, 8
"""Problems that each property compares: in the tests at every change, and in the slow ones."""

TRIED_ELSEWHERE = "the_papers_optimum_is_certified", "the_papers_optimum_of_real_models_is_certified"
"""In `test_schedule_oracles`, at every change."""


def holds_on(name: str, problems: int, shapes: Sequence[Shape]) -> Counts:
    counts = counted(name, PROPERTIES[name], problems, shapes=shapes, patient=False)
    print(counts)
    assert_holds(counts)
    return counts


@pytest.mark.parametrize("name", [name for name in PROPERTIES if name not in TRIED_ELSEWHERE])
def test_property(name: str) -> None:
    holds_on(name, QUICK, TINY)


@pytest.mark.slow  # 2 to 10 CPU-seconds each
@pytest.mark.parametrize("name", list(PROPERTIES))
def test_property_on_many_problems(name: str) -> None:
    counts = holds_on(name, MANY, SHAPES)
    assert counts.compared >= MANY / 2, str(counts)


def test_a_property_that_compares_nothing_is_not_called_met() -> None:
    counts = counted("nothing", lambda draw, random: 0, 2, shapes=TINY)
    assert counts.compared == 0
    assert "NOTHING WAS COMPARED" in str(counts)
    with pytest.raises(AssertionError, match="NOTHING WAS COMPARED"):
        assert_holds(counts)


def test_failures_are_counted_and_told_with_their_problem() -> None:
    def fails(draw: ProblemDraw, random: Random) -> int:
        assert draw.global_batch < 0, "too few samples"
        return 1

    counts = counted("fails", fails, 3, shapes=TINY)
    assert (counts.compared, counts.passed) == (3, 0)
    with pytest.raises(AssertionError, match=r"(?s)0 passed.*too few samples.*ProblemDraw"):
        assert_holds(counts)


def test_a_family_that_lost_has_a_row_though_the_allowance_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first outlines are opened whatever is left: plain data parallelism is what people compare with."""
    monkeypatch.setattr(space, "MOST_VISITS", 1000)
    settings = {"model.args.layers": 8}
    found = ps.plan("llama3-8b", cluster="64xh100-sxm", global_batch=256, settings=settings)
    assert {row.result.strategy for row in found.search.candidates} >= {"dp", "mp", "hp", "single"}
