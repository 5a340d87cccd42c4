"""A search tries every mesh: those of 8 and 12 devices as listed by hand, and on drawn problems nothing listed is faster.

The plans held against the search are made and simulated here: every listed mesh and microbatch, every cut of 4 to 6 components
and the loss, and placements that cut all components alike. The search may know faster ones; it may not miss these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from random import Random

import pytest

from experiments.search.enumeration import CLOSE, bound_s, cuts, plan_of, searched
from experiments.search.problems import ProblemDraw, random_cluster, random_model
from parsim.app.load import problem_of
from parsim.app.question import question_of
from parsim.model.component import Component
from parsim.plans.layouts import BATCH, REPLICATE, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.predict.evaluate import simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.search.by_hand import custom_plan
from parsim.search.memory_floor import held_totals
from parsim.search.search import search
from parsim.search.space import divided_problems, is_usual, meshes, microbatch_counts, orders

LISTED = {  # pp x dp x tp
    8: "1x1x8 1x2x4 1x4x2 1x8x1 2x1x4 2x2x2 2x4x1 4x1x2 4x2x1 8x1x1",
    12: "1x1x12 1x2x6 1x3x4 1x4x3 1x6x2 1x12x1 2x1x6 2x2x3 2x3x2 2x6x1 3x1x4 3x2x2 3x4x1 4x1x3 4x3x1 6x1x2 6x2x1 12x1x1",
}


def listed(devices: int) -> list[Mesh]:
    sizes = [tuple(map(int, text.split("x"))) for text in LISTED[devices].split()]
    return [Mesh(pp=pp, dp=dp, tp=tp) for pp, dp, tp in sizes]


def drawn_on_8(seed: int) -> ProblemDraw:
    """4 to 6 components, and 8 equal devices of which each pair has a link; memory is ample."""
    random = Random(seed)
    model = random_model(random, most_components=6)
    while len(model.flop) < 4:
        model = random_model(random, most_components=6)
    cluster = replace(random_cluster(random), kinds=(0,) * 8, nodes=1, wiring="mesh")
    return ProblemDraw(model=model, cluster=cluster, global_batch=random.choice((8, 32)))


MOST_WAYS = (1, 4, 8)
"""Into how many shards components can be cut at most, problem by problem: else eight shards win nearly all."""


def problem_on_8(seed: int) -> PlanningProblem:
    problem, most = drawn_on_8(seed).problem(zero_stage=0, recompute="none"), MOST_WAYS[seed % len(MOST_WAYS)]
    components = tuple(
        replace(each, shardings=tuple(replace(entry, limit=most) for entry in each.shardings) if most > 1 else ())
        for each in problem.model.components
    )
    return replace(problem, model=replace(problem.model, components=components))


def four_stages() -> PlanningProblem:
    """Four equal components whose weights take longer to sum than samples take to pass: four stages win."""
    draw = drawn_on_8(0)
    model = replace(draw.model, **{key: (value,) * 4 for key, value in EQUAL.items()}, skips=(), tied=())
    slow = replace(draw.cluster, link_bandwidth=2e9, peak_flop_per_s=(2e13, 2e13))
    return replace(draw, model=model, cluster=slow, global_batch=16).problem(zero_stage=0, recompute="none")


EQUAL = {"flop": 2e10, "elements": 64 * 10**6, "width": 256, "saved_bytes": 4096, "cut": False}


@pytest.mark.parametrize("devices", list(LISTED))
def test_meshes_are_those_listed_by_hand(devices: int) -> None:
    draw = drawn_on_8(0)
    names = tuple(f"c{number}" for number in range(devices))
    many = replace(draw.model, **{key: value[:1] * devices for key, value in vars_of(draw.model).items()}, skips=(), tied=())
    problem = replace(draw, model=many, cluster=replace(draw.cluster, kinds=(0,) * devices), global_batch=devices).problem()
    assert len(names) <= len(problem.model.components)
    found = [mesh for mesh in meshes(problem) if mesh.size == devices]
    assert sorted(map(str, found)) == sorted(map(str, listed(devices)))


@pytest.mark.parametrize(("devices", "batch", "count"), [(8, 8, 32), (8, 3, 29), (12, 12, 66)])
def test_meshes_that_leave_devices_idle_have_replicas_that_divide_the_batch(devices: int, batch: int, count: int) -> None:
    """Beside those of all devices: pp dp tp below their number, and dp a divisor of the batch."""
    draw = drawn_on_8(0)
    many = replace(draw.model, **{key: value[:1] * devices for key, value in vars_of(draw.model).items()}, skips=(), tied=())
    problem = replace(draw, model=many, cluster=replace(draw.cluster, kinds=(0,) * devices), global_batch=batch).problem()
    sizes = range(1, devices + 1)
    fewer = [
        Mesh(pp=pp, dp=dp, tp=tp)
        for pp, dp, tp in product(sizes, sizes, sizes)
        if pp * dp * tp < devices and not batch % dp and pp <= len(problem.model.components)
    ]
    assert len(fewer) + len(listed(devices)) == count
    assert sorted(map(str, meshes(problem))) == sorted(map(str, [*fewer, *listed(devices)]))


def vars_of(model: object) -> dict[str, tuple[object, ...]]:
    return {key: getattr(model, key) for key in ("flop", "elements", "width", "saved_bytes", "cut")}


def alike(component: Component, tp: int) -> list[Placement]:
    """How a component is placed where all are placed alike: cut in so many pieces if it can be, or whole on every rank."""
    cut = [Placement("shard", rule=entry.rule, ways=tp) for entry in component.shardings if entry.limit % tp == 0]
    return [*cut[:1], BATCH, REPLICATE]


def best_listed(problem: PlanningProblem, known_s: float) -> tuple[float, Mesh | None]:
    """The fastest of the listed plans that is faster than `known_s`."""
    best_s, best = known_s, None
    components = problem.model.components
    for mesh in listed(8):
        if mesh.pp > len(components) or problem.global_batch % mesh.dp:
            continue
        replica = problem.global_batch // mesh.dp
        options = [alike(component, mesh.tp) for component in components]
        for bounds in cuts(len(components), mesh.pp):
            for microbatches in (count for count in range(1, replica + 1) if replica % count == 0):
                for way in range(2 if mesh.tp > 1 else 1):
                    chosen = [(own[0] if not way else own[-1]) if mesh.tp > 1 else BATCH for own in options]
                    plan = plan_of(problem, mesh, "1f1b", 1, bounds, microbatches, chosen)
                    if plan is None or bound_s(problem, plan) >= best_s:
                        continue
                    seconds = simulated_step(problem, plan, fold=False).step_s
                    if seconds < best_s * (1 - CLOSE):
                        best_s, best = seconds, mesh
    return best_s, best


def compared(problem: PlanningProblem) -> Mesh:
    """The mesh that the search chose; no listed plan is faster."""
    seconds, plan, _ = searched(problem)
    assert plan is not None
    best_s, mesh = best_listed(problem, seconds)
    assert 1 - best_s / seconds <= CLOSE, f"{mesh} takes {best_s}, and the search found {seconds} on {plan.mesh}"
    return plan.mesh


def test_no_listed_plan_is_faster_than_the_search() -> None:
    """Where four stages win, and where four shards do."""
    assert compared(four_stages()).pp == 4
    assert compared(problem_on_8(10)).tp == 4


@pytest.mark.slow  # 5 CPU-seconds a problem
def test_no_listed_plan_is_faster_than_the_search_on_many_problems() -> None:
    found = {str(compared(problem_on_8(seed))) for seed in range(8)}
    assert len(found) >= 4, found


# Public recipes of mixtures of experts: each is among the plans of the search, and no answer is slower by the same prices.

BRIDGE = "NVIDIA-NeMo/Megatron-Bridge scripts/performance/configs/"
QWEN3 = f"{BRIDGE}qwen/qwen3_workload_base_configs.py @01b2977e518f"
V3, H100 = "deepseek-v3", "1024xh100-sxm"
DEEPSEEK = f"{BRIDGE}deepseek/deepseek_workload_base_configs.py @042641823051"
PERFORMANCE = "NVIDIA-NeMo/Megatron-Bridge performance page, tables of 26.04 and 26.04.01"
REPORT = "DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.2: pp 16, ep 64 over 8 nodes, ZeRO 1, no tp"
CORE = "NVIDIA/Megatron-LM megatron/core/transformer/moe/README.md"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published plan. gpus: as in --gpus. micro: samples of a microbatch. chunks: stages per rank."""

    model: str
    gpus: str
    mesh: Mesh
    batch: int
    micro: int = 1
    chunks: int = 1
    source: str
    is_large: bool = False
    """Its search takes a minute of CPU: whether it is among the plans is asked, not whether it is beaten."""

    @property
    def name(self) -> str:
        return f"{self.model} on {self.gpus}"

    @property
    def problem(self) -> PlanningProblem:
        settings: dict[str, object] = {"model.args.seq": 4096, "software.framework": "megatron-bridge"}
        if self.mesh.size > (72 if "xgb" in self.gpus else 8):
            settings["cluster.network"] = "infiniband-400g"
            settings |= {"cluster.gpus_per_node": 64} if "xgb" in self.gpus else {}
        return problem_of(question_of(self.model, cluster=self.gpus, global_batch=self.batch, settings=settings))

    @property
    def microbatches(self) -> int:
        return self.batch // (self.mesh.dp * self.micro)

    @property
    def order(self) -> tuple[str, int]:
        return ("interleaved", self.chunks) if self.chunks > 1 else ("1f1b", 1)

    def plan(self, problem: PlanningProblem) -> Plan:
        name, chunks = self.order
        made = custom_plan(
            replace(problem, zero_stage=1), self.mesh, microbatches=self.microbatches, pipeline_order=name, chunks=chunks
        )
        return replace(made, zero_stage=1)


RECIPES = (
    Recipe(model="qwen3-30b-a3b", gpus="16xh100-sxm", mesh=Mesh(dp=16, ep=16), batch=1024, source=QWEN3),
    Recipe(model="qwen3-30b-a3b", gpus="8xb200", mesh=Mesh(dp=8, ep=8), batch=512, micro=4, source=QWEN3),
    Recipe(model="qwen3-235b-a22b", gpus="256xb200", mesh=Mesh(pp=8, dp=32, ep=8), batch=8192, source=QWEN3),
    Recipe(
        model="qwen3-235b-a22b",
        gpus="256xgb300",
        mesh=Mesh(pp=4, dp=64, ep=32),
        batch=8192,
        micro=2,
        source=QWEN3,
        is_large=True,
    ),
    Recipe(model="mixtral-8x7b", gpus="64xh100-sxm", mesh=Mesh(pp=4, dp=16, ep=8), batch=256, source=CORE),
    Recipe(
        model="mixtral-8x22b", gpus="256xh100-sxm", mesh=Mesh(pp=4, dp=16, tp=4, ep=8), batch=256, source=CORE, is_large=True
    ),
    Recipe(model="gpt-oss-120b", gpus="64xh100-sxm", mesh=Mesh(pp=4, dp=16, ep=8), batch=1280, source=PERFORMANCE),
    Recipe(model="gpt-oss-120b", gpus="64xgb200", mesh=Mesh(dp=64, ep=64), batch=1280, micro=4, source=PERFORMANCE),
    Recipe(model="kimi-k2", gpus="256xgb300", mesh=Mesh(pp=4, dp=64, ep=64), batch=4096, micro=2, chunks=4, source=PERFORMANCE),
    Recipe(
        model="deepseek-v3", gpus="1024xh100-sxm", mesh=Mesh(pp=8, dp=64, tp=2, ep=64), batch=8192, chunks=4, source=DEEPSEEK
    ),
    Recipe(model="deepseek-v3", gpus="256xgb300", mesh=Mesh(pp=2, dp=128, ep=32), batch=4096, chunks=8, source=DEEPSEEK),
    Recipe(
        model="deepseek-v3", gpus="2048xh800-sxm", mesh=Mesh(pp=16, dp=128, ep=64), batch=15360, source=REPORT, is_large=True
    ),
)
NAMES = [recipe.name for recipe in RECIPES]


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_a_public_recipe_is_among_the_plans_of_the_search(recipe: Recipe) -> None:
    problem, mesh = recipe.problem, recipe.mesh
    parts = {part.division[:2]: part for part in divided_problems(problem) if part.division is not None}
    part = parts[mesh.cp, mesh.ep]
    assert any(found == mesh for found in meshes(part, lambda *axes: axes == (mesh.pp, mesh.dp, mesh.tp)))
    assert recipe.microbatches in microbatch_counts(part, mesh)
    assert mesh.pp == 1 or recipe.order in orders(part, mesh)
    assert is_usual(part, mesh, recipe.order)


def test_the_floor_divides_the_states_of_experts_over_ranks_with_the_same_experts() -> None:
    """16 ranks that have other experts each divide none of their states among them."""
    recipe = RECIPES[0]
    problem, mesh = recipe.problem, recipe.mesh
    part = next(each for each in divided_problems(problem) if each.division is not None and each.division.ep == mesh.ep)
    held = held_totals(part, mesh, recipe.micro, (BATCH,) * len(part.model.components))
    lines = dict(problem.unlike_memory(recipe.plan(problem))[0].lines)
    exact = sum(lines[name] for name in ("parameters", "gradients", "optimizer_state"))
    assert 0.98 * exact <= held.weights[1] <= exact


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if not recipe.is_large], ids=lambda recipe: recipe.name)
def test_no_answer_is_slower_than_a_public_recipe(recipe: Recipe) -> None:
    problem = recipe.problem
    given = recipe.plan(problem)
    found = search(problem, ("adaptive",), samples=0)
    fitting = [each.result.step_s.median for each in found.candidates if each.result.fits]
    assert fitting
    if all(memory.fits for memory in problem.unlike_memory(given)):
        assert min(fitting) <= simulated_step(problem, given, fold=True).step_s
