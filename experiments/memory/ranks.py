"""Real steps of many plans on a few gloo ranks, forked from this process: nothing is imported or traced twice.

Every rank writes what it measured of a plan as soon as it has it, so a run that was cut short goes on where it stopped. The
ranks run the same `RankRun` as a launch does. Left out of a launch: pinning and priorities, which change no memory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from parsim.execute.job import RunSpec
from parsim.execute.optimizer import distinct, flat_gradients
from parsim.execute.processes.group import ProcessPlace
from parsim.execute.rank_run import ProcessGroups, RankRun
from parsim.execute.stage import seeded_module
from parsim.files import write_text_atomically
from parsim.model.build import example_batch, interface_of
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.model.total_loss import total_loss
from parsim.model.trace.count import HALF
from parsim.model.trace.memory import LiveBytes
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex


def record_path(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.rank{rank}.json"


def is_measured(folder: Path, run: RunSpec) -> bool:
    return all(record_path(folder, run.name, rank).is_file() for rank in range(run.plan.world_size))


def measured(folder: Path, run: RunSpec) -> list[dict[str, Any]]:
    """By rank: `peak_bytes` and `lines`."""
    return [json.loads(record_path(folder, run.name, rank).read_text()) for rank in range(run.plan.world_size)]


def measure(model: Model, runs: Sequence[RunSpec], folder: Path) -> None:
    """One step to warm up and one that is counted, of every run, one after another. Raises what a rank raises."""
    folder.mkdir(parents=True, exist_ok=True)
    if runs:
        size = max(run.plan.world_size for run in runs)
        with tempfile.TemporaryDirectory() as store:
            arguments = (size, Path(store) / "store", model, runs, folder)
            start_processes(_rank, args=arguments, nprocs=size, start_method="fork")  # type: ignore[no-untyped-call]


def _rank(rank: int, size: int, store: Path, model: Model, runs: Sequence[RunSpec], folder: Path) -> None:
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)  # type: ignore[attr-defined]
    groups = ProcessGroups(timeout_s=600.0)
    place = ProcessPlace(rank=rank, world_size=size, local_rank=rank, local_world_size=size, attempt=0)
    for run in runs:
        layout = PlanIndex(run.plan, model)
        graph = lower(run.plan, model)
        groups.make(graph, run.precision)
        if rank < run.plan.world_size:
            entry = RankRun(run, layout, graph, place, groups.mine, steps=1)
            entry.step(keep=False)
            entry.measure_memory()
            entry.close()
            found: Mapping[str, Any] = {"peak_bytes": entry.record.peak_bytes, "lines": entry.record.memory_lines}
            write_text_atomically(record_path(folder, run.name, rank), json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


def autocast_peak_bytes(spec: ModelSpec, samples: int, *, autocast: bool = True) -> int:
    """Most bytes of live tensors in a forward, loss and backward over `samples` samples (without autocast in fp32); weights,
    gradients (one flat array) and the batch included, no optimizer."""
    module = seeded_module(spec, 0, torch.float32, torch.device("cpu"))
    inputs, target = example_batch(spec, samples)
    interface = interface_of(spec)
    args, kwargs = interface.arguments(inputs)
    parameters = distinct(module.parameters())
    gradients = flat_gradients(parameters)
    with LiveBytes() as live:
        for tensor in (*parameters, gradients, *module.buffers(), *inputs.values(), *([] if target is None else [target])):
            live.track(tensor)
        with torch.autocast("cpu", dtype=HALF, enabled=autocast):
            loss = total_loss(interface.objective, module(*args, **kwargs), target, samples)
        del inputs, target, args, kwargs  # as the executor does: a backward lets go of what it has read last
        loss.backward()  # type: ignore[no-untyped-call]
        return int(live.peak_bytes)
