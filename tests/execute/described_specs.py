"""Models of several inputs, with outputs in structures, with their own losses."""

from __future__ import annotations

from parsim.model.inputs import ModelInput, inputs_from
from parsim.model.spec import ModelSpec
from tests.execute import described_modules as modules

HERE = "tests.execute.described_modules"
IMAGE_AND_STEP = inputs_from({"x": {"shape": [4, 6, 6]}, "t": {"shape": [], "dtype": "int32", "high": modules.STEPS}})
LABELLED = inputs_from(
    {
        "prior": {"shape": [modules.CLASSES], "constant": True},
        "x": {"shape": [6]},
        "labels": {"shape": [], "dtype": "int64", "high": modules.CLASSES},
    }
)
STATE = inputs_from({"state": {"mine": {"shape": [4]}, "theirs": {"shape": [2]}}})

DENOISER = ModelSpec(name=f"{HERE}:Denoiser", inputs=IMAGE_AND_STEP, loss="mse")
SEGMENTER = ModelSpec(name=f"{HERE}:Segmenter", input_shape=(3, 6, 6), loss="cross_entropy", classes_dim=0)
OWN = ModelSpec(name=f"{HERE}:OwnLoss", inputs=LABELLED)
OWN_PER_SAMPLE = ModelSpec(name=f"{HERE}:OwnLoss", args=(("per_sample", True), ("entry", True)), inputs=LABELLED)
POLICY = ModelSpec(name=f"{HERE}:TwoHeads", inputs=STATE, output="policy")
HUBER = ModelSpec(name=f"{HERE}:Denoiser", inputs=IMAGE_AND_STEP, loss=f"{HERE}:squares")
HUBER_PER_SAMPLE = ModelSpec(name=f"{HERE}:Denoiser", inputs=IMAGE_AND_STEP, loss=f"{HERE}:squares_per_sample")
BOTH_HEADS = ModelSpec(
    name=f"{HERE}:TwoHeads", inputs=STATE, loss=f"{HERE}:both_heads", target=ModelInput("target", (), "int64", modules.CLASSES)
)
BINARY = ModelSpec(name=f"{HERE}:TwoHeads", inputs=STATE, loss="bce", output="value")
DESCRIBED = (DENOISER, SEGMENTER, OWN, OWN_PER_SAMPLE, POLICY, HUBER, HUBER_PER_SAMPLE, BOTH_HEADS, BINARY)
