"""Relaxed plans as task graphs: what a round adds to a step, its Program, its mean step, and its memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from parsim.costs.communication.algorithms import exchange_seconds
from parsim.engines import static
from parsim.engines.dynamic import run_program
from parsim.engines.program import unrolled
from parsim.engines.static import compile_graph
from parsim.errors import PlanError, ScenarioError
from parsim.execute.mixing import MixingRounds
from parsim.execute.rank_run import RankRun
from parsim.execute.runtime import StepScripts
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.plans.synchronisation import Synchronisation, parse_synchronisation
from parsim.predict.evaluate import evaluate, simulated_step
from parsim.predict.folding import NEARLY
from parsim.predict.problem import PlanningProblem
from parsim.predict.rounds import mixing_period, step_program
from parsim.program.columns import columns_of, unfolded
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import TaskGraph
from parsim.program.templates import lower_columns
from parsim.search.by_hand import custom_plan
from parsim.work import Collective, Mix, OptimizerStep, SendRecv
from tests.models import residual_model
from tests.theory.test_folding import assert_same_answer

RULES = (
    "average/1",
    "average/8 outer=nesterov:0.7:0.9",
    "gossip/1 ring",
    "gossip/3 one_peer_exponential",
    "average/2 participation=0.5",
    "merge/1",
    "merge/3 merge=running",
)


@pytest.fixture(scope="module")
def problem() -> PlanningProblem:
    model = load_model(ModelSpec(name="mlp"), granularity="block")
    return PlanningProblem(
        model=model,
        cluster=cluster_from_profile(load_profile("dgx1-v100-32gb"), 8),
        global_batch=64,
    )


def plan_of(problem: PlanningProblem, text: str, **axes: int) -> Plan:
    return custom_plan(problem, Mesh(**(axes or {"dp": 4})), synchronisation=parse_synchronisation(text))


def kinds(graph: TaskGraph) -> Counter[str]:
    return Counter(type(task.work).__name__ for task in graph.tasks)


@pytest.mark.parametrize("text", RULES)
def test_a_local_step_is_the_beginning_of_one_with_a_round(problem: PlanningProblem, text: str) -> None:
    plan = plan_of(problem, text)
    local, whole = lower(plan, problem.model, local=True), lower(plan, problem.model)
    assert whole.tasks[: len(local.tasks)] == local.tasks
    drawn = plan.synchronisation.takes_part(0, 4)
    assert {task.ranks for task in local.tasks} == {(rank,) for rank in range(4) if drawn[rank]}
    assert not any(isinstance(task.work, Collective | SendRecv | Mix) for task in local.tasks)
    columns = lower_columns(plan, problem.model)
    assert columns.graph.tasks == whole.tasks
    assert lower_columns(plan, problem.model, local=True).size == len(local.tasks)


def test_rounds_have_the_tasks_of_their_rule(problem: PlanningProblem) -> None:
    buckets = len(problem.layout(plan_of(problem, "average/1")).buckets)
    average = kinds(lower(plan_of(problem, "average/1"), problem.model))
    assert (average["Collective"], average["SendRecv"], average["Mix"]) == (buckets, 0, 2 * 4 * buckets)
    ring = kinds(lower(plan_of(problem, "gossip/1 ring"), problem.model))
    assert (ring["Collective"], ring["SendRecv"]) == (0, 8 * buckets)
    one_peer = [
        lower(plan_of(problem, "gossip/1 one_peer_exponential"), problem.model, mixing_round=number) for number in (0, 1)
    ]
    offsets = [
        {(task.work.destination - task.work.source) % 4 for task in graph.tasks if isinstance(task.work, SendRecv)}
        for graph in one_peer
    ]
    assert offsets == [{1}, {2}]


@pytest.mark.parametrize(("text", "neighbours"), [("gossip/1 ring", 2), ("gossip/1 complete", 3)])
def test_messages_wait_for_what_both_ends_have_packed_and_each_neighbour_is_added(
    problem: PlanningProblem, text: str, neighbours: int
) -> None:
    """Of four replicas. Packing is a product (2 accesses), taking a copy and a zeroing (3), a neighbour a sum (3)."""
    graph = lower(plan_of(problem, text), problem.model)
    packed = {
        (task.ranks[0], task.origin.bucket): task.index
        for task in graph.tasks
        if isinstance(task.work, Mix) and task.work.copies == 1
    }
    for task in graph.tasks:
        if isinstance(task.work, SendRecv):
            ends = (task.work.source, task.work.destination)
            assert {packed[rank, task.origin.bucket] for rank in ends} <= set(task.dependencies)
        if isinstance(task.work, Mix) and task.work.copies > 1:
            assert (task.work.copies, task.work.accesses) == (1 + neighbours, 2 + 3 + 3 * neighbours)


def test_replicas_of_several_ranks_sum_their_own_gradients(problem: PlanningProblem) -> None:
    """dp = 2 of tp = 2 batch-sharded: gradients are summed in each replica, weights averaged between replicas."""
    graph = lower(plan_of(problem, "average/1", dp=2, tp=2), problem.model)
    groups = Counter(task.work.group for task in graph.tasks if isinstance(task.work, Collective))
    assert set(groups) == {(0, 1), (2, 3), (0, 2), (1, 3)}
    pipeline = lower(plan_of(problem, "average/1", dp=2, pp=2), problem.model)
    assert {task.work.group for task in pipeline.tasks if isinstance(task.work, Collective)} == {(0, 1), (2, 3)}


@pytest.mark.parametrize("text", RULES)
def test_the_mean_step_is_that_of_the_program_in_both_engines(problem: PlanningProblem, text: str) -> None:
    """The Program run by the dynamic engine without unrolling ends when the cycle written out as one graph ends."""
    plan = plan_of(problem, text)
    layout = problem.layout(plan)
    folding, local_steps = unfolded(plan.mesh), plan.synchronisation.round_steps - 1
    period = mixing_period(problem, layout, folding)
    program = step_program(layout, folding, period.overlap, local_steps=local_steps)
    graph = unrolled(program)
    price = {
        (unit.work, unit.rank): estimate.median_s
        for unit, estimate in zip(period.cycle.columns.units, period.estimates, strict=False)
    }

    def seconds(some: TaskGraph) -> np.ndarray:
        return np.array([price[task.work, task.resources[0].rank] for task in some.tasks])

    plain = static.step_times_s(compile_graph(columns_of(graph)), seconds(graph)[None, :])[0]
    ran = run_program(program, [seconds(part.graph) for part in program.steps])
    assert ran.makespan_s == pytest.approx(plain, rel=1e-12)
    steps = len(program.steps)
    assert steps == plan.synchronisation.period_steps * len(plan.synchronisation.cycle(4))
    found = simulated_step(problem, plan).steady_s
    if plan.synchronisation.kind == "merge":
        assert found < plain / steps  # its first cycle, in which replicas come to their distance, is left out
    else:
        assert found == pytest.approx(plain / steps, rel=0.02)  # the mean of several cycles in a row


@pytest.mark.parametrize(("replicas", "hand_s"), [(2, 0.1), (4, 0.1), (4, 30.0), (2, 30.0)])
@pytest.mark.parametrize("period", [1, 3])
def test_merging_in_turn_is_the_recurrence_of_its_turns(
    problem: PlanningProblem, replicas: int, hand_s: float, period: int
) -> None:
    """A replica merges when it has trained and been handed the model, and trains on at once; nobody waits for those behind."""
    plan = plan_of(problem, f"merge/{period}", dp=replicas)
    layout = problem.layout(plan)
    assert len(layout.buckets) == 1
    folding = unfolded(plan.mesh)
    overlap = mixing_period(problem, layout, folding).overlap
    cycle = step_program(layout, folding, overlap, local_steps=period - 1)
    program = replace(cycle, parts=cycle.parts * 5)
    mix_s, paces = 0.5, [1.0, 1.3, 0.7, 1.1][:replicas]

    def seconds(graph: TaskGraph) -> np.ndarray:
        found = []
        for task in graph.tasks:
            by_kind = {Mix: mix_s, SendRecv: hand_s, OptimizerStep: 10 * paces[task.resources[0].rank]}
            found.append(by_kind.get(type(task.work), 0.0))
        return np.array(found)

    graph = unrolled(program)
    ended = static.step_times_s(compile_graph(columns_of(graph)), seconds(graph)[None, :])[0]
    assert run_program(program, [seconds(part.graph) for part in program.steps]).makespan_s == pytest.approx(ended, rel=1e-12)

    updates = sum(isinstance(task.work, OptimizerStep) for task in program.steps[0].graph.tasks) // replicas
    free, handed = [0.0] * replicas, 0.0
    for _ in range(5):
        for replica in range(replicas):
            trained = free[replica] + period * updates * 10 * paces[replica]
            free[replica] = max(trained, handed) + mix_s
            handed = free[replica] + hand_s
    assert ended == pytest.approx(max(*free, handed), rel=1e-12)


def test_merging_in_turn_costs_the_slower_of_training_and_the_round(problem: PlanningProblem) -> None:
    """Few replicas: the step of one that trains alone and one merge. The chain of all turns counts only where it is longer."""
    plan = plan_of(problem, "merge/1", dp=4)
    alone = simulated_step(problem, replace(plan, synchronisation=Synchronisation(kind="average", period_steps=4096))).steady_s
    assert alone < simulated_step(problem, plan).steady_s
    rare = simulated_step(problem, plan_of(problem, "merge/4096", dp=4)).steady_s
    assert rare == pytest.approx(alone, rel=1e-3)
    buckets = len(problem.layout(plan).buckets)
    found = kinds(lower(plan, problem.model))
    assert (found["Collective"], found["SendRecv"], found["Mix"]) == (0, 4 * buckets, 4 * buckets)


def test_longer_periods_approach_independent_training(problem: PlanningProblem) -> None:
    steps = [simulated_step(problem, plan_of(problem, f"average/{period}")).steady_s for period in (1, 2, 4, 8, 64, 4096)]
    assert steps == sorted(steps, reverse=True)
    alone = replace(plan_of(problem, "average/1"), synchronisation=Synchronisation(kind="average", period_steps=4096))
    local = lower(alone, problem.model, local=True)
    estimates = problem.price([(task.work, task.resources[0].rank) for task in local.tasks], alone.mesh)
    lone = static.step_times_s(compile_graph(columns_of(local)), np.array([[entry.median_s for entry in estimates]]))[0]
    assert steps[-1] == pytest.approx(lone, rel=0.02)  # loading runs ahead of all steps but the first


def test_an_extrapolated_period_equals_one_written_out(problem: PlanningProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    """On equal replicas local steps in a row repeat exactly."""
    plan = plan_of(problem, "gossip/6 ring")
    short = simulated_step(problem, plan).steady_s
    monkeypatch.setattr("parsim.predict.rounds.UNROLLED_STEPS", 6)
    assert simulated_step(problem, plan).steady_s == pytest.approx(short, rel=1e-9)


def test_breakdown_and_interval_are_those_of_the_mean_step(problem: PlanningProblem) -> None:
    found = evaluate(problem, plan_of(problem, "average/8"), samples=50)
    assert found.period is not None
    parts = [entry.step_s for entry in found.breakdown]
    assert parts == pytest.approx([found.steady_s] * 4, rel=0.02)
    assert found.result.step_s.p05 <= found.result.step_s.median <= found.result.step_s.p95
    every = evaluate(problem, plan_of(problem, "average/1"), samples=0)
    assert found.result.communication_fraction < every.result.communication_fraction / 4
    assert any("learns something else" in text for text in found.result.warnings)


def test_memory_lines_of_relaxed_plans(problem: PlanningProblem) -> None:
    weights = sum(parameter.size_bytes for parameter in problem.model.parameters)

    def lines(text: str, **axes: int) -> list[dict[str, int]]:
        return [dict(entry.lines) for entry in problem.memory(plan_of(problem, text, **axes))]

    assert "outer_state" not in lines("average/8")[0]
    assert lines("average/8 outer=sgd:1.0")[0]["outer_state"] == weights
    assert lines("merge/8")[0]["outer_state"] == weights
    assert lines("average/8 outer=nesterov:0.7:0.9")[0]["outer_state"] == 2 * weights
    narrow = replace(problem, scored="weights")
    scored = [
        narrow.memory(plan_of(narrow, text))[0].line("evaluation") for text in ("all_reduce", "average/8", "gossip/1 ring")
    ]
    assert scored[0] > 0
    assert scored[1:] == [scored[0] + weights] * 2, "a validation scores the mean, which no replica holds already"
    star = lines("gossip/1 star")
    assert star[0]["neighbour_buffers"] > star[1]["neighbour_buffers"]
    stale = lines("stale", pp=2, dp=2)
    assert [entry["stashed_weights"] > 0 for entry in stale] == [True, True, False, False]
    usual = [
        dict(entry.lines)
        for entry in problem.memory(replace(plan_of(problem, "stale", pp=2, dp=2), synchronisation=Synchronisation()))
    ]
    assert stale[0]["activations"] == pytest.approx(3 * usual[0]["activations"], rel=1e-6)
    assert stale[2]["activations"] == usual[2]["activations"]


def test_stale_stages_wait_for_nobody_within_a_step(problem: PlanningProblem) -> None:
    plan = plan_of(problem, "stale", pp=2, dp=2)
    graph = lower(plan, problem.model)
    usual = lower(replace(plan, synchronisation=Synchronisation()), problem.model)
    assert [task.work for task in graph.tasks] == [task.work for task in usual.tasks]
    assert (
        simulated_step(problem, plan).steady_s
        < simulated_step(problem, replace(plan, synchronisation=Synchronisation())).steady_s
    )
    assert plan.executable


def test_a_value_that_passes_a_stale_stage_is_refused(problem: PlanningProblem) -> None:
    """a -> b -> c -> d, where d also reads a: on two stages neighbours, on three one works on another batch in between."""
    skipping = replace(problem, model=residual_model())
    with pytest.raises(PlanError, match="past a stage that works on another batch; use a model that is a chain"):
        lower(plan_of(skipping, "stale", pp=3), skipping.model)
    assert lower(plan_of(skipping, "stale", pp=2), skipping.model).tasks


def test_what_is_not_built_is_refused(problem: PlanningProblem) -> None:
    from parsim.engines.scenario import Scenario
    from parsim.predict.forecast import Played

    with pytest.raises(ScenarioError, match="synchronous plans"):
        Played(problem=problem, evaluation=evaluate(problem, plan_of(problem, "average/2"), samples=0), scenario=Scenario())
    with pytest.raises(PlanError, match="microbatches"):
        custom_plan(problem, Mesh(pp=2, dp=2), microbatches=2, synchronisation=Synchronisation(kind="stale"))


@pytest.mark.parametrize("text", ["gossip/1 one_peer_exponential", "gossip/2 ada(start=7, rate=2.0, rounds=5, epochs=3)"])
def test_messages_share_links_with_those_of_their_own_round_alone(problem: PlanningProblem, text: str) -> None:
    """A round of one peer per rank is priced as it runs, not as if all rounds of the cycle ran at once."""
    nodes = cluster_from_profile(load_profile("p3-16xlarge"), nodes=2, network="ethernet-25g")
    wide = replace(problem, cluster=nodes, global_batch=64)
    plan = custom_plan(wide, Mesh(dp=16), synchronisation=parse_synchronisation(text))
    period = mixing_period(wide, wide.layout(plan), unfolded(plan.mesh))
    seconds = period.medians_s[0][period.unit]
    tasks = period.cycle.columns.graph.tasks
    rule, number, seen = plan.synchronisation, -1, set()
    for task in tasks:
        if isinstance(task.work, Mix) and task.work.copies == 1 and task.ranks == (0,) and task.origin.bucket == 0:
            number += 1
        if isinstance(task.work, SendRecv):
            links = rule.matrix(rule.cycle(16)[number], 16)
            pairs = [(source, to) for to in range(16) for source in range(16) if source != to and links[to, source]]
            alone = exchange_seconds(pairs, task.work.size_bytes, nodes)
            place = pairs.index((task.work.source, task.work.destination))
            assert seconds[task.index] == pytest.approx(alone[place], rel=1e-9)
            seen.add(number)
    assert seen == set(range(len(rule.cycle(16))))


def test_stages_that_gossip_share_links_rank_by_rank(problem: PlanningProblem) -> None:
    """Two stages of eight replicas each: ranks are not replicas."""
    nodes = cluster_from_profile(load_profile("dgx1-v100-32gb"), nodes=2, network="infiniband-100g")
    wide = replace(problem, cluster=nodes, global_batch=64)
    plan = custom_plan(wide, Mesh(dp=8, pp=2), synchronisation=parse_synchronisation("gossip/1 ring"))
    found = evaluate(wide, plan, samples=0, fold=True)
    assert not found.folding.is_folded
    prices = [(unit.work, price) for unit, price in zip(found.compiled.columns.units, found.estimates, strict=True)]
    messages = [(work, price) for work, price in prices if isinstance(work, SendRecv)]
    mixed = [(work, price) for work, price in messages if work.source // 8 == work.destination // 8]
    sizes = {work.size_bytes for work, _ in mixed}
    assert {work.source // 8 for work, _ in mixed} == {0, 1}
    for size_bytes in sizes:
        alike = [(work, price) for work, price in mixed if work.size_bytes == size_bytes]
        pairs = [(work.source, work.destination) for work, _ in alike]
        for (_, price), seconds in zip(alike, exchange_seconds(pairs, size_bytes, nodes), strict=True):
            assert price.median_s == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("text", ["average/1", "average/2 outer=nesterov:0.7:0.9", "average/8"])
@pytest.mark.parametrize("axes", [{"dp": 12}, {"dp": 6, "pp": 2}])
def test_replicas_that_average_are_folded_exactly(problem: PlanningProblem, text: str, axes: dict[str, int]) -> None:
    machine = cluster_from_profile(load_profile("summit-v100"), nodes=2, network="infiniband-100g")
    wide = replace(problem, cluster=machine, global_batch=96)
    plan = custom_plan(wide, Mesh(**axes), synchronisation=parse_synchronisation(text))
    whole, folded = (evaluate(wide, plan, samples=8, fold=fold) for fold in (False, True))
    assert folded.folding.is_folded
    assert len(folded.folding.ranks) < 12
    assert folded.compiled.size < whole.compiled.size
    assert_same_answer(folded, whole)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("gossip/1 ring", 6),
        ("gossip/3 lattice(neighbours=8)", 6),
        ("gossip/1 complete", 6),
        ("gossip/1 exponential", 6),
        ("gossip/2 one_peer_exponential", 6),
        ("gossip/1 ada(epochs=3, rate=0.5, rounds=9, start=12, kind=exponential)", 6),
        ("gossip/1 torus", 6),
        ("gossip/1 hierarchical_one_peer(per_node=3)", 6),
    ],
)
def test_replicas_that_gossip_on_a_graph_that_repeats_are_folded_exactly(
    problem: PlanningProblem, text: str, kinds: int
) -> None:
    """Moved on by a node, all replicas have the same neighbours on the same links: one node stands for all."""
    machine = cluster_from_profile(load_profile("summit-v100"), nodes=4, network="infiniband-100g")
    wide = replace(problem, cluster=machine, global_batch=96)
    plan = custom_plan(wide, Mesh(dp=24), synchronisation=parse_synchronisation(text))
    whole, folded = (evaluate(wide, plan, samples=8, fold=fold) for fold in (False, True))
    assert len(folded.folding.ranks) == kinds
    assert folded.folding.weights == (24 // kinds,) * kinds
    assert_same_answer(folded, whole)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["gossip/1 ring", "gossip/2 ada(epochs=2, rounds=9, start=6, rate=2.0)"])
def test_leaf_switches_leave_a_folded_gossip_step_open_by_a_ten_thousandth(problem: PlanningProblem, text: str) -> None:
    """20 nodes fill one leaf of 18 and a part of another: a message that crosses them takes a microsecond longer."""
    machine = cluster_from_profile(load_profile("summit-v100"), nodes=20, network="infiniband-100g")
    model = load_model(ModelSpec(name="resnet50"), granularity="block")
    wide = replace(problem, model=model, cluster=machine, global_batch=960)
    plan = custom_plan(wide, Mesh(dp=120), synchronisation=parse_synchronisation(text))
    whole, folded = (simulated_step(wide, plan, fold=fold) for fold in (False, True))
    assert not folded.folding.is_exact
    assert len(folded.folding.ranks) == 6
    assert 1.0 - 1e-12 <= folded.step_s / whole.step_s <= 1.0 + NEARLY


@pytest.mark.parametrize(
    ("text", "nodes"), [("gossip/1 star", 4), ("gossip/1 mesh", 4), ("gossip/1 ring", 1), ("average/4 participation=0.5", 1)]
)
def test_what_does_not_repeat_is_not_folded(problem: PlanningProblem, text: str, nodes: int) -> None:
    if nodes > 1:
        machine = cluster_from_profile(load_profile("summit-v100"), nodes=nodes, network="infiniband-100g")
        problem = replace(problem, cluster=machine, global_batch=96)
    plan = plan_of(problem, text, dp=24 if nodes > 1 else 4)
    assert not evaluate(problem, plan, samples=0, fold=True).folding.is_folded


@pytest.mark.parametrize("text", ["average/4 participation=0.5", "average/4 participation=0.5 seed=3"])
def test_a_rank_that_a_round_may_leave_out_has_the_tasks_of_one_that_takes_part(problem: PlanningProblem, text: str) -> None:
    plan, every = plan_of(problem, text), lower(plan_of(problem, "average/4"), problem.model)
    layout = PlanIndex(plan, problem.model)
    for rank in range(plan.world_size):
        scripts = StepScripts(lower(plan, problem.model), layout, rank, None)
        assert [task for task, _, _ in scripts.of_step(None).tasks] == [task for task in every.tasks if rank in task.ranks]


def test_only_ranks_that_are_drawn_compute_and_have_a_loss(problem: PlanningProblem) -> None:
    """Two of four replicas take part, with 64 samples. Records hold the mean over their samples; a rank shows its own loss."""
    plan = plan_of(problem, "average/4 participation=0.5")
    layout, graph = PlanIndex(plan, problem.model), lower(plan, problem.model)
    drawn = plan.synchronisation.takes_part(0, 4)
    assert sorted(drawn) == [False, False, True, True]
    for rank in range(4):
        script = StepScripts(
            graph, layout, rank, cast("MixingRounds", SimpleNamespace(round_of=lambda step: step // 4))
        ).of_step(0)
        assert script.computes == drawn[rank]
        entry = cast(
            "RankRun",
            SimpleNamespace(
                step_number=0,
                rate=None,
                stale=None,
                streams=SimpleNamespace(loads_ahead=False),
                loader=SimpleNamespace(batch=lambda number: None, settle=lambda: None),
                program=SimpleNamespace(
                    script=lambda number, script=script: script, step=lambda *given, script: (16 * 2.5 * script.computes, [])
                ),
                run=SimpleNamespace(plan=plan),
                stage=SimpleNamespace(loss_counts=True),
                checkpoints=None,
                record=SimpleNamespace(losses=[]),
                _batch=lambda number: number,
                _sample=lambda times: None,
            ),
        )
        RankRun.step(entry, keep=True)
        assert entry.record.losses == [2.5 / 2 if drawn[rank] else None]
        assert entry.own_loss == (2.5 / 4 if drawn[rank] else None), "of a quarter of the batch: 2.5 over its own samples"
