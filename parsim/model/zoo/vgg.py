"""VGG networks of Simonyan and Zisserman, "Very Deep Convolutional Networks" (2014): most parameters are in linear layers."""

from __future__ import annotations

from torch import Tensor, nn

POOL = 0  # in a layout: a 2x2 max pool instead of a convolution of that many channels


class VGG(nn.Module):
    """3x3 convolutions and max pools, then three linear layers.

    Args:
        layout: channels per convolution, POOL for a pool. pooled: side of the average-pooled map before the classifier.
        width: of the two hidden linear layers.
    """

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


def vgg16(*, num_classes: int = 1000, dropout: float = 0.0, input_shape: tuple[int, ...] = (3, 224, 224)) -> VGG:
    """138,357,544 parameters at 1000 classes, 123.6 M of them in the linear layers; 15.5 G multiply-accumulates at 224."""
    layout = (64, 64, POOL, 128, 128, POOL, *(256,) * 3, POOL, *(512,) * 3, POOL, *(512,) * 3, POOL)
    return VGG(layout, channels=input_shape[0], pooled=7, width=4096, num_classes=num_classes, dropout=dropout)


def vgg_small(*, num_classes: int = 10, dropout: float = 0.0, input_shape: tuple[int, ...] = (1, 32, 32)) -> VGG:
    """For 32 x 32 images; trains on a CPU."""
    layout = (16, POOL, 32, POOL, 64, 64, POOL)
    return VGG(layout, channels=input_shape[0], pooled=4, width=512, num_classes=num_classes, dropout=dropout)
