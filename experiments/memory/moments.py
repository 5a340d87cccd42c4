"""What lies on a rank at every computation of a step, and what made it? Of one case, measured by itself.

    python experiments/memory/moments.py MODEL CASE [CASE ...] [--rank R]

MODEL is a label as in the tables (`denoiser-layer`), CASE the name of a case (`drawn 3 of 4 ranks`). Of every rank, or of one:
each computation of a step with the bytes that are alive when it ends and at its fullest moment; what is alive at the
fullest moment of the step, by the computation in which it was made; and the predicted lines beside the measured ones.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.memory.cases import Case, Question
from experiments.memory.kinds import ALL, cases_of
from experiments.memory.ranks import measure, measured
from experiments.memory.run import job_of, models_of, problem_of
from parsim.execute import rank_run
from parsim.execute.rank_run import LineWatch, watching
from parsim.execute.stage import StageReplica
from parsim.files import write_text_atomically
from parsim.model.formats import recorded_weights
from parsim.model.model import Model
from parsim.program.task import Task
from parsim.work import Compute


class MomentWatch(LineWatch):
    """Attributes: computations: (what, bytes at its end, most bytes while it ran), in order. fullest: bytes at the fullest
    moment by what made them, each with how many storages of which size."""

    def __init__(self) -> None:
        super().__init__()
        self.computations: list[tuple[str, int, int]] = []
        self.fullest: dict[str, dict[int, int]] = {}
        self._running = "before"
        self._made: dict[int, str] = {}
        self._most = 0
        track = self.live.track

        def noting(tensor: Any, line: str = "") -> None:
            key = tensor.untyped_storage()._cdata
            if key not in self.live._live:
                self._made[key] = f"{line}: {self._running}"
            before = self.live.peak_bytes
            track(tensor, line)
            self._most = max(self._most, self.live.current_bytes)
            if self.live.peak_bytes > before:
                self._keep()

        self.live.track = noting  # type: ignore[method-assign]

    def _keep(self) -> None:
        self.fullest = {}
        for key, (size, _, _) in list(self.live._live.items()):
            if size:
                sizes = self.fullest.setdefault(self._made.get(key, "?"), {})
                sizes[size] = sizes.get(size, 0) + 1
        self.fullest_while = self._running

    def begins(self, task: Task) -> None:
        super().begins(task)
        self._running, self._most = _named(task), self.live.current_bytes

    def ends(self, task: Task) -> None:
        super().ends(task)
        self.computations.append((self._running, self.live.current_bytes, self._most))
        self._running = f"after {self._running}"


def _named(task: Task) -> str:
    work = task.work
    if isinstance(work, Compute):
        return f"{work.phase.value} {work.component} of {task.origin.microbatch}"
    return type(work).__name__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--rank", type=int)
    asked = parser.parse_args()
    question = next(question for question in ALL if question.label == asked.model)
    models = models_of(question)
    for case in cases_of(question, models):
        if case.label in asked.cases:
            _show(question, models[recorded_weights(case.precision)], case, asked.rank)


def _show(question: Question, model: Model, case: Case, rank: int | None) -> None:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        run = job_of(question, case, folder)
        with _noted(folder):
            measure(model, [run], folder)
        print(f"{question.label}, {case.label}: {case.plan.summary()}, {case.optimizer}")
        for entry, found in zip(problem_of(model, case).memory(case.plan), measured(folder, run), strict=True):
            if rank in (None, entry.rank):
                _tell(entry.rank, entry.tensor_lines, found, json.loads((folder / f"moments{entry.rank}.json").read_text()))
        print(flush=True)


@contextmanager
def _noted(folder: Path) -> Iterator[None]:
    """Ranks that are forked meanwhile write what they see into the folder."""

    @contextmanager
    def noting(stage: StageReplica) -> Iterator[LineWatch]:
        watch = MomentWatch()
        with watch.live:
            for line, tensors in stage.resident_tensors().items():
                for tensor in tensors:
                    watch.live.track(tensor, line)
            yield watch
        found = {"computations": watch.computations, "fullest": watch.fullest, "while": watch.fullest_while}
        write_text_atomically(folder / f"moments{stage.rank}.json", json.dumps(found))

    rank_run.watching = noting  # type: ignore[assignment]
    try:
        yield
    finally:
        rank_run.watching = watching


def _tell(rank: int, predicted: Mapping[str, int], found: Mapping[str, Any], moments: Mapping[str, Any]) -> None:
    total, peak = sum(predicted.values()), found["peak_bytes"]
    print(f"\nrank {rank}: predicted {total:,}, measured {peak:,} ({100 * (total - peak) / peak:+.2f}%)")
    for line in dict.fromkeys([*predicted, *found["lines"]]):
        print(f"  {line:20} {predicted.get(line, 0):>12,} {found['lines'].get(line, 0):>12,}")
    print("  computation, bytes at its end, at its fullest moment")
    for what, end, most in moments["computations"]:
        print(f"    {what:45} {end:>12,} {most:>12,}")
    print(f"  at the fullest moment, while {moments['while']}:")
    for made, sizes in sorted(moments["fullest"].items()):
        print(f"    {made:60} {', '.join(f'{count} x {int(size):,}' for size, count in sizes.items())}")


if __name__ == "__main__":
    main()
