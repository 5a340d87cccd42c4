"""`parsim calibrate`: measure this machine and write its hardware profile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from parsim.app.calibration import DEFAULT_BATCHES, calibration_request, measure_machine, new_profile
from parsim.app.config_text import parse_numbers
from parsim.app.doctor import examine, progress, sentence, tables
from parsim.commands.output import AllowCode, JsonFlag, Overrides, tell
from parsim.errors import ConfigError, near_matches
from parsim.hardware.parts import instance_named, instance_names, refresh, shipped_gpus, shipped_links, shipped_networks
from parsim.hardware.profile import shipped_profiles
from parsim.hardware.speed_factor import speed_since
from parsim.model.catalogue.names import described, known_names, normalised
from parsim.report.tables import calibration_table, instance_table, models_table

if TYPE_CHECKING:
    from parsim.hardware.profile import Profile


def calibrate(
    out: Annotated[
        Path | None, typer.Option(metavar="PROFILE.json", help="The profile to write. Raw measurements are kept beside it.")
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN.toml]...", help="Run files whose models, batches and optimizers are measured."),
    ] = None,
    models: Annotated[list[str] | None, typer.Option("--model", help="Measure this built-in model. Repeatable.")] = None,
    batches: Annotated[str | None, typer.Option(help="Samples per rank to measure every --model at, e.g. 1,4,16.")] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="CPU cores with gloo, or GPUs with NCCL.")] = "cpu",
    nproc: Annotated[int | None, typer.Option(help="Processes that measure together. Default: one per GPU or core.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="fp32 (IEEE); on GPUs also tf32, amp_bf16, amp_fp16, bf16. Default: as in the files, else fp32."),
    ] = None,
    optimizers: Annotated[list[str] | None, typer.Option("--optimizer", help="Measure this optimizer too. Repeatable.")] = None,
    collectives: Annotated[
        list[str] | None, typer.Option("--collective", help="Measure a collective of your own, package.module:ROW. Repeatable.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer rounds and sizes; intervals get wider.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the stopped calibration of --out; fail if there is none.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start again; discard what a stopped calibration of --out measured.")
    ] = False,
    refit: Annotated[
        Path | None,
        typer.Option(metavar="PROFILE.json", help="Fit this profile again from its raw measurements; measure nothing."),
    ] = None,
    refresh: Annotated[
        Path | None,
        typer.Option(metavar="PROFILE.json", help="Measure the current speed of the cores for 20 s, and scale all prices."),
    ] = None,
    overrides: Overrides = None,
    allow_code: AllowCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure components, optimizer steps and collectives of this machine.

    A calibration that was stopped continues when the same command is given again.
    """
    from calibration.rounds.calibrate import refit as fit_again
    from calibration.rounds.refresh import refresh as measure_speed
    from calibration.rounds.refresh import refreshed_text
    from parsim.app.question import question_from_file

    if refresh is not None:
        if out is not None or files or models or refit is not None:
            raise typer.BadParameter("--refresh measures only the machine's speed: give only the profile")
        with progress(f"Measuring the speed of the cores for {refresh}"):
            profile = measure_speed(refresh)
        document = {"profile": str(refresh), "slowness": speed_since(profile).mean, "text": refreshed_text(profile)}
        tell(as_json, document, f"{refresh}: {refreshed_text(profile)}")
        return
    if refit is not None:
        if out is not None or files or models:
            raise typer.BadParameter("--refit measures nothing: give only the profile, which it writes again")
        with progress(f"Fitting {refit} again") as say:
            _show(fit_again(refit, on_line=say), refit, as_json)
        return
    if out is None:
        raise typer.BadParameter("give the profile to write: --out PROFILE.json")
    if resume and restart:
        raise typer.BadParameter("--resume continues a stopped calibration and --restart discards it; choose one")
    if not files and not models:
        raise typer.BadParameter("name what to measure: a RUN.toml, or --model with --batches")
    request = calibration_request(
        [question_from_file(file, overrides or []) for file in files or []],
        models or [],
        batches=parse_numbers("--batches", batches) if batches else DEFAULT_BATCHES,
        optimizers=optimizers or [],
        device=device,
        nproc=nproc,
        precision=precision,
        quick=quick,
        collectives=collectives or [],
    )
    profile = measure_machine(request, out, leftover="require" if resume else "discard" if restart else "use")
    _show(profile, out, as_json)


def _show(profile: Profile, out: Path, as_json: bool) -> None:
    warnings = profile.provenance.warnings
    points = {
        "components": len(profile.compute.components),
        "optimizers": len(profile.compute.optimizers),
        "collectives": len(profile.communication.points),
    }
    document = {"profile": str(out), "name": profile.name, "points": points, "warnings": warnings}
    lines = [f'Profile: {out}; use it with cluster.profile = "{out}"']
    lines += [f"{len(warnings)} warnings are in its provenance; docs/calibration.md explains them"] if warnings else []
    tell(as_json, document, calibration_table(profile), *lines)


# `parsim profile`: machines made of parts. `new` writes a short commented profile; `list` shows what there is.


def profile(
    action: Annotated[
        str,
        typer.Argument(metavar="new|list|prices", help="Write a profile made of parts, list the parts, or clouds' instances."),
    ],
    gpu: Annotated[str | None, typer.Option(metavar="GPU", help="A GPU by name (h100-sxm) or path.")] = None,
    count: Annotated[int | None, typer.Option(min=1, metavar="N", help="GPUs per node.")] = None,
    link: Annotated[str | None, typer.Option(metavar="LINK", help="Link between GPUs of a node, by name or path.")] = None,
    network: Annotated[str | None, typer.Option(metavar="NETWORK", help="Network between nodes.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="File to write. Default: GPU.toml in this folder.")
    ] = None,
    refreshed: Annotated[
        bool, typer.Option("--refresh", help="With prices: ask gpuhunt's catalogue for newer ones first, and keep them.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a commented profile made of parts (`new`), or list parts (`list`) or instance types with prices (`prices`)."""
    if refreshed and action != "prices":
        raise ConfigError(f"--refresh belongs to `parsim profile prices`, not to `parsim profile {action}`")
    if action == "prices":
        if refreshed:
            print(f"{refresh()} prices refreshed", file=sys.stderr)
        rented = {name: found.to_dict() for name in instance_names() if (found := instance_named(name)) is not None}
        tell(as_json, rented, instance_table(rented))
        return
    if action == "list":
        document = {
            "gpus": shipped_gpus(),
            "links": shipped_links(),
            "networks": shipped_networks(),
            "profiles": shipped_profiles(),
        }
        tell(as_json, document, *(f"{kind}: {', '.join(names)}" for kind, names in document.items()))
        return
    if action != "new":
        raise ConfigError(
            f"parsim profile {action}: unknown; use `parsim profile new --gpu h100-sxm`, `parsim profile list` or "
            "`parsim profile prices`"
        )
    if gpu is None:
        raise ConfigError("parsim profile new needs --gpu, for example --gpu h100-sxm; `parsim profile list` shows the names")
    written = new_profile(gpu, count=count, link=link, network=network, out=out)
    tell(as_json, written, f'Profile: {written["path"]}; use it with cluster.profile = "{written["path"]}"')


# `parsim models`: every model by name, with its size.


def models(
    word: Annotated[str, typer.Argument(metavar="[WORD]", help="Only names with this in them, or a Hugging Face id.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """List the models by name with their sizes; their ids on Hugging Face (meta-llama/Llama-3.1-8B) are names as well."""
    rows = {name: row for name, row in described().items() if word.lower() in name or normalised(word) == name}
    if not rows:
        raise ConfigError(f"no model by name has {word!r}{near_matches(normalised(word), known_names())}")
    tell(as_json, rows, models_table(rows))


# `parsim doctor`: what this machine has, what will work, what is missing and how to get it.


def doctor(as_json: JsonFlag = False) -> None:
    """Check this machine: hardware and packages, which commands work here, and how to get what is missing."""
    with progress("Examining this machine"):
        findings = examine()
    tell(as_json, findings, f"{sentence(findings)}\n", *tables(findings))
