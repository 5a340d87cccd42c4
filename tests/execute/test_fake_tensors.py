"""QuickFakeMode answers as torch's FakeTensorMode does: kinds of tensors, shared memory, and whole Models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the torch extra")

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from parsim.errors import TraceError
from parsim.model.trace import fakes as fake_tensors
from parsim.model.trace import record as recording
from parsim.model.trace.fakes import QuickFakeMode
from tests.traced import trace

F = nn.functional


def _images() -> Any:
    return torch.empty(2, 3, 8, 8)


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "a whole number": lambda a, b: b.long() + 1,
    "a fraction": lambda a, b: b.long() + 1.0,
    "a truth value": lambda a, b: b.long() + True,
    "view": lambda a, b: a.view(6, -1),
    "dense views": lambda a, b: (
        a.view(24),
        a.view(6, 4),
        a.view(2, 2, 3, 2),
        a[1].view(2, 6),
        a.view(2, 3, 4),
        a.view(4, 6)[1:],
    ),
    "views with dims of one": lambda a, b: (
        a.view(1, 24),
        a.view(6, 1, 4),
        a[:, :1].contiguous().view(2, 4),
        a[1, 1, :1].view(1),
    ),
    "views of views": lambda a, b: (
        a[:, 1:].flatten(1),
        a.transpose(0, 1).flatten(2),
        a.transpose(1, 2)[:, :2].unflatten(1, (2, 1)),
    ),
    "select": lambda a, b: a[:, 1],
    "selects": lambda a, b: (a[:, 0], a[:, 2], a[:, -1], a[1][-2], a.narrow(1, 1, 2)[:, 1]),
    "sums of selects": lambda a, b: (a[:, 0] + b[:, 2], a[:, 2] + b[:, 0], a[0].clone(), a[1].clone(), a[1].contiguous()),
    "gradients of selects": lambda a, b: tuple(
        torch.ops.aten.select_backward.default(a[:, at], [2, 3, 4], 1, at) for at in (0, 2, -1)
    ),
    "views of products": lambda a, b: (
        torch.ops.aten._unsafe_view.default(a, [6, 4]),
        torch.ops.aten._unsafe_view.default(a[1], [12]),
    ),
    "transposed": lambda a, b: a.transpose(1, 2),
    "split": lambda a, b: a.split(1, 1),
    "chunks": lambda a, b: torch.chunk(a, 2, -1),
    "expanded": lambda a, b: b.expand(5, 2, 3, 4),
    "in place": lambda a, b: a.mul_(2),
    "product": lambda a, b: a @ b.transpose(1, 2),
    "folded product": lambda a, b: F.linear(a, torch.empty(5, 4, dtype=a.dtype)),
    "several": lambda a, b: a.max(-1),
    "norm": lambda a, b: F.layer_norm(a, (4,)),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None]),
    "convolution": lambda a, b: F.conv2d(_images(), torch.empty(4, 3, 3, 3), torch.empty(4), padding=1),
    "channels last": lambda a, b: _images().contiguous(memory_format=torch.channels_last) * 2,
    "made": lambda a, b: torch.zeros(3, dtype=torch.float64),
    "index": lambda a, b: a[torch.zeros(7, dtype=torch.int64)],
    "conjugate": lambda a, b: torch.view_as_real(torch.view_as_complex(a.float().reshape(-1, 2)).conj().resolve_conj()),
    "concatenated": lambda a, b: torch.cat([a, b], 1),
    "resized": lambda a, b: a.clone().resize_(24),
}


def _seen(mode: Any, call: Callable[[Any, Any], Any], kind: Any) -> Any:
    with mode:
        a, b = torch.empty(2, 3, 4, dtype=kind), torch.empty(2, 3, 4, dtype=kind)
        out = call(a, b)
        made = out if isinstance(out, tuple | list) else (out,)
        memory = [tensor.untyped_storage()._cdata for tensor in (a, b)]
        return [
            (
                tuple(tensor.shape),
                tensor.stride(),
                tensor.storage_offset(),
                tensor.dtype,
                tensor.device,
                tensor.untyped_storage().nbytes(),
                [tensor.untyped_storage()._cdata == other for other in memory],
                [tensor is a, tensor is b],
                tensor.requires_grad,
                tensor._version,
            )
            for tensor in made
        ]


@pytest.mark.parametrize("name", CALLS)
def test_answers_equal_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_tensors, "_ANSWERS", {})
    for kind in (torch.float32, torch.bfloat16):
        expected = _seen(FakeTensorMode(allow_non_fake_inputs=True), CALLS[name], kind)
        assert _seen(QuickFakeMode(), CALLS[name], kind) == expected
        assert _seen(QuickFakeMode(), CALLS[name], kind) == expected, "as it was kept"


def test_the_default_type_is_part_of_the_question() -> None:
    with QuickFakeMode():
        numbers = torch.zeros(3, dtype=torch.int64)
        kinds = [(numbers / 2).dtype]
        torch.set_default_dtype(torch.float64)
        try:
            kinds.append((numbers / 2).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert kinds == [torch.float32, torch.float64]


def test_gradients_flow_as_with_torch() -> None:
    sizes = []
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), QuickFakeMode(), QuickFakeMode()):
        with mode:
            a, b = torch.empty(2, 3, 4, requires_grad=True), torch.empty(4, 5, requires_grad=True)
            ((a @ b)[:, 1] * 2.0).softmax(-1).sum().backward()
            sizes.append([(found.shape, found.stride(), found.dtype) for found in (a.grad, b.grad) if found is not None])
    assert sizes[0] == sizes[1] == sizes[2]
    assert len(sizes[0]) == 2


class _Several(nn.Module):
    """Convolution, normalisation, attention, dropout, sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.middle = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        rows = self.middle(self.first(x).flatten(2).transpose(1, 2))
        return self.head(rows.mean(1))


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["sublayer", "layer"])
def test_models_equal_those_of_torchs_own_mode(granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [trace(_Several(), torch.zeros(4, 3, 4, 4), granularity=granularity, loss="cross_entropy").model for _ in range(2)]
    monkeypatch.setattr(recording, "QuickFakeMode", lambda: FakeTensorMode(allow_non_fake_inputs=True))
    assert found == [trace(_Several(), torch.zeros(4, 3, 4, 4), granularity=granularity, loss="cross_entropy").model] * 2


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        return self.head(self.cells(x)[0][:, -1])


def test_the_first_trace_of_a_recurrent_network_equals_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both gradients of a layer's biases share memory; answers that are kept gave each its own."""
    monkeypatch.setattr(fake_tensors, "_ANSWERS", {})
    found = [trace(_Recurrent(), torch.zeros(4, 6, 8), loss="cross_entropy").model for _ in range(3)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_products_of_two_types_fail_as_real_ones_do(dims: int, dtype: torch.dtype) -> None:
    """torch 2.13: torch's own fake products of an input of the wrong type succeed, and a plan would be made of what cannot
    run."""
    shape = (2, 3, 8)[-dims:]

    def products() -> list[Callable[[], Any]]:
        given, weight = torch.ones(shape, dtype=dtype), torch.ones(5, 8)
        return [lambda: F.linear(given, weight), lambda: F.linear(given, weight, weight[:, 0]), lambda: given @ weight.t()]

    for product in products():
        with pytest.raises(RuntimeError):
            product()
    with QuickFakeMode():
        for product in products():
            with pytest.raises(RuntimeError, match="multiplies tensors of one dtype"):
                product()


def test_an_input_of_the_wrong_type_is_refused_with_the_way_round() -> None:
    """The module, the line, the operator and what to do; indices and numbers taken for one another."""
    for module, given in ((nn.Linear(8, 5), torch.ones(2, 8, dtype=torch.int64)), (nn.Embedding(5, 8), torch.ones(2, 8))):
        whole = nn.Sequential(module)
        with pytest.raises(TraceError) as refused:
            trace(whole, given)
        text = str(refused.value)
        assert f"the forward of 0 ({type(module).__name__}) failed on the example inputs" in text
        assert "aten.addmm" in text or "indices" in text
        assert "in [model] inputs" in text
        assert "or cast it in forward" in text
