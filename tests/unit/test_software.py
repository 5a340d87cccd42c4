"""[software] of a run file: what a framework fills in, what a question states beside it, and what is assumed without one."""

from __future__ import annotations

from typing import Any

import pytest

import parsim
from parsim.app.config import Question, parse_config
from parsim.app.load import fixed_plan, problem_of
from parsim.app.question import question_of, taken_defaults
from parsim.errors import ConfigError
from parsim.model.catalogue.frameworks import FRAMEWORKS, KERNELS, framework_of
from parsim.model.catalogue.names import software_of
from parsim.model.catalogue.transformer import BALANCED
from parsim.model.divided import ExpertRouting
from parsim.model.load import load_model
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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"plan.mesh": {"pp": 4}, "software.framework": "composer"},
            r"plan.mesh.pp = 4 and .* 'composer', whose plans have",
        ),
        (
            {"plan.zero_stage": 3, "software.framework": "ddp"},
            r"plan.zero_stage = 3 and .* 'ddp', which has zero_stage 0 alone",
        ),
        (
            {"plan.zero_stage": 1, "software.framework": "megatron", "software.year": 2020},
            r"plan.zero_stage = 1 and .* 'megatron' in 2020, which has zero_stage 0 alone",
        ),
        (
            {"plan.pipeline_order": "gpipe", "software.framework": "megatron"},
            r"plan.pipeline_order = 'gpipe' and .* 'megatron', which has 1f1b, interleaved alone",
        ),
    ],
)
def test_what_a_framework_does_not_run_is_refused_with_both_keys(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        question_of("gpt3-1.3b", cluster="8xa100-sxm-80gb", global_batch=32, settings=keys)


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


RUN = '[model]\nname = "{}"\n[cluster]\ngpu = "h100-sxm"\n[training]\nglobal_batch = 64\n[software]\n{}\n'


@pytest.mark.parametrize(
    ("model", "text", "parts"),
    [
        ("gpt3-1.3b", 'framework = "megatrn"', ("software.framework", "did you mean megatron")),
        ("gpt3-1.3b", "year = 2021", ("no framework is named", "software.framework")),
        ("gpt3-1.3b", "compiled = true", ("no framework is named", "software.framework")),
        ("gpt3-1.3b", 'framework = "megatron"\nyear = 21', ("software.year", "21")),
        ("gpt3-1.3b", 'framework = "megatron"\nattention = "slow"', ("software.attention", "slow")),
        ("gpt3-1.3b", 'framwork = "megatron"', ("software.framwork", "framework")),
        ("resnet50", 'framework = "megatron"', ("software.framework", "resnet50", "drop it")),
    ],
)
def test_bad_tables_are_refused_with_the_fix(model: str, text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(RUN.format(model, text))
    assert not [part for part in parts if part not in str(refused.value)], str(refused.value)


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"software.delay_weight_gradients": True}, "set software.expert_overlap = true, or drop delay_weight_gradients"),
        ({"software.expert_overlap": True, "plan.recompute": "full"}, 'set recompute = "selective"'),
        (
            {"software.framework": "megatron", "software.expert_overlap": True, **MESH},
            "has 2 stages|this plan has 2 stages, 1 per rank; set plan.pipeline_order",
        ),
        ({"plan.routing_skew": 0.2, "plan.capacity_factor": 1.5}, "changes nothing; drop one of them"),
        ({"plan.routing_skew": -0.2}, "routing_skew"),
        ({"software.dispatcher": "nccl"}, "dispatcher"),
    ],
)
def test_switches_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        question_of("mixtral-8x7b", cluster="8xh100-sxm", global_batch=64, settings=settings)


def test_switches_of_experts_are_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match="about a mixture of experts, and gpt3"):
        question(software__dispatcher="deepep")


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


@pytest.mark.parametrize(
    ("model", "text", "part"),
    [
        ("vit_b_16", 'framework = "megatron"', "software.framework"),
        ("gpt", "channels_last = true", "software.channels_last"),
        ("resnet50", 'attention = "flash"', "software.attention"),
        ("gpt3-1.3b", "channels_last = true", "software.channels_last"),
    ],
)
def test_what_a_model_does_not_have_is_refused(model: str, text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        problem_of(parse_config(IMAGES.format(model, "amp_fp16", text)))


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
