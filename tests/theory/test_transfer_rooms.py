"""What ranks wait for so that their messages lie at most one group ahead adds no cycle to the program of a step."""

from __future__ import annotations

from graphlib import TopologicalSorter

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parsim.errors import PlanError
from parsim.execute.relaxed.scripts import rank_tasks
from parsim.execute.rooms.transfers import transfer_rooms
from parsim.graph.lower import lower
from parsim.graph.plan_index import PlanIndex
from parsim.plans.plan import Plan
from tests.plans import MODEL, plans


@settings(max_examples=40, deadline=None)
@given(plans())
def test_room_for_messages_adds_no_cycle(plan: Plan) -> None:
    """Placed components, conversions, halves, chunks and ZeRO included: a value may be sent by a rank that did not make it."""
    assume(plan.mesh.pp > 1 and plan.mesh.cp == 1)
    try:
        layout = PlanIndex(plan, MODEL)
    except PlanError:
        assume(False)
    graph = lower(plan, MODEL)
    after = {task.index: set(task.dependencies) for task in graph.tasks}
    last: dict[tuple[int, str], int] = {}
    for task in graph.tasks:
        for resource in task.resources:
            place = (resource.rank, resource.stream)
            if place in last:
                after[task.index].add(last[place])
            last[place] = task.index
    for rank in range(plan.world_size):
        rooms = transfer_rooms(rank_tasks(graph, rank), layout, rank)
        for index, before in rooms.awaited.items():
            after[index].update(before)
    assert len(list(TopologicalSorter(after).static_order())) == len(graph.tasks)  # raises CycleError for a cycle


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_every_receive_has_room_once(data: st.DataObject) -> None:
    plan = data.draw(plans().filter(lambda plan: plan.mesh.pp > 1 and plan.mesh.cp == 1))
    layout, graph = PlanIndex(plan, MODEL), lower(plan, MODEL)
    for rank in range(plan.world_size):
        tasks = rank_tasks(graph, rank)
        rooms = transfer_rooms(tasks, layout, rank)
        given_room = [task.index for task in (*rooms.first, *(task for some in rooms.behind.values() for task in some))]
        received = [task.index for task, stream, _ in tasks if stream.startswith("pp<")]
        assert sorted(given_room) == sorted(received)
