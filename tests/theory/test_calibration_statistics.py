"""From raw timings to a profile's numbers, against known parameters: medians, drift, spread, fits, and planted nonsense."""

from __future__ import annotations

import copy
import math
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calibration.fit.build_profile import core_sharing, resuming_s
from calibration.measure.delayed_streams import Pausing
from calibration.measure.overlap import core_sharing_factor, resumed_s
from calibration.rounds.pace import Pace, at_one_pace, usual_pace
from calibration.rounds.turns import paced
from parsim.execute.processes.speed_probe import SpeedProbe
from parsim.execute.rank_run import make_streams
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import HostOverhead
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.families import FAMILIES
from tests.models import chain_model

pytest.importorskip("torch")

from calibration.fit.build_profile import typical_step
from calibration.fit.drift import RoundTiming, computation_drift, estimate_drift, noise_of, rank_sigma, robust_sigma
from calibration.fit.reject_outliers import Timed, consistent_collectives, consistent_components, contradicted, screened
from calibration.measure.collectives import merged_seconds
from calibration.measure.communication_points import (
    STALL_S,
    all_reduce_sizes,
    collective_points,
    mean_and_spread,
    overlap_factors,
    overlap_stall,
    stalling_s,
)
from calibration.measure.overlap import MAX_CALLS, MIN_CALLS, MOST_HELD, Ran, computation_factor, seconds_beside, side_by_side
from calibration.rounds.turns import in_turn
from parsim.costs.communication.closed_forms import regimes_s
from parsim.costs.communication.measured import fit_regimes
from parsim.costs.estimate import OverlapFactors
from parsim.engines import static
from parsim.errors import ProfileError
from parsim.execute.streams import TaskTime
from parsim.hardware.profile import CollectiveFit, CollectivePoint, Regime
from parsim.hardware.records import ComponentPoint
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.program.taskgraph import COMPUTE, Resource
from parsim.work import Collective, Compute, Phase
from tests.strategies import graph_of

MLP = ModelSpec(name="mlp", args=(("width", 64),), input_shape=(1, 32, 32))

# --- medians and spreads ------------------------------------------------------------------------------------------------


def test_robust_sigma_of_a_normal_and_of_outliers() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(1.0, 0.05, 20_000)
    assert robust_sigma(values) == pytest.approx(0.05, rel=0.05)
    values[:2000] *= 30
    assert robust_sigma(values) == pytest.approx(0.05, rel=0.25)
    assert robust_sigma([1.0, 2.0]) == 0.0


def test_typical_step_recovers_tasks_spread_and_total() -> None:
    """Tasks of known times and noise under a common drift: times within 2%, spread without the drift, total exact."""
    rng = np.random.default_rng(1)
    true = np.array([5e-4, 2e-3, 1e-3, 0.0, 4e-3] * 6)
    noise = np.exp(0.04 * rng.standard_normal((400, len(true))))
    drift = np.exp(0.10 * rng.standard_normal((400, 1)))
    table = true * noise * drift
    seconds, spread = typical_step(table)
    assert np.allclose(seconds, true, rtol=0.02)
    assert np.allclose(spread[true > 0], 0.04, rtol=0.2)
    assert seconds.sum() == pytest.approx(table.sum(axis=1).mean(), rel=1e-12)


def test_rank_sigma_recovers_what_ranks_do_not_share() -> None:
    """A common drift of 20% is not noise between ranks; 8% per rank is."""
    rng = np.random.default_rng(3)
    drift = np.exp(0.2 * rng.standard_normal(500))
    ranks = [
        {
            "sweeps": [
                {"model": 0, "samples": 4, "ranks_active": active, "round": number, "seconds": [slow * own, 2 * slow * own]}
                for number, (slow, own) in enumerate(zip(drift, np.exp(0.08 * rng.standard_normal(500)), strict=True))
                for active in (1, 2)
            ]
        }
        for _ in range(2)
    ]
    assert rank_sigma({"ranks": ranks}) == pytest.approx(0.08, rel=0.1)
    assert rank_sigma({"ranks": ranks[:1]}) == 0.0


def test_drift_is_the_spread_of_rounds_not_of_repeats() -> None:
    rng = np.random.default_rng(2)
    factors = np.exp(0.15 * rng.standard_normal(300))
    sweeps = [
        {
            "model": 0,
            "samples": samples,
            "ranks_active": 2,
            "optimizer": "sgd",
            "round": number,
            "seconds": [samples * factor * noise],
        }
        for number, factor in enumerate(factors)
        for samples in (4, 8, 16)
        for noise in np.exp(0.02 * rng.standard_normal(4))
    ]
    raw = {"ranks": [{"sweeps": sweeps}]}
    drift = computation_drift(raw)
    assert drift.sigma == pytest.approx(0.15, rel=0.1)
    found_noise = noise_of(raw, None, raw)
    assert found_noise.drift_sigma == found_noise.measured_drift_sigma == drift.sigma
    found = np.array([drift.factors[number] for number in range(300)])
    assert np.allclose(found, factors / factors.mean(), rtol=0.03)


def test_noise_alone_is_no_drift() -> None:
    """Eight rounds of nine cases with 10% of noise each: next to nothing is divided out, and 8% are assumed."""
    rng = np.random.default_rng(11)
    sigmas, moved = [], []
    for _ in range(100):
        noise = np.exp(0.1 * rng.standard_normal((9, 8)))
        drift = estimate_drift(RoundTiming(item, number, noise[item, number]) for item in range(9) for number in range(8))
        sigmas.append(drift.sigma)
        moved.append(max(abs(factor - 1) for factor in drift.factors.values()))
    assert np.mean(sigmas) < 0.02
    assert np.mean(moved) < 0.03


@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.integers(2, 12))
def test_exact_factors_are_found_exactly_whatever_was_skipped(seed: int, items: int, rounds: int) -> None:
    """Without noise, items and factors are recovered although a quarter of the measurements is missing."""
    rng = np.random.default_rng(seed)
    usual, factors = np.exp(rng.normal(0, 2, items)), np.exp(rng.normal(0, 0.1, rounds))
    there = rng.random((items, rounds)) > 0.25
    there[0], there[:, 0] = True, True
    rows = [RoundTiming(i, r, usual[i] * factors[r]) for i in range(items) for r in range(rounds) if there[i, r]]
    drift = estimate_drift(rows)
    assert np.mean(list(drift.factors.values())) == pytest.approx(1.0, rel=1e-12)
    if there.all():
        expected = factors / factors.mean()
        assert [drift.factors[r] for r in range(rounds)] == pytest.approx(expected.tolist(), rel=1e-6)
    steady = [drift.steady(row.seconds, row.round) for row in rows]
    assert len(steady) == len(rows)


def test_a_common_factor_is_divided_out_of_components() -> None:
    """A large size that was measured in the slow rounds only is not thought slower for it."""
    entries = [
        {
            "operation": "all_reduce",
            "group": [0, 1],
            "size_bytes": size,
            "round": number,
            "seconds": [[factor * size * 1e-9] * 3],
        }
        for number, factor in enumerate((1.0, 1.0, 1.5, 1.0, 1.5, 1.0))
        for size in (2**10, 2**14, 2**18, 2**22, 2**26)
        if size < 2**26 or factor > 1
    ]
    points = collective_points({"ranks": [{"collectives": entries}]})
    rates = [point.seconds / point.size_bytes for point in points]
    assert max(rates) / min(rates) < 1.01
    assert all(point.spread == pytest.approx(0.0, abs=0.01) for point in points)


def test_merged_seconds_run_from_last_ready_to_last_end() -> None:
    one = [[TaskTime(1, "dp", 1.0, 4.0), TaskTime(2, "dp", 4.0, 6.0)]]
    other = [[TaskTime(1, "dp", 2.5, 4.1), TaskTime(2, "dp", 4.1, 5.9)]]
    assert merged_seconds([one, other], 2) == [[pytest.approx(1.6), pytest.approx(1.9)]]


def test_collective_points_and_fit_recover_alpha_and_beta() -> None:
    alpha, beta = 3e-4, 2e-9
    rng = np.random.default_rng(3)
    entries = [
        {
            "operation": "all_reduce",
            "group": [0, 1],
            "size_bytes": size,
            "round": 0,
            "seconds": ((alpha + beta * size) * np.exp(0.02 * rng.standard_normal((40, 3)))).tolist(),
        }
        for size in (2**power for power in range(10, 26))
    ]
    points = collective_points({"ranks": [{"collectives": entries}]})
    assert all(0.01 < point.spread < 0.03 and point.repeats == 120 for point in points if point.spread is not None)
    (fit,) = fit_regimes(points, source="collective_fit")
    for size in (1500, 100_000, 3_000_000, 30_000_000):
        assert regimes_s(fit.regimes, size) == pytest.approx(alpha + beta * size, rel=0.03)


def test_both_of_a_pair_come_first_as_often() -> None:
    calls: list[str] = []
    pairs = in_turn(4, lambda: calls.append("a") or len(calls), lambda: calls.append("b") or len(calls))  # type: ignore[func-returns-value]
    assert "".join(calls) == "abbaabba"
    assert pairs == [(1, 2), (4, 3), (5, 6), (8, 7)]
    assert in_turn(0, list, list) == []


def test_overlap_factors_from_constructed_times() -> None:
    """Steps of 3 s take 4.5 s beside calls of 0.25 s, one every half second, of which 2.25 s lie within them."""

    def ran(at_s: float, first_s: float, second_s: float, calls: list[TaskTime]) -> Ran:
        middle_s = at_s + first_s
        tasks = [TaskTime(0, "compute", at_s, middle_s), TaskTime(1, "compute", middle_s, middle_s + second_s)]
        return Ran([tasks], calls)

    def calls(ready_s: float) -> list[TaskTime]:
        return [TaskTime(number, "dp", ready_s + 0.5 * number, 10.05 + 0.5 * number) for number in range(12)]

    alone, together = ran(0.0, 1.0, 2.0, []), ran(10.0, 1.5, 3.0, calls(9.8))
    lost_s = 1.5
    assert computation_factor([(alone, together)], [[together]]) == pytest.approx(1 / (1 - lost_s / 2.25))
    assert computation_factor([(alone, together)] * 3, [[together] * 3]) == pytest.approx(1 / (1 - lost_s / 2.25))
    late = ran(10.0, 1.5, 3.0, calls(9.85))
    assert computation_factor([(alone, together)], [[together], [late]]) == pytest.approx(1 / (1 - lost_s / 1.8)), "both ready"
    assert computation_factor([(together, alone)], [[ran(0.0, 1.0, 2.0, [TaskTime(0, "dp", 20.0, 21.0)])]]) is None, (
        "no call within the steps"
    )
    slowest = ran(10.0, 3.0, 3.0, calls(9.8)[:4])
    assert computation_factor([(alone, slowest)], [[slowest]]) == pytest.approx(1 / (1 - MOST_HELD)), "not more than all"
    assert seconds_beside([together, together]) == pytest.approx([0.25] * 8), "those within the steps, from 10 to 14.5"
    assert overlap_factors([], []) is None


def test_overlap_by_operation_and_size() -> None:
    """Computation: medians; communication: the mean beside computation over what the fit gives; neither below 1."""
    place = {"model": 0, "samples": 4, "group_size": 2}
    entries = [
        {**place, "operation": operation, "size_bytes": size, "computation": computing, "communication_s": beside}
        for operation, size, computing, beside in (
            ("all_reduce", 10, [1.5, 1.7, None], [0.2, 0.2]),
            ("all_reduce", 10, [0.9], [0.5]),
            ("all_reduce", 99, [1.1], []),
            ("all_reduce", 99, [1.3], [0.06]),
            ("broadcast", 10, [9.0], [9.0]),
        )
    ]
    line = [Regime(max_size_bytes=None, latency_s=0.1, seconds_per_byte=0.0)]
    fit = CollectiveFit(
        operation="all_reduce",
        group_size=2,
        algorithm="x",
        regimes=line,
        relative_sigma=0.1,
        min_size_bytes=1,
        max_size_bytes=99,
        source="x",
    )
    found = overlap_factors(entries, [fit])
    assert found is not None
    assert (found.compute_factor, found.communication_factor) == pytest.approx(((1.5 + 1 / 0.9) / 2, 2.0))
    kept = [(p.operation, p.size_bytes, p.repeats) for p in found.points]
    assert kept == [("all_reduce", 10, 3), ("all_reduce", 99, 1)], "nothing is said of broadcast, which has no fit"
    assert [p.compute_factor for p in found.points] == pytest.approx([1.5, 1 / (1 - 0.6 * (1 - 1 / 1.2))])
    assert [p.communication_factor for p in found.points] == pytest.approx([3.0, 1.0])


def test_the_mean_of_a_collective_keeps_its_tail_and_cuts_mishaps() -> None:
    """One call in ten takes eight times as long as the others: the mean says 1.7, the median would say 1."""
    seconds = ([1.0] * 9 + [8.0]) * 20
    assert mean_and_spread(seconds)[0] == pytest.approx(1.7)
    assert mean_and_spread([*seconds, 1000.0])[0] == pytest.approx(1.7, rel=0.03)
    assert mean_and_spread(seconds)[1] == pytest.approx(2.1 / 1.7)


def test_rare_stalls_count_in_the_mean_of_all_calls() -> None:
    """One call in a thousand stands still for 80 ms, one is held up for 9 s: each point is steady, the mean exact."""
    points = [[1e-3] * 100 for _ in range(20)]
    for number in (3, 11):
        points[number][7] += 0.08
    points[5][50] += 9.0
    assert stalling_s(points) == pytest.approx((2 * 0.08 + STALL_S) / 2000)
    assert [mean_and_spread(seconds) for seconds in points] == [(pytest.approx(1e-3), pytest.approx(0.0))] * 20
    assert stalling_s([*points, [0.2] * 99 + [0.25]]) == stalling_s(points), "long in any case"
    assert stalling_s([[1e-3] * 10] * 3) == stalling_s([]) == 0.0
    entries = [
        {"operation": "all_reduce", "group": [0, 1], "size_bytes": 1024 * (number + 1), "round": 0, "seconds": [seconds]}
        for number, seconds in enumerate(points)
    ]
    found = collective_points({"ranks": [{"collectives": entries}]})
    assert [point.seconds for point in found] == [pytest.approx(1e-3 + (2 * 0.08 + STALL_S) / 2000)] * 20


@given(st.floats(1e-4, 10.0), st.floats(1e-6, 10.0))
def test_steps_and_calls_run_side_by_side_for_about_as_long(step_s: float, call_s: float) -> None:
    steps, calls = side_by_side(step_s, call_s)
    assert MIN_CALLS <= calls <= MAX_CALLS
    if MIN_CALLS < calls < MAX_CALLS:
        assert 0 <= steps * step_s - calls * call_s <= call_s * (1 + 1e-9)


def test_gradient_totals_join_the_sizes() -> None:
    model = load_model(MLP)
    size = 4 * model.parameter_count
    assert size in all_reduce_sizes([model], (1024, 2 * size), 4)
    assert size not in all_reduce_sizes([model], (1024, size // 4), 4)


# --- nonsense ---------------------------------------------------------------------------------------------------------


PRODUCT = {"kind": "matmul", "function": "linear", "phase": "forward", "round": 0}


def raw_of_steps(rounds: int = 4) -> dict[str, Any]:
    """Two ranks, two batches of one model with three tasks (the last does not run), and one all_reduce."""
    sweeps = [
        {"model": 0, "samples": samples, "ranks_active": 2, "optimizer": "sgd", "round": number, "seconds": [1e-3, 2e-3, 0.0]}
        | {"gap_s": 1e-5, "rest_s": 0.0, "wall_s": 4e-3, "cpu_s": 4e-3}
        for samples in (4, 16)
        for number in range(rounds)
    ]
    call = {"operation": "all_reduce", "group": [0, 1], "size_bytes": 4096, "round": 0, "seconds": [[1e-3, 1e-3], [1e-3, 1e-3]]}
    factors = {"model": 0, "samples": 4, "operation": "all_reduce", "group_size": 2, "size_bytes": 4096, "round": 0}
    return {
        "ranks": [
            {
                "sweeps": sweeps,
                "optimizers": [{"model": 0, "samples": 4, "ranks_active": 2, "round": 0, "seconds": 1e-4}],
                "shards": [{"model": 0, "samples": 4, "round": 0, "parts": [["c", "r", 2, "forward", 1e-3, 2e-3]]}],
                "collectives": [call],
                "overlap": [{**factors, "computation": [1.2, None], "communication_s": []}],
                "operators": [{**PRODUCT, "sizes": {"rows": 8, "columns": 4}, "seconds": [1e-5, 2e-5]}],
                "resume": [{"model": 0, "samples": 4, "round": 0, "seconds": -2e-5}],
                "crowding": [{"model": 0, "samples": 4, "round": 0, "ratio": 1.1}],
                "others": ["pass as they are"],
            }
        ]
        * 2
    }


MODELS = [load_model(MLP)]


def test_sane_timings_pass_as_they_are() -> None:
    raw = raw_of_steps()
    assert screened(raw, MODELS) == (raw, [])


@pytest.mark.parametrize("nonsense", [0.0, -1e-3, math.nan, math.inf])
@pytest.mark.parametrize(
    ("key", "plant", "words"),
    [
        ("sweeps", lambda entry, value: entry["seconds"].__setitem__(0, value), "1 of 8 timings of mlp at 4 samples"),
        ("optimizers", lambda entry, value: entry.__setitem__("seconds", value), "1 of 2 timings of mlp at 4 samples"),
        ("shards", lambda entry, value: entry["parts"][0].__setitem__(4, value), "1 of 2 timings of mlp at 4 samples"),
        (
            "collectives",
            lambda entry, value: entry["seconds"][1].__setitem__(0, value),
            "1 of 4 timings of all_reduce of 4 KiB",
        ),
        (
            "overlap",
            lambda entry, value: entry["computation"].__setitem__(0, value),
            "1 of 2 timings of mlp at 4 samples beside",
        ),
        (
            "operators",
            lambda entry, value: entry["seconds"].__setitem__(1, value),
            "1 of 4 timings of matmul linear forward (rows=8 columns=4)",
        ),
        ("crowding", lambda entry, value: entry.__setitem__("ratio", value), "1 of 2 timings of mlp at 4 samples (crowding)"),
    ],
)
def test_planted_nonsense_is_left_out_and_said(key: str, plant: Any, words: str, nonsense: float) -> None:
    raw = copy.deepcopy(raw_of_steps())
    raw["ranks"] = copy.deepcopy(raw["ranks"][:1]) + copy.deepcopy(raw["ranks"][1:])
    clean = copy.deepcopy(raw)
    plant(raw["ranks"][0][key][0], nonsense)
    found, (warning,) = screened(raw, MODELS)
    assert words in warning
    for rank, before in zip(found["ranks"], clean["ranks"], strict=True):
        for other in rank:
            if other != key:
                assert rank[other] == before[other]
    text = repr(found["ranks"][0][key])
    assert "nan" not in text
    assert "inf" not in text
    assert "-0.001" not in text


def test_an_operator_that_a_gpu_refused_is_left_out_and_said_once() -> None:
    raw = copy.deepcopy(raw_of_steps())
    refused = {**PRODUCT, "sizes": {"rows": 16, "columns": 4}, "seconds": [], "refused": "cuDNN error: not supported"}
    raw["ranks"] = [{**rank, "operators": [*rank["operators"], refused]} for rank in raw["ranks"]]
    found, (warning,) = screened(raw, MODELS)
    assert warning == "left out matmul linear forward (rows=16 columns=4): the device refused it (cuDNN error: not supported)"
    assert [len(rank["operators"]) for rank in found["ranks"]] == [1, 1]


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf])
def test_a_difference_may_be_negative_but_is_a_number(nonsense: float) -> None:
    raw = copy.deepcopy(raw_of_steps())
    raw["ranks"] = [raw["ranks"][0], copy.deepcopy(raw["ranks"][1])]
    raw["ranks"][0]["resume"][0]["seconds"] = nonsense
    found, (warning,) = screened(raw, MODELS)
    assert "1 of 2 timings of mlp at 4 samples (resume)" in warning
    assert [rank["resume"] for rank in found["ranks"]] == [[], raw["ranks"][1]["resume"]]


def test_too_few_steps_are_said_and_too_few_of_a_model_are_an_error() -> None:
    raw = copy.deepcopy(raw_of_steps(rounds=2))
    for rank in raw["ranks"]:
        rank["sweeps"] = [sweep for sweep in rank["sweeps"] if sweep["samples"] == 4 or sweep["round"] == 0]
    found, (warning,) = screened(raw, MODELS)
    assert "mlp at 16 samples with 2 active ranks: 2 steps are too few" in warning
    assert {sweep["samples"] for rank in found["ranks"] for sweep in rank["sweeps"]} == {4}
    for rank in raw["ranks"]:
        rank["sweeps"] = rank["sweeps"][:1]
    with pytest.raises(ProfileError, match=r"no case of mlp has the 3 good steps .* calibrate again"):
        screened(raw, MODELS)


def timed(*points: tuple[int, float], error: float = 0.0) -> list[Timed]:
    return [Timed(work, seconds, error) for work, seconds in points]


def test_what_is_slower_with_less_work_is_left_out() -> None:
    assert contradicted(timed((4, 10.0), (16, 40.0))) == []
    assert contradicted(timed((4, 10.0), (16, 9.0))) == []
    assert contradicted(timed((4, 10.0), (16, 5.0))) == [0]
    assert contradicted(timed((4, 10.0), (16, 5.0), error=0.3)) == []
    assert contradicted(timed((4, 10.0), (8, 90.0), (16, 40.0), (32, 80.0))) == [1]
    assert contradicted(timed((4, 99.0), (8, 20.0), (16, 40.0))) == [0]
    assert contradicted(timed((4, 10.0), (8, 20.0), (16, 0.1))) == [2]
    assert contradicted(timed((4, 10.0), (8, 1.0), (16, 40.0))) == [1]
    assert contradicted([]) == []


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30), st.floats(0.0, 0.2))
def test_what_is_left_never_takes_longer_with_less_work_than_the_noise_allows(seconds: list[float], error: float) -> None:
    points = [Timed(2**place, value, error) for place, value in enumerate(seconds)]
    dropped = contradicted(points)
    kept = [point for place, point in enumerate(points) if place not in dropped]
    assert kept
    margin = 1 + max(0.2, 4 * math.hypot(error, error))
    assert all(less.seconds <= more.seconds * margin for less, more in pairwise(kept))
    assert contradicted(kept) == []
    ordered = [Timed(point.work, value, error) for point, value in zip(points, sorted(seconds), strict=True)]
    assert contradicted(ordered) == []


def test_contradicting_points_are_left_out_by_series_and_named() -> None:
    component = ComponentPoint(
        fingerprint="f",
        model="m",
        component="c",
        phase="forward",
        samples=4,
        device_type="cpu-core",
        precision="fp32",
        seconds=5e-3,
        spread=0.05,
        repeats=20,
        source="steps",
    )
    points = [
        component,
        component.model_copy(update={"samples": 16, "seconds": 2e-3}),
        component.model_copy(update={"samples": 64, "seconds": 8e-3}),
        component.model_copy(update={"phase": "backward", "samples": 1, "seconds": 9.0}),
    ]
    kept, (warning,) = consistent_components(points)
    assert kept == points[1:]
    assert warning == "left out forward of c of m at 4 samples: 5 ms, contradicted by less or more work"
    sizes = (2**10, 2**16, 2**20, 2**24)
    calls = [
        CollectivePoint(
            operation="all_gather", group=[0, 1], size_bytes=size, seconds=seconds, spread=0.1, repeats=9, source="x"
        )
        for size, seconds in zip(sizes, (1e-4, 9e-3, 1e-3, 1e-2), strict=True)
    ]
    left, (said,) = consistent_collectives(calls)
    assert left == [calls[0], *calls[2:]]
    assert said == "left out all_gather of 64 KiB over 2 ranks: 9 ms, contradicted by less or more work"
    with pytest.raises(
        ProfileError, match=r"only 1 size of all_gather over 2 ranks is left, and a fit needs 2 .*calibrate again"
    ):
        consistent_collectives(calls[1:3])


# --- overlap ----------------------------------------------------------------------------------------------------------


@given(st.floats(1.0, 50.0), st.floats(0.05, 3.0))
def test_a_computation_is_held_up_for_as_long_as_the_operations_took(slower: float, longer: float) -> None:
    """One operation beside a long computation, simulated: the computation ends later by what it lost when measured."""
    alone_s, computing_s = 2e-3, 1.0
    factors = OverlapFactors(compute=overlap_stall(slower, longer), communication=max(1.0, longer))
    computation = Compute(component="c", phase=Phase.FORWARD, samples=1)
    sum_of_both = Collective(operation="all_reduce", group=(0, 1), size_bytes=1)
    graph = graph_of(
        2,
        *((computation, [Resource(rank, COMPUTE)], []) for rank in range(2)),
        (sum_of_both, [Resource(rank, "dp") for rank in range(2)], []),
    )
    timeline = static.simulate(graph, [computing_s, computing_s, alone_s], overlap=factors)
    lost_s = longer * alone_s * (1 - 1 / slower)
    assert timeline.makespan_s == pytest.approx(computing_s + lost_s, rel=1e-9)


# Measurements at one pace: what is left when cores flip between two speeds, and what is said where nobody looked.

FAST_S, SLOW_S = 6e-3, 10e-3


def flipping(rounds: int, *, noise: float = 0.0) -> dict[str, Any]:
    """Two ranks whose cores are fast or slow, each by itself from round to round; a step of 1 s at a pace of 8 ms."""
    rng = np.random.default_rng(5)
    ranks = []
    for _ in range(2):
        paces = rng.choice([FAST_S, SLOW_S], size=rounds)
        sweeps = []
        for number, pace in enumerate(paces):
            seconds = pace / 8e-3 * np.exp(noise * rng.standard_normal())
            what = {"model": 0, "samples": 4, "ranks_active": 2, "optimizer": "sgd", "round": number}
            rest = {"gap_s": 0.1 * seconds, "rest_s": 0.0, "wall_s": seconds, "cpu_s": seconds}
            sweeps.append({**what, "seconds": [seconds], **rest, "pace_s": [pace, pace]})
        ranks.append(
            {"sweeps": sweeps, "shards": [{"model": 0, "pace_s": [SLOW_S, SLOW_S], "parts": []}], "device": {"name": "x"}}
        )
    return {"ranks": ranks, "cases": []}


def test_at_one_pace_cores_that_flip_are_steady() -> None:
    raw = flipping(40)
    usual = usual_pace(raw)
    assert usual is not None
    assert usual.alone_s == usual.together_s == pytest.approx(np.mean([s["pace_s"] for r in raw["ranks"] for s in r["sweeps"]]))
    steady = at_one_pace(raw, usual)
    for rank in steady["ranks"]:
        for sweep in rank["sweeps"]:
            assert sweep["seconds"] == [pytest.approx(usual.together_s / 8e-3)]
            assert sweep["gap_s"] == pytest.approx(0.1 * sweep["wall_s"])
            assert sweep["cpu_s"] == sweep["wall_s"]
    assert [rank["shards"] for rank in steady["ranks"]] == [rank["shards"] for rank in raw["ranks"]]


def test_each_level_has_its_own_pace() -> None:
    sweeps = [
        {"ranks_active": level, "pace_s": [pace - 1e-3, pace + 1e-3], "seconds": [1.0]}
        for level, pace in ((1, 4e-3), (2, 8e-3), (1, 6e-3))
    ]
    raw = {
        "ranks": [
            {
                "sweeps": [
                    {**sweep, "gap_s": 0, "rest_s": 0, "wall_s": 1, "cpu_s": 1, "load_again_s": sweep["seconds"][0]}
                    for sweep in sweeps
                ]
            }
        ]
    }
    assert usual_pace(raw) == Pace(5e-3, 8e-3)
    steady = at_one_pace(raw, usual_pace(raw))["ranks"][0]["sweeps"]
    found = [sweep["seconds"][0] for sweep in steady]
    assert found == [sweep["load_again_s"] for sweep in steady]
    assert found == pytest.approx([5 / 4, 1.0, 5 / 6])


def test_a_look_counts_for_what_it_tells() -> None:
    """Looks that are all noise change nothing; of half noise, half of their distance counts, and the mean step stays."""
    rng = np.random.default_rng(3)

    def told(noise: float, speed: float = 0.2) -> tuple[Pace, list[float]]:
        sweeps = []
        for _ in range(4000):
            true = 8e-3 * np.exp(speed * rng.standard_normal())
            looks = (true * np.exp(noise * rng.standard_normal(2))).tolist()
            rest = {"gap_s": 0.0, "rest_s": 0.0, "wall_s": 1.0, "cpu_s": 1.0}
            sweeps.append({"ranks_active": 2, "pace_s": looks, "seconds": [true / 8e-3], **rest})
        raw = {"ranks": [{"sweeps": sweeps}]}
        usual = usual_pace(raw)
        assert usual is not None
        return usual, [sweep["seconds"][0] for sweep in at_one_pace(raw, usual)["ranks"][0]["sweeps"]]

    assert told(0.0)[0].probe_reliability == pytest.approx(1.0)
    assert told(0.2, speed=0.0)[0].probe_reliability < 0.1
    usual, seconds = told(0.2)
    assert usual.probe_reliability == pytest.approx(2 / 3, abs=0.05)
    assert np.std(np.log(seconds)) == pytest.approx(0.2 * np.sqrt(1 / 3), rel=0.1)
    assert np.mean(seconds) == pytest.approx(np.mean(np.exp(0.2 * rng.standard_normal(4000))), rel=0.03)


def test_every_timing_of_a_nested_entry_is_divided() -> None:
    raw = {
        "ranks": [
            {
                "collectives": [{"seconds": [[1.0, 2.0], [3.0, 4.0]], "pace_s": [3e-3, 5e-3]}],
                "overlap": [
                    {"computation": [1.5], "communication_s": [2.0, 4.0], "pace_s": [3e-3, 5e-3]},
                    {"communication_s": [1.0]},
                ],
            }
        ]
    }
    (rank,) = at_one_pace(raw, Pace(1e-3, 2e-3))["ranks"]
    assert rank["collectives"][0]["seconds"] == [[0.5, 1.0], [1.5, 2.0]]
    assert rank["overlap"] == [
        {"computation": [1.5], "communication_s": [1.0, 2.0], "pace_s": [3e-3, 5e-3]},
        {"communication_s": [1.0]},
    ]


def test_the_profile_says_how_much_of_the_ranks_noise_the_pace_explains() -> None:
    raw = flipping(400, noise=0.05)
    usual = usual_pace(raw)
    found = noise_of(raw, usual, at_one_pace(raw, usual))
    assert found.probe is not None
    assert found.rank_sigma == rank_sigma(raw) > 0.2
    assert found.probe.rank_sigma == pytest.approx(0.05, rel=0.1)


def test_where_nobody_looked_all_is_as_it_was() -> None:
    raw = flipping(4)
    for rank in raw["ranks"]:
        rank["sweeps"] = [{key: value for key, value in sweep.items() if key != "pace_s"} for sweep in rank["sweeps"]]
    assert usual_pace(raw) is None
    assert at_one_pace(raw, None) is raw
    assert noise_of(raw, None, raw).probe is None


def test_a_stretch_has_the_paces_before_and_after_it() -> None:
    class Clock(SpeedProbe):
        """Takes 1 ms, then 3, then 5."""

        def __init__(self) -> None:
            self.next_s = -1e-3

        def seconds(self) -> float:
            self.next_s += 2e-3
            return self.next_s

    blocks = [lambda: [{"a": 1}, {"a": 2}], lambda: [{"a": 3}]]
    found = list(paced(blocks, Clock()))
    assert [entry["a"] for entry in found] == [1, 2, 3]
    assert [entry["pace_s"] for entry in found] == [pytest.approx(pair) for pair in ([1e-3, 3e-3], [1e-3, 3e-3], [3e-3, 5e-3])]
    assert list(paced(blocks, None)) == [{"a": 1}, {"a": 2}, {"a": 3}]


# Computation that resumes after its rank waited for communication: which tasks do, what they cost, how it is measured.

RESUME_S = 0.125


def found(family: str, ranks: int, post_wait_s: float, *, engine: str = "static") -> Evaluation:
    host = HostOverhead(task_s=0.0, step_s=0.0, post_wait_s=post_wait_s, source="throughput")
    profile = load_profile("dgx1-v100-32gb").model_copy(update={"host": host})
    model = chain_model((4e9, 8e9, 6e9, 4e9), elements=400_000)
    problem = PlanningProblem(model=model, cluster=cluster_from_profile(profile, ranks), global_batch=64)
    plan = next(plan for plan in FAMILIES[family](problem) if plan.world_size == ranks)
    return evaluate(problem, plan, samples=20, fold=False, engine=engine)


def test_a_rank_alone_never_waits() -> None:
    assert found("single", 1, RESUME_S).result.step_s == found("single", 1, 0.0).result.step_s


def test_the_optimizer_waits_for_the_gradients_and_nothing_else_does() -> None:
    plain, resumed = found("dp", 2, 0.0), found("dp", 2, RESUME_S)
    assert resumed.result.step_s.median == pytest.approx(plain.result.step_s.median + RESUME_S, rel=1e-9)


@pytest.mark.parametrize("engine", ["static", "dynamic"])
def test_both_ends_of_a_pipeline_wait_for_every_microbatch(engine: str) -> None:
    """Tasks that depend on a transfer take RESUME_S more, all others what they took."""
    plain, resumed = found("mp", 2, 0.0, engine=engine), found("mp", 2, RESUME_S, engine=engine)
    graph = plain.graph
    communicates = plain.compiled.columns.communicates
    waits = [any(communicates[need] for need in task.dependencies) and not communicates[task.index] for task in graph.tasks]
    seconds = [np.array([entry.estimates[unit].median_s for unit in entry.compiled.columns.unit]) for entry in (plain, resumed)]
    np.testing.assert_allclose(seconds[1] - seconds[0], np.where(waits, RESUME_S, 0.0), rtol=0, atol=1e-12)
    first = {
        (task.work.component, task.work.phase)
        for task, late in zip(graph.tasks, waits, strict=True)
        if late and isinstance(task.work, Compute)
    }
    assert len(first) == 2, "the forward of the second stage's first component, the backward of the first stage's last"
    assert {phase for _, phase in first} == {Phase.FORWARD, Phase.BACKWARD}
    assert sum(waits) == 2 * plain.result.plan.microbatches


def test_units_that_resume_are_units_of_their_own() -> None:
    columns = found("mp", 2, 0.0).compiled.columns
    split = columns.resuming()
    assert [split.units[unit].work for unit in split.unit] == [columns.units[unit].work for unit in columns.unit]
    assert len({(unit.work, unit.rank, unit.resumes) for unit in split.units}) == len(split.units)
    assert split.graph == columns.graph


def test_what_a_step_with_pauses_takes_longer() -> None:
    assert resumed_s([1.0, 2.0, 3.0], [7.0, 2.5, 3.1]) == pytest.approx(0.3)
    assert resumed_s([1.0], [2.0]) == 0.0, "the first never waits"


def test_the_median_counts_and_is_never_a_gain() -> None:
    def raw(*seconds: float) -> dict[str, object]:
        return {"ranks": [{"resume": [{"model": 0, "samples": 8, "seconds": value} for value in seconds]}, {}]}

    assert resuming_s(raw(1e-4, 3e-4, 9.0)) == 3e-4
    assert resuming_s(raw(-1e-4, -3e-4, 9.0)) == 0.0
    assert resuming_s(raw()) == 0.0


def _busy() -> None:
    """Ten milliseconds of the processor's."""
    end_s = time.thread_time() + 0.01
    while time.thread_time() < end_s:
        pass


def test_computations_wait_for_the_call_before_them() -> None:
    streams = Pausing(make_streams(torch.device("cpu")))
    said: list[str] = []

    def call() -> None:
        time.sleep(0.02)
        said.append("call")

    try:
        for before in (None, call):
            streams.before = before
            for number in range(3):
                streams.compute(number, COMPUTE, [], lambda number=number: said.append(str(number)))  # type: ignore[misc]
            times = {entry.task: entry for entry in streams.finish()}
            assert sorted(times) == [0, 1, 2], "calls are nobody's task"
            gaps = [times[number].ready_s - times[number - 1].end_s for number in (1, 2)]
            assert all(gap > 0.019 for gap in gaps) if before else all(gap < 0.019 for gap in gaps)
            assert len(streams.computed_s) == 3, "of this step alone"
            assert max(streams.computed_s) < 0.019, "the wait is not work of the processor's"
        streams.compute(3, COMPUTE, [], _busy)
        assert streams.computed_s[0] >= 0.01
        streams.finish()
    finally:
        streams.close()
    assert said == ["0", "1", "2", "0", "call", "1", "call", "2"]


def test_crowding_is_the_median_of_ratios_and_never_a_gain() -> None:
    def raw(*ratios: float) -> dict[str, object]:
        return {"ranks": [{"crowding": [{"model": 0, "samples": 8, "ratio": ratio} for ratio in ratios]}, {}]}

    assert core_sharing(raw(1.02, 1.06, 3.0)) == 1.06
    assert core_sharing(raw(0.9, 0.98)) == 1.0
    assert core_sharing(raw()) == 1.0
    assert core_sharing_factor([(1.0, 1.2), (2.0, 2.0), (1.0, 1 / 1.2)]) == pytest.approx(1.0)
