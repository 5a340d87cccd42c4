"""What the paper prints: Table I, and what it says of its set-up. Needs the standard library alone.

Source: arXiv 2503.23186, Table I and section IV. Batch and image size, precision and optimizer are not given. The memory of one
GPU and of data parallelism fits 128 images of 224 x 224 per GPU in fp32, with SGD and momentum for ResNet-50 and Adam for ViT.
"""

from __future__ import annotations

from dataclasses import dataclass

STRATEGIES = ("single", "dp", "mp", "hp", "adaptive")
EPOCHS, IMAGES_PER_EPOCH, GPUS, BATCH_PER_GPU = 100, 50_000, 8, 128
IMAGES = EPOCHS * IMAGES_PER_EPOCH


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """Rows of Table I by strategy, in the order of STRATEGIES.

    Attributes:
        spec: name in the zoo. granularity: at which it is planned. optimizer: by which memory fits. stages: first components
            of four stages at module borders, for the fit.
        hours: of 100 epochs. communication: share of time. memory_gb: peak. accuracy: percent.
    """

    spec: str
    granularity: str
    optimizer: str
    stages: tuple[str, ...]
    hours: tuple[float, ...]
    communication: tuple[float, ...]
    memory_gb: tuple[float, ...]
    accuracy: tuple[float, ...]

    def printed(self, quantity: str, strategy: str) -> float:
        """One cell of the table; quantity: "hours", "communication", "memory_gb" or "accuracy"."""
        row: tuple[float, ...] = getattr(self, quantity)
        return row[STRATEGIES.index(strategy)]


MODELS = {
    "ResNet-50": PaperModel(
        spec="resnet50",
        granularity="block",
        optimizer="sgd_momentum",
        stages=("layer1", "layer2", "layer3", "layer4"),
        hours=(24.6, 8.2, 12.8, 7.6, 6.5),
        communication=(0.0, 0.423, 0.186, 0.325, 0.271),
        memory_gb=(12.8, 14.2, 5.6, 7.8, 8.2),
        accuracy=(78.2, 77.9, 78.1, 78.0, 78.3),
    ),
    "ViT-B/16": PaperModel(
        spec="vit_b_16",
        granularity="sublayer",
        optimizer="adam",
        stages=("0", "3", "6", "9"),
        hours=(38.4, 14.6, 18.2, 13.2, 11.9),
        communication=(0.0, 0.387, 0.224, 0.298, 0.253),
        memory_gb=(28.4, 30.1, 9.8, 12.4, 13.6),
        accuracy=(81.5, 81.2, 81.4, 81.3, 81.6),
    ),
}
