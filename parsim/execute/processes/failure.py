"""One message about a launch that failed: which rank failed on its own account, how, and its last output."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from parsim.errors import DivergedError, ExecutionError, OutOfMemoryError, RankLostError
from parsim.execute.cuda.faults import ASSERTED, ASSERTION, first_line
from parsim.execute.processes.group import ErrorRecord, error_path, read_error
from parsim.execute.processes.heartbeat import Hang
from parsim.execute.processes.output import RankOutput, signal_name
from parsim.units import format_seconds

KINDS = {kind.__name__: kind for kind in (OutOfMemoryError, DivergedError)}
"""Errors of a rank that the launcher raises as such; what else it reports is an ExecutionError, the rest a RankLostError."""


SENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that somebody sends: nothing that the rank wrote before explains them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How an attempt ended.

    Attributes:
        statuses: exit status of every rank that had ended by itself, before the others were killed; -n: by signal n.
        hang: ranks that did not move. places: where in the code they were. out_of_time: the launch took too long.
        left: processes that could not be killed.
    """

    attempt: int
    statuses: Mapping[int, int]
    hang: Hang | None = None
    places: Mapping[int, str] = field(default_factory=dict)
    out_of_time: bool = False
    left: tuple[int, ...] = ()


def still_there(processes: Sequence[int]) -> str:
    """About processes that could not be killed."""
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
    """The error about a launch that failed.

    In this order: a rank killed by a signal, the earliest error that is not about a lost peer, an exit status without a record.
    Then a rank that hangs, the time limit, a lost peer.
    """
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
