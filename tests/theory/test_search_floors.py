"""Bounds of memory, of what must be recomputed, of the order of blocks and of fewer devices: never above what is predicted."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.search.asking import drawn, hungry
from experiments.search.never_slower import by_hand
from parsim.errors import ParsimError
from parsim.model.catalogue.names import named
from parsim.model.catalogue.sublayers import SamplePart, Software
from parsim.model.catalogue.transformer import transformer
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import ZERO_STAGES, Plan
from parsim.predict.evaluate import simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.search.bound import device_bound_s, order_bound_s
from parsim.search.memory_floor import WeightParts, floor_excess_bytes, plan_floor
from parsim.search.recompute import every_set, may_fit_recomputing, recomputed_to_fit
from parsim.search.search import search
from parsim.search.stages import balanced_plan, place_excess_bytes
from parsim.search.tensor import uniform_placements
from tests.machines import machine

MESHES = [Mesh(pp=pp, dp=dp, tp=tp) for pp in (1, 2, 4) for dp in (1, 2) for tp in (1, 2) if pp * dp * tp <= 8]
ORDERS = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1))


def small_llama():  # type: ignore[no-untyped-def]
    known = named("llama3-8b")
    assert known is not None
    assert known.shape is not None
    shape = replace(known.shape, layers=3, hidden=512, heads=8, vocab=1024)
    return transformer(shape, Software(flash=True, dropout=False), SamplePart(tokens=128, context=128), "sublayer")


MODELS = {
    "gpt": load_model(ModelSpec(name="gpt_small")),
    "resnet": load_model(ModelSpec(name="resnet_small")),
    "vit": load_model(ModelSpec(name="vit_small")),
    "llama": small_llama(),
}


def some_plan(problem: PlanningProblem, mesh: Mesh, microbatches: int, order: tuple[str, int]) -> Plan | None:
    try:
        placements = uniform_placements(problem, Mesh(dp=mesh.dp, tp=mesh.tp)) if mesh.tp > 1 else None
        plan = balanced_plan(
            problem, "custom", mesh, microbatches=microbatches, pipeline_order=order[0], chunks=order[1], placements=placements
        )
        problem.layout(plan)
    except ParsimError:
        return None
    return plan


@st.composite
def questions(draw: st.DrawFn) -> tuple[PlanningProblem, Plan | None]:
    """A problem on devices without memory, and a plan of it; None where there is none with so many stages."""
    problem = PlanningProblem(
        model=MODELS[draw(st.sampled_from(sorted(MODELS)))],
        cluster=machine(memory_bytes=1),
        global_batch=32,
        numerics=Numerics(precision=draw(st.sampled_from(("fp32", "amp_fp16")))),
    )
    mesh, microbatches = draw(st.sampled_from(MESHES)), draw(st.sampled_from((1, 2, 4, 8)))
    plan = some_plan(problem, mesh, microbatches, draw(st.sampled_from(ORDERS)))
    return problem, None if plan is None else replace(plan, zero_stage=draw(st.sampled_from(ZERO_STAGES)))


@settings(max_examples=60, deadline=None)
@given(question=questions(), data=st.data())
def test_no_plan_holds_less_than_its_floor_whatever_it_recomputes(
    question: tuple[PlanningProblem, Plan | None], data: st.DataObject
) -> None:
    """With no memory at all, the excess is what a rank holds."""
    problem, plan = question
    if plan is None:
        return
    names = sorted(problem.layout(plan).differentiable)
    some = data.draw(st.one_of(st.just(()), st.just(tuple(names)), st.sets(st.sampled_from(names)).map(tuple)))
    held = max(entry.excess_bytes for entry in problem.memory(replace(plan, recompute=some or "none")))
    assert floor_excess_bytes(problem, plan, recomputing=True) <= held
    floor = plan_floor(problem, plan)
    assert floor is not None
    assert floor.excess_of_any_cut(plan.zero_stage, recomputing=True) <= held
    if not some:
        assert floor_excess_bytes(problem, plan, recomputing=False) <= held
        assert floor.excess_of_any_cut(plan.zero_stage, recomputing=False) <= held


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(sorted(MODELS)),
    mesh=st.sampled_from(MESHES),
    microbatches=st.sampled_from((1, 2, 4)),
    order=st.sampled_from(ORDERS[:3]),
    share=st.floats(0.3, 1.0),
)
def test_a_plan_recomputes_no_less_than_its_bound(
    model: str, mesh: Mesh, microbatches: int, order: tuple[str, int], share: float
) -> None:
    ample = PlanningProblem(model=MODELS[model], cluster=machine(memory_bytes=32 * 2**30), global_batch=32)
    plan = some_plan(ample, mesh, microbatches, order)
    if plan is None:
        return
    most = max(entry.needed_bytes for entry in ample.memory(plan))
    problem = replace(ample, cluster=machine(memory_bytes=int(share * most)))
    found = recomputed_to_fit(problem, plan)
    floor = plan_floor(problem, plan)
    assert floor is not None
    if found is not None:
        assert floor_excess_bytes(problem, plan, recomputing=True) == 0
        assert floor.recomputing_bound_s(0) <= simulated_step(problem, found, fold=True).step_s


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(sorted(MODELS)),
    mesh=st.sampled_from([mesh for mesh in MESHES if mesh.pp > 1]),
    microbatches=st.sampled_from((1, 2, 4, 8)),
    order=st.sampled_from(ORDERS),
    recompute=st.sampled_from(("none", "full")),
)
def test_no_pipeline_ends_before_the_order_of_its_blocks_lets_it(
    model: str, mesh: Mesh, microbatches: int, order: tuple[str, int], recompute: str
) -> None:
    problem = PlanningProblem(model=MODELS[model], cluster=machine(), global_batch=32)
    plan = some_plan(problem, mesh, microbatches, order)
    if plan is not None:
        plan = replace(plan, recompute=recompute)
        assert order_bound_s(problem, plan) <= simulated_step(problem, plan, fold=True).step_s


def test_a_second_forward_may_run_before_the_gradient_comes() -> None:
    """An earlier bound by the order of blocks let it wait: a plan of 6.4 ms was bounded by 6.8 ms, and left out."""
    problem = PlanningProblem(model=MODELS["gpt"], cluster=machine(), global_batch=32)
    plan = some_plan(problem, Mesh(pp=2), 1, ("1f1b", 1))
    assert plan is not None
    plan = replace(plan, recompute="full")
    assert order_bound_s(problem, plan) <= simulated_step(problem, plan, fold=True).step_s


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "resnet"])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_no_plan_on_fewer_devices_is_faster_than_all_computation_divided_evenly(name: str, devices: int) -> None:
    problem = PlanningProblem(model=MODELS[name], cluster=machine(devices), global_batch=12)
    found = search(problem, ("adaptive",), samples=0)
    assert found.chosen is not None
    step_s = found.chosen.result.step_s.median
    larger = PlanningProblem(model=MODELS[name], cluster=machine(), global_batch=12)
    bound_s = device_bound_s(larger, devices)
    assert 0 < bound_s <= step_s


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_one_device_is_no_faster_than_all_computation(name: str) -> None:
    """Portions of the batch are priced at every size: whole, a batch costs less per sample than one by one."""
    problem = PlanningProblem(model=MODELS[name], cluster=machine(1), global_batch=12)
    plan = some_plan(problem, Mesh(), 1, ("1f1b", 1))
    assert plan is not None
    step_s = simulated_step(problem, plan, fold=True).step_s
    assert 0.5 * step_s < device_bound_s(problem, 1) <= step_s


def test_zero_divides_state_then_gradients_then_parameters() -> None:
    """8 bytes of state, 4 of gradients, 2 of parameters on two tp ranks and four replicas."""
    parts = WeightParts(((2, (8.0, 4.0, 2.0)),))
    assert [parts.bytes_at(stage, copies=4) for stage in ZERO_STAGES] == [14.0, 7.0, 3.5, 1.75]


def test_sets_that_are_left_out_by_their_floor_do_not_fit() -> None:
    """Every recomputed set of random small problems whose components keep much, under random placements."""
    assert sum(map(sets_left_out, range(24))) > 100


def sets_left_out(seed: int) -> int:
    random, count = Random(seed), 0
    shape = random.choice(((2, 2, (2, 4)), (2, 3, (2,)), (1, 3, (4,))))
    draw = hungry(drawn(random, shape), random.choice((0.9, 0.75, 0.6, 0.45)))
    problem = draw.problem()
    found = [replace(plan, recompute="none") for plan in by_hand(problem, random)]
    for plan in found[:4]:
        floor = plan_floor(problem, plan)
        for each in every_set(problem, plan) if floor is not None else ():
            assert floor is not None
            if not floor.may_fit_with(plan.zero_stage, each.recomputed, each.recomputed_by_operator):
                count += 1
                assert any(place_excess_bytes(problem, each)), each.summary()
    return count


@settings(max_examples=60, deadline=None)
@given(question=questions(), data=st.data())
def test_a_plan_that_fits_with_recomputation_is_never_refused_it(
    question: tuple[PlanningProblem, Plan | None], data: st.DataObject
) -> None:
    """On devices of just what the recomputed plan needs; on devices without room for weights it is refused."""
    problem, plan = question
    if plan is None:
        return
    names = sorted(problem.layout(plan).differentiable)
    some = data.draw(st.one_of(st.just(tuple(names)), st.sets(st.sampled_from(names), min_size=1).map(tuple)))
    needed = max(entry.needed_bytes for entry in problem.memory(replace(plan, recompute=some)))
    assert may_fit_recomputing(replace(problem, cluster=machine(memory_bytes=needed)), plan)
    weights = max(entry.line("parameters") for entry in problem.memory(plan))
    assert not may_fit_recomputing(replace(problem, cluster=machine(memory_bytes=weights - 1)), plan)


def test_every_set_of_small_problems_that_fits_is_among_what_recomputation_may_make_fit() -> None:
    """Random placements on devices whose communicators leave little: some plans are refused, none that a set makes fit."""
    refused = 0
    for seed in range(24):
        random = Random(seed)
        draw = drawn(random, random.choice(((2, 2, (2, 4)), (2, 3, (2,)))))
        problem = replace(draw, cluster=replace(draw.cluster, memory_bytes=(2**29 + 2**25,) * 2)).problem()
        for plan in [replace(each, recompute="none") for each in by_hand(problem, random)][:4]:
            fitting = [each for each in every_set(problem, plan) if not any(place_excess_bytes(problem, each))]
            refused += not may_fit_recomputing(problem, plan)
            assert may_fit_recomputing(problem, plan) or not fitting, plan.summary()
    assert refused > 10
