"""How much does the measured peak of the same plan vary? Every case several times, on whatever else the machine does.

    python experiments/memory/repeated.py MODEL CASE [CASE ...] [--times 5]

MODEL is a label as in the tables (`denoiser-layer`), CASE the name of a case (`pp gpipe`). One line per case: of every rank the
lowest and the highest peak, their distance in percent, and the prediction.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from experiments.memory.kinds import ALL, cases_of
from experiments.memory.ranks import measure, measured
from experiments.memory.run import job_of, models_of, problem_of
from parsim.model.formats import recorded_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--times", type=int, default=5)
    asked = parser.parse_args()
    question = next(question for question in ALL if question.label == asked.model)
    models = models_of(question)
    chosen = [case for case in cases_of(question, models) if case.label in asked.cases]
    found: dict[str, list[list[int]]] = {case.label: [] for case in chosen}
    for _ in range(asked.times):
        with tempfile.TemporaryDirectory() as folder:
            runs = [job_of(question, case, Path(folder)) for case in chosen]
            for case, run in zip(chosen, runs, strict=True):
                measure(models[recorded_weights(case.precision)], [run], Path(folder))
            for case, run in zip(chosen, runs, strict=True):
                found[case.label].append([entry["peak_bytes"] for entry in measured(Path(folder), run)])
    for case in chosen:
        problem = problem_of(models[recorded_weights(case.precision)], case)
        told = []
        for entry, peaks in zip(problem.memory(case.plan), zip(*found[case.label], strict=True), strict=True):
            low, high = min(peaks), max(peaks)
            spread = 100 * (high - low) / max(1, high)
            told.append(f"rank {entry.rank}: {low} to {high} ({spread:.2f}%), predicted {sum(entry.tensor_lines.values())}")
        print(f"{case.label}: {'; '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
