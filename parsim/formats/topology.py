"""How the GPUs and network cards of a machine hang together: `nvidia-smi topo -m`, rocm-smi, amd-smi, `lstopo --of xml`.

The readers return a MachineTree, which says what joins what. How fast a lane is stays what the profile says, since no tool
knows.

The matrix of nvidia-smi: NV4 are four NVLinks. Where none joins them, an entry says how far apart two devices are: PIX (one
PCIe switch), PXB (several), PHB (the host bridge of a CPU), NODE (host bridges of one NUMA node), SYS (the link between
sockets). Between GPUs joined by NVLink the entry hides the tree: network cards and the column of NUMA nodes or CPUs fill it in.
With `-mp` the matrix and its legend are without NVLink. Where GPUs hang on their CPU by NVLink-C2C, all cards say SYS.
Leaves out: which of several PCIe switches between two devices (PXB) is whose; they count as one.

The tables of rocm-smi and amd-smi, and their JSON: types of links ("XGMI", "PCIE") and hops between two GPUs, and, in rocm-smi,
the NUMA node of each. XGMI in one hop is one lane. They show neither network cards nor PCIe switches.

The XML of hwloc 1 and 2: the tree of packages, bridges and PCI devices. A GPU is a PCI device with an OS device of CUDA, NVML
or ROCm below it. Where no driver listed any, it is a display or 3D controller of NVIDIA or AMD. A network card has an
OpenFabrics device. Devices behind one port of a host bridge share a switch. Those below one package (or NUMA node, where there
is no package) share a socket. With NVML, hwloc 2.5 and later list the NVLinks as a matrix "NVLinkBandwidth", in MB/s per
direction, between GPUs, switches and, on POWER, CPUs; what goes to CPUs is left out. Lanes follow from the speed of a lane.
Files without the matrix do not show lanes: those of the profile stay. Leaves out: speeds of PCIe links; switches in a row
count as one, the highest.

Source: open-mpi.org/projects/hwloc, documentation 2.x: "Importing and exporting topologies from/to XML files", "Distances".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from math import inf
from xml.parsers import expat

from parsim.costs.communication.contention import ports_of
from parsim.errors import ImportedFileError, ParsimError
from parsim.formats.imports import MachineReading, MachineUpdate
from parsim.formats.source import FileFormat, SourceFile, listed, shown
from parsim.hardware.cluster import NodeShape, Port, cluster_from_profile, node_links
from parsim.hardware.compose import load_profile
from parsim.hardware.devices import device_name
from parsim.hardware.parts import ALIASES, load_gpu, load_link, shipped_gpus, shipped_links
from parsim.hardware.profile import LinkEntry, NicSlot, Profile, SourceEntry
from parsim.hardware.topology import SOCKETS, Link, Topology

DIRECT, HOST = "nvlink", "pcie"
SWITCH = "nvswitch"
MOST_DEVICES = 512
"""GPUs and cards of one machine at most."""
MOST_SOCKETS = 2
"""Sockets of a usual machine: cards that would need more of them are not on sockets of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTree:
    """Attributes:
    lanes: direct lanes between GPUs i < j, also of pairs that a switch joins. hidden: why the tool shows none ("": it does).
    switch: per GPU the number of its PCIe switch. socket: per PCIe switch the number of its socket.
    cards: names of network cards, each with the end it is plugged into ("pcie0", "socket1"); empty: the tool lists none.
    names: of the GPUs, where the tool tells. notes: what was assumed.
    """

    lanes: Mapping[tuple[int, int], int]
    hidden: str = ""
    switch: tuple[int, ...]
    socket: tuple[int, ...]
    cards: tuple[tuple[str, str], ...]
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        return len(self.switch)

    def direct_links(self, most: int) -> list[LinkEntry]:
        """NVLinks, lane by lane, of GPUs that have `most` lanes each.

        Raises: ImportedFileError: a GPU would have more lanes, and no switch explains them.
        """
        links: list[LinkEntry] = []
        switches = 0
        joined = classes(self.gpus, list(self.lanes))
        for number in dict.fromkeys(joined):
            members = [gpu for gpu in range(self.gpus) if joined[gpu] == number]
            rows = {a: [self._between(a, b) for b in members if b != a] for a in members}
            if all(sum(row) <= most for row in rows.values()):
                pairs = [(a, b) for place, a in enumerate(members) for b in members[place + 1 :]]
                links += [
                    LinkEntry(a=f"gpu{a}", b=f"gpu{b}", kind=DIRECT, lanes=self._between(a, b))
                    for a, b in pairs
                    if self._between(a, b)
                ]
                continue
            each = {gpu: max(row) for gpu, row in rows.items()}
            busiest = max(members, key=lambda gpu: sum(rows[gpu]))
            if each[busiest] > most:
                raise ImportedFileError(
                    f"the file shows {each[busiest]} lanes of NVLink at GPU {busiest}, and a GPU of this profile has {most}; "
                    "take the profile of the machine that the file is of"
                )
            for a in members:
                for b in members:
                    if a != b and self._between(a, b) != min(each[a], each[b]):
                        raise ImportedFileError(
                            f"GPU {busiest} shows {sum(rows[busiest])} lanes of NVLink in all, and a GPU of this profile has "
                            f"{most}. Lanes to a switch would show at every pair, but GPUs {a} and {b} show "
                            f"{self._between(a, b)}; write the file again, or take the profile of its machine"
                        )
            links += [LinkEntry(a=f"gpu{gpu}", b=f"{SWITCH}{switches}", kind=DIRECT, lanes=each[gpu]) for gpu in members]
            switches += 1
        return links

    def _between(self, a: int, b: int) -> int:
        return self.lanes.get((min(a, b), max(a, b)), 0)

    def host_links(self) -> list[LinkEntry]:
        """The PCIe tree and the links between sockets."""
        links = [LinkEntry(a=f"gpu{gpu}", b=f"pcie{switch}", kind=HOST) for gpu, switch in enumerate(self.switch)]
        links += [LinkEntry(a=f"pcie{switch}", b=f"socket{socket}", kind=HOST) for switch, socket in enumerate(self.socket)]
        sockets = sorted({*self.socket, *(int(end[6:]) for _, end in self.cards if end.startswith("socket"))})
        links += [LinkEntry(a=f"socket{a}", b=f"socket{b}", kind=SOCKETS) for a, b in combinations(sockets, 2)]
        return links


def with_links(profile: Profile, tree: MachineTree, digest: str, what: str) -> Profile:
    """The profile with the links and card slots of a tree.

    Groups that the link model was measured on keep that standing only if the direct links stay what they were.

    Args: profile: of the same GPUs. tree: what joins them. digest: of the file. what: tool and file, for the source.
    Raises: ImportedFileError: another number of GPUs, more lanes than a GPU has, or links whose speed the profile does not
        tell.
    """
    names = [device_name(entry.index, profile.device_types[entry.type].kind) for entry in profile.devices]
    part = profile.devices[0].type if profile.devices[0].type in shipped_gpus() else None
    if names != [f"gpu{number}" for number in range(tree.gpus)]:
        raise ImportedFileError(
            f"the file shows {tree.gpus} GPUs, and profile {profile.name} has {len(names)} devices ({names[0]}, ...); import "
            f"into a profile of {tree.gpus} GPUs: --on {tree.gpus}x{part or 'GPU'}"
        )
    old_direct = [link for link in profile.links if link.kind == DIRECT]
    model = profile.communication.link_model
    if not tree.hidden and bool(tree.lanes) != bool(old_direct) and (tree.lanes or (model and model.link_kind == DIRECT)):
        shows = f"{max(tree.lanes.values())} lanes of NVLink between two GPUs" if tree.lanes else "no NVLink"
        prices = "has no NVLink and does not say how fast it is" if tree.lanes else "prices collectives by NVLink"
        fit = " or ".join(f"--on {name}" for name in machines_that_fit(tree, part)) or "a profile of that machine"
        raise ImportedFileError(f"the file shows {shows}, and profile {profile.name} {prices}; start from {fit}")
    direct = old_direct if tree.hidden or not tree.lanes else tree.direct_links(lanes_of_a_gpu(profile))
    links = [*direct, *tree.host_links()]
    if lost := sorted({link.kind for link in links} - set(profile.link_kinds)):
        raise ImportedFileError(
            f"the file shows links of kind {lost[0]!r}, and profile {profile.name} does not say how fast they are (it knows "
            f"{', '.join(sorted(profile.link_kinds))}); start from a machine that has them: --on {tree.gpus}xGPU"
        )
    communication = profile.communication
    before, after = ({(frozenset((link.a, link.b)), link.lanes) for link in links} for links in (old_direct, direct))
    if model is not None and before != after:
        communication = communication.model_copy(update={"link_model": model.model_copy(update={"measured_groups": []})})
    key = f"topology-{digest}"
    made = profile.model_copy(
        update={
            "links": links,
            "nics": [NicSlot(at=end, kind=HOST) for _, end in tree.cards] or _slots_kept(profile, tree),
            "nics_source": key if tree.cards else profile.nics_source,
            "communication": communication,
            "sources": {**profile.sources, key: SourceEntry(kind="measurement", text=what)},
        }
    )
    cluster_from_profile(made)  # connected, or it says what is missing
    return made.model_copy(update={"nics": _slots_in_use(made)})


ROCM, INFINITY_FABRIC = "rocm-smi or amd-smi", "infinity-fabric"


def lanes_of_a_gpu(profile: Profile) -> int:
    """NVLinks of one GPU of the machine: of its link part, and of the profile where that lists more."""
    count: dict[str, int] = {}
    for link in profile.links:
        for end in (link.a, link.b) if link.kind == DIRECT else ():
            count[end] = count.get(end, 0) + link.lanes
    part = load_gpu(kind) if (kind := profile.devices[0].type) in shipped_gpus() else None
    usual = load_link(part.link) if part is not None else None
    return max([count.get(f"gpu{number}", 0) for number in range(len(profile.devices))] + [usual.lanes if usual else 0])


def machines_that_fit(tree: MachineTree, gpu: str | None = None, *, amd: bool = False) -> list[str]:
    """Machines in the form of --on that have such links: of a shipped GPU, or of the usual one that does; () where hidden.

    amd: of AMD's GPUs, or of none of them.
    """
    found: list[str] = []
    every = dict.fromkeys([*ALIASES["gpus"].values(), *shipped_gpus()])
    usual = [part for part in every if load_gpu(part).link.startswith(INFINITY_FABRIC) == amd]
    for part in [] if tree.hidden else [gpu] if gpu is not None else usual:
        own = load_link(load_gpu(part).link).form
        form = "host" if not tree.lanes else "pairs" if own == "host" else None
        others = [link for link in shipped_links() if load_link(link).form == form] if gpu or own == "host" else []
        for name in [part, *(f"{part}@{link}" for link in others)]:
            try:
                profile = load_profile(f"{tree.gpus}x{name}")
                direct = tree.direct_links(lanes_of_a_gpu(profile)) if tree.lanes else []
            except ParsimError:
                continue  # no such machine
            shipped = [(link.a, link.b, link.lanes) for link in profile.links if link.kind == DIRECT]
            if shipped == [(link.a, link.b, link.lanes) for link in direct]:
                found.append(f"{tree.gpus}x{name}")
        if found:
            break
    return found[:2]


def _slots_kept(profile: Profile, tree: MachineTree) -> list[NicSlot]:
    """The card slots of the profile, each at the switch of the GPU that was nearest."""
    before = Topology(node_links(profile))
    slots = []
    for slot in profile.nics:
        far = [len(before.path(f"gpu{gpu}", slot.at)) or inf for gpu in range(tree.gpus)]
        slots.append(slot.model_copy(update={"at": f"pcie{tree.switch[far.index(min(far))]}"}))
    return slots


def _slots_in_use(profile: Profile) -> list[NicSlot]:
    """The slots whose card some GPU sends by; farther ones hold cards for storage and management."""
    ports = tuple(Port(nic=f"nic{number}", bandwidth_bytes_per_s=1.0, latency_s=0.0) for number in range(len(profile.nics)))
    joins = (
        Link(a=slot.at, b=port.nic, kind=slot.kind, lanes=1, bandwidth_bytes_per_s=1.0, latency_s=0.0)
        for slot, port in zip(profile.nics, ports, strict=True)
    )
    gpus = tuple(f"gpu{number}" for number in range(len(profile.devices)))
    shape = NodeShape(gpus, Topology((*node_links(profile), *joins)), ports)
    used = {port for gpu in range(len(gpus)) for port in ports_of(shape, gpu)} if ports else set()
    return [slot for slot, port in zip(profile.nics, ports, strict=True) if port in used]


def _reading(read: Callable[[SourceFile], MachineTree], tool: str, source: SourceFile) -> MachineReading:
    """What a file says of a machine, before the profile is known that it changes."""
    tree = read(source)
    text = f"{tool}, file {shown(source.path.name)}"
    return MachineReading(
        devices=tree.gpus,
        whole=True,
        names=tree.names,
        notes=(*tree.notes, *([f"{tree.hidden}: NVLinks stay as the profile has them"] if tree.hidden else [])),
        fitting=partial(machines_that_fit, tree, amd=tool == ROCM),
        change=partial(_changed, tree=tree, digest=source.digest, text=text),
    )


def _changed(profile: Profile, *, tree: MachineTree, digest: str, text: str) -> MachineUpdate[Profile]:
    made = with_links(profile, tree, digest, text)
    old, new = ([link for link in one.links if link.kind == DIRECT] for one in (profile, made))
    to_switch = [link.lanes for link in new if link.b.startswith(SWITCH)]
    if tree.hidden:
        direct = "not shown by the tool; kept"
    elif to_switch and len(set(to_switch)) == 1 and len(to_switch) == len(new):
        direct = (
            f"{to_switch[0]} lanes of each GPU to a switch"
            if len(new) == tree.gpus
            else (f"{to_switch[0]} lanes of {len(new)} GPUs to a switch")
        )
    else:
        direct = f"{sum(link.lanes for link in new)} lanes in {len(new)} links"
    warnings: list[str] = []
    before, now = (sum(link.lanes for link in links) for links in (old, new))
    if before != now:
        warnings.append(
            f"{profile.name} had {before} lanes of NVLink in all, and the file shows {now}: prices of collectives change"
        )
    linked = {end for link in new for end in (link.a, link.b)}
    if new and (alone := [f"GPU {number}" for number in range(tree.gpus) if f"gpu{number}" not in linked]):
        warnings.append(f"{listed(alone)} has no NVLink: groups with it go over PCIe")
    if unused := len(tree.cards) - len(made.nics) if tree.cards else 0:
        warnings.append(f"{unused} network cards are farther from every GPU than others, as those for storage are: left out")
    sockets = set(tree.socket)
    return MachineUpdate(
        made=made,
        summary=(
            f"{tree.gpus} GPUs, NVLink: {direct}; {len(tree.socket)} PCIe switches on {len(sockets)} socket(s), "
            f"{len(tree.cards) or 'no'} network cards{'' if tree.cards else ' shown'}. Bandwidths stay those of {profile.name}"
        ),
        document={
            "gpus": tree.gpus,
            "direct": direct,
            "pcie_switches": len(tree.socket),
            "sockets": len(sockets),
            "cards": [f"{name} at {end}" for name, end in tree.cards],
        },
        warnings=tuple(warnings),
    )


def _tree(
    gpus: Sequence[tuple[int, int]],
    cards: Sequence[tuple[str, int, int]],
    lanes: Mapping[tuple[int, int], int],
    *,
    hidden: str = "",
    coherent: bool = False,
    names: tuple[str, ...] = (),
) -> MachineTree:
    """A tree of what hangs together, whatever a tool calls it.

    Args: gpus: the switch and the socket of each, as any numbers. cards: name, switch and socket. lanes, hidden, names: as of
        MachineTree. coherent: GPUs hang on their CPU by NVLink-C2C.
    """
    switches = list(dict.fromkeys(switch for switch, _ in gpus))
    sockets = list(dict.fromkeys(socket for _, socket in gpus))
    socket_of = dict(reversed(gpus))
    switch_of_gpu = tuple(switches.index(switch) for switch, _ in gpus)
    notes: list[str] = []
    ends: list[tuple[str, str]] = []
    far = {socket for _, switch, socket in cards if switch not in socket_of and socket not in sockets}
    if far and all(socket in far for _, _, socket in cards) and (coherent or len(far) + len(sockets) > MOST_SOCKETS):
        ends = [(name, f"pcie{switch_of_gpu[place * len(gpus) // len(cards)]}") for place, (name, _, _) in enumerate(cards)]
        notes.append(
            f"the file shows all {len(cards)} network cards as far from every GPU, as where GPUs hang on their CPU by "
            "NVLink-C2C: assumed to be divided evenly among the GPUs"
        )
        cards = ()
    for name, switch, socket in cards:
        if switch in socket_of:
            ends.append((name, f"pcie{switches.index(switch)}"))
            continue
        if socket not in sockets:
            sockets.append(socket)  # a socket without a GPU
        ends.append((name, f"socket{sockets.index(socket)}"))
    return MachineTree(
        lanes=lanes,
        hidden=hidden,
        switch=switch_of_gpu,
        socket=tuple(sockets.index(socket_of[switch]) for switch in switches),
        cards=tuple(ends),
        names=names,
        notes=tuple(notes),
    )


def classes(count: int, joined: list[tuple[int, int]]) -> tuple[int, ...]:
    """Per member the number of its class, in order of first appearance; `joined` pairs are of one class."""
    parent = list(range(count))

    def root(member: int) -> int:
        while parent[member] != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    for a, b in joined:
        parent[max(root(a), root(b))] = min(root(a), root(b))
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(root(member), len(numbers)) for member in range(count))


ANSI = re.compile(r"\x1b\[[0-9;]{0,16}m")
GPU = re.compile(r"GPU(\d{1,3})")
AFFINITY = re.compile(r"(?:CPU|NUMA|GPU NUMA) (?:Affinity|ID)")
"""Where the devices of the header end."""
ENTRY = re.compile(r"X|NV\d{1,3}|PIX|PXB|PSB|PHB|NODE|SOC|SYS|N/A")
NAMED = re.compile(r"^\s*(NIC\d{1,3}):\s*(\S{1,64})\s*$")
EXPLAINED = re.compile(r"\s*NV#\s*=")
"""The line of the legend that `topo -m` has and `topo -mp` has not."""
SAME_SWITCH = ("PIX", "PXB", "PSB")
SAME_SOCKET = (*SAME_SWITCH, "PHB", "NODE")
EXPECTED_MATRIX = "the whole output of `nvidia-smi topo -m`, from the line that lists GPU0 GPU1 ..."


PEER = frozenset(("X", "OK", "CNS", "GNS", "TNS", "NS", "DR", "U"))
"""Entries of the matrix of `nvidia-smi topo -p2p`."""


def is_topo_matrix(text: str) -> bool:
    """Whether a text looks like the matrix."""
    return bool(re.search(r"^[ \t]*GPU0\s+X\b", ANSI.sub("", text[:200_000]), re.MULTILINE))


def read_topo_matrix(source: SourceFile) -> MachineTree:
    """Read the matrix.

    Raises: ImportedFileError: no matrix, a row that is missing or cut, entries that contradict one another or are unknown.
    """
    lines = [ANSI.sub("", line) for line in source.text.splitlines()]
    head = next((number for number, line in enumerate(lines) if line.split()[:1] == ["GPU0"] and "X" not in line.split()), None)
    if head is None:
        raise ImportedFileError(f"{source.path} shows no matrix of GPUs; expected {EXPECTED_MATRIX}")
    columns = [shown(word) for word in AFFINITY.split(lines[head])[0].split()]
    if len(columns) > MOST_DEVICES or len(set(columns)) < len(columns):
        raise ImportedFileError(
            f"{source.path} lists {len(columns)} devices, some twice or too many; expected {EXPECTED_MATRIX}"
        )
    rows: dict[str, list[str]] = {}
    rest: dict[str, list[str]] = {}
    for line in lines[head + 1 :]:
        words = line.split()
        if words and words[0] in columns and words[0] not in rows:
            entries = words[1 : 1 + len(columns)]
            if len(entries) < len(columns):
                raise ImportedFileError(
                    f"{source.path}: the row of {words[0]} has {len(entries)} entries for {len(columns)} devices"
                )
            if PEER.issuperset(entries):
                raise ImportedFileError(
                    f"{source.path} is of `nvidia-smi topo -p2p`, which says where copies work and not over what links; "
                    "write `nvidia-smi topo -m` into a file and give that"
                )
            if wrong := [entry for entry in entries if not ENTRY.fullmatch(entry)]:
                raise ImportedFileError(
                    f"{source.path}: {shown(wrong[0])!r} in the row of {words[0]} is not an entry of this matrix"
                )
            rows[words[0]], rest[words[0]] = entries, words[1 + len(columns) :]
    gpus = [name for name in columns if GPU.fullmatch(name)]
    cards = [name for name in columns if name not in gpus]
    if lost := [name for name in gpus if name not in rows]:
        raise ImportedFileError(f"{source.path} has no row of {listed(lost)}; expected {EXPECTED_MATRIX}")
    if gpus != [f"GPU{number}" for number in range(len(gpus))]:
        raise ImportedFileError(
            f"{source.path} lists {listed(gpus)}, not GPU0 to GPU{len(gpus) - 1}; show all GPUs of the machine"
        )
    place = {name: number for number, name in enumerate(columns)}
    near = {(a, b): rows[a][place[b]] for a in rows for b in columns if a != b}
    for (a, b), entry in near.items():
        if near.get((b, a), entry) != entry:
            raise ImportedFileError(
                f"{source.path}: {a} to {b} is {entry}, but {b} to {a} is {near[b, a]}; the matrix must be symmetric"
            )
    names = {named[1]: shown(named[2]) for line in lines if (named := NAMED.match(line))}
    # CPUs and NUMA nodes stand behind the matrix: equal for GPUs of one socket, "" where there is nothing.
    affinity = [" ".join(word for word in rest[name][:2] if word != "N/A") for name in gpus]
    # A GPU whose memory is a NUMA node of its own hangs on its CPU by NVLink-C2C.
    coherent = "GPU NUMA ID" in lines[head] and any(rest[name] and rest[name][-1].isdigit() for name in gpus)
    explained = any(EXPLAINED.match(line) for line in lines)
    return _tree_of_matrix(gpus, cards, near, affinity, names, coherent=coherent, explained=explained, where=str(source.path))


def _tree_of_matrix(
    gpus: list[str],
    cards: list[str],
    near: dict[tuple[str, str], str],
    affinity: list[str],
    names: dict[str, str],
    *,
    coherent: bool,
    explained: bool,
    where: str,
) -> MachineTree:
    number = {name: place for place, name in enumerate([*gpus, *cards])}

    def joined(entries: tuple[str, ...]) -> list[tuple[int, int]]:
        return [(number[a], number[b]) for (a, b), entry in near.items() if entry in entries and a in number and b in number]

    switches = classes(len(number), joined(SAME_SWITCH))
    _refuse_contradictions(near, switches, number, SAME_SWITCH, "under one PCIe switch", where)
    _refuse_contradictions(near, classes(len(number), joined(SAME_SOCKET)), number, SAME_SOCKET, "on one socket", where)
    alike = [(a, b) for a in range(len(gpus)) for b in range(a) if affinity[a] and affinity[a] == affinity[b]]
    sockets = classes(len(number), [*joined(SAME_SOCKET), *alike])
    lanes = {
        (number[a], number[b]): int(entry[2:])
        for (a, b), entry in near.items()
        if entry.startswith("NV") and a in gpus and b in gpus and number[a] < number[b] and int(entry[2:]) > 0
    }
    places = list(zip(switches, sockets, strict=True))
    hidden = (
        "" if lanes or explained else "the file shows no NVLink and does not explain NV#, as `nvidia-smi topo -mp` hides it"
    )
    placed = [(names.get(card, card), *places[number[card]]) for card in cards]
    return _tree(places[: len(gpus)], placed, lanes, hidden=hidden, coherent=coherent)


def _refuse_contradictions(
    near: Mapping[tuple[str, str], str],
    joined: tuple[int, ...],
    number: Mapping[str, int],
    entries: tuple[str, ...],
    where_they_are: str,
    path: str,
) -> None:
    """Refuse two devices that a third shows to be together, and whose own entry says that they are not."""
    for (a, b), entry in near.items():
        if joined[number[a]] == joined[number[b]] and entry not in entries and not entry.startswith("NV") and entry != "N/A":
            raise ImportedFileError(
                f"{path}: {a} and {b} are {where_they_are} by what other entries say, but their own is {entry}; write the file "
                "again on the machine"
            )


ROCM_TITLE = re.compile(r"=+ *(.*?) *=+")
ROCM_ROW = re.compile(r"GPU(\d{1,3})\s+(\S.*)")
ROCM_NUMA = re.compile(r"GPU\[(\d{1,3})\]\s*:\s*\(Topology\) Numa Node:\s*(\d{1,4})")
AMD_TITLE = re.compile(r"([A-Z][A-Z -]+) TABLE:")
AMD_ROW = re.compile(r"([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d)\s+(.*)")
ROCM_PAIR = re.compile(r"\(Topology\) (Link type|Hops) between DRM devices (\d{1,3}) and (\d{1,3})")
LINK_TYPES, HOPS = "Link Type between two GPUs", "Hops between two GPUs"
TITLES = {"LINK TYPE": LINK_TYPES, "HOPS": HOPS}
"""Tables of amd-smi, by the names that rocm-smi has for them."""
EXPECTED_ROCM = "the whole output of `rocm-smi --showtopo` or of `amd-smi topology`, as text or --json"
Pairs = dict[tuple[int, int], str]


def is_rocm_topology(source: SourceFile) -> bool:
    """Whether a file looks like the tables of rocm-smi or amd-smi, or like their JSON."""
    text = source.head
    if source.begins("[", "{"):
        return (
            bool(re.search(r'"link_type"\s*:\s*("|\{)|\(Topology\) Link type between DRM', text))
            and "schemaVersion" not in text
        )
    return any(title in text for title in (LINK_TYPES, HOPS, "Weight between two GPUs", "LINK TYPE TABLE:"))


def read_rocm_topology(source: SourceFile) -> MachineTree:
    """Read what rocm-smi or amd-smi says of the links between GPUs.

    Raises: ImportedFileError: a table is missing, cut or not square, or its types of links are unknown.
    """
    nodes: dict[int, int] = {}
    tables = _amd_document(source) if source.begins("[", "{") else _amd_tables(source.text, nodes)
    types, hops = tables.get(LINK_TYPES, {}), tables.get(HOPS, {})
    size = max((max(pair) for pair in types), default=-1) + 1
    square = all((a, b) in types for a in range(size) for b in range(size) if a != b)
    if not 0 < size <= MOST_DEVICES or not square:
        raise ImportedFileError(
            f"{source.path}: the table of link types is missing, cut or not square; expected {EXPECTED_ROCM}"
        )
    lanes: dict[tuple[int, int], int] = {}
    for a, b in combinations(range(size), 2):
        kind = types[a, b].upper()
        if kind != types[b, a].upper() or kind not in ("XGMI", "PCIE"):
            raise ImportedFileError(
                f"{source.path}: GPU{a} to GPU{b} is {shown(types[a, b])}, and GPU{b} to GPU{a} {shown(types[b, a])}; both "
                "are XGMI or both PCIE"
            )
        if kind == "XGMI" and hops.get((a, b), "1") == "1":
            lanes[a, b] = 1
    if nodes:
        return _tree([(gpu, nodes.get(gpu, 0)) for gpu in range(size)], [], lanes)
    tree = _tree([(gpu, gpu * MOST_SOCKETS // size) for gpu in range(size)], [], lanes)
    return replace(tree, notes=("the file does not say which GPUs share a socket: taken as the first and the second half",))


def _amd_tables(text: str, nodes: dict[int, int]) -> dict[str, Pairs]:
    """The entries of the tables of a text by title and pair; of addresses the n-th row is GPU n."""
    tables: dict[str, Pairs] = {}
    places: dict[str, int] = {}
    title = ""
    for line in (ANSI.sub("", line).strip() for line in text.splitlines()):
        row: tuple[int, str] | None = None
        if heading := ROCM_TITLE.fullmatch(line):
            title = heading[1]
        elif heading := AMD_TITLE.fullmatch(line):
            title, places = TITLES.get(heading[1], heading[1]), {}
        elif numa := ROCM_NUMA.match(line):
            nodes[int(numa[1])] = int(numa[2])
        elif (form := ROCM_ROW.match(line)) and not form[2].startswith("GPU"):
            row = int(form[1]), form[2]
        elif (form := AMD_ROW.match(line)) and not AMD_ROW.match(form[2] + " "):
            row = places.setdefault(form[1], len(places)), form[2]
        if row is not None:
            pairs = {(row[0], column): entry for column, entry in enumerate(row[1].split()) if column != row[0]}
            tables.setdefault(title, {}).update(pairs)
    return tables


def _amd_document(source: SourceFile) -> dict[str, Pairs]:
    """The entries of a JSON: of amd-smi since 2024 a list of links for each GPU, before that tables; of rocm-smi sentences."""
    document = source.json("a topology of amd-smi")
    tables: dict[str, Pairs] = {LINK_TYPES: {}, HOPS: {}}
    if isinstance(document, dict):
        sentences = document.get("system", document)
        for key, value in sentences.items() if isinstance(sentences, dict) else ():
            if form := ROCM_PAIR.fullmatch(str(key)):
                a, b = int(form[2]), int(form[3])
                table = tables[LINK_TYPES if form[1] == "Link type" else HOPS]
                table[a, b] = table[b, a] = str(value)
        return tables
    for gpu in document if isinstance(document, list) else ():
        if not isinstance(gpu, dict) or not isinstance(gpu.get("gpu"), int):
            raise ImportedFileError(f"{source.path} lists no GPUs with their links; expected {EXPECTED_ROCM}")
        own = int(gpu["gpu"])
        for link in gpu.get("links") or ():
            if isinstance(link, dict) and isinstance(link.get("gpu"), int) and link["gpu"] != own:
                tables[LINK_TYPES][own, link["gpu"]] = str(link.get("link_type", ""))
                if isinstance(link.get("num_hops"), int):
                    tables[HOPS][own, link["gpu"]] = str(link["num_hops"])
        for title, key in ((LINK_TYPES, "link_type"), (HOPS, "hops")):
            older = gpu.get(key)
            for name, value in older.items() if isinstance(older, dict) else ():
                if (place := re.fullmatch(r"gpu_(\d{1,3})", str(name))) and int(place[1]) != own:
                    tables[title][own, int(place[1])] = str(value)
    return tables


EXPECTED_XML = "the output of `lstopo --of xml` (`lstopo topology.xml`) on a machine with its GPUs"
DRIVERS = ("nvml", "cuda", "rsmi")
"""Names of OS devices whose numbers order the GPUs, as their tools do."""
GPU_OS_DEVICES = re.compile(r"(nvml|cuda|rsmi)([0-9]{1,4})")
CARD_OS_DEVICES = re.compile(
    r"mlx\d{1,2}_\d{1,3}|hfi\d_\d|hsi\d|bnxt_re\d{1,3}|ib\d{1,3}|rdmap\d{1,3}s\d{1,3}|efa_\d{1,3}", re.ASCII
)
GPU_VENDORS = ("10de", "1002")
GPU_CLASSES = ("0300", "0302", "0380", "1200")
CPU_KINDS = ("Package", "Socket", "NUMANode", "Group", "Machine", "Core", "PU")
"""Ends of NVLinks that are CPUs, as on POWER."""
MOST_OBJECTS = 200_000
MOST_DEPTH = 200
LANE_MB_PER_S, FIRST_LANE_MB_PER_S, BLACKWELL_LANE_MB_PER_S = 25_000, 20_000, 50_000
"""Bandwidth of one NVLink per direction: from V100 to H200, of P100, of B100 and later."""
BLACKWELL = re.compile(r"\bG?B[123]00\b")


@dataclass(slots=True)
class _Object:
    kind: str
    attributes: dict[str, str]
    above: _Object | None
    number: int
    below: list[_Object] = field(default_factory=list)
    infos: dict[str, str] = field(default_factory=dict)

    def path(self) -> Iterator[_Object]:
        """Itself and what is above it."""
        node: _Object | None = self
        while node is not None:
            yield node
            node = node.above

    def inside(self) -> Iterator[_Object]:
        """What is below it, itself included."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += node.below


@dataclass(slots=True)
class _Matrix:
    name: str
    indexing: str = ""
    indexes: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Document:
    objects: list[_Object] = field(default_factory=list)
    matrices: list[_Matrix] = field(default_factory=list)
    root: str = ""


def is_lstopo(source: SourceFile) -> bool:
    """Whether a file looks like a topology of hwloc."""
    head = source.data[:4096]
    return b"<topology" in head and (b"hwloc" in head or b"<object" in head)


def read_lstopo(source: SourceFile) -> MachineTree:
    """Read a topology of hwloc. Raises: ImportedFileError: no XML, no topology, no GPU, or GPUs without a PCI bus."""
    document = _parsed(source)
    if document.root != "topology" or not document.objects:
        raise ImportedFileError(
            f"{source.path} is not a topology of hwloc (its root is {shown(document.root)!r}); expected {EXPECTED_XML}"
        )
    devices = [node for node in document.objects if node.kind == "PCIDev"]
    gpus = sorted(((_order(node), node) for node in devices if _is_gpu(node)), key=lambda entry: entry[0])
    if not gpus:
        raise ImportedFileError(
            f"{source.path} shows {len(document.objects)} objects, {len(devices)} of them PCI devices, and none is a GPU; "
            "write it on the machine with its driver loaded, with I/O devices: lstopo --whole-io --of xml"
        )
    if len(gpus) > MOST_DEVICES:
        raise ImportedFileError(f"{source.path} shows {len(gpus)} GPUs; at most {MOST_DEVICES} belong to one machine")
    nodes = [node for _, node in gpus]
    lanes = _lanes(document, nodes)
    if homeless := [node for node in nodes if not any(above.kind == "Bridge" for above in node.path())]:
        names = listed(node.attributes.get("name", "a GPU") for node in homeless)
        raise ImportedFileError(f"{source.path} does not say which bridge {names} hangs at; expected {EXPECTED_XML}")
    cards = [(shown(_card_name(node)), _switch(node), _socket(node)) for node in devices if _card_name(node)]
    models = [part.infos["GPUModel"] for node in nodes for part in node.inside() if "GPUModel" in part.infos]
    hidden = (
        "" if lanes is not None else "the file has no matrix NVLinkBandwidth, which lstopo writes if hwloc was built with NVML"
    )
    return _tree(
        [(_switch(node), _socket(node)) for node in nodes],
        cards,
        lanes or {},
        hidden=hidden,
        names=tuple(dict.fromkeys(map(shown, models))),
    )


def _parsed(source: SourceFile) -> _Document:
    document = _Document()
    stack: list[tuple[str, _Object | None]] = []
    matrix: list[_Matrix] = []
    text: list[str] = []

    def begin(name: str, attributes: dict[str, str]) -> None:
        if not stack:
            document.root = name
        if len(stack) >= MOST_DEPTH or len(document.objects) > MOST_OBJECTS:
            raise ImportedFileError(
                f"{source.path} is nested deeper or holds more than a machine does; expected {EXPECTED_XML}"
            )
        above = stack[-1][1] if stack else None
        node = above
        if name == "object":
            node = _Object(attributes.get("type", ""), attributes, above, len(document.objects))
            document.objects.append(node)
            if above is not None:
                above.below.append(node)
        elif name == "info" and above is not None:
            above.infos[attributes.get("name", "")] = attributes.get("value", "")
        elif name.startswith("distances2"):
            matrix.append(_Matrix(attributes.get("name", ""), attributes.get("indexing", "")))
        text.clear()
        stack.append((name, node))

    def end(name: str) -> None:
        stack.pop()
        if matrix and name == "indexes":
            matrix[-1].indexes += "".join(text).split()
        elif matrix and name == "u64values":
            matrix[-1].values += "".join(text).split()
        elif matrix and name.startswith("distances2"):
            document.matrices.append(matrix.pop())
        text.clear()

    def refuse(*_: object) -> None:
        raise ImportedFileError(
            f"{source.path} defines entities of its own, which no file of lstopo does; expected {EXPECTED_XML}"
        )

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.CharacterDataHandler = text.append
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(source.data, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise ImportedFileError(f"{source.path} is not a complete XML file: {shown(error)}; expected {EXPECTED_XML}") from error
    return document


def _os_devices(node: _Object) -> Iterator[str]:
    return (entry.attributes.get("name", "") for entry in node.below if entry.kind == "OSDev")


def _is_gpu(node: _Object) -> bool:
    """By its driver; by vendor and class where no driver listed any device."""
    if any(GPU_OS_DEVICES.fullmatch(name) for name in _os_devices(node)):
        return True
    vendor_and_class = node.attributes.get("pci_type", "").lower()
    match = re.match(r"([0-9a-f]{4}) \[([0-9a-f]{4}):", vendor_and_class)
    return match is not None and match[1] in GPU_CLASSES and match[2] in GPU_VENDORS


def _order(node: _Object) -> tuple[int, int, str]:
    numbers = {match[1]: int(match[2]) for name in _os_devices(node) if (match := GPU_OS_DEVICES.fullmatch(name))}
    bus = node.attributes.get("pci_busid", "")
    return next(((0, numbers[driver], bus) for driver in DRIVERS if driver in numbers), (1, 0, bus))


def _card_name(node: _Object) -> str:
    return next((name for name in _os_devices(node) if CARD_OS_DEVICES.fullmatch(name)), "")


def _switch(node: _Object) -> int:
    """The bridge below the host bridge: the root port, behind which a switch joins devices; else the device itself."""
    bridges = [above for above in node.path() if above.kind == "Bridge"]
    host = [bridge for bridge in bridges if bridge.attributes.get("bridge_type", "").startswith("0-")]
    inner = [bridge for bridge in bridges if bridge not in host]
    return inner[-1].number if inner else node.number


def _socket(node: _Object) -> int:
    for kinds in (("Package", "Socket"), ("Group", "NUMANode"), ("Machine",)):
        if (above := next((above for above in node.path() if above.kind in kinds), None)) is not None:
            return above.number
    return 0


def _lanes(document: _Document, gpus: list[_Object]) -> dict[tuple[int, int], int] | None:
    matrix = next((entry for entry in document.matrices if entry.name == "NVLinkBandwidth"), None)
    if matrix is None:
        return None
    by_index = {
        node.attributes.get("gp_index", ""): number
        for number, gpu in enumerate(gpus)
        for node in gpu.inside()
        if node.attributes.get("gp_index")
    }
    places = [by_index.get(index.rpartition(":")[2]) for index in matrix.indexes]
    kinds = {node.attributes.get("gp_index", ""): node.kind for node in document.objects}
    is_cpu = [kinds.get(index.rpartition(":")[2], index.rpartition(":")[0]) in CPU_KINDS for index in matrix.indexes]
    size, values = len(places), matrix.values
    if size * size != len(values) or not all(value.isascii() and value.isdigit() and len(value) < 12 for value in values):
        raise ImportedFileError(f"the matrix NVLinkBandwidth lists {size} devices and {len(values)} values; it must be square")
    direct: dict[tuple[int, int], int] = {}
    switched = [0] * len(gpus)
    for row, a in enumerate(places):
        for column, b in enumerate(places):
            bandwidth = int(values[row * size + column])
            if a is None or a == b or not bandwidth or is_cpu[column]:
                continue
            if b is None:
                switched[a] += bandwidth
            elif a < b:
                direct[a, b] = bandwidth
    if not direct and all(switched) and len(set(switched)) == 1:
        direct = {(a, b): switched[0] for a in range(len(gpus)) for b in range(a + 1, len(gpus))}
    elif any(switched):
        raise ImportedFileError(
            f"NVLinkBandwidth connects GPUs to switches unevenly ({listed(sorted(set(switched)))} MB/s); parsim knows "
            "machines in which all GPUs have equally many lanes to switches"
        )
    lane = _lane_speed(gpus, list(direct.values()))
    return {pair: value // lane for pair, value in direct.items()}


def _lane_speed(gpus: list[_Object], values: list[int]) -> int:
    parts = [node for gpu in gpus for node in gpu.inside()]
    models = " ".join(text for node in parts for text in (node.attributes.get("name", ""), *node.infos.values()))
    speeds = (BLACKWELL_LANE_MB_PER_S,) if BLACKWELL.search(models) else (LANE_MB_PER_S, FIRST_LANE_MB_PER_S)
    for speed in speeds:
        if all(value % speed == 0 for value in values):
            return speed
    seen = listed(sorted(set(values)))
    raise ImportedFileError(f"NVLinkBandwidth of {seen} MB/s is not a multiple of a lane's {listed(speeds)} MB/s")


FORMATS = {
    "topo": FileFormat(
        layouts="with -m and with -mp",
        refuses="entries that contradict one another; lanes that a GPU of the profile has not",
        what="the output of nvidia-smi topo -m",
        reads="machine",
        sniff=lambda source: is_topo_matrix(source.head),
        read=partial(_reading, read_topo_matrix, "nvidia-smi topo -m"),
    ),
    "rocm-topo": FileFormat(
        layouts="rocm-smi as text and JSON, amd-smi as text and both layouts of JSON",
        refuses="a table that is not square; types of links other than XGMI and PCIE",
        what="the output of rocm-smi --showtopo or amd-smi topology",
        reads="machine",
        sniff=is_rocm_topology,
        read=partial(_reading, read_rocm_topology, ROCM),
    ),
    "lstopo": FileFormat(
        layouts="hwloc 1 and 2, with and without NVLinkBandwidth",
        refuses="a machine without GPUs; GPUs joined to switches unevenly",
        what="the output of lstopo --of xml",
        reads="machine",
        sniff=is_lstopo,
        read=partial(_reading, read_lstopo, "lstopo --of xml"),
    ),
}
