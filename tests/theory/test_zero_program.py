"""ZeRO 2 and 3 as task graphs: what is sent when, what lies whole on a rank, and the memory predicted from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parsim.app.functions import simulate
from parsim.app.load import fixed_plan, problem_of
from parsim.app.question import question_of
from parsim.costs.costs import Costs
from parsim.engines.static import simulate as simulate_graph
from parsim.errors import PlanError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.evaluate import evaluate
from parsim.predict.folding import folding_of
from parsim.predict.memory import whole_bytes
from parsim.predict.problem import PlanningProblem
from parsim.program.buckets import by_family
from parsim.program.lifetimes import Room, bucket_rooms
from parsim.program.lower import lower
from parsim.program.passes.gradients import REPLICA_STREAM
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import Task, from_text, to_text
from parsim.program.templates import lower_columns
from parsim.search.bound import step_bound_s
from parsim.work import Collective, Compute, OptimizerStep, Phase
from tests.models import chain_model
from tests.plans import MODEL, grouped_plans, plan_memory, plans
from tests.theory.test_folding import cluster

LAYERS, ELEMENTS = 6, 1000
CHAIN = chain_model((1e6,) * LAYERS, elements=ELEMENTS)
BUCKET = 4 * ELEMENTS


def replicas(zero_stage: int, *, dp: int = 4, microbatches: int = 1, bucket_bytes: int = 1) -> Plan:
    """The chain, all on every rank; one bucket for each layer."""
    mesh = Mesh(dp=dp)
    stage = Stage(components=tuple(component.name for component in CHAIN.components), ranks=mesh.stage_ranks(0))
    return Plan(
        strategy="dp",
        mesh=mesh,
        stages=(stage,),
        global_batch=16,
        microbatches=microbatches,
        bucket_bytes=bucket_bytes,
        zero_stage=zero_stage,
    )


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize(
    ("zero_stage", "scattered", "gathered"),
    [
        (1, lambda m: LAYERS, lambda m: LAYERS),
        (2, lambda m: LAYERS * m, lambda m: LAYERS),
        # forwards and backwards in turn: of the layers each needs, the first is still there from the one before
        (3, lambda m: LAYERS * m, lambda m: LAYERS + (2 * m - 1) * (LAYERS - 1)),
    ],
)
def test_what_is_sent(zero_stage: int, scattered, gathered, microbatches: int) -> None:  # type: ignore[no-untyped-def]
    graph = lower(replicas(zero_stage, microbatches=microbatches), CHAIN)
    sent = Counter(task.work.operation for task in graph.tasks if isinstance(task.work, Collective))
    assert sent == {"reduce_scatter": scattered(microbatches), "all_gather": gathered(microbatches)}


def test_lines_in_closed_form() -> None:
    """Of L layers on n ranks: parts of everything, and whole at once, while a layer in the middle runs backward, its parameters
    and gradients, and either the gradients of the one before, being sent, or the parameters of the next, being gathered."""
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"))
    found = {
        stage: plan_memory(PlanIndex(replicas(stage), CHAIN), cluster, Numerics(optimizer="adam"))[0] for stage in (0, 1, 2, 3)
    }
    whole = LAYERS * BUCKET
    assert [found[stage].line("parameters") for stage in found] == [whole, whole, whole, whole // 4]
    assert [found[stage].line("gradients") for stage in found] == [whole, whole, whole // 4, whole // 4]
    assert [found[stage].line("optimizer_state") for stage in found] == [2 * whole, whole // 2, whole // 2, whole // 2]
    assert whole_bytes(PlanIndex(replicas(1), CHAIN), 0) == {}
    assert all("unsharded" not in {name for name, _, _ in entry.spreads} for entry in found.values())
    sent, part = 2 * BUCKET + BUCKET // 4, BUCKET // 4
    most = [
        {name: size for (phase, name, _), size in whole_bytes(PlanIndex(replicas(stage), CHAIN), 0).items() if _backward(phase)}
        for stage in (2, 3)
    ]
    assert most[0] == {"loss": 0, "c5": BUCKET, "c4": sent, "c3": sent, "c2": sent, "c1": sent, "c0": sent}
    assert most[1] == {
        "loss": 2 * BUCKET, "c5": 3 * BUCKET, **dict.fromkeys(("c4", "c3", "c2", "c1"), 4 * BUCKET + part),
        "c0": 3 * BUCKET + part,
    }  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.one_of(plans(), grouped_plans(replicas=(4,))), st.integers(2, 3), st.integers(0, 2**32 - 1))
def test_the_executor_holds_what_is_predicted_and_what_the_program_needs(plan: Plan, zero_stage: int, seed: int) -> None:
    """Room is made before a collective can begin, and given up after it has ended, whatever takes how long."""
    plan = replace(plan, zero_stage=zero_stage)
    layout = PlanIndex(plan, MODEL)
    graph = lower(plan, MODEL)
    assume(any(task.origin.bucket is not None and task.origin.microbatch is not None for task in graph.tasks))
    rng = np.random.default_rng(seed)
    timeline = simulate_graph(graph, rng.exponential(rng.choice([0.1, 1.0, 10.0], len(graph.tasks))))
    start, end = np.zeros(len(graph.tasks)), np.zeros(len(graph.tasks))
    start[timeline.task], end[timeline.task] = timeline.start_s, timeline.end_s
    for rank in range(plan.world_size):
        own = [
            (task, next(resource.stream for resource in task.resources if resource.rank == rank))
            for task in graph.tasks
            if rank in task.ranks
        ]
        indices = {task.index for task, _ in own}
        tasks = [(task, stream, tuple(index for index in task.dependencies if index in indices)) for task, stream in own]
        predicted = {use: size for use, size in whole_bytes(layout, rank).items() if size}
        assert _fullest(layout, rank, tasks, start, end) == predicted


def _fullest(
    layout: PlanIndex, rank: int, tasks: list[tuple[Task, str, tuple[int, ...]]], start: np.ndarray, end: np.ndarray
) -> dict[tuple[Phase, str, int], float]:  # type: ignore[type-arg]
    """Bytes of buckets while a component runs, as the executor makes and gives up their room."""
    rooms = bucket_rooms(tasks, layout, rank)
    sending = {
        (task.origin.bucket, task.origin.microbatch): task
        for task, _, _ in tasks
        if isinstance(task.work, Collective)
        and task.work.operation == "reduce_scatter"
        and task.origin.bucket is not None
        and task.origin.microbatch is not None
    }
    gathering = [
        task
        for task, _, _ in tasks
        if isinstance(task.work, Collective)
        and task.work.operation == "all_gather"
        and task.origin.bucket is not None
        and task.origin.microbatch is not None
    ]
    size = {bucket.number: bucket.padded_bytes for bucket in layout.buckets}
    part = {bucket.number: bucket.padded_bytes // len(bucket.group) for bucket in layout.buckets}
    filling: set[tuple[int, int]] = set()
    sent: set[tuple[int, int]] = set()
    whole: dict[int, float] = dict.fromkeys(rooms.first_parameters, 0.0)  # since when
    found: dict[tuple[Phase, str, int], float] = {}
    for task, _, before in tasks:
        if not isinstance(task.work, Compute | OptimizerStep):
            continue
        room = rooms.around.get(task.index, Room())
        for key in room.forgotten:
            assert end[sending[key].index] <= start[task.index], "given up once it is sent"
            sent.remove(key)
        if isinstance(task.work, Compute):
            name, microbatch = task.work.component, task.origin.microbatch
            assert microbatch is not None
            every = by_family(layout.rank_buckets(rank))
            if task.work.phase is layout.weight_phase(name):
                here = {bucket.number for bucket in layout.unsharded_buckets(name, every)} & _own(tasks)
                filling |= {(bucket, microbatch) for bucket in here}
            needed = {entry.origin.bucket for entry in gathering if entry.index in before}
            assert needed <= whole.keys()
            held = sum(size[bucket] for bucket in whole) + sum(size[bucket] for bucket, _ in filling | sent)
            held += sum(part[bucket] for bucket, _ in sent)
            if held:
                found[task.work.phase, name, microbatch] = held
        for bucket in room.ending_parameters:
            del whole[bucket]
        for key in room.ending_gradients:
            filling.remove(key)
            sent.add(key)
        for bucket in room.beginning_parameters:
            assert bucket not in whole
            whole[bucket] = end[task.index]
            later = [entry for entry in gathering if entry.origin.bucket == bucket and task.index in entry.dependencies]
            assert all(start[entry.index] >= end[task.index] for entry in later)
            assert later
    assert not filling
    assert not sent
    assert not whole
    return found


def _backward(phase: Phase) -> bool:
    return phase is Phase.BACKWARD


def _own(tasks: list[tuple[Task, str, tuple[int, ...]]]) -> set[int]:
    """Buckets that this rank sends; sums over sharding groups bear the number of the first group's bucket on all ranks."""
    sent = [task for task, stream, _ in tasks if stream != REPLICA_STREAM]
    return {task.origin.bucket for task in sent if task.origin.bucket is not None}


@settings(max_examples=60, deadline=None)
@given(plans())
def test_every_parameter_is_gathered_before_it_is_used(plan: Plan) -> None:
    plan = replace(plan, zero_stage=3)
    layout, graph = PlanIndex(plan, MODEL), lower(plan, MODEL)
    for task in graph.tasks:
        if isinstance(task.work, Compute):
            (rank,) = task.ranks
            before = [graph.tasks[index] for index in task.dependencies]
            gathered = {
                entry.origin.bucket
                for entry in before
                if isinstance(entry.work, Collective) and entry.work.operation == "all_gather" and entry.origin.hop is None
            }
            every = by_family(layout.gathered_buckets(rank))
            wanted = {bucket.number for bucket in layout.unsharded_buckets(task.work.component, every)}
            assert gathered == wanted


def test_tied_parameters_of_two_stages_stay_whole() -> None:
    """Their gradients are complete on both only after the last microbatch: ZeRO 1 for these."""
    from tests.models import residual_model

    model, mesh = residual_model(tied=True), Mesh(pp=2, dp=2)
    names = tuple(component.name for component in model.components)
    stages = (Stage(components=names[:2], ranks=(0, 1)), Stage(components=names[2:], ranks=(2, 3)))
    plan = Plan(strategy="hp", mesh=mesh, stages=stages, global_batch=8, microbatches=2, zero_stage=3)
    layout = PlanIndex(plan, model)
    assert {bucket.stages: layout.zero_stage_of(bucket) for bucket in layout.buckets} == {(0,): 3, (1,): 3, (0, 1): 1}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_layers_cut_more_finely_gather_no_later(microbatches: int) -> None:
    """FSDP wraps layers: their parameters are gathered together, whether a layer is one component or four."""
    steps = {}
    for granularity in ("block", "sublayer"):
        keys = {"plan.strategy": "custom", "plan.mesh": {"dp": 8}, "plan.zero_stage": 3, "plan.microbatches": microbatches}
        keys |= {"model.args.layers": 4, "model.args.seq": 2048, "model.granularity": granularity}
        keys |= {"plan.placements": {"h.*": "batch"}}  # names components, so that the granularity counts
        asked = question_of("llama3-8b", cluster="8xh100-sxm", global_batch=8 * microbatches, settings=keys)
        problem = problem_of(asked)
        plan = fixed_plan(problem, asked)
        assert plan is not None
        steps[granularity] = evaluate(problem, plan, samples=0).result.step_s.median, problem.model.granularity
    assert {granularity for _, granularity in steps.values()} == {"block", "sublayer"}
    assert steps["sublayer"][0] == pytest.approx(steps["block"][0], rel=3e-4)  # norms of gradients are taken by component


# ZeRO within sharding groups (HSDP) against closed forms: what is sent, how long it takes, what is held, what is refused.

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
