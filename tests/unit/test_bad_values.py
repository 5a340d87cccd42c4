"""Values that look like numbers and names and cannot be meant: exit 1, one message with the path, the value and the fix."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from parsim.app.config_text import RUN_OPTIONS
from parsim.cli import main
from parsim.commands import run as run_command

RUN_TOML = """
[model]
name = "mlp"
[cluster]
profile = "dgx1-v100-32gb"
devices = 4
[training]
global_batch = 64
"""
NESTED = "[" * 10_000 + "]" * 10_000


class Refusal(NamedTuple):
    status: int
    message: str


Refused = Callable[..., Refusal]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """Call `parsim ARGS` in a folder with RUN.toml; everything from "parsim: " on, of which there must be one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN.toml").write_text(RUN_TOML)

    def call(*arguments: str, tracebacks: int = 0) -> Refusal:
        monkeypatch.setattr(sys, "argv", ["parsim", *arguments])
        with pytest.raises(SystemExit) as ending:
            main()
        captured = capsys.readouterr()
        _, start, message = captured.err.partition("parsim: ")
        assert start, captured.err
        assert "parsim: " not in message
        assert captured.out == ""
        assert captured.err.count("Traceback") == tracebacks
        assert "\x1b" not in captured.err
        return Refusal(int(ending.value.code or 0), message)

    return call


def plan(refused: Refused, *changes: str, tracebacks: int = 0) -> str:
    """The message of `parsim plan RUN.toml --set CHANGE ...`, which must end with exit status 1."""
    status, message = refused("plan", "RUN.toml", *(f"--set={change}" for change in changes), tracebacks=tracebacks)
    assert status == 1
    return message


def broken_profile(*path: str, value: Any, folder: Path) -> str:
    """A copy of a shipped profile with another value at a path of keys."""
    document = json.loads(files("hardware_profiles").joinpath("dgx1-v100-32gb.json").read_text("utf-8"))
    table = document
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    (folder / "broken.json").write_text(json.dumps(document))
    return "cluster.profile=broken.json"


@pytest.mark.parametrize(
    ("model", "argument", "rule"),
    [
        ("mlp", "num_classes=-5", "argument num_classes of mlp must be >= 1, got -5"),
        ("resnet50", "num_classes=0", "argument num_classes of resnet50 must be >= 1, got 0"),
        ("gpt_small", "layers=-1", "argument layers of gpt_small must be >= 1, got -1"),
        ("gpt_small", "dropout=1.5", "argument dropout of gpt_small must be >= 0 and < 1, got 1.5"),
        ("gpt_small", "layers=100000", "argument layers of gpt_small must be <= 4096, got 100000"),
        ("mlp", "depth=1000000000", "argument depth of mlp must be <= 4096, got 1000000000"),
        ("llama3-8b", "layers=1000000", "argument layers of llama3-8b must be <= 4096, got 1000000"),
    ],
)
def test_an_argument_no_model_can_have(refused: Refused, model: str, argument: str, rule: str) -> None:
    assert rule in plan(refused, f"model.name={model}", f"model.args.{argument}")


def test_a_peak_of_zero_names_the_device_the_precision_and_the_fix(refused: Refused, tmp_path: Path) -> None:
    path = ("device_types", "V100-SXM2", "peak_flop_per_s", "fp32", "value")
    message = plan(refused, broken_profile(*path, value=0, folder=tmp_path))
    assert "broken.json is broken: device_types.V100-SXM2: peak_flop_per_s.fp32 = 0 FLOP/s: must be >= 1e+06" in message
    assert "leave fp32 out if the device cannot compute in it" in message
    assert "TFLOP/s meant? then write 1.57e+13" in plan(refused, broken_profile(*path, value=15.7, folder=tmp_path))


def test_a_link_of_25_bytes_per_second(refused: Refused, tmp_path: Path) -> None:
    path = ("link_kinds", "nvlink", "bandwidth_bytes_per_s", "value")
    message = plan(refused, broken_profile(*path, value=25, folder=tmp_path))
    assert "link_kinds.nvlink: bandwidth_bytes_per_s = 25 bytes/s" in message
    assert "GB/s meant? then write 2.5e+10" in message


def test_a_latency_of_three_seconds_and_a_memory_of_32_bytes(refused: Refused, tmp_path: Path) -> None:
    slow = plan(refused, broken_profile("link_kinds", "nvlink", "latency_s", "value", value=3, folder=tmp_path))
    assert "latency_s = 3 s: must be <= 1; us meant? then write 3e-06" in slow
    small = plan(refused, broken_profile("device_types", "V100-SXM2", "memory_bytes", "value", value=32, folder=tmp_path))
    assert "memory_bytes = 32: must be >= 65536; GiB meant? then write 3.43597e+10" in small


def test_a_network_card_of_100_bytes_per_second(refused: Refused, tmp_path: Path) -> None:
    document = json.loads(files("hardware_profiles").joinpath("networks", "infiniband-100g.json").read_text("utf-8"))
    document["card"]["bandwidth_bytes_per_s"]["value"] = 100
    (tmp_path / "net.json").write_text(json.dumps(document))
    message = plan(refused, "cluster.nodes=2", "cluster.devices=8", "cluster.network=net.json")
    assert "net.json is broken: card: bandwidth_bytes_per_s = 100 bytes/s" in message
    assert "GB/s meant?" in message


def test_a_batch_of_1e20(refused: Refused) -> None:
    message = plan(refused, f"training.global_batch={10**20}")
    assert f"training.global_batch = {10**20}: must be <= 1000000000; for example global_batch = 256" in message
    status, message = refused("cost", "dgx1-v100-32gb", "--model", "mlp", "--batch", str(10**20))
    assert (status, f"batch = {10**20}: must be <= 1000000000" in message) == (1, True)


@pytest.mark.parametrize("name", ["NVFP4", "MXFP4", "fp4"])
def test_of_four_bits_one_format_is_priced_and_the_message_names_it(refused: Refused, name: str) -> None:
    message = plan(refused, f"training.precision={name}")
    assert f"training.precision = {name!r}: of products in 4 bits" in message
    assert 'set precision = "nvfp4"' in message


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        (
            "plan.mesh.dp_shard=4",
            "unknown key plan.mesh.dp_shard (= 4): HSDP is plan.zero_stage = 1, 2 or 3 with plan.dp",
        ),
        ("training.checkpoint_every=5", "unknown key training.checkpoint_every (= 5): give --checkpoint-every to `parsim run`"),
        ("plan.dp_replicate=2", "unknown key plan.dp_replicate (= 2): HSDP is plan.zero_stage = 1, 2 or 3 with plan.dp"),
        ("plan.dp_shard=0", "plan.dp_shard = 0: must be >= 1; for example dp_shard = 8"),
        ("plan.cpu_offload=true", "say what lies in the host's memory: plan.optimizer_offload = true"),
        ("plan.offload_param=true", "offload of parameters is not supported: they stay on the device"),
        ("plan.optimizer_offload=true", "set cluster.host_memory_bandwidth_bytes_per_s (of a node, all sockets together)"),
        ("plan.optimizer_offload=1", "plan.optimizer_offload = 1: must be true or false"),
        ("plan.activation_offload=3", "plan.activation_offload = 3: must be true, false or a list of component names"),
        ("cluster.host_link_bytes_per_s=0", "cluster.host_link_bytes_per_s = 0: must be > 0"),
        ("plan.sequence_parallel=false", "belongs to a transformer by name (llama3-8b), and the model is"),
    ],
)
def test_keys_of_other_libraries_say_what_comes_nearest(refused: Refused, key: str, rule: str) -> None:
    assert rule in plan(refused, key)


def test_keys_that_are_options_of_run_are() -> None:
    assert set(RUN_OPTIONS) <= set(inspect.signature(run_command.run).parameters)


@pytest.mark.parametrize("key", ["tokens", "samples"])
def test_more_tokens_than_anybody_trains_on(refused: Refused, key: str) -> None:
    assert f"training.{key} = 1e+300: must be <= 1e+18" in plan(refused, f"training.{key}=1e300")


def test_a_billion_network_cards_are_refused_before_one_is_built(refused: Refused) -> None:
    message = plan(
        refused, "cluster.nodes=2", "cluster.devices=8", "cluster.network=infiniband-100g", "cluster.cards_per_node=1000000000"
    )
    assert "cluster.cards_per_node = 1000000000: must be <= 1024; for example cards_per_node = 8" in message


@pytest.mark.parametrize("key", ["microbatches", "chunks"])
def test_more_parts_than_a_plan_may_have_are_refused_before_the_search(refused: Refused, key: str) -> None:
    message = plan(refused, f"plan.{key}=1000000", "training.global_batch=500000000")
    assert f"plan.{key} = 1000000: must be <= 10000; for example {key} = " in message


def test_a_million_nodes_are_refused_before_anything_is_built(refused: Refused) -> None:
    message = plan(refused, "cluster.nodes=1000000", "cluster.devices=8", "cluster.network=infiniband-100g")
    assert "cluster.nodes = 1000000: must be <= 65536; for example nodes = 2" in message
    message = plan(refused, "cluster.nodes=60000", "cluster.devices=8", "cluster.network=infiniband-100g")
    assert "nodes = 60,000 of profile dgx1-v100-32gb are 480,000 devices" in message
    assert "use nodes <= 16,384" in message


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("cluster.profile=deep.json", NESTED),
        ("model.name=deep.json", '{"components": ' + NESTED + "}"),
        ("plan.strategy=deep.json", '{"stages": ' + NESTED + "}"),
        ("plan.strategy=deep.json", "[" * 900 + "]" * 900),
    ],
)
def test_json_nested_10000_deep(refused: Refused, tmp_path: Path, key: str, text: str) -> None:
    (tmp_path / "deep.json").write_text(text)
    message = plan(refused, key)
    assert "deep.json is n" in message  # not a model, no JSON text
    assert "nested more than 100 levels deep" in message


def test_toml_nested_10000_deep(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(f"[model]\nname = {NESTED}\n")
    status, message = refused("plan", "deep.toml")
    assert (status, message.startswith("deep.toml is not TOML: tables and lists are nested more than 100 levels")) == (1, True)
    arguments = ("simulate", "RUN.toml", "--engine", "dynamic", "--scenario", "deep.toml")
    status, message = refused(*arguments)
    assert (status, "deep.toml is not TOML: tables and lists are nested" in message) == (1, True)


FACTORY = """
from torch import nn
def make(width=4):
    return inner(width)
def inner(width):
    if width < 8:
        raise ValueError("my own fault\\x1b[31m")
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
def tall():
    return None + 1
"""


def test_a_factory_that_raises_shows_its_own_traceback_once(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "raising_factory.py").write_text(FACTORY)
    message = plan(refused, "model.name=raising_factory:make", "model.input_shape=[4]", tracebacks=1)
    assert message.startswith("raising_factory:make with the arguments {} raised ValueError; fix raising_factory:")
    assert "in make" in message
    assert "in inner" in message
    assert "spec.py" not in message, "no frame of parsim"
    assert message.rstrip().endswith("ValueError: my own fault\\x1b[31m")
    message = plan(refused, "model.name=raising_factory:tall", "model.input_shape=[4]", tracebacks=1)
    assert "raised TypeError" in message
    message = plan(refused, "model.name=raising_factory:make", "model.args.depth=3", "model.input_shape=[4]")
    assert "refuses its arguments {'depth': 3}" in message


def test_a_module_that_raises_while_it_is_imported(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "raising_module.py").write_text("def make():\n    pass\nraise RuntimeError('at import')\n")
    message = plan(refused, "model.name=raising_module:make", "model.input_shape=[4]", tracebacks=1)
    assert "importing raising_module for raising_module:make raised RuntimeError" in message
    assert "importlib" not in message


@pytest.mark.parametrize("name", ["a\x1b[31mred", "bell\x07", "c1\x9b2J"])
def test_terminal_escapes_in_names_are_refused_and_spelled_out(refused: Refused, tmp_path: Path, name: str) -> None:
    message = plan(refused, f"model.name={json.dumps(name, ensure_ascii=True)}")
    assert f"model.name = {name!r}: must hold no control characters" in message
    message = plan(refused, broken_profile("name", value=name, folder=tmp_path))
    assert f"broken.json is broken: name = {name!r}: must hold no control characters" in message


def test_a_file_name_with_an_escape_is_spelled_out(refused: Refused) -> None:
    status, message = refused("plan", "a\x1b[31m.toml")
    assert (status, "no run file a\\x1b[31m.toml" in message) == (1, True)


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("fsdp", 'set strategy = "dp" and zero_stage = 3'),
        ("FSDP2", 'set strategy = "dp" and zero_stage = 3'),
        ("zero2", 'set strategy = "dp" and zero_stage = 2'),
        ("ddp", 'set strategy = "dp"'),
        ("tensor", 'set strategy = "adaptive" and mesh = { tp = 4 }'),
        ("adaptve", "did you mean adaptive?"),
    ],
)
def test_other_libraries_names_of_strategies(refused: Refused, word: str, instead: str) -> None:
    message = plan(refused, f"plan.strategy={word}")
    assert f"RUN.toml: plan.strategy = {word!r} is unknown; {instead}" in message


DESCRIBED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, t):
        return self.layer(x) + t[:, None]
"""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (['model.inputs={ x = { shape = [4], dtype = "flaot32" } }'], "model.inputs: input x: dtype 'flaot32' is unknown; did"),
        (["model.inputs={ x = { shape = [-4] } }"], "sizes of its shape must be >= 1, got [-4]"),
        (["model.inputs={ x = { shape = [1000000000, 1000000000] } }"], "is more than 8,589,934,592 numbers per sample; give"),
        (["model.inputs={ x = { shpae = [4] } }"], "unknown key 'shpae'; did you mean shape"),
        (["model.inputs={ x = 4 }"], "input x must be a table with a shape, got 4"),
        (["model.inputs={ x = { shape = [4], high = 3 } }"], "high and low are for integers"),
        (["model.inputs={ x = { shape = [4], constant = true } }"], "every input given is constant"),
        (["model.inputs={ x = { shape = [4] }, time = { shape = [] } }"], "has no argument 'time' (it takes x, t)"),
        (["model.inputs={ x = { shape = [4] } }"], "needs 't', which inputs do not give"),
        (['model.inputs={ x = { shape = [4] }, t = { shape = [], dtype = "int64" } }'], "no embedding tells their range; give"),
        (["model.inputs={ x = { shape = [4] }, t = { shape = [] } }", "model.input_shape=[4]"], "drop input_shape"),
        (["model.inputs={ x = { shape = [4] }, t = { shape = [] } }", "model.classes_dim=0"], "classes_dim belongs to a loss"),
        (["model.inputs={ x = { shape = [4] }, t = { shape = [] } }", "model.output=logits"], "returns no 'logits'"),
    ],
)
def test_inputs_that_cannot_be(refused: Refused, monkeypatch: pytest.MonkeyPatch, changes: list[str], message: str) -> None:
    pytest.importorskip("torch")
    Path("described_net.py").write_text(DESCRIBED)
    monkeypatch.syspath_prepend(".")
    monkeypatch.delitem(sys.modules, "described_net", raising=False)
    found = plan(refused, "model.name=described_net:Net", *changes)
    assert message in found


TABLE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.time = nn.Linear(4, 3), nn.Embedding(50, 3)

    def forward(self, x, t):
        return self.layer(x) + self.time(t)


def wrong_classes(output, target):
    return nn.functional.cross_entropy(output, target)
"""
INPUTS = 'model.inputs={ x = { shape = [4] }, t = { shape = [], dtype = "int64", high = %d } }'


@pytest.mark.parametrize("command", ["plan", "run"])
def test_declared_integers_beyond_a_table(refused: Refused, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Both commands end before a process starts: `run` with the same words as `plan`."""
    pytest.importorskip("torch")
    Path("table_net.py").write_text(TABLE)
    monkeypatch.syspath_prepend(".")
    monkeypatch.delitem(sys.modules, "table_net", raising=False)
    given = ("--set=model.name=table_net:Net", "--set=training.dataset=synthetic")
    status, message = refused(command, "RUN.toml", *given, f"--set={INPUTS % 1000}")
    assert status == 1
    assert (
        "input t holds integers from 0 to 999, and module time uses it as an index into an embedding of 50 entries" in message
    )
    assert "give t high = 50" in message
    own = "model.target={ shape = [], dtype = 'int64', high = 7 }"
    status, message = refused(
        command,
        "RUN.toml",
        *given,
        f"--set={INPUTS % 50}",
        "--set=model.loss=table_net:wrong_classes",
        f"--set={own}",
    )
    assert (status, "input target holds integers from 0 to 6" in message, "classes of a loss, 3" in message) == (1, True, True)
