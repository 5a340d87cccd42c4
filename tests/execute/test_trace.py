"""Running the components in order equals the module, bit by bit: outputs, gradients of parameters and inputs, buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest

pytest.importorskip("torch", reason="needs the torch extra")

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parsim.errors import TraceError
from parsim.model import record
from parsim.model.build import build_module, example_batch, loss_of
from parsim.model.load import load_model
from parsim.model.objective import LOSSES
from parsim.model.spec import ModelSpec
from tests.execute.bitwise import assert_equal_to_module, assert_same_state, backward_components, forward_components
from tests.execute.traced_modules import CASES, ManyConsumers, TiedWeights
from tests.quick import some_quick
from tests.traced import trace

SMALL = ("resnet_small", "vit_small", "gpt_small", "bert_small", "vgg_small", "mlp")


@pytest.mark.parametrize("granularity", some_quick(["block", "layer", "sublayer"], "layer"))
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_awkward_modules(name: str, training: bool, granularity: str) -> None:
    factory, shapes = CASES[name]
    torch.manual_seed(0)
    module = factory().train(training)
    for batch in (2, 5):
        assert_equal_to_module(module, tuple(torch.randn(batch, *shape) for shape in shapes), granularity)


@pytest.mark.parametrize("name", SMALL)
def test_zoo_with_loss_in_float64(name: str) -> None:
    """The components named in the Model are those recorded, and the last is the summed loss."""
    spec = ModelSpec(name=name)
    torch.manual_seed(0)
    expected_module = build_module(spec).double()
    module = copy.deepcopy(expected_module)
    given, target = example_batch(spec, 3, dtype=torch.float64)
    inputs = tuple(given.values())
    components = record(module, inputs, loss=loss_of(spec))
    model = load_model(spec)
    assert [c.name for c in components] == [c.name for c in model.components]
    for component, described in zip(components, model.components, strict=True):
        assert component.input_names == described.inputs
        assert component.output_names == described.outputs
        assert component.parameter_names == tuple(p.name for p in described.parameters)
        assert component.output_differentiable == tuple(model.value[v].differentiable for v in described.outputs)
    expected = LOSSES[loss_of(spec)].total(expected_module(*inputs), target)
    expected.backward()
    values, saved = forward_components(components, {"input:0": inputs[0], "target": target})
    assert torch.equal(values["loss:0"], expected)
    backward_components(components, saved, {"loss:0": torch.ones_like(expected)})
    assert_same_state(expected_module, module)


@pytest.mark.slow
def test_dropout_of_the_zoo() -> None:
    for name in ("vit_small", "gpt_small", "bert_small", "vgg_small", "mlp"):
        spec = ModelSpec(name=name, args=(("dropout", 0.2),))
        torch.manual_seed(0)
        assert_equal_to_module(build_module(spec), tuple(example_batch(spec, 2)[0].values()), "block")


def test_tied_weights_are_one_parameter() -> None:
    module = TiedWeights()
    tokens = torch.randint(11, (4, 3))
    traced = trace(module, tokens, granularity="layer")
    assert [c.name for c in traced.model.components] == ["embed", "middle", "out"]
    assert traced.components[0].parameter_names == traced.components[2].parameter_names == ("embed.weight",)
    assert traced.model.parameter_count == sum(p.numel() for p in module.parameters())
    assert_equal_to_module(module, (tokens,), "layer")


def test_keyword_inputs() -> None:
    factory, shapes = CASES["several"]
    module = factory()
    inputs = {"left": torch.randn(3, *shapes[0]), "right": torch.randn(3, *shapes[1]), "scale": 3.0}
    traced = trace(module, inputs)
    expected, found = module(**inputs), traced(inputs)
    assert isinstance(found, Mapping)
    assert found["size"] == 3
    for one, other in zip(tree_leaves(expected), tree_leaves(found), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_names() -> None:
    """Readable, unique, without whitespace; calls of one block are numbered; merged components keep the first name."""

    def names(case: str, granularity: str) -> list[str]:
        factory, shapes = CASES[case]
        components = record(factory(), tuple(torch.randn(2, *shape) for shape in shapes), granularity=granularity)
        return [component.name for component in components]

    assert names("called_twice", "layer") == ["first.0", "first.0#2", "last"]
    assert names("in_place_across", "block") == ["one", "three"]
    assert names("dropouts", "block") == ["blocks.0", "blocks.1", "blocks.2"]
    assert names("attention", "block") == ["attention", "encoder.layers.0", "encoder.layers.1", "out"]

    assert names("dropouts", "sublayer") == ["blocks.0", "blocks.1", "blocks.2"]
    assert names("called_twice", "sublayer") == ["first.0", "first.0#2", "last"]

    odd = nn.Sequential()
    odd.add_module("my layer", nn.Linear(3, 3))
    odd.add_module("loss", nn.Linear(3, 3))
    assert [c.name for c in record(odd, torch.randn(2, 3), loss="mse")] == ["my_layer", "loss_", "loss"]


def test_sublayers() -> None:
    """A block falls into its attention and its MLP, with what is normalised after the last sum on its own; the activation
    that ends a residual block of a convolutional network stays with it."""

    def names(name: str) -> list[str]:
        return [component.name for component in load_model(ModelSpec(name=name), granularity="sublayer").components]

    two = [f"{number}.{part}" for number in range(4) for part in ("attention", "fc1")]
    assert names("vit_small") == ["conv_proj", *(f"layers.{name}" for name in two), "ln", "head", "loss"]
    three = [f"layers.{number}.{part}" for number in range(4) for part in ("attention", "intermediate", "output_norm")]
    assert names("bert_small") == ["embeddings.word", "embeddings.norm", *three, "head", "loss.maximum", "loss.sums", "loss"]
    assert names("gpt_small")[:3] == ["wte", "h.0.attn", "h.0.c_fc"]
    for name in ("resnet_small", "vgg_small", "mlp"):
        assert names(name) == [component.name for component in load_model(ModelSpec(name=name)).components]


def test_sublayers_of_a_block_called_twice() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.one(x)
            return x + self.two(x)

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](self.blocks[0](x)))

    components = record(Again(), torch.randn(2, 4), granularity="sublayer")
    expected = ["blocks.0.one", "blocks.0.two", "blocks.0.one#2", "blocks.0.two#2", "blocks.1.one", "blocks.1.two"]
    assert [component.name for component in components] == expected
    assert_equal_to_module(Again(), (torch.randn(3, 4),), "sublayer")


def test_live_parameters_and_bind() -> None:
    """An optimizer step, a parameter replaced by another, and another module of the same structure are all seen."""
    torch.manual_seed(0)
    module = ManyConsumers()
    x = torch.randn(4, 7)
    components = record(module, x)

    def output() -> Tensor:
        return forward_components(components, {"input:0": x})[0][components[-1].output_names[0]]

    with torch.no_grad():
        module.a.weight.mul_(2.0)
    assert torch.equal(output(), module(x))
    module.b.weight = nn.Parameter(torch.randn(7, 7))
    assert torch.equal(output(), module(x))
    other = ManyConsumers()
    for component in components:
        component.bind(other)
    assert torch.equal(output(), other(x))
    with pytest.raises(TraceError, match="same structure"):
        components[0].bind(nn.Linear(2, 2))


def test_recording_leaves_no_trace() -> None:
    """Weights, buffers, gradients, hooks, attributes and the random state are as before, also after a failure."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(4)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.bn(x) + torch.rand_like(x)
            if x.shape[1] != 4:
                raise ValueError("four features")
            return self.last

    module = Remembers()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    identities = [id(tensor) for tensor in (*module.parameters(), *module.buffers())]
    torch.manual_seed(5)
    rng = torch.get_rng_state()
    trace(module, torch.randn(3, 4, generator=torch.Generator()))
    with pytest.raises(TraceError, match="failed on the example inputs"):
        trace(module, torch.zeros(3, 5))
    assert torch.equal(rng, torch.get_rng_state())
    assert module.last is None
    assert identities == [id(tensor) for tensor in (*module.parameters(), *module.buffers())]
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in module.modules())
    assert "apply" in vars(torch.autograd.Function)
    assert torch.autograd.Function.apply.__module__ == "torch.autograd.function"


def test_outputs_are_freed_early() -> None:
    """Between forward and backward nothing is kept but what autograd keeps."""
    import weakref

    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    components = record(module, torch.randn(4, 8))
    x = torch.randn(4, 8)
    y = components[1]([components[0]([x])[0]])[0]
    held = weakref.ref(y)
    assert held() is y
    from parsim.model.autograd.cut import forward_component

    middle, _ = forward_component(components[0], [x])
    last, saved = forward_component(components[1], middle)
    storage = weakref.ref(last[0].untyped_storage())
    del y, last, middle
    assert held() is None
    assert storage() is None
    assert saved.edges[0] is not None


def test_evaluation_saves_nothing() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    components = record(module, torch.randn(4, 8))
    with torch.no_grad():
        values, saved = forward_components(components, {"input:0": torch.randn(4, 8)})
    assert all(edge is None for kept in saved for edge in kept.edges)
    assert not values[components[-1].output_names[0]].requires_grad


class Calls(nn.Module):
    """A module whose forward is the function, with one layer and a weight that is no registered parameter."""

    def __init__(self, function: Callable[[Calls, Tensor], object]) -> None:
        super().__init__()
        self.function, self.fc = function, nn.Linear(3, 3)
        self.hidden = [torch.randn(3, 3, requires_grad=True)]

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def overwrites(_: Calls, x: Tensor) -> Tensor:
    longest = torch.zeros(1, dtype=torch.long)
    longest[0] = x.argmax()
    return x[:, : int(longest)] + 1


REFUSED: dict[str, tuple[Callable[[Calls, Tensor], object], str]] = {
    "a branch on data": (lambda net, x: net.fc(x) if x.sum() > 0 else x, r"1 \(Calls\).*looks at the values"),
    "a constant overwritten with data": (overwrites, r"1 \(Calls\).*looks at the values"),
    "a hidden parameter": (lambda net, x: x @ net.hidden[0], r"1 \(Calls\).*not a registered parameter"),
    "an opaque output": (lambda net, x: Box(x + 1), "returns a Box"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_recorded_is_refused_with_the_module_and_the_reason(kind: str) -> None:
    function, says = REFUSED[kind]
    with pytest.raises(TraceError, match=says):
        record(nn.Sequential(nn.Linear(3, 3), Calls(function)), torch.randn(2, 3))


def test_a_loss_over_pairs_of_samples_can_be_recorded_and_not_counted_per_sample() -> None:
    module = Calls(lambda net, x: torch.softmax(net.fc(x) @ net.fc(x).T, dim=1))
    with pytest.raises(TraceError, match="not linear in the batch"):
        trace(module, torch.randn(2, 3))
    record(module, torch.randn(2, 3))


def test_wrong_calls() -> None:
    with pytest.raises(TraceError, match="block, sublayer, layer"):
        record(nn.Linear(2, 2), torch.randn(2, 2), granularity="operator")
    with pytest.raises(TraceError, match="no torch call"):
        record(nn.Identity(), torch.randn(2, 2))
    (component,) = record(nn.Linear(2, 2), torch.randn(2, 2))
    with pytest.raises(TraceError, match="takes 1 inputs"):
        component([])
