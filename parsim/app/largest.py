"""The largest batch, sequence or model that fits with 95%: the question asked again at sizes between one that fits and one that
does not.

A mesh is kept while its largest size is found. Then the next size is asked of all plans, and if one fits, its mesh is taken.
Leaves out: sizes that fit although a smaller one does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from parsim.app.answer import Answer, Largest
from parsim.app.ask import ask, ask_alone, whole, with_assumed_framework
from parsim.app.check import changed, mesh_settings, rate_of
from parsim.app.config import LargestOf, Question
from parsim.app.load import cluster_of
from parsim.app.sections import MOST_SAMPLES
from parsim.errors import ConfigError, DoesNotFitError, ParsimError
from parsim.model.catalogue.names import MOST_TOKENS, is_transformer, sequence_of, shape_of
from parsim.model.spec import MOST_LAYERS

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

    Args:
        what: "batch" (in one pass, without gradient accumulation, unless plan.microbatches is given), "seq" or "model" (its
            layers). say: hears what is tried.

    Raises:
        ConfigError: the model has no such size. DoesNotFitError: not even the smallest fits. And as `parsim.app.ask.ask`.
    """
    if question.plan.plan_path is not None:
        raise ConfigError(f"--largest {what}: the plan of {question.plan.plan_path} is for one batch; name a strategy instead")
    sizes = _SIZES[what](question)
    asked = whole(ask(question))

    def at(number: int, mesh: Mapping[str, object] | None = None) -> Answer | None:
        say(f"{sizes.step * number:,} {sizes.noun}")
        return _safe(question, {**sizes.settings(number), **(mesh or {})})

    def fits(mesh: Mapping[str, object], number: int) -> bool:
        return at(number, mesh) is not None

    starts = ((number, at(number)) for number in dict.fromkeys((sizes.at, 1)))
    number, answer = next(((number, answer) for number, answer in starts if answer is not None), (0, None))
    if answer is None:
        raise DoesNotFitError(
            f"--largest {what}: no plan fits with 95% at {sizes.step:,} {sizes.noun}, the least that was tried. "
            f"{asked.sentence()}"
        )
    for _ in range(MOST_MESHES):
        number = _bisected(sizes, number, partial(fits, mesh_settings(answer.prediction.plan)))
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


def _bisected(sizes: _Sizes, fits: int, does: Callable[[int], bool]) -> int:
    """The largest number that fits, above one that does. Ctrl-C says what is known by then."""
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
        text = f"parsim: ended by SIGINT. {known}. Ask from there on with --set {_option(sizes.settings(low))}"
        print(text, file=sys.stderr, flush=True)
        ending.add_note(text)  # told
        raise
    return low


def _option(settings: Mapping[str, object]) -> str:
    """`training.global_batch=64`: the first key, which is the size."""
    key, value = next(iter(settings.items()))
    return f"{key}={value}"


def _safe(question: Question, settings: Mapping[str, object]) -> Answer | None:
    """The answer to the changed question where a plan fits with 95%; None where none does, or the sizes do not divide."""
    try:
        answer = whole(ask_alone(changed(question, settings)))
    except ParsimError:
        return None
    return answer if answer.fits and answer.prediction.is_safe else None


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
