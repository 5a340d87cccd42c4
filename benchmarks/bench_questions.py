"""Sixty questions for the search: the step of the fastest plan that fits with 95%, beside the recorded one, and CPU seconds.

    python benchmarks/bench_questions.py [--quick] [--only TEXT] [--set MODULE:NAME=VALUE] [--record]

From 1 to 16,384 GPUs, alike and mixed, with tight and ample memory; convolutions, dense transformers, experts, ZeRO, relaxed
synchronisation. `--record` keeps the answers in `questions.json`. A step that is more than 0.2% longer than the recorded one is
marked, and the exit status is then 1. `--set` gives a constant another value, to see what it is worth:
`--set parsim.search.tree:UNLIKELY=0.2`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from machine import QUICK_NOTE, add_quick, machine_line

from parsim.app.load import problem_of, search_plans
from parsim.app.question import question_of
from parsim.errors import ParsimError
from parsim.hardware.cluster import Cluster
from parsim.hardware.compose import NodeGroup, load_network, mixed_cluster

RECORDED = Path(__file__).with_name("questions.json")
LONGER = 2e-3
"""Of a recorded step: what is marked."""

INFINIBAND = 'cluster.network="infiniband-400g"'
SEQ_2K, SEQ_4K = "model.args.seq=2048", "model.args.seq=4096"


def cluster_named(text: str) -> str | Cluster:
    """A profile or GPUs by name; `A + B`: a node of four of each."""
    gpus = text.split(" + ")
    if len(gpus) == 1:
        return text
    groups = [NodeGroup(gpu=gpu, gpus_per_node=4) for gpu in gpus]
    return mixed_cluster(groups, load_network("infiniband-400g"))


QUESTIONS: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
    # convolutions and small models
    *((name, "dgx1-v100-32gb", 1024, (f"cluster.devices={devices}",)) for name in ("mlp",) for devices in (1, 2, 4)),
    *(("resnet50", "dgx1-v100-32gb", batch, ()) for batch in (64, 256, 1024, 2048)),
    *(("resnet_small", "dgx1-v100-32gb", batch, ("cluster.devices=4",)) for batch in (64, 512)),
    ("resnet50", "pcie-8xv100", 512, ()),
    ("resnet50", "8xa100-sxm-80gb", 2048, ("training.precision=amp_bf16",)),
    ("resnet50", "dgx1-v100-32gb", 1024, ("cluster.nodes=4", 'cluster.network="infiniband-100g"')),
    ("vgg16", "dgx1-v100-32gb", 512, ()),
    ("vgg_small", "dgx1-v100-32gb", 256, ("cluster.devices=4",)),
    ("vgg16", "dgx1-v100-32gb", 256, ("cluster.devices=3",)),
    ("vit_b_16", "dgx1-v100-32gb", 256, ()),
    ("vit_b_16", "dgx1-v100-32gb", 1024, ("plan.mesh={pp=4}",)),
    ("vit_small", "dgx1-v100-32gb", 256, ("cluster.devices=4",)),
    ("bert", "dgx1-v100-16gb", 64, ()),
    ("bert", "dgx1-v100-32gb", 512, ("cluster.nodes=2", 'cluster.network="infiniband-100g"')),
    ("bert_small", "dgx1-v100-32gb", 64, ("cluster.devices=4",)),
    ("gpt_small", "dgx1-v100-32gb", 64, ("cluster.devices=2",)),
    ("gpt_small", "dgx1-v100-32gb", 64, ("cluster.devices=4", "model.granularity=sublayer")),
    # dense transformers: ample memory, then tight
    ("gpt2-xl", "2xt4", 8, ()),
    ("gpt2-xl", "dgx1-v100-32gb", 64, ()),
    ("gpt2-xl", "dgx1-v100-32gb", 32, ("plan.strategy=dp",)),
    ("llama3-8b", "1xh200", 8, (SEQ_4K,)),
    ("llama3-8b", "4xh200", 64, (SEQ_4K,)),
    ("llama3-8b", "8xh100-sxm", 64, ()),
    ("llama3-8b", "8xh100-sxm", 64, ("plan.strategy=dp",)),
    ("llama3-8b", "8xh100-sxm", 16, (SEQ_4K,)),
    ("llama3-8b", "8xa100-sxm-40gb", 32, (SEQ_2K,)),
    ("llama3-8b", "dgx1-v100-32gb", 64, (SEQ_2K,)),
    ("llama3-8b", "64xh100-sxm", 512, (INFINIBAND,)),
    ("llama3-8b", "256xh100-sxm", 1024, (INFINIBAND,)),
    ("llama2-7b", "8xa100-sxm-80gb", 32, (SEQ_2K,)),
    ("llama2-7b", "16xa100-sxm-80gb", 32, ('cluster.network="ethernet-25g"', SEQ_2K)),
    ("llama2-13b", "8xa100-sxm-80gb", 64, (SEQ_2K,)),
    ("llama2-13b", "32xa100-sxm-80gb", 128, ('cluster.network="ethernet-100g"', SEQ_2K)),
    ("llama2-70b", "64xa100-sxm-80gb", 64, (INFINIBAND, SEQ_4K)),
    ("llama3-70b", "64xh100-sxm", 512, (INFINIBAND,)),
    ("llama3-70b", "512xh100-sxm", 1024, (INFINIBAND,)),
    ("llama3-70b", "256xb200", 512, (INFINIBAND,)),
    ("llama3-70b", "1024xh100-sxm", 2048, (INFINIBAND,)),
    ("llama3-70b", "16384xh100-sxm", 16384, (INFINIBAND,)),
    ("llama3-70b", "64xh100-sxm", 64, (INFINIBAND, "plan.mesh={pp=4,tp=8}")),
    ("llama3-405b", "64xh100-sxm", 64, (INFINIBAND,)),
    ("llama3-405b", "1024xh100-sxm", 512, (INFINIBAND,)),
    ("qwen3-32b", "16xb200", 32, (INFINIBAND, SEQ_4K)),
    ("gpt-22b", "8xa100-sxm-80gb", 4, (SEQ_2K,)),
    ("gpt-175b", "1024xa100-sxm-80gb", 1536, ('cluster.network="infiniband-200g"', SEQ_2K)),
    # experts
    ("mixtral-8x7b", "64xh100-sxm", 256, (INFINIBAND, SEQ_4K)),
    ("qwen3-30b-a3b", "16xh100-sxm", 64, (INFINIBAND, SEQ_4K, "plan.strategy=dp")),
    ("deepseek-v3", "512xh100-sxm", 1024, (INFINIBAND, SEQ_4K)),
    # mixed clusters
    ("resnet50", "a100-sxm-80gb + v100-sxm-32gb", 512, ()),
    ("bert", "h100-sxm + a100-sxm-80gb", 128, ()),
    ("llama2-7b", "h100-sxm + a100-sxm-80gb", 32, (SEQ_2K,)),
    # keys that bind the search
    *(("bert", "dgx1-v100-32gb", 128, (f"plan.zero_stage={stage}",)) for stage in (0, 3)),
    ("vgg16", "dgx1-v100-32gb", 512, ("plan.strategy=mp",)),
    ("bert", "dgx1-v100-32gb", 128, ('plan.recompute="none"', "plan.strategy=hp")),
    ("llama2-7b", "8xa100-sxm-80gb", 64, (SEQ_2K, "plan.mesh={dp=4,tp=2}")),
    ("resnet50", "dgx1-v100-32gb", 512, ('plan.synchronisation="average/8"', "plan.strategy=dp")),
    ("mlp", "dgx1-v100-32gb", 512, ('plan.synchronisation="gossip/1 ring"', "plan.strategy=dp")),
)


def title(question: tuple[str, str, int, tuple[str, ...]]) -> str:
    """One line that names it."""
    name, cluster, batch, more = question
    return f"{name} on {cluster}, batch {batch}{''.join(', ' + each for each in more)}"


def asked(question: tuple[str, str, int, tuple[str, ...]]) -> dict[str, Any]:
    """The step of the fastest plan that fits with 95% (null: none does), its summary, what was considered, CPU seconds."""
    name, cluster, batch, more = question
    keys = [*more, "plan.fit_probability=0.95"]
    config = question_of(name, cluster=cluster_named(cluster), global_batch=batch, overrides=keys)
    problem = problem_of(config)
    begun = time.process_time()
    try:
        found = search_plans(problem, config)
    except ParsimError as error:
        return {"step_s": None, "plan": str(error)[:100], "plans": 0, "simulated": 0, "cpu_s": time.process_time() - begun}
    best = None if found.chosen is None else found.chosen.result
    return {
        "step_s": None if best is None else best.step_s.median,
        "plan": "nothing fits" if best is None else best.plan.summary()[:100],
        "plans": found.tally.considered,
        "simulated": found.tally.simulated,
        "cpu_s": round(time.process_time() - begun, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_quick(parser)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--set", action="append", default=[], metavar="MODULE:NAME=VALUE")
    parser.add_argument("--record", action="store_true", help=f"keep the answers in {RECORDED.name}")
    options = parser.parse_args()
    for text in options.set:
        where, value = text.split("=")
        module, name = where.split(":")
        before = getattr(importlib.import_module(module), name)
        setattr(importlib.import_module(module), name, type(before)(float(value)))
    print(machine_line(), *options.set)
    some = [question for question in QUESTIONS if options.only in title(question)]
    if options.quick:
        some = some[:2]
    known = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    longer = 0
    print("| question | recorded | step | difference | plans considered | simulated | CPU s, recorded | CPU s | plan |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for question in some:
        before, now = known.get(title(question), {}), asked(question)
        old, new = before.get("step_s"), now["step_s"]
        more = 0.0 if old is None else float("inf") if new is None else new / old - 1
        longer += more > LONGER
        figures = " | ".join("-" if each is None else f"{each:.6g}" for each in (old, new))
        cpu = " | ".join(f"{each:.2f}" if each is not None else "-" for each in (before.get("cpu_s"), now["cpu_s"]))
        mark = " LONGER" if more > LONGER else ""
        counts = f"{now['plans']:,} | {now['simulated']}"
        print(f"| {title(question)} | {figures} | {more:+.2%}{mark} | {counts} | {cpu} | {now['plan']} |", flush=True)
        if options.record:
            known[title(question)] = now
            RECORDED.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    if options.quick:
        print(QUICK_NOTE)
    sys.exit(longer > 0)


if __name__ == "__main__":
    main()
