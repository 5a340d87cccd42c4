"""What `parsim plan` prints as adaptive is never slower than a row beside it, whatever the problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.constraints import PlanConstraints
from parsim.plans.plan import ZERO_STAGES
from parsim.predict.evaluate import evaluate
from parsim.predict.problem import PlanningProblem
from parsim.search.families import FAMILIES
from parsim.search.search import search
from parsim.search.space import BUCKET_BYTES
from tests.machines import PROFILES, machine
from tests.models import chain_model

EVERYTHING = (*FAMILIES, "adaptive")


PROBLEMS = given(
    flops=st.lists(st.sampled_from((1e7, 1e9, 8e9)), min_size=2, max_size=5),
    elements=st.sampled_from((10_000, 2_000_000, 9_000_000, 60_000_000)),
    profile=st.sampled_from(sorted(PROFILES)),
    devices=st.sampled_from((2, 4, 8)),
    memory_gib=st.sampled_from((None, None, 1, 2, 4)),
    batch=st.sampled_from((8, 32, 48, 256)),
    zero_stage=st.sampled_from((0, 1, 3, "auto")),
    top=st.sampled_from((None, 4)),
)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@PROBLEMS
def test_adaptive_is_never_predicted_slower_than_what_is_printed_beside_it(**problem: Any) -> None:
    assert_adaptive_first(**problem)


@pytest.mark.slow
def test_adaptive_is_never_slower_on_many_problems() -> None:
    """A third of the problems of before: those of eight devices take up to 15 CPU-seconds each."""
    rows: list[int] = []

    @settings(max_examples=20, deadline=None)
    @PROBLEMS
    def run(**problem: Any) -> None:
        rows.append(assert_adaptive_first(**problem))

    run()
    print(f"{len(rows)} problems, {sum(rows)} rows compared with adaptive's")
    assert sum(rows) > 20


def assert_adaptive_first(
    *,
    flops: list[float],
    elements: int,
    profile: str,
    devices: int,
    memory_gib: int | None,
    batch: int,
    zero_stage: int | Literal["auto"],
    top: int | None,
) -> int:
    """How many rows were compared with that of adaptive."""
    cluster = machine(devices, profile, **({} if memory_gib is None else {"memory_bytes": memory_gib * 2**30}))
    problem = PlanningProblem(
        model=chain_model(tuple(flops), elements=elements), cluster=cluster, global_batch=batch, zero_stage=zero_stage
    )
    found = search(problem, EVERYTHING, samples=0, top=top)
    printed = [entry.result for entry in found.candidates]
    adaptive = [entry for entry in printed if entry.strategy == "adaptive"]
    assert adaptive, "adaptive has a row"
    best = min(adaptive, key=lambda entry: (not entry.fits, entry.step_s.median))
    for other in printed:
        assert best.fits >= other.fits
        if other.fits == best.fits:
            assert best.step_s.median <= other.step_s.median
    if found.chosen is not None:
        assert found.chosen.result.step_s.median == best.step_s.median
    return len(printed) - len(adaptive)


@pytest.mark.slow
def test_adaptive_is_not_slower_than_a_family_that_is_asked_alone() -> None:
    """Late parts of mixed placements are many, and once left none for the buckets of data parallelism (870 us against 859)."""
    problem = PlanningProblem(
        model=load_model(ModelSpec(name="mlp"), granularity="block"),
        cluster=machine(2),
        global_batch=1024,
        zero_stage="auto",
    )
    steps = {}
    for asked in (EVERYTHING, ("dp",), ("mp",)):
        chosen = search(problem, asked, samples=0).chosen
        assert chosen is not None
        steps[asked] = chosen.result.step_s.median
    assert steps[EVERYTHING] <= min(steps.values())


def test_adaptive_is_not_beaten_by_any_bucket_size_or_zero_stage_of_data_parallelism() -> None:
    """60 million parameters per component: no bucket size holds the whole model."""
    model = chain_model((1e9, 1e9), elements=60_000_000)
    problem = PlanningProblem(model=model, cluster=machine(4), global_batch=64)
    plans = [plan for plan in FAMILIES["dp"](problem) if plan.mesh.dp == 4 and plan.microbatches == 1]
    assert {(plan.zero_stage, plan.bucket_bytes) for plan in plans} == {
        (stage, size) for stage in ZERO_STAGES for size in BUCKET_BYTES
    }
    best = min(evaluate(problem, plan, samples=0).result.step_s.median for plan in plans)
    chosen = search(problem, ("adaptive",), samples=0).chosen
    assert chosen is not None
    assert chosen.result.step_s.median <= best * (1 + 1e-12)


def test_two_families_that_meet_in_one_program_share_its_figures() -> None:
    """Large batches on few parameters: the best placement of every component is data parallelism."""
    model = chain_model((8e9, 8e9, 8e9), elements=2_000_000)
    one_bucket_size = PlanConstraints(bucket_bytes=BUCKET_BYTES[0])  # else a simpler tie takes the row of dp
    problem = PlanningProblem(model=model, cluster=machine(4), global_batch=256, zero_stage=0, constraints=one_bucket_size)
    rows = {entry.result.strategy: entry.result for entry in search(problem, EVERYTHING, samples=20).candidates}
    assert rows["adaptive"].plan == replace(rows["dp"].plan, strategy="adaptive")
    assert rows["adaptive"].step_s == rows["dp"].step_s
    assert rows["adaptive"].reason == "the same plan as dp"
