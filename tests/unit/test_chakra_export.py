"""Chakra traces: what a parser of the published schema reads from them, and that they are the task graph."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parsim.app.foreign import export_folder
from parsim.app.functions import simulate
from parsim.app.run_folder import RunFolder
from parsim.formats.exports import GroupNames, NodeCost, chosen_number, number_field, rank_trace, varint
from parsim.program.taskgraph import Origin, Resource, Task, TaskGraph
from parsim.work import Collective, Compute, Phase, SendRecv

SCHEMA: dict[str, list[tuple[str, int, str]]] = {
    "AttributeProto": [
        ("name", 1, "string"),
        ("double_val", 3, "double"),
        ("int32_val", 7, "int32"),
        ("int64_val", 9, "int64"),
        ("uint64_val", 13, "uint64"),
        ("bool_val", 27, "bool"),
        ("string_val", 29, "string"),
    ],
    "GlobalMetadata": [("version", 1, "string"), ("attr", 2, "*AttributeProto")],
    "Node": [
        ("id", 1, "uint64"),
        ("name", 2, "string"),
        ("type", 3, "int32"),
        ("ctrl_deps", 4, "*uint64"),
        ("data_deps", 5, "*uint64"),
        ("start_time_micros", 6, "uint64"),
        ("duration_micros", 7, "uint64"),
        ("attr", 10, "*AttributeProto"),
    ],
}
"""The messages of mlcommons/chakra schema/protobuf/et_def.proto, as far as traces here use them."""
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7


def numbers(data: bytes, place: int = 0) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def messages(data: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(data):
        size, place = numbers(data, place)
        yield data[place : place + size]
        place += size


def decoded(data: bytes, kind: str) -> dict[str, Any]:
    """A message by the schema; written apart from the encoder."""
    fields = {number: (name, what) for name, number, what in SCHEMA[kind]}
    found: dict[str, Any] = {name: [] for name, _, what in SCHEMA[kind] if what.startswith("*")}
    place = 0
    while place < len(data):
        tag, place = numbers(data, place)
        name, what = fields[tag >> 3]
        match tag & 7:
            case 0:
                value, place = numbers(data, place)
                found[name] = value
            case 1:
                (found[name],) = struct.unpack("<d", data[place : place + 8])
                place += 8
            case _:
                size, place = numbers(data, place)
                content, place = data[place : place + size], place + size
                if what == "string":
                    found[name] = content.decode()
                elif what == "*uint64":
                    inner = 0
                    while inner < len(content):
                        value, inner = numbers(content, inner)
                        found[name].append(value)
                else:
                    found[name].append(decoded(content, what.removeprefix("*")))
    return found


def attributes(node: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: next((value for key, value in entry.items() if key != "name"), "") for entry in node["attr"]}


def read(data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    first, *rest = messages(data)
    return decoded(first, "GlobalMetadata"), [decoded(message, "Node") for message in rest]


def small_graph() -> TaskGraph:
    """Rank 0 computes and sends to rank 1, which computes; then both sum, gather and shift."""
    work = [
        (Compute(component="a", phase=Phase.FORWARD, samples=2), (Resource(0, "compute"),), ()),
        (SendRecv(source=0, destination=1, size_bytes=800), (Resource(0, "pp>1"), Resource(1, "pp<0")), (0,)),
        (Compute(component="b", phase=Phase.FORWARD, samples=2), (Resource(1, "compute"),), (1,)),
        (Collective(operation="all_reduce", group=(0, 1), size_bytes=1000), (Resource(0, "dp"), Resource(1, "dp")), (0, 2)),
        (Collective(operation="all_gather", group=(0, 1), size_bytes=1000), (Resource(0, "dp"), Resource(1, "dp")), (3,)),
        (Collective(operation="ring_shift", group=(0, 1), size_bytes=300), (Resource(0, "cp"), Resource(1, "cp")), (4,)),
        (Compute(component="a", phase=Phase.BACKWARD, samples=2), (Resource(0, "compute"),), (5,)),
    ]
    return TaskGraph(
        tasks=tuple(
            Task(index=index, work=what, resources=where, dependencies=after, origin=Origin(stage=0))
            for index, (what, where, after) in enumerate(work)
        ),
        world_size=2,
    )


COSTS = [NodeCost(seconds=1.5e-6 * (number + 1), flop=10.0 * number, moved_bytes=7.0) for number in range(7)]


def test_numbers_of_the_wire_format() -> None:
    """The examples of protobuf.dev, "Encoding"."""
    assert varint(150) == b"\x96\x01"
    assert number_field(1, 150) == b"\x08\x96\x01"
    assert number_field(1, 0) == b""
    assert chosen_number(1, 0) == b"\x08\x00"
    assert len(varint(-1)) == 10


def test_a_rank_has_its_tasks_and_no_others() -> None:
    groups = GroupNames()
    metadata, nodes = read(rank_trace(small_graph(), 0, COSTS, groups, "test"))
    assert metadata["version"] == "0.0.4"
    assert [node["type"] for node in nodes] == [COMPUTE, SEND, COLLECTIVE, COLLECTIVE, SEND, RECEIVE, COMPUTE]
    _, others = read(rank_trace(small_graph(), 1, COSTS, groups, "test"))
    assert [node["type"] for node in others] == [RECEIVE, COMPUTE, COLLECTIVE, COLLECTIVE, SEND, RECEIVE]
    assert groups.to_dict() == {"1": [0, 1]}
    sent, received = attributes(nodes[1]), attributes(others[0])
    assert (sent["comm_src"], sent["comm_dst"]) == (0, 1)
    assert {key: sent[key] for key in sent if key.startswith("comm_")} == {
        key: received[key] for key in received if key.startswith("comm_")
    }, "both ends of a transfer have one tag"


def test_sizes_are_what_a_rank_puts_in_and_durations_whole_microseconds() -> None:
    _, nodes = read(rank_trace(small_graph(), 0, COSTS, GroupNames(), "test"))
    found = [attributes(node) for node in nodes]
    assert [entry.get("comm_size") for entry in found] == [None, 800, 1000, 500, 300, 300, None]
    assert (found[2]["comm_type"], found[3]["comm_type"]) == (0, 2)
    assert found[6]["num_ops"] == 60
    assert [entry["is_cpu_op"] for entry in found] == [0] * 7
    assert [node["duration_micros"] for node in nodes] == [2, 3, 6, 8, 9, 9, 11]
    assert found[0]["duration_s"] == 1.5e-6


def test_dependencies_stay_within_the_rank_and_point_back() -> None:
    for rank in (0, 1):
        _, nodes = read(rank_trace(small_graph(), rank, COSTS, GroupNames(), ""))
        seen: set[int] = set()
        for node in nodes:
            assert {*node["ctrl_deps"], *node["data_deps"]} <= seen
            seen.add(node["id"])
    _, nodes = read(rank_trace(small_graph(), 0, COSTS, GroupNames(), ""))
    assert nodes[-1]["data_deps"] == [nodes[-2]["id"]]  # what the shift received
    assert nodes[3]["ctrl_deps"] == [nodes[2]["id"]]  # the stream's order


def test_the_package_protobuf_reads_the_same() -> None:
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = {"string": 9, "double": 1, "int32": 5, "int64": 3, "uint64": 4, "bool": 8}
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    for message, fields in SCHEMA.items():
        row = file.message_type.add(name=message)
        for name, number, what in fields:
            label = 3 if what.startswith("*") else 1
            inner = what.removeprefix("*")
            entry = row.field.add(name=name, number=number, label=label, type=kinds.get(inner, 11))
            if inner not in kinds:
                entry.type_name = f".ChakraProtoMsg.{inner}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    node_class = message_factory.GetMessageClass(pool.FindMessageTypeByName("ChakraProtoMsg.Node"))
    data = rank_trace(small_graph(), 0, COSTS, GroupNames(), "test")
    _, mine = read(data)
    for message, expected in zip(list(messages(data))[1:], mine, strict=True):
        node = node_class.FromString(message)
        assert (node.id, node.name, node.type, node.duration_micros) == tuple(
            expected[key] for key in ("id", "name", "type", "duration_micros")
        )
        assert (list(node.ctrl_deps), list(node.data_deps)) == (expected["ctrl_deps"], expected["data_deps"])
        assert [entry.name for entry in node.attr] == [entry["name"] for entry in expected["attr"]]


def test_an_answer_becomes_one_trace_per_rank(tmp_path: Path) -> None:
    keys = ["model.args.layers=2", "model.args.hidden=128", "model.args.heads=4", "model.args.vocab=512", "model.args.seq=64"]
    keys += ["plan.strategy=hp", "plan.mesh={pp=2,dp=2,tp=2}", "plan.pipeline_order=1f1b", "plan.chunks=1"]
    keys += ["plan.microbatches=2", "plan.zero_stage=1", "plan.recompute=none"]
    found = simulate("transformer", cluster="8xh100-sxm", global_batch=16, overrides=keys)
    RunFolder(tmp_path).write_question(found)
    done = export_folder(tmp_path, format="chakra")
    files = sorted((tmp_path / "chakra").glob("parsim.*.et"))
    assert len(files) == done.found["ranks"] == 8
    assert done.found["tasks"] == len(found.evaluation.graph.tasks)
    groups = json.loads((tmp_path / "chakra" / "comm_groups.json").read_text())
    sends, receives = [], []
    for file in files:
        rank = int(file.name.split(".")[1])
        for node in read(file.read_bytes())[1]:
            values = attributes(node)
            if node["type"] == COLLECTIVE:
                assert rank in groups[values["pg_name"]]
            elif node["type"] in (SEND, RECEIVE):
                ends = (values["comm_tag"], values.get("comm_src", 0), values["comm_dst"])
                (sends if node["type"] == SEND else receives).append(ends)
    assert sorted(sends) == sorted(receives)
    assert sends
