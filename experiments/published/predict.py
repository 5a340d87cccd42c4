"""Predict published training runs of large transformers.

    python experiments/published/predict.py ROWS.csv --out PREDICTED.csv

ROWS.csv has the columns of a table of published runs (id, hardware, gpus, model, ..., value, unit, notes); `value` may be
empty, and no prediction depends on it. PREDICTED.csv has one line per row: id, unit, predicted, p05, p95 (in the row's unit),
step_s, fits, fit_probability, why. `why` lists what was assumed, left out or contradicts itself, or why a row cannot be
expressed; then `predicted` is empty.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from experiments.published.answer import Answer, answer, with_memory_of
from experiments.published.blanks import CannotExpressError, stage_of
from experiments.published.images import LACKS_SIGMA, image_question, loading_s, network_of
from experiments.published.question import Asked, question_of
from experiments.published.quoted import beyond_peak, contradiction, in_unit, larger_is_faster
from experiments.published.rows import Row, read_rows
from parsim.costs.published import NOTHING_LEARNT, UNKNOWN, Learnt, PublishedRun, learnt_of
from parsim.errors import ParsimError

COLUMNS = ("id", "unit", "predicted", "p05", "p95", "step_s", "fits", "fit_probability", "why")
MEMORY_SIGMA = 0.05
"""Of a predicted peak."""
STATED_PEAK = re.compile(r"max(?:imum)? memory (\d+) B\b")
"""In notes: bytes of the fullest GPU."""
SEVERAL_STAGES = re.compile(r"[01]\s*(?:-|to|or)\s*([123])\b")
"""In a row that does not say which of several ZeRO stages ran; the first one prices it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a judge needs to know of the question. tokens: of a step. rate: larger is faster. run: what effects it has."""

    model: str
    gpus: int
    tokens: int
    rate: bool
    run: PublishedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One line of the answer; step_s None: it cannot be expressed."""

    row: Row
    why: str
    facts: Facts | None = None
    answer: Answer | None = None
    value: float | None = None
    p05: float | None = None
    p95: float | None = None
    factor: float = 1.0

    @property
    def step_s(self) -> float | None:
        return None if self.answer is None else self.factor * self.answer.step_s

    @property
    def fit_probability(self) -> float | None:
        """That the fullest rank fits, by the spread of the predicted peak."""
        if self.answer is None:
            return None
        room = math.log(self.answer.limit_bytes / self.answer.peak_bytes)
        return 0.5 * (1 + math.erf(room / MEMORY_SIGMA / math.sqrt(2)))

    def line(self) -> dict[str, object]:
        """Of the csv file."""
        step, fits = self.step_s, self.fit_probability
        return {
            "id": self.row.id,
            "unit": self.row.unit,
            "predicted": _text(self.value),
            "p05": _text(self.p05),
            "p95": _text(self.p95),
            "step_s": _text(step),
            "fits": "" if fits is None else str(fits >= 0.5).lower(),
            "fit_probability": "" if fits is None else f"{fits:.3f}",
            "why": self.why,
        }


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:.6g}"


def _question_that_fits(row: Row, without: str, known: bool) -> tuple[Asked, Answer]:
    """Where the micro-batch is not stated and the plan would not fit, the next smaller one that divides a replica's samples."""
    asked, found = _with_recomputation_that_fits(row, without, known)
    replica = asked.batch // asked.plan.mesh.dp
    micro = 0
    for size in range(replica // asked.plan.microbatches - 1, 0, -1):
        if row.micro_batch is not None or found.peak_bytes <= found.limit_bytes:
            break
        if replica % size == 0:
            micro = size
            asked, found = _with_recomputation_that_fits(replace(row, micro_batch=micro), without, known)
    if micro:
        asked = replace(asked, assumed=(*asked.assumed, f"micro-batch {micro}, the largest that fits"))
    return asked, found


def _with_recomputation_that_fits(row: Row, without: str, known: bool) -> tuple[Asked, Answer]:
    """Where recomputation is not stated and the plan would not fit, half of the layers are recomputed, then all.

    A framework that spares layers keeps so much less, and takes the time of the plan without.
    """
    if network := network_of(row):
        asked = image_question(row, network)
        found, loading = answer(asked), loading_s(asked)
        found = replace(found, sigma=math.hypot(found.sigma, LACKS_SIGMA if network.lacks else 0.0))
        if loading > found.step_s:
            text = f"the host decodes {asked.batch / loading:.0f} images/s, fewer than the GPUs take"
            asked, found = replace(asked, assumed=(*asked.assumed, text)), replace(found, step_s=loading)
        return asked, found
    asked = question_of(row, without=without, known=known)
    asked, found = _in_the_precision_of_its_memory(row, asked)
    lacks = asked.lacks
    others = [(row, place) for place in range(1, asked.plausible)]
    if stages := SEVERAL_STAGES.search(row.zero):  # "1-2": either may have run
        others += [(replace(row, zero=stages[1]), place) for place in range(max(1, asked.plausible))]
    elif stage_of(row.zero) is None and not asked.plausible:  # its framework divides states where they would not fit
        stages_left = (stage for stage in asked.framework.zero_stages if asked.plan.zero_stage < stage < 3)
        others += [(replace(row, zero=str(stage)), 0) for stage in stages_left]
    for stated, place in others:
        if found.peak_bytes <= found.limit_bytes:
            break
        other = question_of(stated, without=without, known=known, place=place)
        leaner = with_memory_of(found, other)
        if leaner.peak_bytes < found.peak_bytes:
            found = leaner
            zero = "" if stated is row else f" with ZeRO {stated.zero}"
            lacks = (*asked.lacks, f"memory as {other.framework.name} holds it{zero}")
    asked = replace(asked, lacks=lacks)
    for more, share in (("half", "half"), ("full", "all")):
        if found.peak_bytes <= found.limit_bytes or "recompute" not in " ".join(asked.assumed):
            break
        if asked.framework.spares_layers:
            found = with_memory_of(found, question_of(row, more, without=without, known=known))
            text = f"activations of {share} layers are on the host, in 8 bits or made again by single modules, at no cost"
            asked = replace(asked, lacks=(*lacks, text))
            continue
        asked = question_of(row, more, without=without, known=known)
        found = answer(asked)
    return asked, found


def _in_the_precision_of_its_memory(row: Row, asked: Asked) -> tuple[Asked, Answer]:
    """In TF32 where nothing but a measured peak speaks of the precision, and what arrays in 32 bits hold is nearer to it."""
    found, stated = answer(asked), STATED_PEAK.search(row.notes)
    if stated is None or not asked.plausible or f"precision {asked.precision}" not in asked.assumed:
        return asked, found
    whole = replace(row, precision="tf32")
    other = question_of(whole, known=False)
    peaks = (found.peak_bytes, with_memory_of(found, other).peak_bytes)
    halves_off, whole_off = (abs(math.log(peak / float(stated[1]))) for peak in peaks)
    if halves_off <= whole_off:
        return asked, found
    assumed = (*other.assumed, f"precision tf32, whose memory is nearest to the stated {stated[1]} B")
    other = replace(other, row=row, assumed=assumed)
    return other, answer(other)


def predict(row: Row, without: str = "", raw: bool = False, known: bool = True) -> Predicted:
    """The prediction for one row; raw: without fitted factors. Never raises for a row."""
    try:
        asked, found = _question_that_fits(row, without, known)
        facts = Facts(
            model=asked.name,
            gpus=asked.gpus,
            tokens=asked.batch * asked.seq,
            rate=larger_is_faster(asked),
            run=run_of(asked),
        )
        learnt = NOTHING_LEARNT if raw else learnt_of(facts.run)
        steps = [learnt.factor * found.step_s * end for end in (1.0, learnt.low, learnt.high)]
        value, *ends = (in_unit(asked, step) for step in steps)
        return Predicted(
            row=row,
            why=_why(asked, found, learnt),
            facts=facts,
            answer=found,
            value=value,
            p05=min(ends),
            p95=max(ends),
            factor=learnt.factor,
        )
    except (CannotExpressError, ParsimError) as error:
        return Predicted(row=row, why=f"cannot be expressed: {error}")
    except Exception as error:  # a bad row must not end the others
        return Predicted(row=row, why=f"cannot be expressed: {type(error).__name__}: {error}")


def run_of(asked: Asked) -> PublishedRun:
    """What effects of published runs a question has."""
    return PublishedRun(
        gpu=asked.part,
        precision=asked.precision,
        framework=UNKNOWN if asked.plausible else asked.framework.name,
        until=asked.framework.until,
        experts=asked.shape is not None and bool(asked.shape.experts),
        encoder=asked.shape is not None and not asked.shape.causal,
        images=asked.shape is None,
        assumed=asked.row.assumed == "plan",
        gpus=asked.gpus,
    )


def _why(asked: Asked, found: Answer, learnt: Learnt) -> str:
    framework = f"unknown, as {asked.framework.name}" if asked.plausible else asked.framework.name
    parts = [f"{framework}: {asked.plan.summary().split(' [')[0]}, {asked.precision}"]
    if asked.assumed:
        parts.append("assumed " + ", ".join(asked.assumed))
    if asked.lacks:
        parts.append("left out or simplified: " + ", ".join(asked.lacks))
    parts += [told for told in (contradiction(asked), beyond_peak(asked)) if told]
    if learnt.text:
        parts.append(f"seconds times {learnt.factor:.3f} ({learnt.text})")
    if found.peak_bytes > found.limit_bytes:
        parts.append(found.line)
    return "; ".join(parts)


def predict_all(rows: Sequence[Row], jobs: int, without: str = "", raw: bool = False, known: bool = True) -> list[Predicted]:
    """All rows, in order, by so many processes."""
    one = partial(predict, without=without, raw=raw, known=known)
    if jobs <= 1 or len(rows) < 2 * jobs:
        return [one(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda number: str(rows[number].model))
    found: dict[int, Predicted] = {}
    try:
        with _processes(jobs) as pool:
            for number, entry in zip(order, pool.map(one, [rows[number] for number in order], chunksize=8), strict=True):
                found[number] = entry
    except BrokenProcessPool:  # out of memory, as a rule: the row that did it is found by predicting the rest apart
        for number in order:
            if number not in found:
                found[number] = _apart(one, rows[number])
    return [found[number] for number in range(len(rows))]


def _processes(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))


def _apart(one: Callable[[Row], Predicted], row: Row) -> Predicted:
    """In a process of its own, whose end is an answer."""
    try:
        with _processes(1) as pool:
            return pool.submit(one, row).result()
    except BrokenProcessPool:
        return Predicted(row=row, why="cannot be expressed: its process was ended, as happens to one that is out of memory")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    if not options.rows.is_file():
        print(f"no file {options.rows}; give a csv file of published runs", file=sys.stderr)
        return 1
    rows = read_rows(options.rows)
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(entry.line() for entry in predict_all(rows, options.jobs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
