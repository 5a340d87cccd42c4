"""SQLite exports of Nsight Systems (`nsys export --type sqlite`): kernels, copies and launches of one GPU.

The rows become the trace events that `parsim.importers.kineto` reads, so windows, gaps and the ledger mean the same. Steps are
NVTX ranges such as "step 3", "iteration 3" or "ProfilerStep#3". Shapes are not in the file, hence no arithmetic either.

The database is opened from memory, and its tables alone are read: views and virtual tables of the file are not. Work and sizes
of values are bounded.

Source: docs.nvidia.com/nsight-systems, "SQLite Schema Reference" (tables, columns, process numbers in global ids).
"""

from __future__ import annotations

import itertools
import re
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from parsim.errors import ImportedFileError
from parsim.importers.kineto import KinetoTrace, trace_of
from parsim.importers.source_file import SourceFile, listed, shown

MAGIC = b"SQLite format 3\x00"
KERNELS, COPIES, SETS, LAUNCHES = (f"CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME"))
RANGES, GPUS, TEXTS = "NVTX_EVENTS", "TARGET_INFO_GPU", "StringIds"
EXPECTED = "the output of `nsys export --type sqlite REPORT.nsys-rep`, recorded with --trace=cuda,nvtx"
ON_DEVICE: Mapping[str, tuple[str, str]] = {
    KERNELS: ("kernel", "kernel"),
    COPIES: ("gpu_memcpy", "Memcpy"),
    SETS: ("gpu_memset", "Memset"),
}
"""By table: the category of its events, and their name where the table has none."""
MOST_ROWS = 3_000_000
MOST_VALUE_BYTES = 10_000_000
STEPS_BETWEEN_LOOKS, MOST_LOOKS = 100_000, 3_000
"""Of SQLite's virtual machine: the rows of the largest file take a fifth of them."""
STEP = re.compile(r"(?:ProfilerStep\s?#|(?:train(?:ing)?[ _]?)?(?:step|iteration|iter))[ _#:=]{0,3}(\d{1,12})", re.IGNORECASE)


def is_nsys(source: SourceFile) -> bool:
    """Whether a file is an SQLite database with tables of CUDA or NVTX.

    Args:
        source: the file.
    """
    return source.data.startswith(MAGIC) and (b"CUPTI_ACTIVITY_KIND" in source.data or b"NVTX_EVENTS" in source.data)


def read_nsys(source: SourceFile, *, steps: int | None = None, device: int | None = None) -> KinetoTrace:
    """Read an export.

    Args:
        source: the file. steps: how many it holds, where no NVTX range marks them. device: the GPU (None: the lowest number).

    Raises:
        ImportedFileError: no database, a damaged one, no kernel, or no kernel on that GPU.
    """
    try:
        connection = sqlite3.connect(":memory:")
        try:
            connection.deserialize(source.data)
            return _read(connection, source, steps, device)
        finally:
            connection.close()
    except (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ImportedFileError(f"{source.path} cannot be read as SQLite: {shown(error)}; expected {EXPECTED}") from error


def _read(connection: sqlite3.Connection, source: SourceFile, steps: int | None, device: int | None) -> KinetoTrace:
    connection.text_factory = lambda content: content.decode("utf-8", errors="replace")
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE_BYTES)
    looks = itertools.count()
    connection.set_progress_handler(lambda: int(next(looks) > MOST_LOOKS), STEPS_BETWEEN_LOOKS)
    tables = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
    columns = {
        name: {str(row[1]) for row in connection.execute(f'PRAGMA table_info("{name}")')}
        for name, definition in tables
        if name in (*ON_DEVICE, LAUNCHES, RANGES, GPUS, TEXTS) and "virtual" not in str(definition).lower()[:30]
    }
    if "globalPid" not in columns.get(KERNELS, ()) or "globalTid" not in columns.get(LAUNCHES, ()):
        for table in columns:  # of one process, which correlation numbers tell apart
            columns[table] -= {"globalPid"} | ({"globalTid"} if table == LAUNCHES else set())
    if KERNELS not in columns:
        raise ImportedFileError(f"{source.path} has no table {KERNELS}: no kernel was recorded; expected {EXPECTED}")
    devices = _devices(connection, columns, source)
    chosen = min(devices) if device is None else device
    if chosen not in devices:
        raise ImportedFileError(f"{source.path} has kernels of GPU {listed(sorted(devices))}, and none of GPU {chosen}")
    texts = dict(_rows(connection, columns, TEXTS, ("id", "value")))
    events: list[dict[str, Any]] = []
    skipped = _device_events(connection, columns, texts, chosen, events)
    _host_events(connection, columns, texts, events)
    _from_the_first(events)
    trace = trace_of({"traceEvents": events, "deviceProperties": _names(connection, columns, chosen)}, str(source.path), steps)
    notes = trace.notes
    if len(devices) > 1 and device is None:
        notes += (f"kernels of {len(devices)} GPUs: GPU {chosen} is taken; give --ranks N for another",)
    return _with(trace, notes, skipped, chosen)


def _with(trace: KinetoTrace, notes: tuple[str, ...], skipped: int, device: int) -> KinetoTrace:
    counts = dict(trace.skipped) | ({"activities of other GPUs": skipped} if skipped else {})
    return replace(trace, notes=notes, skipped=counts, rank=device)


def _rows(
    connection: sqlite3.Connection, columns: Mapping[str, set[str]], table: str, wanted: tuple[str, ...]
) -> Iterator[tuple[Any, ...]]:
    """Rows of a table of the file; a column that it does not have is NULL."""
    if table not in columns:
        return
    names = ", ".join(f'"{name}"' if name in columns[table] else "NULL" for name in wanted)
    for number, row in enumerate(connection.execute(f'SELECT {names} FROM "{table}"')):
        if number == MOST_ROWS:
            raise ImportedFileError(f"the table {table} has more than {MOST_ROWS:,} rows; record fewer steps")
        yield row


def _devices(connection: sqlite3.Connection, columns: Mapping[str, set[str]], source: SourceFile) -> set[int]:
    found = {number for (number,) in _rows(connection, columns, KERNELS, ("deviceId",)) if isinstance(number, int)}
    if not found:
        raise ImportedFileError(f"{source.path} has a table {KERNELS} without a kernel; expected {EXPECTED}")
    return found


def _process(identity: object) -> int:
    """The process number in a global id: its bits 24 to 47."""
    return identity >> 24 & 0xFFFFFF if isinstance(identity, int) else 0


def _device_events(
    connection: sqlite3.Connection, columns: Mapping[str, set[str]], texts: Mapping[int, str], device: int, events: list[Any]
) -> int:
    """Kernels, copies and sets of one GPU; returns how many belong to others."""
    skipped = 0
    wanted = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "shortName", "demangledName")
    for table, (category, fallback) in ON_DEVICE.items():
        for start, end, on, stream, correlation, process, short, long in _rows(connection, columns, table, wanted):
            if on != device:
                skipped += 1
                continue
            name = _text(texts, long) or _text(texts, short) or fallback
            args = {"stream": stream, "correlation": f"{_process(process)}/{correlation}"}
            events.append({"cat": category, "name": name, "start": start, "end": end, "tid": stream, "args": args})
    return skipped


def _host_events(
    connection: sqlite3.Connection, columns: Mapping[str, set[str]], texts: Mapping[int, str], events: list[Any]
) -> None:
    """Launches and NVTX ranges, of which those that mark a step get torch's name for it."""
    wanted = ("start", "end", "correlationId", "globalTid", "nameId")
    for start, end, correlation, thread, name in _rows(connection, columns, LAUNCHES, wanted):
        args = {"correlation": f"{_process(thread)}/{correlation}"}
        label = _text(texts, name) or "launch"
        events.append({"cat": "cuda_runtime", "name": label, "start": start, "end": end, "tid": thread, "args": args})
    for start, end, text, number, thread in _rows(connection, columns, RANGES, ("start", "end", "text", "textId", "globalTid")):
        label = text if isinstance(text, str) and text else _text(texts, number)
        if end is None or not label:
            continue
        step = STEP.fullmatch(label.strip())
        name = f"ProfilerStep#{step[1]}" if step else label
        events.append({"cat": "user_annotation", "name": name, "start": start, "end": end, "tid": thread, "args": {}})


def _text(texts: Mapping[int, str], value: object) -> str:
    """A text, or the text of a number."""
    found = texts.get(value) if isinstance(value, int) else value
    return found if isinstance(found, str) else ""


def _from_the_first(events: list[dict[str, Any]]) -> None:
    """Nanoseconds as microseconds from the first start, where whole numbers keep their digits."""
    starts = [event["start"] for event in events if isinstance(event["start"], int)]
    first = min(starts, default=0)
    for event in events:
        start, end = event.pop("start"), event.pop("end")
        event["ph"], event["pid"] = "X", 0
        whole = isinstance(start, int) and isinstance(end, int)
        event["ts"] = (start - first) / 1e3 if whole else None
        event["dur"] = (end - start) / 1e3 if whole else None


def _names(connection: sqlite3.Connection, columns: Mapping[str, set[str]], device: int) -> list[dict[str, str]]:
    """The name of the chosen GPU; of any where its number is not listed."""
    rows = list(_rows(connection, columns, GPUS, ("id", "name")))
    named = [name for number, name in rows if number == device] or [name for _, name in rows]
    return [{"name": name} for name in named if isinstance(name, str)]
