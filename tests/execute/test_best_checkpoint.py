"""best/ holds the best checkpoint of the training as it is now, wherever it went on from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from parsim.execute import evaluation as validation
from parsim.execute.checkpoint.checkpoint import (
    UNUSED,
    RankState,
    latest_checkpoint,
    load_state,
    rng_state,
    save_checkpoint,
    set_aside_newer,
)
from parsim.execute.evaluation import STATE, Validation
from parsim.execute.job import EvaluationRule
from tests.execute.rank_states import newest

PLACE: Any = SimpleNamespace(rank=0)


class Training:
    """One rank that scores what it is told to."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, every: int) -> None:
        self.folder, self.every, self.scores = folder, every, dict[int, float]()
        self.step_number, self.notes = 0, dict[str, Any]()
        self.run: Any = SimpleNamespace(recipe=SimpleNamespace(ema=None))
        self.layout: Any = SimpleNamespace(plan=SimpleNamespace(world_size=1))
        self.stage: Any = SimpleNamespace(device="cpu")
        self.mixing = self.rate = None
        monkeypatch.setattr(validation, "done_by_rank_0", lambda place, work: work())
        monkeypatch.setattr(validation, "value_of_rank_0", lambda value: value)
        monkeypatch.setattr(validation, "run_dataset", lambda *_: ())
        monkeypatch.setattr(validation, "whole_weights", lambda *_, **__: ({}, {}))
        monkeypatch.setattr(validation, "scores", lambda *_, **__: {"loss": self.scores[self.step_number]})

    def save(self, folder: Path, *, keep: int = 2) -> None:
        weights = {"w": torch.full((2,), float(self.step_number))}
        state = RankState(weights=weights, buffers={}, rng=rng_state(), progress=dict(self.notes))
        save_checkpoint(folder, self.step_number, state, seed=0, rank=0, world_size=1, keep=keep)

    def resume(self, step: int) -> Validation:
        """From the checkpoint of that step; 0: from the beginning."""
        self.step_number, self.notes = step, {}
        if step:
            found = newest(self.folder / "checkpoints")
            assert found.step == step
            self.notes = dict(load_state(found).progress)
        made = Validation(rule=EvaluationRule(), folder=self.folder / "best", every=1, steps=100)
        made.begin(self, PLACE)  # type: ignore[arg-type]
        return made

    def go(self, looks: Validation, scores: dict[int, float]) -> None:
        """The steps with these scores, and a checkpoint every `every` of them."""
        self.scores |= scores
        for step in scores:
            self.step_number = step
            looks.look(self, PLACE)  # type: ignore[arg-type]
            if step % self.every == 0:
                self.save(self.folder / "checkpoints")
                looks.has_saved(PLACE)

    def best(self) -> int | None:
        found = latest_checkpoint(self.folder / "best")
        return None if found is None else found.step


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(tmp_path, monkeypatch, every=4)


def test_a_better_one_behind_the_checkpoint_is_not_that_of_the_training_that_goes_on(training: Training) -> None:
    """Steps 5 and 6 were better, and are trained anew under other settings, which makes them worse."""
    training.go(training.resume(0), {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.5, 5: 2.0, 6: 1.0})
    assert training.best() == 6
    again = training.resume(4)
    assert (again.best.step, again.best.score, training.best()) == (2, 3.0, 2)
    training.go(again, {5: 3.2, 6: 3.1})
    assert (again.best.step, training.best()) == (2, 2)
    training.go(again, {7: 2.9})
    assert (again.best.step, training.best()) == (7, 7)


def test_every_checkpoint_that_is_kept_finds_its_best_one_and_few_others_stay(training: Training) -> None:
    """Every score is better than the one before it. The newest checkpoint is damaged, so the one before it is taken."""
    training.go(training.resume(0), {step: 100.0 - step for step in range(1, 43)})
    assert len(list((training.folder / "best").iterdir())) <= 5
    for path in (training.folder / "checkpoints" / "step-00000040").iterdir():
        path.write_bytes(b"x")
    with pytest.warns(UserWarning, match="is not used"):
        again = training.resume(36)
    assert (again.best.step, training.best()) == (36, 36)


def test_without_checkpoints_of_the_training_the_best_starts_anew(training: Training) -> None:
    training.go(training.resume(0), {1: 5.0, 2: 3.0})
    again = training.resume(0)
    assert (again.best.step, training.best()) == (0, None)


def test_a_best_checkpoint_that_cannot_be_read_is_told(training: Training) -> None:
    training.go(training.resume(0), {1: 5.0, 2: 3.0, 3: 3.5, 4: 4.0})
    (training.folder / "best" / "step-00000002" / "rank-0000.pt").write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"the best checkpoint \(step 2\) cannot be read .* the next validation is the best"):
        again = training.resume(4)
    assert (again.best.step, again.best.since) == (0, 2)
    training.go(again, {5: 9.0})
    assert (again.best.step, training.best()) == (5, 5)
    assert training.notes[STATE].tolist() == [9.0, 5.0, 0.0]


def test_checkpoints_of_later_steps_are_set_aside(training: Training) -> None:
    """Else they would count among the two that are kept, and be read once they can be."""
    folder = training.folder / "checkpoints"
    for step in (2, 4, 6):
        training.step_number = step
        training.save(folder, keep=9)
    moved = set_aside_newer(folder, 4)
    assert [place.name for place in moved] == [f"{UNUSED}step-00000006"]
    found = newest(folder)
    assert found.step == 4
    training.step_number = 6
    training.save(folder, keep=9)
    assert len(set_aside_newer(folder, 4)) == 1
    assert sorted(place.name for place in folder.iterdir()) == ["step-00000002", "step-00000004", f"{UNUSED}step-00000006"]


def test_after_going_on_the_best_of_the_checkpoint_before_stays(training: Training) -> None:
    """The first checkpoint behind it is damaged, so the training goes on from the same one again."""
    training.go(training.resume(0), {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.5})
    training.go(training.resume(4), {5: 2.0, 6: 1.0, 7: 1.5, 8: 1.6})
    for path in (training.folder / "checkpoints" / "step-00000008").iterdir():
        path.write_bytes(b"x")
    with pytest.warns(UserWarning, match="is not used"):
        again = training.resume(4)
    assert (again.best.step, training.best()) == (2, 2)
