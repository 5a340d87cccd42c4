"""A run that has ended: what its ranks wrote down beside its prediction, how right that was, and what is remembered of it."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from parsim.app.config import Question
from parsim.app.foreign import export_folder
from parsim.app.launch import changes_graph, whole_periods
from parsim.app.prediction import Prediction
from parsim.app.run_folder import RUN, RunFolder
from parsim.costs.diagnosis import Diagnosis
from parsim.costs.history import ValidationRecord, append_record, fingerprint, history_lines, history_path
from parsim.costs.observed import without_updates
from parsim.errors import ConfigError, CostError, ExecutionError, ParsimError
from parsim.execute.metrics import lines_of
from parsim.execute.processes.machine import describe_environment
from parsim.formats.exports import Exported
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile, save_profile
from parsim.hardware.speed_factor import SpeedFactor, speed_beside
from parsim.plans.plan import plan_in_words
from parsim.predict.breakdown import breakdown
from parsim.predict.compare import MINIMUM_ROUNDS, Comparison, PaceComparison, compare, kind_intervals_s, relative_error
from parsim.predict.evaluate import Evaluation, sampled_durations_s, step_at_speed
from parsim.predict.problem import PlanningProblem
from parsim.report.picture import plotted
from parsim.report.tables import (
    ReportTable,
    breakdown_frame,
    format_error,
    frame,
    kind_table,
    table_html,
    timeline_frame,
    to_text,
    validation_table,
)
from parsim.search.adapt.observed import diagnosis_of, updated
from parsim.timeline import Timeline
from parsim.units import format_percent, format_seconds

if TYPE_CHECKING:
    import pandas as pd

    from parsim.execute.measurement import Measurement


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """The result of `parsim.run`, `parsim.validate` and `parsim.open_run`.

    Attributes:
        folder: of the run: report.html, trace.json for Perfetto, result.json, checkpoints.
        prediction: of the plan that ran (of the last one where the controller changed it).
        comparison: step, kinds of tasks, single tasks and memory; relative_error = (predicted - measured) / measured.
        seen: the measurement itself.
        diagnosis: whether the run went as predicted and, if not, the differences and what to do.
        document: the JSON that the command of the same name prints.
    """

    folder: Path
    prediction: Prediction
    comparison: Comparison
    seen: Measurement
    diagnosis: Diagnosis
    document: Mapping[str, Any]

    @property
    def step_s(self) -> float:
        """Seconds of the mean step, as measured."""
        return self.seen.mean_step_s

    @property
    def relative_error(self) -> float | None:
        """(predicted - measured) / measured of the mean step; None if the measured step is 0."""
        return self.comparison.step.relative_error

    @property
    def losses(self) -> tuple[float, ...]:
        """Loss per training step, over the whole training, also after resuming."""
        return tuple(self.document.get("losses", self.seen.losses))

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self.document.get("warnings", ()))

    def export_weights(
        self,
        *,
        format: Literal["state_dict", "safetensors"] = "state_dict",
        out: str | Path | None = None,
        checkpoint: Literal["best", "last"] | None = None,
        weights: Literal["trained", "ema"] = "trained",
    ) -> Path:
        """Write the trained weights as a plain file that loads into the original module; returns its path.

        Args:
            format: of the file. out: None: weights.pt or weights.safetensors in the folder.
            checkpoint: the best by validation score, or the last; None: the best if there is one.
            weights: as trained, or their moving averages (training.ema).

        Raises:
            ConfigError: there is no such checkpoint, or the module's code is not trusted (PARSIM_ALLOW_CODE=1).
        """
        options = {"weights": weights} | ({} if checkpoint is None else {"checkpoint": checkpoint})
        return export_folder(self.folder, format=format, out=None if out is None else Path(out), **options).file

    def export(self, format: str, *, out: str | Path | None = None) -> Exported:
        """Write the run as a file of another tool.

        Args:
            format: "deepspeed", "torchtitan", "megatron", "chakra", "chrome", "state_dict" or "safetensors" (docs/export.md).
            out: the file, or the folder of several; None: the format's own name in the run's folder.

        Raises:
            ConfigError: an unknown format, or a plan that it cannot express.
        """
        return export_folder(self.folder, format=format, out=None if out is None else Path(out))

    def compare(self) -> None:
        """Print predicted against measured, for the step and for every kind of task; `table()` has it as data."""
        print(self)

    def table(self) -> pd.DataFrame:
        """Predicted against measured, the whole step first and then one row per kind of task.

        Columns: kind ("step" for the whole), tasks, predicted_s and measured_s (seconds; of a kind: summed over the tasks of
        one step, a task on several ranks counted once), relative_error, median_absolute_relative_error (over single tasks),
        within_interval (the measured seconds lie in the predicted 90% interval).
        """
        columns = ("predicted_s", "measured_s", "relative_error", "median_absolute_relative_error", "within_interval")
        comparison = self.comparison
        named = [
            ("step", len(comparison.tasks), comparison.step),
            *((kind.kind, kind.count, kind) for kind in comparison.kinds),
        ]
        rows = [
            {"kind": name, "tasks": tasks, **{column: getattr(part, column, None) for column in columns}}
            for name, tasks, part in named
        ]
        return frame(rows, ("kind", "tasks", *columns))

    def breakdown(self) -> pd.DataFrame:
        """Where the measured step of each rank went; columns as `Prediction.breakdown`."""
        return breakdown_frame(breakdown(self.prediction.evaluation.graph, typical_step(self.seen)))

    def memory(self) -> pd.DataFrame:
        """Peak of live tensors. Columns: rank, predicted_bytes, measured_bytes, relative_error."""
        columns = ("rank", "predicted_bytes", "measured_bytes", "relative_error")
        return frame([{column: getattr(row, column) for column in columns} for row in self.comparison.memory], columns)

    def timeline(self) -> pd.DataFrame:
        """The measured step whose length is the median of the recorded ones; columns as `Prediction.timeline`."""
        return timeline_frame(self.prediction.evaluation.graph, typical_step(self.seen))

    def plot(self, path: str | Path | None = None) -> Any:
        """One step, predicted above and measured below; `path`, result and errors as for `Answer.plot`."""
        from parsim.report.figures import PICTURE_ROWS, timeline_figure

        evaluation = self.prediction.evaluation
        steps = {"One step predicted": evaluation.timeline, "The typical step measured": typical_step(self.seen)}
        problem = self.prediction.problem
        title = f"{problem.model.name} on {problem.cluster.name}, {plan_in_words(self.prediction.plan)}: {self._steps_text()}"
        return plotted(timeline_figure(evaluation.graph, steps, most_rows=PICTURE_ROWS), title, path)

    def plot_learning(self, path: str | Path | None = None, *, beside: Sequence[Measured] = ()) -> Any:
        """Loss and validation scores over steps and over seconds, measured and predicted; `path`, result as for `Answer.plot`.

        Args:
            beside: other runs to draw with this one, by the names of their folders.

        Raises:
            ConfigError: a run that wrote no losses (a validation), or as `Answer.plot`.
        """
        from parsim.report.figures import learning_figure

        trainings = {}
        for run in (self, *beside):
            lines = lines_of(run.folder)
            if not any("loss" in line for line in lines):
                raise ConfigError(f"{run.folder} has no losses: it timed steps and trained nothing; draw it with plot()")
            trainings[run.folder] = (lines, run.prediction.evaluation.result.step_s.median)
        lines, step_s = trainings.pop(self.folder)
        others = {place.name: training for place, training in trainings.items()}
        title = f"{self.prediction.problem.model.name}: {self.folder.name}"
        return plotted(learning_figure(lines, step_s=step_s, beside=others), title, path)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.document)

    def headline(self) -> str:
        """`dp ...: 32.4 ms per step measured, 29.5 ms predicted (-8.9%)`."""
        return f"{self.prediction.plan.summary()}: {self._steps_text()}"

    def _steps_text(self) -> str:
        step = self.comparison.step
        floor = self.comparison.aa_floor
        noise = "" if floor is None else f", A/A floor ±{format_percent(floor.median)}"
        return (
            f"{format_seconds(step.measured_s)} per step measured, "
            f"{format_seconds(step.predicted_s)} predicted ({format_error(step.relative_error)}{noise})"
        )

    def __repr__(self) -> str:
        return f"Measured({self.headline()}; folder {self.folder})"

    def __str__(self) -> str:
        return "\n".join(map(to_text, self._tables())).rstrip()

    def _repr_html_(self) -> str:
        return "".join(map(table_html, self._tables()))

    def _tables(self) -> tuple[ReportTable, ReportTable]:
        document = self.comparison.to_dict()
        row = (self.prediction.problem.model.name, self.prediction.plan.summary(), document)
        return validation_table([row]), kind_table(document)


def compared(folder: RunFolder, prediction: Prediction, run: str = RUN) -> Measured:
    """What the ranks of a run wrote down, beside its prediction; the document is left to the caller."""
    seen = measured(folder, run, prediction.evaluation)
    comparison = judge(prediction.problem, prediction.evaluation, seen)
    return Measured(
        folder=folder.path,
        prediction=prediction,
        comparison=comparison,
        seen=seen,
        diagnosis=diagnosed(prediction, seen, comparison),
        document={},
    )


MOST_BLOCKS = 20
"""Into so many parts a training is cut for its A/A floor: steps that follow one another share their disturbances."""
LEAST_RECORDED = 20
"""Timed steps of a training that the history takes; the predicted interval is for the mean of as many."""
VERSIONS = ("python", "torch", "numpy", "parsim")


def measured(folder: RunFolder, run: str, evaluation: Evaluation) -> Measurement:
    """What the ranks of one run of the folder's job wrote down."""
    from parsim.execute.measurement import load_measurement

    seen = load_measurement(folder.records(run), evaluation.graph)
    left_out, together = whole_periods(seen, evaluation.result.plan)
    return replace(seen, left_out=left_out, together=together)


def judge(problem: PlanningProblem, evaluation: Evaluation, seen: Measurement) -> Comparison:
    """Predicted against measured, task by task; of peak memory what lies in tensors, which is what can be measured alike.

    Raises: ExecutionError if no step was recorded.
    """
    if not seen.timelines or not len(seen.step_s):
        raise ExecutionError("the run recorded no step to compare; train for at least one step after the warm-up")
    comparison = compare(
        evaluation.graph,
        evaluation.timeline,
        seen.timelines,
        predicted_step=evaluation.result.step_s,
        measured_step=[float(value) for value in seen.step_s],
        predicted_memory_bytes=[sum(memory.tensor_lines.values()) for memory in evaluation.memory],
        measured_memory_bytes=seen.peak_bytes if all(seen.peak_bytes) else (),
        kind_intervals=kind_intervals_s(evaluation.graph, sampled_durations_s(evaluation)),
        rounds=[part.tolist() for part in np.array_split(seen.step_s, min(len(seen.step_s), MOST_BLOCKS))],
    )
    pace, speed = None, speed_beside(problem.cluster.profile, seen.pace_s, evaluation.result.plan.world_size)
    if speed is not None:  # the step at the pace of the cores beside the run
        predicted_s = step_at_speed(problem, evaluation, speed)
        error = relative_error(predicted_s, seen.mean_step_s)
        pace = PaceComparison(slowness=speed.mean, predicted_s=predicted_s, relative_error=error)
    correction = evaluation.result.interval_correction
    return replace(
        comparison,
        interval_correction=None if correction is None else correction.to_dict(),
        at_pace=pace,
        skew_s=seen.skew_s if evaluation.result.plan.synchronisation.is_relaxed else None,
    )


def speed_of(profile: Profile, pace: PaceComparison | None) -> dict[str, Any] | None:
    """A pace as text and numbers, and a warning where the machine is no longer what the profile's intervals count on."""
    if pace is None:
        return None
    speed = SpeedFactor.uniform(pace.slowness)
    then = f"then {format_seconds(pace.predicted_s)} are predicted ({format_error(pace.relative_error)})"
    text = f"the same work took {speed.text} than while profile {profile.name} was measured; {then}"
    warning = f"the machine's speed has changed ({speed.text} for the same work): calibrate again"
    return {**pace.to_dict(), "text": text, "warning": warning if speed.is_beyond(profile) else ""}


def typical_step(seen: Measurement) -> Timeline:
    """The recorded step whose makespan is the median."""
    return sorted(seen.timelines, key=lambda timeline: timeline.makespan_s)[len(seen.timelines) // 2]


# What is remembered: a line in the profile's history and, on request, an update of the profile.


def record_of(asked: Prediction, seen: Measurement, comparison: Comparison, session: str | None = None) -> ValidationRecord:
    """What was predicted before any correction, and what was measured.

    Args: session: of measurements made together; left out: this one stands alone.
    """
    correction = asked.evaluation.result.interval_correction
    if correction is None:
        raise CostError("a record needs an interval, and this step was predicted without draws; evaluate it with samples > 0")
    environment, plan = describe_environment(), asked.evaluation.result.plan
    measurement = hashlib.sha256(seen.step_s.tobytes()).hexdigest()[:16]
    return ValidationRecord(
        model=asked.problem.model.name,
        run=session or measurement,
        predicted_s=correction.uncorrected.median,
        low_s=correction.uncorrected.p05,
        high_s=correction.uncorrected.p95,
        measured_s=comparison.step.measured_s,
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        profile=fingerprint(asked.problem.cluster.profile),
        batch=plan.global_batch,
        plan=plan.summary(),
        ranks=plan.world_size,
        steps=seen.steps,
        rounds=len(seen.step_s),
        aa_floor=None if comparison.aa_floor is None else comparison.aa_floor.median,
        machine=f"{environment['processor']}, {environment['cores']} cores",
        measurement=measurement,
        versions={name: environment["versions"][name] for name in VERSIONS if name in environment["versions"]},
    )


def diagnosed(asked: Prediction, seen: Measurement, comparison: Comparison) -> Diagnosis:
    """Whether a run went as predicted and, where not, what was different and what to do."""
    return diagnosis_of(
        asked.problem,
        asked.evaluation,
        seen.timelines,
        step_s=comparison.step.measured_s,
        timed=seen.steps,
        floor=0.0 if comparison.aa_floor is None else comparison.aa_floor.median,
        slowness=None if comparison.at_pace is None else comparison.at_pace.slowness,
    )


def remember(asked: Prediction, record: ValidationRecord) -> dict[str, Any]:
    """Append the record to the history that the run file's profile has; says where, or why not."""
    table, profile = asked.question.cluster, asked.problem.cluster.profile
    path = history_path(table.profile or "", table.history)
    if path is None:
        text = f"not recorded: {table.machine} is a shipped profile; say where its history lies: --history FILE"
        return {"path": None, "recorded": False, "text": text}
    before = history_lines(path, profile) if path.exists() else []
    is_new = all(line.record is None or line.record.measurement != record.measurement for line in before)
    if is_new:
        append_record(path, record)
    text = f"recorded in {path}" if is_new else f"this measurement is in {path} already"
    apart = next((line for line in history_lines(path, profile) if line.record == record and line.why), None)
    if apart is not None:
        text += f", and not used: {apart.why}; `parsim history {table.profile or 'PROFILE'} --remove {apart.number}` removes it"
    return {"path": str(path), "recorded": is_new, "text": text}


def remembered(asked: Prediction, seen: Measurement, comparison: Comparison, *, plan_changed: bool) -> dict[str, Any]:
    """Append the record of a training, if it has enough steps under one plan to say something; says why not."""
    why = ""
    if plan_changed:
        why = "the plan changed on the way"
    elif changes_graph(asked.evaluation.result.plan):
        why = "the predicted step is a mean over all graphs of the plan, and the steps had others"
    elif seen.steps < asked.evaluation.result.plan.synchronisation.period_steps:
        why = f"{seen.steps} timed steps are no whole period of {asked.evaluation.result.plan.synchronisation}"
    elif seen.steps < LEAST_RECORDED:
        why = f"{seen.steps} timed steps are fewer than the {LEAST_RECORDED} that an interval is for"
    elif asked.evaluation.result.interval_correction is None:
        why = "the step was predicted without an interval"
    if not why:
        try:
            return remember(asked, record_of(asked, seen, comparison))
        except (OSError, ParsimError) as error:  # the training has ended well
            why = str(error)
    return {"path": None, "recorded": False, "text": f"not recorded: {why}"}


def updatable(config: Question) -> Path:
    """The file of the profile that an update is written into. Raises ConfigError for a shipped profile."""
    path = Path(config.cluster.profile or "")
    if path.suffix != ".json" or not path.is_file():
        raise ConfigError(
            f"--update writes into the profile, and {config.cluster.machine!r} is not a file of yours; calibrate one with "
            "`parsim calibrate --out PROFILE.json` and name it as cluster.profile"
        )
    return path


def update_profile(asked: Prediction, seen: Measurement, comparison: Comparison, record: ValidationRecord) -> dict[str, Any]:
    """Write into the profile what the run showed it to be wrong by; says what changed.

    Raises: ConfigError: a shipped profile, or one calibrated anew since the run. CostError: too few rounds to know their noise.
    """
    path = updatable(asked.question)
    cluster, plan = asked.problem.cluster, asked.evaluation.result.plan
    profile = load_profile(str(path))
    if fingerprint(without_updates(profile)) != fingerprint(without_updates(cluster.profile)):
        raise ConfigError(f"{path} was calibrated again after this run; validate a new run")
    if comparison.aa_floor is None:
        raise CostError(
            f"an update needs >= {MINIMUM_ROUNDS} rounds to separate an error from noise, the run has {len(seen.step_s)}; "
            "measure more"
        )
    problem = replace(asked.problem, cluster=replace(cluster, profile=profile))
    update = updated(
        problem,
        plan,
        asked.evaluation.graph,
        seen.timelines,
        step_s=comparison.step.measured_s,
        floor=comparison.aa_floor.median,
        run=record.run,
        steps=seen.steps,
    )
    if update.changes:
        save_profile(update.profile, path)
    text = "; ".join(update.changes) or "nothing is off by more than the noise of the run"
    return {
        "profile": str(path),
        "changes": list(update.changes),
        "predicted_before": update.before_s,
        "predicted_after": update.after_s,
        "relative_error_after": relative_error(update.after_s, comparison.step.measured_s),
        "text": f"{path}: {text}",
    }
