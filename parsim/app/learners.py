"""Who learns when ways of synchronising are compared: the model asked for, where replicas of it can train, or a stand-in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from parsim.app.config import Question
from parsim.data import dataset_for, target_of
from parsim.data.samples import BatchOrder
from parsim.data.shards import ShardedOrder, deal
from parsim.errors import AlgorithmError, DataError, ModelError
from parsim.execute.stage import seeded_module
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.plan import Plan
from parsim.plans.synchronisation import Synchronisation
from parsim.program.passes.rounds import fragments_of
from parsim.program.placed import PlanIndex
from parsim.relaxed.problems import LearningProblem, load_problem, perceptron
from parsim.relaxed.replicas import (
    LOCAL_OPTIMIZERS,
    LearningCourse,
    LearntSteps,
    LocalOptimizer,
    LocalTraining,
    SampleOrder,
    check_room,
    course_to,
    learnt_steps,
)

HIDDEN = (64,)
RATES = (0.1, 0.2, 0.4)
"""Of the stand-in: each way of synchronising takes the best of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Learner:
    """Attributes:
    words: what it is, for people. problem: the data. question, model: whose module learns; None for the stand-in.
    optimizer: with the question's learning rate. rates: to try. batch: samples of all replicas per step. shards: how they are
    dealt to replicas; None: not.
    """

    words: str
    problem: LearningProblem
    question: Question | None
    model: Model | None
    optimizer: str
    rates: tuple[float, ...]
    batch: int
    shards: str | None = None

    def training(self, rate: float, seed: int) -> LocalTraining:
        """The model with this seed's first weights."""
        optimizer = LocalOptimizer(kind=self.optimizer, learning_rate=rate)
        if self.question is None:
            module: nn.Module = perceptron(self.problem, HIDDEN, seed=seed)
        else:
            module = module_of(self.question.model_spec, seed)
        return LocalTraining(module, self.problem, optimizer)

    def steps_to(self, target: float, plan: Plan, rule: Synchronisation, seeds: Sequence[int], most_steps: int) -> LearntSteps:
        """Steps to a score over seeds (of weights and order), at the best learning rate, under a plan of the rule.

        Raises: AlgorithmError: so many replicas do not fit, or the stand-in has fewer layers than the plan has stages.
        """
        parts = self._stages(plan) if rule.is_stale else self._fragments(plan) if rule.fragments > 1 else ()
        replicas = plan.mesh.dp if rule.mixes else 1

        def course(rate: float, seed: int, most: int) -> LearningCourse:
            order = self._order(plan.mesh.dp, seed)
            training = self.training(rate, seed)
            return course_to(target, rule, replicas, training, order, most_steps=most, parts=parts)

        return learnt_steps(course, self.rates, seeds, most_steps)

    def _order(self, replicas: int, seed: int) -> SampleOrder:
        if self.shards is None:
            return BatchOrder(n=len(self.problem), global_batch=self.batch, seed=seed)
        shards = deal(self.shards, self.problem.targets.flatten().numpy(), replicas, seed=seed)
        return ShardedOrder(shards=shards, global_batch=self.batch, seed=seed)

    def _stages(self, plan: Plan) -> tuple[tuple[str, ...], ...]:
        """The parameters of each stage: as the plan has them, or the stand-in's layers in as many parts."""
        if self.model is not None:
            held = {each.name: [parameter.name for parameter in each.parameters] for each in self.model.components}
            return tuple(
                tuple(dict.fromkeys(name for part in stage.components for name in held[part])) for stage in plan.stages
            )
        layers = self._layers()
        if plan.mesh.pp > len(layers):
            raise AlgorithmError(
                f"the plan has {plan.mesh.pp} stages, and the stand-in that learns has {len(layers)} layers; set plan.mesh.pp "
                f"to {len(layers)} at most, or ask about a model that classifies digits"
            )
        parts = np.array_split(np.arange(len(layers)), plan.mesh.pp)
        return tuple(tuple(name for layer in part for name in layers[layer]) for part in parts)

    def _layers(self) -> list[list[str]]:
        layers: dict[str, list[str]] = {}
        for name, _ in self.training(self.rates[0], 0).tensors:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        return list(layers.values())

    def _fragments(self, plan: Plan) -> tuple[tuple[str, ...], ...]:
        """The parameters of each fragment: as the plan has them, or the stand-in's layers in turn."""
        if self.model is not None:
            return fragments_of(PlanIndex(plan, self.model))
        layers, fragments = self._layers(), plan.synchronisation.fragments
        if fragments > len(layers):
            raise AlgorithmError(
                f"the plan has {fragments} fragments, and the stand-in that learns has {len(layers)} layers; set fragments to "
                f"{len(layers)} at most, or ask about a model that classifies digits"
            )
        return tuple(tuple(itertools.chain.from_iterable(layers[turn::fragments])) for turn in range(fragments))


def learner_of(question: Question, model: Model, replicas: int) -> Learner:
    """The model asked for, if it trains on digits without buffers or randomness and so many replicas fit; else the stand-in.

    Raises: AlgorithmError: the digits have fewer samples than replicas.
    """
    training, batch = question.training, question.training.global_batch
    why = why_not(question, replicas)
    if not why:
        keys = [f"training.{key}" for key in LEFT_OUT if getattr(training, key)]
        left_out = f" without its {' and '.join(keys)}" if keys else ""
        return Learner(
            words=f"{question.model.name} on digits, the model asked for{left_out}",
            problem=problem_for(question.model_spec),
            question=question,
            model=model,
            optimizer=training.optimizer,
            rates=(training.resolved_learning_rate,),
            batch=batch,
            shards=training.shards,
        )
    problem = load_problem("digits")
    each = min(batch, len(problem)) // replicas
    if each < 1:
        raise AlgorithmError(
            f"{replicas} replicas share {len(problem)} samples of digits, and each needs one a step: use fewer"
        )
    width = "-".join(map(str, (problem.features, *HIDDEN, problem.outputs)))
    stand_in = f"the digits MLP ({width}), {each * replicas} samples a step, sgd: a stand-in for {question.model.name}"
    return Learner(
        words=f"{stand_in}, because {why}",
        problem=problem,
        question=None,
        model=None,
        optimizer="sgd",
        rates=RATES,
        batch=each * replicas,
    )


CURVATURE_SAMPLES = 512


def first_curvature(question: Question) -> tuple[float, int] | None:
    """L of the model asked for at its first weights, and on how many samples; None where it cannot learn as replicas do."""
    if why_not(question, 1):
        return None
    problem = problem_for(question.model_spec)
    training = LocalTraining(module_of(question.model_spec, question.training.seed), problem, LocalOptimizer())
    samples = np.arange(min(CURVATURE_SAMPLES, len(problem)))
    return training.curvature(training.start, samples), len(samples)


LEFT_OUT = ("optimizer_args", "weight_decay", "schedule", "clip_norm")
"""Keys of [training] that change what is learnt, and that virtual replicas do not know."""


def why_not(question: Question, replicas: int) -> str:
    """Why the model asked for cannot learn as so many virtual replicas; "" if it can."""
    training = question.training
    if training.dataset != "digits":
        return f"its data are {training.dataset}, and replicas train on digits"
    if training.optimizer not in LOCAL_OPTIMIZERS:
        return f"virtual replicas know no optimizer {training.optimizer}"
    if training.groups:
        return "virtual replicas update all parameters by one optimizer"
    if question.source.form != "name":
        return "it was given as a value"
    try:
        if training.global_batch > len(problem_for(question.model_spec)):
            return "its batch is larger than the data"
    except (DataError, ModelError) as error:
        return str(error)
    module = module_of(question.model_spec, 0)
    if any(True for _ in module.buffers()) or any(isinstance(each, nn.Dropout) and each.p > 0 for each in module.modules()):
        return "it has running statistics or dropout"
    weight_bytes = sum(value.numel() * value.element_size() for value in module.parameters())
    try:
        check_room(replicas, weight_bytes)
    except AlgorithmError as error:
        return str(error)
    return ""


def module_of(spec: ModelSpec, seed: int) -> nn.Module:
    """The module with the weights that a run with this seed begins with."""
    return seeded_module(spec, seed, torch.float32, torch.device("cpu"))


BENCH_OPTIMIZER = LocalOptimizer(kind="sgd_momentum", learning_rate=0.05)


def bench_training(name: str, dataset: str, root: str | None) -> Callable[[int], LocalTraining]:
    """By seed, a model of the zoo without dropout on images of a dataset as it takes them; SGD .05 with momentum .9.

    Raises: DataError: it does not classify images, or has too few classes. ModelError: an unknown model.
    """
    spec = ModelSpec(name=name)
    problem = problem_for(spec, dataset, root)

    def of_seed(seed: int) -> LocalTraining:
        return LocalTraining(module_of(spec, seed), problem, BENCH_OPTIMIZER)

    return of_seed


def problem_for(spec: ModelSpec, dataset: str = "digits", root: str | None = None) -> LearningProblem:
    """Images as the model takes them; the order of samples is that of a run.

    Raises: DataError: the model does not classify images, or the files are not there.
    """
    if target_of(spec).task != "classify":
        raise DataError(f"{spec.name} does not classify images")
    tensors: list[torch.Tensor] = []
    for split in ("train", "test"):
        data = dataset_for(spec, dataset, root=root, split=split)
        values = data.values(np.arange(len(data)))
        tensors += [torch.from_numpy(values["input:0"]).float(), torch.from_numpy(values["target"]).long()]
    inputs, targets, test_inputs, test_targets = tensors
    return LearningProblem(
        name=dataset,
        inputs=inputs,
        targets=targets,
        test_inputs=test_inputs,
        test_targets=test_targets,
        outputs=int(targets.max()) + 1,
    )
