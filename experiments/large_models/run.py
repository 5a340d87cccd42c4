"""Five questions as a user would ask them, and the page that shows the answers as printed.

python experiments/large_models/run.py            writes docs/large-models.md
python experiments/large_models/run.py --only N   prints the answer to question N
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "large-models.md"


@dataclass(frozen=True, slots=True)
class Asked:
    """A question in words, and the command that asks it."""

    words: str
    command: str


QUESTIONS = (
    Asked(
        "How fast does Llama 3 8B train on 64 H100 under FSDP, and what do 15 trillion tokens take?",
        "parsim plan llama3-8b --gpus 64xh100-sxm --network infiniband-400g --batch 512 --seq 8192 --tokens 15e12 "
        "--set plan.strategy=dp --set plan.zero_stage=3 --set plan.microbatches=8 --set plan.recompute=none",
    ),
    Asked(
        "Does Llama 3 70B fit on 32 H200 with every layer computed again, and what is its MFU?",
        "parsim plan llama3-70b --gpus 32xh200 --network infiniband-400g --batch 64 --seq 4096 --set plan.strategy=dp "
        "--set plan.zero_stage=3 --set plan.microbatches=2 --set 'plan.recompute=[\"h.*\"]'",
    ),
    Asked(
        "What does my Megatron-LM script reach on 16 H100?",
        "parsim plan --config tests/frameworks/pretrain_llama.sh --gpus 16xh100-sxm --network infiniband-400g",
    ),
    Asked(
        "Two nodes on 25 Gb/s Ethernet: what would make Llama 2 7B 20% faster?",
        "parsim plan llama2-7b --gpus 16xa100-sxm-80gb --network ethernet-25g --batch 32 --seq 2048 --faster 20% "
        "--set plan.strategy=dp --set plan.zero_stage=3 --set 'plan.mesh={dp=16}' --set plan.recompute=none",
    ),
    Asked(
        "Mixtral 8x7B on eight H100: does it fit?",
        "parsim plan mixtral-8x7b --gpus 8xh100-sxm --batch 8 --seq 4096 --set plan.strategy=dp --set plan.zero_stage=3 "
        "--set plan.recompute=full",
    ),
)


INTRODUCTION = """# Large models by name

`parsim plan llama3-70b --gpus 64xh100-sxm --network infiniband-400g --batch 512 --seq 8192` plans a model by name. Names,
sizes and their sources are in `parsim/model/catalogue/names.py`; `--set model.args.layers=16` changes a size. Unless the
question says otherwise, a named transformer takes bf16 (fp16 where the GPU has no bf16), a fused AdamW and components that
tensor parallelism can cut. T5, ViT and models from a Hugging Face `config.json` are traced. On GPUs they take the same
precision and optimizer, whatever their `torch_dtype`, and on this machine fp32 and SGD with momentum.

For samples packed from several documents use `--set model.args.document_tokens=1024`: attention then sees one document. For
documents of different lengths, give the mean over tokens (the sum of squares over the sum).

`--tokens` adds days, price, energy and failures; `--faster 20%` searches changed clusters; `--config FILE` reads a file
of Megatron-LM, NeMo or torchtitan. `[cluster]` takes `usd_per_hour`, `busy_power_w`, `device_mtbf_hours`,
`checkpoint_s` and `restart_s`.

`experiments/published/README.md` compares such predictions with published runs. Without a fitted factor, as here, they were too
fast on average: 12 and 17% for FSDP on H100 (two sources), 7% for Megatron-LM on A100.

`python experiments/large_models/run.py` writes this page."""


def answer(asked: Asked) -> str:
    """What the command prints on stdout. Raises CalledProcessError where it fails."""
    line = re.sub(r"^parsim ", "", asked.command)
    words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", line)]
    command = [sys.executable, "-m", "parsim", *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def page(answers: dict[str, str]) -> str:
    """The page, from the answers by question."""
    parts = [INTRODUCTION]
    for number, asked in enumerate(QUESTIONS, start=1):
        printed = answers[asked.words].rstrip()
        parts += ["", f"## {number}. {asked.words}", "", "```console", f"$ {asked.command}", printed, "```"]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, choices=range(1, len(QUESTIONS) + 1), help="print one answer")
    chosen = parser.parse_args()
    if chosen.only:
        print(answer(QUESTIONS[chosen.only - 1]), end="")
        return
    PAGE.write_text(page({asked.words: answer(asked) for asked in QUESTIONS}), encoding="utf-8")


if __name__ == "__main__":
    main()
