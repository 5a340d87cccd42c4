"""Import one file: recognise it, read it, and write what it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parsim.errors import ImportedFileError
from parsim.importers.kinds import KINDS, SUFFIXES, kind_of
from parsim.importers.source_file import read_source
from parsim.workflow.importing.imported import Imported


def import_path(
    path: Path,
    *,
    kind: str | None,
    into: Path | None,
    cluster: str | None,
    collective: str | None,
    ranks: Sequence[int] | None,
    world_size: int | None,
    precision: str | None,
    steps: int | None,
    against: Path | None,
    overrides: Sequence[str],
) -> Imported:
    """As `parsim.import_file`, with paths."""
    source = read_source(path)
    name = kind_of(source, kind)
    becomes = KINDS[name].becomes
    suffix, example = SUFFIXES[becomes]
    if into is not None and not into.name.endswith(suffix):
        raise ImportedFileError(f"{path} is {KINDS[name].what}; it goes into {example}, not into {into}")
    if into is not None and into.resolve() == path.resolve():
        raise ImportedFileError(f"--into {into} is the file itself; give another name")
    _check_options(
        name,
        {
            "--on": (cluster, ("nccl-tests", "topo", "kineto")),
            "--collective": (collective, ("nccl-tests",)),
            "--ranks": (ranks, ("nccl-tests",)),
            "--world-size": (world_size, ("deepspeed",)),
            "--precision": (precision, ("kineto",)),
            "--steps": (steps, ("kineto",)),
            "--against": (against, ("kineto",)),
            "--set": (overrides or None, ("deepspeed",)),
        },
    )
    if name == "kineto":
        from parsim.workflow.importing.into_timeline import import_kineto

        return import_kineto(source, into, cluster, precision, steps, against)
    if name == "deepspeed":
        from parsim.workflow.importing.into_run_file import import_deepspeed

        return import_deepspeed(source, into, overrides, world_size)
    from parsim.workflow.importing.into_profile import import_nccl_tests, import_topology

    if name == "topo":
        return import_topology(source, into, cluster)
    return import_nccl_tests(source, into, cluster, collective, ranks)


def _check_options(kind: str, options: dict[str, tuple[object, tuple[str, ...]]]) -> None:
    for option, (value, kinds) in options.items():
        if value is not None and kind not in kinds:
            raise ImportedFileError(f"{option} means nothing for {KINDS[kind].what}; it belongs to {', '.join(kinds)}")
