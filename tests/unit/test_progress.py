"""The one line protocol between a rank and its parent: what is written is read back, and nothing else is taken for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.execute.processes.output import MARK, Progress, progress_text, read_progress_line, relayed, write_progress


@given(st.one_of(st.text(), st.dictionaries(st.text(), st.text())))
def test_what_is_written_is_read_back(progress: Progress) -> None:
    """Whatever is in it: line breaks, quotes and other alphabets stay within the one line."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda line, flush: lines.append(line))
        write_progress(progress)
    (line,) = lines
    assert "\n" not in line
    assert line.isascii()
    assert read_progress_line(line) == progress


def test_other_lines_are_no_progress(capfd: pytest.CaptureFixture[str]) -> None:
    write_progress({"step": "3/10", "loss": "1.25"})
    write_progress("nothing is left to measure")
    texts: list[str] = []
    hand_on = relayed(texts.append)
    for line in ["UserWarning: something", f" {MARK}{{}}", *capfd.readouterr().out.splitlines()]:
        hand_on(line)
    assert texts == ["step 3/10, loss 1.25", "nothing is left to measure"]
    assert progress_text({}) == ""
