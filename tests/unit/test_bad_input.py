"""Bad input from a user: one message with the rule, the values and the fix; exit 1; nothing started, nothing half-written."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parsim.cli import main
from parsim.hardware.compose import load_profile
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec

RUN_TOML = """
[model]
name = "mlp"
[cluster]
profile = "dgx1-v100-32gb"
devices = 4
[training]
global_batch = 64
"""

Cli = Callable[..., "Outcome"]


class Outcome:
    """What a call of the command line left."""

    def __init__(self, status: int, stdout: str, stderr: str) -> None:
        self.status, self.stdout, self.stderr = status, stdout, stderr

    @property
    def message(self) -> str:
        """Stderr without the lines that report progress."""
        lines = self.stderr.splitlines()
        start = next((number for number, line in enumerate(lines) if line.startswith("parsim: ")), len(lines))
        return "\n".join(lines[start:])


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """Call `parsim ARGS` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["parsim", *arguments])
        status = 0
        try:
            main()
        except SystemExit as ending:
            status = int(ending.code or 0)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return call


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "RUN.toml"
    path.write_text(RUN_TOML)
    return path


def assert_refused(outcome: Outcome, *patterns: str, folder: Path, left: set[str]) -> None:
    """Exit 1, nothing on stdout, one message that matches all patterns, and only the files that were there before."""
    assert outcome.status == 1, outcome.stderr
    assert outcome.stdout == ""
    assert outcome.message.startswith("parsim: ")
    assert "Traceback" not in outcome.stderr
    for pattern in patterns:
        assert re.search(pattern, outcome.message), f"{pattern!r} is not in: {outcome.message}"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == left


READS_A_RUN_FILE = [
    ("plan",),
    ("simulate",),
    ("simulate", "--engine", "dynamic", "--out", "kept"),
    ("plan", "--out", "plan.json"),
]


@pytest.mark.parametrize("command", READS_A_RUN_FILE, ids=" ".join)
@pytest.mark.parametrize(
    ("change", "patterns"),
    [
        ("model.name=mpl", (r"unknown model 'mpl'", r"did you mean mlp\?")),
        ("model.args.widht=3", (r"mlp has no argument 'widht'", r"did you mean width")),
        ("cluster.profile=dgx1-v100-32g", (r"unknown profile 'dgx1-v100-32g'", r"did you mean dgx1-v100-32gb")),
        ("cluster.profile=absent.json", (r"no profile file .*absent\.json", r"parsim calibrate")),
        ("training.optimzer=adam", (r"unknown key training\.optimzer", r"did you mean optimizer\?")),
        ("cluster.devices=9", (r"has 8 devices, 9 were asked for", r"1 to 8")),
        ("cluster.devices=[0, 8]", (r"no device 8", r"\[0, 1, 2, 3, 4, 5, 6, 7\]")),
        ("plan.strategy=absent/plan.json", (r"no plan file .*absent/plan\.json", r"parsim plan")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_exist(
    cli: Cli, run_file: Path, tmp_path: Path, command: tuple[str, ...], change: str, patterns: tuple[str, ...]
) -> None:
    outcome = cli(command[0], str(run_file), *command[1:], "--set", change)
    assert_refused(outcome, *patterns, folder=tmp_path, left={"RUN.toml"})


def test_a_mesh_that_does_not_multiply_to_the_devices(cli: Cli, run_file: Path, tmp_path: Path) -> None:
    changes = ("--set", "plan.strategy=custom", "--set", "plan.mesh.pp=3")
    pattern = r"pp \(3\) \* dp \(1\) \* tp \(1\) = 3 must equal the devices \(4\); change the axes or ask for devices = 3"
    assert_refused(cli("plan", str(run_file), *changes), pattern, folder=tmp_path, left={"RUN.toml"})


def test_the_mesh_is_checked_against_all_devices_of_the_profile_where_none_are_named(
    cli: Cli, run_file: Path, tmp_path: Path
) -> None:
    run_file.write_text(RUN_TOML.replace("devices = 4\n", ""))
    changes = ("--set", "plan.strategy=custom", "--set", "plan.mesh.pp=3")
    assert_refused(
        cli("simulate", str(run_file), *changes), r"= 3 must equal the devices \(8\)", folder=tmp_path, left={"RUN.toml"}
    )


def test_chunks_need_an_order_that_has_them(cli: Cli, run_file: Path, tmp_path: Path) -> None:
    changes = ("--set", "plan.strategy=custom", "--set", "plan.mesh={ pp = 2, dp = 2 }", "--set", "plan.chunks=2")
    pattern = r"plan.chunks = 2 needs an order with several chunks.*interleaved"
    assert_refused(cli("plan", str(run_file), *changes), pattern, folder=tmp_path, left={"RUN.toml"})


def test_a_batch_that_does_not_divide(cli: Cli, run_file: Path, tmp_path: Path) -> None:
    changes = ("--set", "plan.strategy=dp", "--set", "plan.mesh.dp=4", "--set", "training.global_batch=30")
    patterns = (r"global_batch \(30\) .*divisible by .*dp \(4\)", r"32|28")
    assert_refused(cli("plan", str(run_file), *changes), *patterns, folder=tmp_path, left={"RUN.toml"})
    changes = ("--set", "plan.strategy=custom", "--set", "plan.mesh.dp=4", "--set", "plan.microbatches=3")
    patterns = (r"global_batch \(64\) must be divisible by plan.microbatches \(3\)", r"2 or 4")
    assert_refused(cli("plan", str(run_file), *changes), *patterns, folder=tmp_path, left={"RUN.toml"})
    changes = ("--set", "plan.strategy=custom", "--set", "plan.mesh.dp=4", "--set", "plan.microbatches=32")
    patterns = (r"global_batch \(64\) must be divisible by .*dp \(4\) \* .*microbatches \(32\) = 128", r"128")
    assert_refused(cli("plan", str(run_file), *changes), *patterns, folder=tmp_path, left={"RUN.toml"})


def edited_profile(path: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the shipped profile after `edit`."""
    document = load_profile("dgx1-v100-32gb").model_dump(mode="json")
    edit(document)
    path.write_text(json.dumps(document))
    return path


def without_costs(document: dict[str, Any]) -> None:
    """No operator fit, and no peak: nothing is known about computing on these devices."""
    document["compute"].update(components=[], operator_fits=[], operator_points=[], optimizers=[])
    for entry in document["device_types"].values():
        entry["peak_flop_per_s"] = {}


def test_a_component_no_cost_is_known_for(cli: Cli, run_file: Path, tmp_path: Path) -> None:
    edited_profile(tmp_path / "bare.json", without_costs)
    first = load_model(ModelSpec(name="mlp")).components[0].name
    outcome = cli("plan", str(run_file), "--set", f"cluster.profile={tmp_path / 'bare.json'}")
    patterns = (r"no cost is known|cannot be priced|no .*cost", re.escape(first), r"calibrate")
    assert_refused(outcome, *patterns, folder=tmp_path, left={"RUN.toml", "bare.json"})


@pytest.mark.parametrize(
    ("edit", "patterns"),
    [
        (lambda document: document.pop("devices"), (r"devices", r"Field required|missing")),
        (lambda document: document.update(devcies=1), (r"devcies",)),
        (lambda document: document["devices"][0].update(type="v200"), (r"v200", r"did you mean|known")),
    ],
    ids=["a key is missing", "a key too many", "a reference to nothing"],
)
def test_a_broken_profile(
    cli: Cli, run_file: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], patterns: tuple[str, ...]
) -> None:
    edited_profile(tmp_path / "broken.json", edit)
    outcome = cli("simulate", str(run_file), "--set", "cluster.profile=broken.json", "--out", "kept")
    assert_refused(outcome, r"broken\.json is broken", *patterns, folder=tmp_path, left={"RUN.toml", "broken.json"})


def test_a_profile_that_is_not_json(cli: Cli, run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"schema_version": 1, "name": "x"')
    for command in (
        ("plan", str(run_file), "--set", "cluster.profile=cut.json"),
        ("cost", "cut.json", "--model", "mlp", "--batch", "4"),
    ):
        assert_refused(cli(*command), r"cut\.json is not JSON", folder=tmp_path, left={"RUN.toml", "cut.json"})


def planned(cli: Cli, run_file: Path) -> dict[str, Any]:
    """The chosen plan of RUN.toml as JSON."""
    outcome = cli("plan", str(run_file), "--set", "plan.strategy=custom", "--set", "plan.mesh.pp=4", "--json")
    assert outcome.status == 0, outcome.stderr
    plan: dict[str, Any] = json.loads(outcome.stdout)["chosen"]["plan"]
    return plan


@pytest.mark.parametrize(
    ("edit", "patterns"),
    [
        (lambda plan: plan.pop("mesh"), (r"is not a plan: 'mesh'",)),
        (lambda plan: plan.update(schema_version=99), (r"schema_version must be 2, got 99",)),
        (lambda plan: plan["stages"][0]["components"].__setitem__(0, "layers.99"), (r"names component 'layers\.99'",)),
        (lambda plan: plan["stages"].pop(), (r"mesh has pp=4, but the plan lists 3 stages",)),
        (
            lambda plan: plan.update(global_batch=128),
            (r"is for global_batch 128, the run file asks for 64",),
        ),
        (lambda plan: plan.update(pipeline_order="1f1c"), (r"1f1c", r"1f1b")),
    ],
    ids=["no mesh", "another version", "another component", "a stage too few", "another batch", "unknown order"],
)
def test_a_broken_plan_file(
    cli: Cli, run_file: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], patterns: tuple[str, ...]
) -> None:
    plan = planned(cli, run_file)
    edit(plan)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    outcome = cli("simulate", str(run_file), "--set", "plan.strategy=./plan.json")
    assert_refused(outcome, *patterns, folder=tmp_path, left={"RUN.toml", "plan.json"})


def test_a_saved_model_that_is_broken_or_given_arguments(cli: Cli, run_file: Path, tmp_path: Path) -> None:
    model = load_model(ModelSpec(name="mlp"))
    model.save(tmp_path / "mine.json")
    named = ("plan", str(run_file), "--set", "model.name=mine.json")
    outcome = cli(*named, "--set", "model.args.width=3")
    assert_refused(outcome, r"mine\.json holds a finished Model.*drop", folder=tmp_path, left={"RUN.toml", "mine.json"})
    document = json.loads(model.to_json())
    document["components"][0].pop("operators")
    (tmp_path / "mine.json").write_text(json.dumps(document))
    assert_refused(cli(*named), r"mine\.json is not a model", folder=tmp_path, left={"RUN.toml", "mine.json"})


def test_a_plan_cut_off_in_the_middle(cli: Cli, run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(planned(cli, run_file))[:100])
    outcome = cli("simulate", str(run_file), "--set", "plan.strategy=./plan.json")
    assert_refused(outcome, r"plan\.json is not a plan", folder=tmp_path, left={"RUN.toml", "plan.json"})


def with_tiny_memory(document: dict[str, Any]) -> None:
    for entry in document["device_types"].values():
        entry["memory_bytes"]["value"] = 1e6


def test_a_plan_that_does_not_fit_is_a_result(cli: Cli, run_file: Path, tmp_path: Path) -> None:
    """fits: false with the rank and the line of memory, exit 0; only `run` refuses it."""
    edited_profile(tmp_path / "tiny.json", with_tiny_memory)
    outcome = cli("simulate", str(run_file), "--set", "cluster.profile=tiny.json", "--json")
    assert outcome.status == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document["fits"] is False
    assert any(re.search(r"rank \d+ needs .* of .*largest line", warning) for warning in document["warnings"])
    refused = cli("plan", str(run_file), "--set", "cluster.profile=tiny.json", "--out", "plan.json")
    assert_refused(refused, r"no plan fits, so plan\.json is not written", folder=tmp_path, left={"RUN.toml", "tiny.json"})


def test_run_of_a_plan_that_cannot_fit(cli: Cli, run_file: Path, tmp_path: Path) -> None:
    edited_profile(tmp_path / "tiny.json", with_tiny_memory)
    outcome = cli("run", str(run_file), "--set", "cluster.profile=tiny.json", "--nproc", "4", "--out", "kept")
    needs = r"rank \d needs [\d.]+ \wiB, at p95 [\d.]+ \wiB, of 977 KiB \([\d.]+ \wiB too much\)"
    worst = needs + r"; its largest line is [\w ]+, [\d.]+ \wiB"
    patterns = (r"cannot fit", worst, r"use more devices or microbatches")
    assert_refused(outcome, *patterns, folder=tmp_path, left={"RUN.toml", "tiny.json"})


def test_run_with_more_processes_than_the_plan(cli: Cli, run_file: Path, tmp_path: Path) -> None:
    arguments = ("--set", "plan.strategy=dp", "--nproc", "5", "--out", "kept")
    patterns = (r"--nproc 5 is more processes than the plan has ranks \(4", r"use --nproc 4")
    assert_refused(cli("run", str(run_file), *arguments), *patterns, folder=tmp_path, left={"RUN.toml"})


def test_out_names_a_folder_with_something_in_it(cli: Cli, run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "thesis.txt").write_text("precious")
    outcome = cli("simulate", str(run_file), "--out", "kept")
    assert_refused(outcome, r"kept exists and is not empty", folder=tmp_path, left={"RUN.toml", "kept/thesis.txt"})


def test_report_of_a_folder_that_is_none(cli: Cli, tmp_path: Path) -> None:
    assert_refused(cli("report", str(tmp_path)), r"is not a run folder", folder=tmp_path, left=set())


@pytest.mark.parametrize(
    ("arguments", "patterns"),
    [
        (("--collective", "all_redcue", "--size-bytes", "8"), (r"unknown collective 'all_redcue'", r"all_reduce")),
        (("--collective", "all_reduce", "--size-bytes", "8", "--ranks", "0,9"), (r"rank 9", r"0 to 7")),
        (("--collective", "all_reduce", "--size-bytes", "8", "--ranks", "0;1"), (r"--ranks '0;1': write whole numbers",)),
        (("--collective", "all_reduce", "--size-bytes", "-8"), (r"--size-bytes -8: must be >= 0",)),
        (("--model", "mlp", "--batch", "0"), (r"--batch 0: must be >= 1",)),
        (("--model", "mlp", "--batch", "4", "--arg", "width"), (r"--arg 'width': write it as key=value",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) and value[0].startswith("--") else "",
)
def test_cost_of_nothing(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], patterns: tuple[str, ...]) -> None:
    assert_refused(cli("cost", "dgx1-v100-32gb", *arguments), *patterns, folder=tmp_path, left=set())


@pytest.mark.parametrize(
    "arguments",
    [("cost", "dgx1-v100-32gb"), ("plan",), ("pln", "RUN.toml"), ("plan", "RUN.toml", "--tpo", "3"), ()],
    ids=" ".join,
)
def test_wrong_usage_exits_2(cli: Cli, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    outcome = cli(*arguments)
    assert outcome.status == 2
    assert "Usage" in outcome.stderr + outcome.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(cli: Cli, run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    outcome = cli("plan", str(run_file), "--out", str(tmp_path / "file" / "plan.json"))
    assert_refused(outcome, r"file", folder=tmp_path, left={"RUN.toml", "file"})


@pytest.mark.parametrize("ways", [1, 7])
def test_shards_that_no_component_can_be_cut_into(cli: Cli, ways: int) -> None:
    found = cli("cost", "dgx1-v100-32gb", "--model", "gpt_small", "--batch", "32", "--ways", str(ways))
    assert found.status == 1
    assert f"--ways {ways}: no component of gpt_small at granularity block can be cut" in found.message
    assert "at least 2 and divide one of" in found.message
    assert found.stdout == ""


def test_calibrate_says_which_options_go_together(cli: Cli, tmp_path: Path) -> None:
    for arguments in (
        ("--model", "mlp"),
        ("--model", "mlp", "--out", "p.json", "--resume", "--restart"),
        ("--refit", "p.json", "--out", "q.json"),
        ("--out", "p.json"),
    ):
        outcome = cli("calibrate", *arguments)
        assert (outcome.status, outcome.stdout) == (2, ""), arguments
    assert_refused(
        cli("calibrate", "--refit", "p.json"), r"no raw points p\.raw\.json\.gz", "calibrate", folder=tmp_path, left=set()
    )
    resumed = cli("calibrate", "--model", "mlp", "--out", "p.json", "--resume")
    assert_refused(resumed, "nothing to resume", "drop --resume", folder=tmp_path, left=set())
