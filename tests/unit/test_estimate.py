"""What an estimate adds for ZeRO 3, against the prices of its collectives one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.predict.problem import PlanningProblem
from parsim.search.estimate import UNCOVERED, gathering_s
from parsim.work import Collective
from tests.machines import machine
from tests.models import chain_model

PROBLEM = PlanningProblem(model=chain_model(elements=1_000_000), cluster=machine(), global_batch=64)


def zero_3_plan(mesh: Mesh, microbatches: int) -> Plan:
    names = tuple(component.name for component in PROBLEM.model.components)
    ends = [0, *(2 * place for place in range(1, mesh.pp)), len(names)]
    return Plan(
        strategy="hp",
        mesh=mesh,
        global_batch=PROBLEM.global_batch,
        microbatches=microbatches,
        stages=tuple(
            Stage(components=names[first:last], ranks=tuple(mesh.stage_range(place)))
            for place, (first, last) in enumerate(pairwise(ends))
        ),
        zero_stage=3,
    )


def collective_s(mesh: Mesh, operation: str, copies: range, size_bytes: int) -> float:
    group = tuple(mesh.rank(stage=0, replica=copy, shard=0) for copy in copies)
    work = Collective(operation=operation, group=group, size_bytes=size_bytes)
    return PROBLEM.price([(work, 0)], mesh)[0].median_s


@pytest.mark.parametrize(
    ("mesh", "microbatches"), [(Mesh(dp=8), 2), (Mesh(pp=2, dp=4), 4), (Mesh(pp=2, dp=4, dp_shard=2), 8)], ids=str
)
def test_zero_3_gathers_twice_and_sums_once_per_microbatch(mesh: Mesh, microbatches: int) -> None:
    """Of a stage's equal share of the parameters; parts are summed over the sharding groups once per step."""
    held = PROBLEM.model.parameter_bytes // mesh.pp
    group, between = range(mesh.group_copies), range(0, mesh.copies, mesh.group_copies)
    every_s = collective_s(mesh, "reduce_scatter", group, held) + 2 * collective_s(mesh, "all_gather", group, held)
    once_s = collective_s(mesh, "all_reduce", between, held // len(group)) if len(between) > 1 else 0.0
    expected_s = UNCOVERED * (once_s + microbatches * every_s)
    assert expected_s > 0
    assert gathering_s(PROBLEM, zero_3_plan(mesh, microbatches)) == pytest.approx(expected_s, rel=1e-12)


def test_one_replica_gathers_nothing() -> None:
    assert gathering_s(PROBLEM, zero_3_plan(Mesh(pp=2), 4)) == 0
