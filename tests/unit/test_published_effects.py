"""Effects of published runs: what they are estimated as, what an unseen source may err by, and how answers apply them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.published.fitting import PRIORS, SOURCE_SIGMA, Judged, covered, ends_of, fitted, held_out
from experiments.published.predict import Facts, Predicted
from experiments.published.rows import row_of
from parsim.app.load import fixed_plan, problem_of
from parsim.app.question import question_of
from parsim.costs.published import (
    NOISE,
    NOTHING_LEARNT,
    SHARE,
    Effects,
    PublishedRun,
    class_of,
    features_of,
    learnt_of,
)
from parsim.hardware.parts import shipped_gpus
from parsim.model.catalogue.frameworks import FRAMEWORKS
from parsim.predict.evaluate import evaluate
from parsim.predict.explain import explain_plan
from tests.published_row import row_with


def judged(name: str, source: str, ratio: float, run: PublishedRun) -> Judged:
    """A run that took `ratio` times what was predicted."""
    facts = Facts(model="gpt", gpus=8, tokens=1024, rate=False, run=run)
    predicted = Predicted(row=row_of(row_with(id=name)), why="", facts=facts, value=1.0)
    return Judged(predicted=predicted, log_error=-math.log(ratio), group="", source=source)


UNNAMED = PublishedRun(gpu="h100-sxm", precision="bf16")
HOPPER = replace(UNNAMED, framework="fsdp")


@pytest.mark.parametrize("rows", [1, 4, 50])
def test_one_source_shows_as_much_of_its_chip_as_its_rows_can(rows: int) -> None:
    """The best linear unbiased prediction of one of three effects: t^2 / (3 t^2 + s^2 + e^2 / n) of the mean of n rows."""
    seen = [judged(str(number), "a", 1.1, HOPPER) for number in range(rows)]
    effects = fitted([*seen, *(_far(number) for number in range(3))], [judged("guessed", "a", 1.1, UNNAMED)])
    chip, source, noise = PRIORS["chip"] ** 2, SOURCE_SIGMA**2, NOISE[class_of(HOPPER)] ** 2
    assert PRIORS["framework"] == PRIORS["chip"]
    assert effects.mean["chip:Hopper"] == pytest.approx(math.log(1.1) * chip / (3 * chip + source + noise / rows), rel=1e-9)


def _far(number: int) -> Judged:
    return judged(f"v{number}", f"other {number}", 1.0, replace(HOPPER, gpu="v100-sxm-32gb", framework="megatron"))


def test_boards_of_one_chip_share_what_was_learnt() -> None:
    rows = [judged(f"{source}{number}", source, 1.2, HOPPER) for source in "abcde" for number in range(5)]
    effects = fitted(rows, [judged("guessed", "a", 1.2, UNNAMED)])
    h200, b200 = (effects.of(replace(HOPPER, gpu=gpu)) for gpu in ("h200", "b200"))
    assert h200 == effects.of(HOPPER)
    assert h200[0] > 0.05
    assert 0.0 < b200[0] < h200[0]  # the framework's share of what they err by
    assert b200[1] > h200[1]


def test_a_source_is_judged_by_the_others() -> None:
    rows = [judged(f"{source}{number}", source, 1.2, HOPPER) for source in "abc" for number in range(8)]
    odd = [judged(f"odd{number}", "odd", 0.8, HOPPER) for number in range(8)]
    medians = held_out([*rows, *odd])
    assert all(medians[f"odd{number}"][0] > 0 for number in range(8))
    inside = covered([*rows, *odd], medians)
    assert not any(inside[f"odd{number}"][0] for number in range(8))


def test_a_guessed_framework_is_judged_by_what_known_ones_have_shown_elsewhere() -> None:
    rows = [judged(f"{source}{number}", source, 1.2, HOPPER) for source in "abc" for number in range(8)]
    guessed = [judged(f"a{number}", "a", 1.5, UNNAMED) for number in range(8)]
    medians = held_out(rows, guessed)
    assert medians.keys() == {f"a{number}" for number in range(8)}
    known = held_out(rows)
    assert 0.0 < medians["a0"][0] < known["a0"][0]  # nothing of a framework, nor of guessing: no other source was guessed
    assert medians["a0"][1] > known["a0"][1]
    effects = fitted(rows, guessed)
    fewer = fitted(rows, guessed[:1])
    for name in ("chip:Hopper", "framework:fsdp", "framework:fsdp now"):  # guesses show nothing of these
        assert effects.mean[name] == fewer.mean[name]
    assert effects.mean["guess:16 bits or more"] > fewer.mean["guess:16 bits or more"] > 0.0
    assert "guess:8 bits" not in effects.mean
    assert effects.ends[class_of(UNNAMED)] != effects.ends[class_of(HOPPER)]


@given(scores=st.lists(st.floats(-5, 5), min_size=1, max_size=60))
def test_ends_hold_their_share_of_the_rows(scores: list[float]) -> None:
    low, high = ends_of(np.array(scores), ["one"] * len(scores), SHARE)
    assert low < 0 < high
    assert sum(low <= score <= high for score in scores) >= SHARE * len(scores) - 1e-9


def test_effects_are_read_as_they_were_written() -> None:
    effects = fitted(
        *([judged(f"{number}", f"{number % 3}", 1.1 + 0.01 * number, run) for number in range(9)] for run in (HOPPER, UNNAMED))
    )
    again = Effects.from_dict(effects.to_dict())
    assert again.of(HOPPER) == pytest.approx(effects.of(HOPPER), abs=3e-4)
    assert again.ends.keys() == NOISE.keys()


@pytest.mark.parametrize("gpu", shipped_gpus())
def test_every_shipped_gpu_has_an_interval_for_every_framework(gpu: str) -> None:
    for framework in (*FRAMEWORKS, "unknown"):
        learnt = learnt_of(PublishedRun(gpu=gpu, precision="bf16", framework=framework))
        assert 0.7 < learnt.factor < 1.5
        assert learnt.low < 1 < learnt.high
        assert learnt.text


def test_what_no_run_has_shown_widens_the_interval() -> None:
    seen, unseen, unknown = (
        learnt_of(replace(HOPPER, framework=framework)) for framework in ("megatron", "maxtext", "unknown")
    )
    assert seen.high / seen.low < unseen.high / unseen.low < unknown.high / unknown.low
    mixture = replace(HOPPER, framework="megatron", experts=True)
    assert "kind:experts on Hopper" in features_of(mixture)
    assert class_of(mixture) == "experts"
    assert learnt_of(mixture).high > seen.high


SETTINGS = {"plan.strategy": "custom", "plan.mesh": {"dp": 8}, "plan.microbatches": 1, "plan.zero_stage": 1}


def asked(**settings: Any) -> Any:
    question = question_of("gpt3-125m", cluster="8xh100-sxm", global_batch=64, settings={**SETTINGS, **settings})
    problem = problem_of(question)
    plan = fixed_plan(problem, question)
    assert plan is not None
    return problem, plan


@pytest.mark.parametrize("framework", [{}, {"software.framework": "megatron"}])
def test_an_answer_applies_the_factor_to_every_price_and_shows_it(framework: dict[str, Any]) -> None:
    problem, plan = asked(**framework)
    learnt = problem.learnt
    assert learnt.factor != 1.0
    with_it, without = evaluate(problem, plan), evaluate(replace(problem, learnt=replace(learnt, factor=1.0)), plan)
    assert with_it.result.step_s.median == pytest.approx(learnt.factor * without.result.step_s.median, rel=1e-6)
    step = with_it.result.step_s
    assert (step.p05, step.p95) == pytest.approx((step.median * learnt.low, step.median * learnt.high))
    shown = [term for task in explain_plan(problem, with_it).tasks for term in task.terms if term.name == "published runs"]
    assert shown
    assert all(term.value == learnt.factor and "published runs" in term.detail for term in shown)


def test_measured_profiles_and_other_models_learn_nothing() -> None:
    measured = question_of("gpt3-125m", cluster="dgx1-v100-32gb", global_batch=64)
    images = question_of("resnet50", cluster="8xh100-sxm", global_batch=64)
    assert problem_of(measured).learnt == problem_of(images).learnt == NOTHING_LEARNT
