"""`parsim.watch` in the trainers themselves: steps they count, and what their loggers keep."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import environment_of

pytestmark = pytest.mark.real

WATCHED = """
import json, sys, torch
import parsim as ps
from torch import nn
torch.manual_seed(0)
rows = torch.randn(64, 16)
given = {"devices": 1, "optimizer": "sgd", "settings": {"model.loss": "mse"}, "example_inputs": rows[:4]}
def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
def told(watch, **more):
    print(json.dumps({"steps": watch.steps, "windows": len(watch.windows_s), "text": str(watch), **more}))
"""

LIGHTNING = (
    WATCHED
    + """
import lightning.pytorch as L
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()
    def training_step(self, batch, index):
        return (self.net(batch) ** 2).mean()
    def validation_step(self, batch, index):
        self.log("val", (self.net(batch) ** 2).mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
watch = ps.watch(net(), "dgx1-v100-32gb", global_batch=8, every=3, **given)
loader = DataLoader(rows, batch_size=4)
trainer = L.Trainer(max_epochs=4, accumulate_grad_batches=2, accelerator="cpu", devices=1, enable_progress_bar=False,
                    logger=TensorBoardLogger("logs"), log_every_n_steps=1, callbacks=[watch.lightning()],
                    enable_model_summary=False)
trainer.fit(Net(), loader, loader)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(trainer.logger.log_dir)
events.Reload()
values = [event.value for event in events.Scalars("parsim/step_s")]
told(watch, values=values, windows_s=watch.windows_s, global_step=trainer.global_step)
"""
)


@pytest.fixture
def run_installed(installed: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    """What a script prints last, read as JSON, and all that it says on stderr."""

    def run(text: str, *packages: str) -> tuple[Any, str]:
        script = tmp_path / "script.py"
        script.write_text(text, encoding="utf-8")
        python = installed("torch==2.13.0", *packages)
        done = subprocess.run([python, script], cwd=tmp_path, env=environment_of(tmp_path), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    return run


def test_lightning_counts_optimizer_steps_and_its_logger_keeps_the_figures(run_installed: Any) -> None:
    """lightning 2.6: 64 rows in batches of 4, two of them a step, are 8 steps an epoch, and validation ends each epoch."""
    found, said = run_installed(LIGHTNING, "lightning==2.6.6", "tensorboard==2.21.0")
    assert (found["steps"], found["global_step"]) == (32, 32)
    assert found["windows"] == 4 * 2 - 1  # 7 steps of an epoch after the one that starts the clock; the first window warms up
    assert found["values"] == pytest.approx(found["windows_s"], rel=1e-6)
    assert f"parsim: {found['text']}" in said.splitlines()


HUGGING_FACE = (
    WATCHED
    + """
from transformers import Trainer, TrainingArguments
from torch.utils.data import Dataset
class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return {"x": rows[index]}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
    def forward(self, x): return {"loss": (self.net(x) ** 2).mean()}
def trained(watch, **arguments):
    several = TrainingArguments("out", per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=4,
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, report_to=[], **arguments)
    Trainer(Net(), several, train_dataset=Rows(), callbacks=[watch.hugging_face()]).train()
try:
    trained(ps.watch(net(), "dgx1-v100-32gb", global_batch=64, **given))
    refused = ""
except ps.ParsimError as error:
    refused = str(error)
watch = ps.watch(net(), "dgx1-v100-32gb", global_batch=8, every=5, **given)
trained(watch, save_strategy="steps", save_steps=16)
told(watch, refused=refused)
"""
)


def test_hugging_face_counts_optimizer_steps_and_another_batch_is_refused(run_installed: Any) -> None:
    """transformers 5: 64 rows by 4, two batches a step, four epochs: 32 steps. A checkpoint cuts the windows after step 16."""
    found, _ = run_installed(HUGGING_FACE, "transformers==5.24.0", "accelerate==1.15.0")
    assert found["steps"] == 32
    assert found["windows"] == 3 + 3 - 1
    assert found["refused"] == (
        "the trainer takes 8 samples per step, and the prediction is for 64; give parsim.watch global_batch=8"
    )


DESTINATIONS = (
    WATCHED
    + """
import glob, mlflow, trackio, wandb
try:
    ps.watch(net(), "dgx1-v100-32gb", global_batch=64, to="wandb", **given)
    refused = ""
except ps.ParsimError as error:
    refused = str(error)
wandb.init(project="p", dir=".")
trackio.init(project="p")
mlflow.set_tracking_uri("file:mlruns")
watch = ps.watch(net(), "dgx1-v100-32gb", global_batch=64, every=2, to=("tensorboard", "wandb", "mlflow", "trackio"), **given)
model = net()
with watch:
    for _ in range(9):
        (model(rows) ** 2).mean().backward()
        watch.step()
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(glob.glob("runs/*")[0])
events.Reload()
kept = {"tensorboard": [event.value for event in events.Scalars("parsim/step_s")]}
history = mlflow.MlflowClient().get_metric_history(mlflow.active_run().info.run_id, "parsim/step_s")
kept["mlflow"] = [row.value for row in history]
summary = wandb.run.summary
kept["wandb"] = summary["parsim/step_s"]
wandb.finish()
trackio.finish()
told(watch, kept=kept, windows_s=watch.windows_s, refused=refused)
"""
)


def test_every_destination_keeps_the_windows(run_installed: Any) -> None:
    """tensorboard 2.21, wandb 0.31 offline, mlflow 3 and trackio: the same three windows."""
    packages = ("tensorboard==2.21.0", "wandb==0.31.0", "mlflow-skinny==3.17.2")
    found, _ = run_installed(DESTINATIONS, *packages, "trackio==0.43.0")
    assert "call wandb.init() first" in found["refused"]
    assert found["windows"] == 3
    assert found["kept"]["tensorboard"] == pytest.approx(found["windows_s"], rel=1e-6)
    assert found["kept"]["mlflow"] == pytest.approx(found["windows_s"])
    assert found["kept"]["wandb"] == pytest.approx(found["windows_s"][-1])
