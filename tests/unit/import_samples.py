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
