"""What a rank's part of a checkpoint holds: the JSON beside its tensors, which carries a digest of itself.

The digest covers every byte of the file, so no damaged manifest is read: neither half a name nor another step.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from parsim.errors import ExecutionError
from parsim.files import parse_json, read_regular, version_problem

SCHEMA_VERSION = 3
LARGEST_BYTES = 256 * 2**20
MOST_RANKS = 2**20
_LARGEST = 2**62
_DIGEST = "digest"
_HEX = re.compile(r"[0-9a-f]{64}")
_SECTIONS = ("weights", "buffers", "optimizer", "progress", "rng", "own")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The .json beside a rank's tensors; `writer` tells the files of one attempt of one launch from another's."""

    schema_version: int
    step: int
    seed: int
    world_size: int
    rank: int
    writer: str
    size_bytes: int
    sha256: str
    names: dict[str, list[str]]
    fragments: dict[str, dict[str, list[Any]]] = field(default_factory=dict)

    @property
    def checkpoint(self) -> tuple[str, int, int, int]:
        """What the parts of one checkpoint have in common."""
        return self.writer, self.world_size, self.step, self.seed


def manifest_text(manifest: Manifest) -> str:
    """The file, with its digest."""
    return _with_digest(asdict(manifest))


def read_manifest(path: Path) -> Manifest:
    """The manifest of a file.

    Raises:
        ExecutionError: another version of parsim wrote it. OSError, ValueError: it cannot be read, is damaged, or holds what
            no manifest holds.
    """
    content = read_regular(path, LARGEST_BYTES)
    document = parse_json(content)
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    document.pop(_DIGEST, None)
    if content != _with_digest(document).encode():
        raise ValueError("its digest is not that of its content")
    if problem := version_problem(document, SCHEMA_VERSION):
        raise ExecutionError(f"checkpoint {path.parent}: {problem}; or train again in another folder")
    return _checked(document)


def _with_digest(document: dict[str, Any]) -> str:
    body = json.dumps(document)
    return json.dumps({**document, _DIGEST: hashlib.sha256(body.encode()).hexdigest()})


def _checked(document: dict[str, Any]) -> Manifest:
    try:
        found = Manifest(**document)
    except TypeError as error:
        raise ValueError(f"its keys are not those of a manifest ({error})") from error
    for key, least, below in (
        ("step", 0, _LARGEST),
        ("seed", -_LARGEST, _LARGEST),
        ("world_size", 1, MOST_RANKS),
        ("rank", 0, MOST_RANKS),
        ("size_bytes", 0, _LARGEST),
    ):
        if not _is_number(getattr(found, key), least, below):
            raise ValueError(f"{key} = {getattr(found, key)!r} is not a number from {least} to {below - 1}")
    if not isinstance(found.writer, str) or not isinstance(found.sha256, str) or not _HEX.fullmatch(found.sha256):
        raise ValueError("writer or sha256 is not a valid string")
    if not _is_table_of(found.names, list) or not all(isinstance(name, str) for part in found.names.values() for name in part):
        raise ValueError("names lists no names by section")
    if not _is_table_of(found.fragments, dict):
        raise ValueError("fragments has no table by section")
    for part in found.fragments.values():
        for name, given in part.items():
            if not _is_fragment(given):
                raise ValueError(f"the fragment of {name!r} is none")
    return found


def _is_number(value: object, least: int, below: int) -> bool:
    return type(value) is int and least <= value < below


def _is_table_of(value: object, kind: type) -> bool:
    return isinstance(value, dict) and set(value) <= set(_SECTIONS) and all(isinstance(part, kind) for part in value.values())


def _is_fragment(given: object) -> bool:
    """`[dim, blocks, shard, ways, start, stop, shape, runs, size]`."""
    if not isinstance(given, list) or len(given) != 9:
        return False
    least = (0, 1, 0, 1, 0, -1)
    below = (64, MOST_RANKS, MOST_RANKS, MOST_RANKS, _LARGEST, _LARGEST)
    numbers = all(_is_number(value, low, high) for value, low, high in zip(given[:6], least, below, strict=True))
    lists = all(
        isinstance(part, list) and len(part) <= MOST_RANKS and all(_is_number(value, 0, _LARGEST) for value in part)
        for part in given[6:8]
    )
    return numbers and lists and _is_number(given[8], 0, _LARGEST)
