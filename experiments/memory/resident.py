"""How much more does a process hold than its live tensors? One line per model and batch.

    python experiments/memory/resident.py MODEL SAMPLES

The peak of the resident set in plain training steps, less what the process held once torch had run a matrix product and a
convolution, beside the peak of live tensors. Linux alone: it reads /proc.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from parsim.execute.environment import resident_bytes
from parsim.execute.optimizer import distinct, flat_gradients
from parsim.execute.stage import seeded_module
from parsim.model.live_memory import LiveBytes
from parsim.model.losses import loss_sum
from parsim.model.spec import ModelSpec, example_batch, loss_of
from parsim.units import MIB

ROUNDS = 5
STEPS_PER_ROUND = 3


def main(name: str, samples: int) -> None:
    side = torch.randn(64, 64, requires_grad=True)
    kernel = torch.randn(4, 3, 3, 3, requires_grad=True)
    ((side @ side).sum() + torch.nn.functional.conv2d(torch.randn(1, 3, 8, 8), kernel).sum()).backward()  # type: ignore[no-untyped-call]
    before = resident_bytes()
    spec = ModelSpec(name=name)
    module = seeded_module(spec, 0, torch.float32, torch.device("cpu"))
    parameters = distinct(module.parameters())
    gradients = flat_gradients(parameters)
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    inputs, target = example_batch(spec, samples)

    def step() -> None:
        loss_sum(loss_of(spec), module(*inputs), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        gradients.zero_()

    step()
    state: list[Tensor] = [entry["momentum_buffer"] for entry in optimizer.state.values()]
    with LiveBytes() as live:
        for tensor in (*parameters, gradients, *module.buffers(), *inputs, target, *state):
            live.track(tensor)
        step()
    beside = []
    for _ in range(ROUNDS):
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set starts anew
        for _ in range(STEPS_PER_ROUND):
            step()
        beside.append(peak_resident_bytes() - before - live.peak_bytes)
    found = ", ".join(f"{size / MIB:.0f}" for size in beside)
    print(f"{name}, {samples} samples: live tensors {live.peak_bytes / MIB:.1f} MiB; beside them, by round: {found} MiB")


def peak_resident_bytes() -> int:
    """Of this process, since it was last cleared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
