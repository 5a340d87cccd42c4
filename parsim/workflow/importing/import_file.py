"""Import one file: recognise it, read it, and write the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parsim.errors import ImportedFileError
from parsim.importers.kinds import KINDS, SUFFIXES, kind_of
from parsim.importers.source_file import read_source
from parsim.workflow.importing.imported import Imported


def import_file(
    path: str | Path,
    *,
    kind: str | None = None,
    into: str | Path | None = None,
    cluster: str | None = None,
    collective: str | None = None,
    ranks: Sequence[int] | None = None,
    world_size: int | None = None,
    precision: str | None = None,
    steps: int | None = None,
    against: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> Imported:
    """Read a file of another tool into a profile, a run file or a measured timeline.

    Args:
        path: output of nccl-tests (text or JSON), `nvidia-smi topo -m` or `lstopo --of xml`, which become a profile; a trace of
            torch.profiler (.json or .json.gz) or an SQLite export of Nsight Systems, which become a timeline; a DeepSpeed JSON
            config, which becomes a run file.
        kind: a key of `parsim.importers.kinds.KINDS`; default: detected from the content.
        into: PROFILE.json, TIMELINE.json.gz or RUN.toml, new or extended; default: nothing is written.
        cluster: the machine, a profile or "8xh100-sxm", of a new profile or of the trace's peak; default: named by the file.
        collective, ranks: of nccl-tests, if the file lacks them; of Nsight Systems, the GPU.
        world_size: data-parallel ranks of DeepSpeed.
        precision, steps: of a trace. against: a run file, whose prediction is compared with the trace.
        overrides: further keys of a run file, in the form of `--set`.

    Returns:
        The findings, the fits, and the rows left out; `print` shows it.

    Raises:
        ParsimError: ImportedFileError for a file that is damaged, of another kind, or without usable content; ProfileError.
    """
    path = Path(path)
    into = None if into is None else Path(into)
    against = None if against is None else Path(against)
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
            "--on": (cluster, ("nccl-tests", "topo", "lstopo", "kineto", "nsys")),
            "--collective": (collective, ("nccl-tests",)),
            "--ranks": (ranks, ("nccl-tests", "nsys")),
            "--world-size": (world_size, ("deepspeed",)),
            "--precision": (precision, ("kineto", "nsys")),
            "--steps": (steps, ("kineto", "nsys")),
            "--against": (against, ("kineto", "nsys")),
            "--set": (overrides or None, ("deepspeed",)),
        },
    )
    if name in ("kineto", "nsys"):
        from parsim.workflow.importing.into_timeline import import_trace

        if name == "nsys" and ranks is not None and len(ranks) != 1:
            raise ImportedFileError(f"--ranks names {len(ranks)} GPUs, and a timeline is of one; give one number")
        device = None if ranks is None else ranks[0]
        return import_trace(source, into, cluster, precision, steps, against, device=device, kind=name)
    if name == "deepspeed":
        from parsim.workflow.importing.into_run_file import import_deepspeed

        return import_deepspeed(source, into, overrides, world_size)
    from parsim.workflow.importing.into_profile import import_nccl_tests, import_topology

    if name in ("topo", "lstopo"):
        return import_topology(source, into, cluster, name)
    return import_nccl_tests(source, into, cluster, collective, ranks)


def _check_options(kind: str, options: dict[str, tuple[object, tuple[str, ...]]]) -> None:
    for option, (value, kinds) in options.items():
        if value is not None and kind not in kinds:
            raise ImportedFileError(f"{option} does not apply to {KINDS[kind].what}; it belongs to {', '.join(kinds)}")
