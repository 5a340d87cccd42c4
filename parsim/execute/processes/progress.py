"""How a rank tells its parent how far it is: one line of stdout, marked, that carries one JSON value.

Whatever else a rank prints (warnings of libraries, its own errors) is not marked, so it is never taken for progress.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

MARK = "parsim-progress "

WARNING = "warning"
"""The name under which a rank tells a warning."""

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


def relayed(on_text: Callable[[str], None], on_warning: Callable[[str], None] | None = None) -> Callable[[str], None]:
    """For the `on_line` of `launch`: hands the text of every line of progress to `on_text`, and drops all other lines.

    Args:
        on_warning: receives every warning once, whichever ranks gave it; left out: warnings are progress.
    """
    told: set[str] = set()

    def on_line(line: str) -> None:
        progress = read_progress_line(line)
        if progress is None:
            return
        if on_warning is None or not isinstance(progress, Mapping) or WARNING not in progress:
            on_text(progress_text(progress))
        elif (text := str(progress[WARNING])) not in told:
            told.add(text)
            on_warning(text)

    return on_line
