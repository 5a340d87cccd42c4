"""Stages as numbers of layers: a question says them, or its framework counts them out; torchtitan's and Megatron's rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import parsim
from parsim.errors import ConfigError
from parsim.plans.stages import as_megatron, rest_in_last, with_ends

COUNTS = st.integers(1, 130)


@given(COUNTS, st.integers(1, 40), st.integers(0, 3), st.integers(0, 3))
def test_stages_with_ends_are_even_and_the_earliest_are_larger(layers: int, stages: int, first: int, last: int) -> None:
    counts = with_ends(layers, stages, first, last)
    if counts is None:
        assert (layers + first + last) // stages < max(1, first, last)
        return
    filled = [*counts]
    filled[0] += first
    filled[-1] += last
    assert sum(counts) == layers
    assert min(counts) >= 0
    assert filled == sorted(filled, reverse=True)
    assert filled[0] - filled[-1] <= 1


@given(COUNTS, st.integers(1, 40))
def test_megatron_cuts_equally_or_takes_one_layer_from_an_end(layers: int, stages: int) -> None:
    counts = as_megatron(layers, stages)
    assert (counts is None) == all((layers + ends) % stages for ends in range(3))
    if counts is not None:
        assert sum(counts) == layers
        assert len(set(counts[1:-1])) <= 1


def stages_of(**settings: Any) -> list[int]:
    """Layers of each stage of an answer for GPT-2 of 12 layers on a pipeline of two."""
    keys = {"plan.strategy": "custom", "plan.mesh": {"pp": 2, "dp": 4}, "plan.microbatches": 4}
    keys |= {key.replace("__", "."): value for key, value in settings.items()}
    plan = parsim.plan("gpt2", cluster="8xh100-sxm", global_batch=64, settings=keys).chosen.plan
    names = ([name.split(".")[1] for name in stage.components if name.startswith("h.")] for stage in plan.stages)
    return [len(set(stage)) for stage in names]


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({"software__framework": "megatron"}, [6, 6]),
        ({"software__framework": "torchtitan"}, [6, 6]),
        ({"software__framework": "megatron", "model__args": {"layers": 11}}, [6, 5]),
        ({"software__framework": "torchtitan", "model__args": {"layers": 11}}, [6, 5]),
        ({"plan__stage_layers": [9, 3]}, [9, 3]),
        ({"plan__stage_layers": [12, 0], "software__framework": "megatron"}, [12, 0]),
    ],
)
def test_a_plan_has_the_stages_that_are_counted_out(settings: dict[str, Any], counts: list[int]) -> None:
    assert stages_of(**settings) == counts


def test_layers_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"puts 13 layers into stages, and GPT-2.* has 12"):
        stages_of(plan__stage_layers=[9, 4])


def test_a_cut_that_the_framework_does_not_make_is_assumed_aloud() -> None:
    keys = {"plan.strategy": "custom", "plan.mesh": {"pp": 5}, "software.framework": "megatron", "plan.microbatches": 8}
    answer = parsim.plan("gpt2", cluster="5xh100-sxm", global_batch=64, settings=keys)
    assert "megatron does not cut 12 layers evenly into 5 stages" in " ".join(answer.problem.model.assumptions)


@pytest.mark.parametrize(
    ("stages", "counts"),
    [(4, [16, 16, 16, 13]), (16, [4] * 15 + [1]), (32, [1, *[2] * 30, 0]), (24, None)],
)
def test_layouts_of_recipes_hold_what_no_equal_cut_does(stages: int, counts: list[int] | None) -> None:
    assert rest_in_last(61, stages) == counts
