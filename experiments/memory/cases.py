"""The models and plans of the experiment, and the processes they run on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from parsim.errors import PlanError
from parsim.execute.job import PLAIN, TrainingRecipe
from parsim.hardware.cluster import Cluster, cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.devices import NO_ALLOCATOR
from parsim.model.inputs import ModelInput
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.layouts import BATCH, REPLICATE, Placement
from parsim.plans.mesh import Mesh
from parsim.plans.pipeline import PIPELINE_ORDERS
from parsim.plans.plan import BY_OPERATOR, DEFAULT_BUCKET_BYTES, NONE, SELECTIVE, Plan, Recompute
from parsim.plans.stages import even_parts, stages_of
from parsim.predict.problem import PlanningProblem
from parsim.program.placed import PlanIndex
from parsim.search.tensor import uniform_placements

MESHES = {
    2: (Mesh(dp=2), Mesh(pp=2), Mesh(tp=2), Mesh(tp=2)),
    4: (Mesh(dp=2, tp=2), Mesh(pp=2, dp=2), Mesh(pp=2, tp=2), Mesh(tp=4), Mesh(dp=4)),
}
"""By ranks; two of two ranks are shards, since these have most to draw from."""


def drawn(model: Model, ranks: int, count: int, *, batch: int, seed: int) -> Iterator[Plan]:
    """`count` plans of 2 or 4 ranks that the model allows; the same plans for the same seed."""
    random = Random(seed)
    while count:
        try:
            plan = _draw(model, ranks, batch, random)
            PlanIndex(plan, model)
        except PlanError:  # such as tied parameters that are held differently
            continue
        count -= 1
        yield plan


def _draw(model: Model, ranks: int, batch: int, random: Random) -> Plan:
    names = [component.name for component in model.components]
    mesh = random.choice(MESHES[ranks])
    order = random.choice(sorted(PIPELINE_ORDERS) if mesh.pp > 1 else ["1f1b"])
    row = PIPELINE_ORDERS[order]
    chunks = random.choice([count for count in (1, 2) if row.takes(count)]) if mesh.pp > 1 else 1
    stages = mesh.pp * chunks
    cuts = [0, *sorted(random.sample(range(1, len(names)), stages - 1)), len(names)]
    recompute = random.choice(["none", "none", "full", tuple(name for name in names if random.random() < 0.5)])
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=stages_of(
            mesh,
            (names[first:last] for first, last in itertools.pairwise(cuts)),
            lambda name: _placement(model, name, mesh.tp, random),
            order=order,
            chunks=chunks,
        ),
        global_batch=batch,
        microbatches=random.choice([1, 2, 4]),
        pipeline_order=order,
        bucket_bytes=random.choice([2**16, 2**18, 25 * 2**20]),
        zero_stage=random.choice([0, 1, 2, 3]),
        recompute=recompute,
    )


def _placement(model: Model, name: str, tp: int, random: Random) -> Placement:
    """Shards as often as everything else together."""
    if tp == 1:
        return BATCH
    shards = [
        Placement("shard", rule=sharding.rule, ways=ways)
        for sharding in model.component(name).shardings
        for ways in (2, 4)
        if ways <= tp and sharding.limit % ways == 0
    ]
    others = [BATCH, REPLICATE, *(Placement("place", shard=shard) for shard in range(tp))]
    return random.choice(shards if shards and random.random() < 0.5 else others)


BATCH_SAMPLES = 32
SMALL_BUCKET_BYTES = 2**18
"""These models fit into one bucket of the usual size, and then nothing but the whole of it could come and go."""


@dataclass(frozen=True)
class Question:
    """A model as it is cut. `tuned`: constants of the memory model were looked at with it, so it is not held out. `kind`: one
    of kinds.py, with fewer plans."""

    spec: ModelSpec
    granularity: str
    dataset: str = "digits"
    tuned: bool = False
    called: str = ""
    kind: bool = False

    @property
    def label(self) -> str:
        return f"{self.called or self.spec.name}-{self.granularity}"


QUESTIONS = (
    Question(ModelSpec(name="resnet_small"), "block", tuned=True),
    Question(ModelSpec(name="vit_small"), "block", tuned=True),
    Question(ModelSpec(name="vit_small"), "sublayer", tuned=True),
    Question(ModelSpec(name="mlp", args=(("width", 768),)), "layer"),
    Question(ModelSpec(name="vgg_small"), "layer"),
    Question(ModelSpec(name="gpt_small"), "sublayer", "synthetic"),
    Question(ModelSpec(name="bert_small"), "sublayer", "synthetic"),
    Question(
        ModelSpec(name="experiments.memory.modules:Recurrent", inputs=(ModelInput("tokens", (32,), "int64", 500),)),
        "block",
        "synthetic",
        called="lstm",
    ),
    Question(
        ModelSpec(
            name="experiments.memory.modules:Conditioned",
            inputs=(ModelInput("image", (3, 16, 16)), ModelInput("step", (), "int64", 100)),
            loss="mse",
        ),
        "layer",
        "synthetic",
        called="denoiser",
    ),
    Question(
        ModelSpec(name=str(Path(__file__).parent / "llama.json"), input_shape=(64,)),
        "sublayer",
        "synthetic",
        called="llama",
    ),
)
DRAWN = {2: 12, 4: 4}
"""Random plans of every question, by ranks."""


@dataclass(frozen=True)
class Case:
    label: str
    plan: Plan
    optimizer: str
    precision: str = "fp32"
    recipe: TrainingRecipe = PLAIN

    @property
    def kind(self) -> str:
        """Of the plan, for the table: the first that applies."""
        plan, mesh = self.plan, self.plan.mesh
        if self.precision != "fp32":
            return f"precision {self.precision}"
        if self.recipe != PLAIN:
            return "gradients clipped" if self.recipe.ema is None else "weights averaged"
        if mesh.size == 4:
            return "four ranks"
        if mesh.pp > 1:
            return f"pipeline, {plan.pipeline_order}"
        if mesh.tp > 1:
            return "shards and placements" + (", ZeRO" if plan.zero_stage else "")
        named = f"ZeRO {plan.zero_stage}" if plan.zero_stage else "replicas" if mesh.dp > 1 else "one rank"
        return named + (", recomputed" if plan.recompute != NONE else "")


def processes(count: int = 4) -> Cluster:
    """CPU devices over gloo: no allocator rounds, and no library keeps a workspace that is a tensor."""
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), count)
    communication = cluster.profile.communication.model_copy(update={"backend": "gloo", "uses_cores": True})
    devices = tuple(
        replace(device, type=replace(device.type, kind="cpu", context_bytes=0, allocator=NO_ALLOCATOR))
        for device in cluster.devices
    )
    return replace(cluster, devices=devices, profile=cluster.profile.model_copy(update={"communication": communication}))


OPTIMIZERS = ("sgd", "sgd_momentum", "adam", "adamw")


def cases(model: Model) -> Iterator[Case]:
    """Every case of a model: the named ones, then those drawn at random for two ranks and for four.

    Raises PlanError where the model does not allow a named one.
    """
    for case in named(model):
        PlanIndex(case.plan, model)
        yield case
    for ranks, count in DRAWN.items():
        for number, plan in enumerate(drawn(model, ranks, count, batch=BATCH_SAMPLES, seed=ranks)):
            yield Case(f"drawn {number + 1} of {ranks} ranks", plan, OPTIMIZERS[number % len(OPTIMIZERS)])


def named(model: Model) -> Iterator[Case]:
    """Named plans over two devices that the model allows. Which rules cut it is decided by the prices of two V100s."""
    yield Case("single", staged(model, Mesh()), "sgd_momentum")
    yield Case("single, 4 microbatches", staged(model, Mesh(), microbatches=4), "adam")
    yield Case("dp", staged(model, Mesh(dp=2)), "sgd_momentum")
    yield Case("dp, 4 microbatches", staged(model, Mesh(dp=2), microbatches=4), "adamw")
    yield Case("dp, zero 1", staged(model, Mesh(dp=2), zero_stage=1), "adam")
    for stage in (2, 3):
        yield Case(f"dp, zero {stage}", staged(model, Mesh(dp=2), zero_stage=stage, bucket_bytes=SMALL_BUCKET_BYTES), "adam")
        divided = staged(model, Mesh(dp=2), microbatches=4, zero_stage=stage, bucket_bytes=SMALL_BUCKET_BYTES)
        yield Case(f"dp, 4 microbatches, zero {stage}", divided, "sgd_momentum")
    yield Case("dp, recomputed, zero 3", staged(model, Mesh(dp=2), zero_stage=3, recompute="full"), "sgd_momentum")
    for order in ("gpipe", "1f1b"):
        yield Case(f"pp {order}", staged(model, Mesh(pp=2), microbatches=4, order=order), "sgd_momentum")
    yield Case("pp 1f1b, 8 microbatches", staged(model, Mesh(pp=2), microbatches=8), "adam")
    yield Case("single, recomputed", staged(model, Mesh(), recompute="full"), "sgd_momentum")
    yield Case("dp, 4 microbatches, recomputed", staged(model, Mesh(dp=2), microbatches=4, recompute="full"), "adam")
    every_other_name = tuple(names_of(model)[::2])
    yield Case("dp, half recomputed", staged(model, Mesh(dp=2), recompute=every_other_name), "sgd_momentum")
    yield Case(
        "pp gpipe, recomputed", staged(model, Mesh(pp=2), microbatches=4, order="gpipe", recompute="full"), "sgd_momentum"
    )
    for order, chunks in (("interleaved", 2), ("zero-bubble", 1), ("zero-bubble-v", 2)):
        if len(names_of(model)) >= 2 * chunks:
            yield Case(f"pp {order}", staged(model, Mesh(pp=2), microbatches=4, order=order, chunks=chunks), "adam")
    yield Case("pp 1f1b, recomputed", staged(model, Mesh(pp=2), microbatches=8, recompute="full"), "adam")
    yield from by_operator(model)
    yield Case("replicated", staged(model, Mesh(tp=2), placements=dict.fromkeys(names_of(model), REPLICATE)), "sgd")
    if any(component.shardings for component in model.components):
        priced = PlanningProblem(
            model=model, cluster=cluster_from_profile(load_profile("dgx1-v100-32gb"), 2), global_batch=BATCH_SAMPLES
        )
        cut = uniform_placements(priced, Mesh(tp=2))
        yield Case("tp", staged(model, Mesh(tp=2), placements=cut), "sgd_momentum")
        yield Case("tp, 2 microbatches", staged(model, Mesh(tp=2), microbatches=2, placements=cut), "adam")
        every_other = _in_turn(model, cut)
        yield Case("batch and shards in turn", staged(model, Mesh(tp=2), placements=every_other), "adam")
        yield Case("tp, recomputed", staged(model, Mesh(tp=2), placements=cut, recompute="full"), "sgd_momentum")
        if any(component.selective is not None for component in model.components):
            yield Case("tp, by operator", staged(model, Mesh(tp=2), placements=cut, recompute=SELECTIVE), "sgd_momentum")
        mixed = staged(model, Mesh(tp=2), placements=every_other, recompute=every_other_name)
        yield Case("batch and shards in turn, half recomputed", mixed, "adam")
        yield Case("the same, zero 1", staged(model, Mesh(tp=2), placements=every_other, zero_stage=1), "adam")
        divided = staged(model, Mesh(tp=2), placements=every_other, zero_stage=3, bucket_bytes=SMALL_BUCKET_BYTES)
        yield Case("batch and shards in turn, zero 3", divided, "adam")


def _in_turn(model: Model, cut: Mapping[str, Placement]) -> dict[str, Placement]:
    """Every second component as it is cut, the others by batch; and who makes a value without samples as its readers.

    Rotary positions are such a value: nothing converts them.
    """
    makers = {
        value.producer
        for value in model.values
        if value.producer is not None and not value.bytes_per_sample and model.consumers(value.name)
    }
    return {name: at if number % 2 or name in makers else BATCH for number, (name, at) in enumerate(cut.items())}


def by_operator(model: Model) -> Iterator[Case]:
    """Plans with components recomputed by operator, where the model has some that keep less so."""
    if not any(component.selective is not None for component in model.components):
        return
    yield Case("single, by operator", staged(model, Mesh(), recompute=SELECTIVE), "sgd_momentum")
    divided = staged(model, Mesh(dp=2), microbatches=4, recompute=SELECTIVE, zero_stage=3, bucket_bytes=SMALL_BUCKET_BYTES)
    yield Case("dp, 4 microbatches, by operator, zero 3", divided, "adam")
    turns = (f"{BY_OPERATOR * (number % 2)}{name}" for number, name in enumerate(names_of(model)))
    yield Case("dp, whole and by operator in turn", staged(model, Mesh(dp=2), recompute=tuple(turns)), "sgd_momentum")
    yield Case("pp 1f1b, by operator", staged(model, Mesh(pp=2), microbatches=8, recompute=SELECTIVE), "adam")
    gpipe = staged(model, Mesh(pp=2), microbatches=4, order="gpipe", recompute=SELECTIVE)
    yield Case("pp gpipe, by operator", gpipe, "sgd_momentum")
    halves = staged(model, Mesh(pp=2), microbatches=4, order="zero-bubble", recompute=SELECTIVE)
    yield Case("pp zero-bubble, by operator", halves, "adam")


def names_of(model: Model) -> list[str]:
    return [component.name for component in model.components]


def staged(
    model: Model,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    order: str = "1f1b",
    chunks: int = 1,
    zero_stage: int = 0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    recompute: Recompute = NONE,
    placements: dict[str, Placement] | None = None,
) -> Plan:
    """Stages of as equal a number of components as can be."""
    chosen = placements or {}
    placement = (lambda name: chosen.get(name, BATCH)) if mesh.tp > 1 else None
    return Plan(
        strategy="custom",
        mesh=mesh,
        stages=stages_of(mesh, even_parts(names_of(model), mesh.pp * chunks), placement, order=order, chunks=chunks),
        global_batch=BATCH_SAMPLES,
        microbatches=microbatches,
        pipeline_order=order,
        zero_stage=zero_stage,
        bucket_bytes=bucket_bytes,
        recompute=recompute,
    )
