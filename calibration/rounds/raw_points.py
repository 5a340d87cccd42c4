"""The raw points of a calibration, kept beside its profile: every single timing, compressed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibration.rounds.request import CalibrationRequest
from parsim.errors import ProfileError
from parsim.files import parse_json, read_regular, reading, unpacked, version_problem, write_atomically
from parsim.model.model import Model

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPoints:
    """Everything a profile is computed from.

    Attributes:
        raw: what the ranks left (see `calibration.rounds.turns.gather_raw`). The other fields are as `build_profile` takes
        them.
    """

    raw: Mapping[str, Any]
    request: CalibrationRequest
    models: Sequence[Model]
    created: str
    command: str
    name: str


def entries_of(raw: Mapping[str, Any], key: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Everything of one kind that was measured ("sweeps", "shards", "collectives", ...), with the rank that did."""
    for number, rank in enumerate(raw["ranks"]):
        for entry in rank.get(key, ()):
            yield number, entry


def raw_path(profile: Path) -> Path:
    """`mine.raw.json.gz` beside `mine.json`."""
    return profile.with_name(f"{profile.stem}.raw.json.gz")


def save_raw(points: RawPoints, path: Path) -> None:
    """Write atomically; equal points make equal files."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "name": points.name,
        "created": points.created,
        "command": points.command,
        "request": json.loads(points.request.to_json()),
        "models": [json.loads(model.to_json()) for model in points.models],
        "raw": points.raw,
    }
    write_atomically(path, lambda file: file.write(gzip.compress(json.dumps(document).encode(), mtime=0)))


def load_raw(path: Path) -> RawPoints:
    """Raises ProfileError for a file that is not there, not whole, or of another version of parsim."""
    if not path.is_file():
        raise ProfileError(f"there are no raw points {path}; they are written by `parsim calibrate`, beside the profile")
    with reading(f"cannot read the raw points {path}", ProfileError, "calibrate again"):
        document = parse_json(unpacked(read_regular(path)))
        if problem := version_problem(document if isinstance(document, dict) else {}, SCHEMA_VERSION):
            raise ProfileError(f"raw points {path}: {problem}; or calibrate again")
        return RawPoints(
            raw=document["raw"],
            request=CalibrationRequest.from_json(json.dumps(document["request"])),
            models=[Model.from_json(json.dumps(model), str(path)) for model in document["models"]],
            created=document["created"],
            command=document["command"],
            name=document["name"],
        )
