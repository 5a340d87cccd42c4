"""A plan in a scenario: states of the machine, asynchronous workers, whole runs, and what the command prints."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from parsim.engines.dynamic import run_program
from parsim.engines.program import Part, Program
from parsim.engines.scenario import LinkChange, Scenario, Straggler, check_places, conditions_for, parse_scenario
from parsim.errors import ScenarioError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.plans.plan import Plan
from parsim.predict.evaluate import REPEATED_STEPS, evaluate
from parsim.predict.forecast import Played
from parsim.report.tables import states_table, to_text
from tests.commands import status_of
from tests.unit.test_adaptive_planning import DP, HP, PROBLEM

RUN = "[run]\nsamples_per_epoch = 100000\nepochs = 2\ndraws = 30\n"
DP_STEP = evaluate(PROBLEM, DP, samples=0)


def played(text: str) -> Played:
    return Played(problem=PROBLEM, evaluation=DP_STEP, scenario=parse_scenario(text))


def test_an_empty_scenario_is_the_plan_itself() -> None:
    quiet = played("")
    assert [state.slowdown for state in quiet.states] == [1.0]
    assert quiet.states[0].step_s == DP_STEP.result.step_s.median
    np.testing.assert_array_equal(quiet.one_step().timeline.end_s, DP_STEP.timeline.end_s)


def test_every_change_makes_a_state() -> None:
    text = "[[stragglers]]\nrank = 1\nfactor = 2.0\nfrom_s = 10.0\nuntil_s = 30.0\n"
    text += "[[stragglers]]\nrank = 0\nfactor = 3.0\nfrom_s = 20.0\nuntil_s = 30.0\n"
    states = played(text).states
    assert [(state.from_s, state.until_s) for state in states] == [(0.0, 10.0), (10.0, 20.0), (20.0, 30.0), (30.0, None)]
    assert states[0].slowdown == states[3].slowdown == 1.0
    assert 1.5 < states[1].slowdown <= 2.0
    assert 2.5 < states[2].slowdown <= 3.0


@pytest.mark.parametrize("plan", [DP, HP])
def test_stragglers_by_the_static_engine_are_those_of_the_dynamic_one(plan: Plan) -> None:
    """What states take the short way for, against a program in the dynamic engine."""
    scenario = parse_scenario("[[stragglers]]\nrank = 1\nfactor = 1.7\n[[stragglers]]\nrank = 2\nfactor = 0.5")
    evaluation = evaluate(PROBLEM, plan, samples=0)
    slow = Played(problem=PROBLEM, evaluation=evaluation, scenario=scenario)
    columns = evaluation.compiled.columns
    conditions = conditions_for(scenario, columns, PROBLEM.cluster)
    program = Program(parts=(Part(graph=columns.graph, repeat=REPEATED_STEPS),))
    done = run_program(program, [slow.durations_s] * REPEATED_STEPS, overlap=evaluation.overlap, conditions=conditions)
    assert slow.states[0].step_s == pytest.approx(done.makespan_s / REPEATED_STEPS, rel=1e-9)


def test_a_slow_link_slows_the_plan_that_uses_it() -> None:
    text = '[[links]]\nbetween = ["gpu0", "gpu3"]\nbandwidth_factor = 0.001\n'
    slow = played(text).states[0].slowdown
    assert slow > 1.2
    pipeline = Played(problem=PROBLEM, evaluation=evaluate(PROBLEM, HP, samples=0), scenario=parse_scenario(text))
    assert pipeline.states[0].slowdown != slow


def test_a_link_that_is_down_for_a_while_stops_the_run_for_that_while() -> None:
    text = '[[links]]\nbetween = ["gpu0", "gpu3"]\nbandwidth_factor = 0.0\nfrom_s = 10.0\nuntil_s = 1010.0\n'
    down = played(text + RUN)
    assert [state.slowdown for state in down.states] == [1.0, np.inf, 1.0]
    quiet = played(RUN).whole_run(1).whole.total_s
    np.testing.assert_allclose(down.whole_run(1).whole.total_s, quiet + 1000.0, rtol=1e-9)
    shown = to_text(states_table([asdict(state) for state in down.states]))
    assert "stands still" in shown
    with pytest.raises(ScenarioError, match="never ends: bandwidth_factor = 0 on gpu0-gpu3"):
        _ = played(text.replace("until_s = 1010.0", "")).states


def test_jitter_costs_what_waiting_for_the_slowest_costs() -> None:
    some, more = (played(f"[jitter]\ncompute_sigma = {sigma}").states[0].slowdown for sigma in (0.05, 0.3))
    assert 1.0 < some < more < 1.6


def test_asynchronous_workers_do_not_wait_for_a_straggler() -> None:
    """One of four workers four times as slow: the others go on, 3 1/4 workers' worth; the synchronous step waits for it."""
    slow = "[[stragglers]]\nrank = 1\nfactor = 4.0\n"
    together = played(slow).states[0].slowdown
    alone = played(slow + "[asynchronous]\nmerge_s = 0.0\n").states[0].slowdown
    assert together > 3.0
    assert alone < 4 / 3.25 * 1.1
    quiet = played("[asynchronous]\nmerge_s = 0.0\n").states[0].slowdown
    assert quiet <= 1.0, "nothing to wait for, and no gradients to send"


def test_merges_that_take_long_make_a_queue() -> None:
    """One merge at a time: no more than 1 / merge_s, however many workers there are."""
    merge_s = 3 * DP_STEP.result.step_s.median
    step_s = played(f"[asynchronous]\nmerge_s = {merge_s}\n").states[0].step_s
    assert step_s == pytest.approx(4 * merge_s, rel=0.05)


def test_workers_that_need_one_another_cannot_be_asynchronous() -> None:
    scenario = parse_scenario("[asynchronous]\nmerge_s = 0.0\n")
    pipeline = Played(problem=PROBLEM, evaluation=evaluate(PROBLEM, HP, samples=0), scenario=scenario)
    with pytest.raises(ScenarioError, match=r'set plan.strategy = "dp", or drop'):
        _ = pipeline.states


def test_a_whole_run_without_events_is_its_steps() -> None:
    forecast = played(RUN).whole_run(1)
    steps = 2 * (100_000 // PROBLEM.global_batch)
    assert forecast.steps == steps
    training = played(RUN).training(forecast.run)
    np.testing.assert_allclose(forecast.whole.total_s, steps * training.step_s[:, 0], rtol=1e-12)
    assert np.median(training.step_s) == pytest.approx(DP_STEP.result.step_s.median, rel=0.2)
    assert forecast.choice is None


def test_storage_that_cannot_keep_up_sets_the_pace() -> None:
    rate = PROBLEM.global_batch / (10 * DP_STEP.result.step_s.median)
    forecast = played(f"{RUN}loading_samples_per_s = {rate}\n").whole_run(1)
    np.testing.assert_allclose(forecast.whole.total_s, forecast.steps * 10 * DP_STEP.result.step_s.median, rtol=1e-9)


def test_evaluation_is_the_forwards_share_of_a_step() -> None:
    run = played(RUN + "evaluate_every_epochs = 1\nevaluation_samples = 1000\n")
    assert run.scenario.run is not None
    seconds = run.evaluation_s(run.scenario.run)
    whole_steps_s = 1000 / PROBLEM.global_batch * DP_STEP.result.step_s.median
    assert 0.2 * whole_steps_s < seconds < 0.5 * whole_steps_s


def test_a_checkpoint_by_its_bytes() -> None:
    text = RUN + "[checkpoints]\ninterval_s = 100.0\nwrite_bytes_per_s = 1e8\n"
    model = PROBLEM.model
    for optimizer, per_element in (("sgd", 0), ("sgd_momentum", 4), ("adam", 8)):
        problem = replace(PROBLEM, numerics=Numerics(optimizer=optimizer))
        run = Played(problem=problem, evaluation=DP_STEP, scenario=parse_scenario(text))
        assert run.write_s == pytest.approx((model.parameter_bytes + per_element * model.parameter_count) / 1e8)


def test_a_run_without_its_table_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"needs the table \[run\]"):
        Played(problem=PROBLEM, evaluation=DP_STEP, scenario=Scenario()).whole_run(1)


RUN_TOML = """
[model]
name = "resnet50"
args = { num_classes = 100 }
[cluster]
profile = "dgx1-v100-32gb"
devices = 4
[training]
global_batch = 64
[plan]
strategy = "dp"
"""

SCENARIO = """
share_links = true
[jitter]
compute_sigma = 0.02
[[stragglers]]
rank = 3
factor = 1.5
from_s = 100.0
[run]
samples_per_epoch = 50000
epochs = 3
draws = 20
[checkpoints]
interval_s = 30.0
write_s = 1.0
[failures]
rank_mtbf_s = 150.0
restart_s = 5.0
[device]
price_per_hour = 3.0
busy_w = 300.0
idle_w = 50.0
"""


@pytest.mark.slow
def test_the_command_plays_a_scenario(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN.toml").write_text(RUN_TOML)
    (tmp_path / "scenario.toml").write_text(SCENARIO)
    arguments = ["simulate", "RUN.toml", "--engine", "dynamic", "--scenario", "scenario.toml", "--whole-run"]
    outputs = []
    for _ in range(2):
        assert status_of(monkeypatch, *arguments, "--json") == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1], "the same seed gives the same bytes"
    document = json.loads(outputs[0])
    states, run = document["scenario"]["states"], document["scenario"]["whole_run"]
    assert [state["from_s"] for state in states] == [0.0, 100.0]
    assert states[1]["slowdown"] > 1.4
    assert run["total_s"]["p05"] <= run["total_s"]["median"] <= run["total_s"]["p95"]
    assert run["price"]["median"] == pytest.approx(run["total_s"]["median"] / 3600 * 4 * 3.0)
    assert run["failures"]["median"] >= 1
    assert {"simulated_s", "young_s", "daly_s", "rows"} <= run["checkpoint_interval"].keys()
    assert status_of(monkeypatch, *arguments, "--out", "kept") == 0
    assert json.loads((tmp_path / "kept" / "scenario.json").read_text()) == document["scenario"]
    shown = capsys.readouterr().out
    assert "The whole run: 3 epochs, 2343 steps, 20 draws" in shown
    assert "simulated optimum" in shown


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["--whole-run"], "", "--whole-run needs --scenario FILE"),
        (["--scenario", "scenario.toml"], "", "add --engine dynamic"),
        (["--engine", "dynamic", "--scenario", "none.toml"], "", "no scenario file none.toml"),
        (["--engine", "dynamic", "--scenario", "scenario.toml"], "[[stragglers]]\nrank = 7\nfactor = 2.0", "no rank 7"),
        (["--engine", "dynamic", "--scenario", "scenario.toml", "--whole-run"], "", "needs the table [run]"),
    ],
)
def test_a_users_error_is_one_message(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    text: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN.toml").write_text(RUN_TOML)
    (tmp_path / "scenario.toml").write_text(text)
    assert status_of(monkeypatch, "simulate", "RUN.toml", *arguments) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err


# scenario.toml: what is read, and what one is told about every wrong key.

CLUSTER = cluster_from_profile(load_profile("dgx1-v100-32gb"), 8)

WHOLE = """
seed = 3
start_s = 10.0
share_links = true
[jitter]
distribution = "gamma"
compute_sigma = 0.05
[[stragglers]]
rank = 3
factor = 1.5
until_s = 100.0
[[links]]
between = ["gpu0", "gpu3"]
bandwidth_factor = 0.5
from_s = 50.0
[asynchronous]
merge_s = 0.01
[run]
epochs = 2
samples_per_epoch = 1000
[checkpoints]
interval_s = 600.0
write_s = 10.0
[failures]
node_mtbf_s = 1e6
at = [{ at_s = 100.0, rank = 2 }]
[device]
busy_w = 300.0
"""


def test_a_whole_scenario_is_read() -> None:
    scenario = parse_scenario(WHOLE)
    assert scenario.stragglers == (Straggler(rank=3, factor=1.5, until_s=100.0),)
    assert scenario.links == (LinkChange(between=("gpu0", "gpu3"), bandwidth_factor=0.5, from_s=50.0),)
    assert scenario.change_times_s == (50.0, 100.0)
    assert scenario.run is not None
    assert scenario.run.epochs == 2
    assert scenario.failures.at[0].rank == 2
    check_places(scenario, 8, CLUSTER)


def test_an_empty_file_changes_nothing() -> None:
    assert parse_scenario("") == Scenario()
