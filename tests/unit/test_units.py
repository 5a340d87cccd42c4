"""Texts of quantities: three digits in the unit that fits, the same for people in tables, sentences, figures and pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.errors import PlanError
from parsim.execute.processes.output import MARK, Progress, progress_text, read_progress_line, relayed, write_progress
from parsim.plans.mesh import Mesh
from parsim.units import divisors, format_energy, format_money, format_seconds, three_digits


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (4.5e-9, "4.5 ns"),
        (0.9997, "1,000 ms"),
        (59.0, "59 s"),
        (3600.0, "1 h 00 min"),
        (7500.0, "2 h 05 min"),
        (302_400.0, "3.5 days"),
        (86_400.0 * 1200, "1,200 days"),
        (float("nan"), "n/a"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0, "0.00 USD"),
        (0.012345, "0.0123 USD"),
        (45.6, "45.60 USD"),
        (12_345.4, "12,345 USD"),
        (10_950_942.43, "10.95 million USD"),
        (2.5e9, "2,500 million USD"),
    ],
)
def test_money(usd: float, text: str) -> None:
    assert format_money(usd) == text
    assert format_money(usd, "EUR") == text.replace("USD", "EUR")


def test_energy() -> None:
    assert (format_energy(0.5), format_energy(45.62), format_energy(355_700)) == ("0.5 kWh", "45.6 kWh", "355.7 MWh")


@given(st.floats(1e-9, 1e12))
def test_money_keeps_three_digits_and_no_power_of_ten(usd: float) -> None:
    text = format_money(usd).removesuffix(" USD")
    number = float(text.removesuffix(" million").replace(",", "")) * (1e6 if text.endswith("million") else 1)
    assert number == pytest.approx(usd, rel=5e-3)
    assert "e" not in text or usd < 1e-4


@given(st.floats(1e-4, 999_999))
def test_three_digits_are_never_a_power_of_ten(value: float) -> None:
    text = three_digits(value)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=5.1e-3)


# Divisors, of sizes that somebody gave by mistake too.


def test_divisors_are_those_of_trial_division() -> None:
    for number in range(1, 200):
        assert divisors(number) == tuple(one for one in range(1, number + 1) if number % one == 0)


def test_those_of_large_numbers_take_no_time() -> None:
    assert len(divisors(10**9)) == 100
    with pytest.raises(PlanError, match="the nearest below that does: 500000000"):
        Mesh(dp=10**9, ep=10**9 - 1)


# The one line protocol between a rank and its parent: what is written is read back, and nothing else is taken for it.


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
