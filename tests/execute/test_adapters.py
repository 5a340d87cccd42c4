"""LoRA on real modules: what is added to them, and what ranks train, against plain torch written by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import cross_entropy, linear  # noqa: E402

import parsim as ps  # noqa: E402
from experiments.common.equality import Case, even_plan, run_cases  # noqa: E402
from parsim.data.samples import order_of  # noqa: E402
from parsim.errors import ModelError, PlanError  # noqa: E402
from parsim.execute.checkpoint.checkpoint import latest_checkpoint, load_state  # noqa: E402
from parsim.execute.loading import host_values  # noqa: E402
from parsim.execute.rank_run import run_dataset  # noqa: E402
from parsim.execute.stage import seeded_module  # noqa: E402
from parsim.model.adapters import adapt  # noqa: E402
from parsim.model.build import build_module  # noqa: E402
from parsim.model.load import load_model  # noqa: E402
from parsim.model.objective import TARGET  # noqa: E402
from parsim.model.spec import ModelSpec  # noqa: E402
from parsim.model.tuning import Tuning  # noqa: E402
from parsim.plans.mesh import Mesh  # noqa: E402
from tests.execute.bitwise import bytes_kept  # noqa: E402

RANK, ALPHA = 3, 12.0
CPU = torch.device("cpu")


def spec(kind: str = "stack", tune: str | None = f"lora:r={RANK},alpha={ALPHA}") -> ModelSpec:
    document = {"name": f"tests.execute.frozen_modules:{kind}", "input_shape": (1, 8, 8), "loss": "cross_entropy", "tune": tune}
    return ModelSpec.model_validate(document)


def by_hand(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """`frozen_modules.stack` with LoRA on every linear layer but the last: y = W x + b + (alpha / r) B A x."""
    x = x.flatten(1)
    last = max(int(name.partition(".")[0]) for name in weights)
    for number in range(1, last, 2):
        name = str(number)
        base = linear(x, weights[f"{name}.base_layer.weight"], weights[f"{name}.base_layer.bias"])
        low_rank = linear(linear(x, weights[f"{name}.lora_A.default.weight"]), weights[f"{name}.lora_B.default.weight"])
        x = torch.tanh(base + ALPHA / RANK * low_rank)
    return linear(x, weights[f"{last}.weight"], weights[f"{last}.bias"])


def test_a_module_begins_as_it_was_and_computes_what_is_written_by_hand() -> None:
    torch.manual_seed(0)
    plain = build_module(spec(tune=None)).double()
    torch.manual_seed(0)
    module = build_module(spec()).double()
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    assert torch.equal(module(x), plain(x))
    weights = dict(module.named_parameters())
    assert {name for name, weight in weights.items() if weight.requires_grad} == {name for name in weights if "lora" in name}
    for name, weight in weights.items():
        if "lora_B" in name:
            nn.init.normal_(weight)
        elif "lora_A" in name:
            assert weight.abs().max() <= math.sqrt(1 / weight.shape[1])  # kaiming_uniform_ with a = sqrt(5), as peft has it
    torch.testing.assert_close(module(x), by_hand(weights, x), rtol=1e-12, atol=1e-12)


def test_saved_bytes_are_those_of_torch() -> None:
    torch.manual_seed(0)
    module = build_module(spec())
    kept = bytes_kept(lambda: module(torch.randn(6, 1, 8, 8)), module.parameters())
    model = load_model(spec())
    inside = [component for component in model.components if component.name != "loss"]
    assert 6 * sum(each.saved_activation_bytes for each in inside) + sum(each.saved_fixed_bytes for each in inside) == kept


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ("lora:targets=q_proj", "'q_proj' is no linear layer of Sequential"),
        ("lora:targets=attention", "'attention' is no linear layer of Sequential"),
    ],
)
def test_targets_that_no_layer_has_are_refused(tune: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_module(spec(tune=tune))


def test_a_head_that_shares_its_weight_is_not_trained_alone() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

    with pytest.raises(ModelError, match="shares its weight with"):
        adapt(Tied(), Tuning(method="head"))


def test_weights_in_four_bits_are_refused_before_anything_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parsim.app.train.ask_aloud", lambda *_, **__: pytest.fail("planned first"))
    path = tmp_path / "RUN.toml"
    path.write_text(
        '[model]\nname = "mlp"\n[cluster]\nprofile = "dgx1-v100-32gb"\ndevices = 1\n[training]\nglobal_batch = 8\n'
        'tune = "qlora:r=4"\n[plan]\nstrategy = "single"\n'
    )
    with pytest.raises(PlanError, match="planned, and not run"):
        ps.run(path, out=tmp_path / "out")


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
def test_ranks_train_what_plain_torch_trains(tmp_path: Path) -> None:
    """One process, two replicas with ZeRO 3, and two stages, against a loop in plain torch, in float64."""
    steps, batch, rate = 10, 8, 1e-2
    meshes = ((Mesh(), 1, 0), (Mesh(dp=2), 2, 3), (Mesh(pp=2), 2, 0))
    cases = [
        Case(
            spec=spec(),
            plan=even_plan(spec(), mesh, strategy="hp", batch=batch, microbatches=microbatches, zero_stage=zero),
            optimizer="adamw",
            learning_rate=rate,
        )
        for mesh, microbatches, zero in meshes
    ]
    for run in run_cases(cases, tmp_path, steps=steps):
        module = seeded_module(spec(), run.seed, torch.float64, CPU)
        weights = {name: weight.detach().clone() for name, weight in module.named_parameters()}
        trained = [weights[name].requires_grad_() for name in weights if "lora" in name]
        optimizer, data = torch.optim.AdamW(trained, lr=rate), run_dataset(run, "train")
        order = order_of(data, batch, run.seed)
        for step in range(steps):
            values = host_values(data, order.indices(step), None, torch.float64, order.epoch_of(step))
            target = values.pop(TARGET)
            (x,) = values.values()
            optimizer.zero_grad()
            cross_entropy(by_hand(weights, x), target).backward()
            optimizer.step()
        found = latest_checkpoint(tmp_path / run.name / "checkpoints")
        assert found is not None
        state = load_state(found)
        for name, weight in weights.items():
            torch.testing.assert_close(torch.as_tensor(state.weights[name]), weight.detach(), rtol=0, atol=1e-10, msg=name)
