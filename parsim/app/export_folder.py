"""Export a run folder as a file of another tool: here the values of the folder, in `parsim.formats` the files made of them."""

from __future__ import annotations

import re
import secrets
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.app.ask import with_every_rank
from parsim.app.doctor import warn
from parsim.app.judging import ask_again
from parsim.app.launch import check_runnable, job_of
from parsim.app.prediction import Prediction, recipe_of
from parsim.app.run_folder import RunFolder
from parsim.app.training_checks import check_training, total_steps
from parsim.errors import ConfigError, PlanError, near_matches
from parsim.execute.checkpoint.checkpoint import Checkpoint, latest_checkpoint, load_state, restore_one_by_one
from parsim.execute.cuda.faults import visible_devices
from parsim.formats.exports import EvaluatedStep, Exported, format_to_write
from parsim.formats.launch import LOOPBACK, PORT, LaunchFile, TrainedWeights
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

    Returns:
        What was written, and what the format cannot express.

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
    """What the launch file of a folder says; the job that its ranks read is written."""
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
