"""The best rates of one device with every rank busy: arithmetic, memory, and the framework's own memory.

A GPU is measured by events behind a hold (`parsim.execute.cuda.driver`), after a second of work, and at sizes that fill
it. The products and copies of a CPU core would measure its launches and its L2 cache.

Precisions: in which arithmetic one is measured, with types of arrays, autocast, and the switches of the libraries of a GPU.

    fp32      IEEE single precision: TF32 is switched off, which torch leaves on for convolutions
    tf32      arrays of fp32; products and convolutions round their operands to TF32
    amp_bf16, amp_fp16  weights of fp32 under autocast; fp16 scales the loss
    bf16      weights and activations of bfloat16; the optimizer updates copies in fp32
    fp64      for checks

Leaves out fp8, which torch has no layers for: it is priced, not measured.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from parsim.execute.cuda.driver import Group, driver_of, timed_groups, warm_gpu
from parsim.execute.numerics import TorchNumerics, numerics_in, set_switches, switches
from parsim.execute.processes.machine import memory_limit_bytes, resident_bytes
from parsim.execute.rank_run import make_streams
from parsim.units import GIB, MIB

MATMUL_SIDE = 1024
COPY_BYTES = 64 * MIB
GPU_MATMUL_SIDE = 8192
GPU_COPY_BYTES = 2 * GIB
GPU_COPY_SHARE = 0.1
"""Share of the GPU's memory for each of the two arrays of the copy, at most."""
REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Attributes:
    name: of the device as its driver or the system calls it.
    memory_bytes: what one rank may use: the GPU's memory, or this host's memory divided by its ranks.
    context_bytes: taken before the first model: of the GPU, or the resident set of the process."""

    name: str
    memory_bytes: int
    context_bytes: int
    peak_flop_per_s: float
    copy_bytes_per_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_device(device: torch.device, dtype: torch.dtype, *, name: str) -> DeviceFacts:
    """Facts of this rank's device; every rank calls it at the same time."""
    context = context_bytes(device)
    dist.barrier()
    warm_gpu(device, dtype)
    flop_per_s = matmul_flop_per_s(device, dtype)
    dist.barrier()
    copy = copy_bytes_per_s(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        properties = torch.cuda.get_device_properties(device)
        return DeviceFacts(
            name=properties.name,
            memory_bytes=properties.total_memory,
            context_bytes=context,
            peak_flop_per_s=flop_per_s,
            copy_bytes_per_s=copy,
        )
    return DeviceFacts(
        name=name,
        memory_bytes=memory_limit_bytes() // dist.get_world_size(),
        context_bytes=context,
        peak_flop_per_s=flop_per_s,
        copy_bytes_per_s=copy,
    )


def context_bytes(device: torch.device) -> int:
    """Memory in use that no tensor owns. On CUDA it counts what other processes hold on the GPU too."""
    if device.type != "cuda":
        return resident_bytes()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def matmul_flop_per_s(device: torch.device, dtype: torch.dtype, side: int | None = None) -> float:
    """Flop per second of a square matrix product; the best of a few. side: left out, by the kind of the device."""
    side = side or (GPU_MATMUL_SIDE if device.type == "cuda" else MATMUL_SIDE)
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    product = torch.empty_like(left)
    return 2 * side**3 / _best_s(device, lambda: torch.mm(left, right, out=product))


def copy_bytes_per_s(device: torch.device, size_bytes: int | None = None) -> float:
    """Bytes read plus bytes written per second of a copy between two large arrays; the best of a few. size_bytes: of each, left
    out, by the device."""
    size_bytes = size_bytes or _copied_bytes(device)
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size_bytes / _best_s(device, lambda: target.copy_(source))


def _copied_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return COPY_BYTES
    return min(GPU_COPY_BYTES, int(GPU_COPY_SHARE * torch.cuda.get_device_properties(device).total_memory))


def _best_s(device: torch.device, operation: Callable[[], object]) -> float:
    driver = driver_of(device)
    if driver is not None:
        return min(timed_groups(driver, [Group([operation])] * (REPEATS + 1)).seconds[1:])
    streams = make_streams(device)

    def run() -> None:
        operation()

    try:
        for number in range(REPEATS + 1):
            streams.compute(number, "compute", [], run)
        times = sorted(streams.finish())[1:]
    finally:
        streams.close()
    return min(entry.end_s - entry.ready_s for entry in times)


HALVES: Mapping[str, torch.dtype] = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    **dict.fromkeys(HALVES, torch.float32),
}
"""Types of weights and gradients, and so of what gradient collectives send."""

OPERATOR_DTYPES: Mapping[str, torch.dtype] = {**DTYPES, **HALVES}
"""Types of the operands of single operators: under autocast those of products. Leaves out that autocast keeps norms and losses
in fp32."""


def set_arithmetic(precision: str) -> None:
    """Set the switches of this process as the executor sets them: TF32 on for `tf32`, off for everything else."""
    set_switches(tf32=precision == "tf32")


def numerics(precision: str) -> TorchNumerics:
    """In which numbers a rank of the executor computes: under bf16 with master weights, under fp16 with a scaled loss."""
    return numerics_in(precision, dtype="float64" if precision == "fp64" else "float32")


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context in which forwards of this precision run."""
    return numerics(precision).computing(device)


def arithmetic_settings() -> dict[str, Any]:
    """What decides which kernels run, as it is set in this process: plain JSON for a profile's provenance."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    set_here = switches()
    found: dict[str, Any] = {
        "float32_matmul_precision": set_here["float32_matmul_precision"],
        "matmul_allow_tf32": set_here["matmul_allow_tf32"],
        "matmul_allow_fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "matmul_allow_bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "cudnn_allow_tf32": set_here["cudnn_allow_tf32"],
        "cudnn_enabled": cudnn.enabled,
        "cudnn_benchmark": cudnn.benchmark,
        "cudnn_deterministic": cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cuda_version": torch.version.cuda,
        "cudnn_version": cudnn.version() if cudnn.is_available() else None,  # type: ignore[no-untyped-call]
    }
    variables = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF")
    found["variables"] = {name: os.environ[name] for name in variables if name in os.environ}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["attention_kernels"] = {
            name: bool(getattr(torch.backends.cuda, f"{name}_sdp_enabled")())
            for name in ("flash", "mem_efficient", "cudnn", "math")
        }
    return found
