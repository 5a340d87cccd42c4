"""Several ranks on one GPU, to check what they compute where there are fewer GPUs than ranks. Never for times.

PARSIM_SHARE_GPU=nccl    NCCL refuses two ranks of one host on one GPU. Each rank tells it another host (NCCL_HOSTID), so it
                         talks over sockets of the loopback: ring, simple. NCCL promises nothing here; it may refuse.
PARSIM_SHARE_GPU=staged  gloo on copies in the host's memory (`parsim.execute.cuda.staged_group`), with blocking threads in
                         place of CUDA streams.

Source of the check: NCCL, init.cc, "Duplicate GPU detected": equal host hashes and equal bus numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from parsim.errors import ExecutionError

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
"""Of every rank: nothing but sockets of the loopback is tried. RAS would listen on one port for all of them.

NCCL (from 2.26) starts the kernels of all communicators in the order of their launches, which is the same on all ranks
(`parsim.execute.launch_order`). It then promises that they do not wait for ever. Leaves out ranks with a GPU of their own: a
message would wait behind a sum that waits for another sum, which the simulation runs side by side.

CUDA loads a kernel at its first launch and waits until the GPU is idle. It never is while a receive waits for a peer, which may
need that very kernel's result. So kernels are loaded at the start, which takes seconds and memory. Leaves out ranks with a GPU
of their own: profiles are measured without that memory."""


def sharing(environment: Mapping[str, str] = os.environ) -> str:
    """How ranks share GPUs: "nccl", "staged", or "" where each has its own.

    Raises:
        ExecutionError: another value.
    """
    asked = environment.get(SHARE_VARIABLE, "")
    if asked not in ("", NCCL, STAGED):
        raise ExecutionError(f"{SHARE_VARIABLE}={asked!r} must be {NCCL} or {STAGED}, or not set: a GPU per rank")
    return asked


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
