"""Verdicts of experiments: pure functions of committed results, and never "met" where nothing was compared."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.adaptive import paper_page
from experiments.common import running
from experiments.common.catalogue import CATALOGUE, FOLDER, Experiment, Part, chosen, every_part, lines_of, recorded
from experiments.common.claims import Claim, claim, counts, of_every, within
from experiments.common.page import REFUTED_BY, claims_of, finding_of, judge_of, pages_anew, quick_page, results_of
from experiments.relaxed import epoch_averaging, learning, stale_gradients, times

PARTS = every_part()
NAMES = [part.name for _, part in PARTS]


def test_every_folder_is_in_the_catalogue_and_every_part_has_its_module() -> None:
    folders = {path.parent.name for path in FOLDER.glob("*/README.md")}
    assert folders == {experiment.name for experiment in CATALOGUE}
    for experiment, part in PARTS:
        assert (FOLDER.parent / experiment.script(part).replace(".", "/")).with_suffix(".py").is_file(), part.name


def test_pages_say_what_the_committed_results_say() -> None:
    for path, text in pages_anew().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old; run python experiments/results.py --page"


def test_the_page_of_the_first_paper_says_what_the_committed_results_say() -> None:
    """And shows a picture of each of its six figures."""
    text = paper_page.PAGE.read_text(encoding="utf-8")
    document = recorded("adaptive_parallelism")
    assert document is not None
    assert paper_page.page(document, text) == text, "run `python -m experiments.adaptive.paper_page`"
    for number in paper_page.FIGURES:
        picture = f"paper-{number}.svg"
        assert f"pictures/{picture})" in text
        assert (paper_page.PICTURES / picture).read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize(("experiment", "part"), PARTS, ids=NAMES)
def test_a_section_opens_with_the_finding_and_ends_with_what_would_refute_it(experiment: Experiment, part: Part) -> None:
    for finding in (finding_of(experiment), finding_of(experiment, part)):
        assert 1 <= len(re.findall(r"[^.]+?[.](?=\s|$)", re.sub(r"\d[.]\d", "0", finding))) <= 2, finding
    sections = (experiment.folder / "README.md").read_text(encoding="utf-8")
    if len(experiment.parts) > 1:
        sections = re.split(rf"^## {part.name}\n", sections, flags=re.MULTILINE)[1]
        sections = re.split(r"^## ", sections, flags=re.MULTILINE)[0]
    assert sections.rstrip().split("\n\n")[-1].startswith(REFUTED_BY)


@pytest.mark.parametrize(("experiment", "part"), PARTS, ids=NAMES)
def test_without_results_and_in_a_small_version_nothing_is_met_or_missed(experiment: Experiment, part: Part) -> None:
    judge = judge_of(experiment, part)
    if judge is None:
        assert results_of(part) is None, "results that nobody judges"
        return
    assert set(counts(judge.claims({}))) == {"not checked"}
    document = results_of(part) or {"run": {}}
    assert set(counts(claims_of(judge, document | {"run": document["run"] | {"quick": True}}))) == {"not checked"}
    assert "not checked" in quick_page([(experiment, part)], {part.name: "ran"}, 1.0)


def test_a_verdict_needs_rows_seeds_and_a_reason() -> None:
    assert of_every("all", [], lambda row: True).verdict == "not checked"
    missed = of_every("all", [1, 2], lambda row: row < 2)
    assert (missed.verdict, missed.found) == ("missed", "1 of 2; not 2")
    five = [0.9] * 5
    assert within("near", five + [1.0] * 5, 0.95, 0.02, 5).verdict == "missed"  # later seeds change no verdict
    assert within("near", five[:4], 0.9, 0.02, 5).verdict == "not checked"
    with pytest.raises(ValueError, match="none of met, missed"):
        Claim(text="t", verdict="true")
    with pytest.raises(ValueError, match="say why"):
        Claim(text="t", verdict="not checked")
    assert claim("t", None).found == "nothing was compared"


def test_names_choose_parts_and_experiments_and_unknown_ones_are_named() -> None:
    assert [part.name for _, part in chosen("search,mixing")] == ["search_exhaustive", "search_properties", "mixing"]
    with pytest.raises(ValueError, match="no experiment nothing; there are plans_executed"):
        chosen("mixing,nothing")


def test_results_are_json_with_a_line_per_row() -> None:
    documents = {"one": {"run": {"date": "2026-11-23"}, "rows": [{"a": 1}, {"a": 2}], "none": []}, "two": {"rows": []}}
    assert json.loads(lines_of(documents)) == documents
    assert '{"a": 1},\n{"a": 2}' in lines_of(documents)


def made_up(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    place = folder / "made_up"
    place.mkdir()
    (place / "part.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(running, "ROOT", folder)
    return "made_up.part"


def test_results_hold_what_they_were_run_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = made_up(tmp_path, "print('[{\"score\": 1}]')", monkeypatch)
    document = running.documented(script, ["--seeds", "5"], quick=False, out=tmp_path)
    assert document["rows"] == [{"score": 1}]
    run = document["run"]
    assert run["command"] == "python -m made_up.part --seeds 5"
    assert {"machine", "versions", "date", "commit", "load", "quick", "wall_s", "cpu_s"} < set(run)
    assert str(tmp_path) not in json.dumps(run)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit('no data')", "part ended with status 1: no data"),
        ("print('3 rows')", "printed no JSON document, but '3 rows"),
        ("import time; time.sleep(60)", "part was stopped after 0.5 s"),
    ],
)
def test_an_experiment_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    script = made_up(tmp_path, text, monkeypatch)
    with pytest.raises(running.ExperimentError, match=re.escape(message)):
        running.documented(script, [], quick=False, out=tmp_path, limit_s=0.5 if "sleep" in text else 30.0)


def differences(now: Any, kept: Any, place: str = "") -> Iterator[str]:
    """Where two documents differ; numbers by more than `OLD`."""
    if isinstance(now, Mapping) and isinstance(kept, Mapping):
        for key in sorted(now.keys() | kept.keys()):
            yield from differences(now.get(key), kept.get(key), f"{place}/{key}")
    elif isinstance(now, list) and isinstance(kept, list) and len(now) == len(kept):
        for number, (one, other) in enumerate(zip(now, kept, strict=True)):
            yield from differences(one, other, f"{place}/{number}")
    elif isinstance(now, float) and isinstance(kept, int | float):
        if not math.isclose(now, kept, rel_tol=OLD):
            yield f"{place}: {now} now, {kept} committed"
    elif now != kept:
        yield f"{place}: {now} now, {kept} committed"


OLD = 1e-3
"""Relative difference of a number from which on a committed result is older than the code that makes it."""

AGAIN: dict[tuple[str, str], Callable[[], Any]] = {
    ("decentralized", "gaps"): learning.gap_rows,
    ("decentralized", "scaling"): times.scaling_rows,
    ("epoch_averaging", "times"): epoch_averaging.time_table,
    ("stale_gradients", "epoch_times"): stale_gradients.time_table,
    ("stale_gradients", "speedup"): stale_gradients.speedup_table,
}
"""Parts of committed results that the code makes again in seconds, without drawing or measuring."""


@pytest.mark.parametrize(("part", "key"), list(AGAIN))
def test_committed_results_are_those_of_the_code(part: str, key: str) -> None:
    committed = recorded(part)
    assert committed is not None
    again = json.loads(json.dumps(AGAIN[part, key]()))
    found = list(differences(again, committed[key]))
    assert not found, f"run python experiments/results.py --only {part}; {len(found)} differ: {found[:3]}"


def test_a_result_that_is_older_than_the_code_is_noticed() -> None:
    now = {"rows": [{"memory_gb": 5.7, "name": "mp"}]}
    assert list(differences(now, {"rows": [{"memory_gb": 5.7004, "name": "mp"}]})) == []
    (found,) = differences(now, {"rows": [{"memory_gb": 19.5, "name": "mp"}]})
    assert found == "/rows/0/memory_gb: 5.7 now, 19.5 committed"
    assert list(differences(now, {"rows": []}))
