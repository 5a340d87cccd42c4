"""Memory action by action (chunks, halves) against the closed form where both hold, and what waits between two stages."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.devices import NO_ALLOCATOR
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import in_flight, pipeline_actions, rank_of_stage
from parsim.plans.plan import Plan, Stage
from parsim.predict import memory as plan_memory
from parsim.program.lifetimes import KeptActivations, Pipeline, RankValues, StageLink, held_moments
from parsim.program.placed import PlanIndex
from parsim.work import Phase
from tests.models import residual_model


def machine(devices: int) -> Cluster:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), devices)
    bare = {"context_bytes": 0, "allocator": NO_ALLOCATOR}
    return replace(cluster, devices=tuple(replace(d, type=replace(d.type, **bare)) for d in cluster.devices))  # type: ignore[arg-type]


def pipeline(model: Model, pp: int, *, order: str = "1f1b", chunks: int = 1, **more: object) -> Plan:
    names = tuple(component.name for component in model.components)
    cuts = [round(number * len(names) / (pp * chunks)) for number in range(pp * chunks + 1)]
    mesh = Mesh(pp=pp)
    stages = tuple(
        Stage(components=names[first:last], ranks=mesh.stage_ranks(place))
        for place, (first, last) in zip(rank_of_stage(order, pp, chunks), itertools.pairwise(cuts), strict=True)
    )
    return Plan(strategy="custom", mesh=mesh, stages=stages, global_batch=8, pipeline_order=order, **more)  # type: ignore[arg-type]


def peaks(plan: Plan, model: Model) -> list[int]:
    found = plan_memory.plan_memory(PlanIndex(plan, model), machine(plan.world_size), Numerics(optimizer="sgd"))
    return [sum(entry.tensor_lines.values()) for entry in found]


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8]),
    st.data(),
)
def test_the_moments_hold_what_the_actions_leave(order: str, ranks: int, microbatches: int, data: st.DataObject) -> None:
    chunks = 2 if order in ("interleaved", "zero-bubble-v") else 1
    if order == "interleaved":
        microbatches *= ranks
    rank = data.draw(st.integers(0, ranks - 1))
    found = held_moments(Pipeline(order=order, ranks=ranks, microbatches=microbatches, chunks=chunks), rank)
    actions = pipeline_actions(order, rank, ranks, microbatches, chunks)
    assert found.alive.sum(axis=1).max() == in_flight(order, rank, ranks, microbatches, chunks)
    assert order != "1f1b" or in_flight(order, rank, ranks, microbatches) == min(microbatches, ranks - rank)
    assert {phase for _, phase, _ in found.kinds} == {action.phase for action in actions}
    assert ((found.waiting >= 0) & (found.waiting <= found.alive)).all()


def test_one_rank_of_a_zero_bubble_pipeline_by_hand() -> None:
    """Rank 1 of 2: F0 I0 W0. The half for weights still has the microbatch, that for inputs does not wait for itself."""
    found = held_moments(Pipeline(order="zero-bubble", ranks=2, microbatches=1), 1)
    assert found.kinds == ((0, Phase.FORWARD, 0), (0, Phase.BACKWARD_INPUT, 0), (0, Phase.BACKWARD_WEIGHT, 0))
    assert found.alive.tolist() == [[1], [1], [1]]
    assert found.waiting.tolist() == [[0], [0], [1]]
    assert found.unread.tolist() == [[0], [0], [0]]


@given(st.integers(1, 9))
def test_what_one_chunk_of_a_v_makes_waits_for_the_other(microbatches: int) -> None:
    """Rank 1 of 2 has stages 1 and 2: a value waits from one forward to the other, a gradient likewise in the backward."""
    shape = Pipeline(order="zero-bubble-v", ranks=2, microbatches=microbatches, chunks=2)
    found = held_moments(shape, 1, inner=(StageLink(1, 2), StageLink(2, 1)))
    values, gradients = set[int](), set[int]()
    seen = set()
    for action in pipeline_actions("zero-bubble-v", 1, 2, microbatches, 2):
        forward, back = action.phase is Phase.FORWARD, action.phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT)
        if forward and action.stage == 2:
            values.remove(action.microbatch)
        if back and action.stage == 1:
            gradients.remove(action.microbatch)
        seen.add((action.stage - 1, action.phase, (len(values), len(gradients))))
        if forward and action.stage == 1:
            values.add(action.microbatch)
        if back and action.stage == 2:
            gradients.add(action.microbatch)
    assert not values
    assert not gradients, "all are read"
    kept = {
        (chunk, phase, tuple(between)) for (chunk, phase, _), between in zip(found.kinds, found.between.tolist(), strict=True)
    }
    assert kept <= seen
    for place in (0, 1):
        assert max(between[place] for *_, between in kept) == max(between[place] for *_, between in seen)
    assert microbatches < 4 or max(between[1] for *_, between in kept) >= 1


def test_the_gradient_of_a_skip_between_stages_waits_for_its_maker() -> None:
    """a is read by d on the other rank: its gradient arrives before the backward of b, and is read by that of a."""
    model = residual_model()
    layout = PlanIndex(pipeline(model, 2), model)  # a, b | c, d, loss
    names = layout.rank_components(0)
    assert list(names) == ["a", "b"]
    waiting = RankValues(KeptActivations(layout, "fp32"), 0).waiting_gradients()
    size = model.value["a:0"].size_bytes(8)
    there = [(life.value, life.born, life.freed, life.size_bytes) for life in waiting if life.born <= life.freed]
    assert there == [("a:0", 1, 1, size)], "beside b, from the beginning of the backward; b itself reads that of its output"
