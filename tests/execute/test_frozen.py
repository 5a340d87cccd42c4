"""Frozen parameters: no gradient, no optimizer state, no communication, and no flop of their gradients."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.common.equality import compare_case
from parsim.app.foreign import state_dict_of
from parsim.execute.job import TrainingRecipe
from parsim.model.inputs import ModelInput
from tests.execute.rank_states import newest
from tests.plans import plan_memory

pytest.importorskip("torch", reason="needs the torch extra")

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

import parsim as ps
from experiments.common.equality import Case, even_plan, run_cases
from parsim.costs.compute.launches import backward_launches
from parsim.data.samples import order_of
from parsim.errors import ModelError, PlanError
from parsim.execute.checkpoint.checkpoint import latest_checkpoint, load_state
from parsim.execute.loading import host_values
from parsim.execute.rank_run import run_dataset
from parsim.execute.stage import seeded_module
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.model.adapters import adapt
from parsim.model.build import build_module
from parsim.model.formats import Numerics
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.objective import TARGET
from parsim.model.spec import ModelSpec
from parsim.model.tuning import Tuning
from parsim.plans.mesh import Mesh
from parsim.program.lower import lower
from parsim.program.placed import PlanIndex
from parsim.work import Collective
from tests.execute import frozen_modules
from tests.execute.bitwise import assert_equal_to_module, bytes_kept
from tests.execute.test_equality import assert_equal_to_one_process
from tests.traced import trace

KINDS = ("adapters", "parametrized_adapters", "frozen_start", "frozen_middle", "biases_only")


def spec(kind: str) -> ModelSpec:
    return ModelSpec(name=f"tests.execute.frozen_modules:{kind}", input_shape=(1, 8, 8))


def backward_flop(model: Model, samples: int) -> float:
    """Of all products, by the launches that the price is made of."""
    total = 0.0
    for component in model.components:
        for operator in component.operators:
            if operator.kind == "matmul":
                for launch in sum(backward_launches(operator, samples), ()):
                    if launch.kind == "matmul":
                        total += launch.count * 2 * math.prod(size for _, size in launch.sizes)
    return total


def counted_backward_flop(kind: str, samples: int) -> float:
    """By torch's counter around a real backward."""
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    module = getattr(frozen_modules, kind)()
    loss = module(torch.randn(samples, 8, 8)).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("kind", KINDS)
def test_bitwise(kind: str) -> None:
    torch.manual_seed(0)
    for batch in (2, 5):
        assert_equal_to_module(getattr(frozen_modules, kind)(), (torch.randn(batch, 8, 8),), "layer")


@pytest.mark.parametrize("kind", KINDS)
def test_backward_flop_are_those_of_torch(kind: str) -> None:
    """A frozen weight has no product for its gradient, and what nothing trains before has no backward."""
    model = trace(getattr(frozen_modules, kind)(), torch.randn(2, 8, 8), loss="cross_entropy").model
    assert backward_flop(model, 32) == counted_backward_flop(kind, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_bytes_are_those_of_torch(kind: str) -> None:
    """torch 2.13: autograd keeps fewer values where parameters are frozen: its hooks in a real forward, weights apart."""
    torch.manual_seed(0)
    module = getattr(frozen_modules, kind)()
    kept = bytes_kept(lambda: module(torch.randn(6, 8, 8)), module.parameters())
    model = trace(module, torch.randn(2, 8, 8)).model
    fixed = sum(component.saved_fixed_bytes for component in model.components)
    assert 6 * model.saved_activation_bytes + fixed == kept


def test_a_model_keeps_what_is_frozen_and_one_without_is_written_as_before() -> None:
    frozen = load_model(spec("adapters"))
    again = Model.from_json(frozen.to_json())
    assert again == frozen
    ends = {"1.weight", "1.bias", "9.weight", "9.bias"}
    assert {p.name for p in again.trainable_parameters} == {p.name for p in again.parameters if ".base." not in p.name} - ends
    plain = json.loads(load_model(ModelSpec(name="mlp")).to_json())
    assert all("trainable" not in entry for component in plain["components"] for entry in component.get("parameters", ()))
    assert all("gradients" not in entry for component in plain["components"] for entry in component.get("operators", ()))


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_memory_and_communication_count_what_is_trained(zero_stage: int) -> None:
    model = load_model(spec("adapters"))
    trained = sum(parameter.size_bytes for parameter in model.trainable_parameters)
    frozen = model.parameter_bytes - trained
    plan = even_plan(spec("adapters"), Mesh(dp=2), strategy="dp", batch=8, zero_stage=zero_stage)
    layout = PlanIndex(plan, model)
    assert sum(bucket.size_bytes for bucket in layout.buckets) == trained
    assert sum(bucket.size_bytes for bucket in layout.frozen_buckets) == frozen
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), devices=[0, 1])
    lines = dict(plan_memory(layout, cluster, Numerics(optimizer="adam"))[0].lines)
    assert lines["parameters"] == (frozen + trained if zero_stage < 3 else (frozen + trained) // 2)
    works = [task.work for task in lower(plan, model).tasks]
    gathered = sum(work.size_bytes for work in works if isinstance(work, Collective) and work.operation == "all_gather")
    assert gathered >= frozen if zero_stage == 3 else gathered == (trained if zero_stage else 0)
    assert lines["gradients"] == (trained if zero_stage < 2 else trained // 2)
    assert lines["optimizer_state"] == 2 * (trained if zero_stage < 1 else trained // 2)


def test_a_frozen_layer_has_another_fingerprint_and_a_trained_one_that_of_before() -> None:
    (layer,) = trace(torch.nn.Linear(4, 4), torch.randn(2, 4)).model.components
    assert layer.fingerprint == "5ffaf91bbe7db5cf"
    frozen = replace(layer, parameters=tuple(replace(parameter, trainable=False) for parameter in layer.parameters))
    assert frozen.fingerprint != layer.fingerprint


def quick_cases() -> list[Case]:
    return [
        Case(
            spec=spec(kind),
            plan=even_plan(spec(kind), mesh, strategy="hp", batch=8, microbatches=microbatches, zero_stage=zero, order=order),
            optimizer="adamw",
            learning_rate=1e-2,
        )
        for kind, mesh, microbatches, zero, order in (
            ("adapters", Mesh(dp=2), 1, 0, "1f1b"),
            ("adapters", Mesh(dp=2), 2, 3, "1f1b"),
            ("frozen_start", Mesh(pp=2), 2, 0, "1f1b"),
            ("frozen_start", Mesh(dp=2), 2, 3, "1f1b"),
            ("frozen_middle", Mesh(pp=2), 4, 0, "zero-bubble"),
            ("biases_only", Mesh(dp=2), 2, 2, "1f1b"),
            ("parametrized_adapters", Mesh(dp=2), 1, 1, "1f1b"),
        )
    ]


@pytest.mark.slow
def test_two_ranks_train_what_one_process_trains(tmp_path: Path) -> None:
    assert_equal_to_one_process(quick_cases(), tmp_path, steps=10)


# LoRA on real modules: what is added to them, and what ranks train, against plain torch written by hand.

RANK, ALPHA = 3, 12.0
CPU = torch.device("cpu")


def tuned_spec(kind: str = "stack", tune: str | None = f"lora:r={RANK},alpha={ALPHA}") -> ModelSpec:
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
    plain = build_module(tuned_spec(tune=None)).double()
    torch.manual_seed(0)
    module = build_module(tuned_spec()).double()
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


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ("lora:targets=q_proj", "'q_proj' is no linear layer of Sequential"),
        ("lora:targets=attention", "'attention' is no linear layer of Sequential"),
    ],
)
def test_targets_that_no_layer_has_are_refused(tune: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_module(tuned_spec(tune=tune))


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
            spec=tuned_spec(),
            plan=even_plan(tuned_spec(), mesh, strategy="hp", batch=batch, microbatches=microbatches, zero_stage=zero),
            optimizer="adamw",
            learning_rate=rate,
        )
        for mesh, microbatches, zero in meshes
    ]
    for run in run_cases(cases, tmp_path, steps=steps):
        module = seeded_module(tuned_spec(), run.seed, torch.float64, CPU)
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


# Parameters that no gradient reaches stay as they are, as in torch, whatever the plan; views of weights are values.

HERE = "tests.execute.test_frozen"
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
