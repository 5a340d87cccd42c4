"""Do mixed plans, which place every component separately, train the same weights as one process?

    python -m experiments.executor.mixed_plans [--quick] [--plans N] [--steps N] [--nproc 2,4] [--models A,B]
        [--seed N] [--json]

Random plans (placement of every component, rules, ways, meshes, pipeline orders, microbatches, buckets, ZeRO, optimizers)
run for real over gloo in float64; weights, optimizer state, running statistics and losses are compared with
single-process training.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from experiments.common.equality import compare_case, run_cases
from experiments.common.mixed import MODELS, random_case
from experiments.common.running import part_parser, show

PLANS_PER_LAUNCH = 10


def main() -> None:
    parser = part_parser(__doc__, "two plans of five steps")
    parser.add_argument("--plans", type=int, default=50, help="per model and number of processes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--nproc", default="2,4")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    plans, steps = (2, 5) if chosen.quick else (chosen.plans, chosen.steps)
    rows: list[dict[str, object]] = []
    for name in chosen.models.split(","):
        for processes in (int(part) for part in chosen.nproc.split(",")):
            rows.append(compare(name, processes, plans, steps, chosen.seed))
            print(rows[-1], file=sys.stderr, flush=True)
    show({"rows": rows}, as_json=chosen.json)


def compare(name: str, processes: int, plans: int, steps: int, seed: int) -> dict[str, object]:
    """The worst difference over all plans of one model on so many processes."""
    rng = random.Random(f"{name} {processes} {seed}")
    cases = [random_case(name, processes, rng) for _ in range(plans)]
    began, worst, which = time.monotonic(), 0.0, ""
    for first in range(0, plans, PLANS_PER_LAUNCH):
        some = cases[first : first + PLANS_PER_LAUNCH]
        with tempfile.TemporaryDirectory() as folder:
            for case, run in zip(some, run_cases(some, Path(folder), steps=steps), strict=True):
                difference = compare_case(case, run, Path(folder), steps=steps).worst
                if difference > worst:
                    worst, which = difference, str(case)
    return {
        "model": name,
        "processes": processes,
        "plans": plans,
        "steps": steps,
        "worst_difference": f"{worst:.1e}",
        "seconds": round(time.monotonic() - began),
        "worst_plan": which,
    }


if __name__ == "__main__":
    main()
