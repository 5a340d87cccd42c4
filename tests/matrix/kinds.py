"""The kinds of modules that people train, and what works: `python -m tests.matrix.kinds [--only NAME] [--write]`.

Parsim is asked for each: the best plan on 8 V100s, the loss that the answer names, flop against torch's counter, and what the
answer assumed. With --write the answers go into kinds.json and docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from experiments.common.markdown import table
from parsim.errors import ParsimError
from parsim.model.inputs import ModelInput
from parsim.model.spec import ModelSpec
from tests.execute.module_kinds import WIDTH, Adversaries
from tests.matrix.catalogue import catalogue
from tests.matrix.checks import Subject, flop, simulate
from tests.matrix.table import DOCUMENT, put_table

RESULTS = Path(__file__).with_suffix(".json")
BEGIN, END = "<!-- kinds: begin -->", "<!-- kinds: end -->"
ROOT = f"{Path(__file__).parents[2]}/"
LINE = re.compile(r"(\.py):\d+ ")


class Game(Adversaries):
    """One step of a GAN as a module that returns its loss, one number per sample."""

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        return super().forward(real, noise).squeeze(1)


GAME = ModelSpec(name="tests.matrix.kinds:Game", inputs=(ModelInput("real", (WIDTH,)), ModelInput("noise", (4,))), loss="own")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of module.

    Attributes:
        works: what parsim does with it, in words.
        row: of the matrix, which stands for it. spec: instead of a row.
    """

    name: str
    works: str
    row: str = ""
    spec: ModelSpec | None = None


_PLANNED = "planned and run"
KINDS: tuple[Kind, ...] = (
    Kind(name="MLP", works=_PLANNED, row="MLP"),
    Kind(
        name="CNN",
        works="planned and run; the running average of a BatchNorm without `momentum` is refused with the fix",
        row="residual CNN",
    ),
    Kind(name="ViT", works=_PLANNED, row="vit_small"),
    Kind(
        name="GPT",
        works="planned and run; tied and transposed tables are one parameter, bitwise",
        row="gpt_small",
    ),
    Kind(name="BERT", works=_PLANNED, row="bert_small"),
    Kind(
        name="LSTM, GRU, RNN",
        works="flop of every step; bidirectional, several layers, initial states, loops over cells: bitwise. Packed sequences "
        "are refused with the fix",
        row="LSTM",
    ),
    Kind(
        name="U-Net",
        works="the loss of an output that is an image has to be given; bitwise",
        row="U-Net",
    ),
    Kind(
        name="mixture of experts",
        works="routing is taken as balanced, and the answer says so; bitwise for seven ways of routing",
        row="experts, loop in Python",
    ),
    Kind(
        name="diffusion net (x, t)",
        works="several inputs by name; bitwise",
        row="diffusion net",
    ),
    Kind(
        name="nn.Transformer, nn.TransformerEncoder",
        works="bitwise, with masks, padding, `norm_first`",
        row="nn.TransformerEncoder",
    ),
    Kind(
        name="GAN",
        works="one step as one module, with an optimizer for each player (below): bitwise",
        spec=GAME,
    ),
    Kind(
        name="LoRA, frozen parameters",
        works="frozen parameters have no gradient, optimizer state, communication or flop of a gradient; bitwise",
        row="LoRA",
    ),
    Kind(
        name="module that returns its own loss",
        works='`loss = "own"`',
        row="VAE",
    ),
    Kind(
        name="code that looks at values",
        works='refused with its line and a workaround, or `control_flow = "example"` (as in the second table)',
        row="branch on values, by example",
    ),
    Kind(name="weight tying", works="one parameter, counted and sent once", row="causal decoder, tied"),
    Kind(name="BatchNorm, depthwise convolutions", works="buffers equal those of the module", row="depthwise CNN"),
    Kind(name="dict of inputs", works="inputs are named with dots", row="dict of inputs"),
    Kind(name="dataclass of outputs", works='`output = "..."` says which the loss reads', row="dataclass of outputs"),
    Kind(
        name="contrastive pair",
        works="planned; the answer says that its loss is not a sum over samples",
        row="self-supervised pair",
    ),
    Kind(name="Hugging Face config", works="by its path (below)", row="llama"),
)


class Found(NamedTuple):
    """What parsim says of one kind; "refused: ..." where it does."""

    plan: str
    loss: str
    flop: str
    assumed: str


def specs(folder: Path) -> dict[str, ModelSpec]:
    """Of every kind, by its name.

    Args:
        folder: where Hugging Face configs are written.
    """
    rows = {row.name: row.spec for row in catalogue(folder)}
    return {kind.name: kind.spec or rows[kind.row] for kind in KINDS}


def ask(spec: ModelSpec) -> Found:
    """Plan it."""
    subject = Subject(spec)
    try:
        assumed = LINE.sub(r"\1 ", "; ".join(subject.model.assumptions).replace(ROOT, ""))
        return Found(simulate(subject), subject.model.loss, flop(subject), assumed or "nothing")
    except ParsimError as error:
        return Found(f"refused: {error}", "-", "-", "-")


def table_text() -> str:
    """The two tables of docs/models.md, from what is kept: side by side they are wider than a page."""
    known: dict[str, list[str]] = json.loads(RESULTS.read_text())
    works = table(("kind", "what works"), [(kind.name, kind.works) for kind in KINDS])
    asked = table(("kind", "plan", "loss", "forward flop", "assumed"), [(kind.name, *known[kind.name]) for kind in KINDS])
    return f"{works}\n\n{asked}"


def main() -> None:
    """Ask for every kind, and print it; --write keeps it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="kinds whose name contains this")
    parser.add_argument("--write", action="store_true", help=f"renew {RESULTS.name} and {DOCUMENT.name}")
    asked = parser.parse_args()
    known: dict[str, list[str]] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name, spec in specs(Path(folder)).items():
            if asked.only is None or asked.only in name:
                found = Found(*(text.replace(folder, "...") for text in ask(spec)))
                known[name] = list(found)
                print(f"{name}: " + "; ".join(f"{key} {text}" for key, text in found._asdict().items()))
    if asked.write:
        RESULTS.write_text(json.dumps({kind.name: known[kind.name] for kind in KINDS if kind.name in known}, indent=1) + "\n")
        put_table(BEGIN, END, table_text())


if __name__ == "__main__":
    main()
