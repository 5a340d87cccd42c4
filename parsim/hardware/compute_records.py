"""The part of a hardware profile about computation: measured and published points, and the fits to them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from parsim.hardware.record import NonNegative, Positive, ProfileRecord


class ComponentPoint(ProfileRecord):
    """One measured component: `seconds` is the median over repeats with `ranks_active` ranks computing at once.

    Attributes:
        issue_s: on a GPU, what the host takes to queue it; `seconds` are the device's alone then. None: not measured apart.
    """

    fingerprint: str
    model: str
    component: str
    phase: Literal["forward", "backward"]
    samples: Annotated[int, Field(ge=1)]
    device_type: str
    precision: str
    ranks_active: int = 1
    seconds: Positive
    spread: NonNegative
    repeats: int
    issue_s: NonNegative | None = None
    source: str


class OptimizerPoint(ProfileRecord):
    """One measured optimizer step (zeroing included) over `elements` scalars in `tensors` arrays; issue_s as of a component."""

    optimizer: str
    elements: int
    tensors: int
    device_type: str
    ranks_active: int = 1
    seconds: Positive
    spread: NonNegative
    repeats: int
    issue_s: NonNegative | None = None
    source: str


class OperatorPoint(ProfileRecord):
    """One published or measured kernel.

    Published: kind and shape as in `parsim.model.component.Operator`, with the batch in `samples`. Measured on this machine:
    kind, function and sizes as in `parsim.costs.compute.launches` (samples 1), the median over repeats with `ranks_active`
    ranks computing at once.
    """

    kind: str
    function: str = ""
    phase: Literal["forward", "backward", "backward_input", "backward_weight"]
    shape: dict[str, int]
    samples: int
    device_type: str
    precision: str
    ranks_active: int = 1
    seconds: Positive
    spread: NonNegative | None = None
    repeats: int = 1
    source: str


FitForm = Literal["saturation", "tiles", "fused_attention"]
"""The formula of a fit: `parsim.costs.compute.operators`, `tile_model` or `attention_model` there."""


KernelPhase = Literal["forward", "backward", "backward_input", "backward_weight"]


class HeldOut(ProfileRecord):
    """Errors of predicted seconds, |log(predicted / measured)|, on rows that the fit had not seen; bias: the median of log."""

    rows: int
    median: NonNegative
    p90: NonNegative
    bias: float


class OperatorFit(ProfileRecord):
    """Fitted time of one kernel of `kind` in `phase`.

    Attributes:
        form: the formula its coefficients enter. variant: of several fits of one kind (the library of an attention); the first
            one listed is used.
        held_out: what the fit was judged on, by what was left out of it.
    """

    kind: str
    phase: KernelPhase
    form: FitForm = "saturation"
    variant: str = ""
    held_out: dict[str, HeldOut] = {}
    precision: str
    device_type: str
    coefficients: dict[str, float]
    relative_sigma: NonNegative
    min_flop: NonNegative
    max_flop: NonNegative
    points: int
    source: str


class Efficiency(ProfileRecord):
    """What whole models reach of the throughput that their operators alone would have, on one device type in one precision.

    Seconds from operators are divided by `factor`; `spread` is the relative spread of the rows it was fitted to around it.
    """

    precision: str
    device_type: str
    factor: Positive
    spread: NonNegative
    points: int
    source: str


class OperatorSurface(ProfileRecord):
    """Fitted time of one launch by its sizes: see `parsim.costs.compute.surfaces` for the terms.

    Attributes:
        relative_sigma: spread of held-out points. reach_doublings: how far they lay from the points that were kept.
        sigma_per_doubling: what a question further away adds.
    """

    kind: str
    function: str
    phase: str
    precision: str
    device_type: str
    seconds_per_term: dict[str, NonNegative]
    relative_sigma: NonNegative
    reach_doublings: NonNegative
    sigma_per_doubling: NonNegative
    points: int
    source: str


class Composition(ProfileRecord):
    """What a component takes beside the sum of its launches: see `parsim.costs.compute.composition`.

    Attributes:
        factors: by kind of operator, on its launches' seconds.
        issue_component_s, issue_launch_s: on a GPU, what the host takes to queue a component, and each of its launches; None:
            not measured apart. issue_kinds_s: and each launch of a kind beyond that.
        component_sigma: spread of single components, step_sigma of the computation of whole steps, both of models whose
            components the fit had not seen. models, points: how much it was fitted to.
    """

    phase: Literal["forward", "backward"]
    precision: str
    device_type: str
    component_s: NonNegative
    launch_s: NonNegative
    seconds_per_parameter_byte: NonNegative
    seconds_per_activation_byte: NonNegative
    factors: dict[str, NonNegative]
    issue_component_s: NonNegative | None = None
    issue_launch_s: NonNegative | None = None
    issue_kinds_s: dict[str, NonNegative] = {}
    component_sigma: NonNegative
    step_sigma: NonNegative
    models: int
    points: int
    source: str


class ComputeRecords(ProfileRecord):
    components: list[ComponentPoint] = []
    optimizers: list[OptimizerPoint] = []
    operator_points: list[OperatorPoint] = []
    operator_fits: list[OperatorFit] = []
    operator_surfaces: list[OperatorSurface] = []
    compositions: list[Composition] = []
    efficiencies: list[Efficiency] = []
