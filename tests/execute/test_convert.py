"""Every communicating hop on real gloo ranks leaves on each what the layout says, and what it was given as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from experiments.common.forked import run_ranks
from parsim.execute.operations import all_gather_flat, reduce_scatter_flat, run_hop
from parsim.plans.layouts import HOPS, LOCAL_HOPS, hop_groups, parse_hop
from tests.layouts import every_hop, held, whole_array

POINT_TO_POINT = ("gather", "scatter", "move")
SUMMING = ("all_reduce", "all_reduce_maximum", "reduce_scatter_batch", "reduce_scatter_dim")


def _spread(tensor: Tensor) -> Tensor:
    """The same entries with strides of a permuted array, as a gradient of a transposed product has."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def _all_hops(rank: int, tp: int) -> list[str]:
    """Runs every collective hop there is over `tp` ranks; returns the operations it has run."""
    groups = {}
    whole, operations = whole_array(tp), set()
    for hop in every_hop(tp):
        if hop.operation in LOCAL_HOPS or hop.operation in POINT_TO_POINT:
            continue
        for members in hop_groups(hop, tp):
            if members not in groups:
                groups[members] = dist.new_group(list(members))
        (mine,) = [members for members in hop_groups(hop, tp) if rank in members]
        before, after = held(whole, hop.source, tp)[rank], held(whole, hop.target, tp)[rank]
        assert after is not None
        for dtype in (torch.float64, torch.float32, torch.int64):
            if dtype == torch.int64 and hop.operation in SUMMING:
                continue
            expected = torch.from_numpy(after).to(dtype)
            given = torch.empty_like(expected) if before is None else torch.from_numpy(before).to(dtype)
            for tensor in (given, _spread(given)):
                kept = tensor.clone()
                made = run_hop(hop, tensor, ranks=mine, group=groups[mine])
                assert made.dtype == dtype
                assert torch.equal(made, expected), f"{hop} on rank {rank} of {tp}, {dtype}"
                assert before is None or torch.equal(tensor, kept), f"{hop} changed what it was given"
                operations.add(hop.operation)
    return sorted(operations)


@pytest.mark.parametrize("tp", [2, 4])
def test_every_collective_hop_on_gloo(tmp_path: Path, tp: int) -> None:
    collective = sorted(set(HOPS) - {*LOCAL_HOPS, *POINT_TO_POINT})
    assert run_ranks(_all_hops, tp, tmp_path, tp) == [collective] * tp


def _flat_sums(rank: int) -> list[Tensor]:
    flat = torch.arange(6, dtype=torch.float64) * (rank + 1)
    own = torch.empty(3, dtype=torch.float64)
    group = dist.group.WORLD
    assert group is not None
    reduce_scatter_flat(own, flat, group)
    back = torch.empty(6, dtype=torch.float64)
    all_gather_flat(back, own, group)
    return [own, back]


def test_parts_of_a_flat_sum_and_the_whole_again(tmp_path: Path) -> None:
    total = torch.arange(6, dtype=torch.float64) * 3
    for rank, (own, back) in enumerate(run_ranks(_flat_sums, 2, tmp_path)):
        assert torch.equal(own, total[3 * rank : 3 * rank + 3])
        assert torch.equal(back, total)


def _ask_for_a_message(_: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    run_hop(parse_hop("move:placed0/1>placed0/1"), torch.zeros(1), ranks=(0,), group=group)


def test_a_message_is_no_collective(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="is not a collective"):
        run_ranks(_ask_for_a_message, 1, tmp_path)
