"""Published runs as questions: reading rows, Models from shapes, units, and rows that are broken."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "published"
HEAD = (
    "id,source,hardware,gpus,model,params,layers,hidden,heads,seq,global_batch,micro_batch,tp,pp,dp,cp,ep,vpp,zero_stage,"
    "recompute,precision,value,unit,notes"
)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def row(**values: str) -> dict[str, str]:
    given = {
        "id": "megatron-x-0001",
        "hardware": "A100-80GB SXM",
        "gpus": "8",
        "model": "GPT",
        "layers": "4",
        "hidden": "1024",
        "heads": "16",
        "seq": "1024",
        "global_batch": "16",
        "micro_batch": "2",
        "tp": "2",
        "pp": "2",
        "dp": "2",
        "recompute": "full",
        "precision": "bf16",
        "unit": "s/iteration",
    }
    return dict.fromkeys(HEAD.split(","), "") | given | values


def test_numbers_as_sources_write_them() -> None:
    from rows import number

    assert [number(text) for text in ("39.1e9", "1.7B", "2,048", "", None, "n/a", "56 (x)")] == [
        39.1e9, 1.7e9, 2048, None, None, None, 56,
    ]  # fmt: skip


@pytest.mark.parametrize("granularity", ["layer", "sublayer", "sequence"])
@pytest.mark.parametrize("selective", [False, True])
def test_a_gpt_by_shape_is_the_gpt_that_is_traced(granularity: str, selective: bool) -> None:
    """Parameters and flop of the zoo's GPT, whatever the components."""
    pytest.importorskip("torch")
    from parsim.model.from_module import model_from_module
    from parsim.model.transformer.build import transformer
    from parsim.model.transformer.shape import gpt
    from parsim.model.transformer.software import Software
    from parsim.model.transformer.sublayers import SamplePart
    from parsim.model.zoo.gpt import GPT

    module = GPT(hidden=128, layers=3, heads=4, vocab=512, seq=64, dropout=0.0)
    traced = model_from_module(module, input_shape=(64,))
    software = Software(flash=True, dropout=False, selective=selective)
    made = transformer(gpt("gpt", 3, 128, 4, 512), software, SamplePart(tokens=64, context=64), granularity)
    assert made.parameter_count == traced.parameter_count

    def products(model: object) -> float:
        return sum(
            operator.forward_flop * operator.count
            for component in model.components  # type: ignore[attr-defined]
            for operator in component.operators
            if operator.kind in ("matmul", "attention")
        )

    assert products(made) == pytest.approx(products(traced), rel=1e-12)


def test_shards_of_a_layer_hold_it_all() -> None:
    """tp shards together: the parameters once, but for the norms and biases that each holds whole."""
    from parsim.model.shard.narrow import narrow
    from parsim.model.transformer.build import transformer
    from parsim.model.transformer.shape import gpt
    from parsim.model.transformer.software import Software
    from parsim.model.transformer.sublayers import RULE, SamplePart

    model = transformer(gpt("gpt", 2, 256, 8), Software(), SamplePart(tokens=128, context=128), "sublayer")
    layer = model.component("h.1.mlp")
    shard = narrow(layer, RULE, 4)
    whole = {parameter.name: parameter.elements for parameter in layer.parameters}
    for parameter in shard.parameters:
        ways = 4 if parameter.name.endswith(("up.weight", "up.bias", "down.weight")) else 1
        assert parameter.elements * ways == whole[parameter.name]


def test_full_recomputation_sends_the_sums_again() -> None:
    from question import question_of
    from rows import row_of

    asked = question_of(row_of(row(id="megatron-sc21-0001")))
    assert len(asked.plan.segments) == 4
    assert not asked.plan.executable
    assert asked.plan.blocking_transfers
    assert "micro-batch" not in " ".join(asked.assumed)


def test_flop_are_counted_as_megatron_counts_them() -> None:
    """Narayanan et al. (2021), equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h)."""
    from question import question_of
    from quoted import in_unit
    from rows import row_of

    asked = question_of(row_of(row(unit="TFLOP/s/GPU (hardware, incl. recompute)")))
    batch, seq, layers, hidden, vocab = 16, 1024, 4, 1024, 51200
    flop = 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    assert in_unit(asked, 2.0) == pytest.approx(flop / 2 / 8 / 1e12, rel=1e-9)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"hardware": "RTX-2080+RTX-3090"}, "GPU"),
        ({"model": "T5 3B", "hidden": ""}, "decoder-only"),
        ({"model": "unheard-of", "hidden": ""}, "shape"),
        ({"dp": "3"}, "not 8 GPUs"),
        ({"heads": "15", "tp": "8", "pp": "1", "dp": "1"}, "heads"),
        ({"unit": "furlongs"}, "unit"),
        ({"layers": "none", "params": ""}, "layers"),
    ],
)
def test_a_row_that_cannot_be_expressed_says_why(broken: dict[str, str], reason: str) -> None:
    from predict import predict
    from rows import row_of

    found = predict(row_of(row(**broken)))
    assert found.value is None
    assert reason in found.why


def test_the_command_answers_every_row(tmp_path: Path) -> None:
    """A value is never read: the answer is the same without it."""
    from predict import COLUMNS, main

    source, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    rows = [row(value="1"), row(id="megatron-x-0002", value=""), row(id="x-3", hardware="abacus"), {"id": "only"}]
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, HEAD.split(","))
        writer.writeheader()
        writer.writerows(rows)
    assert main([str(source), "--out", str(out), "--jobs", "1"]) == 0
    with out.open(newline="") as file:
        answers = list(csv.DictReader(file))
    assert [tuple(answer) for answer in answers] == [COLUMNS] * 4
    assert [answer["id"] for answer in answers] == ["megatron-x-0001", "megatron-x-0002", "x-3", "only"]
    assert answers[0]["predicted"] == answers[1]["predicted"] != ""
    assert float(answers[0]["p05"]) < float(answers[0]["predicted"]) < float(answers[0]["p95"])
    assert answers[0]["fits"] == "true"
    assert answers[2]["predicted"] == answers[3]["predicted"] == ""
    assert answers[2]["why"]
    assert main([str(tmp_path / "none.csv"), "--out", str(out)]) == 1


def teardown_module() -> None:
    """Names as common as `rows` must not shadow those of other experiments."""
    for name in ("rows", "shapes", "rules", "machines", "question", "quoted", "answer", "predict"):
        sys.modules.pop(name, None)
