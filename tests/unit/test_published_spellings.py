"""Rows of published runs whose texts, machines, models and units are others than those of the known table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.published.answer import answer
from experiments.published.blanks import CannotExpressError, stage_of
from experiments.published.machines import machine_of
from experiments.published.predict import predict
from experiments.published.question import question_of
from experiments.published.quoted import in_unit, larger_is_faster
from experiments.published.rows import read_rows, row_of
from experiments.published.rules import recompute_of, rule
from parsim.costs.published import learnt_of
from tests.published_row import row_with

NAMED = {"layers": "", "hidden": "", "heads": ""}


def row(**values: str) -> Any:
    return row_of(dict(row_with(**values)))


def asked(**values: str) -> Any:
    return question_of(row(**values))


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
    read = row(**{column: text})
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
    found = machine_of(row(hardware=hardware))
    assert found is not None
    assert (found.gpu, found.per_node, found.cards, found.gbit) == (gpu, per_node, cards, gbit)


def test_an_h100_of_96_gb_is_one_however_it_is_written() -> None:
    found = {machine_of(row(hardware=text)) for text in ("H100 96GB HBM2e", "H100-96GB", "H100-SXM-96GB")}
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
    found = predict(row(hardware=hardware, gpus="32", dp="8", global_batch="64", precision="fp16"))
    assert found.value is not None, found.why
    assert found.facts is not None
    learnt = learnt_of(found.facts.run)
    assert (found.p05, found.p95) == pytest.approx((found.value * learnt.low, found.value * learnt.high))
    assert learnt.low < 0.95
    assert learnt.high > 1.1
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
    found = predict(row(unit=unit))
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
    assert recompute_of(row(recompute=text), rule("megatron")) == (expected or "none", bool(expected))


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
    values = {"model": "LLAMA2-70B SFT", "hardware": "DGX-H100", "gpus": "16", "tp": "4", "pp": "4", "dp": "", "seq": "4096"}
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
    found = predict(row(**NAMED, **values))
    assert found.fit_probability is not None
    assert found.fit_probability > 0.5
    assert "the largest that fits" in found.why
    stated = predict(row(**NAMED, **values | {"micro_batch": "16"}))
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
