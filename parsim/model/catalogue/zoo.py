"""The models parsim knows by name. This table needs no torch; the factories are imported when a module is built.

Each is shipped as traced beforehand, too, so that planning needs no torch: gzipped text with one Model as JSON per line, in
the order of GRANULARITIES. `python tools/generate_presets.py` writes these files.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from importlib.resources import files

from parsim.errors import ModelError
from parsim.model.model import GRANULARITIES, Model

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooRow:
    """One named model.

    Attributes:
        factory: a name in `parsim.model.catalogue.networks`, called with the arguments as keywords; for images with
            `input_shape`, too.
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


def _image(factory: str, input_shape: tuple[int, ...], **args: Scalar) -> ZooRow:
    return ZooRow(factory=factory, inputs="image", input_shape=input_shape, args=tuple(args.items()))


def _language(factory: str, *, hidden: int, layers: int, heads: int, vocab: int, seq: int) -> ZooRow:
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "vocab": vocab, "seq": seq}
    args = (*sizes.items(), ("dropout", 0.0))
    return ZooRow(factory=factory, inputs="tokens", input_shape=(seq,), args=args, classes="vocab")


# Parameters: resnet18 11,689,512, resnet34 21,797,672, resnet50 25,557,032, resnet101 44,549,160, resnet152 60,192,808;
# vit_b_16 86,567,656; vgg16 138,357,544, of which 123.6 M in linear layers; gpt (GPT-2 small) 124,439,808; bert (BERT base with
# its masked-language head, no pooler) 109,514,298. Multiply-accumulates at 224 x 224: resnet50 4.09 G, vit_b_16 17.6 G,
# vgg16 15.5 G.
ZOO: dict[str, ZooRow] = {
    **{f"resnet{depth}": _image(f"resnet{depth}", IMAGENET, num_classes=1000) for depth in (18, 34, 50, 101, 152)},
    "resnet_small": _image("resnet_small", DIGITS, num_classes=10, width=16),
    "vit_b_16": _image("vit_b_16", IMAGENET, num_classes=1000, dropout=0.0),
    "vit_small": _image("VisionTransformer", DIGITS, num_classes=10, patch=4, hidden=96, layers=4, heads=4, dropout=0.0),
    "vgg16": _image("vgg16", IMAGENET, num_classes=1000, dropout=0.0),
    "vgg_small": _image("vgg_small", DIGITS, num_classes=10, dropout=0.0),
    "mlp": _image("MLP", DIGITS, num_classes=10, width=512, depth=3, dropout=0.0),
    "gpt": _language("GPT", hidden=768, layers=12, heads=12, vocab=50257, seq=1024),
    "gpt_small": _language("GPT", hidden=128, layers=4, heads=4, vocab=256, seq=64),
    "bert": _language("BERT", hidden=768, layers=12, heads=12, vocab=30522, seq=512),
    "bert_small": _language("BERT", hidden=128, layers=4, heads=4, vocab=256, seq=64),
}

PRESETS: dict[str, tuple[str, dict[str, str | int | float | bool]]] = {
    **{name: (name, {}) for name in ZOO},
    **{f"{name}-100": (name, {"num_classes": 100}) for name in ("resnet50", "vit_b_16", "vgg16")},
}
"""By the stem of a file of traced Models: the name, and the arguments that differ from its defaults. With the loss."""
SUFFIX = ".jsonl.gz"


def preset_lines(stem: str) -> list[str]:
    """The JSON of each granularity. Raises ModelError if the file is not installed or broken."""
    resource = files("parsim.model.catalogue").joinpath("presets", f"{stem}{SUFFIX}")
    if not resource.is_file():
        raise ModelError(f"the preset {stem}{SUFFIX} is not installed; run python tools/generate_presets.py (needs torch)")
    try:
        lines = gzip.decompress(resource.read_bytes()).decode().splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ModelError(f"the preset {stem}{SUFFIX} is broken: {error}; install parsim again") from error
    if len(lines) != len(GRANULARITIES):
        raise ModelError(f"the preset {stem}{SUFFIX} has {len(lines)} models, not {len(GRANULARITIES)}; generate it again")
    return lines


def load_preset(stem: str, granularity: str) -> Model:
    """Raises ModelError if the file is not installed or broken."""
    return Model.from_json(preset_lines(stem)[GRANULARITIES.index(granularity)], f"preset {stem}{SUFFIX}")
