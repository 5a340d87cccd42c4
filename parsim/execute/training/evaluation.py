"""Validation on all ranks: every rank takes whole weights, scores its share of the samples, and the sums are added up.

Between two steps a rank holds the whole weights beside its own part, and no activations of the training. Predicted as the line
`evaluation` (`parsim.predict.round_memory`). The sums of batches are joined exactly (`math.fsum`), so the score depends on no
number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parsim.data import Samples
from parsim.execute.job import RunSpec
from parsim.execute.loading import batch_to_score
from parsim.execute.processes.exchange import gather_values
from parsim.execute.stage import seeded_module
from parsim.execute.state import checkpoint
from parsim.execute.training.metrics import LOSS_NAME, METRICS
from parsim.model.interface import interface_of
from parsim.model.objective.objective import TARGET
from parsim.model.objective.settle import choose_output
from parsim.model.objective.total import entries, output_kinds, total_loss

MOST_BATCH = 64
Sums = dict[str, tuple[list[float], list[float]]]
"""Numerators and denominators by metric."""


def scores(
    run: RunSpec,
    weights: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    data: Samples,
    metrics: Sequence[str],
    *,
    device: torch.device,
    rank: int = 0,
    ranks: int = 1,
) -> dict[str, float]:
    """The mean loss and the metrics over all samples, the same on every rank. With several, all of them call it at once.

    Args:
        weights, buffers: whole, by name. data: of the validation. metrics: rows of METRICS.
        rank, ranks: which share of the batches is scored here.
    """
    random = checkpoint.rng_state(str(device))
    try:
        own = _own_sums(run, weights, buffers, data, metrics, device=device, rank=rank, ranks=ranks)
    finally:
        checkpoint.restore_rng(random, str(device))
    everyone: list[list[Sums]] = gather_values(own) if ranks > 1 else [own]
    batches = [batch for found in everyone for batch in found]
    result = {}
    for name in (LOSS_NAME, *metrics):
        above, below = (_added([batch[name][place] for batch in batches]) for place in (0, 1))
        result[name] = above[0] / below[0] if name == LOSS_NAME else METRICS[name].value(above, below)
    return result


def _added(parts: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(entry) if all(map(math.isfinite, entry)) else math.nan for entry in zip(*parts, strict=True)]


def _own_sums(
    run: RunSpec,
    weights: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    data: Samples,
    metrics: Sequence[str],
    *,
    device: torch.device,
    rank: int,
    ranks: int,
) -> list[Sums]:
    """Of every batch of this rank's share."""
    dtype = torch.float64 if run.dtype == "float64" else torch.float32
    module = seeded_module(run.model, run.seed, dtype, device)
    for name, value in module.named_parameters():
        if name in weights:
            value.data = weights[name].to(device=device, dtype=dtype)  # not a copy: it would be one more of the whole model
    checkpoint.restore_tensors({name: value for name, value in module.named_buffers() if name in buffers}, buffers)
    module.eval()
    interface = interface_of(run.model)
    objective, names = interface.objective, [entry.name for entry in interface.inputs]
    size = max(1, min(MOST_BATCH, run.plan.microbatch_samples))
    found: list[Sums] = []
    with torch.no_grad():
        for number, start in enumerate(range(0, len(data), size)):
            if number % ranks != rank:
                continue
            indices = np.arange(start, min(start + size, len(data)), dtype=np.int64)
            values = batch_to_score(data, indices, dtype, device, doing="validating")
            target = values.pop(TARGET, None)
            args, kwargs = interface.arguments(dict(zip(names, values.values(), strict=True)))
            output = module(*args, **kwargs)
            total = float(total_loss(objective, output, target, len(indices), run.model.name))
            sums: Sums = {LOSS_NAME: ([total], [float(len(indices))])}
            if metrics:
                sums |= _metric_sums(output, target, objective, run.model.name, metrics)
            found.append(sums)
    return found


def _metric_sums(output: Any, target: Tensor | None, objective: Any, name: str, metrics: Sequence[str]) -> Sums:
    tensors = entries(output)
    read = tensors[choose_output(name, output_kinds(tensors), objective.output)]
    classes = objective.classes_dim
    dim = -1 if classes is None else classes + 1 if classes >= 0 else classes
    sums: Sums = {}
    for metric in metrics:
        assert target is not None, "the workflow refuses metrics of a model that takes its targets itself"
        above, below = METRICS[metric].sums(read, target, dim)
        sums[metric] = above.double().reshape(-1).tolist(), below.double().reshape(-1).tolist()
    return sums
