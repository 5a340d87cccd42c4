"""Tables of pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int | None = None) -> str:
    """A table of Markdown.

    Args:
        head: names of columns. rows: their cells. words: so many columns hold words, and those behind them figures, which are
            aligned right; None: all hold words.
    """
    columns = len(head) if words is None else words
    rule = "|" + "---|" * columns + "---:|" * (len(head) - columns)
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])


def replaced(text: str, begin: str, end: str, made: str) -> str:
    """A page with `made` between two marks that stand in it once."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{made}\n{end}{rest.partition(end)[2]}"
