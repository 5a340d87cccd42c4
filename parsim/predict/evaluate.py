"""Price and simulate one plan: the same graph the executor will run, medians for the timeline, draws for the interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from parsim.costs.adjustments import COMPUTATION
from parsim.costs.compute.compute import ComputeCosts
from parsim.costs.compute.formula import OperatorModel
from parsim.costs.compute.launches import ComputeRequest
from parsim.costs.estimate import (
    Estimate,
    OverlapFactors,
    Term,
    medians_s,
    rank_noise,
    repeat_sigmas,
    sample_durations_s,
    sampled_durations_by_rows,
)
from parsim.costs.loading import WAIT, UnmeasuredLoading
from parsim.engines import dynamic, static
from parsim.engines.noise import noisy_steps_s, slowest_ranks
from parsim.engines.program import mean_step_s, waiting_together
from parsim.engines.static import CompiledGraph
from parsim.errors import PlanError
from parsim.hardware.speed_factor import SpeedFactor
from parsim.model.component import narrow
from parsim.model.operator_table import UNLISTED
from parsim.numeric import Floats, Ints
from parsim.plans.plan import Plan
from parsim.predict.breakdown import RankBreakdown, breakdown, busiest_resource_s, step_fractions
from parsim.predict.folding import folding_of, nearly_alike, nearly_shifted, program_of
from parsim.predict.memory import RankMemory
from parsim.predict.problem import PlanningProblem
from parsim.predict.result import Interval, IntervalCorrection, PlanResult
from parsim.predict.rounds import MixingPeriod, folds, is_one_step, mixing_period, priced_units
from parsim.program.columns import Columns, Folding, Unit, unfolded
from parsim.program.taskgraph import TaskGraph
from parsim.timeline import Timeline
from parsim.units import format_percent, format_seconds
from parsim.work import Compute, LoadBatch, Work, ranks_of_work

# What the answer says of operators that the table of operators lacks: their names and their share of the time.


SHOWN = 5


def unlisted_warnings(
    problem: PlanningProblem, units: Sequence[Unit], estimates: Sequence[Estimate], seconds: NDArray[np.float64]
) -> tuple[str, ...]:
    """One line that names them, the largest share first; none where the model has none or all of it was measured.

    The share is of all task time, as a model without them would be priced. It counts the bytes they move, not arithmetic that
    nobody stated, so it is a lower bound.
    """
    names = {
        component.name: sorted({op.function for op in component.operators if op.function.startswith(UNLISTED)})
        for component in problem.model.components
    }
    if not any(names.values()):
        return ()
    costs = ComputeCosts(problem.cluster.profile, problem.numerics)
    total = max(float(seconds.sum()), 1e-30)
    shares: dict[str, float] = {}
    for unit, estimate, unit_s in zip(units, estimates, seconds.tolist(), strict=True):
        work = unit.work
        if not isinstance(work, Compute) or estimate.source == "measured" or not names[work.component]:
            continue
        model = costs.operator_model(problem.cluster.devices[unit.rank].type)
        for name in names[work.component]:
            shares[name] = shares.get(name, 0.0) + _share(problem, work, name, model) * unit_s / total
    if not shares:
        return ()
    ranked = sorted(shares.items(), key=lambda entry: (-entry[1], entry[0]))
    listing = ", ".join(f"{name.removeprefix(UNLISTED)} ({format_percent(share)})" for name, share in ranked[:SHOWN])
    more = f" and {len(ranked) - SHOWN} more" if len(ranked) > SHOWN else ""
    return (
        f"at least {format_percent(sum(shares.values()))} of the task time is in operators that parsim has no formula for, "
        f"priced by the bytes they move alone: {listing}{more}; add a row to parsim.model.operator_table.TABLE",
    )


def _share(problem: PlanningProblem, work: Compute, name: str, model: OperatorModel) -> float:
    shard = narrow(problem.model.component(work.component), work.rule, work.ways)
    rest = replace(shard, operators=tuple(op for op in shard.operators if op.function != name))
    with_s, without_s = (
        model.seconds(ComputeRequest(component=component, phase=work.phase, samples=work.samples))
        for component in (shard, rest)
    )
    return max(0.0, 1.0 - without_s / with_s) if with_s else 0.0


REPEATED_STEPS = 4
NOISY_STEPS = 64
SAMPLES = 200
SEED = 0
DRAWS_AT_ONCE = 2**23
"""Durations of tasks that are drawn at once, 8 bytes each: what bounds the memory of an interval."""

MANY_RANKS, MANY_TASKS = 64, 500_000
"""Beyond so many ranks, those that are interchangeable are simulated once unless asked otherwise; and beyond so many tasks of
all ranks, which take ten seconds to lower one by one."""

RELAXED = "{} is not synchronous training: a step learns something else, and may learn less; parsim predicts its seconds"
"""What a step time does not say of a relaxed plan."""

WORTH_SAYING = 0.01
"""A warning about extrapolated tasks is given from this share of all task seconds on."""


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """The program of one plan, priced, and the seconds of its step.

    Attributes:
        folding: which ranks of the program stand for others. estimates: per unit of the program (`Columns.units`).
        overlap: the factors of the program as a whole.
        steady_s: the tasks of a step without noise of single ranks. step_s: with that noise, and with the host's work between
            steps.
        period: where steps differ, because replicas mix in rounds: those from round to round. The program is then that of a
            step with a round.
    """

    folding: Folding
    compiled: CompiledGraph
    estimates: tuple[Estimate, ...]
    overlap: OverlapFactors
    steady_s: float
    step_s: float
    period: MixingPeriod | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation(SimulatedStep):
    """A plan's simulated step, and the result with everything else that it was read from.

    Memory and breakdown are of every rank; program and timeline of those that `folding` says stand for others. Where steps
    differ, the timeline is of a step with a round, and result and breakdown are of the mean step.
    """

    result: PlanResult
    timeline: Timeline
    memory: tuple[RankMemory, ...]
    breakdown: tuple[RankBreakdown, ...]

    @property
    def graph(self) -> TaskGraph:
        return self.compiled.graph

    @property
    def lists_every_rank(self) -> bool:
        """Whether the step is short enough to be simulated and shown rank by rank."""
        ranks = self.result.plan.world_size
        return ranks <= MANY_RANKS and self.compiled.size * ranks <= MANY_TASKS * len(self.folding.ranks)

    def alone_text(self) -> str:
        """How long the step of the timeline takes alone, beside the step time of the result."""
        alone = format_seconds(self.timeline.makespan_s)
        if self.period is None:
            return f"One step alone: {alone}; in a row, steps overlap"
        return f"One step alone, with the first round: {alone}; the step above is a mean over whole periods"


def evaluate(
    problem: PlanningProblem,
    plan: Plan,
    *,
    engine: str = "static",
    samples: int = SAMPLES,
    reason: str = "",
    fold: bool | None = None,
    run: SimulatedStep | None = None,
) -> Evaluation:
    """Simulate one step of `plan`.

    Args:
        engine: "static" or "dynamic". samples: draws for the interval (0: the interval is the median). reason: why the plan was
            kept.
        fold: simulate interchangeable ranks once (`parsim.predict.folding`); None: with more than `MANY_RANKS` ranks, or with
            cp or ep. Not done if ranks share cores.
        run: the step of this plan, where it was simulated already.

    The step time is the mean of `REPEATED_STEPS` steps in a row (`parsim.engines.program`). If the profile holds the noise of
    single ranks, it is the mean of `NOISY_STEPS` steps with that noise, in which ranks wait for the slowest. Work of the host
    between steps, if the profile holds it, is added to the step; no task records it. Discrete choices stay as at the medians.
    The timeline and the breakdown are those of a step without noise.

    Raises:
        PlanError: more ranks than devices, or a plan that does not match the model. CostError: a task without a price.
    """
    problem = _offloading(problem, plan)
    run = simulated_step(problem, plan, fold=fold) if run is None else run
    compiled, estimates, folding = run.compiled, run.estimates, run.folding
    columns, step_s = compiled.columns, run.step_s
    seconds = _seconds(estimates, columns, folding)
    medians = medians_s(estimates)[columns.unit]
    engines = {"static": static.simulate, "dynamic": dynamic.simulate}
    timeline = engines[engine](compiled, medians, overlap=run.overlap)
    interval = Interval(median=step_s, p05=step_s, p95=step_s)
    period = run.period
    parts = breakdown(compiled, timeline, ranks=folding.ranks) if period is None else period.breakdown()
    memory = problem.memory(plan)
    alike = {id(entry.lines): entry for entry in memory}
    kinds, peaks = tuple(alike.values()), {number: entry.total_bytes for number, entry in alike.items()}
    result = PlanResult(
        strategy=plan.strategy,
        step_s=interval,
        throughput_samples_per_s=interval.inverse(plan.global_batch),
        **asdict(step_fractions(parts, folding.weights)),
        peak_memory_bytes=tuple([peaks[id(entry.lines)] for entry in memory]),
        fits=all(entry.fits for entry in kinds),
        fit_probability=min(entry.fit_probability for entry in kinds),
        cost_sources=_sources(estimates, seconds),
        plan=plan,
        warnings=(
            *_warnings(estimates, seconds, kinds),
            *unlisted_warnings(problem, columns.units, estimates, seconds),
            *problem.model.assumptions,
            *([problem.loading.text()] if isinstance(problem.loading, UnmeasuredLoading) else []),
            *([RELAXED.format(plan.synchronisation.kind)] if plan.synchronisation.is_relaxed else []),
            *offload_assumptions(problem, plan),
        ),
        reason=reason,
        cluster=problem.cluster.name,
        lower_bound_s=busiest_resource_s(compiled, medians) if period is None else period.lower_bound_s,
    )
    evaluation = Evaluation(
        **vars(run), result=result, timeline=timeline, memory=memory, breakdown=_of_every_rank(parts, folding)
    )
    return with_interval(problem, evaluation, samples=samples, reason=reason)


def simulated_step(problem: PlanningProblem, plan: Plan, *, fold: bool | None = None) -> SimulatedStep:
    """The median step of a plan, as `evaluate` gives it, without memory, breakdown and timeline; errors as there."""
    if plan.world_size > problem.cluster.size:
        raise PlanError(
            f"the plan needs {plan.world_size} ranks and {problem.cluster.name} offers {problem.cluster.size} devices; "
            "ask for more devices or a smaller mesh"
        )
    problem = _offloading(problem, plan)
    layout, costs = problem.layout(plan), problem.costs(plan.world_size)
    sigma = 0.0 if problem.cluster.profile.noise is None else problem.cluster.profile.noise.rank_sigma
    usual = plan.world_size > MANY_RANKS or plan.mesh.team > 1

    def communication_s(works: Sequence[Work]) -> list[float]:
        return [estimate.median_s for estimate in problem.price([(work, 0) for work in works], plan.mesh)]

    may_fold = (fold or (fold is None and usual)) and not costs.shared_cores and folds(problem, plan)
    folding = folding_of(layout, costs, communication_s) if may_fold else unfolded(plan.mesh)
    gossips = plan.synchronisation.kind == "gossip"  # no replica stands for all
    if gossips:
        folding = nearly_shifted(problem, layout, folding)
    bounded = not gossips and ((folding.is_folded and plan.world_size > MANY_RANKS) or not folding.is_exact)
    nearly = nearly_alike(problem, layout, folding, REPEATED_STEPS) if bounded and not sigma and is_one_step(plan) else None
    if nearly is None:
        folding = folding if folding.is_exact or gossips else unfolded(plan.mesh)
        compiled = program_of(problem, layout, folding)
        estimates = tuple(priced_units(problem, plan, compiled.columns.units, folding))
    else:
        folding, compiled, estimates = nearly
    columns = compiled.columns
    medians = medians_s(estimates)[columns.unit]
    floor_s = costs.reading_floor_s((unit.work, unit.rank) for unit in columns.units.kinds)
    measured = problem.cluster.profile.overlap is not None
    works = columns.units.each([unit.work for unit in columns.units.kinds]) if measured else []
    overlap = costs.overlap(works, _seconds(estimates, columns, folding) if measured else [])
    period, noise = None, sigma if plan.world_size > 1 else 0.0
    if not is_one_step(plan):
        period = mixing_period(problem, layout, folding)
        steady_s, step_s = _period_s(period, noise)
        step_s = max(step_s + costs.between_steps_s, floor_s)
    else:
        steady_s = float(mean_step_s(compiled, medians[None, :], overlap, steps=REPEATED_STEPS)[0])
        if floor_s > steady_s + costs.between_steps_s:  # ranks compute faster than their workers read: every load waits
            wait_s = floor_s - steady_s - costs.between_steps_s
            wait = Term(WAIT, "plus", wait_s, "measured", "the workers read slower than the ranks compute")
            estimates = tuple(
                estimate.then(wait) if isinstance(unit.work, LoadBatch) else estimate
                for unit, estimate in zip(columns.units, estimates, strict=True)
            )
            medians = medians_s(estimates)[columns.unit]
            steady_s = float(mean_step_s(compiled, medians[None, :], overlap, steps=REPEATED_STEPS)[0])
        step_s = steady_s
        if noise and folding.is_folded:
            step_s = folded_unsteady_s(compiled, folding, medians, overlap, noise)
        elif noise:
            step_s = unsteady_s(compiled, medians[None, :], overlap, noise)
        step_s += costs.between_steps_s
    return SimulatedStep(
        folding=folding,
        compiled=compiled,
        estimates=estimates,
        overlap=overlap,
        steady_s=steady_s,
        step_s=step_s,
        period=period,
    )


def _period_s(period: MixingPeriod, sigma: float) -> tuple[float, float]:
    """The mean step from round to round, without and with noise of single ranks. That of local steps in a row averages out
    before ranks wait for one another."""
    rows = period.medians_s
    steady_s = float(period.steps_s(rows)[0])

    def noisy_s(sigma: float) -> float:
        return period.unsteady_s(lambda compiled, row: unsteady_s(compiled, row, period.overlap, sigma), rows)

    averaged = sigma / math.sqrt(period.steps)
    if period.staggers:
        return steady_s, steady_s + (noisy_s(averaged) - noisy_s(0.0) if averaged else 0.0)
    return steady_s, noisy_s(averaged)


def with_interval(problem: PlanningProblem, evaluation: Evaluation, *, samples: int, reason: str) -> Evaluation:
    """The evaluation with an interval from draws of the cost parameters, corrected by the problem's history; no `samples`
    keep the median alone.

    Where published runs have shown how far such answers lie from measurements (`problem.learnt`), the interval is theirs.
    """
    result = replace(evaluation.result, reason=reason)
    if samples:
        uncorrected, notes = _uncorrected(problem, evaluation, samples), problem.history.notes
        rule, replicas = result.plan.synchronisation, result.plan.mesh.dp
        if rule.is_closed_loop:
            names = [name for _, name in rule.mixing.phases(replicas)]
            ends = [replace(result.plan, synchronisation=replace(rule, graph=name)) for name in (names[0], names[-1])]
            spread = [_uncorrected(problem, evaluate(problem, plan, samples=0), samples) for plan in ends]
            low, high = min(end.p05 for end in spread), max(end.p95 for end in spread)
            uncorrected = replace(uncorrected, p05=min(low, uncorrected.p05), p95=max(high, uncorrected.p95))
            notes = (
                *notes,
                f"{rule.graph} chooses its graph while it trains: the step assumes each of {len(names)} lattices equally "
                f"often, and the interval spans them, from {names[-1]} ({format_seconds(spread[-1].median)}) to {names[0]} "
                f"({format_seconds(spread[0].median)})",
            )
        correction = IntervalCorrection(correction=problem.history.correction, uncorrected=uncorrected, notes=notes)
        interval = correction.corrected
        rate = interval.inverse(result.plan.global_batch)
        result = replace(result, step_s=interval, throughput_samples_per_s=rate, interval_correction=correction)
    return replace(evaluation, result=result)


def _uncorrected(problem: PlanningProblem, evaluation: Evaluation, samples: int) -> Interval:
    median, learnt = evaluation.result.step_s.median, problem.learnt
    if learnt.text:
        return Interval(median=median, p05=median * learnt.low, p95=median * learnt.high)
    return Interval.of(median, sampled_steps_s(evaluation, samples) * (median / evaluation.steady_s))


def sampled_steps_s(evaluation: Evaluation, samples: int) -> NDArray[np.float64]:
    """The mean step under each draw of the cost parameters: float64 [samples] seconds. Leaves out drift of the machine
    within one run.

    If tasks have their own noise and ranks are folded, a rank that represents many waits for the slowest of them
    (`parsim.engines.noise`).
    """
    if evaluation.period is not None:
        return evaluation.period.drawn_s(samples, SEED)
    compiled, estimates, overlap = evaluation.compiled, evaluation.estimates, evaluation.overlap
    unit = compiled.columns.unit
    if not any(estimate.repeat_sigma for estimate in estimates):
        draws = sample_durations_s(estimates, samples, SEED)
        return mean_step_s(compiled, draws, overlap, steps=REPEATED_STEPS, unit=unit)
    repeat = None
    if evaluation.folding.is_folded:
        medians, sigmas = medians_s(estimates)[unit], repeat_sigmas(estimates, unit)
        repeat = slowest_ranks(compiled, evaluation.folding, evaluation.timeline, medians, sigmas).exponents
    rows = max(1, DRAWS_AT_ONCE // max(1, compiled.size))
    pieces = sampled_durations_by_rows(estimates, samples, SEED, unit=unit, rows=rows, repeat=repeat)
    return np.concatenate([mean_step_s(compiled, piece, overlap, steps=REPEATED_STEPS) for piece in pieces])


def unsteady_s(compiled: CompiledGraph, rows_s: NDArray[np.float64], overlap: OverlapFactors, sigma: float) -> float:
    """Seconds of the mean step under noise of single ranks: of a rank's core, which ranks may share.

    Args:
        rows_s: float64 [rows, n] seconds of tasks. sigma: relative noise; 0, or a single rank, draws none.

    Returns:
        Mean over at least `NOISY_STEPS` draws, divided among the rows.
    """
    columns = compiled.columns
    if not sigma or columns.world_size == 1:
        return float(mean_step_s(compiled, rows_s, overlap, steps=REPEATED_STEPS).mean())
    core_of_rank = np.array(overlap.core_of_rank or range(columns.world_size), dtype=np.int64)
    core = np.where(columns.communicates, -1, core_of_rank[columns.first_rank])
    repeats = -(-NOISY_STEPS // len(rows_s))
    draws = repeats * len(rows_s)
    by_core = rank_noise(np.arange(1 + int(core.max(initial=-1))), sigma, draws, SEED)
    factors = np.concatenate([by_core, np.ones((draws, 1))], axis=1)  # the last column: of communication, numbered -1
    at_once = max(1, DRAWS_AT_ONCE // columns.size)
    pieces = (np.arange(begin, min(draws, begin + at_once)) for begin in range(0, draws, at_once))
    times = [
        mean_step_s(compiled, rows_s[piece // repeats] * factors[piece][:, core], overlap, steps=REPEATED_STEPS)
        for piece in pieces
    ]
    return float(np.concatenate(times).mean())


def folded_unsteady_s(
    compiled: CompiledGraph, folding: Folding, medians_s: Floats, overlap: OverlapFactors, sigma: float
) -> float:
    """`unsteady_s` of a folded program, from the same draws (`parsim.engines.noise`); fewer in a large program.

    Overlap slowdown is that of the step without noise: the noise multiplies the step by what it does without slowdown.
    """
    together = waiting_together(compiled.columns, overlap)
    times = noisy_steps_s(
        compiled, folding, medians_s, sigma=sigma, draws=NOISY_STEPS, seed=SEED, steps=REPEATED_STEPS, together=together
    )
    noisy_s = float(times.mean())
    if overlap.compute == overlap.communication == 1.0 and not overlap.communications_share:
        return noisy_s
    plain = replace(overlap, compute=1.0, communication=1.0, communications_share=False)
    slowed_s, plain_s = (
        float(mean_step_s(compiled, medians_s[None, :], factors, steps=REPEATED_STEPS)[0]) for factors in (overlap, plain)
    )
    return slowed_s * noisy_s / plain_s


def sampled_durations_s(evaluation: Evaluation) -> NDArray[np.float64]:
    """The draws from which `evaluate` makes the interval: float64 [samples, tasks] seconds."""
    return sample_durations_s(evaluation.estimates, SAMPLES, SEED, unit=evaluation.compiled.columns.unit)


def _of_every_rank(parts: Sequence[RankBreakdown], folding: Folding) -> tuple[RankBreakdown, ...]:
    if not folding.is_folded:
        return tuple(parts)
    by_rank = {part.rank: part for part in parts}
    return tuple(replace(by_rank[folding.stands_for(rank)], rank=rank) for rank in range(folding.mesh.size))


def ranks_per_task(columns: Columns, folding: Folding) -> NDArray[np.float64]:
    """float64 [tasks]: how many ranks each task uses, counting those that its own stand for."""
    weight = np.zeros(columns.world_size)
    weight[list(folding.ranks)] = folding.weights
    uses = weight[columns.resource_rank[columns.uses.values]]
    return np.asarray(np.bincount(columns.use_tasks, weights=uses, minlength=columns.size), dtype=np.float64)


def _seconds(estimates: Sequence[Estimate], columns: Columns, folding: Folding) -> NDArray[np.float64]:
    """float64 [units]: the seconds of all tasks of each unit, those of ranks that another stands for too. A task stands for as
    many as the ranks that its own stand for, over how many take part in one."""
    taking_part = np.array([len(ranks_of_work(unit.work)) or 1 for unit in columns.units.kinds])
    ranks = ranks_per_task(columns, folding)
    copies = np.bincount(columns.unit, weights=ranks, minlength=len(estimates)) / taking_part[columns.units.kind]
    seconds: NDArray[np.float64] = medians_s(estimates) * copies
    return seconds


def _sources(estimates: Sequence[Estimate], seconds: NDArray[np.float64]) -> dict[str, float]:
    by_source: dict[str, float] = {}
    for estimate, unit_s in zip(estimates, seconds.tolist(), strict=True):
        by_source[estimate.source] = by_source.get(estimate.source, 0.0) + unit_s
    total = sum(by_source.values())
    return {source: value / total if total else 0.0 for source, value in sorted(by_source.items())}


def _warnings(estimates: Sequence[Estimate], seconds: NDArray[np.float64], memory: Sequence[RankMemory]) -> tuple[str, ...]:
    warnings = []
    over = [entry for entry in memory if not entry.fits]
    if over:
        worst = max(over, key=lambda entry: entry.excess_bytes)
        warnings.append(f"does not fit: {worst.describe()}")
    elif (least := min(memory, key=lambda entry: entry.fit_probability)) and not least.is_safe:
        warnings.append(f"may run out of memory: {least.describe()}")
    outside = np.array([estimate.extrapolated for estimate in estimates], dtype=bool)
    share = float(seconds[outside].sum() / max(seconds.sum(), 1e-30))
    if share >= WORTH_SAYING:
        warnings.append(f"{100 * share:.0f}% of the task time is priced outside the measured sizes")
    return tuple(warnings)


def _offloading(problem: PlanningProblem, plan: Plan) -> PlanningProblem:
    """The problem whose prices depend on how many ranks share a host, where a plan that was given offloads."""
    if not plan.offloads or problem.offloads:
        return problem
    return replace(problem, optimizer_offload=plan.optimizer_offload, activation_offload=plan.activation_offload)


def offload_assumptions(problem: PlanningProblem, plan: Plan) -> tuple[str, ...]:
    """What is assumed of the host of a plan that offloads. Raises CostError if the way to the host, or its memory, is not
    known."""
    if not plan.offloads:
        return ()
    path = problem.costs(plan.world_size).host_path_of(0)
    assumptions = [f"assumed: copies to and from the host over {path.text}, both ways at once"]
    if plan.optimizer_offload:
        assumptions.append(
            "assumed: gradients are accumulated on the device, and the host's update is bound by its memory alone"
        )
    host = problem.cluster.profile.host_memory
    if host is None or host.memory_bytes is None:
        assumptions.append("assumed: the host has memory enough; cluster.host_memory_bytes = ... checks it")
    return tuple(assumptions)


# A plan's step at the speed that the machine had during a run (`parsim.hardware.speed_factor`).


def step_at_speed(problem: PlanningProblem, evaluation: Evaluation, speed: SpeedFactor) -> float:
    """Seconds of the mean step of an evaluated plan, not folded, with the measured speed of its ranks.

    It is the mean over moments. In each moment a rank's tasks are multiplied by its factor, and communication by the mean
    factor of its ranks. On GPUs the factor is the GPU's: it changes computation, but neither communication, nor loading, nor
    tasks that wait for the host to queue them. The noise of single ranks that the speed does not explain is part of it. Leaves
    out that some work depends less on the speed than other, and the profile's interval.
    """
    noise = problem.cluster.profile.noise
    on_gpu = problem.cluster.devices[0].type.kind == "cuda"
    sigma = 0.0 if noise is None or noise.probe is None else noise.probe.rank_sigma
    between_s = problem.costs(evaluation.compiled.columns.world_size).between_steps_s * (1.0 if on_gpu else speed.mean)
    period = evaluation.period
    if period is None:
        compiled = evaluation.compiled
        times = _slowed_s(compiled.columns, evaluation.estimates, compiled.columns.unit, speed, on_gpu)
        return unsteady_s(compiled, times, evaluation.overlap, sigma) + between_s
    times = _slowed_s(period.cycle.columns, period.estimates, period.unit, speed, on_gpu)
    cycle_s = unsteady_s(period.cycle, times, period.overlap, sigma / math.sqrt(period.steps))
    local_s = 0.0
    if period.local is not None:
        alone = _slowed_s(period.local.columns, period.estimates, period.local_unit, speed, on_gpu)
        local_s = unsteady_s(period.local, alone, period.overlap, 0.0)
    return float(period.mean_s(np.array(cycle_s), np.array(local_s))) + between_s


def _slowed_s(
    columns: Columns, estimates: Sequence[Estimate], unit: Ints, speed: SpeedFactor, on_gpu: bool
) -> NDArray[np.float64]:
    """float64 [moments, tasks]."""
    slow = speed.by_rank
    by_use = slow[columns.resource_rank[columns.uses.values]]
    counts = np.diff(columns.uses.offsets)
    factors = np.add.reduceat(by_use, columns.uses.offsets[:-1], axis=0).T / counts
    if on_gpu:
        paced = columns.is_work(lambda work: isinstance(work, COMPUTATION))
        bound = np.array([estimate.host_bound for estimate in estimates], dtype=np.bool_)[unit]
        factors = np.where(paced & ~bound, factors, 1.0)
    times: NDArray[np.float64] = medians_s(estimates)[unit] * factors
    return times
