"""docs/large-models.md: five questions as a user would ask them, with the answers as the command prints them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "large_models"
PAGE = Path(__file__).parents[2] / "docs" / "large-models.md"


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> object:
    """The module that writes the page."""
    import importlib

    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "run", raising=False)
    return importlib.import_module("run")


def blocks() -> list[str]:
    return re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_page_holds_every_question_and_an_answer(questions: object) -> None:
    asked = questions.QUESTIONS  # type: ignore[attr-defined]
    assert len(asked) == len(blocks()) == 5
    answers = {}
    for question, block in zip(asked, blocks(), strict=True):
        first, _, printed = block.partition("\n")
        assert first == f"$ {question.command}"
        assert "tokens/s:" in printed
        assert "MFU" in printed
        answers[question.words] = printed
    assert questions.page(answers) == PAGE.read_text(encoding="utf-8")  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_the_answers_are_those_that_the_command_prints(questions: object, number: int) -> None:
    question = questions.QUESTIONS[number]  # type: ignore[attr-defined]
    printed = questions.answer(question)  # type: ignore[attr-defined]
    assert blocks()[number].partition("\n")[2].rstrip() == printed.rstrip()
