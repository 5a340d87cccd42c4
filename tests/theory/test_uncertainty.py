"""Draws of durations against the distributions they are meant to have."""

from __future__ import annotations

import math

import numpy as np
import pytest

from parsim.costs.estimate import STEPS_AVERAGED, Estimate, medians_s, rank_noise, sample_durations_s


def estimate(median_s: float, *parameters: tuple[str, float], repeat: float = 0.0) -> Estimate:
    return Estimate(median_s=median_s, source="measured", parameters=parameters, repeat_sigma=repeat)


def test_tasks_that_rest_on_one_parameter_move_together() -> None:
    draws = sample_durations_s([estimate(1.0, ("a", 0.1)), estimate(3.0, ("a", 0.1)), estimate(1.0, ("b", 0.1))], 4000, 0)
    assert np.allclose(draws[:, 1], 3 * draws[:, 0])
    assert abs(np.corrcoef(draws[:, 0], draws[:, 2])[0, 1]) < 0.06
    assert np.std(np.log(draws[:, 0])) == pytest.approx(0.1, rel=0.05)
    assert np.median(draws[:, 0]) == pytest.approx(1.0, rel=0.01)


def test_repeat_noise_shrinks_with_the_steps_averaged() -> None:
    draws, again = (sample_durations_s([estimate(2.0, repeat=0.2)], 4000, 1) for _ in range(2))
    assert np.array_equal(draws, again), "the same seed"
    assert np.std(np.log(draws)) == pytest.approx(0.2 / STEPS_AVERAGED**0.5, rel=0.05)


def test_without_uncertainty_every_draw_is_the_median() -> None:
    estimates = [estimate(1.0), estimate(0.0)]
    assert np.array_equal(sample_durations_s(estimates, 3, 0), np.tile(medians_s(estimates), (3, 1)))


def test_rank_noise_has_mean_one_and_the_maximum_of_two_is_the_order_statistic() -> None:
    """E max of two independent N(0, s) is s / sqrt(pi)."""
    sigma = 0.05
    factors = rank_noise(np.array([0, 0, 1, -1]), sigma, 40_000, 0)
    assert np.array_equal(factors[:, 0], factors[:, 1])
    assert np.all(factors[:, 3] == 1)
    assert factors[:, 0].mean() == pytest.approx(1.0, abs=4 * sigma / math.sqrt(40_000))  # four standard errors
    slowest = np.maximum(factors[:, 0], factors[:, 2]).mean()
    assert slowest == pytest.approx(1 + sigma / math.sqrt(math.pi), abs=0.002)


def test_a_parameter_that_is_named_twice_counts_with_both_spreads() -> None:
    once, twice = (sample_durations_s([estimate(1.0, *names)], 200, 0) for names in ([("a", 0.3)], [("a", 0.1), ("a", 0.2)]))
    assert np.allclose(once, twice, rtol=1e-12)
