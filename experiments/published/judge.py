"""Claims and tables of predicted published runs, from results.json and worth.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from experiments.common.claims import Claim, Judge, claim
from experiments.common.markdown import table
from experiments.published.rules import FRAMEWORKS

AIMS = {
    "Megatron, Selene": 3.0,
    "multi-node A100 (vTrain)": 8.0,
    "FSDP, A100 (mosaic)": 5.0,
    "FSDP, H100 (mosaic)": 8.0,
}
"""Mean error in percent, by factors fitted on other sources."""


def claims(document: dict[str, Any]) -> list[Claim]:
    """The promises of the design for rows that nobody looked at."""
    groups = document.get("groups", {})
    found = []
    for name, aim in AIMS.items():
        error = groups.get(name, {}).get("held_out")
        text = f"{name}: the mean error is at most {aim:.0f}%"
        rows = groups.get(name, {}).get("rows", 0)
        found.append(
            claim(text, None if error is None else error <= aim, "" if error is None else f"{error:.1f}% of {rows} rows")
        )
    fits = document.get("does_not_fit")
    told = "" if fits is None else f"{len(fits)} of {document['rows']} rows do not"
    return [*found, claim("Every published run is predicted to fit", None if fits is None else not fits, told)]


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


def finding(document: dict[str, Any]) -> str:
    """Two sentences."""
    every, complete = document["all"], document["complete"]
    return (
        f"By factors fitted on other sources, {document['judged']} published training runs are predicted with a mean error of "
        f"{every['held_out']:.1f}%, and their 90% intervals hold for {every['coverage']:.0f}%. For rows that needed no "
        f"assumption, the mean error is {complete['held_out']:.1f}%."
    )


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Groups of rows, factors, the ablation, the worst rows and the rules for blanks."""
    groups = [
        *(group_line(name, group) for name, group in document["groups"].items()),
        group_line("all", document["all"]),
        group_line("complete rows (nothing assumed of split, batch, recomputation)", document["complete"]),
    ]
    factors = [[key, number(factor["factor"], "{:.3f}"), str(factor["sources"])] for key, factor in document["factors"].items()]
    worst = [
        [row["id"], number(row["error"], "{:+.0f}"), number(row["held_out"], "{:+.0f}"), row["why"][:160]]
        for row in document["worst"][:15]
    ]
    rules = ("framework", "ids", "recompute", "ZeRO", "sequence parallel", "micro-batch", "seq", "attention")
    told = f"Rows: {document['rows']}; {document['judged']} judged, {len(document['not_expressed'])} not expressed."
    return {
        "groups of rows": f"{told}\n\n{table(HEAD, groups, words=1)}",
        "factors": table(("GPU and precision", "factor on seconds", "sources"), factors, words=1),
        "ablation": _worth(),
        "worst rows": table(("row", "error %", "held out %", "question"), worst),
        "rules for blanks": table(rules, _rules()),
    }


def number(value: float | None, form: str = "{:.1f}") -> str:
    """A number of a table."""
    return "" if value is None else form.format(value)


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


def _worth() -> str:
    path = Path(__file__).with_name("worth.json")
    if not path.is_file():
        return ""
    found = json.loads(path.read_text())

    def shown(entry: Mapping[str, float]) -> str:
        own = f", {entry['one_factor']:.1f}" if "one_factor" in entry else ""
        return f"{entry['mean_error']:.1f} ({entry['bias']:+.1f}{own})"

    lines = [[piece, str(entry["rows"]), shown(entry["before"]), shown(entry["after"])] for piece, entry in found.items()]
    return table(("piece", "rows", "without", "with"), lines, words=1)


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


WORST, MEDIAN, EIGHT = 15.0, 8.0, 5.0


def v100_claims(document: dict[str, Any]) -> list[Claim]:
    """One GPU from operators alone, and eight GPUs by the shipped profile."""
    single = [percent(row["error"]) for row in document.get("single_gpu", [])]
    eight = [row for row in document.get("eight_gpus", []) if row["profile"] == "with the efficiency"]
    errors = [percent(row["error"]) for row in eight]
    return [
        claim(
            f"One GPU, no row of a whole model used: the worst case is at most {WORST:.0f}% off",
            None if not single else max(single) <= WORST,
            f"{max(single):.1f}% of {len(single)} cases" if single else "",
        ),
        claim(
            f"One GPU, no row of a whole model used: the median is at most {MEDIAN:.0f}%",
            None if not single else median(single) <= MEDIAN,
            f"{median(single):.1f}%" if single else "",
        ),
        claim(
            f"Throughput of eight GPUs is at most {EIGHT:.0f}% off",
            None if not errors else max(errors) <= EIGHT,
            ", ".join(f"{row['model']} {row['error']}" for row in eight),
        ),
    ]


def percent(text: str) -> float:
    """The size of an error from its text."""
    return abs(float(str(text).replace("−", "-").rstrip("%")))


def v100_tables(document: dict[str, Any]) -> dict[str, str]:
    """Throughput of one and eight GPUs, and collectives, as Markdown, by the name in the marks of the README."""
    shipped = "with the efficiency"
    cases = [
        (
            row["model"],
            row["precision"],
            *(
                str(row[key])
                for key in ("batch", "rows", "published_per_s", "operators alone", "error", shipped, "error with it")
            ),
        )
        for row in document["single_gpu"]
    ]
    keys = ("cases", "median, operators alone", "worst", f"median, {shipped}", "worst with it")
    summary = [(row["model"], row["precision"], *(str(row[key]) for key in keys)) for row in document["single_gpu_summary"]]
    efficiencies = ("published efficiency", "predicted efficiency", "no communication")
    eight = [
        (
            "shipped" if row["profile"] == shipped else row["profile"],
            row["model"],
            *(f"{row[key]:.1f}" for key in ("published_per_s", "predicted_per_s")),
            row["error"],
            f"{row['no communication_per_s']:.1f}",
            *(row[key] for key in efficiencies),
            *(f"{row[key]} ms" for key in ("all_reduce_ms", "exposed_ms")),
        )
        for row in document["eight_gpus"]
    ]
    collectives = [
        (row["where"], row["operation"], str(row["gpus"]), row["size"], str(row["rows"]), row["median error"], row["worst"])
        for row in document["collectives"]
    ]
    one = ("model", "precision", "batch", "rows", "published/s", "operators alone", "error", "shipped profile", "error")
    all_cases = ("model", "precision", "cases", "median, operators alone", "worst", "median, shipped profile", "worst")
    speeds = ("published/s", "predicted/s", "error", "without communication")
    return {
        "one GPU": table(one, cases, words=2),
        "one GPU, summary": table(all_cases, summary, words=2),
        "eight GPUs": table(("profile", "model", *speeds, *efficiencies, "all_reduce", "exposed"), eight, words=2),
        "collectives": table(("machine", "operation", "GPUs", "size", "rows", "median error", "worst"), collectives, words=2),
    }


JUDGES = {
    "published": Judge(claims=claims, tables=tables, finding=finding),
    "v100_published": Judge(claims=v100_claims, tables=v100_tables),
}
