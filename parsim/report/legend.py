"""Names, units and colours of what figures and pages show: the same in every picture, in the report and in the explorer.

Kinds and categories have the colours of Okabe and Ito, lines of memory those of Paul Tol's muted scheme: colour-blind readers
can distinguish both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from parsim.units import GIB, KIB, MIB

CLEAR = "rgba(0,0,0,0)"
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILION, PURPLE, YELLOW, GREY, INK = "#D55E00", "#CC79A7", "#F0E442", "#BDBDBD", "#1b2530"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, "#8C6BB1", "#A6761D", "#5B8C2A", "#B2182B")
"""Of lines that stand for values of a swept field, and of kinds of plans."""

KIND_COLOURS = {
    "load": GREEN,
    "forward": SKY,
    "backward": BLUE,
    "recompute": "#332288",
    "optimizer": PURPLE,
    "clip": "#999933",
    "all_reduce": VERMILION,
    "send_recv": ORANGE,
    "all_gather": YELLOW,
    "reduce_scatter": "#8C510A",
    "all_to_all": "#882255",
    "broadcast": "#661100",
    "mix": "#44AA99",
}
LETTER_COLOURS = {
    "F": SKY,
    "B": BLUE,
    "I": BLUE,
    "W": "#8C6BB1",
    "R": KIND_COLOURS["recompute"],
    "O": PURPLE,
    "K": KIND_COLOURS["clip"],
    "M": KIND_COLOURS["mix"],
    "C": VERMILION,
    "S": ORANGE,
    "L": GREEN,
    "H": "#A6761D",
    "U": "#661100",
}
"""Of the letters of `parsim.report.trace`."""
CATEGORY_COLOURS = {
    "compute_s": BLUE,
    "load_s": GREEN,
    "host_s": PURPLE,
    "exposed_communication_s": VERMILION,
    "bubble_s": ORANGE,
    "idle_s": GREY,
}
MEMORY_COLOURS = {
    "parameters": "#332288",
    "casts": "#6699CC",
    "gradients": "#88CCEE",
    "unsharded": "#4477AA",
    "optimizer_state": "#44AA99",
    "buffers": "#117733",
    "activations": "#DDCC77",
    "boundary_values": "#999933",
    "receive_buffers": "#661100",
    "inputs": "#CC6677",
    "communication": "#882255",
    "context": "#CBD0D6",
    "workspace": "#AA4499",
    "allocator": "#DDDDDD",
}


class PointMetric(NamedTuple):
    """A figure of a sweep's points: its column, those of its interval (of `p` at 5 and 95), its name, how it is written, and
    whether its "min" or "max" is best."""

    column: str
    interval: str
    name: str
    kind: str
    best: str

    def ends(self) -> tuple[str, str] | None:
        """The columns of the 90% interval; None: it has none."""
        return (self.interval.format("p05"), self.interval.format("p95")) if self.interval else None


METRICS = (
    PointMetric("throughput_samples_per_s", "throughput_{}_samples_per_s", "Throughput", "rate", "max"),
    PointMetric("step_s", "step_{}_s", "Time per step", "time", "min"),
    PointMetric("epoch_s", "epoch_{}_s", "Time per epoch", "time", "min"),
    PointMetric("run_s", "run_{}_s", "Time of the run", "time", "min"),
    PointMetric("usd_per_million_samples", "usd_per_million_samples_{}", "Price per million samples", "usd", "min"),
    PointMetric("usd_per_epoch", "usd_per_epoch_{}", "Price per epoch", "usd", "min"),
    PointMetric("run_usd", "run_usd_{}", "Price of the run", "usd", "min"),
    PointMetric("kwh_per_million_samples", "kwh_per_million_samples_{}", "Energy per million samples", "energy", "min"),
    PointMetric("kwh_per_epoch", "kwh_per_epoch_{}", "Energy per epoch", "energy", "min"),
    PointMetric("run_kwh", "run_kwh_{}", "Energy of the run", "energy", "min"),
    PointMetric("peak_memory_bytes", "peak_memory_{}_bytes", "Peak memory", "bytes", "min"),
    PointMetric("mfu", "", "Model FLOP utilisation", "share", "max"),
    PointMetric("communication_fraction", "", "Exposed communication", "share", "min"),
)

AXIS_NAMES = {
    "cluster.devices": "Devices",
    "cluster.nodes": "Nodes",
    "cluster.machine": "Machine",
    "cluster.usd_per_hour": "Price per device-hour (USD)",
    "model.args.seq": "Tokens per sample",
    "plan.mesh": "Mesh",
    "plan.mesh.pp": "Pipeline stages",
    "plan.mesh.dp": "Data-parallel replicas",
    "plan.mesh.tp": "Tensor-parallel ways",
    "plan.mesh.cp": "Context-parallel ways",
    "plan.mesh.ep": "Expert-parallel ways",
    "plan.mesh.dp_shard": "Sharding ways",
    "plan.zero_stage": "ZeRO stage",
    "plan.bucket_bytes": "Bucket size (bytes)",
    "scale.compute": "Speed of computation (times)",
    "scale.links": "Speed of the links (times)",
    "scale.memory": "Memory of the devices (times)",
}


def axis_name(key: str) -> str:
    """A key of a run file in words: `training.global_batch` is "Global batch"."""
    words = key.rpartition(".")[2].replace("_", " ")
    return AXIS_NAMES.get(key, words[:1].upper() + words[1:])


def value_name(value: object) -> str:
    """A swept value in words: a mesh as `pp=2, dp=4`, a number as short as it is exact to four digits."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={entry}" for name, entry in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


SCALES = {
    "time": ((86400.0, "days", 172800.0), (3600.0, "h", 7200.0), (60.0, "min", 120.0), (1.0, "s", 1.0), (1e-3, "ms", 1e-3),
             (1e-6, "µs", 0.0)),
    "bytes": ((GIB, "GiB", GIB), (MIB, "MiB", MIB), (KIB, "KiB", KIB), (1.0, "B", 0.0)),
    "rate": ((1e6, "million samples/s", 1e6), (1e3, "thousand samples/s", 1e4), (1.0, "samples/s", 0.0)),
    "usd": ((1e6, "million USD", 1e6), (1.0, "USD", 0.0)),
    "energy": ((1e3, "MWh", 2e3), (1.0, "kWh", 1.0), (1e-3, "Wh", 0.0)),
    "share": ((0.01, "%", 0.0),),
}  # fmt: skip
"""Units of an axis by what it shows, each with the number from which it is taken."""


def axis_scale(kind: str, largest: float) -> tuple[float, str]:
    """The unit of an axis that reaches `largest`: what it is in SI units, and its name."""
    return next((size, name) for size, name, least in SCALES[kind] if abs(largest) >= least)
