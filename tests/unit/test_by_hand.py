"""Placements, pins and forbids by pattern, and the custom plan they make; every contradiction with rule, values and fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import parsim
from parsim.app.config import parse_config
from parsim.app.functions import plan, simulate
from parsim.app.load import fixed_plan, problem_of
from parsim.errors import ConfigError, ParsimError, PlanError, ScheduleError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.model import Model
from parsim.plans.constraints import PlanConstraints
from parsim.plans.layouts import BATCH, REPLICATE, Placement, parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage, plan_in_words
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
from parsim.search.families import FAMILIES
from parsim.search.search import search
from parsim.search.space import devices_on_a_node, meshes, microbatch_counts
from tests.models import chain_model, residual_model, sharded_model
from tests.theory.test_folding import cluster

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


# Plans in words.

ROW, COLUMN, REPLICATED = Placement("shard", "row", 2), Placement("shard", "column", 2), Placement("replicate")


def planned(pp: int = 1, dp: int = 1, tp: int = 1, placements: tuple[Placement, ...] = (), **more: object) -> Plan:
    mesh = Mesh(pp=pp, dp=dp, tp=tp)
    names = [("a", "b"), ("c", "d")][:pp] if pp > 1 else [("a", "b")]
    stages = tuple(
        Stage(components=own, ranks=mesh.stage_ranks(number), placements=placements) for number, own in enumerate(names)
    )
    return Plan(strategy="custom", mesh=mesh, stages=stages, global_batch=32, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (planned(), "one device"),
        (planned(dp=4), "4-way data parallelism"),
        (planned(dp=4, zero_stage=2, microbatches=2), "4-way data parallelism with ZeRO 2, 2 microbatches of 4"),
        (planned(pp=2, microbatches=4, pipeline_order="1f1b"), "2 pipeline stages, 4 microbatches of 8"),
        (
            planned(pp=2, dp=2, microbatches=4, pipeline_order="1f1b"),
            "2 pipeline stages of 2-way data parallelism, 4 microbatches of 4",
        ),
        (planned(tp=2, placements=(COLUMN, ROW)), "2-way tensor parallelism"),
        (planned(tp=2, placements=(COLUMN, REPLICATED)), "2-way tensor parallelism"),
        (planned(tp=2, placements=(BATCH, ROW)), "mixed placements on 2 ranks"),
        (planned(tp=2, dp=2, placements=(COLUMN, ROW)), "2-way data parallelism x 2-way tensor parallelism"),
        (planned(dp=2, recompute=("a",)), "2-way data parallelism, recomputing activations"),
    ],
)
def test_a_plan_in_words(plan: Plan, words: str) -> None:
    assert plan_in_words(plan) == words


# plan.dp_shard of a run file: read, kept by a search, and refused with the rule, the values and the fix.

TWO_NODES = {"cluster.nodes": 2, "cluster.devices": 4, "cluster.network": "ethernet-25g"}
BY_HAND = {"plan.strategy": "custom", "plan.mesh": {"dp": 8}}


def asked(**settings: object) -> Mesh:
    keys = {**TWO_NODES, **BY_HAND, **{f"plan.{key}": value for key, value in settings.items()}}
    return simulate("mlp", cluster="dgx1-v100-32gb", global_batch=64, settings=keys).plan.mesh


def test_a_plan_by_hand_has_the_groups_that_it_names() -> None:
    assert asked(dp_shard=4, zero_stage=3) == Mesh(dp=8, dp_shard=4)
    assert asked(dp_shard=8, zero_stage=3) == asked(zero_stage=3) == Mesh(dp=8)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dp_shard": 3, "zero_stage": 3}, r"dp_shard \(3\) must divide dp \(8\).*the nearest that do: 2 or 4"),
        ({"dp_shard": 4, "zero_stage": 0}, r"dp_shard = 4 .*zero_stage = 0 divides none; set zero_stage = 1, 2 or 3"),
        ({"dp_shard": 4}, r"a plan by hand divides none unless it says so; set zero_stage = 1, 2 or 3"),
        ({"dp_shard": 4, "strategy": "dp", "mesh": {}, "synchronisation": "average/8"}, r"drop dp_shard"),
        ({"dp_shard": 5, "strategy": "dp", "mesh": {}}, r"dp_shard \(5\) must divide mesh.dp.* devices \(8\).*: 4 or 8"),
    ],
)
def test_groups_without_states_to_divide_are_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ParsimError, match=text):
        asked(**settings)


def test_a_search_keeps_the_groups_that_are_asked_for() -> None:
    keys = {**TWO_NODES, "plan.dp_shard": 2, "plan.strategy": "dp"}
    answer = plan("mlp", cluster="dgx1-v100-32gb", global_batch=64, settings=keys)
    chosen = answer.chosen.plan
    assert (chosen.mesh.dp_shard or chosen.mesh.dp) == 2
    assert chosen.zero_stage


def test_a_search_tries_groups_of_a_node_where_replicas_span_several() -> None:
    problem = PlanningProblem(model=chain_model(), cluster=cluster("two dgx1"), global_batch=64)
    assert devices_on_a_node(problem) == 8
    grouped = {mesh for mesh in meshes(problem) if mesh.dp_shard}
    assert {(mesh.pp, mesh.dp, mesh.tp, mesh.dp_shard) for mesh in grouped} == {
        (1, 16, 1, 8), (1, 8, 2, 4), (1, 4, 4, 2)
    }  # fmt: skip
    one_node = PlanningProblem(model=chain_model(), cluster=cluster("dgx1"), global_batch=64)
    assert not any(mesh.dp_shard for mesh in meshes(one_node))
    whole = PlanningProblem(model=chain_model(), cluster=cluster("two dgx1"), global_batch=64, zero_stage=0)
    assert not any(mesh.dp_shard for mesh in meshes(whole))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_search_finds_the_best_of_all_members_with_groups(stage: int) -> None:
    """Branch and bound against every plan of the family simulated."""
    from parsim.predict.evaluate import evaluate

    model = chain_model((1e8, 2e8), elements=10**6)
    constraints = PlanConstraints(dp=16)
    problem = PlanningProblem(
        model=model, cluster=cluster("two dgx1"), global_batch=64, zero_stage=stage, recompute="none", constraints=constraints
    )
    members = list(FAMILIES["dp"](problem))
    assert {member.mesh.dp_shard for member in members} == {0, 8}
    best = min(evaluate(problem, member, samples=0).result.step_s.median for member in members)
    found = search(problem, ("dp",)).chosen
    assert found is not None
    assert found.result.step_s.median <= best * (1 + 1e-9)
    assert found.result.lower_bound_s <= best * (1 + 1e-9)


# Divided sequences and experts as a user asks for them: run files, answers, refusals.

DIVIDED_RUN = """
[model]
name = "gpt"
[cluster]
gpu = "h100-sxm"
gpus_per_node = 8
[training]
global_batch = 16
precision = "amp_bf16"
optimizer = "adamw"
dataset = "synthetic"
[plan]
"""


def run_file(folder: Path, plan: str) -> Path:
    path = folder / "RUN.toml"
    path.write_text(DIVIDED_RUN + plan)
    return path


def test_a_divided_sequence_is_simulated_and_told(tmp_path: Path) -> None:
    found = parsim.simulate(
        run_file(tmp_path, 'strategy = "custom"\nmesh = { dp = 4, cp = 2 }\ncontext_exchange = "all_gather"')
    )
    document = found.to_dict()
    assert document["plan"]["mesh"] == {"pp": 1, "dp": 4, "tp": 1, "cp": 2}
    assert document["plan"]["executable"] is False
    assert document["plan"]["context_exchange"] == "all_gather"
    assert "cp=2" in repr(found)
    assert len(document["peak_memory_bytes"]) == 8


def test_a_search_keeps_the_pieces_of_the_sequence(tmp_path: Path) -> None:
    chosen = parsim.plan(run_file(tmp_path, 'strategy = "dp"\nmesh = { cp = 2 }')).to_dict()["chosen"]
    assert chosen["plan"]["mesh"] == {"pp": 1, "dp": 4, "tp": 1, "cp": 2}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ('strategy = "custom"\nmesh = { dp = 8, ep = 2 }', "has no experts"),
        ('strategy = "custom"\nmesh = { dp = 4, cp = 3 }', r"cp \(3\) = 12 must equal the devices \(8\)"),
        ('strategy = "custom"\nmesh = { dp = 8, ep = 3 }', r"ep \(3\) must divide dp \(8\)"),
        ('strategy = "custom"\nmesh = { dp = 8 }\ncontext_exchange = "ring"', "context_exchange"),
        ('strategy = "dp"\nmesh = { cp = 2 }\ncontext_exchange = "all_gather"', "context_exchange"),
        ('strategy = "custom"\nmesh = { dp = 8 }\ncapacity_factor = 0.5', "capacity_factor"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(tmp_path: Path, plan: str, message: str) -> None:
    with pytest.raises((ConfigError, ParsimError), match=message):
        parsim.simulate(run_file(tmp_path, plan))
