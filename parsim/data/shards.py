"""Samples dealt to replicas once and for all: each trains on its own shard, in an order of its own.

    iid              a random permutation, cut into equal parts
    label_sorted     sorted by class, cut into equal parts: each replica sees one or two classes, the hardest case
    dirichlet:A      each class in proportions drawn from Dirichlet(A): unequal parts follow; A = 0.1 is very uneven, 100 even
    sizes:N,M,...    a random permutation, cut into parts of N, M, ... samples
    package:function called with (targets, replicas, seed), returns an int64 array of sample numbers per replica

Together shards hold every sample exactly once. Replicas take batches of one size, so one with a small shard passes over it more
often than one with a large one. A new rule is a function and a row of SHARDINGS.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsim.data.samples import Order, Samples, StreamSamples, order_of, permutation
from parsim.errors import DataError, FactoryError
from parsim.registry import Registry, is_reference

Shards = tuple[NDArray[np.int64], ...]
Targets = NDArray[np.generic]
SIZES = "sizes"
SHARD = 11
"""Tells the seed of a shard's orders from those of the epochs' orders and of held-out samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """A row of SHARDINGS.

    Attributes:
        deal: from targets [n], the samples each replica gets at best (int64 [replicas]), a generator, and the rule's number.
        number: of the rule, where none is given; None: it takes none. own: called with (targets, replicas, seed) instead.
    """

    deal: Callable[[Targets, NDArray[np.int64], np.random.Generator, float], Shards]
    number: float | None = None
    own: Callable[[Targets, int, int], Sequence[Any]] | None = None
    reads_targets: bool = True


def iid_shards(targets: Targets, sizes: NDArray[np.int64], rng: np.random.Generator, _: float) -> Shards:
    """A random permutation cut into pieces of `sizes`: every worker sees the same distribution."""
    return _cut(rng.permutation(len(targets)).astype(np.int64), sizes)


def label_sorted_shards(targets: Targets, sizes: NDArray[np.int64], _: np.random.Generator, __: float) -> Shards:
    """Samples sorted by target (stable), cut into pieces of `sizes`."""
    return _cut(np.argsort(targets, kind="stable").astype(np.int64), sizes)


def dirichlet_shards(targets: Targets, sizes: NDArray[np.int64], rng: np.random.Generator, concentration: float) -> Shards:
    """Each class is dealt out in proportions drawn from Dirichlet(concentration * sizes/mean size). A worker that would stay
    empty takes one sample of the largest shard, so every worker can train."""
    if not concentration > 0:
        raise DataError(f"the Dirichlet concentration must be > 0, got {concentration}; 0.1 is very uneven, 100 nearly even")
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


def _from_function(found: Any) -> Any:
    return ShardingRule(deal=iid_shards, own=found) if callable(found) else found


SHARDINGS: Registry[ShardingRule] = Registry(
    "sharding",
    ShardingRule,
    {
        "iid": ShardingRule(deal=iid_shards, reads_targets=False),
        "label_sorted": ShardingRule(deal=label_sorted_shards),
        "dirichlet": ShardingRule(deal=dirichlet_shards, number=0.5),
        SIZES: ShardingRule(deal=iid_shards, reads_targets=False),
    },
    error=DataError,
    adapt=_from_function,
)


def shards_text(value: Any) -> Any:
    """A list of sizes as the text `sizes:N,M,...`; anything else as it is."""
    return f"{SIZES}:{','.join(map(str, value))}" if isinstance(value, list | tuple) else value


def parse_shards(text: str) -> tuple[ShardingRule, float, tuple[int, ...]]:
    """The rule, its number and the sizes that a text such as `dirichlet:0.3` or `sizes:900,537` names. Raises DataError: an
    unknown rule, or numbers that it does not take."""
    if is_reference(text):
        return SHARDINGS[text], 0.0, ()
    name, given, numbers = text.partition(":")
    rule = SHARDINGS[name]
    try:
        if name == SIZES:
            sizes = tuple(int(size) for size in numbers.split(","))
            if min(sizes) < 1:
                raise DataError(f"shards {text!r}: a replica without samples cannot train; give every one at least 1")
            return rule, 0.0, sizes
        if given and rule.number is None:
            raise DataError(f"shards {text!r}: {name} takes no number; write {name}")
        number = float(numbers) if given else rule.number or 0.0
    except ValueError as error:
        raise DataError(f"shards {text!r}: {error}; write for example dirichlet:0.3 or sizes:900,537") from error
    if rule.number is not None and not 0 < number < float("inf"):
        raise DataError(f"shards {text!r}: the Dirichlet concentration must be > 0; 0.1 is very uneven, 100 nearly even")
    return rule, number, ()


def shard_sizes(samples: int, workers: int, proportions: Sequence[float] | None = None) -> NDArray[np.int64]:
    """int64 [workers], each >= 1, summing to `samples`, as near to the proportions as whole samples allow."""
    share = np.full(workers, 1.0) if proportions is None else np.asarray(proportions, dtype=np.float64)
    if share.shape != (workers,) or not (share > 0).all():
        raise DataError(f"proportions must be {workers} positive numbers, one per worker; got {proportions}")
    exact = share / share.sum() * samples
    sizes: NDArray[np.int64] = np.maximum(np.floor(exact).astype(np.int64), 1)
    by_need = np.argsort(-(exact - sizes), kind="stable")
    short = samples - int(sizes.sum())
    if short >= 0:
        sizes[by_need[:short]] += 1
    while sizes.sum() > samples:
        sizes[np.argmax(sizes)] -= 1
    return sizes


def check_enough(samples: int, count: int, whose: str = "replicas") -> None:
    """Raise DataError unless each of so many can have a sample. whose: what they are called."""
    if not 1 <= count <= samples:
        raise DataError(f"{count} {whose} cannot share {samples} samples; use between 1 and {samples} {whose}, or more samples")


def deal(text: str, targets: Targets, replicas: int, *, seed: int) -> Shards:
    """The shard of each replica: int64 arrays of sample numbers, by a text as of `parse_shards`. targets: [n], classes where
    the rule depends on them.

    Raises DataError: more replicas than samples, sizes that are not one per replica or do not sum to the samples, or a function
    whose shards do not hold every sample exactly once. FactoryError: the function raised.
    """
    rule, number, sizes = parse_shards(text)
    check_enough(len(targets), replicas)
    if sizes and (len(sizes) != replicas or sum(sizes) != len(targets)):
        raise DataError(
            f"training.shards = {list(sizes)}: {len(sizes)} sizes that sum to {sum(sizes)}, and {replicas} replicas share "
            f"{len(targets)} samples; give one size per replica, and all samples to some replica"
        )
    if rule.own is not None:
        try:
            dealt = [np.asarray(shard).ravel() for shard in rule.own(targets, replicas, seed)]
        except Exception as error:  # of the user's own function
            where = traceback.format_exc(limit=-2)
            raise FactoryError(
                f"training.shards = {text!r} raised {type(error).__name__}: {error}; it is called with (targets, "
                f"replicas, seed) and returns the numbers of each replica's samples\n{where}"
            ) from error
        return _checked(text, dealt, len(targets), replicas)
    wanted = np.array(sizes, dtype=np.int64) if sizes else shard_sizes(len(targets), replicas)
    return rule.deal(targets, wanted, np.random.default_rng([seed, replicas]), number)


def _checked(text: str, shards: Sequence[NDArray[Any]], samples: int, replicas: int) -> Shards:
    """What a function of the user's own has dealt, if it holds every sample exactly once."""
    if len(shards) != replicas or min(map(len, shards), default=0) == 0:
        raise DataError(f"training.shards = {text!r} gave shards of {list(map(len, shards))} samples for {replicas} replicas")
    if not np.array_equal(np.sort(np.concatenate(shards)), np.arange(samples)):
        raise DataError(
            f"training.shards = {text!r}: {sum(map(len, shards))} numbers over all shards are not each of the {samples} "
            "samples once; return every number from 0 on in exactly one shard"
        )
    return tuple(shard.astype(np.int64) for shard in shards)


def _cut(order: NDArray[np.int64], sizes: NDArray[np.int64]) -> Shards:
    return tuple(np.split(order, np.cumsum(sizes)[:-1]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedOrder:
    """Which samples each step trains on: of every replica the next ones of its shard, one replica after another. A replica
    passes over its shard again and again, each time in an order drawn from (seed, replica, pass)."""

    shards: Shards
    global_batch: int
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        return max(1, sum(map(len, self.shards)) // self.global_batch)

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def indices(self, step: int) -> NDArray[np.int64]:
        each = self.global_batch // len(self.shards)
        return np.concatenate([self._next(replica, step * each, each) for replica in range(len(self.shards))])

    def _next(self, replica: int, first: int, count: int) -> NDArray[np.int64]:
        shard = self.shards[replica]
        passes, places = np.divmod(np.arange(first, first + count), len(shard))
        taken = [
            shard[_shard_order(len(shard), self.seed, replica, number)[places[passes == number]]]
            for number in np.unique(passes).tolist()
        ]
        return np.concatenate(taken)


@lru_cache(maxsize=256)
def _shard_order(samples: int, seed: int, replica: int, number: int) -> NDArray[np.int64]:
    return permutation(samples, seed, SHARD, replica, number)


def targets_of(data: Samples) -> Targets:
    """The class of every sample, [n]. Raises DataError for targets that are no class each. Reads all samples."""
    values = data.values(np.arange(len(data), dtype=np.int64))
    targets = np.asarray(values["target"]) if "target" in values else np.zeros((0, 2))
    if targets.shape[0] != len(data) or targets.size != len(data) or targets.dtype.kind not in "iu":
        raise DataError("these shards are dealt by class, and the dataset has no class for each sample; use iid or sizes")
    return targets.reshape(len(data))


def training_order(data: Samples, global_batch: int, seed: int, *, shards: str | None, replicas: int) -> Order:
    """The order in which replicas read the samples: of all together, or (`shards`, a text) each of its own. Raises DataError:
    as `order_of`, `parse_shards` and `deal`; or an iterable dataset, which cannot be dealt."""
    if shards is None:
        return order_of(data, global_batch, seed)
    if isinstance(data, StreamSamples):
        raise DataError(f"training.shards = {shards!r} deals samples by number, and an iterable dataset has none; drop it")
    rule = parse_shards(shards)[0]
    targets = targets_of(data) if rule.reads_targets else np.zeros(len(data), dtype=np.int64)
    return ShardedOrder(shards=deal(shards, targets, replicas, seed=seed), global_batch=global_batch, seed=seed)
