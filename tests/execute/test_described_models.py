"""Losses of models of several inputs, with outputs in structures. `test_equality` trains them."""

from __future__ import annotations

import pytest
import torch

from parsim.model.build import build_module, example_batch, interface_of
from parsim.model.spec import ModelSpec
from parsim.model.total_loss import total_loss
from tests.execute.described_specs import DESCRIBED

BATCH = 8


@pytest.mark.parametrize("spec", DESCRIBED, ids=[f"{spec.name.partition(':')[2]} {spec.loss}" for spec in DESCRIBED])
def test_losses_add_up_over_microbatches(spec: ModelSpec) -> None:
    """The sum over eight samples is that of two halves, whatever form the loss has; a scalar is the mean of its batch."""
    interface = interface_of(spec)
    module = build_module(spec).double()
    inputs, target = example_batch(spec, BATCH, dtype=torch.float64)
    constants = {entry.name for entry in interface.inputs if entry.constant}

    def total(first: int, last: int) -> float:
        given = {name: tensor if name in constants else tensor[first:last] for name, tensor in inputs.items()}
        args, kwargs = interface.arguments(given)
        wanted = None if target is None else target[first:last]
        return float(total_loss(interface.objective, module(*args, **kwargs), wanted, last - first).detach())

    assert total(0, BATCH) == pytest.approx(total(0, 3) + total(3, BATCH), rel=1e-12)
