"""Which way of synchronising 64 workers reaches an accuracy first, and what would "95% less time" by rare averaging need?

    python -m experiments.relaxed.workers_64 [--quick] [--json]

ResNet-50, 32 images a worker, 8 nodes of eight V100s. Seconds per step are simulated; steps to the accuracy are those of the
digits MLP that stands in, with 64 virtual replicas. Nothing is measured: how far to believe the ratio of two rules is what
`time_to_accuracy` found at two and four processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import parsim
from experiments.common.catalogue import recorded
from experiments.common.running import part_parser, show
from experiments.relaxed.judge import BATCH, EPOCH_STEPS, WORKERS, doubt_of_ratios

if TYPE_CHECKING:
    from parsim.app.answer import Answer

PROFILE, NODES = "dgx1-v100-32gb", 8
TARGET, MOST_STEPS = 0.90, 400
RULES = (
    "average/16",
    "average/16 outer=nesterov:0.7:0.9",
    "gossip/1 one_peer_exponential",
    "gossip/1 ring combination=combine_adapt",
)
NETWORK = "ethernet-25g"
NETWORKS = ("ethernet-10g", "infiniband-100g")


def _asked(network: str, **more: Any) -> Answer:
    sizes = {"cluster": PROFILE, "nodes": NODES, "network": network, "global_batch": WORKERS * BATCH}
    return parsim.plan("resnet50", **sizes, optimizer="sgd_momentum", strategy="dp", **more)


def ranked(*, is_quick: bool) -> dict[str, Any]:
    """Seconds to the accuracy of one worker, and of 64 by rule."""
    rules, most_steps = ((), 20) if is_quick else (RULES, MOST_STEPS)
    one = parsim.plan("resnet50", cluster=PROFILE, devices=1, global_batch=BATCH, optimizer="sgd_momentum")
    alone = one.to_target(TARGET, rules=(), seeds=1, most_steps=most_steps).contenders[0]
    entries = _asked(NETWORK).to_target(TARGET, rules=rules, seeds=1, most_steps=most_steps).contenders
    return {
        "network": NETWORK,
        "target": TARGET,
        "one_worker": {"seconds": alone.seconds, "steps": alone.learnt and alone.learnt.steps},
        "rows": [
            {"rule": str(entry.rule), "predicted_s": entry.seconds, "steps": entry.learnt and entry.learnt.steps}
            for entry in entries
        ],
    }


def per_step(*, is_quick: bool) -> list[dict[str, Any]]:
    """A step of all_reduce, and of averaging once per epoch of a dataset, by network; the computation is one worker's step."""
    one = parsim.simulate(
        "resnet50", strategy="single", cluster=PROFILE, devices=1, global_batch=BATCH, optimizer="sgd_momentum"
    )
    rows = []
    for network in NETWORKS[:1] if is_quick else NETWORKS:
        row = {"network": network, "computation_s": one.evaluation.result.step_s.median}
        row["all_reduce_s"] = _asked(network).evaluation.result.step_s.median
        for name, steps in list(EPOCH_STEPS.items())[: 1 if is_quick else None]:
            answer = _asked(network, overrides=[f"plan.synchronisation=average/{steps}"])
            row |= {name: answer.evaluation.result.step_s.median}
        rows.append(row)
    return rows


def main() -> None:
    options = part_parser(__doc__, "all_reduce for 20 steps, one network and dataset").parse_args()
    document = ranked(is_quick=options.quick) | {"less_time": per_step(is_quick=options.quick)}
    show(document | {"doubt": doubt_of_ratios(recorded("time_to_accuracy") or {})}, as_json=options.json)


if __name__ == "__main__":
    main()
