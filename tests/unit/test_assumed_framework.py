"""Questions that name no framework: which one prices them, what that changes, and that the answer says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import parsim
from experiments.published.predict import predict
from experiments.published.rows import Row
from parsim.app.config import Question, constraints_of
from parsim.app.load import problem_of
from parsim.app.prediction import AssumedFramework
from parsim.app.question import question_of, taken_defaults
from parsim.plans.constraints import PlanConstraints

BY_HAND = {"plan.strategy": "custom", "plan.microbatches": 1}
TP8: dict[str, Any] = {**BY_HAND, "plan.mesh": {"tp": 8}}
FSDP: dict[str, Any] = {**BY_HAND, "plan.mesh": {"dp": 8}, "plan.zero_stage": 3}
SMALL: dict[str, Any] = {"model.args.layers": 2, "model.args.seq": 1024}


def question(model: str, cluster: str, **settings: Any) -> Question:
    return question_of(model, cluster=cluster, global_batch=64, settings=settings)


@pytest.mark.parametrize(
    ("model", "cluster", "settings", "framework", "by"),
    [
        ("llama3-8b", "8xh100-sxm", TP8, "megatron", "tp 8"),
        ("llama3-8b", "8xh100-sxm", FSDP, "fsdp", "ZeRO 3"),
        ("llama3-8b", "8xh100-sxm", {**FSDP, "training.precision": "fp8"}, "torchtitan", "ZeRO 3"),
        ("llama3-8b", "8xh100-sxm", {}, "fsdp", "states that one GPU cannot hold"),
        (
            "llama3-70b",
            "64xh100-sxm",
            {"cluster.network": "infiniband-400g"},
            "megatron",
            "a search among all ways to divide the model",
        ),
        ("llama3-8b", "8xh100-sxm", {"plan.strategy": "dp"}, "fsdp", "states that one GPU cannot hold"),
        ("llama3.2-1b", "8xh100-sxm", {"plan.strategy": "dp"}, "ddp", "states that nothing divides"),
        ("llama3-8b", "1xh200", {}, "hf-trainer", "one GPU"),
        ("mixtral-8x7b", "8xh100-sxm", {}, "megatron-bridge", "its experts"),
        ("gpt-22b", "8xa100-sxm-80gb", TP8, "megatron of 2021", "tp 8"),
        ("bert-110m", "8xh100-sxm", {}, "mlperf", "attention to both sides"),
    ],
)
def test_the_framework_follows_from_model_gpu_and_plan(
    model: str, cluster: str, settings: dict[str, Any], framework: str, by: str
) -> None:
    asked = question(model, cluster, **settings)
    assert asked.guess is not None
    assert (asked.guess.frameworks[0].version, asked.guess.by) == (framework, by)
    assert taken_defaults(asked)["software.framework"] == framework


def test_a_plan_file_says_as_much_as_the_same_keys(tmp_path: Any) -> None:
    answer = parsim.plan("llama3-8b", "8xh100-sxm", global_batch=64, settings={**FSDP, **SMALL})
    answer.prediction.plan.save(tmp_path / "plan.json")
    again = question("llama3-8b", "8xh100-sxm", **SMALL, **{"plan.strategy": str(tmp_path / "plan.json")})
    assert again.guess == answer.question.guess


@pytest.mark.parametrize(
    ("cluster", "settings"),
    [("dgx1-v100-32gb", {}), ("8xh100-sxm", {"software.framework": "nemo"})],
)
def test_calibrated_machines_and_named_frameworks_are_not_guessed(cluster: str, settings: dict[str, Any]) -> None:
    asked = question("gpt3-125m", cluster, **settings, **{"plan.strategy": "dp"}, **SMALL)
    assert asked.guess is None
    assert asked.priced_software == asked.software
    assert parsim.plan("gpt3-125m", cluster, global_batch=64, settings={**settings, **SMALL, **FSDP}).assumed_framework is None


@pytest.mark.parametrize(("settings", "framework"), [(TP8, "megatron"), (FSDP, "fsdp")])
def test_prices_are_those_of_the_framework_and_the_plan_is_the_asked_one(settings: dict[str, Any], framework: str) -> None:
    asked: dict[str, Any] = {"cluster": "8xh100-sxm", "global_batch": 64}
    guessed = parsim.plan("llama3-8b", **asked, settings={**settings, **SMALL})
    named = {"software.framework": framework, "plan.zero_stage": 0, "plan.recompute": "none"} | settings
    if framework == "fsdp":
        named["software.compiled"] = False
    stated = parsim.plan("llama3-8b", **asked, settings={**named, **SMALL})
    assert guessed.prediction.plan == stated.prediction.plan
    assert guessed.prediction.plan.zero_stage == settings.get("plan.zero_stage", 0)
    raw = [answer.prediction.step_s.median / answer.problem.learnt.factor for answer in (guessed, stated)]
    assert raw[0] == pytest.approx(raw[1], rel=1e-9)
    assert guessed.prediction.peak_memory_bytes == stated.prediction.peak_memory_bytes


def test_a_guess_narrows_no_search() -> None:
    asked = question("llama3-8b", "8xh100-sxm")
    assert constraints_of(asked) == PlanConstraints()
    assert problem_of(asked).zero_stage == "auto"


def test_what_the_question_says_of_overlap_counts_more_than_the_guess() -> None:
    problem = problem_of(question("llama3-8b", "8xh100-sxm", **TP8, **SMALL, **{"plan.tensor_backward_overlap": True}))
    switches = dict(problem.switches)
    assert (switches["tensor_overlap"], switches["tensor_backward_overlap"]) == (False, True)


def test_the_answer_says_what_it_assumed_and_how_much_others_differ() -> None:
    answer = parsim.plan("llama3-8b", "8xh100-sxm", global_batch=64, settings={**FSDP, **SMALL})
    assumed = answer.assumed_framework
    assert assumed is not None
    assert assumed.others
    line = next(line for line in answer.lines() if line.startswith("framework not given"))
    assert line == assumed.text()
    assert line.startswith("framework not given: priced as fsdp, by ZeRO 3; ")
    document = answer.to_dict()
    assert document["framework"] == {"assumed": "fsdp", "by": "ZeRO 3", "others": dict(assumed.others)}
    assert document["assumed"]["software.framework"] == "fsdp"
    assert answer.prediction.to_dict()["framework"] == document["framework"]
    name, ratio = assumed.others[0]
    stated = {**FSDP, **SMALL, "software.framework": name.split(" of ")[0]}
    other = parsim.plan("llama3-8b", "8xh100-sxm", global_batch=64, settings=stated)
    here, there = (each.prediction.step_s.median / each.problem.learnt.factor for each in (answer, other))
    assert there / here == pytest.approx(ratio, rel=1e-6)


def test_the_interval_reaches_to_every_plausible_framework() -> None:
    answer = parsim.plan("llama3-8b", "8xh100-sxm", global_batch=64, settings={**FSDP, **SMALL})
    step, problem = answer.prediction.step_s, answer.problem
    far = AssumedFramework(name="fsdp", by="ZeRO 3", others=(("slow", 3.0), ("fast", 0.2)))
    learnt = far.spanned(problem).learnt
    assert (learnt.low, learnt.high) == (0.2, 3.0)
    assert learnt.factor == problem.learnt.factor
    near = replace(far, others=(("alike", 1.001),))
    assert near.spanned(problem) is problem
    assert near.text() == "framework not given: priced as fsdp, by ZeRO 3; alike would take as long"
    assert far.text().endswith("slow would be 200% slower, fast would be 80% faster")
    assert answer.assumed_framework is not None
    for _, ratio in answer.assumed_framework.others:
        assert step.p05 <= step.median * ratio <= step.p95


def test_points_of_a_sweep_over_frameworks_have_their_own_kernels() -> None:
    keys = {**FSDP, **SMALL}
    swept = parsim.sweep(
        "llama3-8b",
        {"software.framework": ["fsdp", "megatron"]},
        cluster="8xh100-sxm",
        global_batch=64,
        settings=keys,
        jobs=1,
    )
    steps = swept.table()["step_s"].tolist()
    for framework, step_s in zip(("fsdp", "megatron"), steps, strict=True):
        alone = parsim.plan("llama3-8b", "8xh100-sxm", global_batch=64, settings=keys | {"software.framework": framework})
        assert step_s == pytest.approx(alone.prediction.step_s.median, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "gpu", "split", "zero"),
    [
        ("llama2-7b", "h100-sxm", {"dp": 8}, 3),
        ("llama2-7b", "b200", {"tp": 2, "dp": 4}, 1),
        ("llama3.2-1b", "h100-sxm", {"dp": 8}, 0),
    ],
)
def test_published_rows_and_questions_have_one_price(model: str, gpu: str, split: dict[str, int], zero: int) -> None:
    tp, dp = split.get("tp", 1), split["dp"]
    row = Row(
        id="row",
        hardware=f"8x {gpu.split('-')[0].upper()}",
        model=model,
        unit="s/step",
        precision="bf16",
        recompute="none",
        zero=str(zero),
        gpus=8,
        global_batch=2 * dp,
        micro_batch=1,
        seq=4096,
        tp=tp,
        pp=1,
        dp=dp,
    )
    published = predict(row, raw=True, known=False).answer
    assert published is not None
    keys = {"plan.strategy": "custom", "plan.mesh": split, "plan.zero_stage": zero, "plan.microbatches": 2}
    asked = question_of(model, cluster=f"8x{gpu}", global_batch=2 * dp, settings=keys | {"model.args.seq": 4096})
    answer = parsim.plan(model, f"8x{gpu}", global_batch=2 * dp, settings=keys | {"model.args.seq": 4096})
    assert asked.guess is not None
    step_s = answer.prediction.step_s.median / answer.problem.learnt.factor
    assert step_s == pytest.approx(published.step_s, rel=0.005)
    assert max(answer.prediction.peak_memory_bytes) == pytest.approx(published.peak_bytes, rel=0.02)
