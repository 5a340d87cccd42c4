"""The adaptive scheduling paper: its Table I and figures beside an honest machine's, and beside its own constants.

    python -m experiments.adaptive.adaptive_parallelism [--quick] [--parts P,...] [--out DIR] [--json]

Parts: table (Table I on eight V100s, speed over 1 to 8 GPUs, and the fit); reading (the paper's problem and the improved one);
map (where its order and its 18% would hold); learning (five strategies on digits, 20 seeds, kept in DIR seed by seed, and
their accuracy on the way).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from experiments.adaptive.fitted import CONSTANTS, bandwidth_rows, choice_rows, constants_rows, fitted_rows
from experiments.adaptive.honest import problem_of, reduction_rows, scaling_rows, table_rows
from experiments.adaptive.learning import CURVE_STEPS, SEEDS, STEPS, curve_rows, learning_rows
from experiments.adaptive.paper import BATCH_PER_GPU, GPUS, MODELS
from experiments.adaptive.region import BATCHES, LINKS, region_rows
from experiments.common.running import part_parser, show
from parsim.search.placement.certificate import certify, paper_certificate
from parsim.search.tensor import posed_placement

Tables = dict[str, Any]
Row = dict[str, Any]
PARTS = ("table", "reading", "map", "learning")


def made(part: str, quick: bool, seeds_kept: Path) -> Tables:
    """The tables of one part."""
    if part == "table":
        scaling, fitted = scaling_rows((1, 8) if quick else (1, 2, 4, 8)), fitted_rows()
        tables = {"table": table_rows(scaling, fitted), "scaling": scaling, "fit": fitted, "reduction": reduction_rows()}
        return tables | {"choices": choice_rows(), "constants": constants_rows()}
    if part == "reading":
        return {"reading": reading_rows()}
    if part == "map":
        return {"map": region_rows(LINKS[::5], BATCHES[:1]) if quick else region_rows(), "bandwidths": bandwidth_rows()}
    learning = learning_rows(seeds_kept, SEEDS[:1] if quick else SEEDS, 22 if quick else STEPS)
    return {"learning": learning, "curves": curve_rows(seeds_kept, CURVE_STEPS[:1] if quick else CURVE_STEPS)}


def reading_rows() -> list[Row]:
    """Both problems of both models on eight V100s, 128 images per GPU. Seconds of a step; each proven by two solvers."""
    rows = []
    for name in MODELS:
        problem = problem_of(name, GPUS, GPUS * BATCH_PER_GPU)
        printed = paper_certificate(problem)
        placing, hints = posed_placement(problem, 1)
        improved = certify(placing, 1, hints=hints)
        names = [component.name for component in problem.model.components]
        options = [[str(option) for option in own] for own in placing.options]
        chosen = improved.exact.solution.choice
        placements = {each: own[number] for each, own, number in zip(names, options, chosen, strict=True)}
        for kind, certificate in (("as printed", printed), ("improved", improved.to_dict() | {"placements": placements})):
            row = {"model": name, "problem": kind, "components": certificate["components"], "choices": certificate["choices"]}
            row |= {"exact_s": certificate["exact"]["seconds"], "milp_s": certificate["milp"]["seconds"]}
            row |= {key: certificate[key] for key in ("verdict", "relative_difference", "placements")}
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = part_parser(__doc__, "few points and one seed", out="runs/adaptive_parallelism", parts=PARTS)
    options = parser.parse_args()
    printed = {
        name: {key: list(getattr(paper, key)) for key in ("hours", "communication", "memory_gb", "accuracy")}
        for name, paper in MODELS.items()
    }
    tables: Tables = {"printed": printed, "fitted_constants": CONSTANTS}
    for part in options.parts:
        tables |= made(part, options.quick, options.out / "seeds")
    show(tables, as_json=options.json)


if __name__ == "__main__":
    main()
