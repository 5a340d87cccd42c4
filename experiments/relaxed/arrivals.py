"""Asynchronous epoch averaging: workers merge into one global model in the order in which they arrive, and run on.

Seconds are handed in; nothing here reads a clock. An event queue gives the order in which workers arrive, one merge at a time,
first come first served, ties by worker number. A plan's `merge` goes from replica to replica in turn instead.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.relaxed.sharded import Partition, ShardedOrder, stack_batches
from parsim.errors import AlgorithmError
from parsim.plans.mixing import Arrival, Merged, MergeRule, merge
from parsim.relaxed.replicas import LocalTraining, Workers

EpochSeconds = Callable[[int, int], float]
"""Seconds of local work of (worker, epoch), both counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeEvent:
    """One worker's turn at the global model.

    Attributes:
        worker, epoch: whose local epoch arrives. read: merges that had ended when the worker read what it began from.
        ready_s: its local work ended. start_s, end_s: its exclusive merge; it waited start_s - ready_s.
    """

    worker: int
    epoch: int
    read: int
    ready_s: float
    start_s: float
    end_s: float


def merge_events(
    epoch_s: EpochSeconds, workers: int, *, merge_s: float = 0.0, epochs: int | None = None, total: int | None = None
) -> tuple[MergeEvent, ...]:
    """All merges of asynchronous training in the order they happen; each holds the global model, and its worker, for merge_s.

    epochs: every worker does as many; the fast ones end early. Or total: workers go on until this many merges are done. Raises
    AlgorithmError: neither or both of them, no workers, or seconds that are negative or not finite.
    """
    if (epochs is None) == (total is None) or workers < 1 or merge_s < 0:
        raise AlgorithmError(
            f"merge_events needs workers >= 1, merge_s >= 0 and either epochs or total; "
            f"got {workers}, {merge_s}, {epochs} and {total}"
        )
    wanted = total if total is not None else workers * (epochs or 0)
    queue = [(_seconds(epoch_s, worker, 0), worker, 0, 0) for worker in range(workers)]
    heapq.heapify(queue)
    events: list[MergeEvent] = []
    free_s = 0.0
    while len(events) < wanted:
        ready_s, worker, epoch, read = heapq.heappop(queue)
        start_s = max(ready_s, free_s)
        free_s = start_s + merge_s
        events.append(MergeEvent(worker=worker, epoch=epoch, read=read, ready_s=ready_s, start_s=start_s, end_s=free_s))
        if epochs is None or epoch + 1 < epochs:
            heapq.heappush(queue, (free_s + _seconds(epoch_s, worker, epoch + 1), worker, epoch + 1, len(events)))
    return tuple(events)


def _seconds(epoch_s: EpochSeconds, worker: int, epoch: int) -> float:
    seconds = float(epoch_s(worker, epoch))
    if not 0 <= seconds < np.inf:
        raise AlgorithmError(f"epoch {epoch} of worker {worker} takes {seconds} seconds; give finite seconds >= 0")
    return seconds


def ring_synchronisation_s(workers: int, weight_bytes: float, *, bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> float:
    """2 (P-1) alpha + 2 (P-1)/P |w| / bw: a ring all_reduce of the weights."""
    return 2.0 * (workers - 1) * (latency_s + weight_bytes / workers / bandwidth_bytes_per_s)


def pairwise_merge_s(weight_bytes: float, *, bandwidth_bytes_per_s: float, memory_bytes_per_s: float) -> float:
    """2 |w| / bw + |w| / membw: one worker's turn, its model there, the merge, the merged model back.

    A master that gathers the models of P workers over one link, averages them and sends them back takes P times as long (what
    dislib does, without serialisation and the scheduler's time per task).
    """
    return weight_bytes * (2.0 / bandwidth_bytes_per_s + 1.0 / memory_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergedTraining:
    """The final model [D], every worker's last merged one [P, D], and the score after every P merges with its seconds."""

    weights: Tensor
    workers: Tensor
    curve: tuple[tuple[float, float], ...]

    @property
    def score(self) -> float:
        return self.curve[-1][1]


def train_by_arrival(
    training: LocalTraining,
    partition: Partition,
    rule: MergeRule,
    *,
    step_s: EpochSeconds = lambda worker, epoch: 1.0,
    merge_s: float = 0.0,
    total_merges: int | None = None,
    order: tuple[MergeEvent, ...] | None = None,
) -> MergedTraining:
    """Every worker: an epoch on its shard from the global model it last saw, then its exclusive merge, and again.

    A worker begins each epoch with a new optimizer, as the reference does with every block of samples (here one per worker).
    The final model is the mean of the workers' last merged models for `half` (as the reference), the global model for the other
    merges. Workers whose starting points are known are trained together, which changes no number. total_merges: end after so
    many instead of `epochs` per worker. order: replay these events instead of asking the queue.
    """
    count = partition.workers
    shards = partition.order(training.problem)
    events = order or merge_events(
        lambda worker, epoch: shards.steps_of_worker[worker] * step_s(worker, epoch),
        count,
        merge_s=merge_s,
        epochs=partition.epochs if total_merges is None else None,
        total=total_merges,
    )
    state = Merged(weights=training.start.clone())
    starts: dict[int, tuple[Tensor, int]] = dict.fromkeys(range(count), (state.weights, 0))
    trained: dict[int, Tensor] = {}
    latest = [state.weights] * count
    curve: list[tuple[float, float]] = []
    for number, event in enumerate(events, start=1):
        if event.worker not in trained:
            trained |= _train_waiting(training, shards, {k: v for k, v in starts.items() if k not in trained})
        begun, epoch = starts[event.worker]
        arrival = Arrival(weights=trained.pop(event.worker), start=begun, staleness=number - 1 - event.read)
        state = merge(state, arrival, rule)
        latest[event.worker] = state.weights
        starts[event.worker] = (state.weights, epoch + 1)
        if number % count == 0 or number == len(events):
            final = torch.stack(latest).mean(0) if rule.kind == "half" and number == len(events) else state.weights
            curve.append((event.end_s, training.score(final)))
    everyone = torch.stack(latest)
    weights = everyone.mean(0) if rule.kind == "half" else state.weights
    return MergedTraining(weights=weights, workers=everyone, curve=tuple(curve))


def _train_waiting(training: LocalTraining, shards: ShardedOrder, waiting: dict[int, tuple[Tensor, int]]) -> dict[int, Tensor]:
    """One epoch of each waiting worker (its start and epoch), all at once."""
    workers = Workers.fresh(torch.stack([start for start, _ in waiting.values()]))
    batches = [shards.batches(worker, epoch) for worker, (_, epoch) in waiting.items()]
    for samples in stack_batches(batches, max(map(len, batches))):
        workers = training.step(workers, samples)
    return dict(zip(waiting, workers.weights, strict=True))
