"""SQLite exports of Nsight Systems (`nsys export --type sqlite`): kernels, copies and launches of one GPU.

The rows become the trace events that `parsim.formats.kineto` reads, so windows, gaps and the ledger mean the same. Steps are
NVTX ranges such as "step 3", "iteration 3" or "ProfilerStep#3". Shapes are not in the file, hence no arithmetic either.

The database is opened from memory, and its tables alone are read: views and virtual tables of the file are not. Work and sizes
of values are bounded.

Source: docs.nvidia.com/nsight-systems, "SQLite Schema Reference" (tables, columns, process numbers in global ids).
"""

from __future__ import annotations

import itertools
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from parsim.errors import ImportedFileError
from parsim.formats.kineto import Trace, trace_of
from parsim.formats.source import FileFormat, SourceFile, listed, shown

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
"""Bound on the work of SQLite's virtual machine: the rows of the largest file take a fifth of it."""
STEP = re.compile(r"(?:ProfilerStep\s?#|(?:train(?:ing)?[ _]?)?(?:step|iteration|iter))[ _#:=]{0,3}(\d{1,12})", re.IGNORECASE)


NO_SHAPES = "Nsight Systems records no shapes, so kernels are not divided by their arithmetic"


def read_nsys(source: SourceFile, *, steps: int | None = None, ranks: Sequence[int] | None = None) -> Trace:
    """Read an export.

    Args:
        source: the file. steps: how many it holds, where no NVTX range marks them.
        ranks: the number of one GPU (None: the lowest of the file).

    Raises:
        ImportedFileError: no database, a damaged one, no kernel, or no kernel on that GPU; several numbers in `ranks`.
    """
    if ranks is not None and len(ranks) != 1:
        raise ImportedFileError(f"--ranks names {len(ranks)} GPUs, and a timeline is of one; give one number")
    try:
        connection = sqlite3.connect(":memory:")
        try:
            connection.deserialize(source.data)
            return _read(connection, source, steps, None if ranks is None else ranks[0])
        finally:
            connection.close()
    except (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ImportedFileError(f"{source.path} cannot be read as SQLite: {shown(error)}; expected {EXPECTED}") from error


def _read(connection: sqlite3.Connection, source: SourceFile, steps: int | None, device: int | None) -> Trace:
    tables = _Tables(connection)
    if KERNELS not in tables.columns:
        raise ImportedFileError(f"{source.path} has no table {KERNELS}: no kernel was recorded; expected {EXPECTED}")
    gpus = {number for (number,) in tables.rows(KERNELS, "deviceId") if isinstance(number, int)}
    if not gpus:
        raise ImportedFileError(f"{source.path} has a table {KERNELS} without a kernel; expected {EXPECTED}")
    gpu = min(gpus) if device is None else device
    if gpu not in gpus:
        raise ImportedFileError(f"{source.path} has kernels of GPU {listed(sorted(gpus))}, and none of GPU {gpu}")
    events, others = _device_events(tables, gpu)
    events += _host_events(tables)
    first = min((event["start"] for event in events if isinstance(event["start"], int)), default=0)
    for event in events:  # nanoseconds as microseconds from the first start, where whole numbers keep their digits
        start, end = event.pop("start"), event.pop("end")
        whole = isinstance(start, int) and isinstance(end, int)
        event |= {"ph": "X", "pid": 0}
        event |= {"ts": (start - first) / 1e3 if whole else None, "dur": (end - start) / 1e3 if whole else None}
    names = list(tables.rows(GPUS, "id", "name"))
    of_gpu = [name for number, name in names if number == gpu] or [name for _, name in names]
    properties = [{"name": name} for name in of_gpu if isinstance(name, str)]
    trace = trace_of({"traceEvents": events, "deviceProperties": properties}, str(source.path), steps)
    notes = trace.notes
    if len(gpus) > 1 and device is None:
        notes += (f"kernels of {len(gpus)} GPUs: GPU {gpu} is taken; give --ranks N for another",)
    skipped = dict(trace.skipped) | ({"activities of other GPUs": others} if others else {})
    return replace(trace, notes=notes, skipped=skipped, rank=gpu, no_shapes=NO_SHAPES)


class _Tables:
    """The tables of the file that matter, by their columns; rows are bounded in number, size and work."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        connection.text_factory = lambda content: content.decode("utf-8", errors="replace")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE_BYTES)
        looks = itertools.count()
        connection.set_progress_handler(lambda: int(next(looks) > MOST_LOOKS), STEPS_BETWEEN_LOOKS)
        self.connection = connection
        tables = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        self.columns = {
            name: {str(row[1]) for row in connection.execute(f'PRAGMA table_info("{name}")')}
            for name, definition in tables
            if name in (*ON_DEVICE, LAUNCHES, RANGES, GPUS, TEXTS) and "virtual" not in str(definition).lower()[:30]
        }
        if "globalPid" not in self.columns.get(KERNELS, ()) or "globalTid" not in self.columns.get(LAUNCHES, ()):
            for table in self.columns:  # of one process, which correlation numbers tell apart
                self.columns[table] -= {"globalPid"} | ({"globalTid"} if table == LAUNCHES else set())
        self.texts: dict[Any, Any] = dict(self.rows(TEXTS, "id", "value"))

    def rows(self, table: str, *wanted: str) -> Iterator[tuple[Any, ...]]:
        """Rows of a table of the file; a column that it does not have is NULL."""
        if table not in self.columns:
            return
        names = ", ".join(f'"{name}"' if name in self.columns[table] else "NULL" for name in wanted)
        for number, row in enumerate(self.connection.execute(f'SELECT {names} FROM "{table}"')):
            if number == MOST_ROWS:
                raise ImportedFileError(f"the table {table} has more than {MOST_ROWS:,} rows; record fewer steps")
            yield row

    def text(self, value: object) -> str:
        """A text, or the text of a number."""
        text = self.texts.get(value) if isinstance(value, int) else value
        return text if isinstance(text, str) else ""


def _process(identity: object) -> int:
    """The process number in a global id: its bits 24 to 47."""
    return identity >> 24 & 0xFFFFFF if isinstance(identity, int) else 0


def _device_events(tables: _Tables, gpu: int) -> tuple[list[dict[str, Any]], int]:
    """Kernels, copies and sets of one GPU, and how many belong to others."""
    events: list[dict[str, Any]] = []
    others = 0
    wanted = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "shortName", "demangledName")
    for table, (category, fallback) in ON_DEVICE.items():
        for start, end, on, stream, correlation, process, short, long in tables.rows(table, *wanted):
            if on != gpu:
                others += 1
                continue
            name = tables.text(long) or tables.text(short) or fallback
            args = {"stream": stream, "correlation": f"{_process(process)}/{correlation}"}
            events.append({"cat": category, "name": name, "start": start, "end": end, "tid": stream, "args": args})
    return events, others


def _host_events(tables: _Tables) -> list[dict[str, Any]]:
    """Launches and NVTX ranges, of which those that mark a step get torch's name for it."""
    events: list[dict[str, Any]] = []
    for start, end, correlation, thread, name in tables.rows(LAUNCHES, "start", "end", "correlationId", "globalTid", "nameId"):
        args = {"correlation": f"{_process(thread)}/{correlation}"}
        label = tables.text(name) or "launch"
        events.append({"cat": "cuda_runtime", "name": label, "start": start, "end": end, "tid": thread, "args": args})
    for start, end, text, number, thread in tables.rows(RANGES, "start", "end", "text", "textId", "globalTid"):
        label = text if isinstance(text, str) and text else tables.text(number)
        if end is None or not label:
            continue
        step = STEP.fullmatch(label.strip())
        name = f"ProfilerStep#{step[1]}" if step else label
        events.append({"cat": "user_annotation", "name": name, "start": start, "end": end, "tid": thread, "args": {}})
    return events


FORMATS = {
    "nsys": FileFormat(
        layouts="SQLite exports",
        refuses="a database without kernels",
        what="an SQLite export of Nsight Systems",
        reads="trace",
        sniff=lambda source: (
            source.data.startswith(MAGIC) and (b"CUPTI_ACTIVITY_KIND" in source.data or b"NVTX_EVENTS" in source.data)
        ),
        read=read_nsys,
        options=("steps", "ranks"),
    )
}
