"""By operator the outputs that are dear to compute are kept: the second forward makes the rest again, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parsim.errors import TraceError
from parsim.model.autograd.cut import Saved, backward_component, forward_component
from parsim.model.autograd.recompute import FirstForward, KeptCalls, Repeat, first_forward, second_forward

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
