"""`parsim run` as people train: own data, schedule, clipping, validation, early stop, resume, and exported weights."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from parsim.app.train import open_run, run
from tests.execute.test_bad_run import write_profile

TASKS = Path(__file__).resolve().parents[2] / "examples" / "tasks"

FILE = """\
[model]
{model}
[cluster]
profile = "profile.json"
devices = 2
[training]
global_batch = 8
clip_norm = 1.0
{training}
[plan]
{plan}
"""
SEGMENTATION = {
    "model": 'name = "training_tasks:segmenter"\ninput_shape = [1, 8, 8]\nloss = "cross_entropy"\nclasses_dim = 0',
    "training": """\
dataset = "training_tasks:blobs"
optimizer = "AdamW"
learning_rate = 0.01
weight_decay = 0.05
no_weight_decay = ["norm", "bias"]
steps = 24
[training.schedule]
name = "CosineAnnealingLR"
warmup = 4
[training.evaluation]
every = 6
metrics = ["mean_iou", "accuracy"]
monitor = "mean_iou"
""",
    "plan": 'strategy = "dp"\nzero_stage = 2',
}
REGRESSION = {
    "model": 'name = "training_tasks:regressor"\ninputs = { input = { shape = [5] } }\nloss = "mse"',
    "training": """\
dataset = "training_tasks:surface"
optimizer = "SGD"
optimizer_args = { momentum = 0.9, nesterov = true }
learning_rate = 0.05
epochs = 4
workers = 1
[training.schedule]
name = "ReduceLROnPlateau"
factor = 0.5
patience = 0
[training.evaluation]
validation = 16
metrics = ["training_tasks:within_a_tenth", "mean_absolute_error"]
""",
    "plan": 'strategy = "custom"\nmesh = { pp = 2, dp = 1, tp = 1 }\nmicrobatches = 2',
}
LANGUAGE = {
    "model": 'name = "training_tasks:LanguageModel"\n'
    'inputs = { tokens = { shape = [8], dtype = "int64", high = 12 } }\nloss = "cross_entropy"',
    "training": """\
dataset = "training_tasks:sentences"
optimizer = "Adam"
learning_rate = 0.01
steps = 16
[training.schedule]
name = "OneCycleLR"
[training.evaluation]
every = 4
metrics = ["perplexity"]
""",
    "plan": 'strategy = "dp"\nzero_stage = 3',
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "training_tasks", raising=False)
    shutil.copy(TASKS / "training_tasks.py", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_profile(tmp_path, "reduce_scatter", "all_gather")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARSIM_ALLOW_CODE", "1")
    return tmp_path


def write(here: Path, task: dict[str, str], more: str = "") -> Path:
    file = here / "run.toml"
    file.write_text(FILE.format(**{**task, "training": more + task["training"]}))
    return file


def exported_score(folder: Path, module: torch.nn.Module, format: str, data: Any) -> float:
    """The mean loss of the best weights over validation samples, by torch alone."""
    file = open_run(folder).export_weights(format=format)  # type: ignore[arg-type]
    if format == "safetensors":
        from safetensors.torch import load_file

        weights = load_file(file)
    else:
        weights = torch.load(file, weights_only=True)
    module.load_state_dict(weights, strict=True)
    module.eval()
    inputs, targets = (torch.stack(list(part)) for part in zip(*data, strict=True))
    with torch.no_grad():
        output = module(inputs)
    if targets.is_floating_point():
        return float(torch.nn.functional.mse_loss(output, targets))
    return float(torch.nn.functional.cross_entropy(output if output.dim() == 4 else output.movedim(-1, 1), targets))


def best_of(document: dict[str, Any]) -> dict[str, Any]:
    return next(entry for entry in document["validation"] if entry["step"] == document["best"]["step"])


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_a_segmentation_trains_validates_and_exports(here: Path) -> None:
    file = write(here, SEGMENTATION)
    document = run(file, out="out").to_dict()
    assert [entry["step"] for entry in document["validation"]] == [6, 12, 18, 24]
    assert best_of(document)["mean_iou"] == max(entry["mean_iou"] for entry in document["validation"]) > 0.6
    assert document["best"]["score"] == best_of(document)["mean_iou"]
    assert document["losses"][-1] < 0.6 * document["losses"][0]
    assert document["comparison"]["kinds"].keys() >= {"clip", "all_reduce", "reduce_scatter"}
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx(document["losses"])
    assert [line["step"] for line in lines if "validation" in line] == [6, 12, 18, 24]
    assert lines[0]["learning_rate"] == pytest.approx(0.01 / 5)
    assert all(line["gradient_norm"] > 0 and line["seconds"] > 0 for line in lines)
    import training_tasks

    data = training_tasks.blobs("validation", 0)
    for format in ("state_dict", "safetensors"):
        found = exported_score(Path("out"), training_tasks.segmenter(), format, [data[place] for place in range(20)])
        assert found == pytest.approx(best_of(document)["loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_a_regression_goes_on_as_if_it_had_not_been_stopped(here: Path) -> None:
    """Plateau, held-out samples, own metric, workers: steps 16 to 32 are the same after a stop at 16."""
    file = write(here, REGRESSION)
    straight = run(file, out="straight").to_dict()
    assert [entry["step"] for entry in straight["validation"]] == [8, 16, 24, 32]
    run(file, out="parts", overrides=["training.steps=16"])
    resumed = run(file, out="parts", resume=True).to_dict()
    assert (len(resumed["losses"]), resumed["losses_from_step"]) == (32, 1)
    assert resumed["losses"] == pytest.approx(straight["losses"], abs=1e-6)
    assert resumed["validation"] == [pytest.approx(entry, abs=1e-6) for entry in straight["validation"]]
    assert open_run("parts").losses == pytest.approx(straight["losses"], abs=1e-6)
    steps = [json.loads(line)["step"] for line in Path("parts/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 33))
    assert resumed["best"]["score"] == pytest.approx(straight["best"]["score"], abs=1e-6)
    assert resumed["best"]["step"] == straight["best"]["step"]


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_a_language_model_stops_early_and_stays_stopped(here: Path) -> None:
    file = write(here, LANGUAGE)
    overrides = ["training.evaluation.patience=1", "training.evaluation.min_delta=100"]
    stopped = run(file, out="out", overrides=overrides).to_dict()
    assert stopped["stopped_early_at"] == 8
    assert len(stopped["losses"]) == 8
    again = run(file, out="out", overrides=overrides, resume=True)
    assert "has made its" in again.warnings[-1]
    whole = run(file, out="whole").to_dict()
    import training_tasks

    data = training_tasks.sentences("validation", 0)
    found = exported_score(Path("whole"), training_tasks.LanguageModel(), "safetensors", [data[n] for n in range(20)])
    assert found == pytest.approx(best_of(whole)["loss"], abs=1e-5)
    assert best_of(whole)["perplexity"] == pytest.approx(2.718281828 ** best_of(whole)["loss"], rel=1e-4)
