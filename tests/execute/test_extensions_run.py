"""Extensions from outside the package on two processes: what was planned with them is what one process trains."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from calibration.measure.collectives import CollectiveItem, all_items, make_bench, measure_item, preparation
from calibration.rounds.request import CalibrationRequest
from experiments.common.equality import Case, compare_case, even_plan, launched, run_cases
from experiments.common.forked import run_ranks
from parsim.app.ask import ask
from parsim.app.config import load_config
from parsim.app.launch import run_spec
from parsim.costs.communication.collectives import estimate_collective
from parsim.costs.communication.measured import fit_regimes
from parsim.errors import ConfigError
from parsim.execute.optimizer import check_states, make_optimizer
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.profile import CollectivePoint, Communication
from parsim.model.optimizers import OPTIMIZERS, Optimizer
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.work import Collective, CollectiveKind

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "extensions"
TANH = ModelSpec(name="my_extensions:tanh_mlp", input_shape=(1, 8, 8), loss="my_extensions:SMOOTHED")
STRIPES = "my_extensions:STRIPES"
TOLERANCE = 1e-10
STEPS = 20


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")]))


def case(mesh: Mesh, **options: Any) -> Case:
    plan = even_plan(TANH, mesh, strategy="custom", batch=16, **options)
    return Case(spec=TANH, plan=plan, dataset=STRIPES, optimizer="my_extensions:RMSPROP", learning_rate=1e-3)


@pytest.mark.xdist_group("launch")
def test_model_loss_dataset_optimizer_and_order_on_two_processes_equal_one(tmp_path: Path) -> None:
    cases = [
        case(Mesh(pp=2), microbatches=4, order="my_extensions:GPIPE_V", chunks=2),
        case(Mesh(dp=2), zero_stage=2, bucket_bytes=2**12),
        case(Mesh(dp=2), microbatches=2),
    ]
    runs = run_cases(cases, tmp_path, steps=STEPS, start=launched)
    for item, run in zip(cases, runs, strict=True):
        difference = compare_case(item, run, tmp_path, steps=STEPS)
        assert difference.worst <= TOLERANCE, f"{item}: {difference}"


def test_the_run_file_of_the_example_becomes_a_job(tmp_path: Path) -> None:
    asked = ask(load_config(EXAMPLES / "RUN.toml"))
    spec = run_spec(asked.prediction, "run", tmp_path / "model.json")
    assert (spec.optimizer, spec.dataset, spec.learning_rate) == ("my_extensions:RMSPROP", STRIPES, 1e-3)
    assert spec.model.loss == "my_extensions:SMOOTHED"
    assert spec.plan.pipeline_order == "my_extensions:GPIPE_V"


def _gathers(rank: int) -> dict[str, Any]:
    bench = make_bench(torch.device("cpu"), torch.float32, 2, 2**16)
    array = bench.array(8)
    array.copy_(torch.arange(8) + 100.0 * rank)
    preparation("my_extensions:GATHER")(bench, 32, bench.everyone)()
    sizes = (2**10, 2**12, 2**14, 2**16)
    items = [item for item in all_items(bench, sizes, ("my_extensions:GATHER",)) if item.operation == "my_extensions:GATHER"]
    assert items == [CollectiveItem("my_extensions:GATHER", (0, 1), size) for size in sizes]
    seconds = [(item.size_bytes, measure_item(bench, item)) for item in items]
    return {"array": array[:8].tolist(), "seconds": seconds}


def test_collective_is_executed_measured_and_priced_from_its_fit(tmp_path: Path) -> None:
    """Rank 0 has both halves after the gather; what two gloo ranks took prices it in a profile without links."""
    first, second = run_ranks(_gathers, 2, tmp_path)
    assert first["array"] == [0.0, 1.0, 2.0, 3.0, 104.0, 105.0, 106.0, 107.0]
    assert second["array"] == [100.0 + number for number in range(8)]
    points = [
        CollectivePoint(
            operation="my_extensions:GATHER", group=[0, 1], size_bytes=size, seconds=max(1e-7, min(min(seconds))), source="here"
        )
        for size, seconds in first["seconds"]
    ]
    document = load_profile("dgx1-v100-32gb").model_dump(mode="json")
    document["sources"]["here"] = {"kind": "measurement", "text": "two gloo ranks"}
    fits = [fit.model_dump() for fit in fit_regimes(points)]
    document["communication"] = Communication(backend="gloo").model_dump(mode="json") | {"fits": fits}
    (tmp_path / "profile.json").write_text(json.dumps(document))
    cluster = cluster_from_profile(load_profile(str(tmp_path / "profile.json")), 2)
    priced = estimate_collective(Collective(operation="my_extensions:GATHER", group=(0, 1), size_bytes=2**12), cluster)
    assert min(point.seconds for point in points) / 2 <= priced.median_s <= 2 * max(point.seconds for point in points)


def test_a_calibration_takes_collectives_that_say_how_they_are_called() -> None:
    models = ((ModelSpec(name="mlp"), (4,)),)
    request = CalibrationRequest(models=models, collectives=("my_extensions:GATHER",))
    assert CalibrationRequest.from_json(request.to_json()) == request
    with pytest.raises(ConfigError, match="says nowhere how it is called"):
        CalibrationRequest(models=models, collectives=(f"{__name__}:SILENT",))


SILENT = CollectiveKind(hops=lambda n: n - 1, traffic=lambda n: 1.0)


# --- rows that do not say what torch keeps ----------------------------------------------------------------------------

_ADAM = OPTIMIZERS["adam"]
ONE_STATE = Optimizer(make=_ADAM.make, states=("exp_avg",), accesses_per_element=19, learning_rate=1e-3)
TWO_BYTES = Optimizer(make=_ADAM.make, states=_ADAM.states, state_element_bytes=2, accesses_per_element=19, learning_rate=1e-3)


class WithNorm(torch.optim.SGD):
    """Keeps one number of each whole parameter, which no part of it knows."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["norm"] = parameter.grad.norm()


WITH_NORM = Optimizer(
    make=lambda parameters, lr: WithNorm(parameters, lr=lr), states=(), accesses_per_element=2, learning_rate=1e-3
)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("ONE_STATE", r"keeps the state \['exp_avg', 'exp_avg_sq'\], its row says \['exp_avg'\]"),
        ("TWO_BYTES", r"keeps 4 bytes per element and state array, its row says 2"),
        ("WITH_NORM", r"keeps 'norm' of shape \(\)"),
    ],
)
def test_a_row_that_lists_other_states_than_torch_keeps_is_refused(row: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_optimizer(f"{__name__}:{row}", [torch.nn.Parameter(torch.zeros(2))], 0.1)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "my_extensions:RMSPROP"])
def test_every_row_lists_what_torch_keeps(name: str) -> None:
    check_states(name)
    row, parameter = OPTIMIZERS[name], torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = row.make([parameter], row.learning_rate)
    optimizer.step()
    kept = {key for key, value in optimizer.state[parameter].items() if getattr(value, "shape", ()) == parameter.shape}
    assert kept == set(row.states)
