"""What each process of a real gloo run does in the tests that compare such runs with the virtual ones."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from parsim.algorithms.arrivals import MergeEvent
from parsim.algorithms.staleness import decoupling
from parsim.relaxed.problems import LearningProblem, generated_problem, perceptron
from parsim.virtual.agent import Agent, TickRule, cut_sequential
from parsim.virtual.rounds import Partition

F64 = torch.float64


def small_problem() -> LearningProblem:
    return generated_problem(F64, samples=96, features=6, classes=4)


def small_model(problem: LearningProblem, seed: int = 3) -> nn.Sequential:
    return perceptron(problem, (7, 5, 6), seed=seed, dtype=F64, activation="tanh")


def flat(weights: Sequence[Tensor]) -> Tensor:
    return torch.cat([weight.flatten() for weight in weights])


def run_processes(world_size: int, folder: Path, work: Callable[..., list[Tensor]], *arguments: Any) -> list[list[Tensor]]:
    """What `work(rank, world_size, *arguments)` returned on every rank of a gloo group."""
    mp.spawn(_process, args=(world_size, folder, work, arguments), nprocs=world_size, join=True)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def _process(rank: int, world_size: int, folder: Path, work: Callable[..., list[Tensor]], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world_size), rank=rank, world_size=world_size)
    torch.save(work(rank, world_size, *arguments), folder / f"{rank}.pt")
    dist.barrier()  # nobody leaves while another still reads from it
    dist.destroy_process_group()
    os._exit(0)  # as the executor's ranks: no destructor of a library ends the process another way


def train_epoch(
    model: nn.Module, problem: LearningProblem, partition: Partition, worker: int, epoch: int, momentum: float
) -> None:
    """One epoch of a worker with a new torch.optim.SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    shard = partition.shards(problem.targets.numpy())[worker]
    for samples in partition.batches(shard, worker, epoch):
        index = torch.from_numpy(samples[samples >= 0])
        optimizer.zero_grad()
        problem.loss(model(problem.inputs[index]), problem.targets[index]).backward()
        optimizer.step()


def epoch_averaging(rank: int, world_size: int, partition: Partition) -> list[Tensor]:
    """Each rank trains on its shard; the weights are all_reduced after every epoch."""
    problem = small_problem()
    model = small_model(problem)
    for epoch in range(partition.epochs):
        train_epoch(model, problem, partition, rank, epoch, 0.9)
        for weight in model.parameters():
            dist.all_reduce(weight.data)
            weight.data.div_(world_size)
    return [weight.detach() for weight in model.parameters()]


def merging(rank: int, world_size: int, partition: Partition, order: tuple[MergeEvent, ...]) -> list[Tensor]:
    """Commutative merging with a recorded order of arrivals: the rank whose turn it is trains, halves the way, tells all."""
    problem = small_problem()
    merged = small_model(problem)
    mine = copy.deepcopy(merged)
    for event in order:
        if event.worker == rank:
            train_epoch(mine, problem, partition, rank, event.epoch, 0.0)
            for weight, own in zip(merged.parameters(), mine.parameters(), strict=True):
                weight.data.add_(own.data).mul_(0.5)
        for weight in merged.parameters():
            dist.broadcast(weight.data, src=event.worker)
        if event.worker == rank:
            mine.load_state_dict(merged.state_dict())
    return [weight.detach() for weight in mine.parameters()]


def decoupled(
    rank: int, world_size: int, modules: int, rule: TickRule, batches: list[list[tuple[Tensor, Tensor]]]
) -> list[Tensor]:
    """Agent (s, k) of fdg is rank s*K + k-1: P2P along k, an all_reduce of gradients among equal k."""
    group, k = rank // modules, rank % modules + 1
    peers = [dist.new_group([s * modules + place for s in range(world_size // modules)]) for place in range(modules)]
    schedule, problem = decoupling("fdg"), small_problem()
    agent = Agent(cut_sequential(small_model(problem), modules)[k - 1], k=k, modules=modules, rule=rule)
    width = agent.live[-1].shape[0]
    arrived: dict[str, Tensor] = {}
    for tick in range(len(batches) + schedule.span(modules)):
        forward, backward = tick - schedule.forward_tick(k, modules), tick - schedule.backward_tick(k, modules)
        sends: list[tuple[Tensor, int]] = []
        if k < modules and 0 <= backward < len(batches):
            below = agent.backward(backward, arrived["gradient"])
            sends += [(below, rank - 1)] if below is not None else []
        if 0 <= forward < len(batches):
            inputs, targets = batches[forward][group]
            output = agent.forward(forward, inputs if k == 1 else arrived["value"])
            if k < modules:
                sends.append((output, rank + 1))
            else:
                _, below = agent.loss_backward(forward, targets, problem.loss)
                sends += [(below, rank - 1)] if below is not None else []
        if (gradient := agent.ready_gradient()) is not None:
            summed = [part.clone() for part in gradient]
            for part in summed:
                dist.all_reduce(part, group=peers[k - 1])
                part.div_(world_size // modules)
            agent.update(summed, tick)
        requests = [dist.isend(value, peer) for value, peer in sends]
        if k > 1 and 0 <= tick - schedule.forward_tick(k - 1, modules) < len(batches):
            arrived["value"] = torch.empty(len(batches[0][0][0]), agent.live[0].shape[1], dtype=F64)
            dist.recv(arrived["value"], rank - 1)
        if k < modules and 0 <= tick - schedule.backward_tick(k + 1, modules) < len(batches):
            arrived["gradient"] = torch.empty(len(batches[0][0][0]), width, dtype=F64)
            dist.recv(arrived["gradient"], rank + 1)
        for request in requests:
            request.wait()
    return [weight.detach() for weight in agent.live]
