"""The figures of README and docs/accuracy.md are those of the committed results of the experiments."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from experiments.common.catalogue import recorded

ROOT = Path(__file__).resolve().parents[2]


def results(part: str) -> dict[str, Any]:
    document = recorded(part)
    assert document is not None
    return document


def published() -> list[str]:
    """Mean errors of the groups that the pages name, by effects fitted on other sources."""
    found = results("published")
    held_out = {name: f"{group['held_out']:.1f}%" for name, group in found["groups"].items()}
    megatron, vtrain = held_out["Megatron, Selene"], held_out["multi-node A100 (vTrain)"]
    a100, h100 = held_out["FSDP, A100 (mosaic)"], held_out["FSDP, H100 (mosaic)"]
    everything, unknown = found["all"], found["unknown"]["all"]
    known = f"mean {everything['held_out']:.1f}%, median {everything['held_out_median']:.1f}%"
    raw = f"mean {everything['mean_error']:.1f}%"
    return [
        f"| {found['judged']} published training runs, V100 to GB300, the framework known, by effects fitted on other sources "
        f"| {known} |",
        f"| of these: Megatron on A100 (Selene), vTrain's rows, FSDP on A100 and H100 "
        f"| mean {megatron}, {vtrain}, {a100}, {h100} |",
        f"| {found['judged']} training runs, V100 to GB300, by effects fitted on other sources | {known}; 90% intervals hold "
        f"for {everything['coverage']:.0f}%, at a median width of {everything['width']:.0f}% |",
        f"| {unknown['rows']} of these, as if nothing said which framework ran | mean {unknown['held_out']:.1f}%; 90% "
        f"intervals hold for {unknown['coverage']:.0f}%, at a median width of {unknown['width']:.0f}% |",
        f"| without any effects | {raw}, bias {everything['bias']:.1f}% (too fast) |",
        f"| of these: Megatron on Selene, vTrain's multi-node A100 rows | mean {megatron}, {vtrain} |",
        f"| FSDP on A100 and H100 | mean {a100}, {h100} |",
        f"| BLOOM's tuning runs on A100, with the network that they used | mean {held_out['BLOOM tuning, A100']}",
        "| Megatron-Core and NeMo on H100, NeMo on Blackwell "
        f"| mean {held_out['Megatron-Core and NeMo, H100']}, {held_out['NeMo, Blackwell']}",
    ]


def memory() -> list[str]:
    errors = [abs(row["fullest_percent"]) for row in results("memory")["rows"]]
    mean, worst, outside = statistics.mean(errors), max(errors), sum(error > 3 for error in errors)
    beyond = f"; {outside} outside 3%" if outside else ""
    return [
        f"| peak memory of {len(errors)} real plans, the fullest rank | mean {mean:.2f}%, worst {worst:.1f}% |",
        f"| {len(errors)} plans, the fullest rank: mean {mean:.2f}%, worst {worst:.1f}%{beyond} |",
    ]


def search() -> list[str]:
    found = results("search_exhaustive")
    outcomes = found["summary"]["outcomes"]
    losses = sorted((row["loss"] for row in found["rows"].values() if row["outcome"] == "loss"), reverse=True)
    counted, listed = "no losses", ""
    if losses:
        *first, last = (f"{100 * loss:.1f}%" for loss in losses)
        counted = f"{outcomes['loss']} losses, the largest {100 * losses[0]:.0f}%"
        listed = f" ({', '.join(first)} and {last})" if first else f" ({last})"
    return [
        f"| the search against enumeration, {found['summary']['problems']:,} random problems | {counted} |",
        f"{outcomes['tie']} ties, {outcomes['infeasible']} infeasible for both, {counted.partition(',')[0]}{listed}.",
    ]


def properties() -> list[str]:
    found = results("search_properties")["summary"]
    assert not found["failed"]
    return [
        f"{found['properties']} properties of the search hold on {found['compared']:,} drawn problems, "
        f"by {found['searches']:,} searches"
    ]


def complete_rows() -> list[str]:
    """Rows of which nothing had to be assumed."""
    found = results("published")["complete"]
    return [
        f"| the {found['rows']} rows that state split, batch and recomputation | mean {found['held_out']:.1f}%; "
        f"90% intervals hold for {found['coverage']:.0f}%, at a median width of {found['width']:.0f}% |"
    ]


def v100() -> list[str]:
    """Single GPUs, eight GPUs and large all_reduces that the link model was fitted to."""
    found = results("v100_published")
    summary = next(row for row in found["single_gpu_summary"] if row["model"] == "all")
    median, worst = summary["median, operators alone"], f"{percent(summary['worst']):.0f}%"
    resnet, bert = (abs(percent(row["error"])) for row in found["eight_gpus"] if row["profile"] == "with the efficiency")
    sizes = [row for row in found["collectives"] if row["size"] == ">= 16 MiB"]
    large = [row for row in sizes if "vTrain" in row["where"]]
    other = {row["operation"]: abs(percent(row["worst"])) for row in sizes if "DGX-2" in row["where"]}
    return [
        "| published throughput of ResNet-50, BERT-base and GPT on one V100, nothing fitted to it "
        f"| median {median}, worst {worst} |",
        f"| one V100: ResNet-50, BERT-base and GPT, none of it used for fitting | median {median}, worst {worst} |",
        f"| eight V100s: ResNet-50 and BERT-base, after one factor for fp32 | {resnet}% and {bert}% too slow |",
        "| NCCL all_reduce on 2, 4 and 8 V100s, 16 MiB and more, to which the links were fitted "
        f"| worst {max(abs(percent(row['worst'])) for row in large)}% |",
        "| collectives that nothing was fitted to, on 12 GPUs of a DGX-2, 16 MiB and more "
        f"| broadcast worst {other['broadcast']}%; all_gather up to {other['all_gather']}% and reduce_scatter up to "
        f"{other['reduce_scatter']}% too fast |",
    ]


def percent(text: str) -> float:
    return float(text.removesuffix("%"))


def reference() -> list[str]:
    """The executor over native DDP, FSDP2 and pipelines: medians of the ratio."""
    ratios = {row["case"]: row["ratio"]["median"] for row in results("reference")["rows"]}
    others = [ratio for case, ratio in ratios.items() if "ddp" not in case.lower()]
    transformers = sorted({f"{ratios[f'{name} ddp']:.2f}" for name in ("vit_small", "gpt_small")})
    return [
        f"The step takes {min(others):.2f} to {max(others):.2f} of the native one under FSDP2 and pipelines.",
        f"Under DDP it takes {' to '.join(transformers)} for the transformers, "
        f"{ratios['resnet_small ddp']:.2f} for a small ResNet and {ratios['mlp ddp']:.2f} for an MLP",
    ]


def test_every_row_of_the_accuracy_page_is_compared_or_known_not_to_be() -> None:
    """A row that is neither made from results nor listed here, with the reason, is a figure that nobody checks."""
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    made = [text.strip() for texts in (published, complete_rows, v100, memory) for text in texts()]
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| what", "|---"))]
    unchecked = [row for row in rows if not any(text in row for text in made)]
    assert [row for row in unchecked if not row.startswith(tuple(WITHOUT_RESULTS))] == []


WITHOUT_RESULTS = {
    "| step time, the committed record": "written by experiments/results.py",
    "| step time, AMD EPYC": "raw data not kept (2026-11-22)",
    "| step time, Intel Xeon": "raw data not kept (2026-11-22)",
    "| 90% intervals, corrected": "raw data not kept (2026-11-22)",
    "| choosing, the committed record": "written by experiments/results.py",
    "| choosing among": "raw data not kept (2026-11-22)",
    "| computation of models that were never measured": "experiments/this_machine keeps no results",
    "| one rank slowed": "experiments/adaptive keeps no results",
}
"""Rows by how they begin, and why no test compares them."""


def test_the_page_of_large_models_quotes_the_errors_of_such_runs() -> None:
    """Of sources that the effects were not fitted on, as an answer's effects were not fitted on the run that is asked for."""
    groups = results("published")["groups"]
    names = ("FSDP, H100 (mosaic)", "FSDP2 (torchtitan)", "Megatron, Selene")
    mosaic, titan, selene = (f"{groups[name]['held_out']:.0f}" for name in names)
    page = " ".join((ROOT / "docs" / "large-models.md").read_text(encoding="utf-8").split())
    assert f"{mosaic} and {titan}% for FSDP on H100 (two sources), {selene}% for Megatron-LM on A100." in page


@pytest.mark.parametrize("texts", [published, complete_rows, v100, memory, search, properties, reference])
def test_figures_follow_from_results(texts: Any) -> None:
    pages = [" ".join((ROOT / name).read_text(encoding="utf-8").split()) for name in ("README.md", "docs/accuracy.md")]
    for text in texts():
        assert any(text in page for page in pages), f"no page says: {text}"
