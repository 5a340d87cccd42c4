"""Offload from a run file: what it says of the host, what a folder keeps of it, and that nothing of it is launched."""

from __future__ import annotations

from pathlib import Path

import pytest

from parsim.app.ask import ask, ask_again
from parsim.app.config import Question, parse_config
from parsim.app.functions import simulate
from parsim.app.launch import check_runnable
from parsim.app.run_folder import RunFolder
from parsim.app.write_folder import write_prediction
from parsim.errors import ConfigError, PlanError
from parsim.plans.plan import Plan
from tests.models import chain_model

RUN = """
[model]
name = "{model}"
[cluster]
gpu = "a100-sxm-80gb"
gpus_per_node = 2
host_memory_bandwidth_bytes_per_s = 2e11
host_memory_bytes = 1e12
[training]
global_batch = 8

"""


def asked(tmp_path: Path, *overrides: str) -> Question:
    path = tmp_path / "model.json"
    chain_model((1e9,) * 3, elements=10**6).save(path)
    text = RUN.format(model=path)
    return parse_config(text, ["plan.strategy=dp", *overrides], folder=tmp_path)


def test_a_folder_keeps_what_the_run_file_says_of_the_host(tmp_path: Path) -> None:
    overrides = ["plan.strategy=dp", "plan.optimizer_offload=true", "plan.activation_offload=['c*']"]
    path = tmp_path / "run.toml"
    path.write_text(asked(tmp_path).to_toml())
    out = tmp_path / "out"
    found = simulate(path, overrides=overrides)
    out.mkdir()
    write_prediction(RunFolder(out), found)
    again = ask_again(RunFolder(out))
    assert again.evaluation.result.step_s.median == found.evaluation.result.step_s.median
    assert again.evaluation.memory[0].host_lines == found.evaluation.memory[0].host_lines
    assert Plan.load(out / "plan.json").activation_offload == ("c0", "c1", "c2")


def test_a_plan_with_offload_is_not_launched(tmp_path: Path) -> None:
    found = ask(asked(tmp_path, "plan.activation_offload=true"))
    with pytest.raises(PlanError, match=r"the plan has activation_offload, which parsim simulates"):
        check_runnable(found, None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.activation_offload=['nowhere*']"], "plan.activation_offload"),
        (["plan.optimizer_offload=true", "plan.synchronisation=average/8"], "belongs to synchronous training"),
        (["plan.optimizer_offload=true", "plan.strategy=plan.json"], "the plan is read from"),
    ],
)
def test_what_offload_does_not_go_with(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(asked(tmp_path, *overrides))


def test_false_is_the_plan_without_it(tmp_path: Path) -> None:
    plain, off = (
        ask(asked(tmp_path, *more)) for more in ((), ("plan.activation_offload=false", "plan.optimizer_offload=false"))
    )
    assert plain.evaluation.result.plan == off.evaluation.result.plan
