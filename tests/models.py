"""Small Models made by hand: enough to plan, lower, price and simulate without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from parsim.model.catalogue.names import LLAMA
from parsim.model.catalogue.sublayers import Shape
from parsim.model.component import LOSS, Component, Operator, OperatorShard, Parameter, ParameterShard, Sharding, Value
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


def layer(name: str, inputs: tuple[str, ...], parameters: tuple[Parameter, ...], kept_bytes: int, flop: float) -> Component:
    """One product of `flop` per sample; its value is name:0."""
    return Component(
        name=name,
        inputs=inputs,
        outputs=(f"{name}:0",),
        parameters=parameters,
        saved_activation_bytes=kept_bytes,
        operators=(matmul(flop),),
    )


def chain_model(flops: tuple[float, ...] = (1e6, 2e6, 3e6, 2e6), *, elements: int = 1000, width: int = 64) -> Model:
    """A chain c0 -> c1 -> ... -> loss; component i does flops[i] per sample and holds one array of `elements`."""
    values = [Value(name="input:0", producer=None, bytes_per_sample=4 * width, differentiable=False)]
    components = []
    previous = "input:0"
    for number, flop in enumerate(flops):
        name = f"c{number}"
        values.append(Value(name=f"{name}:0", producer=name, bytes_per_sample=4 * width))
        weight = Parameter(name=f"{name}.weight", elements=elements)
        components.append(layer(name, (previous,), (weight,), 4 * width, flop))
        previous = f"{name}:0"
    return _with_loss("chain", components, values, previous)


def bare_chain(names: Sequence[str], *, elements: int, bytes_per_sample: int) -> Model:
    """A chain of components without operators, for tests that give tasks their seconds. Each holds `elements`; 0: no weight."""
    values = ["input:0", *(f"{name}:0" for name in names)]
    return Model(
        name="chain",
        granularity="block",
        components=tuple(
            Component(
                name=name,
                inputs=(value,),
                outputs=(f"{name}:0",),
                parameters=(Parameter(name=f"{name}.weight", elements=elements),) if elements else (),
            )
            for name, value in zip(names, values, strict=False)
        ),
        values=tuple(
            Value(name=value, producer=maker, bytes_per_sample=bytes_per_sample)
            for value, maker in zip(values, (None, *names), strict=True)
        ),
        inputs=("input:0",),
        outputs=(values[-1],),
    )


def residual_model(*, tied: bool = False) -> Model:
    """a -> b -> c -> d where d also reads a (a skip across components); with `tied`, d uses a's parameter too."""
    weights = {name: Parameter(name=f"{name}.weight", elements=100 * (number + 1)) for number, name in enumerate("abcd")}
    reads = {"a": ("input:0",), "b": ("a:0",), "c": ("b:0",), "d": ("c:0", "a:0")}
    values = [Value(name="input:0", producer=None, bytes_per_sample=256, differentiable=False)]
    components = []
    for name, inputs in reads.items():
        values.append(Value(name=f"{name}:0", producer=name, bytes_per_sample=128))
        parameters = (weights[name], weights["a"]) if tied and name == "d" else (weights[name],)
        components.append(layer(name, inputs, parameters, 128, 1e6))
    return _with_loss("residual", components, values, "d:0")


def sharded_model(*, width: int = 64, elements: int = 1024) -> Model:
    """a -> b -> c -> d -> loss, d reads a too; a and c can be cut by column, b and d by row (d adds a's value, a residual)."""
    reads = {"a": ("input:0",), "b": ("a:0",), "c": ("b:0",), "d": ("c:0", "b:0")}
    values = [Value(name="input:0", producer=None, bytes_per_sample=4 * width, differentiable=False)]
    components = []
    for name, inputs in reads.items():
        values.append(Value(name=f"{name}:0", producer=name, bytes_per_sample=4 * width))
        column = name in "ac"
        sharding = Sharding(
            rule="column" if column else "row",
            limit=16,
            inputs=("full",) if column else ("shard:1", "full")[: len(inputs)],
            outputs=("shard:1",) if column else ("partial",),
            parameters=(ParameterShard(name=f"{name}.weight", dim=0 if column else 1),),
            operators=(OperatorShard(number=0, dim="n" if column else "k", activation_bytes=256),),
            saved_activation_bytes=0 if column else 4 * width,
        )
        parameters = (Parameter(name=f"{name}.weight", elements=elements), Parameter(name=f"{name}.bias", elements=16))
        whole = layer(name, inputs, parameters, 4 * width, 2e6)
        product = replace(whole.operators[0], shape=(("m", 1), ("n", 64), ("k", 64)), parameter_bytes=4 * elements)
        components.append(replace(whole, operators=(product,), shardings=(sharding,)))
    return _with_loss("sharded", components, values, "d:0")


def deep_model(layers: int, *, positions: bool = False, differentiable: bool = True) -> Model:
    """The blocks of `sharded_model` one behind the other. `positions`: a value that all first components of blocks read."""
    block, first = sharded_model().components[:-1], "input:0"
    values = [Value(name=first, producer=None, bytes_per_sample=256, differentiable=False)]
    components = []
    if positions:
        values.append(Value(name="positions:0", producer="positions", bytes_per_sample=256, differentiable=differentiable))
        components.append(
            Component(
                name="positions",
                inputs=(first,),
                outputs=("positions:0",),
                parameters=(Parameter(name="positions.weight", elements=64),),
            )
        )
    for layer in range(layers):
        renamed = {"input:0": first} | {f"{one.name}:0": f"{layer}.{one.name}:0" for one in block}
        for one in block:
            name = f"{layer}.{one.name}"
            reads_positions = positions and one.name == "a"
            sharding = one.shardings[0]
            parts = tuple(replace(part, name=f"{layer}.{part.name}") for part in sharding.parameters)
            inputs = (*sharding.inputs, "full") if reads_positions else sharding.inputs
            components.append(
                replace(
                    one,
                    name=name,
                    inputs=(*(renamed[value] for value in one.inputs), *(("positions:0",) if reads_positions else ())),
                    outputs=(f"{name}:0",),
                    parameters=tuple(replace(entry, name=f"{layer}.{entry.name}") for entry in one.parameters),
                    shardings=(replace(sharding, inputs=inputs, parameters=parts),),
                )
            )
            values.append(Value(name=f"{name}:0", producer=name, bytes_per_sample=256))
        first = f"{layer}.d:0"
    return _with_loss("deep", components, values, first)


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


def gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200, **rest: Any) -> Shape:
    """GPT as Megatron trains it."""
    return Shape(name=name, layers=layers, hidden=hidden, heads=heads, vocab=vocab, **rest)


def llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **rest: Any) -> Shape:
    """Llama and its relatives."""
    return gpt(name, layers, hidden, heads, vocab, kv_heads=kv_heads, ffn=ffn, **(LLAMA | rest))
