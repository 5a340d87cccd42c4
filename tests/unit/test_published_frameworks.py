"""Published runs of frameworks and of convolutional networks: what rows leave out, and what answers learn of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.published.answer import _problem, answer
from experiments.published.fitting import PRIORS, SOURCE_SIGMA, Judged, covered, ends_of, fitted, held_out, interval_ends
from experiments.published.predict import Facts, Predicted, predict
from experiments.published.question import question_of
from experiments.published.quoted import beyond_peak, contradiction, in_unit
from experiments.published.rows import row_of
from parsim.app.load import fixed_plan, problem_of
from parsim.app.question import question_of as asked_question
from parsim.costs.published import NOISE, NOTHING_LEARNT, SHARE, Effects, PublishedRun, class_of, features_of, learnt_of
from parsim.hardware.parts import load_gpu, shipped_gpus
from parsim.model.catalogue.frameworks import FRAMEWORKS, plausible_frameworks
from parsim.model.catalogue.names import NAMED
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.predict.evaluate import evaluate
from parsim.predict.explain import explain_plan
from tests.published_row import row_with
from tests.quick import some_quick

OWN = {"hidden": "1536", "heads": "24", "tp": "8", "pp": "1", "dp": "1", "precision": "fp16"}


def asked(without: str = "", **values: str) -> Any:
    return question_of(row_of(dict(row_with(**OWN | values))), without=without)


def scores_arrays(question: Any) -> float:
    """Of 2 bytes that a score is moved in, between the two products of attention; dropout left out."""
    scores = question.shape.heads * question.seq**2
    moved = [
        operator.activation_bytes / 4 / scores
        for operator in question.model.component("h.0.attn").operators
        if operator.kind == "memory_bound" and dict(operator.shape)["elements"] == scores
    ]
    return sum(moved) - 2.5


@pytest.mark.parametrize(
    ("name", "micro", "seq", "piece", "arrays"),
    [
        ("megatron-sc21-1", "2", "1024", "", 16.4),  # three heads of two samples
        ("megatron-sc21-1", "2", "1024", "limits of the fused softmax", 2.0),
        ("megatron-sc21-1", "4", "1024", "", 2.0),
        ("megatron-sc21-1", "4", "4096", "", 16.4),
        ("nemo-launcher-1", "2", "1024", "", 2.0),
    ],
)
def test_heads_that_the_fused_softmax_does_not_take_are_masked_and_normalised_in_fp32(
    name: str, micro: str, seq: str, piece: str, arrays: float
) -> None:
    question = asked(piece, id=name, micro_batch=micro, seq=seq, heads="24", recompute="none")
    assert scores_arrays(question) == pytest.approx(arrays, rel=1e-6)
    assert any("fused softmax" in text for text in question.lacks) is (arrays > 2)


@pytest.mark.parametrize(("precision", "piece", "expected"), [("fp16", "", "fp16"), ("bf16", "", "bf16"), ("", "", "bf16")])
def test_rows_in_fp16_scale_their_loss_and_share_the_factor_of_bf16(precision: str, piece: str, expected: str) -> None:
    question = asked(piece, precision=precision)
    assert question.precision == "bf16"
    assert _problem(question).numerics.precision == expected


def test_a_scaled_loss_and_clipping_take_time_and_can_be_left_out() -> None:
    whole, unscaled, unclipped = (answer(asked(piece)).step_s for piece in ("", "loss scaling", "clipping"))
    assert unscaled < whole
    assert unclipped < whole
    assert asked().plan.clip_gradients
    assert not asked("clipping").plan.clip_gradients


def test_flop_of_selective_recomputation_are_those_of_its_authors() -> None:
    """Korthikanti et al. (2022): 72 B L s h^2 (1 + s / 3h + V / 12 L h); without recomputation s / 6h."""
    batch, seq, layers, hidden, vocab = 16, 1024, 4, 1536, 51200
    for unit, divisor in (("percent MFU", 6), ("percent HFU", 3)):
        flop = 72 * batch * layers * seq * hidden**2 * (1 + seq / (divisor * hidden) + vocab / (12 * layers * hidden))
        question = asked(unit=unit, recompute="selective", id="megatron-mfu2022-1")
        assert in_unit(question, 2.0) == pytest.approx(100 * flop / 2 / 8 / 312e12, rel=1e-9)


LOOPS: tuple[tuple[str, str, int, dict[str, Any], str], ...] = (
    ("llama3-8b", "h100-sxm", 8, {"zero": 3}, "fsdp"),
    ("llama3-8b", "h100-sxm", 8, {"zero": 3, "selective": True}, "torchtitan"),
    ("llama3-8b", "h100-sxm", 8, {"zero": 3, "low": True}, "torchtitan"),
    ("llama3-8b", "h100-sxm", 8, {"low": True}, "megatron"),
    ("llama3-8b", "h100-sxm", 8, {}, "fsdp"),
    ("llama3-8b", "h100-sxm", 8, {"zero": 1}, "megatron"),
    ("llama3-8b", "h100-sxm", 8, {"zero": 2}, "deepspeed"),
    ("llama3-8b", "a100-sxm-80gb", 1, {}, "hf-trainer"),
    ("llama3-70b", "h100-sxm", 64, {"divided": "tp 2"}, "megatron"),
    ("llama3-70b", "b200", 64, {"divided": "tp 2"}, "megatron-bridge"),
    ("mixtral-8x7b", "h100-sxm", 64, {}, "megatron-bridge"),
    ("gpt3-1.3b", "h100-sxm", 8, {"zero": 0}, "ddp"),
    ("gpt3-1.3b", "a100-sxm-80gb", 8, {"zero": 0}, "ddp"),
    ("gpt3-1.3b", "a100-sxm-80gb", 64, {"zero": 0}, "megatron 2021"),
    ("gpt3-1.3b", "a100-sxm-80gb", 8, {"zero": 1}, "ddp"),
    ("gpt3-175b", "a100-sxm-80gb", 512, {"divided": "tp 2"}, "megatron 2021"),
    ("gpt3-175b", "a100-sxm-80gb", 512, {"divided": "tp 2", "keys": 8192}, "megatron"),
    ("gpt3-175b", "h100-sxm", 512, {"divided": "tp 2"}, "megatron"),
    ("bert-large", "v100-sxm-32gb", 8, {}, "deeplearningexamples"),
    ("bert-4b", "v100-sxm-32gb", 8, {}, "fsdp"),
    ("bert-4b", "h100-sxm", 8, {"zero": 1, "low": True}, "mlperf"),
)


@pytest.mark.parametrize(("model", "gpu", "devices", "given", "expected"), LOOPS)
def test_what_is_known_of_a_loop_says_who_wrote_it(
    model: str, gpu: str, devices: int, given: dict[str, Any], expected: str
) -> None:
    shape = NAMED[model].shape
    assert shape is not None
    known = {"divided": "", "zero": None} | given
    memory_bytes = load_gpu(gpu).memory_bytes.value
    found = plausible_frameworks(shape, gpu, devices=devices, memory_bytes=memory_bytes, **known).frameworks
    assert f"{found[0].name} {found[0].until or ''}".strip() == expected
    assert len({(row.name, row.until) for row in found}) == len(found)


BESIDE_THE_TABLES = (
    ("llm.c", "A100-SXM4-80GB", "GPT-2 774M", "512", {"micro_batch": "32"}, "ms/iteration", 1700, 0.06),
    ("llm.c", "H100-SXM5-80GB", "GPT-2 1558M", "1024", {"micro_batch": "16"}, "s/iteration", 2.8, 0.1),
    ("lit-gpt, fused kernels", "A100-40GB", "TinyLlama 1.1B", "1024", {"zero_stage": "3"}, "tokens/s/GPU", 24000, 0.1),
    (
        "NeMo SFT",
        "H100-SXM5-80GB",
        "Llama 3 8B",
        "32",
        {"micro_batch": "1", "pp": "1", "seq": "4096"},
        "s/iteration",
        1.32,
        0.05,
    ),
    ("Paxml", "H100-SXM5-80GB", "GPT3-5B", "64", {"zero_stage": "3", "micro_batch": "4"}, "s/iteration", 0.634, 0.05),
    ("MaxText", "H100-SXM5-80GB", "Llama 2 70B", "512", {"zero_stage": "3", "micro_batch": "2"}, "s/iteration", 7.153, 0.16),
    ("FSDP", "A100-SXM4-80GB", "Llama 2 13B", "256", {"zero_stage": "3", "recompute": "selective"}, "tokens/s/GPU", 1800, 0.15),
    ("DualPipe", "H800-SXM5-80GB", "DeepSeek-V3", "15360", {"pp": "16", "ep": "64"}, "tokens/s/GPU", 1543, 0.12),
)


@pytest.mark.parametrize(("software", "gpu", "model", "batch", "split", "unit", "measured", "within"), BESIDE_THE_TABLES)
def test_runs_of_no_table_are_near_where_their_software_is_known(
    software: str, gpu: str, model: str, batch: str, split: dict[str, str], unit: str, measured: float, within: float
) -> None:
    """karpathy/llm.c scripts/run_gpt2_*.sh, NVIDIA/dgxc-benchmarking, PyTorch's page on Llama 2 by FSDP, and
    DeepSeek-V3's report."""
    many = {"DeepSeek-V3": "2048", "Llama 2 13B": "128", "Llama 2 70B": "256", "GPT3-5B": "16", "TinyLlama 1.1B": "16"}
    seq = {"llm.c": "1024", "DualPipe": "4096", "FSDP": "4096", "MaxText": "4096"}.get(software, "2048")
    gpus = many.get(model, "8")
    values = {"id": "nobody-2", "hardware": gpu, "model": model, "gpus": gpus, "global_batch": batch, "seq": seq}
    precision = "fp8" if model == "DeepSeek-V3" else "bf16"
    found = predict(
        row_of(values | {"unit": unit, "precision": precision, "notes": software, "tp": "1", "zero_stage": "1"} | split)
    )
    assert found.value == pytest.approx(measured, rel=within), found.why
    assert (found.p05 or 0) <= measured <= (found.p95 or 0)


NAMELESS = {"id": "nobody-1", "source": "somebody/else:README.md", "hardware": "H100-SXM5-80GB", "model": "Llama 3.1 8B"}
LLAMA = dict.fromkeys(("layers", "hidden", "heads", "tp", "pp", "dp"), "") | {"seq": "8192", "unit": "tokens/s/GPU"}


def test_an_unknown_framework_does_not_fit_only_if_no_plausible_one_does() -> None:
    """A run of llm-foundry's tables: torch's own loss would need 43 of 40 GiB, and Composer's keeps less of it."""
    values = NAMELESS | LLAMA | {"hardware": "A100-40GB", "model": "MPT-1b", "seq": "2048", "zero_stage": "3"}
    row = row_with(**values | {"gpus": "32", "global_batch": "320", "micro_batch": "10", "recompute": "none"})
    found = predict(row_of(row))
    assert found.fit_probability is not None
    assert found.fit_probability > 0.5
    assert found.why.startswith("unknown, as fsdp")
    assert "memory as composer holds it" in found.why
    too_large = predict(row_of(row | {"global_batch": "640", "micro_batch": "20"}))
    assert too_large.fit_probability is not None
    assert too_large.fit_probability < 0.5


def test_a_known_framework_divides_states_that_would_not_fit() -> None:
    """GLM-130B, 768 A100 of 40 GB by Megatron-DeepSpeed: 4e9 parameters per GPU. The table does not say ZeRO, the run had 1."""
    values = NAMELESS | LLAMA | {"hardware": "A100-40GB", "notes": "Megatron-DeepSpeed", "recompute": "full", "gpus": "768"}
    split = {"tp": "4", "pp": "8", "dp": "24", "layers": "70", "hidden": "12288", "heads": "96", "global_batch": "4224"}
    row = row_with(**values | split | {"model": "GLM-130B", "seq": "2048", "precision": "fp16"})
    found, whole = predict(row_of(row)), predict(row_of(row | {"zero_stage": "0"}))
    assert found.fit_probability is not None
    assert found.fit_probability > 0.5
    assert "memory as megatron-deepspeed holds it with ZeRO 1" in found.why
    assert whole.fit_probability is not None
    assert whole.fit_probability < 0.5


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "expected"),
    [
        ("Llama 3.1 8B", "8", "64", "unknown, as fsdp: custom pp=1 dp=8 tp=1"),
        ("Llama 3.1 8B", "64", "16", "unknown, as megatron: custom pp=1 dp=16 tp=4"),  # fewer samples than GPUs
        ("Llama 3.1 70B", "64", "128", "unknown, as megatron: custom pp=4 dp=2 tp=8"),
        ("BERT 4B", "8", "64", "unknown, as fsdp: custom pp=1 dp=8 tp=1"),
    ],
)
def test_who_states_no_split_divides_states_alone_while_a_node_holds_them(
    model: str, gpus: str, batch: str, expected: str
) -> None:
    blank = LLAMA | NAMELESS | {"recompute": "", "micro_batch": "", "seq": "512"}
    assert predict(row_of(row_with(**blank | {"model": model, "gpus": gpus, "global_batch": batch}))).why.startswith(expected)


def test_who_trains_adapters_in_8_bits_adapts_attention_alone() -> None:
    values = LLAMA | NAMELESS | {"model": "Llama2-70B LoRA", "gpus": "8", "global_batch": "8", "micro_batch": ""}
    low, half = (question_of(row_of(row_with(**values | {"precision": text}))) for text in ("fp8", "bf16"))
    assert "adapters: lora with r = 16 on qkv+o" in low.assumed
    assert "on all linear layers" in ", ".join(half.assumed)
    assert (low.plan.mesh.tp, half.plan.mesh.tp) == (4, 1)


def test_deepspeed_holds_gradients_in_16_and_in_32_bits() -> None:
    """Of a parameter 6 bytes in bf16, and 2 in fp16."""
    rows = [asked(id="bloom-tune-1", precision=precision) for precision in ("bf16", "fp16")]
    weights = dict(_problem(rows[0]).memory(rows[0].plan)[0].lines)["parameters"]
    assert answer(rows[0]).peak_bytes - answer(rows[1]).peak_bytes == pytest.approx(2 * weights, rel=0.01)


@pytest.mark.parametrize(("notes", "expected"), [("NeMo; MLPerf v5.0, NVIDIA", "fp8"), ("NeMo 25.02", "")])
def test_weights_of_mlperf_are_in_8_bits_alone(notes: str, expected: str) -> None:
    sizes = dict.fromkeys(("layers", "hidden", "heads", "seq"), "")
    row = {
        "id": "nemo-x-1",
        "model": "LLAMA3.1_405B",
        "hardware": "GB200",
        "gpus": "64",
        "tp": "4",
        "pp": "8",
        "precision": "fp8",
    }
    assert asked(**row | sizes | {"notes": notes, "recompute": "none", "micro_batch": "1"}).kept.weight_dtype == expected


def test_a_named_framework_is_not_guessed() -> None:
    found = predict(row_of(row_with(id="nobody-1", notes="Megatron-LM")))
    assert found.why.startswith("megatron: ")
    assert "framework" not in found.why.split(";")[1]


def test_experts_reach_their_ranks_as_their_framework_sends_them() -> None:
    values = {"hardware": "GB200", "model": "Qwen3_30B_a3B", "tp": "1", "pp": "1", "dp": "8", "ep": "8", "precision": "bf16"}
    blank = dict.fromkeys(("layers", "hidden", "heads"), "")
    bridge, megatron = (
        _problem(question_of(row_of(row_with(**(blank | values | {"id": name}))))) for name in ("nemo-bridge-1", "megatron-1")
    )
    assert (bridge.routing.dispatcher, megatron.routing.dispatcher) == ("hybridep", "all_to_all")


def test_nemo_counted_attention_in_full() -> None:
    """Its table of 24.07 states both for Llama 3 8B on 8 H100: 12,273 tokens/s and 711 TFLOP/s per GPU."""
    values = LLAMA | {"id": "nemo2407-1", "hardware": "H100-SXM5-80GB", "model": "LLAMA3-8B", "global_batch": "128"}
    tokens, flop = (
        question_of(row_of(row_with(**values | {"unit": unit, "tp": "1", "pp": "1", "recompute": "", "micro_batch": "1"})))
        for unit in ("tokens/s/GPU", "TFLOP/s/GPU (model)")
    )
    assert in_unit(flop, 1.0) / in_unit(tokens, 1.0) == pytest.approx(711 / 12273, rel=0.01)


def test_speeds_and_parameters_that_contradict_each_other_are_both_told() -> None:
    values = LLAMA | NAMELESS | {"tp": "1", "pp": "1", "zero_stage": "3", "global_batch": "8", "micro_batch": "1"}

    def told(notes: str, value: str, **more: str) -> str:
        return contradiction(question_of(row_of(row_with(**values | {"notes": notes, "value": value} | more))))

    assert told("model TFLOP/s/GPU 400", "7500") == ""  # 54 GFLOP per token, 61 with all of attention: 407 or 459
    text = told("model TFLOP/s/GPU 800", "7500")
    assert "800 TFLOP/s" in text
    assert "7500 tokens/s/GPU" in text
    assert "are taken" in text
    assert told("H100 with a peak of 989 TFLOP/s, 0.4 MFU", "7500") == ""
    assert told("", "7500") == ""
    stated = question_of(row_of(row_with(**values | {"params": "13e9"}))).assumed
    assert any("8.03B parameters where 13B are stated" in text for text in stated)


def test_a_container_tells_the_version_of_the_bridge() -> None:
    """Until 26.04 its recipes of B200 launched experts one by one, and those of Grace hosts in graphs."""
    values = dict.fromkeys(("layers", "hidden", "heads"), "") | {"id": "nemo-bridge-1", "model": "Qwen3_30B_a3B"}
    split = {"tp": "1", "pp": "1", "dp": "8", "ep": "8", "precision": "MXFP8", "micro_batch": "1", "recompute": "none"}

    def step_s(hardware: str, container: str) -> float:
        notes = f"{container} NeMo Container; Pre-Training Performance"
        question = question_of(row_of(row_with(**values | split | {"hardware": hardware, "notes": notes})))
        assert question.framework.until == (2026 if container.startswith("26.04") else 0)
        return answer(question).step_s

    assert step_s("DGX-B200", "26.04.01") > 1.5 * step_s("DGX-B200", "26.06")
    assert step_s("DGX-GB200", "26.04.01") == step_s("DGX-GB200", "26.06")


def test_a_value_that_no_gpu_reaches_is_told() -> None:
    """torchtune's README: 8B on an A6000, every layer run again, would need 160 of 154.8 TFLOP/s."""
    values = LLAMA | NAMELESS | {"hardware": "RTX A6000", "gpus": "1", "tp": "1", "pp": "1", "dp": "1", "unit": "tokens/s"}

    def told(value: str, **more: str) -> str:
        sizes = {"seq": "2048", "global_batch": "2", "micro_batch": "2", "recompute": "full", "value": value}
        return beyond_peak(question_of(row_of(row_with(**values | sizes | more))))

    assert "more than a GPU reaches whose peak is 155" in told("2579")
    assert told("2579", recompute="none") == ""
    assert told("2579", model="Llama 3.1 8B LoRA") == ""
    assert told("4699", model="Llama 3.1 8B LoRA", recompute="none")
    assert told("1800") == ""


def test_a_measured_peak_tells_a_precision_that_nothing_else_does() -> None:
    """A run of Sailor's: arrays in 32 bits hold what it held, and in 16 bits half of it."""
    values = {
        "hardware": "GH-96 (4 per node)",
        "gpus": "4",
        "model": "OPT-350M",
        "tp": "4",
        "pp": "1",
        "dp": "1",
        "seq": "2048",
    }
    sizes = {"layers": "24", "hidden": "1024", "heads": "16", "global_batch": "8", "micro_batch": "8", "recompute": ""}

    def asked_of(precision: str, memory: float) -> str:
        notes = f"max memory {memory:.0f} B"
        row = row_of(row_with(**NAMELESS | values | sizes | {"precision": precision, "notes": notes}))
        return predict(row, known=False).why.split(";")[0]

    halves = predict(row_of(row_with(**NAMELESS | values | sizes | {"precision": "fp16?"})), known=False).answer
    assert halves is not None
    assert asked_of("fp16?", halves.peak_bytes).endswith("bf16")
    assert asked_of("fp16?", 2 * halves.peak_bytes).endswith("tf32")
    assert asked_of("fp16", 2 * halves.peak_bytes).endswith("bf16")


def test_casts_to_8_bits_that_the_kernels_before_make_take_no_time() -> None:
    """MLPerf v3.0, BERT-large on 4 H100: 4,174 sequences/s; with casts apart it would be 14% fewer."""
    values = {
        "id": "mlperf-bert-1",
        "hardware": "H100-SXM5-80GB, 8/node",
        "gpus": "4",
        "model": "BERT-large",
        "precision": "fp8",
    }
    split = dict.fromkeys(("tp", "pp"), "1") | {"dp": "4", "seq": "256", "micro_batch": "192", "global_batch": "768"}
    shape = {"layers": "24", "hidden": "1024", "heads": "16", "recompute": "none", "unit": "samples/s"}
    fused, apart = (
        answer(question_of(row_of(row_with(**values | split | shape)), without=piece)).step_s
        for piece in ("", "casts in the kernels before")
    )
    assert 768 / fused == pytest.approx(4174, rel=0.05)
    assert apart > 1.1 * fused


# Rows of convolutional networks: what is read of them, what is assumed, and what is refused for which reason.

IMAGES = {
    "id": "x-0001",
    "hardware": "A100-SXM4-80GB, 8/node",
    "gpus": "8",
    "model": "ResNet-50",
    "global_batch": "2048",
    "micro_batch": "256",
    "precision": "fp16 amp",
    "unit": "images/s",
}


def predicted(**values: str) -> tuple[float | None, str]:
    found = predict(row_of({**IMAGES, **values}), raw=True)
    return found.value, found.why


def test_the_framework_is_part_of_the_question() -> None:
    """MXNet fuses norms, PyTorch does not; arrays in the order of matrix units need no conversion."""
    plain = predicted(notes="PyTorch")[0]
    unnamed, why = predicted()
    assert plain is not None
    assert unnamed is not None
    assert "channels last under AMP alone" in why
    last = predicted(notes="PyTorch, channels_last")[0]
    fused = predicted(notes="MXNet, NHWC, fused batch norm; MLPerf v3.0", id="mlperf-resnet-1")[0]
    assert last is not None
    assert fused is not None
    assert plain < unnamed <= last < fused


@pytest.mark.parametrize(
    ("values", "published", "within"),
    [
        ({"id": "dle-1", "hardware": "A100-SXM4-80GB", "gpus": "1", "global_batch": "256", "precision": "tf32"}, 938, 0.08),
        ({"id": "dle-1", "hardware": "V100-SXM2-16GB, DGX-1"}, 8322, 0.08),
        ({"id": "mlperf-1", "notes": "MXNet", "global_batch": "3264", "micro_batch": "408"}, 27188.7, 0.08),
    ],
)
def test_published_resnets(values: dict[str, str], published: float, within: float) -> None:
    """NVIDIA/DeepLearningExamples (PyTorch: TF32 in NCHW, AMP in NHWC) and MLPerf v2.1 (MXNet)."""
    value, _ = predicted(**({"notes": "DLE PyTorch, NHWC"} | values))
    assert value == pytest.approx(published, rel=within)


@pytest.mark.parametrize(
    ("model", "parameters", "multiply_adds"),
    some_quick(
        [("resnext50_32x4d", 25.03e6, 4.23e9), ("resnext101_32x4d", 44.18e6, 7.99e9)], ("resnext50_32x4d", 25.03e6, 4.23e9)
    ),
)
def test_networks_beside_the_zoo_are_the_published_ones(model: str, parameters: float, multiply_adds: float) -> None:
    """Xie et al. 2017, table 1: 25.0 M parameters and 4.2 G multiply-adds of ResNeXt-50; torchvision has both."""
    pytest.importorskip("torch")
    loaded = load_model(ModelSpec(name=f"experiments.published.networks:{model}", input_shape=(3, 224, 224)))
    products = [each for part in loaded.components for each in part.operators if each.kind != "memory_bound"]
    assert sum(parameter.elements for parameter in loaded.parameters) == pytest.approx(parameters, rel=1e-3)
    assert sum(each.count * each.forward_flop for each in products) / 2 == pytest.approx(multiply_adds, rel=0.01)


@pytest.mark.slow
def test_a_detector_is_answered_and_says_what_is_left_out() -> None:
    """MLPerf v3.1: 710 images/s on four H100 (Mask R-CNN)."""
    row = {"model": "Mask R-CNN", "hardware": "H100-SXM5-80GB, 4/node", "gpus": "4", "global_batch": "48", "micro_batch": ""}
    found = predict(row_of({**IMAGES, **row, "notes": "MLPerf v3.1"}), raw=True)
    assert found.value == pytest.approx(710, rel=0.15)
    assert "RoIAlign" in found.why
    assert "as in NVIDIA's implementations" in found.why


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("Stable Diffusion v2", "a diffusion"),
        ("EfficientNet-B4", "a network of images"),
        ("DLRM", "a recommender"),
        ("RNN-T", "a recurrent"),
        ("Whisper large", "an encoder with a decoder"),
        ("Thinker 2000", "need not be a transformer"),
    ],
)
def test_a_model_of_another_kind_is_no_gpt_of_its_parameters(model: str, kind: str) -> None:
    """Their parameters are stated, and no shape is: a dense GPT of as many would be an answer to another question."""
    value, why = predicted(model=model, params="865e6", unit="samples/s")
    assert value is None
    assert kind in why


def test_a_host_that_decodes_binds_the_gpus() -> None:
    """40 cores of a DGX-1 feed eight V100s no faster than 8,200 images/s, and one V100 as fast as it takes them."""
    row = {"hardware": "V100-SXM2-16GB, DGX-1", "notes": "DLE PyTorch", "id": "dle-1"}
    eight, why = predicted(**row)
    one, alone = predicted(**row, gpus="1", global_batch="256")
    assert eight == pytest.approx(8200)
    assert "decodes 8200 images/s" in why
    assert "decodes" not in alone
    assert one is not None
    assert 8 * one > 8200


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"global_batch": "", "micro_batch": ""}, "states no batch"),
        ({"precision": "fp8"}, "no library has convolutions in 8 bits"),
        ({"tp": "2"}, "only data parallelism"),
        ({"unit": "TFLOP/s/GPU"}, "counts the FLOP of a transformer"),
        ({"micro_batch": "100"}, "does not divide"),
        ({"hardware": "TPU v4"}, "no single kind of GPU"),
    ],
)
def test_refusals_say_why(values: dict[str, str], reason: str) -> None:
    value, why = predicted(**values)
    assert value is None
    assert reason in why


# Effects of published runs: what they are estimated as, what an unseen source may err by, and how answers apply them.


def judged(name: str, source: str, ratio: float, run: PublishedRun) -> Judged:
    """A run that took `ratio` times what was predicted."""
    facts = Facts(model="gpt", gpus=8, tokens=1024, rate=False, run=run)
    predicted = Predicted(row=row_of(row_with(id=name)), why="", facts=facts, value=1.0)
    return Judged(predicted=predicted, log_error=-math.log(ratio), group="", source=source)


UNNAMED = PublishedRun(gpu="h100-sxm", precision="bf16")
HOPPER = replace(UNNAMED, framework="fsdp")


@pytest.mark.parametrize("rows", [1, 4, 50])
def test_one_source_shows_as_much_of_its_chip_as_its_rows_can(rows: int) -> None:
    """The best linear unbiased prediction of one of three effects: t^2 / (t^2 + 2 f^2 + s^2 + e^2 / n) of a mean of n rows."""
    seen = [judged(str(number), "a", 1.1, HOPPER) for number in range(rows)]
    effects = fitted([*seen, *(_far(number) for number in range(3))], [judged("guessed", "a", 1.1, UNNAMED)])
    chip, source, noise = PRIORS["chip"] ** 2, SOURCE_SIGMA**2, NOISE[class_of(HOPPER)] ** 2
    total = chip + 2 * PRIORS["framework"] ** 2 + source + noise / rows
    assert effects.mean["chip:Hopper"] == pytest.approx(math.log(1.1) * chip / total, rel=1e-9)


def _far(number: int) -> Judged:
    return judged(f"v{number}", f"other {number}", 1.0, replace(HOPPER, gpu="v100-sxm-32gb", framework="megatron"))


def test_boards_of_one_chip_share_what_was_learnt() -> None:
    rows = [judged(f"{source}{number}", source, 1.2, HOPPER) for source in "abcde" for number in range(5)]
    effects = fitted(rows, [judged("guessed", "a", 1.2, UNNAMED)])
    h200, b200 = (effects.of(replace(HOPPER, gpu=gpu)) for gpu in ("h200", "b200"))
    assert h200 == effects.of(HOPPER)
    assert h200[0] > 0.05
    assert 0.0 < b200[0] < h200[0]  # the framework's share of what they err by
    assert b200[1] > h200[1]


def test_recipes_of_the_maker_say_less_of_a_chip_than_other_software() -> None:
    """Recipes as fast as predicted beside others 1.2 times as slow: the difference is theirs, and not the chip's."""
    slow = [judged(f"{source}{number}", source, 1.2, HOPPER) for source in "abcde" for number in range(5)]
    tuned = replace(HOPPER, framework="nemo")
    rows = [*slow, *(judged(f"{source}{number}", source, 1.0, tuned) for source in "uvwxy" for number in range(5))]
    effects = fitted(rows, [judged("guessed", "a", 1.2, UNNAMED)])
    assert effects.of(HOPPER)[0] > 0.75 * math.log(1.2)
    assert abs(effects.of(tuned)[0]) < 0.25 * math.log(1.2)
    bridge = effects.of(replace(HOPPER, framework="megatron-bridge"))[0]
    assert bridge < effects.of(replace(HOPPER, framework="maxtext"))[0] - 0.05
    assert not any(name.startswith("recipes") for name in features_of(replace(tuned, until=2023)))


def test_a_source_is_judged_by_the_others() -> None:
    rows = [judged(f"{source}{number}", source, 1.2, HOPPER) for source in "abc" for number in range(8)]
    odd = [judged(f"odd{number}", "odd", 0.8, HOPPER) for number in range(8)]
    medians = held_out([*rows, *odd])
    assert all(medians[f"odd{number}"][0] > 0 for number in range(8))
    inside = covered([*rows, *odd], medians)
    assert not any(inside[f"odd{number}"][0] for number in range(8))


def test_a_guessed_framework_is_judged_by_what_known_ones_have_shown_elsewhere() -> None:
    rows = [judged(f"{source}{number}", source, 1.2, HOPPER) for source in "abc" for number in range(8)]
    guessed = [judged(f"a{number}", "a", 1.5, UNNAMED) for number in range(8)]
    medians = held_out(rows, guessed)
    assert medians.keys() == {f"a{number}" for number in range(8)}
    known = held_out(rows)
    assert 0.0 < medians["a0"][0] < known["a0"][0]  # nothing of a framework, nor of guessing: no other source was guessed
    assert medians["a0"][1] > known["a0"][1]
    effects = fitted(rows, guessed)
    fewer = fitted(rows, guessed[:1])
    for name in ("chip:Hopper", "framework:fsdp", "framework:fsdp now"):  # guesses show nothing of these
        assert effects.mean[name] == fewer.mean[name]
    assert effects.mean["guess:16 bits or more"] > fewer.mean["guess:16 bits or more"] > 0.0
    assert "guess:8 bits" not in effects.mean
    assert effects.ends[class_of(UNNAMED)] != effects.ends[class_of(HOPPER)]


@given(scores=st.lists(st.floats(-5, 5), min_size=1, max_size=60))
def test_ends_hold_their_share_of_the_rows(scores: list[float]) -> None:
    low, high = ends_of(np.array(scores), np.ones(len(scores)), SHARE)
    assert low < 0 < high
    assert sum(low <= score <= high for score in scores) >= SHARE * len(scores) - 1e-9


def test_a_class_leans_on_others_the_less_the_more_sources_show_it() -> None:
    """The interval of a class that is a hundred times as exact as others narrows with the number of its sources."""
    noisy = [
        judged(f"w{number}", f"w{number % 8}", math.exp(0.4 * (number % 5 - 2)), replace(HOPPER, experts=True))
        for number in range(80)
    ]
    widths = []
    for sources in (1, 4, 80):
        exact = [
            judged(f"n{number}", f"n{number % sources}", math.exp(0.004 * (number % 5 - 2)), HOPPER) for number in range(80)
        ]
        medians = dict.fromkeys((row.predicted.row.id for row in [*noisy, *exact]), (0.0, 0.1))
        low, high = interval_ends([*noisy, *exact], medians)[class_of(HOPPER)]
        widths.append(high - low)
    assert widths[0] >= widths[1] > widths[2]
    assert widths[2] < 1.0


def test_effects_are_read_as_they_were_written() -> None:
    effects = fitted(
        *([judged(f"{number}", f"{number % 3}", 1.1 + 0.01 * number, run) for number in range(9)] for run in (HOPPER, UNNAMED))
    )
    again = Effects.from_dict(effects.to_dict())
    assert again.of(HOPPER) == pytest.approx(effects.of(HOPPER), abs=3e-4)
    assert again.ends.keys() == NOISE.keys()


@pytest.mark.parametrize("gpu", shipped_gpus())
def test_every_shipped_gpu_has_an_interval_for_every_framework(gpu: str) -> None:
    for framework in (*FRAMEWORKS, "unknown"):
        learnt = learnt_of(PublishedRun(gpu=gpu, precision="bf16", framework=framework))
        assert 0.7 < learnt.factor < 1.5
        assert learnt.low < 1 < learnt.high
        assert learnt.text


def test_what_no_run_has_shown_widens_the_interval() -> None:
    seen, unseen, unknown = (
        learnt_of(replace(HOPPER, framework=framework)) for framework in ("megatron", "maxtext", "unknown")
    )
    assert 1.25 * math.log(seen.high / seen.low) < math.log(unseen.high / unseen.low) < math.log(unknown.high / unknown.low)
    thousands = learnt_of(replace(HOPPER, framework="megatron", gpus=4096))
    assert seen == learnt_of(replace(HOPPER, framework="megatron", gpus=512))
    assert thousands.factor == seen.factor
    assert thousands.high / thousands.low > seen.high / seen.low
    mixture = replace(HOPPER, framework="megatron", experts=True)
    assert "kind:experts on Hopper" in features_of(mixture)
    assert class_of(mixture) == "experts"
    assert learnt_of(mixture).high > seen.high


SETTINGS = {"plan.strategy": "custom", "plan.mesh": {"dp": 8}, "plan.microbatches": 1, "plan.zero_stage": 1}


def asked_with_effects(**settings: Any) -> Any:
    question = asked_question("gpt3-125m", cluster="8xh100-sxm", global_batch=64, settings={**SETTINGS, **settings})
    problem = problem_of(question)
    plan = fixed_plan(problem, question)
    assert plan is not None
    return problem, plan


@pytest.mark.parametrize("framework", [{}, {"software.framework": "megatron"}])
def test_an_answer_applies_the_factor_to_every_price_and_shows_it(framework: dict[str, Any]) -> None:
    problem, plan = asked_with_effects(**framework)
    learnt = problem.learnt
    assert learnt.factor != 1.0
    with_it, without = evaluate(problem, plan), evaluate(replace(problem, learnt=replace(learnt, factor=1.0)), plan)
    assert with_it.result.step_s.median == pytest.approx(learnt.factor * without.result.step_s.median, rel=1e-6)
    step = with_it.result.step_s
    assert (step.p05, step.p95) == pytest.approx((step.median * learnt.low, step.median * learnt.high))
    shown = [term for task in explain_plan(problem, with_it).tasks for term in task.terms if term.name == "published runs"]
    assert shown
    assert all(term.value == learnt.factor and "published runs" in term.detail for term in shown)


def test_measured_profiles_and_other_models_learn_nothing() -> None:
    measured = asked_question("gpt3-125m", cluster="dgx1-v100-32gb", global_batch=64)
    images = asked_question("resnet50", cluster="8xh100-sxm", global_batch=64)
    assert problem_of(measured).learnt == problem_of(images).learnt == NOTHING_LEARNT
