"""FLOP of a step as MFU and HFU count them.

Model FLOP are those of the products, convolutions and attention scores of one forward and one backward (twice the forward).
Every key counts, causal or not. That is PaLM's 6N + 12LHQT per token (Chowdhery et al. 2022, appendix B) and Megatron's formula
without recomputation (Narayanan et al. 2021, equation 3). N is what a token visits: the active experts, and no embedding table.
Hardware FLOP add the forwards that a plan runs again. Leaves out: norms, activations, the optimizer, and routing.
"""

from __future__ import annotations

from parsim.model.component import Component
from parsim.model.model import Model
from parsim.plans.plan import Plan
from parsim.plans.recompute import names_by_operator, recomputed_names

COUNTED = ("matmul", "convolution", "attention")
BACKWARD = {"": 2.0, "input": 1.0, "weight": 1.0, "none": 0.0}
"""Times its forward, by what its backward computes."""


def model_flop(model: Model, *, causal: bool = False) -> float:
    """Of one sample, forward and backward once.

    Args:
        model: traced or written; frozen operators count what their backward computes.
        causal: count half the scores where a query sees no later key, as Llama 3 and NeMo do.
    """
    return sum(
        (0.5 if causal and operator.function == "causal" else 1.0)
        * (1.0 + BACKWARD[operator.gradients])
        * operator.forward_flop
        * operator.count
        for component in model.components
        for operator in component.operators
        if operator.kind in COUNTED
    )


def recomputed_flop(model: Model, plan: Plan) -> float:
    """Of one sample, the forwards that run a second time.

    Args:
        model: of the plan. plan: its `recompute` and `segments` name them.
    """
    again = set(recomputed_names(plan.recompute, plan.components)) | {name for part in plan.segments for name in part}
    some = names_by_operator(plan.recompute, plan.components) - again
    return sum(_forward(model.component(name)) for name in again) + sum(_repeated(model.component(name)) for name in some)


def _repeated(component: Component) -> float:
    """Of the operators that run again, where it is recomputed by operator."""
    selective = component.selective
    found = () if selective is None else ((component.operators[number], count) for number, count in selective.operators)
    return sum(operator.forward_flop * count for operator, count in found if operator.kind in COUNTED)


def _forward(component: Component) -> float:
    return sum(operator.forward_flop * operator.count for operator in component.operators if operator.kind in COUNTED)


def tokens_per_sample(model: Model) -> int:
    """Tokens of a sample of a language model, of an encoder and a decoder the encoder's; 0 for other models.

    They are the rows that an embedding reads from an input of token numbers. One number per sample is a class or a time step.
    """
    inputs = {
        name: model.value[name].bytes_per_sample
        for name in model.inputs
        if name in model.value and not model.value[name].differentiable
    }
    for component in model.components:
        for operator in component.operators:
            rows = dict(operator.shape).get("rows", 0)
            if rows > 1 and operator.kind == "embedding" and any(inputs.get(name) == 8 * rows for name in component.inputs):
                return rows
    return 0
