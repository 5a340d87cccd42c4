"""Reading and writing files: JSON and TOML that others wrote, texts that are never half written."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import json
import math
import os
import re
import stat
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from parsim.errors import ParsimError
from parsim.units import CONTROL

HOME_VARIABLE = "PARSIM_HOME"
"""Environment variable: the folder of what parsim keeps for a user."""


def cache_folder(name: str) -> Path:
    """Where parsim keeps one kind of file: $PARSIM_HOME/NAME, else $XDG_CACHE_HOME/parsim/NAME or ~/.cache/parsim/NAME."""
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home).expanduser() / name
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "parsim" / name


PRIVATE = 0o700
"""Mode of a folder that parsim makes: it may hold samples and weights. Whoever wants to share one changes it."""


def make_private(folder: Path) -> None:
    """Make the folder for this user alone, with those above it as usual. One that is there keeps its mode."""
    folder.mkdir(PRIVATE, parents=True, exist_ok=True)


FULL = {
    errno.ENOSPC: "the disk is full: make room",
    errno.EDQUOT: "your quota of the disk is used up: make room",
    errno.EFBIG: "the file would be larger than this process may write: raise `ulimit -f`, or make room",
}
"""What a disk answers that takes no more, and what to do."""
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def write_problem(error: BaseException, folder: Path) -> str:
    """Why a file below the folder could not be written, and what to do, from the error number of the system."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno):  # a writer may have wrapped it
        cause = cause.__cause__ or cause.__context__
    number = cause.errno if isinstance(cause, OSError) else None
    if number in FULL:
        return FULL[number]
    if number in REFUSED:
        return f"it may not be written ({os.strerror(number)}): make it writable"
    if not folder.exists():
        return f"{folder} is not there any more: it was moved or removed meanwhile"
    return str(cause or error)


NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What a file system says that has no locks, as Lustre where it is mounted without them."""


def lock(handle: int, *, waits: bool = False, sure: bool = False) -> bool:
    """Lock an open file or folder until it is closed; False if another process holds its lock.
    `handle`: its number. `waits`: until whoever holds the lock lets go of it. `sure`: False too where there are no locks, which
    hold nobody off."""
    try:
        import fcntl
    except ImportError:  # no locks on this system
        return not sure
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in NO_LOCKS and not sure
    return True


DEEPEST = 100
"""Levels of tables and lists in a file. parsim writes at most 10; thousands would exhaust the interpreter's stack."""

TOO_DEEP = f"tables and lists are nested more than {DEEPEST} levels deep"

LARGEST_BYTES = 512 * 2**20
"""The largest JSON file that is read, unless its reader says otherwise."""
LARGEST_TOML_BYTES = 2**20
"""The largest TOML file, which people write by hand: tomllib takes seconds for some texts of a few megabytes."""
MOST_DIGITS = 25
"""Digits of a whole number. A size in bytes has at most 19; thousands take seconds to convert and print."""
TOO_LARGE_NUMBER = f"a whole number has more than {MOST_DIGITS} digits"


def read_regular(path: Path, largest_bytes: int = LARGEST_BYTES) -> bytes:
    """The content of a file, which must be a regular one (no pipe, no device) of bounded size.
    Raises OSError: it is not there, or cannot be read. ValueError: it is not a regular file, or larger."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > largest_bytes:
        raise ValueError(f"it has {status.st_size:,} bytes, more than the {largest_bytes:,} that are read")
    return path.read_bytes()


def read_text(path: Path, largest_bytes: int = LARGEST_BYTES) -> str:
    """The text of a file in UTF-8. Raises as `read_regular`; ValueError for another encoding."""
    return read_regular(path, largest_bytes).decode("utf-8")


def unpacked(content: bytes) -> bytes:
    """Gunzipped, as far as it stays a file that is read: a few kilobytes can unpack to gigabytes."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        text = file.read(LARGEST_BYTES + 1)
    if len(text) > LARGEST_BYTES:
        raise ValueError(f"it unpacks to more than {LARGEST_BYTES:,} bytes")
    return text


FOREIGN = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, OSError, RecursionError),
    *(TypeError, ValueError, zlib.error),
)
"""What can go wrong where a document is not as expected."""


@contextlib.contextmanager
def reading(what: str, error: type[ParsimError], fix: str) -> Iterator[None]:
    """Whatever goes wrong inside, while a document of somebody else's is taken apart, becomes one message.
    `what`: that is wrong then ("plan.json is not a plan"). `fix`: what to do."""
    try:
        yield
    except ParsimError:
        raise
    except FOREIGN as problem:
        text = (str(problem) or type(problem).__name__).splitlines()[0][:200]
        raise error(f"{what}: {text}; {fix}") from problem


def read_json(path: Path) -> Any:
    """The document of a JSON file. Raises OSError as `read_regular`, json.JSONDecodeError for everything else."""
    try:
        return parse_json(read_regular(path))
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error


def parse_json(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """The document of a JSON text: UTF-8, at most DEEPEST levels, whole numbers of at most MOST_DIGITS digits, and no number
    that is not finite.
    `allow_nan`: take NaN and infinities, as in the metrics of a training that has diverged. Raises json.JSONDecodeError: it is
    none."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        parsers: dict[str, Any] = {} if allow_nan else {"parse_constant": _refused_constant}
        if _LONG_NUMBER.search(text):  # it may stand in a text, so the numbers themselves are asked
            parsers |= {"parse_int": _whole} if allow_nan else {"parse_int": _whole, "parse_float": _finite_float}
        document = json.loads(text, **parsers)
        if _ESCAPED_SURROGATE.search(text):
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise json.JSONDecodeError(TOO_DEEP, "", 0) from error
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error
    if is_deeper(document, DEEPEST):
        raise json.JSONDecodeError(TOO_DEEP, "", 0)
    return document


_LONG_NUMBER = re.compile(r"[0-9]{26}|[eE]\+?[0-9]{3}")
"""What every number has that is too long or too large to be finite."""
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(TOO_LARGE_NUMBER)
    return int(text)


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


def _refused_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def parse_toml(text: str) -> dict[str, Any]:
    """The document of a TOML text, bounded as that of `parse_json`; infinities are words of TOML and stay.
    Raises tomllib.TOMLDecodeError: it is none."""
    if len(text) > LARGEST_TOML_BYTES:
        raise tomllib.TOMLDecodeError(f"it has {len(text):,} characters, more than the {LARGEST_TOML_BYTES:,} that are read")
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError as error:
        raise tomllib.TOMLDecodeError(TOO_DEEP) from error
    except ValueError as error:
        raise tomllib.TOMLDecodeError(str(error)) from error
    if is_deeper(document, DEEPEST):
        raise tomllib.TOMLDecodeError(TOO_DEEP)
    if _has_long_number(document):
        raise tomllib.TOMLDecodeError(TOO_LARGE_NUMBER)
    return document


def document_text(document: Mapping[str, Mapping[str, Any]]) -> str:
    """A whole file: every table by its name; nested tables stand in line."""
    tables = []
    for name, section in document.items():
        lines = [f"[{name}]", *(f"{key} = {value_text(value)}" for key, value in section.items())]
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def value_text(value: object) -> str:
    """One TOML value on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case float():
            return repr(value) if math.isfinite(value) else {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
        case list() | tuple():
            return "[" + ", ".join(value_text(entry) for entry in value) + "]"
        case dict():
            keys = {key: key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else value_text(key) for key in map(str, value)}
            pairs = (f"{keys[str(key)]} = {value_text(content)}" for key, content in value.items())
            return "{ " + ", ".join(pairs) + " }" if value else "{}"
        case _:
            return str(value)


def _has_long_number(document: object) -> bool:
    match document:
        case int():
            return bool(abs(document) >= 10**MOST_DIGITS)
        case dict():
            return any(map(_has_long_number, document.values()))
        case list():
            return any(map(_has_long_number, document))
    return False


def is_deeper(document: object, levels: int) -> bool:
    """Whether tables and lists are nested more than `levels` deep."""
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(levels):
        inner = (value for node in level for value in (node.values() if isinstance(node, dict) else node))
        level = [value for value in inner if isinstance(value, dict | list)]
    return bool(level)


ESCAPED_CONTROL = re.compile(r"[\x7f-\x9f]|\\[bfr]|\\u00[0189][0-9a-fA-F]|\\u007[fF]")
"""What control characters look like in a JSON text; every text without a match holds none."""


def control_character_in(document: object, path: str = "") -> str | None:
    """The first text of a document, key or value, that holds a control character: `model.name = 'a\\x1b[2J'`."""
    match document:
        case str():
            return f"{path or 'the text'} = {document!r}" if CONTROL.search(document) else None
        case dict():
            for key, value in document.items():
                if CONTROL.search(str(key)):
                    return f"the key {key!r}" + (f" of {path}" if path else "")
                if problem := control_character_in(value, f"{path}.{key}" if path else str(key)):
                    return problem
        case list() | tuple():
            for number, value in enumerate(document):
                if problem := control_character_in(value, f"{path}.{number}"):
                    return problem
    return None


NO_CONTROL = "must hold no control characters, which a terminal would obey; drop them"
"""The rule for names that parsim prints."""


def version_problem(document: Mapping[str, Any], reads: int) -> str | None:
    """What is wrong with a file's `schema_version`, which must be `reads`, or None."""
    version = document.get("schema_version")
    if version == reads and not isinstance(version, bool):
        return None
    newer = isinstance(version, int) and version > reads
    fix = "; a newer parsim wrote it: upgrade parsim" if newer else ""
    return f"schema_version must be {reads}, got {version!r}{fix}"


def write_atomically(path: Path, write: Callable[[BinaryIO], object], *, force: bool = False) -> None:
    """Write a file whole or not at all: under a temporary name beside it, which is then renamed.
    Holds against a killed process and a full disk: the old file stays, and the temporary one goes. `write`: called with the
    open temporary file. `force`: to the disk before the rename, so that it holds against a power cut, too. Raises OSError: with
    `path` as its filename, so that whoever reports it can name the file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            write(file)
            if force:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
        if force:
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


PARTIAL = ".partial"
"""What the name of a file ends with that is still being written."""


def write_text_atomically(path: Path, text: str) -> None:
    """UTF-8, see `write_atomically`. Nothing is forced to the disk."""
    write_atomically(path, lambda file: file.write(text.encode("utf-8")))


def write_json_atomically(path: Path, document: object, *, indent: int | None = None) -> None:
    """The document as `json_text`, see `write_atomically`."""
    write_text_atomically(path, json_text(document, indent=indent))


def json_text(document: object, *, indent: int | None = None) -> str:
    """JSON that every reader takes: a number that is not finite becomes null."""
    return json.dumps(finite(document), indent=indent, allow_nan=False)


def finite(document: object) -> Any:
    """The document with null for NaN and infinities, which JSON has no words for."""
    match document:
        case float():
            return document if math.isfinite(document) else None
        case Mapping():
            return {str(key): finite(value) for key, value in document.items()}
        case list() | tuple():
            return [finite(value) for value in document]
    return document
