"""Instance types of clouds: what each stands for, what it costs, and names that parsim does not cover."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from parsim.app.config import parse_config
from parsim.app.large import operation_of
from parsim.app.load import cluster_of
from parsim.app.question import question_of
from parsim.errors import ConfigError, MissingDependencyError, ProfileError
from parsim.hardware.compose import load_profile
from parsim.hardware.parts import clouds, instance_named, instance_names, load_gpu, load_network, machines_of, refresh


@pytest.mark.parametrize("name", instance_names())
def test_every_type_is_a_machine_of_shipped_parts(name: str) -> None:
    instance = instance_named(name)
    assert instance is not None
    assert len(load_profile(name).devices) == instance.sizes.gpus
    if instance.sizes.network is not None:
        load_network(instance.sizes.network)


@pytest.mark.parametrize("cloud", sorted(clouds()))
def test_prices_have_a_source_and_families_a_type(cloud: str) -> None:
    file = clouds()[cloud]
    assert set(file.families.values()) <= set(file.instances)
    if any(sizes.usd_per_hour for sizes in file.instances.values()):
        assert file.price_source
        assert file.priced_as_of


@pytest.mark.parametrize(
    ("text", "node", "nodes", "network"),
    [
        ("p5.48xlarge", "8xh100-sxm", 1, None),
        ("2xp5.48xlarge", "8xh100-sxm", 2, "efa-3200g"),
        ("p4d", "8xa100-sxm-40gb", 1, None),
        ("4xp4de.24xlarge", "8xa100-sxm-80gb", 4, "efa-400g"),
        ("ml.p5en.48xlarge", "8xh200", 1, None),
        ("2xa3-megagpu-8g", "8xh100-sxm", 2, "tcpxo-200g"),
        ("3xStandard_ND96isr_H100_v5", "8xh100-sxm", 3, "infiniband-400g"),
        ("2xnd96asr_v4", "8xa100-sxm-40gb", 2, "infiniband-200g"),
        ("Standard_NC96ads_A100_v4", "4xa100-pcie-80gb@nvlink-bridge-3", 1, None),
        ("2xBM.GPU.MI300X.8", "8xmi300x", 2, "roce-400g"),
        ("gpu_8x_h100_sxm5", "8xh100-sxm", 1, None),
        ("2xgd-8xh100ib-i128", "8xh100-sxm", 2, "infiniband-400g"),
        ("p3.16xlarge", "p3-16xlarge", 1, None),
    ],
)
def test_a_type_sets_gpus_links_and_network(text: str, node: str, nodes: int, network: str | None) -> None:
    question = question_of("llama3-8b", cluster=text, global_batch=64)
    assert (question.cluster.machine, question.cluster.nodes, question.cluster.network) == (node, nodes, network)
    assert cluster_of(question.cluster).size == nodes * machines_of(text).gpus_per_node


def test_the_price_is_that_of_the_type_and_says_of_when() -> None:
    """55.04 USD an hour for eight GPUs, in the catalogue that the file names."""
    question = question_of("llama3-8b", cluster="2xp5.48xlarge", global_batch=64)
    costs = operation_of(question, "h100-sxm")
    assert costs.usd_per_hour == pytest.approx(55.04 / 8)
    assert "p5.48xlarge" in costs.price_source
    assert "SkyPilot" in costs.price_source
    given = question_of("llama3-8b", cluster="p5.48xlarge", global_batch=64, settings={"cluster.usd_per_hour": 1.5})
    assert operation_of(given, "h100-sxm").usd_per_hour == 1.5
    assert operation_of(question_of("llama3-8b", cluster="p5e.48xlarge", global_batch=64), "h200").price_source.startswith(
        "on demand"
    )  # of the part


def test_a_network_given_beside_it_counts_more() -> None:
    question = question_of(
        "llama3-8b", cluster="2xStandard_ND40rs_v2", global_batch=64, overrides=['cluster.network="ethernet-25g"']
    )
    assert (question.cluster.network, question.cluster.cards_per_node) == ("ethernet-25g", None)


def test_a_run_file_with_a_type_is_read_again_as_it_was_written() -> None:
    text = '[model]\nname = "llama3-8b"\n[cluster]\ninstance = "P5"\nnodes = 2\n[training]\nglobal_batch = 64\n'
    question = parse_config(text)
    assert (question.cluster.instance, question.cluster.network) == ("p5.48xlarge", "efa-3200g")
    again = type(question.cluster).model_validate(question.cluster.model_dump())
    assert again == question.cluster


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2xa3-highgpu-8g", "TCPX"),
        ("2xgpu_8x_h100_sxm5", "infiniband-400g"),
        ("p5.48xlrge", "did you mean p5.48xlarge"),
        ("v5p-8", "TPUs of Google are not covered"),
        ("8xv6e", "TPUs of Google are not covered"),
        ("trn2.48xlarge", "Trainium"),
        ("8xgaudi3", "Gaudi"),
        ("m3-max", "Apple"),
        ("Standard_ND128isr_NDR_GB200_v6", "72xgb200"),
    ],
)
def test_what_is_not_covered_is_said_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises((ConfigError, ProfileError), match=said):
        cluster_of(question_of("llama3-8b", cluster=text, global_batch=64).cluster)


def test_one_machine_is_asked_for_where_two_cannot_be() -> None:
    with pytest.raises(ProfileError, match=r"2 machines.*p5\.48xlarge"):
        load_profile("2xp5.48xlarge")
    assert load_gpu("v100").name == "v100-sxm-32gb"  # no TPU


def test_newer_prices_are_kept_with_their_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARSIM_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with pytest.raises(MissingDependencyError, match="pip install gpuhunt"):
        refresh()
    offers = {
        "aws": [
            SimpleNamespace(instance_name="p5.48xlarge", price=40.0, location="us-east-1"),
            SimpleNamespace(instance_name="p5.48xlarge", price=30.0, location="ap-south-1"),
            SimpleNamespace(instance_name="t3.micro", price=0.01, location="us-east-1"),
        ]
    }
    catalogue = ModuleType("gpuhunt")
    monkeypatch.setattr(catalogue, "query", lambda provider, spot: offers.get(provider, []), raising=False)
    monkeypatch.setitem(sys.modules, "gpuhunt", catalogue)
    assert refresh() == 1
    found = instance_named("p5.48xlarge")
    assert found is not None
    assert found.usd_per_gpu_hour == 5.0
    assert "gpuhunt, 20" in found.price_source
    assert "us-east-1" in found.price_source
    kept = json.loads((tmp_path / "prices" / "clouds.json").read_text())
    assert set(kept) == {"p5.48xlarge"}


PRICE = {"usd_per_hour": 1.0, "region": "r", "as_of": "a"}


@pytest.mark.parametrize(
    "row",
    [
        *({"usd_per_hour": 1.0}, PRICE | {"usd_per_hour": "inf"}, PRICE | {"usd_per_hour": -1}),
        *([], None, PRICE | {"region": "\x1b[2J"}),
    ],
)
def test_damaged_newer_prices_are_refused(row: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARSIM_HOME", str(tmp_path))
    (tmp_path / "prices").mkdir()
    (tmp_path / "prices" / "clouds.json").write_text(json.dumps({"p5.48xlarge": row}))
    with pytest.raises(ProfileError, match=r"clouds\.json is damaged: .*--refresh"):
        instance_named("p5.48xlarge")
