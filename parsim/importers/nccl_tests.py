"""The output of nccl-tests, as text or JSON: which collective over which devices took how long at which size.

A text is a log: whatever is neither a row nor a header is counted and left out. A row is

    size count type [redop] [root]  time algbw busbw #wrong  time algbw busbw #wrong

in bytes, elements, microseconds and GB/s, out of place and then in place; `-I` adds four columns to each half. Sizes are those
of the whole array, as in parsim. The header names the program since version 2.14; older files say only `sum` or `none`, so
the operation follows from busbw / algbw, or must be given.

Source: github NVIDIA/nccl-tests, src/util.cu (the writers of both formats) and doc/PERFORMANCE.md (the ratios).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from parsim.errors import ImportedFileError
from parsim.importers.source_file import SourceFile, finite, listed, shown
from parsim.work import COLLECTIVE_KINDS

PROGRAMS: Mapping[str, str | None] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
    "reduce": None,
    "gather": None,
    "scatter": None,
    "hypercube": None,
    "alltoallv": None,
}
"""Programs of nccl-tests (NAME_perf) and the operation here; None: no plan uses it."""

PRICED = tuple(sorted(name for name in PROGRAMS.values() if name is not None))
EXPECTED = "rows `size count type redop root time algbw busbw #wrong ...` as all_reduce_perf prints them, or its --json file"
TYPES = "int8|uint8|int32|uint32|int64|uint64|half|float|double|bfloat16|f8e4m3|f8e5m2|fp8_e4m3|fp8_e5m2"
REDUCTIONS = ("sum", "prod", "max", "min", "avg", "mulsum", "none")

_ROW = re.compile(rf"(?<![\w.:/+-])(\d{{1,15}})\s+(\d{{1,15}})\s+({TYPES})\s+(\S.*)$")
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,6})(?:\s+Group\s+(\d{1,6}))?\s+Pid\s+\d{1,9}\s+on\s+(\S{1,256})"
    r"\s+device\s+(\d{1,4})\s+\[([^\]]{1,32})\]\s*(.*)$"
)
_COMMENT = re.compile(r"(?:\[[\d,]{1,20}\](?:<\w{1,10}>)?:?|\S{1,256}:)?\s*#")
"""A comment, also behind the prefix that mpirun or srun puts before each line."""
_PROGRAM = re.compile(r"(?:^|[\s/])([a-z_]{1,32})_perf(?:_mpi)?(?=\s|$)")
_THREADS = re.compile(r"#\s+nThread\s+(\d{1,6})\s+nGpus\s+(\d{1,6})")
_ITERATIONS = re.compile(r"(?<!warmup )\biters:\s+(\d{1,9})")
_NUMBER = re.compile(r"[-+]?\d{1,20}(?:\.\d{0,12})?(?:[eE][-+]?\d{1,3})?")

LONGEST_LINE = 4096
MIN_BANDWIDTH = 1.0
"""GB/s from which two decimals give a ratio to within 1%."""
RATIO_TOLERANCE = 0.03
LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclRow:
    """One timing. spread: relative standard deviation over the repeats (None: not recorded)."""

    size_bytes: int
    seconds: float
    in_place: bool
    spread: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTest:
    """One run of one program.

    Attributes:
        operation: here. group: device numbers of one machine, ascending. devices: their names, as the driver says.
        rows: timings that hold together. repeats: iterations behind each.
    """

    operation: str
    group: tuple[int, ...]
    devices: tuple[str, ...]
    rows: tuple[NcclRow, ...]
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """All tests of a file. skipped: why rows and lines were left out, and how many each."""

    tests: tuple[NcclTest, ...]
    skipped: Mapping[str, int]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Draft:
    """What was read of one run so far."""

    program: str | None = None
    threads: int | None = None
    repeats: int = 1
    ranks: dict[int, tuple[str, int, str, str]] = field(default_factory=dict)
    groups: set[int] = field(default_factory=set)
    cpu_time: bool = False
    rows: list[tuple[NcclRow, float, float]] = field(default_factory=list)
    reductions: set[str] = field(default_factory=set)


def read_nccl_tests(source: SourceFile, *, collective: str | None = None, ranks: Sequence[int] | None = None) -> NcclLog:
    """Read a log or a JSON file of nccl-tests.

    Args:
        source: the file.
        collective: the operation, where the file does not name it. ranks: device numbers, where the file does not list them.

    Raises:
        ImportedFileError: no row; an operation or devices that the file does not tell and nobody gave; several hosts or several
            groups at once; bandwidths that contradict the operation and the number of ranks.
    """
    if collective is not None and collective not in PRICED:
        raise ImportedFileError(f"collective = {shown(collective)!r}: must be one of {', '.join(PRICED)}")
    skipped: dict[str, int] = {}
    drafts = _from_json(source, skipped) if source.text.lstrip()[:1] == "{" else _from_text(source.text, skipped)
    drafts = [draft for draft in drafts if draft.rows]
    if not drafts:
        counts = "; ".join(f"{count} {why}" for why, count in skipped.items())
        raise ImportedFileError(f"{source.path} holds no row of nccl-tests ({counts or 'no line'}); expected {EXPECTED}")
    tests: list[NcclTest] = []
    notes: list[str] = []
    for draft in drafts:
        test = _finished(draft, source, collective, ranks, skipped, notes)
        if test is not None:
            tests.append(test)
    if not tests:
        raise ImportedFileError(
            f"{source.path} holds nothing that parsim prices: {'; '.join(notes)}; it prices {', '.join(PRICED)}"
        )
    return NcclLog(tests=tuple(tests), skipped=skipped, notes=tuple(notes))


def _from_text(text: str, skipped: dict[str, int]) -> list[_Draft]:
    drafts = [_Draft()]
    for line in text.splitlines():
        draft = drafts[-1]
        if len(line) > LONGEST_LINE:
            _count(skipped, f"lines longer than {LONGEST_LINE} characters")
        elif found := _ROW.search(line):
            _add_text_row(draft, found, skipped)
        elif found := _RANK.search(line):
            if draft.rows:
                drafts.append(draft := _next(draft))
            rank, group, host, device, bus, name = found.groups()
            draft.ranks[int(rank)] = (host, int(device), bus, name.strip())
            draft.groups.add(int(group or 0))
        elif found := _THREADS.search(line):
            if draft.rows:
                drafts.append(draft := _next(draft))
            draft.threads = int(found[1]) * int(found[2])
            draft.repeats = int(iterations[1]) if (iterations := _ITERATIONS.search(line)) else 1
        elif "cputime" in line and "algbw" in line:
            draft.cpu_time = True
        elif (found := _PROGRAM.search(line)) and found[1] in PROGRAMS and "concluded" not in line:
            if draft.rows:
                drafts.append(draft := _Draft())
            draft.program = found[1]
        elif line.strip() and not _COMMENT.match(line):
            _count(skipped, "lines of other programs")
    return drafts


def _next(draft: _Draft) -> _Draft:
    """A run whose header begins without naming its program: that stood before the header, or nowhere."""
    return _Draft(program=None if draft.rows else draft.program)


def _add_text_row(draft: _Draft, found: re.Match[str], skipped: dict[str, int]) -> None:
    words = found[4].split()
    if words[0] in REDUCTIONS:
        draft.reductions.add(words.pop(0))
    numbers: list[float | None] = []
    for word in words:
        if word != "N/A" and not _NUMBER.fullmatch(word):
            break  # a timestamp, or text that another process printed into the line
        numbers.append(None if word == "N/A" else float(word))
    if len(numbers) % 4 == 1 and numbers[0] is not None:
        numbers.pop(0)
    width = 8 if len(numbers) == 16 else 4
    if len(numbers) not in (4, 8, 16):
        _count(skipped, "rows that are cut or mixed with other output")
        return
    for place, start in enumerate(range(0, len(numbers), width)):
        seconds, algbw, busbw, wrong = numbers[start : start + 4]
        cv = numbers[start + 7] if width == 8 else None
        cv = None if cv is None or cv < 0 else cv
        _add_row(draft, int(found[1]), seconds, algbw, busbw, wrong, None if cv is None else cv / 100, place == 1, skipped)


def _add_row(
    draft: _Draft,
    size_bytes: int,
    microseconds: float | None,
    algbw: float | None,
    busbw: float | None,
    wrong: float | None,
    spread: float | None,
    in_place: bool,
    skipped: dict[str, int],
) -> None:
    if size_bytes == 0:
        _count(skipped, "rows of no bytes")
    elif (
        microseconds is None
        or algbw is None
        or busbw is None
        or min(algbw, busbw) < 0
        or not 0 < microseconds * 1e-6 < LONGEST_S
    ):
        _count(skipped, "rows without a time")
    elif wrong:
        _count(skipped, "rows whose data came out wrong")
    elif algbw >= MIN_BANDWIDTH and abs(size_bytes / (microseconds * 1e3) / algbw - 1) > RATIO_TOLERANCE:
        _count(skipped, "rows whose algbw is not size / time")
    else:
        row = NcclRow(size_bytes=size_bytes, seconds=microseconds * 1e-6, in_place=in_place, spread=spread)
        draft.rows.append((row, algbw, busbw))


def _from_json(source: SourceFile, skipped: dict[str, int]) -> list[_Draft]:
    document = source.json("a JSON file of nccl-tests")
    if not isinstance(document, dict) or not isinstance(document.get("results"), list):
        raise ImportedFileError(
            f"{source.path} is not a JSON file of nccl-tests: it has no list `results`; expected {EXPECTED}"
        )
    draft = _Draft()
    stated = document.get("config")
    config: dict[str, Any] = stated if isinstance(stated, dict) else {}
    threads, per_thread = finite(config.get("nthreads")), finite(config.get("ngpus"))
    if threads and per_thread and 1 <= threads * per_thread <= 10**6:
        draft.threads = int(threads * per_thread)
    repeats = finite(config.get("iterations"))
    draft.repeats = int(repeats) if repeats and 1 <= repeats < 10**9 else 1
    arguments = document.get("args")
    if isinstance(arguments, list):
        names = (_PROGRAM.search(f" {argument} ") for argument in arguments[:64] if isinstance(argument, str))
        draft.program = next((found[1] for found in names if found and found[1] in PROGRAMS), None)
    devices = config.get("devices", document.get("devices"))
    for entry in devices if isinstance(devices, list) else []:
        numbers = [finite(entry.get(key)) for key in ("rank", "device")] if isinstance(entry, dict) else [None]
        if any(number is None or not 0 <= number < 10**6 for number in numbers):
            _count(skipped, "devices without a number")
            continue
        rank, device = (int(number) for number in numbers if number is not None)
        texts = [str(entry.get(key, "")) for key in ("hostname", "device_hex", "device_info")]
        draft.ranks[rank] = (texts[0], device, texts[1], texts[2])
        draft.groups.add(int(finite(entry.get("group")) or 0))
    for row in document["results"]:
        if not isinstance(row, dict) or (size := finite(row.get("size"))) is None or not 0 <= size < 10**15:
            _count(skipped, "results without a size")
            continue
        draft.reductions.update({row["redop"]} & set(REDUCTIONS) if isinstance(row.get("redop"), str) else ())
        for key, in_place in (("out_of_place", False), ("in_place", True)):
            half = row.get(key)
            if isinstance(half, dict):
                draft.cpu_time = draft.cpu_time or "cpu_time" in half
                time, algbw, busbw, wrong = (finite(half.get(name)) for name in ("time", "alg_bw", "bus_bw", "nwrong"))
                spread = _json_spread(row.get(f"{key}_per_iter"))
                _add_row(draft, int(size), time, algbw, busbw, wrong, spread, in_place, skipped)
    return [draft]


def _json_spread(statistics: Any) -> float | None:
    if not isinstance(statistics, dict):
        return None
    average, deviation = finite(statistics.get("avg_us")), finite(statistics.get("stdev_us"))
    return None if not average or average < 0 or deviation is None or deviation < 0 else deviation / average


def _finished(
    draft: _Draft,
    source: SourceFile,
    collective: str | None,
    ranks: Sequence[int] | None,
    skipped: dict[str, int],
    notes: list[str],
) -> NcclTest | None:
    if draft.cpu_time:
        raise ImportedFileError(
            f"{source.path} holds times of the CPU (-C 1), which say nothing of the links; measure without -C"
        )
    group, names = _group(draft, source, ranks, notes)
    n = len(group)
    if n < 2:
        raise ImportedFileError(
            f"{source.path} was measured on {n} device; a collective needs at least 2: use -g, -t or mpirun"
        )
    ratios = [busbw / algbw for _, algbw, busbw in draft.rows if algbw >= MIN_BANDWIDTH]
    operation = _operation(draft, source, collective, n, median(ratios) if ratios else None, notes)
    if operation is None:
        return None
    factor = 1.0 if operation == "send_recv" else COLLECTIVE_KINDS[operation].traffic(n)
    if ratios and abs(median(ratios) / factor - 1) > RATIO_TOLERANCE:
        raise ImportedFileError(
            f"{source.path}: busbw is {median(ratios):.3g} times algbw, but {operation} over {n} ranks makes it {factor:.3g}; "
            "give the right collective and ranks (--collective, --ranks)"
        )
    if operation == "send_recv" and n != 2:
        notes.append(f"sendrecv over {n} ranks shifts around a ring: parsim prices pairs; measure it with 2 devices")
        _count(skipped, "rows of sendrecv over more than 2 ranks", len(draft.rows))
        return None
    rows = tuple(row for row, _, _ in draft.rows)
    return NcclTest(operation=operation, group=group, devices=names, rows=rows, repeats=max(1, draft.repeats))


def _group(
    draft: _Draft, source: SourceFile, ranks: Sequence[int] | None, notes: list[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    seen = list(draft.ranks.values())
    hosts = list(dict.fromkeys(host for host, _, _, _ in seen))
    if len(hosts) > 1:
        raise ImportedFileError(
            f"{source.path} was measured across {len(hosts)} hosts ({listed(hosts)}), and a profile describes one machine: "
            "measure inside one host; the network between hosts is named with cluster.network"
        )
    if len(draft.groups) > 1:
        raise ImportedFileError(
            f"{source.path} holds {len(draft.groups)} groups at once (NCCL_TESTS_SPLIT); measure one group alone"
        )
    names = tuple(dict.fromkeys(shown(name) for _, _, _, name in seen if name))
    if ranks is not None:
        if len(set(ranks)) != len(ranks) or (len(seen) > 1 and len(ranks) != len(seen)):
            raise ImportedFileError(f"ranks = {list(ranks)}: {source.path} lists {len(seen)} devices; name each of them once")
        return tuple(sorted(ranks)), names
    numbers = [device for _, device, _, _ in seen]
    if len(seen) <= 1 and (draft.threads or 0) > 1:  # JSON of a build without MPI lists the first device alone
        first = numbers[0] if numbers else 0
        return tuple(range(first, first + min(draft.threads or 0, 4096))), names
    if not seen:
        raise ImportedFileError(
            f"{source.path} does not list its devices (`#  Rank  0 ... device  0`); give them: --ranks 0,1,2,3"
        )
    if len(set(numbers)) < len(numbers):
        buses = [bus for _, _, bus, _ in seen]
        if len(set(buses)) < len(buses):
            raise ImportedFileError(f"{source.path} lists a device twice ({listed(buses)}); give the devices: --ranks 0,1,2,3")
        notes.append("every process saw its device as number 0: devices are numbered in the order of their PCI bus")
        numbers = [sorted(buses).index(bus) for bus in buses]
    return tuple(sorted(numbers)), names


def _operation(
    draft: _Draft, source: SourceFile, collective: str | None, n: int, ratio: float | None, notes: list[str]
) -> str | None:
    """The operation of a run: by its program, as given, or by what busbw / algbw leaves."""
    if draft.program is not None:
        known = PROGRAMS[draft.program]
        if known is None:
            notes.append(f"{draft.program}_perf: no plan of parsim uses this operation")
        elif collective not in (None, known):
            notes.append(f"{draft.program}_perf is {known}, not {collective}")
        return known
    if collective is not None:
        return collective
    likely = [
        name
        for name in ("all_reduce", "reduce_scatter")
        if "none" not in draft.reductions
        and draft.reductions
        and ratio is not None
        and abs(ratio / COLLECTIVE_KINDS[name].traffic(n) - 1) <= RATIO_TOLERANCE
    ]
    if len(likely) == 1:
        notes.append(f"the file names no program; busbw / algbw = {ratio:.3g} over {n} ranks says {likely[0]}")
        return likely[0]
    raise ImportedFileError(
        f"{source.path} does not say which collective it measured; give it: --collective {' | '.join(PRICED)}"
    )


def _count(skipped: dict[str, int], why: str, count: int = 1) -> None:
    skipped[why] = skipped.get(why, 0) + count
