"""Names, arguments and shapes of models; presets; what needs no torch."""

from __future__ import annotations

import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from parsim.errors import ModelError
from parsim.model import LOSS, Model, ModelSpec, load_model
from parsim.model.build import build_module, example_batch, interface_of, loss_of
from parsim.model.catalogue.zoo import PRESETS, preset_lines
from parsim.model.component import narrow
from parsim.model.inputs import ModelInput
from parsim.model.model import GRANULARITIES
from parsim.model.spec import resolve
from tests.quick import some_quick

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("stem", PRESETS)
def test_presets(stem: str, granularity: str) -> None:
    """Each is found by its spec, ends in the loss, and survives JSON with its shardings."""
    name, args = PRESETS[stem]
    spec = ModelSpec(name=name, args=tuple(args.items()))
    model = load_model(spec, granularity=granularity)
    assert model is load_model(resolve(spec), granularity=granularity), "cached, and found with the arguments spelled out"
    assert model.granularity == granularity
    assert any(component.shardings for component in model.components)
    assert model.components[-1].name == LOSS
    assert Model.from_json(model.to_json()) == model
    assert all(c.forward_flop >= 0 and c.saved_activation_bytes >= 0 for c in model.components)
    assert all(" " not in c.name for c in model.components)


RULES = {
    ("mlp", "layers.9"): {"column": 10, "row": 512},
    ("vgg_small", "features.3"): {"channels_out": 32},
    ("resnet_small", "layer2.0.bn1"): {"follow": 32},
    ("resnet_small", "layer2.0.conv2"): {"channels_out": 32, "channels_in": 32},
    ("vit_small", "layers.0.attention.qkv"): {"heads": 4},
    ("vit_small", "layers.0.fc2"): {"column": 96, "row": 384},
    ("vit_small", "layers.0.ln_1"): {},
    ("gpt_small", "wte"): {"vocabulary": 64, "column": 128},
    ("bert", "embeddings.word"): {"vocabulary": 30522, "column": 768},
}


@pytest.mark.parametrize(("name", "component"), RULES)
def test_rules_of_layers(name: str, component: str) -> None:
    """What can be sharded how, and what the number of shards must divide."""
    model = load_model(ModelSpec(name=name), granularity="layer")
    found = {sharding.rule: sharding.limit for sharding in model.component(component).shardings}
    assert found == RULES[name, component]


def test_rules_of_sublayers() -> None:
    """Attention and MLP whole, as Megatron-LM has them: full in, one sum out."""
    model = load_model(ModelSpec(name="gpt"), granularity="sublayer")
    attention, mlp = model.component("h.3.attn").shardings, model.component("h.3.c_fc").shardings
    assert [(s.rule, s.limit, s.inputs, s.outputs) for s in (*attention, *mlp)] == [
        ("heads+row", 12, ("full",), ("partial",)),
        ("column+row", 3072, ("full",), ("partial",)),
    ]
    assert [(p.name, p.dim, p.blocks) for p in attention[0].parameters] == [
        ("h.3.attn.qkv.weight", 0, 3),
        ("h.3.attn.qkv.bias", 0, 3),
        ("h.3.attn.proj.weight", 1, 1),
    ]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("stem", PRESETS)
def test_narrow_keeps_what_there_is(stem: str, granularity: str) -> None:
    """Each number of a shard is between an equal part and the whole, matrix work is divided, and the whole keeps its name."""
    name, args = PRESETS[stem]
    model = load_model(ModelSpec(name=name, args=tuple(args.items())), granularity=granularity)
    for component in model.components:
        for sharding in component.shardings:
            ways = sharding.limit
            part = narrow(component, sharding.rule, ways)
            assert part.fingerprint != component.fingerprint
            for number in ("forward_flop", "parameter_bytes", "saved_activation_bytes", "saved_fixed_bytes"):
                of_part, of_whole = getattr(part, number), getattr(component, number)
                assert of_whole // ways <= of_part <= of_whole, (component.name, sharding.rule)
            for whole, local in zip(component.operators, part.operators, strict=True):
                assert whole.activation_bytes // ways <= local.activation_bytes <= whole.activation_bytes
            if granularity == "layer":
                assert part.forward_flop * ways == component.forward_flop, (component.name, sharding.rule)


def test_shardings_leave_the_fingerprint_alone() -> None:
    """Operators alike but for how they shard are listed apart; a measured cost is still found."""
    model = load_model(ModelSpec(name="bert_small"), granularity="layer")
    for component in model.components:
        assert replace(component, shardings=()).fingerprint == component.fingerprint
    apart = model.component("head.dense")
    (operator,) = [entry for entry in apart.operators if entry.kind == "matmul"]
    twice = replace(apart, operators=tuple(replace(entry, count=2 * entry.count) for entry in apart.operators))
    listed = replace(apart, operators=apart.operators + apart.operators)
    assert operator.count == 1
    assert twice.fingerprint == listed.fingerprint != apart.fingerprint


def test_presets_need_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from parsim.model import ModelSpec, load_model, record\n"
        "from parsim.errors import MissingDependencyError\n"
        "assert callable(record)\n"
        "print(load_model(ModelSpec(name='resnet50')).parameter_count)\n"
        "print(load_model(ModelSpec(name='resnet50'), granularity='layer').component('layer1.0.bn1').shardings[0].rule)\n"
        "try: load_model(ModelSpec(name='resnet50', args=(('num_classes', 7),)))\n"
        "except MissingDependencyError as error: print(error)\n"
        "try: record(None, None)\n"
        "except MissingDependencyError as error: print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[0] == "25557032"
    assert out[1] == "follow"
    assert "install parsim[torch]" in out[2]
    assert "resnet50" in out[2]
    assert "install parsim[torch]" in out[3]


def test_a_zoo_model_that_looks_at_its_weights_is_built_for_real() -> None:
    """`trunc_normal_` asks whether any number lies outside its bounds, which a fake tensor cannot say."""
    spec = ModelSpec(name="vit_small", args=(("hidden", 72), ("heads", 3)))
    assert load_model(spec).parameter_count > 0


def test_json() -> None:
    spec = ModelSpec(name="gpt", args=(("hidden", 64), ("heads", 2)), input_shape=(32,))
    assert ModelSpec.from_dict(spec.to_dict()) == spec
    assert ModelSpec.from_dict({"name": "mlp"}) == ModelSpec(name="mlp")
    with pytest.raises(ModelError, match="give name, args and input_shape"):
        ModelSpec.from_dict({"args": {}})


def test_resolve_fills_in() -> None:
    spec = resolve(ModelSpec(name="gpt_small", input_shape=(32,)))
    assert dict(spec.args)["seq"] == 32
    assert resolve(ModelSpec(name="gpt_small", args=(("seq", 48),))).input_shape == (48,)
    longer = resolve(ModelSpec(name="gpt_small", args=(("seq", 48),), input_shape=(16,)))
    assert longer.input_shape == (16,)
    assert dict(resolve(ModelSpec(name="mlp", args=(("dropout", 0),))).args)["dropout"] == 0.0
    assert resolve(spec) == spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec(name="resnet5"), "did you mean resnet50"),
        (ModelSpec(name="nets.Net"), "the class Net of nets is written nets:Net"),
        (ModelSpec(name="resnet50", args=(("num_clases", 10),)), "did you mean num_classes"),
        (ModelSpec(name="resnet50", args=(("num_classes", "ten"),)), "must be like 1000, got 'ten'"),
        (ModelSpec(name="resnet50", input_shape=(224, 224)), r"\[channels, height, width\]"),
        (ModelSpec(name="resnet50", input_shape=(3, 0, 224)), "sizes >= 1"),
        (ModelSpec(name="gpt", args=(("seq", 16),), input_shape=(32,)), "exceeds the argument seq"),
        (ModelSpec(name="gpt", input_shape=(3, 8, 8)), r"\[seq\]"),
    ],
)
def test_bad_specs(spec: ModelSpec, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(spec)
    with pytest.raises(ModelError, match="one of block, sublayer, layer, got 'operator'"):
        load_model(spec, granularity="operator")


def test_interfaces() -> None:
    assert loss_of(ModelSpec(name="bert")) == "cross_entropy"
    assert interface_of(ModelSpec(name="resnet_small")).output == (10,)
    tokens = interface_of(ModelSpec(name="gpt_small"))
    assert (tokens.inputs, tokens.output) == ((ModelInput("tokens", (64,), dtype="int64", high=256),), (64, 256))
    assert tokens.takes_tokens
    assert interface_of(ModelSpec(name="mlp")).inputs == (ModelInput("x", (1, 32, 32)),)


class TestWithTorch:
    """Building modules, batches and models outside the zoo."""

    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch", reason="needs the torch extra")

    @pytest.fixture
    def factories(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        (tmp_path / "own_factories.py").write_text(
            "from torch import nn\n"
            "def classifier(width=8):\n    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4))\n"
            "def regression():\n    return nn.Sequential(nn.Linear(6, 1))\n"
            "def tokens():\n    return nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9))\n"
            "def curious():\n    layer = nn.Linear(6, 3)\n"
            "    layer.weight.data.mul_(layer.weight.max().item())\n    return layer\n"
            "def nothing():\n    return 3\n"
            "class Pair(nn.Module):\n    def forward(self, x, label, scale=1.0):\n        return x\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        return "own_factories"

    def test_factories(self, factories: str) -> None:
        import torch

        spec = ModelSpec(name=f"{factories}:classifier", args=(("width", 16),), input_shape=(6,))
        assert load_model(spec).parameter_count == 6 * 16 + 16 + 16 * 4 + 4
        assert [c.name for c in load_model(spec).components] == ["0", "2", "loss"]
        inputs, target = example_batch(spec, 5)
        assert inputs["input"].shape == (5, 6)
        assert target.shape == (5,)
        assert target.max() < 4
        assert build_module(spec)(**inputs).shape == (5, 4)

        regression = ModelSpec(name=f"{factories}:regression", input_shape=(6,))
        assert loss_of(regression) == "mse"
        assert example_batch(regression, 5, dtype=torch.float64)[1].dtype == torch.float64

        tokens = ModelSpec(name=f"{factories}:tokens", input_shape=(7,))
        inputs, target = example_batch(tokens, 3)
        ids = inputs["input"]
        assert ids.shape == target.shape == (3, 7)
        assert ids.max() < 9
        assert load_model(tokens).value["0:0"].bytes_per_sample == 7 * 5 * 4
        assert load_model(ModelSpec(name=f"{factories}:curious", input_shape=(6,))).parameter_count == 21

    @pytest.mark.parametrize(
        ("name", "args", "shape", "message"),
        [
            ("own_factories:missing", (), (6,), "cannot import"),
            ("no_such_package:f", (), (6,), "on the Python path"),
            ("here/own_factories.py:f", (), (6,), "without .py: start in here and give own_factories:f"),
            ("own_factories:classifier", (("depth", 2),), (6,), "refuses its arguments"),
            ("own_factories:nothing", (), (6,), "not a torch module"),
            ("own_factories:classifier", (), None, "needs an input_shape"),
            ("own_factories:Pair", (), None, r"takes x, label\. In \[model\] write inputs = { x = { shape = \[...\] }, label"),
            ("own_factories:classifier", (), (5,), "failed on the example inputs"),
        ],
    )
    def test_bad_factories(
        self, factories: str, name: str, args: tuple[tuple[str, int], ...], shape: tuple[int, ...] | None, message: str
    ) -> None:
        with pytest.raises(ModelError, match=message):
            load_model(ModelSpec(name=name, args=args, input_shape=shape))

    def test_batches_depend_on_the_seed_alone(self) -> None:
        import torch

        spec = ModelSpec(name="resnet_small")
        one, target = example_batch(spec, 4, seed=3)
        torch.manual_seed(99)
        other, again = example_batch(spec, 4, seed=3)
        double, _ = example_batch(spec, 4, seed=3, dtype=torch.float64)
        assert torch.equal(one["x"], other["x"])
        assert torch.equal(target, again)
        assert torch.equal(one["x"], double["x"].float())
        assert not torch.equal(one["x"], example_batch(spec, 4, seed=4)[0]["x"])

    def test_other_arguments_are_traced(self) -> None:
        wide = load_model(ModelSpec(name="mlp", args=(("width", 32), ("depth", 2))))
        assert wide.parameter_count == 1024 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10
        assert [c.name for c in wide.components] == ["layers.0", "layers.3", "layers.6", "loss"]

    @pytest.mark.parametrize("stem", some_quick(["mlp", "resnet_small", "gpt_small", "vit_b_16"], "mlp", "gpt_small"))
    def test_presets_are_current(self, stem: str) -> None:
        """Regenerate with `python tools/generate_presets.py` after a change of the tracer or the zoo."""
        generate = runpy.run_path(str(ROOT / "tools" / "generate_presets.py"))["generate"]
        assert [generate(stem, granularity) for granularity in GRANULARITIES] == preset_lines(stem)

    def test_an_init_that_copies_its_layers_is_traced(self) -> None:
        """nn.TransformerEncoder copies a layer in its `__init__`; without memory for weights, too."""
        name = "tests.matrix.sequence_modules:transformer_encoder"
        spec = ModelSpec(name=name, input_shape=(6, 16), loss="cross_entropy")
        assert load_model(spec).parameter_count == sum(p.numel() for p in build_module(spec).parameters())


@pytest.mark.parametrize("name", ["ResNet101", "resnet-101", "Resnet_101", "resnet 101"])
def test_capitals_and_dashes_of_a_name_do_not_matter(name: str) -> None:
    assert ModelSpec(name=name).name == "resnet101"
