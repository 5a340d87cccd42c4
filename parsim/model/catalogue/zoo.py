"""The models parsim knows by name. This table needs no torch; the factories are imported when a module is built."""

from __future__ import annotations

from dataclasses import dataclass

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooRow:
    """One named model.

    Attributes:
        factory: "file:function" in this package; called with `input_shape` and the arguments as keywords.
        inputs: "image" (float [c, h, w]) or "tokens" (integers [seq]).
        input_shape: of one sample, unless a spec says otherwise; for tokens it follows the argument `seq`.
        args: every argument with its default. classes: the argument that bounds the targets.
        loss: a key of `parsim.model.objective.LOSSES`.
    """

    factory: str
    inputs: str
    input_shape: tuple[int, ...]
    args: tuple[tuple[str, Scalar], ...]
    classes: str = "num_classes"
    loss: str = "cross_entropy"


IMAGENET = (3, 224, 224)
DIGITS = (1, 32, 32)


def _language(factory: str, *, hidden: int, layers: int, heads: int, vocab: int, seq: int) -> ZooRow:
    sizes: tuple[tuple[str, Scalar], ...] = (("hidden", hidden), ("layers", layers), ("heads", heads), ("vocab", vocab))
    args = (*sizes, ("seq", seq), ("dropout", 0.0))
    return ZooRow(factory=factory, inputs="tokens", input_shape=(seq,), args=args, classes="vocab")


ZOO: dict[str, ZooRow] = {
    "resnet50": ZooRow(factory="networks:resnet50", inputs="image", input_shape=IMAGENET, args=(("num_classes", 1000),)),
    "resnet_small": ZooRow(
        factory="networks:resnet_small", inputs="image", input_shape=DIGITS, args=(("num_classes", 10), ("width", 16))
    ),
    "vit_b_16": ZooRow(
        factory="networks:vit_b_16", inputs="image", input_shape=IMAGENET, args=(("num_classes", 1000), ("dropout", 0.0))
    ),
    "vit_small": ZooRow(
        factory="networks:vit_small",
        inputs="image",
        input_shape=DIGITS,
        args=(("num_classes", 10), ("patch", 4), ("hidden", 96), ("layers", 4), ("heads", 4), ("dropout", 0.0)),
    ),
    "vgg16": ZooRow(
        factory="networks:vgg16", inputs="image", input_shape=IMAGENET, args=(("num_classes", 1000), ("dropout", 0.0))
    ),
    "vgg_small": ZooRow(
        factory="networks:vgg_small", inputs="image", input_shape=DIGITS, args=(("num_classes", 10), ("dropout", 0.0))
    ),
    "mlp": ZooRow(
        factory="networks:mlp",
        inputs="image",
        input_shape=DIGITS,
        args=(("num_classes", 10), ("width", 512), ("depth", 3), ("dropout", 0.0)),
    ),
    "gpt": _language("networks:gpt", hidden=768, layers=12, heads=12, vocab=50257, seq=1024),
    "gpt_small": _language("networks:gpt", hidden=128, layers=4, heads=4, vocab=256, seq=64),
    "bert": _language("networks:bert", hidden=768, layers=12, heads=12, vocab=30522, seq=512),
    "bert_small": _language("networks:bert", hidden=128, layers=4, heads=4, vocab=256, seq=64),
}
