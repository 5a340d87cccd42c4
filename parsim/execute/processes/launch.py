"""Start the ranks of a job as processes of this machine, relay what they print, and turn a failure into one message.

When `launch` returns or raises, no process of the launch is left, whatever happened to the ranks. When this process
itself is killed, the ranks die with it (see `processes`). Ranks write to files that are read here five times a second, so
a slow reader never holds up a rank and their lines never mix. Ranks find one another through a file in a folder that only
this user can read (see `rendezvous`): nothing of a launch listens beyond the loopback interface.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import signal
import site
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from parsim.errors import DivergedError, ExecutionError, MissingDependencyError, OutOfMemoryError, RankLostError
from parsim.execute.cuda.faults import ASSERTED, ASSERTION, first_line
from parsim.execute.processes.group import ErrorRecord, ProcessPlace, error_path, read_error, read_place
from parsim.execute.processes.heartbeat import BEATS_VARIABLE, Hang, RankWatch, create_beats, process_state, read_beats
from parsim.execute.processes.output import (
    MARK_VARIABLE,
    PARENT_VARIABLE,
    WARNING,
    WORDS_VARIABLE,
    RankOutput,
    create_last_words,
    kill_launch,
    progress_line,
    scratch_folder,
    signal_name,
)
from parsim.execute.processes.rendezvous import FILE_VARIABLE
from parsim.units import format_seconds

HANG_S = 30.0
"""A rank that is stopped or does nothing for so long hangs, unless the caller says otherwise."""
EXIT_S = 60.0
"""In which the system frees what killed ranks held. One that takes longer waits in the driver of a GPU: it may look like a
zombie, some thread of which never ends."""
POLL_S = 0.2
"""Between two looks at the ranks."""
DISTURBED_STARTS = 2
"""So often a start is made again in which connections broke: gloo takes whoever reaches a rank's port first for its peer."""
_CULPRIT_S = 5.0
"""How long to look for the rank whose loss another one has reported."""
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_OTHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
"""Variables of a launcher that this process may be a rank of itself."""


# One message about a launch that failed: which rank failed on its own account, how, and its last output.


KINDS = {kind.__name__: kind for kind in (OutOfMemoryError, DivergedError)}
"""Errors of a rank that the launcher raises as such; what else it reports is an ExecutionError, the rest a RankLostError."""


SENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that somebody sends: nothing that the rank wrote before explains them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How an attempt ended.

    statuses: exit status of every rank that had ended by itself, before the others were killed; -n: by signal n. hang: ranks
    that did not move. places: where in the code they were. out_of_time: the launch took too long. left: processes that could
    not be killed.
    """

    attempt: int
    statuses: Mapping[int, int]
    hang: Hang | None = None
    places: Mapping[int, str] = field(default_factory=dict)
    out_of_time: bool = False
    left: tuple[int, ...] = ()


def still_there(processes: Sequence[int]) -> str:
    return f"processes {', '.join(map(str, processes))} of the launch could not be killed; they wait in the kernel"


def raise_failure(folder: Path, nproc: int, ended: Ended, output: RankOutput, timeout_s: float | None) -> NoReturn:
    """Find the rank that failed on its own account and raise the one message about it: an ExecutionError, RankLostError, or one
    of KINDS. It also names processes that are left, as where a GPU does not answer.
    """
    error = failure_of(folder, nproc, ended, output, timeout_s)
    if not ended.left:
        raise error
    text = f"{str(error).rstrip('.')}. Then {still_there(ended.left)}"
    raise error.with_text(text) if isinstance(error, RankLostError) else type(error)(text)


def failure_of(folder: Path, nproc: int, ended: Ended, output: RankOutput, timeout_s: float | None) -> ExecutionError:
    """The error about a launch that failed, in this order: a rank killed by a signal, the earliest error that is not about a
    lost peer, an exit status without a record, a rank that hangs, the time limit, a lost peer."""
    read = (read_error(error_path(folder, rank), output.last_words(rank)) for rank in range(nproc))
    records = sorted(
        (record for record in read if record is not None and record.attempt == ended.attempt), key=lambda record: record.time_s
    )
    failed = {rank: status for rank, status in ended.statuses.items() if status}
    recorded = {record.rank for record in records}
    killed = [rank for rank, status in failed.items() if status < 0 and -status != signal.SIGABRT]
    unexplained = [rank for rank in failed if rank not in recorded]
    first = next((record for record in records if not record.peer_lost), None)
    if killed:
        return RankLostError(_status_text(killed[0], nproc, failed[killed[0]], output), killed)
    if first is not None:
        text = _record_text(first, nproc, folder, output)
        if first.reported and first.kind != RankLostError.__name__:
            return KINDS.get(first.kind, ExecutionError)(text)
        return RankLostError(text, (first.rank,), device_lost=first.reported, raised=not first.reported)
    if unexplained:
        return RankLostError(_status_text(unexplained[0], nproc, failed[unexplained[0]], output), unexplained)
    if ended.hang is not None:
        where = "".join(f"; rank {rank} is at {place}" for rank, place in ended.places.items())
        text = (
            f"{_names(ended.hang.ranks)} of {nproc} {ended.hang.text}{where}. The run was ended; --timeout SECONDS waits longer"
        )
        return RankLostError(text, ended.hang.ranks)
    if ended.out_of_time and timeout_s is not None:
        lines = [f"rank {rank}: {line}" for rank in range(nproc) if (line := output.last_line(rank))]
        last = f"; last lines: {'; '.join(lines)}" if lines else "; no rank had written any output"
        return ExecutionError(f"the {nproc} ranks had not finished after {format_seconds(timeout_s)} and were stopped{last}")
    return _lost(records, nproc, ended)


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _record_text(record: ErrorRecord, nproc: int, folder: Path, output: RankOutput) -> str:
    if record.reported:
        text = f"rank {record.rank} of {nproc} stopped: {record.message}"
        wrote = output.line_with(record.rank, ASSERTION) if ASSERTED in record.message else ""
        return f"{text} The kernel wrote: {wrote}" if wrote else text
    where = f"traceback in {error_path(folder, record.rank)}" if record.traceback else "its traceback could not be written"
    return f"rank {record.rank} of {nproc} failed: {record.kind}: {first_line(record.message)} ({where})"


def _lost(records: Sequence[ErrorRecord], nproc: int, ended: Ended) -> RankLostError:
    """Every rank with a record only misses another: name those without one."""
    first = records[0]
    reported = re.sub(r"^\[[^\]]*\] ?", "", first.message.strip().splitlines()[0])
    quiet = sorted(set(range(nproc)) - {record.rank for record in records})
    text = f"rank {first.rank} of {nproc} lost contact with another rank: {reported}"
    left = [rank for rank in quiet if ended.statuses.get(rank) == 0]
    if left:
        why = "ended with exit status 0 before the run was over, as code that calls os._exit does"
        text = f"{_names(left)} of {nproc} {why}; rank {first.rank} reported: {reported}"
    elif quiet:
        why = "did not answer (hanging, stopped, or unreachable)"
        text = f"{_names(quiet)} of {nproc} {why}; rank {first.rank} reported: {reported}"
    return RankLostError(text, quiet)


def _status_text(rank: int, nproc: int, status: int, output: RankOutput) -> str:
    line = "" if -status in SENT else output.last_line(rank)
    last = "" if -status in SENT else f"; its last line: {line}" if line else "; it wrote no output"
    if status >= 0:
        return f"rank {rank} of {nproc} ended with exit status {status} and no error record{last}"
    name = signal_name(-status)
    hint = {
        "SIGKILL": " (somebody's kill -9, or the kernel when memory ran out: try fewer processes or a smaller batch)",
        "SIGSEGV": " (a crash in compiled code)",
        "SIGBUS": " (often a full /dev/shm or disk)",
    }.get(name, "")
    return f"rank {rank} of {nproc} was killed by {name}{hint}{last}"


def launch(
    job_path: Path,
    nproc: int,
    *,
    module: str = "parsim.execute.worker",
    timeout_s: float | None = None,
    hang_s: float = HANG_S,
    on_line: Callable[[str], None] | None = None,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
) -> None:
    """Run `python -m MODULE JOB.json` as `nproc` ranks on this machine and wait for all of them.

    Each rank computes on one thread unless `env` says otherwise (calibration and execution must agree on it), and gloo and NCCL
    talk over the loopback interface unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set.

    Args:
        job_path: handed to the module, whose main function is `group.worker_main`; ranks leave `error-rank{r}.json` beside it.
        timeout_s: of the whole launch, including the start (about 2.5 s for a rank that imports torch).
        hang_s: a rank that is stopped, or does nothing, for longer ends the launch (see `heartbeat`).
        on_line: called in this thread with each line a rank writes to stdout or stderr. env: variables added for the ranks.
        max_restarts: how often all ranks are started anew after a failure. A start that is disturbed (`_Ranks.lost_at_start`)
            is made a second time in any case.

    Raises ExecutionError: a rank failed (which, how, its last output), hangs, or the time ran out; an OutOfMemoryError if a
    GPU's memory was too small, a DivergedError if a loss or weight was not finite. MissingDependencyError: torch is not
    installed.
    """
    if nproc < 1:
        raise ExecutionError(f"a launch needs at least 1 process, got {nproc}")
    if not job_path.is_file():
        raise ExecutionError(f"there is no job file {job_path}")
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("running a plan needs torch, which is not installed; pip install 'parsim[torch]'")
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with signals_as_exit(), scratch_folder() as scratch:
        left, starts = max_restarts, DISTURBED_STARTS
        for attempt in itertools.count():
            for rank in range(nproc):
                error_path(job_path.parent, rank).unlink(missing_ok=True)
            ranks = _Ranks(job=job_path, nproc=nproc, module=module, scratch=scratch, attempt=attempt, on_line=on_line)
            ended = ranks.run(env or {}, deadline, hang_s)
            if ended is None:
                return
            if not (ended.out_of_time or ended.left) and starts and ranks.lost_at_start(ended):
                starts -= 1
                if on_line is not None:
                    why = failure_of(job_path.parent, nproc, ended, ranks.output, timeout_s)
                    on_line(progress_line({WARNING: f"the start was disturbed and is made again: {why}"}))
            elif left == 0 or ended.out_of_time or ended.left:
                raise_failure(job_path.parent, nproc, ended, ranks.output, timeout_s)
            else:
                left -= 1


def rank_command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "parsim.execute.processes.rank", *arguments]


def start_rank(arguments: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path) -> subprocess.Popen[bytes]:
    with stdout.open("wb") as out, stderr.open("wb") as err:
        return subprocess.Popen(
            rank_command(arguments),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
        )


@dataclass(slots=True, kw_only=True)
class _Ranks:
    job: Path
    nproc: int
    module: str
    scratch: Path
    attempt: int
    on_line: Callable[[str], None] | None
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    output: RankOutput = field(init=False)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.output = RankOutput(folder=self.scratch / f"attempt-{self.attempt}", on_line=self.on_line)

    @property
    def _beats(self) -> Path:
        return self.output.folder / "beats"

    def run(self, extra: Mapping[str, str], deadline: float | None, hang_s: float) -> Ended | None:
        """Start all ranks and wait for them; None if all succeeded. No process of the attempt is left."""
        self.output.folder.mkdir()
        create_beats(self._beats, self.nproc)
        create_last_words(self.output.words, self.nproc)
        try:
            for rank in range(self.nproc):
                self._processes.append(self._start(rank, extra))
            ended = self._watch(deadline, RankWatch(limit_s=hang_s, nproc=self.nproc))
        finally:
            left = self._reaped(kill_launch([process.pid for process in self._processes], self.mark))
            self.output.relay()
        if left and ended is None:
            raise ExecutionError(still_there(sorted(left)))
        return None if ended is None else replace(ended, left=tuple(sorted(left)))

    def _reaped(self, left: set[int]) -> set[int]:
        """Wait until killed ranks are gone. Args: left: could not be killed. Returns these, and those that stay."""
        until = time.monotonic() + EXIT_S
        found = set(left)
        for process in self._processes:
            if process.pid not in left:
                try:
                    process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    found.add(process.pid)
        return found

    def _start(self, rank: int, extra: Mapping[str, str]) -> subprocess.Popen[bytes]:
        stdout, stderr = self.output.paths(rank)
        stdout.parent.mkdir()
        return start_rank([self.module, str(self.job.absolute())], self._environment(rank, extra), stdout, stderr)

    def _environment(self, rank: int, extra: Mapping[str, str]) -> dict[str, str]:
        environment = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
        if not environment.get("PYTHONHASHSEED", "").isdigit():
            environment["PYTHONHASHSEED"] = "0"  # a forward that iterates over a set (gemma3) does so in one order on all ranks
        if Path("/sys/class/net/lo").exists():
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            environment.setdefault("NCCL_SOCKET_IFNAME", "=lo")  # without the =, all whose names begin so
        for name in list(environment):
            if name in _OTHERS or name.startswith("TORCHELASTIC_"):
                del environment[name]
        if folders := import_folders():
            environment["PYTHONPATH"] = os.pathsep.join(folders)
        places = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | dict.fromkeys(
            ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.nproc)
        )
        return {
            **environment,
            **extra,
            **places,
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            "TORCHELASTIC_RUN_ID": self.mark,
            FILE_VARIABLE: str(self.output.folder / "store"),
            BEATS_VARIABLE: str(self._beats),
            WORDS_VARIABLE: str(self.output.words),
            MARK_VARIABLE: self.mark,
            PARENT_VARIABLE: str(os.getpid()),
        }

    def _watch(self, deadline: float | None, watch: RankWatch) -> Ended | None:
        """Relay output until all ranks have succeeded (None), one fails or hangs, or the time runs out."""
        while True:
            self.output.relay()
            statuses = self._statuses()
            if any(statuses.values()):
                return Ended(attempt=self.attempt, statuses=self._with_culprit(statuses))
            if len(statuses) == self.nproc:
                return None
            if deadline is not None and time.monotonic() > deadline:
                return Ended(attempt=self.attempt, statuses=statuses, out_of_time=True)
            states = [None if rank in statuses else process_state(each.pid) for rank, each in enumerate(self._processes)]
            hang = watch.look(read_beats(self._beats, self.nproc), states, time.monotonic())
            if hang is not None:
                return Ended(attempt=self.attempt, statuses=self._statuses(), hang=hang, places=self._where(hang))
            time.sleep(POLL_S)

    def lost_at_start(self, ended: Ended) -> bool:
        """Whether all ranks had reported, none had begun a step, and each that failed only missed another, or aborted."""
        if any(beat.count == 0 or beat.step for beat in read_beats(self._beats, self.nproc)):
            return False
        if ended.hang is not None:
            return ended.hang.together
        records = {rank: read_error(error_path(self.job.parent, rank), self.output.last_words(rank)) for rank in ended.statuses}
        return all(
            status in (0, -signal.SIGABRT) or ((record := records[rank]) is not None and record.peer_lost)
            for rank, status in ended.statuses.items()
        )

    def _statuses(self) -> dict[int, int]:
        found = {rank: process.poll() for rank, process in enumerate(self._processes)}
        return {rank: status for rank, status in found.items() if status is not None}

    def _with_culprit(self, statuses: dict[int, int]) -> dict[int, int]:
        """The statuses, once a rank is among them that did not fail for want of another; as they are after some seconds."""
        until = time.monotonic() + _CULPRIT_S
        while time.monotonic() < until and len(statuses) < self.nproc:
            failed = [rank for rank, status in statuses.items() if status]
            records = [read_error(error_path(self.job.parent, rank), self.output.last_words(rank)) for rank in failed]
            if any(record is None or not record.peer_lost for record in records):
                break
            time.sleep(POLL_S / 4)
            statuses = self._statuses()
        return statuses

    def _where(self, hang: Hang) -> dict[int, str]:
        """Where in the code each of the ranks is that hang, as they tell when they are asked."""
        for rank in hang.ranks:
            with contextlib.suppress(OSError, AttributeError):
                self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(2 * POLL_S)
        return {rank: place for rank in hang.ranks if (place := self.output.innermost_frame(rank))}


def import_folders() -> list[str]:
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


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """While inside, SIGTERM and SIGHUP raise SystemExit (if nobody handles them), so that what is inside is cleaned up."""

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


# `python -m parsim.execute.processes.launch SECONDS JOB.json`: start one rank for torchrun or srun, and end it if it hangs.
#
# A rank that is stopped, or does nothing, for longer than SECONDS is named on stderr and killed, with whatever it has started.
# The rank dies with its guard, and the guard ends as its rank has ended.
#
# Leaves out: ranks that all wait for one another, whom the timeout of collectives (`Job.timeout_s`) ends, and machines that are
# gone, of which ranks hear by their store (`rendezvous.when_left`).


def guarded(job: Path, place: ProcessPlace, hang_s: float) -> str | int:
    """Run the rank of this place: its exit status, or what happened to it where it had none. No process of it is left."""
    mark, of = uuid.uuid4().hex, f"rank {place.rank} of {place.world_size}"
    watch = RankWatch(limit_s=hang_s, nproc=1, sees_all=False)
    with signals_as_exit(), scratch_folder() as scratch:
        beats = scratch / "beats"
        create_beats(beats, place.rank + 1)
        variables = {BEATS_VARIABLE: str(beats), PARENT_VARIABLE: str(os.getpid()), MARK_VARIABLE: mark}
        command = rank_command(["parsim.execute.worker", str(job)])
        rank = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=os.environ | variables, start_new_session=True)
        try:
            while (status := rank.poll()) is None:
                beat = read_beats(beats, place.rank + 1)[place.rank]
                if hang := watch.look([beat], [process_state(rank.pid)], time.monotonic()):
                    with contextlib.suppress(ProcessLookupError, AttributeError):
                        rank.send_signal(signal.SIGUSR1)  # its lines on stderr say where it is, unless it is stopped
                    time.sleep(2 * POLL_S)
                    return f"{of} {hang.text}. It was ended; TIMEOUT=SECONDS before the script waits longer"
                time.sleep(POLL_S)
        finally:
            kill_launch([rank.pid], mark)
            rank.wait()
    return status if status >= 0 else f"{of} was killed by {signal_name(-status)}"


if __name__ == "__main__":
    sys.exit(guarded(Path(sys.argv[2]), read_place(), float(sys.argv[1])))
