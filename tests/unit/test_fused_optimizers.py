"""Fused Adam: the same update as the foreach form, with fewer passes over memory."""

from __future__ import annotations

import pytest
import torch

from parsim.model.formats import Numerics
from parsim.model.optimizers import OPTIMIZERS


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
