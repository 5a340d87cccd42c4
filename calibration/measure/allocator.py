"""What a rank holds beside its live tensors and the framework's context, at the peak of its training steps.

Before anything else is in memory one case after the other is built, trained for a few steps and let go, each in a heap that
was given back before. On a CPU: the peak of the resident set (Linux alone, which keeps one). On a GPU: what its driver says is
taken, of which the caching allocator has its share; that of other processes counts, too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from calibration.measure.components import Case, samples_for
from parsim.execute.memory_lines import StepWatch, watching
from parsim.execute.processes.environment import forget_peak, peak_resident_bytes, resident_bytes
from parsim.execute.processes.pinning import give_back_freed_memory
from parsim.model.spec import ModelSpec

STEPS = 5
"""After which the heap has settled (`parsim.execute.processes.pinning`)."""


def measure_allocator(cases: Iterable[Callable[[], Case]], context_bytes: int) -> list[dict[str, Any]]:
    """One entry per case, made by a function so that only one is there at a time; none where no peak is kept.

    Entries: model, samples; live_bytes (of tensors, at the peak), dynamic_bytes (that part which comes and goes within a step),
    beside_bytes (everything else but the context).
    """
    found = []
    for make in cases:
        _let_go()
        case = make()
        try:
            entry = _on_gpu(case, context_bytes) if case.stage.device.type == "cuda" else _on_cpu(case, context_bytes)
        finally:
            case.streams.close()
        del case
        if entry is None:
            break
        found.append(entry)
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
    with watching(case.stage) as watch:
        case.program.watch = watch
        case.step()
    case.program.watch = StepWatch()
    if not forget_peak():
        return None
    for _ in range(STEPS):
        case.step()
    return _entry(case, watch.live.peak_bytes, peak_resident_bytes() - context_bytes)


def _on_gpu(case: Case, context_bytes: int) -> dict[str, Any]:
    device = case.stage.device
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(STEPS):
        case.step()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return _entry(case, int(torch.cuda.max_memory_allocated(device)), total - free - context_bytes)


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
    """Of the storages of these tensors, each counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _let_go() -> None:
    gc.collect()
    give_back_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
