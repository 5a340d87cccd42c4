"""Parts of blocks from rank to rank, in rounds of bounded memory.

All ranks compute the same list of moves, since grids and owners are known to all. In each round a rank exchanges one message
with each of its peers. It sends at most `room_bytes` in all, and receives at most as many. So it needs twice that room beside
its old and new blocks. Ranks without messages take no part in a round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from parsim.data.blocks.processes import Processes
from parsim.errors import DataError

ROOM_BYTES = 32 * 2**20
"""The largest message that a rank sends or receives in a round, unless the caller says otherwise."""

Selection = tuple[slice | Tensor, ...]
"""Elements of a block: per dim a slice of step 1, or the positions in one dim (int64); at most one dim has positions."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
    return Move(source=source, read=everything, sender=sender, target=source, write=everything, receiver=receiver, shape=shape)


def exchange(
    moves: Sequence[Move],
    blocks: Mapping[int, Tensor],
    targets: Mapping[int, Tensor],
    processes: Processes,
    *,
    dtype: torch.dtype,
    room_bytes: int = ROOM_BYTES,
) -> None:
    """Write the parts that `moves` name into `targets`, which this rank has allocated. Every rank passes the same moves.

    All blocks and targets have type `dtype`.

    Raises:
        DataError: room for less than one element.
    """
    for move in moves:
        if processes.rank is None or move.sender == move.receiver == processes.rank:
            targets[move.target][move.write] = blocks[move.source][move.read]
    if processes.rank is None:
        return
    for messages in rounds_of(moves, room_bytes, dtype.itemsize):
        _send_and_receive(messages, blocks, targets, processes, dtype)


def rounds_of(moves: Sequence[Move], room_bytes: int, itemsize: int) -> list[list[Move]]:
    """The moves between different ranks in rounds; what is larger than the room is sent in parts.

    Moves are taken in turns, one per receiver, so that all ranks are busy. A move goes to the first round, from the last one of
    its two ranks on, in which both have room for it.
    """
    if room_bytes < itemsize:
        raise DataError(f"room_bytes must hold at least one element of {itemsize} bytes, got {room_bytes}")
    rounds: list[list[Move]] = []
    sent: dict[int, tuple[int, int]] = {}
    received: dict[int, tuple[int, int]] = {}
    for whole in _in_turns(moves):
        for move in _parts(whole, room_bytes // itemsize):
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
    """The moves between different ranks: the first of every pair of ranks, then the second of every pair, and so on.

    Pairs follow one another by distance, as in a shift around a ring: no two pairs of one distance share a rank's direction.
    """
    count: dict[tuple[int, int], int] = {}
    keyed = []
    for move in moves:
        if move.sender != move.receiver:
            turn = count.get((move.sender, move.receiver), 0)
            count[move.sender, move.receiver] = turn + 1
            keyed.append((turn, move))
    ranks = 1 + max((max(pair) for pair in count), default=0)
    keyed.sort(key=lambda entry: (entry[0], (entry[1].receiver - entry[1].sender) % ranks))
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
        shape = (*move.shape[:dim], last - first, *move.shape[dim + 1 :])
        read, write = (_narrowed(selection, dim, first, last) for selection in (move.read, move.write))
        halves += _parts(replace(move, read=read, write=write, shape=shape), elements)
    return halves


def _narrowed(selection: Selection, dim: int, first: int, last: int) -> Selection:
    """Elements first .. last-1 of what is selected along `dim`."""
    along = selection[dim]
    part = slice(along.start + first, along.start + last) if isinstance(along, slice) else along[first:last]
    return (*selection[:dim], part, *selection[dim + 1 :])


def _send_and_receive(
    messages: list[Move], blocks: Mapping[int, Tensor], targets: Mapping[int, Tensor], processes: Processes, dtype: torch.dtype
) -> None:
    """One message per pair of ranks. Its parts lie in the order of the moves, which both ends know.

    Sent as bytes, since backends lack some dtypes.
    """
    outgoing: dict[int, list[Move]] = {}
    incoming: dict[int, list[Move]] = {}
    for move in messages:
        if move.sender == processes.rank:
            outgoing.setdefault(move.receiver, []).append(move)
        elif move.receiver == processes.rank:
            incoming.setdefault(move.sender, []).append(move)
    leaving = {peer: _room_for(moves, processes, dtype) for peer, moves in outgoing.items()}
    arriving = {peer: _room_for(moves, processes, dtype) for peer, moves in incoming.items()}
    for peer, moves in outgoing.items():
        for move, part in zip(moves, _split(leaving[peer], moves), strict=True):
            part.copy_(blocks[move.source][move.read])
    operations = [
        dist.P2POp(operation, message.view(torch.uint8), group=processes.group, group_peer=peer)
        for operation, buffers in ((dist.isend, leaving), (dist.irecv, arriving))
        for peer, message in buffers.items()
    ]
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
    for peer, moves in incoming.items():
        for move, part in zip(moves, _split(arriving[peer], moves), strict=True):
            targets[move.target][move.write] = part


def _room_for(moves: list[Move], processes: Processes, dtype: torch.dtype) -> Tensor:
    return torch.empty(sum(math.prod(move.shape) for move in moves), dtype=dtype, device=processes.device)


def _split(message: Tensor, moves: list[Move]) -> list[Tensor]:
    """The part of a message that belongs to each move."""
    parts = torch.split(message, [math.prod(move.shape) for move in moves])
    return [part.view(move.shape) for part, move in zip(parts, moves, strict=True)]
