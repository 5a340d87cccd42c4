"""Recomputed forwards see what the first ones saw, and plans with them train as plans without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments.common.equality import run_cases
from parsim.execute.checkpoint.checkpoint import latest_checkpoint, load_state
from parsim.model.autograd.cut import Saved, backward_component, forward_component
from parsim.model.autograd.recompute import forward_to_recompute, recompute
from parsim.model.build import build_module, example_batch, loss_of, record
from parsim.model.runnable import Runnable
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from tests.execute.small_plans import GPT, RESNET, case

CPU = torch.device("cpu")
DROPPING = {
    "mlp": ModelSpec(name="mlp", args=(("dropout", 0.3), ("width", 24))),
    "vit": ModelSpec(name="vit_small", args=(("dropout", 0.2), ("heads", 2), ("hidden", 16), ("layers", 2))),
    "bert": ModelSpec(
        name="bert_small", args=(("dropout", 0.2), ("heads", 2), ("hidden", 16), ("layers", 2), ("seq", 16), ("vocab", 32))
    ),
    "vgg": ModelSpec(name="vgg_small", args=(("dropout", 0.4),)),
}


def recorded(spec: ModelSpec) -> list[Runnable]:
    torch.manual_seed(0)
    module = build_module(spec).double().train()
    inputs, _ = example_batch(spec, 4, dtype=torch.float64, device="cpu")
    return record(module, inputs, granularity="block", loss=loss_of(spec))


def given_to(runnable: Runnable) -> list[Tensor]:
    """Inputs as they were recorded: normal where they have fractions, else zeros (token ids, labels)."""
    kinds = [runnable.program.tensors[slot] for _, slot, _ in runnable.program.inputs]
    return [
        torch.randn(kind.shape, dtype=kind.dtype) if kind.dtype.is_floating_point else torch.zeros(kind.shape, dtype=kind.dtype)
        for kind in kinds
    ]


def gradients_of(runnable: Runnable, saved: Saved, outputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Of the inputs, then of the parameters."""
    for parameter in runnable.parameters():
        parameter.grad = None
    ones = [torch.ones_like(value) if edge is not None else None for value, edge in zip(outputs, saved.edges, strict=True)]
    inputs = backward_component(saved, ones)
    return [*inputs, *(None if p.grad is None else p.grad.clone() for p in runnable.parameters())]


@pytest.mark.parametrize("by_operator", [False, True], ids=["whole", "by operator"])
@pytest.mark.parametrize("spec", [*DROPPING.values(), GPT, RESNET], ids=lambda spec: spec.name)
def test_a_recomputed_forward_is_the_first_one_again(spec: ModelSpec, by_operator: bool) -> None:
    """Outputs, gradients, the generator's state and the running statistics: all as with one ordinary forward, bitwise."""
    for runnable in recorded(spec):
        torch.manual_seed(1)
        given, start = given_to(runnable), [buffer.clone() for buffer in runnable.buffers()]
        torch.manual_seed(2)
        outputs, saved = forward_component(runnable, given)
        expected = gradients_of(runnable, saved, outputs)
        state, buffers = torch.get_rng_state(), [buffer.clone() for buffer in runnable.buffers()]
        for buffer, value in zip(runnable.buffers(), start, strict=True):
            buffer.copy_(value)

        torch.manual_seed(2)
        live = runnable.buffers()
        again, kept = forward_to_recompute(runnable, given, CPU, by_operator=by_operator)
        assert torch.equal(torch.get_rng_state(), state)
        drawn = torch.randn(3)  # what runs between the two forwards draws numbers of its own
        between = torch.get_rng_state()
        found = gradients_of(runnable, recompute(runnable, kept), again)
        assert torch.equal(torch.get_rng_state(), between)
        assert drawn.shape == (3,)
        assert all(torch.equal(one, other) for one, other in zip(outputs, again, strict=True))
        assert len(found) == len(expected)
        for one, other in zip(expected, found, strict=True):
            assert (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))
        assert all(mine is theirs for mine, theirs in zip(live, runnable.buffers(), strict=True))
        assert all(torch.equal(one, other) for one, other in zip(buffers, runnable.buffers(), strict=True))


def test_masks_differ_where_the_generator_is_not_restored() -> None:
    """The test above can fail: two forwards in a row draw different masks."""
    dropping = next(entry for entry in recorded(DROPPING["mlp"]) if entry.parameters())
    given = given_to(dropping)
    torch.manual_seed(2)
    assert not torch.equal(forward_component(dropping, given)[0][0], forward_component(dropping, given)[0][0])


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize(
    "meshes",
    [
        (("mlp", Mesh(dp=2)), ("vit", Mesh(pp=2))),
        (("bert", Mesh()), ("vgg", Mesh(dp=2))),
    ],
    ids=lambda meshes: "-".join(name for name, _ in meshes),
)
def test_dropout_draws_the_same_masks_with_recomputation_and_without(
    tmp_path: Path, meshes: tuple[tuple[str, Mesh], ...]
) -> None:
    """The same ranks train on the same masks: their weights end equal, to the last bit."""
    steps = 10
    ends: list[dict[str, Tensor]] = []
    for way in ("none", "full", "selective"):
        (tmp_path / way).mkdir()
        cases = [case(DROPPING[name], mesh, microbatches=2, recompute=way) for name, mesh in meshes]
        runs = run_cases(cases, tmp_path / way, steps=steps)
        found = [latest_checkpoint(tmp_path / way / run.name / "checkpoints") for run in runs]
        ends.append(
            {
                f"{run.name} {name}": value
                for run, entry in zip(runs, found, strict=True)
                if entry is not None
                for name, value in load_state(entry).weights.items()
            }
        )
    assert ends[0].keys() == ends[1].keys() == ends[2].keys()
    assert len({key.split()[0] for key in ends[0]}) == len(meshes)
    assert all(torch.equal(value, other[name]) for other in ends[1:] for name, value in ends[0].items())
