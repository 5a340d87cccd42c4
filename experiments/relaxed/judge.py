"""Claims and tables of relaxed synchronisation, from results.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import NormalDist
from typing import Any

from experiments.common.claims import SEEDS, Claim, Judge, Row, claim, mean_of, of_every
from experiments.common.markdown import row_table, table

GRAPHS_TOLERANCE = 0.02


def graphs_claims(document: dict[str, Any]) -> list[Claim]:
    """Specified accuracies, orderings on sorted shards, and published scaling."""
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


def graphs_tables(document: dict[str, Any]) -> dict[str, str]:
    """Accuracies; scaling; a step at the largest number of GPUs, term by term; whole epochs."""
    tables = {"decentralized": _step_table(document.get("times", []))}
    for name, part, columns, words in (
        ("specified accuracies", "figures", ACCURACY_COLUMNS, 2),
        ("scaling", "scaling", SCALING_COLUMNS, 1),
        ("whole epochs", "epochs", EPOCH_COLUMNS, 1),
    ):
        if document.get(part):
            tables[name] = row_table(document[part], columns, words=words)
    if document.get("ada"):
        sorted_shards = [row for row in document["ada"] if row["sharding"] == "label_sorted"]
        tables["schedules"] = row_table(
            sorted(sorted_shards, key=lambda row: row["sent_in_weights"]), SCHEDULE_COLUMNS, words=1
        )
    for part in ("dbench", "normalised"):
        if document.get(part):
            tables[part] = _bench_table(document[part])
            tables[f"{part} ranks"] = _ranks_table(document[f"{part}_ranks"])
            tables[f"{part} relations"] = _relations_table(document[f"{part}_relations"])
    if document.get("curves"):
        last = {row["way"]: row for row in document["curves"]}
        tables["curves"] = row_table(last.values(), CURVE_COLUMNS, words=1)
    return tables


def _grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of some of their columns, in the order of their first."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _shards(kind: str) -> str:
    return kind.replace("_", "-").replace("iid", "IID")


def _bench_table(rows: list[Row]) -> str:
    """Accuracy of the averaged model by model, shards and way, for each number of replicas in turn."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = []
    for (model, sharding), group in _grouped(rows, "model", "sharding").items():
        scores = {way: [f"{row['score']:.3f}" for row in group if row["way"] == way] for way in ways}
        counts = " / ".join(str(row["n"]) for row in group if row["way"] == ways[0])
        lines.append((model, _shards(sharding), counts, *(" / ".join(scores[way]) for way in ways)))
    return table(("model", "shards", "replicas", *ways), lines, words=2)


def _ranks_table(rows: list[Row]) -> str:
    """Mean rank of every way by variance, over models and numbers of replicas."""
    ways = [key for key in rows[0] if key not in ("model", "n", "sharding", "metric", "tau_with_score")]
    lines = [
        (f"{_shards(sharding)}: {metric.replace('_', ' ')}", *(f"{_mean(group, key):.2f}" for key in (*ways, "tau_with_score")))
        for (sharding, metric), group in _grouped(rows, "sharding", "metric").items()
    ]
    return table(("metric", *ways, "tau with accuracy"), lines, words=1)


def _relations_table(rows: list[Row]) -> str:
    """Kendall's tau of accuracy, and of the replicas' own, over the ways: means over models."""
    settings = list(_grouped(rows, "sharding", "n"))
    taus = ("tau_with_score", "tau_with_mean_replica_score")
    lines = []
    for (of,), group in _grouped(rows, "of").items():
        by_setting = _grouped(group, "sharding", "n")
        cells = (", ".join(f"{_mean(by_setting[setting], tau):.2f}" for tau in taus) for setting in settings)
        lines.append((of.replace("_", " "), *cells))
    heads = (f"{_shards(sharding)}, n = {n}" for sharding, n in settings)
    return table(("tau with", *heads), lines, words=1)


def _mean(rows: Sequence[Row], key: str) -> float:
    return math.fsum(row[key] for row in rows) / len(rows)


def _step_table(rows: list[Row]) -> str:
    """With the ratio of a step to that of all_reduce at several numbers of GPUs."""
    if not rows:
        return "No times are committed."
    most = max(row["gpus"] for row in rows)
    ratios = {(row["gpus"], row["algorithm"]): f"{row['against_all_reduce']:.2f}" for row in rows}
    columns = (
        ("algorithm", "{algorithm}"),
        ("compute", "{compute_ms:.1f}"),
        ("barrier", "{barrier_ms:.1f}"),
        ("latency", "{latency_ms:.2f}"),
        ("volume", "{volume_ms:.1f}"),
        ("hidden", lambda row: f"{abs(row['hidden_ms']):.1f}"),
        ("step", "{step_ms:.1f}"),
        ("epoch s", "{epoch_s:.2f}"),
        ("against all_reduce", lambda row: " / ".join(ratios.get((gpus, row["algorithm"]), "-") for gpus in RATIOS_AT)),
    )
    return row_table([row for row in rows if row["gpus"] == most], columns, words=1)


def _if_there(key: str, digits: int = 3) -> Callable[[Row], str]:
    """A figure of a row, or nothing where it has none."""
    return lambda row: "" if row[key] is None else f"{row[key]:.{digits}f}"


ACCURACY_COLUMNS = (
    ("shards", lambda row: _shards(row["sharding"])),
    ("graph", lambda row: "Ada, 14 - e" if row["graph"] == "ada" else row["graph"]),
    ("averaged", "{accuracy:.3f} ± {deviation:.3f}"),
    ("specified", _if_there("specified")),
    ("replicas", "{replicas:.3f} ± {replicas_deviation:.3f}"),
    ("specified", _if_there("specified_replicas")),
    ("distance", "{consensus_before:.3f}"),
    ("specified", _if_there("specified_consensus_before")),
    ("sent, in weights", "{sent_in_weights:,.0f}"),
)
SCHEDULE_COLUMNS = (
    ("graph", "{graph}"),
    ("averaged", "{accuracy:.3f} ± {deviation:.3f}"),
    ("replicas", "{replicas:.3f}"),
    ("sent, in weights", "{sent_in_weights:,.0f}"),
)
CURVE_COLUMNS = (
    ("way", "{way}"),
    ("seconds", "{seconds:.1f}"),
    ("accuracy", "{accuracy:.3f}"),
    ("waiting", "{waiting_fraction_at_the_end:.2f}"),
)
SCALING_COLUMNS = (
    ("way", "{way}"),
    ("computation, ms", "{compute_ms:.1f}"),
    ("exchange, ms", "{exchange_ms:.1f}"),
    ("step, ms", "{step_ms:.1f}"),
    ("efficiency", "{efficiency:.3f}"),
    ("published", _if_there("published", 2)),
)
EPOCH_COLUMNS = (
    ("way", "{way}"),
    ("GPUs", "{gpus:,}"),
    ("rounds", "{rounds:,}"),
    ("step, ms", "{step_ms:.1f}"),
    ("epoch, s", "{epoch_s:.2f}"),
    ("by clock, s", "{epoch_by_clock_s:.2f}"),
)


def _accuracies(figures: list[Row]) -> list[Claim]:
    """Claims about the averaged model, and about the replicas themselves."""
    return [
        of_every(
            f"Every specified accuracy {of} is met within {GRAPHS_TOLERANCE} over {SEEDS} seeds",
            [row for row in figures if row[specified] is not None],
            lambda row, scores=scores, specified=specified: abs(mean_of(row, scores) - row[specified]) <= GRAPHS_TOLERANCE,
            lambda row, scores=scores, specified=specified: (
                f"{row['sharding']} {row['graph']} ({mean_of(row, scores):.3f}, {row[specified]:.3f})"
            ),
        )
        for of, scores, specified in (
            ("of the averaged model", "scores", "specified"),
            ("of the replicas", "replica_scores", "specified_replicas"),
        )
    ]


def _scaling(efficiencies: Mapping[str, float]) -> list[Claim]:
    central, peers = (
        efficiencies.get("all_reduce after the backward"),
        efficiencies.get("one-peer, machine level, combine_adapt"),
    )
    return [
        claim(
            "all_reduce scales to 66% (± 12 points) at 128 GPUs, as published",
            None if central is None else abs(central - 0.66) <= 0.12,
            "" if central is None else f"{central:.0%}",
        ),
        claim(
            "Gossip of machines with one peer scales to at least 92% there, as published",
            None if peers is None else peers >= 0.92,
            "" if peers is None else f"{peers:.0%}",
        ),
    ]


def _rising(text: str, values: Mapping[str, float], names: tuple[str, ...]) -> Claim:
    if not set(names) <= set(values):
        return claim(text, None)
    in_order = [values[name] for name in names]
    shown = ", ".join(f"{value:.3f}" if value < 10 else f"{value:,.0f}" for value in in_order)
    return claim(text, in_order == sorted(in_order), shown)


AVERAGING_TOLERANCE = 0.015
AVERAGING_EPOCHS = 20


def averaging_claims(document: dict[str, Any]) -> list[Claim]:
    """Orderings, specified accuracies and the straggler's price."""
    scaling: list[Row] = document.get("scaling", [])
    scores = {
        (row["rule"], row["workers"]): mean_of(row)
        for row in scaling
        if row["epochs"] == AVERAGING_EPOCHS and len(row["scores"]) >= SEEDS
    }
    counts = sorted(count for kind, count in scores if kind == "average")
    both = [count for count in counts if ("half", count) in scores]
    specified = [row for row in scaling if row["specified"] is not None and len(row["scores"]) >= SEEDS]
    straggler = {row["rule"]: row["epochs_per_s_against_no_straggler"] for row in document.get("straggler", [])}
    slow, merged = straggler.get("average"), straggler.get("half")
    return [
        of_every(
            f"Every specified accuracy is met within {AVERAGING_TOLERANCE} over {SEEDS} seeds",
            specified,
            lambda row: abs(mean_of(row) - row["specified"]) <= AVERAGING_TOLERANCE,
            lambda row: f"{row['rule']} P={row['workers']} {row['epochs']} epochs ({mean_of(row):.3f}, {row['specified']:.3f})",
        ),
        of_every(
            "Accuracy of averaging falls with the number of workers",
            list(pairwise(counts)),
            lambda pair: scores["average", pair[0]] > scores["average", pair[1]],
            lambda pair: f"{pair[0]} to {pair[1]} workers",
        ),
        of_every(
            "Merging by halves is at most .01 more accurate than averaging",
            both,
            lambda count: scores["half", count] <= scores["average", count] + 0.01,
            lambda count: f"P={count}",
        ),
        claim(
            "A worker at half speed halves the rate of averaging",
            None if slow is None else abs(slow - 0.5) <= 0.005,
            "" if slow is None else f"{slow:.3f} of the rate",
        ),
        claim(
            "Merging keeps at least .93 of (7 + .5)/8 of the rate",
            None if merged is None else merged >= 0.93 * 7.5 / 8,
            "" if merged is None else f"{merged:.3f} of the rate",
        ),
    ]


def averaging_tables(document: dict[str, Any]) -> dict[str, str]:
    """Accuracy by workers and rule; by period; on shards that differ; with a straggler."""
    cells = {(row["rule"], row["workers"], row["epochs"]): row for row in document["scaling"]}
    short = list(dict.fromkeys(rule for rule, _, epochs in cells if epochs == AVERAGING_EPOCHS))
    kinds = [*((rule, AVERAGING_EPOCHS) for rule in short), ("average", 2 * AVERAGING_EPOCHS)]
    workers = dict.fromkeys(count for _, count, _ in cells)
    lines = [(str(count), *(_averaged(cells.get((rule, count, epochs))) for rule, epochs in kinds)) for count in workers]
    heads = ("workers", *(f"{rule}, {epochs} epochs" for rule, epochs in kinds))
    score = ("accuracy", "{score:.3f} ± {deviation:.3f}")
    straggler = (
        ("rule", "{rule}"),
        ("local epochs done", "{local_epochs}"),
        ("rate against no straggler", "{epochs_per_s_against_no_straggler:.3f}"),
        score,
    )
    return {
        "averaging": table(heads, lines, words=0),
        "periods": row_table(document["periods"], (("averaged", "{rule}"), ("exchanges", "{exchanges}"), score), words=1),
        "federated": row_table(document["federated"], (("setting", "{setting}"), score), words=1),
        "straggler": row_table(document["straggler"], straggler, words=1),
    }


def _averaged(row: Row | None) -> str:
    """Accuracy, and the specified one in brackets."""
    if row is None:
        return ""
    return f"{row['score']:.3f}" + (f" ({row['specified']:.3f})" if row["specified"] is not None else "")


STALE_TOLERANCE = 0.02
EPOCH_TOLERANCE = 0.10

ORDER = ("bp", "ddg", "fr", "fdg")
"""Of the algorithms in tables."""


def stale_claims(document: dict[str, Any]) -> list[Claim]:
    """Accuracies, orderings of epoch times and the printed cells."""
    enough = [row for row in document.get("accuracy", []) if len(row["scores"]) >= SEEDS]
    specified = [row for row in enough if row["expected"] is not None]
    by_name = {row["case"]: mean_of(row) for row in enough}
    slow, fast = by_name.get("fdg K=4 stash lr .05 beta .5"), by_name.get("fdg K=4 stash lr .05")
    times: list[Row] = document.get("epoch_times", [])
    seconds = {(row["algorithm"], row["K"]): row["simulated_s"] for row in times}
    modules = sorted({count for name, count in seconds if name == "fdg"})
    return [
        of_every(
            f"Every specified accuracy is met within {STALE_TOLERANCE} over {SEEDS} seeds",
            specified,
            lambda row: abs(mean_of(row) - row["expected"]) <= STALE_TOLERANCE,
            lambda row: f"{row['case']} ({mean_of(row):.3f}, {row['expected']:.3f})",
        ),
        claim(
            "Gradient shrinking of .5 slows a short run",
            None if slow is None or fast is None else slow < fast,
            "" if slow is None or fast is None else f"{slow:.3f} against {fast:.3f}",
        ),
        of_every(
            "FDG < DDG < FR < BP in epoch time",
            modules,
            lambda k: seconds["fdg", k] < seconds["ddg", k] < seconds["fr", k] < seconds["bp", 1],
            lambda k: f"K={k}",
        ),
        of_every(
            "One overhead explains every printed WRN-28-10 epoch within 10%",
            times,
            lambda row: abs(row["error"]) <= EPOCH_TOLERANCE,
            lambda row: f"{row['algorithm']} K={row['K']} ({100 * row['error']:+.1f}%)",
        ),
    ]


def stale_tables(document: dict[str, Any]) -> dict[str, str]:
    """Accuracy, epoch times and speed-ups as Markdown, by the name in the marks of the README."""
    accuracy = (
        ("case", "{case}"),
        ("delay, updates", "{staleness_updates}"),
        ("mode", "{mode}"),
        ("accuracy", "{accuracy:.3f} ± {deviation:.3f}"),
        ("specified", _if_there("expected")),
        ("difference", lambda row: "" if row["expected"] is None else f"{row['accuracy'] - row['expected']:+.3f}"),
    )
    epochs = (
        ("algorithm", lambda row: row["algorithm"].upper()),
        ("K", "{K}"),
        ("simulated s", "{simulated_s:.1f}"),
        ("printed s", "{printed_s:.1f}"),
        ("error", "{error:+.1%}"),
    )
    speedups = (
        ("K", "{K}"),
        ("batches", "{batches}"),
        ("closed form", "{closed_form:.3f}"),
        ("simulated", "{simulated:.3f}"),
        ("activations held (batches, all modules)", "{batches_of_activations_held}"),
    )
    images = [
        {"K": modules, "S": groups, **{name: _over_seeds(group, name) for name in ("scores", "drained")}}
        for (modules, groups), group in _grouped(document.get("images", []), "K", "S").items()
    ]
    on_images = (
        ("K", "{K}"),
        ("S", "{S}"),
        *((f"epoch {epoch}", lambda row, epoch=epoch: f"{row['scores'][epoch - 1]:.3f}") for epoch in (1, 4, 8, 12)),
        ("drained", "{drained[0]:.3f}"),
    )
    by_algorithm = sorted(document["epoch_times"], key=lambda row: (ORDER.index(row["algorithm"]), row["K"]))
    return {
        "accuracy": row_table(document["accuracy"], accuracy, words=1),
        **({"images": row_table(images, on_images, words=0)} if images else {}),
        "epoch times": row_table(by_algorithm, epochs, words=1),
        "speed-up": row_table(document["speedup"], speedups, words=0),
    }


def _over_seeds(rows: Sequence[Row], key: str) -> list[float]:
    """Figures by place, or one alone: means over seeds."""
    figures = [row[key] if isinstance(row[key], list) else [row[key]] for row in rows]
    return [math.fsum(each) / len(each) for each in zip(*figures, strict=True)]


AIM = 0.10


def steps_claims(document: dict[str, Any]) -> list[Claim]:
    """The median error, and the intervals."""
    summary = document.get("summary", {})
    at_speed, rows = summary.get("median_error_at_speed"), summary.get("rows", 0)
    held = summary.get("within_interval")
    return [
        claim(
            f"The median error of a relaxed step is at most {100 * AIM:.0f}%, at the cores' speed beside the run",
            None if at_speed is None else at_speed <= AIM,
            "" if at_speed is None else f"{100 * at_speed:.2f}% of {rows} plans",
        ),
        claim(
            "At least 85% of measured steps lie within the 90% interval",
            None if held is None or not rows else held >= 0.85 * rows,
            "" if held is None else f"{held} of {rows}",
        ),
    ]


def steps_tables(document: dict[str, Any]) -> dict[str, str]:
    """Predicted and measured steps as Markdown."""
    columns = (
        ("case", "{case}"),
        ("synchronisation", "`{rule}`"),
        ("predicted ms", lambda row: f"{1e3 * row['predicted_s']:.1f}"),
        ("measured ms", lambda row: f"{1e3 * row['measured_s']:.1f}"),
        ("error", "{error:+.0%}"),
        ("error at the cores' speed", "{error_at_speed:+.1%}"),
    )
    return {"relaxed": row_table(document["rows"], columns, words=2)}


def periods_claims(document: dict[str, Any]) -> list[Claim]:
    """The median error by the ranks' own clocks, the intervals, and that either clock finds the same where ranks meet."""
    summary, rows = document.get("summary", {}), document.get("rows", [])
    at_speed, held = summary.get("median_error_at_speed"), summary.get("within_interval")
    met = [abs(row["first_to_last_s"] / row["measured_s"] - 1) for row in rows if row["rule"] == "average/1"]
    return [
        claim(
            f"The median error of a training's step is at most {100 * TRAINED:.0f}%, at the cores' speed beside the run",
            None if at_speed is None else at_speed <= TRAINED,
            "" if at_speed is None else f"{100 * at_speed:.2f}% of {len(rows)} trainings",
        ),
        claim(
            "85 to 95% of measured steps lie within the 90% interval",
            None if held is None or not rows else 0.85 * len(rows) <= held <= 0.95 * len(rows),
            "" if held is None else f"{held} of {len(rows)}",
        ),
        claim(
            "Where replicas meet after every step, both clocks agree within 5%",
            max(met) <= 0.05 if met else None,
            "" if not met else f"apart by up to {100 * max(met):.1f}%",
        ),
    ]


TRAINED = 0.05
"""Aim of the median error of trained steps."""


def periods_tables(document: dict[str, Any]) -> dict[str, str]:
    """Predicted and measured steps of trainings as Markdown."""
    columns = (
        ("synchronisation", "`{rule}`"),
        ("predicted ms", lambda row: f"{1e3 * row['predicted_s']:.2f}"),
        ("90% interval", lambda row: f"{1e3 * row['p05_s']:.2f} to {1e3 * row['p95_s']:.2f}"),
        ("measured ms", lambda row: f"{1e3 * row['measured_s']:.2f}"),
        ("error", "{error:+.0%}"),
        ("error at the cores' speed", "{error_at_speed:+.1%}"),
        ("first to last rank, ms", lambda row: f"{1e3 * row['first_to_last_s']:.2f}"),
        ("ranks apart, ms", lambda row: f"{1e3 * row['skew_s']:.2f}"),
    )
    return {"trained periods": row_table(document["rows"], columns, words=1)}


PAIRS = 30
WON = 0.9
TOLD_APART = 0.9
"""Probability, by the stated doubt of two predictions, from which on they are told apart."""
APART = 0.05
"""Executed seconds that differ by less are called a tie: two measurements of one plan differ by as much here."""
WORKERS, BATCH = 64, 32
EPOCH_STEPS = {"CIFAR-10": 50_000 // (WORKERS * BATCH), "ImageNet": 1_281_167 // (WORKERS * BATCH)}
SAVED = 0.95
"""What the source of epoch averaging claims at 64 workers, against a baseline that it does not state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two rules of one case: won, whether the predicted winner won. gap: by how much the executed seconds differ. probability:
    with which the prediction named its winner; None: not stated. error: |log| of predicted over executed ratio; inf: one did
    not reach the target."""

    won: bool
    gap: float
    probability: float | None
    error: float


def pairs(document: dict[str, Any]) -> list[Pair]:
    """A way that was executed and did not reach the target is slower than any that did; two of them are not compared."""
    rows = [row for row in document.get("rows", []) if row["predicted_s"] is not None and row["rounds"]]
    compared = []
    for one, other in combinations(rows, 2):
        first, second = (math.inf if row["executed_s"] is None else float(row["executed_s"]) for row in (one, other))
        if one["case"] != other["case"] or one["predicted_s"] == other["predicted_s"] or math.inf == first == second:
            continue
        predicted = math.log(one["predicted_s"] / other["predicted_s"])
        doubts = [row.get("log_deviation") for row in (one, other)]
        compared.append(
            Pair(
                won=(predicted < 0) == (first < second),
                gap=max(first, second) / min(first, second) - 1,
                probability=None if None in doubts else NormalDist().cdf(abs(predicted) / math.hypot(*doubts)),
                error=math.inf if math.inf in (first, second) else abs(predicted - math.log(first / second)),
            )
        )
    return compared


def _of(pairs: list[Pair]) -> str:
    return f"{sum(pair.won for pair in pairs)} of {len(pairs)}"


def races_claims(document: dict[str, Any]) -> list[Claim]:
    """How often the predicted winner wins: over all pairs, those apart, and and those told apart."""
    every = pairs(document)
    apart = [pair for pair in every if pair.gap > APART]
    told = [pair for pair in every if pair.probability is not None and pair.probability >= TOLD_APART]

    def holds(some: list[Pair]) -> bool | None:
        return sum(pair.won for pair in some) >= WON * len(some) if some else None

    return [
        claim(
            f"At least {PAIRS} pairs of rules were executed",
            len(every) >= PAIRS if every else None,
            f"{len(every)} were" if every else "",
        ),
        claim(
            f"The predicted winner of a pair wins when executed, in at least {100 * WON:.0f}% of the pairs",
            holds(every),
            f"{_of(every)}; {_of(apart)} that differ by more than {100 * APART:.0f}%" if every else "",
        ),
        claim(
            f"So it does in the pairs whose winner is predicted with a probability of at least {100 * TOLD_APART:.0f}%",
            holds(told),
            _of(told) if told else "",
        ),
    ]


def workers_claims(document: dict[str, Any]) -> list[Claim]:
    """Time saved by averaging once per epoch, and by 64 workers over one, with what the source's figure would need."""
    steps, alone = document.get("less_time", []), document.get("one_worker", {})
    most = {name: max((1 - row[name] / row["all_reduce_s"] for row in steps), default=0.0) for name in EPOCH_STEPS}
    needs = ", ".join(
        f"on {name} ({count} steps an epoch) {share:.0%} at most, and " + _needed(needed_ratio(SAVED, count))
        for (name, count), share in zip(EPOCH_STEPS.items(), most.values(), strict=True)
    )
    reached = [row for row in document.get("rows", []) if row["predicted_s"] is not None]
    best = min(reached, key=lambda row: row["predicted_s"], default=None)
    saved = None if best is None or not alone.get("seconds") else 1 - best["predicted_s"] / alone["seconds"]
    return [
        claim(
            f"Averaging once per epoch saves {SAVED:.0%} of the time of all_reduce on 64 workers, as published",
            max(most.values()) >= SAVED if steps else None,
            needs if steps else "",
        ),
        claim(
            f"64 workers save {SAVED:.0%} of the time of one worker, as published",
            None if saved is None else saved >= SAVED,
            ""
            if best is None or saved is None
            else f"{saved:.0%} with {best['rule']}, in {best['steps'] / alone['steps']:.0%} of the steps; "
            f"with steps as long as one worker's, {1 - SAVED:.0%} of the steps would do",
        ),
    ]


def _needed(ratio: float | None) -> str:
    return (
        "no network is slow enough" if ratio is None else f"an all_reduce would have to take {ratio:.0f} times the computation"
    )


def needed_ratio(saved: float, epoch_steps: int, more_steps: float = 1.0) -> float | None:
    """How many times the computation c an all_reduce a must take, for averaging once per epoch to save so much of the time, by
    r (c + a / H) = (1 - saved) (c + a). None: no network is slow enough.

    Args: epoch_steps: H. more_steps: r, the steps that averaging needs over those of all_reduce.
    """
    remaining = 1.0 - saved
    share = remaining - more_steps / epoch_steps
    return (more_steps - remaining) / share if share > 0 else None


def doubt_of_ratios(document: dict[str, Any]) -> float:
    """By what factor the predicted ratio of two rules was wrong in 90% of the executed pairs."""
    errors = sorted(pair.error for pair in pairs(document))
    return math.exp(errors[int(0.9 * (len(errors) - 1))]) if errors else math.inf


def races_tables(document: dict[str, Any]) -> dict[str, str]:
    """Predicted and executed seconds as Markdown."""

    def executed(key: str, digits: int) -> Callable[[Row], str]:
        missing = {True: "not reached", False: "not run"}
        return lambda row: missing[bool(row["rounds"])] if row[key] is None else f"{row[key]:.{digits}f}"

    columns = (
        ("case", "{case}, {target:.0%}"),
        ("synchronisation", "`{rule}`"),
        ("predicted s", lambda row: _if_there("predicted_s", 2)(row) or "not reached"),
        ("steps", _if_there("predicted_steps", 0)),
        ("executed s", executed("executed_s", 2)),
        ("steps executed", executed("executed_steps", 0)),
    )
    return {"time_to_accuracy": row_table(document["rows"], columns, words=2)}


def workers_tables(document: dict[str, Any]) -> dict[str, str]:
    """The ranking at 64 workers, and what averaging saves per step by network."""
    return {"at 64 workers": _table_of_64(document), "less time": _saving_table(document["less_time"])}


def many_claims(document: dict[str, Any]) -> list[Claim]:
    """Orderings of sparse and dense graphs, and the complete graph beside all_reduce."""
    by_way = {row["way"]: row for row in document.get("rows", [])}
    scores = {way: row["accuracy"] for way, row in by_way.items()}
    far = by_way["complete"]["consensus"] if by_way else None
    return [
        _rising(
            "Accuracy of the averaged model: ring < torus < exponential < complete",
            scores,
            ("ring", "torus", "exponential", "complete"),
        ),
        claim(
            "The complete graph is all_reduce",
            None if far is None else far < 1e-9 and scores["complete"] == scores["all_reduce"],
            "" if far is None else f"{scores['complete']:.3f} and {scores['all_reduce']:.3f}",
        ),
    ]


def many_tables(document: dict[str, Any]) -> dict[str, str]:
    """A row per graph."""
    columns = (
        ("way", "{way}"),
        ("messages a step", "{connections:,.0f}"),
        ("averaged", "{accuracy:.3f}"),
        ("replicas", "{replicas:.3f}"),
        ("distance", "{consensus:.3g}"),
    )
    return {"at 1,008 replicas": row_table(document["rows"], columns, words=1)}


def _table_of_64(document: dict[str, Any]) -> str:
    """Predicted for 64 workers; which rules lie within the doubt of the soonest."""
    doubt, rows = document["doubt"], document["rows"]
    soonest = min(row["predicted_s"] or math.inf for row in rows)
    columns = (
        ("synchronisation", "`{rule}`"),
        ("predicted s", lambda row: _if_there("predicted_s", 2)(row) or "not reached"),
        ("steps", _if_there("steps", 0)),
        ("to the soonest", lambda row: "" if row["predicted_s"] is None else f"{row['predicted_s'] / soonest:.2f}"),
        (
            f"told apart from it (beyond {doubt:.2f})",
            lambda row: "yes" if (row["predicted_s"] or math.inf) > doubt * soonest else "",
        ),
    )
    return row_table(rows, columns, words=1)


def _saving_table(rows: list[Row]) -> str:
    columns = [("network", "{network}"), ("all_reduce ms", lambda row: f"{1e3 * row['all_reduce_s']:.1f}")]
    for name, steps in EPOCH_STEPS.items():
        columns.append((f"{name}, `average/{steps}` ms", lambda row, name=name: f"{1e3 * row[name]:.1f}"))
        columns.append(("saved", lambda row, name=name: f"{1 - row[name] / row['all_reduce_s']:.0%}"))
    return row_table(rows, columns, words=1)


def convergence_claims(document: dict[str, Any]) -> list[Claim]:
    """Bounds at the safe step, and the limit of quadratic losses."""
    rows = document.get("rows", [])
    safe = [row for row in rows if row["at"] == "safe"]
    beyond = [row for row in rows if row["at"] == "beyond" and row["loss"] == "least squares"]
    measured = [row for row in safe if row["curvature_on_the_way"] is not None]

    def within(row: Row) -> bool:
        return all(mean <= most for mean, most in zip(row["mean_square"], row["bound"], strict=True))

    def name(row: Row) -> str:
        return f"{row['loss']} {row['rule']}"

    return [
        of_every("At the safe step the mean gradient stays under its bound at every number of steps", safe, within, name),
        of_every(
            "The curvature of the MLP on the way stays below the one its steps are chosen for",
            measured,
            lambda row: row["curvature_on_the_way"] <= row["curvature"],
            name,
        ),
        of_every(
            "Beyond the limit of quadratic losses least squares diverges",
            beyond,
            lambda row: row["last"] is None or row["last"] > 100 * row["first"],
            name,
        ),
    ]


def convergence_tables(document: dict[str, Any]) -> dict[str, str]:
    """Mean squared gradients and their bounds as Markdown."""
    columns = (
        ("loss", "{loss}"),
        ("rule", "`{rule}`"),
        ("eta L, safe", "{step_times_curvature:.3g}"),
        ("gradient^2 at first", "{first:.3g}"),
        ("mean of 20 steps", lambda row: f"{row['mean_square'][4]:.3g}"),
        ("bound", lambda row: f"{row['bound'][4]:.3g}"),
        ("mean of all steps", lambda row: f"{row['mean_square'][-1]:.3g}"),
        ("bound", lambda row: f"{row['bound'][-1]:.3g}"),
    )
    return {"convergence": row_table([row for row in document["rows"] if row["at"] == "safe"], columns, words=2)}


JUDGES = {
    "convergence": Judge(claims=convergence_claims, tables=convergence_tables),
    "decentralized": Judge(claims=graphs_claims, tables=graphs_tables),
    "epoch_averaging": Judge(claims=averaging_claims, tables=averaging_tables),
    "stale_gradients": Judge(claims=stale_claims, tables=stale_tables),
    "relaxed": Judge(claims=steps_claims, tables=steps_tables),
    "trained_periods": Judge(claims=periods_claims, tables=periods_tables),
    "time_to_accuracy": Judge(claims=races_claims, tables=races_tables),
    "workers_64": Judge(claims=workers_claims, tables=workers_tables),
    "workers_1008": Judge(claims=many_claims, tables=many_tables),
}
