"""The bytes of a file that another tool wrote: plain or gzipped, bounded, as text or JSON.

Everything that a file can be wrong in is an ImportedFileError. A text from it is printed only after `shown` has taken its
control characters away.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsim.errors import ImportedFileError, first_few
from parsim.files import parse_json
from parsim.units import format_bytes, printable

MOST_BYTES = 2**29
"""Of a file, unpacked. A trace of ten steps of a large model is some 300 MB."""
_CHUNK = 2**20
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file and its bytes, unpacked.

    Attributes:
        path: as given. data: its bytes.
    """

    path: Path
    data: bytes

    @property
    def text(self) -> str:
        """The file as UTF-8 (or UTF-16 with its mark, as Windows shells write); bytes that are none are replaced."""
        if self.data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return self.data.decode("utf-16", errors="replace")
        return self.data.decode("utf-8-sig", errors="replace")

    @property
    def digest(self) -> str:
        """Eight characters that name this content."""
        return hashlib.sha256(self.data).hexdigest()[:8]

    def json(self, what: str) -> Any:
        """The document of a JSON file.

        Args:
            what: kind of file, for the message.

        Raises:
            ImportedFileError: it is not JSON, or nested too deep.
        """
        try:
            return parse_json(self.text)
        except json.JSONDecodeError as error:
            raise ImportedFileError(
                f"{self.path} is not JSON: {error.msg} at line {error.lineno} column {error.colno}; {what} that was cut off "
                "must be written again"
            ) from error
        except ValueError as error:  # an integer of thousands of digits
            raise ImportedFileError(f"{self.path} is not {what}: {error}") from error


def read_source(path: Path) -> SourceFile:
    """Read a file, and unpack it if it is gzipped.

    Raises:
        ImportedFileError: it cannot be read, holds nothing, unpacks to more than MOST_BYTES, or is a damaged archive.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ImportedFileError(f"cannot read {path}: {error.strerror or error}") from error
    if data[:2] == b"\x1f\x8b":
        data = _unpacked(path)
    if len(data) > MOST_BYTES:
        raise ImportedFileError(f"{path} holds more than {format_bytes(MOST_BYTES)}; record fewer steps, or cut the file")
    if not data.strip():
        raise ImportedFileError(f"{path} is empty; nothing can be imported from it")
    return SourceFile(path, data)


def _unpacked(path: Path) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        with gzip.open(path, "rb") as file:
            while size <= MOST_BYTES and (part := file.read(_CHUNK)):
                parts.append(part)
                size += len(part)
    except (OSError, EOFError, zlib.error) as error:
        raise ImportedFileError(f"{path} is a damaged gzip file: {error}; copy or write it again") from error
    return b"".join(parts)


def shown(value: object) -> str:
    """A text from a file as a message may show it: one line, no control characters, not long."""
    text = printable(" ".join(str(value).split()))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def listed(values: Iterable[object], most: int = 4) -> str:
    """Up to `most` texts from a file, and how many more there are."""
    return first_few([shown(value) for value in values], most)


def finite(value: object) -> float | None:
    """A number of a JSON document; None for what is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if number - number == 0 else None
