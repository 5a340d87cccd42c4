"""What stands for thousands of copies: the first of them in an estimate, and one of those that sit alike in a folding."""

from __future__ import annotations

import pytest

from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.plans.mesh import Mesh
from parsim.predict.problem import PlanningProblem
from parsim.search import prices
from parsim.search.estimate import sent_s, transfer_s
from parsim.search.prices import fewer_copies
from parsim.work import Collective
from tests.models import chain_model

MESHES = (Mesh(dp=2048), Mesh(pp=2, dp=1024), Mesh(pp=2, dp=512, tp=2), Mesh(dp=1024, tp=2, dp_shard=4))


def nodes_of(count: int) -> Cluster:
    return cluster_from_profile(load_profile("8xh100-sxm"), nodes=count, network="infiniband-400g")


def problem_on(cluster: Cluster) -> PlanningProblem:
    return PlanningProblem(model=chain_model(elements=30_000_000), cluster=cluster, global_batch=4096)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("stage", [0, 1])
def test_sums_of_many_copies_are_estimated_by_the_first(mesh: Mesh, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 15% of the price of all (a protocol may change beyond them); the same for a transfer between stages."""
    whole, few = (problem_on(nodes_of(256)) for _ in range(2))
    exact, exact_transfer_s = sent_s(whole, mesh, 10**9, stage), transfer_s(whole, mesh, 1)
    monkeypatch.setattr(prices, "MOST_COPIES", 256)
    assert fewer_copies(mesh).copies == 256
    assert sent_s(few, mesh, 10**9, stage) == pytest.approx(exact, rel=0.15)
    assert transfer_s(few, mesh, 1) == pytest.approx(exact_transfer_s, rel=1e-9)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_fewer_copies_at_once_slow_no_group_more(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_on(nodes_of(256))
    monkeypatch.setattr(prices, "MOST_COPIES", 256)
    work = [(Collective(operation="all_reduce", group=tuple(range(mesh.tp * 2)), size_bytes=10**8), 0)]
    few, whole = (problem.price(work, mesh, beside)[0].median_s for beside in (fewer_copies(mesh), None))
    assert few <= whole * (1 + 1e-12)
