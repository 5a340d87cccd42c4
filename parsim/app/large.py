"""The figures that people quote of a training step: tokens per second, TFLOP/s, MFU and HFU, days, price and energy.

MFU counts products and attention scores of one forward and backward, every key (PaLM's 6N + 12LHQT); HFU adds the forwards
that run again. Norms, optimizer and routing are left out of both.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from parsim.app.config import Question
from parsim.engines.whole_run import daly_interval_s, expected_run_s, young_interval_s
from parsim.errors import ProfileError
from parsim.hardware.parts import instance_named, load_gpu
from parsim.model.formats import operator_precision
from parsim.predict.breakdown import model_flop, recomputed_flop, tokens_per_sample
from parsim.predict.evaluate import Evaluation
from parsim.predict.problem import PlanningProblem
from parsim.predict.result import Interval
from parsim.units import (
    DAY_S,
    format_bytes,
    format_count,
    format_energy,
    format_money,
    format_percent,
    format_seconds,
    three_digits,
)

HOUR_S = 3_600.0
BILLION = 1e9

DEVICE_MTBF_HOURS = 16_384 * 54 * 24 / 419
"""50,700 hours: 419 unexpected interruptions in 54 days on 16,384 H100."""
MTBF_SOURCE = "419 unexpected interruptions of 16,384 H100 in 54 days (Llama 3, arXiv 2407.21783, section 3.3.4)"
SELDOM = 0.01
"""Expected failures of a run below which no line is spent on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCosts:
    """What running a machine takes beside its steps.

    Attributes:
        usd_per_hour: of one device; None: unknown. price_source: with its date. busy_power_w: of one device; None: unknown.
        device_mtbf_s: mean seconds between failures that stop the job, per device, whatever failed. mtbf_source: of it.
        checkpoint_s: the training stands while one is written. restart_s: from a failure until the last checkpoint is back.
    """

    usd_per_hour: float | None
    price_source: str
    busy_power_w: float | None
    device_mtbf_s: float
    mtbf_source: str
    checkpoint_s: float = 60.0
    restart_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What failures cost, by Daly's model: exponential gaps, checkpoints at the best interval.

    Attributes: machine_mtbf_s: of all devices together. interval_s: of training between checkpoints, Daly's; young_s: Young's.
        failures: expected. days: with all of it. lost_fraction: of the days that is not a training.
    """

    machine_mtbf_s: float
    interval_s: float
    young_s: float
    failures: float
    days: float
    lost_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Attributes:
    amount: of `unit`, "tokens" or "samples", to train on. operation: price, power and failures. steps: to train.
    days: without failures, median and 90% interval. devices: that train; paid: idle ones too.
    device_hours, usd, energy_kwh: with the time that failures cost; None: not known.
    """

    amount: float
    unit: str
    operation: RunningCosts
    steps: int
    days: Interval
    losses: Losses
    devices: int
    paid: int
    device_hours: float
    usd: float | None
    energy_kwh: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; every key names its unit."""
        losses, operation = self.losses, self.operation
        return {
            self.unit: self.amount,
            "steps": self.steps,
            "days": self.days.to_dict(),
            "days_with_failures": losses.days,
            "devices": self.devices,
            "devices_paid": self.paid,
            "device_hours": self.device_hours,
            "usd": self.usd,
            "usd_per_device_hour": operation.usd_per_hour,
            "price_source": operation.price_source or None,
            "energy_kwh": self.energy_kwh,
            "failures": {
                "device_mtbf_hours": operation.device_mtbf_s / HOUR_S,
                "source": operation.mtbf_source,
                "machine_mtbf_hours": losses.machine_mtbf_s / HOUR_S,
                "expected": losses.failures,
                "checkpoint_s": operation.checkpoint_s,
                "restart_s": operation.restart_s,
                "checkpoint_interval_s": losses.interval_s,
                "young_interval_s": losses.young_s,
                "lost_fraction": losses.lost_fraction,
            },
        }

    def lines(self) -> list[str]:
        """Sentences for people. Failures are left out where less than one in a hundred runs meets one."""
        losses, days, operation, kwh = self.losses, self.days, self.operation, self.energy_kwh
        price = "price: unknown (set cluster.usd_per_hour)"
        if self.usd is not None:
            price = f"price: {format_money(self.usd)} at {operation.usd_per_hour:g} per GPU-hour ({operation.price_source})"
        energy = "energy: unknown (set cluster.busy_power_w)"
        if kwh is not None:
            energy = f"energy of the GPUs: {format_energy(kwh)} at busy power"
        durations = (days.median, days.p05, days.p95, losses.days)
        if days.median < 1:
            median, low, high, with_failures = (format_seconds(value * DAY_S) for value in durations)
        else:
            median, low, high, with_failures = (f"{value:.3g}" for value in durations)
            median += " days"
        amount = f"{self.amount:,.0f}"
        if self.amount >= BILLION:
            billions = self.amount / BILLION
            amount = f"{billions:.6g} billion" if billions < 1e3 else f"{billions / 1e3:.6g} trillion"
        lines = [
            f"{amount} {self.unit}: {self.steps:,} steps, {median} (90% interval {low} to {high}), "
            f"{with_failures} with failures and checkpoints; {three_digits(self.device_hours)} GPU-hours",
            f"{price}; {energy}",
        ]
        if losses.failures >= SELDOM:
            lines.append(
                f"failures: one in {format_seconds(losses.machine_mtbf_s)} on {self.devices} GPUs "
                f"({operation.device_mtbf_s / HOUR_S:,.0f} hours per GPU: {operation.mtbf_source}), "
                f"{losses.failures:.3g} expected; a checkpoint every {format_seconds(losses.interval_s)} "
                f"(Daly; {operation.checkpoint_s:g} s to write, {operation.restart_s:g} s to restart) "
                f"loses {format_percent(losses.lost_fraction)}"
            )
        return lines


def losses_of(work_s: float, devices: int, operation: RunningCosts) -> Losses:
    """The expected cost of failures and checkpoints.

    Args: work_s: seconds of steps. devices: each of which stops the job when it fails. operation: of the machine.
    """
    mtbf_s = operation.device_mtbf_s / devices
    interval_s = min(work_s, max(daly_interval_s(operation.checkpoint_s, mtbf_s), 1e-9))
    interval_s = work_s / max(1, round(work_s / interval_s))
    total_s = expected_run_s(work_s, interval_s, operation.checkpoint_s, operation.restart_s, mtbf_s)
    return Losses(
        machine_mtbf_s=mtbf_s,
        interval_s=interval_s,
        young_s=young_interval_s(operation.checkpoint_s, mtbf_s),
        failures=total_s / mtbf_s,
        days=total_s / DAY_S,
        lost_fraction=1 - work_s / total_s,
    )


def training_run(
    amount: float, per_step: int, step_s: Interval, operation: RunningCosts, *, unit: str, devices: int, paid: int
) -> TrainingRun:
    """What so many tokens or samples take.

    Args: amount: of `unit` ("tokens", "samples"), to train on. per_step: of the global batch. step_s: predicted. devices: of
        the plan, which fail and draw power. paid: of the cluster.
    """
    steps = math.ceil(amount / per_step)
    days = Interval(**{name: steps * value / DAY_S for name, value in step_s.to_dict().items()})
    losses = losses_of(steps * step_s.median, devices, operation)
    hours = losses.days * DAY_S / HOUR_S * paid
    return TrainingRun(
        amount=amount,
        unit=unit,
        operation=operation,
        steps=steps,
        days=days,
        losses=losses,
        devices=devices,
        paid=paid,
        device_hours=hours,
        usd=None if operation.usd_per_hour is None else hours * operation.usd_per_hour,
        energy_kwh=None if operation.busy_power_w is None else hours * devices / paid * operation.busy_power_w / 1e3,
    )


DEFINITION = (
    "model FLOP: products and attention scores of one forward and one backward, every key counted (PaLM's 6N + 12LHQT, "
    "Megatron's formula without recomputation); hardware FLOP: with recomputed forwards"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quoted:
    """Attributes:
    devices: that the plan uses. tokens_per_step: of the global batch. flop_per_token: model FLOP; causal_: half the scores.
    peak_flop_per_s: of a device. peak: which one. mfu, hfu: model and hardware FLOP over the peaks of all devices of the plan.
    memory: bytes by line, of the fullest rank. limit_bytes: of its device. run: of so many tokens, where asked.
    """

    devices: int
    parameters: int
    tokens_per_step: int
    tokens_per_s: Interval
    flop_per_token: float
    causal_flop_per_token: float
    hardware_flop_per_token: float
    peak_flop_per_s: float
    peak: str
    memory: tuple[tuple[str, int], ...]
    limit_bytes: int
    operation: RunningCosts
    run: TrainingRun | None = None

    @property
    def tokens_per_s_per_device(self) -> Interval:
        return self.tokens_per_s.times(1 / self.devices)

    @property
    def model_flop_per_s_per_device(self) -> float:
        return self.tokens_per_s.median * self.flop_per_token / self.devices

    @property
    def mfu(self) -> float:
        return self.model_flop_per_s_per_device / self.peak_flop_per_s

    @property
    def mfu_causal(self) -> float:
        """With half the scores of causal attention, as Llama 3 and NeMo count."""
        return self.mfu * self.causal_flop_per_token / self.flop_per_token

    @property
    def hfu(self) -> float:
        return self.mfu * self.hardware_flop_per_token / self.flop_per_token

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as `--json` prints it under `quoted`."""
        return {
            "parameters": self.parameters,
            "devices": self.devices,
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_s": self.tokens_per_s.to_dict(),
            "tokens_per_s_per_device": self.tokens_per_s_per_device.to_dict(),
            "model_flop_per_token": self.flop_per_token,
            "hardware_flop_per_token": self.hardware_flop_per_token,
            "model_flop_per_s_per_device": self.model_flop_per_s_per_device,
            "hardware_flop_per_s_per_device": self.hfu * self.peak_flop_per_s,
            "mfu": self.mfu,
            "mfu_causal": self.mfu_causal,
            "hfu": self.hfu,
            "peak_flop_per_s": self.peak_flop_per_s,
            "peak": self.peak,
            "definition": DEFINITION,
            "memory_bytes": dict(self.memory),
            "memory_limit_bytes": self.limit_bytes,
            "training": None if self.run is None else self.run.to_dict(),
        }

    def lines(self, *, run: bool = True) -> list[str]:
        """Sentences for people."""
        rate, each = self.tokens_per_s, self.tokens_per_s_per_device
        tera = self.model_flop_per_s_per_device / 1e12
        masked = f"; MFU {format_percent(self.mfu_causal)} if a causal mask halves the attention scores"
        lines = [
            f"tokens/s: {rate.median:,.0f} (90% interval {rate.p05:,.0f} to {rate.p95:,.0f}); per GPU {each.median:,.0f}; "
            f"{format_count(self.tokens_per_step)} tokens per step",
            f"model TFLOP/s per GPU: {f'{tera:.0f}' if tera >= 1 else f'{tera:.2g}'}; MFU {format_percent(self.mfu)}, "
            f"HFU {format_percent(self.hfu)} of {self.peak}" + (masked if self.mfu_causal < self.mfu else ""),
            f"memory of the fullest GPU: {', '.join(f'{name} {format_bytes(size)}' for name, size in self.memory)}; "
            f"{format_bytes(self.limit_bytes)} there",
        ]
        return lines if self.run is None or not run else [*lines, *self.run.lines()]


def quoted(config: Question, problem: PlanningProblem, evaluation: Evaluation) -> Quoted | None:
    """The figures of one plan of a language model; None for other models, or where the device has no peak for the precision.

    Args: config: the question: price, failures and tokens. problem: model and cluster. evaluation: of the plan.
    """
    model, plan = problem.model, evaluation.result.plan
    tokens = tokens_per_sample(model)
    used = [device.type for device in problem.cluster.devices[: plan.world_size]]
    kinds = list(dict.fromkeys(kind.name for kind in used))
    precision = operator_precision(problem.numerics.precision, "matmul")
    if not tokens or any(precision not in kind.peak_flop_per_s for kind in used):
        return None
    peak = sum(kind.peak_flop_per_s[precision] for kind in used) / len(used)
    mean = "the mean of " if len(kinds) > 1 else ""
    per_sample = model_flop(model)
    fullest = max(evaluation.memory, key=lambda rank: rank.total_bytes)
    per_step = tokens * problem.global_batch
    total = config.training.tokens
    return Quoted(
        devices=plan.world_size,
        parameters=model.parameter_count,
        tokens_per_step=per_step,
        tokens_per_s=evaluation.result.step_s.inverse(per_step),
        flop_per_token=per_sample / tokens,
        causal_flop_per_token=model_flop(model, causal=True) / tokens,
        hardware_flop_per_token=(per_sample + recomputed_flop(model, plan)) / tokens,
        peak_flop_per_s=peak,
        peak=f"{peak / 1e12:,.0f} dense {precision} TFLOP/s of {mean}{' and '.join(kinds)}",
        memory=tuple((name, size) for name, size in fullest.lines if size),
        limit_bytes=fullest.limit_bytes,
        operation=running_costs(config, problem),
        run=None if total is None else _run(config, problem, evaluation, total, "tokens", per_step),
    )


def samples_run(config: Question, problem: PlanningProblem, evaluation: Evaluation) -> TrainingRun | None:
    """What `training.samples` takes under a plan; None where the question does not have it."""
    samples = config.training.samples
    return None if samples is None else _run(config, problem, evaluation, samples, "samples", problem.global_batch)


def _run(
    config: Question, problem: PlanningProblem, evaluation: Evaluation, amount: float, unit: str, per_step: int
) -> TrainingRun:
    result, operation = evaluation.result, running_costs(config, problem)
    devices, paid = result.plan.world_size, problem.cluster.size
    return training_run(amount, per_step, result.step_s, operation, unit=unit, devices=devices, paid=paid)


def running_costs(config: Question, problem: PlanningProblem) -> RunningCosts:
    """What one device of the cluster takes: the mean where devices differ, unknown where it is for one of them."""
    kinds = Counter(device.type.name for device in problem.cluster.devices)
    costs = {name: operation_of(config, name) for name in kinds}
    first = next(iter(costs.values()))
    if len(costs) == 1:
        return first

    def mean(key: str) -> float | None:
        values = {name: getattr(cost, key) for name, cost in costs.items()}
        if None in values.values():
            return None
        return float(sum(value * kinds[name] for name, value in values.items()) / kinds.total())

    price = mean("usd_per_hour")
    sources = "; ".join(dict.fromkeys(cost.price_source for cost in costs.values()))
    return replace(first, usd_per_hour=price, price_source="" if price is None else sources, busy_power_w=mean("busy_power_w"))


def operation_of(config: Question, device: str) -> RunningCosts:
    """Price, power and failures: what the question says, else the part's own numbers, else the default with its source."""
    table = config.cluster
    try:
        part = load_gpu(table.gpu or device)
    except ProfileError:  # no part of that name: a profile's own device
        part = None
    price, source = table.usd_per_hour, "given"
    rented = None if table.instance is None else instance_named(table.instance)
    if price is None and rented is not None and rented.usd_per_gpu_hour is not None:
        price, source = rented.usd_per_gpu_hour, rented.price_source
    if price is None and part is not None and part.usd_per_hour is not None:
        dated = part.usd_per_hour
        price, source = dated.value, f"on demand, {dated.as_of}"
    power_w = table.busy_power_w
    if power_w is None and part is not None and part.busy_power_w is not None:
        power_w = part.busy_power_w.value
    hours = table.device_mtbf_hours
    return RunningCosts(
        usd_per_hour=price,
        price_source=source if price is not None else "",
        busy_power_w=power_w,
        device_mtbf_s=(hours or DEVICE_MTBF_HOURS) * HOUR_S,
        mtbf_source="given" if hours else MTBF_SOURCE,
        checkpoint_s=table.checkpoint_s,
        restart_s=table.restart_s,
    )
