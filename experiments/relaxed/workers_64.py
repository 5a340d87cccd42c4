"""Ways of synchronising 64 workers, predicted; and what "95% less time" of averaging once per epoch would need.

ResNet-50, 32 images a worker, 8 nodes of eight V100s. Seconds per step are simulated; steps to the accuracy are those of the
digits MLP that stands in, with 64 virtual replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import parsim

if TYPE_CHECKING:
    from parsim.app.answer import Answer

PROFILE, NODES, WORKERS, BATCH = "dgx1-v100-32gb", 8, 64, 32
TARGET = 0.95
RULES = (
    "average/16",
    "average/16 outer=nesterov:0.7:0.9",
    "gossip/1 ring",
    "gossip/1 one_peer_exponential",
    "gossip/1 ring combination=combine_adapt",
)
NETWORK = "ethernet-25g"
NETWORKS = ("ethernet-10g", "ethernet-25g", "infiniband-100g", "infiniband-400g")
EPOCH_STEPS = {"CIFAR-10": 50_000 // (WORKERS * BATCH), "ImageNet": 1_281_167 // (WORKERS * BATCH)}


def _asked(network: str, **more: Any) -> Answer:
    sizes = {"cluster": PROFILE, "nodes": NODES, "network": network, "global_batch": WORKERS * BATCH}
    return parsim.plan("resnet50", **sizes, optimizer="sgd_momentum", strategy="dp", **more)


def ranked(*, is_quick: bool) -> dict[str, Any]:
    """Seconds to the accuracy of one worker, and of 64 by rule."""
    one = parsim.plan("resnet50", cluster=PROFILE, devices=1, global_batch=BATCH, optimizer="sgd_momentum")
    alone = one.to_target(TARGET, rules=(), seeds=1).contenders[0]
    entries = _asked(NETWORK).to_target(TARGET, rules=RULES[:1] if is_quick else RULES, seeds=1).contenders
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
        for name, steps in EPOCH_STEPS.items():
            answer = _asked(network, overrides=[f"plan.synchronisation=average/{steps}"])
            row |= {name: answer.evaluation.result.step_s.median}
        rows.append(row)
    return rows


def needed_ratio(saved: float, epoch_steps: int, more_steps: float = 1.0) -> float | None:
    """How many times the computation c an all_reduce a must take, for averaging once per epoch to save so much of the time, by
    r (c + a / H) = (1 - saved) (c + a). None: no network is slow enough.

    Args: epoch_steps: H. more_steps: r, the steps that averaging needs over those of all_reduce.
    """
    remaining = 1.0 - saved
    share = remaining - more_steps / epoch_steps
    return (more_steps - remaining) / share if share > 0 else None
