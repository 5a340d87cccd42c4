"""`parsim profile`: machines made of parts. `new` writes a short commented profile; `list` shows what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parsim.commands.output import JsonFlag, print_json
from parsim.errors import ConfigError


def profile(
    action: Annotated[str, typer.Argument(metavar="new|list", help="Write a profile made of parts, or list the parts.")],
    gpu: Annotated[str | None, typer.Option(metavar="GPU", help="A GPU by name (h100-sxm) or path.")] = None,
    count: Annotated[int | None, typer.Option(min=1, metavar="N", help="GPUs per node.")] = None,
    link: Annotated[str | None, typer.Option(metavar="LINK", help="Link between GPUs of a node, by name or path.")] = None,
    network: Annotated[str | None, typer.Option(metavar="NETWORK", help="Network between nodes.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="File to write. Default: GPU.toml in this folder.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a commented profile made of parts (`new`), or list GPUs, links, networks and profiles (`list`)."""
    from parsim.workflow.public.parts import known_parts, new_profile

    if action == "list":
        document = known_parts()
        if as_json:
            print_json(document)
            return
        for kind, names in document.items():
            print(f"{kind}: {', '.join(names)}")
        return
    if action != "new":
        raise ConfigError(f"parsim profile {action}: unknown; use `parsim profile new --gpu h100-sxm` or `parsim profile list`")
    if gpu is None:
        raise ConfigError("parsim profile new needs --gpu, for example --gpu h100-sxm; `parsim profile list` shows the names")
    written = new_profile(gpu, count=count, link=link, network=network, out=out)
    if as_json:
        print_json(written)
        return
    print(f'Profile: {written["path"]}; use it with cluster.profile = "{written["path"]}"')
