"""`parsim calibrate`: measure this machine and write its hardware profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from parsim.commands.output import JsonFlag, Overrides, print_json, print_tables, progress
from parsim.model.spec import ModelSpec
from parsim.workflow.config import RunConfig, load_config, parse_numbers

if TYPE_CHECKING:
    from parsim.hardware.profile import Profile

SMALLEST_SHARE = 64
"""Local batches down to this part of the global batch are measured: a plan cuts its batch into so many parts at most."""
DEFAULT_BATCHES = (1, 4, 16)

CalibrationCase = tuple[ModelSpec, tuple[int, ...]]


def calibrate(
    out: Annotated[
        Path | None, typer.Option(metavar="PROFILE.json", help="The profile to write; raw points go beside it.")
    ] = None,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN.toml]...", help="Measure the models, batches and optimizers of these.")
    ] = None,
    models: Annotated[list[str] | None, typer.Option("--model", help="Measure this model of the zoo; may be repeated.")] = None,
    batches: Annotated[str | None, typer.Option(help="Local batches of every --model, e.g. 1,4,16.")] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="gloo on CPU cores, or NCCL on GPUs.")] = "cpu",
    nproc: Annotated[int | None, typer.Option(help="Ranks that measure at once; left out: one per device or core.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="fp32 (IEEE); on GPUs also tf32, amp_bf16, amp_fp16, bf16. Left out: that of the files, else fp32."),
    ] = None,
    optimizers: Annotated[list[str] | None, typer.Option("--optimizer", help="Measured too; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and sizes: a first look.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Insist on going on with a stopped calibration of --out.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Throw away what a stopped calibration of --out left.")] = False,
    refit: Annotated[
        Path | None, typer.Option(metavar="PROFILE.json", help="Measure nothing: make this profile anew from its raw points.")
    ] = None,
    refresh: Annotated[
        Path | None,
        typer.Option(metavar="PROFILE.json", help="Look for 20 s how fast the cores are by now; all prices follow."),
    ] = None,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure components, optimizer steps and collectives of this machine.

    A calibration that was stopped goes on when the same command is given again.
    """
    from calibration.rounds.calibrate import CalibrationRequest
    from calibration.rounds.calibrate import calibrate as measure
    from calibration.rounds.calibrate import refit as fit_again

    if refresh is not None:
        if out is not None or files or models or refit is not None:
            raise typer.BadParameter("--refresh measures the pace alone: give it the profile and nothing else")
        _refresh(refresh, as_json)
        return
    if refit is not None:
        if out is not None or files or models:
            raise typer.BadParameter("--refit measures nothing: give it the profile alone, which it writes anew")
        with progress(f"Fitting {refit} anew") as say:
            _show(fit_again(refit, on_line=say), refit, as_json)
        return
    if out is None:
        raise typer.BadParameter("say where the profile goes with --out PROFILE.json")
    if resume and restart:
        raise typer.BadParameter("--resume goes on with what is there and --restart throws it away; choose one")
    if not files and not models:
        raise typer.BadParameter("name what to measure: a RUN.toml, or --model with --batches")
    configs = [load_config(file, overrides or []) for file in files or []]
    named = tuple(optimizers or ()) + tuple(config.training.optimizer for config in configs) or ("sgd_momentum",)
    request = CalibrationRequest(
        models=calibration_cases(configs, models or [], parse_numbers("--batches", batches) if batches else DEFAULT_BATCHES),
        device=device,
        nproc=nproc or _ranks(configs, device),
        optimizers=tuple(dict.fromkeys(named)),
        precision=precision or _precision(configs, device),
        quick=quick,
        granularities=tuple(dict.fromkeys(config.model.granularity for config in configs)) or ("block",),
    )
    with progress(f"Calibrating {len(request.models)} model(s) on {request.nproc} {device} rank(s)") as say:
        profile = measure(request, out, on_line=say, leftover="require" if resume else "discard" if restart else "use")
    _show(profile, out, as_json)


def _refresh(path: Path, as_json: bool) -> None:
    from calibration.rounds.refresh import refresh, refreshed_text
    from parsim.hardware.speed_factor import speed_since

    with progress(f"Looking how fast the cores are, for {path}") as say:
        profile = refresh(path, on_line=say)
    if as_json:
        print_json({"profile": str(path), "slowness": speed_since(profile).mean, "text": refreshed_text(profile)})
    else:
        print(f"{path}: {refreshed_text(profile)}")


def _show(profile: Profile, out: Path, as_json: bool) -> None:
    warnings = profile.provenance.warnings
    if as_json:
        print_json({"profile": str(out), "name": profile.name, "points": _points(profile), "warnings": warnings})
        return
    from parsim.report.profile_table import calibration_table

    print_tables([calibration_table(profile)])
    print(f'Profile: {out}; use it with cluster.profile = "{out}"')
    if warnings:
        print(f"{len(warnings)} warnings stand in its provenance; see docs/calibration.md for what they mean")


def calibration_cases(configs: list[RunConfig], models: list[str], batches: tuple[int, ...]) -> tuple[CalibrationCase, ...]:
    """Each model once, with every local batch that one of its plans may use."""
    wanted: dict[ModelSpec, set[int]] = {}
    for config in configs:
        wanted.setdefault(config.model_spec, set()).update(local_batches(config.training.global_batch))
    for name in models:
        wanted.setdefault(ModelSpec(name=name), set()).update(batches)
    return tuple((spec, tuple(sorted(sizes))) for spec, sizes in wanted.items())


def local_batches(global_batch: int) -> set[int]:
    """The global batch and its halves, quarters, ... down to a 64th: replicas and microbatches divide it so."""
    parts = (2**power for power in range(SMALLEST_SHARE.bit_length()))
    return {global_batch // part for part in parts if global_batch % part == 0}


def _precision(configs: list[RunConfig], device: str) -> str:
    """What the files train in on a GPU; a CPU computes in fp32 whatever is simulated.

    Raises: BadParameter where the files differ.
    """
    asked = {config.training.precision for config in configs} if device == "cuda" else set()
    if len(asked) > 1:
        raise typer.BadParameter(
            f"the files train in {' and '.join(sorted(asked))}; a profile is measured in one: choose it with --precision"
        )
    return next(iter(asked), "fp32")


def _ranks(configs: list[RunConfig], device: str) -> int:
    """The most devices a file asks for by number; else one rank per GPU or core."""
    asked = [len(chosen) if isinstance(chosen, list) else chosen for config in configs if (chosen := config.devices)]
    if asked:
        return max(asked)
    if device == "cuda":
        import torch

        return max(1, torch.cuda.device_count())
    from parsim.execute.processes.pinning import available_cores

    return len(available_cores())


def _points(profile: Profile) -> dict[str, int]:
    return {
        "components": len(profile.compute.components),
        "optimizers": len(profile.compute.optimizers),
        "collectives": len(profile.communication.points),
    }
