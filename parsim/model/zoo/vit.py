"""Vision transformers of Dosovitskiy et al., "An Image is Worth 16x16 Words" (2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from parsim.errors import ModelError
from parsim.model.zoo.attention import SelfAttention


class EncoderBlock(nn.Module):
    """Pre-norm attention and MLP, each with a residual."""

    def __init__(self, hidden: int, heads: int, mlp: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden, eps=1e-6)
        self.attention = SelfAttention(hidden, heads, dropout=dropout)
        self.ln_2 = nn.LayerNorm(hidden, eps=1e-6)
        self.fc1 = nn.Linear(hidden, mlp)
        self.fc2 = nn.Linear(mlp, hidden)
        self.gelu = nn.GELU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.ln_1(x)))
        out: Tensor = x + self.dropout(self.fc2(self.gelu(self.fc1(self.ln_2(x)))))
        return out


class VisionTransformer(nn.Module):
    """Patches as a strided convolution, a class token, learned positions, pre-norm encoder, linear head."""

    def __init__(
        self,
        *,
        image_shape: tuple[int, ...],
        patch: int,
        hidden: int,
        layers: int,
        heads: int,
        num_classes: int,
        dropout: float,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape
        if height % patch or width % patch:
            raise ModelError(f"the image ({height} x {width}) must be divisible by the patch ({patch})")
        positions = (height // patch) * (width // patch) + 1
        self.conv_proj = nn.Conv2d(channels, hidden, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.pos_embedding = nn.Parameter(torch.empty(1, positions, hidden))
        self.layers = nn.ModuleList(EncoderBlock(hidden, heads, 4 * hidden, dropout) for _ in range(layers))
        self.ln = nn.LayerNorm(hidden, eps=1e-6)
        self.head = nn.Linear(hidden, num_classes)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        fan_in = self.conv_proj.weight[0].numel()
        nn.init.trunc_normal_(self.conv_proj.weight, std=math.sqrt(1 / fan_in))
        nn.init.zeros_(self.conv_proj.bias)  # type: ignore[arg-type]
        nn.init.normal_(self.pos_embedding, std=0.02)
        nn.init.trunc_normal_(self.head.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embedding
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.ln(x)[:, 0])
        return out


def vit_b_16(
    *, num_classes: int = 1000, dropout: float = 0.0, input_shape: tuple[int, ...] = (3, 224, 224)
) -> VisionTransformer:
    """86,567,656 parameters at 1000 classes and 224 x 224; 17.6 G multiply-accumulates."""
    return VisionTransformer(
        image_shape=input_shape, patch=16, hidden=768, layers=12, heads=12, num_classes=num_classes, dropout=dropout
    )


def vit_small(
    *,
    num_classes: int = 10,
    patch: int = 4,
    hidden: int = 96,
    layers: int = 4,
    heads: int = 4,
    dropout: float = 0.0,
    input_shape: tuple[int, ...] = (1, 32, 32),
) -> VisionTransformer:
    """For 32 x 32 images; trains on a CPU."""
    return VisionTransformer(
        image_shape=input_shape,
        patch=patch,
        hidden=hidden,
        layers=layers,
        heads=heads,
        num_classes=num_classes,
        dropout=dropout,
    )
