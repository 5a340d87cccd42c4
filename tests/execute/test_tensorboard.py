"""training.tensorboard: what metrics.jsonl has, as event files that TensorBoard reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from parsim.execute.train import _board, _show

LINES = [
    {"step": 1, "loss": 2.0, "learning_rate": 0.1, "seconds": 0.01},
    {"step": 2, "loss": 1.5, "learning_rate": 0.1, "seconds": 0.01, "validation": {"loss": 1.75, "accuracy": 0.5}},
]


class Board:
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.flushed = 0

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        self.flushed += 1


def test_every_number_of_a_line_is_a_scalar_of_its_step() -> None:
    board = Board()
    _show(board, LINES)
    assert ("loss", 2.0, 1) in board.scalars
    assert ("validation/loss", 1.75, 2) in board.scalars
    assert ("validation/accuracy", 0.5, 2) in board.scalars
    assert len(board.scalars) == 8
    assert board.flushed == 1


def test_tensorboard_reads_them_and_a_resumed_part_replaces_what_it_trains_again(tmp_path: Path) -> None:
    reading: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = _board(tmp_path, 0)
    _show(first, [{"step": step, "loss": float(step)} for step in range(1, 7)])
    first.close()
    again = _board(tmp_path, 4)  # the checkpoint of step 4
    _show(again, [{"step": step, "loss": 10.0 * step} for step in range(5, 9)])
    again.close()
    found = reading.EventAccumulator(str(tmp_path))
    found.Reload()
    seen = {event.step: event.value for event in found.Scalars("loss")}
    assert seen == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 50.0, 6: 60.0, 7: 70.0, 8: 80.0}
