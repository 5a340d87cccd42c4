"""What is written for other tools: the record of an export, the values that writers take, and the step as a Chrome trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError, near_matches
from parsim.formats.source import FileFormat, file_formats
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.predict.problem import PlanningProblem
from parsim.registry import is_reference
from parsim.report.trace import save_chrome_trace
from parsim.timeline import Timeline

MOST_RANKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
        format: its name. file: the file, or the folder of several. summary: one sentence.
        left_out: what the format cannot express, with what it means for whoever uses the file.
        found: further keys of the JSON.
    """

    format: str
    file: Path
    summary: str
    left_out: Mapping[str, str] = field(default_factory=dict)
    found: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as `parsim export --json` prints it."""
        return {"file": str(self.file), "format": self.format, **self.found, "left_out": dict(self.left_out)}

    def lines(self) -> list[str]:
        """For people: what was written, and what was left out."""
        return [self.summary, *(f"Left out: {what}: {why}" for what, why in self.left_out.items())]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedStep:
    """A plan's predicted step; measured: the real one of a plan that was run (None: it was not)."""

    problem: PlanningProblem
    evaluation: Evaluation
    measured: Timeline | None = None

    def of_every_rank(self, tool: str) -> Evaluation:
        """The evaluation in which no rank stands for others, for a tool that reads one file per rank.

        Raises ConfigError: more than MOST_RANKS ranks.
        """
        plan = self.evaluation.result.plan
        if plan.world_size > MOST_RANKS:
            raise ConfigError(
                f"{tool} traces are written for at most {MOST_RANKS:,} ranks, one file each, and the plan has "
                f"{plan.world_size:,}; simulate with fewer replicas: --set cluster.nodes=..."
            )
        if self.evaluation.folding.ranks == tuple(range(plan.world_size)):
            return self.evaluation
        return evaluate(self.problem, plan, samples=0, fold=False)


def written_formats() -> dict[str, FileFormat]:
    """Formats that parsim writes, by name."""
    return {name: row for name, row in file_formats().items() if row.writes is not None}


def format_to_write(name: str, options: Mapping[str, object]) -> FileFormat:
    """A format that parsim writes.

    Args:
        name: of it, or "package.module:ROW". options: by name those that were given, of `parsim export`.

    Raises:
        ConfigError: an unknown format, an option of another one, or a row that cannot be loaded.
    """
    rows = written_formats()
    if name not in rows and not is_reference(name):
        raise ConfigError(f"format {name!r} is unknown{near_matches(name, rows)}")
    row = rows[name] if name in rows else file_formats()[name]
    if row.writes is None:
        raise ConfigError(f"format {name!r} writes nothing; it is {row.what}")
    for option, value in options.items():
        if option not in row.options:
            takers = ", ".join(other for other, entry in rows.items() if option in entry.options)
            flag = f"--{option.replace('_', '-')} {value}"
            raise ConfigError(f"{flag} does not apply to {row.what}; it belongs to {takers or 'no format'}")
    return row


def write_chrome(step: EvaluatedStep, file: Path) -> Exported:
    """The predicted step, and the measured one of a plan that was run, for Perfetto and chrome://tracing."""
    evaluation = step.evaluation
    timelines = {"predicted": evaluation.timeline}
    if step.measured is not None:
        timelines["measured"] = step.measured
    save_chrome_trace(file, evaluation.graph, timelines)
    spans = sum(len(timeline) for timeline in timelines.values())
    shown = len({resource.partition(".")[0] for resource in evaluation.timeline.resources})
    left_out = {
        "dependencies": "arrows lead from senders to receivers alone; the format has none between tasks of one rank",
        "intervals": "durations are medians",
    }
    if shown < (ranks := evaluation.result.plan.world_size):
        left_out["ranks"] = f"{shown} of {ranks} stand for the others, which do the same at the same time"
    return Exported(
        format="chrome",
        file=file,
        summary=f"{' and '.join(timelines).capitalize()} step, {spans} spans of {shown} ranks: {file}; open it in Perfetto",
        left_out=left_out,
        found={"timelines": list(timelines), "spans": spans, "ranks": shown},
    )


FORMATS = {
    "chrome": FileFormat(
        what="the timeline as a Chrome trace, for Perfetto", writes="step", write=write_chrome, file="trace.json"
    )
}
