"""Faults at random moments of real trainings: none may lose a step, leave a process or a half written file, or go unnamed.

`python -m tests.chaos.chaos --count 200 --seconds 7200` trains, disturbs each training a few times, resumes it each time, and
prints a table: fault, tried, lost, and the seconds until it was noticed and until the resumed training had made its next
checkpoint. A training that is lost is printed with its seed. The losses of all steps must equal those of the undisturbed
training of the same plan.
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
from dataclasses import dataclass
from pathlib import Path

from parsim.execute.checkpoint.checkpoint import latest_checkpoint
from parsim.execute.processes.output import descendants, rank_processes
from tests.chaos.outcomes import Outcome, add_outcome, recorded, table
from tests.execute.test_bad_run import write_profile

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
"""
PLANS = {
    "data parallel": '[plan]\nstrategy = "dp"\nzero_stage = 0\n',
    "ZeRO 3, a process that reads": 'workers = 1\n[plan]\nstrategy = "dp"\nzero_stage = 3\n',
    "averaging every 4 steps": '[plan]\nstrategy = "dp"\nsynchronisation = "average/4"\n',
    "pipeline": '[plan]\nstrategy = "mp"\nmesh = { pp = 2 }\nmicrobatches = 2\n',
}
"""What a run file has beyond RUN, which ends in [training]."""
AT_ONCE = 5
"""Faults of one training: of its 30 checkpoints each passes about four."""
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
    "the run folder is moved": (move_folder, r"is not there any more: it was moved or removed"),
    "a rank is killed, with --elastic": (kill_rank, ""),
}
ELASTIC = "a rank is killed, with --elastic"
"""The last fault of a training: nobody resumes it, it continues automatically."""
CORRUPT = "a byte of a checkpoint changes"


def prepare(folder: Path, plan: str) -> list[float]:
    """The question, and the losses of a training that nothing disturbs."""
    folder.mkdir(exist_ok=True)
    (folder / "RUN.toml").write_text(RUN + PLANS[plan])
    write_profile(folder, "all_gather", "reduce_scatter")
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


@dataclass
class Training:
    """One training that is disturbed a few times, and resumed each time.

    Attributes: losses: of the undisturbed one. kept: its run folder. process: its launcher; told: what that says on stderr.
        family: it, its ranks, and what they started.
    """

    folder: Path
    losses: Sequence[float]
    plan: str
    seed: int

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.kept, self.told = self.folder / f"kept-{self.seed}", self.folder / f"told-{self.seed}"
        self.family: set[int] = set()

    def disturbed(self, faults: Sequence[str]) -> list[Outcome]:
        """What became of it after each fault; the first that loses something ends it."""
        found: list[Outcome] = []
        try:
            for fault in faults:
                before = found[-1] if found else None
                found.append(Outcome(fault, plan=self.plan))
                self._start(*(["--resume"] if before else []), *(["--elastic"] if fault == ELASTIC else []))
                self._wait_for_step(found[-1], before)
                if fault == ELASTIC:
                    self._survive(found[-1])
                else:
                    self._disturb(found[-1])
                if found[-1].problems or (before and before.problems):
                    return found
            if found[-1].fault != ELASTIC:
                self._start("--resume")
                self._wait_for_next(found[-1], _newest(self.kept))
            self.process.wait(timeout=300)
            assert self.process.returncode == 0, self._said()
            _check_result(self.folder, self.kept, self.losses, found)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            found[-1].problems.append(f"{type(error).__name__}: {error}"[:400])
        finally:
            for pid in {self.process.pid, *self.family}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            shutil.rmtree(self.kept, ignore_errors=True)
            shutil.rmtree(_moved(self.kept), ignore_errors=True)
        return found

    def _start(self, *more: str) -> None:
        with self.told.open("w") as stderr:
            self.process = subprocess.Popen(
                _command(self.kept, *more),
                cwd=self.folder,
                env=_environment(self.folder),
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                text=True,
            )
        self.begin_s = time.monotonic()

    def _said(self) -> str:
        return self.told.read_text(errors="replace")

    def _wait_for_step(self, found: Outcome, before: Outcome | None) -> None:
        """Until the checkpoint after which the fault comes; how long the one before took to be resumed."""
        done = _newest(self.kept) if before else 0
        ahead = self.random.randrange(2 if found.fault == CORRUPT and not done else 1, 4 if before else 6)
        found.step = done + EVERY * ahead  # a damaged checkpoint leaves one behind it
        if before is not None:
            self._wait_for_next(before, done)
        place = self.kept / "checkpoints" / f"step-{found.step:08d}"
        while not (place / "rank-0000.json").is_file():
            assert self.process.poll() is None, self._said()
            time.sleep(0.005)
        self.ranks = rank_processes(self.process.pid)
        self.family = {*self.ranks.values(), *descendants([self.process.pid])}
        time.sleep(self.random.random() * 0.1)

    def _wait_for_next(self, before: Outcome, done: int) -> None:
        while _newest(self.kept) <= done:
            assert self.process.poll() in (None, 0), self._said()
            time.sleep(0.02)
        before.resumed_s = time.monotonic() - self.begin_s

    def _disturb(self, found: Outcome) -> None:
        disturb, wanted = FAULTS[found.fault]
        begin_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            disturb(self.process, self.ranks, self.kept, self.random)
        self.process.wait(timeout=120)
        found.noticed_s = time.monotonic() - begin_s
        said = self._said()
        if wanted and not re.search(wanted, said):
            found.problems.append(f"not named: {said.strip().splitlines()[-1:]}")
        if "Traceback" in said:
            found.problems.append("a traceback")
        if wanted and self.process.returncode in (0, -9):
            found.problems.append(f"exit status {self.process.returncode}")
        deadline = time.monotonic() + 10
        while any(_alive(pid) for pid in self.family) and time.monotonic() < deadline:
            time.sleep(0.05)
        if any(_alive(pid) for pid in self.family):
            found.problems.append("a process is left")
        if _moved(self.kept).exists():
            if self.kept.exists():
                found.problems.append(f"written where the folder was: {[path.name for path in self.kept.rglob('*')]}")
                shutil.rmtree(self.kept)
            _moved(self.kept).rename(self.kept)
        assert _newest(self.kept), "no checkpoint is left"

    def _survive(self, found: Outcome) -> None:
        begin_s = time.monotonic()
        kill_rank(self.process, self.ranks, self.kept, self.random)
        while "continues automatically" not in self._said():
            assert self.process.poll() is None, self._said()
            time.sleep(0.05)
        found.noticed_s, before = time.monotonic() - begin_s, _newest(self.kept)
        while self.process.poll() is None and _newest(self.kept) <= before:
            time.sleep(0.05)
        found.resumed_s = time.monotonic() - begin_s


def _newest(kept: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        last = latest_checkpoint(kept / "checkpoints")
    return 0 if last is None else last.step


def _check_result(folder: Path, kept: Path, losses: Sequence[float], found: Sequence[Outcome]) -> None:
    """All steps trained as in an undisturbed training, and nothing half written is left."""
    result = json.loads((kept / "result.json").read_text())["losses"]
    for outcome in found:
        outcome.losses = result
    if len(result) != len(losses) or any(abs(one - two) > 1e-6 for one, two in zip(result, losses, strict=True)):
        found[-1].problems.append("the losses differ from those of the undisturbed training")
    if left := [*kept.rglob("*.partial"), *(folder / "scratch").glob("parsim-launch-*"), *(folder / "scratch").glob("pymp-*")]:
        found[-1].problems.append(f"left behind: {left}")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def plan_and_faults(seed: int, number: int) -> tuple[str, list[str]]:
    """The plan of a training, and its faults from that number on: every nine hold all kinds, in another order each."""
    names = [name for name in FAULTS if name != ELASTIC]
    turn, place = divmod(number, len(FAULTS))
    random.Random(f"{seed}/{turn}").shuffle(names)
    names.append(ELASTIC)
    end = AT_ONCE if place < AT_ONCE else len(names)
    return list(PLANS)[turn % len(PLANS)], names[place:end]


def play(
    folder: Path, count: int, seed: int, until_s: float = float("inf"), first: int = 0, record: Path | None = None
) -> list[Outcome]:
    """As many faults, beginning with number `first`; each is added to `record`."""
    losses: dict[str, list[float]] = {}
    found: list[Outcome] = []
    while len(found) < count and time.monotonic() < until_s:
        number = first + len(found)
        plan, faults = plan_and_faults(seed, number)
        own = folder / str(list(PLANS).index(plan))
        if plan not in losses:
            losses[plan] = prepare(own, plan)
        training = Training(own, losses[plan], plan, seed * 100_000 + number)
        for offset, outcome in enumerate(training.disturbed(faults[: count - len(found)])):
            found.append(outcome)
            if record is not None:
                add_outcome(record, outcome, losses[plan], number=number + offset, seed=seed)
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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background with SIGINT ignored
    with tempfile.TemporaryDirectory(prefix="parsim-chaos-") as name:
        found = play(Path(name), asked.count, asked.seed, time.monotonic() + asked.seconds, asked.first, asked.record)
    print(table(found if asked.record is None else recorded(asked.record)))
    for number, outcome in enumerate(found, start=asked.first):
        for problem in outcome.problems:
            print(f"number {number}, {outcome.fault}: {problem}", file=sys.stderr)
    return int(any(outcome.problems for outcome in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
