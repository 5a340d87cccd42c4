"""The predicted step as traces in the form of torch.profiler, one file per rank, for Holistic Trace Analysis and its like.

A rank's tasks on its device are kernels on streams, each behind a launch of no length on the host; those of the host are its
operators. Names say to readers what runs: collectives and transfers begin with ncclDevKernel_, copies with Memcpy, loading is
DataLoader. Times are rounded to whole nanoseconds, starts and ends alike.

Sources: facebookresearch/HolisticTraceAnalysis 0.5.0, hta/common/trace_file.py (the rank of a file, found as text), hta/utils/
utils.py (kinds of kernels by name); pytorch/kineto, libkineto/src/output_json.cpp (keys of the events).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parsim.files import write_text_atomically
from parsim.formats.exports import EvaluatedStep, Exported
from parsim.formats.source import FileFormat
from parsim.program.taskgraph import HOST, Task, parse_resource
from parsim.report.trace import stream_order, task_label
from parsim.timeline import Span
from parsim.work import Collective, HostCopy, LoadBatch, Mix, SendRecv

NAME = "Holistic Trace Analysis"
FILE = "rank{rank}.json"
HOST_THREAD, DEVICE_PID = 1, 0


def write_hta(step: EvaluatedStep, folder: Path) -> Exported:
    """Traces rankN.json. Raises ConfigError: more than MOST_RANKS ranks."""
    evaluation, plan = step.of_every_rank(NAME), step.evaluation.result.plan
    timeline = evaluation.timeline if step.measured is None else step.measured
    spans: dict[int, list[tuple[str, Span]]] = {rank: [] for rank in range(plan.world_size)}
    for span in timeline:
        resource = parse_resource(span.resource)
        spans[resource.rank].append((resource.stream, span))
    device = step.problem.cluster.devices[0].type.name
    folder.mkdir(parents=True, exist_ok=True)
    for rank, own in spans.items():
        document = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": plan.world_size},
            "deviceProperties": [{"id": 0, "name": device}],
            "traceEvents": rank_events(own, evaluation.graph.tasks),
        }
        write_text_atomically(folder / FILE.format(rank=rank), json.dumps(document))  # its readers look for '"rank": 3'
    return Exported(
        format="hta",
        file=folder,
        summary=(
            f"{'Measured' if step.measured is not None else 'Predicted'} step of {plan.world_size} ranks as traces of "
            f"torch.profiler: {folder}/{FILE.format(rank='N')}; TraceAnalysis(trace_dir={str(folder)!r})"
        ),
        left_out={
            "shapes": "a kernel stands for a component: it has no operators with shapes behind it",
            "launches": "launches have no length on the host",
            "intervals": "durations are medians",
        },
        found={"ranks": plan.world_size, "spans": len(timeline)},
    )


def rank_events(spans: list[tuple[str, Span]], tasks: tuple[Task, ...]) -> list[dict[str, Any]]:
    """The events of one rank, one step from the start of its first span to the end of its last."""
    streams = {name: 7 + number for number, name in enumerate(sorted({name for name, _ in spans}, key=stream_order))}
    begin = min((_microseconds(span.start_s) for _, span in spans), default=0.0)
    end = max((_microseconds(span.end_s) for _, span in spans), default=0.0)
    mark = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#0", "pid": 1, "tid": HOST_THREAD}
    events: list[dict[str, Any]] = [{**mark, "ts": begin, "dur": round(end - begin, 3), "args": {}}]
    for stream, span in sorted(spans, key=lambda pair: (pair[1].start_s, pair[1].end_s)):
        task = tasks[span.task]
        start, name = _microseconds(span.start_s), kernel_name(task)
        timed = {"ph": "X", "name": name, "ts": start, "dur": round(_microseconds(span.end_s) - start, 3)}
        keys = {"External id": span.task + 1, "correlation": span.task + 1}
        if stream == HOST:
            events.append({**timed, "cat": "cpu_op", "pid": 1, "tid": HOST_THREAD, "args": {"External id": span.task + 1}})
            continue
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": HOST_THREAD, "ts": start, "dur": 0}
        events.append({"ph": "X", **launch, "args": keys})
        kind = "gpu_memcpy" if isinstance(task.work, HostCopy) else "kernel"
        args = {**keys, "device": 0, "stream": streams[stream]}
        events.append({**timed, "cat": kind, "pid": DEVICE_PID, "tid": streams[stream], "args": args})
    return events


def kernel_name(task: Task) -> str:
    """The task's label, behind the word by which readers know its kind."""
    label = task_label(task)
    match task.work:
        case Collective() as work:
            return f"ncclDevKernel_{work.operation.title().replace('_', '')} {label}"
        case SendRecv() | Mix():
            return f"ncclDevKernel_SendRecv {label}"
        case HostCopy() as work:
            return f"Memcpy {'DtoH' if work.to_host else 'HtoD'} {label}"
        case LoadBatch():
            return f"DataLoader {label}"
        case _:
            return label


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e9) / 1e3


FORMATS = {
    "hta": FileFormat(
        what="the step as traces of torch.profiler, one per rank, for Holistic Trace Analysis",
        tool=NAME,
        writes="step",
        write=write_hta,
        file="traces",
    )
}
