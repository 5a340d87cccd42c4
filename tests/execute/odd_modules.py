"""Modules as people write them, each odd in one way: what a planner meets beyond a stack of layers."""

from __future__ import annotations

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, CLASSES, TOKENS, VOCABULARY = 8, 3, 5, 11


class VAE(nn.Module):
    """Returns (loss, reconstruction, kl)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 2 * 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        made = self.decoder(mean + noise * (0.5 * log_variance).exp())
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        reconstruction = F.mse_loss(made, x)
        return reconstruction + 0.1 * kl, reconstruction, kl


class FlatBags(nn.Module):
    """EmbeddingBag on flat indices with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, WIDTH, mode="mean"), nn.Linear(WIDTH, CLASSES)

    def forward(self, indices: Tensor) -> Tensor:
        offsets = torch.arange(indices.shape[0], device=indices.device) * indices.shape[1]
        return self.head(self.bag(indices.reshape(-1), offsets))


class NeRF(nn.Module):
    """Rays, samples along them, a skip connection, and alpha compositing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(3))
        self.first, self.second = nn.Linear(18, WIDTH), nn.Linear(WIDTH + 18, WIDTH)
        self.density, self.colour = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)

    def forward(self, origin: Tensor, direction: Tensor) -> Tensor:
        depth = torch.linspace(0.1, 1.0, TOKENS, device=origin.device, dtype=origin.dtype)
        points = origin[:, None] + depth[None, :, None] * F.normalize(direction, dim=-1)[:, None]
        angles = (points[..., None] * self.bands).flatten(-2)
        encoded = torch.cat([angles.sin(), angles.cos()], -1)
        hidden = self.first(encoded).relu()
        hidden = self.second(torch.cat([hidden, encoded], -1)).relu()
        alpha = 1 - torch.exp(-F.softplus(self.density(hidden)).squeeze(-1) * 0.2)
        left = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1] + 1e-10], 1), 1)
        return ((alpha * left)[..., None] * self.colour(hidden).sigmoid()).sum(1)


class KAN(nn.Module):
    """Splines on every edge: a grid in a buffer, an einsum over basis functions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 6))
        self.base = nn.Parameter(0.3 * torch.randn(CLASSES, WIDTH))
        self.spline = nn.Parameter(0.1 * torch.randn(CLASSES, WIDTH, 6))

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.exp(-((x[..., None] - self.grid) ** 2))
        return F.silu(x) @ self.base.t() + torch.einsum("big,oig->bo", basis, self.spline)


def old_norms() -> nn.Module:
    """The hooks of torch.nn.utils that came before parametrizations."""
    return nn.Sequential(
        nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
        nn.ReLU(),
        nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        nn.Linear(WIDTH, CLASSES),
    )


class _Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh() ** 3


def compiled() -> nn.Module:
    """A compiled part inside a plain module."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.compile(_Cubed()), nn.Linear(WIDTH, CLASSES))  # type: ignore[arg-type]


class Spectral(nn.Module):
    """Complex weights, kept as pairs, between two transforms, as in a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 1, 1)
        self.weight = nn.Parameter(0.2 * torch.randn(4, 4, 3, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        spectrum = torch.fft.rfft2(x)
        kept = torch.zeros_like(spectrum)
        kept[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :3, :3], torch.view_as_complex(self.weight))
        return self.out(F.gelu(torch.fft.irfft2(kept, s=x.shape[-2:]) + x))


class Imaginary(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.head = nn.Parameter(torch.randn(WIDTH, dtype=torch.cfloat)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x * self.turn).abs())


class Equilibrium(nn.Module):
    """A fixed point without gradients, then one step with them (one-step DEQ)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.inner(z) + self.outer(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(6):
                z = self.step(z, x)
        return self.head(self.step(z.detach(), x))


class Recomputing(nn.Module):
    """torch.utils.checkpoint in both forms, around dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = torch.utils.checkpoint.checkpoint(self.blocks[1], x, use_reentrant=False)
        x = torch.utils.checkpoint.checkpoint(self.blocks[2], x, use_reentrant=True)
        return self.head(x)


class CastInside(nn.Module):
    """Autocast off inside the forward, and a part in float32 whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.autocast(x.device.type, enabled=False):
            hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.second(hidden)


class HalfInside(CastInside):
    """Autocast on inside the forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            hidden = self.first(x)
        return self.second(hidden.to(x.dtype))


class Teacher(nn.Module):
    """A momentum teacher: buffers that the forward updates, by the weights and by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.student(x)
        if self.training:
            self.centre.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
            self.calls += 1
        return self.head(hidden - self.centre.clone())


class Hooked(nn.Module):
    """Hooks that change inputs, outputs and gradients, and one that keeps features for later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, CLASSES)
        self.kept: list[Tensor] = []
        self.first.register_forward_hook(self._keep)
        self.second.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        self.second.register_full_backward_hook(lambda module, own, out: (own[0] * 0.5,))

    def _keep(self, module: nn.Module, args: object, out: Tensor) -> Tensor:
        self.kept.append(out)
        return out.relu()

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        hidden = self.second(self.first(x))
        return self.head(torch.cat([hidden, self.kept[0]], -1))


class GradientHook(nn.Module):
    """Gradient reversal by a hook on a tensor, as in domain-adversarial training."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, where: Tensor, label: Tensor) -> Tensor:
        hidden = self.features(x).relu()
        turned = hidden.clone()
        if turned.requires_grad:
            turned.register_hook(lambda gradient: -0.3 * gradient)
        return F.cross_entropy(self.label(hidden), label) + F.cross_entropy(self.domain(turned), where)


class Reverse(torch.autograd.Function):
    """The same by a function of one's own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -0.3 * gradient


class Domains(GradientHook):
    def forward(self, x: Tensor, where: Tensor, label: Tensor) -> Tensor:
        hidden = self.features(x).relu()
        turned: Tensor = Reverse.apply(hidden)
        return F.cross_entropy(self.label(hidden), label) + F.cross_entropy(self.domain(turned), where)


class Speech(nn.Module):
    """CTC with lengths as inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, WIDTH, batch_first=True), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, frames: Tensor, labels: Tensor, frame_lengths: Tensor, label_lengths: Tensor) -> Tensor:
        logits = self.head(self.rnn(frames)[0]).log_softmax(-1)
        return F.ctc_loss(logits.transpose(0, 1), labels, frame_lengths, label_lengths, zero_infinity=True)


class SpeechAlone(Speech):
    """CTC over whole sequences: lengths made of the shapes."""

    def forward(self, frames: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits = self.head(self.rnn(frames)[0]).log_softmax(-1)
        batch = frames.shape[0]
        of_frames = torch.full((batch,), frames.shape[1], dtype=torch.long)
        of_labels = torch.full((batch,), labels.shape[1], dtype=torch.long)
        return F.ctc_loss(logits.transpose(0, 1), labels, of_frames, of_labels, zero_infinity=True)


class SpeechInARow(Speech):
    """CTC of targets one after the other."""

    def forward(self, frames: Tensor, labels: Tensor, frame_lengths: Tensor, label_lengths: Tensor) -> Tensor:
        logits = self.head(self.rnn(frames)[0]).log_softmax(-1)
        return F.ctc_loss(logits.transpose(0, 1), labels.flatten(), frame_lengths, label_lengths)


class Masked(nn.Module):
    """Pruned weights: a hook on the parameter keeps their gradients zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        kept = (torch.arange(WIDTH * WIDTH) % 3 > 0).view(WIDTH, WIDTH)
        self.first.weight.register_hook(lambda gradient: gradient * kept)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu())


class Penalised(nn.Module):
    """A gradient penalty: a gradient inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        score = self.critic(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.squeeze(1) + 10 * (gradient.norm(dim=1) - 1).pow(2)


class Quantised(nn.Module):
    """VQ-VAE: a nearest code, the straight-through trick, a commitment loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.codes = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH), nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
        made = self.decoder(z + (code - z).detach())
        return F.mse_loss(made, x) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())


class Rotary(nn.Module):
    """Rotary positions by complex numbers, RMSNorm, grouped queries by repeat_interleave."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key_value = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(TOKENS), 1.0 / 100 ** (torch.arange(0, 4, 2) / 4))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def _turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[:, None].to(pairs.dtype)).flatten(-2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        normed = self.norm(x)
        query = self.query(normed).view(-1, TOKENS, 2, 4)
        key, value = self.key_value(normed).view(-1, TOKENS, 2, 1, 4).unbind(2)
        query, key = self._turned(query), self._turned(key)
        key, value = (entry.repeat_interleave(2, 2).transpose(1, 2) for entry in (key, value))
        made = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, is_causal=True)
        return self.head(x + made.transpose(1, 2).flatten(2))


class Batched(nn.Module):
    """A list of samples of one size made into a batch by hand, a loop over the batch, and a dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.stack([self.layer(row).relu() for row in x])
        return {"logits": self.head(hidden)}


class Weighted(nn.Module):
    """Uncertainty weights of two tasks, and a dict with a loss, as Hugging Face returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)
        self.uncertain = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, label: Tensor, value: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(x).relu()
        logits, number = self.one(hidden), self.two(hidden).squeeze(-1)
        losses = torch.stack([F.cross_entropy(logits, label), F.mse_loss(number, value)])
        return {"loss": (losses * torch.exp(-self.uncertain) + self.uncertain).sum(), "logits": logits}


class Hyper(nn.Module):
    """A network that makes the weights of another, per sample, by functional_call and bmm."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(4, WIDTH * CLASSES)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        weights = self.maker(task).view(-1, CLASSES, WIDTH)
        return torch.bmm(weights, x.unsqueeze(-1)).squeeze(-1)


class StateSpace(nn.Module):
    """A linear recurrence by a convolution in the frequency domain (S4), with complex poles."""

    def __init__(self) -> None:
        super().__init__()
        self.rates, self.angles = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.mix, self.head = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        poles = torch.complex(-self.rates.exp(), self.angles)
        kernel = (torch.exp(poles[:, None] * steps) * self.mix[:, None]).real
        size = 2 * x.shape[1]
        made = torch.fft.irfft(torch.fft.rfft(x.transpose(1, 2), size) * torch.fft.rfft(kernel, size), size)[..., : x.shape[1]]
        return self.head(made.transpose(1, 2).mean(1))
