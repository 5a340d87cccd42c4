"""A backward in two halves gives the gradients of a whole one, and the halves do what they say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parsim.model.autograd.cut import backward_component, backward_inputs, backward_weights, forward_component
from parsim.model.build import build_module, example_batch, loss_of, record
from parsim.model.load import trace_spec
from parsim.model.runnable import Runnable
from parsim.model.spec import ModelSpec
from parsim.model.trace.memory import LiveBytes

BATCH = 4
SPECS = (
    ModelSpec(name="mlp"),
    ModelSpec(name="gpt_small", args=(("heads", 2), ("hidden", 16), ("layers", 2), ("seq", 16), ("vocab", 32))),
    ModelSpec(name="vit_small"),
    ModelSpec(name="resnet_small", args=(("width", 4),)),
    ModelSpec(name="vgg_small"),
)


def recorded(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> tuple[list[Runnable], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = build_module(spec).to(dtype).train()
    inputs, _ = example_batch(spec, BATCH, dtype=dtype, device="cpu")
    return record(module, inputs, granularity="block", loss=loss_of(spec)), tuple(inputs.values())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_halves_of_every_component_add_up_to_its_backward(spec: ModelSpec) -> None:
    runnables, _ = recorded(spec)
    halved = whole = 0
    for runnable in runnables:
        shapes = [runnable.program.tensors[slot] for _, slot, _ in runnable.program.inputs]
        if not any(runnable.input_differentiable) or not runnable.parameters():
            continue
        torch.manual_seed(1)
        given = [torch.randn(tensor.shape, dtype=tensor.dtype) for tensor in shapes]
        so_far = [
            torch.randn_like(value) if flows else None
            for value, flows in zip(given, runnable.input_differentiable, strict=True)
        ]
        results = []
        for halves in (False, True):
            for parameter in runnable.parameters():
                parameter.grad = None
            torch.manual_seed(2)
            outputs, saved = forward_component(runnable, given)
            backs = [
                torch.ones_like(value) if edge is not None else None for value, edge in zip(outputs, saved.edges, strict=True)
            ]
            if halves:
                gradients, half = backward_inputs(saved, runnable.parameters(), backs, so_far)
                assert all(parameter.grad is None for parameter in runnable.parameters()), "the first half leaves them alone"
                whole += half.whole is not None
                halved += half.whole is None
                backward_weights(half)
            else:
                gradients = backward_component(saved, backs, so_far)
            results.append((gradients, [parameter.grad for parameter in runnable.parameters()]))
        for mine, theirs in zip(results[1][0], results[0][0], strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(results[1][1], results[0][1], strict=True):
            assert mine is not None
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert halved > whole, "most components are cut operator by operator"


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_what_the_first_half_takes_is_counted_when_the_model_is_traced(spec: ModelSpec) -> None:
    """Live bytes on real tensors: all that the forward saved stays, beside what waits and what operators make for a while."""
    model = trace_spec(spec, "block")
    runnables, _ = recorded(spec, torch.float32)
    compared = 0
    for component, runnable in zip(model.components, runnables, strict=True):
        split = component.split_backward
        assert (split is not None) == bool(any(runnable.input_differentiable) and runnable.parameters()), component.name
        if split is None:
            continue
        shapes = [runnable.program.tensors[slot] for _, slot, _ in runnable.program.inputs]
        given = [torch.randn(kind.shape, dtype=kind.dtype) for kind in shapes]
        with LiveBytes() as live:
            outputs, saved = forward_component(runnable, given)
            sizes = [None if edge is None else value.shape for value, edge in zip(outputs, saved.edges, strict=True)]
            del outputs, given
            before = live.current_bytes
            live.moments = []
            backs = [None if shape is None else torch.ones(shape) for shape in sizes]
            gradients, half = backward_inputs(saved, runnable.parameters(), backs, [None] * len(shapes))
            fullest = max(live.moments) - before
            del gradients, backs, saved
            waiting = live.current_bytes - before
            del half
        assert fullest == max(rate * BATCH + fixed for rate, fixed in split.peaks), component.name
        assert waiting == split.waiting[0] * BATCH + split.waiting[1], component.name
        compared += 1
    assert compared
