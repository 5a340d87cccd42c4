"""TOML as text: one value of a command line, tables laid over tables, and tables written out again."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from parsim.errors import ConfigError
from parsim.files import parse_toml


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
                raise ConfigError(f"{inner} cannot be set, since {where} = {base[key]!r} is no table; drop one of the two")
            merge(base[key], value, f"{where}.")
        else:
            base[key] = value


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
