"""Checkpoints of a training that went on from an older one: those behind it are of a part that is trained anew."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection
from pathlib import Path

from parsim.execute.state.checkpoint import remove_checkpoint, step_folders, step_of

UNUSED = "unused-"
"""What the name of a checkpoint begins with that no training goes on from."""


def set_aside_newer(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints of later steps, which could not be read when a training went on from this one.

    Else they would count among those that are kept, and one that can be read again would bring back another training.

    Args:
        folder: of all checkpoints, into which no rank writes at the moment. step: that the training goes on from.

    Returns:
        Their new places.
    """
    moved = []
    for place in step_folders(folder):
        if step_of(place) > step:
            unused = place.with_name(f"{UNUSED}{place.name}")
            shutil.rmtree(unused, ignore_errors=True)
            with contextlib.suppress(OSError):
                moved.append(place.rename(unused))
    return moved


def keep_only(folder: Path, steps: Collection[int]) -> None:
    """Remove the checkpoints of all other steps.

    Args:
        folder: of all checkpoints. steps: of those that stay.
    """
    for place in step_folders(folder):
        if step_of(place) not in steps:
            remove_checkpoint(place)
