"""Whole steps of ranks on fake tensors of a GPU, by a CUDA build of torch: every operand is on the device, in a type that goes.

See `tests.fake_gpu`: no number is computed. The backward that stands in for torch's own is compared with it on the CPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.common.equality import Case
from experiments.common.mixed import random_case
from experiments.one_gpu.fake_peers import FakeRank, PlannedRun, fake_rank
from parsim.execute.cuda.streams import CudaStreams
from parsim.execute.numerics import numerics_in
from parsim.execute.operations import StepValues
from parsim.execute.stage import StageReplica
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from tests.execute.interpreted import CPU, planned, run_steps
from tests.execute.small_plans import GPT, MLP, TOKENS, VIT, case
from tests.execute.test_cuda_races import PLANS, RELAXED
from tests.fake_gpu import GPU, fake_gpu, python_engine
from tests.virtual_cuda import VirtualDriver
from tools.cuda_operators import without_cuda_kernel

NEEDS_CUDA_BUILD = pytest.mark.skipif(
    torch.version.cuda is None,
    reason=f"torch {torch.__version__} was built without CUDA, and knows no tensors there, not even fake ones",
)
PRECISIONS = ("fp32", "tf32", "amp_bf16", "amp_fp16", "bf16")
WIDTHS = {"amp_bf16": torch.bfloat16, "bf16": torch.bfloat16, "amp_fp16": torch.float16}
SMALL = ("mlp", "resnet_small", "vit_small", "vgg_small", "gpt_small", "bert_small")
LARGE = ("resnet50", "vit_b_16", "vgg16", "gpt", "bert")
LANGUAGE = (*TOKENS, "gpt", "bert")
DROPS = case(ModelSpec(name="vit_small", args=(*VIT.args, ("dropout", 0.1))), Mesh(pp=2), microbatches=2, recompute="full")


class Launched(TorchDispatchMode):
    """Operators with an operand or a result on the GPU, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "aten":
            self.names.add(name)
        return result


@contextmanager
def on_fake_gpu(of: Case, rank: int, precision: str) -> Iterator[tuple[FakeRank, Launched]]:
    """A rank of a plan, and what it launches."""
    numerics = numerics_in(precision)
    run: PlannedRun = replace(planned(of), dtype=numerics.weights, numerics=numerics)
    with fake_gpu(), fake_rank(run, rank, CudaStreams(VirtualDriver()), GPU, torch.clone) as made, Launched() as launched:
        yield made, launched


def assert_on_the_gpu(stage: StageReplica) -> None:
    """But for counters of optimizers, which torch keeps on the host."""
    for line, tensors in stage.resident_tensors().items():
        assert all(tensor.device == GPU or tensor.dim() == 0 for tensor in tensors), line


def assert_steps(of: Case, precision: str, steps: int) -> None:
    for rank in range(of.plan.world_size):
        with on_fake_gpu(of, rank, precision) as ((_, program, loader), launched):
            run_steps(program, loader, steps)
            assert_on_the_gpu(program._stage)
            assert without_cuda_kernel(launched.names) == ()
            if precision in WIDTHS:
                made = {kind.dtype for entry in program._stage.runnables.values() for kind in entry.program.tensors}
                assert WIDTHS[precision] in made, "something is computed in half precision"


def one_rank(name: str) -> Case:
    return replace(case(ModelSpec(name=name), Mesh(), optimizer="adamw"), dataset="synthetic" if name in LANGUAGE else "digits")


@NEEDS_CUDA_BUILD
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", SMALL)
def test_steps_of_small_models(name: str, precision: str) -> None:
    assert_steps(one_rank(name), precision, 2)


@NEEDS_CUDA_BUILD
@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", LARGE)
def test_steps_of_large_models(name: str, precision: str) -> None:
    assert_steps(replace(one_rank(name), dataset="synthetic"), precision, 2)


@NEEDS_CUDA_BUILD
@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
@pytest.mark.parametrize("name", [*PLANS, *RELAXED])
def test_steps_of_every_rank_of_a_plan(name: str, precision: str) -> None:
    assert_steps((PLANS | RELAXED)[name](), precision, 8 if name == "stale" else 3)


@NEEDS_CUDA_BUILD
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_steps_that_draw_random_numbers_and_compute_again(precision: str) -> None:
    assert_steps(DROPS, precision, 2)


@NEEDS_CUDA_BUILD
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("processes", [2, 4])
def test_steps_of_every_rank_of_a_mixed_plan(seed: int, processes: int) -> None:
    """Tensor parallelism with other axes, conversions, ZeRO and recomputation, drawn at random."""
    rng = random.Random(1000 * processes + seed)
    of = random_case(rng.choice(["mlp", "vit_small", "gpt_small"]), processes, rng)
    assert_steps(of, rng.choice(PRECISIONS), 2)


@NEEDS_CUDA_BUILD
@pytest.mark.parametrize(("precision", "reads"), [("fp32", 1), ("amp_bf16", 1), ("amp_fp16", 2)])
def test_the_host_reads_the_loss_and_with_fp16_whether_a_gradient_overflowed(precision: str, reads: int) -> None:
    """Every other read would make the host wait for the GPU in the middle of a step."""
    of = PLANS["single"]()
    numerics = numerics_in(precision)
    run = replace(planned(of), dtype=numerics.weights, numerics=numerics)
    with fake_gpu() as mode, fake_rank(run, 0, CudaStreams(VirtualDriver()), GPU, torch.clone) as (_, program, loader):
        program.step(loader.batch(0))
        before = mode.reads
        program.step(loader.batch(1))
        assert mode.reads - before == reads


@NEEDS_CUDA_BUILD
def test_an_operand_on_the_host_is_found() -> None:
    with on_fake_gpu(PLANS["single"](), 0, "fp32") as ((_, program, loader), _):
        batch = loader.batch(0)
        with pytest.raises(RuntimeError, match=r"two different devices.*cpu"):
            program.step(lambda microbatch: {name: tensor.cpu() for name, tensor in batch(microbatch).items()})


@pytest.mark.parametrize(
    "made",
    [
        lambda: case(MLP, Mesh(), optimizer="adamw"),
        lambda: case(GPT, Mesh(), microbatches=2),
        PLANS["dp microbatches"],
        lambda: replace(PLANS["recompute"](), plan=case(VIT, Mesh(), microbatches=2, recompute="full").plan),
        PLANS["zero-bubble"],
    ],
    ids=["mlp", "gpt", "resnet", "recompute", "zero-bubble"],
)
def test_the_backward_without_an_engine_is_that_of_the_engine(made: Callable[[], Case]) -> None:
    """On the CPU, where both run: the same gradients of every rank, whose peers are said to send halves."""
    of, room = made(), StepValues.room

    def gradients() -> list[list[torch.Tensor]]:
        found = []
        for rank in range(of.plan.world_size):
            torch.manual_seed(0)
            with fake_rank(planned(of), rank, CudaStreams(VirtualDriver()), CPU, torch.clone) as (_, program, loader):
                program._stage._zeroed = {key: [] for key in program._stage._zeroed}  # gradients stay after the update
                program.step(loader.batch(0))
                found.append([flat.clone() for flat in program._stage.buckets.values()])
        return found

    with patch.object(StepValues, "room", lambda values, instance: room(values, instance).fill_(0.5)):
        with python_engine():
            ours = gradients()
        torchs = gradients()
    for one, other in zip(ours, torchs, strict=True):
        assert any(gradient.any() for gradient in one)
        for gradient, expected in zip(one, other, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)
