"""How fast a rank computes at this moment: seconds of one small training step that never changes.

A shared machine computes a fifth faster in one half hour than in the next, and every price of a profile holds for the minutes
of its calibration. The same step, timed while calibrating and again beside a run, tells the two apart.

The step has what small models have: a convolution, batch and layer normalisation, attention, matrix products, forward and
backward through the interpreter and autograd, and an update with momentum. Leaves out communication, and that a machine may be
slower at one kind of work only.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS, WARM_STEPS = 8, 2
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
        """Of one step: the median of a few, after some that warm up. A rank that shares its core with others must be alone."""
        return statistics.median([self._step_s() for _ in range(WARM_STEPS + STEPS)][WARM_STEPS:])

    def _step_s(self) -> float:
        start_s = time.perf_counter()
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self._module(self._inputs), self._targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start_s


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
