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
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from parsim.errors import ProfileError
from parsim.hardware.compute_records import ComputeRecords, Efficiency, OperatorFit
from parsim.hardware.parts.load import load_gpu, load_link
from parsim.hardware.parts.records import GpuPart, LinkPart, PartFit
from parsim.hardware.parts.shorthand import FORM
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
)

MOST_GPUS_PER_NODE = 256

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


def node_of_parts(text: str) -> Profile:
    """One node by its shorthand: "8xh100-sxm". The number counts the GPUs of the node, however many the usual one has.

    Raises:
        ProfileError: as `profile_from_parts`, or another form.
    """
    found = FORM.fullmatch(text)
    if found is None:
        raise ProfileError(f"{text!r} names no GPUs: write COUNTxGPU, for example 8xh100-sxm")
    return profile_from_parts(found["gpu"], int(re.sub("[_,]", "", found["count"])), found["link"])


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
