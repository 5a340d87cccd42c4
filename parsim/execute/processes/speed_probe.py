"""How fast a rank's core is at this moment: the pace, which is the seconds of one small training step that never changes.

A core of a shared machine takes half as long again in one second as in the next (another virtual machine works beside it, or
does not), and how often changes from minute to minute. The same step, timed right before and after whatever is measured, while
calibrating and beside a run, tells the machine from what it does.

The step has what small models have: a convolution, batch and layer normalisation, attention, matrix products, forward and
backward through the interpreter and autograd, and an update with momentum. All ranks that will work together make it at once:
cores that share caches or a memory slow one another. Of ranks that share a core the first makes it, while the others wait.
Leaves out that a machine may be slower at one kind of work only.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS, WARM_STEPS = 3, 1
SAMPLES, CHANNELS, SIDE, HEADS, CLASSES = 8, 32, 8, 4, 10
SEED = 0


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
        """Of one step: the median of a few, after some that warm up."""
        seconds = []
        with torch.enable_grad():
            for _ in range(WARM_STEPS + STEPS):
                start_s = time.perf_counter()
                self._step()
                seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds[WARM_STEPS:])

    def _step(self) -> None:
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self._module(self._inputs), self._targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


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
