"""Training in every precision a CPU can run equals one process that trains in the same precision; and differs from fp32."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parsim.errors import CostError, ExecutionError
from parsim.execute.checkpoint import latest_checkpoint, load_state
from parsim.execute.loss_scale import LossScale, overflow_flag
from parsim.execute.master_weights import MasterWeights
from parsim.execute.numerics import numerics_of, set_switches, switches
from parsim.execute.reference import largest_difference, train_reference
from parsim.execute.worker import run_dataset
from parsim.model.number_formats import FORMATS, check_executable, number_format
from parsim.plan.mesh import Mesh
from tests.execute.equality import Case, compare_case, run_cases
from tests.execute.test_equality import BERT, GPT, MLP, RESNET, VGG, VIT, case

STEPS = 12
CPU = torch.device("cpu")


def inexact(spec: object, mesh: Mesh, precision: str, **options: object) -> Case:
    own = {key: options.pop(key) for key in ("loss_scale", "loss_scale_growth_steps", "master_weights") if key in options}
    made = case(spec, mesh, dtype="float32", **options)  # type: ignore[arg-type]
    return dataclasses.replace(made, precision=precision, **own)  # type: ignore[arg-type]


# The scale falls from 2^24 in steps that are skipped, and grows every third good one.
SCALING = {"loss_scale": 2.0**24, "loss_scale_growth_steps": 3}
ADAM = {"optimizer": "adam", "learning_rate": 1e-3}
CASES = [
    inexact(MLP, Mesh(), "amp_bf16"),
    inexact(VIT, Mesh(dp=2), "amp_bf16", **ADAM),
    inexact(GPT, Mesh(pp=2), "amp_bf16", microbatches=4),
    inexact(BERT, Mesh(pp=2), "amp_bf16", microbatches=2, order="zero-bubble"),
    inexact(VGG, Mesh(dp=2), "amp_bf16", microbatches=2),
    inexact(VIT, Mesh(pp=2), "amp_bf16", microbatches=2, recompute="full"),
    inexact(VIT, Mesh(dp=2), "amp_fp16", **SCALING, **ADAM),
    inexact(GPT, Mesh(pp=2), "amp_fp16", microbatches=2, **SCALING),
    inexact(VIT, Mesh(dp=2), "amp_fp16", zero_stage=1, **SCALING, **ADAM),
    inexact(VIT, Mesh(dp=2), "amp_fp16", zero_stage=2, microbatches=2, **SCALING),
    inexact(GPT, Mesh(dp=2), "amp_fp16", zero_stage=3, **SCALING),
    inexact(MLP, Mesh(dp=2), "bf16", **ADAM),
    inexact(VIT, Mesh(dp=2), "bf16"),
    inexact(GPT, Mesh(pp=2), "bf16", microbatches=2, **ADAM),
    inexact(VIT, Mesh(pp=2), "bf16", master_weights=False, microbatches=2),
    inexact(MLP, Mesh(dp=2), "bf16", master_weights=False, **ADAM),
    inexact(VIT, Mesh(dp=2), "bf16", zero_stage=1, **ADAM),
    inexact(VIT, Mesh(dp=2), "bf16", zero_stage=3, **ADAM),
]
TOLERANCE = {"amp_bf16": 1e-5, "amp_fp16": 1e-5, "bf16": 1e-6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("precision")
    run_cases(CASES, path, steps=STEPS)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[object]]:
    path = tmp_path_factory.mktemp("precision")
    return path, list(run_cases(CASES, path, steps=STEPS))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(entry) for entry in CASES])
def test_every_precision_equals_one_process_in_it(number: int, runs: tuple[Path, list[object]]) -> None:
    path, specs = runs
    difference = compare_case(CASES[number], specs[number], path, steps=STEPS)  # type: ignore[arg-type]
    print(difference)
    assert difference.worst < TOLERANCE[CASES[number].precision], difference
