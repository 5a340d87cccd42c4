"""Claims and tables of predicted published runs, from results.json and worth.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from experiments.common.claims import Claim, Judge, claim
from experiments.common.markdown import row_table
from experiments.published.rules import PREFIXES, Rule

AIMS = {
    "Megatron, Selene": 3.0,
    "multi-node A100 (vTrain)": 8.0,
    "FSDP, A100 (mosaic)": 5.0,
    "FSDP, H100 (mosaic)": 8.0,
}
"""Mean error in percent, by effects fitted on other sources."""


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


def finding(document: dict[str, Any]) -> str:
    """Two sentences."""
    every, complete = document["all"], document["complete"]
    return (
        f"By effects fitted on other sources, {document['judged']} published training runs are predicted with a mean error of "
        f"{every['held_out']:.1f}%, and their 90% intervals hold for {every['coverage']:.0f}%. The mean error is "
        f"{complete['held_out']:.1f}% for rows that needed no assumption, and {document['unknown']['all']['held_out']:.1f}% "
        "where nothing says which framework ran."
    )


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Groups of rows, sources, frameworks, effects, the ablation, the worst rows and the rules for blanks."""
    groups = {name: entry for name, entry in document["groups"].items() if entry} | {
        "all": document["all"],
        "complete rows (nothing assumed of split, batch, recomputation)": document["complete"],
        "as if no framework were known": document["unknown"]["all"],
        "as if no framework were known, complete rows": document["unknown"]["complete"],
    }
    columns = (
        ("rows", "{name}"),
        ("n", "{rows}"),
        ("sources", "{sources}"),
        ("mean error %", _if_there("mean_error", ".1f")),
        ("bias %", _if_there("bias", "+.1f")),
        ("held out %", _if_there("held_out", ".1f")),
        ("median %", _if_there("held_out_median", ".1f")),
        ("bias %", _if_there("held_out_bias", "+.1f")),
        ("90% intervals hold %", _if_there("coverage", ".0f")),
        ("median width %", _if_there("width", ".0f")),
        ("does not fit", "{does_not_fit}"),
        ("Spearman", _if_there("spearman", ".2f")),
    )

    def by(key: str, head: str) -> str:
        rows = [{"name": name, **entry} for name, entry in document[key].items()]
        return row_table(rows, ((head, "{name}"), *columns[1:]), words=1)

    effects = [{"name": name, "factor": factor, "sources": count} for name, (factor, count) in document["effects"].items()]
    worst = (
        ("row", "{id}"),
        ("error %", "{error:+.0f}"),
        ("held out %", "{held_out:+.0f}"),
        ("question", lambda row: row["why"][:160]),
    )
    counts = f"Rows: {document['rows']}; {document['judged']} judged, {len(document['not_expressed'])} not expressed."
    by_group = row_table([{"name": name, **group} for name, group in groups.items()], columns, words=1)
    effect_columns = (("effect", "{name}"), ("factor on seconds", "{factor:.3f}"), ("sources", "{sources}"))
    return {
        "groups of rows": f"{counts}\n\n{by_group}",
        "by source": by("by_source", "source"),
        "by framework": by("by_framework", "framework"),
        "effects": row_table(effects, effect_columns, words=1),
        "ablation": _worth(),
        "worst rows": row_table(document["worst"][:15], worst),
        "rules for blanks": _rules(),
    }


def _if_there(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    """A figure of a row, or nothing where it has none."""
    return lambda row: "" if row[key] is None else format(row[key], form)


def _worth() -> str:
    """What each piece of the model is worth, from worth.json."""
    path = Path(__file__).with_name("worth.json")
    if not path.is_file():
        return ""

    def shown(errors: Mapping[str, float]) -> str:
        after_a_factor = f", {errors['one_factor']:.1f}" if "one_factor" in errors else ""
        return f"{errors['mean_error']:.1f} ({errors['bias']:+.1f}{after_a_factor})"

    columns = (
        ("piece", "{piece}"),
        ("rows", "{rows}"),
        ("without", lambda row: shown(row["before"])),
        ("with", lambda row: shown(row["after"])),
    )
    return row_table([{"piece": piece, **row} for piece, row in json.loads(path.read_text()).items()], columns, words=1)


def _rules() -> str:
    rules = {prefix: make() for prefix, make in PREFIXES.items()}
    prefixes: dict[str, list[str]] = {}
    for prefix, found in rules.items():
        prefixes.setdefault(_version(found), []).append(prefix)
    columns: tuple[tuple[str, Callable[[Rule], str]], ...] = (
        ("framework", _version),
        ("ids", lambda rule: ", ".join(prefixes[_version(rule)])),
        ("recompute", lambda rule: rule.recompute),
        ("ZeRO", lambda rule: str(rule.zero)),
        ("sequence parallel", lambda rule: "yes" if rule.sequence else "no"),
        ("micro-batch", lambda rule: str(rule.micro or "16 without a pipeline; with one 4, from hidden 12288 on 1")),
        ("seq", lambda rule: str(rule.seq)),
        ("attention", lambda rule: "flash" if rule.software.flash else "fused softmax"),
    )
    return row_table({_version(rule): rule for rule in rules.values()}.values(), columns)


def _version(rule: Rule) -> str:
    return f"{rule.name} of {rule.year}" if rule.year else rule.name


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
    one_gpu = (
        ("model", "{model}"),
        ("precision", "{precision}"),
        ("batch", "{batch}"),
        ("rows", "{rows}"),
        ("published/s", "{published_per_s}"),
        ("operators alone", "{operators alone}"),
        ("error", "{error}"),
        ("shipped profile", f"{{{shipped}}}"),
        ("error", "{error with it}"),
    )
    summary = (
        ("model", "{model}"),
        ("precision", "{precision}"),
        ("cases", "{cases}"),
        ("median, operators alone", "{median, operators alone}"),
        ("worst", "{worst}"),
        ("median, shipped profile", f"{{median, {shipped}}}"),
        ("worst", "{worst with it}"),
    )
    eight_gpus = (
        ("profile", lambda row: "shipped" if row["profile"] == shipped else row["profile"]),
        ("model", "{model}"),
        ("published/s", "{published_per_s:.1f}"),
        ("predicted/s", "{predicted_per_s:.1f}"),
        ("error", "{error}"),
        ("without communication", "{no communication_per_s:.1f}"),
        *((name, f"{{{name}}}") for name in ("published efficiency", "predicted efficiency", "no communication")),
        ("all_reduce", "{all_reduce_ms} ms"),
        ("exposed", "{exposed_ms} ms"),
    )
    collectives = (
        ("machine", "{where}"),
        ("operation", "{operation}"),
        ("GPUs", "{gpus}"),
        ("size", "{size}"),
        ("rows", "{rows}"),
        ("median error", "{median error}"),
        ("worst", "{worst}"),
    )
    return {
        "one GPU": row_table(document["single_gpu"], one_gpu, words=2),
        "one GPU, summary": row_table(document["single_gpu_summary"], summary, words=2),
        "eight GPUs": row_table(document["eight_gpus"], eight_gpus, words=2),
        "collectives": row_table(document["collectives"], collectives, words=2),
    }


JUDGES = {
    "published": Judge(claims=claims, tables=tables, finding=finding),
    "v100_published": Judge(claims=v100_claims, tables=v100_tables),
}
