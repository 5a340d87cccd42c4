"""How fast a rank computes at this moment: seconds of one small training step that never changes.

A shared machine computes a fifth faster in one half hour than in the next, and every price of a profile holds for the minutes
of its calibration. The same step, timed while calibrating and again beside a run, tells the two apart.

The step has what small models have: a convolution, batch and layer normalisation, attention, matrix products, forward and
backward through the interpreter and autograd, and an update with momentum. Rank 0 makes it alone, then every core at once:
cores that share caches or a memory slow one another by more in one half hour than in the next. Then all ranks exchange a small
array.
Leaves out that a machine may be slower at one kind of work only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from parsim.execute.speed import Speed

STEPS, WARM_STEPS = 8, 2
SAMPLES, CHANNELS, SIDE, HEADS, CLASSES = 8, 32, 8, 4, 10
SEED = 0
EXCHANGED_ELEMENTS, EXCHANGES, WARM_EXCHANGES = 1 << 16, 8, 2


class SpeedProbe:
    """The step on one device. Making it leaves the state of torch's random generator as it was."""

    def __init__(self, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self._module = _Probe().to(device)
            self._inputs = torch.randn(SAMPLES, 3, SIDE, SIDE).to(device)
            self._targets = torch.randint(0, CLASSES, (SAMPLES,)).to(device)
        self._device = device
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=0.0, momentum=0.9, foreach=True)

    def seconds(self) -> float:
        """Of one step: the median of a few, after some that warm up. A rank that shares its core with others must be alone."""
        return _median_s(self._step, WARM_STEPS, STEPS)

    def _step(self) -> None:
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self._module(self._inputs), self._targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_speed(probe: SpeedProbe | None, device: torch.device) -> Speed:
    """How fast the machine is at this moment; called by every rank of the default group, with None where it has no core."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    alone_s = probe.seconds() if probe is not None and rank == 0 else None
    dist.barrier()
    together_s = None if probe is None else probe.seconds()
    if world_size == 1:
        return Speed(alone_s, together_s, None)
    array = torch.ones(EXCHANGED_ELEMENTS, device=device)

    def exchange() -> None:
        dist.all_reduce(array, op=dist.ReduceOp.MAX)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    dist.barrier()
    return Speed(alone_s, together_s, _median_s(exchange, WARM_EXCHANGES, EXCHANGES))


def _median_s(call: Callable[[], None], warm: int, kept: int) -> float:
    seconds = []
    for _ in range(warm + kept):
        start_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[warm:])


class _Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False),
            nn.BatchNorm2d(CHANNELS),
            nn.ReLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
            nn.BatchNorm2d(CHANNELS),
            nn.ReLU(),
        )
        width = 2 * CHANNELS
        self.embed = nn.Linear(CHANNELS, width)
        self.norm = nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.classify = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(self.convolutions(images).flatten(2).transpose(1, 2))
        parts = self.projections(self.norm(tokens)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]
        tokens = tokens + functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        tokens = tokens + self.narrow(functional.gelu(self.widen(tokens)))
        scores: Tensor = self.classify(tokens.mean(dim=1))
        return scores
