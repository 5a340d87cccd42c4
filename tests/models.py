"""Small Models made by hand: enough to plan, lower, price and simulate without torch."""

from __future__ import annotations

from parsim.model.component import LOSS, Component, Operator, Parameter, Value
from parsim.model.model import Model


def matmul(flop: float) -> Operator:
    """One matrix product of about `flop` per sample."""
    return Operator(
        kind="matmul",
        shape=(("m", 1), ("n", 64), ("k", max(1, int(flop / 128)))),
        batch="rows",
        forward_flop=flop,
        activation_bytes=512,
        parameter_bytes=4096,
    )


def chain_model(flops: tuple[float, ...] = (1e6, 2e6, 3e6, 2e6), *, elements: int = 1000, width: int = 64) -> Model:
    """A chain c0 -> c1 -> ... -> loss; component i does flops[i] per sample and holds one array of `elements`."""
    values = [Value(name="input:0", producer=None, bytes_per_sample=4 * width, differentiable=False)]
    components = []
    previous = "input:0"
    for number, flop in enumerate(flops):
        name = f"c{number}"
        values.append(Value(name=f"{name}:0", producer=name, bytes_per_sample=4 * width))
        components.append(
            Component(
                name=name,
                inputs=(previous,),
                outputs=(f"{name}:0",),
                parameters=(Parameter(name=f"{name}.weight", elements=elements),),
                saved_activation_bytes=4 * width,
                operators=(matmul(flop),),
            )
        )
        previous = f"{name}:0"
    return _with_loss("chain", components, values, previous)


def residual_model(*, tied: bool = False) -> Model:
    """a -> b -> c -> d where d also reads a (a skip across components); with `tied`, d uses a's parameter too."""
    weights = {name: Parameter(name=f"{name}.weight", elements=100 * (number + 1)) for number, name in enumerate("abcd")}
    reads = {"a": ("input:0",), "b": ("a:0",), "c": ("b:0",), "d": ("c:0", "a:0")}
    values = [Value(name="input:0", producer=None, bytes_per_sample=256, differentiable=False)]
    components = []
    for name, inputs in reads.items():
        values.append(Value(name=f"{name}:0", producer=name, bytes_per_sample=128))
        parameters = (weights[name], weights["a"]) if tied and name == "d" else (weights[name],)
        components.append(
            Component(
                name=name,
                inputs=inputs,
                outputs=(f"{name}:0",),
                parameters=parameters,
                saved_activation_bytes=128,
                operators=(matmul(1e6),),
            )
        )
    return _with_loss("residual", components, values, "d:0")


def _with_loss(name: str, components: list[Component], values: list[Value], last: str) -> Model:
    values = [
        *values,
        Value(name="target", producer=None, bytes_per_sample=8, differentiable=False, saved=False),
        Value(name=f"{LOSS}:0", producer=LOSS, bytes_per_sample=0, fixed_bytes=4, saved=False),
    ]
    loss = Component(name=LOSS, inputs=(last, "target"), outputs=(f"{LOSS}:0",))
    return Model(
        name=name,
        granularity="block",
        components=(*components, loss),
        values=tuple(values),
        inputs=("input:0", "target"),
        outputs=(f"{LOSS}:0",),
        source="made by hand in the tests",
    )
