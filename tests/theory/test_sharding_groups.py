"""ZeRO within sharding groups (HSDP) against closed forms: what is sent, how long it takes, what is held, what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from parsim.app.functions import simulate
from parsim.costs.costs import Costs
from parsim.errors import PlanError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.predict.evaluate import evaluate
from parsim.predict.folding import folding_of
from parsim.predict.memory import plan_memory
from parsim.predict.problem import PlanningProblem
from parsim.program.lower import lower
from parsim.program.passes.gradients import REPLICA_STREAM
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import from_text, to_text
from parsim.program.templates import lower_columns
from parsim.search.bound import step_bound_s
from parsim.work import Collective, Compute, OptimizerStep
from tests.models import chain_model
from tests.plans import MODEL, grouped_plans
from tests.theory.test_folding import cluster
from tests.theory.test_zero_program import BUCKET, CHAIN, LAYERS, replicas

TWO_NODES = cluster("two dgx1")
"""Of eight devices each."""


def grouped(dp: int, dp_shard: int, zero_stage: int, *, microbatches: int = 1, bucket_bytes: int = 1) -> Plan:
    plan = replicas(zero_stage, dp=dp, microbatches=microbatches, bucket_bytes=bucket_bytes)
    return replace(plan, mesh=Mesh(dp=dp, dp_shard=dp_shard))


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_sums_stay_in_a_group_and_parts_are_summed_across(zero_stage: int) -> None:
    """Neighbouring replicas are a group. Each place of it has one all_reduce of its part per bucket and step, on its queue."""
    graph = lower(grouped(8, 4, zero_stage, microbatches=2), CHAIN)
    sent = [task for task in graph.tasks if isinstance(task.work, Collective)]
    groups: dict[str, Counter[tuple[int, ...]]] = {name: Counter() for name in ("reduce_scatter", "all_gather", "all_reduce")}
    for task in sent:
        assert isinstance(task.work, Collective)
        groups[task.work.operation][task.work.group] += 1
        across = task.work.operation == "all_reduce"
        assert {resource.stream for resource in task.resources} == {REPLICA_STREAM if across else "dp"}
        assert task.work.size_bytes == (BUCKET // 4 if across else BUCKET)
    scattered = LAYERS * (2 if zero_stage >= 2 else 1)
    assert groups["reduce_scatter"] == {(0, 1, 2, 3): scattered, (4, 5, 6, 7): scattered}
    assert groups["all_gather"].keys() == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert groups["all_reduce"] == {(first, first + 4): LAYERS for first in range(4)}
    steps = [task for task in graph.tasks if isinstance(task.work, OptimizerStep)]
    assert {task.work.elements for task in steps} == {LAYERS * BUCKET // 4 // 4}  # type: ignore[union-attr]
    assert from_text(to_text(graph)) == graph


def test_a_group_of_all_replicas_is_what_leaving_it_out_is() -> None:
    for stage in (1, 2, 3):
        assert grouped(4, 4, stage) == replicas(stage)
        assert to_text(lower(grouped(4, 4, stage), CHAIN)) == to_text(lower(replicas(stage), CHAIN))


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_step_takes_the_three_collectives_one_after_another(zero_stage: int) -> None:
    """One bucket of one layer: computation, then what is priced for the group of a node and across the network, the update,
    and the gather. The price of each is asked for here, of the groups that this test names."""
    model = chain_model((1e6,), elements=10**6)
    plan = replace(
        grouped(16, 8, zero_stage, bucket_bytes=2**30),
        stages=(replace(grouped(16, 8, 1).stages[0], components=tuple(each.name for each in model.components)),),
    )
    problem = PlanningProblem(model=model, cluster=TWO_NODES, global_batch=plan.global_batch)
    node, across, size = tuple(range(8)), (0, 8), 4 * 10**6

    def seconds(operation: str, group: tuple[int, ...], size_bytes: int) -> float:
        work = Collective(operation=operation, group=group, size_bytes=size_bytes)
        return problem.price([(work, 0)], plan.mesh)[0].median_s

    summed, gathered = seconds("reduce_scatter", node, size), seconds("all_gather", node, size)
    replicated = seconds("all_reduce", across, size // 8)
    assert replicated > seconds("all_reduce", (0, 1), size // 8), "it crosses the network"
    graph = lower(plan, model)
    own = [task.work for task in graph.tasks if task.ranks == (0,) and isinstance(task.work, Compute | OptimizerStep)]
    computed = sum(estimate.median_s for estimate in problem.price([(work, 0) for work in own], plan.mesh))
    expected = computed + summed + replicated + gathered
    found = evaluate(problem, plan, samples=0, fold=False)
    loading_s = problem.price([(next(task.work for task in graph.tasks), 0)], plan.mesh)[0].median_s
    assert loading_s < 0.1 * min(summed, replicated, gathered), "of the first step alone: the others load beside the one before"
    assert expected <= found.result.step_s.median <= expected + loading_s
    assert step_bound_s(problem, plan) == pytest.approx(expected, rel=1e-6)


def test_memory_is_that_of_as_many_replicas_as_a_group_has() -> None:
    """States of 8 replicas in groups of 4 are those of 4 replicas that divide over all."""
    for stage in (1, 2, 3):
        whole, parts = (
            plan_memory(PlanIndex(plan, CHAIN), TWO_NODES, Numerics(optimizer="adam"))
            for plan in (replace(replicas(stage), global_batch=16), replace(grouped(8, 4, stage), global_batch=32))
        )
        for line in ("parameters", "gradients", "optimizer_state", "unsharded"):
            assert {entry.line(line) for entry in parts} == {whole[0].line(line)}, line


@settings(max_examples=60, deadline=None)
@given(grouped_plans())
def test_no_plan_is_simulated_below_its_bound(plan: Plan) -> None:
    name = next((name for name in ("two dgx1", "eight summit", "four p3") if cluster(name).size >= plan.world_size), None)
    if name is None:
        return
    problem = PlanningProblem(model=MODEL, cluster=cluster(name), global_batch=plan.global_batch)
    assert step_bound_s(problem, plan) <= evaluate(problem, plan, samples=0, fold=True).result.step_s.median


@settings(max_examples=100, deadline=None)
@given(grouped_plans(replicas=(4,)))
def test_states_are_updated_once_in_every_group(plan: Plan) -> None:
    """Over the ranks of a group all elements of all buckets are updated, up to padding; a plan survives its file."""
    layout = PlanIndex(plan, MODEL)
    assert Plan.from_json(plan.to_json()) == plan
    for family in layout.buckets.families:
        alike = [ranks for _, ranks in family.groups]
        assert len(alike) % plan.mesh.groups == 0
        assert family.replicas == plan.mesh.groups
        assert len({len(ranks) for ranks in alike}) == 1
        for first in range(0, len(alike), family.replicas):
            for ranks in alike[first : first + family.replicas]:
                copies = {plan.replica_of_rank(rank) // plan.mesh.group_copies for rank in ranks}
                assert len(copies) == 1, "a group is of neighbours"


def test_two_nodes_fold_to_one_rank_if_groups_are_nodes() -> None:
    costs = Costs(model=CHAIN, cluster=TWO_NODES)
    plan = grouped(16, 8, 3)
    assert folding_of(PlanIndex(plan, CHAIN), costs).replicas == (0,)
    columns = lower_columns(plan, CHAIN, PlanIndex(plan, CHAIN), folding_of(PlanIndex(plan, CHAIN), costs))
    assert {resource.rank for resource in columns.resources} == {0}


def test_groups_that_pay_differently_are_all_simulated() -> None:
    """Groups of two GPUs of a DGX-1: some have one NVLink between them, some two."""
    machine = cluster_from_profile(load_profile("dgx1-v100-32gb"))
    chosen = replace(machine, devices=tuple(machine.devices[number] for number in (0, 1, 2, 3, 0 + 4, 1 + 4, 2 + 4, 7)))
    costs = Costs(model=CHAIN, cluster=chosen)
    prices = {
        costs.estimate(Collective(operation="reduce_scatter", group=(first, first + 1), size_bytes=BUCKET), 0).median_s
        for first in range(0, 8, 2)
    }
    found = folding_of(PlanIndex(grouped(8, 2, 2), CHAIN), costs)
    assert (len(found.replicas) == 8) == (len(prices) > 1)


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"dp": 8, "dp_shard": 3}, r"dp_shard \(3\) must divide dp \(8\).*the nearest that do: 2 or 4"),
        ({"dp": 4, "dp_shard": 8}, r"dp_shard \(8\) must divide dp \(4\).*the nearest that do: 4"),
        ({"dp": 4, "dp_shard": 1}, r"group of one replica.*zero_stage = 0"),
        ({"dp": 4, "dp_shard": -2}, r"dp_shard \(-2\) must divide"),
        ({"dp": 8, "dp_shard": 4, "ep": 8}, r"ep \(8\) must divide dp_shard \(4\) \* cp \(1\) = 4.*the nearest that do: 4"),
    ],
)
def test_groups_that_cannot_be_are_refused(axes: dict[str, int], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Mesh(**axes)


def test_groups_without_zero_are_refused() -> None:
    with pytest.raises(PlanError, match=r"dp_shard = 2 .* zero_stage = 0 divides none; set zero_stage = 1, 2 or 3, or drop"):
        grouped(4, 2, 0)


def test_pieces_of_the_sequence_and_experts_belong_to_a_group() -> None:
    """cp ranks count among those that states are divided over; ep may be a whole group."""
    mesh = Mesh(dp=4, cp=2, ep=4, dp_shard=2)
    assert (mesh.group_copies, mesh.groups, mesh.size) == (4, 2, 8)
    assert Mesh(dp=4, cp=2, dp_shard=1).group_copies == 2


@pytest.mark.parametrize(("ep", "across"), [(8, 2), (4, 2)])
def test_experts_divided_over_a_group_are_summed_over_the_groups(ep: int, across: int) -> None:
    """With ep = dp_shard one rank of each group has an expert: its gradients are all_reduced whole. Folded equals whole."""
    settings = {
        "cluster.network": "infiniband-400g",
        "model.args": {"layers": 1, "seq": 256},
        "plan.strategy": "custom",
        "plan.mesh": {"dp": 16, "ep": ep},
        "plan.dp_shard": 8,
        "plan.zero_stage": 3,
    }
    found = simulate("mixtral-8x7b", cluster="16xh100-sxm", global_batch=16, settings=settings)
    problem = found.problem.on(found.plan.mesh)
    whole, folded = (evaluate(problem, found.plan, samples=0, fold=fold) for fold in (False, True))
    assert folded.result.step_s.median == pytest.approx(whole.result.step_s.median, rel=1e-9)
    assert folded.folding.is_folded
    layout = problem.layout(found.plan)
    experts = [family for family in layout.buckets.families if len(family.groups) > found.plan.mesh.groups]
    assert {len(ranks) for family in experts for _, ranks in family.groups} == {8 // ep}
    assert {len(family.groups) for family in experts} == {ep * across}
    sums = [unit.work for unit in whole.compiled.columns.units.kinds if isinstance(unit.work, Collective)]
    numbers = {work.group for work in sums if work.operation == "all_reduce"}
    assert numbers - {tuple(range(16))} == {(first, first + 8) for first in range(8)}  # all ranks add up the norm
