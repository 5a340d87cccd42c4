"""Recorded all the same: distributions that check values, scripted functions, tables in plain attributes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parsim.errors import TraceError
from parsim.model.load import load_model, model_from_module
from parsim.model.spec import ModelSpec
from tests.execute.bitwise import assert_equal_to_module

WIDTH = 6
HERE = "tests.execute.test_calls_without_values"


class Sampling(nn.Module):
    """A VAE of torch.distributions, which check their arguments by default."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 4), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = self.encoder(x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, scale.exp())
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        made = self.decoder(posterior.rsample())
        divergence: Tensor = torch.distributions.kl_divergence(posterior, prior).sum(-1)
        error: Tensor = (made - x).pow(2).sum(-1)
        return error + divergence


@torch.jit.script
def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(swish(self.two(swish(self.one(x)))))
        return made


class Table(nn.Module):
    """Complex angles in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.angles = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2).float())

    def forward(self, x: Tensor) -> Tensor:
        self.angles = self.angles.to(x.device)
        turned = torch.view_as_complex(self.layer(x).unflatten(-1, (-1, 2))) * self.angles
        made: Tensor = self.head(torch.view_as_real(turned).flatten(-2).type_as(x))
        return made


@pytest.mark.parametrize("module", [Sampling(), Scripted(), Table()], ids=lambda module: type(module).__name__)
def test_they_are_recorded(module: nn.Module) -> None:
    checks = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    try:
        assert_equal_to_module(module, (torch.randn(4, WIDTH),), "block")
        assert torch.distributions.Distribution._validate_args, "a forward outside checks as before"
    finally:
        torch.distributions.Distribution.set_default_validate_args(checks)
    assert type(swish) is torch.jit.ScriptFunction
    assert swish(torch.zeros(2)).sum() == 0


@pytest.mark.parametrize("name", ["Sampling", "Scripted", "Table"])
def test_they_are_planned_by_name(name: str) -> None:
    assert load_model(ModelSpec(name=f"{HERE}:{name}", input_shape=(WIDTH,))).assumptions == ()


def test_a_scripted_function_without_its_python_code_is_refused() -> None:
    bare = torch.jit.CompilationUnit("def double(x):\n    return x * 2\n").double

    class Bare(Scripted):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.head(bare(self.one(x)))
            return made

    with pytest.raises(
        TraceError,
        match=r"a function at .*`made: Tensor = self\.head\(bare.* is compiled by torch\.jit, .*give the Python function",
    ):
        model_from_module(Bare(), torch.zeros(4, WIDTH))
