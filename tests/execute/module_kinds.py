"""Kinds of modules beside those of tests/matrix, whose check "bitwise" is the same; for test_module_kinds.py and ModelSpecs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LENGTH, CLASSES = 8, 5, 3
Inputs = Callable[[int], tuple[Tensor, ...]]


class Encoder(nn.Module):
    """nn.TransformerEncoder copies its layer; a float mask is compared with the causal one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.encoder(x, mask=mask))


class Translator(nn.Module):
    """nn.Transformer with a causal target and the padding of its source."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 16, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        mask = self.transformer.generate_square_subsequent_mask(target.shape[1])
        out = self.transformer(source, target, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        return self.head(out)


class Recurrent(nn.Module):
    """A recurrent stack, with a trained first state if asked for."""

    def __init__(self, kind: type[nn.RNNBase], *, bidirectional: bool = False, layers: int = 1, state: bool = False) -> None:
        super().__init__()
        self.stack = kind(WIDTH, 6, num_layers=layers, bidirectional=bidirectional, batch_first=True)
        self.head = nn.Linear(12 if bidirectional else 6, CLASSES)
        self.state = nn.Parameter(torch.zeros(layers, 1, 6)) if state else None

    def forward(self, x: Tensor) -> Tensor:
        first = None if self.state is None else self.state.expand(-1, len(x), -1).contiguous()
        return self.head(self.stack(x, first)[0][:, -1])


class Packed(Recurrent):
    """Sequences packed by their lengths."""

    def __init__(self) -> None:
        super().__init__(nn.LSTM)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.stack(packed)[1][0][-1])


class Experts(nn.Module):
    """A router, and experts that are modules; `route` says which rows every one gets."""

    experts, chosen = 4, 2

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, self.experts)
        self.each = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, choice = self.gate(tokens).softmax(-1).topk(self.chosen, -1)
        return self.route(tokens, weights, choice).view(x.shape)

    def route(self, tokens: Tensor, weights: Tensor, choice: Tensor) -> Tensor:
        raise NotImplementedError


class WhereExperts(Experts):
    """As Mixtral did: a one-hot mask per expert, and index_add."""

    def route(self, tokens: Tensor, weights: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        mask = F.one_hot(choice, self.experts).permute(2, 1, 0)
        for number, expert in enumerate(self.each):
            slot, rows = torch.where(mask[number])
            out.index_add_(0, rows, expert(tokens[None, rows].reshape(-1, WIDTH)) * weights[rows, slot, None])
        return out


class HitExperts(Experts):
    """As Hugging Face does now: a loop over the experts that are hit."""

    def route(self, tokens: Tensor, weights: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        mask = F.one_hot(choice, self.experts).permute(2, 1, 0)
        for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, rows = torch.where(mask[number].squeeze(0))
            out.index_add_(0, rows, self.each[number](tokens[rows]) * weights[rows, slot, None])
        return out


class MaskExperts(Experts):
    """As in Switch: the rows where a mask is true, if there are any."""

    chosen = 1

    def route(self, tokens: Tensor, weights: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.each):
            mask = choice[:, 0] == number
            if mask.any():
                out[mask] = expert(tokens[mask]) * weights[mask]
        return out


class CountedExperts(Experts):
    """As in DeepSeek's training code: counts as Python numbers."""

    def route(self, tokens: Tensor, weights: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        counts = torch.bincount(choice.flatten(), minlength=self.experts).tolist()
        for number, expert in enumerate(self.each):
            if counts[number] == 0:
                continue
            rows, slot = torch.where(choice == number)
            out[rows] += expert(tokens[rows]) * weights[rows, slot, None]
        return out


class SortedExperts(Experts):
    """As in DeepSeek's inference code: tokens sorted by expert and cut by their counts."""

    def route(self, tokens: Tensor, weights: Tensor, choice: Tensor) -> Tensor:
        order = choice.flatten().argsort(stable=True)
        counts = choice.flatten().bincount(minlength=self.experts)
        parts = tokens[order // self.chosen].split(counts.tolist())
        made = torch.cat([expert(part) for expert, part in zip(self.each, parts, strict=True)])
        return torch.zeros_like(tokens).index_add(0, order // self.chosen, made * weights.flatten()[order, None])


class CapacityExperts(Experts):
    """Every expert takes its two best tokens of each sample: no size depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        weights, rows = self.gate(x).softmax(-1).transpose(1, 2).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.each):
            places = rows[:, number, :, None].expand(-1, -1, WIDTH)
            out = out.scatter_add(1, places, expert(x.gather(1, places)) * weights[:, number, :, None])
        return out


class LeakingRouter(nn.Module):
    """Hands lists of rows to the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        choice = self.gate(tokens).argmax(-1)
        return [(choice == number).nonzero()[:, 0] for number in range(4)]


class LeakingExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = LeakingRouter()
        self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        out = torch.zeros_like(tokens)
        for rows, expert in zip(self.router(tokens), self.each, strict=True):
            out = out.index_copy(0, rows, expert(tokens[rows]))
        return out.view(x.shape)


class Mixture(nn.Module):
    """Two blocks with experts between an input and an output layer."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Branch(nn.Module):
    """Another layer where the sum is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.gated = Gated()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gated(self.stem(x)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.one(x)
        return self.other(x).chunk(2, -1)[0].relu()


class Adversaries(nn.Module):
    """One step of a GAN: the discriminator's loss on real and detached samples, the generator's through a fixed discriminator.

    One backward gives each player the gradient of its own loss, because the other's parameters are detached in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        made = self.generator(noise)
        judged = F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(made.detach()))
        fixed = {name: value.detach() for name, value in self.discriminator.named_parameters()}
        return judged + F.softplus(-torch.func.functional_call(self.discriminator, fixed, (made,)))


class Gates(nn.Module):
    """A residual block whose norm is several operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.gate, self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Normed(nn.Module):
    """Residual blocks in a row."""

    def __init__(self, width: int = 64, blocks: int = 6) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Gates(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 5, dtype=torch.cfloat))
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, norm="ortho")
        return self.head((spectrum * (x.to(torch.cfloat) @ self.weight).conj()).abs() + spectrum.real)


def compiled() -> nn.Module:
    return nn.Sequential(torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())), nn.Linear(WIDTH, CLASSES))


def floats(*shapes: tuple[int, ...]) -> Inputs:
    return lambda batch: tuple(torch.randn(batch, *shape) for shape in shapes)


def tokens(high: int, *shape: int) -> Inputs:
    return lambda batch: (torch.randint(high, (batch, *shape)),)


def translated(batch: int) -> tuple[Tensor, ...]:
    padding = torch.arange(LENGTH).expand(batch, LENGTH) > 2 + torch.arange(batch)[:, None] % 3
    return torch.randn(batch, LENGTH, WIDTH), torch.randn(batch, 4, WIDTH), padding


SEQUENCE, VECTOR, IMAGE = floats((LENGTH, WIDTH)), floats((WIDTH,)), floats((3, 8, 8))
KINDS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "encoder_causal": (Encoder, SEQUENCE),
    "transformer": (Translator, translated),
    "gru_state": (lambda: Recurrent(nn.GRU, state=True), SEQUENCE),
    "experts_where": (lambda: Mixture(WhereExperts), SEQUENCE),
    "experts_hit": (lambda: Mixture(HitExperts), SEQUENCE),
    "experts_mask": (lambda: Mixture(MaskExperts), SEQUENCE),
    "experts_counted": (lambda: Mixture(CountedExperts), SEQUENCE),
    "experts_sorted": (lambda: Mixture(SortedExperts), SEQUENCE),
    "experts_capacity": (lambda: Mixture(CapacityExperts), SEQUENCE),
    "experts_leaking": (lambda: Mixture(LeakingExperts), SEQUENCE),
    "gan": (Adversaries, floats((WIDTH,), (4,))),
    "complex": (Complex, VECTOR),
    "compiled": (compiled, VECTOR),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(11, WIDTH), nn.Linear(WIDTH, CLASSES)), tokens(11, LENGTH)),
}
"""Name -> module and inputs of a batch."""


def mixture() -> nn.Module:
    """For a ModelSpec: [LENGTH, WIDTH] in, one vector of classes out."""
    return nn.Sequential(Mixture(WhereExperts), Pooled())


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)
