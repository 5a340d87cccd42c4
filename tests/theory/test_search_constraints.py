"""Every key of [plan] that is given constrains the search, what is left out is free: by the run file and the answer."""

from __future__ import annotations

import pytest

from parsim.app.answer import Answer
from parsim.app.ask import ask as answer
from parsim.app.config import parse_config
from parsim.errors import ConfigError, ParsimError, ScheduleError
from parsim.plans.layouts import Placement
from parsim.plans.plan import Plan

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
