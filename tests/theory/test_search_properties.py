"""Properties of the search that a user calls, over random models, clusters and batches.

Theorems, and why they hold. Prices of the drawn machines are rooflines and ring formulas, so the price of every task falls,
or stays, as a rate rises. Resources serve their tasks in a fixed issue order, and overlap slows nothing on these machines. So
the step of any one plan is a longest path, and falls with every price. Memory changes no price. Hence the best plan of a fixed
set gets no slower with more memory or with faster devices or links. List scheduling would break this (Graham's anomalies);
issue order does not. With a measured overlap factor it is no theorem.

A search that leaves plans out by an inexact rule can break each of these properties, although no plan does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st

from experiments.search_exhaustive.enumeration import Space, any_fits, exhaustive
from experiments.search_exhaustive.problems import (
    GIB,
    ProblemDraw,
    built_cluster,
    built_model,
    built_profile,
    random_problem,
    with_memory,
)
from parsim.errors import PlanError, ScheduleError
from parsim.hardware.cluster import cluster_from_profile
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.predict.evaluate import Evaluation, evaluate
from parsim.predict.planning_problem import PlanningProblem
from parsim.schedule.by_hand import custom_plan
from parsim.schedule.families import FAMILIES
from parsim.schedule.search import search

CLOSE = 1e-9
QUICK, MANY = 2, 200
"""Examples of each property: in the tests at every change, and in the slow ones."""

EVERYTHING = Space(zero_stages=(0, 1, 2, 3), recompute=True, any_buckets=False)

Check = Callable[[ProblemDraw, Random], None]


def sometimes(check: Check) -> Check:
    """A few small examples."""
    return _given(check, QUICK, most_devices=3, most_components=2, batches=(4, 6))


def often(check: Check) -> Check:
    """Many examples: for the slow tests."""
    return _given(check, MANY, most_devices=4, most_components=3, batches=(4, 6, 8, 16))


def _given(check: Check, examples: int, *, most_devices: int, most_components: int, batches: tuple[int, ...]) -> Check:
    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a draw is small as it is, and shrinking it takes minutes
    )
    @given(random=st.randoms(use_true_random=False))
    def run(random: Random) -> None:
        draw = random_problem(random, most_devices=most_devices, most_components=most_components, batches=batches)
        note(f"{draw}")
        check(draw, random)

    return run  # type: ignore[return-value]


def asked(draw: ProblemDraw, **constraints: object) -> PlanningProblem:
    """ZeRO stages, recomputation, buckets and all else are free, unless a test asks for some."""
    return draw.problem(**constraints)


def best_s(problem: PlanningProblem) -> float:
    """The step of what is chosen; infinite where nothing fits."""
    chosen = chosen_of(problem)
    return float("inf") if chosen is None else chosen.result.step_s.median


def chosen_of(problem: PlanningProblem) -> Evaluation | None:
    return search(problem, ("adaptive",), samples=0).chosen


# --- never slower than what a user can ask for ------------------------------------------------------------------------


def no_family_is_faster(draw: ProblemDraw, random: Random) -> None:
    """Each family asked for alone, as it is printed."""
    best = best_s(asked(draw))
    for name in FAMILIES:
        try:
            alone = search(asked(draw), (name,), samples=0)
        except ScheduleError:  # the family has no member
            continue
        if alone.chosen is not None:
            assert best <= alone.chosen.result.step_s.median * (1 + CLOSE), name


def no_plan_by_hand_is_faster(draw: ProblemDraw, random: Random) -> None:
    """Meshes over all devices with every count of microbatches, as `strategy = "custom"` makes them."""
    problem = asked(draw)
    best, size = best_s(problem), problem.cluster.size
    for _ in range(6):
        pp = random.choice([count for count in range(1, size + 1) if size % count == 0])
        mesh = Mesh(pp=pp, dp=size // pp)
        if draw.global_batch % mesh.dp:
            continue
        replica = draw.global_batch // mesh.dp
        count = random.choice([count for count in range(1, replica + 1) if replica % count == 0])
        try:
            plan = custom_plan(problem, mesh, microbatches=count, pipeline_order=random.choice(("1f1b", "gpipe")))
        except (PlanError, ScheduleError):
            continue
        result = evaluate(problem, plan, samples=0).result
        if result.fits:
            assert best <= result.step_s.median * (1 + CLOSE), plan.summary()


# --- more of anything never hurts -------------------------------------------------------------------------------------


def more_memory_is_never_slower(draw: ProblemDraw, random: Random) -> None:
    factor = random.choice((1.001, 1.1, 1.5, 4.0))
    more = tuple(int(factor * size) for size in draw.cluster.memory_bytes)
    assert best_s(asked(_on(draw, memory_bytes=more))) <= best_s(asked(draw)) * (1 + CLOSE)


def faster_links_are_never_slower(draw: ProblemDraw, random: Random) -> None:
    factor, before = random.choice((1.01, 1.3, 3.0, 30.0)), best_s(asked(draw))
    assert best_s(asked(_on(draw, link_bandwidth=factor * draw.cluster.link_bandwidth))) <= before * (1 + CLOSE)
    assert best_s(asked(_on(draw, link_latency_s=draw.cluster.link_latency_s / factor))) <= before * (1 + CLOSE)


def faster_devices_are_never_slower(draw: ProblemDraw, random: Random) -> None:
    """All of them, or those of one type."""
    factor, before, cluster = random.choice((1.01, 1.3, 3.0, 30.0)), best_s(asked(draw)), draw.cluster
    faster = (factor * cluster.peak_flop_per_s[0], random.choice((1.0, factor)) * cluster.peak_flop_per_s[1])
    assert best_s(asked(_on(draw, peak_flop_per_s=faster))) <= before * (1 + CLOSE)
    wider = tuple(factor * rate for rate in cluster.memory_bandwidth)
    assert best_s(asked(_on(draw, memory_bandwidth=wider))) <= before * (1 + CLOSE)


def an_idle_device_is_never_slower(draw: ProblemDraw, random: Random) -> None:
    """One more at the end, like the last one; "sockets" would move devices to another switch."""
    assume(draw.cluster.nodes == 1 and draw.cluster.wiring != "sockets")
    more = _on(draw, kinds=(*draw.cluster.kinds, draw.cluster.kinds[-1]))
    assert best_s(asked(more)) <= best_s(asked(draw)) * (1 + CLOSE)


def _on(draw: ProblemDraw, **changes: object) -> ProblemDraw:
    return replace(draw, cluster=replace(draw.cluster, **changes))  # type: ignore[arg-type]


# --- what must not matter ---------------------------------------------------------------------------------------------


def names_do_not_matter(draw: ProblemDraw, random: Random) -> None:
    """Of components, device types and links."""
    problem, cluster = asked(draw), draw.cluster
    names = tuple(random.sample(["zeta", "mid", "a0", "loss_like", "b.1", "c"], len(draw.model.flop)))
    renamed = replace(problem, model=built_model(draw.model, names=names))
    swapped = replace(
        cluster,
        kinds=tuple(1 - kind for kind in cluster.kinds),
        peak_flop_per_s=cluster.peak_flop_per_s[::-1],
        memory_bandwidth=cluster.memory_bandwidth[::-1],
        memory_bytes=cluster.memory_bytes[::-1],
    )
    expected = best_s(problem)
    for other in (renamed, replace(problem, cluster=built_cluster(swapped))):
        assert best_s(other) == pytest.approx(expected, rel=CLOSE)


def the_order_of_equal_devices_does_not_matter(draw: ProblemDraw, random: Random) -> None:
    """On one switch, or where every pair has a link of its own, devices of one type are interchangeable."""
    cluster = draw.cluster
    assume(cluster.nodes == 1 and cluster.wiring != "sockets" and len(cluster.kinds) > 1)
    order = list(range(len(cluster.kinds)))
    for kind in (0, 1):
        places = [place for place, own in enumerate(cluster.kinds) if own == kind]
        for place, device in zip(places, random.sample(places, len(places)), strict=True):
            order[place] = device
    problem = asked(draw)
    permuted = replace(problem, cluster=cluster_from_profile(built_profile(cluster), order))
    assert best_s(permuted) == pytest.approx(best_s(problem), rel=CLOSE)


def all_costs_scale_the_answer(draw: ProblemDraw, random: Random) -> None:
    """By a power of two, which floating-point numbers carry exactly: the same plan, so many times as slow."""
    assume(draw.cluster.nodes == 1)  # the shipped networks have their own rates
    factor, cluster = random.choice((0.25, 4.0, 64.0)), draw.cluster
    slower = _on(
        draw,
        peak_flop_per_s=tuple(rate / factor for rate in cluster.peak_flop_per_s),
        memory_bandwidth=tuple(rate / factor for rate in cluster.memory_bandwidth),
        link_bandwidth=cluster.link_bandwidth / factor,
        link_latency_s=cluster.link_latency_s * factor,
    )
    one, other = chosen_of(asked(draw)), chosen_of(asked(slower))
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert other.result.step_s.median == pytest.approx(factor * one.result.step_s.median, rel=CLOSE)
        assert other.result.plan == one.result.plan


# --- what is said is so -----------------------------------------------------------------------------------------------


def what_is_printed_is_what_was_judged(draw: ProblemDraw, random: Random) -> None:
    """Every candidate, read back from its JSON and simulated anew by a problem that remembers nothing."""
    found = search(asked(draw), samples=20)
    for entry in found.candidates:
        printed = entry.result.to_dict()
        plan = Plan.from_json(json.dumps(printed["plan"]))
        again = evaluate(asked(draw), plan, samples=20, fold=True).result.to_dict()
        for key in ("step_s", "throughput_samples_per_s", "peak_memory_bytes", "fits", "fit_probability", "plan"):
            assert again[key] == printed[key], key
        unfolded = evaluate(asked(draw), plan, samples=0, fold=False).result
        assert unfolded.step_s.median == pytest.approx(printed["step_s"]["median"], rel=CLOSE)
    if found.chosen is not None:
        assert found.chosen.result.fits
        assert found.to_dict()["chosen"]["plan"]["stages"] == found.chosen.result.plan.to_dict()["stages"]


def the_same_question_has_the_same_answer(draw: ProblemDraw, random: Random) -> None:
    first, second = (json.dumps(search(asked(draw), samples=20).to_dict()) for _ in range(2))
    assert first == second


def infeasible_exactly_where_no_plan_fits(draw: ProblemDraw, random: Random) -> None:
    """Against every plan of the space, with memory that is short."""
    tiny = replace(draw, global_batch=min(draw.global_batch, 6))
    tight = with_memory(tiny, random.choice((0.7, 0.35, 0.2, 0.1)))
    if random.random() < 0.5:
        memory = tuple(max(1, size - GIB // 2) for size in tight.cluster.memory_bytes)
        tight = _on(tight, memory_bytes=memory)
    problem = asked(_small(tight))
    fitting = any_fits(problem, EVERYTHING)
    chosen = chosen_of(problem)
    assert (chosen is None) == (fitting is None), fitting and fitting.summary()


def the_exhaustive_search_finds_nothing_faster(draw: ProblemDraw, random: Random) -> None:
    problem = asked(_small(draw))
    best = best_s(problem)
    found = exhaustive(problem, EVERYTHING, known_s=best)
    assert best <= found.seconds * (1 + CLOSE), found.best and found.best.summary()


def _small(draw: ProblemDraw) -> ProblemDraw:
    """At most two components before the loss, and two devices: some hundred plans."""
    count = min(2, len(draw.model.flop))
    model = replace(
        draw.model,
        **{name: getattr(draw.model, name)[:count] for name in ("flop", "elements", "width", "saved_bytes", "cut")},
        skips=(),
        tied=tuple(number for number in draw.model.tied if number < count),
    )
    cluster = draw.cluster
    most = 2 if cluster.nodes == 1 else 1
    return replace(
        draw, model=model, cluster=replace(cluster, kinds=cluster.kinds[:most]), global_batch=min(draw.global_batch, 4)
    )


PROPERTIES: dict[str, Check] = {
    check.__name__: check
    for check in (
        no_family_is_faster,
        no_plan_by_hand_is_faster,
        more_memory_is_never_slower,
        faster_links_are_never_slower,
        faster_devices_are_never_slower,
        an_idle_device_is_never_slower,
        names_do_not_matter,
        the_order_of_equal_devices_does_not_matter,
        all_costs_scale_the_answer,
        what_is_printed_is_what_was_judged,
        the_same_question_has_the_same_answer,
        infeasible_exactly_where_no_plan_fits,
        the_exhaustive_search_finds_nothing_faster,
    )
}


@pytest.mark.parametrize("name", list(PROPERTIES))
def test_property(name: str) -> None:
    sometimes(PROPERTIES[name])()  # type: ignore[call-arg]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PROPERTIES))
def test_property_on_many_problems(name: str) -> None:
    often(PROPERTIES[name])()  # type: ignore[call-arg]
