"""`parsim simulate --scenario`: a scenario played for the plan of a run file, as JSON and as tables."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parsim.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from parsim.predict.forecast import Forecast
    from parsim.report.tables import ReportTable
    from parsim.workflow.ask import Answer


def check_options(engine: str, scenario: Path | None, whole_run: bool) -> None:
    """Raises ConfigError for options that need one another."""
    if whole_run and scenario is None:
        raise ConfigError("--whole-run needs --scenario FILE with a table [run]; add it")
    if scenario is not None and engine != "dynamic":
        raise ConfigError(f"a scenario is played by the dynamic engine, but the engine is {engine}; add --engine dynamic")


def play(asked: Answer, path: Path, whole_run: bool) -> tuple[Answer, dict[str, Any]]:
    """The answer with one step as the scenario has it, and the document's part about the scenario.

    Raises ScenarioError: a file that cannot be read, or that does not fit the plan or the cluster.
    """
    from parsim.engines.scenario.scenario import load_scenario
    from parsim.predict.forecast import Played

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
        document["whole_run"] = describe_run(played.whole_run(asked.config.training.epochs), played)
    return replace(asked, evaluation=step), document


def describe_run(forecast: Forecast, played: Any) -> dict[str, Any]:
    """Plain JSON values."""
    from parsim.engines.scenario.course import KINDS

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
    from parsim.report.scenario_tables import interval_table, run_table, states_table

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
