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

import importlib.resources
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from parsim.errors import ProfileError, near_matches
from parsim.files import parse_toml, read_text
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.network import Network, load_network
from parsim.hardware.parts import FORM, GpuPart, LinkPart, PartFit, load_gpu, load_link
from parsim.hardware.profile import (
    Communication,
    DeviceEntry,
    DeviceTypeEntry,
    HostOverhead,
    LinkEntry,
    LinkKindEntry,
    LinkModel,
    NicSlot,
    Noise,
    Profile,
    Provenance,
    Sourced,
    SourceEntry,
    parse_profile,
    shipped_profiles,
)
from parsim.hardware.records import ComputeRecords, Count, Efficiency, OperatorFit, Positive, ProfileRecord, problems_text

HOST, SOCKETS = "pcie", "smp"
CUBE: Mapping[tuple[int, int], int] = {
    **dict.fromkeys([(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)], 2),
    **dict.fromkeys([(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)], 1),
}
"""Lanes of the hybrid cube mesh (`nvidia-smi topo -m` of a DGX-1V)."""

DRIFT_SIGMA = 0.05
COMPOSED = "parts"


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
    sources = _sources(part, joined, host)
    own = joined if joined.form != "host" else host
    links, slots, kinds = _links(own, host, number)
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
                memory_bytes=_named(part.memory_bytes, part.name),
                memory_bandwidth_bytes_per_s=_named(part.memory_bandwidth_bytes_per_s, part.name),
                context_bytes=_named(part.context_bytes, part.name),
                peak_flop_per_s={name: _named(peak, part.name) for name, peak in part.peak_flop_per_s.items()},
            )
        },
        devices=[DeviceEntry(index=index, type=part.name) for index in range(number)],
        link_kinds=kinds,
        links=links,
        nics=slots,
        nics_source=COMPOSED,
        communication=Communication(backend="nccl", link_model=_link_model(own, host)),
        compute=ComputeRecords(
            operator_fits=[fit for entry in part.fits for fit in _operator_fits(part, entry)],
            efficiencies=[
                Efficiency(
                    precision=precision,
                    device_type=part.name,
                    factor=entry.factor,
                    spread=entry.spread,
                    points=entry.points,
                    source=_key(part.name, entry.source),
                )
                for entry in part.efficiencies
                for precision in entry.precisions
            ],
        ),
        noise=Noise(drift_sigma=DRIFT_SIGMA, source=COMPOSED),
        host=_host_of(part),
    )


def _host_of(part: GpuPart) -> HostOverhead | None:
    """What the host takes per launch, where the part knows it; nothing else of a host is known of parts."""
    if part.launch_s is None:
        return None
    return HostOverhead(task_s=0.0, step_s=0.0, launch_s=part.launch_s.value, source=_key(part.name, part.launch_s.source))


def load_profile(name_or_path: str) -> Profile:
    """A profile by shipped name, by path, or made of parts.

    Args:
        name_or_path: a name of `shipped_profiles`; the path of a JSON file, or of a TOML file that refers to parts; or a node
            of equal GPUs such as "8xh100-sxm", whose number counts the GPUs of the node, however many the usual one has.

    Raises:
        ProfileError: an unknown name (with near matches), or a broken file (with the path of the wrong key).
    """
    path = Path(name_or_path)
    if path.suffix == SUFFIX:
        return read_parts_file(path)
    if node := FORM.fullmatch(name_or_path):
        return profile_from_parts(node["gpu"], int(re.sub("[_,]", "", node["count"])), node["link"])
    if path.suffix == ".json" or os.sep in name_or_path:
        if not path.is_file():
            raise ProfileError(f"no profile file {path}; write one with `parsim calibrate --out {path}`")
        try:
            return _parsed(read_text(path), str(path))
        except (OSError, ValueError) as error:
            raise ProfileError(
                f"cannot read profile {path}: {error}; give a JSON file written by `parsim calibrate`"
            ) from error
    if name_or_path not in shipped_profiles():
        raise ProfileError(
            f"unknown profile {name_or_path!r}{near_matches(name_or_path, shipped_profiles())} (or GPUs by name, such as "
            "8xh100-sxm)"
        )
    text = importlib.resources.files("hardware_profiles").joinpath(f"{name_or_path}.json").read_text("utf-8")
    return _parsed(text, name_or_path)


@lru_cache(maxsize=8)
def _parsed(text: str, where: str) -> Profile:
    """A profile is immutable: one text is checked once in a process."""
    return parse_profile(text, where)


def _sources(part: GpuPart, joined: LinkPart, host: LinkPart) -> dict[str, SourceEntry]:
    """All sources of the parts, each under the part's name."""
    own = {
        COMPOSED: SourceEntry(
            kind="assumption",
            text="how the usual machine of these parts is put together, and 5% from run to run: assumed, not measured",
        )
    }
    for piece in (part, joined, host):
        own |= {_key(piece.name, key): entry for key, entry in piece.sources.items()}
    return own


def _key(part: str, source: str) -> str:
    return f"{part}:{source}"


def _named(number: Sourced, part: str) -> Sourced:
    return Sourced(value=number.value, source=_key(part, number.source))


def _links(own: LinkPart, host: LinkPart, number: int) -> tuple[list[LinkEntry], list[NicSlot], dict[str, LinkKindEntry]]:
    """The links of a node, the slots for its network cards, and the kinds of link."""
    if host.socket_bytes_per_s is None:
        raise ProfileError(f'{host.name} joins no host: a host_link has form = "host" and socket_bytes_per_s')
    kinds = {
        HOST: _kind(host, host.bandwidth_bytes_per_s),
        SOCKETS: _kind(host, host.socket_bytes_per_s),
    }
    if own.form != "host":
        kinds["nvlink"] = _kind(own, own.bandwidth_bytes_per_s)
    links = _direct_links(own, number)
    per_switch = 1 if own.form in ("switch", "mesh") else 2
    switches = -(-number // per_switch)
    links += [LinkEntry(a=f"gpu{gpu}", b=f"pcie{gpu // per_switch}", kind=HOST) for gpu in range(number)]
    sockets = 1 if per_switch == 1 else min(2, switches)
    links += [
        LinkEntry(a=f"pcie{switch}", b=f"socket{switch * sockets // switches}", kind=HOST, lanes=1)
        for switch in range(switches)
    ]
    if sockets == 2:
        links.append(LinkEntry(a="socket0", b="socket1", kind=SOCKETS))
    return links, [NicSlot(at=f"pcie{switch}", kind=HOST) for switch in range(switches)], kinds


def _kind(part: LinkPart, rate: Sourced) -> LinkKindEntry:
    return LinkKindEntry(bandwidth_bytes_per_s=_named(rate, part.name), latency_s=_named(part.latency_s, part.name))


def _direct_links(own: LinkPart, number: int) -> list[LinkEntry]:
    match own.form:
        case "switch":
            return [LinkEntry(a=f"gpu{gpu}", b="nvswitch0", kind="nvlink", lanes=own.lanes) for gpu in range(number)]
        case "mesh":
            each = max(1, own.lanes // max(1, own.largest - 1))
            return [
                LinkEntry(a=f"gpu{a}", b=f"gpu{b}", kind="nvlink", lanes=each)
                for a in range(number)
                for b in range(a + 1, number)
            ]
        case "pairs":
            return [
                LinkEntry(a=f"gpu{first}", b=f"gpu{first + 1}", kind="nvlink", lanes=own.lanes)
                for first in range(0, number - 1, 2)
            ]
        case "cube":
            return [
                LinkEntry(a=f"gpu{a}", b=f"gpu{b}", kind="nvlink", lanes=lanes)
                for (a, b), lanes in sorted(CUBE.items())
                if b < number
            ]
        case "host":
            return []


def _link_model(own: LinkPart, host: LinkPart) -> LinkModel:
    def protocols(part: LinkPart) -> list[object]:
        return [
            entry.model_copy(
                update={"source": _key(part.name, entry.source), "tuner_source": _key(part.name, entry.tuner_source)}
            )
            for entry in part.protocols
        ]

    return LinkModel.model_validate(
        {
            "link_kind": HOST if own.form == "host" else "nvlink",
            "protocols": protocols(own),
            "relay_protocols": protocols(host),
            "tuner_bandwidth_bytes_per_s": _named(own.bandwidth_bytes_per_s, own.name),
            "point_to_point_base_s": own.point_to_point_base_s.value,
            "relative_sigma": own.relative_sigma.value,
            "unmeasured_group_sigma": own.unmeasured_group_sigma.value,
            "measured_groups": [list(range(size)) for size in own.measured_sizes],
            "point_sources": [],
            "min_size_bytes": own.min_size_bytes,
            "max_size_bytes": own.max_size_bytes,
            "source": _key(own.name, own.relative_sigma.source),
        }
    )


def _operator_fits(part: GpuPart, entry: PartFit) -> list[OperatorFit]:
    """The fit with the chip's own numbers, once for each precision that the chip has a peak of."""
    return [
        OperatorFit(
            kind=entry.kind,
            phase=entry.phase,
            form=entry.form,
            variant=entry.variant,
            precision=precision,
            device_type=part.name,
            coefficients={
                **entry.coefficients,
                "multiprocessors": part.multiprocessors.value,
                "peak_flop_per_s": part.peak_flop_per_s[precision].value,
                "memory_bandwidth_bytes_per_s": part.memory_bandwidth_bytes_per_s.value,
            },
            relative_sigma=entry.relative_sigma,
            min_flop=entry.min_flop,
            max_flop=entry.max_flop,
            points=entry.points,
            held_out=entry.held_out,
            source=_key(part.name, entry.source),
        )
        for precision in entry.precisions
        if precision in part.peak_flop_per_s
    ]


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
        if self.source is None and (self.peak_flop_per_s or self.numbers):
            raise ValueError('change holds numbers without a source; add source = "where they come from"')
        return self

    @property
    def numbers(self) -> dict[str, float]:
        """The single numbers that are given, by key."""
        found = self.model_dump(exclude_none=True, exclude={"peak_flop_per_s", "source"})
        return {key: float(value) for key, value in found.items()}


class PartsFile(ProfileRecord):
    """The whole file; count and link: None for those of the usual machine."""

    name: Annotated[str, Field(min_length=1)]
    gpu: str
    count: Count | None = None
    link: str | None = None
    change: OwnNumbers = OwnNumbers()


def read_parts_file(path: Path) -> Profile:
    """The profile that a TOML file describes by its parts.

    Raises:
        ProfileError: no such file, not TOML, a wrong key (with its path), or an unknown part.
    """
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
        found = PartsFile.model_validate(document)
        part = _changed(load_gpu(found.gpu), found.change)
    except ValidationError as error:
        raise ProfileError(f"profile {path} is broken: {problems_text(error)}; fix these") from error
    profile = profile_from_parts(part, found.count, found.link)
    return profile.model_copy(update={"name": found.name})


def _changed(part: GpuPart, change: OwnNumbers) -> GpuPart:
    """The part with the file's own numbers, checked again."""
    if change.source is None:
        return part
    document: dict[str, Any] = part.model_dump()
    document["sources"][CHANGED] = SourceEntry(kind="datasheet", text=change.source).model_dump()
    for key, value in change.numbers.items():
        document[key] = Sourced(value=value, source=CHANGED).model_dump()
    for precision, value in change.peak_flop_per_s.items():
        document["peak_flop_per_s"][precision] = Sourced(value=value, source=CHANGED).model_dump()
    return GpuPart.model_validate(document)


def parts_file_text(gpu: str, count: int | None = None, link: str | None = None, network: str | None = None) -> str:
    """The text of a commented file of at most `MOST_LINES` lines, which loads as it is.

    Args:
        gpu, count, link: as `profile_from_parts` takes them. network: named in the example of a run file.

    Raises:
        ProfileError: an unknown part or network.
    """
    part = load_gpu(gpu)
    joined = load_link(link or part.link)
    number = count or part.gpus_per_node
    first, peak = next(iter(part.peak_flop_per_s.items()))
    profile = profile_from_parts(part, number, joined)
    joining = load_network(network).name if network else "infiniband-400g"
    peaks = ", ".join(f"{name} {number.value / 1e12:g}" for name, number in part.peak_flop_per_s.items())
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
        *_economics(part),
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


def _economics(part: GpuPart) -> list[str]:
    told = []
    if part.board_limit_w:
        told.append(f"board limit {part.board_limit_w.value:.0f} W")
    told += [
        f"{what} {number.value:.0f} W"
        for what, number in (("busy", part.busy_power_w), ("idle", part.idle_power_w))
        if number is not None
    ]
    if part.usd_per_hour:
        told.append(f"{part.usd_per_hour.value:g} USD per hour ({part.usd_per_hour.as_of})")
    return [f"#   {', '.join(told)}"] if told else []


def _fits(part: GpuPart) -> list[str]:
    """One line per fit: what it is, on how many rows, and its error on rows it had not seen."""
    lines = []
    for fit in part.fits:
        own = f"{fit.points:,} rows" if fit.points else f"no rows of its own, from {', '.join(fit.transferred_from[:4])}"
        what = f"{fit.kind} {fit.phase}" + (f" ({fit.variant})" if fit.variant else "")
        lines.append(f"#   {what}, {fit.precisions[0]}: {own}; spread {fit.relative_sigma:.0%}")
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
    counts = [group.gpus_per_node or load_gpu(group.gpu).gpus_per_node for group in groups]
    if len(set(counts)) > 1:
        told = ", ".join(f"{group.gpu} {count}" for group, count in zip(groups, counts, strict=True))
        raise ProfileError(f"groups have different numbers of GPUs per node ({told}); give all the same gpus_per_node")
    made_of = [profile_from_parts(group.gpu, count, link) for group, count in zip(groups, counts, strict=True)]
    slowest = min(range(len(groups)), key=lambda number: _rate(groups[number].gpu))
    base = made_of[slowest if link is None else 0]
    nodes = sum(group.nodes for group in groups)
    inside = (
        ""
        if link is not None or len({load_gpu(group.gpu).link for group in groups}) == 1
        else (f", links inside all nodes as of {groups[slowest].gpu}")
    )
    parts = " + ".join(
        f"{group.nodes} x {count}x{load_gpu(group.gpu).name}" for group, count in zip(groups, counts, strict=True)
    )
    made = cluster_from_profile(profile or _merged(base, made_of, parts), devices, nodes=nodes, network=network)
    kinds = [
        cluster_from_profile(own).devices[0].type
        for own, group in zip(made_of, groups, strict=True)
        for _ in range(group.nodes)
    ]
    joined = "" if made.network is None else f" on {made.network.name}"
    mixed = tuple(replace(device, type=kinds[device.node]) for device in made.devices)
    return replace(made, name=f"{parts}{joined}{inside}", devices=mixed)


def _rate(gpu: str) -> float:
    """Bytes per second that a GPU's links to its node carry."""
    link = load_link(load_gpu(gpu).link)
    return link.lanes * link.bandwidth_bytes_per_s.value


def _merged(base: Profile, profiles: Sequence[Profile], name: str) -> Profile:
    """One profile that knows the GPUs of all groups, with the links of one."""
    unlike = {next(iter(profile.device_types)): profile for profile in profiles}.values()
    hosts = [profile.host for profile in unlike if profile.host is not None]
    compute = ComputeRecords(
        operator_fits=[fit for profile in unlike for fit in profile.compute.operator_fits],
        efficiencies=[entry for profile in unlike for entry in profile.compute.efficiencies],
    )
    return base.model_copy(
        update={
            "name": name,
            "sources": {key: entry for profile in unlike for key, entry in profile.sources.items()},
            "device_types": {key: entry for profile in unlike for key, entry in profile.device_types.items()},
            "compute": compute,
            "host": max(hosts, key=lambda host: host.launch_s or 0.0) if hosts else None,
        }
    )
