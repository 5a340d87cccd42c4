"""Fragments of a tensor, cut by shards and flat ranges, make the whole again; a missing one is named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parsim.errors import ExecutionError
from parsim.execute.checkpoint.fragments import WHOLE, Fragment, is_per_element, join, join_state
from parsim.model.component import ParameterShard
from parsim.model.shard.apply import piece


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[Tensor, dict[Fragment, Tensor]]:
    """A tensor and a complete set of its fragments, in any order."""
    ways, blocks, dim = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 1))
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    shape[dim] *= ways * blocks
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float64).reshape(shape)
    fragments: dict[Fragment, Tensor] = {}
    for shard in range(ways):
        local = piece(whole, ParameterShard(name="w", dim=dim, blocks=blocks), shard, ways)
        part = Fragment(dim=dim, blocks=blocks, shard=shard, ways=ways)
        if draw(st.booleans()):
            fragments[part] = local
            continue
        cuts = sorted(draw(st.sets(st.integers(1, max(1, local.numel() - 1)), max_size=4)) - {local.numel()})
        for start, stop in zip([0, *cuts], [*cuts, local.numel()], strict=True):
            own = part._replace(start=start, stop=stop, shape=tuple(local.shape))
            fragments[own] = local.reshape(-1)[start:stop]
    order = draw(st.permutations(list(fragments)))
    return whole, {fragment: fragments[fragment] for fragment in order}


@given(cut_tensors())
def test_fragments_in_any_order_make_the_whole(cut: tuple[Tensor, dict[Fragment, Tensor]]) -> None:
    whole, fragments = cut
    assert torch.equal(join("w", fragments), whole)
    state = {fragment: {"momentum_buffer": tensor, "step": torch.tensor(4.0)} for fragment, tensor in fragments.items()}
    joined = join_state("w", state)
    assert torch.equal(joined["momentum_buffer"], whole)
    assert joined["step"].item() == 4


@given(cut_tensors(), st.data())
def test_without_any_one_of_them_there_is_no_whole(cut: tuple[Tensor, dict[Fragment, Tensor]], data: st.DataObject) -> None:
    _, fragments = cut
    if len(fragments) == 1:
        return
    lost = data.draw(st.sampled_from(list(fragments)))
    with pytest.raises(ExecutionError, match=r"'w': .* (missing|are there)"):
        join("w", {fragment: tensor for fragment, tensor in fragments.items() if fragment != lost})


def test_a_number_keeps_its_shape_and_its_momentum() -> None:
    """A 0-dim parameter in a divided bucket is saved as a flat range of one element."""
    scalar = Fragment(start=0, stop=1, shape=())
    assert join("scale", {scalar: torch.tensor([2.0])}).shape == ()
    assert is_per_element(torch.tensor(1.0), "exp_avg")
    assert not is_per_element(torch.tensor(1.0), "step")
    assert not is_per_element(None, "momentum_buffer")
    state = join_state("scale", {scalar: {"exp_avg": torch.tensor([0.5]), "step": torch.tensor(3.0)}})
    assert state["exp_avg"].shape == ()
    assert state["step"].item() == 3


def test_a_whole_tensor_is_its_own_fragment() -> None:
    tensor = torch.ones(2, 2)
    assert join("w", {WHOLE: tensor}) is tensor
