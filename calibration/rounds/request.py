"""The request of a calibration: plain data that the parent process and the measuring ranks share as JSON.
What comes of it are raw points, every single timing, which are kept compressed beside the profile."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parsim.errors import ConfigError, ProfileError, near_matches
from parsim.files import parse_json, read_regular, reading, unpacked, version_problem, write_atomically
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.units import KIB, MIB
from parsim.work import COLLECTIVE_KINDS

DEVICES = ("cpu", "cuda")
PRECISIONS = {"cpu": ("fp32", "fp64"), "cuda": ("fp32", "tf32", "amp_bf16", "amp_fp16", "bf16", "fp64")}
"""That a device of each kind is measured in (`calibration.measure.device`)."""
SIZES_BYTES = (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, *(MIB * 2**power for power in range(9)))
QUICK_SIZES_BYTES = (KIB, 64 * KIB, MIB, 4 * MIB)
QUICK_SHARE = 0.125
"""Share of the usual time that a quick calibration takes."""


def check_measurable(collective: str) -> None:
    """Raise ConfigError unless the collective is always measured, or its row says how it is called."""
    if collective not in COLLECTIVE_KINDS and COLLECTIVE_KINDS[collective].call is None:
        raise ConfigError(
            f"collective {collective!r} says nowhere how it is called, so it cannot be measured; give its row `call`"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """Attributes:
    models: each with the local batches (samples of one microbatch on one rank) that plans will use.
    nproc: ranks that measure at once. optimizers: rows of `parsim.model.optimizers.OPTIMIZERS`.
    precision: one of PRECISIONS of the device. quick: fewer rounds and sizes, for tests and first looks.
    sizes_bytes: of the collectives; empty: 1 KiB to 256 MiB.
    compute_budget_s: rounds over all models and batches stop once this much time is spent, but not before `min_rounds`.
        Rounds over shards, over collectives, and over both kinds of work at once have their own budgets.
    granularities: of the components, as plans will run them; every model is measured at each.
    shard_ways: into how many shards components are cut that can be; of each shard number 0 is measured. Those that the ranks
        cannot hold side by side are left out.
    collectives: measured beside the shipped ones: "package.module:ROW" of rows that say how they are called.
    operator_budget_s: of the rounds over single operators; 0: models that are not measured stay without a price."""

    models: tuple[tuple[ModelSpec, tuple[int, ...]], ...]
    device: str = "cpu"
    nproc: int = 2
    optimizers: tuple[str, ...] = ("sgd_momentum",)
    precision: str = "fp32"
    quick: bool = False
    sizes_bytes: tuple[int, ...] = ()
    compute_budget_s: float = 45.0
    min_rounds: int = 3
    max_rounds: int = 40
    granularities: tuple[str, ...] = ("block",)
    collectives: tuple[str, ...] = ()
    shard_ways: tuple[int, ...] = (2, 4)
    shard_budget_s: float = 25.0
    operator_budget_s: float = 45.0
    collective_budget_s: float = 60.0
    overlap_budget_s: float = 40.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError(f"unknown device {self.device!r}{near_matches(self.device, DEVICES)}")
        if self.precision not in PRECISIONS[self.device]:
            where = "" if self.device == "cpu" else " on GPUs"
            known = PRECISIONS[self.device]
            raise ConfigError(
                f"components are measured{where} in {', '.join(known[:-1])} or {known[-1]}, got precision {self.precision!r}; "
                "others are priced from published numbers alone"
            )
        if self.nproc < 1:
            raise ConfigError(f"nproc must be >= 1, got {self.nproc}")
        if not self.models:
            raise ConfigError("no model to measure; name at least one, with its local batches")
        if not self.optimizers:
            raise ConfigError("no optimizer to measure; name at least one, such as sgd_momentum")
        for name in self.collectives:
            check_measurable(name)
        for spec, batches in self.models:
            if not batches or min(batches) < 1:
                raise ConfigError(f"model {spec.name} needs local batches >= 1, got {batches}; give e.g. (16, 8)")
        if not self.granularities:
            raise ConfigError("no granularity to measure; name at least one, such as block")
        if any(ways < 2 for ways in self.shard_ways):
            raise ConfigError(f"components are cut into at least 2 shards, got shard_ways {self.shard_ways}")
        if any(size < 8 for size in self.sizes_bytes):
            raise ConfigError(f"collective sizes must be >= 8 bytes, got {min(self.sizes_bytes)}")
        if not 1 <= self.min_rounds <= self.max_rounds:
            raise ConfigError(f"rounds need 1 <= min_rounds <= max_rounds, got {self.min_rounds} and {self.max_rounds}")

    @property
    def collective_sizes_bytes(self) -> tuple[int, ...]:
        return self.sizes_bytes or (QUICK_SIZES_BYTES if self.quick else SIZES_BYTES)

    @property
    def measured_models(self) -> tuple[tuple[ModelSpec, tuple[int, ...], str], ...]:
        """Every model with its local batches at every granularity; a model's number is its place here."""
        return tuple((spec, batches, granularity) for granularity in self.granularities for spec, batches in self.models)

    @property
    def budgets_s(self) -> dict[str, float]:
        """Seconds by section."""
        whole = {
            "components": self.compute_budget_s,
            "shards": self.shard_budget_s,
            "operators": self.operator_budget_s,
            "collectives": self.collective_budget_s,
            "overlap": self.overlap_budget_s,
        }
        return {name: seconds * (QUICK_SHARE if self.quick else 1.0) for name, seconds in whole.items()}

    @property
    def ways(self) -> tuple[int, ...]:
        """Numbers of shards that `nproc` ranks can hold side by side; quick: the least of them."""
        possible = tuple(ways for ways in self.shard_ways if self.nproc % ways == 0)
        return possible[:1] if self.quick else possible

    def to_json(self) -> str:
        document = asdict(self)
        document["models"] = [[spec.to_dict(), list(batches)] for spec, batches in self.models]
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> CalibrationRequest:
        document: dict[str, Any] = json.loads(text)
        document["models"] = tuple((ModelSpec.from_dict(spec), tuple(batches)) for spec, batches in document["models"])
        for key in ("optimizers", "sizes_bytes", "granularities", "shard_ways", "collectives"):
            document[key] = tuple(document.get(key, ()))
        return cls(**document)


def active_levels(nproc: int, cores: int) -> tuple[int, ...]:
    """How many ranks compute at once in a measurement: one, and one per core; ascending, each once. How ranks on one core slow
    one another is not measured: they share it (`parsim.engines`)."""
    return tuple(sorted({1, min(cores, nproc)}))


SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPoints:
    """Everything a profile is computed from.

    Attributes:
        raw: what the ranks left (see `calibration.rounds.turns.gather_raw`). The other fields are as `build_profile` takes
        them.
    """

    raw: Mapping[str, Any]
    request: CalibrationRequest
    models: Sequence[Model]
    created: str
    command: str
    name: str


def entries_of(raw: Mapping[str, Any], key: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Everything of one kind that was measured ("sweeps", "shards", "collectives", ...), with the rank that did."""
    for number, rank in enumerate(raw["ranks"]):
        for entry in rank.get(key, ()):
            yield number, entry


def raw_path(profile: Path) -> Path:
    """`mine.raw.json.gz` beside `mine.json`."""
    return profile.with_name(f"{profile.stem}.raw.json.gz")


def save_raw(points: RawPoints, path: Path) -> None:
    """Write atomically; equal points make equal files."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "name": points.name,
        "created": points.created,
        "command": points.command,
        "request": json.loads(points.request.to_json()),
        "models": [json.loads(model.to_json()) for model in points.models],
        "raw": points.raw,
    }
    write_atomically(path, lambda file: file.write(gzip.compress(json.dumps(document).encode(), mtime=0)))


def load_raw(path: Path) -> RawPoints:
    """Raises ProfileError for a file that is not there, not whole, or of another version of parsim."""
    if not path.is_file():
        raise ProfileError(f"there are no raw points {path}; they are written by `parsim calibrate`, beside the profile")
    with reading(f"cannot read the raw points {path}", ProfileError, "calibrate again"):
        document = parse_json(unpacked(read_regular(path)))
        if problem := version_problem(document if isinstance(document, dict) else {}, SCHEMA_VERSION):
            raise ProfileError(f"raw points {path}: {problem}; or calibrate again")
        return RawPoints(
            raw=document["raw"],
            request=CalibrationRequest.from_json(json.dumps(document["request"])),
            models=[Model.from_json(json.dumps(model), str(path)) for model in document["models"]],
            created=document["created"],
            command=document["command"],
            name=document["name"],
        )
