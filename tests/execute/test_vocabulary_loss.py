"""The cross-entropy over tokens in parts: its value and gradients, its shards, and real processes that share a vocabulary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the torch extra")

import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.common.equality import Case
from experiments.common.shards import assert_shards_equal_whole, traced_and_recorded
from parsim.app.train import open_run
from parsim.app.train import run as run_file
from parsim.errors import ModelError
from parsim.model.component import MAXIMUM, PARTIAL, ParameterShard, Sharding, narrow, share_of
from parsim.model.inputs import IGNORED
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.shard.apply import assemble, piece
from parsim.model.shard.rules import largest_of_shard, own_rows
from parsim.model.spec import ModelSpec
from parsim.model.total_loss import class_sums, total_in_parts
from parsim.plans.layouts import ValueLayout, parse_layout, parse_placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.program.lower import lower
from parsim.work import Collective
from tests.execute.test_bad_run import write_profile
from tests.execute.test_equality import assert_equal_to_one_process
from tests.hugging_face_configs import SMALL

SPEC = ModelSpec(name="gpt_small", args=(("heads", 2), ("hidden", 16), ("layers", 2), ("seq", 12), ("vocab", 32)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), classes=st.integers(1, 9), ways=st.integers(1, 3), scale=st.sampled_from([1.0, 60.0, 5e3]))
def test_parts_equal_the_cross_entropy(seed: int, classes: int, ways: int, scale: float) -> None:
    """Value and gradient in float64, however large the logits; a target that is ignored counts nothing."""
    torch.manual_seed(seed)
    logits = (scale * torch.randn(2, 3, classes * ways, dtype=torch.float64)).requires_grad_()
    target = torch.randint(classes * ways, (2, 3))
    target[0, 0] = IGNORED
    expected = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / 3
    (wanted,) = torch.autograd.grad(expected, logits)
    found = total_in_parts(logits, target, lambda _: None)
    (gradient,) = torch.autograd.grad(found, logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-12)

    pieces = [piece.detach().requires_grad_() for piece in logits.chunk(ways, -1)]
    maximum = torch.stack([piece.amax(-1, keepdim=True) for piece in pieces]).amax(0).detach()
    sums = torch.stack([class_sums(piece, maximum, target, shard) for shard, piece in enumerate(pieces)]).sum(0)
    whole = (torch.log(sums[..., 0]) - sums[..., 1]).masked_fill(target == IGNORED, 0.0).sum() / 3
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)
    found_pieces = torch.autograd.grad(whole, pieces)
    torch.testing.assert_close(torch.cat(found_pieces, -1), wanted, rtol=1e-11, atol=1e-12)


def test_no_component_reads_whole_logits() -> None:
    """The head cut by columns, the maximum and the sums read their piece of the vocabulary; exactly, in shards."""
    model, runnables, values = traced_and_recorded("gpt_small", 2)
    names = [component.name for component in model.components]
    assert names[-3:] == ["loss.maximum", "loss.sums", "loss"]
    head = model.components[-4]
    assert "shard:2" in head.sharding("column").outputs
    logits = head.outputs[head.sharding("column").outputs.index("shard:2")]
    for component, makes in zip(model.components[-3:-1], (MAXIMUM, PARTIAL), strict=True):
        (sharding,) = component.shardings
        assert sharding.outputs == (makes,)
        assert sharding.inputs[component.inputs.index(logits)] == "shard:2"
        runnable = next(entry for entry in runnables if entry.name == component.name)
        inputs = [values[name].double() if values[name].is_floating_point() else values[name] for name in component.inputs]
        assert_shards_equal_whole(runnable, component, sharding, 2, inputs, 1e-6)
    assert not model.components[-1].shardings
    assert logits not in model.components[-1].inputs
    largest = [operator for operator in model.component("loss.maximum").operators if operator.function == "amax"]
    assert [operator.gradients for operator in largest] == ["none"]
    saved = model.component("loss.sums").saved_activation_bytes
    assert saved == pytest.approx(model.value[logits].bytes_per_sample, rel=0.05), "the exponentials, once"


def all_in_shards(model: Model, otherwise: str) -> Plan:
    """Every component in two shards where it can be; the head by columns, so that it makes pieces of the vocabulary."""
    placements = []
    for component in model.components:
        rules = [sharding.rule for sharding in component.shardings if sharding.limit % 2 == 0]
        rule = "column" if component is model.components[-4] else "column+row" if "column+row" in rules else (*rules, "")[0]
        placements.append(parse_placement(f"shard:{rule}/2" if rule else otherwise))
    names = tuple(component.name for component in model.components)
    stage = Stage(components=names, ranks=(0, 1), placements=tuple(placements))
    return Plan(strategy="custom", mesh=Mesh(tp=2), stages=(stage,), global_batch=8, microbatches=2)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_two_processes_share_a_vocabulary(tmp_path: Path) -> None:
    """Every component in shards, the last part of the loss on pieces of the batch or on all: weights as of one process.

    Logits are never sent: only the maxima and sums of each token, and their gradients.
    """
    model = load_model(SPEC, granularity="sublayer")
    cases = []
    for last in ("batch", "replicate"):
        plan = all_in_shards(model, last)
        cases.append(Case(spec=SPEC, plan=plan, granularity="sublayer", dataset="synthetic", learning_rate=0.1))
        sent = {task.origin.value for task in lower(plan, model).tasks if isinstance(task.work, Collective)}
        assert not sent & set(model.components[-4].outputs)
        assert {"loss.maximum:0", "loss.sums:0"} <= sent
    assert_equal_to_one_process(cases, tmp_path, steps=4)


@pytest.mark.slow
@pytest.mark.hf
@pytest.mark.xdist_group("launch")
def test_mamba_and_mixtral_on_two_processes(tmp_path: Path) -> None:
    """Scans and experts in shards, from their configs, in float32: casts to it make other components in float64."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    cases = []
    for name in ("mamba", "mixtral"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**SMALL[name], "num_hidden_layers": 2}))
        spec = ModelSpec(name=str(path), args=(("seq", 6),))
        model = load_model(spec, granularity="sublayer")
        cut = [component.name for component in model.components if component.shardings]
        assert len(cut) >= len(model.components) - 2, cut
        plan = all_in_shards(model, "replicate")
        cases.append(Case(spec=spec, plan=plan, granularity="sublayer", dataset="synthetic", dtype="float32"))
    assert_equal_to_one_process(cases, tmp_path, steps=3, tolerance=1e-5)


# A vocabulary that the shards do not divide: pieces with padding equal the whole, alone and in training on real processes.

VOCABULARY = 37
ODD_SPEC = ModelSpec(name="gpt_small", args=(("heads", 2), ("hidden", 16), ("layers", 1), ("seq", 6), ("vocab", VOCABULARY)))


def allowed(size: int, ways: int) -> bool:
    return Sharding(rule="vocabulary", limit=size, inputs=(), outputs=(), size=size).allows(ways)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int]:
    """A vocabulary and ways that leave no shard empty."""
    size = draw(st.integers(2, 40))
    return size, draw(st.sampled_from([ways for ways in range(1, 9) if allowed(size, ways)]))


@given(cut=cuts(), dim=st.integers(0, 1))
def test_pieces_make_the_whole_again(cut: tuple[int, int], dim: int) -> None:
    size, ways = cut
    whole = torch.randn((size, 3) if dim == 0 else (3, size))
    part = ParameterShard(name="x", dim=dim, size=size)
    pieces = [piece(whole, part, shard, ways) for shard in range(ways)]
    assert {entry.shape[dim] for entry in pieces} == {share_of(size, ways).of(size)}
    assert torch.equal(assemble(pieces, part), whole)
    assert torch.cat(pieces, dim).narrow(dim, size, ways * pieces[0].shape[dim] - size).eq(0).all()


@settings(max_examples=60, deadline=None)
@given(cut=cuts(), seed=st.integers(0, 999), scale=st.sampled_from([1.0, 60.0, 5e3]))
def test_shards_of_logits_equal_the_cross_entropy(cut: tuple[int, int], seed: int, scale: float) -> None:
    """Value and gradients in float64; below zero everywhere, so that padding would be the largest if it counted."""
    size, ways = cut
    torch.manual_seed(seed)
    logits = (scale * torch.randn(2, 3, size, dtype=torch.float64) - 9e4).requires_grad_()
    target = torch.randint(size, (2, 3))
    expected = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    (wanted,) = torch.autograd.grad(expected, logits)
    part = ParameterShard(name="logits", dim=2, size=size)
    pieces = [piece(logits.detach(), part, shard, ways).requires_grad_() for shard in range(ways)]
    maxima = [largest_of_shard(entry.detach(), -1, True, 2, size, shard) for shard, entry in enumerate(pieces)]
    maximum = torch.stack(maxima).amax(0)
    sums = torch.stack([class_sums(entry, maximum, target, shard, size) for shard, entry in enumerate(pieces)]).sum(0)
    found = (torch.log(sums[..., 0]) - sums[..., 1]).sum()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    gradients = torch.autograd.grad(found, pieces)
    torch.testing.assert_close(assemble(gradients, part), wanted, rtol=1e-9, atol=1e-10)
    assert not torch.cat(gradients, 2)[..., size:].any()


@given(cut=cuts(), seed=st.integers(0, 999))
def test_shards_of_a_table_equal_the_look_up(cut: tuple[int, int], seed: int) -> None:
    size, ways = cut
    torch.manual_seed(seed)
    table, tokens = torch.randn(size, 3, dtype=torch.float64), torch.randint(size, (2, 4))
    part = ParameterShard(name="table", dim=0, size=size)
    found = sum(own_rows(tokens, piece(table, part, shard, ways), shard) for shard in range(ways))
    assert torch.equal(found, functional.embedding(tokens, table))


@given(size=st.integers(0, 99), ways=st.integers(1, 9), dim=st.integers(0, 3))
def test_a_layout_reads_back(size: int, ways: int, dim: int) -> None:
    layout = ValueLayout("shard", ways, dim=dim, size=size)
    assert parse_layout(str(layout)) == layout
    held = -(-size // ways) / size if size else 1 / ways
    assert layout.local_share(ways) == pytest.approx(held, rel=1e-12)


@pytest.mark.slow
def test_only_a_vocabulary_is_padded() -> None:
    model = load_model(ODD_SPEC, granularity="sublayer")
    padded = {(component.name, each.rule) for component in model.components for each in component.shardings if each.size}
    assert padded == {("wte", "vocabulary"), ("lm_head", "column"), ("loss.maximum", "vocabulary"), ("loss.sums", "vocabulary")}
    head = model.component("lm_head")
    rows = narrow(head, "column", 4).parameters[0].elements // 16
    assert rows == 10, "ceil(37 / 4)"
    with pytest.raises(ModelError, match="36 must divide 37 or be at most 128 and leave no shard empty"):
        narrow(head, "column", 36)
    with pytest.raises(ModelError, match="3 must divide 2"):
        narrow(model.component("h.0.attn"), "heads+row", 3)
    assert Model.from_json(model.to_json()) == model


def plan_of(model: Model, tp: int, chosen: dict[str, str], *, dp: int = 1, **more: object) -> Plan:
    """The vocabulary in `tp` shards; the other components, and what `chosen` names, otherwise. All on `dp` replicas."""
    rules = {component.name: [each.rule for each in component.shardings if each.size] for component in model.components}
    placements = [
        parse_placement(chosen.get(name) or (f"shard:{padded[0]}/{tp}" if padded else "replicate"))
        for name, padded in rules.items()
    ]
    stage = Stage(components=tuple(rules), ranks=tuple(range(dp * tp)), placements=tuple(placements))
    plan = Plan(strategy="custom", mesh=Mesh(dp=dp, tp=tp), stages=(stage,), global_batch=8, microbatches=2)
    return replace(plan, **more)  # type: ignore[arg-type]


def case(plan: Plan, optimizer: str = "adamw") -> Case:
    return Case(spec=ODD_SPEC, plan=plan, granularity="sublayer", dataset="synthetic", optimizer=optimizer, learning_rate=0.01)


CONVERSIONS: tuple[dict[str, str], ...] = (
    {},
    {"loss.maximum": "replicate", "loss.sums": "batch"},
    {"wte": "replicate", "lm_head": "replicate"},
    {"wte": "batch", "lm_head": "batch"},
    {"h.0.attn": "batch", "loss": "batch"},
)
"""Logits stay in pieces; are gathered or exchanged for pieces of the batch; are cut from whole ones or from such pieces."""


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_two_processes_share_a_vocabulary_of_37(tmp_path: Path) -> None:
    """A tied table, every conversion of padded pieces, AdamW with weight decay: weights, moments and losses in float64."""
    model = load_model(ODD_SPEC, granularity="sublayer")
    cases = [
        case(plan_of(model, 2, chosen), "adamw" if number == 0 else "sgd_momentum") for number, chosen in enumerate(CONVERSIONS)
    ]
    assert_equal_to_one_process(cases, tmp_path, steps=3)


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_four_processes_share_a_vocabulary_of_37(tmp_path: Path) -> None:
    """Pieces of 10, 10, 10 and 7 rows; alone, beside ZeRO over two replicas, and over 100 steps."""
    model = load_model(ODD_SPEC, granularity="sublayer")
    cases = [case(plan_of(model, 4, {})), case(plan_of(model, 2, {}, dp=2, zero_stage=2))]
    assert_equal_to_one_process(cases, tmp_path, steps=100)


DROPOUTS = (
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob"),
)
"""In the configs of gpt2, t5 and bert. With them the reference draws other masks, whatever the vocabulary."""


@pytest.mark.slow
@pytest.mark.hf
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
@pytest.mark.xdist_group("launch")
def test_hugging_face_models_share_an_odd_vocabulary(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({**SMALL[name], **dict.fromkeys(DROPOUTS, 0.0), "vocab_size": 61}))
    spec = ModelSpec(name=str(path), args=(("seq", 6),))
    model = load_model(spec, granularity="sublayer")
    plan = plan_of(model, 2, {})
    assert sum(placement.kind == "shard" for placement in plan.stages[0].placements) >= 4
    trained = Case(spec=spec, plan=plan, granularity="sublayer", dataset="synthetic", learning_rate=0.02)
    assert_equal_to_one_process([trained], tmp_path, steps=3)


RUN = """\
[model]
name = "gpt_small"
granularity = "sublayer"
args = {{ heads = 2, hidden = 16, layers = 1, seq = 6, vocab = 37 }}
[cluster]
profile = "profile.json"
devices = 2
[training]
global_batch = 8
dataset = "synthetic"
optimizer = "sgd_momentum"
learning_rate = 0.05
steps = {steps}
[plan]
{plan}
"""
SHARED = 'strategy = "custom"\nmesh = { tp = 2 }\nplacements = { "wte" = "shard:vocabulary/2", "lm_head" = "shard:column/2" }'
APART = 'strategy = "dp"\nmesh = { dp = 2 }'


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_a_run_resumes_under_other_plans_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints hold the whole table without padding: from pieces to replicas and back, as one run of replicas goes.

    Without Adam: the gradient of a bias of keys is nothing but rounding, and Adam divides it by its own size.
    """
    write_profile(tmp_path, "reduce_scatter", "all_gather", "all_to_all")
    monkeypatch.chdir(tmp_path)

    def trained(steps: int, plan: str, out: str, **more: bool) -> dict[str, Any]:
        file = tmp_path / "run.toml"
        file.write_text(RUN.format(steps=steps, plan=plan))
        return run_file(file, out=out, **more).to_dict()

    straight = trained(9, APART, "straight")
    assert "shard:vocabulary/2" in str(trained(3, SHARED, "changing")["plan"])
    trained(6, APART, "changing", resume=True)
    trained(9, SHARED, "changing", resume=True)
    expected, found = (
        torch.load(open_run(tmp_path / out).export_weights(format="state_dict"), weights_only=True)
        for out in ("straight", "changing")
    )
    assert len(straight["losses"]) == 9
    assert found["wte.weight"].shape == (VOCABULARY, 16)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
