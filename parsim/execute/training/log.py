"""What a training tells while it runs: a line of progress, and metrics.jsonl with one line per step.

The losses of ranks are added up where ranks meet anyway: at validations, checkpoints and the end. So a step sends nothing
more than its graph says. A line is {"step", "loss", "learning_rate", "seconds", ...}; a resumed training first drops the
lines behind its checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from parsim.errors import ExecutionError
from parsim.execute.processes.exchange import gather_values
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.records.metrics_file import FILE
from parsim.execute.training.rank_run import RankRun
from parsim.files import json_text, parse_json, read_regular, write_text_atomically
from parsim.units import format_seconds

BOARD = "tensorboard"
"""Folder of event files, where the training writes them."""
RECENT = 20
"""Steps whose mean is shown as the measured step."""
NORMS = 256
"""Norms of gradients are read from the device together, at most so many: each read waits for it."""


class TrainingLog:
    """Of one training on this rank.

    Args:
        folder: of the run. entry: where the training stands. steps: of the whole training.
    """

    def __init__(self, folder: Path, entry: RankRun, steps: int) -> None:
        self._path, self._steps = folder / FILE, steps
        self._first = entry.step_number
        self._written = 0
        self._seconds: list[float] = []
        self._rates: list[dict[str, float]] = []
        self._norms: list[Any] = []
        self._read = 0
        self._last = time.perf_counter()
        self._board: Any = None
        if entry.stage.rank == 0:
            _cut(self._path, self._first)
            if entry.run.recipe.tensorboard:
                self._board = _board(folder / BOARD, self._first)

    def begin_step(self, entry: RankRun) -> None:
        """Before a step: its rate, and the time from here on."""
        self._rates.append(entry.learning_rates)
        self._last = time.perf_counter()

    def end_step(self, entry: RankRun) -> None:
        """After a step."""
        self._seconds.append(time.perf_counter() - self._last)
        self._norms.append(entry.stage.gradient_norm)
        if len(self._norms) - self._read >= NORMS:
            self._read_norms()

    def _read_norms(self) -> None:
        """Norms as numbers: each is an array of the device until then."""
        left = [norm for norm in self._norms[self._read :] if norm is not None]
        if left:  # a plan clips in every step, or in none
            self._norms[self._read :] = torch.cat(left).tolist()
        self._read = len(self._norms)

    def write(self, entry: RankRun, place: ProcessPlace, validation: dict[str, Any] | None) -> None:
        """The steps since the last time; every rank calls it at once.

        Args:
            validation: the scores after the last step, where it had some.
        """
        own = entry.losses[self._written :]
        everyone = gather_values(own)
        self._written += len(own)
        if place.rank != 0 or not own:
            return
        self._read_norms()
        first = self._written - len(own)
        lines = []
        for number, losses in enumerate(zip(*everyone, strict=True), first):
            counted = [loss for loss in losses if loss is not None]
            line: dict[str, Any] = {
                "step": self._first + number + 1,
                **({"loss": math.fsum(counted)} if counted else {}),
                "learning_rate": self._rates[number][""],
                **{f"learning_rate.{name}": rate for name, rate in self._rates[number].items() if name},
                "seconds": self._seconds[number],
            }
            norm = self._norms[number]
            lines.append(line if norm is None else {**line, "gradient_norm": norm})
        self._norms[first : self._written] = [None] * len(own)
        if validation is not None:
            lines[-1]["validation"] = {name: value for name, value in validation.items() if name != "step"}
        if self._board is not None:
            _show(self._board, lines)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json_text(line) + "\n" for line in lines)
        except OSError as error:
            raise ExecutionError(f"cannot write {self._path}: {error}; is the disk full?") from error

    def progress(self, entry: RankRun, loss: float) -> dict[str, str]:
        """How far the training is, for people. loss: of the rank's own samples."""
        recent = self._seconds[-RECENT:]
        step_s = sum(recent) / len(recent)
        told = {
            "step": f"{entry.step_number}/{self._steps}",
            "loss on its last samples": f"{loss:.4f}",
            "samples/s": f"{entry.run.plan.global_batch / step_s:.4g}",
            "a step takes": format_seconds(step_s),
        }
        if entry.run.predicted_step_s:
            told["predicted"] = format_seconds(entry.run.predicted_step_s)
        return {**told, "ends in": format_seconds(step_s * (self._steps - entry.step_number))}


def _board(folder: Path, steps: int) -> Any:
    """A writer of event files; what an earlier part of the training wrote behind its checkpoint is hidden."""
    from torch.utils.tensorboard import SummaryWriter

    board: Any = SummaryWriter  # torch leaves it without types
    return board(str(folder), purge_step=steps + 1)


def _show(board: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    """The numbers of metrics.jsonl as scalars; those of a validation below validation/."""
    for line in lines:
        scalars = {name: value for name, value in line.items() if name not in ("step", "validation")}
        scalars |= {f"validation/{name}": value for name, value in line.get("validation", {}).items()}
        for name, value in scalars.items():
            board.add_scalar(name, value, line["step"])
    board.flush()


def _cut(path: Path, steps: int) -> None:
    """Keep the lines of the first `steps` steps; one that cannot be read ends them."""
    if not path.is_file():
        return
    kept = []
    for text in read_regular(path).decode("utf-8", errors="replace").splitlines():
        try:
            if not 0 < parse_json(text, allow_nan=True)["step"] <= steps:
                break
        except (ValueError, KeyError, TypeError):
            break
        kept.append(text + "\n")
    write_text_atomically(path, "".join(kept))
