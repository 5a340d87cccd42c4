"""Which models, batches and plans: calibrated ones, held-out ones, and their small versions for a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import NONE, Plan, Recompute, Stage
from tools.gpu.products import SIDES, Product, squares, transformer_products

GRANULARITY = "block"
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One training step of one rank.

    Attributes:
        model: its name in rows. held_out: no component of this model was calibrated; else only the batch is new.
        compiled: whether torch.compile is tried on it, last.
        precision: as in RUN.toml.
    """

    model: str
    spec: ModelSpec
    batch: int
    optimizer: str
    held_out: bool
    microbatches: int = 1
    recompute: Recompute = NONE
    compiled: bool = False
    precision: str = "fp32"

    @property
    def name(self) -> str:
        """`vit_b_16 b64 amp_bf16`, `gpt b8 m4 tf32`, `bert b16 recompute fp32`: names its rows."""
        parts = f" m{self.microbatches}" if self.microbatches > 1 else ""
        again = " recompute" if self.recompute != NONE else ""
        return f"{self.model} b{self.batch}{parts}{again} {self.precision}"

    def plan(self, components: tuple[str, ...]) -> Plan:
        """The one-rank plan."""
        return Plan(
            strategy="custom",
            mesh=Mesh(),
            stages=(Stage(components=components, ranks=(0,)),),
            global_batch=self.batch,
            microbatches=self.microbatches,
            recompute=self.recompute,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Everything of one size of the experiment.

    Attributes:
        precisions: in which steps are calibrated, predicted and measured, by order of value.
        calibrated: models with their local batches. held_out: steps to predict and to measure, by order of value. The first
            `fewer` come before anything else, and are the only ones in the other precisions.
        microbatched, recomputed: variants of steps. products: by order of value; the first gives a precision's peak.
        copy_sizes, host_sizes: bytes. sustained_s, short_s: device seconds of large and of small products.
        calibration_s: of components, of operators. round_budget_s: of the interleaved rounds of one question.
        rounds: least and most. steps: of a program in a round. patience: by which the estimates of the cases are multiplied.
    """

    profile_name: str
    precisions: tuple[str, ...]
    fewer: int
    calibrated: tuple[tuple[ModelSpec, tuple[int, ...]], ...]
    held_out: tuple[Question, ...]
    microbatched: tuple[Question, ...]
    recomputed: tuple[Question, ...]
    products: tuple[Product, ...]
    copy_sizes: tuple[int, ...]
    host_sizes: tuple[int, ...]
    sustained_s: float
    short_s: float
    calibration_s: tuple[float, float]
    round_budget_s: float
    rounds: tuple[int, int]
    steps: int
    quick_calibration: bool = False
    patience: float = 1.0

    def steps_in(self, precision: str) -> tuple[Question, ...]:
        """What is measured against other programs."""
        chosen = self.held_out if precision == self.precisions[0] else self.held_out[: self.fewer]
        return tuple(replace(question, precision=precision) for question in chosen)

    def variants_in(self, precision: str) -> tuple[Question, ...]:
        """Recomputed and in microbatches: in the first precision alone."""
        chosen = (*self.recomputed, *self.microbatched) if precision == self.precisions[0] else ()
        return tuple(replace(question, precision=precision) for question in chosen)

    def questions_in(self, precision: str) -> tuple[Question, ...]:
        return (*self.steps_in(precision), *self.variants_in(precision))


def language(name: str, **args: int) -> ModelSpec:
    return ModelSpec(name=name, args=tuple(sorted(args.items())))


def asked(model: str, spec: ModelSpec, batch: int, *, held_out: bool = True, compiled: bool = False) -> Question:
    """Images without attention train with momentum, everything else with AdamW."""
    momentum = spec.name.startswith(("resnet", "vgg"))
    return Question(
        model=model,
        spec=spec,
        batch=batch,
        optimizer="sgd_momentum" if momentum else "adamw",
        held_out=held_out,
        compiled=compiled,
    )


GPT_MEDIUM = language("gpt", hidden=1024, layers=24, heads=16, vocab=50257, seq=1024)
VIT = ModelSpec(name="vit_b_16")

ON_A_GPU = Scope(
    profile_name="one-gpu",
    precisions=("amp_bf16", "tf32"),
    fewer=3,
    calibrated=((ModelSpec(name="resnet50"), (16, 64)), (ModelSpec(name="gpt"), (2, 8))),
    held_out=(
        asked("vit_b_16", VIT, 64, compiled=True),
        asked("bert", ModelSpec(name="bert"), 16, compiled=True),
        asked("gpt", ModelSpec(name="gpt"), 4, held_out=False),
        asked("gpt_medium", GPT_MEDIUM, 4, compiled=True),
        asked("vit_b_16", VIT, 16),
        asked("gpt_medium", GPT_MEDIUM, 8),
        asked("bert", ModelSpec(name="bert"), 4),
        asked("resnet50", ModelSpec(name="resnet50"), 32, held_out=False),
    ),
    microbatched=(
        replace(asked("vit_b_16", VIT, 64), microbatches=4),
        replace(asked("gpt_medium", GPT_MEDIUM, 8), microbatches=4),
    ),
    recomputed=(
        replace(asked("gpt_medium", GPT_MEDIUM, 8), recompute="full"),
        replace(asked("vit_b_16", VIT, 64), recompute="full"),
    ),
    products=(
        *squares(SIDES[-1:]),
        *transformer_products(8192, 1024, 50304),
        *squares(SIDES[-2::-1]),
        *transformer_products(512, 768, 30592)[:4],
    ),
    copy_sizes=(2**20, 2**24, 2**26, 2**28, 2**30, 2**32),
    host_sizes=(2**20, 2**26, 2**30),
    sustained_s=1.1,
    short_s=0.25,
    calibration_s=(40.0, 25.0),
    round_budget_s=8.0,
    rounds=(6, 20),
    steps=4,
)

SMALL_GPT = language("gpt_small", hidden=192, layers=6, heads=6, vocab=256, seq=64)

REHEARSED = Scope(
    profile_name="rehearsal-cpu",
    precisions=("fp32",),
    fewer=2,
    calibrated=(
        (ModelSpec(name="resnet_small"), (2, 8)),
        (ModelSpec(name="gpt_small"), (2, 8)),
        (ModelSpec(name="vgg_small"), (2, 8)),
    ),
    held_out=(
        asked("vit_small", ModelSpec(name="vit_small"), 4, compiled=True),
        asked("bert_small", ModelSpec(name="bert_small"), 4),
        asked("gpt_medium", SMALL_GPT, 4),
        asked("resnet_small", ModelSpec(name="resnet_small"), 4, held_out=False),
    ),
    microbatched=(replace(asked("vit_small", ModelSpec(name="vit_small"), 8), microbatches=4),),
    recomputed=(replace(asked("gpt_medium", SMALL_GPT, 4), recompute="full"),),
    products=(*squares((128, 64)), *transformer_products(64, 96, 256)[:2]),
    copy_sizes=(2**16, 2**20),
    host_sizes=(2**16,),
    sustained_s=0.02,
    short_s=0.01,
    calibration_s=(2.0, 2.0),
    round_budget_s=1.5,
    rounds=(6, 8),
    steps=2,
    quick_calibration=True,
    patience=0.5,
)
