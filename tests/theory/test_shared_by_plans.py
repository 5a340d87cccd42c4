"""What plans of one Model share is what each of them finds on a Model of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parsim.errors import PlanError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.memory import RankMemory, plan_memory, unlike_memory
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
