"""Train the three tasks of this folder with the commands of docs/training.md, and write their figures there.

    python examples/tasks/run.py [--only NAME] [--page]

Each is trained on two processes of this machine, which is calibrated first (a minute per task). The best weights are exported
and loaded into the plain module, which torch alone scores on the validation samples. Writes results.json beside this file,
the table of docs/training.md and docs/pictures/tasks.svg. --page makes the page from results.json alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import torch  # noqa: E402
import training_tasks  # noqa: E402
from figures import write_page  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from parsim.execute.processes.machine import describe_environment, machine_line  # noqa: E402
from parsim.model.objective import LOSSES  # noqa: E402

RESULTS = HERE / "results.json"
METRICS = {"segmentation": "mean_iou", "language": "perplexity", "regression": "mean_absolute_error"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(METRICS), help="one task, whose figures replace those of results.json")
    parser.add_argument("--page", action="store_true", help="train nothing")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"rows": {}}
    if not asked.page:
        for name in [asked.only] if asked.only else METRICS:
            results["rows"][name] = trained(name)
            environment = describe_environment()
            results |= {
                "machine": machine_line(environment),
                "torch": environment["versions"]["torch"],
                "date": datetime.now(UTC).strftime("%Y-%m-%d"),
                "load": round(os.getloadavg()[2], 1),
            }
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_page(results)


def trained(name: str) -> dict[str, Any]:
    """Train, export and load one task; what the page shows of it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / name
        parsim("run", str(HERE / f"{name}.toml"), "--out", str(out))
        weights = Path(folder) / "weights.pt"
        parsim("export", str(out), "--format", "state_dict", "--out", str(weights), "--allow-code")
        found = json.loads((out / "result.json").read_text())
        best = next(entry for entry in found["validation"] if entry["step"] == found["best"]["step"])
        alone = score_of(name, weights)
    predicted, measured = found["comparison"]["predicted_step_s"], found["comparison"]["measured_step_s"]
    return {
        "plan": found["plan_summary"],
        "steps": found["steps"],
        "losses": [round(loss, 4) for loss in found["losses"]],
        "validation": [{"step": entry["step"], "loss": round(entry["loss"], 5)} for entry in found["validation"]],
        "metric": METRICS[name],
        "first_score": found["validation"][0][METRICS[name]],
        "best_score": best[METRICS[name]],
        "best_step": best["step"],
        "best_loss": best["loss"],
        "loss_of_exported_weights": alone,
        "predicted_step_s": {key: predicted[key] for key in ("p05", "median", "p95")},
        "measured_step_s": measured["mean"],
        "diagnosis": found["diagnosis"]["text"],
    }


def parsim(*arguments: str) -> None:
    """The command, as a user calls it. Raises CalledProcessError where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "parsim", *arguments], cwd=HERE, env=environment, check=True)


def score_of(name: str, weights: Path) -> float:
    """The mean loss over the validation samples of the plain module with these weights, by torch alone."""
    make, data, kind = TASKS[name]
    module = make()
    module.load_state_dict(torch.load(weights, weights_only=True), strict=True)
    module.eval()
    inputs, targets = _stacked(data("validation", 0))
    with torch.no_grad():
        output = module(inputs)
    if kind == "cross_entropy" and output.dim() == 4:
        output = output.movedim(1, -1)
    return float(LOSSES[kind].total(output, targets)) / len(inputs)


def _stacked(data: Any) -> tuple[Tensor, Tensor]:
    samples = [data[place] for place in range(len(data))]
    pairs = [tuple(sample.values()) if isinstance(sample, dict) else sample for sample in samples]
    inputs, targets = zip(*pairs, strict=True)
    return torch.stack(inputs), torch.stack(targets)


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[str, int], Any], str]] = {
    "segmentation": (training_tasks.segmenter, training_tasks.more_blobs, "cross_entropy"),
    "language": (training_tasks.LanguageModel, training_tasks.more_sentences, "cross_entropy"),
    "regression": (training_tasks.regressor, training_tasks.larger_surface, "mse"),
}
"""The plain module, its data by split and seed, and the loss."""


if __name__ == "__main__":
    main()
