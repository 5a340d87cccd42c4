"""Uneven stages against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from parsim.errors import ScheduleError
from parsim.search.space import INFINITE, partition


def brute_force(times: list[list[float]], limits: list[int], stages: int) -> float:
    """The least slowest stage over all cuts; `times[stage][i]`, at most `limits[stage]` components per stage."""
    count = len(times[0])
    best = INFINITE
    for cuts in itertools.combinations(range(1, count), stages - 1):
        bounds = list(itertools.pairwise((0, *cuts, count)))
        if any(last - first > limits[stage] for stage, (first, last) in enumerate(bounds)):
            continue
        best = min(best, max(sum(times[stage][first:last]) for stage, (first, last) in enumerate(bounds)))
    return best


def table(count: int, stage_s: Callable[[int, int, int], float]) -> Callable[[int], NDArray[np.float64]]:
    """As `partition` asks for it: all runs of components of a stage at once."""
    return lambda stage: np.array(
        [[stage_s(stage, first, last) if first < last else INFINITE for first in range(count + 1)] for last in range(count + 1)]
    )


@settings(max_examples=60)
@given(data=st.data())
def test_equals_brute_force_with_unequal_devices_and_memory_limits(data: st.DataObject) -> None:
    check_against_brute_force(data)


@pytest.mark.slow
@settings(max_examples=500)
@given(data=st.data())
def test_equals_brute_force_on_many(data: st.DataObject) -> None:
    check_against_brute_force(data)


def check_against_brute_force(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    stages = data.draw(st.integers(1, count))
    times = [[data.draw(st.integers(0, 20)) / 4 for _ in range(count)] for _ in range(stages)]
    limits = [data.draw(st.integers(1, count)) for _ in range(stages)]

    def stage_s(stage: int, first: int, last: int) -> float:
        return sum(times[stage][first:last]) if last - first <= limits[stage] else INFINITE

    expected = brute_force(times, limits, stages)
    if expected == INFINITE:
        with pytest.raises(ScheduleError, match="memory"):
            partition(count, stages, table(count, stage_s), [0.0] * count)
        return
    bounds = partition(count, stages, table(count, stage_s), [0.0] * count)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))
    assert max(stage_s(stage, first, last) for stage, (first, last) in enumerate(bounds)) == expected


def test_equal_cuts_go_where_less_is_sent() -> None:
    """Four equal components in two stages of at most three: every cut but the middle is slower; ties go by transfer."""
    times = [1.0, 0.0, 0.0, 1.0]
    bounds = partition(4, 2, table(4, lambda _, first, last: sum(times[first:last])), [0.0, 5.0, 1.0, 5.0])
    assert bounds == ((0, 2), (2, 4))


def test_more_stages_than_components() -> None:
    with pytest.raises(ScheduleError, match="at most 2 stages"):
        partition(2, 3, table(2, lambda *_: 1.0), [0.0, 0.0])
