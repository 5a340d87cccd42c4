"""What a calibration runs beside training steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from calibration.measure.collectives import COLLECTIVES  # noqa: E402
from calibration.measure.overlap import beside_steps  # noqa: E402
from parsim.work import COLLECTIVES as OPERATIONS  # noqa: E402


def test_only_collectives_that_can_be_called_run_beside_steps() -> None:
    """Plans of context parallelism send ring shifts, which no calibration calls; a thorough one looked for their call."""
    bench: Any = SimpleNamespace(scratch=torch.empty(2**28, device="meta"), dtype=torch.float32)
    beside = {operation for operation, _ in beside_steps(bench, quick=False)}
    assert beside == set(COLLECTIVES) & set(OPERATIONS)
    assert {"all_reduce", "all_gather", "reduce_scatter"} < beside
    assert {operation for operation, _ in beside_steps(bench, quick=True)} == {"all_reduce"}
