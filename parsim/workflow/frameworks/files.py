"""Which file is whose, and the question that it asks on a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError, MissingDependencyError
from parsim.files import parse_toml, read_text
from parsim.workflow.frameworks.megatron import read_script, read_yaml
from parsim.workflow.frameworks.recipe import Recipe
from parsim.workflow.frameworks.torchtitan import is_torchtitan, read_toml

SCRIPTS = (".sh", ".bash", ".args", ".txt")
LISTS = SCRIPTS[2:]
"""Plain lists of options, which other texts may be too."""
YAML = (".yaml", ".yml")
LARGEST_BYTES = 2**20
"""Of a file that people write by hand."""


def is_framework_file(path: Path) -> bool:
    """Whether a path is a file of Megatron-LM, NeMo or torchtitan: a script, a YAML file, or a TOML file with its tables.

    A run file, which has the table [cluster], is none, whatever its name.

    Args:
        path: as the user gave it.
    """
    if path.suffix not in (*SCRIPTS, *YAML, ".toml"):
        return False
    try:
        text = read_text(path, LARGEST_BYTES)
    except (OSError, ValueError):  # whoever reads it says what is wrong with it
        return path.suffix in (*SCRIPTS[:2], *YAML)
    if re.search(r"^\s*\[cluster\]", text, re.MULTILINE):
        return False
    if path.suffix != ".toml":
        return path.suffix not in LISTS or "--num-layers" in text
    try:
        return is_torchtitan(parse_toml(text))
    except ValueError:  # likewise
        return False


def read_recipe(path: Path) -> Recipe:
    """What such a file says.

    Raises:
        ConfigError: no such file, no text of its kind, or sizes that are missing or cannot be.
        MissingDependencyError: a YAML file without PyYAML.
    """
    try:
        text = read_text(path, LARGEST_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}; give a script, YAML or TOML file of Megatron-LM or torchtitan"
        ) from error
    try:
        if path.suffix in YAML:
            return read_yaml(_yaml(path, text))
        return read_script(text) if path.suffix in SCRIPTS else read_toml(parse_toml(text))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise MissingDependencyError(f"PyYAML is needed to read {path}; pip install pyyaml (parsim[hf] brings it)") from error
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"it is not YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(found, dict):
        raise ConfigError("it holds no table of keys")
    return found
