"""Does it ever pay to place components differently, and where?

    python -m experiments.adaptive.mixing [--quick] [--out DIR] [--json]

Eight V100s of the shipped DGX-1 profile. For every case the best plan of each uniform family (dp, mp, hp: simulated) and the
best mixed plan. Cases: VGG-16 over the batch; VGG-16 and ViT-B/16 over the memory of a device. Also draws the placement of
every component of ViT-B/16 under the memory limits where one exists.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go

from parsim.files import write_csv
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.plan import Plan
from parsim.predict.problem import PlanningProblem
from parsim.search.search import search
from parsim.units import GIB

FAMILIES_SHOWN = ("single", "dp", "mp", "hp", "adaptive")
BATCHES = (32, 64, 128, 256, 512)
VGG_LIMITS_GIB = (32.0, 4.0, 3.0, 2.5, 2.0)
VIT_LIMITS_GIB = (32.0, 2.8, 2.6, 2.4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cases")
    parser.add_argument("--out", type=Path, default=Path("runs/mixing"))
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    rows = [row("vgg16", "layer", batch, 32.0, "sgd_momentum")[0] for batch in (BATCHES[1:2] if chosen.quick else BATCHES)]
    drawn: dict[str, Plan] = {}
    limited = (("vgg16", "layer", VGG_LIMITS_GIB, "sgd_momentum"), ("vit_b_16", "sublayer", VIT_LIMITS_GIB, "adam"))
    for name, granularity, limits, optimizer in limited[1:] if chosen.quick else limited:
        for limit in limits[:1] if chosen.quick else limits:  # where memory is short a search takes minutes
            line, mixed = row(name, granularity, 256, limit, optimizer)
            rows.append(line)
            if name == "vit_b_16" and mixed is not None:
                drawn[f"{limit:g} GiB"] = mixed
    write_csv(chosen.out / "mixing.csv", rows)
    if drawn:
        strategy_map(drawn).write_html(chosen.out / "vit_b_16_placements.html", include_plotlyjs=True)
    if chosen.json:
        print(json.dumps(rows))
        return
    for line in rows:
        print("  ".join(f"{key} {value}" for key, value in line.items()))


def with_memory(cluster: Cluster, limit_gib: float) -> Cluster:
    """The same cluster with so much memory per device."""
    return replace(
        cluster,
        devices=tuple(
            replace(device, type=replace(device.type, memory_bytes=int(limit_gib * GIB))) for device in cluster.devices
        ),
    )


def row(name: str, granularity: str, batch: int, limit_gib: float, optimizer: str) -> tuple[dict[str, object], Plan | None]:
    """One case: milliseconds per step of each family's best plan that fits, and by how much mixing is faster than all.

    Returns:
        The row, and the best plan of one stage with a placement for every component.
    """
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
    line: dict[str, object] = {
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
    return line, mixed


def strategy_map(plans: dict[str, Plan]) -> go.Figure:
    """Components against limits, coloured by placement: the paper's Figure 6."""
    texts = {
        limit: [str(placement) for stage in plan.stages for _, placement in stage.placed()] for limit, plan in plans.items()
    }
    names = [name for stage in next(iter(plans.values())).stages for name in stage.components]
    kinds = sorted({text for column in texts.values() for text in column})
    figure = go.Figure(
        go.Heatmap(
            x=names,
            y=list(texts),
            z=[[kinds.index(text) for text in column] for column in texts.values()],
            text=list(texts.values()),
            hovertemplate="%{x}<br>%{y}: %{text}<extra></extra>",
            colorscale="Viridis",
            colorbar={"tickvals": list(range(len(kinds))), "ticktext": kinds},
            xgap=1,
            ygap=4,
        )
    )
    figure.update_layout(title="Placement of every component of ViT-B/16 by device memory", height=360, margin={"b": 140})
    return figure


if __name__ == "__main__":
    main()
