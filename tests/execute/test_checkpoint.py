"""Checkpoints: complete or not there, resumable bit for bit, under another plan; the best one; and when they are written."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
import warnings
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parsim.errors import ExecutionError
from parsim.execute.checkpoint import fragments
from parsim.execute.checkpoint.checkpoint import (
    Checkpoint,
    RankState,
    checkpoints,
    discard_unfinished,
    has_checkpoints,
    latest_checkpoint,
    load_state,
    read_manifest,
    restore_optimizer,
    restore_rng,
    restore_tensors,
    rng_state,
    save_checkpoint,
)
from parsim.execute.checkpoint.fragments import Fragment, join
from parsim.execute.train import CheckpointTimes
from tests.execute.rank_states import newest

pytest.importorskip("torch")

import pytest
from torch import Tensor

from parsim.execute import evaluation as validation
from parsim.execute.checkpoint.checkpoint import UNUSED, set_aside_newer
from parsim.execute.checkpoint.fragments import WHOLE, is_per_element, join_state
from parsim.execute.evaluation import STATE, Validation
from parsim.execute.job import EvaluationRule
from parsim.model.component import ParameterShard
from parsim.model.shard.apply import piece


def _network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
}


def _train(network: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Uses dropout, so the random state matters; the data is a function of the step."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(10, 6, generator=generator)
        optimizer.zero_grad()
        network(inputs).square().mean().backward()
        optimizer.step()


def _state(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> RankState:
    parameters = dict(network.named_parameters())
    return RankState(
        weights=parameters,
        buffers=dict(network.named_buffers()),
        optimizer={name: optimizer.state[value] for name, value in parameters.items()},
        rng=rng_state(),
    )


def _restore(network: torch.nn.Module, optimizer: torch.optim.Optimizer, state: RankState) -> None:
    parameters = dict(network.named_parameters())
    restore_tensors(parameters, state.weights)
    restore_tensors(dict(network.named_buffers()), state.buffers)
    restore_optimizer(optimizer, parameters, state.optimizer)
    restore_rng(state.rng)


def _save(folder: Path, step: int, value: float = 1.0, world_size: int = 1, ranks: range | None = None) -> None:
    """Rank r holds weight "w{r}", every rank a buffer "mean" of its own."""
    for rank in ranks if ranks is not None else range(world_size):
        state = RankState(
            weights={f"w{rank}": torch.full((3,), value + rank)}, buffers={"mean": torch.tensor([float(rank)])}, rng=rng_state()
        )
        save_checkpoint(folder, step, state, seed=5, rank=rank, world_size=world_size)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_training_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path, name: str) -> None:
    whole = _network()
    optimizer = OPTIMIZERS[name](whole.parameters())
    _train(whole, optimizer, range(7))
    save_checkpoint(tmp_path, 7, _state(whole, optimizer), seed=3, rank=0, world_size=1)
    _train(whole, optimizer, range(7, 15))

    checkpoint = newest(tmp_path)
    assert (checkpoint.step, checkpoint.seed, checkpoint.world_size) == (7, 3, 1)
    resumed = _network(seed=99)
    optimizer = OPTIMIZERS[name](resumed.parameters())
    _restore(resumed, optimizer, load_state(checkpoint, rank=0))
    _train(resumed, optimizer, range(checkpoint.step, 15))
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


def test_another_plan_takes_each_tensor_by_its_global_name(tmp_path: Path) -> None:
    """Written by a pipeline of two stages, read back by one process, and by stages cut elsewhere."""
    network = _network()
    optimizer = OPTIMIZERS["adam"](network.parameters())
    _train(network, optimizer, range(3))
    parameters, buffers = dict(network.named_parameters()), dict(network.named_buffers())
    states = {name: optimizer.state[value] for name, value in parameters.items()}
    for rank, layers in enumerate((("0.", "1."), ("4.",))):
        chosen = {key: value for key, value in parameters.items() if key.startswith(layers)}
        state = RankState(
            weights=chosen,
            buffers={key: value for key, value in buffers.items() if key.startswith(layers)},
            optimizer={key: states[key] for key in chosen},
        )
        save_checkpoint(tmp_path, 3, state, seed=0, rank=rank, world_size=2)
    checkpoint = newest(tmp_path)
    resumed = _network(seed=1)
    second = OPTIMIZERS["adam"](resumed.parameters())
    _restore(resumed, second, load_state(checkpoint))
    for one in (network, resumed):
        one[2].p = 0.0  # type: ignore[assignment]
    _train(network, optimizer, range(3, 9))
    _train(resumed, second, range(3, 9))
    for key, value in network.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    part = load_state(checkpoint, ["1.weight", "4.bias"])
    assert set(part.weights) == set(part.optimizer) == {"1.weight", "4.bias"}
    assert not part.buffers
    assert not part.rng


def _save_halves(folder: Path) -> Checkpoint:
    """Two ranks hold a half each of weight and momentum of "a" and "b"."""
    for rank in range(2):
        part = Fragment(start=2 * rank, stop=2 * rank + 2, shape=(4,))
        own = {name: torch.full((2,), float(rank)) for name in ("a", "b")}
        state = RankState(
            weights=own,
            optimizer={name: {"momentum_buffer": value.clone()} for name, value in own.items()},
            fragments={section: dict.fromkeys(own, part) for section in ("weights", "optimizer")},
        )
        save_checkpoint(folder, 10, state, seed=0, rank=rank, world_size=2)
    return newest(folder)


def test_one_parameter_at_a_time_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever scores the weights of a large model needs no memory for the optimizer's state."""
    joined: list[str] = []

    def counted(name: str, parts: Mapping[Fragment, torch.Tensor]) -> torch.Tensor:
        joined.append(name)
        return join(name, parts)

    monkeypatch.setattr(fragments, "join", counted)
    state = load_state(_save_halves(tmp_path))
    assert "a" in state.weights
    assert "c" not in state.weights
    assert (sorted(state.weights), len(state.optimizer)) == (["a", "b"], 2)
    assert not joined
    assert state.weights["b"].tolist() == [0, 0, 1, 1]
    assert joined == ["b"]
    assert state.optimizer["a"]["momentum_buffer"].tolist() == [0, 0, 1, 1]
    assert joined == ["b", "a"]


@pytest.mark.parametrize("halved", [True, False])
def test_an_optimizer_may_change_the_state_that_it_is_given(halved: bool, tmp_path: Path) -> None:
    if halved:
        found = _save_halves(tmp_path)
    else:
        state = RankState(weights={"a": torch.zeros(4)}, optimizer={"a": {"momentum_buffer": torch.tensor([0.0, 0, 1, 1])}})
        save_checkpoint(tmp_path, 10, state, seed=0, rank=0, world_size=1)
        found = next(checkpoints(tmp_path))
    loaded = load_state(found)
    taken = loaded.optimizer["a"]["momentum_buffer"]
    shutil.rmtree(tmp_path / "step-00000010")
    taken.add_(1)
    assert taken.tolist() == [1, 1, 2, 2]
    assert loaded.optimizer["a"]["momentum_buffer"].tolist() == [0, 0, 1, 1]


def test_parts_that_are_missing_are_named_when_they_are_asked_for(tmp_path: Path) -> None:
    part = Fragment(start=2, stop=4, shape=(4,))
    state = RankState(weights={"a": torch.zeros(2)}, fragments={"weights": {"a": part}})
    save_checkpoint(tmp_path, 10, state, seed=0, rank=0, world_size=1)
    found = load_state(next(checkpoints(tmp_path)))
    with pytest.raises(ExecutionError, match="elements 0 to 2 are missing"):
        found.weights["a"]


def test_a_file_system_that_maps_no_files_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, load = _save_halves(tmp_path), torch.load

    def without_mmap(path: Path, *, mmap: bool = False, **given: Any) -> Any:
        if mmap:
            raise RuntimeError("unable to mmap 8 bytes from file: No such device (19)")
        return load(path, **given)

    monkeypatch.setattr(torch, "load", without_mmap)
    assert load_state(found).weights["a"].tolist() == [0, 0, 1, 1]


def test_replicas_keep_their_own_buffers_and_random_state(tmp_path: Path) -> None:
    _save(tmp_path, 4, world_size=3)
    checkpoint = newest(tmp_path)
    for rank in range(3):
        state = load_state(checkpoint, rank=rank)
        assert state.buffers["mean"].item() == rank
        assert "cpu" in state.rng
        assert sorted(state.weights) == ["w0", "w1", "w2"]
    assert load_state(checkpoint).buffers["mean"].item() == 0


def test_views_are_saved_without_the_buffer_they_look_into(tmp_path: Path) -> None:
    flat = torch.zeros(1_000_000)
    save_checkpoint(tmp_path, 1, RankState(weights={"w": flat[:4].view(2, 2)}), seed=0, rank=0, world_size=1)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.pt")) < 10_000


class TestSpoiltCheckpoints:
    @pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
    def test_a_truncated_file_gives_way_to_the_one_before(self, tmp_path: Path, kept: float) -> None:
        _save(tmp_path, 10, world_size=2)
        _save(tmp_path, 20, world_size=2)
        path = tmp_path / "step-00000020" / "rank-0001.pt"
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * kept)])
        with pytest.warns(UserWarning, match=r"step-00000020 is not used: rank-0001\.pt has"):
            assert newest(tmp_path).step == 10

    def test_a_flipped_bit_is_noticed(self, tmp_path: Path) -> None:
        _save(tmp_path, 10)
        path = tmp_path / "step-00000010" / "rank-0000.pt"
        path.write_bytes(_flipped(path.read_bytes(), 4 * path.stat().st_size))
        with pytest.warns(UserWarning, match="damaged"):
            assert latest_checkpoint(tmp_path) is None

    def test_parts_of_two_attempts_are_not_mixed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        _save(tmp_path, 10, world_size=2, ranks=range(1))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        _save(tmp_path, 10, world_size=2, ranks=range(1, 2))
        with pytest.warns(UserWarning, match="has not finished"):
            assert latest_checkpoint(tmp_path) is None
        _save(tmp_path, 10, world_size=2, ranks=range(1))
        assert latest_checkpoint(tmp_path) is not None

    def test_leftovers_of_a_larger_plan_do_no_harm(self, tmp_path: Path) -> None:
        _save(tmp_path, 10, value=1.0, world_size=4)
        _save(tmp_path, 10, value=7.0, world_size=2)
        checkpoint = newest(tmp_path)
        assert checkpoint.world_size == 2
        assert sorted(load_state(checkpoint).weights) == ["w0", "w1"]
        assert load_state(checkpoint).weights["w1"][0].item() == 8.0

    def test_other_files_in_the_folder_are_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "step-notes").mkdir()
        (tmp_path / "notes.txt").write_text("mine")
        for step in (1, 2, 3, 4):
            _save(tmp_path, step)
        assert latest_checkpoint(tmp_path) is not None
        assert (tmp_path / "notes.txt").read_text() == "mine"
        assert (tmp_path / "step-notes").is_dir()

    def test_a_file_damaged_after_the_check_is_an_error(self, tmp_path: Path) -> None:
        _save(tmp_path, 10)
        checkpoint = newest(tmp_path)
        path = tmp_path / "step-00000010" / "rank-0000.pt"
        path.write_bytes(b"x" * path.stat().st_size)
        with pytest.raises(ExecutionError, match="older checkpoint"):
            load_state(checkpoint)

    def test_loading_runs_no_code(self, tmp_path: Path) -> None:
        class Attack:
            def __reduce__(self) -> tuple[object, tuple[str]]:
                return (os.mkdir, (str(tmp_path / "ran"),))

        _save(tmp_path, 10)
        checkpoint = newest(tmp_path)
        path = tmp_path / "step-00000010" / "rank-0000.pt"
        torch.save({"weights": {"w0": Attack()}}, path)
        entry = path.with_suffix(".json")
        entry.write_text(json.dumps({**json.loads(entry.read_text()), "size_bytes": path.stat().st_size}))
        with pytest.raises(ExecutionError):
            load_state(checkpoint)
        assert not (tmp_path / "ran").exists()


def test_only_the_newest_complete_ones_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        _save(tmp_path, step, world_size=2)
    _save(tmp_path, 40, world_size=2, ranks=range(1))
    assert [place.name for place in sorted(tmp_path.iterdir())] == ["step-00000020", "step-00000030", "step-00000040"]


@given(plan=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=8))
@settings(max_examples=40)
def test_the_newest_whole_checkpoint_survives_any_history(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[int, bool]]
) -> None:
    """Saves at growing steps, some of which only rank 0 of 2 finished: the last whole one is what is found."""
    folder = tmp_path_factory.mktemp("history")
    step, whole = 0, None
    for gap, finished in plan:
        step += gap
        _save(folder, step, world_size=2, ranks=range(2 if finished else 1))
        whole = step if finished else whole
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = latest_checkpoint(folder)
    assert (found.step if found else None) == whole


def test_missing_names_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    checkpoint = newest(tmp_path)
    with pytest.raises(ExecutionError, match=r"holds no 'head\.weight'"):
        load_state(checkpoint, ["w0", "head.weight"])
    with pytest.raises(ExecutionError, match=r"shape \(3,\) in the checkpoint and \(4,\) in the model"):
        restore_tensors({"w0": torch.zeros(4)}, load_state(checkpoint).weights)
    with pytest.raises(ExecutionError, match="holds no 'x'"):
        restore_tensors({"x": torch.zeros(4)}, load_state(checkpoint).weights)


def test_an_unwritable_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExecutionError, match="rank 0 cannot write its checkpoint"):
        _save(tmp_path / "file", 1)


def _save_forever(folder: Path) -> None:
    torch.set_num_threads(1)  # a fork has none of its parent's threads, and waits for them
    for step in range(1, 10**6):
        state = RankState(weights={"w": torch.full((200_000,), float(step))})
        save_checkpoint(folder, step, state, seed=0, rank=0, world_size=1)


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for trial in range(15):
        folder = tmp_path / str(trial)
        process = context.Process(target=_save_forever, args=(folder,))
        process.start()
        deadline = time.monotonic() + 20
        while not (folder / "step-00000003").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.0013 * trial)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint = newest(folder)
        weights = load_state(checkpoint).weights["w"]
        assert torch.equal(weights, torch.full((200_000,), float(checkpoint.step)))


def _flipped(content: bytes, bit: int) -> bytes:
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << (bit % 8)
    return bytes(damaged)


def test_every_flipped_bit_of_a_manifest_means_the_checkpoint_before(tmp_path: Path) -> None:
    """All of them, in a manifest with fragments; and none is accepted, ends in a traceback, or finds nothing to go on with."""
    state = RankState(
        weights={"w": torch.ones(2)}, fragments={"weights": {"w": Fragment(dim=0, blocks=1, shard=0, ways=1, runs=(1, 1))}}
    )
    for step in (10, 20):
        save_checkpoint(tmp_path, step, state, seed=5, rank=0, world_size=1)
    path = tmp_path / "step-00000020" / "rank-0000.json"
    content = path.read_bytes()
    assert _found(tmp_path) == 20
    for bit in range(8 * len(content)):
        path.write_bytes(_flipped(content, bit))
        with pytest.raises((ValueError, OSError)):
            read_manifest(path)
        if bit % 16 == 0:  # what `latest_checkpoint` does with these errors is the same for all
            assert _found(tmp_path) == 10, (bit, path.read_bytes())


def _found(folder: Path) -> int | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = latest_checkpoint(folder)
    return None if found is None else found.step


def _rewritten(path: Path, **changes: object) -> None:
    """The manifest of another hand, with a digest that is right."""
    document = json.loads(path.read_text()) | changes
    del document["digest"]
    document["digest"] = hashlib.sha256(json.dumps(document).encode()).hexdigest()
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": 19}, "ranks 0 and 1 disagree on step or seed"),
        ({"seed": 6}, "ranks 0 and 1 disagree on step or seed"),
        ({"rank": 0}, "is of rank 0"),
        ({"world_size": 10**9}, "cannot be read"),
        ({"world_size": 10**5}, "has not finished"),
        ({"step": True}, "cannot be read"),
        ({"names": {"weights": [1]}}, "cannot be read"),
        ({"fragments": {"weights": {"w1": [0, 1, 0, 10**9, 0, -1, [], []]}}}, "cannot be read"),
        ({"new": 1}, "cannot be read"),
    ],
)
def test_manifests_that_say_what_cannot_be(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    for step in (10, 20):
        _save(tmp_path, step, world_size=2)
    _rewritten(tmp_path / "step-00000020" / "rank-0001.json", **changes)
    with pytest.warns(UserWarning, match=said):
        assert newest(tmp_path).step == 10


def test_a_checkpoint_of_a_later_version_is_told_and_an_older_one_is_used(tmp_path: Path) -> None:
    for step in (10, 20):
        _save(tmp_path, step)
    _rewritten(tmp_path / "step-00000020" / "rank-0000.json", schema_version=9)
    with pytest.warns(UserWarning, match="step-00000020 is not used: .*a newer parsim wrote it"):
        found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 10
    assert has_checkpoints(tmp_path), "and where there is no older one, nobody starts anew by mistake"


def test_a_folder_that_is_renamed_is_no_other_step(tmp_path: Path) -> None:
    _save(tmp_path, 10)
    (tmp_path / "step-00000010").rename(tmp_path / "step-00000099")
    assert _found(tmp_path) is None


def test_what_a_dead_rank_left_half_removed_goes_too(tmp_path: Path) -> None:
    """Rank 0 removes old checkpoints file by file, and may be ended in between."""
    for step in (10, 20):
        _save(tmp_path, step, world_size=2)
    (tmp_path / "step-00000010" / "rank-0000.json").unlink()
    assert [place.name for place in discard_unfinished(tmp_path)] == ["step-00000010"]
    assert [place.name for place in tmp_path.iterdir()] == ["step-00000020"]
    assert _found(tmp_path) == 20


def test_what_dead_ranks_left_half_written_is_removed_and_nothing_else(tmp_path: Path) -> None:
    _save(tmp_path, 10, world_size=2)
    _save(tmp_path, 20, world_size=2, ranks=range(1))
    (tmp_path / "step-00000030").mkdir()
    (tmp_path / "step-00000030" / ".rank-0000.pt.123.partial").write_bytes(b"half")
    assert [place.name for place in discard_unfinished(tmp_path)] == ["step-00000030", "step-00000020"]
    assert [place.name for place in tmp_path.iterdir()] == ["step-00000010"]
    _save(tmp_path, 20, world_size=2)
    (tmp_path / "step-00000020" / "rank-0001.json").write_text("{")
    assert discard_unfinished(tmp_path) == []
    assert _found(tmp_path) == 10


# best/ holds the best checkpoint of the training as it is now, wherever it went on from.

PLACE: Any = SimpleNamespace(rank=0)


class Training:
    """One rank that scores what it is told to."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, every: int) -> None:
        self.folder, self.every, self.scores = folder, every, dict[int, float]()
        self.step_number, self.notes = 0, dict[str, Any]()
        self.run: Any = SimpleNamespace(recipe=SimpleNamespace(ema=None))
        self.layout: Any = SimpleNamespace(plan=SimpleNamespace(world_size=1))
        self.stage: Any = SimpleNamespace(device="cpu")
        self.mixing = self.rate = None
        monkeypatch.setattr(validation, "done_by_rank_0", lambda place, work: work())
        monkeypatch.setattr(validation, "value_of_rank_0", lambda value: value)
        monkeypatch.setattr(validation, "run_dataset", lambda *_: ())
        monkeypatch.setattr(validation, "whole_weights", lambda *_, **__: ({}, {}))
        monkeypatch.setattr(validation, "scores", lambda *_, **__: {"loss": self.scores[self.step_number]})

    def save(self, folder: Path, *, keep: int = 2) -> None:
        weights = {"w": torch.full((2,), float(self.step_number))}
        state = RankState(weights=weights, buffers={}, rng=rng_state(), progress=dict(self.notes))
        save_checkpoint(folder, self.step_number, state, seed=0, rank=0, world_size=1, keep=keep)

    def resume(self, step: int) -> Validation:
        """From the checkpoint of that step; 0: from the beginning."""
        self.step_number, self.notes = step, {}
        if step:
            found = newest(self.folder / "checkpoints")
            assert found.step == step
            self.notes = dict(load_state(found).progress)
        made = Validation(rule=EvaluationRule(), folder=self.folder / "best", every=1, steps=100)
        made.begin(self, PLACE)  # type: ignore[arg-type]
        return made

    def go(self, looks: Validation, scores: dict[int, float]) -> None:
        """The steps with these scores, and a checkpoint every `every` of them."""
        self.scores |= scores
        for step in scores:
            self.step_number = step
            looks.look(self, PLACE)  # type: ignore[arg-type]
            if step % self.every == 0:
                self.save(self.folder / "checkpoints")
                looks.has_saved(PLACE)

    def best(self) -> int | None:
        found = latest_checkpoint(self.folder / "best")
        return None if found is None else found.step


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(tmp_path, monkeypatch, every=4)


def test_a_better_one_behind_the_checkpoint_is_not_that_of_the_training_that_goes_on(training: Training) -> None:
    """Steps 5 and 6 were better, and are trained anew under other settings, which makes them worse."""
    training.go(training.resume(0), {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.5, 5: 2.0, 6: 1.0})
    assert training.best() == 6
    again = training.resume(4)
    assert (again.best.step, again.best.score, training.best()) == (2, 3.0, 2)
    training.go(again, {5: 3.2, 6: 3.1})
    assert (again.best.step, training.best()) == (2, 2)
    training.go(again, {7: 2.9})
    assert (again.best.step, training.best()) == (7, 7)


def test_every_checkpoint_that_is_kept_finds_its_best_one_and_few_others_stay(training: Training) -> None:
    """Every score is better than the one before it. The newest checkpoint is damaged, so the one before it is taken."""
    training.go(training.resume(0), {step: 100.0 - step for step in range(1, 43)})
    assert len(list((training.folder / "best").iterdir())) <= 5
    for path in (training.folder / "checkpoints" / "step-00000040").iterdir():
        path.write_bytes(b"x")
    with pytest.warns(UserWarning, match="is not used"):
        again = training.resume(36)
    assert (again.best.step, training.best()) == (36, 36)


def test_without_checkpoints_of_the_training_the_best_starts_anew(training: Training) -> None:
    training.go(training.resume(0), {1: 5.0, 2: 3.0})
    again = training.resume(0)
    assert (again.best.step, training.best()) == (0, None)


def test_a_best_checkpoint_that_cannot_be_read_is_told(training: Training) -> None:
    training.go(training.resume(0), {1: 5.0, 2: 3.0, 3: 3.5, 4: 4.0})
    (training.folder / "best" / "step-00000002" / "rank-0000.pt").write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"the best checkpoint \(step 2\) cannot be read .* the next validation is the best"):
        again = training.resume(4)
    assert (again.best.step, again.best.since) == (0, 2)
    training.go(again, {5: 9.0})
    assert (again.best.step, training.best()) == (5, 5)
    assert training.notes[STATE].tolist() == [9.0, 5.0, 0.0]


def test_checkpoints_of_later_steps_are_set_aside(training: Training) -> None:
    """Else they would count among the two that are kept, and be read once they can be."""
    folder = training.folder / "checkpoints"
    for step in (2, 4, 6):
        training.step_number = step
        training.save(folder, keep=9)
    moved = set_aside_newer(folder, 4)
    assert [place.name for place in moved] == [f"{UNUSED}step-00000006"]
    found = newest(folder)
    assert found.step == 4
    training.step_number = 6
    training.save(folder, keep=9)
    assert len(set_aside_newer(folder, 4)) == 1
    assert sorted(place.name for place in folder.iterdir()) == ["step-00000002", "step-00000004", f"{UNUSED}step-00000006"]


def test_after_going_on_the_best_of_the_checkpoint_before_stays(training: Training) -> None:
    """The first checkpoint behind it is damaged, so the training goes on from the same one again."""
    training.go(training.resume(0), {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.5})
    training.go(training.resume(4), {5: 2.0, 6: 1.0, 7: 1.5, 8: 1.6})
    for path in (training.folder / "checkpoints" / "step-00000008").iterdir():
        path.write_bytes(b"x")
    with pytest.warns(UserWarning, match="is not used"):
        again = training.resume(4)
    assert (again.best.step, training.best()) == (2, 2)


# When checkpoints are written where nobody says: how much is lost at most, and what they cost.

STEPS = 3000


def written(monkeypatch: pytest.MonkeyPatch, step_s: float, save_s: float, state_bytes: int = 0) -> tuple[list[float], float]:
    """The seconds at which a training of one rank with steps and checkpoints of these lengths wrote, and its whole length."""
    now = [100.0]
    monkeypatch.setattr("parsim.execute.train.time.monotonic", lambda: now[0])
    monkeypatch.setattr("parsim.execute.train.gather_values", lambda value: [value])
    times = CheckpointTimes(7, state_bytes)
    saves = []
    for done in range(8, 8 + STEPS):
        now[0] += step_s
        if times.due(done, step_s):
            now[0] += save_s
            saves.append(now[0] - 100.0)
            assert f"after step {done}, in " in times.written(done, step_s, save_s)
    return saves, now[0] - 100.0


@settings(max_examples=60, deadline=None)
@given(step_s=st.floats(1e-3, 5.0), save_s=st.floats(1e-3, 3.0))
def test_little_is_lost_and_little_is_spent(step_s: float, save_s: float) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        saves, whole_s = written(monkeypatch, step_s, save_s)
    cheap_s = save_s / CheckpointTimes.SHARE
    for before, after in zip([0.0, *saves], [*saves, whole_s], strict=True):
        most_s = max(cheap_s, min(60.0, max(5.0, 0.25 * before)))
        assert after - before <= most_s + save_s + 2 * step_s + 5 * step_s * (not before)
    assert sum(save_s for _ in saves[1:]) <= 0.021 * whole_s + save_s


def test_short_steps_make_one_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    saves, _ = written(monkeypatch, 1.0, 0.05)
    gaps = [after - before for before, after in pairwise(saves[20:])]
    assert gaps
    assert all(60 <= gap <= 62 for gap in gaps)


def test_the_first_one_of_a_large_model_waits_for_a_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GB take 20 s at 200 MB/s, which is 2% of 1,000 s."""
    saves, _ = written(monkeypatch, 1.0, 0.5, 4_000_000_000)
    assert saves[0] == pytest.approx(1005, abs=3)
    assert saves[1] - saves[0] == pytest.approx(60, abs=2)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[Tensor, dict[Fragment, Tensor]]:
    """A tensor and a complete set of its fragments, in any order."""
    ways, blocks, dim = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 1))
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    shape[dim] *= ways * blocks
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float64).reshape(shape)
    fragments: dict[Fragment, Tensor] = {}
    for shard in range(ways):
        local = piece(whole, ParameterShard(name="w", dim=dim, blocks=blocks), shard, ways)
        part = Fragment(dim=dim, blocks=blocks, shard=shard, ways=ways)
        if draw(st.booleans()):
            fragments[part] = local
            continue
        cuts = sorted(draw(st.sets(st.integers(1, max(1, local.numel() - 1)), max_size=4)) - {local.numel()})
        for start, stop in zip([0, *cuts], [*cuts, local.numel()], strict=True):
            own = part._replace(start=start, stop=stop, shape=tuple(local.shape))
            fragments[own] = local.reshape(-1)[start:stop]
    order = draw(st.permutations(list(fragments)))
    return whole, {fragment: fragments[fragment] for fragment in order}


@given(cut_tensors())
def test_fragments_in_any_order_make_the_whole(cut: tuple[Tensor, dict[Fragment, Tensor]]) -> None:
    whole, fragments = cut
    assert torch.equal(join("w", fragments), whole)
    state = {fragment: {"momentum_buffer": tensor, "step": torch.tensor(4.0)} for fragment, tensor in fragments.items()}
    joined = join_state("w", state)
    assert torch.equal(joined["momentum_buffer"], whole)
    assert joined["step"].item() == 4


@given(cut_tensors(), st.data())
def test_without_any_one_of_them_there_is_no_whole(cut: tuple[Tensor, dict[Fragment, Tensor]], data: st.DataObject) -> None:
    _, fragments = cut
    if len(fragments) == 1:
        return
    lost = data.draw(st.sampled_from(list(fragments)))
    with pytest.raises(ExecutionError, match=r"'w': .* (missing|are there)"):
        join("w", {fragment: tensor for fragment, tensor in fragments.items() if fragment != lost})


def test_a_number_keeps_its_shape_and_its_momentum() -> None:
    """A 0-dim parameter in a divided bucket is saved as a flat range of one element."""
    scalar = Fragment(start=0, stop=1, shape=())
    assert join("scale", {scalar: torch.tensor([2.0])}).shape == ()
    assert is_per_element(torch.tensor(1.0), "exp_avg")
    assert not is_per_element(torch.tensor(1.0), "step")
    assert not is_per_element(None, "momentum_buffer")
    state = join_state("scale", {scalar: {"exp_avg": torch.tensor([0.5]), "step": torch.tensor(3.0)}})
    assert state["exp_avg"].shape == ()
    assert state["step"].item() == 3


def test_a_whole_tensor_is_its_own_fragment() -> None:
    tensor = torch.ones(2, 2)
    assert join("w", {WHOLE: tensor}) is tensor
