"""Plans drawn through the search's own families train what one process trains (DESIGN §6, "executor").

The full count, 50 plans of 100 steps per model and number of processes, is the experiment's: its committed results are read.
Here every twelfth of these plans runs, for fewer steps.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the torch extra")

import torch

from experiments.executor import plans_executed as run
from experiments.executor.comparing import (
    LEAST_MOVED,
    TOLERANCE,
    Outcome,
    References,
    outcomes_of,
    planted_fault,
)
from experiments.executor.drawing import (
    FEATURES,
    counted,
    drawn,
)
from experiments.executor.judge import run_of, summary
from experiments.executor.models import SUBJECTS
from parsim.plans.plan import Plan

PLANS, STEPS = 50, 100
EVERY, FEWER_STEPS = 12, 30
MODELS = [pytest.param(name, marks=[pytest.mark.hf] if name == "llama" else []) for name in SUBJECTS]


FORKS = pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason="a CUDA build of torch: autograd refuses to work in processes forked after a trace"
)


def told(outcomes: list[Outcome]) -> str:
    """The plans that differ, with their seeds and how to repeat them."""
    return "\n".join(outcome.describe() for outcome in outcomes if not outcome.holds)


def test_the_same_number_is_the_same_plan_and_numbers_differ() -> None:
    some = [drawn("mlp", 4, 0, number) for number in range(6)]
    assert some == [drawn("mlp", 4, 0, number) for number in range(6)]
    assert len({each.plan for each in some}) == 6
    assert all(each.plan == Plan.from_json(each.plan.to_json()) for each in some)
    assert "--models mlp --nproc 4 --seed 0 --only 3" in some[3].describe()


def test_the_results_record_with_what_they_were_made() -> None:
    """Over several calls: every commit and date, and the seconds of all; a row of before they were recorded is named."""
    first = {"machine": "A", "date": "2026-01-01", "commit": "1234567", "load": 0.5, "wall_s": 1.0, "cpu_s": 0.5}
    made = run_of([first, first | {"commit": "89abcde", "load": 3.0}], command="python run.py")
    assert made["commit"] == "1234567, 89abcde"
    assert (made["machine"], made["date"], made["load"], made["wall_s"], made["cpu_s"]) == ("A", "2026-01-01", 0.5, 2.0, 1.0)
    assert made["command"] == "python run.py"
    assert "not recorded" in run_of([first, {}], command="")["machine"]


def test_a_call_that_ends_early_keeps_the_rows_of_before_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without a commit are of an earlier search, and are run again; the others are not, with --go-on."""
    old = {"model": "mlp", "processes": 2, "number": 0, "plan": "old"}
    kept = old | {"number": 1, "commit": "1234567"}
    monkeypatch.setattr(run, "recorded", lambda name: {"rows": [old, kept]})
    new = old | {"plan": "new", "commit": "89abcde"}
    assert run.with_earlier([new]) == [new, kept]
    paths = {number: tmp_path / f"{number}.json" for number in range(3)}
    run.keep_recorded(paths, "mlp", 2)
    assert [number for number, path in paths.items() if path.is_file()] == [1]
    assert json.loads(paths[1].read_text()) == kept


@FORKS
@pytest.mark.xdist_group("launch")
def test_some_plans_equal_one_process(tmp_path: Path) -> None:
    """Four of the smallest model, in one launch of four processes; then the same with a fault that is there on purpose."""
    some = [drawn("mlp", 4, 0, number) for number in range(4)]
    references = References(steps=4)
    outcomes = outcomes_of(some, tmp_path / "as it is", steps=4, timeout_s=120.0, references=references)
    assert len(outcomes) == 4
    assert all(outcome.holds for outcome in outcomes), told(outcomes)
    with planted_fault():
        faulty = outcomes_of(some[:1], tmp_path / "faulty", steps=4, timeout_s=120.0, references=references)
    assert not any(outcome.holds for outcome in faulty)
    assert faulty[0].difference is not None
    assert TOLERANCE < faulty[0].difference.worst < LEAST_MOVED


@FORKS
@pytest.mark.xdist_group("launch")
def test_a_plan_that_fails_is_named_and_those_behind_it_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parsim.execute.stage import StageReplica

    kept, some = StageReplica.optimizer_step, [drawn("mlp", 2, 0, number) for number in range(3)]

    def failing(self: StageReplica, group: str) -> None:
        assert self.layout.plan != some[1].plan, "on purpose"
        kept(self, group)

    monkeypatch.setattr(StageReplica, "optimizer_step", failing)
    outcomes = outcomes_of(some, tmp_path, steps=2, timeout_s=120.0)
    assert [outcome.holds for outcome in outcomes] == [True, False, True]
    assert "on purpose" in outcomes[1].reason
    assert some[1].name in told(outcomes)


@FORKS
@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_drawn_plans_equal_one_process(name: str, processes: int, tmp_path: Path) -> None:
    """One launch: its processes train under one plan after another. On both numbers of processes together a model's plans have
    every feature that they can have."""
    plans = {count: [drawn(name, count, 0, number) for number in range(PLANS)] for count in (2, 4)}
    features = counted([*plans[2], *plans[4]])
    assert not [feature for feature in set(FEATURES) - set(SUBJECTS[name].lacks) if not features[feature]]
    references = References(steps=FEWER_STEPS)
    trained = plans[processes][::EVERY]
    outcomes = outcomes_of(trained, tmp_path, steps=FEWER_STEPS, timeout_s=600.0, references=references)
    assert len(outcomes) == len(trained)
    assert all(outcome.holds for outcome in outcomes), told(outcomes)
    assert references.moved > LEAST_MOVED


def test_the_committed_results_hold() -> None:
    """Of as many plans as the README says."""
    document = run.recorded(run.NAME)
    assert document is not None
    rows = document["rows"]
    assert document["summary"] == json.loads(json.dumps(summary(rows)))
    assert document["run"]["steps"] == STEPS
    assert not [row for row in rows if row["difference"] is None or row["difference"] > TOLERANCE]
    assert not [row for row in rows if row["moved"] <= LEAST_MOVED]
    assert len({(row["model"], row["processes"], row["number"]) for row in rows}) == len(rows) >= 20
