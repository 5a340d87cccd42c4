"""Small models of sequences, tables, graphs and points as people write them; factories for the rows of the matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLASSES, WIDTH, VOCABULARY = 5, 16, 40


def perceptron() -> nn.Module:
    """Linear layers, LayerNorm and dropout."""
    return nn.Sequential(nn.Linear(12, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, CLASSES))


def regression() -> nn.Module:
    """One number per sample."""
    return nn.Sequential(nn.Linear(12, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


class Recurrent(nn.Module):
    """An embedding, a recurrent kernel, and a class of the last step."""

    def __init__(self, kind: str = "LSTM", layers: int = 1, bidirectional: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.core = getattr(nn, kind)(WIDTH, WIDTH, layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(WIDTH * (2 if bidirectional else 1), CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.core(self.table(tokens))[0][:, -1])


class Cells(nn.Module):
    """A loop over LSTMCell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), WIDTH), x.new_zeros(len(x), WIDTH)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


class Attending(nn.Module):
    """A recurrent decoder that looks at a recurrent encoder, from two rows of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.table(source))
        hidden, _ = self.decoder(self.table(target), state)
        weights = torch.softmax(hidden @ memory.transpose(1, 2) / WIDTH**0.5, dim=-1)
        return self.head(torch.cat([hidden, weights @ memory], dim=-1))


def transformer_encoder(norm_first: bool = False) -> nn.Module:
    """nn.TransformerEncoder over vectors; a class of every position."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.1, batch_first=True, norm_first=norm_first)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, CLASSES))


class Translator(nn.Module):
    """nn.Transformer with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.core = nn.Transformer(WIDTH, 4, 1, 1, 32, dropout=0.0, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(6), persistent=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        hidden = self.core(self.table(source), self.table(target), tgt_mask=self.mask, tgt_is_causal=True)
        return self.head(hidden)


class CausalDecoder(nn.Module):
    """Fused attention, tied head."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(0.1 * torch.randn(6, WIDTH))
        self.inputs, self.outputs, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places
        query, key, value = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.inputs(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x + self.outputs(mixed))


class Dilated(nn.Module):
    """Gated, dilated, causal convolutions, as in WaveNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv1d(1, WIDTH, 1), nn.Conv1d(WIDTH, 1, 1)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**depth) for depth in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for depth, layer in enumerate(self.layers):
            values, gates = layer(functional.pad(x, (2**depth, 0))).chunk(2, dim=1)
            x = x + torch.tanh(values) * torch.sigmoid(gates)
        return self.head(x)


class DenseGraph(nn.Module):
    """Graph convolutions over adjacency matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        weights = torch.softmax(adjacency, dim=-1)
        return self.two(weights @ functional.relu(self.one(weights @ nodes))).mean(1)


class ScatterGraph(nn.Module):
    """Messages along edges, added up at the nodes they end in."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, start: Tensor, end: Tensor) -> Tensor:
        def at(places: Tensor) -> Tensor:
            return nodes.gather(1, places[..., None].expand(-1, -1, nodes.shape[-1]))

        messages = functional.relu(self.message(torch.cat([at(start), at(end)], dim=-1)))
        sums = nodes.new_zeros(*nodes.shape[:2], WIDTH).scatter_add(1, end[..., None].expand_as(messages), messages)
        return self.head(sums.mean(1))


class PointSet(nn.Module):
    """The same layers for every point, then the maximum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.local(points).max(dim=1).values)


class Triplet(nn.Module):
    """One network for three inputs; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))

    def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
        return functional.triplet_margin_loss(self.body(anchor), self.body(near), self.body(far))


class Recommender(nn.Module):
    """Bags of tokens and dense numbers, as in DLRM: products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(VOCABULARY, 8) for _ in range(2))
        self.dense, self.head = nn.Linear(12, 8), nn.Linear(8 + 3, 1)

    def forward(self, numbers: Tensor, one: Tensor, two: Tensor) -> Tensor:
        dense = self.dense(numbers)
        vectors = torch.stack([dense, self.bags[0](one), self.bags[1](two)], dim=1)
        pairs = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.triu_indices(3, 3, offset=1).unbind()
        return self.head(torch.cat([dense, pairs[:, rows, columns]], dim=1))


class Factorisation(nn.Module):
    """Users times items."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(30, 8), nn.Embedding(40, 8)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.users(user) * self.items(item)).sum(-1, keepdim=True)


class Coupling(nn.Module):
    """A normalising flow; returns the negative log-likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 12)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for net in self.nets:
            kept, moved = x.chunk(2, dim=-1)
            scale, shift = net(kept).chunk(2, dim=-1)
            x = torch.cat([moved * torch.tanh(scale).exp() + shift, kept], dim=-1)
            total = total + torch.tanh(scale).sum(-1)
        return (0.5 * x.square().sum(-1) - total).mean()


class Steps(nn.Module):
    """An ordinary differential equation in fixed Runge-Kutta steps: one module called many times."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.head = nn.Sequential(nn.Linear(12, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 12)), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            half = x + 0.25 * self.rate(x)
            x = x + 0.5 * self.rate(half)
        return self.head(x)


class Siren(nn.Module):
    """Sines of coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(2, WIDTH), nn.Linear(WIDTH, WIDTH)]), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(30 * layer(x))
        return self.head(x)


class Capsules(nn.Module):
    """Routing by agreement, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(4, CLASSES, 3, 6))

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bid,icdo->bico", x.view(-1, 4, 3), self.weight)
        logits = x.new_zeros(len(x), 4, CLASSES)
        for _ in range(3):
            poses = (logits.softmax(-1)[..., None] * votes).sum(1)
            logits = logits + (votes * poses[:, None]).sum(-1)
        return poses.square().sum(-1)


class GatheredExperts(nn.Module):
    """Top-2 of four experts with a fixed capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up, self.down = (nn.Parameter(0.1 * torch.randn(4, *shape)) for shape in ((WIDTH, 32), (32, WIDTH)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1).transpose(1, 2)
        chosen, places = weights.topk(x.shape[1] // 2, dim=-1)
        taken = x[:, None].expand(-1, 4, -1, -1).gather(2, places[..., None].expand(-1, -1, -1, WIDTH))
        made = torch.einsum("betw,ewh->beth", taken, self.up).relu()
        made = torch.einsum("beth,ehw->betw", made, self.down) * chosen[..., None]
        out = x.scatter_add(1, places.flatten(1)[..., None].expand(-1, -1, WIDTH), made.flatten(1, 2))
        return self.head(out).mean(1)


class RoutedExperts(nn.Module):
    """Top-1 of four experts by a loop in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        best, choice = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = torch.where(choice == number)[0]
            out = out.index_add(0, rows, expert(flat[rows]) * best[rows, None])
        return self.head(out.view_as(x)).mean(1)


class LowRank(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, WIDTH).requires_grad_(False)
        self.down, self.up, self.head = nn.Linear(12, 2, bias=False), nn.Linear(2, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.relu(self.base(x) + self.up(self.down(x))))


def frozen_backbone() -> nn.Module:
    """Only the head is trained."""
    body = nn.Sequential(nn.Linear(12, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()).requires_grad_(False)
    return nn.Sequential(body, nn.Linear(WIDTH, CLASSES))


def weight_norm() -> nn.Module:
    """Weights under a parametrization."""
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(12, WIDTH)), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def spectral_norm() -> nn.Module:
    """A parametrization with buffers that every forward changes."""
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(12, WIDTH)), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


class Checkpointed(nn.Module):
    """Recomputes a part in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Linear(12, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Straight(torch.autograd.Function):
    """The sign forward, the identity backward."""

    @staticmethod
    def forward(context: object, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(context: object, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Binarised(nn.Module):
    """A custom autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(Straight.apply(self.one(x)))  # type: ignore[no-untyped-call]


class NestedInput(nn.Module):
    """Takes a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 8), nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, state: dict[str, Tensor]) -> Tensor:
        return self.head(torch.relu(self.left(state["mine"]) + self.right(state["theirs"])))


@dataclass
class Heads:
    """Two outputs."""

    classes: Tensor
    value: Tensor


class Multitask(nn.Module):
    """Returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.value = nn.Linear(12, WIDTH), nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Heads:
        hidden = torch.relu(self.body(x))
        return Heads(classes=self.classes(hidden), value=self.value(hidden))


class Gated(nn.Module):
    """Branches on values: cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, CLASSES), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if bool(x.sum() > 0) else self.two(x)
