"""A training loop of somebody's own beside its prediction: which steps count, and what is refused."""

from __future__ import annotations

import importlib.util
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import parsim as ps
from parsim.app.watch import WatchedTraining as Watched

PREDICTED = ps.simulate("mlp", cluster="dgx1-v100-32gb", global_batch=64, devices=1, strategy="single")


def run_steps(watch: Watched, ends_s: list[float], monkeypatch: pytest.MonkeyPatch, pauses: tuple[int, ...] = ()) -> None:
    """Steps that end at these seconds; before those of `pauses` something else runs."""
    with monkeypatch.context() as patched:
        for number, end in enumerate(ends_s):
            if number in pauses:
                watch.pause()
            patched.setattr(time, "perf_counter", lambda end=end: end)
            watch.step()


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=40), st.integers(1, 6))
def test_windows_are_means_of_steps_in_a_row(steps_s: list[float], every: int) -> None:
    """The first step starts the clock, the first window warms up, and an unfinished window does not count."""
    watch = Watched(prediction=PREDICTED, every=every)
    with pytest.MonkeyPatch.context() as patched:
        run_steps(watch, list(itertools.accumulate(steps_s)), patched)
    full = [steps_s[first : first + every] for first in range(1, len(steps_s) - every + 1, every)]
    assert watch.windows_s == pytest.approx([sum(window) / every for window in full[1:]], rel=1e-6, abs=1e-9)


def test_a_pause_leaves_its_window_out(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watched(prediction=PREDICTED, every=2)
    ends = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1006.0, 1007.0, 1008.0]  # 1,000 s of validation before the seventh step
    run_steps(watch, ends, monkeypatch, pauses=(6,))
    assert watch.windows_s == [1.0, 1.0]


def test_the_verdict_is_whether_the_interval_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    interval, seen = PREDICTED.step_s, []
    for step_s, inside in ((interval.median, True), (interval.p05 * 0.99, False), (interval.p95 * 1.01, False)):
        watch = Watched(prediction=PREDICTED, every=3, writes=(lambda figures, step: seen.append((step, dict(figures))),))
        assert watch.as_predicted is None
        run_steps(watch, [step_s * number for number in range(1, 8)], monkeypatch)
        assert watch.as_predicted is inside
        assert ("inside" in str(watch)) is inside
        step, figures = seen[-1]
        assert step == 7
        assert figures["parsim/step_s"] == pytest.approx(step_s)
        assert figures["parsim/of_predicted"] == pytest.approx(step_s / interval.median)
        assert figures["parsim/predicted_step_s"] == interval.median


def test_it_says_what_it_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    with ps.watch(PREDICTED) as watch:
        watch.step()
    before, after = capsys.readouterr().err.splitlines()
    assert before.startswith("parsim: mlp on dgx1-v100-32gb, one device: predicted ")
    assert after.endswith("nothing measured yet (1 steps of the 41 that two windows take)")


def test_a_single_process_is_predicted_by_default_and_more_train_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ps.watch("mlp", "dgx1-v100-32gb", global_batch=64, devices=1).prediction.strategy == "single"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ps.watch("mlp", "dgx1-v100-32gb", global_batch=64, devices=2).prediction.plan.mesh.dp == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "tensorbord"}, "to = 'tensorbord' is no destination; did you mean tensorboard"),
        ({"every": 0}, "every = 0: a window has at least one step"),
        ({"global_batch": 32}, "global_batch was given beside a Prediction"),
    ],
)
def test_what_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ps.ParsimError, match=message):
        ps.watch(PREDICTED, **arguments)  # type: ignore[arg-type]


def test_other_processes_or_samples_than_predicted_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ps.ParsimError, match="the trainer takes 32 samples per step, and the prediction is for 64"):
        ps.watch(PREDICTED).check_trainer(world_size=1, global_batch=32)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ps.ParsimError, match="4 processes train, and the prediction is for 1"):
        ps.watch(PREDICTED)


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_destination_that_is_not_installed_names_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ps.ParsimError, match=rf"needs {package}, which is not installed; pip install 'parsim\[{package}\]'"):
        ps.watch(PREDICTED, to=package)  # type: ignore[arg-type]
