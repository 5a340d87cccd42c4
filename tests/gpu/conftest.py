"""Modules of experiments/one_gpu by name, while a test runs: other experiments have modules of the same names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "one_gpu"
NAMES = ("analyse", "kernels", "predictions", "prepare", "questions", "programs", "cases", "supervise")

Load = Callable[[str], ModuleType]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)
