"""The figures of README and docs/accuracy.md are those of the committed results of the experiments."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def results(experiment: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "experiments" / experiment / "results.json").read_text(encoding="utf-8"))
    return found


def published() -> list[str]:
    """Mean errors of the groups that the pages name, by factors fitted on other sources."""
    found = results("published")
    held_out = {name: f"{group['held_out']:.1f}%" for name, group in found["groups"].items()}
    megatron, vtrain = held_out["Megatron, Selene"], held_out["multi-node A100 (vTrain)"]
    a100, h100 = held_out["FSDP, A100 (mosaic)"], held_out["FSDP, H100 (mosaic)"]
    everything = found["all"]
    return [
        f"| {found['judged']} published training runs of large transformers, V100 to GB300, by factors fitted on other sources "
        f"| mean {everything['held_out']:.1f}%; 90% intervals hold for {everything['coverage']:.0f}% |",
        f"| of these: Megatron on A100 (Selene), vTrain's rows, FSDP on A100 and H100 "
        f"| mean {megatron}, {vtrain}, {a100}, {h100} |",
        f"| {found['judged']} training runs of large transformers, V100 to GB300, judged by factors fitted on other sources "
        f"| mean {everything['held_out']:.1f}%; 90% intervals hold for {everything['coverage']:.0f}%, "
        f"at a median width of {everything['width']:.0f}% |",
        f"| of these: Megatron on Selene, vTrain's multi-node A100 rows | mean {megatron}, {vtrain} |",
        f"| FSDP on A100 and H100 | mean {a100}, {h100} |",
    ]


def memory() -> list[str]:
    errors = [abs(row["fullest_percent"]) for row in results("memory")["rows"]]
    mean, worst, outside = statistics.mean(errors), max(errors), sum(error > 3 for error in errors)
    return [
        f"| peak memory of {len(errors)} real plans, the fullest rank | mean {mean:.2f}%, worst {worst:.1f}% |",
        f"| {len(errors)} plans, the fullest rank: mean {mean:.2f}%, worst {worst:.1f}%; {outside} outside 3% |",
    ]


def search() -> list[str]:
    found = results("search_exhaustive")
    outcomes = found["summary"]["outcomes"]
    losses = sorted((row["loss"] for row in found["rows"].values() if row["outcome"] == "loss"), reverse=True)
    first, last = ", ".join(f"{100 * loss:.1f}%" for loss in losses[:-1]), f"{100 * losses[-1]:.1f}%"
    return [
        f"| the search against enumeration, {found['summary']['problems']:,} random problems "
        f"| {outcomes['loss']} losses, the largest {100 * losses[0]:.0f}% |",
        f"{outcomes['tie']} ties, {outcomes['infeasible']} infeasible for both, {outcomes['loss']} losses "
        f"({first} and {last}).",
    ]


def properties() -> list[str]:
    found = results("search_properties")["summary"]
    assert not found["failed"]
    return [
        f"{found['properties']} properties of the search hold on {found['compared']:,} drawn problems, "
        f"by {found['searches']:,} searches"
    ]


@pytest.mark.parametrize("texts", [published, memory, search, properties])
def test_figures_follow_from_results(texts: Any) -> None:
    pages = [" ".join((ROOT / name).read_text(encoding="utf-8").split()) for name in ("README.md", "docs/accuracy.md")]
    for text in texts():
        assert any(text in page for page in pages), f"no page says: {text}"
