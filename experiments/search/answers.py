"""What is said is so: printed figures, the user's functions, "infeasible", the certificate of the paper's formulation."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from random import Random

import parsim
from experiments.search.asking import CLOSE, SEEN, answered, chosen_of, on
from experiments.search.enumeration import Space, any_fits
from experiments.search.never_slower import small
from experiments.search.problems import GIB, ProblemDraw, with_memory
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.catalogue.zoo import load_preset
from parsim.model.formats import Numerics
from parsim.model.model import Model
from parsim.plans.plan import Plan
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.placement.certificate import paper_certificate, paper_problem_of
from parsim.search.placement.problem import fits, step_s
from parsim.search.search import is_tie, search

ANY_FIT = Space(zero_stages=(0, 1, 2, 3), recompute=True, any_buckets=False)

PRINTED = ("step_s", "throughput_samples_per_s", "peak_memory_bytes", "fits", "fit_probability", "plan")

MODELS = ("mlp", "resnet_small", "vit_small", "gpt_small", "bert_small", "resnet50", "vit_b_16")
PROFILES = ("dgx1-v100-32gb", "pcie-8xv100")

MOST_ENUMERATED = 4096
"""Joint choices of the paper's problem that are all tried, beside its two solvers."""


def what_is_printed_is_what_was_judged(draw: ProblemDraw, random: Random) -> int:
    """Every candidate, read back from its JSON and simulated anew by a problem that remembers nothing."""
    problem = draw.problem()
    found = search(problem, samples=20)
    seen = SEEN.get()
    if seen is not None:
        seen.add(problem, found)
    for entry in found.candidates:
        printed = entry.result.to_dict()
        plan = Plan.from_json(json.dumps(printed["plan"]))
        again = evaluate(draw.problem(), plan, samples=20, fold=True).result.to_dict()
        for key in PRINTED:
            assert again[key] == printed[key], f"{key}: {again[key]}, printed {printed[key]}"
        unfolded = evaluate(draw.problem(), plan, samples=0, fold=False).result.step_s.median
        assert abs(unfolded - printed["step_s"]["median"]) <= CLOSE * unfolded, f"unfolded {unfolded}"
    document = found.to_dict()
    for name, evaluation in (("fastest", found.chosen), ("chosen", found.recommended)):
        if evaluation is not None:
            assert evaluation.result.fits
            assert document[name]["plan"]["stages"] == evaluation.result.plan.to_dict()["stages"]
    return len(found.candidates)


def what_the_user_is_told_is_what_was_chosen(draw: ProblemDraw, random: Random) -> int:
    """`parsim.plan` tells the search's recommendation, and as the fastest the first row of its table; the two tie."""
    problem = draw.problem()
    asked = {"cluster": problem.cluster, "global_batch": problem.global_batch, "optimizer": problem.numerics.optimizer}
    answer = parsim.plan(problem.model, strategy="adaptive", **asked)
    found = answered(problem)
    assert answer.fits == (found.recommended is not None) == (found.chosen is not None)
    if found.recommended is None or found.chosen is None:
        assert answer.status == "infeasible"
        return 1
    told, fastest = (answer.to_dict()[name] for name in ("chosen", "fastest"))
    recommended = found.recommended.result
    assert told["plan"] == recommended.plan.to_dict(), f"{told['plan']}, recommended {recommended.plan.summary()}"
    assert told["step_s"]["median"] == recommended.step_s.median
    assert fastest["step_s"]["median"] == found.chosen.result.step_s.median
    assert is_tie(told["step_s"]["median"], fastest["step_s"]["median"])
    return 4


def infeasible_exactly_where_no_plan_fits(draw: ProblemDraw, random: Random) -> int:
    """Against every plan of the space, with memory that is short."""
    tight = with_memory(replace(draw, global_batch=min(draw.global_batch, 6)), random.choice((0.7, 0.35, 0.2, 0.1)))
    if random.random() < 0.5:
        memory = tuple(max(1, size - GIB // 2) for size in tight.cluster.memory_bytes)
        tight = on(tight, memory_bytes=memory)
    problem = small(tight).problem()
    fitting = any_fits(problem, ANY_FIT)
    chosen = chosen_of(problem)
    assert (chosen is None) == (fitting is None), f"the search says {chosen and 'it fits'}, {fitting and fitting.summary()}"
    return 1


def the_papers_optimum_is_certified(draw: ProblemDraw, random: Random) -> int:
    """Reading R of a drawn model and cluster: two solvers, every joint choice, and no uniform choice that fits is faster."""
    return _certified(draw.problem(zero_stage=0, recompute="none"), random)


def the_papers_optimum_of_real_models_is_certified(draw: ProblemDraw, random: Random) -> int:
    """The same of shipped models on a shipped machine, with less or more memory."""
    model, devices = _preset(random.choice(MODELS)), random.choice((1, 2, 4, 8))
    cluster = cluster_from_profile(load_profile(random.choice(PROFILES)), devices)
    memory = int(random.choice((0.25, 0.5, 1, 2, 4, 32)) * GIB)
    few = tuple(replace(each, type=replace(each.type, memory_bytes=memory)) for each in cluster.devices)
    batch = devices * random.choice((1, 4, 32))
    problem = PlanningProblem(
        model=model, cluster=replace(cluster, devices=few), global_batch=batch, numerics=Numerics(optimizer=draw.optimizer)
    )
    return _certified(problem, random)


@cache
def _preset(name: str) -> Model:
    return load_preset(name, "block")


def _certified(problem: PlanningProblem, random: Random) -> int:
    """Compare both solvers, and brute force where there are few choices. 0 where the labels are too many to prove anything."""
    parts = [count for count in range(1, problem.global_batch + 1) if problem.global_batch % count == 0]
    microbatches = random.choice(parts[:3])
    found = paper_certificate(problem, microbatches=microbatches)
    assert found["verdict"] != "disagree", found
    paper = paper_problem_of(problem, microbatches=microbatches)
    best_s, compared = found["milp"]["seconds"], int(found["verdict"] == "agree")
    feasible = found["milp"]["status"] != "infeasible"
    if prod(map(len, paper.options)) <= MOST_ENUMERATED:
        fitting = [choice for choice in product(*(range(len(own)) for own in paper.options)) if fits(paper, choice)]
        assert bool(fitting) == feasible, f"enumeration: {len(fitting)} choices fit, MILP: {found['milp']['status']}"
        if feasible:
            oracle_s = min(step_s(paper, choice) for choice in fitting)
            assert abs(oracle_s - best_s) <= 1e-6 * best_s, f"enumeration: {oracle_s}, MILP: {best_s}"
        compared += 1
    texts = [[str(option) for option in options] for options in paper.options]
    for wish in set(texts[0]):
        if all(wish in options for options in texts):
            choice = tuple(options.index(wish) for options in texts)
            if fits(paper, choice):
                assert feasible, f"{wish} fits"
                assert best_s <= step_s(paper, choice) * (1 + 1e-6), f"{wish} is faster"
                compared += 1
    return compared
