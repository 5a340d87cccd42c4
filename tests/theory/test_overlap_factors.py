"""One pair of factors for a program: by size on lines between measured points, the mean over what it sends by time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.costs.communication.closed_forms import overlap_of
from parsim.hardware.profile import Overlap, OverlapPoint
from parsim.work import Collective


def point(operation: str, size_bytes: int, compute: float, communication: float) -> OverlapPoint:
    return OverlapPoint(
        operation=operation,
        group_size=2,
        size_bytes=size_bytes,
        compute_factor=compute,
        communication_factor=communication,
        repeats=5,
        source="x",
    )


MEASURED = Overlap(
    compute_factor=2.0,
    communication_factor=3.0,
    points=[point("all_reduce", 100, 1.2, 4.0), point("all_reduce", 10_000, 2.2, 2.0), point("all_gather", 100, 1.1, 1.0)],
    source="x",
)


def reduce(size_bytes: int, operation: str = "all_reduce") -> Collective:
    return Collective(operation=operation, group=(0, 1), size_bytes=size_bytes)


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=200))
def test_no_slowdown_stays_none(seconds: list[float]) -> None:
    """A mean of ones can round to less than one, which no engine takes."""
    found = overlap_of(MEASURED, [reduce(100, "all_gather")] * len(seconds), seconds)
    assert found.communication == pytest.approx(1.0)
    assert found.communication >= 1.0
