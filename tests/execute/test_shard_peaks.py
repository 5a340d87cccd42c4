"""The fullest moments of real shards, run as the executor runs them, against those counted when the model was traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from torch import Tensor  # noqa: E402

from experiments.common.shards import bytes_of, narrowed, traced_and_recorded, value_piece, values_of  # noqa: E402
from parsim.model import Model, record  # noqa: E402
from parsim.model.component import Component, DividedSize, Sharding, narrow, share_of, ways_of  # noqa: E402  # noqa: E402
from parsim.model.runnable import Runnable  # noqa: E402
from parsim.model.shard.apply import shard_runnable  # noqa: E402
from parsim.model.trace.traced import model_of  # noqa: E402
from tests.architectures import batch_of, small_module  # noqa: E402
from tests.quick import some_quick  # noqa: E402

SAMPLES = 5


def test_a_moment_of_one_of_four() -> None:
    """100 bytes per sample and 8 more on every shard, and a quarter of 40 and of 12."""
    assert DividedSize(100, 8, 40, 12).at(share_of(0, 4)) == (110, 11)
    assert DividedSize(100, 8, 40, 20).at(share_of(10, 4)) == (112, 14), "three of ten rows"


@pytest.mark.parametrize("name", ["mlp", "vgg_small", "resnet_small", "vit_small", "gpt_small", "bert_small"])
def test_counted_equals_run(name: str) -> None:
    """At another batch than the traces, and at ways of which two were counted and the others are not."""
    assert check(*traced_and_recorded(name, SAMPLES)) > 2


@pytest.mark.slow
def test_counted_equals_run_with_dropout() -> None:
    """Masks of pieces are pieces, those of summands whole."""
    assert check(*traced_and_recorded("gpt_small", SAMPLES, dropout=0.1)) > 2


@pytest.mark.hf
@pytest.mark.parametrize("name", some_quick(["phi3", "llama", "gemma2", "t5"], "phi3"))
def test_counted_equals_run_of_architectures(name: str) -> None:
    """Grouped queries with eight heads on two, unequal runs, full outputs with a gradient, biases per head."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    torch.manual_seed(0)
    heads = {"num_heads": 8} if name == "t5" else {"num_attention_heads": 8, "num_key_value_heads": 4}
    module, inputs = small_module(name, **heads), batch_of(name, SAMPLES)
    model = model_of(module, (), inputs, granularity="sublayer")
    runnables = record(module, inputs, granularity="sublayer")
    given = dict(zip([f"input:{number}" for number in range(len(inputs))], inputs.values(), strict=True))
    assert check(model, runnables, values_of(runnables, given)) > 2


def check(model: Model, runnables: Sequence[Runnable], values: Mapping[str, Tensor]) -> int:
    """How many cases were checked at ways that were not counted."""
    seen: set[tuple[str, str]] = set()
    beyond = 0
    for runnable, component in zip(runnables, model.components, strict=True):
        for sharding in component.shardings:
            if (component.fingerprint, sharding.rule) in seen:
                continue
            seen.add((component.fingerprint, sharding.rule))
            widths = ways_of(sharding)
            for ways in (*widths[:3], widths[-1])[-2:]:
                given = [values[value] for value in component.inputs]
                first = [model.value[value].savers[:1] == (component.name,) for value in component.inputs]
                run = [peaks(runnable, sharding, shard, ways, given, first) for shard in (0, 1)]
                expected = tuple(max(shard[phase] for shard in run) for phase in (0, 1))
                assert counted(narrow(component, sharding.rule, ways)) == expected, (component.name, sharding.rule, ways)
                beyond += ways not in widths[:2]
    return beyond


def counted(part: Component) -> tuple[int, int]:
    forward, backward = (
        [rate * SAMPLES + fixed for rate, fixed in found] for found in (part.forward_peaks, part.backward_peaks)
    )
    return max(forward), max(backward, default=0)


def peaks(
    runnable: Runnable, sharding: Sharding, shard: int, ways: int, whole: Sequence[Tensor], first: Sequence[bool]
) -> tuple[int, int]:
    """Bytes at the fullest moment of a forward, and of a backward beyond what that forward has saved.

    `first`: per input whether this component is the first to save it, so that its backward lets go of it.
    """
    local = shard_runnable(narrowed(runnable, sharding, shard, ways), sharding, shard, ways)
    given = [value_piece(value, content, shard, ways).clone() for value, content in zip(whole, sharding.inputs, strict=True)]
    forward, _, backward = bytes_of(local, given, first)
    return forward, backward
