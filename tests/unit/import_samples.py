"""Files as other tools write them, made here: an nccl-tests log of a machine with alpha and beta."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from parsim.work import COLLECTIVE_KINDS

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
    error: str | None = None,
) -> str:
    """error: of the column of this name, which versions before 2.13 have in place of #wrong."""
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
    last = "#wrong" if error is None else " error"
    half = f"time   algbw   busbw {last}"
    lines.append(f"#       size         count      type   redop    root     {half}     {half}")
    for size in sizes:
        microseconds = seconds_of(size, scale) * 1e6
        algbw = size / microseconds / 1e3
        half = f"{microseconds:9.2f} {algbw:7.2f} {algbw * busbw_ratio(program or 'all_reduce', n):7.2f} "
        half += f"{wrong:6d}" if error is None else f"{error:>6s}"
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


LSTOPO = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
  <object type="Machine" os_index="0" gp_index="1">
    <info name="Backend" value="Linux"/>
    <object type="Package" os_index="0" gp_index="2">
      <object type="NUMANode" os_index="0" gp_index="3" local_memory="1000"/>
      <object type="Bridge" gp_index="10" bridge_type="0-1" depth="0" bridge_pci="0000:[00-0f]">
        <object type="Bridge" gp_index="11" bridge_type="1-1" depth="1" bridge_pci="0000:[01-07]" pci_busid="0000:00:01.0"
          pci_type="0604 [1000:c010] [1000:a096] b0">
          <object type="PCIDev" gp_index="12" pci_busid="0000:03:00.0" pci_type="0302 [10de:20b2] [10de:1463] a1">
            <object type="OSDev" gp_index="13" name="nvml1" subtype="NVML" osdev_type="1">
              <info name="GPUModel" value="NVIDIA A100-SXM4-80GB"/>
            </object>
          </object>
          <object type="PCIDev" gp_index="14" pci_busid="0000:02:00.0" pci_type="0302 [10de:20b2] [10de:1463] a1">
            <object type="OSDev" gp_index="15" name="nvml0" subtype="NVML" osdev_type="1"/>
            <object type="OSDev" gp_index="16" name="cuda1" subtype="CUDA" osdev_type="5"/>
          </object>
          <object type="PCIDev" gp_index="17" pci_busid="0000:04:00.0" pci_type="0207 [15b3:101b] [15b3:0007] 00">
            <object type="OSDev" gp_index="18" name="mlx5_0" osdev_type="3"/>
            <object type="OSDev" gp_index="19" name="ib0" osdev_type="2"/>
          </object>
        </object>
        <object type="PCIDev" gp_index="20" pci_busid="0000:08:00.0" pci_type="0300 [1a03:2000] [1a03:2000] 41"/>
      </object>
    </object>
    <object type="Package" os_index="1" gp_index="30">
      <object type="NUMANode" os_index="1" gp_index="31" local_memory="1000"/>
      <object type="Bridge" gp_index="32" bridge_type="0-1" depth="0" bridge_pci="0000:[80-8f]">
        <object type="Bridge" gp_index="33" bridge_type="1-1" depth="1" bridge_pci="0000:[81-81]">
          <object type="PCIDev" gp_index="34" pci_busid="0000:81:00.0" pci_type="0302 [10de:20b2] [10de:1463] a1">
            <object type="OSDev" gp_index="35" name="nvml2" subtype="NVML" osdev_type="1"/>
          </object>
        </object>
        <object type="Bridge" gp_index="36" bridge_type="1-1" depth="1" bridge_pci="0000:[82-82]">
          <object type="PCIDev" gp_index="37" pci_busid="0000:82:00.0" pci_type="0302 [10de:20b2] [10de:1463] a1">
            <object type="OSDev" gp_index="38" name="nvml3" subtype="NVML" osdev_type="1"/>
          </object>
        </object>
        <object type="PCIDev" gp_index="39" pci_busid="0000:83:00.0" pci_type="0207 [15b3:101b] [15b3:0007] 00">
          <object type="OSDev" gp_index="40" name="mlx5_1" osdev_type="3"/>
        </object>
      </object>
    </object>
  </object>
  <distances2 type="OSDev" nbobjs="4" kind="5" name="NVLinkBandwidth" indexing="gp">
    <indexes length="12">15 13 35 38 </indexes>
    <u64values length="60">0 300000 0 0 300000 0 0 0 0 0 0 300000 0 0 300000 0 </u64values>
  </distances2>
</topology>
"""
"""Two bridged pairs on two sockets, as hwloc 2 writes them; the first pair and a card share a PCIe switch."""


def nsys_database(*, gpus: int = 1, steps: int = 2, marked: bool = True) -> bytes:
    """An export of Nsight Systems: per step of 10 ms a kernel, a sum that it half hides, and a copy behind a gap."""
    tables = {
        "StringIds": "id INTEGER, value TEXT",
        "TARGET_INFO_GPU": "id INTEGER, name TEXT",
        "CUPTI_ACTIVITY_KIND_KERNEL": (
            "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, "
            "demangledName INTEGER, shortName INTEGER"
        ),
        "CUPTI_ACTIVITY_KIND_MEMCPY": (
            "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, "
            "globalPid INTEGER, bytes INTEGER"
        ),
        "CUPTI_ACTIVITY_KIND_RUNTIME": ("start INTEGER, end INTEGER, correlationId INTEGER, globalTid INTEGER, nameId INTEGER"),
        "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER",
    }
    connection = sqlite3.connect(":memory:")
    for name, columns in tables.items():
        connection.execute(f"CREATE TABLE {name} ({columns})")
    names = {
        1: "ampere_sgemm_128x64",
        2: "sgemm",
        3: "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        4: "cudaLaunchKernel",
        5: "step 1",
    }
    connection.executemany("INSERT INTO StringIds VALUES (?, ?)", list(names.items()))
    connection.executemany("INSERT INTO TARGET_INFO_GPU VALUES (?, 'NVIDIA A100-SXM4-80GB')", [(gpu,) for gpu in range(gpus)])
    ms, process, begin = 1_000_000, 77 << 24, 5_000_000_000
    for gpu in range(gpus):
        for step in range(steps):
            at, first = begin + 10 * step * ms, 10 * (gpu * steps + step)
            kernels = [(0, 6, 7, first, 1, 2), (4, 8, 13, first + 1, 3, 3)]
            for start, end, stream, correlation, long, short in kernels:
                row = (at + start * ms, at + end * ms, gpu, stream, correlation, process, long, short)
                connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            copy = (at + 9 * ms, at + 10 * ms, gpu, 7, first + 2, process, 4096)
            connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?, ?)", copy)
            launches = [(-0.5, -0.4, first), (0.1, 0.2, first + 1), (8.2, 8.6, first + 2)]
            for start, end, correlation in launches:
                launch = (at + int(start * ms), at + int(end * ms), correlation, process | 5, 4)
                connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", launch)
            if marked and gpu == 0:
                text = (None, 5) if step == 1 else (f"step {step}", None)
                mark = (at, at + 10 * ms, 59, *text, process | 5)
                connection.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", mark)
    connection.commit()
    return connection.serialize()
