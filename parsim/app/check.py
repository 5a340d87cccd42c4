"""Does a training fit, how fast is it, and what would change that: the question asked again with other keys or clusters.

`check` prices changes of keys that would help (where the plan was searched for, its mesh stays). `largest` bisects a size.
`what_would` searches on changed clusters, one change at a time.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

from pydantic import BaseModel

from parsim.app.answer import Answer, Largest
from parsim.app.ask import ask, ask_alone, whole, with_assumed_framework
from parsim.app.config import INNER_AXES, LargestOf, Question, question_from
from parsim.app.doctor import progress
from parsim.app.load import cluster_of
from parsim.app.prediction import Prediction
from parsim.app.question import assumed_text
from parsim.app.sections import MOST_SAMPLES
from parsim.errors import ConfigError, DoesNotFitError, ParsimError
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.parts import Network
from parsim.hardware.profile import Profile
from parsim.model.catalogue.names import MOST_TOKENS, is_transformer, sequence_of, shape_of
from parsim.model.formats import number_format, operator_precision
from parsim.model.spec import MOST_LAYERS
from parsim.plans.plan import AUTO, NONE, SELECTIVE, Plan, plan_in_words
from parsim.predict.breakdown import model_flop, tokens_per_sample
from parsim.predict.memory import FIT_PROBABILITY, SAFE_PROBABILITY
from parsim.units import format_bytes, format_percent

FITS, UNCERTAIN, DOES_NOT_FIT = "fits", "uncertain", "does not fit"
EXIT_STATUS = {FITS: 0, DOES_NOT_FIT: 3, UNCERTAIN: 4}
"""Of a check, and of a plan that must fit. 1 and 2 are errors."""
SHOWN = 3
WORTH_SAYING = 0.01
"""Part of samples per second, or of the memory, below which a change does not help."""
MANY_ROUNDS = 100
"""Microbatches by stages, above which the batch is large enough."""
LAYERS = "h.*"
"""The layers of a transformer by name."""


def verdict_of(fit_probability: float) -> str:
    """Whether memory suffices: with 95%, more likely than not, or not."""
    if fit_probability >= SAFE_PROBABILITY:
        return FITS
    return UNCERTAIN if fit_probability >= FIT_PROBABILITY else DOES_NOT_FIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """A change and its effect.

    Attributes: what: in words. settings: keys of a run file. prediction: with the change. faster: tokens (of other models
        samples) per second over those of the question, less one.
    """

    what: str
    settings: Mapping[str, object]
    prediction: Prediction
    faster: float

    @property
    def needed_bytes(self) -> int:
        """On the fullest device, to fit with 95%."""
        return needed_bytes(self.prediction)

    @property
    def options(self) -> str:
        """`--set plan.zero_stage=3`."""
        texts = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in self.settings.items()]
        return " ".join(f"--set {shlex.quote(text)}" for text in texts)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "change": self.what,
            "settings": dict(self.settings),
            "faster": self.faster,
            "step_s": self.prediction.step_s.median,
            "fit_probability": self.prediction.fit_probability,
            "needed_bytes": self.needed_bytes,
        }

    def line(self) -> str:
        """`ZeRO 3 instead of 1: fits with 99.2%, 4% slower (--set plan.zero_stage=3)`."""
        chance = self.prediction.fit_probability
        memory = f"fits with {_chance(chance)}" if chance >= FIT_PROBABILITY else f"needs {format_bytes(self.needed_bytes)}"
        speed = "as fast"
        if abs(self.faster) >= WORTH_SAYING:
            speed = f"{abs(self.faster):.0%} {'faster' if self.faster > 0 else 'slower'}"
        return f"{self.what}: {memory}, {speed} ({self.options})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of `parsim.check`; `print` shows it.

    Attributes: prediction: of the plan that was asked for, or chosen. helps: at most three changes, the most helpful first.
    """

    prediction: Prediction
    helps: tuple[Help, ...]

    @property
    def verdict(self) -> str:
        """ "fits" (with 95%), "uncertain" (more likely than not) or "does not fit"."""
        return verdict_of(self.prediction.fit_probability)

    @property
    def exit_status(self) -> int:
        """Of `parsim check`: 0, 4 or 3."""
        return EXIT_STATUS[self.verdict]

    @property
    def mfu(self) -> float | None:
        """Model FLOP per second over the peak of all devices of the plan; None where the device has no peak for the
        precision."""
        problem, prediction = self.prediction.problem, self.prediction
        precision = operator_precision(problem.numerics.precision, "matmul")
        used = [device.type.peak_flop_per_s for device in problem.cluster.devices[: prediction.plan.world_size]]
        if any(precision not in peaks for peaks in used):
            return None
        flop_per_s = model_flop(problem.model) * prediction.throughput_samples_per_s.median
        return flop_per_s / sum(peaks[precision] for peaks in used)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as `parsim check --json` prints it."""
        prediction = self.prediction
        fullest = max(prediction.evaluation.memory, key=lambda rank: rank.total_bytes)
        return {
            "verdict": self.verdict,
            "exit_status": self.exit_status,
            "largest_line": {"name": fullest.worst[0], "size_bytes": fullest.worst[1]},
            "needed_bytes": needed_bytes(prediction),
            "limit_bytes": fullest.limit_bytes,
            "mfu": self.mfu,
            "helps": [each.to_dict() for each in self.helps],
            "assumed": {key: list(value) if isinstance(value, tuple) else value for key, value in prediction.assumed.items()},
            **prediction.to_dict(),
        }

    def lines(self) -> list[str]:
        """One screen."""
        prediction, problem = self.prediction, self.prediction.problem
        plan, recipe = prediction.plan, prediction.question.source.recipe
        fullest = max(prediction.evaluation.memory, key=lambda rank: rank.total_bytes)
        name, size = fullest.worst
        rate, unit = rate_of(prediction), "tokens/s" if tokens_per_sample(problem.model) else "samples/s"
        mfu = f", MFU {format_percent(self.mfu)}" if self.mfu is not None else ""
        begins = {
            FITS: f"Fits, with {_chance(prediction.fit_probability)}",
            UNCERTAIN: f"May not fit: the probability that it does is {_chance(prediction.fit_probability)}",
            DOES_NOT_FIT: f"Does not fit: the probability that it does is {_chance(prediction.fit_probability)}",
        }
        lines = [
            f"{begins[self.verdict]}. {problem.model.name} on {problem.cluster.name}, global batch {problem.global_batch:,}.",
            f"memory: {format_bytes(fullest.total_bytes)} of {format_bytes(fullest.limit_bytes)} on the fullest device, "
            f"{format_bytes(needed_bytes(prediction))} to be 95% sure; the largest line is {name}, {format_bytes(size)}",
            f"speed: {prediction.headline().split(', ')[0]}, {rate:{',.0f' if rate >= 100 else '.3g'}} {unit}{mfu}",
            f"plan: {plan_in_words(plan)}",
        ]
        if self.helps:
            lines += ["What would help:", *(f"  {each.line()}" for each in self.helps)]
        else:
            lines.append("None of the changes that were tried would help.")
        lines += [f"warning: {text}" for text in prediction.warnings]
        lines += [] if recipe is None else recipe.lines()
        return [*lines, *filter(None, [assumed_text(prediction.assumed)])]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def worst_status(found: Sequence[Checked]) -> int:
    """Of several checks: 3 if one does not fit, else 4 if one is uncertain, else 0."""
    return max((each.exit_status for each in found), key=(0, 4, 3).index, default=0)


def _chance(probability: float) -> str:
    """`99.9%`: never rounded up to certainty, or down to none."""
    return f"{min(max(probability, 0.001), 0.999):.1%}"


def rate_of(prediction: Prediction) -> float:
    """Tokens per second, or of other models samples."""
    return (tokens_per_sample(prediction.problem.model) or 1) * prediction.throughput_samples_per_s.median


def needed_bytes(prediction: Prediction) -> int:
    """On the fullest device, to fit with 95%."""
    return max(rank.needed_at(SAFE_PROBABILITY) for rank in prediction.evaluation.memory)


def check_question(question: Question) -> Checked:
    """Answer the question, and price what would help. Raises: as `parsim.app.ask.ask`."""
    answer = whole(ask(question))
    candidates = answer.candidates
    prediction = answer.prediction if answer.fits else min(candidates, key=needed_bytes)
    base = answer.question
    if answer.search is not None:
        base = changed(base, mesh_settings(prediction.plan))
    fits = prediction.is_safe
    helps = []
    for what, settings in _faster(base, prediction) if fits else _smaller(base, prediction):
        helps += _priced(base, prediction, what, settings)
    if not fits and not any(each.prediction.is_safe for each in helps):
        best = sorted(helps, key=lambda each: each.needed_bytes)[:SHOWN]
        for one, other in combinations(best, 2):
            if not one.settings.keys() & other.settings.keys():
                helps += _priced(base, prediction, f"{one.what} and {other.what}", {**one.settings, **other.settings})
    return Checked(prediction=prediction, helps=tuple(_most_helpful(prediction, helps)[:SHOWN]))


def _most_helpful(prediction: Prediction, found: Sequence[Help]) -> list[Help]:
    """Of a plan that fits what is faster and fits; of another one what fits, the fastest first, else what needs less."""
    if prediction.is_safe:
        useful = [each for each in found if each.faster >= WORTH_SAYING and each.prediction.is_safe]
        return sorted(useful, key=lambda each: -each.faster)
    less = (1 - WORTH_SAYING) * needed_bytes(prediction)
    useful = [each for each in found if each.needed_bytes <= less or each.prediction.is_safe]
    return sorted(
        useful, key=lambda each: (not each.prediction.is_safe, -each.faster if each.prediction.is_safe else each.needed_bytes)
    )


def mesh_settings(plan: Plan) -> dict[str, object]:
    """Keys of a run file that ask for the mesh of a plan."""
    sizes = {axis: getattr(plan.mesh, axis) for axis in ("pp", "dp", "tp", "cp", "ep")}
    return {f"plan.mesh.{axis}": size for axis, size in sizes.items() if size > 1 or axis in ("pp", "dp", "tp")}


def changed(question: Question, settings: Mapping[str, object]) -> Question:
    """The question with other keys, checked as a run file is. What was left open and was filled in stays as it was, and so does
    the framework that is guessed.

    Raises: ConfigError: the keys contradict one another.
    """
    source = question.source
    other = question_from(question.to_dict(), settings=settings, where="the changed question")
    return other.sourced(
        name=source.name,
        model=source.model,
        cluster=source.cluster,
        form=source.form,
        recipe=source.recipe,
        guess=question.guess,
    )


def _answered(question: Question, settings: Mapping[str, object]) -> Answer | None:
    """The answer with other keys; None where the question cannot be asked so."""
    try:
        return whole(ask_alone(changed(question, settings)))
    except ParsimError:
        return None


def _priced(question: Question, prediction: Prediction, what: str, settings: Mapping[str, object]) -> list[Help]:
    answer = _answered(question, settings)
    if answer is None:
        return []
    faster = rate_of(answer.prediction) / rate_of(prediction) - 1
    return [Help(what=what, settings=settings, prediction=answer.prediction, faster=faster)]


Change = tuple[str, dict[str, object]]


def _faster(question: Question, prediction: Prediction) -> Iterator[Change]:
    plan, training, given = prediction.plan, question.training, question.plan
    peaks = prediction.problem.cluster.devices[0].type.peak_flop_per_s
    by_name = is_transformer(question.model.name)
    if by_name and number_format(training.precision).weight_bytes == 2 and "fp8" in peaks:
        yield "products in fp8", {"training.precision": "fp8"}
    if given.recompute not in (AUTO, NONE):
        yield "nothing recomputed", {"plan.recompute": NONE}
        if given.recompute != SELECTIVE:
            yield "selective recomputation", {"plan.recompute": SELECTIVE}
    if given.microbatches is not None and plan.microbatches % 2 == 0:
        samples = plan.global_batch // plan.mesh.dp // plan.microbatches
        yield f"microbatches of {2 * samples} instead of {samples}", {"plan.microbatches": plan.microbatches // 2}
    if isinstance(given.zero_stage, int):
        for stage in range(given.zero_stage):
            yield f"ZeRO {stage} instead of {given.zero_stage}", {"plan.zero_stage": stage}
    for axis in ("tp", "pp"):
        yield from _divided(question, plan, axis, "dp")
    if plan.microbatches < MANY_ROUNDS * plan.mesh.pp:  # else what a step has once is less than WORTH_SAYING of it
        yield "a global batch twice as large", _batch(question, plan, 2 * plan.global_batch)


def _smaller(question: Question, prediction: Prediction) -> Iterator[Change]:
    plan, given, args = prediction.plan, question.plan, dict(question.model.args)
    name = question.model.name
    if given.recompute != AUTO:
        layers: object = [LAYERS] if is_transformer(name) else "full"
        if given.recompute == NONE:
            yield "selective recomputation", {"plan.recompute": SELECTIVE}
        if given.recompute != "full":
            yield "layers recomputed", {"plan.recompute": layers}
    if isinstance(given.zero_stage, int) and plan.mesh.dp > 1:
        for stage in range(given.zero_stage + 1, 4):
            yield f"ZeRO {stage} instead of {given.zero_stage}", {"plan.zero_stage": stage}
    samples = plan.global_batch // plan.mesh.dp // plan.microbatches
    if given.microbatches is not None and samples % 2 == 0:
        yield f"microbatches of {samples // 2} instead of {samples}", {"plan.microbatches": 2 * plan.microbatches}
    for axis in ("tp", "pp"):
        yield from _divided(question, plan, "dp", axis)
    if not given.optimizer_offload:
        yield "the optimizer's state in the host's memory", {"plan.optimizer_offload": True}
    if question.training.state_dtype is None:
        yield "an optimizer with states of 8 bits", {"training.state_dtype": "int8"}
    if is_transformer(name) and (seq := sequence_of(name, args)) % 2 == 0:
        yield f"sequences of {seq // 2:,} tokens instead of {seq:,}", {"model.args.seq": seq // 2}
    if question.cluster.nodes > 1:
        nodes = 2 * question.cluster.nodes
        grown: dict[str, object] = {"cluster.nodes": nodes, "plan.mesh.dp": 2 * plan.mesh.dp}
        yield f"{nodes} nodes, with a batch twice as large", {**grown, "training.global_batch": 2 * plan.global_batch}


def _batch(question: Question, plan: Plan, batch: int) -> dict[str, object]:
    """Another batch in microbatches of the same size, where their number is given."""
    settings: dict[str, object] = {"training.global_batch": batch}
    if question.plan.microbatches is not None:
        settings["plan.microbatches"] = plan.microbatches * batch // plan.global_batch
    return settings


def _divided(question: Question, plan: Plan, smaller: str, larger: str) -> Iterator[Change]:
    """The mesh with half of one axis and twice another one, in microbatches of the same size."""
    mesh = plan.mesh
    if question.plan.plan_path is not None or getattr(mesh, smaller) % 2 or question.plan.mesh is None:
        return
    sizes = {axis: getattr(mesh, axis) for axis in ("pp", "dp", "tp")}
    sizes[smaller], sizes[larger] = sizes[smaller] // 2, 2 * sizes[larger]
    settings: dict[str, object] = {f"plan.mesh.{axis}": sizes[axis] for axis in (smaller, larger)}
    if question.plan.microbatches is not None:
        settings["plan.microbatches"] = max(1, plan.microbatches * mesh.dp // sizes["dp"])
    if question.plan.strategy in ("single", "dp", "hp", "mp"):
        inner = any(sizes[axis] > 1 for axis in INNER_AXES if axis in sizes)
        settings["plan.strategy"] = "dp" if not inner else "hp" if sizes["dp"] > 1 else "mp"
    if sizes["pp"] > 1 and question.plan.pipeline_order is None and question.plan.strategy != "custom" and mesh.pp == 1:
        settings["plan.pipeline_order"] = "1f1b"
    if question.plan.stage_layers is not None and sizes["pp"] != mesh.pp:
        layers, stages = sum(question.plan.stage_layers), sizes["pp"] * plan.chunks
        settings["plan.stage_layers"] = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    what = {"tp": "tensor shards", "pp": "pipeline stages", "dp": "replicas"}
    yield f"{what[larger]} {sizes[larger]} and {what[smaller]} {sizes[smaller]}", settings


# The largest batch, sequence or model that fits with 95%, by bisection.
#
# A mesh is kept while its largest size is found. Then the next size is asked of all plans, and if one fits, its mesh is taken.
# Leaves out: sizes that fit although a smaller one does not.


TOKENS_APART = 1024
"""Sequences are tried in steps of so many tokens."""
MOST_MESHES = 8
"""One after the other, each with room for more than the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What is made larger: `step` times a number from 1 to `most`. at: the number of the question as asked.

    Attributes: settings: keys of a run file at a number. noun: what the sizes count.
    """

    noun: str
    step: int
    most: int
    at: int
    settings: Callable[[int], Mapping[str, object]]


def largest(question: Question, what: LargestOf, say: Callable[[str], None] = lambda _: None) -> Answer:
    """The answer for the largest size that fits with 95%, with what it costs in time (`Answer.largest`).

    Args: what: "batch" (in one pass, without gradient accumulation, unless plan.microbatches is given), "seq" or "model" (its
        layers). say: hears what is tried.
    Raises: ConfigError: the model has no such size. DoesNotFitError: not even the smallest fits. And as `parsim.app.ask.ask`.
    """
    if question.plan.plan_path is not None:
        raise ConfigError(f"--largest {what}: the plan of {question.plan.plan_path} is for one batch; name a strategy instead")
    sizes = _SIZES[what](question)
    asked = whole(ask(question))

    def at(number: int, mesh: Mapping[str, object] | None = None) -> Answer | None:
        say(f"{sizes.step * number:,} {sizes.noun}")
        answer = _answered(question, {**sizes.settings(number), **(mesh or {})})
        return answer if answer is not None and answer.fits and answer.prediction.is_safe else None

    starts = ((number, at(number)) for number in dict.fromkeys((sizes.at, 1)))
    number, answer = next(((number, answer) for number, answer in starts if answer is not None), (0, None))
    if answer is None:
        raise DoesNotFitError(
            f"--largest {what}: no plan fits with 95% at {sizes.step:,} {sizes.noun}, the least that was tried. "
            f"{asked.sentence()}"
        )
    for _ in range(MOST_MESHES):
        number = _bisected(sizes, number, partial(at, mesh=mesh_settings(answer.prediction.plan)))
        more = at(number + 1) if number < sizes.most else None
        if more is None:
            break
        number, answer = number + 1, more
    answer = at(number) or answer
    size = Largest(
        what=what,
        size=sizes.step * number,
        above=None if number == sizes.most else sizes.step * (number + 1),
        asked=sizes.step * sizes.at,
        faster=rate_of(answer.prediction) / rate_of(asked.prediction) - 1 if asked.fits else None,
    )
    return replace(with_assumed_framework(answer), largest=size)


def _bisected(sizes: _Sizes, fits: int, does: Callable[[int], object]) -> int:
    """The largest number that fits (a true answer), above one that does. Ctrl-C says what is known by then."""
    low, high = fits, 2 * fits
    try:
        while high <= sizes.most and does(high):
            low, high = high, 2 * high
        high = min(high, sizes.most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if does(middle) else (low, middle)
    except KeyboardInterrupt as ending:
        known = f"{sizes.step * low:,} {sizes.noun} fit with 95%, and up to {sizes.step * high:,} not all were tried"
        key, value = next(iter(sizes.settings(low).items()))
        text = f"parsim: ended by SIGINT. {known}. Ask from there on with --set {key}={value}"
        print(text, file=sys.stderr, flush=True)
        ending.add_note(text)  # told
        raise
    return low


def _batches(question: Question) -> _Sizes:
    """Batches that all devices divide, or the replicas and microbatches that are asked for."""
    plan, mesh = question.plan, question.plan.mesh
    cluster = question.source.cluster or cluster_of(question.cluster)
    replicas = cluster.size if mesh is None or mesh.dp is None else mesh.dp
    microbatches = plan.microbatches or (1 if mesh is None else mesh.pp or 1)
    step = replicas * microbatches

    def settings(number: int) -> Mapping[str, object]:
        return {"training.global_batch": step * number, "plan.microbatches": microbatches}

    at = max(1, question.training.global_batch // step)
    return _Sizes(noun="samples", step=step, most=MOST_SAMPLES // step, at=at, settings=settings)


def _sequences(question: Question) -> _Sizes:
    args = _args_of_transformer(question, "seq")
    at = max(1, sequence_of(question.model.name, args) // TOKENS_APART)
    return _Sizes(
        noun="tokens",
        step=TOKENS_APART,
        most=MOST_TOKENS // TOKENS_APART,
        at=at,
        settings=lambda number: {"model.args.seq": TOKENS_APART * number},
    )


def _models(question: Question) -> _Sizes:
    args = _args_of_transformer(question, "model")
    at = shape_of(question.model.name, args).layers
    return _Sizes(noun="layers", step=1, most=MOST_LAYERS, at=at, settings=lambda number: {"model.args.layers": number})


def _args_of_transformer(question: Question, what: str) -> dict[str, object]:
    if not is_transformer(question.model.name) or question.source.model is not None:
        raise ConfigError(
            f"--largest {what} changes the sizes of a transformer by name (llama3-8b), and the model is {question.model.name}; "
            "name one, or ask for --largest batch"
        )
    return dict(question.model.args)


_SIZES: Mapping[LargestOf, Callable[[Question], _Sizes]] = {"batch": _batches, "seq": _sequences, "model": _models}


# What it would take to be faster: the search again on changed clusters, one change at a time.


MORE_GPUS = 1.5
TIMES = 2.0
MachinePart = TypeVar("MachinePart", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One change and what it gives.

    Attributes: faster: samples per second over those of the answer, less one; None where no plan was found. reaches: the aim.
        plan: a summary. reason: why there is no plan.
    """

    what: str
    faster: float | None
    reaches: bool
    plan: str = ""
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "change": self.what,
            "faster": self.faster,
            "reaches": self.reaches,
            "plan_summary": self.plan or None,
            "reason": self.reason or None,
        }

    def line(self) -> str:
        """`bandwidth between nodes x 2: +12%, not enough (dp ...)`."""
        if self.faster is None:
            return f"{self.what}: no plan ({self.reason})"
        return f"{self.what}: {self.faster:+.0%}, {'enough' if self.reaches else 'not enough'} ({self.plan})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatWould:
    """Attributes: faster: the aim, as a part of samples per second. changes: each alone, the largest gain first."""

    faster: float
    changes: tuple[WhatIf, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, under `what_would`."""
        return {"faster": self.faster, "changes": [change.to_dict() for change in self.changes]}

    def lines(self) -> list[str]:
        """Sentences for people."""
        enough = ", or ".join(change.what for change in self.changes if change.reaches) or "none of these changes alone"
        return [f"What would be {self.faster:.0%} faster: {enough}.", *(f"  {change.line()}" for change in self.changes)]


def parse_faster(text: str) -> float:
    """`20%` or `0.2` as 0.2. Raises ConfigError for anything else."""
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError as error:
        raise ConfigError(f"--faster {text!r}: write a share such as 20% or 0.2") from error
    if value >= 1 and not number.endswith("%"):
        raise ConfigError(f"--faster {text!r} would be {value:.0%}: write {number}%, or a share such as 0.2")
    if not 0 < value < 100:
        raise ConfigError(f"faster = {value:g}: must be > 0 and < 100; 0.2 means 20% more samples per second")
    return value


def what_would(answer: Answer, faster: float) -> WhatWould:
    """Ask the question again with each change.

    Args: answer: to the question as it is. faster: the aim, 0.2 for 20% more samples per second.
    Raises: ConfigError: no plan fits as it is, or the cluster has several kinds of GPU.
    """
    if answer.question.cluster.group is not None:
        raise ConfigError(
            "--faster changes clusters of one kind of GPU, and [[cluster.group]] names several; change the groups"
        )
    if not answer.fits:
        raise ConfigError("--faster compares with the plan that was chosen, and none fits; change the question first")
    base = answer.prediction.throughput_samples_per_s.median
    changes = []
    for what, question in _changed_clusters(answer):
        try:
            with progress(f"Planning with {what}"):
                other = ask(question())
            if other.search is not None and other.search.cut_short:
                changes.append(WhatIf(what=what, faster=None, reaches=False, reason="stopped by Ctrl-C, as were all after it"))
                break
            if not other.fits:
                raise DoesNotFitError("no plan fits")
        except ParsimError as error:
            changes.append(WhatIf(what=what, faster=None, reaches=False, reason=str(error).splitlines()[0]))
            continue
        gain = other.prediction.throughput_samples_per_s.median / base - 1
        changes.append(WhatIf(what=what, faster=gain, reaches=gain >= faster, plan=other.prediction.plan.summary()))
    changes.sort(key=lambda change: -1.0 if change.faster is None else change.faster, reverse=True)
    return WhatWould(faster=faster, changes=tuple(changes))


def _changed_clusters(answer: Answer) -> Iterator[tuple[str, Callable[[], Question]]]:
    cluster, question = answer.problem.cluster, answer.question
    profile, network = cluster.profile, cluster.network
    nodes = max(device.node for device in cluster.devices) + 1
    per_node = len({device.index for device in cluster.devices if device.node == 0})

    def on(profile: Profile = profile, network: Network | None = network, count: int = nodes) -> Question:
        first = None if per_node == len(profile.devices) else per_node
        return question.sourced(cluster=cluster_from_profile(profile, first, nodes=count, network=network))

    if nodes > 1 and network is not None:
        card = _improved(network.card, "bandwidth_bytes_per_s")
        yield f"bandwidth between nodes x {TIMES:g}", lambda: on(network=network.model_copy(update={"card": card}))
    if cluster.size > 1 and profile.links:
        links = {name: _improved(kind, "bandwidth_bytes_per_s") for name, kind in profile.link_kinds.items()}
        yield f"bandwidth inside nodes x {TIMES:g}", lambda: on(profile.model_copy(update={"link_kinds": links}))
    types = {name: _improved(kind, "memory_bytes") for name, kind in profile.device_types.items()}
    yield f"memory of a GPU x {TIMES:g}", lambda: on(profile.model_copy(update={"device_types": types}))
    mesh, batch = question.plan.mesh, question.training.global_batch
    if network is not None or nodes > 1:
        more = _more_nodes(answer, nodes)
        grows = mesh is not None and mesh.dp is not None

        def grown() -> Question:
            changed = on(count=more)
            if mesh is None or mesh.dp is None:
                return changed
            dp, samples = Fraction(mesh.dp * more, nodes), Fraction(batch * more, nodes)
            if dp.denominator > 1 or samples.denominator > 1:
                raise ConfigError(
                    f"plan.mesh.dp = {mesh.dp} and global_batch = {batch} times {more / nodes:g} are no whole numbers"
                )
            plan = question.plan.model_copy(update={"mesh": mesh.model_copy(update={"dp": int(dp)})})
            return changed.changed(plan=plan, training=question.training.model_copy(update={"global_batch": int(samples)}))

        yield f"GPUs{' and batch' if grows else ''} x {more / nodes:.3g} ({more * cluster.size // nodes} GPUs)", grown
    doubled = question.training.model_copy(update={"global_batch": 2 * batch})
    yield "global batch x 2", lambda: question.changed(training=doubled)


def _improved(part: MachinePart, key: str) -> MachinePart:
    number = getattr(part, key)
    return part.model_copy(update={key: number.model_copy(update={"value": TIMES * number.value})})


def _more_nodes(answer: Answer, nodes: int) -> int:
    """Half as many nodes more; twice as many where the batch divides over the replicas of the choice on those alone."""
    more, dp = max(nodes + 1, round(MORE_GPUS * nodes)), answer.prediction.plan.mesh.dp
    if answer.question.plan.mesh is not None and answer.question.plan.mesh.dp is not None:
        return more  # the batch grows, too

    def divides(count: int) -> bool:
        return dp * count % nodes == 0 and answer.question.training.global_batch % (dp * count // nodes) == 0

    return 2 * nodes if not divides(more) and divides(2 * nodes) else more
