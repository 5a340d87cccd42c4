"""A DeepSpeed config into a run file: its keys are laid over the file's, and the whole is checked before it is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parsim.app.config import cluster_section, parse_config
from parsim.app.config_text import document_text, merge, parse_overrides
from parsim.app.load import cluster_of
from parsim.errors import ConfigError, ImportedFileError, ParsimError, ProfileError
from parsim.files import parse_toml, write_text_atomically
from parsim.importers.deepspeed_config import DeepSpeedKeys, read_deepspeed
from parsim.importers.source_file import SourceFile
from parsim.workflow.importing.imported import Imported


def import_deepspeed(source: SourceFile, into: Path | None, overrides: Sequence[str], world_size: int | None) -> Imported:
    """Keys of the config into a run file, new or old."""
    read = read_deepspeed(source, ranks=world_size)
    if into is not None and read.needs_ranks and (ranks := _devices(into, overrides)) is not None:
        read = read_deepspeed(source, ranks=ranks)
    warnings = list(read.warnings)
    if read.auto:
        warnings.append(f'{len(read.auto)} keys are "auto", which the training framework fills in: {", ".join(read.auto[:6])}')
    if into is not None:
        _write(into, read, overrides, warnings)
    return Imported(
        kind="deepspeed",
        source=source.path,
        into=into,
        summary=", ".join(f"{key} = {value}" for key, value in read.keys.items()),
        found={
            "keys": dict(read.keys),
            "data_parallel_ranks": read.ranks,
            "without_effect": list(read.harmless),
            "auto": list(read.auto),
        },
        skipped={"keys that change no time and no memory": len(read.harmless)} if read.harmless else {},
        warnings=tuple(warnings),
    )


def _devices(into: Path, overrides: Sequence[str]) -> int | None:
    """Of the cluster of the run file that comes about; None where another mesh is asked for, or there is no cluster yet."""
    document: dict[str, Any] = parse_toml(into.read_text(encoding="utf-8")) if into.exists() else {}
    merge(document, parse_overrides(overrides), "")
    cluster, plan = document.get("cluster"), document.get("plan")
    if not isinstance(cluster, dict) or (isinstance(plan, dict) and plan.get("mesh")):
        return None
    try:
        return cluster_of(cluster_section(cluster, where=str(into), folder=into.resolve().parent)).size
    except ParsimError:
        return None  # `_write` reports it


def _write(into: Path, read: DeepSpeedKeys, overrides: Sequence[str], warnings: list[str]) -> None:
    document: dict[str, Any] = {}
    if into.exists():
        text = into.read_text(encoding="utf-8")
        document = parse_toml(text)
        if "#" in text:
            warnings.append(f"comments of {into} are lost: the file is rewritten")
    plan = document.get("plan")
    if isinstance(plan, dict) and plan.get("strategy") not in (None, "dp"):
        warnings.append(f'plan.strategy was {plan["strategy"]!r}; DeepSpeed\'s ZeRO is data parallelism: "dp"')
        document["plan"] = {key: value for key, value in plan.items() if key not in ("pin", "forbid", "placements", "mesh")}
    for key, value in read.keys.items():
        section, _, name = key.partition(".")
        merge(document, {section: {name: value}}, "")
    merge(document, parse_overrides(overrides), "")
    missing = [hint for section, hint in _NEEDED.items() if not isinstance(document.get(section), dict)]
    if "training" in document and isinstance(document["training"], dict) and "global_batch" not in document["training"]:
        missing.append("--set training.global_batch=256 (the config does not say it)")
    if missing:
        raise ImportedFileError(f"{into} would lack what a DeepSpeed config does not hold; add {' and '.join(missing)}")
    text = _text(document)
    try:
        config = parse_config(text, where=str(into), folder=into.resolve().parent)
        cluster = cluster_of(config.cluster)
        there, plan = cluster.size, document.get("plan", {})
        alone = plan.get("strategy") == "dp" and not {"mesh", "dp_shard"} & set(plan)
        if alone and there == 1:
            document["plan"] = {**plan, "strategy": "single", "zero_stage": 0}
            warnings.append('plan.strategy = "single", plan.zero_stage = 0: one device has nothing to divide states over')
            text = _text(document)
            parse_config(text, where=str(into), folder=into.resolve().parent)
        elif alone and read.keys.get("plan.zero_stage") and cluster.network is not None:
            plan["dp_shard"] = there  # left out, the search would try groups of a node
            warnings.append(f"plan.dp_shard = {there}: DeepSpeed divides states over all ranks")
            text = _text(document)
            parse_config(text, where=str(into), folder=into.resolve().parent)
        if read.ranks is not None and read.ranks != there:
            warnings.append(f"the batch keys imply {read.ranks} data-parallel ranks, and the cluster has {there} devices")
    except (ConfigError, ProfileError) as error:
        raise ImportedFileError(f"the run file would be wrong, and is not written: {error}") from error
    write_text_atomically(into, text)


def _text(document: dict[str, Any]) -> str:
    return document_text({name: section for name, section in document.items() if isinstance(section, dict)})


_NEEDED = {
    "model": "--set model.name=gpt",
    "cluster": "--set cluster.profile=8xh100-sxm",
    "training": "--set training.global_batch=256",
}
