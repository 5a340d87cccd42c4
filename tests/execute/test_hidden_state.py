"""A forward that draws outside torch is refused with its line; attributes that it changes are named in the answer."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from torch import Tensor, nn  # noqa: E402

import parsim  # noqa: E402
from parsim.errors import TraceError  # noqa: E402
from parsim.model import record  # noqa: E402
from tests.traced import trace  # noqa: E402

EXAMPLE = torch.zeros(4, 6)


class Dropped(nn.Module):
    """A layer that is left out in some steps, by numbers that `draw` makes."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training and self.draw() < 0.5:
            x = self.second(x)
        made: Tensor = self.head(x)
        return made


class OwnGenerator(Dropped):
    """A generator among the attributes of a part."""

    def __init__(self, generator: random.Random | np.random.Generator) -> None:
        super().__init__(generator.random)
        self.second.generator = generator


class Annealed(nn.Module):
    """A weight that grows with the calls of its forward, in a plain attribute; and one in a buffer."""

    calls: Tensor

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.step, self.buffer = 0, buffer

    def forward(self, x: Tensor) -> Tensor:
        if self.buffer:
            self.calls += 1
            made: Tensor = self.layer(x) * self.calls
            return made
        self.step += 1
        made = self.layer(x) * min(1.0, self.step / 1000)
        return made


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Dropped(random.random), "Python's random"),
        (Dropped(lambda: random.choice([0.1, 0.9])), "Python's random"),
        (Dropped(np.random.rand), "numpy.random"),  # type: ignore[arg-type]
        (OwnGenerator(random.Random(0)), "the generator second.generator"),
        (OwnGenerator(np.random.default_rng(0)), "the generator second.generator"),
    ],
)
def test_draws_outside_torch_are_refused_and_the_generators_stay(module: nn.Module, named: str) -> None:
    before = states()
    for call in (lambda: trace(module, EXAMPLE), lambda: record(module, EXAMPLE)):
        with pytest.raises(TraceError, match=rf"draws from {named}.* draw with torch"):
            call()
    if not isinstance(module, OwnGenerator):
        assert states() == before


def states() -> tuple[object, object]:
    """Of both global generators."""
    return random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - what users' code draws from


def test_the_line_of_the_draw_is_named() -> None:
    with pytest.raises(TraceError, match=r"test_hidden_state.py:\d+ `if self.training and self.draw\(\) < 0.5:`"):
        trace(Dropped(random.random), EXAMPLE)


def test_draws_of_torch_are_recorded() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = x + self.layer(x) * (torch.rand(len(x), 1) < 0.9)
            return made

    assert trace(Kept(), EXAMPLE).model.assumptions == ()


def test_attributes_that_a_forward_changes_are_named_in_the_answer() -> None:
    module = Annealed(buffer=False)
    answer = parsim.plan(module, cluster="dgx1-v100-32gb", devices=2, global_batch=8, strategy="dp", example_inputs=EXAMPLE)
    (note,) = [text for text in answer.prediction.warnings if "changes attributes" in text]
    assert "step (0 to 1)" in note
    assert "buffer" in note
    assert module.step == 0
    assert trace(Annealed(buffer=True), EXAMPLE).model.assumptions == ()
