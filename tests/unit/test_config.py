"""RUN.toml: precedence and round trip. Mistakes are in test_bad_input."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.app.config import Question, constraints_of, load_config, mesh_of, parse_config
from parsim.app.config_text import parse_overrides
from parsim.model.spec import ModelSpec
from parsim.plans.constraints import PlanConstraints
from parsim.plans.mesh import Mesh

BASE = """
[model]
name = "resnet50"
args = { num_classes = 100 }
input_shape = [3, 224, 224]
[cluster]
profile = "dgx1-v100-32gb"
devices = 8
[training]
global_batch = 1024
"""


def test_defaults_fill_what_the_file_leaves_out() -> None:
    config = parse_config(BASE)
    assert config.model_spec == ModelSpec(name="resnet50", args=(("num_classes", 100),), input_shape=(3, 224, 224))
    assert (config.devices, config.cluster.nodes) == (8, 1)
    assert (config.training.precision, config.training.optimizer, config.training.seed) == ("fp32", "sgd_momentum", 0)
    assert (config.plan.strategy, config.plan.zero_stage, config.plan.recompute) == ("adaptive", "auto", "auto")
    assert config.training.resolved_learning_rate == 0.05


def test_command_line_beats_file_beats_defaults() -> None:
    text = BASE + 'optimizer = "adam"\n'
    assert parse_config(text).training.optimizer == "adam"
    changed = parse_config(text, ["training.optimizer=adamw", "cluster.devices=[0, 3]", "training.learning_rate=1e-2"])
    assert changed.training.optimizer == "adamw"
    assert changed.devices == [0, 3]
    assert changed.training.resolved_learning_rate == 0.01


def test_the_last_override_of_a_key_wins() -> None:
    assert parse_config(BASE, ["training.seed=1", "training.seed=2"]).training.seed == 2


def test_an_override_reaches_into_a_table_and_keeps_the_rest() -> None:
    config = parse_config(BASE, ["model.args.width=64", "plan.strategy=custom", "plan.mesh.pp=2", "plan.mesh.dp=4"])
    assert dict(config.model.args) == {"num_classes": 100, "width": 64}
    assert config.plan.mesh is not None
    assert (config.plan.mesh.pp, config.plan.mesh.dp, config.plan.mesh.tp) == (2, 4, None)
    assert mesh_of(config.plan) == Mesh(pp=2, dp=4)


def test_override_values_are_toml_and_strings_may_be_bare() -> None:
    texts = ['a.x="q"', "a.y=q", "a.z=true", "a.u=1_000", "a.v=[1, 2]", "a.w={ p = 1 }", "a.e=", "a.path=x=y"]
    expected = {"x": "q", "y": "q", "z": True, "u": 1000, "v": [1, 2], "w": {"p": 1}, "e": "", "path": "x=y"}
    assert parse_overrides(texts) == {"a": expected}


def test_another_strategy_on_the_command_line_replaces_a_plan_written_by_hand() -> None:
    text = BASE + '[plan]\nstrategy = "custom"\nmesh = { pp = 2, dp = 4 }\nmicrobatches = 4\nbucket_bytes = 1000\n'
    assert parse_config(text).plan.microbatches == 4
    searched = parse_config(text, ["plan.strategy=dp"])
    assert (searched.plan.strategy, searched.plan.mesh, searched.plan.microbatches) == ("dp", None, None)
    assert searched.plan.bucket_bytes is None


def test_constraints_of_a_search_stay_under_another_strategy() -> None:
    text = BASE + "[plan]\nmesh = { pp = 2 }\nmicrobatches = 4\nzero_stage = 1\n"
    assert constraints_of(parse_config(text)) == PlanConstraints(pp=2, microbatches=4)
    searched = parse_config(text, ["plan.strategy=hp"])
    assert constraints_of(searched) == PlanConstraints(pp=2, microbatches=4)
    assert searched.plan.zero_stage == 1


def test_another_strategy_drops_what_steers_an_adaptive_search_unless_it_is_adaptive() -> None:
    text = BASE + '[plan]\npin = { head = "place:0" }\nforbid = { "*" = ["replicate", "shard:row/2"] }\n'
    kept = parse_config(text, ["plan.strategy=adaptive"]).plan
    assert (kept.pin, kept.forbid) == ({"head": "place:0"}, {"*": ("replicate", "shard:row/2")})
    searched = parse_config(text, ["plan.strategy=dp", "plan.zero_stage=3"]).plan
    assert (searched.pin, searched.forbid, searched.zero_stage) == ({}, {}, 3)


def test_placements_keep_their_order_through_the_resolved_file() -> None:
    table = 'placements = { "b.*" = "shard:heads+row/2", "a.b" = "place:0", "*" = "batch" }'
    text = BASE + f'[plan]\nstrategy = "custom"\nmesh = {{ dp = 4, tp = 2 }}\nzero_stage = 1\n{table}\n'
    config = parse_config(text, ["model.granularity=sublayer"])
    again = parse_config(config.to_toml())
    assert again == config
    assert again.plan.placements is not None
    assert list(again.plan.placements) == ["b.*", "a.b", "*"]
    assert again.model.granularity == "sublayer"


def test_relative_paths_start_at_the_file_and_overrides_at_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    file = tmp_path / "RUN.toml"
    file.write_text(BASE.replace("dgx1-v100-32gb", "mine.json"))
    assert load_config(file).cluster.profile == str(tmp_path / "mine.json")
    other = load_config(file, ["cluster.profile=other.json", "plan.strategy=sub/plan.json"])
    assert other.cluster.profile == str(tmp_path / "here" / "other.json")
    assert other.plan.plan_path == tmp_path / "here" / "sub" / "plan.json"
    assert parse_config(other.to_toml(), folder=Path("/")) == other


def test_a_factory_is_not_a_path() -> None:
    assert parse_config(BASE, ["model.name=package.module:factory"]).model.name == "package.module:factory"


def test_a_config_cannot_be_changed() -> None:
    config = parse_config(BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.training.seed = 3  # type: ignore[misc]


texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12)
scalars = st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | texts


@given(args=st.dictionaries(texts, scalars, max_size=4), batch=st.integers(1, 10**6), rate=st.floats(1e-300, 1e300))
def test_the_resolved_config_reads_back_equal(args: dict[str, Any], batch: int, rate: float) -> None:
    document = tomllib.loads(BASE)
    document["model"]["args"] = args
    document["training"].update(global_batch=16 * batch, learning_rate=rate)
    document["plan"] = {"strategy": "custom", "mesh": {"dp": 8}, "microbatches": 2}
    config = Question.model_validate(document)
    again = parse_config(config.to_toml())
    assert again == config
    assert again.model_spec == config.model_spec
