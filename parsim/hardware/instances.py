"""Instance types of clouds by the names that clouds use: their GPUs, links and network, and what an hour costs.

One JSON file per provider in hardware_profiles/clouds: sizes from the provider's pages, prices from a catalogue that the file
names. `refresh` asks gpuhunt for newer prices and keeps them for this user; every answer names the date of the price it took.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from parsim.errors import MissingDependencyError, ProfileError
from parsim.files import NO_CONTROL, cache_folder, control_character_in, parse_json, read_text, reading, write_text_atomically
from parsim.hardware.profile import SourcedFile, SourceEntry
from parsim.hardware.records import Count, Positive, ProfileRecord, parse_record, problems_text, shipped, shipped_text


class InstanceSizes(ProfileRecord):
    """One type, as its file has it.

    Attributes:
        gpu, gpus: the part and how many; or `profile`, a measured machine. link: between them, where it is not the usual one.
        network, cards_per_node: between such instances. no_network: what joins them instead, where no shipped network is.
        usd_per_hour: of one instance on demand; None: not in the catalogue.
    """

    gpus: Count
    gpu: str | None = None
    profile: str | None = None
    link: str | None = None
    network: str | None = None
    cards_per_node: Count | None = None
    no_network: str = ""
    usd_per_hour: Positive | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> InstanceSizes:
        if (self.gpu is None) == (self.profile is None):
            raise ValueError("an instance has either a gpu or a profile")
        if (self.network is None) == (not self.no_network):
            raise ValueError("an instance has either a network, or no_network that says what it has")
        return self


class CloudFile(SourcedFile):
    """The types of one provider. families: other names, such as "p5" for the largest of its family."""

    sources: dict[str, SourceEntry]
    sizes_source: str
    price_source: str | None = None
    priced_as_of: str = ""
    families: dict[str, str] = Field(default_factory=dict)
    instances: Annotated[dict[str, InstanceSizes], Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudInstance:
    """A type by name. usd_per_gpu_hour, price_source: None and "" where the catalogue has no price of it."""

    name: str
    cloud: str
    sizes: InstanceSizes
    usd_per_gpu_hour: float | None
    price_source: str

    def table(self, nodes: int) -> dict[str, object]:
        """The keys of [cluster] that it stands for."""
        sizes = self.sizes
        table: dict[str, object] = (
            {"profile": sizes.profile} if sizes.profile else {"gpu": sizes.gpu, "gpus_per_node": sizes.gpus}
        )
        table |= {"link": sizes.link} if sizes.link else {}
        if nodes > 1 and sizes.network is not None:
            table["network"] = sizes.network
            table |= {"cards_per_node": sizes.cards_per_node} if sizes.cards_per_node else {}
        return table

    @property
    def node(self) -> str:
        """One of them, as `parsim.hardware.compose.load_profile` takes it."""
        sizes = self.sizes
        return sizes.profile or f"{sizes.gpus}x{sizes.gpu}" + (f"@{sizes.link}" if sizes.link else "")

    def to_dict(self) -> dict[str, object]:
        """Plain JSON, as `parsim profile prices` has it."""
        sizes = self.sizes
        return {
            "cloud": self.cloud,
            "gpus": sizes.gpus,
            "machine": self.node,
            "network": sizes.network,
            "network_text": sizes.network or sizes.no_network,
            "usd_per_hour": None if self.usd_per_gpu_hour is None else self.usd_per_gpu_hour * sizes.gpus,
            "price_source": self.price_source,
        }


UNCOVERED: tuple[tuple[str, str], ...] = (
    (r"(tpu-?)?v\d+(p|e|lite|litepod|x)?(-\d+)?(-tpu)?|ct\d+(e|p|lp|l)?-.*|tpu.*|ironwood.*", "TPUs of Google"),
    (r"(trn|inf)\d.*|trainium\d*|inferentia\d*", "Trainium and Inferentia of AWS"),
    (r"dl1\..*|dl2q\..*|(hl-?)?gaudi[ -]?\d?.*|hpu.*", "Gaudi of Intel and Qualcomm's cards"),
    (r"(apple[ -]?)?m\d([ -]?(pro|max|ultra))?|mac.*|mps", "GPUs of Apple"),
    (r".*(gb[23]00).*|a4x-.*|p6e-.*", "single trays of a rack of 72 GPUs"),
)
"""Names of accelerators that no part describes, and what they are."""
RACK = "ask for the rack as 72xgb200 or 72xgb300, which its NVLink joins"
COVERED = "parsim prices GPUs of NVIDIA and AMD; describe another device in a JSON file as hardware_profiles/README.md says"


def check_covered(name: str) -> None:
    """Raise ProfileError, in one sentence, for an accelerator by a well-known name that parsim does not cover."""
    kind = next((what for pattern, what in UNCOVERED if re.fullmatch(pattern, name, re.IGNORECASE)), None)
    if kind is not None and name.lower() not in ("gb200", "gb300"):
        raise ProfileError(f"{name}: {kind} are not covered; {RACK if 'rack' in kind else COVERED}")


@lru_cache(maxsize=1)
def clouds() -> Mapping[str, CloudFile]:
    """The shipped files by provider."""
    return {name: parse_record(CloudFile, shipped_text("clouds", name), name, "cloud") for name in shipped("clouds")}


def _key(name: str) -> str:
    """`ml.p5.48xlarge`, `Standard_ND96isr_H100_v5` and `nd96isr_h100_v5` without what may be left out."""
    return re.sub(r"^(ml\.|standard_)", "", name.strip().lower())


@lru_cache(maxsize=1)
def _by_key() -> Mapping[str, tuple[str, str]]:
    """Cloud and name of every type by its key; families too."""
    found = {_key(name): (cloud, name) for cloud, file in clouds().items() for name in file.instances}
    families = {_key(other): (cloud, name) for cloud, file in clouds().items() for other, name in file.families.items()}
    return families | found


def instance_names() -> list[str]:
    """Every type of every provider."""
    return [name for file in clouds().values() for name in file.instances]


def instance_named(name: str) -> CloudInstance | None:
    """A type by name, whatever its case; None: it is none. Prices are those of `refresh` where there are any."""
    if (place := _by_key().get(_key(name))) is None:
        return None
    cloud, known = place
    file = clouds()[cloud]
    sizes = file.instances[known]
    refreshed = _refreshed().get(known)
    usd, source = sizes.usd_per_hour, f"{known}, on demand, {file.priced_as_of}"
    if refreshed is not None:
        usd, source = refreshed.usd_per_hour, f"{known}, on demand in {refreshed.region}, {refreshed.as_of}"
    return CloudInstance(
        name=known,
        cloud=cloud,
        sizes=sizes,
        usd_per_gpu_hour=None if usd is None else usd / sizes.gpus,
        price_source="" if usd is None else source,
    )


def instances_of(text: str) -> tuple[int, CloudInstance] | None:
    """How many of which: of "p5.48xlarge", or of "2xp5.48xlarge"; None: no instance type."""
    if (found := instance_named(text)) is not None:
        return 1, found
    form = re.fullmatch(r"\s*(\d[\d_,]*)\s*x\s*(\S+)\s*", text)
    found = None if form is None else instance_named(form[2])
    if form is None or found is None:
        return None
    if (count := int(re.sub("[_,]", "", form[1]))) < 1:
        raise ProfileError(f"{text!r}: at least one instance is needed")
    return count, found


# Newer prices, kept for this user.


GPUHUNT = {"aws": "aws", "azure": "azure", "gcp": "gcp", "oci": "oci", "lambda": "lambdalabs"}
"""Providers by gpuhunt's names."""
HOME = {"aws": "us-east-1", "azure": "eastus", "gcp": "us-central1"}
"""Regions whose price is taken where they have one; else the lowest."""


class RefreshedPrice(ProfileRecord):
    """One type of `refresh`: dollars of an hour on demand, the region, who told it and when."""

    usd_per_hour: Positive
    region: str
    as_of: str


def _refreshed() -> Mapping[str, RefreshedPrice]:
    file = cache_folder("prices") / "clouds.json"
    if not file.is_file():
        return {}
    fix = "remove it, or write it again with `parsim profile prices --refresh`"
    with reading(f"{file} is damaged", ProfileError, fix):
        rows = parse_json(read_text(file))
        if character := control_character_in(rows):
            raise ValueError(f"{character}: {NO_CONTROL}")
        try:
            return {str(name): RefreshedPrice.model_validate(row) for name, row in rows.items()}
        except ValidationError as error:
            raise ValueError(problems_text(error, "price")) from error


def refresh() -> int:
    """Ask gpuhunt for the prices of all types and keep them. Returns how many it had.

    Raises:
        MissingDependencyError: without gpuhunt. ProfileError: no answer from its catalogue.
    """
    try:
        import gpuhunt  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependencyError(
            "--refresh asks the catalogue of gpuhunt: pip install gpuhunt; without it the shipped prices and their dates stay"
        ) from error
    kept: dict[str, dict[str, object]] = {}
    try:
        for cloud, provider in GPUHUNT.items():
            _keep_cheapest(kept, cloud, gpuhunt.query(provider=provider, spot=False))
    except Exception as error:  # whatever a network can answer
        raise ProfileError(f"gpuhunt's catalogue cannot be read: {error}; the shipped prices and their dates stay") from error
    folder = cache_folder("prices")
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / "clouds.json", json.dumps(kept, indent=1) + "\n")
    return len(kept)


def _keep_cheapest(kept: dict[str, dict[str, object]], cloud: str, items: list[object]) -> None:
    names = {_key(name): name for name in clouds()[cloud].instances}
    as_of = f"gpuhunt, {date.today().isoformat()}"
    best: dict[str, tuple[bool, float, str]] = {}
    for item in items:
        name = names.get(_key(str(getattr(item, "instance_name", ""))))
        price, region = getattr(item, "price", None), str(getattr(item, "location", ""))
        if name is None or not price:
            continue
        offer = (not region.startswith(HOME.get(cloud, "?")), float(price), region)
        best[name] = min(best.get(name, offer), offer)
    for name, (_, price, region) in best.items():
        kept[name] = {"usd_per_hour": price, "region": region, "as_of": as_of}
