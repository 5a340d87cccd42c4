"""Import one file of another tool: recognise it, read it, and write the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parsim.app.config import cluster_section, parse_config
from parsim.app.config_text import merge, parse_overrides
from parsim.app.functions import simulate
from parsim.app.load import cluster_of
from parsim.errors import ConfigError, ImportedFileError, ParsimError, ProfileError
from parsim.files import document_text, parse_toml, write_text_atomically
from parsim.formats.imports import (
    CATEGORIES,
    Imported,
    PredictedParts,
    RunKeys,
    check_import,
    format_of,
    import_machine,
    import_trace,
)
from parsim.formats.source import FileFormat, SourceFile, read_source


def import_file(
    path: str | Path,
    *,
    kind: str | None = None,
    into: str | Path | None = None,
    cluster: str | None = None,
    network: str | None = None,
    collective: str | None = None,
    ranks: Sequence[int] | None = None,
    world_size: int | None = None,
    precision: str | None = None,
    steps: int | None = None,
    against: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> Imported:
    """Read a file of another tool into a profile, a network, a run file or a measured timeline.

    Args:
        path: output of nccl-tests (text or JSON), `nvidia-smi topo -m`, `rocm-smi --showtopo` or `lstopo --of xml`, which
            become a profile; a trace of torch.profiler (.json or .json.gz) or an SQLite export of Nsight Systems, which become
            a timeline; a DeepSpeed JSON config, which becomes a run file.
        kind: "nccl-tests", "topo", "rocm-topo", "lstopo", "kineto", "nsys", "deepspeed", or "package.module:ROW" of a format of
            one's own; default: detected from the content.
        into: PROFILE.json, NETWORK.json, TIMELINE.json.gz or RUN.toml, new or extended; default: nothing is written.
        network: that a new NETWORK.json starts from; default: the shipped one that is nearest to the measurements.
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
    keywords = {
        "cluster": cluster,
        "network": network,
        "collective": collective,
        "ranks": ranks,
        "world_size": world_size,
        "precision": precision,
        "steps": steps,
        "against": against,
        "overrides": overrides or None,
    }
    options = {name: value for name, value in keywords.items() if value is not None}
    target = None if into is None else Path(into)
    source = read_source(Path(path))
    name, row = format_of(source, kind)
    check_import(source, row, target, options)
    assert row.read is not None
    reading = row.read(source, **{option: value for option, value in options.items() if option in row.options})
    if row.reads == "machine":
        return import_machine(name, source, reading, into=target, cluster=cluster, network=network)
    if row.reads == "trace":
        predicted = None if against is None else _predicted(Path(against))
        return import_trace(name, source, reading, into=target, cluster=cluster, precision=precision, predicted=predicted)
    return _import_run(name, source, row, reading, target, overrides)


def _predicted(against: Path) -> PredictedParts:
    """The predicted step of a run file, as means over its ranks."""
    prediction = simulate(against)
    device = prediction.problem.cluster.devices[0].type
    ranks = prediction.breakdown()
    seconds = {key: float(ranks[key].mean()) for _, key in CATEGORIES}
    seconds["idle_s"] += float(ranks["bubble_s"].mean())
    seconds["step_s"] = prediction.step_s.median
    return PredictedParts(question=str(against), device=device.name, on_gpu=device.kind != "cpu", seconds=seconds)


def _import_run(
    kind: str, source: SourceFile, row: FileFormat, run: RunKeys, into: Path | None, overrides: Sequence[str]
) -> Imported:
    """Keys of a framework's config into a run file, new or old; the whole is checked before it is written."""
    if into is not None and run.needs_ranks and (ranks := _ranks_of(into, overrides)) is not None:
        assert row.read is not None
        run = row.read(source, world_size=ranks)
    if run.auto:
        run.warnings.append(
            f'{len(run.auto)} keys are "auto", which the training framework fills in: {", ".join(run.auto[:6])}'
        )
    if into is not None:
        _write_run(into, run, overrides)
    return Imported(
        kind=kind,
        source=source.path,
        into=into,
        summary=", ".join(f"{key} = {value}" for key, value in run.keys.items()),
        found={
            "keys": dict(run.keys),
            "data_parallel_ranks": run.ranks,
            "without_effect": run.harmless,
            "auto": run.auto,
        },
        skipped={"keys that change no time and no memory": len(run.harmless)} if run.harmless else {},
        warnings=tuple(run.warnings),
    )


def _ranks_of(into: Path, overrides: Sequence[str]) -> int | None:
    """Devices of the cluster of the run file that comes about; None where another mesh is asked for, or none is named yet."""
    document: dict[str, Any] = parse_toml(into.read_text(encoding="utf-8")) if into.exists() else {}
    merge(document, parse_overrides(overrides), "")
    cluster, plan = document.get("cluster"), document.get("plan")
    if not isinstance(cluster, dict) or (isinstance(plan, dict) and plan.get("mesh")):
        return None
    try:
        return cluster_of(cluster_section(cluster, where=str(into), folder=into.resolve().parent)).size
    except ParsimError:
        return None  # `_write_run` reports it


_NEEDED = {
    "model": "--set model.name=gpt",
    "cluster": "--set cluster.profile=8xh100-sxm",
    "training": "--set training.global_batch=256",
}


def _write_run(into: Path, run: RunKeys, overrides: Sequence[str]) -> None:
    document: dict[str, Any] = {}
    if into.exists():
        text = into.read_text(encoding="utf-8")
        document = parse_toml(text)
        if "#" in text:
            run.warnings.append(f"comments of {into} are lost: the file is rewritten")
    plan = document.get("plan")
    if isinstance(plan, dict) and plan.get("strategy") not in (None, "dp"):
        run.warnings.append(f'plan.strategy was {plan["strategy"]!r}; DeepSpeed\'s ZeRO is data parallelism: "dp"')
        document["plan"] = {key: value for key, value in plan.items() if key not in ("pin", "forbid", "placements", "mesh")}
    for key, value in run.keys.items():
        section, _, name = key.partition(".")
        merge(document, {section: {name: value}}, "")
    merge(document, parse_overrides(overrides), "")
    missing = [hint for section, hint in _NEEDED.items() if not isinstance(document.get(section), dict)]
    if "training" in document and isinstance(document["training"], dict) and "global_batch" not in document["training"]:
        missing.append("--set training.global_batch=256 (the config does not say it)")
    if missing:
        raise ImportedFileError(f"{into} would lack what a DeepSpeed config does not hold; add {' and '.join(missing)}")
    try:
        cluster = cluster_of(parse_config(_text(document), where=str(into), folder=into.resolve().parent).cluster)
        devices, plan = cluster.size, document.get("plan", {})
        if plan.get("strategy") == "dp" and not {"mesh", "dp_shard"} & set(plan):
            if devices == 1:
                document["plan"] = {**plan, "strategy": "single", "zero_stage": 0}
                run.warnings.append(
                    'plan.strategy = "single", plan.zero_stage = 0: one device has nothing to divide states over'
                )
            elif run.keys.get("plan.zero_stage") and cluster.network is not None:
                plan["dp_shard"] = devices  # left out, the search would try groups of a node
                run.warnings.append(f"plan.dp_shard = {devices}: DeepSpeed divides states over all ranks")
            parse_config(_text(document), where=str(into), folder=into.resolve().parent)
        if run.ranks is not None and run.ranks != devices:
            run.warnings.append(f"the batch keys imply {run.ranks} data-parallel ranks, and the cluster has {devices} devices")
    except (ConfigError, ProfileError) as error:
        raise ImportedFileError(f"the run file would be wrong, and is not written: {error}") from error
    write_text_atomically(into, _text(document))


def _text(document: dict[str, Any]) -> str:
    return document_text({name: section for name, section in document.items() if isinstance(section, dict)})
