"""Table I and the claims K01 to K15 of the adaptive scheduling paper, from results.json."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from experiments.common.claims import UNRESOLVED, Claim, claim, of_every
from experiments.common.markdown import row_table, table

NEAR = 0.15
"""Of a printed figure: nearer counts as the same."""
SEEDS, SAME_ACCURACY = 20, 0.005
NEAR_LINEAR = 0.9
"""Of the number of GPUs."""
MODELS = ("ResNet-50", "ViT-B/16")
STRATEGIES = ("single", "dp", "mp", "hp", "adaptive")
Row = dict[str, Any]
Cells = dict[tuple[str, str, str], Row]


def parallelism_claims(document: dict[str, Any]) -> list[Claim]:
    """Cells of Table I by source, K01 to K15, and the map."""
    rows = document.get("table", [])
    cells: Cells = {(row["model"], row["strategy"], row["quantity"]): row for row in rows}
    speed = {(row["model"], row["strategy"], row["gpus"]): row["speedup"] for row in document.get("scaling", [])}
    return [
        *table_claims(rows),
        *speed_claims(cells),
        *printed_claims(cells, document.get("printed", {})),
        *scaling_claims(speed),
        *share_claims(cells),
        *learning_claims(document.get("learning", [])),
        *placement_claims(document),
        *reading_claims(document.get("reading", [])),
        *map_claims(document.get("map", [])),
        *bandwidth_claims(document.get("bandwidths", [])),
    ]


def verdict_of(row: Row) -> str:
    """Whose figure is near the printed one, of a cell of Table I."""
    honest, fit = (_near(row[source], row["paper"]) for source in ("honest", "fit"))
    if honest:
        return "honest"
    if row["fit"] is None:
        return "neither"
    return "solved from" if row["fit_uses_it"] else "fit predicts" if fit else "neither"


def _near(value: float | None, printed: float) -> bool:
    return value is not None and abs(value / printed - 1) <= NEAR


def table_claims(rows: list[Row]) -> list[Claim]:
    """Which part of Table I an honest machine, or the paper's own constants, give again."""
    kinds = {"hours": "training time", "communication": "share of communication", "memory_gb": "peak memory"}

    def name(row: Row) -> str:
        return f"{row['model']} {row['strategy']}"

    found = [
        of_every(
            f"Table I: every {what} is within {100 * NEAR:.0f}% of an honest V100's, nothing fitted",
            [row for row in rows if row["quantity"] == quantity],
            lambda row: _near(row["honest"], row["paper"]),
            name,
        )
        for quantity, what in kinds.items()
    ]
    predicted = [row for row in rows if row["fit"] is not None and not row["fit_uses_it"]]
    found.append(
        of_every(
            f"Table I: the paper's own nine constants predict the other rows, within {100 * NEAR:.0f}%",
            predicted,
            lambda row: _near(row["fit"], row["paper"]),
            lambda row: f"{name(row)} {row['quantity']}",
        )
    )
    return found


def ratio(cells: Cells, model: str, over: str, under: str, source: str) -> float | None:
    """Hours of one strategy over those of another, by one column."""
    first, second = cells.get((model, over, "hours")), cells.get((model, under, "hours"))
    return None if first is None or second is None else first[source] / second[source]


def speed_claims(cells: Cells) -> list[Claim]:
    """K01 to K06 and K15: ratios of hours, in the table itself and on an honest machine."""
    asked = (
        ("K01", "hybrid is 3.2 times as fast as one GPU", MODELS, "single", "hp", 3.2),
        ("K02", "adaptive trains 18% faster than hybrid", MODELS, "hp", "adaptive", 1.18),
        ("K03", "adaptive is 3.8 times as fast as one GPU for ResNet-50", MODELS[:1], "single", "adaptive", 3.8),
        ("K04", "adaptive is 1.18 times as fast as hybrid for ResNet-50", MODELS[:1], "hp", "adaptive", 1.18),
        ("K05", "adaptive is 3.2 times as fast as one GPU for ViT", MODELS[1:], "single", "adaptive", 3.2),
        ("K06", "adaptive is 1.15 times as fast as hybrid for ViT", MODELS[1:], "hp", "adaptive", 1.15),
    )
    found = []
    for key, text, models, over, under, wanted in asked:
        digits = len(str(wanted).split(".")[1])
        for source, where in (("paper", "by its own Table I"), ("honest", "on honest V100s")):
            values = [ratio(cells, model, over, under, source) for model in models]
            known = [value for value in values if value is not None]
            told = ", ".join(f"{value:.3f}" for value in known)
            holds = None if len(known) < len(models) else all(round(value, digits) == wanted for value in known)
            found.append(claim(f"{key}: {text}, {where}", holds, told))
    for source, where in (("paper", "by its own Table I"), ("honest", "on honest V100s")):
        gains = [ratio(cells, model, "hp", "adaptive", source) for model in MODELS]
        both = [gain for gain in gains if gain is not None]
        holds = None if len(both) < len(MODELS) else both[1] > both[0]
        found.append(
            claim(
                f"K15: the gain of adaptive grows with the model, {where}", holds, " then ".join(f"{gain:.3f}" for gain in both)
            )
        )
    return found


def printed_claims(cells: Cells, printed: dict[str, dict[str, list[float]]]) -> list[Claim]:
    """K07, K09 and K11 as far as Table I itself can say: it has 8 GPUs alone."""
    dp = [ratio(cells, model, "single", "dp", "paper") for model in MODELS]
    speeds = [value for value in dp if value is not None]
    gains = [
        (model, way, gain)
        for model in MODELS
        for way in ("single", "dp", "mp", "hp")
        if (gain := ratio(cells, model, way, "adaptive", "paper")) is not None
    ]
    gaps = [
        (model, way, accuracy - printed[model]["accuracy"][0])
        for model in MODELS
        if model in printed
        for way, accuracy in zip(STRATEGIES[1:], printed[model]["accuracy"][1:], strict=True)
    ]
    return [
        claim(
            "K07: data parallelism on 8 GPUs is no slower than near-linear on 4 (3.6 times one GPU), by its own Table I",
            None if len(speeds) < len(MODELS) else all(value >= NEAR_LINEAR * 4 for value in speeds),
            ", ".join(f"{value:.3f}" for value in speeds),
        ),
        of_every(
            "K09: adaptive is at least as fast as every uniform strategy, by its own Table I",
            gains,
            lambda entry: entry[2] >= 1.0,
            lambda entry: f"{entry[0]} {entry[1]} ({entry[2]:.3f})",
        ),
        of_every(
            "K11: all strategies end within ±0.5% of one GPU's accuracy, by its own Table I",
            gaps,
            lambda entry: abs(entry[2]) <= 100 * SAME_ACCURACY,
            lambda entry: f"{entry[0]} {entry[1]} ({entry[2]:+.1f})",
        ),
    ]


def scaling_claims(speed: dict[tuple[str, str, int], float]) -> list[Claim]:
    """K07 to K09: speed over GPUs, on an honest machine. The paper's Figure 2 has no numbers."""
    sizes = (2, 4, 8)
    have = all((model, way, size) in speed for model in MODELS for way in ("dp", "mp", "adaptive") for size in sizes)
    if not have:
        return [claim(text, None) for text in (K07, K08, K09)]

    def kept(model: str, way: str) -> list[float]:
        """Efficiency at each size over that at the size before."""
        own = [speed[model, way, size] / size for size in sizes]
        return [after / before for before, after in pairwise(own)]

    dp = {model: [speed[model, "dp", size] for size in sizes] for model in MODELS}
    diminishing = all(own[1] >= NEAR_LINEAR * 4 and own[2] / own[1] < NEAR_LINEAR * 2 for own in dp.values())
    steadier = all(min(kept(model, "mp")) > min(kept(model, "dp")) for model in MODELS)
    lower = all(speed[model, "mp", 8] < speed[model, "dp", 8] for model in MODELS)
    best = all(
        speed[model, "adaptive", size] >= speed.get((model, way, size), 0.0) * (1 - 1e-9)
        for model in MODELS
        for size in sizes
        for way in ("dp", "mp", "hp")
    )
    mp = {model: [speed[model, "mp", size] for size in sizes] for model in MODELS}

    def shown(by_model: dict[str, list[float]]) -> str:
        speeds = "; ".join(f"{model} {', '.join(f'{value:.2f}' for value in values)}" for model, values in by_model.items())
        return f"{speeds} times at 2, 4 and 8"

    return [
        claim(K07, diminishing, shown(dp)),
        claim(K08, steadier and lower, shown(mp)),
        claim(K09, best, "at 2, 4 and 8 GPUs"),
    ]


K07 = "K07: data parallelism is near-linear to 4 GPUs and has diminishing returns beyond, on honest V100s"
K08 = "K08: model parallelism scales more steadily than data parallelism, at lower speed, on honest V100s"
K09 = "K09: adaptive is at least as fast as every uniform strategy at every number of GPUs, on honest V100s"


def share_claims(cells: Cells) -> list[Claim]:
    """K10 and K13: communication and memory."""

    def both(strategy: str, quantity: str, source: str) -> list[float]:
        return [cells[model, strategy, quantity][source] for model in MODELS if (model, strategy, quantity) in cells]

    found = []
    for source, where in (("paper", "by its own Table I"), ("honest", "on honest V100s")):
        dp, adaptive = both("dp", "communication", source)[:1], both("adaptive", "communication", source)[:1]
        holds = None if not (dp and adaptive) else abs(dp[0] - 0.42) < 0.01 and abs(adaptive[0] - 0.27) < 0.01
        told = f"{100 * dp[0]:.1f}% and {100 * adaptive[0]:.1f}%" if dp and adaptive else ""
        found.append(claim(f"K10: dp communicates 42% of the time on 8 GPUs, adaptive 27% (ResNet-50), {where}", holds, told))
    for source, of, where in (("paper", "", "by its own Table I"), ("honest", "the fastest plan of each, ", "on honest V100s")):
        pairs = [
            (model, way, cells[model, way, "memory_gb"][source], cells[model, "dp", "memory_gb"][source])
            for model in MODELS
            for way in ("mp", "hp")
            if (model, way, "memory_gb") in cells
        ]
        found.append(
            of_every(
                f"K13: model and hybrid parallelism hold less memory per GPU than dp, {of}{where}",
                pairs,
                lambda pair: pair[2] < pair[3],
                lambda pair: f"{pair[0]} {pair[1]} ({pair[2]:.1f} GB against {pair[3]:.1f})",
            )
        )
    return found


def learning_claims(rows: list[Row]) -> list[Claim]:
    """K11 and K12: accuracy of the five strategies, and their curves, on digits, as really run."""
    texts = (
        f"K11: all strategies end within ±0.5% of accuracy (digits, {SEEDS} seeds fixed in advance)",
        "K12: adaptive converges faster than the others (digits: its losses differ from one process's)",
    )
    if len(rows) < SEEDS:
        return [claim(text, None, f"{len(rows)} of {SEEDS} seeds were run") for text in texts]
    own = rows[:SEEDS]
    gaps = {way: [row["accuracy"][way] - row["accuracy"]["single"] for row in own] for way in STRATEGIES[1:]}
    means = [statistics.mean(values) for values in gaps.values()]
    halves = [2.093 * statistics.stdev(values) / SEEDS**0.5 for values in gaps.values()]  # Student's t, 19 degrees of freedom
    low = [mean - half for mean, half in zip(means, halves, strict=True)]
    high = [mean + half for mean, half in zip(means, halves, strict=True)]
    told = f"95% intervals of the mean differences to one process lie in {100 * min(low):+.2f}% to {100 * max(high):+.2f}%"
    if min(low) >= -SAME_ACCURACY and max(high) <= SAME_ACCURACY:
        same = claim(texts[0], True, told)
    elif max(low) > SAME_ACCURACY or min(high) < -SAME_ACCURACY:
        same = claim(texts[0], False, told)
    else:
        same = Claim(text=texts[0], verdict=UNRESOLVED, found=told)
    apart = max(row["loss_difference"]["adaptive"] for row in own)
    return [
        same,
        claim(texts[1], apart > 1e-10, f"largest difference of a step's loss over {own[0]['steps']} steps: {apart:.1e}"),
    ]


def placement_claims(document: dict[str, Any]) -> list[Claim]:
    """K14: Figure 6, by the paper's own objective and constants, and by the improved problem on an honest machine."""
    by_kind: dict[str, set[str]] = {}
    for row in document.get("choices", []):
        if row["model"] == "ViT-B/16":
            by_kind.setdefault(kind_of(row["component"]), set()).add(row["choice"])
    told = "; ".join(f"{kind} {' and '.join(sorted(ways))}" for kind, ways in by_kind.items() if kind)
    printed = {"attention": {"mp"}, "MLP": {"dp"}, "embedding": {"hp"}}
    text = "K14: attention goes to mp, MLP blocks to dp and the embedding to hp"
    holds = None if not by_kind else all(by_kind.get(kind) == ways for kind, ways in printed.items())
    improved: dict[str, set[str]] = {}
    for row in document.get("reading", []):
        if row["model"] == "ViT-B/16" and row["problem"] == "improved":
            for component, placement in row["placements"].items():
                improved.setdefault(kind_of(component), set()).add(placement)
    shown = "; ".join(f"{kind} {' and '.join(sorted(ways))}" for kind, ways in improved.items() if kind)
    cut = {kind: {placement.split(":")[0] for placement in ways} for kind, ways in improved.items()}
    chosen = cut.get("attention") == {"shard"} and cut.get("MLP") == {"batch"} and cut.get("embedding") != {"batch"}
    return [
        claim(f"{text}, by the paper's objective and constants", holds, told),
        claim(f"{text}, by the improved problem on honest V100s", chosen if improved else None, shown),
    ]


def kind_of(component: str) -> str:
    """What a component of ViT is in the paper's words; "" for what it does not name."""
    kinds: dict[str, Callable[[str], bool]] = {
        "attention": lambda name: "attention" in name,
        "MLP": lambda name: name.endswith("fc1"),
        "embedding": lambda name: name == "conv_proj",
    }
    return next((kind for kind, holds in kinds.items() if holds(component.lower())), "")


def reading_claims(rows: list[Row]) -> list[Claim]:
    """Both problems have one answer, which two solvers prove."""
    return [
        of_every(
            "The paper's problem as printed and the improved one are solved to a proven optimum by two solvers",
            rows,
            lambda row: row["verdict"] == "agree",
            lambda row: f"{row['model']} {row['problem']} ({row['verdict']})",
        )
    ]


def map_claims(rows: list[Row]) -> list[Claim]:
    """Where the paper's order and its gain would hold."""
    texts = (
        "Some links, batch and memory put the strategies in the paper's order (adaptive, hp, dp, mp, single)",
        "At some such point adaptive gains 18% over hybrid, as in the paper's abstract",
        "At some point of the map adaptive gains 18% over the best uniform strategy",
    )
    if not rows:
        return [claim(text, None) for text in texts]
    ordered = [row for row in rows if row["papers_order"]]
    gaining = [row for row in ordered if row["gain_over_hp"] >= 0.18]
    uniform = [row for row in rows if (row["gain_over_uniform"] or 0.0) >= 0.18]
    largest = max(rows, key=lambda row: row["gain_over_uniform"] or 0.0)
    of = f"of {len(rows)} points"

    def places(some: list[Row]) -> str:
        point = "{model} batch {batch}, links 1/{slower:.0f}, {memory_gib:g} GiB"
        shown = [point.format(**row, slower=1 / row["link"]) for row in some]
        return f": {'; '.join(shown[:3])}{' and others' if len(some) > 3 else ''}" if some else ""

    return [
        claim(texts[0], bool(ordered), f"{len(ordered)} {of}{places(ordered)}"),
        claim(texts[1], bool(gaining), f"{len(gaining)} {of}{places(gaining)}"),
        claim(
            texts[2],
            bool(uniform),
            f"{len(uniform)} {of}; the largest gain is {100 * (largest['gain_over_uniform'] or 0):.1f}%",
        ),
    ]


def bandwidth_claims(rows: list[Row]) -> list[Claim]:
    """Whether other bandwidths, with the paper's other constants, give its order and its gain."""
    held = {model: [row for row in rows if row["model"] == model and row["papers_order"]] for model in MODELS}
    texts = [f"With the paper's other constants, some bandwidths give its order and 18% for {model}" for model in MODELS]
    if not rows:
        return [claim(text, None) for text in texts]
    found = []
    for text, own in zip(texts, held.values(), strict=True):
        gaining = [row for row in own if row["gain_over_hp"] >= 0.18]
        shown = [f"{row['bus_gb_per_s']:g} and {row['stage_gb_per_s']:g}" for row in gaining[:4]]
        told = f"order at {len(own)}, gain at {len(gaining)} of {len(rows) // len(MODELS)} pairs"
        found.append(
            claim(text, bool(gaining), told + (f" (GB/s of all_reduce and stages: {'; '.join(shown)})" if shown else ""))
        )
    return found


def parallelism_tables(document: dict[str, Any]) -> dict[str, str]:
    """All tables of the section, as one text."""
    parts = (
        table_one(document.get("table", [])),
        constants(document.get("constants", [])),
        speed_up(document.get("scaling", [])),
        choices(document.get("choices", [])),
        reading(document.get("reading", [])),
        region(document.get("map", [])),
        bandwidths(document.get("bandwidths", [])),
        learning(document.get("learning", [])),
    )
    return {"adaptive_parallelism": "\n\n".join(part for part in parts if part)}


def table_one(rows: list[Row]) -> str:
    """Table I, a section per quantity."""
    quantities: dict[str, tuple[str, Callable[[float], str]]] = {
        "hours": ("hours of 100 epochs (Figure 1)", lambda value: f"{value:.2f}"),
        "communication": ("communication (Figure 3)", lambda value: f"{value:.1%}"),
        "memory_gb": ("peak memory, GB (Figure 5)", lambda value: f"{value:.1f}"),
    }
    parts = []
    for quantity, (title, shown) in quantities.items():
        cells = [row for row in rows if row["quantity"] == quantity]
        if not cells:
            continue

        def fit(row: Row, shown: Callable[[float], str] = shown) -> str:
            return "" if row["fit"] is None else shown(row["fit"]) + (" (solved)" if row["fit_uses_it"] else "")

        columns = (
            ("model", "{model}"),
            ("strategy", "{strategy}"),
            ("paper", lambda row, shown=shown: shown(row["paper"])),
            ("honest", lambda row, shown=shown: shown(row["honest"])),
            ("fit", fit),
            ("verdict", verdict_of),
        )
        parts.append(f"**{title}**\n\n{row_table(cells, columns)}")
    return "\n\n".join(parts)


def constants(rows: list[Row]) -> str:
    """What had to be so for the fit."""
    columns = (
        ("model", "{model}"),
        ("images/s on one GPU", "{images_per_s_on_one_gpu:g}"),
        ("computation under dp, times as long", "{inflation_under_dp:g}"),
        ("all_reduce, GB/s", "{bus_gb_per_s:g}"),
        ("between stages, GB/s", "{stage_gb_per_s:g}"),
        ("stages", "{stages:g}"),
        ("microbatches", "{microbatches:g}"),
    )
    title = "**The paper's constants** (the last three are shared by both models)\n\n"
    return title + row_table(rows, columns) if rows else ""


def speed_up(rows: list[Row]) -> str:
    """Figure 2."""
    sizes = sorted({row["gpus"] for row in rows if row["gpus"] > 1})
    at = {(row["model"], row["strategy"], row["gpus"]): f"{row['speedup']:.2f}" for row in rows}
    ways = sorted({(row["model"], row["strategy"]) for row in rows if row["strategy"] != "single"})
    lines = [(*way, *(at.get((*way, size), "") for size in sizes)) for way in ways]
    head = ("model", "strategy", *(f"{size} GPUs" for size in sizes))
    return "**Speed over one GPU, honest (Figure 2)**\n\n" + table(head, lines) if lines else ""


def choices(rows: list[Row]) -> str:
    """Figure 6: how often each strategy was chosen, by part of the network."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        kind = ".".join(part for part in row["component"].split(".") if not part.isdigit())
        counts.setdefault((row["model"], kind), Counter()).update([row["choice"]])
    lines = [
        (*part, next(iter(own)) if len(own) == 1 else ", ".join(f"{count} {name}" for name, count in own.items()))
        for part, own in counts.items()
    ]
    title = "**Chosen by the paper's objective with the paper's constants (Figure 6)**\n\n"
    return title + table(("model", "components", "strategy"), lines) if lines else ""


def reading(rows: list[Row]) -> str:
    """Reading R beside the improved problem."""

    def placements(row: Row) -> str:
        return ", ".join(f"{count} `{name}`" for name, count in Counter(row["placements"].values()).items())

    columns = (
        ("model", "{model}"),
        ("problem", "{problem}"),
        ("dynamic programme, ms", lambda row: f"{1e3 * row['exact_s']:.1f}"),
        ("MILP, ms", lambda row: f"{1e3 * row['milp_s']:.1f}"),
        ("solvers", "{verdict}"),
        ("placements", placements),
    )
    title = "**The paper's problem and the improved one, on honest V100s**\n\n"
    return title + row_table(rows, columns) if rows else ""


def region(rows: list[Row]) -> str:
    """The map: per model and batch, the fastest uniform family and what adaptive gains, over links and memory."""

    def point(row: Row) -> str:
        if row["adaptive"] is None:
            return "nothing fits"
        over = "–" if row["gain_over_hp"] is None else f"{row['gain_over_hp']:.0%}"
        uniform = "–" if row["gain_over_uniform"] is None else f"{row['gain_over_uniform']:.1%}"
        return f"{row['fastest_uniform']} {over} / {uniform}{' *' if row['papers_order'] else ''}"

    parts = []
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        own = [row for row in rows if (row["model"], row["batch"]) == (model, batch)]
        links = sorted({row["link"] for row in own}, reverse=True)
        lines = [
            (f"{memory:g} GiB", *(point(row) for row in own if row["memory_gib"] == memory))
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


def bandwidths(rows: list[Row]) -> str:
    """Where the paper's constants, but for the bandwidths, give its order: what adaptive gains over hybrid there."""
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        cells = {bus: [f"{bus:g}"] for bus in sorted({row["bus_gb_per_s"] for row in own})}
        for row in own:
            cells[row["bus_gb_per_s"]].append(f"{row['gain_over_hp']:+.0%}{' *' if row['papers_order'] else ''}")
        stages = (f"stages {stage:g} GB/s" for stage in sorted({row["stage_gb_per_s"] for row in own}))
        parts.append(f"{model}:\n\n" + table(("all_reduce, GB/s", *stages), cells.values()))
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
        scores = [row["accuracy"][way] for row in rows]
        apart = max(row["loss_difference"][way] for row in rows)
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        lines.append((way, f"{statistics.mean(scores):.2%} ± {100 * spread:.2f}", f"{apart:.1e}"))
    head = ("strategy", "test accuracy, mean ± deviation", "largest difference of a step's loss to one process")
    title = f"**Five strategies really run on digits, {len(rows)} seeds, {rows[0]['steps']} steps (Figure 4)**\n\n"
    return title + table(head, lines)
