"""The formats by name, and the bytes of a file that another tool wrote: plain or gzipped, bounded, as text or JSON.

Everything that a file can be wrong in is an ImportedFileError. A text from it is printed only after `shown` has taken its
control characters away.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import pkgutil
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import parsim.formats
from parsim.errors import ImportedFileError, first_few
from parsim.files import parse_json
from parsim.registry import Registry
from parsim.units import format_bytes, printable

MOST_BYTES = 2**29
"""Size of a file, unpacked. A trace of ten steps of a large model is some 300 MB."""
NEOX_MARKS = frozenset({"pipe_parallel_size", "no_weight_tying", "gpt_j_residual"})
"""Keys that only files of GPT-NeoX have, which are YAML, often in the form of JSON, with DeepSpeed's keys among theirs."""
SNIFFED = 2_000_000
"""Bytes at the beginning of a file by which it is recognised."""
_CHUNK = 2**20
_SHOWN = 80

Reads = Literal["machine", "run", "trace", "recipe"]
"""What a reader returns: a `MachineReading`, which changes a profile; `RunKeys`, which change a run file; a `Trace`, which
becomes a timeline; or a `Recipe`, which is a whole question."""
Writes = Literal["recipe", "step", "weights", "launch"]
"""What a writer takes: a `Recipe` of a plan, an `EvaluatedStep`, `TrainedWeights` or a `LaunchFile`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """Files of one tool. Every module of this folder lists its own in FORMATS; one from outside is "package.module:ROW".

    Attributes:
        what: for people. tool: its name in messages about plans that it cannot express.
        reads: what `read` returns; None: parsim does not read it. sniff: whether a file is one, from its content; it must hold
            for no file of another tool. read: the file, and the options of `parsim import` that `options` names.
        writes: what `write` takes, with the path to write; None: parsim does not write it. file: the path's usual name.
        options: of reading, or of making what is written.
        layouts, refuses: what a reader takes, and what of it is refused; tools/reader_matrix.py lists both.
    """

    what: str
    tool: str = ""
    reads: Reads | None = None
    sniff: Callable[[SourceFile], bool] = lambda source: False
    read: Callable[..., Any] | None = None
    writes: Writes | None = None
    write: Callable[[Any, Path], Any] | None = None
    file: str = ""
    options: tuple[str, ...] = ()
    layouts: str = ""
    refuses: str = ""


@cache
def file_formats() -> Registry[FileFormat]:
    """All formats by the names that --kind and --format take. A new module in this folder is found without another edit."""
    names = sorted(module.name for module in pkgutil.iter_modules(parsim.formats.__path__))
    modules = [importlib.import_module(f"parsim.formats.{name}") for name in names]
    rows = {name: row for module in modules for name, row in getattr(module, "FORMATS", {}).items()}
    return Registry("file format", FileFormat, rows)


@dataclass(frozen=True)
class SourceFile:
    """A file. Attributes: path: as given. data: its bytes, unpacked."""

    path: Path
    data: bytes

    def _decoded(self, most: int | None = None) -> str:
        """UTF-8 (or UTF-16 with its mark, as Windows shells write); bytes that are none are replaced."""
        encoding = "utf-16" if self.data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        return self.data[:most].decode(encoding, errors="replace")

    @cached_property
    def text(self) -> str:
        """The whole file, decoded once."""
        return self._decoded()

    @cached_property
    def head(self) -> str:
        """The first SNIFFED bytes as text, by which a file is recognised: a large one is not decoded for it."""
        return self._decoded(SNIFFED)

    @property
    def digest(self) -> str:
        """Eight characters that name this content."""
        return hashlib.sha256(self.data).hexdigest()[:8]

    @property
    def is_text(self) -> bool:
        """Whether its beginning can be a text: without zero bytes, or with the mark of UTF-16."""
        return self.data[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" not in self.data[:4096]

    def begins(self, *starts: str) -> bool:
        """Whether the text begins with one of these, blanks aside."""
        return self.data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(tuple(start.encode() for start in starts))

    def json(self, what: str) -> Any:
        """The document of a JSON file.

        Args: what: kind of file, for the message.
        Raises: ImportedFileError: it is not JSON, or nested too deep.
        """
        try:
            return parse_json(self._decoded())  # not kept beside the document, which may be large
        except json.JSONDecodeError as error:
            raise ImportedFileError(
                f"{self.path} is not JSON: {error.msg} at line {error.lineno} column {error.colno}; {what} that was cut off "
                "must be written again"
            ) from error
        except ValueError as error:  # an integer of thousands of digits
            raise ImportedFileError(f"{self.path} is not {what}: {error}") from error


def marked(suffixes: tuple[str, ...], *marks: re.Pattern[str]) -> Callable[[SourceFile], bool]:
    """A rule of `FileFormat.sniff`: the name ends with one of these, and all marks are in the text."""
    return lambda source: source.path.suffix in suffixes and all(mark.search(source.head) for mark in marks)


def read_source(path: Path) -> SourceFile:
    """Read a file, and unpack it if it is gzipped.

    Raises: ImportedFileError: it cannot be read, holds nothing, unpacks to more than MOST_BYTES, or is a damaged archive.
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


def count(skipped: dict[str, int], why: str, number: int = 1) -> None:
    """Note that so many parts of a file were left out for a reason."""
    skipped[why] = skipped.get(why, 0) + number
