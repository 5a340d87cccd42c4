"""A job for Kubernetes with Kueue: as many nodes as the plan needs, and a deadline that follows from the predicted time.

python examples/kueue.py > job.json && kubectl create -f job.json
"""

import json
import math
from typing import Any

import parsim as ps

PER_NODE = 8
SLACK = 1.5
"""The deadline over the upper end of the predicted time: start, checkpoints and evaluation come on top of steps."""


def objects(answer: ps.Answer, *, name: str, image: str, queue: str, steps: int) -> dict[str, Any]:
    """An indexed Job that Kueue admits when all its nodes are free, and the Service by which they find the first one.

    Raises DoesNotFitError: no plan fits.
    """
    chosen = answer.chosen
    nodes = math.ceil(chosen.plan.world_size / PER_NODE)
    gpus = min(PER_NODE, chosen.plan.world_size)
    container = {
        "name": "train",
        "image": image,
        "command": ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={gpus}", "--rdzv-backend=c10d"],
        "args": [f"--rdzv-endpoint={name}-0.{name}:29500", "train.py", f"--max-steps={steps}"],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": {"kueue.x-k8s.io/queue-name": queue},
            "annotations": {"parsim/plan": chosen.plan.summary(), "parsim/step": chosen.headline()},
        },
        "spec": {
            "suspend": True,  # Kueue starts it
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "activeDeadlineSeconds": math.ceil(SLACK * steps * chosen.step_s.p95),
            "template": {"spec": {"subdomain": name, "restartPolicy": "Never", "containers": [container]}},
        },
    }
    named = {"batch.kubernetes.io/job-name": name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "selector": named},
    }
    return {"apiVersion": "v1", "kind": "List", "items": [service, job]}


def main() -> None:
    settings = {"cluster.network": "infiniband-400g"}
    answer = ps.plan("llama3-8b", "16xh100-sxm", global_batch=64, precision="bf16", args={"seq": 2048}, settings=settings)
    print(json.dumps(objects(answer, name="llama", image="registry.example/train:1", queue="gpus", steps=2000), indent=1))


if __name__ == "__main__":
    main()
