"""The cross-entropy over tokens in parts: its value and gradients, its shards, and real processes that share a vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

import torch.nn.functional as functional  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from experiments.common.equality import Case, compare_case, run_cases  # noqa: E402
from experiments.common.shards import assert_shards_equal_whole, traced_and_recorded  # noqa: E402
from parsim.model.component import MAXIMUM, PARTIAL  # noqa: E402
from parsim.model.inputs import IGNORED  # noqa: E402
from parsim.model.load import load_model  # noqa: E402
from parsim.model.model import Model  # noqa: E402
from parsim.model.spec import ModelSpec  # noqa: E402
from parsim.model.total_loss import class_sums, total_in_parts  # noqa: E402
from parsim.plans.layouts import parse_placement  # noqa: E402
from parsim.plans.mesh import Mesh  # noqa: E402
from parsim.plans.plan import Plan, Stage  # noqa: E402
from parsim.program.lower import lower  # noqa: E402
from parsim.work import Collective  # noqa: E402
from tests.hugging_face_configs import SMALL  # noqa: E402

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
    for case, run in zip(cases, run_cases(cases, tmp_path, steps=4), strict=True):
        difference = compare_case(case, run, tmp_path, steps=4)
        assert difference.worst <= 1e-10, f"{case}: {difference}"


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
    for case, run in zip(cases, run_cases(cases, tmp_path, steps=3), strict=True):
        difference = compare_case(case, run, tmp_path, steps=3)
        assert difference.worst <= 1e-5, f"{case}: {difference}"
