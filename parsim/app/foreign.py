"""Files of other tools: a run folder written as one of theirs, and one of theirs read into a profile, a run file or a timeline.

Here are the values of the folder and of the command; `parsim.formats` makes files of them, and values of files.
"""

from __future__ import annotations

import re
import secrets
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.app.ask import ask, ask_again, simulate_prediction, whole, with_every_rank
from parsim.app.config import cluster_section, parse_config
from parsim.app.config_text import merge, parse_overrides
from parsim.app.doctor import warn
from parsim.app.launch import check_runnable, check_training, job_of, total_steps
from parsim.app.load import cluster_of
from parsim.app.prediction import Prediction, recipe_of
from parsim.app.question import question_of
from parsim.app.run_folder import RunFolder
from parsim.errors import ConfigError, ImportedFileError, ParsimError, PlanError, ProfileError, near_matches
from parsim.execute.checkpoint.checkpoint import Checkpoint, latest_checkpoint, load_state, restore_one_by_one
from parsim.execute.cuda.faults import visible_devices
from parsim.files import document_text, parse_toml, write_text_atomically
from parsim.formats.exports import EvaluatedStep, Exported, format_to_write
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
from parsim.formats.launch import LOOPBACK, PORT, LaunchFile, TrainedWeights
from parsim.formats.source import FileFormat, SourceFile, read_source
from parsim.model.build import build_module
from parsim.plans.plan import Plan
from parsim.timeline import Timeline

if TYPE_CHECKING:
    from torch import Tensor

BEST, LAST = "best", "last"
WEIGHTS = ("trained", "ema")
_INTERFACE = re.compile(r"[A-Za-z0-9_.:@-]{1,15}")


def export_folder(path: Path, *, format: str, out: Path | None = None, **options: Any) -> Exported:
    """Write a folder of `parsim run` or `parsim simulate --out` as a file of another tool.

    Args:
        path: of the folder. format: one of docs/export.md, or "package.module:ROW". out: the file, or the folder of several;
            None: the format's own name in the folder.
        options: of weights: checkpoint ("best" or "last"; None: the best if there is one), weights ("trained" or "ema").
            Of launch files: interface (None: the loopback, on one machine), nodes (None: as in the plan), port of the store on
            the machine of rank 0, checkpoint_every (steps; 0: at the end only; left out: about every minute).
    Returns: What was written, and what the format cannot express.
    Raises:
        ConfigError: an unknown format, an option of another one, no run folder, no checkpoint, or a plan that the format cannot
            express. PlanError: ranks that the machines do not divide, or several machines without an interface.
        MissingDependencyError: the format needs a package that is not installed.
    """
    row = format_to_write(format, options)
    folder, file = RunFolder(path), row.file
    value: object
    if row.writes == "recipe":
        config = folder.read_config()
        if not folder.plan.is_file():
            raise ConfigError(f"{folder.path} holds no {folder.plan.name}; simulate or run again")
        value = recipe_of(row.tool, config, Plan.load(folder.plan))
    elif row.writes == "step":
        prediction = ask_again(folder)
        was_run = folder.job.is_file() and folder.timeline.is_file()
        measured = Timeline.load(folder.timeline) if was_run else None
        value = EvaluatedStep(problem=prediction.problem, evaluation=prediction.evaluation, measured=measured)
    elif row.writes == "launch":
        value = _launch(folder, **options)
    else:
        value = _weights(folder, **options)
        file = file.replace("weights", "ema") if value.weights == "ema" else file
    assert row.write is not None
    exported: Exported = row.write(value, path / file if out is None else out)
    return exported


def _launch(
    folder: RunFolder,
    *,
    interface: str | None = None,
    nodes: int | None = None,
    port: int = PORT,
    checkpoint_every: int | None = None,
) -> LaunchFile:
    if interface is not None and not _INTERFACE.fullmatch(interface):
        raise ConfigError(
            f"interface = {interface!r} is not the name of a network interface, such as eth0; `ip link` lists them"
        )
    if not 1024 <= port <= 65534:
        raise ConfigError(f"port = {port}: give one from 1024 to 65534")
    prediction = with_every_rank(ask_again(folder))
    check_runnable(prediction, None)
    check_training(prediction.question, prediction.problem.model)
    machines = _machines(prediction, nodes)
    if interface is None and machines > 1:
        raise PlanError(f"{machines} machines need the interface over which they reach one another: --interface eth0")
    per_node = prediction.plan.world_size // machines
    gpus = [device.index for device in prediction.problem.cluster.devices[:per_node]]
    steps = total_steps(prediction.question)
    job = job_of(prediction, folder, steps, checkpoint_every=checkpoint_every, resume=True)
    job.save(folder.job)
    return LaunchFile(
        name=prediction.problem.model.name,
        job=folder.job.resolve(),
        nodes=machines,
        per_node=per_node,
        interface=interface or LOOPBACK,
        port=port,
        device=job.device,
        visible=visible_devices(gpus) if job.device == "cuda" else "",
        import_folder=str(prediction.question.model.import_folder or ""),
        token=secrets.token_hex(),
    )


def _machines(prediction: Prediction, nodes: int | None) -> int:
    """How many. Raises PlanError where the ranks do not divide by it, or lie otherwise on the cluster's nodes."""
    ranks = prediction.plan.world_size
    by_node = Counter(device.node for device in prediction.problem.cluster.devices[:ranks])
    count = len(by_node) if nodes is None else nodes
    if count < 1 or ranks % count:
        raise PlanError(f"{ranks} ranks cannot be divided evenly over {count} machines; give --nodes a divisor of {ranks}")
    if len(by_node) > 1 and (count != len(by_node) or len(set(by_node.values())) > 1):
        raise PlanError(
            f"the plan puts its ranks on {len(by_node)} machines, {dict(by_node)} by machine, and a launch file starts as many "
            f"on each; plan for all devices, or drop --nodes {count}"
        )
    return count


def _weights(folder: RunFolder, *, checkpoint: str | None = None, weights: str = "trained") -> TrainedWeights:
    """The weights of a checkpoint. The module is built anew, so its code must be trusted."""
    if weights not in WEIGHTS:
        raise ConfigError(f"weights {weights!r} are unknown{near_matches(weights, WEIGHTS)}")
    places = {BEST: folder.best, LAST: folder.checkpoints}
    if checkpoint is not None and checkpoint not in places:
        raise ConfigError(f"checkpoint {checkpoint!r} is unknown{near_matches(checkpoint, places)}")
    config = folder.read_config()
    damaged: list[str] = []
    for kind in (BEST, LAST) if checkpoint is None else (checkpoint,):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saved = latest_checkpoint(places[kind])
        damaged += [str(warning.message) for warning in caught]
        if saved is not None:
            for text in damaged:
                warn(text)
            tensors = state_dict_of(config.model_spec, saved, averaged=weights == "ema", seed=config.training.seed)
            return TrainedWeights(tensors=tensors, weights=weights, checkpoint=kind, step=saved.step, warnings=tuple(damaged))
    why = f" ({damaged[0]})" if damaged else ""
    best = "; a best one needs [training.evaluation]" if checkpoint == BEST else ""
    raise ConfigError(f"{folder.path} holds no {checkpoint or 'whole'} checkpoint{why}{best}; train with `parsim run` first")


def state_dict_of(spec: Any, saved: Checkpoint, *, averaged: bool, seed: int) -> Mapping[str, Tensor]:
    """The state_dict of the module with the checkpoint's weights, under every name that the module gives them.

    Parameters that the forward does not use are as `seed` initialises them.
    """
    import torch

    from parsim.execute.optimizer import EMA, averaged_state

    state = load_state(saved)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build_module(spec)
    if averaged:
        trained = {name for name, values in state.optimizer.items() if EMA in values}
        if not trained:
            raise ConfigError(f"{saved.folder} holds no averages of the weights; train with training.ema = {{ decay = 0.999 }}")
        state = averaged_state(state, trained)
    types = {value.dtype for value in state.weights.values() if value.is_floating_point()}
    if len(types) == 1 and types != {torch.float32}:
        module = module.to(types.pop())
    restore_one_by_one(dict(module.named_parameters()), state.weights)
    restore_one_by_one(dict(module.named_buffers()), state.buffers)
    return {
        name: value.detach().cpu().contiguous().clone()
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


# `parsim.import_file`: recognise a file, read it, and write the result.


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
    prediction = simulate_prediction(whole(ask(question_of(against))).prediction)
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
