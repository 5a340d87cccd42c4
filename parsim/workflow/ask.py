"""The way from a run file to an answer and back: ask, choose, run for real, compare. Commands only print what these return."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parsim.errors import ConfigError, DoesNotFitError, ExecutionError, ModelError, OutOfMemoryError, PlanError, RankLostError
from parsim.execute.cuda.faults import visible_devices
from parsim.execute.cuda.rank_gpu import check_gpus
from parsim.execute.job import EXECUTION, Job, RunSpec
from parsim.execute.processes.environment import describe_environment
from parsim.execute.processes.launch import HANG_S, launch
from parsim.execute.processes.progress import relayed
from parsim.execute.processes.same_machine import differences_from_here
from parsim.files import read_json
from parsim.graph.plan_index import PlanIndex
from parsim.hardware.device_kinds import DEVICE_KINDS
from parsim.hardware.profile import Profile
from parsim.hardware.speed_factor import SpeedFactor, speed_beside
from parsim.model.model import ADDED_UP, COUPLED, MIXING, Model
from parsim.model.named.names import is_transformer
from parsim.model.number_formats import check_executable
from parsim.model.spec import EXAMPLE
from parsim.plans.plan import Plan
from parsim.predict.evaluate import Evaluation, evaluate, sampled_durations_s
from parsim.predict.planning_problem import PlanningProblem
from parsim.predict.speed import step_at_speed
from parsim.report.compare import Comparison, PaceComparison, compare, kind_intervals_s, relative_error
from parsim.report.tables import format_error
from parsim.units import format_bytes, format_seconds
from parsim.workflow.config import RunConfig
from parsim.workflow.folders.resuming import what_is_left
from parsim.workflow.folders.run_folder import RunFolder, write_json
from parsim.workflow.load import cluster_of, fixed_plan, is_saved_model, problem_of, search_plans
from parsim.workflow.progress import Say, warn
from parsim.workflow.public.answer import Answer
from parsim.workflow.public.prediction import Prediction
from parsim.workflow.question import Question, taken_defaults
from parsim.workflow.relaxed.running import check_rounds, whole_periods
from parsim.workflow.this_machine import on_this_machine
from parsim.workflow.training.dataset_loading import loading_of

if TYPE_CHECKING:
    from parsim.execute.records.measurement import Measurement


MOST_BLOCKS = 20
"""Into so many parts a training is cut for its A/A floor: steps that follow one another share their disturbances."""


def ask(question: Question, *, top: int | None = None, runs_here: bool = False) -> Answer:
    """Price the plan that the question fixes, or search the family that it names.

    Args:
        top: keep so many plans over all families instead of the best of each.
        runs_here: the plan will run on this machine, whatever profile it is priced by.

    Reading a dataset of the user's own is timed first (`parsim.workflow.training.dataset_loading`).

    Where no plan fits, the evaluation is that of the fastest that does not: `run` refuses it, everything else shows it.

    Raises: ConfigError, ModelError, ProfileError, PlanError, CostError, ScheduleError.
    """
    question = replace(question, config=on_this_machine(question.config, question.model))
    problem = problem_of(question.config, model=question.model, cluster=question.cluster)
    problem = replace(problem, loading=loading_of(question, problem.cluster, runs_here=runs_here))
    return answer_of(question.on_devices(problem.cluster.size), problem, top=top)


def answer_of(question: Question, problem: PlanningProblem, *, top: int | None = None) -> Answer:
    """The same with the model and the cluster at hand.

    Args:
        question: of the config that counts. problem: loaded from it. top: as `ask`.
    """
    plan = fixed_plan(problem, question.config)
    if plan is not None:
        evaluation = evaluate(problem, plan, reason="the plan that was asked for")
        return Answer(question=question, problem=problem, evaluation=evaluation, search=None)
    found = search_plans(problem, question.config, top=top)
    return Answer(question=question, problem=problem, evaluation=found.chosen or found.candidates[0], search=found)


def answer(config: RunConfig) -> Answer:
    """The same for a config alone."""
    return ask(Question(config=config, assumed=taken_defaults(config), name=config.model.name))


def check_launchable(config: RunConfig) -> None:
    """Raise PlanError for a cluster of several nodes: all processes are started on this machine."""
    if config.cluster.nodes > 1:
        raise PlanError(
            f"cluster.nodes = {config.cluster.nodes}: only the processes of one node can be started from here. Set "
            "cluster.nodes = 1 to train, or use `parsim plan` and `parsim simulate`, which take any number of nodes"
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
    if asked.given != "name":
        what = "an nn.Module" if asked.given == "module" else "a Model"
        raise ModelError(
            f"{asked.config.model.name} was given as {what}: it can be planned and simulated, but every process of a run must "
            'build its own. Put the code that makes it into a function and give "package.module:function" as the model'
        )
    if is_transformer(asked.config.model.name):
        raise ModelError(
            f"{asked.config.model.name} is planned and simulated from its sizes, and parsim holds no module of it to train; "
            "give the path of its Hugging Face config.json"
        )
    if is_saved_model(Path(asked.config.model.name)):
        raise ModelError(
            f"{asked.config.model.name} is a saved Model: it can be planned and simulated, but holds no module to train; "
            "name a model of the zoo, package.module:factory or a Hugging Face config.json"
        )
    kind = device_kind(asked)
    if not DEVICE_KINDS[kind].backend:
        raise PlanError(
            f"profile {asked.problem.cluster.profile.name} is of devices of kind {kind!r}, which are planned and simulated "
            f"only; to train, use a profile of kind {' or '.join(name for name, row in DEVICE_KINDS.items() if row.backend)}"
        )
    _check_building(asked, kind)
    if nproc is not None and nproc != plan.world_size:
        more = "more" if nproc > plan.world_size else "fewer"
        raise PlanError(
            f"--nproc {nproc} is {more} processes than the plan has ranks ({plan.world_size}: {plan.summary()}); "
            f"use --nproc {plan.world_size}, or set cluster.devices = {nproc} and plan again"
        )
    training = asked.config.training
    if training.ema is not None and plan.synchronisation.mixes:
        raise PlanError(
            f"training.ema averages weights over steps, and under synchronisation {plan.synchronisation} every replica has its "
            "own; drop training.ema, or plan.synchronisation"
        )
    check_rounds(plan, training.precision, evaluates=training.evaluation is not None)
    check_loss(asked.problem.model, plan, allowed=training.allow_coupled_loss)
    check_executable(training.precision, training.dtype, device_kind(asked))


def check_loss(model: Model, plan: Plan, *, allowed: bool) -> None:
    """A loss that is not a sum over samples, or a module that mixes them, trains on the whole batch at once, unless the user
    allows another.

    Raises PlanError with how the plan divides the batch.
    """
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


def _check_building(asked: Prediction, kind: str) -> None:
    """Raise DoesNotFitError where an example cannot be followed on a GPU: each process computes it there with all weights."""
    device = asked.problem.cluster.devices[0].type
    whole = asked.problem.model.parameter_bytes
    follows = asked.config.model_spec.control_flow == EXAMPLE
    if kind == "cuda" and follows and whole + device.context_bytes > device.memory_bytes:
        raise DoesNotFitError(
            f"the plan fits, but every process follows the example of control_flow = {EXAMPLE!r} on its GPU with all "
            f"{format_bytes(whole)} of weights, where {device.name} has {format_bytes(device.memory_bytes)}. Write the model "
            "without code that depends on the values of tensors; then each process puts only its own part there"
        )


def with_every_rank(asked: Prediction) -> Prediction:
    """The prediction with every rank simulated, because a measurement has every rank and is compared task by task."""
    return replace(asked, evaluation=every_rank(asked.problem, asked.evaluation))


def every_rank(problem: PlanningProblem, evaluation: Evaluation) -> Evaluation:
    """The evaluation with every rank simulated, for whoever shows or compares its timeline."""
    if not evaluation.folding.is_folded:
        return evaluation
    return evaluate(problem, evaluation.result.plan, reason=evaluation.result.reason, fold=False)


def run_spec(asked: Prediction, name: str, model_path: Path) -> RunSpec:
    """The answer's plan as the executor takes it."""
    training = asked.config.training
    return RunSpec(
        name=name,
        model=asked.config.model_spec,
        model_path=str(model_path.resolve()),
        plan=asked.evaluation.result.plan,
        optimizer=training.optimizer,
        learning_rate=training.resolved_learning_rate,
        dataset=training.dataset,
        data_root=training.data_root,
        dtype=training.dtype,
        seed=training.seed,
        precision=training.precision,
        master_weights=training.keeps_master_weights,
        recipe=training.recipe,
        workers=training.workers,
        pin_memory=training.pin_memory,
        predicted_step_s=asked.evaluation.result.step_s.median,
        predicted_memory=tuple(memory.tensor_lines for memory in asked.evaluation.memory),
    )


def device_kind(asked: Prediction) -> str:
    """A row of DEVICE_KINDS, as the profile's first device says."""
    return asked.problem.cluster.devices[0].type.kind


def warn_of_profile(asked: Prediction) -> list[str]:
    """Changes of the machine since the profile was measured, also printed on stderr, because the run is compared with its
    predictions.
    """
    warnings = differences_from_here(asked.problem.cluster.profile)
    for warning in warnings:
        warn(warning)
    return list(warnings)


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
    folder.path.mkdir(parents=True, exist_ok=True)
    job.save(folder.job)
    environment = describe_environment()
    write_json(folder.environment, environment)
    warnings: list[str] = []

    def told(text: str) -> None:
        warnings.append(text)
        warn(text)

    trains = job.mode == "train"
    try:
        launch(folder.job, job.world_size, on_line=relayed(say, told), hang_s=hang_s, env=_visible(job, asked))
    except ExecutionError as error:
        hints = [nearest_that_fits(asked)] if isinstance(error, OutOfMemoryError) and asked is not None else []
        hints += [what_is_left(folder, job.steps)] if trains else []
        said = str(error)
        text = " ".join([said if said.endswith("?") else f"{said.rstrip('.')}.", *filter(None, hints)])
        raise (error.with_text(text) if isinstance(error, RankLostError) else type(error)(text)) from error
    execution = read_json(Path(job.output) / EXECUTION)
    write_json(folder.environment, {**environment, "execution": execution})
    return warnings


def _visible(job: Job, asked: Prediction | None) -> dict[str, str]:
    """On GPUs: those that the plan uses, where they are not the first ones."""
    if job.device != "cuda" or asked is None:
        return {}
    wanted = [device.index for device in asked.problem.cluster.devices[: job.world_size]]
    found = visible_devices(wanted, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return {"CUDA_VISIBLE_DEVICES": found} if found else {}


def levels_of(asked: Prediction, seen: Measurement) -> list[dict[str, Any]]:
    """Memory of every rank as several parties counted it, beside what was predicted of it (`parsim.report.memory_levels`)."""
    from parsim.report.memory_levels import memory_levels

    return [row.to_dict() for row in memory_levels(asked.evaluation.memory, seen.memory)]


def nearest_that_fits(asked: Prediction) -> str:
    """The fastest plan of the search that needs less memory than the one that ran out of it, in words; "" without a search."""
    if not asked.among:
        return ""
    failed = max(asked.evaluation.result.peak_memory_bytes)
    smaller = [entry.result for entry in asked.among if entry.result.fits and max(entry.result.peak_memory_bytes) < failed]
    if not smaller:
        return "None of the plans that were compared needs less memory."
    best = min(smaller, key=lambda result: result.step_s.median)
    slower = best.step_s.median / asked.evaluation.result.step_s.median - 1
    return (
        f"The nearest plan that needs less is {best.plan.summary()}: {format_bytes(failed - max(best.peak_memory_bytes))} less "
        f"per rank, predicted {slower:+.0%} in step time; set plan.strategy = {best.strategy!r}."
    )


def measured(folder: RunFolder, run: str, evaluation: Evaluation) -> Measurement:
    """What the ranks of one run of the folder's job wrote down."""
    from parsim.execute.records.measurement import load_measurement

    found = load_measurement(folder.records(run), evaluation.graph)
    return replace(found, step_s=whole_periods(found, evaluation.result.plan))


def judge(problem: PlanningProblem, evaluation: Evaluation, seen: Measurement) -> Comparison:
    """Predicted against measured, task by task; of peak memory what lies in tensors, which is what can be measured alike.

    Raises: ExecutionError if no step was recorded.
    """
    if not seen.timelines or not len(seen.step_s):
        raise ExecutionError("the run recorded no step to compare; train for at least one step after the warm-up")
    durations = sampled_durations_s(evaluation)
    found = evaluation.result.interval_correction
    comparison = compare(
        evaluation.graph,
        evaluation.timeline,
        seen.timelines,
        predicted_step=evaluation.result.step_s,
        measured_step=[float(value) for value in seen.step_s],
        predicted_memory_bytes=[sum(memory.tensor_lines.values()) for memory in evaluation.memory],
        measured_memory_bytes=seen.peak_bytes if all(seen.peak_bytes) else (),
        kind_intervals=kind_intervals_s(evaluation.graph, durations),
        rounds=[part.tolist() for part in np.array_split(seen.step_s, min(len(seen.step_s), MOST_BLOCKS))],
    )
    correction = None if found is None else found.to_dict()
    return replace(comparison, interval_correction=correction, at_pace=at_pace(problem, evaluation, seen))


def at_pace(problem: PlanningProblem, evaluation: Evaluation, seen: Measurement) -> PaceComparison | None:
    """What the profile says of the step at the pace of the cores beside the run; None if nobody looked."""
    speed = speed_beside(problem.cluster.profile, seen.pace_s, evaluation.result.plan.world_size)
    if speed is None:
        return None
    predicted_s = step_at_speed(problem, evaluation, speed)
    error = relative_error(predicted_s, seen.mean_step_s)
    return PaceComparison(slowness=speed.mean, predicted_s=predicted_s, relative_error=error)


def speed_of(profile: Profile, found: PaceComparison | None) -> dict[str, Any] | None:
    """The same for people, and a warning where the machine is no longer what the profile's intervals count on."""
    if found is None:
        return None
    speed = SpeedFactor.uniform(found.slowness)
    longer = speed.text
    then = f"then {format_seconds(found.predicted_s)} are predicted ({format_error(found.relative_error)})"
    text = f"the same work took {longer} than while profile {profile.name} was measured; {then}"
    warning = f"the machine's speed has changed ({longer} for the same work): calibrate again"
    return {**found.to_dict(), "text": text, "warning": warning if speed.is_beyond(profile) else ""}


def typical_step(seen: Measurement) -> int:
    """Index of the recorded step whose makespan is the median."""
    order = sorted(range(len(seen.timelines)), key=lambda number: seen.timelines[number].makespan_s)
    return order[len(order) // 2]


def ask_again(folder: RunFolder) -> Prediction:
    """The question of a run folder, priced anew from the profile, its history and the plan that lie in it.

    Raises: ConfigError if it is not a complete run folder.
    """
    config = folder.read_config()
    for path in (folder.model, folder.plan, folder.profile):
        if not path.is_file():
            raise ConfigError(f"{folder.path} holds no {path.name}, so it is not a complete run folder; simulate or run again")
    plan = Plan.load(folder.plan)
    profile = folder.read_profile()
    problem = PlanningProblem(
        model=Model.load(folder.model),
        cluster=cluster_of(config, profile),
        history=folder.read_history(profile),
        global_batch=plan.global_batch,
        precision=config.training.precision,
        master_weights=config.training.keeps_master_weights,
        ema=config.training.ema is not None,
        optimizer=config.training.optimizer,
        clip_gradients=plan.clip_gradients,
        fit_probability=config.plan.fit_probability,
        loading=folder.read_loading(),
    )
    fold = False if folder.job.is_file() else None
    return Prediction(config=config, problem=problem, evaluation=evaluate(problem, plan, fold=fold))


def reopen(path: Path) -> tuple[RunFolder, Prediction, str]:
    """A folder that was run: its question asked again, and the name of its run.

    Raises: ConfigError if it is not a run folder; ExecutionError if it was never run.
    """
    folder = RunFolder(path)
    asked = ask_again(folder)
    if not folder.job.is_file():
        raise ExecutionError(f"{path} was never run; use `parsim run` with --out {path}")
    return folder, asked, Job.load(folder.job).runs[0].name
