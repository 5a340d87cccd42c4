"""Plans whose components are recomputed by operator: what they cost, what they keep, and when a search takes them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parsim.errors import ConfigError, PlanError
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.plan import Plan, named, normalised, plan_in_words
from parsim.predict.breakdown import recomputed_flop
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.by_hand import recompute_by_pattern
from parsim.search.families import FAMILIES
from parsim.search.recompute import every_set, recomputed_to_fit, recomputes_more
from parsim.search.refine import sets_that_fit
from parsim.search.search import search
from parsim.work import Compute, Phase
from tests.machines import machine

GPT = ModelSpec(name="gpt_small")


def problem(model: Model | None = None, memory_bytes: int = 32 * 2**30) -> PlanningProblem:
    """One V100, which has as much memory as asked for."""
    model = load_model(GPT, granularity="block") if model is None else model
    cluster = machine(1, memory_bytes=memory_bytes)
    return PlanningProblem(model=model, cluster=cluster, global_batch=256, recompute="auto")


def plain(asked: PlanningProblem) -> Plan:
    return next(iter(FAMILIES["single"](asked)))


def test_the_choice_has_one_form() -> None:
    names = ("a", "b", "c")
    assert normalised(("selective:c", "a"), names) == ("a", "selective:c")
    assert normalised([f"selective:{name}" for name in names], names) == "selective"
    assert normalised((), names) == "none"
    assert named(("a", "selective:c"), names) == ({"a"}, {"c"})
    assert named("selective", names) == (set(), set(names))
    with pytest.raises(PlanError, match="names 'a' and 'selective:a': a component is recomputed in one way"):
        normalised(("a", "selective:a"), names)
    with pytest.raises(PlanError, match="names 'd', which is not a component"):
        normalised(("selective:d",), names)
    with pytest.raises(PlanError, match="'none', 'selective', 'full' or a list"):
        normalised("selectiv", names)


def test_a_plan_says_what_it_recomputes() -> None:
    asked = problem()
    plan = replace(plain(asked), recompute=("h.0", "selective:h.1"))
    assert Plan.from_json(plan.to_json()) == plan
    assert "recompute=2 of" in plan.summary()
    some = replace(plan, recompute="selective")
    assert (some.to_dict()["recompute"], Plan.from_json(some.to_json())) == ("selective", some)
    assert "recompute=selective" in some.summary()
    assert plan_in_words(some).endswith("recomputing some activations")


def test_patterns_name_components_by_operator() -> None:
    model = load_model(GPT, granularity="block")
    layers = [component.name for component in model.components if component.name.startswith("h.")]
    assert recompute_by_pattern(("selective:h.*", "loss"), model) == (*(f"selective:{name}" for name in layers), "loss")
    mlp = load_model(ModelSpec(name="mlp"), granularity="block")
    for asked in ("selective", ("selective:*",)):
        with pytest.raises(ConfigError, match="would change nothing"):
            recompute_by_pattern(asked, mlp)


def test_only_what_runs_again_is_paid_and_less_is_kept() -> None:
    """The step grows by the operators' share of the forwards, and memory lies between that of none and of full."""
    asked = problem()
    plans = [replace(plain(asked), recompute=way) for way in ("none", "selective", "full")]
    none, some, full = (evaluate(asked, plan, samples=0) for plan in plans)
    steps = [entry.result.step_s.median for entry in (none, some, full)]
    peaks = [entry.memory[0].total_bytes for entry in (none, some, full)]
    assert steps[0] < steps[1] < steps[2]
    assert steps[1] - steps[0] < 0.3 * (steps[2] - steps[0]), "norms and activation functions, no product"
    assert peaks[0] > peaks[1] > peaks[2]
    again = [task.work for task in some.graph.tasks if isinstance(task.work, Compute) and task.work.phase is Phase.RECOMPUTE]
    by_operator = {component.name for component in asked.model.components if component.selective is not None}
    assert {work.component for work in again} == by_operator
    assert {work.part for work in again} == {"selective"}
    costs = asked.costs(1)
    for work in again:
        forward = replace(work, phase=Phase.FORWARD, part="")
        assert 0 < costs.estimate(work, 0).median_s < costs.estimate(forward, 0).median_s
    added = sum(costs.estimate(work, 0).median_s for work in again)
    assert steps[1] == pytest.approx(steps[0] + added, rel=1e-9)
    assert recomputed_flop(asked.model, plans[1]) == 0.0 < recomputed_flop(asked.model, plans[2])


def test_a_search_recomputes_by_operator_where_that_is_enough() -> None:
    """More memory never means more time, and between full and none some components are recomputed by operator."""
    asked = problem()
    plans = [replace(plain(asked), recompute=way) for way in ("none", "selective", "full")]
    none, some, full = (asked.memory(plan)[0].needed_bytes for plan in plans)
    seconds, by_operator = [], []
    for limit in (full, (full + some) // 2, some, (some + none) // 2, none):
        tight = problem(memory_bytes=limit)
        found = recomputed_to_fit(tight, replace(plain(tight), recompute="none"))
        assert found is not None
        assert tight.memory(found)[0].fits
        seconds.append(evaluate(tight, found, samples=0).result.step_s.median)
        by_operator.append(len(found.recomputed_by_operator))
    assert seconds == sorted(seconds, reverse=True)
    assert (by_operator[0], by_operator[-1]) == (0, 0)
    assert max(by_operator) > 0
    chosen = search(replace(problem(memory_bytes=some), zero_stage=0), ("single",), samples=0).chosen
    assert chosen is not None
    assert chosen.result.fits


def test_sets_of_small_models_mix_both_ways() -> None:
    """Of three components every combination is tried, and none that recomputes more than one that fits."""
    asked = problem(llama("fused", "block", layers=1))
    plan = replace(plain(asked), recompute="none")
    tight = problem(asked.model, asked.memory(replace(plan, recompute="selective"))[0].needed_bytes)
    queue, found = sets_that_fit(tight, plan), []
    while queue:
        node = queue.pop(0)
        queue += [] if node.opened is None else node.opened()
        found += [] if node.plan is None else [(node.bound_s, node.plan)]
    assert found
    assert [bound for bound, _ in found] == sorted(bound for bound, _ in found)
    plans = [entry for _, entry in found]
    assert all(tight.memory(entry)[0].fits for entry in plans)
    assert any(entry.recomputed_by_operator for entry in plans)
    least = [each for each in every_set(tight, plan) if tight.memory(each)[0].fits]
    least = [each for each in least if not any(other != each and recomputes_more(each, other) for other in least)]
    assert {str(entry.recompute) for entry in plans} == {str(entry.recompute) for entry in least}


def llama(kernels: str, granularity: str, layers: int = 2) -> Model:
    args = (("hidden", 64), ("layers", layers), ("heads", 8), ("seq", 128), ("vocab", 512), ("kernels", kernels))
    return load_model(ModelSpec(name="llama3-8b", args=args), granularity=granularity)


@pytest.mark.parametrize("granularity", ["block", "sublayer"])
@pytest.mark.parametrize("kernels", ["fused", "eager", "unfused-attention"])
def test_named_transformers_are_recomputed_by_operator(kernels: str, granularity: str) -> None:
    """Unfused: the core of attention, products included; fused: what lies between the products, without a product."""
    model = llama(kernels, granularity)
    assert Model.from_json(model.to_json()) == model
    cut = [component for component in model.components if component.selective is not None]
    unfused = kernels == "unfused-attention"
    wanted = "h.1" if granularity == "block" else "h.1.attn" if unfused else "h.1.mlp"
    assert wanted in {component.name for component in cut}
    for component in cut:
        selective = component.selective
        assert selective is not None
        kinds = {component.operators[number].kind for number, _ in selective.operators}
        assert ("matmul" in kinds) == unfused
        assert "attention" not in kinds
        counted = sum(model.value[name].bytes_per_sample for name in selective.values)
        assert selective.kept[0] + counted + selective.again[0] == component.saved_activation_bytes
