"""Reading and writing files: JSON and TOML that others wrote, texts that are never half written, tables as CSV."""

from __future__ import annotations

import csv
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HOME_VARIABLE = "PARSIM_HOME"
"""Environment variable: the folder of what parsim keeps for a user."""


def cache_folder(name: str) -> Path:
    """Where parsim keeps one kind of file: $PARSIM_HOME/NAME, else $XDG_CACHE_HOME/parsim/NAME or ~/.cache/parsim/NAME."""
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home).expanduser() / name
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "parsim" / name


DEEPEST = 100
"""Levels of tables and lists in a file. parsim writes at most 10; thousands would exhaust the interpreter's stack."""

TOO_DEEP = f"tables and lists are nested more than {DEEPEST} levels deep"


def parse_json(text: str | bytes) -> Any:
    """The document of a JSON text. Raises json.JSONDecodeError for what is none, and for one nested deeper than DEEPEST."""
    try:
        document = json.loads(text)
    except RecursionError as error:
        raise json.JSONDecodeError(TOO_DEEP, "", 0) from error
    if is_deeper(document, DEEPEST):
        raise json.JSONDecodeError(TOO_DEEP, "", 0)
    return document


def parse_toml(text: str) -> dict[str, Any]:
    """The document of a TOML text. Raises tomllib.TOMLDecodeError for what is none, and for one nested deeper than DEEPEST."""
    try:
        document = tomllib.loads(text)
    except RecursionError as error:
        raise tomllib.TOMLDecodeError(TOO_DEEP) from error
    if is_deeper(document, DEEPEST):
        raise tomllib.TOMLDecodeError(TOO_DEEP)
    return document


def is_deeper(document: object, levels: int) -> bool:
    """Whether tables and lists are nested more than `levels` deep."""
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(levels):
        inner = (value for node in level for value in (node.values() if isinstance(node, dict) else node))
        level = [value for value in inner if isinstance(value, dict | list)]
    return bool(level)


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal obeys: all control characters but tab and newline."""

ESCAPED_CONTROL = re.compile(r"[\x7f-\x9f]|\\[bfr]|\\u00[0189][0-9a-fA-F]|\\u007[fF]")
"""What control characters look like in a JSON text; every text without a match holds none."""


def control_character_in(document: object, path: str = "") -> str | None:
    """The first text of a document, key or value, that holds a control character: `model.name = 'a\\x1b[2J'`."""
    match document:
        case str():
            return f"{path or 'the text'} = {document!r}" if CONTROL.search(document) else None
        case dict():
            for key, value in document.items():
                if CONTROL.search(str(key)):
                    return f"the key {key!r}" + (f" of {path}" if path else "")
                if found := control_character_in(value, f"{path}.{key}" if path else str(key)):
                    return found
        case list() | tuple():
            for number, value in enumerate(document):
                if found := control_character_in(value, f"{path}.{number}"):
                    return found
    return None


NO_CONTROL = "must hold no control characters, which a terminal would obey; drop them"
"""The rule for names that parsim prints."""


def version_problem(document: Mapping[str, Any], reads: int, *, unversioned: int | None = None) -> str | None:
    """What is wrong with a file's `schema_version`, or None.

    Args:
        reads: the version that this parsim reads.
        unversioned: the version of files written before there was the key; None: all have it.
    """
    version = document.get("schema_version", unversioned)
    if version == reads and not isinstance(version, bool):
        return None
    newer = isinstance(version, int) and version > reads
    fix = "; a newer parsim wrote it: upgrade parsim" if newer else ""
    return f"schema_version must be {reads}, got {version!r}{fix}"


def write_text_atomically(path: Path, text: str) -> None:
    """Write UTF-8 beside `path`, as NAME.partial, then rename.

    Holds against a killed process, not against a power cut: nothing is forced to disk.
    """
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """At least one row; the keys of the first are the columns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, fieldnames=list(rows[0]))
        table.writeheader()
        table.writerows(rows)
