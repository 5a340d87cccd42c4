"""What a rank holds: its shards, its part of the optimizer state, and the way into checkpoints and out under another plan."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from experiments.common.equality import Case, compare_case, run_cases
from parsim.errors import ExecutionError
from parsim.execute.checkpoint.checkpoint import RankState
from parsim.execute.stage import StageReplica
from parsim.model.component import LOSS
from parsim.model.load import load_model
from parsim.model.optimizers import OPTIMIZERS
from parsim.model.spec import ModelSpec
from parsim.model.trace.memory import LiveBytes
from parsim.plans.layouts import BATCH, PIECES, REPLICATE, Placement, ValueLayout, parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from tests.execute.rank_states import (
    GPT,
    MLP,
    RESNET,
    TABLE,
    VIT,
    all_ranks,
    assert_same_state,
    even_plan,
    loss_samples,
    random_state,
    rank_of,
    saved,
)
from tests.execute.rank_states import MLP as SMALL_MLP
from tests.quick import some_quick

MODELS = {"mlp": MLP, "resnet": RESNET, "gpt": GPT, "vit": VIT, "table": TABLE}


def chain_of_plans(spec: ModelSpec, seed: int) -> list[Plan]:
    """Sharded, replicas, ZeRO over replicas, placements and stages and ZeRO (1 to 3), one process, sharded otherwise.

    What reads the shared table must lie as its maker does: there the plans differ in stages and replicas only.
    """
    draw = None if spec == TABLE else random.Random(seed)
    return [
        even_plan(spec, Mesh(tp=2), placing=draw),
        even_plan(spec, Mesh(dp=2)),
        even_plan(spec, Mesh(dp=4), zero=1),
        even_plan(spec, Mesh(dp=4), zero=3),
        even_plan(spec, Mesh(pp=2, dp=2, tp=2), zero=1, placing=draw),
        even_plan(spec, Mesh(pp=2, dp=2, tp=2), zero=3, placing=draw),
        even_plan(spec, Mesh()),
        even_plan(spec, Mesh(dp=2, tp=2), zero=2, placing=draw),
        even_plan(spec, Mesh(pp=2, tp=2), placing=draw),
    ]


@pytest.mark.parametrize("optimizer", some_quick(["adam", "sgd_momentum"], "adam"))
@pytest.mark.parametrize("name", MODELS)
def test_any_plan_goes_on_from_the_checkpoint_of_any_other(tmp_path: Path, name: str, optimizer: str) -> None:
    spec = MODELS[name]
    expected = state = random_state(spec, optimizer=optimizer)
    for number, plan in enumerate(chain_of_plans(spec, seed=number_of(name))):
        ranks = all_ranks(spec, plan, optimizer=optimizer, seed=number)
        for rank in ranks:
            rank.load(state)
        state = saved(ranks, tmp_path / str(number))
        assert_same_state(state, expected, plan.summary())


def number_of(name: str) -> int:
    return list(MODELS).index(name)


def test_cut_statistics_are_saved_in_pieces(tmp_path: Path) -> None:
    """The chain above meets pieces of running statistics: this plan of the ResNet holds nothing else."""
    model = load_model(RESNET)
    cut = {c.name: s.rule for c in model.components for s in c.shardings if s.buffers and s.limit % 2 == 0}
    mesh = Mesh(tp=2)
    placements = tuple(Placement("shard", rule=cut[c.name], ways=2) if c.name in cut else BATCH for c in model.components)
    stage = Stage(components=tuple(c.name for c in model.components), ranks=(0, 1), placements=placements)
    ranks = all_ranks(RESNET, Plan(strategy="custom", mesh=mesh, stages=(stage,), global_batch=8))
    expected = random_state(RESNET)
    for rank in ranks:
        rank.load(expected)
    pieces = ranks[1].state().fragments["buffers"]
    assert pieces
    for name, fragment in pieces.items():
        whole, mine = expected.buffers[name], ranks[1].buffers()[name]
        assert (fragment.shard, fragment.ways) == (1, 2)
        assert torch.equal(mine, whole[len(whole) // 2 :])
    assert_same_state(saved(ranks, tmp_path), expected)


def test_the_shard_of_a_rank_is_its_rows_or_columns() -> None:
    model = load_model(MLP)
    rules = {c.name: [s.rule for s in c.shardings] for c in model.components}
    first = next(name for name, found in rules.items() if "column" in found)
    second = next(name for name, found in rules.items() if "row" in found and name != first)
    placements = {first: "shard:column/2", second: "shard:row/2"}
    stage = Stage(
        components=tuple(rules),
        ranks=(0, 1),
        placements=tuple(parse_placement(placements.get(name, "batch")) for name in rules),
    )
    plan = Plan(strategy="custom", mesh=Mesh(tp=2), stages=(stage,), global_batch=8)
    whole = rank_of(MLP, even_plan(MLP, Mesh()), 0).parameters
    for shard, rank in enumerate(all_ranks(MLP, plan)):
        (column,) = [p.name for p in model.component(first).parameters if p.name.endswith("weight")]
        (row,) = [p.name for p in model.component(second).parameters if p.name.endswith("weight")]
        assert torch.equal(rank.parameters[column], whole[column].chunk(2, dim=0)[shard])
        assert torch.equal(rank.parameters[row], whole[row].chunk(2, dim=1)[shard])


def _stepped(ranks: list[StageReplica], step: int) -> None:
    """One update by the same gradients everywhere, as if summed; chunks of parameters are gathered by hand."""
    generator = torch.Generator().manual_seed(step)
    drawn: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, parameter in rank.parameters.items():
            if name not in drawn:
                drawn[name] = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.3
            assert parameter.grad is not None
            parameter.grad.copy_(drawn[name])
    for rank in ranks:
        rank.optimizer_step()
    for bucket in ranks[0].layout.buckets:
        if ranks[0].layout.is_divided(bucket):
            whole = torch.cat([ranks[member].divided[bucket.number].chunk.data.clone() for member in bucket.group])
            for member in bucket.group:
                ranks[member].divided[bucket.number].parameters.copy_(whole)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("spec", [MLP, TABLE], ids=["mlp", "table"])
def test_zero_updates_as_the_whole_optimizer_does(tmp_path: Path, spec: ModelSpec, optimizer: str) -> None:
    """To the last bit; a fused kernel rounds by where an entry lies in its vectors."""
    tolerance = 1e-12 if optimizer.endswith("_fused") else 0.0

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.allclose(one, other, rtol=tolerance, atol=0.0)

    plain = all_ranks(spec, even_plan(spec, Mesh(dp=4)), optimizer=optimizer)
    divided = all_ranks(spec, even_plan(spec, Mesh(dp=4), zero=1), optimizer=optimizer)
    for step in range(3):
        _stepped(plain, step)
        _stepped(divided, step)
    for other in divided:
        for name, parameter in plain[0].parameters.items():
            assert same(other.parameters[name], parameter), name
        assert all(not flat.any() for flat in other.buckets.values()), "gradients are zero for the next step"
    expected = saved(plain, tmp_path / "plain")
    found = saved(divided, tmp_path / "divided")
    assert found.optimizer.keys() == expected.optimizer.keys()
    for name, state in expected.optimizer.items():
        for key, value in state.items():
            assert same(found.optimizer[name][key], value), (name, key)


def test_zero_keeps_a_share_of_the_optimizer_state() -> None:
    def state_elements(zero: int) -> list[int]:
        ranks = all_ranks(MLP, even_plan(MLP, Mesh(dp=4), zero=zero))
        _stepped(ranks, 0)
        found = []
        for rank in ranks:
            held = [value for state in rank.updates.optimizers[""].state.values() for value in state.values()]
            found.append(sum(value.numel() for value in held if value.dim()))
        return found

    (whole, *_), parts = state_elements(0), state_elements(1)
    padding = 2 * 3 * len(rank_of(MLP, even_plan(MLP, Mesh(dp=4), zero=1), 0).buckets)
    assert all(whole / 4 <= part <= whole / 4 + padding for part in parts)


def test_step_counters_stay_one_for_each_parameter() -> None:
    """Parameters of one chunk come with one counter; the plain optimizer must not count it up once for each of them."""
    divided = all_ranks(MLP, even_plan(MLP, Mesh(dp=2), zero=1))
    _stepped(divided, 0)
    counter = torch.tensor(1.0)
    weights = {name: parameter.detach().clone() for name, parameter in divided[0].parameters.items()}
    arrays = {name: {key: torch.rand_like(weights[name]) for key in ("exp_avg", "exp_avg_sq")} for name in weights}
    state = RankState(weights=weights, optimizer={name: {**arrays[name], "step": counter} for name in weights})
    for plan in (even_plan(MLP, Mesh(dp=2)), even_plan(MLP, Mesh(dp=2), zero=1)):
        ranks = all_ranks(MLP, plan)
        for rank in ranks:
            rank.load(state)
        _stepped(ranks, 1)
        for rank in ranks:
            assert {float(held["step"]) for held in rank.updates.optimizers[""].state.values()} == {2.0}
    assert counter.item() == 1


@pytest.mark.parametrize(("placement", "counting"), [("batch", 4), ("replicate", 1), ("place:0", 1), ("place:3", 1)])
def test_every_loss_is_counted_once(placement: str, counting: int) -> None:
    names = tuple(component.name for component in load_model(MLP).components)
    placements = tuple(parse_placement(placement) if name == LOSS else REPLICATE for name in names)
    stage = Stage(components=names, ranks=tuple(range(8)), placements=placements)
    ranks = all_ranks(MLP, Plan(strategy="custom", mesh=Mesh(dp=2, tp=4), stages=(stage,), global_batch=16))
    assert sum(rank.loss_counts for rank in ranks) == 2 * counting
    assert sum(loss_samples(rank) for rank in ranks) == 16


class TestShapesOfWhatIsReceived:
    def test_a_value_of_samples_by_its_layout(self) -> None:
        rank = rank_of(MLP, even_plan(MLP, Mesh(tp=4)), 0)
        value = rank.layout.model.component(rank.layout.rank_components(0)[0]).outputs[0]
        assert rank.local_shape(value, PIECES) == ((2, 24), torch.float64)
        assert rank.local_shape(value, ValueLayout("full", 2))[0] == (4, 24)
        assert rank.local_shape(value, ValueLayout("partial", 4))[0] == (8, 24)
        assert rank.local_shape(value, ValueLayout("shard", 4, dim=1))[0] == (8, 6)
        assert rank.local_shape(value, ValueLayout("placed", 4, rank=2))[0] == (8, 24)

    def test_a_value_without_samples_is_never_cut(self) -> None:
        plan = even_plan(TABLE, Mesh(pp=2, tp=2))
        rank = rank_of(TABLE, plan, 2)
        assert "table:0" in {value for c in rank.layout.rank_components(2) for value in rank.layout.model.component(c).inputs}
        assert rank.local_shape("table:0", PIECES)[0] == (1, 6)
        assert rank.local_shape("stem:0", PIECES)[0] == (4, 6)


def test_a_state_without_one_of_its_parameters_is_refused() -> None:
    rank = rank_of(MLP, even_plan(MLP, Mesh()), 0)
    state = random_state(MLP)
    name, *_ = state.weights
    with pytest.raises(ExecutionError, match=f"holds no '{name}'"):
        rank.load(RankState(weights={key: value for key, value in state.weights.items() if key != name}))


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_a_value_without_samples_crosses_stages_and_shards(tmp_path: Path) -> None:
    """Forward whole, and its gradient from every rank's samples; parameters without dims under ZeRO."""
    cases = [
        Case(spec=TABLE, plan=even_plan(TABLE, mesh, zero=zero), dataset="synthetic", optimizer="adam", learning_rate=1e-3)
        for mesh, zero in (
            (Mesh(pp=2, tp=2), 0),
            (Mesh(pp=2, tp=2), 1),
            (Mesh(dp=4), 1),
            (Mesh(pp=2, tp=2), 2),
            (Mesh(pp=2, tp=2), 3),
            (Mesh(dp=4), 3),
        )
    ]
    for case, run in zip(cases, run_cases(cases, tmp_path, steps=20), strict=True):
        difference = compare_case(case, run, tmp_path, steps=20)
        assert difference.worst <= 1e-12, f"{case}: {difference}"


# ZeRO 2 and 3: whole on a rank only what is needed there. `test_equality` trains under them.


@pytest.mark.parametrize(("zero", "weights", "gradients"), [(0, 1, 1), (1, 1, 1), (2, 1, 4), (3, 4, 4)])
def test_what_stays_on_a_rank_between_steps(zero: int, weights: int, gradients: int) -> None:
    """Of dp=4: all of the weights and gradients, or a quarter of each bucket, padded."""
    rank = rank_of(SMALL_MLP, even_plan(SMALL_MLP, Mesh(dp=4), zero=zero), 0, optimizer="sgd")
    buckets = rank.layout.rank_buckets(0)
    whole = 8 * sum(bucket.chunk_elements * 4 if zero else bucket.elements for bucket in buckets)
    with LiveBytes() as live:
        for line, tensors in rank.resident_tensors().items():
            for tensor in tensors:
                live.track(tensor, line)
        assert live.current_bytes == whole // weights + whole // gradients


def test_gathered_parameters_come_and_go_in_one_place() -> None:
    """What autograd has saved of a parameter is there again once it is gathered again."""
    ranks = [rank_of(SMALL_MLP, even_plan(SMALL_MLP, Mesh(dp=2), zero=3), rank) for rank in range(2)]
    whole = rank_of(SMALL_MLP, even_plan(SMALL_MLP, Mesh(dp=2)), 0)
    first, *_ = ranks[0].layout.buckets
    divided = [rank.divided[first.number] for rank in ranks]
    parameter = ranks[0].parameters[first.parameters[0].name]
    view = parameter.data.reshape(-1)

    def gather() -> torch.Tensor:
        return divided[0].begin_parameters().copy_(torch.cat([bucket.chunk.data for bucket in divided]))

    flat = gather()
    expected = whole.parameters[first.parameters[0].name]
    assert torch.equal(parameter, expected)
    divided[0].end_parameters()
    assert flat.untyped_storage().nbytes() == 0
    gather()
    assert torch.equal(view, expected.reshape(-1))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_parts_of_all_ranks_are_the_whole_of_every_parameter(zero: int) -> None:
    """Each element on one rank, where its part says that it is."""
    ranks = [rank_of(SMALL_MLP, even_plan(SMALL_MLP, Mesh(dp=4), zero=zero), rank) for rank in range(4)]
    whole = rank_of(SMALL_MLP, even_plan(SMALL_MLP, Mesh(dp=4)), 0)
    for name, parameter in whole.parameters.items():
        together = torch.full((parameter.numel(),), float("nan"), dtype=parameter.dtype)
        for rank in ranks:
            for bucket in rank.divided.values():
                if name in bucket.parts:
                    fragment, place = bucket.parts[name]
                    together[fragment.start : fragment.stop] = bucket.chunk.data[place]
        assert torch.equal(together, parameter.detach().reshape(-1)), name


# ZeRO within sharding groups (HSDP): states divided over a group and alike in all groups.

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
