"""The GPU of one rank: its memory as counters see it, which GPU it is, why there is none, and who else computes there.

torch is imported where it is used: planning needs none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parsim.errors import ExecutionError
from parsim.units import GIB, format_bytes

if TYPE_CHECKING:
    import torch


# A GPU's memory as four counters see it; each is compared with the lines of the prediction that it covers.
#
# live        tensors, by watching every operator (`parsim.model.trace.memory`)
# allocated   blocks the caching allocator has handed out: tensors rounded up, and workspaces of libraries that ask it
# reserved    what the allocator has taken from the driver
# driver      what the device has no longer free: the context, communicators, and other processes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes at the peak of a step; `driver_bytes` right after it. None where nobody counts: on a CPU all but the first."""

    live_bytes: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    driver_bytes: int | None = None


class MemoryCounters:
    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._cuda = torch.cuda

    def give_back(self) -> None:
        """What tensors that are gone had taken from the driver, which libraries cannot use."""
        self._cuda.empty_cache()

    def forget_peaks(self) -> None:
        """Also what the allocator has taken for anything but steps, such as a score or the plan before."""
        self.give_back()
        self._cuda.reset_peak_memory_stats(self._device)

    def allocated_bytes(self) -> int:
        """At most, since the peaks were forgotten; so is the next."""
        return int(self._cuda.max_memory_allocated(self._device))

    def reserved_bytes(self) -> int:
        return int(self._cuda.max_memory_reserved(self._device))

    def driver_bytes(self) -> int:
        free, total = self._cuda.mem_get_info(self._device)
        return int(total - free)


def counters_of(device: torch.device) -> MemoryCounters | None:
    return MemoryCounters(device) if device.type == "cuda" else None


# Several ranks on one GPU, to check what they compute where there are fewer GPUs than ranks. Never for times.
#
# PARSIM_SHARE_GPU=nccl    NCCL refuses two ranks of one host on one GPU. Each rank tells it another host (NCCL_HOSTID), so it
#                          talks over sockets of the loopback: ring, simple. NCCL promises nothing here; it may refuse.
# PARSIM_SHARE_GPU=staged  gloo on copies in the host's memory (`parsim.execute.cuda.staged_group`), with blocking threads in
#                          place of CUDA streams.
#
# Source of the check: NCCL, init.cc, "Duplicate GPU detected": equal host hashes and equal bus numbers.


SHARE_VARIABLE = "PARSIM_SHARE_GPU"
NCCL, STAGED = "nccl", "staged"

NCCL_APART = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    "CUDA_MODULE_LOADING": "EAGER",
}
"""Variables of every rank: nothing but sockets of the loopback is tried. RAS would listen on one port for all of them.

NCCL (from 2.26) starts the kernels of all communicators in the order of their launches, which is the same on all ranks
(`parsim.execute.runtime`). It then promises that they do not wait for ever. Leaves out ranks with a GPU of their own: a
message would wait behind a sum that waits for another sum, which the simulation runs side by side.

CUDA loads a kernel at its first launch and waits until the GPU is idle. It never is while a receive waits for a peer, which may
need that very kernel's result. So kernels are loaded at the start, which takes seconds and memory. Leaves out ranks with a GPU
of their own: profiles are measured without that memory."""


def sharing(environment: Mapping[str, str] = os.environ) -> str:
    """How ranks share GPUs: "nccl", "staged", or "" where each has its own. Raises ExecutionError: another value."""
    value = environment.get(SHARE_VARIABLE, "")
    if value not in ("", NCCL, STAGED):
        raise ExecutionError(f"{SHARE_VARIABLE}={value!r} must be {NCCL} or {STAGED}, or not set: a GPU per rank")
    return value


def rank_variables(rank: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What NCCL must be told so that ranks on one GPU look like ranks of different hosts; nothing where they do not share."""
    if sharing(environment) != NCCL:
        return {}
    return {**NCCL_APART, "NCCL_HOSTID": f"parsim-rank-{rank}"}


def gpu_of(local_rank: int, available: int, environment: Mapping[str, str] = os.environ) -> int | None:
    """The number of a rank's GPU on its host; None: it has none, and shares none."""
    if local_rank < available:
        return local_rank
    return local_rank % available if available and sharing(environment) else None


OTHERS_BYTES = 2 * GIB
"""A GPU that holds more than this before a rank has allocated anything is used by another process. A context takes less."""

CUDA_VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}
"""Variables of a rank with a GPU, unless they are set.

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
        reason = str(error).strip().splitlines()[0].rstrip(".")
        return 0, f"torch cannot use a GPU here: {reason}. Fix the driver (see nvidia-smi), or compute on the CPU"
    return 0, "torch sees no GPU here: look at CUDA_VISIBLE_DEVICES, or compute on the CPU"


def check_gpus(ranks: int, *, measures: bool) -> None:
    """Raise ExecutionError unless this host has a GPU per rank that torch can use, or ranks share some on purpose and are not
    timed (`measures`)."""
    available, why = usable_gpus()
    needed = 1 if sharing() else ranks
    asks = "1 rank, which needs a GPU" if needed == 1 else f"{needed} ranks, one GPU each"
    if why:
        raise ExecutionError(f"the plan has {asks}, and this host has none. {why}")
    if needed > available:
        gpus = "1 GPU" if available == 1 else f"{available} GPUs"
        raise ExecutionError(
            f"the plan has {asks}, and this host has {gpus} (see CUDA_VISIBLE_DEVICES); "
            f"set cluster.devices = {max(1, available)} and plan again, or use a profile of this machine's CPU"
        )
    if measures and ranks > available:
        raise ExecutionError(
            f"{ranks} ranks on {available} GPUs ({SHARE_VARIABLE}) train correctly, but their times mean nothing; use "
            f"`parsim run`, or unset {SHARE_VARIABLE}"
        )


def prepare_cuda(rank: int) -> None:
    """Set the variables that CUDA and NCCL read when they begin. Called before anything else asks CUDA for something."""
    os.environ.update({**CUDA_VARIABLES, **os.environ, **rank_variables(rank)})


def take_gpu(rank: int, local_rank: int, *, alone: bool) -> torch.device:
    """The rank's GPU, as torch's current device. Called before anything but `prepare_cuda` has begun with CUDA. Where it is
    `alone`, nobody else's memory may lie there: it is looked at before NCCL takes some. Raises ExecutionError: this host has
    fewer GPUs than ranks, torch cannot use them, or somebody else does."""
    import torch

    prepare_cuda(rank)
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
            if total - free > OTHERS_BYTES:
                raise ExecutionError(
                    f"rank {rank} finds {format_bytes(total - free)} of {device} in use before it has allocated anything: "
                    "another process computes there (`nvidia-smi` names it). It would slow every step and take the plan's "
                    "memory; end it, or leave this GPU out with CUDA_VISIBLE_DEVICES"
                )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ExecutionError(f"rank {rank} cannot use {device}: {reason}. `nvidia-smi` says whether the GPU is well") from error
    return device
