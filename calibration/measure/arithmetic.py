"""In which arithmetic a precision is measured: types of arrays, autocast, and the switches of the libraries of a GPU.

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
from collections.abc import Mapping
from typing import Any

import torch

from parsim.execute.numerics import Numerics, numerics_in, set_switches, switches

HALVES: Mapping[str, torch.dtype] = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    **dict.fromkeys(HALVES, torch.float32),
}
"""Of weights and gradients, and so of what gradient collectives send."""

OPERATOR_DTYPES: Mapping[str, torch.dtype] = {**DTYPES, **HALVES}
"""Of the operands of single operators: under autocast those of products. Leaves out that autocast keeps norms and losses in
fp32."""


def set_arithmetic(precision: str) -> None:
    """Set the switches of this process as the executor sets them: TF32 on for `tf32`, off for everything else."""
    set_switches(tf32=precision == "tf32")


def numerics(precision: str) -> Numerics:
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
