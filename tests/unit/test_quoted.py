"""Figures that people quote: FLOP by two published formulas, MFU and HFU, days, price, failures, and what would be faster."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parsim
from parsim.app.answer import Answer
from parsim.app.check import parse_faster, what_would
from parsim.app.large import DEVICE_MTBF_HOURS, HOUR_S, RunningCosts, losses_of, training_run
from parsim.errors import ConfigError
from parsim.model.catalogue.names import NAMED
from parsim.model.load import load_model
from parsim.model.spec import ModelSpec
from parsim.predict.breakdown import model_flop, recomputed_flop, tokens_per_sample
from parsim.predict.result import Interval
from parsim.units import DAY_S, format_money
from tests.commands import status_of

DP = {"plan.strategy": "dp", "plan.zero_stage": 3, "plan.microbatches": 2, "plan.recompute": "none"}


def operation(mtbf_s: float = 1e9, checkpoint_s: float = 60.0, restart_s: float = 600.0) -> RunningCosts:
    return RunningCosts(
        usd_per_hour=2.0, price_source="given", busy_power_w=500.0, device_mtbf_s=mtbf_s, mtbf_source="given",
        checkpoint_s=checkpoint_s, restart_s=restart_s,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["gpt-22b", "gpt3-175b", "gpt-1t"])
def test_megatron_and_palm_count_the_same_flop(name: str) -> None:
    """Narayanan et al. (2021), equation 3 without its recomputed forward, and 6N + 12LHQT (Chowdhery et al. 2022)."""
    spec = ModelSpec(name=name)
    model, row = load_model(spec), NAMED[name]
    shape, seq = row.shape, row.seq
    assert shape is not None
    layers, hidden, vocab = shape.layers, shape.hidden, shape.vocab
    megatron = 72 * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    assert model_flop(model) == pytest.approx(megatron, rel=1e-12)
    weights = 12 * layers * hidden**2 + vocab * hidden
    palm = seq * (6 * weights + 12 * layers * shape.heads * shape.dim * seq)
    assert megatron == pytest.approx(palm, rel=1e-12)
    assert weights == pytest.approx(model.parameter_count, rel=2e-3)
    scores = 12 * layers * hidden * seq**2
    assert model_flop(model) - model_flop(model, causal=True) == pytest.approx(scores / 2, rel=1e-12)


def test_experts_count_those_that_a_token_visits() -> None:
    mixture = load_model(ModelSpec(name="mixtral-8x7b"))
    per_token = model_flop(mixture) / tokens_per_sample(mixture)
    active = 12.9e9  # as published
    scores = 12 * 32 * 32 * 128 * 8192
    assert per_token == pytest.approx(6 * active + scores, rel=0.03)


@pytest.mark.parametrize(("name", "tokens"), [("gpt", 1024), ("bert", 512), ("llama3-8b", 8192), ("resnet50", 0)])
def test_tokens_of_a_sample(name: str, tokens: int) -> None:
    assert tokens_per_sample(load_model(ModelSpec(name=name))) == tokens


def test_one_number_per_sample_is_no_token() -> None:
    """A time step or a class that an embedding reads, as in a diffusion model."""
    torch = pytest.importorskip("torch")
    from parsim.model.load import model_from_module

    conditioned = torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Linear(4, 4))
    assert tokens_per_sample(model_from_module(conditioned, torch.tensor([0, 7, 49]))) == 0
    assert tokens_per_sample(model_from_module(conditioned, torch.zeros(3, 5, dtype=torch.long), loss="cross_entropy")) == 5


@pytest.fixture(scope="module")
def answer() -> Answer:
    return parsim.plan(
        "llama3-8b", cluster="8xh100-sxm", global_batch=16, args={"layers": 2}, seq=4096, tokens=1e12, settings=DP
    )


def test_an_answer_quotes_itself(answer: Answer) -> None:
    found = answer.prediction.quoted
    assert found is not None
    step_s = answer.prediction.step_s.median
    assert found.tokens_per_s.median == pytest.approx(16 * 4096 / step_s)
    assert found.tokens_per_s_per_device.median == pytest.approx(found.tokens_per_s.median / 8)
    flop = model_flop(answer.problem.model) * 16
    assert found.mfu == pytest.approx(flop / step_s / 8 / 989e12)
    assert 0 < found.mfu_causal < found.mfu < 1
    assert found.hfu == pytest.approx(found.mfu, rel=1e-12)
    document = json.loads(json.dumps(answer.to_dict()))["quoted"]
    assert document["tokens_per_s"]["median"] == found.tokens_per_s.median
    assert sum(document["memory_bytes"].values()) == max(answer.prediction.peak_memory_bytes)
    assert document["training"]["steps"] == math.ceil(1e12 / (16 * 4096))
    assert document["training"]["usd_per_device_hour"] == 2.95
    assert document["training"]["usd"] == pytest.approx(2.95 * document["training"]["device_hours"])
    assert any("MFU" in line and "989 dense bf16" in line for line in answer.lines())


def test_hardware_flop_count_recomputation(answer: Answer) -> None:
    again = parsim.plan(
        "llama3-8b", cluster="8xh100-sxm", global_batch=16, args={"layers": 2}, seq=4096,
        settings=DP | {"plan.recompute": ["h.*"]},
    )  # fmt: skip
    found = again.prediction.quoted
    assert found is not None
    model = again.problem.model
    layers = model_flop(model) - 6 * 4096 * 4096 * 128256
    assert recomputed_flop(model, again.prediction.plan) == pytest.approx(layers / 3)
    assert found.hfu / found.mfu == pytest.approx(1 + layers / 3 / model_flop(model))


def test_other_models_have_no_such_figures() -> None:
    found = parsim.plan("mlp", cluster="dgx1-v100-32gb", global_batch=64, devices=2, strategy="dp")
    assert found.prediction.quoted is None
    assert found.to_dict()["quoted"] is None


def test_days_price_and_energy_are_plain_arithmetic() -> None:
    step = Interval(median=2.0, p05=1.0, p95=4.0)
    own = operation(mtbf_s=1e15, checkpoint_s=1e-3, restart_s=0)
    run = training_run(1e9, 1000, step, own, unit="tokens", devices=8, paid=16)
    assert run.steps == 1_000_000
    assert run.days.median == pytest.approx(2e6 / DAY_S)
    assert run.device_hours == pytest.approx(2e6 / HOUR_S * 16, rel=1e-3)
    assert run.usd == pytest.approx(2 * run.device_hours)
    assert run.energy_kwh == pytest.approx(0.5 * run.device_hours / 2)


def test_samples_to_train_on_have_a_time_and_a_price() -> None:
    """Ten epochs of 6,400 samples: 1,000 steps of 64, of which all eight devices are paid for."""
    answer = parsim.plan(
        "mlp",
        cluster="dgx1-v100-32gb",
        global_batch=64,
        strategy="dp",
        samples=64_000,
        settings={"cluster.usd_per_hour": 3.0},
    )
    run = answer.to_dict()["samples_run"]
    assert (run["samples"], run["steps"], run["devices_paid"]) == (64_000, 1000, 8)
    assert run["days"]["p95"] == pytest.approx(1000 * answer.prediction.step_s.p95 / DAY_S)
    assert run["usd"] == pytest.approx(3 * run["device_hours"])
    told = "\n".join(answer.heading())
    assert "64,000 samples: 1,000 steps, " in told
    assert f"price: {format_money(run['usd'])} at 3 per GPU-hour (given)" in told
    assert "failures: one in" not in told


def test_tokens_of_a_model_without_tokens_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"mlp is not a language model, so its samples have no tokens; give training\.samples"
    ):
        parsim.plan("mlp", cluster="dgx1-v100-32gb", global_batch=64, tokens=1e9)


def test_a_batch_counted_in_tokens_is_refused_with_the_samples() -> None:
    message = r"training\.global_batch = 1000000 samples of 8192 tokens: 8\.19e\+09 tokens per step, .* give --batch 122$"
    with pytest.raises(ConfigError, match=message):
        parsim.plan("llama3-8b", cluster="8xh100-sxm", global_batch=1_000_000)


def test_the_default_failure_rate_is_one_in_three_hours_on_16384() -> None:
    assert pytest.approx(3.09, abs=0.01) == DEVICE_MTBF_HOURS / 16_384


@settings(max_examples=60, deadline=None)
@given(
    days=st.floats(1, 300), devices=st.integers(1, 20_000), hours=st.floats(1e4, 1e6), write=st.floats(1, 300),
    restart=st.floats(0, 3600),
)  # fmt: skip
def test_losses_follow_daly(days: float, devices: int, hours: float, write: float, restart: float) -> None:
    found = losses_of(days * DAY_S, devices, operation(hours * HOUR_S, write, restart))
    mtbf = hours * HOUR_S / devices
    assert found.machine_mtbf_s == pytest.approx(mtbf)
    assert 0 <= found.lost_fraction < 1 or math.isclose(found.lost_fraction, 1)
    assert found.young_s == pytest.approx(math.sqrt(2 * write * mtbf))
    assert found.failures == pytest.approx(found.days * DAY_S / mtbf)
    worse = losses_of(days * DAY_S, 2 * devices, operation(hours * HOUR_S, write, restart))
    assert worse.lost_fraction >= found.lost_fraction * (1 - 1e-9)


def test_the_interval_is_about_the_best() -> None:
    from parsim.engines.whole_run import expected_run_s

    own = operation(50_000 * HOUR_S, 60, 600)
    found = losses_of(60 * DAY_S, 16_384, own)
    times = [expected_run_s(60 * DAY_S, found.interval_s * factor, 60, 600, found.machine_mtbf_s) for factor in (0.7, 1, 1.4)]
    assert times[1] == min(times)


@pytest.mark.parametrize(("text", "value"), [("20%", 0.2), ("0.5", 0.5), (" 100% ", 1.0)])
def test_an_aim_is_a_share(text: str, value: float) -> None:
    assert parse_faster(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["fast", "-5%", "0", "nan", "20"])
def test_an_aim_that_cannot_be(text: str) -> None:
    """A percent sign is not guessed."""
    why = r"--faster '20' would be 2000%: write 20%, or a share such as 0.2" if text == "20" else "0.2"
    with pytest.raises(ConfigError, match=why):
        parse_faster(text)


@pytest.mark.slow
def test_more_gpus_are_as_many_as_the_batch_divides_over() -> None:
    """64 samples on 24 GPUs leave a third of them idle, so what more GPUs give is asked of 32."""
    keys = {"model.args.layers": 1, "plan.strategy": "dp", "plan.zero_stage": 3, "plan.recompute": "none"}
    for batch, gpus in ((64, "GPUs x 2 (32 GPUs)"), (48, "GPUs x 1.5 (24 GPUs)")):
        answer = parsim.plan(
            "llama3-8b",
            cluster="16xh100-sxm",
            network="infiniband-400g",
            global_batch=batch,
            settings={**keys, "model.args.seq": 512},
        )
        assert gpus in {change.what for change in what_would(answer, 0.2).changes}


def test_what_would_be_faster(answer: Answer) -> None:
    found = {change.what: change for change in what_would(answer, 0.2).changes}
    assert {"bandwidth inside nodes x 2", "memory of a GPU x 2", "global batch x 2"} <= set(found)
    inside = found["bandwidth inside nodes x 2"].faster
    assert inside is not None
    assert inside >= -1e-9
    assert all(change.reaches == (change.faster is not None and change.faster >= 0.2) for change in found.values())


def test_the_command_prints_and_returns_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "llama3-8b", "--gpus", "8xh100-sxm", "--batch", "16", "--seq", "1024", "--tokens", "1e9", "--json"]
    sets = [f"{key}={value}" for key, value in (DP | {"model.args.layers": 1, "cluster.usd_per_hour": 4}).items()]
    assert status_of(monkeypatch, *arguments, *(part for text in sets for part in ("--set", text))) == 0
    training = json.loads(capsys.readouterr().out)["quoted"]["training"]
    assert training["tokens"] == 1e9
    assert training["price_source"] == "given"
    assert training["usd_per_device_hour"] == 4
