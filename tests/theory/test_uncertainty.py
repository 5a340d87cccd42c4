"""Draws of durations against the distributions they are meant to have."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import parsim as ps
from parsim.costs.adjustments import PUBLISHED_GPUS, SLOWEST, expected_maximum
from parsim.costs.estimate import STEPS_AVERAGED, Estimate, medians_s, rank_noise, sample_durations_s
from parsim.work import Compute


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


# A synchronous step waits for its slowest GPU: the expected maximum of as many draws, once, whatever the mesh.


@pytest.mark.parametrize("draws", [1, 2, 8, 64, 512, 4096])
def test_the_expected_maximum_of_normals(draws: int) -> None:
    """Against the integral of x d(N(x)^n)."""
    x = np.linspace(-9, 9, 200_001)
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x]) ** draws
    exact = float(np.sum((x[1:] + x[:-1]) / 2 * np.diff(below)))
    assert expected_maximum(draws) == pytest.approx(exact, rel=0.05, abs=1e-6)


def simulated(gpus: int, mesh: dict[str, int], layers: int) -> ps.Prediction:
    keys: dict[str, Any] = {
        "plan.strategy": "custom",
        "plan.mesh": mesh,
        "model.args": {"layers": layers},
        "plan.microbatches": 1,
    }
    if gpus > 8:
        keys["cluster.network"] = "infiniband-400g"
    return ps.simulate("gpt3-1.3b", cluster=f"{gpus}xh100-sxm", global_batch=8 * gpus, settings=keys)


def slowest(gpus: int) -> float:
    """Relative to that of the runs by which prices of transformers are corrected."""
    return (1 + 0.015 * expected_maximum(gpus)) / (1 + 0.015 * expected_maximum(PUBLISHED_GPUS))


def computing_s(chosen: ps.Prediction) -> list[float]:
    units = zip(chosen.evaluation.compiled.columns.units, chosen.evaluation.estimates, strict=True)
    return [estimate.median_s for unit, estimate in units if isinstance(unit.work, Compute)]


def test_efficiency_falls_with_the_gpus_and_the_price_says_why() -> None:
    """The same samples per GPU: computation takes longer by the slowest of more GPUs, and is less certain by as much."""
    alone = simulated(1, {"dp": 1}, layers=2)
    for gpus in (8, 128):
        chosen = simulated(gpus, {"dp": gpus}, layers=2)
        factor = slowest(gpus)
        spread = {sigma for estimate in chosen.evaluation.estimates for name, sigma in estimate.parameters if name == SLOWEST}
        assert spread == {abs(factor - 1) / 2}
        assert SLOWEST in str(chosen.explain())
        assert max(computing_s(chosen)) == pytest.approx(max(computing_s(alone)) * factor / slowest(1))


def test_a_mesh_sees_it_once() -> None:
    """Tensor and pipeline ranks wait for the same GPU as replicas do."""
    for mesh in ({"tp": 8}, {"pp": 8}, {"dp": 8}, {"pp": 2, "dp": 2, "tp": 2}):
        terms = [term for estimate in simulated(8, mesh, layers=8).evaluation.estimates for term in estimate.terms]
        assert {term.value for term in terms if term.name == SLOWEST} == {slowest(8)}


def test_other_models_have_all_of_it() -> None:
    """Published runs correct no convolution of the user's: one GPU waits for no other."""
    for gpus in (1, 8):
        keys = {"plan.strategy": "dp" if gpus > 1 else "single"}
        chosen = ps.plan("resnet_small", cluster=f"{gpus}xh100-sxm", global_batch=64, settings=keys).chosen
        terms = [term for estimate in chosen.evaluation.estimates for term in estimate.terms]
        factors = {term.value for term in terms if term.name == SLOWEST}
        assert factors == ({1 + 0.015 * expected_maximum(8)} if gpus > 1 else set())
