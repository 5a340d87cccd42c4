"""A module run component by component, and compared with the module bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parsim.model import record
from parsim.model.autograd.cut import Saved, backward_component, forward_component
from parsim.model.runnable import Runnable
from tests.traced import trace


def forward_components(components: Sequence[Runnable], inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Saved]]:
    """Every component in order: all values by name (inputs included), and what each backward needs."""
    values = dict(inputs)
    saved = []
    for component in components:
        outputs, kept = forward_component(component, [values[name] for name in component.input_names])
        values.update(zip(component.output_names, outputs, strict=True))
        saved.append(kept)
    return values, saved


def backward_components(
    components: Sequence[Runnable], saved: Sequence[Saved], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Every component in reverse order; `gradients` are those of the model's outputs. Returns them for every value."""
    by_value: dict[str, Tensor | None] = dict(gradients)
    for component, kept in zip(reversed(components), reversed(saved), strict=True):
        given = [by_value.get(name) for name in component.output_names]
        so_far = [by_value.get(name) for name in component.input_names]
        by_value.update(zip(component.input_names, backward_component(kept, given, so_far), strict=True))
    return {name: gradient for name, gradient in by_value.items() if gradient is not None}


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


def bytes_kept(run: Callable[[], object], without: Iterable[Tensor]) -> int:
    """Bytes of the storages that autograd keeps of a forward, each once, but for those of some tensors such as weights."""
    others = {tensor.untyped_storage()._cdata for tensor in without}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    assert output is not None, "the graph lives until here"
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in others)
