"""The backward of a component calls torch's engine itself: what `torch.autograd.backward` refuses is refused still."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch.autograd.graph import get_gradient_edge

from parsim.model.autograd.cut import _edge, run_backward


def test_gradients_are_those_of_torch() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    value = (weight * 2).sin()
    given = torch.randn(4, 3)
    run_backward([_edge(value)], [given])
    (expected,) = torch.autograd.grad((weight * 2).sin(), weight, given)
    assert torch.equal(weight.grad, expected)


def test_a_gradient_of_another_shape_is_refused() -> None:
    value = torch.randn(4, 3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"got \[5, 3\] but expected shape compatible with \[4, 3\]"):
        run_backward([_edge(value)], [torch.ones(5, 3)])


def test_edges_are_those_of_torch() -> None:
    leaf = torch.randn(2, requires_grad=True)
    parts = (leaf * 1).split(1)
    for value in (leaf, leaf * 2, *parts):
        assert _edge(value)[:2] == get_gradient_edge(value)[:2]
