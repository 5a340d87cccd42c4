"""Small image models as people write them; factories for the rows of the matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

CLASSES, WIDTH = 5, 8


def _head(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def plain_cnn() -> nn.Module:
    """Convolutions, pooling, a linear head."""
    return nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(WIDTH, WIDTH, 3), _head())


class Residual(nn.Module):
    """Two normalised convolutions beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm_one, self.norm_two = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.norm_one(self.one(x)))
        return functional.relu(x + self.norm_two(self.two(hidden)))


def residual_cnn() -> nn.Module:
    """BatchNorm and shortcuts."""
    return nn.Sequential(nn.Conv2d(3, WIDTH, 3), Residual(WIDTH), Residual(WIDTH), _head())


def depthwise_cnn() -> nn.Module:
    """Depthwise and pointwise convolutions, as in MobileNet."""

    def block() -> nn.Sequential:
        depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        return nn.Sequential(depthwise, nn.BatchNorm2d(WIDTH), nn.ReLU6(inplace=True), nn.Conv2d(WIDTH, WIDTH, 1))

    return nn.Sequential(nn.Conv2d(3, WIDTH, 3), block(), block(), _head())


class UNet(nn.Module):
    """Class maps: down, up, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.middle = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2)
        self.head = nn.Conv2d(2 * WIDTH, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = functional.relu(self.down(x))
        low = functional.relu(self.middle(functional.max_pool2d(skip, 2)))
        return self.head(torch.cat([skip, self.up(low)], dim=1))


class DenseBlocks(nn.Module):
    """Every layer reads all before it, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * number, 4, 3, padding=1) for number in range(3))
        self.head = _head(15)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, functional.relu(layer(x))], dim=1)
        return self.head(x)


class SqueezeExcite(nn.Module):
    """Channels weighted by what the image holds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, WIDTH, 3), _head()
        self.squeeze, self.excite = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        weight = torch.sigmoid(self.excite(functional.relu(self.squeeze(x.mean((2, 3))))))
        return self.head(x * weight[:, :, None, None])


class Inception(nn.Module):
    """Branches side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(3, 4, size, padding=size // 2) for size in (1, 3, 5))
        self.head = _head(15)

    def forward(self, x: Tensor) -> Tensor:
        pooled = functional.avg_pool2d(x, 3, stride=1, padding=1)
        return self.head(torch.cat([*(branch(x) for branch in self.branches), pooled], dim=1))


def video_cnn() -> nn.Module:
    """Convolutions over time, height and width."""
    return nn.Sequential(nn.Conv3d(3, WIDTH, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES))


class Autoencoder(nn.Module):
    """Transposed convolutions; the target is an image."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1)
        self.decoder = nn.ConvTranspose2d(WIDTH, 3, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


class VariationalAutoencoder(nn.Module):
    """Returns its loss, for which it draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 8), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        rebuilt = (self.decoder(drawn) - x).square().sum(-1)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
        return (rebuilt + divergence).mean()


class ConvNext(nn.Module):
    """Large depthwise kernels, channels last, a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, WIDTH, 2, stride=2), nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.scale, self.head = nn.Parameter(torch.full((WIDTH,), 0.1)), _head()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        hidden = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        hidden = (self.scale * self.down(functional.gelu(self.up(hidden)))).permute(0, 3, 1, 2)
        return self.head(x + hidden)


class WindowAttention(nn.Module):
    """Attention within shifted windows, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attention = nn.Conv2d(3, WIDTH, 1), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.roll(self.stem(x), (2, 2), (2, 3))
        batch, channels, height, width = x.shape
        windows = x.view(batch, channels, height // 4, 4, width // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, channels)
        windows = windows + self.attention(windows, windows, windows, need_weights=False)[0]
        return self.head(windows.reshape(batch, -1, channels).mean(1))


class PatchTransformer(nn.Module):
    """A ViT of nn.TransformerEncoder, with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 4, stride=4), nn.Parameter(torch.zeros(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        hidden = self.encoder(torch.cat([self.token.expand(len(x), -1, -1), tokens], dim=1))
        return self.head(hidden[:, 0])


class Mixer(nn.Module):
    """Products over patches, then over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 2, stride=2)
        self.tokens = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        return self.head((x + self.channels(x)).mean(1))


class FourierOperator(nn.Module):
    """Weights on the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv2d(3, WIDTH, 1), nn.Conv2d(WIDTH, 1, 1)
        self.weight = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH, 3, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        low = torch.fft.rfft2(x)[:, :, :3, :3]
        mixed = torch.einsum("bixy,ioxy->boxy", low, torch.view_as_complex(self.weight))
        return self.project(functional.gelu(x + torch.fft.irfft2(mixed, s=x.shape[-2:])))


class Denoiser(nn.Module):
    """A diffusion net: an image and its step."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(50, WIDTH)
        self.first, self.last = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 3, 3, padding=1)
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)) + self.time(t)[:, :, None, None]
        return self.last(functional.silu(hidden))


class SelfSupervised(nn.Module):
    """Two views of each image against those of all others: its loss is not a sum over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        left, right = (functional.normalize(self.body(view), dim=-1) for view in (one, other))
        return functional.cross_entropy(left @ right.T / 0.1, torch.arange(len(one), device=one.device))


def discriminator() -> nn.Module:
    """Of a GAN: real or not."""
    return nn.Sequential(nn.Conv2d(3, WIDTH, 4, stride=2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(WIDTH * 9, 1))


def generator() -> nn.Module:
    """Of a GAN: an image of noise."""
    return nn.Sequential(
        nn.ConvTranspose2d(WIDTH, WIDTH, 4),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        nn.ConvTranspose2d(WIDTH, 3, 2, stride=2),
        nn.Tanh(),
    )
