"""A model by name: the row it stands for, its arguments, and its Model.

`Llama-3.1-70B`, `llama3_70b` and `llama3-70b` are one name. Arguments of a transformer are the fields of its `Shape`
(layers = 4) and the keys of `OWN`; `seq` is the length of a sample.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from parsim.errors import ModelError, near_matches
from parsim.model.named.rows import NAMED, NamedModel
from parsim.model.transformer.build import recorded
from parsim.model.transformer.shape import Shape
from parsim.model.transformer.software import KERNELS
from parsim.model.transformer.sublayers import SamplePart
from parsim.units import nearest_divisors

if TYPE_CHECKING:
    from parsim.model.model import Model

ALIASES: dict[str, str] = {
    "22b": "gpt-22b",
    "175b": "gpt-175b",
    "530b": "gpt-530b",
    "1t": "gpt-1t",
    "megatron-22b": "gpt-22b",
    "turing-530b": "gpt-530b",
    "mt-nlg-530b": "gpt-530b",
    "megatron-1t": "gpt-1t",
    "bloom": "bloom-176b",
    "opt-350": "opt-350m",
    "nemotron4-15b": "nemotron-15b",
    "nemotron4-340b": "nemotron-340b",
    "nemotron3-22b": "nemotron-22b",
    "nemotron3-8b": "nemotron-8b",
    "nemotron3-4b": "nemotron-4b",
    "llama2-34b": "codellama-34b",
    "code-llama-34b": "codellama-34b",
    "deepseek-v3-671b": "deepseek-v3",
    "deepseek-v2-236b": "deepseek-v2",
    "vit-l/16": "vit-l-16",
    "vit-h/14": "vit-h-14",
}
"""Other names of the same row."""

SEQ, KERNEL, SEQUENCE_PARALLEL, CASTS, SELECTIVE = "seq", "kernels", "sequence_parallel", "fp8_casts", "selective"
DOCUMENT = "document_tokens"
OWN: dict[str, Any] = {SEQ: 0, DOCUMENT: 0, KERNEL: "fused", SEQUENCE_PARALLEL: True, CASTS: False, SELECTIVE: False}
"""Arguments beside the sizes, with their defaults.

Tokens of a sample (left out: the row's); of a document, which attention does not leave (left out: the sample is one); a row
of `KERNELS`; norms divided along the sequence under tensor parallelism; inputs of products cast to 8 bits; the inside of
attention as a component of its own."""
MOST_TOKENS = 2**33
"""Of a sample, as of the numbers of any input."""
SIZES = {field.name: field.type for field in fields(Shape) if field.name != "name"}


def normalised(name: str) -> str:
    """`Llama 3.1 70B` -> `llama3-70b`; `GPT-3 175B` -> `gpt3-175b`; `Qwen3_30B_a3B` -> `qwen3-30b-a3b`."""
    text = re.sub(r"\s*\(.*\)$", "", name.lower())
    text = re.sub(r"-+", "-", text.replace("_", "-").replace(" ", "-"))
    text = re.sub(r"^(meta-)?llama-?(\d)", r"llama\2", text)
    text = re.sub(r"^llama3\.[13]-(?=8b|70b|405b)", "llama3-", text)
    text = re.sub(r"^llama-?1?-?(?=7b|65b)", "llama-", text)
    text = re.sub(r"^gpt-?3-?(?=\d)", "gpt3-", text)
    text = re.sub(r"^qwen-?2\.5-", "qwen2-", text)
    text = re.sub(r"^qwen-(?=\d)", "qwen", text)
    text = re.sub(r"^nemotron-?([34])-", r"nemotron\1-", text)
    text = re.sub(r"^deepseek-?v", "deepseek-v", text)
    text = re.sub(r"-(lora|sft|base|instruct|pretrain.*)$", "", text)
    return ALIASES.get(text, text)


def named(name: str) -> NamedModel | None:
    """The row of a name or of an alias; None: not in the table."""
    return NAMED.get(normalised(name))


def is_transformer(name: str) -> bool:
    """Whether a name is of a model that is written from its sizes, which plans and simulates but cannot be trained."""
    row = named(name)
    return row is not None and row.shape is not None


def known_names() -> list[str]:
    """Every name and alias, for near matches."""
    return [*NAMED, *ALIASES]


def config_path(row: NamedModel) -> str:
    """The config of a row that transformers builds."""
    return str(files("parsim.model.named").joinpath("configs", f"{row.config}.json"))


def shape_of(name: str, args: dict[str, Any]) -> Shape:
    """The sizes of a named transformer, with those that the arguments change.

    Raises:
        ModelError: an unknown argument, or sizes that do not go together.
    """
    row = NAMED[normalised(name)]
    assert row.shape is not None
    changed: dict[str, Any] = {}
    for key, value in args.items():
        if key in OWN:
            continue
        if key not in SIZES:
            raise ModelError(f"{name} has no argument {key!r}{near_matches(key, [*OWN, *SIZES])}")
        default = getattr(row.shape, key)
        if type(value) is not type(default):
            raise ModelError(f"argument {key} of {name} must be like {default!r}, got {value!r}")
        changed[key] = value
    shape = replace(row.shape, **changed)
    shape.check()
    return shape


def sequence_of(name: str, args: dict[str, Any]) -> int:
    """Tokens of a sample. Raises ModelError for a number that cannot be."""
    row = NAMED[normalised(name)]
    seq = args.get(SEQ, row.seq)
    if isinstance(seq, bool) or not isinstance(seq, int) or not 1 <= seq <= MOST_TOKENS:
        raise ModelError(f"argument seq of {name} must be a whole number >= 1 and <= {MOST_TOKENS}, got {seq!r}")
    return seq


def document_of(name: str, args: dict[str, Any]) -> int:
    """Tokens of a document; without the argument, those of a sample.

    Raises:
        ModelError: a number that does not divide the sample, or attention that computes the scores under a mask.
    """
    seq = sequence_of(name, args)
    if DOCUMENT not in args:
        return seq
    tokens = args[DOCUMENT]
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ModelError(f"argument {DOCUMENT} of {name} must be a whole number >= 1, got {tokens!r}")
    if seq % tokens:
        raise ModelError(
            f"argument {DOCUMENT} of {name} ({tokens}) must divide the tokens of a sample ({seq}); the nearest that do: "
            f"{nearest_divisors(seq, tokens)}"
        )
    if tokens < seq and not KERNELS[str(args.get(KERNEL, OWN[KERNEL]))].flash:
        raise ModelError(
            f"argument {DOCUMENT} of {name} changes nothing with kernels = {args[KERNEL]!r}: unfused attention computes masked "
            'scores too; drop it, or set kernels = "fused"'
        )
    return tokens


def check_own(name: str, args: dict[str, Any]) -> None:
    """Raise ModelError for an argument beside the sizes that is of the wrong kind."""
    for key in (SEQUENCE_PARALLEL, CASTS, SELECTIVE):
        if not isinstance(args.get(key, False), bool):
            raise ModelError(f"argument {key} of {name} must be true or false, got {args[key]!r}")
    if KERNEL in args:
        _ = KERNELS[str(args[KERNEL])]


def named_model(name: str, args: dict[str, Any], *, granularity: str, weights: str) -> Model:
    """The Model of a named transformer, without torch.

    Args:
        granularity: "block" for one component per layer; else such as tensor parallelism can cut. weights: torch's name.

    Raises:
        ModelError: an unknown argument, or sizes that do not go together.
    """
    check_own(name, args)
    seq = sequence_of(name, args)
    own = OWN | args
    software = replace(KERNELS[own[KERNEL]], casts=own[CASTS], selective=own[SELECTIVE])
    part = SamplePart(tokens=seq, context=document_of(name, args))
    cut = "layer" if granularity == "block" else "sequence" if own[SEQUENCE_PARALLEL] else "sublayer"
    model = recorded(shape_of(name, args), software, part, cut, weights)
    return replace(model, granularity=granularity)
