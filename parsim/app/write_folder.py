"""The report of a run: both timelines, the Perfetto trace, report.html."""

from __future__ import annotations

import datetime
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from parsim.app.ask import ask_again, reopen
from parsim.app.measured import Measured, compared, typical_step
from parsim.app.prediction import Prediction, describe
from parsim.app.run_folder import RunFolder, write_json
from parsim.execute.metrics import lines_of
from parsim.execute.processes.machine import describe_environment, machine_line
from parsim.hardware.cluster import Cluster
from parsim.plans.plan import plan_in_words
from parsim.predict.breakdown import breakdown
from parsim.predict.compare import Comparison
from parsim.predict.evaluate import Evaluation
from parsim.report.figures import coverage_figures, learning_figure
from parsim.report.page import ReportData, ReportRun, ReportSection, write_report
from parsim.report.tables import calibration_table, coverage_tables, memory_levels
from parsim.report.trace import save_chrome_trace

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from parsim.execute.measurement import Measurement


def write_run_files(folder: RunFolder, asked: Prediction, run: Measured | None = None) -> None:
    """predicted-timeline.json.gz, trace.json and report.html; of a plan that was run also the measured timeline.json.gz."""
    evaluation, problem = asked.evaluation, asked.problem
    timelines = {"predicted": evaluation.timeline}
    evaluation.timeline.save(folder.predicted_timeline)
    if run is not None:
        timelines["measured"] = typical_step(run.seen)
        timelines["measured"].save(folder.timeline)
    save_chrome_trace(folder.trace, evaluation.graph, timelines)
    section = ReportSection(
        model=problem.model.name,
        title=f"{problem.model.name} on {problem.cluster.name}",
        text=f"Global batch {problem.global_batch}, {problem.numerics.optimizer}, {problem.numerics.precision}.",
        results=[candidate.result.to_dict() for candidate in asked.among or (evaluation,)],
        chosen=evaluation.result.to_dict(),
        runs=(report_run(evaluation, None, None) if run is None else report_run(evaluation, run.seen, run.comparison),),
    )
    history = problem.history.records
    data = ReportData(
        title=f"{problem.model.name}: {' and '.join(timelines)}",
        facts=report_facts(problem.cluster if run is None else None),
        summary=(
            f"{problem.model.name} on {problem.cluster.name}: {plan_in_words(evaluation.result.plan)}, {asked.headline()}.",
            *(() if run is None else (f"{line[0].upper()}{line[1:]}." for line in run.diagnosis.lines())),
        ),
        sections=(section,),
        extra_tables=(calibration_table(problem.cluster.profile), *coverage_tables(history)),
        extra_figures=coverage_figures(history),
        learning=_learning(folder, asked) if run is not None else None,
    )
    write_report(data, folder.report)


def _learning(folder: RunFolder, asked: Prediction) -> tuple[go.Figure, str] | None:
    lines = lines_of(folder.path)
    if not any("loss" in line for line in lines):
        return None
    caption = (
        "Loss of the samples that each step trained on, and the scores of validations, over steps and over the seconds of the "
        "steps; in grey over the seconds that were predicted. Validations and checkpoints take none of these seconds."
    )
    return learning_figure(lines, step_s=asked.evaluation.result.step_s.median), caption


def report_run(evaluation: Evaluation, seen: Measurement | None, comparison: Comparison | None) -> ReportRun:
    """One plan for the report, with its measurement if there is one."""
    step = None if seen is None else typical_step(seen)
    return ReportRun(
        label=evaluation.result.strategy,
        plan=evaluation.result.plan.to_dict(),
        graph=evaluation.graph,
        predicted=evaluation.timeline,
        measured=step,
        predicted_breakdown=[asdict(rank) for rank in evaluation.breakdown],
        measured_breakdown=() if step is None else [asdict(rank) for rank in breakdown(evaluation.graph, step)],
        memory=[asdict(memory) for memory in evaluation.memory],
        memory_levels=() if seen is None else [row.to_dict() for row in memory_levels(evaluation.memory, seen.memory_uses)],
        comparison=None if comparison is None else comparison.to_dict(),
        step_s=evaluation.result.step_s.median,
    )


def report_facts(cluster: Cluster | None = None) -> tuple[tuple[str, str], ...]:
    """Machine, date and versions, for the head of a report.

    Args:
        cluster: that a prediction is about, where nothing ran; the machine that planned comes behind it. None: that one alone.
    """
    environment = describe_environment()
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    machine = "Machine" if cluster is None else "Planned on"
    kinds = Counter[str]() if cluster is None else Counter(device.type.name for device in cluster.devices)
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return (
        *((("Cluster", f"{cluster.name}: {devices}"),) if cluster is not None else ()),
        (machine, machine_line(environment)),
        ("Date", datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ("Versions", versions),
    )


# Write a simulation into a run folder, and draw any run folder's pages again.


def write_prediction(folder: RunFolder, asked: Prediction) -> None:
    """The question, result.json, predicted-timeline.json.gz, trace.json and report.html of a plan that was not run."""
    folder.write_question(asked)
    write_json(folder.result, describe(asked.evaluation))
    write_json(folder.environment, describe_environment())
    write_run_files(folder, asked)


def redraw(folder: RunFolder) -> None:
    """trace.json and report.html of a run or a simulation, priced anew from the profile and plan that lie in the folder.

    Raises: ConfigError: it is not a run folder.
    """
    if not folder.job.is_file():
        write_run_files(folder, ask_again(folder))
        return
    folder, asked, name = reopen(folder.path)
    write_run_files(folder, asked, compared(folder, asked, name))
