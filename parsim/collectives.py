"""The collectives by name: the bytes each moves, the algorithms that run it, and how it is measured. A new one is one
row.

The size S of a collective is the whole array, as in nccl-tests; of a ring_shift what each rank sends to the next.
Cost models read hops and traffic; with `call` a collective of
one's own is measured by `parsim calibrate --collective package.module:ROW` and priced from what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parsim.errors import GraphError
from parsim.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

CollectiveCall = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveKind:
    """One collective over n >= 2 ranks.

    Attributes:
        hops: n -> messages one after the other, each of the latency of a hop.
        traffic: n -> bytes through the slowest link of the algorithm, per byte of S; nccl-tests' busbw over algbw too.
        pairwise: every rank sends to every other at once; else it runs on a ring.
        trees: trees may run it too, as they do all_reduce.
        phases: what runs inside the nodes before and after it runs between them (hierarchical); (): it is not divided so.
        rooted: one member differs from the others, so a group's order counts.
        packable: its parts may lie in the array with gaps.
        call: (array of S bytes on this rank, group) -> the blocking call that calibration measures, prepared. Shipped
            collectives are measured as the executor runs them (`calibration.measure.collectives`).
    """

    hops: Callable[[int], int]
    traffic: Callable[[int], float]
    pairwise: bool = False
    trees: bool = False
    phases: tuple[str, ...] = ()
    rooted: bool = False
    packable: bool = False
    call: Callable[[Tensor, ProcessGroup], CollectiveCall] | None = None


def _one_way(n: int) -> int:
    return n - 1


def _one(n: int) -> int:
    del n
    return 1


def _there_and_back(n: int) -> int:
    return 2 * (n - 1)


def _all_but_own(n: int) -> float:
    return (n - 1) / n


def _all_but_own_twice(n: int) -> float:
    return 2 * (n - 1) / n


def _whole(n: int) -> float:
    del n
    return 1.0


COLLECTIVE_KINDS: Registry[CollectiveKind] = Registry(
    "collective",
    CollectiveKind,
    {
        "all_reduce": CollectiveKind(
            hops=_there_and_back, traffic=_all_but_own_twice, trees=True, phases=("reduce_scatter", "all_gather")
        ),
        "all_gather": CollectiveKind(hops=_one_way, traffic=_all_but_own, phases=("all_gather",), packable=True),
        "reduce_scatter": CollectiveKind(hops=_one_way, traffic=_all_but_own, phases=("reduce_scatter",), packable=True),
        "all_to_all": CollectiveKind(hops=_one_way, traffic=_all_but_own, pairwise=True),
        "ring_shift": CollectiveKind(hops=_one, traffic=_whole),
        "broadcast": CollectiveKind(hops=_one_way, traffic=_whole, phases=("broadcast",), rooted=True),
    },
    error=GraphError,
)
