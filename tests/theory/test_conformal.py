"""Split-conformal intervals against what theory promises: coverage whatever the distribution, exactness of the quantile."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binomtest

from parsim.costs.history import (
    LEAST_HALF_WIDTH,
    ConformalCorrection,
    ValidationRecord,
    clopper_pearson,
    conformal_quantile,
    correction,
    coverage_by,
    coverage_split,
    judged_split,
    records_needed,
    score,
)
from parsim.errors import CostError

TRIALS = 20_000


def record(
    measured_s: float, *, model: str = "mlp", run: str = "a", half_width: float = 0.1, median_s: float = 1.0
) -> ValidationRecord:
    low_s, high_s = median_s * math.exp(-half_width), median_s * math.exp(half_width)
    return ValidationRecord(model=model, run=run, predicted_s=median_s, low_s=low_s, high_s=high_s, measured_s=measured_s)


def noisy_records(
    rng: np.random.Generator, count: int, sigma: float, *, models: int = 5, runs: int = 5
) -> list[ValidationRecord]:
    """Measured values `sigma` around medians whose intervals of various widths claim 0.1 / 1.645."""
    return [
        record(
            median * math.exp(width * sigma * rng.standard_normal()),
            model=f"model {rng.integers(models)}",
            run=f"run {rng.integers(runs)}",
            half_width=width,
            median_s=median,
        )
        for median, width in zip(rng.uniform(0.01, 10, count), rng.uniform(0.02, 0.4, count), strict=True)
    ]


@pytest.mark.parametrize("count", [9, 10, 19, 20, 29, 50, 99, 200])
@pytest.mark.parametrize("draw", ["normal", "cauchy", "lognormal"])
def test_coverage_is_exactly_what_exchangeability_promises(count: int, draw: str) -> None:
    """P(new score <= q) = ceil(0.9 (n + 1)) / (n + 1) for continuous scores of any distribution."""
    rng = np.random.default_rng(count)
    scores = np.abs(
        {"normal": rng.normal, "cauchy": rng.standard_cauchy, "lognormal": rng.lognormal}[draw](size=(TRIALS, count + 1))
    )
    rank = -(-9 * (count + 1) // 10)
    quantiles = np.sort(scores[:, :count], axis=1)[:, rank - 1]
    known = conformal_quantile(scores[0, :count].tolist())
    assert known == quantiles[0]
    covered = int((scores[:, count] <= quantiles).sum())
    low, high = binomtest(covered, TRIALS).proportion_ci(confidence_level=0.9999, method="exact")
    assert low <= rank / (count + 1) <= high


@pytest.mark.parametrize("count", [9, 12, 30, 100])
@pytest.mark.parametrize("sigma", [0.2, 3.0])
def test_corrected_intervals_cover_new_records(count: int, sigma: float) -> None:
    """End to end, records to interval, where intervals as predicted are far too wide or far too narrow."""
    rng, trials = np.random.default_rng(count), 1_500
    covered = 0
    for _ in range(trials):
        *history, new = noisy_records(rng, count + 1, sigma)
        low_s, high_s = correction(history).apply(new.predicted_s, new.low_s, new.high_s)
        covered += low_s <= new.measured_s <= high_s
    low, high = binomtest(covered, trials).proportion_ci(confidence_level=0.9999, method="exact")
    assert low <= math.ceil(0.9 * (count + 1) - 1e-9) / (count + 1) <= high


@given(st.lists(st.floats(0, 1e6), min_size=0, max_size=300), st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99]))
def test_quantile_is_the_smallest_that_holds_enough(scores: list[float], level: float) -> None:
    """At least (n + 1) * level scores lie at or below q, and fewer lie below it: with ties too."""
    quantile = conformal_quantile(scores, level)
    needed = math.ceil(round((len(scores) + 1) * level, 9))
    if quantile is None:
        assert needed > len(scores)
        return
    assert sum(value <= quantile for value in scores) >= needed
    assert sum(value < quantile for value in scores) < needed


def test_nine_records_are_the_fewest() -> None:
    assert records_needed() == 9
    assert correction([record(1.2)] * 8) == ConformalCorrection(factor=None, records=8)
    assert correction([record(1.2)] * 9).factor == pytest.approx(math.log(1.2) / 0.1)
    assert correction([]).describe() == "not corrected: 0 of the 9 validations needed"
    assert ConformalCorrection(factor=1.416, records=37).describe() == "x1.42 from 37 validations"
    assert ConformalCorrection(records=3).apply(2.0, 1.5, 2.5) == (1.5, 2.5)


@given(st.floats(0, 500), st.floats(0, 500), st.floats(1e-6, 1e3), st.floats(0, 2), st.floats(0, 2))
def test_intervals_grow_with_the_factor_and_hold_the_median(
    first: float, second: float, median_s: float, below: float, above: float
) -> None:
    low_s, high_s = median_s * math.exp(-below), median_s * math.exp(above)
    narrow = ConformalCorrection(factor=min(first, second), records=9).apply(median_s, low_s, high_s)
    wide = ConformalCorrection(factor=max(first, second), records=9).apply(median_s, low_s, high_s)
    assert 0 < wide[0] <= narrow[0] <= median_s <= narrow[1] <= wide[1] < math.inf


@given(st.lists(st.floats(0.2, 5.0), min_size=9, max_size=40), st.floats(0.01, 1.0))
def test_corrected_intervals_of_the_records_themselves_hold_ninety_percent(measured: list[float], half_width: float) -> None:
    records = [record(value, half_width=half_width) for value in measured]
    learnt = correction(records)
    low_s, high_s = learnt.apply(1.0, records[0].low_s, records[0].high_s)
    slack = 1e-9
    assert sum(low_s * (1 - slack) <= value <= high_s * (1 + slack) for value in measured) >= 0.9 * len(measured)


def test_each_side_is_judged_by_its_own_half_width() -> None:
    lopsided = ValidationRecord(model="m", run="r", predicted_s=1.0, low_s=0.5, high_s=1.1, measured_s=1.21)
    assert score(lopsided) == pytest.approx(2.0)
    assert score(replace(lopsided, measured_s=0.25)) == pytest.approx(2.0)
    assert score(replace(lopsided, measured_s=1.0)) == 0.0


def test_an_interval_without_width_is_taken_for_half_a_percent() -> None:
    sure = ValidationRecord(model="m", run="r", predicted_s=1.0, low_s=1.0, high_s=1.0, measured_s=1.1)
    assert score(sure) == pytest.approx(math.log(1.1) / LEAST_HALF_WIDTH)
    assert ConformalCorrection(factor=2.0, records=9).apply(1.0, 1.0, 1.0)[1] == pytest.approx(math.exp(2 * LEAST_HALF_WIDTH))


def test_a_constant_score_is_the_factor() -> None:
    """The measured value always at the same place: the corrected interval ends right there, and holds it."""
    same = correction([record(1.3)] * 20)
    assert same.apply(1.0, math.exp(-0.1), math.exp(0.1))[1] == pytest.approx(1.3)


@pytest.mark.parametrize("values", [(1, 0.9, 1.1, math.nan), (0, 0.9, 1.1, 1), (1, 1.2, 1.3, 1), (1, 0.9, math.inf, 1)])
def test_numbers_that_are_none_are_refused(values: tuple[float, float, float, float]) -> None:
    predicted_s, low_s, high_s, measured_s = values
    with pytest.raises(CostError, match="a record needs"):
        ValidationRecord(model="m", run="r", predicted_s=predicted_s, low_s=low_s, high_s=high_s, measured_s=measured_s)


@pytest.mark.parametrize(("successes", "trials"), [(0, 5), (5, 5), (180, 200), (1, 3)])
def test_clopper_pearson_is_the_beta_quantile(successes: int, trials: int) -> None:
    low, high = clopper_pearson(successes, trials)
    assert low == pytest.approx(0 if successes == 0 else beta.ppf(0.025, successes, trials - successes + 1))
    assert high == pytest.approx(1 if successes == trials else beta.ppf(0.975, successes + 1, trials - successes))
    with pytest.raises(CostError, match="successes <= trials"):
        clopper_pearson(trials + 1, trials)


def test_the_split_learns_from_other_runs_and_other_models_only() -> None:
    """Model a is always 50% off; no record of it may widen its own interval, so none of them is covered."""
    easy = [record(1.02, model=f"m{number % 4}", run=f"r{number % 5}") for number in range(40)]
    odd = [record(1.5, model="odd", run=f"r{number}") for number in range(5)]
    rows = judged_split([*easy, *odd])
    assert [row.covered for row in rows] == [True] * 40 + [False] * 5
    assert all(row.correction.records == 32 for row in rows[40:])
    by_model = coverage_by(rows, lambda row: row.model)
    assert by_model["odd"].fraction == 0
    assert by_model["m0"].fraction == 1


def test_split_coverage_beside_what_was_predicted() -> None:
    records = noisy_records(np.random.default_rng(3), 300, 3.0)
    seen = coverage_split(records)
    assert (seen.tested, seen.corrected) == (300, 300)
    assert seen.low <= seen.fraction == seen.covered / seen.tested <= seen.high
    assert seen.low <= 0.9 <= seen.high
    assert not seen.stale
    assert seen.uncorrected_fraction < 0.5
    assert seen.mean_width > 2 * seen.uncorrected_mean_width


def test_stale_only_when_the_share_is_wholly_outside() -> None:
    """Too few records for a correction are judged as predicted, and prove nothing quickly."""
    missed = [record(1.5, model=f"m{number}", run=f"r{number}") for number in range(8)]
    assert coverage_split(missed[:1]).stale is False  # 0 of 1: anything below 97.5% is possible
    assert coverage_split(missed).stale
    assert coverage_split(missed).corrected == 0
    with pytest.raises(CostError, match="at least one record"):
        coverage_split([])
