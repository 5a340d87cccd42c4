"""When the parts of a machine fail."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import numpy as np

from parsim.engines.scenario.scenario import Failures


def failure_times_s(failures: Failures, ranks: int, nodes: int, rng: np.random.Generator) -> Iterator[float]:
    """The times of all failures, ascending; it ends where none is to come.

    Exponential times of many parts are one Poisson process of the summed rate. With "weibull" every rank and node is renewed
    when it fails and ages by itself, all new at 0, whether the run is up or down.
    """
    stated = iter(sorted(entry.at_s for entry in failures.at))
    return heapq.merge(stated, _drawn_s(failures, ranks, nodes, rng))


def _drawn_s(failures: Failures, ranks: int, nodes: int, rng: np.random.Generator) -> Iterator[float]:
    means = [(failures.rank_mtbf_s, ranks), (failures.node_mtbf_s, nodes)]
    if failures.distribution == "exponential":
        rate = sum(count / mean for mean, count in means if mean is not None)
        now = 0.0
        while rate:
            for gap in rng.exponential(1 / rate, 64).tolist():
                now += gap
                yield now
        return
    stretch = 1 / math.gamma(1 + 1 / failures.shape)
    due = [
        (mean * stretch * float(draw), mean * stretch)
        for mean, count in means
        if mean is not None
        for draw in rng.weibull(failures.shape, count)
    ]
    heapq.heapify(due)
    while due:
        at_s, scale = due[0]
        yield at_s
        heapq.heapreplace(due, (at_s + scale * float(rng.weibull(failures.shape)), scale))
