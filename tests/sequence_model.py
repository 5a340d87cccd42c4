"""A small transformer with experts, made by hand: enough to divide its sequence and its experts without torch."""

from __future__ import annotations

from parsim.model.component import LOSS, Component, Operator, OperatorShard, Parameter, ParameterShard, Sharding, Value
from parsim.model.model import Model

SEQ, HIDDEN, HEADS, EXPERTS, ACTIVE, LAYERS = 512, 256, 8, 8, 2, 3
STREAM = 2 * SEQ * HIDDEN


def product(rows: int, outputs: int, inputs: int, problems: int = 1) -> Operator:
    """A product with weights, of one or several experts."""
    shape = (("m", rows), ("n", outputs), ("k", inputs))
    return Operator(
        kind="matmul",
        shape=shape if problems == 1 else (*shape, ("problems", problems)),
        batch="rows",
        forward_flop=2.0 * problems * rows * outputs * inputs,
        activation_bytes=4 * problems * rows * (outputs + inputs),
        parameter_bytes=4 * problems * outputs * inputs,
    )


def attention() -> Operator:
    return Operator(
        kind="attention",
        shape=(("heads", HEADS), ("q", SEQ), ("kv", SEQ), ("d", HIDDEN // HEADS)),
        batch="batch",
        forward_flop=4.0 * SEQ * SEQ * HIDDEN,
        activation_bytes=4 * 4 * SEQ * HIDDEN,
        parameter_bytes=0,
        function="causal",
    )


def sequence_model(*, experts: bool = True) -> Model:
    """Layers of attention and experts, and a loss over the tokens. Weights and activations have 2 bytes per element."""
    values = [Value(name="x0", producer=None, bytes_per_sample=STREAM, differentiable=False, savers=("h.0",))]
    components = []
    for number in range(LAYERS):
        name = f"h.{number}"
        visits = SEQ * ACTIVE // EXPERTS
        operators = [product(SEQ, 3 * HIDDEN, HIDDEN), attention(), product(SEQ, HIDDEN, HIDDEN)]
        parameters = [Parameter(name=f"{name}.qkv", elements=3 * HIDDEN**2, element_bytes=2)]
        if experts:
            operators.append(product(visits, HIDDEN, HIDDEN, EXPERTS))
            parameters.append(Parameter(name=f"{name}.experts.up", elements=EXPERTS * HIDDEN**2, element_bytes=2))
        reader = f"h.{number + 1}" if number + 1 < LAYERS else LOSS
        values.append(Value(name=f"x{number + 1}", producer=name, bytes_per_sample=STREAM, savers=(reader,)))
        components.append(
            Component(
                name=name,
                inputs=(f"x{number}",),
                outputs=(f"x{number + 1}",),
                parameters=tuple(parameters),
                saved_activation_bytes=8 * STREAM,
                forward_peaks=((9 * STREAM, 0),),
                backward_peaks=((2 * STREAM, 0),),
                operators=tuple(operators),
                shardings=(
                    Sharding(
                        rule="heads",
                        limit=HEADS,
                        inputs=("full",),
                        outputs=("partial",),
                        parameters=(ParameterShard(name=f"{name}.qkv", dim=0),),
                        operators=(
                            OperatorShard(number=0, dim="n", activation_bytes=4 * SEQ * 3 * HIDDEN),
                            OperatorShard(number=1, dim="heads", activation_bytes=operators[1].activation_bytes),
                        ),
                        saved_activation_bytes=4 * STREAM,
                    ),
                ),
            )
        )
    values.append(Value(name="target", producer=None, bytes_per_sample=8 * SEQ, differentiable=False, savers=(LOSS,)))
    values.append(Value(name="loss", producer=LOSS, bytes_per_sample=4, savers=()))
    components.append(
        Component(
            name=LOSS,
            inputs=(f"x{LAYERS}", "target"),
            outputs=("loss",),
            saved_activation_bytes=STREAM,
            operators=(
                Operator(
                    kind="memory_bound",
                    shape=(("elements", SEQ * HIDDEN),),
                    batch="batch",
                    forward_flop=0.0,
                    activation_bytes=2 * STREAM,
                    parameter_bytes=0,
                ),
            ),
        )
    )
    return Model(
        name="sequence",
        granularity="block",
        components=tuple(components),
        values=tuple(values),
        inputs=("x0", "target"),
        outputs=("loss",),
        loss="cross_entropy",
    )
