"""Asynchronous epoch averaging: workers merge into one global model in the order in which they arrive, and run on.

The order comes from the event queue of `algorithms.arrivals`, so it depends on simulated seconds alone; workers whose starting
points are known are trained together, which changes no number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parsim.algorithms.arrivals import MergeEvent, merge_events
from parsim.plans.averaging import Arrival, Merged, MergeRule, merge
from parsim.relaxed.replicas import Feed, LocalTraining, Workers, batches_in, feed_problem, stack_batches
from parsim.virtual.rounds import Partition, StepSeconds, TrainingOutcome, TrainingProgress


def train_by_arrival(
    training: LocalTraining,
    partition: Partition,
    rule: MergeRule,
    *,
    step_s: StepSeconds = lambda worker, epoch: 1.0,
    merge_s: float = 0.0,
    total_merges: int | None = None,
    weighted: bool = False,
    order: tuple[MergeEvent, ...] | None = None,
) -> TrainingOutcome:
    """Every worker: an epoch on its shard from the global model it last saw, then its exclusive merge, and again.

    A worker begins each epoch with a new optimizer, as the reference does with every block of samples (here one per worker).
    The final model is the mean of the workers' last merged models for `half` (as the reference), the global model for the other
    merges.

    Args:
        merge_s: seconds a merge holds the global model. total_merges: end after so many instead of `epochs` per worker.
        weighted: arrivals count by their samples. order: replay these events instead of asking the event queue.
    """
    count = partition.workers
    feed = feed_problem(training.problem, partition.shards(training.problem.targets.flatten().numpy()))
    steps = [batches_in(size, partition.batch, partition.keep_remainder) for size in feed.sizes]
    mean_samples = sum(feed.sizes) / count
    events = order or merge_events(
        lambda worker, epoch: steps[worker] * step_s(worker, epoch),
        count,
        merge_s=merge_s,
        epochs=partition.epochs if total_merges is None else None,
        total=total_merges,
    )
    state = Merged(weights=training.start.clone())
    starts: dict[int, tuple[Tensor, int]] = dict.fromkeys(range(count), (state.weights, 0))
    trained: dict[int, Tensor] = {}
    latest = [state.weights] * count
    progress: list[TrainingProgress] = []
    for number, event in enumerate(events, start=1):
        if event.worker not in trained:
            trained |= _train_waiting(training, partition, feed, {k: v for k, v in starts.items() if k not in trained})
        begun, epoch = starts[event.worker]
        share = feed.sizes[event.worker] / mean_samples if weighted else 1.0
        staleness = number - 1 - event.read
        arrival = Arrival(weights=trained.pop(event.worker), start=begun, staleness=staleness, share=share)
        state = merge(state, arrival, rule)
        latest[event.worker] = state.weights
        starts[event.worker] = (state.weights, epoch + 1)
        if number % count == 0 or number == len(events):
            final = torch.stack(latest).mean(0) if rule.kind == "half" and number == len(events) else state.weights
            progress.append(_progress(training, final, latest, number, count, event))
    everyone = torch.stack(latest)
    weights = everyone.mean(0) if rule.kind == "half" else state.weights
    return TrainingOutcome(weights=weights, workers=everyone, progress=tuple(progress), synchronisations=len(events))


def _train_waiting(
    training: LocalTraining, partition: Partition, feed: Feed, waiting: dict[int, tuple[Tensor, int]]
) -> dict[int, Tensor]:
    """One epoch of each waiting worker (its start and epoch), all at once."""
    names = list(waiting)
    workers = Workers.fresh(torch.stack([waiting[worker][0] for worker in names]))
    batches = [partition.batches(feed.rows(worker), worker, waiting[worker][1]) for worker in names]
    for samples in stack_batches(batches):
        workers = training.step_on(workers, feed.batch(names, samples))
    return dict(zip(names, workers.weights, strict=True))


def _progress(
    training: LocalTraining, weights: Tensor, latest: list[Tensor], number: int, workers: int, event: MergeEvent
) -> TrainingProgress:
    everyone = torch.stack(latest)
    return TrainingProgress(
        epoch=-(-number // workers),
        seconds=event.end_s,
        score=training.score(weights),
        mean_score=None,
        consensus=(everyone - everyone.mean(0)).square().sum(1).mean().item(),
        sent_bytes=number / workers * training.weight_bytes,
    )
