"""The names "package.module:ROW" of a run file, and the folder in which Python finds their modules."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError
from parsim.registry import is_reference


def references(document: Mapping[str, Any]) -> dict[str, str]:
    """Every "package.module:ROW" of a run file, by its key."""
    return {
        f"{table}.{path}": value
        for table, section in document.items()
        if isinstance(section, dict)
        for path, value in _texts(section, deep=table == "training")
        if is_reference(value)
    }


def _texts(section: Mapping[str, Any], *, deep: bool) -> Iterator[tuple[str, str]]:
    """Every text of a table by its key; `deep`: those of tables and lists in it too."""
    for key, value in section.items():
        if isinstance(value, str):
            yield key, value
        elif deep and isinstance(value, dict):
            yield from ((f"{key}.{path}", text) for path, text in _texts(value, deep=True))
        elif deep and isinstance(value, list | tuple):
            yield from ((f"{key}[{place}]", text) for place, text in enumerate(value) if isinstance(text, str))


def put_on_path(document: Mapping[str, Any], folder: Path) -> None:
    """Make the modules of a run file's names importable, as far as `folder` (or its model.import_folder) holds them.

    Raises ConfigError where another module of that name was imported before.
    """
    model = document.get("model")
    given = model.get("import_folder") if isinstance(model, dict) else None
    chosen = Path(given) if isinstance(given, str) else folder
    for key, name in references(document).items():
        if holds(chosen, name):
            _check_not_imported_from_elsewhere(key, name, chosen)
            if str(chosen) not in sys.path:
                sys.path.insert(0, str(chosen))
                importlib.invalidate_caches()


ALLOW_VARIABLE = "PARSIM_ALLOW_CODE"
"""Set to 1: run files may name code outside their own folders. What --allow-code sets for one command."""


MODEL = "model.name"
_trusted: set[Path] = set()
"""Folders of run files that this process has read: the configs of their run folders name code there."""


def check_trusted(document: Mapping[str, Any], folder: Path, where: str, *, calls_model: bool = True) -> None:
    """A run file is code as soon as it names some. Its own folder is trusted with it, everything else only if the user says so.

    Args:
        document: of the file, without what the user has overridden. folder: of the file.
        calls_model: False if its model is not going to be made: of a run that is only looked at.

    Raises:
        ConfigError: a name "package.module:ROW" of a module outside the folder, unless code is allowed.
    """
    model = document.get("model")
    given = model.get("import_folder") if isinstance(model, dict) else None
    chosen = Path(given) if isinstance(given, str) else folder
    inside = calls_model and chosen.resolve().is_relative_to(folder.resolve())
    if inside:
        _trusted.add(chosen.resolve())
    for key, name in references(document).items():
        known = inside or chosen.resolve() in _trusted
        if (known and holds(chosen, name)) or (key == MODEL and not calls_model) or os.environ.get(ALLOW_VARIABLE) == "1":
            continue
        raise ConfigError(
            f"{where}: {key} = {name!r} runs code outside the file's folder ({folder}); if you trust the file and "
            f"that code, give --allow-code (from Python: set {ALLOW_VARIABLE}=1 in the environment)"
        )


def allow_code() -> None:
    """Let every run file that this process and its children read name code anywhere."""
    os.environ[ALLOW_VARIABLE] = "1"


def holds(folder: Path, name: str) -> bool:
    """Whether the module of "package.module:ROW" lies in the folder."""
    root = root_of(name)
    return (folder / f"{root}.py").is_file() or (folder / root).is_dir()


def root_of(name: str) -> str:
    """`package` of "package.module:ROW"."""
    return name.partition(":")[0].split(".")[0]


def _check_not_imported_from_elsewhere(key: str, name: str, folder: Path) -> None:
    root = root_of(name)
    module = sys.modules.get(root)
    if module is None:
        return
    places = [module.__file__] if getattr(module, "__file__", None) else list(getattr(module, "__path__", ()))
    if any(Path(str(place)).resolve().is_relative_to(folder.resolve()) for place in places):
        return
    raise ConfigError(
        f"{key} = {name!r}: {root} lies in {folder}, but this process has already imported "
        f"{', '.join(map(str, places)) or 'a built-in module'} under that name; rename one of them, or start a new process"
    )
