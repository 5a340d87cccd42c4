"""report.html: one file, nothing fetched, everything escaped, every gap explained; and, slowly, in a real browser."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.offline import get_plotlyjs
from report_samples import (
    HOSTILE,
    RESNET,
    durations_s,
    measured_run,
    memory_of,
    predicted_run,
    report_data,
    results,
    run_in_order,
    step_graph,
)

from parsim.app.write_folder import report_facts
from parsim.execute.cuda.gpu import MemoryUse
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.predict.memory import RankMemory
from parsim.report import figures, legend
from parsim.report.page import ReportData, ReportSection, report_html, write_report
from parsim.report.tables import memory_levels
from parsim.report.trace import LETTERS
from parsim.units import format_seconds
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
