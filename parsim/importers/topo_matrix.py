"""The matrix of `nvidia-smi topo -m`: NVLinks between GPUs, and what of the PCIe tree two devices share.

NV4 are four NVLinks. Where none joins them, an entry says how far apart two devices are: PIX (one PCIe switch), PXB (several),
PHB (the host bridge of a CPU), NODE (host bridges of one NUMA node), SYS (the link between sockets). Between GPUs joined by
NVLink the entry hides the tree: network cards and the column of NUMA nodes or CPUs fill it in.

Leaves out: which of several PCIe switches between two devices (PXB) is whose; they count as one.
"""

from __future__ import annotations

import re

from parsim.errors import ImportedFileError
from parsim.importers.machine_tree import MachineTree, classes
from parsim.importers.source_file import SourceFile, listed, shown

ANSI = re.compile(r"\x1b\[[0-9;]{0,16}m")
GPU = re.compile(r"GPU(\d{1,3})")
CARD = re.compile(r"NIC\d{1,3}|mlx\d{1,2}_\d{1,3}|hns_\d{1,3}|bnxt_re\d{1,3}|[a-z]{2,8}\d{0,2}_\d{1,3}")
ENTRY = re.compile(r"X|NV\d{1,3}|PIX|PXB|PSB|PHB|NODE|SOC|SYS|N/A")
NAMED = re.compile(r"^\s*(NIC\d{1,3}):\s*(\S{1,64})\s*$")
SAME_SWITCH = ("PIX", "PXB", "PSB")
SAME_SOCKET = (*SAME_SWITCH, "PHB", "NODE")
MOST_DEVICES = 512
EXPECTED = "the whole output of `nvidia-smi topo -m`, from the line that lists GPU0 GPU1 ..."


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
        raise ImportedFileError(f"{source.path} shows no matrix of GPUs; expected {EXPECTED}")
    columns = [word for word in lines[head].split("CPU Affinity")[0].split() if GPU.fullmatch(word) or CARD.fullmatch(word)]
    if len(columns) > MOST_DEVICES or len(set(columns)) < len(columns):
        raise ImportedFileError(f"{source.path} lists {len(columns)} devices, some twice or too many; expected {EXPECTED}")
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
        raise ImportedFileError(f"{source.path} has no row of {listed(lost)}; expected {EXPECTED}")
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
    names = {found[1]: found[2] for line in lines if (found := NAMED.match(line))}
    return _tree(gpus, cards, near, [_affinity(rest[name]) for name in gpus], names)


def _affinity(words: list[str]) -> str:
    """What stands behind the matrix: CPUs, and NUMA nodes; equal for GPUs of one socket. "" where there is nothing."""
    return " ".join(word for word in words[:2] if word != "N/A")


def _tree(
    gpus: list[str], cards: list[str], near: dict[tuple[str, str], str], affinity: list[str], names: dict[str, str]
) -> MachineTree:
    devices = [*gpus, *cards]
    number = {name: place for place, name in enumerate(devices)}

    def joined(entries: tuple[str, ...]) -> list[tuple[int, int]]:
        return [(number[a], number[b]) for (a, b), entry in near.items() if entry in entries and a in number and b in number]

    switches = classes(len(devices), joined(SAME_SWITCH))
    alike = [(a, b) for a in range(len(gpus)) for b in range(a) if affinity[a] and affinity[a] == affinity[b]]
    sockets = classes(len(devices), [*joined(SAME_SOCKET), *alike])
    of_gpu = switches[: len(gpus)]
    used = list(dict.fromkeys(of_gpu))
    lanes = {
        (number[a], number[b]): int(entry[2:])
        for (a, b), entry in near.items()
        if entry.startswith("NV") and a in gpus and b in gpus and number[a] < number[b] and int(entry[2:]) > 0
    }
    seats = list(dict.fromkeys(sockets[: len(gpus)]))
    card_ends = []
    for card in cards:
        switch, socket = switches[number[card]], sockets[number[card]]
        end = f"pcie{used.index(switch)}" if switch in used else f"socket{_seat(seats, socket)}"
        card_ends.append((names.get(card, card), end))
    return MachineTree(
        lanes=lanes,
        shows_lanes=True,
        switch=tuple(used.index(switch) for switch in of_gpu),
        socket=tuple(seats.index(sockets[of_gpu.index(switch)]) for switch in used),
        cards=tuple(card_ends),
    )


def _seat(seats: list[int], socket: int) -> int:
    """The number of a socket; one without a GPU is appended."""
    if socket not in seats:
        seats.append(socket)
    return seats.index(socket)
