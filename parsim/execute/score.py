"""How good the trained weights are: loss and accuracy on the test samples, in one process, whatever the plan was."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from parsim.data import IGNORED, Samples
from parsim.execute.job import RunSpec
from parsim.execute.loading import batch_to_score
from parsim.execute.stage import seeded_module
from parsim.execute.state.checkpoint import RankState, restore_one_by_one
from parsim.model.interface import interface_of
from parsim.model.losses import CLASSES
from parsim.model.objective.objective import TARGET
from parsim.model.objective.settle import choose_output
from parsim.model.objective.total import entries, output_kinds, total_loss

BATCH = 64


def score(run: RunSpec, state: RankState, data: Samples, device: torch.device, *, at_once: int = BATCH) -> dict[str, float]:
    """Mean test loss, and for classes the share of right answers; other losses have no accuracy.

    Running statistics are those of the first replica.

    Args:
        at_once: samples of a forward.
    """
    dtype = torch.float64 if run.dtype == "float64" else torch.float32
    module = seeded_module(run.model, run.seed, dtype, device)
    restore_one_by_one(dict(module.named_parameters()), state.weights)
    restore_one_by_one(dict(module.named_buffers()), state.buffers)
    module.eval()
    interface = interface_of(run.model)
    objective, names = interface.objective, [entry.name for entry in interface.inputs]
    total, right, counted = 0.0, 0, 0
    with torch.no_grad():
        for start in range(0, len(data), at_once):
            indices = np.arange(start, min(start + at_once, len(data)), dtype=np.int64)
            values = batch_to_score(data, indices, dtype, device, doing="scoring")
            target = values.pop(TARGET, None)
            args, kwargs = interface.arguments(dict(zip(names, values.values(), strict=True)))
            output = module(*args, **kwargs)
            total += float(total_loss(objective, output, target, len(indices), run.model.name))
            if target is not None and objective.row.targets == CLASSES:
                found = entries(output)
                logits = found[choose_output(run.model.name, output_kinds(found), objective.output)]
                correct, all_targets = _right(logits, target, objective.classes_dim)
                right, counted = right + correct, counted + all_targets
    result = {"test_loss": total / len(data)}
    return result if not counted else {**result, "test_accuracy": right / counted}


def _right(logits: Tensor, target: Tensor, classes_dim: int | None) -> tuple[int, int]:
    """Right answers, and targets that count."""
    dim = -1 if classes_dim is None else classes_dim + 1 if classes_dim >= 0 else classes_dim
    wanted = target != IGNORED
    return int(((logits.argmax(dim) == target) & wanted).sum()), int(wanted.sum())
