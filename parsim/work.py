"""Work: a small closed set of frozen records.

Calibration measures work, Costs prices it, graphs carry it, the executor runs it. An operation on Work plugs in by
`functools.singledispatch`, so a new consumer needs no change here. No record holds a duration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from parsim.errors import GraphError
from parsim.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


# The collectives by name: the bytes each moves, the algorithms that run it, and how it is measured. A new one is one
# row.
#
# The size S of a collective is the whole array, as in nccl-tests; of a ring_shift what each rank sends to the next.
# Cost models read hops and traffic; with `call` a collective of
# one's own is measured by `parsim calibrate --collective package.module:ROW` and priced from what was measured.


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


COLLECTIVE_KINDS: Registry[CollectiveKind] = Registry(
    "collective",
    CollectiveKind,
    {
        "all_reduce": CollectiveKind(
            hops=lambda n: 2 * (n - 1),
            traffic=lambda n: 2 * (n - 1) / n,
            trees=True,
            phases=("reduce_scatter", "all_gather"),
        ),
        "all_gather": CollectiveKind(
            hops=lambda n: n - 1, traffic=lambda n: (n - 1) / n, phases=("all_gather",), packable=True
        ),
        "reduce_scatter": CollectiveKind(
            hops=lambda n: n - 1, traffic=lambda n: (n - 1) / n, phases=("reduce_scatter",), packable=True
        ),
        "all_to_all": CollectiveKind(hops=lambda n: n - 1, traffic=lambda n: (n - 1) / n, pairwise=True),
        "ring_shift": CollectiveKind(hops=lambda n: 1, traffic=lambda n: 1.0),
        "broadcast": CollectiveKind(hops=lambda n: n - 1, traffic=lambda n: 1.0, phases=("broadcast",), rooted=True),
    },
    error=GraphError,
)


class Phase(StrEnum):
    """The part of a training step a computation belongs to; the short form stands in orders and graphs.
    BACKWARD is the whole backward; BACKWARD_INPUT and BACKWARD_WEIGHT are its halves: the gradients of a component's inputs,
    and those of its parameters. RECOMPUTE is a forward run again, right before the backward that needs what it saves."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"

    __hash__ = str.__hash__  # an Enum's own is a function of Python's, and phases are in the keys of every task

    @property
    def short(self) -> str:
        return _SHORT[self]


_SHORT = {
    Phase.FORWARD: "F",
    Phase.BACKWARD: "B",
    Phase.BACKWARD_INPUT: "I",
    Phase.BACKWARD_WEIGHT: "W",
    Phase.RECOMPUTE: "R",
    Phase.OPTIMIZER: "O",
}


COLLECTIVES = tuple(COLLECTIVE_KINDS)
PACKABLE = COLLECTIVE_KINDS.where(packable=True)


BY_OPERATOR_PART = "selective"
"""`Compute.part` of a second forward that runs some operators alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """One component, forward or backward, over `samples` local samples; of a tensor-sharded one, one of `ways` shards.

    `rule` names the component's Sharding ("" for the whole component, with ways 1). `part`: only its attention, its experts or
    the rest, as one of so many equal `parts`, with communication between them; "selective": only the operators that run again;
    "" for all of it.
    """

    component: str
    phase: Phase
    samples: int
    rule: str = ""
    ways: int = 1
    part: str = ""
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """The update of all parameters of one update group that a rank holds (and the zeroing of their gradients).
    `elements` counts scalars, `tensors` the arrays they come in. `update_group`: "" for the usual one. `optimizer`: a row of
    OPTIMIZERS; "" for the one that updates what is in no group."""

    elements: int
    tensors: int
    update_group: str = ""
    optimizer: str = ""


NORM, SCALE = "norm", "scale"
"""Parts of clipping: a rank's share of the squared norm, and the multiplication of the gradients that it updates with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipGradients:
    """One part of clipping the gradients by their global norm. The sum over ranks between the two is a Collective.
    `elements` counts scalars, `tensors` the arrays they come in."""

    part: str
    elements: int
    tensors: int

    def __post_init__(self) -> None:
        if self.part not in (NORM, SCALE):
            raise GraphError(f"clipping has the parts {NORM} and {SCALE}, got {self.part!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective over the ranks of `group`; `size_bytes` is S, the whole array, as in nccl-tests.

    `operation` is a row of `parsim.work`, or "package.module:ROW".

    `packed`: the parts of an all_gather or a reduce_scatter lie in the array with gaps (along a dim other than its
    first). They are then packed before sending, or unpacked afterwards. Otherwise each part is contiguous.

    `visits`: S counts a row of an all_to_all for so many visits at places chosen at random. It is sent once to each rank and
    once to each node among them; 0: as often as it counts.
    """

    operation: str
    group: tuple[int, ...]
    size_bytes: int
    packed: bool = False
    visits: int = 0

    def __post_init__(self) -> None:
        kind = COLLECTIVE_KINDS[self.operation]
        if len(set(self.group)) != len(self.group):
            raise GraphError(f"a group lists a rank twice: {self.group}; list every rank once")
        if self.packed and not kind.packable:
            raise GraphError(f"{self.operation} cannot be packed; of collectives {' and '.join(PACKABLE)} can")
        if not self.group or self.size_bytes < 0:
            raise GraphError(f"{self.operation} needs >= 1 rank and size_bytes >= 0, got {self.group}, {self.size_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRecv:
    """`size_bytes` from rank `source` to rank `destination`."""

    source: int
    destination: int
    size_bytes: int

    def __post_init__(self) -> None:
        if self.source == self.destination:
            raise GraphError(f"rank {self.source} sends to itself; a transfer needs two ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBatch:
    """The host makes `samples` samples (inputs, targets or both) ready on the device, in `parts`: one per microbatch."""

    samples: int
    size_bytes: int
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Local weight maths: w <- sum_j c_j w_j over `copies` >= 1 arrays of `elements` scalars each, the rank's own among them.

    Averaging, the sum over neighbours of gossip, and merging into a global model are all this.

    Attributes:
        accesses: 4-byte reads and writes per element, operation by operation, where known; 0: one pass over the copies.
        tensors: over which the elements are spread.
    """

    elements: int
    copies: int
    accesses: int = 0
    tensors: int = 1

    def __post_init__(self) -> None:
        if min(self.elements, self.accesses) < 0 or min(self.copies, self.tensors) < 1:
            raise GraphError(f"a mix needs elements and accesses >= 0, and copies and tensors >= 1, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """`size_bytes` between the memory of a device and that of its host: `to_host`, or back."""

    size_bytes: int
    to_host: bool

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise GraphError(f"a copy needs size_bytes >= 0, got {self.size_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUpdate:
    """The update of `elements` parameters by the host, where the optimizer's state lies.
    `optimizer`: as of an OptimizerStep."""

    elements: int
    optimizer: str = ""


Work = Compute | OptimizerStep | ClipGradients | Collective | SendRecv | LoadBatch | Mix | HostCopy | HostUpdate
OFFLOADED = (HostCopy, HostUpdate)
"""Work between a device and its host, and on the host."""


def is_communication(work: Work) -> bool:
    """True for work that occupies links rather than a device's compute units."""
    return isinstance(work, Collective | SendRecv)


def ranks_of_work(work: Work) -> tuple[int, ...]:
    """The ranks that a communication names; none for work of one rank, whichever it is."""
    match work:
        case Collective():
            return work.group
        case SendRecv():
            return (work.source, work.destination)
    return ()


def kind_of(work: Work) -> str:
    """The task kind used in comparisons and reports: forward, backward (or backward_input and backward_weight), recompute,
    optimizer, clip, all_reduce, send_recv, load, mix, copy_to_host, copy_from_host, host_update."""
    match work:
        case Compute():
            return work.phase.value
        case OptimizerStep():
            return Phase.OPTIMIZER.value
        case ClipGradients():
            return "clip"
        case Collective():
            return work.operation
        case SendRecv():
            return "send_recv"
        case LoadBatch():
            return "load"
        case Mix():
            return "mix"
        case HostCopy():
            return "copy_to_host" if work.to_host else "copy_from_host"
        case HostUpdate():
            return "host_update"
