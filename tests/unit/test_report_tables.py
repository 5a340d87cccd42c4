"""Tables: golden texts of a fixed width, and what their cells say."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import RESNET, breakdown_of, durations_s, memory_of, results, run_in_order, step_graph
from rich.console import Console

from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile, shipped_profiles
from parsim.predict.compare import compare
from parsim.predict.result import Interval
from parsim.report import tables
from parsim.report.tables import Column, ReportTable, calibration_table, to_rich, to_text

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
