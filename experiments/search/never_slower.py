"""The choice is never slower than anything that could be asked for: families, rows beside it, plans by hand, every plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from experiments.search.asking import CLOSE, answered, best_s, chosen_of
from experiments.search.enumeration import ORDERS, Space, cuts, exhaustive, meshes, placements, plan_of
from experiments.search.problems import ProblemDraw
from parsim.errors import CostError, PlanError, ScheduleError
from parsim.plans.constraints import PlanConstraints
from parsim.plans.plan import FULL, NONE, Plan
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.families import FAMILIES
from parsim.search.space import BUCKET_BYTES

SPACES = (Space(zero_stages=(0, 1, 2, 3), recompute=True, any_buckets=False), Space(zero_stages=(0, 1, 2, 3)))
"""What is enumerated beside meshes, cuts, orders, microbatches and placements: recomputed sets, or bucket sizes."""

BY_HAND = 24
"""Plans drawn for one problem, of which those that are possible are judged."""


def no_family_is_faster(draw: ProblemDraw, random: Random) -> int:
    """Each family asked for alone, as it is printed."""
    best, compared = best_s(draw.problem()), 0
    for name in FAMILIES:
        try:
            alone = answered(draw.problem(), (name,))
        except ScheduleError:  # the family has no member
            continue
        if alone.chosen is not None:
            compared += 1
            assert best <= alone.chosen.result.step_s.median * (1 + CLOSE), name
    return compared


def no_row_beside_it_is_faster(draw: ProblemDraw, random: Random) -> int:
    """All strategies in one table, the best of each or the best few plans: the choice is the first row."""
    top = random.choice((None, 2, 5))
    found = answered(draw.problem(), (*FAMILIES, "adaptive"), top=top)
    rows = [entry.result for entry in found.candidates]
    first = next((row for row in rows if row.strategy == "adaptive" or draw.problem().cluster.size == 1), None)
    assert first is not None, "adaptive has no row"
    for row in rows:
        assert first.fits >= row.fits, row.strategy
        if first.fits and row.fits:
            assert first.step_s.median <= row.step_s.median, f"{row.strategy}, top {top}"
    if found.chosen is None:
        assert not any(row.fits for row in rows)
        return 0
    assert found.chosen.result.step_s.median == first.step_s.median
    alone = best_s(draw.problem())
    assert first.step_s.median <= alone * (1 + CLOSE), f"asked for alone adaptive takes {alone}, in the table {first.step_s}"
    return len(rows)


def no_plan_by_hand_is_faster(draw: ProblemDraw, random: Random) -> int:
    """Random meshes, orders, chunks, cuts, microbatches, placements, ZeRO stages, recomputed sets and bucket sizes."""
    problem = draw.problem()
    best, compared = best_s(problem), 0
    for plan in by_hand(problem, random):
        result = evaluate(problem, plan, samples=0, fold=random.random() < 0.5).result
        if result.fits:
            compared += 1
            faster = f"{plan.summary()} takes {result.step_s.median}, the choice {best}"
            assert best <= result.step_s.median * (1 + CLOSE), faster
    return compared


def by_hand(problem: PlanningProblem, random: Random) -> Iterator[Plan]:
    """Random plans of a problem."""
    components = problem.model.components
    for _ in range(BY_HAND):
        size = random.randint(1, problem.cluster.size)
        mesh = random.choice(list(meshes(size)))
        order, chunks = random.choice(ORDERS if mesh.pp > 1 else ORDERS[:1])
        if problem.global_batch % mesh.dp or mesh.pp * chunks > len(components):
            continue
        replica = problem.global_batch // mesh.dp
        microbatches = random.choice([count for count in range(1, replica + 1) if replica % count == 0])
        bounds = random.choice(list(cuts(len(components), mesh.pp * chunks)))
        chosen = [random.choice(placements(component, mesh.tp)) for component in components]
        outline = plan_of(problem, mesh, order, chunks, bounds, microbatches, chosen)
        if outline is not None:
            yield _filled(problem, outline, random)


def _filled(problem: PlanningProblem, outline: Plan, random: Random) -> Plan:
    """With a ZeRO stage, buckets, and where memory is short or ZeRO 2 sums after each microbatch a recomputed set."""
    stage = random.choice((0, 1, 2, 3))
    plan = replace(outline, zero_stage=stage, bucket_bytes=random.choice(BUCKET_BYTES))
    names = sorted(problem.model.differentiable_components)
    some = tuple(name for name in plan.components if name in names and random.random() < 0.5)
    return replace(plan, recompute=random.choice((NONE, FULL, some or NONE)))


def a_constraint_is_never_faster(draw: ProblemDraw, random: Random) -> int:
    """Every key of [plan] in turn, with a value that the free answer might have had; and all that the choice has."""
    free = chosen_of(draw.problem())
    best = float("inf") if free is None else free.result.step_s.median
    compared = 0
    for keys in _some_constraints(draw.problem(), random):
        try:
            found = chosen_of(replace(draw.problem(), **keys))
        except (ScheduleError, PlanError, CostError):  # no plan keeps it
            continue
        if found is not None:
            compared += 1
            plan = found.result.plan
            assert best <= found.result.step_s.median * (1 + CLOSE), f"{keys}: {plan.summary()}"
            assert _keeps(plan, keys), f"{keys}: {plan.summary()}"
    if free is not None:
        compared += 1
        keys = _constraints_of(free.result.plan)
        try:
            again = best_s(replace(draw.problem(), **keys))
        except ScheduleError as error:
            raise AssertionError(f"{free.result.plan.summary()} asked for by its own keys: {error}") from error
        assert abs(again - best) <= CLOSE * best, f"the choice takes {best}, asked for by its own keys {again}: {keys}"
    return compared


def _some_constraints(problem: PlanningProblem, random: Random) -> list[dict[str, object]]:
    size, batch = problem.cluster.size, problem.global_batch
    every: list[dict[str, object]] = [
        {"zero_stage": random.choice((0, 1, 2, 3))},
        {"recompute": random.choice((NONE, FULL))},
        {"constraints": PlanConstraints(pp=random.randint(1, size))},
        {"constraints": PlanConstraints(dp=random.randint(1, size))},
        {"constraints": PlanConstraints(tp=random.randint(1, size))},
        {"constraints": PlanConstraints(microbatches=random.randint(1, batch))},
        {"constraints": PlanConstraints(bucket_bytes=random.choice(BUCKET_BYTES))},
        {"constraints": PlanConstraints(pipeline_order=random.choice(("1f1b", "gpipe", "interleaved")))},
    ]
    return random.sample(every, 3)


def _constraints_of(plan: Plan) -> dict[str, object]:
    """All that a plan has, as keys of a question; its placements and cuts apart.

    A tp that is given asks for shards of all that can be cut, so it is left free where the plan has a tp axis.
    """
    mesh, tp = plan.mesh, 1 if plan.mesh.tp == 1 else None
    pipeline = {"pipeline_order": plan.pipeline_order, "chunks": plan.chunks} if mesh.pp > 1 else {}
    asked = PlanConstraints(
        pp=mesh.pp, dp=mesh.dp, tp=tp, microbatches=plan.microbatches, bucket_bytes=plan.bucket_bytes, **pipeline
    )
    return {"zero_stage": plan.zero_stage, "recompute": plan.recompute, "constraints": asked}


def _keeps(plan: Plan, keys: dict[str, object]) -> bool:
    asked = keys.get("constraints")
    if isinstance(asked, PlanConstraints):
        given = (asked.microbatches, plan.microbatches), (asked.pipeline_order, plan.pipeline_order)
        return asked.allow(plan.mesh) and all(wanted in (None, own) for wanted, own in given)
    if "zero_stage" in keys:
        return plan.zero_stage == keys["zero_stage"]
    return plan.recompute == keys["recompute"]


def enumeration_finds_nothing_faster(draw: ProblemDraw, random: Random) -> int:
    """Every plan of a tiny problem, with all ZeRO stages, and with recomputed sets or bucket sizes."""
    problem = small(draw).problem()
    best = best_s(problem)
    found = exhaustive(problem, random.choice(SPACES), known_s=best)
    assert best <= found.seconds * (1 + CLOSE), f"{best} against {found.seconds}: {found.best and found.best.summary()}"
    return found.outlines if best < float("inf") else 0


def small(draw: ProblemDraw) -> ProblemDraw:
    """At most two components before the loss, and two devices or three with one component: some hundred plans."""
    devices = 3 if len(draw.model.flop) == 1 and draw.global_batch % 3 == 0 else 2
    count = min(2, len(draw.model.flop))
    model = replace(
        draw.model,
        **{name: getattr(draw.model, name)[:count] for name in ("flop", "elements", "width", "saved_bytes", "cut")},
        skips=(),
        tied=tuple(number for number in draw.model.tied if number < count),
    )
    cluster = draw.cluster
    most = devices if cluster.nodes == 1 else 1
    kept = replace(cluster, kinds=cluster.kinds[:most])
    return replace(draw, model=model, cluster=kept, global_batch=min(draw.global_batch, 3 * devices - 2 * (devices == 2)))
