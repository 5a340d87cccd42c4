"""The job of one launch: one or more plans, trained, or measured in interleaved rounds. JSON between parent and ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from parsim.costs.loading import MeasuredLoading
from parsim.costs.memory.verdict import FIT_PROBABILITY
from parsim.errors import ExecutionError
from parsim.execute.training.recipe import PLAIN, TrainingRecipe
from parsim.files import read_json, reading, version_problem, write_text_atomically
from parsim.model.spec import ModelSpec
from parsim.plans.constraints import UNCONSTRAINED, SearchConstraints
from parsim.plans.plan import Plan
from parsim.typed import check_types

SCHEMA_VERSION = 1
"""Of job.json; files written before there was the key have this version, too."""

SCORE = "score.json"
"""In the job's output, once all steps are made."""

EXECUTION = "execution.json"
"""What rank 0 leaves in the job's output of the numbers it computes in; it becomes a part of environment.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One model under one plan.

    Attributes:
        name: unique in the job; names its files. model_path: the Model JSON the plan was made for.
        dtype: "float32" or "float64", of weights and computation in precision fp32.
        precision: as in RUN.toml (`parsim.model.number_formats`). master_weights: with bf16, the optimizer's copies in fp32.
        loss_scale, loss_scale_growth_steps: with amp_fp16, the first scale and after how many good steps it grows.
        predicted_memory: per rank the lines of tensors, bytes, for whoever explains what was short; empty: not known.
        workers: processes per rank that read samples ahead. pin_memory: as torch's DataLoader, for ranks that load ahead.
        predicted_step_s: mean seconds of a step, shown beside the measured one; 0: not known.
        recipe: schedule, weight decay and what else goes with the update.
        dataset, data_root: as `parsim.data.load_dataset` takes them. seed: of weights and sample order.
    """

    name: str
    model: ModelSpec
    model_path: str
    plan: Plan
    optimizer: str
    learning_rate: float
    dataset: str
    data_root: str | None = None
    dtype: str = "float32"
    seed: int = 0
    precision: str = "fp32"
    master_weights: bool = True
    loss_scale: float = 65536.0
    loss_scale_growth_steps: int = 2000
    predicted_memory: tuple[dict[str, int], ...] = ()
    recipe: TrainingRecipe = PLAIN
    workers: int = 0
    pin_memory: bool = True
    predicted_step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """After `step` steps training goes on under another plan of the same world size and batch."""

    step: int
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveSpec:
    """What the controller needs beside the run: the costs of the machine, and how often to look.

    Attributes:
        profile: path or name of the hardware profile. devices: as `cluster_from_profile` takes them.
        window_steps: steps between two looks. epoch_steps: of one pass over the data.
        fit_probability: with which the memory of a plan must suffice.
        loading: of a dataset of the user's own, as it was measured; None: of another one, or not measured.
        asked: what every plan must keep, the ones changed to included.
    """

    profile: str
    devices: tuple[int, ...] | None
    precision: str
    window_steps: int
    epoch_steps: int
    fit_probability: float = FIT_PROBABILITY
    loading: MeasuredLoading | None = None
    asked: SearchConstraints = UNCONSTRAINED

    def __post_init__(self) -> None:
        if not 0 < self.fit_probability < 1:
            raise ExecutionError(f"fit_probability = {self.fit_probability}: must be above 0 and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Attributes:
    mode: "train" runs `steps` steps of the only run. "measure" runs `rounds` rounds, and in each of them every run does
        `steps` steps. Both leave the first `warmup_steps` of each run out of the times.
    settle_steps: in mode "measure", steps at the beginning of a run's turn that are left out too: the caches still hold what
        the run before had there.
    keep_state: in mode "measure", leave a checkpoint of every run in its folder at the end.
    checkpoint_every: steps between checkpoints (0: at the end only); resume: go on from the latest.
    timeout_s: of a collective, where no launcher watches the ranks' heartbeats.
    switches: plans to change to on the way (mode "train"). adaptive: let the controller decide instead.
    """

    output: str
    mode: Literal["train", "measure"]
    runs: tuple[RunSpec, ...]
    steps: int
    rounds: int = 1
    warmup_steps: int = 2
    settle_steps: int = 0
    device: str = "cpu"
    keep_state: bool = False
    checkpoint_every: int = 0
    resume: bool = False
    timeout_s: float = 600.0
    switches: tuple[Switch, ...] = ()
    adaptive: AdaptiveSpec | None = None

    def __post_init__(self) -> None:
        if not self.runs or self.steps < 1 or self.rounds < 1:
            raise ExecutionError("a job needs at least one run, one step and one round")
        if self.mode == "train" and len(self.runs) != 1:
            raise ExecutionError(f"mode train takes one run, got {len(self.runs)}; use mode measure to compare plans")
        first = self.runs[0].plan
        if self.switches or self.adaptive is not None:
            for plan in (first, *(switch.plan for switch in self.switches)):
                if plan.synchronisation.is_relaxed:
                    raise ExecutionError(
                        f"a plan with synchronisation {plan.synchronisation} cannot be changed for another on the way: its "
                        "replicas have weights of their own; train without --adaptive"
                    )
        for switch in self.switches:
            if (switch.plan.world_size, switch.plan.global_batch) != (first.world_size, first.global_batch):
                raise ExecutionError(
                    f"a switch keeps ranks and batch: {first.world_size} ranks and global_batch {first.global_batch} cannot "
                    f"become {switch.plan.world_size} and {switch.plan.global_batch}"
                )

    @property
    def total_steps(self) -> int:
        """Steps of every run, those before any is timed included."""
        return self.steps if self.mode == "train" else self.warmup_steps + self.rounds * (self.settle_steps + self.steps) + 1

    @property
    def world_size(self) -> int:
        return max(run.plan.world_size for run in self.runs)

    def save(self, path: Path) -> None:
        document = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        for entry, run in zip(document["runs"], self.runs, strict=True):
            entry["model"] = run.model.to_dict()
            entry["plan"] = run.plan.to_json()
        if self.adaptive is not None:
            document["adaptive"]["asked"] = self.adaptive.asked.to_dict()
        document["switches"] = [{"step": switch.step, "plan": switch.plan.to_json()} for switch in self.switches]
        write_text_atomically(path, json.dumps(document, indent=1))

    @classmethod
    def load(cls, path: Path) -> Job:
        with reading(f"{path} is not a job", ExecutionError, "run again"):
            document: dict[str, Any] = read_json(path)
            if problem := version_problem(document, SCHEMA_VERSION, unversioned=1):
                raise ExecutionError(f"{path}: {problem}; or run again")
            document.pop("schema_version", None)
            document["runs"] = tuple(
                RunSpec(
                    **{
                        **run,
                        "model": ModelSpec.from_dict(run["model"]),
                        "plan": Plan.from_json(run["plan"]),
                        "predicted_memory": tuple(run.get("predicted_memory", ())),
                        "recipe": TrainingRecipe.from_dict(run.get("recipe", {})),
                    }
                )
                for run in document["runs"]
            )
            document["switches"] = tuple(
                Switch(step=switch["step"], plan=Plan.from_json(switch["plan"])) for switch in document["switches"]
            )
            adaptive = document["adaptive"]
            if adaptive is not None:
                devices = None if adaptive["devices"] is None else tuple(adaptive["devices"])
                measured = adaptive.get("loading")
                loading = None if measured is None else MeasuredLoading.from_dict(measured)
                asked = SearchConstraints.from_dict(adaptive.get("asked", {}))  # not in files written before there was the key
                document["adaptive"] = AdaptiveSpec(**{**adaptive, "devices": devices, "loading": loading, "asked": asked})
            found = cls(**document)
            check_types(found, "job")
            return found
