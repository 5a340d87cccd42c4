"""`import parsim`: the public names, what they print, and the data they give."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import parsim as ps
from parsim.search.tree import TIE
from tests.commands import Told

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parents[1] / "golden" / "answer.txt"
MOST_NAMES = 24
REPR_LINES = 15


@pytest.fixture(scope="module")
def answer() -> ps.Answer:
    return ps.plan("resnet50", cluster="dgx1-v100-32gb", global_batch=1024)


def test_the_public_names_are_few_and_all_there() -> None:
    assert len(ps.__all__) <= MOST_NAMES
    for name in ps.__all__:
        assert getattr(ps, name) is not None
    assert set(ps.__all__) <= set(dir(ps))
    with pytest.raises(AttributeError, match="no attribute 'sweeep'"):
        _ = ps.sweeep


def test_type_checkers_see_every_public_name() -> None:
    """The imports under TYPE_CHECKING and the lazy table name the same things in the same places."""
    module = ast.parse((ROOT / "parsim" / "__init__.py").read_text())
    seen = {
        alias.name: node.module
        for guard in module.body
        if isinstance(guard, ast.If)
        for node in guard.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == ps._HOMES
    assert {*seen, "__version__"} == set(ps.__all__)
    assert (ROOT / "parsim" / "py.typed").is_file()


CALL_EVERYTHING = """
import importlib, pkgutil
import parsim
for found in pkgutil.walk_packages(parsim.__path__, "parsim."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
import torch
import parsim as ps
answer = ps.plan("mlp", cluster="dgx1-v100-32gb", global_batch=64, strategy="dp")
assert isinstance(answer, ps.Answer) and isinstance(answer.chosen, ps.Prediction) and isinstance(answer.chosen.plan, ps.Plan)
assert isinstance(ps.simulate(answer), ps.Prediction)
assert isinstance(ps.check("mlp", cluster="dgx1-v100-32gb", global_batch=64, strategy="dp"), ps.Checked)
from parsim.app.prices import CostTable
assert isinstance(ps.cost("dgx1-v100-32gb", model="mlp", batch=4), CostTable)
assert len(ps.sweep("mlp", {"cluster.devices": [1, 2]}, cluster="dgx1-v100-32gb", global_batch=8).rows) == 2
assert isinstance(ps.load_cluster("dgx2-v100"), ps.Cluster)
assert isinstance(ps.trace(torch.nn.Sequential(torch.nn.Linear(8, 4)), input_shape=(8,)), ps.Model)
assert ps.watch(answer.chosen).steps == 0
compared = ps.bench_graphs(("ring", "average/2"), replicas=(4,), models=("logistic",), shards=("iid",), epochs=1)
assert list(compared.table()["way"]) == ["ring", "average/2"]
def refused(call):
    try:
        call()
    except ps.ParsimError as error:
        return str(error)
    raise AssertionError("not refused")
assert "is more processes than the plan has ranks" in refused(lambda: ps.run(answer.chosen, nproc=9))
assert "measure 4 or more" in refused(lambda: ps.validate(answer.chosen, rounds=1))
assert "not a run folder" in refused(lambda: ps.open_run("nowhere"))
assert "cannot read nowhere" in refused(lambda: ps.import_file("nowhere"))
assert "unknown model" in refused(lambda: ps.calibrate("resnt50", global_batch=8))
called = {"plan", "check", "simulate", "cost", "load_cluster", "trace", "run", "validate", "open_run", "calibrate"}
called |= {"import_file", "sweep", "watch", "bench_graphs"}
functions = {name for name in ps.__all__ if callable(getattr(ps, name)) and not isinstance(getattr(ps, name), type)}
assert functions == called, functions ^ called
values = {"Answer", "Prediction", "Plan", "Cluster", "Model"}
types = {name for name in ps.__all__ if isinstance(getattr(ps, name), type)}
assert types == values | {"Calibration", "Checked", "Measured", "ParsimError"}, types
print("all called")
"""


@pytest.mark.slow
def test_every_public_name_works_after_every_submodule_was_imported(tmp_path: Path) -> None:
    """A submodule of the name of a function would take its place in the package."""
    done = subprocess.run(
        [sys.executable, "-c", CALL_EVERYTHING], capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all called"


def test_print_gives_the_answer_in_a_sentence_and_the_ranked_table(answer: ps.Answer) -> None:
    """The golden text is what `print(answer)` shows; regenerate it by printing str(answer) after an intended change."""
    assert str(answer) + "\n" == GOLDEN.read_text(encoding="utf-8")
    first = str(answer).splitlines()[0]
    assert first.startswith("resnet50 on dgx1-v100-32gb (8 devices), global batch 1024: use DDP (8-way data parallelism")
    assert first.count(". ") == 0


@pytest.mark.slow
def test_the_simplest_plan_that_ties_is_recommended_and_the_fastest_stands_beside_it(answer: ps.Answer) -> None:
    assert answer.fastest is not None
    chosen, best = answer.chosen, answer.fastest.result
    assert best.plan.zero_stage > 0
    assert (chosen.plan.zero_stage, chosen.plan.mesh.dp, chosen.plan.world_size) == (0, 8, 8)
    assert 1 <= chosen.step_s.median / best.step_s.median <= 1 + TIE
    assert "use DDP (8-way data parallelism" in answer.sentence()
    assert "A tie, and less simple: " in answer.runners_up()
    document = answer.to_dict()
    assert (document["chosen"]["plan"]["zero_stage"], document["fastest"]["plan"]) == (0, best.to_dict()["plan"])
    assert sum(row.result.plan.program == chosen.plan.program for row in answer._ranked) == 1, "it is its family's row"


@pytest.mark.slow
def test_no_tie_leaves_what_was_asked_for() -> None:
    asked = ps.plan("resnet50", cluster="dgx1-v100-32gb", global_batch=1024, settings={"plan.zero_stage": 2})
    assert asked.chosen.plan.zero_stage == 2


def test_the_command_prints_what_the_answer_prints(told: Told) -> None:
    answer = ps.plan("mlp", cluster="dgx1-v100-32gb", global_batch=1024, strategy="dp")
    for arguments, expected in (([], str(answer) + "\n"), (["--json"], json.loads(json.dumps(answer.to_dict())))):
        words = ("plan", "mlp", "--on", "dgx1-v100-32gb", "--batch", "1024", "--set=plan.strategy=dp")
        status, printed, _ = told(*words, *arguments)
        assert not status
        assert (json.loads(printed) if arguments else printed) == expected


def test_values_are_short_in_a_console_and_tables_in_a_notebook(answer: ps.Answer) -> None:
    chosen = answer.chosen
    values: list[Any] = [
        answer,
        chosen,
        chosen.plan,
        chosen.step_s,
        chosen.explain(),
        answer.problem.model,
        answer.problem.cluster,
        ps.cost("dgx1-v100-32gb", model="resnet50", batch=16, granularity="layer"),
        ps.cost("dgx1-v100-32gb", collective="all_reduce", size_bytes=10**6),
    ]
    for value in values:
        lines = repr(value).splitlines()
        assert len(lines) <= REPR_LINES, type(value)
        assert all(len(line) < 300 for line in lines), type(value)
    for value in (answer, chosen, values[-1]):
        page = value._repr_html_()
        assert page.count("<table>") == page.count("</table>") >= 1
    assert "<script" not in answer._repr_html_()


def test_text_in_html_is_escaped() -> None:
    torch = pytest.importorskip("torch")
    module = type("A<b>", (torch.nn.Sequential,), {})(torch.nn.Linear(8, 4))
    page = ps.plan(module, cluster="dgx1-v100-32gb", global_batch=64, input_shape=(8,), strategy="dp")._repr_html_()
    assert "A&lt;b&gt; on" in page
    assert "A<b>" not in page


def test_the_table_holds_the_ranked_plans(answer: ps.Answer) -> None:
    table = answer.table()
    assert all(column in str(ps.Answer.table.__doc__) for column in table.columns)
    assert list(table.step_s) == sorted(table.step_s)
    assert (table.step_p05_s <= table.step_s).all()
    assert (table.step_s <= table.step_p95_s).all()
    assert list(table.chosen).count(True) == 1
    assert answer.chosen.step_s.median == table.step_s[list(table.chosen).index(True)]
    assert table.throughput_samples_per_s.to_numpy() == pytest.approx(1024 / table.step_s.to_numpy())
    assert [entry.step_s.median for entry in answer.candidates] == list(table.step_s)
    assert answer.status == "best_of_candidates"


def test_breakdown_memory_and_timeline_are_dataframes_that_add_up(answer: ps.Answer) -> None:
    chosen = ps.simulate(answer)
    ranks = chosen.breakdown()
    categories = ["compute_s", "load_s", "host_s", "exposed_communication_s", "bubble_s", "idle_s"]
    assert list(ranks.columns) == ["rank", "step_s", *categories, "communication_busy_s"]
    assert ranks[categories].sum(axis=1).to_numpy() == pytest.approx(ranks.step_s.to_numpy())
    memory = chosen.memory()
    assert tuple(memory.groupby("rank").size_bytes.sum()) == chosen.peak_memory_bytes
    spans = chosen.timeline()
    assert all(column in str(ps.Prediction.timeline.__doc__) for column in spans.columns)
    assert len(spans) == len(chosen.evaluation.timeline)
    assert spans.end_s.max() == pytest.approx(chosen.evaluation.timeline.makespan_s)
    assert (spans.end_s - spans.start_s).to_numpy() == pytest.approx(spans.duration_s.to_numpy())
    assert set(spans["rank"]) == set(range(8))
    assert {"forward", "backward", "optimizer", "reduce_scatter" if chosen.plan.zero_stage else "all_reduce"} <= set(spans.kind)
    assert all(isinstance(frame, pd.DataFrame) for frame in (ranks, memory, spans))


def test_the_timeline_of_a_searched_plan_lists_every_rank(answer: ps.Answer) -> None:
    """The search simulates interchangeable ranks once; whoever asks for the timeline wants all of them."""
    searched, simulated = answer.chosen.timeline(), ps.simulate(answer).timeline()
    assert set(searched["rank"]) == set(range(8))
    pd.testing.assert_frame_equal(searched, simulated)


def test_explaining_sums_to_the_step_and_to_the_breakdown(answer: ps.Answer) -> None:
    chosen = answer.chosen
    explained = chosen.explain()
    table = explained.table()
    assert table.seconds.sum() == pytest.approx(chosen.step_s.median)
    by_category = table.groupby("category").seconds.sum()
    assert by_category["compute"] == pytest.approx(chosen.breakdown().compute_s.mean())
    assert {"term", "operation", "value", "origin", "detail"} <= set(table.columns)
    assert "compute" in str(explained)
    assert str(explained).startswith(f"Where the {1e3 * chosen.step_s.median:.0f} ms of a step come from")


def test_cost_rows_as_data() -> None:
    price = ps.cost("dgx1-v100-32gb", collective="all_reduce", size_bytes=10**8, ranks=(0, 1, 2, 3))
    row = price.table().iloc[0]
    assert row.seconds_p05 < row.seconds < row.seconds_p95
    assert row.busbw_bytes_per_s == pytest.approx(1e8 / row.seconds * 2 * 3 / 4)
    assert "terms" not in price.table().columns
    assert price.explain().running_total_s.iloc[-1] == pytest.approx(row.seconds)
    rows = ps.cost(ps.load_cluster("dgx1-v100-32gb"), model="mlp", batch=4).table()
    assert list(rows.phase) == ["forward", "backward"] * ((len(rows) - 1) // 2) + ["optimizer"]


def test_a_module_a_model_and_a_cluster_as_values() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = ps.trace(module, torch.zeros(2, 32))
    assert model.parameter_count == 32 * 64 + 64 + 64 * 10 + 10
    cluster = ps.load_cluster("dgx1-v100-32gb", devices=2)
    steps = {
        ps.plan(given, cluster=where, global_batch=64, strategy="dp", **more).chosen.step_s.median
        for given, where, more in (
            (module, cluster, {"input_shape": (32,)}),
            (module, "dgx1-v100-32gb", {"example_inputs": torch.zeros(2, 32), "devices": 2}),
            (model, cluster, {}),
        )
    }
    assert len(steps) == 1
    assert ps.simulate(model, cluster=cluster, global_batch=64, strategy="dp").step_s.median in steps
    with pytest.raises(ps.ParsimError, match=r"an nn\.Module: .* give \"package.module:function\""):
        ps.run(ps.plan(module, cluster=cluster, global_batch=64, input_shape=(32,), strategy="dp").chosen)
    with pytest.raises(ps.ParsimError, match="give input_shape"):
        ps.plan(module, cluster=cluster, global_batch=64)
    with pytest.raises(ps.ParsimError, match=r"model was given as a finished Model: model\.args cannot change it"):
        ps.plan(model, cluster=cluster, global_batch=64, args={"width": 3})
    with pytest.raises(ps.ParsimError, match=r"cluster was given as a Cluster: cluster\.devices cannot change it"):
        ps.plan(model, cluster=cluster, global_batch=64, devices=2)


def test_simulate_takes_the_question_that_plan_takes() -> None:
    question: dict[str, Any] = {
        "cluster": "8xh100-sxm",
        "global_batch": 64,
        "precision": "amp_bf16",
        "optimizer": "AdamW",
        "strategy": "dp",
        "devices": (0, 1),
        "nodes": 2,
        "network": "infiniband-400g",
        "args": {"layers": 2, "seq": 512},
    }
    planned, simulated = ps.plan("gpt2", **question), ps.simulate("gpt2", **question)
    assert simulated.plan == planned.chosen.plan
    assert simulated.step_s.median == planned.chosen.step_s.median
    assert simulated.plan.world_size <= 4
    with pytest.raises(ps.ParsimError, match=r"settings\['model\.args\.seq'\] = 8"):
        ps.simulate("gpt2", seq=512, settings={"model.args.seq": 8})
    with pytest.raises(ps.ParsimError, match="nodes was given beside an Answer"):
        ps.simulate(planned, nodes=2)


@pytest.mark.parametrize(("asked", "shown"), [(1, 1), ("auto", 3)])
def test_where_nothing_fits_the_plan_that_is_shown_is_as_asked_for(asked: int | str, shown: int) -> None:
    """And as close to fitting as can be."""
    settings = {"plan.zero_stage": asked, "plan.recompute": "full"}
    answer = ps.plan("mixtral-8x7b", cluster="8xh100-sxm", global_batch=8, strategy="dp", settings=settings)
    assert not answer.fits
    assert answer.prediction.plan.zero_stage == shown


def test_where_nothing_fits_the_answer_says_so_and_chosen_is_an_error() -> None:
    settings = {"plan.recompute": "none", "plan.microbatches": 1}
    answer = ps.plan("vgg16", cluster="dgx1-v100-16gb", global_batch=8192, strategy="single", settings=settings)
    assert not answer.fits
    assert answer.status == "infeasible"
    with pytest.raises(ps.ParsimError, match="No plan fits"):
        _ = answer.chosen
    assert not answer.prediction.fits
    assert "No plan fits" in answer.sentence()


def test_weights_that_no_division_makes_fit_are_told_with_the_devices_that_would_hold_them() -> None:
    """Llama 3 8B with AdamW in mixed precision: 16 bytes a parameter, 119.7 GiB, and 78.7 GiB beside an H100's context."""
    answer = ps.plan("llama3-8b", cluster="1xh100-sxm", global_batch=8, seq=2048, settings={"plan.recompute": "full"})
    assert "No plan fits: weights, gradients and optimizer state are 120 GiB, which 2 devices of 78.7 GiB" in answer.verdict()
    assert "which were not priced" in str(answer)


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(ps.ParsimError, match=r"settings\['plan\.strategy'\] = 'hp', but plan\.strategy = 'dp'"):
        ps.plan("mlp", cluster="dgx1-v100-32gb", global_batch=64, strategy="dp", settings={"plan.strategy": "hp"})
    with pytest.raises(ps.ParsimError, match=r"example_inputs are for an nn\.Module"):
        ps.plan("mlp", cluster="dgx1-v100-32gb", global_batch=64, example_inputs=3)


def test_what_was_found_before_takes_nothing_beside_it(answer: ps.Answer) -> None:
    with pytest.raises(ps.ParsimError, match="strategy was given beside an Answer"):
        ps.simulate(answer, strategy="dp")
    with pytest.raises(ps.ParsimError, match="global_batch was given beside a Prediction"):
        ps.run(answer.chosen, global_batch=3)


def test_the_examples_in_docstrings_hold() -> None:
    modules = [importlib.import_module(f"parsim.app.{name}") for name in ("functions", "prices", "watch")]
    failed, attempted = map(sum, zip(*map(doctest.testmod, modules), strict=True))
    assert attempted >= 8
    assert not failed


def test_a_scenario_changes_the_step_that_the_prediction_states(answer: ps.Answer, tmp_path: Path) -> None:
    path = tmp_path / "slow.toml"
    path.write_text("".join(f"[[stragglers]]\nrank = {rank}\nfactor = 2.0\n" for rank in range(answer.chosen.plan.world_size)))
    slow = ps.simulate(answer, engine="dynamic", scenario=path)
    assert slow.scenario is not None
    assert slow.scenario["states"][0]["slowdown"] > 1.05
    assert slow.step_s.median == pytest.approx(slow.scenario["states"][0]["step_s"])
    before = answer.chosen
    assert slow.step_s.p95 / before.step_s.p95 == pytest.approx(slow.step_s.median / before.step_s.median)
    rates = slow.throughput_samples_per_s.median, before.throughput_samples_per_s.median
    assert rates[0] / rates[1] == pytest.approx(before.step_s.median / slow.step_s.median)
