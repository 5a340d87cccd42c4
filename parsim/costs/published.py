"""What published training runs took over what prices say, and how far runs of other sources lie from that.

    log(measured / predicted) = sum of the effects of a run + effect of its source + noise

The effects are of the chip (boards of one chip are one silicon), the framework and its version, recipes that the maker of the
GPUs tuned, and kinds of models.
`python -m experiments.published.run` fits them on given rows and writes `published.json`; that experiment judges them on
sources which they were not fitted on. An answer multiplies every price by the effects' median, as a term of its own. Its
interval is that of a source that nobody has seen: sources differ, so do their rows, and effects are not quite known. Where no
framework is known, there is an effect of guessing it instead, and the interval is that of runs whose framework was guessed.

Causes: clocks under training loads differ from those in tables of operators; libraries become faster with the years; hosts
take time that no kernel has. Effects do not say which. Leaves out: models without a transformer's shape, and CPUs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from parsim.numeric import Floats

SHARE, GUESSED_SHARE = 0.90, 0.92
"""Of held-out rows that intervals hold, of known frameworks and of guessed ones: so that groups of 20 rows hold 85% or more."""
UNKNOWN = "unknown"
UNKNOWN_DENSE, UNKNOWN_EXPERTS = "unknown, dense", "unknown, experts"
STEP = 1e-6
"""To which covariances are rounded in the file."""

CHIPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Volta", ("v100",)),
    ("Ampere", ("a100", "a800", "a30")),
    ("Hopper", ("h100", "h200", "h800", "h20", "gh200")),
    ("Blackwell", ("b200", "b300", "gb200", "gb300")),
    ("CDNA 3", ("mi300x", "mi325x")),
    ("CDNA 4", ("mi350x", "mi355x")),
    ("graphics", ("a10", "a10g", "a40", "l4", "l40s", "t4", "rtx")),
)
"""Boards of one silicon, or of one kind, by the first word of a part's name."""
RECIPES = (("nemo", 0), ("megatron-bridge", 2026), ("megatron-bridge", 0))
"""Frameworks, with the last year of a version, whose published runs are recipes that the maker of the GPUs tuned. Others are
slower on the same chips, which is no property of the chips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """What effects are looked up by.

    Attributes:
        gpu: a part by name. precision: "bf16", "tf32", "fp8", ... framework: a row of
        `parsim.model.catalogue.frameworks`; "unknown" without one. until: the last year of its version; 0: the current one.
        experts: the model has some. encoder: queries see all keys. images: it is a convolutional network.
        assumed: something of its split, its batch or its precision. gpus: that take part.
    """

    gpu: str
    precision: str
    framework: str = UNKNOWN
    until: int = 0
    experts: bool = False
    encoder: bool = False
    images: bool = False
    assumed: bool = False
    gpus: int = 1

    @property
    def chip(self) -> str:
        """The silicon; the part's own name where it is of none that is listed."""
        first = self.gpu.split("-")[0]
        return next((chip for chip, boards in CHIPS if first in boards), first)


def guess_of(run: PublishedRun) -> str:
    """The effect of a framework that was guessed: what people run is slower than what it may have been at its best.

    Products in 8 bits or fewer come with the libraries of those who build the GPUs, and are nearer to it.
    """
    return "guess:8 bits" if run.precision in ("fp8", "nvfp4") else "guess:16 bits or more"


def features_of(run: PublishedRun) -> tuple[str, ...]:
    """Names of the effects that a run has: the kind, a colon, and whose."""
    if run.images:
        return (f"images:on {run.chip}", f"images:by {run.framework}")
    found, version = [f"chip:{run.chip}"], f"{run.framework} {run.until or 'now'}"
    if run.framework == UNKNOWN:
        found += [guess_of(run)]
    else:
        found += [f"framework:{run.framework}", f"framework:{version}"]
        found += ["recipes:of the maker"] if (run.framework, run.until) in RECIPES else []
        found += [f"kind:experts by {version}"] if run.experts else []
    found += [f"kind:experts on {run.chip}"] if run.experts else []
    found += [f"kind:encoder {run.precision}"] if run.encoder else []
    return tuple(found)


def class_of(run: PublishedRun) -> str:
    """Runs whose errors spread alike."""
    if run.framework == UNKNOWN:
        usual = UNKNOWN if run.encoder or run.assumed else UNKNOWN_DENSE
        return UNKNOWN_EXPERTS if run.experts else usual
    if run.images:
        return "images"
    kind = "experts" if run.experts else "encoder" if run.encoder else "dense"
    return f"{kind}, plan assumed" if run.assumed else kind


NOISE: Mapping[str, float] = {
    "dense": 0.05,
    "dense, plan assumed": 0.17,
    "encoder": 0.13,
    "encoder, plan assumed": 0.15,
    "images": 0.06,
    "experts": 0.15,
    "experts, plan assumed": 0.15,
    UNKNOWN_DENSE: 0.14,
    UNKNOWN_EXPERTS: 0.25,
    UNKNOWN: 0.20,
}
"""Standard deviation of rows of one source, by class; of log seconds. What is most likely (restricted maximum likelihood of the
variances of all effects, sources and classes) is 0.13 for encoders. Those of images and experts, and of dense models without a
framework, are what makes rows of other sources most likely. Without a framework nobody says which version runs experts, and
versions are 1.4 times apart. A class of its own for rows that leave recomputation
alone open has the same errors."""
MANY_GPUS, MANY_SIGMA = 512, 0.08
"""More GPUs than these spread wider, by so much: nobody measured collectives and waiting at that scale. Without it intervals of
90% held 77% of 30 rows, and those of other rows were wider."""
FULL_SIGMA = 0.12
"""As much wider spread runs in 32 bits: passes over arrays take most of a step, and how many there are is the library's affair.
Intervals of 21 such rows without a framework held 81%, and those of other rows were wider."""


@dataclass(frozen=True, kw_only=True)
class Effects:
    """Effects by name, with their covariance.

    Attributes:
        mean: of log seconds. names: in the order of the covariance. priors: standard deviation of an effect that no row
        shows, by its kind. source_sigma: of sources. sources: that show each. ends: by class, of standard scores.
    """

    names: tuple[str, ...]
    mean: Mapping[str, float]
    covariance: Floats
    priors: Mapping[str, float]
    source_sigma: float
    sources: Mapping[str, int]
    ends: Mapping[str, tuple[float, float]]

    def of(self, run: PublishedRun) -> tuple[float, float]:
        """Median and standard deviation of log(measured / predicted) of a run of a new source."""
        names = features_of(run)
        known = [self.names.index(name) for name in names if name in self.mean]
        new = [name for name in names if name not in self.mean]
        unseen = sum(self.priors[name.split(":")[0]] ** 2 for name in new)
        if f"framework:{run.framework}" in new:
            unseen += self.priors.get("unseen", 0.0) ** 2
        noise = NOISE[class_of(run)] ** 2 + (MANY_SIGMA**2 if run.gpus > MANY_GPUS else 0.0)
        noise += FULL_SIGMA**2 if run.precision in ("tf32", "fp32") and not run.images else 0.0
        variance = float(self.covariance[np.ix_(known, known)].sum()) + unseen + self.source_sigma**2 + noise
        return sum(self.mean.get(name, 0.0) for name in names), math.sqrt(variance)

    def to_dict(self) -> dict[str, Any]:
        lower = self.covariance[np.tril_indices(len(self.names))]
        return {
            "effects": {name: [round(self.mean[name], 4), self.sources[name]] for name in self.names},
            "priors": dict(self.priors),
            "source_sigma": self.source_sigma,
            "ends": {name: [round(end, 3) for end in ends] for name, ends in self.ends.items()},
            "covariance": [round(value / STEP) for value in lower.tolist()],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Effects:
        names = tuple(document["effects"])
        covariance = np.zeros((len(names), len(names)))
        rows, columns = np.tril_indices(len(names))
        covariance[rows, columns] = covariance[columns, rows] = STEP * np.array(document["covariance"])
        return cls(
            names=names,
            mean={name: entry[0] for name, entry in document["effects"].items()},
            covariance=covariance,
            priors=document["priors"],
            source_sigma=document["source_sigma"],
            sources={name: entry[1] for name, entry in document["effects"].items()},
            ends={name: (low, high) for name, (low, high) in document["ends"].items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What published runs say of one run: a factor of seconds and, over the factored median, the ends of a 90% interval."""

    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    text: str = ""


NOTHING_LEARNT = Learnt()


@lru_cache(maxsize=1)
def published_effects() -> Effects:
    return Effects.from_dict(json.loads(files("parsim.costs").joinpath("published.json").read_text("utf-8"))["fit"])


def learnt_of(run: PublishedRun) -> Learnt:
    """What the shipped effects say of a run of a source that nobody has seen."""
    fit = published_effects()
    median, sigma = fit.of(run)
    low, high = fit.ends[class_of(run)]
    shown = [name for name in features_of(run) if fit.sources.get(name)]
    sources = ", ".join(f"{name.split(':')[1]} ({fit.sources[name]})" for name in shown)
    framework = "framework guessed" if run.framework == UNKNOWN else f"by {run.framework}"
    return Learnt(
        factor=math.exp(median),
        low=math.exp(low * sigma),
        high=math.exp(high * sigma),
        text=f"published runs, {framework}; sources: {sources or 'of other chips'}",
    )
