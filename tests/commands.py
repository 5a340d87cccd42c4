"""Commands of parsim in this process, as the tests call them; the fixture `told` of conftest returns what they print too."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

Told = Callable[..., tuple[int, str, str]]
"""Of the words of a command: its exit status, stdout and stderr."""


def status_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit status of `parsim WORDS`."""
    from parsim.cli import main

    monkeypatch.setattr(sys, "argv", ["parsim", *words])
    with pytest.raises(SystemExit) as ending:
        main()
    return int(ending.value.code or 0)
