"""Published runs as questions: reading rows in the spellings of their sources, Models from shapes, units, and broken rows."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.published import predict as predictor
from experiments.published.answer import answer
from experiments.published.blanks import CannotExpressError, stage_of, usual_chunks
from experiments.published.machines import machine_of
from experiments.published.predict import COLUMNS, main, predict
from experiments.published.question import Asked, question_of
from experiments.published.quoted import in_unit, larger_is_faster
from experiments.published.rows import number, read_rows, row_of
from experiments.published.rules import recompute_of, rule, rule_of
from parsim.costs.compute.formula import KernelModel, component_kernels
from parsim.costs.compute.launches import ComputeRequest
from parsim.costs.published import learnt_of
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
from parsim.work import Collective, Compute, Phase
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
    expected = pytest.approx(flop / 2 / 8 / 1e12, rel=1e-9)
    assert in_unit(question(unit="TFLOP/s/GPU (hardware, incl. recompute)"), 2.0) == expected
    old, core = {"id": "a-1", "notes": "GPT-NeoX, Megatron-DeepSpeed"}, {"id": "a-1", "notes": "Megatron-Core"}
    assert in_unit(question(**old, unit="TFLOP/s/GPU"), 2.0) == expected  # its print-out says no more
    assert in_unit(question(**old, unit="TFLOP/s/GPU (model)"), 2.0) < 0.9 * flop / 2 / 8 / 1e12
    assert in_unit(question(**core, unit="TFLOP/s/GPU"), 2.0) < 0.9 * flop / 2 / 8 / 1e12


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
    """Gathering may hide wholly, since a shard has its own piece; of sums the last piece is exposed, in the forward."""

    values = {"id": "megatron-h100-x", "tp": "4", "pp": "1", "dp": "2", "recompute": "none", "seq": str(seq), "hidden": "4096"}
    overlapped, alone = with_and_without(question(**values, heads="32"), "tensor_overlap")
    least = {"all_gather": 0.0, "reduce_scatter": 1 / 8}
    shares: dict[str, list[float]] = {"all_gather": [], "reduce_scatter": []}
    for unit, estimate, other in zip(overlapped.compiled.columns.units, overlapped.estimates, alone.estimates, strict=True):
        if estimate.terms[-1].name == "exposed share":
            assert isinstance(unit.work, Collective)
            shares[unit.work.operation].append(estimate.terms[-1].value)
            assert estimate.median_s == pytest.approx(shares[unit.work.operation][-1] * other.median_s)
    for operation, found in shares.items():
        assert found
        assert least[operation] <= min(found) <= max(found) <= 1
        if seq == 4096:
            assert min(found) == pytest.approx(least[operation])


def test_products_in_pieces_take_longer_the_fewer_rows_a_piece_has() -> None:
    """Forward all products of a layer run in pieces, backward those towards the inputs of the ones that are cut by rows."""

    def longer(seq: int) -> dict[Phase, float]:
        values = {"id": "megatron-h100-x", "tp": "4", "pp": "1", "dp": "2", "recompute": "none", "hidden": "4096"}
        overlapped, alone = with_and_without(question(**values, heads="32", seq=str(seq)), "tensor_overlap")
        units = overlapped.compiled.columns.units
        return {
            unit.work.phase: estimate.median_s / other.median_s
            for unit, estimate, other in zip(units, overlapped.estimates, alone.estimates, strict=True)
            if isinstance(unit.work, Compute) and unit.work.component.endswith("mlp")
        }

    few, many = longer(512), longer(16384)
    assert few[Phase.FORWARD] > many[Phase.FORWARD] > 1
    assert few[Phase.FORWARD] > few[Phase.BACKWARD] > 1
    assert many[Phase.FORWARD] < 1.05


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
def test_adapters_of_mlperf_keep_activations_in_8_bits_before_they_recompute() -> None:
    values = {
        "hardware": "DGX-B200",
        "model": "Llama2-70B LoRA",
        "gpus": "8",
        "layers": "",
        "hidden": "",
        "heads": "",
        "seq": "",
    }
    values |= {"global_batch": "8", "micro_batch": "", "tp": "", "pp": "", "dp": "", "notes": "LoRA rank 16", "recompute": ""}
    found = predict(row_of(row(**values, id="mlperf-lora-x", precision="fp8")), raw=True)
    assert "in 8 bits" in found.why
    assert found.answer is not None
    assert found.answer.step_s == answer(question_of(found.row)).step_s
    assert (found.fit_probability or 0.0) > 0.5


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


# Rows of published runs whose texts, machines, models and units are others than those of the known table.

NAMED = {"layers": "", "hidden": "", "heads": ""}


def spelled_row(**values: str) -> Any:
    return row_of(dict(row_with(**values)))


def asked(**values: str) -> Any:
    return question_of(spelled_row(**values))


def refusal(**values: str) -> str:
    with pytest.raises(CannotExpressError) as caught:
        asked(**values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("column", "text", "expected"),
    [
        ("seq", "8K", 8192),
        ("seq", "128k", 131072),
        ("seq", "4,096 tokens", 4096),
        ("hidden", "12K", 12288),
        ("gpus", "16k", 16000),
        ("global_batch", "0.5M tokens", None),
        ("seq", "2^11", None),
        ("global_batch", "8 x 64", None),
        ("tp", "4-8", None),
        ("pp", "16 (8)", 16),
        ("seq", "1e400", None),
        ("layers", "9" * 400, None),
    ],
)
def test_counts_as_sources_write_them(column: str, text: str, expected: int | None) -> None:
    """A text that is still to be computed, or counts something else, is told as unread and not taken for its first digits."""
    read = spelled_row(**{column: text})
    assert getattr(read, column) == expected
    assert bool(read.unread) is (expected is None)


def test_a_file_of_a_spreadsheet_begins_with_a_mark_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,gpus\nmosaic-1,8\n", encoding="utf-8-sig")
    assert read_rows(path)[0].id == "mosaic-1"


@pytest.mark.parametrize(
    ("hardware", "gpu", "per_node", "cards", "gbit"),
    [
        ("A100-SXM4-40GB", "a100-sxm-40gb", 8, 8, 200),
        ("A100 (40GB)", "a100-sxm-40gb", 8, 8, 200),
        ("a100_40gb | A100 40GB with 1600 Gbps node-node interconnect (RoCE)", "a100-sxm-40gb", 8, 8, 200),
        ("DGX A100-80GB (Selene; the quoting page says 40GB)", "a100-sxm-80gb", 8, 8, 200),
        ("A100 80GB PCIe", "a100-pcie-80gb", 8, 1, 200),
        ("A100-PCIe-40GB, 8x HDR", "a100-pcie-40gb", 8, 8, 200),
        ("A100-80GB SXM, PCIe 4.0 host", "a100-sxm-80gb", 8, 8, 200),
        ("8x 80GB H100 SXM", "h100-sxm", 8, 8, 400),
        ("H100 PCIe", "h100-pcie", 8, 1, 200),
        ("H100 + 4x 200Gb/s InfiniBand", "h100-sxm", 8, 4, 200),
        ("H100 SXM, 200Gb/s RoCE per GPU", "h100-sxm", 8, 8, 200),
        ("H100 SXM, 4 GPUs per node, 3.2 Tb/s per node", "h100-sxm", 4, 8, 400),
        ("V100-16GB SXM2 (DGX-1)", "v100-sxm-16gb", 8, 1, 200),
        ("V100-32GB SXM (DGX-2)", "v100-sxm3-32gb", 16, 8, 100),
        ("GB200 NVL72, 4 per node", "gb200", 72, 72, 400),
        ("GB200 NVL36", "gb200", 36, 72, 400),
        ("MI300X", "mi300x", 8, 8, 400),
        ("MI325X", "mi325x", 8, 8, 400),
        ("H800, 8/node NVLink, 400Gb/s IB per GPU", "h800-sxm", 8, 8, 400),
        ("H800-80GB SXM5", "h800-sxm", 8, 8, 400),
        ("A800-80GB SXM4", "a800-sxm-80gb", 8, 8, 200),
        ("H20 96GB", "h20", 8, 1, 200),
        ("RTX A6000 48GB", "rtx-a6000", 4, 1, 200),
        ("RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000", 8, 1, 200),
        ("A10G", "a10g", 8, 1, 200),
        ("L40S 48GB", "l40s", 8, 1, 200),
        ("RTX-3090 (8 per node)", "rtx-3090", 8, 1, 200),
    ],
)
def test_machines_as_sources_write_them(hardware: str, gpu: str, per_node: int, cards: int, gbit: float) -> None:
    found = machine_of(spelled_row(hardware=hardware))
    assert found is not None
    assert (found.gpu, found.per_node, found.cards, found.gbit) == (gpu, per_node, cards, gbit)


def test_an_h100_of_96_gb_is_one_however_it_is_written() -> None:
    found = {machine_of(spelled_row(hardware=text)) for text in ("H100 96GB HBM2e", "H100-96GB", "H100-SXM-96GB")}
    assert len(found) == 1
    assert next(iter(found)).memory_gb == 96  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "hardware",
    [
        "H100 NVL",
        "H800 PCIe",
        "A800-40GB PCIe",
        "A100/V100",
        "RTX-3090+Titan-RTX (8 per node)",
        "A100+Foo-9000",
        "RTX-2080",
        "A100-SXM-64GB",
    ],
)
def test_boards_without_a_part_and_mixed_machines_are_refused(hardware: str) -> None:
    assert "no single kind of GPU" in refusal(hardware=hardware)


@pytest.mark.parametrize("hardware", ["A100 40GB PCIe", "L40S", "MI300X", "V100-16GB SXM2", "RTX-3090"])
def test_other_gpus_are_answered_on_several_nodes(hardware: str) -> None:
    found = predict(spelled_row(hardware=hardware, gpus="32", dp="8", global_batch="64", precision="fp16"))
    assert found.value is not None, found.why
    assert found.facts is not None
    learnt = learnt_of(found.facts.run)
    assert (found.p05, found.p95) == pytest.approx((found.value * learnt.low, found.value * learnt.high))
    assert learnt.low < 0.95
    assert learnt.high > 1.05
    assert ("network of 1 x 200 Gb/s" in found.why) is (hardware != "MI300X")


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("seconds per step", 2.0),
        ("sec/iteration", 2.0),
        ("ms / iteration", 2000.0),
        ("iterations/s", 0.5),
        ("samples/s", 8.0),
        ("samples/s/GPU", 1.0),
        ("sequences/sec", 8.0),
        ("tokens / sec / GPU", 1024.0),
        ("tokens/s/device", 1024.0),
        ("tokens/s (total)", 8192.0),
        ("tokens/s (total, of 8 GPUs)", 8192.0),
    ],
)
def test_units_as_sources_write_them(unit: str, expected: float) -> None:
    question = asked(unit=unit)
    assert in_unit(question, 2.0) == pytest.approx(expected)
    assert larger_is_faster(question) is (in_unit(question, 4.0) < expected)


@pytest.mark.parametrize("unit", ["s/sample", "ms/microbatch", "tokens/s/node", "furlongs", ""])
def test_units_of_something_else_are_refused(unit: str) -> None:
    found = predict(spelled_row(unit=unit))
    assert found.value is None
    assert "unit" in found.why


@pytest.mark.parametrize(
    ("hardware", "precision", "peak"),
    [
        ("A100-80GB SXM", "bf16", 312e12),
        ("DGX-GB200", "BF16", 2500e12),
        ("DGX-GB300", "bf16", 2500e12),
        ("GH-96 (4 per node)", "bf16", 989e12),
        ("h100_80gb", "amp_fp8", 1979e12),
        ("V100-32GB SXM (DGX-2)", "fp16", 125e12),
    ],
)
def test_utilisation_is_of_the_peak_of_gpu_and_precision(hardware: str, precision: str, peak: float) -> None:
    """llm-foundry's table of FP8: 14.38% where 284.6 TFLOP/s are reached."""
    values = {"hardware": hardware, "precision": precision}
    rate = in_unit(asked(unit="TFLOP/s/GPU", **values), 1.0) * 1e12
    for unit, scale in (("MFU", 1), ("MFU %", 100), ("percent MFU", 100), ("MFU (%)", 100)):
        assert in_unit(asked(unit=unit, **values), 1.0) == pytest.approx(scale * rate / peak, rel=2e-3)
    assert in_unit(asked(unit="PFLOP/s", **values), 1.0) == pytest.approx(8 * rate / 1e15)
    assert in_unit(asked(unit="TFLOP/s (total)", **values), 1.0) == pytest.approx(8 * rate / 1e12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp32", "fp32"),
        ("tf32", "tf32"),
        ("bf16 with fp32 accumulation", "bf16"),
        ("amp", "bf16"),
        ("FP4", "nvfp4"),
        ("E4M3", "fp8"),
        ("bfloat16", "bf16"),
        ("unheard-of", "bf16"),
    ],
)
def test_precisions_as_sources_write_them(text: str, expected: str) -> None:
    question = asked(precision=text, hardware="DGX-B200")
    assert question.precision == expected
    wide = 4 if expected in ("fp32", "tf32") else 2
    assert {parameter.element_bytes for parameter in question.model.component("h.0.attn").parameters} == {wide}
    assert ("is not known" in " ".join(question.assumed)) is (text == "unheard-of")


def test_a_precision_that_the_gpu_lacks_is_refused_or_replaced() -> None:
    assert "A100 has no products in fp8" in refusal(precision="fp8")
    assert "H100 has no products in nvfp4" in refusal(precision="NVFP4", hardware="DGX-H100")
    question = asked(id="sailor-x-1", precision="fp16?", hardware="V100-16GB SXM2")
    assert question.precision == "fp32"
    assert "fp32, since the GPU has no TF32" in question.assumed


@pytest.mark.parametrize(("text", "scaled"), [("fp16", True), ("float16", True), ("amp_fp16", True), ("bfloat16", False)])
def test_names_of_half_precision(text: str, scaled: bool) -> None:
    question = asked(precision=text)
    assert question.precision == "bf16"
    assert question.scaled is scaled


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Full activation checkpointing", "full"),
        ("activation checkpointing: no", "none"),
        ("off", "none"),
        ("yes", "full"),
        ("uniform", "full"),
        ("core_attn", "selective"),
        ("not stated", ""),
        ("", ""),
    ],
)
def test_recomputation_as_sources_write_it(text: str, expected: str) -> None:
    assert recompute_of(spelled_row(recompute=text), rule("megatron")) == (expected or "none", bool(expected))


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("3 (Megatron-FSDP)", 3),
        ("1-2 (FSDP; parameters not resharded after forward)", 1),
        ("FSDP2", 3),
        ("full_shard", 3),
        ("ZeRO-2", 2),
        ("distributed optimizer", 1),
        ("none", 0),
        ("", None),
        ("?", None),
    ],
)
def test_stages_of_zero_as_sources_write_them(text: str, stage: int | None) -> None:
    assert stage_of(text) == stage


@pytest.mark.parametrize(
    ("stated", "axes"),
    [
        ({"tp": "8", "pp": "", "dp": "2", "gpus": "64"}, (8, 4, 2)),
        ({"tp": "", "pp": "4", "dp": "2", "gpus": "16"}, (2, 4, 2)),
        ({"tp": "", "pp": "", "dp": "64", "gpus": "64"}, (1, 1, 64)),
        ({"tp": "", "pp": "", "dp": "2", "gpus": "64"}, (8, 4, 2)),
        ({"tp": "4", "pp": "", "dp": "", "gpus": "8"}, (4, 1, 2)),
        ({"tp": "", "pp": "2", "dp": "", "gpus": "6"}, (1, 2, 3)),
        (
            {"tp": "", "pp": "", "dp": "", "gpus": "64", "layers": "80", "hidden": "8192", "heads": "64", "zero_stage": "FSDP"},
            (1, 1, 64),
        ),
    ],
)
def test_axes_that_are_stated_stay(stated: dict[str, str], axes: tuple[int, int, int]) -> None:
    question = asked(**stated, global_batch="192")
    mesh = question.plan.mesh
    assert (mesh.tp, mesh.pp, mesh.dp) == axes


def test_gpus_that_the_stated_axes_do_not_use_take_no_part() -> None:
    """NeMo's first table of long sequences on B200 gave four times the GPUs; its second gives the product of the axes."""
    question = asked(
        **NAMED, id="nemo-longseq-x-2", model="LLAMA3-8B", hardware="DGX-B200", gpus="8", tp="1", pp="1", dp="2", cp="1"
    )
    assert (question.gpus, question.plan.world_size) == (2, 2)
    assert "2 of 8 GPUs take part" in question.assumed
    assert "is not 8 GPUs" in refusal(dp="3")


def test_a_run_without_any_number_of_gpus_takes_those_that_it_needs() -> None:
    question = asked(**NAMED, model="LLAMA3_70B", gpus="", tp="", pp="", dp="", seq="4096", global_batch="")
    assert question.gpus == 32


@pytest.mark.parametrize(("model", "split", "batch"), [("22B", (8, 1), 4), ("175B", (8, 16), 2048), ("1T", (8, 64), 2048)])
def test_runs_of_megatrons_table_of_utilisation(model: str, split: tuple[int, int], batch: int) -> None:
    """Their rows name a size and nothing else: 22B is the run of other rows, the rest go by size."""
    blank = dict.fromkeys(("gpus", "tp", "pp", "dp", "seq", "global_batch", "micro_batch"), "")
    question = asked(**NAMED, **blank, id="megatron-mfu2022-9", model=model, recompute="selective + sequence parallel")
    mesh = question.plan.mesh
    assert (mesh.tp, mesh.pp) == split
    assert (question.batch, question.gpus) == (batch, split[0] * split[1])


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("GPT3-5B", 5.0),
        ("GPT3-760M", 0.76),
        ("Nemotron-22B", 21.3),
        ("Nemotron-3 8B", 8.5),
        ("BERT 100b", 98.1),
        ("Kimi_K2", 1026),
        ("LLAMA2-7B SFT", 6.74),
        ("llama2-34b", 33.7),
        ("Qwen2.5-32B", 32.8),
        ("175B", 174.6),
        ("GPT5B", 1.22),
    ],
)
def test_models_of_the_same_sources_are_known(model: str, billions: float) -> None:
    """The last is no T5, and no name of the table: a row that states its shape."""
    stated = {"hidden": "4096", "layers": "5", "heads": "32"} if model == "GPT5B" else NAMED
    question = asked(**stated, model=model, tp="1", pp="1", dp="8")
    assert question.model.parameter_count / 1e9 == pytest.approx(billions, rel=0.01)


def test_fine_tuning_of_all_parameters_is_a_step_like_any_other() -> None:
    whole, tuned = (asked(**NAMED, model=name, tp="1", pp="1", dp="8") for name in ("LLAMA2-7B", "LLAMA2-7B SFT"))
    assert whole.model == tuned.model
    assert any("fine-tuning as pre-training" in text for text in tuned.lacks)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model": "GPT-MoE 1.3B"}, "mixture of experts"),
        ({"model": "8x3B"}, "mixture of experts"),
        ({"model": "GPT", "ep": "8"}, "mixture of experts"),
        ({"model": "flan-t5"}, "decoder-only"),
        ({"model": "Nemotron_3_Nano"}, "decoder-only"),
    ],
)
def test_models_that_are_not_expressed(values: dict[str, str], reason: str) -> None:
    assert reason in refusal(**values)


@pytest.mark.parametrize(
    ("values", "adapters"),
    [
        ({"model": "LLAMA2-7B LoRA", "notes": "LoRA rank 64, Hugging Face"}, "r = 64 on all"),
        ({"model": "LLAMA3_70B", "notes": "26.06 NeMo Container; LoRA Performance"}, "r = 32 on qkv"),
        (
            {"model": "Llama 3.1 8B QLoRA", "notes": "torchtune"},
            "r = 8 on q_proj+v_proj+output_proj+mlp, frozen linear layers in nf4",
        ),
        ({"id": "mlperf-lora-0001", "model": "Llama2-70B LoRA", "notes": "LoRA rank 16"}, "r = 16 on qkv+o"),
    ],
)
def test_rows_with_adapters_train_those(values: dict[str, str], adapters: str) -> None:
    question = asked(**NAMED, **({"id": "table-1", "tp": "1", "pp": "1"} | values))
    assert any(adapters in text for text in question.assumed)
    assert 0 < sum(each.elements for each in question.model.trainable_parameters) < 0.03 * question.model.parameter_count


def test_a_name_whose_widths_the_row_changes_keeps_its_proportions() -> None:
    question = asked(model="LLAMA3_8B", hidden="2048", heads="16", layers="4")
    shape = question.shape
    assert (shape.hidden, shape.heads, shape.kv_heads, shape.ffn) == (2048, 16, 8, 7168)
    assert any("with hidden 2048" in text for text in question.assumed)


def test_a_vocabulary_in_the_notes_is_that_of_a_named_model_too() -> None:
    assert asked(**NAMED, model="GPT 20B", notes="vocab 131,072; overlap on").shape.vocab == 131072


def test_expert_ways_that_are_not_stated_or_do_not_divide_are_told() -> None:
    values = {"model": "Qwen3_30B_a3B", "hardware": "DGX-H100", "gpus": "16", "tp": "2", "pp": "1", "dp": "8"}
    for given, ways in (("", 8), ("16", 8), ("4", 4)):
        question = asked(**NAMED, **values, ep=given)
        assert question.plan.mesh.ep == ways
        assert any(text.startswith("ep 8") for text in question.assumed) is (given != "4")


def test_asynchronous_tensor_parallelism_of_torchtitan_overlaps() -> None:
    values = {"id": "titan-atp-x-1", "model": "Llama 3.1 8B", "hardware": "H100 96GB HBM2e", "tp": "8", "pp": "1", "dp": "1"}
    plans = [asked(**NAMED, **values, notes=f"{kind}; torch.compile").plan for kind in ("vanilla TP", "async TP")]
    assert [plan.tensor_overlap for plan in plans] == [False, True]


@pytest.mark.parametrize(
    ("notes", "chunks"), [("Interleaved 1F1B", 2), ("non-interleaved 1F1B", 1), ("before the interleaved schedule", 1)]
)
def test_a_schedule_that_is_not_interleaved_has_no_chunks(notes: str, chunks: int) -> None:
    assert asked(notes=notes).plan.chunks == chunks


def test_nemo_keeps_of_master_weights_what_bf16_lacks() -> None:
    """2 of 12 bytes of optimizer state per parameter: 70B was tuned on 16 H100 without data parallelism."""
    values = {"model": "LLAMA2-70B", "hardware": "DGX-H100", "gpus": "16", "tp": "4", "pp": "4", "dp": "", "seq": "4096"}
    values |= {"global_batch": "32", "micro_batch": "1", "recompute": "", "precision": "fp8"}
    spared, whole = (answer(asked(**NAMED, **values, id=name)) for name in ("nemo2407-x-1", "megatron-x-1"))
    assert spared.step_s == whole.step_s
    assert spared.peak_bytes < spared.limit_bytes < whole.peak_bytes
    largest = 68.98e9 / 16
    assert whole.peak_bytes - spared.peak_bytes == pytest.approx(2 * largest, rel=0.02)


@pytest.mark.parametrize(("hardware", "tp"), [("A100-80GB SXM", "tp 2"), ("V100-32GB SXM (DGX-2)", "tp 8")])
def test_a_split_by_size_heeds_a_small_memory(hardware: str, tp: str) -> None:
    values = {"hardware": hardware, "precision": "fp16", "gpus": "8", "tp": "", "pp": "", "dp": "", "global_batch": "64"}
    question = asked(**values, layers="36", hidden="3072", heads="24")
    assert f"{tp}, pp 1" in question.assumed


def test_a_microbatch_that_is_not_stated_is_one_that_fits() -> None:
    values = {"id": "internevo-x-1", "model": "InternLM 7B", "seq": "2048", "global_batch": "512", "gpus": "64"}
    values |= {"micro_batch": "", "tp": "2", "pp": "1", "dp": "32", "recompute": "none", "zero_stage": "1"}
    found = predict(spelled_row(**NAMED, **values))
    assert found.fit_probability is not None
    assert found.fit_probability > 0.5
    assert "the largest that fits" in found.why
    stated = predict(spelled_row(**NAMED, **values | {"micro_batch": "16"}))
    assert stated.fit_probability is not None
    assert stated.fit_probability < 0.5


def test_stated_parameters_and_vocabulary_decide_the_shape() -> None:
    """A shape of no known name takes what the row states; nothing that is stated is reported as assumed."""
    values = {"model": "MyLlama", "layers": "32", "hidden": "4096", "heads": "32", "params": "7e9", "notes": "vocab 32000"}
    asked_shape = asked(**values, tp="1", pp="1", dp="8")
    shape = asked_shape.shape
    assert (shape.vocab, shape.gated) == (32000, True)
    assert asked_shape.model.parameter_count == pytest.approx(7e9, rel=0.02)
    assert not any("vocabulary" in text for text in asked_shape.assumed)


def test_a_model_of_known_size_alone_is_the_nearest_known_shape() -> None:
    alone = asked(**NAMED, model="ours", params="7e9", tp="1", pp="1", dp="8")
    assert alone.model.parameter_count == pytest.approx(7e9, rel=0.1)
    assert any("by the stated 7B parameters" in text for text in alone.assumed)


def test_hybrid_sharding_divides_states_over_a_node() -> None:
    values = {"hardware": "H100, 8/node, 8x 400Gb/s", "gpus": "16", "tp": "1", "pp": "1", "dp": "16", "global_batch": "32"}
    hybrid, whole = (asked(**values, zero_stage=zero).plan.mesh.dp_shard for zero in ("hybrid shard", "full shard"))
    assert (hybrid, whole) == (8, 0)


def test_eight_bit_states_and_updates_in_the_backward_are_held_as_stated() -> None:
    values = {"model": "Llama 3.1 8B", "hardware": "RTX A6000", "gpus": "1", "tp": "1", "pp": "1", "dp": "1", "seq": "2048"}
    values |= {"global_batch": "2", "micro_batch": "2", "recompute": "full", "precision": "bf16"}
    notes = ("pure bf16", "pure bf16, 8-bit optimizer", "pure bf16, 8-bit optimizer and optimizer step in backward")
    peaks = [answer(asked(**NAMED, **values, id="torchtune-x-1", notes=text)).peak_bytes for text in notes]
    assert peaks[0] - peaks[1] == pytest.approx(2 * 8.03e9, rel=0.02)
    assert peaks[1] - peaks[2] == pytest.approx(2 * 8.03e9, rel=0.02)


def test_selective_recomputation_frees_the_scores_of_a_layer_that_nothing_divides() -> None:
    """Unfused attention keeps heads * seq^2 scores a sample; selective recomputation makes them again, with tp or without."""
    kept, freed = (
        question(id="nemo-launcher-1", tp="1", pp="1", dp="8", gpus="8", recompute=text) for text in ("none", "selective")
    )
    assert kept.plan.recompute == "none"
    assert set(freed.plan.recompute) == {f"selective:h.{layer}" for layer in range(4)}
    assert answer(freed).peak_bytes < answer(kept).peak_bytes
    assert answer(freed).step_s > answer(kept).step_s


def test_nemo_of_2023_does_not_overlap_tensor_parallelism() -> None:
    assert question(id="nemo-1", pp="1", dp="4").plan.tensor_overlap
    assert not question(id="nemo-launcher-1", pp="1", dp="4").plan.tensor_overlap
