"""Moving averages of the weights: torch's AveragedModel, exported, validated, predicted. `test_equality` trains with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from parsim.app.ask import ask
from parsim.app.config import load_config
from parsim.app.foreign import export_folder
from parsim.app.launch import check_runnable
from parsim.errors import ConfigError, PlanError
from parsim.execute.job import EmaRule, TrainingRecipe
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.build import build_module
from parsim.model.formats import Numerics
from parsim.plans.mesh import Mesh
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from tests.execute.small_plans import GPT, case
from tests.execute.test_bad_run import cpu_profile


def test_torchs_averaged_model_itself_is_the_oracle() -> None:
    """Our update against the class as users call it, on a module of one's own."""
    from parsim.execute.optimizer import update_averages

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    theirs = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for _ in range(12):
        optimizer.zero_grad()
        module(torch.randn(6, 5, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        update_averages(optimizer, 0.8)
        theirs.update_parameters(module)
        for parameter, expected in zip(module.parameters(), theirs.module.parameters(), strict=True):
            assert torch.allclose(optimizer.state[parameter]["ema"], expected, rtol=0, atol=1e-14)


def problem(*, ema: bool, precision: str = "fp32", master_weights: bool = True) -> PlanningProblem:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), 4)
    model = case(GPT, Mesh()).model
    return PlanningProblem(
        model=model,
        cluster=cluster,
        global_batch=16,
        numerics=Numerics(optimizer="adamw", precision=precision, ema=ema, master_weights=master_weights),
    )


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_the_memory_and_the_time_of_averages_are_predicted(zero_stage: int) -> None:
    plan = case(GPT, Mesh(dp=4), batch=16, zero_stage=zero_stage).plan
    plain, asked = (evaluate(problem(ema=ema), plan, fold=False) for ema in (False, True))
    for before, after in zip(plain.memory, asked.memory, strict=True):
        state, more = dict(before.lines)["optimizer_state"], dict(after.lines)["optimizer_state"]
        assert more == pytest.approx(1.5 * state, rel=1e-6)  # two moments and the average
        assert after.total_bytes - before.total_bytes == pytest.approx(more - state, rel=0.01)
    assert asked.result.step_s.median > plain.result.step_s.median


RUN = """\
[model]
name = "mlp"
args = { width = 24 }
[cluster]
profile = "profile.json"
devices = 2
[training]
global_batch = 16
dtype = "float64"
optimizer = "AdamW"
learning_rate = 0.01
steps = 8
ema = { decay = 0.7, evaluate = true }
tensorboard = TENSORBOARD
[training.evaluation]
every = 4
[plan]
strategy = "dp"
zero_stage = 1
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    profile = cpu_profile()
    fits = profile["communication"]["fits"]
    fits += [{**fits[0], "operation": operation} for operation in ("reduce_scatter", "all_gather")]
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    (tmp_path / "run.toml").write_text(RUN.replace("TENSORBOARD", "false"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_averages_are_validated_and_exported(here: Path) -> None:
    from experiments.common.reference import train_reference
    from parsim.app.launch import run_spec
    from parsim.app.train import run
    from parsim.execute.rank_run import run_dataset

    done = run("run.toml", out="kept")
    spec = run_spec(done.prediction, "run", Path("kept/model.json"))
    expected = train_reference(
        spec.model,
        spec.plan,
        run_dataset(spec, "train"),
        optimizer="adamw",
        learning_rate=0.01,
        dtype=torch.float64,
        seed=0,
        steps=8,
        recipe=TrainingRecipe(ema=EmaRule(decay=0.7)),
    )
    file = done.export_weights(weights="ema", checkpoint="last")
    assert file.name == "ema.pt"
    exported = torch.load(file, weights_only=True)
    plain = torch.load(done.export_weights(checkpoint="last"), weights_only=True)
    for name, state in expected.optimizer_state.items():
        assert torch.allclose(exported[name], state["ema"], rtol=0, atol=1e-10)
        assert torch.allclose(plain[name], expected.parameters[name], rtol=0, atol=1e-10)
    module = build_module(spec.model).double()
    module.load_state_dict(exported)
    data = run_dataset(spec, "validation")
    values = data.values(np.arange(len(data)))
    with torch.no_grad():
        output = module.eval()(torch.from_numpy(values["input:0"]).double())
        loss = torch.nn.functional.cross_entropy(output, torch.from_numpy(values["target"]).long())
    assert done.document["validation"][-1]["loss"] == pytest.approx(float(loss), rel=1e-6)


def test_what_ema_needs_is_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.toml").write_text(RUN.replace("TENSORBOARD", "false").replace("[training.evaluation]\nevery = 4\n", ""))
    with pytest.raises(ConfigError, match=r"add \[training.evaluation\]"):
        load_config(Path("run.toml"))
    Path("run.toml").write_text(RUN.replace("TENSORBOARD", "false").replace("decay = 0.7", "decay = 1.7"))
    with pytest.raises(ConfigError, match=r"ema\.decay"):
        load_config(Path("run.toml"))
    relaxed = RUN.replace("TENSORBOARD", "false").replace("zero_stage = 1", 'synchronisation = "average/4"')
    Path("run.toml").write_text(relaxed)
    with pytest.raises(PlanError, match=r"training\.ema averages weights over steps"):
        check_runnable(ask(load_config(Path("run.toml"))).prediction, None)
    with pytest.raises(ConfigError, match="weights 'emma' are unknown; did you mean ema"):
        export_folder(Path("kept"), format="state_dict", weights="emma")


def test_tensorboard_is_refused_where_it_is_not_installed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parsim.app.launch import check_tensorboard
    from parsim.errors import MissingDependencyError

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'parsim\[tensorboard\]'"):
        check_tensorboard()
