"""A rank whose forward runs in another order than in the process that planned is refused before anything is exchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from parsim.errors import ExecutionError  # noqa: E402
from parsim.execute.stage import recorded_programs  # noqa: E402
from parsim.execute.state.value_names import check_names  # noqa: E402
from parsim.model.load import load_model  # noqa: E402
from parsim.model.spec import ModelSpec  # noqa: E402


@pytest.mark.parametrize(("name", "granularity"), [("gpt_small", "sublayer"), ("resnet_small", "layer"), ("mlp", "block")])
def test_the_names_of_a_model_are_those_that_a_rank_records(name: str, granularity: str) -> None:
    spec = ModelSpec(name=name)
    model = load_model(spec, granularity=granularity)
    recorded = recorded_programs(spec, 2, granularity, torch.float32, "cpu")
    check_names(model, recorded)
    last = model.components[-2].name
    program = recorded[last]
    swapped = replace(program, inputs=tuple((f"{value}:swapped", slot, flows) for value, slot, flows in program.inputs))
    with pytest.raises(ExecutionError, match=rf"{last} reads .*:swapped on this rank.*PYTHONHASHSEED=0"):
        check_names(model, {**recorded, last: swapped})
