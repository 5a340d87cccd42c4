"""A rank whose forward runs in another order than in the process that planned is refused before anything is exchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from parsim.errors import ExecutionError
from parsim.execute.checkpoint.fragments import check_names
from parsim.execute.stage import recorded_programs
from parsim.model.build import record
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from tests.hugging_face_configs import SMALL

SEEDS = ("0", "1")


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


class _Positions(nn.Module):
    """Makes positions for two kinds of layers in the order of `kinds`, as gemma3 does in that of a set."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = ("near", "far")
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        positions = {kind: torch.sin(x.detach() * len(kind)) for kind in self.kinds}
        for layer, kind in zip(self.layers, ("near", "far", "near"), strict=True):
            x = layer(x) + positions[kind]
        return x


def test_names_do_not_depend_on_the_order_in_which_values_are_made() -> None:
    found = []
    for kinds in (("near", "far"), ("far", "near")):
        module = _Positions()
        module.kinds = kinds
        recorded = {component.name: component for component in record(module, torch.zeros(2, 4))}
        found.append([(entry.name, entry.input_names, entry.output_names) for entry in recorded.values()])
        x = torch.rand(2, 4)
        values = {"input:0": x}
        for component in recorded.values():
            made = component([values[name] for name in component.input_names])
            values.update(zip(component.output_names, made, strict=True))
        readers = next(entry for entry in recorded.values() if entry.name == "layers.1")
        assert torch.equal(values[readers.input_names[-1]], torch.sin(module.first(x) * len("far")))
    assert found[0] == found[1]
    assert any(len(outputs) == 3 for _, _, outputs in found[0])


NAMES = """
import json, sys, torch
from parsim.execute.stage import recorded_programs
from parsim.model.spec import ModelSpec
programs = recorded_programs(ModelSpec(name=sys.argv[1]), 2, "sublayer", torch.float32, "cpu")
names = [[name, [entry[0] for entry in made.inputs], [entry[0] for entry in made.outputs]] for name, made in programs.items()]
print(json.dumps([list({"sliding_attention", "full_attention"}), names]))
"""


@pytest.mark.slow
def test_gemma3_has_the_same_names_under_every_hash_seed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    kinds = ["sliding_attention", "full_attention"]
    config.write_text(json.dumps(SMALL["gemma3"] | {"num_hidden_layers": 2, "layer_types": kinds}))
    told = []
    for seed in SEEDS:
        run = [sys.executable, "-c", NAMES, str(config)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        told.append(json.loads(subprocess.run(run, env=environment, capture_output=True, check=True, text=True).stdout))
    (first, names), (second, others) = told
    assert first != second, "the seeds are to give a set two orders"
    assert names == others
