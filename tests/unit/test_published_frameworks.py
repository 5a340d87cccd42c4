"""What published rows leave out and their frameworks do: clipping, a scaled loss, the limits of a fused kernel."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.published.answer import _problem, answer
from experiments.published.predict import predict
from experiments.published.question import question_of
from experiments.published.quoted import beyond_peak, contradiction, in_unit
from experiments.published.rows import row_of
from parsim.hardware.parts import load_gpu
from parsim.model.catalogue.frameworks import plausible_frameworks
from parsim.model.catalogue.names import NAMED
from tests.published_row import row_with

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
    ("gpt3-175b", "a100-sxm-80gb", 512, {"divided": "tp 2"}, "megatron 2021"),
    ("gpt3-175b", "h100-sxm", 512, {"divided": "tp 2"}, "megatron"),
    ("bert-4b", "v100-sxm-32gb", 8, {}, "deeplearningexamples"),
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
