"""Parts of hardware for commands and notebooks: what there is, and a profile made of them."""

from __future__ import annotations

from pathlib import Path

from parsim.errors import ConfigError
from parsim.files import write_text_atomically


def known_parts() -> dict[str, list[str]]:
    """Names of the GPUs, links, networks and profiles that come with the package."""
    from parsim.hardware.network import shipped_networks
    from parsim.hardware.parts.load import shipped_gpus, shipped_links
    from parsim.hardware.profile import shipped_profiles

    return {
        "gpus": shipped_gpus(),
        "links": shipped_links(),
        "networks": shipped_networks(),
        "profiles": shipped_profiles(),
    }


def new_profile(
    gpu: str, *, count: int | None = None, link: str | None = None, network: str | None = None, out: Path | None = None
) -> dict[str, str]:
    """Write a commented profile that refers to parts.

    Args:
        gpu: by name or path. count: GPUs of a node; None: as the usual machine. link, network: by name or path.
        out: the file, which must end in .toml and not exist; None: GPU.toml in the current directory.

    Returns:
        path, and the profile's name.

    Raises:
        ConfigError: the file is there already, or ends otherwise. ProfileError: an unknown part.
    """
    from parsim.hardware.parts.profile_file import SUFFIX, parts_file_text, read_parts_file

    path = out or Path(f"{Path(gpu).stem}{SUFFIX}")
    if path.suffix != SUFFIX:
        raise ConfigError(f"--out {path}: a profile made of parts is a {SUFFIX} file, which can hold comments; name it so")
    if path.exists():
        raise ConfigError(f"{path} exists; give another --out, or remove it")
    text = parts_file_text(gpu, count, link, network)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, text)
    return {"path": str(path), "name": read_parts_file(path).name}
