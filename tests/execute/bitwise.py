"""The comparison of a module with its components, bit by bit; used by test_trace.py and test_trace_hf.py."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parsim.model import record, trace
from parsim.model.autograd.cut import backward_components, forward_components


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    for (name, expected), (_, found) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None), name
        assert expected.grad is None or torch.equal(expected.grad, found.grad), f"gradient of {name}"
    for (name, expected), (_, found) in zip(one.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(expected, found), f"buffer {name}"


def leaves_like(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)


def assert_equal_to_module(module: nn.Module, inputs: tuple[Tensor, ...], granularity: str) -> None:
    """Twice in a row, so that buffers of the first forward are seen by the second."""
    expected_module, cut_module, whole_module = (copy.deepcopy(module) for _ in range(3))
    cut_components = record(cut_module, leaves_like(inputs), granularity=granularity)
    traced = trace(whole_module, leaves_like(inputs), granularity=granularity)
    for seed in (1, 2):
        given, cut_given, whole_given = (leaves_like(inputs) for _ in range(3))
        for copied in (expected_module, cut_module, whole_module):
            copied.zero_grad()
        torch.manual_seed(seed)
        expected = [leaf for leaf in tree_leaves(expected_module(*given)) if isinstance(leaf, Tensor)]
        after = torch.get_rng_state()

        torch.manual_seed(seed)
        values, saved = forward_components(cut_components, {f"input:{n}": x for n, x in enumerate(cut_given)})
        assert torch.equal(torch.get_rng_state(), after), "the same random numbers are consumed"
        torch.manual_seed(seed)
        whole = [leaf for leaf in tree_leaves(traced(*whole_given)) if isinstance(leaf, Tensor)]
        outputs = [values[name] for name in traced.model.outputs]
        for reference, found, uncut in zip(expected, outputs, whole, strict=True):
            assert torch.equal(reference, found)
            assert torch.equal(reference, uncut)

        gradients = [torch.randn(y.shape, dtype=y.dtype) for y in expected if y.requires_grad]
        torch.autograd.backward([y for y in expected if y.requires_grad], [g.clone() for g in gradients])
        torch.autograd.backward([y for y in whole if y.requires_grad], [g.clone() for g in gradients])
        names = [name for name, y in zip(traced.model.outputs, expected, strict=True) if y.requires_grad]
        found_gradients = backward_components(cut_components, saved, dict(zip(names, gradients, strict=True)))
        assert_same_state(expected_module, cut_module)
        assert_same_state(expected_module, whole_module)
        for number, (x, uncut) in enumerate(zip(given, whole_given, strict=True)):
            if x.grad is not None:
                assert torch.equal(x.grad, found_gradients[f"input:{number}"])
                assert torch.equal(x.grad, uncut.grad)
