"""What plans of one Model share is what each of them finds on a Model of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parsim.costs.adjustments import AS_IT_IS, HardwareScale
from parsim.engines.static import CompiledGraph
from parsim.errors import PlanError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.plans.stages import even_parts, stages_of
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.predict.memory import RankMemory, plan_memory, unlike_memory
from parsim.predict.nearly_alike import Programs
from parsim.predict.problem import PlanningProblem
from parsim.program.columns import unfolded
from parsim.program.placed import MOST, Divisions, PlanIndex
from parsim.program.templates import lower_columns
from tests.models import deep_model
from tests.theory.test_lowering_by_kinds import MODELS, deep_plans, planned, tasks_of

MACHINE = cluster_from_profile(load_profile("dgx1-v100-32gb"), nodes=8, network="infiniband-100g")
CHANGES = ("zero_stage", "bucket_bytes", "recompute", "segments", "microbatches", "pipeline_order", "clip_gradients")


def memory(layout: PlanIndex) -> tuple[RankMemory, ...]:
    return plan_memory(layout, MACHINE, Numerics(optimizer="adam"))


def found_with(plan: Plan, model: Model) -> tuple[object, ...]:
    layout = PlanIndex(plan, model)
    return tasks_of(lower_columns(plan, model, layout)), memory(layout), layout.kinds.of, list(layout.frozen.items())


def changed(draw: st.DataObject, plan: Plan, other: Plan) -> Iterator[Plan]:
    """The plan with some keys of another one, where that is a plan."""
    for keys in draw.draw(st.lists(st.sets(st.sampled_from(CHANGES)), min_size=1, max_size=3)):
        try:
            yield replace(plan, **{key: getattr(other, key) for key in sorted(keys)})
        except PlanError:
            continue


@pytest.mark.slow
@settings(max_examples=30)
@given(st.data())
def test_a_plan_finds_the_same_after_others_of_its_model(draw: st.DataObject) -> None:
    shared = replace(MODELS[draw.draw(st.sampled_from(sorted(MODELS)))])
    plan, other = draw.draw(deep_plans(shared)), draw.draw(deep_plans(shared))
    judged = 0
    for each in (plan, *changed(draw, plan, other)):
        try:
            alone = found_with(each, replace(shared))
        except PlanError:
            continue
        assert found_with(each, shared) == alone
        judged += 1
    assume(judged)


@settings(max_examples=20)
@given(st.data())
def test_alike_ranks_hold_what_the_first_of_them_does(draw: st.DataObject) -> None:
    layout = planned(draw)
    first = unlike_memory(layout, MACHINE, Numerics(optimizer="adam"))
    every = memory(layout)
    assert [entry.rank for entry in every] == list(range(layout.plan.world_size))
    assert {replace(entry, rank=0) for entry in every} == {replace(entry, rank=0) for entry in first}
    assert all(every[entry.rank] == entry for entry in first)


@settings(max_examples=15, deadline=None)
@given(
    draw=st.data(),
    mesh=st.sampled_from([Mesh(dp=4), Mesh(pp=2, dp=2), Mesh(dp=2, tp=2), Mesh(pp=2, dp=2, tp=2), Mesh(dp=16)]),
    factor=st.sampled_from([0.5, 3.0]),
    nodes=st.sampled_from([2, 4]),
)
def test_a_program_found_on_the_model_gives_what_a_new_one_does(
    draw: st.DataObject, mesh: Mesh, factor: float, nodes: int
) -> None:
    """A question with other prices finds the program of the first one."""
    model = deep_model(6)
    parts = even_parts([component.name for component in model.components], mesh.pp)
    plan = Plan(
        strategy="custom",
        mesh=mesh,
        stages=stages_of(mesh, parts),
        global_batch=64,
        microbatches=draw.draw(st.sampled_from([1, 2])),
        zero_stage=draw.draw(st.sampled_from([0, 1, 2])),
    )

    def evaluated(of: Model, scale: HardwareScale, fold: bool) -> Evaluation:
        machine = cluster_from_profile(load_profile("dgx1-v100-32gb"), nodes=nodes, network="infiniband-100g")
        posed = PlanningProblem(model=of, cluster=machine, global_batch=64, scale=scale)
        return evaluate(posed, plan, samples=20, fold=fold)

    for fold in (False, True):
        first = evaluated(model, AS_IT_IS, fold)
        faster = HardwareScale(communication=factor)
        known, anew = evaluated(model, faster, fold), evaluated(replace(model), faster, fold)
        assert (known.compiled is first.compiled) == (known.folding == first.folding)
        assert known.result == anew.result
        assert known.breakdown == anew.breakdown
        assert np.array_equal(known.timeline.end_s, anew.timeline.end_s)


def test_a_model_keeps_programs_of_so_many_tasks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    model, programs = deep_model(4), Programs()
    names = tuple(component.name for component in model.components)

    def program(batch: int) -> CompiledGraph:
        mesh = Mesh()
        plan = Plan(strategy="custom", mesh=mesh, stages=stages_of(mesh, [names]), global_batch=batch)
        return programs.of(PlanIndex(plan, model), unfolded(mesh), resuming=False)

    first = program(1)
    assert program(1) is first
    monkeypatch.setattr("parsim.predict.nearly_alike.MOST_TASKS", 2 * first.size)
    program(2)
    assert program(1) is first  # and so it was asked for last
    program(3)
    assert program(1) is first
    program(2)
    program(3)
    assert program(1) is not first


def test_a_model_keeps_the_divisions_that_were_asked_for_last() -> None:
    known, model = Divisions(), deep_model(MOST + 2)
    names = tuple(component.name for component in model.components)
    mesh = Mesh(pp=2)

    def cut(first: int) -> Plan:
        parts = names[:first], names[first:]
        stages = tuple(Stage(components=part, ranks=mesh.stage_ranks(place)) for place, part in enumerate(parts))
        return Plan(strategy="custom", mesh=mesh, stages=stages, global_batch=2)

    known.of(cut(1))["division"]["seen"] = True
    for first in range(2, MOST + 1):
        known.of(cut(first))
    assert "seen" in known.of(cut(1))["division"]  # and so it was asked for last
    known.of(cut(MOST + 1))
    assert "seen" in known.of(replace(cut(1), microbatches=2, global_batch=4, zero_stage=0))["division"]
    for first in range(2, MOST + 2):
        known.of(cut(first))
    assert "seen" not in known.of(cut(1))["division"]
