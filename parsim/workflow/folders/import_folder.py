"""The folder of a run file is on the import path: `name = "mymodel:factory"`, or any other "package.module:ROW", finds a
mymodel.py beside the file."""

from __future__ import annotations

from pathlib import Path

from parsim.errors import ConfigError
from parsim.workflow.config import RunConfig
from parsim.workflow.references import holds, put_on_path, references, root_of


def importable(config: RunConfig, folder: Path) -> RunConfig:
    """Put the folder that holds the module of a name "package.module:ROW" first on the import path.

    Args:
        folder: of the run file, or the current directory for a question without a file.

    Returns:
        The config, with `model.import_folder` filled in where `folder` holds the module of one of its names.

    Raises:
        ConfigError: another module of that name was imported before, so this process would use it instead.
    """
    named = references(config.to_dict())
    if config.model.import_folder is None:
        if not any(holds(folder, name) for name in named.values()):
            return config
        model = config.model.model_copy(update={"import_folder": str(folder.resolve())})
        config = config.model_copy(update={"model": model})
    chosen = Path(str(config.model.import_folder))
    if named and not any(holds(chosen, name) for name in named.values()):
        key, name = next(iter(named.items()))
        raise ConfigError(
            f"model.import_folder = {str(chosen)!r} holds no {root_of(name)}.py, which {key} = {name!r} needs; name its folder"
        )
    put_on_path(config.to_dict(), chosen)
    return config
