"""nanoGPT: its configurations, which are assignments in Python, and scripts that name one, read and not run.

Key names and defaults are those of train.py and model.py (karpathy/nanoGPT).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError
from parsim.files import read_text
from parsim.formats.megatron import options_of
from parsim.formats.python import Script, walk
from parsim.formats.recipe import LARGEST_BYTES, SCRIPTS, FileKeys, Recipe, plain_value
from parsim.formats.source import FileFormat, SourceFile

NAME = "nanoGPT"
MARK = re.compile(
    r"^(block_size|gradient_accumulation_steps|init_from|n_layer|always_save_checkpoint|wandb_log)\s*=", re.MULTILINE
)
PROGRAM = re.compile(r"^\s*(def|class|from)\s", re.MULTILINE)
"""Of a script that does more than to assign."""
STARTS = re.compile(r"\btrain\.py\s+(\S*config/\w+\.py)")
PRECISIONS = {"bfloat16": "amp_bf16", "float16": "amp_fp16", "float32": "tf32"}
DEFAULTS: dict[str, Any] = {
    "batch_size": 12,
    "block_size": 1024,
    "gradient_accumulation_steps": 40,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
}
VOCABULARY = 50304
SAME_TIME = re.compile(
    r"(out_dir|eval_|log_|always_|wandb_|dataset|learning_rate|max_iters|lr_decay|min_lr|warmup|beta|weight_decay|grad_clip|"
    r"decay_lr|dropout|device|backend|nproc|nnodes|node|master|rdzv|standalone|start|seed)"
)


def read_nanogpt(source: SourceFile) -> Recipe:
    """A configuration, or a script that starts train.py with one.

    Raises:
        ConfigError: it is no Python; the configuration that a script names is not there.
    """
    keys = FileKeys(NAME, DEFAULTS | _assigned(source))
    recipe = Recipe(framework=NAME, software={"framework": "ddp"})
    begins = keys.text("init_from", default="scratch")
    if begins.startswith("gpt2"):
        recipe.name_model("init_from", begins)
        for key in ("n_layer", "n_head", "n_embd"):
            keys.number(key)
    else:
        recipe.args = {
            name: keys.number(key) for name, key in (("layers", "n_layer"), ("heads", "n_head"), ("hidden", "n_embd"))
        }
        vocabulary = 65 if "char" in keys.text("dataset", default="openwebtext") else VOCABULARY
        recipe.args |= {
            "vocab": keys.number("vocab_size", default=vocabulary),
            "bias": keys.flag("bias"),
            "positions": keys.number("block_size"),
        }
    recipe.args["seq"] = keys.number("block_size")
    recipe.micro_batch = keys.number("batch_size")
    recipe.training["global_batch"] = recipe.micro_batch * keys.number("gradient_accumulation_steps")
    dtype = keys.text("dtype", default="bfloat16")
    if dtype not in PRECISIONS:
        raise ConfigError(f"{NAME}: dtype = {dtype!r} must be one of {', '.join(PRECISIONS)}")
    recipe.training |= {"precision": PRECISIONS[dtype], "optimizer": "adamw_fused"}
    recipe.software["compiled"] = keys.flag("compile", default=True)
    recipe.processes = keys.number("nproc_per_node", default=0)
    keys.sort(recipe, left_out={}, ignored=SAME_TIME)
    return recipe


def _assigned(source: SourceFile) -> dict[str, Any]:
    """Values by name; options of a script count more than the configuration that it names."""
    if source.path.suffix not in SCRIPTS:
        constants = walk(source, Script()).constants
        return {key: value for key, value in constants.items() if value is not None}
    named = STARTS.search(source.text)
    name = Path(named[1] if named is not None else "")
    places = [folder / part for folder in source.path.parents for part in (name, Path(name.name))]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise ConfigError(f"{NAME}: the configuration {name} that the script names is not beside it; give that file itself")
    given = {key.replace("-", "_"): plain_value(words[0]) for key, words in options_of(source.text).items() if words}
    return _assigned(SourceFile(file, read_text(file, LARGEST_BYTES).encode())) | given


def is_nanogpt(source: SourceFile) -> bool:
    """Whether a file is a configuration of nanoGPT, or starts it with one."""
    if source.path.suffix in SCRIPTS:
        return bool(STARTS.search(source.text))
    return source.path.suffix == ".py" and bool(MARK.search(source.text)) and not PROGRAM.search(source.text)


FORMATS = {
    "nanogpt": FileFormat(
        layouts="configurations in Python, from scratch or from GPT-2's weights; scripts that start train.py with one",
        refuses="a configuration that a script names and that is not there",
        what="a configuration of nanoGPT",
        tool=NAME,
        reads="recipe",
        sniff=is_nanogpt,
        read=read_nanogpt,
    )
}
