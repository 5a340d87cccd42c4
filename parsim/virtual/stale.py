"""Decoupled stages with gradients that are late, on one row of weights.

The gradient of stage k for batch b is block k of the ordinary gradient at the weights with which batch b ran forward: those
that stage k had in step b + k. So one gradient of the whole model per step is enough. Its blocks wait until their stage is
due: stage k of K applies that of batch b in step b + 2 (K - 1) - k. Equal to the tick engine (`parsim.virtual.ticks`,
order "concurrent", stashed weights) to rounding. Replicas sum gradients in every step, so one stands for all.

Leaves out: BatchNorm and dropout, as all virtual replicas do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from parsim.data import BatchOrder
from parsim.errors import AlgorithmError
from parsim.virtual.local import LocalTraining, Workers


def stale_steps(training: LocalTraining, order: BatchOrder, stages: Sequence[Sequence[str]]) -> Iterator[Workers]:
    """Step after step without end: the weights of all stages behind each, as one worker.

    Args:
        training: of the model. order: of the samples. stages: names of the parameters of each stage, first to last.

    Raises:
        AlgorithmError: the stages do not divide the parameters of the model among them.
    """
    places = _places(training, stages)
    last = len(stages) - 1
    live = [Workers.fresh(training.start[None, place]) for place in places]
    forward: dict[int, Tensor] = {}
    waiting: list[dict[int, Tensor]] = [{} for _ in stages]
    for step in itertools.count():
        forward[step] = torch.empty_like(training.start)[None]
        for stage, place in enumerate(places):
            if step >= stage:
                forward[step - stage][:, place] = live[stage].weights
        if step >= last:
            batch = step - last
            gradient = training.gradient(forward.pop(batch), order.indices(batch)[None])
            for stage, place in enumerate(places):
                waiting[stage][batch + 2 * last - stage] = gradient[:, place]
        for stage, due in enumerate(waiting):
            if step in due:
                live[stage] = training.updated(live[stage], due.pop(step))
        weights = torch.empty_like(training.start)[None]
        for stage, place in enumerate(places):
            weights[:, place] = live[stage].weights
        yield Workers(weights=weights, steps=torch.full((1,), step + 1, dtype=torch.int64))


def _places(training: LocalTraining, stages: Sequence[Sequence[str]]) -> list[Tensor]:
    """Where in a row of weights the parameters of each stage are."""
    names = [name for name, _ in training.tensors]
    ends = np.cumsum([size for _, size in training.tensors])
    given = [name for stage in stages for name in stage]
    if sorted(given) != sorted(names):
        odd = sorted(set(names) ^ set(given)) or sorted({name for name in given if given.count(name) > 1})
        raise AlgorithmError(
            f"{len(stages)} stages have to divide all parameters among them, each in one stage; look at {', '.join(odd[:4])}"
        )
    where = {name: torch.arange(end - size, end) for (name, size), end in zip(training.tensors, ends, strict=True)}
    return [torch.cat([where[name] for name in stage] or [torch.arange(0)]) for stage in stages]
