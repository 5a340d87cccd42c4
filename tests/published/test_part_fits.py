"""Fits of hardware parts: a known truth comes back exactly, and the shipped parts come from the published tables."""

from __future__ import annotations

import csv
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parsim
from parsim.costs.compute.formula import tile_seconds
from parsim.hardware.records import to_text
from tools.parts import attentions, collectives, products
from tools.parts.catalog import GPUS, IDLE, LAUNCH, CatalogGpu
from tools.parts.robust import named

ROOT = Path(__file__).resolve().parents[2]
SYNTHETIC = Path(__file__).parent / "parts_synthetic"
PARTS = ROOT / "hardware_profiles" / "parts"
TRUTH = {
    "utilisation": 0.7,
    "operand_overhead": 12.0,
    "depth_overhead": 70.0,
    "quantisation": 0.5,
    "floor_s": 4e-6,
    "bandwidth_fraction": 0.9,
    "split_cost": 2.0,
    "sharpness": 3.0,
}
"""What `parts_synthetic/gemm.csv` was computed from, on 100 multiprocessors, 300 TFLOP/s and 2 TB/s."""
CHIP = products.Chip(100, 300e12, 2e12)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def data_folder() -> Path:
    """The tables of published timings, which are not part of the repository."""
    folder = Path(os.environ.get("PARSIM_GPU_OPS", ROOT.parent / "shared" / "data" / "gpu_ops"))
    if not folder.is_dir():
        pytest.skip("the tables of published GPU timings are not here: set PARSIM_GPU_OPS to their folder")
    return folder


def test_the_synthetic_table_is_the_truth() -> None:
    rows = products.products_of(products.read_products(SYNTHETIC), ("Made-up",), products.HALF)
    coefficients = {**TRUTH, **CHIP.coefficients()}
    seconds = tile_seconds(rows.rows, rows.columns, rows.depth, rows.problems, rows.size_bytes, coefficients)
    np.testing.assert_allclose(seconds, rows.seconds, rtol=1e-9)


def test_the_fit_finds_the_truth() -> None:
    rows = products.products_of(products.read_products(SYNTHETIC), ("Made-up",), products.HALF)
    loose = products.BASE.__class__(products.NAMES, products.BASE.mean, products.BASE.sigma * 100)
    found = named(products.NAMES, products.fit_products(rows, CHIP, loose))
    told = products.predicted(rows, CHIP, found)
    np.testing.assert_allclose(told, rows.seconds, rtol=2e-3)
    for name in ("utilisation", "floor_s", "quantisation", "depth_overhead", "bandwidth_fraction"):
        assert found[name] == pytest.approx(TRUTH[name], rel=0.05), name


def test_without_rows_the_prior_decides() -> None:
    rows = products.products_of(products.read_products(SYNTHETIC), ("No such GPU",), products.HALF)
    assert len(rows) == 0
    np.testing.assert_array_equal(products.fit_products(rows, CHIP, products.BASE), products.BASE.mean)


def test_a_burst_is_faster_only_while_it_is_short() -> None:
    rows = products.products_of(products.read_products(SYNTHETIC), ("Made-up",), products.HALF)
    parameters = {**TRUTH, "burst_gain": 1.2, "burst_s": 1e-4}
    short = replace(rows, sustained=0 * rows.sustained)
    gain = products.predicted(rows, CHIP, parameters) / products.predicted(short, CHIP, parameters)
    assert gain.min() >= 1
    assert gain.max() <= 1.2
    assert gain[np.argmax(rows.flop)] < 1.03


@pytest.mark.parametrize("limits", [{}, {"b200": 1000.0, "gb200": 1200.0, "b300": 1400.0}])
def test_bursts_alone_take_the_gain_that_others_of_the_family_show(limits: dict[str, float]) -> None:
    """Two boards are known by both kinds of rows, another by bursts alone, which a fit by itself takes for sustained.

    What a burst gains falls with the limit of power: the logarithm of the gain is linear in that of the watts.
    """
    from tools.parts.gpus import fit_all

    rows = products.products_of(products.read_products(SYNTHETIC), ("Made-up",), products.HALF)
    long = replace(rows, rows=16 * rows.rows, sustained=1 + 0 * rows.sustained)
    short = replace(long, sustained=0 * rows.sustained)

    def truth(name: str) -> dict[str, float]:
        gain = 1.25 * (limits[name] / 1000) ** -0.6 if limits else 1.25
        return {**TRUTH, "burst_gain": gain, "burst_s": 1.0}

    def timed(name: str, *pieces: products.Products) -> products.Products:
        columns = ("rows", "columns", "depth", "problems", "size_bytes", "sustained")
        joined = {column: np.concatenate([getattr(piece, column) for piece in pieces]) for column in columns}
        source = tuple("made-pow" if some else "made-burst" for some in joined["sustained"])
        whole = products.Products(**joined, seconds=joined["rows"], source=source)
        return replace(whole, seconds=products.predicted(whole, CHIP, truth(name)))

    bursts = timed("b300", short)
    data = {"b200": timed("b200", long, short), "gb200": timed("gb200", long, short), "b300": bursts}
    empty = bursts.where(np.zeros(len(bursts), dtype=bool))
    assert products.untold(data["b200"]) == ()
    assert [products.NAMES[number] for number in products.untold(bursts)] == ["burst_gain", "burst_s"]

    def fitted(**values: Any) -> float:
        found = fit_all(
            products.BASE,
            lambda gpu: data.get(gpu.name, empty),
            lambda gpu: CHIP if gpu.name in data else None,
            products.fit_products,
            products.judge,
            lambda *_: {},
            lambda rows: np.asarray(rows.flop),
            **values,
        )
        assert {gpu.name for gpu in GPUS} > set(found)
        large = long.where(long.flop > 1e11)
        told, true = (products.predicted(large, CHIP, some) for some in (found["b300"].parameters, truth("b300")))
        return float(np.median(told / true))

    assert fitted(untold=products.untold, watts=limits) == pytest.approx(1, abs=0.03)
    if limits:
        assert fitted(untold=products.untold) > 1.05
    else:
        assert fitted() < 0.97


def test_a_board_is_no_slower_than_a_lesser_one_that_was_measured() -> None:
    """By fits to two tables the B300 multiplied 1% slower than the B200, with a tenth more watts and no less of the rest."""
    from tools.parts.gpus import Fitted, no_slower

    def fit(utilisation: float, points: int = 200) -> Fitted:
        return Fitted({**TRUTH, "utilisation": utilisation}, points, (1e8, 1e13), {}, [])

    fits = {"b200": fit(0.70), "b300": fit(0.69), "gb200": fit(0.71), "h200": fit(0.5), "gb300": fit(0.9, points=0)}
    watts = {"b200": 1000.0, "b300": 1100.0, "gb200": 1200.0, "h200": 1400.0, "gb300": 900.0}
    found = no_slower(fits, lambda gpu: CHIP if gpu.name in fits else None, watts)
    raised = {name: entry.parameters["utilisation"] for name, entry in found.items()}
    assert raised == pytest.approx({"b200": 0.70, "b300": 0.70, "gb200": 0.71, "h200": 0.5, "gb300": 0.9}, rel=1e-4)
    smaller = replace(CHIP, peak_flop_per_s=CHIP.peak_flop_per_s / 1.01)
    found = no_slower(fits, lambda gpu: {**dict.fromkeys(fits, CHIP), "b300": smaller}.get(gpu.name), watts)
    assert found["b300"] == fits["b300"]


BOARDS = {
    "bf16": ("a100-pcie-40gb < a100-pcie-80gb < a100-sxm-80gb", "h100-pcie < h100-sxm < h200", "b200 < b300 < gb300"),
    "fp8": ("h100-pcie < h100-sxm < h200", "b200 < b300 < gb300", "b200 < gb200 < gb300", "mi300x < mi325x"),
    "nvfp4": ("b200 < b300 < gb300", "b200 < gb200 < gb300"),
    "amp_fp16": ("v100-pcie-16gb < v100-sxm-16gb", "a100-sxm-40gb < a100-sxm-80gb", "mi300x < mi325x", "b200 < gb200 < gb300"),
}
"""Boards of one silicon, each with no less power, peak and bandwidth than those before it."""


@pytest.mark.parametrize("precision", BOARDS)
def test_no_board_is_priced_slower_than_a_lesser_one_of_its_silicon(precision: str) -> None:
    seconds = {}
    for gpu in {name for chain in BOARDS[precision] for name in chain.split(" < ")}:
        one = parsim.simulate(
            "llama3-8b",
            cluster=f"1x{gpu}",
            global_batch=1,
            precision=precision,
            seq=4096,
            args={"layers": 1},
            settings={"software.framework": "megatron", "plan.strategy": "custom", "plan.mesh": {"dp": 1}},
        )  # of which hosts decide no kernel: Grace launches them slower than Xeon
        seconds[gpu] = one.step_s.median
    for chain in BOARDS[precision]:
        times = [seconds[gpu] for gpu in chain.split(" < ")]
        assert times == sorted(times, reverse=True), f"{chain}: {times}"


@pytest.mark.slow
def test_shipped_parts_are_what_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file: a number or a line changed by hand would be lost by the next fit.

    Layout and words to the last character, numbers to what searches differ by on other processors.
    """
    from tools.parts import __main__ as command
    from tools.published.v100 import REFIT_TOLERANCE

    out = tmp_path / "parts"
    monkeypatch.setattr("sys.argv", ["tools.parts", "--data", str(data_folder()), "--out", str(out)])
    command.main()
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.json"))
    assert {path.name for path in PARTS.rglob("*.json")} <= {path.name for path in written}
    for path in written:
        fitted, kept = ((folder / path).read_text(encoding="utf-8") for folder in (tmp_path, PARTS.parent))
        assert NUMBER.sub("#", fitted) == NUMBER.sub("#", kept), path
        numbers = [[float(text) for text in NUMBER.findall(whole)] for whole in (fitted, kept)]
        assert numbers[0] == pytest.approx(numbers[1], rel=REFIT_TOLERANCE), path


@pytest.mark.slow
def test_shipped_links_come_from_the_tables() -> None:
    from tools.parts.links import SWITCHES, _switch
    from tools.parts.part_files import read_sources

    folder = data_folder()
    read_sources(folder)
    table = collectives.read_collectives(folder)
    for name in SWITCHES:
        assert _switch(name, table) == json.loads((PARTS / "links" / f"{name}.json").read_text())


@pytest.mark.parametrize("path", sorted(PARTS.rglob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_part_is_laid_out_as_the_command_lays_it_out(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert to_text(json.loads(text)) == text


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_what_no_table_holds_is_the_same_in_the_catalogue_and_in_the_part(gpu: CatalogGpu) -> None:
    """Units, launches, idle watts and how the GPUs are joined: no table is needed to compare them."""
    shipped = json.loads((PARTS / "gpus" / f"{gpu.name}.json").read_text())
    assert shipped["multiprocessors"]["value"] == gpu.units[0]
    assert shipped["sources"]["units"] == {"kind": gpu.units[1], "text": gpu.units[2]}
    assert (shipped["link"], shipped["host_link"], shipped["gpus_per_node"]) == (gpu.link, gpu.host_link, gpu.gpus_per_node)
    kind, text, seconds = LAUNCH.get(gpu.name, ("", "", None))
    assert shipped.get("launch_s", {}).get("value") == seconds
    assert seconds is None or shipped["sources"]["launch"] == {"kind": kind, "text": text}
    watts, told = IDLE.get(gpu.name, (None, ""))
    assert shipped.get("idle_power_w", {}).get("value") == watts
    assert watts is None or shipped["sources"]["idle"]["text"] == told


def test_every_library_of_attention_is_one_of_the_models() -> None:
    assert set(attentions.LIBRARY_OF.values()) == set(attentions.LIBRARIES)


def test_the_synthetic_table_is_small() -> None:
    with (SYNTHETIC / "gemm.csv").open() as file:
        assert len(list(csv.DictReader(file))) <= 120
