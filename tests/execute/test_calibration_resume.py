"""A calibration stopped at any moment goes on, and never with what belongs to another one. Processes are really killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from calibration.rounds import turns
from calibration.rounds.calibrate import calibrate
from calibration.rounds.request import CalibrationRequest, load_raw, raw_path
from calibration.rounds.turns import START, SectionProgress, WorkFolder, alone, gather_raw, open_folder, read_progress
from parsim.errors import ConfigError, ExecutionError
from parsim.hardware.compose import load_profile
from parsim.model.spec import ModelSpec

MLP = ModelSpec(name="mlp", args=(("width", 64),), input_shape=(1, 32, 32))
REQUEST = CalibrationRequest(models=((MLP, (4, 8)),), quick=True, compute_budget_s=8.0, collective_budget_s=24.0)
PATIENCE_S = 120.0


def leave_turns(path: Path, count: int = 3) -> None:
    (path / START).write_text(json.dumps({"ranks": [{"device": {}}, {"device": {}}], "cases": [], "environment": {}}))
    for number in range(count):
        ranks = [{"sweeps": [{"value": number}]}, {"sweeps": []}]
        turn = {"section": "sweeps", "round": number, "time_s": 1.0, "seconds": 0.5, "ranks": ranks}
        (path / f"turn-{number:05d}.json").write_text(json.dumps(turn))


# --- what lies on disk ------------------------------------------------------------------------------------------------


def test_turns_are_gathered_by_rank_and_kind_with_their_rounds(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match="without a result"):
        gather_raw(tmp_path)
    leave_turns(tmp_path)
    (tmp_path / "turn-00003.json.partial").write_text('{"section": "sweeps", "rou')
    assert read_progress(tmp_path) == {"sweeps": SectionProgress(3, 1.5)}
    raw = gather_raw(tmp_path)
    assert raw["ranks"][0]["sweeps"] == [{"value": number, "round": number} for number in range(3)]
    assert raw["ranks"][1]["sweeps"] == []
    assert [entry["round"] for entry in raw["turns"]] == [0, 1, 2]
    (tmp_path / "turn-00001.json").write_text("{")
    with pytest.raises(ExecutionError, match=r"turn-00001.json.*calibrate again"):
        gather_raw(tmp_path)


def test_two_calibrations_never_write_one_profile(tmp_path: Path) -> None:
    """The second is told so before it touches anything; one that was killed holds nothing up."""
    out = tmp_path / "mine.json"
    hold = (
        "import pathlib, sys\nfrom calibration.rounds.turns import alone\n"
        "with alone(pathlib.Path(sys.argv[1])):\n print(1, flush=True)\n input()"
    )
    command = [sys.executable, "-c", hold, str(out)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ConfigError, match=r"another calibration is writing .*mine.json; wait until it"):
            calibrate(REQUEST, out)
        assert sorted(tmp_path.iterdir()) == before
    finally:
        other.kill()
        other.wait()
    with alone(out), alone(tmp_path / "yours.json"):
        assert (tmp_path / "mine.calibration.lock").is_file()
    assert not list(tmp_path.glob("*.lock"))


def test_a_leftover_of_the_same_request_is_used_and_of_another_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, lines = tmp_path / "mine.json", list[str]()
    with pytest.raises(ConfigError, match="nothing to resume"):
        open_folder(REQUEST, out, "require", lines.append)
    folder = open_folder(REQUEST, out, "use", lines.append)
    assert (folder, lines) == (WorkFolder.of(out), [])
    leave_turns(folder.path)
    for choice in ("use", "require"):
        assert open_folder(REQUEST, out, choice, lines.append) == folder
    assert lines == ["going on with the calibration that was stopped after 3 rounds"] * 2
    with pytest.raises(ConfigError, match=r"another request \(models.*--restart.*--out"):
        open_folder(replace(REQUEST, nproc=1), out, "use", lines.append)
    here = turns.describe_environment()
    versions = {**here["versions"], "torch": "0.1"}
    monkeypatch.setattr(turns, "describe_environment", lambda: {**here, "processor": "Z80", "versions": versions})
    with pytest.raises(ConfigError, match=r"another processor and another version of torch \(processor .*, Z80 now; torch"):
        open_folder(REQUEST, out, "require", lines.append)
    assert folder.has_turns
    assert not open_folder(REQUEST, out, "discard", lines.append).has_turns


def test_a_folder_without_turns_is_begun_anew(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    folder = open_folder(REQUEST, out, "use", lambda _: None)
    (folder.path / "model-0.json").write_text("half")
    other = replace(REQUEST, seed=1)
    open_folder(other, out, "use", lambda _: None)
    assert CalibrationRequest.from_json(folder.job.read_text()) == other
    assert not (folder.path / "model-0.json").exists()


# --- processes that are killed ----------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from calibration.rounds.calibrate import calibrate
from calibration.rounds.request import CalibrationRequest
calibrate(CalibrationRequest.from_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
"""


def wait_for_turns(folder: WorkFolder, count: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while len(list(folder.path.glob("turn-*.json"))) < count:
        assert time.monotonic() < end, f"fewer than {count} turns after {PATIENCE_S} s"
        time.sleep(0.02)


def kept_turns(folder: WorkFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.path.glob("turn-*.json"))}


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_a_killed_calibration_goes_on_where_it_was(tmp_path: Path) -> None:
    """kill -9 of the parent, then of a rank; the third start ends with a profile that holds the turns of all three."""
    out, job = tmp_path / "mine.json", tmp_path / "request.json"
    job.write_text(REQUEST.to_json())
    out.write_text("old")
    folder = WorkFolder.of(out)
    with subprocess.Popen([sys.executable, "-c", CHILD, str(job), str(out)]) as child:
        wait_for_turns(folder, 2)
        child.kill()
    first = kept_turns(folder)
    assert len(first) >= 2
    assert out.read_text() == "old"

    def kill_a_rank() -> None:
        wait_for_turns(folder, len(first) + 2)
        ranks = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and is_rank(entry, folder)]
        os.kill(ranks[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill_a_rank)
    killer.start()
    with pytest.raises(ExecutionError, match=r"SIGKILL.*what was measured is kept, call again to continue"):
        calibrate(REQUEST, out)
    killer.join()
    second = kept_turns(folder)
    assert len(second) >= len(first) + 2
    assert out.read_text() == "old"

    lines: list[str] = []
    calibrate(REQUEST, out, on_line=lines.append, leftover="require")
    assert f"going on with the calibration that was stopped after {len(second)} rounds" in lines
    assert not folder.path.exists()
    assert load_profile(str(out)).name == "mine"
    turns = load_raw(raw_path(out)).raw["turns"]
    kept = [json.loads(text) for text in second.values()]
    assert [(entry["section"], entry["round"], entry["time_s"]) for entry in turns[: len(kept)]] == [
        (entry["section"], entry["round"], entry["time_s"]) for entry in kept
    ]
    for section in {entry["section"] for entry in turns}:
        rounds = [entry["round"] for entry in turns if entry["section"] == section]
        assert rounds == list(range(len(rounds)))


def is_rank(process: str, folder: WorkFolder) -> bool:
    """Whether it is one of the measuring ranks of this folder."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_text().split("\0")
    except OSError:
        return False
    return str(folder.job) in command
