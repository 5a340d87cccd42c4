"""ZeRO within sharding groups (HSDP): states divided over a group and alike in all groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from parsim.model.load import load_model
from parsim.plans.mesh import Mesh
from parsim.program.passes.gradients import counted_by
from parsim.program.placed import PlanIndex
from tests.execute.rank_states import MLP as SMALL_MLP
from tests.execute.rank_states import all_ranks, assert_same_state, even_plan, random_state, saved

GROUPS = Mesh(dp=4, dp_shard=2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_group_has_a_whole_state_and_a_checkpoint_has_one(tmp_path: Path, stage: int) -> None:
    """The state that ranks were given comes back from their checkpoint, to which the second group adds nothing."""
    plan = even_plan(SMALL_MLP, GROUPS, zero=stage)
    ranks, state = all_ranks(SMALL_MLP, plan), random_state(SMALL_MLP)
    for rank in ranks:
        rank.load(state)
    assert_same_state(saved(ranks, tmp_path), state)
    for number in (2, 3):
        assert not ranks[number].state().weights
        assert not ranks[number].state().optimizer
    for one, other in ((0, 2), (1, 3)):
        mine, theirs = (ranks[number].resident_tensors() for number in (one, other))
        assert [tensor.shape for tensor in mine["optimizer_state"]] == [tensor.shape for tensor in theirs["optimizer_state"]]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_moves_between_group_sizes(tmp_path: Path, stage: int) -> None:
    state = random_state(SMALL_MLP)
    meshes = (GROUPS, Mesh(dp=4), Mesh(dp=8, dp_shard=4), Mesh(dp=2))
    for number, mesh in enumerate(meshes):
        ranks = all_ranks(SMALL_MLP, even_plan(SMALL_MLP, mesh, zero=stage))
        for rank in ranks:
            rank.load(state)
        state = saved(ranks, tmp_path / str(number))
    assert_same_state(state, random_state(SMALL_MLP))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "mesh", [GROUPS, Mesh(dp=8, dp_shard=4), Mesh(dp=8, dp_shard=2), Mesh(pp=2, dp=4, dp_shard=2)], ids=str
)
def test_every_gradient_counts_once_in_the_norm(mesh: Mesh, stage: int) -> None:
    model = load_model(SMALL_MLP)
    layout = PlanIndex(even_plan(SMALL_MLP, mesh, zero=stage), model)
    counted = sum(part.elements for rank in range(mesh.size) for part in counted_by(layout, rank))
    assert counted == sum(parameter.elements for parameter in model.parameters)
