"""A profile that refers to parts: a short TOML file with comments, which `parsim profile new` writes.

    name = "ours"
    gpu = "h100-sxm"
    count = 8
    link = "nvswitch-4"

    [change]
    memory_bytes = 84.9e9
    source = "nvidia-smi on our nodes, 2026-11-20"

`change` replaces numbers of the GPU's part, and says where the new ones come from. JSON has no comments, hence TOML.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from parsim.errors import ProfileError
from parsim.files import parse_toml, read_text
from parsim.hardware.network import load_network
from parsim.hardware.parts.compose import profile_from_parts
from parsim.hardware.parts.load import load_gpu, load_link
from parsim.hardware.parts.records import GpuPart
from parsim.hardware.profile import Profile, Sourced, SourceEntry, problems_text
from parsim.hardware.record import Count, Positive, ProfileRecord

SUFFIX = ".toml"
MOST_LINES = 60
CHANGED = "changed here"


class OwnNumbers(ProfileRecord):
    """Numbers of one's own in place of the part's; None keeps the part's."""

    memory_bytes: Positive | None = None
    memory_bandwidth_bytes_per_s: Positive | None = None
    context_bytes: Positive | None = None
    peak_flop_per_s: dict[str, Positive] = {}
    busy_power_w: Positive | None = None
    idle_power_w: Positive | None = None
    source: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_source(self) -> OwnNumbers:
        if self.source is None and (self.peak_flop_per_s or self.numbers):
            raise ValueError('change holds numbers without a source; add source = "where they come from"')
        return self

    @property
    def numbers(self) -> dict[str, float]:
        """The single numbers that are given, by key."""
        found = self.model_dump(exclude_none=True, exclude={"peak_flop_per_s", "source"})
        return {key: float(value) for key, value in found.items()}


class PartsFile(ProfileRecord):
    """The whole file; count and link: None for those of the usual machine."""

    name: Annotated[str, Field(min_length=1)]
    gpu: str
    count: Count | None = None
    link: str | None = None
    change: OwnNumbers = OwnNumbers()


def read_parts_file(path: Path) -> Profile:
    """The profile that a TOML file describes by its parts.

    Raises:
        ProfileError: no such file, not TOML, a wrong key (with its path), or an unknown part.
    """
    try:
        document = parse_toml(read_text(path))
    except FileNotFoundError as error:
        raise ProfileError(
            f"no profile file {path}; write one with `parsim profile new --gpu h100-sxm --out {path}`"
        ) from error
    except (OSError, ValueError) as error:
        raise ProfileError(
            f"cannot read profile {path}: {error}; fix it or write it again with `parsim profile new`"
        ) from error
    try:
        found = PartsFile.model_validate(document)
        part = _changed(load_gpu(found.gpu), found.change)
    except ValidationError as error:
        raise ProfileError(f"profile {path} is broken: {problems_text(error)}; fix these") from error
    profile = profile_from_parts(part, found.count, found.link)
    return profile.model_copy(update={"name": found.name})


def _changed(part: GpuPart, change: OwnNumbers) -> GpuPart:
    """The part with the file's own numbers, checked again."""
    if change.source is None:
        return part
    document: dict[str, Any] = part.model_dump()
    document["sources"][CHANGED] = SourceEntry(kind="datasheet", text=change.source).model_dump()
    for key, value in change.numbers.items():
        document[key] = Sourced(value=value, source=CHANGED).model_dump()
    for precision, value in change.peak_flop_per_s.items():
        document["peak_flop_per_s"][precision] = Sourced(value=value, source=CHANGED).model_dump()
    return GpuPart.model_validate(document)


def parts_file_text(gpu: str, count: int | None = None, link: str | None = None, network: str | None = None) -> str:
    """The text of a commented file of at most `MOST_LINES` lines, which loads as it is.

    Args:
        gpu, count, link: as `profile_from_parts` takes them. network: named in the example of a run file.

    Raises:
        ProfileError: an unknown part or network.
    """
    part = load_gpu(gpu)
    joined = load_link(link or part.link)
    number = count or part.gpus_per_node
    first, peak = next(iter(part.peak_flop_per_s.items()))
    profile = profile_from_parts(part, number, joined)
    joining = load_network(network).name if network else "infiniband-400g"
    peaks = ", ".join(f"{name} {number.value / 1e12:g}" for name, number in part.peak_flop_per_s.items())
    lines = [
        f"# {number} x {part.description} Written by `parsim profile new`; every line but the first three may go.",
        f'name = "{profile.name}"',
        f'gpu = "{gpu}"',
        f"count = {number}",
        f'link = "{joined.name}"  # {joined.description}',
        "",
        "# In a run file, with several such nodes:",
        "#     [cluster]",
        '#     profile = "THIS FILE"',
        "#     nodes = 16",
        f'#     network = "{joining}"  # one card for each of the {len(profile.nics)} slots; cards_per_node says otherwise',
        "",
        f"# What the part says (hardware_profiles/parts/gpus/{part.name}.json holds the source of each number):",
        f"#   memory {part.memory_bytes.value / 2**30:.1f} GiB, {part.memory_bandwidth_bytes_per_s.value / 1e9:,.0f} GB/s;"
        f" {part.multiprocessors.value:.0f} multiprocessors",
        f"#   dense peaks in TFLOP/s: {peaks}",
        *_economics(part),
        *_fits(part),
        f"#   link: {joined.lanes} lanes of {joined.bandwidth_bytes_per_s.value / 1e9:.4g} GB/s per GPU that large collectives"
        f" reach, spread {joined.relative_sigma.value:.0%}",
        "",
        "# Numbers of your own instead of the part's; they need a source. SI units: bytes, bytes/s, FLOP/s, watts.",
        "# [change]",
        f"# memory_bytes = {part.memory_bytes.value:.0f}",
        f"# memory_bandwidth_bytes_per_s = {part.memory_bandwidth_bytes_per_s.value:g}",
        f"# context_bytes = {part.context_bytes.value:.0f}  # taken by the framework before the first tensor",
        f"# peak_flop_per_s = {{ {first} = {peak.value:g} }}",
        '# source = "nvidia-smi on our nodes, 2026-11-20"',
    ]
    return "\n".join(lines) + "\n"


def _economics(part: GpuPart) -> list[str]:
    told = []
    if part.board_limit_w:
        told.append(f"board limit {part.board_limit_w.value:.0f} W")
    told += [
        f"{what} {number.value:.0f} W"
        for what, number in (("busy", part.busy_power_w), ("idle", part.idle_power_w))
        if number is not None
    ]
    if part.usd_per_hour:
        told.append(f"{part.usd_per_hour.value:g} USD per hour ({part.usd_per_hour.as_of})")
    return [f"#   {', '.join(told)}"] if told else []


def _fits(part: GpuPart) -> list[str]:
    """One line per fit: what it is, on how many rows, and its error on rows it had not seen."""
    lines = []
    for fit in part.fits:
        own = f"{fit.points:,} rows" if fit.points else f"no rows of its own, from {', '.join(fit.transferred_from[:4])}"
        what = f"{fit.kind} {fit.phase}" + (f" ({fit.variant})" if fit.variant else "")
        lines.append(f"#   {what}, {fit.precisions[0]}: {own}; spread {fit.relative_sigma:.0%}")
    return lines
