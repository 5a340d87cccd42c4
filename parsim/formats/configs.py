"""Config files of frameworks: which reader takes a file, also one that a script or another file wraps, and why none does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError
from parsim.files import read_text, reading
from parsim.formats.recipe import LARGEST_BYTES, PROGRAMS, SCRIPTS, YAML, Recipe, file_named, opened, yaml_table
from parsim.formats.scripts import option_values, overrides_of, words_of
from parsim.formats.source import FileFormat, SourceFile, file_formats
from parsim.units import printable


def is_framework_file(path: Path) -> bool:
    """Whether a path is a file of another tool, by its name and content: also one that is no whole question.

    A run file, which has the table [cluster], is none, whatever its name.

    Args: path: as the user gave it.
    """
    if path.suffix == "" or (path.suffix == ".json" and not path.is_file()):  # a model
        return False
    try:
        text = read_text(path, LARGEST_BYTES)
    except (OSError, ValueError):  # whoever reads it says what is wrong with it
        return path.suffix in (*SCRIPTS, *YAML, *PROGRAMS)
    if re.search(r"^[ \t]*\[cluster\]", text, re.MULTILINE):
        return False
    source = SourceFile(path, text.encode())
    return path.suffix in (*SCRIPTS, *YAML, *PROGRAMS) or any(
        row.sniff(source) for _, row in file_formats().items() if row.reads
    )


READABLE = "docs/readers.md lists the frameworks whose files are read"


def read_recipe(path: Path) -> Recipe:
    """What such a file says.

    Raises: ConfigError: no such file, no text of its kind, or sizes that are missing or cannot be. MissingDependencyError: a
        YAML file without PyYAML.
    """
    try:
        source = opened(path)
    except (OSError, ValueError) as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else error
        raise ConfigError(f"cannot read {path}: {why}; {READABLE}") from error
    with reading(f"{path} is not as its kind is", ConfigError, "write its values as the framework takes them"):
        try:
            if (row := _row_of(source)) is None:
                raise ConfigError(_other_kind(source))
            _, reader, inner, given = row
            assert reader.read is not None
            recipe: Recipe = reader.read(inner)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    recipe.processes = recipe.processes or _processes(given)
    return recipe


WRAPPED = ("axolotl", "torchtune", "automodel", "lightning", "composer", "nanotron", "levanter", "primus")
"""Formats of files that a script names for its program; readers of the others look for such a script themselves."""
LAUNCHER = re.compile(
    r"(nproc|nnodes|node_?rank|rdzv|master|num_(processes|machines|gpus)$|machine_rank|(use_)?config(_file|_path)?$|standalone|"
    r"hostfile|max_restarts|role|tee|log_dir|multi_gpu|mixed_precision|main_|dynamo|same_network|job|ntasks|gres|cpus|gpus|"
    r"container|export|output$|error$|time$|partition|account|launcher)"
)
"""Options of torchrun, accelerate and srun, which no program gets."""
Given = dict[str, Any]


def _row_of(source: SourceFile) -> tuple[str, FileFormat, SourceFile, Given] | None:
    """The name and the row of a file's format, the file for its reader, and what a script sets around it; None: of no format.

    The reader's file is the one that a script names, under the script's keys, or the script inside a YAML file.
    """
    is_script = source.path.suffix in SCRIPTS
    names = [word.rpartition("=")[2] for word in words_of(source.text)] if is_script else []
    given = option_values(source.text) | overrides_of(source.text) if is_script else {}
    files = (file_named(name, source.path) for name in names if name.endswith(YAML))
    for inner in (opened(file) for file in files if file is not None):
        if (row := next((name for name in WRAPPED if file_formats()[name].sniff(inner)), None)) is not None:
            return row, file_formats()[row], _with_keys(inner, given), given
    for name, format in file_formats().items():
        if format.reads == "recipe" and format.sniff(source):
            return name, format, source, given
    return next(filter(None, map(_row_of, _scripts_within(source))), None)


def _with_keys(source: SourceFile, given: Given) -> SourceFile:
    """A YAML file with the keys of a command over its own."""
    import yaml  # type: ignore[import-untyped,unused-ignore]

    table = yaml_table(source)
    for key, value in given.items():
        if LAUNCHER.match(key):
            continue
        *outer, last = key.split(".")
        node = table
        for part in outer:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[last] = value
    return SourceFile(source.path, yaml.safe_dump(table).encode())


def _processes(given: Given) -> int:
    """That a launcher starts; 0: it does not say."""
    counts = [given.get(key) for key in ("num_processes", "nproc_per_node", "nnodes")]
    whole, each, nodes = (count if isinstance(count, int) and 0 < count < MOST_PROCESSES else 0 for count in counts)
    return whole or each * (nodes or 1)


MOST_PROCESSES = 10**6


def _scripts_within(source: SourceFile) -> list[SourceFile]:
    """The commands that a YAML file of a launcher holds (SkyPilot's `run`, a container's command and its arguments)."""
    if source.path.suffix not in YAML or not STARTS.search(source.text):
        return []
    texts: list[str] = []
    tables: list[Any] = [yaml_table(source)]
    for node in tables:  # which grows
        parts = list(node.values()) if isinstance(node, dict) else node
        tables += [part for part in parts if isinstance(part, dict | list)]
        if isinstance(node, dict):
            words = [word for part in parts if isinstance(part, list) for word in part if isinstance(word, str)]
            lines = [" ".join(words), *(part for part in parts if isinstance(part, str))]
            texts += ["\n".join(line for line in lines if STARTS.search(line))]
    return [SourceFile(source.path.with_suffix(".sh"), text.encode()) for text in texts if text]


STARTS = re.compile(r"\b(accelerate launch|torchrun|deepspeed|python3?|srun|axolotl|litgpt|tune|swift|llamafactory-cli|trl)\b")
"""Words with which a command that trains begins."""


FOREIGN = (
    (
        r"^actor_rollout_ref\s*:|adv_estimator\s*[:=]",
        "verl, which generates by rollouts between steps",
        "its policy's training",
    ),
    (r"\bverl\.trainer\b", "verl", "the training"),
    (
        r"^algorithm\s*:\s*(grpo|ppo)|^rollout\s*:|^reward_model\s*:",
        "a reinforcement learning, with rollouts",
        "its policy's step",
    ),
    (r"\bcolossalai run\b", "Colossal-AI, whose options hang on each program", "the training"),
)
"""Of files that no format reads: a mark, whose they are, and what a run file asks instead."""


def _other_kind(source: SourceFile) -> str:
    """Why a file that no format reads as a whole question is none, and what to give instead."""
    for name, row in file_formats().items():
        if row.reads not in (None, "recipe") and row.sniff(source):
            return f"it is {row.what}, and no whole question: `parsim import {source.path}` reads it (--kind {name})"
    ask = "as `parsim plan MODEL --on MACHINE --batch N`, with --set plan.mesh.tp=N and the like for what the file fixes"
    for mark, whose, what in FOREIGN:
        if re.search(mark, source.text, re.MULTILINE):
            return f"it is of {whose}, which parsim does not read: ask for {what} {ask}"
    words = words_of(source.text) if source.path.suffix in SCRIPTS else []
    name = next((word.rpartition("=")[2] for word in words if word.endswith(YAML)), "")
    if name and file_named(name, source.path) is None:
        return f"it names {printable(name)}, which is not there: put it beside it, or give that file itself"
    kind = "starts a program of its own" if words and STARTS.search(source.text) else "is of no kind that parsim knows"
    return f"it {kind}: ask for its training {ask}; {READABLE}"


def format_name(path: Path) -> str:
    """The name of the format of such a file; "": it is of none."""
    row = _row_of(opened(path))
    return "" if row is None else row[0]
