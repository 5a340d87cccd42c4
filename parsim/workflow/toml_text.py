"""TOML as text: one value of a command line, tables laid over tables, and tables written out again."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError
from parsim.files import parse_toml
from parsim.model.spec import is_known


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`["plan.mesh.pp=2", "cluster.devices=[0, 1]"]` as nested tables. Raises ConfigError for a text of another form."""
    document: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or len(parts) < 2 or not all(parts):
            raise ConfigError(f"--set {text!r}: write it as section.key=value, for example --set cluster.devices=4")
        change: Any = parse_value(value.strip())
        for part in reversed(parts):
            change = {part: change}
        merge(document, change, "")
    return document


def parse_value(text: str) -> Any:
    """TOML where it is TOML, otherwise the text itself, so that strings need no quotes."""
    try:
        document = parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text


def merge(base: dict[str, Any], change: Mapping[str, Any], path: str) -> None:
    """Put `change` over `base`, table by table."""
    for key, value in change.items():
        where = f"{path}{key}"
        if isinstance(value, dict) and key in base and value:
            if not isinstance(base[key], dict):
                inner = f"{where}.{next(iter(value))}"
                raise ConfigError(f"{inner} cannot be set, since {where} = {base[key]!r} is not a table; drop one of the two")
            merge(base[key], value, f"{where}.")
        else:
            base[key] = value


def document_text(document: Mapping[str, Mapping[str, Any]]) -> str:
    """A whole file: every table by its name."""
    return "\n".join(table_text(name, section) for name, section in document.items())


def table_text(name: str, section: Mapping[str, Any]) -> str:
    """One table; nested tables stand in line."""
    lines = [f"[{name}]"]
    lines += [f"{key} = {value_text(value)}" for key, value in section.items()]
    return "\n".join(lines) + "\n"


def value_text(value: object) -> str:
    """One TOML value on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case float():
            return repr(value) if math.isfinite(value) else {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
        case list() | tuple():
            return "[" + ", ".join(value_text(entry) for entry in value) + "]"
        case dict():
            pairs = (f"{_toml_key(str(key))} = {value_text(entry)}" for key, entry in value.items())
            return "{ " + ", ".join(pairs) + " }" if value else "{}"
        case _:
            return str(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else value_text(key)


def scalar_pairs(texts: Sequence[str]) -> tuple[tuple[str, bool | int | float | str], ...]:
    """`["num_classes=10"]` as the sorted args of a ModelSpec. Raises ConfigError for a text of another form or a table."""
    pairs: dict[str, bool | int | float | str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        parsed = parse_value(value.strip())
        if not equals or not key.strip() or not isinstance(parsed, bool | int | float | str):
            raise ConfigError(f"--arg {text!r}: write it as key=value with one number or word, e.g. num_classes=10")
        pairs[key.strip()] = parsed
    return tuple(sorted(pairs.items()))


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """`"0,1,2"` of a command-line option. Raises ConfigError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: write whole numbers with commas between, e.g. 0,1,2") from error


def is_path(name: str) -> bool:
    """Whether a text is meant as a path and not as a name.

    Args:
        name: of a run file.
    """
    return (name.endswith((".json", ".toml")) or os.sep in name) and not is_known(name)


_PATH_KEYS = (
    ("model", "name"),
    ("model", "import_folder"),
    ("cluster", "profile"),
    ("cluster", "history"),
    ("cluster", "gpu"),
    ("cluster", "link"),
    ("cluster", "network"),
    ("plan", "strategy"),
    ("training", "data_root"),
)
_ALWAYS_PATHS = ("data_root", "history", "import_folder")


def make_paths_absolute(document: Mapping[str, Any], folder: Path) -> None:
    """Paths of a run file begin at its folder.

    Args:
        document: the tables; changed in place. folder: of the file.
    """
    for table, key in _PATH_KEYS:
        section = document.get(table)
        value = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(value, str) and value and (key in _ALWAYS_PATHS or is_path(value)):
            section[key] = str(folder / Path(value).expanduser())
