"""The output of nccl-tests, as text or JSON: which collective over which devices took how long at which size.

Points inside one host go into a profile, with the fits to them, and with how far the profile was from them before. Points
between hosts calibrate a network.

A text is a log: whatever is neither a row nor a header is counted and left out. A row is

    size count type [redop] [root]  time algbw busbw #wrong  time algbw busbw #wrong

in bytes, elements, microseconds and GB/s, out of place and then in place; `-I` adds four columns to each half. Before version
2.13 the fourth column is `error`, the largest difference, which may be as large as rounding makes it. Sizes are those of the
whole array, as in parsim. The header names the program since version 2.14; older files say only `sum` or `none`, so
the operation follows from busbw / algbw, or must be given.

Source: github NVIDIA/nccl-tests, src/util.cu (the writers of both formats) and doc/PERFORMANCE.md (the ratios).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

from parsim.costs.communication.closed_forms import regimes_s
from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.costs.communication.measured import fits_of_points
from parsim.costs.communication.network_fit import fitted_network, log_errors, nearest_network
from parsim.errors import CostError, ImportedFileError, ProfileError
from parsim.formats.imports import MachineReading, MachineUpdate
from parsim.formats.source import FileFormat, SourceFile, count, finite, listed, shown
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.parts import Network, NetworkPoint, load_network, shipped_networks
from parsim.hardware.profile import CollectiveFit, CollectivePoint, Profile, SourceEntry
from parsim.report.tables import ReportTable, columns_of
from parsim.units import format_bytes, format_percent
from parsim.work import COLLECTIVE_KINDS, Collective, SendRecv

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
    r"#\s+Rank\s+(\d{1,6})(?:\s+Group\s+(\d{1,6}))?\s+Pid\s+(\d{1,9})\s+on\s+(\S{1,256})"
    r"\s+device\s+(\d{1,4})\s+\[([^\]]{1,32})\]\s*(.*)$"
)
_COMMENT = re.compile(r"(?:\[[\d,]{1,20}\](?:<\w{1,10}>)?:?|\S{1,256}:)?\s*#")
"""A comment, also behind the prefix that mpirun or srun puts before each line."""
_PROGRAM = re.compile(r"(?:^|[\s/])([a-z_]{1,32})_perf(?:_mpi)?(?=\s|$)")
_THREADS = re.compile(r"#\s+nThread\s+(\d{1,6})\s+nGpus\s+(\d{1,6})")
_ITERATIONS = re.compile(r"(?<!warmup )\biters:\s+(\d{1,9})")
_NUMBER = re.compile(r"[-+]?\d{1,20}(?:\.\d{0,12})?(?:[eE][-+]?\d{1,3})?")

_SNIFFED_ROW = re.compile(r"^.{0,200}?\d+\s+\d+\s+(?:half|float|double|bfloat16|u?int\d+|f8e\w+)\s+\S", re.MULTILINE)

LONGEST_LINE = 4096
MIN_BANDWIDTH = 1.0
"""GB/s from which two decimals give a ratio to within 1%."""
RATIO_TOLERANCE = 0.03
LARGEST_DIFFERENCE: Mapping[str, float] = {"half": 1e-2, "bfloat16": 1e-2, "float": 1e-5, "double": 1e-12}
"""That the versions with a column `error` accept (deltaMaxValue of src/common.cu); integers must be exact."""
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

    Attributes: operation: here. hosts: per host the numbers of its devices, ascending. devices: their names, as the driver
        says. rows: timings that hold together. repeats: iterations behind each.
    """

    operation: str
    hosts: tuple[tuple[int, ...], ...]
    devices: tuple[str, ...]
    rows: tuple[NcclRow, ...]
    repeats: int

    @property
    def group(self) -> tuple[int, ...]:
        """The devices of the first host, which is the only one of a test inside a machine."""
        return self.hosts[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """All tests of a file. skipped: why rows and lines were left out, and how many each."""

    tests: tuple[NcclTest, ...]
    skipped: Mapping[str, int]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Draft:
    """What was read of one run so far. processes: per rank those that claim it. differences: of the column `error`."""

    program: str | None = None
    threads: int | None = None
    repeats: int = 1
    ranks: dict[int, tuple[str, int, str, str]] = field(default_factory=dict)
    processes: dict[int, set[str]] = field(default_factory=dict)
    differences: bool = False
    groups: set[int] = field(default_factory=set)
    cpu_time: bool = False
    rows: list[tuple[NcclRow, float, float]] = field(default_factory=list)
    reductions: set[str] = field(default_factory=set)


def read_nccl_tests(source: SourceFile, *, collective: str | None = None, ranks: Sequence[int] | None = None) -> NcclLog:
    """Read a log or a JSON file of nccl-tests.

    Args: source: the file. collective: the operation, where the file does not name it. ranks: device numbers, where the file
        does not list them.
    Raises: ImportedFileError: no row; an operation or devices that the file does not tell and nobody gave; several groups at
        once; processes that measured alone; bandwidths that contradict the operation and the number of ranks.
    """
    if collective is not None and collective not in PRICED:
        raise ImportedFileError(f"collective = {shown(collective)!r}: must be one of {', '.join(PRICED)}")
    skipped: dict[str, int] = {}
    drafts = _from_json(source, skipped) if source.text.lstrip()[:1] == "{" else _from_text(source.text, skipped)
    drafts = [draft for draft in drafts if draft.rows]
    if not drafts:
        counts = "; ".join(f"{number} {why}" for why, number in skipped.items())
        raise ImportedFileError(f"{source.path} holds no row of nccl-tests ({counts or 'no line'}); expected {EXPECTED}")
    alone = sum(len(claims) for draft in drafts for claims in draft.processes.values())
    if any(len(claims) > 1 for draft in drafts for claims in draft.processes.values()) or (
        len(drafts) > 1 and alone == len(drafts) and all(set(draft.ranks) == {0} for draft in drafts)
    ):
        raise ImportedFileError(
            f"{source.path} is of {alone} processes that each measured by themselves, as rank 0 of its own run: nccl-tests was "
            f"built without MPI. Build it with `make MPI=1`, or run one process with -g {alone}"
        )
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
            count(skipped, f"lines longer than {LONGEST_LINE} characters")
        elif row := _ROW.search(line):
            _add_text_row(draft, row, skipped)
        elif (rank := _RANK.search(line)) or (threads := _THREADS.search(line)):
            if draft.rows:  # another run, whose header begins without naming its program
                drafts.append(draft := _Draft())
            if rank:
                number, group, process, host, device, bus, name = rank.groups()
                draft.ranks[int(number)] = (host, int(device), bus, name.strip())
                draft.processes.setdefault(int(number), set()).add(f"{host} {process}")
                draft.groups.add(int(group or 0))
            elif threads:
                draft.threads = int(threads[1]) * int(threads[2])
                draft.repeats = int(iterations[1]) if (iterations := _ITERATIONS.search(line)) else 1
        elif "algbw" in line and "busbw" in line:
            draft.cpu_time = draft.cpu_time or "cputime" in line
            draft.differences = "#wrong" not in line and " error" in line
        elif (program := _PROGRAM.search(line)) and program[1] in PROGRAMS and "concluded" not in line:
            if draft.rows:
                drafts.append(draft := _Draft())
            draft.program = program[1]
        elif line.strip() and not _COMMENT.match(line):
            count(skipped, "lines of other programs")
    return drafts


def _add_text_row(draft: _Draft, row: re.Match[str], skipped: dict[str, int]) -> None:
    words = row[4].split()
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
        count(skipped, "rows that are cut or mixed with other output")
        return
    for place, start in enumerate(range(0, len(numbers), width)):
        variation = numbers[start + 7] if width == 8 else None
        spread = None if variation is None or variation < 0 else variation / 100
        accepted = LARGEST_DIFFERENCE.get(row[3], 0.0) if draft.differences else 0.0
        _add_row(draft, int(row[1]), numbers[start : start + 4], spread, place == 1, skipped, accepted)


def _add_row(
    draft: _Draft,
    size_bytes: int,
    numbers: Sequence[float | None],
    spread: float | None,
    in_place: bool,
    skipped: dict[str, int],
    accepted: float = 0.0,
) -> None:
    """numbers: microseconds, algbw, busbw, and how many elements came out wrong, or by how much (right up to `accepted`)."""
    microseconds, algbw, busbw, wrong = numbers
    if size_bytes == 0:
        count(skipped, "rows of no bytes")
    elif (
        microseconds is None
        or algbw is None
        or busbw is None
        or min(algbw, busbw) < 0
        or not 0 < microseconds * 1e-6 < LONGEST_S
    ):
        count(skipped, "rows without a time")
    elif wrong is not None and wrong > accepted:
        count(skipped, "rows whose data came out wrong")
    elif algbw >= MIN_BANDWIDTH and abs(size_bytes / (microseconds * 1e3) / algbw - 1) > RATIO_TOLERANCE:
        count(skipped, "rows whose algbw is not size / time")
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
    config: dict[str, Any] = table if isinstance(table := document.get("config"), dict) else {}
    threads, per_thread = finite(config.get("nthreads")), finite(config.get("ngpus"))
    if threads and per_thread and 1 <= threads * per_thread <= 10**6:
        draft.threads = int(threads * per_thread)
    repeats = finite(config.get("iterations"))
    draft.repeats = int(repeats) if repeats and 1 <= repeats < 10**9 else 1
    arguments = document.get("args")
    if isinstance(arguments, list):
        names = (_PROGRAM.search(f" {argument} ") for argument in arguments[:64] if isinstance(argument, str))
        draft.program = next((name[1] for name in names if name and name[1] in PROGRAMS), None)
    devices = config.get("devices", document.get("devices"))
    for entry in devices if isinstance(devices, list) else []:
        numbers = [finite(entry.get(key)) for key in ("rank", "device")] if isinstance(entry, dict) else [None]
        if any(number is None or not 0 <= number < 10**6 for number in numbers):
            count(skipped, "devices without a number")
            continue
        rank, device = (int(number) for number in numbers if number is not None)
        texts = [str(entry.get(key, "")) for key in ("hostname", "device_hex", "device_info")]
        draft.ranks[rank] = (texts[0], device, texts[1], texts[2])
        draft.groups.add(int(finite(entry.get("group")) or 0))
    for row in document["results"]:
        if not isinstance(row, dict) or (size := finite(row.get("size"))) is None or not 0 <= size < 10**15:
            count(skipped, "results without a size")
            continue
        draft.reductions.update({row["redop"]} & set(REDUCTIONS) if isinstance(row.get("redop"), str) else ())
        for key, in_place in (("out_of_place", False), ("in_place", True)):
            half = row.get(key)
            if isinstance(half, dict):
                draft.cpu_time = draft.cpu_time or "cpu_time" in half
                numbers = [finite(half.get(name)) for name in ("time", "alg_bw", "bus_bw", "nwrong")]
                spreads = stated if isinstance(stated := row.get(f"{key}_per_iter"), dict) else {}
                average, deviation = finite(spreads.get("avg_us")), finite(spreads.get("stdev_us"))
                spread = None if not average or average < 0 or deviation is None or deviation < 0 else deviation / average
                _add_row(draft, int(size), numbers, spread, in_place, skipped)
    return [draft]


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
    hosts, names = _hosts(draft, source, ranks, notes)
    n = sum(map(len, hosts))
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
        count(skipped, "rows of sendrecv over more than 2 ranks", len(draft.rows))
        return None
    rows = tuple(row for row, _, _ in draft.rows)
    return NcclTest(operation=operation, hosts=hosts, devices=names, rows=rows, repeats=max(1, draft.repeats))


def _hosts(
    draft: _Draft, source: SourceFile, ranks: Sequence[int] | None, notes: list[str]
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    devices = list(draft.ranks.values())
    names = tuple(dict.fromkeys(shown(name) for _, _, _, name in devices if name))
    by_host: dict[str, list[tuple[int, str]]] = {}
    for host, device, bus, _ in devices:
        by_host.setdefault(host, []).append((device, bus))
    if len(draft.groups) > 1:
        raise ImportedFileError(
            f"{source.path} holds {len(draft.groups)} groups at once (NCCL_TESTS_SPLIT); measure one group alone"
        )
    if ranks is not None:
        if len(by_host) > 1 or len(set(ranks)) != len(ranks) or (len(devices) > 1 and len(ranks) != len(devices)):
            raise ImportedFileError(
                f"ranks = {list(ranks)}: {source.path} lists {len(devices)} devices on {len(by_host)} host(s); name each "
                "device of one host once"
            )
        return (tuple(sorted(ranks)),), names
    if len(devices) <= 1 and (draft.threads or 0) > 1:  # JSON of a build without MPI lists the first device alone
        first = devices[0][1] if devices else 0
        return (tuple(range(first, first + min(draft.threads or 0, 4096))),), names
    if not devices:
        raise ImportedFileError(
            f"{source.path} does not list its devices (`#  Rank  0 ... device  0`); give them: --ranks 0,1,2,3"
        )
    hosts = []
    for here in by_host.values():
        numbers, buses = [device for device, _ in here], [bus for _, bus in here]
        if len(set(numbers)) < len(numbers):
            if len(set(buses)) < len(buses):
                raise ImportedFileError(
                    f"{source.path} lists a device twice ({listed(buses)}); give the devices: --ranks 0,1,2,3"
                )
            note = "every process saw its device as number 0: devices are numbered in the order of their PCI bus"
            notes += [note] if note not in notes else []
            numbers = [sorted(buses).index(bus) for bus in buses]
        hosts.append(tuple(sorted(numbers)))
    return tuple(hosts), names


def _operation(
    draft: _Draft, source: SourceFile, collective: str | None, n: int, ratio: float | None, notes: list[str]
) -> str | None:
    if draft.program is not None:
        operation = PROGRAMS[draft.program]
        if operation is None:
            notes.append(f"{draft.program}_perf: no plan of parsim uses this operation")
        elif collective not in (None, operation):
            notes.append(f"{draft.program}_perf is {operation}, not {collective}")
        return operation
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


PREFIX = "nccl-tests-"
FIT = "fit-nccl-tests"
MIN_SIZES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedGroup:
    """What one operation over one group brought.

    Attributes: points: timings. sizes: distinct. fit_error: median of |fit - measured| / measured. error_before: of the profile
        as it was (None: it had no price). errors are signed medians with `bias_before`.
    """

    operation: str
    group: tuple[int, ...]
    points: int
    min_size_bytes: int
    max_size_bytes: int
    ranges: int
    fit_error: float
    error_before: float | None
    bias_before: float | None


def with_measured(profile: Profile, log: NcclLog, digest: str, where: str) -> tuple[Profile, tuple[FittedGroup, ...]]:
    """The profile with a log's points and the fits to them.

    Points of a file that was imported before are replaced; those of other files stay, and one fit covers them all.

    Args: profile: of the machine that was measured. log: of `read_nccl_tests`. digest: names the file's content. where: name of
        the file, without its folder.
    Raises: ImportedFileError: the profile is not of NCCL, lacks a device, or there are fewer than two ranks or sizes.
    """
    communication = profile.communication
    if communication.backend != "nccl":
        raise ImportedFileError(
            f"profile {profile.name} has communication.backend = {communication.backend!r}, and nccl-tests measures NCCL; "
            "import into the profile of the GPUs"
        )
    for test in log.tests:
        if len(test.group) < 2:
            raise ImportedFileError(
                f"{test.operation} was measured on one rank, which communicates with no other; measure on two GPUs (-g 2)"
            )
        if lost := sorted(set(test.group) - {entry.index for entry in profile.devices}):
            raise ImportedFileError(
                f"the file was measured on devices {list(test.group)}, and profile {profile.name} has no device {lost[0]}; "
                "take a profile of that machine, or map them to devices: --ranks 0,1,2,3"
            )
    key = PREFIX + digest
    points = [
        *(point for point in communication.points if point.source != key),
        *(
            CollectivePoint(
                operation=test.operation,
                group=list(test.group),
                size_bytes=row.size_bytes,
                seconds=float(f"{row.seconds:.6g}"),
                spread=row.spread,
                repeats=test.repeats,
                source=key,
            )
            for test in log.tests
            for row in test.rows
        ),
    ]
    imported = [point for point in points if point.source.startswith(PREFIX)]
    by_group = communication.link_model is not None
    try:
        fits = fits_of_points(imported, by_group=by_group, source=FIT)
    except ProfileError as error:
        raise ImportedFileError(f"{where}: {error} (-b and -e of nccl-tests)") from error
    tests = _merged(log.tests)
    groups = tuple(_compared(profile, test, fits, by_group) for test in tests)
    if any(group.error_before is not None and group.fit_error > group.error_before for group in groups):
        fits = fits_of_points(imported, by_group=by_group, source=FIT, closest=True)  # timings that jump from size to size
        groups = tuple(_compared(profile, test, fits, by_group) for test in tests)
    replaced = {(fit.operation, fit.group_size, _sorted(fit)) for fit in fits}
    others = [fit for fit in communication.fits if (fit.operation, fit.group_size, _sorted(fit)) not in replaced]
    gpus = ", ".join(dict.fromkeys(name for test in log.tests for name in test.devices)) or "devices not named"
    sources = dict(profile.sources) | {
        key: SourceEntry(kind="measurement", text=f"nccl-tests, file {where}, {gpus}"),
        FIT: SourceEntry(kind="derived", text="piecewise lines fitted to all imported points of nccl-tests"),
    }
    made = communication.model_copy(update={"points": points, "fits": [*others, *fits]})
    return profile.model_copy(update={"communication": made, "sources": sources}), groups


def _sorted(fit: CollectiveFit) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(sorted(group)) for group in fit.groups))


def _merged(tests: Sequence[NcclTest]) -> list[NcclTest]:
    merged: dict[tuple[str, tuple[tuple[int, ...], ...]], NcclTest] = {}
    for test in tests:
        key = (test.operation, test.hosts)
        merged[key] = replace(test, rows=(*merged[key].rows, *test.rows)) if key in merged else test
    return list(merged.values())


def _compared(profile: Profile, test: NcclTest, fits: Sequence[CollectiveFit], by_group: bool) -> FittedGroup:
    fit = next(
        fit
        for fit in fits
        if fit.operation == test.operation
        and fit.group_size == len(test.group)
        and (not by_group or fit.groups == [list(test.group)])
    )
    errors = [abs(regimes_s(fit.regimes, row.size_bytes) / row.seconds - 1) for row in test.rows]
    before = []
    try:
        cluster = cluster_from_profile(profile)
        ranks = tuple(place for place, device in enumerate(cluster.devices) if device.index in test.group)
        for row in test.rows:
            if test.operation in COLLECTIVE_KINDS:
                work = Collective(operation=test.operation, group=ranks, size_bytes=row.size_bytes)
                price = estimate_collective(work, cluster)
            else:
                transfer = SendRecv(source=ranks[0], destination=ranks[1], size_bytes=row.size_bytes)
                price = estimate_send_recv(transfer, cluster)
            before.append(price.median_s / row.seconds - 1)
    except (CostError, ProfileError):
        before = []  # the profile as it was has no price
    sizes = [row.size_bytes for row in test.rows]
    return FittedGroup(
        operation=test.operation,
        group=test.group,
        points=len(test.rows),
        min_size_bytes=min(sizes),
        max_size_bytes=max(sizes),
        ranges=len(fit.regimes),
        fit_error=median(errors),
        error_before=median(abs(error) for error in before) if before else None,
        bias_before=median(before) if before else None,
    )


def _reading(source: SourceFile, *, collective: str | None = None, ranks: Sequence[int] | None = None) -> MachineReading:
    return reading_of(read_nccl_tests(source, collective=collective, ranks=ranks), source)


def reading_of(log: NcclLog, source: SourceFile) -> MachineReading:
    """What timed collectives say of a machine, before the profile is known that they change.

    Args: log: of this or of another benchmark. source: its file.
    """
    inside = tuple(test for test in log.tests if len(test.hosts) == 1)
    left_out = [
        f"{test.operation} over {len(test.hosts)} hosts is left out: cut it into a file of its own, which calibrates a network"
        for test in (_merged(log.tests) if inside else ())
        if len(test.hosts) > 1
    ]
    return MachineReading(
        devices=max(max(devices) for test in log.tests for devices in test.hosts) + 1,
        names=tuple(name for test in log.tests for name in test.devices),
        change=partial(_changed, log=replace(log, tests=inside), source=source) if inside else None,
        between=None if inside else partial(_network_changed, log=log, source=source),
        skipped=log.skipped,
        notes=(*log.notes, *left_out),
    )


def _network_changed(
    profile: Profile, machine: str, network: Network | None, *, log: NcclLog, source: SourceFile
) -> MachineUpdate[Network]:
    """The network (None: the nearest that ships), fitted to all that was measured of it.

    Raises: ImportedFileError: nodes of which the profile has no device, or fewer than two sizes.
    """
    where, key = shown(source.path.name), PREFIX + source.digest
    own = [
        NetworkPoint(
            operation=test.operation,
            machine=machine,
            hosts=[list(devices) for devices in test.hosts],
            size_bytes=row.size_bytes,
            seconds=float(f"{row.seconds:.6g}"),
            source=key,
        )
        for test in log.tests
        for row in test.rows
    ]
    if len({point.size_bytes for point in own}) < MIN_SIZES:
        raise ImportedFileError(f"{where}: one size tells no latency from bandwidth; measure more (-b and -e of nccl-tests)")
    try:
        machines = {name: load_profile(name) for name in {point.machine for point in network.points}} if network else {}
        machines[machine] = profile
        base = network or nearest_network([load_network(name) for name in shipped_networks()], own, machines)
        gpus = ", ".join(dict.fromkeys(name for test in log.tests for name in test.devices)) or "devices not named"
        sources = base.sources | {
            key: SourceEntry(kind="measurement", text=f"nccl-tests, file {where}, {gpus}"),
            FIT: SourceEntry(kind="derived", text="fitted to all imported points of nccl-tests between nodes"),
        }
        kept = [point for point in base.points if point.source != key]
        before = log_errors(base, own, machines)
        made = fitted_network(base.model_copy(update={"sources": sources}), [*kept, *own], machines, FIT)
        after = log_errors(made, own, machines)
    except (CostError, ProfileError) as error:
        raise ImportedFileError(f"{where}: {error}") from error
    said = "Fitted to nccl-tests between nodes."
    described = base.description if base.description.endswith(said) else f"{base.description} {said}"
    made = made.model_copy(update={"name": base.name, "description": described})
    hosts = {_shape_of(test) for test in log.tests}
    summary = f"{len(own)} collectives between nodes of {machine} ({listed(sorted(hosts))} devices)"
    errors = [median(abs(math.expm1(error)) for error in one) for one in (before, after)]
    return MachineUpdate(
        made=made,
        summary=f"{summary}; give --into NETWORK.json to use them",
        written=f"{summary}, on {base.name}, fitted and used from now on",
        document={
            "base": base.name,
            "points": len(own),
            "hosts": [[len(devices) for devices in test.hosts] for test in log.tests],
            "error_before": errors[0],
            "fit_error": errors[1],
            "measured_sigma": None if made.measured_sigma is None else made.measured_sigma.value,
        },
        warnings=()
        if network
        else (f"the new network starts from {base.name}, whose cards and switches stay; --network names another",),
        tables=(_network_table(log, base, made, machines, machine),),
    )


def _shape_of(test: NcclTest) -> str:
    """Nodes and their devices: "2 x 8"."""
    sizes = sorted({len(devices) for devices in test.hosts})
    return f"{len(test.hosts)} x {' or '.join(map(str, sizes))}"


def _network_table(log: NcclLog, base: Network, made: Network, machines: Mapping[str, Profile], machine: str) -> ReportTable:
    rows = []
    for test in _merged(log.tests):
        hosts = [list(devices) for devices in test.hosts]
        points = [
            point for point in made.points if (point.operation, point.machine, point.hosts) == (test.operation, machine, hosts)
        ]
        errors = [[math.expm1(error) for error in log_errors(network, points, machines)] for network in (made, base)]
        sizes = [row.size_bytes for row in test.rows]
        rows.append(
            (
                test.operation,
                _shape_of(test),
                str(len(test.rows)),
                f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}",
                *(format_percent(median(map(abs, one))) for one in errors),
                format_percent(median(errors[1])),
            )
        )
    return ReportTable(
        title="Measured collectives between nodes",
        columns=columns_of(
            *("collective", "devices", "points", "sizes", "error", "error before", "bias before"),
            words=("collective", "devices", "sizes"),
        ),
        rows=tuple(rows),
        notes=("Errors are medians over sizes of |predicted - measured| / measured; bias is signed.",),
    )


def _changed(profile: Profile, *, log: NcclLog, source: SourceFile) -> MachineUpdate[Profile]:
    made, groups = with_measured(profile, log, source.digest, shown(source.path.name))
    summary = f"{sum(group.points for group in groups)} measured collectives of {len(groups)} group(s)"
    return MachineUpdate(
        made=made,
        summary=f"{summary}; give --into PROFILE.json to use them",
        written=f"{summary} in {profile.name}, fitted and used from now on",
        document={"groups": [asdict(group) | {"group": list(group.group)} for group in groups]},
        tables=(_group_table(groups),),
    )


def _group_table(groups: Sequence[FittedGroup]) -> ReportTable:
    rows = [
        (
            group.operation,
            ",".join(map(str, group.group)),
            str(group.points),
            f"{format_bytes(group.min_size_bytes)} to {format_bytes(group.max_size_bytes)}",
            format_percent(group.fit_error),
            "no price" if group.error_before is None else format_percent(group.error_before),
            "–" if group.bias_before is None else format_percent(group.bias_before),
        )
        for group in groups
    ]
    return ReportTable(
        title="Measured collectives",
        columns=columns_of(
            *("collective", "devices", "points", "sizes", "error of the fit", "error before", "bias before"),
            words=("collective", "sizes"),
            wraps="devices",
        ),
        rows=tuple(rows),
        notes=("Errors are medians of |predicted - measured| / measured; bias is signed. Before: the profile without them.",),
    )


def _is_nccl_tests(source: SourceFile) -> bool:
    if source.begins("{"):
        return b'"results"' in source.data and b'"bus_bw"' in source.data
    return source.is_text and bool(_SNIFFED_ROW.search(source.head))


FORMATS = {
    "nccl-tests": FileFormat(
        layouts="text before and after 2.13, prefixes of ranks, several hosts, JSON",
        refuses="rows that came out wrong, one by one, with the reason",
        what="the output of nccl-tests, text or JSON",
        reads="machine",
        sniff=_is_nccl_tests,
        read=_reading,
        options=("collective", "ranks"),
    )
}
