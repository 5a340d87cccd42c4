"""Files as other tools write them, made here: an nccl-tests log of a machine with alpha and beta."""

from __future__ import annotations

import json
from collections.abc import Sequence

from parsim.collectives import COLLECTIVE_KINDS

ALPHA_S, BETA_S = 25e-6, 1 / 150e9
SIZES = tuple(4**power for power in range(5, 16))


def seconds_of(size: int, scale: float = 1.0) -> float:
    """alpha + beta * S."""
    return scale * (ALPHA_S + BETA_S * size)


def busbw_ratio(program: str, n: int) -> float:
    operation = {"alltoall": "all_to_all", "sendrecv": None}.get(program, program)
    return 1.0 if operation is None else COLLECTIVE_KINDS[operation].traffic(n)


def nccl_text(
    n: int = 8,
    *,
    program: str | None = "all_reduce",
    sizes: Sequence[int] = SIZES,
    gpu: str = "NVIDIA H100 80GB HBM3",
    hosts: Sequence[str] = ("node-a",),
    scale: float = 1.0,
    wrong: int = 0,
    devices: Sequence[int] | None = None,
    redop: str = "sum",
) -> str:
    lines = [] if program is None else [f"# Collective test starting: {program}_perf"]
    lines += [
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1",
        "#",
        "# Using devices",
    ]
    for rank in range(n):
        device = rank if devices is None else devices[rank]
        host = hosts[rank * len(hosts) // n]
        lines.append(
            f"#  Rank {rank:2d} Group  0 Pid {4000 + rank:6d} on {host:>10s} device {device:2d} [0000:{rank:02x}:00] {gpu}"
        )
    lines.append(
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong"
    )
    for size in sizes:
        microseconds = seconds_of(size, scale) * 1e6
        algbw = size / microseconds / 1e3
        half = f"{microseconds:9.2f} {algbw:7.2f} {algbw * busbw_ratio(program or 'all_reduce', n):7.2f} {wrong:6d}"
        lines.append(f"{size:12d} {size // 4:12d}     float  {redop:>6s}      -1  {half}  {half}")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 70.7", ""]
    return "\n".join(lines)


def nccl_json(n: int = 8, *, program: str = "all_gather", sizes: Sequence[int] = SIZES) -> str:
    results = []
    for size in sizes:
        microseconds = seconds_of(size) * 1e6
        algbw = size / microseconds / 1e3
        half = {"time": microseconds, "alg_bw": algbw, "bus_bw": algbw * busbw_ratio(program, n), "nwrong": 0.0}
        results.append(
            {
                "size": size,
                "count": size // 4,
                "type": "float",
                "redop": "none",
                "root": "    -1",
                "out_of_place": half,
                "in_place": half,
            }
        )
    return json.dumps(
        {
            "version": 2,
            "args": [f"./build/{program}_perf", "-b", "8"],
            "env": ["SECRET_TOKEN=abc"],
            "nccl_version": 22703,
            "config": {
                "nthreads": 1,
                "ngpus": 1,
                "iterations": 20,
                "devices": [
                    {
                        "rank": r,
                        "group": 0,
                        "hostname": "node-a",
                        "device": r,
                        "device_hex": f"0000:0{r}:00",
                        "device_info": "NVIDIA H100 80GB HBM3",
                    }
                    for r in range(n)
                ],
            },
            "results": results,
        }
    )


TOPO = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\tSYS\t0-31\t0\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\tSYS\t0-31\t0\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\tNODE\t32-63\t1\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\tNODE\t32-63\t1\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tNODE\tNODE\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
"""Two bridged pairs of GPUs on two sockets."""


def switched_topo(n: int = 8, lanes: int = 18) -> str:
    """Every GPU behind NVSwitches: the matrix shows the lanes of one GPU in every pair."""
    head = "\t" + "\t".join(f"GPU{gpu}" for gpu in range(n)) + "\tCPU Affinity\tNUMA Affinity"
    rows = [
        f"GPU{a}\t"
        + "\t".join(" X " if a == b else f"NV{lanes}" for b in range(n))
        + f"\t{a // (n // 2 or 1)}-9\t{a // (n // 2 or 1)}"
        for a in range(n)
    ]
    return "\n".join([head, *rows, ""])


DEEPSPEED = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "gradient_clipping": 1.0,
    "my_own_key": 3,
}


def gpu_trace() -> dict[str, object]:
    """Two steps of 1 ms on a GPU. Each: 400 us product, 100 us norm beside 250 us all_reduce (150 exposed), a copy of 50 us,
    100 us until the host launches, 200 us of nothing although launched."""
    events: list[dict[str, object]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]

    def add(category: str, name: str, ts: float, dur: float, tid: object = 1, **args: object) -> None:
        events.append({"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args})

    for step in range(2):
        at, key = 5_000_000.0 + 1000 * step, 10 * (step + 1)
        add("user_annotation", f"ProfilerStep#{step}", at, 1000)
        types = {"Input type": ["c10::BFloat16", "c10::BFloat16"], "Input Dims": [[1024, 1024], [1024, 1024]]}
        add("cpu_op", "aten::mm", at - 50, 20, **{"External id": key, **types})
        add("kernel", "gemm", at, 400, tid=7, stream=7, correlation=key, **{"External id": key})
        add("kernel", "layer_norm", at + 400, 100, tid=7, stream=7, correlation=key + 1)
        add("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", at + 400, 250, tid=20, stream=20, correlation=key + 2)
        add("gpu_memcpy", "Memcpy HtoD", at + 650, 50, tid=7, stream=7, correlation=key + 3)
        add("cuda_runtime", "cudaLaunchKernel", at + 790, 10, correlation=key + 4)  # 100 us after the copy has ended
        add("kernel", "adamw", at + 1000 - 100, 100, tid=7, stream=7, correlation=key + 4)
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
        "traceEvents": events,
    }
