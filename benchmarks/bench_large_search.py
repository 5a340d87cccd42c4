"""CPU seconds of searches, from 8 GPUs to 16,384, and what was not tried. Prints, asserts nothing.

python benchmarks/bench_large_search.py [--quick] [--only llama]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bench_search import GLOBAL_BATCH, machine
from machine import QUICK_NOTE, add_quick, machine_line

from parsim.app.load import problem_of
from parsim.app.question import question_of
from parsim.model.catalogue.zoo import load_preset
from parsim.plans.constraints import PlanConstraints
from parsim.predict.problem import PlanningProblem
from parsim.search.search import search

NETWORK = 'cluster.network="infiniband-400g"'


def preset(name: str, nodes: int) -> PlanningProblem:
    """A preset on so many DGX-1."""
    return PlanningProblem(model=load_preset(name, "block"), cluster=machine(nodes, 0), global_batch=GLOBAL_BATCH)


def of_stages(name: str, stages: int) -> PlanningProblem:
    """A preset on 8 V100 with `mesh = { pp = stages }`: the order of the pipeline is left free."""
    return replace(preset(name, 1), constraints=PlanConstraints(pp=stages))


def named(name: str, gpus: str, batch: int, *more: str) -> PlanningProblem:
    """What `parsim plan NAME --gpus GPUS --network infiniband-400g --batch N` asks."""
    return problem_of(question_of(name, cluster=gpus, global_batch=batch, overrides=[NETWORK, *more]))


SEQ = "model.args.seq=8192"
DEEP = ("model.args.layers=1024", "model.args.hidden=1024")
QUESTIONS: tuple[tuple[str, Callable[[], PlanningProblem]], ...] = (
    ("ResNet-50, 8 V100", partial(preset, "resnet50", 1)),
    ("ViT-B/16, 8 V100", partial(preset, "vit_b_16", 1)),
    ("ViT-B/16, 8 V100, pp = 4", partial(of_stages, "vit_b_16", 4)),
    ("ResNet-50, 8 V100, pp = 4", partial(of_stages, "resnet50", 4)),
    ("VGG-16, 16 V100", partial(preset, "vgg16", 2)),
    ("BERT, 16 V100", partial(preset, "bert", 2)),
    ("ViT-B/16, 1024 V100", partial(preset, "vit_b_16", 128)),
    ("llama3-70b, 64 H100", partial(named, "llama3-70b", "64xh100-sxm", 512, SEQ)),
    ("llama3-70b, 1024 H100", partial(named, "llama3-70b", "1024xh100-sxm", 2048, SEQ)),
    ("llama3-70b, 16384 H100", partial(named, "llama3-70b", "16384xh100-sxm", 16384, SEQ)),
    ("llama3-8b of 1024 layers, 32 H100", partial(named, "llama3-8b", "32xh100-sxm", 64, *DEEP)),
    ("the same by blocks", partial(named, "llama3-8b", "32xh100-sxm", 64, *DEEP, 'model.granularity="block"')),
)


def row(what: str, asked: Callable[[], PlanningProblem]) -> None:
    """One line of the table: a search by a process that has compiled what it needs, on a problem that is new to it."""
    begun = time.process_time()
    problem = asked()
    built_s, begun = time.process_time() - begun, time.process_time()
    found = search(problem, ("adaptive",))
    elapsed = time.process_time() - begun
    chosen = found.chosen or found.candidates[0]
    result = chosen.result
    text = f"{result.plan.summary().split(' [')[0]}, {result.step_s.median:.4g} s" if found.chosen else "nothing fits"
    counts = found.tally
    print(
        f"| {what} | {len(problem.model.components):,} | {built_s:.1f} | {elapsed:.1f} | {counts.simulated} "
        f"| {counts.slower:,} | {counts.untried:,} | {text} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_quick(parser)
    parser.add_argument("--only", default="", help="questions whose text holds this")
    asked = parser.parse_args()
    print(machine_line())
    print("| question | components | Model, CPU-s | search, CPU-s | simulated | slower by a bound | not tried | chosen |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    search(preset("mlp", 1), ("dp",), samples=0)  # compiles the simulator
    for what, problem in QUESTIONS[:2] if asked.quick else QUESTIONS:
        if asked.only.lower() in what.lower():
            row(what, problem)
    if asked.quick:
        print(QUICK_NOTE, file=sys.stdout)


if __name__ == "__main__":
    main()
