"""Bounds of a search: time, memory, cuts into stages, outlines of large problems; and what they leave out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations, pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import parsim as ps
from experiments.search.asking import drawn, hungry
from experiments.search.never_slower import by_hand
from experiments.search.problems import ClusterDraw, ModelDraw, ProblemDraw, built_model
from parsim.errors import ParsimError
from parsim.model.catalogue.names import named
from parsim.model.catalogue.sublayers import SamplePart, Software
from parsim.model.catalogue.transformer import transformer as transformer_model
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import SWITCHES, ZERO_STAGES, Plan, Stage
from parsim.predict.evaluate import evaluate, simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.search import space as usual
from parsim.search.bound import (
    ROUNDING,
    chain_seconds,
    computation_bound_s,
    device_bound_s,
    least_noise,
    order_bound_s,
    step_bound_s,
)
from parsim.search.by_hand import custom_plan
from parsim.search.families import FAMILIES
from parsim.search.memory_floor import (
    WeightParts,
    floor_excess_bytes,
    least_kept,
    missing_bytes,
    plan_floor,
    weights_are_too_many,
)
from parsim.search.placement.problem import is_chain
from parsim.search.recompute import every_set, may_fit_recomputing, recomputed_to_fit
from parsim.search.search import search
from parsim.search.space import (
    INFINITE,
    Node,
    bucket_sizes,
    count_cuts,
    cuts_by_bound,
    every_cut,
    other_bucket_sizes,
    sums_between,
)
from parsim.search.stages import Cutting, balanced_plan, cut_places, place_excess_bytes
from parsim.search.tensor import uniform_options, uniform_placements
from parsim.search.tree import Incumbents, Members, judged_best_first, outline_bound_s
from tests.machines import PROFILES, machine
from tests.models import chain_model

MODELS = {name: load_model(ModelSpec(name=name)) for name in ("gpt_small", "resnet_small")}
SMALL_LLAMA = (("layers", 3), ("hidden", 256), ("heads", 4), ("kv_heads", 4), ("ffn", 512), ("vocab", 1024), ("seq", 128))
MODELS["llama"] = load_model(ModelSpec(name="llama3-8b", args=SMALL_LLAMA), granularity="sublayer")
MESHES = [Mesh(pp=pp, dp=dp, tp=tp) for pp in (1, 2, 4) for dp in (1, 2, 4) for tp in (1, 2, 4) if 1 < pp * dp * tp <= 8]


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(sorted(MODELS)),
    profile=st.sampled_from(sorted(PROFILES)),
    mesh=st.sampled_from(MESHES),
    microbatches=st.sampled_from((1, 2, 4, 8)),
    order=st.sampled_from((("1f1b", 1), ("gpipe", 1), ("interleaved", 1), ("interleaved", 2), ("zero-bubble", 1))),
    zero_stage=st.sampled_from(ZERO_STAGES),
    bucket_bytes=st.sampled_from((2**16, 2**20, 25 * 2**20)),
    recompute=st.sampled_from(("none", "full")),
    switched=st.sets(st.sampled_from(tuple(SWITCHES))),
)
def test_no_plan_is_simulated_below_its_bound(
    model: str,
    profile: str,
    mesh: Mesh,
    microbatches: int,
    order: tuple[str, int],
    zero_stage: int,
    bucket_bytes: int,
    recompute: str,
    switched: set[str],
) -> None:
    switches = {key: (key in switched) != (key == "backward_prefetch") for key in SWITCHES}
    switches["tensor_overlap"] = switches["tensor_overlap"] and not switches["tensor_backward_overlap"]
    problem = PlanningProblem(
        model=MODELS[model], cluster=machine(8, profile), global_batch=32, switches=tuple(switches.items())
    )
    try:
        plan = some_plan(problem, mesh, microbatches, order)
        plan = replace(plan, zero_stage=zero_stage, bucket_bytes=bucket_bytes, recompute=recompute)
        problem.layout(plan)
    except ParsimError:
        return
    step_s = evaluate(problem, plan, samples=0, fold=True).result.step_s.median
    assert computation_bound_s(problem, plan) <= step_bound_s(problem, plan) * (1 + 1e-12)
    assert step_bound_s(problem, plan) <= step_s
    least_s = some_cutting(problem, mesh, microbatches, order).least_s(cut_of(plan))
    assert least_s * least_noise(problem, mesh.size) * ROUNDING <= step_s


def some_cutting(problem: PlanningProblem, mesh: Mesh, microbatches: int, order: tuple[str, int]) -> Cutting:
    return Cutting(
        problem=problem,
        strategy="custom",
        mesh=mesh,
        microbatches=microbatches,
        order=order[0],
        chunks=order[1],
        placements=uniform_placements(problem, Mesh(dp=mesh.dp, tp=mesh.tp)) if mesh.tp > 1 else {},
    )


def some_plan(problem: PlanningProblem, mesh: Mesh, microbatches: int, order: tuple[str, int]) -> Plan:
    cutting = some_cutting(problem, mesh, microbatches, order)
    return cutting.fitting() or cutting.fastest()


def cut_of(plan: Plan) -> tuple[tuple[int, int], ...]:
    return tuple(pairwise(accumulate((len(stage.components) for stage in plan.stages), initial=0)))


def test_a_cut_is_bounded_by_its_stages_without_being_laid_out() -> None:
    """The bound of the plan adds conversions and transfers to that of its stages."""
    problem = PlanningProblem(model=chain_model(), cluster=machine(4), global_batch=16)
    for order in (("1f1b", 1), ("gpipe", 1), ("interleaved", 1)):
        cutting = some_cutting(problem, Mesh(pp=4), 8, order)
        assert cutting.least_s() == cutting.least_s(cut_of(cutting.fastest()))
        assert 0 < cutting.least_s() * ROUNDING <= computation_bound_s(problem, cutting.fastest())


@settings(max_examples=30, deadline=None)
@given(
    elements=st.sampled_from((1_000, 3_000_000, 40_000_000)),
    mesh=st.sampled_from(MESHES),
    microbatches=st.sampled_from((1, 4)),
    memory_gib=st.sampled_from((0.9, 1.5, 3.0)),
    zero_stage=st.sampled_from((0, 1, 3)),
)
def test_what_is_left_out_for_its_memory_does_not_fit(
    elements: int, mesh: Mesh, microbatches: int, memory_gib: float, zero_stage: int
) -> None:
    model = chain_model((1e9,) * 5, elements=elements)
    cluster = machine(memory_bytes=int(memory_gib * 2**30))
    problem = PlanningProblem(model=model, cluster=cluster, global_batch=64, zero_stage=zero_stage)
    options = tuple(uniform_options(problem, component, mesh.tp, divides=True) for component in model.components)
    if missing_bytes(problem, mesh, microbatches, options):
        for recompute in ("none", "full"):
            plan = replace(some_plan(problem, mesh, microbatches, ("1f1b", 1)), recompute=recompute, zero_stage=zero_stage)
            assert not all(entry.fits for entry in problem.memory(plan))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_branch_and_bound_finds_the_best_of_all_members(family: str, profile: str) -> None:
    problem = PlanningProblem(
        model=chain_model((4e9, 2e9, 6e9, 2e9), elements=3_000_000),
        cluster=machine(4, profile),
        global_batch=8,
    )
    best = min(evaluate(problem, plan, samples=0, fold=True).result.step_s.median for plan in FAMILIES[family](problem))
    found = search(problem, (family,), samples=0)
    assert found.chosen is not None
    assert found.chosen.result.step_s.median <= best * (1 + 1e-12)  # less where other cuts or buckets are faster
    assert found.judged < len(list(FAMILIES[family](problem))) or family == "single"


def chain_plan(strategy: str, mesh: Mesh, batch: int, microbatches: int, **keys: Any) -> Plan:
    components = tuple(component.name for component in chain_model().components)
    stages = (Stage(components=components, ranks=mesh.stage_ranks(0)),)
    return Plan(strategy=strategy, mesh=mesh, stages=stages, global_batch=batch, microbatches=microbatches, **keys)


def test_plans_that_have_a_bound_are_judged_when_no_more_parts_may_be_opened() -> None:
    """Forty parts with bounds of 1 s open into plans with bounds above that. Twenty may be opened, which had judged no plan."""
    plans = [chain_plan("single", Mesh(), 64, 64, bucket_bytes=size) for size in range(1, 41)]
    seconds = {plan: 4.0 - 0.01 * number for number, plan in enumerate(plans)}

    def opened(plan: Plan) -> list[Node]:
        return [Node(seconds[plan] - 2.0, 1, plan=plan)]

    parts = [Node(1.0, 1, partial(opened, plan)) for plan in plans]
    judged, tally = judged_best_first(
        parts, excess_bytes=lambda _: 0, judge=seconds.__getitem__, incumbents=Incumbents(), most=20, singles=5
    )
    assert min(entry.step_s for entry in judged) == min(seconds[plan] for plan in plans[:20])
    assert tally.simulated <= 5
    assert tally.considered == 40


def test_what_may_be_judged_in_place_of_a_plan_is_opened_with_the_plans() -> None:
    """The plan does not fit; with recomputation it does, and is the best known."""
    plain = chain_plan("single", Mesh(), 16, 1)
    again = replace(plain, recompute="full")
    stands_in = Node(1.5, 1, lambda: [Node(1.5, 1, plan=again)], instead_of_one=True)
    parts = [Node(1.0, 1, lambda: [Node(1.4, 1, plan=plain, instead=lambda: iter([stands_in]))])]
    parts += [Node(1.1, 1, lambda: [Node(9.0, 0, list)]) for _ in range(40)]
    judged, _ = judged_best_first(
        parts,
        excess_bytes=lambda plan: 0 if plan.recomputes else 5,
        judge=lambda _: 2.0,
        incumbents=Incumbents(),
        most=20,
        singles=5,
    )
    assert [entry.plan for entry in judged] == [again]


def test_the_plan_shown_where_none_fits_is_the_closest_one() -> None:
    """A bound of 1 byte may stand for plans that need 600: it is no reason to show one of them beside a plan that needs 22."""
    near, far = (chain_plan("dp", Mesh(dp=2), 16, count) for count in (8, 1))
    over = {near: 22, far: 600}
    bounded = Node(0.0, 1, lambda: [Node(0.0, 1, plan=far)], missing_bytes=lambda: 1.0)
    known = Node(0.0, 1, plan=far, over_bytes=2.0)
    for parts in ([bounded, Node(0.0, 1, plan=near)], [known, Node(0.0, 1, plan=near)], [Node(0.0, 1, plan=near), known]):
        judged, tally = judged_best_first(
            parts, excess_bytes=over.__getitem__, judge=lambda _: 1.0, incumbents=Incumbents(), late=[]
        )
        assert [(entry.plan, entry.fits) for entry in judged] == [(near, False)]
        assert tally.too_large == 2


def gpt_on(memory_bytes: int) -> PlanningProblem:
    cluster = machine(2, memory_bytes=memory_bytes)
    numerics = Numerics(precision="amp_fp16")
    return PlanningProblem(model=MODELS["gpt_small"], cluster=cluster, global_batch=64, numerics=numerics)


def test_where_none_fits_the_plan_shown_recomputes_if_that_needs_less() -> None:
    """ "devices of so much would do" must not leave out what the search itself would have chosen on them."""
    problem = gpt_on(2**29)
    found = search(problem, ["dp"])
    assert found.chosen is None
    nearest = found.candidates[0].result
    plain = evaluate(problem, replace(nearest.plan, recompute="none"), samples=0)
    assert nearest.plan.recomputes
    assert max(nearest.peak_memory_bytes) < max(plain.result.peak_memory_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["single", "dp", "mp"])
@pytest.mark.parametrize("memory_bytes", [2**26, 2**28, 2**29])
def test_no_plan_of_a_family_needs_less_than_the_one_shown_where_none_fits(family: str, memory_bytes: int) -> None:
    """Where weights alone are too much, plans of all microbatches have the same bound, and activations tell them apart."""
    problem = gpt_on(memory_bytes)
    found = search(problem, [family], samples=0)
    assert found.chosen is None

    def needed(plan: Plan) -> int:
        return max(rank.needed_bytes for rank in problem.memory(plan))

    members = [replace(plan, recompute=word) for plan in FAMILIES[family](problem) for word in ("none", "full")]
    assert needed(found.candidates[0].result.plan) <= 1.01 * min(map(needed, members))


def heavy_on(devices: int) -> PlanningProblem:
    """One component that fills a device."""
    model = chain_model((4e9,), elements=1_600_000_000)
    return PlanningProblem(model=model, cluster=machine(devices, memory_bytes=4 * 2**30), global_batch=4)


def test_where_none_fits_the_plan_shown_gathers_no_more_than_it_saves() -> None:
    """ZeRO 3 gathers the component whole, beside its part of the states, and needs more than ZeRO 2."""
    problem = heavy_on(2)
    nearest = search(problem, ["dp"], samples=0).candidates[0].result.plan
    by_stage = [max(rank.needed_bytes for rank in problem.memory(replace(nearest, zero_stage=own))) for own in ZERO_STAGES]
    assert by_stage[2] < by_stage[3]
    assert by_stage[nearest.zero_stage] == min(by_stage)


def test_where_none_fits_a_few_bytes_are_no_reason_for_more_microbatches() -> None:
    """All microbatches of one device need what its weights need, and short ones take much longer."""
    assert search(heavy_on(1), ["single"], samples=0).candidates[0].result.plan.microbatches == 1


# Bounds of memory, of what must be recomputed, of the order of blocks and of fewer devices: never above what is predicted.

SMALL_MESHES = [Mesh(pp=pp, dp=dp, tp=tp) for pp in (1, 2, 4) for dp in (1, 2) for tp in (1, 2) if pp * dp * tp <= 8]
ORDERS = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1))


def small_llama():  # type: ignore[no-untyped-def]
    known = named("llama3-8b")
    assert known is not None
    assert known.shape is not None
    shape = replace(known.shape, layers=3, hidden=512, heads=8, vocab=1024)
    return transformer_model(shape, Software(flash=True, dropout=False), SamplePart(tokens=128, context=128), "sublayer")


FLOOR_MODELS = {
    "gpt": load_model(ModelSpec(name="gpt_small")),
    "resnet": load_model(ModelSpec(name="resnet_small")),
    "vit": load_model(ModelSpec(name="vit_small")),
    "llama": small_llama(),
}


def plan_of_floors(problem: PlanningProblem, mesh: Mesh, microbatches: int, order: tuple[str, int]) -> Plan:
    """Hypothesis draws again where the model has no such plan."""
    try:
        placements = uniform_placements(problem, Mesh(dp=mesh.dp, tp=mesh.tp)) if mesh.tp > 1 else None
        plan = balanced_plan(
            problem, "custom", mesh, microbatches=microbatches, pipeline_order=order[0], chunks=order[1], placements=placements
        )
        problem.layout(plan)
    except ParsimError:
        reject()
    return plan


@st.composite
def questions(draw: st.DrawFn) -> tuple[PlanningProblem, Plan]:
    """A problem on devices without memory, and a plan of it; drawn again where there is none with so many stages."""
    problem = PlanningProblem(
        model=FLOOR_MODELS[draw(st.sampled_from(sorted(FLOOR_MODELS)))],
        cluster=machine(memory_bytes=1),
        global_batch=32,
        numerics=Numerics(precision=draw(st.sampled_from(("fp32", "amp_fp16")))),
    )
    mesh, microbatches = draw(st.sampled_from(SMALL_MESHES)), draw(st.sampled_from((1, 2, 4, 8)))
    plan = plan_of_floors(problem, mesh, microbatches, draw(st.sampled_from(ORDERS)))
    return problem, replace(plan, zero_stage=draw(st.sampled_from(ZERO_STAGES)))


@settings(max_examples=60, deadline=None)
@given(question=questions(), data=st.data())
def test_no_plan_holds_less_than_its_floor_whatever_it_recomputes(
    question: tuple[PlanningProblem, Plan], data: st.DataObject
) -> None:
    """With no memory at all, the excess is what a rank holds."""
    problem, plan = question
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
    model=st.sampled_from(sorted(FLOOR_MODELS)),
    mesh=st.sampled_from(SMALL_MESHES),
    microbatches=st.sampled_from((1, 2, 4)),
    order=st.sampled_from(ORDERS[:3]),
    share=st.floats(0.3, 1.0),
)
def test_a_plan_recomputes_no_less_than_its_bound(
    model: str, mesh: Mesh, microbatches: int, order: tuple[str, int], share: float
) -> None:
    ample = PlanningProblem(model=FLOOR_MODELS[model], cluster=machine(memory_bytes=32 * 2**30), global_batch=32)
    plan = plan_of_floors(ample, mesh, microbatches, order)
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
    model=st.sampled_from(sorted(FLOOR_MODELS)),
    mesh=st.sampled_from([mesh for mesh in SMALL_MESHES if mesh.pp > 1]),
    microbatches=st.sampled_from((1, 2, 4, 8)),
    order=st.sampled_from(ORDERS),
    recompute=st.sampled_from(("none", "full")),
)
def test_no_pipeline_ends_before_the_order_of_its_blocks_lets_it(
    model: str, mesh: Mesh, microbatches: int, order: tuple[str, int], recompute: str
) -> None:
    problem = PlanningProblem(model=FLOOR_MODELS[model], cluster=machine(), global_batch=32)
    plan = plan_of_floors(problem, mesh, microbatches, order)
    plan = replace(plan, recompute=recompute)
    assert order_bound_s(problem, plan) <= simulated_step(problem, plan, fold=True).step_s


def test_a_second_forward_may_run_before_the_gradient_comes() -> None:
    """An earlier bound by the order of blocks let it wait: a plan of 6.4 ms was bounded by 6.8 ms, and left out."""
    problem = PlanningProblem(model=FLOOR_MODELS["gpt"], cluster=machine(), global_batch=32)
    plan = plan_of_floors(problem, Mesh(pp=2), 1, ("1f1b", 1))
    plan = replace(plan, recompute="full")
    assert order_bound_s(problem, plan) <= simulated_step(problem, plan, fold=True).step_s


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "resnet"])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_no_plan_on_fewer_devices_is_faster_than_all_computation_divided_evenly(name: str, devices: int) -> None:
    problem = PlanningProblem(model=FLOOR_MODELS[name], cluster=machine(devices), global_batch=12)
    found = search(problem, ("adaptive",), samples=0)
    assert found.chosen is not None
    step_s = found.chosen.result.step_s.median
    larger = PlanningProblem(model=FLOOR_MODELS[name], cluster=machine(), global_batch=12)
    bound_s = device_bound_s(larger, devices)
    assert 0 < bound_s <= step_s


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_one_device_is_no_faster_than_all_computation(name: str) -> None:
    """Portions of the batch are priced at every size: whole, a batch costs less per sample than one by one."""
    problem = PlanningProblem(model=FLOOR_MODELS[name], cluster=machine(1), global_batch=12)
    plan = plan_of_floors(problem, Mesh(), 1, ("1f1b", 1))
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
    question: tuple[PlanningProblem, Plan], data: st.DataObject
) -> None:
    """On devices of just what the recomputed plan needs; on devices without room for weights it is refused."""
    problem, plan = question
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


# Cuts into stages by their bounds, the order of blocks, and models whose stages do not wait for one another.


@pytest.mark.parametrize("seed", range(20))
def test_every_cut_is_listed_once_by_its_own_bound(seed: int) -> None:
    random = Random(seed)
    count, microbatches = random.randint(2, 7), random.randint(1, 8)
    stages = random.randint(1, count)
    speeds = [random.uniform(0.5, 2) for _ in range(stages)]
    seconds = np.array([random.uniform(0.1, 3) for _ in range(count)])
    up_to = np.concatenate([[0.0], np.cumsum(seconds)])
    some = np.tri(count + 1, k=-1, dtype=bool)

    def stage_s(stage: int) -> np.ndarray:
        return np.where(some, sums_between(up_to) * speeds[stage], INFINITE)

    before = up_to * min(speeds)
    found = list(cuts_by_bound(count, stages, stage_s, before, microbatches))
    bounds = [bound for bound, _ in found]
    assert bounds == sorted(bounds)
    expected = [tuple(pairwise((0, *inner, count))) for inner in combinations(range(1, count), stages - 1)]
    assert sorted(cut for _, cut in found) == sorted(expected) == sorted(every_cut(count, stages))
    assert len(found) == count_cuts(count, stages)
    for bound, cut in found:
        own = max(before[first] + microbatches * stage_s(number)[last, first] for number, (first, last) in enumerate(cut))
        assert bound == pytest.approx(own, rel=1e-12)


def draw(**changes: object) -> ProblemDraw:
    """Two devices of one type, and three components before the loss."""
    model = ModelDraw(flop=(2e10,) * 3, elements=(640_000,) * 3, width=(640,) * 3, saved_bytes=(1000,) * 3, cut=(False,) * 3)
    cluster = ClusterDraw(
        kinds=(0, 0),
        peak_flop_per_s=(1e13, 1e13),
        memory_bandwidth=(1e12, 1e12),
        wiring="switch",
        link_bandwidth=1e10,
        link_latency_s=1e-6,
    )
    return replace(ProblemDraw(model=model, cluster=cluster, global_batch=4), **changes)  # type: ignore[arg-type]


def two_towers() -> Model:
    """c0 and c1 read the batch alone, c2 reads both."""
    model = built_model(draw().model)
    inputs = {"c1": ("input:0",), "c2": ("c0:0", "c1:0")}
    some = tuple(replace(each, inputs=inputs.get(each.name, each.inputs)) for each in model.components)
    return replace(model, components=some)


def test_towers_that_run_beside_one_another_are_not_bounded_as_a_chain() -> None:
    """With one microbatch two stages compute at the same time, which a chain cannot."""
    problem = replace(draw().problem(zero_stage=0, recompute="none"), model=two_towers())
    assert is_chain(draw().problem())
    assert not is_chain(problem)
    mesh = Mesh(pp=2)
    plan = custom_plan(problem, mesh, microbatches=1, pipeline_order="gpipe")
    step_s = evaluate(problem, plan, samples=0).result.step_s.median
    assert all(node.bound_s <= step_s for node in Members(problem, "mp").of_mesh(mesh))
    found = search(problem, ("mp",), samples=0)
    assert found.chosen is not None
    assert found.chosen.result.step_s.median <= step_s * (1 + 1e-9)


def test_a_slow_first_device_does_not_bound_plans_on_faster_ones() -> None:
    """What one slow device takes alone was kept for pipelines over it and a faster one, which were left out then."""
    some = draw(cluster=replace(draw().cluster, kinds=(1, 0), peak_flop_per_s=(1e13, 2e12)))
    problem = some.problem(zero_stage=0, recompute="none")
    hand = custom_plan(problem, Mesh(pp=2), microbatches=4)
    best = search(problem, ("adaptive",), samples=0).chosen
    assert best is not None
    assert best.result.step_s.median <= evaluate(problem, hand, samples=0).result.step_s.median * (1 + 1e-9)


@pytest.mark.slow
def test_a_search_that_may_open_no_more_parts_judges_the_plans_it_has_bounded() -> None:
    """By enumeration the best plan of problem 577 has its first two components on one device, and the others on the other one.
    It was among 2,000 parts that were opened, its bound 3% below its step, and it waited behind parts of lower bounds."""
    model = ModelDraw(
        flop=(536645829.0,) * 3, elements=(22657728,) * 3, width=(64192,) * 3, saved_bytes=(1035,) * 3, cut=(False, True, True)
    )
    machine = ClusterDraw(
        kinds=(1, 0),
        peak_flop_per_s=(31090060316801.727, 34200688404103.473),
        memory_bandwidth=(1419567095138.423, 194495638592.65024),
        wiring="mesh",
        link_bandwidth=2728486818.2206306,
        link_latency_s=5.7692044137157526e-06,
        network="ethernet-25g",
        memory_bytes=(1191269660, 1786904490),
    )
    problem = ProblemDraw(model=model, cluster=machine, global_batch=4, optimizer="adam").problem()
    mesh, names = Mesh(tp=2), tuple(component.name for component in problem.model.components)
    alone = [Placement("place", shard=shard) for shard in (1, 1, 0, 0)]
    stage = Stage(components=names, ranks=(0, 1), placements=tuple(alone))
    hand = Plan(strategy="custom", mesh=mesh, stages=(stage,), global_batch=4, microbatches=1)
    best = search(problem, ("adaptive",), samples=0).chosen
    assert best is not None
    assert best.result.step_s.median <= evaluate(problem, hand, samples=0).result.step_s.median * (1 + 1e-9)


def test_every_size_that_makes_other_buckets_is_tried_where_there_are_few() -> None:
    problem = draw().problem(zero_stage=0)
    plan = custom_plan(problem, Mesh(dp=2))
    made = set()
    for size in (*bucket_sizes(problem), *other_bucket_sizes(problem, problem.layout(plan))):
        buckets = problem.layout(replace(plan, bucket_bytes=size)).buckets
        made.add(tuple(len(bucket.parameters) for bucket in buckets))
    assert made == {(1, 1, 1), (2, 1), (3,)}


# Searches of large problems: outlines are bounded and ordered, an answer comes, and it is as fast as what people choose.


def transformer(layers: int = 4) -> Model:
    """A Llama of that many layers, cut into halves of blocks, without torch."""
    args = (("hidden", 512), ("layers", layers), ("seq", 256))
    return load_model(ModelSpec(name="llama3-8b", args=args), granularity="sublayer")


@pytest.fixture(scope="module")
def problem() -> PlanningProblem:
    return PlanningProblem(
        model=transformer(), cluster=machine(), global_batch=16, numerics=Numerics(precision="amp_fp16", optimizer="adam")
    )


@pytest.mark.parametrize("mesh", [Mesh(dp=8), Mesh(dp=2, tp=4), Mesh(pp=2, dp=2, tp=2), Mesh(pp=4, tp=2)], ids=str)
@pytest.mark.parametrize("order", [("1f1b", 1), ("interleaved", 2), ("gpipe", 1)], ids=str)
def test_no_plan_of_an_outline_is_simulated_below_its_bound(
    problem: PlanningProblem, mesh: Mesh, order: tuple[str, int]
) -> None:
    if mesh.pp == 1 and order[1] > 1:
        pytest.skip("no pipeline")
    count = 2 if mesh.dp == 8 else 4
    placed = uniform_placements(problem, replace(mesh, pp=1), divides=False) if mesh.tp > 1 else {}
    bound_s = outline_bound_s(problem, mesh, count, order, mixed=False)
    cutting = Cutting(
        problem=problem, strategy="hp", mesh=mesh, microbatches=count, order=order[0], chunks=order[1], placements=placed
    )
    fastest = cutting.fastest()
    for stage in (0, 3):
        for recompute in ("none", "full"):
            plan = replace(fastest, zero_stage=stage, recompute=recompute)
            step_s = simulated_step(problem, plan, fold=True).step_s
            assert bound_s <= step_s
            assert step_bound_s(problem, plan) <= step_s


def test_the_seconds_of_a_chain_add_up_to_those_of_one_stage(problem: PlanningProblem) -> None:
    """Data parallelism on one stage computes one microbatch after the other."""
    chain = chain_seconds(problem, Mesh(dp=8), 2, {})
    plan = Cutting(problem=problem, strategy="dp", mesh=Mesh(dp=8), microbatches=2, order="1f1b", placements={}).fastest()
    assert 2 * (chain.forward_s + chain.backward_s) <= simulated_step(problem, plan, fold=True).step_s


@pytest.mark.slow
def test_a_search_that_is_treated_as_large_finds_as_fast_a_plan(
    problem: PlanningProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the families; mixed placements are late parts of large problems, and few of these are opened."""
    asked = replace(problem, global_batch=8)
    whole = search(asked, ("dp", "mp"), samples=0).chosen
    monkeypatch.setattr(usual, "LARGE", 0)
    found = search(replace(asked), ("dp", "mp"), samples=0).chosen
    assert whole is not None
    assert found is not None
    assert found.result.step_s.median <= whole.result.step_s.median * 1.01


def test_an_answer_comes_although_the_allowance_is_spent(problem: PlanningProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(problem, global_batch=8)
    monkeypatch.setattr(usual, "LARGE", 0)
    monkeypatch.setattr(usual, "MOST_VISITS", 1)
    monkeypatch.setattr(usual, "MOST_MISSES", 10**9)
    found = search(asked, ("dp", "mp"), samples=0)
    assert found.chosen is not None
    assert found.chosen.result.fits
    assert found.tally.untried > 0


def test_the_recomputation_that_keeps_least_keeps_no_more_than_all_of_it(problem: PlanningProblem) -> None:
    """Nor more than nothing recomputed."""
    least = least_kept(problem)
    cutting = Cutting(problem=problem, strategy="mp", mesh=Mesh(pp=2), microbatches=4, order="1f1b", placements={})
    kept = [
        sum(dict(entry.lines)["activations"] for entry in problem.memory(replace(cutting.fastest(), recompute=recompute)))
        for recompute in (least.recompute, "full", "none")
    ]
    assert kept[0] <= kept[1] < kept[2]


def test_stages_that_hold_fewer_microbatches_are_longer_where_equal_ones_do_not_fit() -> None:
    """The first of four stages holds four microbatches, the last one holds one."""
    model = chain_model((1e9,) * 24, width=2**20)
    asked = PlanningProblem(model=model, cluster=machine(4), global_batch=256)
    cutting = Cutting(problem=asked, strategy="mp", mesh=Mesh(pp=4), microbatches=8, order="1f1b", placements={})
    equal = cutting.fastest()
    totals = [entry.needed_bytes for entry in asked.memory(equal)]
    limit = round(0.9 * max(totals) + 0.1 * min(totals))
    tight = replace(asked, cluster=machine(4, memory_bytes=limit))
    assert any(place_excess_bytes(tight, equal))
    kept = np.array([component.saved_activation_bytes * equal.microbatch_samples for component in model.components])
    found = replace(cutting, problem=tight).fitting_recomputed("none", kept)
    assert found is not None
    assert not any(place_excess_bytes(tight, found))
    assert len(found.stages[0].components) < len(found.stages[-1].components)


def test_models_of_many_components_are_cut_between_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer(40)
    names = [component.name for component in model.components]

    def places() -> tuple[int, ...]:
        return cut_places(PlanningProblem(model=model, cluster=machine(1), global_batch=1))

    assert places() == tuple(range(len(names) + 1))
    monkeypatch.setattr("parsim.search.stages.MOST_PLACES", 50)
    monkeypatch.setattr("parsim.search.stages.MOSTLY", 0.8)
    inner = [names[place] for place in places()[2:-4]]
    assert len(inner) > 30
    assert len({name.split(".")[-1] for name in inner}) == 1


@pytest.mark.slow
def test_a_large_model_on_64_gpus_is_planned_no_slower_than_by_hand() -> None:
    """What the user calls: without any constraint, against tensor parallelism in the node and a pipeline over nodes, at the
    prices of one framework: what is guessed of it depends on what was asked."""

    def planned(**settings: object) -> ps.Answer:
        keys = {"model.args.seq": 8192, "software.framework": "megatron", **settings}
        return ps.plan("llama3-70b", cluster="64xh100-sxm", network="infiniband-400g", global_batch=512, settings=keys)

    free = planned()
    assert free.fits
    assert free.chosen is not None
    for pp in (2, 4):
        by_hand = planned(**{"plan.mesh": {"pp": pp, "dp": 8 // pp, "tp": 8}, "plan.pipeline_order": "1f1b"})
        assert by_hand.chosen is not None
        assert free.chosen.step_s.median <= by_hand.chosen.step_s.median
    assert free.search is not None
    assert free.search.tally.considered > free.search.tally.simulated


@pytest.mark.parametrize("devices", [4, 6, 8])
def test_where_weights_alone_are_too_many_no_plan_on_so_many_devices_fits(devices: int) -> None:
    """Devices that could hold an equal share of all weights, or just not; then none of the plans on fewer of them is opened."""
    question = PlanningProblem(
        model=transformer(2), cluster=machine(), global_batch=24, numerics=Numerics(precision="amp_fp16", optimizer="adam")
    )
    elements = sum(parameter.elements for parameter in question.model.trainable_parameters)
    share = 16 * elements // devices
    for room, too_many in ((share + 2**20, False), (share - 2**20, True)):
        asked = replace(question, cluster=machine(memory_bytes=room, context_bytes=0))
        assert weights_are_too_many(asked, devices) == too_many
        assert not weights_are_too_many(asked, devices + 1)
        for plan in FAMILIES["dp"](asked) if too_many else ():
            if plan.world_size <= devices:
                assert not all(entry.fits for entry in asked.memory(plan))


def test_a_large_question_of_which_nothing_fits_opens_no_plans_on_fewer_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal share of the weights is too much for each of eight devices, and so for each of fewer."""
    monkeypatch.setattr(usual, "LARGE", 0)
    opened = []

    def of_mesh(members: Members, mesh: Mesh) -> list[Node]:
        opened.append(mesh.size)
        return found_on(members, mesh)

    found_on = Members.of_mesh
    monkeypatch.setattr(Members, "of_mesh", of_mesh)
    question = PlanningProblem(
        model=transformer(2),
        cluster=machine(memory_bytes=2**27),
        global_batch=24,
        numerics=Numerics(precision="amp_fp16", optimizer="adam"),
    )
    found = search(question, ("dp",), samples=0)
    assert found.chosen is None
    assert set(opened) == {8}
    assert found.tally.too_large == found.tally.considered
