"""The modules of the zoo (`parsim.model.catalogue.zoo` names them, with every argument and its default)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from parsim.errors import ModelError

# Residual networks of He et al., "Deep Residual Learning for Image Recognition" (2015). ResNet-50 has its stride in the 3x3
# convolution of the bottleneck, as ImageNet training scripts have it ("v1.5").


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = self.relu(y + self.downsample(x))
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride), 1x1 around a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.downsample = _shortcut(inputs, width * self.expansion, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        out: Tensor = self.relu(y + self.downsample(x))
        return out


def _stage(block: type[BasicBlock] | type[Bottleneck], depth: int, inputs: int, width: int, stride: int) -> nn.Sequential:
    rest = (block(block.expansion * width, width, 1) for _ in range(depth - 1))
    return nn.Sequential(block(inputs, width, stride), *rest)


class ResNet(nn.Module):
    """Stem, four stages of blocks, global average pool, classifier.
    `width`: channels of the first stage; each later stage doubles them and halves the resolution. `large_stem`: 7x7 stride 2
    and a 3x3 max pool (ImageNet); otherwise 3x3 stride 2."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        *,
        num_classes: int,
        channels: int,
        width: int,
        large_stem: bool,
    ) -> None:
        super().__init__()
        self.conv1 = _conv(channels, width, 7 if large_stem else 3, stride=2)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if large_stem else nn.Identity()
        widths = [width * 2**number for number in range(4)]
        inputs = [width, *(block.expansion * size for size in widths)]
        self.layer1 = _stage(block, depths[0], inputs[0], widths[0], stride=1)
        self.layer2 = _stage(block, depths[1], inputs[1], widths[1], stride=2)
        self.layer3 = _stage(block, depths[2], inputs[2], widths[2], stride=2)
        self.layer4 = _stage(block, depths[3], inputs[3], widths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs[4], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        out: Tensor = self.fc(self.avgpool(x).flatten(1))
        return out


DEPTHS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}
"""By the number of layers with weights: the block, and how many of them each stage has."""


def _resnet(depth: int) -> Callable[..., ResNet]:
    def build(*, num_classes: int, input_shape: tuple[int, ...]) -> ResNet:
        return ResNet(*DEPTHS[depth], num_classes=num_classes, channels=input_shape[0], width=64, large_stem=True)

    return build


resnet18, resnet34, resnet50, resnet101, resnet152 = map(_resnet, DEPTHS)


def resnet_small(*, num_classes: int, width: int, input_shape: tuple[int, ...]) -> ResNet:
    """Eight basic blocks for 32 x 32 images; trains on a CPU."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes=num_classes, channels=input_shape[0], width=width, large_stem=False)


# VGG networks of Simonyan and Zisserman, "Very Deep Convolutional Networks" (2014): most parameters are in linear layers.


POOL = 0  # in a layout: a 2x2 max pool instead of a convolution of that many channels


class VGG(nn.Module):
    """3x3 convolutions and max pools, then three linear layers.
    `layout`: channels per convolution, POOL for a pool. `pooled`: side of the average-pooled map before the classifier.
    `width`: of the two hidden linear layers."""

    def __init__(
        self, layout: tuple[int, ...], *, channels: int, pooled: int, width: int, num_classes: int, dropout: float
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in layout:
            if size == POOL:
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, size, 3, padding=1), nn.ReLU()]
                channels = size
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(pooled)
        self.classifier = nn.Sequential(
            nn.Linear(channels * pooled**2, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01 if width > 1000 else (2 / module.in_features) ** 0.5)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return out


def vgg16(*, num_classes: int, dropout: float, input_shape: tuple[int, ...]) -> VGG:
    layout = (64, 64, POOL, 128, 128, POOL, *(256,) * 3, POOL, *(512,) * 3, POOL, *(512,) * 3, POOL)
    return VGG(layout, channels=input_shape[0], pooled=7, width=4096, num_classes=num_classes, dropout=dropout)


def vgg_small(*, num_classes: int, dropout: float, input_shape: tuple[int, ...]) -> VGG:
    """For 32 x 32 images; trains on a CPU."""
    layout = (16, POOL, 32, POOL, 64, 64, POOL)
    return VGG(layout, channels=input_shape[0], pooled=4, width=512, num_classes=num_classes, dropout=dropout)


class MLP(nn.Module):
    """`depth` hidden linear layers of `width` with ReLU, then a classifier. Input [batch, ...] is flattened."""

    def __init__(self, *, input_shape: tuple[int, ...], width: int, depth: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = math.prod(input_shape)
        for _ in range(depth):
            layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)]
            inputs = width
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.flatten(1))
        return out


class SelfAttention(nn.Module):
    """One fused projection to queries, keys and values, scaled dot-product attention, output projection.
    Input and output are [batch, positions, hidden]."""

    def __init__(self, hidden: int, heads: int, *, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        if hidden % heads:
            raise ModelError(f"hidden ({hidden}) must be divisible by heads ({heads})")
        self.heads = heads
        self.dropout = dropout
        self.causal = causal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, hidden = x.shape
        query, key, value = self.qkv(x).view(batch, positions, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, positions, hidden))
        return out


# Vision transformers of Dosovitskiy et al., "An Image is Worth 16x16 Words" (2020).


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
        input_shape: tuple[int, ...],
        patch: int,
        hidden: int,
        layers: int,
        heads: int,
        num_classes: int,
        dropout: float,
    ) -> None:
        super().__init__()
        channels, height, width = input_shape
        if height % patch or width % patch:
            raise ModelError(f"the image ({height} x {width}) must be divisible by the patch ({patch})")
        positions = (height // patch) * (width // patch) + 1
        self.conv_proj = nn.Conv2d(channels, hidden, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.pos_embedding = nn.Parameter(torch.empty(1, positions, hidden))
        self.layers = nn.ModuleList(EncoderBlock(hidden, heads, 4 * hidden, dropout) for _ in range(layers))
        self.ln = nn.LayerNorm(hidden, eps=1e-6)
        self.head = nn.Linear(hidden, num_classes)
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


def vit_b_16(*, num_classes: int, dropout: float, input_shape: tuple[int, ...]) -> VisionTransformer:
    sizes = {"patch": 16, "hidden": 768, "layers": 12, "heads": 12}
    return VisionTransformer(input_shape=input_shape, num_classes=num_classes, dropout=dropout, **sizes)


# A bidirectional transformer encoder with a masked-language-model head, after Devlin et al., "BERT" (2018).


_EPS = 1e-12


class Embeddings(nn.Module):
    """Token, position and token-type (always type 0) embeddings, normalised."""

    def __init__(self, hidden: int, vocab: int, seq: int, dropout: float) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(seq, hidden)
        self.token_type = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.word(tokens) + self.token_type(torch.zeros_like(tokens)) + self.position(positions)
        out: Tensor = self.dropout(self.norm(x))
        return out


class EncoderLayer(nn.Module):
    """Attention and MLP, each followed by residual and normalisation (post-norm)."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden, heads, dropout=dropout)
        self.attention_norm = nn.LayerNorm(hidden, eps=_EPS)
        self.intermediate = nn.Linear(hidden, 4 * hidden)
        self.output = nn.Linear(4 * hidden, hidden)
        self.output_norm = nn.LayerNorm(hidden, eps=_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        y = self.output(functional.gelu(self.intermediate(x)))
        out: Tensor = self.output_norm(x + self.dropout(y))
        return out


class MaskedLanguageHead(nn.Module):
    """Dense, GELU, normalisation, then the token embedding matrix with a separate bias."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=_EPS)
        self.decoder = nn.Linear(hidden, vocab)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.norm(functional.gelu(self.dense(x))))
        return out


class BERT(nn.Module):
    """Token ids [batch, positions <= seq] to logits [batch, positions, vocab]; no padding mask."""

    def __init__(self, *, hidden: int, layers: int, heads: int, vocab: int, seq: int, dropout: float) -> None:
        super().__init__()
        self.embeddings = Embeddings(hidden, vocab, seq, dropout)
        self.layers = nn.ModuleList(EncoderLayer(hidden, heads, dropout) for _ in range(layers))
        self.head = MaskedLanguageHead(hidden, vocab)
        self.head.decoder.weight = self.embeddings.word.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


# A decoder-only transformer with the sizes and names of GPT-2 (Radford et al., 2019).


class DecoderBlock(nn.Module):
    """Pre-norm causal attention and MLP, each with a residual."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = SelfAttention(hidden, heads, dropout=dropout, causal=True)
        self.ln_2 = nn.LayerNorm(hidden)
        self.c_fc = nn.Linear(hidden, 4 * hidden)
        self.c_proj = nn.Linear(4 * hidden, hidden)
        self.gelu = nn.GELU(approximate="tanh")
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        out: Tensor = x + self.dropout(self.c_proj(self.gelu(self.c_fc(self.ln_2(x)))))
        return out


class GPT(nn.Module):
    """Token ids [batch, positions <= seq] to logits [batch, positions, vocab]; the output matrix is the token embedding."""

    def __init__(self, *, hidden: int, layers: int, heads: int, vocab: int, seq: int, dropout: float) -> None:
        super().__init__()
        self.seq = seq
        self.wte = nn.Embedding(vocab, hidden)
        self.wpe = nn.Embedding(seq, hidden)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(DecoderBlock(hidden, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
            elif parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.seq:
            raise ModelError(f"{tokens.shape[1]} tokens exceed the {self.seq} positions; raise the argument seq")
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        out: Tensor = self.lm_head(self.ln_f(x))
        return out
