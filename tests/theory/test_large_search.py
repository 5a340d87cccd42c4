"""Searches of large problems: outlines are bounded and ordered, an answer comes, and it is as fast as what people choose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import parsim as ps
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.predict.evaluate import simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.search import space as usual
from parsim.search.bound import chain_seconds, step_bound_s
from parsim.search.families import FAMILIES
from parsim.search.memory_floor import least_kept, weights_are_too_many
from parsim.search.search import search
from parsim.search.space import Node
from parsim.search.stages import Cutting, cut_places, place_excess_bytes
from parsim.search.tensor import uniform_placements
from parsim.search.tree import Members, outline_bound_s
from tests.machines import machine
from tests.models import chain_model


def transformer(layers: int = 4) -> Model:
    """A Llama of that many layers, cut into halves of blocks, without torch."""
    args = (("hidden", 512), ("layers", layers), ("seq", 256))
    return load_model(ModelSpec(name="llama3-8b", args=args), granularity="sublayer")


@pytest.fixture(scope="module")
def problem() -> PlanningProblem:
    return PlanningProblem(
        model=transformer(), cluster=machine(), global_batch=16, numerics=Numerics(precision="amp_fp16", optimizer="adam")
    )


@pytest.mark.parametrize("mesh", [Mesh(dp=8), Mesh(dp=2, tp=4), Mesh(pp=2, dp=2, tp=2), Mesh(pp=4, tp=2)], ids=str)
@pytest.mark.parametrize("order", [("1f1b", 1), ("interleaved", 2), ("gpipe", 1)], ids=str)
def test_no_plan_of_an_outline_is_simulated_below_its_bound(
    problem: PlanningProblem, mesh: Mesh, order: tuple[str, int]
) -> None:
    if mesh.pp == 1 and order[1] > 1:
        pytest.skip("no pipeline")
    count = 2 if mesh.dp == 8 else 4
    placed = uniform_placements(problem, replace(mesh, pp=1), divides=False) if mesh.tp > 1 else {}
    bound_s = outline_bound_s(problem, mesh, count, order, mixed=False)
    cutting = Cutting(
        problem=problem, strategy="hp", mesh=mesh, microbatches=count, order=order[0], chunks=order[1], placements=placed
    )
    fastest = cutting.fastest()
    for stage in (0, 3):
        for recompute in ("none", "full"):
            plan = replace(fastest, zero_stage=stage, recompute=recompute)
            step_s = simulated_step(problem, plan, fold=True).step_s
            assert bound_s <= step_s
            assert step_bound_s(problem, plan) <= step_s


def test_the_seconds_of_a_chain_add_up_to_those_of_one_stage(problem: PlanningProblem) -> None:
    """Data parallelism on one stage computes one microbatch after the other."""
    chain = chain_seconds(problem, Mesh(dp=8), 2, {})
    plan = Cutting(problem=problem, strategy="dp", mesh=Mesh(dp=8), microbatches=2, order="1f1b", placements={}).fastest()
    assert 2 * (chain.forward_s + chain.backward_s) <= simulated_step(problem, plan, fold=True).step_s


@pytest.mark.slow
def test_a_search_that_is_treated_as_large_finds_as_fast_a_plan(
    problem: PlanningProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the families; mixed placements are late parts of large problems, and few of these are opened."""
    asked = replace(problem, global_batch=8)
    whole = search(asked, ("dp", "mp"), samples=0).chosen
    monkeypatch.setattr(usual, "LARGE", 0)
    found = search(replace(asked), ("dp", "mp"), samples=0).chosen
    assert whole is not None
    assert found is not None
    assert found.result.step_s.median <= whole.result.step_s.median * 1.01


def test_an_answer_comes_although_the_allowance_is_spent(problem: PlanningProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(problem, global_batch=8)
    monkeypatch.setattr(usual, "LARGE", 0)
    monkeypatch.setattr(usual, "MOST_VISITS", 1)
    monkeypatch.setattr(usual, "MOST_MISSES", 10**9)
    found = search(asked, ("dp", "mp"), samples=0)
    assert found.chosen is not None
    assert found.chosen.result.fits
    assert found.tally.untried > 0


def test_the_recomputation_that_keeps_least_keeps_no_more_than_all_of_it(problem: PlanningProblem) -> None:
    """Nor more than nothing recomputed."""
    least = least_kept(problem)
    cutting = Cutting(problem=problem, strategy="mp", mesh=Mesh(pp=2), microbatches=4, order="1f1b", placements={})
    kept = [
        sum(dict(entry.lines)["activations"] for entry in problem.memory(replace(cutting.fastest(), recompute=recompute)))
        for recompute in (least.recompute, "full", "none")
    ]
    assert kept[0] <= kept[1] < kept[2]


def test_stages_that_hold_fewer_microbatches_are_longer_where_equal_ones_do_not_fit() -> None:
    """The first of four stages holds four microbatches, the last one holds one."""
    model = chain_model((1e9,) * 24, width=2**20)
    asked = PlanningProblem(model=model, cluster=machine(4), global_batch=256)
    cutting = Cutting(problem=asked, strategy="mp", mesh=Mesh(pp=4), microbatches=8, order="1f1b", placements={})
    equal = cutting.fastest()
    totals = [entry.needed_bytes for entry in asked.memory(equal)]
    limit = round(0.9 * max(totals) + 0.1 * min(totals))
    tight = replace(asked, cluster=machine(4, memory_bytes=limit))
    assert any(place_excess_bytes(tight, equal))
    kept = np.array([component.saved_activation_bytes * equal.microbatch_samples for component in model.components])
    found = replace(cutting, problem=tight).fitting_recomputed("none", kept)
    assert found is not None
    assert not any(place_excess_bytes(tight, found))
    assert len(found.stages[0].components) < len(found.stages[-1].components)


def test_models_of_many_components_are_cut_between_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer(40)
    names = [component.name for component in model.components]

    def places() -> tuple[int, ...]:
        return cut_places(PlanningProblem(model=model, cluster=machine(1), global_batch=1))

    assert places() == tuple(range(len(names) + 1))
    monkeypatch.setattr("parsim.search.stages.MOST_PLACES", 50)
    monkeypatch.setattr("parsim.search.stages.MOSTLY", 0.8)
    inner = [names[place] for place in places()[2:-4]]
    assert len(inner) > 30
    assert len({name.split(".")[-1] for name in inner}) == 1


@pytest.mark.slow
def test_a_large_model_on_64_gpus_is_planned_no_slower_than_by_hand() -> None:
    """What the user calls: without any constraint, against tensor parallelism in the node and a pipeline over nodes."""

    def planned(**settings: object) -> ps.Answer:
        keys = {"model.args.seq": 8192, **settings}
        return ps.plan("llama3-70b", cluster="64xh100-sxm", network="infiniband-400g", global_batch=512, settings=keys)

    free = planned()
    assert free.fits
    assert free.chosen is not None
    for pp in (2, 4):
        by_hand = planned(**{"plan.mesh": {"pp": pp, "dp": 8 // pp, "tp": 8}, "plan.pipeline_order": "1f1b"})
        assert by_hand.chosen is not None
        assert free.chosen.step_s.median <= by_hand.chosen.step_s.median
    assert free.search is not None
    assert free.search.tally.considered > free.search.tally.simulated


@pytest.mark.parametrize("devices", [4, 6, 8])
def test_where_weights_alone_are_too_many_no_plan_on_so_many_devices_fits(devices: int) -> None:
    """Devices that could hold an equal share of all weights, or just not; then none of the plans on fewer of them is opened."""
    question = PlanningProblem(
        model=transformer(2), cluster=machine(), global_batch=24, numerics=Numerics(precision="amp_fp16", optimizer="adam")
    )
    elements = sum(parameter.elements for parameter in question.model.trainable_parameters)
    share = 16 * elements // devices
    for room, too_many in ((share + 2**20, False), (share - 2**20, True)):
        asked = replace(question, cluster=machine(memory_bytes=room, context_bytes=0))
        assert weights_are_too_many(asked, devices) == too_many
        assert not weights_are_too_many(asked, devices + 1)
        for plan in FAMILIES["dp"](asked) if too_many else ():
            if plan.world_size <= devices:
                assert not all(entry.fits for entry in asked.memory(plan))


def test_a_large_question_of_which_nothing_fits_opens_no_plans_on_fewer_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal share of the weights is too much for each of eight devices, and so for each of fewer."""
    monkeypatch.setattr(usual, "LARGE", 0)
    opened = []

    def of_mesh(members: Members, mesh: Mesh) -> list[Node]:
        opened.append(mesh.size)
        return found_on(members, mesh)

    found_on = Members.of_mesh
    monkeypatch.setattr(Members, "of_mesh", of_mesh)
    question = PlanningProblem(
        model=transformer(2),
        cluster=machine(memory_bytes=2**27),
        global_batch=24,
        numerics=Numerics(precision="amp_fp16", optimizer="adam"),
    )
    found = search(question, ("dp",), samples=0)
    assert found.chosen is None
    assert set(opened) == {8}
    assert found.tally.too_large == found.tally.considered
