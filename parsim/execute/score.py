"""How good the trained weights are: loss and accuracy on the test samples, in one process, whatever the plan was."""

from __future__ import annotations

import numpy as np
import torch

from parsim.data import IGNORED, Dataset
from parsim.execute.job import RunSpec
from parsim.execute.stage import seeded_module
from parsim.execute.state.checkpoint import RankState, restore_tensors
from parsim.model.interface import loss_of
from parsim.model.losses import loss_sum
from parsim.model.tracing.recording import logits_of

BATCH = 64


def score(run: RunSpec, state: RankState, data: Dataset, device: torch.device) -> dict[str, float]:
    """Mean test loss, and for classes the share of right answers.

    Running statistics are those of the first replica.
    """
    dtype = torch.float64 if run.dtype == "float64" else torch.float32
    module = seeded_module(run.model, run.seed, dtype, device)
    restore_tensors({name: value for name, value in module.named_parameters() if name in state.weights}, state.weights)
    restore_tensors({name: value for name, value in module.named_buffers() if name in state.buffers}, state.buffers)
    module.eval()
    total, right, counted = 0.0, 0, 0
    with torch.no_grad():
        for start in range(0, len(data), BATCH):
            inputs, targets = data.batch(np.arange(start, min(start + BATCH, len(data)), dtype=np.int64))
            tensor = torch.from_numpy(inputs).to(device)
            target = torch.from_numpy(targets).to(device)
            logits = logits_of(module(tensor.to(dtype) if tensor.is_floating_point() else tensor))
            total += float(loss_sum(loss_of(run.model), logits, target))
            wanted = target != IGNORED
            right += int(((logits.argmax(-1) == target) & wanted).sum())
            counted += int(wanted.sum())
    return {"test_loss": total / len(data), "test_accuracy": right / max(1, counted)}
