"""explorer.html: one file, nothing fetched, every name a text; and, slowly, in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import parsim as ps
from parsim.app.sweep.sweep import Sweep, open_sweep
from parsim.errors import ConfigError
from parsim.report import explorer as page
from parsim.report.explorer import ExplorerData, document_of, explorer_html
from parsim.report.legend import METRICS
from parsim.units import format_bytes, format_energy, format_money, format_percent, format_seconds
from tests.unit.browser import PATIENCE_MS, PROBLEMS_OF_ACCESS, needs_chromium, visiting

HOSTILE = "</script><img src=x onerror=alert(1)>"


def row(number: int, nodes: int, strategy: str, **changes: Any) -> dict[str, Any]:
    step_s = (1.0 + 0.2 * (strategy == "dp")) / nodes
    known = {
        "point": number,
        "cluster.nodes": nodes,
        "plan.strategy": strategy,
        "status": "ok",
        "reason": "",
        "strategy": strategy,
        "division": f"dp{8 * nodes}" if strategy == "dp" else f"pp2 dp{4 * nodes}",
        "plan": f"{strategy} plan",
        "plan_in_words": f"{8 * nodes}-way {strategy}",
        "step_s": step_s,
        "step_p05_s": 0.9 * step_s,
        "step_p95_s": 1.2 * step_s,
        "throughput_samples_per_s": 256 / step_s,
        "throughput_p05_samples_per_s": 256 / step_s / 1.2,
        "throughput_p95_samples_per_s": 256 / step_s / 0.9,
        "usd_per_million_samples": 10 * nodes * step_s,
        "usd_per_million_samples_p05": 9 * nodes * step_s,
        "usd_per_million_samples_p95": 12 * nodes * step_s,
        "peak_memory_bytes": 2**30 * (1 + (strategy == "dp")),
        "peak_memory_p05_bytes": 2**30,
        "peak_memory_p95_bytes": 2**31,
        "memory_limit_bytes": 2**34,
        "compute_s": 0.8 * step_s,
        "exposed_communication_s": 0.2 * step_s,
        "one_step_s": step_s,
        "timeline": [["rank 0 computation", "F100B150.40O10"], ["rank 0 communication", ".150C140.10"]],
        "memory_activations_bytes": 2**29,
        "memory_parameters_bytes": 2**29,
    }
    return {**known, **changes}


def rows(strategies: tuple[str, ...] = ("dp", "mp")) -> list[dict[str, Any]]:
    found = [row(0, nodes, strategy) for nodes in (1, 2, 4, 8) for strategy in strategies]
    return [{**entry, "point": number} for number, entry in enumerate(found)]


def data_of(given: list[dict[str, Any]], **changes: Any) -> ExplorerData:
    kept = {"title": "a sweep", "summary": ["8 points."], "axes": ["cluster.nodes", "plan.strategy"], "rows": given}
    return ExplorerData(**{**kept, **changes})


def document_in(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="sweep">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def test_the_page_is_whole_small_and_fetches_nothing() -> None:
    text = explorer_html(data_of(rows()))
    assert len(text.encode()) < page.LARGEST_BYTES
    assert "default-src 'none'" in text
    assert text.count("plotly.js v") == 1
    own = text[: text.index("plotly.js v")] + text[text.rindex("const Page") :]
    assert not re.search(r"(src|href)=\"(?!#|data:)", own)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|innerHTML|eval\(", own)


def test_the_document_holds_every_point_as_it_is() -> None:
    given = rows()
    document = document_of(data_of(given, picked=3))
    assert document["count"] == 8
    assert document["picked"] == 3
    nodes, strategy = document["axes"]
    assert (nodes["values"], strategy["values"]) == ([1, 2, 4, 8], ["dp", "mp"])
    assert [nodes["values"][place] for place in nodes["at"]] == [entry["cluster.nodes"] for entry in given]
    by_key = {metric["key"]: metric for metric in document["metrics"]}
    assert by_key["step_s"]["median"] == pytest.approx([entry["step_s"] for entry in given], rel=1e-4)
    assert by_key["usd_per_million_samples"]["high"] == pytest.approx([entry["usd_per_million_samples_p95"] for entry in given])
    assert set(by_key) == {metric[0] for metric in METRICS if metric[0] in given[0]}
    assert [entry["name"] for entry in document["categories"]] == ["compute", "exposed communication"]
    assert [entry["name"] for entry in document["memory"]] == ["activations", "parameters"]
    plans = document["texts"]["plan"]
    assert [plans["words"][code] for code in plans["codes"]] == [entry["plan"] for entry in given]


@pytest.mark.parametrize("timelines", [True, False])
def test_a_page_that_is_too_large_loses_timelines_before_points(monkeypatch: pytest.MonkeyPatch, timelines: bool) -> None:
    given = [{**entry, "point": number} for number, entry in enumerate(rows() * 100)]
    given = given if timelines else [{**entry, "timeline": []} for entry in given]
    largest = len(explorer_html(data_of(given)).encode()) - (5_000 if timelines else 20_000)
    monkeypatch.setattr(page, "LARGEST_BYTES", largest)
    text = explorer_html(data_of(given, picked=777))
    document = document_in(text)
    assert len(text.encode()) <= largest
    assert document["numbers"][document["picked"]] == 777
    if timelines:
        assert document["count"] == 800
        with_lanes = [number for number, lanes in enumerate(document["timeline"]["at"]) if lanes]
        assert with_lanes == sorted({*range(0, 800, 2), 777})
        assert "has the timelines of 401 of 800 points" in document["notes"][0]
    else:
        assert document["count"] < 800
        assert "of 800 points; points.csv has all" in " ".join(document["notes"])


def test_hostile_names_are_data() -> None:
    given = [{**entry, "plan": HOSTILE, "plan.strategy": HOSTILE, "division": HOSTILE, "reason": HOSTILE} for entry in rows()]
    text = explorer_html(data_of(given, title=HOSTILE, summary=[HOSTILE], notes=[HOSTILE], command=HOSTILE))
    assert "<img src=x" not in text
    document = document_in(text)
    assert document["title"] == HOSTILE
    assert document["axes"][1]["values"] == [HOSTILE]


def test_a_sweep_becomes_a_page(tmp_path: Path) -> None:
    settings = {"plan.strategy": "custom", "plan.mesh": {"dp": 2}, "cluster.devices": 2}
    out = tmp_path / "sweep"
    over = {"training.global_batch": [64, 65, 128]}
    found = ps.sweep(
        "mlp", over, cluster="dgx1-v100-32gb", global_batch=64, settings=settings, jobs=1, out=out, goal="max throughput"
    )
    assert found.explore() == out / "explorer.html"
    document = document_in((out / "explorer.html").read_text(encoding="utf-8"))
    assert document["picked"] == 2
    assert document["summary"][:2] == found.heading()
    assert document["answer"].startswith("Max throughput: 2-way data parallelism")
    assert "global batch 128 takes" in document["answer"]
    assert [axis["name"] for axis in document["axes"]] == ["Global batch"]
    assert document["texts"]["status"]["words"] == ["ok", "failed"]
    assert document["command"].startswith("parsim plan mlp --on dgx1-v100-32gb --batch 64 --set ")
    again = open_sweep(out).explore(tmp_path / "other.html")
    assert again.read_bytes() == (out / "explorer.html").read_bytes()
    with pytest.raises(ConfigError, match="is a folder"):
        found.explore(tmp_path)
    with pytest.raises(ConfigError, match="has no folder"):
        Sweep(title="t", axes=(), settings=(), answers=()).explore()


def sampled() -> list[dict[str, Any]]:
    """A field of a sample: more values than a slider has steps."""
    return [row(number, 1, "dp", **{"scale.links": 0.5 + number / 100, "step_s": 1 + number / 100}) for number in range(100)]


ON_FIRST_SCREEN = """['h1', '.hero .plot'].map((found) => {
  const box = document.querySelector(found).getBoundingClientRect();
  return box.top >= 0 && box.bottom <= window.innerHeight && box.height > 20;
})"""
COLOURS_OF_LANES = """(() => {
  const {z, text, colorscale, zmin, zmax} = document.getElementById("timeline").data[0], found = {};
  const at = (value) => colorscale.filter(([from]) => from <= (value - zmin) / (zmax - zmin)).at(-1)[1];
  z.forEach((line, row) => line.forEach((value, column) => { if (value !== null) found[text[row][column]] = at(value); }));
  const probe = document.createElement("i");
  document.body.append(probe);
  const rgb = (colour) => { probe.style.color = colour; return getComputedStyle(probe).color; };
  return Object.fromEntries(Object.entries(found).sort().map(([name, colour]) => [name, rgb(colour)]));
})()"""
COLOURS_OF_LEGEND = """Object.fromEntries([...document.querySelectorAll("#timeline-legend span")]
  .map((entry) => [entry.textContent, getComputedStyle(entry.querySelector("i")).backgroundColor]).sort())"""
MARK_OF_POINT = """(point) => {
  const plot = document.getElementById("front"), {xaxis, yaxis} = plot._fullLayout, {x, y, customdata} = plot.data[0];
  plot.scrollIntoView({block: "end", behavior: "instant"});
  const box = plot.getBoundingClientRect(), at = customdata.indexOf(point);
  return [box.left + xaxis._offset + xaxis.d2p(x[at]), box.top + yaxis._offset + yaxis.d2p(y[at])];
}"""
"""Where a point is drawn in the window."""


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_in_a_browser(tmp_path: Path, width: int) -> None:
    """Every view is drawn; sliders, keys and the address change it; nothing is fetched, nothing scrolls sideways."""
    given = [*rows(), row(8, 8, "mp", status="failed", reason=HOSTILE)]
    given.append(row(9, 1, HOSTILE, plan_in_words=HOSTILE, timeline=[[HOSTILE, "F300"]]))
    path = tmp_path / "explorer.html"
    path.write_text(explorer_html(data_of(given, picked=2, answer="dp on 2 nodes is cheapest.")), encoding="utf-8")
    with visiting(width) as visit:
        tab = visit.tab(path.as_uri())
        assert tab.locator("#point-title").inner_text() == "Point 2"
        assert tab.locator("h1").inner_text() == "dp on 2 nodes is cheapest."
        assert tab.evaluate(ON_FIRST_SCREEN) == [True, True]
        assert tab.locator("#controls select:visible, #controls input:visible").count() == 3 + 1
        drawn = tab.evaluate("[...document.querySelectorAll('.plot')].map((plot) => plot.querySelectorAll('.main-svg').length)")
        assert all(drawn)
        assert len(drawn) == 6
        assert tab.locator("#timeline-legend span").all_inner_texts() == ["forward", "backward", "optimizer", "collective"]
        assert tab.evaluate("document.getElementById('timeline').data[0].z.map((line) => line.length)") == [300, 300]
        assert tab.evaluate(COLOURS_OF_LANES) == tab.evaluate(COLOURS_OF_LEGEND)
        marks = "document.getElementById('curve').data.reduce((sum, trace) => sum + (trace.error_y ? trace.x.length : 0), 0)"
        assert tab.evaluate(marks) == 9
        assert "twice the devices, twice the throughput" in tab.locator("#curve-legend").inner_text()
        assert tab.evaluate("document.getElementById('curve').data.at(-1).y") == [256, 8 * 256]
        tab.mouse.move(*tab.evaluate(MARK_OF_POINT, 6))
        visit.expect(tab.locator("#point-title")).to_have_text("Point 6 under the cursor")
        tab.mouse.move(1, 1)
        visit.expect(tab.locator("#point-title")).to_have_text("Point 2")
        assert "point=" not in tab.evaluate("location.hash")
        slider = tab.locator("[id='control-cluster.nodes']")
        slider.focus()
        tab.keyboard.press("ArrowRight")
        tab.keyboard.press("ArrowRight")
        assert slider.get_attribute("aria-valuetext") == "2"
        front = "document.getElementById('front').data[0].x.length"
        assert tab.evaluate(front) == 2
        tab.keyboard.press("b")
        assert tab.locator("#point-title").inner_text() == "Point 3"
        tab.locator("#point-card").press("ArrowLeft")
        assert tab.locator("#point-title").inner_text() == "Point 2"
        assert tab.evaluate(PROBLEMS_OF_ACCESS) == []
        tab.locator("[id='control-metric']").select_option("usd_per_million_samples")
        tab.locator("#theme").click()
        address = tab.evaluate("location.hash")
        assert "metric=usd_per_million_samples" in address
        assert "theme=dark" in address
        assert tab.evaluate(PROBLEMS_OF_ACCESS) == []
        tab.locator("#points summary").click()
        # the table is filled once the browser says it is open
        visit.expect(tab.locator("#table tbody tr")).to_have_count(2)
        other = visit.browser.new_page(viewport={"width": width, "height": 900})
        other.set_default_timeout(PATIENCE_MS)
        other.goto(f"{path.as_uri()}{address}")
        other.wait_for_selector("body[data-ready]", state="attached")
        assert other.evaluate(front) == 2
        assert other.evaluate("document.documentElement.dataset.theme") == "dark"
        assert other.locator("#control-metric").input_value() == "usd_per_million_samples"
        other.goto(f"{path.as_uri()}#point=9")
        other.reload()
        other.wait_for_selector("body[data-ready]", state="attached")
        assert HOSTILE in other.locator("#point-words").inner_text()
        assert other.locator("img").count() == 0
        widths = tab.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert widths[0] <= widths[1], "the page scrolls sideways"
        samples = tmp_path / "samples.html"
        samples.write_text(explorer_html(data_of(sampled(), axes=["scale.links"])), encoding="utf-8")
        other.goto(samples.as_uri())
        other.wait_for_selector("body[data-ready]", state="attached")
        steps = other.locator("[id='control-scale.links']")
        assert steps.get_attribute("max") == "7"
        steps.focus()
        for _ in range(2):
            other.keyboard.press("ArrowRight")
        assert steps.get_attribute("aria-valuetext") == "0.63 to 0.74"
        assert other.evaluate(front) == 12
        tab.emulate_media(media="print")
        assert not tab.locator("#theme").is_visible()
    assert visit.problems == []
    assert visit.requests == [path.as_uri()]


@pytest.mark.slow
@needs_chromium
def test_a_slider_between_points_shows_what_is_interpolated_and_says_so(tmp_path: Path) -> None:
    """Steps of 1/nodes: between 2 and 4 nodes logarithms interpolate them exactly; at computed points no mark of it is left."""
    path = tmp_path / "explorer.html"
    path.write_text(explorer_html(data_of(rows())), encoding="utf-8")
    with visiting(1280) as visit:
        tab = visit.tab(f"{path.as_uri()}#:cluster.nodes=1.5&:plan.strategy=1&metric=step_s")
        assert tab.locator("#point-title").inner_text() == "Between computed points"
        assert "Interpolated between points 3, 5" in tab.locator("#point-words").inner_text()
        slider = tab.locator("[id='control-cluster.nodes']")
        assert slider.get_attribute("aria-valuetext") == "≈ 2.83, interpolated"
        told = dict(
            zip(
                tab.locator("#point-figures dt").all_inner_texts(),
                tab.locator("#point-figures dd").all_inner_texts(),
                strict=True,
            )
        )
        step_s = 1 / 8**0.5
        assert told["Time per step"].startswith(f"≈ {format_seconds(step_s)}")
        assert told["Nodes"].strip() == "≈ 2.83"
        lengths = tab.evaluate("document.getElementById('breakdown').data.map((trace) => trace.x[0])")
        assert sum(lengths) == pytest.approx(1e3 * step_s, rel=1e-3)
        marks = (
            "document.getElementById('curve').data.filter((trace) => (trace.text || [])[0] === 'interpolated')"
            ".map((trace) => [trace.x[0], trace.y[0]])"
        )
        assert tab.evaluate(marks) == [pytest.approx([8**0.5, step_s], rel=1e-3)]
        assert not tab.locator("#command").is_visible()
        assert not tab.locator("#timeline").is_visible()
        slider.focus()
        tab.keyboard.press("ArrowRight")
        assert slider.get_attribute("aria-valuetext") == "4"
        assert tab.locator("#point-title").inner_text() == "Point 5"
        assert tab.evaluate(marks) == []
    assert visit.problems == []


@pytest.mark.slow
@needs_chromium
def test_pages_write_quantities_as_the_commands_do(tmp_path: Path) -> None:
    path = tmp_path / "explorer.html"
    path.write_text(explorer_html(data_of(rows())), encoding="utf-8")
    values = [0.0123, 0.6, 1.0, 12.345, 999.7, 1234.6, 45_678.9, 1_234_567.8, 10_950_942.43, 2.5e9]
    seconds = [4.2e-7, 1.5e-3, 0.9997, 59.0, 61.0, 3599.0, 7500.0, 400_000.0]
    writers = {
        "usd": format_money,
        "bytes": format_bytes,
        "energy": format_energy,
        "time": format_seconds,
    }
    with visiting(1280) as visit:
        tab = visit.tab(path.as_uri())
        for kind, write in writers.items():
            asked = seconds if kind == "time" else values
            told = tab.evaluate("([kind, values]) => values.map((value) => Page.format(kind, value))", [kind, asked])
            assert told == [write(value) for value in asked]
        assert tab.evaluate("Page.format('share', 0.1234)") == format_percent(0.1234)
        assert tab.evaluate("Page.format('rate', 2893)") == "2.89 k samples/s"
