"""Do the properties of the search hold, on how many problems, and in how many seconds?

    python experiments/search_properties/run.py [--quick] [--examples N] [--seed N] [--only A,B] [--seconds N]
        [--out FILE] [--json]

Every property asks the search that a user calls about drawn problems, and compares its answers. A property that is in FILE
already is not run again, unless --only names it; with --quick three tiny problems each are compared, and nothing is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hypothesis

from experiments.common.running import commit
from experiments.search_properties.asking import SHAPES, TINY
from experiments.search_properties.counting import counted, features_used
from experiments.search_properties.properties import PROPERTIES
from parsim.execute.processes.machine import describe_environment, machine_line
from parsim.files import write_text_atomically

RESULTS = Path(__file__).parent / "results.json"
COMMAND = "python experiments/search_properties/run.py"
EXAMPLES = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three tiny problems of each property")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="problems to compare, of each property")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="properties with commas between, run again whatever is known of them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none later, and go on at the next call")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.name} beside this file; --quick writes none")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    only = asked.only.split(",") if asked.only else []
    if unknown := [name for name in only if name not in PROPERTIES]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(PROPERTIES)}")
    out = asked.out or (None if asked.quick else RESULTS)
    rows: dict[str, dict[str, Any]] = {}
    if out is not None and out.is_file():
        rows = {row["property"]: row for row in json.loads(out.read_text(encoding="utf-8"))["rows"]}
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
        if out is not None:
            write_text_atomically(out, json.dumps(document(rows, asked.seed, asked.examples), indent=1) + "\n")
    found = document(rows, asked.seed, asked.examples)
    print(json.dumps(found) if asked.json else json.dumps(found["summary"], indent=1))
    if found["summary"]["failed"]:
        sys.exit(1)


def document(rows: dict[str, dict[str, Any]], seed: int, examples: int) -> dict[str, Any]:
    """Results.json, the properties in their own order.

    Args:
        rows: by property. seed: of all of them. examples: of those that this call has run.
    """
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
