"""Serving by arrival against the event queue of merging, and its recorded order replayed by both engines."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import random_graph

from parsim.algorithms.arrival_program import MERGE, merge_program, served_by_arrival
from parsim.algorithms.arrivals import merge_events
from parsim.algorithms.gossip_program import GossipModel
from parsim.algorithms.program import unrolled
from parsim.errors import AlgorithmError
from parsim.graph.task import COMPUTE, Resource
from parsim.graph.taskgraph import TaskGraph, from_text, to_text
from parsim.simulate import dynamic, static
from parsim.timeline import Timeline
from parsim.work import Compute, Mix, Phase

MODEL = GossipModel(elements=100, samples=8)


def merging(workers: int, epochs: int, epoch_s: np.ndarray, merge_s: float) -> tuple[TaskGraph, np.ndarray]:
    """The whole run, not yet served, and its seconds; epoch_s [workers, epochs]."""
    graph = unrolled(merge_program(MODEL, workers=workers, epochs=epochs))
    seconds, epoch = np.zeros(len(graph.tasks)), [0] * workers
    for task in graph.tasks:
        worker = task.origin.replica or 0
        if isinstance(task.work, Compute) and task.work.phase is Phase.BACKWARD:
            seconds[task.index] = epoch_s[worker, epoch[worker]]
            epoch[worker] += 1
        elif isinstance(task.work, Mix):
            seconds[task.index] = merge_s
    return graph, seconds


def ends(timeline: Timeline, tasks: int) -> np.ndarray:
    found = np.zeros(tasks)
    found[timeline.task] = timeline.end_s
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 9999), st.integers(0, 4))
def test_merges_are_those_of_the_event_queue(workers: int, epochs: int, seed: int, merge: int) -> None:
    epoch_s = np.random.default_rng(seed).uniform(1.0, 4.0, (workers, epochs))
    graph, seconds = merging(workers, epochs, epoch_s, merge / 8)
    served = served_by_arrival(graph, seconds, [MERGE])
    events = merge_events(lambda worker, epoch: epoch_s[worker, epoch], workers, merge_s=merge / 8, epochs=epochs)
    order = [served.tasks[index].origin.replica for index in served.issue_order[MERGE]]
    assert order == [event.worker for event in events]
    for engine in (static, dynamic):
        found = ends(engine.simulate(served, seconds), len(served.tasks))
        assert found[list(served.issue_order[MERGE])] == pytest.approx([event.end_s for event in events], rel=1e-12)
    assert from_text(to_text(served)) == served, "the recorded order is in the text"


def test_a_fast_worker_overtakes() -> None:
    graph, seconds = merging(2, 3, np.array([[10.0] * 3, [1.0] * 3]), 0.5)
    served = served_by_arrival(graph, seconds, [MERGE])
    assert [served.tasks[index].origin.replica for index in served.issue_order[MERGE]] == [1, 1, 1, 0, 0, 0]
    assert static.simulate(served, seconds).makespan_s == 31.5
    assert static.simulate(graph, seconds).makespan_s > 31.5, "as written the fast one waits for the slow"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9))
def test_the_recorded_order_replays_and_is_first_come_first_served(seed: int) -> None:
    """On any graph: nobody who asked later was served earlier, in the timeline that the static engine gives the order."""
    random = Random(seed)
    graph = random_graph(random, most_tasks=20)
    if not graph.issue_order:
        return
    seconds = np.random.default_rng(seed).integers(1, 50, len(graph.tasks)) / 64
    chosen = random.choice(list(graph.issue_order))
    served = served_by_arrival(graph, seconds, [chosen])
    found = ends(static.simulate(served, seconds), len(graph.tasks))
    asked = {}
    for task in graph.issue_order[chosen]:
        before = [found[need] for need in graph.tasks[task].dependencies]
        for it in graph.tasks[task].resources:
            place = served.issue_order[it].index(task)
            if it != chosen and place:
                before.append(found[served.issue_order[it][place - 1]])
        asked[task] = max(before, default=0.0)
    order = served.issue_order[chosen]
    assert [asked[task] for task in order] == sorted(asked[task] for task in order)
    for other, issued in graph.issue_order.items():
        assert other == chosen or served.issue_order[other] == issued


def test_bad_input() -> None:
    graph, seconds = merging(2, 1, np.ones((2, 1)), 0.0)
    with pytest.raises(AlgorithmError, match=r"no task uses r1\.merge; the graph's resources begin with r0\.compute"):
        served_by_arrival(graph, seconds, [Resource(1, "merge")])
    with pytest.raises(AlgorithmError, match="finite seconds >= 0 for each of 8 tasks"):
        served_by_arrival(graph, seconds[:3], [MERGE])
    turned = {**graph.issue_order, Resource(0, COMPUTE): tuple(reversed(graph.issue_order[Resource(0, COMPUTE)]))}
    stuck = TaskGraph(tasks=graph.tasks, world_size=2, issue_order=turned)
    with pytest.raises(AlgorithmError, match="4 of 8 tasks wait for one another"):
        served_by_arrival(stuck, seconds, [MERGE])
    with pytest.raises(AlgorithmError, match="workers, epochs and steps >= 1"):
        merge_program(MODEL, workers=0, epochs=1)
