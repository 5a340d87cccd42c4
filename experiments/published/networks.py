"""Networks of published rows that parsim's zoo lacks, for pricing alone: residual networks with groups, and two detectors.

Model factories for `ModelSpec("experiments.published.networks:...")`. A detector returns the mean of its outputs over all
anchors, because a loss of the zoo reads one row per image. So they leave out the matching of boxes, their losses, the
suppression of boxes and the gathering of regions (RoIAlign); regions are as many copies of a pooled array, which their heads
read in full.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CHANNELS = 256
"""Of a feature pyramid."""
REGIONS, MASKED = 512, 128
"""Of an image that the heads of Mask R-CNN read in training: 512 samples, of which a quarter are positive and get a mask."""
LEVELS = 5


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, *, bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=bias)


class GroupedBottleneck(nn.Module):
    """1x1, grouped 3x3 (with the stride), 1x1 around a shortcut."""

    def __init__(self, inputs: int, width: int, outputs: int, groups: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride, groups), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        plain = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if plain else nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        out: Tensor = self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))
        return out


class Stem(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(_conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))


def _stages(depths: tuple[int, ...], groups: int, base: int) -> nn.ModuleList:
    """Four stages; the inside of a block is groups * base channels wide in the first, and doubles."""
    stages, inputs = nn.ModuleList(), 64
    for number, depth in enumerate(depths):
        width, outputs = groups * base * 2**number, 256 * 2**number
        blocks = []
        for block in range(depth):
            blocks.append(GroupedBottleneck(inputs, width, outputs, groups, 2 if number and not block else 1))
            inputs = outputs
        stages.append(nn.Sequential(*blocks))
    return stages


class Classifier(nn.Module):
    """Stem, stages, global average pool, classifier."""

    def __init__(self, depths: tuple[int, ...], groups: int, base: int, num_classes: int) -> None:
        super().__init__()
        self.stem, self.stages = Stem(), _stages(depths, groups, base)
        self.fc = nn.Linear(2048, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        out: Tensor = self.fc(x.mean(dim=(2, 3)))
        return out


class Pyramid(nn.Module):
    """Features of the last stages at 256 channels each, and coarser ones. Lin et al. 2017, "Feature Pyramid Networks"."""

    def __init__(self, depths: tuple[int, ...], groups: int, base: int, first: int) -> None:
        super().__init__()
        self.stem, self.stages, self.first = Stem(), _stages(depths, groups, base), first
        self.inner = nn.ModuleList(_conv(256 * 2**number, CHANNELS, 1, bias=True) for number in range(first, 4))
        self.outer = nn.ModuleList(_conv(CHANNELS, CHANNELS, 3, bias=True) for _ in range(first, 4))
        self.coarser = nn.ModuleList(_conv(CHANNELS, CHANNELS, 3, 2, bias=True) for _ in range(LEVELS - (4 - first)))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, found = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        above: Tensor | None = None
        levels = []
        for feature, inner, outer in reversed(list(zip(found[self.first :], self.inner, self.outer, strict=True))):
            below = inner(feature)
            if above is not None:
                below = below + nn.functional.interpolate(above, size=below.shape[-2:])
            above = below
            levels.insert(0, outer(below))
        for coarser in self.coarser:
            levels.append(coarser(levels[-1]))
        return levels


def _tower(outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [_conv(CHANNELS, CHANNELS, 3, bias=True), nn.ReLU()]
    return nn.Sequential(*layers, _conv(CHANNELS, outputs, 3, bias=True))


class RetinaNet(nn.Module):
    """Lin et al. 2017, "Focal Loss for Dense Object Detection": nine anchors per place of five levels."""

    def __init__(self, depths: tuple[int, ...], groups: int, base: int, num_classes: int) -> None:
        super().__init__()
        self.body = Pyramid(depths, groups, base, first=1)
        self.classes, self.boxes, self.number = _tower(9 * num_classes), _tower(9 * 4), num_classes

    def forward(self, x: Tensor) -> Tensor:
        means = []
        for level in self.body(x):
            classes = self.classes(level).unflatten(1, (9, self.number)).mean(dim=(1, 3, 4))
            means.append(classes + self.boxes(level).mean(dim=(1, 2, 3)).unsqueeze(1))
        return torch.stack(means).sum(dim=0)


class MaskRCNN(nn.Module):
    """He et al. 2017, with a feature pyramid: proposals, a head of boxes and one of masks."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = Pyramid((3, 4, 6, 3), 1, 64, first=0)
        self.proposals = nn.Sequential(_conv(CHANNELS, CHANNELS, 3, bias=True), nn.ReLU())
        self.scores = _conv(CHANNELS, 3 * 5, 1, bias=True)
        self.box = nn.Sequential(nn.Linear(CHANNELS * 49, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
        self.outputs = nn.Linear(1024, 5 * num_classes)
        convolutions = [layer for _ in range(4) for layer in (_conv(CHANNELS, CHANNELS, 3, bias=True), nn.ReLU())]
        self.mask = nn.Sequential(*convolutions, nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, stride=2), nn.ReLU())
        self.masks = _conv(CHANNELS, num_classes, 1, bias=True)
        self.number = num_classes

    def forward(self, x: Tensor) -> Tensor:
        levels = self.body(x)
        proposed = torch.stack([self.scores(self.proposals(level)).mean(dim=(1, 2, 3)) for level in levels]).sum(dim=0)
        pooled = nn.functional.adaptive_avg_pool2d(levels[0], 7)
        regions = pooled.flatten(1).unsqueeze(1).expand(-1, REGIONS, -1)
        boxes = self.outputs(self.box(regions)).unflatten(2, (self.number, 5)).mean(dim=(1, 3))
        areas = nn.functional.adaptive_avg_pool2d(levels[0], 14)
        masked = areas.unsqueeze(1).expand(-1, MASKED, -1, -1, -1).flatten(0, 1)
        masks = self.masks(self.mask(masked)).unflatten(0, (-1, MASKED)).mean(dim=(1, 3, 4))
        out: Tensor = boxes + masks + proposed.unsqueeze(1)
        return out


def resnext50_32x4d(*, num_classes: int = 1000) -> Classifier:
    return Classifier((3, 4, 6, 3), 32, 4, num_classes)


def resnext101_32x4d(*, num_classes: int = 1000) -> Classifier:
    return Classifier((3, 4, 23, 3), 32, 4, num_classes)


def retinanet_resnext50(*, num_classes: int = 264) -> RetinaNet:
    """With the classes of MLPerf's part of Open Images."""
    return RetinaNet((3, 4, 6, 3), 32, 4, num_classes)


def mask_rcnn(*, num_classes: int = 81) -> MaskRCNN:
    return MaskRCNN(num_classes)
