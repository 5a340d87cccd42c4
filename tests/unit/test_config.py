"""RUN.toml: precedence and round trip. Mistakes are in test_bad_input."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.app.config import Question, constraints_of, load_config, mesh_of, parse_config
from parsim.app.config_text import changes_of, parse_overrides
from parsim.app.launch import samples_not_taken
from parsim.app.question import USUAL_SAMPLES, USUAL_TOKENS, question_of, taken_defaults
from parsim.cli import ELSEWHERE, KEYS
from parsim.errors import ProfileError
from parsim.hardware.parts import load_gpu, machines_of
from parsim.model.spec import ModelSpec
from parsim.plans.constraints import PlanConstraints
from parsim.plans.mesh import Mesh
from parsim.units import parse_count
from tests.commands import status_of

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


# [training] of a run file: what it takes, and what each wrong key says.

FILE = """\
[model]
name = "mlp"
[cluster]
profile = "dgx1-v100-32gb"
[training]
global_batch = 16
"""


def config_of(more: str) -> Question:
    return parse_config(FILE + more)


def test_torchs_names_mean_the_rows_of_the_table() -> None:
    for torchs, row in (("AdamW", "adamw"), ("SGD", "sgd"), ("RMSprop", "rmsprop")):
        assert config_of(f'optimizer = "{torchs}"').training.optimizer == row
    assert config_of('optimizer = "RMSprop"\noptimizer_args = { momentum = 0.9 }').training.optimizer == "rmsprop_momentum"
    with_momentum = config_of('optimizer = "SGD"\noptimizer_args = { momentum = 0.8, nesterov = true }')
    assert with_momentum.training.optimizer == "sgd_momentum"
    assert dict(with_momentum.training.recipe.group_settings) == {"momentum": 0.8, "nesterov": True}


def test_a_schedule_is_written_and_read_again() -> None:
    text = """weight_decay = 0.1
no_weight_decay = ["norm", "*.pos_embedding"]
[training.schedule]
name = "MultiStepLR"
milestones = [30, 60]
gamma = 0.2
per = "epoch"
warmup = 5
"""
    config = config_of(text)
    schedule = config.training.recipe.schedule
    assert schedule is not None
    assert (schedule.name, schedule.warmup, schedule.per) == ("MultiStepLR", 5, "epoch")
    assert dict(schedule.arguments) == {"gamma": 0.2, "milestones": (30, 60)}
    assert parse_config(config.to_toml()) == config


GROUPS = """optimizer = "Adam"
optimizer_args = { betas = [0.5, 0.9] }
learning_rate = 2e-4
weight_decay = 0.1
[training.groups.critic]
parameters = ["discriminator.*"]
learning_rate = 1e-3
[training.groups.head]
parameters = ["head.*", "last.*"]
optimizer = "SGD"
optimizer_args = { momentum = 0.8 }
weight_decay = 0.0
"""


def test_a_group_takes_over_what_it_leaves_out() -> None:
    """Beside another optimizer rate and arguments are its own; the weight decay is that of all."""
    config = config_of(GROUPS)
    critic, head = config.training.recipe.update_groups
    assert (critic.optimizer, critic.learning_rate, critic.weight_decay) == ("adam", 1e-3, 0.1)
    assert dict(critic.optimizer_args) == {"betas": (0.5, 0.9)}
    assert (head.optimizer, head.learning_rate, head.weight_decay) == ("sgd_momentum", 0.05, 0.0)
    assert dict(head.optimizer_args) == {"momentum": 0.8}
    assert config.training.optimizers == ("adam", "sgd_momentum")
    assert parse_config(config.to_toml()) == config


def test_samples_of_a_whole_training_are_not_those_of_a_run() -> None:
    told = samples_not_taken(config_of("samples = 160"), 180)
    assert told.startswith("training.samples = 160 is for the time and price")
    assert "180 steps of 16 samples" in told
    assert samples_not_taken(config_of("samples = 160\nsteps = 20"), 20) == samples_not_taken(config_of(""), 180) == ""


# What people type: short counts, GPUs by the names that drivers and shops give them, commands of other tools, the Tab key.


@pytest.mark.parametrize(
    ("text", "thousand", "value"),
    [
        ("4096", 1000, 4096),
        ("64k", 1024, 65_536),
        ("64K", 1000, 64_000),
        ("1M", 1024, 2**20),
        ("15T", 1000, 15 * 10**12),
        ("300B", 1000, 300 * 10**9),
        ("1.4T", 1000, 1_400_000_000_000),
        ("1e12", 1000, 10**12),
        ("1_000", 1000, 1000),
        ("0.5", 1000, 0.5),
    ],
)
def test_short_counts(text: str, thousand: int, value: float) -> None:
    assert parse_count(text, thousand) == value


@given(st.text(max_size=6).filter(lambda text: not any(character.isdigit() for character in text)))
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no number"):
        parse_count(text)


def test_k_of_lengths_is_binary_and_of_data_decimal() -> None:
    changed = changes_of({"model.args.seq": "64k"}, ["training.global_batch=4k", "training.tokens=15T", "training.samples=50k"])
    assert changed["model"]["args"]["seq"] == 65_536
    assert changed["training"] == {"global_batch": 4096, "tokens": 15 * 10**12, "samples": 50_000}
    assert changes_of(None, ["training.optimizer=4k"])["training"]["optimizer"] == "4k", "of other keys it is a text"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("h100", "h100-sxm"),
        ("H100-80GB", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("Tesla T4", "t4"),
        ("v100-16gb", "v100-sxm-16gb"),
    ],
)
def test_gpus_by_other_names(name: str, part: str) -> None:
    assert load_gpu(name).name == part
    assert machines_of(f"1x{name}").gpu == part


@pytest.mark.parametrize("name", ["409", "4090-ti", "rtx 4090 laptop", "h10", "h100-x", "mi300", "100"])
def test_a_gpu_is_never_found_by_a_part_of_its_name(name: str) -> None:
    with pytest.raises(ProfileError, match="unknown GPU"):
        load_gpu(name)


def test_eight_gpus_on_pcie_are_one_machine() -> None:
    assert (machines_of("8x4090").nodes, machines_of("8x4090").gpus_per_node) == (1, 8)
    assert (machines_of("16x4090").nodes, machines_of("16x4090").gpus_per_node) == (4, 4)
    assert (machines_of("8xh100-sxm", 4).nodes, machines_of("8xh100").nodes) == (2, 1)


def test_a_question_without_a_batch_takes_a_usual_one_and_says_so() -> None:
    for seq in (2048, 8192):
        question = question_of("llama3-8b", cluster="8xh100-sxm", settings={"model.args.seq": seq})
        assert question.training.global_batch * seq == USUAL_TOKENS
        assert taken_defaults(question)["training.global_batch"] == question.training.global_batch
    image = question_of("resnet50", cluster="dgx1-v100-32gb")
    assert image.training.global_batch == 8 * USUAL_SAMPLES
    many = question_of("llama3-8b", cluster="1024xh100-sxm", settings={"cluster.network": "infiniband-400g"})
    assert many.training.global_batch == 1024, "at least a sample for each device"
    parts = {"plan.mesh.dp": 8, "plan.microbatches": 3, "model.args.seq": 2048}
    assert question_of("llama3-8b", cluster="8xh100-sxm", settings=parts).training.global_batch == 528
    given_one = question_of("llama3-8b", cluster="8xh100-sxm", global_batch=64)
    assert "training.global_batch" not in taken_defaults(given_one)


@pytest.mark.parametrize("name", ["serve", "train", "estimate"])
def test_commands_of_other_tools_get_a_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert status_of(monkeypatch, name, "llama3-8b") == 2
    error = capsys.readouterr().err
    assert ELSEWHERE[name] in error
    assert "Did you mean" not in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("parsim che", "check"),
        ("parsim plan llama3-7", "llama3-70b"),
        ("parsim check gpt2 --gpus 4xrtx-40", "4xrtx-4090"),
        ("parsim plan gpt2 --network infiniband-4", "infiniband-400g"),
    ],
)
def test_the_tab_key_completes(line: str, found: str) -> None:
    asks = {"_PARSIM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    call = "import sys; sys.argv = ['parsim']; from parsim.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", call], env=os.environ | asks, capture_output=True, text=True, check=False)
    assert found in run.stdout.split(), run.stderr


@pytest.mark.parametrize("option", KEYS)
def test_options_that_people_try_name_the_key(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    question_of("llama3-8b", cluster="8xh100-sxm", global_batch=64, overrides=[KEYS[option]])
    monkeypatch.setenv("COLUMNS", "300")
    assert status_of(monkeypatch, "plan", "llama3-8b", "--gpus", "8xh100", option, "8") == 2
    assert f"--set {KEYS[option]}" in capsys.readouterr().err
