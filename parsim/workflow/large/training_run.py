"""What a number of tokens or samples takes at a predicted step: days, price, energy, and what failures cost at that scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from parsim.engines.scenario.checkpointing import daly_interval_s, expected_run_s, young_interval_s
from parsim.predict.result import Interval
from parsim.units import format_percent, format_seconds

DAY_S, HOUR_S = 86_400.0, 3_600.0
BILLION = 1e9

DEVICE_MTBF_HOURS = 16_384 * 54 * 24 / 419
"""50,700 hours: 419 unexpected interruptions in 54 days on 16,384 H100."""
MTBF_SOURCE = "419 unexpected interruptions of 16,384 H100 in 54 days (Llama 3, arXiv 2407.21783, section 3.3.4)"
CHECKPOINT_S = 60.0
RESTART_S = 600.0
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
    checkpoint_s: float = CHECKPOINT_S
    restart_s: float = RESTART_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What failures cost, by Daly's model: exponential gaps, checkpoints at the best interval.

    Attributes:
        machine_mtbf_s: of all devices together. interval_s: of training between checkpoints, Daly's; young_s: Young's.
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
        """The same for people. Failures are left out where less than one in a hundred runs meets one."""
        losses, days, operation = self.losses, self.days, self.operation
        price = "price: unknown (set cluster.usd_per_hour)"
        if self.usd is not None:
            price = f"price: {_figure(self.usd)} USD at {operation.usd_per_hour:g} per GPU-hour ({operation.price_source})"
        energy = (
            "; energy: unknown (set cluster.busy_power_w)"
            if self.energy_kwh is None
            else f"; energy of the GPUs: {_energy(self.energy_kwh)} at busy power"
        )
        median, low, high, whole = _durations(days.median, days.p05, days.p95, losses.days)
        amount = _amount(self.amount)
        lines = [
            f"{amount} {self.unit}: {self.steps:,} steps, {median} (90% interval {low} to {high}), "
            f"{whole} with failures and checkpoints; {_figure(self.device_hours)} GPU-hours",
            f"{price}{energy}",
        ]
        if losses.failures < SELDOM:
            return lines
        return [
            *lines,
            f"failures: one in {format_seconds(losses.machine_mtbf_s)} on {self.devices} GPUs "
            f"({operation.device_mtbf_s / HOUR_S:,.0f} hours per GPU: {operation.mtbf_source}), "
            f"{losses.failures:.3g} expected; a checkpoint every {format_seconds(losses.interval_s)} "
            f"(Daly; {operation.checkpoint_s:g} s to write, {operation.restart_s:g} s to restart) "
            f"loses {format_percent(losses.lost_fraction)}",
        ]


def _amount(value: float) -> str:
    """`12,800,000`; from a billion on `300 billion`, `15 trillion`."""
    if value < BILLION:
        return f"{value:,.0f}"
    return f"{value / BILLION:.6g} billion" if value < 1e3 * BILLION else f"{value / BILLION / 1e3:.6g} trillion"


def _figure(value: float) -> str:
    """Whole from 100 on, below it three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _energy(kwh: float) -> str:
    return f"{kwh / 1e3:,.1f} MWh" if kwh >= 1e3 else f"{kwh:.3g} kWh"


def _durations(first: float, *others: float) -> list[str]:
    """Days as texts, of which the first alone has the unit; hours and minutes where it is below one day."""
    if first < 1:
        return [format_seconds(value * DAY_S) for value in (first, *others)]
    return [f"{first:.3g} days", *(f"{value:.3g}" for value in others)]


def losses_of(work_s: float, devices: int, operation: RunningCosts) -> Losses:
    """The expected cost of failures and checkpoints.

    Args:
        work_s: seconds of steps. devices: each of which stops the job when it fails. operation: of the machine.
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

    Args:
        amount: of `unit` ("tokens", "samples"), to train on. per_step: of the global batch. step_s: predicted.
        devices: of the plan, which fail and draw power. paid: of the cluster.
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
