"""What both engines refuse, and that the message shows where and why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parsim.costs.estimate import OverlapFactors
from parsim.engines import dynamic, static
from parsim.engines.static import compile_graph
from parsim.errors import DeadlockError, GraphError
from parsim.predict.breakdown import lower_bound_s
from parsim.program.taskgraph import TaskGraph, from_text
from parsim.timeline import Timeline

Engine = Callable[..., Timeline]
engines = pytest.mark.parametrize("simulate", [static.simulate, dynamic.simulate], ids=["static", "dynamic"])

CYCLE = """
world_size 1
0 r0.compute | forward a x1 | - | stage=0
1 r0.compute | forward b x1 | 2 | stage=0
2 r0.dp | all_reduce 8 B over 0 | 3 | stage=0
3 r0.compute | forward c x1 | 0,1 | stage=0
"""

# Two ranks issue the same two collectives in opposite orders.
CROSSED = """
world_size 3
0 r0.compute | forward a x1 | - | stage=0
1 r0.dp r1.dp | all_reduce 8 B over 0,1 | 0 | stage=0
2 r0.dp r1.dp | all_gather 8 B over 0,1 | 0 | stage=0
3 r1.compute | backward a x1 | 2 | stage=0
4 r2.compute | forward b x1 | - | stage=0
order r1.dp 2,1
"""

# One stream for both directions: each rank first sends and never comes to receive; a dependency closes the ring.
BEHIND = """
world_size 1
0 r0.compute | forward a x1 | 1 | stage=0
1 r0.compute | forward b x1 | - | stage=0
"""


@engines
def test_a_cycle_of_dependencies_is_printed(simulate: Engine) -> None:
    with pytest.raises(GraphError, match="depend on one another in a cycle") as caught:
        simulate(from_text(CYCLE), [1.0] * 4)
    assert not isinstance(caught.value, DeadlockError)
    text = str(caught.value)
    assert "task 1 (forward b x1 on r0.compute) waits for task 2 (all_reduce 8 B over 0 on r0.dp) waits for task 3" in text
    assert text.endswith("remove one of these dependencies")


@engines
def test_a_deadlock_prints_the_grid(simulate: Engine) -> None:
    with pytest.raises(DeadlockError) as caught:
        simulate(from_text(CROSSED), [1.0] * 5)
    assert str(caught.value).splitlines() == [
        "deadlock: issue orders wait for one another, 3 of 5 tasks can never start",
        "rank | compute          | dp",
        "0    | done             | *1 all_reduce 8 B over 0,1",
        "1    | *3 backward a x1 | *2 all_gather 8 B over 0,1",
        "2    | done             |",
        "(* = blocked head of its resource)",
        "task 1 (all_reduce 8 B over 0,1 on r0.dp r1.dp) needs r1.dp, where task 2 is first",
        "task 2 (all_gather 8 B over 0,1 on r0.dp r1.dp) needs r0.dp, where task 1 is first",
        "task 3 (backward a x1 on r1.compute) needs task 2 to end",
        "cycle: task 1 (all_reduce 8 B over 0,1 on r0.dp r1.dp) waits for "
        "task 2 (all_gather 8 B over 0,1 on r0.dp r1.dp) waits for task 1",
        "issue the tasks that share ranks in one common order on all their resources, or give them streams of their own",
    ]


@engines
def test_a_task_issued_before_what_it_needs_is_a_deadlock(simulate: Engine) -> None:
    with pytest.raises(DeadlockError, match=r"task 0 .* needs task 1 to end"):
        simulate(from_text(BEHIND), [1.0, 1.0])


def test_a_large_deadlock_is_cut_short() -> None:
    """40 ranks in a ring, each first waiting for the next: the message stays readable."""
    n = 40
    lines = [f"{i} r{i}.dp r{(i + 1) % n}.dp | all_reduce 8 B over {i},{(i + 1) % n} | - | stage=0" for i in range(n)]
    orders = [f"order r{i}.dp {i},{(i - 1) % n}" for i in range(n)]
    with pytest.raises(DeadlockError, match="24 more ranks") as caught:
        compile_graph(from_text("\n".join([f"world_size {n}", *lines, *orders])))
    assert len(str(caught.value)) < 6000
    assert "28 more blocked tasks" in str(caught.value)


ONE = "world_size 1\n0 r0.compute | forward a x1 | - | stage=0\n1 r0.dp | all_reduce 8 B over 0 | 0 | stage=0\n"


@engines
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_bad_durations_name_the_task_and_the_value(simulate: Engine, value: float) -> None:
    with pytest.raises(GraphError, match=rf"task 1 \(all_reduce 8 B over 0 on r0\.dp\) has duration {value} s"):
        simulate(from_text(ONE), [1.0, value])


def test_bad_samples_name_the_row_too() -> None:
    with pytest.raises(GraphError, match=r"task 0 .* has duration nan s in sample 1"):
        static.step_times_s(from_text(ONE), [[1.0, 1.0], [float("nan"), 1.0]])


@engines
def test_shapes_are_checked(simulate: Engine) -> None:
    graph = from_text(ONE)
    for wrong in ([1.0], [[1.0, 1.0]], 1.0, []):
        with pytest.raises(GraphError, match=r"durations_s must have shape \[2\], one entry per task"):
            simulate(graph, wrong)
    with pytest.raises(GraphError, match=r"shape \[samples, 2\], one entry per task, got \[2\]"):
        static.step_times_s(graph, [1.0, 1.0], steps=2)
    with pytest.raises(GraphError, match="steps must be >= 1, got 0"):
        static.step_times_s(graph, [[1.0, 1.0]], steps=0)
    with pytest.raises(GraphError, match="has duration -1"):
        lower_bound_s(graph, [1.0, -1.0])


@engines
@pytest.mark.parametrize("factors", [(0.5, 1.0), (1.0, float("nan")), (float("inf"), 1.0)])
def test_overlap_factors_below_one_are_refused(simulate: Engine, factors: tuple[float, float]) -> None:
    with pytest.raises(GraphError, match="overlap factors must be finite and >= 1"):
        simulate(from_text(ONE), [1.0, 1.0], overlap=OverlapFactors(compute=factors[0], communication=factors[1]))


@engines
def test_an_empty_graph_takes_no_time(simulate: Engine) -> None:
    empty = TaskGraph(tasks=(), world_size=1)
    assert simulate(empty, []).makespan_s == 0.0
    assert static.step_times_s(empty, [[], []], steps=3).tolist() == [0.0, 0.0]
    assert lower_bound_s(empty, []) == 0.0


@engines
def test_a_compiled_graph_serves_as_well(simulate: Engine) -> None:
    graph = from_text(ONE)
    compiled = compile_graph(graph)
    assert compile_graph(compiled) is compiled
    assert list(simulate(compiled, [1.0, 2.0])) == list(simulate(graph, [1.0, 2.0]))


def test_importing_the_engines_does_not_load_numba() -> None:
    code = "import parsim.engines.static, parsim.predict.breakdown, sys; print('numba' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root, timeout=60)
    assert run.stdout.strip() == "False"
