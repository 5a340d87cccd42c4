"""Traces of the PyTorch profiler (Kineto, Chrome trace JSON): what ran on every stream, and which operator launched it.

A trace of a GPU holds kernels and copies with the device's times; the host's launches carry the same `correlation`. A trace of
a CPU holds operators alone: the outermost ones of each thread are what it computed. Steps are the `ProfilerStep#N` ranges of
`profiler.step()`.

Times in the file are microseconds. An event without a name, a finite start or a length is left out and counted.

Source: github pytorch/kineto, libkineto/src/output_json.cpp (keys of the events); traces written by torch 2.13 here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parsim.errors import ImportedFileError
from parsim.importers.operator_flop import flop_of, is_counted
from parsim.importers.source_file import SourceFile, finite, shown
from parsim.numeric import Floats, Ints

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime")
KINDS = ("compute", "communication", "copy")
COMMUNICATION = re.compile(r"nccl|rccl|gloo:|^c10d::|^nccl:|nvshmem|AllReduce.*Kernel", re.IGNORECASE)
LOADING = re.compile(r"DataLoader", re.IGNORECASE)
STEP = re.compile(r"ProfilerStep\s?#\s?\d{1,12}")
EXPECTED = 'a trace of torch.profiler (`prof.export_chrome_trace("trace.json.gz")`), with a list `traceEvents`'
MOST_MICROSECONDS = 1e14
"""Of a start, from the oldest: three years."""
LONGEST_NAME = 400
NUMBER_TYPES: Mapping[str, tuple[str, ...]] = {
    "float": ("fp32",),
    "double": ("fp64",),
    "c10::BFloat16": ("bf16", "amp_bf16"),
    "c10::Half": ("amp_fp16", "fp16", "bf16"),
}
"""Names of types in a trace, and the precisions of a profile that have such arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceActivities:
    """What ran, in order of its start; times in seconds from the beginning of the first step.

    Attributes:
        names: distinct names; name: int64 [n] into them. kind: int64 [n] into KINDS.
        streams: texts ("stream 7", "thread 12"); stream: int64 [n].
        start_s, end_s: float64 [n]. launched_s: end of the host's launch (NaN: not known).
        flop: float64 [n], of the operator behind it, shared among its kernels by their time (0: none counted).
    """

    names: tuple[str, ...]
    name: Ints
    kind: Ints
    streams: tuple[str, ...]
    stream: Ints
    start_s: Floats
    end_s: Floats
    launched_s: Floats
    flop: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KinetoTrace:
    """One rank's trace.

    Attributes:
        on_gpu: activities are those of a GPU. device: its name ("" for a CPU). rank, world_size: of the job, if it says so.
        window_s: seconds of the recorded steps. steps: how many. step_lengths_s: of each, as the host saw it.
        shapes: whether shapes were recorded. number_type: in which most arithmetic was done, as torch names it ("" if unknown).
        loading: [m, 2] start and end of what the host did to load data.
        skipped: why events were left out, and how many.
    """

    activities: TraceActivities
    on_gpu: bool
    device: str
    rank: int
    world_size: int
    window_s: float
    steps: int
    step_lengths_s: tuple[float, ...]
    shapes: bool
    number_type: str
    loading: Floats
    skipped: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def step_s(self) -> float:
        return self.window_s / self.steps


@dataclass(slots=True)
class _Event:
    """One complete event, in microseconds."""

    name: str
    category: str
    thread: str
    start: float
    end: float
    args: Mapping[str, Any]
    flop: float = 0.0
    owner: int = -1


def read_kineto(source: SourceFile, *, steps: int | None = None) -> KinetoTrace:
    """Read a trace.

    Args:
        source: the file. steps: how many it holds, where it has no ProfilerStep ranges (None: one).

    Raises:
        ImportedFileError: it is not a trace, it holds no activity, or no activity lies in its steps.
    """
    return trace_of(source.json("a trace"), str(source.path), steps)


def trace_of(document: object, where: str, steps: int | None = None) -> KinetoTrace:
    """The activities of trace events, as `read_kineto`.

    Args:
        document: a list of events, or a table with `traceEvents`. where: the file, for messages. steps: as there.

    Raises:
        ImportedFileError: as there.
    """
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise ImportedFileError(f"{where} has no list `traceEvents`; expected {EXPECTED}")
    head: dict[str, Any] = document if isinstance(document, dict) else {}
    skipped: dict[str, int] = {}
    found = _complete_events(events, skipped)
    marks = sorted(
        {(event.start, event.end) for event in found if event.category == "user_annotation" and STEP.fullmatch(event.name)}
    )
    device_events = [event for event in found if event.category in ON_DEVICE]
    operators = [event for event in found if event.category == "cpu_op"]
    chosen = device_events or _on_host(found, operators)
    if not chosen:
        raise ImportedFileError(
            f"{where} holds {len(events)} events and none of them is a kernel, a copy or an operator; expected {EXPECTED}"
        )
    notes: list[str] = []
    begin, end, count = _window(chosen, marks, steps, notes)
    _count_flop(operators)
    kept = sorted(
        (event for event in chosen if event.end > begin and event.start < end), key=lambda event: (event.start, event.end)
    )
    if not kept:
        raise ImportedFileError(
            f"{where}: nothing ran within its {count} steps; record the steps with the activities of the GPU"
        )
    if len(kept) < len(chosen):
        skipped["activities outside the steps"] = len(chosen) - len(kept)
    info = head.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world = finite(info.get("rank")), finite(info.get("world_size"))
    loading = sorted((event.start, event.end) for event in found if LOADING.search(event.name))
    return KinetoTrace(
        activities=_activities(kept, found, operators, begin, end, bool(device_events)),
        on_gpu=bool(device_events),
        device=_device_name(head),
        rank=int(rank) if rank is not None and 0 <= rank < 1e6 else 0,
        world_size=int(world) if world is not None and 1 <= world < 1e6 else 1,
        window_s=(end - begin) * 1e-6,
        steps=count,
        step_lengths_s=tuple((last - first) * 1e-6 for first, last in marks),
        shapes=any("Input Dims" in event.args or "Input dims" in event.args for event in operators),
        number_type=_number_type(operators),
        loading=(np.array(loading, dtype=np.float64).reshape(-1, 2) - begin) * 1e-6,
        skipped=skipped,
        notes=tuple(notes),
    )


def _complete_events(events: list[Any], skipped: dict[str, int]) -> list[_Event]:
    found: list[_Event] = []
    for event in events:
        if not isinstance(event, dict):
            _count(skipped, "events that are no table")
            continue
        if event.get("ph") != "X":
            continue
        start, length, name = finite(event.get("ts")), finite(event.get("dur")), event.get("name")
        category = event.get("cat")
        if start is None or length is None or length < 0 or not isinstance(name, str) or not isinstance(category, str):
            _count(skipped, "events without a name, a start or a length")
            continue
        if abs(start) > 1e18 or length > MOST_MICROSECONDS:
            _count(skipped, "events at impossible times")
            continue
        args = event.get("args")
        place = f"{shown(event.get('pid'))}/{shown(event.get('tid'))}"
        arguments = args if isinstance(args, dict) else {}
        found.append(_Event(name[:LONGEST_NAME], category.lower(), place, start, start + length, arguments))
    if found:
        oldest = min(event.start for event in found)
        late = [event for event in found if event.start - oldest > MOST_MICROSECONDS]
        if late:
            skipped["events at impossible times"] = skipped.get("events at impossible times", 0) + len(late)
            found = [event for event in found if event.start - oldest <= MOST_MICROSECONDS]
    return found


def _on_host(found: list[_Event], operators: list[_Event]) -> list[_Event]:
    """What a CPU ran: the outermost operators of each thread, and communication wherever it was recorded."""
    outermost: list[_Event] = []
    reach: dict[str, float] = {}
    for event in sorted(operators, key=lambda event: (event.thread, event.start, -event.end)):
        if event.start >= reach.get(event.thread, -np.inf) and not COMMUNICATION.search(event.name):
            outermost.append(event)
            reach[event.thread] = event.end
    sent = [event for event in found if event.category != "python_function" and COMMUNICATION.search(event.name)]
    return outermost + sent if outermost else []


def _window(
    chosen: list[_Event], marks: list[tuple[float, float]], steps: int | None, notes: list[str]
) -> tuple[float, float, int]:
    """(begin, end, number of steps): from the first step's start to the end of the last one's activities."""
    last = max(event.end for event in chosen)
    if marks:
        begin, end = marks[0][0], max(mark[1] for mark in marks)
        inside = [event.end for event in chosen if begin <= event.start < end]
        return begin, max([end, *inside]), len(marks)
    begin = min(event.start for event in chosen)
    if steps is None:
        notes.append(
            "the trace has no ProfilerStep ranges: all of it counts as one step; call profiler.step(), or give --steps"
        )
    return begin, max(last, begin + 1e-3), max(1, steps or 1)


def _count_flop(operators: list[_Event]) -> None:
    """Arithmetic of the outermost counted operator of each nest; those inside it name it as their owner."""
    stacks: dict[str, list[int]] = {}
    order = sorted(range(len(operators)), key=lambda i: (operators[i].thread, operators[i].start, -operators[i].end))
    for index in order:
        event = operators[index]
        stack = stacks.setdefault(event.thread, [])
        while stack and operators[stack[-1]].end <= event.start:
            stack.pop()
        outer = operators[stack[-1]].owner if stack else -1
        event.owner = outer
        if outer < 0 and is_counted(event.name):
            flop = flop_of(event.name, event.args)
            if flop is not None:
                event.flop, event.owner = flop, index
        stack.append(index)


def _number_type(operators: list[_Event]) -> str:
    """The type of the first input, weighted by arithmetic."""
    found: dict[str, float] = {}
    for event in operators:
        types = event.args.get("Input type")
        if event.flop > 0 and isinstance(types, list):
            first = next((shown(name) for name in types if isinstance(name, str) and name in NUMBER_TYPES), "")
            found[first] = found.get(first, 0.0) + event.flop
    return max(found, key=lambda name: found[name]) if found else ""


def _activities(
    kept: list[_Event], found: list[_Event], operators: list[_Event], begin: float, end: float, on_gpu: bool
) -> TraceActivities:
    names: dict[str, int] = {}
    streams: dict[str, int] = {}
    n = len(kept)
    name, kind, stream = (np.zeros(n, dtype=np.int64) for _ in range(3))
    start, stop, launched = (np.full(n, np.nan) for _ in range(3))
    launches = _launch_ends(found) if on_gpu else {}
    for row, event in enumerate(kept):
        name[row] = names.setdefault(shown(event.name), len(names))
        kind[row] = _kind(event)
        label = (
            f"stream {shown(event.args.get('stream', event.thread))}" if on_gpu else f"thread {event.thread.rpartition('/')[2]}"
        )
        stream[row] = streams.setdefault(label, len(streams))
        start[row], stop[row] = max(event.start, begin), min(event.end, end)
        launched[row] = launches.get(_key(event.args.get("correlation")), np.nan)
    flop = _device_flop(kept, operators) if on_gpu else _host_flop(kept, operators)
    return TraceActivities(
        names=tuple(names),
        name=name,
        kind=kind,
        streams=tuple(streams),
        stream=stream,
        start_s=(start - begin) * 1e-6,
        end_s=(stop - begin) * 1e-6,
        launched_s=(launched - begin) * 1e-6,
        flop=flop,
    )


def _kind(event: _Event) -> int:
    if COMMUNICATION.search(event.name):
        return KINDS.index("communication")
    copies = event.category == "gpu_memcpy"
    return KINDS.index("copy" if copies else "compute")


def _key(value: object) -> str:
    """A correlation or an external id as a key: numbers and texts of numbers are one."""
    return str(value) if isinstance(value, int | str) else ""


def _launch_ends(found: list[_Event]) -> dict[str, float]:
    return {key: event.end for event in found if event.category in LAUNCHES and (key := _key(event.args.get("correlation")))}


def _device_flop(kept: list[_Event], operators: list[_Event]) -> Floats:
    """The arithmetic of a counted operator, shared among the kernels it launched by their time."""
    owners = {key: event.owner for event in operators if (key := _key(event.args.get("External id"))) and event.owner >= 0}
    of_row = [
        owners.get(_key(event.args.get("External id", event.args.get("external id"))), -1) if event.category == "kernel" else -1
        for event in kept
    ]
    seconds: dict[int, float] = {}
    for event, owner in zip(kept, of_row, strict=True):
        if owner >= 0:
            seconds[owner] = seconds.get(owner, 0.0) + (event.end - event.start)
    return np.array(
        [
            operators[owner].flop * (event.end - event.start) / seconds[owner] if owner >= 0 and seconds[owner] > 0 else 0.0
            for event, owner in zip(kept, of_row, strict=True)
        ],
        dtype=np.float64,
    )


def _host_flop(kept: list[_Event], operators: list[_Event]) -> Floats:
    """All arithmetic of the counted operators inside each outermost one."""
    places: dict[str, list[tuple[float, float, int]]] = {}
    for row, event in enumerate(kept):
        places.setdefault(event.thread, []).append((event.start, event.end, row))
    flop = np.zeros(len(kept))
    for event in operators:
        if event.flop <= 0:
            continue
        rows = places.get(event.thread, [])
        low, high = 0, len(rows)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if rows[middle][0] <= event.start else (low, middle)
        if low and rows[low - 1][1] >= event.end:
            flop[rows[low - 1][2]] += event.flop
    return flop


def _device_name(head: Mapping[str, Any]) -> str:
    devices = head.get("deviceProperties")
    for entry in devices if isinstance(devices, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            return shown(entry["name"])
    return ""


def _count(skipped: dict[str, int], why: str) -> None:
    skipped[why] = skipped.get(why, 0) + 1
