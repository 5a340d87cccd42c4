"""Hugging Face models built from an offline config: bitwise equality, names, and the way through a ModelSpec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the torch extra")
pytest.importorskip("transformers", reason="needs the hf extra")

import torch
import transformers

from parsim.errors import TraceError
from parsim.model.build import build_module, loss_of
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from tests.hugging_face_configs import SMALL
from tests.quick import some_quick
from tests.traced import trace

pytestmark = pytest.mark.hf

CONFIGS: dict[str, dict[str, Any]] = {
    "vit": {**SMALL["vit"], "num_hidden_layers": 2},
    "gpt2": {**SMALL["gpt2"], "n_layer": 2},
    "llama": {**SMALL["llama"], "num_hidden_layers": 2},
}


@pytest.fixture(params=some_quick(CONFIGS, "gpt2"))
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> ModelSpec:
    path = tmp_path / request.param / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIGS[request.param]))
    return ModelSpec(name=str(path))


def test_model_of_a_config(spec: ModelSpec) -> None:
    model = load_model(spec)
    assert model.components[-1].name == "loss"
    assert loss_of(spec) == "cross_entropy"
    assert sum(".layer" in c.name or ".h." in c.name for c in model.components) == 2, [c.name for c in model.components]
    used = {p.name for p in model.parameters}
    module = build_module(spec)
    assert used == {name for name, _ in module.named_parameters()}
    assert model.parameter_count == sum(p.numel() for p in module.parameters())


def test_arguments_replace_the_config(spec: ModelSpec) -> None:
    changed = ModelSpec(name=spec.name, args=(("num_hidden_layers", 3),))
    assert len(load_model(changed).components) == len(load_model(spec).components) + 1


def test_cache_output_is_explained() -> None:
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=8, vocab_size=9)
    with pytest.raises(TraceError, match="use_cache = False"):
        trace(transformers.GPT2LMHeadModel(config), torch.zeros(2, 4, dtype=torch.long))


def test_a_config_with_infinity_is_read(tmp_path: Path) -> None:
    """transformers 5.23: the JSON config of Mamba2 holds Infinity, since its time steps have no upper bound."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGS["gpt2"], "time_step_limit": [0.0, float("inf")]}))
    assert "Infinity" in path.read_text()
    assert load_model(ModelSpec(name=str(path), args=(("seq", 4),))).parameter_count > 0
