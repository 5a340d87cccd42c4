"""Segments in a search: a model cut more finely than its layers is planned no slower than by layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parsim.errors import ConfigError, PlanError
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.model import Model, repeated_blocks
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, named, normalised, plan_in_words
from parsim.predict.breakdown import recomputed_flop
from parsim.predict.evaluate import evaluate, simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.program.lifetimes import KeptActivations
from parsim.search.bound import step_bound_s
from parsim.search.by_hand import recompute_by_pattern
from parsim.search.families import FAMILIES
from parsim.search.memory_floor import floor_excess_bytes, kept_together, least_kept, plan_floor
from parsim.search.recompute import every_set, recomputed_to_fit, recomputes_more, segmented_to_fit
from parsim.search.refine import sets_that_fit
from parsim.search.search import search
from parsim.search.stages import Cutting, place_excess_bytes, recomputing_layers, segments_of, within_stages
from parsim.search.tensor import uniform_placements
from parsim.work import Compute, Phase
from tests.machines import machine

LAYERS = 6


def transformer(granularity: str) -> Model:
    """A small Llama of a long sequence: its activations are most of what a rank holds."""
    args = (("hidden", 512), ("layers", LAYERS), ("seq", 4096))
    return load_model(ModelSpec(name="llama3-8b", args=args), granularity=granularity)


def asked(granularity: str, devices: int = 2, memory_bytes: int = 32 * 2**30) -> PlanningProblem:
    return PlanningProblem(
        model=transformer(granularity),
        cluster=machine(devices, memory_bytes=memory_bytes),
        global_batch=4,
        numerics=Numerics(precision="amp_fp16", optimizer="adam"),
        segments=granularity == "sublayer",
    )


def cut(problem: PlanningProblem, mesh: Mesh, microbatches: int = 1) -> Cutting:
    return Cutting(problem=problem, strategy="hp", mesh=mesh, microbatches=microbatches, order="1f1b", placements={})


def held_bytes(problem: PlanningProblem, plan: Plan) -> int:
    return max(entry.needed_bytes for entry in problem.memory(plan))


def test_blocks_are_found_by_what_repeats() -> None:
    assert repeated_blocks("eabcabcabch") == ((1, 4), (4, 7), (7, 10))
    assert repeated_blocks("exbcabcabch") == ((1, 4), (4, 7), (7, 10))  # the first norm adds nothing up
    assert repeated_blocks("eababcdcdcdh") == ((1, 3), (3, 5), (5, 7), (7, 9), (9, 11))
    assert repeated_blocks("abcdef") == ()
    assert repeated_blocks("") == ()


def test_a_block_begins_where_least_enters_it() -> None:
    """The stream alone enters before a norm, and behind it what the norm has made too. The first norm is like no other."""
    prints = "enaNmNaNmNaNmNh"  # the last N is the norm behind all layers
    enters = [0, *([1, 2, 1, 2] * 3), 1, 1]
    assert repeated_blocks(prints) == ((2, 6), (6, 10), (10, 14))
    assert repeated_blocks(prints, enters) == ((1, 5), (5, 9), (9, 13))
    assert repeated_blocks("eabcabcabch", [0, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]) == ((1, 4), (4, 7), (7, 10))


def of_layers(problem: PlanningProblem, plan: Plan) -> dict[str, float]:
    """Bytes of the fullest rank by line."""
    return max((dict(memory.lines) for memory in problem.memory(plan)), key=lambda lines: lines["activations"])


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_full_recomputation_keeps_a_piece_of_the_sequence_of_one_input_per_layer(tp: int) -> None:
    """Korthikanti et al. (2022), section 5: full recomputation keeps 2sbh bytes per layer, here in t pieces."""
    problem = asked("sublayer", 8)
    mesh, asks = Mesh(dp=1, tp=tp), replace(problem, recompute="full")
    placed = uniform_placements(asks, Mesh(tp=tp), divides=True) if tp > 1 else {}
    plain = replace(cut(problem, mesh, 4), placements=placed).fastest()
    layers = tuple(name for name in plain.components if name.startswith("h."))
    plan = recomputing_layers(asks, plain, layers)
    assert [len(segment) for segment in plan.segments] == [4] * LAYERS
    assert plan.recompute == "none"
    kept, nothing = (of_layers(problem, each)["activations"] for each in (plan, replace(plain, recompute=layers)))
    head = of_layers(problem, replace(plan, segments=(), recompute=plain.components))["activations"]
    assert nothing > 2 * LAYERS * 2 * 4096 * 512  # component by component: what attention and MLP read, gathered
    layer_bytes = 2 * 4096 * 512 / tp
    beside = kept - LAYERS * layer_bytes
    assert beside == pytest.approx(kept_by_ends(problem, plain), rel=1e-6), head


def kept_by_ends(problem: PlanningProblem, plan: Plan) -> float:
    """What the last norm and the head keep of one sample."""
    kept = KeptActivations(problem.layout(plan), problem.numerics.precision)
    return sum(kept.saved_bytes(name) for name in ("embed", "final.norm", "head"))


def test_full_recomputation_by_sublayers_holds_what_it_holds_by_layers() -> None:
    held = []
    for granularity in ("block", "sublayer"):
        problem = replace(asked(granularity, 1), recompute="full")
        held.append(held_bytes(problem, recomputing_layers(problem, cut(problem, Mesh(), 2).fastest(), "full")))
    assert held[1] == pytest.approx(held[0], rel=0.02)


def test_layers_of_which_some_components_are_named_are_no_segments() -> None:
    problem = asked("sublayer", 1)
    plain = cut(problem, Mesh()).fastest()
    chosen = (*(f"h.0.{part}" for part in ("norm1", "attn", "norm2", "mlp")), "h.1.mlp", "selective:h.2.attn")
    plan = recomputing_layers(problem, plain, chosen)
    assert plan.segments == (chosen[:4],)
    assert plan.recompute == ("h.1.mlp", "selective:h.2.attn")
    assert recomputing_layers(replace(problem, segments=False), plain, chosen).segments == ()


def test_segments_are_whole_layers_or_several_of_them() -> None:
    problem = asked("sublayer")
    ways = segments_of(problem)
    assert [len(way) for way in ways] == [LAYERS, LAYERS // 2, 2]
    for segment in ways[0]:
        assert [name.split(".")[-1] for name in segment] == ["norm1", "attn", "norm2", "mlp"]
    assert segments_of(replace(problem, segments=False)) == ()
    assert segments_of(replace(problem, recompute="none")) == ()


def test_longer_segments_keep_less() -> None:
    problem = asked("sublayer")
    kept = [way.kept.sum() for way in (least_kept(problem), *kept_together(problem))]
    assert kept == sorted(kept, reverse=True)
    assert kept[1] < 0.8 * kept[0]


@pytest.mark.parametrize("way", range(3))
def test_what_segments_are_said_to_keep_is_what_the_memory_of_a_rank_counts(way: int) -> None:
    """The difference of two samples and one: all else is the same for both."""
    problem = asked("sublayer", 1)
    entry = kept_together(problem)[way]

    def kept(microbatches: int) -> int:
        plan = replace(cut(problem, Mesh(), microbatches).fastest(), recompute=entry.recompute, segments=entry.segments)
        return dict(problem.memory(plan)[0].lines)["activations"]

    assert kept(2) - kept(4) == pytest.approx(float(entry.kept.sum()), rel=0.02)


def test_stages_cut_segments_in_two() -> None:
    problem = asked("sublayer")
    names = [component.name for component in problem.model.components]
    plan = cut(problem, Mesh(pp=2)).plan(((0, 8), (8, len(names))))
    segments = within_stages(plan, segments_of(problem)[0])
    of_first, of_second = (set(stage.components) for stage in plan.stages)
    assert all(of_first.issuperset(part) or of_second.issuperset(part) for part in segments)
    replace(plan, segments=segments)  # which checks them


@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(pp=2), Mesh(tp=2)], ids=str)
@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_bounds_and_floors_hold_for_segments(mesh: Mesh, zero_stage: int) -> None:
    problem = asked("sublayer")
    placed = uniform_placements(problem, Mesh(tp=mesh.tp), divides=True) if mesh.tp > 1 else {}
    plain = replace(cut(problem, mesh, 2), placements=placed, zero_stage=zero_stage).fastest()
    for way in kept_together(problem):
        plan = replace(plain, recompute=way.recompute, segments=within_stages(plain, way.segments))
        assert step_bound_s(problem, plan) <= simulated_step(problem, plan).step_s
        tight = asked("sublayer", 2, held_bytes(problem, plan) + 1)
        assert floor_excess_bytes(tight, plain, recomputing=True, segments=True) == 0
        if any(place_excess_bytes(tight, plain)):
            floor = plan_floor(tight, plain)
            assert floor is not None
            assert floor.recomputing_bound_s(zero_stage) <= simulated_step(tight, plan).step_s


def test_as_few_layers_are_segments_as_make_a_plan_fit() -> None:
    problem = asked("sublayer", 1)
    plain = cut(problem, Mesh()).fastest()
    way = kept_together(problem)[0]
    most, least = (
        held_bytes(problem, plan)
        for plan in (plain, replace(plain, recompute=way.recompute, segments=within_stages(plain, way.segments)))
    )
    counts = []
    for share in (0.9, 0.5, 0.1):
        tight = asked("sublayer", 1, int(least + share * (most - least)))
        found = segmented_to_fit(tight, plain)
        assert found is not None
        assert not any(place_excess_bytes(tight, found))
        counts.append(len(found.segments))
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_segments_fit_where_no_recomputed_set_of_components_does() -> None:
    problem = asked("sublayer", 1)
    plain = cut(problem, Mesh()).fastest()
    alone, together = (
        held_bytes(problem, replace(plain, recompute=way.recompute, segments=within_stages(plain, way.segments)))
        for way in (least_kept(problem), kept_together(problem)[0])
    )
    tight = asked("sublayer", 1, (alone + together) // 2)
    assert recomputed_to_fit(tight, plain) is None
    assert segmented_to_fit(tight, plain) is not None


def shares(problem: PlanningProblem) -> tuple[int, int]:
    """What a step by layers holds at most and at least where one device has all of it, with a sample at a time."""
    plain = cut(problem, Mesh(), problem.global_batch).fastest()
    return held_bytes(problem, plain), held_bytes(problem, replace(plain, recompute="full"))


SLOW = pytest.mark.slow  # some seconds each


@pytest.mark.parametrize(
    ("devices", "share"),
    [(1, 0.3), (2, 0.02), *(pytest.param(*case, marks=SLOW) for case in ((1, 0.02), (1, 0.8), (2, 0.3), (2, 0.8)))],
)
def test_sublayers_are_never_planned_slower_than_layers(devices: int, share: float) -> None:
    """Under memory that makes both recompute; with the same families, since shards need sublayers."""
    most, least = shares(asked("block", 1))
    memory = int(least + share * (most - least))
    steps = []
    for granularity in ("block", "sublayer"):
        found = search(asked(granularity, devices, memory), ("single", "dp"), samples=0).chosen
        assert found is not None, granularity
        assert found.result.fits
        steps.append(found.result.step_s.median)
    assert steps[1] <= steps[0] * (1 + 1e-3), (steps, share)


# Plans whose components are recomputed by operator: what they cost, what they keep, and when a search takes them.

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
