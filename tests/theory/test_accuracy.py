"""Summaries of errors, orders and choices against values worked out by hand, and their invariances."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.common.accuracy import accuracy, rank_correlation, regret
from parsim.errors import ConfigError

SECONDS = st.floats(1e-6, 1e3)
PAIRS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=30)


def test_by_hand() -> None:
    found = accuracy([1.1, 0.8, 1.0, 2.6], [1.0, 1.0, 1.0, 2.0])
    assert (found.cases, found.mean, found.worst) == (4, pytest.approx(0.15), pytest.approx(0.3))
    assert found.median == pytest.approx(0.15)
    assert found.bias == pytest.approx(0.05)
    assert found.p95 == pytest.approx(0.2 + 0.85 * 0.1)


def test_regret_by_hand() -> None:
    assert regret([1.0, 2.0, 3.0], [1.5, 1.2, 4.0]) == pytest.approx(0.25)
    assert regret([1.0, 2.0, 3.0], [1.5, 1.2, 4.0], floor=0.3) == 0.0
    assert regret([1.0, 2.0], [1.0, 1.0]) == 0.0


@given(PAIRS, st.floats(0.01, 100))
def test_units_do_not_matter(pairs: list[tuple[float, float]], scale: float) -> None:
    predicted, measured = zip(*pairs, strict=True)
    one, other = accuracy(predicted, measured), accuracy(np.multiply(predicted, scale), np.multiply(measured, scale))
    assert (one.mean, one.worst, one.bias) == pytest.approx((other.mean, other.worst, other.bias), rel=1e-6, abs=1e-9)
    assert one.median <= one.p95 + 1e-12 <= one.worst + 2e-12


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=20, unique=True), st.floats(0.1, 10))
def test_a_prediction_off_by_a_factor_chooses_and_orders_rightly(measured: list[int], factor: float) -> None:
    predicted = [factor * value for value in measured]
    assert regret(predicted, measured) == 0.0
    assert rank_correlation(predicted, measured) == pytest.approx(1.0)
    assert rank_correlation([-value for value in predicted], measured) == pytest.approx(-1.0)
    assert accuracy(predicted, measured).mean == pytest.approx(abs(factor - 1), rel=1e-6, abs=1e-9)


def test_no_order_is_not_a_number() -> None:
    assert math.isnan(rank_correlation([1.0], [1.0]))
    assert math.isnan(rank_correlation([1.0, 1.0], [1.0, 2.0]))


@pytest.mark.parametrize("measured", [[], [1.0, 2.0], [0.0], [math.nan]])
def test_what_was_not_measured_is_refused(measured: list[float]) -> None:
    with pytest.raises(ConfigError):
        accuracy([1.0], measured)
