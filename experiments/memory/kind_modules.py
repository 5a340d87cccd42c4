"""Kinds of modules that people bring, as small as shows their memory: experts, a GAN, own losses, frozen and tied parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LENGTH, CLASSES, VOCABULARY = 128, 16, 10, 500


class Routed(nn.Module):
    """Two blocks of four experts, each of which takes the rows that chose it, in a loop."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Experts(experts) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        made: Tensor = self.head(x.mean(1))
        return made


class Experts(nn.Module):
    """The two best experts of every token."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.each = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, choice = self.gate(tokens).softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.each):
            rows, slot = torch.where(choice == number)
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, slot, None])
        return out.view(x.shape)


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    """3x3, BatchNorm and ReLU in place."""
    layers = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Two levels down and up, with skips; a class of every pixel."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter, self.down = convolution(3, width), convolution(width, 2 * width, 2)
        self.bottom = convolution(2 * width, 4 * width, 2)
        self.up, self.join = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), convolution(4 * width, 2 * width)
        self.top, self.leave = nn.ConvTranspose2d(2 * width, width, 2, 2), nn.Conv2d(2 * width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.enter(x)
        middle = self.down(high)
        joined = self.join(torch.cat([middle, self.up(self.bottom(middle))], 1))
        made: Tensor = self.leave(torch.cat([high, self.top(joined)], 1))
        return made


class Adversaries(nn.Module):
    """One step of a GAN, as docs/models.md shows it: one number per sample."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        made = self.generator(noise)
        judged = F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(made.detach()))
        fixed = {name: value.detach() for name, value in self.discriminator.named_parameters()}
        fooled = F.softplus(-torch.func.functional_call(self.discriminator, fixed, (made,)))
        return (judged + fooled).squeeze(1)


class LowRank(nn.Module):
    """A frozen layer with a trained update of low rank beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + 2.0 * self.up(self.down(x))
        return made


class Adapted(nn.Module):
    """A frozen language model with LoRA in its layers: attention with dropout, a frozen and tied table."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.table.weight.requires_grad_(False)
        self.layers = nn.ModuleList(AdaptedLayer() for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.table.weight)


class AdaptedLayer(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.after = (nn.LayerNorm(WIDTH).requires_grad_(False) for _ in range(2))
        self.inputs, self.outputs = LowRank(WIDTH, 3 * WIDTH), LowRank(WIDTH, WIDTH)
        self.wide, self.narrow = LowRank(WIDTH, 4 * WIDTH), LowRank(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(self.norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.outputs(mixed), 0.1, self.training)
        made: Tensor = x + self.narrow(F.gelu(self.wide(self.after(x))))
        return made


def frozen_trunk(width: int = 32) -> nn.Module:
    """Frozen convolutions with BatchNorm, a trained head."""
    trunk = nn.Sequential(convolution(3, width), convolution(width, width, 2), convolution(width, 2 * width, 2))
    trunk.requires_grad_(False)
    head = nn.Flatten(), nn.Linear(2 * width * 64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(*trunk, *head)


class TiedDecoder(nn.Module):
    """torch's own encoder layers under a causal mask; the head is the table of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        made: Tensor = self.head(self.layers(self.table(tokens), mask=mask, is_causal=True))
        return made


class Described(nn.Module):
    """Several inputs of several types, one the same for every batch; its own loss beside its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(convolution(3, 32), convolution(32, 64, 2), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.join, self.head = nn.Linear(1024 + WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, image: Tensor, words: Tensor, mask: Tensor, prior: Tensor, labels: Tensor) -> dict[str, Tensor]:
        said = (self.words(words) * mask[:, :, None]).mean(1)
        hidden = F.dropout(F.relu(self.join(torch.cat([self.image(image), said], 1))), 0.2, self.training)
        logits = self.head(hidden) + prior
        return {"loss": F.cross_entropy(logits, labels, label_smoothing=0.1), "logits": logits}


class Gated(nn.Module):
    """A bidirectional GRU, which torch's CPU build runs operator by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(2 * WIDTH, CLASSES)
        self.core = nn.GRU(WIDTH, WIDTH, 1, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.head(self.core(self.table(tokens))[0].mean(1))
        return made


class Pair(nn.Module):
    """Two views of every sample compared with those of all samples of the batch: its loss is no sum over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        left, right = (F.normalize(self.body(view), dim=1) / 0.3 for view in (one, other))
        return F.cross_entropy(left @ right.T, torch.arange(len(one)))
