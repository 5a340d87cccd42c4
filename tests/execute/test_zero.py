"""ZeRO 2 and 3: whole on a rank only what is needed there. `test_equality` trains under them."""

from __future__ import annotations

import pytest
import torch

from parsim.model.trace.memory import LiveBytes
from parsim.plans.mesh import Mesh
from tests.execute.rank_states import MLP as SMALL_MLP
from tests.execute.rank_states import even_plan, rank_of


@pytest.mark.parametrize(("zero", "weights", "gradients"), [(0, 1, 1), (1, 1, 1), (2, 1, 4), (3, 4, 4)])
def test_what_stays_on_a_rank_between_steps(zero: int, weights: int, gradients: int) -> None:
    """Of dp=4: all of the weights and gradients, or a quarter of each bucket, padded."""
    rank = rank_of(SMALL_MLP, even_plan(SMALL_MLP, Mesh(dp=4), zero=zero), 0, optimizer="sgd")
    buckets = rank.layout.rank_buckets(0)
    whole = 8 * sum(bucket.chunk_elements * 4 if zero else bucket.elements for bucket in buckets)
    with LiveBytes() as live:
        for line, tensors in rank.resident_tensors().items():
            for tensor in tensors:
                live.track(tensor, line)
        assert live.current_bytes == whole // weights + whole // gradients


def test_gathered_parameters_come_and_go_in_one_place() -> None:
    """What autograd has saved of a parameter is there again once it is gathered again."""
    ranks = [rank_of(SMALL_MLP, even_plan(SMALL_MLP, Mesh(dp=2), zero=3), rank) for rank in range(2)]
    whole = rank_of(SMALL_MLP, even_plan(SMALL_MLP, Mesh(dp=2)), 0)
    first, *_ = ranks[0].layout.buckets
    divided = [rank.divided[first.number] for rank in ranks]
    parameter = ranks[0].parameters[first.parameters[0].name]
    view = parameter.data.reshape(-1)

    def gather() -> torch.Tensor:
        return divided[0].begin_parameters().copy_(torch.cat([bucket.chunk.data for bucket in divided]))

    flat = gather()
    expected = whole.parameters[first.parameters[0].name]
    assert torch.equal(parameter, expected)
    divided[0].end_parameters()
    assert flat.untyped_storage().nbytes() == 0
    gather()
    assert torch.equal(view, expected.reshape(-1))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_parts_of_all_ranks_are_the_whole_of_every_parameter(zero: int) -> None:
    """Each element on one rank, where its part says that it is."""
    ranks = [rank_of(SMALL_MLP, even_plan(SMALL_MLP, Mesh(dp=4), zero=zero), rank) for rank in range(4)]
    whole = rank_of(SMALL_MLP, even_plan(SMALL_MLP, Mesh(dp=4)), 0)
    for name, parameter in whole.parameters.items():
        together = torch.full((parameter.numel(),), float("nan"), dtype=parameter.dtype)
        for rank in ranks:
            for bucket in rank.divided.values():
                if name in bucket.parts:
                    fragment, place = bucket.parts[name]
                    together[fragment.start : fragment.stop] = bucket.chunk.data[place]
        assert torch.equal(together, parameter.detach().reshape(-1)), name
