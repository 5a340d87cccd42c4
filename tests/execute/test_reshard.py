"""A live change of plan on gloo ranks keeps weights, buffers and optimizer state bit for bit, through any chain of plans."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from experiments.common.forked import run_ranks
from parsim.execute.checkpoint.checkpoint import RankState, load_state, save_checkpoint
from parsim.execute.checkpoint.reshard import reshard
from parsim.execute.operations import all_gather_flat, reduce_scatter_flat, run_hop
from parsim.execute.stage import StageReplica
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import HOPS, LOCAL_HOPS, hop_groups, parse_hop
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from tests.execute.rank_states import GPT, MLP, RESNET, TABLE, assert_same_state, even_plan, newest, random_state, rank_of
from tests.layouts import every_hop, held, whole_array
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


# Every communicating hop on real gloo ranks leaves on each what the layout says, and what it was given as it was.

POINT_TO_POINT = ("gather", "scatter", "move")
SUMMING = ("all_reduce", "all_reduce_maximum", "reduce_scatter_batch", "reduce_scatter_dim")


def _spread(tensor: Tensor) -> Tensor:
    """The same entries with strides of a permuted array, as a gradient of a transposed product has."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def _all_hops(rank: int, tp: int) -> list[str]:
    """Runs every collective hop there is over `tp` ranks; returns the operations it has run."""
    groups = {}
    whole, operations = whole_array(tp), set()
    for hop in every_hop(tp):
        if hop.operation in LOCAL_HOPS or hop.operation in POINT_TO_POINT:
            continue
        for members in hop_groups(hop, tp):
            if members not in groups:
                groups[members] = dist.new_group(list(members))
        (mine,) = [members for members in hop_groups(hop, tp) if rank in members]
        before, after = held(whole, hop.source, tp)[rank], held(whole, hop.target, tp)[rank]
        assert after is not None
        for dtype in (torch.float64, torch.float32, torch.int64):
            if dtype == torch.int64 and hop.operation in SUMMING:
                continue
            expected = torch.from_numpy(after).to(dtype)
            given = torch.empty_like(expected) if before is None else torch.from_numpy(before).to(dtype)
            for tensor in (given, _spread(given)):
                kept = tensor.clone()
                made = run_hop(hop, tensor, ranks=mine, group=groups[mine])
                assert made.dtype == dtype
                assert torch.equal(made, expected), f"{hop} on rank {rank} of {tp}, {dtype}"
                assert before is None or torch.equal(tensor, kept), f"{hop} changed what it was given"
                operations.add(hop.operation)
    return sorted(operations)


@pytest.mark.parametrize("tp", [2, 4])
def test_every_collective_hop_on_gloo(tmp_path: Path, tp: int) -> None:
    collective = sorted(set(HOPS) - {*LOCAL_HOPS, *POINT_TO_POINT})
    assert run_ranks(_all_hops, tp, tmp_path, tp) == [collective] * tp


def _flat_sums(rank: int) -> list[Tensor]:
    flat = torch.arange(6, dtype=torch.float64) * (rank + 1)
    own = torch.empty(3, dtype=torch.float64)
    group = dist.group.WORLD
    assert group is not None
    reduce_scatter_flat(own, flat, group)
    back = torch.empty(6, dtype=torch.float64)
    all_gather_flat(back, own, group)
    return [own, back]


def test_parts_of_a_flat_sum_and_the_whole_again(tmp_path: Path) -> None:
    total = torch.arange(6, dtype=torch.float64) * 3
    for rank, (own, back) in enumerate(run_ranks(_flat_sums, 2, tmp_path)):
        assert torch.equal(own, total[3 * rank : 3 * rank + 3])
        assert torch.equal(back, total)


def _ask_for_a_message(_: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    run_hop(parse_hop("move:placed0/1>placed0/1"), torch.zeros(1), ranks=(0,), group=group)


def test_a_message_is_no_collective(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="is not a collective"):
        run_ranks(_ask_for_a_message, 1, tmp_path)
