"""What a rank's part of a checkpoint holds: the JSON beside its tensors, which carries a digest of itself.

The digest covers every byte of the file, so no damaged manifest is read: neither half a name nor another step.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from parsim.files import parse_json, read_regular, version_problem

SCHEMA_VERSION = 3
LARGEST_BYTES = 256 * 2**20
MOST_RANKS = 2**20
LARGEST = 2**62
_DIGEST = "digest"

Section = Annotated[str, Field(pattern="^(weights|buffers|optimizer|progress|rng|own)$")]
CountInFile = Annotated[int, Field(strict=True, ge=0, lt=LARGEST)]
RankInFile = Annotated[int, Field(strict=True, ge=0, lt=MOST_RANKS)]
RankCount = Annotated[int, Field(strict=True, ge=1, lt=MOST_RANKS)]
CountsInFile = Annotated[tuple[CountInFile, ...], Field(max_length=MOST_RANKS)]
FragmentEntries = tuple[
    Annotated[int, Field(strict=True, ge=0, lt=64)],
    RankCount,
    RankInFile,
    RankCount,
    CountInFile,
    Annotated[int, Field(strict=True, ge=-1, lt=LARGEST)],
    CountsInFile,
    CountsInFile,
    CountInFile,
]
"""A `Fragment` as a list: dim, blocks, shard, ways, start, stop, shape, runs, size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The .json beside a rank's tensors; `writer` tells the files of one attempt of one launch from another's."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    schema_version: int
    step: CountInFile
    seed: Annotated[int, Field(strict=True, ge=-LARGEST, lt=LARGEST)]
    world_size: RankCount
    rank: RankInFile
    writer: str
    size_bytes: CountInFile
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    names: dict[Section, list[str]]
    fragments: dict[Section, dict[str, FragmentEntries]] = field(default_factory=dict)

    @property
    def checkpoint(self) -> tuple[str, int, int, int]:
        """What the parts of one checkpoint have in common."""
        return self.writer, self.world_size, self.step, self.seed


@cache
def _reader() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def manifest_text(manifest: Manifest) -> str:
    """The file, with its digest."""
    return _with_digest(asdict(manifest))


def _with_digest(document: dict[str, Any]) -> str:
    body = json.dumps(document)
    return json.dumps({**document, _DIGEST: hashlib.sha256(body.encode()).hexdigest()})


def read_manifest(path: Path) -> Manifest:
    """The manifest of a file.

    Raises:
        OSError, ValueError: it cannot be read, another version of parsim wrote it, it is damaged, or holds what no manifest
            holds.
    """
    content = read_regular(path, LARGEST_BYTES)
    document = parse_json(content)
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    document.pop(_DIGEST, None)
    if content != _with_digest(document).encode():
        raise ValueError("its digest is not that of its content")
    if problem := version_problem(document, SCHEMA_VERSION):
        raise ValueError(problem)
    try:
        return _reader().validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
