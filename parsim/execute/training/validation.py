"""What follows from the validation scores of a training: the best checkpoint, and when to stop."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parsim.data import Samples
from parsim.data.own.samples import StreamSamples
from parsim.errors import ExecutionError
from parsim.execute.processes.exchange import done_by_rank_0, value_of_rank_0
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.processes.progress import write_progress
from parsim.execute.processes.supervise.heartbeat import Doing, pulse
from parsim.execute.state.branches import keep_only
from parsim.execute.state.checkpoint import checkpoint_at, step_folders, step_of
from parsim.execute.state.reshard import whole_weights
from parsim.execute.training.evaluation import scores
from parsim.execute.training.rank_run import RankRun, run_dataset
from parsim.execute.training.recipe import EvaluationRule

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
        """Whether the training ends here."""
        return rule.patience > 0 and self.since >= rule.patience

    def to_tensor(self) -> Tensor:
        """For a checkpoint."""
        return torch.tensor([self.score, self.step, self.since], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, saved: Tensor) -> BestSoFar:
        """Inverse of `to_tensor`."""
        score, step, since = saved.tolist()
        return cls(score=score, step=int(step), since=int(since))


@dataclass(slots=True)
class Validation:
    """The validation of one training on this rank.

    Attributes: rule: of the run file. folder: of the best checkpoint. every: steps between two validations. steps: of the
        whole training. seen: the scores of this part of the training, by step.

    The folder holds the best checkpoint, and those that were the best when the last checkpoints of the training were written:
    it may go on from one of these.
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
        if not value_of_rank_0(done_by_rank_0(place, self._has_best)):
            if place.rank == 0:
                text = f"the best checkpoint (step {self.best.step}) cannot be read in {self.folder}"
                warnings.warn(f"{text}: the next validation is the best so far", stacklevel=1)
            self.best = BestSoFar(since=self.best.since)
        entry.notes[STATE] = self.best.to_tensor()

    def _has_best(self) -> bool:
        """Remove what is not among the bests up to here; says whether the best one can be read."""
        keep_only(self.folder, range(self.best.step + 1))
        self._known = tuple(map(step_of, step_folders(self.folder)))[-KNOWN:]  # of checkpoints from before, which may be needed
        if not self.best.step:
            return True
        try:
            checkpoint_at(self.folder, self.best.step)
        except ExecutionError:
            return False
        return True

    def has_saved(self, place: ProcessPlace) -> None:
        """After a checkpoint of the training: it knows the best one so far."""
        self._known = (*self._known, self.best.step)[-KNOWN:]
        if place.rank == 0:
            keep_only(self.folder, self._known)

    def due(self, done: int) -> bool:
        """Whether to validate after `done` steps."""
        return done % self.every == 0 or done == self.steps

    def look(self, entry: RankRun, place: ProcessPlace) -> bool:
        """Score the weights on all ranks, keep them if they are the best so far; says whether the training ends here."""
        pulse().begin(Doing.PREPARING, "validating")
        if self._data is None:
            found = run_dataset(entry.run, "validation")
            self._data = found.whole() if isinstance(found, StreamSamples) else found
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
            told = {f"validation {name}": f"{value:.4f}" for name, value in result.items()}
            write_progress({"step": f"{done}/{self.steps}", **told, "best": f"{self.best.score:.4f} at step {self.best.step}"})
        return self.best.stops(self.rule)

    def to_dict(self, stopped: int | None) -> dict[str, Any]:
        """For the result of the run. stopped: the step at which the training ended early; None: it did not."""
        best = {"step": self.best.step, "monitor": self.rule.monitor, "score": self.best.score, "folder": str(self.folder)}
        return {"validation": self.seen, "best": best, "stopped_early_at": stopped}
