"""The tick engine of decoupled backpropagation: its identities, the diagonal-weights invariant, staleness and memory."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments.relaxed.decoupled import DECOUPLINGS, GradientEvent, TickEngine, TickRule, cut_sequential
from parsim.errors import AlgorithmError

LOSS = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def network(seed: int = 0, widths: Sequence[int] = (6, 7, 5, 8, 4)) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for first, second in itertools.pairwise(widths):
        layers += [nn.Linear(first, second), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def stream(ticks: int, groups: int = 1, seed: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [(torch.randn(3, 6, generator=generator), torch.randint(4, (3,), generator=generator)) for _ in range(groups)]
        for _ in range(ticks)
    ]


def weights_of(engine: TickEngine, group: int = 0) -> list[Tensor]:
    return [weight.detach().clone() for agent in engine.agents[group] for weight in agent.live]


def largest_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


def plain_sgd(model: nn.Module, batches: list[list[tuple[Tensor, Tensor]]], **settings: float) -> list[Tensor]:
    """torch.optim.SGD on the mean of the groups' losses."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    for batch in batches:
        optimizer.zero_grad()
        (sum(LOSS(model(inputs), targets) for inputs, targets in batch) / len(batch)).backward()
        optimizer.step()
    return [weight.detach() for weight in model.parameters()]


@pytest.mark.parametrize("schedule", DECOUPLINGS)
@pytest.mark.parametrize("order", ["concurrent", "backward_first"])
def test_one_module_is_sgd_bitwise(schedule: str, order: str) -> None:
    batches = stream(12)
    rule = TickRule(schedule=schedule, order=order, learning_rate=0.1, momentum=0.9)
    engine = TickEngine([network()], LOSS, rule)
    engine.run(batches)
    wanted = plain_sgd(network(), batches, lr=0.1, momentum=0.9)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(engine), wanted, strict=True))


def test_identity_mixing_is_independent_pipelines() -> None:
    batches = stream(9, groups=2)
    together = TickEngine(cut_sequential(network(), 2), LOSS, TickRule(), groups=2, mixing=lambda t: np.eye(2))
    together.run(batches)
    for group in range(2):
        alone = TickEngine(cut_sequential(network(), 2), LOSS, TickRule())
        alone.run([[batch[group]] for batch in batches])
        assert largest_difference(weights_of(together, group), weights_of(alone)) <= 1e-15


def gradients_by_batch(
    engine: TickEngine, batches: list[list[tuple[Tensor, Tensor]]]
) -> dict[tuple[int, int], Sequence[Tensor]]:
    found: dict[tuple[int, int], Sequence[Tensor]] = {}

    def keep(event: GradientEvent) -> None:
        found[event.k, event.batch] = [part.clone() for part in event.gradient]

    engine.run(batches, observe=keep)
    return found


def full_gradient(weights: Sequence[Tensor], inputs: Tensor, targets: Tensor) -> list[Tensor]:
    model = network()
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(value)
    return list(torch.autograd.grad(LOSS(model(inputs), targets), list(model.parameters())))


@pytest.mark.parametrize("modules", [2, 3, 4])
def test_stash_gradient_is_the_full_gradient_at_diagonal_weights(modules: int) -> None:
    """Module k of batch b at version b + k - 1, and not at versions shifted by one, so the check would see a wrong schedule."""
    batches = stream(10)
    engine = TickEngine(cut_sequential(network(), modules), LOSS, TickRule(learning_rate=0.3))
    found: dict[tuple[int, int], Sequence[Tensor]] = {}
    versions: list[list[list[Tensor]]] = []

    def keep(event: GradientEvent) -> None:
        found[event.k, event.batch] = [part.clone() for part in event.gradient]

    for batch in [*batches, *[None] * (2 * modules)]:
        versions.append([[weight.detach().clone() for weight in agent.live] for agent in engine.agents[0]])
        engine.step(batch, keep)
    shifted: list[float] = []
    for number, batch in enumerate(batches):
        for shift in (0, 1):
            diagonal = [versions[number + k + shift][k] for k in range(modules)]
            wanted = full_gradient([weight for module in diagonal for weight in module], *batch[0])
            got = [part for k in range(1, modules + 1) for part in found[k, number]]
            if shift == 0:
                assert largest_difference(got, wanted) <= 1e-12
            else:
                shifted.append(largest_difference(got, wanted))
    assert max(shifted) > 1e-3


@pytest.mark.parametrize("schedule", ["ddg", "fdg"])
@pytest.mark.parametrize("mode", ["stash", "fresh", "replay"])
def test_frozen_weights_make_every_mode_backpropagation(schedule: str, mode: str) -> None:
    batches = stream(6)
    rule = TickRule(schedule=schedule, mode=mode, learning_rate=0.0)
    found = gradients_by_batch(TickEngine(cut_sequential(network(), 4), LOSS, rule), batches)
    weights = [weight.detach() for weight in network().parameters()]
    for number, batch in enumerate(batches):
        got = [part for k in range(1, 5) for part in found[k, number]]
        assert largest_difference(got, full_gradient(weights, *batch[0])) <= 1e-13


def test_the_three_modes_differ_once_weights_move() -> None:
    ends = {}
    for mode in ("stash", "fresh", "replay"):
        engine = TickEngine(cut_sequential(network(), 4), LOSS, TickRule(mode=mode, learning_rate=0.3))
        engine.run(stream(20))
        ends[mode] = weights_of(engine)
    assert largest_difference(ends["stash"], ends["fresh"]) > 1e-4
    assert largest_difference(ends["stash"], ends["replay"]) > 1e-4
    assert largest_difference(ends["fresh"], ends["replay"]) > 1e-4


@pytest.mark.parametrize("schedule", ["bp", "ddg", "fdg"])
@pytest.mark.parametrize("order", ["concurrent", "backward_first"])
@pytest.mark.parametrize("accumulate", [1, 2, 6])
def test_logged_staleness_is_what_the_schedule_says(schedule: str, order: str, accumulate: int) -> None:
    modules = 3
    rule = TickRule(schedule=schedule, order=order, accumulate=accumulate)
    engine = TickEngine(cut_sequential(network(), modules), LOSS, rule)
    engine.run(stream(24))
    for agent in engine.agents[0]:
        delay = DECOUPLINGS[schedule].delay(agent.k, modules)
        if order == "backward_first":
            delay = max(0, delay - 1)  # the update of the tick itself is seen by its forward
        wanted = math.ceil(delay / accumulate)
        steady = agent.staleness[len(agent.staleness) // 2 :]
        assert max(agent.staleness) <= wanted
        assert max(steady) == wanted
        assert len(agent.staleness) == 24 // accumulate
        if accumulate == 2 * modules:
            assert max(steady) <= 1


@pytest.mark.parametrize("schedule", ["bp", "ddg", "fdg"])
def test_batches_held_are_what_the_schedule_says(schedule: str) -> None:
    engine = TickEngine(cut_sequential(network(), 4), LOSS, TickRule(schedule=schedule))
    for batch in stream(20):
        engine.step(batch)
    for agent in engine.agents[0]:
        assert agent.batches_held == DECOUPLINGS[schedule].delay(agent.k, 4), "one batch more is held within a tick"


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_shrinking_compounds_over_boundaries(beta: float) -> None:
    batches, modules = stream(3), 4
    plain, shrunk = (
        gradients_by_batch(
            TickEngine(cut_sequential(network(), modules), LOSS, TickRule(learning_rate=0.0, beta=value)), batches
        )
        for value in (1.0, beta)
    )
    for (k, batch), gradient in shrunk.items():
        wanted = [part * beta ** (modules - k) for part in plain[k, batch]]
        assert largest_difference(gradient, wanted) <= 1e-15


def test_beta_zero_trains_the_last_module_alone() -> None:
    engine = TickEngine(cut_sequential(network(), 4), LOSS, TickRule(beta=0.0, learning_rate=0.5))
    engine.run(stream(10))
    began = [list(piece.parameters()) for piece in cut_sequential(network(), 4)]
    moved = [largest_difference(agent.live, before) for agent, before in zip(engine.agents[0], began, strict=True)]
    assert moved[:3] == [0.0, 0.0, 0.0]
    assert moved[3] > 0.01


def test_draining_applies_every_batch_and_not_draining_keeps_them() -> None:
    batches = stream(7)
    drained, kept = (TickEngine(cut_sequential(network(), 3), LOSS, TickRule()) for _ in range(2))
    drained.run(batches)
    kept.run(batches, drain=False)
    assert [len(agent.staleness) for agent in drained.agents[0]] == [7, 7, 7]
    assert [len(agent.staleness) for agent in kept.agents[0]] == [3, 4, 5]
    drained.run(batches)
    assert [len(agent.staleness) for agent in drained.agents[0]] == [14, 14, 14]


def test_bad_input() -> None:
    with pytest.raises(AlgorithmError, match=r"4 layers cannot be cut into 5 modules"):
        cut_sequential(network(), 5)
    with pytest.raises(AlgorithmError, match="did you mean fdg"):
        TickRule(schedule="fgd")
    with pytest.raises(AlgorithmError, match="beta"):
        TickRule(beta=1.5)
    with pytest.raises(AlgorithmError, match="mode"):
        TickRule(mode="stale")
    engine = TickEngine([network()], LOSS, TickRule(), groups=2, mixing=lambda t: np.array([[0.5, 0.5], [0.4, 0.6]]))
    with pytest.raises(AlgorithmError, match="sums of rows and columns 1"):
        engine.run(stream(1, groups=2))
    with pytest.raises(AlgorithmError, match="2 batches per tick, got 1"):
        engine.step(stream(1)[0])
