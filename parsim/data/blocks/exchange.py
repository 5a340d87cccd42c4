"""Parts of blocks from rank to rank, in rounds of bounded memory.

All ranks compute the same list of moves, since grids and owners are known to all. In each round a rank exchanges one message
with each of its peers. It sends at most `room_bytes` in all, and receives at most as many. So it needs twice that room beside
its old and new blocks. Ranks without messages take no part in a round.

No value depends on the number of processes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from parsim.errors import DataError
from parsim.numeric import Floats
from parsim.units import format_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# How an array is cut into blocks, and which rank owns each block. Plain numbers: no torch, no data.


BlockPlace = tuple[int, ...]
"""The place of a block: its piece along every dim, counted from 0."""


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """The sizes of the pieces along every dim; block (i, j, ...) has the i-th piece of dim 0, the j-th of dim 1, and so on.
    Blocks are numbered row by row. Every piece has at least one element, except that a dim of size 0 is one piece of size 0."""

    sizes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for dim, pieces in enumerate(self.sizes):
            if pieces != (0,) and (not pieces or min(pieces) < 1):
                raise DataError(f"the pieces of dim {dim} must be at least 1 each, got {list(pieces)}; leave out empty pieces")

    @classmethod
    def even(cls, shape: Sequence[int], counts: Sequence[int]) -> BlockGrid:
        """Equal blocks, `counts` of them along each dim; dims that `counts` leaves out are not cut. Raises DataError: a count
        that does not divide its dim."""
        counts = _one_per_dim(shape, counts)
        for dim, (size, count) in enumerate(zip(shape, counts, strict=True)):
            if count < 1 or size % count:
                below = next((near for near in range(min(count, size), 0, -1) if size % near == 0), 1)
                upwards = range(max(1, count), min(size, 2 * abs(count) + 1000) + 1)
                above = next((near for near in upwards if size % near == 0), below)
                raise DataError(
                    f"{count} equal blocks need dim {dim} to be a multiple of {count}, and it has {size} elements; "
                    f"use {' or '.join(map(str, dict.fromkeys((below, above))))} blocks, or BlockGrid.balanced, whose blocks "
                    "differ by one"
                )
        return cls(tuple((size // count,) * count for size, count in zip(shape, counts, strict=True)))

    @classmethod
    def balanced(cls, shape: Sequence[int], counts: Sequence[int]) -> BlockGrid:
        """Blocks whose sizes differ by one at most, `counts` of them along each dim; the first of a dim are the larger ones.
        Raises DataError: more blocks than elements along a dim."""
        counts = _one_per_dim(shape, counts)
        for dim, (size, count) in enumerate(zip(shape, counts, strict=True)):
            if not 1 <= count <= max(1, size):
                raise DataError(f"dim {dim} has {size} elements, which make 1 to {max(1, size)} blocks; got {count}")
        return cls(tuple(balanced_sizes(size, count) for size, count in zip(shape, counts, strict=True)))

    @classmethod
    def of_blocks(cls, shape: Sequence[int], block_shape: Sequence[int]) -> BlockGrid:
        """Blocks of one shape, the last of each dim short where it does not divide."""
        if len(block_shape) > len(shape) or (block_shape and min(block_shape) < 1):
            raise DataError(
                f"a block shape needs at most {len(shape)} sizes, each at least 1; got {list(block_shape)} for {list(shape)}"
            )
        lengths = (*block_shape, *(max(1, size) for size in shape[len(block_shape) :]))
        return cls(
            tuple(
                tuple(min(length, size - start) for start in range(0, size, length)) or (0,)
                for size, length in zip(shape, lengths, strict=True)
            )
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sum, self.sizes))

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.sizes))

    def __len__(self) -> int:
        return math.prod(self.counts)

    def places(self) -> Iterator[BlockPlace]:
        return itertools.product(*map(range, self.counts))

    def number(self, place: Sequence[int]) -> int:
        number = 0
        for count, piece in zip(self.counts, place, strict=True):
            number = number * count + piece
        return number

    def place(self, number: int) -> BlockPlace:
        pieces: list[int] = []
        for count in reversed(self.counts):
            number, piece = divmod(number, count)
            pieces.append(piece)
        return tuple(reversed(pieces))

    def block_shape(self, place: Sequence[int]) -> tuple[int, ...]:
        return tuple(pieces[piece] for pieces, piece in zip(self.sizes, place, strict=True))

    def starts(self, dim: int) -> list[int]:
        """Where each piece of a dim begins, and at the end the size of the dim."""
        return [0, *itertools.accumulate(self.sizes[dim])]

    def extent(self, place: Sequence[int]) -> tuple[slice, ...]:
        """The elements of the whole array that a block holds."""
        first = [sum(pieces[:piece]) for pieces, piece in zip(self.sizes, place, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(first, self.block_shape(place), strict=True))


def balanced_sizes(size: int, count: int) -> tuple[int, ...]:
    """`size` as `count` sizes that differ by one at most, the larger ones first."""
    least, longer = divmod(size, count)
    return (least + 1,) * longer + (least,) * (count - longer)


def _one_per_dim(shape: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    if len(counts) > len(shape) or any(size < 0 for size in shape):
        raise DataError(f"a block grid has at most one count per dim of the array: got {list(counts)} for shape {list(shape)}")
    return (*counts, *(1,) * (len(shape) - len(counts)))


def contiguous_owners(count: int, ranks: int) -> tuple[int, ...]:
    """Neighbouring blocks on one rank, as evenly as possible: block k belongs to rank floor(k * ranks / count)."""
    return tuple(number * ranks // count for number in range(count))


def round_robin_owners(count: int, ranks: int) -> tuple[int, ...]:
    """Block k belongs to rank k modulo ranks."""
    return tuple(number % ranks for number in range(count))


def bytes_by_owner(grid: BlockGrid, owners: Sequence[int], ranks: int, itemsize: int) -> list[int]:
    sizes = [0] * ranks
    for place, owner in zip(grid.places(), owners, strict=True):
        sizes[owner] += math.prod(grid.block_shape(place)) * itemsize
    return sizes


def shared_owners(count: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Neighbouring blocks on one rank, in numbers proportional to the shares. Raises DataError: one is below 0, or none
    above."""
    if not shares or min(shares) < 0 or sum(shares) <= 0:
        raise DataError(f"shares must be at least 0, and one of them above; got {list(shares)}")
    edges = [round(count * part / sum(shares)) for part in itertools.accumulate(shares)]
    return tuple(rank for rank, (first, last) in enumerate(itertools.pairwise([0, *edges])) for _ in range(first, last))


# The ranks that own blocks, and which of them this process is.
#
# Without a process group, one process plays all ranks and holds all blocks. With one, each process holds the blocks of its
# rank. Every operation on block tensors is the same in both cases; in a group, every rank calls it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Ranks 0 .. ranks-1. `rank` is this process's; None where it plays all of them. `device` is where blocks lie."""

    ranks: int
    rank: int | None = None
    group: ProcessGroup | None = field(default=None, repr=False)
    device: str = field(default="cpu", compare=False)

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise DataError(f"blocks need at least 1 rank to own them, got {self.ranks}")

    def holds(self, owner: int) -> bool:
        return self.rank is None or owner == self.rank

    def gather(self, value: Any) -> list[Any]:
        """The small values of all ranks, by rank; [value] where one process plays them all.

        They travel as JSON, never as a pickle: tuples arrive as lists.
        """
        if self.rank is None:
            return [json.loads(json.dumps(value, default=dict))]
        content = bytearray(json.dumps(value, default=dict).encode())
        text = torch.frombuffer(content, dtype=torch.uint8).to(self.device)
        lengths = torch.zeros(self.ranks, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(text)
        dist.all_reduce(lengths, group=self.group)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=self.device)
        padded[: len(text)] = text
        everyone = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(everyone, padded, group=self.group)
        return [json.loads(bytes(row[:length].cpu().numpy())) for row, length in zip(everyone, lengths.tolist(), strict=True)]


def in_one_process(ranks: int = 1, *, device: str = "cpu") -> Processes:
    """All blocks in this process. `ranks` is the number of owners: workers that one process plays, for instance."""
    return Processes(ranks=ranks, device=device)


def on_process_group(group: ProcessGroup | None = None, *, device: str = "cpu") -> Processes:
    """One rank per process of a torch.distributed group; left out, the default group. Raises DataError: there is none, or this
    process is not in it."""
    if not (dist.is_available() and dist.is_initialized()):
        raise DataError("no process group; call torch.distributed.init_process_group first, or use in_one_process()")
    rank = dist.get_rank(group)
    if rank < 0:
        raise DataError(f"rank {dist.get_rank()} is not in this process group; only its members may hold blocks of it")
    return Processes(ranks=dist.get_world_size(group), rank=rank, group=group, device=device)


ROOM_BYTES = 32 * 2**20
"""The largest message that a rank sends or receives in a round, unless the caller says otherwise."""

Selection = tuple[slice | Tensor, ...]
"""Elements of a block: per dim a slice of step 1, or the positions in one dim (int64); at most one dim has positions."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """`read` of block `source` on rank `sender` becomes `write` of block `target` on rank `receiver`, both of `shape`."""

    source: int
    read: Selection
    sender: int
    target: int
    write: Selection
    receiver: int
    shape: tuple[int, ...]


def whole_block(source: int, sender: int, receiver: int, shape: tuple[int, ...]) -> Move:
    """A block that goes to another rank as it is, under its own number."""
    everything: Selection = tuple(slice(0, size) for size in shape)
    return Move(source, everything, sender, source, everything, receiver, shape)


def exchange(
    moves: Sequence[Move],
    blocks: Mapping[int, Tensor],
    targets: Mapping[int, Tensor],
    processes: Processes,
    *,
    dtype: torch.dtype,
    room_bytes: int = ROOM_BYTES,
) -> None:
    """Write the parts that `moves` name into `targets`, which this rank has allocated. Every rank passes the same moves; all
    blocks and targets have type `dtype`. Raises DataError: room for less than one element."""
    for move in moves:
        if processes.rank is None or move.sender == move.receiver == processes.rank:
            targets[move.target][move.write] = blocks[move.source][move.read]
    if processes.rank is None:
        return
    for messages in rounds_of(moves, room_bytes, dtype.itemsize):
        _send_and_receive(messages, blocks, targets, processes, dtype)


def rounds_of(moves: Sequence[Move], room_bytes: int, itemsize: int) -> list[list[Move]]:
    """The moves between different ranks in rounds; what is larger than the room is sent in parts. Moves are taken in turns, one
    per receiver, so that all ranks are busy. A move goes to the first round, from the last one of its two ranks on, in which
    both have room for it."""
    if room_bytes < itemsize:
        raise DataError(f"room_bytes must hold at least one element of {itemsize} bytes, got {room_bytes}")
    rounds: list[list[Move]] = []
    sent: dict[int, tuple[int, int]] = {}
    received: dict[int, tuple[int, int]] = {}
    for large in _in_turns(moves):
        for move in _parts(large, room_bytes // itemsize):
            size = math.prod(move.shape) * itemsize
            out, into = sent.get(move.sender, (0, 0)), received.get(move.receiver, (0, 0))
            number = max(out[0], into[0])
            load_out = out[1] if out[0] == number else 0
            load_in = into[1] if into[0] == number else 0
            if max(load_out, load_in) + size > room_bytes:
                number, load_out, load_in = number + 1, 0, 0
            sent[move.sender], received[move.receiver] = (number, load_out + size), (number, load_in + size)
            rounds.extend([] for _ in range(len(rounds), number + 1))
            rounds[number].append(move)
    return rounds


def _in_turns(moves: Sequence[Move]) -> list[Move]:
    """The moves between different ranks: the first of every pair of ranks, then the second of every pair, and so on. Pairs
    follow one another by distance, as in a shift around a ring: no two pairs of one distance share a rank's direction."""
    turns: Counter[tuple[int, int]] = Counter()
    keyed = []
    for move in moves:
        if move.sender != move.receiver:
            keyed.append((turns[move.sender, move.receiver], move))
            turns[move.sender, move.receiver] += 1
    ranks = 1 + max((max(pair) for pair in turns), default=0)
    keyed.sort(key=lambda turn: (turn[0], (turn[1].receiver - turn[1].sender) % ranks))
    return [move for _, move in keyed]


def _parts(move: Move, elements: int) -> list[Move]:
    """The move, or its parts of at most `elements` elements: halved along the longest dim until they are small enough."""
    total = math.prod(move.shape)
    if total == 0:
        return []
    if total <= elements:
        return [move]
    dim = max(range(len(move.shape)), key=lambda place: move.shape[place])
    half = move.shape[dim] // 2
    halves = []
    for first, last in ((0, half), (half, move.shape[dim])):
        read, write = list(move.read), list(move.write)
        for selection in (read, write):
            along = selection[dim]
            if isinstance(along, slice):
                selection[dim] = slice(along.start + first, along.start + last)
            else:
                selection[dim] = along[first:last]
        shape = (*move.shape[:dim], last - first, *move.shape[dim + 1 :])
        halves += _parts(replace(move, read=tuple(read), write=tuple(write), shape=shape), elements)
    return halves


def _send_and_receive(
    messages: list[Move], blocks: Mapping[int, Tensor], targets: Mapping[int, Tensor], processes: Processes, dtype: torch.dtype
) -> None:
    """One message per pair of ranks, its parts in the order of the moves, which both ends know. Bytes, since backends lack some
    dtypes."""
    outgoing: dict[int, list[Move]] = {}
    incoming: dict[int, list[Move]] = {}
    for move in messages:
        if move.sender == processes.rank:
            outgoing.setdefault(move.receiver, []).append(move)
        elif move.receiver == processes.rank:
            incoming.setdefault(move.sender, []).append(move)
    operations, arrived = [], []
    for operation, by_peer in ((dist.isend, outgoing), (dist.irecv, incoming)):
        for peer, moves in by_peer.items():
            sizes = [math.prod(move.shape) for move in moves]
            message = torch.empty(sum(sizes), dtype=dtype, device=processes.device)
            for move, flat in zip(moves, torch.split(message, sizes), strict=True):
                part = flat.view(move.shape)
                if operation is dist.isend:
                    part.copy_(blocks[move.source][move.read])
                else:
                    arrived.append((move, part))
            operations.append(dist.P2POp(operation, message.view(torch.uint8), group=processes.group, group_peer=peer))
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
    for move, part in arrived:
        targets[move.target][move.write] = part


# Is there memory for new blocks? Asked before anything is allocated, and answered alike on every rank.


UNCHECKED_BYTES = 16 * 2**20
"""Arrays up to this size are not checked: the ranks would exchange a message to find out."""
_LIMIT, _USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def available_bytes(device: str = "cpu") -> int | None:
    """Memory that this process could allocate now: of the GPU, or of the host within the container's limit; None if unknown."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(torch.device(device))[0]) if device.startswith("cuda") else None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        host = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        try:
            host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None
    try:
        return min(host, max(0, int(_LIMIT.read_text()) - int(_USED.read_text())))
    except (OSError, ValueError):  # no limit, or "max"
        return host


def check_room(what: str, grid: BlockGrid, owners: Sequence[int], itemsize: int, processes: Processes) -> None:
    """Raise DataError, on every rank, if the blocks of a host's ranks (or a GPU's) are larger than its free memory."""
    needed = bytes_by_owner(grid, owners, processes.ranks, itemsize)
    check_bytes(what, needed, processes, rows=grid.shape[0] if grid.shape else None)


def check_bytes(what: str, needed: Sequence[int], processes: Processes, *, rows: int | None = None) -> None:
    """Raise DataError, on every rank, if what the ranks of a host (or a GPU) need is more than its free memory. needed: bytes
    by rank. rows: of the array, to tell how many would fit."""
    if sum(needed) <= UNCHECKED_BYTES:
        return
    memory = socket.gethostname() if processes.device == "cpu" else f"{socket.gethostname()} {processes.device}"
    gathered = processes.gather((memory, available_bytes(processes.device)))
    places = gathered * processes.ranks if processes.rank is None else gathered
    for name in dict.fromkeys(name for name, _ in places):
        members = [rank for rank, (place, _) in enumerate(places) if place == name]
        size = sum(needed[rank] for rank in members)
        free = min((free for place, free in places if place == name and free is not None), default=None)
        if free is None or size <= free:
            continue
        fitting = "" if rows is None else f"at most {int(rows * free / size)} of {rows} rows fit; "
        raise DataError(
            f"{what} needs {format_bytes(size)} on {name} (rank{'s' if len(members) > 1 else ''} "
            f"{', '.join(map(str, members))}), where {format_bytes(free)} are free; {fitting}use fewer rows, a smaller dtype, "
            f"or at least {-(-size // max(1, free))} machines of this size"
        )


# Random numbers by position: element i of an array of random numbers depends on the seed and i alone.
#
# So blocks are drawn where they lie, and neither the grid nor the number of processes changes a value.
#
# Source: SplitMix64 of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): output i of its stream
# is mix(state + (i + 1) * gamma), which can be computed without the outputs before.


GAMMA = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(state: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Outputs `positions` (counted from 0) of SplitMix64 begun at `state`; uint64, of the shape of positions."""
    with np.errstate(over="ignore"):
        z = np.uint64(state) + (positions + np.uint64(1)) * GAMMA
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)))


def uniform_at(seed: int, positions: NDArray[np.uint64]) -> Floats:
    """Uniform in [0, 1), multiples of 2^-53."""
    state = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])  # near seeds begin at places far apart
    return np.asarray((splitmix64(state, positions) >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def normal_at(seed: int, positions: NDArray[np.uint64]) -> Floats:
    """Standard normal, by Box and Muller from outputs 2i and 2i + 1."""
    first = uniform_at(seed, positions * np.uint64(2))
    second = uniform_at(seed, positions * np.uint64(2) + np.uint64(1))
    return np.asarray(np.sqrt(-2.0 * np.log1p(-first)) * np.cos(2.0 * np.pi * second), dtype=np.float64)
