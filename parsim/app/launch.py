"""From a prediction to processes on this machine: what can be run, the job, and the launch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from parsim.app.config import Question
from parsim.app.doctor import Say, warn
from parsim.app.load import is_saved_model
from parsim.app.prediction import Prediction
from parsim.app.run_folder import RUN, RunFolder, what_is_left, write_json
from parsim.app.training_checks import check_rounds
from parsim.errors import DoesNotFitError, ExecutionError, ModelError, OutOfMemoryError, PlanError, RankLostError
from parsim.execute.cuda.faults import visible_devices
from parsim.execute.cuda.gpu import check_gpus
from parsim.execute.job import EXECUTION, AdaptiveSpec, Job, RunSpec
from parsim.execute.processes.launch import HANG_S, launch
from parsim.execute.processes.machine import describe_environment, differences_from_here
from parsim.execute.processes.output import relayed
from parsim.files import make_private, read_json
from parsim.hardware.devices import DEVICE_KINDS
from parsim.model.catalogue.names import is_transformer
from parsim.model.formats import check_executable
from parsim.model.model import ADDED_UP, COUPLED, MIXING, Model
from parsim.model.spec import EXAMPLE
from parsim.plans.plan import Plan
from parsim.program.placed import PlanIndex
from parsim.units import format_bytes


def check_launchable(config: Question) -> None:
    """Raise PlanError for what no plan makes trainable here: several nodes (all processes are started on this machine), or keys
    that are simulated alone."""
    if config.cluster.nodes > 1:
        raise PlanError(
            f"cluster.nodes = {config.cluster.nodes}: only the processes of one node can be started from here. Set "
            "cluster.nodes = 1 to train, or use `parsim plan` and `parsim simulate`, which take any number of nodes"
        )
    _check_trainable(config)


def _check_trainable(config: Question) -> None:
    training = config.training
    if training.state_dtype or training.gradient_dtype:
        key = "state_dtype" if training.state_dtype else "gradient_dtype"
        raise PlanError(
            f"training.{key} = {getattr(training, key)!r} can be planned, and not run: torch's optimizers keep state and "
            f"gradients in the width of the weights; drop {key} to train"
        )
    if training.tune is not None and training.tune.storage is not None:
        raise PlanError(
            f"training.tune keeps frozen weights in {training.tune.storage}, which can be planned, and not run: torch has no "
            f'such layers of its own; set training.tune = "lora:r={training.tune.rank}" to train'
        )
    if config.software.convolution is not None:
        raise PlanError(
            "[software] says how other software would run this model, and parsim runs it as eager PyTorch does; drop the table "
            "to train, or keep it to plan"
        )


def check_runnable(asked: Prediction, nproc: int | None) -> None:
    """Raise unless the plan fits its devices and takes `nproc` processes (None: as many as it needs).

    Raises: DoesNotFitError, ExecutionError, ModelError, PlanError.
    """
    plan = asked.evaluation.result.plan
    if not plan.executable:
        raise PlanError(
            f"the plan has {plan.not_executable}, which parsim simulates and the executor cannot run (executable: false in its "
            f"JSON); leave {plan.not_executable} out of the plan to train with it"
        )
    over = [memory for memory in asked.evaluation.memory if not memory.fits]
    if over:
        worst = max(over, key=lambda memory: memory.excess_bytes)
        raise DoesNotFitError(
            f"the plan ({plan.summary()}) cannot fit: {worst.describe()}; use more devices or microbatches, a smaller "
            "training.global_batch, or another plan.strategy"
        )
    name = asked.question.model.name
    if asked.question.source.form != "name":
        what = "an nn.Module" if asked.question.source.form == "module" else "a Model"
        raise ModelError(
            f"{name} was given as {what}: it can be planned and simulated, but every process of a run must build its own. "
            'Put the code that makes it into a function and give "package.module:function" as the model'
        )
    if is_transformer(name):
        raise ModelError(
            f"{name} is planned and simulated from its sizes, and parsim holds no module of it to train; give the path of its "
            "Hugging Face config.json"
        )
    if is_saved_model(Path(name)):
        raise ModelError(
            f"{name} is a saved Model: it can be planned and simulated, but holds no module to train; name a model of the zoo, "
            "package.module:factory or a Hugging Face config.json"
        )
    kind = device_kind(asked)
    if not DEVICE_KINDS[kind].backend:
        raise PlanError(
            f"profile {asked.problem.cluster.profile.name} is of devices of kind {kind!r}, which are planned and simulated "
            f"only; to train, use a profile of kind {' or '.join(name for name, row in DEVICE_KINDS.items() if row.backend)}"
        )
    device, weight_bytes = asked.problem.cluster.devices[0].type, asked.problem.model.parameter_bytes
    follows = asked.question.model_spec.control_flow == EXAMPLE
    if kind == "cuda" and follows and weight_bytes + device.context_bytes > device.memory_bytes:
        raise DoesNotFitError(
            f"the plan fits, but every process follows the example of control_flow = {EXAMPLE!r} on its GPU with all "
            f"{format_bytes(weight_bytes)} of weights, where {device.name} has {format_bytes(device.memory_bytes)}. Write the "
            "model without code that depends on the values of tensors; then each process puts only its own part there"
        )
    if nproc is not None and nproc != plan.world_size:
        more = "more" if nproc > plan.world_size else "fewer"
        raise PlanError(
            f"--nproc {nproc} is {more} processes than the plan has ranks ({plan.world_size}: {plan.summary()}); "
            f"use --nproc {plan.world_size}, or set cluster.devices = {nproc} and plan again"
        )
    training = asked.question.training
    if training.ema is not None and plan.synchronisation.mixes:
        raise PlanError(
            f"training.ema averages weights over steps, and under synchronisation {plan.synchronisation} every replica has its "
            "own; drop training.ema, or plan.synchronisation"
        )
    check_rounds(plan, training.precision, evaluates=training.evaluation is not None)
    check_loss(asked.problem.model, plan, allowed=training.allow_coupled_loss)
    check_executable(training.precision, training.dtype, kind)
    _check_trainable(asked.question)


def check_loss(model: Model, plan: Plan, *, allowed: bool) -> None:
    """Raise PlanError for a plan that divides the batch of a loss that is no sum over samples, unless the user allows it."""
    smallest = min(PlanIndex(plan, model).local_samples(component.name) for component in model.components)
    if model.loss_form not in (COUPLED, ADDED_UP, MIXING) or allowed or smallest == plan.global_batch:
        return
    way, loss = "plan with strategy = 'single'", f"the loss of {model.name} ({model.loss})"
    if model.loss_form == ADDED_UP:
        way, kind = "return the mean or one number per sample", f"{loss} is a scalar that adds up the samples of a batch"
    elif model.loss_form == MIXING:
        kind = f"{model.name} mixes the samples of a batch before its loss ({model.loss})"
    else:
        kind = f"{loss} is not a sum over samples"
    raise PlanError(
        f"{kind}. The plan ({plan.summary()}) takes it of {smallest} of "
        f"{plan.global_batch} samples at a time, which changes the loss; {way}, or set training.allow_coupled_loss = true to "
        "train by it"
    )


def run_spec(asked: Prediction, name: str, model_path: Path) -> RunSpec:
    """One plan as the executor takes it."""
    training = asked.question.training
    return RunSpec(
        name=name,
        model=asked.question.model_spec,
        model_path=str(model_path.resolve()),
        plan=asked.evaluation.result.plan,
        optimizer=training.optimizer,
        learning_rate=training.resolved_learning_rate,
        dataset=training.dataset,
        data_root=training.data_root,
        dtype=training.dtype,
        seed=training.seed,
        shards=training.shards,
        precision=training.precision,
        master_weights=training.keeps_master_weights,
        recipe=training.recipe,
        workers=training.workers,
        pin_memory=training.pin_memory,
        predicted_step_s=asked.evaluation.result.step_s.median,
        predicted_memory=tuple(memory.tensor_lines for memory in asked.evaluation.memory),
    )


def job_of(
    asked: Prediction,
    folder: RunFolder,
    steps: int,
    *,
    mode: Literal["train", "measure"] = "train",
    rounds: int = 1,
    checkpoint_every: int | None = 0,
    resume: bool = False,
    adaptive: AdaptiveSpec | None = None,
) -> Job:
    """The job of one plan in a folder; options as in `Job`."""
    return Job(
        output=str(folder.path.resolve()),
        mode=mode,
        runs=(run_spec(asked, RUN, folder.model),),
        steps=steps,
        rounds=rounds,
        warmup_steps=min(3, max(0, steps - 1)) if mode == "train" else 2,
        device=device_kind(asked),
        checkpoint_every=checkpoint_every,
        resume=resume,
        adaptive=adaptive,
    )


def device_kind(asked: Prediction) -> str:
    """A row of DEVICE_KINDS, as the profile's first device says."""
    return asked.problem.cluster.devices[0].type.kind


def warn_of_profile(asked: Prediction) -> list[str]:
    """Changes of the machine since the profile was measured, which spoil the comparison of a run; printed on stderr, too."""
    warnings = list(differences_from_here(asked.problem.cluster.profile))
    for warning in warnings:
        warn(warning)
    return warnings


def launch_job(job: Job, folder: RunFolder, say: Say, asked: Prediction | None = None, *, hang_s: float = HANG_S) -> list[str]:
    """Save the job beside its run and launch it; environment.json says in which numbers it computed.

    Args:
        asked: whose search may know a plan that needs less memory, if there is too little.
        hang_s: a rank that is stopped, or does nothing, for longer ends the run.

    Returns:
        What the ranks warned of, each warning once; they are printed on stderr, too.

    Raises ExecutionError, with the last checkpoint and how to go on; nothing is left running.
    """
    if job.device == "cuda":
        check_gpus(job.world_size, measures=job.mode == "measure")
    make_private(folder.path)
    job.save(folder.job)
    environment = describe_environment()
    write_json(folder.environment, environment)
    warnings: list[str] = []
    env: dict[str, str] = {}
    if job.device == "cuda" and asked is not None:  # the GPUs that the plan uses, where they are not the first ones
        gpus = [device.index for device in asked.problem.cluster.devices[: job.world_size]]
        if visible := visible_devices(gpus, os.environ.get("CUDA_VISIBLE_DEVICES", "")):
            env["CUDA_VISIBLE_DEVICES"] = visible

    def on_warning(text: str) -> None:
        warnings.append(text)
        warn(text)

    try:
        launch(folder.job, job.world_size, on_line=relayed(say, on_warning), hang_s=hang_s, env=env)
    except ExecutionError as error:
        hints = [nearest_that_fits(asked)] if isinstance(error, OutOfMemoryError) and asked is not None else []
        hints += [what_is_left(folder, job.steps)] if job.mode == "train" else []
        reason = str(error) if str(error).endswith("?") else f"{str(error).rstrip('.')}."
        text = " ".join([reason, *filter(None, hints)])
        raise (error.with_text(text) if isinstance(error, RankLostError) else type(error)(text)) from error
    execution = read_json(Path(job.output) / EXECUTION)
    write_json(folder.environment, {**environment, "execution": execution})
    return warnings


def nearest_that_fits(asked: Prediction) -> str:
    """The fastest plan of the search that needs less memory than the one that ran out of it, in words; "" without a search."""
    if not asked.among:
        return ""
    failed = max(asked.evaluation.result.peak_memory_bytes)
    results = [evaluation.result for evaluation in asked.among]
    smaller = [result for result in results if result.fits and max(result.peak_memory_bytes) < failed]
    if not smaller:
        return "None of the plans that were compared needs less memory."
    best = min(smaller, key=lambda result: result.step_s.median)
    slower = best.step_s.median / asked.evaluation.result.step_s.median - 1
    return (
        f"The nearest plan that needs less is {best.plan.summary()}: {format_bytes(failed - max(best.peak_memory_bytes))} less "
        f"per rank, predicted {slower:+.0%} in step time; set plan.strategy = {best.strategy!r}."
    )
