"""metrics.jsonl of a training: one line per step, over all its parts. `parsim.execute.train` writes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsim.files import parse_json, read_regular

FILE = "metrics.jsonl"
_SAME = 1e-9
"""Relative difference of a sum of ranks' losses that is added up in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """The losses of a training.

    Attributes:
        first_step: that the first loss belongs to, from 1. losses: one per step.
        validation: scores, each with its step; None where the file lacks earlier parts.
    """

    first_step: int
    losses: tuple[float, ...]
    validation: tuple[dict[str, Any], ...] | None = None


def loss_curve(folder: Path, last: Sequence[float], steps: int) -> LossCurve:
    """All losses of a training that may have gone on several times; only those of its last part where the file lacks others.

    folder: of the run. last: losses that the ranks of the last part recorded. steps: that were made in all.
    """
    lines = lines_of(folder)
    counted = [line for line in lines if "loss" in line]
    whole = tuple(float(line["loss"]) for line in counted)
    tail = whole[len(whole) - len(last) :]
    is_whole = (
        [line["step"] for line in lines] == list(range(1, steps + 1))
        and len(tail) == len(last)
        and all(math.isclose(one, two, rel_tol=_SAME) for one, two in zip(tail, last, strict=True))
    )
    if not is_whole or not counted:
        return LossCurve(first_step=steps - len(last) + 1, losses=tuple(last))
    seen = ({"step": line["step"], **line["validation"]} for line in lines if isinstance(line.get("validation"), dict))
    return LossCurve(first_step=counted[0]["step"], losses=whole, validation=tuple(seen))


def lines_of(folder: Path) -> tuple[dict[str, Any], ...]:
    """The steps that a training has written down, each with its step, seconds and perhaps loss and validation; none without."""
    try:
        return tuple(_lines(read_regular(folder / FILE)))
    except (OSError, ValueError):
        return ()


def _lines(content: bytes) -> Iterator[dict[str, Any]]:
    """The lines of the file. Raises ValueError for one that is none."""
    for text in content.decode().splitlines():
        line = parse_json(text, allow_nan=True)  # a gradient norm in fp16 may have overflowed
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise ValueError("a line is not a step of a training")
        if not isinstance(line.get("loss", 0.0), int | float):
            raise ValueError("a loss is not a number")
        yield line
