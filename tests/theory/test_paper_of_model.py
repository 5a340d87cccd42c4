"""The paper's formulation of real models on the DGX-1: its figures are the costs', and two solvers certify its optimum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from parsim.cli import build
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import BATCH
from parsim.predict.problem import PlanningProblem
from parsim.search.placement.certificate import paper_certificate, paper_problem_of, solve_milp
from parsim.search.placement.exact import solve_exactly
from parsim.search.placement.problem import memory_of, step_s
from parsim.work import Collective, Compute, Phase
from tests.machines import machine


def question(name: str, *, devices: int = 8, batch: int = 256, **changes: int) -> PlanningProblem:
    model = load_model(ModelSpec(name=name))
    cluster = machine(devices, **changes)
    return PlanningProblem(model=model, cluster=cluster, global_batch=batch, numerics=Numerics(optimizer="adam"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "vit_b_16"])
@pytest.mark.parametrize("batch", [8, 256])
def test_real_models_are_certified(name: str, batch: int) -> None:
    found = paper_certificate(question(name, batch=batch))
    assert found["verdict"] == "agree"
    assert found["exact"]["status"] == found["milp"]["status"] == "optimal"
    assert found["relative_difference"] <= 1e-9
    assert found["components"] == len(found["placements"]) > 10
    if batch == 256:  # large batches move fewer bytes as gradients than as activations; the last layer has few of those
        assert list(found["placements"].values()).count("batch") >= len(found["placements"]) - 1


def test_short_memory_asks_for_other_strategies_and_still_agrees() -> None:
    """ViT-B/16 with one sample per device: weights are most of the memory, and shards divide them."""
    paper = paper_problem_of(question("vit_b_16", batch=8))
    free = solve_milp(paper)
    used, before = memory_of(paper, free.choice), free.seconds
    for share in (0.95, 0.8):
        tight = replace(paper, limit_bytes=share * used)
        exact, milp = solve_exactly(tight), solve_milp(tight)
        assert exact.status == milp.status == "optimal"
        assert exact.seconds == pytest.approx(milp.seconds, rel=1e-9)
        assert exact.seconds > before
        kinds = {options[choice].kind for options, choice in zip(paper.options, exact.choice, strict=True)}
        assert "shard" in kinds
        before = exact.seconds
    assert solve_milp(replace(paper, limit_bytes=0.01 * used)).status == "infeasible"


def test_devices_that_a_context_alone_fills_are_infeasible_and_no_error() -> None:
    """HiGHS 1.15: a limit below 0 was once refused with an error. Devices that a context alone fills have such a limit, and
    are infeasible."""
    found = paper_certificate(question("mlp", devices=2, batch=8, memory_bytes=2**28))
    assert found["verdict"] == "agree"
    assert found["exact"]["status"] == found["milp"]["status"] == "infeasible"


def test_the_figures_are_the_costs() -> None:
    """Data parallelism of one component, worked out from the prices of its parts; one that is placed alone has one device."""
    problem = question("resnet50", devices=4, batch=64)
    paper = paper_problem_of(problem)
    component = problem.model.components[3]
    costs = problem.costs(4)
    both = sum(
        costs.estimate(Compute(component=component.name, phase=phase, samples=16), 0).median_s
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    bucket = 25 * 2**20
    summed = costs.estimate(Collective(operation="all_reduce", group=(0, 1, 2, 3), size_bytes=bucket), 0).median_s
    share = sum(parameter.size_bytes for parameter in component.parameters) / bucket
    computed = paper.forward_s[3][paper.options[3].index(BATCH)] - summed * share
    assert both < computed < 1.2 * both, "the optimizer's step is small"
    for memory, options in zip(paper.memory_bytes, paper.options, strict=True):
        for held, option in zip(memory, options, strict=True):
            assert np.flatnonzero(held).tolist() == ([option.shard] if option.kind == "place" else [0, 1, 2, 3])


def test_no_uniform_choice_is_faster() -> None:
    paper = paper_problem_of(question("vit_b_16", batch=8))
    best = solve_exactly(paper).seconds
    for wish in ("batch", "replicate", "place:0"):
        choice = tuple([str(option) for option in options].index(wish) for options in paper.options)
        assert best <= step_s(paper, choice) * (1 + 1e-12)


@pytest.mark.slow
def test_the_command_shows_the_paper_beside_the_placement_problem() -> None:
    arguments = ["plan", "mlp", "--on", "dgx1-v100-32gb", "--batch", "32", "--set", "cluster.devices=2", "--certify"]
    shown = CliRunner().invoke(build(), arguments)
    assert shown.exit_code == 0, shown.output
    assert "Certificate of the paper's formulation" in shown.stdout
    assert "both solvers prove the same answer" in shown.stdout
