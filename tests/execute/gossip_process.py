"""One rank of real decentralised training over gloo: a module, torch.optim and point-to-point messages, nothing of `virtual`
but the data. Reads JOB.json; leaves its weights of every case in rank{r}.npz."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn

from experiments.relaxed.sharded import Partition
from parsim.execute.processes.group import close_group, init_group, worker_main
from parsim.plans.mixing import mixing_graph
from parsim.relaxed.problems import LearningProblem, load_problem, perceptron

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def problem_of(n: int) -> LearningProblem:
    return load_problem("generated", dtype=torch.float64, samples=40 * n, features=6, classes=3)


def model_of(problem: LearningProblem) -> nn.Sequential:
    return perceptron(problem, (8,), seed=3, dtype=torch.float64, activation="tanh")


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def load(model: nn.Module, weights: torch.Tensor) -> None:
    place = 0
    for value in model.parameters():
        value.data.copy_(weights[place : place + value.numel()].view_as(value))
        place += value.numel()


def exchange(matrix: np.ndarray, own: torch.Tensor, rank: int) -> torch.Tensor:
    """sum_j W_ij x_j by messages over the links of W alone."""
    received = {int(j): torch.empty_like(own) for j in np.flatnonzero(matrix[rank]) if j != rank}
    work = [distributed.irecv(value, j) for j, value in received.items()]
    work += [distributed.isend(own, int(i)) for i in np.flatnonzero(matrix[:, rank]) if i != rank]
    for request in work:
        request.wait()
    return matrix[rank, rank] * own + sum(matrix[rank, j] * value for j, value in received.items())


def train(case: dict, rank: int, n: int) -> np.ndarray:
    problem = problem_of(n)
    model = copy.deepcopy(model_of(problem))
    optimizer = OPTIMIZERS[case["optimizer"]](model.parameters())
    order = Partition(workers=n, epochs=case["epochs"], batch=case["batch"], seed=case["seed"]).order(problem)
    push_sum, graph = case.get("push_sum", False), mixing_graph(case["graph"], n)
    mass, biased, t = torch.ones(1, dtype=torch.float64), vector(model), 0
    for epoch in range(case["epochs"]):
        for samples in order.batches(rank, epoch):
            before = vector(model)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(problem.inputs[samples]), problem.targets[samples]).backward()
            if case["way"] == "centralised":
                for value in model.parameters():
                    distributed.all_reduce(value.grad)
                    value.grad /= n
            optimizer.step()
            change = vector(model) - before
            if push_sum:
                biased = exchange(graph(t), biased + change, rank)
                mass = exchange(graph(t), mass, rank)
                load(model, biased / mass)
            elif case["way"] == "adapt_combine":
                load(model, exchange(graph(t), before + change, rank))
            elif case["way"] == "combine_adapt":
                load(model, exchange(graph(t), before, rank) + change)
            t += 1
    return vector(model).numpy()


def run(job_path: Path) -> None:
    place = init_group()
    cases = json.loads(job_path.read_text())
    results = {name: train(case, place.rank, place.world_size) for name, case in cases.items()}
    np.savez(job_path.parent / f"rank{place.rank}.npz", **results)
    close_group(place)


if __name__ == "__main__":
    worker_main(run)
