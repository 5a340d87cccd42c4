"""Does it ever pay to place components differently, and where?

    python -m experiments.adaptive.mixing [--quick] [--json]

Eight V100s of the shipped DGX-1 profile. For every case the best plan of each uniform family (dp, mp, hp: simulated) and the
best mixed plan. Cases: VGG-16 over the batch; VGG-16 and ViT-B/16 over the memory of a device.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.common.running import part_parser, show
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.plan import Plan
from parsim.predict.problem import PlanningProblem
from parsim.search.search import search
from parsim.units import GIB

BATCHES = (32, 64, 128, 256, 512)
VGG_LIMITS_GIB = (32.0, 4.0, 3.0, 2.5, 2.0)
VIT_LIMITS_GIB = (32.0, 2.8, 2.6, 2.4)


def main() -> None:
    options = part_parser(__doc__, "two cases").parse_args()
    rows = [row("vgg16", "layer", batch, 32.0, "sgd_momentum") for batch in (BATCHES[1:2] if options.quick else BATCHES)]
    limited = (("vgg16", "layer", VGG_LIMITS_GIB, "sgd_momentum"), ("vit_b_16", "sublayer", VIT_LIMITS_GIB, "adam"))
    for name, granularity, limits, optimizer in limited[1:] if options.quick else limited:
        # where memory is short a search takes minutes
        rows += [row(name, granularity, 256, limit, optimizer) for limit in (limits[:1] if options.quick else limits)]
    show({"rows": rows}, as_json=options.json)


def with_memory(cluster: Cluster, limit_gib: float) -> Cluster:
    """The same cluster with so much memory per device."""
    return replace(
        cluster,
        devices=tuple(
            replace(device, type=replace(device.type, memory_bytes=int(limit_gib * GIB))) for device in cluster.devices
        ),
    )


def row(name: str, granularity: str, batch: int, limit_gib: float, optimizer: str) -> dict[str, object]:
    """One case: milliseconds per step of each family's best plan that fits, and by how much mixing is faster than all."""
    cluster = with_memory(cluster_from_profile(load_profile("dgx1-v100-32gb"), 8), limit_gib)
    problem = PlanningProblem(
        model=load_model(ModelSpec(name=name), granularity=granularity),
        cluster=cluster,
        global_batch=batch,
        numerics=Numerics(optimizer=optimizer),
    )
    found = search(problem, ("adaptive",), samples=0)
    best: dict[str, float] = {}
    mixed: Plan | None = None
    for candidate in found.candidates:
        result = candidate.result
        if result.fits:
            best.setdefault(result.strategy, 1e3 * result.step_s.median)
            if result.strategy == "adaptive" and mixed is None:
                mixed = result.plan
    uniform = min((value for key, value in best.items() if key != "adaptive"), default=float("inf"))
    gain = 1 - best["adaptive"] / uniform if "adaptive" in best and uniform < float("inf") else float("nan")
    kinds = {placement.kind for stage in mixed.stages for _, placement in stage.placed()} if mixed is not None else set()
    return {
        "model": name,
        "batch": batch,
        "memory_gib": limit_gib,
        **{
            f"{key}_ms": round(best[key], 2) if key in best else "does not fit"
            for key in ("single", "dp", "mp", "hp", "adaptive")
        },
        "less_time_than_best_uniform": f"{100 * gain:.1f}%",
        "mixes": "+".join(sorted(kinds)),
        "plan": "" if mixed is None else mixed.summary(),
    }


if __name__ == "__main__":
    main()
