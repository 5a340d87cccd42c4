"""The zoo against published counts, read from the shipped presets (no torch needed).

Sources: parameter counts and GFLOPS (multiply-accumulates) of ResNet-50, ViT-B/16 and VGG-16 as torchvision's model pages
list them (pytorch.org/vision/stable/models); saved activations of ResNet-50 and its 100-class variant as the project's
issue states them; GPT-2 small and BERT base from the closed form of their architecture, the latter equal to the count
reported for BertForMaskedLM (bert-base-uncased).
"""

from __future__ import annotations

import pytest

from parsim.model import LOSS, Model, ModelSpec, load_model


def model(name: str, **args: int) -> Model:
    return load_model(ModelSpec(name=name, args=tuple(args.items())))


@pytest.mark.parametrize(
    ("name", "parameters", "gmac"),
    [
        ("resnet18", 11_689_512, 1.814),
        ("resnet34", 21_797_672, 3.664),
        ("resnet50", 25_557_032, 4.089),
        ("resnet101", 44_549_160, 7.801),
        ("resnet152", 60_192_808, 11.514),
        ("vit_b_16", 86_567_656, 17.56),
        ("vgg16", 138_357_544, 15.47),
    ],
)
def test_torchvision(name: str, parameters: int, gmac: float) -> None:
    found = model(name)
    assert found.parameter_count == parameters
    assert found.forward_flop / 2e9 == pytest.approx(gmac, rel=0.005)


def test_resnet50_at_100_classes() -> None:
    """The classifier is 2048 x classes weights and as many biases as classes."""
    assert model("resnet50", num_classes=100).parameter_count == 25_557_032 - 900 * 2049 == 23_712_932


def test_resnet50_saved_activations() -> None:
    elements = model("resnet50").saved_activation_bytes / 4
    assert elements == pytest.approx(20.9e6, rel=0.05)


def transformer_block(hidden: int) -> int:
    """Attention 4 h^2 + 4 h, MLP 8 h^2 + 5 h, two normalisations 4 h."""
    return 12 * hidden**2 + 13 * hidden


def test_gpt2_small() -> None:
    closed_form = (50257 + 1024) * 768 + 12 * transformer_block(768) + 2 * 768
    assert model("gpt").parameter_count == closed_form == 124_439_808


def test_bert_base() -> None:
    embeddings = (30522 + 512 + 2) * 768 + 2 * 768
    head = 768 * 768 + 768 + 2 * 768 + 30522
    assert model("bert").parameter_count == embeddings + 12 * transformer_block(768) + head == 109_514_298


@pytest.mark.parametrize(("name", "heads"), [("gpt", 12), ("bert", 12)])
def test_transformer_flop(name: str, heads: int) -> None:
    """Per token 2 flop per weight of the linear layers, per block 4 s^2 h for the attention scores and their use."""
    found = model(name)
    seq, vocab = (1024, 50257) if name == "gpt" else (512, 30522)
    linear = 12 * 12 * 768**2 + vocab * 768 + (768**2 if name == "bert" else 0)
    assert found.forward_flop == 2 * seq * linear + 12 * 4 * seq**2 * 768
    attention = [o for c in found.components for o in c.operators if o.kind == "attention"]
    assert all(dict(o.shape) == {"heads": heads, "q": seq, "kv": seq, "d": 768 // heads} for o in attention)
    assert sum(o.count for o in attention) == 12


def test_resnet50_components() -> None:
    """Stem, 3 + 4 + 6 + 3 bottlenecks, classifier, loss; 53 convolutions and one matrix product."""
    found = model("resnet50")
    assert [c.name for c in found.components][:3] == ["conv1", "layer1.0", "layer1.1"]
    assert len(found.components) == 1 + 16 + 1 + 1
    assert found.components[-1].name == LOSS
    kinds = [(o.kind, o.count) for c in found.components for o in c.operators]
    assert sum(count for kind, count in kinds if kind == "convolution") == 53
    assert sum(count for kind, count in kinds if kind == "matmul") == 1


def test_large_activation_of_the_boundary() -> None:
    """The output of the first stage of ResNet-50 is 256 x 56 x 56 floats."""
    found = model("resnet50")
    assert found.value["layer1.2:0"].bytes_per_sample == 256 * 56 * 56 * 4
    assert found.value["input:0"].bytes_per_sample == 3 * 224 * 224 * 4
    assert not found.value["input:0"].differentiable
    assert found.inputs == ("input:0", "target")
    assert found.outputs == ("loss:0",)
