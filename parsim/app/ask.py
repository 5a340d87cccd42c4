"""The way from a run file to an answer and back: ask, choose, run for real, compare. Commands only print what these return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from parsim.app.answer import Answer
from parsim.app.config import Question, facts_of_plan
from parsim.app.launch import check_shards, loading_of
from parsim.app.load import cluster_of, fixed_plan, on_this_machine, problem_of, search_plans
from parsim.app.prediction import AssumedFramework, Prediction
from parsim.app.run_folder import RunFolder
from parsim.costs.history import read_history
from parsim.data.shards import SIZES
from parsim.engines.scenario import load_scenario
from parsim.engines.whole_run import KINDS
from parsim.errors import ConfigError, ExecutionError
from parsim.execute.job import Job
from parsim.hardware.compose import load_profile
from parsim.model.catalogue.frameworks import Framework, Guess, framework_of
from parsim.model.catalogue.names import is_transformer
from parsim.model.model import Model
from parsim.numeric import rare_collections
from parsim.plans.plan import Plan
from parsim.predict.evaluate import SAMPLES, Evaluation, evaluate, simulated_step, with_interval
from parsim.predict.forecast import Forecast, Played
from parsim.predict.memory import FIT_PROBABILITY
from parsim.predict.problem import PlanningProblem
from parsim.report.tables import ReportTable, interval_table, run_table, states_table
from parsim.search.by_hand import framework_switches

if TYPE_CHECKING:
    from numpy.typing import NDArray


@rare_collections()
def ask(
    question: Question, *, top: int | None = None, runs_here: bool = False, say: Callable[[str], None] = lambda _: None
) -> Answer:
    """Price the plan that the question fixes, or search the family that it names; reading the user's own data is timed first.

    Where no plan fits, the evaluation is that of the fastest that does not: `run` refuses it, everything else shows it.

    Args: top: keep so many plans over all families instead of the best of each. runs_here: the plan will run on this machine,
        whatever profile it is priced by. say: hears how far a search is.
    Raises: ConfigError, ModelError, ProfileError, PlanError, CostError, ScheduleError.
    """
    return with_assumed_framework(ask_alone(question, top=top, runs_here=runs_here, say=say))


@rare_collections()
def ask_alone(
    question: Question, *, top: int | None = None, runs_here: bool = False, say: Callable[[str], None] = lambda _: None
) -> Answer:
    """`ask` without the frameworks that others would assume: for questions that are compared, and of which one is answered."""
    question = on_this_machine(question)
    problem = problem_of(question)
    problem = replace(problem, loading=loading_of(question, problem.cluster, runs_here=runs_here))
    answer = answer_of(question, problem, top=top, say=say)
    reads = find_spec("torch") and not is_transformer(question.model.name)
    if answer.fits and reads and (question.training.shards or "").startswith(SIZES):
        check_shards(question, answer.chosen.plan)  # the rest is dealt whatever the replicas are
    return answer


def with_assumed_framework(answer: Answer) -> Answer:
    """The answer with the framework that it assumes, where the question names none, and an interval that reaches to others."""
    alone = answer.search is not None and (answer.search.cut_short or not answer.fits)
    assumed = assumed_framework(answer.question, answer.evaluation, alone=alone)
    if assumed is None:
        return answer
    problem, search = assumed.spanned(answer.problem), answer.search
    if problem is answer.problem:
        return replace(answer, assumed_framework=assumed)

    def again(evaluation: Evaluation) -> Evaluation:
        return with_interval(problem, evaluation, samples=SAMPLES, reason=evaluation.result.reason)

    return replace(
        answer,
        problem=problem,
        evaluation=again(answer.evaluation),
        search=None if search is None else search.each(again),
        assumed_framework=assumed,
    )


def answer_of(
    question: Question, problem: PlanningProblem, *, top: int | None = None, say: Callable[[str], None] = lambda _: None
) -> Answer:
    """Answer a question whose problem was loaded. Args: top, say: as `ask`."""
    plan = fixed_plan(problem, question)
    if plan is not None:
        evaluation = evaluate(problem, plan, reason="the plan that was asked for")
        return Answer(question=question, problem=problem, evaluation=evaluation, search=None)
    result = search_plans(problem, question, top=top, say=say)
    return Answer(question=question, problem=problem, evaluation=result.recommended or result.candidates[0], search=result)


def whole(answer: Answer) -> Answer:
    """The answer, for whoever asks more than one, or goes on with it. Raises KeyboardInterrupt: Ctrl-C cut its search short."""
    if answer.search is not None and answer.search.cut_short:
        raise KeyboardInterrupt
    return answer


def with_every_rank(asked: Prediction) -> Prediction:
    """The prediction with every rank simulated, because a measurement has every rank and is compared task by task."""
    return replace(asked, evaluation=every_rank(asked.problem, asked.evaluation))


def every_rank(problem: PlanningProblem, evaluation: Evaluation) -> Evaluation:
    """The evaluation with every rank simulated, for whoever shows or compares its timeline."""
    if not evaluation.folding.is_folded:
        return evaluation
    return evaluate(problem, evaluation.result.plan, reason=evaluation.result.reason, fold=False)


def ask_again(folder: RunFolder) -> Prediction:
    """The question of a run folder, priced anew from the profile, its history and the plan that lie in it.

    Raises: ConfigError if it is not a complete run folder.
    """
    config = folder.read_config()
    for path in (folder.model, folder.plan, folder.profile):
        if not path.is_file():
            raise ConfigError(f"{folder.path} holds no {path.name}, so it is not a complete run folder; simulate or run again")
    plan, profile = Plan.load(folder.plan), load_profile(str(folder.profile))
    problem = PlanningProblem(
        model=Model.load(folder.model),
        cluster=cluster_of(config.cluster, profile),
        history=read_history(folder.history, profile),
        global_batch=plan.global_batch,
        numerics=config.training.numerics,
        clip_gradients=plan.clip_gradients,
        fit_probability=config.plan.fit_probability or FIT_PROBABILITY,
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


def simulate_prediction(
    prediction: Prediction, *, engine: Engine = "static", scenario: Path | None = None, whole_run: bool = False
) -> Prediction:
    """One step of a plan that is predicted already. Up to 64 ranks and 500,000 tasks each rank is simulated; beyond,
    interchangeable ones once.

    Args: engine: numba arrays, or SimPy processes. scenario: stragglers, links, failures; needs the dynamic engine. whole_run:
        to the end of training, by the scenario's table [run].
    Raises: ConfigError for options that need one another, ScenarioError.
    """
    check_options(engine, scenario, whole_run)
    if engine != "static":
        problem, result = prediction.problem, prediction.result
        prediction = replace(prediction, evaluation=evaluate(problem, result.plan, engine=engine, reason=result.reason))
    elif prediction.evaluation.lists_every_rank:
        prediction = with_every_rank(prediction)
    prediction = replace(prediction, engine=engine)
    return prediction if scenario is None else _play(prediction, scenario, whole_run)


def check_options(engine: str, scenario: Path | None, whole_run: bool) -> None:
    """Raises ConfigError for options that need one another, and for an engine that is none."""
    if engine not in ("static", "dynamic"):
        raise ConfigError(f"engine {engine!r} is unknown; it is static or dynamic")
    if whole_run and scenario is None:
        raise ConfigError("--whole-run needs --scenario FILE with a table [run]; add it")
    if scenario is not None and engine != "dynamic":
        raise ConfigError(f"a scenario needs the dynamic engine, but the engine is {engine}; add --engine dynamic")


def _play(prediction: Prediction, path: Path, whole_run: bool) -> Prediction:
    """The prediction with one step as the scenario has it, and what came of the scenario.

    Raises ScenarioError: a file that cannot be read, or that does not fit the plan or the cluster.
    """
    scenario = load_scenario(path)
    played = Played(problem=prediction.problem, evaluation=prediction.evaluation, scenario=scenario)
    step = prediction.evaluation if scenario.asynchronous is not None else played.one_step()
    document: dict[str, Any] = {
        "file": str(path),
        "seed": scenario.seed,
        "one_step_s": step.timeline.makespan_s,
        "states": [asdict(state) for state in played.states],
    }
    if whole_run:
        document["whole_run"] = _describe_run(played.whole_run(prediction.question.training.epochs), played)
    return replace(prediction, evaluation=step, scenario=document)


def _describe_run(forecast: Forecast, played: Played) -> dict[str, Any]:
    run, costs = forecast.whole, played.scenario.device
    figures = {
        "total_s": run.total_s,
        **{f"{KINDS[kind]}_s": spent for kind, spent in run.spent_s.items()},
        "lost_s": run.lost_s,
        "down_s": run.down_s,
        "failures": run.failures,
        "useful_fraction": run.useful_fraction,
        "price": run.price(costs),
        "energy_j": run.energy_j(costs),
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
                {"interval_s": float(interval), "mean_s": float(mean), "error_s": float(error)}
                for interval, mean, error in zip(times.interval_s, times.mean_s, times.error_s, strict=True)
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


# Who is taken to have written the training loop where a question does not say, and how much others would differ.
#
# One framework prices an answer: plans that are priced as different ones could not be compared. Where the question fixes the
# plan, it is the most likely one for that plan; where plans are searched for, the most likely one that has all of them. What a
# search may propose does not follow from it. The interval reaches to what the others would take on the chosen plan.


MOST_OTHERS = 3
"""Frameworks whose price is compared: each is a simulation."""


def assumed_framework(question: Question, evaluation: Evaluation, *, alone: bool = False) -> AssumedFramework | None:
    """Of an answer, by the plan that was chosen; None where the framework is known, or nothing is assumed.

    Args: alone: no other framework is priced, and the answer says so: Ctrl-C ended the search, or nothing fits.

    Raises CostError as `evaluate`.
    """
    guess = question.guess
    if guess is None:
        return None
    if alone:
        stopped = f"{guess.by}; its interval does not reach to other frameworks, which were not priced"
        return AssumedFramework(name=guess.frameworks[0].version, by=stopped, others=())
    plan, step_s = evaluation.result.plan, evaluation.result.step_s.median
    assumed, likely = guess.frameworks[0], question.guess_for(facts_of_plan(plan))
    current = [framework_of(assumed.name)] if assumed.until else []
    first, *rest = likely.frameworks
    others = _unlike(question, assumed, [first, *current, *rest, *guess.frameworks], plan)
    ratios = [(row.version, _step_s(question, replace(guess, frameworks=(row,)), plan) / step_s) for row in others]
    return AssumedFramework(name=assumed.version, by=guess.by, others=tuple(ratios))


def _unlike(question: Question, assumed: Framework, rows: Iterable[Framework], plan: Plan) -> list[Framework]:
    """Those that do otherwise than the assumed one and than one another where it changes the seconds of the plan."""

    def seconds_key(row: Framework) -> tuple[object, ...]:
        switches: dict[str, Any] = {**framework_switches(row)}
        switched = replace(plan, **switches).switched
        host = (row.launches_on(question.cluster.gpu or "", gathers=plan.zero_stage == 3), row.step_s)
        return (row.kernels_of(question.has_low_products), switched, host, row.full_gradients, row.clip, row.routing)

    distinct = {seconds_key(assumed): assumed}
    for row in rows:
        distinct.setdefault(seconds_key(row), row)
    return list(distinct.values())[1 : 1 + MOST_OTHERS]


def _step_s(question: Question, guess: Guess, plan: Plan) -> float:
    problem = problem_of(question.sourced(guess=guess))
    return simulated_step(problem, replace(plan, **problem.plan_settings), fold=True).step_s
