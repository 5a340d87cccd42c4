"""What cannot be planned or is not what it seems: one message with the place and the way round, and no log of torch's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from torch import Tensor, nn  # noqa: E402

import parsim  # noqa: E402
from experiments.common.equality import even_plan  # noqa: E402
from parsim.app.launch import check_loss  # noqa: E402
from parsim.app.question import loss_note  # noqa: E402
from parsim.errors import ModelError, ParsimError, PlanError  # noqa: E402
from parsim.model.load import load_model, model_from_module  # noqa: E402
from parsim.model.spec import ModelSpec  # noqa: E402
from parsim.plans.mesh import Mesh  # noqa: E402
from tests.hugging_face_configs import SMALL  # noqa: E402

HERE = "tests.execute.test_refused_models"
EXAMPLE = torch.zeros(4, 6)


class Returning(nn.Module):
    """A layer, and what `made` makes of its output and input."""

    def __init__(self, made: Callable[[Tensor, Tensor], object], *, frozen: bool = False) -> None:
        super().__init__()
        self.layer, self.made = nn.Linear(6, 3).requires_grad_(not frozen), made

    def forward(self, x: Tensor) -> object:
        return self.made(self.layer(x), x)


def penalty(out: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return gradient.square().sum(1)


def backward(out: Tensor, x: Tensor) -> Tensor:
    out.sum().backward()  # type: ignore[no-untyped-call]
    return out


def nothing(*arguments: Tensor) -> Tensor:
    return torch.zeros(len(arguments[0]), 3)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Returning(lambda out, x: out.detach()), "nothing to train: no gradient of its loss reaches its parameters"),
        (Returning(nothing), "nothing to train: no gradient"),
        (Returning(lambda out, x: out, frozen=True), r"nothing to train: all 2 of its parameters are frozen"),
        (nn.Identity(), "nothing to train: it has no parameters"),
        (Returning(penalty), r"takes gradients inside its forward \(grad\) at .*test_refused_models.py:\d+ "),
        (Returning(backward), r"takes gradients inside its forward \(backward\) at .*test_refused_models.py:\d+ "),
        (Returning(lambda out, x: torch.fft.fft(out)), "returns complex64 .* needs real numbers: return .real"),
        (Returning(lambda out, x: out @ torch.zeros(4, 2)), r"test_refused_models.py:\d+ .*must have same reduction dim"),
    ],
)
def test_modules_that_cannot_be_trained_are_refused(module: nn.Module, message: str, caplog: pytest.LogCaptureFixture) -> None:
    """torch 2.13: calls that fail on fake tensors are logged with a traceback; a user is to see the message alone."""
    with caplog.at_level(logging.DEBUG), pytest.raises(ParsimError, match=message):
        model_from_module(module, EXAMPLE)
    assert "Traceback" not in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_packed_weights_cannot_be_trained() -> None:
    module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 3)))  # type: ignore[no-untyped-call]
    with pytest.raises(ParsimError, match=r"0 \(Linear\) holds weights that torch has packed as integers.*prepare_qat"):
        model_from_module(module, EXAMPLE)


def test_weights_and_example_on_two_devices() -> None:
    with torch.device("meta"):
        module = nn.Linear(6, 3)
    with pytest.raises(ParsimError, match="put the example inputs on the device of the weights"):
        model_from_module(module, EXAMPLE)
    assert model_from_module(module, EXAMPLE.to("meta")).parameter_count == 21


class Product(torch.autograd.Function):
    """A product with a backward by hand, which autocast does not cast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Product.apply(self.first(x), self.weight)  # type: ignore[no-untyped-call]
        return made


@torch.library.custom_op("parsim_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)


def test_a_backward_that_fails_under_autocast_alone_leaves_the_module_to_fp32() -> None:
    """It ended in a traceback."""
    model = model_from_module(ByHand(), EXAMPLE)
    assert model.half_refused.startswith("the backward of ")
    assert "under autocast to half precision" in model.half_refused
    assert any("no autocast" in text for text in model.assumptions)


def test_an_operator_without_a_backward_is_named() -> None:
    with pytest.raises(ParsimError, match=r"backward .* parsim_tests.doubled.* register_autograd"):
        model_from_module(Returning(lambda out, x: torch.ops.parsim_tests.doubled(out)), EXAMPLE)


class AddedUp(nn.Module):
    """Its loss is the sum over the batch, where the mean is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().sum()


def test_a_scalar_that_adds_up_the_batch_is_told_from_one_that_compares_samples() -> None:
    spec = ModelSpec(name=f"{HERE}:AddedUp", input_shape=(6,))
    model = load_model(spec)
    assert "the sum over the batch" in loss_note(model)
    assert "return the mean" in loss_note(model)
    with pytest.raises(PlanError, match=r"adds up the samples of a batch.*4 of 8 samples.*return the mean"):
        check_loss(model, even_plan(spec, Mesh(dp=2), strategy="custom", batch=8), allowed=False)
    check_loss(model, even_plan(spec, Mesh(), strategy="custom", batch=8), allowed=False)


def test_inputs_by_shape_of_a_forward_with_two() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return x + t

    with pytest.raises(ParsimError, match=r"missing 1 required positional argument: 't'; give every input by name"):
        model_from_module(Two(), EXAMPLE)
    with pytest.raises(ParsimError, match=r"unexpected keyword argument 'tt'.*; it takes x, t"):
        model_from_module(Two(), {"x": EXAMPLE, "tt": EXAMPLE})


LLAMA = {**SMALL["llama"], "num_hidden_layers": 1}


@pytest.mark.hf
def test_configs_that_are_quantised_or_of_impossible_size(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "fp8"}}))
    answer = parsim.plan(str(path), cluster="dgx1-v100-32gb", devices=1, global_batch=2, strategy="single", seq=8)
    assert any("quantization_config is left out" in text for text in answer.prediction.warnings)
    path.write_text(json.dumps({**LLAMA, "vocab_size": 10**18}))
    with pytest.raises(ModelError, match=r"cannot be built.*correct the sizes"):
        load_model(ModelSpec(name=str(path), input_shape=(8,)))


@pytest.mark.hf
def test_unknown_keys_of_a_config_are_named(tmp_path: Path) -> None:
    """A key that the class of the config does not have may be an option of a newer one; usual metadata is none."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    path = tmp_path / "config.json"
    about = {"torch_dtype": "bfloat16", "_name_or_path": "x", "pretraining_tp": 1, "sliding_window": None}
    path.write_text(json.dumps({**LLAMA, **about, "frobnicate": 5}))
    answer = parsim.plan(str(path), cluster="dgx1-v100-32gb", global_batch=8, strategy="dp", args={"seq": 16})
    assert [text for text in answer.prediction.warnings if "keys of" in text] == [
        "keys of config.json that its class does not list, and which may matter: frobnicate"
    ]
    assert "torch_dtype = bfloat16 is left out: weights are as training.precision says" in answer.prediction.warnings
