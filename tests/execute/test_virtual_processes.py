"""Virtual runs against real multi-process gloo runs of the same algorithm, in float64."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from parsim.algorithms.arrivals import merge_events
from parsim.algorithms.periods import every_epochs
from parsim.plans.averaging import MergeRule
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining
from parsim.virtual.agent import TickRule, cut_sequential
from parsim.virtual.arrivals import train_by_arrival
from parsim.virtual.rounds import Partition, RoundRule, train_in_rounds
from parsim.virtual.ticks import TickEngine
from tests.execute.virtual_processes import (
    decoupled,
    epoch_averaging,
    flat,
    merging,
    run_processes,
    small_model,
    small_problem,
)
from tests.quick import some_quick


def training(kind: str = "sgd") -> LocalTraining:
    problem = small_problem()
    return LocalTraining(small_model(problem), problem, LocalOptimizer(kind=kind))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_epoch_averaging_equals_a_gloo_run(world_size: int, tmp_path: Path) -> None:
    part = Partition(workers=world_size, epochs=3, batch=4)
    real = run_processes(world_size, tmp_path, epoch_averaging, part)
    rule = RoundRule(period=every_epochs(1, part.steps_per_epoch(small_problem())), new_optimizer=True)
    virtual = train_in_rounds(training("sgd_momentum"), part, rule)
    assert max((flat(weights) - virtual.weights).abs().max().item() for weights in real) <= 1e-12


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_merging_equals_a_gloo_run_with_the_recorded_order(world_size: int, tmp_path: Path) -> None:
    part = Partition(workers=world_size, epochs=3, batch=4)
    order = merge_events(lambda worker, epoch: 1.0 + 0.6 * worker, world_size, epochs=3)
    real = run_processes(world_size, tmp_path, merging, part, order)
    virtual = train_by_arrival(training(), part, MergeRule(workers=world_size), order=order)
    for weights, wanted in zip(real, virtual.workers, strict=True):
        assert (flat(weights) - wanted).abs().max().item() <= 1e-12


@pytest.mark.parametrize(
    ("groups", "modules", "mode"),
    some_quick([(1, 2, "stash"), (1, 2, "replay"), (2, 2, "stash"), (1, 4, "fresh")], (2, 2, "stash")),
)
def test_ticks_equal_a_gloo_run_bitwise(groups: int, modules: int, mode: str, tmp_path: Path) -> None:
    problem, rule = small_problem(), TickRule(mode=mode, learning_rate=0.2, momentum=0.9)
    samples = torch.randperm(len(problem), generator=torch.Generator().manual_seed(0))
    batches = [
        [(problem.inputs[part], problem.targets[part]) for part in samples.roll(-tick * 8)[: 4 * groups].split(4)]
        for tick in range(8)
    ]
    engine = TickEngine(cut_sequential(small_model(problem), modules), problem.loss, rule, groups=groups)
    engine.run(copy.deepcopy(batches))
    real = run_processes(groups * modules, tmp_path, decoupled, modules, rule, batches)
    for rank, weights in enumerate(real):
        wanted = engine.agents[rank // modules][rank % modules].live
        assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True))
