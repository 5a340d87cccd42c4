"""Placements, pins and forbids by pattern, and the custom plan they make; every contradiction with rule, values and fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from parsim.app.config import parse_config
from parsim.app.load import fixed_plan, problem_of
from parsim.errors import ConfigError, PlanError, ScheduleError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.model import Model
from parsim.plans.layouts import BATCH, REPLICATE, Placement, parse_placement
from parsim.plans.mesh import Mesh
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.by_hand import (
    components_of,
    custom_plan,
    forbids_by_pattern,
    parse_placements,
    pins_by_pattern,
    placements_by_pattern,
)
from parsim.search.space import microbatch_counts
from tests.models import residual_model, sharded_model

MODEL = sharded_model()


@cache
def problem(**changes: Any) -> PlanningProblem:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), 4)
    return replace(PlanningProblem(model=MODEL, cluster=cluster, global_batch=64), **changes)


def placed(patterns: Mapping[str, str], model: Model = MODEL) -> dict[str, str]:
    found = placements_by_pattern(parse_placements(patterns), model)
    return {name: str(placement) for name, placement in found.items()}


def test_the_first_pattern_that_matches_counts_and_the_rest_is_batch_sharded() -> None:
    assert placed({"[ac]": "shard:column/2", "b": "place:1"}) == {
        "a": "shard:column/2",
        "b": "place:1",
        "c": "shard:column/2",
        "d": "batch",
        "loss": "batch",
    }
    assert placed({"d": "batch", "*": "replicate"})["loss"] == "replicate"
    assert placed({"d": "batch", "*": "replicate"})["d"] == "batch"
    assert components_of("?", MODEL, "k") == ("a", "b", "c", "d")


WRONG: list[tuple[dict[str, str], str]] = [
    ({"los": "batch"}, r"plan.placements.'los' means no component of sharded at granularity block; did you mean loss\?"),
    ({"[ac]": "batch", "a": "place:0"}, r"plan.placements.'a' = 'place:0' never applies.*\(a\); move it up or drop it"),
    ({"a": "shard:row/2"}, r"'shard:row/2': component a has no sharding rule 'row'; it has column; choose one of its rules"),
    ({"a": "shard:column/3"}, r"by rule column: 3 must divide 16 .*nearest: 2 or 4; choose ways that divide 16, or batch"),
    ({"loss": "shard:column/2"}, r"component loss has no sharding rule 'column'; it has none: .*; choose batch, replicate or"),
]


@pytest.mark.parametrize(("patterns", "message"), WRONG, ids=lambda value: str(value)[:30])
def test_a_wrong_pattern_says_what_is_wrong_and_what_to_write(patterns: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(patterns)


def pins(patterns: Mapping[str, str], model: Model = MODEL) -> tuple[tuple[str, Placement], ...]:
    return pins_by_pattern(parse_placements(patterns), model, 4)


def test_pins_and_forbids_decide_what_a_component_may_have() -> None:
    pinned = pins({"loss": "place:0"})
    forbids = forbids_by_pattern({"*": ["replicate"], "[ac]": ["shard"], "b": ["shard:row/4"]}, MODEL, pinned)
    asked = problem(pins=pinned, forbids=forbids)
    assert pinned == (("loss", parse_placement("place:0")),)
    assert asked.allows("loss", parse_placement("place:0"))
    assert not asked.allows("loss", parse_placement("place:1"))
    assert not asked.allows("loss", BATCH)
    assert asked.allows("a", BATCH)
    assert not asked.allows("a", REPLICATE)
    assert not asked.allows("a", parse_placement("shard:column/2"))
    assert asked.allows("b", parse_placement("shard:row/2"))
    assert not asked.allows("b", parse_placement("shard:row/4"))
    assert problem().allows("a", REPLICATE)


CONTRADICTIONS: list[tuple[dict[str, str], str]] = [
    ({"a": "batch", "[ab]": "replicate"}, r"plan.pin contradicts itself: a is batch by 'a' and replicate by '\[ab\]'"),
    ({"e": "batch"}, r"plan.pin.'e' means no component"),
    ({"a": "shard:column/16"}, r"ways \(16\) must be at least 2 and divide the devices \(4\)"),
    ({"a": "place:4"}, r"there is no tp rank 4 on 4 devices"),
]


@pytest.mark.parametrize(("patterns", "message"), CONTRADICTIONS, ids=lambda value: str(value)[:30])
def test_pins_that_cannot_be_kept(patterns: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pins(patterns)


def test_pins_on_one_device_and_on_tied_components() -> None:
    with pytest.raises(ConfigError, match="nothing to replicate over on one device"):
        pins_by_pattern({"a": REPLICATE}, MODEL, 1)
    tied = residual_model(tied=True)
    with pytest.raises(ConfigError, match=r"a \(batch\) and d \(place:1\) share the parameter a.weight.*pin them alike"):
        pins({"a": "batch", "d": "place:1"}, tied)
    assert len(pins({"a": "batch", "d": "batch"}, tied)) == 2


def test_forbids_that_leave_nothing() -> None:
    with pytest.raises(ConfigError, match=r"a is pinned to shard:column/2, and shard is forbidden by '\*'; drop one"):
        forbids_by_pattern({"*": ["shard"]}, MODEL, pins({"a": "shard:column/2"}))
    with pytest.raises(ConfigError, match=r"plan.forbid leaves loss no placement: batch, replicate, place are all"):
        forbids_by_pattern({"*": ["batch"], "loss": ["replicate", "place"]}, MODEL)
    assert forbids_by_pattern({"a": ["batch", "replicate", "place"]}, MODEL) == (
        ("a", "batch"),
        ("a", "replicate"),
        ("a", "place"),
    ), "a can still be sharded"


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_custom_plan_carries_its_placements_and_zero_stage() -> None:
    chosen = placements_by_pattern(parse_placements({"[ac]": "shard:column/2", "[bd]": "shard:row/2"}), MODEL)
    asked = problem(zero_stage=1)
    plan = custom_plan(asked, Mesh(dp=2, tp=2), placements=chosen, microbatches=2)
    assert [str(placement) for _, placement in plan.stages[0].placed()] == [
        "shard:column/2",
        "shard:row/2",
        "shard:column/2",
        "shard:row/2",
        "batch",
    ]
    assert (plan.zero_stage, plan.mesh.tp, plan.microbatch_samples) == (1, 2, 16)
    result = evaluate(asked, plan, samples=0).result
    assert result.step_s.median > 0
    assert result.fits


def test_stages_of_a_custom_plan_are_balanced_by_the_work_of_their_placements() -> None:
    """d alone does the work of all ranks: its stage gets nothing else but the loss."""
    chosen = placements_by_pattern({"d": REPLICATE}, MODEL)
    plan = custom_plan(problem(global_batch=2**20), Mesh(pp=2, tp=2), placements=chosen)
    assert [stage.components for stage in plan.stages] == [("a", "b", "c"), ("d", "loss")]
    even = custom_plan(problem(), Mesh(pp=2, dp=2))
    assert [name for stage in even.stages for name in stage.components] == ["a", "b", "c", "d", "loss"]
    assert not even.is_mixed


def test_a_custom_plan_that_does_not_divide() -> None:
    with pytest.raises(PlanError, match=r"global_batch \(64\) must be divisible by dp \(3\) .* = 3; the nearest that is: 63"):
        custom_plan(problem(), Mesh(dp=3, tp=2), placements={"a": BATCH})
    with pytest.raises(PlanError, match="ways must be at least 2 and divide tp"):
        custom_plan(problem(), Mesh(tp=2), placements={"a": parse_placement("shard:column/4")})
    with pytest.raises(PlanError, match="cuts each microbatch of 1 samples into 4 pieces"):
        custom_plan(problem(), Mesh(tp=4), placements={"a": BATCH}, microbatches=64)


RUN = """
[model]
name = "{model}"
[cluster]
profile = "dgx1-v100-32gb"
devices = 4
[training]
global_batch = 64
[plan]
"""


def test_from_the_run_file_to_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "sharded.json"
    MODEL.save(path)
    text = RUN.format(model=path)
    custom = text + 'strategy = "custom"\nmesh = { tp = 4 }\nplacements = { "[ac]" = "shard:column/4", "loss" = "place:0" }\n'
    config = parse_config(custom, ["plan.zero_stage=1"])
    plan = fixed_plan(problem_of(config), config)
    assert plan is not None
    written = "a shard:column/4 | b batch | c shard:column/4 | d batch | loss place:0"
    assert plan.summary() == f"custom pp=1 dp=1 tp=4 mb=1x64 zero1 [{written}]"
    steered = parse_config(text + 'strategy = "adaptive"\npin = { "d" = "batch" }\nforbid = { "*" = ["replicate"] }\n')
    asked = problem_of(steered)
    assert asked.pins == (("d", BATCH),)
    assert len(asked.forbids) == 5
    with pytest.raises(ConfigError, match=r"holds a finished Model of granularity block: model.granularity = 'layer' cannot"):
        problem_of(parse_config(text, ["model.granularity=layer"]))


def test_a_batch_norm_of_one_value_per_channel_needs_two_samples_at_once() -> None:
    """torch 2.13: batch_norm of one value per channel cannot train. ResNet-50 at 32 x 32 ends in maps of 1 x 1; larger maps,
    as a convolution's, may have one sample."""
    torch = pytest.importorskip("torch")
    from parsim.model.load import model_from_module

    features = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    model = model_from_module(features, input_shape=(8,), granularity="layer")
    assert model.least_samples == {"1": 2}
    images = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(32, 4))
    assert not model_from_module(images, input_shape=(3, 4, 4), granularity="layer").least_samples
    asked = problem(model=model, global_batch=8)
    assert microbatch_counts(asked, Mesh(dp=2)) == [1, 2]
    assert custom_plan(asked, Mesh(dp=2), microbatches=2).microbatch_samples == 2
    with pytest.raises(PlanError, match=r"1 would see 1 sample at once and needs 2: its batch norm has one value per channel"):
        custom_plan(asked, Mesh(dp=2), microbatches=4)
    with pytest.raises(ScheduleError, match=r"leaves 1 sample per replica, and 1 needs 2 at once .*; use a multiple of 8"):
        microbatch_counts(replace(asked, global_batch=4), Mesh(dp=4))
