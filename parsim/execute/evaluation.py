"""How good weights are, and what follows from that in a training: the best checkpoint, and when to stop.

Loss and metrics over samples: at validations on all ranks, at the end of a training in one process. At a validation every rank
takes whole weights and scores its share of the batches. It holds them beside its own part, and no activations of the training.
Predicted as the line `evaluation` (`parsim.predict.memory`). The sums of batches are joined exactly (`math.fsum`), so a score
depends on no number of ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parsim.data.samples import Samples, StreamSamples
from parsim.errors import ExecutionError
from parsim.execute.checkpoint import checkpoint
from parsim.execute.checkpoint.checkpoint import checkpoint_at, keep_only, step_folders, step_of
from parsim.execute.checkpoint.reshard import whole_weights
from parsim.execute.job import EvaluationRule, RunSpec
from parsim.execute.loading import batch_to_score
from parsim.execute.metrics import LOSS_NAME, METRICS
from parsim.execute.numerics import DTYPES
from parsim.execute.processes.exchange import done_by_rank_0, gather_values, value_of_rank_0
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.processes.heartbeat import Doing, pulse
from parsim.execute.processes.output import write_progress
from parsim.execute.rank_run import RankRun, run_dataset
from parsim.execute.stage import seeded_module
from parsim.model.build import interface_of
from parsim.model.objective import CLASSES, TARGET, choose_output
from parsim.model.total_loss import entries, output_kinds, total_loss

BATCH = 64
"""Samples of a forward, at most."""
ACCURACY = "accuracy"
Sums = dict[str, tuple[list[float], list[float]]]
"""Numerators and denominators by metric."""


def score(
    run: RunSpec, state: checkpoint.RankState, data: Samples, device: torch.device, *, at_once: int = BATCH
) -> dict[str, float]:
    """Mean test loss, and for classes the share of right answers. state: whole; running statistics are those of the first
    replica. at_once: samples of a forward."""
    metrics = (ACCURACY,) if interface_of(run.model).objective.row.targets == CLASSES else ()
    means = scores(run, state.weights, state.buffers, data, metrics, device=device, at_once=at_once, doing="scoring")
    result = {"test_loss": means[LOSS_NAME]}
    return result if math.isnan(means.get(ACCURACY, math.nan)) else {**result, "test_accuracy": means[ACCURACY]}


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
    at_once: int | None = None,
    doing: str = "validating",
) -> dict[str, float]:
    """The mean loss and the metrics (rows of METRICS) over all samples, the same on all ranks, which call it at once.

    weights, buffers: whole, by name. rank, ranks: each rank scores every ranks-th batch. at_once: samples of a forward; None:
    those of a microbatch, at most BATCH. doing: for messages.
    """
    random = checkpoint.rng_state(str(device))
    size = at_once or max(1, min(BATCH, run.plan.microbatch_samples))
    try:
        module = seeded_module(run.model, run.seed, DTYPES[run.dtype], device).eval()
        for name, value in module.named_parameters():
            if name in weights:
                value.data = weights[name].to(device=device, dtype=value.dtype)  # not a copy: it would be one more whole model
        checkpoint.restore_tensors({name: value for name, value in module.named_buffers() if name in buffers}, buffers)
        sums = []
        for start in range(rank * size, len(data), ranks * size):
            indices = np.arange(start, min(start + size, len(data)), dtype=np.int64)
            values = batch_to_score(data, indices, DTYPES[run.dtype], device, doing=doing)
            sums.append(_batch_sums(run, module, values, len(indices), metrics))
    finally:
        checkpoint.restore_rng(random, str(device))
    everyone: list[list[Sums]] = gather_values(sums) if ranks > 1 else [sums]
    return _joined([batch for batches in everyone for batch in batches])


@torch.no_grad()
def _batch_sums(run: RunSpec, module: nn.Module, values: dict[str, Tensor], count: int, metrics: Sequence[str]) -> Sums:
    interface = interface_of(run.model)
    objective = interface.objective
    target = values.pop(TARGET, None)
    names = [entry.name for entry in interface.inputs]
    args, kwargs = interface.arguments(dict(zip(names, values.values(), strict=True)))
    output = module(*args, **kwargs)
    sums: Sums = {LOSS_NAME: ([float(total_loss(objective, output, target, count, run.model.name))], [float(count)])}
    if metrics and target is not None:  # a model that takes its targets itself has none
        tensors = entries(output)
        read = tensors[choose_output(run.model.name, output_kinds(tensors), objective.output)]
        classes = objective.classes_dim
        dim = -1 if classes is None else classes + 1 if classes >= 0 else classes
        for metric in metrics:
            above, below = METRICS[metric].sums(read, target, dim)
            sums[metric] = above.double().reshape(-1).tolist(), below.double().reshape(-1).tolist()
    return sums


def _joined(batches: Sequence[Sums]) -> dict[str, float]:
    def added(parts: Sequence[Sequence[float]]) -> list[float]:
        return [math.fsum(entry) if all(map(math.isfinite, entry)) else math.nan for entry in zip(*parts, strict=True)]

    result = {}
    for name in batches[0]:
        above, below = (added([batch[name][place] for batch in batches]) for place in (0, 1))
        result[name] = above[0] / below[0] if name == LOSS_NAME else METRICS[name].value(above, below)
    return result


STATE = "validation"
"""Name of the progress of the validation in a checkpoint."""
ALL = 10**9
"""Checkpoints that stay when one is written: which ones go is decided here."""
KNOWN = 3
"""Checkpoints that a training may go on from: two that are complete, and one that ranks may still write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSoFar:
    """Attributes: score: the best one. step: at which it was reached. since: validations after it that were not better."""

    score: float = math.nan
    step: int = 0
    since: int = 0

    def after(self, score: float, step: int, rule: EvaluationRule) -> BestSoFar:
        """With one more score; NaN is never better."""
        gain = (score - self.score) if rule.larger_is_better else (self.score - score)
        if not math.isnan(score) and (math.isnan(self.score) or gain > rule.min_delta):
            return BestSoFar(score=score, step=step, since=0)
        return BestSoFar(score=self.score, step=self.step, since=self.since + 1)

    def stops(self, rule: EvaluationRule) -> bool:
        return rule.patience > 0 and self.since >= rule.patience

    def to_tensor(self) -> Tensor:
        return torch.tensor([self.score, self.step, self.since], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, saved: Tensor) -> BestSoFar:
        score, step, since = saved.tolist()
        return cls(score=score, step=int(step), since=int(since))


@dataclass(slots=True)
class Validation:
    """The validation of one training on this rank, every so many steps. The folder holds the best checkpoint, and those that
    were the best when the last checkpoints of the training were written: it may go on from one of these.

    steps: of the whole training. seen: the scores of this part of it.
    """

    rule: EvaluationRule
    folder: Path
    every: int
    steps: int
    best: BestSoFar = field(default_factory=BestSoFar)
    seen: list[dict[str, Any]] = field(default_factory=list)
    _data: Samples | None = None
    _known: tuple[int, ...] = ()

    def begin(self, entry: RankRun, place: ProcessPlace) -> None:
        """Go on from what the checkpoint that was resumed knows. Better ones behind it are of a part that is trained anew."""
        saved = entry.notes.get(STATE)
        if saved is not None:
            self.best = BestSoFar.from_tensor(saved)
        if not value_of_rank_0(done_by_rank_0(place, self._tidied)):
            if place.rank == 0:
                text = f"the best checkpoint (step {self.best.step}) cannot be read in {self.folder}"
                warnings.warn(f"{text}: the next validation is the best so far", stacklevel=1)
            self.best = BestSoFar(since=self.best.since)
        entry.notes[STATE] = self.best.to_tensor()

    def _tidied(self) -> bool:
        """Remove what is not among the bests up to here; says whether the best one, if any, can be read."""
        keep_only(self.folder, range(self.best.step + 1))
        self._known = tuple(map(step_of, step_folders(self.folder)))[-KNOWN:]  # of checkpoints from before, which may be needed
        try:
            return not self.best.step or bool(checkpoint_at(self.folder, self.best.step))
        except ExecutionError:
            return False

    def has_saved(self, place: ProcessPlace) -> None:
        """After a checkpoint of the training: it knows the best one so far."""
        self._known = (*self._known, self.best.step)[-KNOWN:]
        if place.rank == 0:
            keep_only(self.folder, self._known)

    def due(self, done: int) -> bool:
        return done % self.every == 0 or done == self.steps

    def look(self, entry: RankRun, place: ProcessPlace) -> bool:
        """Score the weights on all ranks, keep them if they are the best so far; says whether the training ends here."""
        pulse().begin(Doing.PREPARING, "validating")
        if self._data is None:
            samples = run_dataset(entry.run, "validation")
            self._data = samples.whole() if isinstance(samples, StreamSamples) else samples
        ema = entry.run.recipe.ema
        weights, buffers = whole_weights(entry.stage, averaged=ema is not None and ema.evaluate)
        if entry.mixing is not None:  # those above are the first replica's
            weights = {**weights, **entry.mixing.mean_weights()}
        result = scores(
            entry.run,
            weights,
            buffers,
            self._data,
            self.rule.metrics,
            device=entry.stage.device,
            rank=place.rank,
            ranks=entry.layout.plan.world_size,
        )
        del weights, buffers
        done, score = entry.step_number, result[self.rule.monitor]
        if entry.rate is not None:
            entry.rate.saw(score, done)
        before, self.best = self.best, self.best.after(score, done, self.rule)
        entry.notes[STATE] = self.best.to_tensor()
        self.seen.append({"step": done, **result})
        if self.best.step != before.step:
            entry.save(self.folder, keep=ALL)
            if place.rank == 0:  # other ranks may still write the new one
                keep_only(self.folder, {*self._known, before.step, self.best.step})
        if place.rank == 0:
            texts = {f"validation {name}": f"{value:.4f}" for name, value in result.items()}
            write_progress({"step": f"{done}/{self.steps}", **texts, "best": f"{self.best.score:.4f} at step {self.best.step}"})
        return self.best.stops(self.rule)

    def to_dict(self, stopped: int | None) -> dict[str, Any]:
        """For the result of the run. stopped: the step at which the training ended early; None: it did not."""
        best = {"step": self.best.step, "monitor": self.rule.monitor, "score": self.best.score, "folder": str(self.folder)}
        return {"validation": self.seen, "best": best, "stopped_early_at": stopped}
