"""Residual networks of He et al., "Deep Residual Learning for Image Recognition" (2015).

ResNet-50 has its stride in the 3x3 convolution of the bottleneck, as ImageNet training scripts have it ("v1.5").
"""

from __future__ import annotations

from torch import Tensor, nn


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

    Args:
        width: channels of the first stage; each later stage doubles them and halves the resolution.
        large_stem: 7x7 stride 2 and a 3x3 max pool (ImageNet); otherwise 3x3 stride 2.
    """

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


def resnet50(*, num_classes: int = 1000, input_shape: tuple[int, ...] = (3, 224, 224)) -> ResNet:
    """25,557,032 parameters at 1000 classes; 4.09 G multiply-accumulates at 224 x 224."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes=num_classes, channels=input_shape[0], width=64, large_stem=True)


def resnet_small(*, num_classes: int = 10, width: int = 16, input_shape: tuple[int, ...] = (1, 32, 32)) -> ResNet:
    """Eight basic blocks for 32 x 32 images; trains on a CPU."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes=num_classes, channels=input_shape[0], width=width, large_stem=False)
