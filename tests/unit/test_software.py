"""[software] of a run file: what a framework fills in, what a question states beside it, and what is assumed without one."""

from __future__ import annotations

from typing import Any

import pytest

from parsim.app.config import Question, parse_config
from parsim.app.load import fixed_plan, problem_of
from parsim.app.question import question_of, taken_defaults
from parsim.errors import ConfigError
from parsim.model.catalogue.frameworks import FRAMEWORKS, KERNELS, framework_of
from parsim.model.catalogue.names import software_of
from parsim.plans.plan import Plan

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
    assert (unknown.zero_stage, unknown.gather_ahead, unknown.scatter_gather, unknown.clip_gradients) == (
        0,
        False,
        False,
        False,
    )
    assert (megatron.zero_stage, megatron.gather_ahead, megatron.scatter_gather, megatron.clip_gradients) == (
        1,
        True,
        True,
        True,
    )
    stated = plan(software__framework="megatron", plan__gather_ahead=False, plan__zero_stage=2, plan__recompute="full")
    assert (stated.gather_ahead, stated.zero_stage, stated.recompute) == (False, 2, "full")


def test_a_version_is_that_of_its_year() -> None:
    old, new = (plan(software__framework="megatron", software__year=year) for year in (2020, 2025))
    assert (old.recompute, old.blocking_transfers, old.zero_stage) == ("full", True, 0)
    assert (new.recompute, new.blocking_transfers, new.zero_stage) == ("none", False, 1)
    assert framework_of("megatron", 2021).until == 2021


def test_switches_of_axes_that_a_plan_has_not_stay_off() -> None:
    alone = plan(software__framework="megatron", plan__mesh={"pp": 1, "dp": 8, "tp": 1})
    assert (alone.scatter_gather, alone.tensor_overlap, alone.gather_ahead) == (False, False, True)


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


def test_what_the_model_states_counts_more_than_the_framework() -> None:
    asked = question(software__framework="megatron", model__args={"kernels": "eager"})
    assert dict(asked.model_spec.args)["kernels"] == "eager"


def test_an_unknown_framework_is_among_what_was_assumed() -> None:
    assert taken_defaults(question())["software.framework"] == "unknown"
    assert "software.framework" not in taken_defaults(question(software__framework="fsdp"))


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
