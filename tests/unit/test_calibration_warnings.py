"""The warnings of a calibration as they are printed."""

from __future__ import annotations

from calibration.rounds.calibrate import warning_lines


def test_of_many_discarded_timings_the_first_few_are_printed_and_the_others_counted() -> None:
    discarded = [f"left out forward of layer{number}" for number in range(15)]
    lines = warning_lines([*discarded, "other programs had 87.9% of the cores"])
    assert lines[:3] == [f"warning: {text}" for text in discarded[:3]]
    assert lines[3] == "warning: other programs had 87.9% of the cores"
    assert lines[4].startswith("warning: 12 more implausible timings were left out")
    assert len(lines) == 5


def test_few_warnings_are_printed_as_they_are() -> None:
    few = ["left out forward of conv1", "other programs had 30% of the cores"]
    assert warning_lines(few) == [f"warning: {text}" for text in few]
