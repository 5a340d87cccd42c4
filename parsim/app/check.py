"""Does a training fit, how fast is it, and what would help: one screen, and an exit status, before a job is launched.

What would help is asked again with keys of the run file changed. Where the plan was searched for, its mesh stays, and the keys
that the question leaves open are searched again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from parsim.app.ask import ask, ask_alone, whole
from parsim.app.config import INNER_AXES, Question, question_from
from parsim.app.prediction import Prediction
from parsim.app.question import assumed_text
from parsim.errors import ParsimError
from parsim.model.catalogue.names import is_transformer, sequence_of
from parsim.model.formats import number_format, operator_precision
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

    Attributes:
        what: in words. settings: keys of a run file. prediction: with the change.
        faster: tokens (of other models samples) per second over those of the question, less one.
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
    """Answer the question, and price what would help.

    Raises: as `parsim.app.ask.ask`.
    """
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
    """The question with other keys, checked as a run file is. What was left open and was filled in stays as it was.

    Raises:
        ConfigError: the keys contradict one another.
    """
    source = question.source
    other = question_from(question.to_dict(), settings=settings, where="the changed question")
    return other.sourced(name=source.name, model=source.model, cluster=source.cluster, form=source.form, recipe=source.recipe)


def _priced(question: Question, prediction: Prediction, what: str, settings: Mapping[str, object]) -> list[Help]:
    """The change with its price; none where it contradicts the question."""
    try:
        answer = whole(ask_alone(changed(question, settings)))
    except ParsimError:
        return []
    other = answer.prediction
    return [Help(what=what, settings=settings, prediction=other, faster=rate_of(other) / rate_of(prediction) - 1)]


Change = tuple[str, dict[str, object]]


def _faster(question: Question, prediction: Prediction) -> Iterator[Change]:
    """Changes by which some trainings are faster."""
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
    yield "a global batch twice as large", _batch(question, plan, 2 * plan.global_batch)


def _smaller(question: Question, prediction: Prediction) -> Iterator[Change]:
    """Changes by which some trainings need less memory."""
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
    what = {"tp": "tensor shards", "pp": "pipeline stages", "dp": "replicas"}
    yield f"{what[larger]} {sizes[larger]} and {what[smaller]} {sizes[smaller]}", settings
