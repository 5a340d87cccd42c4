"""What is written for other tools: the record of an export, the values that writers take, and the step as a Chrome trace."""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError, GraphError, near_matches
from parsim.files import write_atomically, write_text_atomically
from parsim.formats.source import FileFormat, file_formats
from parsim.model.component import narrow
from parsim.model.model import Model
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.predict.problem import PlanningProblem
from parsim.program.taskgraph import HOST, Task, TaskGraph, parse_resource
from parsim.registry import is_reference
from parsim.report.trace import save_chrome_trace, stream_order, task_label
from parsim.timeline import Span, Timeline
from parsim.work import Collective, Compute, HostCopy, LoadBatch, Mix, Phase, SendRecv

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


# The predicted step as MLCommons Chakra execution traces, one file per rank, and the groups of ranks that ASTRA-sim asks for.
#
# A file is a GlobalMetadata message and a Node for each task of the rank, each with its length before it. Dependencies are data
# dependencies; the order in which a resource issues its tasks is a control dependency on the task before. `duration_micros` is
# whole microseconds, rounded up so that no task vanishes; the attribute `duration_s` has all digits. `comm_size` is what a rank
# puts in, as ASTRA-sim counts: S of an all_reduce, reduce_scatter, all_to_all and broadcast, S / n of an all_gather.
#
# Sources: mlcommons/chakra, schema/protobuf/et_def.proto (fields), src/feeder/et_feeder_node.cpp (attributes);
# astra-sim/astra-sim, astra-sim/system/collective/Ring.cc (sizes), workload/Workload.cc (names of files, groups by number);
# protobuf.dev, "Encoding" (the wire format, which a parser of the protobuf package reads in a test).


VERSION = "0.0.4"
COMPUTE_NODE, SEND_NODE, RECEIVE_NODE, COLLECTIVE_NODE = 4, 5, 6, 7
COLLECTIVES: Mapping[str, int] = {
    "all_reduce": 0,
    "all_gather": 2,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
}
"""NodeType and CollectiveCommType of the schema."""
BOOL, DOUBLE, INT32, INT64, UINT64, STRING = 27, 3, 7, 9, 13, 29
"""Fields of AttributeProto's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """Predicted seconds, arithmetic (flop) and bytes moved of one task; 0: not counted."""

    seconds: float
    flop: float = 0.0
    moved_bytes: float = 0.0


@dataclass(slots=True)
class GroupNames:
    """Groups of ranks by number, as ASTRA-sim's group file has them; 0 stands for all ranks there, so numbers begin at 1."""

    numbers: dict[tuple[int, ...], int] = field(default_factory=dict)

    def number(self, group: Sequence[int]) -> int:
        return self.numbers.setdefault(tuple(sorted(group)), len(self.numbers) + 1)

    def to_dict(self) -> dict[str, list[int]]:
        return {str(number): list(group) for group, number in self.numbers.items()}


def rank_trace(graph: TaskGraph, rank: int, costs: Sequence[NodeCost], groups: GroupNames, about: str) -> bytes:
    """The trace of one rank.

    Args: graph: not folded. rank: of it. costs: per task of the graph. groups: filled with the groups of the collectives.
        about: goes into the metadata.
    Raises: GraphError: a collective that Chakra has no name for.
    """
    mine = [task for task in graph.tasks if rank in task.ranks]
    last = {task.index: 2 * task.index + 1 + _is_shift(task) for task in mine}  # a ring_shift has two nodes
    before: dict[int, list[int]] = {}
    for resource, order in graph.issue_order.items():
        if resource.rank == rank:
            for earlier, later in itertools.pairwise(order):
                before.setdefault(later, []).append(last[earlier])
    attributes = (_text("generator", about), _text("rank", str(rank)))
    messages = [bytes_field(1, VERSION.encode()) + b"".join(bytes_field(2, attribute) for attribute in attributes)]
    for task in mine:
        data = [last[index] for index in task.dependencies if index in last]
        messages += _nodes(task, rank, costs[task.index], groups, sorted(set(before.get(task.index, []))), data)
    return b"".join(varint(len(message)) + message for message in messages)  # each with its length before it


def _is_shift(task: Task) -> bool:
    return isinstance(task.work, Collective) and task.work.operation == "ring_shift"


def _nodes(
    task: Task, rank: int, cost: NodeCost, groups: GroupNames, control: Sequence[int], data: Sequence[int]
) -> Iterator[bytes]:
    number, label, work = 2 * task.index + 1, task_label(task), task.work
    common = [
        _chosen("is_cpu_op", BOOL, int(all(resource.stream == HOST for resource in task.resources))),
        bytes_field(1, b"duration_s") + chosen_double(DOUBLE, cost.seconds),
    ]
    match work:
        case SendRecv():
            kind = SEND_NODE if rank == work.source else RECEIVE_NODE
            ends = _transfer(work.source, work.destination, work.size_bytes, number)
            yield _node(number, label, kind, control, data, cost, common + ends)
        case Collective() if _is_shift(task):
            n, place = len(work.group), work.group.index(rank)
            ahead, behind = work.group[(place + 1) % n], work.group[place - 1]
            sent = common + _transfer(rank, ahead, work.size_bytes, number)
            yield _node(number, f"{label} send", SEND_NODE, control, data, cost, sent)
            received = common + _transfer(behind, rank, work.size_bytes, number)
            yield _node(number + 1, f"{label} receive", RECEIVE_NODE, control, [*data, number], cost, received)
        case Collective():
            if work.operation not in COLLECTIVES:
                raise GraphError(
                    f"Chakra has no collective {work.operation!r}; it has {', '.join(COLLECTIVES)}: export another plan"
                )
            size = work.size_bytes // len(work.group) if work.operation == "all_gather" else work.size_bytes
            more = [
                _chosen("comm_type", INT64, COLLECTIVES[work.operation]),
                _chosen("comm_size", INT64, size),
                _text("pg_name", str(groups.number(work.group))),
            ]
            if work.operation == "broadcast":
                more.append(_chosen("root_rank", INT64, work.group[0]))
            yield _node(number, label, COLLECTIVE_NODE, control, data, cost, common + more)
        case _:
            more = [_chosen("num_ops", INT64, round(cost.flop)), _chosen("tensor_size", UINT64, round(cost.moved_bytes))]
            yield _node(number, label, COMPUTE_NODE, control, data, cost, common + more)


def _transfer(source: int, destination: int, size_bytes: int, tag: int) -> list[bytes]:
    return [
        _chosen("comm_src", INT32, source),
        _chosen("comm_dst", INT32, destination),
        _chosen("comm_size", INT64, size_bytes),
        _chosen("comm_tag", INT32, tag),
    ]


def _node(
    number: int, name: str, kind: int, control: Iterable[int], data: Iterable[int], cost: NodeCost, attributes: Iterable[bytes]
) -> bytes:
    return b"".join(
        [
            number_field(1, number),
            bytes_field(2, name.encode()),
            number_field(3, kind),
            packed_field(4, control),
            packed_field(5, data),
            number_field(7, math.ceil(cost.seconds * 1e6 - 1e-9)),
            *(bytes_field(10, attribute) for attribute in attributes),
        ]
    )


def _chosen(name: str, value_field: int, number: int) -> bytes:
    return bytes_field(1, name.encode()) + chosen_number(value_field, number)


def _text(name: str, text: str) -> bytes:
    return bytes_field(1, name.encode()) + bytes_field(STRING, text.encode())


VARINT, FIXED64, LENGTH = 0, 1, 2


def varint(number: int) -> bytes:
    """A number of at most 64 bits, seven bits a byte; negative ones as two's complement.

    Args: number: from -2^63 to 2^64 - 1.
    """
    number &= 2**64 - 1
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def number_field(field: int, number: int) -> bytes:
    """An integer, enum or bool; nothing for 0."""
    return varint(field << 3 | VARINT) + varint(number) if number else b""


def chosen_number(field: int, number: int) -> bytes:
    """A number of a `oneof`: written even if it is 0."""
    return varint(field << 3 | VARINT) + varint(number)


def chosen_double(field: int, number: float) -> bytes:
    """A double of a `oneof`."""
    return varint(field << 3 | FIXED64) + struct.pack("<d", number)


def bytes_field(field: int, content: bytes) -> bytes:
    """A text in UTF-8, or a message; nothing if it is empty."""
    return varint(field << 3 | LENGTH) + varint(len(content)) + content if content else b""


def packed_field(field: int, numbers: Iterable[int]) -> bytes:
    """A repeated integer field."""
    return bytes_field(field, b"".join(varint(number) for number in numbers))


CHAKRA = "Chakra"
PREFIX = "parsim"
BACKWARD = {"": 2.0, "input": 1.0, "weight": 1.0, "none": 0.0}
"""Times its forward, by what an operator's backward computes."""


def write_chakra(step: EvaluatedStep, folder: Path) -> Exported:
    """Traces PREFIX.RANK.et and comm_groups.json. Raises ConfigError: more than MOST_RANKS ranks, or an unknown collective."""
    plan, evaluation = step.evaluation.result.plan, step.of_every_rank(CHAKRA)
    graph = evaluation.graph
    spans = {span.task: span.end_s - span.start_s for span in evaluation.timeline}
    costs = [_cost(task, spans.get(task.index, 0.0), step.problem.model) for task in graph.tasks]
    groups = GroupNames()
    try:
        traces = [rank_trace(graph, rank, costs, groups, f"parsim: {plan.summary()}") for rank in range(graph.world_size)]
    except GraphError as error:
        raise ConfigError(f"{CHAKRA}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    for rank, content in enumerate(traces):
        write_atomically(folder / f"{PREFIX}.{rank}.et", lambda handle, content=content: handle.write(content))  # type: ignore[misc]
    write_text_atomically(folder / "comm_groups.json", json.dumps(groups.to_dict(), indent=1) + "\n")
    return Exported(
        format="chakra",
        file=folder,
        summary=(
            f"Chakra traces of {graph.world_size} ranks, {len(graph.tasks)} tasks: {folder}/{PREFIX}.RANK.et; groups of ranks: "
            f"{folder}/comm_groups.json"
        ),
        left_out={
            "memory": "nodes have the bytes that they move, and not those in memory",
            "overlap": "durations are those of the predicted step, in which tasks that overlap slow each other",
            "intervals": "durations are medians",
            "arithmetic": "num_ops and tensor_size are those of whole components; the optimizer, clipping and parts have none",
        },
        found={"ranks": graph.world_size, "tasks": len(graph.tasks), "groups": len(groups.numbers)},
    )


def _cost(task: Task, seconds: float, model: Model) -> NodeCost:
    """Arithmetic and bytes of the operators behind a whole component; other tasks have their duration alone."""
    work = task.work
    if not isinstance(work, Compute) or work.part:
        return NodeCost(seconds=seconds)
    component = narrow(model.component(work.component), work.rule, work.ways)
    flop = moved = 0.0
    for operator in component.operators:
        times = 1.0 if operator.batch == "none" else float(work.samples)
        both = BACKWARD[operator.gradients]
        passes = {Phase.FORWARD: 1.0, Phase.RECOMPUTE: 1.0, Phase.BACKWARD: both}.get(work.phase, both / 2)
        flop += passes * times * operator.forward_flop * operator.count
        moved += passes * (times * operator.activation_bytes + operator.parameter_bytes) * operator.count
    return NodeCost(seconds=seconds, flop=flop, moved_bytes=moved)


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
    "chakra": FileFormat(
        what="MLCommons Chakra execution traces, one per rank", tool=CHAKRA, writes="step", write=write_chakra, file="chakra"
    ),
}
