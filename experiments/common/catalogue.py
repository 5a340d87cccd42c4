"""Every experiment and its parts: what each asks, what its whole and its small version are called with, and its results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsim.files import write_text_atomically

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments"

DATA = "{data}"
"""In arguments: the folder of published tables, which are not part of this repository (`--data`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One question of an experiment, answered by one module.

    Attributes:
        name: of the part, and of its document in results.json. question: it answers. module: that runs, within the folder.
        whole: arguments for the results that are committed; None where they come from somewhere else. quick: of a version that
            shows that all runs; None where there is none in a minute. why: `whole` or `quick` is None.
        writes: the module records its results itself.
    """

    name: str
    question: str
    module: str = ""
    whole: Sequence[str] | None = ()
    quick: Sequence[str] | None = ("--quick",)
    why: str = ""
    writes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One folder, with one README.md and one results.json."""

    name: str
    question: str
    parts: tuple[Part, ...]

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def results(self) -> Path:
        return self.folder / "results.json"

    def script(self, part: Part) -> str:
        """The module that runs a part, for `python -m`."""
        return f"experiments.{self.name}.{part.module or part.name}"


MEASURES = "it measures this machine for minutes"
TWO_RANKS = "it needs a profile that `parsim calibrate` has measured for two ranks"
FOUR_RANKS = "it needs profiles that `parsim calibrate` has measured for two ranks and for four"

CATALOGUE = (
    Experiment(
        name="executor",
        question="Does the executor train what one process trains, and as fast as PyTorch's own parallel modules?",
        parts=(
            Part(
                name="plans_executed",
                question="Does every plan that the search can emit train the same weights as one process?",
                whole=("--write",),
                quick=("--quick", "--models", "mlp", "--nproc", "2"),
                writes=True,
            ),
            Part(
                name="mixed_plans",
                question="Do mixed plans train the same weights as one process?",
                quick=("--quick", "--models", "mlp", "--nproc", "2"),
            ),
            Part(
                name="reference",
                question="Is the executor as fast as native DDP, FSDP2 and torch pipelining?",
                quick=None,
                why=MEASURES,
            ),
        ),
    ),
    Experiment(
        name="search",
        question="Does the search find the best plan, and do its answers hang together?",
        parts=(
            Part(
                name="search_exhaustive",
                module="exhaustive",
                question="Does the search find the best of all plans, by exhaustive enumeration?",
                writes=True,
            ),
            Part(
                name="search_properties",
                module="properties",
                question="Do invariants of the search hold, such as: more memory is never slower?",
                writes=True,
            ),
        ),
    ),
    Experiment(
        name="adaptive",
        question="What do mixed plans, and plans that change during a run, gain?",
        parts=(
            Part(name="adaptive_parallelism", question="Do Table I and the claims of the adaptive scheduling paper hold?"),
            Part(name="mixing", question="Does it ever pay to place components differently?"),
            Part(name="adaptive_tuning", question="Which parameters should the controller have?"),
            Part(
                name="live_replanning",
                question="Does changing the plan pay when a link or a rank becomes slow in the middle of a run?",
                quick=None,
                why="it measures this machine for three quarters of an hour",
            ),
            Part(
                name="closed_loop",
                question="Does a profile learn from 20 steps that a rank became slower?",
                quick=("--quick", "--models", "resnet50"),
            ),
        ),
    ),
    Experiment(
        name="published",
        question="How close are predictions of published training runs to the measurements?",
        parts=(
            Part(
                name="published",
                module="run",
                question="How close are predictions of published training runs of large transformers?",
                whole=("--rows", f"{DATA}/large/training.csv", f"{DATA}/large/more.csv"),
                quick=None,
                why="it needs the published rows (`--data`)",
                writes=True,
            ),
            Part(
                name="v100_published",
                question="How close are predictions for V100s to published measurements?",
                whole=("--data", f"{DATA}/v100"),
                quick=None,
                why="it needs the published tables (`--data`)",
            ),
        ),
    ),
    Experiment(
        name="this_machine",
        question="How close are predictions to real runs on this machine?",
        parts=(
            Part(
                name="this_machine",
                module="run",
                question="How close are predictions to real runs on this machine?",
                whole=("--records", "5", "--seed", "300", "--keep", "experiments/this_machine/records.tar.xz"),
                quick=None,
                why=MEASURES,
            ),
            Part(
                name="operators_here",
                question="How accurate are prices of a model that was never measured on this machine?",
                quick=None,
                why=MEASURES,
            ),
        ),
    ),
    Experiment(
        name="relaxed",
        question="What do relaxed ways of synchronising cost in accuracy, save in time, and how well are they predicted?",
        parts=(
            Part(
                name="decentralized",
                question="How do gossip graphs rank, and does Ada help?",
                quick=("--quick", "--parts", "figures,times"),
            ),
            Part(
                name="epoch_averaging",
                question="How much accuracy does rare averaging cost, and how much time does it save with a straggler?",
            ),
            Part(
                name="stale_gradients",
                question="How much accuracy do decoupled stages lose, and how much time do they gain?",
            ),
            Part(
                name="convergence",
                question="Do gradients stay under the stated bound at the safe step, and what happens beyond it?",
            ),
            Part(
                name="relaxed",
                module="run",
                question="How close are the predicted steps of relaxed plans?",
                whole=None,
                quick=("dgx1-v100-32gb", "--quick"),
                why=TWO_RANKS,
            ),
            Part(
                name="trained_periods",
                question="How close are the steps of trainings that average rarely, by each rank's own clock?",
                whole=None,
                quick=("dgx1-v100-32gb", "--quick"),
                why=TWO_RANKS,
            ),
            Part(
                name="time_to_accuracy",
                question="How often does the predicted winner of two ways of synchronising win when executed?",
                whole=None,
                quick=("dgx1-v100-32gb", "--quick"),
                why=FOUR_RANKS,
            ),
            Part(
                name="workers_64",
                question="Which rule reaches an accuracy first on 64 workers, and what would 95% less time need?",
            ),
            Part(name="workers_1008", question="What does a mixing graph do to accuracy on 1,008 replicas?"),
        ),
    ),
    Experiment(
        name="memory",
        question="How far is the predicted peak memory from the measured one?",
        parts=(
            Part(
                name="memory",
                module="run",
                question="How far is the predicted peak memory from the measured one?",
                whole=("--write",),
                quick=None,
                why="it starts some hundred launches; `--quick` measures two models in minutes",
                writes=True,
            ),
        ),
    ),
    Experiment(
        name="checkpoint_interval",
        question="How often should a run write a checkpoint?",
        parts=(Part(name="checkpoint_interval", module="run", question="How often should a run write a checkpoint?"),),
    ),
    Experiment(
        name="one_gpu",
        question="How close are the predictions on one GPU?",
        parts=(
            Part(
                name="one_gpu",
                module="run",
                question="How close are the predictions on one GPU?",
                whole=None,
                quick=None,
                why="it needs a GPU (`make gpu`)",
            ),
        ),
    ),
)


def every_part() -> list[tuple[Experiment, Part]]:
    """All parts, in the order of the pages."""
    return [(experiment, part) for experiment in CATALOGUE for part in experiment.parts]


def chosen(only: str) -> list[tuple[Experiment, Part]]:
    """The parts with these names, commas between; that of an experiment stands for all of its parts, "" for all. Raises
    ValueError: a name is unknown."""
    names = [name for name in only.split(",") if name]
    by_name: dict[str, list[tuple[Experiment, Part]]] = {part.name: [(experiment, part)] for experiment, part in every_part()}
    by_name |= {experiment.name: [(experiment, part) for part in experiment.parts] for experiment in CATALOGUE}
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"no experiment {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [pair for name in names for pair in by_name[name]] if names else every_part()


def recorded(name: str) -> dict[str, Any] | None:
    """The committed document of a part; None where nothing is."""
    ((experiment, _),) = [pair for pair in every_part() if pair[1].name == name]
    if not experiment.results.is_file():
        return None
    documents: dict[str, dict[str, Any]] = json.loads(experiment.results.read_text(encoding="utf-8"))
    return documents.get(name)


def record(name: str, document: Mapping[str, Any]) -> None:
    """Keep the document of a part in its experiment's results.json, beside those of the other parts."""
    ((experiment, _),) = [pair for pair in every_part() if pair[1].name == name]
    path = experiment.results
    documents = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    documents[name] = document
    ordered = {part.name: documents[part.name] for part in experiment.parts if part.name in documents}
    write_text_atomically(path, lines_of(ordered))


def kept_of(name: str, out: Path | None, quick: bool) -> dict[str, Any]:
    """What a run that was stopped goes on from: the document in the file `out`, or else the committed one; nothing for a small
    version."""
    if out is not None:
        document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
        return document
    return {} if quick else recorded(name) or {}


def keep(name: str, document: Mapping[str, Any], out: Path | None, quick: bool) -> None:
    """Write where `kept_of` reads."""
    if out is not None:
        write_text_atomically(out, json.dumps(document, indent=1) + "\n")
    elif not quick:
        record(name, document)


def lines_of(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """JSON with a line per key of a document and per row of a table, so that changes can be read."""
    parts = []
    for name, document in documents.items():
        lines = []
        for key, value in document.items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                rows = ",\n".join(json.dumps(row) for row in value)
                lines.append(f"{json.dumps(key)}: [\n{rows}\n]")
            else:
                lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
        parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
