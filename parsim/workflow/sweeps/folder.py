"""The folder of a sweep: every row as soon as it is known, so that a sweep that was stopped goes on; tables at the end.

`points.jsonl` has a line per answered point, under the key of its content. Lines are only appended. A killed process or a full
disk leaves at most the last line broken, which is cut off when the sweep goes on. Points of earlier sweeps in the same folder
are found again by their keys, whatever was swept then. `sweep.json` says what was asked last; `points.csv` and `points.parquet`
are its table.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.errors import ConfigError, ExecutionError
from parsim.files import finite, lock, parse_json, read_json, version_problem, write_atomically, write_json_atomically
from parsim.workflow.sweeps.points import SweepPoint

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
HEADER = {"schema_version": SCHEMA_VERSION, "holds": "points of parsim sweep"}
NO_PARQUET = "points.parquet is not written, since pyarrow is not installed (parsim[data]); points.csv holds the same"


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """Names of the files below `path`."""

    path: Path

    @property
    def description(self) -> Path:
        return self.path / "sweep.json"

    @property
    def log(self) -> Path:
        return self.path / "points.jsonl"

    @property
    def csv(self) -> Path:
        return self.path / "points.csv"

    @property
    def parquet(self) -> Path:
        return self.path / "points.parquet"

    @property
    def explorer(self) -> Path:
        return self.path / "explorer.html"

    def check_usable(self) -> None:
        """Raise ConfigError where the folder holds something else than a sweep."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; give --out a folder")
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.log.is_file() or self.description.is_file()):
            raise ConfigError(f"{self.path} is neither empty nor a folder of a sweep; give another --out")

    def known(self, keys: set[str]) -> dict[str, dict[str, Any]]:
        """The rows that the log has of these keys. A broken last line is cut off; a broken line in the middle is asked again.

        Args:
            keys: of the points that are wanted.

        Raises:
            ConfigError: the file is not a log of this parsim.
        """
        if not self.log.is_file():
            return {}
        whole_bytes, found = 0, {}
        with self.log.open("rb") as file:
            for number, line in enumerate(file):
                entry = _entry(line)
                if number == 0 and (not isinstance(entry, dict) or version_problem(entry, SCHEMA_VERSION)):
                    if line.endswith(b"\n"):
                        raise ConfigError(f"{self.log} is not a log of a sweep of this parsim; give another --out")
                    break
                if line.endswith(b"\n"):
                    whole_bytes += len(line)
                if isinstance(entry, dict) and entry.get("key") in keys and isinstance(entry.get("row"), dict):
                    found[str(entry["key"])] = dict(entry["row"])
        if whole_bytes < self.log.stat().st_size:
            with self.log.open("r+b") as file:
                file.truncate(whole_bytes)
        return found

    @contextlib.contextmanager
    def writing(self) -> Iterator[RowLog]:
        """The log, open for more rows, by one sweep at a time.

        Raises:
            ConfigError: another sweep writes here now.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab", buffering=0) as file:  # nothing waits in a buffer that a full disk would refuse again
            if not lock(file.fileno()):
                raise ConfigError(f"another sweep writes into {self.path} now; wait for it, or give another --out")
            log = RowLog(self.log, file)
            if file.tell() == 0:
                log.write(HEADER)
            yield log

    def write_description(self, document: Mapping[str, Any], points: Sequence[SweepPoint]) -> None:
        """What was asked, and the keys of its points in order."""
        whole = {"schema_version": SCHEMA_VERSION, **document}
        whole["points"] = [{"key": point.key, "settings": point.settings} for point in points]
        write_json_atomically(self.description, whole)

    def read_description(self) -> dict[str, Any]:
        """What was asked last. Raises ConfigError if this is not a folder of a sweep."""
        try:
            document = read_json(self.description)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path} is not a folder of a sweep ({error}); give the --out of `parsim sweep`") from error
        if not isinstance(document, dict) or (problem := version_problem(document, SCHEMA_VERSION)):
            said = problem if isinstance(document, dict) else "it holds no table"
            raise ConfigError(f"{self.description}: {said}; sweep again")
        if not isinstance(document.get("points"), list) or not all(
            isinstance(entry, dict) and isinstance(entry.get("settings"), dict) and isinstance(entry.get("key"), str)
            for entry in document["points"]
        ):
            raise ConfigError(f"{self.description} lists no points; sweep again")
        return document

    def write_tables(self, table: pd.DataFrame) -> str:
        """points.csv, and points.parquet where pyarrow is there. Returns a note where it is not, else ""."""
        write_atomically(self.csv, lambda file: file.write(table.to_csv(index=False).encode()))
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            return NO_PARQUET
        flat = table.copy()
        for name in flat.columns:
            if flat[name].map(lambda value: isinstance(value, list | dict)).any() or _is_mixed(flat[name]):
                flat[name] = flat[name].map(
                    lambda value: value if value is None or isinstance(value, str) else json.dumps(value)
                )
        write_atomically(self.parquet, lambda file: flat.to_parquet(file, index=False))
        return ""


class RowLog:
    """A log that is open for appending.

    Args: path: for messages. file: at its end.
    """

    def __init__(self, path: Path, file: RawIOBase) -> None:
        self._path, self._file = path, file

    def add(self, point: SweepPoint, row: Mapping[str, Any]) -> None:
        """One answered point; it is in the hands of the operating system when this returns."""
        self.write({"key": point.key, "settings": point.settings, "row": row})

    def write(self, document: Mapping[str, Any]) -> None:
        """One line.

        Raises:
            ExecutionError: the disk takes no more; what was written before stays.
        """
        try:
            left = json.dumps(finite(document), allow_nan=False).encode() + b"\n"
            while left:  # a disk that is nearly full takes a part of it
                left = left[self._file.write(left) :]
        except OSError as error:
            raise ExecutionError(
                f"{self._path}: {error.strerror}; the points before are kept: make room and give the same command again"
            ) from error


def _entry(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


def _is_mixed(column: Any) -> bool:
    """Texts and numbers under one name, which Parquet refuses."""
    kinds = {type(value) for value in column if value is not None and value == value}
    return len(kinds) > 1 and str in kinds
