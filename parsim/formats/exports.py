"""What is written for other tools: the record of an export, the values that writers take, and the step as a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError, near_matches
from parsim.files import write_text_atomically
from parsim.formats.source import FileFormat, file_formats
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.predict.problem import PlanningProblem
from parsim.program.taskgraph import HOST, Task, parse_resource
from parsim.registry import is_reference
from parsim.report.trace import save_chrome_trace, stream_order, task_label
from parsim.timeline import Span, Timeline
from parsim.work import Collective, HostCopy, LoadBatch, Mix, SendRecv

MOST_RANKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
        format: its name. file: the file, or the folder of several. summary: one sentence.
        left_out: what the format cannot express, with what it means for whoever uses the file.
        found: further keys of the JSON.
    """

    format: str
    file: Path
    summary: str
    left_out: Mapping[str, str] = field(default_factory=dict)
    found: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as `parsim export --json` prints it."""
        return {"file": str(self.file), "format": self.format, **self.found, "left_out": dict(self.left_out)}

    def lines(self) -> list[str]:
        """For people: what was written, and what was left out."""
        return [self.summary, *(f"Left out: {what}: {why}" for what, why in self.left_out.items())]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedStep:
    """A plan's predicted step; measured: the real one of a plan that was run (None: it was not)."""

    problem: PlanningProblem
    evaluation: Evaluation
    measured: Timeline | None = None

    def of_every_rank(self, tool: str) -> Evaluation:
        """The evaluation in which no rank stands for others, for a tool that reads one file per rank.

        Raises ConfigError: more than MOST_RANKS ranks.
        """
        plan = self.evaluation.result.plan
        if plan.world_size > MOST_RANKS:
            raise ConfigError(
                f"{tool} traces are written for at most {MOST_RANKS:,} ranks, one file each, and the plan has "
                f"{plan.world_size:,}; simulate with fewer replicas: --set cluster.nodes=..."
            )
        if self.evaluation.folding.ranks == tuple(range(plan.world_size)):
            return self.evaluation
        return evaluate(self.problem, plan, samples=0, fold=False)


def written_formats() -> dict[str, FileFormat]:
    """Formats that parsim writes, by name."""
    return {name: row for name, row in file_formats().items() if row.writes is not None}


def format_to_write(name: str, options: Mapping[str, object]) -> FileFormat:
    """A format that parsim writes.

    Args: name: of it, or "package.module:ROW". options: by name those that were given, of `parsim export`.
    Raises: ConfigError: an unknown format, an option of another one, or a row that cannot be loaded.
    """
    rows = written_formats()
    if name not in rows and not is_reference(name):
        raise ConfigError(f"format {name!r} is unknown{near_matches(name, rows)}")
    row = rows[name] if name in rows else file_formats()[name]
    if row.writes is None:
        raise ConfigError(f"format {name!r} writes nothing; it is {row.what}")
    for option, value in options.items():
        if option not in row.options:
            takers = ", ".join(other for other, entry in rows.items() if option in entry.options)
            flag = f"--{option.replace('_', '-')} {value}"
            raise ConfigError(f"{flag} does not apply to {row.what}; it belongs to {takers or 'no format'}")
    return row


def write_chrome(step: EvaluatedStep, file: Path) -> Exported:
    """The predicted step, and the measured one of a plan that was run, for Perfetto and chrome://tracing."""
    evaluation = step.evaluation
    timelines = {"predicted": evaluation.timeline}
    if step.measured is not None:
        timelines["measured"] = step.measured
    save_chrome_trace(file, evaluation.graph, timelines)
    spans = sum(len(timeline) for timeline in timelines.values())
    shown = len({resource.partition(".")[0] for resource in evaluation.timeline.resources})
    left_out = {
        "dependencies": "arrows lead from senders to receivers alone; the format has none between tasks of one rank",
        "intervals": "durations are medians",
    }
    if shown < (ranks := evaluation.result.plan.world_size):
        left_out["ranks"] = f"{shown} of {ranks} stand for the others, which do the same at the same time"
    return Exported(
        format="chrome",
        file=file,
        summary=f"{' and '.join(timelines).capitalize()} step, {spans} spans of {shown} ranks: {file}; open it in Perfetto",
        left_out=left_out,
        found={"timelines": list(timelines), "spans": spans, "ranks": shown},
    )


# The predicted step as traces in the form of torch.profiler, one file per rank, for Holistic Trace Analysis and its like.
#
# A rank's tasks on its device are kernels on streams, each behind a launch of no length on the host; those of the host are its
# operators. Names say to readers what runs: collectives and transfers begin with ncclDevKernel_, copies with Memcpy, loading is
# DataLoader. Times are rounded to whole nanoseconds, starts and ends alike.
#
# Sources: facebookresearch/HolisticTraceAnalysis 0.5.0, hta/common/trace_file.py (the rank of a file, found as text),
# hta/utils/utils.py (kinds of kernels by name); pytorch/kineto, libkineto/src/output_json.cpp (keys of the events).


HTA = "Holistic Trace Analysis"
RANK_FILE = "rank{rank}.json"
HOST_THREAD, DEVICE_PID = 1, 0


def write_hta(step: EvaluatedStep, folder: Path) -> Exported:
    """Traces rankN.json. Raises ConfigError: more than MOST_RANKS ranks."""
    evaluation, plan = step.of_every_rank(HTA), step.evaluation.result.plan
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
        write_text_atomically(folder / RANK_FILE.format(rank=rank), json.dumps(document))  # its readers look for '"rank": 3'
    return Exported(
        format="hta",
        file=folder,
        summary=(
            f"{'Measured' if step.measured is not None else 'Predicted'} step of {plan.world_size} ranks as traces of "
            f"torch.profiler: {folder}/{RANK_FILE.format(rank='N')}; TraceAnalysis(trace_dir={str(folder)!r})"
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
    "chrome": FileFormat(
        what="the timeline as a Chrome trace, for Perfetto", writes="step", write=write_chrome, file="trace.json"
    ),
    "hta": FileFormat(
        what="the step as traces of torch.profiler, one per rank, for Holistic Trace Analysis",
        tool=HTA,
        writes="step",
        write=write_hta,
        file="traces",
    ),
}
