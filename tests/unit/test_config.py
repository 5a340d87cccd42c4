"""RUN.toml: precedence, round trip, and one clear message per kind of mistake."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.app.config import Question, constraints_of, load_config, mesh_of, parse_config
from parsim.app.config_text import parse_overrides
from parsim.errors import ConfigError
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
    assert constraints_of(parse_config(text).plan) == PlanConstraints(pp=2, microbatches=4)
    searched = parse_config(text, ["plan.strategy=hp"]).plan
    assert constraints_of(searched) == PlanConstraints(pp=2, microbatches=4)
    assert searched.zero_stage == 1


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


MISTAKES = [
    (["training.optimzer=adam"], r"unknown key training.optimzer \(= 'adam'\); did you mean optimizer"),
    (["trainning.seed=1"], r"unknown key trainning .*did you mean training\?"),
    (["plan.mesh.px=3"], r"unknown key plan.mesh.px .*did you mean"),
    (["training.optimizer=adma"], r"training.optimizer = 'adma' is unknown; did you mean adam"),
    (["training.precision=fp9"], r"training.precision = 'fp9' is unknown.*fp8"),
    (["training.master_weights=true"], r"training.master_weights = true belongs to precision = .bf16. alone"),
    (["training.dtype=float64", "training.precision=bf16"], r"training.dtype = 'float64' and training.precision = 'bf16'"),
    (["training.dataset=imagenet"], r"training.dataset = 'imagenet' is unknown.*digits"),
    (["training.global_batch=many"], r"training.global_batch = 'many': must be a whole number; for example global_batch = "),
    (["training.global_batch=1.5"], r"training.global_batch = 1.5: must be a whole number"),
    (["training.global_batch=true"], r"training.global_batch = True: must be a whole number"),
    (["training.global_batch=0"], r"training.global_batch = 0: must be >= 1"),
    (["training.learning_rate=-1"], r"training.learning_rate = -1: must be > 0"),
    (["training.learning_rate=nan"], r"training.learning_rate = nan: must be"),
    (["cluster.devices=all"], r"cluster.devices = 'all': must be a number of devices >= 1 or a list of device numbers"),
    (["cluster.devices=[0, 'a']"], r"cluster.devices"),
    (["cluster.devices=[0, 0]"], r"cluster.devices = \[0, 0\]: list every device once"),
    (["cluster.devices=[]"], r"cluster.devices = \[\]: list every device once, and at least one"),
    (["cluster.nodes=2"], r"cluster.nodes = 2 needs cluster.network between the nodes; for example network = "),
    (["cluster.devices.x=3"], r"cluster.devices.x cannot be set, since cluster.devices = 8 is not a table"),
    (["model.name=3"], r"model.name = 3: must be text in quotes"),
    (["model.args.layers=[1, 2]"], r"model.args.layers = \[1, 2\]: must hold text, finite numbers, true or false"),
    (["model.input_shape=3"], r"model.input_shape = 3: must be a list; for example input_shape = "),
    (["model.input_shape=[3, 0]"], r"model.input_shape.1 = 0: must be >= 1"),
    (["plan.strategy=adaptve"], r"plan.strategy = 'adaptve' is unknown; did you mean adaptive\?"),
    (["plan.zero_stage=4"], r"plan.zero_stage = 4: it is 0, 1 .optimizer state divided., 2 .* or 3 "),
    (["plan.zero_stage=1", "plan.strategy=x/plan.json"], r"plan.zero_stage = 1: the plan is read from .*drop zero_stage"),
    (["model.granularity=blocks"], r"model.granularity = 'blocks' is unknown; did you mean block"),
    (
        ["plan.placements={ head = 'batch' }"],
        r"plan.placements fixes all placements by hand.*set strategy = .custom., or name those",
    ),
    (
        ["plan.strategy=custom", "plan.mesh.tp=8", "plan.placements={ head = 'shard:column' }"],
        r"plan.placements.'head' = 'shard:column': cannot read placement .*write batch, replicate, shard:RULE/WAYS or place:",
    ),
    (["plan.placements={ head = 1 }"], r"plan.placements.head = 1: must be text in quotes; for example placements = "),
    (["plan.pin={ head = 'place' }"], r"plan.pin.'head' = 'place': cannot read placement"),
    (["plan.forbid={ head = ['replicat'] }"], r"plan.forbid.'head' = 'replicat': .*did you mean replicate"),
    (["plan.forbid={ head = 'batch' }"], r"plan.forbid.head = 'batch': must be a list; for example forbid = "),
    (
        ["plan.pin={ head = 'place:0' }", "plan.strategy=custom", "plan.mesh.tp=8"],
        r"plan.pin steers the search for an adaptive plan, but plan.strategy = 'custom'; set strategy = \"adaptive\" or",
    ),
    (["plan.recompute=ful"], r"plan.recompute = 'ful' is unknown; did you mean full.*list of component names"),
    (["plan.recompute=full", "plan.strategy=x/plan.json"], r"plan.recompute = 'full': the plan is read from .*drop recompute"),
    (["plan.pipeline_order=1f1c", "plan.strategy=custom", "plan.mesh.dp=8"], r"plan.pipeline_order = '1f1c' is unknown.*1f1b"),
    (["plan.strategy=custom"], r'plan.strategy = "custom" needs plan.mesh'),
    (
        ["plan.mesh.tp=3"],
        r"mesh tp \(3\) must divide the devices \(8\); .* do: 2 or 4; or ask for devices = 9",
    ),
    (["plan.zero_stage=all"], r"plan.zero_stage = 'all': must be 0, 1, 2, 3 or \"auto\""),
    (["plan.recompute=selectiv"], r"plan.recompute = 'selectiv' is unknown.*selective.*\"selective:NAME\" for one by operator"),
    (
        ["plan.strategy=custom", "plan.mesh.pp=3", "plan.mesh.dp=2"],
        r"pp \(3\) \* dp \(2\) \* tp \(1\) = 6 must equal the devices \(8\); change the axes or ask for devices = 6",
    ),
    (["plan.strategy=x/plan.json", "plan.bucket_bytes=3"], r"plan.bucket_bytes constrains a search.*read from that file"),
    (["seed=3"], r"--set 'seed=3': write it as section.key=value"),
    (["training.seed"], r"--set 'training.seed': write it as section.key=value"),
    (["training..seed=1"], r"--set 'training..seed=1': write it as section.key=value"),
]


@pytest.mark.parametrize(("overrides", "message"), MISTAKES, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_a_mistake_is_named_with_its_path_value_and_fix(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(BASE, overrides)


def test_several_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("[model]\nnam = 'x'\n")
    text = str(caught.value)
    for part in ("model.name is missing", "unknown key model.nam", "cluster is missing", "training is missing"):
        assert part in text


def test_a_key_with_dots_in_it_is_reported_too() -> None:
    with pytest.raises(ConfigError, match=r"unknown key training\.global\.batch"):
        parse_config(BASE + '"global.batch" = 3\n')


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run file .*absent\.toml"):
        load_config(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not TOML: .*line 1"):
        load_config(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(broken)
    with pytest.raises(ConfigError, match="cannot read run file"):
        load_config(tmp_path)


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
