"""The table of breaks: its form, that each of them can be made, and that tests notice enough of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import Mutant, Verdict, faults, mutants_of, noticed_by, recorded, run_tests

TABLE = mutants_of(mutants.TABLE.read_text(encoding="utf-8"))
ONE = Mutant(path="tools/mutants.py", old="LIMIT_CPU_S = 60", new="LIMIT_CPU_S = 1", tests=("tests/unit/test_mutants.py",))


def test_an_entry_is_a_file_a_break_and_tests() -> None:
    text = "# engines\n\na.py\n- x = 1\n- y = 2\n+ x = 2\n? tests/a.py 'tests/b.py::c[d e]'\n! why\n"
    (entry,) = mutants_of(text)
    assert entry == Mutant(path="a.py", old="x = 1\ny = 2", new="x = 2", tests=("tests/a.py", "tests/b.py::c[d e]"), why="why")
    assert entry.broken("if x = 1\ny = 2") == "if x = 2"
    with pytest.raises(ValueError, match="0 times"):
        entry.broken("x = 1")


def test_what_no_test_fails_of_is_not_noticed() -> None:
    assert noticed_by(Verdict(status=1, failed="tests/a.py::b", cpu_s=1.0)) == "tests/a.py::b"
    assert noticed_by(Verdict(status=2, failed="", cpu_s=1.0)) == "pytest ended with 2"
    assert noticed_by(Verdict(status=0, failed="", cpu_s=1.0)) == ""
    assert noticed_by(Verdict(status=-24, failed="", cpu_s=60.0)) == ""  # ended by its limit: a slow run proves nothing


def test_faults_are_found() -> None:
    row = {"break": ONE.name, "noticed_by": "tests/a.py::b"}
    assert faults([ONE], {ONE.name: row}) == []
    assert "not tried yet" in faults([ONE], {})[0]
    missed = {ONE.name: row | {"noticed_by": ""}}
    assert "no test notices" in faults([ONE], missed)[0]
    assert faults([replace(ONE, why="it cannot be seen")], missed) == ["0 of 1 breaks are noticed, fewer than 95%"]
    assert "no such tests" in faults([replace(ONE, tests=("tests/none.py",))], {})[0]
    assert "0 times" in faults([replace(ONE, old="nowhere in the file" + "!")], {ONE.name: row})[0]


def test_there_are_sixty_breaks_of_every_kind() -> None:
    assert len({mutant.name for mutant in TABLE}) == len(TABLE) >= 60
    for place in ("parsim/search/", "parsim/engines/", "parsim/costs/", "parsim/execute/", "parsim/relaxed/"):
        assert sum(mutant.path.startswith(place) for mutant in TABLE) >= 3, place


@pytest.mark.slow
def test_every_break_can_be_made_and_enough_are_noticed() -> None:
    assert faults(TABLE, recorded()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("value", "noticed"), [("2", ""), ("3", "test_it.py::test_sum")])
def test_tests_run_on_the_copy(tmp_path: Path, value: str, noticed: str) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "summed.py").write_text(f"TOTAL = {value}\n")
    (tree / "test_it.py").write_text("import summed\n\ndef test_sum():\n    assert summed.TOTAL == 2\n")
    verdict = run_tests(tree, [str(tree / "test_it.py")])
    assert noticed_by(verdict) == noticed, (tmp_path / mutants.LOG).read_text()
