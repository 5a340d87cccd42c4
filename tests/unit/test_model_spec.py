"""Names, arguments and shapes of models; presets; what needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parsim.errors import ModelError
from parsim.model import LOSS, Model, ModelSpec, load_model
from parsim.model.presets import PRESETS
from parsim.model.spec import interface_of, loss_of, resolve
from parsim.model.zoo import ZOO


@pytest.mark.parametrize("stem", PRESETS)
def test_presets(stem: str) -> None:
    """Each is found by its spec, ends in the loss, and survives JSON."""
    name, args = PRESETS[stem]
    spec = ModelSpec(name=name, args=tuple(args.items()))
    model = load_model(spec)
    assert model is load_model(resolve(spec)), "cached, and found with the arguments spelled out"
    assert model.components[-1].name == LOSS
    assert Model.from_json(model.to_json()) == model
    assert all(c.forward_flop >= 0 and c.saved_activation_bytes >= 0 for c in model.components)
    assert all(" " not in c.name for c in model.components)


def test_every_zoo_model_has_a_preset() -> None:
    assert set(ZOO) == {name for name, args in PRESETS.values() if not args}


def test_presets_need_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from parsim.model import ModelSpec, load_model, trace\n"
        "from parsim.errors import MissingDependencyError\n"
        "assert callable(trace)\n"
        "print(load_model(ModelSpec(name='resnet50')).parameter_count)\n"
        "try: load_model(ModelSpec(name='resnet50', args=(('num_classes', 7),)))\n"
        "except MissingDependencyError as error: print(error)\n"
        "try: trace(None, None)\n"
        "except MissingDependencyError as error: print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[0] == "25557032"
    assert "install parsim[torch]" in out[1]
    assert "resnet50" in out[1]
    assert "install parsim[torch]" in out[2]


def test_trace_is_a_function_whatever_is_imported() -> None:
    program = "import parsim.model.trace, parsim.model; assert parsim.model.trace.__name__ == 'trace', parsim.model.trace"
    subprocess.run([sys.executable, "-c", program], check=True)


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


def test_interfaces() -> None:
    assert loss_of(ModelSpec(name="bert")) == "cross_entropy"
    assert interface_of(ModelSpec(name="resnet_small")).output == (10,)
    tokens = interface_of(ModelSpec(name="gpt_small"))
    assert (tokens.inputs, tokens.input_shape, tokens.bound, tokens.output) == ("tokens", (64,), 256, (64, 256))


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
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        return "own_factories"

    def test_factories(self, factories: str) -> None:
        import torch

        from parsim.model.spec import build_module, example_batch

        spec = ModelSpec(name=f"{factories}:classifier", args=(("width", 16),), input_shape=(6,))
        assert load_model(spec).parameter_count == 6 * 16 + 16 + 16 * 4 + 4
        assert [c.name for c in load_model(spec).components] == ["0", "2", "loss"]
        inputs, target = example_batch(spec, 5)
        assert inputs[0].shape == (5, 6)
        assert target.shape == (5,)
        assert target.max() < 4
        assert build_module(spec)(*inputs).shape == (5, 4)

        regression = ModelSpec(name=f"{factories}:regression", input_shape=(6,))
        assert loss_of(regression) == "mse"
        assert example_batch(regression, 5, dtype=torch.float64)[1].dtype == torch.float64

        tokens = ModelSpec(name=f"{factories}:tokens", input_shape=(7,))
        (ids,), target = example_batch(tokens, 3)
        assert ids.shape == target.shape == (3, 7)
        assert ids.max() < 9
        assert load_model(tokens).value["0:0"].bytes_per_sample == 7 * 5 * 4
        assert load_model(ModelSpec(name=f"{factories}:curious", input_shape=(6,))).parameter_count == 21

    @pytest.mark.parametrize(
        ("name", "args", "shape", "message"),
        [
            ("own_factories:missing", (), (6,), "cannot import"),
            ("no_such_package:f", (), (6,), "on the Python path"),
            ("own_factories:classifier", (("depth", 2),), (6,), "refuses its arguments"),
            ("own_factories:nothing", (), (6,), "not a torch module"),
            ("own_factories:classifier", (), None, "needs an input_shape"),
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

        from parsim.model.spec import example_batch

        spec = ModelSpec(name="resnet_small")
        (one,), target = example_batch(spec, 4, seed=3)
        torch.manual_seed(99)
        (other,), again = example_batch(spec, 4, seed=3)
        (double,), _ = example_batch(spec, 4, seed=3, dtype=torch.float64)
        assert torch.equal(one, other)
        assert torch.equal(target, again)
        assert torch.equal(one, double.float())
        assert not torch.equal(one, example_batch(spec, 4, seed=4)[0][0])

    def test_other_arguments_are_traced(self) -> None:
        wide = load_model(ModelSpec(name="mlp", args=(("width", 32), ("depth", 2))))
        assert wide.parameter_count == 1024 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10
        assert [c.name for c in wide.components] == ["layers.0", "layers.3", "layers.6", "loss"]
        deeper = load_model(ModelSpec(name="mlp"), granularity="layer")
        assert deeper.granularity == "layer"

    @pytest.mark.parametrize("stem", ["mlp", "resnet_small", "gpt_small", pytest.param("vit_b_16", marks=pytest.mark.slow)])
    def test_presets_are_current(self, stem: str) -> None:
        """Regenerate with `python -m parsim.model.presets.generate` after a change of the tracer or the zoo."""
        from parsim.model.presets import generate

        shipped = Path(generate.__file__).with_name(f"{stem}.json").read_text()
        assert generate.generate(stem) == shipped
