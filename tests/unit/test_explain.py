"""Where a predicted step comes from: the parts add up, and each is the price of something in the plan."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from parsim.cli import main
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import HostOverhead, Noise, Profile
from parsim.model.catalogue.zoo import load_preset
from parsim.plans.mesh import Mesh
from parsim.predict.evaluate import evaluate
from parsim.predict.explain import BETWEEN, COMMUNICATION, COMPUTE, SLOWEST, Explanation, explain_plan
from parsim.predict.problem import PlanningProblem
from parsim.search.stages import balanced_plan
from tests.models import chain_model

V100 = load_profile("dgx1-v100-32gb")


def explained(
    mesh: Mesh, *, microbatches: int = 1, profile: Profile = V100, fold: bool | None = None, model: str | None = None
) -> Explanation:
    problem = PlanningProblem(
        model=chain_model() if model is None else load_preset(model, "block"),
        cluster=cluster_from_profile(profile),
        global_batch=256,
    )
    order = "gpipe" if mesh.pp == 1 else "1f1b"
    plan = balanced_plan(problem, "hp", mesh, microbatches=microbatches, pipeline_order=order)
    return explain_plan(problem, evaluate(problem, plan, samples=0, fold=fold))


@pytest.mark.parametrize(("mesh", "microbatches"), [(Mesh(), 1), (Mesh(dp=8), 2), (Mesh(pp=2, dp=4), 4), (Mesh(pp=4, dp=2), 8)])
def test_categories_tasks_and_terms_each_sum_to_the_step(mesh: Mesh, microbatches: int) -> None:
    found = explained(mesh, microbatches=microbatches)
    assert sum(seconds for _, seconds in found.categories) == pytest.approx(found.step_s, rel=1e-12)
    for category, seconds in found.categories:
        tasks = found.of(category)
        if tasks:
            assert sum(task.seconds for task in tasks) == pytest.approx(seconds, rel=1e-9)
        for task in tasks:
            if task.terms:
                assert sum(term.seconds for term in task.terms) == pytest.approx(task.seconds, rel=1e-9)
    table = found.table()
    assert table["seconds"].sum() == pytest.approx(found.step_s, rel=1e-9)
    assert {"category", "kind", "component", "phase", "term", "operation", "value", "unit", "origin"} <= set(table.columns)


def test_computation_of_one_device_is_its_prices() -> None:
    """No communication, no overlap: the compute category is the sum of what each component costs."""
    problem = PlanningProblem(model=chain_model(), cluster=cluster_from_profile(V100), global_batch=256)
    plan = balanced_plan(problem, "single", Mesh(), microbatches=1, pipeline_order="gpipe")
    evaluation = evaluate(problem, plan, samples=0)
    found = explain_plan(problem, evaluation)
    by_name = {(task.what.component, task.what.phase): task for task in found.of(COMPUTE)}
    for unit, estimate in zip(evaluation.compiled.columns.units, evaluation.estimates, strict=True):
        component, phase = getattr(unit.work, "component", ""), getattr(unit.work, "phase", "")
        if component:
            assert by_name[component, phase].seconds == pytest.approx(estimate.median_s, rel=1e-12)
            assert by_name[component, phase].tasks == 1
    assert all(task.terms for task in found.of(COMPUTE))


def test_a_folded_plan_is_explained_as_the_whole_one() -> None:
    whole, folded = (explained(Mesh(pp=2, dp=4), microbatches=4, fold=fold) for fold in (False, True))
    assert dict(folded.categories) == pytest.approx(dict(whole.categories), rel=1e-9)
    tasks = [{task.what: task.seconds for task in found.tasks if task.terms} for found in (whole, folded)]
    assert tasks[1] == pytest.approx(tasks[0], rel=1e-9)


def test_noise_of_ranks_and_time_between_steps_are_categories() -> None:
    source = next(iter(V100.sources))
    profile = V100.model_copy(
        update={
            "noise": Noise(drift_sigma=0.1, rank_sigma=0.2, source=source),
            "host": HostOverhead(task_s=1e-4, step_s=0.25, source=source),
        }
    )
    found = explained(Mesh(dp=4), profile=profile)
    assert dict(found.categories)[BETWEEN] == 0.25
    assert dict(found.categories)[SLOWEST] > 0
    overheads = [term for task in found.of(COMPUTE) for term in task.terms if term.name == "host overhead"]
    assert overheads
    assert all(term.value == 1e-4 for term in overheads)


def test_communication_is_listed_with_what_hides_it() -> None:
    found = explained(Mesh(dp=8), model="resnet50")
    tasks = found.of(COMMUNICATION)
    assert any(task.what.kind == "all_reduce" for task in tasks)
    assert tasks[-1].seconds < 0  # most of it runs behind the backward
    assert {term.name for task in tasks for term in task.terms} == {"bytes", "latency"}


def test_texts_are_short_and_name_the_largest_first() -> None:
    found = explained(Mesh(dp=8), model="resnet50")
    text = str(found)
    assert text.splitlines()[0].startswith("Where the ")
    assert len(repr(found).splitlines()) == 1
    seconds = [task.seconds for task in found.of(COMPUTE) if task.terms]
    assert seconds == sorted(seconds, reverse=True)
    assert "more kinds of task" in text
    own = text.split("exposed communication, ")[1].split("\n\n")[0]
    assert "hidden behind computation" in own.splitlines()[-1], "what is hidden is not one of the kinds that are left out"
    assert json.loads(json.dumps(found.to_dict()))["step_s"] == found.step_s


# --- parsim cost --explain ----------------------------------------------------------------------------------------------


Call = Callable[..., str]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """What `parsim cost dgx1-v100-32gb ...` prints."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["parsim", "cost", "dgx1-v100-32gb", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    return run


def test_cost_explains_a_collective(call: Call) -> None:
    arguments = ("--collective", "all_reduce", "--size-bytes", "100000000")
    text = call(*arguments, "--explain")
    assert "How all_reduce is priced" in text
    assert "running total" in text
    assert "How all_reduce" not in call(*arguments)
    document = json.loads(call(*arguments, "--json"))
    assert [term["term"] for term in document["terms"]] == ["bytes", "latency"]
    assert document["terms"][-1]["running_total_s"] == document["seconds"]["median"]


def test_cost_explains_every_component(call: Call) -> None:
    rows = json.loads(call("--model", "mlp", "--batch", "32", "--json"))["rows"]
    for row in rows:
        assert row["terms"][-1]["running_total_s"] == row["seconds"]["median"]
        assert {term["unit"] for term in row["terms"]} <= {"s", ""}
    text = call("--model", "mlp", "--batch", "32", "--explain")
    assert text.count("is priced") == len(rows)
