"""Tables of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int | None = None) -> str:
    """A table of Markdown. words: so many columns hold words, and those behind them figures, aligned right; None: all hold
    words."""
    columns = len(head) if words is None else words
    rule = "|" + "---|" * columns + "---:|" * (len(head) - columns)
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])


def row_table(
    rows: Iterable[Any],
    columns: Sequence[tuple[str, str | Callable[[Any], str]]],
    *,
    words: int | None = None,
) -> str:
    """A table of Markdown with a line per row. columns: name, and a format such as "{seconds:.1f}" or a function of a row;
    words: as of `table`."""
    cells = [[cell.format_map(row) if isinstance(cell, str) else cell(row) for _, cell in columns] for row in rows]
    return table([name for name, _ in columns], cells, words=words)


def replaced(text: str, begin: str, end: str, made: str) -> str:
    """A page with `made` between two marks that stand in it once."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{made}\n{end}{rest.partition(end)[2]}"
