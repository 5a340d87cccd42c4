"""Every published collective of collectives.csv as a question to parsim: which machine, which ranks, how many bytes, how long.

Some rows are no measurement of a collective (constants of NCCL's own model, lines fitted to rows that are listed too), and some
have no counterpart here. They are listed with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from parsim.costs.communication.algorithms import choices
from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.units import MIB
from parsim.work import Collective, SendRecv
from tools.published.v100_throughput import LeftOut, read_table

OPERATIONS = {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where rows whose hardware starts with `hardware` are predicted, and how such rows came to be.

    `group`: the devices, where they are not the first ones. `algorithm`: the one that the run forced; "": NCCL's choice.
    """

    hardware: str
    profile: str
    group: tuple[int, ...] | None
    what: str
    nodes: int = 1
    network: str | None = None
    algorithm: str = ""


CUBE = "dgx1-v100-32gb"
MACHINES = (
    Machine(
        hardware="8-GPU V100 SXM2 node",
        profile=CUBE,
        group=None,
        what="cube mesh, one process per GPU (vTrain); fitted to",
    ),
    Machine(
        hardware="8x V100-SXM2-16GB, NVLink hybrid cube mesh",
        profile=CUBE,
        group=None,
        what="cube mesh, one process drives eight GPUs (log)",
    ),
    Machine(hardware="8x V100-SXM2-16GB (Oracle Cloud", profile="p3-16xlarge", group=None, what="cube mesh, Oracle Cloud"),
    Machine(
        hardware="4x V100-SXM2-16GB, 2+2 over PCIe/SMP",
        profile="pcie-8xv100",
        group=(0, 1, 4, 5),
        what="two GPUs on each socket over PCIe (log of another box); its large sizes fitted to",
    ),
    Machine(
        hardware="2 nodes x 8 V100-SXM2-32GB (AWS p3dn",
        profile=CUBE,
        group=None,
        what="two p3dn nodes on EFA, ring forced (log); the network fitted to both ends",
        nodes=2,
        network="efa-100g",
        algorithm="ring",
    ),
    Machine(hardware="DGX-2, 12 of 16", profile="dgx2-v100", group=None, what="12 of 16 GPUs of a DGX-2 (noisy log)"),
)

TACCL_PAIRS = {"double link": (0, 3), "single link": (0, 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """`size_bytes` is of the whole array, as nccl-tests prints it."""

    id: str
    machine: Machine
    operation: str
    group: tuple[int, ...]
    size_bytes: int
    seconds: float

    @property
    def predicted_s(self) -> float:
        cluster = _cluster(self.machine)
        if self.operation == "send_recv":
            source, destination = self.group
            work = SendRecv(source=source, destination=destination, size_bytes=self.size_bytes)
            base = SendRecv(source=source, destination=destination, size_bytes=0)
            return estimate_send_recv(work, cluster).median_s - estimate_send_recv(base, cluster).median_s
        if self.machine.algorithm:
            found = choices(self.operation, self.group, self.size_bytes, cluster)
            return next(choice.seconds for choice in found if choice.algorithm == self.machine.algorithm)
        return estimate_collective(
            Collective(operation=self.operation, group=self.group, size_bytes=self.size_bytes), cluster
        ).median_s

    @property
    def error(self) -> float:
        return self.predicted_s / self.seconds - 1.0


@lru_cache(maxsize=16)
def _cluster(machine: Machine) -> Cluster:
    return cluster_from_profile(load_profile(machine.profile), nodes=machine.nodes, network=machine.network)


def read_collective_rows(data_dir: Path) -> tuple[list[CollectiveRow], list[LeftOut]]:
    """All measurements, and every other row with the reason it is none. Raises DataError if the table is missing."""
    rows: list[CollectiveRow] = []
    left_out: list[LeftOut] = []
    for entry in read_table(data_dir, "collectives.csv"):
        found = _row(entry)
        if isinstance(found, str):
            left_out.append(LeftOut(id=entry["id"], what=entry["model_or_op"], reason=found))
        else:
            rows.append(found)
    return rows, left_out


def _row(entry: Mapping[str, str]) -> CollectiveRow | str:
    """The row, or the reason why it is none."""
    if entry["id"].startswith("col-fit"):
        return "a line through rows that are listed themselves"
    if entry["id"].startswith("col-nccltuner"):
        return "a constant of NCCL's own cost model, used by the link model"
    if entry["id"].startswith("col-taccl"):
        return _pair(entry)
    machine = next((machine for machine in MACHINES if entry["hardware"].startswith(machine.hardware)), None)
    if machine is None:
        return f"no profile of {entry['hardware']}"
    operation = entry["model_or_op"].removeprefix("nccl ")
    if operation not in OPERATIONS:
        return f"parsim has no {operation}"
    if entry["unit"] != "us":
        return f"unit {entry['unit']}"
    size_bytes = int(entry["size_bytes_or_shape"])
    if not size_bytes:
        return "no bytes"
    return CollectiveRow(
        id=entry["id"],
        machine=machine,
        operation=operation,
        group=machine.group or tuple(range(int(entry["gpus"]))),
        size_bytes=size_bytes,
        seconds=float(entry["value"]) * 1e-6,
    )


def _pair(entry: Mapping[str, str]) -> CollectiveRow | str:
    """TACCL's slope of a transfer of 1 MB between two GPUs, in microseconds per MB; the latencies are scaled by chunks."""
    if entry["notes"] not in TACCL_PAIRS or entry["size_bytes_or_shape"] != "1 MB" or "betas" not in entry["model_or_op"]:
        return "a scaled or derived constant of TACCL's input"
    return transfer_row(entry["id"], entry["notes"], float(entry["value"]))


def transfer_row(name: str, pair: str, microseconds: float) -> CollectiveRow:
    """A transfer of 1 MB between the GPUs of one of TACCL_PAIRS."""
    group = TACCL_PAIRS[pair]
    return CollectiveRow(
        id=name,
        machine=Machine(hardware="Azure NDv2", profile=CUBE, group=group, what="a transfer over one or two NVLinks (TACCL)"),
        operation="send_recv",
        group=group,
        size_bytes=MIB,
        seconds=microseconds * 1e-6,
    )
