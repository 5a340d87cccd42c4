"""Components of one kind are lowered once: the program is the one that the passes write task by task, and so is its step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiments.common.mixed import choices
from parsim.engines.static import compile_graph, simulate
from parsim.errors import PlanError
from parsim.model.model import Model
from parsim.plans.layouts import parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS, rank_of_stage
from parsim.plans.plan import Plan, Stage
from parsim.predict.memory import with_offloaded
from parsim.program.columns import Columns, Folding, columns_of, unfolded
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import Task
from parsim.program.templates import Pieces, lower_columns
from parsim.timeline import Timeline
from tests.models import deep_model
from tests.plans import MODEL, grouped_plans, plans

LAYERS = 6
MODELS = {
    "chain of blocks": deep_model(LAYERS),
    "with positions": deep_model(LAYERS, positions=True),
    "with a mask": deep_model(LAYERS, positions=True, differentiable=False),
}


@st.composite
def deep_plans(draw: st.DrawFn, model: Model, *, placed: bool = True) -> Plan:
    """Blocks are mostly placed, cut and recomputed alike, and a few components are not."""
    names = tuple(component.name for component in model.components)
    mesh = Mesh(pp=draw(st.integers(1, 4)), dp=draw(st.sampled_from([1, 2])), tp=draw(st.sampled_from([1, 2, 4])))
    order = draw(st.sampled_from([name for name, row in sorted(PIPELINE_ORDERS.items()) if mesh.pp > 1 or row.takes(1)]))
    chunks = draw(
        st.sampled_from([count for count in (1, 2) if PIPELINE_ORDERS[order].takes(count) and (mesh.pp > 1 or count == 1)])
    )
    count = mesh.pp * chunks
    bounds = [0, *sorted(draw(st.sets(st.integers(1, len(names) - 1), min_size=count - 1, max_size=count - 1))), len(names)]
    usual = {letter: draw(st.sampled_from(choices(model, f"0.{letter}", mesh.tp, placed=placed))) for letter in "abcd"}
    others = {name: draw(st.sampled_from(choices(model, name, mesh.tp, placed=placed))) for name in ("loss", *names[:1])}
    odd = draw(st.dictionaries(st.sampled_from(names), st.integers(0, 9), max_size=1))
    placement = {name: others.get(name) or usual[name.split(".")[-1]] for name in names}
    for name, number in odd.items():
        possible = choices(model, name, mesh.tp, placed=placed)
        placement[name] = possible[number % len(possible)]
    again = draw(st.sampled_from(["none", "full", "blocks", "segments"]))
    ends = [name for name in names if name.endswith((".a", ".c"))]
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=tuple(
            Stage(
                components=names[first:last],
                ranks=mesh.stage_ranks(rank_of_stage(order, mesh.pp, chunks)[number]),
                placements=tuple(placement[name] for name in names[first:last]) if mesh.tp > 1 else (),
            )
            for number, (first, last) in enumerate(pairwise(bounds))
        ),
        global_batch=32,
        microbatches=draw(st.sampled_from([1, 2, 4])),
        pipeline_order=order,
        bucket_bytes=draw(st.sampled_from([1, 3000, 10**6])),
        zero_stage=(zero_stage := draw(st.integers(0, 3))),
        gather_ahead=zero_stage == 1 and draw(st.booleans()),
        recompute=tuple(ends) if again == "blocks" else "full" if again == "full" else "none",
        segments=_segments(names, bounds) if again == "segments" else (),
        scatter_gather=draw(st.booleans()),
        blocking_transfers=draw(st.booleans()),
        clip_gradients=draw(st.booleans()),
    )


def _segments(names: tuple[str, ...], bounds: list[int]) -> tuple[tuple[str, ...], ...]:
    """The blocks that lie in one stage."""
    found = []
    for layer in range(LAYERS):
        block = tuple(name for name in names if name.startswith(f"{layer}."))
        if sum(set(block) <= set(names[first:last]) for first, last in pairwise(bounds)):
            found.append(block)
    return tuple(found)


def planned(draw: st.DataObject, *, placed: bool = True) -> PlanIndex:
    model = MODELS[draw.draw(st.sampled_from(sorted(MODELS)))]
    try:
        return PlanIndex(draw.draw(deep_plans(model, placed=placed)), model)
    except PlanError:
        assume(False)
        raise


def tasks_of(columns: Columns) -> list[tuple[object, ...]]:
    """Work, rank, queues and dependencies of every task."""
    return [
        (
            columns.units[columns.unit[task]],
            tuple(columns.resources[number] for number in columns.uses.row(task)),
            sorted(set(columns.dependencies.row(task).tolist())),
        )
        for task in range(columns.size)
    ]


def timeline_of(columns: Columns, seconds: dict[object, float]) -> Timeline:
    taken = [seconds[work] for work in (columns.units[unit].work for unit in columns.unit)]
    return simulate(compile_graph(columns), np.array(taken))


def offloading(draw: st.DataObject, layout: PlanIndex) -> PlanIndex:
    """The plan with some of its state and activations on the host."""
    names = layout.plan.components
    some = draw.draw(st.sampled_from([True, False, names[:2], names[1:]]))
    try:
        plan = replace(layout.plan, optimizer_offload=draw.draw(st.booleans()), activation_offload=some)
    except PlanError:
        assume(False)
        raise
    return with_offloaded(PlanIndex(plan, layout.model), "fp32")


LAYOUTS: dict[str, Callable[[st.DataObject], PlanIndex]] = {
    "deep": planned,
    "on the host": lambda draw: offloading(draw, planned(draw)),
    "every component by itself": lambda draw: PlanIndex(draw.draw(plans()), MODEL),
    "in sharding groups": lambda draw: PlanIndex(draw.draw(grouped_plans(replicas=(4,))), MODEL),
}


@pytest.mark.parametrize("kind", LAYOUTS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_program_is_that_of_the_passes_task_by_task(kind: str, draw: st.DataObject) -> None:
    layout = LAYOUTS[kind](draw)
    graph = lower(layout.plan, layout.model, layout)
    found, every = lower_columns(layout.plan, layout.model, layout, unfolded(layout.plan.mesh)), columns_of(graph)
    assert tasks_of(found) == tasks_of(every)
    numbers = np.arange(found.size)[:: draw.draw(st.integers(1, 7))]
    for task, whole in zip(found.select(numbers), every.select(numbers), strict=True):
        assert (task.work, task.origin, set(task.resources)) == (whole.work, whole.origin, set(whole.resources))
    for number, resource in enumerate(found.resources):
        assert tuple(found.issued.row(number).tolist()) == graph.issue_order[resource]
    works = sorted({unit.work for unit in every.units}, key=repr)
    seconds: dict[object, float] = {work: 1.0 + number / 7 for number, work in enumerate(works)}
    one, other = (timeline_of(columns, seconds) for columns in (found, every))
    assert (one.start_s.tolist(), one.end_s.tolist()) == (other.start_s.tolist(), other.end_s.tolist())


@settings(max_examples=20, deadline=None)
@given(st.data(), st.booleans())
def test_a_folded_program_is_that_of_the_ranks_that_stand_for_others(draw: st.DataObject, offloads: bool) -> None:
    """Its tasks, with their origins, are those of the whole program that such a rank takes part in."""
    layout = planned(draw, placed=False)
    layout = offloading(draw, layout) if offloads else layout
    mesh = layout.plan.mesh
    folding = Folding(
        mesh=mesh, replica_of=(0,) * mesh.copies, shards=draw.draw(st.sampled_from([(0,), tuple(range(mesh.tp))]))
    )
    assume(folding.is_folded)
    part = lower_columns(layout.plan, layout.model, layout, folding).graph.tasks
    kept = set(folding.ranks)
    whole = [task for task in lower(layout.plan, layout.model, layout).tasks if not kept.isdisjoint(task.ranks)]
    number = {task.index: place for place, task in enumerate(whole)}

    def shown(task: Task, numbers: dict[int, int] | None = None) -> tuple[object, ...]:
        before = [
            entry if numbers is None else numbers[entry] for entry in task.dependencies if numbers is None or entry in numbers
        ]
        return task.work, [entry for entry in task.resources if entry.rank in kept], before, task.origin

    assert [shown(task) for task in part] == [shown(task, number) for task in whole]


def test_parts_are_put_together_once_for_all_that_read_a_value_in_one_layout() -> None:
    """Two components read a value whole and make different gradients of it: two readings, and one all_gather."""
    model = MODELS["chain of blocks"]
    names = tuple(component.name for component in model.components)
    mesh = Mesh(pp=3, tp=4)
    usual = {"a": "batch", "b": "batch", "c": "replicate", "d": "shard:row/4", "loss": "batch"}
    placements = [parse_placement(usual[name.split(".")[-1]]) for name in names]
    stages = tuple(
        Stage(components=names[first:last], ranks=mesh.stage_ranks(place), placements=tuple(placements[first:last]))
        for place, (first, last) in enumerate(pairwise([0, 1, 2, len(names)]))
    )
    plan = Plan(strategy="custom", mesh=mesh, stages=stages, global_batch=32, microbatches=1, scatter_gather=True)
    assert tasks_of(lower_columns(plan, model)) == tasks_of(columns_of(lower(plan, model)))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_blocks_in_the_middle_of_stages_are_of_one_kind(name: str) -> None:
    """So what is lowered does not grow with the blocks."""

    def lowered(layers: int) -> int:
        model = deep_model(layers, positions="chain" not in name, differentiable="mask" not in name)
        names = tuple(component.name for component in model.components)
        mesh = Mesh(pp=2, dp=2)
        half = len(names) // 2
        stages = tuple(
            Stage(components=part, ranks=mesh.stage_ranks(place)) for place, part in enumerate((names[:half], names[half:]))
        )
        plan = Plan(strategy="custom", mesh=mesh, stages=stages, global_batch=32, microbatches=4)
        pieces = Pieces(PlanIndex(plan, model), frozenset(unfolded(mesh).ranks))
        pairs = [pair for sequence in pieces.sequences.values() for pair in sequence]
        return len({id(pieces.of(*pair)) for pair in pairs})

    assert lowered(24) == lowered(48)


def test_components_that_do_other_work_are_of_other_kinds() -> None:
    """They are wired alike, and cost more."""
    model = deep_model(LAYERS)
    heavy = tuple(
        replace(one, operators=tuple(replace(entry, forward_flop=9e6) for entry in one.operators)) if one.name == "3.b" else one
        for one in model.components
    )
    model = replace(model, components=heavy)
    names = tuple(component.name for component in model.components)
    stage = Stage(components=names, ranks=(0,))
    plan = Plan(strategy="custom", mesh=Mesh(), stages=(stage,), global_batch=8, microbatches=1)
    units = lower_columns(plan, model).units
    kinds = {unit.work.component: kind for unit, kind in zip(units, units.kind, strict=True) if hasattr(unit.work, "component")}
    assert kinds["2.b"] == kinds["4.b"]
    assert kinds["3.b"] not in {kind for name, kind in kinds.items() if name != "3.b"}


def test_a_program_is_freed_with_the_last_reference_to_it() -> None:
    """A search collects garbage rarely: a program of millions of tasks in a cycle would stay beside the next ones."""
    model, mesh = deep_model(4), Mesh(dp=2)
    names = tuple(component.name for component in model.components)
    plan = Plan(
        strategy="custom",
        mesh=mesh,
        stages=(Stage(components=names, ranks=(0, 1)),),
        global_batch=4,
        microbatches=2,
        zero_stage=2,
    )
    layout, folding = PlanIndex(plan, model), Folding(mesh=mesh, replica_of=(0, 0), shards=(0,))
    was_on = gc.isenabled()
    gc.disable()
    try:
        program = lower_columns(plan, model, layout, folding)
        freed = weakref.ref(program)
        del program
        assert freed() is None
    finally:
        if was_on:
            gc.enable()
