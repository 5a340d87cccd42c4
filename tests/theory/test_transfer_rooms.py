"""What ranks wait for so that their messages lie at most one group ahead adds no cycle to the program of a step."""

from __future__ import annotations

from graphlib import TopologicalSorter

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parsim.errors import PlanError
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.program.lifetimes import message_rooms
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import rank_tasks
from parsim.work import Compute, Phase, SendRecv
from tests.models import chain_model
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
        rooms = message_rooms(rank_tasks(graph, rank), layout, rank)
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
        rooms = message_rooms(tasks, layout, rank)
        given_room = [task.index for task in (*rooms.first, *(task for some in rooms.behind.values() for task in some))]
        received = [task.index for task, stream, _ in tasks if stream.startswith("pp<")]
        assert sorted(given_room) == sorted(received)


def test_a_second_forward_waits_until_the_value_is_sent_that_is_given_up_before_it() -> None:
    """Else it would still be there where the link is slow, and to the end of the step if it was sent later still."""
    model = chain_model((1e6,) * 4)
    names, mesh = tuple(component.name for component in model.components), Mesh(pp=2)
    plan = Plan(
        strategy="custom",
        mesh=mesh,
        stages=(
            Stage(components=names[:2], ranks=mesh.stage_ranks(0)),
            Stage(components=names[2:], ranks=mesh.stage_ranks(1)),
        ),
        global_batch=8,
        pipeline_order="gpipe",
        recompute="full",
    )
    layout = PlanIndex(plan, model)
    tasks = rank_tasks(lower(plan, model), 0)
    rooms = message_rooms(tasks, layout, 0)
    again = next(task for task, _, _ in tasks if isinstance(task.work, Compute) and task.work.phase is Phase.RECOMPUTE)
    sent = [task.index for task, _, _ in tasks if isinstance(task.work, SendRecv) and task.work.source == 0]
    assert rooms.forgotten[again.index] == sent
    assert rooms.awaited[again.index] == sent
