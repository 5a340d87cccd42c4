"""Equal layers are traced once: the Model equals that of a trace of every layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parsim.model.build import build_fake, interface_of, zero_batch
from parsim.model.load import model_from_module, trace_spec
from parsim.model.spec import ModelSpec, resolve
from parsim.model.trace.record import run_recorded
from parsim.model.trace.repeats import stacks_of
from parsim.model.trace.traced import model_of
from tests.hugging_face_configs import SMALL


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(dropout)
        self.branch = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        made: Tensor = x + self.dropout(self.branch(self.norm(x))) * scale
        return made


class Net(nn.Module):
    """Layers of given widths, with one tensor that all read; `first_for_all`: the output of the first is read by all."""

    def __init__(self, widths: tuple[int, ...], *, first_for_all: bool = False, rates: bool = False) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList([Layer(width, 0.01 * place if rates else 0.0) for place, width in enumerate(widths)])
        self.first_for_all = first_for_all

    def forward(self, x: Tensor) -> Tensor:
        scale, x = torch.sigmoid(x), self.enter(x)
        for place, layer in enumerate(self.layers):
            x = layer(x, scale)
            if place == 0 and self.first_for_all:
                scale = x
        made: Tensor = self.leave(x)
        return made


def _left_out(module: nn.Module, *args: Tensor, **kwargs: Tensor) -> int:
    return sum(stack.left_out for stack in stacks_of(run_recorded(module, args, kwargs, loss=None), module))


@pytest.mark.parametrize("granularity", ["block", "sublayer", "layer"])
@pytest.mark.parametrize(
    ("net", "left_out"),
    [
        (Net((16,) * 12), 7),
        (Net((16, 32, 32) * 6), 9),
        (Net((24, *(16,) * 9, 40)), 6),
        (Net((16,) * 12, first_for_all=True), 6),
    ],
    ids=["equal", "periods of three", "other ends", "the first for all"],
)
def test_equal_layers_are_counted_as_if_each_were_traced(net: Net, left_out: int, granularity: str) -> None:
    x = torch.zeros(2, 8)
    assert _left_out(net, x) == left_out
    model = model_from_module(net, x, granularity=granularity, loss="cross_entropy")
    whole = model_of(net, (x,), {}, granularity=granularity, loss=model.loss)
    assert model.components == whole.components
    assert model.values == whole.values
    assert len(net.layers) == int(sum(name.endswith(".norm") for name, _ in net.named_modules()))


@pytest.mark.parametrize(
    "net",
    [Net((16,) * 12, rates=True), Net((16,) * 12).eval(), Net((8, 16, 24, 32, 40, 48)), Net((16,) * 4)],
    ids=["rates of dropout", "in evaluation", "all different", "few"],
)
def test_layers_that_differ_are_all_traced(net: Net) -> None:
    assert _left_out(net, torch.zeros(2, 8)) == 0


def test_layers_that_share_weights_are_all_traced() -> None:
    net = Net((16,) * 12)
    net.layers = nn.ModuleList([net.layers[0]] * 12)
    assert _left_out(net, torch.zeros(2, 8)) == 0


_DEEPER: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("sublayer", {"num_hidden_layers": 7}),
    "gemma2": ("block", {"num_hidden_layers": 9}),
    "t5": ("sublayer", {"num_layers": 7, "num_decoder_layers": 7}),
}


@pytest.mark.parametrize("name", _DEEPER)
def test_hugging_face_models_are_counted_as_if_each_layer_were_traced(name: str, tmp_path: Path) -> None:
    granularity, sizes = _DEEPER[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL[name] | sizes))
    spec = resolve(ModelSpec(name=str(path), args=(("seq", 8),)))
    kind = interface_of(spec)
    assert kind.stacks
    module = build_fake(spec)
    args, kwargs = kind.arguments(zero_batch(kind.inputs))
    whole = model_of(module, args, kwargs, granularity=granularity, loss=kind.loss, declared=kind.inputs_in_order)
    model = trace_spec(spec, granularity)
    assert model.components == whole.components
    assert model.values == whole.values
    assert (model.inputs, model.outputs, model.loss_form) == (whole.inputs, whole.outputs, whole.loss_form)
