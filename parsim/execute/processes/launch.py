"""Start the ranks of a job under torchrun on this machine, relay what they print, and turn a failure into one message.

When `launch` returns or raises, no process of the launch is left, whatever happened to the ranks. When this process
itself is killed, the ranks die with it (see `processes`). Ranks write to files that are read here five times a second, so
a slow reader never holds up a rank and their lines never mix.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from parsim.errors import ExecutionError, MissingDependencyError, OutOfMemoryError
from parsim.execute.processes.group import ErrorRecord, error_path, read_error
from parsim.execute.processes.processes import MARK_VARIABLE, PARENT_VARIABLE, kill_launch
from parsim.units import format_seconds

_POLL_S = 0.2
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def launch(
    job_path: Path,
    nproc: int,
    *,
    module: str = "parsim.execute.worker",
    timeout_s: float | None = None,
    on_line: Callable[[str], None] | None = None,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
) -> None:
    """Run `python -m MODULE JOB.json` as `nproc` ranks under torchrun and wait for all of them.

    Each rank computes on one thread unless `env` says otherwise (calibration and execution must agree on it), and gloo talks
    over the loopback interface unless GLOO_SOCKET_IFNAME is set.

    Args:
        job_path: handed to the module, whose main function is `group.worker_main`; ranks leave `error-rank{r}.json` beside it.
        nproc: number of ranks, may exceed the cores.
        timeout_s: of the whole launch, including the start (about 3 s for torchrun and 2.5 s for a rank that imports torch).
        on_line: called in this thread with each line a rank writes to stdout or stderr.
        env: variables added to this process's environment for the ranks.
        max_restarts: how often torchrun starts all ranks anew after a failure.

    Raises:
        ExecutionError: a rank failed (which, how, what it said last), the time ran out, or torchrun would not start; an
            OutOfMemoryError if a GPU's memory was too small.
        MissingDependencyError: torch is not installed.
    """
    if nproc < 1:
        raise ExecutionError(f"a launch needs at least 1 process, got {nproc}")
    if not job_path.is_file():
        raise ExecutionError(f"there is no job file {job_path}")
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("running a plan needs torch, which is not installed; pip install 'parsim[torch]'")
    for rank in range(nproc):
        error_path(job_path.parent, rank).unlink(missing_ok=True)
    mark = uuid.uuid4().hex
    with _sigterm_as_exit(), tempfile.TemporaryDirectory(prefix="parsim-launch-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        command = _command(job_path, nproc, module, scratch, max_restarts)
        output = _Output(folder=scratch / "ranks", on_line=on_line)
        with (scratch / "agent.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(mark, env),
                start_new_session=True,
            )
        try:
            in_time = _watch(process, output, timeout_s)
        finally:
            left = kill_launch(process.pid, mark)
            process.wait()
        output.relay()
        if left:
            raise ExecutionError(f"processes {sorted(left)} of the launch could not be killed; they wait in the kernel")
        if in_time and process.returncode == 0:
            return
        _raise_failure(job_path.parent, nproc, scratch, output, None if in_time else timeout_s)


def _command(job_path: Path, nproc: int, module: str, scratch: Path, max_restarts: int) -> list[str]:
    return [
        *(sys.executable, "-m", "parsim.execute.processes.torchrun_agent", str(scratch / "failures.json")),
        *("--standalone", "--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)),
        *("--redirects", "3", "--log-dir", str(scratch / "ranks")),
        *("-m", module, str(job_path.absolute())),
    ]


def _environment(mark: str, extra: Mapping[str, str] | None) -> dict[str, str]:
    environment = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
    if Path("/sys/class/net/lo").exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for inherited in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        environment.pop(inherited, None)
    if folders := _import_folders():
        environment["PYTHONPATH"] = os.pathsep.join(folders)
    return {**environment, **(extra or {}), MARK_VARIABLE: mark, PARENT_VARIABLE: str(os.getpid())}


def _import_folders() -> list[str]:
    """Where this process finds modules beside the installed ones, for the ranks: PYTHONPATH, the folder of a script, the
    current directory, and that of a run file."""
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    installed = {Path(place).resolve() for place in (*places, *site.getsitepackages(), site.getusersitepackages())}
    found = []
    for entry in sys.path:
        folder = Path(entry or os.curdir).resolve()
        if folder.is_dir() and not any(folder.is_relative_to(place) for place in installed):
            found.append(str(folder))
    return list(dict.fromkeys(found))


def _watch(process: subprocess.Popen[bytes], output: _Output, timeout_s: float | None) -> bool:
    """Relay output until torchrun ends; False if the time ran out before."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while process.poll() is None:
        output.relay()
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


@dataclass(slots=True, kw_only=True)
class _Output:
    """What the ranks have written to the files below `folder` (RUN/attempt_A/RANK/stdout.log, stderr.log), and how far it was
    relayed."""

    folder: Path
    on_line: Callable[[str], None] | None
    read_bytes: dict[Path, int] = field(default_factory=dict)

    def relay(self) -> None:
        """Hand over the complete lines that are new."""
        if self.on_line is None:
            return
        for path in sorted(self.folder.glob("*/attempt_*/*/std*.log")):
            with path.open("rb") as file:
                start = self.read_bytes.get(path, 0)
                file.seek(start)
                complete, newline, _ = file.read().rpartition(b"\n")
            self.read_bytes[path] = start + len(complete) + len(newline)
            if newline:
                for line in complete.decode(errors="replace").split("\n"):
                    self.on_line(line)

    def last_attempt(self) -> int:
        """The number of torchrun's last attempt, from 0."""
        return max((int(path.name.removeprefix("attempt_")) for path in self.folder.glob("*/attempt_*")), default=0)

    def last_line(self, rank: int) -> str:
        """The last line this rank wrote to stderr, else to stdout, in the last attempt; "" if it wrote nothing."""
        attempt = self.last_attempt()
        for stream in ("stderr", "stdout"):
            for path in self.folder.glob(f"*/attempt_{attempt}/{rank}/{stream}.log"):
                if line := _last_line(path):
                    return line
        return ""


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """While inside, SIGTERM and SIGHUP raise SystemExit (if nobody handles them), so that the launch is cleaned up."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    changed = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, leave)
                changed.append(number)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _raise_failure(folder: Path, nproc: int, scratch: Path, output: _Output, timeout_s: float | None) -> NoReturn:
    """Find the rank that failed on its own account and raise the one message about it.

    In this order: a rank killed by a signal, the earliest error that is not about a lost peer, an exit status without a
    record, an abort, the time limit, a lost peer. Ranks that torchrun ended by SIGTERM after another's failure do not count.
    """
    attempt = output.last_attempt()
    found = (read_error(error_path(folder, rank)) for rank in range(nproc))
    records = sorted(
        (record for record in found if record is not None and record.attempt == attempt), key=lambda record: record.time_s
    )
    verdict = _read_verdict(scratch / "failures.json")
    statuses = {int(failure["rank"]): int(failure["exit_status"]) for failure in verdict.get("failures", [])}
    recorded = {record.rank for record in records}
    killed = [rank for rank, status in statuses.items() if status < 0 and -status not in (signal.SIGTERM, signal.SIGABRT)]
    own = [record for record in records if not record.peer_lost]
    unexplained = [rank for rank, status in statuses.items() if rank not in recorded and -status != signal.SIGTERM]
    if killed:
        raise ExecutionError(_status_text(killed[0], nproc, statuses[killed[0]], output))
    if own:
        kind = OutOfMemoryError if own[0].kind == OutOfMemoryError.__name__ and own[0].reported else ExecutionError
        raise kind(_record_text(own[0], nproc, folder))
    if unexplained:
        raise ExecutionError(_status_text(unexplained[0], nproc, statuses[unexplained[0]], output))
    if timeout_s is not None:
        raise ExecutionError(_timeout_text(nproc, timeout_s, output))
    if records:
        raise ExecutionError(_lost_text(records, nproc))
    if statuses:
        first = next(iter(statuses))
        raise ExecutionError(_status_text(first, nproc, statuses[first], output))
    reason = verdict.get("torchrun") or _last_line(scratch / "agent.log") or "it gave no reason"
    raise ExecutionError(f"torchrun could not run {nproc} processes: {reason}")


def _read_verdict(path: Path) -> dict[str, Any]:
    """What `agent` wrote, in the order torchrun noticed; nothing if it was killed before."""
    try:
        verdict: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return verdict


def _record_text(record: ErrorRecord, nproc: int, folder: Path) -> str:
    if record.reported:
        return f"rank {record.rank} of {nproc} stopped: {record.message}"
    lines = record.message.strip().splitlines()
    return f"rank {record.rank} of {nproc} failed: {record.kind}: {lines[0]} (traceback in {error_path(folder, record.rank)})"


def _lost_text(records: list[ErrorRecord], nproc: int) -> str:
    """Every rank that said something only misses another: name those that said nothing."""
    first = records[0]
    said = re.sub(r"^\[[^\]]*\] ?", "", first.message.strip().splitlines()[0])
    quiet = sorted(set(range(nproc)) - {record.rank for record in records})
    if not quiet:
        return f"rank {first.rank} of {nproc} lost contact with another rank: {said}"
    names = f"rank {quiet[0]}" if len(quiet) == 1 else f"ranks {', '.join(map(str, quiet))}"
    return f"{names} of {nproc} did not answer (hanging, stopped, or unreachable); rank {first.rank} said: {said}"


def _status_text(rank: int, nproc: int, status: int, output: _Output) -> str:
    said = output.last_line(rank)
    last = f"; the last it said: {said}" if said else "; it had said nothing"
    if status >= 0:
        return f"rank {rank} of {nproc} ended with exit status {status} and no error record{last}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = {
        "SIGKILL": " (somebody's kill -9, or the kernel when memory ran out: try fewer processes or a smaller batch)",
        "SIGSEGV": " (a crash in compiled code)",
        "SIGBUS": " (often a full /dev/shm or disk)",
    }.get(name, "")
    return f"rank {rank} of {nproc} was killed by {name}{hint}{last}"


def _timeout_text(nproc: int, timeout_s: float, output: _Output) -> str:
    said = [f"rank {rank}: {line}" for rank in range(nproc) if (line := output.last_line(rank))]
    last = f"; last lines: {'; '.join(said)}" if said else "; no rank had said anything"
    return f"the {nproc} ranks had not finished after {format_seconds(timeout_s)} and were stopped{last}"


def _last_line(path: Path) -> str:
    """The last line of a file that is not blank, or the one that names a crash of the interpreter; "" without one."""
    try:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    crash = [line for line in lines if line.startswith("Fatal Python error:")]
    return crash[-1] if crash else lines[-1] if lines else ""
