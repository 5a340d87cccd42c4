"""How fast a rank's core or GPU is at this moment: the pace, which is the seconds of one training step that never changes.

A core of a shared machine can take half as long again in one second as in the next, because other virtual machines share
the hardware. How often this happens changes from minute to minute. The same step, timed right before and after whatever
is measured, while calibrating and beside a run, tells the machine from what it does.

The step has what models have: a convolution, batch and layer normalisation, attention, matrix products, forward and backward
through the interpreter and autograd, and an update with momentum. All ranks that will work together make it at once: cores that
share caches or a memory slow one another. Of ranks that share a core the first makes it, while the others wait.

The speeds of cores and GPUs are independent. The probe step of a GPU is large enough to keep it busy. Its own events
behind a hold time it (`parsim.execute.cuda.driver`), so a slow host does not make it longer. It runs under autocast
to fp16, so that whether this process rounds fp32 to TF32 does not change it.

Leaves out that a machine may be slower at one kind of work only.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from parsim.execute.cuda.driver import DeviceClock, Group, driver_of, timed_groups

STEPS, WARM_STEPS = 3, 1
HEADS, CLASSES = 4, 10
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSize:
    """Size of the probe's step: images and their side, and channels of its convolutions; tokens are as wide as two channels."""

    samples: int
    side: int
    channels: int


CORE_SIZE = ProbeSize(samples=8, side=8, channels=32)
GPU_SIZE = ProbeSize(samples=32, side=32, channels=256)
"""0.7 Tflop and 1.2 GB of fp32 activations in a step of some hundred kernels: milliseconds on any GPU of these years."""


class SpeedProbe:
    """The step on one device. Making it leaves the state of torch's random generator as it was. driver: times it by events;
    None: by the host's clock, as on a CPU. Left out: that of the device."""

    def __init__(self, device: torch.device, *, driver: DeviceClock | None = None, size: ProbeSize | None = None) -> None:
        on_gpu = device.type == "cuda"
        size = size or (GPU_SIZE if on_gpu else CORE_SIZE)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self._module = _Probe(size.channels).to(device)
            self._inputs = torch.randn(size.samples, 3, size.side, size.side).to(device)
            self._targets = torch.randint(0, CLASSES, (size.samples,)).to(device)
        self._driver = driver or driver_of(device)
        self._half = on_gpu
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=0.0, momentum=0.9, foreach=True)

    def seconds(self) -> float:
        """Seconds of one step: the median of a few, after some that warm up."""
        with torch.enable_grad():
            if self._driver is not None:
                for _ in range(WARM_STEPS):
                    self._step()
                return statistics.median(timed_groups(self._driver, [Group([self._step])] * STEPS).seconds)
            seconds = []
            for _ in range(WARM_STEPS + STEPS):
                start_s = time.perf_counter()
                self._step()
                seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds[WARM_STEPS:])

    def _step(self) -> None:
        self._optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16) if self._half else contextlib.nullcontext():
            loss = functional.cross_entropy(self._module(self._inputs), self._targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


class _Probe(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )
        width = 2 * channels
        self.embed = nn.Linear(channels, width)
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
