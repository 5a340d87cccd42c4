"""How every command speaks: results on stdout, as one JSON document with --json; and the options that commands share."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from parsim.app.config import THIS_MACHINE
from parsim.app.config_text import ALLOW_VARIABLE, THOUSAND, changes_of
from parsim.errors import ConfigError
from parsim.files import finite
from parsim.hardware.parts import machines_of, shipped_gpus, shipped_networks
from parsim.hardware.profile import shipped_profiles
from parsim.model.catalogue.names import known_names
from parsim.model.catalogue.zoo import ZOO
from parsim.report.picture import PAGES, PICTURES, checked_ending
from parsim.report.tables import ReportTable, to_rich, to_text
from parsim.units import parse_count, printable

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a key of the run file, e.g. cluster.devices=4 (docs/run-file.md). Repeatable."
    ),
]


def _allow(wanted: bool) -> None:
    """For this process and its children."""
    if wanted:
        os.environ[ALLOW_VARIABLE] = "1"


AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code", callback=_allow, help="Let the run file name code outside its folder. Only for files that you trust."
    ),
]


def complete_model(incomplete: str) -> list[str]:
    """Names of models that begin so; files are completed by the shell where none does."""
    return [name for name in (*ZOO, *known_names()) if name.startswith(incomplete)] if incomplete else []


def complete_gpus(incomplete: str) -> list[str]:
    """`8xh100-sxm` for `8xh1`; without a number, eight."""
    number, x, gpu = incomplete.partition("x")
    number, gpu = (number, gpu) if x and number.isdigit() else ("8", incomplete)
    return [f"{number}x{name}" for name in shipped_gpus() if name.startswith(gpu.lower())]


def complete_network(incomplete: str) -> list[str]:
    """Names of networks that begin so."""
    return [name for name in shipped_networks() if name.startswith(incomplete)]


def _complete_cluster(incomplete: str) -> list[str]:
    machines = [name for name in (THIS_MACHINE, *shipped_profiles()) if name.startswith(incomplete)]
    return machines + complete_gpus(incomplete)


Asked = Annotated[
    str,
    typer.Argument(
        autocompletion=complete_model,
        metavar="RUN.toml|MODEL",
        help="A run file (docs/run-file.md); or a model with --on and --batch: resnet50, llama3-8b, module:Class.",
    ),
]
OnCluster = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="CLUSTER",
        autocompletion=_complete_cluster,
        help="With a MODEL: GPUs (8xh100-sxm), a profile by name or path, or this-machine.",
    ),
]
GpusOption = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="COUNTxGPU",
        autocompletion=complete_gpus,
        help="With a MODEL: number and kind of GPUs, e.g. 1024xh100-sxm or 8x4090.",
    ),
]
NetworkOption = Annotated[
    str | None,
    typer.Option(
        "--network",
        metavar="NETWORK",
        autocompletion=complete_network,
        help="Network between nodes, e.g. infiniband-400g.",
    ),
]


def _count(key: str) -> Callable[[str], int | float]:
    """Reads the number of an option as `--set` reads it of the key: `64k`."""

    def read(text: str) -> int | float:
        try:
            return parse_count(text.removeprefix("-"), THOUSAND[key]) * (-1 if text.startswith("-") else 1)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return read


BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="N",
        parser=_count("training.global_batch"),
        help="With a MODEL: samples per step over all replicas, e.g. 256 or 4k. Left out: a usual one, which the answer says.",
    ),
]
SeqOption = Annotated[
    int | None,
    typer.Option(
        "--seq", metavar="N", parser=_count("model.args.seq"), help="Tokens per sample of a language model, e.g. 4096 or 64k."
    ),
]
TuneOption = Annotated[
    str | None,
    typer.Option("--tune", metavar="METHOD", help="Fine-tune: lora:r=16,targets=attention+mlp, qlora:r=16, full, head."),
]
TokensOption = Annotated[
    float | None,
    typer.Option(
        "--tokens",
        metavar="N",
        parser=_count("training.tokens"),
        help="Tokens of the whole training, e.g. 15T or 1e12: adds days, price and failures.",
    ),
]

SamplesOption = Annotated[
    float | None,
    typer.Option(
        "--samples",
        metavar="N",
        parser=_count("training.samples"),
        help="Samples of the whole training, all epochs: adds time and price.",
    ),
]


def _plot_path(path: Path | None) -> Path | None:
    return None if path is None else checked_ending(path, PICTURES)


def page_path(path: Path | None) -> Path | None:
    """The path of a page, if it ends as one."""
    return None if path is None else checked_ending(path, PAGES, "page")


PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png|svg|pdf", callback=_plot_path, help="Draw the answer; the ending decides how."),
]
PageOption = Annotated[Path | None, typer.Option("--out", metavar="PAGE.html", callback=page_path, help="Write the page here.")]


def on_gpus(
    cluster: str | None,
    gpus: str | None,
    network: str | None,
    overrides: list[str] | None,
    *,
    seq: int | None = None,
    tokens: float | None = None,
    samples: float | None = None,
    tune: str | None = None,
) -> tuple[str | None, list[str]]:
    """The cluster and the overrides that --on, --gpus, --network, --seq, --tokens, --samples, --tune and --set mean together.

    Raises: ConfigError: both --on and --gpus, or --gpus of another form.
    """
    from parsim.app.question import per_node_of

    changes = [
        *([] if network is None else [f'cluster.network="{network}"']),
        *([] if seq is None else [f"model.args.seq={seq}"]),
        *([] if tokens is None else [f"training.tokens={tokens!r}"]),
        *([] if samples is None else [f"training.samples={samples!r}"]),
        *([] if tune is None else [f"training.tune={json.dumps(tune)}"]),
        *(overrides or []),
    ]
    if gpus is None:
        return cluster, changes
    if cluster is not None:
        raise ConfigError(f"--on {cluster} and --gpus {gpus} both name the cluster; drop one of them")
    machines_of(gpus, per_node_of(changes_of(None, changes)))
    return gpus, changes


def print_json(document: object) -> None:
    """The one document of a --json command. A number that is not finite becomes null: JSON has no word for it."""
    print(json.dumps(finite(document), indent=1, allow_nan=False))


def print_tables(tables: Sequence[ReportTable]) -> None:
    """Rich tables on a terminal, plain text of a fixed width in a file or a pipe."""
    if not sys.stdout.isatty():
        print("\n".join(to_text(table) for table in tables), end="")
        return
    from rich.console import Console

    console = Console(highlight=False)
    for table in tables:
        console.print(to_rich(table))


def tell(as_json: bool, document: object, *parts: str | ReportTable, picture: Path | None = None) -> None:
    """The result of a command: its document with --json, else texts and tables in their order.

    Control characters are spelled out: texts may quote names from files.
    """
    if as_json:
        print_json(document)
        return
    for are_tables, group in itertools.groupby(parts, key=lambda part: isinstance(part, ReportTable)):
        if are_tables:
            print_tables([part for part in group if isinstance(part, ReportTable)])
        else:
            print("\n".join(printable(str(text)) for text in group))
    if picture is not None:
        print(f"Picture: {picture}")


def verdict(document: Mapping[str, Any]) -> list[str]:
    """Whether a run went as predicted, what was different, what loading was predicted from, and where it is recorded."""
    diagnosis, loading = document["diagnosis"], document.get("loading")
    begins = {True: "The run went ", False: "The run did not go ", None: ""}
    return [
        begins[diagnosis["as_predicted"]] + diagnosis["text"].removeprefix("not "),
        *([] if loading is None else [loading["text"]]),
        *(f"  {finding['text']}; {finding['advice']}" for finding in diagnosis["findings"]),
        f"history: {document['history']['text']}",
    ]
