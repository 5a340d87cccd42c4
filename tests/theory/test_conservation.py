"""What no lowering and no engine may lose: bytes, time, and the one thing a resource does at a time."""

from __future__ import annotations

from collections import Counter, defaultdict
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import random_durations_s

from parsim.costs.estimate import OverlapFactors
from parsim.engines import dynamic, static
from parsim.errors import GraphError
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.plan import Plan
from parsim.predict.breakdown import breakdown
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import Resource
from parsim.work import Collective, Compute, Phase, SendRecv
from tests.plans import MODEL, plans


@settings(max_examples=100, deadline=None)
@given(plans())
def test_every_byte_sent_is_received(plan: Plan) -> None:
    """A message stands in the queues of both its ends, a collective in one queue of every member; and what arrives of a value
    (or goes back of its gradient) is what its readers in that stage hold of it."""
    layout, graph = PlanIndex(plan, MODEL), lower(plan, MODEL)
    arrived: Counter[tuple[str, bool, int, int, int]] = Counter()
    for task in graph.tasks:
        match task.work:
            case SendRecv() as work:
                assert [resource.rank for resource in task.resources] == [work.source, work.destination]
                if task.origin.hop is None:
                    ends = (Resource(work.source, f"pp>{work.destination}"), Resource(work.destination, f"pp<{work.source}"))
                    assert task.resources == ends
                    origin = task.origin
                    assert origin.value is not None
                    assert origin.replica is not None
                    assert origin.microbatch is not None
                    stage = plan.stage_of_rank(work.source if origin.gradient else work.destination)
                    arrived[origin.value, origin.gradient, stage, origin.replica, origin.microbatch] += work.size_bytes
            case Collective() as work:
                assert [resource.rank for resource in task.resources] == list(work.group)
                assert len({resource.stream for resource in task.resources}) == 1
    wanted: Counter[tuple[str, bool, int]] = Counter()
    tp = plan.mesh.tp
    for value in MODEL.values:
        home, size = layout.stage_of_value[value.name], value.size_bytes(plan.microbatch_samples)
        layouts = defaultdict(set)
        for reading in layout.readings[value.name]:
            if home is not None and reading.stage != home:
                layouts[reading.stage].add(reading.ends.value)
                if value.differentiable and any(name in layout.differentiable for name in reading.components):
                    how = reading.ends.gradient
                    wanted[value.name, True, reading.stage] += len(how.holders(tp)) * round(size * how.local_share(tp))
        for stage, seen in layouts.items():
            wanted[value.name, False, stage] += sum(len(how.holders(tp)) * round(size * how.local_share(tp)) for how in seen)
    for replica in range(plan.mesh.dp):
        for microbatch in range(plan.microbatches):
            got = {
                (name, back, stage): size
                for (name, back, stage, r, m), size in arrived.items()
                if (r, m) == (replica, microbatch)
            }
            assert got == dict(wanted)


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(0, 10**6), st.sampled_from([None, OverlapFactors(compute=1.25, communication=1.5)]))
def test_no_resource_does_two_things_at_once_and_every_rank_accounts_for_the_step(
    plan: Plan, seed: int, overlap: OverlapFactors | None
) -> None:
    graph = lower(plan, MODEL)
    durations = random_durations_s(Random(seed), len(graph.tasks), on_grid=seed % 2 == 0)
    timeline = static.simulate(graph, durations, overlap=overlap)
    for resource in range(len(timeline.resources)):
        own = np.flatnonzero(timeline.resource == resource)
        order = own[np.lexsort((timeline.end_s[own], timeline.start_s[own]))]
        assert np.all(timeline.end_s[order[:-1]] <= timeline.start_s[order[1:]])
    assert len(timeline) == sum(len(task.resources) for task in graph.tasks)
    for part in breakdown(graph, timeline):
        assert part.step_s == pytest.approx(timeline.makespan_s, rel=1e-9)
        assert min(part.compute_s, part.load_s, part.host_s, part.exposed_communication_s, part.bubble_s, part.idle_s) >= 0
    if overlap is None:
        computed: Counter[int] = Counter()
        for task in graph.tasks:
            if task.resources[0].stream == "compute":
                computed[task.resources[0].rank] += durations[task.index]
        for part in breakdown(graph, timeline):
            assert part.compute_s == pytest.approx(computed[part.rank], rel=1e-9)
    np.testing.assert_array_equal(timeline.end_s, dynamic.simulate(graph, durations, overlap=overlap).end_s)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_every_backward_is_done_once_whole_or_in_halves_after_what_it_recomputes(plan: Plan) -> None:
    layout = PlanIndex(plan, MODEL)
    done: dict[tuple[str, int, int], Counter[Phase]] = defaultdict(Counter)
    for task in lower(plan, MODEL).tasks:
        if isinstance(task.work, Compute):
            assert task.origin.microbatch is not None
            done[task.work.component, task.resources[0].rank, task.origin.microbatch][task.work.phase] += 1
    for (name, _, _), phases in done.items():
        halves = PIPELINE_ORDERS[plan.pipeline_order].halves and bool(MODEL.component(name).parameters) and name != "a"
        backward = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT) if halves else (Phase.BACKWARD,)
        again = (Phase.RECOMPUTE,) if name in plan.recomputed else ()
        assert phases == Counter((Phase.FORWARD, *again, *backward)), (name, layout.is_halved(name))


def test_a_group_that_lists_a_rank_twice_is_refused() -> None:
    with pytest.raises(GraphError, match=r"lists a rank twice: \(0, 1, 0\); list every rank once"):
        Collective(operation="all_reduce", group=(0, 1, 0), size_bytes=8)
    with pytest.raises(GraphError, match="rank 1 sends to itself"):
        SendRecv(source=1, destination=1, size_bytes=8)
