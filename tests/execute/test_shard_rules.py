"""Sharding rules: which variants there are, what is refused; shards are exact in values, gradients, bytes and peaks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the torch extra")

import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from experiments.common.shards import (
    assert_shards_equal_whole,
    bytes_of,
    copied,
    narrowed,
    traced_and_recorded,
    value_piece,
    values_of,
)
from parsim.errors import ModelError, TraceError
from parsim.model import LOSS, Model, load_model, record
from parsim.model.build import build_module, example_batch, loss_of
from parsim.model.component import Component, DividedSize, ParameterShard, Sharding, narrow, share_of, ways_of
from parsim.model.runnable import Runnable
from parsim.model.shard.apply import assemble, piece, shard_runnable
from parsim.model.shard.content import cut_along
from parsim.model.shard.rules import carried
from parsim.model.spec import ModelSpec
from parsim.model.trace.traced import model_of
from tests.architectures import batch_of, small_module
from tests.execute.bitwise import bytes_kept
from tests.execute.test_hf_architectures import component as component_of_architecture
from tests.hugging_face_configs import SMALL
from tests.quick import some_quick
from tests.traced import trace


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


# Calls that hold a whole layer, in shards against the whole in float64: multi-head attention, and products with experts.

WIDTH, HEADS, LENGTH, SAMPLES = 16, 4, 5, 2


def shardings(runnables: tuple[Runnable, ...], given: dict[str, Tensor], tolerance: float) -> dict[str, list[Sharding]]:
    """Of every component, each compared with the whole."""
    values = values_of(runnables, given)
    found = {}
    for runnable in runnables:
        described = component_of_architecture(runnable.program)
        found[runnable.name] = list(described.shardings)
        for sharding in described.shardings:
            for ways in (2, 4):
                if sharding.limit % ways == 0:
                    inputs = [values[name] for name in runnable.input_names]
                    assert_shards_equal_whole(runnable, described, sharding, ways, inputs, tolerance)
    return found


class Attention(nn.Module):
    """Of one kind, with a residual."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, bias=kind != "no bias")
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).triu(1).bool())

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        more: dict[str, Any] = {"need_weights": False}
        if self.kind in ("causal", "causal and padded"):
            more |= {"attn_mask": self.mask, "is_causal": True}
        if self.kind in ("padded", "causal and padded"):
            more |= {"key_padding_mask": padding}
        if self.kind == "weights":
            made, weights = self.inner(x, x, x)
            return x + made + weights @ made
        if self.kind == "cross":
            return x + self.inner(x, memory, memory, **more)[0]
        if self.kind == "three":
            return x + self.inner(x, memory, 2.0 * memory, **more)[0]
        return x + self.inner(x, x, x, **more)[0]


KINDS = ("plain", "no bias", "causal", "padded", "causal and padded", "cross", "three")


@pytest.mark.parametrize("kind", KINDS)
def test_multi_head_attention_is_cut_by_heads(kind: str) -> None:
    torch.manual_seed(0)
    module = Attention(kind).double()
    x, memory = (torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64) for _ in range(2))
    padding = torch.zeros(SAMPLES, LENGTH, dtype=torch.bool)
    padding[1, -2:] = True
    inputs = {"x": x, "memory": memory, "padding": padding}
    runnables = record(module, inputs, granularity="sublayer")
    given = dict(zip([f"input:{number}" for number in range(3)], inputs.values(), strict=True))
    found = shardings(runnables, given, 1e-12)
    (rules,) = found.values()
    assert [(sharding.rule, sharding.limit, sharding.outputs) for sharding in rules] == [("heads+row", HEADS, ("partial",))]
    cut = {part.name: (part.dim, part.blocks) for part in rules[0].parameters}
    expected = {"inner.in_proj_weight": (0, 3), "inner.in_proj_bias": (0, 3), "inner.out_proj.weight": (1, 1)}
    assert cut == {name: how for name, how in expected.items() if kind != "no bias" or "bias" not in name}


def test_attention_whose_weights_are_used_nonlinearly_stays_whole() -> None:
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64)
    inputs = {"x": x, "memory": x, "padding": torch.zeros(SAMPLES, LENGTH, dtype=torch.bool)}
    runnables = record(Attention("weights").double(), inputs, granularity="sublayer")
    assert not any(component_of_architecture(runnable.program).shardings for runnable in runnables)


@pytest.mark.hf
def test_the_mixer_of_mamba_is_cut_by_features(tmp_path: Path) -> None:
    """Two components: up to the summands of time step, B and C, and from their sum on; the scan over a shard's features."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL["mamba"], "num_hidden_layers": 2}))
    torch.manual_seed(0)
    module = build_module(ModelSpec(name=str(path))).double()
    tokens = torch.randint(48, (SAMPLES, 7))
    runnables = record(module, {"input_ids": tokens}, granularity="sublayer")
    found = shardings(runnables, {"input:0": tokens}, 2e-6)
    mixer = {where: rules for where, rules in found.items() if "layers.1.mixer" in where}
    assert [name.rpartition(".")[2] for name in mixer] == ["mixer", "mixer#2"]
    before, after = ({rule.rule: rule for rule in rules}["column+row"] for rules in mixer.values())
    parts = [{part.name.rpartition("mixer.")[2] for part in rule.parameters} for rule in (before, after)]
    assert parts == [{"in_proj.weight", "x_proj.weight", "conv1d.bias"}, {"dt_proj.weight", "out_proj.weight"}]
    assert "partial" in before.outputs
    assert "shard:1" in before.outputs
    assert "shard:1" in after.inputs
    assert after.outputs == ("partial",)


@pytest.mark.hf
@pytest.mark.parametrize("name", ["mixtral"])
def test_experts_are_cut_inside(name: str, tmp_path: Path) -> None:
    """Gate and up by columns in two runs, down by rows; the router whole in every shard."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL[name], "num_hidden_layers": 1}))
    torch.manual_seed(0)
    module = build_module(ModelSpec(name=str(path))).double()
    tokens = torch.randint(48, (SAMPLES, 6))
    runnables = record(module, {"input_ids": tokens}, granularity="sublayer")
    found = shardings(runnables, {"input:0": tokens}, 2e-6)
    (rules,) = (entry for where, entry in found.items() if where.endswith("mlp"))
    assert [(sharding.rule, sharding.outputs) for sharding in rules] == [("column+row", ("partial",))]
    parts = {part.name.rpartition(".")[2]: (part.dim, part.blocks) for part in rules[0].parameters}
    assert parts == {"gate_up_proj": (1, 2), "down_proj": (2, 1)}


# The fullest moments of real shards, run as the executor runs them, against those counted when the model was traced.

PEAK_SAMPLES = 5


def test_a_moment_of_one_of_four() -> None:
    """100 bytes per sample and 8 more on every shard, and a quarter of 40 and of 12."""
    assert DividedSize(100, 8, 40, 12).at(share_of(0, 4)) == (110, 11)
    assert DividedSize(100, 8, 40, 20).at(share_of(10, 4)) == (112, 14), "three of ten rows"


@pytest.mark.parametrize("name", ["mlp", "vgg_small", "resnet_small", "vit_small", "gpt_small", "bert_small"])
def test_counted_equals_run(name: str) -> None:
    """At another batch than the traces, and at ways of which two were counted and the others are not."""
    assert check(*traced_and_recorded(name, PEAK_SAMPLES)) > 2


@pytest.mark.slow
def test_counted_equals_run_with_dropout() -> None:
    """Masks of pieces are pieces, those of summands whole."""
    assert check(*traced_and_recorded("gpt_small", PEAK_SAMPLES, dropout=0.1)) > 2


@pytest.mark.hf
@pytest.mark.parametrize("name", some_quick(["phi3", "llama", "gemma2", "t5"], "phi3"))
def test_counted_equals_run_of_architectures(name: str) -> None:
    """Grouped queries with eight heads on two, unequal runs, full outputs with a gradient, biases per head."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    torch.manual_seed(0)
    heads = {"num_heads": 8} if name == "t5" else {"num_attention_heads": 8, "num_key_value_heads": 4}
    module, inputs = small_module(name, **heads), batch_of(name, PEAK_SAMPLES)
    model = model_of(module, (), inputs, granularity="sublayer")
    runnables = record(module, inputs, granularity="sublayer")
    given = dict(zip([f"input:{number}" for number in range(len(inputs))], inputs.values(), strict=True))
    assert check(model, runnables, values_of(runnables, given)) > 2


def check(model: Model, runnables: Sequence[Runnable], values: Mapping[str, Tensor]) -> int:
    """How many cases were checked at ways that were not counted."""
    seen: set[tuple[str, str]] = set()
    beyond = 0
    for runnable, component in zip(runnables, model.components, strict=True):
        for sharding in component.shardings:
            if (component.fingerprint, sharding.rule) in seen:
                continue
            seen.add((component.fingerprint, sharding.rule))
            widths = ways_of(sharding)
            for ways in (*widths[:3], widths[-1])[-2:]:
                given = [values[value] for value in component.inputs]
                first = [model.value[value].savers[:1] == (component.name,) for value in component.inputs]
                run = [peaks(runnable, sharding, shard, ways, given, first) for shard in (0, 1)]
                expected = tuple(max(shard[phase] for shard in run) for phase in (0, 1))
                assert counted(narrow(component, sharding.rule, ways)) == expected, (component.name, sharding.rule, ways)
                beyond += ways not in widths[:2]
    return beyond


def counted(part: Component) -> tuple[int, int]:
    forward, backward = (
        [rate * PEAK_SAMPLES + fixed for rate, fixed in found] for found in (part.forward_peaks, part.backward_peaks)
    )
    return max(forward), max(backward, default=0)


def peaks(
    runnable: Runnable, sharding: Sharding, shard: int, ways: int, whole: Sequence[Tensor], first: Sequence[bool]
) -> tuple[int, int]:
    """Bytes at the fullest moment of a forward, and of a backward beyond what that forward has saved.

    `first`: per input whether this component is the first to save it, so that its backward lets go of it.
    """
    local = shard_runnable(narrowed(runnable, sharding, shard, ways), sharding, shard, ways)
    given = [value_piece(value, content, shard, ways).clone() for value, content in zip(whole, sharding.inputs, strict=True)]
    forward, _, backward = bytes_of(local, given, first)
    return forward, backward


# Every shardable component of every small model: the shards together are the whole, in values, gradients and buffers.

SMALL_MODELS = ("mlp", "vgg_small", "resnet_small", "vit_small", "gpt_small", "bert_small")
SHARDED_SAMPLES = 3


def recorded(name: str, granularity: str) -> tuple[tuple[Runnable, ...], dict[str, torch.Tensor]]:
    """Runnables in float64 with weights that are all in use (no zeros), and every value of one forward."""
    spec = ModelSpec(name=name)
    torch.manual_seed(0)
    module = build_module(spec).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    inputs, target = example_batch(spec, SHARDED_SAMPLES, dtype=torch.float64)
    runnables = record(module, inputs, granularity=granularity, loss=loss_of(spec))
    return runnables, values_of(runnables, {"input:0": next(iter(inputs.values())), "target": target})


def test_three_ways() -> None:
    """Ways that are no power of two: 96 hidden features, three channels of a fused projection."""
    model = load_model(ModelSpec(name="vit_small"), granularity="sublayer")
    runnables, values = recorded("vit_small", "sublayer")
    component = model.component("layers.1.fc1")
    runnable = next(entry for entry in runnables if entry.name == component.name)
    assert_shards_equal_whole(runnable, component, component.sharding("column+row"), 3, [values[v] for v in component.inputs])


@pytest.mark.parametrize("name", some_quick(SMALL_MODELS[1:5], "vgg_small", "gpt_small"))
def test_narrow_is_what_a_shard_does(name: str) -> None:
    """torch 2.13: FlopCounterMode counts no attention on the CPU. Flop and parameters of one of four shards in a real
    forward, against `narrow`."""
    model = load_model(ModelSpec(name=name), granularity="layer")
    runnables, values = recorded(name, "layer")
    checked = 0
    for runnable, component in zip(runnables, model.components, strict=True):
        for sharding in component.shardings:
            if sharding.limit % 4:
                continue
            part = narrow(component, sharding.rule, 4)
            shard = shard_runnable(narrowed(runnable, sharding, 0, 4), sharding, 0, 4)
            given = [
                value_piece(values[value], content, 0, 4)
                for value, content in zip(component.inputs, sharding.inputs, strict=True)
            ]
            with FlopCounterMode(display=False) as counter:
                shard(given)
            flop = sum(o.forward_flop * o.count for o in part.operators if o.kind != "attention")
            assert counter.get_total_flops() == SHARDED_SAMPLES * flop, (component.name, sharding.rule)
            held = sum(p.numel() for p in shard.parameters())
            assert held == sum(p.elements for p in part.parameters), (component.name, sharding.rule)
            checked += 1
    assert checked > 5


def saved_bytes(runnable: Runnable, inputs: list[torch.Tensor], counted: Sequence[bool]) -> int:
    """What autograd keeps of one real forward, each storage once, without parameters and inputs that are not counted."""
    given = [x.clone().requires_grad_(flows) for x, flows in zip(inputs, runnable.input_differentiable, strict=True)]
    uncounted = [x for x, count in zip(given, counted, strict=True) if not count]
    return bytes_kept(lambda: runnable(given), (*runnable.module.parameters(), *runnable.module.buffers(), *uncounted))


@pytest.mark.parametrize("name", some_quick(SMALL_MODELS, "mlp", "vgg_small", "gpt_small"))
def test_saved_bytes_of_a_shard(name: str) -> None:
    """In float32, at another batch and other ways than the trace used. Left out: embeddings by vocabulary, which keep their
    token mask besides, components without a gradient, and one whose input is a view of a larger tensor.
    """
    model, runnables, values = traced_and_recorded(name, SHARDED_SAMPLES)
    checked = 0
    for runnable, component in zip(runnables, model.components, strict=True):
        if not any(runnable.output_differentiable):
            continue
        given = [values[value] for value in component.inputs]
        whole = component.saved_activation_bytes * SHARDED_SAMPLES + component.saved_fixed_bytes
        tries = itertools.product((True, False), repeat=len(given))  # an input is counted where it is first saved
        keeps = {c: saved_bytes(copied(runnable), given, c) for c in tries}
        counted = next((c for c, size in keeps.items() if size == whole), None)
        for sharding in component.shardings:
            if sharding.limit % 4 or (sharding.rule == "vocabulary" and component.parameters) or counted is None:
                continue
            local = shard_runnable(narrowed(runnable, sharding, 0, 4), sharding, 0, 4)
            pieces = [value_piece(x, content, 0, 4) for x, content in zip(given, sharding.inputs, strict=True)]
            part = narrow(component, sharding.rule, 4)
            expected = part.saved_activation_bytes * SHARDED_SAMPLES + part.saved_fixed_bytes
            assert saved_bytes(local, pieces, counted) == expected, (component.name, sharding.rule)
            checked += 1
    assert checked >= sum(len(component.shardings) for component in model.components) - 3


class TestErrors:
    def test_ways_and_shard(self) -> None:
        component = load_model(ModelSpec(name="vit_small"), granularity="sublayer").component("layers.0.attention")
        runnables, _ = recorded("vit_small", "sublayer")
        runnable = next(entry for entry in runnables if entry.name == component.name)
        with pytest.raises(ModelError, match="3 must divide 4"):
            shard_runnable(runnable, component.shardings[0], 0, 3)
        with pytest.raises(ModelError, match=r"shards 0 to 1 of 2, got 2"):
            shard_runnable(runnable, component.shardings[0], 2, 2)

    def test_another_model(self) -> None:
        """A sharding of something else is found out, not run."""
        sharding = load_model(ModelSpec(name="mlp"), granularity="layer").component("layers.0").shardings[0]
        (runnable,) = record(nn.Linear(4, 4), torch.zeros(2, 4), granularity="layer")
        with pytest.raises(ModelError, match="does not have the sharding column"):
            shard_runnable(runnable, sharding, 0, 2)


def test_the_loss_is_not_sharded() -> None:
    for name in SMALL_MODELS:
        for granularity in ("block", "sublayer", "layer"):
            assert load_model(ModelSpec(name=name), granularity=granularity).component(LOSS).shardings == ()
