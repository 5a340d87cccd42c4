"""plan.dp_shard of a run file: read, kept by a search, and refused with the rule, the values and the fix."""

from __future__ import annotations

import pytest

from parsim.app.functions import plan, simulate
from parsim.errors import ParsimError
from parsim.plans.constraints import PlanConstraints
from parsim.plans.mesh import Mesh
from parsim.predict.problem import PlanningProblem
from parsim.search.families import FAMILIES
from parsim.search.search import search
from parsim.search.space import devices_on_a_node, meshes
from tests.models import chain_model
from tests.theory.test_folding import cluster

TWO_NODES = {"cluster.nodes": 2, "cluster.devices": 4, "cluster.network": "ethernet-25g"}
BY_HAND = {"plan.strategy": "custom", "plan.mesh": {"dp": 8}}


def asked(**settings: object) -> Mesh:
    keys = {**TWO_NODES, **BY_HAND, **{f"plan.{key}": value for key, value in settings.items()}}
    return simulate("mlp", cluster="dgx1-v100-32gb", global_batch=64, settings=keys).plan.mesh


def test_a_plan_by_hand_has_the_groups_that_it_names() -> None:
    assert asked(dp_shard=4, zero_stage=3) == Mesh(dp=8, dp_shard=4)
    assert asked(dp_shard=8, zero_stage=3) == asked(zero_stage=3) == Mesh(dp=8)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dp_shard": 3, "zero_stage": 3}, r"dp_shard \(3\) must divide dp \(8\).*the nearest that do: 2 or 4"),
        ({"dp_shard": 4, "zero_stage": 0}, r"dp_shard = 4 .*zero_stage = 0 divides none; set zero_stage = 1, 2 or 3"),
        ({"dp_shard": 4}, r"a plan by hand divides none unless it says so; set zero_stage = 1, 2 or 3"),
        ({"dp_shard": 4, "strategy": "dp", "mesh": {}, "synchronisation": "average/8"}, r"drop dp_shard"),
        ({"dp_shard": 5, "strategy": "dp", "mesh": {}}, r"dp_shard \(5\) must divide mesh.dp.* devices \(8\).*: 4 or 8"),
    ],
)
def test_groups_without_states_to_divide_are_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ParsimError, match=text):
        asked(**settings)


def test_a_search_keeps_the_groups_that_are_asked_for() -> None:
    keys = {**TWO_NODES, "plan.dp_shard": 2, "plan.strategy": "dp"}
    answer = plan("mlp", cluster="dgx1-v100-32gb", global_batch=64, settings=keys)
    chosen = answer.chosen.plan
    assert (chosen.mesh.dp_shard or chosen.mesh.dp) == 2
    assert chosen.zero_stage


def test_a_search_tries_groups_of_a_node_where_replicas_span_several() -> None:
    problem = PlanningProblem(model=chain_model(), cluster=cluster("two dgx1"), global_batch=64)
    assert devices_on_a_node(problem) == 8
    grouped = {mesh for mesh in meshes(problem) if mesh.dp_shard}
    assert {(mesh.pp, mesh.dp, mesh.tp, mesh.dp_shard) for mesh in grouped} == {
        (1, 16, 1, 8), (1, 8, 2, 4), (1, 4, 4, 2)
    }  # fmt: skip
    one_node = PlanningProblem(model=chain_model(), cluster=cluster("dgx1"), global_batch=64)
    assert not any(mesh.dp_shard for mesh in meshes(one_node))
    whole = PlanningProblem(model=chain_model(), cluster=cluster("two dgx1"), global_batch=64, zero_stage=0)
    assert not any(mesh.dp_shard for mesh in meshes(whole))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_search_finds_the_best_of_all_members_with_groups(stage: int) -> None:
    """Branch and bound against every plan of the family simulated."""
    from parsim.predict.evaluate import evaluate

    model = chain_model((1e8, 2e8), elements=10**6)
    constraints = PlanConstraints(dp=16)
    problem = PlanningProblem(
        model=model, cluster=cluster("two dgx1"), global_batch=64, zero_stage=stage, recompute="none", constraints=constraints
    )
    members = list(FAMILIES["dp"](problem))
    assert {member.mesh.dp_shard for member in members} == {0, 8}
    best = min(evaluate(problem, member, samples=0).result.step_s.median for member in members)
    found = search(problem, ("dp",)).chosen
    assert found is not None
    assert found.result.step_s.median <= best * (1 + 1e-9)
    assert found.result.lower_bound_s <= best * (1 + 1e-9)
