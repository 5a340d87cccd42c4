"""How a rank tells its parent how far it is: one line of stdout, marked, that carries one JSON value.

Whatever else a rank prints (warnings of libraries, its own errors) is not marked, so it is never taken for progress.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

MARK = "parsim-progress "

Progress = str | Mapping[str, Any]
"""A text, or named values such as {"step": "3/10", "loss": "1.23"}."""


def write_progress(progress: Progress) -> None:
    """Print one line of progress for the parent."""
    print(MARK + json.dumps(progress), flush=True)


def read_progress_line(line: str) -> Progress | None:
    """What a rank wrote with `write_progress`; None for any other line.

    Raises:
        ValueError: a marked line that holds no JSON.
    """
    if not line.startswith(MARK):
        return None
    found: Progress = json.loads(line.removeprefix(MARK))
    return found


def progress_text(progress: Progress) -> str:
    """Progress for people: "step 3/10, loss 1.23"."""
    if isinstance(progress, str):
        return progress
    return ", ".join(f"{name} {value}" for name, value in progress.items())


def relayed(on_text: Callable[[str], None]) -> Callable[[str], None]:
    """For the `on_line` of `launch`: hands the text of every line of progress to `on_text`, and drops all other lines."""

    def on_line(line: str) -> None:
        progress = read_progress_line(line)
        if progress is not None:
            on_text(progress_text(progress))

    return on_line
