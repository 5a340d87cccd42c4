"""Parameters that no gradient reaches stay as they are, as in torch, whatever the plan; views of weights are values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from experiments.common.equality import Case, compare_case, even_plan, run_cases
from parsim.app.foreign import state_dict_of
from parsim.execute.checkpoint.checkpoint import load_state
from parsim.execute.job import TrainingRecipe
from parsim.execute.stage import seeded_module
from parsim.model.inputs import ModelInput
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from tests.execute.rank_states import newest

HERE = "tests.execute.test_unreached_weights"
WIDTH, STEPS = 8, 3


class Pooled(nn.Module):
    """A pooler that is computed and not read, a head that is not even called, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.pooler, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {"logits": self.head(h), "pooled": torch.tanh(self.pooler(h))}


class Queries(nn.Module):
    """Learned queries go to the next part as a view of their parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, WIDTH))
        self.inward, self.attention = nn.Linear(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.unsqueeze(0).expand(x.shape[0], -1, -1)
        h = self.inward(x)
        made: Tensor = self.head(self.attention(queries, h, h, need_weights=False)[0].mean(1))
        return made


class Repeating(nn.Module):
    """Equal blocks, whose records are copied; each has a part that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.head(x)
        return made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.probe = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.probe(x)
        made: Tensor = self.layer(x).relu()
        return made


POOLED = ModelSpec(name=f"{HERE}:Pooled", input_shape=(WIDTH,))
QUERIES = ModelSpec(name=f"{HERE}:Queries", inputs=(ModelInput("x", (5, WIDTH)),))
REPEATING = ModelSpec(name=f"{HERE}:Repeating", input_shape=(WIDTH,))


def test_unreached_parameters_are_planned_as_frozen_ones() -> None:
    model = load_model(POOLED)
    assert {parameter.name: parameter.trainable for parameter in model.parameters} == {
        "body.weight": True,
        "body.bias": True,
        "head.weight": True,
        "head.bias": True,
        "pooler.weight": False,
        "pooler.bias": False,
    }
    (note,) = model.assumptions
    assert note.startswith("no gradient of the loss reaches pooler.weight, pooler.bias, other.weight and 1 more")


def test_parts_of_equal_blocks_are_told_apart() -> None:
    model = load_model(REPEATING)
    assert sorted(parameter.name for parameter in model.parameters if not parameter.trainable) == sorted(
        f"blocks.{number}.probe.{name}" for number in range(4) for name in ("weight", "bias")
    )


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_unreached_weights_and_views_of_weights_train_as_in_torch(tmp_path: Path) -> None:
    """torch 2.13: a weight that no loss reaches has no gradient, and weight decay leaves it; a gradient of zero would shrink
    it. Under ZeRO 3 a view of a weight outlives it."""
    recipe = TrainingRecipe(weight_decay=0.1)
    cases = [
        Case(spec=spec, plan=plan, dataset="synthetic", optimizer="adamw", learning_rate=1e-2, recipe=recipe)
        for spec in (POOLED, QUERIES)
        for plan in (
            even_plan(spec, Mesh(dp=2), strategy="dp", batch=8, microbatches=2, zero_stage=3, bucket_bytes=256),
            even_plan(spec, Mesh(pp=2), strategy="mp", batch=8, microbatches=2),
        )
    ]
    runs = run_cases(cases, tmp_path, steps=STEPS)
    for case, run in zip(cases, runs, strict=True):
        difference = compare_case(case, run, tmp_path, steps=STEPS)
        assert difference.worst < 1e-9, (str(case), difference)
        found = newest(tmp_path / run.name / "checkpoints")
        if case.spec is POOLED:
            first = seeded_module(POOLED, run.seed, torch.float64, torch.device("cpu"))
            assert torch.equal(load_state(found).weights["pooler.weight"], first.get_parameter("pooler.weight"))
            assert not any(name.startswith("pooler") for name in load_state(found).optimizer)
            written = state_dict_of(POOLED, found, averaged=False, seed=run.seed)
            assert torch.allclose(written["other.weight"], first.get_parameter("other.weight"))
            Pooled().double().load_state_dict(written, strict=True)
