"""The adaptive scheduling paper: its Table I and figures beside an honest machine's, and beside its own constants.

    python -m experiments.adaptive.adaptive_parallelism [--quick] [--parts P,...] [--out DIR] [--json]

Parts: table (Table I on eight V100s, speed over 1 to 8 GPUs, and the fit); reading (the paper's problem and the improved one);
map (where its order and its 18% would hold); learning (five strategies on digits, 20 seeds). Figures 1 to 6 go to DIR as HTML;
the finding stands in README.md, the verdicts are `judge.py`'s.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.adaptive.figures import draw
from experiments.adaptive.fitted import CONSTANTS, bandwidth_rows, choice_rows, constants_rows, fitted_rows
from experiments.adaptive.honest import scaling_rows, table_rows
from experiments.adaptive.learning import SEEDS, STEPS, learning_rows
from experiments.adaptive.paper import MODELS
from experiments.adaptive.reading import reading_rows
from experiments.adaptive.region import BATCHES, LINKS, region_rows
from experiments.common.running import add_parts
from parsim.files import write_csv

Tables = dict[str, Any]


def table_part(quick: bool, kept: Path) -> Tables:
    scaling = scaling_rows((1, 8) if quick else (1, 2, 4, 8))
    fitted = fitted_rows()
    return {
        "table": table_rows(scaling, fitted),
        "scaling": scaling,
        "fit": fitted,
        "choices": choice_rows(),
        "constants": constants_rows(),
    }


def reading_part(quick: bool, kept: Path) -> Tables:
    return {"reading": reading_rows()}


def map_part(quick: bool, kept: Path) -> Tables:
    return {"map": region_rows(LINKS[::5], BATCHES[:1]) if quick else region_rows(), "bandwidths": bandwidth_rows()}


def learning_part(quick: bool, kept: Path) -> Tables:
    return {"learning": learning_rows(kept, SEEDS[:1] if quick else SEEDS, 22 if quick else STEPS)}


PARTS: dict[str, Callable[[bool, Path], Tables]] = {
    "table": table_part,
    "reading": reading_part,
    "map": map_part,
    "learning": learning_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few points and one seed: a check that all runs")
    add_parts(parser, tuple(PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/adaptive_parallelism"))
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    tables: Tables = {"printed": printed(), "fitted_constants": CONSTANTS}
    for part in asked.parts:
        tables |= PARTS[part](asked.quick, asked.out / "seeds")
    draw(asked.out, tables)
    for name, rows in tables.items():
        if isinstance(rows, list):
            write_csv(asked.out / f"{name}.csv", rows)
    if asked.json:
        print(json.dumps(tables))
        return
    for name, rows in tables.items():
        if isinstance(rows, list):
            print(f"\n{name}", *rows[0], sep="\t")
            for row in rows:
                print(*row.values(), sep="\t")
    print(f"\ntables and figures in {asked.out}")


def printed() -> dict[str, Any]:
    """Table I."""
    return {
        name: {key: list(getattr(paper, key)) for key in ("hours", "communication", "memory_gb", "accuracy")}
        for name, paper in MODELS.items()
    }


if __name__ == "__main__":
    main()
