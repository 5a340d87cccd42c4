"""A change of plan over a link between two network namespaces that `tc` has shaped: needs root."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.adaptive.disturbing import AtStep
from experiments.this_machine.namespaces import ShapedPair, possible, shaped_pair
from parsim.execute.job import Job, RunSpec, Switch
from parsim.files import read_json
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.plans.mesh import Mesh
from tests.execute.rank_states import even_plan

SPEC = ModelSpec(name="mlp", args=(("width", 1024),))
DP, PIPELINE = even_plan(SPEC, Mesh(dp=2)), even_plan(SPEC, Mesh(pp=2))
STEPS, SWITCH = 8, 4
SLOW_BYTES_PER_S = 12.5e6


def trained(folder: Path, pair: ShapedPair, *switches: Switch) -> tuple[list[float], list[list[float]]]:
    """Losses, and begin and end of every timed step on rank 0."""
    folder.mkdir()
    load_model(SPEC).save(folder / "model.json")
    run = RunSpec(
        name="run",
        model=SPEC,
        model_path=str(folder / "model.json"),
        plan=DP,
        optimizer="sgd_momentum",
        learning_rate=0.01,
        dataset="digits",
        dtype="float64",
    )
    Job(output=str(folder), mode="train", runs=(run,), steps=STEPS, switches=switches).save(folder / "job.json")
    pair(folder / "job.json", 2, timeout_s=300.0)
    records = [read_json(folder / "run" / f"rank{rank}.json") for rank in (0, 1)]
    losses = [sum(own for own in step if own is not None) for step in zip(*(each["losses"] for each in records), strict=True)]
    return losses, records[0]["rounds"]


@pytest.mark.slow
@pytest.mark.xdist_group("launch")
@pytest.mark.skipif(bool(possible()), reason=possible())
def test_a_switch_over_a_slow_link_sends_no_weights_and_changes_no_loss(tmp_path: Path) -> None:
    """Under data parallelism each rank has all that it needs for a pipeline. Sent as a whole, weights and momentum would take
    four seconds."""
    with shaped_pair(125e6, changes=True) as pair:
        straight, _ = trained(tmp_path / "straight", pair)
        pair.shape(SLOW_BYTES_PER_S)
        changed, rounds = trained(tmp_path / "changed", pair, Switch(step=SWITCH, plan=PIPELINE))
    assert changed == pytest.approx(straight, abs=1e-10)
    assert len(changed) == STEPS
    stood_still = max(after[0] - before[1] for before, after in itertools.pairwise(rounds))
    whole = 2 * 8 * sum(parameter.elements for parameter in load_model(SPEC).parameters)
    assert whole / SLOW_BYTES_PER_S > 3.5
    assert stood_still < 2.0
    in_dp, in_pipeline = (min(end - begin for begin, end, _ in part) for part in (rounds[:-SWITCH], rounds[-SWITCH:]))
    assert in_dp > whole / 2 / SLOW_BYTES_PER_S / 2 > in_pipeline  # gradients are half of it


def test_a_disturbance_begins_between_two_lines_of_progress() -> None:
    """Ranks say once in a second where they are; the step in between is reckoned from their pace."""
    entered: list[float] = []

    @contextlib.contextmanager
    def begin() -> Iterator[None]:
        entered.append(time.perf_counter())
        yield

    disturbance = AtStep(step=30, begin=begin)
    for step in (0, 10, 20):
        disturbance.seen(step)
        time.sleep(0.2)
    time.sleep(0.2)
    disturbance.close()
    assert disturbance.since is not None
    assert len(entered) == 1


def test_a_training_that_ends_before_is_not_disturbed() -> None:
    disturbance = AtStep(step=1000, begin=contextlib.nullcontext)
    disturbance.seen(10)
    disturbance.close()
    assert disturbance.since is None
