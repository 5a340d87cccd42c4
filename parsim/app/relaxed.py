"""Training whose replicas or stages are not synchronous: the step size beside what is known to converge, ways of synchronising
ranked by simulated seconds to an accuracy, and mixing graphs compared on virtual replicas (DBench).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsim.app.config import Question
from parsim.app.doctor import Say, progress
from parsim.errors import ConfigError, MissingDependencyError, ParsimError, near_matches
from parsim.model.catalogue.zoo import ZOO
from parsim.plans.convergence import StepCondition, step_condition
from parsim.plans.plan import Plan
from parsim.plans.synchronisation import ALL_REDUCE, Synchronisation, parse_synchronisation
from parsim.predict.evaluate import Evaluation, simulated_step
from parsim.predict.problem import PlanningProblem
from parsim.predict.result import PlanResult
from parsim.report.picture import plotted
from parsim.report.tables import ReportTable, columns_of, frame, to_text
from parsim.search.relaxed import relaxed_search
from parsim.units import format_seconds

if TYPE_CHECKING:
    import pandas as pd

    from parsim.relaxed.replicas import LearntSteps

MOMENTUM = {"sgd": 0.0, "sgd_momentum": 0.9}
"""Optimizers whose step is a learning rate times a sum of gradients, and their momentum where none is given."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSize:
    """Attributes: condition: of the rule. question: with the learning rate and the optimizer."""

    question: Question
    plan: Plan
    condition: StepCondition

    @property
    def learning_rate(self) -> float:
        return self.question.training.resolved_learning_rate

    @property
    def momentum(self) -> float | None:
        """Of SGD; None: the optimizer scales its steps by what it has seen."""
        training = self.question.training
        usual = MOMENTUM.get(training.optimizer)
        given = dict(training.optimizer_args).get("momentum", usual)
        return float(given) if usual is not None and isinstance(given, int | float) else None

    @property
    def step(self) -> float | None:
        """eta that the conditions are about: with momentum b a gradient moves the weights by lr / (1 - b) in all."""
        return None if self.momentum is None else self.learning_rate / (1.0 - self.momentum)

    @cached_property
    def curvature(self) -> tuple[float, int] | None:
        """L of the loss at the first weights and the samples it was measured on; None: the model cannot be run here and now."""
        if self.step is None:
            return None
        from parsim.app.learners import first_curvature

        try:
            return first_curvature(self.question)
        except MissingDependencyError:
            return None

    @property
    def times_safe(self) -> float | None:
        """The step over the largest safe one; None where either is not known."""
        if self.step is None or self.condition.safe is None or not self.curvature:
            return None
        return self.step * self.curvature[0] / self.condition.safe

    def lines(self) -> list[str]:
        """Sentences for people."""
        condition = self.condition
        until = "diverge beyond" if condition.is_exact else "converge up to"
        known = [
            "" if condition.safe is None else f"safe up to {condition.safe:.3g}/L, where synchronous training has 1/L",
            "" if condition.limit is None else f"quadratic losses {until} {condition.limit:.3g}/L",
            condition.why,
        ]
        terms = f" ({terms})" if (terms := condition.terms()) else ""
        text = f"Step size of {self.plan.synchronisation}{terms}: {'; '.join(filter(None, known))}."
        lines = [f"{text} L is the largest curvature of the loss."]
        if condition.safe is None and condition.limit is None:
            return [text]
        if self.step is None:
            return [f"{lines[0]} {self.question.training.optimizer} scales its steps, so the bound does not apply to it."]
        return [lines[0], self._of_this_rate()]

    def _of_this_rate(self) -> str:
        """`Safe step size here: 0.012, with L = 19 at the first weights (512 samples); yours, 0.1, is 8.3 times that.`"""
        condition, step = self.condition, self.step
        assert step is not None
        yours = f"{self.learning_rate:g}" + (f" / (1 - {self.momentum:g}) = {step:.3g}" if self.momentum else "")
        reach, word = (condition.limit, "stable") if condition.safe is None else (condition.safe, "safe")
        assert reach is not None
        if not self.curvature:
            return f"Your step size, {yours}, is {word} while L is at most {reach / step:.3g}."
        curvature, samples = self.curvature
        ratio = step * curvature / reach
        text = (
            f"{word.capitalize()} step size here: {reach / curvature:.3g}, with L = {curvature:.3g} at the first weights "
            f"({samples} samples); yours, {yours}, is {ratio:.2g} times that."
        )
        if condition.limit is not None and step * curvature > condition.limit:
            text += f" It is also beyond {condition.limit / curvature:.3g}, where quadratic losses of this curvature diverge."
        return text

    def warnings(self) -> list[str]:
        """What is said of a step beyond the safe one, or beyond what quadratic losses bear."""
        curvature, step, limit = self.curvature, self.step, self.condition.limit
        beyond = curvature and step and limit is not None and step * curvature[0] > limit
        return self.lines()[-1:] if beyond or (self.times_safe or 0.0) > 1.0 else []

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "learning_rate": self.learning_rate,
            "momentum": self.momentum,
            "step": self.step,
            "curvature": None if self.curvature is None else self.curvature[0],
            "curvature_samples": None if self.curvature is None else self.curvature[1],
            "times_safe": self.times_safe,
            **self.condition.to_dict(),
        }


def step_size(question: Question, plan: Plan) -> StepSize | None:
    """Of a relaxed plan; None for synchronous training."""
    if not plan.synchronisation.is_relaxed:
        return None
    condition = step_condition(plan.synchronisation, replicas=plan.mesh.dp, stages=plan.mesh.pp)
    return StepSize(question=question, plan=plan, condition=condition)


# Ways of synchronising, ranked: seconds of a step times the steps that replicas need to an accuracy.


RULES = (
    "average/4",
    "average/16",
    "average/16 outer=nesterov:0.7:0.9",
    "gossip/1 ring",
    "gossip/1 one_peer_exponential",
    "merge/4",
    "stale",
)
"""Tried beside synchronous training, unless others are given."""
SEEDS = 3
MOST_STEPS = 2000
WIDTH_OF_90 = 3.29
"""Of a normal distribution's middle 90%, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of training, and when it gets to the accuracy.

    Attributes:
        rule: of synchronisation. result: its fastest plan that fits; None: it has none, and `reason` says why.
        learnt: steps on virtual replicas; None without a plan.
        phases: of a graph that changes (Ada), how many steps each one lasts and the seconds of its step; the last one stays.
    """

    rule: Synchronisation
    result: PlanResult | None = None
    learnt: LearntSteps | None = None
    reason: str = ""
    phases: tuple[tuple[int, float], ...] = ()

    def seconds_after(self, steps: float) -> float:
        """Simulated, of the first `steps` steps."""
        if self.result is None:
            raise ConfigError(f"{self.rule} has no plan: {self.reason}")
        if not self.phases:
            return steps * self.result.step_s.median
        seconds, remaining = 0.0, steps
        for lasts, step_s in self.phases[:-1]:
            seconds += min(remaining, lasts) * step_s
            remaining -= min(remaining, lasts)
        return seconds + remaining * self.phases[-1][1]

    @property
    def seconds(self) -> float | None:
        """Simulated, to the accuracy; None: it is not reached, or there is no plan."""
        if self.result is None or self.learnt is None or self.learnt.steps is None:
            return None
        return self.seconds_after(self.learnt.steps)

    @property
    def log_deviation(self) -> float | None:
        """Standard deviation of log(seconds of runs / predicted): of the step's interval, and of the median steps over as many
        other seeds. None: not every seed reaches it, or there is no plan."""
        if self.result is None or self.learnt is None or any(course.steps is None for course in self.learnt.courses):
            return None
        steps = [math.log(course.steps) for course in self.learnt.courses if course.steps]
        of_median = math.sqrt(math.pi / 2.0 / len(steps))  # of a normal sample's median, in deviations of one value
        among_seeds = statistics.stdev(steps) * of_median * math.sqrt(2.0) if len(steps) > 1 else 0.0
        step_s = self.result.step_s
        return math.hypot(among_seeds, math.log(step_s.p95 / step_s.p05) / WIDTH_OF_90)

    def curve(self) -> list[tuple[float, float]]:
        """(simulated seconds, score) of the first seed."""
        if self.result is None or self.learnt is None:
            return []
        return [(self.seconds_after(step), score) for step, score in self.learnt.courses[0].scores]

    def line(self) -> str:
        """`gossip/1 ring: 12 s = 120 steps of 100 ms (110 to 135), learning rate 0.4`."""
        if self.result is None or self.learnt is None:
            return f"{self.rule}: no plan ({self.reason})"
        best = self.learnt.best
        plan = f"{self.result.plan.summary()}, learning rate {self.learnt.learning_rate:g}"
        if self.seconds is None or self.learnt.steps is None:
            when = f"{format_seconds(self.seconds_after(best.best_step))} ({best.best_step} steps)"
            return f"{self.rule}: not reached; {best.best:.3f} at most, after {when}; {plan}"
        low, high = self.learnt.spread
        among = f"{low} to {'not reached' if high is None else high}"
        return (
            f"{self.rule}: {format_seconds(self.seconds)} = {self.learnt.steps:.0f} steps ({among}) of "
            f"{format_seconds(self.seconds / self.learnt.steps)}{' on average' if self.phases else ''}; {plan}"
        )

    def to_dict(self) -> dict[str, Any]:
        learnt = self.learnt
        return {
            "synchronisation": str(self.rule),
            "seconds": self.seconds,
            "steps": None if learnt is None else learnt.steps,
            "steps_by_seed": [] if learnt is None else [course.steps for course in learnt.courses],
            "best_score": None if learnt is None else learnt.best.best,
            "best_score_step": None if learnt is None else learnt.best.best_step,
            "learning_rate": None if learnt is None else learnt.learning_rate,
            "step_s": None if self.result is None else self.result.step_s.to_dict(),
            "plan_summary": None if self.result is None else self.result.plan.summary(),
            "log_deviation": self.log_deviation,
            "curve": self.curve(),
            "reason": self.reason or None,
        }


def sooner_probability(one: Contender, other: Contender) -> float | None:
    """That `one` reaches the accuracy before `other` in runs: both times lognormal and independent, which is too doubtful
    where the same prices are wrong for both. None where a time or its doubt is not known."""
    if one.seconds is None or other.seconds is None or one.log_deviation is None or other.log_deviation is None:
        return None
    doubt = math.hypot(one.log_deviation, other.log_deviation)
    return statistics.NormalDist(0.0, max(doubt, 1e-9)).cdf(math.log(other.seconds / one.seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRanking:
    """Attributes: target: the accuracy. learner: what learnt, in words. contenders: the soonest first, unreached ones last."""

    target: float
    learner: str
    contenders: tuple[Contender, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, under `to_target`."""
        contenders = [contender.to_dict() for contender in self.contenders]
        return {"target_accuracy": self.target, "learner": self.learner, "contenders": contenders}

    def lines(self) -> list[str]:
        """Sentences for people."""
        first = self.contenders[0]
        winner = f"{first.rule} first" if first.seconds is not None else "no way reaches it"
        if len(self.contenders) > 1 and (probability := sooner_probability(*self.contenders[:2])) is not None:
            winner += f", sooner than {self.contenders[1].rule} with a probability of {probability:.0%}"
        heading = f"Time to test accuracy {self.target:g}: {winner}. Steps were counted on {self.learner}."
        return [heading, *(f"  {contender.line()}" for contender in self.contenders)]

    def figure(self) -> Any:
        """Accuracy over simulated seconds, a plotly Figure."""
        from parsim.report.figures import target_figure

        curves = {str(contender.rule): contender.curve() for contender in self.contenders}
        return target_figure(curves, self.target, f"Test accuracy of {self.learner}")


def to_target(
    question: Question,
    problem: PlanningProblem,
    best: Evaluation,
    target: float,
    *,
    rules: Sequence[str] = RULES,
    seeds: int = SEEDS,
    most_steps: int = MOST_STEPS,
    say: Say | None = None,
) -> TargetRanking:
    """Rank synchronous training and relaxed rules by seconds to an accuracy.

    Args:
        question: without a relaxed rule. problem: loaded from it. best: of its fastest plan, which trains synchronously.
        target: test accuracy, between 0 and 1. rules: to compare, as `plan.synchronisation` takes them.
        seeds: trainings of each. most_steps: after which one is given up. say: is told of every rule that has been trained.
    Raises: ConfigError: a target that is none, or a question that asks for a relaxed rule itself. PlanError: a rule that is
        none.
    """
    from parsim.app.learners import learner_of

    compared = [ALL_REDUCE, *asked_rules(target, rules)]
    if seeds < 1:
        raise ConfigError(f"steps are counted over at least one seed, got {seeds}")
    if problem.constraints.synchronisation.is_relaxed:
        raise ConfigError(
            f"the question asks for synchronisation {problem.constraints.synchronisation} already; leave "
            "plan.synchronisation out, or add --set plan.synchronisation=all_reduce, and every way is compared"
        )
    planned = [_planned(problem, best, rule, most_steps) for rule in compared]
    replicas = max((contender.result.plan.mesh.dp for contender in planned if contender.result is not None), default=1)
    learner = learner_of(question, problem.model, replicas)
    contenders = []
    for number, contender in enumerate(planned, 1):
        if contender.result is not None:
            try:
                learnt = learner.steps_to(target, contender.result.plan, contender.rule, range(seeds), most_steps)
                contender = replace(contender, learnt=learnt)
            except ParsimError as error:
                contender = replace(contender, result=None, reason=str(error))
        contenders.append(contender)
        if say is not None:
            say(f"{number} of {len(planned)} ways: {contender.line()}")

    def place(contender: Contender) -> tuple[bool, float, bool, float]:
        score = 0.0 if contender.learnt is None else contender.learnt.best.best
        return contender.seconds is None, contender.seconds or 0.0, contender.result is None, -score

    return TargetRanking(target=target, learner=learner.words, contenders=tuple(sorted(contenders, key=place)))


def asked_rules(target: float, rules: Sequence[str]) -> list[Synchronisation]:
    """The relaxed rules to compare, each once; arguments and errors as `to_target`. A command calls it before it plans."""
    if not 0 < target < 1:
        raise ConfigError(f"a target accuracy lies between 0 and 1, got {target:g}; give 0.95 for 95%")
    return list(dict.fromkeys(rule for text in rules if (rule := parse_synchronisation(text)).is_relaxed))


def _planned(problem: PlanningProblem, best: Evaluation, rule: Synchronisation, most_steps: int) -> Contender:
    chosen: Evaluation | None = best
    if rule.is_closed_loop:
        return Contender(rule=rule, reason="how long each graph of a closed loop lasts is known only as it trains; use linear")
    if rule.is_relaxed:
        problem = replace(problem, constraints=replace(problem.constraints, synchronisation=rule))
        try:
            chosen = relaxed_search(problem, ("adaptive",)).chosen
        except ParsimError as error:
            return Contender(rule=rule, reason=str(error))
    if chosen is None or not chosen.result.fits:
        return Contender(rule=rule, reason="no plan fits")
    plan = chosen.result.plan
    # Of Ada per graph how many steps it lasts, and the seconds of its step: a target may be reached on its first graphs.
    # Graphs that begin after `most_steps` are left out, since no training comes to them.
    phases: list[tuple[int, float]] = []
    for rounds, graph in rule.mixing.phases(plan.mesh.dp) if rule.graph else ():
        if sum(steps for steps, _ in phases) >= most_steps:
            break
        step_s = simulated_step(problem, replace(plan, synchronisation=replace(rule, graph=graph))).step_s
        phases.append((rounds * rule.period_steps, step_s))
    return Contender(rule=rule, result=chosen.result, phases=tuple(phases))


# `parsim.bench_graphs`: how accuracy and the variance between replicas depend on graph, replicas, model and shards.


BENCH_COLUMNS = (
    *("model", "n", "sharding", "way", "seeds", "score", "score_deviation", "mean_replica_score", "connections", "sent_bytes"),
    *("final_consensus", "consensus", "coefficient_of_variation", "dispersion_index", "gini", "quartile_coefficient"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphBench:
    """The result of `parsim.bench_graphs`.

    Attributes:
        tables: by name. `dbench`: a row per model, replicas, shards and graph. `dbench_ranks`, `dbench_relations`: Kendall's
            tau of scores with connections and with each metric. `dbench_tensors`: the metrics of every tensor.
    """

    tables: dict[str, list[dict[str, Any]]]

    def table(self) -> pd.DataFrame:
        """A row per model, number of replicas (n), shards and graph (way): scores, connections, bytes and the metrics."""
        return frame(self.tables["dbench"], BENCH_COLUMNS)

    def findings(self) -> list[str]:
        """Sentences: what more replicas cost, and how accuracy goes with connections and with the variance of replicas."""
        lines, rows = [], self.tables["dbench"]
        sizes = sorted({row["n"] for row in rows})
        kinds = list(dict.fromkeys((row["model"], row["sharding"]) for row in rows))
        for model, sharding in kinds if len(sizes) > 1 else ():
            lost = {
                way: next(_cells(rows, model, sharding, sizes[0], way)) - next(_cells(rows, model, sharding, sizes[-1], way))
                for way in dict.fromkeys(row["way"] for row in rows)
            }
            words = ", ".join(f"{way} {-value:+.3f}" for way, value in lost.items())
            lines.append(f"{model}, {sharding}: accuracy from {sizes[0]} to {sizes[-1]} replicas: {words}")
        related = self.tables["dbench_relations"]
        for sharding in dict.fromkeys(row["sharding"] for row in related):
            own = [row for row in related if row["sharding"] == sharding]
            taus = {name: _mean([row for row in own if row["of"] == name]) for name in dict.fromkeys(row["of"] for row in own)}
            words = ", ".join(f"{name.replace('_', ' ')} {score:+.2f} ({alone:+.2f})" for name, (score, alone) in taus.items())
            lines.append(f"{sharding}: Kendall's tau of accuracy (of the replicas' own accuracy) with {words}")
        return lines

    def report(self) -> ReportTable:
        """The rows as texts."""
        columns = columns_of(
            *("model", "shards", "graph", "replicas", "averaged", "replicas' own", "connections", "distance", "Gini"),
            words=("model", "shards", "graph"),
        )
        rows = tuple(
            (
                row["model"],
                row["sharding"],
                row["way"],
                str(row["n"]),
                f"{row['score']:.3f}" + (f" ± {row['score_deviation']:.3f}" if row["seeds"] > 1 else ""),
                f"{row['mean_replica_score']:.3f}",
                f"{row['connections']:.1f}",
                f"{row['final_consensus']:.3g}",
                f"{row['gini']:.3g}",
            )
            for row in self.tables["dbench"]
        )
        notes = (
            "averaged: accuracy of the mean weights; replicas' own: the mean of theirs",
            "distance: mean squared distance to the mean weights at the end; Gini: of the norms of tensors, before mixing",
        )
        return ReportTable(title="", columns=columns, rows=rows, notes=notes)

    def plot(self, path: str | Path | None = None) -> Any:
        """Accuracy of the averaged model against the distance of replicas, a panel per kind of shards, a colour per graph.

        Args:
            path: also write the picture, as PNG, SVG or PDF by its ending. Result and errors as for `Answer.plot`.
        """
        from parsim.report.figures import scatter_figure

        shards = list(dict.fromkeys(row["sharding"] for row in self.tables["dbench"]))
        points = {
            sharding: [
                (row["way"], row["consensus"], row["score"]) for row in self.tables["dbench"] if row["sharding"] == sharding
            ]
            for sharding in shards
        }
        figure = scatter_figure(points, x="distance between replicas (mean over the run)", y="accuracy of the averaged model")
        return plotted(
            figure, "Accuracy against the distance between replicas, by graph (all_reduce, at 0, is not drawn)", path
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**self.tables, "findings": self.findings()}

    def __str__(self) -> str:
        return "\n".join([to_text(self.report()), *self.findings()])


def _cells(rows: Sequence[dict[str, Any]], model: str, sharding: str, n: int, way: str) -> Any:
    wanted = (model, sharding, n, way)
    return (row["score"] for row in rows if (row["model"], row["sharding"], row["n"], row["way"]) == wanted)


def _mean(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    keys = ("tau_with_score", "tau_with_mean_replica_score")
    first, second = (sum(row[key] for row in rows) / len(rows) for key in keys)
    return first, second


def bench_graphs(
    graphs: Sequence[str] = (),
    *,
    models: Sequence[str] = ("mlp",),
    replicas: Sequence[int] = (16,),
    shards: Sequence[str] = ("iid", "label_sorted"),
    seeds: int = 1,
    epochs: int = 20,
    batch: int = 8,
    dataset: str = "digits",
    root: str | None = None,
) -> GraphBench:
    """Train virtual replicas of image models over several graphs, and relate accuracy to the variance of their parameters
    (DBench).

    Args:
        graphs: "all_reduce" (centralised), "ring", "lattice(neighbours=4)", "ada" and others of `plan.synchronisation.graph`,
            or whole rules such as "average/8"; left out: seven usual ones.
        models: "logistic", "mlp", "cnn" and "transformer" on digits of 8 x 8, or of the zoo: "resnet_small", "vit_small".
        replicas: how many, one bench each. shards: as `training.shards`. seeds: trainings of each. epochs: over all samples.
        batch: samples per replica and step. dataset: of models of the zoo, as `training.dataset`: "cifar10" from the folder
            `root`.

    Raises:
        ConfigError: an unknown model, or fewer than two graphs. PlanError, DataError, AlgorithmError: graphs, shards or
            replicas that cannot be. MissingDependencyError: without torch or scikit-learn.
    """
    from parsim.app.learners import bench_training
    from parsim.relaxed.dbench import GRAPHS, MODELS, bench_tables, run_bench

    trainings, known = {}, {*MODELS, *ZOO}
    for name in models:
        if name not in known:
            raise ConfigError(f"unknown model {name!r} of the graph bench{near_matches(name, sorted(known))}")
        if dataset != "digits" and name not in ZOO:
            raise ConfigError(f"{name} is made for digits of 8 x 8; on {dataset} train resnet_small or another of the zoo")
        is_small = dataset == "digits" and name in MODELS
        trainings[name] = MODELS[name] if is_small else bench_training(name, dataset, root)
    compared = tuple(dict.fromkeys(graphs or GRAPHS))
    if len(compared) < 2:
        raise ConfigError(f"graphs are compared, and {', '.join(compared)} is one; add another, for example all_reduce")
    with progress("Training virtual replicas") as say:
        runs = run_bench(
            trainings,
            compared,
            replicas=replicas,
            shards=shards,
            seeds=range(seeds),
            epochs=epochs,
            batch=batch,
            say=say,
        )
    return GraphBench(tables=bench_tables(runs))
