"""Parts by name or path: GPUs and links, with near matches and how to describe one that is not shipped."""

from __future__ import annotations

import importlib.resources
import os
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from parsim.errors import ProfileError, near_matches
from parsim.files import read_text, version_problem
from parsim.hardware.parts.records import SCHEMA_VERSION, GpuPart, LinkPart
from parsim.hardware.profile import problems_text
from parsim.hardware.tables import check_texts, from_text

AnyPart = TypeVar("AnyPart", GpuPart, LinkPart)

FOLDERS: dict[type[GpuPart] | type[LinkPart], tuple[str, str]] = {GpuPart: ("gpus", "GPU"), LinkPart: ("links", "link")}
HOW_TO_DESCRIBE = "describe your own in a JSON file as hardware_profiles/README.md says (Parts), and give its path"


def shipped_gpus() -> list[str]:
    """Names of the GPUs that come with the package."""
    return _shipped("gpus")


def shipped_links() -> list[str]:
    """Names of the links that come with the package."""
    return _shipped("links")


@lru_cache(maxsize=64)
def load_gpu(name_or_path: str) -> GpuPart:
    """A GPU by name ("h100-sxm"), by alias ("h100") or by the path of a JSON file.

    Raises:
        ProfileError: an unknown name (with near matches), or a broken file (with the path of the wrong key).
    """
    return _load(GpuPart, name_or_path)


@lru_cache(maxsize=64)
def load_link(name_or_path: str) -> LinkPart:
    """A link by name ("nvswitch-4"), by alias or by path. Raises ProfileError as `load_gpu`."""
    return _load(LinkPart, name_or_path)


def _load(record: type[AnyPart], name_or_path: str) -> AnyPart:
    folder, what = FOLDERS[record]
    path = Path(name_or_path)
    if path.suffix == ".json" or os.sep in name_or_path:
        try:
            return _parse(record, read_text(path), str(path))
        except (OSError, ValueError) as error:
            raise ProfileError(f"cannot read {what} {path}: {error}; {HOW_TO_DESCRIBE}") from error
    names = _names(folder)
    if name_or_path.lower() not in names:
        near, known = near_matches(name_or_path.lower(), names), ", ".join(_shipped(folder))
        near = near if "did you mean" in near else ""
        raise ProfileError(f"unknown {what} {name_or_path!r}{near}; known: {known}; or {HOW_TO_DESCRIBE}")
    name = names[name_or_path.lower()]
    return _parse(record, _files(folder).joinpath(f"{name}.json").read_text("utf-8"), name)


def _parse(record: type[AnyPart], text: str, where: str) -> AnyPart:
    what = FOLDERS[record][1]
    document = from_text(text, where, what)
    if isinstance(document, dict) and (problem := version_problem(document, SCHEMA_VERSION)):
        raise ProfileError(f"{what} {where}: {problem}; or write it as hardware_profiles/README.md says")
    check_texts(text, document, where, what)
    try:
        return record.model_validate(document)
    except ValidationError as error:
        raise ProfileError(f"{what} {where} is broken: {problems_text(error, what)}; fix these") from error


def _files(folder: str) -> importlib.resources.abc.Traversable:
    return importlib.resources.files("hardware_profiles").joinpath("parts", folder)


def _shipped(folder: str) -> list[str]:
    return sorted(entry.name.removesuffix(".json") for entry in _files(folder).iterdir() if entry.name.endswith(".json"))


ALIASES: dict[str, dict[str, str]] = {
    "gpus": {
        "h100": "h100-sxm",
        "a100": "a100-sxm-80gb",
        "a100-40gb": "a100-sxm-40gb",
        "a100-80gb": "a100-sxm-80gb",
        "a100-sxm": "a100-sxm-80gb",
        "a100-pcie": "a100-pcie-80gb",
        "h800": "h800-sxm",
        "a800": "a800-sxm-80gb",
        "a6000": "rtx-a6000",
        "v100": "v100-sxm-32gb",
        "v100-sxm": "v100-sxm-32gb",
        "v100-pcie": "v100-pcie-32gb",
        "h200-sxm": "h200",
        "b200-sxm": "b200",
        "rtx3090": "rtx-3090",
        "rtx4090": "rtx-4090",
    },
    "links": {"nvlink-bridge": "nvlink-bridge-3", "nvswitch": "nvswitch-4"},
}
"""Short names, and what they stand for: the form that most machines have."""


@lru_cache(maxsize=4)
def _names(folder: str) -> dict[str, str]:
    """Every name and alias, and the file it stands for."""
    known = {name: name for name in _shipped(folder)}
    return known | {alias: name for alias, name in ALIASES[folder].items() if name in known}
