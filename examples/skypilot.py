"""SkyPilot chooses by time: a time estimator that asks parsim for every kind of GPU that a task may run on.

pip install parsim skypilot
python examples/skypilot.py            # what SkyPilot's optimizer would be told, without a cloud
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import parsim as ps

GPUS = {
    "A100": "a100-sxm-40gb",
    "A100-80GB": "a100-sxm-80gb",
    "H100": "h100-sxm",
    "H200": "h200",
    "B200": "b200",
    "V100-32GB": "v100-sxm-32gb",
}
"""SkyPilot's name of an accelerator, and parsim's."""


def time_estimator(
    model: str, *, steps: int, nodes: int = 1, network: str = "infiniband-400g", **question: Any
) -> Callable[[Any], int]:
    """For `sky.Task.set_time_estimator`: seconds of so many steps on `sky.Resources`, by the plan that parsim chooses.

    Raises parsim.ParsimError: an accelerator without a profile, or no plan fits (leave such resources out of the task).
    """

    def seconds(resources: Any) -> int:
        ((name, count),) = resources.accelerators.items()
        if name not in GPUS:
            raise ps.ParsimError(f"no profile for {name}; this example knows {', '.join(GPUS)}")
        several = {"settings": {"cluster.network": network}} if nodes > 1 else {}
        answer = ps.plan(model, f"{nodes * int(count)}x{GPUS[name]}", **several, **question)
        return round(answer.chosen.step_s.median * steps)

    return seconds


def main() -> None:
    estimate = time_estimator("llama3-8b", steps=1000, global_batch=64, precision="bf16", args={"seq": 2048})
    # With SkyPilot:
    #   task = sky.Task(run="torchrun train.py")
    #   task.set_resources({sky.Resources(accelerators="A100-80GB:8"), sky.Resources(accelerators="H100:8")})
    #   task.set_time_estimator(estimate)
    #   sky.optimize(dag, minimize=sky.OptimizeTarget.TIME)
    for name in ("A100-80GB", "H100"):
        print(f"8 x {name}: {estimate(SimpleNamespace(accelerators={name: 8})) / 3600:.2f} hours")


if __name__ == "__main__":
    main()
