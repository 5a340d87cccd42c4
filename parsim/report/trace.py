"""Timelines as a trace event JSON that Perfetto and chrome://tracing open.

One process per timeline and rank, one thread per stream, complete ("X") events in microseconds; an arrow leads from the
sending to the receiving span of a transfer. Times are rounded to whole nanoseconds, starts and ends alike, so that spans
that touch still do. Spans of one stream that overlap (clocks of several hosts) are moved to an extra thread each, as
the viewers cannot draw them on one.

Used of the trace event format: ph, ts, dur, pid, tid, name, cat, args; metadata process_name, process_sort_index,
thread_name, thread_sort_index; flow events s and f with bp = e. The test of this module states the schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parsim.errors import GraphError
from parsim.files import write_text_atomically
from parsim.program.passes.gradients import sums_norm
from parsim.program.taskgraph import COMPUTE, HOST, Task, TaskGraph, parse_resource, work_text
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
    """The span itself and, for a transfer, its end of the arrow."""
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
