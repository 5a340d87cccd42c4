"""Does the search find what enumerating every plan finds?

    python -m experiments.search.exhaustive [--quick] [--problems N] [--seed N] [--seconds N] [--again]
        [--out FILE] [--json]

Random problems of up to four devices, four components with the loss and eight samples. Every plan is enumerated: meshes,
also those that leave devices idle, cuts, orders, placements, ZeRO stages, recomputation, microbatches and buckets. They are
judged by the same `evaluate` as the search's winner. What was enumerated already is read from FILE and not done again.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from experiments.common.catalogue import keep, kept_of
from experiments.common.running import part_parser, show
from experiments.search.enumeration import CLOSE, Space, exhaustive, searched
from experiments.search.problems import ProblemDraw, random_problem

NAME = "search_exhaustive"

SPACES: dict[str, tuple[Space, dict[str, Any]]] = {
    "plain": (Space(any_buckets=False), {"zero_stage": 0, "recompute": "none"}),
    "zero": (Space(any_buckets=False, zero_stages=(0, 1, 2, 3)), {"zero_stage": "auto", "recompute": "none"}),
    "recompute": (Space(any_buckets=False, recompute=True), {"zero_stage": 0, "recompute": "auto"}),
    "all": (Space(any_buckets=False, zero_stages=(0, 1, 2, 3), recompute=True), {"zero_stage": "auto", "recompute": "auto"}),
    "buckets": (Space(), {"zero_stage": 0, "recompute": "none"}),
}
"""What is free, for the enumeration and for the search."""


def main() -> None:
    parser = part_parser(__doc__, "20 problems")
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many, and go on at the next call")
    parser.add_argument("--out", type=Path, help="keep the rows in this file; default: in results.json, with --quick nowhere")
    parser.add_argument("--again", action="store_true", help="search anew what was enumerated already, and compare")
    asked = parser.parse_args()
    kept = kept_of(NAME, asked.out, asked.quick)
    rows: dict[str, dict[str, Any]] = kept.get("rows", {})
    begin_s = time.perf_counter()
    for seed in range(asked.seed, asked.seed + (20 if asked.quick else asked.problems)):
        if time.perf_counter() - begin_s > asked.seconds:
            break
        if str(seed) not in rows:
            rows[str(seed)] = compare(seed)
        elif asked.again:
            rows[str(seed)] |= compared_again(seed, rows[str(seed)])
    document: dict[str, Any] = {
        "summary": summary(list(rows.values())),
        "machine": platform.processor() or platform.machine(),
        "rows": rows,
    }
    keep(NAME, document, asked.out, asked.quick)
    show(document if asked.json else document["summary"], as_json=asked.json)


def compare(seed: int) -> dict[str, Any]:
    """The search's answer to one problem beside the enumeration's."""
    random = Random(seed)
    name = random.choice(list(SPACES))
    space, constraints = SPACES[name]
    draw = drawn(random, name)
    problem = draw.problem(**constraints)
    begin_s = time.process_time()
    seconds, plan, status = searched(problem)
    middle_s = time.process_time()
    found = exhaustive(draw.problem(**constraints), space, known_s=seconds)
    gap = 0.0
    if found.best is not None:
        gap = (seconds - found.seconds) / found.seconds if plan is not None else float("inf")
    outcome = "infeasible" if plan is None and found.best is None else "tie" if gap <= CLOSE else "loss"
    if plan is None and found.best is not None:
        outcome = "missed"
    return {
        "free": name,
        "devices": problem.cluster.size,
        "components": len(problem.model.components),
        "global_batch": problem.global_batch,
        "outcome": outcome,
        "loss": gap if outcome == "loss" else 0.0,
        "search": None if plan is None else plan.summary(),
        "exhaustive": None if found.best is None else found.best.summary(),
        "status": status,
        "best_s": min(seconds, found.seconds),
        "outlines": found.outlines,
        "simulated": found.simulated,
        "search_s": round(middle_s - begin_s, 3),
        "exhaustive_s": round(time.process_time() - middle_s, 3),
    }


def compared_again(seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """The search's answer today beside what was enumerated before: what of a row it changes."""
    random = Random(seed)
    name = random.choice(list(SPACES))
    problem = drawn(random, name).problem(**SPACES[name][1])
    begin_s = time.process_time()
    seconds, plan, status = searched(problem)
    gap = (seconds - row["best_s"]) / row["best_s"] if plan is not None else 0.0
    outcome = "tie" if plan is not None and gap <= CLOSE else "loss" if plan is not None else "missed"
    return {
        "outcome": "infeasible" if plan is None and row["outcome"] == "infeasible" else outcome,
        "loss": gap if outcome == "loss" else 0.0,
        "search": None if plan is None else plan.summary(),
        "status": status,
        "best_s": min(seconds, row["best_s"]),
        "search_s": round(time.process_time() - begin_s, 3),
    }


def drawn(random: Random, free: str) -> ProblemDraw:
    """A problem with few enough plans: four devices with one component beside the loss, three with two, two with three."""
    devices, components, batches = random.choice(
        ((4, 1, (2, 4, 8)), (3, 2, (3, 6)), (2, 3, (2, 4)), (2, 2, (2, 4, 6, 8)), (4, 1, (4, 6)))
    )
    return random_problem(random, most_devices=devices, most_components=components, batches=batches)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts by outcome, and the losses."""
    losses = sorted(row["loss"] for row in rows if row["outcome"] == "loss")
    return {
        "problems": len(rows),
        "outcomes": dict(sorted(Counter(row["outcome"] for row in rows).items())),
        "by_what_is_free": {
            name: dict(sorted(Counter(row["outcome"] for row in rows if row["free"] == name).items())) for name in SPACES
        },
        "largest_loss": losses[-1] if losses else 0.0,
        "mean_loss_over_all": sum(losses) / len(rows) if rows else 0.0,
        "outlines": sum(row["outlines"] for row in rows),
        "simulated": sum(row["simulated"] for row in rows),
        "search_cpu_s": round(sum(row["search_s"] for row in rows), 1),
        "exhaustive_cpu_s": round(sum(row["exhaustive_s"] for row in rows), 1),
    }


if __name__ == "__main__":
    main()
