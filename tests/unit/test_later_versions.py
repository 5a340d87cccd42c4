"""Files that a later version of parsim wrote are refused with what to do."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parsim.app.functions import plan
from parsim.errors import ParsimError
from parsim.execute.job import Job, RunSpec
from parsim.execute.measurement import RankRecord
from parsim.hardware.parts import Network
from parsim.hardware.records import parse_record
from parsim.model.model import Model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from parsim.plans.plan import Plan, Stage
from parsim.timeline import Timeline

LATER = r"schema_version must be \d, got 99; a newer parsim wrote it: upgrade.*again"
ONE = Plan(strategy="single", mesh=Mesh(), stages=(Stage(components=("x",), ranks=(0,)),), global_batch=1)
RUN = RunSpec(
    name="run", model=ModelSpec(name="mlp"), model_path="", plan=ONE, optimizer="sgd", learning_rate=0.1, dataset="digits"
)
EMPTY = np.zeros(0)


@dataclass(frozen=True)
class Kind:
    """A kind of file: writes one, and reads it."""

    write: Callable[[Path], object]
    read: Callable[[Path], object]


def _model(path: Path) -> None:
    plan("mlp", cluster="dgx1-v100-32gb", global_batch=8, strategy="single").problem.model.save(path)


KINDS = {
    "plan.json": Kind(ONE.save, Plan.load),
    "model.json": Kind(_model, Model.load),
    "job.json": Kind(Job(output="", mode="train", runs=(RUN,), steps=1).save, Job.load),
    "rank0.json": Kind(
        lambda path: RankRecord(rank=0, rounds=[], steps=[], losses=[], cpu_s=[], peak_bytes=0).save(path.parent),
        lambda path: RankRecord.load(path.parent, 0),
    ),
    "timeline.json.gz": Kind(
        Timeline(source="static", resources=(), task=EMPTY, resource=EMPTY, start_s=EMPTY, end_s=EMPTY).save, Timeline.load
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_a_later_version_says_what_to_do(tmp_path: Path, name: str) -> None:
    path, kind = tmp_path / name, KINDS[name]
    kind.write(path)
    kind.read(path)
    packed = name.endswith(".gz")
    text = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    document: dict[str, Any] = {**json.loads(text), "schema_version": 99}
    changed = json.dumps(document).encode()
    path.write_bytes(gzip.compress(changed) if packed else changed)
    with pytest.raises(ParsimError, match=LATER):
        kind.read(path)


def test_a_network_of_a_later_version_says_what_to_do() -> None:
    with pytest.raises(ParsimError, match=r"network net.* schema_version must be 1, got 99; a newer parsim wrote it"):
        parse_record(Network, '{"schema_version": 99}', "net", "network")
