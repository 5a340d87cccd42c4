"""GPT on 8 and 32 V100s under tensor and pipeline splits, by plan.mesh alone.

    python experiments/published/splits.py        writes SPLITS.md

Shapes are those that OneFlow's DLPerf report trains (hidden 1536 with 16 layers, 2304 with 24; vocabulary 51200, 2048 tokens),
on nodes of eight V100-SXM2-16GB with 100 Gb/s between them. Published figures are those that were handed to the project: one
GPU of that report, and Megatron-LM's table of 2020 on a DGX-2 (2304 x 30 over two GPUs, 1024 tokens). No figure of 8 or 32
GPUs was among them, so those rows hold predictions alone. The report's TFLOP/s are 4/3 of the model's, so it recomputes layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import parsim
from parsim.errors import ParsimError

PAGE = Path(__file__).with_name("SPLITS.md")


@dataclass(frozen=True, slots=True)
class Case:
    """One training: published is in samples per second; None: no figure."""

    hidden: int
    layers: int
    gpus: int
    dp: int
    tp: int
    pp: int
    batch: int
    microbatches: int
    seq: int = 2048
    gpu: str = "v100-sxm-16gb"
    recompute: str = "full"
    published: float | None = None


CASES = (
    Case(1536, 16, 1, 1, 1, 1, 2, 1, published=4.31),
    Case(2304, 30, 2, 1, 2, 1, 8, 1, seq=1024, gpu="v100-sxm3-32gb", published=8 / 1.093),
    Case(1536, 16, 8, 8, 1, 1, 16, 1),
    Case(1536, 16, 8, 1, 8, 1, 16, 1),
    Case(1536, 16, 8, 2, 4, 1, 16, 1),
    Case(1536, 16, 8, 1, 1, 8, 16, 16),
    Case(1536, 16, 8, 2, 2, 2, 16, 4),
    Case(2304, 24, 8, 1, 8, 1, 16, 1),
    Case(2304, 24, 8, 1, 4, 2, 16, 8),
    Case(2304, 24, 8, 2, 2, 2, 16, 8),
    Case(1536, 16, 32, 32, 1, 1, 64, 1),
    Case(1536, 16, 32, 4, 8, 1, 64, 2),
    Case(1536, 16, 32, 4, 4, 2, 64, 8),
    Case(2304, 24, 32, 4, 8, 1, 64, 2),
    Case(2304, 24, 32, 2, 8, 2, 64, 8),
    Case(2304, 24, 32, 4, 2, 4, 64, 16),
)


def predicted(case: Case) -> tuple[str, str, str, str]:
    """Samples per second with the 90% interval, TFLOP/s per GPU, memory; or why there is no plan."""
    args: dict[str, object] = {"hidden": case.hidden, "layers": case.layers, "heads": case.hidden // 96, "vocab": 51200}
    if case.hidden == 1536:
        args["heads"] = 16
    uncut = case.tp == case.pp == 1
    settings: dict[str, object] = {
        "plan.mesh": {"pp": case.pp, "dp": case.dp, "tp": case.tp},
        "plan.strategy": "single" if case.gpus == 1 else "dp" if uncut else "hp" if case.dp > 1 else "mp",
        "plan.microbatches": case.microbatches,
        "plan.zero_stage": 0,
        "plan.recompute": ["h.*"] if case.recompute == "full" else "none",
    }
    if case.pp > 1:
        settings |= {"plan.pipeline_order": "1f1b", "plan.chunks": 1}
    try:
        answer = parsim.plan(
            "transformer",
            cluster=f"{case.gpus}x{case.gpu}",
            network="infiniband-100g" if case.gpus > 8 else None,
            global_batch=case.batch,
            args=args | {"kernels": "unfused-attention"},
            seq=case.seq,
            settings=settings,
        )
    except ParsimError as error:
        return "none", "", "", str(error).splitlines()[0][:80]
    found, figures = answer.prediction, answer.prediction.quoted
    assert figures is not None
    rate = found.throughput_samples_per_s
    peak = f"{max(found.peak_memory_bytes) / 2**30:.1f} GiB{'' if found.fits else ', does not fit'}"
    rates = f"{rate.median:.2f} ({rate.p05:.2f} to {rate.p95:.2f})"
    return rates, f"{figures.hfu * figures.peak_flop_per_s / 1e12:.0f}", peak, _error(rate.median, case)


def _error(median: float, case: Case) -> str:
    return "" if case.published is None else f"{median / case.published - 1:+.1%}"


def main() -> None:
    lines = [
        "# GPT on 8 and 32 V100s by `mesh` alone",
        "",
        "Written by `python experiments/published/splits.py`; see there for the sources. fp16 is autocast here (weights",
        "of four bytes and casts of them), Megatron's fp16 keeps weights of two. TFLOP/s count recomputed forwards.",
        "",
        "| hidden x layers | GPUs | dp x tp x pp | batch | recompute | published samples/s | predicted samples/s | error "
        "| TFLOP/s per GPU | memory |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in CASES:
        rates, flops, memory, error = predicted(case)
        given = "" if case.published is None else f"{case.published:.2f}"
        split = f"{case.dp} x {case.tp} x {case.pp}"
        lines.append(
            f"| {case.hidden} x {case.layers} | {case.gpus} | {split} | {case.batch} in {case.microbatches} | {case.recompute} "
            f"| {given} | {rates} | {error} | {flops} | {memory} |"
        )
        print(lines[-1], flush=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
