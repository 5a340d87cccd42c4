"""Faults at random moments of real trainings: none may lose a step, leave a process or a half written file, or go unnamed.

`python -m tests.chaos.chaos --count 200 --seconds 7200` trains, disturbs each training once, resumes it, and prints a table:
fault, tried, lost, and the seconds until it was noticed and until the resumed training had made its next checkpoint. A
training that is lost is printed with its seed. The losses of all steps must equal those of the undisturbed training.
With `--record FILE` every outcome is a line of FILE as soon as it is known, the next call goes on where FILE ends, and the
table is that of the whole file; `--count 0` prints it alone. `curves.json` beside FILE gets the losses of the last training of
every fault. `results.jsonl` beside this module holds what was tried so far; `page.py` makes docs/faults.md of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from parsim.execute.checkpoint.checkpoint import latest_checkpoint
from parsim.execute.processes.output import descendants, rank_processes
from tests.chaos.outcomes import Outcome, add_outcome, recorded, table
from tests.execute.test_bad_run import cpu_profile

STEPS, EVERY = 60, 2
TIMEOUT_S = 3
RUN = f"""\
[model]
name = "mlp"
args = {{ width = 32 }}
[cluster]
profile = "profile.json"
devices = 2
[training]
global_batch = 16
dataset = "pausing:SLOW"
learning_rate = 0.02
steps = {STEPS}
[plan]
strategy = "dp"
"""
MODULE = '''
"""Digits whose batches take a moment, so that a fault finds a training between any two of its steps."""
import dataclasses
import time
from parsim.data import DATASETS, Dataset, DataSource

class Slow(Dataset):
    def values(self, indices, epoch=0):
        time.sleep(0.02)
        return Dataset.values(self, indices, epoch)

def load(ask):
    found = DATASETS["digits"].load(ask)
    return Slow(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)})

SLOW = DataSource(load=load)
'''


Disturb = Callable[[subprocess.Popen[str], dict[int, int], Path, random.Random], None]


def _rank(pids: dict[int, int], random_: random.Random) -> int:
    return pids[random_.choice(sorted(pids))]


def kill_rank(process: subprocess.Popen[str], pids: dict[int, int], kept: Path, random_: random.Random) -> None:
    os.kill(_rank(pids, random_), signal.SIGKILL)


def stop_rank(process: subprocess.Popen[str], pids: dict[int, int], kept: Path, random_: random.Random) -> None:
    os.kill(_rank(pids, random_), signal.SIGSTOP)


def stop_all(process: subprocess.Popen[str], pids: dict[int, int], kept: Path, random_: random.Random) -> None:
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)


def kill_launcher(process: subprocess.Popen[str], pids: dict[int, int], kept: Path, random_: random.Random) -> None:
    process.kill()


def end_launcher(process: subprocess.Popen[str], pids: dict[int, int], kept: Path, random_: random.Random) -> None:
    process.send_signal(random_.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))


def fill_disk(process: subprocess.Popen[str], pids: dict[int, int], kept: Path, random_: random.Random) -> None:
    """No room for another file: the checkpoints' folder takes no entries any more, whoever asks."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    pid = _rank(pids, random_)
    limit = (ctypes.c_ulong * 2)(0, 0)
    if libc.prlimit(pid, 1, limit, None):  # RLIMIT_FSIZE: every write fails with EFBIG, as on a disk that is full
        raise OSError(ctypes.get_errno(), "prlimit")


def move_folder(process: subprocess.Popen[str], pids: dict[int, int], kept: Path, random_: random.Random) -> None:
    """Somebody renames the run folder; it comes back before the training is resumed."""
    kept.rename(_moved(kept))


def _moved(kept: Path) -> Path:
    return kept.with_name(f"{kept.name}-moved")


def corrupt(process: subprocess.Popen[str], pids: dict[int, int], kept: Path, random_: random.Random) -> None:
    """A byte of the newest checkpoint changes, then the launcher is killed."""
    process.kill()
    process.wait()
    files = sorted(kept.glob("checkpoints/step-*/rank-*"), key=lambda path: path.parent.name)
    newest = [path for path in files if path.parent == files[-1].parent and path.stat().st_size]
    if newest:
        path = random_.choice(newest)
        content = bytearray(path.read_bytes())
        content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
        path.write_bytes(content)


FAULTS: dict[str, tuple[Disturb, str]] = {
    "a rank is killed": (kill_rank, r"rank \d of 2 was killed by SIGKILL"),
    "a rank is stopped": (stop_rank, r"rank \d of 2 has been stopped for 3 s"),
    "all ranks are stopped": (stop_all, r"ranks 0, 1 of 2 have been stopped for 3 s"),
    "the launcher is killed": (kill_launcher, ""),
    "the launcher is ended by a signal": (end_launcher, r"ended by SIG(INT|TERM|HUP)\."),
    "no file can be written": (fill_disk, r"(cannot write its checkpoint|larger than this process may write)"),
    "a byte of a checkpoint changes": (corrupt, ""),
    "a rank is killed, with --elastic": (kill_rank, ""),
    "the run folder is moved": (move_folder, r"is not there any more: it was moved or removed"),
}
ELASTIC = "a rank is killed, with --elastic"
"""Nobody resumes this training: it continues automatically."""


def prepare(folder: Path) -> list[float]:
    """The question, and the losses of a training that nothing disturbs."""
    (folder / "RUN.toml").write_text(RUN)
    (folder / "profile.json").write_text(json.dumps(cpu_profile()))
    (folder / "pausing.py").write_text(MODULE)
    done = subprocess.run(_command(folder / "whole"), cwd=folder, env=_environment(folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses: list[float] = json.loads((folder / "whole" / "result.json").read_text())["losses"]
    return losses


def _command(kept: Path, *more: str) -> list[str]:
    options = ["--out", str(kept), "--checkpoint-every", str(EVERY), "--timeout", str(TIMEOUT_S), *more]
    return [sys.executable, "-m", "parsim", "run", "RUN.toml", *options]


def _environment(folder: Path) -> dict[str, str]:
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}


def disturbed(folder: Path, fault: str, losses: Sequence[float], seed: int) -> Outcome:
    """One training that is disturbed once, and resumed."""
    random_ = random.Random(seed)
    disturb, wanted = FAULTS[fault]
    found = Outcome(fault)
    kept = folder / f"kept-{seed}"
    process = subprocess.Popen(
        _command(kept), cwd=folder, env=_environment(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    family: set[int] = set()
    try:
        found.step = EVERY * random_.randrange(2 if disturb is corrupt else 1, STEPS // EVERY - 8)  # one is left behind it
        pids = _ranks(process, kept, found.step)
        time.sleep(random_.random() * 0.1)
        family = {*pids.values(), *descendants([process.pid])}
        begin_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            disturb(process, pids, kept, random_)
        stderr = process.communicate(timeout=120)[1]
        found.noticed_s = time.monotonic() - begin_s
        if wanted and not re.search(wanted, stderr):
            found.problems.append(f"not named: {stderr.strip().splitlines()[-1:]}")
        if "Traceback" in stderr:
            found.problems.append("a traceback")
        if fault != "a byte of a checkpoint changes" and wanted and process.returncode in (0, -9):
            found.problems.append(f"exit status {process.returncode}")
        deadline = time.monotonic() + 10
        while any(_alive(pid) for pid in family) and time.monotonic() < deadline:
            time.sleep(0.05)
        if any(_alive(pid) for pid in family):
            found.problems.append("a process is left")
        if _moved(kept).exists():
            if kept.exists():
                found.problems.append(f"written where the folder was: {[path.name for path in kept.rglob('*')]}")
                shutil.rmtree(kept)
            _moved(kept).rename(kept)
        _resume(folder, kept, losses, found)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        found.problems.append(f"{type(error).__name__}: {error}"[:400])
    finally:
        for pid in {process.pid, *family}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(kept, ignore_errors=True)
        shutil.rmtree(_moved(kept), ignore_errors=True)
    return found


def survived(folder: Path, losses: Sequence[float], seed: int) -> Outcome:
    """One training with --elastic, of which a rank is killed."""
    random_ = random.Random(seed)
    found = Outcome(ELASTIC)
    kept, told = folder / f"kept-{seed}", folder / f"told-{seed}"
    with told.open("w") as stderr:
        process = subprocess.Popen(
            _command(kept, "--elastic"),
            cwd=folder,
            env=_environment(folder),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
        )
    try:
        found.step = EVERY * random_.randrange(1, STEPS // EVERY - 8)
        pids = _ranks(process, kept, found.step)
        time.sleep(random_.random() * 0.1)
        begin_s = time.monotonic()
        kill_rank(process, pids, kept, random_)
        before = _newest(kept)
        while process.poll() is None:
            if found.noticed_s != found.noticed_s and "continues automatically" in told.read_text():
                found.noticed_s, before = time.monotonic() - begin_s, _newest(kept)
            if found.noticed_s == found.noticed_s and _newest(kept) > before:
                found.resumed_s = time.monotonic() - begin_s
                break
            time.sleep(0.05)
        assert process.wait(timeout=300) == 0, told.read_text()[-400:]
        _check_result(folder, kept, losses, found)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        found.problems.append(f"{type(error).__name__}: {error}"[:400])
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(kept, ignore_errors=True)
    return found


def _newest(kept: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        last = latest_checkpoint(kept / "checkpoints")
    return 0 if last is None else last.step


def _resume(folder: Path, kept: Path, losses: Sequence[float], found: Outcome) -> None:
    begin_s = time.monotonic()
    process = subprocess.Popen(
        _command(kept, "--resume"),
        cwd=folder,
        env=_environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = latest_checkpoint(kept / "checkpoints")
        assert before is not None, "no checkpoint is left"
        while process.poll() is None:
            now = latest_checkpoint(kept / "checkpoints")
            if now is not None and now.step > before.step:
                found.resumed_s = time.monotonic() - begin_s
                break
            time.sleep(0.05)
    stderr = process.communicate(timeout=300)[1]
    assert process.returncode == 0, stderr
    _check_result(folder, kept, losses, found)


def _check_result(folder: Path, kept: Path, losses: Sequence[float], found: Outcome) -> None:
    """All steps trained as in an undisturbed training, and nothing half written is left."""
    result = found.losses = json.loads((kept / "result.json").read_text())["losses"]
    if len(result) != len(losses) or any(abs(one - two) > 1e-6 for one, two in zip(result, losses, strict=True)):
        found.problems.append("the losses differ from those of the undisturbed training")
    if left := [*kept.rglob("*.partial"), *(folder / "scratch").glob("parsim-launch-*")]:
        found.problems.append(f"left behind: {left}")


def _ranks(process: subprocess.Popen[str], kept: Path, step: int) -> dict[int, int]:
    """The process of every rank, once a checkpoint of that step is there."""
    place = kept / "checkpoints" / f"step-{step:08d}"
    while not (place / "rank-0000.json").is_file():
        if process.poll() is not None:
            raise AssertionError(process.communicate()[1])
        time.sleep(0.005)
    return rank_processes(process.pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def play(
    folder: Path, count: int, seed: int, until_s: float = float("inf"), first: int = 0, record: Path | None = None
) -> list[Outcome]:
    """As many disturbed trainings, the faults in turns, beginning with number `first`; each is added to `record`."""
    losses = prepare(folder) if count else []
    found: list[Outcome] = []
    names = list(FAULTS)
    for number in range(first, first + count):
        if time.monotonic() > until_s:
            break
        fault, own = names[number % len(names)], seed * 100_000 + number
        found.append(survived(folder, losses, own) if fault == ELASTIC else disturbed(folder, fault, losses, own))
        if record is not None:
            add_outcome(record, found[-1], losses, number=number, seed=seed)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, help="number of the first case, which says its fault; left out: the next one")
    parser.add_argument("--record", type=Path, help="add every outcome to this file, and print the table of the whole file")
    asked = parser.parse_args(arguments)
    if asked.first is None:
        asked.first = 0 if asked.record is None or not asked.record.is_file() else len(asked.record.read_text().splitlines())
    with tempfile.TemporaryDirectory(prefix="parsim-chaos-") as name:
        found = play(Path(name), asked.count, asked.seed, time.monotonic() + asked.seconds, asked.first, asked.record)
    print(table(found if asked.record is None else recorded(asked.record)))
    for number, outcome in enumerate(found, start=asked.first):
        for problem in outcome.problems:
            print(f"number {number}, {outcome.fault}: {problem}", file=sys.stderr)
    return int(any(outcome.problems for outcome in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
