"""What a Hugging Face architecture takes and trains by: default inputs and loss, by transformers' own lists of Auto classes.

A kind lists the Auto classes whose models it describes. An architecture belongs to the first kind with one that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parsim.errors import ModelError
from parsim.model.inputs import ModelInput

DEFAULT_SEQ = 2048
"""Tokens per sample where nobody says and the model allows as many. Configs of today allow up to a million."""

LONGEST_SCAN = 256
"""Tokens per sample of models that run token by token: tracing them takes time in proportion."""

SCANS = ("mamba", "falcon_mamba", "mamba2")
_USUAL_SEQ = {"t5": 512, "mt5": 512, "umt5": 512, **dict.fromkeys(SCANS, 64)}
_LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length", "seq_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKind:
    """One kind of model.

    Attributes:
        name: for messages. lists: of transformers' MODEL_FOR_..._MAPPING_NAMES the middle part.
        inputs: (config, tokens per sample) -> what it takes. loss: a row of `parsim.model.losses`.
        targets: what these are, for a person.
    """

    name: str
    lists: tuple[str, ...]
    inputs: Callable[[Any, int], tuple[ModelInput, ...]]
    loss: str
    targets: str


def _tokens(config: Any, seq: int) -> tuple[ModelInput, ...]:
    return (ModelInput("input_ids", (seq,), dtype="int64", high=int(_text(config).vocab_size)),)


def _image(config: Any, seq: int) -> tuple[ModelInput, ...]:
    config = getattr(config, "vision_config", None) or config
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else size
    return (ModelInput("pixel_values", (int(getattr(config, "num_channels", 3)), int(height), int(width))),)


def _two_texts(config: Any, seq: int) -> tuple[ModelInput, ...]:
    decoder = ModelInput("decoder_input_ids", (seq,), dtype="int64", high=int(_text(config).vocab_size))
    return (*_tokens(config, seq), decoder)


def _text_and_image(config: Any, seq: int) -> tuple[ModelInput, ...]:
    return (*_tokens(config, seq), *_image(config, seq))


def _speech_and_text(config: Any, seq: int) -> tuple[ModelInput, ...]:
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if bins is None or frames is None:
        raise ModelError(f"{config.model_type}: the shape of its speech input is unknown; give [model] inputs")
    decoder = ModelInput("decoder_input_ids", (seq,), dtype="int64", high=int(config.vocab_size))
    return (ModelInput("input_features", (int(bins), 2 * int(frames))), decoder)


KINDS = (
    HeadKind(
        name="causal language model",
        lists=("CAUSAL_LM",),
        inputs=_tokens,
        loss="cross_entropy",
        targets="the next token of every position",
    ),
    HeadKind(
        name="masked language model",
        lists=("MASKED_LM",),
        inputs=_tokens,
        loss="cross_entropy",
        targets="a token for every position",
    ),
    HeadKind(
        name="speech to text",
        lists=("SPEECH_SEQ_2_SEQ",),
        inputs=_speech_and_text,
        loss="cross_entropy",
        targets="the next token of every position of the decoder",
    ),
    HeadKind(
        name="sequence to sequence",
        lists=("SEQ_TO_SEQ_CAUSAL_LM",),
        inputs=_two_texts,
        loss="cross_entropy",
        targets="the next token of every position of the decoder",
    ),
    HeadKind(
        name="text classification",
        lists=("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION"),
        inputs=_tokens,
        loss="cross_entropy",
        targets="classes",
    ),
    HeadKind(
        name="image classification",
        lists=("IMAGE_CLASSIFICATION",),
        inputs=_image,
        loss="cross_entropy",
        targets="classes",
    ),
    HeadKind(
        name="image and text by contrast",
        lists=("ZERO_SHOT_IMAGE_CLASSIFICATION",),
        inputs=_text_and_image,
        loss="own",
        targets="",
    ),
)


def kind_of(architecture: str) -> HeadKind | None:
    """The kind of an architecture such as LlamaForCausalLM; None where no list names it."""
    from transformers.models.auto import modeling_auto

    for kind in KINDS:
        for name in kind.lists:
            if architecture in _names(getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {})):
                return kind
    return None


def _names(mapping: Any) -> set[str]:
    found: set[str] = set()
    for entry in mapping.values():
        found.update((entry,) if isinstance(entry, str) else entry)
    return found


def _text(config: Any) -> Any:
    """The part of a config that describes the text model."""
    inner = getattr(config, "text_config", None)
    return config if inner is None else inner


def longest(config: Any) -> int | None:
    """Tokens per sample that the positions of a model allow; None where nothing limits them."""
    text = _text(config)
    if text.model_type in ("t5", "mt5", "umt5"):  # relative positions: n_positions is what it was trained with
        return None
    return next((int(value) for name in _LENGTHS if isinstance(value := getattr(text, name, None), int) and value > 0), None)


def sequence_length(config: Any, given: int | None, where: str) -> int:
    """Tokens per sample: as given, or DEFAULT_SEQ where the model allows as many.

    Raises:
        ModelError: more than the model has positions for, or than can be traced one by one.
    """
    most, kind = longest(config), _text(config).model_type
    if given is None:
        usual = _USUAL_SEQ.get(kind, DEFAULT_SEQ)
        return usual if most is None else min(usual, most)
    if kind in SCANS and given > LONGEST_SCAN:
        raise ModelError(
            f"{where}: without its own kernels transformers runs the scan of {kind} one token at a time, too long to trace for "
            f"seq {given}; give seq <= {LONGEST_SCAN}"
        )
    if most is not None and given > most:
        name = next(name for name in _LENGTHS if getattr(_text(config), name, None) == most)
        raise ModelError(f"{where}: seq {given} exceeds {name} {most} of the config; shorten it, or raise {name} in args")
    return given
