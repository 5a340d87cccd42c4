"""Partition of samples among workers: which worker trains on which samples.

Every rule returns one int64 array of sample numbers per worker; together they hold every sample exactly once. A new rule is
a function and a row of SHARDINGS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from parsim.errors import AlgorithmError, near_matches

Shards = tuple[NDArray[np.int64], ...]


def iid_shards(targets: NDArray[np.generic], sizes: NDArray[np.int64], rng: np.random.Generator, _: float) -> Shards:
    """A random permutation cut into pieces of `sizes`: every worker sees the same distribution."""
    return _cut(rng.permutation(len(targets)).astype(np.int64), sizes)


def label_sorted_shards(targets: NDArray[np.generic], sizes: NDArray[np.int64], _: np.random.Generator, __: float) -> Shards:
    """Samples sorted by target (stable), cut into pieces of `sizes`: each worker sees one or two classes, the hardest case."""
    return _cut(np.argsort(targets, kind="stable").astype(np.int64), sizes)


def dirichlet_shards(
    targets: NDArray[np.generic], sizes: NDArray[np.int64], rng: np.random.Generator, concentration: float
) -> Shards:
    """Each class is dealt out in proportions drawn from Dirichlet(concentration * sizes/mean size): unequal sizes follow.

    Large concentrations approach IID, small ones give each class to one worker. A worker that would stay empty takes one
    sample of the largest shard, so every worker can train. Needs classes, not real-valued targets: a value that occurs once
    goes whole to one worker.
    """
    if concentration <= 0:
        raise AlgorithmError(
            f"the Dirichlet concentration must be > 0, got {concentration}; 0.1 is very uneven, 100 nearly even"
        )
    prior = concentration * sizes / sizes.mean()
    pieces: list[list[NDArray[np.int64]]] = [[] for _ in sizes]
    for value in np.unique(targets):
        members = rng.permutation(np.flatnonzero(targets == value))
        edges = np.round(np.cumsum(rng.dirichlet(prior))[:-1] * len(members)).astype(np.int64)
        for worker, piece in enumerate(np.split(members, edges)):
            pieces[worker].append(piece.astype(np.int64))
    shards = [rng.permutation(np.concatenate(piece)) for piece in pieces]
    while min(map(len, shards)) == 0:
        empty, largest = int(np.argmin([*map(len, shards)])), int(np.argmax([*map(len, shards)]))
        shards[empty], shards[largest] = shards[largest][:1], shards[largest][1:]
    return tuple(shards)


ShardingRule = Callable[[NDArray[np.generic], NDArray[np.int64], np.random.Generator, float], Shards]

SHARDINGS: dict[str, ShardingRule] = {
    "iid": iid_shards,
    "label_sorted": label_sorted_shards,
    "dirichlet": dirichlet_shards,
}


def shard_samples(
    kind: str,
    targets: NDArray[np.generic],
    workers: int,
    *,
    seed: int = 0,
    concentration: float = 0.5,
    proportions: Sequence[float] | None = None,
) -> Shards:
    """Deal the samples of `targets` ([n]) to `workers` by the rule `kind` of SHARDINGS.

    Args:
        concentration: of the Dirichlet rule alone.
        proportions: the relative size of each worker's shard (a mean, for Dirichlet); None for equal ones, which differ
            by one sample where n does not divide.

    Raises:
        AlgorithmError: more workers than samples, an unknown rule, proportions that are not positive or not one per worker.
    """
    if kind not in SHARDINGS:
        raise AlgorithmError(f"unknown sharding {kind!r}{near_matches(kind, SHARDINGS)}")
    if not 1 <= workers <= len(targets):
        raise AlgorithmError(
            f"{workers} workers cannot share {len(targets)} samples; use between 1 and {len(targets)} workers, or more samples"
        )
    sizes = shard_sizes(len(targets), workers, proportions)
    return SHARDINGS[kind](targets, sizes, np.random.default_rng([seed, workers]), concentration)


def shard_sizes(samples: int, workers: int, proportions: Sequence[float] | None = None) -> NDArray[np.int64]:
    """int64 [workers], each >= 1, summing to `samples`, as near to the proportions as whole samples allow."""
    share = np.full(workers, 1.0) if proportions is None else np.asarray(proportions, dtype=np.float64)
    if share.shape != (workers,) or not (share > 0).all():
        raise AlgorithmError(f"proportions must be {workers} positive numbers, one per worker; got {proportions}")
    exact = share / share.sum() * samples
    sizes: NDArray[np.int64] = np.maximum(np.floor(exact).astype(np.int64), 1)
    by_need = np.argsort(-(exact - sizes), kind="stable")
    short = samples - int(sizes.sum())
    if short >= 0:
        sizes[by_need[:short]] += 1
    while sizes.sum() > samples:
        sizes[np.argmax(sizes)] -= 1
    return sizes


def _cut(order: NDArray[np.int64], sizes: NDArray[np.int64]) -> Shards:
    return tuple(np.split(order, np.cumsum(sizes)[:-1]))
