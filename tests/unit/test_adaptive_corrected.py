"""What a run teaches about costs, and how it changes prices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parsim.costs.costs import Costs, price
from parsim.costs.observed import (
    NO_RUN_CORRECTIONS,
    CommunicationClass,
    ComputeClass,
    RunCorrections,
    class_of,
    class_seconds,
    learn,
)
from parsim.errors import CostError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.plans.mesh import Mesh
from parsim.predict.problem import PlanningProblem
from parsim.search.stages import balanced_plan
from parsim.work import Collective, Compute, LoadBatch, OptimizerStep, Phase, SendRecv, Work
from tests.models import chain_model

MODEL = chain_model((4e9,) * 8, elements=2_000_000)
CLUSTER = cluster_from_profile(load_profile("dgx1-v100-32gb"), 4)
FORWARD = Compute(component="c0", phase=Phase.FORWARD, samples=8)


def group(operation: str, *ranks: int) -> CommunicationClass:
    return CommunicationClass(operation, ranks)


def test_classes_of_work() -> None:
    assert class_of(FORWARD, 3) == ComputeClass(3, "c0", Phase.FORWARD)
    assert class_of(OptimizerStep(elements=5, tensors=1), 2) == ComputeClass(2, "", Phase.OPTIMIZER)
    assert class_of(Collective(operation="all_reduce", group=(2, 0, 1), size_bytes=8), 0) == group("all_reduce", 0, 1, 2)
    assert class_of(SendRecv(source=3, destination=1, size_bytes=8), 3) == group("send_recv", 3, 1)
    assert class_of(LoadBatch(samples=8, size_bytes=8), 0) is None
    assert [str(class_of(work, 1)) for work in (FORWARD, OptimizerStep(elements=5, tensors=1))] == [
        "forward c0 on rank 1",
        "optimizer on rank 1",
    ]
    assert str(group("send_recv", 3, 1)) == "send_recv 3>1"
    assert str(group("all_reduce", 0, 1)) == "all_reduce over 0,1"


def test_seconds_are_summed_by_class() -> None:
    transfer = SendRecv(source=0, destination=1, size_bytes=8)
    totals = class_seconds(
        [
            (FORWARD, 0, 1.0),
            (FORWARD, 1, 2.0),
            (FORWARD, 0, 3.0),
            (transfer, 0, 0.5),
            (LoadBatch(samples=1, size_bytes=1), 0, 9.0),
        ]
    )
    assert totals == {
        ComputeClass(0, "c0", Phase.FORWARD): 4.0,
        ComputeClass(1, "c0", Phase.FORWARD): 2.0,
        group("send_recv", 0, 1): 0.5,
    }


def test_a_ranks_factor_weighs_its_classes_by_their_seconds() -> None:
    """3 s of which 2 took 1.5 times as long, and 1 s as expected: 4/3. What only one side names teaches nothing."""
    long, short = ComputeClass(0, "a", Phase.FORWARD), ComputeClass(0, "b", Phase.FORWARD)
    unknown, free = ComputeClass(1, "a", Phase.FORWARD), group("all_reduce", 0)
    expected = {long: 2.0, short: 1.0, group("all_reduce", 0, 1): 0.5, free: 0.0}
    learnt = learn({long: 3.0, short: 1.0, unknown: 7.0, group("all_reduce", 0, 1): 2.0, free: 1.0}, expected)
    assert learnt == RunCorrections(ranks=((0, 4 / 3),), communication=((group("all_reduce", 0, 1), 4.0),))


def test_what_was_not_observed_is_inferred_from_slowest_link_and_median() -> None:
    known = RunCorrections(
        ranks=((0, 1.0), (1, 1.5), (2, 1.0)),
        communication=(
            (group("send_recv", 0, 1), 3.0),
            (group("send_recv", 1, 2), 1.1),
            (group("all_reduce", 2, 3, 4, 5), 2.0),
            (group("all_reduce", 2, 3, 4, 5, 6), 1.8),
        ),
    )
    assert [known.rank_factor(rank) for rank in (0, 1, 7)] == [1.0, 1.5, 1.0]
    assert known.communication_factor(group("send_recv", 1, 2)) == 1.1, "as observed"
    assert known.communication_factor(group("all_reduce", 0, 1, 2)) == 3.0, "as slow as the slowest transfer inside"
    assert known.communication_factor(group("send_recv", 3, 4)) == 1.8, "no slower than the fastest group around it"
    assert known.communication_factor(group("all_gather", 2, 3, 4, 5)) == 2.0, "another operation over the same ranks"
    assert known.communication_factor(group("send_recv", 6, 7)) == pytest.approx(1.9), "the median of all"
    assert NO_RUN_CORRECTIONS.communication_factor(group("send_recv", 6, 7)) == 1.0
    assert NO_RUN_CORRECTIONS.rank_factor(3) == 1.0
    assert not NO_RUN_CORRECTIONS


def test_equal_corrections_are_equal_values_in_any_order() -> None:
    one = RunCorrections(ranks=((1, 2.0), (0, 1.0)))
    other = RunCorrections(ranks=((0, 1.0), (1, 2.0)))
    one.communication_factor(group("send_recv", 0, 1))
    assert one == other
    assert hash(one) == hash(other)
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(CostError, match="rank 3 is"):
            RunCorrections(ranks=((3, factor),))


def test_costs_multiply_and_say_so() -> None:
    corrections = RunCorrections(
        ranks=((0, 1.0), (1, 1.25), (2, 1.0), (3, 1.0)), communication=((group("all_reduce", 0, 1, 2, 3), 3.0),)
    )
    plain, now = (Costs(model=MODEL, cluster=CLUSTER, corrections=entry) for entry in (NO_RUN_CORRECTIONS, corrections))
    reduce = Collective(operation="all_reduce", group=(0, 1, 2, 3), size_bytes=1 << 20)
    load = LoadBatch(samples=8, size_bytes=1 << 20)
    cases: list[tuple[Work, int, float]] = [(FORWARD, 0, 1.0), (FORWARD, 1, 1.25), (reduce, 0, 3.0), (load, 1, 1.0)]
    for work, rank, factor in cases:
        before, after = plain.estimate(work, rank), now.estimate(work, rank)
        assert after.median_s == pytest.approx(factor * before.median_s, rel=1e-12)
        assert after.parameters == before.parameters
        assert (after.detail == before.detail) == (factor == 1.0)
    assert "3 times that, as observed" in now.estimate(reduce, 0).detail


def test_a_price_is_not_shared_between_ranks_of_different_speed() -> None:
    corrections = RunCorrections(ranks=((0, 1.0), (1, 2.0), (2, 1.0), (3, 1.0)))
    costs = Costs(model=MODEL, cluster=CLUSTER, corrections=corrections)
    first, second, third = price([(FORWARD, 0), (FORWARD, 1), (FORWARD, 2)], costs)
    assert second.median_s == pytest.approx(2 * first.median_s)
    assert third is first
    assert costs.device_kind(0) == costs.device_kind(2) != costs.device_kind(1)


def test_a_slow_rank_gets_a_smaller_stage() -> None:
    problem = PlanningProblem(model=MODEL, cluster=CLUSTER, global_batch=64)
    slow = replace(problem, corrections=RunCorrections(ranks=((0, 1.0), (1, 1.0), (2, 3.0), (3, 1.0))))
    sizes = [
        [
            len(stage.components)
            for stage in balanced_plan(question, "mp", Mesh(pp=4), microbatches=8, pipeline_order="1f1b").stages
        ]
        for question in (problem, slow)
    ]
    assert sizes[1][2] < sizes[0][2]
    assert sum(sizes[1]) == sum(sizes[0])
