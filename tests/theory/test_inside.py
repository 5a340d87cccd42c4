"""Divided sequences and experts against closed forms: the ring, the volumes, what is conserved, and folding."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.app.launch import check_runnable
from parsim.engines.static import compile_graph, simulate
from parsim.errors import PlanError
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import profile_from_parts
from parsim.model.component import Component, InnerExchange
from parsim.model.divided import ExpertRouting, busiest_share, divided_model, places_visited
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.plans.layouts import Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import CONTEXT_EXCHANGES, Plan, Stage
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.program.lower import lower
from parsim.program.passes.inside import inner_steps
from parsim.program.taskgraph import TaskGraph, parse_work, work_text
from parsim.work import Collective, Compute, Phase
from tests.models import chain_model
from tests.sequence_model import ACTIVE, EXPERTS, HIDDEN, LAYERS, SEQ, sequence_model
from tests.theory.test_folding import assert_same_answer

MODEL = sequence_model()
NAMES = tuple(component.name for component in MODEL.components)
BATCH = 32


def plan_on(mesh: Mesh, *, microbatches: int = 2, order: str = "1f1b", sharded: bool = True, **more: object) -> Plan:
    cuts = [round(len(NAMES) * stage / mesh.pp) for stage in range(mesh.pp + 1)]
    heads = Placement("shard", rule="heads", ways=mesh.tp)
    stages = tuple(
        Stage(
            components=NAMES[first:last],
            ranks=mesh.stage_ranks(number),
            placements=tuple(heads if name.startswith("h.") and sharded else Placement("batch") for name in NAMES[first:last])
            if mesh.tp > 1
            else (),
        )
        for number, (first, last) in enumerate(itertools.pairwise(cuts))
    )
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=stages,
        global_batch=BATCH,
        microbatches=microbatches,
        pipeline_order=order,
        **more,  # type: ignore[arg-type]
    )


@cache
def machine() -> Cluster:
    return cluster_from_profile(profile_from_parts("h100-sxm", 8), nodes=2, network="infiniband-400g")


def question(model: Model = MODEL, **more: object) -> PlanningProblem:
    return PlanningProblem(
        model=model,
        cluster=machine(),
        global_batch=BATCH,
        numerics=Numerics(precision="bf16", optimizer="adamw"),
        **more,  # type: ignore[arg-type]
    )


def program(plan: Plan) -> TaskGraph:
    return lower(plan, question().model_on(plan.mesh, plan.context_exchange))


@pytest.mark.parametrize("ways", [2, 4, 8])
@pytest.mark.parametrize(("block_s", "shift_s"), [(1.0, 0.25), (1.0, 0.7), (1.0, 3.0)])
def test_a_ring_takes_as_long_as_its_closed_form(ways: int, block_s: float, shift_s: float) -> None:
    """r + a + (n - 1) max(a, x) + r forward; r + a' + (n - 1) max(a', 2x) + x + r backward."""
    graph = program(plan_on(Mesh(cp=ways), microbatches=1))
    rest_s, back_s = 0.125, 2 * block_s
    shifts = [t for t in graph.tasks if isinstance(t.work, Collective) and t.work.operation == "ring_shift"]
    assert len({task.work.size_bytes for task in shifts}) == 2, "single and, in the backward, double shifts"  # type: ignore[union-attr]
    least = min(task.work.size_bytes for task in shifts)  # type: ignore[union-attr]
    durations = []
    for task in graph.tasks:
        work, seconds = task.work, 0.0
        if task.origin.component == "h.1" and isinstance(work, Compute):
            block = block_s if work.phase is Phase.FORWARD else back_s
            seconds = {"rest": rest_s, "attention": block, "experts": 0.0}[work.part]
        elif task.origin.component == "h.1" and isinstance(work, Collective):
            seconds = shift_s * work.size_bytes / least
        durations.append(seconds)
    timeline = simulate(compile_graph(graph), np.array(durations))
    for phase, block, moved, last in ((Phase.FORWARD, block_s, shift_s, 0.0), (Phase.BACKWARD, back_s, 2 * shift_s, shift_s)):
        own = [
            (timeline.start_s[row], timeline.end_s[row])
            for row, task in enumerate(timeline.task.tolist())
            if isinstance(work := graph.tasks[task].work, Compute) and work.component == "h.1" and work.phase is phase
        ]
        length = max(end for _, end in own) - min(start for start, _ in own)
        assert length == pytest.approx(2 * rest_s + block + (ways - 1) * max(block, moved) + last, rel=1e-12)


def collectives(graph: TaskGraph, operation: str, name: str = "h.1") -> list[Collective]:
    return [
        task.work
        for task in graph.tasks
        if isinstance(task.work, Collective) and task.work.operation == operation and task.origin.component == name
    ]


@pytest.mark.parametrize("ways", [2, 4])
def test_a_ring_sends_all_but_a_ranks_own_keys_and_values(ways: int) -> None:
    plan = plan_on(Mesh(dp=2, cp=ways), microbatches=1)
    sent = collectives(program(plan), "ring_shift")
    whole = 2 * 2 * SEQ * HIDDEN * plan.microbatch_samples
    forward = (ways - 1) * whole / ways
    backward = 2 * forward + whole / ways
    assert sum(work.size_bytes for work in sent) == 2 * (forward + backward), "two groups of the dp axis"
    assert {work.group for work in sent} == {tuple(range(first, first + ways)) for first in (0, ways)}


def test_gathering_moves_keys_and_values_whole() -> None:
    graph = program(plan_on(Mesh(cp=4), microbatches=1, context_exchange="all_gather"))
    whole = 2 * 2 * SEQ * HIDDEN * BATCH
    assert [work.size_bytes for work in collectives(graph, "all_gather")] == [whole, whole]
    assert [work.size_bytes for work in collectives(graph, "reduce_scatter")] == [whole]


@pytest.mark.parametrize("capacity", [0.0, 1.5])
def test_tokens_travel_to_their_experts_and_back(capacity: float) -> None:
    plan = plan_on(Mesh(dp=8, ep=4))
    graph = lower(plan, question(routing=ExpertRouting(capacity_factor=capacity)).model_on(plan.mesh))
    sent = collectives(graph, "all_to_all")
    visits = SEQ * ACTIVE * plan.microbatch_samples
    assert {work.size_bytes for work in sent} == {round(2 * visits * HIDDEN * (capacity or 1.0))}
    assert len(sent) == 4 * plan.microbatches * 2, "there and back, forward and backward, of two groups"
    assert {work.group for work in sent} == {(0, 1, 2, 3), (4, 5, 6, 7)}


def test_gradients_of_divided_experts_are_summed_over_those_that_hold_the_same() -> None:
    problem, plan = question(), plan_on(Mesh(dp=8, ep=4))
    groups = {bucket.group for bucket in problem.layout(plan).buckets if ".experts." in bucket.parameters[0].name}
    assert groups == {(first, first + 4) for first in range(4)}
    whole, divided = (problem.memory(entry)[0] for entry in (plan_on(Mesh(dp=8)), plan))
    expert_bytes = 2 * LAYERS * EXPERTS * HIDDEN**2
    assert whole.line("parameters") - divided.line("parameters") == expert_bytes * 3 // 4
    assert whole.line("gradients") - divided.line("gradients") == expert_bytes * 3 // 4


def test_one_piece_and_whole_experts_are_the_plan_without_the_axes() -> None:
    problem, plan = question(), plan_on(Mesh(pp=2, dp=2, tp=2))
    assert problem.model_on(plan.mesh) is problem.model
    assert replace(plan, mesh=Mesh(pp=2, dp=2, tp=2, cp=1, ep=1)).to_json() == plan.to_json()
    assert not {"cp", "ep", "context_exchange", "executable"} & {*plan.to_dict(), *plan.to_dict()["mesh"]}
    assert all(not isinstance(task.work, Compute) or not task.work.part for task in program(plan).tasks)


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from([Mesh(cp=2), Mesh(dp=2, cp=4), Mesh(dp=4, ep=2), Mesh(pp=2, cp=2, tp=2), Mesh(pp=2, dp=2, cp=2, ep=4)]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from(CONTEXT_EXCHANGES),
    st.sampled_from(["1f1b", "gpipe", "zero-bubble"]),
    st.sampled_from(["none", "full"]),
)
def test_folded_equals_unfolded(mesh: Mesh, zero_stage: int, exchange: str, order: str, recompute: str) -> None:
    more = {"context_exchange": exchange} if mesh.cp > 1 else {}
    order = order if mesh.pp > 1 else "1f1b"
    plan = plan_on(mesh, order=order, zero_stage=zero_stage, recompute=recompute, **more)
    whole, folded = (evaluate(question(), plan, samples=0, fold=fold) for fold in (False, None))
    assert folded.folding.is_folded
    assert not whole.folding.is_folded
    assert_same_answer(folded, whole)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_the_parts_of_a_component_cost_what_it_costs(phase: Phase) -> None:
    problem, mesh = question(), Mesh(dp=4, cp=2, ep=2)
    whole = Compute(component="h.1", phase=phase, samples=2)
    parts = [(part, parts) for part, parts in (("rest", 2), ("attention", 2), ("experts", 1)) for _ in range(parts)]
    works = [replace(whole, part=part, parts=count) for part, count in parts]
    prices = problem.price([(work, 0) for work in (whole, *works)], mesh)
    assert sum(entry.median_s for entry in prices[1:]) == pytest.approx(prices[0].median_s, rel=1e-12)
    assert [work_text(parse_work(work_text(work))) for work in works] == [work_text(work) for work in works]


@given(st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_work_and_values_of_all_pieces_are_those_of_the_whole(cp: int, ep: int) -> None:
    made = divided_model(MODEL, cp=cp, ep=ep, element_bytes=2, routing=ExpertRouting(capacity_factor=1.0))
    assert cp * made.forward_flop == pytest.approx(MODEL.forward_flop, rel=1e-12)
    for mine, theirs in zip(made.values, MODEL.values, strict=True):
        assert mine.bytes_per_sample == -(-theirs.bytes_per_sample // cp)
    for mine, theirs in zip(made.components, MODEL.components, strict=True):
        assert cp * mine.saved_activation_bytes == theirs.saved_activation_bytes
        assert _expert_elements(mine) * ep == _expert_elements(theirs)


def _expert_elements(component: Component) -> int:
    return sum(parameter.elements for parameter in component.parameters if ".experts." in parameter.name)


@pytest.mark.parametrize("ways", [2, 8, 64])
def test_the_busiest_rank_has_what_random_choices_give_it(ways: int) -> None:
    mean = 2000
    drawn = np.random.default_rng(0).multinomial(mean * ways, np.full(ways, 1 / ways), size=400).max(axis=1)
    assert busiest_share(mean, ways) == pytest.approx(drawn.mean() / mean, rel=0.004)


@pytest.mark.parametrize(("ways", "skew"), [(8, 0.3), (64, 0.1)])
def test_the_busiest_rank_of_a_skewed_router(ways: int, skew: float) -> None:
    mean, generator = 2000, np.random.default_rng(0)
    likely = np.maximum(0, 1 + skew * generator.standard_normal((400, ways)))
    drawn = [generator.multinomial(mean * ways, each / each.sum()).max() for each in likely]
    assert busiest_share(mean, ways, skew) == pytest.approx(np.mean(drawn) / mean, rel=0.02)


def test_skew_is_less_where_a_rank_has_many_experts_and_costs_time() -> None:
    routing = ExpertRouting(skew=0.4)
    assert routing.load(1e9, 1, 8) - 1 == pytest.approx(4 * (routing.load(1e9, 16, 8) - 1), rel=1e-3)
    balanced, skewed = (step_s(Mesh(dp=8, ep=4), ExpertRouting(skew=skew)) for skew in (0.0, 0.5))
    assert skewed > balanced


@pytest.mark.parametrize(("places", "visits"), [(8, 8), (64, 8), (4, 2)])
def test_places_visited_by_chance(places: int, visits: int) -> None:
    drawn = np.random.default_rng(0).integers(places, size=(4000, visits))
    assert places_visited(places, visits) == pytest.approx(np.mean([len(set(row)) for row in drawn.tolist()]), rel=0.02)


def step_s(mesh: Mesh, routing: ExpertRouting, **more: object) -> float:
    return evaluate(question(routing=routing), plan_on(mesh, **more), samples=0).result.step_s.median  # type: ignore[arg-type]


def test_a_dispatcher_sends_a_token_once_to_each_rank_and_node() -> None:
    mesh = Mesh(dp=8, tp=2, ep=8)  # over two nodes
    plan = plan_on(mesh)
    every, once = (
        collectives(lower(plan, question(routing=ExpertRouting(dispatcher=name)).model_on(mesh)), "all_to_all")[0]
        for name in ("all_to_all", "deepep")
    )
    assert (every.visits, once.visits, every.size_bytes) == (0, ACTIVE, once.size_bytes)
    assert parse_work(work_text(once)) == once
    big = replace(once, size_bytes=2**32)
    prices = [estimate.median_s for estimate in question().price([(replace(big, visits=n), 0) for n in (0, 1, ACTIVE)], mesh)]
    assert prices[0] == pytest.approx(prices[1])
    assert prices[2] / prices[0] == pytest.approx(places_visited(2, ACTIVE) / ACTIVE, rel=1e-3)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
@pytest.mark.parametrize("exchange_s", [0.1, 1.0, 30.0])
def test_overlapped_exchanges_take_no_longer_than_what_they_do_not_hide(phase: Phase, exchange_s: float) -> None:
    """A component of one rank: rest 2 s, attention 3 s, experts 4 s; the first half of the rest comes before all exchanges."""
    rest, attention, experts = 2.0, 3.0, 4.0

    def makespan(overlapped: bool, delayed: bool) -> float:
        inside = InnerExchange(expert_ways=4, overlapped=overlapped, delayed=delayed)
        of = {"rest": rest, "attention": attention, "experts": experts, "ep": exchange_s}
        streams, ends = {True: 0.0, False: 0.0}, list[float]()
        for step in inner_steps(inside, phase, "ring"):
            begin = max(streams[bool(step.operation)], *(ends[number] for number in step.after), 0.0)
            ends.append(begin + of[step.what] / step.parts)
            streams[bool(step.operation)] = ends[-1]
        return ends[-1]

    computed, both = rest + attention + experts, 2 * exchange_s
    weights = experts / 2 if phase is Phase.BACKWARD else 0.0
    assert makespan(False, False) == pytest.approx(computed + both)
    beside = attention + experts
    assert makespan(True, True) == pytest.approx(rest + max(beside, both))
    assert makespan(True, False) == pytest.approx(rest + max(beside - weights, both) + weights)
    assert makespan(True, True) <= makespan(True, False) <= makespan(False, False)
    assert makespan(False, True) == pytest.approx(computed + both - min(weights, exchange_s))


@pytest.mark.parametrize(
    "routing", [ExpertRouting(overlapped=True), ExpertRouting(overlapped=True, delayed=True, dispatcher="deepep")]
)
def test_folded_programs_with_switches_are_the_unfolded_ones(routing: ExpertRouting) -> None:
    problem, plan = question(routing=routing), plan_on(Mesh(dp=8, ep=4, pp=2))
    folded, whole = (evaluate(problem, plan, samples=0, fold=fold) for fold in (True, False))
    assert_same_answer(folded, whole)
    assert folded.result.step_s.median <= step_s(Mesh(dp=8, ep=4, pp=2), ExpertRouting())


def test_the_spread_of_experts_widens_the_interval() -> None:
    divided, whole = (evaluate(question(), plan_on(mesh)) for mesh in (Mesh(dp=8, ep=4), Mesh(dp=8)))
    names = {name for entry in divided.estimates for name, sigma in entry.parameters if sigma}
    assert "experts:imbalance" in names
    assert not any(name == "experts:imbalance" for entry in whole.estimates for name, _ in entry.parameters)


def test_plans_that_divide_sequences_or_experts_are_simulated_only() -> None:
    for mesh, axis in ((Mesh(dp=2, cp=2), "mesh.cp"), (Mesh(dp=2, ep=2), "mesh.ep")):
        plan = plan_on(mesh)
        assert plan.not_executable == axis
        assert plan.to_dict()["executable"] is False
        assert Plan.from_json(plan.to_json()) == plan
        asked = SimpleNamespace(evaluation=evaluate(question(), plan, samples=0))
        with pytest.raises(PlanError, match=axis):
            check_runnable(asked, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "mesh", "message"),
    [
        (MODEL, Mesh(cp=3), "cp = 3 must divide the sequence.*nearest below that divides it: 2"),
        (chain_model(), Mesh(cp=2), "no attention operator"),
        (sequence_model(experts=False), Mesh(dp=2, ep=2), "has no experts"),
        (MODEL, Mesh(dp=3, ep=3), "must divide the 8 experts.*nearest below that does: 2"),
    ],
)
def test_what_does_not_divide_is_refused(model: Model, mesh: Mesh, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(question(), model=model, numerics=Numerics(precision="amp_bf16")).model_on(mesh)


def test_ep_has_to_divide_the_copies() -> None:
    with pytest.raises(PlanError, match=r"ep \(4\) must divide dp \(3\) \* cp \(2\) = 6.*: 3"):
        Mesh(dp=3, cp=2, ep=4)
    with pytest.raises(PlanError, match=r"belongs to mesh\.cp > 1"):
        plan_on(Mesh(dp=2), context_exchange="all_gather")
