"""How a value lies over the tp ranks of a stage, and the way from one layout to another as a chain of small hops.

Of T ranks, `ways` neighbours share one piece of the microbatch (the T // ways pieces lie in rank order), and hold of it
    full       all of it
    partial    a summand: the value is the sum over the `ways` ranks
    maximum    a value of its own: the value is the largest of the `ways` ranks, element by element
    shard      their piece of dim `dim`, in rank order
    placed     nothing, but for tp rank `rank`, which holds the whole microbatch (ways is T)

A hop changes one thing and is one kind of work. The scheduler prices hops, and the executor applies them to tensors. A
gradient can have another layout than its value: a shard that reads a full value makes a partial gradient.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from parsim.errors import GraphError, PlanError
from parsim.model.component import FULL, MAXIMUM, PARTIAL, Component

# How a component lies on the tp axis of its stage. (On the dp axis every component is batch-sharded.)
#
#     batch            the replica's microbatch is cut over all tp ranks, each holds the whole component (data parallel)
#     shard:RULE/W     tensor-sharded over W neighbouring ranks by one of its rules; the tp // W groups split the microbatch
#     replicate        every tp rank does all of it
#     place:J          tp rank J alone has it (model parallel by placement)
#
# So `dp=1 tp=8` with `batch` everywhere is data parallelism over 8 ranks, `shard:.../8` is model parallelism, and
# `shard:.../4` is hybrid: 2 x 4.


KINDS = ("batch", "shard", "replicate", "place")


class Placement(NamedTuple):
    """`rule` and `ways` belong to kind "shard", `shard` (a tp rank) to kind "place". Prints as above."""

    kind: str
    rule: str = ""
    ways: int = 1
    shard: int = 0

    def __str__(self) -> str:
        match self.kind:
            case "shard":
                return f"shard:{self.rule}/{self.ways}"
            case "place":
                return f"place:{self.shard}"
        return self.kind

    def batch_ways(self, tp: int) -> int:
        """How many neighbouring tp ranks work on the same samples."""
        return {"batch": 1, "shard": self.ways}.get(self.kind, tp)

    def runs_on(self, shard: int) -> bool:
        return self.kind != "place" or shard == self.shard


BATCH = Placement("batch")
REPLICATE = Placement("replicate")


def parse_placement(text: str) -> Placement:
    """Inverse of `str(placement)`. Raises PlanError."""
    match = re.fullmatch(r"(batch|replicate)|shard:([^/:]+)/(\d+)|place:(\d+)", text)
    if match is None:
        raise PlanError(f"cannot read placement {text!r}; write batch, replicate, shard:RULE/WAYS or place:RANK")
    if match[1]:
        return Placement(match[1])
    if match[2]:
        return Placement("shard", rule=match[2], ways=int(match[3]))
    return Placement("place", shard=int(match[4]))


class ValueLayout(NamedTuple):
    """Prints as full/1 (pieces of the batch), full/4, partial/4, shard1/4, placed2/4 (on rank 2 of 4). `size`: of a dim that
    `ways` do not divide: pieces are equal, and the last one ends in zeros. Prints as shard2/4:50257."""

    form: str
    ways: int
    dim: int = 0
    rank: int = 0
    size: int = 0

    def __str__(self) -> str:
        number = {"shard": self.dim, "placed": self.rank}.get(self.form, "")
        return f"{self.form}{number}/{self.ways}{f':{self.size}' if self.size else ''}"

    def local_share(self, tp: int) -> float:
        """Bytes one holding rank has, as a share of the value of the whole microbatch."""
        share = self.ways / tp
        return share / self.ways * self.padding if self.form == "shard" else share

    @property
    def padding(self) -> float:
        """Bytes of all pieces together, over those of the whole."""
        return -(-self.size // self.ways) * self.ways / self.size if self.size else 1.0

    def holders(self, tp: int) -> tuple[int, ...]:
        """The tp ranks that hold any of it."""
        return (self.rank,) if self.form == "placed" else tuple(range(tp))


def parse_layout(text: str) -> ValueLayout:
    """Inverse of `str(layout)`. Raises PlanError."""
    match = re.fullmatch(r"(full|partial|maximum|shard|placed)(\d*)/(\d+)(?::(\d+))?", text)
    if match is None:
        raise PlanError(f"cannot read layout {text!r}; write it as full/1, partial/4, shard1/4 or placed2/4")
    number = int(match[2] or 0)
    return ValueLayout(
        match[1],
        int(match[3]),
        dim=number if match[1] == "shard" else 0,
        rank=number if match[1] == "placed" else 0,
        size=int(match[4] or 0),
    )


PIECES = ValueLayout("full", 1)
"""Pieces of the batch, one per rank."""


class ValueAndGradientLayout(NamedTuple):
    """The layout of a value at a component, and that of its gradient there."""

    value: ValueLayout
    gradient: ValueLayout


def input_ends(component: Component, placement: Placement, tp: int, number: int) -> ValueAndGradientLayout:
    """The layout in which a component reads an input, and that in which it makes the gradient."""
    if placement.kind != "shard":
        return _unsharded(placement, tp)
    sharding = component.sharding(placement.rule)
    return _ends(sharding.inputs[number], placement.ways, sharding.size, {FULL: ("full", "partial")})


def output_ends(component: Component, placement: Placement, tp: int, number: int) -> ValueAndGradientLayout:
    """The layout in which a component makes an output, and that in which it needs the gradient. Of a full output shard 0 alone
    uses the gradient, and maxima have none."""
    if placement.kind != "shard":
        return _unsharded(placement, tp)
    sharding = component.sharding(placement.rule)
    forms = {FULL: ("full", "full"), PARTIAL: ("partial", "full"), MAXIMUM: ("maximum", "full")}
    return _ends(sharding.outputs[number], placement.ways, sharding.size, forms)


def _ends(content: str, ways: int, size: int, forms: Mapping[str, tuple[str, str]]) -> ValueAndGradientLayout:
    """The layouts of what a shard reads or makes; in none of the forms it is a piece of a dim of that size, as its gradient."""
    if content in forms:
        value, gradient = forms[content]
        return ValueAndGradientLayout(ValueLayout(value, ways), ValueLayout(gradient, ways))
    piece = ValueLayout("shard", ways, dim=int(content.removeprefix("shard:")), size=size if size % ways else 0)
    return ValueAndGradientLayout(piece, piece)


def _unsharded(placement: Placement, tp: int) -> ValueAndGradientLayout:
    match placement.kind:
        case "batch":
            layout = PIECES
        case "replicate":
            layout = ValueLayout("full", tp)
        case _:
            layout = ValueLayout("placed", tp, rank=placement.shard)
    return ValueAndGradientLayout(layout, layout)


class Hop(NamedTuple):
    """One step of a conversion. `operation` is a key of HOPS. Prints as all_gather_batch:full/1>full/4."""

    operation: str
    source: ValueLayout
    target: ValueLayout

    @property
    def padding(self) -> float:
        """What is sent, over what would be sent without padded pieces."""
        return max(self.source.padding, self.target.padding)

    def __str__(self) -> str:
        return f"{self.operation}:{self.source}>{self.target}"


def parse_hop(text: str) -> Hop:
    """Inverse of `str(hop)`. Raises PlanError."""
    operation, _, ends = text.partition(":")
    source, _, target = ends.partition(">")
    if operation not in HOPS:
        raise PlanError(f"unknown hop {operation!r}; known: {', '.join(HOPS)}")
    return Hop(operation, parse_layout(source), parse_layout(target))


class HopKind(NamedTuple):
    """What a hop does, and the collective that does it (a row of `parsim.work.COLLECTIVE_KINDS`); "": it needs none."""

    change: str
    collective: str = ""
    sends: bool = False


HOPS = {
    "split_batch": HopKind("full/w -> full/v, v < w: keep a piece; nothing is sent"),
    "split_dim": HopKind("full/w -> shard/w: keep a piece; nothing is sent"),
    "keep": HopKind("full/T -> placed: rank j has it already; nothing is sent"),
    "all_gather_batch": HopKind("full/v -> full/w, v < w: all_gather of pieces of the batch", "all_gather"),
    "all_gather_dim": HopKind("shard/w -> full/w: all_gather along the dim", "all_gather"),
    "all_reduce": HopKind("partial/w -> full/w", "all_reduce"),
    "all_reduce_maximum": HopKind("maximum/w -> full/w: the largest of all", "all_reduce"),
    "reduce_scatter_batch": HopKind("partial/w -> full/1: each rank sums its piece of the batch", "reduce_scatter"),
    "reduce_scatter_dim": HopKind("partial/w -> shard/w: each rank sums its piece of the dim", "reduce_scatter"),
    "all_to_all": HopKind("shard/w -> full/1 or back: pieces of the dim for pieces of the batch", "all_to_all"),
    "broadcast": HopKind("placed -> full/T", "broadcast"),
    "scatter": HopKind("placed -> full/1: its rank sends each its piece of the batch", sends=True),
    "gather": HopKind("full/1 -> placed: each sends its piece to that rank", sends=True),
    "move": HopKind("placed -> placed on another rank", sends=True),
}
POINT_TO_POINT_HOPS = tuple(name for name, kind in HOPS.items() if kind.sends)
LOCAL_HOPS = tuple(name for name, kind in HOPS.items() if not kind.sends and not kind.collective)


@lru_cache(maxsize=65536)
def conversion(source: ValueLayout, target: ValueLayout, tp: int) -> tuple[Hop, ...]:
    """The hops from one layout to another; none if they are equal. Paths share prefixes, so two readers of a value share the
    hops they have in common. Raises PlanError: no hop makes a partial layout or one of maxima."""
    if target.form in ("partial", "maximum") and source != target:
        parts = "partial sums" if target.form == "partial" else "maxima of parts"
        raise PlanError(f"a value in layout {source} cannot become {target}: nothing reads {parts} of another's making")
    hops: list[Hop] = []
    here = source
    while here != target:
        hop = _next(here, target, tp)
        hops.append(hop)
        here = hop.target
    return tuple(hops)


def _next(here: ValueLayout, target: ValueLayout, tp: int) -> Hop:
    """The first hop of the way; every case comes closer to the target."""

    def hop(operation: str, to: ValueLayout) -> Hop:
        return Hop(operation, here, to)

    full_there = ValueLayout("full", target.ways)
    match here.form:
        case "placed":
            if target.form == "placed":
                return hop("move", target)
            return hop("scatter", PIECES) if target == PIECES else hop("broadcast", ValueLayout("full", tp))
        case "partial":
            if target == PIECES or _apart(here, target, tp):
                return hop("reduce_scatter_batch", PIECES)
            if target.form == "shard" and target.ways == here.ways:
                return hop("reduce_scatter_dim", target)
            return hop("all_reduce", ValueLayout("full", here.ways))
        case "maximum":
            return hop("all_reduce_maximum", ValueLayout("full", here.ways))
        case "shard":
            if target == PIECES or _apart(here, target, tp):
                return hop("all_to_all", PIECES)
            return hop("all_gather_dim", ValueLayout("full", here.ways))
    if target.form == "placed":
        if here.ways == tp:
            return hop("keep", target)
        return hop("gather", target) if here == PIECES else hop("split_batch", PIECES)
    if target.form == "shard":
        if here == PIECES:
            return hop("all_to_all", target)
        if here.ways == target.ways:
            return hop("split_dim", target)
    if here.ways == full_there.ways:
        raise PlanError(f"no way from layout {here} to {target}")
    if full_there.ways % here.ways == 0:
        return hop("all_gather_batch", full_there)
    return hop("split_batch", full_there if here.ways % full_there.ways == 0 else PIECES)


def _apart(here: ValueLayout, target: ValueLayout, tp: int) -> bool:
    """Whether the way leads over single pieces of the batch: neither layout's groups lie within the other's."""
    if target.form == "placed":
        return here.ways != tp
    return bool(here.ways % target.ways and target.ways % here.ways)


# Who talks to whom in a hop: groups of tp ranks for the collective ones, pairs for the point-to-point ones.


def hop_groups(hop: Hop, tp: int) -> tuple[tuple[int, ...], ...]:
    """The groups of tp ranks that each do one collective, in the order of their pieces: the blocks of `ways` neighbours.
    all_gather_batch from v to w ways: in each block of w those at the same place of their v, whose pieces make up the block's.
    """
    small, large = sorted((hop.source.ways, hop.target.ways))
    match hop.operation:
        case "all_gather_batch":
            return tuple(
                tuple(range(start + place, start + large, small)) for start in range(0, tp, large) for place in range(small)
            )
        case "broadcast":
            return (tuple(range(tp)),)
        case name if HOPS[name].collective:
            return tuple(tuple(range(start, start + large)) for start in range(0, tp, large))
    raise GraphError(f"hop {hop} is not a collective")


def hop_pairs(hop: Hop, tp: int) -> tuple[tuple[int, int], ...]:
    """(source, destination) tp ranks of every message, in the order they are issued."""
    match hop.operation:
        case "gather":
            return tuple((shard, hop.target.rank) for shard in range(tp) if shard != hop.target.rank)
        case "scatter":
            return tuple((hop.source.rank, shard) for shard in range(tp) if shard != hop.source.rank)
        case "move":
            return ((hop.source.rank, hop.target.rank),)
    raise GraphError(f"hop {hop} sends nothing point to point")
