"""Five questions about large models as a user would ask them, with the answers as the command prints them.

    python examples/large_models.py > docs/large-models.md

Nothing on that page is edited by hand. A measured training run of one of these models on that machine whose step lies outside
the printed interval would refute it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Question:
    """A question in words, and the command that asks it."""

    words: str
    command: str


QUESTIONS = (
    Question(
        "How fast does Llama 3 8B train on 64 H100 under FSDP, and what do 15 trillion tokens take?",
        "parsim plan llama3-8b --gpus 64xh100-sxm --network infiniband-400g --batch 512 --seq 8192 --tokens 15e12 "
        "--set plan.strategy=dp --set plan.zero_stage=3 --set plan.microbatches=8 --set plan.recompute=none",
    ),
    Question(
        "Does Llama 3 70B fit on 32 H200 with every layer computed again, and what is its MFU?",
        "parsim plan llama3-70b --gpus 32xh200 --network infiniband-400g --batch 64 --seq 4096 --set plan.strategy=dp "
        "--set plan.zero_stage=3 --set plan.microbatches=2 --set 'plan.recompute=[\"h.*\"]'",
    ),
    Question(
        "What does my Megatron-LM script reach on 16 H100?",
        "parsim plan --config tests/frameworks/pretrain_llama.sh --gpus 16xh100-sxm --network infiniband-400g",
    ),
    Question(
        "Two nodes on 25 Gb/s Ethernet: what would make Llama 2 7B 20% faster?",
        "parsim plan llama2-7b --gpus 16xa100-sxm-80gb --network ethernet-25g --batch 32 --seq 2048 --faster 20% "
        "--set plan.strategy=dp --set plan.zero_stage=3 --set 'plan.mesh={dp=16}' --set plan.recompute=none",
    ),
    Question(
        "Mixtral 8x7B on eight H100: does it fit?",
        "parsim plan mixtral-8x7b --gpus 8xh100-sxm --batch 8 --seq 4096 --set plan.strategy=dp --set plan.zero_stage=3 "
        "--set plan.recompute=full",
    ),
)


INTRODUCTION = """# Large models by name

`parsim plan llama3-70b --gpus 64xh100-sxm --batch 512 --seq 8192` plans a model by name. Without `--network` the nodes are
joined as the GPU's vendor builds clusters of them (InfiniBand at 400 Gb/s per H100), and the answer says so; a GPU on a PCIe
card needs `--network`. Names, sizes and their sources are in `parsim/model/catalogue/models.csv`;
`--set model.args.layers=16` changes a size. Unless the question says otherwise, a named transformer takes bf16 (fp16 where the
GPU has no bf16), a fused AdamW and components that tensor parallelism can cut. T5, ViT and models from a Hugging Face
`config.json` are traced. On GPUs they take the same precision and optimizer, whatever their `torch_dtype`, and on this machine
fp32 and SGD with momentum.

For samples packed from several documents use `--set model.args.document_tokens=1024`: attention then sees one document. For
documents of different lengths, give the mean over tokens (the sum of squares over the sum).

`--tokens` adds days, price, energy and failures; `--faster 20%` searches changed clusters; `--config FILE` reads a file, a
script or a notebook of Megatron-LM, NeMo, Megatron-Bridge, torchtitan, axolotl, torchtune, Hugging Face's Trainer, nanoGPT and
[others](readers.md); `--set model.args.vocab=32000` supplies what it lacks, and so does `--set model.name=llama3-8b`.
`parsim models` lists all names with their sizes; ids of Hugging Face (`meta-llama/Llama-3.1-8B-Instruct`) are names as well.
`[cluster]` takes `usd_per_hour`, `busy_power_w`, `device_mtbf_hours`, `checkpoint_s` and `restart_s`.

`experiments/published/README.md` compares such predictions with published runs of sources that nothing was fitted on.
Mean errors: 4 and 7% for FSDP on H100 (two sources), 3% for Megatron-LM on A100.

`python examples/large_models.py` prints this page."""


def answer(question: Question) -> str:
    """What the command prints on stdout. Raises CalledProcessError where it fails."""
    line = re.sub(r"^parsim ", "", question.command)
    words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", line)]
    command = [sys.executable, "-m", "parsim", *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def page(answers: dict[str, str]) -> str:
    """The page, from the answers by question."""
    parts = [INTRODUCTION]
    for number, question in enumerate(QUESTIONS, start=1):
        printed = answers[question.words].rstrip()
        parts += ["", f"## {number}. {question.words}", "", "```console", f"$ {question.command}", printed, "```"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page({question.words: answer(question) for question in QUESTIONS}), end="")
