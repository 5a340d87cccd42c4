"""Questions without a file, the defaults they take, and the folder of a run file on the import path."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import parsim as ps
from parsim.app.question import assumed_text, importable, is_run_file, question_from_file, question_of, taken_defaults
from parsim.errors import ConfigError, ModelError, ProfileError
from parsim.execute.processes import launch
from tests.commands import Told

RUN = """\
[model]
name = "{model}"
[cluster]
profile = "dgx1-v100-32gb"
[training]
global_batch = 64
precision = "amp_fp16"
"""

FACTORY = """\
from torch import nn
def net(width=8):
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 10))
"""


NETWORK = {"cluster.network": "infiniband-400g"}


@pytest.fixture
def parsim(told: Told, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Told:
    """Call `parsim ARGS` in tmp_path."""
    monkeypatch.chdir(tmp_path)
    return told


def refused(parsim: Told, *arguments: str) -> str:
    """The one message of a command that ends with status 1."""
    status, out, err = parsim(*arguments)
    assert (status, out) == (1, "")
    lines = [line for line in err.splitlines() if not line.endswith("...")]
    assert len(lines) == 1, err
    return lines[0]


def test_a_question_says_the_same_as_the_run_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(model="resnet50"))
    by_file = question_from_file(file)
    by_words = question_of("resnet50", cluster="dgx1-v100-32gb", global_batch=64, overrides=["training.precision=amp_fp16"])
    assert by_words.to_dict() == by_file.to_dict()
    assert taken_defaults(by_words) == taken_defaults(by_file)
    settings = {"training.precision": "amp_fp16"}
    assert question_of("resnet50", cluster="dgx1-v100-32gb", global_batch=64, settings=settings).to_dict() == by_file.to_dict()


def test_the_defaults_that_were_taken_are_told() -> None:
    question = question_of("resnet50", cluster="dgx1-v100-32gb", global_batch=64, settings={"training.optimizer": "adam"})
    assumed = taken_defaults(question, 8)
    assert assumed["training.precision"] == "fp32"
    assert assumed["cluster.devices"] == 8
    assert assumed["model.args.num_classes"] == 1000
    assert assumed["model.input_shape"] == (3, 224, 224)
    assert "training.optimizer" not in assumed
    text = assumed_text(taken_defaults(question, 8))
    assert text.startswith("assumed: all 8 devices, precision fp32, ")
    assert "num_classes 1000" in text
    assert assumed_text({}) == ""


def test_what_is_said_is_not_assumed() -> None:
    said: dict[str, object] = {
        "training.precision": "fp32",
        "training.optimizer": "sgd",
        "cluster.devices": 4,
        "cluster.nodes": 1,
        "model.granularity": "block",
        "model.input_shape": [32],
        "plan.strategy": "dp",
        "plan.zero_stage": 0,
        "plan.recompute": "none",
    }
    torch = pytest.importorskip("torch")
    question = question_of(torch.nn.Linear(32, 4), cluster="dgx1-v100-32gb", global_batch=64, settings=said)
    assert taken_defaults(question) == {}


WRONG = {
    "plan run.toml --on dgx2-v100": ("run.toml is a run file", "override the file: --set cluster.profile="),
    "simulate run.toml --batch 8": ("--set training.global_batch=8",),
    "plan resnt50 --on dgx2-v100 --batch 8": ("unknown model 'resnt50'; did you mean resnet50", "or a run file (RUN.toml)"),
    "validate nowhere": ("no run file",),
    "plan resnet50": (
        "--gpus COUNTxGPU or --on CLUSTER (cluster=) is missing",
        "parsim plan llama3-8b --gpus 8xh100-sxm --batch 64",
    ),
    "plan none.toml": ("no run file",),
    "plan nothere.toml --on 8xh100-sxm --batch 8": ("no run file nothere.toml",),
    "plan resnet50 --on dgx3 --batch 8": ("unknown profile 'dgx3'",),
    "plan resnet50 --on h100 --batch 8": ("does not say how many GPUs: write 1xh100-sxm or 8xh100-sxm",),
    "plan resnet50 --gpus 4090": ("does not say how many GPUs: write 1xrtx-4090",),
    "plan resnet50 --on dgx2-v100 --batch -8": ("training.global_batch = -8: must be >= 1",),
}


def test_wrong_questions_have_one_message_with_the_fix(parsim: Told, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.format(model="resnet50"))
    for words, parts in WRONG.items():
        message = refused(parsim, *words.split())
        assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("name", "is_file"),
    [("run.toml", True), ("resnet50", False), ("mlp", False), ("pkg.mod:make", False), ("config.json", False)],
)
def test_what_the_first_argument_means(name: str, is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a folder has the name of a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlp").mkdir()
    assert is_run_file(name) is is_file


def test_a_file_of_any_name_is_a_run_file(tmp_path: Path) -> None:
    file = tmp_path / "question.txt"
    file.write_text(RUN.format(model="mlp"))
    assert is_run_file(file)
    assert question_of(file).model.name == "mlp"


def test_a_factory_beside_the_run_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mymodel_beside.py").write_text(FACTORY)
    (folder / "run.toml").write_text(RUN.format(model="mymodel_beside:net").replace("amp_fp16", "fp32"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    question = question_of(folder / "run.toml", settings={"model.input_shape": [32], "plan.strategy": "dp"})
    assert question.model.import_folder == str(folder)
    assert ps.plan(folder / "run.toml", settings={"model.input_shape": [32], "plan.strategy": "dp"}).fits
    kept = tmp_path / "elsewhere"
    kept.mkdir()
    (kept / "config.toml").write_text(question.to_toml())
    assert question_from_file(kept / "config.toml").to_dict() == question.to_dict()


def test_another_module_of_that_name_is_refused(parsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would hand out the module that was imported first, and the wrong model would be planned."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "twice_named.py").write_text(FACTORY)
        (tmp_path / name / "run.toml").write_text(RUN.format(model="twice_named:net").replace("amp_fp16", "fp32"))
    settings = {"model.input_shape": [32], "plan.strategy": "dp"}
    ps.plan(tmp_path / "first" / "run.toml", settings=settings)
    with pytest.raises(ConfigError, match=r"already imported .*first/twice_named\.py"):
        ps.plan(tmp_path / "second" / "run.toml", settings=settings)


def test_an_import_folder_without_the_module_is_refused(parsim, tmp_path: Path) -> None:
    config = question_of("json:loads", cluster="dgx1-v100-32gb", global_batch=8, settings={"model.input_shape": [3]})
    model = config.model.model_copy(update={"import_folder": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"holds no json\.py"):
        importable(config.model_copy(update={"model": model}), tmp_path)


def test_neither_a_name_nor_a_model_is_refused() -> None:
    wrong: Any = 3
    with pytest.raises(ModelError, match="int is not a model: give the name of one, a run file"):
        question_of(wrong, cluster="dgx1-v100-32gb", global_batch=8)
    torch = pytest.importorskip("torch")
    with pytest.raises(ModelError, match=r"Linear is a class and not a model: give an instance, such as Linear\(\)"):
        question_of(torch.nn.Linear, cluster="dgx1-v100-32gb", global_batch=8)


def test_processes_find_modules_where_this_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a run file and of a script, and not what every interpreter of this environment has anyway."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", *sys.path, str(tmp_path / "absent")])
    ranks = launch._Ranks(job=tmp_path / "job.json", nproc=1, module="m", scratch=tmp_path, attempt=0, on_line=None)
    folders = ranks._environment(0, {})["PYTHONPATH"].split(os.pathsep)
    assert folders[0] == str(tmp_path)
    assert folders[1] == os.getcwd()
    assert sysconfig.get_path("purelib") not in folders
    assert sysconfig.get_path("stdlib") not in folders
    assert str(tmp_path / "absent") not in folders
    assert ranks._environment(0, {"PYTHONPATH": "own"})["PYTHONPATH"] == "own"


@pytest.mark.parametrize(
    ("where", "precision"), [("8xh100-sxm", "bf16"), ("8xv100-sxm-32gb", "amp_fp16"), ("dgx1-v100-32gb", "amp_fp16")]
)
@pytest.mark.parametrize("name", ["t5-large", "vit-l-16", "llama/config.json"])
def test_a_model_of_transformers_takes_half_precision_and_adam_on_gpus(name: str, where: str, precision: str) -> None:
    """As `llama3-8b` does. What is said stands, and a model of one's own keeps its defaults."""

    def asked(name: str, **said: object) -> tuple[str, str]:
        training = question_of(name, cluster=where, global_batch=8, settings=said).training
        return training.precision, training.optimizer

    assert asked(name) == asked("llama3-8b") == (precision, "adamw_fused")
    assert asked(name, **{"training.precision": "fp32"}) == ("fp32", "adamw_fused")
    assert asked(name, **{"training.optimizer": "sgd_momentum"}) == (precision, "sgd_momentum")
    assert asked("resnet50") == ("fp32", "sgd_momentum")
    assumed = taken_defaults(question_of(name, cluster=where, global_batch=8))
    assert (assumed["training.precision"], assumed["training.optimizer"]) == (precision, "adamw_fused")


def test_a_model_of_transformers_takes_on_this_machine_what_it_was_calibrated_with() -> None:
    training = question_of("llama/config.json", cluster="this-machine", global_batch=8).training
    assert (training.precision, training.optimizer) == ("fp32", "sgd_momentum")


def test_a_saved_model_keeps_its_defaults_on_gpus(tmp_path: Path) -> None:
    """It ends in .json as a config of transformers does, and its weights have the width with which it was traced."""
    named = ps.plan("mlp", cluster="1xh100-sxm", global_batch=8)
    named.problem.model.save(tmp_path / "mine.json")
    asked = ps.plan(tmp_path / "mine.json", cluster="1xh100-sxm", global_batch=8)
    training = asked.question.training
    assert (training.precision, training.optimizer) == ("fp32", "sgd_momentum")
    assert asked.prediction.result.step_s.median == named.prediction.result.step_s.median


@pytest.mark.parametrize("name", ["llama3-8b", "llama/config.json"])
def test_keys_of_a_precision_are_judged_by_the_one_that_is_taken(name: str) -> None:
    """Not by the fp32 that stands for it until the cluster is known."""

    def asked(where: str, **said: object) -> Any:
        return question_of(name, cluster=where, global_batch=8, settings=said).training

    training = asked("8xh100-sxm", **{"training.master_weights": False})
    assert (training.precision, training.keeps_master_weights) == ("bf16", False)
    with pytest.raises(ConfigError, match=r"master_weights = true belongs to .* training.precision = 'amp_fp16'"):
        asked("dgx1-v100-32gb", **{"training.master_weights": True})
    with pytest.raises(ConfigError, match=r"master_weights = true belongs to .* training.precision = 'fp32'"):
        asked("this-machine", **{"training.master_weights": True})
    wide = asked("8xh100-sxm", **{"training.dtype": "float64"})
    assert (wide.dtype, wide.precision) == ("float64", "fp32")


def test_an_assumed_fp32_says_what_it_leaves_unused() -> None:
    """On a GPU with bf16; where the precision was given, or the device has none, nothing is said."""
    from parsim.app.question import precision_text

    peaks = {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12}
    assumed = {"training.precision": "fp32"}
    assert precision_text(assumed, peaks) == (
        "precision fp32 was assumed; training.precision = amp_bf16 has 16 times its peak on this device"
    )
    assert precision_text({}, peaks) == precision_text(assumed, {"fp32": 15.7e12, "amp_fp16": 125e12}) == ""
    lines = ps.plan("mlp", cluster="1xa100-sxm-80gb", global_batch=64).lines()
    assert any(line.startswith("precision fp32 was assumed") for line in lines)


def test_the_folder_of_a_hugging_face_model_is_told_from_a_run_folder(parsim: Told, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    said = refused(parsim, "plan", "mine", "--on", "8xh100-sxm", "--batch", "8")
    assert f"mine is a folder; for the Hugging Face model in it give mine{os.sep}config.json" in said


def test_the_gpus_of_a_node_change_their_number_of_nodes_and_not_that_of_gpus() -> None:
    def machines(gpus: str, per_node: int) -> tuple[int, int | None]:
        asked = question_of("mlp", cluster=gpus, global_batch=8, settings={"cluster.gpus_per_node": per_node, **NETWORK})
        return asked.cluster.nodes, asked.cluster.gpus_per_node

    assert machines("8xrtx-4090", 8) == (1, 8)
    assert machines("8xh100-sxm", 4) == (2, 4)
    with pytest.raises(ProfileError, match=r"no whole number of nodes of cluster.gpus_per_node = 8"):
        machines("4xh100-sxm", 8)


def test_gpus_beside_a_run_file_are_told_how_to_change_its_cluster(parsim: Told, tmp_path: Path) -> None:
    """`--set cluster.profile` would not do: a file with cluster.gpu may not have both."""
    (tmp_path / "run.toml").write_text(RUN.format(model="mlp"))
    said = refused(parsim, "plan", "run.toml", "--gpus", "8xh100-sxm")
    assert "--on or --gpus (cluster=) is for a question without a file" in said
    assert "--set cluster.profile=... (or cluster.gpu, cluster.nodes)" in said


def test_every_key_of_a_run_file_is_an_argument() -> None:
    names = inspect.signature(ps.plan).parameters
    assert {"zero_stage", "mesh", "precision", "nodes", "seq", "clip_norm"} <= names.keys()
    by_keys = ps.plan("mlp", "dgx1-v100-32gb", global_batch=64, strategy="dp", devices=4, zero_stage=1)
    settings = {"plan.strategy": "dp", "cluster.devices": 4, "plan.zero_stage": 1}
    by_settings = ps.plan("mlp", cluster="dgx1-v100-32gb", global_batch=64, settings=settings)
    assert by_keys.question == by_settings.question
    with pytest.raises(ConfigError, match=r"zero_stag = 1 is no argument and no key of a run file; did you mean zero_stage"):
        ps.plan("mlp", "dgx1-v100-32gb", global_batch=64, zero_stag=1)
    with pytest.raises(ConfigError, match=r"gpus = '8xh100' is no argument and no key of a run file; write cluster = '8xh100'"):
        ps.plan("llama3-8b", gpus="8xh100")
    with pytest.raises(ConfigError, match=r"settings\['plan.zero_stage'\] = 2, but plan.zero_stage = 1"):
        ps.plan("mlp", "dgx1-v100-32gb", global_batch=64, zero_stage=1, settings={"plan.zero_stage": 2})
    with pytest.raises(ConfigError, match=r"settings\['zero_stage'\] = 1: write the key as section.key"):
        ps.plan("mlp", "dgx1-v100-32gb", global_batch=64, settings={"zero_stage": 1})
