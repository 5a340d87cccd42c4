"""What goes wrong with a GPU is told in one message; memory is counted four ways, each beside what it can see."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parsim.app.functions import plan
from parsim.app.launch import check_runnable, nearest_that_fits
from parsim.errors import DoesNotFitError, ExecutionError, OutOfMemoryError, RankLostError
from parsim.execute.checkpoint import checkpoint
from parsim.execute.cuda.faults import (
    checkpoint_text,
    first_line,
    is_lost_device,
    is_out_of_memory,
    lost_device,
    out_of_memory,
    told_outside_steps,
)
from parsim.execute.cuda.gpu import MemoryUse
from parsim.execute.measurement import RankRecord
from parsim.execute.processes.group import ErrorRecord, ProcessPlace, urgent_options
from parsim.execute.processes.launch import Ended, raise_failure
from parsim.execute.processes.output import RankOutput
from parsim.execute.rank_run import RankRun
from parsim.plans.mesh import Mesh
from parsim.predict.memory import RankMemory
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.report.tables import memory_levels
from parsim.units import GIB
from tests.execute.small_plans import MLP, case, run_spec
from tests.execute.test_bad_run import cpu_profile, parsim, processes_that_name

pytest.importorskip("torch")


HELD = {"parameters": 2 * GIB, "gradients": 2 * GIB, "optimizer_state": 4 * GIB, "buffers": 0}
PREDICTED = {**HELD, "activations": 5 * GIB, "workspace": GIB}


def write_record(folder: Path, rank: int, kind: str, message: str, *, reported: bool = True) -> None:
    """What a rank that fails leaves for the launcher."""
    record = ErrorRecord(
        rank=rank, attempt=0, kind=kind, message=message, reported=reported, peer_lost=False, time_s=1.0, traceback="t"
    )
    (folder / f"error-rank{rank}.json").write_text(json.dumps({key: getattr(record, key) for key in record.__slots__}))


def test_the_line_that_was_short_is_named() -> None:
    told = out_of_memory(rank=3, step=7, predicted=PREDICTED, held=HELD, allocated_bytes=31 * GIB, kept=checkpoint_text(5))
    assert str(told) == (
        "rank 3 ran out of memory in step 7 with 31 GiB allocated. The line that was short is activations and what comes "
        "beside them: 23 GiB where 6 GiB were predicted (predicted mostly as activations, 5 GiB). The checkpoint of "
        "step 5 is kept: `parsim run --resume` continues from there."
    )
    state = out_of_memory(
        rank=0, step=1, predicted=PREDICTED, held={**HELD, "optimizer_state": 9 * GIB}, allocated_bytes=15 * GIB, kept=""
    )
    assert "The line that was short is optimizer_state: 9 GiB where 4 GiB were predicted." in str(state)


def test_memory_beside_tensors_and_an_unknown_prediction_are_told_too() -> None:
    told = out_of_memory(rank=0, step=0, predicted=PREDICTED, held=HELD, allocated_bytes=9 * GIB, kept="")
    assert "no line was short, so memory beside tensors" in str(told)
    told = out_of_memory(rank=0, step=0, predicted={}, held={}, allocated_bytes=9 * GIB, kept=checkpoint_text(None))
    assert "use more devices or microbatches" in str(told)
    assert str(told).endswith("No checkpoint was written yet: the training starts again.")


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: unspecified launch failure", True),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", True),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA error: no kernel image is available for execution on the device", False),
        ("CUDA error: invalid configuration argument", False),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.", False),
        ("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx(...)`", False),
    ],
)
def test_a_lost_device_is_told_from_one_that_refuses_a_call(message: str, lost: bool) -> None:
    """`--elastic` would leave out one well GPU after the other."""
    assert is_lost_device(torch.AcceleratorError(message)) == is_lost_device(RuntimeError(message)) == lost
    assert not is_lost_device(RuntimeError("shape '[2]' is invalid"))


def test_a_lost_device_is_named_with_the_checkpoint() -> None:
    error = lost_device(2, "cuda:2", 9, RuntimeError("CUDA error: uncorrectable ECC error\nmore"), checkpoint_text(8))
    assert str(error).startswith(
        "rank 2 lost cuda:2 in step 9: CUDA error: uncorrectable ECC error. The checkpoint of step 8 is"
    )


def test_an_index_beyond_its_table_is_told_as_such() -> None:
    """A CPU raises an IndexError there. On a GPU it is a kernel's assertion, after which the process can compute no more."""
    error = torch.AcceleratorError(
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
    )
    with (
        pytest.raises(
            ExecutionError, match=r"rank 1 stopped outside a training step \(scoring\): CUDA error: device-side"
        ) as seen,
        told_outside_steps(1, "cuda:1", lambda: "scoring"),
    ):
        raise error
    assert type(seen.value) is ExecutionError
    assert "a target that is no class" in str(seen.value)


class Broken:
    """The stream of a device on which a kernel's assertion has failed."""

    def query(self) -> bool:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize(
    "status", ["CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`", "CUDNN_STATUS_NOT_SUPPORTED"]
)
def test_the_device_says_why_a_call_of_a_library_failed(
    rank_run: RankRun, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """The host is far ahead of the kernel that found the wrong index, mostly in a product."""
    streams: list[Any] = [Broken()]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[0])
    rank_run.stage.device = torch.device("cuda", 1)
    error = RuntimeError(f"CUDA error: {status}")
    assert "rank 0 stopped in step 0: CUDA error: device-side" in str(rank_run._explained(error))
    with (
        pytest.raises(ExecutionError, match=r"stopped outside a training step .*device-side assert"),
        told_outside_steps(0, "cuda:1", lambda: "scoring"),
    ):
        raise error
    streams[0] = SimpleNamespace(query=lambda: False)  # it still computes
    assert isinstance(rank_run._explained(error), RankLostError) == ("FAILED" in status)
    rank_run.stage.device = torch.device("cpu")


def test_what_a_kernel_wrote_of_its_assertion_is_told(tmp_path: Path) -> None:
    """A launcher drops what ranks write beside their progress."""
    message = "rank 0 stopped in step 1: CUDA error: device-side assert triggered. Correct the data."
    write_record(tmp_path, 0, "ExecutionError", message)
    output = RankOutput(folder=tmp_path, on_line=None)
    output.paths(0)[1].parent.mkdir()
    said = "NLLLoss.cu:245: nll_loss_forward: block: [0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed."
    output.paths(0)[1].write_text(f"a warning\n{said}\n{said.replace('3', '4')}\n")
    with pytest.raises(ExecutionError) as seen:
        raise_failure(tmp_path, 1, Ended(attempt=0, statuses={0: 1}), output, None)
    assert str(seen.value).endswith(f"Correct the data. The kernel wrote: {said}")
    assert type(seen.value) is ExecutionError


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(
            "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
        ),
    ],
)
def test_too_little_memory_is_no_lost_device_whoever_asked_for_it(error: RuntimeError) -> None:
    assert is_out_of_memory(error)
    assert not is_lost_device(error)
    with (
        pytest.raises(OutOfMemoryError, match=r"rank 2 ran out of memory on cuda:0 outside a training step \(building\): "),
        told_outside_steps(2, "cuda:0", lambda: "building"),
    ):
        raise error


def test_faults_outside_steps_are_told_too() -> None:
    with (
        pytest.raises(RankLostError, match=r"rank 1 lost cuda:1 outside a training step \(scoring\): CUDA error: an illegal"),
        told_outside_steps(1, "cuda:1", lambda: "scoring"),
    ):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    for device, error in (("cuda:0", RuntimeError("shape '[2]' is invalid")), ("cpu", RuntimeError("out of memory"))):
        with pytest.raises(RuntimeError) as seen, told_outside_steps(0, device, str):
            raise error
        assert seen.value is error


NO_ROOM = """NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-8WgwXZ (size 33030528), error: No space left on device (28)
"""
NO_MEMORY = """NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""


def test_errors_of_nccl_are_told_with_their_cause(tmp_path: Path) -> None:
    """It stands behind what all such errors have in common."""
    write_record(tmp_path, 1, "DistBackendError", NO_ROOM, reported=False)
    with pytest.raises(RankLostError, match=r"unhandled system error .*No space left on device \(28\) .*--shm-size=1g"):
        raise_failure(tmp_path, 2, Ended(attempt=0, statuses={1: 1}), RankOutput(folder=tmp_path, on_line=None), None)
    with (
        pytest.raises(OutOfMemoryError, match="Cuda failure 2 'out of memory'"),
        told_outside_steps(0, "cuda:0", lambda: "starting"),
    ):
        raise RuntimeError(NO_MEMORY)
    assert first_line("one\ntwo") == "one"
    assert first_line(" ") == ""
    assert first_line("one\nLast error:\n\n") == "one"


# --- in a rank --------------------------------------------------------------------------------------------------------


@pytest.fixture
def rank_run() -> Iterator[RankRun]:
    of = case(MLP, Mesh())
    lines = {"parameters": 1, "gradients": 10**9, "optimizer_state": 10**9, "buffers": 0, "activations": 10**9}
    run = run_spec(of, optimizer="adam", learning_rate=1e-3, dataset="digits", predicted_memory=(lines,))
    place = ProcessPlace(rank=0, world_size=1, local_rank=0, local_world_size=1, attempt=0)
    made = RankRun(run, PlanIndex(of.plan, of.model), lower(of.plan, of.model), place, {}, steps=1)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("error", "wanted", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            OutOfMemoryError,
            "rank 0 ran out of memory in step 1 .* is parameters:",
        ),
        (
            torch.AcceleratorError("CUDA error: device lost"),
            ExecutionError,
            "rank 0 lost cpu in step 1: CUDA error: device lost",
        ),
        (
            torch.AcceleratorError("CUDA error: device-side assert triggered"),
            ExecutionError,
            "rank 0 stopped in step 1: CUDA error: device-side assert triggered. The GPU is well.* No checkpoint was written",
        ),
        (RuntimeError("something else"), RuntimeError, "something else"),
    ],
)
def test_a_failing_step_says_what_it_means(
    rank_run: RankRun, monkeypatch: pytest.MonkeyPatch, error: RuntimeError, wanted: type[Exception], message: str
) -> None:
    rank_run.step(keep=True)

    def fails() -> bool:
        raise error

    monkeypatch.setattr(rank_run.stage, "overflowed", fails)  # called by the optimizer step
    with pytest.raises(wanted, match=message):
        rank_run.step(keep=True)


def test_a_message_about_a_fault_does_not_read_the_whole_checkpoint(
    rank_run: RankRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large model that takes minutes, in which all other ranks wait in NCCL."""
    rank_run.step(keep=True)
    rank_run.checkpoints = tmp_path
    rank_run.save(tmp_path)
    monkeypatch.setattr(checkpoint, "_digest", lambda _: pytest.fail("it was read"))
    assert "The checkpoint of step 1 is kept" in str(rank_run._explained(torch.AcceleratorError("CUDA error: device lost")))


def test_out_of_memory_of_a_rank_is_that_of_the_launch(tmp_path: Path) -> None:
    write_record(tmp_path, 1, "OutOfMemoryError", "rank 1 ran out")
    with pytest.raises(OutOfMemoryError, match="rank 1 of 2 stopped: rank 1 ran out"):
        raise_failure(tmp_path, 2, Ended(attempt=0, statuses={1: 1}), RankOutput(folder=tmp_path, on_line=None), None)


class Counters:
    """A device's counters that know what was asked of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def forget_peaks(self) -> None:
        self.asked.append("forget")

    def allocated_bytes(self) -> int:
        return 110

    def reserved_bytes(self) -> int:
        return 200

    def driver_bytes(self) -> int:
        return 700


def test_memory_is_counted_four_ways(rank_run: RankRun, tmp_path: Path) -> None:
    rank_run.step(keep=False)  # from here on there is an optimizer state
    rank_run.measure_memory()
    alone = rank_run.record.memory
    assert alone is not None
    assert alone.live_bytes == rank_run.record.peak_bytes > 0
    assert alone.allocated_bytes is alone.reserved_bytes is alone.driver_bytes is None
    counters = Counters()
    rank_run.counters = counters
    rank_run.measure_memory()
    assert counters.asked == ["forget"]
    found = rank_run.record.memory
    assert found == MemoryUse(live_bytes=alone.live_bytes, allocated_bytes=110, reserved_bytes=200, driver_bytes=700)
    rank_run.record.save(tmp_path)
    assert RankRecord.load(tmp_path, 0).memory == found


def test_each_counter_stands_beside_the_lines_it_sees() -> None:
    lines = (("parameters", 60), ("activations", 40), ("communication", 200), ("context", 300), ("allocator", 50))
    memory = RankMemory(rank=0, lines=lines, limit_bytes=1000)
    use = MemoryUse(live_bytes=100, allocated_bytes=110, reserved_bytes=200, driver_bytes=700)
    rows = {row.level: (row.predicted_bytes, row.measured_bytes) for row in memory_levels([memory], [use])}
    assert rows == {"live": (100, 100), "allocated": (100, 110), "reserved": (150, 200), "driver": (650, 700)}
    assert [row.level for row in memory_levels([memory], [MemoryUse(live_bytes=100)])] == ["live"]
    assert memory_levels([memory], [None]) == ()


def test_nccl_s_own_streams_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(is_high_priority_stream=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=lambda: made), raising=False)
    assert urgent_options("nccl") is made
    assert made.is_high_priority_stream
    assert urgent_options("gloo") is None


def test_the_nearest_plan_that_needs_less_is_named() -> None:
    def result(step_s: float, peak: int, fits: bool, strategy: str) -> SimpleNamespace:
        plan = SimpleNamespace(summary=lambda: f"the {strategy} plan")
        return SimpleNamespace(
            step_s=SimpleNamespace(median=step_s), peak_memory_bytes=(peak, peak), fits=fits, plan=plan, strategy=strategy
        )

    failed = SimpleNamespace(result=result(1.0, 8 * GIB, True, "dp"))
    others = [result(1.5, 4 * GIB, True, "mp"), result(1.2, 6 * GIB, True, "hp"), result(0.9, 9 * GIB, True, "adaptive")]
    among = (failed, *(SimpleNamespace(result=other) for other in others))
    asked = SimpleNamespace(evaluation=failed, among=among)
    assert nearest_that_fits(asked) == (  # type: ignore[arg-type]
        "The nearest plan that needs less is the hp plan: 2 GiB less per rank, predicted +20% in step time; "
        "set plan.strategy = 'hp'."
    )
    assert nearest_that_fits(SimpleNamespace(evaluation=failed, among=())) == ""  # type: ignore[arg-type]
    alone = SimpleNamespace(evaluation=failed, among=(failed,))
    assert nearest_that_fits(alone) == "None of the plans that were compared needs less memory."  # type: ignore[arg-type]


def test_a_model_may_exceed_a_gpu_unless_it_follows_an_example_there() -> None:
    """Every rank builds in the memory of its host and moves its part. An example is followed with all weights on the GPU."""
    asked = plan("mlp", cluster="dgx1-v100-32gb", global_batch=64, strategy="dp").chosen
    problem = asked.problem
    memory = problem.cluster.devices[0].type.context_bytes + problem.model.parameter_bytes - 1
    devices = tuple(replace(device, type=replace(device.type, memory_bytes=memory)) for device in problem.cluster.devices)
    small = replace(asked, problem=replace(problem, cluster=replace(problem.cluster, devices=devices)))
    check_runnable(small, None)
    model = small.question.model.model_copy(update={"control_flow": "example"})
    follows = replace(small, question=small.question.model_copy(update={"model": model}))
    with pytest.raises(DoesNotFitError, match=r"follows the example .* with all .* of weights, where .* has"):
        check_runnable(follows, None)


# `parsim run` where a GPU fails, by the real command: errors of CUDA raised on a CPU, and GPUs that are not there.

RUN_TOML = """
[model]
name = "failing:Failing"
input_shape = [1, 32, 32]
[cluster]
profile = "profile.json"
devices = 2
[training]
global_batch = 8
steps = 8
learning_rate = 0.0123
dataset = "synthetic"
[plan]
strategy = "{strategy}"
"""

FAILING = '''
"""A model, and an optimizer that fails in the fourth step of rank 1, as CUDA would."""
import os, torch
from torch import nn

class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(1024, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.layers(x)

if os.environ.get("RANK") == "1":
    made, steps = torch.optim.SGD.step, []

    def step(self, *arguments, **options):
        if self.param_groups[0]["lr"] == 0.0123:  # that of the run, not of a probe
            steps.append(1)
        if len(steps) == 4:
            raise {error}
        return made(self, *arguments, **options)

    torch.optim.SGD.step = step
'''

ERRORS = {
    "memory": (
        "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
        r"rank 1 ran out of memory in step 3 .*The checkpoint of step 2 is kept.*--resume",
    ),
    "memory of a library": (
        "RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`')",
        r"rank 1 ran out of memory in step 3 .*The checkpoint of step 2 is kept.*--resume",
    ),
    "lost": (
        "torch.AcceleratorError('CUDA error: unspecified launch failure')",
        r"rank 1 lost cpu in step 3: CUDA error: unspecified launch failure\. The checkpoint of step 2 is kept",
    ),
}


def written(folder: Path, error: str, *, kind: str = "cpu", strategy: str = "dp") -> None:
    profile = cpu_profile()
    profile["device_types"]["core"]["kind"] = kind
    (folder / "profile.json").write_text(json.dumps(profile))
    (folder / "failing.py").write_text(FAILING.format(error=error))
    (folder / "RUN.toml").write_text(RUN_TOML.format(strategy=strategy))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("name", ERRORS)
def test_a_gpu_that_fails_is_one_message_and_the_checkpoint_is_kept(tmp_path: Path, name: str) -> None:
    error, message = ERRORS[name]
    written(tmp_path, error)
    done = parsim(tmp_path, "run", "RUN.toml", "--nproc", "2", "--out", "out", "--checkpoint-every", "2", timeout_s=900)
    told = " ".join(done.stderr.split())
    assert done.returncode == 1, told
    assert re.search(message, told), told
    assert "Traceback" not in told
    if name != "lost":
        assert "nearest plan" in told or "None of the plans" in told, told
    assert not processes_that_name(str(tmp_path))
    assert any("2" in path.name for path in (tmp_path / "out").rglob("checkpoints/*"))


@pytest.mark.slow
def test_a_plan_for_gpus_on_a_machine_without_says_why(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    written(tmp_path, "ValueError()", kind="cuda")
    profile = json.loads((tmp_path / "profile.json").read_text())
    profile["communication"].update(backend="nccl", uses_cores=False)
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    done = parsim(tmp_path, "run", "RUN.toml", "--nproc", "2", "--out", "out", timeout_s=900)
    told = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert re.search(
        r"2 ranks, one GPU each, and this host has none\. torch \S+ was built without CUDA: install a CUDA build", told
    )
    assert "Traceback" not in told
