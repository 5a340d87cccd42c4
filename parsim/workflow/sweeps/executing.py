"""Where points are answered: in this process, in processes of this machine that persist (loky), or on a Dask cluster.

All three yield rows as they come. A worker that dies is replaced, and the points it held are asked again, one at a time. A
point whose process dies twice becomes a row that says so.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from parsim.errors import ConfigError, ExecutionError, MissingDependencyError
from parsim.workflow.sweeps.evaluating import (
    NOTHING_SHARED,
    SharedValues,
    evaluate_point,
    evaluate_points,
    shared_values,
    without_values,
)
from parsim.workflow.sweeps.points import SweepPoint
from parsim.workflow.sweeps.rows import failed_row

if TYPE_CHECKING:
    from distributed import Client

Row = dict[str, Any]
Numbered = tuple[int, Row]
Submit = Callable[[Sequence[SweepPoint]], "Future[list[Numbered]]"]

WORTH_PROCESSES_S = 20.0
"""Work left from which processes are started where no number was given: each takes some seconds to start."""
CHUNK_S = 1.0
"""Work that is sent to a worker at once, as far as it is known."""
MOST_IN_CHUNK = 64
IN_FLIGHT = 3
"""Chunks per worker that are sent ahead."""
CONNECT_S = 10.0
PARENT_S = 1.0
"""How often a worker looks whether its parent is alive."""
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
"""A worker per core needs no threads beside it."""

DIED = (
    "its worker process died twice (killed, or out of memory); ask it alone with `parsim plan` to see why, or give the sweep "
    "fewer processes (--jobs)"
)


def here(points: Sequence[SweepPoint]) -> Iterator[Numbered]:
    """Rows of points, answered in this process, in order.

    Args:
        points: to answer.
    """
    for point in points:
        yield point.number, evaluate_point(point)


def here_or_in_processes(points: Sequence[SweepPoint], cores: int | None = None) -> Iterator[Numbered]:
    """Rows of points: here while they are few or fast, else in a process per core.

    Args:
        points: to answer. cores: None: as many as this process may use.
    """
    cores = cores or available_cores()
    begun, answered = time.perf_counter(), 0
    for place, point in enumerate(points):
        yield point.number, evaluate_point(point)
        answered += 1
        if answered == 1:  # it compiled and loaded what all others only use
            begun = time.perf_counter()
            continue
        left_s = (time.perf_counter() - begun) / (answered - 1) * (len(points) - place - 1)
        if cores > 1 and left_s > WORTH_PROCESSES_S:
            yield from in_processes(points[place + 1 :], cores)
            return


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(points: Sequence[SweepPoint], jobs: int) -> Iterator[Numbered]:
    """Rows of points, as they come, from processes that persist and get the Models once.

    Args:
        points: to answer. jobs: processes.
    """
    from joblib.externals.loky import ProcessPoolExecutor

    shared = shared_values(points)

    def open_pool(workers: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(max_workers=workers, initializer=_begin_worker, initargs=(shared, os.getpid()), env=THREADS)

    left: list[SweepPoint] = [without_values(point) for point in points]
    while left:
        pool = open_pool(min(jobs, len(left)))
        answered: set[int] = set()
        sent: list[SweepPoint] = []
        try:
            for number, row in _stream(left, partial(_submit, pool), jobs, sent):
                answered.add(number)
                yield number, row
            return
        except BrokenExecutor:
            suspects = [point for point in sent if point.number not in answered]
        finally:
            _stop(pool)
        left = [point for point in left if point.number not in answered and point not in suspects]
        yield from _one_at_a_time(suspects, open_pool)


def _submit(pool: Any, chunk: Sequence[SweepPoint]) -> Future[list[Numbered]]:
    sent: Future[list[Numbered]] = pool.submit(_in_worker, list(chunk))
    return sent


def _one_at_a_time(suspects: Sequence[SweepPoint], open_pool: Callable[[int], Any]) -> Iterator[Numbered]:
    """Points that were asked while a worker died: each alone, so that the next death names its point."""
    pool = open_pool(1)
    try:
        for point in suspects:
            try:
                yield from pool.submit(_in_worker, [point]).result()
            except BrokenExecutor:
                _stop(pool)
                pool = open_pool(1)
                yield point.number, failed_row(DIED)
    finally:
        _stop(pool)


def _stop(pool: Any) -> None:
    pool.shutdown(wait=True, kill_workers=True)


_SHARED: SharedValues = NOTHING_SHARED
"""Of this worker process."""


def _begin_worker(shared: SharedValues, parent: int) -> None:
    """What a worker process does first. It ends with the process that started it, however that ends."""
    global _SHARED
    _SHARED = shared
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Leave as soon as the parent is another one: loky's workers would wait for a killed parent for ever."""
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os._exit(1)


def _in_worker(points: Sequence[SweepPoint]) -> list[Numbered]:
    return evaluate_points(points, _SHARED)


def _stream(points: Sequence[SweepPoint], submit: Submit, workers: int, sent: list[SweepPoint]) -> Iterator[Numbered]:
    """Send points in chunks, some ahead, and yield their rows as they come.

    Args:
        points: to answer. submit: sends a chunk. workers: that work at once. sent: filled with what was sent.

    Raises:
        BrokenExecutor: a worker died; its chunks are among `sent`.
    """
    begun, done, place = time.perf_counter(), 0, 0
    running: set[Future[list[Numbered]]] = set()
    while place < len(points) or running:
        while place < len(points) and len(running) < IN_FLIGHT * workers:
            size = _chunk_size(len(points) - place, workers, done, time.perf_counter() - begun)
            chunk = points[place : place + size]
            sent.extend(chunk)
            place += size
            running.add(submit(chunk))
        finished, running = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            rows = future.result()
            done += len(rows)
            yield from rows


def _chunk_size(left: int, workers: int, done: int, spent_s: float) -> int:
    """About `CHUNK_S` of work, and no more than leaves some for every worker."""
    if not done:
        return 1
    each_s = spent_s * workers / done
    return max(1, min(int(CHUNK_S / max(each_s, 1e-3)), MOST_IN_CHUNK, left // (2 * workers)))


def on_dask(points: Sequence[SweepPoint], address: str) -> Iterator[Numbered]:
    """Rows of points, as they come, from the workers of a Dask cluster that runs already.

    Args:
        points: to answer. address: of its scheduler, such as tcp://10.0.0.1:8786.

    Raises:
        MissingDependencyError: without dask. ConfigError: no cluster is there, or its workers have another parsim.
        ExecutionError: the cluster went away in the middle.
    """
    client = connect(address)
    try:
        workers = _check_workers(client, address)
        shared = client.scatter(shared_values(points), broadcast=True)

        def submit(chunk: Sequence[SweepPoint]) -> Any:
            return client.submit(evaluate_points, list(chunk), shared, pure=False, key=_task_name(chunk))

        yield from _dask_stream([without_values(point) for point in points], submit, workers, client.loop, address)
    finally:
        with contextlib.suppress(Exception):
            client.close(timeout=5)


_asked = 0


def _task_name(chunk: Sequence[SweepPoint]) -> str:
    """Every submission has its own: Dask would take an equal name for the same task."""
    global _asked
    _asked += 1
    return f"parsim-{os.getpid()}-{_asked}-{chunk[0].key}"


def connect(address: str) -> Client:
    """A client of a Dask scheduler. Raises as `on_dask`.

    Args:
        address: of the scheduler.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingDependencyError(f"--on {address} needs dask; install parsim[cluster]") from error
    try:
        return Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise ConfigError(
            f"no Dask scheduler answers at {address} within {CONNECT_S:g} s ({type(error).__name__}); start one with `dask "
            "scheduler` and workers with `dask worker`, or leave --on out to use this machine"
        ) from error


def _check_workers(client: Client, address: str) -> int:
    """How many threads of workers there are, all with this very parsim."""
    from parsim.workflow.sweeps.points import code_digest

    said: dict[str, Any] = client.run(code_digest, on_error="return")
    answers = {worker: digest for worker, digest in said.items() if not isinstance(digest, OSError)}  # the others died just now
    for digest in answers.values():
        if isinstance(digest, BaseException):
            raise ConfigError(
                f"the workers at {address} cannot import parsim ({type(digest).__name__}: {digest}); install this version there"
            )
    if not answers:
        raise ConfigError(f"the Dask cluster at {address} has no workers; start one with `dask worker {address}`")
    other = [worker for worker, digest in answers.items() if digest != code_digest()]
    if other:
        raise ConfigError(
            f"{len(other)} of {len(answers)} workers at {address} have another parsim; install this version there"
        )
    return sum(client.nthreads().values())


def _dask_stream(
    points: Sequence[SweepPoint], submit: Callable[[Sequence[SweepPoint]], Any], workers: int, loop: Any, address: str
) -> Iterator[Numbered]:
    """As `_stream`, with Dask's futures: Dask itself asks again what a dead worker held, some times."""
    from distributed import CancelledError, KilledWorker, as_completed

    begun, done, place = time.perf_counter(), 0, 0
    coming = as_completed(loop=loop)
    chunks: dict[Any, Sequence[SweepPoint]] = {}

    def send(chunk: Sequence[SweepPoint]) -> None:
        future = submit(chunk)
        chunks[future.key] = chunk
        coming.add(future)

    while place < len(points) or chunks:
        while place < len(points) and len(chunks) < IN_FLIGHT * workers:
            size = _chunk_size(len(points) - place, workers, done, time.perf_counter() - begun)
            send(points[place : place + size])
            place += size
        try:
            future = next(coming)
            rows = future.result()
        except KilledWorker:
            chunk = chunks.pop(future.key)
            if len(chunk) == 1:
                yield chunk[0].number, failed_row(DIED)
            for point in chunk if len(chunk) > 1 else ():
                send([point])
            continue
        except (CancelledError, OSError, StopIteration) as error:
            raise ExecutionError(
                f"the Dask cluster at {address} is gone ({type(error).__name__}); the points that were answered are kept: "
                "give the same command again to continue"
            ) from error
        del chunks[future.key]
        done += len(rows)
        yield from rows
