"""The course of a whole run, block by block: so many steps of training, a checkpoint, an evaluation, the start of an epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parsim.arrays import Floats, Ints
from parsim.engines.scenario.scenario import Checkpoints, Run
from parsim.errors import ScenarioError

TRAINING, CHECKPOINT, EVALUATION, EPOCH_START = 0, 1, 2, 3
KINDS = ("training", "checkpoint", "evaluation", "epoch_start")

MOST_BLOCKS = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """A run without failures, in the order things are done.

    Attributes:
        kind: int64 [B], numbers of KINDS. steps: int64 [B], of training blocks. seconds: float64 [B], of all other blocks.
        resume: int64 [B], the block that a run goes on with after failing in a block: behind the last checkpoint written.
    """

    kind: Ints
    steps: Ints
    seconds: Floats
    resume: Ints

    @property
    def total_steps(self) -> int:
        return int(self.steps.sum())


def course_of(
    run: Run, *, steps_per_epoch: int, interval_steps: int | None, checkpoint_s: float = 0.0, evaluation_s: float = 0.0
) -> Course:
    """The blocks of `run` (one epoch where it names no number).

    Args:
        interval_steps: training steps between checkpoints, counted through epochs; None for no checkpoint. With them, the run
            ends with one. checkpoint_s, evaluation_s: seconds of one.

    Raises ScenarioError if a step count is below 1 or the blocks are too many.
    """
    if steps_per_epoch < 1 or (interval_steps is not None and interval_steps < 1):
        raise ScenarioError(f"an epoch and a checkpoint interval hold >= 1 step, got {steps_per_epoch} and {interval_steps}")
    epochs = run.epochs or 1
    total = epochs * steps_per_epoch
    marks = np.arange(interval_steps, total, interval_steps) if interval_steps else np.zeros(0, dtype=np.int64)
    if len(marks) + 3 * epochs > MOST_BLOCKS:
        raise ScenarioError(
            f"{len(marks)} checkpoints in {epochs} epochs are too many to simulate; take a longer checkpoints.interval_s"
        )
    written = set(marks.tolist())
    blocks: list[tuple[int, int, float]] = []
    done = 0
    for epoch in range(1, epochs + 1):
        if run.epoch_start_s:
            blocks.append((EPOCH_START, 0, run.epoch_start_s))
        end = epoch * steps_per_epoch
        low, high = np.searchsorted(marks, (done, end), side="right")
        for stop in [*marks[low:high].tolist(), *([] if end in written else [end])]:
            blocks.append((TRAINING, stop - done, 0.0))
            done = stop
            if stop in written:
                blocks.append((CHECKPOINT, 0, checkpoint_s))
        if run.evaluate_every_epochs and epoch % run.evaluate_every_epochs == 0 and evaluation_s:
            blocks.append((EVALUATION, 0, evaluation_s))
    if interval_steps:
        blocks.append((CHECKPOINT, 0, checkpoint_s))
    kind = np.array([block[0] for block in blocks], dtype=np.int64)
    behind = np.where(kind == CHECKPOINT, np.arange(1, len(blocks) + 1), 0)
    resume = np.zeros(len(blocks), dtype=np.int64)
    resume[1:] = np.maximum.accumulate(behind)[:-1]
    return Course(
        kind=kind,
        steps=np.array([block[1] for block in blocks], dtype=np.int64),
        seconds=np.array([block[2] for block in blocks]),
        resume=resume,
    )


def interval_steps_of(checkpoints: Checkpoints, step_s: float) -> int:
    """The interval in whole steps, at least one."""
    return max(1, round(checkpoints.interval_s / step_s))
