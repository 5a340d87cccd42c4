"""One extension of each kind, outside the package; docs/extending.md explains them, tests run them.

A run file beside this file names them as "my_extensions:ROW".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parsim.data import DataRequest, DataSource
from parsim.data.samples import Dataset
from parsim.formats.exports import EvaluatedStep, Exported
from parsim.formats.imports import MachineReading
from parsim.formats.nccl_tests import NcclLog, NcclRow, NcclTest, reading_of
from parsim.formats.source import FileFormat, SourceFile
from parsim.hardware.devices import Allocator, DeviceKind, Spread
from parsim.model.formats import NumberFormat
from parsim.model.objective import Loss
from parsim.model.optimizers import Optimizer
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import Action, PipelineOrder, in_a_v
from parsim.plans.plan import Plan
from parsim.predict.problem import PlanningProblem
from parsim.report.trace import task_label
from parsim.search.families import Strategy
from parsim.search.stages import balanced_plan
from parsim.work import CollectiveKind, Phase

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer as TorchOptimizer


# model
def tanh_mlp(hidden: int = 32, layers: int = 6, classes: int = 10) -> nn.Module:
    from torch import nn

    sizes = [64, *[hidden] * (layers - 1)]
    blocks = [nn.Sequential(nn.Linear(before, after), nn.Tanh()) for before, after in pairwise(sizes)]
    return nn.Sequential(nn.Flatten(), *blocks, nn.Linear(sizes[-1], classes))


# optimizer
def _rmsprop(parameters: list[Tensor], lr: float) -> TorchOptimizer:
    import torch

    return torch.optim.RMSprop(parameters, lr=lr, foreach=True)


RMSPROP = Optimizer(
    make=_rmsprop,
    states=("square_avg",),
    accesses_per_element=14,
    learning_rate=1e-3,
    temporary_bytes_per_element=4,
)

# precision
FP8_MIXED = NumberFormat(element_bytes=1, weight_bytes=4, autocast="float8_e4m3fn", devices=())

# device type
NPU = DeviceKind(
    endpoint="xpu",
    allocator=Allocator(library_bytes=Spread(10e6, 50e6, 200e6), lost_share=Spread(0.0, 0.05, 0.2)),
)


# collective
def _gather(array: Tensor, group: ProcessGroup) -> Callable[[], object]:
    import torch.distributed as dist

    parts = list(array.chunk(group.size()))
    own = parts[dist.get_rank(group)].clone()
    received = parts if dist.get_rank(group) == 0 else None
    return lambda: dist.gather(own, received, group_dst=0, group=group)


GATHER = CollectiveKind(hops=lambda n: n - 1, traffic=lambda n: (n - 1) / n, rooted=True, call=_gather)


# pipeline order
def _there_and_back(rank: int, ranks: int, microbatches: int, chunks: int) -> tuple[Action, ...]:
    stages = [stage for stage in range(ranks * chunks) if in_a_v(stage, ranks) == rank]
    return tuple(
        Action(stage, phase, number)
        for phase, own in ((Phase.FORWARD, stages), (Phase.BACKWARD, stages[::-1]))
        for stage in own
        for number in range(microbatches)
    )


GPIPE_V = PipelineOrder(actions=_there_and_back, place=in_a_v, fewest_chunks=2, most_chunks=2)


# strategy
def _zero_bubble_pipelines(problem: PlanningProblem) -> Iterator[Plan]:
    mesh = Mesh(pp=problem.cluster.size)
    for microbatches in (2 * mesh.pp, 4 * mesh.pp):
        if problem.global_batch % microbatches == 0:
            yield balanced_plan(problem, "custom", mesh, microbatches=microbatches, pipeline_order="zero-bubble-v", chunks=2)


ZERO_BUBBLE = Strategy(plans=_zero_bubble_pipelines)


# dataset
def _stripes(ask: DataRequest) -> Dataset:
    rng = np.random.default_rng([ask.seed, ask.split == "train"])
    targets = rng.integers(0, ask.target.classes, 256)
    images = rng.standard_normal((256, 1, 8, 8), dtype=np.float32)
    images[np.arange(256), 0, targets % 8] += 3.0  # the row that is bright tells the class
    return Dataset(
        name="stripes",
        source="generated: one bright row per class",
        split=ask.split,
        stored=images,
        targets=targets,
        input_shape=ask.input_shape,
        classes=ask.target.classes,
    )


STRIPES = DataSource(load=_stripes)


# loss
def _smoothed(output: Tensor, target: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.cross_entropy(output, target, reduction="sum", label_smoothing=0.1)


SMOOTHED = Loss(total=_smoothed)


# file format
def _read_timings(source: SourceFile) -> MachineReading:
    tests = []
    for operation, devices, sizes_and_seconds in (line.split(",") for line in source.text.splitlines()[1:]):
        pairs = (pair.split(":") for pair in sizes_and_seconds.split())
        rows = tuple(NcclRow(size_bytes=int(size), seconds=float(seconds), in_place=False) for size, seconds in pairs)
        group = tuple(map(int, devices.split()))
        tests.append(NcclTest(operation=operation, hosts=(group,), devices=(), rows=rows, repeats=1))
    return reading_of(NcclLog(tests=tuple(tests), skipped={}), source)


def _write_spans(step: EvaluatedStep, file: Path) -> Exported:
    graph, timeline = step.evaluation.graph, step.evaluation.timeline
    spans = [f"{task_label(graph.tasks[span.task])},{span.start_s},{span.end_s}" for span in timeline]
    file.write_text("\n".join(["task,start_s,end_s", *spans]))
    return Exported(format="TIMINGS", file=file, summary=f"{len(spans)} spans: {file}")


TIMINGS = FileFormat(
    what="a CSV of timings",
    reads="machine",
    sniff=lambda source: source.begins("collective,devices,"),
    read=_read_timings,
    writes="step",
    write=_write_spans,
    file="spans.csv",
)
