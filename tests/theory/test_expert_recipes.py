"""Public recipes of mixtures of experts: each is among the plans of the search, and no answer is slower by the same prices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from parsim.app.load import problem_of
from parsim.app.question import question_of
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan
from parsim.predict.evaluate import simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.search.by_hand import custom_plan
from parsim.search.search import search
from parsim.search.space import divided_problems, meshes, microbatch_counts, orders

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
    Recipe(model="qwen3-235b-a22b", gpus="256xgb300", mesh=Mesh(pp=4, dp=64, ep=32), batch=8192, micro=2, source=QWEN3),
    Recipe(model="mixtral-8x7b", gpus="64xh100-sxm", mesh=Mesh(pp=4, dp=16, ep=8), batch=256, source=CORE),
    Recipe(model="mixtral-8x22b", gpus="256xh100-sxm", mesh=Mesh(pp=4, dp=16, tp=4, ep=8), batch=256, source=CORE),
    Recipe(model="gpt-oss-120b", gpus="64xh100-sxm", mesh=Mesh(pp=4, dp=16, ep=8), batch=1280, source=PERFORMANCE),
    Recipe(model="gpt-oss-120b", gpus="64xgb200", mesh=Mesh(dp=64, ep=64), batch=1280, micro=4, source=PERFORMANCE),
    Recipe(model="kimi-k2", gpus="256xgb300", mesh=Mesh(pp=4, dp=64, ep=64), batch=4096, micro=2, chunks=4, source=PERFORMANCE),
    Recipe(
        model="deepseek-v3", gpus="1024xh100-sxm", mesh=Mesh(pp=8, dp=64, tp=2, ep=64), batch=8192, chunks=4, source=DEEPSEEK
    ),
    Recipe(model="deepseek-v3", gpus="256xgb300", mesh=Mesh(pp=2, dp=128, ep=32), batch=4096, chunks=8, source=DEEPSEEK),
    Recipe(model="deepseek-v3", gpus="2048xh800-sxm", mesh=Mesh(pp=16, dp=128, ep=64), batch=15360, source=REPORT),
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


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_no_answer_is_slower_than_a_public_recipe(recipe: Recipe) -> None:
    problem = recipe.problem
    given = recipe.plan(problem)
    found = search(problem, ("adaptive",), samples=0)
    fitting = [each.result.step_s.median for each in found.candidates if each.result.fits]
    assert fitting
    if all(memory.fits for memory in problem.unlike_memory(given)):
        assert min(fitting) <= simulated_step(problem, given, fold=True).step_s
