"""Every experiment: what it asks, what its whole and its small version are called with, and what they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments"

DATA = "{data}"
"""In arguments: the folder of published tables, which are not part of this repository (`--data`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One folder.

    Attributes:
        name: of the folder. question: it answers. whole: arguments of run.py for the results that are committed; None where
            they come from somewhere else. quick: of a version that shows that all runs; None where there is none in a minute.
        why: `whole` or `quick` is None. writes: run.py makes results.json itself.
    """

    name: str
    question: str
    whole: Sequence[str] | None = ()
    quick: Sequence[str] | None = ("--quick",)
    why: str = ""
    writes: bool = False

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def results(self) -> Path:
        return self.folder / "results.json"


MEASURES = "it measures this machine for minutes"

CATALOGUE = (
    Experiment(name="adaptive_parallelism", question="Do Table I and the claims of the adaptive scheduling paper hold?"),
    Experiment(
        name="epoch_averaging",
        question="How much accuracy does rare averaging cost, and how much time does it save with a straggler?",
    ),
    Experiment(
        name="decentralized",
        question="How do gossip graphs rank, and does Ada help?",
        quick=("--quick", "--parts", "figures,times"),
    ),
    Experiment(name="stale_gradients", question="How much accuracy do decoupled stages lose, and how much time do they gain?"),
    Experiment(
        name="relaxed",
        question="How close are the predicted steps of relaxed plans?",
        whole=None,
        quick=("dgx1-v100-32gb", "--quick"),
        why="it needs a profile that `parsim calibrate` has measured for two ranks",
    ),
    Experiment(
        name="time_to_accuracy",
        question="How often does the predicted winner of two ways of synchronising win when executed?",
        whole=None,
        quick=("dgx1-v100-32gb", "--quick"),
        why="it needs a profile that `parsim calibrate` has measured for two ranks",
    ),
    Experiment(name="mixing", question="Does it ever pay to place components differently?"),
    Experiment(name="adaptive_tuning", question="Which parameters should the controller have?"),
    Experiment(
        name="live_replanning",
        question="Does changing the plan pay when a link or a rank becomes slow in the middle of a run?",
        quick=None,
        why="it measures this machine for three quarters of an hour",
    ),
    Experiment(name="checkpoint_interval", question="How often should a run write a checkpoint?"),
    Experiment(
        name="closed_loop",
        question="Does a profile learn from 20 steps that a rank became slower?",
        quick=("--quick", "--models", "resnet50"),
    ),
    Experiment(
        name="memory",
        question="How far is the predicted peak memory from the measured one?",
        whole=("--write",),
        quick=None,
        why="it starts some hundred launches; `--quick` measures two models in minutes",
        writes=True,
    ),
    Experiment(
        name="plans_executed",
        question="Does every plan that the search can emit train the same weights as one process?",
        whole=("--write",),
        quick=("--quick", "--models", "mlp", "--nproc", "2"),
        writes=True,
    ),
    Experiment(
        name="mixed_plans",
        question="Do mixed plans train the same weights as one process?",
        quick=("--quick", "--models", "mlp", "--nproc", "2"),
    ),
    Experiment(
        name="reference",
        question="Is the executor as fast as native DDP, FSDP2 and torch pipelining?",
        quick=None,
        why=MEASURES,
        writes=True,
    ),
    Experiment(
        name="search_exhaustive",
        question="Does the search find the best of all plans, by exhaustive enumeration?",
        writes=True,
    ),
    Experiment(
        name="search_properties",
        question="Do invariants of the search hold, such as: more memory is never slower?",
        writes=True,
    ),
    Experiment(
        name="published",
        question="How close are predictions of published training runs to the measurements?",
        whole=("--rows", f"{DATA}/large/training.csv"),
        quick=None,
        why="it needs the published rows (`--data`)",
        writes=True,
    ),
    Experiment(
        name="v100_published",
        question="How close are predictions for V100s to published measurements?",
        whole=("--data", f"{DATA}/v100"),
        quick=None,
        why="it needs the published tables (`--data`)",
    ),
    Experiment(
        name="this_machine",
        question="How close are predictions to real runs on this machine?",
        whole=("--records", "5", "--seed", "300", "--keep", "experiments/this_machine/records.tar.xz"),
        quick=None,
        why=MEASURES,
    ),
    Experiment(
        name="operators_here",
        question="How accurate are prices of a model that was never measured on this machine?",
        quick=None,
        why=MEASURES,
    ),
    Experiment(
        name="large_models",
        question="Five questions about large models, as a user would ask them",
        whole=None,
        quick=None,
        why="its answers are a page of their own, which a test makes again: docs/large-models.md",
    ),
    Experiment(
        name="one_gpu",
        question="How close are the predictions on one GPU?",
        whole=None,
        quick=None,
        why="it needs a GPU (`make gpu`)",
    ),
)


def chosen(only: str) -> list[Experiment]:
    """The experiments with these names.

    Args:
        only: names with commas between; "" for all.

    Raises:
        ValueError: a name is unknown.
    """
    names = [name for name in only.split(",") if name]
    known = {each.name: each for each in CATALOGUE}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no experiment {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(CATALOGUE)
