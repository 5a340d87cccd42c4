"""Seconds of collectives and transfers, on the streams of the executor and under its definition of measured time.

A collective starts when its last rank is ready (its dependencies ended and its stream free) and ends when its last rank
has it. Ranks of one host share a monotonic clock; several hosts are left out. Every repetition follows a computation, as
in training: the rank's core is busy and its caches are not warm with the message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parsim.execute.group import make_groups
from parsim.execute.streams import TaskTime, make_streams

BACK_TO_BACK = 3
BURN_S = 0.002
MIN_REPEATS, MAX_REPEATS = 6, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Attributes:
    device: where the arrays live.
    dp: group of the collectives by ranks; sends: group by (source, destination); None where this rank is no member.
    seconds_per_size: repeats are chosen to take about this long.
    """

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    dp: Mapping[tuple[int, ...], dist.ProcessGroup | None]
    sends: Mapping[tuple[int, int], dist.ProcessGroup | None]
    seconds_per_size: float

    def elements(self, size_bytes: int) -> int:
        return max(1, size_bytes // self.dtype.itemsize)


def make_bench(device: torch.device, dtype: torch.dtype, cores: int, seconds_per_size: float) -> Bench:
    """Groups for everything that will be measured; a collective call, made by every rank."""
    world_size = dist.get_world_size()
    collectives, pairs = collective_groups(world_size), transfer_pairs(world_size, cores)
    sends = {pair: (f"pp>{pair[1]}", (min(pair), max(pair))) for pair in pairs}
    groups = make_groups([("dp", ranks) for ranks in collectives] + list(sends.values()))
    return Bench(
        rank=dist.get_rank(),
        world_size=world_size,
        device=device,
        dtype=dtype,
        dp={ranks: groups.get(("dp", ranks)) for ranks in collectives},
        sends={pair: groups.get(stream) for pair, stream in sends.items()},
        seconds_per_size=seconds_per_size,
    )


def collective_groups(world_size: int) -> tuple[tuple[int, ...], ...]:
    """The first 2, 4, 8, ... ranks, and all."""
    sizes = {world_size} | {2**power for power in range(1, world_size.bit_length()) if 2**power <= world_size}
    return tuple(tuple(range(size)) for size in sorted(sizes) if size >= 2)


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
    array = torch.zeros(bench.elements(size_bytes), dtype=bench.dtype, device=bench.device)
    return lambda: _drop(dist.all_reduce(array, group=group))


def _all_gather(bench: Bench, size_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    part = torch.zeros(bench.elements(size_bytes // group.size()), dtype=bench.dtype, device=bench.device)
    whole = torch.zeros(part.numel() * group.size(), dtype=bench.dtype, device=bench.device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return lambda: _drop(gather(whole, part, group=group))


def _reduce_scatter(bench: Bench, size_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    part = torch.zeros(bench.elements(size_bytes // group.size()), dtype=bench.dtype, device=bench.device)
    whole = torch.zeros(part.numel() * group.size(), dtype=bench.dtype, device=bench.device)
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    return lambda: _drop(reduce_scatter(part, whole, group=group))


def _broadcast(bench: Bench, size_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    array = torch.zeros(bench.elements(size_bytes), dtype=bench.dtype, device=bench.device)
    return lambda: _drop(dist.broadcast(array, src=0, group=group))


def _all_to_all(bench: Bench, size_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """S is what one rank holds."""
    part = bench.elements(size_bytes // group.size())
    given = torch.zeros(part * group.size(), dtype=bench.dtype, device=bench.device)
    received = torch.zeros_like(given)
    return lambda: _drop(dist.all_to_all_single(received, given, group=group))


COLLECTIVES: dict[str, Callable[[Bench, int, dist.ProcessGroup], Callable[[], None]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
}
"""What is measured, by name: a function that prepares the arrays and returns the blocking call."""

REPEATED = ("all_reduce",)
"""What every synchronous plan runs, gradient buckets: three in a row and with all repeats; the others with fewer."""


def _drop(_: object) -> None:
    """The calls return a Work or nothing, an operation of a stream nothing."""


# --- one size ---------------------------------------------------------------------------------------------------------


def measure_collective(
    bench: Bench, operation: str, ranks: tuple[int, ...], size_bytes: int, *, back_to_back: int = BACK_TO_BACK
) -> list[list[float]] | None:
    """Seconds [repeat][place in the chain], on rank 0 (None elsewhere). Called by every rank of the world.

    Every repeat issues `back_to_back` equal operations in order on one stream, as gradient buckets are; the first of a
    chain follows a computation, the others follow their predecessor.
    """
    group = bench.dp[ranks]
    if group is None:
        return _collect([], back_to_back, ranks)
    calls = [COLLECTIVES[operation](bench, size_bytes, group) for _ in range(back_to_back)]
    return _collect(_repeat(bench, [("dp", call) for call in calls], group), back_to_back, ranks)


def measure_transfer(bench: Bench, pair: tuple[int, int], size_bytes: int) -> list[list[float]] | None:
    """Seconds [repeat][0] of a send from pair[0] to pair[1], on rank 0 (None elsewhere). Called by every rank.

    The receiver allocates its buffer within the measured time, as the executor does.
    """
    source, destination = pair
    group = bench.sends[pair]
    if group is None:
        return _collect([], 1, pair)
    array = torch.zeros(bench.elements(size_bytes), dtype=bench.dtype, device=bench.device)

    def receive() -> None:
        dist.recv(torch.empty_like(array), source, group=group)

    stream = f"pp>{destination}" if bench.rank == source else f"pp<{source}"
    call = partial(dist.send, array, destination, group=group) if bench.rank == source else receive
    return _collect(_repeat(bench, [(stream, call)], group), 1, pair)


def _repeat(bench: Bench, calls: Sequence[tuple[str, Callable[[], None]]], group: dist.ProcessGroup) -> list[list[TaskTime]]:
    """Times of the calls in each kept repeat, on this rank; every rank of the group repeats equally often."""
    streams = make_streams(bench.device)
    operand = torch.ones(192, 192, dtype=bench.dtype, device=bench.device)
    kept: list[list[TaskTime]] = []
    try:
        repeats, done = 2, 0
        while done < repeats:
            begin_s = time.perf_counter()
            dist.barrier(group=group)
            for number, (stream, call) in enumerate(calls, start=1):
                streams.submit(number, stream, [0], call)
            streams.compute(0, "compute", [], partial(_burn, operand))
            times = {entry.task: entry for entry in streams.finish()}
            done += 1
            if done == 2:
                repeats = 2 + _agreed_repeats(bench, time.perf_counter() - begin_s, group)
            elif done > 2:
                kept.append([times[number] for number in range(1, len(calls) + 1)])
    finally:
        streams.close()
    return kept


def _agreed_repeats(bench: Bench, seconds: float, group: dist.ProcessGroup) -> int:
    wanted = min(MAX_REPEATS, max(MIN_REPEATS, int(bench.seconds_per_size / seconds)))
    count = torch.tensor([wanted], device=bench.device)
    dist.all_reduce(count, op=dist.ReduceOp.MIN, group=group)
    return int(count.item())


def _burn(operand: Tensor) -> None:
    """Keep the device busy for about BURN_S (on CUDA: give it a few kernels)."""
    end = time.perf_counter() + BURN_S
    product = operand
    while time.perf_counter() < end:
        product = operand @ operand
        if product.is_cuda:
            return


def _collect(times: list[list[TaskTime]], chain: int, ranks: Sequence[int]) -> list[list[float]] | None:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(times, gathered if dist.get_rank() == 0 else None)
    if dist.get_rank() != 0:
        return None
    return merged_seconds([gathered[rank] for rank in ranks], chain)


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


def measure_all(
    bench: Bench, sizes_bytes: Sequence[int], operations: Sequence[str], on_line: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every operation over every group and size, then the transfers; entries with the keys operation, group, size_bytes,
    seconds [repeat][place in the chain]. On rank 0; the other ranks return an empty list."""
    entries: list[dict[str, Any]] = []
    for operation in operations:
        often = operation in REPEATED
        shared = bench if often else replace(bench, seconds_per_size=bench.seconds_per_size / 3)
        for ranks in bench.dp:
            on_line(f"{operation} over {len(ranks)} ranks: {len(sizes_bytes)} sizes")
            for size_bytes in sizes_bytes:
                seconds = measure_collective(shared, operation, ranks, size_bytes, back_to_back=BACK_TO_BACK if often else 1)
                entries += _entry(operation, ranks, size_bytes, seconds)
    for pair in bench.sends:
        on_line(f"send_recv {pair[0]} to {pair[1]}: {len(sizes_bytes)} sizes")
        for size_bytes in sizes_bytes:
            entries += _entry("send_recv", pair, size_bytes, measure_transfer(bench, pair, size_bytes))
    return entries


def _entry(operation: str, ranks: Sequence[int], size_bytes: int, seconds: list[list[float]] | None) -> list[dict[str, Any]]:
    if seconds is None:
        return []
    return [{"operation": operation, "group": list(ranks), "size_bytes": size_bytes, "seconds": seconds}]
