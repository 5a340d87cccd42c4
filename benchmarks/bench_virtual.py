"""Seconds and memory of the virtual cluster: 64 replicas on the digits, 1,008 on generated data. Prints, asserts nothing.

python benchmarks/bench_virtual.py [--replicas 1008] [--samples 64] [--epochs 20] [--quick]
"""

from __future__ import annotations

import argparse
import platform
import resource
import sys
import time

import numpy as np
import torch
from machine import QUICK_NOTE, add_quick, processor_name

from parsim.algorithms.graphs import mixing_graph
from parsim.virtual.clock import random_stragglers
from parsim.virtual.gossip import GossipRule, GossipRun, train_on_graph
from parsim.virtual.local import LocalOptimizer, LocalTraining
from parsim.virtual.problems import LearningProblem, load_problem, perceptron
from parsim.virtual.rounds import Partition

BATCH = 8
GRAPHS = ("ring", "one_peer_exponential", "exponential", "complete")


def trained(problem: LearningProblem, name: str, n: int, epochs: int) -> tuple[GossipRun, float]:
    """A run of an MLP with 64 hidden units, and the wall seconds it took."""
    model = perceptron(problem, (64,), seed=0, dtype=problem.inputs.dtype)
    training = LocalTraining(model, problem, LocalOptimizer(learning_rate=0.1))
    partition = Partition(workers=n, epochs=epochs, batch=BATCH)
    step_s = random_stragglers(n, probability=0.01, factor=3.0)
    begun = time.perf_counter()
    run = train_on_graph(training, partition, GossipRule(graph=mixing_graph(name, n)), step_s=step_s)
    return run, time.perf_counter() - begun


def peak_mib() -> float:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024**2 if sys.platform == "darwin" else peak / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1008)
    parser.add_argument("--samples", type=int, default=64, help="per replica")
    parser.add_argument("--epochs", type=int, default=20)
    add_quick(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.replicas, arguments.samples, arguments.epochs = 16, 8, 1
    torch.set_num_threads(1)
    problems = {
        64: load_problem("digits", dtype=torch.float32),
        arguments.replicas: load_problem(
            "generated", dtype=torch.float32, samples=arguments.replicas * arguments.samples, features=64
        ),
    }
    print(f"{platform.node()}: {processor_name()}, Python {platform.python_version()}, torch {torch.__version__}, one thread")
    print(f"{arguments.epochs} epochs, batch {BATCH}, MLP 64-64-10, float32; before any training {peak_mib():.0f} MiB resident")
    for n, problem in problems.items():
        for name in GRAPHS:
            run, seconds = trained(problem, name, n, arguments.epochs)
            steps = int(np.ceil(run.replicas.workers.steps.double().mean().item()))
            rate = n * steps / seconds
            print(
                f"{n:5d} replicas x {len(problem) // n:3d} samples of {problem.name:10s} {name:22s} {seconds:7.1f} s "
                f"{rate:9.0f} steps/s   accuracy {run.score:.3f}   simulated {run.clock.now_s:6.0f} s   "
                f"peak {peak_mib():6.0f} MiB"
            )
    if arguments.quick:
        print(QUICK_NOTE)


if __name__ == "__main__":
    main()
