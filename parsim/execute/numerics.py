"""In which numbers a rank computes, and what it draws at random.

Types of weights, autocast, loss scaling; torch's switches for matmul and cuDNN; seeds of components. The switches are set
explicitly, whatever torch's defaults are, and read back for the record. torch has two ways to set TF32. Reading by the older
one fails where somebody has set by the newer. So both are set, and the newer one is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parsim.data.samples import alone
from parsim.errors import ExecutionError
from parsim.execute.job import Job, RunSpec
from parsim.model.formats import check_executable, number_format
from parsim.model.runnable import CallProgram
from parsim.model.shard.propagate import draws, may_draw_on_host
from parsim.model.shard.rules import generator_of
from parsim.program.placed import PlanIndex

# Random numbers of components on many ranks: ranks with the same samples draw the same ones, all others independent ones.
#
# At the beginning of a step every rank draws one number from a generator of its own. Its state is the same everywhere, because
# the module was built from one seed on all of them. Nobody else draws from it: samples of one's own are read with the
# generators of the process, on a GPU in a thread beside the step. Before each forward of a component that draws, the generator
# of its device is seeded. The seed comes from this number, the component, the microbatch and the group of samples that the rank
# works on. So replicas draw different masks, and the shards of a component begin in one state (`parsim.model.shard.rules` goes
# on from there). A step leaves the rank's generator one number further, whatever was drawn. A checkpoint keeps its state, and
# ranks never drift apart.
#
# On a GPU, a component that may draw from the generator of the host has that one seeded as well, and to itself while it runs:
# whoever reads samples waits (`parsim.data.samples`).


class ComponentRandomness:
    """The seeds of one rank. programs: of the components it runs, whole."""

    def __init__(self, layout: PlanIndex, rank: int, device: torch.device, programs: Mapping[str, CallProgram]) -> None:
        plan = layout.plan
        self._device = device
        self._samples = {
            name: (plan.replica_of_rank(rank), plan.shard_of_rank(rank) // layout.placement[name].batch_ways(plan.mesh.tp))
            for name in layout.rank_components(rank)
            if draws(programs[name])
        }
        on_gpu = device.type == "cuda"
        self._on_host = frozenset(name for name in self._samples if on_gpu and may_draw_on_host(programs[name]))
        self._step = 0
        self._generator = torch.Generator()
        self._generator.set_state(torch.get_rng_state())

    @property
    def state(self) -> Tensor:
        """State of the generator, for a checkpoint or another plan."""
        return self._generator.get_state()

    def go_on(self, state: Tensor) -> None:
        self._generator.set_state(state)

    @property
    def draw(self) -> int:
        return self._step

    @contextlib.contextmanager
    def step(self, draw: int | None = None) -> Iterator[None]:
        """Around a step of training. draw: of an earlier step, whose random numbers are wanted again; None: another one."""
        self._step = int(torch.randint(2**62, (), generator=self._generator)) if draw is None else draw
        draws_here = bool(self._samples) and self._device.type == "cpu"
        state = torch.get_rng_state() if draws_here else None
        try:
            yield
        finally:
            if state is not None:
                torch.set_rng_state(state)

    def draws(self, component: str) -> bool:
        return component in self._samples

    def draws_on_host(self, component: str) -> bool:
        """Whether a forward of the component may draw from the generator of the host."""
        return self._device.type == "cpu" or component in self._on_host

    @contextlib.contextmanager
    def around(self, component: str) -> Iterator[None]:
        """Around every forward of a component: on a GPU it has the generator of the host to itself, if it may draw from that,
        and leaves it as it was."""
        if component not in self._on_host:
            yield
            return
        with alone():
            state = torch.get_rng_state()
            try:
                yield
            finally:
                torch.set_rng_state(state)

    def begin(self, component: str, microbatch: int) -> None:
        """Before the first forward of a component for a microbatch, inside `around`."""
        if component in self._samples:
            key = repr((self._step, component, microbatch, *self._samples[component]))
            seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")
            generator_of(self._device).manual_seed(seed)
            if component in self._on_host:
                torch.default_generator.manual_seed(seed)


# Dynamic loss scaling for fp16: the largest power of two (times the first scale) under which no gradient overflows.
#
# A step whose gradients are not all finite is skipped, on all ranks or on none, and the scale falls; after enough good steps in
# a row it grows. The rule is that of torch.amp.GradScaler, so a plan trains as one process with that scaler does.


FIRST_SCALE, GROWTH_STEPS = 65536.0, 2000
"""torch.amp.GradScaler's defaults, as are the factors."""
GROWTH, BACKOFF = 2.0, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Attributes: scale: of the loss. good_steps: since it last changed, fewer than growth_steps."""

    scale: float = FIRST_SCALE
    good_steps: int = 0
    growth_steps: int = GROWTH_STEPS

    def after(self, overflowed: bool) -> LossScale:
        if overflowed:
            return replace(self, scale=self.scale * BACKOFF, good_steps=0)
        if self.good_steps + 1 < self.growth_steps:
            return replace(self, good_steps=self.good_steps + 1)
        grown = self.scale * GROWTH
        return replace(self, scale=grown if math.isfinite(torch.tensor(grown).item()) else self.scale, good_steps=0)

    def to_tensor(self) -> Tensor:
        return torch.tensor([self.scale, float(self.good_steps)], dtype=torch.float64)

    def from_tensor(self, saved: Tensor) -> LossScale:
        """Inverse of `to_tensor`; how often it grows stays as it is here."""
        scale, good_steps = saved.tolist()
        return replace(self, scale=scale, good_steps=int(good_steps) % self.growth_steps)


def overflow_flag(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """A tensor of one number, above 0 if an entry of the gradients is infinite or no number. By the largest magnitude of each
    array, which needs no memory: `isfinite` of all entries takes as much again as they do."""
    flag = torch.zeros(1, dtype=torch.float32, device=device)
    for gradient in gradients:
        if gradient.numel():
            flag += (~torch.isfinite(torch.linalg.vector_norm(gradient, ord=math.inf))).float()
    return flag


# The types of a precision, and torch's switches.


DTYPES = {"float32": torch.float32, "float64": torch.float64}
AUTOCAST = {"float16": torch.float16, "bfloat16": torch.bfloat16}
TF32, IEEE = "tf32", "ieee"
"""torch's words."""

OVERRIDE_VARIABLE = "NVIDIA_TF32_OVERRIDE"
_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchNumerics:
    """weights: type of parameters, gradients and inputs. autocast: the type of forwards where autocast applies; None: without.
    tf32: matmuls and convolutions of a GPU may use it. master_weights: the optimizer updates copies in fp32. loss_scale: at the
    beginning; None: the loss is not scaled."""

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    tf32: bool = False
    master_weights: bool = False
    loss_scale: LossScale | None = None

    def computing(self, device: torch.device) -> AbstractContextManager[object]:
        """Around every forward of a component. The cache of cast weights lives as long."""
        return _NOTHING if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)


def numerics_of(run: RunSpec, device: torch.device) -> TorchNumerics:
    check_executable(run.precision, run.dtype, device.type)
    scale = LossScale(scale=run.loss_scale, growth_steps=run.loss_scale_growth_steps)
    return numerics_in(run.precision, dtype=run.dtype, master_weights=run.master_weights, loss_scale=scale)


def numerics_in(
    precision: str, *, dtype: str = "float32", master_weights: bool = True, loss_scale: LossScale | None = None
) -> TorchNumerics:
    """The numbers that a precision means. dtype: of the weights where the precision does not halve them. master_weights: where
    it does. loss_scale: at the beginning, where the precision scales the loss; None: the usual one."""
    kind = number_format(precision)
    halved = kind.weight_bytes == 2
    return TorchNumerics(
        weights=torch.bfloat16 if halved else DTYPES[dtype],
        autocast=AUTOCAST[kind.autocast] if kind.autocast else None,
        tf32=precision == "tf32",
        master_weights=halved and master_weights,
        loss_scale=(loss_scale or LossScale()) if kind.scales_loss else None,
    )


def set_switches(*, tf32: bool) -> None:
    """TF32 on or off for matmuls and convolutions alike. No search for the fastest convolution, because its result differs from
    run to run. Algorithms need not be deterministic, as in the calibration. Raises ExecutionError: the environment overrides
    the switch."""
    forced = os.environ.get(OVERRIDE_VARIABLE)
    if torch.version.cuda is not None and forced == ("0" if tf32 else "1"):
        raise ExecutionError(
            f"{OVERRIDE_VARIABLE}={forced} makes NVIDIA's libraries {'ignore' if tf32 else 'use'} TF32 whatever is asked, and "
            f"this run asks for {'tf32' if tf32 else 'fp32 without TF32'}; unset {OVERRIDE_VARIABLE}"
        )
    backends: Any = torch.backends
    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    backends.fp32_precision = "none"  # what the others take where they are not set
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    matmul.allow_tf32 = tf32
    cudnn.allow_tf32 = tf32
    for place in (matmul, cudnn.conv, cudnn.rnn):
        place.fp32_precision = TF32 if tf32 else IEEE
    cudnn.benchmark = False
    cudnn.deterministic = False


def switches() -> dict[str, Any]:
    """What of torch's decides in which numbers matmuls add up, as it is now."""
    backends: Any = torch.backends
    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    return {
        "float32_matmul_precision": "high" if matmul.fp32_precision == TF32 else "highest",
        "matmul_allow_tf32": matmul.fp32_precision == TF32,
        "cudnn_allow_tf32": TF32 in (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision),
        "cudnn_benchmark": bool(cudnn.benchmark),
        "cudnn_deterministic": bool(cudnn.deterministic),
        "fp16_reduced_precision_reduction": bool(matmul.allow_fp16_reduced_precision_reduction),
        "bf16_reduced_precision_reduction": bool(matmul.allow_bf16_reduced_precision_reduction),
    }


def check_switches(recorded: Mapping[str, Any]) -> None:
    """Warn if the switches are not those any more that the record names: a forward may have set them."""
    now = switches()
    changed = [f"{name} {recorded[name]} to {now[name]}" for name in recorded if now[name] != recorded[name]]
    if changed:
        warnings.warn(
            f"the model changed torch's switches while it was run ({', '.join(changed)}): it did not compute in the numbers "
            "that were asked for; leave them to training.precision",
            stacklevel=2,
        )


def described(job: Job, device: str) -> dict[str, Any]:
    """For environment.json: the switches as they are now, and the types of every run of the job."""
    runs = {}
    for run in job.runs:
        numerics = numerics_of(run, torch.device(device))
        runs[run.name] = {
            "precision": run.precision,
            "weights": str(numerics.weights).removeprefix("torch."),
            "autocast": None if numerics.autocast is None else str(numerics.autocast).removeprefix("torch."),
            "master_weights": numerics.master_weights,
            "first_loss_scale": None if numerics.loss_scale is None else numerics.loss_scale.scale,
        }
    return {"device": device, "switches": switches(), "runs": runs}
