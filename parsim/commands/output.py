"""How every command speaks: results on stdout, as one JSON document with --json; and the options that commands share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parsim.app.config_text import ALLOW_VARIABLE, changes_of
from parsim.errors import ConfigError
from parsim.files import finite
from parsim.hardware.parts import machines_of
from parsim.report.tables import to_rich, to_text
from parsim.units import printable

if TYPE_CHECKING:
    from parsim.report.tables import ReportTable

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
Asked = Annotated[
    str,
    typer.Argument(
        metavar="RUN.toml|MODEL",
        help="A run file (docs/run-file.md); or a model with --on and --batch: resnet50, llama3-8b, module:Class.",
    ),
]
OnCluster = Annotated[
    str | None,
    typer.Option(
        "--on", metavar="CLUSTER", help="With a MODEL: GPUs (8xh100-sxm), a profile by name or path, or this-machine."
    ),
]
GpusOption = Annotated[
    str | None, typer.Option("--gpus", metavar="COUNTxGPU", help="With a MODEL: number and kind of GPUs, e.g. 1024xh100-sxm.")
]
NetworkOption = Annotated[
    str | None, typer.Option("--network", metavar="NETWORK", help="Network between nodes, e.g. infiniband-400g.")
]
BatchOption = Annotated[
    int | None, typer.Option("--batch", metavar="N", help="With a MODEL: samples per step over all replicas.")
]
SeqOption = Annotated[int | None, typer.Option("--seq", metavar="N", help="Tokens per sample of a language model.")]
TuneOption = Annotated[
    str | None,
    typer.Option("--tune", metavar="METHOD", help="Fine-tune: lora:r=16,targets=attention+mlp, qlora:r=16, full, head."),
]
TokensOption = Annotated[
    float | None,
    typer.Option("--tokens", metavar="N", help="Tokens of the whole training, e.g. 1e12: adds days, price and failures."),
]

SamplesOption = Annotated[
    float | None,
    typer.Option("--samples", metavar="N", help="Samples of the whole training, all epochs: adds time and price."),
]


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

    Raises:
        ConfigError: both --on and --gpus, or --gpus of another form.
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


def print_lines(lines: Iterable[str]) -> None:
    """Lines for people, with control characters spelled out: they may quote names from files."""
    print("\n".join(printable(line) for line in lines))


def print_verdict(document: Mapping[str, Any]) -> None:
    """Whether a run went as predicted, what was different, what loading was predicted from, and where it is recorded."""
    diagnosis = document["diagnosis"]
    begins = {True: "The run went ", False: "The run did not go ", None: ""}
    print(begins[diagnosis["as_predicted"]] + diagnosis["text"].removeprefix("not "))
    if document.get("loading") is not None:
        print(document["loading"]["text"])
    for finding in diagnosis["findings"]:
        print(f"  {finding['text']}; {finding['advice']}")
    print(f"history: {document['history']['text']}")
