"""Live bytes while a shard of a component runs, for every number of ways: counted on fake tensors at two of them.

Every size in a shard is a whole one or a piece of one. So every moment's bytes are affine in the share of a shard (1 / ways, or
a little more with padding) as they are in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from parsim.model.component import Sharding, ShardPeak, Share
from parsim.model.memory.peaks import Recorded, counted_moments, upper_envelope
from parsim.model.runnable import CallProgram, TensorKind
from parsim.model.shard.content import SHARD, Content
from parsim.model.shard.narrow import ways_of
from parsim.model.shard.sharded import content_of, shard_program

ShardPeaks = tuple[ShardPeak, ...]


def shard_peaks(small: Recorded, large: Recorded, sharding: Sharding) -> tuple[ShardPeaks, ShardPeaks]:
    """Forward and backward of the shards of one component as recorded at two batches.

    The first shard and those after it differ, which stand in with zeros for what the first contributes: the fuller counts.

    Empty where the two batches differ in more than their sizes; of the backward, too, where there is none.
    """
    widths = ways_of(sharding)
    shares = [sharding.share(ways) for ways in widths]
    forward: set[ShardPeak] = set()
    backward: set[ShardPeak] = set()
    for shard in (0,) if shards_are_alike(small.program, sharding, widths[0]) else (0, 1):
        local = partial(local_program, sharding=sharding, shard=shard)
        counted = {
            (ways, run.samples): counted_moments(replace(run, change=partial(local, ways=ways)))
            for ways in widths[:2]
            for run in (small, large)
        }
        for found, phase in ((forward, 0), (backward, 1)):
            lists = {at: (both.forward, both.backward)[phase] for at, both in counted.items()}
            if any(len(lists[ways, small.samples]) != len(lists[ways, large.samples]) for ways in widths[:2]):
                return (), ()
            found.update(affine(lists, widths[:2], shares[:2], (small.samples, large.samples)))
    return fullest(forward, shares), fullest(backward, shares)


def shards_are_alike(program: CallProgram, sharding: Sharding, ways: int) -> bool:
    """Whether the first shard makes the calls of the others, on other pieces: nobody stands in with zeros.

    Args:
        program: of the whole component. sharding: the rule. ways: how many shards.
    """
    first, second = (shard_program(program, sharding, shard, ways) for shard in (0, 1))
    return len(first.ops) == len(second.ops) and all(
        type(one.function) is type(other.function) for one, other in zip(first.ops, second.ops, strict=True)
    )


def local_program(program: CallProgram, sharding: Sharding, shard: int, ways: int) -> CallProgram:
    """The calls of one shard, with the tensors that it is given in their local shapes.

    Args:
        program: of the whole component. sharding: the rule. shard, ways: which of how many.
    """
    parts = {part.name: Content(SHARD, part.dim, part.blocks, part.runs) for part in (*sharding.parameters, *sharding.buffers)}
    given = [(slot, content_of(text)) for (_, slot, _), text in zip(program.inputs, sharding.inputs, strict=True)]
    held = [(slot, parts[key.name]) for key, slot in program.state if key.name in parts]
    tensors = list(program.tensors)
    for slot, content in (*given, *held):
        tensors[slot] = _piece(tensors[slot], content, sharding.share(ways))
    return replace(shard_program(program, sharding, shard, ways), tensors=tuple(tensors))


def _piece(kind: TensorKind, content: Content, share: Share) -> TensorKind:
    if content.form != SHARD:
        return kind
    shape = tuple(share.of(size) if dim == content.dim else size for dim, size in enumerate(kind.shape))
    return kind._replace(shape=shape)


Lines = list[tuple[int, int]]


def _lines(lists: dict[tuple[int, int], list[int]], ways: int, batches: tuple[int, int]) -> Lines:
    """(bytes per sample, fixed bytes) of every moment."""
    small, large = batches
    return [
        ((top - low) // (large - small), low - (top - low) // (large - small) * small)
        for low, top in zip(lists[ways, small], lists[ways, large], strict=True)
    ]


def affine(
    lists: dict[tuple[int, int], list[int]], widths: list[int], shares: list[Share], batches: tuple[int, int]
) -> Iterator[ShardPeak]:
    """Moments of a shard for every number of ways and samples.

    Args:
        lists: bytes of the moments at (ways, samples). widths: the ways. shares: of a shard at these. batches: the samples.
    """
    return _affine([_lines(lists, ways, batches) for ways in widths], shares)


def _affine(lines: list[Lines], shares: list[Share]) -> Iterator[ShardPeak]:
    """Per moment the bytes that are whole and those that are divided, from those at two numbers of ways.

    Where the last of a dim's entries is alone, copies fall away and the moments differ: then the fullest ones are paired.
    """
    if len(shares) == 1:  # a prime limit: no other ways exist
        yield from (ShardPeak(rate, fixed, 0, 0) for rate, fixed in lines[0])
        return
    first = shares[0]
    if len(lines[0]) != len(lines[1]):
        lines = [sorted(upper_envelope(set(entry))) for entry in lines]
        longest = max(map(len, lines))
        lines = [entry + entry[-1:] * (longest - len(entry)) for entry in lines]
    for (rate, fixed), (other_rate, other_fixed) in zip(*lines, strict=True):
        divided_rate, divided_fixed = (_divided(rate, other_rate, *shares), _divided(fixed, other_fixed, *shares))
        yield ShardPeak(rate - first.of(divided_rate), fixed - first.of(divided_fixed), divided_rate, divided_fixed)


def _divided(size: int, other: int, first: Share, second: Share) -> int:
    """Of what has these sizes in shards with these shares, the part that is divided."""
    return (size - other) * first.whole * second.whole // (first.own * second.whole - second.own * first.whole)


def fullest(peaks: Iterable[ShardPeak], shares: list[Share]) -> ShardPeaks:
    """Those that are the fullest for some batch and some ways.

    Args:
        peaks: of a shard. shares: those that occur.
    """
    ordered, found = sorted(peaks), set[ShardPeak]()
    for share in shares:
        lines: dict[tuple[int, int], ShardPeak] = {}
        for peak in ordered:
            line = peak.at(share)
            if line not in lines or peak in found:
                lines[line] = peak
        found.update(lines[line] for line in upper_envelope(set(lines)))
    return tuple(sorted(found))
