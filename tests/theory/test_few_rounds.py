"""What is worked out from four rounds of microbatches equals what all rounds give."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.errors import PlanError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import Action, few_rounds, pipeline_actions
from parsim.predict import memory as plan_memory
from parsim.predict.problem import PlanningProblem
from parsim.program.lifetimes import FewActions, few_actions
from parsim.program.passes.unsharded import uses_of
from parsim.program.placed import PlanIndex
from parsim.search.stages import balanced_plan
from parsim.work import Phase
from tests.models import chain_model

ORDERS = (("1f1b", 1), ("interleaved", 2), ("interleaved", 3))


@settings(max_examples=40, deadline=None)
@given(
    order=st.sampled_from(ORDERS),
    pp=st.integers(1, 4),
    rounds=st.integers(1, 9),
    zero_stage=st.sampled_from((2, 3)),
    data=st.data(),
)
def test_buckets_are_whole_as_long_with_few_actions(
    order: tuple[str, int], pp: int, rounds: int, zero_stage: int, data: st.DataObject
) -> None:
    order = ("1f1b", 1) if pp == 1 else order
    elements = data.draw(st.sampled_from((1_000, 3_000_000)))
    problem = PlanningProblem(
        model=chain_model((1e9,) * 13, elements=elements),
        cluster=cluster_from_profile(load_profile("dgx1-v100-32gb"), 2 * pp),
        global_batch=2 * pp * rounds,
        zero_stage=zero_stage,
    )
    plan = balanced_plan(
        problem, "custom", Mesh(pp=pp, dp=2), microbatches=pp * rounds, pipeline_order=order[0], chunks=order[1]
    )
    size = data.draw(st.sampled_from((1_000_000, 25_000_000, 10**9)))
    layout = PlanIndex(replace(plan, zero_stage=zero_stage, bucket_bytes=size), problem.model)
    short = [plan_memory.whole_bytes(layout, rank) for rank in range(plan.world_size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_memory, "few_actions", every_action)
        whole = [plan_memory.whole_bytes(layout, rank) for rank in range(plan.world_size)]
    for rank, (few, every) in enumerate(zip(short, whole, strict=True)):
        pipeline = order[0], plan.stage_of_rank(rank), pp, plan.microbatches, order[1]
        uses = [(uses_of(layout, pipeline[1], [action]), number) for action, number in zip(*standing(pipeline), strict=True)]
        held = {
            (use.phase, use.component, use.microbatch): few[use.phase, use.component, number]
            for made, number in uses
            for use in made
        }
        assert held == every


def every_action(order: str, place: int, ranks: int, microbatches: int, chunks: int) -> FewActions:
    actions = tuple(pipeline_actions(order, place, ranks, microbatches, chunks))
    return FewActions(actions, tuple(action.microbatch for action in actions))


def standing(pipeline: tuple[str, int, int, int, int]) -> tuple[tuple[Action, ...], tuple[int, ...]]:
    """All actions of a place, and by action the microbatch that stands for its own."""
    return every_action(*pipeline).actions, few_actions(*pipeline).microbatches


@pytest.mark.parametrize(("order", "chunks"), ORDERS)
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("rounds", [5, 6, 9, 12])
def test_the_end_of_a_step_is_that_of_four_rounds(order: str, chunks: int, ranks: int, rounds: int) -> None:
    microbatches = ranks * rounds
    for rank in range(ranks):
        try:
            whole = pipeline_actions(order, rank, ranks, microbatches, chunks)
        except PlanError:
            continue
        few = few_rounds(order, ranks, microbatches)
        assert _end(whole, chunks) == _end(pipeline_actions(order, rank, ranks, few, chunks), chunks)


def _end(actions, chunks):  # type: ignore[no-untyped-def]
    """From behind, until a backward of every stage of the rank has been met."""
    found, met = [], set()
    for action in reversed(actions):
        found.append((action.stage, action.phase))
        if action.phase is not Phase.FORWARD:
            met.add(action.stage)
        if len(met) == chunks:
            break
    return found
