"""Checkpoints that a killed process cannot spoil, and that another plan can resume.

A checkpoint is a folder `step-00000020/` with two files per rank. `rank-0000.pt` holds its tensors by *global* name (the
qualified parameter or buffer name, whatever the plan). `rank-0000.json` holds their size and digest and is written
second. Each is written to a temporary file, forced to disk and renamed. The checkpoint exists once the pairs of all ranks
are complete and agree. Until then, or if one is damaged, the previous checkpoint counts. No rank waits for another.

A rank that holds a piece of a tensor writes it under the name of the whole, with its position
(`parsim.execute.state.fragments`). Reading assembles the whole, so any plan of the model can resume from any other's
checkpoint.

Leaves out: the position in the data, which needs no state but step and seed (`parsim.data.BatchOrder`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from parsim.errors import ExecutionError
from parsim.files import parse_json, version_problem

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from parsim.execute.state.fragments import Fragment

SCHEMA_VERSION = 2
_SECTIONS = ("weights", "buffers", "optimizer", "progress", "rng")
_UNNAMED = ("progress", "rng")
"""Sections whose names are no parameters or buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Tensors by global name: what one rank contributes to a checkpoint, and what it takes from one.

    Replicas hold the same weights and optimizer state: it is enough that one of them contributes these. Buffers (running
    statistics) differ between replicas, and random states between ranks: every rank contributes its own.

    Attributes:
        optimizer: parameter name to its state, e.g. {"momentum_buffer": Tensor}. rng: "cpu", "cuda".
        progress: what training has learnt beside the weights and is the same on every rank: "loss_scale" with fp16.
        fragments: by section ("weights", "buffers", "optimizer") and name, which part of the whole it is, where not all.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rng: Mapping[str, Tensor] = field(default_factory=dict)
    fragments: Mapping[str, Mapping[str, Fragment]] = field(default_factory=dict)
    progress: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint: training goes on with step `step` (that many steps are done)."""

    folder: Path
    step: int
    seed: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """The .json beside a rank's tensors; `writer` tells the files of one attempt of one launch from another's."""

    schema_version: int
    step: int
    seed: int
    world_size: int
    rank: int
    writer: str
    size_bytes: int
    sha256: str
    names: dict[str, list[str]]
    fragments: dict[str, dict[str, list[Any]]] = field(default_factory=dict)


def save_checkpoint(folder: Path, step: int, state: RankState, *, seed: int, rank: int, world_size: int, keep: int = 2) -> Path:
    """Write this rank's part of the checkpoint after `step` steps; every rank calls it with the same `step`.

    Rank 0 then removes checkpoints older than the `keep` newest complete ones.

    Args:
        folder: of all checkpoints. step: steps done. state: this rank's tensors.
        seed: of the run. rank, world_size: of this process. keep: complete checkpoints that stay.

    Returns:
        The checkpoint's folder.

    Raises:
        ExecutionError: the files cannot be written (a full disk, no permission).
    """
    import torch

    place = folder / f"step-{step:08d}"
    tensors_path, entry_path = _paths(place, rank)
    content = {section: _plain(getattr(state, section)) for section in _SECTIONS}
    try:
        place.mkdir(parents=True, exist_ok=True)
        entry_path.unlink(missing_ok=True)
        write_atomically(tensors_path, lambda file: torch.save(content, file))
        entry = _Entry(
            schema_version=SCHEMA_VERSION,
            step=step,
            seed=seed,
            world_size=world_size,
            rank=rank,
            writer=_writer(),
            size_bytes=tensors_path.stat().st_size,
            sha256=_digest(tensors_path),
            names={section: list(content[section]) for section in _SECTIONS},
            fragments={
                section: {name: list(part) for name, part in parts.items()} for section, parts in state.fragments.items()
            },
        )
        write_atomically(entry_path, lambda file: file.write(json.dumps(asdict(entry)).encode()))
        if rank == 0:
            _prune(folder, keep)
    except (OSError, RuntimeError) as error:
        raise ExecutionError(f"rank {rank} cannot write its checkpoint to {place}: {error}; is the disk full?") from error
    return place


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest complete and undamaged checkpoint, or None; warns about each newer one it skips.

    Args:
        folder: of all checkpoints.

    Raises:
        ExecutionError: a checkpoint of another version of parsim; starting anew would discard it.
    """
    for place in reversed(_steps(folder)):
        entries, problem = _inspect(place, digests=True)
        if problem is None:
            first = entries[0]
            return Checkpoint(folder=place, step=first.step, seed=first.seed, world_size=first.world_size)
        warnings.warn(f"checkpoint {place} is not used: {problem}", stacklevel=2)
    return None


def load_state(checkpoint: Checkpoint, names: Iterable[str] | None = None, *, rank: int | None = None) -> RankState:
    """The weights, buffers and optimizer state of `names` (all if left out), wherever ranks wrote them, on the CPU.

    Args:
        checkpoint: of `latest_checkpoint`. names: of parameters and buffers. rank: under the same plan, this rank's
            number, whose own buffers and random state come first. Under another plan leave it out: buffers are then those
            of the lowest rank that has them, and there is no random state.

    Raises:
        ExecutionError: a name that no rank wrote as weight or buffer, or a file that has been damaged since.
    """
    import torch

    from parsim.execute.state.fragments import WHOLE, Fragment, join, join_state

    entries, problem = _inspect(checkpoint.folder, digests=False)
    if problem is not None:
        raise ExecutionError(f"checkpoint {checkpoint.folder} cannot be read: {problem}; resume from an older one")
    wanted = None if names is None else set(names)
    found: dict[str, dict[str, dict[Fragment, Any]]] = {section: {} for section in _SECTIONS}
    for entry in sorted(entries, key=lambda entry: (entry.rank != rank, entry.rank)):
        missing: list[tuple[str, str, Fragment]] = []
        for section in _SECTIONS if entry.rank == rank else _SECTIONS[:-1]:
            for name in entry.names.get(section, ()):  # checkpoints of before have no progress
                given = entry.fragments.get(section, {}).get(name)
                part = WHOLE if given is None else Fragment(*given[:6], *map(tuple, given[6:]))
                if part not in found[section].get(name, {}) and (section in _UNNAMED or wanted is None or name in wanted):
                    missing.append((section, name, part))
        if not missing:
            continue
        path = _paths(checkpoint.folder, entry.rank)[0]
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file can raise anything
            raise ExecutionError(
                f"{path} is damaged or holds more than tensors ({type(error).__name__}); resume from an older checkpoint"
            ) from error
        for section, name, part in missing:
            found[section].setdefault(name, {})[part] = content[section][name]
    absent = sorted((wanted or set()) - found["weights"].keys() - found["buffers"].keys())
    if absent:
        raise ExecutionError(
            f"checkpoint {checkpoint.folder} holds no {absent[0]!r} ({len(absent)} names are missing); "
            "it was written by another model: resume with that model, or start anew"
        )
    return RankState(
        weights={name: join(name, parts) for name, parts in found["weights"].items()},
        buffers={name: join(name, parts) for name, parts in found["buffers"].items()},
        optimizer={name: join_state(name, parts) for name, parts in found["optimizer"].items()},
        rng={name: parts[WHOLE] for name, parts in found["rng"].items()},
        progress={name: parts[WHOLE] for name, parts in found["progress"].items()},
    )


def optimizer_state(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name; parameters without a step are left out.

    Args:
        optimizer: of this rank. parameters: by name.
    """
    return {name: dict(optimizer.state[value]) for name, value in parameters.items() if optimizer.state.get(value)}


def restore_optimizer(optimizer: Optimizer, parameters: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Any]]) -> None:
    """Load the state of an optimizer's parameters. Its own hyperparameters stay; devices and dtypes follow the parameters.

    Args:
        optimizer: of this rank. parameters: by name. state: by parameter name.
    """
    names = {id(value): name for name, value in parameters.items()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    document = optimizer.state_dict()
    document["state"] = {
        number: dict(state[names[id(parameter)]])
        for number, parameter in enumerate(ordered)
        if names.get(id(parameter)) in state
    }
    optimizer.load_state_dict(document)


def rng_state(device: str = "cpu") -> dict[str, Tensor]:
    """torch's random states of this process: of the CPU, and of `device` if that is a GPU.

    Args:
        device: such as "cpu" or "cuda:0".
    """
    import torch

    states = {"cpu": torch.get_rng_state()}
    if device.startswith("cuda"):
        states["cuda"] = torch.cuda.get_rng_state(torch.device(device))
    return states


def restore_rng(states: Mapping[str, Tensor], device: str = "cpu") -> None:
    """Inverse of `rng_state`; a missing state leaves its generator as it is.

    Args:
        states: by "cpu" and "cuda". device: such as "cpu" or "cuda:0".
    """
    import torch

    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.startswith("cuda"):
        torch.cuda.set_rng_state(states["cuda"], torch.device(device))


def restore_tensors(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into live parameters or buffers of the same names, in place.

    Args:
        live, saved: by name.

    Raises:
        ExecutionError: a live name is not saved, or has another shape.
    """
    import torch

    for name, value in live.items():
        if name not in saved:
            raise ExecutionError(f"the checkpoint holds no {name!r}; it was written by another model")
        check_shape(name, saved[name], value)
    with torch.no_grad():
        for name, value in live.items():
            value.copy_(saved[name])


def check_shape(name: str, saved: Tensor, live: Tensor) -> None:
    """Check that both tensors of a name have the same shape.

    Args:
        name: for the message. saved, live: the tensors.

    Raises:
        ExecutionError: the shapes differ.
    """
    if saved.shape != live.shape:
        raise ExecutionError(
            f"{name!r} has shape {tuple(saved.shape)} in the checkpoint and {tuple(live.shape)} in the model; "
            "resume with the model that wrote it"
        )


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file whole or not at all: write a temporary file next to `path`, force it to disk and rename it.

    Args:
        path: of the file. write: called with the open temporary file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _paths(place: Path, rank: int) -> tuple[Path, Path]:
    return place / f"rank-{rank:04d}.pt", place / f"rank-{rank:04d}.json"


def _plain(value: Any) -> Any:
    """Plain dicts of CPU copies: a view saved as it is would carry the whole flat buffer it looks into."""
    import torch

    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _writer() -> str:
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _steps(folder: Path) -> list[Path]:
    """Checkpoint folders, complete or not, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(place for place in folder.iterdir() if place.is_dir() and place.name.removeprefix("step-").isdigit())


def _inspect(place: Path, *, digests: bool) -> tuple[Sequence[_Entry], str | None]:
    """The entries of all ranks, and what is wrong with the checkpoint (None: nothing). Raises as `latest_checkpoint`."""
    entries: list[_Entry] = []
    for path in sorted(place.glob("rank-*.json")):
        try:
            document = parse_json(path.read_text())
            if "schema_version" in document and (problem := version_problem(document, SCHEMA_VERSION)):
                raise ExecutionError(f"checkpoint {place}: {problem}; or train anew in another folder")
            entries.append(_Entry(**document))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            return [], f"{path.name} cannot be read ({error})"
    if not entries:
        return [], "no rank has finished writing it"
    first = entries[0]
    entries = [entry for entry in entries if (entry.writer, entry.world_size) == (first.writer, first.world_size)]
    absent = sorted(set(range(first.world_size)) - {entry.rank for entry in entries})
    if absent:
        return [], f"rank {absent[0]} of {first.world_size} has not finished writing it"
    for entry in entries:
        path = _paths(place, entry.rank)[0]
        if not path.is_file() or path.stat().st_size != entry.size_bytes:
            size = path.stat().st_size if path.is_file() else 0
            return [], f"{path.name} has {size:,} bytes of {entry.size_bytes:,}"
        if digests and _digest(path) != entry.sha256:
            return [], f"{path.name} is damaged (its digest has changed)"
    return entries, None


def _prune(folder: Path, keep: int) -> None:
    """Remove what is older than the `keep` newest complete checkpoints, entries first, so that half of one never counts."""
    steps = _steps(folder)
    complete = [place for place in steps if _inspect(place, digests=False)[1] is None]
    if len(complete) <= keep:
        return
    oldest_kept = complete[-max(keep, 1)]
    for place in steps:
        if place < oldest_kept:
            for path in place.glob("rank-*.json"):
                with contextlib.suppress(OSError):
                    path.unlink()
            shutil.rmtree(place, ignore_errors=True)
