"""The table of sharding rules on small modules: which variants it finds, which calls it refuses, and that shards are exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

import torch.nn.functional as functional  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from experiments.common.shards import assert_shards_equal_whole  # noqa: E402
from parsim.errors import TraceError  # noqa: E402
from parsim.model.component import Component, ParameterShard  # noqa: E402
from parsim.model.runnable import Runnable  # noqa: E402
from parsim.model.shard.apply import assemble, piece  # noqa: E402
from parsim.model.shard.content import cut_along  # noqa: E402
from parsim.model.shard.rules import carried  # noqa: E402
from tests.traced import trace  # noqa: E402


class Conv1D(nn.Module):
    """A linear layer with its weight transposed, as GPT-2 has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Fused(nn.Module):
    """Query, key and value by split of a fused Conv1D, eager attention, output projection, residual."""

    def __init__(self, mask: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.mask = Conv1D(8, 24), Conv1D(8, 8), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(x.shape[0], -1, 4, 2).transpose(1, 2) for part in self.qkv(x).split(8, dim=2))
        scores = torch.matmul(q, k.transpose(-1, -2)) / 1.4
        if self.mask:
            scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1e9)
        y = torch.matmul(functional.softmax(scores, dim=-1), v)
        return self.out(y.transpose(1, 2).contiguous().reshape(x.shape)) + x


class Gated(nn.Module):
    """Gate and up projection in one matrix, cut apart by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(6, 16), nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(self.norm(x)).chunk(2, dim=-1)
        return x - self.down(functional.silu(gate) * up) * 0.5


class Grouped(nn.Module):
    """Four query heads on two key and value heads, with a mask per head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 8)
        self.slopes = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq = x.shape[:2]
        q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = self.kv(x).view(batch, seq, 2, 2, 2).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.slopes * torch.arange(seq, dtype=x.dtype)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)) + x


class Torn(nn.Module):
    """Six query heads on two key and value heads without biases: three shards of two queries tear a group of three."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, heads * 2, bias=False) for heads in (6, 2, 2))
        self.out = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)) + x


class UnequalRuns(nn.Module):
    """Four query heads and two key and value heads in one matrix, taken apart by slices: runs of 8, 4 and 4."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        q, k, v = (
            part.unflatten(-1, (-1, 2)).transpose(1, 2).repeat_interleave(4 * 2 // part.shape[-1], dim=1)
            for part in (y[..., :8], y[..., 8:12], y[..., 12:])
        )
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2)) + x


class Dropped(nn.Module):
    """Dropout of scores (pieces of heads), of the output (summands) and of the input (full)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.3)
        q, k, v = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = functional.dropout(functional.softmax(q @ k.transpose(-1, -2), dim=-1), 0.5)
        y = (scores @ v).transpose(1, 2).flatten(2)
        return functional.dropout(self.out(y), 0.5, True) + x


class Scaled(nn.Module):
    """Elementwise parameters along the cut dim, reductions over other dims, indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scale, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.up(x) * self.scale + self.shift)
        y = torch.cat([y[:, :1], y[:, 1:] / 3.0], dim=1)
        return self.down(y[:, :, None].squeeze(2).mean(1))


class Kernels(nn.Module):
    """Convolutions in a row: channels out, normalised, channels in; a grouped one would refuse."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3, padding=1, groups=1), nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 8, 1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.max_pool2d(functional.relu(self.norm(self.one(x)), inplace=True), 2)
        return functional.avg_pool2d(self.two(y), 2).flatten(1)


CASES: dict[str, tuple[nn.Module, tuple[int, ...], dict[str, int]]] = {
    "fused": (Fused(), (5, 8), {"heads+row": 4}),
    "causal": (Fused(mask=True), (5, 8), {"heads+row": 4}),
    "gated": (Gated(), (5, 6), {"column+row": 8}),
    "grouped queries": (Grouped(), (5, 8), {"heads+row": 2, "queries+row": 4}),
    "torn groups": (Torn(), (5, 12), {"heads+row": 2, "queries+row": 6}),
    "unequal runs": (UnequalRuns(), (5, 8), {"heads+row": 2}),
    "dropped": (Dropped(), (5, 8), {"heads+row": 4}),
    "scaled": (Scaled(), (5, 6), {"column+row": 8}),
    "kernels": (Kernels(), (3, 4, 4), {"channels_out+channels_in": 8}),
}


class Tail(nn.Module):
    """A second block, so that the one under test is a block as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.unsqueeze(-1))


def as_block(module: nn.Module, *shape: int) -> tuple[Runnable, Component, Tensor]:
    """The module as one component in float64, and an input."""
    torch.manual_seed(0)
    x = torch.randn(2, *shape, dtype=torch.float64)
    traced = trace(nn.Sequential(module, Tail()).double(), x.clone().requires_grad_(), granularity="block")
    assert len(traced.components) == 2
    return traced.components[0], traced.model.components[0], x


@pytest.mark.parametrize("name", CASES)
def test_variants_are_exact(name: str) -> None:
    """The rules found with what their shards must divide, and every shard of every one."""
    module, shape, expected = CASES[name]
    runnable, component, x = as_block(module, *shape)
    found = {sharding.rule: sharding.limit for sharding in component.shardings}
    assert found == expected
    for sharding in component.shardings:
        for ways in (2, 3, 4, 6):
            if sharding.limit % ways == 0:
                assert_shards_equal_whole(runnable, component, sharding, ways, [x])


class Clipped(torch.autograd.Function):
    """Its backward is not linear: summands of a gradient may not pass it one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].clamp(-0.1, 0.1)


BETWEEN: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "dropout": lambda y, parts: functional.dropout(y, 0.5),
    "norm": lambda y, parts: parts.norm(y),
    "softmax": lambda y, parts: y.softmax(-1),
    "roll": lambda y, parts: y.roll(1, dims=-1),
    "unknown": lambda y, parts: parts.gru(y)[0],
    "sum of features": lambda y, parts: y * y.sum(-1, keepdim=True),
    "noise": lambda y, parts: y + torch.randn_like(y),
    "own function": lambda y, parts: Clipped.apply(y),
}


class Refusing(nn.Module):
    """Between two linear layers something that shards cannot do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.prelu, self.gru = nn.LayerNorm(8), nn.PReLU(), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.down(BETWEEN[self.kind](self.up(x), self))) + self.norm(x)


@pytest.mark.parametrize("kind", BETWEEN)
def test_refused(kind: str) -> None:
    """None of these lets the cut through the middle; what a shard does whole before it leaves the last layer to be cut."""
    runnable, component, x = as_block(Refusing(kind), 5, 8)
    assert [sharding.rule for sharding in component.shardings] == ([] if kind in ("noise", "own function") else ["column"])
    for sharding in component.shardings:
        assert_shards_equal_whole(runnable, component, sharding, 2, [x])


def test_an_unlisted_call_of_two_types_under_autocast() -> None:
    """A fp32 parameter meets a half-precision activation in einsum, as in a state space layer: autocast casts one of them."""

    class Discretised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
            self.decay, self.out = nn.Parameter(torch.randn(4, 3)), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            step = self.down(functional.relu(self.up(x)))
            state = step.unsqueeze(-1) * self.decay
            return self.out(torch.einsum("bdn,bd->bn", state, step))

    component = trace(nn.Sequential(Discretised(), nn.Linear(4, 2)), torch.randn(4, 6)).model.components[0]
    assert component.half is not None
    assert [sharding.rule for sharding in component.shardings if sharding.half is not None] == ["column"]


def test_a_cut_that_is_shuffled() -> None:
    """4 x 2 features transposed to 2 x 4: the cut of the 4 comes out in two runs, and the next matrix is cut alike."""

    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).view(-1, 4, 2).transpose(1, 2).reshape(x.shape))

    runnable, component, x = as_block(Shuffled(), 5, 8)
    sharding = component.sharding("column+row")
    assert [(part.name, part.dim, part.blocks) for part in sharding.parameters] == [
        ("0.up.weight", 0, 1),
        ("0.up.bias", 0, 1),
        ("0.down.weight", 1, 2),
    ]
    assert sharding.limit == 4
    for ways in (2, 4):
        assert_shards_equal_whole(runnable, component, sharding, ways, [x])


def test_tied_weights_must_be_cut_alike() -> None:
    """One matrix as two column layers in a row would have to be cut by rows and by columns."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(functional.relu(self.one(x)))

    assert as_block(Twice(), 8)[1].shardings == ()


@pytest.mark.parametrize("padding", [None, 1, 6, -1])
def test_embeddings_by_rows_and_by_features(padding: int | None) -> None:
    """A padding row has no gradient, in whichever shard it is."""
    module = nn.Sequential(nn.Embedding(8, 4, padding_idx=padding)).double()
    tokens = torch.tensor([[0, 1, 6, 7, 3], [7, 1, 2, 6, 5]])
    found = trace(module, tokens, granularity="layer")
    runnable, component = found.components[0], found.model.components[0]
    assert [sharding.rule for sharding in component.shardings] == ["vocabulary", "column"]
    for sharding in component.shardings:
        assert_shards_equal_whole(runnable, component, sharding, 2, [tokens])


def test_a_renormalised_embedding_is_refused() -> None:
    """The table is changed as it is read."""
    with pytest.raises(TraceError, match=r"changes the parameter 0\.weight inside its forward"):
        trace(nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)), torch.randint(8, (2, 5)), granularity="layer")


def factors(size: int) -> list[int]:
    return [number for number in range(1, size + 1) if size % number == 0]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), before=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
def test_reshapes_carry_the_cut(data: st.DataObject, before: list[int]) -> None:
    """Where a reshape is said to carry the cut, pieces reshaped and put together are the whole reshaped; and it is said so
    whenever one dim can tell."""
    after: list[int] = []
    left = int(torch.tensor(before).prod())
    while left > 1 or not after:
        after.append(data.draw(st.sampled_from(factors(left)[1:] or [1])))
        left //= after[-1]
    dim = data.draw(st.integers(0, len(before) - 1))
    blocks = data.draw(st.sampled_from(factors(before[dim])))
    ways = before[dim] // blocks
    if ways == 1:
        return
    ways = next(number for number in range(2, ways + 1) if ways % number == 0)
    whole = torch.arange(int(torch.tensor(before).prod())).reshape(before)
    pieces = [piece(whole, ParameterShard(name="x", dim=dim, blocks=blocks), shard, ways) for shard in range(ways)]
    expected = whole.reshape(after)

    def is_cut(place: int, runs: int) -> bool:
        if after[place] % (runs * ways):
            return False
        part = ParameterShard(name="x", dim=place, blocks=runs)
        local = [size // ways if number == place else size for number, size in enumerate(after)]
        return torch.equal(assemble([entry.reshape(local) for entry in pieces], part), expected)

    found = carried(before, after, cut_along(dim, blocks))
    if found is not None and after[found.dim] // found.blocks % ways == 0:
        assert is_cut(found.dim, found.blocks)
    else:
        assert not any(is_cut(place, runs) for place, size in enumerate(after) for runs in factors(size) if size > runs)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    blocks=st.integers(1, 3),
    ways=st.integers(1, 4),
    unit=st.integers(1, 3),
    data=st.data(),
)
def test_pieces_assemble(sizes: list[int], blocks: int, ways: int, unit: int, data: st.DataObject) -> None:
    """`assemble` inverts `piece`; the first run of the first piece is the beginning of the whole."""
    dim = data.draw(st.integers(0, len(sizes) - 1))
    sizes[dim] = blocks * ways * unit
    whole = torch.randn(sizes)
    part = ParameterShard(name="x", dim=dim, blocks=blocks)
    pieces = [piece(whole, part, shard, ways) for shard in range(ways)]
    assert torch.equal(assemble(pieces, part), whole)
    assert torch.equal(pieces[0].narrow(dim, 0, unit), whole.narrow(dim, 0, unit))
    runs = tuple(ways * size for size in data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=3)))
    sizes[dim] = sum(runs)
    whole = torch.randn(sizes)
    part = ParameterShard(name="x", dim=dim, runs=runs)
    assert torch.equal(assemble([piece(whole, part, shard, ways) for shard in range(ways)], part), whole)
    assert all(a.data_ptr() != b.data_ptr() for a, b in itertools.pairwise([whole, *pieces]))
