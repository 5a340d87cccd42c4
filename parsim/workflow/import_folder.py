"""The folder of a run file is on the import path, so that `name = "mymodel:factory"` finds a mymodel.py beside the file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from parsim.errors import ConfigError
from parsim.workflow.config import RunConfig


def importable(config: RunConfig, folder: Path) -> RunConfig:
    """Put the folder that holds the model's factory first on the import path.

    Args:
        folder: of the run file, or the current directory for a question without a file.

    Returns:
        The config, with `model.import_folder` filled in where the factory's module lies in `folder`.

    Raises:
        ConfigError: another module of that name was imported before, so this process would use it instead.
    """
    name = config.model.name
    if ":" not in name:
        return config
    root = name.partition(":")[0].split(".")[0]
    if config.model.import_folder is None:
        if not _holds(folder, root):
            return config
        model = config.model.model_copy(update={"import_folder": str(folder.resolve())})
        config = config.model_copy(update={"model": model})
    chosen = Path(str(config.model.import_folder))
    if not _holds(chosen, root):
        raise ConfigError(
            f"model.import_folder = {str(chosen)!r} holds no {root}.py, which model.name = {name!r} needs; name its folder"
        )
    _check_not_imported_from_elsewhere(name, root, chosen)
    if str(chosen) not in sys.path:
        sys.path.insert(0, str(chosen))
        importlib.invalidate_caches()
    return config


def _holds(folder: Path, root: str) -> bool:
    return (folder / f"{root}.py").is_file() or (folder / root).is_dir()


def _check_not_imported_from_elsewhere(name: str, root: str, folder: Path) -> None:
    module = sys.modules.get(root)
    if module is None:
        return
    places = [module.__file__] if getattr(module, "__file__", None) else list(getattr(module, "__path__", ()))
    if any(Path(str(place)).resolve().is_relative_to(folder.resolve()) for place in places):
        return
    raise ConfigError(
        f"model.name = {name!r}: {root} lies in {folder}, but this process has already imported "
        f"{', '.join(map(str, places)) or 'a built-in module'} under that name; rename one of them, or start a new process"
    )
