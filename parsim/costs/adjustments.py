"""The adjustments of a price after the work itself is priced: one ordered list, and the only place that applies it.

`parsim.costs.costs.Costs` prices a piece of work as the profile knows it (measured, fitted or published). Then every adjustment
of `ADJUSTMENTS` that applies adds one term, in the order of the list:

    CPU: (base * core sharing + host overhead) * speed factor * update * correction / scale + post-wait
    GPU: max(base * core sharing * GPU speed factor, queueing + host overhead) * published runs * slowest device * update
         * correction / scale + post-wait

The order matters. On a slower CPU the host overhead and everything before it is slower. On a GPU the speed factor is the
device's: it changes what the device computes, and nothing of the host's or the links'. The host's overhead is part of what the
host takes, and hidden where the device takes longer; where the queueing was not measured apart, it is added. The post-wait
seconds are scaled by the speed factor alone. Effects on a step rather than on a task come later. The engines apply overlap;
`parsim.predict.evaluate` applies the noise of single ranks and the seconds between steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from parsim.costs.estimate import QUEUEING, Estimate, Term, TermOrigin
from parsim.costs.observed import NO_RUN_CORRECTIONS, RunCorrections, updates_of
from parsim.costs.published import NOTHING_LEARNT, Learnt
from parsim.errors import CostError
from parsim.hardware.cluster import Cluster
from parsim.hardware.speed_factor import speed_since
from parsim.units import format_seconds
from parsim.work import ClipGradients, Collective, Compute, LoadBatch, Mix, OptimizerStep, SendRecv, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareScale:
    """How many times as fast everything of a kind is, whatever the plan: "what if links were twice as fast"; 1 changes
    nothing.

    Attributes:
        computation: components, optimizer steps and mixing. communication: collectives and transfers, latency included.

    Leaves out: that algorithms would be chosen anew for other links. Raises CostError: a factor that is not finite and above 0.
    """

    computation: float = 1.0
    communication: float = 1.0

    def __post_init__(self) -> None:
        for name, factor in (("computation", self.computation), ("communication", self.communication)):
            if not (math.isfinite(factor) and factor > 0):
                raise CostError(f"the scale of {name} is {factor}; give a finite factor above 0")


AS_IT_IS = HardwareScale()


COMPUTATION: tuple[type, ...] = (Compute, OptimizerStep, ClipGradients, Mix)
EVERYTHING: tuple[type, ...] = (*COMPUTATION, Collective, SendRecv, LoadBatch)


class Subject(NamedTuple):
    """What is priced: work of a rank, as the profile knows it, and the seconds after the adjustments so far."""

    work: Work
    rank: int
    base: Estimate
    so_far_s: float


SLOWEST = "slowest device"
DEVICE_SIGMA_UNSURE = 0.5
"""Relative spread of a published `device_sigma`: clusters vary between 3 and 9% (Sinha et al., SC 2022)."""
PUBLISHED_GPUS = 64
"""Of a usual run among those that `parsim.costs.published` was fitted on: the expected maximum of theirs in the mean."""


def expected_maximum(draws: int) -> float:
    """Mean of the largest of so many independent standard normals, within 5%.

    Source: Blom 1958, Statistical Estimates and Transformed Beta-Variables: N^-1((n - 3/8) / (n + 1/4)).
    """
    return NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))


class SlowestDevice(NamedTuple):
    """How many times as long the slowest device computes as one of the middle, and the relative spread of that."""

    factor: float = 1.0
    sigma: float = 0.0


ALL_ALIKE = SlowestDevice()


def slowest_device(cluster: Cluster, learnt: Learnt) -> SlowestDevice:
    """Of all devices of a cluster, used or not, so that a price does not depend on the plan.

    What published runs took holds for the slowest of `PUBLISHED_GPUS`: beside their effects the factor is relative to that.
    Leaves out: that stages of a pipeline with slack hide it, and that slow nodes come and go.
    """
    noise = cluster.profile.noise
    if noise is None or noise.device_sigma is None:
        return ALL_ALIKE
    sigma = noise.device_sigma.value
    counted = 1.0 + sigma * expected_maximum(PUBLISHED_GPUS) if learnt.text else 1.0
    factor = (1.0 + sigma * expected_maximum(cluster.size)) / counted
    return SlowestDevice(factor, DEVICE_SIGMA_UNSURE * abs(factor - 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceContext:
    """The numbers that adjustments read: of one profile, one number of ranks, one run.

    Attributes:
        core_sharing: how many times as long computation takes as with one rank per core.
        task_s: seconds of the interpreter per task of computation.
        on_gpu: a host queues the work for a device.
        speed: how many times as long everything takes now as while calibrating (`parsim.hardware.speed_factor`); 1 on a GPU.
        gpu_speed: likewise what a GPU computes; 1 on a CPU.
        updates, updated_by: factors that the profile's last validation left in it, and that run's name.
        corrections: factors that the running job has shown. scale: of a question of what would be.
        loading_is_current: loading was measured at the machine's present speed.
        post_wait_s: seconds that computation takes longer right after its rank waited for communication, at today's speed.
        after_wait: this work comes right after such a wait. learnt: of published runs. slowest: of the devices that a step
        waits for.
    """

    core_sharing: float
    task_s: float
    on_gpu: bool
    speed: float
    gpu_speed: float
    updates: RunCorrections
    updated_by: str
    corrections: RunCorrections
    post_wait_s: float
    slowest: SlowestDevice = ALL_ALIKE
    after_wait: bool = False
    scale: HardwareScale = AS_IT_IS
    loading_is_current: bool = False
    learnt: Learnt = NOTHING_LEARNT


def price_context(
    cluster: Cluster,
    *,
    ranks: int | None = None,
    ranks_active: int | None = None,
    corrections: RunCorrections = NO_RUN_CORRECTIONS,
    scale: HardwareScale = AS_IT_IS,
    loading_is_current: bool = False,
    learnt: Learnt = NOTHING_LEARNT,
) -> PriceContext:
    """Collect the numbers of the cluster's profile and of a running job that adjust every price; arguments as of `Costs`."""
    profile = cluster.profile
    host, speed = profile.host, speed_since(profile, ranks_active).mean
    on_gpu = cluster.devices[0].type.kind == "cuda"
    return PriceContext(
        core_sharing=_core_sharing_factor(cluster, cluster.size if ranks is None else ranks),
        task_s=0.0 if host is None else host.task_s,
        on_gpu=on_gpu,
        speed=1.0 if on_gpu else speed,
        gpu_speed=speed if on_gpu else 1.0,
        slowest=slowest_device(cluster, learnt),
        updates=updates_of(cluster),
        updated_by=profile.updates[-1].run if profile.updates else "",
        corrections=corrections,
        scale=scale,
        loading_is_current=loading_is_current,
        learnt=learnt,
        post_wait_s=0.0 if host is None else speed * host.post_wait_s,
    )


def _core_sharing_factor(cluster: Cluster, ranks: int) -> float:
    """The factor was measured with all ranks of the profile. For fewer ranks it scales with the ranks beyond the cores."""
    host, most = cluster.profile.host, len(cluster.profile.devices)
    cores = len(set(cluster.core_of_rank(cluster.size)))
    if host is None or not cores < min(ranks, most):
        return 1.0
    return 1.0 + (host.core_sharing - 1.0) * (ranks - cores) / (most - cores)


class Adjustment(NamedTuple):
    """Attributes: name: of its term. applies_to: the kinds of work it can change. term: the term for a piece of work, or None;
    its docstring says what it stands for, and where its number comes from."""

    name: str
    applies_to: tuple[type, ...]
    term: Callable[[Subject, PriceContext], Term | None]


def adjusted(estimate: Estimate, work: Work, rank: int, context: PriceContext) -> Estimate:
    """Apply every adjustment that concerns the work, in the order of `ADJUSTMENTS`, to its price as the profile knows it.

    One more term per adjustment; the same object if none applies. Leaves out what changes a whole step and no single task
    (overlap, noise of ranks).
    """
    terms: list[Term] = []
    subject = Subject(work, rank, estimate, estimate.median_s)
    for adjustment in _OF_WORK.get(type(work), ()):
        term = adjustment.term(subject, context)
        if term is not None:
            terms.append(term)
            subject = subject._replace(so_far_s=term.applied(subject.so_far_s))
    if not terms:
        return estimate
    texts = (
        f"{term.value:.3g} times that, {term.text}" if term.operation == "times" else term.text
        for term in terms
        if term.operation != "plus"
    )
    slowest = [(SLOWEST, context.slowest.sigma)] if any(term.name == SLOWEST for term in terms) else []
    return Estimate.of(
        (*estimate.terms, *terms),
        source="updated" if any(term.origin == "updated" for term in terms) else estimate.source,
        parameters=(*estimate.parameters, *slowest),
        repeat_sigma=estimate.repeat_sigma,
        detail="; ".join((estimate.detail, *texts)),
        extrapolated=estimate.extrapolated,
        issue_s=estimate.issue_s,
    )


SINCE = "at the machine's speed since `parsim calibrate --refresh`"


def _times(name: str, factor: float, origin: TermOrigin, text: str) -> Term | None:
    return None if factor == 1.0 else Term(name, "times", factor, origin, text)


def _core_sharing(subject: Subject, context: PriceContext) -> Term | None:
    """Where ranks outnumber cores, the same computation takes more processor seconds than with one rank per core. Source:
    `host.core_sharing` of the profile, measured with all its ranks; for fewer ranks in proportion."""
    return _times("core sharing", context.core_sharing, "measured", "where ranks share cores")


def _gpu_speed_factor(subject: Subject, context: PriceContext) -> Term | None:
    """A GPU is slower or faster now than while it was calibrated, and the host and the links are not. Source: `today` over
    `noise.probe` of the profile; measured by `parsim calibrate --refresh PROFILE`."""
    return _times("GPU speed factor", context.gpu_speed, "measured", SINCE)


def _queueing(subject: Subject, context: PriceContext) -> Term | None:
    """A GPU cannot compute faster than the host queues its kernels.

    In a row of tasks this is at most too long: a host that is ahead after a long task queues the next one meanwhile, which is
    left out. It is never too short: in any order tasks take as long as the host, and as long as the device.

    Source: `issue_s` of the profile's components, compositions and optimizers, with `host.task_s`; of parts, launches times
    `host.launch_s`.
    """
    host_s = subject.base.issue_s + context.task_s
    if not context.on_gpu or not subject.base.issue_s or host_s <= subject.so_far_s:
        return None
    device = format_seconds(subject.so_far_s)
    why = f"the host takes longer to queue the task than the device to run it ({device})"
    return Term(QUEUEING, "at least", host_s, subject.base.source, why)


def _host_overhead(subject: Subject, context: PriceContext) -> Term | None:
    """The interpreter spends some microseconds on every task that it starts. Source: `host.task_s` of the profile."""
    if context.task_s == 0 or (context.on_gpu and subject.base.issue_s):  # then it is part of the queueing
        return None
    return Term("host overhead", "plus", context.task_s, "measured", "interpreter, per task")


def _speed_factor(subject: Subject, context: PriceContext) -> Term | None:
    """A shared machine is slower or faster now than while it was calibrated, at all that the profile holds (CPUs). Source:
    as of the GPU speed factor."""
    if context.loading_is_current and isinstance(subject.work, LoadBatch):
        return None
    return _times("speed factor", context.speed, "measured", SINCE)


def _published_runs(subject: Subject, context: PriceContext) -> Term | None:
    """Published training runs took longer, or less, than operators and links say, by chip and by framework. Source:
    `parsim.costs.published`, fitted on published runs and judged on sources that it was not fitted on."""
    return _times("published runs", context.learnt.factor, "fitted", context.learnt.text)


def _slowest(subject: Subject, context: PriceContext) -> Term | None:
    """GPUs of one type differ, and a synchronous step takes as long as its slowest GPU: the more GPUs, the longer. Source:
    `noise.device_sigma` of the profile, times the expected maximum of so many normals."""
    return _times(SLOWEST, context.slowest.factor, "published", "every step waits for the slowest device")


def _update(subject: Subject, context: PriceContext) -> Term | None:
    """An earlier validation showed that a rank, a phase or a class of communication takes longer than profiled. Source: the
    last entry of `updates` in the profile; written by `parsim validate --update`."""
    factor = context.updates.factor(subject.work, subject.rank) if context.updates else 1.0
    return _times("update", factor, "updated", f"updated from run {context.updated_by}")


def _correction(subject: Subject, context: PriceContext) -> Term | None:
    """The running job shows that a rank or a class of communication takes longer than the profile says. Source: learnt by
    the adaptive controller; never saved."""
    factor = context.corrections.factor(subject.work, subject.rank) if context.corrections else 1.0
    return _times("correction", factor, "observed", "as observed")


def _scale(subject: Subject, context: PriceContext) -> Term | None:
    """A sweep scales the speed of computation or links by a factor. Source: `scale.compute` and `scale.links`."""
    computes = isinstance(subject.work, COMPUTATION)
    factor = context.scale.computation if computes else context.scale.communication
    if factor == 1.0:
        return None
    return Term("scale", "over", factor, "assumed", "computation as it would be" if computes else "links as they would be")


def _post_wait(subject: Subject, context: PriceContext) -> Term | None:
    """Computation right after a wait for communication finds other data in the caches. Source: `host.post_wait_s` of the
    profile, times the speed factor."""
    if not context.after_wait or context.post_wait_s == 0:
        return None
    return Term("post-wait", "plus", context.post_wait_s, "measured", "the rank has just waited for communication")


ADJUSTMENTS: tuple[Adjustment, ...] = (
    Adjustment("core sharing", COMPUTATION, _core_sharing),
    Adjustment("GPU speed factor", COMPUTATION, _gpu_speed_factor),
    Adjustment(QUEUEING, COMPUTATION, _queueing),
    Adjustment("host overhead", COMPUTATION, _host_overhead),
    Adjustment("speed factor", EVERYTHING, _speed_factor),
    Adjustment("published runs", EVERYTHING, _published_runs),
    Adjustment(SLOWEST, COMPUTATION, _slowest),
    Adjustment("update", EVERYTHING, _update),
    Adjustment("correction", EVERYTHING, _correction),
    Adjustment("scale", (*COMPUTATION, Collective, SendRecv), _scale),
    Adjustment("post-wait", COMPUTATION, _post_wait),
)
"""In the order in which they are applied."""

_OF_WORK: dict[type, tuple[Adjustment, ...]] = {
    work: tuple(adjustment for adjustment in ADJUSTMENTS if work in adjustment.applies_to) for work in EVERYTHING
}
