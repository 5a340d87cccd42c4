"""What people type: short counts, GPUs by the names that drivers and shops give them, commands of other tools, the Tab key."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsim.app.config_text import changes_of
from parsim.app.question import USUAL_SAMPLES, USUAL_TOKENS, question_of, taken_defaults
from parsim.cli import ELSEWHERE, main
from parsim.errors import ProfileError
from parsim.hardware.parts import load_gpu, machines_of
from parsim.units import parse_count


@pytest.mark.parametrize(
    ("text", "thousand", "value"),
    [
        ("4096", 1000, 4096),
        ("64k", 1024, 65_536),
        ("64K", 1000, 64_000),
        ("1M", 1024, 2**20),
        ("15T", 1000, 15 * 10**12),
        ("300B", 1000, 300 * 10**9),
        ("1.4T", 1000, 1_400_000_000_000),
        ("1e12", 1000, 10**12),
        ("1_000", 1000, 1000),
        ("0.5", 1000, 0.5),
    ],
)
def test_short_counts(text: str, thousand: int, value: float) -> None:
    assert parse_count(text, thousand) == value


@given(st.text(max_size=6).filter(lambda text: not any(character.isdigit() for character in text)))
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no number"):
        parse_count(text)


def test_k_of_lengths_is_binary_and_of_data_decimal() -> None:
    changed = changes_of({"model.args.seq": "64k"}, ["training.global_batch=4k", "training.tokens=15T", "training.samples=50k"])
    assert changed["model"]["args"]["seq"] == 65_536
    assert changed["training"] == {"global_batch": 4096, "tokens": 15 * 10**12, "samples": 50_000}
    assert changes_of(None, ["training.optimizer=4k"])["training"]["optimizer"] == "4k", "of other keys it is a text"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("h100", "h100-sxm"),
        ("H100-80GB", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("Tesla T4", "t4"),
        ("v100-16gb", "v100-sxm-16gb"),
    ],
)
def test_gpus_by_other_names(name: str, part: str) -> None:
    assert load_gpu(name).name == part
    assert machines_of(f"1x{name}").gpu == part


@pytest.mark.parametrize("name", ["409", "4090-ti", "rtx 4090 laptop", "h10", "h100-x", "mi300", "100"])
def test_a_gpu_is_never_found_by_a_part_of_its_name(name: str) -> None:
    with pytest.raises(ProfileError, match="unknown GPU"):
        load_gpu(name)


def test_eight_gpus_on_pcie_are_one_machine() -> None:
    assert (machines_of("8x4090").nodes, machines_of("8x4090").gpus_per_node) == (1, 8)
    assert (machines_of("16x4090").nodes, machines_of("16x4090").gpus_per_node) == (4, 4)
    assert (machines_of("8xh100-sxm", 4).nodes, machines_of("8xh100").nodes) == (2, 1)


def test_a_question_without_a_batch_takes_a_usual_one_and_says_so() -> None:
    for seq in (2048, 8192):
        question = question_of("llama3-8b", cluster="8xh100-sxm", settings={"model.args.seq": seq})
        assert question.training.global_batch * seq == USUAL_TOKENS
        assert taken_defaults(question)["training.global_batch"] == question.training.global_batch
    image = question_of("resnet50", cluster="dgx1-v100-32gb")
    assert image.training.global_batch == 8 * USUAL_SAMPLES
    many = question_of("llama3-8b", cluster="1024xh100-sxm", settings={"cluster.network": "infiniband-400g"})
    assert many.training.global_batch == 1024, "at least a sample for each device"
    parts = {"plan.mesh.dp": 8, "plan.microbatches": 3, "model.args.seq": 2048}
    assert question_of("llama3-8b", cluster="8xh100-sxm", settings=parts).training.global_batch == 528
    given_one = question_of("llama3-8b", cluster="8xh100-sxm", global_batch=64)
    assert "training.global_batch" not in taken_defaults(given_one)


@pytest.mark.parametrize("name", ["serve", "train", "estimate"])
def test_commands_of_other_tools_get_a_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["parsim", name, "llama3-8b"])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 2
    error = capsys.readouterr().err
    assert ELSEWHERE[name] in error
    assert "Did you mean" not in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("parsim che", "check"),
        ("parsim plan llama3-7", "llama3-70b"),
        ("parsim check gpt2 --gpus 4xrtx-40", "4xrtx-4090"),
        ("parsim plan gpt2 --network infiniband-4", "infiniband-400g"),
    ],
)
def test_the_tab_key_completes(line: str, found: str) -> None:
    asks = {"_PARSIM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    call = "import sys; sys.argv = ['parsim']; from parsim.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", call], env=os.environ | asks, capture_output=True, text=True, check=False)
    assert found in run.stdout.split(), run.stderr
