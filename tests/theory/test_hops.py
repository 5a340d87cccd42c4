"""Hops over all tp ranks at once: their groups and pairs turn every layout into every other, by the layouts' definition."""

from __future__ import annotations

import numpy as np
import pytest

from parsim.errors import GraphError, PlanError
from parsim.plans.layouts import HOPS, LOCAL_HOPS, Hop, conversion, hop_groups, hop_pairs, parse_hop
from parsim.program.passes.convert import hop_collective
from tests.layouts import Array, every_hop, held, layouts, whole_array

SIZES = (1, 2, 4, 6, 8)
POINT_TO_POINT = ("gather", "scatter", "move")


def run(hop: Hop, there: list[Array | None], tp: int) -> list[Array | None]:
    """What every rank holds after the hop: collectives group by group, messages pair by pair."""
    if hop.operation in LOCAL_HOPS:
        return [_kept(hop, rank, tensor) for rank, tensor in enumerate(there)]
    if hop.operation in POINT_TO_POINT:
        return _after_messages(hop, there, tp)
    after: list[Array | None] = [None] * tp
    for group in hop_groups(hop, tp):
        for rank, made in zip(group, _collective(hop, [there[rank] for rank in group]), strict=True):
            assert after[rank] is None, f"rank {rank} is in two groups of {hop}"
            after[rank] = made
    return after


def _kept(hop: Hop, rank: int, tensor: Array | None) -> Array | None:
    assert tensor is not None
    if hop.operation == "keep":
        return tensor if rank == hop.target.rank else None
    if hop.operation == "split_dim":
        return np.split(tensor, hop.target.ways, axis=hop.target.dim)[rank % hop.target.ways]
    return np.split(tensor, hop.source.ways // hop.target.ways)[rank % hop.source.ways // hop.target.ways]


def _after_messages(hop: Hop, there: list[Array | None], tp: int) -> list[Array | None]:
    """A message goes from a rank that holds something; the one that stays has its own part."""
    sent = {pair: there[pair[0]] for pair in hop_pairs(hop, tp)}
    assert all(tensor is not None for tensor in sent.values())
    if hop.operation == "move":
        ((pair, tensor),) = sent.items()
        return [tensor if rank == pair[1] else None for rank in range(tp)]
    if hop.operation == "gather":
        pieces = [there[rank] if rank == hop.target.rank else sent[rank, hop.target.rank] for rank in range(tp)]
        return [np.concatenate(_present(pieces)) if rank == hop.target.rank else None for rank in range(tp)]
    source = hop.source.rank
    tensors = _present([there[source] if rank == source else sent[source, rank] for rank in range(tp)])
    return [np.split(tensor, tp)[rank] for rank, tensor in enumerate(tensors)]


def _collective(hop: Hop, there: list[Array | None]) -> list[Array]:
    count = len(there)
    if hop.operation == "broadcast":
        root = there[hop.source.rank]
        assert root is not None
        return [root] * count
    given = _present(there)
    match hop.operation:
        case "all_gather_batch":
            return [np.concatenate(given)] * count
        case "all_gather_dim":
            return [np.concatenate(given, axis=hop.source.dim)] * count
        case "all_reduce":
            return [sum(given, np.zeros_like(given[0]))] * count
        case "all_reduce_maximum":
            return [np.max(given, axis=0)] * count
        case "reduce_scatter_batch":
            return np.split(sum(given, np.zeros_like(given[0])), count)
        case "reduce_scatter_dim":
            return np.split(sum(given, np.zeros_like(given[0])), count, axis=hop.target.dim)
    split, join = (0, hop.source.dim) if hop.source.form == "shard" else (hop.target.dim, 0)
    parts = [np.split(tensor, count, axis=split) for tensor in given]
    return [np.concatenate([part[place] for part in parts], axis=join) for place in range(count)]


def _present(tensors: list[Array | None]) -> list[Array]:
    found = [tensor for tensor in tensors if tensor is not None]
    assert len(found) == len(tensors), "a rank takes part that holds nothing"
    return found


@pytest.mark.parametrize("tp", SIZES)
def test_every_conversion_ends_in_what_the_target_layout_says(tp: int) -> None:
    whole = whole_array(tp)
    for source in layouts(tp, readable=False):
        for target in layouts(tp, readable=True):
            there = held(whole, source, tp)
            for hop in conversion(source, target, tp):
                there = run(hop, there, tp)
                if hop.target.form != "partial":
                    _assert_held(there, held(whole, hop.target, tp), f"{source} to {target} over {tp} at {hop}")


def test_only_hops_along_a_dim_pack() -> None:
    """What executes a hop copies its parts together (`run_hop`) where they do not lie in one piece."""
    packs = {"all_gather_dim": True, "reduce_scatter_dim": True, "all_gather_batch": False, "reduce_scatter_batch": False}
    seen = set()
    for source in layouts(4, readable=False):
        for target in layouts(4, readable=True):
            for hop in conversion(source, target, 4):
                if hop.operation in packs:
                    seen.add(hop.operation)
                    assert hop_collective(hop, (0, 1, 2, 3), 4096, 4).packed == packs[hop.operation]
    assert seen == set(packs)


def _assert_held(found: list[Array | None], expected: list[Array | None], what: str) -> None:
    for rank, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
        if wanted is None:
            assert mine is None, f"{what}: rank {rank} holds what it should not"
        else:
            assert mine is not None, f"{what}: rank {rank} holds nothing"
            np.testing.assert_array_equal(mine, wanted, err_msg=f"{what}: rank {rank}")


@pytest.mark.parametrize("tp", SIZES)
def test_the_groups_of_a_hop_are_all_ranks_each_once_in_ascending_order(tp: int) -> None:
    """Ascending, because that is the order in which torch numbers the members of a group."""
    for hop in every_hop(tp):
        if hop.operation in LOCAL_HOPS or hop.operation in POINT_TO_POINT:
            continue
        groups = hop_groups(hop, tp)
        assert sorted(rank for group in groups for rank in group) == list(range(tp))
        assert all(list(group) == sorted(group) and len(group) > 1 for group in groups)


def test_every_hop_there_is_is_taken_by_some_conversion() -> None:
    assert {hop.operation for hop in every_hop(4)} == set(HOPS)


def test_nothing_becomes_a_partial_or_a_maximum() -> None:
    for form in ("partial", "maximum"):
        (layout,) = [layout for layout in layouts(2, readable=False) if layout.form == form]
        with pytest.raises(PlanError, match=form[:5]):
            conversion(layouts(2, readable=True)[0], layout, 2)


def test_groups_are_of_collectives_and_pairs_of_messages() -> None:
    with pytest.raises(GraphError, match="not a collective"):
        hop_groups(parse_hop("move:placed0/2>placed1/2"), 2)
    with pytest.raises(GraphError, match="point to point"):
        hop_pairs(parse_hop("all_reduce:partial/2>full/2"), 2)
