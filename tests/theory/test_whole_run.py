"""Whole runs: closed forms, a walk step by step as the oracle, and the expected time of runs that fail at random."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from parsim.engines.scenario import DeviceCosts, FailureAt, Failures, Run
from parsim.engines.whole_run import (
    CHECKPOINT,
    EPOCH_START,
    EVALUATION,
    TRAINING,
    Course,
    IntervalTimes,
    Training,
    WholeRun,
    course_of,
    daly_interval_s,
    expected_run_s,
    failure_times_s,
    interval_times,
    machine_mtbf_s,
    one_draw_many_times,
    simulate_run,
    young_interval_s,
)
from parsim.errors import ScenarioError

ONE_SECOND = Training(step_s=np.ones((1, 1)), ranks=4)
HUNDRED = Run(samples_per_epoch=1)


def course(steps: int, interval: int | None, checkpoint_s: float = 1.0) -> Course:
    return course_of(HUNDRED, steps_per_epoch=steps, interval_steps=interval, checkpoint_s=checkpoint_s)


def failing_at(*times_s: float, restart_s: float = 0.0) -> Failures:
    return Failures(at=tuple(FailureAt(at_s=time, rank=0) for time in times_s), restart_s=restart_s)


def test_a_course_block_by_block() -> None:
    """Three epochs of 10 steps, a checkpoint every 8, an evaluation every 2 epochs."""
    run = Run(epochs=3, samples_per_epoch=1, epoch_start_s=2.0, evaluate_every_epochs=2)
    made = course_of(run, steps_per_epoch=10, interval_steps=8, checkpoint_s=5.0, evaluation_s=7.0)
    letters = {TRAINING: "T", CHECKPOINT: "C", EVALUATION: "E", EPOCH_START: "S"}
    text = " ".join(letters[kind] + (str(steps) if steps else "") for kind, steps in zip(made.kind, made.steps, strict=True))
    assert text == "S T8 C T2 S T6 C T4 E S T4 C T6 C"
    assert made.resume.tolist() == [0, 0, 0, 3, 3, 3, 3, 7, 7, 7, 7, 7, 12, 12]
    assert made.total_steps == 30
    assert made.seconds.sum() == 3 * 2 + 4 * 5 + 7


def test_without_failures_a_run_is_the_sum_of_its_blocks() -> None:
    run = Run(epochs=3, samples_per_epoch=1, epoch_start_s=2.0, evaluate_every_epochs=2)
    made = course_of(run, steps_per_epoch=10, interval_steps=8, checkpoint_s=5.0, evaluation_s=7.0)
    training = Training(step_s=np.array([[0.5], [1.0]]), ranks=4, start_s=11.0, warm_up_s=3.0, computing_s=0.25)
    done = simulate_run(made, training, Failures(), seed=0)
    assert done.total_s.tolist() == [11 + 3 + 30 * step + 33 for step in (0.5, 1.0)]
    assert done.spent_s[TRAINING].tolist() == [15.0, 30.0]
    assert done.spent_s[CHECKPOINT].tolist() == [20.0, 20.0]
    assert done.spent_s[EVALUATION].tolist() == [7.0, 7.0]
    assert done.down_s.tolist() == [14.0, 14.0]
    assert done.lost_s.tolist() == [0.0, 0.0]
    assert done.busy_s.tolist() == [30 * 0.25 + 7 * 0.5, 30 * 0.25 + 7 * 0.25]
    costs = DeviceCosts(price_per_hour=3.6, busy_w=300.0, idle_w=100.0)
    np.testing.assert_allclose(done.price(costs), done.total_s * 4 * 0.001)
    np.testing.assert_allclose(done.energy_j(costs), 4 * (300 * done.busy_s + 100 * (done.total_s - done.busy_s)))


@pytest.mark.parametrize(
    ("times", "restart_s", "total", "lost"),
    [
        ((15.5,), 3.0, 110 + 4.5 + 3, 4.5),  # 4.5 s of training since the checkpoint written at 11 s
        ((10.5,), 3.0, 110 + 10.5 + 3, 10.5),  # while writing: all since the start
        ((11.0,), 3.0, 110 + 0 + 3, 0.0),  # the moment it is written
        ((15.5, 17.0), 3.0, 110 + 4.5 + 1.5 + 3, 4.5),  # within the restart, which begins anew
        ((15.5, 20.0), 3.0, 110 + 4.5 + 3 + 1.5 + 3, 6.0),  # again in the same interval
        ((500.0,), 3.0, 110, 0.0),  # after the end
    ],
)
def test_failures_at_stated_times(times: tuple[float, ...], restart_s: float, total: float, lost: float) -> None:
    """100 steps of 1 s, a checkpoint of 1 s after every 10: 110 s without a failure."""
    done = simulate_run(course(100, 10), ONE_SECOND, failing_at(*times, restart_s=restart_s), seed=0)
    assert done.total_s.tolist() == [total]
    assert done.lost_s.tolist() == [lost]
    assert done.down_s.sum() + sum(part.sum() for part in done.spent_s.values()) == total


def test_without_checkpoints_a_failure_begins_from_nothing() -> None:
    done = simulate_run(course(100, None), ONE_SECOND, failing_at(99.5), seed=0)
    assert done.total_s.tolist() == [199.5]


def test_a_machine_that_is_slower_for_a_while() -> None:
    """1 s a step, 2 s from 30 s to 50 s: 30 + 10 + 60 steps."""
    training = Training(step_s=np.array([[1.0, 2.0, 1.0]]), ranks=1, change_s=(30.0, 50.0))
    done = simulate_run(course(100, None), training, Failures(), seed=0)
    assert done.total_s.tolist() == [110.0]
    again = simulate_run(course(100, 10, 0.0), training, failing_at(45.0), seed=0)
    assert again.total_s.tolist() == [117.5], "at 45 s 30 of 37.5 steps were written; to 50 s 2.5 more are done, then 67.5"
    assert again.lost_s.tolist() == [15.0]


def test_while_a_link_is_down_training_stands_and_checkpoints_end() -> None:
    """Nothing trains from 10.5 s to 20 s; the checkpoint begun at 10 s is written at 11 s."""
    training = Training(step_s=np.array([[1.0, np.inf, 1.0]]), ranks=1, change_s=(10.5, 20.0))
    done = simulate_run(course(100, 10), training, Failures(), seed=0)
    assert done.total_s.tolist() == [110.0 + 9.0]
    assert done.down_s.tolist() == [9.0]
    again = simulate_run(course(100, 10), training, failing_at(15.0), seed=0)
    assert again.total_s.tolist() == [119.0], "nothing is lost: the checkpoint was written"
    assert again.lost_s.tolist() == [0.0]


def walk(made: Course, step_s: float, start_s: float, failures: Failures) -> tuple[float, float, int]:
    """Step by step: every step and every other block is tried; a failure within it goes back behind the last checkpoint."""
    pieces: list[tuple[float, int]] = []  # seconds, the block
    for block, (steps, seconds) in enumerate(zip(made.steps.tolist(), made.seconds.tolist(), strict=True)):
        pieces += [(step_s, block)] * steps if steps else [(seconds, block)]
    times = sorted(entry.at_s for entry in failures.at)
    now, lost, count = 0.0, 0.0, 0

    def stand(now: float, seconds: float) -> float:
        nonlocal count
        ready = now + seconds
        while times and times[0] <= ready:
            ready = times.pop(0) + seconds
            count += 1
        return ready

    now = stand(now, start_s)
    place, written, since = 0, 0, now
    while place < len(pieces):
        seconds, block = pieces[place]
        if times and now <= times[0] < now + seconds:
            now = times.pop(0)
            count += 1
            lost += now - since
            now = since = stand(now, failures.restart_s)
            place = written
            continue
        now += seconds
        place += 1
        if made.kind[block] == CHECKPOINT:
            written, since = place, now
    return now, lost, count


@given(
    st.integers(1, 3),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, 9)),
    st.lists(st.integers(0, 400).map(lambda number: number + 0.5), max_size=6, unique=True),
    st.integers(0, 4),
    st.integers(0, 2),
)
def test_jumps_equal_a_walk_step_by_step(
    epochs: int, steps: int, interval: int | None, times: list[float], restart_s: int, start_s: int
) -> None:
    """Halves of seconds are exact, so ties are real: what ends in the instant of a failure has ended."""
    run = Run(epochs=epochs, samples_per_epoch=1, epoch_start_s=1.0, evaluate_every_epochs=2)
    made = course_of(run, steps_per_epoch=steps, interval_steps=interval, checkpoint_s=2.0, evaluation_s=3.0)
    failures = failing_at(*times, restart_s=restart_s)
    training = Training(step_s=np.array([[1.0]]), ranks=1, start_s=start_s)
    done = simulate_run(made, training, failures, seed=0)
    total_s, lost_s, count = walk(made, 1.0, start_s, failures)
    assert done.total_s[0] == pytest.approx(total_s, rel=1e-12)
    assert done.lost_s[0] == pytest.approx(lost_s, abs=1e-9)
    assert done.failures[0] == count


@pytest.mark.parametrize(
    ("interval", "write_s", "restart_s", "mtbf_s"), [(60, 5.0, 30.0, 600.0), (200, 20.0, 0.0, 300.0), (30, 5.0, 100.0, 150.0)]
)
def test_the_mean_run_takes_what_the_formula_expects(interval: int, write_s: float, restart_s: float, mtbf_s: float) -> None:
    """M e^(R/M) (e^((t + d)/M) - 1) per interval, failures while writing and restarting included."""
    steps = 30 * interval
    failures = Failures(node_mtbf_s=mtbf_s * 8, restart_s=restart_s)
    training = one_draw_many_times(Training(step_s=np.ones((1, 1)), ranks=64, nodes=8), 600)
    done = simulate_run(course(steps, interval, write_s), training, failures, seed=1)
    wanted = expected_run_s(steps, interval, write_s, restart_s, mtbf_s)
    error = done.total_s.std() / np.sqrt(len(done.total_s))
    assert error < 0.03 * wanted
    assert abs(done.total_s.mean() - wanted) < 4 * error


def test_seconds_are_accounted_for_and_useful_training_is_what_was_asked_for() -> None:
    failures = Failures(rank_mtbf_s=4000.0, restart_s=10.0, distribution="weibull", shape=0.8)
    training = Training(step_s=np.linspace(0.5, 2.0, 40)[:, None], ranks=16, warm_up_s=1.0)
    done = simulate_run(course(1000, 50, 3.0), training, failures, seed=7)
    assert done.failures.sum() > 40
    spent = sum(done.spent_s.values())
    np.testing.assert_allclose(done.total_s, done.down_s + spent, rtol=1e-12)
    np.testing.assert_allclose(spent - done.lost_s, 1000 * training.step_s[:, 0] + 20 * 3.0, rtol=1e-9)


def bytes_of(done: WholeRun) -> bytes:
    return b"".join(part.tobytes() for part in (done.total_s, done.lost_s, done.busy_s, done.failures, *done.spent_s.values()))


def test_the_same_seed_gives_the_same_bytes() -> None:
    training = one_draw_many_times(ONE_SECOND, 20)
    for failures in (Failures(rank_mtbf_s=300.0), Failures(node_mtbf_s=90.0, distribution="weibull")):
        runs = [bytes_of(simulate_run(course(500, 20), training, failures, seed=seed)) for seed in (3, 3, 4)]
        assert runs[0] == runs[1]
        assert runs[0] != runs[2]


@pytest.mark.parametrize("distribution", ["exponential", "weibull"])
def test_parts_fail_as_often_as_their_mtbf_says(distribution: str) -> None:
    failures = Failures.model_validate({"rank_mtbf_s": 100.0, "node_mtbf_s": 400.0, "distribution": distribution})
    counted = 0
    for seed in range(20):
        times = failure_times_s(failures, 8, 2, np.random.default_rng(seed))
        ordered = [next(times) for _ in range(2000)]
        assert ordered == sorted(ordered)
        counted += sum(time <= 10_000.0 for time in ordered)
    rate = 8 / 100 + 2 / 400
    assert counted / 20 == pytest.approx(rate * 10_000, rel=0.05)


def test_what_does_not_get_on_is_said() -> None:
    with pytest.raises(ScenarioError, match=r"the run makes no progress: .* write checkpoints more often"):
        simulate_run(course(1000, None), ONE_SECOND, Failures(rank_mtbf_s=40.0), seed=0)
    with pytest.raises(ScenarioError, match="never restarts"):
        simulate_run(course(10, None), ONE_SECOND, Failures(rank_mtbf_s=4.0, restart_s=100.0), seed=0)
    with pytest.raises(ScenarioError, match=r"shape \[draws, 2\], one column per state, got \[1, 1\]"):
        Training(step_s=np.ones((1, 1)), ranks=1, change_s=(3.0,))
    with pytest.raises(ScenarioError, match="above 0, and finite at last"):
        Training(step_s=np.array([[np.inf]]), ranks=1)
    with pytest.raises(ScenarioError, match="hold >= 1 step, got 10 and 0"):
        course(10, 0)


# The best checkpoint interval: Young's and Daly's where their assumptions hold, another where they do not.

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
