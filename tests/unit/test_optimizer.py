"""The optimizers by name, against closed forms and what torch allocates."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from parsim.model.formats import Numerics

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parsim.app.sections import REFUSED, TORCH_NAMES
from parsim.errors import ConfigError
from parsim.execute.checkpoint.checkpoint import restore_optimizer
from parsim.execute.job import TrainingRecipe
from parsim.execute.optimizer import check_states, distinct, flat_gradients, make_optimizer, scale_to_norm, squared_norm
from parsim.model.optimizers import COUNTERS, OPTIMIZERS


def make_parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 4), (5,), (2, 2, 2)]
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]


def test_unknown_name_teaches() -> None:
    with pytest.raises(ConfigError, match="sgd_momentum"):
        make_optimizer("sgd_momentun", make_parameters(), 0.1)
    with pytest.raises(ConfigError, match=r"unknown optimizer 'adamm'; did you mean adam.*package.module:NAME"):
        check_states("adamm")


def test_flat_gradients_are_views_that_autograd_adds_into() -> None:
    parameters = make_parameters()
    flat = flat_gradients(parameters)
    for _ in range(2):
        sum((p**2).sum() for p in parameters).backward()
    expected = torch.cat([4 * p.detach().flatten() for p in parameters])
    assert torch.equal(flat, expected)
    flat.zero_()
    assert all(not p.grad.any() for p in parameters)


def test_sgd_momentum_closed_form() -> None:
    """With a constant gradient g: x_k = x_0 - lr g sum_{i<k} (1 - 0.9^(i+1)) / 0.1."""
    parameters = make_parameters()
    start = [p.detach().clone() for p in parameters]
    flat = flat_gradients(parameters)
    flat.fill_(0.5)
    optimizer = make_optimizer("sgd_momentum", parameters, 0.01)
    for _ in range(7):
        optimizer.step()
    moved = 0.01 * 0.5 * sum((1 - 0.9 ** (i + 1)) / 0.1 for i in range(7))
    for before, parameter in zip(start, parameters, strict=True):
        torch.testing.assert_close(parameter.detach(), before - moved, rtol=0, atol=1e-13)


def test_adam_first_step_is_the_learning_rate() -> None:
    for name, decay in (("adam", 0.0), ("adamw", 0.01)):
        parameters = make_parameters()
        start = [p.detach().clone() for p in parameters]
        flat_gradients(parameters).fill_(3.0)
        make_optimizer(name, parameters, 0.1).step()
        for before, parameter in zip(start, parameters, strict=True):
            torch.testing.assert_close(parameter.detach(), before * (1 - 0.1 * decay) - 0.1, rtol=0, atol=1e-8)


class Accesses(TorchDispatchMode):
    """Arrays that foreach operations read and write, counters aside, and arrays that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.accessed = self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lists = {id(each[0]) for each in args if isinstance(each, list) and torch.is_tensor(each[0]) and each[0].dim()}
        if "_foreach_" in str(func) and lists:
            self.accessed += len(lists) + 1
            self.made += not func.overloadpacket.__name__.endswith("_")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("torchs", "name"), TORCH_NAMES.items())
def test_torchs_names_are_those_of_its_classes(torchs: str, name: str) -> None:
    assert type(OPTIMIZERS[name].make(make_parameters(), 0.1)) is getattr(torch.optim, torchs)


def test_every_optimizer_of_torch_is_a_row_or_refused() -> None:
    classes = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)} - {"Optimizer"}
    assert classes == set(TORCH_NAMES) | set(REFUSED)
    assert not set(TORCH_NAMES) & set(REFUSED)


@pytest.mark.parametrize("name", ["nadam", "asgd"])
def test_counters_are_resumed_in_their_own_type(name: str) -> None:
    """torch 2.13: counters of NAdam and ASGD are float32 beside float64 weights. They are resumed so, and a resumed training
    stays equal bit for bit."""
    optimizers, every = [], [make_parameters(), make_parameters()]
    for parameters in every:
        for parameter in parameters:
            parameter.grad = torch.sin(parameter.detach())
        optimizers.append(make_optimizer(name, parameters, 0.1))
    names = {str(number): number for number in range(len(every[0]))}
    for _ in range(3):
        optimizers[0].step()
    saved = {key: copy.deepcopy(optimizers[0].state[every[0][number]]) for key, number in names.items()}
    for one, other in zip(*every, strict=True):
        other.data.copy_(one.data)
    restore_optimizer(optimizers[1], {key: every[1][number] for key, number in names.items()}, saved)
    for optimizer in optimizers:
        for _ in range(3):
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(*every, strict=True))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if not name.endswith("_fused")])
def test_accesses_and_temporary_bytes_are_those_of_torchs_operations(name: str) -> None:
    """torch 2.13: optimizers of foreach operations hold 0, 4 or 8 bytes per element of all parameters beside their state."""
    row, parameter = OPTIMIZERS[name], torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = row.make([parameter], row.learning_rate)
    for _ in range(8):  # the first steps of some are not like the others
        optimizer.step()
    with Accesses() as seen:
        optimizer.step()
    assert row.accesses_per_element == seen.accessed + 1
    one_after_another = name == "asgd"  # its two arrays are never alive together
    assert row.temporary_bytes_per_element == 4 * (1 if one_after_another else seen.made)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_bytes_are_what_torch_allocates(name: str) -> None:
    """torch 2.13: state of every optimizer by name, counters apart, is a fixed number of bytes per element."""
    parameters = [torch.nn.Parameter(p.detach().float()) for p in make_parameters()]
    flat = flat_gradients(parameters)
    flat.fill_(1.0)
    optimizer = make_optimizer(name, parameters, 0.1)
    optimizer.step()
    held = sum(
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if torch.is_tensor(value) and key not in COUNTERS
    )
    assert held == OPTIMIZERS[name].state_bytes_per_element * flat.numel()


def test_tied_parameters_are_updated_once() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    make_optimizer("sgd", [parameter, parameter], 1.0).step()
    assert parameter.tolist() == [-1.0, -1.0]
    assert len(distinct([parameter, parameter])) == 1


@pytest.mark.parametrize(("size", "is_clipped"), [(1e18, True), (1e20, False)])
def test_a_norm_that_overflows_is_seen(size: float, is_clipped: bool) -> None:
    """torch 2.13: clip_grad_norm_ sets gradients of 1e20 to 0, since their norm is inf; here they become NaN."""
    gradients = [torch.full((4,), size), torch.ones(4)]
    norm = squared_norm(gradients, torch.device("cpu")).sqrt()
    scale_to_norm(gradients, norm, 1.0)
    if is_clipped:
        assert float(torch.cat(gradients).norm()) == pytest.approx(1.0, rel=1e-6)
    else:
        assert all(bool(gradient.isnan().all()) for gradient in gradients)


@pytest.mark.parametrize(
    ("type_", "size", "theirs"),
    [(torch.float16, 4000.0, 56576.0), (torch.float16, 8000.0, math.inf), (torch.bfloat16, 8000.0, 113152.0)],
)
def test_norms_of_half_precision_are_not_rounded_or_lost(type_: torch.dtype, size: float, theirs: float) -> None:
    """torch 2.13: clip_grad_norm_ keeps the norm in the type of the gradients: fp16 ends at 65,504, and bf16 rounds to 8
    bits."""
    gradients = [torch.full((100,), size, dtype=type_) for _ in range(2)]
    exact = size * math.sqrt(200)
    assert float(torch.nn.utils.get_total_norm(gradients)) == theirs != pytest.approx(exact, rel=1e-5)
    norm = squared_norm(gradients, torch.device("cpu")).sqrt()
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    scale_to_norm(gradients, norm, 1000.0)
    assert float(torch.cat(gradients).double().norm()) == pytest.approx(1000.0, rel=5e-3)


def test_only_exempt_parameters_do_not_decay() -> None:
    """Without a gradient a step of SGD takes lr * decay of a weight, and nothing of one that is exempt."""
    decayed, exempt = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = make_optimizer("sgd", [decayed, exempt], 0.5, recipe=TrainingRecipe(weight_decay=0.1), exempt=[exempt])
    decayed.grad, exempt.grad = torch.zeros(3), torch.zeros(3)
    optimizer.step()
    assert torch.allclose(decayed, torch.full((3,), 0.95))
    assert torch.equal(exempt, torch.ones(3))


# Fused Adam: the same update as the foreach form, with fewer passes over memory.


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_fused_makes_the_same_update(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(50, generator=generator)
    weights = [start.clone().requires_grad_() for _ in range(2)]
    optimizers = [OPTIMIZERS[kind].make([weight], 0.01) for kind, weight in zip((name, f"{name}_fused"), weights, strict=True)]
    for _ in range(5):
        gradient = torch.randn(50, generator=generator)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)
    for state in OPTIMIZERS[f"{name}_fused"].states:
        assert state in optimizers[1].state[weights[1]]


def test_fused_reads_and_writes_each_array_once() -> None:
    """Parameter, gradient and two moments are read, all but the gradient written; the gradient is zeroed."""
    assert OPTIMIZERS["adam_fused"].accesses_per_element == 4 + 3 + 1
    assert Numerics(optimizer="adam_fused").optimizer_bytes() == (8, 0)
