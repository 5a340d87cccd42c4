"""One rank's part of a task graph as an MLCommons Chakra execution trace.

A file is a GlobalMetadata message and a Node for each task of the rank, each with its length before it. Dependencies are data
dependencies; the order in which a resource issues its tasks is a control dependency on the task before. `duration_micros` is
whole microseconds, rounded up so that no task vanishes; the attribute `duration_s` has all digits. `comm_size` is what a rank
puts in, as ASTRA-sim counts: S of an all_reduce, reduce_scatter, all_to_all and broadcast, S / n of an all_gather.

Sources: mlcommons/chakra, schema/protobuf/et_def.proto (fields), src/feeder/et_feeder_node.cpp (attributes);
astra-sim/astra-sim, astra-sim/system/collective/Ring.cc (sizes), workload/Workload.cc (names of files, groups by number).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from parsim.errors import GraphError
from parsim.exporters.protobuf_wire import bytes_field, chosen_double, chosen_number, delimited, number_field, packed_field
from parsim.program.task import HOST, Task
from parsim.program.taskgraph import TaskGraph
from parsim.report.trace import task_label
from parsim.work import Collective, SendRecv

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
    """Of one task: predicted seconds, arithmetic (flop) and bytes moved; 0: not counted."""

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

    Args:
        graph: not folded. rank: of it. costs: per task of the graph. groups: filled with the groups of the collectives.
        about: goes into the metadata.

    Raises:
        GraphError: a collective that Chakra has no name for.
    """
    return b"".join(delimited(message) for message in _messages(graph, rank, costs, groups, about))


def _messages(graph: TaskGraph, rank: int, costs: Sequence[NodeCost], groups: GroupNames, about: str) -> Iterator[bytes]:
    yield (
        bytes_field(1, VERSION.encode()) + bytes_field(2, _text("generator", about)) + bytes_field(2, _text("rank", str(rank)))
    )
    mine = [task for task in graph.tasks if rank in task.ranks]
    last = {task.index: _last_node(task) for task in mine}
    before: dict[int, list[int]] = {}
    for resource, order in graph.issue_order.items():
        if resource.rank == rank:
            for earlier, later in itertools.pairwise(order):
                before.setdefault(later, []).append(last[earlier])
    for task in mine:
        data = [last[index] for index in task.dependencies if index in last]
        yield from _nodes(task, rank, costs[task.index], groups, sorted(set(before.get(task.index, []))), data)


def _last_node(task: Task) -> int:
    """Node numbers leave room for the two nodes of a ring_shift."""
    return 2 * task.index + (2 if _is_shift(task) else 1)


def _is_shift(task: Task) -> bool:
    return isinstance(task.work, Collective) and task.work.operation == "ring_shift"


def _nodes(
    task: Task, rank: int, cost: NodeCost, groups: GroupNames, control: Iterable[int], data: Iterable[int]
) -> Iterator[bytes]:
    number, label, work = 2 * task.index + 1, task_label(task), task.work
    control, data = list(control), list(data)
    common = [_bool("is_cpu_op", all(r.stream == HOST for r in task.resources)), _double("duration_s", cost.seconds)]
    match work:
        case SendRecv():
            kind = SEND_NODE if rank == work.source else RECEIVE_NODE
            yield _node(
                number,
                label,
                kind,
                control,
                data,
                cost,
                common + _transfer(work.source, work.destination, work.size_bytes, number),
            )
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


def _bool(name: str, value: bool) -> bytes:
    return _chosen(name, BOOL, int(value))


def _double(name: str, value: float) -> bytes:
    return bytes_field(1, name.encode()) + chosen_double(DOUBLE, value)


def _text(name: str, text: str) -> bytes:
    return bytes_field(1, name.encode()) + bytes_field(STRING, text.encode())
