"""Pictures in files: of every result a figure, PNG, SVG or PDF by the ending, and drawn as large as the numbers are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_samples import RESNET, durations_s, measured_run, memory_of, report_data, run_in_order, step_graph

import parsim as ps
from parsim.cli import main
from parsim.errors import ConfigError, MissingDependencyError
from parsim.report import figures
from parsim.report.picture import PAGES, checked_ending, drawn, plotted
from parsim.units import format_seconds


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
    monkeypatch.setattr(sys, "argv", ["parsim", *arguments])
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code
    assert "and the ending decides" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_command_draws_its_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["simulate", "mlp", "--on", "dgx1-v100-32gb", "--batch", "64", "--set", "cluster.devices=2", "--strategy", "dp"]
    monkeypatch.setattr(sys, "argv", ["parsim", *asked, "--plot", "here/step.png"])
    with pytest.raises(SystemExit) as ending:
        main()
    assert not ending.value.code
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
