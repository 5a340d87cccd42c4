"""The figures that people quote of a training step: tokens per second, TFLOP/s, MFU and HFU, days and price."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from parsim.analyze.model_flop import model_flop, recomputed_flop, tokens_per_sample
from parsim.errors import ProfileError
from parsim.hardware.parts.load import load_gpu
from parsim.model.number_formats import operator_precision
from parsim.predict.evaluate import Evaluation
from parsim.predict.planning_problem import PlanningProblem
from parsim.predict.result import Interval
from parsim.units import format_bytes, format_count, format_percent
from parsim.workflow.config import RunConfig
from parsim.workflow.large.training_run import (
    DEVICE_MTBF_HOURS,
    HOUR_S,
    MTBF_SOURCE,
    RunningCosts,
    TrainingRun,
    training_run,
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
        return _scaled(self.tokens_per_s, 1 / self.devices)

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
        """The same for people.

        Args:
            run: with those of the whole training.
        """
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


def quoted(config: RunConfig, problem: PlanningProblem, evaluation: Evaluation) -> Quoted | None:
    """The figures of one plan of a language model; None for other models, or where the device has no peak for the precision.

    Args:
        config: the question: price, failures and tokens. problem: model and cluster. evaluation: of the plan.
    """
    model, plan = problem.model, evaluation.result.plan
    tokens = tokens_per_sample(model)
    used = [device.type for device in problem.cluster.devices[: plan.world_size]]
    kinds = list(dict.fromkeys(kind.name for kind in used))
    precision = operator_precision(problem.precision, "matmul")
    if not tokens or any(precision not in kind.peak_flop_per_s for kind in used):
        return None
    peak = sum(kind.peak_flop_per_s[precision] for kind in used) / len(used)
    mean = "the mean of " if len(kinds) > 1 else ""
    per_sample = model_flop(model)
    fullest = max(evaluation.memory, key=lambda entry: entry.total_bytes)
    per_step = tokens * problem.global_batch
    step_s, operation = evaluation.result.step_s, running_costs(config, problem)
    total = config.training.tokens
    return Quoted(
        devices=plan.world_size,
        parameters=model.parameter_count,
        tokens_per_step=per_step,
        tokens_per_s=step_s.inverse(per_step),
        flop_per_token=per_sample / tokens,
        causal_flop_per_token=model_flop(model, causal=True) / tokens,
        hardware_flop_per_token=(per_sample + recomputed_flop(model, plan)) / tokens,
        peak_flop_per_s=peak,
        peak=f"{peak / 1e12:,.0f} dense {precision} TFLOP/s of {mean}{' and '.join(kinds)}",
        memory=tuple((name, size) for name, size in fullest.lines if size),
        limit_bytes=fullest.limit_bytes,
        operation=operation,
        run=None if total is None else _run(total, "tokens", per_step, operation, problem, evaluation),
    )


def samples_run(config: RunConfig, problem: PlanningProblem, evaluation: Evaluation) -> TrainingRun | None:
    """What `training.samples` takes under a plan; None where the question does not have it.

    Args:
        config: the question. problem: model and cluster. evaluation: of the plan.
    """
    samples = config.training.samples
    if samples is None:
        return None
    operation = running_costs(config, problem)
    return _run(samples, "samples", problem.global_batch, operation, problem, evaluation)


def _run(
    amount: float, unit: str, per_step: int, operation: RunningCosts, problem: PlanningProblem, evaluation: Evaluation
) -> TrainingRun:
    result, paid = evaluation.result, problem.cluster.size
    return training_run(amount, per_step, result.step_s, operation, unit=unit, devices=result.plan.world_size, paid=paid)


def running_costs(config: RunConfig, problem: PlanningProblem) -> RunningCosts:
    """Of one device of the cluster; the mean over devices where they differ, unknown where it is for one of them."""
    kinds = Counter(device.type.name for device in problem.cluster.devices)
    costs = {name: operation_of(config, name) for name in kinds}
    first = next(iter(costs.values()))
    if len(costs) == 1:
        return first
    prices = {name: entry.usd_per_hour for name, entry in costs.items()}
    watts = {name: entry.busy_power_w for name, entry in costs.items()}
    sources = "; ".join(dict.fromkeys(entry.price_source for entry in costs.values()))
    price = _mean(prices, kinds)
    return replace(first, usd_per_hour=price, price_source="" if price is None else sources, busy_power_w=_mean(watts, kinds))


def _mean(values: Mapping[str, float | None], counts: Mapping[str, int]) -> float | None:
    known = [(value, counts[name]) for name, value in values.items() if value is not None]
    if len(known) < len(values):
        return None
    return sum(value * count for value, count in known) / sum(counts.values())


def operation_of(config: RunConfig, device: str) -> RunningCosts:
    """Price, power and failures: what the question says, else the part's own numbers, else the default with its source.

    Args:
        config: the question. device: the name of the device's type.
    """
    table = config.cluster
    try:
        part = load_gpu(table.gpu or device)
    except ProfileError:  # no part of that name: a profile's own device
        part = None
    price, source = table.usd_per_hour, "given"
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


def _scaled(interval: Interval, factor: float) -> Interval:
    return Interval(**{name: factor * value for name, value in interval.to_dict().items()})
