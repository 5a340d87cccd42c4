"""Damaged files of every kind: each is read, or refused with one message; quickly, in bounded memory, and never silently empty.

Mutations know the structure: JSON values are replaced at random paths; words and lines are cut, swapped and doubled; bytes are
flipped. The default run is a small share. `-m slow` runs 10^4 files of each kind, `make fuzz` ten times
as many.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parsim.errors import ParsimError
from parsim.files import CONTROL
from parsim.formats.deepspeed import read_deepspeed
from parsim.formats.imports import format_of, timeline_of
from parsim.formats.kineto import read_kineto, read_nsys
from parsim.formats.ledger import ledger_of
from parsim.formats.nccl_tests import read_nccl_tests, with_measured
from parsim.formats.source import SourceFile
from parsim.formats.topology import read_lstopo, read_topo_matrix, with_links
from parsim.hardware.compose import load_profile
from parsim.units import printable
from tests.unit.import_samples import DEEPSPEED, LSTOPO, TOPO, gpu_trace, nccl_json, nccl_text, nsys_database, switched_topo

SIZES = tuple(4**power for power in range(6, 10))
SHARE = 20
LONGEST_S = 5.0
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 1e308, -1e308, 0.5, 1e-320, float("inf"), float("nan")),
    *("", "0", "auto", "\x1b[2J", "<script>", "../../x", "nan", "[1, 1]", "x" * 5000),
    *([], {}, [[]], [None], {"": 0}, [[2**40] * 4] * 3),
]


def replaced(document: Any, draw: st.DrawFn) -> Any:
    """The document with one to four values replaced, keys dropped, or entries doubled."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 4))):
        node, steps = changed, 0
        while isinstance(node, dict | list) and node and steps < 6:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = draw(st.sampled_from(keys))
            inner = node[key]
            if not isinstance(inner, dict | list) or not inner or (draw(st.booleans()) and steps > 1):
                match draw(st.sampled_from(("put", "drop", "double"))):
                    case "put":
                        node[key] = copy.deepcopy(draw(st.sampled_from(ODD)))  # later changes may be made inside it
                    case "drop":
                        del node[key]
                    case _ if isinstance(node, list):
                        node.append(copy.deepcopy(inner))
                    case _:
                        node[f"{key}{key}"] = inner
                break
            node, steps = inner, steps + 1
    return changed


def mangled(text: str, draw: st.DrawFn) -> str:
    """The text with lines cut, swapped or doubled and words replaced."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 5))):
        if not lines:
            break
        row = draw(st.integers(0, len(lines) - 1))
        words = lines[row].split(" ")
        place = draw(st.integers(0, len(words) - 1))
        match draw(st.sampled_from(("drop", "double", "cut", "word", "swap", "join"))):
            case "drop":
                del lines[row]
            case "double":
                lines.insert(row, lines[row])
            case "cut":
                lines[row] = lines[row][: draw(st.integers(0, len(lines[row])))]
            case "word":
                words[place] = str(draw(st.sampled_from(ODD)))
                lines[row] = " ".join(words)
            case "swap":
                other = draw(st.integers(0, len(lines) - 1))
                lines[row], lines[other] = lines[other], lines[row]
            case _:
                lines[row] += draw(st.text(max_size=20))
    return "\n".join(lines)


@st.composite
def damaged(draw: st.DrawFn, samples: tuple[Any, ...]) -> bytes:
    sample = draw(st.sampled_from(samples))
    data = mangled(sample, draw) if isinstance(sample, str) else json.dumps(replaced(sample, draw))
    found = data.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        place = draw(st.integers(0, len(found)))
        found = found[:place] + draw(st.binary(max_size=8)) + found[draw(st.integers(place, len(found))) :]
    return found


def nccl(source: SourceFile) -> None:
    log = read_nccl_tests(source)
    assert log.tests
    assert all(test.rows for test in log.tests)
    made, groups = with_measured(load_profile("8xh100-sxm"), log, source.digest, "x")
    assert groups
    assert len(made.communication.points) == sum(len(test.rows) for test in log.tests)


def kineto(source: SourceFile) -> None:
    trace = read_kineto(source)
    ledger = ledger_of(trace, 1e12)
    assert len(timeline_of(trace)) > 0
    assert sum(seconds for _, seconds in ledger.entries()) == pytest.approx(ledger.step_s, rel=1e-6, abs=1e-9)
    assert not any(CONTROL.search(name) for name in (*trace.activities.names, *trace.activities.streams, trace.device))


def topo(source: SourceFile) -> None:
    tree = read_topo_matrix(source)
    if tree.gpus in (4, 8):
        with_links(load_profile(f"{tree.gpus}xa100-sxm-80gb"), tree, source.digest, "x")


def deepspeed(source: SourceFile) -> None:
    read = read_deepspeed(source)
    assert read.keys
    assert not any(CONTROL.search(text) for text in (*read.warnings, *read.harmless, *read.auto))


def lstopo(source: SourceFile) -> None:
    tree = read_lstopo(source)
    assert tree.gpus > 0
    assert not any(CONTROL.search(name) for name, _ in tree.cards)
    if tree.gpus in (4, 8):
        with_links(load_profile(f"{tree.gpus}xa100-sxm-80gb"), tree, source.digest, "x")


def tables_of(database: bytes) -> dict[str, dict[str, Any]]:
    """An SQLite file as a document, whose values can be replaced."""
    connection = sqlite3.connect(":memory:")
    connection.deserialize(database)
    found: dict[str, dict[str, Any]] = {}
    for (name,) in connection.execute("SELECT name FROM sqlite_master").fetchall():
        cursor = connection.execute(f"SELECT * FROM {name}")
        found[name] = {"columns": [column[0] for column in cursor.description], "rows": [list(row) for row in cursor]}
    return found


def database_of(tables: Any) -> bytes:
    """The other way round: whatever of the document SQLite takes."""
    connection = sqlite3.connect(":memory:")
    for name, table in tables.items() if isinstance(tables, dict) else ():
        with contextlib.suppress(sqlite3.Error, TypeError, KeyError, OverflowError, UnicodeEncodeError):
            columns = ", ".join(f'"{column}"' for column in table["columns"])
            connection.execute(f'CREATE TABLE "{name}" ({columns})')
            places = ", ".join("?" * len(table["columns"]))
            for row in table["rows"]:
                with contextlib.suppress(sqlite3.Error, TypeError, OverflowError, UnicodeEncodeError):
                    connection.execute(f'INSERT INTO "{name}" VALUES ({places})', row)
    connection.commit()
    if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return b""  # so an empty database is stored; SQLite does not serialize one in memory that was never written to
    return connection.serialize()


def nsys(source: SourceFile) -> None:
    """Of a document of tables the database with them; anything else as it is."""
    with contextlib.suppress(ValueError, RecursionError):
        source = SourceFile(source.path, database_of(json.loads(source.data)))
    trace = read_nsys(source)
    ledger = ledger_of(trace, None)
    assert len(timeline_of(trace)) > 0
    assert sum(seconds for _, seconds in ledger.entries()) == pytest.approx(ledger.step_s, rel=1e-6, abs=1e-9)
    assert not any(CONTROL.search(name) for name in (*trace.activities.names, *trace.activities.streams, trace.device))


ON_A_CPU = {"traceEvents": [{**event, "cat": "cpu_op"} for event in gpu_trace()["traceEvents"] if event.get("cat")]}  # type: ignore[attr-defined]
PAIR = nccl_text(2, program="sendrecv", redop="none", sizes=SIZES)

READERS: dict[str, tuple[Callable[[SourceFile], None], tuple[Any, ...]]] = {
    "nccl-tests": (nccl, (nccl_text(sizes=SIZES), PAIR, json.loads(nccl_json(8, sizes=SIZES)))),
    "kineto": (kineto, (gpu_trace(), ON_A_CPU)),
    "topo": (topo, (TOPO, switched_topo(4), switched_topo(8))),
    "deepspeed": (deepspeed, (DEEPSPEED,)),
    "lstopo": (lstopo, (LSTOPO,)),
    "nsys": (nsys, (tables_of(nsys_database()), tables_of(nsys_database(gpus=2, marked=False)))),
}


def refusal(read: Callable[[], object]) -> str | None:
    """The message of a refusal; None where the file was read. Any other error is a fault."""
    try:
        read()
    except ParsimError as error:
        return str(error)
    return None


def assert_read_or_refused(kind: str, data: bytes) -> None:
    """Read it, or refuse it in one message that a terminal may print."""
    reader, _ = READERS[kind]
    source = SourceFile(Path("file"), data)
    begun = time.process_time()
    for read in (lambda: format_of(source), lambda: reader(source)):
        message = refusal(read)
        assert message is None or 0 < len(printable(message)) < 20_000
    assert time.process_time() - begun < LONGEST_S


@pytest.mark.parametrize("kind", READERS)
def test_damaged_files_are_read_or_refused(kind: str) -> None:
    @settings(max_examples=SHARE, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(damaged(READERS[kind][1]))
    def check(data: bytes) -> None:
        assert_read_or_refused(kind, data)

    check()


@pytest.mark.parametrize("kind", READERS)
def test_files_made_to_be_slow_are_not(kind: str) -> None:
    """Long lines, deep nests, many rows and long numbers: each within the limit."""
    rows = "        1024   256   float  sum  -1 " + "1.0 " * 50_000
    for text in (
        rows,
        "1 " * 200_000,
        "# Rank 0 " * 50_000,
        "GPU0 " * 50_000,
        "[" * 100_000,
        '{"traceEvents": ' + "[" * 5_000 + "]" * 5_000 + "}",
        '{"train_batch_size": ' + "9" * 5_000 + "}",
        "\x1b[" * 100_000,
    ):
        assert_read_or_refused(kind, text.encode())


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    from parsim.formats.source import read_source

    data = gzip.compress(json.dumps(gpu_trace()).encode())
    for cut in (3, 12, len(data) // 2, len(data) - 1):
        (tmp_path / "t.json.gz").write_bytes(data[:cut])
        with pytest.raises(ParsimError, match="damaged gzip"):
            read_source(tmp_path / "t.json.gz")
