"""The way from a run file to an answer and back: ask, choose, run for real, compare. Commands only print what these return."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from parsim.app.answer import Answer
from parsim.app.config import Question
from parsim.app.doctor import Say, warn
from parsim.app.load import cluster_of, fixed_plan, is_saved_model, on_this_machine, problem_of, search_plans
from parsim.app.prediction import Prediction
from parsim.app.run_folder import RunFolder, what_is_left, write_json
from parsim.app.training_checks import check_rounds, loading_of, whole_periods
from parsim.costs.adjustments import adjusted, price_context
from parsim.costs.communication.closed_forms import busbw_bytes_per_s
from parsim.costs.communication.collectives import estimate_collective, estimate_send_recv
from parsim.engines.scenario.scenario import load_scenario
from parsim.engines.scenario.whole_run import KINDS
from parsim.errors import ConfigError, DoesNotFitError, ExecutionError, ModelError, OutOfMemoryError, PlanError, RankLostError
from parsim.execute.cuda.faults import visible_devices
from parsim.execute.cuda.gpu import check_gpus
from parsim.execute.job import EXECUTION, Job, RunSpec
from parsim.execute.processes.launch import HANG_S, launch
from parsim.execute.processes.machine import describe_environment, differences_from_here
from parsim.execute.processes.output import relayed
from parsim.files import read_json
from parsim.hardware.devices import DEVICE_KINDS
from parsim.hardware.profile import Profile
from parsim.hardware.speed_factor import SpeedFactor, speed_beside
from parsim.model.catalogue.names import is_transformer
from parsim.model.formats import check_executable
from parsim.model.model import ADDED_UP, COUPLED, MIXING, Model
from parsim.model.optimizers import update_steps
from parsim.model.spec import EXAMPLE
from parsim.plans.plan import Plan
from parsim.predict.compare import Comparison, PaceComparison, compare, kind_intervals_s, relative_error
from parsim.predict.evaluate import MANY_RANKS, Evaluation, evaluate, sampled_durations_s, step_at_speed
from parsim.predict.forecast import Played
from parsim.predict.problem import PlanningProblem
from parsim.program.placed import PlanIndex
from parsim.report.more_tables import interval_table, memory_levels, run_table, states_table
from parsim.report.tables import format_error
from parsim.units import format_bytes, format_seconds
from parsim.work import Collective, Compute, Phase, SendRecv

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from parsim.costs.costs import Costs
    from parsim.costs.estimate import Estimate
    from parsim.execute.measurement import Measurement
    from parsim.hardware.cluster import Cluster
    from parsim.predict.forecast import Forecast
    from parsim.report.tables import ReportTable


MOST_BLOCKS = 20
"""Into so many parts a training is cut for its A/A floor: steps that follow one another share their disturbances."""


def ask(question: Question, *, top: int | None = None, runs_here: bool = False) -> Answer:
    """Price the plan that the question fixes, or search the family that it names.

    Args:
        top: keep so many plans over all families instead of the best of each.
        runs_here: the plan will run on this machine, whatever profile it is priced by.

    Reading a dataset of the user's own is timed first (`parsim.app.training_checks`).

    Where no plan fits, the evaluation is that of the fastest that does not: `run` refuses it, everything else shows it.

    Raises: ConfigError, ModelError, ProfileError, PlanError, CostError, ScheduleError.
    """
    question = on_this_machine(question)
    problem = problem_of(question)
    problem = replace(problem, loading=loading_of(question, problem.cluster, runs_here=runs_here))
    return answer_of(question, problem, top=top)


def answer_of(question: Question, problem: PlanningProblem, *, top: int | None = None) -> Answer:
    """Answer a question whose problem was loaded. Args: top: as `ask`."""
    plan = fixed_plan(problem, question)
    if plan is not None:
        evaluation = evaluate(problem, plan, reason="the plan that was asked for")
        return Answer(question=question, problem=problem, evaluation=evaluation, search=None)
    found = search_plans(problem, question, top=top)
    return Answer(question=question, problem=problem, evaluation=found.chosen or found.candidates[0], search=found)


def check_launchable(config: Question) -> None:
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
    if asked.question.source.form != "name":
        what = "an nn.Module" if asked.question.source.form == "module" else "a Model"
        raise ModelError(
            f"{asked.question.model.name} was given as {what}: it can be planned and simulated, but every process of a run "
            'must build its own. Put the code that makes it into a function and give "package.module:function" as the model'
        )
    if is_transformer(asked.question.model.name):
        raise ModelError(
            f"{asked.question.model.name} is planned and simulated from its sizes, and parsim holds no module of it to train; "
            "give the path of its Hugging Face config.json"
        )
    if is_saved_model(Path(asked.question.model.name)):
        raise ModelError(
            f"{asked.question.model.name} is a saved Model: it can be planned and simulated, but holds no module to train; "
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
    training = asked.question.training
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
    follows = asked.question.model_spec.control_flow == EXAMPLE
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
    """Memory of every rank as several parties counted it, beside what was predicted of it (`parsim.report.more_tables`)."""
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
    from parsim.execute.measurement import load_measurement

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
        cluster=cluster_of(config.cluster, profile),
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
    return Prediction(question=config, problem=problem, evaluation=evaluate(problem, plan, fold=fold))


def reopen(path: Path) -> tuple[RunFolder, Prediction, str]:
    """A folder that was run: its question asked again, and the name of its run.

    Raises: ConfigError if it is not a run folder; ExecutionError if it was never run.
    """
    folder = RunFolder(path)
    asked = ask_again(folder)
    if not folder.job.is_file():
        raise ExecutionError(f"{path} was never run; use `parsim run` with --out {path}")
    return folder, asked, Job.load(folder.job).runs[0].name


# `parsim simulate`: one step of one plan, as it is or in a scenario, and with a scenario the whole run.


Engine = Literal["static", "dynamic"]


def simulate_question(
    question: Question, *, engine: Engine = "static", scenario: Path | None = None, whole_run: bool = False
) -> Prediction:
    """Simulate one step of the plan that the question fixes, or of the best of the family it names.

    Args:
        engine: numba arrays, or SimPy processes. scenario: stragglers, links, failures; needs the dynamic engine.
        whole_run: to the end of training, by the scenario's table [run].

    Up to 64 ranks each rank is simulated; beyond, those that are interchangeable once.

    Raises: ConfigError for options that need one another, ScenarioError; else as `ask`.
    """
    check_options(engine, scenario, whole_run)
    return simulate_prediction(ask(question).prediction, engine=engine, scenario=scenario, whole_run=whole_run)


def simulate_prediction(
    asked: Prediction, *, engine: Engine = "static", scenario: Path | None = None, whole_run: bool = False
) -> Prediction:
    """The same for a plan that is predicted already."""
    check_options(engine, scenario, whole_run)
    if engine != "static":
        result = asked.result
        asked = replace(asked, evaluation=evaluate(asked.problem, result.plan, engine=engine, reason=result.reason))
    elif asked.plan.world_size <= MANY_RANKS:
        asked = with_every_rank(asked)
    asked = replace(asked, engine=engine)
    return asked if scenario is None else play(asked, scenario, whole_run)


def check_options(engine: str, scenario: Path | None, whole_run: bool) -> None:
    """Raises ConfigError for options that need one another, and for an engine that is none."""
    if engine not in ("static", "dynamic"):
        raise ConfigError(f"engine {engine!r} is unknown; it is static or dynamic")
    if whole_run and scenario is None:
        raise ConfigError("--whole-run needs --scenario FILE with a table [run]; add it")
    if scenario is not None and engine != "dynamic":
        raise ConfigError(f"a scenario needs the dynamic engine, but the engine is {engine}; add --engine dynamic")


def play(asked: Prediction, path: Path, whole_run: bool) -> Prediction:
    """The prediction with one step as the scenario has it, and what came of the scenario.

    Raises ScenarioError: a file that cannot be read, or that does not fit the plan or the cluster.
    """
    scenario = load_scenario(path)
    played = Played(problem=asked.problem, evaluation=asked.evaluation, scenario=scenario)
    step = asked.evaluation if scenario.asynchronous is not None else played.one_step()
    document: dict[str, Any] = {
        "file": str(path),
        "seed": scenario.seed,
        "one_step_s": step.timeline.makespan_s,
        "states": [asdict(state) for state in played.states],
    }
    if whole_run:
        document["whole_run"] = describe_run(played.whole_run(asked.question.training.epochs), played)
    return replace(asked, evaluation=step, scenario=document)


def describe_run(forecast: Forecast, played: Played) -> dict[str, Any]:
    """Plain JSON values."""
    whole, costs = forecast.whole, played.scenario.device
    figures = {
        "total_s": whole.total_s,
        **{f"{KINDS[kind]}_s": spent for kind, spent in whole.spent_s.items()},
        "lost_s": whole.lost_s,
        "down_s": whole.down_s,
        "failures": whole.failures,
        "useful_fraction": whole.useful_fraction,
        "price": whole.price(costs),
        "energy_j": whole.energy_j(costs),
    }
    document: dict[str, Any] = {
        "epochs": forecast.run.epochs,
        "steps": forecast.steps,
        "draws": forecast.run.draws,
        "currency": costs.currency,
        **{name: _interval(values) for name, values in figures.items()},
    }
    choice = forecast.choice
    if choice is not None:
        times = choice.simulated
        document["checkpoint_interval"] = {
            "simulated_s": times.best_interval_s,
            "young_s": choice.young_s,
            "daly_s": choice.daly_s,
            "mtbf_s": choice.mtbf_s,
            "write_s": choice.write_s,
            "rows": [
                {"interval_s": interval, "mean_s": mean, "error_s": error}
                for interval, mean, error in zip(
                    times.interval_s.tolist(), times.mean_s.tolist(), times.error_s.tolist(), strict=True
                )
            ],
        }
    return document


def scenario_tables(document: dict[str, Any]) -> list[ReportTable]:
    tables = [states_table(document["states"])]
    run = document.get("whole_run")
    if run is not None:
        tables.append(run_table(run))
        if "checkpoint_interval" in run:
            tables.append(interval_table(run["checkpoint_interval"]))
    return tables


def _interval(values: NDArray[Any]) -> dict[str, float]:
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95)).tolist()
    return {"median": middle, "p05": low, "p95": high}


# Prices of a collective, or of every component of a model: rows as `parsim cost` prints them.


QUANTILE_95 = 1.6448536269514722
"""Of the standard normal distribution: medians times exp(+-q sigma) are the 5% and 95% quantiles."""


def collective_row(cluster: Cluster, operation: str, size_bytes: int, group: tuple[int, ...]) -> dict[str, Any]:
    work: Collective | SendRecv
    if size_bytes < 0:
        raise ConfigError(f"--size-bytes {size_bytes}: must be >= 0")
    if operation == "send_recv":
        if len(group) != 2:
            raise ConfigError(f"--ranks {','.join(map(str, group))}: send_recv takes two ranks, e.g. --ranks 0,1")
        work = SendRecv(source=group[0], destination=group[1], size_bytes=size_bytes)
        estimate = estimate_send_recv(work, cluster)
    else:
        work = Collective(operation=operation, group=group, size_bytes=size_bytes)
        estimate = estimate_collective(work, cluster)
    algorithm = estimate.detail.split(" ")[0].rstrip(",")
    estimate = adjusted(estimate, work, group[0], price_context(cluster))
    return {
        "operation": operation,
        "cluster": cluster.name,
        "size_bytes": size_bytes,
        "ranks": list(group),
        **_priced(estimate),
        "busbw_bytes_per_s": busbw_bytes_per_s(operation, size_bytes, len(group), estimate.median_s),
        "algorithm": algorithm,
    }


def component_rows(costs: Costs, samples: int, ways: int | None) -> list[dict[str, Any]]:
    """Forward and backward of every component, whole and as one of `ways` shards, on the first device; then the optimizer."""
    if samples < 1:
        raise ConfigError(f"--batch {samples}: must be >= 1")
    model = costs.model
    rows: list[dict[str, Any]] = []
    for component in model.components:
        rows += _phase_rows(costs, component.name, samples)
        for sharding in component.shardings:
            if ways is not None and ways > 1 and sharding.allows(ways):
                rows += _phase_rows(costs, component.name, samples, sharding.rule, ways)
    if ways is not None and not any("ways" in row for row in rows):
        limits = sorted({sharding.limit for component in model.components for sharding in component.shardings})
        divide = f"it must be at least 2 and divide one of {', '.join(map(str, limits))}"
        raise ConfigError(
            f"--ways {ways}: no component of {model.name} at granularity {model.granularity} can be cut into that many shards: "
            f"{divide if limits else 'none has a sharding rule'}; choose others, another --granularity, or leave --ways out"
        )
    for step in update_steps(model.trainable_parameters):
        whose = f"parameters of {step.update_group}" if step.update_group else "all parameters"
        rows.append({"component": whose, "phase": "optimizer", "samples": samples, **_priced(costs.estimate(step, 0))})
    return rows


def _phase_rows(costs: Costs, component: str, samples: int, rule: str = "", ways: int = 1) -> list[dict[str, Any]]:
    rows = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        work = Compute(component=component, phase=phase, samples=samples, rule=rule, ways=ways)
        shard = {"rule": rule, "ways": ways} if rule else {}
        rows.append(
            {"component": component, "phase": phase.value, "samples": samples, **shard, **_priced(costs.estimate(work, 0))}
        )
    return rows


def _priced(estimate: Estimate) -> dict[str, Any]:
    """`seconds` with the 90% interval of one repetition, and where the number comes from."""
    sigmas: dict[str, float] = {}
    for name, sigma in estimate.parameters:
        sigmas[name] = sigmas.get(name, 0.0) + sigma
    spread = math.sqrt(sum(sigma**2 for sigma in sigmas.values()) + estimate.repeat_sigma**2)
    return {
        "seconds": {
            "median": estimate.median_s,
            "p05": estimate.median_s * math.exp(-QUANTILE_95 * spread),
            "p95": estimate.median_s * math.exp(QUANTILE_95 * spread),
        },
        "source": estimate.source,
        "detail": estimate.detail,
        "extrapolated": estimate.extrapolated,
        "terms": estimate.term_rows(),
    }
