"""The placement problem: its solvers against brute force and against each other, on drawn problems and real models."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from typer.testing import CliRunner

from parsim.cli import build
from parsim.errors import ScheduleError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import BATCH
from parsim.plans.mesh import Mesh
from parsim.predict.problem import PlanningProblem
from parsim.search.placement import certificate as module
from parsim.search.placement.certificate import (
    Certificate,
    certificate_text,
    certify,
    paper_certificate,
    paper_problem_of,
    solve_milp,
)
from parsim.search.placement.exact import Frontiers, Relaxation, numbers_among, options_in_reach, solve_exactly, undominated
from parsim.search.placement.problem import PlacementProblem, Solution, fits, memory_of, placement_problem_of, step_s
from parsim.search.prices import Prices
from parsim.search.space import INFINITE, partition
from parsim.search.tensor import allowed_placements, posed_placement
from parsim.work import Collective, Compute, Phase
from tests.machines import machine
from tests.theory.brute_force import solve_brute_force

CLOSE = 1e-9


def random_placing(seed: int, *, components: int = 6, options: int = 4) -> PlacementProblem:
    """A chain with residual edges, sometimes a tie, one to three constraints of memory from slack to infeasible."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, components + 1))
    sizes = [int(rng.integers(1, options + 1)) for _ in range(count)]
    ranks = int(rng.integers(1, 4))
    edges = {}
    for two in range(1, count):
        for one in {two - 1} | ({int(rng.integers(0, two))} if rng.random() < 0.3 else set()):
            shape = (sizes[one], sizes[two])
            edges[one, two] = (2 * rng.random(shape), 2 * rng.random(shape))
    allowed = {}
    if count > 2 and rng.random() < 0.2:
        allowed[0, count - 1] = rng.random((sizes[0], sizes[-1])) < 0.6
    return PlacementProblem(
        components=tuple(f"c{number}" for number in range(count)),
        options=tuple(tuple(range(size)) for size in sizes),  # type: ignore[misc]
        forward_s=tuple(rng.random(size) for size in sizes),
        backward_s=tuple(2 * rng.random(size) for size in sizes),
        synchronisation_s=tuple(4 * rng.random(size) for size in sizes),
        conversion_s=edges,
        memory_bytes=tuple(rng.random((size, ranks)) for size in sizes),
        limit_bytes=np.full(ranks, count * rng.uniform(0.1, 0.9)),
        allowed=allowed,
    )


def assert_solved(placing: PlacementProblem, found: Solution) -> None:
    """As brute force solves it."""
    oracle = solve_brute_force(placing)
    assert found.status == oracle.status
    assert found.status != "infeasible" or found.reason
    if oracle.choice:
        assert found.seconds == pytest.approx(oracle.seconds, abs=CLOSE)
        assert step_s(placing, found.choice) == pytest.approx(oracle.seconds, abs=CLOSE)
        assert fits(placing, found.choice)
        assert found.lower_bound_s <= found.seconds * (1 + CLOSE)


@given(seed=st.integers(0, 10**9))
@settings(max_examples=100, deadline=None)
def test_options_out_of_reach_are_in_no_best_choice(seed: int) -> None:
    """Of problems whose conversions are dear, so that many options are left out."""
    placing, rng = random_placing(seed), np.random.default_rng(seed)
    bare = replace(placing, conversion_s={})
    hints = [tuple(int(rng.integers(len(own))) for own in placing.options) for _ in range(3)]

    def converted(some: PlacementProblem) -> PlacementProblem:
        kept = [[own.index(option) for option in left] for own, left in zip(placing.options, some.options, strict=True)]
        return placing.restricted(kept)

    kept = options_in_reach(bare, hints, converted)
    for choice in numbers_among(kept, hints):
        assert tuple(own[number] for own, number in zip(kept, choice, strict=True)) in hints
    every, some = solve_brute_force(placing), solve_brute_force(placing.restricted(kept))
    assert (every.status, every.seconds) == (some.status, some.seconds)
    assert tuple(own[number] for own, number in zip(kept, some.choice, strict=False)) == every.choice


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_the_relaxed_problem_is_the_least_of_all_choices(seed: int) -> None:
    """Its value, its choice, and from every cut on what the components before cost at least."""
    placing = random_placing(seed)
    frontiers = Frontiers(placing)
    prices = 3 * np.random.default_rng(seed).random(len(placing.limit_bytes))
    node = [
        ahead + back + memory @ prices
        for ahead, back, memory in zip(placing.forward_s, placing.backward_s, placing.memory_bytes, strict=True)
    ]
    relaxed = Relaxation(frontiers, prices)

    def seconds(choice: tuple[int, ...], cut: int) -> float:
        """Of the components before the cut, and of the edges that begin there."""
        own = sum(float(node[number][choice[number]]) for number in range(cut))
        return own + sum(float(cost[choice[one], choice[two]]) for (one, two), cost in frontiers.cost.items() if one < cut)

    count = len(placing.components)
    choices = list(itertools.product(*(range(len(options)) for options in placing.options)))
    least = min(seconds(choice, count) for choice in choices)
    assert relaxed.value == pytest.approx(least - float(prices @ placing.limit_bytes))
    if np.isfinite(least):
        assert seconds(relaxed.choice(), count) == pytest.approx(least)
    for cut in range(1, count):
        to_go = relaxed.to_go(cut)
        assert to_go is not None
        for state in np.ndindex(to_go.shape):
            chosen = [choice for choice in choices if tuple(choice[axis] for axis in frontiers.after[cut]) == state]
            assert to_go[state] == pytest.approx(min(seconds(choice, cut) for choice in chosen))


SOLVERS = {"exact": solve_exactly, "milp": solve_milp}


@pytest.mark.parametrize(
    ("solver", "seeds"),
    [
        ("exact", range(400)),
        ("milp", range(60)),
        pytest.param("exact", range(10_000, 12_000), marks=pytest.mark.slow),
        pytest.param("milp", range(20_000, 20_500), marks=pytest.mark.slow),
    ],
)
def test_both_solvers_equal_brute_force(solver: str, seeds: range) -> None:
    for seed in seeds:
        placing = random_placing(seed)
        assert_solved(placing, SOLVERS[solver](placing))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(1.0, 3.0))
def test_more_memory_or_bandwidth_never_hurts_and_seconds_scale(seed: int, factor: float) -> None:
    placing = random_placing(seed)
    before = solve_exactly(placing)
    roomier = solve_exactly(replace(placing, limit_bytes=placing.limit_bytes * factor))
    assert roomier.seconds <= before.seconds * (1 + CLOSE)
    links = replace(
        placing,
        conversion_s={pair: (one / factor, two / factor) for pair, (one, two) in placing.conversion_s.items()},
        synchronisation_s=tuple(own / factor for own in placing.synchronisation_s),
    )
    faster = solve_exactly(links)
    # A conversion in the backward hides gradient sums, so what is compared is an upper bound: the same choice, made faster.
    if before.choice:
        assert faster.seconds <= step_s(links, before.choice) * (1 + CLOSE)
        assert faster.seconds <= before.seconds * (1 + CLOSE)
    scaled = solve_exactly(placing.in_units(1 / factor))
    assert scaled.status == before.status
    if before.choice:
        assert scaled.seconds == pytest.approx(factor * before.seconds, rel=CLOSE)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_never_worse_than_any_uniform_choice_and_invariant_under_renaming(seed: int) -> None:
    placing = random_placing(seed)
    best = solve_exactly(placing)
    for option in range(max(len(options) for options in placing.options)):
        uniform = tuple(min(option, len(options) - 1) for options in placing.options)
        if fits(placing, uniform):
            assert best.seconds <= step_s(placing, uniform) * (1 + CLOSE)
    rng = np.random.default_rng(seed)
    ranks = rng.permutation(len(placing.limit_bytes))
    orders = [rng.permutation(len(options)) for options in placing.options]
    renamed = replace(
        placing,
        options=tuple(tuple(options[place] for place in order) for options, order in zip(placing.options, orders, strict=True)),
        forward_s=tuple(own[order] for own, order in zip(placing.forward_s, orders, strict=True)),
        backward_s=tuple(own[order] for own, order in zip(placing.backward_s, orders, strict=True)),
        synchronisation_s=tuple(own[order] for own, order in zip(placing.synchronisation_s, orders, strict=True)),
        conversion_s={
            (one, two): (ahead[np.ix_(orders[one], orders[two])], back[np.ix_(orders[one], orders[two])])
            for (one, two), (ahead, back) in placing.conversion_s.items()
        },
        allowed={(one, two): pairs[np.ix_(orders[one], orders[two])] for (one, two), pairs in placing.allowed.items()},
        memory_bytes=tuple(own[order][:, ranks] for own, order in zip(placing.memory_bytes, orders, strict=True)),
        limit_bytes=placing.limit_bytes[ranks],
    )
    again = solve_exactly(renamed)
    assert again.status == best.status
    if best.choice:
        assert again.seconds == pytest.approx(best.seconds, rel=CLOSE)


def test_a_solver_stopped_early_is_not_called_optimal() -> None:
    placing = random_placing(5, components=40, options=8)
    found = solve_exactly(placing, most_labels=1)
    assert found.status in ("feasible", "inaccurate", "infeasible") or found.gap <= CLOSE
    if found.choice:
        assert found.lower_bound_s <= found.seconds


def test_many_components_that_only_just_do_not_fit_are_refused_at_once() -> None:
    """Labels alone would need minutes: each rank could hold the smallest options, and no choice fits on all of them."""
    count, ranks = 30, 4
    place = np.eye(ranks) + 1e-3 * np.arange(ranks)
    placing = PlacementProblem(
        components=tuple(f"c{number}" for number in range(count)),
        options=tuple(tuple(range(ranks)) for _ in range(count)),  # type: ignore[misc]
        forward_s=tuple(np.ones(ranks) for _ in range(count)),
        backward_s=tuple(np.ones(ranks) for _ in range(count)),
        synchronisation_s=tuple(np.zeros(ranks) for _ in range(count)),
        conversion_s={},
        allowed={},
        memory_bytes=tuple(1e6 * (place + 1e-4 * number) for number in range(count)),
        limit_bytes=np.full(ranks, 1e6 * count / ranks * 0.99),
    )
    found = solve_exactly(placing, most_labels=2_000)
    assert found.status == "infeasible"
    assert "no choice is small enough on all of them" in found.reason


def test_labels_that_others_make_superfluous_are_dropped() -> None:
    rng = np.random.default_rng(3)
    seconds, late, memory = (
        np.sort(rng.integers(0, 12, 300)) / 4,
        rng.integers(0, 4, 300) / 4,
        rng.integers(0, 4, (300, 2)) / 1.0,
    )
    order = np.lexsort((late, seconds))
    seconds, late, memory = seconds[order], late[order], memory[order]
    keep, compared = undominated(seconds, late, memory, 10**9)
    assert 0 < keep.sum() < 300
    assert compared > 0

    def dominates(one: int, two: int) -> bool:
        return bool(seconds[one] + max(0.0, late[one] - late[two]) <= seconds[two] and (memory[one] <= memory[two]).all())

    kept = np.flatnonzero(keep)
    assert not [(one, two) for one in kept for two in kept if one < two and dominates(one, two)]
    assert all(any(dominates(int(one), two) for one in kept if one < two) for two in np.flatnonzero(~keep))
    assert undominated(seconds, late, memory, 0)[0].sum() >= keep.sum()


# --- the paper's problem as printed: a knapsack, without conversions and gradient sums ---------------------------------


def random_paper(seed: int) -> PlacementProblem:
    placing = random_placing(seed, components=8, options=3)
    nothing = tuple(np.zeros(len(options)) for options in placing.options)
    return replace(placing, backward_s=nothing, synchronisation_s=nothing, conversion_s={}, allowed={})


def test_the_papers_problem_equals_brute_force() -> None:
    for seed in range(200):
        paper = random_paper(seed)
        oracle = solve_brute_force(paper)
        for solution in [solve_exactly(paper)] + ([solve_milp(paper)] if seed < 40 else []):
            assert solution.status == oracle.status
            assert not oracle.choice or solution.seconds == pytest.approx(oracle.seconds, abs=CLOSE)


@pytest.mark.parametrize("seed", [7, 50])
def test_the_papers_problem_in_microseconds_is_solved_as_exactly(seed: int) -> None:
    """HiGHS 1.15: the absolute gap is 1e-6, which is a share of such a step: 0.8% of the optimum was lost, and called
    optimal."""
    paper = random_paper(seed)
    paper = replace(paper, forward_s=tuple(1e-6 * own for own in paper.forward_s))
    assert solve_milp(paper).seconds == pytest.approx(solve_brute_force(paper).seconds, rel=1e-9)


# The placement problem of real models, by the exact solver and by the MILP: the same optimum, with free and tight memory.

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


# The paper's formulation of real models on the DGX-1: its figures are the costs', and two solvers certify its optimum.


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


@pytest.mark.slow
def test_the_command_shows_the_paper_beside_the_placement_problem() -> None:
    arguments = ["plan", "mlp", "--on", "dgx1-v100-32gb", "--batch", "32", "--set", "cluster.devices=2", "--certify"]
    shown = CliRunner().invoke(build(), arguments)
    assert shown.exit_code == 0, shown.output
    assert "Certificate of the paper's formulation" in shown.stdout
    assert "both solvers prove the same answer" in shown.stdout


# Uneven stages against brute force.


def brute_force(times: list[list[float]], limits: list[int], stages: int) -> float:
    """The least slowest stage over all cuts; `times[stage][i]`, at most `limits[stage]` components per stage."""
    count = len(times[0])
    best = INFINITE
    for cuts in itertools.combinations(range(1, count), stages - 1):
        bounds = list(itertools.pairwise((0, *cuts, count)))
        if any(last - first > limits[stage] for stage, (first, last) in enumerate(bounds)):
            continue
        best = min(best, max(sum(times[stage][first:last]) for stage, (first, last) in enumerate(bounds)))
    return best


def table(count: int, stage_s: Callable[[int, int, int], float]) -> Callable[[int], NDArray[np.float64]]:
    """As `partition` asks for it: all runs of components of a stage at once."""
    return lambda stage: np.array(
        [[stage_s(stage, first, last) if first < last else INFINITE for first in range(count + 1)] for last in range(count + 1)]
    )


@settings(max_examples=60)
@given(data=st.data())
def test_equals_brute_force_with_unequal_devices_and_memory_limits(data: st.DataObject) -> None:
    check_against_brute_force(data)


@pytest.mark.slow
@settings(max_examples=500)
@given(data=st.data())
def test_equals_brute_force_on_many(data: st.DataObject) -> None:
    check_against_brute_force(data)


def check_against_brute_force(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    stages = data.draw(st.integers(1, count))
    times = [[data.draw(st.integers(0, 20)) / 4 for _ in range(count)] for _ in range(stages)]
    limits = [data.draw(st.integers(1, count)) for _ in range(stages)]

    def stage_s(stage: int, first: int, last: int) -> float:
        return sum(times[stage][first:last]) if last - first <= limits[stage] else INFINITE

    expected = brute_force(times, limits, stages)
    if expected == INFINITE:
        with pytest.raises(ScheduleError, match="memory"):
            partition(count, stages, table(count, stage_s), [0.0] * count)
        return
    bounds = partition(count, stages, table(count, stage_s), [0.0] * count)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))
    assert max(stage_s(stage, first, last) for stage, (first, last) in enumerate(bounds)) == expected


def test_equal_cuts_go_where_less_is_sent() -> None:
    """Four equal components in two stages of at most three: every cut but the middle is slower; ties go by transfer."""
    times = [1.0, 0.0, 0.0, 1.0]
    bounds = partition(4, 2, table(4, lambda _, first, last: sum(times[first:last])), [0.0, 5.0, 1.0, 5.0])
    assert bounds == ((0, 2), (2, 4))


def test_more_stages_than_components() -> None:
    with pytest.raises(ScheduleError, match="at most 2 stages"):
        partition(2, 3, table(2, lambda *_: 1.0), [0.0, 0.0])
