"""What real components and shards keep under autocast, byte by byte, against what their Model says of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from torch import Tensor, nn  # noqa: E402

from experiments.common.shards import bytes_of, narrowed, value_piece, values_of  # noqa: E402
from parsim.model import ModelSpec, record  # noqa: E402
from parsim.model.build import (  # noqa: E402
    build_module,
    example_batch,
    loss_of,
)
from parsim.model.component import (  # noqa: E402
    Component,
    narrow,
    ways_of,
)
from parsim.model.formats import component_in  # noqa: E402
from parsim.model.load import trace_spec  # noqa: E402
from parsim.model.shard.apply import shard_runnable  # noqa: E402
from parsim.model.trace.traced import model_of  # noqa: E402

SAMPLES = 5
HALF = torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "vit_small", "gpt_small"])
def test_shards_keep_what_the_model_says(name: str) -> None:
    """Saved bytes with the casts of weights, to the byte, of the first shard under every rule.

    A lookup in a piece of a table keeps which tokens it has as well. The whole lookup does not, so no Model lists that.
    """
    spec = ModelSpec(name=name)
    model = trace_spec(spec, "sublayer")
    torch.manual_seed(0)
    inputs, target = example_batch(spec, SAMPLES)
    with torch.autocast("cpu", dtype=HALF):
        runnables = record(build_module(spec), inputs, granularity="sublayer", loss=loss_of(spec))
        values = values_of(runnables, {"input:0": next(iter(inputs.values())), "target": target})
    seen = set()
    for runnable, component in zip(runnables, model.components, strict=True):
        first = [model.value[value].savers[:1] == (component.name,) for value in component.inputs]
        for sharding in component.shardings:
            ways = ways_of(sharding)[0]
            if (component.fingerprint, sharding.rule) in seen:
                continue
            seen.add((component.fingerprint, sharding.rule))
            local = shard_runnable(narrowed(runnable, sharding, 0, ways), sharding, 0, ways)
            pieces = zip(component.inputs, sharding.inputs, strict=True)
            given = [value_piece(values[name], content, 0, ways).clone() for name, content in pieces]
            part = narrow(component_in(component, "amp_bf16"), sharding.rule, ways)
            looks_up = not given[0].is_floating_point() and sharding.rule == "vocabulary"
            kept = bytes_of(local, given, first, autocast=True)[1]
            assert kept_by(part) == kept or (looks_up and kept_by(part) < kept), (component.name, sharding.rule)
    assert seen


def test_a_weight_that_every_step_reads_is_cast_once() -> None:
    """The fullest moments of a GRU, forward and backward, to the byte."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.head = nn.GRU(24, 16, batch_first=True, bidirectional=True), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.head(self.core(x)[0].mean(1))
            return made

    module, x = Gated(), torch.randn(SAMPLES, 7, 24)
    core = component_in(model_of(module, (x,), {}, granularity="block").component("core"), "amp_bf16")
    with torch.autocast("cpu", dtype=HALF):
        runnable = next(entry for entry in record(module, x) if entry.name == "core")
    forward, kept, backward = bytes_of(runnable, [x], [False], autocast=True)
    assert kept == kept_by(core)
    assert forward == max(rate * SAMPLES + fixed for rate, fixed in core.forward_peaks)
    assert backward == max(rate * SAMPLES + fixed for rate, fixed in core.backward_peaks)


def kept_by(component: Component) -> int:
    return component.saved_activation_bytes * SAMPLES + component.saved_fixed_bytes + component.cast_bytes
