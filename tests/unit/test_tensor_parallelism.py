"""`mesh = { tp = N }` alone is tensor parallelism: one answer by every strategy and at every granularity, or one refusal."""

import json
from pathlib import Path
from typing import Any

import pytest

import parsim as ps
from parsim.errors import ParsimError
from parsim.model.catalogue.names import NAMED
from parsim.model.catalogue.zoo import ZOO
from parsim.model.load import load_model
from parsim.model.model import GRANULARITIES
from parsim.model.spec import ModelSpec
from parsim.search.tensor import limits_of
from tests.hugging_face_configs import SMALL
from tests.quick import some_quick

WAYS = (2, 4, 8)
WITHIN = 0.02
"""A plan by hand against the search, which also chooses bucket sizes and ZeRO stages."""


def asked(model: str, tp: int, strategy: str, granularity: str | None, cluster: str, **keys: Any) -> tuple[float, int] | str:
    """Seconds and bytes of the plan, all of whose repeated layers are cut over the tp ranks; the message of a refusal."""
    settings = {"plan.mesh": {"tp": tp}, "plan.strategy": strategy, "cluster.devices": tp, **keys}
    if granularity is not None:
        settings["model.granularity"] = granularity
    try:
        chosen = ps.plan(model, cluster=cluster, global_batch=8, settings=settings).chosen
    except ParsimError as error:
        return str(error).rpartition(f"tp = {tp} does not divide")[2]
    cut = limits_of(chosen.problem)
    placements = dict(entry for stage in chosen.plan.stages for entry in stage.placed())
    whole = [name for name, own in cut.items() if own.repeats and placements[name].ways != tp]
    assert not whole, f"{whole} of {model} are not cut over tp = {tp}"
    return chosen.step_s.median, max(chosen.peak_memory_bytes)


def check(model: str, tp: int, cluster: str, strategies: tuple[str, ...] = ("mp", "custom"), **keys: Any) -> None:
    answers = {
        (strategy, granularity): asked(model, tp, strategy, granularity, cluster, **keys)
        for strategy in strategies
        for granularity in (None, *GRANULARITIES)
    }
    first = answers[strategies[0], None]
    for (strategy, granularity), answer in answers.items():
        if isinstance(first, str) or isinstance(answer, str):
            assert answer == first, (strategy, granularity)
            assert any(text in first for text in ("the nearest that do", "use pp and dp", "No plan fits. The nearest is"))
        else:
            assert answer == answers[strategy, None], (strategy, granularity)
            assert answer == pytest.approx(first, rel=WITHIN), (strategy, granularity)


@pytest.mark.parametrize("tp", some_quick(WAYS, 4))
@pytest.mark.parametrize("name", some_quick([*ZOO], "gpt_small", "bert_small"))
def test_the_zoo(name: str, tp: int) -> None:
    check(name, tp, "dgx1-v100-32gb")


@pytest.mark.parametrize("name", some_quick([name for name in NAMED if NAMED[name].shape is not None], "gpt3-1.3b"))
def test_named_families(name: str) -> None:
    check(name, 8, "8xh100-sxm", ("custom",), **{"model.args": {"layers": 4}})


@pytest.mark.slow
@pytest.mark.hf
@pytest.mark.parametrize("tp", WAYS[:2])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "qwen2", "mistral"])
def test_configs_of_hugging_face(name: str, tp: int, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL[name] | {"vocab_size": 64}))  # a tied table of 50 rows has no rule that its head has
    check(str(path), tp, "dgx1-v100-32gb", ("custom",))


def test_the_layers_must_divide() -> None:
    """12 heads on 8 ranks: no attention that every rank computes whole."""
    for strategy in ("mp", "custom"):
        refused = asked("gpt", 8, strategy, None, "dgx1-v100-32gb")
        assert refused == " the layers of gpt: h.0.attn is cut by heads+row (12); the nearest that does: tp = 4"


def test_plans_by_hand_of_small_batches() -> None:
    """Tensor parallelism takes any batch, data parallelism on the tp axis one that divides, and is called so."""
    keys = {"cluster.devices": 4, "plan.strategy": "custom", "plan.mesh": {"tp": 4}}
    assert ps.plan("gpt_small", cluster="dgx1-v100-32gb", global_batch=1, settings=keys).chosen.fits
    by_samples = {**keys, "plan.placements": {"*": "batch"}}
    with pytest.raises(ParsimError, match="cuts each microbatch of 1 samples into 4 pieces, which does not divide"):
        ps.plan("gpt_small", cluster="dgx1-v100-32gb", global_batch=1, settings=by_samples)
    assert "use DDP (4-way data parallelism)" in str(
        ps.plan("gpt_small", cluster="dgx1-v100-32gb", global_batch=8, settings=by_samples)
    )


def test_granularity_counts_without_tensor_parallelism_and_for_names() -> None:
    names = {"cluster.devices": 2, "plan.strategy": "custom", "plan.mesh": {"tp": 2}, "plan.placements": {"h.*": "batch"}}
    for granularity in GRANULARITIES:
        for settings in ({"plan.strategy": "dp"}, names):
            keys = {"model.granularity": granularity, **settings}
            answer = ps.plan("gpt_small", cluster="dgx1-v100-32gb", global_batch=8, settings=keys)
            assert answer.problem.model.granularity == granularity


def test_a_table_that_no_rules_cut_alike_is_whole_and_named(tmp_path: Path) -> None:
    """50 words do not divide over 4 ranks, and 64 channels do: the embedding alone could be cut."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 50}
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "max_position_embeddings": 32, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    keys = {"plan.strategy": "custom", "plan.mesh": {"tp": 4}, "model.input_shape": [32]}
    answer = ps.plan(tmp_path / "config.json", cluster="4xh100-sxm", global_batch=32, settings=keys)
    placed = dict(entry for stage in answer.prediction.plan.stages for entry in stage.placed())
    assert placed["bert.embeddings.word_embeddings"].kind == placed["cls"].kind == "replicate"
    layers = [name for name in placed if name.endswith((".attention", ".intermediate.dense"))]
    assert len(layers) == 4
    assert all(placed[name].kind == "shard" for name in layers)
    assert any("word_embeddings and cls whole on every rank" in warning for warning in answer.prediction.warnings)


def test_layers_that_are_cut_in_part_are_named() -> None:
    """A Model that was traced by blocks cannot be cut anew: its attention runs whole on every rank."""
    keys = {"cluster.devices": 2, "plan.mesh": {"tp": 2}}
    text = "tensor parallelism cuts layers of gpt_small in part: 2 of 4 products of h.0 run whole on every rank"
    for granularity in GRANULARITIES:
        model = load_model(ModelSpec(name="gpt_small"), granularity=granularity)
        answer = ps.plan(model, cluster="dgx1-v100-32gb", global_batch=8, settings=keys)
        assert any(text in warning for warning in answer.chosen.warnings) == (granularity == "block")
