"""Do the properties of the search hold, on how many problems, and in how many seconds?

    python -m experiments.search.properties [--quick] [--examples N] [--seed N] [--only A,B] [--seconds N]
        [--out FILE] [--json]

Every property asks the search that a user calls about drawn problems, and compares its answers. A property that is in FILE
already is not run again, unless --only names it; with --quick three tiny problems each are compared, and nothing is kept.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import hypothesis

from experiments.common.catalogue import keep, kept_of
from experiments.common.running import commit, part_parser, show
from experiments.search.answers import (
    infeasible_exactly_where_no_plan_fits,
    the_papers_optimum_is_certified,
    the_papers_optimum_of_real_models_is_certified,
    what_is_printed_is_what_was_judged,
    what_the_user_is_told_is_what_was_chosen,
)
from experiments.search.asking import SHAPES, TINY, Check
from experiments.search.counting import counted, features_used
from experiments.search.more_never_hurts import (
    a_faster_network_is_never_slower,
    an_idle_device_is_never_slower,
    faster_devices_are_never_slower,
    faster_links_are_never_slower,
    more_memory_is_never_slower,
)
from experiments.search.never_slower import (
    a_constraint_is_never_faster,
    enumeration_finds_nothing_faster,
    no_family_is_faster,
    no_plan_by_hand_is_faster,
    no_row_beside_it_is_faster,
)
from experiments.search.not_mattering import (
    all_costs_scale_the_answer,
    names_do_not_matter,
    the_order_of_equal_devices_and_of_links_does_not_matter,
    the_same_question_has_the_same_answer,
)
from parsim.execute.processes.machine import describe_environment, machine_line

NAME = "search_properties"
COMMAND = "python -m experiments.search.properties"
EXAMPLES = 40

PROPERTIES: dict[str, Check] = {
    check.__name__: check
    for check in (
        no_family_is_faster,
        no_row_beside_it_is_faster,
        no_plan_by_hand_is_faster,
        a_constraint_is_never_faster,
        enumeration_finds_nothing_faster,
        more_memory_is_never_slower,
        faster_links_are_never_slower,
        a_faster_network_is_never_slower,
        faster_devices_are_never_slower,
        an_idle_device_is_never_slower,
        names_do_not_matter,
        the_order_of_equal_devices_and_of_links_does_not_matter,
        all_costs_scale_the_answer,
        the_same_question_has_the_same_answer,
        infeasible_exactly_where_no_plan_fits,
        what_is_printed_is_what_was_judged,
        what_the_user_is_told_is_what_was_chosen,
        the_papers_optimum_is_certified,
        the_papers_optimum_of_real_models_is_certified,
    )
}


def main() -> None:
    parser = part_parser(__doc__, "three tiny problems of each property")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="problems to compare, of each property")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="properties with commas between, run again whatever is known of them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none later, and go on at the next call")
    parser.add_argument("--out", type=Path, help="keep the rows in this file; default: in results.json, with --quick nowhere")
    asked = parser.parse_args()
    only = asked.only.split(",") if asked.only else []
    if unknown := [name for name in only if name not in PROPERTIES]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(PROPERTIES)}")
    rows = {row["property"]: row for row in kept_of(NAME, asked.out, asked.quick).get("rows", [])}
    begin_s = time.monotonic()
    for name in only or PROPERTIES:
        if name in rows and not only:
            continue
        if time.monotonic() - begin_s > asked.seconds:
            break
        examples, shapes = (3, TINY) if asked.quick else (asked.examples, SHAPES)
        counts = counted(name, PROPERTIES[name], examples, shapes=shapes, begin=asked.seed)
        print(counts, file=sys.stderr, flush=True)
        rows[name] = counts.to_dict()
        keep(NAME, document(rows, asked.seed, asked.examples), asked.out, asked.quick)
    found = document(rows, asked.seed, asked.examples)
    show(found if asked.json else found["summary"], as_json=asked.json)
    if found["summary"]["failed"]:
        sys.exit(1)


def document(rows: dict[str, dict[str, Any]], seed: int, examples: int) -> dict[str, Any]:
    """Results.json, the properties in their own order. examples: of those that this call has run."""
    ordered = [rows[name] for name in PROPERTIES if name in rows]
    summary = {
        "properties": len(ordered),
        **{key: sum(row[key] for row in ordered) for key in ("drawn", "compared", "comparisons", "passed", "searches")},
        "failed": sum(len(row["failed"]) for row in ordered),
        "cpu_s": round(sum(row["cpu_s"] for row in ordered), 1),
        "used": features_used(ordered),
    }
    told = f"{COMMAND} --examples {examples} --seed {seed}"
    run = {
        "command": told,
        "commit": commit(),
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine_line(describe_environment()),
    }
    return {"run": run | {"hypothesis": hypothesis.__version__}, "summary": summary, "rows": ordered}


if __name__ == "__main__":
    main()
