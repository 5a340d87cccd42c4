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

from experiments.common.shards import assert_shards_equal_whole, values_of
from parsim.errors import TraceError
from parsim.model import record
from parsim.model.build import build_module, example_batch, loss_of
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from tests.execute.bitwise import assert_equal_to_module
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


@pytest.mark.parametrize("granularity", ["block", "layer", pytest.param("sublayer", marks=pytest.mark.slow)])
def test_bitwise(spec: ModelSpec, granularity: str) -> None:
    """GPT-2 has dropout 0.1 by default, so the random numbers are compared too."""
    torch.manual_seed(0)
    module = build_module(spec)
    for batch, training in ((2, True), (3, True), (2, False)):
        assert_equal_to_module(module.train(training), tuple(example_batch(spec, batch)[0].values()), granularity)


def test_model_of_a_config(spec: ModelSpec) -> None:
    model = load_model(spec)
    assert model.components[-1].name == "loss"
    assert loss_of(spec) == "cross_entropy"
    assert sum(".layer" in c.name or ".h." in c.name for c in model.components) == 2, [c.name for c in model.components]
    used = {p.name for p in model.parameters}
    module = build_module(spec)
    assert used == {name for name, _ in module.named_parameters()}
    assert model.parameter_count == sum(p.numel() for p in module.parameters())


SHARDED = {
    "vit": {"column", "channels_out", "row", "heads+row", "column+row"},
    "gpt2": {"column", "row", "vocabulary", "heads+row", "column+row"},
    "llama": {"vocabulary", "column", "row", "heads+row", "column+row"},
}


@pytest.mark.parametrize("granularity", ["layer", pytest.param("sublayer", marks=pytest.mark.slow)])
def test_shards_equal_the_whole(spec: ModelSpec, granularity: str) -> None:
    kind = Path(spec.name).parent.name
    tolerance = 1e-6 if kind == "llama" else 1e-12  # Llama's norms are computed in float32, whatever the weights are
    model = load_model(spec, granularity=granularity)
    if granularity == "sublayer":
        rules = {c.name: {sharding.rule for sharding in c.shardings} for c in model.components}
        assert set().union(*rules.values()) >= SHARDED[kind]
        if kind == "gpt2":  # its dropout of 0.1 leaves attention and MLP as shardable as without
            assert all("heads+row" in rules[f"transformer.h.{layer}.attn"] for layer in range(2))
            assert all("column+row" in rules[f"transformer.h.{layer}.mlp"] for layer in range(2))
    torch.manual_seed(0)
    given, target = example_batch(spec, 3, dtype=torch.float64)
    inputs = tuple(given.values())
    runnables = record(build_module(spec).double().train(), inputs, granularity=granularity, loss=loss_of(spec))
    values = values_of(runnables, {"input:0": inputs[0], "target": target})
    for runnable, component in zip(runnables, model.components, strict=True):
        for sharding in component.shardings:
            given = [values[value] for value in component.inputs]
            ways = 2 if sharding.limit % 2 == 0 else sharding.limit
            assert_shards_equal_whole(runnable, component, sharding, ways, given, tolerance)


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
