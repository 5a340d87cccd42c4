"""Five models, and one of them with dropout: small, and different in what a plan has to respect."""

from __future__ import annotations

from dataclasses import dataclass

from parsim.model.inputs import ModelInput
from parsim.model.load import load_model
from parsim.model.model import Model
from parsim.model.spec import ModelSpec

MODULES = "experiments.executor.modules"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model of the experiment.

    Attributes:
        batches: global batches to draw from. least_samples: that a component may see at once.
        draws: whether a forward draws random numbers. normalises: whether results depend on which samples meet.
        granularities: at which it is planned. has: what it brings that a plan must respect, in words.
        lacks: of `features.FEATURES` what no plan of it can have.
    """

    name: str
    spec: ModelSpec
    granularities: tuple[str, ...]
    has: str
    batches: tuple[int, ...] = (8, 8, 12)
    least_samples: int = 1
    normalises: bool = False
    draws: bool = False
    lacks: tuple[str, ...] = ()
    dataset: str = "synthetic"

    def model(self, granularity: str) -> Model:
        return load_model(self.spec, granularity=granularity)


_GPT = (("heads", 4), ("hidden", 16), ("layers", 3), ("seq", 6), ("vocab", 12))

SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject(
            name="mlp",
            spec=ModelSpec(name="mlp", args=(("depth", 6), ("width", 16)), input_shape=(1, 4, 4)),
            granularities=("layer",),
            has="a chain of equal layers",
            lacks=("recomputed: by operator",),
        ),
        Subject(
            name="residual",
            spec=ModelSpec(name=f"{MODULES}:Residual", input_shape=(1, 8, 8)),
            granularities=("block", "block", "layer"),
            has="BatchNorm: running statistics, and results that depend on which samples meet",
            batches=(32,),
            least_samples=4,
            normalises=True,
        ),
        Subject(
            name="gpt",
            spec=ModelSpec(name="gpt_small", args=_GPT),
            granularities=("block", "sublayer"),
            has="one matrix in the first and the last component",
        ),
        Subject(
            name="gpt_dropout",
            spec=ModelSpec(name="gpt_small", args=(("dropout", 0.1), *_GPT)),
            granularities=("block", "sublayer"),
            has="the same with dropout: the masks of every rank are drawn again in one process",
            draws=True,
        ),
        Subject(
            name="llama",
            spec=ModelSpec(name=f"{MODULES}:Llama", inputs=(ModelInput("tokens", (6,), "int64", 12),), loss="cross_entropy"),
            granularities=("block", "sublayer"),
            has="a Hugging Face Llama: grouped queries, rotary positions, gated MLP",
        ),
        Subject(
            name="reader",
            spec=ModelSpec(
                name=f"{MODULES}:Reader",
                inputs=(ModelInput("tokens", (5,), "int64", 11), ModelInput("series", (4, 3))),
                loss="cross_entropy",
            ),
            granularities=("block", "sublayer"),
            has="two inputs, branches that meet late, an LSTM, torch's encoder layers",
        ),
    )
}
"""By name."""
