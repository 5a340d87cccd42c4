"""Models that were traced before, kept in the user's cache folder by the content they were traced from.

A key covers the content of a config, or the built module of a factory and the source of the user's modules. It also covers
arguments, inputs, granularity, the type of the weights, and the versions of Python, parsim (its source), torch and
transformers. A file that cannot be read, or whose digest is wrong, is ignored, and the model is traced anew. A file appears
under its name only when it is complete, so processes may write at once.

Left out: files that a forward reads while it runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.errors import ModelError
from parsim.files import cache_folder
from parsim.model.model import Model

if TYPE_CHECKING:
    from torch import nn

SWITCH = "PARSIM_MODEL_CACHE"
"""Environment variable: "off" keeps nothing and reads nothing, a path is the folder to use."""

MOST_FILES = 256
"""Files that are kept; the ones used longest ago go first."""

_DISTRIBUTIONS = ("torch", "transformers", "numpy")


def folder() -> Path | None:
    """Where Models are kept; None where the switch is off.

    $PARSIM_MODEL_CACHE, else the cache folder of models.
    """
    chosen = os.environ.get(SWITCH, "")
    if chosen.lower() in ("off", "0", "no", "false"):
        return None
    if chosen:
        return Path(chosen).expanduser()
    return cache_folder("models")


def key_of(content: Mapping[str, Any]) -> str:
    """The name under which a Model is kept.

    Args:
        content: plain JSON values that tell the traced module, its inputs and how it was traced.
    """
    whole = {"content": content, "versions": _versions()}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    """Of all that decides about a trace: parsim by its source."""
    found = {"python": sys.version}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    root = Path(__file__).parent
    files = sorted((*root.rglob("*.py"), root.parent / "errors.py", root.parent / "registry.py"))
    found["parsim"] = _digest_of_files(files)
    return found


def _digest_of_files(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with contextlib.suppress(OSError):
            text = path.read_bytes()
            digest.update(f"{path.name} {len(text)}\n".encode())
            digest.update(text)
    return digest.hexdigest()


def user_sources() -> str:
    """A digest of the source of every imported module that belongs to neither Python nor an installed package."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    own = str(Path(__file__).parent.parent)
    paths = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and not file.startswith((*installed, f"{own}{os.sep}")):
            paths.add(Path(file))
    return _digest_of_files(sorted(paths))


def described(module: nn.Module) -> str:
    """A digest of a built module: classes, plain attributes, parameters and buffers, without their values."""
    digest = hashlib.sha256()
    for path, part in module.named_modules():
        kind = type(part)
        plain = {name: repr(value) for name, value in sorted(part.__dict__.items()) if _is_plain(value)}
        kinds = [
            (name, None if tensor is None else (tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.requires_grad))
            for held in (part._parameters, part._buffers)
            for name, tensor in held.items()
        ]
        digest.update(repr((path, kind.__module__, kind.__qualname__, plain, kinds)).encode())
    return digest.hexdigest()


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def read(key: str) -> Model | None:
    """The Model kept under a key; None if there is none that can be trusted."""
    place = folder()
    if place is None:
        return None
    path = place / f"{key}.model"
    try:
        digest, _, packed = path.read_bytes().partition(b"\n")
        if digest.decode() != hashlib.sha256(packed).hexdigest():
            return None
        found = Model.from_json(zlib.decompress(packed).decode())
    except (OSError, ValueError, zlib.error, ModelError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return found


def write(key: str, model: Model) -> None:
    """Keep a Model. A folder that cannot be written is not an error: the Model is traced again next time."""
    place = folder()
    if place is None:
        return
    packed = zlib.compress(model.to_json().encode(), 1)
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        with _temporary(place) as partial:
            partial.write_bytes(hashlib.sha256(packed).hexdigest().encode() + b"\n" + packed)
            partial.replace(place / f"{key}.model")
        _forget_oldest(place)


@contextlib.contextmanager
def _temporary(place: Path) -> Iterator[Path]:
    """A file of this process alone, removed unless it was renamed."""
    handle, name = tempfile.mkstemp(suffix=".partial", dir=place)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _forget_oldest(place: Path) -> None:
    found = sorted(place.glob("*.model"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found[MOST_FILES:]:
        path.unlink(missing_ok=True)
