"""The order in which a GPU rank issues its tasks, on a driver with virtual time: who waits for what, and what overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.costs.estimate import OverlapFactors
from parsim.engines import static
from parsim.engines.program import mean_step_s
from parsim.engines.static import compile_graph
from parsim.execute.cuda.streams import CudaStreams
from parsim.execute.streams import TaskTime
from parsim.program.columns import columns_of
from parsim.program.taskgraph import COMPUTE, HOST, Origin, Resource, Task, TaskGraph
from parsim.work import Collective, Compute, LoadBatch, Phase
from tests.strategies import graph_of, random_durations_s
from tests.virtual_cuda import VirtualDriver

NO_SLOWDOWN = OverlapFactors()


def one_rank_graph(random: Random) -> TaskGraph:
    """Computation and communication of one rank; what is issued depends on tasks that some order can issue before it."""
    tasks: list[Task] = []
    order: dict[Resource, list[int]] = {}
    for number in range(random.randint(1, 25)):
        stream = random.choice((COMPUTE, COMPUTE, "dp", "tp", "pp>1"))
        compute = Compute(component="a", phase=Phase.FORWARD, samples=1)
        work = compute if stream == COMPUTE else Collective(operation="all_reduce", group=(0,), size_bytes=1)
        before = tuple(random.sample(range(number), min(number, random.choice((0, 1, 2, 3)))))
        resource = Resource(0, stream)
        tasks.append(Task(index=number, work=work, resources=(resource,), dependencies=before, origin=Origin(stage=0)))
        order.setdefault(resource, []).append(number)
    return TaskGraph(tasks=tuple(tasks), world_size=1, issue_order={resource: tuple(row) for resource, row in order.items()})


def issue(streams: CudaStreams, graph: TaskGraph, seconds: Sequence[float], driver: VirtualDriver) -> list[TaskTime]:
    """As `RankProgram.step` does: all communication is submitted first."""
    of_stream = [(task, task.resources[0].stream) for task in graph.tasks]
    for task, stream in of_stream:
        if stream not in (COMPUTE, HOST):
            streams.submit(task.index, stream, task.dependencies, lambda s=seconds[task.index]: driver.launch(s))
    for task, stream in of_stream:
        if stream == COMPUTE:
            streams.compute(task.index, stream, task.dependencies, lambda s=seconds[task.index]: driver.launch(s))
    return streams.finish()


@settings(max_examples=300)
@given(st.randoms(use_true_random=False))
def test_tasks_run_when_the_simulator_says_if_issuing_takes_no_time(random: Random) -> None:
    graph = one_rank_graph(random)
    seconds = random_durations_s(random, len(graph.tasks), on_grid=True)
    driver = VirtualDriver(clock_s=100.0)
    times = {entry.task: entry for entry in issue(CudaStreams(driver), graph, seconds, driver)}
    expected = static.simulate(graph, seconds)
    assert len(times) == len(graph.tasks)
    for task, start_s, end_s in zip(expected.task, expected.start_s, expected.end_s, strict=True):
        assert (times[int(task)].ready_s - 100.0, times[int(task)].end_s - 100.0) == pytest.approx((start_s, end_s), abs=1e-9)


def test_bookkeeping_is_linear_in_the_tasks_of_a_step() -> None:
    """Every computation releases one of many waiting communications; each is looked at once."""

    def work(n: int) -> int:
        driver = VirtualDriver(clock_s=100.0)
        streams = CudaStreams(driver)
        looked = 0
        look_at = streams._look_at

        def counted(queue: object) -> None:
            nonlocal looked
            looked += 1
            look_at(queue)  # type: ignore[arg-type]

        streams._look_at = counted  # type: ignore[method-assign]
        for number in range(n):
            streams.submit(n + number, f"tp{number % 7}", [number], lambda: driver.launch(1e-6))
        for number in range(n):
            streams.compute(number, COMPUTE, [], lambda: driver.launch(1e-6))
        assert len(streams.finish()) == 2 * n
        return looked

    assert work(2000) == 2 * work(1000)


def test_the_host_waits_for_its_own_events_alone() -> None:
    """Work of somebody else on the device goes on: nothing asks for the whole device."""
    driver = VirtualDriver(clock_s=100.0)
    other = driver.stream(urgent=False)
    with driver.on(other):
        driver.launch(50.0)
    streams = CudaStreams(driver)
    streams.submit(1, "dp", [0], lambda: driver.launch(2.0))
    streams.compute(0, COMPUTE, [], lambda: driver.launch(1.0))
    times = streams.finish()
    assert driver.host_s() == 103.0
    assert [(entry.task, entry.ready_s, entry.end_s) for entry in times] == [(0, 100.0, 101.0), (1, 101.0, 103.0)]
    finished = [entry for entry in driver.log if entry[0] == "finish"]
    assert len(finished) == 3  # one to set the clock, then the last of each stream


def test_communication_comes_first_and_copies_do_not() -> None:
    driver = VirtualDriver(clock_s=100.0)
    streams = CudaStreams(driver)
    streams.load(0, HOST, [], lambda: driver.launch(1.0))
    streams.submit(1, "dp", [0], lambda: driver.launch(1.0))
    streams.submit(2, "pp>1", [0], lambda: driver.launch(1.0))
    streams.finish()
    assert [stream.urgent for stream in driver.streams] == [False, False, True, True]


def test_a_dependency_on_the_same_stream_needs_no_event() -> None:
    driver = VirtualDriver(clock_s=100.0)
    streams = CudaStreams(driver)
    streams.compute(0, COMPUTE, [], lambda: driver.launch(1.0))
    streams.compute(1, COMPUTE, [0], lambda: driver.launch(1.0))
    streams.submit(2, "dp", [0, 1], lambda: driver.launch(1.0))
    streams.finish()
    assert sum(entry[0] == "wait" for entry in driver.log) == 2


def test_what_can_never_begin_is_an_error_and_no_hang() -> None:
    driver = VirtualDriver(clock_s=100.0)
    streams = CudaStreams(driver)
    streams.submit(1, "dp", [7], lambda: driver.launch(1.0))
    with pytest.raises(AssertionError, match=r"tasks \[1\] depend on tasks that were never issued"):
        streams.finish()
    with pytest.raises(AssertionError, match="task 3 depends on task 9"):
        streams.compute(3, COMPUTE, [9], lambda: None)


# --- loading ----------------------------------------------------------------------------------------------------------


def loading_graph() -> TaskGraph:
    forward = Compute(component="a", phase=Phase.FORWARD, samples=1)
    return graph_of(1, (LoadBatch(samples=1, size_bytes=8), [Resource(0, HOST)], []), (forward, [Resource(0, COMPUTE)], [0]))


@pytest.mark.parametrize(("load_s", "compute_s"), [(2.0, 5.0), (5.0, 5.0), (7.0, 5.0), (0.0, 3.0)])
def test_steps_in_a_row_take_as_long_as_the_simulator_says(load_s: float, compute_s: float) -> None:
    """A shorter load is hidden behind the computation, a longer one is all that counts."""
    driver = VirtualDriver(clock_s=100.0)
    streams = CudaStreams(driver)
    ends, spans = [], []
    for step in range(6):
        if step == 0:
            streams.load(0, HOST, [], lambda: driver.launch(load_s))
        else:
            streams.loaded(0)
        streams.compute(1, COMPUTE, [0], lambda: driver.launch(compute_s))
        streams.load_ahead(0, HOST, lambda: driver.launch(load_s))
        spans.append({entry.task: entry for entry in streams.finish()})
        ends.append(driver.host_s())
    compiled = compile_graph(columns_of(loading_graph()))
    rows = np.array([[load_s, compute_s]])
    assert NO_SLOWDOWN.loads_ahead
    many, few = (float(mean_step_s(compiled, rows, NO_SLOWDOWN, steps=n)[0]) * n for n in (12, 6))
    assert ends[-1] - ends[-2] == pytest.approx((many - few) / 6)
    in_step = spans[-1]
    assert in_step[0].end_s - in_step[0].ready_s == pytest.approx(load_s)
    assert in_step[0].ready_s == in_step[1].ready_s, "the next batch is copied while this one is computed with"


@pytest.mark.parametrize(("read_s", "copy_s", "compute_s"), [(6.0, 2.0, 5.0), (2.0, 2.0, 5.0), (4.0, 2.0, 5.0)])
def test_a_batch_is_copied_behind_the_read_that_began_with_the_step(read_s: float, copy_s: float, compute_s: float) -> None:
    """So steps are as long as if loading took both: nothing is read between two steps."""
    driver = VirtualDriver(clock_s=100.0)
    streams = CudaStreams(driver)
    ends = []
    for step in range(6):
        began_s = driver.host_s()
        if step == 0:
            streams.load(0, HOST, [], lambda: driver.launch(copy_s))
        else:
            streams.loaded(0)
        streams.compute(1, COMPUTE, [0], lambda: driver.launch(compute_s))

        def read_and_copied(began_s: float = began_s) -> None:
            driver.host_takes(max(0.0, began_s + read_s - driver.host_s()))  # until the thread has read it
            driver.launch(copy_s)

        streams.load_ahead(0, HOST, read_and_copied)
        streams.finish()
        ends.append(driver.host_s())
    compiled = compile_graph(columns_of(loading_graph()))
    rows = np.array([[read_s + copy_s, compute_s]])
    many, few = (float(mean_step_s(compiled, rows, NO_SLOWDOWN, steps=n)[0]) * n for n in (12, 6))
    assert ends[-1] - ends[-2] == pytest.approx((many - few) / 6) == pytest.approx(max(read_s + copy_s, compute_s))


def test_the_first_step_loads_its_own_batch_and_shows_that() -> None:
    driver = VirtualDriver(clock_s=100.0)
    streams = CudaStreams(driver)
    streams.load(0, HOST, [], lambda: driver.launch(2.0))
    streams.compute(1, COMPUTE, [0], lambda: driver.launch(5.0))
    streams.load_ahead(0, HOST, lambda: driver.launch(2.0))
    times = streams.finish()
    assert [(entry.task, entry.ready_s, entry.end_s) for entry in times] == [(0, 100.0, 102.0), (1, 102.0, 107.0)]
