"""trace.json: the schema that Perfetto reads, spans that nest, nothing left out."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import RESNET, durations_s, measured_steps, run_in_order, step_graph

from parsim.errors import GraphError
from parsim.program.taskgraph import COMPUTE, Origin, Resource, Task, TaskGraph
from parsim.report.trace import chrome_trace, save_chrome_trace
from parsim.timeline import Span, Timeline
from parsim.work import Compute, Phase

NEEDED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}


def check_trace(document: dict[str, Any]) -> None:
    """The own schema: keys per phase, times, names of processes and threads, order, arrows in pairs, no partial overlap."""
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    events = document["traceEvents"]
    for event in events:
        assert set(event) >= NEEDED[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert all(event["ph"] == "M" for event in events[: len(events) - len(timed)]), "metadata comes first"
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    assert len(named) == sum(event["name"] == "thread_name" for event in events)
    spans = defaultdict(list)
    for event in (event for event in timed if event["ph"] == "X"):
        assert event["dur"] >= 0
        assert (event["pid"], event["tid"]) in named
        assert event["pid"] in processes
        spans[event["pid"], event["tid"]].append((round(event["ts"] * 1000), round(event["dur"] * 1000)))
    for lane in spans.values():
        for (start, length), (following, _) in pairwise(lane):
            assert start + length <= following, "spans of one thread overlap"
    arrows = defaultdict(list)
    for event in (event for event in timed if event["ph"] in "sf"):
        arrows[event["id"]].append(event)
    for start, finish in arrows.values():
        assert (start["ph"], finish["ph"]) == ("s", "f")
        assert start["ts"] <= finish["ts"]
        assert start["pid"] != finish["pid"]


def test_predicted_and_measured_steps_of_a_pipeline() -> None:
    graph = step_graph(RESNET[:7], pp=2, dp=2, microbatches=3)
    seconds = durations_s(graph, 2e-3)
    timelines = {"predicted": run_in_order(graph, seconds), "measured": measured_steps(graph, seconds, 1, seed=3)[0]}
    document = json.loads(json.dumps(chrome_trace(graph, timelines)))
    check_trace(document)
    events = document["traceEvents"]
    found = Counter(event["args"]["task"] for event in events if event["ph"] == "X")
    assert found == {task.index: 2 * len(task.resources) for task in graph.tasks}
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {f"rank {rank} · {name}" for rank in range(4) for name in timelines}
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {"compute", "host", "dp", "pp>2", "pp<2", "pp>3", "pp<3", "pp>0", "pp<0", "pp>1", "pp<1"}
    forward = next(event for event in events if event.get("cat") == "forward")
    assert forward["name"].startswith("F stem mb0")
    assert forward["args"]["component"] == "stem"
    assert forward["args"]["samples"] == 16
    transfers = [event for event in events if event.get("cat") == "send_recv" and event["ph"] == "X"]
    assert all(event["args"]["size_bytes"] == 4 * 2**20 for event in transfers)
    assert sum(event["ph"] == "s" for event in events) == 2 * 3 * 2 * len(timelines)
    longest = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert longest == pytest.approx(1e6 * max(timeline.makespan_s for timeline in timelines.values()), abs=1e-2)


def opening_first(edge: tuple[int, int]) -> tuple[int, int]:
    return edge[0], -edge[1]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20))
def test_overlapping_spans_are_spread_over_threads(pieces: list[tuple[float, float]]) -> None:
    """Clocks of several hosts may make the spans of one stream overlap; no viewer draws that on one thread."""
    work = Compute(component="c", phase=Phase.FORWARD, samples=1)
    tasks = tuple(
        Task(index=number, work=work, resources=(Resource(0, COMPUTE),), dependencies=(), origin=Origin(stage=0))
        for number in range(len(pieces))
    )
    spans = [Span(number, "r0.compute", start, start + length) for number, (start, length) in enumerate(pieces)]
    document = chrome_trace(TaskGraph(tasks=tasks, world_size=1), {"measured": Timeline.from_spans(spans, "measured")})
    check_trace(document)
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert sorted(event["args"]["task"] for event in events) == list(range(len(pieces)))
    edges = sorted(
        [(round(s * 1e9), 1) for s, _ in pieces] + [(round((s + d) * 1e9), -1) for s, d in pieces], key=opening_first
    )
    deepest = int(np.max(np.cumsum([step for _, step in edges])))
    assert len({event["tid"] for event in events}) <= deepest, "no more threads than spans at once"


def test_a_foreign_timeline_is_refused() -> None:
    graph = step_graph(["a", "b"])
    timeline = Timeline.from_spans([Span(len(graph.tasks), "r0.compute", 0.0, 1.0)], "measured")
    with pytest.raises(GraphError, match="names task 6, but the graph has 6 tasks"):
        chrome_trace(graph, {"measured": timeline})


def test_it_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    graph = step_graph(["a", "b"])
    timeline = run_in_order(graph, durations_s(graph, 1e-3))
    save_chrome_trace(tmp_path / "trace.json", graph, {"predicted": timeline})
    check_trace(json.loads((tmp_path / "trace.json").read_text()))
    with pytest.raises(GraphError):
        save_chrome_trace(tmp_path / "other.json", step_graph(["a"]), {"predicted": timeline})
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
