"""Primus: the YAML files of its experiments, read, whatever framework trains them. Key names are those of AMD-AGI/Primus.

A file names a framework and a model for each module, and overrides of both. The module that trains is read by the reader of its
framework, with the model by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from parsim.errors import ConfigError
from parsim.formats.maxtext import read_maxtext
from parsim.formats.megatron import read_yaml
from parsim.formats.recipe import VARIABLE, YAML, Recipe, plain_value, yaml_table
from parsim.formats.source import FileFormat, SourceFile
from parsim.formats.torchtitan import read_toml

NAME = "Primus"
MARKS = (re.compile(r"^modules *:", re.MULTILINE), re.compile(r"\bframework *:"))


def read_primus(document: Mapping[str, Any]) -> Recipe:
    """The module that trains. Raises ConfigError: no such module, or a framework that is not known."""
    modules = document.get("modules")
    rows = list(modules.values()) if isinstance(modules, Mapping) else modules if isinstance(modules, list) else []
    row = next((row for row in rows if isinstance(row, Mapping) and row.get("framework")), None)
    if row is None:
        raise ConfigError(f"{NAME}: modules holds none with a framework")
    framework = str(row["framework"]).lower()
    tables = [row[key] for key in ("params", "overrides") if row.get(key) is not None]
    if not all(isinstance(table, Mapping) for table in tables):
        raise ConfigError(f"{NAME}: params and overrides of a module must be tables of keys")
    overrides = {str(key): _default(value) for table in tables for key, value in table.items()}
    model = row.get("model")
    name = re.sub(r"\.ya?ml$", "", str(model)) if isinstance(model, str) else ""
    name = re.sub(r"(?i)[-_](bf16|fp8)$", "", name)
    if framework == "maxtext":
        recipe = read_maxtext(overrides, name)
    elif framework == "torchtitan":
        table = {"name": "", "flavor": ""} | (dict(model) if isinstance(model, Mapping) else {})
        own = overrides.pop("model", None)
        overrides["model"] = {**table, **(own if isinstance(own, Mapping) else {})}
        recipe = read_toml(overrides, name)
    elif framework in ("megatron", "megatron_bridge"):
        recipe = read_yaml(overrides, name)
    else:
        raise ConfigError(f"{NAME}: framework = {framework!r} must be megatron, torchtitan or maxtext")
    recipe.framework = f"{NAME} ({recipe.framework})"
    return recipe


def _default(value: object) -> object:
    """`${NAME:8}` is 8 where the environment does not say; tables are looked into."""
    if isinstance(value, Mapping):
        return {key: _default(entry) for key, entry in value.items()}
    if isinstance(value, str) and (form := VARIABLE.fullmatch(value)):
        text = form[1].strip("\"'")
        return plain_value(text) if text else None
    return value


def is_primus(source: SourceFile) -> bool:
    """Whether a file is one of Primus."""
    return source.path.suffix in YAML and all(mark.search(source.text) for mark in MARKS)


FORMATS = {
    "primus": FileFormat(
        layouts="modules as tables or as a list",
        refuses="frameworks other than Megatron-LM, torchtitan and MaxText",
        what="a YAML file of Primus",
        tool=NAME,
        reads="recipe",
        sniff=is_primus,
        read=lambda source: read_primus(yaml_table(source)),
    )
}
