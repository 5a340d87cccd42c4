"""Checkpoints that a killed process cannot spoil, and that another plan can resume.

A checkpoint is a folder `step-00000020/` with two files per rank. `rank-0000.pt` holds its tensors by *global* name (the
qualified parameter or buffer name, whatever the plan). `rank-0000.json` holds their size and digest, and a
digest of itself (`parsim.execute.checkpoint.checkpoint`); it is written second. Each is written to a temporary file, forced to
disk and renamed. The checkpoint exists once the pairs of all ranks are complete and agree on step, seed and ranks. Until
then, or if anything of it cannot be read, the previous checkpoint counts. No rank waits for another.

A rank that holds a piece of a tensor writes it under the name of the whole, with its position
(`parsim.execute.checkpoint.fragments`). Reading assembles the whole, so any plan of the model can resume from any other's
checkpoint.

Leaves out: the position in the data, which needs no state but step and seed (`parsim.data.BatchOrder`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from parsim.errors import ExecutionError
from parsim.files import PARTIAL, parse_json, read_regular, version_problem, write_atomically, write_problem
from parsim.model.optimizers import COUNTERS, HOST_COUNTERS

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from parsim.execute.checkpoint.fragments import Fragment


_SHARED = ("weights", "buffers", "optimizer", "progress")
_SECTIONS = (*_SHARED, "rng", "own")
_UNNAMED = ("progress", "rng", "own")
"""Sections whose names are no parameters or buffers."""


# What a rank's part of a checkpoint holds: the JSON beside its tensors. Its digest covers every byte of the file, so no damaged
# manifest is read: neither half a name nor another step.


SCHEMA_VERSION = 3
LARGEST_BYTES = 256 * 2**20
MOST_RANKS = 2**20
LARGEST = 2**62
_DIGEST = "digest"

Section = Annotated[str, Field(pattern="^(weights|buffers|optimizer|progress|rng|own)$")]
CountInFile = Annotated[int, Field(strict=True, ge=0, lt=LARGEST)]
RankInFile = Annotated[int, Field(strict=True, ge=0, lt=MOST_RANKS)]
RankCount = Annotated[int, Field(strict=True, ge=1, lt=MOST_RANKS)]
CountsInFile = Annotated[tuple[CountInFile, ...], Field(max_length=MOST_RANKS)]
FragmentEntries = tuple[
    Annotated[int, Field(strict=True, ge=0, lt=64)],
    RankCount,
    RankInFile,
    RankCount,
    CountInFile,
    Annotated[int, Field(strict=True, ge=-1, lt=LARGEST)],
    CountsInFile,
    CountsInFile,
    CountInFile,
]
"""A `Fragment` as a list: dim, blocks, shard, ways, start, stop, shape, runs, size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The .json beside a rank's tensors; `writer` tells the files of one attempt of one launch from another's."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    schema_version: int
    step: CountInFile
    seed: Annotated[int, Field(strict=True, ge=-LARGEST, lt=LARGEST)]
    world_size: RankCount
    rank: RankInFile
    writer: str
    size_bytes: CountInFile
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    names: dict[Section, list[str]]
    fragments: dict[Section, dict[str, FragmentEntries]] = field(default_factory=dict)

    @property
    def checkpoint(self) -> tuple[str, int, int, int]:
        return self.writer, self.world_size, self.step, self.seed


@cache
def _reader() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def manifest_text(manifest: Manifest) -> str:
    return _with_digest(asdict(manifest))


def _with_digest(document: dict[str, Any]) -> str:
    body = json.dumps(document)
    return json.dumps({**document, _DIGEST: hashlib.sha256(body.encode()).hexdigest()})


def read_manifest(path: Path) -> Manifest:
    """The manifest of a file. Raises OSError or ValueError: it cannot be read, another version of parsim wrote it, it is
    damaged, or holds what no manifest holds."""
    content = read_regular(path, LARGEST_BYTES)
    document = parse_json(content)
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    document.pop(_DIGEST, None)
    if content != _with_digest(document).encode():
        raise ValueError("its digest is not that of its content")
    if problem := version_problem(document, SCHEMA_VERSION):
        raise ValueError(problem)
    try:
        return _reader().validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Tensors by global name: what one rank contributes to a checkpoint, and what it takes from one.

    Replicas hold the same weights and optimizer state: it is enough that one of them contributes these. Where they mix in
    rounds they do not; then these are the mean weights and the first replica's state, and `own` has the rest. Buffers (running
    statistics) differ between replicas, and random states between ranks: every rank contributes its own.

    Attributes:
        optimizer: parameter name to its state, e.g. {"momentum_buffer": Tensor}. rng: "cpu", "cuda".
        progress: what training has learnt beside the weights and is the same on every rank: "loss_scale" with fp16.
        own: what only the rank that wrote it can go on with: of replicas that mix in rounds, their own weights and state.
        fragments: by section ("weights", "buffers", "optimizer") and name, which part of the whole it is, where not all.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rng: Mapping[str, Tensor] = field(default_factory=dict)
    fragments: Mapping[str, Mapping[str, Fragment]] = field(default_factory=dict)
    progress: Mapping[str, Tensor] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint: training goes on with step `step` (that many steps are done)."""

    folder: Path
    step: int
    seed: int
    world_size: int


def save_checkpoint(folder: Path, step: int, state: RankState, *, seed: int, rank: int, world_size: int, keep: int = 2) -> Path:
    """Write this rank's part of the checkpoint after `step` steps into a folder of `folder`, which is returned. Every rank
    calls it with the same `step`. Rank 0 then removes what is older than the `keep` newest complete checkpoints. Raises
    ExecutionError: the files cannot be written (a full disk, no permission, a folder that is gone)."""
    import torch

    place = folder / f"step-{step:08d}"
    tensors_path, manifest_path = _paths(place, rank)
    sections = [section for section in _SECTIONS if section != "own" or state.own]
    content = {section: _plain(getattr(state, section)) for section in sections}
    try:
        place.mkdir(parents=True, exist_ok=True)
        manifest_path.unlink(missing_ok=True)
        write_atomically(tensors_path, lambda file: torch.save(content, file), force=True)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            step=step,
            seed=seed,
            world_size=world_size,
            rank=rank,
            writer=f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            size_bytes=tensors_path.stat().st_size,
            sha256=_digest(tensors_path),
            names={section: list(names) for section, names in content.items()},
            fragments={section: dict(parts) for section, parts in state.fragments.items()},
        )
        write_atomically(manifest_path, lambda file: file.write(manifest_text(manifest).encode()), force=True)
        if rank == 0:
            complete = [step_of(other) for other in step_folders(folder) if _inspect(other, digests=False)[1] is None]
            if len(complete) > keep:
                oldest = complete[-max(keep, 1)]
                keep_only(folder, [number for number in map(step_of, step_folders(folder)) if number >= oldest])
    except (OSError, RuntimeError) as error:
        raise ExecutionError(f"rank {rank} cannot write its checkpoint to {place}: {write_problem(error, folder)}") from error
    return place


def latest_checkpoint(folder: Path, *, digests: bool = True) -> Checkpoint | None:
    """The newest complete and undamaged checkpoint of a folder, or None; warns about each newer one it skips. digests: of all
    that it holds are compared, which reads all of it."""
    return next(checkpoints(folder, digests=digests), None)


def checkpoints(folder: Path, *, digests: bool = True) -> Iterator[Checkpoint]:
    """All complete and undamaged checkpoints, the newest first; see `latest_checkpoint`."""
    for place in reversed(step_folders(folder)):
        manifests, problem = _inspect(place, digests=digests)
        if problem is None:
            yield _checkpoint(place, manifests)
        else:
            warnings.warn(f"checkpoint {place} is not used: {problem}", stacklevel=3)


def checkpoint_at(folder: Path, step: int) -> Checkpoint:
    """The checkpoint after `step` steps. Raises ExecutionError if it is not there, incomplete or damaged."""
    place = folder / f"step-{step:08d}"
    manifests, problem = _inspect(place, digests=True)
    if problem is not None:
        raise ExecutionError(f"checkpoint {place} is not used: {problem}")
    return _checkpoint(place, manifests)


def _checkpoint(place: Path, manifests: Sequence[Manifest]) -> Checkpoint:
    first = manifests[0]
    return Checkpoint(folder=place, step=first.step, seed=first.seed, world_size=first.world_size)


def discard_unfinished(folder: Path) -> list[Path]:
    """Remove what ranks that have ended left half written, or half removed: files that were not renamed, and checkpoints that
    lack a part, which are returned. Those that are complete and damaged stay, for whoever wants to look. No rank may write into
    the folder meanwhile."""
    removed = []
    for path in folder.glob(f"*/.*{PARTIAL}"):
        with contextlib.suppress(OSError):
            path.unlink()
    for place in reversed(step_folders(folder)):
        is_empty = not any(path.is_file() for path in place.glob("rank-*.json"))
        problem = _inspect(place, digests=False)[1]
        if problem is not None and (is_empty or problem.endswith(UNFINISHED)):
            shutil.rmtree(place, ignore_errors=True)
            removed.append(place)
    return removed


def has_checkpoints(folder: Path) -> bool:
    return bool(step_folders(folder))


def load_state(checkpoint: Checkpoint, names: Iterable[str] | None = None, *, rank: int | None = None) -> RankState:
    """The weights, buffers and optimizer state of `names` (all if left out), wherever ranks wrote them, on the CPU.

    Files are mapped into memory. A weight, or the state of a parameter, is read and put together when it is asked for, so that
    whoever takes one after the other needs memory for one. Keep what is needed twice.

    rank: under the same plan, this rank's number, whose own buffers and random state come first. Under another plan leave it
    out: buffers are then those of the lowest rank that has them, and there is no random state.

    Raises ExecutionError: a name that no rank wrote as weight or buffer, or a file that has been damaged since. Parts that do
    not fit together raise it when they are asked for.
    """
    import torch

    from parsim.execute.checkpoint.fragments import WHOLE, fragment_from, join, join_state

    def joined_state(name: str, parts: dict[Fragment, Any]) -> dict[str, Any]:
        """In memory of its own: an optimizer keeps the arrays, and changes them in place."""
        state = join_state(name, parts)
        return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}

    manifests, problem = _inspect(checkpoint.folder, digests=False)
    if problem is not None:
        raise ExecutionError(f"checkpoint {checkpoint.folder} cannot be read: {problem}; resume from an older one")
    chosen = None if names is None else set(names)
    parts: dict[str, dict[str, dict[Fragment, Any]]] = {section: {} for section in _SECTIONS}
    for manifest in sorted(manifests, key=lambda manifest: (manifest.rank != rank, manifest.rank)):
        missing: list[tuple[str, str, Fragment]] = []
        for section in _SECTIONS if manifest.rank == rank else _SHARED:
            for name in manifest.names.get(section, ()):
                entries = manifest.fragments.get(section, {}).get(name)
                fragment = WHOLE if entries is None else fragment_from(entries)
                if fragment not in parts[section].get(name, {}) and (section in _UNNAMED or chosen is None or name in chosen):
                    missing.append((section, name, fragment))
        if not missing:
            continue
        path = _paths(checkpoint.folder, manifest.rank)[0]
        try:
            content = _read(path)
        except Exception as error:  # a damaged file can raise anything
            raise ExecutionError(
                f"{path} is damaged or holds more than tensors ({type(error).__name__}); resume from an older checkpoint"
            ) from error
        try:
            for section, name, fragment in missing:
                parts[section].setdefault(name, {})[fragment] = content[section][name]
        except (KeyError, TypeError, IndexError) as error:
            raise ExecutionError(f"{path} does not hold what its manifest lists; resume from an older checkpoint") from error
    absent = sorted((chosen or set()) - parts["weights"].keys() - parts["buffers"].keys())
    if absent:
        raise ExecutionError(
            f"checkpoint {checkpoint.folder} holds no {absent[0]!r} ({len(absent)} names are missing); "
            "it was written by another model: resume with that model, or start again"
        )
    with _fitting(checkpoint):
        return RankState(
            weights=_Joined(checkpoint, parts["weights"], join),
            buffers={name: join(name, fragments) for name, fragments in parts["buffers"].items()},
            optimizer=_Joined(checkpoint, parts["optimizer"], joined_state),
            **{section: {name: fragments[WHOLE] for name, fragments in parts[section].items()} for section in _UNNAMED},
        )


@contextlib.contextmanager
def _fitting(checkpoint: Checkpoint) -> Iterator[None]:
    """Around the joining of parts: what is wrong with them is an ExecutionError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ExecutionError(
            f"the parts of checkpoint {checkpoint.folder} do not fit together ({error}); resume from an older checkpoint"
        ) from error


T = TypeVar("T")


class _Joined(Mapping[str, T]):
    """By name what the parts of a checkpoint make together, put together anew whenever it is asked for."""

    def __init__(
        self, checkpoint: Checkpoint, parts: Mapping[str, dict[Fragment, Any]], join: Callable[[str, dict[Fragment, Any]], T]
    ) -> None:
        self._checkpoint, self._parts, self._join = checkpoint, parts, join

    def __getitem__(self, name: str) -> T:
        parts = self._parts[name]
        with _fitting(self._checkpoint):
            return self._join(name, parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _read(path: Path) -> dict[str, Any]:
    """The tensors of one rank: mapped into memory, or read where the file system cannot map files."""
    import torch

    try:
        mapped: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError):
        mapped = torch.load(path, map_location="cpu", weights_only=True)
    return mapped


def restore_optimizer(optimizer: Optimizer, parameters: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Any]]) -> None:
    """Load the states of an optimizer's parameters, by name. Its hyperparameters stay; devices and dtypes follow those.

    Counters keep their dtype: torch takes NAdam's product to that of the parameter, and another training would follow. It takes
    that product to a GPU, too, where every later update would wait for the device to read it: it stays on the host.
    """
    import torch

    names = {id(value): name for name, value in parameters.items()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    document = optimizer.state_dict()
    document["state"] = {
        number: dict(state[names[id(parameter)]])
        for number, parameter in enumerate(ordered)
        if names.get(id(parameter)) in state
    }
    optimizer.load_state_dict(document)
    for number, saved in document["state"].items():
        loaded = optimizer.state[ordered[number]]
        for key in loaded.keys() & set(COUNTERS):
            place = torch.device("cpu") if key in HOST_COUNTERS else loaded[key].device
            if (loaded[key].dtype, loaded[key].device) != (saved[key].dtype, place):
                loaded[key] = saved[key].to(place)


def rng_state(device: str = "cpu") -> dict[str, Tensor]:
    """torch's random states of this process: of the CPU, and of `device` if that is a GPU ("cuda:0")."""
    import torch

    states = {"cpu": torch.get_rng_state()}
    if device.startswith("cuda"):
        states["cuda"] = torch.cuda.get_rng_state(torch.device(device))
    return states


def restore_rng(states: Mapping[str, Tensor], device: str = "cpu") -> None:
    """Inverse of `rng_state`; a missing state leaves its generator as it is."""
    import torch

    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.startswith("cuda"):
        torch.cuda.set_rng_state(states["cuda"], torch.device(device))


def restore_tensors(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into live parameters or buffers of the same names, in place. Raises ExecutionError: a live name is not
    saved, or has another shape."""
    import torch

    for name, value in live.items():
        if name not in saved:
            raise ExecutionError(f"the checkpoint holds no {name!r}; it was written by another model")
        check_shape(name, saved[name], value)
    with torch.no_grad():
        for name, value in live.items():
            value.copy_(saved[name])


def restore_one_by_one(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """`restore_tensors` for the names that are saved, such as those of `load_state`, each of which is read in its turn."""
    for name, value in live.items():
        if name in saved:
            restore_tensors({name: value}, {name: saved[name]})


def check_shape(name: str, saved: Tensor, live: Tensor) -> None:
    """Raise ExecutionError where the two tensors of a name differ in shape."""
    if saved.shape != live.shape:
        raise ExecutionError(
            f"{name!r} has shape {tuple(saved.shape)} in the checkpoint and {tuple(live.shape)} in the model; "
            "resume with the model that wrote it"
        )


def not_finite(state: RankState, trained: Collection[str]) -> str:
    """The first tensor with a NaN or an infinity, in words; "" if there is none. Weights that are not `trained`, and buffers,
    may hold infinities (a mask), which are no sign of divergence."""
    import torch

    for name, weight in state.weights.items():
        if name in trained and not bool(torch.isfinite(weight).all()):
            return f"weight {name!r} is not finite"
    for name, entries in state.optimizer.items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and not bool(torch.isfinite(value).all()):
                return f"the optimizer's {key} of {name!r} is not finite"
    for name, buffer in state.buffers.items():
        if buffer.is_floating_point() and bool(torch.isnan(buffer).any()):
            return f"buffer {name!r} holds NaN"
    return ""


def _paths(place: Path, rank: int) -> tuple[Path, Path]:
    return place / f"rank-{rank:04d}.pt", place / f"rank-{rank:04d}.json"


def _plain(value: Any) -> Any:
    """Plain dicts of CPU copies: a view saved as it is would carry the whole flat buffer it looks into."""
    import torch

    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_NAME = re.compile(r"step-([0-9]{1,18})")
UNFINISHED = "has not finished writing it"


def step_of(place: Path) -> int:
    """From the folder's name; -1 for another folder."""
    match = _NAME.fullmatch(place.name)
    return int(match[1]) if match else -1


def step_folders(folder: Path) -> list[Path]:
    """Checkpoint folders, complete or not, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((place for place in folder.iterdir() if step_of(place) >= 0 and place.is_dir()), key=step_of)


def _inspect(place: Path, *, digests: bool) -> tuple[Sequence[Manifest], str | None]:
    entries: list[Manifest] = []
    for path in sorted(place.glob("rank-*.json")):
        try:
            entries.append(read_manifest(path))
        except (OSError, ValueError) as error:
            return [], f"{path.name} cannot be read ({error})"
        if path != _paths(place, entries[-1].rank)[1]:
            return [], f"{path.name} is of rank {entries[-1].rank}"
    if not entries:
        return [], f"no rank {UNFINISHED.replace('not ', '')}"
    first = entries[0]
    if first.step != step_of(place):
        return [], f"it holds step {first.step}"
    entries = [entry for entry in entries if (entry.writer, entry.world_size) == (first.writer, first.world_size)]
    if len(entries) != first.world_size:
        absent = next(rank for rank in range(first.world_size) if rank not in {entry.rank for entry in entries})
        return [], f"rank {absent} of {first.world_size} {UNFINISHED}"
    other = [entry for entry in entries if entry.checkpoint != first.checkpoint]
    if other:
        return [], f"ranks {first.rank} and {other[0].rank} disagree on step or seed"
    for entry in entries:
        path = _paths(place, entry.rank)[0]
        try:
            size = path.stat().st_size if path.is_file() else 0
            if size != entry.size_bytes:
                return [], f"{path.name} has {size:,} bytes of {entry.size_bytes:,}"
            if digests and _digest(path) != entry.sha256:
                return [], f"{path.name} is damaged (its digest has changed)"
        except OSError as error:
            return [], f"{path.name} cannot be read ({error})"
    return entries, None


UNUSED = "unused-"
"""What the name of a checkpoint begins with that no training goes on from."""


def set_aside_newer(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints of later steps, which could not be read when a training went on from this one: their new places.
    Else they would count among those that are kept, and one that can be read again would bring back another training. No rank
    may write into the folder meanwhile."""
    moved = []
    for place in step_folders(folder):
        if step_of(place) > step:
            unused = place.with_name(f"{UNUSED}{place.name}")
            shutil.rmtree(unused, ignore_errors=True)
            with contextlib.suppress(OSError):
                moved.append(place.rename(unused))
    return moved


def keep_only(folder: Path, steps: Collection[int]) -> None:
    """Remove the checkpoints of all other steps: manifests first, so that half of one never counts."""
    for place in step_folders(folder):
        if step_of(place) not in steps:
            for path in place.glob("rank-*.json"):
                with contextlib.suppress(OSError):
                    path.unlink()
            shutil.rmtree(place, ignore_errors=True)
