"""Timelines as a trace event JSON that Perfetto and chrome://tracing open.

One process per timeline and rank, one thread per stream, complete ("X") events in microseconds; an arrow leads from the
sending to the receiving span of a transfer. Times are rounded to whole nanoseconds, starts and ends alike, so that spans
that touch still do. Spans of one stream that overlap (clocks of several hosts) are moved to an extra thread each, as
the viewers cannot draw them on one.

Used of the trace event format: ph, ts, dur, pid, tid, name, cat, args; metadata process_name, process_sort_index,
thread_name, thread_sort_index; flow events s and f with bp = e. The test of this module states the schema.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parsim.engines.static import CompiledGraph
from parsim.errors import GraphError
from parsim.files import write_text_atomically
from parsim.numeric import Floats, Ints
from parsim.program.passes.gradients import sums_norm
from parsim.program.taskgraph import COMPUTE, FROM_HOST, HOST, HOST_CORES, TO_HOST, Task, TaskGraph, parse_resource, work_text
from parsim.timeline import Span, Timeline
from parsim.work import (
    ClipGradients,
    Collective,
    Compute,
    HostCopy,
    HostUpdate,
    LoadBatch,
    Mix,
    OptimizerStep,
    SendRecv,
    Work,
    kind_of,
)


def task_label(task: Task) -> str:
    """Short name of a task for people: `F layer1.0 mb2`, `F h.0 attention mb2`, `all_reduce bucket 3`,
    `send_recv layer2.1:0 mb0 1>2`.
    """
    origin = task.origin
    microbatch = "" if origin.microbatch is None else f" mb{origin.microbatch}"
    match task.work:
        case Compute() as work:
            part = f" {work.part}" if work.part else ""
            return f"{work.phase.short} {work.component}{part}{microbatch}"
        case OptimizerStep() as work:
            return f"optimizer {work.update_group}" if work.update_group else "optimizer"
        case ClipGradients() as work:
            return f"clip {work.part}"
        case SendRecv() as work:
            value = f" {origin.value}" if origin.value else ""
            return f"send_recv{value}{microbatch} {work.source}>{work.destination}"
        case Collective() as work:
            bucket = "" if origin.bucket is None else f" bucket {origin.bucket}"
            inside = "" if origin.component is None else f" {origin.component}{microbatch}"
            inside += " gradient norm" if sums_norm(task) else ""
            return f"{work.operation}{bucket}{inside}"
        case LoadBatch():
            return f"load{microbatch}"
        case Mix() as work:
            return f"mix of {work.copies}"
        case HostCopy() as work:
            bucket = "" if origin.bucket is None else f" bucket {origin.bucket}"
            component = "" if origin.component is None else f" {origin.component}{microbatch}"
            return f"copy {'to' if work.to_host else 'from'} host{bucket}{component}"
        case HostUpdate():
            return f"host update bucket {origin.bucket}"


def chrome_trace(graph: TaskGraph, timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Trace of one or more timelines of `graph`, e.g. {"predicted": ..., "measured": ...}.

    Returns {"traceEvents": [...], "displayTimeUnit": "ms"}; metadata first, then events sorted by time.
    Raises GraphError if a timeline names a task that the graph has not.
    """
    metadata: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for number, (name, timeline) in enumerate(timelines.items()):
        spans: dict[int, dict[str, list[Span]]] = {}
        for span in timeline:
            if span.task >= len(graph.tasks):
                raise GraphError(
                    f"timeline {name!r} names task {span.task}, but the graph has {len(graph.tasks)} tasks; "
                    "give timelines of this graph"
                )
            resource = parse_resource(span.resource)
            spans.setdefault(resource.rank, {}).setdefault(resource.stream, []).append(span)
        for rank in sorted(spans):
            pid = number * graph.world_size + rank + 1
            place = rank * len(timelines) + number
            metadata += _metadata("process", pid, 0, f"rank {rank} · {name}", place)
            thread = 0
            for stream in sorted(spans[rank], key=stream_order):
                for lane, lane_spans in enumerate(_lanes(spans[rank][stream])):
                    thread += 1
                    label = stream if lane == 0 else f"{stream} (overlapping {lane})"
                    metadata += _metadata("thread", pid, thread, label, thread)
                    for span in lane_spans:
                        events += _events(graph.tasks[span.task], span, pid, thread, number * len(graph.tasks))
    events.sort(key=lambda event: (event["ts"], event["pid"], event["tid"], event.get("dur", 0.0), event["ph"] != "X"))
    return {"traceEvents": metadata + events, "displayTimeUnit": "ms"}


def save_chrome_trace(path: Path, graph: TaskGraph, timelines: Mapping[str, Timeline]) -> None:
    """Write `chrome_trace` as JSON, atomically."""
    write_text_atomically(path, json.dumps(chrome_trace(graph, timelines), separators=(",", ":")))


def stream_order(stream: str) -> tuple[int, str]:
    """Sort key of a rank's streams for people: compute, host, collectives, transfers."""
    first = {COMPUTE: 0, HOST: 1}.get(stream)
    return (first, stream) if first is not None else (3 if stream.startswith("pp") else 2, stream)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """The fewest lists of spans in which none overlaps another; one list if the stream kept its order."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        for lane in lanes:
            if _nanoseconds(lane[-1].end_s) <= _nanoseconds(span.start_s):
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


def _metadata(what: str, pid: int, thread: int, name: str, place: int) -> list[dict[str, Any]]:
    common = {"ph": "M", "pid": pid, "tid": thread}
    return [
        {**common, "name": f"{what}_name", "args": {"name": name}},
        {**common, "name": f"{what}_sort_index", "args": {"sort_index": place}},
    ]


def _events(task: Task, span: Span, pid: int, thread: int, first_flow: int) -> list[dict[str, Any]]:
    start, end = _nanoseconds(span.start_s), _nanoseconds(span.end_s)
    origin = {name: value for name, value in asdict(task.origin).items() if value is not None}
    size = getattr(task.work, "size_bytes", None)
    samples = getattr(task.work, "samples", None)
    args = {"task": task.index, "work": work_text(task.work), **origin}
    args |= {} if size is None else {"size_bytes": size}
    args |= {} if samples is None else {"samples": samples}
    common = {"pid": pid, "tid": thread, "cat": kind_of(task.work)}
    events: list[dict[str, Any]] = [
        {**common, "ph": "X", "name": task_label(task), "ts": start / 1e3, "dur": (end - start) / 1e3, "args": args}
    ]
    if isinstance(task.work, SendRecv):
        flow = {**common, "name": "transfer", "id": first_flow + task.index}
        if parse_resource(span.resource).rank == task.work.source:
            events.append({**flow, "ph": "s", "ts": start / 1e3})
        else:
            events.append({**flow, "ph": "f", "bp": "e", "ts": max(start, end - 1) / 1e3})
    return events


# A timeline in a few hundred letters: what a rank does in each of many equal pieces of the step.
#
# A piece has the letter of the kind that takes most of it, if that kind takes at least a quarter of it; else it is idle.
# Letters that repeat are counted: `F12B24.3O` is 12 pieces of forward, 24 of backward, 3 idle, 1 of the optimizer.


PIECES = 300
LEAST_SHARE = 0.25
IDLE = "."
LETTERS = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "R": "recomputation",
    "O": "optimizer",
    "K": "clipping",
    "M": "mixing",
    "C": "collective",
    "S": "transfer",
    "L": "loading",
    "H": "copies to and from the host",
    "U": "updates on the host",
}
"""By letter, what it stands for."""
SKETCH_LANES = {COMPUTE: "computation", HOST: "loading", TO_HOST: "host", FROM_HOST: "host", HOST_CORES: "host"}
"""By stream, the lane that it is drawn in; all others communicate."""


class SketchRow(NamedTuple):
    """One row of a sketch. name: `rank 0 computation`. text: pieces from the start of the step to its end."""

    name: str
    text: str


def sketch(compiled: CompiledGraph, timeline: Timeline, ranks: Sequence[int]) -> tuple[SketchRow, ...]:
    """Up to four lanes per rank: computation, communication, loading and host; a lane in which nothing runs is left out."""
    step_s = timeline.makespan_s
    if not step_s > 0:
        return ()
    letters = np.array([_letter(unit.work) for unit in compiled.columns.units])[compiled.columns.unit[timeline.task]]
    places = [parse_resource(text) for text in timeline.resources]
    sketched = []
    for rank in ranks:
        for name in ("computation", "communication", "loading", "host"):
            lane = [
                number
                for number, place in enumerate(places)
                if place.rank == rank and SKETCH_LANES.get(place.stream, "communication") == name
            ]
            rows = np.flatnonzero(np.isin(timeline.resource, lane))
            if not len(rows):
                continue
            start, end = timeline.start_s[rows] / step_s, timeline.end_s[rows] / step_s
            kinds = sorted(set(letters[rows].tolist()))
            covered = np.array([_covered(start[letters[rows] == kind], end[letters[rows] == kind]) for kind in kinds])
            most, shares = covered.argmax(axis=0), covered.max(axis=0)
            pieces = [kinds[kind] if share >= LEAST_SHARE else IDLE for kind, share in zip(most, shares, strict=True)]
            runs = [(letter, len(list(same))) for letter, same in itertools.groupby(pieces)]
            text = "".join(f"{letter}{count if count > 1 else ''}" for letter, count in runs)
            sketched.append(SketchRow(f"rank {rank} {name}", text))
    return tuple(sketched)


_OTHER_LETTERS: dict[type[Work], str] = {
    OptimizerStep: "O",
    ClipGradients: "K",
    Mix: "M",
    Collective: "C",
    SendRecv: "S",
    LoadBatch: "L",
    HostCopy: "H",
    HostUpdate: "U",
}


def _letter(work: Work) -> str:
    return work.phase.short if isinstance(work, Compute) else _OTHER_LETTERS[type(work)]


def _covered(start: Floats, end: Floats) -> Floats:
    """Share of each piece that spans from `start` to `end` (0 to 1) cover; several at once count several times."""
    edges = np.arange(PIECES + 1) / PIECES
    share: Floats = np.diff(_before(start, edges) - _before(end, edges)) * PIECES
    return share


def _before(times: Floats, edges: Floats) -> Floats:
    """Per edge the sum of (edge - time) over the times before it."""
    ordered = np.sort(times)
    count: Ints = np.searchsorted(ordered, edges)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    total: Floats = count * edges - sums[count]
    return total
