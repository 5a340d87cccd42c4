"""The task graph: its text form, and the graphs it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from strategies import task_graphs

from parsim.errors import GraphError
from parsim.program.taskgraph import (
    COMPUTE,
    HOST,
    Origin,
    Resource,
    Task,
    TaskGraph,
    from_text,
    parse_resource,
    parse_work,
    to_text,
    work_text,
)
from parsim.work import Collective, Compute, LoadBatch, Mix, OptimizerStep, Phase, SendRecv, Work

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "taskgraph.txt"

WORKS: dict[str, Work] = {
    "forward layer1.0 x16": Compute(component="layer1.0", phase=Phase.FORWARD, samples=16),
    "backward layer1.0 x16": Compute(component="layer1.0", phase=Phase.BACKWARD, samples=16),
    "optimizer 1000 elements in 3": OptimizerStep(elements=1000, tensors=3),
    "all_reduce 4000 B over 0,1": Collective(operation="all_reduce", group=(0, 1), size_bytes=4000),
    "all_gather 0 B over 1": Collective(operation="all_gather", group=(1,), size_bytes=0),
    "all_gather 64 B over 0,1 packed": Collective(operation="all_gather", group=(0, 1), size_bytes=64, packed=True),
    "send_recv 256 B 0>1": SendRecv(source=0, destination=1, size_bytes=256),
    "load x16 49152 B": LoadBatch(samples=16, size_bytes=49152),
    "load x16 49152 B in 4": LoadBatch(samples=16, size_bytes=49152, parts=4),
    "mix 100 elements of 2": Mix(elements=100, copies=2),
    "mix 100 elements of 2 in 4 by 5": Mix(elements=100, copies=2, tensors=4, accesses=5),
}


def small_graph() -> TaskGraph:
    """Every kind of work, an issue order that differs from the list order, and every origin field."""
    stage0, stage1 = Origin(stage=0, replica=0), Origin(stage=1, replica=0)
    forward = Origin(stage=0, replica=0, component="layer1.0", microbatch=0)
    compute, host = Resource(0, COMPUTE), Resource(0, HOST)
    both = (Resource(0, "pp>1"), Resource(1, "pp<0"))
    reduced = (Resource(0, "dp"), Resource(1, "dp"))
    works = list(WORKS.values())
    tasks = (
        Task(index=0, work=works[7], resources=(host,), dependencies=(), origin=stage0),
        Task(index=1, work=works[2], resources=(compute,), dependencies=(3, 5), origin=stage0),
        Task(index=2, work=works[0], resources=(compute,), dependencies=(0,), origin=forward),
        Task(index=3, work=works[1], resources=(compute,), dependencies=(2,), origin=forward),
        Task(
            index=4,
            work=works[6],
            resources=both,
            dependencies=(2,),
            origin=Origin(stage=0, replica=0, microbatch=0, value="layer1.0:0"),
        ),
        Task(index=5, work=works[3], resources=reduced, dependencies=(3,), origin=Origin(stage=0, bucket=0)),
        Task(index=6, work=works[4], resources=(Resource(1, "dp"),), dependencies=(5,), origin=stage1),
    )
    listed = TaskGraph(tasks=tasks, world_size=2)
    return TaskGraph(tasks=tasks, world_size=2, issue_order={**listed.issue_order, compute: (2, 3, 1)})


@given(task_graphs())
def test_text_round_trips(graph: TaskGraph) -> None:
    text = to_text(graph)
    assert from_text(text) == graph
    assert to_text(from_text(text)) == text


def test_text_is_the_golden_one() -> None:
    graph = small_graph()
    assert to_text(graph) == GOLDEN.read_text()
    assert from_text(GOLDEN.read_text()) == graph


@pytest.mark.parametrize("text", WORKS)
def test_work_prints_as_it_is_read(text: str) -> None:
    assert work_text(WORKS[text]) == text
    assert parse_work(text) == WORKS[text]


@pytest.mark.parametrize("resource", [Resource(0, "compute"), Resource(12, "pp>3"), Resource(3, "pp<12")])
def test_resource_prints_as_it_is_read(resource: Resource) -> None:
    assert parse_resource(str(resource)) == resource


def test_predecessors_are_dependencies_and_queue() -> None:
    graph = small_graph()
    assert graph.predecessors() == [[], [3, 5], [0], [2], [2], [3], [5]]
    assert graph.tasks[5].ranks == (0, 1)


def task(index: int, *dependencies: int, on: tuple[Resource, ...] = (Resource(0, COMPUTE),)) -> Task:
    work = Compute(component="a", phase=Phase.FORWARD, samples=1)
    return Task(index=index, work=work, resources=on, dependencies=dependencies, origin=Origin(stage=0))


@pytest.mark.parametrize(
    ("tasks", "order", "message"),
    [
        ((task(1),), {}, "task number 1 stands at place 0"),
        ((task(0, on=()),), {}, "task 0 uses no resource"),
        ((task(0, on=(Resource(0, "dp"), Resource(0, "dp"))),), {}, r"lists a resource twice: r0\.dp, r0\.dp"),
        ((task(0, 0),), {}, r"task 0 depends on 0; use the numbers 0\.\.0 of other tasks"),
        ((task(0, 4), task(1)), {}, r"task 0 depends on 4; use the numbers 0\.\.1"),
        ((task(0, -1),), {}, "task 0 depends on -1"),
        ((task(0, on=(Resource(2, COMPUTE),)),), {}, r"uses r2\.compute, but ranks go from 0 to 1"),
        ((task(0), task(1)), {Resource(0, COMPUTE): (0,)}, r"r0\.compute issues tasks \[0\], .* are \[0, 1\]"),
        ((task(0), task(1)), {Resource(0, COMPUTE): (0, 1, 1)}, r"issues tasks \[0, 1, 1\]"),
        ((task(0),), {Resource(0, COMPUTE): (0,), Resource(1, HOST): (0,)}, r"r1\.host issues tasks \[0\], .* are \[\]"),
    ],
)
def test_bad_graphs_are_refused(tasks: tuple[Task, ...], order: dict[Resource, tuple[int, ...]], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        TaskGraph(tasks=tasks, world_size=2, issue_order=order)


@pytest.mark.parametrize(
    "line",
    [
        "0 r0.compute | forward a x1 | -",
        "zero r0.compute | forward a x1 | - | stage=0",
        "0 rX.compute | forward a x1 | - | stage=0",
        "0 r0.compute | forward a | - | stage=0",
        "0 r0.compute | forward a x1 | a | stage=0",
        "0 r0.compute | forward a x1 | - | microbatch=0",
        "0 r0.compute | forward a x1 | - | stage=0 colour=3",
        "0 r0.dp | sum_up 8 B over 0 | - | stage=0",
        "0 r0.dp | all_reduce 8 B over 0,0 | - | stage=0",
        "0 r0.dp | send_recv 8 B 1>1 | - | stage=0",
        "order r0.compute",
        "order r0.compute 1,x",
        "world_size two",
    ],
)
def test_lines_that_cannot_be_read_are_refused(line: str) -> None:
    with pytest.raises(GraphError):
        from_text(f"world_size 1\n{line}\n")
