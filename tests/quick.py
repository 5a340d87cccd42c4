"""Which parameters of a test run at every change; the others are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_quick(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values of a parameter, all but `quick` marked slow.

    Args:
        values: of `pytest.mark.parametrize`; tuples for several names. quick: those of them that a change is tested with.
    """
    known = list(values)
    assert all(value in known for value in quick), quick
    return [
        value if value in quick else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in known
    ]
