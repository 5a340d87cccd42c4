"""Random planning problems: models, clusters and batches small enough to enumerate, of every kind that a search meets.

One builder serves the experiment and the property tests: it takes a `random.Random`, and Hypothesis offers one whose choices
it records and shrinks.

Prices come from a roofline over the drawn peaks and bandwidths, without fits and without an overlap factor. Then every task's
price falls with every rate. The step of one plan falls too, because resources serve in issue order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.devices import NO_ALLOCATOR
from parsim.hardware.parts import Network, load_network
from parsim.hardware.profile import (
    DeviceEntry,
    DeviceTypeEntry,
    LinkEntry,
    LinkNumbers,
    LinkProtocol,
    NicSlot,
    Profile,
    Sourced,
)
from parsim.hardware.records import ComputeRecords
from parsim.model.component import LOSS, Component, Operator, OperatorShard, Parameter, ParameterShard, Sharding, Value
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.predict.problem import PlanningProblem

NETWORKS = ("infiniband-100g", "ethernet-25g")
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ModelDraw:
    """A chain c0 -> c1 -> ... -> loss, with what is drawn for each component.

    Attributes:
        flop: of one sample. elements: of the weight. width: elements of the output of one sample.
        saved_bytes: kept of one sample beyond the output. cut: whether it can be sharded.
        skips: (reader, maker) of values read beyond the one before. tied: components that share c0's weight.
    """

    flop: tuple[float, ...]
    elements: tuple[int, ...]
    width: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    cut: tuple[bool, ...]
    skips: tuple[tuple[int, int], ...] = ()
    tied: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClusterDraw:
    """Devices with their rates, and what joins them.

    Attributes:
        kinds: per device of a node the number of its type. peak_flop_per_s, memory_bandwidth: per type.
        wiring: "switch" (one PCIe switch), "mesh" (every pair by NVLink) or "sockets" (two switches joined by a slow link).
        link_bandwidth, link_latency_s: of the links that rings use; relays are four times as slow.
        nodes, network: more than one node of such devices.
        memory_bytes: per type.
    """

    kinds: tuple[int, ...]
    peak_flop_per_s: tuple[float, ...]
    memory_bandwidth: tuple[float, ...]
    wiring: str
    link_bandwidth: float
    link_latency_s: float
    nodes: int = 1
    network: str = NETWORKS[0]
    memory_bytes: tuple[int, ...] = field(default=(2**44, 2**44))


@dataclass(frozen=True, kw_only=True)
class ProblemDraw:
    """Everything that was drawn of one problem; `problem()` builds it."""

    model: ModelDraw
    cluster: ClusterDraw
    global_batch: int
    optimizer: str = "sgd_momentum"

    def problem(self, **constraints: object) -> PlanningProblem:
        """The problem, under constraints such as zero_stage."""
        return PlanningProblem(
            model=built_model(self.model),
            cluster=built_cluster(self.cluster),
            global_batch=self.global_batch,
            numerics=Numerics(optimizer=self.optimizer),
            **constraints,  # type: ignore[arg-type]
        )


# --- drawing ----------------------------------------------------------------------------------------------------------


def random_problem(random: Random, *, most_devices: int = 8, most_components: int = 4, batches: tuple[int, ...]) -> ProblemDraw:
    """A problem whose memory is ample, or short of what one device needs for the whole model."""
    draw = ProblemDraw(
        model=random_model(random, most_components=most_components),
        cluster=random_cluster(random, most_devices=most_devices),
        global_batch=random.choice(batches),
        optimizer=random.choice(("sgd", "sgd_momentum", "adam")),
    )
    share = random.choice((None, None, 1.3, 0.9, 0.6, 0.35))
    return draw if share is None else with_memory(draw, share)


def with_memory(draw: ProblemDraw, share: float) -> ProblemDraw:
    """Devices with this share of what the whole model takes on one of them, beside room for two communicators."""
    model = draw.model
    weights = sum(model.elements) * 16
    kept = draw.global_batch * sum(saved + 4 * width for saved, width in zip(model.saved_bytes, model.width, strict=True))
    memory = int(share * (weights + kept)) + GIB // 2
    return replace(draw, cluster=replace(draw.cluster, memory_bytes=(memory, int(1.5 * memory))))


def random_model(random: Random, *, most_components: int = 4) -> ModelDraw:
    """One to `most_components` components of similar or very different sizes."""
    count = random.randint(1, most_components)
    alike = random.random() < 0.4

    def drawn(low: float, high: float) -> list[float]:
        first = 10 ** random.uniform(low, high)
        return [first if alike else 10 ** random.uniform(low, high) for _ in range(count)]

    skips = tuple((reader, random.randrange(reader - 1)) for reader in range(2, count) if random.random() < 0.25)
    tied = (count - 1,) if count > 1 and random.random() < 0.15 else ()
    cut = tuple(random.random() < 0.6 and not (tied and number in (0, count - 1)) for number in range(count))
    return ModelDraw(
        flop=tuple(round(flop) * 1.0 for flop in drawn(8, 11)),
        elements=tuple(64 * max(1, round(size / 64)) for size in drawn(4.5, 8)),
        width=tuple(64 * max(1, round(size / 64)) for size in drawn(2, 6)),
        saved_bytes=tuple(round(size) for size in drawn(3, 7.5)),
        cut=cut,
        skips=skips,
        tied=tied,
    )


def random_cluster(random: Random, *, most_devices: int = 8) -> ClusterDraw:
    """One to `most_devices` devices, of one type or of two, on one node or two."""
    devices = random.choice([count for count in (1, 2, 2, 3, 4, 4, 4, 6, 8) if count <= most_devices])
    nodes = 2 if devices % 2 == 0 and random.random() < 0.25 else 1
    mixed = random.random() < 0.3
    per_node = devices // nodes
    return ClusterDraw(
        kinds=tuple(random.randint(0, 1) if mixed else 0 for _ in range(per_node)),
        peak_flop_per_s=(10 ** random.uniform(12.5, 14), 10 ** random.uniform(12.5, 14)),
        memory_bandwidth=(10 ** random.uniform(11, 12.5), 10 ** random.uniform(11, 12.5)),
        wiring=random.choice(("switch", "mesh", "sockets")),
        link_bandwidth=10 ** random.uniform(9, 11.3),
        link_latency_s=10 ** random.uniform(-6.3, -5),
        nodes=nodes,
        network=random.choice(NETWORKS),
    )


# --- building ---------------------------------------------------------------------------------------------------------


def built_model(draw: ModelDraw, *, names: tuple[str, ...] | None = None) -> Model:
    """The Model of a draw; its components are c0, c1, ... unless they are named."""
    count = len(draw.flop)
    called = names or tuple(f"c{number}" for number in range(count))
    values = [Value(name="input:0", producer=None, bytes_per_sample=1024, differentiable=False)]
    components = []
    for number, name in enumerate(called):
        before = "input:0" if number == 0 else f"{called[number - 1]}:0"
        extra = tuple(f"{called[maker]}:0" for reader, maker in draw.skips if reader == number)
        owner = called[0] if number in draw.tied else name
        elements = draw.elements[0] if number in draw.tied else draw.elements[number]
        width = 4 * draw.width[number]
        values.append(Value(name=f"{name}:0", producer=name, bytes_per_sample=width))
        operator = Operator(
            kind="matmul",
            shape=(("m", 1), ("n", 64), ("k", max(1, int(draw.flop[number] / 128)))),
            batch="rows",
            forward_flop=draw.flop[number],
            activation_bytes=width + 512,
            parameter_bytes=4 * elements,
        )
        components.append(
            Component(
                name=name,
                inputs=(before, *extra),
                outputs=(f"{name}:0",),
                parameters=(Parameter(name=f"{owner}.weight", elements=elements),),
                saved_activation_bytes=draw.saved_bytes[number] + width,
                operators=(operator,),
                shardings=_shardings(number, owner, width, 1 + len(extra)) if draw.cut[number] else (),
            )
        )
    values += [
        Value(name="target", producer=None, bytes_per_sample=8, differentiable=False, saved=False),
        Value(name=f"{LOSS}:0", producer=LOSS, bytes_per_sample=0, fixed_bytes=4, saved=False),
    ]
    loss = Component(name=LOSS, inputs=(f"{called[-1]}:0", "target"), outputs=(f"{LOSS}:0",))
    return Model(
        name="drawn",
        granularity="block",
        components=(*components, loss),
        values=tuple(values),
        inputs=("input:0", "target"),
        outputs=(f"{LOSS}:0",),
        source="drawn at random",
    )


def _shardings(number: int, owner: str, width: int, inputs: int) -> tuple[Sharding, ...]:
    """By column where the number is even, by row where it is odd: two in a row need no conversion between them."""
    column = number % 2 == 0
    return (
        Sharding(
            rule="column" if column else "row",
            limit=8,
            inputs=("full",) * inputs if column else ("shard:1", *("full",) * (inputs - 1)),
            outputs=("shard:1",) if column else ("partial",),
            parameters=(ParameterShard(name=f"{owner}.weight", dim=0 if column else 1),),
            operators=(OperatorShard(number=0, dim="n" if column else "k", activation_bytes=width // 2),),
            saved_activation_bytes=width // 2,
        ),
    )


@cache
def _base() -> Profile:
    return load_profile("pcie-8xv100")


def built_profile(draw: ClusterDraw) -> Profile:
    """The profile of one node."""
    base = _base()
    published = next(iter(next(iter(base.device_types.values())).peak_flop_per_s.values())).source
    exact = NO_ALLOCATOR.model_copy(update={"source": published})

    def number(value: float) -> Sourced:
        return Sourced(value=value, source=published)

    types = {
        f"type{kind}": DeviceTypeEntry(
            kind="cuda",
            memory_bytes=number(draw.memory_bytes[kind]),
            memory_bandwidth_bytes_per_s=number(draw.memory_bandwidth[kind]),
            context_bytes=number(0),
            peak_flop_per_s={"fp32": number(draw.peak_flop_per_s[kind])},
            allocator=exact,
        )
        for kind in range(2)
    }
    latency_s = draw.link_latency_s

    def link(slower: float) -> LinkNumbers:
        return LinkNumbers(bandwidth_bytes_per_s=number(draw.link_bandwidth / slower), latency_s=number(latency_s))

    model = base.communication.link_model
    assert model is not None
    protocol = LinkProtocol(
        algorithm="ring",
        protocol="Simple",
        base_s=4 * latency_s,
        hop_s=latency_s,
        efficiency=1.0,
        tuner_base_s=4 * latency_s,
        tuner_hop_s=latency_s,
        tuner_efficiency=1.0,
        source=model.source,
        tuner_source=model.source,
    )
    fast = "nvlink" if draw.wiring == "mesh" else "pcie"
    model = model.model_copy(
        update={
            "link_kind": fast,
            "protocols": [protocol],
            "relay_protocols": [protocol],
            "tuner_bandwidth_bytes_per_s": number(1e10),
            "point_to_point_base_s": 4 * latency_s,
        }
    )
    return base.model_copy(
        update={
            "name": "drawn",
            "device_types": types,
            "devices": [DeviceEntry(index=index, type=f"type{kind}") for index, kind in enumerate(draw.kinds)],
            "link_kinds": {"nvlink": link(1), "pcie": link(1 if fast == "pcie" else 4), "smp": link(4)},
            "links": _links(draw),
            "nics": [NicSlot(at="pcie0", kind="pcie")],
            "communication": base.communication.model_copy(update={"link_model": model, "points": []}),
            "compute": ComputeRecords(),
            "overlap": None,
            "noise": None,
        }
    )


def _links(draw: ClusterDraw) -> list[LinkEntry]:
    devices = range(len(draw.kinds))
    two = draw.wiring == "sockets" and len(devices) > 1
    half = (len(devices) + 1) // 2
    found = [LinkEntry(a=f"gpu{index}", b=f"pcie{int(two and index >= half)}", kind="pcie") for index in devices]
    found.append(LinkEntry(a="pcie0", b="socket0", kind="pcie"))
    if two:
        found += [LinkEntry(a="pcie1", b="socket1", kind="pcie"), LinkEntry(a="socket0", b="socket1", kind="smp")]
    if draw.wiring == "mesh":
        found += [LinkEntry(a=f"gpu{one}", b=f"gpu{other}", kind="nvlink") for other in devices for one in range(other)]
    return found


def built_cluster(draw: ClusterDraw) -> Cluster:
    """The cluster of a draw. Its prices are kept for clusters equal to it."""
    return cluster_from_profile(built_profile(draw), len(draw.kinds), nodes=draw.nodes, network=network_of(draw))


def network_of(draw: ClusterDraw) -> Network | None:
    """What joins the nodes; None where there is one."""
    return load_network(draw.network) if draw.nodes > 1 else None
