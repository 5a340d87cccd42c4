"""Modules that are awkward to cut, for test_trace.py; each stands for a habit of real code."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


class CalledTwice(nn.Module):
    """One block called twice, and its parameters with it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.first(x)))


class TiedWeights(nn.Module):
    """One matrix as input and as output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.middle = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.relu(self.middle(self.embed(tokens))))


class ManyConsumers(nn.Module):
    """One value used three times inside one later block, and once in each of two more: the order of its sum matters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 7)
        self.a = nn.Linear(7, 7)
        self.b = nn.Linear(7, 7)
        self.c = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).sin()
        a = self.a(x) * x + x.exp() * 0.3
        b = self.b(a + x) / (1.5 + x.cos()) - x
        return self.c(b + x * 0.1) + x


class InPlace(nn.Module):
    """In-place activations and a residual added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        y += 0.5
        y[:, 1:2].mul_(2.0)
        return self.head(functional.relu_(y).mean((2, 3)))


class InPlaceAcross(nn.Module):
    """A later layer changes what an earlier one made: the two cannot be cut apart."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 5)
        self.two = nn.Linear(5, 5)
        self.three = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        z = self.two(x)
        y.add_(z)
        return self.three(y)


class Dropouts(nn.Module):
    """Random numbers inside and between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.3)) for _ in range(3))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.drop(block(x))
        return x + 0.1 * torch.rand_like(x) + torch.randn(x.shape[1], dtype=x.dtype, device=x.device)


class SeveralInputsAndOutputs(nn.Module):
    """A dict in, a nested structure out, one output an input of a later layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 5)
        self.right = nn.Linear(3, 5)
        self.join = nn.Linear(10, 2)

    def forward(self, left: Tensor, right: Tensor, scale: float = 2.0) -> dict[str, object]:
        a, b = self.left(left), self.right(right)
        joined = self.join(torch.cat([a, b], dim=1).flatten(1)) * scale
        return {"joined": joined, "parts": (a, [b.sum()]), "size": left.shape[0]}


class Attention(nn.Module):
    """PyTorch's own attention module, which uses its projection's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), 2, enable_nested_tensor=False
        )
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x)
        return self.out(self.encoder(x + y)) * weights.sum(-1, keepdim=True)


class Frozen(nn.Module):
    """A part without gradients, a parameter that is not trained, shapes taken from the input, a loop over a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.fixed = nn.Linear(6, 6)
        self.fixed.requires_grad_(False)
        self.out = nn.Linear(6, 2)
        self.scale = torch.full((6,), 0.7, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fixed(self.stem(x))
        with torch.no_grad():
            weight = torch.softmax(y, dim=1)
            self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
        y = (y * weight).view(x.shape[0], 2, 3) + x.detach().reshape(len(x), -1, 3)
        rows = [row * number for number, row in enumerate(y, start=1)]
        positions = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        return self.out(torch.stack(rows).flatten(1) + positions + self.scale.to(x.dtype) + self.mean)


class LooksAtConstants(nn.Module):
    """Values that depend on neither inputs nor weights may be looked at; a plain constant is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 5)
        self.two = nn.Linear(5, 5)
        self.calls = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        segments = (positions[1:] - positions[:-1] != 1).cumsum(0)
        self.calls[0] = 0.25
        x = self.one(x) if bool((segments == 0).all()) else x * torch.nan
        limits = torch.zeros(2, dtype=torch.long)
        limits[1] = 3
        x = self.two(x[:, : int(limits[1])].repeat(1, 2)[:, :5])
        return x * (positions < limits.max().item()) + self.calls


class Cube(torch.autograd.Function):
    """A backward of its own, on purpose not the derivative."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.abs() * 1.25


class CustomFunction(nn.Module):
    """A custom autograd function, a weight under a parametrization, an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        y, (_, cell) = self.lstm(x)
        return self.out(Cube.apply(y)[:, -1] + cell[0])


CASES: dict[str, tuple[type[nn.Module], tuple[tuple[int, ...], ...]]] = {
    "called_twice": (CalledTwice, ((6,),)),
    "many_consumers": (ManyConsumers, ((7,),)),
    "in_place": (InPlace, ((2, 6, 6),)),
    "in_place_across": (InPlaceAcross, ((5,),)),
    "dropouts": (Dropouts, ((6,),)),
    "several": (SeveralInputsAndOutputs, ((4,), (3,))),
    "attention": (Attention, ((5, 8),)),
    "frozen": (Frozen, ((6,),)),
    "looks_at_constants": (LooksAtConstants, ((5,),)),
    "custom_function": (CustomFunction, ((5, 4),)),
}
"""Name -> module and the shape of one sample of each input."""


def truncated() -> nn.Module:
    """A linear layer whose weight is drawn anew until it lies within two deviations."""
    layer = nn.Linear(8, 8)
    nn.init.trunc_normal_(layer.weight)
    return layer
