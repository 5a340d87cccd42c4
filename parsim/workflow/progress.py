"""Warnings, and progress of work that takes more than two seconds: on stderr, for commands, scripts and notebooks alike."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parsim.units import format_seconds

QUIET_S = 2.0

Say = Callable[[str], None]


def warn(text: object) -> None:
    """One line on stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def progress(title: str) -> Iterator[Say]:
    """Show on stderr that something is going on; yields a function that says how far it is.

    On a terminal: one line that changes in place. Elsewhere: a line at the start, and one at the end if it took longer than
    two seconds.
    """
    started = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True, highlight=False).status(Text(f"{title} ...")) as status:
            yield lambda text: status.update(Text(f"{title}: {text}"))
        ending = f"{title}: {format_seconds(time.monotonic() - started)}"
        print(ending, file=sys.stderr)
        return
    print(f"{title} ...", file=sys.stderr, flush=True)
    yield lambda text: print(f"  {text}", file=sys.stderr, flush=True)
    taken = time.monotonic() - started
    if taken > QUIET_S:
        print(f"{title}: {format_seconds(taken)}", file=sys.stderr, flush=True)
