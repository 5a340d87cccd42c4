"""The best checkpoint interval: Young's and Daly's where their assumptions hold, another where they do not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from parsim.engines.scenario import FailureAt, Failures, Run
from parsim.engines.whole_run import (
    IntervalTimes,
    Training,
    daly_interval_s,
    expected_run_s,
    interval_times,
    machine_mtbf_s,
    one_draw_many_times,
    young_interval_s,
)
from parsim.errors import ScenarioError

RUN = Run(samples_per_epoch=1)


def simulated(
    intervals_s: list[float], work_s: int, write_s: float, failures: Failures, *, draws: int = 400, ranks: int = 8
) -> IntervalTimes:
    """Steps of 1 s, no evaluation, no epochs but one."""
    training = one_draw_many_times(Training(step_s=np.ones((1, 1)), ranks=ranks), draws)
    return interval_times(
        intervals_s, run=RUN, training=training, failures=failures, steps_per_epoch=work_s, write_s=write_s, seed=5
    )


def around(interval_s: float) -> list[float]:
    """A factor of 8 to both sides, two candidates per doubling."""
    return [interval_s * 2 ** (power / 2) for power in range(-6, 7)]


@pytest.mark.parametrize("ratio", [1e-4, 1e-3, 1e-2, 0.1])
def test_dalys_interval_is_the_formulas_own_optimum(ratio: float) -> None:
    """Against the exact expected time, minimised numerically: within 0.1% for d/M up to 0.1, Young's within sqrt(d/2M)."""
    mtbf_s = 1e5
    write_s = ratio * mtbf_s
    best = minimize_scalar(
        lambda x: math.log(expected_run_s(1.0, math.exp(x), write_s, 0.0, mtbf_s)), bounds=(0.0, 14.0), method="bounded"
    )
    exact = math.exp(best.x)
    assert daly_interval_s(write_s, mtbf_s) == pytest.approx(exact, rel=1e-3)
    assert young_interval_s(write_s, mtbf_s) == pytest.approx(exact, rel=math.sqrt(ratio / 2))


@pytest.mark.slow
def test_where_the_assumptions_hold_simulation_finds_the_formulas_interval() -> None:
    """d/M = 1/500, exponential failures of 8 parts, a run of 40 M: both formulas within 15%, and no more than 0.3% slower."""
    write_s, mtbf_s = 20.0, 10_000.0
    failures = Failures(rank_mtbf_s=8 * mtbf_s, restart_s=300.0)
    assert machine_mtbf_s(failures, 8, 1) == pytest.approx(mtbf_s)
    young, daly = young_interval_s(write_s, mtbf_s), daly_interval_s(write_s, mtbf_s)
    found = simulated(around(young), 400_000, write_s, failures)
    for formula in (young, daly):
        assert found.best_interval_s == pytest.approx(formula, rel=0.15)
        near = int(np.abs(np.log(found.interval_s / formula)).argmin())
        assert found.mean_s[near] <= found.mean_s.min() * 1.003
    wanted = [expected_run_s(400_000, interval, write_s, 300.0, mtbf_s) for interval in found.interval_s]
    np.testing.assert_allclose(found.mean_s, wanted, rtol=0.02)


def test_a_checkpoint_that_takes_as_long_as_the_machine_holds_needs_dalys_higher_order() -> None:
    """d/M = 1/2: Young's first order takes sqrt(2 d M) = M, far beyond the optimum 0.68 M, which Daly's formula finds."""
    write_s, mtbf_s = 500.0, 1000.0
    young, daly = young_interval_s(write_s, mtbf_s), daly_interval_s(write_s, mtbf_s)
    near = [daly * 2 ** (power / 3) for power in range(-3, 4)]
    found = simulated(near, 20_000, write_s, Failures(node_mtbf_s=mtbf_s), draws=400)
    assert found.best_interval_s == pytest.approx(daly, rel=0.1)
    assert young > 1.3 * found.best_interval_s


def test_failures_in_bursts_want_longer_intervals_but_hardly_punish_the_formulas() -> None:
    """One part with Weibull times of shape 0.3 and the same mean: more than half of its failures come within an interval of the
    last, when little is lost, so the best interval is longer. To first order only the rate of failures counts, though, and
    Young's interval costs next to nothing."""
    write_s, mtbf_s = 20.0, 10_000.0
    young = young_interval_s(write_s, mtbf_s)
    bursts = Failures(node_mtbf_s=mtbf_s, distribution="weibull", shape=0.3)
    found = simulated(around(1.5 * young), 400_000, write_s, bursts, draws=200)
    assert 1.1 * young < found.best_interval_s < 1.5 * young
    near = int(np.abs(np.log(found.interval_s / young)).argmin())
    assert found.mean_s[near] <= found.mean_s.min() * 1.003
    fails_within = 1 - math.exp(-((young / mtbf_s * math.gamma(1 + 1 / 0.3)) ** 0.3))
    assert fails_within > 0.5


def test_many_such_parts_together_are_as_the_formulas_assume() -> None:
    """512 of them, long in use: many rare processes together are nearly Poisson, so Young's interval is right again."""
    write_s, mtbf_s, parts = 20.0, 10_000.0, 512
    young = young_interval_s(write_s, mtbf_s)
    failures = Failures(rank_mtbf_s=parts * mtbf_s, distribution="weibull", shape=0.9)
    found = simulated(around(young), 400_000, write_s, failures, draws=150, ranks=parts)
    near = int(np.abs(np.log(found.interval_s / young)).argmin())
    assert found.mean_s[near] <= found.mean_s.min() * 1.005


def test_a_run_shorter_than_the_interval_wants_none_before_its_end() -> None:
    """Work of a twentieth of M: the formulas' interval is longer than the run, and all but the last checkpoint cost."""
    write_s, mtbf_s = 20.0, 10_000.0
    found = simulated([50.0, 100.0, 250.0, 500.0, 1000.0], 500, write_s, Failures(node_mtbf_s=mtbf_s), draws=2000)
    assert young_interval_s(write_s, mtbf_s) > 500
    assert found.interval_s[found.best] >= 500


def test_a_failure_at_a_known_time_wants_a_checkpoint_just_before() -> None:
    """A maintenance at 5,000 s of 10,000: writing once, at 4,900 s, loses least, whatever mean a formula is given."""
    failures = Failures(at=(FailureAt(at_s=5000.0, node=0),), restart_s=60.0)
    found = simulated([500.0, 1000.0, 2450.0, 3000.0, 4900.0, 6000.0], 10_000, 40.0, failures, draws=1)
    assert found.interval_s[found.best] == 4900.0
    young = young_interval_s(40.0, 10_000.0)
    assert young < 1000
    assert found.mean_s.min() < found.mean_s[1]


def test_bad_input() -> None:
    with pytest.raises(ScenarioError, match=r"write_s >= 0 and failures come mtbf_s > 0 apart, got -1.0 and 5.0"):
        young_interval_s(-1.0, 5.0)
    with pytest.raises(ScenarioError, match="at least one candidate"):
        simulated([], 10, 1.0, Failures())
    assert daly_interval_s(30.0, 10.0) == 10.0
    assert machine_mtbf_s(Failures(), 8, 1) == math.inf
