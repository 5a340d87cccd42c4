"""Claims and tables of mixed plans, of the controller and of profiles that learn, from results.json."""

from __future__ import annotations

import re
from statistics import median
from typing import Any

from experiments.adaptive.judge_parallelism import parallelism_claims, parallelism_tables
from experiments.common.catalogue import recorded
from experiments.common.claims import UNRESOLVED, Claim, Judge, Row, claim, of_every
from experiments.common.markdown import row_table, table


def mixing_claims(document: dict[str, Any]) -> list[Claim]:
    """Where mixing pays, and where it does not."""
    rows = document.get("rows", [])
    vgg = {row["batch"]: gain(row) for row in rows if row["model"] == "vgg16" and row["memory_gib"] == 32.0}
    vit = [row for row in rows if row["model"] == "vit_b_16" and row["memory_gib"] == 32.0]
    largest = max(vgg.values(), default=None)
    return [
        claim(
            "A mixed plan of VGG-16 on eight V100s takes at least 20% less time than the best uniform plan at some batch",
            None if largest is None else largest >= 0.20,
            "" if largest is None else f"{100 * largest:.1f}% less at most",
        ),
        of_every(
            "For ViT-B/16 plain data parallelism is the best plan found where it fits",
            vit,
            lambda row: row["adaptive_ms"] == row["dp_ms"],
            lambda row: f"batch {row['batch']}",
        ),
    ]


def gain(row: dict[str, Any]) -> float:
    """Share of time saved, from its text in percent."""
    return float(str(row["less_time_than_best_uniform"]).rstrip("%")) / 100


def mixing_tables(document: dict[str, Any]) -> dict[str, str]:
    """The best simulated plan of each family as Markdown, milliseconds."""
    columns = (
        ("model", "{model}"),
        ("batch", "{batch}"),
        ("memory per device", "{memory_gib:g} GiB"),
        *((f"{family} ms", f"{{{family}_ms}}") for family in ("dp", "mp", "hp", "adaptive")),
        ("less than the best uniform", "{less_time_than_best_uniform}"),
        ("kinds", lambda row: row["mixes"].replace("+", ", ")),
    )
    cases = {(row["model"], row["batch"], row["memory_gib"]): row for row in document["rows"]}
    return {"mixing": row_table(cases.values(), columns, words=1)}


SHORT = "link slow for 4 windows"
POLICIES = {
    "first values": "rule as first written",
    "tuned": "tuned",
    "default": "default",
    "no probes": "default, never probing other plans' links",
    "probes at epoch ends too": "default, probing at every epoch's end too",
}


def tuning_claims(document: dict[str, Any]) -> list[Claim]:
    """Regret on held-out courses, and rest where nothing happens."""
    gap = document.get("tuned_minus_first")
    text = "On held-out courses of events the tuned parameters leave less regret than the rule as first written"
    if gap is None:
        first = claim(text, None)
    else:
        told = f"{100 * gap['mean']:+.2f}% of the oracle's time (95%: {100 * gap['low']:+.2f}% to {100 * gap['high']:+.2f}%)"
        open_ = gap["low"] < 0 < gap["high"]
        first = Claim(text=text, verdict=UNRESOLVED, found=told) if open_ else claim(text, gap["high"] <= 0, told)
    quiet = document.get("switches_when_nothing_happens", {}).get("tuned")
    told = "" if quiet is None else f"{quiet:.3f} switches per run"
    return [
        first,
        claim("The tuned controller does not switch when nothing happens", None if quiet is None else quiet == 0, told),
        short(document.get("by_scenario", [])),
    ]


def short(rows: list[Row]) -> Claim:
    """The belief about durations where it is meant to help, from regret by scenario and policy."""
    text = f"The default controller loses less than half of what the tuned one does where a {SHORT}"
    found = next((row for row in rows if row["scenario"] == SHORT), None)
    if found is None:
        return claim(text, None)
    told = f"{100 * found['default']:.1f}% beside {100 * found['tuned']:.1f}%"
    return claim(text, found["default"] < found["tuned"] / 2, told)


def tuning_tables(document: dict[str, Any]) -> dict[str, str]:
    """Policies over all held-out cases, and regret by scenario, as Markdown."""
    whole, rows = document["held_out"], document["by_scenario"]
    policies = [
        ["stay with the first plan", f"{100 * rows[-1]['stay']:.2f}%", "0", "0"],
        ["best single plan, known afterwards", f"{100 * rows[-1]['best static']:.2f}%", "0", "0"],
    ]
    for name, text in POLICIES.items():
        row = whole[name]
        policies.append([text, f"{100 * row['regret']:.2f}%", f"{row['switches']:.2f}", f"{row['plannings']:.2f}"])
    shown = ("stay", "best static", "first values", "tuned", "default")
    scenarios = [[row["scenario"], *(f"{100 * row[name]:.2f}%" for name in shown)] for row in rows]
    first = table(("policy, held out", "regret", "switches", "plannings"), policies, words=1)
    return {"adaptive_tuning": f"{first}\n\n{table(('scenario, held out', *shown), scenarios, words=1)}"}


WAYS = ("adaptive", "start", "other")
PAIRS = 10
SOONER = 8
"""Pairs of PAIRS in which the adaptive run has to end first."""
TOLERANCE = 1e-10


KINDS = {"link": "the link is shaped", "throttled": "a rank is throttled"}


def live_claims(document: dict[str, Any]) -> list[Claim]:
    """The races, the rest of the undisturbed, and the equality of what is trained."""
    pairs = by_pair(document.get("rows", []))
    quiet = [pair["adaptive"] for name, pair in pairs.items() if name.startswith("quiet") and "adaptive" in pair]
    rest = f"In {PAIRS} undisturbed runs the plan is never changed"
    switched = sum(bool(row["switches"]) for row in quiet)
    return [
        *(race(pairs, kind, document.get("no_link", "") if kind == "link" else "") for kind in KINDS),
        claim(rest, None, too_few(quiet))
        if len(quiet) < PAIRS
        else claim(rest, switched == 0, f"{switched} of {len(quiet)} changed plan"),
        equality(pairs.get("float64", {}), document.get("weights_differ_by")),
    ]


def race(pairs: dict[str, dict[str, Row]], kind: str, skipped: str) -> Claim:
    """Whether the adaptive runs end first under a disturbance of KINDS. skipped: why there was no such race; "": there was."""
    text = f"A run that may change plan ends before the best fixed plan in {SOONER} of {PAIRS} pairs in which {KINDS[kind]}"
    races = [pair for name, pair in pairs.items() if name.startswith(kind) and {"adaptive", "start", "other"} <= pair.keys()]
    if len(races) < PAIRS:
        return claim(text, None, f"skipped: {skipped}" if skipped else too_few(races))
    gains = [1 - pair["adaptive"]["seconds"] / min(pair[way]["seconds"] for way in ("start", "other")) for pair in races]
    sooner = sum(gain > 0 for gain in gains)
    return claim(text, sooner >= SOONER, f"{sooner} of {len(races)}; the median ends {100 * median(gains):.1f}% sooner")


def equality(pair: dict[str, Row], weights: float | None) -> Claim:
    """Whether a training that changed plan in float64 lost the same at every step, and ended with the same weights.

    pair: its rows by way. weights: the largest difference of any at the end; None: not compared.
    """
    text = f"Losses and weights of a run that changed plan equal those of one that did not to {TOLERANCE:g} in float64"
    if not {"adaptive", "start"} <= pair.keys():
        return claim(text, None, "the pair was not trained")
    changed, straight = pair["adaptive"], pair["start"]
    if not changed["switches"]:
        return claim(text, None, "the plan was not changed")
    largest = max(abs(one - other) for one, other in zip(changed["losses"], straight["losses"], strict=True))
    step = changed["switches"][0]["step"]
    if weights is None:
        return claim(text, None, "the weights were not compared")
    said = f"losses {largest:.1e} over {changed['steps']} steps, weights {weights:.1e}, changed at step {step}"
    return claim(text, max(largest, weights) <= TOLERANCE, said)


def by_pair(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Rows by name of the pair and way."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["pair"], {})[row["way"]] = row
    return found


def too_few(rows: list[Any]) -> str:
    return f"{len(rows)} of {PAIRS} were run"


def live_tables(document: dict[str, Any]) -> dict[str, str]:
    """Markdown: seconds of every pair, switches as predicted and as measured, and beside them the simulator's regrets."""
    head = ("pair", *WAYS, "disturbed after", "changed after", "planning", "switch predicted", "switch measured")
    lines = []
    for name, pair in by_pair(document["rows"]).items():
        own = pair.get("adaptive", {})
        changes = own.get("switches", [])
        told = [
            str(own.get("disturbed_after") or ""),
            ", ".join(str(entry["step"]) for entry in changes),
            ", ".join(f"{1e3 * seconds:.0f} ms" for seconds in [sum(own.get("plannings_s", []))] if seconds),
            ", ".join(f"{1e3 * entry['predicted_switch_s']:.0f} ms" for entry in changes),
            ", ".join(f"{1e3 * entry['switch_s']:.0f} ms" for entry in changes),
        ]
        lines.append([name, *(f"{pair[way]['seconds']:.1f} s" if way in pair else "" for way in WAYS), *told])
    plans = table(("fixed plan", "what it is"), document["plans"].items())
    text = "\n\n".join((plans, table(head, lines), regrets(recorded("adaptive_tuning") or {})))
    return {"live_replanning": text}


def regrets(simulated: dict[str, Any]) -> str:
    """The same controller in simulated training: time over the oracle's, minus 1."""
    head = ("simulated on 8 GPUs, held out", "stay", "best static", "default controller")
    keys = ("stay", "best static", "default")
    return table(head, [[row["scenario"], *(f"{100 * row[key]:.2f}%" for key in keys)] for row in simulated["by_scenario"]])


TARGET = 5.0


def closed_loop_claims(document: dict[str, Any]) -> list[Claim]:
    """The median error of each cause after one run of 20 steps, and after the cause is gone and seen to be."""
    rows = document.get("rows", [])
    return [
        of_every(
            f"{text} the median error of the next prediction is at most {TARGET:.0f}% for every cause and noise",
            rows,
            lambda row, stage=stage: middle(row[stage]) <= TARGET,
            lambda row, stage=stage: f"{row['cause']}, noise {row['noise']} ({row[stage]})",
        )
        for text, stage in (("After 20 steps of a change", "after"), ("After 20 steps without it again", "undone"))
    ]


def middle(text: str) -> float:
    """The median from its text, "1.2% (worst ...". Raises ValueError where the text begins otherwise."""
    found = re.match(r"([\d.]+)%", text)
    if found is None:
        raise ValueError(f"no median in {text!r}")
    return float(found.group(1))


JUDGES = {
    "adaptive_parallelism": Judge(claims=parallelism_claims, tables=parallelism_tables),
    "mixing": Judge(claims=mixing_claims, tables=mixing_tables),
    "adaptive_tuning": Judge(claims=tuning_claims, tables=tuning_tables),
    "live_replanning": Judge(claims=live_claims, tables=live_tables),
    "closed_loop": Judge(claims=closed_loop_claims),
}
