"""Seconds of collectives and transfers, on the streams of the executor and under its definition of measured time.

A collective starts when its last rank is ready (its dependencies ended and its stream free) and ends when the last rank
goes on with what waited for it. Ranks of one host share a monotonic clock; several hosts are left out. Every call stands
between two computations, as in training. So the message is not in the caches, and a rank that is done computes on at
once, on the core that its peer's message still needs. Therefore some calls take several times as long as most: on a
2-core virtual machine one in ten waits a few milliseconds for the core. The mean counts, because each of them delays the
step. On GPUs the computation is a kernel that waits, and lasts until the host has queued the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from calibration.rounds.request import CalibrationRequest, check_measurable
from calibration.rounds.turns import WARM_UP, CalibrationSection, Entries, paced_together
from parsim.costs.communication.collectives import ON_ONE_CORE, packed_operation
from parsim.execute.cuda.driver import driver_of
from parsim.execute.operations import all_gather_flat, reduce_scatter_flat, run_hop
from parsim.execute.processes.exchange import gather_values
from parsim.execute.processes.group import make_groups
from parsim.execute.processes.machine import memory_limit_bytes
from parsim.execute.processes.speed_probe import SpeedProbe
from parsim.execute.rank_run import make_streams
from parsim.execute.streams import TaskTime
from parsim.plans.layouts import parse_hop
from parsim.units import MIB
from parsim.work import COLLECTIVE_KINDS

BACK_TO_BACK = 3
BURN_S = 0.003
"""Seconds of computation before and after every call: no less than the system leaves a thread the core for."""
SMALL_BYTES, LARGE_BYTES = MIB, 16 * MIB
ROWS = 8
"""Rows of an array that is sent in parts of its rows: samples, say."""
ALIGNMENT = 64
"""Elements; fresh arrays begin at 64 bytes or more, and sums over crooked ones are slower."""
PACED = 4
"""Items between two looks at the cores' pace."""

LARGE_EVERY = 4
"""Sizes above LARGE_BYTES are measured in every fourth round, a quarter of them in each."""
MEMORY_SHARE = 0.25
"""Share of the memory this process may use: the most that all ranks together take for arrays to send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Attributes:
    device: where the arrays live. cores: on which the ranks run; rank r and rank r + cores share one.
    dp: group of the collectives by ranks; sends: group by (source, destination); None where this rank is not a member.
    scratch: the arrays to send are pieces of it, so that no measurement first touches memory."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    cores: int
    dp: Mapping[tuple[int, ...], dist.ProcessGroup | None]
    sends: Mapping[tuple[int, int], dist.ProcessGroup | None]
    scratch: Tensor

    @property
    def everyone(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        group = self.dp[tuple(range(self.world_size))]
        assert group is not None, "every rank is a member of the group of all"
        return group

    def elements(self, size_bytes: int) -> int:
        return max(1, size_bytes // self.dtype.itemsize)

    def array(self, elements: int) -> Tensor:
        """One of so many elements, aligned as a fresh one would be."""
        return self.scratch[:elements]

    def beyond(self, elements: int) -> Bench:
        """The same, with an array that begins so many elements further on, or a little more."""
        return replace(self, scratch=self.scratch[_aligned(elements) :])


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def make_bench(device: torch.device, dtype: torch.dtype, cores: int, largest_bytes: int) -> Bench:
    """Groups and arrays for everything that will be measured, up to `largest_bytes`; a collective call, made by every rank."""
    world_size = dist.get_world_size()
    collectives, pairs = collective_groups(world_size), transfer_pairs(world_size, cores)
    sends = {pair: (f"pp>{pair[1]}", (min(pair), max(pair))) for pair in pairs}
    groups = make_groups([("dp", ranks) for ranks in collectives] + list(sends.values()))
    return Bench(
        rank=dist.get_rank(),
        world_size=world_size,
        device=device,
        dtype=dtype,
        cores=cores,
        dp={ranks: groups.get(("dp", ranks)) for ranks in collectives},
        sends={pair: groups.get(stream) for pair, stream in sends.items()},
        scratch=torch.zeros(scratch_bytes(largest_bytes) // dtype.itemsize, dtype=dtype, device=device),
    )


def scratch_bytes(largest_bytes: int) -> int:
    """The given call, or a chain of calls issued in a row; nothing if nothing is sent."""
    if largest_bytes == 0:
        return 0
    return max(largest_bytes, BACK_TO_BACK * min(largest_bytes, LARGE_BYTES)) + ROWS * 64 * ALIGNMENT


def affordable_sizes(sizes_bytes: Sequence[int], nproc: int, device: torch.device) -> tuple[int, ...]:
    """The sizes whose arrays on every rank, given, packed and received, leave enough memory for all else."""
    if device.type == "cuda":
        room = MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
    else:
        room = MEMORY_SHARE * memory_limit_bytes() / nproc
    return tuple(size for size in sizes_bytes if scratch_bytes(size) + 2 * size <= room)


def collective_groups(world_size: int) -> tuple[tuple[int, ...], ...]:
    """The first 2, 3, 4, ... ranks, up to all."""
    return tuple(tuple(range(size)) for size in range(2, world_size + 1))


def transfer_pairs(world_size: int, cores: int) -> tuple[tuple[int, int], ...]:
    """Both directions between ranks 0 and 1, and between rank 0 and the first rank that shares its core, if any."""
    if world_size < 2:
        return ()
    pairs = [(0, 1), (1, 0)]
    if 1 < cores < world_size:
        pairs += [(0, cores), (cores, 0)]
    return tuple(pairs)


# --- the operations ---------------------------------------------------------------------------------------------------


def _all_reduce(bench: Bench, size_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    array = bench.array(bench.elements(size_bytes))
    return lambda: _drop(dist.all_reduce(array, group=group))


def _all_gather(bench: Bench, size_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Gather a flat array from the parts of all ranks, as ZeRO does with its parameters."""
    flat, chunk = _flat_and_chunk(bench, size_bytes, group)
    return lambda: all_gather_flat(flat, chunk.clone(), group)


def _reduce_scatter(bench: Bench, size_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Give every rank its part of the sum of a flat array, as ZeRO does with its gradients."""
    flat, chunk = _flat_and_chunk(bench, size_bytes, group)

    def call() -> None:
        own = torch.empty_like(chunk)
        reduce_scatter_flat(own, flat, group)
        chunk.copy_(own)

    return call


def _flat_and_chunk(bench: Bench, size_bytes: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """A flat array of as many equal parts as there are ranks, and this rank's part of it."""
    part = max(1, bench.elements(size_bytes) // group.size())
    flat = bench.array(part * group.size())
    return flat, flat[dist.get_rank(group) * part :][:part]


def _all_gather_packed(bench: Bench, size_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    return _hop(bench, "all_gather_dim:shard1/{n}>full/{n}", size_bytes // group.size(), group)


def _reduce_scatter_packed(bench: Bench, size_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    return _hop(bench, "reduce_scatter_dim:partial/{n}>shard1/{n}", size_bytes, group)


def _broadcast(bench: Bench, size_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    array = bench.array(bench.elements(size_bytes))
    return lambda: _drop(dist.broadcast(array, src=0, group=group))


def _all_to_all(bench: Bench, size_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """S is what one rank holds."""
    return _hop(bench, "all_to_all:full/1>shard1/{n}", size_bytes, group)


def _hop(bench: Bench, text: str, held_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """One hop of a conversion along a dim, as the executor makes it: what lies apart is packed before it is sent, or after."""
    count = group.size()
    columns = max(1, bench.elements(held_bytes) // (count * ROWS))
    hop, tensor = parse_hop(text.format(n=count)), bench.array(ROWS * count * columns).view(ROWS, count * columns)
    return lambda: _drop(run_hop(hop, tensor, ranks=range(count), group=group))


COLLECTIVES: dict[str, Callable[[Bench, int, dist.ProcessGroup], Callable[[], None]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    packed_operation("all_gather"): _all_gather_packed,
    "reduce_scatter": _reduce_scatter,
    packed_operation("reduce_scatter"): _reduce_scatter_packed,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
}
"""What is measured, by name: a function that prepares the arrays and returns the blocking call."""


def preparation(operation: str) -> Callable[[Bench, int, dist.ProcessGroup], Callable[[], None]]:
    """The call of an operation of COLLECTIVES, or of a row of the user's own that says how it is called."""
    if operation in COLLECTIVES:
        return COLLECTIVES[operation]
    check_measurable(operation)
    call = COLLECTIVE_KINDS[operation].call
    assert call is not None

    def prepare(bench: Bench, size_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
        run = call(bench.array(bench.elements(size_bytes)), group)
        return lambda: _drop(run())

    return prepare


REPEATED = ("all_reduce",)
"""What every synchronous plan runs several of in a row, gradient buckets: measured so, the others one by one."""

SEND_RECV = "send_recv"


def _drop(_: object) -> None:
    """The calls return a Work or nothing, an operation of a stream nothing."""


# --- one size ---------------------------------------------------------------------------------------------------------


class CollectiveItem(NamedTuple):
    """One thing to measure: an operation of COLLECTIVES (or one's own) over a group, or a transfer from its first rank to the
    second."""

    operation: str
    ranks: tuple[int, ...]
    size_bytes: int

    @property
    def chain(self) -> int:
        """How many equal operations one repeat has, on arrays of their own, as gradient buckets are."""
        return BACK_TO_BACK if self.operation in REPEATED and self.size_bytes <= LARGE_BYTES else 1

    @property
    def repeats(self) -> int:
        """Kept in one round."""
        return 4 if self.size_bytes <= SMALL_BYTES else 2


def measure_item(bench: Bench, item: CollectiveItem) -> list[list[float]] | None:
    """Seconds [repeat][place in the chain], on rank 0 (None elsewhere). Called by every rank of the world.

    The receiver of a transfer allocates its buffer within the measured time, as the executor does.
    """
    times: list[list[TaskTime]] = []
    if item.operation in (SEND_RECV, ON_ONE_CORE):
        source, destination = item.ranks
        group = bench.sends[source, destination]
        if group is not None:
            stream = f"pp>{destination}" if bench.rank == source else f"pp<{source}"
            burn_s = BURN_S if item.operation == SEND_RECV else 0.0
            times = _repeat(bench, [(stream, _transfer(bench, item, group))], group, item.repeats, burn_s)
    else:
        group = bench.dp[item.ranks]
        if group is not None:
            prepare = preparation(item.operation)
            calls = [("dp", prepare(own, item.size_bytes, group)) for own in chain_of(bench, item)]
            times = _repeat(bench, calls, group, item.repeats)
    return _collect(times, item.chain, item.ranks)


def chain_of(bench: Bench, item: CollectiveItem) -> list[Bench]:
    """One bench for each operation of a chain, which work on different arrays, as buckets do."""
    step = _aligned(bench.elements(item.size_bytes))
    return [bench.beyond(place * step) for place in range(item.chain)]


def _transfer(bench: Bench, item: CollectiveItem, group: dist.ProcessGroup) -> Callable[[], None]:
    source, destination = item.ranks
    array = bench.array(bench.elements(item.size_bytes))
    if bench.rank == source:
        return partial(dist.send, array, destination, group=group)
    return lambda: _drop(dist.recv(torch.empty_like(array), source, group=group))


def _repeat(
    bench: Bench,
    calls: Sequence[tuple[str, Callable[[], None]]],
    group: dist.ProcessGroup,
    repeats: int,
    burn_s: float = BURN_S,
) -> list[list[TaskTime]]:
    """Times of the calls in each repeat, on this rank; one more comes before them and warms up.

    Computation 2 i comes before call 2 i + 1 and computation 2 i + 2 after it, which waits for it: where that begins, the call
    has ended. Ranks that share a core compute nothing (`burn_s` 0): how they wait for one another's computation is simulated.
    """
    streams = make_streams(bench.device)
    burn = burning(bench, burn_s)
    kept: list[list[TaskTime]] = []
    try:
        for repeat in range(repeats + 1):
            dist.barrier(group=group)
            for number, (stream, call) in enumerate(calls):
                streams.submit(2 * number + 1, stream, [2 * number], call)
            for number in range(len(calls) + 1):
                streams.compute(2 * number, "compute", [2 * number - 1] if number else [], burn)
            times = {entry.task: entry for entry in streams.finish()}
            if repeat > 0:
                kept.append([times[2 * n + 1]._replace(end_s=times[2 * n + 2].ready_s) for n in range(len(calls))])
    finally:
        streams.close()
    return kept


def burning(bench: Bench, burn_s: float) -> Callable[[], None]:
    """Keeps a core busy for about so long, or a GPU, while the host runs on."""
    driver = driver_of(bench.device)
    if driver is not None:
        return partial(driver.hold, burn_s)
    operand = torch.ones(192, 192, dtype=bench.dtype, device=bench.device)

    def burn() -> None:
        end = time.perf_counter() + burn_s
        while time.perf_counter() < end:
            torch.mm(operand, operand)

    return burn


def _collect(times: list[list[TaskTime]], chain: int, ranks: Sequence[int]) -> list[list[float]] | None:
    gathered = gather_values(times)
    if dist.get_rank() != 0:
        return None
    return merged_seconds([_times_of(gathered[rank]) for rank in ranks], chain)


def _times_of(rank: Sequence[Sequence[Sequence[Any]]]) -> list[list[TaskTime]]:
    return [[TaskTime(*entry) for entry in repeat] for repeat in rank]


def merged_seconds(per_rank: Sequence[Sequence[Sequence[TaskTime]]], chain: int) -> list[list[float]]:
    """Seconds [repeat][place] from the times of every rank [rank][repeat][place]: last end minus last ready."""
    repeats = len(per_rank[0])
    return [
        [
            max(rank[repeat][place].end_s for rank in per_rank) - max(rank[repeat][place].ready_s for rank in per_rank)
            for place in range(chain)
        ]
        for repeat in range(repeats)
    ]


# --- all sizes --------------------------------------------------------------------------------------------------------


def collective_section(
    bench: Bench, sizes_bytes: Sequence[int], request: CalibrationRequest, probe: SpeedProbe | None
) -> CalibrationSection | None:
    """Every operation over every group and size, and the transfers; None with one rank.

    Entries of `collectives`, rank 0's alone: operation, group, size_bytes, seconds [repeat][place in the chain].
    """
    items = tuple(all_items(bench, sizes_bytes, request.collectives))
    if not items:
        return None

    def measure(number: int) -> Entries:
        chosen = items_of_round(items, number)
        blocks = [partial(measure_items, bench, chosen[first : first + PACED]) for first in range(0, len(chosen), PACED)]
        return {"collectives": paced_together(blocks, probe)}

    return CalibrationSection(
        name="collectives",
        budget_s=request.budgets_s["collectives"],
        min_rounds=LARGE_EVERY,
        max_rounds=request.max_rounds,
        measure=measure,
    )


def measure_items(bench: Bench, items: Sequence[CollectiveItem]) -> list[dict[str, Any]]:
    """An entry for each, on rank 0 (none elsewhere). Called by every rank of the world."""
    measured = [(item, measure_item(bench, item)) for item in items]
    return [
        {"operation": item.operation, "group": list(item.ranks), "size_bytes": item.size_bytes, "seconds": seconds}
        for item, seconds in measured
        if seconds is not None
    ]


def all_items(bench: Bench, sizes_bytes: Sequence[int], more: Sequence[str] = ()) -> Iterator[CollectiveItem]:
    """`more`: collectives beside COLLECTIVES."""
    for size_bytes in sizes_bytes:
        for operation in dict.fromkeys((*COLLECTIVES, *more)):
            yield from (CollectiveItem(operation, ranks, size_bytes) for ranks in bench.dp)
        for source, destination in bench.sends:
            same = (source - destination) % bench.cores == 0
            yield CollectiveItem(ON_ONE_CORE if same else SEND_RECV, (source, destination), size_bytes)


def items_of_round(items: Sequence[CollectiveItem], number: int) -> list[CollectiveItem]:
    """What is measured in a round: every fourth of the large ones, other ones each time; to warm up, the smallest size."""
    if number == WARM_UP:
        return [item for item in items if item.size_bytes == items[0].size_bytes]
    chosen, large = [], 0
    for item in items:
        if item.size_bytes > LARGE_BYTES:
            large += 1
        if item.size_bytes <= LARGE_BYTES or large % LARGE_EVERY == number % LARGE_EVERY:
            chosen.append(item)
    return chosen
