"""Small models, and one of them under one plan, for real runs against single-process training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from experiments.common.equality import Case, even_plan
from parsim.execute.job import RunSpec, TrainingRecipe
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh

MLP = ModelSpec(name="mlp", args=(("width", 24),))
VIT = ModelSpec(name="vit_small", args=(("heads", 2), ("hidden", 16), ("layers", 2)))
RESNET = ModelSpec(name="resnet_small", args=(("width", 4),))
GPT = ModelSpec(name="gpt_small", args=(("heads", 2), ("hidden", 16), ("layers", 3), ("seq", 16), ("vocab", 32)))
BERT = ModelSpec(name="bert_small", args=(("heads", 2), ("hidden", 16), ("layers", 2), ("seq", 16), ("vocab", 32)))
VGG = ModelSpec(name="vgg_small")
MODELS = (MLP, VIT, RESNET, GPT, BERT, VGG)
TOKENS = {"gpt_small", "bert_small"}

ADAM = {"optimizer": "adam", "learning_rate": 1e-3}
ADAMW = {"optimizer": "adamw", "learning_rate": 1e-3}
CLIP = TrainingRecipe(clip_norm=0.5)


def case(spec: ModelSpec, mesh: Mesh, *, batch: int = 8, **options: object) -> Case:
    strategy = "single" if mesh.size == 1 else "dp" if mesh.pp == 1 else "mp" if mesh.dp == 1 else "hp"
    of_plan = ("microbatches", "order", "chunks", "bucket_bytes", "zero_stage", "recompute")
    plan_options = {key: options.pop(key) for key in of_plan if key in options}
    if spec == RESNET:
        # Normalising over two samples amplifies rounding a million times in 100 steps at 0.02: the case would test that.
        batch, options = 4 * batch, {"learning_rate": 2e-3, **options}
    plan = even_plan(spec, mesh, strategy=strategy, batch=batch, **plan_options)  # type: ignore[arg-type]
    return Case(spec=spec, plan=plan, dataset="synthetic" if spec.name in TOKENS else "digits", **options)  # type: ignore[arg-type]


def clipped(item: Case) -> Case:
    plan = replace(item.plan, clip_gradients=True)
    return replace(item, plan=plan, recipe=CLIP, optimizer="sgd_momentum", learning_rate=0.02)


def run_spec(item: Case, folder: Path | None = None, **changes: object) -> RunSpec:
    """A run of a job under the plan of a case, whose Model is saved in the folder; else with the defaults of RunSpec."""
    path = ""
    if folder is not None:
        folder.mkdir(exist_ok=True)
        path = str(folder / "model.json")
        item.model.save(folder / "model.json")
    run = RunSpec(
        name="run",
        model=item.spec,
        model_path=path,
        plan=item.plan,
        optimizer=item.optimizer,
        learning_rate=item.learning_rate,
        dataset=item.dataset,
    )
    return replace(run, **changes)  # type: ignore[arg-type]
