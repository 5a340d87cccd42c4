"""CPU seconds of a search, the Model at hand. Prints, asserts nothing.

python benchmarks/bench_search.py [--quick] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

from machine import QUICK_NOTE, add_quick, machine_line

from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.catalogue.zoo import load_preset
from parsim.model.model import Model
from parsim.predict.problem import PlanningProblem
from parsim.search.search import Search, search

PROFILE, NETWORK, GLOBAL_BATCH = "dgx1-v100-32gb", "infiniband-100g", 1024
QUESTIONS = (("resnet50", 1, 0), ("vit_b_16", 1, 0), ("mlp", 1, 10**6), ("vgg16", 2, 0), ("bert", 2, 0))
"""Model, nodes of eight GPUs, and bytes of a GPU where they are not the profile's: so few that nothing fits."""


def machine(nodes: int, memory_bytes: int) -> Cluster:
    """So many nodes, whose GPUs have the profile's memory, or so little of it."""
    whole = cluster_from_profile(load_profile(PROFILE), nodes=nodes, network=NETWORK if nodes > 1 else None)
    if not memory_bytes:
        return whole
    devices = (replace(device, type=replace(device.type, memory_bytes=memory_bytes)) for device in whole.devices)
    return replace(whole, devices=tuple(devices))


def searched(model: Model, cluster: Cluster) -> tuple[float, Search]:
    """CPU seconds of this process for one search, and what it found."""
    problem = PlanningProblem(model=model, cluster=cluster, global_batch=GLOBAL_BATCH)
    begun = time.process_time()
    found = search(problem, ("adaptive",))
    return time.process_time() - begun, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_quick(parser)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    print(machine_line())
    print(f"adaptive on {PROFILE}, batch {GLOBAL_BATCH}; CPU seconds of the process: first search, median after it")
    print("| model | GPUs | first | median | plans considered | simulated | chosen |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for name, nodes, memory_bytes in QUESTIONS[:2] if asked.quick else QUESTIONS:
        model, cluster = load_preset(name, "block"), machine(nodes, memory_bytes)
        first, found = searched(model, cluster)
        again = [searched(model, cluster)[0] for _ in range(1 if asked.quick else asked.repeats)]
        chosen = "nothing fits" if found.chosen is None else found.chosen.result.plan.summary()
        counts = f"{found.tally.considered} | {found.tally.simulated}"
        print(f"| {name} | {cluster.size} | {first:.2f} | {statistics.median(again):.2f} | {counts} | {chosen} |")
    if asked.quick:
        print(QUICK_NOTE)


if __name__ == "__main__":
    main()
