"""Faults of a real run, one launch for several promises: divergence, what the ranks listen on, where to go on."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from parsim.app.run_folder import RunFolder, held
from parsim.execute.checkpoint.checkpoint import latest_checkpoint, load_state
from parsim.execute.processes.output import descendants, rank_processes
from tests.execute.sockets import Socket, sockets_of
from tests.execute.test_bad_run import write_profile

RUN = """\
[model]
name = "mlp"
args = { width = 64 }
[cluster]
profile = "profile.json"
devices = 2
[training]
global_batch = 16
learning_rate = LEARNING_RATE
steps = STEPS
[plan]
strategy = "dp"
"""


def folder_with_run(folder: Path, *, steps: int, learning_rate: float = 0.02) -> Path:
    text = RUN.replace("LEARNING_RATE", str(learning_rate)).replace("STEPS", str(steps))
    (folder / "RUN.toml").write_text(text)
    write_profile(folder)
    return folder


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-m", "parsim", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net").is_dir(), reason="sockets are looked up in /proc")
@pytest.mark.xdist_group("launch")
def test_a_diverging_run_ends_with_one_message_and_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    """A learning rate of 1e30: the loss is not finite after a step or two. Its last checkpoint is of finite weights."""
    process = start(
        folder_with_run(tmp_path, steps=60, learning_rate=1e30), "run", "RUN.toml", "--out", "kept", "--checkpoint-every", "1"
    )
    seen: set[Socket] = set()
    while process.poll() is None:
        seen |= sockets_of({process.pid, *descendants([process.pid])})
        time.sleep(0.05)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (1, ""), stderr
    assert "Traceback" not in stderr
    (message,) = re.findall(r"^parsim: .*", stderr, re.MULTILINE)
    found = re.search(r"rank [01] of 2 stopped: training diverged: .* (?:of|after) step (\d+)\b", message)
    assert found, message
    assert re.search(r"on rank [01]\b", message)
    assert "training.learning_rate (1e+30)" in message
    last = latest_checkpoint(tmp_path / "kept" / "checkpoints")
    if last is not None:
        assert f"The checkpoint of step {last.step} of 60 is in " in message
        assert all(bool(value.isfinite().all()) for value in load_state(last).weights.values())
    assert not (tmp_path / "kept" / "result.json").exists()
    assert any(socket.listens for socket in seen), "gloo listens, else this test sees nothing"
    assert [socket for socket in sorted(seen) if not socket.stays_here] == []
    assert not list(tmp_path.glob("parsim-launch-*"))


def config_text(folder: Path, **changes: object) -> Path:
    """The run file with other values."""
    text = (folder / "RUN.toml").read_text()
    for key, value in changes.items():
        text, count = re.subn(rf"^{key} = .*$", f"{key} = {json.dumps(value)}", text, flags=re.MULTILINE)
        if not count:
            text = text.replace("[training]\n", f"[training]\n{key} = {json.dumps(value)}\n")
    path = folder / "CHANGED.toml"
    path.write_text(text)
    return path


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_a_finished_training_and_the_ways_to_go_on_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two launches: a training of 8 steps, and one more step, from the checkpoint before the newest one, which is damaged."""
    import parsim

    folder_with_run(tmp_path, steps=8)
    kept = tmp_path / "kept"
    first = parsim.run(tmp_path / "RUN.toml", out=kept, checkpoint_every=4)
    # A disk that was full at the report: the measured steps are there, and the same command makes the report of them.
    for lost in ("result.json", "timeline.json.gz", "report.html"):
        (kept / lost).unlink()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("parsim.app.train.launch_job", lambda *_, **__: pytest.fail("nothing is left to train"))
        again = parsim.run(tmp_path / "RUN.toml", out=kept, resume=True)
    assert again.comparison.to_dict() == first.comparison.to_dict()
    assert (kept / "result.json").is_file()
    assert (kept / "report.html").is_file()
    assert len(first.losses) == 8
    before = {path.name: path.read_bytes() for path in kept.iterdir() if path.is_file()}
    json.loads(before["result.json"], parse_constant=lambda text: pytest.fail(f"{text} in result.json"))

    again = parsim.run(tmp_path / "RUN.toml", out=kept, resume=True)
    assert {path.name: path.read_bytes() for path in kept.iterdir() if path.is_file()} == before
    assert again.step_s == first.step_s
    assert "has made its 8 steps" in again.warnings[-1]
    for changes, said in (
        ({"seed": 1}, "training.seed was 0, now 1"),
        ({"global_batch": 32}, "training.global_batch was 16, now 32"),
        ({"dtype": "float64"}, "training.dtype was 'float32', now 'float64'"),
        ({"dataset": "synthetic"}, "training.dataset was 'digits', now 'synthetic'"),
        ({"steps": 7}, "has made 8 steps already, and 7 are asked for"),
    ):
        with pytest.raises(parsim.ParsimError, match=said):
            parsim.run(config_text(tmp_path, **changes), out=kept, resume=True)
    with pytest.raises(parsim.ParsimError, match="is not a run folder"):
        parsim.run(tmp_path / "RUN.toml", out=tmp_path / "nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()
    with held(RunFolder(kept)), pytest.raises(parsim.ParsimError, match="another process is training in"):
        parsim.run(tmp_path / "RUN.toml", out=kept, resume=True)

    damaged = kept / "checkpoints" / "step-00000008" / "rank-0001.json"
    content = damaged.read_bytes()
    damaged.write_bytes(content.replace(b'"step": 8', b'"step": 9'))
    assert damaged.read_bytes() != content
    capsys.readouterr()
    longer = parsim.run(config_text(tmp_path, steps=5), out=kept, resume=True)
    assert "resumed at step 4" in (printed := capsys.readouterr().err), "one step before the end"
    assert longer.losses == pytest.approx(first.losses[:5], abs=1e-6)
    assert "rank-0001.json cannot be read" in printed
    assert any("rank-0001.json cannot be read" in warning for warning in longer.warnings)
    assert parsim.open_run(kept).step_s == longer.step_s

    for path in kept.glob("checkpoints/*/rank-0000.pt"):
        path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(parsim.ParsimError, match=r"no checkpoint in .* can be read"):
        parsim.run(config_text(tmp_path, steps=20), out=kept, resume=True)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_stopped_ranks_are_named_and_the_training_goes_on_from_where_the_message_says(tmp_path: Path) -> None:
    folder = folder_with_run(tmp_path, steps=100_000)
    process = start(folder, "run", "RUN.toml", "--out", "kept", "--checkpoint-every", "5", "--timeout", "3")
    pids = wait_for_training(folder / "kept", process)
    for rank in (0, 1):
        os.kill(pids[rank], signal.SIGSTOP)
    begin_s = time.monotonic()
    stderr = process.communicate()[1]
    assert process.returncode == 1
    assert time.monotonic() - begin_s < 90
    (message,) = re.findall(r"^parsim: .*", stderr, re.MULTILINE)
    assert message.startswith("parsim: ranks 0, 1 of 2 have been stopped for 3 s"), message
    assert_resumable(folder, message)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize(
    ("number", "every"),
    [(signal.SIGINT, ()), (signal.SIGTERM, ("--checkpoint-every", "5"))],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_training_that_is_ended_says_where_it_goes_on(tmp_path: Path, number: signal.Signals, every: tuple[str, ...]) -> None:
    """Also where nobody says how often checkpoints are written: within seconds."""
    folder = folder_with_run(tmp_path, steps=100_000)
    process = start(folder, "run", "RUN.toml", "--out", "kept", *every)
    wait_for_training(folder / "kept", process)
    process.send_signal(number)
    stderr = process.communicate()[1]
    assert process.returncode == 128 + number, stderr
    (message,) = re.findall(r"^parsim: .*", stderr, re.MULTILINE)
    assert message.startswith(f"parsim: ended by {number.name}.")
    assert_resumable(folder, message)


def wait_for_training(kept: Path, process: subprocess.Popen[str]) -> dict[int, int]:
    """Until a whole checkpoint is there; the process of every rank."""
    while latest_checkpoint(kept / "checkpoints") is None:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    return rank_processes(process.pid)


def assert_resumable(folder: Path, message: str) -> None:
    """Nothing is left but whole checkpoints, and the command that the message ends with is right."""
    found = re.search(r"checkpoint of step (\d+) of 100000 is in \S+; continue with: (parsim run .* --resume)$", message)
    assert found, message
    last = latest_checkpoint(folder / "kept" / "checkpoints")
    assert last is not None
    assert last.step == int(found[1])
    assert list(folder.rglob("*.partial")) == []
    assert not list(folder.glob("parsim-launch-*"))
    for place in (folder / "kept" / "checkpoints").iterdir():
        assert {path.name for path in place.iterdir()} == {f"rank-000{rank}.{end}" for rank in (0, 1) for end in ("pt", "json")}
    arguments = shlex.split(found[2])[1:]
    done = subprocess.run(
        [sys.executable, "-m", "parsim", *arguments, "--set", f"training.steps={last.step + 1}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net").is_dir(), reason="sockets are looked up in /proc")
@pytest.mark.xdist_group("launch")
def test_a_calibration_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    folder_with_run(tmp_path, steps=1)
    process = start(tmp_path, "calibrate", "RUN.toml", "--out", "here.json", "--quick", "--nproc", "2")
    seen: set[Socket] = set()
    while process.poll() is None:
        seen |= sockets_of({process.pid, *descendants([process.pid])})
        time.sleep(0.1)
    assert process.returncode == 0, process.communicate()[1]
    assert any(socket.listens for socket in seen)
    assert [socket for socket in sorted(seen) if not socket.stays_here] == []
