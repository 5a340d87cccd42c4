"""One plain step under the CPU's autocast, outside any plan, under the eyes of the live-bytes counter.

What half precision saves is checked on this step, in which nothing but the model is alive.
"""

from __future__ import annotations

import torch

from parsim.execute.optimizer import distinct, flat_gradients
from parsim.execute.stage import seeded_module
from parsim.model.build import example_batch, interface_of
from parsim.model.spec import ModelSpec
from parsim.model.total_loss import total_loss
from parsim.model.trace.count import HALF
from parsim.model.trace.memory import LiveBytes


def autocast_peak_bytes(spec: ModelSpec, samples: int, *, autocast: bool = True) -> int:
    """Most bytes of live tensors in a forward, loss and backward over `samples` samples; weights, gradients (one flat array)
    and the batch included, no optimizer.

    Args:
        autocast: False for the same step in fp32.
    """
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
