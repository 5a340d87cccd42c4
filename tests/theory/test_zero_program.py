"""ZeRO 2 and 3 as task graphs: what is sent when, what lies whole on a rank, and the memory predicted from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parsim.engines.static import simulate
from parsim.errors import PlanError
from parsim.graph.lower import lower
from parsim.graph.plan_index import PlanIndex
from parsim.graph.task import Task
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.profile import load_profile
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.plan_memory import plan_memory
from parsim.predict.unsharded_memory import unsharded_bytes
from parsim.work import Collective, Compute, Phase
from tests.models import chain_model
from tests.plans import MODEL, plans

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
        stage: plan_memory(PlanIndex(replicas(stage), CHAIN), cluster, precision="fp32", optimizer="adam")[0]
        for stage in (0, 1, 2, 3)
    }
    whole = LAYERS * BUCKET
    assert [found[stage].line("parameters") for stage in found] == [whole, whole, whole, whole // 4]
    assert [found[stage].line("gradients") for stage in found] == [whole, whole, whole // 4, whole // 4]
    assert [found[stage].line("optimizer_state") for stage in found] == [2 * whole, whole // 2, whole // 2, whole // 2]
    assert unsharded_bytes(PlanIndex(replicas(1), CHAIN), 0) == {}
    least = [{own.least for own in unsharded_bytes(PlanIndex(replicas(stage), CHAIN), 0).values()} for stage in (2, 3)]
    assert least == [{0.0, BUCKET}, {BUCKET, 2 * BUCKET}], "of the loss, and of all others: nothing is on its way"
    assert [
        {name: low for name, low, _ in found[stage].spreads}["unsharded"] < found[stage].line("unsharded") for stage in (2, 3)
    ]
    most = [{name: own.most for name, own in unsharded_bytes(PlanIndex(replicas(stage), CHAIN), 0).items()} for stage in (2, 3)]
    assert most[0] == {
        "loss": 0, "c5": BUCKET, "c4": 2 * BUCKET, "c3": 2 * BUCKET, "c2": 2 * BUCKET, "c1": 2 * BUCKET, "c0": 2 * BUCKET
    }  # fmt: skip
    assert most[1] == {
        "loss": 2 * BUCKET, "c5": 3 * BUCKET, "c4": 3 * BUCKET, "c3": 3 * BUCKET, "c2": 3 * BUCKET, "c1": 3 * BUCKET,
        "c0": 3 * BUCKET,
    }  # fmt: skip


def test_every_stage_needs_less_on_many_ranks() -> None:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"))
    totals = [
        plan_memory(PlanIndex(replicas(stage, dp=8), CHAIN), cluster, precision="fp32", optimizer="adam")[0].total_bytes
        for stage in (0, 1, 2, 3)
    ]
    assert totals == sorted(totals, reverse=True)


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(2, 3), st.integers(0, 2**32 - 1))
def test_whatever_takes_how_long_no_more_is_whole_than_predicted(plan: Plan, zero_stage: int, seed: int) -> None:
    """Parameters are there when they are needed, gradients until they are sent; never more than the most of `unsharded_bytes`
    at once, and never less than the least."""
    plan = replace(plan, zero_stage=zero_stage)
    layout = PlanIndex(plan, MODEL)
    graph = lower(plan, MODEL)
    come_and_go = [task for task in graph.tasks if task.origin.bucket is not None and task.origin.microbatch is not None]
    assume(come_and_go)
    rng = np.random.default_rng(seed)
    timeline = simulate(graph, rng.exponential(rng.choice([0.1, 1.0, 10.0], len(graph.tasks))))
    start, end = np.zeros(len(graph.tasks)), np.zeros(len(graph.tasks))
    start[timeline.task], end[timeline.task] = timeline.start_s, timeline.end_s
    for rank in range(plan.world_size):
        own = [task for task in graph.tasks if rank in task.ranks]
        held = [_held(task, rank, own, layout, start, end) for task in come_and_go if rank in task.ranks]
        bound = unsharded_bytes(layout, rank)
        fullest: dict[str, float] = {}
        for task in own:
            if isinstance(task.work, Compute) and task.work.phase is not Phase.FORWARD:
                moments = [start[task.index], *(t for t, _, _ in held if start[task.index] < t < end[task.index])]
                most = max(sum(size for t, until, size in held if t <= moment < until) for moment in moments)
                assert most <= bound[task.work.component].most, f"{task.work} on rank {rank}"
                fullest[task.work.component] = max(fullest.get(task.work.component, 0.0), most)
        assert all(size >= bound[name].least for name, size in fullest.items())


def _held(
    task: Task, rank: int, own: list[Task], layout: PlanIndex, start: np.ndarray, end: np.ndarray
) -> tuple[float, float, int]:  # type: ignore[type-arg]
    """From when to when a bucket that comes or goes with this collective lies whole on the rank, and its bytes."""
    assert isinstance(task.work, Collective)
    assert task.origin.bucket is not None
    names = {parameter.name for parameter in layout.buckets[task.origin.bucket].parameters}
    computes = [
        other
        for other in own
        if isinstance(other.work, Compute)
        and any(parameter.name in names for parameter in MODEL.component(other.work.component).parameters)
    ]
    if task.work.operation == "all_gather":
        needing = [other for other in computes if task.index in other.dependencies]
        assert needing, "what is gathered is needed"
        assert all(start[other.index] >= end[task.index] for other in needing)
        return start[task.index], max(end[other.index] for other in needing), task.work.size_bytes
    adding = [
        other
        for other in computes
        if isinstance(other.work, Compute)
        and other.origin.microbatch == task.origin.microbatch
        and other.work.phase is layout.weight_phase(other.work.component)
    ]
    assert all(end[other.index] <= start[task.index] for other in adding)
    return min(start[other.index] for other in adding), end[task.index], task.work.size_bytes


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
