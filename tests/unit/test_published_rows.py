"""Published runs as questions: reading rows, Models from shapes, units, and rows that are broken."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.published import predict as predictor
from experiments.published.answer import answer
from experiments.published.blanks import usual_chunks
from experiments.published.machines import machine_of
from experiments.published.predict import COLUMNS, main, predict
from experiments.published.question import Asked, question_of
from experiments.published.quoted import in_unit
from experiments.published.rows import number, row_of
from experiments.published.rules import rule_of
from parsim.costs.compute.formula import KernelModel, component_kernels
from parsim.costs.compute.launches import ComputeRequest
from parsim.errors import PlanError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import profile_from_parts
from parsim.model.catalogue.sublayers import EAGER, RULE, UNFUSED, SamplePart, Software
from parsim.model.catalogue.transformer import transformer
from parsim.model.component import narrow
from parsim.model.formats import Numerics
from parsim.model.load import model_from_module
from parsim.model.model import Model
from parsim.plans.plan import Plan
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.predict.problem import PlanningProblem
from parsim.work import Collective, Phase
from tests.models import gpt
from tests.published_row import row_with


def row(**values: str) -> dict[str, str]:
    return row_with(**{"id": "megatron-x-0001"} | values)


def question(without: str = "", **values: str) -> Asked:
    return question_of(row_of(row(**values)), without=without)


def with_and_without(question: Asked, key: str) -> tuple[Evaluation, Evaluation]:
    """The plan of a question as its row has it, and without a kind of overlap; both are priced, not run, and saved."""
    assert getattr(question.plan, key)
    assert not question.plan.executable
    assert Plan.from_json(question.plan.to_json()) == question.plan
    numerics = Numerics(precision="bf16", optimizer="adamw_fused")
    batch = question.plan.global_batch
    problem = PlanningProblem(model=question.model, cluster=question.cluster, global_batch=batch, numerics=numerics)
    plans = (question.plan, replace(question.plan, **{key: False}))
    overlapped, alone = (evaluate(problem, plan, samples=0, fold=True) for plan in plans)
    assert overlapped.result.step_s.median < alone.result.step_s.median
    return overlapped, alone


def test_numbers_as_sources_write_them() -> None:
    assert [number(text) for text in ("39.1e9", "1.7B", "2,048", "", None, "n/a", "56 (x)")] == [
        39.1e9, 1.7e9, 2048, None, None, None, 56,
    ]  # fmt: skip


@pytest.mark.parametrize("granularity", ["layer", "sublayer", "sequence"])
@pytest.mark.parametrize("selective", [False, True])
def test_a_gpt_by_shape_is_the_gpt_that_is_traced(granularity: str, selective: bool) -> None:
    """Parameters and flop of the zoo's GPT, whatever the components."""
    pytest.importorskip("torch")
    from parsim.model.catalogue.networks import GPT

    module = GPT(hidden=128, layers=3, heads=4, vocab=512, seq=64, dropout=0.0)
    traced = model_from_module(module, input_shape=(64,))
    software = Software(flash=True, dropout=False, selective=selective)
    made = transformer(gpt("gpt", 3, 128, 4, 512), software, SamplePart(tokens=64, context=64), granularity)
    assert made.parameter_count == traced.parameter_count

    def products(model: Model) -> float:
        return sum(
            operator.forward_flop * operator.count
            for component in model.components
            for operator in component.operators
            if operator.kind in ("matmul", "attention")
        )

    assert products(made) == pytest.approx(products(traced), rel=1e-12)


def test_shards_of_a_layer_hold_it_all() -> None:
    """tp shards together: the parameters once, but for the norms and biases that each holds whole."""
    model = transformer(gpt("gpt", 2, 256, 8), Software(), SamplePart(tokens=128, context=128), "sublayer")
    layer = model.component("h.1.mlp")
    shard = narrow(layer, RULE, 4)
    whole = {parameter.name: parameter.elements for parameter in layer.parameters}
    for parameter in shard.parameters:
        ways = 4 if parameter.name.endswith(("up.weight", "up.bias", "down.weight")) else 1
        assert parameter.elements * ways == whole[parameter.name]


def test_full_recomputation_sends_the_sums_again() -> None:
    megatron = question(id="megatron-sc21-0001")
    assert len(megatron.plan.segments) == 4
    assert not megatron.plan.executable
    assert megatron.plan.blocking_transfers
    assert "micro-batch" not in " ".join(megatron.assumed)


def test_flop_are_counted_as_megatron_counts_them() -> None:
    """Narayanan et al. (2021), equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h)."""
    batch, seq, layers, hidden, vocab = 16, 1024, 4, 1024, 51200
    flop = 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    assert in_unit(question(unit="TFLOP/s/GPU (hardware, incl. recompute)"), 2.0) == pytest.approx(
        flop / 2 / 8 / 1e12, rel=1e-9
    )


def test_a_count_that_is_none_is_told_and_not_only_blank() -> None:
    """8 GPUs follow from dp; that "-4" or "many" stood there must not get lost."""

    for text in ("-4", "many", "1.5"):
        read = row_of(row(gpus=text))
        assert (read.gpus, read.unread) == (None, (f"gpus {text!r}",))
        assert f"gpus {text!r} is no whole number above 0 and counts as blank" in question_of(read).assumed
    assert not row_of(row()).unread


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"hardware": "RTX-2080+RTX-3090"}, "GPU"),
        ({"model": "T5 3B", "hidden": ""}, "decoder-only"),
        ({"model": "unheard-of", "hidden": ""}, "shape"),
        ({"dp": "3"}, "not 8 GPUs"),
        ({"heads": "15", "tp": "8", "pp": "1", "dp": "1"}, "heads"),
        ({"unit": "furlongs"}, "unit"),
        ({"layers": "none", "params": ""}, "layers"),
    ],
)
def test_a_row_that_cannot_be_expressed_says_why(broken: dict[str, str], reason: str) -> None:
    found = predict(row_of(row(**broken)))
    assert found.value is None
    assert reason in found.why


def test_a_microbatch_adds_its_gradients_once_in_its_backward() -> None:
    """Three arrays of 16 bits per parameter, a share of them per tensor shard, and nothing in the forward."""
    shape, part = gpt("gpt", 2, 256, 8), SamplePart(tokens=128, context=128)

    def added(phase: Phase, ways: int) -> float:
        """Bytes that the sums add to what the component moves."""
        moved = []
        for arrays in (0.0, 3.0):
            layer = transformer(shape, Software(gradient_arrays=arrays), part, "sublayer").component("h.1.mlp")
            request = ComputeRequest(component=narrow(layer, RULE, ways), phase=phase, samples=2)
            moved.append(sum(kernel.count * kernel.size_bytes for kernel in component_kernels(request, "bf16", "cuda")))
        return moved[1] - moved[0]

    layer = transformer(shape, Software(), part, "sublayer").component("h.1.mlp")
    for ways in (1, 4):
        elements = sum(parameter.elements for parameter in narrow(layer, RULE, ways).parameters)
        assert added(Phase.FORWARD, ways) == added(Phase.BACKWARD_INPUT, ways) == 0
        assert added(Phase.BACKWARD, ways) == added(Phase.BACKWARD_WEIGHT, ways) == 3 * 2 * elements


@pytest.mark.parametrize(("heads", "slower"), [(96, False), (128, True)])
def test_heads_of_channels_that_are_not_aligned_lose_the_tensor_cores(heads: int, slower: bool) -> None:
    """13824 / 128 = 108 channels, no multiple of 8; 13824 / 96 = 144 is one. Fused attention pads and does not mind."""

    profile = profile_from_parts("a100-sxm-80gb", 8)
    model = KernelModel(profile, cluster_from_profile(profile, [0]).devices[0].type, "bf16")
    part, shape = SamplePart(tokens=256, context=256), gpt("gpt", 1, 13824, heads)

    def seconds(aligned: int, phase: Phase, fused: bool = False) -> float:
        software = replace(EAGER if fused else UNFUSED, aligned=aligned)
        layer = transformer(shape, software, part, "layer").component("h.0")
        return model.seconds(ComputeRequest(component=layer, phase=phase, samples=1))

    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert (seconds(8, phase) > seconds(0, phase)) is slower
        assert seconds(8, phase, fused=True) == seconds(0, phase, fused=True)
    scores_flop = 2 * 2 * 256 * 256 * 13824
    assert not slower or seconds(8, Phase.FORWARD) > scores_flop / (0.5 * 19.5e12)


def test_heads_that_a_row_does_not_state_are_those_of_its_framework() -> None:
    sizes = {"id": "bloom-tune-x-1", "heads": "", "layers": "80", "gpus": "80", "tp": "8", "pp": "10", "dp": "1"}
    bloom = question(**sizes, hidden="14400")
    assert bloom.shape.heads == 96
    assert "heads 96" in bloom.assumed
    assert question(**sizes, hidden="14336").shape.heads == 112


def test_recipes_of_the_launcher_fill_what_its_rows_leave_out() -> None:
    bert = rule_of(row_of(row(id="nemo-launcher-x-1", model="BERT 4B")))
    assert (bert.tp, bert.micro, bert.batch, bert.recompute) == (1, 8, 2048, "selective")
    assert rule_of(row_of(row(id="nemo-launcher-x-1", model="GPT 175B"))).tp == 0


def test_cards_of_a_node_are_counted_where_each_has_its_own_rate() -> None:
    several = machine_of(row_of(row(hardware="A100-80GB SXM, 8/node, 4x Omni-Path 100Gb/s per node")))
    whole = machine_of(row_of(row(hardware="A100, 8/node, 800 Gb/s per node between nodes")))
    assert several is not None
    assert whole is not None
    assert (several.cards, several.gbit) == (4, 100.0)
    assert (whole.cards, whole.gbit) == (4, 200.0)


@pytest.mark.parametrize(
    ("layers", "pp", "chunks"), [(105, 35, 3), (128, 64, 2), (96, 16, 2), (45, 15, 3), (35, 35, 1), (70, 14, 5), (7, 3, 2)]
)
def test_chunks_that_a_row_does_not_state_cut_evenly(layers: int, pp: int, chunks: int) -> None:
    assert usual_chunks(2, layers, pp) == chunks


@pytest.mark.parametrize("seq", [256, 4096])
def test_overlapped_tensor_parallelism_hides_at_most_what_the_products_take(seq: int) -> None:
    """Of n pieces one is always exposed; the step is shorter, and not by more than all of that communication."""

    values = {"id": "megatron-h100-x", "tp": "4", "pp": "1", "dp": "2", "recompute": "none", "seq": str(seq), "hidden": "4096"}
    overlapped, alone = with_and_without(question(**values, heads="32"), "tensor_overlap")
    terms = [
        (estimate.terms[-1].value, other.median_s, estimate.median_s)
        for estimate, other in zip(overlapped.estimates, alone.estimates, strict=True)
        if estimate.terms[-1].name == "exposed share"
    ]
    assert terms
    for share, before_s, after_s in terms:
        assert 1 / 4 <= share <= 1
        assert after_s == pytest.approx(share * before_s)


@pytest.mark.parametrize(
    ("recompute", "operation", "least"),
    [("full", "all_reduce", 17 / 26), ("selective, sequence parallel", "reduce_scatter", 1 / 2)],
)
def test_sums_of_the_backward_run_beside_gradients_of_weights(recompute: str, operation: str, least: float) -> None:
    """Wide products hide all sums of the backward: 9 of 26 where the eight of the layers are sent twice forward, else half."""

    values = {"id": "korthikanti-x", "tp": "4", "pp": "1", "dp": "1", "gpus": "4", "hidden": "8192", "micro_batch": "16"}
    wide = question(**values, heads="64", recompute=recompute)
    with pytest.raises(PlanError, match="tensor_backward_overlap"):
        replace(wide.plan, tensor_overlap=True)
    overlapped, alone = with_and_without(wide, "tensor_backward_overlap")
    changed = {}
    for unit, estimate, other in zip(overlapped.compiled.columns.units, overlapped.estimates, alone.estimates, strict=True):
        work = unit.work
        if isinstance(work, Collective) and work.operation in ("all_reduce", "reduce_scatter") and other.median_s:
            changed[work.operation, work.size_bytes] = estimate.median_s / other.median_s
        else:
            assert estimate.median_s == other.median_s
    largest = max(size for name, size in changed if name == operation)
    assert changed[operation, largest] == pytest.approx(least)
    assert min(changed.values()) >= least - 1e-9


@pytest.mark.slow
def test_recipes_that_spare_layers_take_the_time_without_and_the_memory_with_recomputation() -> None:
    """Of a row that would not fit; what it assumes is told. A row that fits, or states its recomputation, is as before."""
    values = {
        "hardware": "DGX-H100",
        "model": "LLAMA3_70B",
        "gpus": "64",
        "layers": "",
        "hidden": "",
        "heads": "",
        "seq": "8192",
    }
    values |= {"global_batch": "256", "micro_batch": "2", "tp": "1", "pp": "1", "dp": "64", "zero_stage": "3"}
    bridge = row_of(row(**values, id="nemo-bridge-x", recompute=""))
    whole, found = answer(question_of(bridge)), predict(bridge, raw=True)
    assert whole.peak_bytes > whole.limit_bytes
    assert found.answer is not None
    assert found.answer.step_s == whole.step_s
    assert found.answer.peak_bytes == answer(question_of(bridge, "full")).peak_bytes < whole.peak_bytes
    assert "activations of all layers are on the host" in found.why
    assert "half layers" not in found.why
    slower = predict(bridge, "layers spared by recipes", raw=True)
    assert slower.answer is not None
    assert slower.answer.peak_bytes == found.answer.peak_bytes
    assert slower.answer.step_s > 1.2 * whole.step_s
    stated = row_of(row(**values, id="nemo-bridge-x", recompute="none"))
    assert "on the host" not in predict(stated, raw=True).why


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"layers": "1e9"}, "layers is 1000000000, and no run has more than 1000"),
        ({"gpus": "1e9"}, "gpus is 1000000000"),
        ({"gpus": "", "tp": "512", "pp": "512", "dp": ""}, "tp 512 x pp 512 x cp 1 is 262144 GPUs"),
    ],
)
def test_sizes_that_no_run_has_are_refused(sizes: dict[str, str], reason: str) -> None:
    """A plan of 1e9 layers would fill the memory, and its process take the other rows with it."""
    assert reason in predict(row_of(row(**sizes))).why


def test_a_row_whose_process_ends_is_answered() -> None:

    found = predictor._apart(os._exit, 3)  # type: ignore[arg-type]  # it ends as one that is out of memory: without an exception
    assert "its process was ended" in found.why


def test_the_command_answers_every_row(tmp_path: Path) -> None:
    """A value is never read: the answer is the same without it."""
    source, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    rows = [row(value="1"), row(id="megatron-x-0002", value=""), row(id="x-3", hardware="abacus"), {"id": "only"}]
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row()))
        writer.writeheader()
        writer.writerows(rows)
    assert main([str(source), "--out", str(out), "--jobs", "1"]) == 0
    with out.open(newline="") as file:
        answers = list(csv.DictReader(file))
    assert [tuple(answer) for answer in answers] == [COLUMNS] * 4
    assert [answer["id"] for answer in answers] == ["megatron-x-0001", "megatron-x-0002", "x-3", "only"]
    assert answers[0]["predicted"] == answers[1]["predicted"] != ""
    assert float(answers[0]["p05"]) < float(answers[0]["predicted"]) < float(answers[0]["p95"])
    assert answers[0]["fits"] == "true"
    assert answers[2]["predicted"] == answers[3]["predicted"] == ""
    assert answers[2]["why"]
    assert main([str(tmp_path / "none.csv"), "--out", str(out)]) == 1


@pytest.mark.parametrize(
    ("name", "precision", "expected", "element_bytes"),
    [
        ("sailor-x-1", "fp16?", "tf32", 4),
        ("sailor-x-1", "fp16", "bf16", 2),
        ("sailor-x-1", "", "tf32", 4),
        ("megatron-x-1", "", "bf16", 2),
        ("megatron-x-1", "fp8", "fp8", 2),
        ("nemo-bridge-x-1", "NVFP4", "nvfp4", 2),
    ],
)
def test_a_precision_that_is_not_stated_is_the_frameworks(name: str, precision: str, expected: str, element_bytes: int) -> None:
    low = question(id=name, precision=precision, hardware="DGX-B200")
    assert low.precision == expected
    assert any(text.startswith("precision") for text in low.assumed) == (precision in ("", "fp16?", "fp8"))
    assert {parameter.element_bytes for parameter in low.model.component("h.0.attn").parameters} <= {element_bytes}


def test_the_host_of_a_gh200_is_a_grace_and_can_be_left_out() -> None:
    values = {"id": "sailor-x-1", "hardware": "GH-96 (4 per node, Alps Clariden)", "precision": "fp16?"}
    grace, none = (question(piece, **values).cluster.profile.host for piece in ("", "host launch rate"))
    assert grace is not None
    assert none is not None
    assert (grace.launch_s, none.launch_s) == (33.17e-6, 0.0)


def test_bf16_of_megatron_adds_gradients_up_in_fp32() -> None:
    moved = []
    for precision, piece in (("fp16", ""), ("bf16", ""), ("bf16", "gradients of bf16 in fp32")):
        mtnlg = question(piece, id="mtnlg-0001", precision=precision, tp="1", dp="4")
        moved.append(sum(operator.activation_bytes for operator in mtnlg.model.component("h.0").operators))
    assert moved[0] == moved[2] < moved[1]
