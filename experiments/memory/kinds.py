"""More of what people train: kinds of modules beside those of cases.py, and settings of a training that change its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from experiments.memory.cases import QUESTIONS, SMALL_BUCKET_BYTES, Case, Question, cases, drawn, names_of, staged
from experiments.memory.kind_modules import LENGTH, VOCABULARY, WIDTH
from parsim.errors import PlanError
from parsim.execute.job import EmaRule, TrainingRecipe
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.formats import recorded_weights
from parsim.model.inputs import ModelInput
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import SELECTIVE
from parsim.predict.problem import PlanningProblem
from parsim.program.placed import PlanIndex
from parsim.search.tensor import uniform_placements

TOKENS = (ModelInput("tokens", (LENGTH,), "int64", VOCABULARY),)
IMAGE = ModelInput("image", (3, 32, 32))


def _kind(
    called: str, factory: str, *, granularity: str = "block", shape: tuple[int, ...] | None = None, **more: object
) -> Question:
    spec = ModelSpec(name=f"experiments.memory.kind_modules:{factory}", input_shape=shape, **more)  # type: ignore[arg-type]
    return Question(spec, granularity, "synthetic", called=called, kind=True)


KINDS = (
    _kind("experts", "Routed", shape=(LENGTH, WIDTH)),
    _kind("unet", "UNet", shape=(3, 32, 32), loss="cross_entropy", classes_dim=0),
    _kind("gan", "Adversaries", inputs=(ModelInput("real", (256,)), ModelInput("noise", (64,))), loss="own"),
    _kind("lora", "Adapted", inputs=TOKENS, granularity="sublayer"),
    _kind("frozen", "frozen_trunk", shape=(3, 32, 32)),
    _kind("tied", "TiedDecoder", inputs=TOKENS, granularity="sublayer"),
    _kind(
        "described",
        "Described",
        inputs=(
            IMAGE,
            ModelInput("words", (LENGTH,), "int64", VOCABULARY),
            ModelInput("mask", (LENGTH,), "bool"),
            ModelInput("prior", (10,), constant=True),
            ModelInput("labels", (), "int64", 10),
        ),
        loss="own",
    ),
    _kind("gru", "Gated", inputs=TOKENS),
    _kind("contrastive", "Pair", inputs=(ModelInput("one", (WIDTH,)), ModelInput("other", (WIDTH,))), loss="own"),
)
ALL = (*QUESTIONS, *KINDS)
AVERAGED, CLIPPED = TrainingRecipe(ema=EmaRule(decay=0.99)), TrainingRecipe(clip_norm=1.0)
PRECISIONS = ("amp_bf16", "amp_fp16", "bf16")
"""Those beside fp32 that a CPU trains in."""


def cases_of(question: Question, models: dict[str, Model]) -> Iterator[Case]:
    """Every case of a question. models: by torch's name of the weights' type, as `recorded_weights` gives it."""
    model = models["float32"]
    yield from allowed(kind_cases(model), models) if question.kind else cases(model)
    yield from allowed(settings(model), models)


def allowed(found: Iterator[Case], models: dict[str, Model]) -> Iterator[Case]:
    """Without plans that the model does not allow, such as tied parameters that are held differently."""
    for case in found:
        try:
            PlanIndex(case.plan, models[recorded_weights(case.precision)])
        except PlanError:
            continue
        yield case


def kind_cases(model: Model) -> Iterator[Case]:
    """Fewer plans than `cases` has: each way of dividing and recomputing once or twice, and four that are drawn."""
    small = {"bucket_bytes": SMALL_BUCKET_BYTES}
    yield Case("single", staged(model, Mesh()), "adam")
    yield Case("single, 4 microbatches", staged(model, Mesh(), microbatches=4), "sgd_momentum")
    yield Case("single, recomputed", staged(model, Mesh(), recompute="full"), "adam")
    yield Case("dp, 2 microbatches", staged(model, Mesh(dp=2), microbatches=2), "adamw")
    yield Case("dp, half recomputed", staged(model, Mesh(dp=2), recompute=tuple(names_of(model)[::2])), "sgd_momentum")
    for stage in (1, 2, 3):
        yield Case(f"dp, zero {stage}", staged(model, Mesh(dp=2), zero_stage=stage, **small), "adam")
    for stage in (2, 3):
        divided = staged(model, Mesh(dp=2), zero_stage=stage, microbatches=4, **small)
        yield Case(f"dp, 4 microbatches, zero {stage}", divided, "adam")
    yield Case("dp, recomputed, zero 3", staged(model, Mesh(dp=2), zero_stage=3, recompute="full", **small), "sgd_momentum")
    if any(component.selective is not None for component in model.components):
        yield Case("single, by operator", staged(model, Mesh(), recompute=SELECTIVE), "adam")
        by_operator = staged(model, Mesh(dp=2), zero_stage=2, microbatches=2, recompute=SELECTIVE, **small)
        yield Case("dp, by operator, zero 2", by_operator, "adam")
    if len(names_of(model)) > 1:
        for order in ("gpipe", "1f1b", "zero-bubble"):
            yield Case(f"pp {order}", staged(model, Mesh(pp=2), microbatches=4, order=order), "adam")
        yield Case("pp 1f1b, recomputed", staged(model, Mesh(pp=2), microbatches=4, recompute="full"), "adam")
    if len(names_of(model)) >= 4:
        for order in ("interleaved", "zero-bubble-v"):
            yield Case(f"pp {order}", staged(model, Mesh(pp=2), microbatches=4, order=order, chunks=2), "adam")
    yield from cut(model)
    for number, plan in enumerate(drawn(model, 2, 4, batch=32, seed=2)):
        yield Case(f"drawn {number + 1} of 2 ranks", plan, "adam")


def cut(model: Model) -> Iterator[Case]:
    """Shards over two ranks, of models that have some."""
    if not any(component.shardings for component in model.components):
        return
    priced = PlanningProblem(model=model, cluster=cluster_from_profile(load_profile("dgx1-v100-32gb"), 2), global_batch=32)
    try:
        placements = uniform_placements(priced, Mesh(tp=2))
    except PlanError:
        return
    yield Case("tp", staged(model, Mesh(tp=2), placements=placements), "adam")
    yield Case("tp, recomputed", staged(model, Mesh(tp=2), placements=placements, recompute="full"), "sgd_momentum")


def settings(model: Model) -> Iterator[Case]:
    """Plans under averages of the weights, clipping, and every precision of a CPU."""
    small = {"bucket_bytes": SMALL_BUCKET_BYTES}
    plain, divided = staged(model, Mesh(dp=2)), staged(model, Mesh(dp=2), zero_stage=3, **small)
    stages = staged(model, Mesh(pp=2), microbatches=4) if len(names_of(model)) > 1 else None
    for label, plan in (("dp", plain), ("dp, zero 3", divided), ("pp 1f1b", stages)):
        if plan is not None:
            yield Case(f"{label}, averaged", plan, "adam", recipe=AVERAGED)
            yield Case(f"{label}, clipped", replace(plan, clip_gradients=True), "sgd_momentum", recipe=CLIPPED)
            for precision in PRECISIONS:
                yield Case(f"{label}, {precision}", plan, "adam", precision=precision)
    yield Case("dp, zero 1, averaged", staged(model, Mesh(dp=2), zero_stage=1), "adamw", recipe=AVERAGED)
    for precision in PRECISIONS:
        recomputed = staged(model, Mesh(dp=2), microbatches=2, zero_stage=2, recompute="full", **small)
        yield Case(f"dp, zero 2, recomputed, {precision}", recomputed, "adam", precision=precision)
        for case in cut(model):
            if case.label == "tp":
                yield replace(case, label=f"tp, {precision}", precision=precision)
