"""How well is a model priced that was never measured, from operators and the components of other models?

    python -m experiments.this_machine.operators_here [--quick] [--seed N] [--profile FILE] [--out DIR] [--json]

Calibrates this machine with the small models of the zoo and its operators (or reads a profile made so), then leaves out one
model at a time. Every point of its components, and of components that do the same work, is removed. What components add to
their operators is learned anew from the other models. All its components and its step's whole computation are predicted and
compared with their measurement in the same calibration. The floor beside it: how far the measurements of identical
components that stand in two models differ.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibration.fit.composition import fit_compositions, measured_parts, without_model
from calibration.rounds.calibrate import CalibrationRequest, calibrate
from experiments.common.running import part_parser, show
from parsim.costs.compute.surfaces import surface_models
from parsim.costs.costs import Costs
from parsim.costs.estimate import sample_durations_s
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import Profile
from parsim.hardware.records import ComponentPoint
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.work import Compute, Phase

NAMES = ("mlp", "vgg_small", "resnet_small", "vit_small", "gpt_small", "bert_small")
BATCHES = (4, 8, 16, 32)
RANKS = 2
DRAWS = 2000


@dataclass(frozen=True)
class Answer:
    """Predicted and measured seconds of one component's forward or backward (component "" for the whole step)."""

    model: str
    samples: int
    component: str
    phase: str
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def covered(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s


def main() -> None:
    parser = part_parser(__doc__, "three models, two batches, a quick calibration", out="runs/operators_here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", help="read this profile instead of calibrating")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    profile = load_profile(asked.profile) if asked.profile else calibrated(asked.out, quick=asked.quick, seed=asked.seed)
    names = list(dict.fromkeys(point.model for point in profile.compute.components))
    models = [load_model(ModelSpec(name=name)) for name in names]
    answers = [answer for model in models for answer in left_out(profile, model, models, asked.seed)]
    tables = {"steps": table(answers, names, whole=True), "components": table(answers, names, whole=False)}
    show(tables | {"floor": same_work(profile)}, as_json=asked.json)


def calibrated(out: Path, *, quick: bool, seed: int) -> Profile:
    """This machine with every model, its operators, and no shards."""
    request = CalibrationRequest(
        models=tuple((ModelSpec(name=name), BATCHES[:2] if quick else BATCHES) for name in NAMES[: 3 if quick else None]),
        nproc=RANKS,
        quick=quick,
        sizes_bytes=(1024, 65536),
        shard_ways=(),
        compute_budget_s=45.0,
        seed=seed,
    )
    return calibrate(request, out / "profile.json", on_line=print)


def left_out(profile: Profile, model: Model, models: Sequence[Model], seed: int) -> Iterator[Answer]:
    """Every measured component of `model`, and its steps, by a profile that never saw it."""
    heaviest = max(point.ranks_active for point in profile.compute.components)
    own = [p for p in profile.compute.components if p.model == model.name and p.ranks_active == heaviest]
    costs = Costs(model=model, cluster=cluster_from_profile(without(profile, model, models), 1))
    for samples in sorted({point.samples for point in own}):
        points = [point for point in own if point.samples == samples]
        work = [Compute(component=p.component, phase=Phase(p.phase), samples=samples) for p in points]
        estimates = [costs.estimate(entry, 0) for entry in work]
        task_s = 0.0 if profile.host is None else profile.host.task_s
        draws = sample_durations_s(estimates, DRAWS, seed) - task_s
        medians = np.array([estimate.median_s for estimate in estimates]) - task_s
        for place, point in enumerate(points):
            yield answer_of(model.name, samples, point, medians[place], draws[:, place])
        total = points[0].model_copy(update={"component": "", "phase": "forward", "seconds": sum(p.seconds for p in points)})
        yield answer_of(model.name, samples, total, float(medians.sum()), draws.sum(axis=1))


def without(profile: Profile, model: Model, models: Sequence[Model]) -> Profile:
    """The profile of the machine had `model` not been measured."""
    (key, surfaces), *_ = surface_models(profile).items()
    kept = without_model(measured_parts(profile.compute.components, models, surfaces), model.name)
    own = {component.fingerprint for component in model.components}
    compute = profile.compute.model_copy(
        update={
            "components": [p for p in profile.compute.components if p.model != model.name and p.fingerprint not in own],
            "compositions": fit_compositions(kept, *key, source="composition"),
        }
    )
    return profile.model_copy(update={"compute": compute})


def same_work(profile: Profile) -> dict[str, Any]:
    """How far two measurements of a component differ that stands in two models (layers of MLP and VGG, losses)."""
    heaviest = max(point.ranks_active for point in profile.compute.components)
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    for point in profile.compute.components:
        if point.ranks_active == heaviest:
            place = (point.fingerprint, point.phase, point.samples)
            found.setdefault(place, {}).setdefault(point.model, point.seconds)
    differences = [
        100 * abs(one / other - 1)
        for by_model in found.values()
        for one, other in itertools.pairwise(sorted(by_model.values()))
    ]
    if not differences:
        return {"pairs": 0}
    return {
        "pairs": len(differences),
        "median_difference_percent": round(statistics.median(differences), 1),
        "worst_difference_percent": round(max(differences), 1),
    }


def answer_of(model: str, samples: int, point: ComponentPoint, predicted_s: float, draws: np.ndarray[Any, Any]) -> Answer:
    low, high = np.quantile(draws, [0.05, 0.95])
    return Answer(
        model=model,
        samples=samples,
        component=point.component,
        phase=point.phase if point.component else "all",
        predicted_s=float(predicted_s),
        low_s=float(low),
        high_s=float(high),
        measured_s=point.seconds,
    )


def table(answers: Sequence[Answer], names: Sequence[str], *, whole: bool) -> list[dict[str, Any]]:
    """Errors in percent per model left out, and over all."""
    rows = []
    for name in (*names, "all"):
        own = [a for a in answers if name in (a.model, "all") and (a.component == "") is whole]
        errors = [100 * answer.error for answer in own]
        rows.append(
            {
                "model": name,
                "cases": len(own),
                "median_error_percent": round(statistics.median(map(abs, errors)), 1),
                "worst_error_percent": round(max(map(abs, errors)), 1),
                "bias_percent": round(statistics.mean(errors), 1),
                "coverage_percent": round(100 * statistics.mean(answer.covered for answer in own)),
            }
        )
    return rows


if __name__ == "__main__":
    main()
