"""What a mixing graph does to accuracy on 1,008 virtual replicas: the digits MLP, one sample per replica and step.

python -m experiments.relaxed.workers_1008 [--quick] [--json]
"""

from __future__ import annotations

from typing import Any

import torch

from experiments.common.running import part_parser, show
from parsim.relaxed.dbench import MODELS, run_bench

GRAPHS = ("all_reduce", "complete", "exponential", "torus", "ring")


def rows(replicas: int, epochs: int) -> list[dict[str, Any]]:
    """By graph the accuracy of the averaged model and of the replicas, the distance between these, and messages per step."""
    runs = run_bench({"mlp": MODELS["mlp"]}, GRAPHS, replicas=(replicas,), shards=("iid",), epochs=epochs, batch=1)
    return [
        {
            "way": run.way,
            "accuracy": round(run.score, 4),
            "replicas": round(run.mean_score, 4),
            "consensus": float(f"{run.consensus:.4g}"),
            "connections": run.connections,
        }
        for run in runs
    ]


def main() -> None:
    options = part_parser(__doc__, "64 replicas, five epochs").parse_args()
    torch.set_num_threads(1)
    replicas, epochs = (64, 5) if options.quick else (1008, 60)
    show({"replicas": replicas, "steps": epochs * (1437 // replicas), "rows": rows(replicas, epochs)}, as_json=options.json)


if __name__ == "__main__":
    main()
