"""Split-conformal intervals against what theory promises: coverage whatever the distribution, exactness of the quantile."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binomtest

from experiments.common.accuracy import accuracy, rank_correlation, regret
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
from parsim.costs.observed import task_durations_s
from parsim.errors import ConfigError, CostError, GraphError, ParsimError
from parsim.predict.compare import aa_floor, compare, drift, kind_intervals_s, relative_error
from parsim.predict.result import Interval
from parsim.program.taskgraph import COMPUTE, Origin, Resource, Task, TaskGraph
from parsim.timeline import Span, Timeline
from parsim.work import Collective, Compute, Phase

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


# Summaries of errors, orders and choices against values worked out by hand, and their invariances.

ANY_SECONDS = st.floats(1e-6, 1e3)
PAIRS = st.lists(st.tuples(ANY_SECONDS, ANY_SECONDS), min_size=1, max_size=30)


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


# Comparison of a predicted with a measured timeline: exact cases, invariants, and the noise floor against its theory.

SECONDS = st.floats(1e-3, 1e3)


def graph_of(forwards: int) -> TaskGraph:
    """`forwards` components on rank 0 and as many backwards on rank 1, then one all_reduce over both."""
    tasks = [
        Task(
            index=number,
            work=Compute(component=f"c{number % forwards}", phase=phase, samples=4),
            resources=(Resource(rank, COMPUTE),),
            dependencies=(),
            origin=Origin(stage=0, component=f"c{number % forwards}"),
        )
        for number, (phase, rank) in enumerate([(Phase.FORWARD, 0)] * forwards + [(Phase.BACKWARD, 1)] * forwards)
    ]
    reduce = Task(
        index=2 * forwards,
        work=Collective(operation="all_reduce", group=(0, 1), size_bytes=1024),
        resources=(Resource(0, "dp"), Resource(1, "dp")),
        dependencies=tuple(range(2 * forwards)),
        origin=Origin(stage=0, bucket=0),
    )
    return TaskGraph(tasks=(*tasks, reduce), world_size=2)


def timeline_of(graph: TaskGraph, seconds: Sequence[float], wait_s: float = 0.0) -> Timeline:
    """Tasks one after another; of a task on two ranks the second starts `wait_s` later, when it really begins."""
    spans, now = [], 0.0
    for task, duration in zip(graph.tasks, seconds, strict=True):
        begin = now + (wait_s if len(task.resources) > 1 else 0.0)
        for place, resource in enumerate(task.resources):
            spans.append(Span(task.index, str(resource), begin if place else now, begin + duration))
        now = begin + duration
    return Timeline.from_spans(spans, "measured" if wait_s else "simulated")


@given(st.lists(SECONDS, min_size=5, max_size=5))
def test_a_timeline_agrees_with_itself(seconds: list[float]) -> None:
    graph = graph_of(2)
    timeline = timeline_of(graph, seconds)
    found = compare(graph, timeline, timeline)
    assert found.step.relative_error == 0
    assert all(row.relative_error == 0 for row in found.tasks)
    assert all(row.relative_error == 0 and row.median_absolute_relative_error == 0 for row in found.kinds)
    assert sum(row.count for row in found.kinds) == len(graph.tasks)


@given(st.lists(SECONDS, min_size=5, max_size=5), st.floats(0.1, 10))
def test_a_prediction_scaled_by_k_is_off_by_k_minus_1_everywhere(seconds: list[float], factor: float) -> None:
    graph = graph_of(2)
    found = compare(graph, timeline_of(graph, [factor * value for value in seconds]), timeline_of(graph, seconds))
    errors = [
        found.step.relative_error,
        *(row.relative_error for row in found.tasks),
        *(row.relative_error for row in found.kinds),
    ]
    assert errors == pytest.approx([factor - 1] * len(errors), rel=1e-6, abs=1e-6)


def test_a_collective_runs_from_the_common_start_to_the_latest_end() -> None:
    graph = graph_of(1)
    late = timeline_of(graph, [1.0, 1.0, 0.5], wait_s=7.0)
    assert task_durations_s(len(graph.tasks), late, complete=True) == pytest.approx([1.0, 1.0, 0.5])
    assert late.makespan_s == pytest.approx(9.5)


def test_tasks_compare_with_the_median_and_the_step_with_the_mean() -> None:
    graph = graph_of(1)
    steps = [timeline_of(graph, [value, 1.0, 1.0]) for value in (1.0, 2.0, 9.0)]
    found = compare(graph, steps[0], steps)
    assert found.tasks[0].measured_s == 2.0
    assert found.tasks[0].relative_error == -0.5
    assert found.step.measured_s == pytest.approx((3 + 4 + 11) / 3)
    assert found.step.steps == 3
    assert found.aa_floor is None


def test_kinds_sum_their_tasks_and_know_their_interval() -> None:
    graph = graph_of(2)
    predicted, measured = timeline_of(graph, [1, 2, 3, 4, 5]), timeline_of(graph, [2, 2, 3, 3, 4])
    intervals = kind_intervals_s(graph, np.array([[1.0, 2, 3, 4, 5], [2, 3, 3, 4, 4], [1, 2, 3, 4, 6]]))
    found = {row.kind: row for row in compare(graph, predicted, measured, kind_intervals=intervals).kinds}
    assert set(found) == {"forward", "backward", "all_reduce"}
    forward = found["forward"]
    assert (forward.count, forward.predicted_s, forward.measured_s) == (2, 3.0, 4.0)
    assert forward.relative_error == -0.25
    assert forward.median_absolute_relative_error == 0.25
    assert intervals["forward"].median == 3.0
    assert forward.within_interval is True
    assert found["backward"].within_interval is False


def test_step_interval_memory_and_json() -> None:
    graph = graph_of(1)
    timeline = timeline_of(graph, [1, 1, 1])
    found = compare(
        graph,
        timeline,
        timeline,
        predicted_step=Interval(median=3.3, p05=3.1, p95=3.6),
        measured_step=[2.9, 3.0, 3.1, 3.0],
        predicted_memory_bytes=[110, 90],
        measured_memory_bytes=[100, 100],
    )
    document = json.loads(json.dumps(found.to_dict(tasks=True)))
    assert document["predicted"] == 3.3
    assert document["measured"] == pytest.approx(3.0)
    assert document["relative_error"] == pytest.approx(0.1)
    assert document["within_interval"] is False
    assert document["predicted_step_s"] == {"median": 3.3, "p05": 3.1, "p95": 3.6}
    assert set(document["kinds"]["forward"]) >= {"predicted", "measured", "relative_error", "within_interval"}
    assert [row["relative_error"] for row in document["memory"]] == pytest.approx([0.1, -0.1])
    assert len(document["tasks"]) == 3
    assert document["aa_floor"]["median"] <= document["aa_floor"]["p95"]


def test_an_error_against_nothing_is_not_a_number() -> None:
    assert relative_error(0.0, 0.0) == 0.0
    assert relative_error(1.0, 0.0) is None
    assert relative_error(1.0, 2.0) == -0.5
    graph = graph_of(1)
    found = compare(graph, timeline_of(graph, [1, 1, 1]), timeline_of(graph, [0, 1, 1]))
    assert found.tasks[0].relative_error is None
    assert json.loads(json.dumps(found.to_dict()))["kinds"]["forward"]["relative_error"] is None


def test_largest_errors_come_first() -> None:
    graph = graph_of(6)
    seconds = np.ones(13)
    wrong = seconds + np.arange(13)
    found = compare(graph, timeline_of(graph, wrong.tolist()), timeline_of(graph, seconds.tolist()))
    assert [row.task for row in found.largest_errors] == list(range(12, 2, -1))


def test_timelines_of_other_graphs_are_refused() -> None:
    graph, larger = graph_of(1), graph_of(2)
    own, other = timeline_of(graph, [1] * 3), timeline_of(larger, [1] * 5)
    with pytest.raises(GraphError, match=r"names task 3, but the graph has tasks 0\.\.2"):
        compare(graph, own, other)
    with pytest.raises(GraphError, match="lacks 2 of the graph's 5 tasks, the first is task 3"):
        compare(larger, other, own)
    with pytest.raises(ParsimError, match="at least one measured step"):
        compare(graph, own, [])
    with pytest.raises(ParsimError, match="predicted for 2 ranks and measured on 1"):
        compare(graph, own, own, predicted_memory_bytes=[1, 2], measured_memory_bytes=[1])


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=30))
def test_the_floor_is_ordered_and_bounded(rounds: list[float]) -> None:
    floor = aa_floor(rounds, splits=50)
    assert 0 <= floor.median <= floor.p95 <= max(rounds) / min(rounds) - 1 + 1e-12


def test_equal_rounds_have_no_floor_and_no_drift() -> None:
    assert aa_floor([0.25] * 8) == (0.0, 0.0)
    assert drift([0.25] * 8) == 0.0
    assert drift([1, 1, 1, 1.1, 1.1, 1.1]) == pytest.approx(0.1)
    assert drift([1.0, 1.0, 50.0, 1.1, 1.1]) == pytest.approx(0.1), "the odd round in the middle belongs to neither half"


def test_the_floor_of_independent_noise_is_what_theory_says() -> None:
    """Halves of n/2 rounds with relative noise s differ by a normal with deviation 2 s / sqrt(n)."""
    rng = np.random.default_rng(5)
    noise, count = 0.05, 400
    floor = aa_floor(1 + noise * rng.standard_normal(count), splits=4000)
    deviation = 2 * noise / np.sqrt(count)
    assert floor.median == pytest.approx(0.6745 * deviation, rel=0.15)
    assert floor.p95 == pytest.approx(1.96 * deviation, rel=0.15)


def test_rounds_not_steps_are_split() -> None:
    """What a whole round shares cannot be averaged away by more steps per round."""
    shared = [0.9, 1.1, 0.95, 1.05, 1.0, 1.0]
    assert aa_floor([[value] * 50 for value in shared]) == pytest.approx(aa_floor(shared))


def test_the_floor_refuses_too_little() -> None:
    with pytest.raises(ParsimError, match=">= 4 rounds, got 3"):
        aa_floor([1.0, 1.0, 1.0])
    with pytest.raises(ParsimError, match="step times > 0 in every round"):
        aa_floor([[1.0], [], [1.0], [1.0]])
