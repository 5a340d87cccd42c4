"""Forward of a component that keeps only its inputs, and the same forward again when its backward needs saved tensors.

The second run has the same inputs, generator states (so dropout draws the same mask) and buffers as the first. Its
changes to buffers are discarded, so running statistics are updated once.

Leaves out: whatever else a forward may read that changes between the two runs (a global, a file).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parsim.model.autograd.cut import Saved, forward_component
from parsim.model.runnable import Runnable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecomputeInputs:
    """What a second run of a forward needs.

    Attributes:
        inputs: as given. buffers: copies from before the first run, in the order of `Runnable.buffer_names`.
        generators: the state of the CPU's generator, and on a GPU also that of the GPU's.
    """

    inputs: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    generators: tuple[Tensor, ...]


def forward_keeping_inputs(
    runnable: Runnable, inputs: Sequence[Tensor], device: torch.device
) -> tuple[tuple[Tensor, ...], RecomputeInputs]:
    """Run `runnable` on `inputs` without saving anything for a backward. Returns outputs, and what `recompute` needs."""
    kept = RecomputeInputs(
        inputs=tuple(value.detach() for value in inputs),
        buffers=tuple(buffer.clone() for buffer in runnable.buffers()),
        generators=_generator_states(device),
    )
    with torch.no_grad():
        outputs, _ = forward_component(runnable, kept.inputs)
    return outputs, kept


def recompute(runnable: Runnable, kept: RecomputeInputs, device: torch.device) -> Saved:
    """Run the forward again, saving for its backward. Generators and buffers are afterwards as they were before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), runnable.reading_buffers(kept.buffers):
        torch.set_rng_state(kept.generators[0])
        for state in kept.generators[1:]:
            torch.cuda.set_rng_state(state, device)
        return forward_component(runnable, kept.inputs)[1]


def _generator_states(device: torch.device) -> tuple[Tensor, ...]:
    own = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return (torch.get_rng_state(), *own)
