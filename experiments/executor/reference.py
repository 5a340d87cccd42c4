"""Does parsim's executor train what PyTorch's own parallel modules train, and how fast is it beside them?

    python -m experiments.executor.reference [--quick] [--only REGEX] [--rounds N] [--json]

Every case runs one plan on two CPU processes as parsim's executor and as native DDP, FSDP2 or torch pipelining. First the
weights are compared after float64 steps. Then both take turns in rounds, and the ratio of their steps is taken within every
round. The native step against itself runs in the same rounds. So does the executor that records in every other step: its pairs
of steps tell what recording costs.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.catalogue import ROOT
from experiments.common.running import part_parser, show
from experiments.executor.reference_cases import CASES, QUICK, RANKS, Case
from parsim.execute.processes.launch import launch
from parsim.execute.processes.machine import describe_environment, machine_line
from parsim.numeric import Floats

EQUAL_STEPS, ROUNDS, STEPS = 20, 24, 10
DRAWS = 4000


def main() -> None:
    parser = part_parser(__doc__, "four rounds, of four cases unless --only names others")
    parser.add_argument("--only", default="", help="regular expression on the case")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    among = QUICK if options.quick and not options.only else CASES
    cases = [case for case in among if re.search(options.only, case.name)]
    if not cases:
        parser.error(f"--only {options.only!r} matches none of: {', '.join(case.name for case in CASES)}")
    rounds = 4 if options.quick else options.rounds
    rows = []
    for case in cases:
        rows.append(row_of(case, measured(case, rounds)))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    environment = describe_environment()
    results = {
        "machine": machine_line(environment),
        "torch": environment["versions"]["torch"],
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[2], 1),
        "rounds": rounds,
        "steps": STEPS,
        "equal_steps": EQUAL_STEPS,
        "rows": rows,
    }
    show(results, as_json=options.json)


def measured(case: Case, rounds: int) -> list[dict[str, Any]]:
    """What every rank found."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"case": case.name, "equal_steps": EQUAL_STEPS, "rounds": rounds, "steps": STEPS}))
        launch(job, RANKS, module="experiments.executor.reference_rank", env={"PYTHONPATH": str(ROOT)}, hang_s=300.0)
        return [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def row_of(case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """A step takes as long as on its slowest rank, and the processor seconds of all."""
    seconds = {name: np.max([rank["seconds"][name] for rank in ranks], axis=0) for name in ranks[0]["seconds"]}
    cpu_s = {name: np.sum([rank["cpu_s"][name] for rank in ranks], axis=0) for name in ranks[0]["cpu_s"]}
    switched = np.max([rank["switched"] for rank in ranks], axis=0)  # [rounds, 2, pairs], steps that record first
    return {
        "case": case.name,
        "difference": max(rank["difference"] for rank in ranks),
        "parsim_ms": round(1e3 * float(np.median(seconds["parsim"])), 3),
        "native_ms": round(1e3 * float(np.median(seconds["native"])), 3),
        "ratio": interval(seconds["parsim"] / seconds["native"]),
        "cpu_ratio": interval(cpu_s["parsim"] / cpu_s["native"]),
        "recording": interval(switched[:, 0] / switched[:, 1]),
        "floor": interval(seconds["native again"] / seconds["native"]),
    }


def interval(ratios: Floats) -> dict[str, float]:
    """The median of paired ratios [rounds, ...], with its 95% interval by the bootstrap over rounds (percentiles)."""
    drawn = ratios[np.random.default_rng(0).integers(len(ratios), size=(DRAWS, len(ratios)))].reshape(DRAWS, -1)
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return {"median": round(float(np.median(ratios)), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


if __name__ == "__main__":
    main()
