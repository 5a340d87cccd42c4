"""How every command speaks: results on stdout (one JSON document with --json), progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parsim.units import format_seconds

if TYPE_CHECKING:
    from parsim.report.tables import ReportTable

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, e.g. cluster.devices=4.")
]
RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="What to train on what; see the README for its keys.")]

QUIET_S = 2.0


def print_json(document: object) -> None:
    """The one document of a --json command. A number that is not finite becomes null: JSON has no word for it."""
    print(json.dumps(_finite(document), indent=1, allow_nan=False))


def _finite(node: object) -> Any:
    match node:
        case float():
            return node if node - node == 0 else None
        case dict():
            return {str(key): _finite(value) for key, value in node.items()}
        case list() | tuple():
            return [_finite(value) for value in node]
        case _:
            return node


def print_tables(tables: Sequence[ReportTable]) -> None:
    """Rich tables on a terminal, plain text of a fixed width in a file or a pipe."""
    from parsim.report.tables import to_rich, to_text

    if not sys.stdout.isatty():
        print("\n".join(to_text(table) for table in tables), end="")
        return
    from rich.console import Console

    console = Console(highlight=False)
    for table in tables:
        console.print(to_rich(table))


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr that something is going on; yields a function that says how far it is.

    On a terminal: one line that changes in place. Elsewhere: a line at the start, and one at the end if it took longer than
    two seconds.
    """
    started = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True, highlight=False).status(f"{title} ...") as status:
            yield lambda text: status.update(f"{title}: {text}")
        ending = f"{title}: {format_seconds(time.monotonic() - started)}"
        print(ending, file=sys.stderr)
        return
    print(f"{title} ...", file=sys.stderr, flush=True)
    yield lambda text: print(f"  {text}", file=sys.stderr, flush=True)
    taken = time.monotonic() - started
    if taken > QUIET_S:
        print(f"{title}: {format_seconds(taken)}", file=sys.stderr, flush=True)
