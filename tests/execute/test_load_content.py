"""What a name stands for is read anew, a forward that fails under autocast alone is kept, and examples are followed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from torch import Tensor, nn  # noqa: E402

from parsim.app.config import parse_config  # noqa: E402
from parsim.errors import ConfigError, CostError, ModelError, TraceError  # noqa: E402
from parsim.hardware.cluster import cluster_from_profile  # noqa: E402
from parsim.hardware.compose import load_profile  # noqa: E402
from parsim.model import build as build_file  # noqa: E402
from parsim.model.build import interface_of  # noqa: E402
from parsim.model.formats import Numerics  # noqa: E402
from parsim.model.load import load_model  # noqa: E402
from parsim.model.model import Model  # noqa: E402
from parsim.model.spec import ModelSpec  # noqa: E402
from parsim.predict.problem import PlanningProblem  # noqa: E402

WIDTH = 4


class Scatters(nn.Module):
    """Adds what autocast makes in half precision to what is in single."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.zeros_like(x, dtype=torch.int64)
        return x.new_zeros(x.shape).scatter_add(1, places, self.linear(x))


class Gated(nn.Module):
    """One of two ways, by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.one(x) if x.sum() > 1e6 else torch.relu(self.two(x)))


def spec(name: str, **more: object) -> ModelSpec:
    return ModelSpec(name=f"{__name__}:{name}", input_shape=(WIDTH,), **more)  # type: ignore[arg-type]


def test_a_forward_that_fails_under_autocast_is_planned_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARSIM_MODEL_CACHE", "off")
    model = load_model(spec("Scatters", loss="mse"))
    assert all(component.half is None for component in model.components)
    assert "test_load_content.py" in model.half_refused
    assert any("no autocast" in text for text in model.assumptions)
    assert Model.from_json(model.to_json()) == model
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"))
    PlanningProblem(model=model, cluster=cluster, global_batch=8)
    with pytest.raises(CostError, match=r"'amp_bf16' runs the forward under autocast.*scatter.*set precision = \"fp32\""):
        PlanningProblem(model=model, cluster=cluster, global_batch=8, numerics=Numerics(precision="amp_bf16"))


def test_control_flow_is_a_key_of_the_run_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Model says which line follows the example; left out, the line is refused."""
    monkeypatch.setenv("PARSIM_MODEL_CACHE", "off")
    with pytest.raises(TraceError, match='control_flow="example"'):
        load_model(spec("Gated"))
    text = f"""
[model]
name = "{__name__}:Gated"
input_shape = [{WIDTH}]
control_flow = "example"
[cluster]
profile = "dgx1-v100-32gb"
[training]
global_batch = 8
"""
    config = parse_config(text)
    assert config.model_spec == spec("Gated", control_flow="example")
    assert ModelSpec.from_dict(config.model_spec.to_dict()) == config.model_spec
    assert parse_config(config.to_toml()).model_spec == config.model_spec
    model = load_model(config.model_spec)
    assert any("follows the example" in text and "test_load_content.py" in text for text in model.assumptions)
    assert model.loss == "cross_entropy"
    with pytest.raises(ConfigError, match=r"model\.control_flow"):
        parse_config(text.replace('"example"', '"guess"'))
    with pytest.raises(ValueError, match="'refuse' or 'example'"):
        spec("Gated", control_flow="guess")


def test_a_changed_config_is_read_again(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    from tests.hugging_face_configs import SMALL

    path = tmp_path / "config.json"
    outputs = []
    for vocabulary in (50, 60):
        path.write_text(json.dumps({**SMALL["gpt2"], "n_layer": 1, "vocab_size": vocabulary}))
        outputs.append(interface_of(ModelSpec(name=str(path))).output)
    assert outputs == [(16, 50), (16, 60)]


def test_a_changed_file_is_not_taken_for_what_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nets_that_change.py"
    text = "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Linear(4, {}))\n"
    path.write_text(text.format(3))
    monkeypatch.syspath_prepend(str(tmp_path))
    net = ModelSpec(name="nets_that_change:net", input_shape=(4,))
    assert interface_of(net).output == (3,)
    path.write_text(text.format(55))
    with pytest.raises(ModelError, match=r"nets_that_change.py has changed since it was imported here.*importlib.reload"):
        load_model(net)
    importlib.invalidate_caches()
    importlib.reload(importlib.import_module("nets_that_change"))
    assert interface_of(net).output == (55,)


def test_one_load_builds_the_module_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARSIM_MODEL_CACHE", str(tmp_path))
    built = []
    original = build_file.build_fake
    monkeypatch.setattr(build_file, "build_fake", lambda entry: (built.append(entry), original(entry))[1])
    build_file._kept_fake.clear()
    load_model(spec("Counted"))
    assert len(built) == 1


class Counted(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, 2))
