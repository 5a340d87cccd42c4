"""docs/behaviour.md is made of the headings of tests and findings, and is up to date."""

from __future__ import annotations

import pytest

from tools.behaviour import HEADING, PAGE, ROOT, behaviours, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.behaviour"


def test_every_finding_is_a_row() -> None:
    rows = behaviours()
    scripts = {f"findings/{file.name}" for file in (ROOT / "findings").glob("*.sh")}
    assert scripts <= {row.test for row in rows}
    assert len({row.test for row in rows}) == len(rows) >= 60


@pytest.mark.parametrize(
    ("text", "package"),
    [
        ("torch 2.13: MAX loses a NaN.", "torch 2.13"),
        ("torch 2.13, gloo: MAX loses a NaN.", "torch 2.13, gloo"),
        ("torchtitan 0.2.2, Megatron-Core 0.16: two.", "torchtitan 0.2.2, Megatron-Core 0.16"),
        ("Offset 1: one GPU sends.", None),
        ("As torch 2.13 does: nothing.", None),
    ],
)
def test_headings_name_a_package_and_its_release(text: str, package: str | None) -> None:
    found = HEADING.fullmatch(text)
    assert (found and found[1]) == package
