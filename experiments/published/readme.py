"""README.md of this experiment, from results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rules import FRAMEWORKS

BEFORE = """Before this experiment, on part of the same rows: Megatron 19.7% (calculon 3.7%, set by its authors on
these rows), multi-node A100 14.7% (calculon 11.1% on 103 of them, vTrain 14.7%), FSDP 128%."""


def number(value: float | None, form: str = "{:.1f}") -> str:
    """A number of a table."""
    return "" if value is None else form.format(value)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def group_line(name: str, found: Mapping[str, Any]) -> list[str]:
    """One line of the table of groups."""
    return [
        name,
        str(found["rows"]),
        number(found["mean_error"]),
        number(found["bias"], "{:+.1f}"),
        number(found["one_factor"]),
        number(found["held_out"]),
        number(found["coverage"], "{:.0f}"),
        number(found["width"], "{:.0f}"),
        str(found["does_not_fit"]),
        number(found["spearman"], "{:.2f}"),
    ]


HEAD = (
    "rows",
    "n",
    "mean error %",
    "bias %",
    "with one factor of its own %",
    "held out %",
    "90% intervals hold %",
    "median width %",
    "does not fit",
    "Spearman",
)


def readme(document: Mapping[str, Any]) -> str:
    """The page. Errors are of the seconds of a step, predicted over measured."""
    parts = [
        "# Published training runs of large transformers",
        "",
        "How far are parsim's predictions from published measurements? `run.py` makes this page and `results.json`; "
        "`predict.py` answers any file of the same format. Each prediction is a Model, a Plan and a Cluster made of parts, "
        "evaluated by parsim. Nothing is fitted to the rows, except the factors below, which the columns name.",
        "",
        f"Rows: {document['rows']}; {document['judged']} judged, {len(document['not_expressed'])} not expressed.",
        "",
        table(
            HEAD,
            [
                *(group_line(name, found) for name, found in document["groups"].items()),
                group_line("all", document["all"]),
                group_line("complete rows (nothing assumed of split, batch, recomputation)", document["complete"]),
            ],
        ),
        "",
        "Held out: with one factor per GPU and precision, fitted on all other sources. " + BEFORE,
        "",
        "## Factors",
        "",
        table(
            ("GPU and precision", "factor on seconds", "sources"),
            [[key, number(entry["factor"], "{:.3f}"), str(entry["sources"])] for key, entry in document["factors"].items()],
        ),
        "",
        "## Worst rows",
        "",
        table(
            ("row", "error %", "held out %", "what was asked"),
            [
                [entry["id"], number(entry["error"], "{:+.0f}"), number(entry["held_out"], "{:+.0f}"), entry["why"][:160]]
                for entry in document["worst"][:15]
            ],
        ),
        "",
        "## Rules for blanks",
        "",
        "Written before any row was predicted (`rules.py`).",
        "",
        table(
            ("framework", "ids", "recompute", "ZeRO", "sequence parallel", "micro-batch", "seq", "attention"),
            _rules(),
        ),
        "",
    ]
    return "\n".join(parts)


def _rules() -> list[list[str]]:
    names: dict[str, list[str]] = {}
    for prefix, framework in FRAMEWORKS.items():
        names.setdefault(framework.name, []).append(prefix)
    known = {framework.name: framework for framework in FRAMEWORKS.values()}
    return [
        [
            name,
            ", ".join(prefixes),
            known[name].recompute,
            str(known[name].zero),
            "yes" if known[name].sequence else "no",
            str(known[name].micro or "16 without a pipeline; with one 4, from hidden 12288 on 1"),
            str(known[name].seq),
            "flash" if known[name].software.flash else "fused softmax",
        ]
        for name, prefixes in names.items()
    ]
