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
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from parsim.errors import TraceError
from parsim.model.build import build_module, loss_of
from parsim.model.catalogue.hugging_face import define_backward, define_scan
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from tests.hugging_face_configs import SMALL, keys_of
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


@pytest.mark.parametrize("most", [float("inf"), {"__float__": "Infinity"}])
def test_a_config_with_infinity_is_read(most: object, tmp_path: Path) -> None:
    """transformers 5.23: the JSON config of Mamba2 holds Infinity, since its time steps have no upper bound."""
    path = tmp_path / "config.json"
    sizes = "hidden_size=16 num_hidden_layers=1 state_size=4 head_dim=8 num_heads=4 n_groups=1 vocab_size=20 chunk_size=8"
    config = {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], **keys_of(sizes), "time_step_limit": [0.0, most]}
    path.write_text(json.dumps(config))
    assert "Infinity" in path.read_text()
    assert load_model(ModelSpec(name=str(path), args=(("seq", 300),))).parameter_count > 0


# The selective scan as one operator, which a plan of thousands of tokens needs.

SCANNED = dict.fromkeys(("x", "dt", "z"), (2, 3, 5)) | {"a": (3, 4), "b": (2, 4, 5), "c": (2, 4, 5), "d": (3,), "bias": (3,)}


def test_the_scan_is_that_of_transformers_and_its_gradients_are_its_own() -> None:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    define_scan()
    torch.manual_seed(0)
    given = {name: torch.randn(shape, dtype=torch.float64) for name, shape in SCANNED.items()}
    given["a"] = -given["a"].exp()
    x, dt, a, b, c, d, z, bias = operands = [given[name] for name in ("x", "dt", "a", "b", "c", "d", "z", "bias")]
    theirs = mamba_selective_scan(
        *(each.float() for each in (x, dt, a, b, c)), D=d.float(), z=z.float(), delta_bias=bias.float(), delta_softplus=True
    )
    scan = torch.ops.parsim.selective_scan
    assert (scan(*operands, True).float() - theirs).abs().max() < 1e-5
    for some in (operands, [x, dt, a, b, c, None, None, None]):
        leaves = [None if each is None else each.clone().requires_grad_() for each in some]
        assert torch.autograd.gradcheck(lambda *each: scan(*each, True), leaves)


def test_a_scan_of_thousands_of_tokens_is_one_operator(tmp_path: Path) -> None:
    """Its arithmetic is linear in tokens, features and states, and a layer has one for any number of tokens."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL["mamba"]))
    model = load_model(ModelSpec(name=str(path), args=(("seq", 4096),)))
    scans = [each for part in model.components for each in part.operators if each.function == "parsim.selective_scan"]
    assert [(each.count, each.forward_flop) for each in scans] == [(1, 9 * 4096 * 64 * 4)] * 4


TOKENS, WEIGHTS, ENDS = (7, 4), (3, 4, 5), [3, 3, 7]
"""The second expert has no token."""


def test_it_is_that_of_one_product_per_expert() -> None:
    define_backward()
    torch.manual_seed(0)
    tokens, weights = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (TOKENS, WEIGHTS))
    gradient = torch.randn(TOKENS[0], WEIGHTS[2], dtype=torch.float64)
    places: list[Tensor] = [tokens[start:end] @ weight for start, end, weight in zip([0, *ENDS], ENDS, weights, strict=False)]
    expected = torch.autograd.grad(torch.cat(places), (tokens, weights), gradient)
    found = torch.ops.parsim.grouped_mm_backward(tokens.detach(), weights.detach(), torch.tensor(ENDS), gradient)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_it_has_shapes_without_numbers() -> None:
    define_backward()
    with FakeTensorMode():
        tokens, weights, gradient = torch.empty(TOKENS), torch.empty(WEIGHTS), torch.empty(TOKENS[0], WEIGHTS[2])
        ends = torch.empty(len(ENDS), dtype=torch.int32)
        found = torch.ops.parsim.grouped_mm_backward(tokens, weights, ends, gradient)
    assert [tuple(entry.shape) for entry in found] == [TOKENS, WEIGHTS]
