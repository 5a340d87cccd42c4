"""How the GPUs and network cards of a machine hang together: `nvidia-smi topo -m`, or `lstopo --of xml`.

Both readers return a MachineTree, which says what joins what. How fast a lane is stays what the profile says, since neither
tool knows.

The matrix of nvidia-smi: NV4 are four NVLinks. Where none joins them, an entry says how far apart two devices are: PIX (one
PCIe switch), PXB (several), PHB (the host bridge of a CPU), NODE (host bridges of one NUMA node), SYS (the link between
sockets). Between GPUs joined by NVLink the entry hides the tree: network cards and the column of NUMA nodes or CPUs fill it in.
Leaves out: which of several PCIe switches between two devices (PXB) is whose; they count as one.

The XML of hwloc 1 and 2: the tree of packages, bridges and PCI devices. A GPU is a PCI device with an OS device of CUDA, NVML
or ROCm below it. Where no driver listed any, it is a display or 3D controller of NVIDIA or AMD. A network card has an
OpenFabrics device. Devices behind one port of a host bridge share a switch. Those below one package (or NUMA node, where there
is no package) share a socket. With NVML, hwloc 2.5 and later list the NVLinks as a matrix "NVLinkBandwidth", in MB/s per
direction, between GPUs and switches. Lanes follow from the speed of a lane. Files without the matrix do not show lanes: those
of the profile stay. Leaves out: speeds of PCIe links; switches in a row count as one, the highest.

Source: open-mpi.org/projects/hwloc, documentation 2.x: "Importing and exporting topologies from/to XML files", "Distances".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from xml.parsers import expat

from parsim.errors import ImportedFileError
from parsim.formats.imports import MachineReading, ProfileChange
from parsim.formats.source import SNIFFED, FileFormat, SourceFile, listed, shown
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.devices import device_name
from parsim.hardware.profile import LinkEntry, NicSlot, Profile, SourceEntry

DIRECT, HOST, SOCKETS = "nvlink", "pcie", "smp"
SWITCH = "nvswitch0"
MOST_LANES = 18
"""NVLinks of one GPU. A matrix that shows more in one row shows what goes through switches."""
MOST_DEVICES = 512
"""GPUs and cards of one machine at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTree:
    """Attributes:
    lanes: direct lanes between GPUs i < j (empty: the tool does not show them, or there are none).
    shows_lanes: whether the tool would have shown direct lanes.
    switch: per GPU the number of its PCIe switch. socket: per PCIe switch the number of its socket.
    cards: names of network cards, each with the end it is plugged into ("pcie0", "socket1").
    """

    lanes: Mapping[tuple[int, int], int]
    shows_lanes: bool
    switch: tuple[int, ...]
    socket: tuple[int, ...]
    cards: tuple[tuple[str, str], ...]

    @property
    def gpus(self) -> int:
        return len(self.switch)

    @property
    def switched_lanes(self) -> int | None:
        """Lanes of each GPU to a switch, where all pairs show the same and too many to be direct; else None."""
        pairs = self.gpus * (self.gpus - 1) // 2
        values = set(self.lanes.values())
        if len(self.lanes) < pairs or len(values) != 1 or not pairs:
            return None
        (each,) = values
        return each if each * (self.gpus - 1) > MOST_LANES else None

    def direct_links(self) -> list[LinkEntry]:
        """NVLinks, lane by lane."""
        if (each := self.switched_lanes) is not None:
            return [LinkEntry(a=f"gpu{gpu}", b=SWITCH, kind=DIRECT, lanes=each) for gpu in range(self.gpus)]
        return [LinkEntry(a=f"gpu{a}", b=f"gpu{b}", kind=DIRECT, lanes=lanes) for (a, b), lanes in sorted(self.lanes.items())]

    def host_links(self) -> list[LinkEntry]:
        """The PCIe tree and the links between sockets."""
        links = [LinkEntry(a=f"gpu{gpu}", b=f"pcie{switch}", kind=HOST) for gpu, switch in enumerate(self.switch)]
        links += [LinkEntry(a=f"pcie{switch}", b=f"socket{socket}", kind=HOST) for switch, socket in enumerate(self.socket)]
        sockets = sorted({*self.socket, *(int(end[6:]) for _, end in self.cards if end.startswith("socket"))})
        links += [
            LinkEntry(a=f"socket{a}", b=f"socket{b}", kind=SOCKETS)
            for place, a in enumerate(sockets)
            for b in sockets[place + 1 :]
        ]
        return links

    def summary(self) -> dict[str, Any]:
        """Counts for the report."""
        each = self.switched_lanes
        return {
            "gpus": self.gpus,
            "direct": (
                f"{each} lanes of each GPU to a switch"
                if each is not None
                else f"{sum(self.lanes.values())} lanes between {len(self.lanes)} pairs"
                if self.shows_lanes
                else "not shown by the tool; kept"
            ),
            "pcie_switches": len(self.socket),
            "sockets": len(set(self.socket)),
            "cards": [f"{name} at {end}" for name, end in self.cards],
        }


def with_links(profile: Profile, tree: MachineTree, digest: str, what: str) -> Profile:
    """The profile with the links and card slots of a tree.

    Groups that the link model was measured on keep that standing only if the direct links stay what they were.

    Args:
        profile: of the same GPUs. tree: what joins them. digest: of the file. what: tool and file, for the source.

    Raises:
        ImportedFileError: another number of GPUs, or a kind of link whose speed the profile does not tell.
    """
    names = [device_name(entry.index, profile.device_types[entry.type].kind) for entry in profile.devices]
    if names != [f"gpu{number}" for number in range(tree.gpus)]:
        raise ImportedFileError(
            f"the file shows {tree.gpus} GPUs, and profile {profile.name} has {len(names)} devices ({names[0]}, ...); import "
            f"into a profile of {tree.gpus} GPUs: --on {tree.gpus}xGPU"
        )
    old_direct = [link for link in profile.links if link.kind == DIRECT]
    direct = tree.direct_links() if tree.shows_lanes else old_direct
    links = [*direct, *tree.host_links()]
    if lost := sorted({link.kind for link in links} - set(profile.link_kinds)):
        raise ImportedFileError(
            f"the file shows links of kind {lost[0]!r}, and profile {profile.name} does not say how fast they are (it knows "
            f"{', '.join(sorted(profile.link_kinds))}); start from a machine that has them: --on {tree.gpus}xGPU"
        )
    model = profile.communication.link_model
    if model is not None and model.link_kind == DIRECT and not direct:
        raise ImportedFileError(
            f"the file shows no NVLink, and profile {profile.name} prices collectives by NVLink; start from a machine on PCIe: "
            "--on 4xa40"
        )
    communication = profile.communication
    before, after = ({(frozenset((link.a, link.b)), link.lanes) for link in links} for links in (old_direct, direct))
    if model is not None and before != after:
        communication = communication.model_copy(update={"link_model": model.model_copy(update={"measured_groups": []})})
    key = f"topology-{digest}"
    made = profile.model_copy(
        update={
            "links": links,
            "nics": [NicSlot(at=end, kind=HOST) for _, end in tree.cards],
            "nics_source": key if tree.cards else profile.nics_source,
            "communication": communication,
            "sources": {**profile.sources, key: SourceEntry(kind="measurement", text=what)},
        }
    )
    cluster_from_profile(made)  # connected, or it says what is missing
    return made


def _reading(read: Callable[[SourceFile], MachineTree], tool: str, source: SourceFile) -> MachineReading:
    """What a file says of a machine, before the profile is known that it changes."""
    tree = read(source)
    text = f"{tool}, file {shown(source.path.name)}"
    return MachineReading(devices=tree.gpus, change=partial(_changed, tree=tree, digest=source.digest, text=text))


def _changed(profile: Profile, *, tree: MachineTree, digest: str, text: str) -> ProfileChange:
    facts = tree.summary()
    before = sum(link.lanes for link in profile.links if link.kind == DIRECT)
    now = sum(link.lanes for link in tree.direct_links())
    return ProfileChange(
        profile=with_links(profile, tree, digest, text),
        summary=(
            f"{tree.gpus} GPUs, NVLink: {facts['direct']}; {facts['pcie_switches']} PCIe switches on {facts['sockets']} "
            f"socket(s), {len(tree.cards)} network cards. Bandwidths stay those of {profile.name}"
        ),
        document=facts,
        warnings=()
        if before == now
        else (f"{profile.name} had {before} lanes of NVLink in all, and the file shows {now}: prices of collectives change",),
    )


def _tree(
    gpus: Sequence[tuple[int, int]], cards: Sequence[tuple[str, int, int]], lanes: Mapping[tuple[int, int], int] | None
) -> MachineTree:
    """A tree of what hangs together, whatever a tool calls it.

    Args:
        gpus: the switch and the socket of each, as any numbers. cards: name, switch and socket.
        lanes: None: the tool does not show them.
    """
    switches = list(dict.fromkeys(switch for switch, _ in gpus))
    sockets = list(dict.fromkeys(socket for _, socket in gpus))
    socket_of = dict(reversed(gpus))
    ends: list[tuple[str, str]] = []
    for name, switch, socket in cards:
        if switch in socket_of:
            ends.append((name, f"pcie{switches.index(switch)}"))
            continue
        if socket not in sockets:
            sockets.append(socket)  # a socket without a GPU
        ends.append((name, f"socket{sockets.index(socket)}"))
    return MachineTree(
        lanes=lanes or {},
        shows_lanes=lanes is not None,
        switch=tuple(switches.index(switch) for switch, _ in gpus),
        socket=tuple(sockets.index(socket_of[switch]) for switch in switches),
        cards=tuple(ends),
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
CARD = re.compile(r"NIC\d{1,3}|mlx\d{1,2}_\d{1,3}|hns_\d{1,3}|bnxt_re\d{1,3}|[a-z]{2,8}\d{0,2}_\d{1,3}")
ENTRY = re.compile(r"X|NV\d{1,3}|PIX|PXB|PSB|PHB|NODE|SOC|SYS|N/A")
NAMED = re.compile(r"^\s*(NIC\d{1,3}):\s*(\S{1,64})\s*$")
SAME_SWITCH = ("PIX", "PXB", "PSB")
SAME_SOCKET = (*SAME_SWITCH, "PHB", "NODE")
EXPECTED_MATRIX = "the whole output of `nvidia-smi topo -m`, from the line that lists GPU0 GPU1 ..."


def is_topo_matrix(text: str) -> bool:
    """Whether a text looks like the matrix."""
    return bool(re.search(r"^\s*GPU0\s+X\b", ANSI.sub("", text[:200_000]), re.MULTILINE))


def read_topo_matrix(source: SourceFile) -> MachineTree:
    """Read the matrix.

    Raises:
        ImportedFileError: no matrix, a row that is missing or cut, entries that contradict one another or are unknown.
    """
    lines = [ANSI.sub("", line) for line in source.text.splitlines()]
    head = next((number for number, line in enumerate(lines) if line.split()[:1] == ["GPU0"] and "X" not in line.split()), None)
    if head is None:
        raise ImportedFileError(f"{source.path} shows no matrix of GPUs; expected {EXPECTED_MATRIX}")
    columns = [word for word in lines[head].split("CPU Affinity")[0].split() if GPU.fullmatch(word) or CARD.fullmatch(word)]
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
    names = {named[1]: named[2] for line in lines if (named := NAMED.match(line))}
    # CPUs and NUMA nodes stand behind the matrix: equal for GPUs of one socket, "" where there is nothing.
    affinity = [" ".join(word for word in rest[name][:2] if word != "N/A") for name in gpus]
    return _tree_of_matrix(gpus, cards, near, affinity, names)


def _tree_of_matrix(
    gpus: list[str], cards: list[str], near: dict[tuple[str, str], str], affinity: list[str], names: dict[str, str]
) -> MachineTree:
    number = {name: place for place, name in enumerate([*gpus, *cards])}

    def joined(entries: tuple[str, ...]) -> list[tuple[int, int]]:
        return [(number[a], number[b]) for (a, b), entry in near.items() if entry in entries and a in number and b in number]

    switches = classes(len(number), joined(SAME_SWITCH))
    alike = [(a, b) for a in range(len(gpus)) for b in range(a) if affinity[a] and affinity[a] == affinity[b]]
    sockets = classes(len(number), [*joined(SAME_SOCKET), *alike])
    lanes = {
        (number[a], number[b]): int(entry[2:])
        for (a, b), entry in near.items()
        if entry.startswith("NV") and a in gpus and b in gpus and number[a] < number[b] and int(entry[2:]) > 0
    }
    places = list(zip(switches, sockets, strict=True))
    return _tree(places[: len(gpus)], [(names.get(card, card), *places[number[card]]) for card in cards], lanes)


EXPECTED_XML = "the output of `lstopo --of xml` (`lstopo topology.xml`) on a machine with its GPUs"
DRIVERS = ("nvml", "cuda", "rsmi")
"""Names of OS devices whose numbers order the GPUs, as their tools do."""
GPU_OS_DEVICES = re.compile(r"(nvml|cuda|rsmi)([0-9]{1,4})")
CARD_OS_DEVICES = re.compile(
    r"mlx\d{1,2}_\d{1,3}|hfi\d_\d|hsi\d|bnxt_re\d{1,3}|ib\d{1,3}|rdmap\d{1,3}s\d{1,3}|efa_\d{1,3}", re.ASCII
)
GPU_VENDORS = ("10de", "1002")
GPU_CLASSES = ("0300", "0302", "0380", "1200")
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
    """Read a topology of hwloc.

    Raises:
        ImportedFileError: no XML, no topology, no GPU, or GPUs without a PCI bus.
    """
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
    return _tree([(_switch(node), _socket(node)) for node in nodes], cards, lanes)


def _parsed(source: SourceFile) -> _Document:
    """The objects of the file. No entity is expanded and nothing is fetched."""
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
    """By the driver's number, then by bus."""
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
    """NVLinks between GPUs by the matrix of bandwidths; None where the file has none that fits its GPUs."""
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
    size, values = len(places), matrix.values
    if size * size != len(values) or not all(value.isascii() and value.isdigit() and len(value) < 12 for value in values):
        raise ImportedFileError(f"the matrix NVLinkBandwidth lists {size} devices and {len(values)} values; it must be square")
    direct: dict[tuple[int, int], int] = {}
    switched = [0] * len(gpus)
    for row, a in enumerate(places):
        for column, b in enumerate(places):
            bandwidth = int(values[row * size + column])
            if a is None or a == b or not bandwidth:
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
    """MB/s of a lane, by the generation of the GPUs."""
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
        what="the output of nvidia-smi topo -m",
        reads="machine",
        sniff=lambda source: is_topo_matrix(source.text[:SNIFFED]),
        read=partial(_reading, read_topo_matrix, "nvidia-smi topo -m"),
    ),
    "lstopo": FileFormat(
        what="the output of lstopo --of xml",
        reads="machine",
        sniff=is_lstopo,
        read=partial(_reading, read_lstopo, "lstopo --of xml"),
    ),
}
