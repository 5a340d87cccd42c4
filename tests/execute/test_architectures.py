"""What of the architectures that people train can be tensor-sharded: attention and MLP of every layer, and exactly."""

from __future__ import annotations

from functools import lru_cache

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")
pytest.importorskip("transformers", reason="needs the hf extra")

from torch import Tensor  # noqa: E402

from experiments.common.shards import assert_shards_equal_whole, values_of  # noqa: E402
from parsim.model import record  # noqa: E402
from parsim.model.component import PARTIAL, Component, Parameter, Sharding  # noqa: E402
from parsim.model.runnable import CallProgram, Runnable  # noqa: E402
from parsim.model.shard.propagate import variants  # noqa: E402
from tests.architectures import ARCHITECTURES, batch_of, small_module  # noqa: E402
from tests.quick import some_quick  # noqa: E402

pytestmark = pytest.mark.hf

SAMPLES = 2
SINGLE = 2e-6
"""Norms and rotations of most are computed in float32, whatever the weights are."""
TORN = ("mamba",)
"""Their mixers are no attention and no MLP; state matrices and filters stay whole in every shard (`test_shard_calls`)."""
UNTRACED = ("mixtral",)
"""grouped_mm cannot be recorded in float64; with parsim's products for experts, `test_shard_calls` has it."""
QUICK = ("gpt2", "llama", "gemma2", "phi3")
"""The others run with the slow tests."""
KNOWN = some_quick([name for name in ARCHITECTURES if name not in UNTRACED], *QUICK)


@lru_cache(maxsize=1)
def recorded(name: str) -> tuple[list[tuple[Runnable, Component]], dict[str, Tensor]]:
    """By sublayer in float64 with weights that are all in use: components with shardings, not measured, and every value."""
    torch.manual_seed(0)
    module = small_module(name).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in batch_of(name, SAMPLES).items()}
    runnables = record(module, inputs, granularity="sublayer")
    given = dict(zip([f"input:{number}" for number in range(len(inputs))], inputs.values(), strict=True))
    return [(runnable, component(runnable.program)) for runnable in runnables], values_of(runnables, given)


def component(program: CallProgram) -> Component:
    """With its shardings, as tracing has them, but nothing measured."""

    def is_batch(slot: int) -> bool:
        return program.tensors[slot].shape[:1] == (SAMPLES,)

    found = []
    for variant in variants(program, [is_batch(slot) for _, slot, _ in program.inputs]):
        if all(
            is_batch(slot) or made != PARTIAL
            for (_, slot, _), made in zip(program.outputs, variant.result.outputs, strict=True)
        ):
            texts = tuple(f"shard:{content.dim}" if content.form == "shard" else content.form for content in variant.inputs)
            parts = variant.result.parts
            kinds = {key.name: key.kind for key, _ in program.state}
            found.append(
                Sharding(
                    rule=variant.result.rule,
                    limit=variant.result.limit,
                    inputs=texts,
                    outputs=variant.result.outputs,
                    parameters=tuple(part for part in parts.values() if kinds[part.name] == "parameter"),
                    buffers=tuple(part for part in parts.values() if kinds[part.name] == "buffer"),
                )
            )
    return Component(
        name=program.name,
        inputs=tuple(name for name, _, _ in program.inputs),
        outputs=tuple(name for name, _, _ in program.outputs),
        parameters=tuple(
            Parameter(name=key.name, elements=torch.Size(program.tensors[slot].shape).numel())
            for key, slot in program.state
            if key.kind == "parameter"
        ),
        shardings=tuple(found),
    )


def best_cut(component: Component, ways: int) -> Sharding | None:
    """The rule that divides the most parameters."""
    sizes = {parameter.name: parameter.elements for parameter in component.parameters}
    possible = [sharding for sharding in component.shardings if sharding.limit % ways == 0]
    return max(possible, key=lambda sharding: sum(sizes[part.name] for part in sharding.parameters), default=None)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in (*TORN, *UNTRACED)])
def test_attention_and_mlp_are_sharded(name: str) -> None:
    """Every matrix of a layer, over two ranks, and with embeddings and head about half of all parameters."""
    kept: dict[str, float] = {}
    sizes: dict[str, int] = {}
    partial = 0
    for _, component in recorded(name)[0]:
        sharding = best_cut(component, 2)
        divided = set() if sharding is None else {part.name for part in sharding.parameters}
        whole = [p.name for p in component.parameters if p.elements > 64 and p.name not in divided and "norm" not in p.name]
        assert not [entry for entry in whole if any(part.isdigit() for part in entry.split("."))], component.name
        for parameter in component.parameters:
            sizes[parameter.name] = parameter.elements
            kept.setdefault(parameter.name, parameter.elements / (2 if parameter.name in divided else 1))
        layered = any(part.isdigit() for part in component.name.split("."))
        partial += layered and sharding is not None and PARTIAL in sharding.outputs
    assert sum(kept.values()) < 0.56 * sum(sizes.values())
    assert partial == ARCHITECTURES[name].sums


@pytest.mark.parametrize("name", KNOWN)
def test_shards_equal_the_whole(name: str) -> None:
    """Every rule of every component, over two and four ranks, in values and gradients, dropout included."""
    found, values = recorded(name)
    seen: set[tuple[str, str, int]] = set()
    for runnable, component in found:
        for sharding in component.shardings:
            for ways in (2, 4):
                case = (repr([op.function for op in runnable.program.ops]), sharding.rule, ways)
                if sharding.limit % ways == 0 and case not in seen:
                    seen.add(case)
                    given = [values[value] for value in component.inputs]
                    assert_shards_equal_whole(runnable, component, sharding, ways, given, SINGLE)
    assert len(seen) >= 6
