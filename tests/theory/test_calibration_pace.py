"""Measurements at one pace: what is left when cores flip between two speeds, and what is said where nobody looked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from calibration.fit.drift import noise_of, rank_sigma
from calibration.rounds.pace import Pace, at_one_pace, usual_pace
from calibration.rounds.turns import paced
from parsim.execute.processes.speed_probe import SpeedProbe

FAST_S, SLOW_S = 6e-3, 10e-3


def flipping(rounds: int, *, noise: float = 0.0) -> dict[str, Any]:
    """Two ranks whose cores are fast or slow, each by itself from round to round; a step of 1 s at a pace of 8 ms."""
    rng = np.random.default_rng(5)
    ranks = []
    for _ in range(2):
        paces = rng.choice([FAST_S, SLOW_S], size=rounds)
        sweeps = []
        for number, pace in enumerate(paces):
            seconds = pace / 8e-3 * np.exp(noise * rng.standard_normal())
            what = {"model": 0, "samples": 4, "ranks_active": 2, "optimizer": "sgd", "round": number}
            rest = {"gap_s": 0.1 * seconds, "rest_s": 0.0, "wall_s": seconds, "cpu_s": seconds}
            sweeps.append({**what, "seconds": [seconds], **rest, "pace_s": [pace, pace]})
        ranks.append(
            {"sweeps": sweeps, "shards": [{"model": 0, "pace_s": [SLOW_S, SLOW_S], "parts": []}], "device": {"name": "x"}}
        )
    return {"ranks": ranks, "cases": []}


def test_at_one_pace_cores_that_flip_are_steady() -> None:
    raw = flipping(40)
    usual = usual_pace(raw)
    assert usual is not None
    assert usual.alone_s == usual.together_s == pytest.approx(np.mean([s["pace_s"] for r in raw["ranks"] for s in r["sweeps"]]))
    steady = at_one_pace(raw, usual)
    for rank in steady["ranks"]:
        for sweep in rank["sweeps"]:
            assert sweep["seconds"] == [pytest.approx(usual.together_s / 8e-3)]
            assert sweep["gap_s"] == pytest.approx(0.1 * sweep["wall_s"])
            assert sweep["cpu_s"] == sweep["wall_s"]
    assert [rank["shards"] for rank in steady["ranks"]] == [rank["shards"] for rank in raw["ranks"]]


def test_each_level_has_its_own_pace() -> None:
    sweeps = [
        {"ranks_active": level, "pace_s": [pace - 1e-3, pace + 1e-3], "seconds": [1.0]}
        for level, pace in ((1, 4e-3), (2, 8e-3), (1, 6e-3))
    ]
    raw = {
        "ranks": [
            {
                "sweeps": [
                    {**sweep, "gap_s": 0, "rest_s": 0, "wall_s": 1, "cpu_s": 1, "load_again_s": sweep["seconds"][0]}
                    for sweep in sweeps
                ]
            }
        ]
    }
    assert usual_pace(raw) == Pace(5e-3, 8e-3)
    steady = at_one_pace(raw, usual_pace(raw))["ranks"][0]["sweeps"]
    found = [sweep["seconds"][0] for sweep in steady]
    assert found == [sweep["load_again_s"] for sweep in steady]
    assert found == pytest.approx([5 / 4, 1.0, 5 / 6])


def test_a_look_counts_for_what_it_tells() -> None:
    """Looks that are all noise change nothing; of half noise, half of their distance counts, and the mean step stays."""
    rng = np.random.default_rng(3)

    def told(noise: float, speed: float = 0.2) -> tuple[Pace, list[float]]:
        sweeps = []
        for _ in range(4000):
            true = 8e-3 * np.exp(speed * rng.standard_normal())
            looks = (true * np.exp(noise * rng.standard_normal(2))).tolist()
            rest = {"gap_s": 0.0, "rest_s": 0.0, "wall_s": 1.0, "cpu_s": 1.0}
            sweeps.append({"ranks_active": 2, "pace_s": looks, "seconds": [true / 8e-3], **rest})
        raw = {"ranks": [{"sweeps": sweeps}]}
        usual = usual_pace(raw)
        assert usual is not None
        return usual, [sweep["seconds"][0] for sweep in at_one_pace(raw, usual)["ranks"][0]["sweeps"]]

    assert told(0.0)[0].probe_reliability == pytest.approx(1.0)
    assert told(0.2, speed=0.0)[0].probe_reliability < 0.1
    usual, seconds = told(0.2)
    assert usual.probe_reliability == pytest.approx(2 / 3, abs=0.05)
    assert np.std(np.log(seconds)) == pytest.approx(0.2 * np.sqrt(1 / 3), rel=0.1)
    assert np.mean(seconds) == pytest.approx(np.mean(np.exp(0.2 * rng.standard_normal(4000))), rel=0.03)


def test_every_timing_of_a_nested_entry_is_divided() -> None:
    raw = {
        "ranks": [
            {
                "collectives": [{"seconds": [[1.0, 2.0], [3.0, 4.0]], "pace_s": [3e-3, 5e-3]}],
                "overlap": [
                    {"computation": [1.5], "communication_s": [2.0, 4.0], "pace_s": [3e-3, 5e-3]},
                    {"communication_s": [1.0]},
                ],
            }
        ]
    }
    (rank,) = at_one_pace(raw, Pace(1e-3, 2e-3))["ranks"]
    assert rank["collectives"][0]["seconds"] == [[0.5, 1.0], [1.5, 2.0]]
    assert rank["overlap"] == [
        {"computation": [1.5], "communication_s": [1.0, 2.0], "pace_s": [3e-3, 5e-3]},
        {"communication_s": [1.0]},
    ]


def test_the_profile_says_how_much_of_the_ranks_noise_the_pace_explains() -> None:
    raw = flipping(400, noise=0.05)
    usual = usual_pace(raw)
    found = noise_of(raw, usual, at_one_pace(raw, usual))
    assert found.probe is not None
    assert found.rank_sigma == rank_sigma(raw) > 0.2
    assert found.probe.rank_sigma == pytest.approx(0.05, rel=0.1)


def test_where_nobody_looked_all_is_as_it_was() -> None:
    raw = flipping(4)
    for rank in raw["ranks"]:
        rank["sweeps"] = [{key: value for key, value in sweep.items() if key != "pace_s"} for sweep in rank["sweeps"]]
    assert usual_pace(raw) is None
    assert at_one_pace(raw, None) is raw
    assert noise_of(raw, None, raw).probe is None


def test_a_stretch_has_the_paces_before_and_after_it() -> None:
    class Clock(SpeedProbe):
        """Takes 1 ms, then 3, then 5."""

        def __init__(self) -> None:
            self.next_s = -1e-3

        def seconds(self) -> float:
            self.next_s += 2e-3
            return self.next_s

    blocks = [lambda: [{"a": 1}, {"a": 2}], lambda: [{"a": 3}]]
    found = list(paced(blocks, Clock()))
    assert [entry["a"] for entry in found] == [1, 2, 3]
    assert [entry["pace_s"] for entry in found] == [pytest.approx(pair) for pair in ([1e-3, 3e-3], [1e-3, 3e-3], [3e-3, 5e-3])]
    assert list(paced(blocks, None)) == [{"a": 1}, {"a": 2}, {"a": 3}]
