"""Every shardable component of every small model: the shards together are the whole, in values, gradients and buffers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from experiments.common.shards import (  # noqa: E402
    assert_shards_equal_whole,
    copied,
    narrowed,
    traced_and_recorded,
    value_piece,
    values_of,
)
from parsim.errors import ModelError  # noqa: E402
from parsim.model import LOSS, ModelSpec, load_model, record  # noqa: E402
from parsim.model.build import (  # noqa: E402
    build_module,
    example_batch,
    loss_of,
)
from parsim.model.component import narrow  # noqa: E402
from parsim.model.runnable import Runnable  # noqa: E402
from parsim.model.shard.apply import shard_runnable  # noqa: E402
from tests.execute.bitwise import bytes_kept  # noqa: E402
from tests.quick import some_quick  # noqa: E402

SMALL = ("mlp", "vgg_small", "resnet_small", "vit_small", "gpt_small", "bert_small")
SAMPLES = 3


def recorded(name: str, granularity: str) -> tuple[tuple[Runnable, ...], dict[str, torch.Tensor]]:
    """Runnables in float64 with weights that are all in use (no zeros), and every value of one forward."""
    spec = ModelSpec(name=name)
    torch.manual_seed(0)
    module = build_module(spec).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    inputs, target = example_batch(spec, SAMPLES, dtype=torch.float64)
    runnables = record(module, inputs, granularity=granularity, loss=loss_of(spec))
    return runnables, values_of(runnables, {"input:0": next(iter(inputs.values())), "target": target})


@pytest.mark.parametrize("granularity", some_quick(["layer", "sublayer", "block"], "sublayer"))
@pytest.mark.parametrize("name", some_quick(SMALL, "mlp", "vgg_small", "gpt_small"))
def test_shards_equal_the_whole(name: str, granularity: str) -> None:
    model = load_model(ModelSpec(name=name), granularity=granularity)
    runnables, values = recorded(name, granularity)
    cases = [
        (runnable, component, sharding, ways)
        for runnable, component in zip(runnables, model.components, strict=True)
        for sharding in component.shardings
        for ways in (2, 4)
        if sharding.limit % ways == 0
    ]
    assert cases
    for runnable, component, sharding, ways in cases:
        assert_shards_equal_whole(runnable, component, sharding, ways, [values[value] for value in component.inputs])


def test_three_ways() -> None:
    """Ways that are no power of two: 96 hidden features, three channels of a fused projection."""
    model = load_model(ModelSpec(name="vit_small"), granularity="sublayer")
    runnables, values = recorded("vit_small", "sublayer")
    component = model.component("layers.1.fc1")
    runnable = next(entry for entry in runnables if entry.name == component.name)
    assert_shards_equal_whole(runnable, component, component.sharding("column+row"), 3, [values[v] for v in component.inputs])


@pytest.mark.parametrize("name", some_quick(SMALL[1:5], "vgg_small", "gpt_small"))
def test_narrow_is_what_a_shard_does(name: str) -> None:
    """torch 2.13: FlopCounterMode counts no attention on the CPU. Flop and parameters of one of four shards in a real
    forward, against `narrow`."""
    model = load_model(ModelSpec(name=name), granularity="layer")
    runnables, values = recorded(name, "layer")
    checked = 0
    for runnable, component in zip(runnables, model.components, strict=True):
        for sharding in component.shardings:
            if sharding.limit % 4:
                continue
            part = narrow(component, sharding.rule, 4)
            shard = shard_runnable(narrowed(runnable, sharding, 0, 4), sharding, 0, 4)
            given = [
                value_piece(values[value], content, 0, 4)
                for value, content in zip(component.inputs, sharding.inputs, strict=True)
            ]
            with FlopCounterMode(display=False) as counter:
                shard(given)
            flop = sum(o.forward_flop * o.count for o in part.operators if o.kind != "attention")
            assert counter.get_total_flops() == SAMPLES * flop, (component.name, sharding.rule)
            held = sum(p.numel() for p in shard.parameters())
            assert held == sum(p.elements for p in part.parameters), (component.name, sharding.rule)
            checked += 1
    assert checked > 5


def saved_bytes(runnable: Runnable, inputs: list[torch.Tensor], counted: Sequence[bool]) -> int:
    """What autograd keeps of one real forward, each storage once, without parameters and inputs that are not counted."""
    given = [x.clone().requires_grad_(flows) for x, flows in zip(inputs, runnable.input_differentiable, strict=True)]
    uncounted = [x for x, count in zip(given, counted, strict=True) if not count]
    return bytes_kept(lambda: runnable(given), (*runnable.module.parameters(), *runnable.module.buffers(), *uncounted))


@pytest.mark.parametrize("name", some_quick(SMALL, "mlp", "vgg_small", "gpt_small"))
def test_saved_bytes_of_a_shard(name: str) -> None:
    """In float32, at another batch and other ways than the trace used. Left out: embeddings by vocabulary, which keep their
    token mask besides, components without a gradient, and one whose input is a view of a larger tensor.
    """
    model, runnables, values = traced_and_recorded(name, SAMPLES)
    checked = 0
    for runnable, component in zip(runnables, model.components, strict=True):
        if not any(runnable.output_differentiable):
            continue
        given = [values[value] for value in component.inputs]
        whole = component.saved_activation_bytes * SAMPLES + component.saved_fixed_bytes
        tries = itertools.product((True, False), repeat=len(given))  # an input is counted where it is first saved
        keeps = {c: saved_bytes(copied(runnable), given, c) for c in tries}
        counted = next((c for c, size in keeps.items() if size == whole), None)
        for sharding in component.shardings:
            if sharding.limit % 4 or (sharding.rule == "vocabulary" and component.parameters) or counted is None:
                continue
            local = shard_runnable(narrowed(runnable, sharding, 0, 4), sharding, 0, 4)
            pieces = [value_piece(x, content, 0, 4) for x, content in zip(given, sharding.inputs, strict=True)]
            part = narrow(component, sharding.rule, 4)
            expected = part.saved_activation_bytes * SAMPLES + part.saved_fixed_bytes
            assert saved_bytes(local, pieces, counted) == expected, (component.name, sharding.rule)
            checked += 1
    assert checked >= sum(len(component.shardings) for component in model.components) - 3


class TestErrors:
    def test_ways_and_shard(self) -> None:
        component = load_model(ModelSpec(name="vit_small"), granularity="sublayer").component("layers.0.attention")
        runnables, _ = recorded("vit_small", "sublayer")
        runnable = next(entry for entry in runnables if entry.name == component.name)
        with pytest.raises(ModelError, match="3 must divide 4"):
            shard_runnable(runnable, component.shardings[0], 0, 3)
        with pytest.raises(ModelError, match=r"shards 0 to 1 of 2, got 2"):
            shard_runnable(runnable, component.shardings[0], 2, 2)

    def test_another_model(self) -> None:
        """A sharding of something else is found out, not run."""
        sharding = load_model(ModelSpec(name="mlp"), granularity="layer").component("layers.0").shardings[0]
        (runnable,) = record(nn.Linear(4, 4), torch.zeros(2, 4), granularity="layer")
        with pytest.raises(ModelError, match="does not have the sharding column"):
            shard_runnable(runnable, sharding, 0, 2)


def test_the_loss_is_not_sharded() -> None:
    for name in SMALL:
        for granularity in ("block", "sublayer", "layer"):
            assert load_model(ModelSpec(name=name), granularity=granularity).component(LOSS).shardings == ()
