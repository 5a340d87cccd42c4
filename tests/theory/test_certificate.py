"""The placement problem of real models, by the exact solver and by the MILP: the same optimum, with free and tight memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from parsim.cli import build
from parsim.errors import ScheduleError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.predict.problem import PlanningProblem
from parsim.search.placement import certificate as module
from parsim.search.placement.certificate import Certificate, certificate_text, certify
from parsim.search.placement.problem import PlacementProblem, fits, memory_of, placement_problem_of, step_s
from parsim.search.prices import Prices
from parsim.search.tensor import allowed_placements, posed_placement

RUN = """
[model]
name = "mlp"
[cluster]
profile = "dgx1-v100-32gb"
devices = 4
[training]
global_batch = 32
[plan]
strategy = "adaptive"
"""


def posed(name: str, devices: int = 4) -> PlacementProblem:
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), range(devices))
    problem = PlanningProblem(
        model=load_model(ModelSpec(name=name)),
        cluster=cluster,
        global_batch=32,
        numerics=Numerics(precision="fp32", optimizer="sgd_momentum"),
    )
    return posed_placement(problem, 1)[0]


def tightened(placing: PlacementProblem, share: float) -> PlacementProblem:
    """Every rank may take this share of what the best choice takes there."""
    free = certify(placing, 1).exact.solution
    return replace(placing, limit_bytes=share * memory_of(placing, free.choice))


def assert_certified(found: Certificate, placing: PlacementProblem) -> None:
    assert found.verdict == "agree"
    assert found.exact.solution.status == found.milp.solution.status == "optimal"
    assert found.relative_difference is not None
    assert found.relative_difference <= 1e-6
    for run in (found.exact, found.milp):
        assert fits(placing, run.solution.choice)
        assert step_s(placing, run.solution.choice) == pytest.approx(run.solution.seconds, rel=1e-12)
        assert run.taken_s > 0


def test_every_microbatch_adds_its_forwards_backwards_and_conversions() -> None:
    """Of one size; the last backward stands apart, since sums of gradients may hide behind it, and the update comes once."""
    mesh, samples = Mesh(tp=2), 8
    problem = PlanningProblem(
        model=load_model(ModelSpec(name="mlp")),
        cluster=cluster_from_profile(load_profile("dgx1-v100-32gb"), 2),
        global_batch=32,
    )
    options = [allowed_placements(problem, component, mesh, samples) for component in problem.model.components]
    one, two, four = (
        placement_problem_of(Prices(problem, mesh, samples), options, microbatches=count, limit_bytes=(np.inf, np.inf))
        for count in (1, 2, 4)
    )
    assert one.conversion_s
    for pair, (ahead, back) in one.conversion_s.items():
        assert np.allclose(sum(four.conversion_s[pair]), 4 * (ahead + back), rtol=1e-12)
        assert np.array_equal(four.conversion_s[pair][1], back)
    for number, ahead in enumerate(one.forward_s):
        each = two.forward_s[number] - ahead
        assert np.allclose(four.forward_s[number], ahead + 3 * each, rtol=1e-12)
        assert np.array_equal(four.backward_s[number], one.backward_s[number])
        assert (each >= one.backward_s[number]).all()


@pytest.mark.parametrize("name", ["mlp", "resnet_small"])
def test_both_optima_agree_on_real_models(name: str) -> None:
    placing = posed(name)
    assert_certified(certify(placing, 1), placing)


@pytest.mark.parametrize("share", [0.95, 0.75, 0.5])
def test_both_optima_agree_under_tight_memory(share: float) -> None:
    placing = posed("mlp")
    tight = tightened(placing, share)
    found = certify(tight, 1)
    assert_certified(found, tight)
    assert found.exact.solution.seconds > certify(placing, 1).exact.solution.seconds, "the limit binds"


def test_both_optima_agree_on_a_tight_convolutional_model() -> None:
    tight = tightened(posed("resnet_small", devices=2), 0.9)
    assert_certified(certify(tight, 1), tight)


def test_both_prove_that_nothing_fits() -> None:
    placing = posed("mlp")
    found = certify(replace(placing, limit_bytes=np.full(4, 1.0)), 1)
    assert found.exact.solution.status == found.milp.solution.status == "infeasible"
    assert found.verdict == "agree"
    assert found.relative_difference is None
    assert "no choice" in certificate_text(found.to_dict())


def test_a_solver_that_fails_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(placing: PlacementProblem) -> None:
        raise ScheduleError("cvxpy finds no HiGHS solver; install the package highspy")

    monkeypatch.setattr(module, "solve_milp", fail)
    found = certify(posed("mlp"), 1)
    assert found.verdict == "unproven"
    assert found.milp.to_dict()["status"] == "inaccurate"
    assert "MILP (HiGHS): inaccurate, no choice" in certificate_text(found.to_dict())
    assert "install the package highspy" in certificate_text(found.to_dict())


def test_a_wrong_optimum_would_be_said() -> None:
    right = certify(posed("mlp"), 1)
    solution = replace(right.milp.solution, seconds=right.milp.solution.seconds * 1.001)
    wrong = replace(right, milp=replace(right.milp, solution=solution))
    assert wrong.verdict == "disagree"
    assert "DISAGREE" in certificate_text(wrong.to_dict())


@pytest.mark.slow
def test_the_command_certifies_its_own_problem(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    asked = CliRunner().invoke(build(), ["plan", str(path), "--certify", "--json"])
    assert asked.exit_code == 0, asked.stderr
    document = json.loads(asked.stdout)
    found = document["certificate"]
    assert found["verdict"] == "agree"
    assert found["exact"]["seconds"] == pytest.approx(min(entry["seconds"] for entry in document["placements"]), rel=1e-9)


def test_without_free_placement_the_command_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    asked = CliRunner().invoke(build(), ["plan", str(path), "--certify", "--set", "plan.strategy=dp"])
    assert asked.exit_code == 0, asked.stderr
    assert 'Certificate: none. strategy "dp" places all components by one rule' in asked.stdout
