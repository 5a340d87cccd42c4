"""Models by name: the row a name stands for, its arguments, and its Model.

`models.csv` has a row per model. Its columns: the normalised name; title; family, a row of `FAMILIES`, or the file of this
package from which transformers builds the module; sizes, as key=value where they have no column; tokens of a sample; parameters
as published, every array once (none: no count was found, or it is of another vocabulary); other names; where the sizes were
read; and what differs from the model that is meant.

Sources, each read: `nemo:` NVIDIA/NeMo nemo/collections/llm/gpt/model/FILE; `titan:` pytorch/torchtitan torchtitan/models/NAME;
`hf:` a class of transformers 5.23 and its defaults; `calculon:` calculon-ai/calculon models/FILE; `foundry:`
mosaicml/llm-foundry scripts/train/yamls/pretrain/FILE; `bigscience:` bigscience-workshop/bigscience train/FILE; `rows:` the
shapes that published measurements state; `count:` sizes that were not read but hold, since their arrays add up to the
published count (of Llama 4 those of the text model; Maverick has its dense layers first here, which alternate with the others).

`Llama-3.1-70B`, `llama3_70b` and `llama3-70b` are one name. Arguments of a transformer are the fields of its `Shape`
(layers = 4) and the keys of `OWN`; `seq` is the length of a sample.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from parsim.errors import ModelError, near_matches
from parsim.model.catalogue.frameworks import KERNELS
from parsim.model.catalogue.sublayers import (
    COMPILED,
    LOSSES,
    MODULES,
    UNFUSED_PERMUTATION,
    SamplePart,
    Shape,
    Software,
)
from parsim.model.catalogue.transformer import recorded
from parsim.model.catalogue.zoo import ZOO, load_preset
from parsim.model.tuning import Tuning, tuned
from parsim.units import nearest_divisors

if TYPE_CHECKING:
    from parsim.model.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A row of `models.csv`, with `shape` of a transformer that parsim writes itself, or instead of it `config`, the file."""

    seq: int
    source: str
    shape: Shape | None = None
    config: str = ""
    parameters: int = 0


LLAMA = {"gated": True, "norm": "rms", "bias": False, "rotary": True, "tied": False}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt": {},
    "mpt": {"bias": False},
    "bloom": {"alibi": True, "embedding_norm": True},
    "bert": {"causal": False},
    "neox": {"rotary": True, "tied": False},
    "nemotron": {"bias": False, "rotary": True, "tied": False},
    "llama": LLAMA,
    "gemma": LLAMA | {"tied": True, "head_dim": 256},
    "qwen": LLAMA | {"qkv_bias": True},
    "qwen3": LLAMA | {"qk_norm": True, "head_dim": 128},
    "gpt-oss": LLAMA | {"qkv_bias": True, "bias": True, "expert_bias": True, "sinks": True, "head_dim": 64},
    "deepseek": LLAMA | {"head_dim": 128, "key_rank": 512, "rope_dim": 64, "query_rank": 1536},
}
"""What the models of a family have in common: fields of `Shape`.

Leaves out: of bert the dense layer and the biases of the head (0.3% to 0.9% of what transformers counts); of gemma norms behind
attention and MLP, and that every second or sixth layer alone attends to all keys; of neox that attention and MLP read the same
values, and sum once under tensor parallelism (GPT-J and Phi-2 have one norm a layer instead of two and a bias at the head,
GPT-J no biases in attention: 0.01% of each)."""
_COLUMNS = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")


def _size(text: str) -> int | bool:
    return text == "true" if text in ("true", "false") else int(text)


def _read() -> tuple[dict[str, NamedModel], dict[str, str]]:
    """The rows by name, and by every other name that of its row."""
    rows: dict[str, NamedModel] = {}
    aliases: dict[str, str] = {}
    text = files("parsim.model.catalogue").joinpath("models.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        name, family, shape = row["name"], row["family"], None
        if family in FAMILIES:
            sizes = {column: int(row[column] or 0) for column in _COLUMNS}
            others = (pair.split("=") for pair in row["sizes"].split())
            shape = Shape(name=row["title"], **(dict(FAMILIES[family]) | sizes | {key: _size(value) for key, value in others}))
        rows[name] = NamedModel(
            seq=int(row["seq"]),
            source=row["source"],
            shape=shape,
            config="" if shape else family,
            parameters=int(row["parameters"] or 0),
        )
        aliases |= dict.fromkeys(row["aliases"].split(), name)
    return rows, aliases


NAMED, ALIASES = _read()
"""Models by a normalised name (`normalised`), and other names of the same rows."""

SEQ, KERNEL, SEQUENCE_PARALLEL, CASTS, SELECTIVE = "seq", "kernels", "sequence_parallel", "fp8_casts", "selective"
DOCUMENT, ATTENTION, EARLY_STOP, FUSED_PERMUTATION = "document_tokens", "attention", "early_stop", "fused_permutation"
MODULES_AGAIN, LOSS, LOSS_TOKENS = "recompute_modules", "loss", "loss_tokens"
OWN: dict[str, Any] = {
    SEQ: 0,
    DOCUMENT: 0,
    KERNEL: "fused",
    ATTENTION: "",
    EARLY_STOP: False,
    FUSED_PERMUTATION: "",
    SEQUENCE_PARALLEL: True,
    CASTS: False,
    SELECTIVE: False,
    MODULES_AGAIN: "",
    LOSS: "",
    LOSS_TOKENS: 0,
}
"""Arguments beside the sizes, with their defaults.

Tokens of a sample (left out: the row's); of a document, which attention does not leave (left out: the sample is one); a row
of `KERNELS`; attention in one kernel ("flash") or in several ("unfused"; left out: as the kernels have it); `early_stop` of
`Software`; norms divided along the sequence under tensor parallelism; inputs of products cast to 8 bits; the inside of
attention as a component of its own. `recompute_modules`: of `MODULES`, with spaces between, what plan.recompute = "selective"
runs again (left out: what torch's policies do). `loss`: a row of `LOSSES`. `loss_tokens`: of a sample, those that count (left
out: all)."""
UNFUSED_ATTENTION = "unfused"
MOST_TOKENS = 2**33
"""Of a sample, as of the numbers of any input."""
SIZES = {field.name: field.type for field in fields(Shape) if field.name != "name"}


SUFFIXES = (
    r"q?lora|sft|base|instruct|chat|it|pt|hf|(un)?cased|deduped|intermediate-step.*|pretrain.*|v[01]\.\d|\d{4}|checkpoints|"
    r"bnb|nf4|4bit|bf16|gptq|awq"
)
"""Ends of names on Hugging Face that change no size, behind a dash."""


def normalised(name: str) -> str:
    """`Llama 3.1 70B` -> `llama3-70b`; `GPT-3 175B` -> `gpt3-175b`; `Qwen3_30B_a3B` -> `qwen3-30b-a3b`."""
    text = re.sub(r"\s*\((\d[\d.]*[bm])\)$", r"-\1", name.lower().rstrip("/"))  # a size in brackets is of the name
    text = re.sub(r"\s*\(.*\)$", "", text)
    text = re.sub(r"^(?:.*/)?models--(?:[^/]+?--)?([^/]+)/snapshots/.*$", r"\1", text)  # in Hugging Face's cache
    text = re.sub(r"(?<=\d)___(?=\d)", ".", text)  # as ModelScope names folders
    text = re.sub(r"^.*/(?=[a-z])", "", text)  # folders, or the organisation on Hugging Face
    text = re.sub(r"-+", "-", text.replace("_", "-").replace(" ", "-"))
    text = re.sub(r"^(meta-)?llama-?(\d)", r"llama\2", text)
    text = re.sub(r"^llama3\.[13]-(?=8b|70b|405b)", "llama3-", text)
    text = re.sub(r"^llama-?1?-?(?=7b|13b|30b|33b|65b)", "llama-", text)
    text = re.sub(r"^gpt-?3-?(?=\d)", "gpt3-", text)
    text = re.sub(r"^gpt-?2(?=-|$)", "gpt2", text)
    text = re.sub(r"^qwen-?2\.5-", "qwen2-", text)
    text = re.sub(r"^qwen-(?=\d)", "qwen", text)
    text = re.sub(r"^qwen(?:1\.5-|-)?(?=(?:1\.8|7|14|72)b)", "qwen-", text)
    text = re.sub(r"^gemma-?([23])-", r"gemma\1-", text)
    text = re.sub(r"^nemotron-?([34])-", r"nemotron\1-", text)
    text = re.sub(r"^deepseek-?v", "deepseek-v", text)
    text = re.sub(r"^bert-base", "bert-110m", text)
    text = re.sub(r"^(granite|yi|exaone|glm)-(?=\d\.\d)", r"\1", text)
    text = re.sub(rf"(-({SUFFIXES}))+$", "", text)
    return ALIASES.get(text, text)


OF_MORE_THAN_TEXT = re.compile(r"llava|vision|video|audio|omni|-vl\b|image|reward|embed")


def model_within(name: str) -> str:
    """The longest name of a model with a size in it that another name holds, as `hermes-2-pro-mistral-7b` does; "": none."""
    text = normalised(name)
    if OF_MORE_THAN_TEXT.search(text):
        return ""
    sized = (
        known for known in NAMED if re.search(r"\d[bm]$", known) and re.search(rf"(?<![^-]){re.escape(known)}(?![^-])", text)
    )
    return max(sized, key=len, default="")


def named(name: str) -> NamedModel | None:
    """The row of a name or of an alias; None: not in the table."""
    return NAMED.get(normalised(name))


def zoo_name(name: str) -> str:
    """The name of the zoo that a text spells with other capitals, dashes or blanks (`ResNet-101`); else the text."""
    squeezed = re.sub(r"[-_ ]", "", name.lower())
    return name if named(name) is not None else ZOO_BY_LETTERS.get(squeezed, name)


ZOO_BY_LETTERS = {name.replace("_", ""): name for name in ZOO}


def is_transformer(name: str) -> bool:
    """Whether a name is of a model that is written from its sizes, which plans and simulates but cannot be trained."""
    row = named(name)
    return row is not None and row.shape is not None


def known_names() -> list[str]:
    """Every name and alias, for near matches."""
    return [*NAMED, *ALIASES]


def described() -> dict[str, dict[str, Any]]:
    """Every name with its size: parameters (0: not counted), tokens of a sample, other names, and where the sizes are from."""
    rows: dict[str, dict[str, Any]] = {}
    for name, row in NAMED.items():
        shape = row.shape
        counted = row.parameters
        if shape is not None and not counted:
            counted = named_model(name, {}, granularity="block", weights="bfloat16").parameter_count
        rows[name] = {
            "parameters": counted,
            "layers": 0 if shape is None else shape.layers,
            "hidden": 0 if shape is None else shape.hidden,
            "tokens": row.seq,
            "other_names": [alias for alias, own in ALIASES.items() if own == name],
            "source": row.source,
        }
    for name, traced in ZOO.items():
        counted = load_preset(name, "block").parameter_count
        args = dict(traced.args)
        sizes = {"layers": args.get("layers", 0), "hidden": args.get("hidden", 0), "tokens": args.get("seq", 0)}
        rows[name] = {"parameters": counted, **sizes, "other_names": [], "source": "parsim.model.catalogue.networks"}
    return rows


def config_path(row: NamedModel) -> str:
    """The config of a row that transformers builds."""
    return str(files("parsim.model.catalogue").joinpath("configs", f"{row.config}.json"))


def shape_of(name: str, args: dict[str, Any]) -> Shape:
    """The sizes of a named transformer, with those that the arguments change.
    Raises ModelError: an unknown argument, or sizes that do not go together."""
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
    Raises ModelError: a number that does not divide the sample, or attention that computes the scores under a mask."""
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
    if tokens < seq and not software_of(args).flash:
        raise ModelError(
            f"argument {DOCUMENT} of {name} changes nothing with kernels = {args.get(KERNEL, UNFUSED_ATTENTION)!r}: unfused "
            'attention computes masked scores too; drop it, or set kernels = "fused"'
        )
    return tokens


def check_own(name: str, args: dict[str, Any]) -> None:
    """Raise ModelError for an argument beside the sizes that is of the wrong kind."""
    for key in (SEQUENCE_PARALLEL, CASTS, SELECTIVE, EARLY_STOP, FUSED_PERMUTATION):
        if not isinstance(args.get(key, False), bool):
            raise ModelError(f"argument {key} of {name} must be true or false, got {args[key]!r}")
    modules, counted = args.get(MODULES_AGAIN, ""), args.get(LOSS_TOKENS, 0)
    if not isinstance(modules, str) or not set(modules.split()) <= set(MODULES):
        raise ModelError(
            f"argument {MODULES_AGAIN} of {name} names some of {' '.join(MODULES)}, with spaces between, got {modules!r}"
        )
    if args.get(LOSS, "") not in LOSSES:
        raise ModelError(f"argument {LOSS} of {name} must be {' or '.join(filter(None, LOSSES))}, got {args[LOSS]!r}")
    if isinstance(counted, bool) or not isinstance(counted, int) or not 0 <= counted <= sequence_of(name, args):
        raise ModelError(
            f"argument {LOSS_TOKENS} of {name} must be a whole number of the {sequence_of(name, args)} tokens of a sample, got "
            f"{counted!r}"
        )
    if args.get(ATTENTION, "") not in ("", "flash", UNFUSED_ATTENTION):
        raise ModelError(f'argument {ATTENTION} of {name} must be "flash" or "{UNFUSED_ATTENTION}", got {args[ATTENTION]!r}')
    if KERNEL in args:
        _ = KERNELS[str(args[KERNEL])]


def software_of(args: Mapping[str, Any]) -> Software:
    """The kernels that arguments beside the sizes choose. Raises ModelError for kernels that are unknown."""
    own = OWN | dict(args)
    row = KERNELS[str(own[KERNEL])]
    flash = row.flash if not own[ATTENTION] else own[ATTENTION] == "flash"
    return replace(
        row,
        flash=flash,
        casts=own[CASTS],
        selective=own[SELECTIVE],
        early_stop=own[EARLY_STOP] or row.early_stop,
        modules=tuple(own[MODULES_AGAIN].split()),
        **LOSSES[own[LOSS]],
        permutation_arrays=row.permutation_arrays
        if own[FUSED_PERMUTATION] == ""
        else (COMPILED.permutation_arrays if own[FUSED_PERMUTATION] else UNFUSED_PERMUTATION),
    )


def named_model(name: str, args: dict[str, Any], *, granularity: str, weights: str, tuning: Tuning | None = None) -> Model:
    """The Model of a named transformer, without torch.
    `granularity`: "block" for one component per layer; else such as tensor parallelism can cut. `weights`: torch's name.
    `tuning`: what is trained of it; None: everything. Raises ModelError: an unknown argument or target of adapters, or sizes
    that do not go together."""
    check_own(name, args)
    seq = sequence_of(name, args)
    own = OWN | args
    software = software_of(args)
    part = SamplePart(tokens=seq, context=document_of(name, args), loss_tokens=own[LOSS_TOKENS])
    cut = "layer" if granularity == "block" else "sequence" if own[SEQUENCE_PARALLEL] else "sublayer"
    model = tuned(recorded(shape_of(name, args), software, part, cut, weights, tuning), tuning)
    return replace(model, granularity=granularity)
