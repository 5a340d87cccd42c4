"""[software] of a run file: what a framework fills in, what a question states beside it, and what is assumed without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import parsim
from experiments.published.predict import predict
from experiments.published.rows import Row
from parsim.app.config import Question, constraints_of, parse_config
from parsim.app.load import fixed_plan, problem_of
from parsim.app.prediction import AssumedFramework
from parsim.app.question import question_of, taken_defaults
from parsim.errors import ConfigError
from parsim.model.catalogue.frameworks import FRAMEWORKS, KERNELS, framework_of
from parsim.model.catalogue.names import NAMED, software_of
from parsim.model.catalogue.sublayers import SamplePart, Software
from parsim.model.catalogue.transformer import BALANCED, transformer
from parsim.model.divided import ExpertRouting
from parsim.model.load import load_model
from parsim.plans.constraints import PlanConstraints
from parsim.plans.plan import SWITCHES, Plan
from parsim.predict.evaluate import evaluate

MESH = {"plan.strategy": "custom", "plan.mesh": {"pp": 2, "dp": 2, "tp": 2}, "plan.microbatches": 4}


def question(**settings: Any) -> Question:
    keys = {**MESH, **{key.replace("__", "."): value for key, value in settings.items()}}
    return question_of("gpt3-1.3b", cluster="8xa100-sxm-80gb", global_batch=64, settings=keys)


def plan(**settings: Any) -> Plan:
    asked = question(**settings)
    made = fixed_plan(problem_of(asked), asked)
    assert made is not None
    return made


def test_a_framework_fills_in_what_is_left_open_and_nothing_else() -> None:
    unknown, megatron = plan(), plan(software__framework="megatron")
    assert (unknown.zero_stage, unknown.recompute) == (0, "none")  # a guess decides of prices alone
    assert (megatron.zero_stage, megatron.gather_ahead, megatron.scatter_gather, megatron.clip_gradients) == (
        1,
        True,
        True,
        True,
    )
    stated = plan(software__framework="megatron", plan__gather_ahead=False, plan__zero_stage=2, plan__recompute="full")
    assert (stated.gather_ahead, stated.zero_stage) == (False, 2)
    assert stated.recomputed == set(stated.components)


def test_a_version_is_that_of_its_year() -> None:
    old, new = (plan(software__framework="megatron", software__year=year) for year in (2020, 2025))
    assert old.recomputed == set(old.components)
    assert (old.blocking_transfers, old.zero_stage) == (True, 0)
    assert (new.recompute, new.blocking_transfers, new.zero_stage) == ("none", False, 1)
    assert framework_of("megatron", 2021).until == 2021


def test_switches_of_axes_that_a_plan_has_not_stay_off() -> None:
    alone = plan(software__framework="megatron", plan__mesh={"pp": 1, "dp": 8, "tp": 1})
    assert alone.switched == ("gather_ahead",)
    assert plan(software__framework="megatron").switched == ("tensor_overlap", "gather_ahead", "scatter_gather")


@pytest.mark.parametrize(
    ("framework", "constraints"),
    [
        ("megatron", {"plan.mesh": {"dp": 4, "tp": 2}}),
        ("megatron", {"plan.zero_stage": 1, "plan.strategy": "dp"}),
        ("composer", {"plan.zero_stage": 3, "plan.strategy": "dp"}),
    ],
)
def test_a_plan_has_one_price_whether_it_is_found_or_stated(framework: str, constraints: dict[str, Any]) -> None:
    keys = {
        "software.framework": framework,
        "software.year": 2023,
        "plan.microbatches": 8,
        "model.args.layers": 4,
    } | constraints
    asked: dict[str, Any] = {"cluster": "8xa100-sxm-80gb", "global_batch": 64}
    found = parsim.plan("gpt3-1.3b", **asked, settings=keys).prediction.result
    made = found.plan
    by_hand: dict[str, Any] = {
        "plan.strategy": "custom",
        "plan.mesh": {axis: getattr(made.mesh, axis) for axis in ("pp", "dp", "tp", "cp", "ep")},
        "plan.zero_stage": made.zero_stage,
        "plan.bucket_bytes": made.bucket_bytes,
        "plan.recompute": made.recompute,
    }
    stated = parsim.plan("gpt3-1.3b", **asked, settings=keys | by_hand).prediction.result
    assert stated.plan.program == made.program
    assert stated.step_s.median == found.step_s.median
    assert stated.peak_memory_bytes == found.peak_memory_bytes
    row = framework_of(framework, 2023)
    assert all(getattr(made, key) == getattr(row, key) for key in SWITCHES)


@pytest.mark.parametrize(
    ("framework", "mesh", "axes", "stages", "orders"),
    [
        ("composer", {}, {"dp"}, {0, 2, 3}, {"1f1b"}),
        ("megatron", {"pp": 2, "tp": 2, "dp": 2}, {"dp", "pp", "tp"}, {0, 1, 2, 3}, {"1f1b", "interleaved"}),
    ],
)
def test_a_search_proposes_what_the_framework_runs(
    framework: str, mesh: dict[str, int], axes: set[str], stages: set[int], orders: set[str]
) -> None:
    keys: dict[str, Any] = {"model.args.layers": 4, "model.args.seq": 512, "plan.microbatches": 4, "plan.mesh": mesh}
    keys["software.framework"] = framework
    answer = parsim.plan("gpt3-1.3b", cluster="8xa100-sxm-80gb", global_batch=32, settings=keys)
    plans = [candidate.plan for candidate in answer.candidates]
    assert {axis for made in plans for axis in ("dp", "pp", "tp", "cp", "ep") if getattr(made.mesh, axis) > 1} <= axes
    assert {made.zero_stage for made in plans} <= stages
    assert {made.pipeline_order for made in plans} <= orders
    assert not any(made.mixes_placements for made in plans)
    assert f"since {framework} does not run it" in str(answer)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_version_names_kernels_that_exist_and_a_source(name: str) -> None:
    row = FRAMEWORKS[name]
    assert row.name == name
    assert not row.until
    years = [version.until for version in row.earlier]
    assert years == sorted(years)
    for version in (row, *row.earlier):
        assert version.kernels_of(True) in KERNELS
        assert version.source
        assert version.kernels_of(False) in KERNELS


def test_compiled_and_attention_choose_the_kernels() -> None:
    kernels = [
        software_of(question(**keys).software.kernels)
        for keys in (
            {"software__framework": "torchtitan"},
            {"software__framework": "torchtitan", "software__compiled": False},
            {"software__framework": "torchtitan", "software__attention": "unfused"},
        )
    ]
    assert kernels[0].norm_arrays < kernels[1].norm_arrays
    assert [software.flash for software in kernels] == [True, True, False]


def test_selective_recomputation_of_torchtitan_keeps_the_outputs_of_products() -> None:
    """Its policy by operator, and no second forward that stops early and keeps a layer's input alone."""
    named = [
        question(software__framework=framework, plan__recompute="selective").model_spec
        for framework in ("torchtitan", "megatron")
    ]
    kept = [load_model(spec).component("h.0").selective for spec in named]
    assert all(selective is not None and selective.kept[0] > 0 for selective in kept)
    assert kept[0] == kept[1]


def test_what_the_model_states_counts_more_than_the_framework() -> None:
    asked = question(software__framework="megatron", model__args={"kernels": "eager"})
    assert dict(asked.model_spec.args)["kernels"] == "eager"


def test_an_unknown_framework_is_among_what_was_assumed() -> None:
    assert taken_defaults(question())["software.framework"] == "megatron of 2021"
    assert "software.framework" not in taken_defaults(question(software__framework="nemo"))


def routing(**settings: Any) -> ExpertRouting:
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    return problem_of(question_of("mixtral-8x7b", cluster="8xh100-sxm", global_batch=64, settings=keys)).routing


def test_experts_are_routed_as_the_framework_does_unless_a_key_says_otherwise() -> None:
    assert routing(software__framework="megatron") == ExpertRouting()
    assert routing().dispatcher == routing(software__framework="megatron-bridge").dispatcher == "hybridep"
    stated = routing(software__framework="megatron-bridge", software__dispatcher="all_to_all", plan__routing_skew=0.2)
    assert stated == ExpertRouting(skew=0.2)
    both = routing(software__expert_overlap=True, software__delay_weight_gradients=True, software__dispatcher="deepep")
    assert both == ExpertRouting(dispatcher="deepep", overlapped=True, delayed=True)


def test_an_answer_names_how_tokens_reach_experts() -> None:
    def assumed(**settings: Any) -> tuple[str, ...]:
        asked = question_of("mixtral-8x7b", cluster="8xh100-sxm", global_batch=64, settings=settings)
        return problem_of(asked).model.assumptions

    assert assumed(**{"software.framework": "megatron"}) == (BALANCED,)
    assert assumed() == (BALANCED, "tokens reach experts by hybridep")
    skewed = assumed(**{"plan.routing_skew": 0.2, "software.framework": "megatron-bridge", "software.expert_overlap": True})
    assert skewed == (
        "visits of single experts have a standard deviation of 0.2 of their mean",
        "tokens reach experts by hybridep, beside the computation of another microbatch",
    )


def test_unfused_permutation_moves_more() -> None:
    asked = [
        question_of("mixtral-8x7b", cluster="8xh100-sxm", global_batch=64, settings={"software.fused_permutation": fused})
        for fused in (True, False)
    ]
    fused, single = (software_of(dict(each.model_spec.args)) for each in asked)
    assert (fused.permutation_arrays, single.permutation_arrays) == (4.0, 7.0)


def test_megatron_core_adds_biases_of_experts_operation_by_operation() -> None:
    """28 bytes per visit and channel: a product in fp32 (4), its sum with the output (10), a copy (8) and a cast (6)."""
    shape = NAMED["gpt-oss-120b"].shape
    assert shape is not None

    def moved(software: Software) -> int:
        model = transformer(replace(shape, layers=1), software, SamplePart(tokens=64, context=64), "sublayer")
        return sum(each.activation_bytes * each.count for part in model.components for each in part.operators)

    core = KERNELS["megatron-core"]
    visits, of_full = 64 * shape.active, 2  # operators count four bytes per element
    added = moved(core) - moved(replace(core, expert_bias_arrays=0.0))
    assert added == of_full * 28 * visits * shape.hidden


IMAGES = (
    '[model]\nname = "{}"\n[cluster]\ngpu = "a100-sxm-80gb"\ngpus_per_node = 1\n'
    '[training]\nglobal_batch = 256\nprecision = "{}"\n[plan]\nstrategy = "custom"\nmesh = {{ dp = 1 }}\n[software]\n{}\n'
)


def images_per_s(text: str, precision: str = "amp_fp16") -> float:
    asked = parse_config(IMAGES.format("resnet50", precision, text))
    problem = problem_of(asked)
    plan = fixed_plan(problem, asked)
    assert plan is not None
    return 256 / evaluate(problem, plan, samples=0).result.step_s.median


def test_convolutional_networks_read_the_table_too() -> None:
    """Channels last spares conversions, MXNet fuses norms, and DeepLearningExamples has channels last under AMP alone."""
    plain, last = images_per_s(""), images_per_s("channels_last = true")
    assert plain < last < images_per_s('framework = "mxnet"')
    assert images_per_s('framework = "deeplearningexamples"') == last
    assert images_per_s('framework = "ddp"\nchannels_last = true') == pytest.approx(last, rel=0.01)  # it clips
    assert images_per_s('framework = "ddp"\nchannels_last = true\ncompiled = true') > last
    assert images_per_s('framework = "deeplearningexamples"', "tf32") == images_per_s("", "tf32")
    assert images_per_s("channels_last = true", "tf32") > images_per_s("", "tf32")


def test_cuda_graphs_take_the_host_away_and_an_unknown_host_is_refused() -> None:
    def step_s(**settings: Any) -> float:
        keys = {"plan.strategy": "custom", "plan.mesh": {"dp": 8, "ep": 8}, "plan.zero_stage": 1, "plan.microbatches": 8}
        sizes = {"model.args.layers": 2, "model.args.seq": 512, "training.precision": "fp8"}
        stated = {key.replace("__", "."): value for key, value in settings.items()}
        asked = question_of("qwen3-30b-a3b", cluster="8xb200", global_batch=64, settings={**keys, **sizes, **stated})
        problem = problem_of(asked)
        made = fixed_plan(problem, asked)
        assert made is not None
        return evaluate(problem, made, samples=0).result.step_s.median

    graphs = step_s(software__cuda_graphs=True)
    assert graphs == step_s()  # of megatron-bridge, which is assumed
    eager = step_s(software__framework="megatron-bridge", software__cuda_graphs=False)
    assert graphs < eager
    earlier = {"software__framework": "megatron-bridge", "software__year": 2026}  # whose recipes of B200 had none
    assert step_s(**earlier, software__cuda_graphs=True) < step_s(**earlier) == step_s(**earlier, software__cuda_graphs=False)
    with pytest.raises(ConfigError, match="does not say apart; drop it"):
        problem_of(question_of("resnet50", cluster="dgx1-v100-32gb", global_batch=64, settings={"software.cuda_graphs": True}))


# Questions that name no framework: which one prices them, what that changes, and that the answer says so.

BY_HAND = {"plan.strategy": "custom", "plan.microbatches": 1}
TP8: dict[str, Any] = {**BY_HAND, "plan.mesh": {"tp": 8}}
FSDP: dict[str, Any] = {**BY_HAND, "plan.mesh": {"dp": 8}, "plan.zero_stage": 3}
SMALL: dict[str, Any] = {"model.args.layers": 2, "model.args.seq": 1024}


def guessed_question(model: str, cluster: str, **settings: Any) -> Question:
    return question_of(model, cluster=cluster, global_batch=64, settings=settings)


QWEN_ADAPTERS = "lora:r=64,targets=q_proj+o_proj+gate_proj+up_proj+down_proj"
"""c_attn, c_proj, w1 and w2 of its script: q, k and v are one product."""


@pytest.mark.parametrize(
    ("seq", "settings", "published_s"),
    [
        (256, {"training.tune": QWEN_ADAPTERS}, 1.0),
        (1024, {"training.tune": QWEN_ADAPTERS}, 1.1),
        (512, {}, 2.2),
    ],
)
def test_host_of_the_trainer_takes_what_was_published(seq: int, settings: dict[str, Any], published_s: float) -> None:
    # QwenLM/Qwen README.md: Qwen-1.8B, an A100, 8 microbatches of 1, all recomputed; all parameters under DeepSpeed's ZeRO 3
    recipe = {"plan.strategy": "single", "plan.recompute": "full", "plan.microbatches": 8, "model.args.seq": seq}
    trainer = {"software.framework": "hf-trainer", **recipe, **settings}
    answer = parsim.plan("qwen-1.8b", "1xa100-sxm-80gb", global_batch=8, settings=trainer)
    assert answer.prediction.step_s.median == pytest.approx(published_s, rel=0.1)


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
    asked = guessed_question(model, cluster, **settings)
    assert asked.guess is not None
    assert (asked.guess.frameworks[0].version, asked.guess.by) == (framework, by)
    assert taken_defaults(asked)["software.framework"] == framework


def test_a_plan_file_says_as_much_as_the_same_keys(tmp_path: Any) -> None:
    answer = parsim.plan("llama3-8b", "8xh100-sxm", global_batch=64, settings={**FSDP, **SMALL})
    answer.prediction.plan.save(tmp_path / "plan.json")
    again = guessed_question("llama3-8b", "8xh100-sxm", **SMALL, **{"plan.strategy": str(tmp_path / "plan.json")})
    assert again.guess == answer.question.guess


@pytest.mark.parametrize(
    ("cluster", "settings"),
    [("dgx1-v100-32gb", {}), ("8xh100-sxm", {"software.framework": "nemo"})],
)
def test_calibrated_machines_and_named_frameworks_are_not_guessed(cluster: str, settings: dict[str, Any]) -> None:
    asked = guessed_question("gpt3-125m", cluster, **settings, **{"plan.strategy": "dp"}, **SMALL)
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
    asked = guessed_question("llama3-8b", "8xh100-sxm")
    assert constraints_of(asked) == PlanConstraints()
    assert problem_of(asked).zero_stage == "auto"


def test_what_the_question_says_of_overlap_counts_more_than_the_guess() -> None:
    problem = problem_of(guessed_question("llama3-8b", "8xh100-sxm", **TP8, **SMALL, **{"plan.tensor_backward_overlap": True}))
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
