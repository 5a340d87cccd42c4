"""Claims of decentralised training, from results.json. Parts that were not run compare nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.common.claims import SEEDS, Claim, Judge, Row, claim, mean_of, of_every
from experiments.common.markdown import table

TOLERANCE = 0.02


def claims(document: dict[str, Any]) -> list[Claim]:
    """Specified accuracies, orderings on sorted shards, and published scaling.

    Args:
        document: results.json; an empty one compares nothing.
    """
    figures = [row for row in document.get("figures", []) if len(row["scores"]) >= SEEDS]
    sorted_shards = {row["graph"]: row for row in figures if row["sharding"] == "label_sorted"}
    scores = {name: mean_of(row, "scores") for name, row in sorted_shards.items()}
    distance = {name: row["consensus_before"] for name, row in sorted_shards.items()}
    sent = {name: row["sent_in_weights"] for name, row in sorted_shards.items()}
    scaling = {row["way"]: row["efficiency"] for row in document.get("scaling", [])}
    return [
        *_accuracies(figures),
        _rising("Accuracy on label-sorted shards: ring < Ada < complete", scores, ("ring", "ada", "complete")),
        _rising(
            "Accuracy on label-sorted shards: ring < lattice of 6 < exponential <= complete",
            scores,
            ("ring", "lattice6", "exponential", "complete"),
        ),
        _rising(
            "Distance between replicas: complete < exponential < lattice of 6 < ring",
            distance,
            ("complete", "exponential", "lattice6", "ring"),
        ),
        _rising("Bytes sent: ring < Ada < complete", sent, ("ring", "ada", "complete")),
        *_scaling(scaling),
    ]


RATIOS_AT = (6, 96, 1008)
"""GPUs at which a way is compared with all_reduce."""


def tables(document: dict[str, Any]) -> dict[str, str]:
    """A step at the largest number of GPUs, term by term, with its ratio to all_reduce at several.

    Args:
        document: results.json.
    """
    rows: list[Row] = document.get("times", [])
    if not rows:
        return "No times are committed."
    most = max(row["gpus"] for row in rows)
    ratios = {(row["gpus"], row["algorithm"]): row["against_all_reduce"] for row in rows}
    terms = ("compute_ms", "barrier_ms", "latency_ms", "volume_ms", "hidden_ms", "step_ms")
    head = ("algorithm", "compute", "barrier", "latency", "volume", "hidden", "step", "epoch s", "against all_reduce")
    lines = []
    for row in rows:
        if row["gpus"] == most:
            cells = [f"{row[term]:.2f}" if term == "latency_ms" else f"{abs(row[term]):.1f}" for term in terms]
            against = [
                f"{ratios[gpus, row['algorithm']]:.2f}" if (gpus, row["algorithm"]) in ratios else "-" for gpus in RATIOS_AT
            ]
            lines.append((row["algorithm"], *cells, f"{row['epoch_s']:.2f}", " / ".join(against)))
    text = table(head, lines, words=1)
    return {"decentralized": text}


def named_tables(document: dict[str, Any]) -> dict[str, str]:
    """Accuracies, scaling and whole epochs as Markdown, by the name in the marks of the README.

    Args:
        document: results.json; a part without rows has no table.
    """
    parts = {"specified accuracies": ("figures", _accuracy_table), "scaling": ("scaling", _scaling_table)}
    parts["whole epochs"] = ("epochs", _epoch_table)
    return {name: made(document[part]) for name, (part, made) in parts.items() if document.get(part)}


def _accuracy_table(rows: list[Row]) -> str:
    head = ("shards", "graph", "averaged", "specified", "replicas", "specified", "distance", "specified", "sent, in weights")

    def told(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    lines = [
        (
            row["sharding"].replace("_", "-").replace("iid", "IID"),
            "Ada, 14 - e" if row["graph"] == "ada" else row["graph"],
            f"{row['accuracy']:.3f} ± {row['deviation']:.3f}",
            told(row["specified"]),
            f"{row['replicas']:.3f} ± {row['replicas_deviation']:.3f}",
            told(row["specified_replicas"]),
            f"{row['consensus_before']:.3f}",
            told(row["specified_consensus_before"]),
            f"{row['sent_in_weights']:,.0f}",
        )
        for row in rows
    ]
    return table(head, lines, words=2)


def _scaling_table(rows: list[Row]) -> str:
    head = ("way", "computation, ms", "exchange, ms", "step, ms", "efficiency", "published")
    lines = [
        (
            row["way"],
            *(f"{row[key]:.1f}" for key in ("compute_ms", "exchange_ms", "step_ms")),
            f"{row['efficiency']:.3f}",
            "" if row["published"] is None else f"{row['published']:.2f}",
        )
        for row in rows
    ]
    return table(head, lines, words=1)


def _epoch_table(rows: list[Row]) -> str:
    head = ("way", "GPUs", "rounds", "step, ms", "epoch, s", "by clock, s")
    counts = ("gpus", "rounds")
    lines = [
        (
            row["way"],
            *(f"{row[key]:,}" for key in counts),
            f"{row['step_ms']:.1f}",
            f"{row['epoch_s']:.2f}",
            f"{row['epoch_by_clock_s']:.2f}",
        )
        for row in rows
    ]
    return table(head, lines, words=1)


def _accuracies(figures: list[Row]) -> list[Claim]:
    """Of the averaged model, and of the replicas themselves."""

    def name(row: Row, scores: str, specified: str) -> str:
        return f"{row['sharding']} {row['graph']} ({mean_of(row, scores):.3f}, {row[specified]:.3f})"

    return [
        of_every(
            f"Every specified accuracy {of} is met within {TOLERANCE} over {SEEDS} seeds",
            [row for row in figures if row[specified] is not None],
            lambda row, scores=scores, specified=specified: abs(mean_of(row, scores) - row[specified]) <= TOLERANCE,
            lambda row, scores=scores, specified=specified: name(row, scores, specified),
        )
        for of, scores, specified in (
            ("of the averaged model", "scores", "specified"),
            ("of the replicas", "replica_scores", "specified_replicas"),
        )
    ]


def _scaling(found: Mapping[str, float]) -> list[Claim]:
    central, peers = found.get("all_reduce after the backward"), found.get("one-peer, machine level, combine_adapt")
    return [
        claim(
            "all_reduce scales to 66% (± 12 points) at 128 GPUs, as published",
            None if central is None else abs(central - 0.66) <= 0.12,
            "" if central is None else f"{100 * central:.0f}%",
        ),
        claim(
            "Gossip of machines with one peer scales to at least 92% there, as published",
            None if peers is None else peers >= 0.92,
            "" if peers is None else f"{100 * peers:.0f}%",
        ),
    ]


def _rising(text: str, values: Mapping[str, float], names: tuple[str, ...]) -> Claim:
    if not set(names) <= set(values):
        return claim(text, None)
    own = [values[name] for name in names]
    return claim(text, own == sorted(own), ", ".join(f"{value:.3f}" if value < 10 else f"{value:,.0f}" for value in own))


JUDGES = {"decentralized": Judge(claims=claims, tables=lambda document: tables(document) | named_tables(document))}
