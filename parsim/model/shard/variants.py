"""The ways a component can be sharded: a search over the tensors that may be cut, and a choice of useful results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from parsim.model.component import FULL, ParameterShard
from parsim.model.runnable import CallProgram
from parsim.model.shard.content import SHARD, WHOLE, Content, Refused, Undecided, cut_along
from parsim.model.shard.propagation import Propagation, propagate

TRIES = 512
"""Propagations per component, after which the search has looked long enough (a block needs about fifty)."""
SLACK = 0.9
"""Of two variants with the same boundary, one that cuts at least this share of the other's parameters is as good."""

SHARE = 0.5
"""A variant that cuts less than this share of what another one cuts is not offered."""


QUERIES = "queries"
"""In the name of a rule: attention cut by heads of queries, with all heads of keys and values in every shard."""


class Variant(NamedTuple):
    """One way: contents of the inputs, what was decided on weights, and what follows."""

    inputs: tuple[Content, ...]
    decided: dict[str, ParameterShard | None]
    found: Propagation


def variants(program: CallProgram, cuttable: Sequence[bool]) -> tuple[Variant, ...]:
    """The shardings worth offering, one per rule name, in the order found.

    Args:
        cuttable: per input whether its dim 0 is the batch; of others only biases per head may come in pieces.
    """
    groups: dict[tuple[tuple[Content, ...], tuple[str, ...]], list[Variant]] = {}
    for variant in _all(program, cuttable):
        groups.setdefault((variant.inputs, variant.found.outputs), []).append(variant)
    named: dict[str, Variant] = {}
    for group in groups.values():
        best = _best(program, group)
        for each in (best, *_for_more_ways(program, group, best)):
            known = named.get(each.found.rule)
            if known is None or _worth(program, each) > _worth(program, known):
                named[each.found.rule] = each
    most = max((_elements(program, variant) for variant in named.values()), default=0)
    return tuple(variant for variant in named.values() if _elements(program, variant) >= SHARE * most)


def _all(program: CallProgram, cuttable: Sequence[bool]) -> Iterator[Variant]:
    tries = 0
    given = zip(program.inputs, cuttable, strict=True)
    sizes = frozenset(size for _, slot in program.state for size in program.tensors[slot].shape)
    for inputs in product(*(_choices(program, slot, may, flows, sizes) for (_, slot, flows), may in given)):
        open_: list[dict[str, ParameterShard | None]] = [{}]
        while open_ and tries < TRIES:
            decided = open_.pop()
            tries += 1
            try:
                found = propagate(program, inputs, decided)
            except Undecided as question:
                open_ += [{**decided, question.name: option} for option in reversed(question.options)]
                continue
            except Refused:
                continue
            if _useful(program, inputs, found):
                yield Variant(inputs, decided, found)


def _choices(program: CallProgram, slot: int, cuttable: bool, flows: bool, sizes: frozenset[int]) -> tuple[Content, ...]:
    """Full; or cut by channels (dim 1 of images), heads (of biases) or features (the last dim of rows and sequences).

    Args:
        sizes: of the dims of parameters. A sequence whose dim 1 is one of them, and its last none, has its features there.
    """
    kind = program.tensors[slot]
    dim = 2 if len(kind.shape) == 3 and (kind.shape[2] in sizes or kind.shape[1] not in sizes) else 1
    if not cuttable and not (flows and len(kind.shape) == 4):
        return (WHOLE,)
    if not kind.dtype.is_floating_point or len(kind.shape) < 2 or kind.shape[dim] == 1:
        return (WHOLE,)
    return (WHOLE, cut_along(dim))


def _useful(program: CallProgram, inputs: Sequence[Content], found: Propagation) -> bool:
    if found.limit < 2 or found.only_pieces:
        return False
    if found.rule == "follow":
        given = [content for content, (_, _, flows) in zip(inputs, program.inputs, strict=True) if flows]
        return found.whole_weights == 0 and bool(given) and all(content.form == SHARD for content in given)
    return any(made != FULL for made in found.outputs)


def _elements(program: CallProgram, variant: Variant) -> int:
    """Of the parameters and buffers that are cut."""
    shapes = {key.name: program.tensors[slot].shape for key, slot in program.state}
    return sum(math.prod(shapes[name]) for name in variant.found.parts)


def _best(program: CallProgram, group: Sequence[Variant]) -> Variant:
    """Of those that cut about the most, the one that allows the most shards; the first of equals."""
    most = max(_elements(program, variant) for variant in group)
    close = [variant for variant in group if _elements(program, variant) >= SLACK * most]
    return max(close, key=lambda variant: variant.found.limit)


def _for_more_ways(program: CallProgram, group: Sequence[Variant], best: Variant) -> list[Variant]:
    """The one with keys and values whole in every shard, if it allows more shards: fewer heads have those than queries."""
    whole_keys = [
        variant
        for variant in group
        if QUERIES in variant.found.rule.split("+")
        and best.found.limit % variant.found.limit
        and variant.found.rule != best.found.rule
    ]
    return [] if not whole_keys else [_best(program, whole_keys)]


def _worth(program: CallProgram, variant: Variant) -> tuple[int, int]:
    return _elements(program, variant), sum(content.form != FULL for content in variant.inputs)
