"""Every kind of module: its components in order equal the module bit by bit, and its flop are those of torch's counter."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs the torch extra")

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from parsim.errors import TraceError
from parsim.model import record
from parsim.model.model import Model
from parsim.model.trace.checks import eager
from parsim.model.trace.recorder import Routing, balanced_choice
from tests.execute.bitwise import (
    assert_same_state,
    backward_components,
    forward_components,
)
from tests.execute.module_kinds import (
    CLASSES,
    KINDS,
    LENGTH,
    WIDTH,
    Adversaries,
    Branch,
    Mixture,
    Packed,
    WhereExperts,
)
from tests.quick import some_quick
from tests.traced import trace

UNCOUNTED = ("gru_state", "complex")
"""torch's counter has no formula for some of their kernels."""


def twins(name: str, training: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    one, other = KINDS[name][0](), KINDS[name][0]()
    other.load_state_dict(one.state_dict())
    return one.train(training), other.train(training)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", KINDS)
def test_components_equal_the_module_on_other_data(name: str, training: bool) -> None:
    """Recorded on one batch, run twice on others: sizes that depend on data are those of the data."""
    expected, cut = twins(name, training)
    inputs = KINDS[name][1]
    components = record(cut, inputs(4))
    for seed in (1, 2):
        expected.zero_grad()
        cut.zero_grad()
        torch.manual_seed(seed)
        given = inputs(4)
        leaves = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in given)
        with eager():
            torch.manual_seed(seed)
            wanted = [leaf for leaf in tree_leaves(expected(*leaves)) if isinstance(leaf, Tensor)]
            torch.manual_seed(seed)
            values, saved = forward_components(components, {f"input:{n}": x for n, x in enumerate(given)})
            found = values[components[-1].output_names[-1]]
            assert torch.equal(wanted[-1], found)
            gradient = torch.randn_like(found)
            wanted[-1].backward(gradient)
            backward_components(components, saved, {components[-1].output_names[-1]: gradient})
        assert_same_state(expected, cut)


@pytest.mark.parametrize("name", some_quick(KINDS, *list(KINDS)[::3]))
def test_flop_are_those_of_torch(name: str) -> None:
    """Whatever the balance: every token has as many experts."""
    torch.manual_seed(0)
    factory, inputs = KINDS[name]
    model = trace(factory(), inputs(2)).model
    if name in UNCOUNTED:
        assert model.forward_flop > 0
        return
    with eager(), FlopCounterMode(display=False) as counter:
        factory()(*inputs(4))
    fixed = sum(o.forward_flop * o.count for c in model.components for o in c.operators if o.batch == "none")
    assert 4 * model.forward_flop + fixed == pytest.approx(counter.get_total_flops(), rel=1e-9)


def test_experts_are_labelled_and_survive_a_file() -> None:
    model = trace(Mixture(WhereExperts), torch.randn(2, LENGTH, WIDTH), loss="cross_entropy").model
    (note,) = model.assumptions
    assert note == (
        "routing traced with balanced experts: 2 of 4 for each of 5 tokens per sample, 2.5 tokens each (blocks.0 and 1 more)"
    )
    assert Model.from_json(model.to_json()) == model
    assert [component.name for component in model.components] == ["stem", "blocks.0", "blocks.1", "head", "loss"]


def test_fewer_tokens_than_experts_in_a_sample_are_balanced_over_the_batch() -> None:
    """One token per sample, 2 of 4 experts: half a token each; every expert's weights are read."""
    model = trace(Mixture(WhereExperts), torch.randn(2, 1, WIDTH)).model
    block = model.component("blocks.0")
    products = [entry for entry in block.operators if entry.kind == "matmul"]
    assert sum(entry.forward_flop * entry.count for entry in products) == 2 * WIDTH * 4 + 2 * 2 * 2 * WIDTH * 12
    assert len(block.parameters) == 2 + 4 * 4
    assert sum(entry.count for entry in products) == 1 + 2 * 4


@pytest.mark.parametrize(("experts", "chosen", "tokens", "samples"), [(4, 2, 5, 3), (8, 1, 16, 2), (8, 2, 1, 8), (3, 3, 2, 2)])
def test_balanced_choices_differ_by_at_most_one_token_a_sample(experts: int, chosen: int, tokens: int, samples: int) -> None:
    found = balanced_choice(Routing(0, experts, chosen, tokens * samples), samples)
    assert found.shape == (tokens * samples, chosen)
    assert all(len(set(row.tolist())) == chosen for row in found)
    counts = found.flatten().bincount(minlength=experts)
    assert int(counts.max() - counts.min()) <= samples


def test_a_branch_on_data_is_refused_with_its_line_and_followed_on_request() -> None:
    module, data = Branch(), torch.randn(4, WIDTH)
    with pytest.raises(TraceError, match=r"gated \(Gated\).*module_kinds.py:\d+ `if x.sum\(\) > 0.*control_flow=\"example\""):
        trace(module, data)
    traced = trace(module, data, control_flow="example")
    (note,) = traced.model.assumptions
    assert note.startswith("control flow that depends on data follows the example batch: gated at ")
    taken = 2 * WIDTH * WIDTH * (1 if module.stem(data).sum() > 0 else 2)
    assert traced.model.component("gated").forward_flop == taken
    for seed in range(6):  # both branches: the component runs the module's own code
        torch.manual_seed(seed)
        other = torch.randn(4, WIDTH)
        assert torch.equal(traced(other), module(other))
    with pytest.raises(TraceError, match="refuse, example"):
        trace(module, data, control_flow="guess")


def test_each_player_of_a_gan_gets_the_gradient_of_its_own_loss() -> None:
    torch.manual_seed(0)
    module = Adversaries()
    real, noise = torch.randn(6, WIDTH), torch.randn(6, 4)
    module(real, noise).sum().backward()
    found = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    softplus = torch.nn.functional.softplus
    made = module.generator(noise)
    judged = (softplus(-module.discriminator(real)) + softplus(module.discriminator(made.detach()))).sum()
    theirs = torch.autograd.grad(judged, list(module.discriminator.parameters()))
    ours = torch.autograd.grad(softplus(-module.discriminator(made)).sum(), list(module.generator.parameters()))
    assert all(torch.allclose(one, other) for one, other in zip(found, (*ours, *theirs), strict=True))


class Refused:
    """Kinds that cannot be trained by a plan, each with the way round."""

    @staticmethod
    def normalised_over_ranks() -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)))

    @staticmethod
    def scripted() -> nn.Module:
        return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())), nn.Linear(WIDTH, 3))

    @staticmethod
    def averaged() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4, momentum=None))

    @staticmethod
    def lazy() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 4), nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("normalised_over_ranks", r"1 \(SyncBatchNorm\).*use BatchNorm.*or GroupNorm"),
        ("scripted", r"torch.jit.*give the Python module"),
        ("averaged", r"1 \(BatchNorm1d\).*give it a momentum"),
        ("lazy", r"1 \(LazyLinear\).*call the module once"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_refused_with_the_way_round(kind: str, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        trace(getattr(Refused, kind)(), torch.randn(2, WIDTH))


def test_sparse_gradients_and_packed_sequences_are_refused_with_the_way_round() -> None:
    with pytest.raises(TraceError, match=r"\(Embedding\).*sparse=False"):
        trace(nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, CLASSES)), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(TraceError, match=r"packs sequences by their lengths.*module_kinds.py:\d+.*gather"):
        trace(Packed(), (torch.randn(2, LENGTH, WIDTH), torch.tensor([5, 3])))
