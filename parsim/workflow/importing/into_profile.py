"""nccl-tests and topologies into a hardware profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parsim.errors import ImportedFileError
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile, save_profile
from parsim.importers.gpu_names import gpu_named
from parsim.importers.lstopo_xml import read_lstopo
from parsim.importers.machine_tree import MachineTree, with_links
from parsim.importers.nccl_tests import read_nccl_tests
from parsim.importers.profile_points import FittedGroup, with_measured
from parsim.importers.source_file import SourceFile, shown
from parsim.importers.topo_matrix import read_topo_matrix
from parsim.report.tables import Column, ReportTable
from parsim.units import format_bytes, format_percent
from parsim.workflow.importing.imported import Imported


def import_nccl_tests(
    source: SourceFile, into: Path | None, cluster: str | None, collective: str | None, ranks: Sequence[int] | None
) -> Imported:
    """Points and fits of a log into a profile."""
    log = read_nccl_tests(source, collective=collective, ranks=ranks)
    names = [name for test in log.tests for name in test.devices]
    devices = max(max(test.group) for test in log.tests) + 1
    base = _base(into, cluster, names, devices)
    made, groups = with_measured(base, log, source.digest, shown(source.path.name))
    if into is not None:
        save_profile(made, into)
    points = sum(group.points for group in groups)
    summary = (
        f"{points} measured collectives of {len(groups)} group(s) in {base.name}, fitted and used from now on"
        if into is not None
        else f"{points} measured collectives of {len(groups)} group(s); give --into PROFILE.json to use them"
    )
    document: dict[str, Any] = {"profile": base.name, "groups": [group.to_dict() for group in groups]}
    return Imported(
        kind="nccl-tests",
        source=source.path,
        into=into,
        summary=summary,
        found=document,
        skipped=log.skipped,
        warnings=log.notes,
        tables=(_group_table(groups),),
    )


TOPOLOGIES = {"topo": (read_topo_matrix, "nvidia-smi topo -m"), "lstopo": (read_lstopo, "lstopo --of xml")}
"""By kind: the reader, and the tool for the source of the links."""


def import_topology(source: SourceFile, into: Path | None, cluster: str | None, kind: str = "topo") -> Imported:
    """Links and card slots of a machine into a profile."""
    read, tool = TOPOLOGIES[kind]
    tree = read(source)
    base = _base(into, cluster, [], tree.gpus)
    made = with_links(base, tree, source.digest, f"{tool}, file {shown(source.path.name)}")
    if into is not None:
        save_profile(made, into)
    facts = tree.summary()
    return Imported(
        kind=kind,
        source=source.path,
        into=into,
        summary=(
            f"{tree.gpus} GPUs, NVLink: {facts['direct']}; {facts['pcie_switches']} PCIe switches on {facts['sockets']} "
            f"socket(s), {len(tree.cards)} network cards. Bandwidths stay those of {base.name}"
        ),
        found={"profile": base.name, **facts},
        skipped={},
        warnings=_differences(base, tree),
    )


def _differences(base: Profile, tree: MachineTree) -> tuple[str, ...]:
    before = sum(link.lanes for link in base.links if link.kind == "nvlink")
    now = sum(link.lanes for link in tree.direct_links())
    if before == now:
        return ()
    return (f"{base.name} had {before} lanes of NVLink in all, and the file shows {now}: prices of collectives change",)


def _base(into: Path | None, cluster: str | None, names: Sequence[str], devices: int) -> Profile:
    """The profile that is added to: the target if it is there, else what --on names, else the GPUs that the file names."""
    if into is not None and into.exists():
        if cluster is not None:
            raise ImportedFileError(f"{into} exists, and --on {cluster} names a machine; drop one of them")
        return load_profile(str(into))
    if cluster is not None:
        return load_profile(cluster)
    parts = {part.name: part for name in names if (part := gpu_named(name)) is not None}
    if len(parts) == 1:
        (part,) = parts.values()
        return load_profile(f"{max(devices, part.gpus_per_node)}x{part.name}")
    seen = f" (it names {', '.join(dict.fromkeys(names))})" if names else ""
    raise ImportedFileError(
        f"the file does not name the machine{seen}: name it, such as --on {devices}xh100-sxm, or give a profile as --into"
    )


def _group_table(groups: Sequence[FittedGroup]) -> ReportTable:
    rows = [
        (
            group.operation,
            ",".join(map(str, group.group)),
            str(group.points),
            f"{format_bytes(group.min_size_bytes)} to {format_bytes(group.max_size_bytes)}",
            format_percent(group.fit_error),
            "no price" if group.error_before is None else format_percent(group.error_before),
            "–" if group.bias_before is None else format_percent(group.bias_before),
        )
        for group in groups
    ]
    return ReportTable(
        title="Measured collectives",
        columns=(
            Column(name="collective"),
            Column(name="devices", wraps=True),
            Column(name="points", numeric=True),
            Column(name="sizes"),
            Column(name="error of the fit", numeric=True),
            Column(name="error before", numeric=True),
            Column(name="bias before", numeric=True),
        ),
        rows=tuple(rows),
        notes=("Errors are medians of |predicted - measured| / measured; bias is signed. Before: the profile without them.",),
    )
