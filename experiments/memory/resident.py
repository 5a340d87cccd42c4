"""How much more does a rank hold than its live tensors and the framework's context? One line per model and batch.

    python experiments/memory/resident.py MODEL SAMPLES

A process of its own, pinned and set as a rank is, measured as a calibration does (`calibration.measure.allocator`). So models
that were not calibrated can be held against the line `allocator` of a profile. Linux alone: it reads /proc.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from calibration.measure.allocator import measure_allocator
from calibration.measure.components import make_case
from calibration.measure.device import context_bytes
from calibration.rounds.request import CalibrationRequest
from parsim.execute.processes.setup import prepare_rank
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.units import MIB


def main(name: str, samples: int) -> None:
    prepare_rank(0, 1, device="cpu")
    device, spec = torch.device("cpu"), ModelSpec(name=name)
    model, request = load_model(spec), CalibrationRequest(models=((spec, (samples,)),))
    context = context_bytes(device)
    (entry,) = measure_allocator([partial(make_case, 0, spec, model, samples, request, device)], context)
    live, dynamic, beside = (entry[key] / MIB for key in ("live_bytes", "dynamic_bytes", "beside_bytes"))
    print(
        f"{name}, {samples} samples: live tensors {live:.1f} MiB, {dynamic:.1f} of which come and go; beside them and the "
        f"context of {context / MIB:.0f} MiB: {beside:.0f} MiB"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
