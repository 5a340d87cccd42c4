"""Numbers per sample against closed forms, and what holds for every module (Hypothesis)."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch", reason="needs the torch extra")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parsim.model import Model
from parsim.model.component import Component, Operator
from parsim.model.objective import LOSSES
from tests.execute.bitwise import bytes_kept
from tests.traced import trace

F32 = 4


def model_of(module: nn.Module, *shape: int, batch: int = 2, granularity: str = "block", loss: str | None = None) -> Model:
    return trace(module, torch.zeros(batch, *shape), granularity=granularity, loss=loss).model


def operators(component: Component, kind: str) -> list[Operator]:
    return [operator for operator in component.operators if operator.kind == kind]


def test_linear_and_relu() -> None:
    """[B, 5] @ [5, 7]: saved are the input and the output of ReLU, once each."""
    model = model_of(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), 5)
    first, last = model.components
    assert first.forward_flop == 2 * 5 * 7
    assert first.parameter_bytes == (5 * 7 + 7) * F32
    assert first.saved_activation_bytes == (5 + 7) * F32
    assert last.saved_activation_bytes == 0, "its input is the output the ReLU has saved"
    assert model.value["0:0"].saved
    assert not model.value["2:0"].saved
    assert first.saved_fixed_bytes == last.saved_fixed_bytes == 0
    (matmul,) = operators(first, "matmul")
    assert dict(matmul.shape) == {"m": 1, "n": 7, "k": 5}
    assert (matmul.batch, matmul.activation_bytes, matmul.parameter_bytes) == ("rows", (5 + 7) * F32, (35 + 7) * F32)
    (relu,) = operators(first, "memory_bound")
    assert dict(relu.shape) == {"elements": 7}
    assert (relu.batch, relu.forward_flop, relu.activation_bytes) == ("batch", 0.0, 2 * 7 * F32)


def test_sequence_linear_has_rows_per_sample() -> None:
    (component,) = model_of(nn.Linear(5, 7), 11, 5).components
    (matmul,) = operators(component, "matmul")
    assert dict(matmul.shape) == {"m": 11, "n": 7, "k": 5}
    assert matmul.forward_flop == 2 * 11 * 5 * 7


def test_convolution() -> None:
    (component,) = model_of(nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(1, 2), groups=2), 4, 8, 10).components
    (conv,) = operators(component, "convolution")
    sizes = {"c": 4, "h": 8, "w": 10, "k": 6, "r": 3, "s": 5, "out_h": 4, "out_w": 10}
    assert dict(conv.shape) == {**sizes, "stride_h": 2, "stride_w": 1, "groups": 2}
    assert conv.batch == "batch"
    assert conv.forward_flop == 2 * (4 * 10) * 6 * (4 // 2) * 3 * 5
    assert conv.activation_bytes == (4 * 8 * 10 + 6 * 4 * 10) * F32


def test_batch_norm_buffers_and_fixed_part() -> None:
    """Saved per sample: the input; whatever the batch: mean and 1/std per channel. Buffers: mean, variance, counter."""
    model = model_of(nn.Sequential(nn.Conv2d(1, 6, 1), nn.BatchNorm2d(6)), 1, 4, 4, granularity="layer")
    conv, norm = model.components
    assert conv.saved_activation_bytes == 16 * F32
    assert norm.saved_activation_bytes == 6 * 16 * F32
    assert norm.saved_fixed_bytes == 2 * 6 * F32
    assert norm.buffer_bytes == 2 * 6 * F32 + 8
    counter = [operator for operator in norm.operators if operator.batch == "none"]
    assert len(counter) == 1, "num_batches_tracked"


def test_evaluation_mode_gives_the_same_model() -> None:
    module = nn.Sequential(nn.Conv2d(1, 6, 1), nn.BatchNorm2d(6), nn.Dropout(0.5), nn.Flatten(), nn.Linear(96, 2))
    training = model_of(module, 1, 4, 4)
    module.eval()
    module[2].train()
    assert model_of(module, 1, 4, 4) == training
    assert [part.training for part in module.modules()] == [False, False, False, True, False, False], "modes are restored"


def test_embedding_and_token_inputs() -> None:
    module = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    model = trace(module, torch.zeros(2, 6, dtype=torch.long), loss="cross_entropy").model
    (lookup,) = operators(model.components[0], "embedding")
    assert dict(lookup.shape) == {"rows": 6, "width": 8}
    assert lookup.batch == "rows"
    assert lookup.activation_bytes == 6 * 8 + 2 * 6 * 8 * F32
    assert model.components[0].saved_activation_bytes == 6 * 8, "the token ids"
    assert not model.value["input:0"].differentiable
    assert model.value["target"].bytes_per_sample == 6 * 8
    assert model.components[-1].inputs == ("1:0", "target")
    assert model.components[-1].parameters == ()


def test_fixed_work_and_fixed_values() -> None:
    """A position table is looked up once, whatever the samples."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)
            self.scale = nn.Linear(4, 4)
            self.out = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            positions = self.scale(self.table(torch.arange(x.shape[1])))
            return self.out(x + positions)

    model = model_of(Positions(), 9, 4)
    assert model.value["table:0"].fixed_bytes == 9 * 4 * F32
    assert model.value["table:0"].bytes_per_sample == 0
    assert model.value["scale:0"].bytes_per_sample == 9 * 4 * F32, "the sum with the samples joins the component before it"
    (lookup,) = operators(model.components[0], "embedding")
    assert lookup.batch == "none"
    assert model.forward_flop == 2 * 9 * 4 * 2, "only what grows with the samples is counted per sample"


def test_attention_and_batched_matmul() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(12, 36)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.view(x.shape[0], 5, 3, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
            fused = nn.functional.scaled_dot_product_attention(q, k, v)
            return fused + torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    (component,) = model_of(Scores(), 5, 12).components
    (attention,) = operators(component, "attention")
    assert dict(attention.shape) == {"heads": 3, "q": 5, "kv": 5, "d": 4}
    assert attention.forward_flop == 2 * 2 * 3 * 5 * 5 * 4
    batched = [operator for operator in operators(component, "matmul") if operator.batch == "batch"]
    assert [dict(operator.shape) for operator in batched] == [
        {"m": 5, "n": 5, "k": 4, "problems": 3},
        {"m": 5, "n": 4, "k": 5, "problems": 3},
    ]
    assert all(operator.forward_flop == 2 * 3 * 5 * 5 * 4 for operator in batched)


def test_saved_activations_agree_with_real_autograd() -> None:
    """Bytes that saved-tensor hooks see in a real forward, at another batch."""
    torch.manual_seed(0)
    features = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    module = nn.Sequential(*features, nn.Linear(36, 8), nn.GELU(), nn.Linear(8, 3))
    model = model_of(module, 1, 8, 8)
    batch = 7
    kept = bytes_kept(lambda: module(torch.randn(batch, 1, 8, 8)), (*module.parameters(), *module.buffers()))
    fixed = sum(component.saved_fixed_bytes for component in model.components)
    assert batch * model.saved_activation_bytes + fixed == kept


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(widths=st.lists(st.integers(1, 9), min_size=3, max_size=6), batch=st.integers(1, 6))
def test_independent_of_batch_and_consistent(widths: list[int], batch: int) -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)))
    model = model_of(module, widths[0], batch=batch, loss="mse")
    assert model == model_of(module, widths[0], batch=batch + 1, loss="mse")
    assert model.forward_flop == sum(2 * a * b for a, b in itertools.pairwise(widths))
    assert model.parameter_count == sum(p.numel() for p in module.parameters())
    fine = model_of(module, widths[0], batch=batch, granularity="layer", loss="mse")
    assert fine.forward_flop == model.forward_flop
    assert fine.saved_activation_bytes == model.saved_activation_bytes
    for value in model.values:
        assert value.size_bytes(batch) == value.bytes_per_sample * batch + value.fixed_bytes
    assert Model.from_json(model.to_json()) == model


KINDS = sorted({*LOSSES} - {"own"})
"""Losses that parsim takes itself; the module takes its own."""


@settings(max_examples=20, deadline=None)
@given(kind=st.sampled_from(KINDS), shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), parts=st.integers(1, 3))
def test_losses_add_up_over_microbatches(kind: str, shape: list[int], parts: int) -> None:
    """The sum over all samples is the sum over the parts; divided by the batch it is the usual mean."""
    torch.manual_seed(0)
    batch = 2 * parts
    output = torch.randn(batch, *shape, dtype=torch.float64)
    if kind == "mse":
        target = torch.randn_like(output)
        usual = nn.functional.mse_loss(output, target)
    elif kind == "bce":
        target = torch.rand_like(output)
        usual = nn.functional.binary_cross_entropy_with_logits(output, target)
    else:
        target = torch.randint(shape[-1], (batch, *shape[:-1]))
        usual = nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())
    whole = LOSSES[kind].total(output, target)
    split = sum(LOSSES[kind].total(o, t) for o, t in zip(output.chunk(parts), target.chunk(parts), strict=True))
    assert whole == pytest.approx(float(split), rel=1e-12)
    assert whole / batch == pytest.approx(float(usual), rel=1e-12)
