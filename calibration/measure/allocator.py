"""Memory of a rank beyond its live tensors and the framework's context, at the peak of its training steps.

Before anything else is in memory one case after the other is built, trained for a few steps and let go, each in a heap that was
given back before. Live tensors are counted alike on both kinds of device, operator by operator. On a CPU they are compared with
the peak of the resident set (Linux alone, which keeps one). On a GPU they are compared with what its driver reports as taken,
less what it reported before the first model. Of that the raw points keep what torch's allocator was asked for, what it gave out
in whole blocks, and
what it holds: live <= requested <= allocated <= reserved <= driver. Leaves out other processes on the GPU that take or give
back memory meanwhile: a case of which these figures are not in that order is left out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calibration.measure.components import Case, samples_for
from parsim.execute.operations import StepWatch
from parsim.execute.processes.machine import forget_peak, peak_resident_bytes, resident_bytes
from parsim.execute.processes.setup import give_back_freed_memory
from parsim.execute.rank_run import watching
from parsim.model.spec import ModelSpec

STEPS = 5
"""After which the heap has settled (`parsim.execute.processes.setup`)."""


def measure_allocator(cases: Iterable[Callable[[], Case]], context_bytes: int) -> list[dict[str, Any]]:
    """One entry per case, made by a function so that only one is there at a time; none where no peak is kept.

    Entries: model, samples; live_bytes (of tensors, at the peak), dynamic_bytes (that part which comes and goes within a step),
    beside_bytes (everything else but the context); on a GPU also requested_bytes, allocated_bytes, reserved_bytes and
    driver_bytes.
    """
    found = []
    for make in cases:
        _let_go()
        case = make()
        try:
            entry = _on_gpu(case, context_bytes) if case.on_gpu else _on_cpu(case, context_bytes)
        finally:
            case.streams.close()
        if entry is not None:
            found.append(entry)
        elif not case.on_gpu:
            break
        del case
    _let_go()
    return found


def reading_bytes(specs: Iterable[ModelSpec], seed: int) -> int:
    """What this process grows by when it reads the samples of these models for the first time: mostly libraries that read."""
    before = resident_bytes()
    for spec in specs:
        samples_for(spec, seed)
    return max(0, resident_bytes() - before)


def _on_cpu(case: Case, context_bytes: int) -> dict[str, Any] | None:
    case.step()
    live_bytes = _live_bytes(case)
    if not forget_peak():
        return None
    for _ in range(STEPS):
        case.step()
    return _entry(case, live_bytes, peak_resident_bytes() - context_bytes)


def _on_gpu(case: Case, context_bytes: int) -> dict[str, Any] | None:
    device = case.stage.device
    case.step()
    live_bytes = _live_bytes(case)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(STEPS):
        case.step()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    taken = GpuMemory.read(torch.cuda.memory_stats(device), total - free - context_bytes)
    if not taken.in_order(live_bytes):
        return None
    return {**_entry(case, live_bytes, taken.driver_bytes), **taken._asdict()}


class GpuMemory(NamedTuple):
    """Peaks of one process without the context: bytes that tensors requested, that torch's allocator gave out, that it
    holds, and that the driver reports as used."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    driver_bytes: int

    @classmethod
    def read(cls, stats: Mapping[str, Any], driver_bytes: int) -> GpuMemory:
        """Args: stats: of `torch.cuda.memory_stats`. driver_bytes: now; it has not fallen since the peak, for nothing reserved
        was given back."""
        requested, allocated, reserved = (
            int(stats.get(f"{name}_bytes.all.peak", 0)) for name in ("requested", "allocated", "reserved")
        )
        return cls(requested, allocated, reserved, driver_bytes)

    def in_order(self, live_bytes: int) -> bool:
        """Whether each contains the one before; where not, another process came between."""
        ordered = (live_bytes, *self)
        return all(inner <= outer for inner, outer in pairwise(ordered))


def _live_bytes(case: Case) -> int:
    """Bytes of tensors at the peak of one step."""
    with watching(case.stage) as watch:
        case.program.watch = watch
        case.step()
    case.program.watch = StepWatch()
    return watch.live.peak_bytes


def _entry(case: Case, live_bytes: int, taken_bytes: int) -> dict[str, Any]:
    kept = [tensor for line in case.stage.resident_tensors().values() for tensor in line]
    return {
        "model": case.number,
        "samples": case.samples,
        "live_bytes": live_bytes,
        "dynamic_bytes": live_bytes - distinct_bytes(kept),
        "beside_bytes": taken_bytes - live_bytes,
    }


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of these tensors, each counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _let_go() -> None:
    gc.collect()
    give_back_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
