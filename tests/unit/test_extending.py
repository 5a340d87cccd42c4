"""Every kind of extension from outside the package, by the name that a run file, a profile or a command gives."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parsim.app.answer import Answer
from parsim.app.ask import ask as answer
from parsim.app.config import parse_config
from parsim.app.foreign import import_file
from parsim.app.launch import check_runnable
from parsim.costs.communication.collectives import estimate_collective
from parsim.data import DATASETS, load_dataset
from parsim.data.samples import Target
from parsim.errors import ConfigError, CostError, DataError, GraphError, ModelError, PlanError, ProfileError, ScheduleError
from parsim.formats.source import file_formats
from parsim.hardware.cluster import cluster_from_profile
from parsim.hardware.compose import load_profile
from parsim.hardware.devices import DEVICE_KINDS
from parsim.model.formats import FORMATS, Numerics
from parsim.model.objective import LOSSES
from parsim.model.optimizers import OPTIMIZERS
from parsim.plans.pipeline import PIPELINE_ORDERS, check_order
from parsim.plans.plan import Plan
from parsim.registry import Registry, is_reference
from parsim.search.families import FAMILIES
from parsim.work import COLLECTIVE_KINDS, Collective, OptimizerStep
from tests.commands import Told

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "extensions"
REGISTRIES: list[tuple[Registry[Any], type[Exception]]] = [
    (OPTIMIZERS, ConfigError),
    (FORMATS, CostError),
    (DEVICE_KINDS, ProfileError),
    (COLLECTIVE_KINDS, GraphError),
    (PIPELINE_ORDERS, PlanError),
    (FAMILIES, ScheduleError),
    (DATASETS, DataError),
    (LOSSES, ModelError),
    (file_formats(), ConfigError),
]

RUN = """
[model]
name = "resnet50"
[cluster]
profile = "dgx1-v100-32gb"
devices = 2
[training]
global_batch = 32
[plan]
strategy = "custom"
mesh = { dp = 2 }
"""


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def ask(*changes: str) -> Answer:
    return answer(parse_config(RUN, changes))


def lines(asked: Answer) -> dict[str, int]:
    return dict(asked.evaluation.memory[0].lines)


# --- the registries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("registry", "error"), REGISTRIES, ids=lambda value: getattr(value, "what", ""))
def test_an_unknown_name_says_what_is_known_and_how_to_add_one(registry: Registry[Any], error: type[Exception]) -> None:
    first = next(iter(registry))
    with pytest.raises(error, match=rf"unknown {registry.what} '{first}x'; did you mean .*{first}.*package.module:NAME"):
        registry[f"{first}x"]
    with pytest.raises(error, match="'nowhere:ROW' cannot be loaded: No module named 'nowhere'"):
        registry["nowhere:ROW"]
    with pytest.raises(error, match="has no attribute 'ROW'"):
        registry["my_extensions:ROW"]
    if registry is not DATASETS:  # whose names may be factories, and so classes
        with pytest.raises(error, match=rf"'pathlib:Path' is a type; it must be a {registry.row.__module__}"):
            registry["pathlib:Path"]


@pytest.mark.parametrize(("registry", "error"), REGISTRIES, ids=lambda value: getattr(value, "what", ""))
def test_shipped_rows_are_read_only_and_of_one_class(registry: Registry[Any], error: type[Exception]) -> None:
    assert all(isinstance(row, registry.row) for _, row in registry.items())
    assert set(registry) == set(registry.keys()) == {name for name, _ in registry.items()}
    assert not any(is_reference(name) for name in registry)
    with pytest.raises(TypeError):
        registry.rows["mine"] = None  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("a:B", True), ("a.b:C", True), ("a", False), ("a:", False), (":B", False), ("a b:C", False), ("C:/x.json", False)],
)
def test_what_a_reference_is(text: str, wanted: bool) -> None:
    assert is_reference(text) is wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.optimizer=nowhere:ROW", r"training.optimizer = 'nowhere:ROW': .*No module named 'nowhere'"),
        ("training.optimizer=my_extensions:SMOOTHED", r"is a Loss; it must be a parsim.model.optimizers.Optimizer"),
        ("training.precision=fp33", r"training.precision = 'fp33' is unknown; did you mean fp32.*package.module:NAME"),
        ("training.dataset=my_extensions:NONE", r"training.dataset = 'my_extensions:NONE': .*no attribute 'NONE'"),
        ("model.loss=mes", r"model.loss = 'mes' is unknown; did you mean mse"),
        ("plan.pipeline_order=my_extensions:GATHER", r"plan.pipeline_order = 'my_extensions:GATHER': .*is a CollectiveKind"),
        ("plan.strategy=my_extensions:NPU", r"plan.strategy = 'my_extensions:NPU': .*is a DeviceKind; it must be a .*Strategy"),
    ],
)
def test_a_run_file_says_which_key_names_no_row(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(RUN, [change])


# --- one of each kind -------------------------------------------------------------------------------------------------


def test_optimizer_in_memory_price_and_learning_rate() -> None:
    mine, none = ask("training.optimizer=my_extensions:RMSPROP"), ask("training.optimizer=sgd")
    assert mine.question.training.resolved_learning_rate == 1e-3
    assert lines(none)["optimizer_state"] == 0
    assert lines(mine)["optimizer_state"] == 4 * mine.problem.model.parameter_count
    step = OptimizerStep(elements=25_000_000, tensors=100)
    names = ("sgd", "sgd_momentum", "my_extensions:RMSPROP")  # 4, 9 and 14 accesses per element
    prices = [replace(mine.problem.costs(2), numerics=Numerics(optimizer=name)).estimate(step, 0).median_s for name in names]
    assert prices[2] - prices[1] == pytest.approx(prices[1] - prices[0])
    assert mine.evaluation.result.step_s.median > none.evaluation.result.step_s.median


def test_precision_in_memory_and_price(tmp_path: Path) -> None:
    profile = changed_profile(tmp_path, peaks={"my_extensions:FP8_MIXED": 2.5e14})
    changes = [f'cluster.profile="{profile}"']
    eight = ask(*changes, "training.precision=my_extensions:FP8_MIXED")
    half = ask(*changes, "training.precision=amp_fp16")
    full = ask(*changes)
    assert lines(eight)["activations"] < lines(half)["activations"] < lines(full)["activations"]
    assert lines(eight)["parameters"] == lines(full)["parameters"]
    assert lines(eight)["casts"] == mine_bytes(full) // 4
    assert eight.evaluation.result.step_s.median < full.evaluation.result.step_s.median
    with pytest.raises(CostError, match=r"precisions of the device: amp_fp16, fp32, fp64"):
        ask("training.precision=my_extensions:FP8_MIXED")


def mine_bytes(asked: Answer) -> int:
    return 4 * asked.problem.model.parameter_count


def test_a_precision_with_other_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stores weights in 8 bytes per element, .* 2 or 4; use one of fp32, tf32"):
        parse_config(RUN, ["training.precision=fp64"])


def test_device_type_is_planned_with_its_own_allocator_and_not_run(tmp_path: Path) -> None:
    mine = ask(f'cluster.profile="{changed_profile(tmp_path, kind="my_extensions:NPU")}"')
    cuda = ask()
    assert lines(mine)["activations"] == lines(cuda)["activations"]
    assert lines(mine)["allocator"] < lines(cuda)["allocator"]
    with pytest.raises(PlanError, match=r"devices of kind 'my_extensions:NPU', which are planned and simulated only"):
        check_runnable(mine.prediction, None)
    with pytest.raises(ProfileError, match=r"kind: .*unknown"):
        load_profile(str(changed_profile(tmp_path, kind="cudda")))


def test_collective_is_priced_by_its_hops_and_traffic() -> None:
    """As a reduce_scatter on the same rings: n - 1 hops and (n - 1) / n of S; `parsim cost` names it."""
    cluster = cluster_from_profile(load_profile("dgx1-v100-32gb"), 4)
    for size_bytes in (10**4, 10**6, 10**8):
        works = [
            Collective(operation=name, group=(0, 1, 2, 3), size_bytes=size_bytes)
            for name in ("my_extensions:GATHER", "reduce_scatter")
        ]
        mine, theirs = (estimate_collective(work, cluster).median_s for work in works)
        assert mine == theirs
    with pytest.raises(GraphError, match="unknown collective 'gather'; did you mean all_gather"):
        Collective(operation="gather", group=(0, 1), size_bytes=8)
    with pytest.raises(GraphError, match="cannot be packed"):
        Collective(operation="my_extensions:GATHER", group=(0, 1), size_bytes=8, packed=True)


def test_collective_on_the_command_line(told: Told) -> None:
    found = json.loads(
        told("cost", "dgx1-v100-32gb", "--collective", "my_extensions:GATHER", "--size-bytes", "1000000", "--json")[1]
    )
    assert found["busbw_bytes_per_s"] == pytest.approx(7 / 8 * 1e6 / found["seconds"]["median"])


def test_network_is_a_file(tmp_path: Path) -> None:
    shipped = ROOT / "hardware_profiles" / "networks" / "infiniband-100g.json"
    document = json.loads(shipped.read_text())
    document["name"] = "mine"
    document["card"]["bandwidth_bytes_per_s"]["value"] *= 0.25
    (tmp_path / "mine.json").write_text(json.dumps(document))
    both = ("cluster.nodes=2", "plan.mesh={ dp = 4 }", "training.global_batch=64")
    fast = ask(*both, "cluster.network=infiniband-100g")
    slow = ask(*both, f'cluster.network="{tmp_path / "mine.json"}"')
    assert slow.problem.cluster.network is not None
    assert slow.problem.cluster.network.name == "mine"
    assert slow.evaluation.result.step_s.median > fast.evaluation.result.step_s.median


def test_pipeline_order_is_planned_and_kept_in_plan_json(tmp_path: Path) -> None:
    changes = ["plan.mesh={ pp = 2, dp = 1 }", "plan.microbatches=4", "plan.pipeline_order=my_extensions:GPIPE_V"]
    plan = ask(*changes).evaluation.result.plan
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,), (1,), (0,)]
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    again = answer(parse_config(RUN.split("[plan]")[0], [f'plan.strategy="{tmp_path / "plan.json"}"']))
    assert again.evaluation.result.plan == plan
    with pytest.raises(ConfigError, match=r"plan.chunks = 3: .*it takes 2 stages per rank; set chunks = 2"):
        parse_config(RUN, [*changes, "plan.chunks=3"])


def test_an_order_that_leaves_out_or_misplaces_an_action_is_refused() -> None:
    with pytest.raises(PlanError, match=r"rank 0 of 2 leaves out action 0B1; every stage of the rank \(0\) runs F, B once"):
        check_order(f"{__name__}:FORGETFUL", 2, 2)
    with pytest.raises(PlanError, match=r"repeats action 0F0"):
        check_order(f"{__name__}:TWICE", 2, 2)
    with pytest.raises(PlanError, match=r"rank 0 of 2 leaves out action 0B0"):
        check_order(f"{__name__}:ELSEWHERE", 2, 2)
    with pytest.raises(PlanError, match=r"rank 0 of 2 runs, of another rank or phase, action 1B0"):
        check_order(f"{__name__}:EVERYTHING", 2, 2)
    with pytest.raises(PlanError, match=r"gives rank 0 of 2 the stages \[0, 1\]; every rank takes 1"):
        check_order(f"{__name__}:CROWDED", 2, 2)
    with pytest.raises(PlanError, match=r"places stage 1 on rank 7 of 2"):
        check_order(f"{__name__}:OUTSIDE", 2, 2)


GPIPE = PIPELINE_ORDERS["gpipe"].actions
ROW = type(PIPELINE_ORDERS["gpipe"])
FORGETFUL = ROW(actions=lambda rank, *rest: GPIPE(rank, *rest)[:-1] if rank == 0 else GPIPE(rank, *rest))
TWICE = ROW(actions=lambda rank, *rest: (GPIPE(rank, *rest)[0], *GPIPE(rank, *rest)))
ELSEWHERE = ROW(actions=lambda rank, *rest: GPIPE(1 - rank, *rest))
EVERYTHING = ROW(actions=lambda rank, *rest: (*GPIPE(0, *rest), *GPIPE(1, *rest)))
CROWDED = ROW(actions=GPIPE, place=lambda stage, ranks: 0)
OUTSIDE = ROW(actions=GPIPE, place=lambda stage, ranks: 7 * stage)


def test_strategy_is_searched_and_names_its_plans() -> None:
    found = answer(parse_config(RUN.split("[plan]")[0], ["plan.strategy=my_extensions:ZERO_BUBBLE"]))
    assert found.search is not None
    assert found.search.tally.considered == 2
    plan = found.evaluation.result.plan
    assert (plan.strategy, plan.pipeline_order, plan.chunks) == ("my_extensions:ZERO_BUBBLE", "zero-bubble-v", 2)
    assert [entry.result.strategy for entry in found.search.candidates] == ["my_extensions:ZERO_BUBBLE"]
    assert Plan.from_json(plan.to_json()) == plan


def test_dataset_is_loaded_alike_for_equal_requests() -> None:
    def load(**changes: Any) -> Any:
        wanted = {"input_shape": (1, 8, 8), "target": Target(classes=4), "seed": 3, **changes}
        return load_dataset("my_extensions:STRIPES", **wanted)

    first, second, other = load(), load(), load(seed=4)
    np.testing.assert_array_equal(first.stored, second.stored)
    assert not np.array_equal(first.stored, other.stored)
    with pytest.raises(DataError, match=r"dataset '.*:NO_DATA' returned a int; return a parsim.data.Dataset"):
        load_dataset(f"{__name__}:NO_DATA", input_shape=(1, 8, 8), target=Target(classes=4))


NO_DATA = type(DATASETS["digits"])(load=lambda ask: 3)  # type: ignore[arg-type, return-value]


def test_loss_and_model_are_traced_and_priced() -> None:
    pytest.importorskip("torch")
    changes = ["model.input_shape=[1, 8, 8]", "model.granularity=layer", "model.name=my_extensions:tanh_mlp"]
    plain, mine = ask(*changes), ask(*changes, "model.loss=my_extensions:SMOOTHED")
    assert mine.problem.model.components[-1].name == "loss"
    names = [[operator.function for operator in asked.problem.model.components[-1].operators] for asked in (plain, mine)]
    assert names[0] != names[1], "the smoothed loss runs other operators"
    assert plain.problem.model.components[:-1] == mine.problem.model.components[:-1]


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_shows_the_example_as_it_is() -> None:
    """Every Python block of docs/extending.md stands in the module that these tests load."""
    page = (ROOT / "docs" / "extending.md").read_text()
    module = (EXAMPLES / "my_extensions.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) >= 9
    for block in blocks:
        assert block.strip() in module, block
    for kind in ("model", "optimizer", "precision", "device type", "collective", "network", "pipeline order", "strategy"):
        assert re.search(rf"^\| {kind} \|", page, flags=re.MULTILINE), kind


def changed_profile(folder: Path, *, kind: str = "cuda", peaks: dict[str, float] | None = None) -> Path:
    """The DGX-1V with another kind of device, named so among the links, or with more peaks."""
    text = (ROOT / "hardware_profiles" / "dgx1-v100-32gb.json").read_text()
    if kind != "cuda":
        text = re.sub(r'"gpu(\d+)"', r'"xpu\1"', text).replace('"kind": "cuda"', f'"kind": "{kind}"')
    document = json.loads(text)
    (entry,) = document["device_types"].values()
    for precision, peak in (peaks or {}).items():
        entry["peak_flop_per_s"][precision] = {"value": peak, "source": "v100-tensor"}
    path = folder / f"{kind.replace(':', '-')}.json"
    path.write_text(json.dumps(document))
    return path


# --- file format ------------------------------------------------------------------------------------------------------


def test_a_file_format_of_ones_own_is_read_and_written(tmp_path: Path) -> None:
    """Points of the file are in the profile, with a fit to them; the predicted step is written span by span."""
    seconds = {2**power: 20e-6 + 2**power / 50e9 for power in range(20, 28)}
    pairs = " ".join(f"{size}:{second}" for size, second in seconds.items())
    (tmp_path / "timings.csv").write_text(f"collective,devices,sizes\nall_reduce,0 1,{pairs}\n")
    imported = import_file(
        tmp_path / "timings.csv", kind="my_extensions:TIMINGS", cluster="2xh100-sxm", into=tmp_path / "mine.json"
    )
    assert imported.found["groups"][0]["points"] == len(seconds)
    work = Collective(operation="all_reduce", group=(0, 1), size_bytes=2**26)
    priced = estimate_collective(work, cluster_from_profile(load_profile(str(tmp_path / "mine.json"))))
    assert priced.median_s == pytest.approx(seconds[2**26], rel=0.05)
    prediction = ask("model.name=mlp").chosen
    done = prediction.export("my_extensions:TIMINGS", out=tmp_path / "spans.csv")
    assert len((tmp_path / "spans.csv").read_text().splitlines()) == 1 + len(prediction.evaluation.timeline)
    assert "spans" in done.summary


def test_a_format_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="format 'kineto' is unknown"):
        ask("model.name=mlp").chosen.export("kineto", out=tmp_path / "x")
    with pytest.raises(ConfigError, match="file format 'my_extensions:NOTHING' cannot be loaded"):
        ask("model.name=mlp").chosen.export("my_extensions:NOTHING", out=tmp_path / "x")
