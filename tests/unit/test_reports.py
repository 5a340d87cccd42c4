"""What people see: pages, tables, traces and pictures of results."""

from __future__ import annotations

import io
import json
import re
import sys
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs
from report_samples import (
    HOSTILE,
    RESNET,
    breakdown_of,
    durations_s,
    measured_run,
    measured_steps,
    memory_of,
    predicted_run,
    report_data,
    results,
    run_in_order,
    step_graph,
)
from rich.console import Console

import parsim as ps
from parsim.app.write_folder import report_facts
from parsim.errors import ConfigError, GraphError, MissingDependencyError
from parsim.execute.cuda.gpu import MemoryUse
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile, shipped_profiles
from parsim.predict.compare import compare
from parsim.predict.memory import RankMemory
from parsim.predict.result import Interval
from parsim.program.taskgraph import COMPUTE, Origin, Resource, Task, TaskGraph
from parsim.report import figures, legend, tables
from parsim.report.page import ReportData, ReportSection, report_html, write_report
from parsim.report.picture import PAGES, checked_ending, drawn, plotted
from parsim.report.tables import Column, ReportTable, calibration_table, memory_levels, to_rich, to_text
from parsim.report.trace import LETTERS, chrome_trace, save_chrome_trace
from parsim.timeline import Span, Timeline
from parsim.units import format_seconds
from parsim.work import Compute, Phase
from tests.commands import status_of
from tests.unit.browser import PROBLEMS_OF_ACCESS, needs_chromium, visiting

VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """Checks nesting; collects attributes that could fetch something, and the visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.references += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]
        assert not [name for name, _ in attributes if name.startswith("on")], "event handlers come from the script alone"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)


def parsed(page: str) -> Page:
    parser = Page()
    parser.feed(page.replace(get_plotlyjs(), ""))
    assert parser.open == []
    return parser


def figures_of(page: str) -> list[dict[str, Any]]:
    """The figures as the page's script reads them."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return list(json.loads(found[1]))


def test_the_page_is_whole_and_fetches_nothing() -> None:
    page = report_html(report_data())
    parser = parsed(page)
    assert parser.scripts == 4, "the figures, plotly once, the script of all pages, the page's own"
    assert all(reference.startswith(("#", "data:")) for reference in parser.references)
    assert "default-src 'none'" in page
    assert not re.search(r"@import|url\(", page.split("</style>")[0])
    assert page.count("plotly.js v") == 1
    drawn = figures_of(page)
    assert len(re.findall(r'data-figure="\d+"', page)) == len(drawn)
    for section in report_data().sections:
        assert section.title in parser.text


def test_hostile_names_are_text() -> None:
    data = report_data()
    bad = "<img src=x onerror=alert(1)>"
    section = ReportSection(
        model=bad,
        title=bad,
        text=bad,
        results=[{**results(RESNET)[0], "reason": bad, "strategy": bad, "plan": bad}],
        chosen=None,
        runs=[replace(data.sections[0].runs[0], label=bad, plan=bad)],
    )
    page = report_html(ReportData(title=bad, facts=[(bad, bad)], summary=[bad], sections=[*data.sections, section]))
    parser = parsed(page)
    assert HOSTILE in " ".join(parser.text)
    before_plotly = page[: page.index("plotly.js v")]
    assert "<img" not in before_plotly
    assert "alert('x')</script>" not in before_plotly
    for figure in figures_of(page):
        assert "<script" not in json.dumps(figure)
        assert "<img" not in json.dumps(figure)


def test_a_page_without_sections_is_whole() -> None:
    assert figures_of(report_html(ReportData(title="nothing at all"))) == []


def test_a_prediction_names_the_cluster_that_was_asked_about() -> None:
    (name, asked), (planned_on, _), *_ = report_facts(cluster_from_profile(load_profile("dgx1-v100-32gb")))
    assert (name, asked, planned_on) == ("Cluster", "dgx1-v100-32gb: 8 x V100-SXM2", "Planned on")
    assert report_facts()[0][0] == "Machine"


def test_one_plan_alone_is_no_comparison() -> None:
    """No figure of one bar, and no word that the plan is the fastest; what else its row says stays."""
    section = next(section for section in report_data().sections if section.results)
    first = {**section.results[0], "reason": "fastest plan that fits; recomputes 2 of 4 components"}
    several, one = ([first, dict(section.results[0], strategy="other")], [first])
    pages = [
        report_html(ReportData(title="t", sections=[replace(section, results=results, runs=[])])) for results in (several, one)
    ]
    assert [len(figures_of(page)) for page in pages] == [1, 0]
    assert ["fastest plan that fits" in page for page in pages] == [True, False]
    assert all("recomputes 2 of 4 components" in page for page in pages)


def test_labels_beside_bars_leave_room_on_a_narrow_screen() -> None:
    section = next(section for section in report_data().sections if section.results)
    drawn = figures.strategies_figure([{**section.results[0], "strategy": "hp"}])
    (label,) = drawn.layout.yaxis.ticktext
    assert all(len(line) <= 24 for line in re.sub("<span[^>]*>|</span>", "", label).split("<br>"))


def test_a_step_drawn_by_itself_is_told_from_the_predicted_step() -> None:
    run = replace(predicted_run("dp", RESNET, pp=1, dp=2, microbatches=1), step_s=1.0)
    section = ReportSection(model="m", title="m on c", text="", results=results(RESNET)[:1], chosen=None, runs=(run,))
    text = report_html(ReportData(title="t", sections=(section,)))
    assert run.predicted is not None
    alone = format_seconds(run.predicted.makespan_s)
    assert "predicted 1 s a step" in text
    assert f"drawn by itself ({alone}). In a row, steps overlap at their ends and take 1 s each." in text
    as_long = replace(section, runs=(replace(run, step_s=run.predicted.makespan_s),))
    assert "by itself" not in report_html(ReportData(title="t", sections=(as_long,)))


def test_it_is_written_atomically(tmp_path: Path) -> None:
    write_report(ReportData(title="t"), tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_timeline_has_one_trace_per_kind_and_a_bar_per_span() -> None:
    graph = step_graph(RESNET, pp=2, dp=2, microbatches=4)
    timeline = run_in_order(graph, durations_s(graph, 1e-3))
    figure = figures.timeline_figure(graph, {"Predicted": timeline, "Measured": timeline})
    assert [trace.name for trace in figure.data] == ["load", "forward", "backward", "optimizer", "all_reduce", "send_recv"] * 2
    assert sum(len(trace.x) for trace in figure.data) == 2 * len(timeline)
    assert sum(trace.showlegend for trace in figure.data) == 6
    ends = [base + length for trace in figure.data for base, length in zip(trace.base, trace.x, strict=True)]
    assert max(ends) == pytest.approx(1e3 * timeline.makespan_s), "milliseconds"
    forward = figure.data[1]
    assert forward.customdata[0].startswith("F stem mb0<br>")
    assert sorted(filter(None, forward.text)) == sorted("0123" * 4), "once per microbatch and rank"
    single = step_graph(RESNET[:3], dp=2)
    labels = figures.timeline_figure(single, {"Predicted": run_in_order(single, durations_s(single, 1e-3))}).data
    assert {text for trace in labels for text in trace.text} == {*RESNET[:3], "0", ""}


@pytest.mark.slow
def test_long_timelines_stay_small() -> None:
    """Tens of thousands of spans become few bars that cover the same time; many ranks are cut and the title says so."""
    graph = step_graph([f"c{number}" for number in range(80)], dp=8, microbatches=16)
    seconds = durations_s(graph, 1e-6)
    timeline = run_in_order(graph, seconds)
    assert len(timeline) > 20_000
    figure = figures.timeline_figure(graph, {"Predicted": timeline})
    assert sum(len(trace.x) for trace in figure.data) < figures.MAX_BARS
    forward = next(trace for trace in figure.data if trace.name == "forward")
    total = sum(seconds[task.index] for task in graph.tasks if getattr(task.work, "phase", None) == "forward")
    unit = 1e-3 if timeline.makespan_s >= 1e-3 else 1e-6
    assert sum(forward.x) * unit == pytest.approx(total, rel=0.01)
    assert "forward tasks" in forward.customdata[0]
    wide = step_graph(["a"], dp=60)
    figure = figures.timeline_figure(wide, {"Predicted": run_in_order(wide, durations_s(wide, 1e-3))})
    assert "ranks 0-31 of 60" in figure.layout.annotations[0].text
    assert len(figure.layout.yaxis.tickvals) == 96


def test_memory_shows_the_limit_unless_it_is_far_away() -> None:
    near = figures.memory_figure(memory_of(2, 4 * 2**30))
    assert near.data[-1].name == "the device has"
    assert near.data[-1].y == (4.0, 4.0)
    bars = np.sum([trace.y for trace in near.data if trace.type == "bar"], axis=0)
    peaks = [sum(size for _, size in rank["lines"]) / 2**30 for rank in memory_of(2, 1)]
    assert bars == pytest.approx(peaks)
    far = figures.memory_figure(memory_of(2, 2**40))
    assert "the device has" not in [trace.name for trace in far.data]
    assert "the device has 1024 GiB" in far.layout.yaxis.title.text


def test_charts_of_a_run_speak_of_one_memory() -> None:
    """A counter that was predicted exactly lies on the border above the last line that it sees, whatever the order of lines."""
    lines = (("context", 2**29), ("activations", 4 * 2**30), ("allocator", 2**28), ("communication", 2**27))
    rank = RankMemory(rank=0, lines=lines, limit_bytes=2**34)
    use = MemoryUse(live_bytes=2**32, allocated_bytes=2**32, reserved_bytes=2**32 + 2**28, driver_bytes=5 * 2**30)
    rows = [row.to_dict() for row in memory_levels([rank], [use])]
    figure = figures.memory_figure([asdict(rank)], rows)
    borders = np.cumsum([trace.y[0] for trace in figure.data if trace.type == "bar"])
    marks = {trace.name: trace.y[0] for trace in figure.data if trace.name.startswith("measured")}
    assert marks["measured: live tensors"] == marks["measured: allocated blocks"] == borders[0] == 4
    assert marks["measured: reserved by the allocator"] == borders[1] == 4.25
    assert borders[-1] == pytest.approx(rank.total_bytes / 2**30)
    assert marks["measured: the whole device"] == 5
    section = report_data().sections[0]
    run = replace(section.runs[0], memory=[asdict(rank)], memory_levels=rows)
    page = report_html(ReportData(title="t", sections=[replace(section, runs=[run])]))
    assert "Rank 0, live tensors: predicted 4 GiB, measured 4 GiB, error 0.0%." in page
    assert "Rank 0, the whole device: predicted 4.88 GiB, measured 5 GiB, error -2.5%." in page


def test_the_breakdown_stacks_to_the_step() -> None:
    run = measured_run("dp", RESNET[:4], pp=1, dp=2, microbatches=1, seed=1, steps=1)
    figure = figures.breakdown_figure({"predicted": run.predicted_breakdown, "measured": run.measured_breakdown})
    assert run.predicted is not None
    assert run.measured is not None
    steps = [run.predicted.makespan_s, run.measured.makespan_s] * 2
    assert np.sum([trace.x for trace in figure.data], axis=0) / 1e3 == pytest.approx(steps)
    assert list(figure.layout.yaxis.ticktext) == ["rank 0 predicted", "rank 0 measured", "rank 1 predicted", "rank 1 measured"]


def test_kinds_of_task_have_colours_of_their_own() -> None:
    for colours in (legend.KIND_COLOURS, legend.MEMORY_COLOURS, legend.CATEGORY_COLOURS):
        assert len(set(colours.values())) == len(colours)
    assert legend.LETTER_COLOURS.keys() == LETTERS.keys()


CLIPPED = """[...document.querySelectorAll('.plot .ytick text, .plot .xtick text')].filter((text) => {
  const box = text.getBoundingClientRect(), plot = text.closest('.plot').getBoundingClientRect();
  return box.left < plot.left - 1 || box.right > plot.right + 1 || box.bottom > plot.bottom + 1;
}).map((text) => text.textContent)"""


FIRST_PICTURE = """(() => {
  const [sentence, picture] = ["h1", ".hero .plot"].map((found) => document.querySelector(found).getBoundingClientRect());
  return sentence.bottom <= window.innerHeight && picture.bottom <= window.innerHeight && picture.height > 100;
})()"""
COLOURS = """(() => {
  const probe = document.body.appendChild(document.createElement("i"));
  const rgb = (colour) => { probe.style.color = colour; return getComputedStyle(probe).color; };
  return [...document.querySelectorAll("figure .legend button")].flatMap((entry) => {
    const trace = entry.closest("figure").querySelector(".plot").data.find((each) => each.name === entry.dataset.trace);
    if (trace.type !== "bar" || trace.marker.pattern) return [];
    return [getComputedStyle(entry.querySelector("i")).backgroundColor === rgb(trace.marker.color)];
  });
})()"""
GROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_in_a_browser(tmp_path: Path, width: int) -> None:
    """The answer and a picture on the first screen, in light and dark; every figure drawn, nothing fetched or clipped."""
    write_report(report_data(), tmp_path / "report.html")
    with visiting(width) as visit:
        page = visit.tab((tmp_path / "report.html").as_uri(), "dark")
        assert page.evaluate(FIRST_PICTURE)
        dark = page.evaluate(GROUND)
        page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        page.wait_for_function(
            "document.querySelectorAll('.plot .main-svg').length > 0 && !document.querySelector('.plot:empty')"
        )
        for scheme in ("dark", "light"):
            assert page.evaluate(PROBLEMS_OF_ACCESS) == [], scheme
            colours = page.evaluate(COLOURS)
            assert len(colours) > 10
            assert all(colours), "the legend has the colours of the bars"
            if scheme == "dark":
                page.locator("#theme").click()
                page.wait_for_selector(".plot:not([data-drawn])", state="detached")
        assert page.evaluate(GROUND) != dark
        drawn = page.evaluate(
            "[...document.querySelectorAll('.plot')].map((plot) => plot.querySelectorAll('.main-svg').length)"
        )
        widths = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        legend = page.locator("figure:has(button[data-trace=forward])").first
        legend.locator("button[data-trace=forward]").press("Enter")
        hidden = page.evaluate(
            "[...document.querySelectorAll('figure')].find((figure) => figure.querySelector('button[data-trace=forward]'))"
            ".querySelector('.plot').data.find((trace) => trace.name === 'forward').visible"
        )
        clipped = page.evaluate(CLIPPED)
    assert visit.problems == []
    assert visit.requests == [(tmp_path / "report.html").as_uri()]
    assert len(drawn) > 15
    assert all(drawn)
    assert widths[0] <= widths[1], "the page scrolls sideways"
    assert hidden is False
    assert clipped == []


def test_learning_of_several_runs_is_drawn_side_by_side() -> None:
    """Each in one colour, with its own seconds, and with its name in the legend."""
    first, second = (
        [{"step": step, "seconds": seconds, "loss": 1.0 / step} for step in range(1, 21)] for seconds in (0.5, 0.25)
    )
    second[19]["validation"] = {"accuracy": 0.9}
    figure = figures.learning_figure(first, step_s=0.4, beside={"gossip": (second, 0.2)})
    curves = {(curve.name, curve.xaxis): curve for curve in figure.data}
    assert curves["measured seconds", "x2"].x[-1] == 10.0
    assert curves["measured seconds of gossip", "x2"].x[-1] == 5.0
    assert curves["predicted seconds of gossip", "x2"].x[-1] == pytest.approx(4.0)
    assert list(curves["accuracy of validation of gossip", "x4"].x) == [5.0]
    own = {curve.line.color for (name, _), curve in curves.items() if name.endswith("of gossip")}
    assert len(own) == 1
    assert own.isdisjoint(curve.line.color for (name, _), curve in curves.items() if not name.endswith("of gossip"))


def test_learning_is_drawn_over_steps_and_seconds_measured_and_predicted() -> None:
    """1,000 steps of .5 s that were predicted to take .4: 400 points, the last of which stands at 500 s and 400 s."""
    lines: list[dict[str, Any]] = [{"step": step, "seconds": 0.5, "loss": 1.0 / step} for step in range(1, 1001)]
    lines[0].pop("loss")
    lines[499]["validation"], lines[999]["validation"] = {"loss": 0.3, "accuracy": 0.5}, {"loss": 0.2, "accuracy": 0.9}
    curves = {(curve.name, curve.xaxis): curve for curve in figures.learning_figure(lines, step_s=0.4).data}
    assert {name for name, _ in curves} == {
        *("loss of training", "measured seconds", "predicted seconds"),
        *("loss of validation", "accuracy of validation"),
    }
    over_steps, measured = curves["loss of training", "x"], curves["measured seconds", "x2"]
    assert len(over_steps.x) == 400
    assert (over_steps.x[-1], measured.x[-1], curves["predicted seconds", "x2"].x[-1]) == (1000, 500.0, 400.0)
    assert over_steps.y[-1] == pytest.approx(1 / 999.5, rel=1e-3)
    assert list(curves["accuracy of validation", "x3"].x) == [500, 1000]
    assert list(curves["accuracy of validation", "x4"].x) == [250.0, 500.0]
    assert all(curve.marker.color == curve.line.color for curve in curves.values()), "the legend has the colours of the curves"
    page = report_html(ReportData(title="a training", learning=(figures.learning_figure(lines), "losses")))
    assert '<section class="card" id="learning">' in page


# Tables: golden texts of a fixed width, and what their cells say.

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def comparison() -> dict[str, Any]:
    """A comparison without any random number: every measured task 6.25% slower, the collectives twice as slow."""
    graph = step_graph(RESNET[:5], pp=2, dp=2, microbatches=2)
    seconds = durations_s(graph, 2e-3)
    slower = [value * (2 if len(task.ranks) > 1 else 1.0625) for value, task in zip(seconds, graph.tasks, strict=True)]
    predicted, measured = run_in_order(graph, seconds), run_in_order(graph, slower, "measured")
    found = compare(
        graph,
        predicted,
        measured,
        predicted_step=Interval(median=0.080, p05=0.074, p95=0.089),
        measured_step=[0.1, 0.1, 0.1, 0.1],
        predicted_memory_bytes=[100 * 2**20, 90 * 2**20],
        measured_memory_bytes=[101 * 2**20, 94 * 2**20],
    )
    return {**found.to_dict(), "aa_floor": {"median": 0.014, "p95": 0.047}}


def profile() -> Profile:
    """Calibrated on one machine: components, optimizer, collectives, drift, overlap, host; and refreshed."""
    number = {"value": 1e9, "source": "s"}
    common = {"device_type": "cpu", "seconds": 1e-3, "repeats": 9, "source": "s"}
    component = {**common, "fingerprint": "f", "model": "m", "precision": "fp32"}
    points = [
        {**component, "component": name, "phase": phase, "samples": samples, "spread": spread}
        for name, spread in (("a", 0.02), ("b", 0.04))
        for phase in ("forward", "backward")
        for samples in (4, 16)
    ]
    optimizer = {**common, "optimizer": "adamw", "tensors": 3, "spread": 0.1}
    reduce = {"operation": "all_reduce", "group": [0, 1], "seconds": 1e-3, "spread": 0.03, "source": "s"}
    return Profile.model_validate(
        {
            "schema_version": 1,
            "name": "here",
            "description": "",
            "provenance": {"created": "2026-01-01", "command": "parsim calibrate", "machine": "two cores"},
            "sources": {"s": {"kind": "measurement", "text": "calibration"}},
            "device_types": {
                "cpu": {
                    "kind": "cpu",
                    "memory_bytes": number,
                    "memory_bandwidth_bytes_per_s": number,
                    "context_bytes": number,
                    "peak_flop_per_s": {"fp32": number},
                }
            },
            "devices": [{"index": 0, "type": "cpu"}, {"index": 1, "type": "cpu"}],
            "communication": {"backend": "gloo", "points": [{**reduce, "size_bytes": size} for size in (1024, 2**20, 2**25)]},
            "compute": {"components": points, "optimizers": [{**optimizer, "elements": count} for count in (1000, 2_500_000)]},
            "noise": {"drift_sigma": 0.05, "probe": {"alone": 0.01, "together": 0.01}, "source": "s"},
            "today": {"alone": 0.0125, "together": 0.0125, "created": "2026-01-02"},
            "overlap": {"compute_factor": 1.2, "communication_factor": 1.35, "source": "s"},
            "host": {"task_s": 2.5e-5, "step_s": 3e-4, "post_wait_s": 1e-4, "core_sharing": 1.08, "source": "s"},
        }
    )


def costs() -> list[dict[str, Any]]:
    milliseconds = {"median": 1.5e-3, "p05": 1.4e-3, "p95": 1.7e-3}
    around_one = {"median": 0.9e-3, "p05": 0.8e-3, "p95": 1.1e-3}
    return [
        {"component": "stem", "phase": "forward", "samples": 16, "seconds": milliseconds, "source": "measured"},
        {"component": "layer1.0", "phase": "backward", "samples": 16, "seconds": around_one, "source": "fitted"},
    ]


def collective_cost() -> dict[str, Any]:
    return {
        "operation": "all_reduce",
        "algorithm": "ring",
        "size_bytes": 25 * 2**20,
        "ranks": [0, 1, 2, 3],
        "source": "fitted",
        "seconds": {"median": 4e-4, "p05": 3.8e-4, "p95": 4.4e-4},
        "busbw_bytes_per_s": 98.3e9,
    }


AT_PACE = {"slowness": 1.21, "predicted": 0.097, "relative_error": -0.03}


def golden_tables() -> dict[str, list[ReportTable]]:
    ranked = results(RESNET)
    timeline = run_in_order(graph := step_graph(RESNET[:3], dp=2), durations_s(graph, 2e-3))
    return {
        "report_strategies": [tables.strategy_table(ranked, chosen=ranked[0], title="resnet50 on dgx1-v100-32gb")],
        "report_validation": [
            tables.validation_table([("resnet_small", "hp pp=2 dp=2 tp=1 mb=2x16 1f1b", comparison())]),
            tables.validation_table(
                [
                    ("resnet_small", "dp pp=1 dp=2 tp=1 mb=1x16", {**comparison(), "at_pace": AT_PACE}),
                    ("resnet_small", "single pp=1 dp=1 tp=1 mb=1x32", comparison()),
                ],
                title="One whose pace is known",
            ),
            tables.kind_table(comparison()),
            tables.largest_errors_table(comparison()),
        ],
        "report_calibration": [calibration_table(profile())],
        "report_costs": [tables.cost_table(costs(), title="Costs on here"), tables.cost_table([collective_cost()])],
        "report_ranks": [
            tables.memory_table(memory_of(2, 32 * 2**30)),
            tables.breakdown_table(breakdown_of(timeline, 2)),
        ],
    }


@pytest.mark.parametrize("name", list(golden_tables()))
def test_tables_are_the_golden_ones(name: str) -> None:
    text = "\n".join(to_text(table) for table in golden_tables()[name])
    assert text == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@given(st.integers(40, 250))
def test_text_keeps_every_word_at_every_width(width: int) -> None:
    ranked = results(RESNET)
    text = to_text(tables.strategy_table(ranked, chosen=ranked[0]), width)
    words = set(" ".join(str(result["reason"]) for result in ranked).split())
    assert words <= set(text.replace(";", " ").split())
    if width >= 110:
        assert max(map(len, text.splitlines())) <= width


def test_rich_and_text_show_the_same_cells() -> None:
    for table in (table for group in golden_tables().values() for table in group):
        console = Console(width=250)
        with console.capture() as capture:
            console.print(to_rich(table, 250))
        shown = set(capture.get().split())
        assert {word for row in table.rows for cell in row for word in cell.split()} <= shown


def test_the_choice_is_marked_once() -> None:
    ranked = results(RESNET)
    twice = [ranked[1], ranked[1], ranked[0]]
    by_name = tables.strategy_table(twice, chosen="dp")
    assert [row[0] for row in by_name.rows] == ["> dp", "dp", "adaptive"]
    assert by_name.emphasised == (0,)
    assert tables.strategy_table(twice, chosen=ranked[0]).emphasised == (2,)
    assert tables.strategy_table(twice).emphasised == ()


def test_where_costs_come_from_is_said_per_plan_when_it_differs() -> None:
    ranked = results(RESNET)[:2]
    mixed = [ranked[0], {**ranked[1], "cost_sources": {"fitted": 0.25, "measured": 0.75}}]
    note = tables.strategy_table(mixed).notes[-1]
    assert note == "sources of the costs, by share of the task seconds: adaptive fitted 100%; dp measured 75%, fitted 25%"


@pytest.mark.parametrize(
    ("interval", "texts"),
    [
        ({"median": 0.812, "p05": 0.79, "p95": 0.84}, ("812 ms", "790–840 ms")),
        ({"median": 0.95, "p05": 0.891, "p95": 1.02}, ("950 ms", "891 ms – 1.02 s")),
        ({"median": 7300.0, "p05": 7200.0, "p95": 7500.0}, ("2 h 01 min", "2 h 00 min – 2 h 05 min")),
        ({"median": 0.0, "p05": 0.0, "p95": 0.0}, ("0 s", "0–0 s")),
    ],
)
def test_intervals_share_their_unit(interval: dict[str, float], texts: tuple[str, str]) -> None:
    assert tables.interval_texts(interval) == texts


def test_small_texts() -> None:
    assert [tables.format_error(error) for error in (0.042, -0.1, -0.0004, None)] == ["+4.2%", "-10.0%", "0.0%", "n/a"]
    assert [tables.format_rate(rate) for rate in (0.123, 45.6, 1234.0)] == ["0.123", "45.6", "1.23 k"]
    assert tables.plan_text("by hand") == "by hand"
    assert tables.plan_text("") == tables.NOTHING
    single, piped = results(RESNET)[-1]["plan"], results(RESNET)[2]["plan"]
    assert tables.plan_text(single) == "1 device mb=1x256"
    assert tables.plan_text(piped) == "pp=2 dp=4 mb=8x8 1f1b"


def test_equal_ranks_share_a_column_and_the_fullest_are_shown() -> None:
    one = memory_of(1, 2**34)[0]
    equal = tables.memory_table([{**one, "rank": rank} for rank in range(4)])
    assert [column.name for column in equal.columns] == ["line", "ranks 0-3"]
    many = tables.memory_table(memory_of(12, 2**34))
    assert [column.name for column in many.columns] == ["line", *(f"rank {rank}" for rank in range(4, 12))]
    assert many.notes == ("the 8 fullest of 12 different ranks",)
    as_mapping = tables.memory_table([{"rank": 0, "lines": dict(one["lines"]), "limit_bytes": None}])
    assert as_mapping.rows[-1] == ("device limit", tables.NOTHING)


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_shipped_profile_has_a_summary(name: str) -> None:
    table = calibration_table(load_profile(name))
    assert table.rows
    assert to_text(table)


def test_names_of_the_user_are_text_that_a_terminal_does_not_obey() -> None:
    hostile = "\x1b[31mred\x07 [red]layer[/red][0]"
    table = ReportTable(title=hostile, columns=(Column(name=hostile),), rows=((hostile,),), notes=(hostile,))
    console = Console(file=io.StringIO(), width=100)
    console.print(to_rich(table, 100))
    for text in (to_text(table), console.file.getvalue()):  # type: ignore[attr-defined]
        assert text.count("\\x1b[31mred\\x07 [red]layer[/red][0]") == 4
        assert "\x1b[31mred" not in text


def test_many_runs_of_ranks_are_cut_short() -> None:
    """1,008 ranks in rows of every third fill a line otherwise that no terminal holds."""
    zeros = dict.fromkeys(tables.CATEGORIES, 0.0)
    rows = [{"rank": rank, **zeros, "compute_s": 1.0 + (rank % 3 == 0)} for rank in range(1008)]
    ranks = [row[0] for row in tables.breakdown_table(rows).rows]
    assert ranks == ["0,3,6,9,... (336 ranks)", "1-2,4-5,7-8,10-11,... (672 ranks)"]
    few = tables.breakdown_table(rows[:24])
    assert [row[0] for row in few.rows] == ["0,3,6,9,12,15,18,21", "1-2,4-5,7-8,10-11,13-14,16-17,19-20,22-23"]


# trace.json: the schema that Perfetto reads, spans that nest, nothing left out.

NEEDED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}


def check_trace(document: dict[str, Any]) -> None:
    """The own schema: keys per phase, times, names of processes and threads, order, arrows in pairs, no partial overlap."""
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    events = document["traceEvents"]
    for event in events:
        assert set(event) >= NEEDED[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert all(event["ph"] == "M" for event in events[: len(events) - len(timed)]), "metadata comes first"
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    assert len(named) == sum(event["name"] == "thread_name" for event in events)
    spans = defaultdict(list)
    for event in (event for event in timed if event["ph"] == "X"):
        assert event["dur"] >= 0
        assert (event["pid"], event["tid"]) in named
        assert event["pid"] in processes
        spans[event["pid"], event["tid"]].append((round(event["ts"] * 1000), round(event["dur"] * 1000)))
    for lane in spans.values():
        for (start, length), (following, _) in pairwise(lane):
            assert start + length <= following, "spans of one thread overlap"
    arrows = defaultdict(list)
    for event in (event for event in timed if event["ph"] in "sf"):
        arrows[event["id"]].append(event)
    for start, finish in arrows.values():
        assert (start["ph"], finish["ph"]) == ("s", "f")
        assert start["ts"] <= finish["ts"]
        assert start["pid"] != finish["pid"]


def test_predicted_and_measured_steps_of_a_pipeline() -> None:
    graph = step_graph(RESNET[:7], pp=2, dp=2, microbatches=3)
    seconds = durations_s(graph, 2e-3)
    timelines = {"predicted": run_in_order(graph, seconds), "measured": measured_steps(graph, seconds, 1, seed=3)[0]}
    document = json.loads(json.dumps(chrome_trace(graph, timelines)))
    check_trace(document)
    events = document["traceEvents"]
    found = Counter(event["args"]["task"] for event in events if event["ph"] == "X")
    assert found == {task.index: 2 * len(task.resources) for task in graph.tasks}
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {f"rank {rank} · {name}" for rank in range(4) for name in timelines}
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {"compute", "host", "dp", "pp>2", "pp<2", "pp>3", "pp<3", "pp>0", "pp<0", "pp>1", "pp<1"}
    forward = next(event for event in events if event.get("cat") == "forward")
    assert forward["name"].startswith("F stem mb0")
    assert forward["args"]["component"] == "stem"
    assert forward["args"]["samples"] == 16
    transfers = [event for event in events if event.get("cat") == "send_recv" and event["ph"] == "X"]
    assert all(event["args"]["size_bytes"] == 4 * 2**20 for event in transfers)
    assert sum(event["ph"] == "s" for event in events) == 2 * 3 * 2 * len(timelines)
    longest = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert longest == pytest.approx(1e6 * max(timeline.makespan_s for timeline in timelines.values()), abs=1e-2)


def opening_first(edge: tuple[int, int]) -> tuple[int, int]:
    return edge[0], -edge[1]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20))
def test_overlapping_spans_are_spread_over_threads(pieces: list[tuple[float, float]]) -> None:
    """Clocks of several hosts may make the spans of one stream overlap; no viewer draws that on one thread."""
    work = Compute(component="c", phase=Phase.FORWARD, samples=1)
    tasks = tuple(
        Task(index=number, work=work, resources=(Resource(0, COMPUTE),), dependencies=(), origin=Origin(stage=0))
        for number in range(len(pieces))
    )
    spans = [Span(number, "r0.compute", start, start + length) for number, (start, length) in enumerate(pieces)]
    document = chrome_trace(TaskGraph(tasks=tasks, world_size=1), {"measured": Timeline.from_spans(spans, "measured")})
    check_trace(document)
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert sorted(event["args"]["task"] for event in events) == list(range(len(pieces)))
    edges = sorted(
        [(round(s * 1e9), 1) for s, _ in pieces] + [(round((s + d) * 1e9), -1) for s, d in pieces], key=opening_first
    )
    deepest = int(np.max(np.cumsum([step for _, step in edges])))
    assert len({event["tid"] for event in events}) <= deepest, "no more threads than spans at once"


def test_a_foreign_timeline_is_refused() -> None:
    graph = step_graph(["a", "b"])
    timeline = Timeline.from_spans([Span(len(graph.tasks), "r0.compute", 0.0, 1.0)], "measured")
    with pytest.raises(GraphError, match="names task 6, but the graph has 6 tasks"):
        chrome_trace(graph, {"measured": timeline})


def test_it_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    graph = step_graph(["a", "b"])
    timeline = run_in_order(graph, durations_s(graph, 1e-3))
    save_chrome_trace(tmp_path / "trace.json", graph, {"predicted": timeline})
    check_trace(json.loads((tmp_path / "trace.json").read_text()))
    with pytest.raises(GraphError):
        save_chrome_trace(tmp_path / "other.json", step_graph(["a"]), {"predicted": timeline})
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


# Pictures in files: of every result a figure, PNG, SVG or PDF by the ending, and drawn as large as the numbers are.


def extents(picture: Any) -> dict[str, list[tuple[float, float, float, float]]]:
    """By colour, (left, right, bottom, top) of the rectangles of a picture, as they were given."""
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for axes in picture.axes:
        for collection in axes.collections:
            for path in collection.get_paths() if len(collection.get_facecolor()) else ():
                (left, bottom), (right, top) = path.vertices.min(axis=0), path.vertices.max(axis=0)
                colour = "#" + "".join(f"{round(255 * part):02X}" for part in collection.get_facecolor()[0][:3])
                found.setdefault(colour, []).append((left, right, bottom, top))
    return found


def test_a_timeline_covers_the_time_of_its_tasks() -> None:
    graph = step_graph(RESNET, pp=2, dp=2, microbatches=4)
    timeline = run_in_order(graph, durations_s(graph, 1e-3))
    picture = drawn(figures.timeline_figure(graph, {"Predicted": timeline, "Measured": timeline}), "a step")
    assert [axes.get_title(loc="left")[:9] for axes in picture.axes] == ["Predicted", "Measured "]
    assert [text.get_text() for text in picture.texts] == ["a step"]
    boxes = [box for of_colour in extents(picture).values() for box in of_colour]
    assert len(boxes) == 2 * len(timeline)
    assert sum(right - left for left, right, _, _ in boxes) == pytest.approx(2e3 * sum(span.duration_s for span in timeline))
    names = {text.get_text() for text in picture.legends[0].get_texts()}
    assert names == {"load", "forward", "backward", "optimizer", "all_reduce", "send_recv"}


def test_bars_stack_and_intervals_reach_as_far_as_they_do() -> None:
    memory = drawn(figures.memory_figure(memory_of(2, 4 * 2**30)), "memory")
    tops = [
        max(top for of_colour in extents(memory).values() for left, _, _, top in of_colour if round(left) == rank)
        for rank in (0, 1)
    ]
    assert tops == pytest.approx([sum(size for _, size in rank["lines"]) / 2**30 for rank in memory_of(2, 1)])
    results = report_data().sections[0].results
    plans = drawn(figures.strategies_figure(results), "plans")
    lines = [line for bars in plans.axes[0].containers for bar in bars[2] for line in bar.get_segments() if len(line)]
    reached, steps = np.concatenate(lines), [result["step_s"] for result in results if result["fits"]]
    assert sorted(reached[:, 0]) == pytest.approx(sorted(1e3 * step[end] for step in steps for end in ("p05", "p95")))


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")])
def test_the_ending_decides_and_one_figure_makes_one_file(tmp_path: Path, ending: str, begins: bytes) -> None:
    run = measured_run("dp", RESNET[:4], pp=1, dp=2, microbatches=1, seed=1, steps=1)
    figure = figures.kinds_figure(run.comparison)
    for name in ("a", "b"):
        plotted(figure, "kinds & <kinds>", tmp_path / f"{name}.{ending}")
    first, second = ((tmp_path / f"{name}.{ending}").read_bytes() for name in ("a", "b"))
    assert first.startswith(begins)
    assert first == second
    assert len(first) < 150_000


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("boss.jpg", "boss.jpg ends in '.jpg'"),
        ("boss", "boss has no ending"),
        ("boss.html", "for example boss.png"),
        (".", "is a folder"),
    ],
)
def test_another_ending_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plotted(figures.memory_figure(memory_of(1, 2**30)), "memory", tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="drawn by --plot"):
        checked_ending("boss.png", PAGES, "page")


def test_without_matplotlib_the_figure_is_plotlys_and_files_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    figure = plotted(figures.memory_figure(memory_of(1, 2**30)), "memory of <me>")
    assert type(figure).__module__.startswith("plotly")
    assert figure.layout.title.text == "memory of &lt;me&gt;"
    with pytest.raises(MissingDependencyError, match="pip install matplotlib"):
        plotted(figures.memory_figure(memory_of(1, 2**30)), "memory", tmp_path / "a.png")


def test_answers_predictions_and_sweeps_have_pictures(tmp_path: Path) -> None:
    settings = {"cluster.devices": 2, "plan.strategy": "dp"}
    answer = ps.plan("mlp", cluster="dgx1-v100-32gb", global_batch=64, settings=settings, top=3)
    picture = answer.plot(tmp_path / "answer.png")
    labels = [label.get_text().partition("\n")[0] for label in picture.axes[0].get_yticklabels()]
    assert labels == [candidate.strategy for candidate in answer.candidates]
    assert " ".join(text.get_text().replace("\n", " ") for text in picture.texts) == answer.sentence()
    step = answer.prediction.plot(tmp_path / "step.svg")
    assert max(right for boxes in extents(step).values() for _, right, _, _ in boxes) > 0
    over = {"training.global_batch": [64, 128, 256], "cluster.devices": [2, 4]}
    swept = ps.sweep("mlp", over, cluster="dgx1-v100-32gb", settings={"plan.strategy": "dp"}, jobs=1, out=tmp_path / "swept")
    axes = swept.plot(tmp_path / "sweep.pdf").axes[0]
    assert axes.get_xlabel() == "Global batch"
    lines = [line.get_ydata() for line in axes.get_lines() if line.get_linestyle() == "-" and len(line.get_xdata()) == 3]
    scale = 1e3 if "thousand" in axes.get_ylabel() else 1
    for devices, line in zip((2, 4), lines, strict=True):
        expected = [row["throughput_samples_per_s"] / scale for row in swept.rows if row["cluster.devices"] == devices]
        assert list(line) == pytest.approx(expected)
    assert swept.plot(column="step_s").axes[0].get_ylabel().startswith("Time per step")
    with pytest.raises(ConfigError, match="did you mean step_s"):
        swept.plot(column="steps")
    assert {path.name for path in tmp_path.iterdir()} == {"answer.png", "step.svg", "sweep.pdf", "swept"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("explore", "swept", "--out", "boss.png"),
        ("explore", "swept", "--plot", "boss.html"),
        ("coverage", "dgx1-v100-32gb", "--out", "boss.pdf"),
        ("plan", "mlp", "--on", "dgx1-v100-32gb", "--plot", "boss.gif"),
        ("plan", "mlp", "--on", "dgx1-v100-32gb", "--target-accuracy", "0.9", "--curves", "boss.svg"),
        ("simulate", "mlp", "--on", "dgx1-v100-32gb", "--plot", "boss"),
        ("sweep", "mlp", "--on", "dgx1-v100-32gb", "--over", "cluster.devices=1,2", "--plot", "boss.txt"),
        ("validate", "RUN.toml", "--plot", "boss.toml"),
    ],
)
def test_a_wrong_ending_is_refused_before_anything_is_computed(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status_of(monkeypatch, *arguments)
    assert "and the ending decides" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_command_draws_its_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["simulate", "mlp", "--on", "dgx1-v100-32gb", "--batch", "64", "--set", "cluster.devices=2", "--strategy", "dp"]
    assert not status_of(monkeypatch, *asked, "--plot", "here/step.png")
    assert capsys.readouterr().out.endswith("Picture: here/step.png\n")
    assert (tmp_path / "here" / "step.png").read_bytes().startswith(b"\x89PNG")


def test_plans_that_do_not_fit_do_not_set_the_axis() -> None:
    (fits, *_) = (result for result in report_data().sections[0].results if result["fits"])
    slow = {**fits, "fits": False, "step_s": {end: 40 * seconds for end, seconds in fits["step_s"].items()}}
    plans = drawn(figures.strategies_figure([fits, slow]), "plans")
    _, edge = plans.axes[0].get_xlim()
    assert max(right for of_colour in extents(plans).values() for _, right, _, _ in of_colour) <= edge
    drawn_alone = drawn(figures.strategies_figure([fits]), "plan")
    assert edge <= 1.5 * drawn_alone.axes[0].get_xlim()[1]
    assert [text.get_text() for text in plans.axes[0].texts] == [f"{format_seconds(slow['step_s']['median'])} →"]
