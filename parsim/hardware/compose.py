"""A machine made of parts: a Profile of `count` GPUs of one kind, their links, and slots for network cards.

The links of a node, by the form of the link part:

    switch   every device to nvswitch0
    mesh     every device to every other, `lanes` shared out evenly
    pairs    device 2i to 2i + 1
    cube     the hybrid cube mesh of eight devices (two lanes or one per pair)
    host     none of its own

Besides, every device hangs on the host: on a PCIe switch (two share one) under one of two sockets, with a slot for a network
card at each switch. With "switch" and "mesh" every device has a PCIe switch and a slot of its own, as in machines with a card
per GPU. All switches hang on one host end: the library reaches a card of another socket over the direct links and
the device beside the card. `cards_per_node` changes only how many cards are plugged in.

Leaves out: which cards share a socket's memory, and hosts whose PCIe differs from the GPU's generation.

GPUs of which only bursts were published are held at what those of their family show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from parsim.errors import ProfileError, near_matches
from parsim.files import parse_toml, read_text
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.parts import (
    GpuPart,
    LinkPart,
    Network,
    PartFit,
    check_counted,
    check_covered,
    instance_names,
    instances_of,
    load_gpu,
    load_link,
    load_network,
    shorthand,
)
from parsim.hardware.profile import (
    Communication,
    DeviceEntry,
    DeviceTypeEntry,
    HostOverhead,
    LinkEntry,
    LinkModel,
    LinkNumbers,
    LinkProtocol,
    NicSlot,
    Noise,
    Profile,
    Provenance,
    Sourced,
    SourceEntry,
    parse_profile,
    shipped_profiles,
)
from parsim.hardware.records import (
    ComputeRecords,
    Count,
    Efficiency,
    OperatorFit,
    Positive,
    ProfileRecord,
    is_path,
    problems_text,
    shipped_text,
)
from parsim.hardware.topology import SOCKETS

HOST = "pcie"
CUBE: Mapping[tuple[int, int], int] = {
    **dict.fromkeys([(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)], 2),
    **dict.fromkeys([(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)], 1),
}
"""Lanes of the hybrid cube mesh (`nvidia-smi topo -m` of a DGX-1V)."""

DRIFT_SIGMA = 0.05
COMPOSED = "parts"
DEVICE_SIGMA = Sourced(value=0.015, source="spread of GPUs")
DEVICE_SOURCE = SourceEntry(
    kind="paper",
    text="Sinha et al., SC 2022 (arXiv 2208.11035): 8% variation between GPUs of one cluster in the mean of five clusters of "
    "V100 and other GPUs; taken as the range between the whiskers of a box plot, 5.4 standard deviations",
)


def profile_from_parts(gpu: str | GpuPart, count: int | None = None, link: str | LinkPart | None = None) -> Profile:
    """A machine of `count` GPUs.

    Args:
        gpu: a shipped GPU by name or alias, the path of one, or a GpuPart.
        count: per node; None: as many as the usual machine has.
        link: what joins them, by name or path; None: what the usual machine has.

    Raises:
        ProfileError: an unknown part, or a link that does not join so many devices.
    """
    part = load_gpu(gpu) if isinstance(gpu, str) else gpu
    number = part.gpus_per_node if count is None else count
    joined = load_link(link or part.link) if not isinstance(link, LinkPart) else link
    host = load_link(part.host_link)
    if number < 1:
        raise ProfileError(f"gpus_per_node = {number}: a node needs at least one GPU")
    if number > joined.largest:
        raise ProfileError(
            f"gpus_per_node = {number}: {joined.name} joins {joined.largest} GPUs of a node at most; use gpus_per_node <= "
            f"{joined.largest} and more nodes, or another link"
        )
    sources = {
        COMPOSED: SourceEntry(
            kind="assumption",
            text="how the usual machine of these parts is put together, and 5% from run to run: assumed, not measured",
        ),
        DEVICE_SIGMA.source: DEVICE_SOURCE,
    }
    for piece in (part, joined, host):
        sources |= {_key(piece, key): source for key, source in piece.sources.items()}
    direct = joined if joined.form != "host" else host
    links, slots, kinds = _links(direct, host, number)
    overhead = None
    if part.launch_s is not None:  # nothing else of a host is known of parts
        launch_source = _key(part, part.launch_s.source)
        overhead = HostOverhead(task_s=0.0, step_s=0.0, launch_s=part.launch_s.value, source=launch_source)
    return Profile(
        schema_version=1,
        name=f"{number}x{part.name}" if link is None else f"{number}x{part.name}-{joined.name}",
        description=f"{number} x {part.description} {joined.description}",
        provenance=Provenance(
            created="",
            command=f"from parts: {part.name}, {joined.name}, {host.name}",
            machine="not a single machine: made of parts, see sources",
        ),
        sources=sources,
        device_types={
            part.name: DeviceTypeEntry(
                kind=part.kind,
                memory_bytes=_named(part.memory_bytes, part),
                memory_bandwidth_bytes_per_s=_named(part.memory_bandwidth_bytes_per_s, part),
                context_bytes=_named(part.context_bytes, part),
                peak_flop_per_s={name: _named(peak, part) for name, peak in part.peak_flop_per_s.items()},
            )
        },
        devices=[DeviceEntry(index=index, type=part.name) for index in range(number)],
        link_kinds=kinds,
        links=links,
        nics=slots,
        nics_source=COMPOSED,
        communication=Communication(backend="nccl", link_model=_link_model(direct, host)),
        compute=ComputeRecords(
            operator_fits=[fit for kernel in part.fits for fit in _operator_fits(part, kernel)],
            efficiencies=[
                Efficiency(
                    **reached.model_dump(exclude={"precisions", "source"}),
                    precision=precision,
                    device_type=part.name,
                    source=_key(part, reached.source),
                )
                for reached in part.efficiencies
                for precision in reached.precisions
            ],
        ),
        noise=Noise(drift_sigma=DRIFT_SIGMA, device_sigma=DEVICE_SIGMA, source=COMPOSED),
        host=overhead,
    )


def _key(part: GpuPart | LinkPart, source: str) -> str:
    return f"{part.name}:{source}"


def _named(number: Sourced, part: GpuPart | LinkPart) -> Sourced:
    return Sourced(value=number.value, source=_key(part, number.source))


def _operator_fits(part: GpuPart, fit: PartFit) -> list[OperatorFit]:
    """The fit with the chip's own numbers, once for each precision that the chip has a peak of."""
    kernel = fit.model_dump(exclude={"precisions", "transferred_from", "coefficients", "source"})
    return [
        OperatorFit(
            **kernel,
            precision=precision,
            device_type=part.name,
            coefficients={
                **fit.coefficients,
                "multiprocessors": part.multiprocessors.value,
                "peak_flop_per_s": part.peak_flop_per_s[precision].value,
                "memory_bandwidth_bytes_per_s": part.memory_bandwidth_bytes_per_s.value,
            },
            source=_key(part, fit.source),
        )
        for precision in fit.precisions
        if precision in part.peak_flop_per_s
    ]


def _links(direct: LinkPart, host: LinkPart, number: int) -> tuple[list[LinkEntry], list[NicSlot], dict[str, LinkNumbers]]:
    """The links of a node, the slots for its network cards, and the kinds of link."""
    if host.socket_bytes_per_s is None:
        raise ProfileError(f'{host.name} joins no host: a host_link has form = "host" and socket_bytes_per_s')

    def kind(part: LinkPart, rate: Sourced) -> LinkNumbers:
        return LinkNumbers(bandwidth_bytes_per_s=_named(rate, part), latency_s=_named(part.latency_s, part))

    kinds = {HOST: kind(host, host.bandwidth_bytes_per_s), SOCKETS: kind(host, host.socket_bytes_per_s)}
    if direct.form != "host":
        kinds["nvlink"] = kind(direct, direct.bandwidth_bytes_per_s)
    links = [LinkEntry(a=a, b=b, kind="nvlink", lanes=lanes) for a, b, lanes in _direct_links(direct, number)]
    per_switch = 1 if direct.form in ("switch", "mesh") else 2
    switches = -(-number // per_switch)
    sockets = 1 if per_switch == 1 else min(2, switches)
    links += [LinkEntry(a=f"gpu{gpu}", b=f"pcie{gpu // per_switch}", kind=HOST) for gpu in range(number)]
    links += [LinkEntry(a=f"pcie{place}", b=f"socket{place * sockets // switches}", kind=HOST) for place in range(switches)]
    if sockets == 2:
        links.append(LinkEntry(a="socket0", b="socket1", kind=SOCKETS))
    return links, [NicSlot(at=f"pcie{place}", kind=HOST) for place in range(switches)], kinds


def _direct_links(link: LinkPart, number: int) -> list[tuple[str, str, int]]:
    """(end, end, lanes) of the links between GPUs."""
    gpus = [f"gpu{index}" for index in range(number)]
    match link.form:
        case "switch":
            return [(gpu, "nvswitch0", link.lanes) for gpu in gpus]
        case "mesh":
            each = max(1, link.lanes // max(1, link.largest - 1))
            return [(a, b, each) for a, b in combinations(gpus, 2)]
        case "pairs":
            return [(a, b, link.lanes) for a, b in zip(gpus[::2], gpus[1::2], strict=False)]
        case "cube":
            return [(gpus[a], gpus[b], lanes) for (a, b), lanes in sorted(CUBE.items()) if b < number]
        case "host":
            return []


def _link_model(direct: LinkPart, host: LinkPart) -> LinkModel:
    def protocols(part: LinkPart) -> list[LinkProtocol]:
        return [
            protocol.model_copy(
                update={"source": _key(part, protocol.source), "tuner_source": _key(part, protocol.tuner_source)}
            )
            for protocol in part.protocols
        ]

    return LinkModel(
        link_kind=HOST if direct.form == "host" else "nvlink",
        protocols=protocols(direct),
        relay_protocols=protocols(host),
        tuner_bandwidth_bytes_per_s=_named(direct.bandwidth_bytes_per_s, direct),
        point_to_point_base_s=direct.point_to_point_base_s.value,
        relative_sigma=direct.relative_sigma.value,
        unmeasured_group_sigma=direct.unmeasured_group_sigma.value,
        measured_groups=[list(range(size)) for size in direct.measured_sizes],
        point_sources=[],
        min_size_bytes=direct.min_size_bytes,
        max_size_bytes=direct.max_size_bytes,
        source=_key(direct, direct.relative_sigma.source),
    )


def load_profile(name_or_path: str) -> Profile:
    """A profile by shipped name, by path, or made of parts.

    Args:
        name_or_path: a name of `shipped_profiles`; the path of a JSON file, or of a TOML file that refers to parts; or a node
            of equal GPUs such as "8xh100-sxm", whose number counts the GPUs of the node, however many the usual one has; or an
            instance type of a cloud such as "p5.48xlarge".

    Raises:
        ProfileError: an unknown name (with near matches), or a broken file (with the path of the wrong key).
    """
    path = Path(name_or_path)
    if path.suffix == SUFFIX:
        return read_parts_file(path)
    if (rented := instances_of(name_or_path)) is not None:
        number, instance = rented
        if number > 1:
            raise ProfileError(f"{name_or_path!r} are {number} machines, and one is asked for; write {instance.name}")
        return load_profile(instance.node)
    if node := shorthand(name_or_path):
        count, gpu, link = node
        return profile_from_parts(gpu, count, link)
    if is_path(name_or_path):
        if not path.is_file():
            raise ProfileError(f"no profile file {path}; write one with `parsim calibrate --out {path}`")
        try:
            return _parsed(read_text(path), str(path))
        except (OSError, ValueError) as error:
            raise ProfileError(
                f"cannot read profile {path}: {error}; give a JSON file written by `parsim calibrate`"
            ) from error
    if name_or_path not in shipped_profiles():
        check_covered(name_or_path)
        check_counted(name_or_path)
        near = near_matches(name_or_path, [*shipped_profiles(), *instance_names()])
        near = near if "did you mean" in near else f"; known: {', '.join(shipped_profiles())}"
        raise ProfileError(
            f"unknown profile {name_or_path!r}{near} (or GPUs by name, such as 8xh100-sxm; or an instance type, such as "
            "p5.48xlarge)"
        )
    return _parsed(shipped_text(name_or_path), name_or_path)


@lru_cache(maxsize=8)
def _parsed(text: str, where: str) -> Profile:
    """A profile is immutable: one text is checked once in a process."""
    return parse_profile(text, where)


# A profile that refers to parts: a short TOML file with comments, which `parsim profile new` writes.
#
#     name = "ours"
#     gpu = "h100-sxm"
#     count = 8
#     link = "nvswitch-4"
#
#     [change]
#     memory_bytes = 84.9e9
#     source = "nvidia-smi on our nodes, 2026-11-20"
#
# `change` replaces numbers of the GPU's part, and says where the new ones come from. JSON has no comments, hence TOML.


SUFFIX = ".toml"
MOST_LINES = 60
CHANGED = "changed here"


class OwnNumbers(ProfileRecord):
    """Numbers of one's own in place of the part's; None keeps the part's."""

    memory_bytes: Positive | None = None
    memory_bandwidth_bytes_per_s: Positive | None = None
    context_bytes: Positive | None = None
    peak_flop_per_s: dict[str, Positive] = {}
    busy_power_w: Positive | None = None
    idle_power_w: Positive | None = None
    source: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_source(self) -> OwnNumbers:
        if self.source is None and (self.peak_flop_per_s or self.model_dump(exclude_none=True, exclude={"peak_flop_per_s"})):
            raise ValueError('change holds numbers without a source; add source = "where they come from"')
        return self

    def applied_to(self, part: GpuPart) -> GpuPart:
        """The part with these numbers, checked again."""
        if self.source is None:
            return part
        document = part.model_dump()
        document["sources"][CHANGED] = {"kind": "datasheet", "text": self.source}
        for key, value in self.model_dump(exclude_none=True, exclude={"peak_flop_per_s", "source"}).items():
            document[key] = {"value": value, "source": CHANGED}
        for precision, value in self.peak_flop_per_s.items():
            document["peak_flop_per_s"][precision] = {"value": value, "source": CHANGED}
        return GpuPart.model_validate(document)


class PartsFile(ProfileRecord):
    """The whole file; count and link: None for those of the usual machine."""

    name: Annotated[str, Field(min_length=1)]
    gpu: str
    count: Count | None = None
    link: str | None = None
    change: OwnNumbers = OwnNumbers()


def read_parts_file(path: Path) -> Profile:
    """The profile that a TOML file describes by its parts. Raises ProfileError: no such file, not TOML, a wrong key (with
    its path), or an unknown part."""
    try:
        document = parse_toml(read_text(path))
    except FileNotFoundError as error:
        raise ProfileError(
            f"no profile file {path}; write one with `parsim profile new --gpu h100-sxm --out {path}`"
        ) from error
    except (OSError, ValueError) as error:
        raise ProfileError(
            f"cannot read profile {path}: {error}; fix it or write it again with `parsim profile new`"
        ) from error
    try:
        file = PartsFile.model_validate(document)
        part = file.change.applied_to(load_gpu(file.gpu))
    except ValidationError as error:
        raise ProfileError(f"profile {path} is broken: {problems_text(error)}; fix these") from error
    return profile_from_parts(part, file.count, file.link).model_copy(update={"name": file.name})


def parts_file_text(gpu: str, count: int | None = None, link: str | None = None, network: str | None = None) -> str:
    """The text of a commented file of at most `MOST_LINES` lines, which loads as it is. `network`: named in the example of a
    run file. Raises ProfileError: an unknown part or network."""
    part = load_gpu(gpu)
    joined = load_link(link or part.link)
    number = count or part.gpus_per_node
    first, peak = next(iter(part.peak_flop_per_s.items()))
    profile = profile_from_parts(part, number, joined)
    joining = load_network(network).name if network else "infiniband-400g"
    peaks = ", ".join(f"{name} {number.value / 1e12:g}" for name, number in part.peak_flop_per_s.items())
    watts = (("board limit", part.board_limit_w), ("busy", part.busy_power_w), ("idle", part.idle_power_w))
    economics = [f"{what} {power.value:.0f} W" for what, power in watts if power is not None]
    if part.usd_per_hour:
        economics.append(f"{part.usd_per_hour.value:g} USD per hour ({part.usd_per_hour.as_of})")
    lines = [
        f"# {number} x {part.description} Written by `parsim profile new`; every line but the first three may go.",
        f'name = "{profile.name}"',
        f'gpu = "{gpu}"',
        f"count = {number}",
        f'link = "{joined.name}"  # {joined.description}',
        "",
        "# In a run file, with several such nodes:",
        "#     [cluster]",
        '#     profile = "THIS FILE"',
        "#     nodes = 16",
        f'#     network = "{joining}"  # one card for each of the {len(profile.nics)} slots; cards_per_node says otherwise',
        "",
        f"# What the part says (hardware_profiles/parts/gpus/{part.name}.json holds the source of each number):",
        f"#   memory {part.memory_bytes.value / 2**30:.1f} GiB, {part.memory_bandwidth_bytes_per_s.value / 1e9:,.0f} GB/s;"
        f" {part.multiprocessors.value:.0f} multiprocessors",
        f"#   dense peaks in TFLOP/s: {peaks}",
        *([f"#   {', '.join(economics)}"] if economics else []),
        *_fits(part),
        f"#   link: {joined.lanes} lanes of {joined.bandwidth_bytes_per_s.value / 1e9:.4g} GB/s per GPU that large collectives"
        f" reach, spread {joined.relative_sigma.value:.0%}",
        "",
        "# Numbers of your own instead of the part's; they need a source. SI units: bytes, bytes/s, FLOP/s, watts.",
        "# [change]",
        f"# memory_bytes = {part.memory_bytes.value:.0f}",
        f"# memory_bandwidth_bytes_per_s = {part.memory_bandwidth_bytes_per_s.value:g}",
        f"# context_bytes = {part.context_bytes.value:.0f}  # taken by the framework before the first tensor",
        f"# peak_flop_per_s = {{ {first} = {peak.value:g} }}",
        '# source = "nvidia-smi on our nodes, 2026-11-20"',
    ]
    return "\n".join(lines) + "\n"


def _fits(part: GpuPart) -> list[str]:
    """One line per fit: what it is, on how many rows, and its error."""
    lines = []
    for fit in part.fits:
        rows = f"{fit.points:,} rows" if fit.points else f"no rows of its own, from {', '.join(fit.transferred_from[:4])}"
        what = f"{fit.kind} {fit.phase}" + (f" ({fit.variant})" if fit.variant else "")
        lines.append(f"#   {what}, {fit.precisions[0]}: {rows}; spread {fit.relative_sigma:.0%}")
    return lines


# A cluster of nodes with different GPUs: every node has GPUs of one kind, and all nodes have as many.
#
# Links inside nodes are those of one group for all: of the link that was asked for, else of the group with the slowest one. So
# collectives inside a node of faster links are priced too slow. The host's time per launch is that of the slowest host.


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """So many nodes of one GPU; gpus_per_node None: as many as the usual machine has."""

    gpu: str
    nodes: int = 1
    gpus_per_node: int | None = None


def mixed_cluster(
    groups: Sequence[NodeGroup],
    network: Network | None,
    *,
    devices: int | Sequence[int] | None = None,
    link: str | None = None,
    profile: Profile | None = None,
) -> Cluster:
    """The nodes of all groups, one after another.

    Args:
        groups: at least one. network: that joins all nodes. devices: as of `cluster_from_profile`. link: inside every node.
        profile: of a cluster of these groups, such as a run folder keeps; None: made of the parts.

    Raises:
        ProfileError: an unknown part, groups with different numbers of GPUs per node, or no network for several nodes.
    """
    gpus = [load_gpu(group.gpu) for group in groups]
    counts = [group.gpus_per_node or gpu.gpus_per_node for group, gpu in zip(groups, gpus, strict=True)]
    if len(set(counts)) > 1:
        listing = ", ".join(f"{group.gpu} {count}" for group, count in zip(groups, counts, strict=True))
        raise ProfileError(f"groups have different numbers of GPUs per node ({listing}); give all the same gpus_per_node")
    profiles = [profile_from_parts(gpu, counts[0], link) for gpu in gpus]
    links = [load_link(gpu.link) for gpu in gpus]
    rates = [joined.lanes * joined.bandwidth_bytes_per_s.value for joined in links]
    slowest = 0 if link is not None else rates.index(min(rates))
    inside = (
        f", links inside all nodes as of {groups[slowest].gpu}" if link is None and len({gpu.link for gpu in gpus}) > 1 else ""
    )
    parts = " + ".join(f"{group.nodes} x {counts[0]}x{gpu.name}" for group, gpu in zip(groups, gpus, strict=True))
    nodes = sum(group.nodes for group in groups)
    merged = profile or _merged(profiles[slowest], profiles, parts)
    cluster = cluster_from_profile(merged, devices, nodes=nodes, network=network)
    kinds = [cluster_from_profile(node).devices[0].type for node in profiles]
    types = [kind for kind, group in zip(kinds, groups, strict=True) for _ in range(group.nodes)]
    joined_by = "" if cluster.network is None else f" on {cluster.network.name}"
    mixed = tuple(replace(device, type=types[device.node]) for device in cluster.devices)
    return replace(cluster, name=f"{parts}{joined_by}{inside}", devices=mixed)


def _merged(base: Profile, profiles: Sequence[Profile], name: str) -> Profile:
    """One profile that knows the GPUs of all groups, with the links of one."""
    unlike = {next(iter(profile.device_types)): profile for profile in profiles}.values()
    hosts = [profile.host for profile in unlike if profile.host is not None]
    return base.model_copy(
        update={
            "name": name,
            "sources": {key: source for profile in unlike for key, source in profile.sources.items()},
            "device_types": {key: kind for profile in unlike for key, kind in profile.device_types.items()},
            "compute": ComputeRecords(
                operator_fits=[fit for profile in unlike for fit in profile.compute.operator_fits],
                efficiencies=[reached for profile in unlike for reached in profile.compute.efficiencies],
            ),
            "host": max(hosts, key=lambda host: host.launch_s, default=None),
        }
    )
