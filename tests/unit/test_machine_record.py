"""experiments/this_machine: what is judged and written from a record of some launches alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.common import page
from experiments.this_machine import ablation, judging
from experiments.this_machine.judge import JUDGES
from experiments.this_machine.run import other_record
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import HostOverhead, Overlap

ROOT = Path(__file__).resolve().parents[2]
JUDGE = JUDGES["this_machine"]
assert JUDGE.tables is not None
assert JUDGE.finding is not None


def row(number: int, record: str) -> judging.CaseRow:
    measured = 0.010 * (1 + 0.01 * number)
    without = {"gaps between tasks": 1.2 * measured, "cores shared by all ranks": 1.02 * measured}
    return judging.CaseRow(
        record=record,
        launch="two",
        model="mlp" if number % 2 else "vit_small",
        label=f"plan {number}",
        ranks=1 + number % 2,
        calibrated=True,
        predicted_s=0.9 * measured,
        low_s=0.8 * measured,
        high_s=1.05 * measured,
        slowness=1.1,
        at_speed_s=1.02 * measured,
        refreshed_s=0.95 * measured,
        measured_s=measured,
        aa_median=0.03,
        aa_p95=0.08,
        aa_at_speed=(0.02, 0.06),
        without=without,
    )


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """Of two launches with one rank per core; as results.json has it."""
    rows = [row(number, f"record-{record}") for record in (1, 2, 3) for number in range(8)]
    found = {"run": {}, "machine": "a processor", "date": "2026-11-24", **judging.judged(rows)}
    back: dict[str, Any] = json.loads(json.dumps(found))
    return back


def test_a_record_of_one_launch_is_judged_and_drawn(document: dict[str, Any]) -> None:
    verdicts = [(claim.verdict, claim.found) for claim in page.claims_of(JUDGE, document)]
    assert verdicts == [("met", "2.0%; A/A floor 2.0%"), ("met", "100.0%"), ("met", "2 of 2")]
    assert "ranks share cores" not in JUDGE.tables(document)["this_machine"]
    assert JUDGE.finding(document).startswith("24 real runs of 8 cases were predicted with a median error of 10.0% beforehand")


def test_a_correction_that_changes_nothing_here_is_called_not_tried(document: dict[str, Any]) -> None:
    found = document["corrections"]
    assert found["gaps between tasks"]["changed"] == 24
    assert found["cores shared by all ranks"]["changed"] == 0
    (line,) = [line for line in JUDGE.tables(document)["this_machine"].splitlines() if line.startswith("| cores shared")]
    assert "not tried" in line
    assert "**no**" not in line


def test_pages_quote_the_record(document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/accuracy.md"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(page, "FOLDER", tmp_path / "experiments")
    monkeypatch.setattr(page, "results_of", lambda part: document if part.name == "this_machine" else None)
    for _ in range(2):
        for path, text in page.quoting_pages().items():
            path.write_text(text, encoding="utf-8")
    readme, accuracy = (tmp_path / "README.md").read_text(), (tmp_path / "docs" / "accuracy.md").read_text()
    assert readme.count("median 10.0% and 2.0%") == 1
    assert readme.count("| choosing among 4 plans") == 1
    assert len(readme.splitlines()) == len((ROOT / "README.md").read_text().splitlines())
    assert accuracy.count("a processor, 2026-11-24, 24 runs | median 10.0%, bias -10.0%") == 1
    assert accuracy.count("| choosing, the committed record: among 4 plans |") == 1


def test_a_folder_of_another_record_is_not_gone_on_with(tmp_path: Path) -> None:
    assert other_record(tmp_path, {"seed": 1}) == ""
    assert other_record(tmp_path, {"seed": 1}) == ""
    assert '"seed": 1' in other_record(tmp_path, {"seed": 2})
    (tmp_path / "record.json").unlink()
    (tmp_path / "predictions.json").write_text("[]")
    assert "unknown" in other_record(tmp_path, {"seed": 1})


def test_a_correction_that_halves_the_error_helps_and_noise_does_not() -> None:
    noise = np.random.default_rng(1).normal(0, 0.02, size=(200, 2))
    runs = {
        factor: [
            ablation.Compared(case=f"c{number % 40}", with_s=1.05 + with_it, without_s=1 + factor + without, measured_s=1.0)
            for number, (with_it, without) in enumerate(noise)
        ]
        for factor in (0.1, 0.05)
    }
    halved, noisy = ablation.ablated(runs[0.1]), ablation.ablated(runs[0.05])
    assert halved["helps"]
    assert halved["gain"] == pytest.approx(0.05, abs=0.01)
    assert halved["gain_low"] < halved["gain"] < halved["gain_high"]
    assert not noisy["helps"]
    assert (noisy["runs"], noisy["median_with"]) == (200, pytest.approx(0.05, abs=0.005))


def test_runs_of_one_case_are_no_evidence_of_many() -> None:
    """One case in two gains; a hundred runs of each are still two cases."""
    runs = [
        ablation.Compared(case=case, with_s=1.0, without_s=without_s, measured_s=1.0 if case == "a" else without_s)
        for case, without_s in (("a", 1.1), ("b", 1.05))
        for _ in range(100)
    ]
    assert not ablation.ablated(runs)["helps"]


def test_every_correction_can_be_left_out_of_a_profile() -> None:
    some = load_profile("dgx1-v100-32gb")
    source = next(iter(some.sources))
    host = HostOverhead(task_s=1e-5, step_s=1e-3, post_wait_s=1e-4, core_sharing=1.1, source=source)
    full = some.model_copy(
        update={"host": host, "overlap": Overlap(compute_factor=1.2, communication_factor=1.3, source=source)}
    )
    made = [less(full) for less in ablation.WITHOUT.values()]
    assert all(profile != full for profile in made)
    assert len({profile.model_dump_json() for profile in made}) == len(made), "each leaves out another one"
