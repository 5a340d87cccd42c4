"""The lower bounds by which a search leaves plans out: below what is simulated, for random plans; and what they leave out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.errors import ParsimError
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import SWITCHES, ZERO_STAGES, Plan, Stage
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.bound import ROUNDING, computation_bound_s, least_noise, step_bound_s
from parsim.search.families import FAMILIES
from parsim.search.memory_floor import missing_bytes
from parsim.search.search import search
from parsim.search.space import Node
from parsim.search.stages import Cutting
from parsim.search.tensor import uniform_options, uniform_placements
from parsim.search.tree import Incumbents, judged_best_first
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
