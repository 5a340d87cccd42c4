"""Seconds and memory of the virtual cluster: 64 replicas on the digits, 1,008 on generated data. Prints, asserts nothing.

python benchmarks/bench_virtual.py [--replicas 1008] [--samples 64] [--epochs 20] [--planned] [--quick]

`--planned` alone trains replicas of the digits MLP under plans for `summit-v100`, on the plan's clock: 1,008 and 100 steps.
"""

from __future__ import annotations

import argparse
import platform
import resource
import sys
import time
from itertools import islice

import torch
from machine import QUICK_NOTE, add_quick, processor_name

from parsim.data.samples import BatchOrder
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.synchronisation import parse_synchronisation
from parsim.predict.evaluate import simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.relaxed.problems import LearningProblem, load_problem, perceptron
from parsim.relaxed.replicas import LocalOptimizer, LocalTraining, steps_of, train_planned
from parsim.search.by_hand import custom_plan

BATCH = 8
GRAPHS = ("ring", "one_peer_exponential", "exponential", "complete")


def trained(problem: LearningProblem, name: str, n: int, epochs: int) -> tuple[float, float]:
    """Accuracy of replicas of an MLP with 64 hidden units that gossip on a graph, and the wall seconds it took."""
    model = perceptron(problem, (64,), seed=0, dtype=problem.inputs.dtype)
    training = LocalTraining(model, problem, LocalOptimizer(learning_rate=0.1))
    order = BatchOrder(n=len(problem), global_batch=n * BATCH, seed=0)
    begun = time.perf_counter()
    steps = steps_of(parse_synchronisation(f"gossip/1 {name}"), n, training, order)
    workers, _ = next(islice(steps, epochs * order.steps_per_epoch - 1, None))
    return training.score(workers.weights.mean(0)), time.perf_counter() - begun


def peak_mib() -> float:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024**2 if sys.platform == "darwin" else peak / 1024


PLANNED = (
    "average/8",
    "gossip/1 ring",
    "gossip/1 one_peer_exponential",
    "gossip/1 exponential",
    "gossip/1 ada(start=16, kind=exponential, rate=0.5, rounds=25, epochs=4)",
)
NODE = 6


def planned(rule: str, replicas: int, steps: int) -> str:
    """Simulate the plan on Summit's nodes, then train its replicas: CPU seconds of both, what was learnt, and when."""
    nodes = max(1, replicas // NODE)
    data = load_problem("digits")
    cluster = cluster_from_profile(load_profile("summit-v100"), nodes=nodes, network="infiniband-100g" if nodes > 1 else None)
    model = load_model(ModelSpec(name="mlp", args=(("width", 64), ("depth", 1)), input_shape=(1, 8, 8)))
    problem = PlanningProblem(model=model, cluster=cluster, global_batch=cluster.size, numerics=Numerics(optimizer="sgd"))
    plan = custom_plan(problem, Mesh(dp=cluster.size), synchronisation=parse_synchronisation(rule))
    begun = time.process_time()
    step_s = simulated_step(problem, plan).step_s
    simulated = time.process_time()
    training = LocalTraining(perceptron(data, (64,), seed=0), data, LocalOptimizer(learning_rate=0.4))
    order = BatchOrder(n=len(data), global_batch=cluster.size, seed=0)
    found = train_planned(plan, training, order, steps, step_s=step_s, score_every=steps)
    trained_s = time.process_time() - simulated
    return (
        f"{cluster.size:5d} replicas, {steps} steps {rule:72s} {simulated - begun:5.1f} CPU-s to simulate {trained_s:6.1f} to "
        f"train   accuracy {found.scores[-1][1]:.3f} after {1e3 * found.seconds:.1f} simulated ms   peak {peak_mib():6.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1008)
    parser.add_argument("--samples", type=int, default=64, help="per replica")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--planned", action="store_true", help="replicas under plans alone")
    parser.add_argument("--steps", type=int, default=100, help="of --planned")
    add_quick(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.replicas, arguments.samples, arguments.epochs, arguments.steps = 18, 8, 1, 2
    torch.set_num_threads(1)
    for rule in PLANNED if arguments.planned or arguments.quick else ():
        print(planned(rule, arguments.replicas, arguments.steps), flush=True)
    if arguments.planned:
        return
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
            score, seconds = trained(problem, name, n, arguments.epochs)
            rate = n * arguments.epochs * (len(problem) // (n * BATCH)) / seconds
            print(
                f"{n:5d} replicas x {len(problem) // n:3d} samples of {problem.name:10s} {name:22s} {seconds:7.1f} s "
                f"{rate:9.0f} steps/s   accuracy {score:.3f}   peak {peak_mib():6.0f} MiB"
            )
    if arguments.quick:
        print(QUICK_NOTE)


if __name__ == "__main__":
    main()
