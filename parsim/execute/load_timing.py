"""How long reading a batch of a dataset takes, timed before the training in processes like those that will read.

Every reader is a fork of this process that does what a rank does: it takes its core, makes the dataset and reads batches of the
first steps, each behind a small forward and update, which leave the caches as a training does. So nothing of this process
changes: no random state, no position of an iterable dataset, no thread. A dataset that hangs, or ends its process, ends a
reader.

Reads of a whole batch and of a part of it, in turn, give seconds per read and per sample. Reads that another program
interrupted are left out where enough are left. The first sample is the warm-up, and counts in no mean.

Leaves out: what becomes slower beside the computation of other threads; samples far from the beginning of the data.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from parsim.costs.loading import MeasuredLoading
from parsim.data.samples import Order, Samples, StreamSamples
from parsim.errors import DataError
from parsim.execute.loading import WorkerBatches, host_values, prepare_worker
from parsim.execute.processes.output import descendants, die_with_parent
from parsim.execute.processes.setup import available_cores, keep_freed_memory, prepare_rank

BUDGET_S = 1.0
"""Seconds of reading, at most, behind the first sample."""
PATIENCE_S = 20.0
"""Seconds until a dataset has to be made and to have given its first sample."""
ENOUGH, LEAST = 12, 3
"""Reads of a whole batch per reader: after ENOUGH a mean that is known to PRECISION will do; from fewer than LEAST it is known
to FEW_SIGMA at best."""
FEW_SIGMA = 0.25
SIGMA = 0.05
"""Assumed relative difference between reading before a training and in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One reader: seconds beside the samples, of a read right behind another, per sample, per sample that is passed."""

    first_s: float
    again_s: float
    sample_s: float
    passing_s: float
    whole_s: float
    error: float
    spread: float
    core_share: float


def merged(readers: Sequence[Sequence[dict[str, Any]]], *, global_batch: int, workers: int) -> MeasuredLoading:
    """The mean over the readers, each with its entries (`_Reader.entries`). Raises DataError: one read no batch, or failed."""
    for entries in readers:
        failed = next((entry["failed"] for entry in entries if "failed" in entry), None)
        if failed is not None:
            raise DataError(failed)
        if not any("prepared_s" in entry for entry in entries):
            raise DataError(f"the dataset was not made within {PATIENCE_S:.0f} s")
        if not any("warm_up_s" in entry for entry in entries):
            raise DataError(f"its first sample was not there within {PATIENCE_S:.0f} s")
        if not any(entry.get("kind") == "whole" for entry in entries):
            raise DataError(f"a second sample was not there {2 * BUDGET_S:.0f} s after the first")
    lines = [_line(entries) for entries in readers]
    every = [entry for entries in readers for entry in entries]
    reads = [entry for entry in every if "samples" in entry]
    handovers = [entry["seconds"] for entry in every if entry.get("kind") == "handover"]
    whole_s = np.array([line.whole_s for line in lines])
    between = float(np.std(whole_s) / whole_s.mean()) if len(lines) > 1 else 0.0
    error = math.sqrt(sum(line.error**2 for line in lines)) / len(lines)
    wholes = sum(entry["kind"] == "whole" for entry in reads)
    few = FEW_SIGMA if wholes < LEAST * len(lines) else 0.0
    batch = max(entry["samples"] for entry in reads if entry["kind"] == "whole")

    def mean(name: str) -> float:
        return float(np.mean([getattr(line, name) for line in lines]))

    return MeasuredLoading(
        first_s=mean("first_s"),
        again_s=mean("again_s"),
        sample_s=mean("sample_s"),
        passing_s=mean("passing_s"),
        handover_s=float(np.median(handovers)) if handovers else 0.0,
        workers=workers,
        cores=len(available_cores()),
        core_share=mean("core_share"),
        sigma=math.hypot(SIGMA, error, between, few),
        repeat_sigma=mean("spread"),
        global_batch=global_batch,
        batch=batch,
        batches=wholes,
        samples=sum(entry["samples"] for entry in reads),
        readers=len(lines),
        taken_s=max(sum(entry["seconds"] for entry in entries if "samples" in entry) for entries in readers),
        prepared_s=max(entry["prepared_s"] for entry in every if "prepared_s" in entry),
        warm_up_s=max(entry["warm_up_s"] for entry in every if "warm_up_s" in entry),
    )


def _line(entries: Sequence[dict[str, Any]]) -> _Line:
    """Seconds per read and per sample, through the means of whole batches and of parts."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if "samples" in entry:
            by_kind.setdefault(entry["kind"], []).append(entry)
    wholes = by_kind["whole"]
    batch, whole_s = wholes[0]["samples"], _mean_s(wholes)
    if "part" in by_kind:
        part = by_kind["part"][0]["samples"]
        sample_s = max(0.0, (whole_s - _mean_s(by_kind["part"])) / (batch - part))
        first_s = max(0.0, whole_s - batch * sample_s)
    else:  # of one sample the two cannot be told apart
        part, sample_s, first_s = batch, whole_s / batch, 0.0
    sample_s = (whole_s - first_s) / batch
    again_s = max(0.0, _mean_s(by_kind["again"]) - part * sample_s) if "again" in by_kind else first_s
    passing_s = 0.0
    if "passed" in by_kind:
        passing_s = (_mean_s(by_kind["passed"]) - first_s - sample_s) / (batch - 1)
        passing_s = min(max(0.0, passing_s), sample_s)
    quiet = _quiet(wholes) or wholes
    seconds = [entry["seconds"] for entry in quiet]
    return _Line(
        first_s=first_s,
        again_s=min(again_s, first_s) if "part" in by_kind else again_s,
        sample_s=sample_s - passing_s,
        passing_s=passing_s,
        whole_s=whole_s,
        error=standard_error(seconds),
        spread=float(np.std(seconds) / np.mean(seconds)),
        core_share=min(1.0, sum(entry["cpu_s"] for entry in quiet) / sum(seconds)),
    )


def _mean_s(entries: Sequence[dict[str, Any]]) -> float:
    """The mean of the reads that nothing interrupted; the median of all where most were interrupted."""
    quiet = [entry["seconds"] for entry in _quiet(entries)]
    return float(np.mean(quiet)) if quiet else float(np.median([entry["seconds"] for entry in entries]))


def _quiet(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reads that nothing interrupted; none where they are the lesser part."""
    quiet = [entry for entry in entries if not entry["disturbed"]]
    return quiet if 2 * len(quiet) >= len(entries) else []


def standard_error(seconds: Sequence[float]) -> float:
    mean = float(np.mean(seconds))
    return float(np.std(seconds, ddof=1)) / math.sqrt(len(seconds)) / mean if len(seconds) > 1 and mean > 0 else FEW_SIGMA


PRECISION = 0.01
SHARE = 8
"""A part that is read is the SHARE-th of a batch. As many batches fit into BUDGET_S, or smaller ones are read."""
SWEPT_BYTES = 4 * 2**20
HANDOVERS = 8

Load = Callable[[], tuple[Samples, Order]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderRequest:
    """What readers read, and on what.

    load: makes the training samples and their order, as a rank does. dtype: of inputs that are numbers. global_batch: samples
    of a step. readers: processes that read at once, one per rank and core. workers: of each rank. device: "cpu" or "cuda".
    """

    load: Load
    dtype: torch.dtype
    global_batch: int
    readers: int
    workers: int
    device: str


def timed_loading(request: ReaderRequest) -> MeasuredLoading:
    """Read batches of the dataset in processes of their own, for at most `BUDGET_S` behind the first sample. Raises DataError:
    the dataset cannot be read there, in words that follow "loading not measured: "."""
    if not sys.platform.startswith("linux"):
        raise DataError("readers are forked, which is safe on Linux alone")
    pids: list[int] = []
    pipes: list[int] = []
    try:
        for number in range(request.readers):
            reading, writing = os.pipe()
            pid = _forked(request, number, writing, [*pipes, reading])
            os.close(writing)
            pids.append(pid)
            pipes.append(reading)
        readers = _entries(pipes)
    finally:
        for pipe in pipes:
            os.close(pipe)
        for pid in {*descendants(pids), *pids}:  # no reader, and nothing that one started, outlives this
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    return merged(readers, global_batch=request.global_batch, workers=request.workers)


def _forked(request: ReaderRequest, number: int, writing: int, others: Sequence[int]) -> int:
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, none of which the reader needs
        pid = os.fork()
    if pid:
        return pid
    _read_and_leave(request, number, writing, others, parent)


def _read_and_leave(request: ReaderRequest, number: int, writing: int, others: Sequence[int], parent: int) -> NoReturn:
    """The reader: everything that it tells is a line of JSON."""
    status = 1
    try:
        die_with_parent(parent)
        os.setsid()
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, signal.SIG_DFL)
        for pipe in others:
            os.close(pipe)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        with os.fdopen(writing, "w", buffering=1) as out:
            try:
                for entry in _Reader(request, number).entries():
                    out.write(json.dumps(entry) + "\n")
                out.write(json.dumps({"ended": True}) + "\n")
            except BaseException as error:
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                out.write(json.dumps({"failed": text[:500]}) + "\n")
        status = 0
    finally:
        os._exit(status)


def _entries(pipes: Sequence[int]) -> list[list[dict[str, Any]]]:
    """What every reader told until it ended, or until its time was over."""
    texts = dict.fromkeys(pipes, b"")
    open_ = set(pipes)
    deadline = time.monotonic() + PATIENCE_S
    ready = False
    while open_ and (left_s := deadline - time.monotonic()) > 0:
        for pipe in select.select(list(open_), [], [], left_s)[0]:
            piece = os.read(pipe, 2**16)
            texts[pipe] += piece
            if not piece:
                open_.discard(pipe)
        if not ready and all(b"warm_up_s" in text or pipe not in open_ for pipe, text in texts.items()):
            ready, deadline = True, time.monotonic() + 2 * BUDGET_S  # a last read may take long, and workers start
    readers = [[json.loads(line) for line in texts[pipe].split(b"\n")[:-1]] for pipe in pipes]
    for pipe, entries in zip(pipes, readers, strict=True):
        if pipe not in open_ and not any("ended" in entry or "failed" in entry for entry in entries):
            entries.append({"failed": "it ended the process that read it"})
    return readers


class _Reader:
    """One process that reads, as rank `number` would."""

    def __init__(self, request: ReaderRequest, number: int) -> None:
        self._request, self._number = request, number
        self._batch = -(-request.global_batch // request.readers)
        self._step = 0

    def entries(self) -> Iterator[dict[str, Any]]:
        """`prepared_s`, then `warm_up_s`, then every read, then every part that a worker handed over."""
        ask = self._request
        if ask.workers:
            torch.set_num_threads(1)
            keep_freed_memory()
            prepare_worker()
        else:
            prepare_rank(self._number, ask.readers, device=ask.device)
        begin_s = time.perf_counter()
        self._data, self._order = ask.load()
        yield {"prepared_s": time.perf_counter() - begin_s, "stream": self._is_stream}
        begin_s = time.perf_counter()
        self._values(self._positions(1))
        yield {"warm_up_s": time.perf_counter() - begin_s}
        begin_s = time.perf_counter()
        self._values(self._positions(1))
        sample_s = time.perf_counter() - begin_s
        room = BUDGET_S / (2 * SHARE) / max(sample_s, 1e-9)
        batch = max(1, min(self._batch, int(room)))
        yield from self._reads(batch, time.perf_counter() + BUDGET_S)
        if ask.workers:
            yield from self._handovers(batch)

    @property
    def _is_stream(self) -> bool:
        return isinstance(self._data, StreamSamples)

    def _positions(self, count: int) -> NDArray[np.int64]:
        """Samples that were not read yet, of one step after the other; their number is at most a batch's."""
        if self._is_stream:
            first, self._step = self._step, self._step + count
            return np.arange(first, first + count, dtype=np.int64)
        indices = self._order.indices(self._step // self._request.readers)
        rolled = np.roll(indices, -self._batch * (self._number + self._step % self._request.readers))
        self._step += 1
        return rolled[:count]

    def _values(self, positions: NDArray[np.int64]) -> None:
        host_values(self._data, positions, None, self._request.dtype, 0)

    def _reads(self, batch: int, until_s: float) -> Iterator[dict[str, Any]]:
        """Rounds of: a whole batch; a part of it; right behind it another one; and of a stream, samples that are passed."""
        part, between = max(1, batch // SHARE), _Computation()
        wholes: list[float] = []
        while time.perf_counter() < until_s and (len(wholes) < ENOUGH or standard_error(wholes) > PRECISION):
            for kind, count in (("whole", batch), ("part", part), ("again", part), ("passed", batch)):
                if (kind == "part" and part == batch) or (kind == "passed" and (batch == 1 or not self._is_stream)):
                    continue
                if kind != "again":
                    between.run()
                entry = self._timed(count, kind == "passed")
                yield {"kind": kind, "samples": count, **entry}
                if kind == "whole" and not entry["disturbed"]:
                    wholes.append(entry["seconds"])
                if time.perf_counter() >= until_s:
                    break

    def _timed(self, count: int, passes: bool) -> dict[str, Any]:
        """Read so many samples, of a stream perhaps all but the last without using them."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        positions = self._positions(count)
        self._values(positions[-1:] if passes else positions)
        seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
        disturbed = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw > before
        return {"seconds": seconds, "cpu_s": cpu_s, "disturbed": disturbed}

    def _handovers(self, batch: int) -> Iterator[dict[str, Any]]:
        """Parts that a worker has ready, taken by a process on a rank's core."""
        ask = self._request
        prepare_rank(self._number, ask.readers, device=ask.device)

        def read(step: int, microbatch: int) -> dict[str, torch.Tensor]:
            self._step = step
            return host_values(self._data, self._positions(batch), None, ask.dtype, 0)

        batches = WorkerBatches(read, 1, ask.workers)
        try:
            batches.read(0, 0)
            begin_s = time.perf_counter()
            batches.read(1, 0)
            pause_s = 2 * (time.perf_counter() - begin_s) + 0.002
            for step in range(2, 2 + HANDOVERS):
                time.sleep(pause_s)
                begin_s = time.perf_counter()
                batches.read(step, 0)
                yield {"kind": "handover", "seconds": time.perf_counter() - begin_s}
        finally:
            batches.close()


class _Computation:
    """A forward and an update of a small network: reads right behind each other would find caches that no training leaves.
    Behind it, reading three datasets took within 7% of the processor time that it took behind steps of their own models; right
    behind another read 12 to 15% less. Autograd is left out, because it refuses to run in a fork."""

    def __init__(self) -> None:
        self._swept = torch.zeros(SWEPT_BYTES // 8, dtype=torch.float64)
        convolved = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 32)]
        self._module = nn.Sequential(*convolved, nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
        self._inputs, self._target = torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.long)
        self._moments = [torch.ones_like(weight) for weight in self._module.parameters()]

    @torch.no_grad()
    def run(self) -> None:
        self._swept.add_(1.0)
        nn.functional.cross_entropy(self._module(self._inputs), self._target)
        for weight, moment in zip(self._module.parameters(), self._moments, strict=True):
            weight.mul_(0.999).addcdiv_(moment.mul_(0.9).add_(0.1), moment.sqrt().add_(1e-8), value=1e-3)
