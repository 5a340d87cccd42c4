"""The experiment on predicted and executed winners: its verdicts, and that a stopped run goes on behind what it has kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.relaxed import judge
from experiments.relaxed import time_to_accuracy as experiment
from parsim.app.relaxed import Contender, sooner_probability
from parsim.plans.synchronisation import parse_synchronisation


def row(rule: str, predicted_s: float | None, executed_s: float | None, rounds: int = 3) -> dict[str, Any]:
    return {
        "case": "one",
        "target": 0.9,
        "rule": rule,
        "predicted_s": predicted_s,
        "predicted_steps": 10,
        "executed_s": executed_s,
        "executed_steps": 10,
        "rounds": rounds,
    }


def test_a_way_that_does_not_reach_the_target_loses_to_those_that_do() -> None:
    document = {"rows": [row("a", 1.0, None), row("b", 2.0, 3.0), row("c", 3.0, 4.0), row("d", 4.0, None)]}
    assert [pair.won for pair in judge.pairs(document)] == [False, False, True, True, True]  # (a, d) are not compared
    assert "not reached" in judge.races_tables(document)["time_to_accuracy"]


def test_what_was_not_executed_is_no_pair() -> None:
    document = {"rows": [row("a", 1.0, None, rounds=0), row("b", 2.0, 3.0), row("c", None, None, rounds=0)]}
    assert judge.pairs(document) == []
    assert {each.verdict for each in judge.races_claims(document)} == {"not checked"}


def test_the_middle_of_rounds_counts_those_that_did_not_reach() -> None:
    reached = [{"reached": True, "seconds": 2.0}, {"reached": True, "seconds": 4.0}]
    missed = {"reached": False, "seconds": 1.0}
    assert experiment.middle([*reached, missed], "seconds") == 4.0
    assert experiment.middle([reached[0], missed, missed], "seconds") is None
    assert experiment.middle([], "seconds") is None


def test_pairs_are_told_apart_by_the_stated_doubt() -> None:
    rows = [row("a", 1.0, 1.1), row("b", 2.0, 2.2), row("c", 2.1, 2.0)]
    document = {"rows": [each | {"log_deviation": 0.1} for each in rows]}
    apart = [pair.won for pair in judge.pairs(document) if (pair.probability or 0.0) >= judge.TOLD_APART]
    assert apart == [True, True]  # b and c lie within their doubt, and c was sooner
    assert judge.doubt_of_ratios(document) == pytest.approx(2.1 / (2.0 / 1.1))  # the second worst of three


def test_an_all_reduce_must_take_so_many_times_the_computation_for_averaging_to_save_95_percent() -> None:
    ratio = judge.needed_ratio(0.95, 625)
    assert ratio is not None
    assert (1.0 + ratio / 625) / (1.0 + ratio) == pytest.approx(0.05)
    assert judge.needed_ratio(0.95, 10) is None  # a round every 10 steps is a tenth of the communication


def test_a_run_of_equal_doubt_is_sooner_with_the_normal_probability() -> None:
    class Known(Contender):
        seconds = 1.0  # type: ignore[assignment]
        log_deviation = 0.1  # type: ignore[assignment]

    class Later(Known):
        seconds = 1.1  # type: ignore[assignment]

    rule = parse_synchronisation("average/4")
    one, other = Known(rule=rule), Later(rule=rule)
    assert sooner_probability(one, one) == 0.5
    assert sooner_probability(one, other) == pytest.approx(0.75, abs=0.003)  # log(1.1) / (0.1 sqrt 2) = 0.674
    assert sooner_probability(one, Contender(rule=rule)) is None


def test_a_stopped_run_goes_on_behind_its_last_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, int]] = []
    asked: list[str] = []

    def predicted(profile: str, case: experiment.Case, rules: tuple[str, ...], seeds: int) -> list[dict[str, Any]]:
        asked.append(case.name)
        return [{"rule": rule, "predicted_s": 1.0, "log_deviation": 0.1, "steps": 10, "plan": "{}"} for rule in rules]

    def executed(profile: str, case: experiment.Case, rows: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
        if len(launched) == 2:
            raise KeyboardInterrupt
        launched.append((case.name, seed))
        return [{"rule": each["rule"], "reached": True, "steps": 10, "seconds": 1.0, "score": 0.9} for each in rows]

    monkeypatch.setattr(experiment, "predicted", predicted)
    monkeypatch.setattr(experiment, "executed", executed)
    cases = dict.fromkeys(experiment.CASES[:2], "here.json")
    arguments = (cases, "digest", tmp_path, ("average/4", "stale"), 2, 3)
    with pytest.raises(KeyboardInterrupt):
        experiment.raced(*arguments)
    before, launched[:] = list(launched), []
    rows = experiment.raced(*arguments)
    first, second = (case.name for case in experiment.CASES[:2])
    assert (before, launched) == ([(first, 10), (second, 10)], [(first, 11), (second, 11)])
    assert asked == [first, second]
    assert [entry["rounds"] for entry in rows] == [2] * 4
    assert experiment.Record(tmp_path / "launches.jsonl", "another profile").entries == []
