"""The tables of this experiment's README, from results.json. Needs the standard library alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from experiments.common.markdown import table

Row = dict[str, Any]
QUANTITIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "hours": ("hours of 100 epochs (Figure 1)", lambda value: f"{value:.2f}"),
    "communication": ("communication (Figure 3)", lambda value: f"{100 * value:.1f}%"),
    "memory_gb": ("peak memory, GB (Figure 5)", lambda value: f"{value:.1f}"),
}


def tables(document: dict[str, Any], verdict_of: Callable[[Row], str]) -> str:
    """Everything that stands between the marks.

    Args:
        document: results.json. verdict_of: of one cell of Table I.
    """
    parts = [table_one(document.get("table", []), verdict_of), constants(document.get("constants", []))]
    parts += [speed(document.get("scaling", [])), choices(document), reading(document.get("reading", []))]
    parts += [
        region(document.get("map", [])),
        bandwidths(document.get("bandwidths", [])),
        learning(document.get("learning", [])),
    ]
    return "\n\n".join(part for part in parts if part)


def table_one(rows: list[Row], verdict_of: Callable[[Row], str]) -> str:
    """Table I, a section per quantity."""
    parts = []
    for quantity, (title, shown) in QUANTITIES.items():
        own = [row for row in rows if row["quantity"] == quantity]
        lines = [
            (
                row["model"],
                row["strategy"],
                shown(row["paper"]),
                shown(row["honest"]),
                "" if row["fit"] is None else shown(row["fit"]) + (" (solved)" if row["fit_uses_it"] else ""),
                verdict_of(row),
            )
            for row in own
        ]
        if lines:
            parts.append(f"**{title}**\n\n" + table(("model", "strategy", "paper", "honest", "fit", "verdict"), lines))
    return "\n\n".join(parts)


def constants(rows: list[Row]) -> str:
    """What had to be so for the fit."""
    if not rows:
        return ""
    keys = ("images_per_s_on_one_gpu", "inflation_under_dp", "bus_gb_per_s", "stage_gb_per_s", "stages", "microbatches")
    head = ("model", "images/s on one GPU", "computation under dp, times as long", "all_reduce, GB/s", "between stages, GB/s")
    lines = [(row["model"], *(f"{row[key]:g}" for key in keys)) for row in rows]
    return "**The paper's constants** (the last three are shared by both models)\n\n" + table(
        (*head, "stages", "microbatches"), lines
    )


def speed(rows: list[Row]) -> str:
    """Figure 2."""
    sizes = sorted({row["gpus"] for row in rows if row["gpus"] > 1})
    at = {(row["model"], row["strategy"], row["gpus"]): row["speedup"] for row in rows}
    ways = dict.fromkeys((row["model"], row["strategy"]) for row in rows if row["strategy"] != "single")
    lines = [(*way, *(f"{at[*way, size]:.2f}" if (*way, size) in at else "" for size in sizes)) for way in sorted(ways)]
    head = ("model", "strategy", *(f"{size} GPUs" for size in sizes))
    return "**Speed over one GPU, honest (Figure 2)**\n\n" + table(head, lines) if lines else ""


def choices(document: dict[str, Any]) -> str:
    """Figure 6: how often each strategy was chosen, by part of the network."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for row in document.get("choices", []):
        kind = ".".join(part for part in row["component"].split(".") if not part.isdigit())
        own = found.setdefault((row["model"], kind), {})
        own[row["choice"]] = own.get(row["choice"], 0) + 1
    lines = [(model, kind, _counted(own)) for (model, kind), own in found.items()]
    text = "**Chosen by the paper's objective with the paper's constants (Figure 6)**\n\n"
    return text + table(("model", "components", "strategy"), lines) if lines else ""


def _counted(counts: dict[str, int]) -> str:
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{count} {name}" for name, count in counts.items())


def reading(rows: list[Row]) -> str:
    """Reading R beside the improved problem."""
    lines = []
    for row in rows:
        counts: dict[str, int] = {}
        for placement in row["placements"].values():
            counts[placement] = counts.get(placement, 0) + 1
        places = ", ".join(f"{count} `{name}`" for name, count in counts.items())
        lines.append(
            (row["model"], row["problem"], f"{1e3 * row['exact_s']:.1f}", f"{1e3 * row['milp_s']:.1f}", row["verdict"], places)
        )
    head = ("model", "problem", "dynamic programme, ms", "MILP, ms", "solvers", "placements")
    return "**The paper's problem and the improved one, on honest V100s**\n\n" + table(head, lines) if lines else ""


def region(rows: list[Row]) -> str:
    """The map: per model and batch, the fastest uniform family and what adaptive gains, over links and memory."""
    parts = []
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        own = [row for row in rows if (row["model"], row["batch"]) == (model, batch)]
        links = sorted({row["link"] for row in own}, reverse=True)
        lines = [
            (f"{memory:g} GiB", *(_point(row) for row in own if row["memory_gib"] == memory))
            for memory in sorted({row["memory_gib"] for row in own}, reverse=True)
        ]
        head = ("memory", *(f"links 1/{1 / link:.0f}" if link < 1 else "links as they are" for link in links))
        parts.append(f"{model}, batch {batch}:\n\n" + table(head, lines))
    legend = (
        "**The map: under which links, batch and memory would the paper's order and its 18% hold?** "
        "A cell names the fastest uniform family. Two figures follow: what adaptive gains over hybrid, and over that family. "
        "A star marks the paper's order."
    )
    return "\n\n".join([legend, *parts]) if parts else ""


def _point(row: Row) -> str:
    if row["adaptive"] is None:
        return "nothing fits"
    over = "–" if row["gain_over_hp"] is None else f"{100 * row['gain_over_hp']:.0f}%"
    uniform = "–" if row["gain_over_uniform"] is None else f"{100 * row['gain_over_uniform']:.1f}%"
    return f"{row['fastest_uniform']} {over} / {uniform}{' *' if row['papers_order'] else ''}"


def bandwidths(rows: list[Row]) -> str:
    """Where the paper's constants, but for the bandwidths, give its order: what adaptive gains over hybrid there."""
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        stages = sorted({row["stage_gb_per_s"] for row in own})
        lines = [
            (
                f"{bus:g}",
                *(
                    f"{100 * row['gain_over_hp']:+.0f}%{' *' if row['papers_order'] else ''}"
                    for row in own
                    if row["bus_gb_per_s"] == bus
                ),
            )
            for bus in sorted({row["bus_gb_per_s"] for row in own})
        ]
        parts.append(f"{model}:\n\n" + table(("all_reduce, GB/s", *(f"stages {stage:g} GB/s" for stage in stages)), lines))
    legend = (
        "**The same by the paper's own constants, but for the two bandwidths.** A cell is what adaptive gains over hybrid; "
        "* is the paper's order."
    )
    return "\n\n".join([legend, *parts]) if parts else ""


def learning(rows: list[Row]) -> str:
    """Figure 4: what the five strategies really learn."""
    if not rows:
        return ""
    lines = []
    for way in rows[0]["accuracy"]:
        own = [row["accuracy"][way] for row in rows]
        apart = max(row["loss_difference"][way] for row in rows)
        spread = statistics.stdev(own) if len(own) > 1 else 0.0
        lines.append((way, f"{100 * statistics.mean(own):.2f}% ± {100 * spread:.2f}", f"{apart:.1e}"))
    head = ("strategy", "test accuracy, mean ± deviation", "largest difference of a step's loss to one process")
    title = f"**Five strategies really run on digits, {len(rows)} seeds, {rows[0]['steps']} steps (Figure 4)**\n\n"
    return title + table(head, lines)
