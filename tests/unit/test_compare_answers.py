"""`parsim compare`: what differs between two answers, in parts that sum to the difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import parsim as ps
from parsim.app.run_folder import RunFolder
from parsim.app.sweep.difference import compare_answers, read_answer
from parsim.app.write_folder import write_prediction
from parsim.errors import ConfigError

GIVEN = {"plan.strategy": "custom", "plan.mesh": {"dp": 2}, "cluster.devices": 2}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A sweep of three points; a run folder of the first question; the JSON of a plan and of a prediction."""
    root = tmp_path_factory.mktemp("answers")
    over = {"training.global_batch": [64, 128, 65], "scale.links": [1, 4]}
    ps.sweep("mlp", over, cluster="dgx1-v100-32gb", global_batch=64, settings=GIVEN, jobs=1, out=root / "sweep")
    answer = ps.plan("mlp", cluster="dgx1-v100-32gb", global_batch=64, settings=GIVEN)
    write_prediction(RunFolder(root / "run"), answer.chosen)
    (root / "plan.json").write_text(json.dumps(answer.to_dict()))
    (root / "prediction.json").write_text(json.dumps(answer.chosen.to_dict()))
    return {name: str(root / name) for name in ("sweep", "run", "plan.json", "prediction.json")}


def test_all_forms_of_one_answer_are_the_same(places: dict[str, str]) -> None:
    point = f"{places['sweep']}:0"
    for name in ("run", "plan.json", "prediction.json"):
        found = compare_answers(point, places[name])
        assert found.ratio == pytest.approx(1)
        for first, second in found.parts.values():
            assert first == pytest.approx(second, abs=1e-12)
        assert "the same time" in "\n".join(found.lines())


def test_the_parts_sum_to_the_difference_and_name_what_changed(places: dict[str, str]) -> None:
    found = compare_answers(f"{places['sweep']}:0", f"{places['sweep']}:1")
    assert found.asked == {"scale.links": (1, 4)}
    change = sum(second - first for first, second in found.parts.values())
    assert change == pytest.approx(found.second.step_s - found.first.step_s)
    assert next(iter(found.parts)) == "exposed_communication_s"
    assert found.ratio < 1
    text = "\n".join(found.lines())
    assert "scale.links: 1 -> 4" in text
    assert "exposed communication:" in text
    assert "less time per step" in text


def test_other_batches_are_compared_per_sample(places: dict[str, str]) -> None:
    found = compare_answers(f"{places['sweep']}:0", f"{places['sweep']}:2")
    assert found.per_sample
    assert found.ratio == pytest.approx(found.second.step_s / 128 / (found.first.step_s / 64))
    assert sum(second for _, second in found.parts.values()) == pytest.approx(found.second.step_s / 128)
    assert found.memory["activations"][1] > found.memory["activations"][0]
    assert json.loads(json.dumps(found.to_dict()))["per_sample"] is True


def test_what_is_no_answer_is_refused(places: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"step_s": 3}')
    (tmp_path / "broken.json").write_text("{")
    for given, said in (
        ("nowhere", "there is no nowhere"),
        (places["sweep"], "name one of them"),
        (f"{places['sweep']}:9", "has points 0 to 5"),
        (f"{places['sweep']}:x", "has points 0 to 5"),
        (f"{places['sweep']}:4", "must be divisible"),
        (str(tmp_path), "holds no result.json"),
        (str(tmp_path / "x.json"), "holds no answer of parsim"),
        (str(tmp_path / "broken.json"), "cannot read"),
    ):
        with pytest.raises(ConfigError) as refused:
            read_answer(given)
        assert said in str(refused.value)
