"""The metrics of DBench against their definitions, and ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from parsim.errors import AlgorithmError
from parsim.relaxed.dbench import METRICS, VarianceProfile, gini, mean_ranks

positive = arrays(np.float64, st.integers(1, 20), elements=st.floats(0.01, 100))


@given(positive)
def test_gini_is_the_mean_absolute_difference(values: np.ndarray) -> None:
    n = len(values)
    double_sum = np.abs(values[:, None] - values[None, :]).sum() / (2 * n * n * values.mean())
    assert gini(values) == pytest.approx(double_sum, abs=1e-12)
    assert -1e-12 <= gini(values) <= (n - 1) / n
    assert gini(7 * values) == pytest.approx(gini(values), abs=1e-12), "no unit"


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_extremes(n: int) -> None:
    one_hot = np.eye(n)[0]
    assert gini(one_hot) == pytest.approx((n - 1) / n)
    for name, metric in METRICS.items():
        assert metric(np.full(n, 3.0)) == pytest.approx(0.0, abs=1e-15), name
        assert metric(np.zeros(n)) == 0.0, name


def test_definitions_on_one_to_eight() -> None:
    values = np.arange(1.0, 9.0)
    assert METRICS["dispersion_index"](values) == pytest.approx(5.25 / 4.5)
    assert METRICS["coefficient_of_variation"](values) == pytest.approx(5.25**0.5 / 4.5)
    assert METRICS["quartile_coefficient"](values) == pytest.approx((6.25 - 2.75) / 9.0)


@given(st.integers(2, 8), st.integers(1, 4), st.integers(0, 99))
def test_metrics_go_tensor_by_tensor(n: int, tensors: int, seed: int) -> None:
    values = np.random.default_rng(seed).random((n, tensors)) + 0.1
    for metric in METRICS.values():
        assert metric(values) == pytest.approx([float(metric(values[:, place])) for place in range(tensors)], abs=1e-12)


def test_norms_can_agree_where_vectors_differ() -> None:
    parameters = np.eye(4)
    assert gini(np.linalg.norm(parameters, axis=1)) == pytest.approx(0.0)


def profile(spread: float) -> VarianceProfile:
    norms = np.ones((3, 4, 2))
    norms[:, 0] += spread * np.array([[1.0], [2.0], [3.0]])
    return VarianceProfile(
        tensors=("a", "b"),
        rounds=np.arange(3),
        norms=norms,
        consensus=np.full(3, spread),
        consensus_after=np.zeros(3),
    )


def test_graphs_are_ranked_by_their_spread() -> None:
    profiles = {"ring": profile(0.5), "complete": profile(0.0), "exponential": profile(0.1)}
    for metric in ("consensus", "gini", "coefficient_of_variation", "dispersion_index", "quartile_coefficient"):
        assert mean_ranks(profiles, metric) == {"ring": 3.0, "complete": 1.0, "exponential": 2.0}, metric
    tied = mean_ranks({"a": profile(0.5), "b": profile(0.5), "c": profile(0.0)}, "consensus")
    assert tied == {"a": 2.5, "b": 2.5, "c": 1.0}


def test_bad_questions() -> None:
    with pytest.raises(AlgorithmError, match="unknown metric 'variance'; known: consensus, coefficient_of_variation"):
        profile(0.1).metric("variance")
    other = VarianceProfile(
        tensors=("a",), rounds=np.arange(1), norms=np.ones((1, 4, 1)), consensus=np.ones(1), consensus_after=np.ones(1)
    )
    with pytest.raises(AlgorithmError, match="same rounds and tensors"):
        mean_ranks({"a": profile(0.1), "b": other}, "gini")
