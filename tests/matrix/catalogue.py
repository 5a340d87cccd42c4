"""The models of the matrix: each as a user would ask for it, by a spec."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from parsim.model.inputs import ModelInput
from parsim.model.spec import ModelSpec
from tests.architectures import ARCHITECTURES, Architecture

VISION, SEQUENCE = "tests.matrix.vision_modules", "tests.matrix.sequence_modules"
IMAGE = (ModelInput("x", (3, 8, 8)),)
VECTOR = (ModelInput("x", (12,)),)
SEQUENCES = (ModelInput("x", (6, 16)),)
TOKENS = (ModelInput("tokens", (6,), "int64", 40),)
PAIR = (ModelInput("source", (6,), "int64", 40), ModelInput("target", (6,), "int64", 40))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model: its name, its group, and how a user asks for it."""

    name: str
    group: str
    spec: ModelSpec


def _own(module: str, entries: dict[str, ModelSpec]) -> list[Row]:
    group = "images" if module == VISION else "sequences, tables, graphs"
    return [Row(name=name, group=group, spec=spec) for name, spec in entries.items()]


def _spec(
    module: str, factory: str, inputs: tuple[ModelInput, ...] | None = None, *, loss: str | None = None, **more: object
) -> ModelSpec:
    """Inputs of one sequential module have no name: by shape."""
    output, classes_dim = more.pop("output", None), more.pop("classes_dim", None)
    control_flow = str(more.pop("control_flow", "refuse"))
    arguments = tuple(sorted(more.items()))
    name = f"{module}:{factory}"
    if factory[0].islower() and inputs is not None and len(inputs) == 1:  # a Sequential calls its input `input`
        (entry,) = inputs
        inputs = (ModelInput("input", entry.shape, entry.dtype, entry.high),)
    asked = {"loss": loss, "output": output, "classes_dim": classes_dim, "control_flow": control_flow}
    return ModelSpec(name=name, args=arguments, inputs=inputs, **asked)  # type: ignore[arg-type]


def _zoo() -> list[Row]:
    names = ("mlp", "resnet_small", "vgg_small", "vit_small", "gpt_small", "bert_small")
    return [Row(name=name, group="zoo", spec=ModelSpec(name=name)) for name in names]


_VISION = {
    "plain CNN": _spec(VISION, "plain_cnn", IMAGE),
    "residual CNN": _spec(VISION, "residual_cnn", IMAGE),
    "depthwise CNN": _spec(VISION, "depthwise_cnn", IMAGE),
    "U-Net": _spec(VISION, "UNet", IMAGE, loss="cross_entropy", classes_dim=0),
    "dense blocks": _spec(VISION, "DenseBlocks", IMAGE),
    "squeeze and excite": _spec(VISION, "SqueezeExcite", IMAGE),
    "inception": _spec(VISION, "Inception", IMAGE),
    "video CNN": _spec(VISION, "video_cnn", (ModelInput("x", (3, 4, 6, 6)),)),
    "autoencoder": _spec(VISION, "Autoencoder", IMAGE, loss="mse"),
    "VAE": _spec(VISION, "VariationalAutoencoder", VECTOR, loss="own"),
    "ConvNeXt block": _spec(VISION, "ConvNext", IMAGE),
    "window attention": _spec(VISION, "WindowAttention", IMAGE),
    "ViT of nn modules": _spec(VISION, "PatchTransformer", IMAGE),
    "MLP-Mixer": _spec(VISION, "Mixer", IMAGE),
    "Fourier operator": _spec(VISION, "FourierOperator", IMAGE, loss="mse"),
    "diffusion net": _spec(VISION, "Denoiser", (*IMAGE, ModelInput("t", (), "int64", 50)), loss="mse"),
    "self-supervised pair": _spec(
        VISION, "SelfSupervised", (ModelInput("one", (3, 8, 8)), ModelInput("other", (3, 8, 8))), loss="own"
    ),
    "GAN discriminator": _spec(VISION, "discriminator", IMAGE, loss="bce"),
    "GAN generator": _spec(VISION, "generator", (ModelInput("x", (8, 1, 1)),), loss="mse"),
}

_SEQUENCE = {
    "MLP": _spec(SEQUENCE, "perceptron", VECTOR),
    "regression": _spec(SEQUENCE, "regression", VECTOR),
    "LSTM": _spec(SEQUENCE, "Recurrent", TOKENS),
    "GRU": _spec(SEQUENCE, "Recurrent", TOKENS, kind="GRU"),
    "bidirectional LSTM": _spec(SEQUENCE, "Recurrent", TOKENS, layers=2, bidirectional=True),
    "RNN": _spec(SEQUENCE, "Recurrent", TOKENS, kind="RNN"),
    "LSTMCell loop": _spec(SEQUENCE, "Cells", (ModelInput("x", (5, 6)),)),
    "recurrent translator": _spec(SEQUENCE, "Attending", PAIR, loss="cross_entropy"),
    "nn.TransformerEncoder": _spec(SEQUENCE, "transformer_encoder", SEQUENCES, loss="cross_entropy"),
    "nn.TransformerEncoder, norm first": _spec(
        SEQUENCE, "transformer_encoder", SEQUENCES, loss="cross_entropy", norm_first=True
    ),
    "nn.Transformer": _spec(SEQUENCE, "Translator", PAIR, loss="cross_entropy"),
    "causal decoder, tied": _spec(SEQUENCE, "CausalDecoder", TOKENS),
    "causal decoder, untied": _spec(SEQUENCE, "CausalDecoder", TOKENS, tied=False),
    "dilated convolutions": _spec(SEQUENCE, "Dilated", (ModelInput("x", (1, 12)),), loss="mse"),
    "graph, dense": _spec(SEQUENCE, "DenseGraph", (ModelInput("nodes", (6, 4)), ModelInput("adjacency", (6, 6)))),
    "graph, edges": _spec(
        SEQUENCE,
        "ScatterGraph",
        (ModelInput("nodes", (6, 4)), ModelInput("start", (9,), "int64", 6), ModelInput("end", (9,), "int64", 6)),
    ),
    "point set": _spec(SEQUENCE, "PointSet", (ModelInput("points", (10, 3)),)),
    "triplet": _spec(
        SEQUENCE,
        "Triplet",
        (ModelInput("anchor", (12,)), ModelInput("near", (12,)), ModelInput("far", (12,))),
        loss="own",
    ),
    "recommender": _spec(
        SEQUENCE,
        "Recommender",
        (ModelInput("numbers", (12,)), ModelInput("one", (3,), "int64", 40), ModelInput("two", (3,), "int64", 40)),
        loss="bce",
    ),
    "matrix factorisation": _spec(
        SEQUENCE, "Factorisation", (ModelInput("user", (), "int64", 30), ModelInput("item", (), "int64", 40)), loss="mse"
    ),
    "normalising flow": _spec(SEQUENCE, "Coupling", VECTOR, loss="own"),
    "neural ODE": _spec(SEQUENCE, "Steps", VECTOR),
    "SIREN": _spec(SEQUENCE, "Siren", (ModelInput("x", (2,)),), loss="mse"),
    "capsules": _spec(SEQUENCE, "Capsules", VECTOR),
    "experts, fixed capacity": _spec(SEQUENCE, "GatheredExperts", SEQUENCES),
    "experts, loop in Python": _spec(SEQUENCE, "RoutedExperts", SEQUENCES),
    "LoRA": _spec(SEQUENCE, "LowRank", VECTOR),
    "frozen backbone": _spec(SEQUENCE, "frozen_backbone", VECTOR),
    "weight norm": _spec(SEQUENCE, "weight_norm", VECTOR),
    "spectral norm": _spec(SEQUENCE, "spectral_norm", VECTOR),
    "checkpointed part": _spec(SEQUENCE, "Checkpointed", VECTOR),
    "custom autograd function": _spec(SEQUENCE, "Binarised", VECTOR),
    "dict of inputs": _spec(SEQUENCE, "NestedInput", (ModelInput("state.mine", (4,)), ModelInput("state.theirs", (6,)))),
    "dataclass of outputs": _spec(SEQUENCE, "Multitask", VECTOR, loss="cross_entropy", output="classes"),
    "branch on values": _spec(SEQUENCE, "Gated", VECTOR),
    "branch on values, by example": _spec(SEQUENCE, "Gated", VECTOR, control_flow="example"),
}

_SAMPLE = {"input_ids": ("int64", 48), "decoder_input_ids": ("int64", 48)}


def _hugging_face(name: str, entry: Architecture, folder: Path) -> Row:
    """The small config of tests.architectures as a file; its inputs by name."""
    path = folder / name / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"model_type": entry.kind, "architectures": [entry.head], **entry.values}))
    inputs = []
    for key, tensor in entry.inputs(2).items():
        dtype, high = _SAMPLE.get(key, ("float32", None))
        inputs.append(ModelInput(key, tuple(tensor.shape[1:]), dtype, high))
    return Row(name=name, group="Hugging Face", spec=ModelSpec(name=str(path), inputs=tuple(inputs)))


def catalogue(folder: Path) -> list[Row]:
    """Every row.

    Args:
        folder: where the Hugging Face configs are written.
    """
    own = [*_zoo(), *_own(VISION, _VISION), *_own(SEQUENCE, _SEQUENCE)]
    return own + [_hugging_face(name, entry, folder) for name, entry in ARCHITECTURES.items()]
