"""Chrome trace JSON: the predicted step, and the measured one of a plan that was run, for Perfetto and chrome://tracing."""

from __future__ import annotations

from parsim.report.trace import save_chrome_trace
from parsim.timeline import Timeline
from parsim.workflow.exporting.request import Exported, ExportRequest

FILE = "trace.json"


def write_chrome(request: ExportRequest) -> Exported:
    """The timelines of a folder. Raises ConfigError: it is not a complete run folder."""
    evaluation = request.prediction.evaluation
    timelines = {"predicted": evaluation.timeline}
    if request.folder.job.is_file() and request.folder.timeline.is_file():
        timelines["measured"] = Timeline.load(request.folder.timeline)
    file = request.target(FILE)
    save_chrome_trace(file, evaluation.graph, timelines)
    spans = sum(len(timeline) for timeline in timelines.values())
    shown = len({resource.partition(".")[0] for resource in evaluation.timeline.resources})
    left_out = {
        "dependencies": "arrows lead from senders to receivers alone; the format has none between tasks of one rank",
        "intervals": "durations are medians",
    }
    if shown < request.plan.world_size:
        left_out["ranks"] = f"{shown} of {request.plan.world_size} stand for the others, which do the same at the same time"
    return Exported(
        format=request.format,
        file=file,
        summary=f"{' and '.join(timelines).capitalize()} step, {spans} spans of {shown} ranks: {file}; open it in Perfetto",
        left_out=left_out,
        found={"timelines": list(timelines), "spans": spans, "ranks": shown},
    )
