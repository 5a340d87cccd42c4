"""Second forwards and backwards in halves: the same numbers, and less that is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from experiments.common.equality import run_cases
from parsim.errors import TraceError
from parsim.execute.checkpoint.checkpoint import latest_checkpoint, load_state
from parsim.model.autograd.cut import Saved, backward_component, backward_inputs, backward_weights, forward_component
from parsim.model.autograd.recompute import (
    FirstForward,
    KeptCalls,
    Repeat,
    first_forward,
    forward_to_recompute,
    recompute,
    second_forward,
)
from parsim.model.build import build_module, example_batch, loss_of, record
from parsim.model.load import trace_spec
from parsim.model.runnable import Runnable
from parsim.model.spec import ModelSpec
from parsim.model.trace.memory import LiveBytes
from parsim.plans.mesh import Mesh
from tests.execute.small_plans import GPT, RESNET, case

CPU = torch.device("cpu")
DROPPING = {
    "mlp": ModelSpec(name="mlp", args=(("dropout", 0.3), ("width", 24))),
    "vit": ModelSpec(name="vit_small", args=(("dropout", 0.2), ("heads", 2), ("hidden", 16), ("layers", 2))),
    "bert": ModelSpec(
        name="bert_small", args=(("dropout", 0.2), ("heads", 2), ("hidden", 16), ("layers", 2), ("seq", 16), ("vocab", 32))
    ),
    "vgg": ModelSpec(name="vgg_small", args=(("dropout", 0.4),)),
}


def recorded(spec: ModelSpec) -> list[Runnable]:
    torch.manual_seed(0)
    module = build_module(spec).double().train()
    inputs, _ = example_batch(spec, 4, dtype=torch.float64, device="cpu")
    return record(module, inputs, granularity="block", loss=loss_of(spec))


def given_to(runnable: Runnable) -> list[Tensor]:
    """Inputs as they were recorded: normal where they have fractions, else zeros (token ids, labels)."""
    kinds = [runnable.program.tensors[slot] for _, slot, _ in runnable.program.inputs]
    return [
        torch.randn(kind.shape, dtype=kind.dtype) if kind.dtype.is_floating_point else torch.zeros(kind.shape, dtype=kind.dtype)
        for kind in kinds
    ]


def gradients_of(runnable: Runnable, saved: Saved, outputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Of the inputs, then of the parameters."""
    for parameter in runnable.parameters():
        parameter.grad = None
    ones = [torch.ones_like(value) if edge is not None else None for value, edge in zip(outputs, saved.edges, strict=True)]
    inputs = backward_component(saved, ones)
    return [*inputs, *(None if p.grad is None else p.grad.clone() for p in runnable.parameters())]


@pytest.mark.parametrize("by_operator", [False, True], ids=["whole", "by operator"])
@pytest.mark.parametrize("spec", [*DROPPING.values(), GPT, RESNET], ids=lambda spec: spec.name)
def test_a_recomputed_forward_is_the_first_one_again(spec: ModelSpec, by_operator: bool) -> None:
    """Outputs, gradients, the generator's state and the running statistics: all as with one ordinary forward, bitwise."""
    for runnable in recorded(spec):
        torch.manual_seed(1)
        given, start = given_to(runnable), [buffer.clone() for buffer in runnable.buffers()]
        torch.manual_seed(2)
        outputs, saved = forward_component(runnable, given)
        expected = gradients_of(runnable, saved, outputs)
        state, buffers = torch.get_rng_state(), [buffer.clone() for buffer in runnable.buffers()]
        for buffer, value in zip(runnable.buffers(), start, strict=True):
            buffer.copy_(value)

        torch.manual_seed(2)
        live = runnable.buffers()
        again, kept = forward_to_recompute(runnable, given, CPU, by_operator=by_operator)
        assert torch.equal(torch.get_rng_state(), state)
        drawn = torch.randn(3)  # what runs between the two forwards draws numbers of its own
        between = torch.get_rng_state()
        found = gradients_of(runnable, recompute(runnable, kept), again)
        assert torch.equal(torch.get_rng_state(), between)
        assert drawn.shape == (3,)
        assert all(torch.equal(one, other) for one, other in zip(outputs, again, strict=True))
        assert len(found) == len(expected)
        for one, other in zip(expected, found, strict=True):
            assert (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))
        assert all(mine is theirs for mine, theirs in zip(live, runnable.buffers(), strict=True))
        assert all(torch.equal(one, other) for one, other in zip(buffers, runnable.buffers(), strict=True))


def test_masks_differ_where_the_generator_is_not_restored() -> None:
    """The test above can fail: two forwards in a row draw different masks."""
    dropping = next(entry for entry in recorded(DROPPING["mlp"]) if entry.parameters())
    given = given_to(dropping)
    torch.manual_seed(2)
    assert not torch.equal(forward_component(dropping, given)[0][0], forward_component(dropping, given)[0][0])


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.parametrize(
    "meshes",
    [
        (("mlp", Mesh(dp=2)), ("vit", Mesh(pp=2))),
        (("bert", Mesh()), ("vgg", Mesh(dp=2))),
    ],
    ids=lambda meshes: "-".join(name for name, _ in meshes),
)
def test_dropout_draws_the_same_masks_with_recomputation_and_without(
    tmp_path: Path, meshes: tuple[tuple[str, Mesh], ...]
) -> None:
    """The same ranks train on the same masks: their weights end equal, to the last bit."""
    steps = 10
    ends: list[dict[str, Tensor]] = []
    for way in ("none", "full", "selective"):
        (tmp_path / way).mkdir()
        cases = [case(DROPPING[name], mesh, microbatches=2, recompute=way) for name, mesh in meshes]
        runs = run_cases(cases, tmp_path / way, steps=steps)
        found = [latest_checkpoint(tmp_path / way / run.name / "checkpoints") for run in runs]
        ends.append(
            {
                f"{run.name} {name}": value
                for run, entry in zip(runs, found, strict=True)
                if entry is not None
                for name, value in load_state(entry).weights.items()
            }
        )
    assert ends[0].keys() == ends[1].keys() == ends[2].keys()
    assert len({key.split()[0] for key in ends[0]}) == len(meshes)
    assert all(torch.equal(value, other[name]) for other in ends[1:] for name, value in ends[0].items())


# By operator the outputs that are dear to compute are kept: the second forward makes the rest again, to the last bit.

WIDTH = 6
State = list[Tensor]
Step = Callable[[State, Tensor, Sequence[Tensor]], Tensor]

STEPS: dict[str, Step] = {
    "product": lambda past, x, weights: x @ weights[0],
    "product with bias": lambda past, x, weights: F.linear(x, weights[0], weights[2]),
    "scores": lambda past, x, weights: torch.bmm(x, past[len(past) // 2].transpose(1, 2)) @ x,
    "softmax": lambda past, x, weights: x.softmax(-1),
    "norm": lambda past, x, weights: F.layer_norm(x, (WIDTH,), weights[2], weights[3]),
    "dropout": lambda past, x, weights: F.dropout(x, 0.4),
    "gelu": lambda past, x, weights: F.gelu(x),
    "in place": lambda past, x, weights: (x * 1.5).add_(0.5).tanh_(),
    "in place on a product": lambda past, x, weights: (x @ weights[1]).relu_(),
    "two in place on a product": lambda past, x, weights: F.leaky_relu_((x @ weights[1]).add_(0.1)),
    "product, read, then written": lambda past, x, weights: _read_then_written(x @ weights[1]),
    "a part written": lambda past, x, weights: _part_written(x @ weights[0]),
    "residual": lambda past, x, weights: x + past[0],
    "attention": lambda past, x, weights: F.scaled_dot_product_attention(x[:, None], x[:, None], past[0][:, None])[:, 0],
    "transposed copy": lambda past, x, weights: x.transpose(1, 2).contiguous().transpose(1, 2),
}


def _read_then_written(made: Tensor) -> Tensor:
    """What was made is read by an operator that saves something else, and then written into."""
    other = made.sum() * 0.01
    return made.sigmoid_() + other


def _part_written(made: Tensor) -> Tensor:
    made[..., :2] = made[..., 2:4] * 0.5
    return made


class Program:
    """A forward of random steps."""

    input_differentiable = (True,)

    def __init__(self, names: Sequence[str], weights: Sequence[Tensor]) -> None:
        self.names, self.weights = names, weights

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        past = [inputs[0]]
        for name in self.names:
            past.append(STEPS[name](past, past[-1], self.weights))
        return (past[-1],)


def some_weights() -> list[Tensor]:
    shapes = ((WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,), (WIDTH,))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def gradients(saved: Saved, outputs: tuple[Tensor, ...], weights: Sequence[Tensor]) -> list[Tensor | None]:
    for weight in weights:
        weight.grad = None
    found = backward_component(saved, [torch.ones_like(value) for value in outputs])
    return [*found, *(weight.grad for weight in weights)]


def forwards(program: Program, given_to: Tensor) -> tuple[tuple[Tensor, ...], KeptCalls, Saved]:
    """Both, with the generator's state restored between them, and what the second is given as it was kept."""
    state = torch.get_rng_state()
    outputs, calls = first_forward(program, [given_to], FirstForward((given_to, *program.weights)))
    torch.set_rng_state(state)
    kept = given_to if calls.inputs[0] else torch.full_like(given_to, torch.nan)
    return outputs, calls, second_forward(program, [kept], calls)


@settings(max_examples=60, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=8))
def test_any_program_has_the_gradients_of_one_forward(names: list[str]) -> None:
    torch.manual_seed(len(names))
    weights, x = some_weights(), torch.randn(3, WIDTH, WIDTH, dtype=torch.float64)
    program, state = Program(names, weights), torch.get_rng_state()
    expected, saved = forward_component(program, [x])
    wanted = gradients(saved, expected, weights)
    torch.set_rng_state(state)
    outputs, _, again = forwards(program, x)
    assert torch.equal(outputs[0], expected[0])
    for one, other in zip(wanted, gradients(again, outputs, weights), strict=True):
        assert (one is None) == (other is None)
        assert one is None or (other is not None and torch.equal(one, other))


def repeats(names: Sequence[str]) -> dict[str, Repeat]:
    """By operator what the second forward does with it, the last call of each name."""
    weights, x = some_weights(), torch.randn(3, WIDTH, WIDTH, dtype=torch.float64)
    _, calls, _ = forwards(Program(names, weights), x)
    return {str(call.function._overloadpacket).removeprefix("aten."): call.repeat for call in calls.calls if not call.view}


def test_products_and_attention_stay_and_the_rest_runs_again() -> None:
    found = repeats(["norm", "product", "gelu", "product with bias", "gelu", "attention", "dropout", "gelu"])
    assert found["mm"] is found["addmm"] is Repeat.KEPT
    assert found["native_layer_norm"] is found["bernoulli_"] is Repeat.RUN
    kept = [name for name in found if name.startswith("_scaled_dot_product")]
    assert [found[name] for name in kept] == [Repeat.KEPT]


def test_the_core_of_unfused_attention_runs_again_as_in_megatron() -> None:
    found = repeats(["product", "scores", "softmax", "dropout", "product with bias"])
    assert found["mm"] is Repeat.KEPT
    assert found["bmm"] is found["_softmax"] is Repeat.RUN
    assert found["addmm"] is Repeat.UNREAD, "nothing reads the last product again"


def test_what_is_written_into_a_kept_output_is_part_of_it() -> None:
    assert repeats(["in place on a product", "gelu"]) == {
        "mm": Repeat.KEPT,
        "relu_": Repeat.WRITTEN,
        "gelu": Repeat.UNREAD,
        "empty": Repeat.UNREAD,
    }
    assert repeats(["product, read, then written", "gelu"])["sigmoid_"] in (Repeat.WRITTEN, Repeat.RUN)


def test_a_forward_that_changes_is_an_error_and_not_a_wrong_gradient() -> None:
    weights, x = some_weights(), torch.randn(3, WIDTH, WIDTH, dtype=torch.float64)
    program = Program(["product", "gelu", "norm"], weights)
    _, calls = first_forward(program, [x], FirstForward((x, *weights)))
    program.names = ["product", "softmax", "norm"]
    with pytest.raises(TraceError, match=r"called aten\._softmax.* where its first forward called aten\.gelu"):
        second_forward(program, [x], calls)


def test_a_component_that_writes_into_its_input_cannot_run_twice() -> None:
    class Writes(Program):
        def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            scaled = inputs[0].softmax(-1)
            with torch.no_grad():
                inputs[0].mul_(2.0)
            return (scaled * inputs[0].detach(),)

    x = torch.randn(3, WIDTH, WIDTH, dtype=torch.float64)
    program = Writes([], some_weights())
    with pytest.raises(TraceError, match="writes in place into what it is given"):
        first_forward(program, [x], FirstForward((x, *program.weights)))


def test_less_is_kept_than_saved() -> None:
    """Of an MLP with a norm: the output of the first product, and neither the norm's nor the activation's."""
    module = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).double()
    x = torch.randn(5, WIDTH, dtype=torch.float64)

    class Forward(Program):
        def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return (module(inputs[0]),)

    program = Forward([], tuple(module.parameters()))
    _, calls = first_forward(program, [x], FirstForward((x, *program.weights)))
    assert calls.inputs == (True,)
    assert calls.outputs == (False,)
    assert calls.kept_bytes == 8 * 5 * 4 * WIDTH


# A backward in two halves gives the gradients of a whole one, and the halves do what they say.

BATCH = 4
SPECS = (
    ModelSpec(name="mlp"),
    ModelSpec(name="gpt_small", args=(("heads", 2), ("hidden", 16), ("layers", 2), ("seq", 16), ("vocab", 32))),
    ModelSpec(name="vit_small"),
    ModelSpec(name="resnet_small", args=(("width", 4),)),
    ModelSpec(name="vgg_small"),
)


def recorded_components(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> tuple[list[Runnable], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = build_module(spec).to(dtype).train()
    inputs, _ = example_batch(spec, BATCH, dtype=dtype, device="cpu")
    return record(module, inputs, granularity="block", loss=loss_of(spec)), tuple(inputs.values())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_halves_of_every_component_add_up_to_its_backward(spec: ModelSpec) -> None:
    runnables, _ = recorded_components(spec)
    halved = whole = 0
    for runnable in runnables:
        shapes = [runnable.program.tensors[slot] for _, slot, _ in runnable.program.inputs]
        if not any(runnable.input_differentiable) or not runnable.parameters():
            continue
        torch.manual_seed(1)
        given = [torch.randn(tensor.shape, dtype=tensor.dtype) for tensor in shapes]
        so_far = [
            torch.randn_like(value) if flows else None
            for value, flows in zip(given, runnable.input_differentiable, strict=True)
        ]
        results = []
        for halves in (False, True):
            for parameter in runnable.parameters():
                parameter.grad = None
            torch.manual_seed(2)
            outputs, saved = forward_component(runnable, given)
            backs = [
                torch.ones_like(value) if edge is not None else None for value, edge in zip(outputs, saved.edges, strict=True)
            ]
            if halves:
                gradients, half = backward_inputs(saved, runnable.parameters(), backs, so_far)
                assert all(parameter.grad is None for parameter in runnable.parameters()), "the first half leaves them alone"
                whole += half.whole is not None
                halved += half.whole is None
                backward_weights(half)
            else:
                gradients = backward_component(saved, backs, so_far)
            results.append((gradients, [parameter.grad for parameter in runnable.parameters()]))
        for mine, theirs in zip(results[1][0], results[0][0], strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(results[1][1], results[0][1], strict=True):
            assert mine is not None
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert halved > whole, "most components are cut operator by operator"


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_what_the_first_half_takes_is_counted_when_the_model_is_traced(spec: ModelSpec) -> None:
    """Live bytes on real tensors: all that the forward saved stays, beside what waits and what operators make for a while."""
    model = trace_spec(spec, "block")
    runnables, _ = recorded_components(spec, torch.float32)
    compared = 0
    for component, runnable in zip(model.components, runnables, strict=True):
        split = component.split_backward
        assert (split is not None) == bool(any(runnable.input_differentiable) and runnable.parameters()), component.name
        if split is None:
            continue
        shapes = [runnable.program.tensors[slot] for _, slot, _ in runnable.program.inputs]
        given = [torch.randn(kind.shape, dtype=kind.dtype) for kind in shapes]
        with LiveBytes() as live:
            outputs, saved = forward_component(runnable, given)
            sizes = [None if edge is None else value.shape for value, edge in zip(outputs, saved.edges, strict=True)]
            del outputs, given
            before = live.current_bytes
            live.moments = []
            backs = [None if shape is None else torch.ones(shape) for shape in sizes]
            gradients, half = backward_inputs(saved, runnable.parameters(), backs, [None] * len(shapes))
            fullest = max(live.moments) - before
            del gradients, backs, saved
            waiting = live.current_bytes - before
            del half
        assert fullest == max(rate * BATCH + fixed for rate, fixed in split.peaks), component.name
        assert waiting == split.waiting[0] * BATCH + split.waiting[1], component.name
        compared += 1
    assert compared
