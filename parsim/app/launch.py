"""From a prediction to processes on this machine: whether the training can run, the job, and its launch."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from parsim.app.config import Question
from parsim.app.doctor import Say, progress, warn
from parsim.app.load import is_saved_model
from parsim.app.prediction import Prediction
from parsim.app.run_folder import RUN, RunFolder, what_is_left, write_json
from parsim.costs.loading import MeasuredLoading, OwnLoading, UnmeasuredLoading
from parsim.data import DATASETS, dataset_for, target_of
from parsim.data.samples import Order, Samples, check_images, order_of, train_and_validation
from parsim.data.shards import training_order
from parsim.errors import (
    ConfigError,
    DoesNotFitError,
    ExecutionError,
    MissingDependencyError,
    ModelError,
    OutOfMemoryError,
    ParsimError,
    PlanError,
    RankLostError,
)
from parsim.execute.cuda.faults import visible_devices
from parsim.execute.cuda.gpu import check_gpus
from parsim.execute.job import EXECUTION, AdaptiveSpec, Job, RunSpec
from parsim.execute.processes.launch import HANG_S, launch
from parsim.execute.processes.machine import describe_environment, differences_from_here, is_from_here
from parsim.execute.processes.output import relayed
from parsim.execute.processes.setup import available_cores
from parsim.files import make_private, read_json
from parsim.hardware.cluster import Cluster
from parsim.hardware.devices import DEVICE_KINDS
from parsim.model.build import build_fake, check_real, interface_of
from parsim.model.catalogue.names import is_transformer
from parsim.model.formats import check_executable, number_format
from parsim.model.model import ADDED_UP, COUPLED, MIXING, Model
from parsim.model.objective import CLASSES
from parsim.model.spec import EXAMPLE
from parsim.plans.plan import Plan
from parsim.predict.evaluate import evaluate
from parsim.program.placed import PlanIndex
from parsim.units import format_bytes

if TYPE_CHECKING:
    from parsim.execute.measurement import Measurement


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

    Args: asked: whose search may know a plan that needs less memory, if there is too little. hang_s: a rank that is stopped, or
        does nothing, for longer ends the run.
    Returns: What the ranks warned of, each warning once; they are printed on stderr, too.

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


# What only the module, the data and torch can tell: data, schedule, metrics.


def check_training(config: Question, model: Model) -> None:
    """Look at what only the module, the data and torch can tell.

    Raises:
        DataError: data that do not suit the model or the batch. ConfigError: torch refuses the schedule or an argument of the
            optimizer, or a pattern of no_weight_decay matches nothing. ModelError: complex parameters.
            MissingDependencyError: TensorBoard is not installed.
    """
    from parsim.execute.optimizer import check_exempt, check_schedule, check_states

    training, recipe = config.training, config.training.recipe
    order = _order(config)
    check_real(build_fake(config.model_spec))
    check_states(training.optimizer, recipe)
    for group in recipe.update_groups:
        check_states(group.optimizer, recipe.of(group.name))
    check_exempt((parameter.name for parameter in model.parameters), recipe.no_weight_decay)
    if recipe.evaluation is not None:
        _check_metrics(config, recipe.evaluation.metrics)
        if not recipe.evaluation.every:
            order.steps_per_epoch  # noqa: B018 - an iterable dataset without a length has no epochs
    steps = total_steps(config)
    if recipe.tensorboard:
        check_tensorboard()
    check_schedule(training.optimizer, training.resolved_learning_rate, recipe, steps=steps, order=order)


SHIPPED_IMAGES = ("digits", "cifar10", "cifar100")
"""Datasets that hold images and a class of each."""


def check_images_suit(config: Question) -> None:
    """Raise DataError for a shipped set of images that does not suit the model: found before this machine is calibrated."""
    if config.training.dataset not in SHIPPED_IMAGES:
        return
    try:
        target = target_of(config.model_spec)
    except ModelError:  # told by whoever loads the model
        return
    check_images(config.training.dataset, target)


def check_tensorboard() -> None:
    """Raise MissingDependencyError where torch cannot write for TensorBoard."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "training.tensorboard = true needs the package tensorboard: pip install 'parsim[tensorboard]'; or leave it out: "
            "metrics.jsonl in the run folder has the same numbers"
        ) from error


def _check_metrics(config: Question, metrics: tuple[str, ...]) -> None:
    interface = interface_of(config.model_spec)
    if metrics and interface.target is None:
        raise ConfigError(
            f"training.evaluation.metrics = {list(metrics)}: {config.model.name} takes its targets itself, so a metric cannot "
            "compare with them; drop metrics, and follow the loss"
        )
    of_classes = [name for name in metrics if name in ("accuracy", "perplexity", "mean_iou")]
    if of_classes and interface.objective.row.targets != CLASSES:
        raise ConfigError(
            f"training.evaluation.metrics: {of_classes[0]} compares classes, and {config.model.name} is trained by "
            f"{interface.objective.loss}; take mean_absolute_error, or a function of your own"
        )


def total_steps(config: Question) -> int:
    """training.steps, or as many as training.epochs takes."""
    if config.training.steps is not None:
        return config.training.steps
    return config.training.epochs * steps_per_epoch(config)


def samples_not_taken(config: Question, steps: int) -> str:
    """A warning for whoever gives the samples of a whole training and expects a run of so many; "" where there is no doubt."""
    training = config.training
    if training.samples is None or training.steps is not None:
        return ""
    return (
        f"training.samples = {training.samples:,.0f} is for the time and price of a whole training. This run takes {steps} "
        f"steps of {training.global_batch} samples, by training.epochs; set training.steps for another number"
    )


def steps_per_epoch(config: Question) -> int:
    """Steps of one pass over the data."""
    return _order(config).steps_per_epoch


def _order(config: Question) -> Order:
    """The order in which training reads its samples, the first of which is looked at."""
    data, held_out, order = training_data(config)
    for samples, first in ((held_out, 0), (data, int(order.indices(0)[0]))):
        if samples is not None:
            samples.values(np.array([first], dtype=np.int64))
    return order


def training_data(config: Question) -> tuple[Samples, Samples | None, Order]:
    """The samples of the training, those that it validates with (None: it does not), and the order in which it reads.

    Raises DataError: data that do not suit the model or the batch.
    """
    training = config.training

    def load(split: str) -> Samples:
        return dataset_for(config.model_spec, training.dataset, root=training.data_root, split=split, seed=training.seed)

    data: Samples
    held_out: Samples | None = None
    if training.evaluation is None:
        data = load("train")
    else:
        data, held_out = train_and_validation(load, training.evaluation.validation, training.seed)
    return data, held_out, order_of(data, training.global_batch, training.seed)


def check_shards(config: Question, plan: Plan) -> None:
    """Raise DataError where the samples cannot be dealt to the replicas of the plan as training.shards asks."""
    if config.training.shards is not None:
        data, _, _ = training_data(config)
        training_order(data, plan.global_batch, config.training.seed, shards=config.training.shards, replicas=plan.mesh.dp)


# Real runs of relaxed plans: what the executor cannot do, and how measured steps are averaged.


def check_rounds(plan: Plan, precision: str, *, evaluates: bool = False) -> None:
    """Relaxed replicas and stages hold their weights in the type in which they are updated, and agree on no loss scale.

    Raises PlanError: the plan is relaxed, and the precision keeps other copies of the weights or a loss scale; or `evaluates`
    asks for the score of mean weights that no rank has whole.
    """
    if evaluates and plan.synchronisation.mixes and plan.mesh.pp * plan.mesh.tp > 1:
        raise PlanError(
            f"[training.evaluation] scores the mean weights of the replicas, and with mesh {plan.mesh} no rank has them whole; "
            "drop training.evaluation, or use a mesh of dp alone"
        )
    kind = number_format(precision)
    if plan.synchronisation.backward == "fresh" and kind.autocast:
        raise PlanError(
            f'synchronisation.backward = "fresh" runs backward with the weights of now, and in precision {precision!r} '
            'autograd keeps casts of those of the forward; use fp32, or "stash" or "replay"'
        )
    if plan.synchronisation.is_relaxed and (kind.scales_loss or kind.weight_bytes < 4):
        raise PlanError(
            f"synchronisation {plan.synchronisation} is run in fp32, tf32 and amp_bf16. training.precision = {precision!r} "
            "keeps a loss scale, or copies of the weights that rounds and stashes do not know; change one of them"
        )


def check_adaptive(plan: Plan, shards: str | None = None) -> None:
    """Raise PlanError for a plan that the adaptive controller cannot change on the way, or shards that another would change."""
    if shards is not None:
        raise PlanError(
            f"--adaptive may change the replicas, and training.shards = {shards!r} deals samples to those there are; drop one"
        )
    if plan.synchronisation.is_relaxed:
        raise PlanError(
            f"--adaptive changes plans of synchronous training, and this one has synchronisation {plan.synchronisation}; "
            "drop --adaptive, or plan.synchronisation"
        )


def steps_per_round(plan: Plan, usual: int) -> int:
    """Steps of a validation that are timed together: at least `usual`, and whole cycles of a plan (on one graph) whose steps
    differ."""
    rule = plan.synchronisation
    if not rule.mixes:
        return usual
    cycle = len(rule.cycle(plan.mesh.dp)) * rule.round_steps
    return -(-usual // cycle) * cycle


def changes_graph(plan: Plan) -> bool:
    """Whether replicas gossip on one graph after another (Ada): the predicted step is a mean over all of them."""
    rule = plan.synchronisation
    return bool(rule.graph) and len(rule.mixing.phases(plan.mesh.dp)) > 1


def on_first_graph(plan: Plan) -> Plan:
    """The plan on its first graph alone, for a plan that changes it; any other as it is."""
    if not changes_graph(plan):
        return plan
    rule = plan.synchronisation
    return replace(plan, synchronisation=replace(rule, graph=rule.mixing.phases(plan.mesh.dp)[0][1]))


def rounds_in_words(plan: Plan, steps: int) -> list[str]:
    """What a training of so many steps leaves of the rounds of its plan, where that is not what the plan says."""
    rule, warnings = plan.synchronisation, []
    if rule.mixes and steps < rule.period_steps:
        warnings.append(
            f"plan.synchronisation.period_steps = {rule.period_steps} is beyond the {steps} steps of this training: the "
            f"replicas never meet, and checkpoints hold the mean of {plan.mesh.dp} separate trainings; set {steps} at most"
        )
    if changes_graph(plan) and not rule.is_closed_loop:
        all_steps = rule.period_steps * sum(rounds for rounds, _ in rule.mixing.phases(plan.mesh.dp))
        if steps != all_steps:
            warnings.append(
                f"the predicted step is the mean over the {all_steps} steps that {rule.graph} has; this training makes "
                f"{steps}, with the graphs in other shares, so its mean step is another"
            )
    return warnings


def whole_periods(seen: Measurement, plan: Plan) -> tuple[int, int]:
    """How a training, whose steps were timed one by one, is divided into periods, so that every round has all its local steps.

    Of decoupled stages those steps are left out in which some stage had nothing to work on yet.

    Returns: `left_out` and `together` of a Measurement.
    """
    rule, rounds = plan.synchronisation, min(len(record.rounds) for record in seen.ranks)
    if seen.steps != rounds:
        return 0, 1
    filling = rule.steps_to_fill(plan.mesh.pp) if rule.is_stale else 0
    filling = filling if rounds > filling else 0
    period = max(1, min(rule.period_steps, rounds - filling))
    return filling + (rounds - filling) % period, period


# What loading costs a question: timed on this machine where its dataset is the user's own.
#
# Shipped datasets are priced by the profile: `parsim calibrate` times them.


def loading_of(question: Question, cluster: Cluster, *, runs_here: bool) -> OwnLoading | None:
    """Time the question's dataset, if it is the user's own and this is the machine that is asked about.

    Args: cluster: of the question. runs_here: it will run on this machine, whatever profile its cluster has.
    """
    if not DATASETS[question.training.dataset].is_own:
        return None
    if question.source.form != "name":
        return UnmeasuredLoading(reason="the model was given as a value, and data are read for one that a run can build")
    if not runs_here and not (cluster.network is None and is_from_here(cluster.profile)):
        return UnmeasuredLoading(reason=f"profile {cluster.profile.name} is of another machine")
    return measured_loading(question, cluster)


def with_loading(asked: Prediction) -> Prediction:
    """The prediction of a plan that will run here, with its dataset timed where it was not yet."""
    config, problem, loading = asked.question, asked.problem, asked.problem.loading
    is_measured = isinstance(loading, MeasuredLoading) or (loading is not None and loading.tried)
    if is_measured or not DATASETS[config.training.dataset].is_own:
        return asked
    problem = replace(problem, loading=measured_loading(config, problem.cluster))
    result = asked.evaluation.result
    return replace(asked, problem=problem, evaluation=evaluate(problem, result.plan, reason=result.reason))


def measured_loading(config: Question, cluster: Cluster) -> OwnLoading:
    """Read batches of the dataset as the ranks will: one process per rank and core, or as many with their workers."""
    if importlib.util.find_spec("torch") is None:
        return UnmeasuredLoading(reason="torch is not installed here")
    import torch

    from parsim.execute.load_timing import ReaderRequest, timed_loading

    training = config.training
    request = ReaderRequest(
        load=lambda: training_data(config)[::2],
        dtype=getattr(torch, training.dtype),
        global_batch=training.global_batch,
        readers=max(1, min(cluster.size, len(available_cores()), training.global_batch)),
        workers=training.workers,
        device=cluster.devices[0].type.kind,
    )
    with progress(f"Timing the loading of {training.dataset}"):
        try:
            return timed_loading(request)
        except ParsimError as error:
            return UnmeasuredLoading(reason=str(error), tried=True)
