"""In which numbers a rank computes: the types of weights, autocast, loss scaling, and torch's switches for matmul and cuDNN.

The switches are set explicitly, whatever torch's defaults are, and read back for the record. torch has two ways to set TF32.
Reading by the older one fails where somebody has set by the newer. So both are set, and the newer one is read.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from parsim.errors import ExecutionError
from parsim.execute.job import Job, RunSpec
from parsim.execute.state.loss_scale import LossScale
from parsim.model.number_formats import check_executable, number_format

DTYPES = {"float32": torch.float32, "float64": torch.float64}
AUTOCAST = {"float16": torch.float16, "bfloat16": torch.bfloat16}
TF32, IEEE = "tf32", "ieee"
"""torch's words."""

OVERRIDE_VARIABLE = "NVIDIA_TF32_OVERRIDE"
_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Attributes:
    weights: type of parameters, gradients and inputs. autocast: the type of forwards where autocast applies; None: without.
    tf32: matmuls and convolutions of a GPU may use it.
    master_weights: the optimizer updates copies in fp32. loss_scale: at the beginning; None: the loss is not scaled.
    """

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    tf32: bool = False
    master_weights: bool = False
    loss_scale: LossScale | None = None

    def computing(self, device: torch.device) -> AbstractContextManager[object]:
        """Around every forward of a component. The cache of cast weights lives as long."""
        return _NOTHING if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)


def numerics_of(run: RunSpec, device: torch.device) -> Numerics:
    """What the run asks for. Raises ExecutionError where the device cannot."""
    check_executable(run.precision, run.dtype, device.type)
    scale = LossScale(scale=run.loss_scale, growth_steps=run.loss_scale_growth_steps)
    return numerics_in(run.precision, dtype=run.dtype, master_weights=run.master_weights, loss_scale=scale)


def numerics_in(
    precision: str, *, dtype: str = "float32", master_weights: bool = True, loss_scale: LossScale | None = None
) -> Numerics:
    """The numbers that a precision means.

    Args:
        dtype: of the weights where the precision does not halve them. master_weights: where it does.
        loss_scale: at the beginning, where the precision scales the loss; None: the usual one.
    """
    kind = number_format(precision)
    halved = kind.weight_bytes == 2
    return Numerics(
        weights=torch.bfloat16 if halved else DTYPES[dtype],
        autocast=AUTOCAST[kind.autocast] if kind.autocast else None,
        tf32=precision == "tf32",
        master_weights=halved and master_weights,
        loss_scale=(loss_scale or LossScale()) if kind.scales_loss else None,
    )


def set_switches(*, tf32: bool) -> None:
    """TF32 on or off for matmuls and convolutions alike. No search for the fastest convolution, because its result
    differs from run to run. Algorithms need not be deterministic, as in the calibration.

    Raises:
        ExecutionError: the environment overrides the switch in NVIDIA's libraries.
    """
    forced = os.environ.get(OVERRIDE_VARIABLE)
    if torch.version.cuda is not None and forced == ("0" if tf32 else "1"):
        raise ExecutionError(
            f"{OVERRIDE_VARIABLE}={forced} makes NVIDIA's libraries {'ignore' if tf32 else 'use'} TF32 whatever is asked, and "
            f"this run asks for {'tf32' if tf32 else 'fp32 without TF32'}; unset {OVERRIDE_VARIABLE}"
        )
    backends: Any = torch.backends
    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    backends.fp32_precision = "none"  # what the others take where they are not set
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    matmul.allow_tf32 = tf32
    cudnn.allow_tf32 = tf32
    for place in (matmul, cudnn.conv, cudnn.rnn):
        place.fp32_precision = TF32 if tf32 else IEEE
    cudnn.benchmark = False
    cudnn.deterministic = False


def switches() -> dict[str, Any]:
    """The same, and what else of torch's decides in which numbers matmuls add up, as it is now."""
    backends: Any = torch.backends
    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    return {
        "float32_matmul_precision": "high" if matmul.fp32_precision == TF32 else "highest",
        "matmul_allow_tf32": matmul.fp32_precision == TF32,
        "cudnn_allow_tf32": TF32 in (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision),
        "cudnn_benchmark": bool(cudnn.benchmark),
        "cudnn_deterministic": bool(cudnn.deterministic),
        "fp16_reduced_precision_reduction": bool(matmul.allow_fp16_reduced_precision_reduction),
        "bf16_reduced_precision_reduction": bool(matmul.allow_bf16_reduced_precision_reduction),
    }


def check_switches(asked: Mapping[str, Any]) -> None:
    """Warn if the switches are not those any more that the record names: a forward may have set them."""
    now = switches()
    changed = [f"{name} {asked[name]} to {now[name]}" for name in asked if now[name] != asked[name]]
    if changed:
        warnings.warn(
            f"the model changed torch's switches while it was run ({', '.join(changed)}): it did not compute in the numbers "
            "that were asked for; leave them to training.precision",
            stacklevel=2,
        )


def described(job: Job, device: str) -> dict[str, Any]:
    """For environment.json: the switches as they are now, and the types of every run of the job."""
    found: dict[str, Any] = {"device": device, "switches": switches(), "runs": {}}
    for run in job.runs:
        numerics = numerics_of(run, torch.device(device))
        found["runs"][run.name] = {
            "precision": run.precision,
            "weights": str(numerics.weights).removeprefix("torch."),
            "autocast": None if numerics.autocast is None else str(numerics.autocast).removeprefix("torch."),
            "master_weights": numerics.master_weights,
            "first_loss_scale": None if numerics.loss_scale is None else numerics.loss_scale.scale,
        }
    return found
