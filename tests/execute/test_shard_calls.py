"""Calls that hold a whole layer, in shards against the whole in float64: multi-head attention, and products with experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from torch import Tensor, nn  # noqa: E402

from experiments.common.shards import assert_shards_equal_whole, values_of  # noqa: E402
from parsim.model import record  # noqa: E402
from parsim.model.build import build_module  # noqa: E402
from parsim.model.component import Sharding  # noqa: E402
from parsim.model.runnable import Runnable  # noqa: E402
from parsim.model.spec import ModelSpec  # noqa: E402
from tests.execute.test_architectures import component  # noqa: E402
from tests.hugging_face_configs import SMALL  # noqa: E402

WIDTH, HEADS, LENGTH, SAMPLES = 16, 4, 5, 2


def shardings(runnables: tuple[Runnable, ...], given: dict[str, Tensor], tolerance: float) -> dict[str, list[Sharding]]:
    """Of every component, each compared with the whole."""
    values = values_of(runnables, given)
    found = {}
    for runnable in runnables:
        described = component(runnable.program)
        found[runnable.name] = list(described.shardings)
        for sharding in described.shardings:
            for ways in (2, 4):
                if sharding.limit % ways == 0:
                    inputs = [values[name] for name in runnable.input_names]
                    assert_shards_equal_whole(runnable, described, sharding, ways, inputs, tolerance)
    return found


class Attention(nn.Module):
    """Of one kind, with a residual."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, bias=kind != "no bias")
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).triu(1).bool())

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        more: dict[str, Any] = {"need_weights": False}
        if self.kind in ("causal", "causal and padded"):
            more |= {"attn_mask": self.mask, "is_causal": True}
        if self.kind in ("padded", "causal and padded"):
            more |= {"key_padding_mask": padding}
        if self.kind == "weights":
            made, weights = self.inner(x, x, x)
            return x + made + weights @ made
        if self.kind == "cross":
            return x + self.inner(x, memory, memory, **more)[0]
        if self.kind == "three":
            return x + self.inner(x, memory, 2.0 * memory, **more)[0]
        return x + self.inner(x, x, x, **more)[0]


KINDS = ("plain", "no bias", "causal", "padded", "causal and padded", "cross", "three")


@pytest.mark.parametrize("kind", KINDS)
def test_multi_head_attention_is_cut_by_heads(kind: str) -> None:
    torch.manual_seed(0)
    module = Attention(kind).double()
    x, memory = (torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64) for _ in range(2))
    padding = torch.zeros(SAMPLES, LENGTH, dtype=torch.bool)
    padding[1, -2:] = True
    inputs = {"x": x, "memory": memory, "padding": padding}
    runnables = record(module, inputs, granularity="sublayer")
    given = dict(zip([f"input:{number}" for number in range(3)], inputs.values(), strict=True))
    found = shardings(runnables, given, 1e-12)
    (rules,) = found.values()
    assert [(sharding.rule, sharding.limit, sharding.outputs) for sharding in rules] == [("heads+row", HEADS, ("partial",))]
    cut = {part.name: (part.dim, part.blocks) for part in rules[0].parameters}
    expected = {"inner.in_proj_weight": (0, 3), "inner.in_proj_bias": (0, 3), "inner.out_proj.weight": (1, 1)}
    assert cut == {name: how for name, how in expected.items() if kind != "no bias" or "bias" not in name}


def test_attention_whose_weights_are_used_nonlinearly_stays_whole() -> None:
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64)
    inputs = {"x": x, "memory": x, "padding": torch.zeros(SAMPLES, LENGTH, dtype=torch.bool)}
    runnables = record(Attention("weights").double(), inputs, granularity="sublayer")
    assert not any(component(runnable.program).shardings for runnable in runnables)


@pytest.mark.hf
def test_the_mixer_of_mamba_is_cut_by_features(tmp_path: Path) -> None:
    """Two components: up to the summands of time step, B and C, and from their sum on; the scan over a shard's features."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL["mamba"], "num_hidden_layers": 2}))
    torch.manual_seed(0)
    module = build_module(ModelSpec(name=str(path))).double()
    tokens = torch.randint(48, (SAMPLES, 7))
    runnables = record(module, {"input_ids": tokens}, granularity="sublayer")
    found = shardings(runnables, {"input:0": tokens}, 2e-6)
    mixer = {where: rules for where, rules in found.items() if "layers.1.mixer" in where}
    assert [name.rpartition(".")[2] for name in mixer] == ["mixer", "mixer#2"]
    before, after = ({rule.rule: rule for rule in rules}["column+row"] for rules in mixer.values())
    parts = [{part.name.rpartition("mixer.")[2] for part in rule.parameters} for rule in (before, after)]
    assert parts == [{"in_proj.weight", "x_proj.weight", "conv1d.bias"}, {"dt_proj.weight", "out_proj.weight"}]
    assert "partial" in before.outputs
    assert "shard:1" in before.outputs
    assert "shard:1" in after.inputs
    assert after.outputs == ("partial",)


@pytest.mark.hf
@pytest.mark.parametrize("name", ["mixtral"])
def test_experts_are_cut_inside(name: str, tmp_path: Path) -> None:
    """Gate and up by columns in two runs, down by rows; the router whole in every shard."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL[name], "num_hidden_layers": 1}))
    torch.manual_seed(0)
    module = build_module(ModelSpec(name=str(path))).double()
    tokens = torch.randint(48, (SAMPLES, 6))
    runnables = record(module, {"input_ids": tokens}, granularity="sublayer")
    found = shardings(runnables, {"input:0": tokens}, 2e-6)
    (rules,) = (entry for where, entry in found.items() if where.endswith("mlp"))
    assert [(sharding.rule, sharding.outputs) for sharding in rules] == [("column+row", ("partial",))]
    parts = {part.name.rpartition(".")[2]: (part.dim, part.blocks) for part in rules[0].parameters}
    assert parts == {"gate_up_proj": (1, 2), "down_proj": (2, 1)}
