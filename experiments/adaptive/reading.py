"""The paper's problem as printed (reading R) beside the problem with what it leaves out, both solved by two solvers."""

from __future__ import annotations

import sys
from typing import Any

from experiments.adaptive.honest import problem_of
from experiments.adaptive.paper import BATCH_PER_GPU, GPUS, MODELS
from parsim.search.placement.certificate import certify
from parsim.search.placement.paper import paper_certificate
from parsim.search.tensor import posed_placement

Row = dict[str, Any]


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
        rows += [
            _row(name, "as printed", printed, printed["placements"]),
            _row(name, "improved", improved.to_dict(), placements),
        ]
        print(rows[-2], rows[-1], sep="\n", file=sys.stderr, flush=True)
    return rows


def _row(name: str, problem: str, certificate: dict[str, Any], placements: dict[str, str]) -> Row:
    return {
        "model": name,
        "problem": problem,
        "components": certificate["components"],
        "choices": certificate["choices"],
        "exact_s": certificate["exact"]["seconds"],
        "milp_s": certificate["milp"]["seconds"],
        "verdict": certificate["verdict"],
        "relative_difference": certificate["relative_difference"],
        "placements": placements,
    }
