"""The throttle of the race, and what its judge makes of results."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.adaptive.disturbing import Throttle
from experiments.adaptive.judge import PAIRS
from experiments.adaptive.judge import live_claims as claims
from experiments.common.claims import MET, MISSED, NOT_CHECKED
from parsim.execute.processes.output import rank_processes


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], env=os.environ | {"RANK": "1"})
    yield process
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_throttled_process_stands_still_at_times_and_goes_on_afterwards(busy: subprocess.Popen[bytes]) -> None:
    with Throttle(busy.pid, 5.0):
        looks = []
        for _ in range(60):
            looks.append(is_stopped(busy.pid))
            time.sleep(0.007)
    assert 0 < sum(looks) < 60  # four fifths on an idle machine; at a load of ten its times are late
    assert not is_stopped(busy.pid)


def test_a_process_that_ends_meanwhile_is_no_error(busy: subprocess.Popen[bytes]) -> None:
    with Throttle(busy.pid, 5.0):
        busy.kill()
        busy.wait()
        time.sleep(0.05)
    assert busy.returncode == -signal.SIGKILL


def test_the_process_of_a_rank_is_found_among_descendants_only(busy: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 10
    while 1 not in rank_processes(os.getpid()) and time.monotonic() < deadline:
        time.sleep(0.01)  # its environment can be read once it has been executed
    assert rank_processes(os.getpid())[1] == busy.pid
    assert 7 not in rank_processes(os.getpid())


def test_what_a_rank_has_started_is_no_rank() -> None:
    """A worker of a loader has its rank's variables."""
    starts = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(flush=True); input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", starts], env=os.environ | {"RANK": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()  # the child runs
        assert rank_processes(os.getpid())[1] == rank.pid


@pytest.mark.parametrize("factor", [1.0, 0.5, float("nan")])
def test_a_throttle_slows_down(factor: float) -> None:
    with pytest.raises(ValueError, match="above 1"):
        Throttle(1, factor)


def rows(sooner: int, switched_when_quiet: int = 0, kinds: tuple[str, ...] = ("link", "throttled")) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number in range(PAIRS):
        took = {"adaptive": 50.0 if number < sooner else 70.0, "start": 90.0, "other": 60.0}
        found += [
            {"pair": f"{kind} {number}", "way": way, "seconds": seconds, "switches": []}
            for kind in kinds
            for way, seconds in took.items()
        ]
        switches = [{"step": 3}] if number < switched_when_quiet else []
        found.append({"pair": f"quiet {number}", "way": "adaptive", "seconds": 30.0, "switches": switches})
    return found


@pytest.mark.parametrize(("sooner", "verdict"), [(10, MET), (8, MET), (7, MISSED)])
def test_eight_of_ten_pairs_win_the_race(sooner: int, verdict: str) -> None:
    assert [each.verdict for each in claims({"rows": rows(sooner)})] == [verdict, verdict, MET, NOT_CHECKED]


def test_a_race_that_could_not_be_run_says_why() -> None:
    found = claims({"rows": rows(10, kinds=("throttled",)), "no_link": "network namespaces need root"})
    assert [each.verdict for each in found[:2]] == [NOT_CHECKED, MET]
    assert found[0].found == "skipped: network namespaces need root"


def test_a_switch_without_a_disturbance_counts_against_it() -> None:
    assert claims({"rows": rows(10, switched_when_quiet=1)})[2].verdict == MISSED


def test_fewer_pairs_compare_nothing() -> None:
    assert {each.verdict for each in claims({"rows": rows(10)[: 7 * (PAIRS - 1)]})} == {NOT_CHECKED}


def test_losses_are_compared_to_the_end_and_only_if_the_plan_changed() -> None:
    straight = {"pair": "float64", "way": "start", "steps": 3, "losses": [3.0, 2.0, 1.0], "switches": []}
    changed = {**straight, "way": "adaptive", "switches": [{"step": 1}]}

    def verdict(*rows: dict[str, Any], weights: float | None = 0.0) -> str:
        return claims({"rows": list(rows), "weights_differ_by": weights})[3].verdict

    assert verdict(straight, changed) == MET
    assert verdict(straight, changed, weights=1e-9) == MISSED
    assert verdict(straight, changed, weights=None) == NOT_CHECKED
    assert verdict(straight, {**changed, "losses": [3.0, 2.0, 1.0 + 1e-9]}) == MISSED
    assert verdict(straight, {**changed, "switches": []}) == NOT_CHECKED
