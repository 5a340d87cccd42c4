"""The XML of `lstopo --of xml` (hwloc 1 and 2): the tree of packages, bridges and PCI devices.

A GPU is a PCI device with an OS device of CUDA, NVML or ROCm below it. Where no driver listed any, it is a display or 3D
controller of NVIDIA or AMD. A network card has an OpenFabrics device. Devices behind one port of a host bridge share a switch.
Those below one package (or NUMA node, where there is no package) share a socket.

With NVML, hwloc 2.5 and later list the NVLinks as a matrix "NVLinkBandwidth", in MB/s per direction, between GPUs and switches.
Lanes follow from the speed of a lane. Files without the matrix do not show lanes: those of the profile stay.

Leaves out: speeds of PCIe links; switches in a row count as one, the highest.

Source: open-mpi.org/projects/hwloc, documentation 2.x: "Importing and exporting topologies from/to XML files", "Distances".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from parsim.errors import ImportedFileError
from parsim.importers.machine_tree import MachineTree
from parsim.importers.source_file import SourceFile, listed, shown

EXPECTED = "the output of `lstopo --of xml` (`lstopo topology.xml`) on a machine with its GPUs"
DRIVERS = ("nvml", "cuda", "rsmi")
"""Of OS devices whose numbers order the GPUs, as their tools do."""
GPU_OS_DEVICES = re.compile(r"(nvml|cuda|rsmi)([0-9]{1,4})")
CARD_OS_DEVICES = re.compile(
    r"mlx\d{1,2}_\d{1,3}|hfi\d_\d|hsi\d|bnxt_re\d{1,3}|ib\d{1,3}|rdmap\d{1,3}s\d{1,3}|efa_\d{1,3}", re.ASCII
)
GPU_VENDORS = ("10de", "1002")
GPU_CLASSES = ("0300", "0302", "0380", "1200")
MOST_OBJECTS = 200_000
MOST_DEPTH = 200
MOST_GPUS = 512
LANE_MB_PER_S, FIRST_LANE_MB_PER_S, BLACKWELL_LANE_MB_PER_S = 25_000, 20_000, 50_000
"""Of one NVLink per direction: from V100 to H200, of P100, of B100 and later."""
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
    """Whether a file looks like a topology of hwloc.

    Args:
        source: the file.
    """
    head = source.data[:4096]
    return b"<topology" in head and (b"hwloc" in head or b"<object" in head)


def read_lstopo(source: SourceFile) -> MachineTree:
    """Read a topology.

    Args:
        source: the file.

    Raises:
        ImportedFileError: no XML, no topology, no GPU, or GPUs without a PCI bus.
    """
    document = _parsed(source)
    if document.root != "topology" or not document.objects:
        raise ImportedFileError(
            f"{source.path} is not a topology of hwloc (its root is {shown(document.root)!r}); expected {EXPECTED}"
        )
    devices = [node for node in document.objects if node.kind == "PCIDev"]
    gpus = sorted(((_order(node), node) for node in devices if _is_gpu(node)), key=lambda entry: entry[0])
    if not gpus:
        raise ImportedFileError(
            f"{source.path} shows {len(document.objects)} objects, {len(devices)} of them PCI devices, and none is a GPU; "
            "write it on the machine with its driver loaded, with I/O devices: lstopo --whole-io --of xml"
        )
    if len(gpus) > MOST_GPUS:
        raise ImportedFileError(f"{source.path} shows {len(gpus)} GPUs; at most {MOST_GPUS} belong to one machine")
    nodes = [node for _, node in gpus]
    lanes = _lanes(document, nodes)
    return _tree(nodes, [node for node in devices if _card_name(node)], lanes, source)


def _parsed(source: SourceFile) -> _Document:
    """The objects of the file. No entity is expanded and nothing is fetched."""
    found = _Document()
    stack: list[tuple[str, _Object | None]] = []
    matrix: list[_Matrix] = []
    text: list[str] = []

    def begin(name: str, attributes: dict[str, str]) -> None:
        if not stack:
            found.root = name
        if len(stack) >= MOST_DEPTH or len(found.objects) > MOST_OBJECTS:
            raise ImportedFileError(f"{source.path} is nested deeper or holds more than a machine does; expected {EXPECTED}")
        above = stack[-1][1] if stack else None
        node = above
        if name == "object":
            node = _Object(attributes.get("type", ""), attributes, above, len(found.objects))
            found.objects.append(node)
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
            found.matrices.append(matrix.pop())
        text.clear()

    def refuse(*_: object) -> None:
        raise ImportedFileError(f"{source.path} defines entities of its own, which no file of lstopo does; expected {EXPECTED}")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.CharacterDataHandler = text.append
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(source.data, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise ImportedFileError(f"{source.path} is not a complete XML file: {shown(error)}; expected {EXPECTED}") from error
    return found


def _os_devices(node: _Object) -> Iterator[str]:
    return (entry.attributes.get("name", "") for entry in node.below if entry.kind == "OSDev")


def _is_gpu(node: _Object) -> bool:
    """By its driver; by vendor and class where no driver listed any device."""
    if any(GPU_OS_DEVICES.fullmatch(name) for name in _os_devices(node)):
        return True
    vendor_and_class = node.attributes.get("pci_type", "").lower()
    found = re.match(r"([0-9a-f]{4}) \[([0-9a-f]{4}):", vendor_and_class)
    return found is not None and found[1] in GPU_CLASSES and found[2] in GPU_VENDORS


def _order(node: _Object) -> tuple[int, int, str]:
    """By the driver's number, then by bus."""
    numbers = {found[1]: int(found[2]) for name in _os_devices(node) if (found := GPU_OS_DEVICES.fullmatch(name))}
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
        found = next((above for above in node.path() if above.kind in kinds), None)
        if found is not None:
            return found.number
    return 0


def _tree(
    gpus: list[_Object], cards: list[_Object], lanes: dict[tuple[int, int], int] | None, source: SourceFile
) -> MachineTree:
    if unknown := [
        node.attributes.get("name", "a GPU") for node in gpus if not any(above.kind == "Bridge" for above in node.path())
    ]:
        raise ImportedFileError(f"{source.path} does not say which bridge {listed(unknown)} hangs at; expected {EXPECTED}")
    switches = list(dict.fromkeys(_switch(node) for node in gpus))
    seats = list(dict.fromkeys(_socket(node) for node in gpus))
    of_switch = {_switch(node): _socket(node) for node in gpus}
    ends: list[tuple[str, str]] = []
    for card in cards:
        switch, seat = _switch(card), _socket(card)
        if seat not in seats:
            seats.append(seat)
        ends.append(
            (shown(_card_name(card)), f"pcie{switches.index(switch)}" if switch in switches else f"socket{seats.index(seat)}")
        )
    return MachineTree(
        lanes=lanes or {},
        shows_lanes=lanes is not None,
        switch=tuple(switches.index(_switch(node)) for node in gpus),
        socket=tuple(seats.index(of_switch[switch]) for switch in switches),
        cards=tuple(ends),
    )


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
    known = (BLACKWELL_LANE_MB_PER_S,) if BLACKWELL.search(models) else (LANE_MB_PER_S, FIRST_LANE_MB_PER_S)
    for speed in known:
        if all(value % speed == 0 for value in values):
            return speed
    seen = listed(sorted(set(values)))
    raise ImportedFileError(f"NVLinkBandwidth of {seen} MB/s is not a multiple of a lane's {listed(known)} MB/s")
