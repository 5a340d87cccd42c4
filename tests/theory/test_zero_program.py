"""ZeRO 2 and 3 as task graphs: what is sent when, what lies whole on a rank, and the memory predicted from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parsim.app.load import fixed_plan, problem_of
from parsim.app.question import question_of
from parsim.engines.static import simulate
from parsim.errors import PlanError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.evaluate import evaluate
from parsim.predict.memory import plan_memory, whole_bytes
from parsim.program.lifetimes import Room, bucket_rooms
from parsim.program.lower import lower
from parsim.program.passes.gradients import REPLICA_STREAM
from parsim.program.placed import PlanIndex
from parsim.program.taskgraph import Task
from parsim.work import Collective, Compute, OptimizerStep, Phase
from tests.models import chain_model
from tests.plans import MODEL, grouped_plans, plans

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


def test_every_stage_needs_less_on_many_ranks() -> None:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"))
    totals = [
        plan_memory(PlanIndex(replicas(stage, dp=8), CHAIN), cluster, Numerics(optimizer="adam"))[0].total_bytes
        for stage in (0, 1, 2, 3)
    ]
    assert totals == sorted(totals, reverse=True)


@settings(max_examples=150, deadline=None)
@given(st.one_of(plans(), grouped_plans(replicas=(4,))), st.integers(2, 3), st.integers(0, 2**32 - 1))
def test_the_executor_holds_what_is_predicted_and_what_the_program_needs(plan: Plan, zero_stage: int, seed: int) -> None:
    """Room is made before a collective can begin, and given up after it has ended, whatever takes how long."""
    plan = replace(plan, zero_stage=zero_stage)
    layout = PlanIndex(plan, MODEL)
    graph = lower(plan, MODEL)
    assume(any(task.origin.bucket is not None and task.origin.microbatch is not None for task in graph.tasks))
    rng = np.random.default_rng(seed)
    timeline = simulate(graph, rng.exponential(rng.choice([0.1, 1.0, 10.0], len(graph.tasks))))
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
            if task.work.phase is layout.weight_phase(name):
                here = {bucket.number for bucket in layout.unsharded_buckets(name)} & _own(tasks)
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
            wanted = {bucket.number for bucket in layout.unsharded_buckets(task.work.component) if rank in bucket.group}
            assert gathered == wanted


def test_a_stage_that_is_none_is_refused() -> None:
    with pytest.raises(PlanError, match=r"zero_stage = 4: it is 0, 1 .* or 3"):
        replicas(4)


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
