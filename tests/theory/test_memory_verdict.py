"""The memory verdict as a probability: a distribution function in the capacity, its inverse, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.devices import Allocator, Spread
from parsim.predict.evaluate import evaluate
from parsim.predict.memory import FIT_PROBABILITY, SAFE_PROBABILITY, RankMemory, bytes_at, fit_probability, verdict_text
from parsim.predict.problem import PlanningProblem
from parsim.search.families import FAMILIES
from parsim.search.search import search
from tests.models import chain_model

SIZES = st.integers(0, 2**40)


@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_the_probability_is_a_distribution_function(one: int, two: int, three: int, four: int, five: int) -> None:
    low, median, high = sorted((one, two, three))
    less, more = sorted((four, five))
    before, after = (fit_probability(low, median, high, limit) for limit in (less, more))
    assert 0 <= before <= after <= 1
    assert (after >= FIT_PROBABILITY) == (median <= more)
    assert (after >= SAFE_PROBABILITY) == (high <= more)
    assert fit_probability(low, median, high, high) >= SAFE_PROBABILITY
    if low < median < high:
        assert fit_probability(low, median, high, median) == 0.5
        assert fit_probability(low, median, high, low) == pytest.approx(1 - SAFE_PROBABILITY)


@given(SIZES, SIZES, SIZES, st.floats(0.5, 0.999), st.floats(0.5, 0.999))
def test_what_a_probability_needs_is_the_least_that_has_it(one: int, two: int, three: int, less: float, more: float) -> None:
    low, median, high = sorted((one, two, three))
    less, more = sorted((less, more))
    needed = bytes_at(low, median, high, less)
    assert fit_probability(low, median, high, needed) >= less - 1e-9
    assert median <= needed <= bytes_at(low, median, high, more)
    if median < needed:
        assert fit_probability(low, median, high, needed - 2) < less
    assert bytes_at(low, median, high, SAFE_PROBABILITY) == high


def test_without_a_spread_the_verdict_is_certain() -> None:
    assert fit_probability(9, 9, 9, 9) == 1.0
    assert fit_probability(9, 9, 9, 8) == 0.0
    assert fit_probability(5, 9, 9, 9) == 1.0, "no spread above the median"
    assert 0 < fit_probability(5, 9, 9, 8) < 0.5


def test_a_rank_fits_by_its_probability_and_says_so_where_it_is_in_doubt() -> None:
    rank = RankMemory(
        rank=1, lines=(("activations", 900), ("allocator", 100)), limit_bytes=1030, spreads=(("allocator", 50, 150),)
    )
    assert (rank.low_bytes, rank.total_bytes, rank.high_bytes) == (950, 1000, 1050)
    assert 0.8 < rank.fit_probability < SAFE_PROBABILITY
    assert (rank.fits, rank.is_safe, rank.excess_bytes) == (True, False, 0)
    assert "(it fits with a probability of only 84%)" in rank.describe()
    careful = replace(rank, wanted_probability=0.95)
    assert (careful.fits, careful.needed_bytes, careful.excess_bytes) == (False, 1050, 20)
    assert "20 B too much; it fits with a probability of 84%" in careful.describe()
    safe = replace(careful, limit_bytes=1050)
    assert (safe.fits, safe.is_safe) == (True, True)
    assert "probability" not in safe.describe()
    over = replace(rank, limit_bytes=999)
    assert not over.fits
    assert replace(rank, limit_bytes=500).describe().count("probability") == 0


def test_tables_show_the_probability_only_where_it_is_in_doubt() -> None:
    assert [verdict_text(True, 1.0), verdict_text(True, 0.97), verdict_text(False, 0.4), verdict_text(False, 0.0)] == [
        "yes",
        "yes (97%)",
        "NO (40%)",
        "NO",
    ]


# --- plans made to miss the limit by 5% -------------------------------------------------------------------------------

MEASURED = Allocator(library_bytes=Spread(98 * 2**20, 100 * 2**20, 102 * 2**20), lost_share=Spread(0.0, 0.01, 0.02))
"""As a calibration leaves it on one machine: p95 within 5% of the peak."""


def machine(memory_bytes: int) -> Cluster:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), 4)
    types = replace(cluster.devices[0].type, memory_bytes=memory_bytes, allocator=MEASURED)
    return replace(cluster, devices=tuple(replace(device, type=types) for device in cluster.devices))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_5_percent_too_much_is_refused_and_5_percent_less_is_not(family: str, zero_stage: int) -> None:
    model = chain_model((4e9, 2e9, 6e9, 2e9, 2e9, 4e9), elements=20_000_000)
    roomy = PlanningProblem(model=model, cluster=machine(2**40), global_batch=64, zero_stage=zero_stage)
    for plan in list(FAMILIES[family](roomy))[:4]:
        peak = max(entry.total_bytes for entry in roomy.memory(plan))
        for capacity, fits in ((peak / 1.05, False), (peak * 1.05, True)):
            tight = PlanningProblem(model=model, cluster=machine(round(capacity)), global_batch=64, zero_stage=zero_stage)
            result = evaluate(tight, plan, samples=0).result
            assert result.fits == fits, (family, plan.summary())
            assert (result.fit_probability >= FIT_PROBABILITY) == fits
            assert result.to_dict()["fit_probability"] == result.fit_probability


def test_the_search_refuses_the_one_and_takes_the_other() -> None:
    model = chain_model((4e9, 2e9), elements=20_000_000)
    roomy = PlanningProblem(model=model, cluster=machine(2**40), global_batch=64)
    found = search(roomy, ("single",), samples=0).chosen
    assert found is not None
    peak = max(found.result.peak_memory_bytes)
    for capacity, fits in ((peak / 1.05, False), (peak * 1.05, True)):
        tight = PlanningProblem(model=model, cluster=machine(round(capacity)), global_batch=64)
        chosen = [
            entry.result
            for entry in search(tight, ("single",), samples=0).candidates
            if entry.result.plan.microbatches == found.result.plan.microbatches
        ]
        assert all(entry.fits == fits for entry in chosen)
