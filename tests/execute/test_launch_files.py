"""Files that launch a training elsewhere: their text, a run by the torchrun one, and one over two network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("torch")

from experiments.this_machine.namespaces import ADDRESSES, INTERFACE, NAMES, possible, shaped_pair
from parsim.app.foreign import export_folder
from parsim.app.functions import plan
from parsim.app.run_folder import RunFolder, held
from parsim.errors import ConfigError, PlanError
from parsim.execute.checkpoint.checkpoint import latest_checkpoint, load_state
from parsim.execute.processes.output import descendants
from parsim.formats.launch import LaunchFile, slurm_text, torchrun_text
from tests.execute.rank_states import newest
from tests.execute.sockets import LISTEN, Socket, free_port, sockets_of
from tests.execute.test_bad_run import write_profile

RUN = """\
[model]
name = "mlp"
args = { width = 24 }
[cluster]
profile = "profile.json"
devices = 2
[training]
global_batch = 16
dtype = "float64"
steps = 12
[plan]
strategy = "dp"
zero_stage = 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A simulated plan of two ranks, as `parsim simulate --out` leaves it."""
    from parsim.app.write_folder import write_prediction

    monkeypatch.chdir(tmp_path)
    write_profile(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    write_prediction(RunFolder(tmp_path / "kept"), plan("run.toml").chosen)
    return tmp_path / "kept"


def test_the_torchrun_file_says_what_the_plan_needs(folder: Path) -> None:
    done = export_folder(folder, format="torchrun", checkpoint_every=4)
    file = done.file
    text = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o700
    subprocess.run(["bash", "-n", file], check=True)
    assert "--nnodes 1 " in text
    assert "--nproc-per-node 2 " in text
    assert "--rdzv-backend parsim " in text
    assert 'MASTER_ADDR="127.0.0.1"' in text
    assert "GLOO_SOCKET_IFNAME=lo " in text
    job = json.loads((folder / "job.json").read_text())
    assert (job["steps"], job["checkpoint_every"], job["resume"]) == (12, 4, True)
    assert "MAX_RESTARTS:-3" in text, "the agent of one machine restarts its ranks"
    other = export_folder(folder, format="torchrun", out=folder / "again.sh").file.read_text()
    token = next(line for line in text.splitlines() if "PARSIM_TOKEN" in line)
    assert token not in other


def test_several_machines_need_an_interface_that_both_files_bind_to(folder: Path) -> None:
    with pytest.raises(PlanError, match="--interface eth0"):
        export_folder(folder, format="torchrun", nodes=2)
    with pytest.raises(PlanError, match="2 ranks cannot be divided evenly over 3 machines"):
        export_folder(folder, format="slurm", nodes=3, interface="ib0")
    with pytest.raises(ConfigError, match="is not the name of a network interface"):
        export_folder(folder, format="slurm", interface="eth0; rm -rf /")
    with pytest.raises(ConfigError, match="did you mean slurm"):
        export_folder(folder, format="slurn")
    for format in ("torchrun", "slurm"):
        file = export_folder(folder, format=format, nodes=2, interface="ib0", port=31000).file
        text = file.read_text()
        subprocess.run(["bash", "-n", file], check=True)
        assert 'PARSIM_RENDEZVOUS="$MASTER_ADDR:31000"' in text
        assert "addr show dev ib0" in text
        (line,) = [line for line in text.splitlines() if "NCCL_SOCKET_IFNAME" in line]
        told = subprocess.check_output(["bash", "-c", f'{line}; echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"'])
        assert told == b"ib0 =ib0\n", "NCCL reads a name as the beginning of names: ib0 would be ib0.3000 too"
        # agents count their own restarts: ranks of different attempts would wait for one another
        assert format == "slurm" or ("MAX_RESTARTS:-0" in text and "run the file again on all machines" in text)


def test_slurm_chooses_the_gpus_of_its_jobs_itself(tmp_path: Path) -> None:
    """It hands a job its GPUs as 0, 1, ...; numbers of the machine would name others, or none."""
    launch = replace(hostile(tmp_path / "kept"), visible="2,3")
    assert "export CUDA_VISIBLE_DEVICES=2,3" in torchrun_text(launch)
    assert "CUDA_VISIBLE_DEVICES" not in slurm_text(launch)
    assert "--gpus-per-node=2" in slurm_text(launch)


def hostile(folder: Path, *, name: str = "mlp") -> LaunchFile:
    folder.mkdir()
    return LaunchFile(
        name=name,
        job=folder / "job.json",
        nodes=1,
        per_node=2,
        interface="lo",
        port=29500,
        device="cuda",
        visible="1;touch visible",
        import_folder="a\ntouch imported\n$(touch substituted)",
        token="0" * 64,
    )


def test_no_name_in_a_script_is_a_command(tmp_path: Path) -> None:
    """Started with a stub for Python, a script runs nothing but its own commands, and the worker gets the job's own path."""
    launch = hostile(tmp_path / "a\ntouch folder; $(touch quoted) '\"", name="mlp\ntouch name")
    script = tmp_path / "launch.sh"
    script.write_text(torchrun_text(launch))
    stub = tmp_path / "stub"
    stub.write_text('#!/bin/sh\nfor last; do :; done; printf %s "$last" > "$SEEN"\n')
    stub.chmod(0o700)
    empty, seen = tmp_path / "empty", tmp_path / "seen"
    empty.mkdir()
    subprocess.run(["bash", script], check=True, cwd=empty, env={**os.environ, "PYTHON": str(stub), "SEEN": str(seen)})
    assert seen.read_text() == str(launch.job)
    assert not list(empty.iterdir())


def test_a_directive_of_slurm_holds_one_line_of_a_folder(tmp_path: Path) -> None:
    for name in ("a\n#SBATCH --wrap=x", "a'b", 'a"b', "a\\b", "a\tb"):
        with pytest.raises(ConfigError, match="which a directive of Slurm cannot hold; rename the folder"):
            slurm_text(hostile(tmp_path / name, name="mlp\n#SBATCH --wrap=x"))
    lines = slurm_text(hostile(tmp_path / "50% of it", name="mlp\n#SBATCH --wrap=x")).splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert directives[-1].endswith(r"/50%%\ of\ it/slurm-%j.log")
    assert directives[0] == "#SBATCH --job-name=mlp--SBATCH---wrap-x"
    assert len(directives) == 6


FAKE_SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
if [[ "$*" == *"addr show"* ]]; then exec "$@"; fi
for number in 0 1; do SLURM_PROCID=$number SLURM_LOCALID=$number SLURM_NTASKS=2 "$@" & done
wait -n && wait -n || { status=$?; kill $(jobs -p); wait; exit $status; }
"""


def with_slurm(tmp_path: Path) -> dict[str, str]:
    """Slurm is played by two small scripts: they start the ranks with the variables that srun sets."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", "#!/bin/sh\necho here\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    own = {"PYTHON": sys.executable, "SLURM_JOB_NODELIST": "here", "MASTER_ADDR": "127.0.0.1"}
    return {**os.environ, **own, "PATH": f"{tools}:{os.environ['PATH']}"}


def weights_of(kept: Path) -> dict[str, object]:
    last = newest(kept / "checkpoints")
    assert last.step == 12
    return dict(load_state(last).weights)


def assert_equal_to_one_process(kept: Path) -> None:
    import torch

    from experiments.common.reference import train_reference
    from parsim.execute.job import Job
    from parsim.execute.rank_run import run_dataset

    (run,) = Job.load(kept / "job.json").runs
    expected = train_reference(
        run.model,
        run.plan,
        run_dataset(run, "train"),
        optimizer=run.optimizer,
        learning_rate=run.learning_rate,
        dtype=torch.float64,
        seed=run.seed,
        steps=12,
    )
    found = weights_of(kept)
    for name, value in expected.parameters.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-10), name  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize("format", ["torchrun", "slurm"])
def test_a_launch_file_trains_to_the_weights_of_one_process(folder: Path, tmp_path: Path, format: str) -> None:
    file = export_folder(folder, format=format, port=free_port(), interface="lo").file
    environment = with_slurm(tmp_path)
    said = tmp_path / "said"
    with said.open("w") as out:
        running = subprocess.Popen(["bash", file], env=environment, stdout=out, stderr=subprocess.STDOUT)
    held: set[Socket] = set()
    try:
        while running.poll() is None:
            held |= sockets_of([running.pid, *descendants([running.pid])])
            time.sleep(0.05)
    finally:
        running.kill()
    assert running.returncode == 0, said.read_text()
    assert held, "ranks met over the loopback"
    assert [entry for entry in held if not entry.stays_here] == []
    assert_equal_to_one_process(folder)
    if format == "torchrun":
        run_again(file, environment | {"MAX_RESTARTS": "0"}, folder)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("format", ["torchrun", "slurm"])
def test_a_stopped_rank_of_a_launch_file_is_named_and_the_training_ends(folder: Path, tmp_path: Path, format: str) -> None:
    lengthen(folder)
    file = export_folder(folder, format=format, port=free_port(), interface="lo", checkpoint_every=20).file
    environment = {**with_slurm(tmp_path), "TIMEOUT": "3", "MAX_RESTARTS": "0", "TMPDIR": str(tmp_path)}
    said = tmp_path / "said"
    with said.open("w") as out:
        running = subprocess.Popen(["bash", file], env=environment, stdout=out, stderr=subprocess.STDOUT)
    stopped = 0
    try:
        deadline = time.monotonic() + 300
        while not newest_step(folder):
            assert running.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.1)
        ranks = [pid for pid in descendants([running.pid]) if b"parsim.execute.processes.rank" in command_of(pid)]
        assert len(ranks) == 2
        stopped = ranks[0]
        os.kill(stopped, signal.SIGSTOP)
        assert running.wait(timeout=150) != 0
        assert "of 2 has been stopped for 3 s (by a SIGSTOP, a debugger, or job control). It was ended" in said.read_text()
        assert not [pid for pid in ranks if command_of(pid)], "a rank is left"
        assert not list(tmp_path.glob("parsim-launch-*"))
    finally:
        running.kill()
        for pid in {stopped} - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def newest_step(kept: Path) -> int:
    last = latest_checkpoint(kept / "checkpoints")
    return 0 if last is None else last.step


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def run_again(file: str, environment: dict[str, str], kept: Path) -> None:
    """While another training holds the folder, and after it has let go: the training has ended, and stays as it is."""
    before = {path: path.read_bytes() for path in (*kept.glob("run/*"), kept / "score.json", kept / "metrics.jsonl")}
    assert len(before) == 6
    with held(RunFolder(kept)):
        refused = subprocess.run(["bash", file], env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "another training runs in" in refused.stderr
    done = subprocess.run(["bash", file], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "has ended at step 12: nothing is left to do" in done.stdout + done.stderr
    assert {path: path.read_bytes() for path in before} == before


def listening_in(name: str) -> set[tuple[str, int]]:
    """Addresses and ports of a namespace on which somebody listens."""
    shown = subprocess.run(["ip", "netns", "exec", name, "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True)
    found = set()
    for line in shown.stdout.splitlines()[1:]:
        address, _, number = line.split()[1].partition(":")
        if line.split()[3] == LISTEN:
            found.add((".".join(str(part) for part in reversed(bytes.fromhex(address))), int(number, 16)))
    return found


@contextlib.contextmanager
def two_machines(file: str, **more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The torchrun file on both, each in a namespace of its own, over a link of 20 Mbit/s; what they say is beside the file."""
    with shaped_pair(2.5e6), contextlib.ExitStack() as stack:
        running = []
        for rank, name in enumerate(NAMES):
            out = stack.enter_context(said_by(file, rank).open("w"))
            own = {"PYTHON": sys.executable, "NODE_RANK": str(rank), "MASTER_ADDR": ADDRESSES[0], **more}
            command = ["ip", "netns", "exec", name, "bash", file]
            running.append(
                subprocess.Popen(command, env={**os.environ, **own}, stdout=out, stderr=subprocess.STDOUT, text=True)
            )
        try:
            yield running
        finally:
            for pid in descendants([process.pid for process in running]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in running:
                process.kill()
                process.wait()


def said_by(file: str, rank: int) -> Path:
    return Path(file).with_name(f"said-{rank}")


def ended(file: str, running: list[subprocess.Popen[str]], timeout_s: float) -> tuple[list[int], str]:
    """Exit status of both, and all they said."""
    deadline = time.monotonic() + timeout_s
    statuses = [process.wait(timeout=max(1.0, deadline - time.monotonic())) for process in running]
    return statuses, said_by(file, 0).read_text() + said_by(file, 1).read_text()


STORES = (29500, 29501)
"""Ports of the agents' store and of the ranks'."""
STRANGER = ["ip", "netns", "exec", NAMES[1], sys.executable, str(Path(__file__).with_name("stranger.py"))]


class TestTwoMachines:
    """What SECURITY.md and docs/training.md promise of an exported run, tried over two network namespaces."""

    pytestmark: ClassVar = [
        pytest.mark.slow,
        pytest.mark.xdist_group("launch"),
        pytest.mark.skipif(bool(possible()), reason=possible()),
    ]

    def test_they_train_to_the_weights_of_one_process(self, folder: Path) -> None:
        file = export_folder(folder, format="torchrun", interface=INTERFACE, nodes=2).file
        listening: set[tuple[str, int]] = set()
        with two_machines(file) as running:
            while 29500 not in {port for _, port in listening} and all(one.poll() is None for one in running):
                time.sleep(0.05)
                listening |= listening_in(NAMES[0])
            statuses, said = ended(file, running, 900)
        assert statuses == [0, 0], said
        assert {port for _, port in listening} >= {29500, 29501}
        assert {address for address, _ in listening} == {ADDRESSES[0]}
        assert_equal_to_one_process(folder)

    def test_a_stopped_rank_is_named_and_both_end(self, folder: Path) -> None:
        lengthen(folder)
        file = export_folder(folder, format="torchrun", interface=INTERFACE, nodes=2, checkpoint_every=20).file
        with two_machines(file, TIMEOUT="3") as running:
            wait_for_a_checkpoint(folder, file, running)
            stopped = next(pid for pid in descendants([running[1].pid]) if b"parsim.execute.processes.rank" in command_of(pid))
            os.kill(stopped, signal.SIGSTOP)
            statuses, said = ended(file, running, 150)
        assert 0 not in statuses
        assert "rank 1 of 2 has been stopped for 3 s" in said
        assert not command_of(stopped), "a rank is left"

    def test_a_machine_that_vanishes_ends_the_run_within_two_minutes(self, folder: Path) -> None:
        """The link is cut, which no end hears of. Collectives would wait for ten minutes."""
        lengthen(folder)
        file = export_folder(folder, format="torchrun", interface=INTERFACE, nodes=2, checkpoint_every=20).file
        with two_machines(file, MAX_RESTARTS="0") as running:
            wait_for_a_checkpoint(folder, file, running)
            subprocess.run(["ip", "netns", "exec", NAMES[1], "ip", "link", "set", INTERFACE, "down"], check=True)
            statuses, said = ended(file, running, 150)
        assert 0 not in statuses
        assert "rank 0 was ended: another rank has left the run, or its machine is gone" in said, said
        assert "rank 1 was ended: the machine of rank 0 is gone" in said, said

    def test_a_stranger_at_the_stores_changes_nothing(self, folder: Path, tmp_path: Path) -> None:
        """It tries to list, overwrite and delete the keys of agents and ranks, as long as the training lasts."""
        file = export_folder(folder, format="torchrun", interface=INTERFACE, nodes=2).file
        told = tmp_path / "told"
        with (
            two_machines(file) as running,
            told.open("w") as out,
            subprocess.Popen([*STRANGER, "store"], stdin=subprocess.PIPE, stdout=out, text=True) as stranger,
        ):
            assert stranger.stdin is not None
            while all(process.poll() is None for process in running):
                for _, port in listening_in(NAMES[0]) & {(ADDRESSES[0], own) for own in STORES}:
                    print(ADDRESSES[0], port, file=stranger.stdin, flush=True)
                time.sleep(0.5)
            statuses, said = ended(file, running, 60)
            stranger.kill()
        assert statuses == [0, 0], said
        assert "changed the store" not in told.read_text()
        assert {f"sent away from {port}" for port in STORES} <= set(told.read_text().splitlines())
        assert_equal_to_one_process(folder)

    def test_noise_on_the_ports_of_a_start_costs_at_most_that_start(self, folder: Path) -> None:
        """64 KiB of zeros to every port that machine 0 opens; without them the same file then trains."""
        file = export_folder(folder, format="torchrun", interface=INTERFACE, nodes=2).file
        met: set[tuple[str, int]] = set()
        with (
            two_machines(file, TIMEOUT="10") as running,
            subprocess.Popen([*STRANGER, "noise"], stdin=subprocess.PIPE, text=True) as noise,
        ):
            assert noise.stdin is not None
            deadline = time.monotonic() + 300
            ends_s: dict[int, float] = {}
            while len(ends_s) < len(running) and time.monotonic() < deadline:
                for address, port in sorted(listening_in(NAMES[0]) - met):
                    met.add((address, port))
                    print(address, port, file=noise.stdin, flush=True)
                time.sleep(0.02)
                ends_s |= {
                    rank: time.monotonic() for rank, one in enumerate(running) if rank not in ends_s and one.poll() is not None
                }
            statuses, said = ended(file, running, 5)
            noise.stdin.close()
        assert len(met) > 2, "the ranks have ports of their own"
        assert max(ends_s.values()) - min(ends_s.values()) < 60, "one machine leaves the other waiting"
        assert "Traceback" not in said or 0 not in statuses
        if statuses != [0, 0]:
            with two_machines(file) as running:
                statuses, said = ended(file, running, 900)
        assert statuses == [0, 0], said
        assert_equal_to_one_process(folder)


def lengthen(folder: Path) -> None:
    """Far longer than a test waits."""
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("steps = 12", "steps = 100000"))


def wait_for_a_checkpoint(folder: Path, file: str, running: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 300
    while not newest_step(folder):
        assert all(process.poll() is None for process in running), said_by(file, 0).read_text() + said_by(file, 1).read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
