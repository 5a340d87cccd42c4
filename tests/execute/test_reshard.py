"""A live change of plan on gloo ranks keeps weights, buffers and optimizer state bit for bit, through any chain of plans."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from experiments.common.forked import run_ranks
from parsim.execute.checkpoint.checkpoint import RankState, load_state, save_checkpoint
from parsim.execute.checkpoint.reshard import reshard
from parsim.execute.stage import StageReplica
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from tests.execute.rank_states import (
    GPT,
    MLP,
    RESNET,
    TABLE,
    assert_same_state,
    even_plan,
    newest,
    random_state,
    rank_of,
)
from tests.quick import some_quick

MODELS = {"mlp": MLP, "resnet": RESNET, "gpt": GPT, "table": TABLE}


def four_rank_plans(spec: ModelSpec) -> list[Plan]:
    draw = None if spec == TABLE else random.Random(len(spec.name))
    return [
        even_plan(spec, Mesh(dp=2, tp=2), placing=draw),
        even_plan(spec, Mesh(dp=4)),
        even_plan(spec, Mesh(dp=4), zero=1),
        even_plan(spec, Mesh(pp=2, tp=2), placing=draw, zero=1),
        even_plan(spec, Mesh(dp=4), zero=3),
        even_plan(spec, Mesh(dp=2, tp=2), placing=draw, zero=3),
        even_plan(spec, Mesh(tp=4), placing=draw),
        even_plan(spec, Mesh(pp=4)),
        even_plan(spec, Mesh(pp=2, dp=2), zero=2),
        even_plan(spec, Mesh(dp=2, tp=2), placing=draw, zero=1),
    ]


def _through(rank: int, spec: ModelSpec, plans: list[Plan], state: RankState, optimizer: str, folder: Path) -> None:
    """Loads the state, moves it from plan to plan, and saves it."""
    stage = rank_of(spec, plans[0], rank, optimizer=optimizer)
    stage.load(state)
    for number, plan in enumerate(plans[1:]):
        after = rank_of(spec, plan, rank, optimizer=optimizer, seed=number + 1)
        reshard(stage, after)
        stage = after
    save_checkpoint(
        folder, 1, stage.state(), seed=0, rank=rank, world_size=len(plans[0].stages[0].ranks) * len(plans[0].stages)
    )


@pytest.mark.parametrize("optimizer", some_quick(["adam", "sgd"], "adam"))
@pytest.mark.parametrize("name", some_quick(MODELS, "gpt", "table"))
def test_a_chain_of_switches_changes_no_bit(tmp_path: Path, name: str, optimizer: str) -> None:
    spec, plans = MODELS[name], four_rank_plans(MODELS[name])
    expected = random_state(spec, optimizer=optimizer)
    for plan in plans:  # recorded here once, and not again by every rank
        rank_of(spec, plan, 0, optimizer=optimizer)
    run_ranks(_through, 4, tmp_path, spec, plans, expected, optimizer, tmp_path / "checkpoints")
    found = newest(tmp_path / "checkpoints")
    optimizer_state = {key: value for key, value in expected.optimizer.items() if value}
    wanted = RankState(weights=expected.weights, buffers=expected.buffers, optimizer=optimizer_state)
    assert_same_state(load_state(found), wanted, name)


def _own_statistics(rank: int, plans: list[Plan]) -> dict[str, torch.Tensor]:
    """Every rank comes with its own statistics; what it has after the switch."""
    before, after = (rank_of(RESNET, plan, rank) for plan in plans)
    for buffer in before.buffers().values():
        buffer.fill_(rank + 1)
    reshard(before, after)
    return {name: buffer.clone() for name, buffer in after.buffers().items()}


def test_a_rank_keeps_its_own_statistics_and_else_takes_those_of_the_lowest(tmp_path: Path) -> None:
    same = [even_plan(RESNET, Mesh(dp=2)), even_plan(RESNET, Mesh(dp=2), zero=1)]
    staged = [even_plan(RESNET, Mesh(pp=2)), even_plan(RESNET, Mesh(dp=2))]
    for folder, plans in {"same": same, "staged": staged}.items():
        (tmp_path / folder).mkdir()
        found = run_ranks(_own_statistics, 2, tmp_path / folder, plans)
        if folder == "same":
            assert all(bool((buffer == rank + 1).all()) for rank in (0, 1) for buffer in found[rank].values())
            continue
        first, second = (set(rank_of(RESNET, staged[0], rank).buffers()) for rank in (0, 1))
        assert first
        assert second
        for buffers in found:
            assert all(bool((buffers[name] == 1).all()) for name in first)
            assert all(bool((buffers[name] == 2).all()) for name in second)


def _adam_after_a_switch(rank: int, state: RankState) -> tuple[list[float], int]:
    """Step counters after one more update, and how many tensors they are."""
    before = rank_of(MLP, even_plan(MLP, Mesh(dp=2), zero=1), rank)
    before.load(state)
    after: StageReplica = rank_of(MLP, even_plan(MLP, Mesh(dp=2)), rank)
    reshard(before, after)
    after.optimizer_step()
    counters = [held["step"] for held in after.updates.optimizers[""].state.values()]
    return [float(counter) for counter in counters], len({counter.data_ptr() for counter in counters})


def test_step_counters_of_one_chunk_become_one_for_each_parameter(tmp_path: Path) -> None:
    state = random_state(MLP)
    for counters, tensors in run_ranks(_adam_after_a_switch, 2, tmp_path, state):
        assert counters == [6.0] * len(state.weights)
        assert tensors == len(counters)
