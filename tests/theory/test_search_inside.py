"""Divided sequences and experts in a search: no choice of cp and ep that is asked for beats the answer that is free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parsim.errors import PlanError, ScheduleError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.divided import divided_model, experts_of, tokens_of
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.constraints import PlanConstraints
from parsim.plans.mesh import Mesh
from parsim.predict.problem import PlanningProblem
from parsim.search import space
from parsim.search.search import search
from parsim.search.space import divided_problems
from parsim.search.tensor import best_placement
from tests.machines import machine

SIZES = {"hidden": 256, "layers": 2, "seq": 4096, "experts": 4, "expert_ffn": 8192, "vocab": 1024}


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "FEWEST_TOKENS", 2048)


def mixture(**sizes: int) -> Model:
    args = tuple(sorted({**SIZES, **sizes}.items()))
    return load_model(ModelSpec(name="mixtral-8x7b", args=args), granularity="block")


def asked(memory_bytes: int = 32 * 2**30, **constraints: int) -> PlanningProblem:
    return PlanningProblem(
        model=mixture(),
        cluster=machine(4, memory_bytes=memory_bytes),
        global_batch=8,
        numerics=Numerics(precision="amp_fp16", optimizer="adam"),
        constraints=PlanConstraints(**constraints),
        inner_axes=True,
    )


def test_what_can_be_divided_is_read_off_the_model() -> None:
    assert (tokens_of(mixture()), experts_of(mixture())) == (4096, 4)
    dense = load_model(ModelSpec(name="llama3-8b", args=(("layers", 1), ("seq", 4096))), granularity="block")
    assert (tokens_of(dense), experts_of(dense)) == (4096, 1)


def test_experts_that_tokens_do_not_visit_equally_often_are_divided_too() -> None:
    odd = mixture(experts=6, active=2, seq=4096)  # 1365.3 visits of an expert
    made = divided_model(odd, cp=2, ep=2, element_bytes=2)
    (whole,), (part,) = ([o for o in m.components[1].operators if dict(o.shape).get("problems")][:1] for m in (odd, made))
    assert dict(part.shape)["problems"] == 3
    assert part.forward_flop == pytest.approx(whole.forward_flop / 2, rel=0.1)
    assert len(divided_problems(replace(asked(), model=odd))) == 5  # ep = 6 is more than the devices


def test_choices_are_those_that_divide_and_that_the_question_leaves_open() -> None:
    def choices(problem: PlanningProblem) -> list[tuple[int, int]]:
        return [(part.division.cp, part.division.ep) for part in divided_problems(problem) if part.division]

    assert choices(asked()) == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)]
    assert choices(asked(cp=1)) == [(1, 1), (1, 2), (1, 4)]
    assert choices(asked(ep=4)) == [(1, 4), (2, 4)]
    assert choices(replace(asked(), inner_axes=False)) == []  # one problem, as it is


def test_a_model_that_no_choice_can_divide_is_refused_with_the_reason() -> None:
    dense = load_model(ModelSpec(name="llama3-8b", args=(("layers", 1), ("seq", 4096))), granularity="block")
    with pytest.raises(PlanError, match=r"mesh\.ep = 2.*has no experts.*use ep = 1"):
        divided_problems(replace(asked(ep=2), model=dense))  # cp is free: no single choice is refused


@pytest.mark.parametrize(("strategy", "gib"), [("dp", 2), pytest.param("hp", 3, marks=pytest.mark.slow)])
def test_the_free_answer_is_the_best_of_those_asked_for_one_by_one(strategy: str, gib: int) -> None:
    def best(**constraints: int) -> tuple[float, Mesh | None]:
        problem = replace(asked(gib * 2**30, **constraints), zero_stage=0)
        try:
            chosen = search(problem, (strategy,), samples=0).chosen
        except ScheduleError:  # no such mesh
            chosen = None
        return (float("inf"), None) if chosen is None else (chosen.result.step_s.median, chosen.result.plan.mesh)

    free_s, mesh = best()
    each = [best(cp=cp, ep=ep) for cp in (1, 2) for ep in (1, 2, 4)]
    assert free_s == min(step_s for step_s, _ in each) < float("inf")
    assert mesh is not None
    assert mesh.ep > 1
    assert each[0][0] > free_s


def test_experts_are_divided_where_they_do_not_fit_whole() -> None:
    problem = replace(asked(2 * 2**30, cp=1, ep=1), zero_stage=0)
    assert search(problem, ("dp",), samples=0).chosen is None


def test_placements_are_sought_within_memory_beside_pieces_of_the_sequence() -> None:
    """What fits by its parts and not as a whole; each of the cp pieces has a copy of every tp shard."""
    mesh = Mesh(cp=2, tp=2)
    assert best_placement(asked(3 * 2**30).on(mesh), 1, mesh, zero_stage=0).placements is not None


LISTED = {
    (8, 1, 1): "1x1x8 1x2x4 1x4x2 1x8x1 2x1x4 2x2x2 2x4x1 4x1x2 4x2x1 8x1x1",
    (8, 1, 2): "1x2x4 1x4x2 1x8x1 2x2x2 2x4x1 4x2x1",
    (8, 1, 4): "1x4x2 1x8x1 2x4x1",
    (8, 2, 1): "1x1x4 1x2x2 1x4x1 2x1x2 2x2x1 4x1x1",
    (8, 2, 2): "1x1x4 1x2x2 1x4x1 2x1x2 2x2x1 4x1x1",
    (8, 2, 4): "1x2x2 1x4x1 2x2x1",
    (
        12,
        1,
        1,
    ): "1x1x12 1x2x6 1x3x4 1x4x3 1x6x2 1x12x1 2x1x6 2x2x3 2x3x2 2x6x1 3x1x4 3x2x2 3x4x1 4x1x3 4x3x1 6x1x2 6x2x1 12x1x1",
    (12, 1, 2): "1x2x6 1x4x3 1x6x2 1x12x1 2x2x3 2x6x1 3x2x2 3x4x1 6x2x1",
    (12, 1, 4): "1x4x3 1x12x1 3x4x1",
    (12, 2, 1): "1x1x6 1x2x3 1x3x2 1x6x1 2x1x3 2x3x1 3x1x2 3x2x1 6x1x1",
    (12, 2, 2): "1x1x6 1x2x3 1x3x2 1x6x1 2x1x3 2x3x1 3x1x2 3x2x1 6x1x1",
    (12, 2, 4): "1x2x3 1x6x1 3x2x1",
}
"""By devices, cp and ep: all pp x dp x tp where pp dp tp cp are the devices and ep divides dp cp."""


@pytest.mark.parametrize("devices", [8, 12])
def test_meshes_with_pieces_and_experts_are_those_listed_by_hand(devices: int) -> None:
    cluster = cluster_from_profile(load_profile("dgx2-v100"), devices)
    problem = replace(asked(), model=mixture(layers=12), cluster=cluster, global_batch=24, zero_stage=0)
    found = {
        (devices, mesh.cp, mesh.ep, f"{mesh.pp}x{mesh.dp}x{mesh.tp}")
        for part in divided_problems(problem)
        for mesh in space.meshes(part)
        if mesh.size == devices
    }
    assert found == {(*key, text) for key, texts in LISTED.items() if key[0] == devices for text in texts.split()}
