"""The GPU of one rank: which it is, why there is none, and who else computes there.

torch is imported where it is used: planning needs none.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from parsim.errors import ExecutionError
from parsim.execute.cuda.faults import check_alone, check_devices
from parsim.execute.cuda.shared_gpu import SHARE_VARIABLE, gpu_of, rank_variables, sharing

if TYPE_CHECKING:
    import torch

CUDA_VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}
"""Of a rank with a GPU, unless they are set.

A GPU takes what streams are given from so many queues, 8 by default. A plan with several axes has more streams than that.
Streams that share a queue wait for one another, so a receive behind another could hold up the computation that its sender waits
for. Every direction of a pair of ranks has a group of its own, so transfers of one group are in order on purpose."""


def usable_gpus() -> tuple[int, str]:
    """How many GPUs torch can compute on here; where there is none, why, and what to do."""
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if available:
        return available, ""
    if torch.version.cuda is None:
        return 0, f"torch {torch.__version__} was built without CUDA: install a CUDA build, or compute on the CPU"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # a driver that is too old, or none
        said = str(error).strip().splitlines()[0].rstrip(".")
        return (
            0,
            f"torch cannot use a GPU here: {said}. Fix the driver (see nvidia-smi), or compute on the CPU",
        )
    return 0, "torch sees no GPU here: look at CUDA_VISIBLE_DEVICES, or compute on the CPU"


def check_gpus(ranks: int, *, measures: bool) -> None:
    """A GPU of this host per rank, or ranks that share some on purpose.

    Args:
        measures: the ranks are timed.

    Raises:
        ExecutionError: too few GPUs, none that torch can use, or ranks that would be timed while they share one.
    """
    available, why = usable_gpus()
    if not sharing():
        check_devices(ranks, available, why)
        return
    check_devices(1, available, why)
    if measures and ranks > available:
        raise ExecutionError(
            f"{ranks} ranks on {available} GPUs ({SHARE_VARIABLE}) train correctly, but their times mean nothing; use "
            f"`parsim run`, or unset {SHARE_VARIABLE}"
        )


def set_variables(rank: int) -> None:
    """What CUDA and NCCL of a rank are to find in the environment. They read it when CUDA is first asked for something."""
    os.environ.update({**CUDA_VARIABLES, **os.environ, **rank_variables(rank)})


def take_gpu(rank: int, local_rank: int, *, alone: bool) -> torch.device:
    """The rank's GPU, as torch's current device. Whoever asks CUDA for something before it calls `set_variables` first.

    Args:
        alone: nobody else's memory may lie there. It is looked at before NCCL takes some.

    Raises:
        ExecutionError: this host has fewer GPUs than ranks, torch cannot use them, or somebody else does.
    """
    import torch

    set_variables(rank)
    available, why = usable_gpus()
    number = gpu_of(local_rank, available)
    if number is None:
        has = f"which has {available}; use at most {available} processes per host, or device = cpu"
        raise ExecutionError(f"rank {rank} needs GPU {local_rank} of this host, {has if available else 'which has 0; ' + why}")
    device = torch.device("cuda", number)
    try:
        torch.cuda.set_device(device)
        if alone and not sharing():
            free, total = torch.cuda.mem_get_info(device)
            check_alone(rank, str(device), total - free)
    except RuntimeError as error:
        said = str(error).strip().splitlines()[0]
        raise ExecutionError(f"rank {rank} cannot use {device}: {said}. `nvidia-smi` says whether the GPU is well") from error
    return device
