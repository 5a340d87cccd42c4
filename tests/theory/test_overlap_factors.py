"""One pair of factors for a program: by size on lines between measured points, the mean over what it sends by time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.costs.communication.closed_forms import factors_at, overlap_of
from parsim.hardware.profile import Overlap, OverlapPoint
from parsim.work import Collective, Compute, Phase, SendRecv


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


def held(factor: float) -> float:
    """The share of the time in which computation stands still."""
    return 1 - 1 / factor


def reduce(size_bytes: int, operation: str = "all_reduce") -> Collective:
    return Collective(operation=operation, group=(0, 1), size_bytes=size_bytes)


def test_sizes_between_points_lie_on_a_line_of_logarithms_and_outside_on_the_nearest() -> None:
    between = 1 / (1 - (held(1.2) + held(2.2)) / 2)
    assert factors_at(MEASURED, "all_reduce", 1000) == pytest.approx((between, 3.0))
    assert factors_at(MEASURED, "all_reduce", 1) == pytest.approx((1.2, 4.0))
    assert factors_at(MEASURED, "all_reduce", 10**9) == pytest.approx((2.2, 2.0))
    assert factors_at(MEASURED, "all_gather", 10**9) == pytest.approx((1.1, 1.0))
    assert factors_at(MEASURED, "send_recv", 1000) == pytest.approx((between, 3.0)), "as all_reduce, where it was not measured"


def test_a_program_has_the_mean_by_time_of_what_it_sends() -> None:
    works = [
        Compute(component="c", phase=Phase.FORWARD, samples=1),
        reduce(100),
        reduce(10_000),
        SendRecv(source=0, destination=1, size_bytes=1),
    ]
    found = overlap_of(MEASURED, works, [100.0, 3.0, 1.0, 0.0])
    expected = 1 / (1 - (3 * held(1.2) + held(2.2)) / 4)
    assert (found.compute, found.communication) == pytest.approx((expected, (3 * 4.0 + 2.0) / 4))
    nothing = overlap_of(MEASURED, works[:1], [100.0])
    assert (nothing.compute, nothing.communication) == (2.0, 3.0)


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=200))
def test_no_slowdown_stays_none(seconds: list[float]) -> None:
    """A mean of ones can round to less than one, which no engine takes."""
    found = overlap_of(MEASURED, [reduce(100, "all_gather")] * len(seconds), seconds)
    assert found.communication == pytest.approx(1.0)
    assert found.communication >= 1.0
