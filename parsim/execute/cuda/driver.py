"""The driver of a real GPU: torch.cuda's streams and events."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch
from torch import Tensor

URGENT, USUAL = -1, 0
"""torch.cuda's priorities: the lower the number, the sooner."""


class TorchCudaDriver:
    """See `parsim.execute.cuda.streams.Driver`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def stream(self, *, urgent: bool) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=URGENT if urgent else USUAL)  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def finish(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def host_s(self) -> float:
        return time.perf_counter()

    def used(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        if tensor.is_cuda:
            tensor.record_stream(stream)
