"""A Measured run: the measured step, tasks and memory of a plan, next to its prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from parsim.app.export_folder import export_folder
from parsim.app.frames import breakdown_frame, frame, timeline_frame
from parsim.app.judging import diagnosed, judge, measured, typical_step
from parsim.app.prediction import Prediction
from parsim.app.run_folder import RUN, RunFolder
from parsim.costs.diagnosis import Diagnosis
from parsim.errors import ConfigError
from parsim.execute.measurement import lines_of
from parsim.formats.exports import Exported
from parsim.plans.plan import plan_in_words
from parsim.predict.breakdown import breakdown
from parsim.predict.compare import Comparison
from parsim.report.notebook import table_html
from parsim.report.picture import plotted
from parsim.report.tables import ReportTable, format_error, kind_table, to_text, validation_table
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
