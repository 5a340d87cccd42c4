"""All ranks of a plan in one process, and states to give them; for the tests of shards, ZeRO, checkpoints and resharding."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.common.mixed import choices
from parsim.errors import PlanError
from parsim.execute.checkpoint.checkpoint import Checkpoint, RankState, latest_checkpoint, load_state, save_checkpoint
from parsim.execute.optimizer import make_optimizer
from parsim.execute.stage import StageReplica, seeded_module
from parsim.model.component import LOSS
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.program.placed import PlanIndex

CPU = torch.device("cpu")
TABLE = ModelSpec(name="tests.execute.placed_modules:shared_table", input_shape=(6,))
MLP = ModelSpec(name="mlp", args=(("width", 24),))
RESNET = ModelSpec(name="resnet_small", args=(("width", 4),))
GPT = ModelSpec(name="gpt_small", args=(("heads", 2), ("hidden", 16), ("layers", 2), ("seq", 16), ("vocab", 32)))
VIT = ModelSpec(name="vit_small", args=(("heads", 2), ("hidden", 16), ("layers", 1)))


def newest(folder: Path) -> Checkpoint:
    """The newest checkpoint, which is there."""
    found = latest_checkpoint(folder)
    assert found is not None
    return found


def even_plan(spec: ModelSpec, mesh: Mesh, *, zero: int = 0, placing: random.Random | None = None) -> Plan:
    """Even stages; with `placing` every component somewhere, and as many as can be sharded, else all batch-sharded."""
    model = load_model(spec)
    names = [component.name for component in model.components]
    bounds = list(itertools.pairwise(round(number * len(names) / mesh.pp) for number in range(mesh.pp + 1)))
    for _ in range(200):
        stages = []
        for number, (first, last) in enumerate(bounds):
            placements = []
            for name in names[first:last] if placing else ():
                options = choices(model, name, mesh.tp)
                sharded = [option for option in options if option.kind == "shard"]
                assert placing is not None
                placements.append(placing.choice(sharded if sharded and placing.random() < 0.7 else options))
            stages.append(
                Stage(components=tuple(names[first:last]), ranks=mesh.stage_ranks(number), placements=tuple(placements))
            )
        plan = Plan(strategy="custom", mesh=mesh, stages=tuple(stages), global_batch=8, bucket_bytes=2**11, zero_stage=zero)
        try:
            PlanIndex(plan, model)
        except PlanError:  # tied parameters placed apart, or a value that cannot be cut so: draw again
            assert placing is not None, "plans without placements fit"
            continue
        return plan
    raise AssertionError(f"no placement of {spec.name} on {mesh} in 200 draws")


def rank_of(spec: ModelSpec, plan: Plan, rank: int, *, optimizer: str = "adam", seed: int = 0) -> StageReplica:
    layout = PlanIndex(plan, load_model(spec))
    return StageReplica(spec, layout, rank, optimizer=optimizer, learning_rate=0.1, dtype=torch.float64, seed=seed, device=CPU)


def all_ranks(spec: ModelSpec, plan: Plan, *, optimizer: str = "adam", seed: int = 0) -> list[StageReplica]:
    return [rank_of(spec, plan, rank, optimizer=optimizer, seed=seed) for rank in range(plan.world_size)]


def random_state(spec: ModelSpec, *, optimizer: str = "adam", seed: int = 1) -> RankState:
    """Whole weights, buffers and optimizer state of a model, every array of random numbers; every step counter is 5."""
    module = seeded_module(spec, 0, torch.float64, CPU)
    generator = torch.Generator().manual_seed(seed)
    named = dict(module.named_parameters())
    updater = make_optimizer(optimizer, named.values(), 0.1)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    updater.step()

    def drawn(tensor: Tensor) -> Tensor:
        return torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)

    return RankState(
        weights={name: drawn(parameter.detach()) for name, parameter in named.items()},
        buffers={name: drawn(buffer) for name, buffer in module.named_buffers()},
        optimizer={
            name: {
                key: torch.tensor(5.0) if key == "step" else drawn(value)
                for key, value in updater.state[parameter].items()
                if isinstance(value, Tensor)
            }
            for name, parameter in named.items()
        },
    )


def saved(ranks: list[StageReplica], folder: Path) -> RankState:
    """The whole state, as a checkpoint of these ranks gives it back."""
    for rank in ranks:
        save_checkpoint(folder, 1, rank.state(), seed=0, rank=rank.rank, world_size=len(ranks))
    return load_state(newest(folder))


def assert_same_state(found: RankState, expected: RankState, what: str = "") -> None:
    """Bit for bit: the same weights and optimizer state under the same names; of the buffers those that are held."""
    assert found.weights.keys() == expected.weights.keys(), what
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), f"{what}: weight {name}"
    assert found.optimizer.keys() == expected.optimizer.keys(), what
    for name, state in expected.optimizer.items():
        assert_same_entries(found.optimizer[name], state, f"{what}: state of {name}")
    for name, buffer in found.buffers.items():
        assert torch.equal(buffer, expected.buffers[name]), f"{what}: buffer {name}"


def assert_same_entries(found: Any, expected: Any, what: str) -> None:
    assert found.keys() == expected.keys(), what
    for key, value in expected.items():
        assert found[key].shape == value.shape, f"{what}: {key}"
        assert torch.equal(found[key], value), f"{what}: {key}"


def loss_samples(rank: StageReplica) -> int:
    """Samples per microbatch whose losses this rank counts."""
    return rank.layout.local_samples(LOSS) if rank.loss_counts else 0
