"""The frame of every rank's work: find its place, join the process group, make sub-groups, leave, and report a failure.

torch is imported where it is used: a rank that only reports an error does not pay for it.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import io
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from parsim.errors import ExecutionError, ParsimError
from parsim.execute.cuda.gpu import NCCL, STAGED, sharing, take_gpu
from parsim.execute.processes.heartbeat import pulse
from parsim.execute.processes.output import PARENT_VARIABLE, LastWords, die_with_parent, last_words
from parsim.execute.processes.rendezvous import open_store, when_left
from parsim.execute.processes.setup import threads_with_priority
from parsim.files import write_text_atomically
from parsim.hardware.devices import DEVICE_KINDS

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

BACKENDS = {kind: row.backend for kind, row in DEVICE_KINDS.items() if row.backend}
_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "timed out after",
    "socket timeout",
    "wait timeout",
    "application timeout caused pair closure",
    "remote process exited",
    "nccl communicator was aborted",
    "connection was likely closed",
    "failed to recv",
    "failed to send",
)

ALL_FINISHED = "all finished"
"""The key of an attempt's store that tells its ranks to leave."""
MOST_SAID = 1000
"""Characters of a message that its last words keep: the room holds them in any spelling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """Where this process stands: as the launcher numbers it, and the device it computes on ("cpu", "cuda:1"). `attempt` counts
    the restarts from 0. `store` is the key-value store of this attempt, once the group is joined."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    attempt: int
    device: str = "cpu"
    store: Store | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """What a failing rank leaves in `error-rank{r}.json`.

    kind: the exception's class. reported: it is a ParsimError, whose message stands alone. peer_lost: it failed only because
    another rank was gone or did not answer. time_s: seconds since 1970. traceback: "" where it could only say its last words.
    """

    rank: int
    attempt: int
    kind: str
    message: str
    reported: bool
    peer_lost: bool
    time_s: float
    traceback: str


def error_path(folder: Path, rank: int) -> Path:
    return folder / f"error-rank{rank}.json"


def read_place(environment: Mapping[str, str] = os.environ) -> ProcessPlace:
    """This process's place from its environment, where `launch` and torchrun write it. Raises ExecutionError: neither did."""
    try:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise ExecutionError(
            f"a rank needs RANK and WORLD_SIZE in its environment ({error}); start it with `parsim run` or torchrun"
        ) from error
    return ProcessPlace(
        rank=rank,
        world_size=world_size,
        local_rank=int(environment.get("LOCAL_RANK", rank)),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", world_size)),
        attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
    )


def init_group(device: str = "cpu", *, timeout_s: float = 120.0, alone: bool = False) -> ProcessPlace:
    """Join the default process group: gloo for "cpu", nccl for "cuda" (one GPU per rank of this host, see `cuda.gpu`).

    Each attempt of a launch has its own prefix in the store: under a shared one, restarted ranks find the addresses of dead
    peers. `timeout_s` bounds the start and each collective: a peer that hangs is noticed after it, one that died at once. Where
    it is `alone`, nobody else may compute on this rank's GPU. Raises ExecutionError: an unknown device, or as `take_gpu`.
    """
    from torch import distributed
    from torch.distributed.distributed_c10d import PrefixStore

    place = read_place()
    if device not in BACKENDS:
        raise ExecutionError(f"unknown device {device!r}; known: {', '.join(BACKENDS)}")
    cuda_device = take_gpu(place.rank, place.local_rank, alone=alone) if device == "cuda" else None
    backend = BACKENDS[device]
    if sharing() == STAGED:
        from parsim.execute.cuda.staged_group import register_staged

        register_staged()
        backend = STAGED
    everyone = open_store(place.rank, place.world_size, timeout_s=timeout_s)
    prefix = f"parsim/{place.attempt}"
    store = PrefixStore(prefix, everyone)
    with pulse().waiting(), _threads_of(backend):
        distributed.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=cuda_device if backend == NCCL else None,
        )
    when_left(f"{prefix}/{ALL_FINISHED}", partial(_end_alone, place.rank))
    return replace(place, device="cpu" if cuda_device is None else str(cuda_device), store=store)


def _threads_of(backend: str) -> contextlib.AbstractContextManager[bool | None]:
    """Gloo's threads, begun inside, share a core with computation and come before it; those of others do not."""
    return threads_with_priority() if backend == BACKENDS["cpu"] else contextlib.nullcontext()


def urgent_options(backend: str) -> Any:
    """NCCL launches transfers on its internal streams. They get priority over computation, like the rank's communication
    streams.
    """
    if backend != BACKENDS["cuda"]:
        return None
    from torch import distributed

    options = distributed.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


Stream = tuple[str, tuple[int, ...]]


def make_groups(streams: Sequence[Stream], *, timeout_s: float = 120.0) -> dict[Stream, ProcessGroup]:
    """One process group per communication stream (name, ranks); returned are those this rank belongs to.

    Streams with the same ranks get separate groups, since two collectives of one group wait for one another. Every rank must
    pass the same list in the same order. Raises ExecutionError: a stream without ranks, a rank named twice, or one that does
    not exist.
    """
    from torch import distributed

    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    timeout = datetime.timedelta(seconds=timeout_s)
    groups: dict[Stream, ProcessGroup] = {}
    for name, ranks in dict.fromkeys(streams):
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= member < world_size for member in ranks):
            raise ExecutionError(f"stream {name!r} has ranks {ranks}; list each once, from 0 to {world_size - 1}")
        with pulse().waiting(), _threads_of(distributed.get_backend()):
            options = urgent_options(distributed.get_backend())
            group = distributed.new_group(list(ranks), timeout=timeout, group_desc=name, pg_options=options)
        if rank in ranks:
            groups[name, ranks] = group
    return groups


class StreamLink(NamedTuple):
    """One direction between two ranks of a stream's group."""

    stream: Stream
    source: int
    destination: int


def open_links(links: Sequence[StreamLink], groups: Mapping[Stream, ProcessGroup], device: torch.device) -> None:
    """Send one number over each of this rank's links. Every rank must pass the same list in the same order. NCCL connects two
    ranks at their first transfer in a communicator, and the host waits there for the peer, whatever stream the transfer is
    given. A rank of a pipeline asks for its first gradient before it computes. So without open links each rank would wait for a
    peer that waits for it."""
    import torch
    from torch import distributed

    rank = distributed.get_rank()
    with pulse().waiting():
        for stream, source, destination in links:
            number = torch.zeros(1, device=device)
            if rank == source:
                distributed.send(number, destination, group=groups[stream])
            elif rank == destination:
                distributed.recv(number, source, group=groups[stream])


def close_group(place: ProcessPlace, *, timeout_s: float = 10.0) -> bool:
    """Leave the process group once all ranks have finished; False when they have not, or leaving hung, within `timeout_s`.
    Waiting in the store first keeps a fast rank from closing connections a slow one still reads from."""
    from torch import distributed

    if not distributed.is_initialized():
        return True
    together = True
    with (
        pulse().waiting(),
        contextlib.suppress(RuntimeError, ConnectionError),
    ):  # one of torch's stores, or of `store`
        if place.store is not None:
            together = False
            if place.store.add("finished", 1) == place.world_size:
                place.store.set(ALL_FINISHED, "yes")
            place.store.wait([ALL_FINISHED], datetime.timedelta(seconds=timeout_s))
            together = True

    def leave() -> None:
        if place.device.startswith("cuda"):
            import torch

            torch.cuda.set_device(torch.device(place.device))
        distributed.destroy_process_group()

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return together and not thread.is_alive()


def worker_main(run: Callable[[Path], None]) -> NoReturn:
    """The main function of a worker module: run(Path of JOB.json), report what went wrong, and end this process.

    An exception becomes `error-rank{r}.json` beside JOB.json and exit status 1; the traceback stands in that file, and only the
    message on stderr. Where no file can be written, the launcher reads the rank's last words. Ends by os._exit, so that no
    thread or destructor of a communication library can hold up the end. The process dies with the launcher if parsim launched
    it.
    """
    if PARENT_VARIABLE in os.environ:
        die_with_parent(int(os.environ[PARENT_VARIABLE]))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    if len(sys.argv) != 2:
        print(f"usage: torchrun ... -m {sys.argv[0]} JOB.json", file=sys.stderr)
        _leave(2)
    job_path = Path(sys.argv[1])
    words = last_words()
    try:
        run(job_path)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # so that whoever waits sees the signal, as of any other one
    except BaseException as error:  # of SystemExit too: nothing of a rank's own ends it so
        _record(job_path.parent, error, words)
        _leave(1)
    _leave(0)


def _end_alone(rank: int, why: str) -> None:
    with contextlib.suppress(OSError):
        print(f"rank {rank} was ended: {why}", file=sys.stderr)
    _leave(1)


def _leave(status: int) -> NoReturn:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _record(folder: Path, error: BaseException, words: LastWords) -> None:
    """Write the error record; without its traceback it becomes the rank's last words, and its message goes to stderr."""
    message = str(error) or type(error).__name__
    if isinstance(error, SystemExit):
        message = f"code that this rank ran called sys.exit({'' if error.code is None else repr(error.code)})"
    record = ErrorRecord(
        rank=int(os.environ.get("RANK", 0)),
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        kind=type(error).__name__,
        message=message,
        reported=isinstance(error, ParsimError),
        peer_lost=_is_about_a_peer(error),
        time_s=time.time(),
        traceback="".join(traceback.format_exception(error)),
    )
    words.say(json.dumps(asdict(replace(record, traceback="", message=message[:MOST_SAID])), ensure_ascii=False))
    with contextlib.suppress(OSError):  # its output may be a file on a full disk
        print(f"{record.kind}: {message}", file=sys.stderr)
    with contextlib.suppress(OSError):
        write_text_atomically(error_path(folder, record.rank), json.dumps(asdict(record), indent=1))


def _is_about_a_peer(error: BaseException | None) -> bool:
    """True if this error, or the one it was raised from, is a communication library's about a peer that is gone."""
    seen: set[int] = set()  # an error that was raised from itself has no end of causes
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error).lower()
        if not isinstance(error, ParsimError) and any(phrase in text for phrase in _PEER_LOST):
            return True
        error = error.__cause__
    return False


def read_error(path: Path, words: str = "") -> ErrorRecord | None:
    """The record a rank left, or else its last words, as `read_last_words` gives them; None if there is neither."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return ErrorRecord(**json.loads(path.read_text()))
    with contextlib.suppress(ValueError, TypeError):
        return ErrorRecord(**json.loads(words))
    return None
