"""Looks at how fast the cores or GPUs are, before and after everything that is measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import torch.distributed as dist

from calibration.rounds.pace import HOST_PACE, PACE, PacedEntry
from parsim.execute.processes.exchange import gather_values
from parsim.execute.processes.speed_probe import SpeedProbe


def paced(
    blocks: Iterable[Callable[[], list[PacedEntry]]], probe: SpeedProbe | None, host: SpeedProbe | None = None
) -> Iterator[PacedEntry]:
    """What this rank measured in one block after the other, each with its own core's pace, or its GPU's and its host's.

    Args:
        probe: of what computes. host: of the core that queues for a GPU.
    """
    before = _seconds(probe), _seconds(host)
    for measure in blocks:
        found = measure()
        after = _seconds(probe), _seconds(host)
        marked = _marked(found, before[0], after[0], PACE)
        yield from _marked(marked, before[1], after[1], HOST_PACE)
        before = after


def paced_together(blocks: Iterable[Callable[[], list[PacedEntry]]], probe: SpeedProbe | None) -> list[PacedEntry]:
    """The same for what all ranks measure together, with the mean pace over the cores; called by every rank."""
    dist.barrier()
    own, found = [_seconds(probe)], []
    for measure in blocks:
        found.append(measure())
        dist.barrier()
        own.append(_seconds(probe))
    gathered = gather_values(own)
    looks = [[value for value in moment if value is not None] for moment in zip(*gathered, strict=True)]
    means = [statistics.mean(values) if values else None for values in looks]
    return [
        entry
        for entries, (before_s, after_s) in zip(found, pairwise(means), strict=True)
        for entry in _marked(entries, before_s, after_s, PACE)
    ]


def _seconds(probe: SpeedProbe | None) -> float | None:
    return None if probe is None else probe.seconds()


def _marked(entries: Iterable[PacedEntry], before_s: float | None, after_s: float | None, key: str) -> list[PacedEntry]:
    if before_s is None or after_s is None:
        return list(entries)
    return [{**entry, key: [before_s, after_s]} for entry in entries]
