"""Looks at how fast the cores are, before and after everything that is measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from calibration.rounds.pace import PACE, PacedEntry
from parsim.execute.processes.speed_probe import SpeedProbe


def paced(blocks: Iterable[Callable[[], list[PacedEntry]]], probe: SpeedProbe | None) -> Iterator[PacedEntry]:
    """What this rank measured in one block after the other, each with its own core's pace."""
    before_s = _seconds(probe)
    for measure in blocks:
        found = measure()
        after_s = _seconds(probe)
        yield from _marked(found, before_s, after_s)
        before_s = after_s


def paced_together(blocks: Iterable[Callable[[], list[PacedEntry]]], probe: SpeedProbe | None) -> list[PacedEntry]:
    """The same for what all ranks measure together, with the mean pace over the cores; called by every rank."""
    dist.barrier()
    own, found = [_seconds(probe)], []
    for measure in blocks:
        found.append(measure())
        dist.barrier()
        own.append(_seconds(probe))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    looks = [[value for value in moment if value is not None] for moment in zip(*gathered, strict=True)]
    means = [statistics.mean(values) if values else None for values in looks]
    return [
        entry
        for entries, (before_s, after_s) in zip(found, pairwise(means), strict=True)
        for entry in _marked(entries, before_s, after_s)
    ]


def _seconds(probe: SpeedProbe | None) -> float | None:
    return None if probe is None else probe.seconds()


def _marked(entries: Iterable[PacedEntry], before_s: float | None, after_s: float | None) -> list[PacedEntry]:
    if before_s is None or after_s is None:
        return list(entries)
    return [{**entry, PACE: [before_s, after_s]} for entry in entries]
