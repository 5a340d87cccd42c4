"""Measure this machine: the request of a calibration of some models, and the resulting profile."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from parsim.app.config import Question
from parsim.app.doctor import progress
from parsim.errors import ConfigError
from parsim.execute.cuda.gpu import usable_gpus
from parsim.execute.processes.setup import available_cores
from parsim.files import write_text_atomically
from parsim.hardware.compose import SUFFIX, parts_file_text, read_parts_file
from parsim.hardware.profile import Profile
from parsim.model.spec import ModelSpec
from parsim.report.tables import ReportTable, calibration_table, table_html, to_text

if TYPE_CHECKING:
    import pandas as pd

    from calibration.rounds.request import CalibrationRequest


CalibratedDevice = Literal["cpu", "cuda"]
LeftoverPolicy = Literal["require", "discard", "use"]

SMALLEST_SHARE = 64
"""Local batches down to this part of the global batch are measured: a plan cuts its batch into so many parts at most."""
DEFAULT_BATCHES = (1, 4, 16)
DEFAULT_OPTIMIZER = "sgd_momentum"


def calibration_request(
    configs: Sequence[Question] = (),
    models: Sequence[str] = (),
    *,
    batches: tuple[int, ...] = DEFAULT_BATCHES,
    optimizers: Sequence[str] = (),
    device: CalibratedDevice = "cpu",
    nproc: int | None = None,
    precision: str | None = None,
    quick: bool = False,
    collectives: Sequence[str] = (),
) -> CalibrationRequest:
    """What to measure for these questions, and for these models of the zoo at these local batches: each model once.

    Args:
        nproc: ranks that measure at once; None: the most devices a question asks for by number, else one per GPU or core.
        precision: None: that of the questions on a GPU; a CPU computes in fp32 whatever is simulated.
        quick: fewer rounds and sizes.
        collectives: "package.module:ROW" of one's own, measured beside the shipped ones.
    Raises: ConfigError.
    """
    from calibration.rounds.request import CalibrationRequest

    sizes: dict[ModelSpec, set[int]] = {}
    for config in configs:
        sizes.setdefault(config.model_spec, set()).update(local_batches(config.training.global_batch))
    for name in models:
        sizes.setdefault(ModelSpec(name=name), set()).update(batches)
    named = (*optimizers, *(name for config in configs for name in config.training.optimizers)) or (DEFAULT_OPTIMIZER,)
    precisions = {config.training.precision for config in configs} if device == "cuda" else set()
    if precision is None and len(precisions) > 1:
        raise ConfigError(
            f"the files train in {' and '.join(sorted(precisions))}; a profile is measured in one: choose it with --precision"
        )
    ranks = [len(chosen) if isinstance(chosen, list) else chosen for config in configs if (chosen := config.devices)]
    nproc = nproc or max(ranks, default=0) or (max(1, visible_gpus()) if device == "cuda" else len(available_cores()))
    return CalibrationRequest(
        models=tuple((spec, tuple(sorted(local))) for spec, local in sizes.items()),
        device=device,
        nproc=nproc,
        optimizers=tuple(dict.fromkeys(named)),
        precision=precision or next(iter(precisions), "fp32"),
        quick=quick,
        collectives=tuple(dict.fromkeys(collectives)),
        granularities=tuple(dict.fromkeys(config.model.granularity for config in configs)) or ("block",),
    )


def measure_machine(request: CalibrationRequest, out: Path, *, leftover: LeftoverPolicy = "use") -> Profile:
    """Calibrate, and write the profile at `out`; progress goes to stderr.

    `leftover` says what to do with what a stopped calibration of `out` left. Errors as `calibration.rounds.calibrate`.
    """
    from calibration.rounds.calibrate import calibrate

    with progress(f"Calibrating {len(request.models)} model(s) on {request.nproc} {request.device} rank(s)") as say:
        return calibrate(request, out, on_line=say, leftover=leftover)


def local_batches(global_batch: int) -> set[int]:
    """The global batch and its halves, quarters, ... down to a 64th: replicas and microbatches divide it so."""
    parts = (2**power for power in range(SMALLEST_SHARE.bit_length()))
    return {global_batch // part for part in parts if global_batch % part == 0}


def visible_gpus() -> int:
    """How many GPUs torch sees on this host."""
    return usable_gpus()[0]


def device_here() -> CalibratedDevice:
    """ "cuda" where torch sees a GPU."""
    if importlib.util.find_spec("torch") is None:
        return "cpu"
    return "cuda" if visible_gpus() else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRanks:
    """Where a command computes that leaves the choice to parsim.

    Attributes: kind: of the devices. count: ranks, one per device. why: the kind, in words.
    """

    kind: CalibratedDevice
    count: int
    why: str

    @property
    def count_text(self) -> str:
        one, more = ("GPU", "GPUs") if self.kind == "cuda" else ("CPU process", "CPU processes")
        return f"{self.count} {one if self.count == 1 else more}"

    def __str__(self) -> str:
        return f"{self.count_text} ({self.why})"


def choose_ranks(asked: int | None, *, most: int, cpu_ranks: int) -> ChosenRanks:
    """A rank on every GPU where torch sees some and has NCCL, else processes on the CPU.

    Args: asked: ranks; None: as many as there are GPUs, at most `most`; on the CPU `cpu_ranks`.
    Raises: ConfigError for more ranks than GPUs.
    """
    from torch import distributed

    gpus = visible_gpus()
    if gpus and distributed.is_available() and distributed.is_nccl_available():
        if asked is not None and asked > gpus:
            raise ConfigError(
                f"{asked} ranks need a GPU each, and torch sees {gpus}; ask for at most {gpus}, or set CUDA_VISIBLE_DEVICES to "
                "nothing to compute on the CPU"
            )
        count = asked or min(gpus, most)
        return ChosenRanks(kind="cuda", count=count, why=f"NCCL; torch sees {gpus}")
    why = "gloo; torch sees no GPU" if not gpus else f"gloo; torch sees {gpus} GPUs but was built without NCCL"
    return ChosenRanks(kind="cpu", count=asked or cpu_ranks, why=why)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """The result of `parsim.calibrate`; pass it to `parsim.plan` as the cluster.

    Attributes:
        path: of the profile; the raw points lie in the same folder.
    """

    path: Path
    profile: Profile

    @property
    def warnings(self) -> tuple[str, ...]:
        """Timings that were discarded, and doubts about the rest."""
        return tuple(self.profile.provenance.warnings)

    def table(self) -> pd.DataFrame:
        """The measurements as strings; columns as in the table that `parsim calibrate` prints."""
        import pandas as pd

        report = self.report()
        return pd.DataFrame(list(report.rows), columns=[column.name for column in report.columns])

    def report(self) -> ReportTable:
        return calibration_table(self.profile)

    def __str__(self) -> str:
        return f"{to_text(self.report())}\nProfile: {self.path}"

    def __repr__(self) -> str:
        compute = self.profile.compute
        return (
            f"Calibration({self.path}: {len(self.profile.devices)} devices, {len(compute.components)} component points, "
            f"{len(self.profile.communication.points)} collective points, {len(self.warnings)} warnings)"
        )

    def _repr_html_(self) -> str:
        return table_html(self.report())


def new_profile(
    gpu: str, *, count: int | None = None, link: str | None = None, network: str | None = None, out: Path | None = None
) -> dict[str, str]:
    """Write a commented profile that refers to parts; returns its path and name.

    Args: gpu: by name or path. count: GPUs of a node; None: as the usual machine. link, network: by name or path. out: the
        file, which must end in .toml and not exist; None: GPU.toml in the current directory.
    Raises: ConfigError: the file is there already, or ends otherwise. ProfileError: an unknown part.
    """
    path = out or Path(f"{Path(gpu).stem}{SUFFIX}")
    if path.suffix != SUFFIX:
        raise ConfigError(f"--out {path}: a profile made of parts is a {SUFFIX} file, which can hold comments; name it so")
    if path.exists():
        raise ConfigError(f"{path} exists; give another --out, or remove it")
    text = parts_file_text(gpu, count, link, network)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, text)
    return {"path": str(path), "name": read_parts_file(path).name}
