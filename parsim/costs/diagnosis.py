"""Whether a run went as predicted and, where not, what was different: a rank, a link, the machine, loading, or the prices.

Every statistic of the run is compared with the same statistic of the draws from which the prediction's interval was made
(a predictive check). So what a profile does not know for sure is not reported, whatever its size. A finding must also pass
the noise of the run: two standard errors over its steps, and more seconds than `MATTERS` of the step.

    rank      its computation against that of the fastest half of the ranks
    machine   the computation of that half against the prediction
    link      a class of communication; where cores carry it, less what its slowest rank explains
    loading   reading batches

Leaves out: a rank or link that is slow in a few steps only shows in the mean alone. Of collectives over many ranks the
slowest link is named only where the groups of the plan tell it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from parsim.costs.observed import CLEAR, ClassSeconds, CommunicationClass, ComputeClass, WorkClass, observed_over_expected
from parsim.errors import CostError
from parsim.numeric import Floats
from parsim.units import format_percent, format_seconds

RARE = 0.99
"""Quantile of the draws above which a statistic is not what was predicted."""
MATTERS = 0.03
"""Share of the step below which nothing is reported."""
LEAST_STEPS = 5
"""Timed steps that a verdict needs."""

Kind = Literal["rank", "link", "network", "machine", "prices", "loading", "between"]


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """What a prediction says of one step.

    Attributes:
        seconds: by class of work. draws: float64 [samples] by class. loading: seconds of reading batches, by rank.
        low_s, median_s, high_s: of the mean step. devices: names, by rank. cores_carry: communication uses the ranks' cores.
        adapts: `--adaptive` may change the plan, and so advice may name it; it refuses relaxed plans.
    """

    seconds: ClassSeconds
    draws: Mapping[WorkClass, Floats]
    loading: Sequence[float]
    low_s: float
    median_s: float
    high_s: float
    devices: Sequence[str]
    cores_carry: bool
    adapts: bool = True


@dataclass(frozen=True, kw_only=True)
class ObservedStep:
    """What a run showed.

    Attributes:
        steps: seconds by class, one mapping per recorded step. loading: mean seconds of reading batches, by rank.
        step_s: mean step; timed: how many. floor: relative noise of it (the A/A floor).
        slowness: how many times as long a probe took beside the run as while the profile was measured; None: nobody looked.

    Raises CostError: no step, or a step time that is not a number.
    """

    steps: Sequence[ClassSeconds]
    loading: Sequence[float]
    step_s: float
    timed: int
    floor: float
    slowness: float | None = None

    def __post_init__(self) -> None:
        if not self.steps or not (math.isfinite(self.step_s) and self.step_s > 0):
            raise CostError(f"a diagnosis needs a recorded step and a step time above 0, got {len(self.steps)}, {self.step_s}")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was different; factor: measured seconds over predicted ones. seconds: per step, more than predicted."""

    kind: Kind
    subject: str
    factor: float
    seconds: float
    text: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Attributes: as_predicted: whether the mean step lies in its interval; None: too few steps. text: for people.
    findings: the largest first; also where the step as a whole is as predicted."""

    as_predicted: bool | None
    text: str
    findings: tuple[Finding, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"findings": [asdict(finding) for finding in self.findings]}

    def lines(self) -> list[str]:
        """For people: the verdict, then what was found and what to do."""
        return [self.text, *(f"{finding.text}: {finding.advice}" for finding in self.findings)]


def diagnose(predicted: PredictedStep, observed: ObservedStep, *, unexplained_s: float = 0.0) -> Diagnosis:
    """The verdict on a run. `unexplained_s`: seconds of the mean step that no task explains, where the caller knows them."""
    if observed.timed < LEAST_STEPS:
        text = f"no verdict: {observed.timed} timed steps, and {LEAST_STEPS} are needed to tell a difference from noise"
        return Diagnosis(as_predicted=None, text=text)
    as_predicted = predicted.low_s <= observed.step_s <= predicted.high_s
    case = _Case(predicted, observed)
    findings = [*case.ranks(), *case.machine(), *case.links(), *case.loading()]
    if not as_predicted and observed.step_s > predicted.high_s and unexplained_s > case.least_s:
        share = format_percent(unexplained_s / observed.step_s)
        findings.append(
            Finding(
                kind="between",
                subject="time between tasks",
                factor=observed.step_s / max(observed.step_s - unexplained_s, 1e-12),
                seconds=unexplained_s,
                text=f"{format_seconds(unexplained_s)} of a step ({share}) lie between its tasks",
                advice="other programs may have taken the cores; `parsim validate` measures it in rounds",
            )
        )
    findings.sort(key=lambda finding: -abs(finding.seconds))
    return Diagnosis(
        as_predicted=as_predicted, text=_verdict(predicted, observed, as_predicted, findings), findings=tuple(findings)
    )


def _verdict(predicted: PredictedStep, observed: ObservedStep, as_predicted: bool, findings: Sequence[Finding]) -> str:
    span = f"{format_seconds(predicted.low_s)} to {format_seconds(predicted.high_s)}"
    measured = format_seconds(observed.step_s)
    if as_predicted:
        return f"as predicted: a step took {measured}, predicted were {span}"
    change = observed.step_s / predicted.median_s - 1
    verdict = f"not as predicted: a step took {measured}, predicted were {span} ({_more(change, 'longer', 'shorter')})"
    noise = 1 + observed.floor
    if predicted.low_s / noise <= observed.step_s <= predicted.high_s * noise:
        return f"{verdict}; that far it may be noise: two halves of the run differ by {format_percent(observed.floor)}"
    if findings:
        return verdict
    return (
        f"{verdict}; no single rank, link or phase explains it: `parsim validate` measures the plan in rounds, and its "
        "--update writes into the profile what is off"
    )


class _Case:
    """Attributes: least_s: seconds of a step below which nothing is reported."""

    def __init__(self, predicted: PredictedStep, observed: ObservedStep) -> None:
        self.predicted, self.observed = predicted, observed
        self.least_s = max(MATTERS, observed.floor) * observed.step_s
        shared = [key for key, seconds in predicted.seconds.items() if seconds > 0]
        self._compute: dict[int, list[WorkClass]] = {}
        for key in shared:
            if isinstance(key, ComputeClass):
                self._compute.setdefault(key.rank, []).append(key)
        self._links = [key for key in shared if isinstance(key, CommunicationClass)]
        self._seen = {rank: self._factors(keys) for rank, keys in self._compute.items()}
        self._drawn = {rank: self._drawn_factors(keys) for rank, keys in self._compute.items()}
        self._typical = _typical([float(factors.mean()) for factors in self._seen.values()]) if self._seen else 1.0

    def _expected_s(self, keys: Sequence[WorkClass]) -> float:
        return sum(self.predicted.seconds[key] for key in keys)

    def _factors(self, keys: Sequence[WorkClass]) -> Floats:
        return observed_over_expected(self.observed.steps, self.predicted.seconds, keys)

    def _drawn_factors(self, keys: Sequence[WorkClass]) -> Floats:
        """float64 [samples]: the same of the draws."""
        drawn: Floats = np.sum([self.predicted.draws[key] for key in keys], axis=0)
        median = float(np.median(drawn))
        return drawn / median if median > 0 else np.ones_like(drawn)

    def ranks(self) -> Iterator[Finding]:
        """Ranks that compute slower than the others, by more than the prediction leaves open."""
        if len(self._seen) < 2:
            return
        typical = _typical(list(self._drawn.values()))
        for rank, factors in self._seen.items():
            measured = float(factors.mean())
            factor = measured / self._typical
            admitted = float(np.quantile(self._drawn[rank] / typical, RARE)) * (1 + CLEAR * _error(factors))
            expected_s = self._expected_s(self._compute[rank]) * self._typical
            seconds = (factor - 1) * expected_s
            if factor <= admitted or seconds <= self.least_s:
                continue
            others = "" if abs(self._typical - 1) < MATTERS else f", the others {_change(self._typical)}"
            yield Finding(
                kind="rank",
                subject=f"rank {rank}",
                factor=measured,
                seconds=seconds,
                text=f"rank {rank} ({self.predicted.devices[rank]}) computes {_change(measured)} than predicted{others}",
                advice="look for other programs or a lowered clock on its device; a plan without it: cluster.devices"
                + ("; --adaptive changes plan on the way" if self.predicted.adapts else ""),
            )

    def machine(self) -> Iterator[Finding]:
        """All ranks slower, or faster, than the prediction leaves open."""
        if not self._seen:
            return
        factor = self._typical
        drawn = _typical(list(self._drawn.values()))
        nearest = min(self._seen.values(), key=lambda steps: abs(float(steps.mean()) - factor))
        wide = 1 + CLEAR * _error(nearest)
        low, high = (float(value) for value in np.quantile(drawn, (1 - RARE, RARE)))
        longest_s = max(self._expected_s(keys) for keys in self._compute.values())
        seconds = (factor - 1) * longest_s
        if low / wide <= factor <= high * wide or abs(seconds) <= self.least_s:
            return
        beside = self.observed.slowness
        who = "all ranks compute" if len(self._seen) > 1 else "the rank computes"
        what = f"{who} {_change(factor)} than predicted"
        kind: Kind = "machine"
        if beside is not None and abs(math.log(beside)) < abs(math.log(factor)) / 2:
            kind = "prices"
            text = f"{what}, on a machine as fast as when it was calibrated: the prices of this model are off"
            advice = "calibrate with this model, or `parsim validate --update`"
        else:
            seen = "" if beside is None else f" (a fixed piece of work beside the run: {_change(beside)})"
            text = f"{what}{seen}: the machine is {'slower' if factor > 1 else 'faster'} than when it was calibrated"
            advice = "calibrate again (`parsim calibrate`, or in 20 seconds with --refresh), or end what else runs here"
        yield Finding(kind=kind, subject=kind, factor=factor, seconds=seconds, text=text, advice=advice)

    def links(self) -> Iterator[Finding]:
        """Communication that is slower than the prediction leaves open, by link where the plan's groups tell it."""
        slow: dict[CommunicationClass, tuple[float, float]] = {}
        right = []
        for key in self._links:
            factors = self._factors([key])
            base = max((float(self._seen[rank].mean()) for rank in key.ranks if rank in self._seen), default=1.0)
            base = max(base, 1.0) if self.predicted.cores_carry else 1.0
            factor = float(factors.mean()) / base
            admitted = float(np.quantile(self._drawn_factors([key]), RARE)) * (1 + CLEAR * _error(factors))
            seconds = (factor - 1) * base * self.predicted.seconds[key]
            if factor > admitted and seconds > self.least_s:
                slow[key] = factor, seconds
            elif factor <= admitted:
                right.append(key)
        if not slow:
            return
        if not right and len({key.ranks for key in slow}) > 1:
            expected_s = [self.predicted.seconds[key] for key in slow]
            factor = float(np.average([factor for factor, _ in slow.values()], weights=expected_s))
            yield Finding(
                kind="network",
                subject="all links",
                factor=factor,
                seconds=sum(seconds for _, seconds in slow.values()),
                text=f"all communication at {format_percent(1 / factor)} of its predicted speed",
                advice="look for other traffic; if it stays, calibrate again",
            )
            return
        by_ranks: dict[tuple[int, ...], list[CommunicationClass]] = {}
        for key in slow:
            by_ranks.setdefault(tuple(sorted(key.ranks)), []).append(key)
        pair = _common_pair([key.ranks for key in slow], [key.ranks for key in right])
        if pair is not None:
            by_ranks = {pair: list(slow)}
        for ranks, keys in by_ranks.items():
            yield self._link(ranks, {key: slow[key] for key in keys})

    def _link(self, ranks: tuple[int, ...], slow: Mapping[CommunicationClass, tuple[float, float]]) -> Finding:
        seconds = sum(seconds for _, seconds in slow.values())
        factor = max(factor for factor, _ in slow.values())
        names = "-".join(self.predicted.devices[rank] for rank in ranks)
        subject = f"link {names}" if len(ranks) == 2 else f"links between {names}"
        return Finding(
            kind="link",
            subject=subject,
            factor=factor,
            seconds=seconds,
            text=f"{subject} at {format_percent(1 / factor)} of the predicted speed ({', '.join(map(str, slow))})",
            advice="look for other traffic or a damaged link; "
            + ("a plan that uses it less: --adaptive, or calibrate again" if self.predicted.adapts else "calibrate again"),
        )

    def loading(self) -> Iterator[Finding]:
        """Reading batches that takes longer than predicted."""
        more = [seen - predicted for seen, predicted in zip(self.observed.loading, self.predicted.loading, strict=True)]
        if not more or max(more) <= self.least_s:
            return
        rank = int(np.argmax(more))
        seen_s, predicted_s = self.observed.loading[rank], self.predicted.loading[rank]
        yield Finding(
            kind="loading",
            subject="loading",
            factor=seen_s / predicted_s if predicted_s > 0 else math.inf,
            seconds=more[rank],
            text=f"reading batches takes {format_seconds(seen_s)} of a step on rank {rank}, predicted were "
            f"{format_seconds(predicted_s)}",
            advice="raise training.workers, or make the dataset faster",
        )


def _typical(values: Sequence[Any]) -> Any:
    """The value of the slowest of the fastest half of the ranks: what slows a minority of ranks does not move it."""
    ordered = np.sort(np.array(values), axis=0)
    middle = ordered[(len(values) - 1) // 2]
    return float(middle) if middle.ndim == 0 else middle


def _error(steps: Floats) -> float:
    """Relative standard error of a mean over steps."""
    mean = float(steps.mean())
    return float(steps.std(ddof=1)) / math.sqrt(len(steps)) / mean if len(steps) > 1 and mean > 0 else 0.0


def _common_pair(slow: Sequence[tuple[int, ...]], right: Sequence[tuple[int, ...]]) -> tuple[int, int] | None:
    """The two ranks that every slow group holds and no other one, if there is just one such pair."""
    pairs = [set(itertools.combinations(sorted(ranks), 2)) for ranks in slow]
    common = set.intersection(*pairs) - {pair for ranks in right for pair in itertools.combinations(sorted(ranks), 2)}
    return common.pop() if len(common) == 1 else None


def _change(factor: float) -> str:
    """A change of speed: `20.0% slower` where the same work takes 1.2 times as long."""
    return _more(factor - 1, "slower", "faster")


def _more(change: float, above: str, below: str) -> str:
    return f"{format_percent(abs(change))} {above if change >= 0 else below}"
